//! Whether the figures of a snapshot agree with each other. PyTorch writes segments whose blocks cover them exactly, and whose sums are
//! those of the blocks; a file in which that does not hold was damaged or changed by hand, and what is told from it is a guess.

use super::model::{BlockState, Segment, Snapshot};

/// Kinds of contradictions.
const KINDS: usize = 6;

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
