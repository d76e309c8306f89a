//! Archives made to do harm. Each is refused before anything is linked: the environment stays byte for byte as it was, and nothing appears or changes
//! outside the cache. The channel is hostile too: its hashes and sizes fit the archives unless that is the lie.

use std::io::{Cursor, Write};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use serde_json::{Value, json};
use sha2::Digest;

use crate::common::channel::{Channel, Package, hex};
use crate::common::{TestEnv, tree};

/// One entry of a tar archive, as it is written whatever it says.
#[derive(Clone)]
struct Entry {
    name: Vec<u8>,
    kind: u8,
    link: Vec<u8>,
    data: Vec<u8>,
    /// The size that the header claims, if that is a lie.
    claims: Option<u64>,
    mode: u32,
}

fn entry(name: &str, kind: u8, link: &str, data: &[u8]) -> Entry {
    Entry { name: name.into(), kind, link: link.into(), data: data.to_vec(), claims: None, mode: 0o644 }
}
fn file(name: &str, data: &str) -> Entry {
    entry(name, b'0', "", data.as_bytes())
}
fn symlink(name: &str, target: &str) -> Entry {
    entry(name, b'2', target, b"")
}
fn hardlink(name: &str, target: &str) -> Entry {
    entry(name, b'1', target, b"")
}

/// A tar archive in the ustar format, with GNU long names where they do not fit.
fn tar(entries: &[Entry]) -> Vec<u8> {
    let mut out = Vec::new();
    for entry in entries {
        for (kind, long) in [(b'K', &entry.link), (b'L', &entry.name)] {
            if long.len() > 100 {
                let mut data = long.clone();
                data.push(0);
                header(&mut out, b"././@LongLink", kind, b"", data.len() as u64, 0o644);
                padded(&mut out, &data);
            }
        }
        let size = entry.claims.unwrap_or(entry.data.len() as u64);
        header(&mut out, &entry.name, entry.kind, &entry.link, size, entry.mode);
        padded(&mut out, &entry.data);
    }
    out.extend([0; 1024]);
    out
}

fn header(out: &mut Vec<u8>, name: &[u8], kind: u8, link: &[u8], size: u64, mode: u32) {
    let mut block = [0_u8; 512];
    let put = |block: &mut [u8; 512], at: usize, text: &[u8], room: usize| {
        let length = text.len().min(room);
        block[at..at + length].copy_from_slice(&text[..length]);
    };
    put(&mut block, 0, name, 100);
    put(&mut block, 100, format!("{mode:07o}").as_bytes(), 8);
    put(&mut block, 108, b"0000000", 8);
    put(&mut block, 116, b"0000000", 8);
    put(&mut block, 124, format!("{size:011o}").as_bytes(), 12);
    put(&mut block, 136, b"14000000000", 12);
    block[148..156].fill(b' ');
    block[156] = kind;
    put(&mut block, 157, link, 100);
    put(&mut block, 257, b"ustar\x0000", 8);
    if matches!(kind, b'3' | b'4') {
        // /dev/null
        put(&mut block, 329, b"0000001", 8);
        put(&mut block, 337, b"0000003", 8);
    }
    let sum: u32 = block.iter().map(|byte| u32::from(*byte)).sum();
    put(&mut block, 148, format!("{sum:06o}\0 ").as_bytes(), 8);
    out.extend(block);
}

fn padded(out: &mut Vec<u8>, data: &[u8]) {
    out.extend(data);
    out.resize(out.len().div_ceil(512) * 512, 0);
}

fn sha256(data: impl AsRef<[u8]>) -> String {
    hex(&sha2::Sha256::digest(data))
}

/// A line of paths.json for a file.
fn listed(path: &str, data: &str) -> Value {
    json!({ "_path": path, "path_type": "hardlink", "sha256": sha256(data), "size_in_bytes": data.len() })
}
fn listed_link(path: &str) -> Value {
    json!({ "_path": path, "path_type": "softlink" })
}

/// An archive and what the channel says about it.
struct Case {
    what: &'static str,
    package: Vec<Entry>,
    paths: Vec<Value>,
    /// Entries of the info archive in place of index.json and paths.json.
    info: Option<Vec<Entry>>,
    index: Value,
    link: Option<Value>,
    /// Changes the finished archive.
    damage: Option<fn(Vec<u8>) -> Vec<u8>>,
    /// Changes the record of the channel.
    record: Option<fn(&mut Value)>,
    /// The archive unpacks to nothing harmful, because what is hostile is left out; it may be installed.
    harmless: bool,
}

fn case(what: &'static str, package: Vec<Entry>, paths: Vec<Value>) -> Case {
    Case { what, package, paths, info: None, index: json!({}), link: None, damage: None, record: None, harmless: false }
}

impl Case {
    fn damage(mut self, damage: fn(Vec<u8>) -> Vec<u8>) -> Self {
        self.damage = Some(damage);
        self
    }
    fn record(mut self, record: fn(&mut Value)) -> Self {
        self.record = Some(record);
        self
    }
    fn info(mut self, info: Vec<Entry>) -> Self {
        self.info = Some(info);
        self
    }
    fn index(mut self, index: Value) -> Self {
        self.index = index;
        self
    }
    fn noarch_python(mut self, entry_points: &[&str]) -> Self {
        self.index = json!({ "noarch": "python", "subdir": "linux-64", "depends": ["python"] });
        self.link = Some(json!({ "noarch": { "type": "python", "entry_points": entry_points }, "package_metadata_version": 1 }));
        self
    }
    fn harmless(mut self) -> Self {
        self.harmless = true;
        self
    }

    /// Writes the archive into the channel under `name`.
    fn write(&self, channel: &mut Channel, name: &str, old_format: bool) {
        let mut index = json!({
            "name": name, "version": "1.0", "build": "0", "build_number": 0, "subdir": "linux-64", "depends": [], "constrains": [],
        });
        for (key, value) in self.index.as_object().unwrap() {
            index[key] = value.clone();
        }
        let paths = json!({ "paths": self.paths, "paths_version": 1 });
        let info = self.info.clone().unwrap_or_else(|| {
            let mut info = vec![file("info/index.json", &index.to_string()), file("info/paths.json", &paths.to_string())];
            info.extend(self.link.as_ref().map(|link| file("info/link.json", &link.to_string())));
            info
        });
        let mut bytes = if old_format {
            // One archive, what it is about first, as conda-build writes it.
            tar_bz2(&tar(&[&info[..], &self.package].concat()))
        } else {
            conda(&format!("{name}-1.0-0"), &tar(&self.package), &tar(&info))
        };
        if let Some(damage) = self.damage {
            bytes = damage(bytes);
        }
        let mut record = index.clone();
        record["name"] = json!(name);
        record["version"] = json!("1.0");
        record["sha256"] = json!(sha256(&bytes));
        record["md5"] = json!(hex(&rattler_digest::compute_bytes_digest::<rattler_digest::Md5>(&bytes)));
        record["size"] = json!(bytes.len());
        if let Some(change) = self.record {
            change(&mut record);
        }
        let file = format!("{name}-1.0-0.{}", if old_format { "tar.bz2" } else { "conda" });
        std::fs::write(channel.root().join("linux-64").join(&file), bytes).unwrap();
        channel.add_record("linux-64", &file, record);
    }
}

/// A .tar.bz2 archive of a tar archive, by the program of that name.
fn tar_bz2(tar: &[u8]) -> Vec<u8> {
    let mut source = tempfile::tempfile().unwrap();
    source.write_all(tar).unwrap();
    std::io::Seek::rewind(&mut source).unwrap();
    let output = std::process::Command::new("bzip2").args(["-1", "-c"]).stdin(source).output().unwrap();
    assert!(output.status.success());
    output.stdout
}

/// A .conda archive of two tar archives.
fn conda(stem: &str, package: &[u8], info: &[u8]) -> Vec<u8> {
    let mut zip = zip::ZipWriter::new(Cursor::new(Vec::new()));
    let stored = zip::write::SimpleFileOptions::default().compression_method(zip::CompressionMethod::Stored);
    let mut add = |name: &str, bytes: &[u8]| {
        zip.start_file(name, stored).unwrap();
        zip.write_all(bytes).unwrap();
    };
    add("metadata.json", br#"{"conda_pkg_format_version": 2}"#);
    add(&format!("pkg-{stem}.tar.zst"), &zstd::encode_all(package, 1).unwrap());
    add(&format!("info-{stem}.tar.zst"), &zstd::encode_all(info, 1).unwrap());
    zip.finish().unwrap().into_inner()
}

/// All cases. `outside` is a folder with a file `secret` that must stay as it is.
fn cases(outside: &str) -> Vec<Case> {
    let into = |name: &str| format!("{outside}/{name}");
    let up = format!("../../../../../../../../../..{outside}");
    let zeros = 300 << 20;
    let bomb = Entry { data: vec![0; zeros], ..file("share/bomb", "") };
    vec![
        // Paths.
        case("a path upwards", vec![file("../planted", "x")], vec![listed("../planted", "x")]),
        case("a path upwards in the middle", vec![file("share/../../planted", "x")], vec![listed("share/../../planted", "x")]),
        case("an absolute path", vec![file(&into("planted"), "x")], vec![listed(&into("planted"), "x")]),
        case("a list with a path upwards", vec![file("share/x", "x")], vec![listed("../../planted", "x")]),
        case("a list with an absolute path", vec![file("share/x", "x")], vec![listed(&into("secret"), "secret")]),
        case("a list with ..", vec![file("share/x", "x")], vec![json!({ "_path": "..", "path_type": "directory" })]),
        case("a list with no path", vec![file("share/x", "x")], vec![listed("", "")]),
        case("a list with a dot", vec![file("share/x", "x")], vec![json!({ "_path": ".", "path_type": "directory" })]),
        case("a list with backslashes", vec![file("share/x", "x")], vec![listed("..\\..\\planted", "x")]),
        case("a list with a NUL", vec![file("share/x", "x")], vec![listed("share/x\0y", "x")]),
        case("a name longer than any", vec![file("share/x", "x")], vec![listed(&format!("share/{}", "n".repeat(300)), "x")]),
        case("a long name that is too long", vec![file(&format!("share/{}", "n".repeat(300)), "x")], vec![listed("share/x", "x")]),
        case("the history", vec![file("conda-meta/history", "x")], vec![listed("conda-meta/history", "x")]),
        case("another package's record", vec![file("conda-meta/base-1.0-0.json", "{}")], vec![listed("conda-meta/base-1.0-0.json", "{}")]),
        case("the record by a detour", vec![file("./conda-meta/frozen", "{}")], vec![listed("./conda-meta/frozen", "{}")]),
        case("tare's own notes", vec![file("conda-meta/tare/files", "x")], vec![listed("conda-meta/tare/files", "x")]),
        case("the folder of overwritten files", vec![file("__clobbers__/base/x", "x")], vec![listed("__clobbers__/base/x", "x")]),
        case("a file of another package", vec![file("share/base", "evil")], vec![listed("share/base", "evil")]),
        case("a file below a file of another package", vec![file("share/base/x", "evil")], vec![listed("share/base/x", "evil")]),
        case("a path out of site-packages", vec![file("site-packages/x", "x")], vec![listed("site-packages/../../../../planted", "x")])
            .noarch_python(&[]),
        case("an entry point upwards", vec![file("site-packages/x.py", "x")], vec![listed("site-packages/x.py", "x")])
            .noarch_python(&["../../planted = x:main"]),
        case("an absolute entry point", vec![file("site-packages/x.py", "x")], vec![listed("site-packages/x.py", "x")])
            .noarch_python(&["/planted = x:main"]),
        // Links.
        case("an absolute link", vec![symlink("share/door", outside)], vec![listed_link("share/door")]),
        case("a link upwards", vec![symlink("share/door", &up)], vec![listed_link("share/door")]),
        case("a link to everything", vec![symlink("root", "/")], vec![listed_link("root")]),
        case("a link to the folder above", vec![symlink("above", "..")], vec![listed_link("above")]),
        case(
            "a file through an absolute link",
            vec![symlink("share/door", outside), file("share/door/planted", "x")],
            vec![listed_link("share/door"), listed("share/door/planted", "x")],
        ),
        case("a file through a link that is not listed", vec![symlink("door", outside), file("door/planted", "x")], vec![]),
        case("a file through two links", vec![symlink("b", &up), symlink("a", "b"), file("a/planted", "x")], vec![]),
        case(
            "a link that takes the place of a folder",
            vec![entry("share/d/", b'5', "", b""), symlink("share/d", outside), file("share/d/planted", "x")],
            vec![listed("share/d/planted", "x")],
        ),
        case("a file over a link", vec![symlink("share/x", &into("planted")), file("share/x", "x")], vec![listed_link("share/x")]),
        case(
            "a secret read through a link",
            vec![symlink("door", outside)],
            vec![json!({ "_path": "door/secret", "path_type": "hardlink" })],
        ),
        case("a link that is called a file", vec![symlink("share/x", &into("secret"))], vec![listed("share/x", "secret")]),
        case("a file that is called a link", vec![file("share/x", "x")], vec![listed_link("share/x")]),
        case("a file that is called a folder", vec![file("share/x", "x")], vec![json!({ "_path": "share/x", "path_type": "directory" })]),
        case("a hard link out", vec![hardlink("share/x", &into("secret"))], vec![listed("share/x", "secret")]),
        case("a hard link upwards", vec![hardlink("share/x", &format!("{up}/secret"))], vec![listed("share/x", "secret")]),
        case("a hard link through a link", vec![symlink("d", outside), hardlink("x", "d/secret")], vec![listed("x", "secret")]),
        case("info as a link", vec![], vec![]).info(vec![symlink("info", outside), file("info/index.json", "{}")]),
        case("index.json as a link", vec![], vec![]).info(vec![symlink("info/index.json", &into("secret")), file("info/paths.json", "{}")]),
        // What is no file.
        // The unpacker makes empty files of these; only where that is what the list says are they installed, and as files.
        case("a character device", vec![entry("share/x", b'3', "", b"")], vec![listed("share/x", "")]).harmless(),
        case("a character device with contents", vec![entry("share/x", b'3', "", b"")], vec![listed("share/x", "zero")]),
        case("a pipe with contents", vec![entry("share/x", b'6', "", b"")], vec![listed("share/x", "data")]),
        case("a block device", vec![entry("share/x", b'4', "", b"")], vec![listed("share/x", "")]).harmless(),
        case("a pipe", vec![entry("share/x", b'6', "", b"")], vec![listed("share/x", "")]).harmless(),
        case("an unknown kind of entry", vec![entry("share/x", b'Z', "", b"")], vec![listed("share/x", "missing")]),
        // Bombs.
        case("a bomb", vec![bomb.clone()], vec![json!({ "_path": "share/bomb", "path_type": "hardlink", "size_in_bytes": zeros })]),
        case("a bomb that is not listed", vec![bomb], vec![]),
        case("a size that is not there", vec![Entry { claims: Some(8 << 30), ..file("share/x", "x") }], vec![listed("share/x", "x")]),
        // Twice.
        case("a file twice", vec![file("share/x", "good"), file("share/x", "evil")], vec![listed("share/x", "good")]),
        case("a path listed twice", vec![file("share/x", "x")], vec![listed("share/x", "x"), listed("share/x", "x")]),
        case("a path listed twice in two spellings", vec![file("share/x", "x")], vec![listed("share/x", "x"), listed("./share/x", "x")]),
        case(
            "a file and a folder",
            vec![file("share/x", "x"), file("share/x/y", "x")],
            vec![listed("share/x", "x"), listed("share/x/y", "x")],
        ),
        // Lies.
        case("a wrong SHA-256 in the channel", vec![file("share/x", "x")], vec![listed("share/x", "x")])
            .record(|record| record["sha256"] = json!("00".repeat(32))),
        case("a wrong MD5 and nothing else", vec![file("share/x", "x")], vec![listed("share/x", "x")]).record(|record| {
            record["md5"] = json!("00".repeat(16));
            record.as_object_mut().unwrap().remove("sha256");
        }),
        case("a wrong hash in the list", vec![file("share/x", "evil")], vec![listed("share/x", "good")]),
        case(
            "a wrong size in the list",
            vec![file("share/x", "x")],
            vec![json!({ "_path": "share/x", "path_type": "hardlink", "size_in_bytes": 9 })],
        ),
        case("a file that is not there", vec![], vec![listed("share/x", "x")]),
        case("another name inside", vec![], vec![]).index(json!({ "name": "base" })),
        case("another version inside", vec![], vec![]).index(json!({ "version": "9.9" })),
        case("a build that is a path", vec![], vec![]).record(|record| record["build"] = json!("../../../planted")),
        case("no index", vec![], vec![]).info(vec![file("info/paths.json", r#"{"paths": [], "paths_version": 1}"#)]),
        case("an index that is no JSON", vec![], vec![]).info(vec![file("info/index.json", "\u{0}"), file("info/paths.json", "{}")]),
        case("a list that is no JSON", vec![], vec![]).info(vec![file("info/index.json", "{}"), file("info/paths.json", "[")]),
        case("an empty info", vec![], vec![]).info(vec![]),
        // Broken archives.
        case("half an archive", vec![file("share/x", "x")], vec![listed("share/x", "x")]).damage(|bytes| bytes[..bytes.len() / 2].to_vec()),
        case("no archive at all", vec![], vec![]).damage(|_| b"<html>503</html>".to_vec()),
        case("nothing", vec![], vec![]).damage(|_| Vec::new()),
        case("an archive without the files", vec![], vec![]).damage(|_| {
            let mut zip = zip::ZipWriter::new(Cursor::new(Vec::new()));
            zip.start_file("metadata.json", zip::write::SimpleFileOptions::default()).unwrap();
            zip.finish().unwrap().into_inner()
        }),
        // Left out when unpacking: nothing of it reaches the environment.
        case("a path upwards that is not listed", vec![file("../../planted", "x"), file("share/y", "y")], vec![listed("share/y", "y")])
            .harmless(),
        case("a program with the rights of its owner", vec![Entry { mode: 0o6777, ..file("bin/su", "x") }], vec![listed("bin/su", "x")])
            .harmless(),
        case(
            "an empty placeholder",
            vec![file("share/e", "x")],
            vec![{
                let mut entry = listed("share/e", "x");
                entry["prefix_placeholder"] = json!("");
                entry["file_mode"] = json!("text");
                entry
            }],
        )
        .harmless(),
    ]
}

/// Everything below `root` but the cache, with times: what an archive must not touch.
fn world(root: &Path) -> Vec<String> {
    let mut lines = tree(root, &[]);
    lines.retain(|line| !line.starts_with("cache/") && !line.starts_with("channel/"));
    for folder in ["outside", "envs"] {
        lines.push(format!("{folder} {:?}", std::fs::symlink_metadata(root.join(folder)).map(|about| about.mode()).ok()));
    }
    lines.push(format!("secret {:?}", std::fs::metadata(root.join("outside/secret")).map(|about| (about.mtime(), about.nlink())).ok()));
    lines
}

#[test]
fn hostile_archives_are_refused_before_anything_is_linked() {
    refused(false);
}

#[test]
fn hostile_archives_of_the_old_format_are_refused_before_anything_is_linked() {
    if crate::common::terminal::program("bzip2").is_some() {
        refused(true);
    }
}

fn refused(old_format: bool) {
    let env = TestEnv::new();
    let mut channel = Channel::new(env.path().join("channel"));
    let outside = env.path().join("outside");
    std::fs::create_dir(&outside).unwrap();
    std::fs::write(outside.join("secret"), "secret").unwrap();
    channel.add(&Package::new("base", "1.0").file("share/base", "base"));
    channel.add(&Package::new("python", "3.11.1").file("bin/python3.11", "#!/bin/sh\nexit 1\n"));
    let from = ["--override-channels".to_owned(), "-c".to_owned(), channel.url()];
    let create: Vec<&str> = ["create", "-n", "e", "base", "python"].into_iter().chain(from.iter().map(String::as_str)).collect();
    env.tare(&create).ok();
    let mut cases = cases(outside.to_str().unwrap());
    // That one is about the zip archive around the other two.
    cases.retain(|case| !old_format || case.what != "an archive without the files");
    for (number, case) in cases.iter().enumerate() {
        case.write(&mut channel, &format!("evil{number}"), old_format);
    }
    let mut known = world(env.path());
    let mut failures = Vec::new();
    let mut run = |number: usize, case: &Case| {
        let name = format!("evil{number}");
        // `create` of another environment and `install` into the present one, in turn.
        let mut args =
            if number.is_multiple_of(2) { vec!["install", "-n", "e", &name] } else { vec!["create", "-n", "x", &name, "base", "python"] };
        args.extend(from.iter().map(String::as_str));
        let ran = env.tare(&args);
        let mut say = |why: String| failures.push(format!("{}: {why}\n{}", case.what, ran.stderr));
        match (ran.code, case.harmless) {
            (0, true) => {
                let prefix = env.envs().join(if number.is_multiple_of(2) { "e" } else { "x" });
                let setuid = std::fs::metadata(prefix.join("bin/su")).is_ok_and(|about| about.mode() & 0o6000 != 0);
                if std::fs::symlink_metadata(prefix.join("share/x")).is_ok_and(|about| !about.is_file()) {
                    say("a device came into the environment".into());
                }
                if setuid {
                    say("a program got the rights of its owner".into());
                }
                if number.is_multiple_of(2) {
                    env.tare(&["remove", "-n", "e", &name, "--no-prune"]).ok();
                } else {
                    std::fs::remove_dir_all(prefix).unwrap();
                }
            }
            (1 | 2 | 3 | 5, _) => {}
            (code, _) => say(format!("exit code {code}")),
        }
        let mut after = world(env.path());
        let mut before = std::mem::replace(&mut known, after.clone());
        if case.harmless {
            // Two changes that undo each other leave their trace in the history and the list of environments.
            for lines in [&mut after, &mut before] {
                lines.retain(|line| !line.starts_with("envs/e/conda-meta/") && !line.starts_with("home/.conda"));
            }
        }
        if after != before {
            let new: Vec<_> = after.iter().filter(|line| !before.contains(line)).collect();
            let gone: Vec<_> = before.iter().filter(|line| !after.contains(line)).collect();
            say(format!("something changed: new {new:?}, gone {gone:?}"));
        }
    };
    for (number, case) in cases.iter().enumerate().filter(|(_, case)| !case.harmless) {
        run(number, case);
    }
    for (number, case) in cases.iter().enumerate().filter(|(_, case)| case.harmless) {
        run(number, case);
    }
    let refused = cases.iter().filter(|case| !case.harmless).count();
    println!("{refused} hostile archives refused, {} without effect, {} failures", cases.len() - refused, failures.len());
    assert!(failures.is_empty(), "{}", failures.join("\n----\n"));
    assert!(refused >= 40);
    // What can be used afterwards is what could be used before.
    env.tare(&["run", "-n", "e", "true"]).ok();
}
