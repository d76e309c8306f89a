//! `tare lock`, `tare lock --check`, `tare sync`, `tare create --lock`.

use serde_json::Value;

use crate::common::TestEnv;
use crate::common::channel::{Channel, Package};

fn channel(env: &TestEnv) -> Channel {
    let mut channel = Channel::new(env.path().join("channel"));
    channel.add(&Package::new("lib", "1.0").file("lib/lib.txt", "one"));
    channel.add(&Package::new("app", "1.0").depends(&["lib >=1"]).prefixed("bin/app", "#!/bin/sh\necho {PREFIX} $GREETING\n"));
    channel.add(&Package::new("compute", "1.0").build("cpu_0").file("share/compute", "cpu"));
    channel.add(&Package::new("compute", "1.0").build("cuda_1").depends(&["__cuda >=12"]).file("share/compute", "gpu"));
    channel
}

fn file(channel: &Channel, rest: &str) -> String {
    format!("name: demo\nchannels: [\"{}\", nodefaults]\n{rest}", channel.url())
}

const APP: &str = "dependencies: [app]\nvariables: {GREETING: hello, API_TOKEN: hunter2}\n";

#[test]
fn a_lock_keeps_what_it_holds_until_it_is_told_otherwise() {
    let env = TestEnv::new();
    let mut channel = channel(&env);
    env.write("environment.yml", file(&channel, APP));
    let made = env.tare(&["lock", "-f", "environment.yml"]).ok();
    assert_eq!(made.stdout, "");
    made.stderr_has("API_TOKEN");
    let lock = std::fs::read_to_string(env.work().join("tare.lock")).unwrap();
    assert!(lock.contains("lib-1.0-0.conda") && !lock.contains("hunter2"), "{lock}");
    env.tare(&["lock", "-f", "environment.yml"]).ok().stderr_has("up to date");

    channel.add(&Package::new("lib", "2.0").file("lib/lib.txt", "two"));
    channel.add(&Package::new("app", "2.0").depends(&["lib >=1"]).file("share/app", "2"));
    env.tare(&["lock", "-f", "environment.yml"]).ok().stderr_has("up to date");
    assert_eq!(std::fs::read_to_string(env.work().join("tare.lock")).unwrap(), lock);

    let plan = env.tare(&["lock", "-f", "environment.yml", "--update", "lib", "--dry-run", "--json"]).ok().json();
    assert_eq!(plan["platforms"][0]["changed"], serde_json::json!(["lib 1.0 0 -> 2.0 0"]));
    assert_eq!(std::fs::read_to_string(env.work().join("tare.lock")).unwrap(), lock);
    env.tare(&["lock", "-f", "environment.yml", "--update", "lib"]).ok();
    let updated = std::fs::read_to_string(env.work().join("tare.lock")).unwrap();
    assert!(updated.contains("lib-2.0-0.conda") && updated.contains("app-1.0-0.conda"), "{updated}");
    env.tare(&["lock", "-f", "environment.yml", "--update", "lbi"]).expect_code(2).stderr_has("did you mean `lib`");
    env.tare(&["lock", "-f", "environment.yml", "--upgrade"]).ok();
    assert!(std::fs::read_to_string(env.work().join("tare.lock")).unwrap().contains("app-2.0-0.conda"));
}

#[test]
fn the_order_of_repodata_does_not_matter() {
    let env = TestEnv::new();
    let channel = channel(&env);
    env.write(
        "environment.yml",
        file(&channel, "dependencies: [app, compute]\nplatforms: [linux-64, noarch]\n".replace(", noarch", "").as_str()),
    );
    let mut first = None;
    let path = channel.root().join("linux-64/repodata.json");
    for turn in 0..6 {
        let mut repodata: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        let records = repodata["packages.conda"].as_object_mut().unwrap();
        let mut entries: Vec<(String, Value)> = std::mem::take(records).into_iter().collect();
        let count = entries.len();
        entries.rotate_left(turn % count);
        if turn % 2 == 1 {
            entries.reverse();
        }
        records.extend(entries);
        std::fs::write(&path, repodata.to_string()).unwrap();
        let _ = std::fs::remove_dir_all(env.cache());
        let out = format!("{turn}.lock");
        env.tare(&["lock", "-q", "-f", "environment.yml", "--platform", "linux-64", "--cuda", "12.6", "-o", &out]).ok();
        let text = std::fs::read(env.work().join(&out)).unwrap();
        assert_eq!(*first.get_or_insert(text.clone()), text, "turn {turn}");
    }
}

#[test]
fn the_gpu_is_never_decided_silently() {
    // Nobody says anything about a driver: no variable, no flag; and the platform is not this machine's, so nothing is detected.
    let env = TestEnv::new();
    let mut channel = channel(&env);
    channel.add(&Package::new("compute", "1.0").subdir("linux-aarch64").build("cpu_0"));
    channel.add(&Package::new("compute", "1.0").subdir("linux-aarch64").build("cuda_1").depends(&["__cuda >=12"]));
    channel.add(&Package::new("plain", "1.0").subdir("linux-aarch64"));
    env.write("environment.yml", file(&channel, "dependencies: [compute]\n"));
    env.write("plain.yml", file(&channel, "dependencies: [plain]\n"));
    env.write("gpu.yml", file(&channel, "dependencies: [\"compute=*=cuda*\"]\n"));
    env.write("cpu.yml", file(&channel, "dependencies: [\"compute=*=cpu*\"]\n"));
    let lock = |args: &[&str]| {
        let mut all = vec!["lock", "--platform", "linux-aarch64"];
        all.extend(args);
        let mut command = env.command(&all);
        command.env_remove("CONDA_OVERRIDE_CUDA");
        env.ran(command.output().unwrap())
    };
    lock(&["-f", "environment.yml"]).expect_code(2).stderr_has("--cuda 12.6").stderr_has("--gpu none").stderr_has("compute 1.0 cuda_1");
    lock(&["-f", "gpu.yml"]).expect_code(2).stderr_has("--cuda 12.6");
    assert!(!env.work().join("tare.lock").exists());
    lock(&["-f", "cpu.yml", "-o", "cpu.lock"]).ok();
    lock(&["-f", "plain.yml", "-o", "plain.lock"]).ok();
    lock(&["-f", "environment.yml", "--gpu", "none"]).ok().stderr_has("no GPU driver");
    let read = || std::fs::read_to_string(env.work().join("tare.lock")).unwrap();
    assert!(read().contains("compute-1.0-cpu_0") && !read().contains("__cuda"), "{}", read());
    lock(&["-f", "environment.yml", "--cuda", "12.6", "--upgrade"]).ok().stderr_has("CUDA 12.6");
    assert!(read().contains("compute-1.0-cuda_1") && read().contains("__cuda=12.6=0"), "{}", read());
}

#[test]
fn a_check_names_what_fails_and_where() {
    let env = TestEnv::new();
    let channel = channel(&env);
    env.write("environment.yml", file(&channel, APP));
    env.tare(&["lock", "-q", "-f", "environment.yml", "--platform", "linux-64"]).ok();
    env.tare(&["lock", "--check", "-f", "environment.yml"]).ok();
    env.tare(&["lock", "--check", "-f", "environment.yml", "tare.lock", "--json"]).ok();
    let cases = [
        ("dependencies: [app, \"lib <1\"]\nvariables: {GREETING: hello, API_TOKEN: x}\n", "`lib <1` is not satisfied", ":3:21"),
        ("dependencies: [app, other]\nvariables: {GREETING: hello, API_TOKEN: x}\n", "`other`", ":3:21"),
        ("dependencies: [lib]\nvariables: {GREETING: hello, API_TOKEN: x}\n", "which is not asked for any more", ""),
        ("dependencies: [app]\nvariables: {GREETING: bye, API_TOKEN: x}\n", "`GREETING`", ":4:13"),
        ("dependencies: [app]\nvariables: {API_TOKEN: x}\n", "`GREETING`", ""),
        ("dependencies: [app]\nplatforms: [linux-64, win-64]\nvariables: {GREETING: hello, API_TOKEN: x}\n", "`win-64`", ":4:23"),
        ("dependencies: [app, pip: [einops]]\nvariables: {GREETING: hello, API_TOKEN: x}\n", "`einops`", ":3:27"),
    ];
    for (text, message, place) in cases {
        env.write("other.yml", file(&channel, text));
        env.tare(&["lock", "--check", "-f", "other.yml"]).expect_code(4).stderr_has(message).stderr_has(place);
    }
    env.write("channels.yml", file(&channel, APP).replace("nodefaults", "conda-forge, nodefaults"));
    env.tare(&["lock", "--check", "-f", "channels.yml"]).expect_code(4).stderr_has("conda-forge");
    // A lock that was edited by hand.
    let text = std::fs::read_to_string(env.work().join("tare.lock")).unwrap();
    env.write("edited.lock", text.replace("  - lib >=1\n", "  - lib >=9\n"));
    env.tare(&["lock", "--check", "-f", "environment.yml", "edited.lock"]).expect_code(4).stderr_has("does not hold together");
    env.tare(&["lock", "--check", "-f", "environment.yml", "absent.lock"]).expect_code(2);
}

#[test]
fn sync_makes_the_environment_and_then_does_nothing() {
    let env = TestEnv::new();
    let mut channel = channel(&env);
    env.write("environment.yml", file(&channel, APP));
    env.tare(&["lock", "-q", "-f", "environment.yml"]).ok();
    env.tare(&["sync"]).ok();
    let prefix = env.envs().join("demo");
    env.tare(&["run", "-n", "demo", "app"]).ok().stdout_has("[ENVS]/demo hello\n");
    assert_eq!(env.tare(&["sync", "--json"]).ok().json()["changed"], false);
    assert_eq!(env.tare(&["sync", "-n", "demo", "--json"]).ok().json()["changed"], false);
    // What the lock was made from is what the environment was made from.
    assert_eq!(env.tare(&["create", "-f", "environment.yml", "--json"]).ok().json()["changed"], false);

    // Damage is made good; files of nobody are not thrown away.
    std::fs::remove_file(prefix.join("lib/lib.txt")).unwrap();
    env.tare(&["sync"]).ok();
    assert!(prefix.join("lib/lib.txt").exists());
    channel.add(&Package::new("lib", "2.0").file("lib/lib.txt", "two"));
    env.tare(&["lock", "-q", "-f", "environment.yml", "--upgrade"]).ok();
    std::fs::write(prefix.join("lib/mine.txt"), "mine").unwrap();
    env.tare(&["sync", "-n", "demo"]).expect_code(1).stderr_has("lib/mine.txt").stderr_has("--force");
    assert_eq!(std::fs::read_to_string(prefix.join("lib/lib.txt")).unwrap(), "one");
    env.tare(&["sync", "-n", "demo", "--force"]).ok();
    assert_eq!(std::fs::read_to_string(prefix.join("lib/lib.txt")).unwrap(), "two");

    // The same lock at the same place: the same tree.
    let without = ["conda-meta/history", "conda-meta/tare/revisions.json"];
    let first = crate::common::tree(&prefix, &without);
    std::fs::remove_dir_all(&prefix).unwrap();
    env.tare(&["create", "--locked", "-f", "environment.yml"]).ok();
    assert_eq!(first, crate::common::tree(&prefix, &without));
    env.write("other.yml", file(&channel, "dependencies: [\"app >=7\"]\nvariables: {GREETING: hello, API_TOKEN: x}\n"));
    env.tare(&["create", "-n", "no", "--lock", "tare.lock", "-f", "other.yml"]).expect_code(4).stderr_has("app >=7");
    env.tare(&["sync", "-n", "no", "--platform", "win-64"]).expect_code(4).stderr_has("linux-64");
}

/// Two locks for one environment that is not there yet: the second makes of it what its own lock says, whatever the first has made.
#[test]
fn a_sync_that_waited_decides_about_what_it_finds() {
    use std::io::{BufRead, BufReader};
    let env = TestEnv::new();
    let mut channel = channel(&env);
    env.write("environment.yml", file(&channel, APP));
    env.tare(&["lock", "-q", "-f", "environment.yml", "-o", "a.lock"]).ok();
    channel.add(&Package::new("lib", "2.0").file("lib/lib.txt", "two"));
    env.tare(&["lock", "-q", "-f", "environment.yml", "-o", "b.lock"]).ok();
    env.tare(&["sync", "-n", "first", "a.lock"]).ok();
    let prefix = env.envs().join("x");
    for (lock, other) in [("b.lock", "first"), ("a.lock", "second")] {
        let runtime = tokio::runtime::Runtime::new().unwrap();
        let cancel = tare::install::Cancel::default();
        let held = runtime
            .block_on(tare::install::PrefixLock::acquire(&prefix, &["first".to_owned()], None, &tare::report::Silent, &cancel))
            .unwrap();
        let mut child = env.command(&["sync", "-n", "x", lock]).stderr(std::process::Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        assert!(lines.by_ref().any(|line| line.unwrap().contains("waiting for")));
        std::fs::rename(env.envs().join(other), &prefix).unwrap();
        drop(held);
        let said: Vec<String> = lines.map(Result::unwrap).collect();
        assert!(child.wait().unwrap().success(), "{said:?}");
        assert_eq!(std::fs::read_to_string(prefix.join("lib/lib.txt")).unwrap(), if lock == "b.lock" { "two" } else { "one" });
        std::fs::rename(&prefix, env.envs().join("second")).unwrap();
    }
}

/// A lock is bounded before it is read, and so is the time for one that is nested without end.
#[test]
fn locks_that_are_none_end_at_once() {
    let env = TestEnv::new();
    std::os::unix::fs::symlink("/dev/zero", env.work().join("zero.lock")).unwrap();
    rustix::fs::mknodat(rustix::fs::CWD, env.work().join("pipe.lock"), rustix::fs::FileType::Fifo, rustix::fs::Mode::RWXU, 0).unwrap();
    let large = std::fs::File::create(env.work().join("large.lock")).unwrap();
    large.set_len(1 << 40).unwrap();
    env.write("deep.lock", format!("version: 6\nenvironments: {{}}\npackages: {}\n", "[".repeat(300_000)));
    let start = std::time::Instant::now();
    for (name, what) in [
        ("zero.lock", "it is a device and no regular file"),
        ("pipe.lock", "it is a named pipe and no regular file"),
        ("large.lock", "it is longer than 16777216 bytes"),
        ("deep.lock", "nested more than"),
    ] {
        env.tare(&["sync", "-n", "x", name]).expect_code(2).stderr_has(what).stderr_has(name);
    }
    for name in ["zero.lock", "pipe.lock", "large.lock"] {
        let file = name.replace(".lock", ".yml");
        std::fs::rename(env.work().join(name), env.work().join(&file)).unwrap();
        env.tare(&["create", "-n", "x", "-f", &file]).expect_code(2).stderr_has(&file);
    }
    assert!(start.elapsed() < std::time::Duration::from_secs(20));
}

#[test]
fn explicit_lists_and_conda_lock_files_install_with_the_metadata_of_the_archives() {
    let env = TestEnv::new();
    let mut channel = Channel::new(env.path().join("channel"));
    let archive = channel.add(&Package::new("lib", "1.0").file("lib/lib.txt", "one").key("license", serde_json::json!("MIT")));
    let sha256 = crate::common::channel::hex(&<sha2::Sha256 as sha2::Digest>::digest(std::fs::read(&archive).unwrap()));
    env.write("explicit.txt", format!("@EXPLICIT\nfile://{}#{sha256}\n", archive.display()));
    env.write(
        "conda-lock.yml",
        format!(
            "version: 1\nmetadata:\n  content_hash: {{linux-64: a}}\n  channels: []\n  platforms: [linux-64]\n  sources: []\npackage:\n- name: lib\n  version: '1.0'\n  manager: conda\n  platform: linux-64\n  dependencies: {{}}\n  url: file://{}\n  hash: {{sha256: {sha256}}}\n  category: main\n  optional: false\n",
            archive.display()
        ),
    );
    for (name, lock) in [("a", "explicit.txt"), ("b", "conda-lock.yml")] {
        env.tare(&["sync", "-n", name, "--platform", "linux-64", lock]).ok();
        let record = std::fs::read_to_string(env.envs().join(name).join("conda-meta/lib-1.0-0.json")).unwrap();
        assert_eq!(serde_json::from_str::<Value>(&record).unwrap()["license"], "MIT");
        assert_eq!(env.tare(&["sync", "-n", name, "--platform", "linux-64", lock, "--json"]).ok().json()["changed"], false);
    }
    let wrong = std::fs::read_to_string(env.work().join("explicit.txt")).unwrap().replace(&sha256, &"0".repeat(64));
    env.write("wrong.txt", wrong);
    let refused = env.tare(&["sync", "-n", "c", "--platform", "linux-64", "wrong.txt"]);
    assert_ne!(refused.code, 0, "{}", refused.stderr);
    assert!(!env.envs().join("c").exists());
}

/// Runs `lock` on a machine that says nothing about a driver.
fn lock_without_override(env: &TestEnv, args: &[&str]) -> crate::common::Ran {
    let mut command = env.command(&[&["lock", "--platform", "linux-aarch64"], args].concat());
    command.env_remove("CONDA_OVERRIDE_CUDA");
    env.ran(command.output().unwrap())
}

#[test]
fn a_lock_made_again_keeps_its_machine() {
    let env = TestEnv::new();
    let mut channel = channel(&env);
    for (name, depends) in [("cpu_0", &[][..]), ("cuda_1", &["__cuda >=12", "__glibc >=2.30"])] {
        channel.add(&Package::new("compute", "1.0").subdir("linux-aarch64").build(name).depends(depends));
    }
    channel.add(&Package::new("plain", "1.0").subdir("linux-aarch64"));
    env.write("environment.yml", file(&channel, "dependencies: [compute]\n"));
    let read = || std::fs::read_to_string(env.work().join("tare.lock")).unwrap();
    let glibc = ["--virtual-package", "__glibc=2.34"];
    lock_without_override(&env, &[&["-f", "environment.yml", "--cuda", "12.6"], &glibc[..]].concat()).ok();
    let first = read();
    assert!(first.contains("cuda_1") && first.contains("__cuda=12.6=0") && first.contains("__glibc=2.34=0"), "{first}");
    // Nothing said: the same bytes, although this machine has neither.
    lock_without_override(&env, &["-f", "environment.yml"]).ok().stderr_has("up to date").stderr_has("a driver for CUDA 12.6 (--cuda)");
    lock_without_override(&env, &["-f", "environment.yml", "--upgrade"]).ok().stderr_has("up to date");
    assert_eq!(read(), first);
    env.write("more.yml", file(&channel, "dependencies: [compute, plain]\n"));
    lock_without_override(&env, &["-f", "more.yml"]).ok();
    assert!(read().contains("plain-1.0") && read().contains("__cuda=12.6=0") && read().contains("__glibc=2.34=0"), "{}", read());
    // Said: what is said.
    lock_without_override(&env, &["-f", "environment.yml", "--cuda", "12.8"]).ok();
    assert!(read().contains("__cuda=12.8=0") && read().contains("__glibc=2.34=0"), "{}", read());
    lock_without_override(&env, &["-f", "environment.yml", "--gpu", "auto", "--upgrade"]).expect_code(2).stderr_has("--gpu none");
    lock_without_override(&env, &["-f", "environment.yml", "--gpu", "none", "--upgrade"]).ok();
    let without = read();
    assert!(without.contains("cpu_0") && !without.contains("__cuda="), "{without}");
    lock_without_override(&env, &["-f", "environment.yml", "--upgrade"]).ok().stderr_has("no GPU driver");
    assert_eq!(read(), without);
    let mut command = env.command(&["lock", "--platform", "linux-aarch64", "-f", "environment.yml", "--upgrade"]);
    env.ran(command.env("CONDA_OVERRIDE_CUDA", "12.4").output().unwrap()).ok();
}

#[test]
fn a_gpu_lock_installs_without_a_gpu_with_one_warning() {
    let env = TestEnv::new();
    let channel = channel(&env);
    env.write("environment.yml", file(&channel, "dependencies: [app, compute]\n"));
    env.tare(&["lock", "-q", "-f", "environment.yml", "--platform", "linux-64", "--cuda", "12.6"]).ok();
    for args in [&["sync", "-n", "a"][..], &["create", "--locked", "-n", "b"]] {
        let made = env.tare(args).ok();
        assert_eq!(made.stderr.matches("warning").count(), 1, "{}", made.stderr);
        made.stderr_has("warning: the lock is for machines with a GPU (CUDA 12.6), and none is found here");
    }
    assert_eq!(std::fs::read_to_string(env.envs().join("a/share/compute")).unwrap(), "gpu");
    // Nothing to do is nothing to warn of.
    let again = env.tare(&["sync", "-n", "a"]).ok();
    assert!(!again.stderr.contains("warning"), "{}", again.stderr);
}

#[test]
fn hints_name_the_files_and_counts_say_what_they_count() {
    let env = TestEnv::new();
    let mut channel = Channel::new(env.path().join("channel"));
    channel.add(&Package::new("lib", "1.0").file("lib/lib.txt", "one"));
    let text =
        |more: &str| format!("name: demo\nchannels: ['{}', nodefaults]\ndependencies: [lib]\nvariables: {{A: b}}\n{more}", channel.url());
    env.write("my env.yml", text(""));
    env.tare(&["lock", "-f", "my env.yml", "-o", "gpu.lock", "--platform", "linux-64"]).ok();
    env.tare(&["lock", "--check", "-f", "my env.yml", "gpu.lock"])
        .ok()
        .stderr_has("`gpu.lock` satisfies what is asked for: 1 conda requirement, 1 channel, 1 variable on linux-64");
    env.tare(&["lock", "--check", "-f", "my env.yml", "gpu.lock", "--platform", "win-64"])
        .expect_code(4)
        .stderr_has("hint: to add it: tare lock -f 'my env.yml' -o gpu.lock --platform win-64");
    env.write("environment.yml", text("").replace("[lib]", "['lib >=2']"));
    env.tare(&["lock", "--check", "-f", "environment.yml", "gpu.lock"])
        .expect_code(4)
        .stderr_has("hint: to bring it up to date: tare lock -f environment.yml -o gpu.lock");
    env.tare(&["sync", "-n", "x", "gpu.lock", "--platform", "win-64"])
        .expect_code(4)
        .stderr_has("hint: to add it: tare lock -f environment.yml -o gpu.lock --platform win-64");
    env.tare(&["create", "-n", "x", "--lock", "gpu.lock", "-f", "my env.yml", "--cuda", "12.6"])
        .expect_code(2)
        .stderr_has("hint: lock again: tare lock -f 'my env.yml' -o gpu.lock --cuda 12.6");
    // Two platforms with the same, then with different requirements.
    env.write("two.yml", text("platforms: [linux-64, osx-arm64]\n").replace("[lib]", "\n- lib"));
    channel.add(&Package::new("lib", "1.0").subdir("osx-arm64").file("lib/lib.txt", "one"));
    env.tare(&["lock", "-f", "two.yml"]).ok();
    let both = env.tare(&["lock", "--check", "-f", "two.yml"]).ok();
    both.stderr_has("1 conda requirement, 1 channel, 1 variable on each of linux-64, osx-arm64");
}
