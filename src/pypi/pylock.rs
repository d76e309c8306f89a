//! `pylock.toml` as PEP 751 has it, as far as it is used: a lock that somebody gives, and the form in which uv answers.

use serde::Deserialize;
use toml::Spanned;

/// The whole text.
#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Document {
    pub lock_version: Spanned<String>,
    #[serde(default)]
    pub requires_python: Option<String>,
    #[serde(default)]
    pub packages: Vec<Spanned<Package>>,
}

impl Document {
    /// Whether the version of the format is one that is understood: 1.x.
    pub fn is_known(&self) -> bool {
        self.lock_version.get_ref().split('.').next() == Some("1")
    }
}

/// A package, from one of the sources.
#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Package {
    pub name: Spanned<String>,
    #[serde(default)]
    pub version: Option<String>,
    #[serde(default)]
    pub marker: Option<String>,
    #[serde(default)]
    pub requires_python: Option<String>,
    #[serde(default)]
    pub dependencies: Vec<toml::Table>,
    #[serde(default)]
    pub index: Option<String>,
    #[serde(default)]
    pub vcs: Option<VcsSource>,
    #[serde(default)]
    pub directory: Option<Directory>,
    #[serde(default)]
    pub archive: Option<Archive>,
    #[serde(default)]
    pub sdist: Option<Archive>,
    #[serde(default)]
    pub wheels: Vec<Archive>,
}

/// A repository at a commit.
#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct VcsSource {
    #[serde(rename = "type")]
    pub kind: String,
    #[serde(default)]
    pub url: Option<String>,
    #[serde(default)]
    pub path: Option<String>,
    #[serde(default)]
    pub requested_revision: Option<String>,
    pub commit_id: String,
    #[serde(default)]
    pub subdirectory: Option<String>,
}

/// A folder, relative to the lock.
#[derive(Deserialize)]
pub(crate) struct Directory {
    pub path: String,
    #[serde(default)]
    pub editable: bool,
}

/// A file.
#[derive(Deserialize)]
pub(crate) struct Archive {
    #[serde(default)]
    pub url: Option<String>,
    #[serde(default)]
    pub path: Option<String>,
    #[serde(default)]
    pub size: Option<u64>,
    #[serde(default)]
    pub subdirectory: Option<String>,
    #[serde(default)]
    pub hashes: Option<Spanned<std::collections::BTreeMap<String, String>>>,
}
