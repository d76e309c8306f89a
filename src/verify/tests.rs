#![cfg(unix)]

use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::*;
use crate::pypi::test_wheel::base64;
use crate::report::Silent;

const SITE: &str = "lib/python3.11/site-packages";
const PLACEHOLDER: &str = "/placeholder_placehold_placehold_placehold_placehold_placehold";
const MAGIC: u32 = 3495 | 0x0a0d_0000;

fn hex(bytes: &[u8]) -> String {
    hex_text(&Sha256::digest(bytes))
}

/// Byte code of the unchecked kind for `source`.
fn unchecked(source: &[u8]) -> Vec<u8> {
    let mut bytes = MAGIC.to_le_bytes().to_vec();
    bytes.extend(1u32.to_le_bytes());
    bytes.extend(pyc::siphash(u64::from(MAGIC), source, 1, 3).to_le_bytes());
    bytes.extend(b"code of a test");
    bytes
}

fn write(path: &Path, bytes: &[u8], mode: u32) {
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::write(path, bytes).unwrap();
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
}

fn record(root: &Path, name: &str, version: &str, depends: &[&str], paths: Vec<Value>) {
    let files: Vec<Value> = paths.iter().map(|path| path["_path"].clone()).collect();
    let record = json!({
        "name": name, "version": version, "build": "h0_0", "build_number": 0, "subdir": "linux-64", "depends": depends, "constrains": [],
        "fn": format!("{name}-{version}-h0_0.conda"), "url": format!("https://conda.anaconda.org/c/linux-64/{name}-{version}-h0_0.conda"),
        "channel": "c", "files": files, "paths_data": { "paths_version": 1, "paths": paths },
    });
    write(&root.join(format!("conda-meta/{name}-{version}-h0_0.json")), format!("{record:#}").as_bytes(), 0o644);
}

fn file(root: &Path, path: &str, bytes: &[u8], mode: u32) -> Value {
    write(&root.join(path), bytes, mode);
    json!({ "_path": path, "path_type": "hardlink", "sha256": hex(bytes), "size_in_bytes": bytes.len() })
}

/// A file in which the prefix was replaced.
fn replaced(root: &Path, path: &str, original: &[u8], mode: u32, kind: &str, with_hash: bool) -> Value {
    let prefix = root.to_str().unwrap().as_bytes();
    let made = if kind == "text" {
        replace(original, PLACEHOLDER.as_bytes(), prefix)
    } else {
        let mut made = replace(original, PLACEHOLDER.as_bytes(), prefix);
        // One text, whose zeros grow by what the path is shorter.
        let end = find(&made, prefix).unwrap();
        let zero = end + made[end..].iter().position(|byte| *byte == 0).unwrap();
        let missing = original.len() - made.len();
        made.splice(zero..zero, vec![0; missing]);
        made
    };
    write(&root.join(path), &made, mode);
    let mut entry = json!({
        "_path": path, "path_type": "hardlink", "sha256": hex(original), "size_in_bytes": original.len(),
        "prefix_placeholder": PLACEHOLDER, "file_mode": kind,
    });
    if with_hash {
        entry["sha256_in_prefix"] = json!(hex(&made));
    }
    entry
}

/// An environment with everything that is checked. `stamped`: as tare makes it, else as conda does.
fn environment(folder: &Path, stamped: bool) -> PathBuf {
    // Short, so that it fits the placeholder.
    let root = folder.canonicalize().unwrap().join("e");
    let library = b"\x7fELF library".to_vec();
    let mut binary = b"\x7fELF program\0".to_vec();
    binary.extend(format!("{PLACEHOLDER}/lib:{PLACEHOLDER}/share").bytes());
    binary.extend([0; 9]);
    binary.extend(b"tail");
    let link = |path: &str, target: &str, content: &[u8]| {
        symlink(target, root.join(path)).unwrap();
        json!({ "_path": path, "path_type": "softlink", "sha256": hex(content), "size_in_bytes": content.len() })
    };
    let script = format!("#!{PLACEHOLDER}/bin/python3.11\nprint(1)\n").into_bytes();
    let paths = vec![
        file(&root, "bin/python3.11", b"\x7fELF python", 0o755),
        file(&root, "lib/libx.so.1", &library, 0o755),
        link("lib/libx.so", "libx.so.1", &library),
        file(&root, "lib/liby.so.1", b"\x7fELF other", 0o755),
        file(&root, "lib/python3.11/os.py", b"import sys\n", 0o644),
        file(&root, "include/x.h", b"#define X\n", 0o644),
        file(&root, "share/doc/x.txt", b"text\n", 0o644),
        replaced(&root, "bin/tool", &script, 0o755, "text", true),
        replaced(&root, "lib/old.pc", format!("prefix={PLACEHOLDER}\n").as_bytes(), 0o644, "text", false),
        replaced(&root, "bin/prog", &binary, 0o755, "binary", true),
        replaced(&root, "bin/oldprog", &binary, 0o755, "binary", false),
    ];
    record(&root, "base", "1.0", &["__glibc >=2.17"], paths);
    let source = b"x = 1\n";
    let code = unchecked(source);
    let mut paths = vec![
        file(&root, &format!("{SITE}/pkg/__init__.py"), source, 0o644),
        file(&root, &format!("{SITE}/pkg-1.0.dist-info/METADATA"), b"Name: pkg\nVersion: 1.0\n", 0o644),
        file(&root, &format!("{SITE}/pkg-1.0.dist-info/RECORD"), b"pkg/__init__.py,sha256=wrong,6\n", 0o644),
        file(&root, &format!("{SITE}/pkg/__pycache__/__init__.cpython-311.pyc"), &code, 0o644),
        file(&root, "bin/pkg", b"#!/bin/sh\n", 0o755),
    ];
    paths[3]["path_type"] = json!("pyc_file");
    paths[4]["path_type"] = json!("unix_python_entry_point");
    record(&root, "pkg", "1.0", &["base >=1.0,<2"], paths);
    let body = b"y = 1\n";
    let metadata = b"Metadata-Version: 2.1\nName: einops\nVersion: 0.8\nRequires-Dist: pkg>=1\nRequires-Dist: absent; extra == 'x'\n";
    write(&root.join(SITE).join("einops/__init__.py"), body, 0o644);
    write(&root.join("bin/einops"), b"#!/bin/sh\n", 0o755);
    let info = root.join(SITE).join("einops-0.8.dist-info");
    write(&info.join("METADATA"), metadata, 0o644);
    write(&info.join("INSTALLER"), if stamped { b"tare\n" } else { b"pip\n" }, 0o644);
    let line = |path: &str, bytes: &[u8]| format!("{path},sha256={},{}\n", base64(&Sha256::digest(bytes)), bytes.len());
    let record = [
        line("einops/__init__.py", body),
        line("../../../bin/einops", b"#!/bin/sh\n"),
        line("einops-0.8.dist-info/METADATA", metadata),
        "einops-0.8.dist-info/INSTALLER,,\neinops-0.8.dist-info/RECORD,,\neinops/__pycache__/__init__.cpython-311.pyc,,\n".to_owned(),
    ]
    .concat();
    write(&info.join("RECORD"), record.as_bytes(), 0o644);
    write(&root.join("conda-meta/history"), b"", 0o644);
    if stamped {
        stamp(&root);
    }
    root
}

fn stamp(root: &Path) {
    let records: Vec<(String, u64)> = ["base-1.0-h0_0.json", "pkg-1.0-h0_0.json"]
        .map(|name| (name.to_owned(), std::fs::metadata(root.join("conda-meta").join(name)).unwrap().len()))
        .to_vec();
    let stamp = json!({
        "schema_version": 1, "tare_version": "0", "prefix": root, "subdir": "linux-64", "environment_digest": "", "compiled": true,
        "requested": [], "state_sha256": null, "records": records, "metadata": {},
    });
    write(&root.join("conda-meta/tare/environment.json"), stamp.to_string().as_bytes(), 0o644);
    let einops = json!({
        "schema_version": 1, "dist_info": format!("{SITE}/einops-0.8.dist-info"), "files": [],
        "record": {
            "name": "einops", "version": "0.8",
            "source": { "kind": "archive", "url": "https://pypi.example/einops-0.8-py3-none-any.whl", "sha256": hex(b"") },
        },
        "wheel": { "file_name": "einops-0.8-py3-none-any.whl", "sha256": hex(b""), "size": 0, "built": false },
    });
    write(&root.join("conda-meta/tare/pypi/einops.json"), einops.to_string().as_bytes(), 0o644);
    let executables = ["bin/oldprog", "bin/pkg", "bin/prog", "bin/python3.11", "bin/tool", "lib/libx.so.1", "lib/liby.so.1"];
    let mut modes: String = executables.iter().map(|path| format!("x {path}\n")).collect();
    modes.push_str("l lib/libx.so\n> libx.so.1\n");
    write(&root.join("conda-meta/tare/modes"), modes.as_bytes(), 0o644);
}

fn faults(root: &Path) -> Vec<Finding> {
    verify(&Prefix::open_any(root).unwrap(), Options::default(), &Silent).unwrap().findings
}

fn edit(path: PathBuf, change: impl FnOnce(&mut Vec<u8>)) {
    let mode = std::fs::metadata(&path).unwrap().permissions();
    let mut bytes = std::fs::read(&path).unwrap();
    change(&mut bytes);
    std::fs::write(&path, bytes).unwrap();
    std::fs::set_permissions(&path, mode).unwrap();
}

fn chmod(path: PathBuf, mode: u32) {
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
}

#[test]
fn an_untouched_environment_has_no_faults() {
    for stamped in [false, true] {
        let folder = tempfile::tempdir().unwrap();
        let root = environment(folder.path(), stamped);
        assert_eq!(faults(&root), [], "stamped: {stamped}");
        // What runs and people leave is no fault.
        let timestamped: Vec<u8> = MAGIC.to_le_bytes().into_iter().chain([0; 12]).chain(*b"code").collect();
        write(&root.join(SITE).join("einops/__pycache__/__init__.cpython-311.pyc"), &timestamped, 0o644);
        write(&root.join("lib/python3.11/__pycache__/os.cpython-311.pyc"), &timestamped, 0o644);
        write(&root.join("etc/jupyter/x.json"), b"{}", 0o600);
        write(&root.join("share/jupyter/kernels/k.json"), b"{}", 0o644);
        write(&root.join("var/cache/x"), b"", 0o644);
        assert_eq!(faults(&root), [], "stamped: {stamped}");
    }
}

type Plant = (&'static str, Fault, &'static str, fn(&Path));

/// What is planted, which fault is to be found, at which path.
fn plants() -> Vec<Plant> {
    fn site(root: &Path, path: &str) -> PathBuf {
        root.join(SITE).join(path)
    }
    vec![
        ("one flipped bit", Fault::Changed, "lib/libx.so.1", |root| edit(root.join("lib/libx.so.1"), |bytes| bytes[6] ^= 1)),
        ("a flipped bit in a replaced binary", Fault::Changed, "bin/prog", |root| {
            edit(root.join("bin/prog"), |bytes| *bytes.last_mut().unwrap() ^= 1)
        }),
        ("a flipped bit where the record has no hash after the replacement", Fault::Changed, "bin/oldprog", |root| {
            edit(root.join("bin/oldprog"), |bytes| *bytes.last_mut().unwrap() ^= 1)
        }),
        ("an edited text without such a hash", Fault::Changed, "lib/old.pc", |root| {
            edit(root.join("lib/old.pc"), |bytes| bytes.push(b'x'))
        }),
        ("an edited script", Fault::Changed, "bin/tool", |root| edit(root.join("bin/tool"), |bytes| bytes.extend(b"import os\n"))),
        ("a truncated file", Fault::Changed, "include/x.h", |root| edit(root.join("include/x.h"), |bytes| bytes.truncate(3))),
        ("an emptied file", Fault::Changed, "share/doc/x.txt", |root| edit(root.join("share/doc/x.txt"), Vec::clear)),
        ("a missing file", Fault::Missing, "lib/liby.so.1", |root| std::fs::remove_file(root.join("lib/liby.so.1")).unwrap()),
        ("a missing folder", Fault::Missing, "include/x.h", |root| std::fs::remove_dir_all(root.join("include")).unwrap()),
        ("a missing entry point", Fault::Missing, "bin/pkg", |root| std::fs::remove_file(root.join("bin/pkg")).unwrap()),
        ("a folder in place of a file", Fault::Changed, "include/x.h", |root| {
            std::fs::remove_file(root.join("include/x.h")).unwrap();
            std::fs::create_dir(root.join("include/x.h")).unwrap();
        }),
        ("an entry point that cannot be executed", Fault::WrongMode, "bin/pkg", |root| chmod(root.join("bin/pkg"), 0o644)),
        ("an interpreter that cannot be executed", Fault::WrongMode, "bin/python3.11", |root| chmod(root.join("bin/python3.11"), 0o644)),
        ("a file that all may write", Fault::WrongMode, "include/x.h", |root| chmod(root.join("include/x.h"), 0o666)),
        ("a set-user-id program", Fault::WrongMode, "bin/python3.11", |root| chmod(root.join("bin/python3.11"), 0o4755)),
        ("an extra module", Fault::Extra, "lib/python3.11/site-packages/evil.py", |root| write(&site(root, "evil.py"), b"", 0o644)),
        ("an extra file in a package", Fault::Extra, "lib/python3.11/site-packages/pkg/evil.py", |root| {
            write(&site(root, "pkg/evil.py"), b"", 0o644)
        }),
        ("an extra .pth", Fault::Extra, "lib/python3.11/site-packages/x.pth", |root| write(&site(root, "x.pth"), b"import os", 0o644)),
        ("an extra program", Fault::Extra, "bin/evil", |root| write(&root.join("bin/evil"), b"#!/bin/sh\n", 0o755)),
        ("an extra library", Fault::Extra, "lib/libz.so", |root| write(&root.join("lib/libz.so"), b"", 0o755)),
        ("an extra standard module", Fault::Extra, "lib/python3.11/abc2.py", |root| {
            write(&root.join("lib/python3.11/abc2.py"), b"", 0o644)
        }),
        ("a changed file of pip", Fault::Changed, "lib/python3.11/site-packages/einops/__init__.py", |root| {
            edit(site(root, "einops/__init__.py"), |bytes| bytes[0] = b'z')
        }),
        ("a missing file of pip", Fault::Missing, "bin/einops", |root| std::fs::remove_file(root.join("bin/einops")).unwrap()),
        ("an edited hash in RECORD", Fault::Changed, "lib/python3.11/site-packages/einops/__init__.py", |root| {
            edit(site(root, "einops-0.8.dist-info/RECORD"), |bytes| {
                let at = find(bytes, b"sha256=").unwrap() + 7;
                bytes[at] = if bytes[at] == b'A' { b'B' } else { b'A' };
            })
        }),
        ("a line taken out of RECORD", Fault::Extra, "lib/python3.11/site-packages/einops/__init__.py", |root| {
            edit(site(root, "einops-0.8.dist-info/RECORD"), |bytes| {
                let end = bytes.iter().position(|byte| *byte == b'\n').unwrap();
                bytes.drain(..=end);
            })
        }),
        ("a RECORD that is none", Fault::DamagedRecord, "lib/python3.11/site-packages/einops-0.8.dist-info/RECORD", |root| {
            edit(site(root, "einops-0.8.dist-info/RECORD"), |bytes| bytes.splice(0..0, *b"nonsense\n").for_each(drop))
        }),
        ("no RECORD", Fault::Missing, "lib/python3.11/site-packages/einops-0.8.dist-info/RECORD", |root| {
            std::fs::remove_file(site(root, "einops-0.8.dist-info/RECORD")).unwrap()
        }),
        ("an edited RECORD of a conda package", Fault::Changed, "lib/python3.11/site-packages/pkg-1.0.dist-info/RECORD", |root| {
            edit(site(root, "pkg-1.0.dist-info/RECORD"), |bytes| bytes.push(b'\n'))
        }),
        ("a link to another file", Fault::WrongLink, "lib/libx.so", |root| {
            std::fs::remove_file(root.join("lib/libx.so")).unwrap();
            symlink("liby.so.1", root.join("lib/libx.so")).unwrap();
        }),
        ("a link out of the environment", Fault::WrongLink, "lib/libx.so", |root| {
            std::fs::remove_file(root.join("lib/libx.so")).unwrap();
            symlink("/bin/sh", root.join("lib/libx.so")).unwrap();
        }),
        ("a copy in place of a link", Fault::WrongLink, "lib/libx.so", |root| {
            std::fs::remove_file(root.join("lib/libx.so")).unwrap();
            std::fs::copy(root.join("lib/libx.so.1"), root.join("lib/libx.so")).unwrap();
        }),
        ("a link in place of a file", Fault::WrongLink, "include/x.h", |root| {
            std::fs::rename(root.join("include/x.h"), root.join("share/x.h")).unwrap();
            symlink("../share/x.h", root.join("include/x.h")).unwrap();
        }),
        ("a dangling link", Fault::DanglingLink, "lib/libx.so", |root| std::fs::remove_file(root.join("lib/libx.so.1")).unwrap()),
        (
            "stale byte code of a package",
            Fault::StalePyc,
            "lib/python3.11/site-packages/pkg/__pycache__/__init__.cpython-311.pyc",
            |root| edit(site(root, "pkg/__init__.py"), |bytes| bytes[4] = b'2'),
        ),
        (
            "byte code of another source",
            Fault::StalePyc,
            "lib/python3.11/site-packages/einops/__pycache__/__init__.cpython-311.pyc",
            |root| write(&site(root, "einops/__pycache__/__init__.cpython-311.pyc"), &unchecked(b"evil"), 0o644),
        ),
        ("changed byte code", Fault::Changed, "lib/python3.11/site-packages/pkg/__pycache__/__init__.cpython-311.pyc", |root| {
            edit(site(root, "pkg/__pycache__/__init__.cpython-311.pyc"), |bytes| *bytes.last_mut().unwrap() ^= 1)
        }),
        ("a damaged package record", Fault::DamagedRecord, "", |root| {
            edit(root.join("conda-meta/pkg-1.0-h0_0.json"), |bytes| bytes.truncate(40))
        }),
        ("a dependency that is gone", Fault::UnmetDependency, "", |root| {
            std::fs::remove_file(root.join("conda-meta/base-1.0-h0_0.json")).unwrap()
        }),
        ("a requirement of pip that is not met", Fault::UnmetDependency, "", |root| {
            let metadata = "Name: einops\nVersion: 0.8\nRequires-Dist: pkg>=2\n";
            write(&site(root, "einops-0.8.dist-info/METADATA"), metadata.as_bytes(), 0o644);
        }),
    ]
}

#[test]
fn every_planted_fault_is_found() {
    let plants = plants();
    let (mut found, mut total, mut missed) = (0, 0, Vec::new());
    for stamped in [false, true] {
        for (what, fault, path, plant) in &plants {
            let folder = tempfile::tempdir().unwrap();
            let root = environment(folder.path(), stamped);
            plant(&root);
            let faults = faults(&root);
            total += 1;
            if faults.iter().any(|finding| finding.fault == *fault && finding.path == *path) {
                found += 1;
            } else {
                missed.push(format!("{what} (stamped: {stamped}): {faults:?}"));
            }
        }
    }
    println!("{found}/{total} planted faults found ({} kinds, in environments of tare and of other tools)", plants.len());
    assert!(missed.is_empty(), "{}", missed.join("\n"));
    assert!(plants.len() >= 30);
}

#[test]
fn what_only_tare_knows_is_found_in_its_environments() {
    let plants: [Plant; 8] = [
        ("a package of another tool", Fault::Foreign, "conda-meta/new-1-h0_0.json", |root| record(root, "new", "1", &[], Vec::new())),
        ("a distribution that only claims to be of tare", Fault::Foreign, "lib/python3.11/site-packages/einops-0.8.dist-info", |root| {
            std::fs::remove_file(root.join("conda-meta/tare/pypi/einops.json")).unwrap()
        }),
        ("a distribution of pip", Fault::Foreign, "lib/python3.11/site-packages/einops-0.8.dist-info", |root| {
            write(&root.join(SITE).join("einops-0.8.dist-info/INSTALLER"), b"pip\n", 0o644)
        }),
        ("an executable library", Fault::WrongMode, "lib/libx.so.1", |root| chmod(root.join("lib/libx.so.1"), 0o644)),
        ("a private file", Fault::WrongMode, "include/x.h", |root| chmod(root.join("include/x.h"), 0o600)),
        ("a link to the same content", Fault::WrongLink, "lib/libx.so", |root| {
            std::fs::remove_file(root.join("lib/libx.so")).unwrap();
            symlink("./libx.so.1", root.join("lib/libx.so")).unwrap();
        }),
        ("other variables", Fault::Changed, "conda-meta/state", |root| write(&root.join("conda-meta/state"), b"{}", 0o644)),
        ("a record with other text", Fault::Changed, "conda-meta/pkg-1.0-h0_0.json", |root| {
            edit(root.join("conda-meta/pkg-1.0-h0_0.json"), |bytes| bytes.push(b'\n'))
        }),
    ];
    for (what, fault, path, plant) in plants {
        let folder = tempfile::tempdir().unwrap();
        let root = environment(folder.path(), true);
        plant(&root);
        let faults = faults(&root);
        assert!(faults.iter().any(|finding| finding.fault == fault && finding.path == path), "{what}: {faults:?}");
    }
}

#[test]
fn a_moved_environment_is_known_as_such() {
    for stamped in [false, true] {
        let folder = tempfile::tempdir().unwrap();
        let root = environment(folder.path(), stamped);
        let moved = root.with_file_name("moved");
        std::fs::rename(&root, &moved).unwrap();
        let faults = faults(&moved);
        assert!(faults.iter().any(|finding| finding.fault == Fault::Moved), "stamped: {stamped}: {faults:?}");
    }
}

#[test]
fn a_virtual_environment_of_python_is_verified_by_its_records() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().canonicalize().unwrap().join("venv");
    let made = std::process::Command::new("python3").args(["-m", "venv"]).arg(&root).output();
    if !made.is_ok_and(|output| output.status.success()) {
        eprintln!("skipped: no python3 with venv");
        return;
    }
    let prefix = Prefix::open_any(&root).unwrap();
    let report = verify(&prefix, Options::default(), &Silent).unwrap();
    assert_eq!(report.findings, []);
    assert!(report.python_packages >= 1 && report.files > 100, "{report:?}");
    let site = prefix::site_packages(&root).remove(0);
    write(&root.join(&site).join("evil.py"), b"", 0o644);
    edit(root.join(&site).join("pip/__init__.py"), |bytes| bytes.push(b'#'));
    let found: Vec<Fault> = faults(&root).into_iter().map(|finding| finding.fault).collect();
    assert_eq!(found, [Fault::Changed, Fault::Extra]);
    let moved = root.with_file_name("moved");
    std::fs::rename(&root, &moved).unwrap();
    assert!(faults(&moved).iter().any(|finding| finding.fault == Fault::Moved));
}
