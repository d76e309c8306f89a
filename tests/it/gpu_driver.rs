//! `tare gpu info` and `tare gpu top` against the fake driver libraries, and without any.

use crate::common::terminal::program;
use crate::common::{TestEnv, fakes};

/// A machine without a driver: whatever the real one has is not found by these names.
fn without_driver() -> TestEnv {
    let env = TestEnv::new();
    let folder = env.path().join("driver");
    std::fs::create_dir(&folder).unwrap();
    // Libraries that cannot be loaded come first.
    for name in ["libcuda.so", "libnvidia-ml.so", "libnvidia-ml.so.1"] {
        std::fs::write(folder.join(name), "no library").unwrap();
    }
    env.var("LD_LIBRARY_PATH", folder.display().to_string())
}

/// What a real driver of the machine adds is no matter of these tests.
fn has_real_driver() -> bool {
    let real = ["/proc/driver/nvidia/version", "/sys/module/nvidia/version"].iter().any(|path| std::path::Path::new(path).exists());
    if real {
        eprintln!("skipped in part: this machine has an NVIDIA driver");
    }
    real
}

#[test]
fn a_machine_without_a_gpu_is_told_so_calmly() {
    if has_real_driver() {
        return;
    }
    let env = without_driver();
    let ran = env.tare(&["gpu", "info"]).ok();
    insta::assert_snapshot!(ran.stdout, @r"
    no NVIDIA GPU was found on this machine

    driver
      kernel module   not loaded
      NVML            NVIDIA's management library (libnvidia-ml.so.1) cannot be loaded
      libcuda         the CUDA driver library (libcuda.so) cannot be loaded
    ");
    assert!(!ran.stderr.contains("warning") && !ran.stderr.contains("error"), "{}", ran.stderr);
    let json = env.tare(&["gpu", "info", "--json"]).ok().json();
    assert_eq!((&json["success"], &json["cards"]), (&true.into(), &serde_json::json!([])));
    env.tare(&["gpu", "top"]).ok().stdout_has("no NVIDIA GPU to look at");
    assert_eq!(env.tare(&["gpu", "top", "--json"]).ok().json()["cards"], serde_json::json!([]));
}

#[test]
fn every_card_is_shown_with_what_each_library_says_of_it() {
    let env = TestEnv::new()
        .with_fake_driver()
        .var("TARE_FAKE_DEVICES", "96MiB;name=Big;cc=9.0;bus=0x41;used=10MiB,32MiB;name=Small;cc=7.5;bus=0x12;ecc=none")
        .var("TARE_FAKE_NVML", "process=4000000:10MiB ecc=volatile.corrected:5");
    let ran = env.tare(&["gpu", "info"]).ok();
    for line in [
        "  NVML            550.54.14, CUDA up to 12.4\n",
        "  libcuda         CUDA up to 12.4\n",
        "GPU cuda:0  Big\n",
        "  compute capability  9.0, 4 multiprocessors\n",
        "  memory              96.00 MiB, 10.00 MiB used, 86.00 MiB free\n",
        "  ECC                 on; since the driver was loaded 5 corrected, 0 uncorrected; ever 0 and 0\n",
        "pid 4000000",
        "GPU cuda:1  Small\n",
        "  ECC                 this card has none: only a memory test finds errors\n",
    ] {
        assert!(ran.stdout.contains(line), "no {line:?} in\n{}", ran.stdout);
    }
    let json = env.tare(&["gpu", "info", "--json"]).ok().json();
    assert_eq!(json["cards"][0]["cuda"]["uuid"], json["cards"][0]["nvml"]["uuid"]["value"]);
    assert_eq!((&json["cards"][0]["nvml"]["index"], &json["cards"][1]["nvml"]["index"]), (&1.into(), &0.into()), "NVML goes by the bus");
    assert_eq!(json["cards"][1]["nvml"]["ecc"], "not_supported");

    let env = env.var("CUDA_VISIBLE_DEVICES", "1");
    let ran = env.tare(&["gpu", "info"]).ok().stderr_has("1 card cannot be used by this process (CUDA_VISIBLE_DEVICES is `1`)");
    assert!(ran.stdout.contains("GPU cuda:0  Small\n") && ran.stdout.contains("GPU (not usable by this process)  Big\n"), "{}", ran.stdout);
}

#[test]
fn a_driver_in_trouble_is_told_and_does_not_take_the_command_with_it() {
    let cases: [(&str, &str, &str); 7] = [
        ("TARE_FAKE_CUDA", "crash=cuInit", "libcuda crashed: SIGSEGV"),
        ("TARE_FAKE_NVML", "crash=nvmlInit", "NVML crashed: SIGSEGV"),
        (
            "TARE_FAKE_CUDA",
            "init=803",
            "CUDA does not work here, though there are cards: `cuInit` failed with CUDA_ERROR_SYSTEM_DRIVER_MISMATCH (803)",
        ),
        ("TARE_FAKE_CUDA", "init=54321", "failed with code 54321, which this version does not know"),
        ("TARE_FAKE_NVML", "init=18", "driver/library version mismatch, says NVML"),
        ("TARE_FAKE_CUDA", "version=12080", "NVML says CUDA 12.4 and libcuda says CUDA 12.8: a forward-compatibility package"),
        ("TARE_FAKE_NVML", "remap=0:1:0:1", "replacing a memory row failed; the card has to be exchanged"),
    ];
    for (variable, fault, expected) in cases {
        let env = TestEnv::new().with_fake_driver().var(variable, fault);
        env.tare(&["gpu", "info"]).ok().stderr_has(expected);
    }
    let env = TestEnv::new().with_fake_driver();
    for name in ["libcuda.so", "libcuda.so.1"] {
        fakes::without(&env.driver().join(name), "cuStreamQuery");
    }
    env.tare(&["gpu", "info"]).ok().stderr_has("has no function `cuStreamQuery`");
}

#[test]
fn top_shows_what_a_process_offers_beside_what_the_driver_counts() {
    let env = TestEnv::new().with_fake_driver().var("TARE_FAKE_DEVICES", "64MiB;used=20MiB").var("TARE_FAKE_NVML", "process=4000000:12MiB");
    let own = std::process::id();
    env.write(
        &format!("offers/{own}.json"),
        format!(
            r#"{{"pid":{own},"device":"GPU-fa4e0000-0000-0000-0000-000000001000","allocated_bytes":3145728,"reserved_bytes":8388608,"name":"train"}}"#
        ),
    );
    let env = {
        let offers = env.work().join("offers").display().to_string();
        env.var("TARE_GPU_OFFERS", offers)
    };
    let ran = env.tare(&["gpu", "top"]).ok().stdout_has("20.00 MiB of 64.00 MiB used, 44.00 MiB free");
    let line = ran.stdout.lines().find(|line| line.contains("train")).unwrap_or_else(|| panic!("{}", ran.stdout));
    let cells: Vec<&str> = line.split("  ").map(str::trim).filter(|cell| !cell.is_empty()).collect();
    assert_eq!(cells, [format!("({own} here)").as_str(), "train", "?", "8.00 MiB", "3.00 MiB", "5.00 MiB"]);
    assert!(ran.stdout.contains("1 process does not say what its allocator holds"), "{}", ran.stdout);
    let json = env.tare(&["gpu", "top", "--json"]).ok().json();
    let offered: Vec<_> =
        json["cards"][0]["processes"].as_array().unwrap().iter().map(|process| &process["allocator"]["reserved_bytes"]).collect();
    assert!(offered.contains(&&serde_json::json!(8_388_608)) && offered.len() == 2, "{json:#}");
    env.tare(&["gpu", "top", "--interval", "0"]).expect_code(2).stderr_has("from 0.1 to 3600");
    // NVML that crashes: said, and no crash of ours.
    env.var("TARE_FAKE_NVML", "crash=nvmlDeviceGetCount").tare(&["gpu", "top", "--once"]).ok().stdout_has("NVML crashed");
}

/// Runs `tare gpu top` in a terminal and, once it has taken it, `meanwhile` beside it: `$pid` is its process. What the terminal got.
fn top_in_a_terminal(env: &TestEnv, meanwhile: &str) -> String {
    let tare = env!("CARGO_BIN_EXE_tare");
    env.write(
        "one.sh",
        format!(
            "stty -g > before\ntaken() {{ test \"$(stty -g < /dev/tty)\" != \"$(cat before)\"; }}\n(until taken; do sleep 0.1; done; sleep 0.3; pid=$(cat pid); {meanwhile}) &\nsh -c 'echo $$ > pid; exec {tare} gpu top'\necho $? > code\nstty -g > after\n"
        ),
    );
    let mut command = env.other("script");
    // The end of its input would be the end of the terminal.
    let mut child = command
        .args(["-qec", "sh one.sh", "/dev/null"])
        .env("SHELL", "/bin/sh")
        .env("TERM", "xterm")
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let input = child.stdin.take();
    let shown = env.ran(child.wait_with_output().unwrap()).stdout;
    drop(input);
    shown
}

#[test]
fn a_signal_gives_the_terminal_back() {
    if program("script").is_none() {
        return;
    }
    for signal in ["TERM", "HUP", "QUIT"] {
        let env = TestEnv::new().with_fake_driver();
        let shown = top_in_a_terminal(&env, &format!("kill -{signal} $pid"));
        let read = |name: &str| std::fs::read_to_string(env.work().join(name)).unwrap();
        assert_eq!(read("code"), "130\n", "{signal}: {shown}");
        assert_eq!((shown.matches("\x1b[?1049h").count(), shown.matches("\x1b[?1049l").count()), (1, 1), "{signal}: {shown:?}");
        assert_eq!((shown.matches("\x1b[?25l").count(), shown.matches("\x1b[?25h").count()), (1, 1), "{signal}: {shown:?}");
        assert_eq!(read("before"), read("after"), "{signal}");
    }
}

#[test]
fn what_is_stopped_gives_the_terminal_back_and_takes_it_again() {
    if program("script").is_none() {
        return;
    }
    let env = TestEnv::new().with_fake_driver();
    let look = "stty -g < /dev/tty > NAME; grep State: /proc/$pid/status > NAME.state";
    let meanwhile = format!(
        "kill -TSTP $pid; until grep -q '(stopped)' /proc/$pid/status; do sleep 0.1; done; {}; \
         kill -CONT $pid; until taken; do sleep 0.1; done; sleep 0.3; {}; kill -TERM $pid",
        look.replace("NAME", "stopped"),
        look.replace("NAME", "going")
    );
    let shown = top_in_a_terminal(&env, &meanwhile);
    let read = |name: &str| std::fs::read_to_string(env.work().join(name)).unwrap();
    assert!(read("stopped.state").contains("(stopped)"), "{}", read("stopped.state"));
    assert_eq!(read("stopped"), read("before"), "as it was while it is stopped");
    assert!(!read("going.state").contains("(stopped)"), "{}", read("going.state"));
    assert_ne!(read("going"), read("before"), "keys come at once again");
    assert_eq!((read("code").as_str(), read("after")), ("130\n", read("before")), "{shown}");
    assert!(shown.matches("\x1b[?1049h").count() >= 2, "{shown:?}");
    let (_, after) = shown.split_once("\x1b[?1049l").unwrap();
    assert!(after.contains("tare gpu top"), "drawn again: {after:?}");
}
