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
    env.tare(&["sync"]).ok();
    env.tare(&["verify", "-n", "demo", "tare.lock"]).ok();
    let whole = tree(&prefix, &["conda-meta/history"]);
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
    // Byte code of the run above is nobody's; what tare notes of where a wheel came from may be more than it was.
    let different = |now: Vec<String>| -> Vec<String> {
        let counts = |line: &String| !line.contains("conda-meta/tare/pypi/");
        let gone = whole.iter().filter(|line| counts(line) && !now.contains(line)).map(|line| format!("- {line}"));
        let more = now.iter().filter(|line| counts(line) && !line.contains("/__pycache__/") && !whole.contains(line));
        gone.chain(more.map(|line| format!("+ {line}"))).collect()
    };
    assert_eq!(different(tree(&prefix, &["conda-meta/history"])), [""; 0]);

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
