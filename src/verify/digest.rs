//! One hash of everything in an environment: content, modes, links and byte code.
//!
//! Two environments made from one lock at one path have the same digest, whatever the cache, the umask and the order of the work were. At different paths
//! they have it once the replacements of the prefix that the package records list are undone (`relocatable`).

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};

use rattler_conda_types::package::FileMode;
use rattler_conda_types::prefix_record::{PathType, PathsEntry};
use rayon::iter::{IntoParallelRefIterator, ParallelIterator};
use serde::Serialize;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::{find, read_all, replace, undo_binary};
use crate::error::{Error, Result};
use crate::install::hex_text;
use crate::install::metadata::is_host;
use crate::prefix::Prefix;
use crate::pypi::record_file;
use crate::report::{Phase, Progress};

/// What stands for the path of the environment where no package says what stood there.
const PLACEHOLDER: &str = "/PREFIX";

/// Files of `conda-meta` that tell of moments: when something was done, or what a check of a machine found.
const OF_TIME: [&str; 3] = ["conda-meta/history", crate::pypi::revisions::FILE, "conda-meta/tare/check.json"];

/// The digest of an environment.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct TreeDigest {
    /// SHA-256 of `lines`, each with a line feed; lower-case hex.
    pub digest: String,
    /// Whether the path of the environment was taken out.
    pub relocatable: bool,
    /// A line for each thing in the environment, sorted by path: `f MODE SHA256 PATH` for files, `l PATH -> TARGET` for links, `d MODE PATH` for
    /// folders, `s MODE PATH` for sockets, pipes and devices.
    pub lines: Vec<String>,
}

/// Hashes everything in the environment but what use and time change: `conda-meta/history` and what goes with it, the report of the last check, and
/// byte code that no package lists.
///
/// # Errors
/// Something cannot be read.
pub fn tree_digest(prefix: &Prefix, relocatable: bool, progress: &dyn Progress) -> Result<TreeDigest> {
    let root = prefix.path();
    let records = prefix.records()?;
    let mut entries: HashMap<&Path, &PathsEntry> = HashMap::new();
    for record in &records {
        for entry in &record.paths_data.paths {
            entries.entry(&entry.relative_path).or_insert(entry);
        }
    }
    let made_for = prefix.stamp().ok().flatten().map_or_else(|| root.to_owned(), |stamp| stamp.prefix);
    let (noted, _) = crate::pypi::installed::noted(root);
    let wheel_files = noted.into_iter().flat_map(|record| record.files).map(|file| PathBuf::from(file.path)).collect();
    let from_host = records.iter().filter(|record| is_host(&record.repodata_record)).map(|record| record.file_name()).collect();
    let context = Context { root, made_for: made_for.to_string_lossy().into_owned(), entries, wheel_files, from_host, relocatable };
    let mut paths = Vec::new();
    context.collect(Path::new(""), &mut paths)?;
    paths.sort();
    let task = progress.start(Phase::Other, "hashing", None);
    let lines: Result<Vec<String>> = paths.par_iter().map(|path| context.line(path)).collect();
    progress.finish(task);
    let lines = lines?;
    let mut hasher = Sha256::new();
    for line in &lines {
        hasher.update(line.as_bytes());
        hasher.update(b"\n");
    }
    Ok(TreeDigest { digest: hex_text(&hasher.finalize()), relocatable, lines })
}

struct Context<'a> {
    root: &'a Path,
    /// The path that the files name.
    made_for: String,
    entries: HashMap<&'a Path, &'a PathsEntry>,
    /// What tare installed from wheels.
    wheel_files: HashSet<PathBuf>,
    /// The records of packages of the `host` channel, which lies in the cache of the user.
    from_host: HashSet<String>,
    relocatable: bool,
}

impl Context<'_> {
    fn collect(&self, folder: &Path, paths: &mut Vec<PathBuf>) -> Result<()> {
        let full = self.root.join(folder);
        let fail = |error: std::io::Error| Error::io("read the folder", &full, &error);
        for entry in std::fs::read_dir(&full).map_err(fail)? {
            let entry = entry.map_err(fail)?;
            let path = folder.join(entry.file_name());
            let kind = entry.file_type().map_err(fail)?;
            if kind.is_dir() {
                let before = paths.len();
                self.collect(&path, paths)?;
                // A folder that holds nothing but the byte code of a run is not there either.
                let of_use = entry.file_name() == "__pycache__" && paths.len() == before;
                if !of_use {
                    paths.push(path);
                }
                continue;
            }
            let in_pycache = folder.file_name().is_some_and(|name| name == "__pycache__");
            if OF_TIME.iter().any(|file| path == Path::new(file)) || (in_pycache && !self.is_listed(&path)) {
                continue;
            }
            paths.push(path);
        }
        Ok(())
    }

    /// Whether a package of conda or a `RECORD` lists the byte code. Byte code of wheels is of the unchecked kind, what a run leaves is not.
    fn is_listed(&self, path: &Path) -> bool {
        if self.entries.contains_key(path) {
            return true;
        }
        let mut head = [0u8; 8];
        crate::files::open(&self.root.join(path)).and_then(|mut file| std::io::Read::read_exact(&mut file, &mut head)).is_ok()
            && head[4..8] == [1, 0, 0, 0]
    }

    fn line(&self, path: &Path) -> Result<String> {
        let full = self.root.join(path);
        let fail = |error: std::io::Error| Error::io("read", &full, &error);
        let about = std::fs::symlink_metadata(&full).map_err(fail)?;
        let shown = path.to_string_lossy().replace('\n', "\\n");
        let mode = mode_of(&about);
        if about.is_symlink() {
            let target = std::fs::read_link(&full).map_err(fail)?.to_string_lossy().into_owned();
            let target = if self.relocatable { target.replace(&self.made_for, PLACEHOLDER) } else { target };
            return Ok(format!("l {shown} -> {target}"));
        }
        if about.is_dir() {
            return Ok(format!("d {mode:04o} {shown}"));
        }
        if !about.is_file() {
            return Ok(format!("s {mode:04o} {shown}"));
        }
        let digest = match self.undone(path, &full)? {
            Some(bytes) => Sha256::digest(&bytes),
            None => {
                let mut hasher = Sha256::new();
                read_all(&full, |bytes| hasher.update(bytes)).map_err(fail)?;
                hasher.finalize()
            }
        };
        Ok(format!("f {mode:04o} {} {shown}", hex_text(&digest)))
    }

    /// The bytes of a file as they are for any path; `None` if they are what is on disk.
    fn undone(&self, path: &Path, full: &Path) -> Result<Option<Vec<u8>>> {
        let read = || crate::files::read(full, crate::files::MOST).map_err(|error| Error::io("read", full, &error));
        if !self.relocatable {
            return Ok(match path.to_str().and_then(|text| text.strip_prefix("conda-meta/")) {
                Some("tare/environment.json") => Some(self.notes_without_cache(&read()?)),
                Some(name) if self.from_host.contains(name) => Some(record_without_cache(&read()?)),
                _ => None,
            });
        }
        let prefix = self.made_for.as_bytes();
        let text = path.to_str().unwrap_or_default();
        if let Some(name) = text.strip_prefix("conda-meta/") {
            return Ok(match name {
                "tare/environment.json" => Some(self.notes(&read()?)),
                "tare/files" => Some(self.manifest(&String::from_utf8_lossy(&read()?)).into_bytes()),
                "tare/modes" => Some(replace(&read()?, prefix, PLACEHOLDER.as_bytes())),
                _ if name.starts_with("tare/pypi/") => Some(self.noted(&read()?)),
                _ if self.from_host.contains(name) => Some(record(&record_without_cache(&read()?), self)),
                _ if name.ends_with(".json") && !name.contains('/') => Some(record(&read()?, self)),
                _ => None,
            });
        }
        if let Some(entry) = self.entries.get(path) {
            return Ok(match (&entry.prefix_placeholder, entry.file_mode, entry.path_type) {
                (Some(placeholder), Some(FileMode::Binary), _) => Some(undo_binary(&read()?, prefix, placeholder.as_bytes())),
                (Some(placeholder), ..) => Some(replace(&read()?, prefix, placeholder.as_bytes())),
                (None, _, PathType::UnixPythonEntryPoint) => Some(undo_script(&read()?, prefix)),
                (None, _, PathType::PycFile) => Some(undo_byte_code(&read()?, prefix)),
                _ => None,
            });
        }
        // What was installed from wheels has no record of replacements, but only these kinds of files can have one.
        if !varies_in_wheels(path) {
            return Ok(None);
        }
        let bytes = read()?;
        Ok(Some(match path.file_name().and_then(|name| name.to_str()).unwrap_or_default() {
            name if name.ends_with(".pyc") => undo_byte_code(&bytes, prefix),
            "RECORD" => self.wheel_record(path, &bytes),
            // Of these only the line that names the interpreter was written for the place.
            _ if path.starts_with("bin") && self.wheel_files.contains(path) => undo_script(&bytes, prefix),
            _ => replace(&bytes, prefix, PLACEHOLDER.as_bytes()),
        }))
    }

    /// Whether size and hash of a file depend on the path of the environment.
    fn depends_on_place(&self, path: &Path) -> bool {
        match self.entries.get(path) {
            Some(entry) => {
                entry.prefix_placeholder.is_some() || matches!(entry.path_type, PathType::UnixPythonEntryPoint | PathType::PycFile)
            }
            None => varies_in_wheels(path),
        }
    }

    /// Whether a file is what is said of it: then what is said follows from the file, which is hashed itself.
    fn is_as_said(&self, path: &Path, sha256: &[u8], size: Option<u64>) -> bool {
        super::hash_file(&self.root.join(path)).is_ok_and(|(found, len)| found[..] == *sha256 && size.is_none_or(|size| size == len))
    }

    /// tare's record of a Python package.
    fn noted(&self, bytes: &[u8]) -> Vec<u8> {
        let bytes = replace(bytes, self.made_for.as_bytes(), PLACEHOLDER.as_bytes());
        let Ok(mut record) = serde_json::from_slice::<Value>(&bytes) else { return bytes };
        for file in record["files"].as_array_mut().into_iter().flatten() {
            let said = (|| {
                let path = Path::new(file["path"].as_str()?);
                let sha256 = crate::pypi::wheel::from_hex(file["sha256"].as_str()?)?;
                Some(varies_in_wheels(path) && self.is_as_said(path, &sha256, file["size"].as_u64()))
            })();
            if let Some(file) = file.as_object_mut().filter(|_| said == Some(true)) {
                file.remove("sha256");
                file.remove("size");
            }
        }
        record.to_string().into_bytes()
    }

    /// A `RECORD` without hash and size of what varies. `path`: where it lies, relative to the environment.
    fn wheel_record(&self, path: &Path, bytes: &[u8]) -> Vec<u8> {
        let text = String::from_utf8_lossy(bytes);
        let site = path.parent().and_then(Path::parent).unwrap_or(Path::new(""));
        let row = |written: &str| -> Option<String> {
            let line = written.trim_end_matches('\r');
            let parsed = record_file::parse(line).ok().filter(|lines| lines.len() == 1)?.pop()?;
            let (path, sha256, size) = (record_file::inside(site, &parsed.path)?, parsed.sha256()?, parsed.size?);
            let plain = record_file::row(&parsed.path, Some((&sha256, size))).trim_end() == line;
            (plain && varies_in_wheels(&path) && self.is_as_said(&path, &sha256, Some(size))).then(|| format!("{}\0", parsed.path))
        };
        let rows: String = text
            .split_inclusive('\n')
            .map(|line| row(line.trim_end_matches('\n')).map_or_else(|| line.to_owned(), |row| row + "\n"))
            .collect();
        replace(rows.as_bytes(), self.made_for.as_bytes(), PLACEHOLDER.as_bytes())
    }

    fn notes(&self, bytes: &[u8]) -> Vec<u8> {
        let Ok(mut notes) = serde_json::from_slice::<Value>(bytes) else { return bytes.to_vec() };
        forget_the_way(&mut notes);
        notes["prefix"] = json!(PLACEHOLDER);
        // The sizes of records, which hold sizes of files.
        if let Some(records) = notes["records"].as_array_mut() {
            for record in records {
                *record = record[0].take();
            }
        }
        replace(notes.to_string().as_bytes(), self.made_for.as_bytes(), PLACEHOLDER.as_bytes())
    }

    /// tare's notes without the way here and without the sizes of records that name the cache.
    fn notes_without_cache(&self, bytes: &[u8]) -> Vec<u8> {
        let Ok(mut notes) = serde_json::from_slice::<Value>(bytes) else { return bytes.to_vec() };
        forget_the_way(&mut notes);
        for record in notes["records"].as_array_mut().into_iter().flatten() {
            if record[0].as_str().is_some_and(|name| self.from_host.contains(name)) {
                *record = record[0].take();
            }
        }
        notes.to_string().into_bytes()
    }

    fn has_size(&self, path: &str, size: &str) -> bool {
        std::fs::symlink_metadata(self.root.join(path)).is_ok_and(|about| size == about.len().to_string())
    }

    fn manifest(&self, text: &str) -> String {
        let line = |line: &str| match line.split_once(' ') {
            Some((size, path)) if self.depends_on_place(Path::new(path)) && self.has_size(path, size) => format!("? {path}\n"),
            _ => format!("{line}\n"),
        };
        text.lines().map(line).collect()
    }
}

/// Takes out of tare's notes by which file and which steps the environment came about: what is in it is the same.
fn forget_the_way(notes: &mut Value) {
    if let Some(metadata) = notes["metadata"].as_object_mut() {
        for key in ["input_digest", "input_parts", "sources", "nodefaults"] {
            metadata.remove(key);
        }
    }
}

/// Whether a file of a Python package can have the path of the environment in it: byte code, scripts with the line that names the interpreter, the
/// origin of what came from a folder in the environment, and the list that has hashes of all those.
fn varies_in_wheels(path: &Path) -> bool {
    let in_info = || path.parent().and_then(Path::extension).is_some_and(|extension| extension == "dist-info");
    match path.file_name().and_then(|name| name.to_str()) {
        Some("RECORD" | "direct_url.json") if in_info() => true,
        Some(name) => name.ends_with(".pyc") || path.parent().is_some_and(|folder| folder == Path::new("bin")),
        None => false,
    }
}

/// A Python script as it is for any path. Where the path of the interpreter is long or has blanks, `/bin/sh` starts it: here it never does.
fn undo_script(bytes: &[u8], prefix: &[u8]) -> Vec<u8> {
    let direct = [b"#!", prefix, b"/"].concat();
    let by_shell = [b"#!/bin/sh\n'''exec' \"", prefix, b"/"].concat();
    let rest = if let Some(rest) = bytes.strip_prefix(&direct[..]) {
        rest.to_vec()
    } else if let Some(rest) = bytes.strip_prefix(&by_shell[..])
        && let Some(end) = find(rest, b"\" \"$0\" \"$@\" #'''")
    {
        [&rest[..end], &rest[end + b"\" \"$0\" \"$@\" #'''".len()..]].concat()
    } else {
        return replace(bytes, prefix, PLACEHOLDER.as_bytes());
    };
    [b"#!", PLACEHOLDER.as_bytes(), b"/", &rest].concat()
}

/// A record of a package of the `host` channel, whichever cache the channel lies in.
fn record_without_cache(bytes: &[u8]) -> Vec<u8> {
    let Ok(mut record) = serde_json::from_slice::<Value>(bytes) else { return bytes.to_vec() };
    for key in ["url", "channel"] {
        if let Some((_, rest)) = record[key].as_str().and_then(|text| text.split_once("/host/channels/")) {
            record[key] = json!(format!("host:{rest}"));
        }
    }
    record.to_string().into_bytes()
}

/// A package record without what depends on the path of the environment.
fn record(bytes: &[u8], context: &Context<'_>) -> Vec<u8> {
    let Ok(mut record) = serde_json::from_slice::<Value>(bytes) else { return bytes.to_vec() };
    for entry in record.pointer_mut("/paths_data/paths").and_then(Value::as_array_mut).into_iter().flatten() {
        let hash =
            entry.get("sha256_in_prefix").or_else(|| entry.get("prefix_placeholder").is_none().then(|| entry.get("sha256")).flatten());
        let hash = hash.and_then(Value::as_str).and_then(crate::pypi::wheel::from_hex);
        let varies = entry["_path"].as_str().is_some_and(|path| {
            let path = Path::new(path);
            context.depends_on_place(path) && hash.is_none_or(|hash| context.is_as_said(path, &hash, None))
        });
        if let Some(entry) = entry.as_object_mut().filter(|_| varies) {
            entry.remove("sha256_in_prefix");
            entry.remove("size_in_bytes");
            if !entry.contains_key("prefix_placeholder") {
                entry.remove("sha256");
            }
        }
    }
    record.to_string().into_bytes()
}

/// Replaces the path in the texts of byte code. Texts carry their length before them, in one byte or in four (`marshal`); here it is always four, so that
/// one text has one form whatever the length of the path is.
fn undo_byte_code(bytes: &[u8], prefix: &[u8]) -> Vec<u8> {
    /// Set on objects that are referred to later.
    const REFERRED: u8 = 0x80;
    let mut out = Vec::with_capacity(bytes.len());
    let mut rest = bytes;
    while let Some(at) = find(rest, prefix) {
        let short = at.checked_sub(2).map(|start| (start, rest[start] & !REFERRED, usize::from(rest[at - 1])));
        let long = at.checked_sub(5).map(|start| {
            let len = u32::from_le_bytes([rest[at - 4], rest[at - 3], rest[at - 2], rest[at - 1]]);
            (start, rest[start] & !REFERRED, usize::try_from(len).unwrap_or(usize::MAX))
        });
        let text = match (short, long) {
            (Some((start, b'z', len)), _) => Some((start, b'a', len)),
            (Some((start, b'Z', len)), _) => Some((start, b'A', len)),
            (_, Some((start, kind @ (b'a' | b'A' | b'u' | b't' | b's'), len))) => Some((start, kind, len)),
            _ => None,
        };
        match text.filter(|(_, _, len)| *len >= prefix.len() && at + len <= rest.len()) {
            Some((start, kind, len)) => {
                let new = replace(&rest[at..at + len], prefix, PLACEHOLDER.as_bytes());
                // What is not ASCII because of the path has another form.
                let kind = match kind {
                    b'u' if new.is_ascii() => b'a',
                    b't' if new.is_ascii() => b'A',
                    kind => kind,
                };
                out.extend_from_slice(&rest[..start]);
                out.push(kind | (rest[start] & REFERRED));
                out.extend_from_slice(&u32::try_from(new.len()).unwrap_or(u32::MAX).to_le_bytes());
                out.extend_from_slice(&new);
                rest = &rest[at + len..];
            }
            None => {
                out.extend_from_slice(&rest[..at]);
                out.extend_from_slice(PLACEHOLDER.as_bytes());
                rest = &rest[at + prefix.len()..];
            }
        }
    }
    out.extend_from_slice(rest);
    out
}

fn mode_of(about: &std::fs::Metadata) -> u32 {
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        about.permissions().mode() & 0o7777
    }
    #[cfg(not(unix))]
    {
        let _ = about;
        0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn byte_code_of_two_places_is_the_same_once_undone() {
        let made = |prefix: &str| {
            let name = format!("{prefix}/lib/m.py");
            let mut bytes = b"head\xe3".to_vec();
            if name.len() < 256 {
                bytes.extend([b'z' | 0x80, u8::try_from(name.len()).unwrap()]);
            } else {
                bytes.push(b'a' | 0x80);
                bytes.extend(u32::try_from(name.len()).unwrap().to_le_bytes());
            }
            bytes.extend(name.as_bytes());
            bytes.extend(b"tail");
            undo_byte_code(&bytes, prefix.as_bytes())
        };
        let long = format!("/{}", "x".repeat(300));
        assert_eq!(made("/e/a"), made("/elsewhere/b"));
        assert_eq!(made("/e/a"), made(&long));
        assert!(made("/e/a").windows(13).any(|window| window == b"/PREFIX/lib/m"));
    }

    #[test]
    fn scripts_of_two_places_are_the_same_once_undone() {
        let rest = "\nimport sys\nprint('/e/a/x')\n";
        let direct = format!("#!/e/a/bin/python3.11{rest}");
        let by_shell = format!("#!/bin/sh\n'''exec' \"/e/with blanks/bin/python3.11\" \"$0\" \"$@\" #'''{rest}");
        let undone = undo_script(direct.as_bytes(), b"/e/a");
        assert_eq!(String::from_utf8_lossy(&undone), format!("#!/PREFIX/bin/python3.11{rest}"));
        assert_eq!(undone, undo_script(by_shell.as_bytes(), b"/e/with blanks"));
        assert_ne!(undone, undo_script(by_shell.replace("print", "Print").as_bytes(), b"/e/with blanks"));
    }

    #[test]
    fn what_a_record_says_counts_unless_it_follows_from_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        let path = Path::new("lib/python3.11/site-packages/x-1.dist-info/RECORD");
        std::fs::create_dir(root.join("bin")).unwrap();
        let context = Context {
            root,
            made_for: "/e/a".to_owned(),
            entries: HashMap::new(),
            wheel_files: HashSet::new(),
            from_host: HashSet::new(),
            relocatable: true,
        };
        let undone = |script: &str, claimed: &str, module: u64| {
            std::fs::write(root.join("bin/x"), script).unwrap();
            let digest = Sha256::digest(claimed);
            let text = record_file::row("../../../bin/x", Some((&digest, claimed.len() as u64)))
                + &record_file::row("x/a,b.py", Some((&digest_of_nothing(), module)))
                + "x-1.dist-info/RECORD,,\n";
            context.wheel_record(path, text.as_bytes())
        };
        let right = undone("#!/e/a/bin/python", "#!/e/a/bin/python", 3);
        assert_eq!(right, undone("#!/other/bin/python", "#!/other/bin/python", 3));
        assert_ne!(right, undone("#!/e/a/bin/python", "#!/e/a/bin/pythoN", 3));
        assert_ne!(right, undone("#!/e/a/bin/python", "#!/e/a/bin/python", 4));
    }

    #[test]
    fn the_place_of_the_cache_does_not_count() {
        let record = |cache: &str, file: &str| {
            let text = format!(
                r#"{{ "name": "python", "url": "file://{cache}/host/channels/pool/linux-64/{file}", "channel": "file://{cache}/host/channels/pool/", "x": 1 }}"#
            );
            record_without_cache(text.as_bytes())
        };
        assert_eq!(record("/home/a/.cache/tare", "p.conda"), record("/b", "p.conda"));
        assert_ne!(record("/b", "q.conda"), record("/b", "p.conda"));
        let damaged = b"{ \"url\": ";
        assert_eq!(record_without_cache(damaged), damaged);
    }

    fn digest_of_nothing() -> [u8; 32] {
        Sha256::digest(b"").into()
    }

    #[test]
    fn python_agrees_that_only_the_path_is_taken_out() {
        let script = "import marshal,sys\nc=compile('def f():\\n return 1\\n', sys.argv[1]+'/lib/m.py', 'exec')\nsys.stdout.buffer.write(marshal.dumps(c))";
        let made = |prefix: &str| {
            let output = std::process::Command::new("python3").args(["-c", script, prefix]).output().ok()?;
            output.status.success().then(|| undo_byte_code(&output.stdout, prefix.as_bytes()))
        };
        let (Some(a), Some(b)) = (made("/e/a"), made("/somewhere/else/b")) else {
            eprintln!("skipped: no python3");
            return;
        };
        assert_eq!(a, b);
    }

    proptest::proptest! {
        #[test]
        fn no_bytes_make_it_panic(bytes in proptest::collection::vec(0u8..=255, 0..60), at in 0usize..60) {
            let mut bytes = bytes;
            let at = at.min(bytes.len());
            bytes.splice(at..at, *b"/e");
            undo_byte_code(&bytes, b"/e");
        }
    }
}
