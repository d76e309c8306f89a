//! `tare gpu`: recorded snapshots and scenarios.

use crate::common::{TestEnv, shared_data};

#[test]
fn a_recording_replays_exactly_and_tells_its_story() {
    let Some(data) = shared_data() else { return };
    let env = TestEnv::new();
    let file = data.join("snapshots/train-step-ctx128-emptied.pickle");
    let file = file.to_str().unwrap();
    let report = env.tare(&["gpu", "replay", "--json", file]).ok().json();
    let fidelity = &report["fidelity"];
    for what in ["addresses", "segment_allocs", "segment_frees"] {
        assert!(fidelity[what].as_u64().unwrap() > 0, "{fidelity}");
        assert_eq!(fidelity[what], fidelity[format!("{what}_exact")], "{what}: {fidelity}");
    }
    assert!(report["peak"].is_object() && report["policy"].is_object());
    env.tare(&["gpu", "replay", file]).ok().stdout_has("fidelity: exact");

    let report = env.tare(&["gpu", "whatif", "--json", file, "--conf", "expandable_segments:True", "--capacity", "24GiB"]).ok().json();
    assert_eq!(report["baseline"]["exact"], true);
    assert_eq!(report["results"].as_array().unwrap().len(), 1);
    env.tare(&["gpu", "whatif", file, "--capacity", "plenty"]).expect_code(2).stderr_has("24GiB");
    env.tare(&["gpu", "whatif", file, "--conf", "expandable_segment:True"]).expect_code(2).stderr_has("expandable_segments");

    env.tare(&["gpu", "summary", file, "--html", "page.html"]).ok().stdout_has("GiB");
    let page = std::fs::read_to_string(env.work().join("page.html")).unwrap();
    assert!(page.starts_with("<!doctype html>") && !page.contains("http://") && !page.contains("https://"));
    env.tare(&["gpu", "replay", "--device", "7", file]).expect_code(2).stderr_has("device 7");
}

#[test]
fn files_that_are_no_snapshot_are_refused() {
    let env = TestEnv::new();
    env.write("empty.pickle", "");
    // What pickle would call: os.system("id").
    env.write("evil.pickle", b"\x80\x02cos\nsystem\nX\x02\x00\x00\x00id\x85R.");
    env.write("text.json", "{\"segments\": 3}");
    env.write("cut.pickle", b"\x80\x04\x95\x10\x00");
    for name in ["empty.pickle", "evil.pickle", "text.json", "cut.pickle", "missing.pickle", "."] {
        for command in ["replay", "whatif", "summary"] {
            let ran = env.tare(&["gpu", command, name]);
            assert!((1..=2).contains(&ran.code) && ran.stderr.starts_with("error: "), "{command} {name}: {} {}", ran.code, ran.stderr);
        }
    }
    env.tare(&["gpu", "replay", "evil.pickle"]).expect_code(1).stderr_has("GLOBAL");
    // A snapshot whose figures are impossible: the file and the place in it are named.
    let block = r#"{"address": 4096, "size": 2097152, "requested_size": 9, "state": "inactive"}"#;
    let segment =
        format!(r#"{{"device": 0, "address": 4096, "total_size": 256, "stream": 0, "segment_type": "large", "blocks": [{block}]}}"#);
    env.write("small.json", format!(r#"{{"segments": [{segment}], "device_traces": [[]]}}"#));
    for command in ["replay", "whatif"] {
        env.tare(&["gpu", command, "small.json"])
            .expect_code(1)
            .stderr_has("cannot use the snapshot `small.json`")
            .stderr_has("the segment at 0x1000 has 256 bytes, and its blocks have 2097152");
    }
    env.tare(&["gpu", "summary", "small.json"]).ok().stdout_has("the file is damaged");
}

#[test]
fn the_scenarios_that_ship_come_out_as_they_say() {
    let env = TestEnv::new();
    for name in ["two-models", "notebook", "serving"] {
        env.tare(&["gpu", "simulate", name]).ok().stdout_has("expandable_segments:True");
    }
    let json = env.tare(&["gpu", "simulate", "two-models", "--json", "--html", "two.html"]).ok().json();
    assert_eq!(json["success"], true);
    assert!(env.work().join("two.html").exists());
    let shown = env.tare(&["gpu", "simulate", "two-models", "--show"]).ok().stdout;
    env.write("mine.toml", shown.replace("[device]", "[devcie]"));
    env.tare(&["gpu", "simulate", "mine.toml"]).expect_code(2).stderr_has("mine.toml:").stderr_has("device");
    env.tare(&["gpu", "simulate", "no-such"]).expect_code(2).stderr_has("two-models");
}
