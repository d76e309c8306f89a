//! conda-lock.yml, version 1 (CEP 37; what conda-lock 1 to 4 write). Its records lack `constrains`, sizes, licenses and more, so [`LockedPlatform::complete`]
//! is not set.

use std::collections::{BTreeMap, BTreeSet};

use rattler_conda_types::{MatchSpec, ParseStrictness, RepoDataRecord, Subdir};
use rattler_digest::{Md5, Sha256, parse_digest_from_hex};
use serde::{Deserialize, Serialize};
use url::Url;

use super::{
    Format, Lock, LockedPlatform, LockedPypi, LockedVcs, LockedVirtualPackage, Provenance, PypiHashes, ReadOptions, TARE_SCHEMA, diagnose,
    explicit, for_lock, hex, is_machine_bound, pixi, without_credentials,
};
use crate::error::{Error, Result};
use crate::spec::Text;

/// The key of tare's facts in `metadata.custom_metadata`, whose values are texts (CEP 37).
const CUSTOM: &str = "tare";

const HEADER: &str = "# This conda-lock file (version 1, CEP 37) was written by tare. Not to be edited by hand.\n\
# To install it: tare sync -n NAME conda-lock.yml, or conda-lock install -n NAME conda-lock.yml\n";

#[derive(Deserialize)]
struct Document {
    version: Option<u64>,
    metadata: Metadata,
    package: Vec<Package>,
}

#[derive(Deserialize)]
struct Metadata {
    #[serde(default)]
    channels: Vec<ChannelForm>,
    #[serde(default)]
    platforms: Vec<String>,
    #[serde(default)]
    custom_metadata: Option<BTreeMap<String, String>>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum ChannelForm {
    Name(String),
    Full {
        url: String,
        #[serde(default)]
        used_env_vars: Vec<String>,
    },
}

#[derive(Deserialize)]
struct Package {
    name: String,
    version: String,
    manager: String,
    platform: String,
    #[serde(default)]
    dependencies: Option<Dependencies>,
    url: String,
    #[serde(default)]
    hash: Option<PypiHashes>,
    #[serde(default)]
    source: Option<serde_yaml::Value>,
    #[serde(default)]
    build: Option<String>,
    #[serde(default)]
    category: Option<String>,
}

/// A mapping (conda-lock) or a list (the first pixi).
#[derive(Deserialize)]
#[serde(untagged)]
enum Dependencies {
    Map(BTreeMap<String, String>),
    List(Vec<String>),
}

pub(super) fn read(text: &Text, options: &ReadOptions) -> Result<Lock> {
    let document: Document = serde_yaml::from_str(&text.text)
        .map_err(|error| diagnose::conda_lock(text, diagnose::yaml_at(text, "the conda-lock file is malformed", &error, 0)))?;
    if let Some(version) = document.version
        && version != 1
    {
        let error = Error::usage(format!("the conda-lock file has version {version}; version 1 is understood"));
        return Err(diagnose::at_text(text, error.hint("update tare, or make the lock again with conda-lock 1 to 4"), "version:"));
    }
    let mut lock = Lock { environment: "default".to_owned(), source: Format::CondaLock, ..Lock::default() };
    for channel in &document.metadata.channels {
        let (url, variables) = match channel {
            ChannelForm::Name(url) => (url, &[][..]),
            ChannelForm::Full { url, used_env_vars } => (url, used_env_vars.as_slice()),
        };
        let url = without_credentials(url);
        if !variables.is_empty() {
            lock.channel_env_vars.insert(url.clone(), variables.to_vec());
        }
        lock.channels.push(url);
    }
    let mut provenance = Provenance::default();
    if let Some(facts) = document.metadata.custom_metadata.as_ref().and_then(|custom| custom.get(CUSTOM)) {
        provenance = serde_json::from_str(facts).map_err(|error| {
            diagnose::at_text(text, Error::usage("the facts of tare in `custom_metadata` are malformed").because(error), "custom_metadata")
        })?;
        if provenance.schema > TARE_SCHEMA {
            let error = Error::usage("the lock was written by a newer tare").hint("update tare");
            return Err(diagnose::at_text(text, error, "custom_metadata"));
        }
    }
    let mut platforms: BTreeMap<String, LockedPlatform> = BTreeMap::new();
    for name in document.metadata.platforms.iter().chain(document.package.iter().map(|package| &package.platform)) {
        if platforms.contains_key(name) {
            continue;
        }
        let Ok(subdir) = name.parse::<Subdir>() else {
            let error = Error::usage(format!("unknown platform `{name}`")).hint("platforms are named like `linux-64`");
            return Err(diagnose::conda_lock(text, diagnose::at_text(text, error, name)));
        };
        let mut platform = LockedPlatform::new(name, subdir);
        platform.complete = false;
        if let Some(facts) = provenance.platforms.get(name) {
            for (package, known) in &facts.virtual_packages {
                if let Ok(mut package) = LockedVirtualPackage::parse(package) {
                    package.provenance = Some(known.provenance.clone());
                    package.source = Some(known.source.clone()).filter(|source| !source.is_empty());
                    platform.virtual_packages.push(package);
                }
            }
        }
        platforms.insert(name.clone(), platform);
    }
    if let Some(custom) = &document.metadata.custom_metadata {
        for platform in platforms.values_mut() {
            let Some(list) = custom.get(&format!("virtual-packages.{}", platform.name)) else { continue };
            for word in list.split_whitespace() {
                let package = LockedVirtualPackage::parse(word)
                    .map_err(|why| diagnose::at_text(text, Error::usage("a malformed virtual package").because(why), word))?;
                if !platform.virtual_packages.iter().any(|known| known.name == package.name) {
                    platform.virtual_packages.push(package);
                }
            }
        }
    }
    // The same archive in several categories has one entry for each.
    let mut categories: BTreeMap<(String, String), BTreeSet<String>> = BTreeMap::new();
    let mut urls: BTreeMap<(String, String), String> = BTreeMap::new();
    for package in document.package {
        let category = package.category.clone().unwrap_or_else(|| "main".to_owned());
        if options.categories.as_ref().is_some_and(|wanted| !wanted.contains(&category)) {
            continue;
        }
        let conda = match package.manager.as_str() {
            "conda" => true,
            "pip" | "pypi" => false,
            other => {
                let error = Error::usage(format!("unknown manager `{other}` of the package `{}`", package.name));
                return Err(diagnose::conda_lock(text, diagnose::at_text(text, error, other)));
            }
        };
        let id = format!("{}:{}", if conda { "conda" } else { "pypi" }, package.name.to_lowercase());
        let key = (package.platform.clone(), id);
        categories.entry(key.clone()).or_default().insert(category);
        if let Some(known) = urls.get(&key) {
            if *known != package.url {
                let error = Error::usage(format!("`{}` is locked twice for {}, to different archives", package.name, package.platform))
                    .hint("choose the categories to install: --category main");
                return Err(diagnose::at_text(text, error, &package.url));
            }
            continue;
        }
        urls.insert(key, package.url.clone());
        let Some(platform) = platforms.get_mut(&package.platform) else { continue };
        let url = package.url.clone();
        let at = |error: Error| diagnose::conda_lock(text, diagnose::at_text(text, error, &url));
        if conda {
            platform.conda.push(conda_record(package).map_err(at)?);
        } else {
            platform.pypi.push(pypi_package(package).map_err(at)?);
        }
    }
    for ((platform, id), of_package) in categories {
        if (of_package.len() != 1 || !of_package.contains("main"))
            && let Some(platform) = platforms.get_mut(&platform)
        {
            platform.categories.insert(id, of_package);
        }
    }
    lock.platforms = platforms.into_values().collect();
    lock.provenance = provenance;
    Ok(lock)
}

fn conda_record(package: Package) -> Result<RepoDataRecord> {
    let url = Url::parse(&package.url)
        .map_err(|error| Error::usage(format!("`url` of the package `{}` is no URL", package.name)).because(error))?;
    let mut record = explicit::record_of(&url)?;
    let of_file = &record.package_record;
    if of_file.name.as_normalized() != package.name.to_lowercase() || of_file.version.to_string() != package.version {
        let same_version = package
            .version
            .parse::<rattler_conda_types::VersionWithSource>()
            .is_ok_and(|version| version.version() == of_file.version.version());
        if of_file.name.as_normalized() != package.name.to_lowercase() || !same_version {
            return Err(Error::usage(format!("the package `{} {}` and its URL disagree", package.name, package.version)).because(format!(
                "the file is of `{} {}`",
                of_file.name.as_normalized(),
                of_file.version
            )));
        }
    }
    if let Some(build) = &package.build
        && build.as_str() != of_file.build.as_ref()
    {
        return Err(Error::usage(format!("`build` of the package `{}` and its URL disagree", package.name))
            .because(format!("the file is of build `{}`", of_file.build)));
    }
    if record.package_record.subdir.is_empty() {
        record.package_record.subdir = package.platform.clone();
    }
    if record.package_record.subdir != "noarch" && record.package_record.subdir != package.platform {
        return Err(Error::usage(format!("the package `{}` is listed for {}", package.name, package.platform))
            .because(format!("its archive is for {}", record.package_record.subdir)));
    }
    let hash = package.hash.unwrap_or_default();
    if let Some(text) = &hash.md5 {
        let md5 = parse_digest_from_hex::<Md5>(text);
        record.package_record.md5 = Some(md5.ok_or_else(|| Error::usage(format!("malformed `md5` of the package `{}`", package.name)))?);
    }
    if let Some(text) = &hash.sha256 {
        let sha256 = parse_digest_from_hex::<Sha256>(text);
        record.package_record.sha256 =
            Some(sha256.ok_or_else(|| Error::usage(format!("malformed `sha256` of the package `{}`", package.name)))?);
    }
    record.package_record.depends = match package.dependencies {
        None => Vec::new(),
        Some(Dependencies::List(list)) => list,
        Some(Dependencies::Map(map)) => map
            .into_iter()
            .map(|(name, constraint)| match constraint.trim() {
                "" | "*" => name,
                bracket if bracket.starts_with('[') => format!("{name}{bracket}"),
                constraint => format!("{name} {constraint}"),
            })
            .collect(),
    };
    Ok(record)
}

fn pypi_package(package: Package) -> Result<LockedPypi> {
    let name = package.name;
    if let Some(source) = package.source.filter(|source| !source.is_null()) {
        let url = source.get("url").and_then(serde_yaml::Value::as_str).unwrap_or_default();
        return Err(Error::usage(format!("the PyPI package `{name}` is installed from its source")).because(without_credentials(url)));
    }
    let mut requires_dist = Vec::new();
    match package.dependencies {
        None => {}
        Some(Dependencies::List(list)) => requires_dist = list,
        Some(Dependencies::Map(map)) => {
            for (name, constraint) in map {
                let constraint = constraint.trim();
                let exact = constraint.starts_with(|c: char| c.is_ascii_digit());
                requires_dist.push(match constraint {
                    "" | "*" => name,
                    constraint if exact => format!("{name}=={constraint}"),
                    constraint => format!("{name}{constraint}"),
                });
            }
        }
    }
    let hashes = package.hash.unwrap_or_default();
    for (text, digits) in [(&hashes.md5, 32), (&hashes.sha256, 64)] {
        if let Some(text) = text
            && (text.len() != digits || !text.bytes().all(|b| b.is_ascii_hexdigit()))
        {
            return Err(Error::usage(format!("malformed hash of the package `{name}`")).because(format!("{digits} hex digits are needed")));
        }
    }
    Ok(LockedPypi {
        name: crate::prefix::normalize(&name),
        version: Some(package.version),
        vcs: LockedVcs::parse(&package.url),
        location: without_credentials(&package.url),
        hashes,
        requires_dist,
        ..LockedPypi::default()
    })
}

#[derive(Serialize)]
struct OutDocument<'a> {
    version: u64,
    metadata: OutMetadata,
    package: Vec<OutPackage<'a>>,
}

#[derive(Serialize)]
struct OutMetadata {
    content_hash: BTreeMap<String, String>,
    channels: Vec<OutChannel>,
    platforms: Vec<String>,
    sources: Vec<String>,
    custom_metadata: BTreeMap<String, String>,
}

#[derive(Serialize)]
struct OutChannel {
    url: String,
    used_env_vars: Vec<String>,
}

#[derive(Serialize)]
struct OutPackage<'a> {
    name: String,
    version: String,
    manager: &'a str,
    platform: &'a str,
    dependencies: BTreeMap<String, String>,
    url: String,
    hash: PypiHashes,
    category: &'a str,
    optional: bool,
}

/// The lock as conda-lock.yml version 1. The same lock gives the same bytes. Virtual packages and the other facts of tare go into
/// `metadata.custom_metadata`.
///
/// # Errors
/// What the format cannot hold, with the name of the package or platform: packages of the `host` channel, local files, source builds, PyPI
/// packages that are no archives or have no hash, platforms that are not named like their subdir, two dependencies on one package that cannot be
/// joined.
pub fn write_conda_lock(lock: &Lock) -> Result<String> {
    let refuse = |what: String| Error::usage(format!("{what} cannot be put into a conda-lock file"));
    let mut provenance = pixi::provenance_of(lock);
    let mut custom_metadata = BTreeMap::new();
    let mut packages = Vec::new();
    let mut content_hash = BTreeMap::new();
    let mut sorted = lock.clone();
    sorted.sort();
    for platform in &sorted.platforms {
        if platform.name != platform.subdir.as_str() {
            return Err(refuse(format!("the platform `{}`", platform.name))
                .because(format!("it is {} with another name, and conda-lock has no other names than those of conda", platform.subdir)));
        }
        if let Some(source) = platform.conda_sources.first() {
            return Err(refuse(format!("the conda package `{source}`")).because("it is built from source"));
        }
        let virtual_packages: Vec<String> = platform.virtual_packages.iter().map(ToString::to_string).collect();
        if !virtual_packages.is_empty() {
            custom_metadata.insert(format!("virtual-packages.{}", platform.name), virtual_packages.join(" "));
        }
        let mut urls = String::new();
        for record in &platform.conda {
            let record = for_lock(record);
            let package = &record.package_record;
            let name = package.name.as_normalized();
            if is_machine_bound(&record) {
                return Err(refuse(format!("the conda package `{name}`"))
                    .because("it is made from an interpreter of this machine (the `host` channel), so it has no URL")
                    .hint("lock with a channel that others can reach, such as conda-forge"));
            }
            if !matches!(record.url.scheme(), "http" | "https" | "file" | "ftp" | "s3" | "oci") {
                return Err(refuse(format!("the conda package `{name}`")).because(format!("its location is `{}`", record.url)));
            }
            if package.md5.is_none() && package.sha256.is_none() {
                return Err(refuse(format!("the conda package `{name}`")).because("it has neither MD5 nor SHA-256"));
            }
            let hash = PypiHashes { md5: package.md5.map(|hash| hex(&hash)), sha256: package.sha256.map(|hash| hex(&hash)) };
            let dependencies = conda_dependencies(name, &package.depends)?;
            urls.push_str(record.url.as_str());
            urls.push('\n');
            for category in categories_of(platform, &format!("conda:{name}")) {
                packages.push(OutPackage {
                    name: name.to_owned(),
                    version: package.version.to_string(),
                    manager: "conda",
                    platform: platform.name.as_str(),
                    dependencies: dependencies.clone(),
                    url: record.url.to_string(),
                    hash: hash.clone(),
                    category,
                    optional: category != "main",
                });
            }
        }
        for package in &platform.pypi {
            let what = || refuse(format!("the PyPI package `{}`", package.name));
            let location = without_credentials(&package.location);
            if package.editable || package.vcs.is_some() || !(location.starts_with("https://") || location.starts_with("http://")) {
                return Err(what().because(format!("it is installed from `{location}`, and the format takes only archives by URL")));
            }
            let Some(version) = &package.version else { return Err(what().because("it has no version")) };
            if package.hashes.is_empty() {
                return Err(what().because("it has no hash"));
            }
            if !package.other_files.is_empty() {
                return Err(what().because("it has archives for several machines"));
            }
            if let Some(marker) = &package.marker {
                return Err(what().because(format!("it is wanted only under the marker `{marker}`")));
            }
            let dependencies = pypi_dependencies(package, platform).map_err(|error| error.context(what().message()))?;
            urls.push_str(&location);
            urls.push('\n');
            for category in categories_of(platform, &format!("pypi:{}", package.name)) {
                packages.push(OutPackage {
                    name: package.name.clone(),
                    version: version.clone(),
                    manager: "pip",
                    platform: platform.name.as_str(),
                    dependencies: dependencies.clone(),
                    url: location.clone(),
                    hash: package.hashes.clone(),
                    category,
                    optional: category != "main",
                });
            }
        }
        let digest = provenance.platforms.get(&platform.name).and_then(|facts| facts.input_digest.clone());
        content_hash.insert(platform.name.clone(), digest.unwrap_or_else(|| crate::install::sha256_hex(urls.as_bytes())));
    }
    packages.sort_by(|a, b| (a.platform, a.manager, &a.name, a.category).cmp(&(b.platform, b.manager, &b.name, b.category)));
    // What every conda-lock file says already is not said again.
    for facts in provenance.platforms.values_mut() {
        facts.incomplete = false;
        facts.categories.clear();
    }
    provenance.platforms.retain(|_, facts| *facts != super::PlatformProvenance::default());
    // Nor what no conda-lock file can say.
    provenance.pypi_indexes_unknown = false;
    provenance.pypi.clear();
    if provenance != (Provenance { schema: TARE_SCHEMA, ..Provenance::default() }) {
        let facts = serde_json::to_string(&provenance).map_err(|error| Error::failure("cannot write the lock").because(error))?;
        custom_metadata.insert(CUSTOM.to_owned(), facts);
    }
    let channels = sorted.channels.iter().map(|url| OutChannel {
        url: without_credentials(url),
        used_env_vars: sorted.channel_env_vars.get(url).cloned().unwrap_or_default(),
    });
    let document = OutDocument {
        version: 1,
        metadata: OutMetadata {
            content_hash,
            channels: channels.collect(),
            platforms: sorted.platforms.iter().map(|platform| platform.name.clone()).collect(),
            sources: Vec::new(),
            custom_metadata,
        },
        package: packages,
    };
    let text = serde_yaml::to_string(&document).map_err(|error| Error::failure("cannot write the lock").because(error))?;
    Ok(format!("{HEADER}{}", for_yaml_1_1(&text)))
}

/// Quotes what is text in YAML 1.2 and a number in YAML 1.1, which conda-lock's own reader speaks: `0413`, `1_000`, `1:30`.
fn for_yaml_1_1(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for line in text.lines() {
        match line.split_once(": ") {
            Some((key, value))
                if line.starts_with([' ', '-'])
                    && value.bytes().any(|b| b.is_ascii_digit())
                    && value.bytes().all(|b| b.is_ascii_digit() || matches!(b, b'_' | b'.' | b':' | b'+' | b'-')) =>
            {
                out.push_str(&format!("{key}: '{value}'"));
            }
            _ => out.push_str(line),
        }
        out.push('\n');
    }
    out
}

fn categories_of<'a>(platform: &'a LockedPlatform, id: &str) -> Vec<&'a str> {
    match platform.categories.get(id) {
        Some(categories) if !categories.is_empty() => categories.iter().map(String::as_str).collect(),
        _ => vec!["main"],
    }
}

/// Dependencies as name to constraint. Two on one name are joined where that is possible.
fn conda_dependencies(package: &str, depends: &[String]) -> Result<BTreeMap<String, String>> {
    let mut out: BTreeMap<String, String> = BTreeMap::new();
    for text in depends {
        let (name, constraint) = match text.find(|c: char| c.is_whitespace() || matches!(c, '=' | '<' | '>' | '!' | '~' | '[')) {
            Some(at) => (&text[..at], text[at..].trim()),
            None => (text.as_str(), ""),
        };
        if name.is_empty() || name.contains("::") {
            return Err(Error::usage(format!("the conda package `{package}` cannot be put into a conda-lock file"))
                .because(format!("its dependency `{text}` has no plain name")));
        }
        let constraint = if constraint.is_empty() { "*" } else { constraint };
        match out.get_mut(name) {
            None => {
                out.insert(name.to_owned(), constraint.to_owned());
            }
            Some(known) if known == constraint || constraint == "*" => {}
            Some(known) if known == "*" => *known = constraint.to_owned(),
            Some(known) => {
                let Some(joined) = join(known, constraint)
                    .filter(|joined| MatchSpec::from_str(&format!("{name} {joined}"), ParseStrictness::Lenient).is_ok())
                else {
                    return Err(Error::usage(format!("the conda package `{package}` cannot be put into a conda-lock file"))
                        .because(format!("it depends on `{name}` twice, as `{known}` and as `{constraint}`")));
                };
                *known = joined;
            }
        }
    }
    Ok(out)
}

/// Two constraints, `VERSION` or `VERSION BUILD`, as one that asks for both; `None` where conda has no words for it.
fn join(a: &str, b: &str) -> Option<String> {
    if a.contains('[') || b.contains('[') {
        return None;
    }
    let split = |text: &str| {
        let mut words = text.split_whitespace().map(str::to_owned);
        (words.next().unwrap_or_else(|| "*".to_owned()), words.next())
    };
    let ((version_a, build_a), (version_b, build_b)) = (split(a), split(b));
    let version = match (version_a.as_str(), version_b.as_str()) {
        (a, b) if a == b => a.to_owned(),
        ("*", other) | (other, "*") => other.to_owned(),
        (a, b) if a.contains('|') || b.contains('|') => return None,
        (a, b) => format!("{a},{b}"),
    };
    let build = match (build_a, build_b) {
        (Some(a), Some(b)) if a != b => return None,
        (a, b) => a.or(b),
    };
    Some(match build {
        Some(build) => format!("{version} {build}"),
        None => version,
    })
}

/// The requirements of a PyPI package that the lock holds: the format has no markers and no extras, and conda-lock never resolves again.
fn pypi_dependencies(package: &LockedPypi, platform: &LockedPlatform) -> Result<BTreeMap<String, String>> {
    let mut out: BTreeMap<String, String> = BTreeMap::new();
    for text in &package.requires_dist {
        super::guard_requirement(text).map_err(|why| Error::usage(format!("malformed requirement `{text}`")).because(why))?;
        let requirement: pep508_rs::Requirement<pep508_rs::VerbatimUrl> =
            text.parse().map_err(|error| Error::usage(format!("malformed requirement `{text}`")).because(error))?;
        let name = requirement.name.to_string();
        if !platform.pypi.iter().any(|known| known.name == name) || !super::check::marker_holds(platform, &requirement.marker) {
            continue;
        }
        let constraint = match &requirement.version_or_url {
            Some(pep508_rs::VersionOrUrl::VersionSpecifier(specifiers)) if !specifiers.is_empty() => {
                specifiers.to_string().replace(' ', "")
            }
            _ => "*".to_owned(),
        };
        match out.get_mut(&name) {
            Some(known) if known == "*" => *known = constraint,
            Some(known) if *known != constraint && constraint != "*" => *known = format!("{known},{constraint}"),
            Some(_) => {}
            None => {
                out.insert(name, constraint);
            }
        }
    }
    // Joined ones in the order that a reader would give them.
    for (name, constraint) in &mut out {
        if constraint.contains(',')
            && let Ok(joined) = format!("{name}{constraint}").parse::<pep508_rs::Requirement<pep508_rs::VerbatimUrl>>()
            && let Some(pep508_rs::VersionOrUrl::VersionSpecifier(specifiers)) = joined.version_or_url
        {
            *constraint = specifiers.to_string().replace(' ', "");
        }
    }
    Ok(out)
}
