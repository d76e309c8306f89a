//! What a resolver is asked, what it answers, and which one is used.

use std::path::{Path, PathBuf};
use std::str::FromStr;

use async_trait::async_trait;
use pep508_rs::{MarkerEnvironment, MarkerEnvironmentBuilder};
use rattler_conda_types::Subdir;

use super::process::{Cause, Ran, readable};
use super::provided::Stub;
use super::section::{Asked, Section, requirement_line};
use super::tags::Tags;
use super::throwaway::WorkFolder;
use super::{Engine, PypiRecord, Version};
use crate::error::{Error, Kind, Result};
use crate::install::Cancel;
use crate::prefix::Environment;
use crate::report::Progress;

/// Which resolver is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum EngineChoice {
    /// uv where the environment or the machine has a new enough one, else pip.
    #[default]
    Auto,
    /// uv, or an error.
    Uv,
    /// pip of the environment.
    Pip,
}

impl FromStr for EngineChoice {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "auto" => Ok(EngineChoice::Auto),
            "uv" => Ok(EngineChoice::Uv),
            "pip" => Ok(EngineChoice::Pip),
            other => Err(Error::usage(format!("`{other}` is no resolver for pip sections")).hint("one of auto, uv, pip")),
        }
    }
}

/// A question to a resolver.
pub struct Query<'a> {
    /// What is asked for.
    pub section: &'a Section,
    /// The named parts of it.
    pub names: &'a [Asked],
    /// Stand-ins for what the conda half provides.
    pub stubs: &'a [Stub],
    /// The interpreter to run on; for another platform, one of this machine.
    pub python: &'a Path,
    /// Version of the interpreter of the environment.
    pub version: &'a Version,
    /// Wheels that can be used.
    pub tags: &'a Tags,
    /// The C library (or the platform) is not that of this machine.
    pub foreign: bool,
    /// Folder for files of this run.
    pub work: &'a WorkFolder,
    /// Variables of children.
    pub env: &'a Environment,
    /// Nothing uploaded later.
    pub exclude_newer: Option<jiff::Timestamp>,
    /// No network.
    pub offline: bool,
    /// Stops it.
    pub cancel: &'a Cancel,
    /// For remarks.
    pub progress: &'a dyn Progress,
}

/// One distribution of an answer.
#[derive(Debug, Clone)]
pub struct Found {
    /// What it is.
    pub record: PypiRecord,
    /// Version and requirements are known; else only building tells them.
    pub complete: bool,
}

/// A program that resolves requirements.
#[async_trait]
pub trait PypiResolver: Send + Sync {
    /// Name and version.
    fn engine(&self) -> &Engine;

    /// Resolves. Stand-ins may be among what is found.
    ///
    /// # Errors
    /// Nothing fits (kind unsatisfiable), an index does not answer (kind network), a source cannot be built, a hash differs (kind verification).
    async fn resolve(&self, query: &Query<'_>) -> Result<Vec<Found>>;
}

/// Requirements and constraints as files for an engine.
pub(super) struct Files {
    /// For `-r`.
    pub requirements: PathBuf,
    /// For `-c`.
    pub constraints: PathBuf,
}

impl Query<'_> {
    /// Writes the files. `head`: lines in front of the requirements; `hashes`: whether lines carry their hashes.
    pub(super) fn write_files(&self, head: &[String], hashes: bool) -> Result<Files> {
        let mut requirements = String::new();
        for line in head {
            requirements.push_str(line);
            requirements.push('\n');
        }
        for item in &self.section.requirements {
            requirements.push_str(&requirement_line(item, hashes)?);
            requirements.push('\n');
        }
        let mut constraints = String::new();
        for item in &self.section.constraints {
            constraints.push_str(&requirement_line(item, hashes)?);
            constraints.push('\n');
        }
        for line in self.section.earlier().iter().chain(self.section.held()) {
            constraints.push_str(line);
            constraints.push('\n');
        }
        for stub in self.stubs {
            constraints.push_str(&stub.constraint);
            if hashes && self.section.has_hashes() {
                constraints.push_str(&format!(" --hash=sha256:{}", stub.sha256));
            }
            constraints.push('\n');
        }
        let files =
            Files { requirements: self.work.path().join("requirements.txt"), constraints: self.work.path().join("constraints.txt") };
        write_private(&files.requirements, &requirements)?;
        write_private(&files.constraints, &constraints)?;
        Ok(files)
    }

    /// Turns the end of an engine that failed into an error.
    pub(super) fn failure(&self, engine: &Engine, ran: &Ran) -> Error {
        let all = format!("{}\n{}", ran.stdout, ran.stderr);
        let mut cause = Cause::of(&all);
        // Without the network, what is not there might be on the index.
        if self.offline && cause == Cause::Unsatisfiable {
            cause = Cause::Network;
        }
        let message = match cause {
            Cause::Unsatisfiable => "no set of Python packages satisfies the `pip:` section",
            Cause::Network if self.offline => "the `pip:` section needs the network, and it is off (--offline)",
            Cause::Network => "a Python package index cannot be used",
            Cause::Hash => "a Python package has another hash than it should",
            Cause::Build => "a Python package could not be built",
            Cause::Other => "the `pip:` section could not be resolved",
        };
        let text = readable(&all, &[(self.work.path(), "…")]);
        let text = if text.trim().is_empty() { "it says nothing".to_owned() } else { text };
        let mut error = Error::new(cause.kind(), message).because(format!("{} {} says:\n{text}", engine.name, engine.version));
        let input = self.tags.input();
        if self.foreign && cause == Cause::Unsatisfiable {
            let (system, hint) = match (input.glibc, input.macos) {
                (Some((major, minor)), _) => (format!(" with glibc {major}.{minor}"), Some("__glibc")),
                (_, Some((major, minor))) => (format!(" with macOS {major}.{minor}"), Some("__osx")),
                _ => (String::new(), None),
            };
            error = error.because(format!("only wheels for {}{system} count: nothing can be built for it here", input.subdir));
            error = error.hints_from(hint.map(|name| format!("if the machine has a newer one: --virtual-package {name}=VERSION")));
        }
        match cause {
            Cause::Network if self.offline => error.hint("run it once without --offline"),
            Cause::Network => error.hint("check the index: its address, credentials (netrc, keyring) and proxy are those of pip and uv"),
            Cause::Build => error.hint("a build may need a compiler or a library: add it to the conda dependencies"),
            _ => error,
        }
    }
}

/// Writes a file that only the user can read: it may hold credentials.
pub(super) fn write_private(path: &Path, text: &str) -> Result<()> {
    use std::io::Write as _;
    use std::os::unix::fs::OpenOptionsExt as _;
    let _ = std::fs::remove_file(path);
    let mut file = std::fs::OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)
        .map_err(|error| Error::io("write", path, &error))?;
    file.write_all(text.as_bytes()).map_err(|error| Error::io("write", path, &error))
}

/// The values that markers are judged by (PEP 508), for CPython on a platform. What only a running machine could tell is empty.
///
/// # Errors
/// A version that is none.
pub fn markers(version: &Version, subdir: Subdir) -> Result<MarkerEnvironment> {
    let (os_name, sys_platform, system) = match subdir {
        subdir if subdir.is_windows() => ("nt", "win32", "Windows"),
        subdir if subdir.is_osx() => ("posix", "darwin", "Darwin"),
        _ => ("posix", "linux", "Linux"),
    };
    let machine = match subdir {
        Subdir::Linux64 | Subdir::Osx64 => "x86_64",
        Subdir::LinuxAarch64 => "aarch64",
        Subdir::OsxArm64 => "arm64",
        Subdir::Win64 => "AMD64",
        Subdir::WinArm64 => "ARM64",
        Subdir::Win32 => "x86",
        Subdir::Linux32 => "i686",
        Subdir::LinuxPpc64le => "ppc64le",
        Subdir::LinuxS390X => "s390x",
        Subdir::LinuxRiscv64 => "riscv64",
        Subdir::LinuxArmV7l => "armv7l",
        other => other.as_str().rsplit('-').next().unwrap_or_default(),
    };
    let full = version.to_string();
    let short: Vec<String> = version.release().iter().take(2).map(ToString::to_string).collect();
    MarkerEnvironment::try_from(MarkerEnvironmentBuilder {
        implementation_name: "cpython",
        implementation_version: &full,
        os_name,
        platform_machine: machine,
        platform_python_implementation: "CPython",
        platform_release: "",
        platform_system: system,
        platform_version: "",
        python_full_version: &full,
        python_version: &short.join("."),
        sys_platform,
    })
    .map_err(|error| Error::new(Kind::Failure, format!("`{version}` is no version of Python")).because(error))
}

/// The version in the first line of what `PROGRAM --version` prints.
pub(super) fn version_in(text: &str) -> Option<Version> {
    text.lines()
        .next()?
        .split_whitespace()
        .find_map(|word| if word.starts_with(|c: char| c.is_ascii_digit()) { word.parse().ok() } else { None })
}

/// Passes on what an engine says about yanked files: they are used where nothing else fits.
pub(super) fn tell_yanked(engine: &Engine, ran: &Ran, work: &WorkFolder, progress: &dyn Progress) {
    let lines: Vec<&str> = ran.stderr.lines().chain(ran.stdout.lines()).collect();
    for (number, line) in lines.iter().enumerate() {
        if !line.contains("yanked") || !line.to_ascii_lowercase().starts_with("warning") {
            continue;
        }
        let mut text = line.split_once(':').map_or(*line, |(_, rest)| rest).trim().to_owned();
        if let Some(reason) = lines.get(number + 1).filter(|next| next.starts_with("Reason for being yanked")) {
            text.push_str("; ");
            text.push_str(reason.trim());
        }
        let text = readable(&text, &[(work.path(), "…")]);
        progress.warn(&format!("{}: {text}", engine.name), &["choose another version, unless this one is meant".to_owned()]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_of_programs() {
        assert_eq!(version_in("uv 0.13.9 (x86_64-unknown-linux-gnu)").unwrap().to_string(), "0.13.9");
        assert_eq!(version_in("pip 23.2.1 from /x/pip (python 3.11)").unwrap().to_string(), "23.2.1");
        assert!(version_in("nonsense").is_none());
    }

    #[test]
    fn markers_are_judged_for_the_platform_of_the_environment() {
        let version = "3.11.7".parse().unwrap();
        let holds = |subdir, marker: &str| super::super::section::marker_holds(Some(marker), &markers(&version, subdir).unwrap());
        assert!(holds(Subdir::Linux64, "sys_platform == 'linux' and platform_machine == 'x86_64'"));
        assert!(!holds(Subdir::Win64, "sys_platform == 'linux'"));
        assert!(holds(Subdir::OsxArm64, "platform_system == 'Darwin' and platform_machine == 'arm64'"));
        assert!(holds(Subdir::Linux64, "python_version < '3.12' and python_full_version >= '3.11.7'"));
    }
}
