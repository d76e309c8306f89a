//! Whole installations with wheels that are made on the spot.
#![cfg(unix)]

use std::path::{Path, PathBuf};
use std::str::FromStr;

use rattler_conda_types::RepoDataRecord;
use sha2::{Digest, Sha256};
use url::Url;

use super::fetch::WHEELS;
use super::test_wheel::{Member, Wheel, member, zip};
use super::*;
use crate::channel::test_server::{Fault, TestServer};
use crate::error::Result;
use crate::install::tests::{Recipe, World, host_python, read, recipe, snapshot};
use crate::install::{LinkMode, Plan, TargetState, difference, hex_text, state_of_target};
use crate::prefix::Prefix;

const SITE: &str = "lib/python3.11/site-packages";

/// Something that is called `python` and does not run.
fn fake_python() -> Recipe {
    recipe("python").version("3.11.4").program("bin/python3.11", "no program\n")
}

fn ready_at(wheel: &Wheel, path: &Path) -> ReadyWheel {
    let bytes = std::fs::read(path).unwrap();
    ready(wheel, Url::from_file_path(path).unwrap(), &bytes)
}

fn ready(wheel: &Wheel, url: Url, bytes: &[u8]) -> ReadyWheel {
    ReadyWheel {
        record: PypiRecord {
            name: Name::from_str(&wheel.name).unwrap(),
            version: Version::from_str(&wheel.version).unwrap(),
            source: PypiSource::Archive {
                url,
                sha256: Some(hex_text(&Sha256::digest(bytes))),
                size: Some(bytes.len() as u64),
                index: Some("https://pypi.example/simple".parse().unwrap()),
                direct: false,
                subdirectory: None,
            },
            requires_dist: Vec::new(),
            requires_python: None,
            requested: false,
            extras: Vec::new(),
        },
        wheel: WheelFile::Remote,
    }
}

fn made(world: &World, wheel: &Wheel) -> ReadyWheel {
    ready_at(wheel, &wheel.write(&world.root().join("index")))
}

fn with(mut plan: Plan, wheels: Vec<ReadyWheel>) -> Plan {
    plan.pypi = Some(PypiPlan { wheels, python: Version::from_str("3.11.4").unwrap(), engine: None, clobber: false });
    plan.compile = false;
    plan
}

fn world_with_python() -> (World, Vec<RepoDataRecord>) {
    let world = World::new();
    let records = vec![world.build(&fake_python())];
    (world, records)
}

/// A wheel with a bit of everything.
fn rich() -> Wheel {
    Wheel::new("rich-er", "1.0+cu12")
        .file("rich_er/__init__.py", "X = 1\n")
        .file("rich_er/__pycache__/__init__.cpython-311.pyc", "stale")
        .program("rich_er/tool.so", "binary")
        .file("rich_er/a,b.txt", "comma")
        .file("single.py", "Y = 2\n")
        .program("rich_er-1.0+cu12.data/scripts/run-raw", "#!python -u\nprint('raw')\n")
        .file("rich_er-1.0+cu12.data/scripts/other.sh", "#!/bin/sh\n")
        .file("rich_er-1.0+cu12.data/headers/rich.h", "#define RICH\n")
        .file("rich_er-1.0+cu12.data/data/etc/rich.conf", "conf\n")
        .file("rich_er-1.0+cu12.data/purelib/more.py", "Z = 3\n")
        .file("rich_er-1.0+cu12.dist-info/licenses/LICENSE", "free\n")
        .entry_points("[console_scripts]\nrich = rich_er:main [fancy]\n[gui_scripts]\nrich-gui = rich_er.gui:App.run\n")
}

/// The rows of a RECORD against the files; returns the paths relative to the prefix.
fn check_record(prefix: &Path, info: &str) -> Vec<String> {
    let text = read(prefix.join(SITE).join(info).join("RECORD"));
    let mut paths = Vec::new();
    for line in record_file::parse(&text).unwrap() {
        let path = record_file::inside(Path::new(SITE), &line.path).unwrap();
        let bytes = std::fs::read(prefix.join(&path)).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        if path.ends_with("RECORD") {
            assert_eq!((&line.hash, line.size), (&None, None));
        } else {
            assert_eq!(line.sha256().unwrap()[..], Sha256::digest(&bytes)[..], "{}", path.display());
            assert_eq!(line.size, Some(bytes.len() as u64));
        }
        paths.push(path.to_str().unwrap().to_owned());
    }
    paths
}

#[tokio::test]
async fn a_wheel_lands_as_pip_would_put_it() {
    let (world, records) = world_with_python();
    let mut ready = made(&world, &rich());
    ready.record.requested = true;
    let plan = with(world.plan("e", &records), vec![ready]);
    let installed = world.create(&plan).await.unwrap();
    assert_eq!((installed.linked, installed.python_packages), (1, 1));
    let prefix = &plan.prefix;
    let info = "rich_er-1.0+cu12.dist-info";
    let listed = check_record(prefix, info);
    let mut expected = vec![
        "bin/other.sh".to_owned(),
        "bin/rich".into(),
        "bin/rich-gui".into(),
        "bin/run-raw".into(),
        "etc/rich.conf".into(),
        "include/python3.11/rich_er/rich.h".into(),
    ];
    for file in ["more.py", "rich_er/__init__.py", "rich_er/a,b.txt", "rich_er/tool.so", "single.py"] {
        expected.push(format!("{SITE}/{file}"));
    }
    for file in ["INSTALLER", "METADATA", "RECORD", "REQUESTED", "WHEEL", "entry_points.txt", "licenses/LICENSE"] {
        expected.push(format!("{SITE}/{info}/{file}"));
    }
    let mut sorted = listed.clone();
    sorted.sort();
    expected.sort();
    assert_eq!(sorted, expected);
    // Nothing is there that nobody lists.
    let on_disk: Vec<String> = snapshot(prefix)
        .into_iter()
        .filter(|(path, what)| !what.starts_with("dir") && !path.starts_with("conda-meta") && path != "bin/python3.11")
        .map(|(path, _)| path)
        .collect();
    assert_eq!(on_disk, expected);
    assert_eq!(read(prefix.join(SITE).join(info).join("INSTALLER")), "tare\n");
    let python = format!("#!{}/bin/python3.11\n", prefix.display());
    assert_eq!(read(prefix.join("bin/run-raw")), format!("{python}print('raw')\n"));
    let script = read(prefix.join("bin/rich"));
    assert!(script.starts_with(&python) && script.contains("from rich_er import main"), "{script}");
    assert!(read(prefix.join("bin/rich-gui")).contains("App.run()"));
    for entry in snapshot(prefix) {
        let executable = entry.0.starts_with("bin/") || entry.0.ends_with("tool.so");
        if entry.1.starts_with("file") && !entry.0.starts_with("conda-meta") {
            assert!(entry.1.starts_with(if executable { "file 755" } else { "file 644" }), "{entry:?}");
        }
        if entry.1.starts_with("dir") {
            assert_eq!(entry.1, "dir 755", "{entry:?}");
        }
        let bytes = std::fs::read(prefix.join(&entry.0)).unwrap_or_default();
        assert!(!bytes.windows(11).any(|window| window == b".tare-stage"), "{entry:?}");
    }
    // No package of conda, but known to tare.
    assert!(!prefix.join("conda-meta/rich-er-1.0+cu12-pypi_0.json").exists());
    let record: TareRecord = serde_json::from_str(&read(prefix.join("conda-meta/tare/pypi/rich-er.json"))).unwrap();
    assert_eq!(record.record, plan.pypi.as_ref().unwrap().wheels[0].record);
    assert_eq!(record.files.len(), expected.len());
    let rows = crate::prefix::rows(&Prefix::open(prefix).unwrap(), &Default::default()).unwrap();
    let row = rows.iter().find(|row| row.name == "rich-er").unwrap();
    assert_eq!((row.channel.as_str(), row.build_string.as_str(), row.version.as_str()), ("pypi", "pypi_0", "1.0+cu12"));
    let report = crate::verify::verify(&Prefix::open(prefix).unwrap(), Default::default(), &crate::report::Silent).unwrap();
    assert_eq!(report.findings, []);
    // The files are those of the cache where the file system can do that.
    let TargetState::Environment(existing) = state_of_target(prefix).unwrap() else { panic!() };
    assert_eq!(difference(&existing, &plan), None);
    let mut other = plan.clone();
    other.pypi = None;
    assert_eq!(difference(&existing, &other).unwrap(), "it holds other Python packages");
    std::fs::remove_file(prefix.join(SITE).join("single.py")).unwrap();
    assert_eq!(difference(&existing, &plan).unwrap(), format!("`{SITE}/single.py` is missing"));
}

#[tokio::test]
async fn the_same_wheels_give_the_same_bytes_whatever_the_link_mode_and_umask() {
    let (world, records) = world_with_python();
    let wheels = vec![made(&world, &rich()), made(&world, &Wheel::new("b", "2").file("b.py", "B = 1\n"))];
    let mut plan = with(world.plan("e", &records), wheels);
    world.create(&plan).await.unwrap();
    let first = snapshot(&plan.prefix);
    for mode in [LinkMode::Hardlink, LinkMode::Copy] {
        std::fs::remove_dir_all(&plan.prefix).unwrap();
        std::fs::remove_dir_all(world.root().join("cache")).unwrap();
        plan.pypi.as_mut().unwrap().wheels.reverse();
        plan.link_mode = mode;
        let old = rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o077));
        let result = world.create(&plan).await;
        rustix::process::umask(old);
        result.unwrap();
        assert_eq!(snapshot(&plan.prefix), first, "{mode}");
        if mode == LinkMode::Hardlink {
            use std::os::unix::fs::MetadataExt;
            assert!(std::fs::metadata(plan.prefix.join(SITE).join("b.py")).unwrap().nlink() > 1);
        }
    }
}

#[tokio::test]
async fn names_of_both_halves_are_separate_and_files_are_not() {
    let (world, mut records) = world_with_python();
    records.push(world.build(&recipe("foo").file("share/foo", "conda's\n").file(&format!("{SITE}/same.py"), "S = 1\n")));
    let plain = Wheel::new("foo", "1.0").file("foo.py", "F = 1\n").file("same.py", "S = 1\n");
    let ok = with(world.plan("both", &records), vec![made(&world, &plain)]);
    world.create(&ok).await.unwrap();
    assert!(ok.prefix.join("share/foo").exists() && ok.prefix.join(SITE).join("foo.py").exists());
    assert!(check_record(&ok.prefix, "foo-1.0.dist-info").contains(&format!("{SITE}/same.py")));
    let verified = crate::verify::verify(&Prefix::open(&ok.prefix).unwrap(), Default::default(), &crate::report::Silent).unwrap();
    assert_eq!(verified.findings, []);

    let clash = Wheel::new("bar", "1.0").file("bar.py", "").file("bar-1.0.data/data/share/foo", "PyPI's\n");
    let mut plan = with(world.plan("clash", &records), vec![made(&world, &clash)]);
    let error = world.create(&plan).await.unwrap_err();
    assert_eq!(error.exit_code(), 1);
    assert_eq!(error.causes(), ["`share/foo`: `foo` and `pypi::bar`"]);
    assert!(!plan.prefix.exists());
    plan.pypi.as_mut().unwrap().clobber = true;
    let installed = world.create(&plan).await.unwrap();
    assert_eq!(installed.clobbered.len(), 1);
    assert_eq!(read(plan.prefix.join("share/foo")), "PyPI's\n");
    assert_eq!(read(plan.prefix.join("__clobbers__/foo/share/foo")), "conda's\n");
    let verified = crate::verify::verify(&Prefix::open(&plan.prefix).unwrap(), Default::default(), &crate::report::Silent).unwrap();
    assert_eq!(verified.findings, []);

    // A command over a program, a file over a folder and a file below a file.
    for (wheel, what) in [
        (Wheel::new("a", "1").entry_points("[console_scripts]\npython3.11 = a:b\n"), "`bin/python3.11`: `python` and `pypi::a`"),
        (Wheel::new("a", "1").file("a-1.data/data/share", "x"), "`foo` puts files below it"),
        (Wheel::new("a", "1").file("a-1.data/data/share/foo/x", "x"), "`pypi::a` puts files below it"),
    ] {
        let plan = with(world.plan("never", &records), vec![made(&world, &wheel)]);
        let error = world.create(&plan).await.unwrap_err();
        assert!(error.causes().iter().any(|cause| cause == what), "{error}");
        assert!(!plan.prefix.exists());
    }
    // Wheels among themselves: the last one wins, and the lists stay true.
    let wheels = ["x", "y"]
        .map(|name| made(&world, &Wheel::new(name, "1").file("tests/__init__.py", format!("# {name}\n")).file("LICENSE", "same")));
    let plan = with(world.plan("overlap", &records), wheels.to_vec());
    world.create(&plan).await.unwrap();
    assert_eq!(read(plan.prefix.join(SITE).join("tests/__init__.py")), "# y\n");
    assert!(!check_record(&plan.prefix, "x-1.dist-info").iter().any(|path| path.ends_with("tests/__init__.py")));
    assert!(check_record(&plan.prefix, "y-1.dist-info").iter().any(|path| path.ends_with("LICENSE")));
    assert!(check_record(&plan.prefix, "x-1.dist-info").iter().any(|path| path.ends_with("LICENSE")));
}

#[tokio::test]
async fn direct_references_say_where_they_are_from_and_no_secret() {
    let (world, records) = world_with_python();
    let wheel = |name: &str| Wheel::new(name, "1").file(&format!("{name}.py"), "");
    let mut archive = made(&world, &wheel("a"));
    let PypiSource::Archive { direct, url, .. } = &mut archive.record.source else { panic!() };
    *direct = true;
    let url = url.clone();
    let local = |name: &str, source: PypiSource| {
        let path = wheel(name).write(&world.root().join("built"));
        let sha256 = hex_text(&Sha256::digest(std::fs::read(&path).unwrap()));
        let mut ready = ready_at(&wheel(name), &path);
        ready.record.source = source;
        ready.wheel = WheelFile::Local { path, sha256 };
        ready
    };
    let vcs = local(
        "b",
        PypiSource::Vcs {
            system: "git".into(),
            url: "https://user:secret@git.example/b.git".parse().unwrap(),
            requested_revision: Some("main".into()),
            commit: "0123".into(),
            subdirectory: Some("python".into()),
        },
    );
    let editable = local("c", PypiSource::Directory { path: "/src/c".into(), editable: true });
    let sdist = local(
        "d",
        PypiSource::Archive {
            url: "https://pypi.example/d-1.tar.gz".parse().unwrap(),
            sha256: Some("ab".repeat(32)),
            size: Some(5),
            index: None,
            direct: false,
            subdirectory: None,
        },
    );
    let plan = with(world.plan("e", &records), vec![archive.clone(), vcs, editable, sdist]);
    world.create(&plan).await.unwrap();
    let direct = |name: &str| -> serde_json::Value {
        serde_json::from_str(&read(plan.prefix.join(SITE).join(format!("{name}-1.dist-info/direct_url.json")))).unwrap()
    };
    let PypiSource::Archive { sha256: Some(hash), .. } = &archive.record.source else { panic!() };
    assert_eq!(
        direct("a"),
        serde_json::json!({ "url": url.to_string(), "archive_info": { "hash": format!("sha256={hash}"), "hashes": { "sha256": hash } } })
    );
    assert_eq!(
        direct("b"),
        serde_json::json!({ "url": "https://git.example/b.git", "subdirectory": "python",
            "vcs_info": { "vcs": "git", "commit_id": "0123", "requested_revision": "main" } })
    );
    assert_eq!(direct("c"), serde_json::json!({ "url": "file:///src/c", "dir_info": { "editable": true } }));
    assert!(!plan.prefix.join(SITE).join("d-1.dist-info/direct_url.json").exists());
    for entry in snapshot(&plan.prefix) {
        let bytes = std::fs::read(plan.prefix.join(&entry.0)).unwrap_or_default();
        assert!(!bytes.windows(6).any(|window| window == b"secret"), "{entry:?}");
    }
    let verified = crate::verify::verify(&Prefix::open(&plan.prefix).unwrap(), Default::default(), &crate::report::Silent).unwrap();
    assert_eq!(verified.findings, []);
}

#[tokio::test]
async fn wheels_are_compiled_like_noarch_packages_and_run() {
    let Some((interpreter, version)) = host_python() else {
        eprintln!("skipped: no python3 on PATH");
        return;
    };
    let world = World::new();
    let version: &'static str = Box::leak(version.into_boxed_str());
    let path: &'static str = Box::leak(format!("bin/python{version}").into_boxed_str());
    let python = recipe("python").version(version).program(path, &format!("#!/bin/sh\nexec '{}' \"$@\"\n", interpreter.display()));
    let wheel = Wheel::new("hello", "1").file("hello/__init__.py", "def main(): print('hello')\n").file("hello/broken.py", "def (:\n");
    let mut plan = with(world.plan("e", &[world.build(&python)]), vec![made(&world, &wheel)]);
    plan.pypi.as_mut().unwrap().python = Version::from_str(version).unwrap();
    plan.compile = true;
    assert_eq!(world.create(&plan).await.unwrap().compiled, 1);
    let site = format!("lib/python{version}/site-packages");
    let pyc = format!("{site}/hello/__pycache__/__init__.cpython-{}.pyc", version.replace('.', ""));
    let bytes = std::fs::read(plan.prefix.join(&pyc)).unwrap();
    assert_eq!(bytes[4..8], [1, 0, 0, 0]);
    let record = read(plan.prefix.join(&site).join("hello-1.dist-info/RECORD"));
    assert!(record.contains("hello/__pycache__/__init__.cpython"), "{record}");
    let tare: TareRecord = serde_json::from_str(&read(plan.prefix.join("conda-meta/tare/pypi/hello.json"))).unwrap();
    assert!(tare.files.iter().any(|file| file.path == pyc));
    let verified = crate::verify::verify(&Prefix::open(&plan.prefix).unwrap(), Default::default(), &crate::report::Silent).unwrap();
    assert_eq!(verified.findings, []);
}

/// A hostile or broken wheel, and a word of the reason.
fn hostile() -> Vec<(&'static str, Vec<u8>, &'static str)> {
    let plain = || Wheel::new("evil", "1.0").file("evil.py", "E = 1\n");
    let listed = |name: &str| plain().file(name, "x").build();
    let bytes = |name: &[u8]| plain().with(member(name, "x")).build();
    let special = |mode: u32, data: &str| plain().with(Member { mode, ..member("evil/x", data) }).build();
    let info = "evil-1.0.dist-info";
    let mut cases = vec![
        // Paths.
        ("an absolute path", listed("/tmp/planted"), "absolute path"),
        ("a path upwards", listed("../planted"), "leads out"),
        ("a path upwards in the middle", listed("evil/../../planted"), "leads out"),
        ("a path upwards in a scheme", listed("evil-1.0.data/data/../../planted"), "leads out"),
        ("a dot", listed("./evil/x.py"), "not a plain path"),
        ("two slashes", listed("evil//x.py"), "not a plain path"),
        ("a backslash", listed("evil\\x.py"), "backslash"),
        ("a drive", listed("C:/x.py"), "drive"),
        ("a NUL", bytes(b"evil/x\0.py"), "control character"),
        ("a line break", bytes(b"evil/x\n.py"), "control character"),
        ("no UTF-8", bytes(b"evil/\xff.py"), "not UTF-8"),
        ("a long name", listed(&format!("evil/{}", "n".repeat(300))), "longer"),
        // What is no file.
        ("a symbolic link", special(0o120_777, "/etc/passwd"), "symbolic link"),
        ("a character device", special(0o020_644, ""), "device"),
        ("a block device", special(0o060_644, ""), "device"),
        ("a pipe", special(0o010_644, ""), "pipe"),
        ("a socket", special(0o140_644, ""), "socket"),
        ("a folder that is called a file", special(0o040_755, ""), "folder"),
        ("a folder with contents", plain().with(Member { mode: 0o040_755, ..member("evil/d/", "x") }).build(), "contents of its own"),
        ("an encrypted file", plain().with(Member { flags: 1, ..member("evil/x", "x") }).build(), "encrypted"),
        ("an odd compression", plain().with(Member { method: 12, ..member("evil/x", "x") }).build(), "compress"),
        // Twice.
        ("a file twice", plain().unlisted(member("evil.py", "other")).build(), "same name"),
        ("a place twice", plain().file("evil-1.0.data/purelib/evil.py", "x").build(), "have the place"),
        ("a file and a folder", plain().file("evil.py/x", "x").build(), "lie below it"),
        // Bombs and sizes.
        ("a size that is a lie", plain().with(Member { claims: Some(9), ..member("evil/x", "x") }).build(), ""),
        ("a bomb by its word", plain().with(Member { claims: Some(u32::MAX - 1), ..member("evil/x", "x") }).build(), "far more"),
        // Identity.
        ("another name in the folder", Wheel { dist_info: Some("good-1.0.dist-info".into()), ..plain() }.build(), "good 1.0"),
        ("another version in the folder", Wheel { dist_info: Some("evil-2.0.dist-info".into()), ..plain() }.build(), "evil 2.0"),
        (
            "another name in the metadata",
            Wheel { metadata: Some("Metadata-Version: 2.1\nName: good\nVersion: 1.0\n".into()), ..plain() }.build(),
            "`METADATA` says",
        ),
        ("no version in the metadata", Wheel { metadata: Some("Name: evil\n".into()), ..plain() }.build(), "no `Version`"),
        ("two metadata folders", listed("good-1.0.dist-info/METADATA"), "several folders"),
        ("a later format", Wheel { format: "2.0".into(), ..plain() }.build(), "version 2.0"),
        ("no format", Wheel { format: "x".into(), ..plain() }.build(), "version x"),
        ("an unknown scheme", listed("evil-1.0.data/kernel/x"), "scheme `kernel`"),
        ("data of another distribution", listed("good-1.0.data/data/x"), "another distribution"),
        ("the notes of the environment", listed("evil-1.0.data/data/conda-meta/history"), "notes of the environment"),
        ("a script in a folder", listed("evil-1.0.data/scripts/a/b"), "script in a folder"),
        // RECORD.
        ("a wrong hash", plain().record(|text| text.replacen("sha256=", "sha256=AA", 1).replacen("AA", "", 0)).build(), "line 1"),
        ("a hash of other contents", plain().record(|text| swap_hashes(&text)).build(), "not what its `RECORD` says"),
        ("a wrong size", plain().record(|text| text.replacen(",6\n", ",7\n", 1)).build(), "`RECORD` says 7"),
        ("a file that is not listed", plain().unlisted(member("hidden.py", "x")).build(), "`hidden.py` in it is not in its `RECORD`"),
        ("a listed file that is not there", plain().record(|text| text + "ghost.py,,\n").build(), "`ghost.py`, which is not in it"),
        ("a file listed twice", plain().record(|text| text.clone() + text.lines().next().unwrap() + "\n").build(), "twice"),
        ("no hash", plain().record(|text| strip_hash(&text)).build(), "no hash"),
        ("a weak hash", plain().record(|text| text.replacen("sha256=", "md5=", 1)).build(), "md5"),
        ("a list that is none", plain().record(|_| "\"".to_owned()).build(), "line 1"),
        // Entry points.
        ("an entry point upwards", plain().entry_points("[console_scripts]\n../x = evil:f\n").build(), "entry point"),
        ("an absolute entry point", plain().entry_points("[gui_scripts]\n/x = evil:f\n").build(), "entry point"),
        ("code in an entry point", plain().entry_points("[console_scripts]\nx = evil:f);import os;(f\n").build(), "entry point"),
        // Broken archives.
        (
            "half a wheel",
            {
                let all = plain().build();
                all[..all.len() / 2].to_vec()
            },
            "no readable archive",
        ),
        ("no archive", b"<html>503</html>".to_vec(), "no readable archive"),
        ("nothing", Vec::new(), "no readable archive"),
        ("no metadata folder", zip(&[member("evil.py", "x")]), "no folder `.dist-info`"),
        (
            "no list",
            zip(&[
                member(format!("{info}/METADATA"), "Name: evil\nVersion: 1.0\n"),
                member(format!("{info}/WHEEL"), "Wheel-Version: 1.0\n"),
            ]),
            "no `RECORD`",
        ),
    ];
    // Contents that are changed after the list was made: the check sum of the archive tells.
    let mut changed = plain().build();
    let at = changed.windows(6).position(|window| window == b"E = 1\n").unwrap();
    changed[at] = b'F';
    cases.push(("changed contents", changed, "cannot be read"));
    // Two names for the same bytes.
    let mut shared = plain().file("evil/aaaa.py", "AAAA").file("evil/bbbb.py", "AAAA").build();
    let central: Vec<usize> = shared.windows(4).enumerate().filter(|(_, window)| window == b"PK\x01\x02").map(|(at, _)| at).collect();
    let offset: Vec<u8> = shared[central[1] + 42..central[1] + 46].to_vec();
    shared[central[2] + 42..central[2] + 46].copy_from_slice(&offset);
    cases.push(("two names for the same bytes", shared, "share their bytes"));
    cases
}

fn swap_hashes(text: &str) -> String {
    let mut lines: Vec<Vec<&str>> = text.lines().map(|line| line.split(',').collect()).collect();
    let first = lines[0][1];
    lines[0][1] = lines[1][1];
    lines[1][1] = first;
    lines.iter().map(|line| line.join(",") + "\n").collect()
}

fn strip_hash(text: &str) -> String {
    let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
    let path = lines[0].split(',').next().unwrap().to_owned();
    lines[0] = format!("{path},,");
    lines.join("\n") + "\n"
}

#[tokio::test]
async fn hostile_wheels_are_refused_and_leave_nothing() {
    let (world, records) = world_with_python();
    let cases = hostile();
    assert!(cases.len() >= 50, "{}", cases.len());
    let named = Wheel::new("evil", "1.0");
    let index = world.root().join("index");
    std::fs::create_dir_all(&index).unwrap();
    let before = || {
        let mut all = snapshot(&world.root());
        all.retain(|(path, _)| !path.starts_with("cache/") && !path.starts_with("index/") && path != "envs" && path != "cache");
        all
    };
    let clean = before();
    for (what, bytes, word) in cases {
        let path = index.join(named.file_name());
        std::fs::write(&path, &bytes).unwrap();
        let plan = with(world.plan("e", &records), vec![ready_at(&named, &path)]);
        let error = world.create(&plan).await.err().unwrap_or_else(|| panic!("{what} was installed"));
        assert_eq!(error.exit_code(), 5, "{what}: {error}");
        assert!(error.causes().first().is_some_and(|cause| cause.contains(word)), "{what}: {error}");
        assert!(error.causes().last().unwrap().ends_with(".whl"), "{what}: {error}");
        assert_eq!(before(), clean, "{what}");
        let left: Vec<String> = std::fs::read_dir(world.root().join("cache/pkgs").join(WHEELS))
            .into_iter()
            .flatten()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .filter(|name| name != ".tare-locks")
            .collect();
        assert_eq!(left, Vec::<String>::new(), "{what}");
    }
    // Names of files that are none of wheels, or of other wheels.
    for (name, word) in
        [("evil-1.0.whl", "not that of a wheel"), ("good-1.0-py3-none-any.whl", "`good`"), ("evil-2.0-py3-none-any.whl", "version 2.0")]
    {
        let path = index.join(name);
        std::fs::write(&path, named.build()).unwrap();
        let plan = with(world.plan("e", &records), vec![ready_at(&named, &path)]);
        let error = world.create(&plan).await.unwrap_err();
        assert!(error.exit_code() == 5 && error.to_string().contains(word), "{name}: {error}");
    }
    // A Python that the wheel does not want.
    let wheel = Wheel::new("old", "1").header("Requires-Python: >=2.7,<3");
    let error = world.create(&with(world.plan("e", &records), vec![made(&world, &wheel)])).await.unwrap_err();
    assert_eq!((error.exit_code(), error.message()), (5, "`old 1` does not work with Python 3.11.4"));
    // Another platform, another Python.
    for tag in ["cp311-cp311-win_amd64", "cp311-cp311-manylinux_2_28_aarch64", "cp312-cp312-manylinux_2_28_x86_64", "py2-none-any"] {
        let wheel = made(&world, &Wheel::new("far", "1").tag(tag));
        let error = world.create(&with(world.plan("e", &records), vec![wheel])).await.unwrap_err();
        assert_eq!((error.exit_code(), error.message()), (5, "`far 1` is not for this environment"), "{tag}");
    }
    // No Python at all, and a name twice.
    let plain = made(&world, &Wheel::new("p", "1"));
    let error = world.create(&with(world.plan("e", &[]), vec![plain.clone()])).await.unwrap_err();
    assert!(error.message().contains("needs Python"), "{error}");
    let error = world.create(&with(world.plan("e", &records), vec![plain.clone(), plain])).await.unwrap_err();
    assert!(error.message().contains("more than once"), "{error}");
    assert_eq!(before(), clean);
}

fn served(server: &TestServer, wheel: &Wheel) -> ReadyWheel {
    let bytes = wheel.build();
    let path = format!("/files/{}", wheel.file_name().replace('+', "%2B"));
    server.put(&path, bytes.clone());
    ready(wheel, server.url(&path).parse().unwrap(), &bytes)
}

#[tokio::test]
async fn downloads_are_checked_resumed_and_cached() {
    let (world, records) = world_with_python();
    let server = TestServer::new();
    let wheel = Wheel::new("big", "1.0").file("big/data.bin", vec![7_u8; 300_000]);
    let ready = served(&server, &wheel);
    // Cut twice, then whole.
    server.fault("/files/big", Fault::Truncate { after: 100_000, times: 2 });
    let plan = with(world.plan("e", &records), vec![ready.clone()]);
    world.create(&plan).await.unwrap();
    assert_eq!(server.count("GET", ".whl"), 3);
    // From the cache, with the server gone.
    let gone = with(world.plan("again", &records), vec![ready.clone()]);
    server.fault("/files", Fault::Hangup { times: 100 });
    world.create(&gone).await.unwrap();
    assert_eq!(server.count("GET", ".whl"), 3);
    // A file of the cache that was written to is found out, and the wheel fetched again.
    server.heal();
    let entry = std::fs::read_dir(world.root().join("cache/pkgs").join(WHEELS))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .find(|path| path.file_name().unwrap().to_str().unwrap().starts_with("big-1.0-"))
        .unwrap();
    // Its metadata is told from there, as long as it is what was unpacked.
    let cache = rattler_cache::package_cache::PackageCache::new(world.root().join("cache/pkgs"));
    let told = fetch::cached_metadata(&cache, &ready.record).unwrap();
    assert_eq!((told.name.as_str(), told.version.as_str()), ("big", "1.0"));
    let about = entry.join("files/site/big-1.0.dist-info/METADATA");
    let text = std::fs::read_to_string(&about).unwrap();
    std::fs::write(&about, format!("{text}Requires-Dist: evil\n")).unwrap();
    assert!(fetch::cached_metadata(&cache, &ready.record).is_none());
    std::fs::write(&about, text).unwrap();
    let file = entry.join("files/site/big/data.bin");
    std::fs::remove_file(&file).unwrap();
    std::thread::sleep(std::time::Duration::from_millis(20));
    std::fs::write(&file, vec![8_u8; 300_000]).unwrap();
    let third = with(world.plan("third", &records), vec![ready.clone()]);
    world.create(&third).await.unwrap();
    assert_eq!(server.count("GET", ".whl"), 4);
    assert_eq!(std::fs::read(third.prefix.join(SITE).join("big/data.bin")).unwrap()[0], 7);

    let try_it = async |name: &str, ready: ReadyWheel| world.create(&with(world.plan(name, &records), vec![ready])).await.unwrap_err();
    // Always cut.
    let cut = served(&server, &Wheel::new("cut", "1").file("cut.py", vec![b'#'; 10_000]));
    server.fault("/files/cut", Fault::Truncate { after: 100, times: 100 });
    let error = try_it("cut", cut).await;
    assert_eq!((error.exit_code(), error.message()), (7, "cannot fetch the wheel of cut 1"), "{error}");
    // Not there, not allowed.
    let mut missing = served(&server, &Wheel::new("missing", "1"));
    let PypiSource::Archive { url, .. } = &mut missing.record.source else { panic!() };
    url.set_path("/files/gone/missing-1-py3-none-any.whl");
    assert!(try_it("missing", missing).await.to_string().contains("404"));
    let private = served(&server, &Wheel::new("private", "1"));
    server.fault("/files/private", Fault::Status { code: 403, times: 1, headers: Vec::new() });
    let error = try_it("private", private).await;
    assert!(error.exit_code() == 7 && error.hints().iter().any(|hint| hint.contains("tare auth login")), "{error:?}");
    // Other contents, other size.
    let other = served(&server, &Wheel::new("other", "1"));
    server.fault("/files/other", Fault::Body(Wheel::new("other", "1").file("evil.py", "x").build()));
    let error = try_it("other", other).await;
    assert_eq!((error.exit_code(), error.message()), (5, "the wheel of other 1 is not what was asked for"), "{error}");
    let mut sized = served(&server, &Wheel::new("sized", "1"));
    let PypiSource::Archive { size, .. } = &mut sized.record.source else { panic!() };
    *size = Some(3);
    assert_eq!(try_it("sized", sized).await.exit_code(), 5);
    // A hash that is not known is what came.
    let mut unknown = served(&server, &Wheel::new("un.known", "1.0+cu12"));
    let PypiSource::Archive { sha256, size, .. } = &mut unknown.record.source else { panic!() };
    (*sha256, *size) = (None, None);
    let plan = with(world.plan("unknown", &records), vec![unknown]);
    world.create(&plan).await.unwrap();
    let record: TareRecord = serde_json::from_str(&read(plan.prefix.join("conda-meta/tare/pypi/un-known.json"))).unwrap();
    assert_eq!(record.wheel.sha256.len(), 64);
    let temporary: Vec<PathBuf> = std::fs::read_dir(world.root().join("cache/pkgs").join(WHEELS))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.file_name().unwrap().to_str().unwrap().starts_with(['.']) && !path.ends_with(".tare-locks"))
        .collect();
    assert_eq!(temporary, Vec::<PathBuf>::new());
}

#[tokio::test]
async fn eight_at_once_on_a_cold_cache_share_one_download() -> Result<()> {
    let (world, records) = world_with_python();
    let server = TestServer::new();
    let wheels: Vec<ReadyWheel> =
        ["a", "b", "c"].map(|name| served(&server, &Wheel::new(name, "1").file(&format!("{name}.py"), name))).to_vec();
    let plans: Vec<Plan> = (0..8).map(|number| with(world.plan(&format!("e{number}"), &records), wheels.clone())).collect();
    let results = futures::future::join_all(plans.iter().map(|plan| world.create(plan))).await;
    for (plan, result) in plans.iter().zip(results) {
        result?;
        check_record(&plan.prefix, "a-1.dist-info");
    }
    assert_eq!(server.count("GET", ".whl"), 3);
    Ok(())
}

/// A gigabyte that no compression makes smaller, written piece by piece. Run with `cargo test -- --ignored large_wheel`.
#[tokio::test]
#[ignore = "writes 3 GB and takes a while"]
async fn a_large_wheel_is_never_in_memory() {
    use std::io::Write as _;
    let (world, records) = world_with_python();
    let index = world.root().join("index");
    std::fs::create_dir_all(&index).unwrap();
    let wheel = Wheel::new("large", "1.0");
    let path = index.join(wheel.file_name());
    let mut zip = zip_writer(&path);
    let options = ::zip::write::SimpleFileOptions::default();
    let stored = options.compression_method(::zip::CompressionMethod::Stored);
    let (mut record, mut state) = (String::new(), 1_u64);
    for (name, pieces, options) in [("large/stored.bin", 640, stored), ("large/deflated.bin", 384, options)] {
        zip.start_file(name, options).unwrap();
        let mut hasher = Sha256::new();
        let mut piece = vec![0_u8; 1 << 20];
        for _ in 0..pieces {
            for bytes in piece.chunks_exact_mut(8) {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                bytes.copy_from_slice(&state.to_le_bytes());
            }
            hasher.update(&piece);
            zip.write_all(&piece).unwrap();
        }
        record += &record_file::row(name, Some((&hasher.finalize()[..], (pieces as u64) << 20)));
    }
    for (name, text) in [
        ("large-1.0.dist-info/METADATA", "Name: large\nVersion: 1.0\n"),
        ("large-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n"),
    ] {
        zip.start_file(name, options).unwrap();
        zip.write_all(text.as_bytes()).unwrap();
        record += &record_file::row(name, Some((&Sha256::digest(text)[..], text.len() as u64)));
    }
    zip.start_file("large-1.0.dist-info/RECORD", options).unwrap();
    zip.write_all(record.as_bytes()).unwrap();
    zip.finish().unwrap();
    let (sha256, size) = {
        let digest = rattler_digest::compute_file_digest::<rattler_digest::Sha256>(&path).unwrap();
        (hex_text(&digest), std::fs::metadata(&path).unwrap().len())
    };
    assert!(size > 1 << 30);
    // Over HTTP, by a server that reads as it sends.
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/{}", listener.local_addr().unwrap(), wheel.file_name());
    let from = path.clone();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let _ = std::io::Read::read(&mut stream, &mut [0_u8; 4096]);
            let _ = write!(stream, "HTTP/1.1 200 OK\r\ncontent-length: {size}\r\nconnection: close\r\n\r\n");
            let _ = std::io::copy(&mut std::fs::File::open(&from).unwrap(), &mut stream);
        }
    });
    let mut ready = ready(&wheel, url.parse().unwrap(), b"");
    let PypiSource::Archive { sha256: hash, size: bytes, .. } = &mut ready.record.source else { panic!() };
    (*hash, *bytes) = (Some(sha256), Some(size));
    let peak = || -> u64 {
        let status = read("/proc/self/status");
        let line = status.lines().find(|line| line.starts_with("VmHWM:")).unwrap();
        line.split_whitespace().nth(1).unwrap().parse().unwrap()
    };
    let before = peak();
    let started = std::time::Instant::now();
    world.create(&with(world.plan("e", &records), vec![ready])).await.unwrap();
    println!("peak before {before} kB, after {} kB, {:.1} s", peak(), started.elapsed().as_secs_f64());
    assert!(peak() < 300 << 10, "{} kB", peak());
}

fn zip_writer(path: &Path) -> ::zip::ZipWriter<std::fs::File> {
    ::zip::ZipWriter::new(std::fs::File::create(path).unwrap())
}
