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
    assert_eq!(same["steps"][2], json["steps"][2]);
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
