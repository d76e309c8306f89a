//! pip as the resolver: `python -m pip install --dry-run --report`, whose format is stable since pip 23.

use std::path::Path;
use std::str::FromStr;

use async_trait::async_trait;
use serde::Deserialize;
use url::Url;

use super::engine::{Found, PypiResolver, Query, markers, tell_yanked, version_in};
use super::process::{self, Job, RESOLVE_LIMIT};
use super::{Engine, Name, PypiRecord, PypiSource, Version};
use crate::error::{Error, Kind, Result};
use crate::install::Cancel;
use crate::prefix::Environment;

/// The oldest pip with a stable report.
const OLDEST: [u64; 2] = [23, 0];

/// pip of an interpreter.
#[derive(Debug, Clone)]
pub struct Pip {
    engine: Engine,
}

/// The version of pip that an interpreter has.
///
/// # Errors
/// It has none, or it does not run.
pub(super) async fn version(python: &Path, env: &Environment, cwd: &Path, cancel: &Cancel) -> Result<Version> {
    let job = Job {
        program: python.to_owned(),
        args: ["-m", "pip", "--version"].map(Into::into).to_vec(),
        env: env.clone(),
        cwd: cwd.to_owned(),
        limit: RESOLVE_LIMIT,
    };
    let ran = process::run(&job, cancel).await?;
    version_in(&ran.stdout).filter(|_| ran.success).ok_or_else(|| {
        Error::failure("pip does not run in the environment")
            .because(process::readable(&ran.stderr, &[]))
            .hint("add `pip` to the dependencies")
    })
}

impl Pip {
    /// Looks for pip.
    ///
    /// # Errors
    /// None there, or too old.
    pub async fn find(python: &Path, env: &Environment, cwd: &Path, cancel: &Cancel) -> Result<Self> {
        let version = version(python, env, cwd, cancel).await?;
        if version.release() < OLDEST.as_slice() {
            return Err(Error::new(Kind::Unsatisfiable, format!("pip {version} is too old to resolve the `pip:` section"))
                .because("pip 23 is the first that reports what it would install")
                .hint("ask for a newer one among the dependencies: `pip>=23`")
                .hint("or have `uv` on the PATH"));
        }
        Ok(Pip { engine: Engine { name: "pip".to_owned(), version: version.to_string() } })
    }
}

#[derive(Deserialize)]
struct Report {
    version: String,
    install: Vec<Item>,
}

#[derive(Deserialize)]
struct Item {
    download_info: DownloadInfo,
    #[serde(default)]
    is_direct: bool,
    metadata: Metadata,
}

#[derive(Deserialize)]
struct Metadata {
    name: String,
    version: String,
    #[serde(default)]
    requires_dist: Vec<String>,
    #[serde(default)]
    requires_python: Option<String>,
}

/// PEP 610.
#[derive(Deserialize)]
struct DownloadInfo {
    url: String,
    #[serde(default)]
    archive_info: Option<ArchiveInfo>,
    #[serde(default)]
    vcs_info: Option<VcsInfo>,
    #[serde(default)]
    dir_info: Option<DirInfo>,
    #[serde(default)]
    subdirectory: Option<String>,
}

#[derive(Deserialize)]
struct ArchiveInfo {
    #[serde(default)]
    hash: Option<String>,
    #[serde(default)]
    hashes: Option<std::collections::BTreeMap<String, String>>,
}

#[derive(Deserialize)]
struct VcsInfo {
    vcs: String,
    #[serde(default)]
    requested_revision: Option<String>,
    commit_id: String,
}

#[derive(Deserialize)]
struct DirInfo {
    #[serde(default)]
    editable: bool,
}

/// A URL without credentials and fragment.
pub(super) fn bare_url(text: &str) -> Result<Url> {
    let mut url =
        Url::parse(text).map_err(|error| Error::failure(format!("`{}` is no URL", crate::spec::mask_secrets(text))).because(error))?;
    if url.scheme() != "ssh" && !url.scheme().ends_with("+ssh") {
        let _ = url.set_username("");
    }
    let _ = url.set_password(None);
    url.set_fragment(None);
    Ok(url)
}

/// Reads a report.
///
/// # Errors
/// Not a report, or one of another version.
pub(super) fn read_report(text: &str) -> Result<Vec<Found>> {
    let broken = |why: String| Error::failure("pip's report cannot be read").because(why).hint("use another version of pip, or uv");
    let report: Report = serde_json::from_str(text).map_err(|error| broken(error.to_string()))?;
    if report.version != "1" {
        return Err(broken(format!("its format is version {}, and 1 is known", report.version)));
    }
    report.install.into_iter().map(|item| found(item).map_err(|error| broken(error.to_string()))).collect()
}

fn found(item: Item) -> Result<Found> {
    let Item { download_info: info, is_direct, metadata } = item;
    let url = bare_url(&info.url)?;
    let subdirectory = info.subdirectory.filter(|folder| !folder.is_empty());
    let source = if let Some(vcs) = info.vcs_info {
        PypiSource::Vcs { system: vcs.vcs, url, requested_revision: vcs.requested_revision, commit: vcs.commit_id, subdirectory }
    } else if let Some(folder) = info.dir_info {
        let path = url.to_file_path().map_err(|()| Error::failure(format!("`{url}` is no path of this machine")))?;
        PypiSource::Directory { path, editable: folder.editable }
    } else {
        let archive = info.archive_info;
        let sha256 = archive.and_then(|archive| {
            let hashes = archive.hashes.unwrap_or_default();
            hashes.get("sha256").cloned().or_else(|| archive.hash?.strip_prefix("sha256=").map(str::to_owned))
        });
        PypiSource::Archive { url, sha256, size: None, index: None, direct: is_direct, subdirectory }
    };
    let bad = |what: &str, error: &dyn std::fmt::Display| Error::failure(format!("bad {what} of `{}`", metadata.name)).because(error);
    let record = PypiRecord {
        name: Name::from_str(&metadata.name).map_err(|error| bad("name", &error))?,
        version: Version::from_str(&metadata.version).map_err(|error| bad("version", &error))?,
        source,
        requires_dist: metadata.requires_dist,
        requires_python: metadata.requires_python,
        requested: false,
        extras: Vec::new(),
    };
    Ok(Found { record, complete: true })
}

#[async_trait]
impl PypiResolver for Pip {
    fn engine(&self) -> &Engine {
        &self.engine
    }

    async fn resolve(&self, query: &Query<'_>) -> Result<Vec<Found>> {
        let files = query.write_files(&query.section.options.lines(true), true)?;
        let report = query.work.path().join("report.json");
        let _ = std::fs::remove_file(&report);
        let mut args: Vec<std::ffi::OsString> = if query.foreign { for_markers_of(query)? } else { ["-m", "pip"].map(Into::into).to_vec() };
        args.extend(["install", "--dry-run", "--ignore-installed", "--no-input", "--report"].map(Into::into));
        args.push(report.clone().into());
        let log = query.work.path().join("pip.log");
        args.extend(["--log".into(), log.clone().into()]);
        args.extend(["-r".into(), files.requirements.into(), "-c".into(), files.constraints.into()]);
        let mut env = query.env.clone();
        if query.offline {
            // pip has no such switch: no index, and no way out.
            args.push("--no-index".into());
            for name in ["HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"] {
                env.insert(name.into(), "http://127.0.0.1:9".into());
            }
            env.insert("PIP_RETRIES".into(), "0".into());
        }
        if let Some(time) = query.exclude_newer {
            if self.engine.version.parse::<Version>().is_ok_and(|version| version.release() >= [26, 0].as_slice()) {
                args.push("--uploaded-prior-to".into());
                args.push(time.to_string().into());
            } else {
                query.progress.warn(
                    &format!(
                        "pip {} cannot leave out what was uploaded later: --exclude-newer does not hold for the `pip:` section",
                        self.engine.version
                    ),
                    &["have `uv` on the PATH, or ask for `pip>=26`".to_owned()],
                );
            }
        }
        if query.foreign {
            foreign_args(query, &mut args);
        }
        let job = Job { program: query.python.to_owned(), args, env, cwd: query.work.run_dir(), limit: RESOLVE_LIMIT };
        let mut ran = process::run(&job, query.cancel).await?;
        if !ran.success {
            // pip passes over an index that does not answer, and then says that there is no such package.
            let text = std::fs::read(&log).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default();
            ran.stderr.push_str(&unreachable(&text));
            // With a log, what a build printed is only there.
            if ran.stderr.contains("See above for output") {
                ran.stderr = format!("{}{}", build_output(&text), ran.stderr);
            }
            return Err(query.failure(&self.engine, &ran));
        }
        tell_yanked(&self.engine, &ran, query.work, query.progress);
        let text = fs_err::read_to_string(&report).map_err(|error| Error::io("read", &report, &error))?;
        read_report(&text)
    }
}

/// The lines of pip's log about pages of indexes that could not be read; one that is not there (404) is an answer.
fn unreachable(log: &str) -> String {
    let mut lines: Vec<String> = log
        .lines()
        .filter(|line| line.contains("Could not fetch URL") && !line.contains(" 404 ") && !line.contains("404 Client Error"))
        .filter_map(|line| Some(format!("\n{}", line.get(line.find("Could not fetch URL")?..)?)))
        .collect();
    lines.dedup();
    lines.truncate(5);
    lines.concat()
}

/// What the last command that pip ran printed, from pip's log.
fn build_output(log: &str) -> String {
    // `2026-01-31T12:00:00,000 text`
    let text = |line: &str| match line.split_once(' ') {
        Some((time, rest)) if time.contains('T') && time.contains(',') => rest.trim_end().to_owned(),
        _ => line.trim_end().to_owned(),
    };
    let lines: Vec<String> = log.lines().map(text).collect();
    let Some(start) = lines.iter().rposition(|line| line.contains("Running command ")) else { return String::new() };
    let mine = lines[start..].iter().take_while(|line| !line.contains("[present-rich]") && !line.contains("Exception information:"));
    let mut mine: Vec<&String> = mine.filter(|line| !line.trim().is_empty()).collect();
    if mine.len() > 25 {
        mine.drain(1..mine.len() - 24);
    }
    mine.into_iter().map(|line| format!("{line}\n")).collect()
}

/// Runs pip with other values for markers: by its options it only chooses the wheels of another platform, and goes on judging `sys_platform`,
/// `platform_machine` and `python_version` by the interpreter it runs on.
const WITH_MARKERS: &str = "import json, runpy, sys
import pip._vendor.packaging.markers as markers
values = json.loads(sys.argv.pop(1))
assert set(values) == set(markers.default_environment()), sorted(markers.default_environment())
markers.default_environment = lambda: dict(values)
runpy.run_module('pip', run_name='__main__', alter_sys=True)
";

fn for_markers_of(query: &Query<'_>) -> Result<Vec<std::ffi::OsString>> {
    let markers = markers(query.version, query.tags.input().subdir)?;
    let values = serde_json::json!({
        "implementation_name": markers.implementation_name(),
        "implementation_version": markers.implementation_version().string,
        "os_name": markers.os_name(),
        "platform_machine": markers.platform_machine(),
        "platform_python_implementation": markers.platform_python_implementation(),
        "platform_release": markers.platform_release(),
        "platform_system": markers.platform_system(),
        "platform_version": markers.platform_version(),
        "python_full_version": markers.python_full_version().string,
        "python_version": markers.python_version().string,
        "sys_platform": markers.sys_platform(),
    });
    Ok(vec!["-c".into(), WITH_MARKERS.into(), values.to_string().into()])
}

/// Options that make pip choose wheels of another platform.
fn foreign_args(query: &Query<'_>, args: &mut Vec<std::ffi::OsString>) {
    let input = query.tags.input();
    for platform in query.tags.platform_tags() {
        args.push("--platform".into());
        args.push(platform.into());
    }
    let (major, minor) = input.python;
    args.extend(["--only-binary=:all:".into(), "--implementation".into(), "cp".into()]);
    args.push(format!("--python-version={}", query.version).into());
    args.push(format!("--abi=cp{major}{minor}{}", if input.free_threaded { "t" } else { "" }).into());
    args.extend(["--abi=abi3".into(), "--abi=none".into(), "--target".into(), query.work.path().join("target").into()]);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_with_every_kind_of_source() {
        let text = r#"{"version":"1","pip_version":"24.0","install":[
          {"download_info":{"url":"https://me:secret@pypi.example/p/a-1-py3-none-any.whl","archive_info":{"hash":"sha256=aa","hashes":{"sha256":"aa"}}},
           "is_direct":false,"requested":true,"metadata":{"name":"A","version":"1","requires_dist":["b>=1"],"requires_python":">=3.8"}},
          {"download_info":{"url":"file:///src/b","dir_info":{"editable":true}},"is_direct":true,"metadata":{"name":"b","version":"2"}},
          {"download_info":{"url":"https://h/o/r","vcs_info":{"vcs":"git","requested_revision":"v1","commit_id":"c0ffee"},"subdirectory":"d"},
           "is_direct":true,"metadata":{"name":"c.c","version":"3"}},
          {"download_info":{"url":"file:///w/d-1.tar.gz","archive_info":{"hash":"sha256=dd"}},"is_direct":true,"metadata":{"name":"d","version":"1"}}]}"#;
        let found = read_report(text).unwrap();
        let shown = format!("{:?}", found.iter().map(|found| &found.record.source).collect::<Vec<_>>());
        assert!(!shown.contains("secret"), "{shown}");
        assert!(matches!(&found[0].record.source, PypiSource::Archive { sha256: Some(hash), direct: false, .. } if hash == "aa"));
        assert_eq!(found[0].record.requires_dist, ["b>=1"]);
        assert!(matches!(&found[1].record.source, PypiSource::Directory { editable: true, path } if path == Path::new("/src/b")));
        assert!(
            matches!(&found[2].record.source, PypiSource::Vcs { commit, subdirectory: Some(folder), .. } if commit == "c0ffee" && folder == "d")
        );
        assert!(matches!(&found[3].record.source, PypiSource::Archive { sha256: Some(hash), direct: true, .. } if hash == "dd"));
        assert!(read_report(r#"{"version":"2","install":[]}"#).unwrap_err().to_string().contains("version 2"));
        assert!(read_report("nonsense").is_err());
    }

    #[test]
    fn the_log_tells_what_pip_itself_does_not() {
        let log = "2026-01-31T12:00:00,000 Could not fetch URL https://pypi.example/a/: 503 Server Error - skipping\n\
                   2026-01-31T12:00:00,000 Could not fetch URL https://pypi.example/b/: 404 Client Error: Not Found - skipping\n\
                   2026-01-31T12:00:00,000   Running command first\n2026-01-31T12:00:00,000   fine\n\
                   2026-01-31T12:00:00,000   Running command second\n2026-01-31T12:00:00,000   Traceback\n2026-01-31T12:00:00,000   boom\n\
                   2026-01-31T12:00:00,000   ERROR: [present-rich] second exited with 1\nmore\n";
        assert_eq!(unreachable(log), "\nCould not fetch URL https://pypi.example/a/: 503 Server Error - skipping");
        assert_eq!(build_output(log), "  Running command second\n  Traceback\n  boom\n");
        assert_eq!(build_output("nothing"), "");
    }
}
