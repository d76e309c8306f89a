//! The page: one HTML file with style, script and data inside; it asks nothing of the network.
//!
//! Lifetimes travel as base64 of LEB128 columns (about a dozen bytes for each block) and the page itself works out totals,
//! stacks and maps for whatever moment is asked for, so a recording of a million events stays a few megabytes.

use std::collections::HashMap;
use std::fmt::Write as _;

use serde::Serialize;
use serde_json::json;

use super::attribution::{Fate, Rounding};
use super::history::{self, History, NEVER};
use super::{DeviceSummary, Summary};
use crate::gpu::human;
use crate::gpu::trace::frames;
use crate::gpu::trace::model::{Action, FrameId, Names, Origin, SizeClass, Snapshot, StackId};
use crate::gpu::trace::whatif::{ConfResult, WhatIfReport};

const TEMPLATE: &str = include_str!("page.html");
const STYLE: &str = include_str!("page.css");
const SCRIPT: &str = include_str!("page.js");

/// How many segments the table of pins lists.
const PIN_ROWS: usize = 300;
/// Longest name that goes into the page, in characters; C++ template names can be kilobytes.
const NAME_LIMIT: usize = 400;

/// One row of the comparison of configurations; the first row is the baseline.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Comparison {
    /// The configuration line, or what it is called.
    pub label: String,
    /// Bytes.
    pub peak_reserved: Option<u64>,
    /// Bytes.
    pub peak_allocated: Option<u64>,
    /// Retries after a failed driver allocation.
    pub retries: Option<u64>,
    /// Whether the run gets to its end.
    pub completes: Option<bool>,
    /// The outcome in words, and what is uncertain about it.
    pub note: String,
}

impl Comparison {
    /// The rows for a what-if report: the recorded configuration in the model first, then the answers in their order. Where the
    /// order of driver addresses matters, the worst value stands in the columns and the best one in the note.
    pub fn rows(report: &WhatIfReport) -> Vec<Comparison> {
        let row = |result: &ConfResult, label: String| {
            let mut notes = Vec::new();
            match &result.ran_out {
                None => notes.push("completes".to_owned()),
                Some(out) => {
                    let when = out.event.map_or_else(|| "at the beginning".to_owned(), |event| format!("at event {event}"));
                    notes.push(format!("out of memory {when} in {} of {} orders", result.ran_out_in, report.orders.len()));
                }
            }
            if result.peak_reserved.min < result.peak_reserved.max {
                notes.push(format!("peak {} in the best order of addresses", human(result.peak_reserved.min)));
            }
            if !result.evidence.is_verified() {
                notes.push(result.evidence.to_string());
            }
            Comparison {
                label,
                peak_reserved: Some(result.peak_reserved.max),
                peak_allocated: Some(result.peak_allocated.max),
                retries: Some(result.retries.max),
                completes: Some(result.ran_out.is_none()),
                note: notes.join("; "),
            }
        };
        let named = |conf: &str| if conf.is_empty() { "(defaults)".to_owned() } else { conf.to_owned() };
        let mut rows = vec![row(&report.recorded, format!("as recorded: {}", named(&report.recorded.conf)))];
        if !report.baseline.exact {
            rows[0].note.push_str("; the model does not reproduce this recording exactly");
        }
        rows.extend(report.results.iter().map(|result| row(result, named(&result.conf))));
        rows
    }
}

/// Makes the page.
///
/// `title` is shown in the heading (the file's name). `summary` must come from the same snapshot. `compare` may be empty.
pub fn page(snapshot: &Snapshot, summary: &Summary, title: &str, compare: &[Comparison]) -> String {
    let rounding = Rounding::of(snapshot.settings.as_ref());
    let mut trie = Trie::new(&snapshot.names);
    let devices: Vec<serde_json::Value> =
        summary.devices.iter().map(|device| device_data(snapshot, device, &rounding, &mut trie)).collect();
    let mut notes = summary.notes.clone();
    if let Some(conf) = summary.conf.as_deref().filter(|conf| !conf.is_empty()) {
        notes.push(format!("recorded configuration: {conf}"));
    }
    let data = json!({
        "title": title,
        "generation": summary.generation,
        "notes": notes,
        "frames": trie.frames_json(),
        "trie": { "count": trie.nodes.len(), "nodes": trie.encode() },
        "stacks": trie.stacks_json(),
        "devices": devices,
        "compare": compare,
    });
    let mut out = String::new();
    let mut rest = TEMPLATE;
    // The parts are put in one after the other, so that nothing inside one of them is taken for a marker.
    for (marker, text) in [
        ("{{STYLE}}", STYLE.trim_end().to_owned()),
        ("{{DATA}}", script_safe(&data.to_string())),
        ("{{SCRIPT}}", SCRIPT.trim_end().to_owned()),
    ] {
        if let Some((before, after)) = rest.split_once(marker) {
            out.push_str(before);
            out.push_str(&text);
            rest = after;
        }
    }
    out.push_str(rest);
    out
}

/// JSON text that is safe inside a `<script>` element: nothing in it can end the element or begin a comment.
fn script_safe(json: &str) -> String {
    let mut out = String::with_capacity(json.len());
    for c in json.chars() {
        match c {
            '<' | '>' | '&' | '\u{2028}' | '\u{2029}' => {
                let _ = write!(out, "\\u{:04x}", c as u32);
            }
            c => out.push(c),
        }
    }
    out
}

fn put(out: &mut Vec<u8>, mut value: u64) {
    // The page reads numbers as doubles: more than 2^53 cannot be told apart there.
    value = value.min((1 << 53) - 1);
    while value >= 128 {
        out.push((value & 127) as u8 | 128);
        value >>= 7;
    }
    out.push(value as u8);
}

fn base64(bytes: &[u8]) -> String {
    const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut out = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for chunk in bytes.chunks(3) {
        let word = u32::from(chunk[0]) << 16 | u32::from(*chunk.get(1).unwrap_or(&0)) << 8 | u32::from(*chunk.get(2).unwrap_or(&0));
        for k in 0..4 {
            if k <= chunk.len() {
                out.push(ALPHABET[(word >> (18 - 6 * k) & 63) as usize] as char);
            } else {
                out.push('=');
            }
        }
    }
    out
}

/// The stacks as a tree from the outermost frame inwards, with only the frames that occur.
struct Trie<'n> {
    names: &'n Names,
    /// (parent, frame); node 0 is the root.
    nodes: Vec<(u32, u32)>,
    children: HashMap<(u32, u32), u32>,
    frames: HashMap<FrameId, u32>,
    frame_list: Vec<FrameId>,
    stacks: HashMap<StackId, u32>,
    /// node, user frame + 1, operation frame + 1.
    rows: Vec<(u32, u32, u32)>,
}

impl<'n> Trie<'n> {
    fn new(names: &'n Names) -> Self {
        Trie {
            names,
            nodes: vec![(0, 0)],
            children: HashMap::new(),
            frames: HashMap::new(),
            frame_list: Vec::new(),
            stacks: HashMap::new(),
            rows: Vec::new(),
        }
    }

    fn frame(&mut self, id: FrameId) -> u32 {
        *self.frames.entry(id).or_insert_with(|| {
            self.frame_list.push(id);
            self.frame_list.len() as u32 - 1
        })
    }

    /// The row of a stack + 1; 0 for the empty stack.
    fn stack(&mut self, id: StackId) -> u32 {
        if id.is_empty() {
            return 0;
        }
        if let Some(row) = self.stacks.get(&id) {
            return row + 1;
        }
        let mut node = 0;
        let names = self.names;
        for frame in names.stack(id).iter().rev() {
            let frame = self.frame(*frame);
            let next = self.nodes.len() as u32;
            node = *self.children.entry((node, frame)).or_insert_with(|| {
                self.nodes.push((node, frame));
                next
            });
        }
        let user = frames::holder(self.names, id).map_or(0, |frame| self.frame(frame) + 1);
        let operation = frames::operation(self.names, id).map_or(0, |frame| self.frame(frame) + 1);
        let row = self.rows.len() as u32;
        self.rows.push((node, user, operation));
        self.stacks.insert(id, row);
        row + 1
    }

    fn encode(&self) -> String {
        let mut out = Vec::new();
        for (at, (parent, frame)) in self.nodes.iter().enumerate() {
            put(&mut out, at as u64 - u64::from(*parent));
            put(&mut out, u64::from(*frame));
        }
        base64(&out)
    }

    fn frames_json(&self) -> Vec<serde_json::Value> {
        self.frame_list
            .iter()
            .map(|id| {
                let frame = self.names.frame(*id);
                let flags = match self.names.origin(*id) {
                    Origin::Native => 0,
                    Origin::Library => 3,
                    Origin::User => 1,
                };
                json!([cap(self.names.text(frame.name)), cap(self.names.text(frame.file)), frame.line, flags])
            })
            .collect()
    }

    fn stacks_json(&self) -> serde_json::Value {
        let mut out = Vec::new();
        for (node, user, operation) in &self.rows {
            put(&mut out, u64::from(*node));
            put(&mut out, u64::from(*user));
            put(&mut out, u64::from(*operation));
        }
        json!({ "count": self.rows.len(), "rows": base64(&out) })
    }
}

fn cap(text: &str) -> String {
    if text.chars().count() <= NAME_LIMIT {
        return text.to_owned();
    }
    let mut short: String = text.chars().take(NAME_LIMIT - 1).collect();
    short.push('…');
    short
}

fn index_of<T: PartialEq + Copy>(list: &mut Vec<T>, value: T) -> u64 {
    let at = list.iter().position(|known| *known == value).unwrap_or_else(|| {
        list.push(value);
        list.len() - 1
    });
    at as u64
}

fn device_data(snapshot: &Snapshot, device: &DeviceSummary, rounding: &Rounding, trie: &mut Trie<'_>) -> serde_json::Value {
    let trace = snapshot.trace(device.device);
    let history = history::rebuild(snapshot, device.device, rounding);
    let base = history.segments.iter().map(|life| life.address).chain(history.blocks.iter().map(|life| life.address)).min().unwrap_or(0);
    let mut streams: Vec<u64> = vec![0];
    let mut pools: Vec<(u64, u64)> = vec![(0, 0)];
    let mut rows = Vec::new();
    for life in &history.segments {
        put(&mut rows, life.address - base);
        put(&mut rows, life.size);
        put(&mut rows, index_of(&mut streams, life.stream));
        put(&mut rows, u64::from(life.class == SizeClass::Small) | u64::from(life.expandable) << 1);
        put(&mut rows, index_of(&mut pools, life.pool));
        put(&mut rows, u64::from(life.from));
        put(&mut rows, if life.until == NEVER { 0 } else { u64::from(life.until - life.from) });
    }
    let segments = json!({ "count": history.segments.len(), "rows": base64(&rows) });
    let pieces = pieces(&history);
    let unit = if pieces.iter().all(|piece| piece.offset % 512 == 0 && piece.size % 512 == 0) { 512 } else { 1 };
    let mut rows = Vec::new();
    let mut previous = 0;
    for piece in &pieces {
        let life = &history.blocks[piece.block];
        put(&mut rows, u64::from(life.from - previous));
        previous = life.from;
        put(&mut rows, piece.segment.map_or(0, |at| at as u64 + 1));
        // Without a segment the offset counts from the lowest address.
        put(&mut rows, piece.segment.map_or(life.address - base, |_| piece.offset) / unit);
        put(&mut rows, piece.size / unit);
        put(&mut rows, piece.slack);
        // A release at the moment of birth (before the recording) cannot be told from none: it counts from the next moment.
        let released = life.released.max(life.from + 1);
        if life.released == NEVER && life.until == NEVER {
            put(&mut rows, 0);
            put(&mut rows, 0);
        } else {
            let released = if life.released == NEVER { life.until } else { released.min(life.until) };
            put(&mut rows, u64::from(released - life.from));
            put(&mut rows, if life.until == NEVER { 0 } else { u64::from(life.until - released) + 1 });
        }
        put(&mut rows, u64::from(trie.stack(life.stack)));
        put(&mut rows, index_of(&mut streams, life.stream));
    }
    let blocks = json!({ "count": pieces.len(), "unit": unit, "rows": base64(&rows) });
    let first = trace.iter().find_map(|entry| entry.time());
    let times = first.filter(|_| trace.iter().all(|entry| entry.time().is_some())).map(|first| {
        let mut out = Vec::new();
        let mut last = first;
        for entry in trace {
            let change = entry.time_us.saturating_sub(last);
            last = entry.time_us;
            put(&mut out, ((change << 1) ^ (change >> 63)) as u64);
        }
        base64(&out)
    });
    let split: Vec<_> = device.split.parts().iter().map(|(key, label, bytes)| json!([key, label, bytes])).collect();
    let mut pinned: Vec<_> = device.segments.iter().filter(|segment| matches!(segment.fate, Fate::Pinned | Fate::Pending)).collect();
    pinned.sort_by_key(|segment| std::cmp::Reverse(segment.split.pinned + segment.split.expandable_rest));
    let pins: Vec<_> = pinned
        .iter()
        .take(PIN_ROWS)
        .map(|segment| {
            let what = if segment.live_blocks == 1 { "1 block".to_owned() } else { format!("{} blocks", segment.live_blocks) };
            let mut by: Vec<String> = segment
                .pinned_by
                .iter()
                .take(3)
                .map(|block| format!("{} {}", human(block.size), cap(block.allocated_at.as_deref().unwrap_or("(no frames recorded)"))))
                .collect();
            if segment.live_blocks > by.len() {
                by.push(format!("and {} more", segment.live_blocks - by.len()));
            }
            json!([
                segment.address,
                segment.size,
                segment.size - segment.live_bytes.min(segment.size),
                format!("{} in {what}", human(segment.live_bytes)),
                by.join("; ")
            ])
        })
        .collect();
    let mut lines = vec![format!(
        "empty_cache() would return {} now and leave {} free but pinned.",
        human(device.empty_cache.returns),
        human(device.empty_cache.stays)
    )];
    if pinned.len() > PIN_ROWS {
        lines.push(format!("The table of pins shows {PIN_ROWS} of {} segments.", pinned.len()));
    }
    let ooms: Vec<_> =
        trace.iter().enumerate().filter(|(_, entry)| entry.action == Action::Oom).map(|(at, entry)| json!([at, entry.size])).collect();
    let marks: Vec<_> = device
        .timeline
        .iter()
        .flat_map(|timeline| &timeline.annotations)
        .map(|mark| json!([mark.event.map_or(0, |event| event + 1), mark.name]))
        .collect();
    json!({
        "id": device.device,
        "events": history.events,
        "base": base.to_string(),
        "capacity": device.outside.total,
        "streams": streams.iter().map(|stream| format!("{stream:#x}")).collect::<Vec<_>>(),
        "pools": pools.iter().map(|(a, b)| format!("{a}.{b}")).collect::<Vec<_>>(),
        "segments": segments,
        "blocks": blocks,
        "times": times,
        "split": split,
        "lines": lines,
        "pins": pins,
        "ooms": ooms,
        "marks": marks,
        "notes": device.notes,
    })
}

/// A block, or the part of it that lies in one mapped range of an expandable segment.
struct Piece {
    block: usize,
    segment: Option<usize>,
    offset: u64,
    size: u64,
    slack: u64,
}

/// Finds the segment of every block. A block over several mapped ranges becomes several pieces.
fn pieces(history: &History) -> Vec<Piece> {
    // Segments by address; several may have had the same address at different moments.
    let mut order: Vec<usize> = (0..history.segments.len()).collect();
    order.sort_by_key(|at| (history.segments[*at].address, history.segments[*at].from));
    // The furthest end of any segment up to here: how far back a search must go.
    let mut reach: Vec<u64> = Vec::with_capacity(order.len());
    for at in &order {
        let life = &history.segments[*at];
        reach.push((life.address + life.size).max(reach.last().copied().unwrap_or(0)));
    }
    let mut out = Vec::with_capacity(history.blocks.len());
    for (block, life) in history.blocks.iter().enumerate() {
        let end = life.address.saturating_add(life.size);
        let mut found: Vec<Piece> = Vec::new();
        let mut k = order.partition_point(|at| history.segments[*at].address < end);
        while k > 0 && reach[k - 1] > life.address {
            k -= 1;
            let segment = &history.segments[order[k]];
            let (from, to) = (segment.address.max(life.address), (segment.address + segment.size).min(end));
            // The segment must be there when the block is born; a map just after its birth belongs to the next one.
            if from < to && segment.from <= life.from && segment.until > life.from {
                found.push(Piece { block, segment: Some(order[k]), offset: from - segment.address, size: to - from, slack: 0 });
                if !segment.expandable {
                    break;
                }
            }
        }
        if found.is_empty() {
            found.push(Piece { block, segment: None, offset: 0, size: life.size, slack: 0 });
        }
        found.reverse();
        let slack = life.size.saturating_sub(life.requested);
        if let Some(last) = found.last_mut() {
            last.slack = slack.min(last.size);
        }
        out.append(&mut found);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base64_is_the_standard_one() {
        for (plain, coded) in
            [("", ""), ("f", "Zg=="), ("fo", "Zm8="), ("foo", "Zm9v"), ("foob", "Zm9vYg=="), ("fooba", "Zm9vYmE="), ("foobar", "Zm9vYmFy")]
        {
            assert_eq!(base64(plain.as_bytes()), coded);
        }
    }

    #[test]
    fn nothing_in_the_data_can_end_its_element() {
        let text = script_safe(&serde_json::to_string("</script><!--<script>&\u{2028}").unwrap());
        assert!(!text.contains(['<', '>', '&', '\u{2028}']));
        let back: String = serde_json::from_str(&text).unwrap();
        assert_eq!(back, "</script><!--<script>&\u{2028}");
    }
}
