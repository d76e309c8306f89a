//! An environment or a lock as text for other tools.
//!
//! A format that cannot hold something refuses and names the package; where conda leaves something out instead and the bytes are to be conda's, a note says what.

mod conda;
mod container;
mod locks;
mod pip;
mod sbom;
mod subject;
mod yaml;

use std::path::Path;
use std::str::FromStr;

use rattler_conda_types::Subdir;

pub use conda::match_spec_text;
pub use locks::choose as choose_platform;
pub(crate) use subject::python_package;
pub use subject::{Origin, PythonPackage, Subject, requirement_name, without_credentials};

use crate::error::{Error, Result};
use crate::prefix::{Hashes, Prefix};

/// A format of `tare export`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Format {
    /// conda's environment.yml.
    EnvironmentYaml,
    /// The same document as JSON.
    EnvironmentJson,
    /// `@EXPLICIT` list of URLs (CEP 23).
    Explicit,
    /// conda's list of match specs.
    Requirements,
    /// pip's requirements file: the Python packages of no conda package.
    Pip,
    /// conda-lock.yml version 1 (CEP 37).
    CondaLock,
    /// pixi.lock version 7.
    Pixi,
    /// The same with tare's own facts.
    Tare,
    /// pylock.toml (PEP 751).
    Pylock,
    /// A multi-stage Dockerfile.
    Dockerfile,
    /// An Apptainer (Singularity) definition.
    Apptainer,
    /// CycloneDX 1.6 JSON.
    CycloneDx,
    /// SPDX 2.3 JSON.
    Spdx,
}

impl Format {
    /// All, with the names that choose them; the first is the main one.
    pub const NAMES: [(Format, &'static [&'static str]); 13] = [
        (Format::EnvironmentYaml, &["environment-yaml", "yaml", "yml", "env.yml", "environment.yml", "conda-env"]),
        (Format::EnvironmentJson, &["environment-json", "json"]),
        (Format::Explicit, &["explicit"]),
        (Format::Requirements, &["requirements", "reqs", "txt"]),
        (Format::Pip, &["pip", "pip-requirements"]),
        (Format::CondaLock, &["conda-lock", "conda-lock-v1"]),
        (Format::Pixi, &["pixi", "pixi-lock", "rattler-lock"]),
        (Format::Tare, &["tare", "tare-lock", "tare.lock"]),
        (Format::Pylock, &["pylock", "pylock.toml"]),
        (Format::Dockerfile, &["dockerfile", "docker"]),
        (Format::Apptainer, &["apptainer", "singularity"]),
        (Format::CycloneDx, &["cyclonedx", "cyclonedx1.6", "cyclonedx-json"]),
        (Format::Spdx, &["spdx", "spdx2.3", "spdx-json"]),
    ];

    /// The main name.
    pub fn name(self) -> &'static str {
        Self::NAMES.iter().find(|(format, _)| *format == self).map_or("", |(_, names)| names[0])
    }

    /// The format that a file name stands for (`environment.yml`, `pixi.lock`, `explicit.txt`, …).
    pub fn of_file(name: &str) -> Option<Self> {
        let name = name.rsplit('/').next().unwrap_or(name).to_lowercase();
        Some(match name.as_str() {
            "dockerfile" | "containerfile" => Format::Dockerfile,
            "pixi.lock" => Format::Pixi,
            _ if name.starts_with("pylock") && name.ends_with(".toml") => Format::Pylock,
            _ if name.ends_with("conda-lock.yml") || name.ends_with("conda-lock.yaml") => Format::CondaLock,
            _ if name.ends_with(".def") => Format::Apptainer,
            _ if name.ends_with(".cdx.json") || name == "bom.json" => Format::CycloneDx,
            _ if name.ends_with(".spdx.json") => Format::Spdx,
            _ if name.ends_with(".lock") => Format::Tare,
            "explicit.txt" => Format::Explicit,
            "requirements.txt" => Format::Pip,
            _ if name.ends_with(".yml") || name.ends_with(".yaml") => Format::EnvironmentYaml,
            _ if name.ends_with(".json") => Format::EnvironmentJson,
            _ if name.ends_with(".txt") => Format::Explicit,
            _ => return None,
        })
    }
}

impl FromStr for Format {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let wanted = text.to_lowercase();
        if let Some((format, _)) = Self::NAMES.iter().find(|(_, names)| names.contains(&wanted.as_str())) {
            return Ok(*format);
        }
        let main: Vec<&str> = Self::NAMES.iter().map(|(_, names)| names[0]).collect();
        Err(Error::usage(format!("`{text}` is no export format")).hint(format!("one of {}", main.join(", "))))
    }
}

/// How to export.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// Leave out build strings.
    pub no_builds: bool,
    /// Only what the history says was asked for, as conda does.
    pub from_history: bool,
    /// What was asked for, with channels and the Python packages: tare's own short form.
    pub requested: bool,
    /// With `requested`: versions of what was asked for without one.
    pub pin_versions: bool,
    /// Write where Python packages came from (repository, URL, folder), not only their version.
    pub direct_urls: bool,
    /// The configured channels, which are appended where a file does not say `nodefaults`. Empty: not known.
    pub configured: Vec<String>,
    /// Leave out the path of the environment.
    pub no_prefix: bool,
    /// Hashes of explicit lists.
    pub hashes: Hashes,
    /// The platform that conda's headers name: the one tare works for. `None`: that of the packages.
    pub tool_platform: Option<Subdir>,
    /// Time for formats that have one, in seconds since 1970 (SOURCE_DATE_EPOCH).
    pub source_date_epoch: Option<i64>,
    /// CycloneDX 1.5 instead of 1.6.
    pub cyclonedx_1_5: bool,
}

/// An export and what is to be said about it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Exported {
    /// The whole file.
    pub text: String,
    /// What the format leaves out, for stderr.
    pub notes: Vec<String>,
}

/// Exports `subject`.
///
/// # Errors
/// The format cannot hold something; the message names it.
pub fn export(subject: &Subject, format: Format, options: &Options) -> Result<Exported> {
    let mut exported = written(subject, format, options)?;
    if !subject.tooling.is_empty() {
        let names = conda::names(subject.tooling.iter().map(|package| package.name.as_str()));
        exported.notes.push(format!("{names} is tare's own tooling and left out: tare notebook install puts it where it is wanted"));
    }
    Ok(exported)
}

fn written(subject: &Subject, format: Format, options: &Options) -> Result<Exported> {
    match format {
        Format::EnvironmentYaml => Ok(conda::environment_yaml(subject, options)),
        Format::EnvironmentJson => Ok(conda::environment_json(subject, options)),
        Format::Explicit => conda::explicit(subject, options),
        Format::Requirements => Ok(conda::requirements(subject, options)),
        Format::Pip => Ok(pip::requirements(subject)),
        Format::Dockerfile => container::dockerfile(subject, options),
        Format::Apptainer => container::apptainer(subject, options),
        Format::CycloneDx => Ok(sbom::cyclonedx(subject, options)),
        Format::Spdx => Ok(sbom::spdx(subject, options)),
        Format::CondaLock | Format::Pixi | Format::Tare => locks::write(&locks::of_subject(subject)?, format),
        Format::Pylock => locks::pylock(subject, options),
    }
}

/// Exports the environment at `prefix`. `channels`: the configured ones.
///
/// # Errors
/// As for [`Subject::of_prefix`] and [`export`].
pub fn export_prefix(prefix: &Prefix, channels: Vec<String>, format: Format, options: &Options) -> Result<Exported> {
    export(&Subject::of_prefix(prefix, channels)?, format, options)
}

/// Exports a lock. `platform`: which of a lock for several; formats that hold several get all unless one is named.
///
/// # Errors
/// The file is no lock, or has not this platform; as for [`export`].
pub fn export_file(path: &Path, format: Format, options: &Options, platform: Option<&str>) -> Result<Exported> {
    let mut lock = crate::lock::read_file(path, &crate::lock::ReadOptions::default())?;
    if matches!(format, Format::CondaLock | Format::Pixi | Format::Tare) {
        if let Some(name) = platform {
            let chosen = locks::choose(&lock, Some(name), None)?.name.clone();
            lock.platforms.retain(|platform| platform.name == chosen);
        }
        return locks::write(&lock, format);
    }
    let chosen = locks::choose(&lock, platform, options.tool_platform)?;
    if format == Format::Pylock {
        return locks::pylock_of(&lock, chosen);
    }
    let mut options = options.clone();
    // conda has no such file to be equal to, so nothing has to be lost.
    options.direct_urls = true;
    if options.hashes == Hashes::None && chosen.conda.iter().all(|record| record.package_record.sha256.is_some()) {
        options.hashes = Hashes::Sha256;
    }
    let mut subject = Subject::of_lock(&lock, chosen)?;
    subject.nodefaults = subject::adds_defaults(&subject.channels, &options.configured);
    export(&subject, format, &options)
}

#[cfg(test)]
mod tests;
