//! The contents of an allocator snapshot, as `torch.cuda.memory._dump_snapshot` writes it.
//!
//! All sizes are bytes, all addresses are device addresses, all times are microseconds since the Unix epoch. Strings, frames and
//! stacks are interned in [`Names`] and named by small ids, because a snapshot repeats the same few stacks millions of times.

use std::fmt;
use std::hash::{BuildHasher, Hash, RandomState};

use indexmap::IndexSet;

/// An interned string of a [`Names`]; 0 is the empty string.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct StrId(pub u32);

/// An interned frame of a [`Names`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FrameId(pub u32);

/// An interned stack (innermost frame first) of a [`Names`]; 0 is the empty stack.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct StackId(pub u32);

impl StrId {
    /// The empty string.
    pub const EMPTY: StrId = StrId(0);
}

impl StackId {
    /// The stack without frames: nothing was recorded.
    pub const EMPTY: StackId = StackId(0);
    /// Whether nothing was recorded.
    pub fn is_empty(self) -> bool {
        self == Self::EMPTY
    }
}

/// One call frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Frame {
    /// Function name.
    pub name: StrId,
    /// File name; `??` for C++ code without debug information.
    pub file: StrId,
    /// 1-based line, 0 where unknown.
    pub line: u32,
}

/// A keyed multiply-and-fold hash: several times faster than SipHash on the long lists of frame ids that a snapshot is made of.
#[derive(Clone, Copy)]
struct Fold {
    seed: u64,
}

impl Fold {
    fn new() -> Self {
        Fold { seed: RandomState::new().hash_one(0x7461_7265_u32) | 1 }
    }

    fn hash(self, words: &[u32]) -> u64 {
        let mut state = self.seed ^ (words.len() as u64);
        for pair in words.chunks(2) {
            let word = u64::from(pair[0]) | (u64::from(*pair.get(1).unwrap_or(&0)) << 32);
            let wide = u128::from(state ^ word).wrapping_mul(0x9E37_79B9_7F4A_7C15_F39C_0C2B_2D6F_4A35_u128 | 1);
            state = (wide as u64) ^ ((wide >> 64) as u64) ^ self.seed.rotate_left(23);
        }
        state ^ (state >> 29)
    }
}

/// The interned strings, frames and stacks of a snapshot.
pub struct Names {
    strings: IndexSet<Box<str>>,
    frames: IndexSet<Frame>,
    /// Frames of all stacks, one after the other.
    stack_data: Vec<FrameId>,
    /// End of each stack in `stack_data`.
    stack_ends: Vec<usize>,
    /// Open-addressing table: stack id + 1, 0 for free.
    stack_table: Vec<u32>,
    stack_hashes: Vec<u64>,
    fold: Fold,
}

impl Default for Names {
    fn default() -> Self {
        let mut names = Names {
            strings: IndexSet::new(),
            frames: IndexSet::new(),
            stack_data: Vec::new(),
            stack_ends: Vec::new(),
            stack_table: vec![0; 64],
            stack_hashes: Vec::new(),
            fold: Fold::new(),
        };
        names.intern("");
        names.intern_stack(&[]);
        names
    }
}

impl fmt::Debug for Names {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Names")
            .field("strings", &self.strings.len())
            .field("frames", &self.frames.len())
            .field("stacks", &self.stack_ends.len())
            .finish()
    }
}

impl Names {
    /// The id of `text`, added where new.
    pub fn intern(&mut self, text: &str) -> StrId {
        if let Some(at) = self.strings.get_index_of(text) {
            return StrId(at as u32);
        }
        StrId(self.strings.insert_full(text.into()).0 as u32)
    }

    /// The id of a frame, added where new.
    pub fn intern_frame(&mut self, frame: Frame) -> FrameId {
        FrameId(self.frames.insert_full(frame).0 as u32)
    }

    /// The id of a stack (innermost frame first), added where new.
    pub fn intern_stack(&mut self, frames: &[FrameId]) -> StackId {
        // FrameId is a plain u32; hashing goes over a small copy to stay free of unsafe code.
        let mut buffer = [0_u32; 128];
        let hash = if frames.len() <= buffer.len() {
            for (slot, frame) in buffer.iter_mut().zip(frames) {
                *slot = frame.0;
            }
            self.fold.hash(&buffer[..frames.len()])
        } else {
            let words: Vec<u32> = frames.iter().map(|frame| frame.0).collect();
            self.fold.hash(&words)
        };
        let mask = self.stack_table.len() - 1;
        let mut at = (hash as usize) & mask;
        loop {
            let slot = self.stack_table[at];
            if slot == 0 {
                break;
            }
            let id = StackId(slot - 1);
            if self.stack_hashes[id.0 as usize] == hash && self.stack(id) == frames {
                return id;
            }
            at = (at + 1) & mask;
        }
        let id = StackId(self.stack_ends.len() as u32);
        self.stack_data.extend_from_slice(frames);
        self.stack_ends.push(self.stack_data.len());
        self.stack_hashes.push(hash);
        self.stack_table[at] = id.0 + 1;
        if self.stack_ends.len() * 2 > self.stack_table.len() {
            let mut table = vec![0_u32; self.stack_table.len() * 4];
            let mask = table.len() - 1;
            for (index, hash) in self.stack_hashes.iter().enumerate() {
                let mut at = (*hash as usize) & mask;
                while table[at] != 0 {
                    at = (at + 1) & mask;
                }
                table[at] = index as u32 + 1;
            }
            self.stack_table = table;
        }
        id
    }

    /// The text of a string; empty for an id of another `Names`.
    pub fn text(&self, id: StrId) -> &str {
        self.strings.get_index(id.0 as usize).map_or("", |text| text)
    }

    /// The id of a string that is already here.
    pub fn find(&self, text: &str) -> Option<StrId> {
        self.strings.get_index_of(text).map(|at| StrId(at as u32))
    }

    /// A frame by id.
    pub fn frame(&self, id: FrameId) -> Frame {
        self.frames.get_index(id.0 as usize).copied().unwrap_or(Frame { name: StrId::EMPTY, file: StrId::EMPTY, line: 0 })
    }

    /// The frames of a stack, innermost first.
    pub fn stack(&self, id: StackId) -> &[FrameId] {
        let at = id.0 as usize;
        let Some(&end) = self.stack_ends.get(at) else { return &[] };
        let start = if at == 0 { 0 } else { self.stack_ends[at - 1] };
        &self.stack_data[start..end]
    }

    /// Number of distinct frames; ids are `0..frames()`.
    pub fn frame_count(&self) -> usize {
        self.frames.len()
    }

    /// Number of distinct stacks; ids are `0..stacks()`, 0 is the empty one.
    pub fn stack_count(&self) -> usize {
        self.stack_ends.len()
    }

    /// Number of distinct strings.
    pub fn string_count(&self) -> usize {
        self.strings.len()
    }

    /// `name (file:line)`, or `name` alone for code without a file.
    pub fn describe(&self, id: FrameId) -> String {
        let frame = self.frame(id);
        let (name, file) = (self.text(frame.name), self.text(frame.file));
        match (file, frame.line) {
            ("" | "??", _) => name.to_string(),
            (file, 0) => format!("{name} ({file})"),
            (file, line) => format!("{name} ({file}:{line})"),
        }
    }

    /// Whose code a frame is, judged by its file name.
    pub fn origin(&self, id: FrameId) -> Origin {
        let file = self.text(self.frame(id).file);
        let generated = file.starts_with('<') && !file.starts_with("<frozen") && !file.starts_with("<built");
        if !(file.ends_with(".py") || generated || file.contains("ipykernel") || file.contains("ipython-input")) {
            return Origin::Native;
        }
        const LIBRARY: [&str; 7] = ["site-packages", "dist-packages", "/torch/", "\\torch\\", "lib/python3", "\\Lib\\", "<eval_with_key>"];
        if LIBRARY.iter().any(|part| file.contains(part)) { Origin::Library } else { Origin::User }
    }
}

/// Whose code a frame is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin {
    /// C++ or the interpreter itself.
    Native,
    /// Python code of an installed package.
    Library,
    /// Other Python code.
    User,
}

/// Which layout a snapshot has, oldest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Generation {
    /// torch 2.0: blocks carry `history` and no address.
    V0,
    /// Blocks carry `address` and `frames`; no `allocator_settings`.
    V1,
    /// With `allocator_settings` (and times in the trace).
    V2,
    /// With `external_annotations`.
    V3,
    /// With `host_segments` or `host_traces` (torch 2.15).
    V4,
}

/// Which of the two size classes a segment belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum SizeClass {
    /// Blocks of at most 1 MiB, in segments of 2 MiB.
    Small,
    /// Everything else.
    Large,
}

/// The id of a memory pool; (0, 0) is the default one.
pub type PoolId = (u64, u64);

/// One range that the allocator got from the driver (for an expandable segment: one contiguous mapped range).
#[derive(Debug, Clone, PartialEq)]
pub struct Segment {
    /// Device ordinal.
    pub device: u32,
    /// First address.
    pub address: u64,
    /// Bytes.
    pub total_size: u64,
    /// Bytes of blocks that are handed out.
    pub allocated_size: u64,
    /// As `allocated_size`, plus blocks whose free still waits for a stream.
    pub active_size: u64,
    /// Bytes that were asked for.
    pub requested_size: u64,
    /// The stream (a pointer; 0 is the default stream).
    pub stream: u64,
    /// Small or large pool.
    pub class: SizeClass,
    /// The pool; (0, 0) where the file does not say.
    pub pool_id: PoolId,
    /// Whether it is part of an expandable segment.
    pub expandable: bool,
    /// Where it was made.
    pub stack: StackId,
    /// The blocks in address order, without gaps.
    pub blocks: Vec<Block>,
}

/// State of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum BlockState {
    /// Handed out.
    ActiveAllocated,
    /// Freed by the program, but another stream may still use it.
    ActivePendingFree,
    /// Free.
    Inactive,
}

/// A part of a segment.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Block {
    /// First address.
    pub address: u64,
    /// Bytes.
    pub size: u64,
    /// Bytes that were asked for; stale where the block is inactive.
    pub requested_size: u64,
    /// State.
    pub state: BlockState,
    /// Where it was (last) allocated.
    pub stack: StackId,
}

/// What a trace entry tells.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Action {
    /// A block was handed out; `size` is what was asked for.
    Alloc,
    /// The program gave a block back; `size` is what was asked for.
    FreeRequested,
    /// The block is free (at once, or after the events of other streams).
    FreeCompleted,
    /// A segment came from the driver.
    SegmentAlloc,
    /// A segment went back to the driver.
    SegmentFree,
    /// Memory was mapped into an expandable segment.
    SegmentMap,
    /// Memory was unmapped from an expandable segment.
    SegmentUnmap,
    /// A snapshot was taken; `size` is the active total.
    Snapshot,
    /// An allocation failed; `size` is the block size asked for, `addr` holds the free memory of the device.
    Oom,
    /// A mark of the program (torch 2.15).
    Annotate,
    /// An action that this version of the reader does not know; named in [`Snapshot::warnings`].
    Other,
}

impl Action {
    /// The name in the file.
    pub fn name(self) -> &'static str {
        match self {
            Action::Alloc => "alloc",
            Action::FreeRequested => "free_requested",
            Action::FreeCompleted => "free_completed",
            Action::SegmentAlloc => "segment_alloc",
            Action::SegmentFree => "segment_free",
            Action::SegmentMap => "segment_map",
            Action::SegmentUnmap => "segment_unmap",
            Action::Snapshot => "snapshot",
            Action::Oom => "oom",
            Action::Annotate => "annotate",
            Action::Other => "other",
        }
    }
}

/// One event of a device's trace.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TraceEntry {
    /// Address; for [`Action::Oom`] the device's free bytes (`device_free`).
    pub addr: u64,
    /// Bytes: what was asked for (alloc, free), or the segment's size.
    pub size: u64,
    /// The stream (a pointer; 0 is the default stream).
    pub stream: u64,
    /// Microseconds since the epoch, [`TraceEntry::NO_TIME`] where the file has none; see [`TraceEntry::time`].
    pub time_us: i64,
    /// Where it happened, innermost frame first.
    pub stack: StackId,
    /// The forward frames (torch 2.15), empty otherwise.
    pub forward_stack: StackId,
    /// Index into [`Snapshot::pools`], [`TraceEntry::NO_POOL`] where the file does not say.
    pub pool: u32,
    /// `compile_context`.
    pub compile_context: StrId,
    /// `user_metadata`.
    pub user_metadata: StrId,
    /// `internal_metadata`.
    pub internal_metadata: StrId,
    /// What happened.
    pub action: Action,
}

impl TraceEntry {
    /// `time_us` of an entry without time.
    pub const NO_TIME: i64 = i64::MIN;
    /// `pool` of an entry without pool.
    pub const NO_POOL: u32 = u32::MAX;

    /// An entry with everything unknown.
    pub fn new(action: Action, addr: u64, size: u64, stream: u64) -> Self {
        TraceEntry {
            addr,
            size,
            stream,
            time_us: Self::NO_TIME,
            stack: StackId::EMPTY,
            forward_stack: StackId::EMPTY,
            pool: Self::NO_POOL,
            compile_context: StrId::EMPTY,
            user_metadata: StrId::EMPTY,
            internal_metadata: StrId::EMPTY,
            action,
        }
    }

    /// The time, where recorded.
    pub fn time(&self) -> Option<i64> {
        (self.time_us != Self::NO_TIME).then_some(self.time_us)
    }
}

/// Whether an annotation opens or closes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum Stage {
    /// Begins.
    Start,
    /// Ends.
    End,
    /// Neither.
    Other,
}

/// One of `external_annotations`: a named span's begin or end.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Annotation {
    /// Begin or end.
    pub stage: Stage,
    /// Name.
    pub name: StrId,
    /// Device ordinal, -1 where not told.
    pub device: i64,
    /// Microseconds since the epoch, [`TraceEntry::NO_TIME`] where the file has none.
    pub time_us: i64,
}

/// `allocator_settings`: the configuration of the recorded process.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Settings {
    /// The last configuration string (`PYTORCH_CUDA_ALLOC_CONF`).
    pub conf: String,
    /// Bytes; `None`: unlimited (-1 in the file).
    pub max_split_size: Option<u64>,
    /// 0: off.
    pub garbage_collection_threshold: f64,
    /// Expandable segments on.
    pub expandable_segments: bool,
    /// (start of the interval in MiB, divisions; 0 is off), in file order.
    pub roundup_power2_divisions: Vec<(u64, u64)>,
    /// Everything as it stands in the file.
    pub raw: serde_json::Map<String, serde_json::Value>,
}

/// A whole snapshot.
#[derive(Debug)]
pub struct Snapshot {
    /// Which layout the file has.
    pub generation: Generation,
    /// All segments at the moment of the snapshot, of every device, in file order.
    pub segments: Vec<Segment>,
    /// The events, oldest first; the index is the device.
    pub traces: Vec<Vec<TraceEntry>>,
    /// `allocator_settings`, where present.
    pub settings: Option<Settings>,
    /// `external_annotations`.
    pub annotations: Vec<Annotation>,
    /// The distinct pool ids that occur; [`TraceEntry::pool`] is an index.
    pub pools: IndexSet<PoolId>,
    /// Strings, frames, stacks.
    pub names: Names,
    /// `host_segments` and `host_traces` items (pinned memory of the host; torch 2.15): counted, not interpreted.
    pub host_items: u64,
    /// What the reader did not know or had to assume; each once with a count.
    pub warnings: Vec<String>,
    /// Bytes of the file.
    pub bytes_read: u64,
}

impl Snapshot {
    /// A snapshot with nothing in it.
    pub fn empty(generation: Generation) -> Self {
        Snapshot {
            generation,
            segments: Vec::new(),
            traces: Vec::new(),
            settings: None,
            annotations: Vec::new(),
            pools: IndexSet::new(),
            names: Names::default(),
            host_items: 0,
            warnings: Vec::new(),
            bytes_read: 0,
        }
    }

    /// The devices that have segments or events, ascending.
    pub fn devices(&self) -> Vec<u32> {
        let mut devices: Vec<u32> = self.segments.iter().map(|segment| segment.device).collect();
        devices.extend(self.traces.iter().enumerate().filter(|(_, trace)| !trace.is_empty()).map(|(device, _)| device as u32));
        devices.sort_unstable();
        devices.dedup();
        devices
    }

    /// The events of a device, oldest first.
    pub fn trace(&self, device: u32) -> &[TraceEntry] {
        self.traces.get(device as usize).map_or(&[], Vec::as_slice)
    }

    /// The segments of a device, in file order.
    pub fn segments_of(&self, device: u32) -> impl Iterator<Item = &Segment> {
        self.segments.iter().filter(move |segment| segment.device == device)
    }

    /// The pool of an entry, where recorded.
    pub fn pool_of(&self, entry: &TraceEntry) -> Option<PoolId> {
        self.pools.get_index(entry.pool as usize).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stacks_and_frames_are_stored_once() {
        let mut names = Names::default();
        let file = names.intern("a.py");
        let mut frames = Vec::new();
        for line in 0..300 {
            let name = names.intern("f");
            frames.push(names.intern_frame(Frame { name, file, line }));
        }
        let mut ids = Vec::new();
        for length in 0..300 {
            ids.push(names.intern_stack(&frames[..length]));
        }
        for (length, id) in ids.iter().enumerate() {
            assert_eq!(names.intern_stack(&frames[..length]), *id);
            assert_eq!(names.stack(*id), &frames[..length]);
        }
        assert_eq!(ids[0], StackId::EMPTY);
        assert_eq!(names.stack_count(), 300);
        assert_eq!(names.stack(StackId(9999)), &[]);
    }
}
