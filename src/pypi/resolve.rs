//! The pip half resolved together with the conda half, and made ready to be installed.
//!
//! ```text
//! conda half ─> throwaway prefix ─> what it provides ─> stand-ins ─┐
//! section ──────────────────────────────────────────────────────────├─ uv or pip ─> records ─ checks ─ builds ─> PypiPlan
//! ```

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;

use futures::{StreamExt as _, TryStreamExt as _};
use pep508_rs::VersionOrUrl;
use pep508_rs::pep440_rs::VersionSpecifiers;
use rattler_conda_types::{PackageRecord, RepoDataRecord, Subdir};

use super::build::{self, Builder, Built, fetch_bytes};
use super::engine::{EngineChoice, Found, PypiResolver, Query, markers};
use super::indexes::trust_configured_indexes;
use super::pip::Pip;
use super::process::{self, Job, scrubbed};
use super::provided::{CoreMetadata, Provided, provided, stubs};
use super::section::{Asked, Section, local_path, marker_holds};
use super::tags::{TagInput, Tags};
use super::throwaway::{Throwaway, WorkFolder, no_python, python_version};
use super::uv::{NoUv, Uv, file_name};
use super::{Engine, Name, PypiPlan, PypiRecord, PypiSource, ReadyWheel, Version, WheelFile};
use crate::channel::Session;
use crate::error::{Error, Kind, Result};
use crate::install::Cancel;
use crate::platform::{Provenance, Target};
use crate::prefix::{Environment, run_environment};
use crate::report::{Phase, Progress};
use crate::spec::{EditableTarget, PipItem, PipKind};

/// What resolving and building happen with.
pub struct Context<'a> {
    /// The conda half of the solution.
    pub records: &'a [RepoDataRecord],
    /// The machine that the environment is for.
    pub target: &'a Target,
    /// Cache and client.
    pub session: &'a Session,
    /// Simultaneous downloads.
    pub concurrency: usize,
    /// Which resolver.
    pub choice: EngineChoice,
    /// Nothing uploaded later.
    pub exclude_newer: Option<jiff::Timestamp>,
    /// For progress and remarks.
    pub progress: Arc<dyn Progress>,
    /// Stops the work.
    pub cancel: Cancel,
}

/// A resolved section.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Resolution {
    /// What the pip half is made of, by name. What the conda half provides is not among them.
    pub records: Vec<PypiRecord>,
    /// Version of the interpreter.
    pub python: Version,
    /// Who resolved it; `None` if the conda half has everything.
    pub engine: Option<Engine>,
}

/// One run: its folder, and the prefixes that were needed so far.
pub struct Workshop<'a> {
    context: Context<'a>,
    python: Version,
    tags: Tags,
    work: Option<WorkFolder>,
    small: Option<Throwaway>,
    whole: Option<Throwaway>,
    /// Folders that were built in this run.
    folders: BTreeMap<(PathBuf, bool), Built>,
}

/// The packages that can hold Python distributions or are needed to run Python, pip and uv. The others need not be fetched to resolve.
fn python_side(records: &[RepoDataRecord]) -> Vec<RepoDataRecord> {
    let by_name: BTreeMap<&str, &RepoDataRecord> =
        records.iter().map(|record| (record.package_record.name.as_normalized(), record)).collect();
    let first_word = |depend: &str| depend.split([' ', '=', '<', '>', '!', '~', '[']).next().unwrap_or_default().to_lowercase();
    let mut wanted: BTreeSet<&str> = BTreeSet::new();
    let mut next: Vec<&str> = vec!["python", "pip", "uv"];
    while let Some(name) = next.pop() {
        let Some((name, record)) = by_name.get_key_value(name) else { continue };
        if wanted.insert(name) {
            for depend in &record.package_record.depends {
                if let Some((name, _)) = by_name.get_key_value(first_word(depend).as_str()) {
                    next.push(name);
                }
            }
        }
    }
    let is_python = |record: &PackageRecord| {
        record.noarch.is_python()
            || record.depends.iter().any(|depend| matches!(first_word(depend).as_str(), "python" | "python_abi" | "pypy"))
    };
    records
        .iter()
        .filter(|record| wanted.contains(record.package_record.name.as_normalized()) || is_python(&record.package_record))
        .cloned()
        .collect()
}

impl<'a> Workshop<'a> {
    /// Prepares a run. Nothing is made yet.
    ///
    /// # Errors
    /// The conda half has no Python.
    pub fn new(context: Context<'a>) -> Result<Self> {
        let (python, free_threaded) = python_version(context.records.iter()).ok_or_else(|| no_python("the conda half has no Python"))?;
        let tags = Tags::new(TagInput::new(context.target, &python, free_threaded));
        Ok(Workshop { context, python, tags, work: None, small: None, whole: None, folders: BTreeMap::new() })
    }

    /// The wheels that can be used.
    pub fn tags(&self) -> &Tags {
        &self.tags
    }

    /// Version of the interpreter.
    pub fn python(&self) -> &Version {
        &self.python
    }

    fn subdir(&self) -> Subdir {
        self.context.target.subdir
    }

    /// Whether programs of the environment cannot be run here.
    fn other_machine(&self) -> bool {
        Subdir::current() != Some(self.subdir())
    }

    /// Whether wheels must be chosen for something else than this very machine.
    fn is_foreign(&self) -> bool {
        let assumed = self.context.target.virtual_packages.iter().any(|package| {
            matches!(package.package.name.as_normalized(), "__glibc" | "__osx")
                && matches!(package.provenance, Provenance::Overridden | Provenance::Assumed)
        });
        self.other_machine() || assumed
    }

    fn work(&mut self) -> Result<&WorkFolder> {
        if self.work.is_none() {
            self.work = Some(WorkFolder::create(&self.context.session.cache_dir)?);
        }
        self.work.as_ref().ok_or_else(|| Error::failure("no folder to work in"))
    }

    /// Makes the throwaway prefix: all of the conda half, or what matters to Python of it.
    async fn prefix(&mut self, all: bool) -> Result<()> {
        if self.whole.is_some() || (!all && self.small.is_some()) {
            return Ok(());
        }
        self.work()?;
        let context = &self.context;
        let part = python_side(context.records);
        let whole = all || part.len() == context.records.len();
        let (name, records) = if whole { ("env", context.records.to_vec()) } else { ("python", part) };
        let Some(work) = &self.work else { return Err(Error::failure("no folder to work in")) };
        let made = Throwaway::make(
            work,
            name,
            records,
            context.target.subdir,
            context.session,
            context.concurrency,
            context.progress.clone(),
            &context.cancel,
        )
        .await?;
        *(if whole { &mut self.whole } else { &mut self.small }) = Some(made);
        Ok(())
    }

    fn made(&self) -> Result<&Throwaway> {
        self.whole.as_ref().or(self.small.as_ref()).ok_or_else(|| Error::failure("no prefix to work in"))
    }

    /// The variables of children, the throwaway prefix active.
    fn environment(&self) -> Result<Environment> {
        let work = self.work.as_ref().ok_or_else(|| Error::failure("no folder to work in"))?;
        let scrubbed = scrubbed(std::env::vars_os(), &work.tmp());
        if self.other_machine() { Ok(scrubbed) } else { run_environment(&self.made()?.open()?, &scrubbed) }
    }

    /// An interpreter that runs here: that of the throwaway prefix, or for another platform one of this machine, if there is one with pip.
    async fn interpreter(&self, env: &Environment) -> Result<PathBuf> {
        if !self.other_machine() {
            return Ok(self.made()?.python().to_owned());
        }
        let work = self.work.as_ref().ok_or_else(|| Error::failure("no folder to work in"))?;
        let path = env.get(std::ffi::OsStr::new("PATH")).cloned().unwrap_or_default();
        let mut parts = self.python.release().iter();
        let exact = format!("python{}.{}", parts.next().unwrap_or(&3), parts.next().unwrap_or(&0));
        let mut any = None;
        for name in [exact.as_str(), "python3", "python"] {
            for program in std::env::split_paths(&path).map(|folder| folder.join(name)).filter(|file| file.is_file()) {
                // A stand-in of a version manager may name a version that is not there.
                let code = "import importlib.util, sys; sys.exit(7 if importlib.util.find_spec('pip') is None else 0)";
                let job = Job {
                    program: program.clone(),
                    args: ["-c", code].map(Into::into).to_vec(),
                    env: env.clone(),
                    cwd: work.run_dir(),
                    limit: std::time::Duration::from_secs(60),
                };
                match process::run(&job, &self.context.cancel).await {
                    Ok(ran) if ran.success => return Ok(program),
                    Ok(ran) if ran.stderr.trim().is_empty() => any = any.or(Some(program)),
                    Err(error) if error.kind() == Kind::Interrupted => return Err(error),
                    _ => {}
                }
            }
        }
        any.ok_or_else(|| {
            Error::failure(format!("resolving the `pip:` section for {} needs some Python on this machine", self.subdir()))
                .hint("install one, or resolve on a machine of that kind")
        })
    }

    /// Finds the resolver.
    async fn engine(&self, env: &Environment, python: &std::path::Path) -> Result<Box<dyn PypiResolver>> {
        let context = &self.context;
        let work = self.work.as_ref().ok_or_else(|| Error::failure("no folder to work in"))?;
        if context.choice != EngineChoice::Pip {
            match (Uv::find(self.made()?.path(), env, &work.run_dir(), &context.cancel).await?, context.choice) {
                (Ok(uv), _) => return Ok(Box::new(uv)),
                (Err(NoUv::Absent), EngineChoice::Uv) => {
                    return Err(Error::failure("there is no `uv`, neither in the environment nor on the PATH")
                        .hint("add `uv` to the dependencies, or take pip: --pip-resolver pip"));
                }
                (Err(NoUv::Unusable(why)), EngineChoice::Uv) => {
                    return Err(Error::failure("uv cannot be used").because(why).hint("take pip: --pip-resolver pip"));
                }
                (Err(NoUv::Unusable(why)), _) => context.progress.note(&format!("pip is used, not uv: {why}")),
                (Err(NoUv::Absent), _) => {}
            }
        }
        Ok(Box::new(Pip::find(python, env, &work.run_dir(), &context.cancel).await?))
    }

    /// Resolves a section. The section must be complete ([`Section::complete`]).
    ///
    /// # Errors
    /// Nothing fits, or the halves contradict each other (kind unsatisfiable); an index does not answer (kind network); a source cannot be built; a
    /// hash differs (kind verification).
    pub async fn resolve(&mut self, section: &Section) -> Result<Resolution> {
        match self.resolve_once(section).await {
            Err(error) if error.kind() == Kind::Unsatisfiable && !section.held().is_empty() => self.resolve_once(&section.released()).await,
            result => result,
        }
    }

    async fn resolve_once(&mut self, section: &Section) -> Result<Resolution> {
        let progress = self.context.progress.clone();
        self.prefix(false).await?;
        let provided = provided(&self.made()?.open()?)?;
        let markers = markers(&self.python, self.subdir())?;
        let names = section.names(&markers);
        check_against_provided(&names, section, &provided, &markers)?;
        let asked_of_index = section.requirements.iter().any(|item| match &item.kind {
            PipKind::Requirement { requirement, .. } => {
                requirement.marker.evaluate(&markers, &[]) && (!provided.contains_key(&requirement.name) || !requirement.extras.is_empty())
            }
            _ => true,
        });
        if !asked_of_index {
            progress.note("the conda half provides everything that the `pip:` section asks for");
            return Ok(Resolution { records: Vec::new(), python: self.python.clone(), engine: None });
        }
        for item in &section.requirements {
            if let PipKind::Editable(target) = &item.kind
                && let EditableTarget::Vcs(_) = &**target
            {
                progress.warn(
                    &format!("`{}` is installed as it is at that commit, not editable", item.shown()),
                    &["for an editable one, clone it yourself and name the folder: `-e ./FOLDER`".to_owned()],
                );
            }
        }
        self.trust_indexes(section);
        let stub_folder = self.work()?.path().join("provided");
        let stubs = stubs(provided.values(), &stub_folder)?;
        let env = self.environment()?;
        let interpreter = self.interpreter(&env).await?;
        let engine = self.engine(&env, &interpreter).await?;
        let shown = format!("{} {}", engine.engine().name, engine.engine().version);
        let task = progress.start(Phase::Solve, &format!("`pip:` section with {shown}"), None);
        let mut answer = self.ask(&*engine, section, &names, &stubs, &env, &interpreter).await;
        if let Err(error) = &answer
            && error.kind() == Kind::Failure
            && self.whole.is_none()
            && !self.other_machine()
            && error.message().contains("could not be built")
        {
            // Its build may need something of the conda half that is no Python package.
            progress.finish(task);
            self.prefix(true).await?;
            let env = self.environment()?;
            let interpreter = self.interpreter(&env).await?;
            answer = self.ask(&*engine, section, &names, &stubs, &env, &interpreter).await;
        } else {
            progress.finish(task);
        }
        let found = answer.map_err(|error| explain(error, &provided))?;
        let of_stub = |source: &PypiSource| match source {
            PypiSource::Archive { url, .. } => url.to_file_path().is_ok_and(|path| path.starts_with(&stub_folder)),
            _ => false,
        };
        let mut found: Vec<Found> = found.into_iter().filter(|found| !of_stub(&found.record.source)).collect();
        found.sort_by(|a, b| a.record.name.cmp(&b.record.name));
        for found in &mut found {
            mark_requested(&mut found.record, section, &names, &markers);
        }
        self.complete(&mut found, section).await?;
        let records: Vec<PypiRecord> = found.into_iter().map(|found| found.record).collect();
        check_hashes(&records, section)?;
        self.check(&records, &provided)?;
        Ok(Resolution { records, python: self.python.clone(), engine: Some(engine.engine().clone()) })
    }

    async fn ask(
        &self,
        engine: &dyn PypiResolver,
        section: &Section,
        names: &[Asked],
        stubs: &[super::provided::Stub],
        env: &Environment,
        python: &std::path::Path,
    ) -> Result<Vec<Found>> {
        let context = &self.context;
        let query = Query {
            section,
            names,
            stubs,
            python,
            version: &self.python,
            tags: &self.tags,
            foreign: self.is_foreign(),
            work: self.work.as_ref().ok_or_else(|| Error::failure("no folder to work in"))?,
            env,
            exclude_newer: context.exclude_newer,
            offline: context.session.offline,
            cancel: &context.cancel,
            progress: &*context.progress,
        };
        engine.resolve(&query).await
    }

    /// Lets tare's own client use the credentials that stand in the URLs of indexes.
    fn trust_indexes(&self, section: &Section) {
        let options = &section.options;
        let mut urls: Vec<String> = options.index_url.iter().chain(&options.extra_index_urls).cloned().collect();
        for location in &options.find_links {
            if let crate::spec::Location::Url(url) = location {
                urls.push(url.to_string());
            }
        }
        for item in &section.requirements {
            match &item.kind {
                PipKind::Url { url, .. } => urls.push(url.to_string()),
                PipKind::Requirement { requirement, .. } => {
                    if let Some(VersionOrUrl::Url(url)) = &requirement.version_or_url {
                        urls.push(url.to_string());
                    }
                }
                _ => {}
            }
        }
        for url in urls {
            self.context.session.trust_index(&url);
        }
        trust_configured_indexes(self.context.session);
    }

    /// Learns what an engine did not tell: of wheels from their metadata, of folders by building them.
    async fn complete(&mut self, found: &mut [Found], section: &Section) -> Result<()> {
        let session = self.context.session.clone();
        let cancel = self.context.cancel.clone();
        for one in found.iter_mut().filter(|one| !one.complete) {
            if let Some(metadata) = super::fetch::cached_metadata(&session.package_cache, &one.record) {
                fill(&mut one.record, &metadata);
                one.complete = true;
            }
        }
        let wanted: Vec<(usize, url::Url)> = found
            .iter()
            .enumerate()
            .filter(|(_, found)| !found.complete)
            .filter_map(|(number, found)| match &found.record.source {
                PypiSource::Archive { url, .. } if url.path().ends_with(".whl") => Some((number, url.clone())),
                _ => None,
            })
            .collect();
        let read: Vec<(usize, Option<CoreMetadata>)> = futures::stream::iter(wanted)
            .map(|(number, url)| {
                let (session, cancel) = (session.clone(), cancel.clone());
                async move { Ok::<_, Error>((number, wheel_metadata_of(&session, &url, &cancel).await?)) }
            })
            .buffer_unordered(16)
            .try_collect()
            .await?;
        for (number, metadata) in read {
            if let Some(metadata) = metadata {
                fill(&mut found[number].record, &metadata);
                found[number].complete = true;
            }
        }
        let unknown: Vec<usize> = (0..found.len())
            .filter(|number| !found[*number].complete && matches!(found[*number].record.source, PypiSource::Directory { .. }))
            .collect();
        if !unknown.is_empty() {
            let records: Vec<PypiRecord> = unknown.iter().map(|number| found[*number].record.clone()).collect();
            let built = self.build(&records, section).await?;
            for (number, built) in unknown.into_iter().zip(built) {
                fill(&mut found[number].record, &built.metadata);
                found[number].complete = true;
            }
        }
        Ok(())
    }

    /// What no resolver is trusted with: that every wheel fits the platform, every distribution the interpreter, and nothing is there twice.
    fn check(&self, records: &[PypiRecord], provided: &BTreeMap<Name, Provided>) -> Result<()> {
        for record in records {
            if let Some(twice) = provided.get(&record.name) {
                return Err(Error::new(Kind::Unsatisfiable, format!("`{}` would be there twice", record.name))
                    .because(format!("the conda package `{}` provides `{} {}`", twice.package, twice.name, twice.version))
                    .because(format!("the `pip:` section would bring `{} {}`", record.name, record.version)));
            }
            check_record(record, &self.tags, &self.python)?;
            if self.other_machine()
                && let PypiSource::Archive { url, .. } = &record.source
                && !url.path().ends_with(".whl")
            {
                return Err(Error::new(
                    Kind::Unsatisfiable,
                    format!("`{} {}` has no wheel for {}", record.name, record.version, self.subdir()),
                )
                .because("there is only its source, which can be built on such a machine, not here"));
            }
        }
        Ok(())
    }

    /// What was built before, in this run or another one.
    fn built(&self, source: &PypiSource, conda_half: &str) -> Option<Built> {
        match source {
            PypiSource::Directory { path, editable } => self.folders.get(&(path.clone(), *editable)).cloned(),
            source => build::cached(source, &self.tags, conda_half, self.context.session),
        }
    }

    async fn build(&mut self, records: &[PypiRecord], section: &Section) -> Result<Vec<Built>> {
        if self.other_machine() {
            let names: Vec<String> = records.iter().map(|record| format!("`{}`", record.name)).collect();
            return Err(Error::failure(format!("{} can only be built on a machine of the kind {}", names.join(", "), self.subdir())));
        }
        self.prefix(true).await?;
        let env = self.environment()?;
        let context = &self.context;
        let conda_half = crate::install::digest_of(context.records);
        let builder = Builder {
            python: self.made()?.python(),
            env: &env,
            work: self.work.as_ref().ok_or_else(|| Error::failure("no folder to work in"))?,
            options: &section.options,
            tags: &self.tags,
            session: context.session,
            cancel: &context.cancel,
            progress: &*context.progress,
        };
        let built = builder.build_all(records, &conda_half).await?;
        for (record, built) in records.iter().zip(&built) {
            if let PypiSource::Directory { path, editable } = &record.source {
                self.folders.insert((path.clone(), *editable), built.clone());
            }
        }
        Ok(built)
    }

    /// Makes every record ready: what has no wheel is built. `section`: whose indexes building uses.
    ///
    /// # Errors
    /// See [`Builder::build`]; a wheel that cannot be used here.
    pub async fn ready(&mut self, records: Vec<PypiRecord>, section: &Section) -> Result<Vec<ReadyWheel>> {
        self.trust_indexes(section);
        let conda_half = crate::install::digest_of(self.context.records);
        let mut made: Vec<Option<(PypiRecord, WheelFile)>> = Vec::with_capacity(records.len());
        let mut missing = Vec::new();
        for record in records {
            check_record(&record, &self.tags, &self.python)?;
            let is_wheel = matches!(&record.source, PypiSource::Archive { url, .. } if url.path().ends_with(".whl"));
            if is_wheel {
                made.push(Some((record, WheelFile::Remote)));
            } else if let Some(built) = self.built(&record.source, &conda_half) {
                made.push(Some(local(record, built)));
            } else {
                missing.push(record);
                made.push(None);
            }
        }
        if !missing.is_empty() {
            let built = self.build(&missing, section).await?;
            let mut ready = missing.into_iter().zip(built).map(|(record, built)| local(record, built));
            for slot in &mut made {
                if slot.is_none() {
                    *slot = ready.next();
                }
            }
        }
        Ok(made.into_iter().flatten().map(|(record, wheel)| ReadyWheel { record, wheel }).collect())
    }

    /// [`Workshop::resolve`] and [`Workshop::ready`].
    ///
    /// # Errors
    /// As those.
    pub async fn plan(&mut self, section: &Section, clobber: bool) -> Result<PypiPlan> {
        let resolution = self.resolve(section).await?;
        let wheels = self.ready(resolution.records, section).await?;
        Ok(PypiPlan { wheels, python: resolution.python, engine: resolution.engine, clobber })
    }
}

fn local(mut record: PypiRecord, built: Built) -> (PypiRecord, WheelFile) {
    fill(&mut record, &built.metadata);
    (record, WheelFile::Local { path: built.path, sha256: built.sha256 })
}

fn fill(record: &mut PypiRecord, metadata: &CoreMetadata) {
    if record.version.release() == [0]
        && let Ok(version) = metadata.version.parse()
    {
        record.version = version;
    }
    record.requires_dist.clone_from(&metadata.requires_dist);
    if metadata.requires_python.is_some() {
        record.requires_python.clone_from(&metadata.requires_python);
    }
}

/// The metadata of a wheel without the wheel: the file beside it (PEP 658), or from a local file. `None` where a server has no such file.
async fn wheel_metadata_of(session: &Session, url: &url::Url, cancel: &Cancel) -> Result<Option<CoreMetadata>> {
    if url.scheme() == "file" {
        let path = url.to_file_path().map_err(|()| Error::failure(format!("`{url}` is no path of this machine")))?;
        return build::wheel_metadata(&path).map(Some);
    }
    if session.offline {
        return Ok(None);
    }
    let mut beside = url.clone();
    beside.set_path(&format!("{}.metadata", url.path()));
    match fetch_bytes(session, &beside, cancel).await {
        Ok(bytes) => Ok(Some(CoreMetadata::parse(&String::from_utf8_lossy(&bytes)))),
        Err(error) if error.kind() == Kind::Interrupted => Err(error),
        Err(_) => Ok(None),
    }
}

/// Refuses a record that this interpreter and platform cannot use.
///
/// # Errors
/// Kind unsatisfiable.
pub fn check_record(record: &PypiRecord, tags: &Tags, python: &Version) -> Result<()> {
    if let PypiSource::Archive { url, .. } = &record.source {
        let file = file_name(url.path());
        if file.ends_with(".whl") {
            tags.check(&file)?;
        }
    }
    if let Some(wanted) = &record.requires_python
        && let Ok(specifiers) = VersionSpecifiers::from_str(wanted)
        && !specifiers.contains(python)
    {
        return Err(Error::new(Kind::Unsatisfiable, format!("`{} {}` does not run on Python {python}", record.name, record.version))
            .because(format!("it needs Python {wanted}"))
            .hint("choose another version of Python among the dependencies, or of the package"));
    }
    Ok(())
}

/// Compares what the section itself asks for with what the conda half provides.
fn check_against_provided(
    names: &[Asked],
    section: &Section,
    provided: &BTreeMap<Name, Provided>,
    markers: &pep508_rs::MarkerEnvironment,
) -> Result<()> {
    let conflict = |asked: &Asked, there: &Provided| {
        let mut error = Error::new(Kind::Unsatisfiable, format!("the `pip:` section and the conda half disagree about `{}`", there.name))
            .because(format!("the `pip:` section asks for `{}`", asked.shown))
            .because(format!("the conda package `{}` provides `{} {}`", there.package, there.name, there.version));
        if let Some(place) = &asked.place {
            error = error.at(place.clone());
        }
        error
            .hint(format!("ask for one version in both halves, or leave `{}` to one of them", there.name))
            .hint(format!("to see why the conda half has it: tare why {}", there.package_name))
    };
    for asked in names {
        let Some(there) = provided.get(&asked.name) else { continue };
        match &asked.requirement {
            Some(requirement) => {
                if let Some(VersionOrUrl::VersionSpecifier(specifiers)) = &requirement.version_or_url
                    && !specifiers.contains(&there.version)
                {
                    return Err(conflict(asked, there));
                }
            }
            None => return Err(conflict(asked, there)),
        }
    }
    for item in &section.constraints {
        let PipKind::Requirement { requirement, .. } = &item.kind else { continue };
        let Some(there) = provided.get(&requirement.name) else { continue };
        if requirement.marker.evaluate(markers, &[])
            && let Some(VersionOrUrl::VersionSpecifier(specifiers)) = &requirement.version_or_url
            && !specifiers.contains(&there.version)
        {
            // A constraint holds what is installed from an index; the conda half is installed by conda.
            let asked = Asked {
                name: requirement.name.clone(),
                extras: Vec::new(),
                requirement: Some((**requirement).clone()),
                shown: item.shown(),
                place: item.place.clone(),
            };
            return Err(conflict(&asked, there));
        }
    }
    Ok(())
}

/// Adds the conda side to what a resolver says.
fn explain(error: Error, provided: &BTreeMap<Name, Provided>) -> Error {
    if error.kind() != Kind::Unsatisfiable {
        return error;
    }
    let text = error.causes().join("\n").to_lowercase().replace('_', "-");
    let is_word = |name: &str| {
        text.match_indices(name).any(|(at, _)| {
            let part = |c: Option<char>| c.is_some_and(|c| c.is_alphanumeric() || matches!(c, '-' | '/'));
            let next = text[at + name.len()..].chars().next();
            // pip speaks of itself too.
            let is_spec = name != "pip" || next.is_some_and(|c| "<>=!~".contains(c));
            is_spec && !part(text[..at].chars().next_back()) && !part(next)
        })
    };
    let mut error = error;
    let mentioned: Vec<&Provided> =
        provided.values().filter(|there| there.name.as_ref() != "python" && is_word(there.name.as_ref())).collect();
    for there in mentioned.iter().take(5) {
        error = error.because(format!("the conda package `{}` provides `{} {}`, which stays", there.package, there.name, there.version));
    }
    if let Some(first) = mentioned.first() {
        error = error.hint(format!(
            "ask for another `{}` among the conda dependencies, or for another version in the `pip:` section",
            first.package_name
        ));
    }
    error
}

/// Whether an item without a name is about a record.
fn is_about(item: &PipItem, record: &PypiRecord) -> bool {
    let same_path = |a: &std::path::Path, b: &std::path::Path| {
        crate::spec::clean_path(a) == crate::spec::clean_path(b)
            || matches!((std::fs::canonicalize(a), std::fs::canonicalize(b)), (Ok(a), Ok(b)) if a == b)
    };
    let same_url = |a: &url::Url, b: &url::Url| a.host() == b.host() && a.path().trim_end_matches('/') == b.path().trim_end_matches('/');
    if let Some(path) = local_path(&item.kind) {
        return match &record.source {
            PypiSource::Directory { path: there, .. } => same_path(&path, there),
            PypiSource::Archive { url, .. } => url.to_file_path().is_ok_and(|there| same_path(&path, &there)),
            PypiSource::Vcs { .. } => false,
        };
    }
    match (&item.kind, &record.source) {
        (PipKind::Url { url, .. }, PypiSource::Archive { url: there, .. }) => same_url(url, there),
        (PipKind::Vcs(vcs), PypiSource::Vcs { url, .. }) => url::Url::parse(&vcs.url).is_ok_and(|asked| same_url(&asked, url)),
        (PipKind::Editable(target), PypiSource::Vcs { url, .. }) => match &**target {
            EditableTarget::Vcs(vcs) => url::Url::parse(&vcs.url).is_ok_and(|asked| same_url(&asked, url)),
            EditableTarget::Path { .. } => false,
        },
        _ => false,
    }
}

/// Notes whether the section names the record, and with which extras.
fn mark_requested(record: &mut PypiRecord, section: &Section, names: &[Asked], markers: &pep508_rs::MarkerEnvironment) {
    let mut extras: BTreeSet<String> = BTreeSet::new();
    let mut requested = false;
    for asked in names.iter().filter(|asked| asked.name == record.name) {
        requested = true;
        extras.extend(asked.extras.iter().cloned());
    }
    for item in section.requirements.iter().filter(|item| is_about(item, record)) {
        match &item.kind {
            PipKind::Path { marker, .. } if !marker_holds(marker.as_deref(), markers) => continue,
            PipKind::Path { extras: written, .. } => extras.extend(written.iter().cloned()),
            PipKind::Editable(target) => {
                if let EditableTarget::Path { extras: written, .. } = &**target {
                    extras.extend(written.iter().cloned());
                }
            }
            _ => {}
        }
        requested = true;
    }
    record.requested = requested;
    record.extras = extras.into_iter().collect();
}

/// Holds the section to its hashes, whatever the resolver made of them.
fn check_hashes(records: &[PypiRecord], section: &Section) -> Result<()> {
    let mut wanted: BTreeMap<Name, BTreeSet<String>> = BTreeMap::new();
    for (name, hashes) in section.hashes() {
        wanted.entry(name).or_default().extend(hashes.into_iter().filter(|hash| hash.algorithm == "sha256").map(|hash| hash.hex));
    }
    for record in records {
        let PypiSource::Archive { url, sha256, .. } = &record.source else {
            if section.options.require_hashes {
                return Err(Error::new(
                    Kind::Verification,
                    format!("`{}` has no hash, and the section demands one of everything", record.name),
                )
                .because("`--require-hashes` is among its options"));
            }
            continue;
        };
        match (wanted.get(&record.name).filter(|hashes| !hashes.is_empty()), sha256) {
            (Some(hashes), Some(sha256)) if !hashes.contains(sha256) => {
                return Err(Error::new(
                    Kind::Verification,
                    format!("`{}` has another hash than the section demands", file_name(url.path())),
                )
                .because(format!("its sha256 is {sha256}"))
                .hint("choose a version whose files have these hashes, or correct the hashes"));
            }
            (None, _) if section.options.require_hashes => {
                return Err(Error::new(Kind::Verification, format!("the section has no sha256 of `{} {}`", record.name, record.version))
                    .because("`--require-hashes` demands one of everything")
                    .hint(match sha256 {
                        Some(sha256) => format!("add `{}=={} --hash=sha256:{sha256}`", record.name, record.version),
                        None => "add it with `--hash=sha256:…`".to_owned(),
                    }));
            }
            _ => {}
        }
    }
    Ok(())
}
