//! Same lock, same tree.

use std::os::unix::process::CommandExt;
use std::path::Path;

use crate::common::TestEnv;
use crate::common::channel::{Channel, Package};

fn digest(env: &TestEnv, prefix: &Path, relocatable: bool) -> (String, String) {
    let mut args = vec!["env", "digest", "--files", "-p", prefix.to_str().unwrap()];
    if relocatable {
        args.push("--relocatable");
    }
    let text = env.tare(&args).ok().stdout;
    let (lines, digest) = text.trim_end().rsplit_once('\n').unwrap();
    assert_eq!(digest.len(), 64, "{text}");
    (digest.to_owned(), lines.to_owned())
}

/// Runs with another umask.
fn with_umask(env: &TestEnv, umask: u32, args: &[&str]) {
    let mut command = env.command(args);
    let script = format!("umask {umask:03o}; exec \"$0\" \"$@\"");
    let mut shell = std::process::Command::new("sh");
    shell.arg0("sh").args(["-c", &script]).arg(command.get_program()).args(args).current_dir(env.work()).env_clear();
    for (name, value) in command.get_envs() {
        if let Some(value) = value {
            shell.env(name, value);
        }
    }
    let _ = command.stdin(std::process::Stdio::null());
    env.ran(shell.output().unwrap()).ok();
}

/// Syncs the lock of the working directory in every way, and compares.
fn same_lock_same_tree(env: &TestEnv, thorough: bool) {
    let prefix = env.envs().join("same");
    let at = prefix.to_str().unwrap();
    let empty_cache = || {
        std::fs::remove_dir_all(env.cache()).unwrap();
        std::fs::create_dir(env.cache()).unwrap();
    };
    let mut first = None;
    let ways: [(&str, u32, bool, &[&str]); 6] = [
        ("an empty cache", 0o022, true, &[]),
        ("a warm cache", 0o022, false, &[]),
        ("a strict umask", 0o077, false, &[]),
        ("a strict umask and an empty cache", 0o077, true, &[]),
        ("a loose umask and an empty cache", 0o000, true, &["--copy"]),
        ("copies", 0o027, false, &["--copy"]),
    ];
    // The first and the last differ in everything.
    for (what, umask, cold, more) in
        ways.into_iter().enumerate().filter(|(number, _)| thorough || matches!(number, 0 | 5)).map(|(_, way)| way)
    {
        if prefix.exists() {
            std::fs::remove_dir_all(&prefix).unwrap();
        }
        if cold {
            empty_cache();
        }
        with_umask(env, umask, &[&["sync", "-p", at, "tare.lock"], more].concat());
        let (digest, lines) = digest(env, &prefix, false);
        let (known, known_lines) = first.get_or_insert_with(|| (digest.clone(), lines.clone()));
        assert_eq!(lines, *known_lines, "{what}");
        assert_eq!(digest, *known, "{what}");
    }
    let (here, lines) = digest(env, &prefix, true);
    for name in ["x", "a-much-longer-name-for-an-environment-than-the-other-one"].into_iter().take(if thorough { 2 } else { 1 }) {
        let elsewhere = env.path().join("elsewhere").join(name);
        with_umask(env, 0o022, &["sync", "-p", elsewhere.to_str().unwrap(), "tare.lock"]);
        assert_ne!(digest(env, &elsewhere, false).0, first.as_ref().unwrap().0, "the path is in the files");
        let (there, other) = digest(env, &elsewhere, true);
        assert_eq!(other, lines);
        assert_eq!(there, here);
    }
    // Anything at all changes it.
    let script = prefix.join("bin/app");
    if script.exists() {
        std::fs::write(&script, "#!/bin/sh\n").unwrap();
        assert_ne!(digest(env, &prefix, true).0, here);
    }
    std::fs::create_dir(prefix.join("new")).unwrap();
    assert_ne!(digest(env, &prefix, false).0, first.unwrap().0);
}

#[test]
fn one_lock_gives_one_tree() {
    let env = TestEnv::new();
    let mut channel = Channel::new(env.path().join("channel"));
    channel.add(&Package::new("lib", "1.0").file("lib/libx.so.1", "x").symlink("lib/libx.so", "libx.so.1").file("etc/empty", ""));
    channel.add(
        &Package::new("app", "1.0")
            .depends(&["lib"])
            .prefixed("bin/app", "#!/bin/sh\necho {PREFIX} {PREFIX}/lib\n")
            .prefixed("lib/pkgconfig/app.pc", "prefix={PREFIX}\n"),
    );
    for number in 0..20 {
        channel.add(&Package::new(&format!("p{number}"), "1").file(&format!("share/p/{number}"), number.to_string()).tar_bz2());
    }
    let names: Vec<String> = (0..20).map(|number| format!("p{number}")).collect();
    env.write(
        "environment.yml",
        format!("channels: ['{}', nodefaults]\ndependencies: [app, {}]\nvariables: {{A: b}}\n", channel.url(), names.join(", ")),
    );
    env.tare(&["lock", "-f", "environment.yml"]).ok();
    same_lock_same_tree(&env, true);
}

#[test]
fn byte_code_and_entry_points_too() {
    let env = TestEnv::new();
    let mut channel = Channel::new(env.path().join("channel"));
    let mut package = Package::new("pure", "1.0").noarch_python(&["pure = pure:main"]).depends(&["python"]);
    for module in ["__init__", "a", "b"] {
        package = package.file(&format!("site-packages/pure/{module}.py"), format!("def main():\n    return '{module}'\n"));
    }
    channel.add(&package);
    env.write("environment.yml", format!("channels: [host, '{}', nodefaults]\ndependencies: [python=3.11, pure]\n", channel.url()));
    let locked = env.tare(&["lock", "-f", "environment.yml"]);
    if locked.code != 0 && locked.stderr.contains("no relocatable CPython") {
        eprintln!("skipped: no relocatable CPython 3.11 on this machine");
        return;
    }
    locked.ok();
    same_lock_same_tree(&env, false);
    // Using it changes nothing that counts.
    let prefix = env.path().join("elsewhere/x");
    let before = digest(&env, &prefix, true).0;
    env.tare(&["run", "-p", prefix.to_str().unwrap(), "python", "-c", "import pure.a, json, email"]).ok();
    assert_eq!(digest(&env, &prefix, true).0, before);
}
