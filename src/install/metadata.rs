//! What is written into `conda-meta`: package records, `history`, `state` and tare's own notes; and `~/.conda/environments.txt`.

use std::borrow::Borrow;
use std::collections::{BTreeSet, HashMap, HashSet};
use std::fmt::Write as _;
use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Read, Seek, Write};
use std::path::{Path, PathBuf};

use indexmap::IndexMap;
use rattler_conda_types::prefix_record::PathsEntry;
use rattler_conda_types::{MatchSpec, Matches, PrefixRecord, RepoDataRecord, Subdir};
use rattler_environment_digest::environment_digest;
use rattler_redaction::strip_url_for_serialization;
use rayon::iter::{IndexedParallelIterator, IntoParallelIterator, IntoParallelRefIterator, ParallelIterator};
use serde::{Deserialize, Serialize};
use url::Url;

use crate::error::{Error, Result};
use crate::prefix::site_packages;
use crate::pypi::{TareRecord, revisions};

/// Version of the layout of `conda-meta/tare/environment.json`.
pub const STAMP_VERSION: u32 = 1;

/// Where tare's own files lie in a prefix. Nothing of tare is a `.json` directly in `conda-meta`: conda reads every one as a package.
pub(crate) const TARE_FOLDER: &str = "conda-meta/tare";

/// `conda-meta/tare/environment.json`: what tare knows about an environment that it made. It holds no clock time.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Stamp {
    /// [`STAMP_VERSION`].
    pub schema_version: u32,
    /// The version of tare that wrote it.
    pub tare_version: String,
    /// The path that the files of the environment were made for. Another place means that the folder was moved.
    pub prefix: PathBuf,
    /// The conda platform of the packages.
    pub subdir: String,
    /// Digest of the set of packages: name, version, build and hash of each (lower-case hex SHA-256; see `rattler_environment_digest`).
    pub environment_digest: String,
    /// Whether the Python files of noarch packages were compiled.
    pub compiled: bool,
    /// The match specs the environment was made from.
    pub requested: Vec<String>,
    /// SHA-256 of `conda-meta/state`, lower-case hex; `None` if there is none.
    pub state_sha256: Option<String>,
    /// Name and size in bytes of each package record in `conda-meta`, sorted by name.
    pub records: Vec<(String, u64)>,
    /// Facts of the caller: input digest, target, outcome of the solve.
    pub metadata: serde_json::Value,
    /// Digest of the Python packages that tare installed (name, version and hash of each wheel); `None` if there are none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pypi_digest: Option<String>,
}

impl Stamp {
    fn path(prefix: &Path) -> PathBuf {
        prefix.join(TARE_FOLDER).join("environment.json")
    }

    fn write(&self, prefix: &Path) -> Result<()> {
        let mut text =
            serde_json::to_vec_pretty(self).map_err(|error| Error::failure("cannot write the facts of the environment").because(error))?;
        text.push(b'\n');
        write_file(&Self::path(prefix), &text)
    }

    /// Reads the stamp of `prefix`; `None` if tare did not make it.
    ///
    /// # Errors
    /// The file is there but cannot be read or understood.
    pub fn read(prefix: &Path) -> Result<Option<Self>> {
        let path = Self::path(prefix);
        let text = match crate::files::read(&path, crate::files::MOST) {
            Ok(text) => text,
            Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => return Ok(None),
            Err(error) => return Err(Error::io("read", &path, &error)),
        };
        let stamp: Stamp =
            serde_json::from_slice(&text).map_err(|error| Error::failure(format!("`{}` is damaged", path.display())).because(error))?;
        if stamp.schema_version > STAMP_VERSION {
            return Err(Error::failure(format!("`{}` was written by a newer tare ({})", path.display(), stamp.tare_version)));
        }
        Ok(Some(stamp))
    }
}

/// The digest of a set of packages, lower-case hex.
pub fn digest_of(records: &[RepoDataRecord]) -> String {
    hex(&environment_digest(records))
}

pub(crate) use crate::text::hex;

/// A command line without secrets, as one string; arguments with white space are quoted.
pub(crate) fn redacted_command(command: &[String]) -> String {
    let words: Vec<String> = command
        .iter()
        .map(|word| {
            let (key, value) = match word.split_once('=') {
                Some((key, value)) if key.starts_with('-') => (Some(key), value),
                _ => (None, word.as_str()),
            };
            let value = match Url::parse(value) {
                Ok(url) if value.contains("://") => {
                    let stripped = strip_url_for_serialization(&url);
                    if stripped == url { value.to_owned() } else { stripped.to_string() }
                }
                _ => value.to_owned(),
            };
            // What is no URL as a whole may hold one: `-cURL`, `name[channel=URL]`.
            let word = crate::channel::redact_text(&key.map_or_else(|| value.clone(), |key| format!("{key}={value}")));
            if word.is_empty() || word.contains(|c: char| c.is_whitespace()) {
                format!("'{}'", word.replace(['\n', '\r'], " "))
            } else {
                word
            }
        })
        .collect();
    words.join(" ")
}

/// A copy of `record` fit for a file: no credentials in its URLs.
pub(crate) fn without_secrets(record: &RepoDataRecord) -> RepoDataRecord {
    let mut record = record.clone();
    record.url = strip_url_for_serialization(&record.url);
    if let Some(channel) = &record.channel
        && let Ok(url) = Url::parse(channel)
        && channel.contains("://")
    {
        let stripped = strip_url_for_serialization(&url);
        if stripped != url {
            record.channel = Some(stripped.to_string());
        }
    }
    record
}

/// The record that goes to `conda-meta/NAME-VERSION-BUILD.json`. It says nothing about the cache it was linked from, nor how or when it was
/// linked, so that the same lock gives the same bytes.
#[allow(deprecated)] // conda still reads `requested_spec`
pub(crate) fn prefix_record(record: &RepoDataRecord, mut paths: Vec<PathsEntry>, requested: &[MatchSpec]) -> PrefixRecord {
    paths.sort_by(|a, b| a.relative_path.cmp(&b.relative_path));
    let specs: Vec<String> = requested
        .iter()
        .filter(|spec| spec.name.matches(&record.package_record.name) && (spec.name.as_exact().is_some() || spec.matches(record)))
        .map(ToString::to_string)
        .collect();
    let mut record = without_secrets(record);
    if is_host(&record) {
        // The channel of the moment depends on what was asked for and found; the package is the same.
        record.url = crate::channel::host::lasting_url(&record.url);
        record.channel =
            record.channel.map(|channel| Url::parse(&channel).map_or(channel, |url| crate::channel::host::lasting_url(&url).to_string()));
    }
    // Locks and some channels say nothing of these, which follow from the subdir.
    if let Ok(subdir) = record.package_record.subdir.parse::<Subdir>() {
        record.package_record.arch = subdir.arch().map(|arch| arch.to_string());
        record.package_record.platform = subdir.only_platform().map(str::to_owned);
    }
    let mut made = PrefixRecord::from_repodata_record(record, paths);
    made.requested_spec = specs.first().cloned();
    made.requested_specs = specs;
    made
}

/// Writes the package records into `conda-meta` of `stage` and returns name and size of each, sorted.
pub(crate) fn write_records(stage: &Path, records: &[PrefixRecord]) -> Result<Vec<(String, u64)>> {
    let folder = stage.join("conda-meta");
    let mut written = Vec::with_capacity(records.len());
    // Made on all cores, and written by one: files of one folder are created one after the other in any case.
    for some in records.chunks(64) {
        let texts: Vec<(String, Vec<u8>)> = some
            .par_iter()
            .map(|record| {
                let name = record.file_name();
                let mut text = serde_json::to_vec_pretty(record)
                    .map_err(|error| Error::failure(format!("cannot write the record of `{name}`")).because(error))?;
                text.push(b'\n');
                Ok((name, text))
            })
            .collect::<Result<_>>()?;
        for (name, text) in texts {
            write_file(&folder.join(&name), &text)?;
            written.push((name, text.len() as u64));
        }
    }
    written.sort();
    Ok(written)
}

/// Writes a file with mode 0644 whatever the umask.
pub(crate) fn write_file(path: &Path, bytes: &[u8]) -> Result<()> {
    fs_err::write(path, bytes).map_err(|error| Error::io("write", path, &error))?;
    set_mode(path, 0o644)
}

/// Sets the permissions of `path`; nothing on systems without them.
pub(crate) fn set_mode(path: &Path, mode: u32) -> Result<()> {
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode))
            .map_err(|error| Error::io("set the permissions of", path, &error))?;
    }
    #[cfg(not(unix))]
    let _ = (path, mode);
    Ok(())
}

/// The channel of a record as conda's history names it: a bare name for channels of conda.anaconda.org, else a URL without secrets.
pub fn channel_name(record: &RepoDataRecord) -> String {
    if is_host(record) {
        return "host".to_owned();
    }
    let Some(channel) = record.channel.as_deref().filter(|channel| !channel.is_empty()) else {
        // The folder above the subdir.
        let url = strip_url_for_serialization(&record.url);
        let text = url.as_str();
        let parent = text.rsplit_once('/').map_or(text, |(folder, _)| folder);
        let parent = parent.strip_suffix(&format!("/{}", record.package_record.subdir)).unwrap_or(parent);
        return short_channel(parent);
    };
    short_channel(channel)
}

/// Whether a package was made from an interpreter of this machine: it comes from the `host` channel in a cache.
pub(crate) fn is_host(record: &RepoDataRecord) -> bool {
    record.url.scheme() == "file"
        && record.package_record.build.as_ref().starts_with("host_")
        && record.url.path().contains("/host/channels/")
}

fn short_channel(channel: &str) -> String {
    let stripped = match Url::parse(channel) {
        Ok(url) if channel.contains("://") => strip_url_for_serialization(&url).to_string(),
        _ => channel.to_owned(),
    };
    let stripped = stripped.trim_end_matches('/');
    stripped.strip_prefix("https://conda.anaconda.org/").unwrap_or(stripped).to_owned()
}

/// `CHANNEL/SUBDIR::NAME-VERSION-BUILD`, as in conda's history.
pub fn history_name(record: &RepoDataRecord) -> String {
    let package = &record.package_record;
    format!("{}/{}::{}-{}-{}", channel_name(record), package.subdir, package.name.as_normalized(), package.version, package.build)
}

/// One revision in the format of `conda-meta/history`. `time`: local time, second precision; `taken_back`: names of specs that no longer count.
pub(crate) fn history_entry(
    time: &str,
    command: &[String],
    removed: &BTreeSet<String>,
    added: &BTreeSet<String>,
    requested: &[MatchSpec],
    taken_back: &[String],
) -> String {
    let mut text = format!("==> {time} <==\n# cmd: {}\n# tare version: {}\n", redacted_command(command), env!("CARGO_PKG_VERSION"));
    for name in removed {
        let _ = writeln!(text, "-{name}");
    }
    for name in added {
        let _ = writeln!(text, "+{name}");
    }
    if !requested.is_empty() {
        let specs: Vec<String> = requested.iter().map(|spec| python_string(&spec.to_string())).collect();
        let _ = writeln!(text, "# update specs: [{}]", specs.join(", "));
    }
    if !taken_back.is_empty() {
        let specs: Vec<String> = taken_back.iter().map(|spec| python_string(spec)).collect();
        let _ = writeln!(text, "# remove specs: [{}]", specs.join(", "));
    }
    text
}

/// A Python string literal: conda reads the list of specs with `ast.literal_eval`.
fn python_string(text: &str) -> String {
    if text.contains('\'') && !text.contains('"') {
        format!("\"{}\"", text.replace('\\', "\\\\"))
    } else {
        format!("'{}'", text.replace('\\', "\\\\").replace('\'', "\\'"))
    }
}

/// The time now in the form of conda's history.
pub(crate) fn now() -> String {
    jiff::Zoned::now().strftime("%Y-%m-%d %H:%M:%S").to_string()
}

/// Everything of `conda-meta` apart from the package records.
pub(crate) struct Notes<'a> {
    pub prefix: &'a Path,
    pub subdir: Subdir,
    pub records: &'a [RepoDataRecord],
    pub requested: &'a [MatchSpec],
    pub variables: &'a IndexMap<String, String>,
    pub command: &'a [String],
    pub compiled: bool,
    pub metadata: &'a serde_json::Value,
    /// Files of packages that another tool installed: their modes are noted as they are.
    pub exact_modes: &'a HashSet<PathBuf>,
    /// The Python packages that tare installed.
    pub pypi: &'a [TareRecord],
}

impl Notes<'_> {
    /// What a revision notes of how it came about.
    pub(crate) fn request(&self, state_sha256: Option<String>) -> revisions::Request {
        revisions::Request {
            metadata: self.metadata.clone(),
            requested: self.requested.iter().map(ToString::to_string).collect(),
            compiled: self.compiled,
            state_sha256,
        }
    }
}

/// The text of `conda-meta/state`; `None` if there are no variables.
pub(crate) fn state_text(variables: &IndexMap<String, String>) -> Option<String> {
    if variables.is_empty() {
        return None;
    }
    let value = serde_json::json!({ "version": 1, "env_vars": variables });
    Some(format!("{value:#}\n"))
}

/// The history of `replaced` with one more entry.
fn continued_history(replaced: &Path, notes: &Notes<'_>) -> Result<String> {
    let old = crate::prefix::Prefix::open(replaced)?;
    let (records, _) = old.records_and_damage()?;
    let before: BTreeSet<String> = records.iter().map(|record| history_name(&record.repodata_record)).collect();
    let after: BTreeSet<String> = notes.records.iter().map(history_name).collect();
    let asked: HashSet<&str> = notes.requested.iter().filter_map(|spec| spec.name.as_exact()).map(|name| name.as_normalized()).collect();
    let taken_back: Vec<String> = old.requested_specs()?.into_keys().filter(|name| !asked.contains(name.as_str())).collect();
    let removed = before.difference(&after).cloned().collect();
    let added = after.difference(&before).cloned().collect();
    let mut text = history_so_far(replaced, &before);
    text += &history_entry(&now(), notes.command, &removed, &added, notes.requested, &taken_back);
    Ok(text)
}

/// The history of `prefix`, to be continued. Other tools keep none: without the state `before`, a change would read as the whole environment.
pub(crate) fn history_so_far(prefix: &Path, before: &BTreeSet<String>) -> String {
    let mut history = crate::files::read(&prefix.join("conda-meta/history"), crate::files::MOST)
        .map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
        .unwrap_or_default();
    if history.trim().is_empty() {
        history = format!("==> {} <==\n", now());
        history.extend(before.iter().map(|name| format!("+{name}\n")));
    } else if !history.ends_with('\n') {
        history.push('\n');
    }
    history
}

/// Writes `history`, `state` and tare's own files into `stage`. `replaced`: the environment whose history goes on.
pub(crate) fn write_notes(
    stage: &Path,
    notes: &Notes<'_>,
    written: Vec<(String, u64)>,
    records: &[PrefixRecord],
    replaced: Option<&Path>,
) -> Result<()> {
    let history = match replaced {
        Some(replaced) => continued_history(replaced, notes)?,
        None => {
            let added = notes.records.iter().map(history_name).collect();
            history_entry(&now(), notes.command, &BTreeSet::new(), &added, notes.requested, &[])
        }
    };
    write_file(&stage.join("conda-meta/history"), history.as_bytes())?;
    if let Some(pinned) = replaced.map(|replaced| replaced.join("conda-meta/pinned"))
        && let Ok(bytes) = crate::files::read(&pinned, crate::files::MOST)
    {
        write_file(&stage.join("conda-meta/pinned"), &bytes)?;
    }
    let python = notes.pypi.iter().filter(|record| !record.record.is_tooling()).map(revisions::Noted::of).collect();
    let state = state_text(notes.variables);
    let before = match replaced {
        Some(replaced) => crate::prefix::Prefix::open(replaced)?.records_and_damage()?.0,
        None => Vec::new(),
    };
    let there: BTreeSet<String> = notes.records.iter().map(history_name).collect();
    let gone = before.iter().map(|record| &record.repodata_record).filter(|record| !there.contains(&history_name(record))).collect();
    let request = notes.request(state.as_deref().map(|text| sha256_hex(text.as_bytes())));
    revisions::note(stage, replaced, &history, revisions::Note { packages: python, request, gone, there: notes.records })?;
    if let Some(state) = &state {
        write_file(&stage.join("conda-meta/state"), state.as_bytes())?;
    }
    write_stamp(stage, notes, state.as_deref().map(|text| sha256_hex(text.as_bytes())), written, records, &|_| None)
}

/// Writes tare's own files into `stage`. `state_sha256`: of `conda-meta/state`. `known`: see [`installed`].
pub(crate) fn write_stamp<R: Borrow<PrefixRecord>>(
    stage: &Path,
    notes: &Notes<'_>,
    state_sha256: Option<String>,
    written: Vec<(String, u64)>,
    records: &[R],
    known: &Known<'_>,
) -> Result<()> {
    let folder = stage.join(TARE_FOLDER);
    fs_err::create_dir_all(&folder).map_err(|error| Error::io("create the folder", &folder, &error))?;
    set_mode(&folder, 0o755)?;
    let paths = installed(stage, records, notes.pypi, known);
    write_file(&folder.join("files"), manifest(&paths).as_bytes())?;
    write_file(&folder.join("modes"), modes(stage, &paths, notes.exact_modes).as_bytes())?;
    let stamp = Stamp {
        schema_version: STAMP_VERSION,
        tare_version: env!("CARGO_PKG_VERSION").to_owned(),
        prefix: notes.prefix.to_owned(),
        subdir: notes.subdir.to_string(),
        environment_digest: digest_of(notes.records),
        compiled: notes.compiled,
        requested: notes.requested.iter().map(ToString::to_string).collect(),
        state_sha256,
        records: written,
        metadata: notes.metadata.clone(),
        pypi_digest: crate::pypi::install::digest_of(notes.pypi),
    };
    stamp.write(stage)
}

/// Brings tare's own files in `stage` up to date after a repair: the sizes of records that were `written` anew, and notes that were lost. Without a
/// `stamp` the environment is of another tool, and stays so.
pub(crate) fn update_stamp<R: Borrow<PrefixRecord>>(
    stage: &Path,
    stamp: Option<&Stamp>,
    written: &[(String, u64)],
    records: &[R],
) -> Result<()> {
    let Some(stamp) = stamp else { return Ok(()) };
    let mut stamp = stamp.clone();
    for (name, size) in &mut stamp.records {
        if let Some((_, new)) = written.iter().find(|(written, _)| written == name) {
            *size = *new;
        }
    }
    stamp.write(stage)?;
    let folder = stage.join(TARE_FOLDER);
    let missing = |name: &str| !folder.join(name).exists();
    if missing("files") || missing("modes") {
        let (pypi, _) = crate::pypi::installed::noted(stage);
        let paths = installed(stage, records, &pypi, &|_| None);
        if missing("files") {
            write_file(&folder.join("files"), manifest(&paths).as_bytes())?;
        }
        if missing("modes") {
            write_file(&folder.join("modes"), modes(stage, &paths, &HashSet::new()).as_bytes())?;
        }
    }
    Ok(())
}

pub(crate) fn sha256_hex(bytes: &[u8]) -> String {
    hex(&rattler_digest::compute_bytes_digest::<rattler_digest::Sha256>(bytes))
}

/// What lies at a path.
#[derive(Debug, Clone, Copy)]
pub(crate) struct About {
    pub is_link: bool,
    pub is_file: bool,
    /// Permissions; 0644 where there are none.
    pub mode: u32,
}

impl About {
    fn of(path: &Path) -> Option<About> {
        let about = std::fs::symlink_metadata(path).ok()?;
        #[cfg(unix)]
        let mode = std::os::unix::fs::PermissionsExt::mode(&about.permissions()) & 0o7777;
        #[cfg(not(unix))]
        let mode = 0o644;
        Some(About { is_link: about.is_symlink(), is_file: about.is_file(), mode })
    }
}

/// A file of a package, looked at once for all lists.
struct Installed<'a> {
    path: &'a str,
    /// Bytes, where the record tells them and it is no link there.
    size: Option<u64>,
    /// Of a conda package.
    conda: bool,
    about: Option<About>,
}

/// Looks at the files of all packages. `known`: what was looked at before, of files that are the same in the stage.
fn installed<'a, R: Borrow<PrefixRecord>>(stage: &Path, records: &'a [R], pypi: &'a [TareRecord], known: &Known<'_>) -> Vec<Installed<'a>> {
    let python = pypi.iter().flat_map(|record| &record.files).map(|file| (file.path.as_str(), Some(file.size), false));
    let conda = records.iter().flat_map(|record| &record.borrow().paths_data.paths).filter_map(|entry| {
        let is_link = entry.path_type == rattler_conda_types::prefix_record::PathType::SoftLink;
        Some((entry.relative_path.to_str()?, entry.size_in_bytes.filter(|_| !is_link), true))
    });
    let all: Vec<(&str, Option<u64>, bool)> = python.chain(conda).filter(|(path, ..)| !path.contains('\n')).collect();
    all.into_par_iter()
        .with_min_len(256)
        .map(|(path, size, conda)| Installed { path, size, conda, about: known(path).or_else(|| About::of(&stage.join(path))) })
        .collect()
}

/// What is known of a path without looking.
pub(crate) type Known<'a> = dyn Fn(&str) -> Option<About> + Sync + 'a;

/// `conda-meta/tare/files`: one line `SIZE PATH` for each file of a package, `- PATH` where there is no size to check (links). It makes the check
/// "is everything there" quick: reading every package record would take longer than looking at the files. A path with a size is no link: where files
/// are links into the cache (link mode `symlink`, of conda too) they have none.
fn manifest(paths: &[Installed<'_>]) -> String {
    let line = |path: &Installed<'_>| match path.size.filter(|_| !path.about.is_some_and(|about| about.is_link)) {
        Some(size) => format!("{size} {}", path.path),
        None => format!("- {}", path.path),
    };
    let mut lines: Vec<String> = paths.par_iter().with_min_len(256).map(line).collect();
    lines.sort_unstable_by(|a, b| a.split_once(' ').map(|x| x.1).cmp(&b.split_once(' ').map(|x| x.1)));
    // Packages may share a file that is the same in both.
    lines.dedup();
    let mut text = lines.join("\n");
    text.push('\n');
    text
}

/// What `conda-meta/tare/modes` notes of a path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum FileKind {
    /// A file with mode 0755; every file that is not noted has 0644.
    Executable,
    /// A file that another tool installed, with the mode that it had.
    Mode(u32),
    /// A symbolic link and what it points to.
    Link(String),
}

/// The text of `conda-meta/tare/modes`: a line `x PATH` for each executable file, two lines `l PATH` and `> TARGET` for each link. Package records say
/// neither, and `verify` wants to know. `exact`: files of other tools, which leave the modes of archive and umask: a line `m OCTAL PATH` for those that have
/// neither 0644 nor 0755.
fn modes(stage: &Path, paths: &[Installed<'_>], exact: &HashSet<PathBuf>) -> String {
    let mut paths: Vec<&Installed<'_>> = paths.iter().filter(|path| path.conda).collect();
    paths.sort_unstable_by_key(|path| path.path);
    paths.dedup_by_key(|path| path.path);
    let line = |installed: &&Installed<'_>| {
        let path = installed.path;
        let about = installed.about?;
        if about.is_link {
            let target = std::fs::read_link(stage.join(path)).ok()?;
            let target = target.to_str().filter(|target| !target.contains('\n'))?;
            return Some(format!("l {path}\n> {target}\n"));
        }
        if about.is_file && !matches!(about.mode, 0o644 | 0o755) && exact.contains(Path::new(path)) {
            return Some(format!("m {:04o} {path}\n", about.mode));
        }
        (about.is_file && about.mode & 0o100 != 0).then(|| format!("x {path}\n"))
    };
    let lines: Vec<Option<String>> = paths.par_iter().with_min_len(256).map(line).collect();
    lines.into_iter().flatten().collect()
}

/// Reads `conda-meta/tare/modes`; `None` if there is none (the environment is of another tool or of an older tare).
pub(crate) fn read_modes(prefix: &Path) -> Option<HashMap<PathBuf, FileKind>> {
    let text = crate::files::read_text(&prefix.join(TARE_FOLDER).join("modes")).ok()?;
    let mut kinds = HashMap::new();
    let mut lines = text.lines();
    while let Some(line) = lines.next() {
        if let Some(path) = line.strip_prefix("x ") {
            kinds.insert(PathBuf::from(path), FileKind::Executable);
        } else if let Some((mode, path)) = line.strip_prefix("m ").and_then(|rest| rest.split_once(' ')) {
            kinds.insert(PathBuf::from(path), FileKind::Mode(u32::from_str_radix(mode, 8).ok()?));
        } else if let Some(path) = line.strip_prefix("l ") {
            let target = lines.next()?.strip_prefix("> ")?;
            kinds.insert(PathBuf::from(path), FileKind::Link(target.to_owned()));
        }
    }
    Some(kinds)
}

/// What a quick look at an environment that tare made finds: the same notion of what is installed that `diff` and `verify` have, without reading a file.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Look {
    /// The first thing that is missing or of another size.
    pub damage: Option<String>,
    /// Python packages that another tool installed: their metadata, relative to the environment, sorted. Not looked for where something is damaged.
    pub foreign: Vec<PathBuf>,
    /// Files in site-packages that belong to no package, sorted. Not looked for where something is damaged.
    pub aliens: Vec<PathBuf>,
}

impl Look {
    /// The first thing that is not as installed: damage, or a package of another tool.
    pub fn difference(&self) -> Option<String> {
        self.damage.clone().or_else(|| {
            let info = self.foreign.first()?.file_name()?.to_string_lossy();
            Some(format!("the Python package `{info}` was installed by another tool"))
        })
    }
}

/// Looks at an environment that tare made. Contents are not read: that is what `verify` is for.
pub fn look(prefix: &Path, stamp: &Stamp) -> Look {
    let damage = damage(prefix, stamp);
    if damage.is_some() {
        return Look { damage, ..Look::default() };
    }
    let manifest = crate::files::read_text(&prefix.join(TARE_FOLDER).join("files")).unwrap_or_default();
    let (mut foreign, mut aliens) = (Vec::new(), Vec::new());
    for site in site_packages(prefix) {
        let Some(text) = site.to_str() else { continue };
        let below = format!("{text}/");
        let paths: Vec<&str> =
            manifest.lines().filter_map(|line| line.split_once(' ')).filter_map(|(_, path)| path.strip_prefix(&below)).collect();
        let known = KnownFiles::new(&paths);
        let infos: HashSet<&str> = known.folders.keys().filter_map(|folder| folder.split('/').next()).collect();
        let found = std::sync::Mutex::new(Vec::new());
        known.others(&prefix.join(&site), "", &found);
        let mut found = found.into_inner().unwrap_or_default();
        found.sort();
        let is_metadata = |name: &str| name.ends_with(".dist-info") || name.ends_with(".egg-info") || name.ends_with(".egg-link");
        let mut infos_found: Vec<&str> = found
            .iter()
            .map(|path| path.split('/').next().unwrap_or(path))
            .filter(|top| is_metadata(top) && !infos.contains(top))
            .collect();
        infos_found.dedup();
        let linked = infos_found.iter().any(|top| top.ends_with(".egg-link"));
        let mut owned: HashSet<PathBuf> = HashSet::new();
        for info in &infos_found {
            owned.extend(listed_files(prefix, &site.join(info)).unwrap_or_default());
        }
        for path in &found {
            let top = path.split('/').next().unwrap_or(path);
            let full = site.join(path);
            // pip's list of linked projects of old setuptools.
            let of_linked = linked && path == "easy-install.pth";
            if !(of_linked || infos_found.contains(&top) || owned.contains(&full)) {
                aliens.push(full);
            }
        }
        foreign.extend(infos_found.into_iter().map(|info| site.join(info)));
    }
    Look { damage: None, foreign, aliens }
}

/// The files that the `RECORD` of a distribution lists, relative to the environment; `None` without one that can be read.
pub(crate) fn listed_files(prefix: &Path, info: &Path) -> Option<Vec<PathBuf>> {
    let text = crate::files::read(&prefix.join(info).join("RECORD"), crate::files::MOST).ok()?;
    crate::pypi::installed::owned(prefix, info, &String::from_utf8_lossy(&text))
}

/// The files of packages in a site-packages folder, all of which are there.
struct KnownFiles<'a> {
    paths: &'a [&'a str],
    /// How many lie directly in each folder: where the number is right, there is no other, and nothing has to be looked up.
    folders: HashMap<&'a str, usize>,
}

impl<'a> KnownFiles<'a> {
    /// `paths`: relative to site-packages, sorted.
    fn new(paths: &'a [&'a str]) -> Self {
        let mut folders: HashMap<&str, usize> = HashMap::new();
        let folder_of = |path: &'a str| path.rsplit_once('/').map_or("", |(folder, _)| folder);
        for same in paths.chunk_by(|a, b| folder_of(a) == folder_of(b)) {
            *folders.entry(folder_of(same[0])).or_default() += same.len();
        }
        KnownFiles { paths, folders }
    }

    /// The files below a folder that are none of them. Byte code of runs is nobody's and no matter.
    fn others(&self, folder: &Path, relative: &str, found: &std::sync::Mutex<Vec<String>>) {
        let (mut folders, mut files) = (Vec::new(), Vec::new());
        let inside = |name: &str| if relative.is_empty() { name.to_owned() } else { format!("{relative}/{name}") };
        for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
            let name = entry.file_name();
            // What cannot be noted cannot be missed.
            let Some(name) = name.to_str().filter(|name| !name.contains('\n')) else { continue };
            let Ok(kind) = entry.file_type() else { continue };
            if !kind.is_dir() {
                files.push(name.to_owned());
            } else if name != "__pycache__" {
                folders.push((entry.path(), inside(name)));
            }
        }
        let expected = self.folders.get(relative).copied().unwrap_or_default();
        if files.len() != expected {
            let known: HashSet<&str> = if expected == 0 { HashSet::new() } else { self.paths.iter().copied().collect() };
            let others = files.iter().map(|name| inside(name)).filter(|path| !known.contains(path.as_str()));
            if let Ok(mut found) = found.lock() {
                found.extend(others);
            }
        }
        folders.par_iter().for_each(|(folder, path)| self.others(folder, path, found));
    }
}

/// Says that an environment has all its packages, and files in site-packages that are of none.
pub fn tell_aliens(prefix: &Path, aliens: &[PathBuf], progress: &dyn crate::report::Progress) {
    let named: Vec<String> = aliens.iter().take(3).map(|path| format!("`{}`", path.display())).collect();
    let more = if aliens.len() > 3 { format!(" and {} more", aliens.len() - 3) } else { String::new() };
    progress.warn(
        &format!(
            "the packages of `{}` are as asked, and files in site-packages belong to none of them: {}{more}",
            prefix.display(),
            named.join(", ")
        ),
        &["remove them, or make the environment anew without them: --force".to_owned()],
    );
}

/// The first thing found missing, of another size or installed by another tool in an environment that tare made; `None` if all is there. Contents are not
/// read: that is what `verify` is for.
pub fn first_damage(prefix: &Path, stamp: &Stamp) -> Option<String> {
    look(prefix, stamp).difference()
}

/// The first thing that is missing or of another size in an environment that tare made, and how many files are so; `None` if all is there.
pub fn damages(prefix: &Path, stamp: &Stamp) -> Option<(String, usize)> {
    let first = damage(prefix, stamp)?;
    let manifest = crate::files::read_text(&prefix.join(TARE_FOLDER).join("files")).unwrap_or_default();
    let lines: Vec<&str> = manifest.lines().collect();
    let number = lines.par_iter().filter(|line| damaged(prefix, line).is_some()).count();
    Some((first, number.max(1)))
}

/// What is wrong with the file of a line of tare's list of files.
fn damaged(prefix: &Path, line: &str) -> Option<String> {
    let (size, path) = line.split_once(' ')?;
    match std::fs::symlink_metadata(prefix.join(path)) {
        Err(_) => Some(format!("`{path}` is missing")),
        Ok(metadata) => match size.parse::<u64>() {
            Ok(size) if metadata.is_file() && metadata.len() != size => Some(format!("`{path}` was changed")),
            // What was installed as a link has no size.
            Ok(_) if !metadata.is_file() => Some(format!("`{path}` is {} and no regular file", crate::files::kind(&metadata))),
            _ => None,
        },
    }
}

/// The first thing that is missing or of another size.
fn damage(prefix: &Path, stamp: &Stamp) -> Option<String> {
    let meta = prefix.join("conda-meta");
    let mut present = BTreeSet::new();
    for entry in std::fs::read_dir(&meta).ok()?.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        if name.ends_with(".json") {
            present.insert(name);
        }
    }
    for (name, size) in &stamp.records {
        if !present.remove(name) {
            return Some(format!("`conda-meta/{name}` is missing"));
        }
        if std::fs::symlink_metadata(meta.join(name)).map(|metadata| metadata.len()).ok() != Some(*size) {
            return Some(format!("`conda-meta/{name}` was changed"));
        }
    }
    if let Some(name) = present.first() {
        return Some(format!("`conda-meta/{name}` was added by another tool"));
    }
    let state = crate::files::read(&meta.join("state"), crate::files::MOST).ok().map(|bytes| sha256_hex(&bytes));
    if state != stamp.state_sha256 {
        return Some("`conda-meta/state` (the variables) was changed".to_owned());
    }
    let Ok(manifest) = crate::files::read_text(&prefix.join(TARE_FOLDER).join("files")) else {
        return Some(format!("`{TARE_FOLDER}/files` is missing"));
    };
    let lines: Vec<&str> = manifest.lines().collect();
    lines.par_iter().find_map_first(|line| damaged(prefix, line))
}

/// The list of environments that conda keeps for the user: `~/.conda/environments.txt`.
pub fn environments_file(home: &Path) -> PathBuf {
    home.join(".conda/environments.txt")
}

/// Adds (`present`) or removes `prefix` in the list of environments. Entries of others are kept as they are; the list is changed under a lock and
/// replaced at once.
///
/// # Errors
/// The list cannot be written; callers treat this as a remark, not a failure.
pub fn register(home: &Path, prefix: &Path, present: bool) -> Result<()> {
    let path = environments_file(home);
    match std::fs::metadata(&path).and_then(|about| crate::files::regular(&about)) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(Error::io("open", &path, &error)),
        _ => {}
    }
    let folder = path.parent().unwrap_or(home);
    if !present && !path.exists() {
        return Ok(());
    }
    fs_err::create_dir_all(folder).map_err(|error| Error::io("create the folder", folder, &error))?;
    // conda appends to this very file, so lock it itself rather than a file beside it.
    let mut file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .open(&path)
        .map_err(|error| Error::io("open", &path, &error))?;
    // A file system without locks is no reason to give up on a list that is a convenience.
    let _ = lock_briefly(&file);
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes).map_err(|error| Error::io("read", &path, &error))?;
    let text = String::from_utf8_lossy(&bytes);
    let wanted = prefix.to_string_lossy();
    let mut lines: Vec<&str> = Vec::new();
    for line in text.lines().map(str::trim_end).filter(|line| !line.trim().is_empty()) {
        if (line != wanted || present) && !lines.contains(&line) {
            lines.push(line);
        }
    }
    if present && !lines.contains(&&*wanted) {
        lines.push(&wanted);
    }
    let mut new = lines.join("\n");
    if !new.is_empty() {
        new.push('\n');
    }
    if new.as_bytes() == bytes.as_slice() {
        return Ok(());
    }
    file.rewind()
        .and_then(|()| file.write_all(new.as_bytes()))
        .and_then(|()| file.set_len(new.len() as u64))
        .map_err(|error| Error::io("write", &path, &error))
}

fn lock_briefly(file: &File) -> std::io::Result<()> {
    for _ in 0..100 {
        match file.try_lock() {
            Ok(()) => return Ok(()),
            Err(std::fs::TryLockError::WouldBlock) => std::thread::sleep(std::time::Duration::from_millis(10)),
            Err(std::fs::TryLockError::Error(error)) => return Err(error),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(words: &[&str]) -> Vec<String> {
        words.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn a_command_line_in_the_history_has_no_secrets() {
        let text = redacted_command(&words(&[
            "tare",
            "create",
            "-c",
            "https://user:pass@host.example/t/tk-1/chan",
            "--channel=https://conda.anaconda.org/t/tk-2/x",
            "a b",
            "",
        ]));
        assert_eq!(
            text,
            "tare create -c https://host.example/t/tk-1/chan --channel=https://conda.anaconda.org/x 'a b' ''".replace("/t/tk-1", "")
        );
    }

    #[test]
    fn a_revision_reads_as_conda_writes_it() {
        let specs = [
            MatchSpec::from_str("python=3.11", rattler_conda_types::ParseStrictness::Lenient).unwrap(),
            MatchSpec::from_str("numpy", rattler_conda_types::ParseStrictness::Lenient).unwrap(),
        ];
        let removed = BTreeSet::from(["conda-forge/linux-64::python-3.10.1-h1_0".to_owned()]);
        let added = BTreeSet::from(["conda-forge/linux-64::python-3.11.9-h2_0".to_owned()]);
        let text = history_entry("2026-01-01 10:00:00", &words(&["tare", "create"]), &removed, &added, &specs, &[])
            .replace(env!("CARGO_PKG_VERSION"), "VERSION");
        insta::assert_snapshot!(text, @r"
        ==> 2026-01-01 10:00:00 <==
        # cmd: tare create
        # tare version: VERSION
        -conda-forge/linux-64::python-3.10.1-h1_0
        +conda-forge/linux-64::python-3.11.9-h2_0
        # update specs: ['python 3.11.*', 'numpy']
        ");
        assert_eq!(python_string("a[b='c']"), "\"a[b='c']\"");
        assert_eq!(python_string("a'\"\\"), r#"'a\'"\\'"#);
    }

    #[test]
    fn the_list_of_environments_is_kept_without_repeats() {
        let home = tempfile::tempdir().unwrap();
        let list = environments_file(home.path());
        register(home.path(), Path::new("/e/gone"), false).unwrap();
        assert!(!list.exists());
        register(home.path(), Path::new("/e/a"), true).unwrap();
        std::fs::write(&list, "/e/a\n/e/other\n/e/other\n\n/e/a").unwrap();
        register(home.path(), Path::new("/e/b"), true).unwrap();
        register(home.path(), Path::new("/e/b"), true).unwrap();
        assert_eq!(std::fs::read_to_string(&list).unwrap(), "/e/a\n/e/other\n/e/b\n");
        register(home.path(), Path::new("/e/a"), false).unwrap();
        assert_eq!(std::fs::read_to_string(&list).unwrap(), "/e/other\n/e/b\n");
    }

    #[test]
    fn concurrent_registrations_all_arrive() {
        let home = tempfile::tempdir().unwrap();
        std::thread::scope(|scope| {
            for n in 0..8 {
                let home = home.path();
                scope.spawn(move || register(home, &PathBuf::from(format!("/e/{n}")), true).unwrap());
            }
        });
        assert_eq!(std::fs::read_to_string(environments_file(home.path())).unwrap().lines().count(), 8);
    }

    #[test]
    fn variables_become_condas_state_file() {
        assert_eq!(state_text(&IndexMap::new()), None);
        let text = state_text(&IndexMap::from([("B".to_owned(), "2".to_owned()), ("A".to_owned(), "x".to_owned())])).unwrap();
        assert_eq!(text, "{\n  \"version\": 1,\n  \"env_vars\": {\n    \"B\": \"2\",\n    \"A\": \"x\"\n  }\n}\n");
    }
}
