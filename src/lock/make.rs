//! `tare lock`: inputs to a lock, for one or more platforms, with as little change to an older lock as the inputs allow.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;

use rattler_conda_types::{GenericVirtualPackage, MatchSpec, PackageName, RepoDataRecord, Subdir};
use serde_json::{Value, json};

use super::{
    GpuProvenance, HOST_SCHEME, Lock, LockedPlatform, LockedPypi, LockedVirtualPackage, PlatformProvenance, Provenance, ReadOptions,
    for_lock, is_machine_bound, without_credentials, write_tare,
};
use crate::channel::Session;
use crate::config::Settings;
use crate::error::{Error, Kind, Result};
use crate::install::Cancel;
use crate::platform::{self, GpuIntent, Provenance as Origin, VirtualPackage};
use crate::pypi::{self, PypiSource};
use crate::report::{Progress, Silent};
use crate::resolve::{self, Inputs, Prepared, Resolved};
use crate::solve::Favor;
use crate::spec::{Fetched, Location};

/// The solver, for the record.
const ENGINE: &str = "resolvo (rattler_solve 12.0.3)";

/// A driver that runs everything: what would be chosen if the target had a GPU.
const ANY_DRIVER: &str = "99.0";

/// What `lock` is asked for besides its inputs.
#[derive(Debug, Clone, Default)]
pub struct MakeOptions {
    /// `--platform`, each time it was given. None: those of the older lock, of the file, or this machine's.
    pub platforms: Vec<String>,
    /// The lock to write; an older one there is changed as little as possible.
    pub output: PathBuf,
    /// `--update`: packages that may move to their newest version.
    pub update: Vec<String>,
    /// `--upgrade`: all packages may.
    pub upgrade: bool,
    /// `--gpu` was given, `auto` included: what an older lock assumed about the GPU does not count.
    pub gpu_given: bool,
    /// Write nothing.
    pub dry_run: bool,
}

/// A lock that was made.
pub struct Made {
    /// Where it is.
    pub path: PathBuf,
    /// The lock.
    pub lock: Lock,
    /// Its text.
    pub text: String,
    /// Whether the file has other bytes now (with `dry_run`: would have).
    pub changed: bool,
    /// What became different on each platform.
    pub changes: Vec<PlatformChange>,
}

/// What became different on one platform.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize)]
pub struct PlatformChange {
    /// Its name.
    pub platform: String,
    /// Number of packages now.
    pub packages: usize,
    /// `name version build` of those that are new.
    pub added: Vec<String>,
    /// Those that are gone.
    pub removed: Vec<String>,
    /// `name old -> new`.
    pub changed: Vec<String>,
}

/// Makes a lock and writes it, unless it is the same already.
///
/// # Errors
/// As [`resolve::prepare`] and [`resolve::resolve`], each for its platform; kind usage where a GPU driver changes what is chosen and nobody said whether
/// there is one; an older lock that cannot be read, unless everything is upgraded.
pub async fn make(inputs: &Inputs, options: &MakeOptions, settings: &Settings, progress: Arc<dyn Progress>) -> Result<Made> {
    let session = Session::open(settings, progress.clone())?;
    let mut inputs = inputs.clone();
    inputs.target_given = true;
    let fetched = resolve::fetch(&inputs, &session).await?;
    let (old_text, old) = older(options)?;
    let platforms = platforms(&inputs, options, old.as_ref(), &fetched, settings)?;
    let favor = favor(options, old.as_ref())?;

    let mut lock = Lock { environment: rattler_lock::DEFAULT_ENVIRONMENT_NAME.to_owned(), ..Lock::default() };
    for (number, name) in platforms.iter().enumerate() {
        let mut of_platform = inputs.clone();
        of_platform.platform = Some(name.clone());
        if !name.parse::<Subdir>().is_ok_and(has_gpus) {
            // NVIDIA has no driver for it, whatever the other platforms are assumed to have.
            of_platform.cuda = None;
        }
        let before = old.as_ref().and_then(|old| old.platform(name));
        let remembered = recall(&mut of_platform, old.as_ref(), before, options);
        let prepared = resolve::prepare_fetched(&fetched, &of_platform, settings, &*progress)?;
        let locked = before.map(|before| usable(before, &prepared)).unwrap_or_default();
        let solved = resolve::resolve(&prepared, locked.clone(), favor.clone(), &of_platform, settings, &session, progress.clone()).await;
        let decided_by = decided_by(&prepared, &of_platform, settings).or(remembered);
        let mut matters = solved.as_ref().is_ok_and(|resolved| resolved.records.iter().any(needs_cuda));
        if has_gpus(prepared.target.subdir) && prepared.spec.explicit.is_none() {
            if !matters && let Ok(resolved) = &solved {
                matters = candidates_need_cuda(&prepared, resolved, &session).await?;
            }
            let unsatisfiable = solved.as_ref().is_err_and(|error| error.kind() == Kind::Unsatisfiable);
            if decided_by.is_none() && (matters || unsatisfiable) {
                match undecided(&prepared, &solved, &locked, &favor, &of_platform, settings, &session).await? {
                    Some(error) => return Err(error),
                    None => matters = false,
                }
            }
        }
        let resolved = solved.map_err(|error| if platforms.len() > 1 { on_platform(error, name) } else { error })?;
        if let Some(solution) = &resolved.solution {
            resolve::tell(solution, &*progress);
        }
        if matters && let Some(source) = &decided_by {
            let assumed = prepared.target.cuda().filter(|_| of_platform.gpu != GpuIntent::None);
            let driver = assumed.map_or_else(|| "no GPU driver".to_owned(), |cuda| format!("a driver for CUDA {}", cuda.package.version));
            progress.note(&format!("{name}: the lock assumes {driver} ({source})"));
        }
        if number == 0 {
            start(&mut lock, &prepared, &of_platform, &*progress);
        }
        fill(&mut lock, name, &prepared, &resolved, decided_by, matters);
        if prepared.pip.is_some() {
            let engine = old.as_ref().and_then(|old| old.provenance.pypi_engine.clone());
            let solved = pypi_half(&mut lock, before, engine, &prepared, &resolved, options, settings, &session, progress.clone()).await;
            solved.map_err(|error| if platforms.len() > 1 { on_platform(error, name) } else { error })?;
        }
    }
    lock.sort();
    let text = write_tare(&lock)?;
    let changed = old_text.as_deref() != Some(text.as_bytes());
    let changes =
        lock.platforms.iter().map(|platform| change(old.as_ref().and_then(|old| old.platform(&platform.name)), platform)).collect();
    if changed && !options.dry_run {
        write(&options.output, &text)?;
    }
    Ok(Made { path: options.output.clone(), lock, text, changed, changes })
}

/// Resolves the `pip:` section for the platform that was filled last, keeping what an older lock holds where that fits.
#[allow(clippy::too_many_arguments)]
async fn pypi_half(
    lock: &mut Lock,
    before: Option<&LockedPlatform>,
    old_engine: Option<String>,
    prepared: &Prepared,
    resolved: &Resolved,
    options: &MakeOptions,
    settings: &Settings,
    session: &Session,
    progress: Arc<dyn Progress>,
) -> Result<()> {
    let Some(mut section) = prepared.pip.clone() else { return Ok(()) };
    section.complete(session).await?;
    let free: BTreeSet<String> = options.update.iter().map(|name| crate::prefix::normalize(name)).collect();
    if !options.upgrade {
        let old = before.into_iter().flat_map(|before| &before.pypi);
        let held: Vec<_> = old.filter(|old| !free.contains(&old.name)).filter_map(held).collect();
        section.hold(&held);
    }
    let mut workshop = resolve::workshop(prepared, &resolved.records, settings, session, progress, Cancel::new())?;
    let solution = workshop.resolve(&section).await?;
    let mut indexes: Vec<String> = section.options.index_url.iter().chain(&section.options.extra_index_urls).cloned().collect();
    for record in &solution.records {
        if let PypiSource::Archive { index: Some(index), .. } = &record.source {
            indexes.push(index.to_string());
        }
    }
    for index in indexes.iter().map(|index| without_credentials(index)) {
        let plain = |text: &str| text.trim_end_matches('/').to_owned();
        if !lock.indexes.iter().any(|known| plain(known) == plain(&index)) {
            lock.indexes.push(index);
        }
    }
    for link in &section.options.find_links {
        let text = match link {
            Location::Path(path) => path.display().to_string(),
            Location::Url(url) => without_credentials(url.as_str()),
        };
        if !lock.find_links.contains(&text) {
            lock.find_links.push(text);
        }
    }
    let mut packages: Vec<LockedPypi> = solution.records.iter().map(super::locked_pypi).collect();
    packages.sort();
    if let Some(engine) = &solution.engine {
        // The same packages again are still those that the program of then has chosen.
        let kept = old_engine.filter(|_| before.is_some_and(|before| before.pypi == packages));
        lock.provenance.pypi_engine = Some(kept.unwrap_or_else(|| format!("{} {}", engine.name, engine.version)));
    }
    if let Some(platform) = lock.platforms.last_mut() {
        platform.pypi = packages;
    }
    Ok(())
}

/// Name and version of a package of an older lock that may stay.
fn held(old: &LockedPypi) -> Option<(pypi::Name, pypi::Version)> {
    if old.direct || old.vcs.is_some() || old.editable {
        return None;
    }
    Some((old.name.parse().ok()?, old.version.as_ref()?.parse().ok()?))
}

/// The lock that is there already, and its bytes.
fn older(options: &MakeOptions) -> Result<(Option<Vec<u8>>, Option<Lock>)> {
    let bytes = match crate::files::read(&options.output, crate::spec::source::MAX_TEXT as u64) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok((None, None)),
        Err(error) => return Err(Error::io("read the lock", &options.output, &error)),
    };
    let name = options.output.display().to_string();
    match super::read(&name, &bytes, &ReadOptions::default()) {
        Ok(lock) => Ok((Some(bytes), Some(lock))),
        Err(_) if options.upgrade && super::is_lock(&name, &bytes) => Ok((Some(bytes), None)),
        Err(error) => {
            Err(error.context(format!("cannot keep what `{name}` has locked")).hint("to make it anew: --upgrade, or another file: -o FILE"))
        }
    }
}

fn platforms(inputs: &Inputs, options: &MakeOptions, old: Option<&Lock>, fetched: &[Fetched], settings: &Settings) -> Result<Vec<String>> {
    let mut names = Vec::new();
    for text in &options.platforms {
        names.push(platform::parse_subdir(text, "--platform")?.to_string());
    }
    if names.is_empty() {
        let mut native = inputs.clone();
        native.platform = None;
        // Only for `platforms:`; what is worth telling is told when each platform is prepared.
        let prepared = resolve::prepare_fetched(fetched, &native, settings, &Silent)?;
        names = prepared.spec.platforms.iter().map(ToString::to_string).collect();
        if names.is_empty()
            && let Some(old) = old
        {
            names = old
                .platforms
                .iter()
                .filter(|platform| platform.name == platform.subdir.as_str())
                .map(|platform| platform.name.clone())
                .collect();
        }
        if names.is_empty() {
            names.push(prepared.target.subdir.to_string());
        }
    }
    names.sort();
    names.dedup();
    if names.iter().any(|name| name == "noarch") {
        return Err(Error::usage("`noarch` is no platform that an environment is for").hint("for instance: --platform linux-64"));
    }
    Ok(names)
}

fn favor(options: &MakeOptions, old: Option<&Lock>) -> Result<Favor> {
    if options.upgrade {
        return Ok(Favor::Newest);
    }
    let mut names: BTreeSet<PackageName> = BTreeSet::new();
    for text in &options.update {
        let name: PackageName = text.parse().map_err(|error| Error::usage(format!("`{text}` is no package name")).because(error))?;
        let known =
            |old: &Lock| old.platforms.iter().any(|platform| platform.conda.iter().any(|record| record.package_record.name == name));
        let python = crate::prefix::normalize(text);
        let in_pypi = |old: &Lock| old.platforms.iter().any(|platform| platform.pypi.iter().any(|package| package.name == python));
        if !old.is_some_and(known) && old.is_some_and(in_pypi) {
            continue;
        }
        if !old.is_some_and(known) {
            let error = Error::usage(format!("`{text}` is not in `{}`", options.output.display()));
            let all: BTreeSet<&str> = old
                .into_iter()
                .flat_map(|old| &old.platforms)
                .flat_map(|platform| &platform.conda)
                .map(|record| record.package_record.name.as_normalized())
                .collect();
            return Err(match crate::spec::source::nearest(text, all) {
                Some(near) => error.hint(format!("did you mean `{near}`?")),
                None => error.hint("only a package of the lock can be updated"),
            });
        }
        names.insert(name);
    }
    Ok(if names.is_empty() { Favor::Locked } else { Favor::AllBut(names) })
}

/// Fills what the command line leaves open about the machine from an older lock: re-made on another machine, a lock stays what it was. Returns who
/// decided about the GPU then.
fn recall(inputs: &mut Inputs, old: Option<&Lock>, before: Option<&LockedPlatform>, options: &MakeOptions) -> Option<String> {
    let (old, before) = (old.filter(|old| old.provenance.schema > 0)?, before?);
    let gpu_said = options.gpu_given || inputs.cuda.is_some();
    if !gpu_said {
        match old.provenance.gpu_intent.as_deref() {
            Some("none") => inputs.gpu = GpuIntent::None,
            Some("require") => inputs.gpu = GpuIntent::Require,
            _ => {}
        }
    }
    let decided_by = old.provenance.platforms.get(&before.name).and_then(|facts| facts.gpu.as_ref()?.decided_by.clone());
    let decided_by = decided_by.filter(|_| !gpu_said);
    let packages = before.virtual_packages.iter().filter(|package| !(gpu_said && package.name.starts_with("__cuda")));
    inputs.recorded = platform::Recorded {
        packages: packages
            .filter_map(|package| {
                let provenance = match package.provenance.as_deref()? {
                    "detected" => Origin::Detected,
                    "assumed" => Origin::Assumed,
                    "overridden" => Origin::Overridden,
                    _ => return None,
                };
                let source = package.source.clone().unwrap_or_default();
                Some(VirtualPackage { package: package.generic().ok()?, provenance, source })
            })
            .collect(),
        gpu_decided: decided_by.is_some(),
    };
    decided_by
}

/// The records of an older lock that may stay: those of channels that are still asked for.
fn usable(before: &LockedPlatform, prepared: &Prepared) -> Vec<RepoDataRecord> {
    let hosts = prepared.channels.iter().any(|channel| channel.is_host);
    let bases: Vec<String> = prepared
        .channels
        .iter()
        .map(|channel| without_credentials(channel.channel.base_url.as_ref().as_str()).trim_end_matches('/').to_owned() + "/")
        .collect();
    before
        .conda
        .iter()
        .filter(|record| {
            if record.url.scheme() == HOST_SCHEME {
                return hosts;
            }
            let url = without_credentials(record.url.as_str());
            bases.iter().any(|base| url.starts_with(base))
        })
        .cloned()
        .collect()
}

fn on_platform(error: Error, name: &str) -> Error {
    error.context(format!("the environment cannot be locked for {name}"))
}

fn has_gpus(subdir: Subdir) -> bool {
    subdir.is_linux() || subdir.is_windows()
}

/// Who said whether the target has a GPU driver; `None` if nobody did.
fn decided_by(prepared: &Prepared, inputs: &Inputs, settings: &Settings) -> Option<String> {
    match inputs.gpu {
        GpuIntent::None => return Some("--gpu none".to_owned()),
        GpuIntent::Require if prepared.target.cuda().is_none() => return Some("--gpu require".to_owned()),
        _ => {}
    }
    if let Some(cuda) = prepared.target.cuda() {
        return Some(match cuda.provenance {
            Origin::Detected => format!("detected by {}", cuda.source),
            _ => cuda.source.clone(),
        });
    }
    if inputs.cuda.is_some() {
        return Some("--cuda".to_owned());
    }
    if inputs.virtual_packages.iter().any(|text| text.split('=').next() == Some("__cuda")) {
        return Some("--virtual-package".to_owned());
    }
    if settings.env.get("CONDA_OVERRIDE_CUDA").is_some() || prepared.spec.variables.contains_key("CONDA_OVERRIDE_CUDA") {
        return Some("CONDA_OVERRIDE_CUDA".to_owned());
    }
    settings
        .override_virtual_packages
        .value
        .keys()
        .any(|name| matches!(name.trim_start_matches('_'), "cuda"))
        .then(|| settings.override_virtual_packages.source.clone())
}

fn needs_cuda(record: &RepoDataRecord) -> bool {
    let package = &record.package_record;
    package.depends.iter().chain(&package.constrains).any(|text| PackageName::normalized_name_from_matchspec_str(text) == "__cuda")
}

/// Whether some build of a chosen package asks for `__cuda`.
async fn candidates_need_cuda(prepared: &Prepared, resolved: &Resolved, session: &Session) -> Result<bool> {
    let names: Vec<MatchSpec> = resolved.records.iter().map(|record| MatchSpec::from(record.package_record.name.clone())).collect();
    let repodata = session.quiet().repodata(&prepared.channels, &[prepared.target.subdir, Subdir::NoArch], &names, false).await?;
    Ok(repodata.iter().flat_map(rattler_repodata_gateway::RepoData::iter).any(needs_cuda))
}

/// The error to give if a GPU driver changes what is chosen and nobody said whether there is one. It is proven by a second solve.
#[allow(clippy::too_many_arguments)]
async fn undecided(
    prepared: &Prepared,
    solved: &Result<Resolved>,
    locked: &[RepoDataRecord],
    favor: &Favor,
    inputs: &Inputs,
    settings: &Settings,
    session: &Session,
) -> Result<Option<Error>> {
    let (Ok(name), Ok(version), Ok(build_string)) = ("__cuda".parse(), ANY_DRIVER.parse(), "0".parse()) else { return Ok(None) };
    let mut target = prepared.target.clone();
    target.virtual_packages.push(VirtualPackage {
        package: GenericVirtualPackage { name, version, build_string },
        provenance: Origin::Assumed,
        source: "--cuda".to_owned(),
    });
    let with_gpu = Prepared { target, ..again(prepared) };
    let quiet = session.quiet();
    let other = resolve::resolve(&with_gpu, locked.to_vec(), favor.clone(), inputs, settings, &quiet, Arc::new(Silent)).await;
    let Ok(other) = other else { return Ok(None) };
    let subdir = prepared.target.subdir;
    let mut error = match solved {
        Ok(resolved) => {
            let urls: BTreeSet<&str> = resolved.records.iter().map(|record| record.url.as_str()).collect();
            let Some(different) = different(&resolved.records, &other.records) else { return Ok(None) };
            if other.records.iter().all(|record| urls.contains(record.url.as_str())) && urls.len() == other.records.len() {
                return Ok(None);
            }
            Error::usage(format!("it is not said whether the lock is for machines with a GPU ({subdir})"))
                .because(format!("with a driver `{}` is chosen, without one `{}`", different.1, different.0))
        }
        Err(_) => {
            let wanted = other.records.iter().find(|record| needs_cuda(record)).map(title).unwrap_or_default();
            Error::usage(format!("it is not said whether the lock is for machines with a GPU ({subdir})"))
                .because(format!("without a driver there is no solution; with one, `{wanted}` is chosen"))
        }
    };
    error = error.hint("for machines with a GPU: --cuda 12.6 (the newest CUDA version their driver supports)");
    if solved.is_ok() {
        error = error.hint("for machines without one: --gpu none");
    }
    Ok(Some(error))
}

fn again(prepared: &Prepared) -> Prepared {
    Prepared {
        spec: prepared.spec.clone(),
        target: prepared.target.clone(),
        channels: prepared.channels.clone(),
        priority: prepared.priority,
        exclude_newer: prepared.exclude_newer,
        gpu: prepared.gpu,
        pip: prepared.pip.clone(),
        pip_resolver: prepared.pip_resolver,
        pinned: prepared.pinned.clone(),
        digest: prepared.digest.clone(),
        parts: prepared.parts.clone(),
    }
}

fn title(record: &RepoDataRecord) -> String {
    let package = &record.package_record;
    format!("{} {} {}", package.name.as_normalized(), package.version, package.build)
}

/// The first package that differs between two solutions, best one that is in both.
fn different(without: &[RepoDataRecord], with: &[RepoDataRecord]) -> Option<(String, String)> {
    let of = |records: &[RepoDataRecord]| -> BTreeMap<String, (String, String, bool)> {
        records
            .iter()
            .map(|record| {
                (record.package_record.name.as_normalized().to_owned(), (title(record), record.url.to_string(), needs_cuda(record)))
            })
            .collect()
    };
    let (a, b) = (of(without), of(with));
    let in_both = || b.iter().filter_map(|(name, new)| a.get(name).filter(|old| old.1 != new.1).map(|old| (old, new)));
    let best = in_both().find(|(_, new)| new.2).or_else(|| in_both().next());
    if let Some((old, new)) = best {
        return Some((old.0.clone(), new.0.clone()));
    }
    let extra = b.iter().find(|(name, _)| !a.contains_key(*name));
    let missing = a.iter().find(|(name, _)| !b.contains_key(*name));
    match (extra, missing) {
        (None, None) => None,
        (extra, missing) => Some((
            missing.map_or_else(|| "nothing".to_owned(), |(_, old)| old.0.clone()),
            extra.map_or_else(|| "nothing".to_owned(), |(_, new)| new.0.clone()),
        )),
    }
}

/// What all platforms have in common.
fn start(lock: &mut Lock, prepared: &Prepared, inputs: &Inputs, progress: &dyn Progress) {
    let spec = &prepared.spec;
    lock.channels =
        prepared
            .channels
            .iter()
            .map(|channel| {
                if channel.is_host { format!("{HOST_SCHEME}:///") } else { without_credentials(channel.channel.base_url.as_ref().as_str()) }
            })
            .collect();
    let mut provenance = Provenance {
        name: spec.name.clone(),
        engine: Some(ENGINE.to_owned()),
        channels: prepared.channels.iter().map(|channel| channel.display.clone()).collect(),
        exclude_newer: prepared.exclude_newer.map(|time| time.to_string()),
        gpu_intent: text_of(&json!(prepared.gpu)),
        pip_skipped: inputs.no_pip && !spec.pip.is_empty(),
        pip: if inputs.no_pip { Vec::new() } else { spec.pip.iter().map(crate::spec::PipItem::shown).collect() },
        ..Provenance::default()
    };
    for (name, value) in &spec.variables {
        if is_secret(name, value) {
            provenance.secret_variables.insert(name.clone());
        } else {
            provenance.variables.insert(name.clone(), value.clone());
        }
    }
    if !provenance.secret_variables.is_empty() {
        let names: Vec<String> = provenance.secret_variables.iter().map(|name| format!("`{name}`")).collect();
        progress.warn(
            &format!("the value of {} is not written into the lock: it looks like a secret", names.join(", ")),
            &["set it where the environment is used: export NAME=…".to_owned()],
        );
    }
    lock.provenance = provenance;
}

/// Whether the value of a variable must not be written down.
pub(super) fn is_secret(name: &str, value: &str) -> bool {
    let name = name.to_ascii_uppercase();
    let words = ["TOKEN", "PASSWORD", "PASSWD", "SECRET", "CREDENTIAL", "PRIVATE_KEY", "API_KEY", "APIKEY", "ACCESS_KEY"];
    // `TOKENIZERS_PARALLELISM` is none.
    let named = words.iter().any(|word| {
        name.match_indices(word).any(|(at, _)| {
            let end = at + word.len();
            let after = name[end..].strip_prefix('S').unwrap_or(&name[end..]);
            after.is_empty() || after.starts_with('_')
        })
    });
    named && !value.is_empty() || crate::spec::mask_secrets(value) != value
}

fn text_of(value: &Value) -> Option<String> {
    value.as_str().map(str::to_owned)
}

fn fill(lock: &mut Lock, name: &str, prepared: &Prepared, resolved: &Resolved, decided_by: Option<String>, matters: bool) {
    let mut platform = LockedPlatform::new(name, prepared.target.subdir);
    platform.conda = resolved.records.iter().map(for_lock).collect();
    let without_gpu = prepared.gpu == GpuIntent::None;
    platform.virtual_packages = prepared
        .target
        .virtual_packages
        .iter()
        .filter(|package| !(without_gpu && matches!(package.package.name.as_normalized(), "__cuda" | "__cuda_arch")))
        .map(|package| LockedVirtualPackage {
            name: package.package.name.as_normalized().to_owned(),
            version: package.package.version.to_string(),
            build: package.package.build_string.to_string(),
            provenance: text_of(&json!(package.provenance)),
            source: Some(package.source.clone()).filter(|source| !source.is_empty()),
        })
        .collect();
    platform.virtual_packages.sort_by(|a, b| a.name.cmp(&b.name));
    let solution = resolved.solution.as_ref();
    let requested: BTreeSet<String> = resolved.requested.iter().map(|spec| crate::spec::mask_secrets(&spec.to_string())).collect();
    let facts = PlatformProvenance {
        input_digest: Some(prepared.digest.clone()),
        requested: requested.into_iter().collect(),
        channel_priority: solution.and_then(|solution| text_of(&json!(solution.priority_used))),
        channel_priority_fell_back: solution.is_some_and(|solution| solution.priority_fell_back),
        gpu: solution.map(|solution| GpuProvenance {
            variant: text_of(&json!(solution.gpu.variant)).unwrap_or_default(),
            cuda: solution.gpu.cuda.clone(),
            driver_limit: solution.gpu.driver_limit.clone(),
            decided_by,
            matters,
        }),
        machine_bound: resolved
            .records
            .iter()
            .filter(|record| is_machine_bound(record))
            .map(|record| record.package_record.name.as_normalized().to_owned())
            .collect(),
        ..PlatformProvenance::default()
    };
    lock.provenance.platforms.insert(name.to_owned(), facts);
    lock.platforms.push(platform);
}

fn change(before: Option<&LockedPlatform>, now: &LockedPlatform) -> PlatformChange {
    let of = |platform: &LockedPlatform| -> BTreeMap<String, (String, String)> {
        platform
            .conda
            .iter()
            .map(|record| {
                let package = &record.package_record;
                (package.name.as_normalized().to_owned(), (format!("{} {}", package.version, package.build), record.url.to_string()))
            })
            .chain(platform.pypi.iter().map(|package| {
                let version = package.version.clone().unwrap_or_default();
                (format!("{} (pypi)", package.name), (version, package.location.clone()))
            }))
            .collect()
    };
    let (old, new) = (before.map(of).unwrap_or_default(), of(now));
    let mut change = PlatformChange { platform: now.name.clone(), packages: new.len(), ..PlatformChange::default() };
    for (name, (version, url)) in &new {
        match old.get(name) {
            None => change.added.push(format!("{name} {version}")),
            Some((_, known)) if known == url => {}
            Some((before, _)) => change.changed.push(format!("{name} {before} -> {version}")),
        }
    }
    change.removed =
        old.iter().filter(|(name, _)| !new.contains_key(*name)).map(|(name, (version, _))| format!("{name} {version}")).collect();
    change
}

/// Whole or not at all.
fn write(path: &std::path::Path, text: &str) -> Result<()> {
    use std::io::Write as _;
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(std::path::Path::new("."));
    let failed = |error: std::io::Error| Error::io("write the lock", path, &error);
    let mut file = tempfile::Builder::new().prefix(".tare-lock-").tempfile_in(folder).map_err(failed)?;
    file.write_all(text.as_bytes()).map_err(failed)?;
    file.as_file().sync_all().map_err(failed)?;
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt as _;
        // As an editor would have made it; a file that is there keeps its mode.
        let mode = std::fs::metadata(path).map_or(0o644, |metadata| metadata.permissions().mode() & 0o777);
        file.as_file().set_permissions(std::fs::Permissions::from_mode(mode)).map_err(failed)?;
    }
    file.persist(path).map_err(|error| failed(error.error))?;
    Ok(())
}
