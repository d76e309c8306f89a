//! From the inputs of a command to a solution: reads the files, judges the machine, names the channels, loads the
//! records, solves. One path for `create` and for everything that plans.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;

use rattler_conda_types::{MatchSpec, RepoDataRecord, Subdir};
use sha2::{Digest, Sha256};

use crate::channel::{self, ResolvedChannel, Session};
use crate::config::Settings;
use crate::error::{Error, Result};
use crate::platform::{self, GpuIntent, Target, TargetOptions};
use crate::pypi::{EngineChoice, PypiPlan, ReadyWheel, Section, WheelFile, Workshop};
use crate::report::{Phase, Progress};
use crate::solve::{self, PriorityChoice, Solution};
use crate::spec::{self, ChannelEntry, Dependency, EnvSpec, Fetched, Input};

/// What a command was asked for.
#[derive(Debug, Clone, Default)]
pub struct Inputs {
    /// Values of `-f`.
    pub files: Vec<String>,
    /// Match specs of the command line.
    pub specs: Vec<String>,
    /// Values of `-c`, which come before the channels of files.
    pub channels: Vec<String>,
    /// `--override-channels`.
    pub override_channels: bool,
    /// `--channel-priority`; else the setting.
    pub priority: Option<PriorityChoice>,
    /// `--exclude-newer`; else the setting.
    pub exclude_newer: Option<String>,
    /// `--platform`.
    pub platform: Option<String>,
    /// `--cuda`.
    pub cuda: Option<String>,
    /// `--virtual-package`.
    pub virtual_packages: Vec<String>,
    /// `--gpu`.
    pub gpu: GpuIntent,
    /// `--no-pip`.
    pub no_pip: bool,
    /// `--pip-resolver`; else the setting.
    pub pip_resolver: Option<EngineChoice>,
    /// The environment has pip already.
    pub has_pip: bool,
    /// Add the configuration's `create_default_packages`.
    pub default_packages: bool,
    /// `-n` or `-p` was given.
    pub target_given: bool,
    /// Channels to use where neither the command line alone (`override_channels`) nor a file decides: those that an
    /// existing environment was made from. The configured ones do not count then.
    pub fallback_channels: Vec<String>,
    /// The machine of an older lock.
    pub recorded: platform::Recorded,
}

/// The request after reading, before any repodata was looked at.
pub struct Prepared {
    /// The merged inputs.
    pub spec: EnvSpec,
    /// The machine.
    pub target: Target,
    /// Channels in priority order.
    pub channels: Vec<ResolvedChannel>,
    /// How channels are ranked.
    pub priority: PriorityChoice,
    /// Nothing newer than this.
    pub exclude_newer: Option<jiff::Timestamp>,
    /// What to do about the GPU.
    pub gpu: GpuIntent,
    /// The `pip:` section, its local files read; `None` where there is none, or it is skipped.
    pub pip: Option<Section>,
    /// What resolves it.
    pub pip_resolver: EngineChoice,
    /// Pins of the configuration, with their source.
    pub pinned: Vec<solve::PinnedSpec>,
    /// sha256 (hex) of everything above that decides what is installed. Equal digests mean equal requests; repodata and
    /// what was detected of the machine are not part of it.
    pub digest: String,
    /// The same for each part of the request, to say later which of them differs. Digests, because variables may be secret.
    pub parts: serde_json::Map<String, serde_json::Value>,
}

/// Reads the inputs and judges the machine.
///
/// # Errors
/// Files that cannot be read or are malformed, bad options, unknown channels.
pub async fn prepare(inputs: &Inputs, settings: &Settings, session: &Session, progress: &dyn Progress) -> Result<Prepared> {
    let fetched = fetch(inputs, session).await?;
    prepare_fetched(&fetched, inputs, settings, progress)
}

fn current_folder() -> Result<PathBuf> {
    std::env::current_dir().map_err(|error| Error::failure("the current folder is gone").because(error))
}

/// The texts of the input files.
///
/// # Errors
/// Files that cannot be read, URLs that do not answer.
pub async fn fetch(inputs: &Inputs, session: &Session) -> Result<Vec<Fetched>> {
    let cwd = current_folder()?;
    let mut fetched = Vec::new();
    for file in &inputs.files {
        let input = Input::parse(file)?;
        let (local, input) = read_local(input, cwd.clone()).await;
        fetched.push(match (local?, input) {
            (Some(text), _) => text,
            (None, Input::Url(url)) => session.fetch_text(&url).await?,
            (None, _) => return Err(Error::failure(format!("cannot read `{file}`"))),
        });
    }
    Ok(fetched)
}

/// What the files and specs of `inputs` say, judged for the platform of `inputs`.
///
/// # Errors
/// Malformed files or specs.
pub fn read_inputs(inputs: &Inputs, fetched: &[Fetched], settings: &Settings) -> Result<EnvSpec> {
    let mut options = TargetOptions::from_settings(settings.env.clone(), settings);
    options.platform.clone_from(&inputs.platform);
    read_spec(fetched, inputs, platform::subdir(&options)?.0, current_folder()?)
}

/// As [`prepare`], from texts that were read already.
///
/// # Errors
/// As [`prepare`].
pub fn prepare_fetched(fetched: &[Fetched], inputs: &Inputs, settings: &Settings, progress: &dyn Progress) -> Result<Prepared> {
    let cwd = current_folder()?;
    let mut options = TargetOptions::from_settings(settings.env.clone(), settings);
    options.platform.clone_from(&inputs.platform);
    options.cuda.clone_from(&inputs.cuda);
    options.gpu = inputs.gpu;
    options.virtual_packages.clone_from(&inputs.virtual_packages);
    let subdir = platform::subdir(&options)?.0;

    let mut spec = read_spec(fetched, inputs, subdir, cwd.clone())?;
    for warning in &spec.warnings {
        progress.warn(&warning.to_string(), warning.hints());
    }
    let pip = if inputs.no_pip {
        if !spec.pip.is_empty() {
            progress.note(&format!("the `pip:` section is skipped (--no-pip): {} not installed", count(spec.pip.len(), "item")));
        }
        None
    } else {
        Some(Section::load(&spec.pip, &|name| std::env::var(name).ok())?).filter(|section| !section.is_empty())
    };
    if pip.is_some() && spec.explicit.is_none() && !inputs.has_pip && !spec.dependencies.iter().any(is_pip) {
        progress.warn(
            "`pip` is added to the dependencies: the `pip:` section needs it",
            &["name it yourself, before the section: `- pip`".to_owned(), "to leave the section out: --no-pip".to_owned()],
        );
        spec.dependencies.push(Dependency::Match { spec: spec::parse_match_spec("pip", None)?, text: "pip".to_owned(), place: None });
    }
    if !spec.platforms.is_empty() && !spec.platforms.contains(&subdir) {
        let listed: Vec<_> = spec.platforms.iter().map(|platform| platform.as_str()).collect();
        progress.warn(&format!("the file is for {}, this solve is for {subdir}", listed.join(", ")), &[]);
    }

    options.variables.clone_from(&spec.variables);
    let mut target = platform::target(&options)?;
    let overridden = settings.env.get("CONDA_OVERRIDE_CUDA").is_some() || spec.variables.contains_key("CONDA_OVERRIDE_CUDA");
    target.recall(&inputs.recorded, inputs.gpu == GpuIntent::None || overridden);
    for remark in &target.remarks {
        progress.note(remark);
    }
    let mut entries: Vec<ChannelEntry> = inputs.channels.iter().map(|text| ChannelEntry { text: text.clone(), place: None }).collect();
    let from_command_line = !entries.is_empty();
    entries.extend(spec.channels.iter().cloned());
    let fall_back = !inputs.override_channels && !spec.channels_declared && !inputs.fallback_channels.is_empty();
    if fall_back {
        let known: BTreeSet<String> = entries.iter().map(|entry| entry.text.clone()).collect();
        let more = inputs.fallback_channels.iter().filter(|text| !known.contains(*text));
        entries.extend(more.map(|text| ChannelEntry { text: text.clone(), place: None }));
    }
    // `conda-forge::numpy` asks for its channel too, after those that are listed.
    entries.extend(spec.dependencies.iter().filter_map(channel_of));
    let wanted_python = python_versions(&spec);
    let host = || channel::host_url(settings, wanted_python.clone(), progress);
    // An explicit list says itself where everything is.
    let needs_channels = spec.explicit.is_none() || !spec.dependencies.is_empty();
    let expanded = if !needs_channels {
        channel::Expanded::default()
    } else {
        channel::expand(
            &entries,
            settings,
            channel::ExpandOptions {
                override_channels: inputs.override_channels || fall_back,
                declared: spec.channels_declared || from_command_line || fall_back,
                nodefaults: spec.nodefaults,
                root_dir: &cwd,
                host: Some(&host),
            },
        )?
    };
    for note in &expanded.notes {
        progress.note(note);
    }
    let channels = expanded.channels;

    let priority = match inputs.priority {
        Some(priority) => priority,
        None => parse_priority(&settings.channel_priority.value, &settings.channel_priority.source)?,
    };
    let exclude_newer = match &inputs.exclude_newer {
        Some(text) => Some(
            crate::config::parse_exclude_newer(text, jiff::Timestamp::now())
                .map_err(|why| Error::usage("bad value of `--exclude-newer`").because(why))?,
        ),
        None => settings.exclude_newer.value,
    };
    let mut pinned = Vec::new();
    for text in &settings.pinned_packages.value {
        let source = format!("pinned_packages of {}", settings.pinned_packages.source);
        pinned.push(solve::PinnedSpec {
            spec: spec::parse_match_spec(text, None).map_err(|error| error.context(format!("bad pin in {source}")))?,
            source,
        });
    }
    let pip_resolver = match inputs.pip_resolver {
        Some(choice) => choice,
        None => settings.pip_resolver.value.parse()?,
    };
    let (digest, parts) = digest(&spec, &target, &channels, priority, exclude_newer, pip.as_ref(), inputs, settings);
    Ok(Prepared { spec, target, channels, priority, exclude_newer, gpu: inputs.gpu, pip, pip_resolver, pinned, digest, parts })
}

/// Whether a dependency brings pip, or uv in its place.
fn is_pip(dependency: &Dependency) -> bool {
    match dependency {
        Dependency::Match { spec, .. } => name_of(spec).is_some_and(|name| name == "pip"),
        Dependency::Package { url, .. } => {
            url.path_segments().and_then(|mut parts| parts.next_back()).is_some_and(|file| file.starts_with("pip-"))
        }
    }
}

/// How the pip half of a request is made.
#[derive(Clone, Default)]
pub struct PipOptions {
    /// Only resolve: nothing is built, so wheels made from sources are not at hand.
    pub dry_run: bool,
    /// Python packages that are there and should stay as they are where that can be.
    pub held: Vec<(crate::pypi::Name, crate::pypi::Version)>,
    /// Files of other packages may be overwritten.
    pub clobber: bool,
    /// Stops the work.
    pub cancel: crate::install::Cancel,
}

/// What resolves and builds the pip half of `prepared`, whose conda half is `records`.
///
/// # Errors
/// The conda half has no Python.
pub(crate) fn workshop<'a>(
    prepared: &'a Prepared,
    records: &'a [RepoDataRecord],
    settings: &Settings,
    session: &'a Session,
    progress: Arc<dyn Progress>,
    cancel: crate::install::Cancel,
) -> Result<Workshop<'a>> {
    Workshop::new(crate::pypi::Context {
        records,
        target: &prepared.target,
        session,
        concurrency: settings.concurrency.value,
        choice: prepared.pip_resolver,
        exclude_newer: prepared.exclude_newer,
        progress,
        cancel,
    })
}

/// Resolves the `pip:` section together with the conda half, and builds what has no wheel. `None` without a section.
///
/// # Errors
/// As [`crate::pypi::Workshop::resolve`] and [`crate::pypi::Workshop::ready`].
pub async fn pip_half(
    prepared: &Prepared,
    records: &[RepoDataRecord],
    options: &PipOptions,
    settings: &Settings,
    session: &Session,
    progress: Arc<dyn Progress>,
) -> Result<Option<PypiPlan>> {
    let Some(section) = &prepared.pip else { return Ok(None) };
    let mut section = section.clone();
    section.complete(session).await?;
    section.hold(&options.held);
    let mut workshop = workshop(prepared, records, settings, session, progress, options.cancel.clone())?;
    if !options.dry_run {
        return workshop.plan(&section, options.clobber).await.map(Some);
    }
    let resolution = workshop.resolve(&section).await?;
    let remote = |record| ReadyWheel { record, wheel: WheelFile::Remote };
    Ok(Some(PypiPlan {
        wheels: resolution.records.into_iter().map(remote).collect(),
        python: resolution.python,
        engine: resolution.engine,
        clobber: options.clobber,
    }))
}

/// The channel that a dependency names for itself.
fn channel_of(dependency: &Dependency) -> Option<ChannelEntry> {
    let Dependency::Match { spec, text, place } = dependency else { return None };
    let channel = spec.channel.as_ref()?;
    let written = match text.split_once("::") {
        Some((written, _)) => written.trim().trim_start_matches(['"', '\'']).to_owned(),
        None => channel.name.clone().unwrap_or_else(|| channel.base_url.url().to_string()),
    };
    let written = match written.rsplit_once('/') {
        Some((channel, subdir)) if subdir.parse::<Subdir>().is_ok() => channel.to_owned(),
        _ => written,
    };
    Some(ChannelEntry { text: written, place: place.clone() })
}

/// Reads on a thread of its own: a terminal or a pipe may stay silent for ever, and Ctrl-C must end the command all the same.
async fn read_local(input: Input, cwd: PathBuf) -> (Result<Option<Fetched>>, Input) {
    let (send, receive) = tokio::sync::oneshot::channel();
    let reader = input.clone();
    std::thread::spawn(move || {
        let _ = send.send(reader.read_local(&cwd));
    });
    let read = receive.await.unwrap_or_else(|_| Err(Error::failure("the input could not be read")));
    (read, input)
}

/// The versions of Python that the request names, for the `host` channel; empty for any.
fn python_versions(spec: &EnvSpec) -> Vec<String> {
    let mut wanted = Vec::new();
    for dependency in &spec.dependencies {
        if let Dependency::Match { spec, .. } = dependency
            && spec.name.as_exact().is_some_and(|name| name.as_normalized() == "python")
        {
            match &spec.version {
                Some(version) => wanted.push(version.to_string()),
                None => return Vec::new(),
            }
        }
    }
    wanted
}

fn read_spec(fetched: &[Fetched], inputs: &Inputs, subdir: Subdir, root_dir: PathBuf) -> Result<EnvSpec> {
    let options = spec::ReadOptions { subdir, root_dir, env: |name| std::env::var(name).ok(), target_given: inputs.target_given };
    spec::read(fetched, &inputs.specs, &options)
}

/// `3 items`, `1 item`.
pub fn count(number: usize, word: &str) -> String {
    if number == 1 { format!("{number} {word}") } else { format!("{number} {word}s") }
}

fn parse_priority(text: &str, source: &str) -> Result<PriorityChoice> {
    Ok(match text {
        "auto" => PriorityChoice::Auto,
        "strict" => PriorityChoice::Strict,
        "flexible" => PriorityChoice::Flexible,
        "disabled" => PriorityChoice::Disabled,
        other => {
            return Err(Error::usage(format!("`{other}` is no channel priority"))
                .because(format!("it was set by {source}"))
                .hint("use auto, strict, flexible or disabled"));
        }
    })
}

#[allow(clippy::too_many_arguments)]
fn digest(
    spec: &EnvSpec,
    target: &Target,
    channels: &[ResolvedChannel],
    priority: PriorityChoice,
    exclude_newer: Option<jiff::Timestamp>,
    pip: Option<&Section>,
    inputs: &Inputs,
    settings: &Settings,
) -> (String, serde_json::Map<String, serde_json::Value>) {
    // What somebody decided. What was detected may change with every kernel and every node of a cluster.
    let decided = |package: &&platform::VirtualPackage| {
        matches!(package.provenance, platform::Provenance::Assumed | platform::Provenance::Overridden)
    };
    let mut virtual_packages: Vec<String> =
        target.virtual_packages.iter().filter(decided).map(|package| package.package.to_string()).collect();
    virtual_packages.sort();
    let explicit: Option<Vec<String>> = spec.explicit.as_ref().map(|explicit| {
        explicit.packages.iter().map(|package| format!("{}#{:?}", crate::spec::mask_secrets(package.url.as_str()), package.hash)).collect()
    });
    let facts = serde_json::json!({
        "version": 1,
        "dependencies": spec.dependencies.iter().map(|dependency| spec::mask_secrets(dependency.text())).collect::<Vec<_>>(),
        "pip": pip.map(Section::facts).unwrap_or_default(),
        "explicit": explicit,
        "variables": spec.variables,
        "channels": channels.iter().map(|channel| &channel.display).collect::<Vec<_>>(),
        "priority": priority,
        "exclude_newer": exclude_newer.map(|time| time.to_string()),
        "subdir": target.subdir.as_str(),
        "virtual_packages": virtual_packages,
        "gpu": inputs.gpu,
        "pins": settings.pinned_packages.value,
        "default_packages": if inputs.default_packages { settings.create_default_packages.value.clone() } else { vec![] },
    });
    let hash = |text: String| crate::text::hex(&Sha256::digest(text.as_bytes()));
    let parts = facts.as_object().into_iter().flatten().map(|(key, value)| (key.clone(), hash(value.to_string())[..16].into())).collect();
    (hash(facts.to_string()), parts)
}

/// The records of a prepared request, and how they came about.
pub struct Resolved {
    /// Dependencies first.
    pub records: Vec<RepoDataRecord>,
    /// What was asked for (for `conda-meta`).
    pub requested: Vec<MatchSpec>,
    /// `None` for explicit lists, which need no solver.
    pub solution: Option<Solution>,
}

/// Loads what is needed of the channels and solves.
///
/// # Errors
/// `Kind::Network` for channels that do not answer; `Kind::Unsatisfiable`.
pub async fn resolve(
    prepared: &Prepared,
    locked: Vec<RepoDataRecord>,
    update: solve::Favor,
    inputs: &Inputs,
    settings: &Settings,
    session: &Session,
    progress: Arc<dyn Progress>,
) -> Result<Resolved> {
    if let Some(explicit) = &prepared.spec.explicit {
        if let Some(platform) = explicit.platform
            && platform != prepared.target.subdir
        {
            progress.warn(&format!("the explicit list is for {platform}, this environment is for {}", prepared.target.subdir), &[]);
        }
        let records = records_of(&explicit.packages, session, progress).await?;
        let requested = Vec::new();
        return Ok(Resolved { records: solve::topological(records), requested, solution: None });
    }

    let mut specs = Vec::new();
    let mut direct = Vec::new();
    for dependency in &prepared.spec.dependencies {
        match dependency {
            Dependency::Match { spec, .. } => specs.push(spec.clone()),
            Dependency::Package { url, hash, place, .. } => {
                direct.push(spec::ExplicitPackage { url: url.clone(), hash: *hash, place: place.clone() });
            }
        }
    }
    if inputs.default_packages {
        let named: BTreeSet<String> = specs.iter().filter_map(name_of).collect();
        for text in &settings.create_default_packages.value {
            let spec = spec::parse_match_spec(text, None)
                .map_err(|error| error.context(format!("bad `create_default_packages` in {}", settings.create_default_packages.source)))?;
            if name_of(&spec).is_none_or(|name| !named.contains(&name)) {
                specs.push(spec);
            }
        }
    }
    for spec in &mut specs {
        session.trust_spec(spec)?;
    }
    // An archive given by URL is one fixed candidate of its name.
    let mut pins = Vec::new();
    if !direct.is_empty() {
        pins = records_of(&direct, session, progress.clone()).await?;
        for record in &pins {
            let exact = format!(
                "{} =={} {}",
                record.package_record.name.as_normalized(),
                record.package_record.version,
                record.package_record.build
            );
            specs.push(spec::parse_match_spec(&exact, None)?);
        }
    }

    let subdirs = [prepared.target.subdir, Subdir::NoArch];
    let mut wanted = specs.clone();
    for record in &pins {
        for depend in &record.package_record.depends {
            if let Ok(spec) = spec::parse_match_spec(depend, None) {
                wanted.push(spec);
            }
        }
    }
    for record in &locked {
        if let Ok(spec) = spec::parse_match_spec(record.package_record.name.as_normalized(), None) {
            wanted.push(spec);
        }
    }
    // By name alone: records that the gateway filters out decide about strict channel priority, and explain why nothing fits.
    let names: Vec<MatchSpec> = wanted.iter().filter_map(|spec| spec.name.as_exact().map(|name| MatchSpec::from(name.clone()))).collect();
    let repodata = if names.is_empty() { Vec::new() } else { session.repodata(&prepared.channels, &subdirs, &names, true).await? };

    let locked = adopt(locked, &repodata);
    let mut request = solve::Request::new(prepared.target.clone());
    request.specs.clone_from(&specs);
    request.pinned_specs.clone_from(&prepared.pinned);
    request.pins = pins;
    request.locked = locked;
    request.update = update;
    request.channels = prepared.channels.iter().map(|channel| channel.display.clone()).collect();
    request.appended = prepared.channels.iter().filter(|channel| channel.appended).map(|channel| channel.display.clone()).collect();
    request.priority = prepared.priority;
    request.gpu = prepared.gpu;
    request.exclude_newer = prepared.exclude_newer;
    request.driver_version = prepared.target.gpu.driver_version();
    request.pip_names = prepared.spec.pip.iter().filter_map(pip_name).collect();
    request.lookup = Some(Arc::new(SessionLookup {
        session: session.quiet(),
        channels: prepared.channels.clone(),
        subdir: prepared.target.subdir,
        settings: settings.clone(),
        handle: tokio::runtime::Handle::current(),
    }));
    let cancel = solve::CancellationToken::new();
    request.cancel = Some(cancel.clone());
    let guard = CancelOnDrop(Some(cancel));
    let task = progress.start(Phase::Solve, prepared.target.subdir.as_str(), None);
    let solved = solve_on_thread(request, repodata).await;
    progress.finish(task);
    guard.disarm();
    let solution = solved.map_err(|error| tell_of_pip(error, &prepared.spec))?;
    for warning in &solution.warnings {
        progress.warn(warning, &[]);
    }
    Ok(Resolved { records: solution.records.clone(), requested: specs, solution: Some(solution) })
}

/// pip's files have names like `requirements.txt`; read as a list of match specs, their names are looked for in conda channels.
fn tell_of_pip(error: Error, spec: &EnvSpec) -> Error {
    let name_of = |path: &str| path.rsplit(['/', '\\']).next().unwrap_or(path).to_ascii_lowercase();
    let is_pips = |path: &&str| name_of(path).starts_with("requirements") && name_of(path).ends_with(".txt");
    match spec.sources.iter().map(|source| source.name.as_str()).find(is_pips) {
        Some(file) if error.kind() == crate::error::Kind::Unsatisfiable => error.hint(format!(
            "`{file}` was read as a list of conda packages; if it is pip's, make an environment.yml whose `dependencies:` hold `python`, `pip` and \
             `- pip: [\"-r {file}\"]`"
        )),
        _ => error,
    }
}

async fn solve_on_thread(request: solve::Request, repodata: Vec<rattler_repodata_gateway::RepoData>) -> Result<Solution> {
    tokio::task::spawn_blocking(move || solve::solve(&request, &repodata))
        .await
        .map_err(|error| Error::failure("the solver stopped").because(error))?
}

fn pip_name(item: &spec::PipItem) -> Option<String> {
    match &item.kind {
        spec::PipKind::Requirement { requirement, .. } => Some(requirement.name.to_string()),
        _ => None,
    }
}

/// The hash that an explicit list or a dependency gives for an archive.
fn archive(package: &spec::ExplicitPackage) -> crate::install::Archive {
    let (mut md5, mut sha256) = (None, None);
    match &package.hash {
        Some(spec::ExplicitHash::Md5(hash)) => md5 = Some(*hash),
        Some(spec::ExplicitHash::Sha256(hash)) => sha256 = Some(*hash),
        None => {}
    }
    crate::install::Archive { url: package.url.clone(), md5, sha256 }
}

/// Records for archives named by URL, with the metadata inside them.
async fn records_of(packages: &[spec::ExplicitPackage], session: &Session, progress: Arc<dyn Progress>) -> Result<Vec<RepoDataRecord>> {
    let archives: Vec<_> = packages.iter().map(archive).collect();
    crate::install::records_for_archives(
        &archives,
        &session.package_cache,
        session.client.clone(),
        progress,
        &crate::install::Cancel::new(),
    )
    .await
}

/// Installed records as the channels describe them, where they still do: conda-meta written by other tools may lack
/// dependencies.
fn adopt(installed: Vec<RepoDataRecord>, repodata: &[rattler_repodata_gateway::RepoData]) -> Vec<RepoDataRecord> {
    installed
        .into_iter()
        .map(|record| {
            let same = repodata.iter().flat_map(rattler_repodata_gateway::RepoData::iter).find(|known| {
                let (a, b) = (&known.package_record, &record.package_record);
                a.name == b.name && a.version == b.version && a.build == b.build && known.identifier == record.identifier
            });
            same.cloned().unwrap_or(record)
        })
        .collect()
}

/// Stops the solver's thread when the future that waits for it is dropped.
struct CancelOnDrop(Option<solve::CancellationToken>);

impl CancelOnDrop {
    fn disarm(mut self) {
        self.0 = None;
    }
}

impl Drop for CancelOnDrop {
    fn drop(&mut self) {
        if let Some(token) = &self.0 {
            token.cancel();
        }
    }
}

fn name_of(spec: &MatchSpec) -> Option<String> {
    spec.name.as_exact().map(|name| name.as_normalized().to_owned())
}

/// Tells what a solution decided: GPU outcome, lints, preflight.
///
/// # Errors
/// None of it is an error here: `solve` has refused already what cannot be used.
pub fn tell(solution: &Solution, progress: &dyn Progress) {
    if let Some(line) = solution.gpu.line() {
        progress.note(&line);
    }
    for lint in solution.lints.iter().chain(&solution.preflight) {
        progress.warn(&format!("{} [{}]", lint.message, lint.code), &lint.hints);
    }
}

/// Answers the questions of a failed solve from the channels. Called on the solver's thread.
struct SessionLookup {
    session: Session,
    channels: Vec<ResolvedChannel>,
    subdir: Subdir,
    settings: Settings,
    handle: tokio::runtime::Handle,
}

/// How long a hint may make a failed solve wait for the network.
const HINT_LIMIT: std::time::Duration = std::time::Duration::from_secs(5);

/// Where a package that the given channels lack is looked for.
const WELL_KNOWN: [&str; 4] = ["conda-forge", "nvidia", "bioconda", "pytorch"];

impl SessionLookup {
    fn wait<T>(&self, future: impl Future<Output = Result<T>>) -> Option<T> {
        self.handle.block_on(async { tokio::time::timeout(HINT_LIMIT, future).await.ok()?.ok() })
    }

    fn has(&self, channels: &[ResolvedChannel], subdirs: &[Subdir], name: &str) -> bool {
        let Ok(name) = name.parse() else { return false };
        self.wait(self.session.records(channels, subdirs, &name)).is_some_and(|records| !records.is_empty())
    }
}

impl solve::Lookup for SessionLookup {
    fn names(&self) -> Vec<String> {
        let names = self.wait(self.session.names(&self.channels, &[self.subdir, Subdir::NoArch])).unwrap_or_default();
        names.iter().map(|name| name.as_normalized().to_owned()).collect()
    }

    fn other_channels(&self, name: &str) -> Vec<String> {
        // Folders need no network, so none is tried on their account.
        if self.session.offline || self.channels.iter().all(|channel| channel.channel.base_url.url().scheme() == "file") {
            return Vec::new();
        }
        let started = std::time::Instant::now();
        let options = channel::ExpandOptions {
            override_channels: true,
            declared: true,
            nodefaults: true,
            root_dir: std::path::Path::new("."),
            host: None,
        };
        let mut candidates = self.settings.channels.value.clone();
        candidates.extend(WELL_KNOWN.map(str::to_owned));
        let mut found = Vec::new();
        for candidate in candidates {
            if started.elapsed() > HINT_LIMIT
                || found.contains(&candidate)
                || self.channels.iter().any(|channel| channel.display == candidate)
            {
                continue;
            }
            let entry = ChannelEntry { text: candidate.clone(), place: None };
            if let Ok(expanded) = channel::expand(&[entry], &self.settings, options)
                && self.has(&expanded.channels, &[self.subdir, Subdir::NoArch], name)
            {
                found.push(candidate);
            }
        }
        found
    }

    fn other_subdirs(&self, name: &str) -> Vec<Subdir> {
        [Subdir::Linux64, Subdir::LinuxAarch64, Subdir::OsxArm64, Subdir::Osx64, Subdir::Win64]
            .into_iter()
            .filter(|subdir| *subdir != self.subdir && self.has(&self.channels, &[*subdir], name))
            .collect()
    }
}
