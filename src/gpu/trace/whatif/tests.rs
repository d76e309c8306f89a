use super::*;
use crate::gpu::trace::read::tests::shared_snapshots;
use crate::gpu::trace::report::has_allocations;
use crate::gpu::trace::{Limits, open};

#[test]
fn baselines_of_recorded_traces_are_exact() {
    let Some(files) = shared_snapshots() else {
        println!("skipped: no shared data");
        return;
    };
    for file in files {
        let snapshot = open(&file, &Limits::default()).unwrap();
        let name = file.file_name().unwrap().to_string_lossy().into_owned();
        let options = WhatIfOptions {
            confs: vec!["expandable_segments:True".into(), "max_split_size_mb:128".into()],
            // Short traces only: a debug build is slow.
            sweep: name.contains("tiny"),
            ..WhatIfOptions::default()
        };
        let report = what_if(&snapshot, &options).unwrap();
        println!("=== {name}\n{}", report.text());
        if has_allocations(&snapshot, report.device) {
            assert!(report.baseline.exact, "{name}: {}", report.baseline.explanation);
        } else {
            assert!(report.recommendation.is_none());
        }
        serde_json::to_string(&report).unwrap();
    }
}
