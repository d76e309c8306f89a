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
        ("init=36", "", 6, 6, "fail", "driver-error"),
        ("init=4711", "", 6, 6, "fail", "driver-error"),
        ("init=3", "", 0, 8, "not-tested", ""),
        ("init=100", "", 0, 8, "not-tested", ""),
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
    // What the process of the test does is shown here.
    env.tare(&["gpu", "selftest", "--level", "quick", "--device", "cuda:1"]).ok().stderr_has("cuda:1: passes over the memory (36)");
    env.tare(&["gpu", "selftest", "--device", "cuda:7"]).expect_code(2);
}

#[test]
fn a_simulated_card_needs_no_driver() {
    let env = TestEnv::new();
    env.tare(&["gpu", "selftest", "--level", "quick", "--device", "sim:64MiB"]).ok().stdout_has("sim:64MiB: PASS: ");
    let ran = env.tare(&["gpu", "selftest", "--level", "quick", "--device", "sim:64MiB,stuck=0x900003:2"]).expect_code(6);
    let ran = ran.stdout_has("bit 26 of the word at").stdout_has("hint: the card is simulated");
    assert!(!ran.stdout.contains("warranty") && !ran.stdout.contains("nvidia-smi"), "{}", ran.stdout);
    // Beside FAIL stands what went wrong, not how it should be.
    ran.stdout_has("  FAIL        checkerboard         1 wrong word\n");
    for wrong in ["sim:64MiB,melt", "sim:1", "gpu0"] {
        env.tare(&["gpu", "selftest", "--device", wrong]).expect_code(2);
    }
    env.tare(&["gpu", "selftest", "--budget", "soon"]).expect_code(2);
}

#[test]
fn a_driver_that_hangs_or_crashes_is_a_failure_with_its_call() {
    let cases = [
        ("hang=cuMemAlloc@2", "", "timeout", "cuMemAlloc"),
        ("hang=cuInit", "", "timeout", "cuInit"),
        ("hang=cuMemcpyDtoH@9", "", "timeout", "cuMemcpyDtoH"),
        ("crash=cuMemFree", "", "driver-error", "cuMemFree"),
        ("crash=cuInit", "", "driver-error", "cuInit"),
        ("crash=cuCtxSetCurrent@9", "", "driver-error", "cuCtxSetCurrent"),
        ("crash=cuModuleUnload", "", "driver-error", "cuModuleUnload"),
        ("", "crash=nvmlInit", "driver-error", "NVML (starting)"),
        ("", "crash=nvmlDeviceGetHandleByUUID", "driver-error", "NVML (finding the card)"),
        ("", "hang=nvmlDeviceGetTotalEccErrors@2", "timeout", "NVML (error counters)"),
    ];
    for (cuda, nvml, cause, call) in cases {
        let started = std::time::Instant::now();
        let (code, document) = selftest(&fake("32MiB", cuda, nvml), &["--call-limit", "1s"]);
        assert_eq!((code, verdict(&document)), (6, ("fail", cause)), "{cuda} {nvml}: {document:#}");
        let finding = &document["devices"][0]["findings"][0];
        assert_eq!(finding["call"], call, "{cuda} {nvml}: {finding:#}");
        let text = finding["text"].as_str().unwrap();
        let library = if call.starts_with("NVML") { "the driver's management library" } else { "the driver" };
        let expected = if cause == "timeout" { "did not come back from" } else { "crashed in `" };
        assert!(text.starts_with(&format!("{library} {expected}")), "{text}");
        assert!(started.elapsed().as_secs() < 20, "{cuda} {nvml}: {:?}", started.elapsed());
    }
    // A fault that does not exist is refused, and loudly.
    for wrong in ["skip=tare_exchange", "fail=cuMemAlocc:2", "hang=nothing", "melt=1", "skip=5/tare_fill", "oom=1MiB:2"] {
        let (code, document) = selftest(&fake("32MiB", wrong, ""), &[]);
        let text = document["devices"][0]["findings"][0]["text"].as_str().unwrap_or_default().to_owned();
        assert!(code == 6 && text.contains("fake driver: ") && text.contains("SIGABRT"), "{wrong}: {document:#}");
    }
}

#[test]
fn every_error_that_a_call_returns_is_told() {
    // Function, code, how often it fails and from which call on, whether it belongs to giving everything back.
    let cases = [
        ("once=cuCtxSynchronize:719", "cuCtxSynchronize", 719, false),
        ("once=cuCtxSynchronize:719@2", "cuCtxSynchronize", 719, false),
        ("fail=cuModuleUnload:999", "cuModuleUnload", 999, true),
        ("once=cuDevicePrimaryCtxRelease:4711", "cuDevicePrimaryCtxRelease", 4711, true),
        ("fail=cuStreamDestroy:400", "cuStreamDestroy", 400, true),
        ("once=cuCtxSetCurrent:201@40", "cuCtxSetCurrent", 201, false),
        ("once=cuDeviceGetAttribute:999@3", "cuDeviceGetAttribute", 999, false),
        ("once=cuDriverGetVersion:999", "cuDriverGetVersion", 999, false),
        ("once=cuMemCreate:999", "cuMemCreate", 999, false),
        ("once=cuMemGetInfo:999", "cuMemGetInfo", 999, false),
        // Taken is refused with such a code, and not given back.
        ("once=cuMemRelease:800", "cuMemRelease", 800, false),
        ("once=cuDeviceGetCount:101", "cuDeviceGetCount", 101, false),
    ];
    for (fault, call, code, teardown) in cases {
        let (exit, document) = selftest(&fake("16MiB", fault, ""), &[]);
        assert_eq!((exit, verdict(&document)), (6, ("fail", "driver-error")), "{fault}: {document:#}");
        let card = &document["devices"][0];
        let findings = card["findings"].as_array().unwrap();
        assert!(findings.iter().any(|finding| finding["call"] == call && finding["code"] == code), "{fault}: {findings:#?}");
        if teardown {
            let step = card["steps"].as_array().unwrap().iter().find(|step| step["name"] == "teardown").unwrap();
            assert_eq!(step["status"], "fail", "{fault}: {step:#}");
        }
    }
    // What every call gives, once, wherever it comes.
    for at in [7, 60, 400, 900] {
        let (exit, document) = selftest(&fake("16MiB", &format!("once=*:999@{at}"), ""), &[]);
        assert_eq!((exit, document["status"].as_str()), (6, Some("fail")), "{at}: {document:#}");
    }
}

#[test]
fn the_budget_is_kept_by_a_card_whose_events_are_late() {
    for late in [400, 5000] {
        let started = std::time::Instant::now();
        let (code, document) = selftest(&fake("32MiB", &format!("late={late}"), ""), &["--budget", "2s"]);
        assert_eq!((code, verdict(&document)), (6, ("fail", "late-events")), "{document:#}");
        assert!(started.elapsed().as_secs() < 7, "{late}: {:?}", started.elapsed());
        let steps = document["devices"][0]["steps"].as_array().unwrap();
        let step = |name: &str| steps.iter().find(|step| step["name"] == name).map(|step| (step["status"].clone(), step["cause"].clone()));
        assert_eq!(step("random"), Some(("not-tested".into(), "budget".into())), "{late}: {document:#}");
    }
}

#[test]
fn a_signal_ends_the_test_and_its_process() {
    use std::process::Stdio;
    let env = fake("32MiB", "hang=cuMemAlloc", "");
    for (signal, code) in
        [(rustix::process::Signal::TERM, Some(130)), (rustix::process::Signal::INT, Some(130)), (rustix::process::Signal::KILL, None)]
    {
        let mut child = env.command(&["gpu", "selftest"]).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        // The process of the test may be a child of any thread.
        let tree = |pid: u32| -> Vec<String> {
            let threads = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
            threads
                .flat_map(|thread| {
                    let text = std::fs::read_to_string(thread.path().join("children")).unwrap_or_default();
                    text.split_whitespace().map(str::to_owned).collect::<Vec<_>>()
                })
                .collect()
        };
        let started = std::time::Instant::now();
        let mut found = tree(child.id());
        while found.len() < 2 {
            assert!(started.elapsed().as_secs() < 30, "the process of the test did not start");
            std::thread::sleep(std::time::Duration::from_millis(20));
            found = tree(child.id());
        }
        // It is in the call by now, or soon.
        std::thread::sleep(std::time::Duration::from_millis(300));
        let pid = rustix::process::Pid::from_raw(i32::try_from(child.id()).unwrap()).unwrap();
        rustix::process::kill_process(pid, signal).unwrap();
        assert_eq!(child.wait().unwrap().code(), code, "{signal:?}");
        let started = std::time::Instant::now();
        let alive = |pid: &String| {
            std::fs::read_to_string(format!("/proc/{pid}/stat"))
                .is_ok_and(|text| !text.rsplit(')').next().unwrap_or("").trim().starts_with('Z'))
        };
        while found.iter().any(alive) {
            assert!(started.elapsed().as_secs() < 5, "{signal:?}: {found:?} are still there");
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
    }
}

#[test]
fn what_cannot_be_is_refused_and_addresses_are_explained() {
    let env = TestEnv::new();
    env.tare(&["gpu", "selftest", "--device", "sim:64MiB,others=1TiB"])
        .expect_code(2)
        .stderr_has("a card of 64MiB cannot be like that: others would hold 1.00 TiB")
        .stderr_has("hint: `others` and `busy` together are at most the size of the card");
    env.tare(&["gpu", "selftest", "--device", "sim:64MiB,alias=0:0"])
        .expect_code(2)
        .stderr_has("0x0 and 0x0 lie in one unit of memory (2.00 MiB), which always answers for itself");
    env.tare(&["gpu", "selftest", "--level", "quick", "--device", "sim:64MiB,stuck=0x900003:2"])
        .expect_code(6)
        .stdout_has("addresses are virtual, as this process saw the memory")
        .stdout_has("those of `--device sim:` are physical, in the card");
    // A stub of the toolkit is no driver.
    let ran = fake("32MiB", "init=34", "").tare(&["gpu", "selftest"]).ok();
    ran.stdout_has("NOT TESTED: a stub library, not a driver: `").stdout_has("out of LD_LIBRARY_PATH");
}

/// Numbers that look random, the same in every run.
fn number(seed: &mut u64) -> u64 {
    *seed = seed.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let mut z = *seed;
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// Forty faults and more for cards of 32 MiB: fake CUDA, fake NVML, verdict, cause.
fn planted() -> Vec<(String, String, &'static str, &'static str)> {
    let mut seed = 0xFA57;
    let mut list = Vec::new();
    let cuda = |fault: String, cause| (fault, String::new(), "fail", cause);
    let nvml = |fault: &str, cause| (String::new(), fault.to_owned(), "fail", cause);
    // Past the granules of the context and of the test's own words, before the reserve.
    let place = |seed: &mut u64| (6 << 20) + number(seed) % (18 << 20);
    for _ in 0..10 {
        let (at, bit, launch) = (place(&mut seed), 1 << (number(&mut seed) % 8), number(&mut seed) % 200);
        let value = if number(&mut seed).is_multiple_of(2) { bit } else { 0 };
        list.push(cuda(format!("stuck={at:#x}:{bit:#x}:{value:#x}@{launch}"), "stuck-bit"));
    }
    for _ in 0..6 {
        // A flip before the word is written again is not seen: nine of them, spread over the run.
        let flips: Vec<String> = (0..9)
            .map(|part| {
                let launch = 130 + 47 * part + number(&mut seed) % 40;
                format!("flip={:#x}:{:#x}@{launch}", place(&mut seed), 1 << (number(&mut seed) % 8))
            })
            .collect();
        list.push(cuda(flips.join(","), "flipped-bit"));
    }
    for _ in 0..6 {
        let from = place(&mut seed) & !0xFFFF;
        let beside = ((from - (6 << 20)) + (1 << 20) + number(&mut seed) % (12 << 20)) % (18 << 20);
        let to = (6 << 20) + (beside & !0xFFFF);
        list.push(cuda(format!("alias={from:#x}:{to:#x}:{:#x}", 4096 << (number(&mut seed) % 4)), "aliased-addresses"));
    }
    for (function, code) in [
        ("cuLaunchKernel", 719),
        ("cuLaunchKernel", 4_000_000_001u64),
        ("cuEventQuery", 700),
        ("cuMemcpyDtoH", 214),
        ("cuMemAlloc", 999),
        ("cuEventRecord", 54_321),
        ("cuModuleLoadData", 218),
        ("cuMemFree", 719),
    ] {
        let nth = if function.contains("Module") { 1 } else { 1 + number(&mut seed) % 3 };
        list.push(cuda(format!("fail={function}:{code}@{nth}"), "driver-error"));
    }
    list.push(cuda("late=2".into(), "late-events"));
    list.push(cuda("skip=tare_verify".into(), "kernels"));
    list.push(cuda("skip=tare_fill".into(), "kernels"));
    list.push(cuda("skip=tare_copy".into(), "kernels"));
    list.push(cuda("skip=tare_read".into(), "kernels"));
    list.push(cuda("skip=tare_modulo_fill".into(), "kernels"));
    list.push(cuda("skip=tare_modulo_verify".into(), "kernels"));
    list.push(cuda("skip=tare_verify_write".into(), "kernels"));
    list.push(cuda(format!("leak=4MiB@{}", 80 + number(&mut seed) % 100), "leak"));
    for fault in ["ecc=volatile.corrected:3@40", "ecc=aggregate.uncorrected:1@90"] {
        list.push(nvml(fault, "ecc-errors"));
    }
    list.push(nvml("remap=1:0:0:0@60", "rows-remapped"));
    list.push(nvml("remap=0:0:1:0", "rows-remapped"));
    for xid in [48, 63, 94] {
        list.push(nvml(&format!("xid={xid}@70"), "xid"));
    }
    list.push(("oom=8MiB".into(), String::new(), "not-tested", "out-of-memory"));
    list.push((String::new(), "process=4000000:4MiB".into(), "not-tested", "busy"));
    list.push(("init=100".into(), String::new(), "not-tested", ""));
    list.push(("version=11040".into(), String::new(), "not-tested", ""));
    list.push(("no-vmm".into(), String::new(), "pass", ""));
    list
}

#[test]
#[ignore = "two minutes: run it with `cargo test --test it -- --ignored selftest_at_length`"]
fn selftest_at_length_forty_faults_and_two_hundred_sound_runs() {
    let list = planted();
    assert!(list.len() >= 40, "{}", list.len());
    let mut wrong = Vec::new();
    for (cuda, nvml, status, cause) in &list {
        let (code, document) = selftest(&fake("32MiB", cuda, nvml), &["--require-gpu"]);
        let right = match *status {
            "fail" => 6,
            "pass" => 0,
            _ => 8,
        };
        if (code, verdict(&document)) != (right, (status, cause)) {
            wrong.push(format!(
                "{cuda} {nvml}: {code} {:?}, not {status} {cause}: {:#}",
                verdict(&document),
                document["devices"][0]["findings"]
            ));
        }
    }
    for run in 0..200 {
        let env = fake(&format!("{}MiB", [16, 24, 32, 40][run % 4]), "", "");
        let segments = [&[][..], &["--native"], &["--expandable"]][run % 3];
        let (code, document) = selftest(&env, &[segments, &["--require-gpu", "--seed", &run.to_string()]].concat());
        if code != 0 {
            wrong.push(format!("sound run {run}: {code} {:?} {}", verdict(&document), document["devices"][0]["summary"]));
        }
    }
    assert!(wrong.is_empty(), "{} wrong\n{}", wrong.len(), wrong.join("\n"));
}
