//! `check`, and `create --check`. What each kind of torch leads to is tested beside the code, over stand-ins.

use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::common::TestEnv;
use crate::create::small_channel;

/// A virtual environment without packages; `None` after saying so where there is no Python.
fn venv(env: &TestEnv, name: &str) -> Option<PathBuf> {
    let named = std::env::var_os("TARE_HOST_PYTHON").unwrap_or_else(|| "python3".into());
    let program = "import sys; print(getattr(sys, '_base_executable', sys.executable)); print('%d.%d' % sys.version_info[:2])";
    let Ok(ran) = Command::new(named).args(["-c", program]).output() else {
        eprintln!("skipped: no Python");
        return None;
    };
    let text = String::from_utf8(ran.stdout).unwrap();
    let (python, version) = text.trim().split_once('\n').unwrap();
    let python = PathBuf::from(python);
    let path = env.work().join(name);
    std::fs::create_dir_all(path.join("bin")).unwrap();
    std::fs::create_dir_all(path.join(format!("lib/python{version}/site-packages"))).unwrap();
    std::os::unix::fs::symlink(&python, path.join("bin/python")).unwrap();
    std::fs::write(path.join("pyvenv.cfg"), format!("home = {}\n", python.parent().unwrap().display())).unwrap();
    Some(path)
}

fn site(venv: &std::path::Path) -> PathBuf {
    std::fs::read_dir(venv.join("lib")).unwrap().next().unwrap().unwrap().path().join("site-packages")
}

#[test]
fn every_format_is_written_and_says_the_same() {
    let env = TestEnv::new();
    if venv(&env, "v").is_none() {
        return;
    }
    let text = env.tare(&["check", "-p", "v"]).ok().stdout_has("check of `[WORK]/v` (virtual environment)");
    let text = text.stdout_has("NOT TESTED  torch          there is no torch in the environment").stdout_has("nothing failed: 1 passed, ");
    assert!(text.stdout.contains("PASS        interpreter    Python 3."), "{}", text.stdout);
    let json = env.tare(&["check", "-p", "v", "--json"]).ok().json();
    assert_eq!((&json["schema_version"], &json["success"], &json["exit_code"]), (&1.into(), &true.into(), &0.into()), "{json}");
    assert_eq!(json["steps"].as_array().unwrap().len(), 12);
    assert_eq!(json["verdict"], "not-tested");
    let same = env.tare(&["check", "-p", "v", "--format", "json"]).ok().json();
    // All but the time that it took.
    let step = |json: &serde_json::Value| {
        let mut step = json["steps"][2].clone();
        step.as_object_mut().unwrap().remove("seconds");
        step
    };
    assert_eq!(step(&same), step(&json));
    for (file, start) in [("r.xml", "<?xml"), ("r.html", "<!doctype html>"), ("r.json", "{"), ("r.txt", "check of")] {
        env.tare(&["check", "--python", "v/bin/python", "-o", file])
            .ok()
            .stdout_has("nothing failed")
            .stderr_has(&format!("wrote `{file}`"));
        let written = std::fs::read_to_string(env.work().join(file)).unwrap();
        assert!(written.starts_with(start), "{file}: {written}");
    }
    let page = env.tare(&["check", "-p", "v", "--format", "html"]).ok();
    assert!(page.stdout.starts_with("<!doctype html>") && page.stdout.ends_with("</html>\n"));
    let junit =
        env.tare(&["check", "-p", "v", "--format", "junit"]).ok().stdout_has("<skipped message=\"there is no torch in the environment\"");
    assert!(junit.stdout.contains("tests=\"12\""), "{}", junit.stdout);
    // The document on stdout, another format in the file.
    env.tare(&["check", "-p", "v", "--json", "-o", "s.xml"]).ok().json();
    // A virtual environment has no place for the result.
    assert!(!env.work().join("v/conda-meta").exists());
}

#[test]
fn what_is_required_and_cannot_be_tested_has_its_own_code() {
    let env = TestEnv::new();
    if venv(&env, "v").is_none() {
        return;
    }
    env.tare(&["check", "-p", "v", "--require-gpu"]).expect_code(8).stdout_has("`--require-gpu` was given");
    let json = env.tare(&["check", "-p", "v", "--require-gpu", "--json"]).expect_code(8).json();
    assert_eq!((&json["success"], &json["exit_code"], &json["verdict"]), (&false.into(), &8.into(), &"not-tested".into()));
}

#[test]
fn a_command_line_that_makes_no_sense_is_refused() {
    let env = TestEnv::new();
    let usage: &[&[&str]] = &[
        &["check", "-n", "x", "--all"],
        &["check", "--python", "p", "-p", "x"],
        &["check", "-p", "x", "--json", "--format", "html"],
        &["check", "-p", "x", "-o", "no/such/folder/r.html"],
        &["check", "-p", "x", "--timeout", "0"],
        &["check", "--python", "no-such-python"],
        &["check"],
        &["create", "-n", "x", "--require-gpu", "a"],
        &["create", "-n", "x", "--check", "--dry-run", "a"],
    ];
    for args in usage {
        env.tare(args).expect_code(2);
    }
    env.tare(&["check", "-n", "nobody"]).expect_code(1).stderr_has("there is no environment `nobody`");
    env.tare(&["check", "--all"]).expect_code(1).stderr_has("there are no environments to check");
}

#[test]
fn create_checks_at_its_end_and_the_result_is_shown_later() {
    let env = TestEnv::new();
    let channel = small_channel(&env);
    let create = |name: &str, more: &[&str]| {
        let url = channel.url();
        let mut args = vec!["create", "-n", name, "--override-channels", "-c", &url, "app", "--check"];
        args.extend(more);
        env.tare(&args)
    };
    create("demo", &[]).ok().stdout_has("PASS        files").stdout_has("NOT TESTED  interpreter    there is no Python in the environment");
    let prefix = env.envs().join("demo");
    assert!(prefix.join("conda-meta/tare/check.json").is_file());
    env.tare(&["verify", "-n", "demo"]).ok();
    env.tare(&["list", "-n", "demo"]).ok().stderr_has("last check: ").stderr_has("nothing failed: 1 passed, ");
    env.tare(&["info", "--envs"]).ok().stdout_has("last checks\n  [ENVS]/demo  ");
    let info = env.tare(&["info", "--json"]).ok().json();
    assert_eq!(info["last_checks"][0]["check"]["exit_code"], 0, "{info}");
    // Nothing to do, and checked all the same: the exit code is the check's, in one document.
    let json = create("demo", &["--require-gpu", "--json"]).expect_code(8).json();
    assert_eq!((&json["changed"], &json["success"], &json["check"]["exit_code"]), (&false.into(), &false.into(), &8.into()), "{json}");
    // A copy and a lock lead there too, and the environment stays.
    create_from(&env, &["create", "-n", "copy", "--clone", "demo", "--check", "--require-gpu"], "copy");
    let url = channel.url();
    env.tare(&["lock", "--override-channels", "-c", &url, "app"]).ok();
    create_from(&env, &["create", "-n", "locked", "--locked", "--check", "--require-gpu"], "locked");

    // A file is gone: exit code 5, which goes before 8.
    std::fs::remove_file(prefix.join("lib/lib.txt")).unwrap();
    env.tare(&["check", "-n", "demo", "--require-gpu"]).expect_code(5).stdout_has("missing: lib/lib.txt (of lib)").stdout_has("hint: ");
    env.tare(&["list", "-n", "demo"]).ok().stderr_has("FAIL: files");
    // A package came since.
    env.tare(&["install", "-n", "copy", "--override-channels", "-c", &url, "other", "--clobber"]).ok();
    env.tare(&["list", "-n", "copy"]).ok().stderr_has("packages were changed since");

    let all = env.tare(&["check", "--all"]).expect_code(5);
    let rows: Vec<&str> = all.stdout.lines().collect();
    assert!(rows.len() == 4 && rows[1].starts_with("copy") && rows[2].starts_with("demo") && rows[2].contains("FAIL"), "{}", all.stdout);
    let all = env.tare(&["check", "--all", "--json"]).expect_code(5).json();
    assert_eq!((all["success"].clone(), all["environments"].as_array().unwrap().len()), (false.into(), 3));
    let junit = env.tare(&["check", "--all", "--format", "junit"]).expect_code(5);
    assert_eq!(junit.stdout.matches("<testsuite ").count(), 3);
}

fn create_from(env: &TestEnv, args: &[&str], name: &str) {
    env.tare(args).expect_code(8).stdout_has("`--require-gpu` was given");
    assert!(env.envs().join(name).join("conda-meta/tare/check.json").is_file(), "{name}");
}

#[test]
fn ctrl_c_ends_the_programs_of_a_check() {
    let env = TestEnv::new();
    let Some(path) = venv(&env, "v") else { return };
    let mark = env.work().join("pid");
    let program = format!("import os, time\nopen({:?}, 'w').write(str(os.getpid()))\ntime.sleep(600)\n", mark.display().to_string());
    std::fs::write(site(&path).join("sitecustomize.py"), program).unwrap();
    let child = env.command(&["check", "-p", "v"]).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let started = Instant::now();
    let program: u32 = loop {
        match std::fs::read_to_string(&mark).ok().and_then(|text| text.parse().ok()) {
            Some(pid) => break pid,
            None => assert!(started.elapsed() < Duration::from_secs(60), "the program did not start"),
        }
        std::thread::sleep(Duration::from_millis(20));
    };
    let pid = rustix::process::Pid::from_raw(i32::try_from(child.id()).unwrap()).unwrap();
    let stopped = Instant::now();
    rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
    env.ran(child.wait_with_output().unwrap()).expect_code(130).stderr_has("stopped by Ctrl-C");
    assert!(stopped.elapsed() < Duration::from_secs(10));
    assert!(!PathBuf::from(format!("/proc/{program}")).exists(), "the program is still there");
}

/// Whether a process is there and no corpse.
fn alive(pid: u32) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|text| !text.rsplit(')').next().unwrap_or("").trim().starts_with('Z'))
}

#[track_caller]
fn gone(pid: u32) {
    let started = Instant::now();
    while alive(pid) {
        assert!(started.elapsed() < Duration::from_secs(5), "process {pid} is still there");
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn pid_in(mark: &std::path::Path) -> u32 {
    let started = Instant::now();
    loop {
        match std::fs::read_to_string(mark).ok().and_then(|text| text.trim().parse().ok()) {
            Some(pid) => return pid,
            None => assert!(started.elapsed() < Duration::from_secs(60), "nothing in {}", mark.display()),
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn what_an_environment_starts_in_the_background_neither_fails_it_nor_stays() {
    let env = TestEnv::new();
    let Some(path) = venv(&env, "v") else { return };
    let mark = env.work().join("pid");
    // A helper that holds the pipes of whoever starts Python.
    let program =
        format!("import subprocess\nopen({:?}, 'w').write(str(subprocess.Popen(['sleep', '300']).pid))\n", mark.display().to_string());
    std::fs::write(site(&path).join("helper_of_mine.py"), program).unwrap();
    std::fs::write(site(&path).join("start.pth"), "import helper_of_mine\n").unwrap();
    let started = Instant::now();
    env.tare(&["check", "-p", "v"]).ok().stdout_has("PASS        interpreter").stdout_has("run code at every start: start.pth");
    assert!(started.elapsed() < Duration::from_secs(30));
    gone(pid_in(&mark));

    // An activation script that leaves a program in the background: `run` leaves it alone, `check` does not.
    let prefix = env.envs().join("one");
    for folder in ["conda-meta", "bin", "etc/conda/activate.d"] {
        std::fs::create_dir_all(prefix.join(folder)).unwrap();
    }
    let script = prefix.join("etc/conda/activate.d/one.sh");
    std::fs::write(&script, format!("export ONE=1\n(sleep 300; :) & echo $! > '{}'\n", mark.display())).unwrap();
    let started = Instant::now();
    // What a script leaves running writes where the caller does: that is not captured here.
    let ran = env.command(&["run", "-n", "one", "sh", "-c", "echo $ONE"]).stderr(Stdio::null()).output().unwrap();
    env.ran(ran).ok().stdout_has("1");
    assert!(started.elapsed() < Duration::from_secs(20), "{:?}", started.elapsed());
    let left = pid_in(&mark);
    assert!(alive(left), "what a script starts for the command stays");
    let pid = rustix::process::Pid::from_raw(i32::try_from(left).unwrap()).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
    std::fs::remove_file(&mark).unwrap();
    env.tare(&["check", "-n", "one", "--timeout", "20"]).ok();
    assert!(started.elapsed() < Duration::from_secs(40), "{:?}", started.elapsed());
    gone(pid_in(&mark));
}

#[test]
fn the_time_limit_holds_for_everything_that_is_run() {
    let env = TestEnv::new();
    let hanging = env.write("python", "#!/bin/sh\nsleep 300\n");
    std::fs::set_permissions(&hanging, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let started = Instant::now();
    env.tare(&["check", "--python", "./python", "--timeout", "1"]).expect_code(2).stderr_has("did not end within 1 s");
    let prefix = env.envs().join("one");
    for folder in ["conda-meta", "bin", "etc/conda/activate.d"] {
        std::fs::create_dir_all(prefix.join(folder)).unwrap();
    }
    std::os::unix::fs::symlink("/bin/true", prefix.join("bin/python")).unwrap();
    std::fs::write(prefix.join("etc/conda/activate.d/one.sh"), "sleep 300\n").unwrap();
    let ran = env.tare(&["check", "-n", "one", "--timeout", "1"]).expect_code(6);
    ran.stdout_has("FAIL        interpreter").stdout_has("they did not end within 1 s");
    assert!(started.elapsed() < Duration::from_secs(30), "{:?}", started.elapsed());
}

fn fifo(path: &std::path::Path) {
    let _ = std::fs::remove_file(path);
    assert!(Command::new("mkfifo").arg(path).status().unwrap().success());
}

#[test]
fn pipes_in_place_of_files_are_told_and_never_waited_for() {
    let env = TestEnv::new();
    let channel = small_channel(&env);
    env.tare(&["create", "-n", "demo", "--override-channels", "-c", &channel.url(), "app"]).ok();
    let prefix = env.envs().join("demo");
    let record = std::fs::read_dir(prefix.join("conda-meta"))
        .unwrap()
        .flatten()
        .map(|entry| entry.path())
        .find(|path| path.file_name().unwrap().to_string_lossy().starts_with("lib-"))
        .unwrap();
    for (path, said) in [(prefix.join("lib/lib.txt"), "lib/lib.txt"), (record, "it is a named pipe and no regular file")] {
        let bytes = std::fs::read(&path).unwrap();
        fifo(&path);
        let started = Instant::now();
        for level in ["quick", "standard"] {
            env.tare(&["check", "-n", "demo", "--level", level]).expect_code(5).stdout_has("FAIL        files").stdout_has(said);
        }
        env.tare(&["verify", "-n", "demo"]).expect_code(5).stdout_has(said);
        // It may be damaged; it is not waited for.
        env.tare(&["list", "-n", "demo"]);
        assert!(started.elapsed() < Duration::from_secs(60), "{}: {:?}", path.display(), started.elapsed());
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, bytes).unwrap();
    }
    env.tare(&["verify", "-n", "demo"]).ok();
    for name in
        ["conda-meta/history", "conda-meta/state", "conda-meta/pinned", "conda-meta/tare/environment.json", "conda-meta/tare/check.json"]
    {
        let before = std::fs::read(prefix.join(name)).ok();
        fifo(&prefix.join(name));
        let started = Instant::now();
        env.tare(&["check", "-n", "demo"]);
        env.tare(&["list", "-n", "demo"]);
        assert!(started.elapsed() < Duration::from_secs(30), "{name}: {:?}", started.elapsed());
        std::fs::remove_file(prefix.join(name)).unwrap();
        if let Some(bytes) = before {
            std::fs::write(prefix.join(name), bytes).unwrap();
        }
    }

    // Python packages: a RECORD, and torch's version.
    let Some(path) = venv(&env, "v") else { return };
    let info = site(&path).join("thing-1.0.dist-info");
    std::fs::create_dir_all(&info).unwrap();
    std::fs::write(info.join("METADATA"), "Metadata-Version: 2.1\nName: thing\nVersion: 1.0\n").unwrap();
    fifo(&info.join("RECORD"));
    let started = Instant::now();
    env.tare(&["check", "-p", "v"]).expect_code(5).stdout_has("FAIL        files").stdout_has("RECORD");
    std::fs::remove_dir_all(&info).unwrap();
    std::fs::create_dir(site(&path).join("torch")).unwrap();
    std::fs::write(site(&path).join("torch/__init__.py"), "").unwrap();
    fifo(&site(&path).join("torch/version.py"));
    let told = "torch is not whole: `torch/version.py` cannot be read: it is a named pipe and no regular file";
    env.tare(&["check", "-p", "v", "--timeout", "60"]).expect_code(6).stdout_has(told);
    assert!(started.elapsed() < Duration::from_secs(60), "{:?}", started.elapsed());
}

#[test]
fn commands_in_hints_are_for_a_shell() {
    let env = TestEnv::new();
    let Some(path) = venv(&env, "my env") else { return };
    env.tare(&["check", "-p", "my env", "-v"]).ok().stdout_has("to add it: '[WORK]/my env/bin/python' -m pip install torch");
    std::fs::create_dir(site(&path).join("torch")).unwrap();
    std::fs::write(site(&path).join("torch/__init__.py"), "").unwrap();
    env.tare(&["check", "-p", "my env"])
        .expect_code(6)
        .stdout_has("install again: '[WORK]/my env/bin/python' -m pip install --force-reinstall --no-deps torch\n");
    std::fs::create_dir_all(env.work().join("my project/.venv")).unwrap();
    env.write("my project/.venv/pyvenv.cfg", "home = /usr/bin\n");
    env.tare(&["check", "-p", "my project"]).expect_code(1).stderr_has("tare check -p '[WORK]/my project/.venv'");
}

#[test]
fn a_driver_that_does_not_start_is_a_failure() {
    let env = TestEnv::new().with_fake_driver().var("TARE_FAKE_CUDA", "init=36").var("TARE_FAKE_NVML", "init=9");
    if venv(&env, "v").is_none() {
        return;
    }
    env.tare(&["check", "-p", "v"])
        .expect_code(6)
        .stdout_has("FAIL        memory         the driver does not work: `cuInit` failed with CUDA_ERROR_CALL_REQUIRES_NEWER_DRIVER (36)");
    // Nothing there to initialise is no failure.
    for code in ["100", "3"] {
        let mut command = env.command(&["check", "-p", "v"]);
        let ran = env.ran(command.env("TARE_FAKE_CUDA", format!("init={code}")).output().unwrap());
        ran.ok().stdout_has("NOT TESTED  memory         the driver sees no GPU");
    }
}

#[test]
fn nothing_is_left_when_tare_is_killed() {
    let env = TestEnv::new();
    let Some(path) = venv(&env, "v") else { return };
    let mark = env.work().join("pid");
    let program = format!(
        "import os, subprocess, time\nopen({:?}, 'w').write(str(subprocess.Popen(['sleep', '300']).pid))\ntime.sleep(600)\n",
        mark.display().to_string()
    );
    std::fs::write(site(&path).join("sitecustomize.py"), program).unwrap();
    let mut child = env.command(&["check", "-p", "v"]).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let grandchild = pid_in(&mark);
    child.kill().unwrap();
    child.wait().unwrap();
    gone(grandchild);
}

#[test]
fn credentials_in_what_is_shown_are_masked() {
    let env = TestEnv::new();
    if venv(&env, "v").is_none() {
        return;
    }
    let env = env.var("PYTHONPATH", "https://me:hunter2@pypi.example/simple:/tmp/x").var("CUDA_HOME", "me:hunter2@proxy.example:3128");
    for format in ["text", "json", "junit", "html"] {
        let ran = env.tare(&["check", "-p", "v", "--format", format, "-v"]);
        assert!(!ran.stdout.contains("hunter2") && !ran.stderr.contains("hunter2"), "{format}: {}", ran.stdout);
        assert!(ran.stdout.contains("PYTHONPATH is set to `https://me:********@"), "{format}: {}", ran.stdout);
    }
    env.tare(&["check", "-p", "v", "--json", "-o", "r.json"]);
    assert!(!std::fs::read_to_string(env.work().join("r.json")).unwrap().contains("hunter2"));
}

#[test]
fn a_folder_that_is_no_environment_leads_to_one() {
    let env = TestEnv::new();
    std::fs::create_dir(env.work().join("plain")).unwrap();
    env.tare(&["check", "-p", "plain"])
        .expect_code(1)
        .stderr_has("neither a folder `conda-meta` (tare, conda, mamba, pixi) nor a file `pyvenv.cfg` (venv, uv)")
        .stderr_has("tare check --python /usr/bin/python3");
    env.write("plain/.venv/pyvenv.cfg", "home = /usr/bin\n");
    env.tare(&["check", "-p", "plain"])
        .expect_code(1)
        .stderr_has("did you mean the virtual environment in it? tare check -p [WORK]/plain/.venv");
    env.tare(&["check", "-p", "plain/.venv", "-o", "-"]).expect_code(2).stderr_has("--format html|junit|json");
}

#[test]
fn a_driver_in_trouble_is_told_and_libcuda_answers_for_nvml() {
    let env = TestEnv::new().with_fake_driver().var("TARE_FAKE_DEVICES", "32MiB;name=Card of tests;cc=9.0");
    if venv(&env, "v").is_none() {
        return;
    }
    let with = |cuda: &str, nvml: &str| {
        let mut command = env.command(&["check", "-p", "v", "--json"]);
        command.env("TARE_FAKE_CUDA", cuda).env("TARE_FAKE_NVML", nvml);
        env.ran(command.output().unwrap())
    };
    let json = with("", "hang=nvmlInit").ok().json();
    assert_eq!(
        (&json["devices"][0]["name"], &json["devices"][0]["compute_capability"]),
        (&"Card of tests".into(), &"9.0".into()),
        "{json:#}"
    );
    assert_eq!(json["driver"]["cuda"], "12.4");
    assert!(json["driver"]["problem"].as_str().is_some_and(|text| text.starts_with("NVML did not answer within")), "{json:#}");
    let memory = json["steps"].as_array().unwrap().iter().find(|step| step["id"] == "memory").unwrap();
    assert_eq!(memory["verdict"], "pass", "{memory:#}");

    // A stub of the toolkit is no driver.
    let json = with("fail=cuInit:34,fail=cuDriverGetVersion:34", "init=9").ok().json();
    let problem = json["driver"]["problem"].as_str().unwrap_or_default();
    assert!(problem.starts_with("a stub library, not a driver: `") && problem.contains("/driver/libcuda.so"), "{json:#}");
    assert!(json["driver"]["hint"].as_str().is_some_and(|text| text.contains("out of LD_LIBRARY_PATH")), "{json:#}");
    let memory = json["steps"].as_array().unwrap().iter().find(|step| step["id"] == "memory").unwrap();
    assert_eq!((&memory["verdict"], memory["reason"].as_str()), (&"not-tested".into(), Some(problem)), "{memory:#}");
}
