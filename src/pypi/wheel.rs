//! From a wheel file to a checked folder in the cache.
//!
//! Sources: the binary distribution format of PyPA (PEP 427), `RECORD` (PEP 376), core metadata, entry points. Stricter than pip, which looks at no
//! hash in `RECORD`: everything in the archive must be listed there and be what the list says, because the list decides what an environment owns.
//!
//! The archive is read where it lies, entry by entry and in parallel; no more than a buffer a thread is in memory, whatever the size of the wheel.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

use rattler_conda_types::package::EntryPoint;
use rayon::iter::{IntoParallelRefIterator, ParallelIterator};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256, Sha384, Sha512};
use zip::ZipArchive;

use super::record_file::{self, Hash};
use super::tags::WheelName;
use super::{Name, Version};
use crate::error::Error;
use crate::install::{Cancel, hex_text, set_mode};

/// Layout of what is written into the cache; another number makes older entries be unpacked again.
pub(super) const FORMAT: u32 = 1;

/// Where a file of a wheel belongs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Scheme {
    /// site-packages: purelib and platlib are one in an environment of conda.
    Site,
    /// `bin`.
    Scripts,
    /// `include/pythonX.Y/NAME`.
    Headers,
    /// The environment itself.
    Data,
}

impl Scheme {
    fn folder(self) -> &'static str {
        match self {
            Scheme::Site => "site",
            Scheme::Scripts => "scripts",
            Scheme::Headers => "headers",
            Scheme::Data => "data",
        }
    }
}

/// A file of an unpacked wheel.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Entry {
    pub scheme: Scheme,
    /// Relative to the folder of its scheme, `/` between parts.
    pub path: String,
    #[serde(with = "hex32")]
    pub sha256: [u8; 32],
    /// Bytes.
    pub size: u64,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub executable: bool,
    /// The first line is `#!python`, which becomes the interpreter of the environment.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub shebang: bool,
}

impl Entry {
    /// Where it is below the folder of a cache entry.
    pub(crate) fn cached(&self) -> PathBuf {
        Path::new("files").join(self.scheme.folder()).join(&self.path)
    }
}

/// `wheel.json` of a cache entry: what is known of an unpacked wheel.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Unpacked {
    pub format: u32,
    /// SHA-256 of the wheel, in hex.
    pub sha256: String,
    /// Bytes of the wheel.
    pub size: u64,
    pub file_name: String,
    /// As the wheel spells it.
    pub name: String,
    pub version: String,
    /// `NAME-VERSION.dist-info`.
    pub dist_info: String,
    pub requires_python: Option<String>,
    /// `Tag` of `WHEEL`.
    pub tags: Vec<String>,
    /// `COMMAND = MODULE:FUNCTION`, of console and GUI scripts.
    pub entry_points: Vec<String>,
    /// Sorted.
    pub files: Vec<Entry>,
}

/// 32 bytes as hex.
pub(crate) mod hex32 {
    use serde::{Deserialize, Deserializer, Serializer};

    pub fn serialize<S: Serializer>(bytes: &[u8; 32], serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&crate::install::hex_text(bytes))
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<[u8; 32], D::Error> {
        let text = <std::borrow::Cow<'de, str>>::deserialize(deserializer)?;
        super::from_hex(&text).ok_or_else(|| serde::de::Error::custom("no SHA-256"))
    }
}

/// A SHA-256 in hex.
pub(crate) fn from_hex(text: &str) -> Option<[u8; 32]> {
    let mut bytes = [0_u8; 32];
    if text.len() != 64 || !text.is_ascii() {
        return None;
    }
    for (number, byte) in bytes.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&text[2 * number..2 * number + 2], 16).ok()?;
    }
    Some(bytes)
}

/// Why a wheel does not get into the cache.
#[derive(Debug)]
pub(super) enum Trouble {
    /// Something is wrong with it.
    Refused(String),
    /// Something is wrong here: no room, cancelled.
    Here(Error),
}

impl From<String> for Trouble {
    fn from(why: String) -> Self {
        Trouble::Refused(why)
    }
}

impl From<&str> for Trouble {
    fn from(why: &str) -> Self {
        Trouble::Refused(why.to_owned())
    }
}

impl From<Error> for Trouble {
    fn from(error: Error) -> Self {
        Trouble::Here(error)
    }
}

impl From<zip::result::ZipError> for Trouble {
    fn from(error: zip::result::ZipError) -> Self {
        Trouble::Refused(format!("it is no readable archive: {error}"))
    }
}

/// One file that several readers share, each with its own position.
#[derive(Clone)]
struct Shared {
    file: Arc<File>,
    position: u64,
    length: u64,
}

impl Read for Shared {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        #[cfg(unix)]
        let read = std::os::unix::fs::FileExt::read_at(&*self.file, buffer, self.position)?;
        #[cfg(windows)]
        let read = std::os::windows::fs::FileExt::seek_read(&*self.file, buffer, self.position)?;
        self.position += read as u64;
        Ok(read)
    }
}

impl Seek for Shared {
    fn seek(&mut self, to: SeekFrom) -> std::io::Result<u64> {
        let position = match to {
            SeekFrom::Start(at) => Some(at),
            SeekFrom::End(by) => self.length.checked_add_signed(by),
            SeekFrom::Current(by) => self.position.checked_add_signed(by),
        };
        self.position = position.ok_or_else(|| std::io::Error::from(std::io::ErrorKind::InvalidInput))?;
        Ok(self.position)
    }
}

/// Values of `key` in the headers of a metadata text (up to the first empty line).
pub(crate) fn headers(metadata: &str, key: &str) -> Vec<String> {
    let lines = metadata.lines().take_while(|line| !line.is_empty());
    let values = lines.filter_map(|line| line.split_once(':').filter(|(found, _)| found.eq_ignore_ascii_case(key)));
    values.map(|(_, value)| value.trim().to_owned()).collect()
}

/// Longest text of metadata that is read, in bytes.
const MAX_TEXT: u64 = 64 << 20;

/// Files of the metadata folder that this installer writes itself, or that would not hold for what it writes.
const OWN: [&str; 6] = ["RECORD", "RECORD.jws", "RECORD.p7s", "INSTALLER", "REQUESTED", "direct_url.json"];

/// What `RECORD` need not list.
const UNLISTED: [&str; 3] = ["RECORD", "RECORD.jws", "RECORD.p7s"];

/// The name and version that a wheel file is named after; `None` for other names.
fn named(file_name: &str) -> Option<(String, Version)> {
    let parsed = WheelName::parse(file_name).ok()?;
    Some((parsed.name, Version::from_str(&parsed.version.replace('_', "-")).ok()?))
}

/// Why a path in the archive must not be used.
fn bad_name(name: &str) -> Option<&'static str> {
    if name.is_empty() {
        return Some("is no path");
    }
    if name.chars().any(char::is_control) {
        return Some("has a control character in it");
    }
    if name.contains('\\') {
        return Some("has a backslash in it");
    }
    if name.starts_with('/') {
        return Some("is an absolute path");
    }
    let drive = name.as_bytes();
    if drive.len() >= 2 && drive[0].is_ascii_alphabetic() && drive[1] == b':' {
        return Some("begins with the letter of a drive");
    }
    for part in name.split('/') {
        match part {
            ".." => return Some("leads out of the environment"),
            "" | "." => return Some("is not a plain path"),
            _ if part.len() > 255 => return Some("is longer than file systems allow"),
            _ => {}
        }
    }
    None
}

/// An entry of the archive that will be a file.
struct Member {
    index: usize,
    name: String,
    size: u64,
    executable: bool,
}

/// Looks at every entry of the archive.
fn members(archive: &mut ZipArchive<Shared>, archive_bytes: u64) -> Result<Vec<Member>, Trouble> {
    if archive.has_duplicate_names() {
        return Err("it holds two files of the same name".into());
    }
    let mut found = Vec::with_capacity(archive.len());
    let mut total = 0_u64;
    for index in 0..archive.len() {
        let entry = archive.by_index_data(index)?;
        let Ok(name) = std::str::from_utf8(entry.name_raw()) else {
            return Err(format!("the name `{}` in it is not UTF-8", String::from_utf8_lossy(entry.name_raw())).into());
        };
        let folder = name.ends_with('/');
        if let Some(why) = bad_name(name.strip_suffix('/').unwrap_or(name)) {
            return Err(format!("it holds {name:?}, which {why}").into());
        }
        let mode = entry.external_attributes() >> 16;
        match (mode & 0o170_000, folder) {
            (0, _) | (0o100_000, false) | (0o040_000, true) => {}
            (0o120_000, _) => return Err(format!("`{name}` in it is a symbolic link").into()),
            (0o040_000, false) => return Err(format!("`{name}` in it is a folder that is called a file").into()),
            (0o100_000, true) => return Err(format!("`{name}` in it is a file that is called a folder").into()),
            _ => return Err(format!("`{name}` in it is a device, a pipe or a socket").into()),
        }
        if entry.encrypted() {
            return Err(format!("`{name}` in it is encrypted").into());
        }
        if !matches!(entry.compression(), zip::CompressionMethod::Stored | zip::CompressionMethod::Deflated) {
            return Err(format!("`{name}` in it is compressed with {}, which wheels do not use", entry.compression()).into());
        }
        total = total.saturating_add(entry.size());
        if folder {
            if entry.size() > 0 {
                return Err(format!("the folder `{name}` in it has contents of its own").into());
            }
            continue;
        }
        found.push(Member { index, name: name.to_owned(), size: entry.size(), executable: mode & 0o111 != 0 });
    }
    let limit = archive_bytes.saturating_mul(crate::install::fetch::UNPACKED_RATIO).max(crate::install::fetch::UNPACKED_FLOOR);
    if total > limit {
        return Err(format!("it unpacks to {}, which is far more than a package can be", crate::gpu::human_to(total, 1)).into());
    }
    if archive.has_overlapping_entries()? {
        return Err("two files in it share their bytes".into());
    }
    Ok(found)
}

fn text_of(archive: &mut ZipArchive<Shared>, member: &Member) -> Result<String, Trouble> {
    if member.size > MAX_TEXT {
        return Err(format!("`{}` in it is longer than metadata can be", member.name).into());
    }
    let mut bytes = Vec::new();
    archive
        .by_index(member.index)?
        .take(MAX_TEXT)
        .read_to_end(&mut bytes)
        .map_err(|error| format!("`{}` in it cannot be read: {error}", member.name))?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// Commands of `console_scripts` and `gui_scripts`. pip's own commands that tell a Python version are those of the environment, not of the machine on
/// which the wheel was made, so they are left out here.
fn entry_points(text: &str) -> Result<Vec<String>, String> {
    let mut section = String::new();
    let mut found: BTreeMap<String, String> = BTreeMap::new();
    for line in text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with(['#', ';'])) {
        if let Some(name) = line.strip_prefix('[').and_then(|line| line.strip_suffix(']')) {
            section = name.trim().to_owned();
            continue;
        }
        if section != "console_scripts" && section != "gui_scripts" {
            continue;
        }
        // Extras in brackets behind the object are history: they change nothing about the command.
        let spec = line.split_once('[').map_or(line, |(spec, _)| spec).trim();
        let point = EntryPoint::from_str(spec).map_err(|error| format!("its entry point `{line}` cannot be used: {error}"))?;
        if point.command.chars().any(char::is_control) {
            return Err(format!("its entry point {:?} has a control character in it", point.command));
        }
        let text = format!("{} = {}:{}", point.command, point.module, point.function);
        if let Some(other) = found.insert(point.command.clone(), text.clone())
            && other != text
        {
            return Err(format!("it has two entry points `{}`", point.command));
        }
    }
    Ok(found.into_values().collect())
}

/// What becomes of a member: where it goes, or nothing.
fn target(name: &str, dist_info: &str, data: &str) -> Result<Option<(Scheme, String)>, String> {
    let Some((first, rest)) = name.split_once('/') else { return Ok(Some((Scheme::Site, name.to_owned()))) };
    if first == dist_info {
        return Ok((!OWN.contains(&rest)).then(|| (Scheme::Site, name.to_owned())));
    }
    if !first.ends_with(".data") {
        return Ok(Some((Scheme::Site, name.to_owned())));
    }
    if first != data {
        return Err(format!("`{name}` in it is in a data folder of another distribution"));
    }
    let Some((scheme, path)) = rest.split_once('/') else {
        return Err(format!("`{name}` in it belongs to no installation scheme"));
    };
    let scheme = match scheme {
        "purelib" | "platlib" => Scheme::Site,
        "scripts" => Scheme::Scripts,
        "headers" => Scheme::Headers,
        "data" => Scheme::Data,
        other => return Err(format!("`{name}` in it has the installation scheme `{other}`, which nobody knows")),
    };
    if scheme == Scheme::Scripts && path.contains('/') {
        return Err(format!("`{name}` in it is a script in a folder"));
    }
    let top = path.split('/').next().unwrap_or_default();
    if scheme == Scheme::Data && (top.eq_ignore_ascii_case("conda-meta") || top == "__clobbers__") {
        return Err(format!("`{name}` in it belongs to the notes of the environment"));
    }
    if scheme == Scheme::Site && path.split('/').next().is_some_and(|top| top.ends_with(".dist-info") && top != dist_info) {
        return Err(format!("`{name}` in it belongs to another distribution"));
    }
    Ok(Some((scheme, path.to_owned())))
}

/// The source of byte code: `a/__pycache__/m.cpython-311.pyc` -> `a/m.py`.
fn source_of(path: &str) -> Option<String> {
    let (folder, name) = path.rsplit_once('/')?;
    let parent = folder.strip_suffix("__pycache__")?;
    let module = name.strip_suffix(".pyc")?.split('.').next()?;
    Some(format!("{parent}{module}.py"))
}

/// What to hash a file with besides SHA-256.
enum Other {
    None,
    Sha384(Sha384),
    Sha512(Sha512),
}

/// Checks the wheel in `file` and unpacks it into the folder `into`, which is there and empty. `sha256` and `size` are those of the file.
pub(super) fn unpack(
    file: File,
    file_name: &str,
    sha256: &str,
    name: &Name,
    version: &Version,
    into: &Path,
    cancel: &Cancel,
) -> Result<Unpacked, Trouble> {
    let length = file.metadata().map_err(|error| format!("it cannot be looked at: {error}"))?.len();
    match named(file_name) {
        None => return Err("its name is not that of a wheel (NAME-VERSION-PYTHON-ABI-PLATFORM.whl)".into()),
        Some((found, _)) if crate::prefix::normalize(&found) != name.as_ref() => {
            return Err(format!("its name says `{found}`, and `{name}` was asked for").into());
        }
        Some((_, found)) if found != *version => {
            return Err(format!("its name says version {found}, and {version} was asked for").into());
        }
        Some(_) => {}
    }
    let mut archive = ZipArchive::new(Shared { file: Arc::new(file), position: 0, length })?;
    let members = members(&mut archive, length)?;

    let infos: BTreeSet<&str> = members
        .iter()
        .filter_map(|member| member.name.split_once('/'))
        .map(|(top, _)| top)
        .filter(|top| top.ends_with(".dist-info"))
        .collect();
    let dist_info = match Vec::from_iter(infos)[..] {
        [one] => one.to_owned(),
        [] => return Err("it has no folder `.dist-info`".into()),
        _ => return Err("it has several folders `.dist-info`".into()),
    };
    let stem = dist_info.strip_suffix(".dist-info").unwrap_or_default();
    let (spelled, tail) = stem.rsplit_once('-').ok_or_else(|| format!("`{dist_info}` in it does not say a version"))?;
    let claims = |what: &str, found: &str, says: &str| -> Result<(), Trouble> {
        if crate::prefix::normalize(found) == name.as_ref() && Version::from_str(says).is_ok_and(|says| says == *version) {
            return Ok(());
        }
        Err(format!("{what} says that it is `{found} {says}`, and `{name} {version}` was asked for").into())
    };
    claims(&format!("`{dist_info}`"), spelled, tail)?;

    let by_name: HashMap<&str, &Member> = members.iter().map(|member| (member.name.as_str(), member)).collect();
    let info = |file: &str| by_name.get(format!("{dist_info}/{file}").as_str()).copied();
    let needed = |file: &str| info(file).ok_or_else(|| Trouble::Refused(format!("it has no `{file}`")));
    let metadata = text_of(&mut archive, needed("METADATA")?)?;
    let field = |key: &str| headers(&metadata, key).into_iter().next();
    let missing = |key: &str| Trouble::Refused(format!("its `METADATA` has no `{key}`"));
    claims("its `METADATA`", &field("Name").ok_or_else(|| missing("Name"))?, &field("Version").ok_or_else(|| missing("Version"))?)?;
    let about = text_of(&mut archive, needed("WHEEL")?)?;
    let format = headers(&about, "Wheel-Version");
    match format.as_slice() {
        [one] if one.split('.').next() == Some("1") && one.split('.').all(|part| part.parse::<u32>().is_ok()) => {}
        [one] => return Err(format!("it is of version {one} of the wheel format, and only 1 is known").into()),
        _ => return Err("its `WHEEL` does not say the version of the format".into()),
    }
    let lines = record_file::parse(&text_of(&mut archive, needed("RECORD")?)?)
        .map_err(|line| format!("line {line} of its `RECORD` is not `path,hash,size`"))?;
    let points = match info("entry_points.txt") {
        Some(member) => entry_points(&text_of(&mut archive, member)?)?,
        None => Vec::new(),
    };
    let commands: HashSet<&str> = points.iter().filter_map(|point| point.split_once(" = ")).map(|(command, _)| command).collect();

    let mut listed: HashMap<&str, &record_file::Line> = HashMap::with_capacity(lines.len());
    for line in lines.iter().filter(|line| !line.path.ends_with('/')) {
        if listed.insert(&line.path, line).is_some() {
            return Err(format!("its `RECORD` lists `{}` twice", line.path).into());
        }
        if !by_name.contains_key(line.path.as_str()) {
            return Err(format!("its `RECORD` lists `{}`, which is not in it", line.path).into());
        }
    }
    let unlisted: HashSet<String> = UNLISTED.iter().map(|file| format!("{dist_info}/{file}")).collect();

    struct Job<'a> {
        member: &'a Member,
        target: Option<(Scheme, String)>,
        hash: &'a Hash,
    }
    let data = format!("{stem}.data");
    let mut jobs = Vec::with_capacity(members.len());
    let mut taken: BTreeSet<(Scheme, String)> = BTreeSet::new();
    let mut folders: BTreeSet<(Scheme, String)> = BTreeSet::new();
    for member in members.iter().filter(|member| !unlisted.contains(&member.name)) {
        let line = listed.get(member.name.as_str()).ok_or_else(|| format!("`{}` in it is not in its `RECORD`", member.name))?;
        let hash = line.hash.as_ref().ok_or_else(|| format!("its `RECORD` has no hash for `{}`", member.name))?;
        if !matches!(hash.algorithm.as_str(), "sha256" | "sha384" | "sha512") {
            return Err(format!(
                "its `RECORD` has a hash of the kind {} for `{}`: sha256 or better is needed",
                hash.algorithm, member.name
            )
            .into());
        }
        if line.size.is_some_and(|size| size != member.size) {
            return Err(
                format!("`{}` in it has {} bytes, and its `RECORD` says {}", member.name, member.size, line.size.unwrap_or(0)).into()
            );
        }
        let mut target = target(&member.name, &dist_info, &data)?;
        // An entry point of the same name is what the script was made from.
        if let Some((Scheme::Scripts, path)) = &target
            && commands.contains(path.as_str())
        {
            target = None;
        }
        if let Some((scheme, path)) = &target {
            if !taken.insert((*scheme, path.clone())) {
                return Err(format!("two files in it have the place `{path}`").into());
            }
            let mut folder = path.as_str();
            while let Some((above, _)) = folder.rsplit_once('/') {
                if !folders.insert((*scheme, above.to_owned())) {
                    break;
                }
                folder = above;
            }
        }
        jobs.push(Job { member, target, hash });
    }
    if let Some((_, path)) = taken.iter().find(|place| folders.contains(*place)) {
        return Err(format!("`{path}` in it is a file, and others lie below it").into());
    }
    // Byte code of sources that are there is compiled anew.
    for job in &mut jobs {
        let stale = matches!(&job.target, Some((Scheme::Site, path))
            if source_of(path).is_some_and(|source| taken.contains(&(Scheme::Site, source))));
        if stale {
            job.target = None;
        }
    }

    let root = into.join("files");
    let make = |path: &Path| -> Result<(), Trouble> {
        std::fs::create_dir_all(path).map_err(|error| Error::io("create the folder", path, &error))?;
        Ok(set_mode(path, 0o755)?)
    };
    make(&root)?;
    for scheme in jobs.iter().filter_map(|job| job.target.as_ref()).map(|(scheme, _)| *scheme).collect::<BTreeSet<_>>() {
        make(&root.join(scheme.folder()))?;
    }
    // Sorted, so what is above comes first.
    for (scheme, folder) in &folders {
        make(&root.join(scheme.folder()).join(folder))?;
    }
    jobs.sort_by_key(|job| std::cmp::Reverse(job.member.size));
    let unpacked: Vec<Option<Entry>> = jobs
        .par_iter()
        .map_init(
            || (archive.clone(), vec![0_u8; 128 << 10]),
            |(archive, buffer), job| {
                cancel.check()?;
                write_one(archive, buffer, job.member, job.target.as_ref(), job.hash, &root)
            },
        )
        .collect::<Result<_, Trouble>>()?;
    let mut files: Vec<Entry> = unpacked.into_iter().flatten().collect();
    files.sort_by(|a, b| (a.scheme, &a.path).cmp(&(b.scheme, &b.path)));
    Ok(Unpacked {
        format: FORMAT,
        sha256: sha256.to_owned(),
        size: length,
        file_name: file_name.to_owned(),
        name: spelled.to_owned(),
        version: version.to_string(),
        dist_info: dist_info.clone(),
        requires_python: field("Requires-Python").filter(|text| !text.is_empty()),
        tags: headers(&about, "Tag"),
        entry_points: points,
        files,
    })
}

/// Reads a member to its end, compares it with what `RECORD` says, and writes it if it has a target.
fn write_one(
    archive: &mut ZipArchive<Shared>,
    buffer: &mut [u8],
    member: &Member,
    target: Option<&(Scheme, String)>,
    hash: &Hash,
    root: &Path,
) -> Result<Option<Entry>, Trouble> {
    let mut source = archive.by_index(member.index)?;
    let path = target.map(|(scheme, path)| root.join(scheme.folder()).join(path));
    let failed = |error: std::io::Error| Trouble::Here(Error::io("write", path.as_deref().unwrap_or(root), &error));
    let mut out = path.as_deref().map(File::create_new).transpose().map_err(failed)?;
    let mut sha256 = Sha256::new();
    let mut other = match hash.algorithm.as_str() {
        "sha384" => Other::Sha384(Sha384::new()),
        "sha512" => Other::Sha512(Sha512::new()),
        _ => Other::None,
    };
    let mut size = 0_u64;
    let mut shebang = false;
    loop {
        let read = source.read(buffer).map_err(|error| format!("`{}` in it cannot be read: {error}", member.name))?;
        if read == 0 {
            break;
        }
        let bytes = &buffer[..read];
        if size == 0 {
            shebang = bytes.starts_with(b"#!python");
        }
        size += read as u64;
        if size > member.size {
            return Err(format!("`{}` in it is larger than it says", member.name).into());
        }
        sha256.update(bytes);
        match &mut other {
            Other::None => {}
            Other::Sha384(hasher) => hasher.update(bytes),
            Other::Sha512(hasher) => hasher.update(bytes),
        }
        if let Some(out) = &mut out {
            out.write_all(bytes).map_err(failed)?;
        }
    }
    if size != member.size {
        return Err(format!("`{}` in it is smaller than it says", member.name).into());
    }
    let sha256: [u8; 32] = sha256.finalize().into();
    let same = match other {
        Other::None => sha256[..] == hash.digest[..],
        Other::Sha384(hasher) => hasher.finalize()[..] == hash.digest[..],
        Other::Sha512(hasher) => hasher.finalize()[..] == hash.digest[..],
    };
    if !same {
        return Err(format!("`{}` in it is not what its `RECORD` says: its SHA-256 is {}", member.name, hex_text(&sha256)).into());
    }
    let (Some((scheme, relative)), Some(path), Some(out)) = (target, &path, out) else { return Ok(None) };
    drop(out);
    let script = *scheme == Scheme::Scripts;
    let executable = member.executable || script;
    set_mode(path, if executable { 0o755 } else { 0o644 })?;
    Ok(Some(Entry { scheme: *scheme, path: relative.clone(), sha256, size, executable, shebang: shebang && script }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wheel_names_say_name_and_version() {
        let parsed = |name: &str| named(name).map(|(name, version)| format!("{name} {version}"));
        assert_eq!(parsed("torch-2.7.1+cu126-cp311-cp311-manylinux_2_28_x86_64.whl").as_deref(), Some("torch 2.7.1+cu126"));
        assert_eq!(parsed("a_b-1.0-1-py3-none-any.whl").as_deref(), Some("a_b 1.0"));
        for bad in ["a-1.0.whl", "a-1.0-py3-none-any.zip", "a--py3-none-any.whl", "a-x-py3-none-any.whl"] {
            assert_eq!(parsed(bad), None, "{bad}");
        }
    }

    #[test]
    fn paths_that_must_not_be_are_named() {
        for good in ["a", "a/b.py", "a..b/c", "x.data/data/etc/x", "a b/ä"] {
            assert_eq!(bad_name(good), None, "{good}");
        }
        for bad in ["", "/a", "../a", "a/../b", "a//b", "./a", "a\\b", "C:/a", "a\0b", "a\nb"] {
            assert!(bad_name(bad).is_some(), "{bad:?}");
        }
        assert!(bad_name(&"n".repeat(300)).is_some());
    }

    #[test]
    fn files_go_where_their_scheme_says() {
        let to = |name: &str| target(name, "a-1.dist-info", "a-1.data");
        assert_eq!(to("a/b.py"), Ok(Some((Scheme::Site, "a/b.py".into()))));
        assert_eq!(to("a.py"), Ok(Some((Scheme::Site, "a.py".into()))));
        assert_eq!(to("a-1.data/scripts/run"), Ok(Some((Scheme::Scripts, "run".into()))));
        assert_eq!(to("a-1.data/data/etc/x"), Ok(Some((Scheme::Data, "etc/x".into()))));
        assert_eq!(to("a-1.data/platlib/a/x.so"), Ok(Some((Scheme::Site, "a/x.so".into()))));
        assert_eq!(to("a-1.dist-info/RECORD"), Ok(None));
        assert_eq!(to("a-1.dist-info/licenses/x"), Ok(Some((Scheme::Site, "a-1.dist-info/licenses/x".into()))));
        for bad in
            ["a-1.data/x/y", "a-1.data/x", "b-1.data/data/x", "a-1.data/data/conda-meta/history", "a-1.data/purelib/b-1.dist-info/METADATA"]
        {
            assert!(to(bad).is_err(), "{bad}");
        }
        assert_eq!(source_of("a/__pycache__/m.cpython-311.pyc").as_deref(), Some("a/m.py"));
        assert_eq!(source_of("a/m.pyc"), None);
    }

    #[test]
    fn entry_points_of_both_kinds_without_extras() {
        let text = "[console_scripts]\nb = m:f\na=m.n : C.f [x,y]\n# no\n[gui_scripts]\ng = m:g\n[other]\nz = 1\n";
        assert_eq!(entry_points(text).unwrap(), ["a = m.n:C.f", "b = m:f", "g = m:g"]);
        for bad in [
            "[console_scripts]\n../x = m:f\n",
            "[console_scripts]\nx = m\n",
            "[console_scripts]\nx = m:f()\n",
            "[gui_scripts]\nx=m:f\nx=m:g\n",
        ] {
            assert!(entry_points(bad).is_err(), "{bad}");
        }
    }

    proptest::proptest! {
        #[test]
        fn no_text_makes_the_readers_panic(text in "(?s).{0,200}") {
            let _ = entry_points(&text);
            let _ = bad_name(&text);
            let _ = named(&text);
            let _ = target(&text, "a-1.dist-info", "a-1.data");
            let _ = headers(&text, "Name");
            let _ = from_hex(&text);
        }
    }
}
