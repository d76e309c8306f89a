//! `tare sync`: an environment becomes what a lock says. No solver runs, and where it is so already, the lock is not even parsed.

use std::collections::{BTreeSet, HashSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use indexmap::IndexMap;
use rattler_conda_types::{MatchSpec, Matches, RepoDataRecord, Subdir};
use serde_json::{Value, json};
use url::Url;

use super::{Format, HOST_SCHEME, Lock, LockedPlatform, LockedPypi, ReadOptions};
use crate::channel::{self, Session};
use crate::config::Settings;
use crate::error::{Error, Kind, Result};
use crate::install::{self, Archive, Cancel, Installed, LinkMode, Plan, Stamp, TargetState};
use crate::platform::{self, TargetOptions};
use crate::prefix::{Places, Prefix, Which};
use crate::pypi::{self, EngineChoice, PypiPlan, PypiSource, ReadyWheel, Section, WheelFile, Workshop};
use crate::report::Progress;
use crate::spec::{self, ChannelEntry, Location};

/// What `sync` is asked for.
#[derive(Debug, Clone, Default)]
pub struct SyncOptions {
    /// The lock.
    pub lock: PathBuf,
    /// `-n`.
    pub name: Option<String>,
    /// `-p`.
    pub prefix: Option<PathBuf>,
    /// `--environment`: which environment of the lock.
    pub environment: Option<String>,
    /// `--platform`: which platform of the lock; this machine's if none.
    pub platform: Option<String>,
    /// `--category`: of a conda-lock file; `main` and `dev` if none.
    pub categories: Vec<String>,
    /// Leave out the PyPI half.
    pub no_pip: bool,
    /// Replace an environment although files in it belong to no package.
    pub force: bool,
    /// Refuse to touch an environment that is there and differs (`create --lock`), unless `force`.
    pub only_new: bool,
    /// Only plan.
    pub dry_run: bool,
    /// How files are linked; else the setting.
    pub link_mode: Option<LinkMode>,
    /// Leave out byte code.
    pub no_compile: bool,
    /// Let later packages overwrite files of earlier ones.
    pub clobber: bool,
    /// Packages whose link scripts may run.
    pub allow_link_scripts: Vec<String>,
    /// How long to wait for the prefix lock.
    pub lock_timeout: Option<std::time::Duration>,
    /// The command line, for the history.
    pub command: Vec<String>,
    /// Stops the work.
    pub cancel: Cancel,
}

/// What came of it.
pub enum Synced {
    /// The environment is what the lock says.
    Same {
        /// Where it is.
        prefix: PathBuf,
    },
    /// `dry_run`.
    Planned {
        /// Where it would be.
        prefix: PathBuf,
        /// The platform of the lock.
        platform: String,
        /// The packages it would hold.
        records: Vec<RepoDataRecord>,
        /// The Python packages.
        python: Vec<LockedPypi>,
    },
    /// It was made.
    Done(Box<Installed>),
}

/// Makes the environment that the lock describes.
///
/// # Errors
/// Whatever [`super::read`] refuses; a lock without this platform, with a PyPI half (unless left out) or with source builds; kind drift where a
/// package of the `host` channel comes out differently on this machine; files in the environment that belong to no package; and as
/// [`install::create_with`]. In every case the environment is as it was.
pub async fn sync(options: &SyncOptions, settings: &Settings, progress: Arc<dyn Progress>) -> Result<Synced> {
    let bytes = super::read_bytes(&options.lock)?;
    let sha256 = install::sha256_hex(&bytes);
    let mut target_options = TargetOptions::from_settings(settings.env.clone(), settings);
    if options.platform.as_deref().is_some_and(|name| name.parse::<Subdir>().is_ok()) {
        target_options.platform.clone_from(&options.platform);
    }
    let native = platform::subdir(&target_options)?.0;
    let wanted = options.platform.clone().unwrap_or_else(|| native.to_string());
    // What a stamp says about the lock: equal values mean the same packages.
    let stamp_facts = json!({
        "sha256": sha256,
        "environment": options.environment,
        "platform": wanted,
        "categories": options.categories,
        "no_pip": options.no_pip,
    });

    if let Some(prefix) = known_place(options, settings)?
        && let TargetState::Environment(existing) = install::state_of_target(&prefix)?
        && let Some(stamp) = &existing.stamp
        && stamp.prefix == existing.prefix
        && stamp.metadata.get("lock") == Some(&stamp_facts)
        && is_intact(stamp, &existing.prefix, options, &*progress)
    {
        return Ok(Synced::Same { prefix });
    }

    let read_options = ReadOptions {
        environment: options.environment.clone(),
        categories: Some(if options.categories.is_empty() { vec!["main".into(), "dev".into()] } else { options.categories.clone() }),
        base_dir: Some(folder_of(options)),
    };
    let shown = options.lock.display().to_string();
    let lock = super::read(&shown, &bytes, &read_options)?;
    let platform = choose(&lock, &wanted, &shown, options)?;
    refuse_what_cannot_be_installed(&lock, platform, options, &*progress)?;
    let prefix = place(options, &lock, settings)?;
    let variables = lock.provenance.variables.clone();
    let decided_on = identity(&prefix);
    let Some(mut replace) = decide(&prefix, platform, &variables, options, &*progress)? else { return Ok(Synced::Same { prefix }) };
    install::accept_target(&prefix, replace, false)?;

    let session = Session::open(settings, progress.clone())?;
    let records = records(platform, &lock, settings, &session, options, progress.clone()).await?;
    if options.dry_run {
        let python = if options.no_pip { Vec::new() } else { platform.pypi.clone() };
        return Ok(Synced::Planned { prefix, platform: platform.name.clone(), records, python });
    }
    if platform.subdir == native || options.platform.is_none() {
        tell_about_machine(&lock, platform, &records, options, &target_options, &*progress)?;
    }
    let pypi = if options.no_pip || platform.pypi.is_empty() {
        None
    } else {
        Some(wheels(platform, &lock, &records, &target_options, options, settings, &session, progress.clone()).await?)
    };
    let held = install::hold(&prefix, &options.command, options.lock_timeout, &options.cancel, &*progress).await?;
    // Another process may have had the lock until now: what it made, and nothing older, is what this one decides about.
    if identity(&prefix) != decided_on {
        match decide(&prefix, platform, &variables, options, &*progress)? {
            Some(again) => replace = again,
            None => return Ok(Synced::Same { prefix }),
        }
    }
    let mut plan = plan(&prefix, platform, &lock, records, stamp_facts, replace, variables, options, settings)?;
    plan.pypi = pypi;
    if replace {
        crate::notebook::carry_over(&prefix, &mut plan, settings, &*progress)?;
    }
    let installed = install::create_held(&plan, held, &session.package_cache, session.client.clone(), progress.clone()).await?;
    if !lock.provenance.secret_variables.is_empty() {
        let names: Vec<String> = lock.provenance.secret_variables.iter().map(|name| format!("`{name}`")).collect();
        progress.warn(
            &format!("the lock does not hold the value of {}: it looked like a secret", names.join(", ")),
            &["set it where the environment is used: export NAME=…".to_owned()],
        );
    }
    Ok(Synced::Done(Box::new(installed)))
}

/// What is to be done about the prefix as it is: `None`: it is what the lock says; else whether an environment is replaced.
///
/// # Errors
/// There is another environment, and `only_new`; it has files that belong to no package.
fn decide(
    prefix: &Path,
    platform: &LockedPlatform,
    variables: &IndexMap<String, String>,
    options: &SyncOptions,
    progress: &dyn Progress,
) -> Result<Option<bool>> {
    let TargetState::Environment(existing) = install::state_of_target(prefix)? else { return Ok(Some(false)) };
    let pypi = if options.no_pip { Some(None) } else { pypi_digest(platform, options) };
    let same = platform.complete
        && existing.stamp.as_ref().zip(pypi).is_some_and(|(stamp, pypi)| {
            stamp.pypi_digest == pypi
                && is_same(stamp, &existing.prefix, platform, variables)
                && is_intact(stamp, &existing.prefix, options, progress)
        });
    if same {
        return Ok(None);
    }
    if options.only_new && !options.force {
        return Err(Error::failure(format!("there already is an environment at `{}`, and it is not what the lock says", prefix.display()))
            .hint("to make it so: tare sync")
            .hint("to make another one: -n NAME"));
    }
    if !options.force {
        refuse_to_lose_files(&existing.prefix, options)?;
        tell_what_goes(&existing.prefix, platform, options, progress)?;
    }
    if let Some((first, number)) = existing.stamp.as_ref().and_then(|stamp| install::damages(&existing.prefix, stamp)) {
        let more = if number > 1 { format!(" ({} damaged in all)", crate::resolve::count(number, "file")) } else { String::new() };
        let then = if options.dry_run { "would be made" } else { "is made" };
        progress.note(&format!("`{}` is not as installed: {first}{more}; it {then} anew", existing.prefix.display()));
    }
    Ok(Some(true))
}

/// What tells one environment at a path from the next, each of which comes by a rename.
fn identity(prefix: &Path) -> Option<(u64, u64, i64, i64)> {
    #[cfg(unix)]
    {
        use std::os::unix::fs::MetadataExt;
        std::fs::metadata(prefix).ok().map(|about| (about.dev(), about.ino(), about.ctime(), about.ctime_nsec()))
    }
    #[cfg(not(unix))]
    {
        let made = std::fs::metadata(prefix).ok()?.created().ok()?.duration_since(std::time::UNIX_EPOCH).ok()?;
        Some((made.as_secs(), u64::from(made.subsec_nanos()), 0, 0))
    }
}

/// The place, where it can be told without reading the lock.
fn known_place(options: &SyncOptions, settings: &Settings) -> Result<Option<PathBuf>> {
    let which = Which { name: options.name.clone(), prefix: options.prefix.clone() };
    if which == Which::default() {
        return Ok(None);
    }
    existing_or_new(&which, &crate::create::places(settings)).map(Some)
}

fn place(options: &SyncOptions, lock: &Lock, settings: &Settings) -> Result<PathBuf> {
    let mut which = Which { name: options.name.clone(), prefix: options.prefix.clone() };
    if which == Which::default() {
        which.name.clone_from(&lock.provenance.name);
    }
    existing_or_new(&which, &crate::create::places(settings))
}

/// An environment of that name wherever it is, else its place in the first folder.
fn existing_or_new(which: &Which, places: &Places) -> Result<PathBuf> {
    if which.name.is_some()
        && let Ok(found) = crate::prefix::locate(which, places)
    {
        return Ok(found);
    }
    crate::prefix::place_for_new(which, places)
}

fn choose<'a>(lock: &'a Lock, wanted: &str, shown: &str, options: &SyncOptions) -> Result<&'a LockedPlatform> {
    if lock.source == Format::Pylock {
        return Err(Error::usage(format!("`{shown}` is a pylock.toml: it holds only PyPI packages"))
            .because("an environment needs a Python first")
            .hint("lock both halves: tare lock -f environment.yml"));
    }
    if let Some(platform) = lock.platform(wanted) {
        return Ok(platform);
    }
    let of_subdir: Vec<&str> =
        lock.platforms.iter().filter(|platform| platform.subdir.as_str() == wanted).map(|platform| platform.name.as_str()).collect();
    if let Some(first) = of_subdir.first() {
        return Err(Error::usage(format!("`{shown}` has several platforms for {wanted}: {}", of_subdir.join(", ")))
            .hint(format!("choose one: --platform {first}")));
    }
    Err(Error::new(Kind::Drift, format!("`{shown}` is not locked for {wanted}"))
        .because(match lock.platforms.as_slice() {
            [] => "it has no platform at all".to_owned(),
            _ => format!("it has {}", lock.platform_names().join(", ")),
        })
        .hint(format!("to add it: {}", lock_again(lock, options, &format!("--platform {wanted}")))))
}

/// The command that makes the lock again from what it was made of, which a lock does not name.
fn lock_again(lock: &Lock, options: &SyncOptions, more: &str) -> String {
    let folder = options.lock.parent().unwrap_or(Path::new(""));
    let file = ["environment.yml", "environment.yaml"].into_iter().map(|name| folder.join(name)).find(|path| path.is_file());
    let file = file.unwrap_or_else(|| PathBuf::from("environment.yml")).display().to_string();
    // Locks of other tools are for those tools to write.
    let output = if lock.source == Format::Tare { options.lock.display().to_string() } else { super::DEFAULT_NAME.to_owned() };
    super::command(&[file], &[], &output, more)
}

fn refuse_what_cannot_be_installed(lock: &Lock, platform: &LockedPlatform, options: &SyncOptions, progress: &dyn Progress) -> Result<()> {
    if let Some(source) = platform.conda_sources.first() {
        return Err(
            Error::failure(format!("the conda package `{source}` of the lock is built from source")).because("only pixi can do that")
        );
    }
    if !platform.pypi.is_empty() && options.no_pip {
        let number = crate::resolve::count(platform.pypi.len(), "package");
        progress.note(&format!("the PyPI half of the lock is skipped (--no-pip): {number} not installed"));
    }
    if platform.conda.is_empty() && lock.source != Format::Tare {
        progress.warn(&format!("the lock holds no conda package for {}", platform.name), &[]);
    }
    Ok(())
}

/// The folder of the lock.
fn folder_of(options: &SyncOptions) -> PathBuf {
    std::path::absolute(&options.lock).unwrap_or_else(|_| options.lock.clone()).parent().unwrap_or(Path::new("/")).to_owned()
}

/// The digest that an environment has with the PyPI half of the lock, if that can be told before anything is built.
fn pypi_digest(platform: &LockedPlatform, options: &SyncOptions) -> Option<Option<String>> {
    let records = super::pypi_records(platform, &folder_of(options)).ok()?;
    let is_wheel = |source: &PypiSource| matches!(source, PypiSource::Archive { url, sha256: Some(_), .. } if url.path().ends_with(".whl"));
    if !records.iter().all(|record| is_wheel(&record.source)) {
        return None;
    }
    let wheels = records.into_iter().map(|record| ReadyWheel { record, wheel: WheelFile::Remote }).collect();
    let plan = PypiPlan { wheels, python: pypi::Version::new([3]), engine: None, clobber: false };
    Some(pypi::installed::digest_of_plan(&plan))
}

/// Whether nothing says which bytes an archive must have.
fn is_unchecked(record: &pypi::PypiRecord) -> bool {
    matches!(&record.source, PypiSource::Archive { sha256: None, .. })
}

/// The PyPI half of the lock with its wheels at hand: what has none is built here.
#[allow(clippy::too_many_arguments)]
async fn wheels(
    platform: &LockedPlatform,
    lock: &Lock,
    records: &[RepoDataRecord],
    target_options: &TargetOptions,
    options: &SyncOptions,
    settings: &Settings,
    session: &Session,
    progress: Arc<dyn Progress>,
) -> Result<PypiPlan> {
    let python = super::pypi_records(platform, &folder_of(options))?;
    let mut target_options = target_options.clone();
    target_options.platform = Some(platform.subdir.to_string());
    let target = platform::target(&target_options)?;
    let mut workshop = Workshop::new(pypi::Context {
        records,
        target: &target,
        session,
        concurrency: settings.concurrency.value,
        choice: EngineChoice::default(),
        exclude_newer: None,
        progress: progress.clone(),
        cancel: options.cancel.clone(),
    })?;
    let mut section = Section::default();
    section.options.index_url = lock.indexes.first().cloned();
    section.options.extra_index_urls = lock.indexes.iter().skip(1).cloned().collect();
    for text in &lock.find_links {
        section.options.find_links.push(match Url::parse(text) {
            Ok(url) if text.contains("://") => Location::Url(url),
            _ => Location::Path(folder_of(options).join(text)),
        });
    }
    let unchecked: Vec<String> = python.iter().filter(|record| is_unchecked(record)).map(|record| format!("`{}`", record.name)).collect();
    if !unchecked.is_empty() {
        let few = unchecked.iter().take(5).cloned().collect::<Vec<_>>().join(", ");
        let more = if unchecked.len() > 5 { format!(" and {} more", unchecked.len() - 5) } else { String::new() };
        progress.warn(
            &format!("the lock has no sha256 of {few}{more}: what comes is installed unchecked"),
            &[format!("lock again, with hashes: {}", lock_again(lock, options, "--upgrade"))],
        );
    }
    let wheels = workshop.ready(python, &section).await?;
    Ok(PypiPlan { wheels, python: workshop.python().clone(), engine: None, clobber: options.clobber })
}

/// Whether the environment holds these packages and variables, though its stamp names another lock or none.
fn is_same(stamp: &Stamp, prefix: &Path, platform: &LockedPlatform, variables: &IndexMap<String, String>) -> bool {
    stamp.prefix == prefix
        && stamp.subdir == platform.subdir.as_str()
        && stamp.environment_digest == install::digest_of(&platform.conda)
        && stamp.state_sha256 == install::state_sha256(variables)
}

/// Whether everything is there that was installed, and no Python package of another tool. Files of nobody in site-packages are told; with `--force` they
/// are a reason to make the environment anew.
fn is_intact(stamp: &Stamp, prefix: &Path, options: &SyncOptions, progress: &dyn Progress) -> bool {
    let look = install::look(prefix, stamp);
    // Without the PyPI half of the lock, Python packages are the user's own business.
    if look.damage.is_some() || !(look.foreign.is_empty() || options.no_pip) {
        return false;
    }
    if !look.aliens.is_empty() {
        if options.force {
            return false;
        }
        install::tell_aliens(prefix, &look.aliens, progress);
    }
    true
}

/// The records to install: with the metadata of the archives where the lock has none, and with this machine's `host` packages.
async fn records(
    platform: &LockedPlatform,
    lock: &Lock,
    settings: &Settings,
    session: &Session,
    options: &SyncOptions,
    progress: Arc<dyn Progress>,
) -> Result<Vec<RepoDataRecord>> {
    let (hosts, others): (Vec<RepoDataRecord>, Vec<RepoDataRecord>) =
        platform.conda.iter().cloned().partition(|record| record.url.scheme() == HOST_SCHEME);
    trust(lock, settings, session);
    let mut records = if platform.complete {
        others
    } else {
        let archives: Vec<Archive> = others
            .iter()
            .map(|record| Archive { url: record.url.clone(), md5: record.package_record.md5, sha256: record.package_record.sha256 })
            .collect();
        install::records_for_archives(&archives, &session.package_cache, session.client.clone(), progress.clone(), &options.cancel).await?
    };
    if !hosts.is_empty() {
        records.extend(rebuilt(&hosts, platform, settings, session, &*progress).await?);
    }
    Ok(records)
}

/// Lets the session use the credentials of the lock's channels.
fn trust(lock: &Lock, settings: &Settings, session: &Session) {
    let entries: Vec<ChannelEntry> = lock
        .channels
        .iter()
        .filter(|channel| !channel.starts_with(HOST_SCHEME))
        .map(|text| ChannelEntry { text: text.clone(), place: None })
        .collect();
    let options =
        channel::ExpandOptions { override_channels: true, declared: true, nodefaults: true, root_dir: Path::new("/"), host: None };
    if let Ok(expanded) = channel::expand(&entries, settings, options) {
        session.trust(&expanded.channels);
    }
}

/// The packages of the `host` channel as this machine makes them; they must be those of the lock.
async fn rebuilt(
    locked: &[RepoDataRecord],
    platform: &LockedPlatform,
    settings: &Settings,
    session: &Session,
    progress: &dyn Progress,
) -> Result<Vec<RepoDataRecord>> {
    let first = title(&locked[0]);
    let elsewhere = |why: String| {
        Error::new(Kind::Drift, format!("`{first}` of the lock is made from an interpreter of the machine it was locked on"))
            .because(why)
            .hint("install that interpreter here, or lock again with a channel: -c conda-forge")
    };
    let versions = locked
        .iter()
        .filter(|record| record.package_record.name.as_normalized() == "python")
        .map(|record| format!("=={}", record.package_record.version))
        .collect();
    let url: Url = channel::host_url(settings, versions, progress).map_err(|error| {
        if channel::host::is_of_machine(&error) {
            let why = error.to_string();
            return elsewhere(format!("this machine has none: {why}"));
        }
        // The cache cannot be written, for example: that says nothing about the lock.
        error
    })?;
    let host = || Ok(url.clone());
    let options =
        channel::ExpandOptions { override_channels: true, declared: true, nodefaults: true, root_dir: Path::new("/"), host: Some(&host) };
    let entry = ChannelEntry { text: "host".to_owned(), place: None };
    let expanded = channel::expand(&[entry], settings, options)?;
    let names: Vec<MatchSpec> = locked.iter().map(|record| MatchSpec::from(record.package_record.name.clone())).collect();
    let repodata = session.quiet().repodata(&expanded.channels, &[platform.subdir, Subdir::NoArch], &names, false).await?;
    let here: Vec<&RepoDataRecord> = repodata.iter().flat_map(rattler_repodata_gateway::RepoData::iter).collect();
    let mut records = Vec::new();
    for wanted in locked {
        let of_name = || here.iter().filter(|record| record.package_record.name == wanted.package_record.name);
        let same =
            of_name().find(|record| record.package_record.sha256 == wanted.package_record.sha256 && wanted.package_record.sha256.is_some());
        match same {
            Some(record) => records.push((**record).clone()),
            None => {
                let version = &wanted.package_record.version;
                let why = match of_name().find(|record| record.package_record.version == *version) {
                    Some(other) => format!("`{}` is made here, with another content than `{}` in the lock", title(other), title(wanted)),
                    None => {
                        let versions: BTreeSet<String> = of_name().map(|record| record.package_record.version.to_string()).collect();
                        let found =
                            if versions.is_empty() { "none".to_owned() } else { versions.into_iter().collect::<Vec<_>>().join(", ") };
                        format!("`{}` is wanted, and this machine has {found}", title(wanted))
                    }
                };
                return Err(elsewhere(why));
            }
        }
    }
    Ok(records)
}

fn title(record: &RepoDataRecord) -> String {
    let package = &record.package_record;
    format!("{} {} {}", package.name.as_normalized(), package.version, package.build)
}

/// One warning where the lock expects more of the machine than it has.
fn tell_about_machine(
    lock: &Lock,
    platform: &LockedPlatform,
    records: &[RepoDataRecord],
    options: &SyncOptions,
    target_options: &TargetOptions,
    progress: &dyn Progress,
) -> Result<()> {
    let mut wanted: BTreeSet<&str> = BTreeSet::new();
    for record in records {
        wanted.extend(record.package_record.depends.iter().map(String::as_str).filter(|text| text.starts_with("__")));
    }
    if platform.cuda().is_none() && wanted.is_empty() {
        return Ok(());
    }
    let machine = platform::target(target_options)?;
    if !machine.is_native {
        return Ok(());
    }
    let needs_cuda = wanted.iter().any(|text| text.split([' ', '=', '>', '<']).next() == Some("__cuda"));
    if let Some(assumed) = platform.cuda().filter(|_| needs_cuda) {
        match machine.cuda() {
            None => progress.warn(
                &format!("the lock is for machines with a GPU (CUDA {}), and none is found here", assumed.version),
                &["the environment works, but its GPU packages cannot be used on this machine".to_owned()],
            ),
            Some(here) => {
                let newer = assumed.generic().is_ok_and(|assumed| assumed.version > here.package.version);
                if newer {
                    progress.warn(
                        &format!(
                            "the lock assumes a driver for CUDA {}, and this one allows up to {}",
                            assumed.version, here.package.version
                        ),
                        &[format!(
                            "update the driver, or lock for it: {}",
                            lock_again(lock, options, &format!("--cuda {}", here.package.version))
                        )],
                    );
                }
            }
        }
    }
    let present = machine.virtual_package_list();
    let mut lacking = Vec::new();
    for text in wanted {
        let Ok(spec) = spec::parse_match_spec(text, None) else { continue };
        if spec.name.as_exact().is_some_and(|name| name.as_normalized().starts_with("__cuda")) {
            continue;
        }
        if !present.iter().any(|package| spec.matches(package)) {
            lacking.push(format!("`{text}`"));
        }
    }
    if !lacking.is_empty() {
        progress.warn(&format!("packages of the lock need {}, which this machine does not have", lacking.join(", ")), &[]);
    }
    Ok(())
}

/// Files of nobody must not vanish. What another tool installed may go if it is known which files those are.
///
/// # Errors
/// There are files of nobody, or a Python package of another tool without a `RECORD`.
fn refuse_to_lose_files(prefix: &Path, options: &SyncOptions) -> Result<()> {
    let mut foreign = Prefix::open(prefix)?.files_of_nobody()?;
    if !options.no_pip {
        for installed in foreign_packages(prefix)? {
            let Some(files) = installed.files else {
                return Err(Error::failure(format!(
                    "the lock does not have `{} {}`, and it is not known which files those are",
                    installed.name, installed.version
                ))
                .because(format!(
                    "{} installed it, and `{}` has no `RECORD` that can be read",
                    by(&installed.installer),
                    installed.info.display()
                ))
                .hint(format!("remove it with that tool: tare run -p '{}' python -m pip uninstall {}", prefix.display(), installed.name))
                .hint("to replace the environment all the same: --force"));
            };
            let files: HashSet<PathBuf> = files.into_iter().collect();
            foreign.retain(|path| !files.contains(path));
        }
    }
    if foreign.is_empty() {
        return Ok(());
    }
    let named: Vec<String> = foreign.iter().take(3).map(|path| format!("`{}`", path.display())).collect();
    let more = if foreign.len() > 3 { format!(" and {} more", foreign.len() - 3) } else { String::new() };
    let mut error = Error::failure(format!("the environment `{}` has files that belong to none of its packages", prefix.display()))
        .because(format!("they would be lost: {}{more}", named.join(", ")))
        .hint("to replace the environment all the same: --force")
        .hint("to keep it and make another one: -n NAME");
    if foreign.iter().any(|path| path.components().any(|part| part.as_os_str().to_string_lossy().ends_with(".dist-info"))) {
        error = error.hint("packages that pip put there: list them in the `pip:` section of the environment.yml");
    }
    Err(error)
}

/// The Python packages that neither a conda package brought nor tare installed.
fn foreign_packages(prefix: &Path) -> Result<Vec<pypi::installed::Installed>> {
    let mut all = pypi::installed::read(&Prefix::open(prefix)?);
    all.retain(|installed| !installed.is_ours());
    Ok(all)
}

fn by(installer: &str) -> String {
    if installer.is_empty() { "another tool".to_owned() } else { format!("`{installer}`") }
}

/// Names what another tool installed and the lock does not have.
fn tell_what_goes(prefix: &Path, platform: &LockedPlatform, options: &SyncOptions, progress: &dyn Progress) -> Result<()> {
    if options.no_pip {
        return Ok(());
    }
    let verb = if options.dry_run { "would go" } else { "goes" };
    for installed in foreign_packages(prefix)? {
        if !platform.pypi.iter().any(|package| package.name == installed.name) {
            let (name, version) = (&installed.name, &installed.version);
            progress.note(&format!("`{name} {version}` {verb}: {} installed it, and the lock does not have it", by(&installed.installer)));
        }
    }
    Ok(())
}

#[allow(clippy::too_many_arguments)]
fn plan(
    prefix: &Path,
    platform: &LockedPlatform,
    lock: &Lock,
    records: Vec<RepoDataRecord>,
    stamp_facts: Value,
    replace: bool,
    variables: IndexMap<String, String>,
    options: &SyncOptions,
    settings: &Settings,
) -> Result<Plan> {
    let facts = lock.provenance.platforms.get(&platform.name);
    let mut plan = Plan::new(prefix, platform.subdir, records);
    for text in facts.map(|facts| facts.requested.as_slice()).unwrap_or_default() {
        plan.requested.push(spec::parse_match_spec(text, None)?);
    }
    plan.variables = variables;
    plan.command.clone_from(&options.command);
    plan.link_mode = crate::create::link_mode(options.link_mode, settings)?;
    plan.compile = settings.compile.value && !options.no_compile;
    plan.clobber = options.clobber;
    plan.lock_timeout = options.lock_timeout;
    plan.replace = replace;
    plan.keep_history = replace;
    plan.concurrency = settings.concurrency.value;
    plan.cancel = options.cancel.clone();
    plan.link_scripts = crate::create::link_scripts(&options.allow_link_scripts)?;
    plan.metadata = json!({
        "lock": stamp_facts,
        "input_digest": facts.and_then(|facts| facts.input_digest.clone()),
        "channels": if lock.provenance.channels.is_empty() { &lock.channels } else { &lock.provenance.channels },
        "channel_priority": facts.and_then(|facts| facts.channel_priority.clone()),
        "virtual_packages": platform.virtual_packages.iter().map(|package| json!({
            "name": package.name,
            "version": package.version,
            "build": package.build,
            "provenance": package.provenance,
            "source": package.source,
        })).collect::<Vec<_>>(),
        "gpu": facts.and_then(|facts| facts.gpu.as_ref()),
    });
    Ok(plan)
}
