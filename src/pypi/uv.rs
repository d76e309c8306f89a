//! uv as the resolver: `uv pip compile --format pylock.toml` (PEP 751), with the index semantics of pip.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::str::FromStr;

use async_trait::async_trait;
use serde::Deserialize;
use url::Url;

use super::engine::{Found, PypiResolver, Query, tell_yanked, version_in};
use super::pip::bare_url;
use super::pip_config::PipSettings;
use super::process::{self, Job, RESOLVE_LIMIT};
use super::section::Options;
use super::tags::{Tags, WheelName};
use super::{Engine, Name, PypiRecord, PypiSource, Version};
use crate::error::{Error, Kind, Result};
use crate::install::Cancel;
use crate::prefix::Environment;

/// The oldest uv with everything that is used here.
const OLDEST: [u64; 2] = [0, 8];

/// uv of the environment or of the machine.
#[derive(Debug, Clone)]
pub struct Uv {
    program: PathBuf,
    engine: Engine,
}

/// What was found in place of a usable uv.
#[derive(Debug, Clone)]
pub enum NoUv {
    /// There is none.
    Absent,
    /// It cannot be used, and why.
    Unusable(String),
}

impl Uv {
    /// Looks into the environment first, then on the PATH.
    ///
    /// # Errors
    /// Cancelled (the outer one); none that can be used (the inner one).
    pub async fn find(prefix: &Path, env: &Environment, cwd: &Path, cancel: &Cancel) -> Result<Result<Self, NoUv>> {
        let path = env.get(OsStr::new("PATH")).cloned().unwrap_or_default();
        let folders = [prefix.join("bin")].into_iter().chain(std::env::split_paths(&path).filter(|folder| folder.is_absolute()));
        let Some(program) = folders.map(|folder| folder.join("uv")).find(|program| program.is_file()) else {
            return Ok(Err(NoUv::Absent));
        };
        let unusable = |why: String| Ok(Err(NoUv::Unusable(format!("`{}`: {why}", program.display()))));
        let job = Job {
            program: program.clone(),
            args: vec!["--version".into()],
            env: env.clone(),
            cwd: cwd.to_owned(),
            limit: std::time::Duration::from_secs(60),
        };
        let ran = match process::run(&job, cancel).await {
            Ok(ran) => ran,
            Err(error) if error.kind() == Kind::Interrupted => return Err(error),
            Err(error) => return unusable(error.to_string()),
        };
        match version_in(&ran.stdout).filter(|_| ran.success) {
            Some(version) if version.release() >= OLDEST.as_slice() => {
                let engine = Engine { name: "uv".to_owned(), version: version.to_string() };
                Ok(Ok(Uv { program, engine }))
            }
            Some(version) => unusable(format!("it is version {version}, and {}.{} is the oldest that can be used", OLDEST[0], OLDEST[1])),
            None => unusable("it does not tell its version".to_owned()),
        }
    }
}

/// Whether uv is told itself where to look, by variables or by a file of the user or the machine.
fn uv_has_indexes(env: &Environment) -> bool {
    let set = |name: &str| env.get(OsStr::new(name)).is_some_and(|value| !value.is_empty());
    if ["UV_INDEX_URL", "UV_DEFAULT_INDEX", "UV_INDEX", "UV_EXTRA_INDEX_URL", "UV_FIND_LINKS", "UV_NO_INDEX"].iter().any(|name| set(name)) {
        return true;
    }
    let var = |name: &str| env.get(OsStr::new(name)).filter(|value| !value.is_empty()).map(|value| value.to_string_lossy().into_owned());
    let files = super::indexes::uv_files(&var, var("HOME").as_deref().map(Path::new), Path::new("/etc"));
    let keys = ["index", "index-url", "extra-index-url", "find-links", "no-index"];
    files.iter().any(|file| {
        let Some(table) = std::fs::read_to_string(file).ok().and_then(|text| text.parse::<toml::Table>().ok()) else { return false };
        let pip = table.get("pip").and_then(toml::Value::as_table);
        keys.iter().any(|key| table.contains_key(*key) || pip.is_some_and(|pip| pip.contains_key(*key)))
    })
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Pylock {
    lock_version: String,
    #[serde(default)]
    packages: Vec<Package>,
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Package {
    name: String,
    #[serde(default)]
    version: Option<String>,
    #[serde(default)]
    requires_python: Option<String>,
    #[serde(default)]
    index: Option<String>,
    #[serde(default)]
    vcs: Option<PackageVcs>,
    #[serde(default)]
    directory: Option<PackageDirectory>,
    #[serde(default)]
    archive: Option<Artifact>,
    #[serde(default)]
    sdist: Option<Artifact>,
    #[serde(default)]
    wheels: Vec<Artifact>,
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
struct PackageVcs {
    r#type: String,
    #[serde(default)]
    url: Option<String>,
    #[serde(default)]
    path: Option<String>,
    #[serde(default)]
    requested_revision: Option<String>,
    commit_id: String,
    #[serde(default)]
    subdirectory: Option<String>,
}

#[derive(Deserialize)]
struct PackageDirectory {
    path: String,
    #[serde(default)]
    editable: bool,
}

#[derive(Deserialize)]
struct Artifact {
    #[serde(default)]
    url: Option<String>,
    #[serde(default)]
    path: Option<String>,
    #[serde(default)]
    size: Option<u64>,
    #[serde(default)]
    hashes: BTreeMap<String, String>,
    #[serde(default)]
    subdirectory: Option<String>,
}

/// Which kinds of files `--only-binary` and `--no-binary` leave.
struct Formats<'a>(&'a Options);

impl Formats<'_> {
    fn names(lists: &[String], name: &Name) -> bool {
        let mut all = false;
        let mut found = false;
        for word in lists.iter().flat_map(|list| list.split(',')).map(str::trim) {
            match word {
                ":all:" => all = true,
                ":none:" => (all, found) = (false, false),
                word => found |= Name::from_str(word).is_ok_and(|word| word == *name),
            }
        }
        all || found
    }

    fn wheels(&self, name: &Name) -> bool {
        !Self::names(&self.0.no_binary, name)
    }

    fn sources(&self, name: &Name) -> bool {
        !Self::names(&self.0.only_binary, name)
    }
}

/// Reads a lock that uv wrote for one environment. `folder`: where relative paths start.
pub(super) fn read_pylock(text: &str, folder: &Path, tags: &Tags, options: &Options) -> Result<Vec<Found>> {
    let broken = |why: String| {
        Error::failure("uv's answer cannot be read").because(why).hint("use another version of uv, or pip: --pip-resolver pip")
    };
    let lock: Pylock = toml::from_str(text).map_err(|error| broken(error.to_string()))?;
    if lock.lock_version.split('.').next() != Some("1") {
        return Err(broken(format!("its format is version {}, and 1 is known", lock.lock_version)));
    }
    let mut found = Vec::new();
    for package in lock.packages {
        let name = Name::from_str(&package.name).map_err(|error| broken(error.to_string()))?;
        let complete_version = package.version.as_deref().and_then(|version| Version::from_str(version).ok());
        let source = if let Some(vcs) = package.vcs {
            let url = match (vcs.url, vcs.path) {
                (Some(url), _) => bare_url(&url)?,
                (None, Some(path)) => file_url(folder, &path)?,
                (None, None) => return Err(broken(format!("the repository of `{name}` has no URL"))),
            };
            PypiSource::Vcs {
                system: vcs.r#type,
                url,
                requested_revision: vcs.requested_revision,
                commit: vcs.commit_id,
                subdirectory: vcs.subdirectory,
            }
        } else if let Some(directory) = package.directory {
            PypiSource::Directory { path: crate::spec::clean_path(&folder.join(directory.path)), editable: directory.editable }
        } else if let Some(archive) = package.archive {
            artifact(archive, folder, None, true)?
        } else {
            let formats = Formats(options);
            let mut best: Option<(usize, Artifact)> = None;
            let mut others = Vec::new();
            for wheel in package.wheels {
                let file = wheel.url.as_deref().or(wheel.path.as_deref()).map(file_name).unwrap_or_default();
                let rank = if formats.wheels(&name) { WheelName::parse(&file).ok().and_then(|name| tags.rank(&name)) } else { None };
                match rank {
                    Some(rank) if best.as_ref().is_none_or(|(known, _)| rank < *known) => best = Some((rank, wheel)),
                    Some(_) => {}
                    None => others.push(file),
                }
            }
            let index = package.index.as_deref().map(bare_url).transpose()?;
            match (best, package.sdist.filter(|_| formats.sources(&name))) {
                (Some((_, wheel)), _) => artifact(wheel, folder, index, false)?,
                (None, Some(sdist)) => artifact(sdist, folder, index, false)?,
                (None, None) => {
                    if let Some(file) = others.first() {
                        tags.check(file)?;
                    }
                    return Err(Error::new(Kind::Unsatisfiable, format!("`{name}` has no file that can be used here"))
                        .because("it has neither a wheel for this interpreter and platform nor a source archive"));
                }
            }
        };
        let record = PypiRecord {
            name,
            version: complete_version.unwrap_or_else(|| Version::new([0])),
            source,
            requires_dist: Vec::new(),
            requires_python: package.requires_python,
            requested: false,
            extras: Vec::new(),
        };
        // uv tells no requirements.
        found.push(Found { record, complete: false });
    }
    Ok(found)
}

/// The last segment of a URL or path, percent-decoded.
pub(super) fn file_name(text: &str) -> String {
    crate::channel::percent_decode(text.split(['?', '#']).next().unwrap_or_default().rsplit('/').next().unwrap_or_default())
}

fn file_url(folder: &Path, path: &str) -> Result<Url> {
    let path = crate::spec::clean_path(&folder.join(path));
    Url::from_file_path(&path).map_err(|()| Error::failure(format!("`{}` is no absolute path", path.display())))
}

fn artifact(artifact: Artifact, folder: &Path, index: Option<Url>, direct: bool) -> Result<PypiSource> {
    let url = match (&artifact.url, &artifact.path) {
        (Some(url), _) => bare_url(url)?,
        (None, Some(path)) => file_url(folder, path)?,
        (None, None) => return Err(Error::failure("uv's answer has a file without a URL")),
    };
    Ok(PypiSource::Archive {
        url,
        sha256: artifact.hashes.get("sha256").cloned(),
        size: artifact.size,
        index,
        direct,
        subdirectory: artifact.subdirectory,
    })
}

/// The platform as uv names it.
fn platform(tags: &Tags) -> Result<String> {
    use rattler_conda_types::Subdir;
    let input = tags.input();
    let glibc = || {
        // The versions that uv knows.
        let known = [40, 39, 38, 37, 36, 35, 34, 33, 32, 31, 28, 17];
        let (_, minor) = input.glibc.unwrap_or((2, 17));
        known.into_iter().find(|known| *known <= minor)
    };
    let linux = |machine: &str| glibc().map(|minor| format!("{machine}-manylinux_2_{minor}"));
    let name = match input.subdir {
        Subdir::Linux64 => linux("x86_64"),
        Subdir::LinuxAarch64 => linux("aarch64"),
        Subdir::LinuxRiscv64 => Some("riscv64-unknown-linux".to_owned()),
        Subdir::OsxArm64 => Some("aarch64-apple-darwin".to_owned()),
        Subdir::Osx64 => Some("x86_64-apple-darwin".to_owned()),
        Subdir::Win64 => Some("x86_64-pc-windows-msvc".to_owned()),
        Subdir::WinArm64 => Some("aarch64-pc-windows-msvc".to_owned()),
        _ => None,
    };
    name.ok_or_else(|| Error::failure(format!("uv cannot resolve for {}", input.subdir)).hint("use pip on such a machine"))
}

#[async_trait]
impl PypiResolver for Uv {
    fn engine(&self) -> &Engine {
        &self.engine
    }

    async fn resolve(&self, query: &Query<'_>) -> Result<Vec<Found>> {
        let options = &query.section.options;
        let mut env = query.env.clone();
        let mut head = options.lines(false);
        if options.index_url.is_some() {
            // Variables would count more than the section.
            for name in ["UV_INDEX_URL", "UV_DEFAULT_INDEX"] {
                env.remove(OsStr::new(name));
            }
        }
        let cwd = std::env::current_dir().unwrap_or_else(|_| query.work.run_dir());
        // The interpreter of the query lies in `bin` of its prefix.
        let prefix = query.python.parent().and_then(Path::parent).unwrap_or(query.python);
        let settings = PipSettings::of(&env, prefix, Path::new("/etc"));
        if !uv_has_indexes(&env) {
            head.extend(settings.lines(options, &cwd));
        }
        let has = |env: &Environment, name: &str| env.get(OsStr::new(name)).is_some_and(|value| !value.is_empty());
        if let Some(certificates) = settings.one("cert")
            && !has(&env, "SSL_CERT_FILE")
        {
            env.insert("SSL_CERT_FILE".into(), certificates.into());
        }
        if let Some(proxy) = settings.one("proxy") {
            for name in ["HTTP_PROXY", "HTTPS_PROXY"] {
                if !has(&env, name) {
                    env.insert(name.into(), proxy.into());
                }
            }
        }
        if let Some(seconds) = settings.one("timeout").or(settings.one("default-timeout"))
            && !has(&env, "UV_HTTP_TIMEOUT")
        {
            env.insert("UV_HTTP_TIMEOUT".into(), seconds.into());
        }
        for (option, value) in &options.pip_only {
            query.progress.warn(
                &format!("uv does not know `{option} {value}`, and resolves without it"),
                &["to use pip: --pip-resolver pip".to_owned()],
            );
        }

        let files = query.write_files(&head, true)?;
        let folder = query.work.path().join("uv");
        let _ = crate::install::swap::remove_tree(&folder);
        fs_err::create_dir_all(&folder).map_err(|error| Error::io("create the folder", &folder, &error))?;
        let output = folder.join("pylock.toml");
        let mut args: Vec<OsString> = ["pip", "compile"].map(Into::into).to_vec();
        let mut push = |words: &[&OsStr]| args.extend(words.iter().map(|word| (*word).to_owned()));
        push(&[files.requirements.as_os_str(), "-c".as_ref(), files.constraints.as_os_str()]);
        push(&["--format".as_ref(), "pylock.toml".as_ref(), "-o".as_ref(), output.as_os_str()]);
        push(&["--no-header".as_ref(), "--no-sources".as_ref(), "--index-strategy".as_ref(), "unsafe-best-match".as_ref()]);
        if options.pre {
            push(&["--prerelease".as_ref(), "allow".as_ref()]);
        }
        for host in options.trusted_hosts.iter().map(String::as_str).chain(settings.list("trusted-host")) {
            push(&["--allow-insecure-host".as_ref(), host.as_ref()]);
        }
        for (option, lists) in [("--only-binary", &options.only_binary), ("--no-binary", &options.no_binary)] {
            for word in lists.iter().flat_map(|list| list.split(',')).map(str::trim).filter(|word| !word.is_empty()) {
                push(&[option.as_ref(), word.as_ref()]);
            }
        }
        if query.offline {
            push(&["--offline".as_ref()]);
        }
        let time = query.exclude_newer.map(|time| time.to_string());
        if let Some(time) = &time {
            push(&["--exclude-newer".as_ref(), time.as_ref()]);
        }
        let platform = if query.foreign { Some(platform(query.tags)?) } else { None };
        let version = query.version.to_string();
        match &platform {
            None => push(&["--python".as_ref(), query.python.as_os_str()]),
            Some(platform) => {
                // What is built here would be for this machine.
                push(&["--python-platform".as_ref(), platform.as_ref(), "--python-version".as_ref(), version.as_ref()]);
                push(&["--no-build".as_ref(), "--python".as_ref(), query.python.as_os_str()]);
            }
        }
        if let Some((major, minor)) = query.tags.input().macos.filter(|_| platform.is_some()) {
            // Else uv takes a version of its own for the oldest macOS.
            env.insert("MACOSX_DEPLOYMENT_TARGET".into(), format!("{major}.{minor}").into());
        }
        let job = Job { program: self.program.clone(), args, env, cwd: query.work.run_dir(), limit: RESOLVE_LIMIT };
        let ran = process::run(&job, query.cancel).await?;
        if !ran.success {
            // uv prints the lock on stdout too; only its messages say what went wrong.
            let mut ran = process::Ran { stdout: String::new(), ..ran };
            if ran.stderr.contains("was not found in the package registry") {
                // Only with its own strategy does uv tell that an index refused to answer.
                let mut again = job.clone();
                if let Some(at) = again.args.iter().position(|arg| arg == "unsafe-best-match") {
                    again.args[at] = "first-index".into();
                }
                let told = process::run(&again, query.cancel).await?;
                for line in
                    told.stderr.lines().filter(|line| line.contains("could not be queried due to") || line.contains("returned a 403"))
                {
                    ran.stderr.push('\n');
                    ran.stderr.push_str(line);
                }
            }
            return Err(query.failure(&self.engine, &ran));
        }
        tell_yanked(&self.engine, &ran, query.work, query.progress);
        let text = fs_err::read_to_string(&output).map_err(|error| Error::io("read", &output, &error))?;
        read_pylock(&text, &folder, query.tags, options)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pypi::tags::TagInput;

    fn tags() -> Tags {
        let subdir = rattler_conda_types::Subdir::Linux64;
        Tags::new(TagInput { subdir, python: (3, 11), free_threaded: false, glibc: Some((2, 28)), macos: None })
    }

    #[test]
    fn the_best_wheel_is_chosen_and_the_options_count() {
        let text = r#"
lock-version = "1.0"
created-by = "uv"
[[packages]]
name = "a"
version = "1.0"
sdist = { url = "https://pypi.example/a-1.0.tar.gz", size = 5, hashes = { sha256 = "50" } }
wheels = [
  { url = "https://u:p@pypi.example/a-1.0-py3-none-any.whl", hashes = { sha256 = "01" } },
  { url = "https://pypi.example/a-1.0%2Blocal-cp311-cp311-manylinux_2_17_x86_64.whl", size = 9, hashes = { sha256 = "02" } },
  { url = "https://pypi.example/a-1.0-cp312-cp312-manylinux_2_17_x86_64.whl", hashes = { sha256 = "03" } },
]
[[packages]]
name = "b"
directory = { path = "../b", editable = true }
[[packages]]
name = "c"
vcs = { type = "git", url = "https://h/c", requested-revision = "v1", commit-id = "c0ffee" }
[[packages]]
name = "d"
version = "2"
archive = { path = "/stubs/d-2-py3-none-any.whl", hashes = { sha256 = "dd" } }
"#;
        let read = |options: &Options| read_pylock(text, Path::new("/w/uv"), &tags(), options).unwrap();
        let found = read(&Options::default());
        assert!(matches!(&found[0].record.source, PypiSource::Archive { sha256: Some(hash), size: Some(9), .. } if hash == "02"));
        assert!(matches!(&found[1].record.source, PypiSource::Directory { path, editable: true } if path == Path::new("/w/b")));
        assert!(!found[1].complete);
        assert!(matches!(&found[2].record.source, PypiSource::Vcs { commit, .. } if commit == "c0ffee"));
        assert!(
            matches!(&found[3].record.source, PypiSource::Archive { url, direct: true, .. } if url.path() == "/stubs/d-2-py3-none-any.whl")
        );
        let source = read(&Options { no_binary: vec!["x,A".into()], ..Options::default() });
        assert!(matches!(&source[0].record.source, PypiSource::Archive { sha256: Some(hash), .. } if hash == "50"));
        let only = text
            .replace("cp311-cp311", "cp310-cp310")
            .replace("py3-none-any.whl\", hashes = { sha256 = \"01\"", "cp39-cp39-win_amd64.whl\", hashes = { sha256 = \"01\"");
        let options = Options { only_binary: vec![":all:".into()], ..Options::default() };
        let error = read_pylock(&only, Path::new("/w/uv"), &tags(), &options).unwrap_err();
        assert_eq!(error.exit_code(), 3, "{error}");
    }

    #[test]
    fn settings_of_uv_itself_are_noticed() {
        let home = tempfile::tempdir().unwrap();
        let env = |pairs: &[(&str, &str)]| -> Environment {
            pairs.iter().map(|(name, value)| (OsString::from(*name), OsString::from(*value))).collect()
        };
        let place = home.path().display().to_string();
        assert!(!uv_has_indexes(&env(&[("HOME", &place)])) || Path::new("/etc/uv/uv.toml").exists());
        assert!(uv_has_indexes(&env(&[("HOME", &place), ("UV_DEFAULT_INDEX", "https://x")])));
        std::fs::create_dir_all(home.path().join(".config/uv")).unwrap();
        std::fs::write(home.path().join(".config/uv/uv.toml"), "[[index]]\nurl = \"https://x\"\n").unwrap();
        assert!(uv_has_indexes(&env(&[("HOME", &place)])));
    }
}
