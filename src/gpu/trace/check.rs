//! Whether the figures of a snapshot agree with each other. PyTorch writes segments whose blocks cover them exactly, and whose sums are
//! those of the blocks; a file in which that does not hold was damaged or changed by hand, and what is told from it is a guess.

use super::model::{Action, BlockState, Segment, Snapshot};
use crate::error::{Error, Result};

/// Kinds of contradictions.
const KINDS: usize = 6;

/// More bytes than any card has, and still far from where sums of 64 bits end.
const ABSURD: u64 = 1 << 46;
/// Addresses above it belong to no program.
const TOP: u64 = 1 << 63;

/// Refuses what cannot be reckoned with: sizes that no card has, addresses that no program has, segments smaller than their blocks. Lesser damage is
/// told by [`contradictions`].
///
/// # Errors
/// The first such thing, with its address or its number.
pub fn possible(snapshot: &Snapshot, device: u32) -> Result<()> {
    let refuse = |why: String| Error::failure("the recorded state is impossible").because(why).hint("the file is damaged: record it again");
    let real = |address: u64, size: u64| size < ABSURD && address < TOP;
    for segment in snapshot.segments_of(device) {
        let at = segment.address;
        if !real(at, segment.total_size) {
            return Err(refuse(format!("the segment at {at:#x} is said to have {} bytes", segment.total_size)));
        }
        let parts = [("allocated", segment.allocated_size), ("active", segment.active_size), ("requested", segment.requested_size)];
        if let Some((what, bytes)) = parts.into_iter().find(|(_, bytes)| !real(0, *bytes)) {
            return Err(refuse(format!("the segment at {at:#x} is said to have {bytes} {what} bytes")));
        }
        let mut sum = 0u64;
        for block in &segment.blocks {
            if !real(block.address, block.size) {
                return Err(refuse(format!("the block at {:#x} of the segment at {at:#x} has {} bytes", block.address, block.size)));
            }
            if !real(0, block.requested_size) {
                let (address, asked) = (block.address, block.requested_size);
                return Err(refuse(format!("for the block at {address:#x} of the segment at {at:#x} {asked} bytes were asked")));
            }
            sum = sum.saturating_add(block.size);
        }
        if sum > segment.total_size {
            return Err(refuse(format!("the segment at {at:#x} has {} bytes, and its blocks have {sum}", segment.total_size)));
        }
    }
    let sum = snapshot.segments_of(device).fold(0u64, |sum, segment| sum.saturating_add(segment.total_size));
    if sum >= ABSURD {
        return Err(refuse(format!("its segments have {sum} bytes in all")));
    }
    let entries = usize::try_from(device).ok().and_then(|device| snapshot.traces.get(device)).map_or(&[][..], Vec::as_slice);
    for (number, entry) in entries.iter().enumerate() {
        // A program may ask for anything; what it did not get has no address.
        let asked = matches!(entry.action, Action::Oom);
        if !asked && !real(entry.addr, entry.size) {
            return Err(refuse(format!("event {number} is about {} bytes at {:#x}", entry.size, entry.addr)));
        }
    }
    Ok(())
}

/// What contradicts itself in the segments of a device, one sentence for each kind; empty for a sound file.
///
/// Files without `requested_size`, `allocated_size` or `active_size` (the reader gives 0) are not judged by those.
pub fn contradictions(snapshot: &Snapshot, device: u32) -> Vec<String> {
    let mut found: [(u64, u64); KINDS] = [(0, 0); KINDS];
    let mut tell = |kind: usize, address: u64| {
        if found[kind].0 == 0 {
            found[kind].1 = address;
        }
        found[kind].0 += 1;
    };
    let mut segments: Vec<&Segment> = snapshot.segments_of(device).collect();
    segments.sort_by_key(|segment| (segment.address, segment.total_size));
    let mut reach: Option<u64> = None;
    for (at, segment) in segments.iter().enumerate() {
        if at > 0 && segments[at - 1].address == segment.address && segments[at - 1].total_size == segment.total_size {
            tell(0, segment.address);
        } else if reach.is_some_and(|reach| segment.address < reach) {
            tell(1, segment.address);
        }
        let end = segment.address.saturating_add(segment.total_size);
        reach = reach.max(Some(end));
        let (mut next, mut outside, mut absurd) = (segment.address, false, false);
        let (mut sum, mut allocated, mut active) = (0u64, 0u64, 0u64);
        for block in &segment.blocks {
            outside |= block.address != next || block.address.checked_add(block.size).is_none_or(|stop| stop > end);
            next = block.address.saturating_add(block.size);
            sum = sum.saturating_add(block.size);
            if block.state == BlockState::ActiveAllocated {
                allocated = allocated.saturating_add(block.size);
            }
            if block.state != BlockState::Inactive {
                active = active.saturating_add(block.size);
                absurd |= block.requested_size > block.size;
            }
        }
        if sum != segment.total_size {
            tell(2, segment.address);
        } else if outside {
            tell(3, segment.address);
        }
        if absurd {
            tell(4, segment.address);
        }
        let differs = |told: u64, counted: u64| told != counted && told != 0;
        if differs(segment.allocated_size, allocated) || differs(segment.active_size, active) {
            tell(5, segment.address);
        }
    }
    let what: [(&str, &str); KINDS] = [
        ("segment stands in it twice", "segments stand in it twice"),
        ("segment overlaps the one before it", "segments overlap the ones before them"),
        ("segment has blocks whose sizes do not sum to its own", "segments have blocks whose sizes do not sum to their own"),
        ("segment has blocks outside of it or with gaps between them", "segments have blocks outside of them or with gaps between them"),
        ("segment has a block that is smaller than what was asked for", "segments have blocks that are smaller than what was asked for"),
        ("segment has a wrong sum of allocated or active bytes", "segments have wrong sums of allocated or active bytes"),
    ];
    what.iter()
        .zip(found)
        .filter(|(_, (count, _))| *count > 0)
        .map(|((one, many), (count, address))| match count {
            1 => format!("the file is damaged: 1 {one} ({address:#x})"),
            _ => format!("the file is damaged: {count} {many} (first {address:#x})"),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::trace::read::tests::shared_snapshots;
    use crate::gpu::trace::{Limits, open, read_bytes};

    fn read(segments: &str) -> Snapshot {
        read_bytes(format!("{{\"segments\": [{segments}], \"device_traces\": []}}").as_bytes(), &Limits::default()).unwrap()
    }

    fn segment(address: u64, size: u64, allocated: u64, requested: u64) -> String {
        format!(
            r#"{{"device": 0, "address": {address}, "total_size": {size}, "allocated_size": {allocated}, "active_size": {allocated},
            "stream": 0, "segment_type": "large", "blocks": [
            {{"address": {address}, "size": 1024, "requested_size": {requested}, "state": "active_allocated"}},
            {{"address": {}, "size": 1024, "requested_size": 0, "state": "inactive"}}]}}"#,
            address + 1024
        )
    }

    #[test]
    fn what_cannot_be_reckoned_with_is_refused() {
        let told = |text: &str| {
            let snapshot = read_bytes(text.as_bytes(), &Limits::default()).unwrap();
            possible(&snapshot, 0).err().map(|error| error.causes()[0].to_string()).unwrap_or_default()
        };
        let good = format!("{{\"segments\": [{}], \"device_traces\": [[]]}}", segment(4096, 2048, 1024, 1000));
        assert_eq!(told(&good), "");
        assert_eq!(
            told(&good.replace("\"total_size\": 2048", "\"total_size\": 1024")),
            "the segment at 0x1000 has 1024 bytes, and its blocks have 2048"
        );
        assert_eq!(told(&good.replace("\"total_size\": 2048,", "")), "the segment at 0x1000 has 0 bytes, and its blocks have 2048");
        assert_eq!(
            told(&good.replace("\"requested_size\": 1000", &format!("\"requested_size\": {}", u64::MAX))),
            format!("for the block at 0x1000 of the segment at 0x1000 {} bytes were asked", u64::MAX)
        );
        assert_eq!(
            told(&good.replace("\"active_size\": 1024", &format!("\"active_size\": {}", u64::MAX))),
            format!("the segment at 0x1000 is said to have {} active bytes", u64::MAX)
        );
        let huge = format!("\"total_size\": {}", u64::MAX);
        assert_eq!(told(&good.replace("\"total_size\": 2048", &huge)), format!("the segment at 0x1000 is said to have {} bytes", u64::MAX));
        let far =
            good.replace("[[]]", &format!("[[{{\"action\": \"alloc\", \"addr\": {}, \"size\": 4096, \"stream\": 0}}]]", u64::MAX - 100));
        assert_eq!(told(&far), format!("event 0 is about 4096 bytes at {:#x}", u64::MAX - 100));
    }

    /// Numbers of a sound file replaced by others: an answer or an error, and never a panic (the tests look for overflows).
    #[test]
    fn damaged_numbers_are_answers_or_errors() {
        let events: Vec<String> = (0..12)
            .map(|n| {
                format!(
                    "{{\"action\": \"{}\", \"addr\": {}, \"size\": 512, \"stream\": 0}}",
                    ["alloc", "free_requested", "free_completed"][n % 3],
                    5120 + n / 3 * 512
                )
            })
            .collect();
        let text = format!("{{\"segments\": [{}], \"device_traces\": [[{}]]}}", segment(4096, 2048, 1024, 1000), events.join(","));
        let numbers: Vec<(usize, usize)> = {
            let bytes = text.as_bytes();
            let mut found = Vec::new();
            let mut at = 0;
            while at < bytes.len() {
                let len = bytes[at..].iter().take_while(|byte| byte.is_ascii_digit()).count();
                if len > 0 {
                    found.push((at, len));
                }
                at += len.max(1);
            }
            found
        };
        let others = ["0", "1", "512", "4096", "5119", "1099511627776", "9223372036854775807", "18446744073709551615"];
        for (at, len) in numbers {
            for other in others {
                let damaged = format!("{}{other}{}", &text[..at], &text[at + len..]);
                let Ok(snapshot) = read_bytes(damaged.as_bytes(), &Limits::default()) else { continue };
                let _ = crate::gpu::trace::report::report(&snapshot, &Default::default());
                let _ = crate::gpu::trace::whatif::what_if(&snapshot, &Default::default());
            }
        }
    }

    #[test]
    fn each_kind_of_damage_is_told() {
        let told = |segments: &[String]| contradictions(&read(&segments.join(",")), 0).join("; ");
        assert_eq!(told(&[segment(4096, 2048, 1024, 1000)]), "");
        assert_eq!(
            told(&[segment(4096, 2048, 1024, 1000), segment(4096, 2048, 1024, 1000)]),
            "the file is damaged: 1 segment stands in it twice (0x1000)"
        );
        assert_eq!(
            told(&[segment(4096, 2048, 1024, 1000), segment(5120, 2048, 1024, 1000)]),
            "the file is damaged: 1 segment overlaps the one before it (0x1400)"
        );
        assert_eq!(
            told(&[segment(4096, 4096, 1024, 1000)]),
            "the file is damaged: 1 segment has blocks whose sizes do not sum to its own (0x1000)"
        );
        assert_eq!(
            told(&[segment(4096, 2048, 1024, 1 << 50)]),
            "the file is damaged: 1 segment has a block that is smaller than what was asked for (0x1000)"
        );
        assert_eq!(
            told(&[segment(4096, 2048, 512, 1000)]),
            "the file is damaged: 1 segment has a wrong sum of allocated or active bytes (0x1000)"
        );
        let outside = segment(4096, 2048, 1024, 1000).replace("\"address\": 5120", "\"address\": 9000");
        assert_eq!(told(&[outside]), "the file is damaged: 1 segment has blocks outside of it or with gaps between them (0x1000)");
    }

    #[test]
    fn a_file_that_contradicts_itself_is_not_exact() {
        let good = read(&segment(4096, 2048, 1024, 1000));
        let bad = read(&segment(4096, 2048, 512, 1000));
        let report = |snapshot: &Snapshot| crate::gpu::trace::report::report(snapshot, &Default::default()).unwrap();
        assert!(report(&good).exact);
        let report = report(&bad);
        assert!(!report.exact);
        assert!(report.text().contains("fidelity: NOT exact, the file contradicts itself"), "{}", report.text());
        assert!(report.text().contains("the file is damaged"));
        let summary = crate::gpu::summary::summarise(&bad, &Default::default());
        assert!(summary.devices[0].notes.iter().any(|note| note.contains("damaged")));
    }

    #[test]
    fn recorded_files_are_sound() {
        let Some(files) = shared_snapshots() else {
            println!("skipped: no shared data");
            return;
        };
        for file in files {
            let snapshot = open(&file, &Limits::default()).unwrap();
            for device in snapshot.devices() {
                assert_eq!(contradictions(&snapshot, device), Vec::<String>::new(), "{}", file.display());
            }
        }
    }
}
