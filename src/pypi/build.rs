//! Source archives, repositories and folders to wheels.
//!
//! Everything is built by pip (editables by their own backend, PEP 660) in a throwaway prefix, and cached by what it was built from. A wheel that
//! still names the throwaway prefix is cleaned before anyone sees it.

use std::ffi::OsString;
use std::io::{Read as _, Write as _};
use std::path::{Path, PathBuf};

use futures::StreamExt as _;
use sha2::{Digest as _, Sha256};

use super::engine::write_private;
use super::process::{self, BUILD_LIMIT, Cause, Job, readable};
use super::provided::CoreMetadata;
use super::section::Options;
use super::tags::{Tags, WheelName};
use super::throwaway::WorkFolder;
use super::uv::file_name;
use super::{PypiRecord, PypiSource};
use crate::channel::{Session, redact_url};
use crate::elf;
use crate::error::{Error, Kind, Result};
use crate::install::Cancel;
use crate::prefix::Environment;
use crate::report::Progress;

/// The folder of wheels built here, in the cache.
pub(crate) const FOLDER: &str = "built-wheels";

/// Calls the hooks of a build backend for an editable wheel. Arguments: `prepare` or `build`, project, folder of the build requirements, output.
/// `prepare` prints the requirements of the backend as JSON; `hooks` those that the backend asks for in addition.
const EDITABLE: &str = r"
import importlib, json, os, site, sys
step, project, folder, out = sys.argv[1:5]
try:
    import tomllib
except ImportError:
    from pip._vendor import tomli as tomllib
path = os.path.join(project, 'pyproject.toml')
system = {}
if os.path.exists(path):
    with open(path, 'rb') as file:
        system = tomllib.load(file).get('build-system', {})
requires = system.get('requires', ['setuptools>=64', 'wheel'])
backend = system.get('build-backend', 'setuptools.build_meta:__legacy__')
if step == 'prepare':
    print(json.dumps(requires))
    sys.exit(0)
site.addsitedir(folder)
sys.path.remove(folder)
sys.path.insert(0, folder)
for place in reversed(system.get('backend-path', [])):
    sys.path.insert(0, os.path.join(project, place))
os.chdir(project)
module, _, attribute = backend.partition(':')
found = importlib.import_module(module)
for name in filter(None, attribute.split('.')):
    found = getattr(found, name)
if not hasattr(found, 'build_editable'):
    sys.exit('the build backend `%s` cannot make editable wheels (PEP 660)' % backend)
if step == 'hooks':
    hook = getattr(found, 'get_requires_for_build_editable', None)
    result = list(hook({})) if hook else []
else:
    result = found.build_editable(out, {}, None)
with open(os.path.join(out, 'result.json'), 'w') as file:
    json.dump(result, file)
";

/// What builds happen with.
pub struct Builder<'a> {
    /// Interpreter of the throwaway prefix.
    pub python: &'a Path,
    /// Variables with the throwaway prefix active.
    pub env: &'a Environment,
    /// Files of this run.
    pub work: &'a WorkFolder,
    /// Options of the section: build requirements come from the same indexes.
    pub options: &'a Options,
    /// Wheels that can be used.
    pub tags: &'a Tags,
    /// For downloads, and for the place of the cache.
    pub session: &'a Session,
    /// Stops it.
    pub cancel: &'a Cancel,
    /// For remarks.
    pub progress: &'a dyn Progress,
}

/// A wheel that was built, or found among those built before.
#[derive(Debug, Clone)]
pub struct Built {
    /// In the cache.
    pub path: PathBuf,
    /// sha256 of it.
    pub sha256: String,
    /// What its metadata says.
    pub metadata: CoreMetadata,
}

/// Keys under which a wheel built from `source` is cached: for wheels without compiled code, and for the others. `None` for folders, whose content
/// may change.
fn keys(source: &PypiSource, tags: &Tags, conda_half: &str) -> Option<[String; 2]> {
    let identity = match source {
        PypiSource::Archive { sha256: Some(sha256), subdirectory, .. } => format!("archive {sha256} {subdirectory:?}"),
        PypiSource::Vcs { system, url, commit, subdirectory, .. } => format!("{system} {url} {commit} {subdirectory:?}"),
        _ => return None,
    };
    let input = tags.input();
    let pure = format!("1\n{identity}\n{}.{}", input.python.0, input.python.1);
    let compiled = format!("{pure}\n{input:?}\n{conda_half}");
    Some([pure, compiled].map(|text| crate::text::hex(&Sha256::digest(text.as_bytes()))[..40].to_owned()))
}

fn read_built(folder: &Path) -> Option<Built> {
    let path = std::fs::read_dir(folder)
        .ok()?
        .flatten()
        .map(|entry| entry.path())
        .find(|path| path.extension().is_some_and(|end| end == "whl"))?;
    let bytes = std::fs::read(&path).ok()?;
    let sha256 = crate::text::hex(&Sha256::digest(&bytes));
    // A file that was cut or changed is built again.
    let noted = std::fs::read_to_string(folder.join("sha256")).ok()?;
    if noted.trim() != sha256 {
        return None;
    }
    Some(Built { metadata: wheel_metadata(&path).ok()?, path, sha256 })
}

/// The wheel built from this source before, if it is still there.
pub fn cached(source: &PypiSource, tags: &Tags, conda_half: &str, session: &Session) -> Option<Built> {
    let root = session.cache_dir.join(FOLDER);
    keys(source, tags, conda_half)?.iter().find_map(|key| {
        let built = read_built(&root.join(key))?;
        let name = WheelName::parse(built.path.file_name()?.to_str()?).ok()?;
        tags.rank(&name).map(|_| built)
    })
}

/// The names in an archive that can be read.
fn names<R: std::io::Read + std::io::Seek>(archive: &zip::ZipArchive<R>) -> impl Iterator<Item = String> + '_ {
    archive.file_names().filter_map(|name| name.ok().map(std::borrow::Cow::into_owned))
}

/// The metadata in a wheel.
///
/// # Errors
/// Not a wheel, or one without metadata.
pub fn wheel_metadata(path: &Path) -> Result<CoreMetadata> {
    let broken = |why: &dyn std::fmt::Display| Error::new(Kind::Verification, format!("`{}` is not a wheel", path.display())).because(why);
    let file = fs_err::File::open(path).map_err(|error| Error::io("read", path, &error))?;
    let mut wheel = zip::ZipArchive::new(std::io::BufReader::new(file)).map_err(|error| broken(&error))?;
    let name = names(&wheel)
        .find(|name| name.split_once('/').is_some_and(|(folder, file)| folder.ends_with(".dist-info") && file == "METADATA"))
        .ok_or_else(|| broken(&"it has no METADATA"))?;
    let mut bytes = Vec::new();
    wheel.by_name(&name).map_err(|error| broken(&error))?.take(16 << 20).read_to_end(&mut bytes).map_err(|error| broken(&error))?;
    Ok(CoreMetadata::parse(&String::from_utf8_lossy(&bytes)))
}

impl Builder<'_> {
    /// Builds the wheels of many records, some at a time.
    ///
    /// # Errors
    /// See [`Builder::build`]; the first that fails stops the others.
    pub async fn build_all(&self, records: &[PypiRecord], conda_half: &str) -> Result<Vec<Built>> {
        let task = self.progress.start(crate::report::Phase::Other, "building Python packages", Some(records.len() as u64));
        let at_once = std::thread::available_parallelism().map_or(2, usize::from).clamp(1, 4);
        let mut running = futures::stream::iter(records.iter().enumerate())
            .map(|(number, record)| async move { self.build(record, conda_half).await.map(|built| (number, built)) })
            .buffer_unordered(at_once);
        let mut made: Vec<Option<Built>> = vec![None; records.len()];
        let mut done = 0;
        let mut result = Ok(());
        while let Some(next) = running.next().await {
            match next {
                Ok((number, built)) => made[number] = Some(built),
                Err(error) => {
                    result = Err(error);
                    break;
                }
            }
            done += 1;
            self.progress.advance_to(task, done);
        }
        drop(running);
        self.progress.finish(task);
        result.map(|()| made.into_iter().flatten().collect())
    }

    /// Builds one wheel and puts it into the cache.
    ///
    /// # Errors
    /// The source cannot be fetched (kind network), has another hash (kind verification), cannot be built, or gives a wheel of another distribution
    /// or for another platform.
    pub async fn build(&self, record: &PypiRecord, conda_half: &str) -> Result<Built> {
        if let Some(built) = cached(&record.source, self.tags, conda_half, self.session) {
            return Ok(built);
        }
        let out = tempfile::Builder::new()
            .prefix("build-")
            .tempdir_in(self.work.path())
            .map_err(|error| Error::io("create a folder in", self.work.path(), &error))?;
        let wheels = out.path().join("wheels");
        fs_err::create_dir(&wheels).map_err(|error| Error::io("create the folder", &wheels, &error))?;
        match &record.source {
            PypiSource::Directory { path, editable: true } => self.editable(record, path, out.path(), &wheels).await?,
            PypiSource::Directory { path, .. } => {
                if !path.is_dir() {
                    return Err(
                        Error::failure(format!("`{}` is no folder", path.display())).because(format!("`{}` is built from it", record.name))
                    );
                }
                let line = url::Url::from_file_path(path).map_or_else(|()| path.display().to_string(), |url| url.to_string());
                self.wheel(record, &line, out.path(), &wheels).await?;
            }
            PypiSource::Vcs { system, url, commit, subdirectory, .. } => {
                // Without its name in front: older versions of pip refuse `name @ git+file:///…`.
                let fragment = subdirectory.as_ref().map(|folder| format!("#subdirectory={folder}")).unwrap_or_default();
                self.wheel(record, &format!("{system}+{url}@{commit}{fragment}"), out.path(), &wheels).await?;
            }
            PypiSource::Archive { url, subdirectory, .. } => {
                let file = self.fetch(record, out.path()).await?;
                let local = url::Url::from_file_path(&file).map_err(|()| Error::failure(format!("`{url}` has no usable name")))?;
                let fragment = subdirectory.as_ref().map(|folder| format!("#subdirectory={folder}")).unwrap_or_default();
                self.wheel(record, &format!("{} @ {local}{fragment}", record.name), out.path(), &wheels).await?;
            }
        }
        let found: Vec<PathBuf> = std::fs::read_dir(&wheels)
            .into_iter()
            .flatten()
            .flatten()
            .map(|entry| entry.path())
            .filter(|path| path.extension().is_some_and(|end| end == "whl"))
            .collect();
        let [wheel] = found.as_slice() else {
            return Err(Error::failure(format!("building `{}` gave {} wheels", record.name, found.len())));
        };
        self.accept(record, wheel, conda_half)
    }

    /// Checks a fresh wheel, cleans it and moves it into the cache.
    fn accept(&self, record: &PypiRecord, wheel: &Path, conda_half: &str) -> Result<Built> {
        let file = wheel.file_name().and_then(|name| name.to_str()).unwrap_or_default().to_owned();
        self.tags.check(&file)?;
        let left = launder(wheel, self.work.path(), self.python)?;
        if !left.is_empty() {
            self.progress.warn(
                &format!(
                    "the wheel built from `{}` named the folder it was built in; the paths now lead nowhere: {}",
                    record.name,
                    left.join(", ")
                ),
                &["a package that uses them does not find what it looks for: prefer one that is built already".to_owned()],
            );
        }
        let metadata = wheel_metadata(wheel)?;
        if metadata.name.parse::<super::Name>().ok().as_ref() != Some(&record.name) {
            return Err(Error::failure(format!("the source of `{}` makes another package", record.name))
                .because(format!("it is `{}`", metadata.name)));
        }
        let bytes = fs_err::read(wheel).map_err(|error| Error::io("read", wheel, &error))?;
        let sha256 = crate::text::hex(&Sha256::digest(&bytes));
        let pure = WheelName::parse(&file).is_ok_and(|name| name.is_pure());
        let key = match keys(&record.source, self.tags, conda_half) {
            Some([for_pure, for_compiled]) => {
                if pure {
                    for_pure
                } else {
                    for_compiled
                }
            }
            None => sha256[..40].to_owned(),
        };
        let root = self.session.cache_dir.join(FOLDER);
        fs_err::create_dir_all(&root).map_err(|error| Error::io("create the folder", &root, &error))?;
        let fresh =
            tempfile::Builder::new().prefix(".").tempdir_in(&root).map_err(|error| Error::io("create a folder in", &root, &error))?;
        fs_err::write(fresh.path().join(&file), &bytes).map_err(|error| Error::io("write", fresh.path(), &error))?;
        fs_err::write(fresh.path().join("sha256"), &sha256).map_err(|error| Error::io("write", fresh.path(), &error))?;
        let place = root.join(&key);
        if read_built(&place).is_none_or(|known| known.sha256 != sha256) {
            let _ = crate::install::swap::remove_tree(&place);
            let fresh = fresh.keep();
            if let Err(error) = std::fs::rename(&fresh, &place) {
                let _ = crate::install::swap::remove_tree(&fresh);
                // Another process built the same just now.
                if read_built(&place).is_none() {
                    return Err(Error::io("create", &place, &error));
                }
            }
        }
        read_built(&place).ok_or_else(|| Error::failure(format!("`{}` vanished from the cache", place.display())))
    }

    fn failed(&self, record: &PypiRecord, ran: &process::Ran) -> Error {
        let all = format!("{}\n{}", ran.stdout, ran.stderr);
        let cause = Cause::of(&all);
        let version = if record.version.release() == [0] { String::new() } else { format!(" {}", record.version) };
        let kind = if cause == Cause::Network { Kind::Network } else { Kind::Failure };
        let error = Error::new(kind, format!("`{}{version}` could not be built", record.name))
            .because(source_text(&record.source))
            .because(readable(&all, &[(self.work.path(), "…")]));
        if cause == Cause::Network {
            error.hint("building needs the packages that its `[build-system]` names")
        } else {
            error
                .hint("a build may need a compiler or a library: add it to the conda dependencies")
                .hint("or take a version that has a wheel: `--only-binary` in the `pip:` section says so")
        }
    }

    async fn python(&self, args: Vec<OsString>) -> Result<process::Ran> {
        let job = Job { program: self.python.to_owned(), args, env: self.env.clone(), cwd: self.work.run_dir(), limit: BUILD_LIMIT };
        process::run(&job, self.cancel).await
    }

    fn index_lines(&self) -> Vec<String> {
        let mut lines = self.options.lines(false);
        lines.extend(self.options.trusted_hosts.iter().map(|host| format!("--trusted-host {host}")));
        if self.session.offline && !self.options.no_index {
            lines.push("--no-index".to_owned());
        }
        lines
    }

    async fn wheel(&self, record: &PypiRecord, line: &str, out: &Path, wheels: &Path) -> Result<()> {
        let file = out.join("requirement.txt");
        let mut text = self.index_lines().join("\n");
        text.push('\n');
        text.push_str(line);
        text.push('\n');
        write_private(&file, &text)?;
        let args = ["-m", "pip", "wheel", "--no-deps", "--no-input", "--exists-action=w", "--wheel-dir"];
        let mut args: Vec<OsString> = args.map(Into::into).to_vec();
        args.extend([wheels.into(), "-r".into(), file.into()]);
        let ran = self.python(args).await?;
        if ran.success { Ok(()) } else { Err(self.failed(record, &ran)) }
    }

    async fn editable(&self, record: &PypiRecord, project: &Path, out: &Path, wheels: &Path) -> Result<()> {
        if !project.is_dir() {
            return Err(
                Error::failure(format!("`{}` is no folder", project.display())).because(format!("`{}` is installed from it", record.name))
            );
        }
        let requirements = out.join("editable");
        fs_err::create_dir_all(&requirements).map_err(|error| Error::io("create the folder", &requirements, &error))?;
        let driver = out.join("editable.py");
        fs_err::write(&driver, EDITABLE).map_err(|error| Error::io("write", &driver, &error))?;
        let step = |name: &str| -> Vec<OsString> {
            vec![driver.clone().into(), name.into(), project.into(), requirements.clone().into(), wheels.into()]
        };
        let read = |text: &str| -> Result<Vec<String>> {
            serde_json::from_str(text.trim())
                .map_err(|error| Error::failure(format!("`{}` could not be built", record.name)).because(error))
        };
        let prepared = self.python(step("prepare")).await?;
        if !prepared.success {
            return Err(self.failed(record, &prepared));
        }
        self.install_requirements(record, read(&prepared.stdout)?, out, &requirements).await?;
        let result = wheels.join("result.json");
        let ran = self.python(step("hooks")).await?;
        if !ran.success {
            return Err(self.failed(record, &ran));
        }
        let text = fs_err::read_to_string(&result).map_err(|error| Error::io("read", &result, &error))?;
        self.install_requirements(record, read(&text)?, out, &requirements).await?;
        let ran = self.python(step("build")).await?;
        if ran.success { Ok(()) } else { Err(self.failed(record, &ran)) }
    }

    /// Installs what a build needs into a folder.
    async fn install_requirements(&self, record: &PypiRecord, requires: Vec<String>, out: &Path, folder: &Path) -> Result<()> {
        if requires.is_empty() {
            return Ok(());
        }
        let file = out.join("build-requirements.txt");
        write_private(&file, &format!("{}\n{}\n", self.index_lines().join("\n"), requires.join("\n")))?;
        let args = ["-m", "pip", "install", "--no-input", "--no-warn-script-location", "--no-compile", "--upgrade", "--target"];
        let mut args: Vec<OsString> = args.map(Into::into).to_vec();
        args.extend([folder.into(), "-r".into(), file.into()]);
        let ran = self.python(args).await?;
        if ran.success { Ok(()) } else { Err(self.failed(record, &ran)) }
    }

    /// Fetches a source archive and checks its hash.
    async fn fetch(&self, record: &PypiRecord, out: &Path) -> Result<PathBuf> {
        let PypiSource::Archive { url, sha256, .. } = &record.source else {
            return Err(Error::failure(format!("`{}` has no archive", record.name)));
        };
        let path = out.join(file_name(url.path()));
        let bytes = fetch_bytes(self.session, url, self.cancel).await?;
        let found = crate::text::hex(&Sha256::digest(&bytes));
        if let Some(expected) = sha256
            && *expected != found
        {
            return Err(Error::new(Kind::Verification, format!("`{}` is not the file it should be", redact_url(url)))
                .because(format!("its sha256 is {found}"))
                .because(format!("expected {expected}")));
        }
        fs_err::write(&path, &bytes).map_err(|error| Error::io("write", &path, &error))?;
        Ok(path)
    }
}

/// A source for messages.
fn source_text(source: &PypiSource) -> String {
    match source {
        PypiSource::Archive { url, .. } => format!("from {}", redact_url(url)),
        PypiSource::Vcs { url, commit, .. } => format!("from {} at {commit}", redact_url(url)),
        PypiSource::Directory { path, .. } => format!("from `{}`", path.display()),
    }
}

/// Most bytes of a source archive.
const MAX_ARCHIVE: usize = 2 << 30;

/// The bytes of a file that a URL names.
///
/// # Errors
/// Kind network for servers; no such file.
pub(super) async fn fetch_bytes(session: &Session, url: &url::Url, cancel: &Cancel) -> Result<Vec<u8>> {
    let name = redact_url(url);
    if url.scheme() == "file" {
        let path = url.to_file_path().map_err(|()| Error::usage(format!("`{name}` is no path of this machine")))?;
        return fs_err::read(&path).map_err(|error| Error::io("read", &path, &error));
    }
    let failed = |why: String| Error::network(format!("cannot fetch `{name}`")).because(why);
    if session.offline {
        return Err(failed("the network is off (--offline)".to_owned()).hint("run it once without --offline"));
    }
    let fetched = async {
        let response = session.client.client().get(url.clone()).send().await.map_err(|error| failed(error.to_string()))?;
        if !response.status().is_success() {
            return Err(failed(format!("the server answers {}", response.status())));
        }
        let mut bytes = Vec::new();
        let mut stream = response.bytes_stream();
        while let Some(chunk) = stream.next().await {
            bytes.extend_from_slice(&chunk.map_err(|error| failed(error.to_string()))?);
            if bytes.len() > MAX_ARCHIVE {
                return Err(failed("it is too large for a source archive".to_owned()));
            }
        }
        Ok(bytes)
    };
    tokio::select! {
        fetched = fetched => fetched,
        () = cancel.cancelled() => Err(crate::install::cancel::interrupted()),
    }
}

fn contains(bytes: &[u8], needle: &[u8]) -> bool {
    needle.len() <= bytes.len() && bytes.windows(needle.len()).any(|window| window == needle)
}

/// Replaces `old` by something of the same length that is no path of anything.
fn blot(bytes: &mut [u8], old: &[u8]) -> bool {
    let nowhere: Vec<u8> = b"/proc/0".iter().copied().chain(std::iter::repeat(b'_')).take(old.len()).collect();
    let mut found = false;
    let mut at = 0;
    while at + old.len() <= bytes.len() {
        if bytes[at..].starts_with(old) {
            bytes[at..at + old.len()].copy_from_slice(&nowhere);
            found = true;
            at += old.len();
        } else {
            at += 1;
        }
    }
    found
}

/// Where a file of a wheel goes, as the number of folders from `site-packages` down to it; `None` for files that go elsewhere.
fn depth_in_site_packages(name: &str) -> Option<usize> {
    let parts: Vec<&str> = name.split('/').collect();
    match parts.as_slice() {
        [data, "purelib" | "platlib", rest @ ..] if data.ends_with(".data") => rest.len().checked_sub(1),
        [data, ..] if data.ends_with(".data") => None,
        parts => parts.len().checked_sub(1),
    }
}

/// Takes every trace of the folder `work` out of a wheel: search paths of shared libraries that lead into the prefix of `python` become relative, the
/// rest is overwritten. Returns the files in which something was overwritten.
fn launder(wheel: &Path, work: &Path, python: &Path) -> Result<Vec<String>> {
    let needle = work.as_os_str().as_encoded_bytes().to_vec();
    let prefix = python.parent().and_then(Path::parent).unwrap_or(work).display().to_string();
    let failed =
        |error: &dyn std::fmt::Display| Error::failure(format!("the wheel `{}` cannot be rewritten", wheel.display())).because(error);
    let file = fs_err::File::open(wheel).map_err(|error| Error::io("read", wheel, &error))?;
    let mut archive = zip::ZipArchive::new(std::io::BufReader::new(file)).map_err(|error| failed(&error))?;
    let mut changed: std::collections::BTreeMap<String, Vec<u8>> = std::collections::BTreeMap::new();
    let mut blotted = Vec::new();
    for number in 0..archive.len() {
        let mut entry = archive.by_index(number).map_err(|error| failed(&error))?;
        let name = entry.name().map_err(|error| failed(&error))?.into_owned();
        let mut bytes = Vec::new();
        entry.read_to_end(&mut bytes).map_err(|error| failed(&error))?;
        if !contains(&bytes, &needle) {
            continue;
        }
        if elf::is_elf(&bytes) {
            bytes = relative_search_paths(bytes, &name, &prefix).map_err(|error| failed(&error))?;
        }
        if blot(&mut bytes, &needle) {
            blotted.push(name.clone());
        }
        changed.insert(name, bytes);
    }
    if changed.is_empty() {
        return Ok(blotted);
    }
    let record_name = names(&archive).find(|name| name.ends_with(".dist-info/RECORD"));
    if let Some(record_name) = record_name {
        let mut text = String::new();
        archive.by_name(&record_name).map_err(|error| failed(&error))?.read_to_string(&mut text).map_err(|error| failed(&error))?;
        let lines: Vec<String> = text
            .lines()
            .map(|line| {
                // Only names that RECORD quotes have commas; those are left to the check of the installation.
                let name = line.split(',').next().unwrap_or_default();
                match changed.get(name) {
                    Some(bytes) => format!("{name},sha256={},{}", urlsafe(&Sha256::digest(bytes)), bytes.len()),
                    None => line.to_owned(),
                }
            })
            .collect();
        changed.insert(record_name, format!("{}\n", lines.join("\n")).into_bytes());
    }
    let mut out = zip::ZipWriter::new(std::io::Cursor::new(Vec::new()));
    for number in 0..archive.len() {
        let entry = archive.by_index_raw(number).map_err(|error| failed(&error))?;
        let name = entry.name().map_err(|error| failed(&error))?.into_owned();
        match changed.get(&name) {
            None => out.raw_copy_file(entry).map_err(|error| failed(&error))?,
            Some(bytes) => {
                let mut options = zip::write::SimpleFileOptions::default()
                    .last_modified_time(entry.last_modified().unwrap_or_default())
                    .compression_method(zip::CompressionMethod::Deflated);
                if let Some(mode) = entry.unix_mode() {
                    options = options.unix_permissions(mode);
                }
                drop(entry);
                out.start_file(&name, options).map_err(|error| failed(&error))?;
                out.write_all(bytes).map_err(|error| failed(&error))?;
            }
        }
    }
    let bytes = out.finish().map_err(|error| failed(&error))?.into_inner();
    fs_err::write(wheel, bytes).map_err(|error| Error::io("write", wheel, &error))?;
    Ok(blotted)
}

/// base64 of RFC 4648, section 5, without padding, as RECORD has it.
fn urlsafe(bytes: &[u8]) -> String {
    const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
    let mut out = String::new();
    for chunk in bytes.chunks(3) {
        let bits = chunk.iter().fold(0_u32, |bits, byte| bits << 8 | u32::from(*byte)) << (8 * (3 - chunk.len()));
        for position in 0..=chunk.len() {
            out.push(char::from(ALPHABET[(bits >> (18 - 6 * position) & 63) as usize]));
        }
    }
    out
}

/// Makes the search paths of a shared library that lead into `prefix` relative to the library, as it will lie in an environment.
fn relative_search_paths(mut bytes: Vec<u8>, name: &str, prefix: &str) -> std::result::Result<Vec<u8>, String> {
    let Some(depth) = depth_in_site_packages(name) else { return Ok(bytes) };
    // `lib/pythonX.Y/site-packages` and the folders below.
    let up = vec![".."; depth + 3].join("/");
    for (tag, old) in elf::read(&bytes)?.search_paths {
        let mut kept: Vec<String> = Vec::new();
        for entry in old.split(':') {
            let entry = match entry.strip_prefix(prefix) {
                Some("") => format!("$ORIGIN/{up}"),
                Some(rest) if rest.starts_with('/') => format!("$ORIGIN/{up}{}", rest.trim_end_matches('/')),
                _ => entry.to_owned(),
            };
            if !kept.contains(&entry) {
                kept.push(entry);
            }
        }
        let new = kept.join(":");
        if new != old {
            bytes = elf::set_search_path(&bytes, tag, &new)?;
        }
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write_wheel(path: &Path, files: &[(&str, &[u8])]) {
        let mut zip = zip::ZipWriter::new(std::fs::File::create(path).unwrap());
        for (name, bytes) in files {
            zip.start_file(*name, zip::write::SimpleFileOptions::default()).unwrap();
            zip.write_all(bytes).unwrap();
        }
        zip.finish().unwrap();
    }

    #[test]
    fn a_wheel_forgets_where_it_was_built() {
        let folder = tempfile::tempdir().unwrap();
        let work = Path::new("/cache/throwaway/abcdefgh");
        let wheel = folder.path().join("a-1-py3-none-any.whl");
        let text = b"built in /cache/throwaway/abcdefgh/env/lib and there";
        write_wheel(
            &wheel,
            &[
                ("a/info.py", text),
                ("a/clean.py", b"x = 1\n"),
                ("a-1.dist-info/RECORD", b"a/info.py,sha256=old,1\na/clean.py,sha256=same,6\n"),
            ],
        );
        let left = launder(&wheel, work, Path::new("/cache/throwaway/abcdefgh/env/bin/python")).unwrap();
        assert_eq!(left, ["a/info.py"]);
        let mut archive = zip::ZipArchive::new(std::fs::File::open(&wheel).unwrap()).unwrap();
        let mut read = |name: &str| std::io::read_to_string(archive.by_name(name).unwrap()).unwrap();
        let info = read("a/info.py");
        assert!(!info.contains("/cache/throwaway") && info.len() == text.len() && info.ends_with("/env/lib and there"), "{info}");
        let record = read("a-1.dist-info/RECORD");
        assert!(record.contains(&format!("a/info.py,sha256={},{}", urlsafe(&Sha256::digest(info.as_bytes())), text.len())), "{record}");
        assert!(record.contains("a/clean.py,sha256=same,6"));
        assert!(launder(&wheel, work, Path::new("/x/bin/python")).unwrap().is_empty());
    }

    #[test]
    fn depths_and_digests_as_wheels_have_them() {
        assert_eq!(depth_in_site_packages("a.so"), Some(0));
        assert_eq!(depth_in_site_packages("a/b/c.so"), Some(2));
        assert_eq!(depth_in_site_packages("a-1.data/platlib/a/c.so"), Some(1));
        assert_eq!(depth_in_site_packages("a-1.data/data/lib/c.so"), None);
        assert_eq!(urlsafe(b"\xfb\xff\xfe"), "-__-");
        assert_eq!(urlsafe(b"ab"), "YWI");
    }
}
