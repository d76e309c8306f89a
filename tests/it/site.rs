//! What is installed is one thing for `sync`, `create`, `diff`, `verify` and the revisions: also where another tool was at work in site-packages.

use std::path::PathBuf;

use crate::common::TestEnv;
use crate::common::channel::{Channel, Package};
use crate::common::wheel::Wheel;
use crate::wheels::{SITE, as_pip_would, make, python, ready};

fn wheel(name: &str, version: &str) -> Wheel {
    let module = format!("{name}.py");
    Wheel::new(name, version)
        .file(&module, format!("version = '{version}'\n"))
        .entry_points(&format!("[console_scripts]\n{name}-run = {name}:main\n"))
}

/// A lock of both halves, written by an export of an environment that is removed again.
fn lock(env: &TestEnv, file: &str, archives: &[PathBuf], wheels: &[Wheel]) {
    let wheels = wheels.iter().map(|wheel| ready(env, wheel, true)).collect();
    make(env, "source", archives, wheels);
    env.tare(&["export", "-n", "source", "--format", "tare", "-o", file]).ok();
    std::fs::remove_dir_all(env.envs().join("source")).unwrap();
}

fn changed(env: &TestEnv, args: &[&str]) -> bool {
    env.tare(&[args, &["--json"]].concat()).ok().json()["changed"].as_bool().unwrap()
}

#[test]
fn what_another_tool_installed_is_seen_by_all() {
    let env = TestEnv::new();
    let mut channel = Channel::new(env.path().join("channel"));
    let archives = [channel.add(&python("3.11.4")), channel.add(&Package::new("lib", "1.0").file("lib/lib.txt", "one"))];
    lock(&env, "tare.lock", &archives, &[wheel("a", "1.0")]);
    assert!(changed(&env, &["sync", "-n", "e"]));
    let prefix = env.envs().join("e");
    let agree = || {
        env.tare(&["verify", "-n", "e", "tare.lock"]).ok();
        env.tare(&["diff", "e", "tare.lock"]).ok().stdout_has("no differences");
        assert!(!changed(&env, &["sync", "-n", "e"]));
        env.write("same.lock", std::fs::read(env.work().join("tare.lock")).unwrap());
        std::fs::write(env.work().join("same.lock"), std::fs::read_to_string(env.work().join("tare.lock")).unwrap() + "\n").unwrap();
        assert!(!changed(&env, &["sync", "-n", "e", "same.lock"]));
    };
    agree();

    // With a list of its files it goes.
    as_pip_would(&prefix, "c", &[]);
    env.tare(&["verify", "-n", "e", "tare.lock"])
        .expect_code(5)
        .stdout_has("foreign")
        .stdout_has("`pip` installed it")
        .stdout_has("not as locked");
    env.tare(&["diff", "e", "tare.lock"]).expect_code(4).stdout_has("- c (pypi)");
    env.tare(&["create", "-n", "e", "--lock", "tare.lock"]).expect_code(1).stderr_has("it is not what the lock says");
    env.tare(&["sync", "-n", "e", "--dry-run"]).ok().stderr_has("`c 1.0` would go: `pip` installed it");
    assert!(prefix.join("bin/c").exists());
    let done = env.tare(&["sync", "-n", "e"]).ok().stderr_has("`c 1.0` goes: `pip` installed it, and the lock does not have it");
    assert!(done.stderr.contains("changed `[ENVS]/e`: 2 packages") && !done.stderr.contains("created"), "{}", done.stderr);
    assert!(!prefix.join("bin/c").exists() && !prefix.join(SITE).join("c.py").exists());
    agree();

    // Without one it is refused, and told.
    as_pip_would(&prefix, "c", &[]);
    std::fs::remove_file(prefix.join(SITE).join("c-1.0.dist-info/RECORD")).unwrap();
    env.tare(&["sync", "-n", "e"])
        .expect_code(1)
        .stderr_has("it is not known which files those are")
        .stderr_has("python -m pip uninstall c")
        .stderr_has("--force");
    assert!(prefix.join(SITE).join("c.py").exists());
    // Who leaves the Python half out has it to himself.
    assert!(changed(&env, &["sync", "-n", "bare", "--no-pip"]));
    as_pip_would(&env.envs().join("bare"), "c", &[]);
    assert!(!changed(&env, &["sync", "-n", "bare", "--no-pip"]));
    env.tare(&["sync", "-n", "e", "--force"]).ok();
    agree();

    // Another version of what the lock has.
    as_pip_would(&prefix, "lib", &[]);
    std::fs::rename(prefix.join(SITE).join("a-1.0.dist-info"), prefix.join(SITE).join("a-9.dist-info")).unwrap();
    env.tare(&["verify", "-n", "e", "tare.lock"]).expect_code(5);
    env.tare(&["diff", "e", "tare.lock"]).expect_code(4);
    env.tare(&["sync", "-n", "e", "--force"]).ok();
    agree();

    // Files of nobody are no package: they are told, and go only by force.
    std::fs::create_dir(prefix.join(SITE).join("deep")).unwrap();
    for file in ["alien.py", "deep/alien.py"] {
        std::fs::write(prefix.join(SITE).join(file), "").unwrap();
    }
    std::fs::create_dir_all(prefix.join(SITE).join("__pycache__")).unwrap();
    std::fs::write(prefix.join(SITE).join("__pycache__/a.cpython-311.pyc"), "").unwrap();
    env.tare(&["sync", "-n", "e"])
        .ok()
        .stderr_has("belong to none of them: `lib/python3.11/site-packages/alien.py`, ")
        .stderr_has("nothing to do");
    env.tare(&["diff", "e", "tare.lock"]).ok().stderr_has("belong to no package are not compared").stderr_has("and 1 more");
    env.tare(&["verify", "-n", "e", "tare.lock"]).expect_code(5).stdout_has("extra  lib/python3.11/site-packages/deep/alien.py");
    assert!(changed(&env, &["sync", "-n", "e", "--force"]));
    assert!(!prefix.join(SITE).join("deep").exists());
    agree();
}

#[test]
fn create_that_does_nothing_sees_it_too() {
    let env = TestEnv::new();
    let mut channel = Channel::new(env.path().join("channel"));
    channel.add(&python("3.11.4"));
    channel.add(&Package::new("pure", "1.0").noarch_python(&[]).depends(&["python"]).file("site-packages/pure/__init__.py", ""));
    env.write("environment.yml", format!("name: e\nchannels: ['{}', nodefaults]\ndependencies: [pure]\n", channel.url()));
    env.tare(&["create", "-f", "environment.yml", "--no-compile"]).ok();
    let prefix = env.envs().join("e");
    std::fs::write(prefix.join(SITE).join("alien.py"), "").unwrap();
    env.tare(&["create", "-f", "environment.yml", "--no-compile"]).ok().stderr_has("nothing to do").stderr_has("site-packages/alien.py");
    as_pip_would(&prefix, "c", &[]);
    env.tare(&["create", "-f", "environment.yml", "--no-compile"])
        .expect_code(1)
        .stderr_has("the Python package `c-1.0.dist-info` was installed by another tool");
    env.tare(&["create", "-f", "environment.yml", "--no-compile", "--force"]).ok();
    env.tare(&["verify", "-n", "e"]).ok();
}

#[test]
fn a_revision_holds_both_halves() {
    let env = TestEnv::new();
    let mut channel = Channel::new(env.path().join("channel"));
    let python = channel.add(&python("3.11.4"));
    let (one, two) = (
        channel.add(&Package::new("lib", "1.0").file("lib/lib.txt", "one")),
        channel.add(&Package::new("lib", "2.0").file("lib/lib.txt", "two")),
    );
    lock(&env, "one.lock", &[python.clone(), one], &[wheel("a", "1.0"), wheel("gone", "1.0")]);
    lock(&env, "two.lock", &[python, two], &[wheel("a", "2.0"), wheel("new", "1.0")]);
    env.tare(&["sync", "-n", "e", "one.lock"]).ok();
    let prefix = env.envs().join("e");
    std::fs::write(prefix.join("conda-meta/pinned"), "lib <9\n").unwrap();
    env.tare(&["sync", "-n", "e", "two.lock"]).ok().stderr_has("changed `[ENVS]/e`");
    assert_eq!(std::fs::read_to_string(prefix.join("conda-meta/pinned")).unwrap(), "lib <9\n");
    env.tare(&["remove", "-n", "e", "pypi::new"]).ok();
    // What a change by hand made is no longer what the lock says.
    env.tare(&["sync", "-n", "e", "two.lock", "--dry-run"]).ok().stdout_has("would make");

    let text = env.tare(&["list", "-n", "e", "--revisions"]).ok().stdout;
    for line in
        ["    +gone-1.0 (pypi)", "     a  {1.0 (pypi) -> 2.0 (pypi)}", "    -gone-1.0 (pypi)", "    +new-1.0 (pypi)", "    -new-1.0 (pypi)"]
    {
        assert!(text.contains(line), "no {line:?} in\n{text}");
    }
    let json = env.tare(&["list", "-n", "e", "--revisions", "--json"]).ok().json();
    assert_eq!(json.as_array().unwrap().len(), 3, "{json:#}");
    assert_eq!(json[1]["upgrade"][0]["new"], "a-2.0-pypi_0-pypi");

    // Both halves come back, by hash; the cache is not needed.
    std::fs::remove_dir_all(env.cache()).unwrap();
    std::fs::create_dir(env.cache()).unwrap();
    env.tare(&["install", "-n", "e", "--revision", "0"]).ok();
    env.tare(&["diff", "e", "one.lock"]).ok();
    env.tare(&["verify", "-n", "e", "one.lock"]).ok();
    env.tare(&["install", "-n", "e", "--revision", "1"]).ok();
    env.tare(&["verify", "-n", "e", "two.lock"]).ok();
    env.tare(&["install", "-n", "e", "--revision", "1"]).ok().stderr_has("nothing to do");

    // What pip put there is in the record by name, stays, and is missed when it went.
    as_pip_would(&prefix, "c", &[]);
    env.tare(&["remove", "-n", "e", "pypi::a"]).ok();
    env.tare(&["install", "-n", "e", "--revision", "2"]).ok();
    assert!(prefix.join(SITE).join("c.py").exists());
    env.tare(&["remove", "-n", "e", "pypi::c"]).ok();
    env.tare(&["install", "-n", "e", "--revision", "5"]).ok().stderr_has("they do not come back: c 1.0");

    // A wheel that was changed where it came from is not taken for the old one.
    std::fs::remove_dir_all(env.cache()).unwrap();
    std::fs::create_dir(env.cache()).unwrap();
    wheel("gone", "1.0").file("more.py", "").write(&env.path().join("index"));
    let before = crate::common::tree(&prefix, &[]);
    env.tare(&["install", "-n", "e", "--revision", "0"]).expect_code(5).stderr_has("is not what was asked for");
    assert_eq!(before, crate::common::tree(&prefix, &[]));

    // Without a record the conda half goes back alone, and that is said.
    std::fs::remove_file(prefix.join("conda-meta/tare/revisions.json")).unwrap();
    env.tare(&["install", "-n", "e", "--revision", "0"]).ok().stderr_has("nothing is recorded of the Python packages of revision 0");
    assert_eq!(std::fs::read_to_string(prefix.join("lib/lib.txt")).unwrap(), "one");
}
