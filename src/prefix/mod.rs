//! An installed environment: where it is, what is in it, and how to use it.

mod activate;
mod history;
mod init;
mod list;
mod names;
mod nobody;
mod run;
mod shell;
mod subshell;

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use indexmap::IndexMap;
use rattler_conda_types::{PrefixRecord, Subdir};
use rayon::iter::{IntoParallelRefIterator, ParallelIterator};
use serde::Deserialize;

pub use activate::{Activator, Prompt, shell_hook_json};
pub use history::Revision;
pub(crate) use history::{parse as parse_history, requested as requested_after};
pub(crate) use init::is_initialized;
pub use init::{Change, Initialized, Tool, function, initialize, rc_file};
pub use list::{
    Distribution, FIELDS, Hashes, ListOptions, Row, canonical, explicit_text, export_text, list_fields_text, list_text, revisions_json,
    revisions_text, rows,
};
pub(crate) use list::{
    channel_canonical, channel_display, channel_url, explicit_lines, header, install_order, known_url, normalize, site_packages,
};
pub use names::{KnownEnvironment, Places, Which, environments_text, list_known, locate, place_for_new, validate_name};
pub use run::{Activation, Environment, RunOptions, remarks, run, run_environment, run_environment_with};
pub use shell::Shell;
pub use subshell::{SubShell, sub_shell};

use crate::error::{Error, Result};
use crate::install::Stamp;

/// Scheme of the URL of a package whose record has none.
pub(crate) const UNKNOWN_SCHEME: &str = "unknown";

/// An environment on disk.
#[derive(Debug, Clone)]
pub struct Prefix {
    path: PathBuf,
}

impl Prefix {
    /// Opens the environment at `path`.
    ///
    /// # Errors
    /// Nothing is there, or it is no environment (it has no `conda-meta`).
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = crate::install::resolve_prefix(path.as_ref())?;
        if path.join("conda-meta").is_dir() {
            return Ok(Prefix { path });
        }
        let shown = path.display();
        if crate::install::needs_recovery(&path) {
            return Err(Error::failure(format!("the environment `{shown}` was being replaced when tare was stopped"))
                .hint("run the command again that was stopped: it finishes the replacement first"));
        }
        if path.join("pyvenv.cfg").is_file() {
            let python = crate::text::quoted(&path.join("bin/python").display().to_string());
            let place = crate::text::quoted(&shown.to_string());
            return Err(Error::failure(format!("`{shown}` is a virtual environment of Python, not one of conda packages"))
                .because("it has a file `pyvenv.cfg` and no folder `conda-meta`")
                .hint(format!("its packages are for pip or uv: {python} -m pip install NAME, or uv pip install --python {python} NAME"))
                .hint(format!("what tare does with it: tare check -p {place}, tare list -p {place}, tare export -p {place}")));
        }
        Err(if path.exists() {
            Error::failure(format!("`{shown}` is no environment")).because("it has no folder `conda-meta`")
        } else {
            Error::failure(format!("there is no environment at `{shown}`"))
        }
        .hint("the environments there are: tare env list"))
    }

    /// As [`Prefix::open`]; a virtual environment of `venv`, `virtualenv` or `uv` is accepted too: it has no packages of conda.
    ///
    /// # Errors
    /// As for [`Prefix::open`].
    pub fn open_any(path: impl AsRef<Path>) -> Result<Self> {
        let resolved = crate::install::resolve_prefix(path.as_ref())?;
        if !resolved.join("conda-meta").is_dir() && resolved.join("pyvenv.cfg").is_file() {
            return Ok(Prefix { path: resolved });
        }
        if resolved.is_dir() && !resolved.join("conda-meta").is_dir() && !crate::install::needs_recovery(&resolved) {
            return Err(Error::failure(format!("`{}` is no environment", resolved.display()))
                .because("it has neither a folder `conda-meta` (tare, conda, mamba, pixi) nor a file `pyvenv.cfg` (venv, uv)"));
        }
        Self::open(path)
    }

    /// The folder of an interpreter that is no environment: its `sys.prefix`. It has no packages of conda.
    ///
    /// # Errors
    /// Nothing is there.
    pub fn open_interpreter(path: impl AsRef<Path>) -> Result<Self> {
        let path = crate::install::resolve_prefix(path.as_ref())?;
        if path.is_dir() { Ok(Prefix { path }) } else { Err(Error::failure(format!("there is no folder `{}`", path.display()))) }
    }

    /// Whether this is a virtual environment of Python rather than one of conda.
    pub fn is_venv(&self) -> bool {
        !self.path.join("conda-meta").is_dir() && self.path.join("pyvenv.cfg").is_file()
    }

    /// Names of the package records in the order in which the folder lists them, which is the order of conda's unsorted exports.
    pub(crate) fn record_files_as_listed(&self) -> Vec<String> {
        std::fs::read_dir(self.path.join("conda-meta"))
            .into_iter()
            .flatten()
            .flatten()
            .filter_map(|entry| entry.file_name().into_string().ok()?.strip_suffix(".json").map(str::to_owned))
            .collect()
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The installed packages, sorted by name.
    ///
    /// # Errors
    /// A record cannot be read; the message names it.
    pub fn records(&self) -> Result<Vec<PrefixRecord>> {
        let (records, mut broken) = self.records_and_damage()?;
        if broken.is_empty() { Ok(records) } else { Err(broken.swap_remove(0)) }
    }

    /// The installed packages that can be read, sorted by name, and an error for each record that cannot.
    ///
    /// # Errors
    /// `conda-meta` itself cannot be read.
    pub fn records_and_damage(&self) -> Result<(Vec<PrefixRecord>, Vec<Error>)> {
        // A change exchanges the whole folder while it is read here, without a lock: what was listed may be gone. Then it is read again.
        let mut tries = 0;
        loop {
            let (records, broken, vanished) = self.read_records()?;
            tries += 1;
            if !vanished || tries == 5 {
                return Ok((records, broken));
            }
        }
    }

    /// As [`Prefix::records_and_damage`]; also whether a record vanished between listing and reading.
    fn read_records(&self) -> Result<(Vec<PrefixRecord>, Vec<Error>, bool)> {
        let folder = self.path.join("conda-meta");
        let read = |error: std::io::Error| Error::io("read the folder", &folder, &error);
        // Of a virtual environment or an interpreter: an environment of conda was only opened because it has the folder.
        if !folder.exists() {
            return Ok((Vec::new(), Vec::new(), !self.is_venv()));
        }
        let mut paths = Vec::new();
        for entry in std::fs::read_dir(&folder).map_err(read)? {
            let path = entry.map_err(read)?.path();
            // Anything else than a file, such as a pipe, is damage to be told.
            if path.extension().is_some_and(|extension| extension == "json") && std::fs::metadata(&path).is_ok_and(|about| !about.is_dir())
            {
                paths.push(path);
            }
        }
        paths.sort();
        let results: Vec<Result<PrefixRecord>> = paths.par_iter().map(|path| read_record(path)).collect();
        let mut records = Vec::with_capacity(results.len());
        let mut broken = Vec::new();
        for result in results {
            match result {
                Ok(record) => records.push(record),
                Err(error) => broken.push(error),
            }
        }
        let vanished = !broken.is_empty() && paths.iter().any(|path| !path.exists());
        records.sort_by(|a, b| a.name().as_normalized().cmp(b.name().as_normalized()));
        Ok((records, broken, vanished))
    }

    /// The revisions of `conda-meta/history`, oldest first; empty if there is none.
    ///
    /// # Errors
    /// The file cannot be read. Lines that make no sense are left out.
    pub fn history(&self) -> Result<Vec<Revision>> {
        let path = self.path.join("conda-meta/history");
        match crate::files::read(&path, crate::files::MOST) {
            Ok(bytes) => Ok(history::parse(&String::from_utf8_lossy(&bytes))),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(Vec::new()),
            Err(error) => Err(Error::io("read", &path, &error)),
        }
    }

    /// What the user asked for, by package name in the order asked, from the history.
    ///
    /// # Errors
    /// As for [`Prefix::history`].
    pub fn requested_specs(&self) -> Result<IndexMap<String, String>> {
        Ok(history::requested(&self.history()?))
    }

    /// The variables that activation sets (`conda-meta/state`).
    ///
    /// # Errors
    /// The file is there but is no JSON of the right shape.
    pub fn variables(&self) -> Result<IndexMap<String, String>> {
        let path = self.path.join("conda-meta/state");
        let bytes = match crate::files::read(&path, crate::files::MOST) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(IndexMap::new()),
            Err(error) => return Err(Error::io("read", &path, &error)),
        };
        let damaged = || {
            Error::failure(format!("`{}` is damaged", path.display()))
                .hint("it must be JSON: {\"version\": 1, \"env_vars\": {\"NAME\": \"value\"}}")
        };
        let value: serde_json::Value = serde_json::from_slice(&bytes).map_err(|error| damaged().because(error))?;
        let Some(variables) = value.get("env_vars") else { return Ok(IndexMap::new()) };
        let variables = variables.as_object().ok_or_else(damaged)?;
        // conda marks a variable that is unset again with this value.
        Ok(variables
            .iter()
            .filter_map(|(name, value)| {
                let value = match value {
                    serde_json::Value::String(text) => text.clone(),
                    serde_json::Value::Null => return None,
                    other => other.to_string(),
                };
                (value != "***unset***").then(|| (name.clone(), value))
            })
            .collect())
    }

    /// Variables of packages (`etc/conda/env_vars.d/*.json`, in order of file name), then those of `state`.
    ///
    /// # Errors
    /// A file is no JSON object of texts.
    pub fn all_variables(&self) -> Result<IndexMap<String, String>> {
        let mut all = IndexMap::new();
        let folder = self.path.join("etc/conda/env_vars.d");
        let mut files: Vec<PathBuf> =
            std::fs::read_dir(&folder).into_iter().flatten().flatten().map(|entry| entry.path()).filter(|path| path.is_file()).collect();
        files.sort();
        for file in files {
            let bytes = crate::files::read(&file, crate::files::MOST).map_err(|error| Error::io("read", &file, &error))?;
            let object: IndexMap<String, serde_json::Value> = serde_json::from_slice(&bytes)
                .map_err(|error| Error::failure(format!("`{}` is damaged", file.display())).because(error))?;
            for (name, value) in object {
                if let serde_json::Value::String(value) = value {
                    all.insert(name, value);
                }
            }
        }
        all.extend(self.variables()?);
        Ok(all)
    }

    /// What tare recorded when it made the environment; `None` if it did not.
    ///
    /// # Errors
    /// The record is damaged.
    pub fn stamp(&self) -> Result<Option<Stamp>> {
        Stamp::read(&self.path)
    }

    /// The facts of the command that made the environment (`metadata` of the stamp); null if there are none.
    ///
    /// # Errors
    /// As for [`Prefix::stamp`].
    pub fn metadata(&self) -> Result<serde_json::Value> {
        Ok(self.stamp()?.map_or(serde_json::Value::Null, |stamp| stamp.metadata))
    }

    /// The platform of the environment: from the stamp, else from the packages, else this machine's.
    pub fn subdir(&self) -> Option<Subdir> {
        if let Ok(Some(stamp)) = self.stamp()
            && let Ok(subdir) = Subdir::from_str(&stamp.subdir)
        {
            return Some(subdir);
        }
        let records = self.records_and_damage().map(|(records, _)| records).unwrap_or_default();
        records
            .iter()
            .filter_map(|record| Subdir::from_str(&record.repodata_record.package_record.subdir).ok())
            .find(|subdir| *subdir != Subdir::NoArch)
            .or_else(Subdir::current)
    }

    /// Match specs that must hold in every change (`conda-meta/pinned`), without comments and empty lines.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn pinned(&self) -> Result<Vec<String>> {
        let path = self.path.join("conda-meta/pinned");
        match crate::files::read_text(&path) {
            Ok(text) => Ok(text
                .lines()
                .map(|line| line.split('#').next().unwrap_or_default().trim())
                .filter(|line| !line.is_empty())
                .map(str::to_owned)
                .collect()),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(Vec::new()),
            Err(error) => Err(Error::io("read", &path, &error)),
        }
    }

    /// Whether the environment must not be changed (CEP 22).
    pub fn is_frozen(&self) -> bool {
        self.path.join("conda-meta/frozen").exists()
    }

    /// Python distributions that no package of conda installed: what pip put there.
    pub fn pip_distributions(&self) -> Vec<Distribution> {
        list::pip_distributions(self)
    }
}

fn read_record(path: &Path) -> Result<PrefixRecord> {
    let bytes = crate::files::read(path, crate::files::MOST).map_err(|error| Error::io("read", path, &error))?;
    let strict = match serde_json::from_slice(&bytes) {
        Ok(record) => return Ok(record),
        Err(error) => error,
    };
    // Records of other and older tools lack fields; what is there is enough to know the package.
    serde_json::from_slice(&bytes).ok().and_then(lenient_record).ok_or_else(|| {
        Error::failure(format!("the package record `{}` is damaged", path.display()))
            .because(strict)
            .hint("make the environment again: tare create --force")
    })
}

/// A record with the gaps filled that old conda versions, conda-build's `develop` and other tools leave.
fn lenient_record(mut value: serde_json::Value) -> Option<PrefixRecord> {
    use serde_json::{Value, json};
    let object = value.as_object_mut()?;
    object.retain(|_, value| !value.is_null());
    let text = |object: &serde_json::Map<String, Value>, key: &str| object.get(key).and_then(Value::as_str).map(str::to_owned);
    let (name, version) = (text(object, "name")?, text(object, "version")?);
    let build = text(object, "build").or_else(|| text(object, "build_string")).unwrap_or_else(|| "0".to_owned());
    object.insert("build".to_owned(), json!(build));
    if !object.get("build_number").is_some_and(Value::is_u64) {
        let number = build.rsplit('_').next().and_then(|last| last.parse::<u64>().ok()).unwrap_or(0);
        object.insert("build_number".to_owned(), json!(number));
    }
    for key in ["depends", "constrains"] {
        if !object.get(key).is_some_and(Value::is_array) {
            object.insert(key.to_owned(), json!([]));
        }
    }
    let subdir = text(object, "subdir").or_else(|| {
        let url = text(object, "url")?;
        url.rsplit('/').nth(1).filter(|folder| folder.parse::<Subdir>().is_ok()).map(str::to_owned)
    });
    object.insert("subdir".to_owned(), json!(subdir.unwrap_or_else(|| "noarch".to_owned())));
    let is_archive = |file: &str| file.ends_with(".conda") || file.ends_with(".tar.bz2");
    let file = text(object, "fn").filter(|file| is_archive(file)).unwrap_or_else(|| format!("{name}-{version}-{build}.conda"));
    let url = text(object, "url").filter(|url| url::Url::parse(url).is_ok()).unwrap_or_else(|| format!("{UNKNOWN_SCHEME}:{file}"));
    object.insert("fn".to_owned(), json!(file));
    object.insert("url".to_owned(), json!(url));
    // Anything else that does not fit is left out field by field.
    for key in [
        "timestamp",
        "size",
        "md5",
        "sha256",
        "track_features",
        "features",
        "license",
        "noarch",
        "link",
        "python_site_packages_path",
        "arch",
        "platform",
        "legacy_bz2_md5",
        "legacy_bz2_size",
        "purls",
        "run_exports",
        "paths_data",
        "files",
        "requested_spec",
        "requested_specs",
        "channel",
    ] {
        if let Ok(record) = PrefixRecord::deserialize(&value) {
            return Some(record);
        }
        value.as_object_mut()?.remove(key);
    }
    PrefixRecord::deserialize(&value).ok()
}

#[cfg(test)]
mod tests;
