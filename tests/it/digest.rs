//! Same lock, same tree.

use std::os::unix::process::CommandExt;
use std::path::Path;

use crate::common::TestEnv;
use crate::common::channel::{Channel, Package};
use crate::common::wheel::Wheel;

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

/// Files of the Python packages of a test.
const PYTHON_FILES: [&str; 6] = [
    "conda-meta/tare/files",
    "lib/python3.11/site-packages/alpha/__init__.py",
    "lib/python3.11/site-packages/alpha/__pycache__/__init__.cpython-311.pyc",
    "lib/python3.11/site-packages/direct-1.0.dist-info/direct_url.json",
    "lib/python3.11/site-packages/alpha-1.0.dist-info/RECORD",
    "conda-meta/tare/pypi/alpha.json",
];

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
    if thorough {
        // What was there before does not matter.
        std::fs::remove_dir_all(&prefix).unwrap();
        env.write(
            "other.yml",
            std::fs::read_to_string(env.work().join("environment.yml")).unwrap().replace("variables: {A: b}", "variables: {A: c}"),
        );
        env.tare(&["lock", "-f", "other.yml", "--no-pip", "-o", "other.lock"]).ok();
        with_umask(env, 0o077, &["sync", "-p", at, "other.lock"]);
        std::fs::write(prefix.join("conda-meta/tare/check.json"), "{}").unwrap();
        with_umask(env, 0o077, &["sync", "-p", at, "tare.lock"]);
        std::fs::write(prefix.join("conda-meta/tare/check.json"), "{}").unwrap();
        assert_eq!(digest(env, &prefix, false).1, first.as_ref().unwrap().1, "after another environment");
    }
    // Anything at all changes it.
    let files: Vec<&str> = ["bin/app", "bin/alpha", "bin/alpha-raw"].into_iter().chain(PYTHON_FILES).collect();
    let files: Vec<(&str, Vec<u8>)> = files.into_iter().filter_map(|file| Some((file, std::fs::read(prefix.join(file)).ok()?))).collect();
    assert!(!files.is_empty());
    for (file, bytes) in &files {
        let mut flipped = bytes.clone();
        *flipped.last_mut().unwrap() ^= 1;
        // Not through a link into the cache.
        std::fs::remove_file(prefix.join(file)).unwrap();
        std::fs::write(prefix.join(file), flipped).unwrap();
        use std::os::unix::fs::PermissionsExt;
        let mode = if file.starts_with("bin/") { 0o755 } else { 0o644 };
        std::fs::set_permissions(prefix.join(file), std::fs::Permissions::from_mode(mode)).unwrap();
    }
    let (_, flipped) = digest(env, &prefix, true);
    for (file, bytes) in files {
        let line = |lines: &str| lines.lines().find(|line| line.ends_with(&format!(" {file}"))).unwrap().to_owned();
        assert_ne!(line(&flipped), line(&lines), "{file}");
        std::fs::write(prefix.join(file), bytes).unwrap();
    }
    assert_eq!(digest(env, &prefix, true).0, here);
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
    let wheels = env.work().join("wheels");
    Wheel::new("alpha", "1.0")
        .file("alpha/__init__.py", "def main():\n    return lambda: 'alpha'\n")
        .file("alpha/data, with a comma.txt", "x")
        .program("alpha-1.0.data/scripts/alpha-raw", "#!python\nprint('/e/nothing/of/this/place')\n")
        .entry_points("[console_scripts]\nalpha = alpha:main\n")
        .write(&wheels);
    Wheel::new("direct", "1.0").file("direct.py", "X = 1\n").write(&wheels);
    env.write(
        "environment.yml",
        format!(
            "channels: [host, '{}', nodefaults]\ndependencies:\n- python=3.11\n- pip\n- pure\n- pip: [--no-index, --find-links wheels, alpha, ./wheels/direct-1.0-py3-none-any.whl]\n",
            channel.url()
        ),
    );
    let locked = env.tare(&["lock", "-f", "environment.yml"]);
    if locked.code != 0 && locked.stderr.contains("no relocatable CPython") {
        eprintln!("skipped: no relocatable CPython 3.11 on this machine");
        return;
    }
    locked.ok();
    same_lock_same_tree(&env, false);
    for file in PYTHON_FILES {
        assert!(env.path().join("elsewhere/x").join(file).is_file(), "{file}");
    }
    // A long path with blanks, where `/bin/sh` starts the scripts.
    let here = digest(&env, &env.path().join("elsewhere/x"), true);
    {
        let name = "with blanks ".repeat(12) + "end";
        let elsewhere = env.path().join("elsewhere").join(&name);
        env.tare(&["sync", "-p", elsewhere.to_str().unwrap(), "tare.lock"]).ok();
        assert!(std::fs::read_to_string(elsewhere.join("bin/alpha")).unwrap().starts_with("#!/bin/sh\n"));
        let there = digest(&env, &elsewhere, true);
        // What conda's packages have such a path in comes out otherwise there.
        let ours = |lines: &str| -> Vec<String> {
            let of_test =
                |line: &&str| ["alpha", "direct", "pure"].iter().any(|name| line.contains(name)) && !line.contains("conda-meta/pure");
            lines.lines().filter(of_test).map(str::to_owned).collect()
        };
        assert!(ours(&here.1).len() > 20);
        assert_eq!(ours(&there.1), ours(&here.1), "{name}");
    }
    // Using it changes nothing that counts.
    let prefix = env.path().join("elsewhere/x");
    let before = digest(&env, &prefix, true).0;
    env.tare(&["run", "-p", prefix.to_str().unwrap(), "python", "-c", "import pure.a, json, email"]).ok();
    assert_eq!(digest(&env, &prefix, true).0, before);
}
