//! Several processes at once, and processes killed at any moment.

use std::time::{Duration, Instant};

use crate::common::TestEnv;
use crate::common::channel::{Channel, Package};

fn big_channel(env: &TestEnv) -> Channel {
    let mut channel = Channel::new(env.path().join("channel"));
    let mut names = Vec::new();
    for nth in 0..12 {
        let name = format!("part{nth}");
        let mut package = Package::new(&name, "1.0");
        for file in 0..25 {
            package = package.file(&format!("share/{name}/{file}"), format!("{name} {file}").repeat(200));
        }
        channel.add(&package.prefixed(&format!("bin/{name}"), "#!/bin/sh\necho {PREFIX}\n"));
        names.push(name);
    }
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    channel.add(&Package::new("all", "1.0").depends(&names).file("share/all", "all"));
    channel
}

const FILES: usize = 12 * 26 + 1;

fn count_files(folder: &std::path::Path) -> usize {
    crate::common::tree(folder, &[]).iter().filter(|line| !line.starts_with("conda-meta")).count()
}

#[test]
fn eight_creates_on_one_cold_cache() {
    let env = TestEnv::new();
    let channel = big_channel(&env);
    let url = channel.url();
    let children: Vec<_> = (0..8)
        .map(|nth| {
            // Two of each name: the second waits for the first and finds nothing to do.
            let name = format!("e{}", nth / 2);
            env.command(&["create", "-n", &name, "--override-channels", "-c", &url, "all"])
                .stdout(std::process::Stdio::piped())
                .stderr(std::process::Stdio::piped())
                .spawn()
                .unwrap()
        })
        .collect();
    for child in children {
        env.ran(child.wait_with_output().unwrap()).ok();
    }
    for nth in 0..4 {
        assert_eq!(count_files(&env.envs().join(format!("e{nth}"))), FILES);
    }
}

/// SIGKILL at random moments: the prefix is absent or complete, and the next run succeeds.
#[test]
fn killed_creates_leave_nothing_or_everything() {
    let env = TestEnv::new();
    let channel = big_channel(&env);
    let url = channel.url();
    let args = ["create", "-n", "x", "--override-channels", "-c", &url, "all"];
    let prefix = env.envs().join("x");
    let started = Instant::now();
    env.tare(&args).ok();
    let whole = started.elapsed();
    std::fs::remove_dir_all(&prefix).unwrap();
    let rounds: u32 = std::env::var("TARE_TEST_KILLS").ok().and_then(|text| text.parse().ok()).unwrap_or(100);
    let (mut absent, mut complete) = (0, 0);
    for round in 0..rounds {
        if round % 4 == 0 {
            std::fs::remove_dir_all(env.cache()).unwrap();
            std::fs::create_dir(env.cache()).unwrap();
        }
        // A low-discrepancy sequence covers the run evenly without a random source.
        let part = (f64::from(round) * 0.618_033_988_75).fract() * 1.1;
        let mut child = env.command(&args).stdout(std::process::Stdio::null()).stderr(std::process::Stdio::null()).spawn().unwrap();
        std::thread::sleep(whole.mul_f64(part).max(Duration::from_millis(1)));
        let _ = child.kill();
        child.wait().unwrap();
        if prefix.exists() {
            assert_eq!(count_files(&prefix), FILES, "round {round}");
            env.tare(&["run", "-n", "x", "part3"]).ok().stdout_has("[ENVS]/x");
            complete += 1;
        } else {
            absent += 1;
        }
        env.tare(&args).ok();
        assert_eq!(count_files(&prefix), FILES, "round {round}");
        let left: Vec<_> = std::fs::read_dir(env.envs()).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        assert!(left.iter().all(|name| name == "x" || name == ".x.lock"), "round {round}: {left:?}");
        std::fs::remove_dir_all(&prefix).unwrap();
    }
    println!("{rounds} kills: {absent} absent, {complete} complete");
    assert!(absent > 0, "no kill came before the end");
}

#[test]
fn ctrl_c_leaves_nothing_behind() {
    let env = TestEnv::new();
    let channel = big_channel(&env);
    let url = channel.url();
    let args = ["create", "-n", "x", "--override-channels", "-c", &url, "all"];
    let started = Instant::now();
    env.tare(&args).ok();
    let whole = started.elapsed();
    let mut interrupted = 0;
    for round in 0..12 {
        let _ = std::fs::remove_dir_all(env.envs().join("x"));
        let child = env.command(&args).stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped()).spawn().unwrap();
        std::thread::sleep(whole.mul_f64(0.1 + 0.08 * f64::from(round)));
        let pid = rustix::process::Pid::from_raw(child.id() as i32).unwrap();
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::INT);
        let ran = env.ran(child.wait_with_output().unwrap());
        let left: Vec<_> = std::fs::read_dir(env.envs()).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        if ran.code == 0 {
            assert_eq!(count_files(&env.envs().join("x")), FILES);
        } else if ran.code == 130 {
            interrupted += 1;
            // A signal between the last look at the switch and the rename comes too late: then the environment is whole.
            assert!(left.iter().all(|name| name == ".x.lock" || name == "x"), "round {round}: {left:?}");
            assert!(!left.contains(&"x".to_owned()) || count_files(&env.envs().join("x")) == FILES, "round {round}: {left:?}");
        } else {
            // Before the handler is in place the signal itself ends the process.
            assert_eq!(ran.code, 1002, "{}", ran.stderr);
            assert!(!env.envs().join("x").exists());
        }
    }
    assert!(interrupted > 0, "no interrupt came in time");
}

/// The interpreter that compiles ends with the run that started it, SIGKILL included, and what it wrote is no hindrance.
#[test]
#[cfg(target_os = "linux")]
fn a_killed_run_takes_its_compiler_along() {
    let env = TestEnv::new();
    let mut channel = Channel::new(env.path().join("channel"));
    // Says where it is and writes into the stage without end.
    let script = format!(
        "#!/bin/sh\necho ready\nread -r job\nstage=${{job#*\\\"}}; stage=${{stage%%\\\"*}}\necho $$ > '{0}.new'; mv '{0}.new' '{0}'\n\
         n=0; while :; do mkdir -p \"$stage/lib/dir\"; : > \"$stage/lib/dir/$n\"; n=$((n+1)); done\n",
        env.path().join("pid").display()
    );
    channel.add(&Package::new("python", "3.11.1").prefixed("bin/python3.11", &script));
    channel.add(&Package::new("lib", "1.0").depends(&["python"]).noarch_python(&[]).file("site-packages/lib.py", "X = 1\n"));
    let url = channel.url();
    let args = ["create", "-n", "x", "--override-channels", "-c", &url, "lib"];
    for _ in 0..3 {
        let mut child = env.command(&args).stdout(std::process::Stdio::null()).stderr(std::process::Stdio::null()).spawn().unwrap();
        let until = Instant::now() + Duration::from_secs(30);
        let pid = loop {
            if let Ok(pid) = std::fs::read_to_string(env.path().join("pid")) {
                break pid.trim().to_owned();
            }
            assert!(Instant::now() < until && child.try_wait().unwrap().is_none(), "the interpreter was not started");
            std::thread::sleep(Duration::from_millis(10));
        };
        std::fs::remove_file(env.path().join("pid")).unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        let next = [&args[..], &["--no-compile"]].concat();
        env.tare(&next).ok();
        let state = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        assert!(state.is_empty() || state.rsplit(')').next().unwrap().trim().starts_with('Z'), "{state}");
        assert_eq!(std::fs::read_dir(env.envs()).unwrap().count(), 1);
        std::fs::remove_dir_all(env.envs().join("x")).unwrap();
    }
}
