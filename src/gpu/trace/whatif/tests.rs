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

/// A segment of 20 MiB that is half in use when the recording begins and then filled, and one of 40 MiB that idles.
fn with_idle_cache(events: bool) -> Snapshot {
    const M: u64 = 1 << 20;
    let (first, second) = (0x1000_0000_u64, 0x2000_0000_u64);
    let used = |at: u64| serde_json::json!({"address": at, "size": 10 * M, "requested_size": 10 * M, "state": "active_allocated"});
    let segment = |at: u64, size: u64, live: u64, blocks: Vec<serde_json::Value>| {
        serde_json::json!({"device": 0, "address": at, "total_size": size, "allocated_size": live, "active_size": live, "stream": 0,
            "segment_type": "large", "blocks": blocks})
    };
    let idle = serde_json::json!({"address": second, "size": 40 * M, "requested_size": 0, "state": "inactive"});
    let event = serde_json::json!({"action": "alloc", "addr": first + 10 * M, "size": 10 * M, "stream": 0});
    let snapshot = serde_json::json!({
        "segments": [segment(first, 20 * M, 20 * M, vec![used(first), used(first + 10 * M)]), segment(second, 40 * M, 0, vec![idle])],
        "device_traces": [if events { vec![event] } else { Vec::new() }],
    });
    crate::gpu::trace::read_bytes(snapshot.to_string().as_bytes(), &Limits::default()).unwrap()
}

#[test]
fn an_idle_cache_larger_than_the_card_is_left_out_and_what_lives_is_impossible() {
    let snapshot = with_idle_cache(true);
    let ask = |mib: u64| {
        let confs = vec![" max_split_size_mb : 64 , ".to_owned(), String::new()];
        what_if(&snapshot, &WhatIfOptions { confs, capacity: Some(mib << 20), ..WhatIfOptions::default() }).unwrap()
    };
    let roomy = ask(100);
    assert_eq!((roomy.recorded.peak_reserved.max, roomy.recorded.ooms.max), (60 << 20, 0));
    assert!(!roomy.warnings.iter().any(|warning| warning.contains("idle")), "{:?}", roomy.warnings);
    let tight = ask(30);
    assert_eq!((tight.recorded.peak_reserved.max, tight.recorded.ooms.max), (20 << 20, 0));
    assert!(tight.text().contains("40.00 MiB of idle cache are left out"), "{}", tight.text());
    let impossible = ask(10);
    for result in impossible.results.iter().chain([&impossible.recorded]) {
        assert!(result.ooms.min > 0 && result.ran_out_in > 0, "{}", impossible.text());
        assert!(result.warnings.iter().any(|warning| warning.contains("impossible")), "{}", impossible.text());
    }
    assert!(impossible.recommendation.is_none());
    assert_eq!([impossible.results[0].conf.as_str(), impossible.results[1].conf.as_str()], ["max_split_size_mb:64", ""]);
    assert!(impossible.text().contains("  defaults\n"), "{}", impossible.text());
}

#[test]
fn without_events_nothing_is_predicted() {
    let report = what_if(&with_idle_cache(false), &WhatIfOptions { sweep: true, ..WhatIfOptions::default() }).unwrap();
    let text = report.text();
    assert!(text.contains("nothing to predict: the snapshot has no events") && !text.contains("peak reserved"), "{text}");
    assert!(report.no_recommendation.is_some());
}

#[test]
fn of_equal_gains_the_least_invasive_comes_first() {
    let report = what_if(&with_idle_cache(true), &WhatIfOptions { sweep: true, ..WhatIfOptions::default() }).unwrap();
    let limits: Vec<u64> =
        report.results.iter().filter(|r| r.gain == 0).filter_map(|r| r.conf.strip_prefix("max_split_size_mb:")?.parse().ok()).collect();
    assert_eq!(limits, [1024, 512, 256, 128, 64, 32]);
    assert!(report.text().contains("core rules verified by traces, settings asked about unverified"), "{}", report.text());
}
