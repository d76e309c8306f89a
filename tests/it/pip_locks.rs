//! Both halves in one lock: made, checked, installed, verified, repaired, exported. Nothing is downloaded: the wheels lie in a folder.

use std::io::Write;
use std::path::Path;

use sha2::Digest;

use crate::common::{TestEnv, tree};

fn base64(bytes: &[u8]) -> String {
    const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
    let mut out = String::new();
    for chunk in bytes.chunks(3) {
        let word = (u32::from(chunk[0]) << 16) | (u32::from(*chunk.get(1).unwrap_or(&0)) << 8) | u32::from(*chunk.get(2).unwrap_or(&0));
        for index in 0..=chunk.len() {
            out.push(char::from(ALPHABET[(word >> (18 - 6 * index) & 63) as usize]));
        }
    }
    out
}

/// A wheel of one module with its requirements.
pub fn wheel(folder: &Path, name: &str, version: &str, requires: &[&str]) {
    std::fs::create_dir_all(folder).unwrap();
    let info = format!("{name}-{version}.dist-info");
    let extras = if requires.iter().any(|line| line.contains("extra ==")) { "Provides-Extra: fast\n" } else { "" };
    let requires: String = requires.iter().map(|line| format!("Requires-Dist: {line}\n")).collect();
    let mut files = vec![
        (format!("{name}/__init__.py"), format!("version = '{version}'\n\n\ndef main():\n    print('{name}', version)\n")),
        (
            format!("{info}/METADATA"),
            format!("Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nRequires-Python: >=3.8\n{extras}{requires}"),
        ),
        (format!("{info}/WHEEL"), "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n".to_owned()),
        (format!("{info}/entry_points.txt"), format!("[console_scripts]\n{name} = {name}:main\n")),
    ];
    let mut record: String =
        files.iter().map(|(path, text)| format!("{path},sha256={},{}\n", base64(&sha2::Sha256::digest(text)), text.len())).collect();
    record.push_str(&format!("{info}/RECORD,,\n"));
    files.push((format!("{info}/RECORD"), record));
    let mut zip = zip::ZipWriter::new(std::fs::File::create(folder.join(format!("{name}-{version}-py3-none-any.whl"))).unwrap());
    for (path, text) in files {
        zip.start_file(path, zip::write::SimpleFileOptions::default().last_modified_time(zip::DateTime::default())).unwrap();
        zip.write_all(text.as_bytes()).unwrap();
    }
    zip.finish().unwrap();
}

/// Whether a line of a lock stands below a wheel.
fn after_wheel(lock: &str, line: &str) -> bool {
    let at = line.as_ptr() as usize - lock.as_ptr() as usize;
    lock[..at].lines().rev().find_map(|line| line.trim_start().strip_prefix("- ")).is_some_and(|entry| entry.starts_with("pypi: "))
}

/// An environment of both halves goes through changes and back: what is asked of it is kept, compared and restored.
#[test]
fn what_is_asked_of_both_halves_is_kept_and_comes_back() {
    let env = TestEnv::new().var("TARE_PIP_RESOLVER", "pip").var("PIP_NO_INDEX", "1");
    let wheels = env.work().join("wheels");
    let env = env.var("PIP_FIND_LINKS", wheels.display().to_string());
    wheel(&wheels, "alpha", "1.0", &["beta"]);
    wheel(&wheels, "beta", "1.0", &[]);
    wheel(&wheels, "beta", "2.0", &[]);
    wheel(&wheels, "gamma", "1.0", &[]);
    let file = |lines: &[&str]| {
        let mut text = "name: demo\nchannels: [host, nodefaults]\ndependencies:\n  - python=3.11\n  - pip\n  - pip:\n    - --no-index\n    - --find-links wheels\n".to_owned();
        lines.iter().for_each(|line| text += &format!("    - {line}\n"));
        env.write("environment.yml", text);
    };
    let create = |more: &[&str]| env.tare(&[&["create", "-f", "environment.yml", "--no-compile"], more].concat());
    file(&["alpha", "beta<2"]);
    let made = create(&[]);
    if made.code != 0 && made.stderr.contains("no relocatable CPython") {
        eprintln!("skipped: no relocatable CPython 3.11 on this machine");
        return;
    }
    made.ok();
    let digest = |name: &str| env.tare(&["env", "digest", "-n", name]).ok().stdout;
    let first = digest("demo");
    let version = |name: &str| {
        let list = env.tare(&["list", "-n", "demo", "--json"]).ok().json();
        let row = list.as_array().unwrap().iter().find(|row| row["name"] == name).cloned();
        row.map(|row| row["version"].as_str().unwrap().to_owned())
    };

    // Added: what was asked for before holds, and what is installed stays.
    let install = |specs: &[&str]| env.tare(&[&["install", "-n", "demo", "--no-compile"], specs].concat()).ok();
    install(&["pypi::gamma", "--dry-run"]).stdout_has(": 1 Python package, 2 packages and 2 Python packages kept,");
    install(&["pypi::gamma"]).stderr_has("gamma 1.0 added");
    assert_eq!(version("beta").as_deref(), Some("1.0"));
    create(&[]).expect_code(1).stderr_has("what differs: the `pip:` section\n");
    let all = env.tare(&["update", "-n", "demo", "--dry-run"]).ok().stderr_has("the 3 Python packages stay as installed: ");
    all.stderr_has("tare update pypi::alpha pypi::beta pypi::gamma");
    // Asked for anew, without the bound; the request alone may change too.
    install(&["pypi::beta"]).stderr_has("beta 1.0 -> 2.0");
    install(&["pypi::beta==2.0"]).stderr_has("changed `demo`: ");
    env.tare(&["remove", "-n", "demo", "gamma"]).ok();
    file(&["alpha", "beta==2.0"]);
    create(&[]).ok().stderr_has("nothing to do");
    create(&["--dry-run"]).ok().stderr_has("nothing to do");

    // Back: packages, what was asked for, the digest of it all.
    env.tare(&["install", "-n", "demo", "--revision", "0"]).ok().stderr_has("beta 2.0 -> 1.0");
    assert_eq!(digest("demo"), first);
    create(&[]).expect_code(1);
    file(&["alpha", "beta<2"]);
    create(&[]).ok().stderr_has("nothing to do");
    // The recorded request holds when its package is updated by its bare name.
    env.tare(&["update", "-n", "demo", "beta"]).ok().stderr_has("nothing to do");
    // The digest after a repair.
    let prefix = env.envs().join("demo");
    let site = prefix.join("lib/python3.11/site-packages");
    std::fs::remove_file(site.join("beta/__init__.py")).unwrap();
    std::fs::remove_file(site.join("pip/__init__.py")).unwrap();
    env.tare(&["verify", "-n", "demo", "--repair"]).ok();
    assert_eq!(digest("demo"), first);
    // Where some have byte code and others have none, too.
    env.tare(&["install", "-n", "demo", "pypi::gamma"]).ok().stderr_has("compiled");
    let mixed = digest("demo");
    for file in ["gamma/__init__.py", "beta/__init__.py", "pip/__init__.py"] {
        std::fs::remove_file(site.join(file)).unwrap();
    }
    env.tare(&["verify", "-n", "demo", "--repair"]).ok();
    assert_eq!(digest("demo"), mixed);
    // The digest on a machine with another cache, whose folder is in the records of `host`.
    let conda = |cache: &Path| {
        let _ = std::fs::remove_dir_all(env.envs().join("conda"));
        let mut command = env.command(&["create", "-n", "conda", "-f", "environment.yml", "--no-pip", "--no-compile"]);
        env.ran(command.env("TARE_CACHE_DIR", cache).output().unwrap()).ok();
        let record = tree(&env.envs().join("conda/conda-meta"), &[]).into_iter().find(|line| line.starts_with("python-3.11")).unwrap();
        (digest("conda"), record)
    };
    let here = conda(&env.cache());
    let copied = env.path().join("another-cache");
    assert!(env.other("cp").arg("-al").arg(env.cache()).arg(&copied).status().unwrap().success());
    let there = conda(&copied);
    assert_ne!(here.1, there.1, "the cache is not in the record");
    assert_eq!(here.0, there.0);

    // What another tool takes away of a conda package is told.
    env.tare(&["diff", "environment.yml", "demo"]).ok();
    let infos = std::fs::read_dir(&site).unwrap().map(|entry| entry.unwrap().path());
    let info = infos.into_iter().find(|path| path.file_name().unwrap().to_string_lossy().starts_with("pip-")).unwrap();
    std::fs::rename(&info, env.path().join("taken")).unwrap();
    let told = env.tare(&["diff", "environment.yml", "demo"]).expect_code(4);
    told.stdout_has("! pip  `pip` is asked for and not there").stderr_has("`pip` of `demo` is recorded, but ");
    std::fs::rename(env.path().join("taken"), &info).unwrap();
    env.tare(&["diff", "environment.yml", "demo"]).ok();

    // Without Python its packages are nobody's.
    env.tare(&["remove", "-n", "demo", "python", "--dry-run"]).ok().stdout_has("alpha").stderr_has("`pypi::alpha`, `pypi::beta`");
    env.tare(&["remove", "-n", "demo", "python"]).ok();
    assert!(!site.exists(), "{:?}", tree(&prefix, &[]));
    assert!(!prefix.join("conda-meta/tare/pypi/alpha.json").exists());
}

#[test]
fn one_lock_holds_both_halves() {
    let env = TestEnv::new();
    let wheels = env.work().join("wheels");
    wheel(&wheels, "alpha", "1.0", &["beta>=1", "gamma>=1 ; extra == 'fast'"]);
    wheel(&wheels, "beta", "2.0", &[]);
    wheel(&wheels, "gamma", "1.0", &[]);
    let file = |section: &str| {
        env.write(
            "environment.yml",
            format!(
                "name: demo\nchannels: [host, nodefaults]\ndependencies:\n  - python=3.11\n  - pip\n  - pip:\n    - --no-index\n    - --find-links {}\n    - {section}\n",
                wheels.display()
            ),
        )
    };
    file("alpha[fast]>=1");
    let locked = env.tare(&["lock", "-f", "environment.yml"]);
    if locked.code != 0 && locked.stderr.contains("no relocatable CPython") {
        eprintln!("skipped: no relocatable CPython 3.11 on this machine");
        return;
    }
    locked.ok();
    let read = || std::fs::read_to_string(env.work().join("tare.lock")).unwrap();
    let lock = read();
    for part in
        ["alpha-1.0-py3-none-any.whl", "beta-2.0-py3-none-any.whl", "gamma-1.0-py3-none-any.whl", "pypi-requested:", "pypi-engine: "]
    {
        assert!(lock.contains(part), "no {part} in\n{lock}");
    }
    env.tare(&["lock", "--check", "-f", "environment.yml"]).ok();

    // Installed from the lock, in one transaction, and known as what it is.
    let prefix = env.envs().join("demo");
    let synced = env.tare(&["sync"]).ok();
    assert!(!synced.stderr.contains("unchecked"), "{}", synced.stderr);
    env.tare(&["verify", "-n", "demo", "tare.lock"]).ok();
    let whole = tree(&prefix, &["conda-meta/history"]);
    let digest = env.tare(&["env", "digest", "-n", "demo"]).ok().stdout;
    env.tare(&["run", "-n", "demo", "alpha"]).ok().stdout_has("alpha 1.0");
    assert_eq!(env.tare(&["sync", "-n", "demo", "--json"]).ok().json()["changed"], false);
    env.write("copy.lock", &lock);
    assert_eq!(env.tare(&["sync", "-n", "demo", "copy.lock", "--json"]).ok().json()["changed"], false);
    env.tare(&["diff", "demo", "tare.lock"]).ok();

    // Damage that an edited RECORD would hide is found, and all of it is made good.
    let site = prefix.join("lib/python3.11/site-packages");
    std::fs::write(site.join("alpha/__init__.py"), "version = '6.6.6'\n").unwrap();
    std::fs::write(site.join("alpha-1.0.dist-info/RECORD"), "alpha/__init__.py,,\nalpha-1.0.dist-info/RECORD,,\n").unwrap();
    std::fs::remove_dir_all(site.join("gamma-1.0.dist-info")).unwrap();
    let found = env.tare(&["verify", "-n", "demo"]).expect_code(5).stdout_has("changed  lib/python3.11/site-packages/alpha/__init__.py");
    found.stdout_has("missing  lib/python3.11/site-packages/gamma-1.0.dist-info");
    env.tare(&["verify", "-n", "demo", "--repair"]).ok().stderr_has("linked 2 packages anew: alpha, gamma");
    // Byte code of the run above is nobody's.
    let different = |now: Vec<String>| -> Vec<String> {
        let gone = whole.iter().filter(|line| !now.contains(line)).map(|line| format!("- {line}"));
        let more = now.iter().filter(|line| !line.contains("/__pycache__/") && !whole.contains(line));
        gone.chain(more.map(|line| format!("+ {line}"))).collect()
    };
    assert_eq!(different(tree(&prefix, &["conda-meta/history"])), [""; 0]);

    assert_eq!(env.tare(&["env", "digest", "-n", "demo"]).ok().stdout, digest);

    // A lock without a hash says so once.
    let bare: String = lock
        .lines()
        .filter(|line| !line.trim_start().starts_with("sha256: ") || !after_wheel(&lock, line))
        .map(|line| format!("{line}\n"))
        .collect();
    assert_ne!(bare, lock);
    env.write("bare.lock", &bare);
    let unchecked =
        env.tare(&["sync", "-n", "unchecked", "bare.lock"]).ok().stderr_has("warning: the lock has no sha256 of `alpha`, `beta`, `gamma`");
    assert_eq!(
        unchecked.stderr.matches("unchecked:").count() + unchecked.stderr.matches("installed unchecked").count(),
        1,
        "{}",
        unchecked.stderr
    );

    // Other formats keep files and hashes, from the lock and from the environment.
    for source in [&["tare.lock"][..], &["-n", "demo"]] {
        let export = |format: &str| env.tare(&[&["export"], source, &["--format", format]].concat()).ok().stdout;
        let pylock = export("pylock");
        assert!(pylock.contains("name = \"alpha\"") && pylock.contains("sha256 = "), "{pylock}");
        let requirements = export("pip");
        assert_eq!(requirements.matches("--hash=sha256:").count(), 3, "{requirements}");
        assert_eq!(export("pixi").matches("- pypi: ").count(), 6);
    }
    env.tare(&["export", "-n", "demo", "--format", "tare", "-o", "again.lock"]).ok();
    env.tare(&["diff", "tare.lock", "again.lock"]).ok();

    // Minimal change: a newer one that nobody asked for stays away.
    wheel(&wheels, "beta", "3.0", &[]);
    env.tare(&["lock", "-f", "environment.yml"]).ok().stderr_has("up to date");
    assert_eq!(read(), lock);
    env.tare(&["lock", "-f", "environment.yml", "--update", "beta"]).ok().stderr_has("beta (pypi) 2.0 -> 3.0");
    env.tare(&["diff", "copy.lock", "tare.lock"]).expect_code(4).stdout_has("~ beta (pypi)  2.0 ").stdout_has("-> 3.0 ");
    env.tare(&["sync", "--dry-run"]).ok().stdout_has("beta").stdout_has("3.0");
    env.tare(&["create", "-n", "second", "--locked", "-f", "environment.yml", "--dry-run"]).ok().stdout_has("alpha").stdout_has("pypi");
    file("alpha>=2");
    env.tare(&["lock", "--check", "-f", "environment.yml"])
        .expect_code(4)
        .stderr_has("`alpha>=2` is not satisfied")
        .stderr_has("environment.yml:9:7");
    let bare = env.tare(&["sync", "-n", "bare", "--no-pip", "--dry-run"]).ok().stderr_has("3 packages not installed");
    assert!(!bare.stdout.contains("alpha"), "{}", bare.stdout);
}
