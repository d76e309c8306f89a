//! The pip half: what a `pip:` section asks for, resolved together with the conda half, pinned by hash and installed in the same transaction.

mod build;
mod engine;
/// Wheels into the cache.
pub(crate) mod fetch;
mod indexes;
/// Wheels from the cache into an environment.
pub(crate) mod install;
/// What is installed, and taking it away.
pub mod installed;
mod pip;
mod pip_config;
mod process;
mod provided;
/// `RECORD` files.
pub(crate) mod record_file;
mod resolve;
/// The Python half of revisions.
pub mod revisions;
mod section;
/// Compatibility tags of wheels.
pub mod tags;
#[cfg(test)]
pub(crate) mod test_wheel;
#[cfg(test)]
mod tests;
pub(crate) mod throwaway;
mod uv;
/// Reading, checking and unpacking wheels.
pub(crate) mod wheel;

use std::path::PathBuf;

pub(crate) use build::FOLDER as BUILT_FOLDER;
pub use build::wheel_metadata;
pub use engine::{EngineChoice, Found, PypiResolver, Query, markers};
pub use install::{InstalledFile, TareRecord, WheelFacts};
pub use provided::{CoreMetadata, Provided, provided};
pub use resolve::{Context, Resolution, Workshop, check_record};
pub use section::{Options as SectionOptions, Section};
use serde::{Deserialize, Serialize};
use url::Url;

/// A distribution name, normalised (PEP 503).
pub type Name = pep508_rs::PackageName;
/// A version (PEP 440).
pub type Version = pep508_rs::pep440_rs::Version;

/// Scheme of the URL of a package that the program carries: its own tooling, which no index has and which belongs to no request.
pub(crate) const TOOLING: &str = "tare";

/// One distribution of a solution.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PypiRecord {
    /// Normalised name.
    pub name: Name,
    /// Version.
    pub version: Version,
    /// Where it comes from.
    pub source: PypiSource,
    /// `Requires-Dist` as the metadata has it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub requires_dist: Vec<String>,
    /// `Requires-Python`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub requires_python: Option<String>,
    /// The section names it (PEP 376 `REQUESTED`), rather than only needing it.
    #[serde(default)]
    pub requested: bool,
    /// Extras that the section asks for.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub extras: Vec<String>,
}

impl PypiRecord {
    /// Whether it is a package that the program carries and installs for itself (`tare_notebook`).
    pub fn is_tooling(&self) -> bool {
        matches!(&self.source, PypiSource::Archive { url, .. } if url.scheme() == TOOLING)
    }
}

/// Where a distribution comes from. URLs never hold credentials.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum PypiSource {
    /// A wheel or source archive of an index, of `--find-links`, or named by URL or path.
    Archive {
        /// `https`, `http` or `file`; the last segment is the file name. `tare` for what the program carries.
        url: Url,
        /// sha256 in hex. Absent only where neither index nor resolver tells it; the download then decides.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        sha256: Option<String>,
        /// Bytes.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        size: Option<u64>,
        /// The index it was found on; absent for direct references.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        index: Option<Url>,
        /// Named by URL or path in the section (PEP 610 `direct_url.json` is written).
        #[serde(default)]
        direct: bool,
        /// Folder of the project within a source archive.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        subdirectory: Option<String>,
    },
    /// A repository at a commit.
    Vcs {
        /// `git`, `hg`, `svn` or `bzr`.
        system: String,
        /// The repository.
        url: Url,
        /// Branch, tag or commit as asked for.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        requested_revision: Option<String>,
        /// The commit that it was.
        commit: String,
        /// Folder of the project.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        subdirectory: Option<String>,
    },
    /// A folder of this machine. Not pinned: its content may change.
    Directory {
        /// As written, relative to the file that names it where it was.
        path: PathBuf,
        /// Installed by reference (PEP 660).
        editable: bool,
    },
}

impl PypiSource {
    /// Whether the same bytes are certain to come again.
    pub fn is_pinned(&self) -> bool {
        match self {
            PypiSource::Archive { sha256, .. } => sha256.is_some(),
            PypiSource::Vcs { .. } => true,
            PypiSource::Directory { .. } => false,
        }
    }
}

/// A distribution whose wheel is at hand.
#[derive(Debug, Clone)]
pub struct ReadyWheel {
    /// What it is and where it comes from.
    pub record: PypiRecord,
    /// The wheel file.
    pub wheel: WheelFile,
}

/// Where the wheel of a [`ReadyWheel`] is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WheelFile {
    /// The archive of the record is the wheel: fetched and checked by the installation.
    Remote,
    /// Built on this machine from an sdist, a repository or a folder.
    Local {
        /// The wheel; the file name is that of a wheel (PEP 427).
        path: PathBuf,
        /// sha256 of the file, in hex.
        sha256: String,
    },
}

/// The pip half of a plan: everything in it can be installed without asking anything again.
#[derive(Debug, Clone)]
pub struct PypiPlan {
    /// What to install, by name.
    pub wheels: Vec<ReadyWheel>,
    /// Full version of the interpreter.
    pub python: Version,
    /// What resolved the section; `None` where it came from a lock.
    pub engine: Option<Engine>,
    /// Files of other packages may be overwritten.
    pub clobber: bool,
}

/// The program that resolved a section.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Engine {
    /// `uv` or `pip`.
    pub name: String,
    /// Its version.
    pub version: String,
}
