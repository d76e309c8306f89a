//! `tare gpu selftest` against the fake driver libraries, on simulated cards, and on a machine without a GPU.

use serde_json::Value;

use crate::common::TestEnv;

/// A machine with the fake driver and these cards and faults.
fn fake(devices: &str, cuda: &str, nvml: &str) -> TestEnv {
    let env = TestEnv::new().with_fake_driver().var("TARE_FAKE_DEVICES", devices);
    let env = if cuda.is_empty() { env } else { env.var("TARE_FAKE_CUDA", cuda) };
    if nvml.is_empty() { env } else { env.var("TARE_FAKE_NVML", nvml) }
}

/// Exit code and the document.
fn selftest(env: &TestEnv, arguments: &[&str]) -> (i32, Value) {
    let ran = env.tare(&[&["gpu", "selftest", "--level", "quick", "--json"], arguments].concat());
    (ran.code, ran.json())
}

fn verdict(document: &Value) -> (&str, &str) {
    let card = &document["devices"][0];
    (document["status"].as_str().unwrap_or(""), card["cause"].as_str().unwrap_or(""))
}

#[test]
fn the_verdict_is_the_exit_code() {
    let cases = [
        ("", "", 0, 0, "pass", ""),
        ("stuck=0x900123:0x10:0x10", "", 6, 6, "fail", "stuck-bit"),
        ("alias=0x900000:0xC00000:0x1000", "", 6, 6, "fail", "aliased-addresses"),
        ("fail=cuLaunchKernel:54321@50", "", 6, 6, "fail", "driver-error"),
        ("leak=4MiB@100", "", 6, 6, "fail", "leak"),
        ("", "ecc=volatile.uncorrected:1@30", 6, 6, "fail", "ecc-errors"),
        ("", "xid=63@30", 6, 6, "fail", "xid"),
        ("oom=2MiB", "", 0, 8, "not-tested", "out-of-memory"),
        ("", "process=4000000:1MiB", 0, 8, "not-tested", "busy"),
    ];
    for (cuda, nvml, plain, required, status, cause) in cases {
        let env = fake("32MiB", cuda, nvml);
        let (code, document) = selftest(&env, &[]);
        assert_eq!((code, verdict(&document)), (plain, (status, cause)), "{cuda} {nvml}: {document:#}");
        assert_eq!(document["success"], code == 0, "{cuda} {nvml}");
        let (code, document) = selftest(&env, &["--require-gpu"]);
        assert_eq!(code, required, "{cuda} {nvml}: {document:#}");
    }
}

#[test]
fn a_code_that_nobody_knows_survives() {
    let (_, document) = selftest(&fake("32MiB", "fail=cuLaunchKernel:54321@50", ""), &[]);
    let finding = &document["devices"][0]["findings"][0];
    assert_eq!((&finding["call"], &finding["code"]), (&"cuLaunchKernel".into(), &54321.into()), "{finding:#}");
}

#[test]
fn several_cards_and_one_that_is_too_old() {
    let env = fake("32MiB;cc=9.0,48MiB;cc=8.0,32MiB;cc=3.5", "", "");
    let (code, document) = selftest(&env, &["--require-gpu"]);
    let of = |at: usize| (document["devices"][at]["device"].as_str(), document["devices"][at]["status"].as_str());
    assert_eq!(
        [of(0), of(1), of(2)],
        [(Some("cuda:0"), Some("pass")), (Some("cuda:1"), Some("pass")), (Some("cuda:2"), Some("not-tested"))]
    );
    assert_eq!(code, 8, "one of all cards was not tested");
    assert_eq!(selftest(&env, &["--device", "cuda:1", "--require-gpu"]).0, 0);
    env.tare(&["gpu", "selftest", "--device", "cuda:7"]).expect_code(2);
}

#[test]
fn a_simulated_card_needs_no_driver() {
    let env = TestEnv::new();
    env.tare(&["gpu", "selftest", "--level", "quick", "--device", "sim:64MiB"]).ok().stdout_has("sim:64MiB: PASS: ");
    let ran = env.tare(&["gpu", "selftest", "--level", "quick", "--device", "sim:64MiB,stuck=0x900003:2"]).expect_code(6);
    ran.stdout_has("bit 26 of the word at").stdout_has("hint: the card's memory is defective");
    for wrong in ["sim:64MiB,melt", "sim:1", "gpu0"] {
        env.tare(&["gpu", "selftest", "--device", wrong]).expect_code(2);
    }
    env.tare(&["gpu", "selftest", "--budget", "soon"]).expect_code(2);
}
