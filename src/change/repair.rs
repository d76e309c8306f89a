//! `verify --repair`: the packages of an environment as they were installed.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use futures::{StreamExt, stream};
use rattler_conda_types::{RepoDataRecord, Subdir};
use serde::Serialize;

use super::apply::{self, Changed, Job, Known, Repair};
use super::find::{Finder, Named, not_found};
use super::{Options, lock, requested_of, same_place};
use crate::channel::Session;
use crate::config::Settings;
use crate::create;
use crate::error::{Error, Kind, Result};
use crate::install::{self, CacheCheck, ExistingEnvironment, ExternalLinks, PrefixLock, Stamp, fetch, metadata};
use crate::prefix::Prefix;
use crate::pypi::fetch::WheelFetcher;
use crate::pypi::installed::{self, Installed};
use crate::pypi::{PypiPlan, PypiSource, ReadyWheel, WheelFile};
use crate::report::Progress;
use crate::verify::{self, Fault, Finding, Report};

/// Something that was found and stays as it is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Unrepaired {
    /// A package.
    pub package: String,
    /// Why it cannot be linked anew.
    pub why: String,
}

/// Another environment that has the very files (hard links) that are wrong here. A repair never writes into them: here it puts other files in their
/// place, there they stay as they are.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Sibling {
    /// The environment.
    pub prefix: PathBuf,
    /// Its files, relative to it, sorted.
    pub files: Vec<String>,
}

/// What a repair found and did.
#[derive(Debug, Clone, Serialize)]
pub struct Repaired {
    /// The environment.
    pub prefix: PathBuf,
    /// What was wrong before.
    pub before: Report,
    /// What is wrong now; with `dry_run` the same.
    pub after: Report,
    /// The packages that were linked anew (`dry_run`: that would be), sorted.
    pub packages: Vec<String>,
    /// Those whose copies in the cache are damaged or gone: they are fetched again (`dry_run`: would be), sorted.
    pub fetched: Vec<String>,
    /// Packages with faults that could not be linked anew.
    pub unrepaired: Vec<Unrepaired>,
    /// Other environments with the same wrong files.
    pub siblings: Vec<Sibling>,
    /// What was done; `None` with `dry_run` and where there was nothing to do.
    pub changed: Option<Changed>,
}

impl Repaired {
    /// The findings that are gone.
    pub fn fixed(&self) -> impl Iterator<Item = &Finding> {
        self.before.findings.iter().filter(|finding| !self.after.findings.contains(finding))
    }
}

/// Verifies an environment and links the packages anew in which something is missing or different: from the cache, whose copies are read whole first, and
/// where it lacks them from where they came. The environment is the old one or the repaired one, never a mixture. The set of packages, the history, the
/// variables and files of no package stay as they are.
///
/// # Errors
/// No environment; a frozen one; a mount point; the lock is held; stopped. What cannot be repaired is no error: it is in the result.
pub async fn repair(check: verify::Options, options: &Options, settings: &Settings, progress: Arc<dyn Progress>) -> Result<Repaired> {
    let path = install::resolve_prefix(&crate::prefix::locate(&options.which, &create::places(settings))?)?;
    let mut held = None;
    if !options.dry_run {
        if path.exists() {
            install::refuse_mount_point(&path)?;
        }
        if path.exists() || install::needs_recovery(&path) {
            held = Some(lock(&path, options, &*progress).await?);
        }
    }
    let prefix = Prefix::open_any(&path)?;
    let existing = ExistingEnvironment { prefix: prefix.path().to_owned(), stamp: None, frozen: prefix.is_frozen() };
    install::refuse_frozen(&existing, options.override_frozen)?;
    let before = verify::verify(&prefix, check, &*progress)?;
    let mut repaired = Repaired {
        prefix: prefix.path().to_owned(),
        after: before.clone(),
        packages: Vec::new(),
        fetched: Vec::new(),
        unrepaired: Vec::new(),
        siblings: siblings(&prefix, &before, settings),
        before,
        changed: None,
    };
    // Half of the files for one place and half for another would be worse than what is there.
    if repaired.before.is_ok() || prefix.is_venv() || repaired.before.findings.iter().any(|finding| finding.fault == Fault::Moved) {
        return Ok(repaired);
    }
    let session = Session::open(settings, progress.clone())?;
    let state = State::read(&prefix)?;
    let Some(job) = state.job(&prefix, &mut repaired, options, settings, &session, progress.clone()).await? else { return Ok(repaired) };
    if options.dry_run {
        return Ok(repaired);
    }
    let locks: Vec<PrefixLock> = held.into_iter().collect();
    let (changed, _locks) = apply::apply(job, locks, &session.package_cache, session.client.clone(), progress.clone()).await?;
    repaired.changed = Some(changed);
    repaired.after = verify::verify(&prefix, check, &*progress)?;
    Ok(repaired)
}

/// What is installed, as far as it can be read and trusted.
struct State {
    stamp: Option<Stamp>,
    /// Packages whose records are as tare wrote them, or that another tool installed.
    known: Vec<Known>,
    /// Records that are missing, cannot be read or are not as tare wrote them, with what can be read of them.
    lost: BTreeMap<String, Option<RepoDataRecord>>,
    /// The files of those packages, as far as they are noted.
    lost_paths: Vec<PathBuf>,
    /// The Python packages that no conda package brought.
    python: Vec<Installed>,
}

impl State {
    fn read(prefix: &Prefix) -> Result<Self> {
        let root = prefix.path();
        let stamp = prefix.stamp().ok().flatten();
        let (records, _) = prefix.records_and_damage()?;
        let mut state = State { stamp, known: Vec::new(), lost: BTreeMap::new(), lost_paths: Vec::new(), python: python_packages(prefix) };
        let noted: HashMap<&str, u64> =
            state.stamp.iter().flat_map(|stamp| &stamp.records).map(|(name, size)| (name.as_str(), *size)).collect();
        for record in records {
            let file = record.file_name();
            let size = std::fs::symlink_metadata(root.join("conda-meta").join(&file)).map(|about| about.len()).ok();
            match (noted.get(file.as_str()), size) {
                (Some(noted), Some(size)) if *noted == size => state.known.push(Known { file, record }),
                (Some(_), _) => {
                    state.lost.insert(file, Some(record.repodata_record));
                }
                (None, Some(_)) => state.known.push(Known { file, record }),
                // Its name in the folder is another: whose it is cannot be told.
                (None, None) => {}
            }
        }
        for file in noted.keys() {
            if !state.known.iter().any(|known| known.file == *file) {
                state.lost.entry((*file).to_owned()).or_insert(None);
            }
        }
        if !state.lost.is_empty() {
            let mut owned: HashSet<&Path> = state.known.iter().flat_map(Known::paths).collect();
            owned.extend(state.python.iter().flat_map(|installed| installed.files.iter().flatten()).map(PathBuf::as_path));
            let manifest = std::fs::read_to_string(root.join(metadata::TARE_FOLDER).join("files")).unwrap_or_default();
            state.lost_paths = manifest
                .lines()
                .filter_map(|line| line.split_once(' '))
                .map(|(_, path)| PathBuf::from(path))
                .filter(|path| !owned.contains(path.as_path()))
                .collect();
        }
        Ok(state)
    }

    /// The numbers of packages that a finding is about.
    fn concerned(&self, finding: &Finding, owners: &HashMap<&Path, Vec<usize>>) -> Vec<usize> {
        let path = Path::new(&finding.path);
        match finding.fault {
            Fault::Missing | Fault::Changed | Fault::WrongLink | Fault::DanglingLink | Fault::WrongMode | Fault::Unreadable => {
                owners.get(path).cloned().unwrap_or_default()
            }
            Fault::StalePyc => match (owners.get(path), source_of(path)) {
                (Some(owners), _) => owners.clone(),
                (None, Some(source)) => owners.get(source.as_path()).cloned().unwrap_or_default(),
                (None, None) => Vec::new(),
            },
            _ => Vec::new(),
        }
    }

    /// What is to be done; `None` if nothing can be.
    async fn job(
        mut self,
        prefix: &Prefix,
        repaired: &mut Repaired,
        options: &Options,
        settings: &Settings,
        session: &Session,
        progress: Arc<dyn Progress>,
    ) -> Result<Option<Job>> {
        let subdir = prefix.subdir().or_else(Subdir::current).unwrap_or(Subdir::Linux64);
        let mut owners: HashMap<&Path, Vec<usize>> = HashMap::new();
        for (number, known) in self.known.iter().enumerate() {
            for path in known.paths() {
                owners.entry(path).or_default().push(number);
            }
        }
        let mut chosen: BTreeSet<usize> = BTreeSet::new();
        for finding in &repaired.before.findings {
            chosen.extend(self.concerned(finding, &owners));
        }
        drop(owners);
        self.spread(&mut chosen);
        let mut in_the_way: Vec<usize> = Vec::new();
        for number in &chosen {
            let known = &self.known[*number];
            if let Some(why) = obstacle(prefix.path(), &known.paths().collect()) {
                repaired.unrepaired.push(Unrepaired { package: known.name().as_normalized().to_owned(), why });
                in_the_way.push(*number);
            }
        }
        chosen.retain(|number| !in_the_way.contains(number));

        let mut records: Vec<RepoDataRecord> = chosen.iter().map(|number| self.known[*number].record.repodata_record.clone()).collect();
        let mut rewritten: HashSet<String> = HashSet::new();
        match self.recall(prefix, subdir, settings, session, options).await {
            Ok(recalled) => {
                for (file, record) in recalled {
                    rewritten.insert(file);
                    records.push(record);
                }
            }
            Err(error) if error.kind() == Kind::Interrupted => return Err(error),
            Err(error) => {
                for file in self.lost.keys() {
                    let package = file.trim_end_matches(".json").rsplitn(3, '-').last().unwrap_or(file).to_owned();
                    repaired.unrepaired.push(Unrepaired { package, why: error.to_string() });
                }
                // Whose files they are is not known, so they are nobody's and stay.
                self.lost_paths.clear();
            }
        }

        let records = self.obtainable(records, repaired, options, settings, session, progress.clone()).await?;
        let by_default = self.stamp.as_ref().map_or(settings.compile.value, |stamp| stamp.compiled);
        let compiled = self.compiled(&records, by_default);
        let (unlink_python, keep_python, wheels) = self.damaged_python(prefix, repaired, options, settings, session, progress).await?;
        let names: HashSet<_> = records.iter().map(|record| record.package_record.name.clone()).collect();
        rewritten.retain(|file| records.iter().any(|record| record_file(record) == *file));
        repaired.packages = names.iter().map(|name| name.as_normalized().to_owned()).collect();
        repaired.packages.extend(unlink_python.iter().map(|installed| installed.name.clone()));
        repaired.packages.sort();
        repaired.fetched.sort();
        repaired.unrepaired.sort_by(|a, b| a.package.cmp(&b.package));
        if records.is_empty() && wheels.is_empty() {
            return Ok(None);
        }
        let requested = match &self.stamp {
            Some(stamp) => stamp.requested.iter().filter_map(|text| crate::spec::parse_match_spec(text, None).ok()).collect(),
            None => {
                let all = requested_of(prefix, &self.known)?;
                all.values().filter_map(|text| crate::spec::parse_match_spec(text, None).ok()).collect()
            }
        };
        // The path that the files name; the same folder may be reached by another road.
        let place = match &self.stamp {
            Some(stamp) if same_place(&stamp.prefix, prefix.path()) => stamp.prefix.clone(),
            _ => prefix.path().to_owned(),
        };
        let mut plan = install::Plan::new(place, subdir, records);
        plan.link_mode = create::link_mode(options.link_mode, settings)?;
        plan.compile = !compiled.is_empty();
        plan.requested = requested;
        plan.command.clone_from(&options.command);
        plan.concurrency = settings.concurrency.value;
        plan.cancel = options.cancel.clone();
        // They lay side by side before.
        plan.clobber = true;
        plan.external_links = ExternalLinks::Allow;
        plan.register = false;
        if !wheels.is_empty() {
            let all = self.known.iter().map(|known| &known.record.repodata_record).chain(&plan.records);
            match crate::pypi::install::python_version(all.map(|record| &record.package_record)) {
                Some(python) => plan.pypi = Some(PypiPlan { wheels, python, engine: None, clobber: true }),
                None => return Ok(None),
            }
        }
        let (unlink, keep): (Vec<Known>, Vec<Known>) = self.known.into_iter().partition(|known| names.contains(known.name()));
        let lost_paths = if rewritten.is_empty() { Vec::new() } else { self.lost_paths };
        let modes = install::read_modes(prefix.path());
        Ok(Some(Job {
            base: plan.prefix.clone(),
            plan,
            keep,
            unlink,
            keep_python,
            unlink_python,
            update_specs: Vec::new(),
            remove_specs: Vec::new(),
            variables: None,
            marker: None,
            moved_from: None,
            repair: Some(Repair {
                modes: modes.filter(|_| self.stamp.is_some()),
                stamp: self.stamp,
                lost_records: rewritten,
                lost_paths,
                compiled,
            }),
        }))
    }

    /// The packages that have byte code by their lists; those of `records` whose lists were lost, `by_default`.
    fn compiled(&self, records: &[RepoDataRecord], by_default: bool) -> HashSet<String> {
        let has = |path: &Path| path.extension().is_some_and(|extension| extension == "pyc");
        let name = |record: &RepoDataRecord| record.package_record.name.as_normalized().to_owned();
        let known: HashSet<String> = self.known.iter().map(|known| name(&known.record.repodata_record)).collect();
        let conda = self.known.iter().filter(|known| known.paths().any(has)).map(|known| name(&known.record.repodata_record));
        let lost = records.iter().map(name).filter(|name| by_default && !known.contains(name));
        let python = self.python.iter().filter(|installed| installed.owns().any(has)).map(Installed::qualified);
        conda.chain(lost).chain(python).collect()
    }

    /// The Python packages that are linked anew, those that stay, and the wheels.
    async fn damaged_python(
        &mut self,
        prefix: &Prefix,
        repaired: &mut Repaired,
        options: &Options,
        settings: &Settings,
        session: &Session,
        progress: Arc<dyn Progress>,
    ) -> Result<(Vec<Installed>, Vec<Installed>, Vec<ReadyWheel>)> {
        let mut owners: HashMap<&Path, usize> = HashMap::new();
        for (number, installed) in self.python.iter().enumerate().filter(|(_, installed)| installed.is_ours()) {
            owners.extend(installed.files.iter().flatten().map(|path| (path.as_path(), number)));
            owners.insert(&installed.info, number);
        }
        let mut chosen: BTreeSet<usize> = BTreeSet::new();
        for finding in &repaired.before.findings {
            let path = Path::new(&finding.path);
            let repairable = matches!(
                finding.fault,
                Fault::Missing
                    | Fault::Changed
                    | Fault::WrongLink
                    | Fault::DanglingLink
                    | Fault::WrongMode
                    | Fault::Unreadable
                    | Fault::StalePyc
                    | Fault::DamagedRecord
            );
            if repairable {
                chosen.extend(owners.get(path).or_else(|| owners.get(source_of(path)?.as_path())));
            }
        }
        let fetcher = WheelFetcher {
            cache: &session.package_cache,
            client: session.client.clone(),
            check: CacheCheck::Full,
            concurrency: settings.concurrency.value,
            progress,
            cancel: options.cancel.clone(),
        };
        let (mut again, mut wheels) = (BTreeSet::new(), Vec::new());
        for number in chosen {
            let installed = &self.python[number];
            let paths: HashSet<&Path> = installed.files.iter().flatten().map(PathBuf::as_path).collect();
            let ready = installed.tare.as_ref().map(|tare| crate::notebook::same_again(tare.ready(), settings));
            let tried = match (obstacle(prefix.path(), &paths), ready) {
                (Some(why), _) => Err(Error::failure(why)),
                (None, Some(ready)) => match fetcher.present(&ready).await {
                    Ok(true) => Ok(ready),
                    Ok(false) => {
                        let come = if options.dry_run {
                            wheel_could_come(&ready, session)
                        } else {
                            fetcher.ensure(std::slice::from_ref(&ready)).await.map(drop)
                        };
                        come.map(|()| {
                            repaired.fetched.push(installed.name.clone());
                            ready
                        })
                    }
                    Err(error) => Err(error),
                },
                (None, None) => continue,
            };
            match tried {
                Ok(ready) => {
                    again.insert(number);
                    wheels.push(ready);
                }
                Err(error) if error.kind() == Kind::Interrupted => return Err(error),
                Err(error) => repaired.unrepaired.push(Unrepaired { package: installed.name.clone(), why: error.to_string() }),
            }
        }
        let (mut unlink, mut keep) = (Vec::new(), Vec::new());
        for (number, installed) in std::mem::take(&mut self.python).into_iter().enumerate() {
            if again.contains(&number) { unlink.push(installed) } else { keep.push(installed) }
        }
        Ok((unlink, keep, wheels))
    }

    /// Adds the packages that share a path with those chosen: which of them has its file there is decided among all of them.
    fn spread(&self, chosen: &mut BTreeSet<usize>) {
        let mut sharing: HashMap<PathBuf, Vec<usize>> = HashMap::new();
        for (number, known) in self.known.iter().enumerate() {
            for path in known.paths() {
                let own = apply::clobbered_path(path).unwrap_or(path);
                sharing.entry(own.to_owned()).or_default().push(number);
            }
        }
        sharing.retain(|_, numbers| numbers.len() > 1);
        loop {
            let more: BTreeSet<usize> =
                sharing.values().filter(|numbers| numbers.iter().any(|number| chosen.contains(number))).flatten().copied().collect();
            if more.is_subset(chosen) {
                return;
            }
            chosen.extend(more);
        }
    }

    /// The packages whose records were lost. That they are the right ones is proven by the digest of all packages of the environment.
    async fn recall(
        &self,
        prefix: &Prefix,
        subdir: Subdir,
        settings: &Settings,
        session: &Session,
        options: &Options,
    ) -> Result<Vec<(String, RepoDataRecord)>> {
        let Some(stamp) = self.stamp.as_ref().filter(|_| !self.lost.is_empty()) else { return Ok(Vec::new()) };
        let history: Vec<Named> =
            prefix.history()?.iter().rev().flat_map(|revision| revision.added.iter().filter_map(|text| Named::parse(text))).collect();
        let mut wanted = Vec::new();
        for file in self.lost.keys() {
            let stem = file.trim_end_matches(".json");
            let of_history = history.iter().find(|named| format!("{}-{}-{}", named.name, named.version, named.build) == stem);
            let named = of_history.cloned().or_else(|| Named::parse(stem));
            wanted.push(named.ok_or_else(|| Error::failure(format!("`{file}` names no package")))?);
        }
        let channels: Vec<String> =
            stamp.metadata["channels"].as_array().into_iter().flatten().filter_map(|name| Some(name.as_str()?.to_owned())).collect();
        let mut candidates: Vec<Vec<RepoDataRecord>> = self.lost.values().map(|record| record.iter().cloned().collect()).collect();
        let others: Vec<RepoDataRecord> = self
            .known
            .iter()
            .filter(|known| stamp.records.iter().any(|(name, _)| *name == known.file))
            .map(|known| known.record.repodata_record.clone())
            .collect();
        let files: Vec<String> = self.lost.keys().cloned().collect();
        if let Some(records) = proven(&others, &candidates, &stamp.environment_digest) {
            return Ok(files.into_iter().zip(records).collect());
        }
        let finder = Finder { settings, session, subdir, channels, cancel: options.cancel.clone(), may_fetch: !options.dry_run };
        let found = finder.find(&wanted).await?;
        for (records, found) in candidates.iter_mut().zip(&found) {
            // Before what may have been tampered with.
            records.splice(0..0, found.records.iter().cloned());
        }
        match proven(&others, &candidates, &stamp.environment_digest) {
            Some(records) => Ok(files.into_iter().zip(records).collect()),
            None => {
                let lacking: Vec<_> = wanted.iter().zip(&found).filter(|(_, found)| found.records.is_empty()).collect();
                Err(if lacking.is_empty() {
                    Error::failure("the package that its record was of cannot be told")
                        .because("what its channel has is not what was installed")
                } else {
                    not_found("its record was lost", &lacking)
                })
            }
        }
    }

    /// Brings the packages into the cache, reading whole what is there already; what cannot be had is left out and told.
    async fn obtainable(
        &self,
        records: Vec<RepoDataRecord>,
        repaired: &mut Repaired,
        options: &Options,
        settings: &Settings,
        session: &Session,
        progress: Arc<dyn Progress>,
    ) -> Result<Vec<RepoDataRecord>> {
        let fetcher = fetch::Fetcher {
            cache: &session.package_cache,
            client: session.client.clone(),
            // A hard link into the cache has changed the cached file with that of the environment.
            check: CacheCheck::Full,
            concurrency: settings.concurrency.value,
            progress,
            cancel: options.cancel.clone(),
        };
        let (fetcher, dry_run) = (&fetcher, options.dry_run);
        let tried: Vec<(RepoDataRecord, Result<bool>)> = stream::iter(records)
            .map(|record| async move {
                let tried = async {
                    let present = fetcher.present(&record).await?;
                    if !present && dry_run {
                        could_come(&record.url, session)?;
                    } else if !present {
                        fetcher.fetch_all(std::slice::from_ref(&record)).await?;
                    }
                    Ok(present)
                };
                let tried = tried.await;
                (record, tried)
            })
            .buffered(settings.concurrency.value.max(1))
            .collect()
            .await;
        let mut obtained = Vec::new();
        for (record, tried) in tried {
            match tried {
                Ok(present) => {
                    if !present {
                        repaired.fetched.push(record.package_record.name.as_normalized().to_owned());
                    }
                    obtained.push(record);
                }
                Err(error) if error.kind() == Kind::Interrupted => return Err(error),
                Err(error) => {
                    let package = record.package_record.name.as_normalized().to_owned();
                    repaired.unrepaired.push(Unrepaired { package, why: error.to_string() });
                }
            }
        }
        Ok(obtained)
    }
}

/// The Python packages as they are, those of tare with the files that tare noted: a `RECORD` may be damaged or gone.
fn python_packages(prefix: &Prefix) -> Vec<Installed> {
    let mut all = installed::read(prefix);
    let (noted, _) = installed::noted(prefix.path());
    for record in noted {
        let info = PathBuf::from(&record.dist_info);
        let files: Vec<PathBuf> = record.files.iter().map(|file| PathBuf::from(&file.path)).collect();
        match all.iter_mut().find(|installed| installed.name == record.record.name.as_ref()) {
            Some(installed) if installed.info == info && matches!(installed.installer.as_str(), "" | crate::pypi::install::INSTALLER) => {
                installed.files = Some(files);
                installed.tare = Some(record);
            }
            // By another tool.
            Some(_) => {}
            None => all.push(Installed {
                name: record.record.name.to_string(),
                version: record.record.version.to_string(),
                info,
                installer: crate::pypi::install::INSTALLER.to_owned(),
                requested: record.record.requested,
                files: Some(files),
                requires: record.record.requires_dist.clone(),
                tare: Some(record),
            }),
        }
    }
    all
}

/// Whether something that is not in the cache may come from where it came; nothing is asked.
fn could_come(url: &url::Url, session: &Session) -> Result<()> {
    match url.to_file_path() {
        Ok(path) if url.scheme() == "file" && !path.is_file() => {
            Err(Error::failure(format!("`{}` is not there", path.display())).because("and the cache has no good copy"))
        }
        _ if url.scheme() != "file" && session.offline => {
            Err(Error::network("the network is off").because("and the cache has no good copy"))
        }
        _ => Ok(()),
    }
}

fn wheel_could_come(ready: &ReadyWheel, session: &Session) -> Result<()> {
    match (&ready.wheel, &ready.record.source) {
        (WheelFile::Local { path, .. }, _) if path.is_file() => Ok(()),
        (WheelFile::Remote, PypiSource::Archive { url, .. }) => could_come(url, session),
        _ => Err(Error::failure("its wheel was built on this machine and is no longer in the cache")),
    }
}

/// The environments that have the very files of `report` with something wrong in them.
fn siblings(prefix: &Prefix, report: &Report, settings: &Settings) -> Vec<Sibling> {
    #[cfg(unix)]
    {
        use std::os::unix::fs::MetadataExt;
        let identity = |path: &Path| std::fs::symlink_metadata(path).ok().filter(|about| about.is_file());
        let wrong: Vec<(&str, (u64, u64))> = report
            .findings
            .iter()
            .filter(|finding| matches!(finding.fault, Fault::Changed | Fault::WrongMode | Fault::StalePyc) && !finding.path.is_empty())
            .filter_map(|finding| {
                let about = identity(&prefix.path().join(&finding.path)).filter(|about| about.nlink() > 1)?;
                Some((finding.path.as_str(), (about.dev(), about.ino())))
            })
            .collect();
        if wrong.is_empty() {
            return Vec::new();
        }
        let known = crate::prefix::list_known(&create::places(settings), false);
        let mut found = Vec::new();
        for known in known.into_iter().filter(|known| !same_place(&known.prefix, prefix.path())) {
            let same = |(path, wanted): &&(&str, (u64, u64))| {
                identity(&known.prefix.join(path)).is_some_and(|about| (about.dev(), about.ino()) == *wanted)
            };
            let mut files: Vec<String> = wrong.iter().filter(same).map(|(path, _)| (*path).to_owned()).collect();
            files.sort();
            files.dedup();
            if !files.is_empty() {
                found.push(Sibling { prefix: known.prefix, files });
            }
        }
        found
    }
    #[cfg(not(unix))]
    {
        let _ = (prefix, report, settings);
        Vec::new()
    }
}

fn record_file(record: &RepoDataRecord) -> String {
    let package = &record.package_record;
    format!("{}-{}-{}.json", package.name.as_normalized(), package.version, package.build)
}

/// One of each list of candidates, so that all packages together have the digest.
fn proven(others: &[RepoDataRecord], candidates: &[Vec<RepoDataRecord>], digest: &str) -> Option<Vec<RepoDataRecord>> {
    /// More combinations than this are not tried.
    const LIMIT: usize = 4096;
    let combinations = candidates.iter().try_fold(1usize, |count, list| count.checked_mul(list.len()))?.min(LIMIT);
    (0..combinations).find_map(|number| {
        let mut rest = number;
        let mut picked = Vec::with_capacity(candidates.len());
        for list in candidates {
            picked.push(list[rest % list.len()].clone());
            rest /= list.len();
        }
        let all: Vec<RepoDataRecord> = others.iter().chain(&picked).cloned().collect();
        (install::digest_of(&all) == digest).then_some(picked)
    })
}

/// The Python file that byte code in `__pycache__` is of.
fn source_of(path: &Path) -> Option<PathBuf> {
    let folder = path.parent().filter(|folder| folder.file_name().is_some_and(|name| name == "__pycache__"))?;
    let (module, _) = path.file_name()?.to_str()?.split_once('.')?;
    Some(folder.with_file_name(format!("{module}.py")))
}

/// What stands where one of the files has to be, and is not a file: a folder with something in it, a link or file in place of a folder.
fn obstacle(root: &Path, paths: &HashSet<&Path>) -> Option<String> {
    let mut sorted: Vec<&Path> = paths.iter().copied().collect();
    sorted.sort();
    let mut looked: HashSet<&Path> = HashSet::new();
    for path in sorted {
        let full = root.join(path);
        if std::fs::symlink_metadata(&full).is_ok_and(|about| about.is_dir())
            && std::fs::read_dir(&full)
                .is_ok_and(|mut entries| entries.any(|entry| entry.is_ok_and(|e| !paths.contains(path.join(e.file_name()).as_path()))))
            && !paths.iter().any(|other| *other != path && other.starts_with(path))
        {
            return Some(format!("`{}` is a folder with other things in it: move it away", path.display()));
        }
        for folder in path.ancestors().skip(1).filter(|folder| !folder.as_os_str().is_empty()) {
            if !looked.insert(folder) {
                break;
            }
            if !paths.contains(folder) && std::fs::symlink_metadata(root.join(folder)).is_ok_and(|about| !about.is_dir()) {
                return Some(format!("`{}` is no folder: move it away", folder.display()));
            }
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn byte_code_has_one_source() {
        assert_eq!(source_of(Path::new("lib/p/__pycache__/m.cpython-311.opt-1.pyc")), Some("lib/p/m.py".into()));
        assert_eq!(source_of(Path::new("lib/p/m.pyc")), None);
    }

    #[test]
    fn obstacles_are_what_is_not_the_packages_own() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        let paths: HashSet<&Path> = [Path::new("share/a/x"), Path::new("share/b")].into();
        assert_eq!(obstacle(root, &paths), None);
        std::fs::create_dir_all(root.join("share/b")).unwrap();
        assert_eq!(obstacle(root, &paths), None, "an empty folder is in nobody's way");
        std::fs::write(root.join("share/b/mine"), "").unwrap();
        assert!(obstacle(root, &paths).unwrap().contains("`share/b` is a folder"));
        std::fs::remove_dir_all(root.join("share")).unwrap();
        std::fs::write(root.join("share"), "").unwrap();
        assert!(obstacle(root, &paths).unwrap().contains("`share` is no folder"));
    }
}
