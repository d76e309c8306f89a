use super::*;
use crate::gpu::trace::read::tests::shared_snapshots;
use crate::gpu::trace::{Limits, open};

#[test]
fn reports_of_recorded_files_add_up() {
    let Some(files) = shared_snapshots() else {
        println!("skipped: no shared data");
        return;
    };
    for file in files {
        let snapshot = open(&file, &Limits::default()).unwrap();
        let report = report(&snapshot, &ReplayOptions::default()).unwrap();
        let name = file.file_name().unwrap().to_string_lossy().into_owned();
        println!("=== {name}\n{}", report.text());
        assert!(report.exact, "{name}");
        let g = &report.fragmentation;
        assert_eq!(g.unallocated, g.pinned + g.idle + g.pending, "{name}");
        let segments: u64 = snapshot.segments_of(report.device).map(|segment| segment.total_size).sum();
        assert_eq!(report.end.reserved, segments, "{name}");
        if has_allocations(&snapshot, report.device) {
            assert_eq!(report.policy.evidence, Evidence::Traces, "{name}");
            assert!(!report.holders_at_peak.is_empty());
            let json = serde_json::to_value(&report).unwrap();
            assert_eq!(json["fidelity"]["addresses"], json["fidelity"]["addresses_exact"]);
            assert!(json["peak"]["reserved"]["bytes"].as_u64().unwrap() >= json["final"]["reserved"].as_u64().unwrap());
        }
    }
}
