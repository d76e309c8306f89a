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
    /// Number of requirements that were checked, over all platforms.
    pub requirements: usize,
    /// What the format of the lock leaves open.
    pub remarks: Vec<String>,
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
        platforms.push(lock.platform(name).ok_or_else(|| no_platform(lock, name, options))?);
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
        let one = One { lock, platform, spec: &spec, options, several: lock.platforms.len() > 1 };
        if everywhere {
            checked.remarks.push("a pylock.toml holds only the PyPI half: conda requirements were not checked".to_owned());
        } else {
            if options.platforms.is_empty() {
                one.platforms(fetched)?;
            }
            one.channels(settings, &root_dir, &mut checked)?;
            one.variables(&mut checked)?;
            one.conda(&mut checked)?;
            one.leftover()?;
            one.closed()?;
        }
        if !options.no_pip {
            one.pip(&mut checked)?;
        }
        checked.platforms.push(platform.name.clone());
    }
    checked.remarks.sort();
    checked.remarks.dedup();
    Ok(checked)
}

fn drift(options: &CheckOptions, why: impl std::fmt::Display) -> Error {
    Error::new(Kind::Drift, format!("the lock `{}` is out of date", options.lock_name)).because(why)
}

fn no_platform(lock: &Lock, name: &str, options: &CheckOptions) -> Error {
    drift(options, format!("it has no platform `{name}`; it has {}", lock.platform_names().join(", ")))
        .hint(format!("to add it: tare lock -f FILE --platform {name}"))
}

/// One platform of the lock against the inputs as they are for it.
struct One<'a> {
    lock: &'a Lock,
    platform: &'a LockedPlatform,
    spec: &'a EnvSpec,
    options: &'a CheckOptions,
    several: bool,
}

impl One<'_> {
    fn fail(&self, what: impl std::fmt::Display, place: Option<&Place>) -> Error {
        let on = if self.several { format!(" on {}", self.platform.name) } else { String::new() };
        let error = drift(self.options, format!("{what}{on}")).hint("to bring it up to date: tare lock -f FILE");
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
        // Where the file says it.
        let place = fetched.iter().find_map(|input| {
            let text = spec::Text::decode(&input.name, &input.bytes, None).ok()?;
            let from = text.text.find("platforms:")?;
            let at = from + text.text[from..].find(missing.as_str())?;
            Some(text.place(at..at + missing.as_str().len(), "required here"))
        });
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
        checked.requirements += wanted.len();
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

    fn variables(&self, checked: &mut Checked) -> Result<()> {
        if !self.by_tare() {
            if !self.spec.variables.is_empty() {
                checked.remarks.push("the lock does not hold variables: they were not checked".to_owned());
            }
            return Ok(());
        }
        let known = &self.lock.provenance;
        for (name, value) in &self.spec.variables {
            checked.requirements += 1;
            if is_secret(name, value) {
                if !known.secret_variables.contains(name) {
                    return Err(self.fail(format!("the variable `{name}` is not in it"), None));
                }
                continue;
            }
            match known.variables.get(name) {
                None => return Err(self.fail(format!("the variable `{name}` is not in it"), None)),
                Some(locked) if locked != value => return Err(self.fail(format!("the variable `{name}` has another value in it"), None)),
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
                checked.requirements += 1;
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
            checked.requirements += 1;
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
        let items: Vec<&PipItem> = self.spec.pip.iter().collect();
        if items.is_empty() {
            return Ok(());
        }
        if self.lock.provenance.pip_skipped {
            let place = items.iter().find(|item| item.is_requirement()).and_then(|item| item.place.clone());
            let error = self.fail("it was made without the `pip:` section (--no-pip)", place.as_ref());
            return Err(error.hint("to check the conda half alone: --no-pip"));
        }
        for item in items {
            checked.requirements += 1;
            let shown = item.shown();
            let place = item.place.as_ref();
            match &item.kind {
                PipKind::Requirement { requirement, .. } => {
                    let name = requirement.name.to_string();
                    if !self.marker_holds(&requirement.marker) {
                        continue;
                    }
                    let Some(package) = self.pypi(&name) else {
                        return Err(self.fail(format!("`{shown}` is not satisfied: `{name}` is not locked"), place));
                    };
                    self.version(requirement, package, &shown, place)?;
                }
                PipKind::Url { url, marker, .. } => {
                    let wanted = without_credentials(url.as_str());
                    let found = self.platform.pypi.iter().any(|package| same_location(&package.location, &wanted));
                    if !found && marker.is_none() {
                        return Err(self.fail(format!("`{shown}` is not locked"), place));
                    }
                }
                PipKind::Vcs(vcs) => self.vcs(vcs, &shown, place)?,
                PipKind::Editable(target) => match &**target {
                    EditableTarget::Vcs(vcs) => self.vcs(vcs, &shown, place)?,
                    EditableTarget::Path { path, .. } => self.path(path, &shown, place)?,
                },
                PipKind::Path { path, marker: None, .. } => self.path(path, &shown, place)?,
                PipKind::IndexUrl(url) | PipKind::ExtraIndexUrl(url) => {
                    let wanted = without_credentials(url);
                    let known = self.lock.indexes.iter().any(|index| index.trim_end_matches('/') == wanted.trim_end_matches('/'));
                    if !known && !self.lock.indexes.is_empty() {
                        return Err(self.fail(format!("the package index `{wanted}` is not in it"), place));
                    }
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn pypi(&self, name: &str) -> Option<&LockedPypi> {
        self.platform.pypi.iter().find(|package| package.name == name)
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
                    Err(self.fail(format!("`{shown}` is not satisfied: `{}` is locked from elsewhere", package.name), place))
                }
            }
            None => Ok(()),
        }
    }

    fn vcs(&self, vcs: &spec::Vcs, shown: &str, place: Option<&Place>) -> Result<()> {
        let mut text = format!("{}+{}", vcs.system, without_credentials(&vcs.url));
        if let Some(revision) = &vcs.revision {
            text.push('@');
            text.push_str(revision);
        }
        let Some(wanted) = LockedVcs::parse(&text) else { return Ok(()) };
        let found = self.platform.pypi.iter().any(|package| package.vcs.as_ref().is_some_and(|known| same_repository(known, &wanted)));
        if found || vcs.marker.is_some() { Ok(()) } else { Err(self.fail(format!("`{shown}` is not locked"), place)) }
    }

    fn path(&self, path: &std::path::Path, shown: &str, place: Option<&Place>) -> Result<()> {
        let wanted: PathBuf = path.components().filter(|part| !matches!(part, std::path::Component::CurDir)).collect();
        let found = self.platform.pypi.iter().any(|package| {
            if package.location.contains("://") {
                return Url::parse(&package.location).ok().and_then(|url| url.to_file_path().ok()).is_some_and(|known| known == wanted);
            }
            let known: PathBuf =
                std::path::Path::new(&package.location).components().filter(|part| !matches!(part, std::path::Component::CurDir)).collect();
            // The folder of the file itself has the empty path.
            known.as_os_str().is_empty() || wanted.ends_with(&known)
        });
        if found { Ok(()) } else { Err(self.fail(format!("`{shown}` is not locked"), place)) }
    }

    /// Whether a marker holds for the locked Python on the platform; true where that cannot be known.
    fn marker_holds(&self, marker: &pep508_rs::MarkerTree) -> bool {
        let Some(python) = self.platform.conda.iter().find(|record| record.package_record.name.as_normalized() == "python") else {
            return true;
        };
        let full = python.package_record.version.to_string();
        let short = full.splitn(3, '.').take(2).collect::<Vec<_>>().join(".");
        let subdir = self.platform.subdir;
        let (os_name, sys_platform, platform_system) = if subdir.is_windows() {
            ("nt", "win32", "Windows")
        } else if subdir.is_osx() {
            ("posix", "darwin", "Darwin")
        } else {
            ("posix", "linux", "Linux")
        };
        let machine = match subdir {
            Subdir::Linux64 | Subdir::Osx64 => "x86_64",
            Subdir::Win64 => "AMD64",
            Subdir::LinuxAarch64 => "aarch64",
            Subdir::OsxArm64 => "arm64",
            Subdir::WinArm64 => "ARM64",
            Subdir::LinuxPpc64le => "ppc64le",
            _ => return true,
        };
        let built = pep508_rs::MarkerEnvironment::try_from(pep508_rs::MarkerEnvironmentBuilder {
            implementation_name: "cpython",
            implementation_version: &full,
            os_name,
            platform_machine: machine,
            platform_python_implementation: "CPython",
            platform_release: "",
            platform_system,
            platform_version: "",
            python_full_version: &full,
            python_version: &short,
            sys_platform,
        });
        built.map_or(true, |environment| marker.evaluate(&environment, &[]))
    }
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
