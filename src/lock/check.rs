//! `tare lock --check`: does a lock still satisfy its inputs? Nothing is solved, nothing is fetched.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use rattler_conda_types::{MatchSpec, Matches, RepoDataRecord, Subdir};
use url::Url;

use super::make::is_secret;
use super::{Format, HOST_SCHEME, Lock, LockedPlatform, LockedPypi, LockedVcs, without_credentials};
use crate::channel;
use crate::config::Settings;
use crate::error::{Error, Kind, Place, Result};
use crate::pypi::Section;
use crate::spec::{self, ChannelEntry, Dependency, EditableTarget, EnvSpec, ExplicitHash, Fetched, PipItem, PipKind};

/// What the lock is checked against.
#[derive(Debug, Clone, Default)]
pub struct CheckOptions {
    /// Match specs of the command line.
    pub specs: Vec<String>,
    /// `-c`.
    pub channels: Vec<String>,
    /// `--override-channels`.
    pub override_channels: bool,
    /// Only these platforms.
    pub platforms: Vec<String>,
    /// Leave out the `pip:` sections.
    pub no_pip: bool,
    /// Name of the lock, for messages.
    pub lock_name: String,
}

/// What was found in order.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize)]
pub struct Checked {
    /// The platforms that were looked at.
    pub platforms: Vec<String>,
    /// Number of requirements that were checked, over all platforms: channels, variables, conda and Python packages.
    pub requirements: usize,
    /// What they were, for each of `platforms`.
    pub counts: Vec<Counts>,
    /// What the format of the lock leaves open.
    pub remarks: Vec<String>,
}

/// What was asked for on a platform and found to be met.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize)]
pub struct Counts {
    /// Channels.
    pub channels: usize,
    /// Variables.
    pub variables: usize,
    /// Match specs and explicit packages.
    pub conda: usize,
    /// Lines of the `pip:` section.
    pub pypi: usize,
}

impl Counts {
    fn text(&self) -> String {
        let parts = [
            (self.conda, "conda requirement"),
            (self.pypi, "Python requirement"),
            (self.channels, "channel"),
            (self.variables, "variable"),
        ];
        let parts: Vec<String> =
            parts.into_iter().filter(|(number, _)| *number > 0).map(|(number, what)| crate::resolve::count(number, what)).collect();
        if parts.is_empty() { "nothing is asked for".to_owned() } else { parts.join(", ") }
    }
}

impl Checked {
    /// For people: what was asked for on which platform.
    pub fn text(&self) -> String {
        match self.counts.first() {
            Some(first) if self.counts.iter().all(|counts| counts == first) => {
                let each = if self.platforms.len() > 1 { "each of " } else { "" };
                format!("{} on {each}{}", first.text(), self.platforms.join(", "))
            }
            _ => {
                let each = self.platforms.iter().zip(&self.counts);
                each.map(|(platform, counts)| format!("{} on {platform}", counts.text())).collect::<Vec<_>>().join("; ")
            }
        }
    }

    fn now(&mut self) -> &mut Counts {
        if self.counts.len() <= self.platforms.len() {
            self.counts.push(Counts::default());
        }
        let last = self.counts.len() - 1;
        &mut self.counts[last]
    }
}

/// Checks that every requirement of the inputs is met by what is locked, and that the lock holds together.
///
/// # Errors
/// Kind drift with the first requirement that fails and its place; what reading the inputs refuses.
pub fn check(lock: &Lock, fetched: &[Fetched], options: &CheckOptions, settings: &Settings) -> Result<Checked> {
    let root_dir = std::env::current_dir().map_err(|error| Error::failure("the current folder is gone").because(error))?;
    let mut checked = Checked::default();
    let mut platforms: Vec<&LockedPlatform> = Vec::new();
    for name in &options.platforms {
        platforms.push(lock.platform(name).ok_or_else(|| no_platform(lock, name, fetched, options))?);
    }
    let everywhere = lock.source == Format::Pylock;
    if platforms.is_empty() {
        platforms = lock.platforms.iter().collect();
    }
    if platforms.is_empty() {
        return Err(drift(options, "it holds no platform"));
    }
    for platform in platforms {
        let subdir = if everywhere { Subdir::current().unwrap_or(Subdir::Linux64) } else { platform.subdir };
        let read = spec::ReadOptions { subdir, root_dir: root_dir.clone(), env: |name| std::env::var(name).ok(), target_given: true };
        let spec = spec::read(fetched, &options.specs, &read)?;
        let one = One { lock, platform, spec: &spec, fetched, options, several: lock.platforms.len() > 1 };
        if everywhere {
            checked.remarks.push("a pylock.toml holds only the PyPI half: conda requirements were not checked".to_owned());
        } else {
            if options.platforms.is_empty() {
                one.platforms(fetched)?;
            }
            one.channels(settings, &root_dir, &mut checked)?;
            one.variables(fetched, &mut checked)?;
            one.conda(&mut checked)?;
            one.leftover()?;
            one.closed()?;
        }
        if !options.no_pip {
            one.pip(&mut checked)?;
        }
        checked.now();
        checked.platforms.push(platform.name.clone());
    }
    checked.requirements = checked.counts.iter().map(|counts| counts.channels + counts.variables + counts.conda + counts.pypi).sum();
    checked.remarks.sort();
    checked.remarks.dedup();
    Ok(checked)
}

fn drift(options: &CheckOptions, why: impl std::fmt::Display) -> Error {
    Error::new(Kind::Drift, format!("the lock `{}` is out of date", options.lock_name)).because(why)
}

fn no_platform(lock: &Lock, name: &str, fetched: &[Fetched], options: &CheckOptions) -> Error {
    drift(options, format!("it has no platform `{name}`; it has {}", lock.platform_names().join(", ")))
        .hint(format!("to add it: {}", again(fetched, options, &format!("--platform {name}"))))
}

/// The command that makes the lock again.
fn again(fetched: &[Fetched], options: &CheckOptions, more: &str) -> String {
    let files: Vec<String> = fetched.iter().map(|input| input.name.clone()).collect();
    super::command(&files, &options.specs, &options.lock_name, more)
}

/// One platform of the lock against the inputs as they are for it.
struct One<'a> {
    lock: &'a Lock,
    platform: &'a LockedPlatform,
    spec: &'a EnvSpec,
    fetched: &'a [Fetched],
    options: &'a CheckOptions,
    several: bool,
}

impl One<'_> {
    fn fail(&self, what: impl std::fmt::Display, place: Option<&Place>) -> Error {
        let on = if self.several { format!(" on {}", self.platform.name) } else { String::new() };
        let error =
            drift(self.options, format!("{what}{on}")).hint(format!("to bring it up to date: {}", again(self.fetched, self.options, "")));
        match place {
            Some(place) => error.at(place.clone()),
            None => error,
        }
    }

    fn by_tare(&self) -> bool {
        self.lock.provenance.schema > 0
    }

    fn platforms(&self, fetched: &[Fetched]) -> Result<()> {
        let missing = self.spec.platforms.iter().find(|subdir| !self.lock.platforms.iter().any(|platform| platform.subdir == **subdir));
        let Some(missing) = missing else { return Ok(()) };
        let place = place_of(fetched, "platforms", missing.as_str());
        Err(self.fail(format!("the platform `{missing}` is not in it"), place.as_ref()))
    }

    fn channels(&self, settings: &Settings, root_dir: &std::path::Path, checked: &mut Checked) -> Result<()> {
        if self.spec.explicit.is_some() || self.lock.source == Format::Explicit {
            return Ok(());
        }
        let mut entries: Vec<ChannelEntry> =
            self.options.channels.iter().map(|text| ChannelEntry { text: text.clone(), place: None }).collect();
        entries.extend(self.spec.channels.iter().cloned());
        let host = || Url::parse(&format!("{HOST_SCHEME}:///")).map_err(|error| Error::failure("no URL for `host`").because(error));
        let expand = |entries: &[ChannelEntry], override_channels: bool| -> Result<Vec<String>> {
            let expanded = channel::expand(
                entries,
                settings,
                channel::ExpandOptions {
                    override_channels,
                    declared: self.spec.channels_declared || !self.options.channels.is_empty(),
                    nodefaults: self.spec.nodefaults,
                    root_dir,
                    host: Some(&host),
                },
            )?;
            Ok(expanded.channels.iter().map(|channel| shown(channel.channel.base_url.as_ref().as_str())).collect())
        };
        // conda-lock writes names.
        let mut locked = Vec::new();
        for channel in &self.lock.channels {
            if channel.contains("://") {
                locked.push(shown(channel));
            } else {
                locked.extend(expand(&[ChannelEntry { text: channel.clone(), place: None }], true)?);
            }
        }
        if locked.is_empty() {
            checked.remarks.push("the lock does not tell its channels".to_owned());
            return Ok(());
        }
        let wanted = expand(&entries, self.options.override_channels)?;
        checked.now().channels += wanted.len();
        if wanted == locked {
            return Ok(());
        }
        let declared = if entries.is_empty() { wanted.clone() } else { expand(&entries, true).unwrap_or_else(|_| wanted.clone()) };
        if declared == locked {
            return Ok(());
        }
        if !self.by_tare() {
            // Other tools append no defaults; what matters is that the declared ones are there, in order.
            let mut rest = locked.iter();
            if declared.iter().all(|channel| rest.any(|known| known == channel)) {
                return Ok(());
            }
        }
        let place_of = |url: &str| {
            self.spec
                .channels
                .iter()
                .find(|entry| expand(std::slice::from_ref(*entry), true).is_ok_and(|urls| urls.iter().any(|known| known == url)))
        };
        if let Some(missing) = wanted.iter().find(|channel| !locked.contains(channel)) {
            let place = place_of(missing).and_then(|entry| entry.place.clone());
            return Err(self.fail(format!("the channel `{missing}` is not in it"), place.as_ref()));
        }
        if let Some(extra) = locked.iter().find(|channel| !wanted.contains(channel)) {
            return Err(self.fail(format!("it was made with the channel `{extra}`, which is not asked for"), None));
        }
        let place = wanted.iter().zip(&locked).find(|(a, b)| a != b).and_then(|(a, _)| place_of(a)).and_then(|entry| entry.place.clone());
        Err(self.fail(format!("the order of the channels is {} there", locked.join(", ")), place.as_ref()))
    }

    fn variables(&self, fetched: &[Fetched], checked: &mut Checked) -> Result<()> {
        if !self.by_tare() {
            if !self.spec.variables.is_empty() {
                checked.remarks.push("the lock does not hold variables: they were not checked".to_owned());
            }
            return Ok(());
        }
        let known = &self.lock.provenance;
        let fail = |what: String, name: &str| Err(self.fail(what, place_of(fetched, "variables", name).as_ref()));
        for (name, value) in &self.spec.variables {
            checked.now().variables += 1;
            if is_secret(name, value) {
                if !known.secret_variables.contains(name) {
                    return fail(format!("the variable `{name}` is not in it"), name);
                }
                continue;
            }
            match known.variables.get(name) {
                None => return fail(format!("the variable `{name}` is not in it"), name),
                Some(locked) if locked != value => return fail(format!("the variable `{name}` has another value in it"), name),
                Some(_) => {}
            }
        }
        let gone = known.variables.keys().chain(&known.secret_variables).find(|name| !self.spec.variables.contains_key(*name));
        match gone {
            Some(name) => Err(self.fail(format!("the variable `{name}` in it is not asked for any more"), None)),
            None => Ok(()),
        }
    }

    fn conda(&self, checked: &mut Checked) -> Result<()> {
        if let Some(explicit) = &self.spec.explicit {
            for package in &explicit.packages {
                checked.now().conda += 1;
                self.archive(&package.url, package.hash.as_ref(), package.place.as_ref())?;
            }
            if explicit.packages.len() < self.platform.conda.len() {
                let extra =
                    self.platform.conda.iter().find(|record| !explicit.packages.iter().any(|package| same_url(&package.url, &record.url)));
                if let Some(extra) = extra {
                    return Err(
                        self.fail(format!("`{}` in it is not in the explicit list", extra.package_record.name.as_normalized()), None)
                    );
                }
            }
            return Ok(());
        }
        let mut by_name: BTreeMap<&str, Vec<&RepoDataRecord>> = BTreeMap::new();
        for record in &self.platform.conda {
            by_name.entry(record.package_record.name.as_normalized()).or_default().push(record);
        }
        for dependency in &self.spec.dependencies {
            checked.now().conda += 1;
            match dependency {
                Dependency::Package { url, hash, place, .. } => self.archive(url, hash.as_ref(), place.as_ref())?,
                Dependency::Match { spec, text, place } => {
                    let shown = spec::mask_secrets(text);
                    let candidates: Vec<&RepoDataRecord> = match spec.name.as_exact() {
                        Some(name) if name.as_normalized().starts_with("__") => {
                            self.virtual_package(spec, &shown, place.as_ref())?;
                            continue;
                        }
                        Some(name) => by_name.get(name.as_normalized()).cloned().unwrap_or_default(),
                        None => self.platform.conda.iter().filter(|record| spec.name.matches(&record.package_record.name)).collect(),
                    };
                    if candidates.iter().any(|record| spec.matches(*record) && self.channel_fits(spec, record)) {
                        continue;
                    }
                    let why = match candidates.first() {
                        None => format!("nothing in it satisfies `{shown}`: the package is not locked"),
                        Some(record) => {
                            let package = &record.package_record;
                            let locked = format!("{} {} {}", package.name.as_normalized(), package.version, package.build);
                            if spec.matches(*record) {
                                format!("`{shown}` is not satisfied: `{locked}` is from {}", crate::install::channel_name(record))
                            } else {
                                format!("`{shown}` is not satisfied: `{locked}` is locked")
                            }
                        }
                    };
                    return Err(self.fail(why, place.as_ref()));
                }
            }
        }
        Ok(())
    }

    fn virtual_package(&self, spec: &MatchSpec, shown: &str, place: Option<&Place>) -> Result<()> {
        let fits = |package: &super::LockedVirtualPackage| package.generic().is_ok_and(|package| spec.matches(&package));
        if self.platform.virtual_packages.is_empty() || self.platform.virtual_packages.iter().any(fits) {
            return Ok(());
        }
        Err(self.fail(format!("`{shown}` is not satisfied by the machine that was assumed"), place))
    }

    /// `channel::name`: whether the record comes from there, by the channel's name or URL.
    fn channel_fits(&self, spec: &MatchSpec, record: &RepoDataRecord) -> bool {
        let Some(channel) = &spec.channel else { return true };
        let url = shown(channel.base_url.as_ref().as_str());
        let from = shown(record.url.as_str());
        from.starts_with(&format!("{url}/")) || channel.name.as_deref() == Some(crate::install::channel_name(record).as_str())
    }

    fn archive(&self, url: &Url, hash: Option<&ExplicitHash>, place: Option<&Place>) -> Result<()> {
        let name = without_credentials(url.as_str());
        let Some(record) = self.platform.conda.iter().find(|record| same_url(&record.url, url)) else {
            return Err(self.fail(format!("`{name}` is not in it"), place));
        };
        let same = match hash {
            None => true,
            Some(ExplicitHash::Md5(hash)) => record.package_record.md5.is_none_or(|known| known == *hash),
            Some(ExplicitHash::Sha256(hash)) => record.package_record.sha256.is_none_or(|known| known == *hash),
        };
        if same { Ok(()) } else { Err(self.fail(format!("`{name}` has another hash in it"), place)) }
    }

    /// What the lock was asked for and the file does not ask for any more.
    fn leftover(&self) -> Result<()> {
        let Some(facts) = self.lock.provenance.platforms.get(&self.platform.name) else { return Ok(()) };
        let mut names: BTreeSet<String> = BTreeSet::new();
        for dependency in &self.spec.dependencies {
            match dependency {
                Dependency::Match { spec, .. } => names.extend(name_of(spec)),
                Dependency::Package { url, .. } => {
                    names.extend(super::explicit::record_of(url).ok().map(|record| record.package_record.name.as_normalized().to_owned()))
                }
            }
        }
        for text in &facts.requested {
            let Ok(spec) = spec::parse_match_spec(text, None) else { continue };
            if let Some(name) = name_of(&spec)
                && !names.contains(&name)
                // Added for the section.
                && (name != "pip" || self.spec.pip.is_empty())
            {
                return Err(self.fail(format!("it was made with `{text}`, which is not asked for any more"), None));
            }
        }
        Ok(())
    }

    /// Every dependency of a locked package is locked, too. Only of complete records: the others do not tell.
    fn closed(&self) -> Result<()> {
        if !self.platform.complete || !self.platform.conda_sources.is_empty() {
            return Ok(());
        }
        let mut by_name: BTreeMap<&str, Vec<&RepoDataRecord>> = BTreeMap::new();
        for record in &self.platform.conda {
            by_name.entry(record.package_record.name.as_normalized()).or_default().push(record);
        }
        let mut seen: BTreeSet<&str> = BTreeSet::new();
        for record in &self.platform.conda {
            for text in &record.package_record.depends {
                if !seen.insert(text.as_str()) {
                    continue;
                }
                let Ok(spec) = MatchSpec::from_str(text, rattler_conda_types::ParseStrictness::Lenient) else { continue };
                let Some(name) = spec.name.as_exact().map(|name| name.as_normalized()) else { continue };
                if name.starts_with("__") {
                    continue;
                }
                let met = by_name.get(name).is_some_and(|records| records.iter().any(|known| spec.matches(*known)));
                if !met {
                    let package = record.package_record.name.as_normalized();
                    return Err(self.fail(format!("it does not hold together: `{package}` depends on `{text}`, which is not in it"), None));
                }
            }
        }
        Ok(())
    }

    fn pip(&self, checked: &mut Checked) -> Result<()> {
        let items = &self.spec.pip;
        if self.lock.provenance.pip_skipped && !items.is_empty() {
            let place = items.iter().find(|item| item.is_requirement()).and_then(|item| item.place.clone());
            let error = self.fail("it was made without the `pip:` section (--no-pip)", place.as_ref());
            return Err(error.hint("to check the conda half alone: --no-pip"));
        }
        let section = Section::load(items, &|name| std::env::var(name).ok())?;
        let remote = section.not_fetched();
        for url in &remote {
            checked.remarks.push(format!("`{url}` was not read, because a check uses no network: what it asks for was not checked"));
        }
        let mut named: BTreeSet<String> = BTreeSet::new();
        for item in &section.requirements {
            checked.now().pypi += 1;
            named.extend(self.requirement(item)?);
        }
        for item in &section.constraints {
            checked.now().pypi += 1;
            self.constraint(item)?;
        }
        for item in items {
            if let PipKind::IndexUrl(url) | PipKind::ExtraIndexUrl(url) = &item.kind {
                self.index(url, item.place.as_ref())?;
            }
        }
        for url in section.options.index_url.iter().chain(&section.options.extra_index_urls) {
            self.index(url, None)?;
        }
        if remote.is_empty() {
            self.pip_leftover(&named)?;
        }
        self.pip_closed()
    }

    /// Checks one requirement; returns the name of the package that it is about, if its marker holds and it tells.
    fn requirement(&self, item: &PipItem) -> Result<Option<String>> {
        let shown = item.shown();
        let place = item.place.as_ref();
        let holds = |marker: &Option<String>| self.text_marker_holds(marker.as_deref());
        let package = match &item.kind {
            PipKind::Requirement { requirement, hashes } => {
                let name = requirement.name.to_string();
                if !marker_holds(self.platform, &requirement.marker) {
                    return Ok(None);
                }
                let Some(package) = self.pypi(&name) else { return self.met_by_conda(requirement, &shown, place).map(|()| Some(name)) };
                self.version(requirement, package, &shown, place)?;
                self.hashes(package, hashes, &shown, place)?;
                let extras: Vec<String> = requirement.extras.iter().map(ToString::to_string).collect();
                self.extras(package, &extras, &shown, place)?;
                Some(package)
            }
            PipKind::Url { url, marker, hashes } => {
                if !holds(marker) {
                    return Ok(None);
                }
                let wanted = without_credentials(url.as_str());
                let found = self.platform.pypi.iter().find(|package| same_location(&package.location, &wanted));
                let package = found.ok_or_else(|| self.fail(format!("`{shown}` is not locked"), place))?;
                self.hashes(package, hashes, &shown, place)?;
                Some(package)
            }
            PipKind::Vcs(vcs) => self.vcs(vcs, &shown, place)?,
            PipKind::Editable(target) => {
                let package = match &**target {
                    EditableTarget::Vcs(vcs) => self.vcs(vcs, &shown, place)?,
                    EditableTarget::Path { path, extras } => Some(self.path(path, extras, &shown, place)?),
                };
                if let Some(package) = package.filter(|package| !package.editable && self.by_tare()) {
                    return Err(self.fail(format!("`{shown}` is not satisfied: `{}` is locked, but not as editable", package.name), place));
                }
                package
            }
            PipKind::Path { path, marker, extras, .. } => {
                if !holds(marker) {
                    return Ok(None);
                }
                Some(self.path(path, extras, &shown, place)?)
            }
            _ => None,
        };
        Ok(package.map(|package| package.name.clone()))
    }

    fn text_marker_holds(&self, marker: Option<&str>) -> bool {
        let Some(text) = marker else { return true };
        text.parse::<pep508_rs::MarkerTree>().map_or(true, |marker| marker_holds(self.platform, &marker))
    }

    fn pypi(&self, name: &str) -> Option<&LockedPypi> {
        self.platform.pypi.iter().find(|package| package.name == name)
    }

    /// What pip asks for and a conda package brings: known by the package's purl, else by its name.
    fn met_by_conda(&self, requirement: &spec::Requirement, shown: &str, place: Option<&Place>) -> Result<()> {
        let name = requirement.name.to_string();
        let Some(record) = self.platform.conda.iter().find(|record| brings(record, &name)) else {
            return Err(self.fail(format!("`{shown}` is not satisfied: `{name}` is not locked"), place));
        };
        let package = &record.package_record;
        let fits = match &requirement.version_or_url {
            None => true,
            Some(pep508_rs::VersionOrUrl::VersionSpecifier(specifiers)) => {
                package.version.to_string().parse().is_ok_and(|version| specifiers.contains(&version))
            }
            Some(pep508_rs::VersionOrUrl::Url(_)) => false,
        };
        if fits {
            return Ok(());
        }
        let locked = format!("{} {} {}", package.name.as_normalized(), package.version, package.build);
        Err(self.fail(format!("`{shown}` is not satisfied: the conda package `{locked}` is locked"), place))
    }

    fn version(&self, requirement: &spec::Requirement, package: &LockedPypi, shown: &str, place: Option<&Place>) -> Result<()> {
        match &requirement.version_or_url {
            Some(pep508_rs::VersionOrUrl::VersionSpecifier(specifiers)) => {
                let Some(version) = &package.version else { return Ok(()) };
                let fits = match version.parse() {
                    Ok(version) => specifiers.contains(&version),
                    Err(_) => false,
                };
                if fits {
                    Ok(())
                } else {
                    Err(self.fail(format!("`{shown}` is not satisfied: `{} {version}` is locked", package.name), place))
                }
            }
            Some(pep508_rs::VersionOrUrl::Url(url)) => {
                let wanted = without_credentials(url.as_str());
                let same = same_location(&package.location, &wanted)
                    || LockedVcs::parse(&wanted)
                        .is_some_and(|wanted| package.vcs.as_ref().is_some_and(|known| same_repository(known, &wanted)));
                if same {
                    Ok(())
                } else {
                    let from = package.location.split('#').next().unwrap_or_default();
                    Err(self.fail(format!("`{shown}` is not satisfied: `{}` is locked from `{from}`", package.name), place))
                }
            }
            // Asked for by name alone, it is to come from an index.
            None if package.vcs.is_some() && package.requested && self.by_tare() => {
                Err(self.fail(format!("`{shown}` is not satisfied: `{}` is locked from a repository", package.name), place))
            }
            None => Ok(()),
        }
    }

    /// `--hash`: the locked archive is one of those allowed.
    fn hashes(&self, package: &LockedPypi, allowed: &[spec::ArtifactHash], shown: &str, place: Option<&Place>) -> Result<()> {
        let comparable: Vec<&str> = allowed.iter().filter(|hash| hash.algorithm == "sha256").map(|hash| hash.hex.as_str()).collect();
        match &package.hashes.sha256 {
            Some(known) if !comparable.is_empty() && comparable.len() == allowed.len() && !comparable.contains(&known.as_str()) => {
                Err(self.fail(format!("`{shown}` is not satisfied: the locked archive of `{}` has another hash", package.name), place))
            }
            _ => Ok(()),
        }
    }

    /// Everything that an extra asks for is there.
    fn extras(&self, package: &LockedPypi, extras: &[String], shown: &str, place: Option<&Place>) -> Result<()> {
        for extra in extras {
            let Ok(name) = extra.parse::<pep508_rs::ExtraName>() else { continue };
            if self.by_tare() && package.requested && !package.extras.iter().any(|known| known.parse() == Ok(name.clone())) {
                let locked =
                    if package.extras.is_empty() { "without extras".to_owned() } else { format!("with `{}`", package.extras.join("`, `")) };
                return Err(self.fail(format!("`{shown}` is not satisfied: `{}` is locked {locked}", package.name), place));
            }
            for text in &package.requires_dist {
                let Some(needed) = parsed(text) else { continue };
                let only_with_extra =
                    evaluate(self.platform, &needed.marker, std::slice::from_ref(&name)) && !evaluate(self.platform, &needed.marker, &[]);
                let wanted = needed.name.to_string();
                if only_with_extra && self.pypi(&wanted).is_none() && !self.platform.conda.iter().any(|record| brings(record, &wanted)) {
                    let why = format!("`{shown}` is not satisfied: its extra `{extra}` needs `{wanted}`, which is not locked");
                    return Err(self.fail(why, place));
                }
            }
        }
        Ok(())
    }

    fn vcs(&self, vcs: &spec::Vcs, shown: &str, place: Option<&Place>) -> Result<Option<&LockedPypi>> {
        if !self.text_marker_holds(vcs.marker.as_deref()) {
            return Ok(None);
        }
        let mut text = format!("{}+{}", vcs.system, without_credentials(&vcs.url));
        if let Some(revision) = &vcs.revision {
            text.push('@');
            text.push_str(revision);
        }
        let Some(wanted) = LockedVcs::parse(&text) else { return Ok(None) };
        let same_folder = |known: &LockedVcs| known.subdirectory.as_deref().unwrap_or("") == vcs.subdirectory.as_deref().unwrap_or("");
        let of_repository =
            |package: &&LockedPypi| package.vcs.as_ref().is_some_and(|known| same_repository(known, &wanted) && same_folder(known));
        let found = self.platform.pypi.iter().find(of_repository);
        found.map(Some).ok_or_else(|| {
            let plain = LockedVcs { revision: None, commit: None, ..wanted.clone() };
            let other = self.platform.pypi.iter().filter_map(|package| package.vcs.as_ref()).find(|known| same_repository(known, &plain));
            let locked = other.and_then(|known| known.revision.clone().or_else(|| known.commit.clone()));
            match locked {
                Some(locked) => self.fail(format!("`{shown}` is not satisfied: `{locked}` of the repository is locked"), place),
                None => self.fail(format!("`{shown}` is not locked"), place),
            }
        })
    }

    fn path(&self, path: &std::path::Path, extras: &[String], shown: &str, place: Option<&Place>) -> Result<&LockedPypi> {
        let wanted: PathBuf = path.components().filter(|part| !matches!(part, std::path::Component::CurDir)).collect();
        let found = self.platform.pypi.iter().find(|package| {
            if package.location.contains("://") {
                return Url::parse(&package.location).ok().and_then(|url| url.to_file_path().ok()).is_some_and(|known| known == wanted);
            }
            let known: PathBuf =
                std::path::Path::new(&package.location).components().filter(|part| !matches!(part, std::path::Component::CurDir)).collect();
            // The folder of the file itself has the empty path.
            known.as_os_str().is_empty() || wanted.ends_with(&known)
        });
        let package = found.ok_or_else(|| self.fail(format!("`{shown}` is not locked"), place))?;
        self.extras(package, extras, shown, place)?;
        Ok(package)
    }

    /// A constraint holds for what is locked; it asks for nothing by itself.
    fn constraint(&self, item: &PipItem) -> Result<()> {
        let PipKind::Requirement { requirement, .. } = &item.kind else { return Ok(()) };
        let name = requirement.name.to_string();
        match self.pypi(&name) {
            Some(package) if marker_holds(self.platform, &requirement.marker) => {
                self.version(requirement, package, &format!("{} (a constraint)", item.shown()), item.place.as_ref())
            }
            _ => Ok(()),
        }
    }

    fn index(&self, url: &str, place: Option<&Place>) -> Result<()> {
        let wanted = without_credentials(url);
        let known = self.lock.indexes.iter().any(|index| index.trim_end_matches('/') == wanted.trim_end_matches('/'));
        if known || self.lock.indexes.is_empty() {
            return Ok(());
        }
        Err(self.fail(format!("the package index `{wanted}` is not in it"), place))
    }

    /// What the section named when the lock was made and does not name any more.
    fn pip_leftover(&self, named: &BTreeSet<String>) -> Result<()> {
        let nothing = BTreeMap::new();
        let facts = self.lock.provenance.platforms.get(&self.platform.name);
        let then = facts.map_or(&nothing, |facts| &facts.pypi_requested);
        let gone = then.keys().find(|name| !named.contains(*name));
        match gone {
            Some(name) => Err(self.fail(format!("it was made with `{name}` in the `pip:` section, which is not asked for any more"), None)),
            None => Ok(()),
        }
    }

    /// Every requirement of a locked PyPI package on another locked one holds.
    fn pip_closed(&self) -> Result<()> {
        for package in &self.platform.pypi {
            for text in &package.requires_dist {
                let Some(needed) = parsed(text) else { continue };
                if !marker_holds(self.platform, &needed.marker) {
                    continue;
                }
                let Some(other) = self.pypi(needed.name.as_ref()) else { continue };
                let (Some(version), Some(pep508_rs::VersionOrUrl::VersionSpecifier(specifiers))) = (&other.version, &needed.version_or_url)
                else {
                    continue;
                };
                if version.parse().is_ok_and(|version| !specifiers.contains(&version)) {
                    let name = &package.name;
                    let why = format!("it does not hold together: `{name}` needs `{text}`, and `{} {version}` is locked", other.name);
                    return Err(self.fail(why, None));
                }
            }
        }
        Ok(())
    }
}

/// A requirement of a package's metadata; `None` if it makes no sense.
fn parsed(text: &str) -> Option<spec::Requirement> {
    super::guard_requirement(text).ok()?;
    text.parse().ok()
}

/// Whether a conda package brings the distribution of this (normalised) name, as far as a lock tells.
fn brings(record: &RepoDataRecord, name: &str) -> bool {
    brought(record).any(|brought| brought == name)
}

/// The distributions that a conda package of a lock brings, normalised: those that its purls name, and one of its own name.
pub(crate) fn brought(record: &RepoDataRecord) -> impl Iterator<Item = String> + '_ {
    let package = &record.package_record;
    let purls = package.purls.iter().flatten().filter(|purl| purl.package_type() == "pypi").map(|purl| purl.name());
    purls.chain([package.name.as_normalized()]).map(crate::prefix::normalize)
}

/// Where an input file says `name` below the top-level `key`: as a key of a mapping or an item of a list. The last file that says it counts.
fn place_of(fetched: &[Fetched], key: &str, name: &str) -> Option<Place> {
    use spec::yaml::Value;
    fetched.iter().rev().find_map(|input| {
        let text = spec::Text::decode(&input.name, &input.bytes, None).ok()?;
        let Value::Mapping(entries) = spec::yaml::parse(&text).ok()?.root?.value else { return None };
        let found = entries.into_iter().find(|entry| entry.key == key)?;
        let span = match found.value.value {
            Value::Mapping(entries) => entries.into_iter().rev().find(|entry| entry.key == name)?.key_span,
            Value::Sequence(items) => items.into_iter().find(|item| item.scalar() == Some(name))?.span,
            Value::Scalar { .. } => return None,
        };
        Some(text.place(span, "required here"))
    })
}

fn name_of(spec: &MatchSpec) -> Option<String> {
    spec.name.as_exact().map(|name| name.as_normalized().to_owned())
}

/// A URL for comparison: without credentials and without a slash at the end.
fn shown(url: &str) -> String {
    without_credentials(url).trim_end_matches('/').to_owned()
}

fn same_url(a: &Url, b: &Url) -> bool {
    without_credentials(a.as_str()) == without_credentials(b.as_str())
}

/// The same archive, whatever hash stands behind `#`.
fn same_location(a: &str, b: &str) -> bool {
    let bare = |text: &str| text.split('#').next().unwrap_or_default().to_owned();
    bare(a) == bare(b)
}

fn same_repository(known: &LockedVcs, wanted: &LockedVcs) -> bool {
    let plain = |url: &str| url.trim_end_matches('/').trim_end_matches(".git").to_owned();
    if plain(&known.url) != plain(&wanted.url) {
        return false;
    }
    match (&wanted.commit, &wanted.revision) {
        (Some(commit), _) => known.commit.as_ref() == Some(commit),
        (None, Some(revision)) => {
            known.revision.as_ref() == Some(revision) || known.commit.as_ref().is_some_and(|commit| commit.starts_with(revision))
        }
        (None, None) => true,
    }
}

/// Whether a marker holds for the locked Python on the platform; true where that cannot be known.
pub(super) fn marker_holds(platform: &LockedPlatform, marker: &pep508_rs::MarkerTree) -> bool {
    evaluate(platform, marker, &[])
}

/// As [`marker_holds`], with extras.
fn evaluate(platform: &LockedPlatform, marker: &pep508_rs::MarkerTree, extras: &[pep508_rs::ExtraName]) -> bool {
    let Some(python) = platform.conda.iter().find(|record| record.package_record.name.as_normalized() == "python") else {
        return true;
    };
    let known = matches!(
        platform.subdir,
        Subdir::Linux64 | Subdir::Osx64 | Subdir::Win64 | Subdir::LinuxAarch64 | Subdir::OsxArm64 | Subdir::WinArm64 | Subdir::LinuxPpc64le
    );
    let version = python.package_record.version.to_string().parse().ok().filter(|_| known);
    let environment = version.and_then(|version| crate::pypi::markers(&version, platform.subdir).ok());
    environment.is_none_or(|environment| marker.evaluate(&environment, extras))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pypi::{PypiRecord, PypiSource};

    const COMMIT: &str = "0123456789012345678901234567890123456789";

    fn python() -> RepoDataRecord {
        let url = Url::parse("https://conda.anaconda.org/conda-forge/linux-64/python-3.11.9-h_0.conda").unwrap();
        let mut record = crate::lock::explicit::record_of(&url).unwrap();
        record.package_record.depends.clear();
        record
    }

    fn conda(name: &str, version: &str) -> RepoDataRecord {
        let url = Url::parse(&format!("https://conda.anaconda.org/conda-forge/linux-64/{name}-{version}-h_0.conda")).unwrap();
        crate::lock::explicit::record_of(&url).unwrap()
    }

    fn record(name: &str, version: &str, source: PypiSource, requires: &[&str], requested: bool, extras: &[&str]) -> PypiRecord {
        PypiRecord {
            name: name.parse().unwrap(),
            version: version.parse().unwrap(),
            source,
            requires_dist: requires.iter().map(ToString::to_string).collect(),
            requires_python: None,
            requested,
            extras: extras.iter().map(ToString::to_string).collect(),
        }
    }

    fn wheel(name: &str, version: &str, direct: bool) -> PypiSource {
        PypiSource::Archive {
            url: Url::parse(&format!("https://files.example/packages/{name}-{version}-py3-none-any.whl")).unwrap(),
            sha256: Some("ab".repeat(32)),
            size: None,
            index: (!direct).then(|| Url::parse("https://pypi.example/simple").unwrap()),
            direct,
            subdirectory: None,
        }
    }

    /// einops and uvicorn with an extra asked for, what they need, a direct wheel, a repository and an editable folder.
    fn lock() -> Lock {
        let mut platform = LockedPlatform::new("linux-64", Subdir::Linux64);
        platform.complete = false;
        platform.conda = vec![python(), conda("numpy", "2.1.0")];
        let git = PypiSource::Vcs {
            system: "git".to_owned(),
            url: Url::parse("https://host.example/x/tool").unwrap(),
            requested_revision: Some("v1".to_owned()),
            commit: COMMIT.to_owned(),
            subdirectory: None,
        };
        let folder = PypiSource::Directory { path: "/projects/mine".into(), editable: true };
        platform.pypi = [
            record("einops", "0.8.0", wheel("einops", "0.8.0", false), &[], true, &[]),
            record(
                "uvicorn",
                "0.30.0",
                wheel("uvicorn", "0.30.0", false),
                &["click>=7", "httptools>=0.6 ; extra == 'standard'", "watchfiles ; extra == 'reload'"],
                true,
                &["standard"],
            ),
            record("click", "8.1.0", wheel("click", "8.1.0", false), &[], false, &[]),
            record("httptools", "0.6.1", wheel("httptools", "0.6.1", false), &[], false, &[]),
            record("direct", "1.0", wheel("direct", "1.0", true), &[], true, &[]),
            record("tool", "1.0", git, &[], true, &[]),
            record("mine", "0.1", folder, &[], true, &[]),
        ]
        .iter()
        .map(crate::lock::locked_pypi)
        .collect();
        let mut lock = Lock { environment: "default".to_owned(), platforms: vec![platform], ..Lock::default() };
        lock.channels = vec!["https://conda.anaconda.org/conda-forge/".to_owned()];
        lock.indexes = vec!["https://pypi.example/simple".to_owned()];
        let text = crate::lock::write_tare(&lock).unwrap();
        crate::lock::read("tare.lock", text.as_bytes(), &crate::lock::ReadOptions::default()).unwrap()
    }

    /// The lines of the section that ask for what the lock holds.
    const SECTION: [&str; 5] = [
        "einops>=0.7",
        "uvicorn[standard]>=0.29",
        "direct @ https://files.example/packages/direct-1.0-py3-none-any.whl",
        "git+https://host.example/x/tool@v1#egg=tool",
        "-e /projects/mine",
    ];

    fn checked(lock: &Lock, folder: &std::path::Path, section: &[&str]) -> Result<Checked> {
        let items: String = section.iter().map(|line| format!("    - {line:?}\n")).collect();
        let text = format!("channels: [conda-forge, nodefaults]\ndependencies:\n  - python=3.11\n  - numpy\n  - pip:\n{items}");
        let fetched = Fetched { name: "environment.yml".to_owned(), bytes: text.into_bytes(), base_dir: Some(folder.to_owned()) };
        let settings = Settings::defaults(folder).unwrap();
        let options = CheckOptions { lock_name: "tare.lock".to_owned(), ..CheckOptions::default() };
        check(lock, &[fetched], &options, &settings)
    }

    #[test]
    fn every_requirement_of_the_pip_section_is_judged() {
        let folder = tempfile::tempdir().unwrap();
        let lock = lock();
        let fine = checked(&lock, folder.path(), &SECTION).unwrap();
        assert_eq!(fine.requirements, 8);
        let with = |line: &str| -> Vec<String> { SECTION.iter().map(ToString::to_string).chain([line.to_owned()]).collect() };
        let instead = |number: usize, line: &str| -> Vec<String> {
            let mut all: Vec<String> = SECTION.iter().map(ToString::to_string).collect();
            all[number] = line.to_owned();
            all
        };
        for line in [
            "click<9",
            "numpy>=2",
            "torch ; sys_platform == 'win32'",
            "https://h.example/x-1-py3-none-any.whl ; python_version < '3'",
            "--index-url https://user:pw@pypi.example/simple",
            "--pre",
        ] {
            let section = with(line);
            let section: Vec<&str> = section.iter().map(String::as_str).collect();
            // Everything named is in the lock, so naming a needed package more is no drift.
            checked(&lock, folder.path(), &section).unwrap_or_else(|error| panic!("{line}: {error}"));
        }
        let cases = [
            (instead(0, "einops>=0.9"), "`einops>=0.9` is not satisfied: `einops 0.8.0` is locked", Some(6)),
            (with("torch"), "`torch` is not locked", Some(11)),
            (with("numpy<2"), "the conda package `numpy 2.1.0 h_0` is locked", Some(11)),
            (instead(1, "uvicorn[standard,reload]"), "`uvicorn` is locked with `standard`", Some(7)),
            (instead(0, &format!("einops==0.8.0 --hash=sha256:{}", "00".repeat(32))), "has another hash", Some(6)),
            (
                instead(2, "direct @ https://files.example/packages/direct-2.0-py3-none-any.whl"),
                "is locked from `https://files.example/",
                Some(8),
            ),
            (instead(3, "git+https://host.example/x/tool@v2#egg=tool"), "`v1` of the repository is locked", Some(9)),
            (instead(3, "git+https://host.example/x/tool@v1#egg=tool&subdirectory=sub"), "is locked", Some(9)),
            (instead(3, "tool"), "is locked from a repository", Some(9)),
            (instead(4, "-e /projects/other"), "is not locked", Some(10)),
            (SECTION[1..].iter().map(ToString::to_string).collect(), "it was made with `einops`", None),
            (with("--extra-index-url https://other.example/simple"), "the package index `https://other.example/simple`", Some(11)),
        ];
        for (section, message, line) in cases {
            let section: Vec<&str> = section.iter().map(String::as_str).collect();
            let error = checked(&lock, folder.path(), &section).unwrap_err();
            assert_eq!(error.kind(), Kind::Drift, "{error}");
            assert!(error.to_string().contains(message), "`{message}` is not in: {error}");
            assert_eq!(error.places().first().map(|place| place.line_column().0), line, "{error}");
        }
    }

    #[test]
    fn files_of_requirements_and_constraints_count() {
        let folder = tempfile::tempdir().unwrap();
        let lock = lock();
        std::fs::write(folder.path().join("requirements.txt"), format!("{}\n-r more.txt\n-c constraints.txt\n", SECTION[0])).unwrap();
        std::fs::write(folder.path().join("more.txt"), SECTION[1..].join("\n")).unwrap();
        std::fs::write(folder.path().join("constraints.txt"), "click<9\nnot-there==1\n").unwrap();
        let section = ["-r requirements.txt"];
        checked(&lock, folder.path(), &section).unwrap();
        std::fs::write(folder.path().join("constraints.txt"), "# held back\nclick<8\n").unwrap();
        let error = checked(&lock, folder.path(), &section).unwrap_err();
        assert!(error.to_string().contains("constraints.txt:2:1") && error.to_string().contains("`click 8.1.0` is locked"), "{error}");
        std::fs::write(folder.path().join("constraints.txt"), "").unwrap();
        std::fs::write(folder.path().join("more.txt"), SECTION[1..].join("\n") + "\ntorch>=2\n").unwrap();
        let error = checked(&lock, folder.path(), &section).unwrap_err();
        assert!(error.to_string().contains("more.txt:5:1") && error.to_string().contains("`torch>=2`"), "{error}");
        std::fs::write(folder.path().join("more.txt"), "-r requirements.txt\n").unwrap();
        assert!(checked(&lock, folder.path(), &section).unwrap_err().to_string().contains("names itself"));
        assert_eq!(checked(&lock, folder.path(), &["-r nowhere.txt"]).unwrap_err().kind(), Kind::Usage);
        let remote = checked(&lock, folder.path(), &[&SECTION[..], &["-r https://h.example/r.txt"]].concat()).unwrap();
        assert!(remote.remarks.iter().any(|remark| remark.contains("https://h.example/r.txt")), "{remote:?}");
    }

    #[test]
    fn a_pypi_half_that_does_not_hold_together_is_found() {
        let folder = tempfile::tempdir().unwrap();
        let mut lock = lock();
        let click = lock.platforms[0].pypi.iter_mut().find(|package| package.name == "click").unwrap();
        click.version = Some("6.0".to_owned());
        let error = checked(&lock, folder.path(), &SECTION).unwrap_err();
        assert!(error.to_string().contains("`uvicorn` needs `click>=7`"), "{error}");
        // An extra whose packages are gone.
        let mut lock = super::tests::lock();
        lock.platforms[0].pypi.retain(|package| package.name != "httptools");
        let error = checked(&lock, folder.path(), &SECTION).unwrap_err();
        assert!(error.to_string().contains("its extra `standard` needs `httptools`"), "{error}");
    }
}
