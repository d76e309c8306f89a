//! Packages known only by the names that a history has for them: `CHANNEL/SUBDIR::NAME-VERSION-BUILD`.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use rattler_conda_types::{MatchSpec, PackageName, RepoDataRecord, Subdir};
use url::Url;

use crate::channel::{self, ExpandOptions, Session};
use crate::config::Settings;
use crate::error::{Error, Result};
use crate::install::{self, Archive, Cancel, fetch};
use crate::report::{Progress, Silent};
use crate::spec::ChannelEntry;

/// A package as a history names it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Named {
    /// A name or URL; old histories have none.
    pub channel: Option<String>,
    pub subdir: Option<Subdir>,
    pub name: String,
    pub version: String,
    pub build: String,
}

impl Named {
    /// `None` for text that names no package.
    pub fn parse(text: &str) -> Option<Self> {
        let (place, stem) = match text.rsplit_once("::") {
            Some((place, stem)) => (Some(place), stem),
            None => (None, text),
        };
        let stem = stem.trim().trim_end_matches(".tar.bz2").trim_end_matches(".conda");
        let mut parts = stem.rsplitn(3, '-');
        let (build, version, name) = (parts.next()?, parts.next()?, parts.next()?);
        if [build, version, name].iter().any(|part| part.is_empty() || part.contains(['/', ' '])) {
            return None;
        }
        let (channel, subdir) = match place {
            None => (None, None),
            Some(place) => match place.rsplit_once('/').map(|(channel, last)| (channel, last.parse::<Subdir>())) {
                Some((channel, Ok(subdir))) => (Some(channel), Some(subdir)),
                _ => (Some(place), None),
            },
        };
        Some(Named {
            channel: channel.filter(|channel| !channel.is_empty()).map(str::to_owned),
            subdir,
            name: name.to_owned(),
            version: version.to_owned(),
            build: build.to_owned(),
        })
    }

    /// `NAME VERSION BUILD`.
    pub fn title(&self) -> String {
        format!("{} {} {}", self.name, self.version, self.build)
    }

    /// Whether the record has this name, version, build and platform.
    pub fn is(&self, record: &RepoDataRecord) -> bool {
        let package = &record.package_record;
        package.name.as_normalized() == self.name
            && package.version.to_string() == self.version
            && package.build.as_str() == self.build
            && self.subdir.is_none_or(|subdir| subdir.as_str() == package.subdir)
    }
}

/// Where to look.
pub(super) struct Finder<'a> {
    pub settings: &'a Settings,
    pub session: &'a Session,
    /// The platform of the environment.
    pub subdir: Subdir,
    /// For packages whose channel is not known.
    pub channels: Vec<String>,
    pub cancel: Cancel,
    /// Archives may be brought into the cache to read what is in them.
    pub may_fetch: bool,
}

/// What was found of one package.
#[derive(Debug, Default)]
pub(super) struct Found {
    /// Best channel first.
    pub records: Vec<RepoDataRecord>,
    /// Why there is nothing.
    pub reasons: Vec<String>,
}

impl Finder<'_> {
    /// Looks for each of `wanted`: in the repodata of its channel, and where that does not have it (or the channel is gone) by its URL in the package
    /// cache, then at that URL.
    ///
    /// # Errors
    /// Stopped. What cannot be found is told per package.
    pub async fn find(&self, wanted: &[Named]) -> Result<Vec<Found>> {
        let mut found: Vec<Found> = wanted.iter().map(|_| Found::default()).collect();
        let mut by_channel: BTreeMap<Vec<String>, Vec<usize>> = BTreeMap::new();
        for (number, named) in wanted.iter().enumerate() {
            let channels = named.channel.clone().map_or_else(|| self.channels.clone(), |channel| vec![channel]);
            by_channel.entry(channels).or_default().push(number);
        }
        for (channels, numbers) in by_channel {
            self.cancel.check()?;
            if channels.is_empty() {
                for number in numbers {
                    found[number].reasons.push("its channel is not known".to_owned());
                }
                continue;
            }
            let mut bases: Vec<Url> = channels.iter().filter_map(|text| base_of(text)).collect();
            match self.in_repodata(&channels, wanted, &numbers, &mut bases).await {
                Ok(lists) => {
                    for (number, records) in numbers.iter().zip(lists) {
                        found[*number].records = records;
                        if found[*number].records.is_empty() {
                            found[*number].reasons.push(format!("{} does not have it", channels.join(", ")));
                        }
                    }
                }
                Err(error) => {
                    for number in &numbers {
                        found[*number].reasons.push(error.to_string());
                    }
                }
            }
            for number in numbers {
                if found[number].records.is_empty()
                    && let Some(record) = self.by_url(&wanted[number], &bases).await?
                {
                    found[number].records.push(record);
                }
            }
        }
        Ok(found)
    }

    async fn in_repodata(
        &self,
        channels: &[String],
        wanted: &[Named],
        numbers: &[usize],
        bases: &mut Vec<Url>,
    ) -> Result<Vec<Vec<RepoDataRecord>>> {
        let entries: Vec<ChannelEntry> = channels.iter().map(|text| ChannelEntry { text: text.clone(), place: None }).collect();
        let versions: Vec<String> = numbers
            .iter()
            .filter(|number| wanted[**number].name == "python")
            .map(|number| format!("=={}", wanted[*number].version))
            .collect();
        let host = || channel::host_url(self.settings, versions.clone(), &Silent);
        let options =
            ExpandOptions { override_channels: true, declared: true, nodefaults: true, root_dir: Path::new("/"), host: Some(&host) };
        let expanded = channel::expand(&entries, self.settings, options)?;
        *bases = expanded.channels.iter().map(|channel| Url::clone(channel.channel.base_url.url())).collect();
        let names: Vec<MatchSpec> =
            numbers.iter().filter_map(|number| PackageName::try_from(wanted[*number].name.clone()).ok()).map(MatchSpec::from).collect();
        let session = self.session.quiet();
        let repodata = session.repodata(&expanded.channels, &[self.subdir, Subdir::NoArch], &names, false).await?;
        let records: Vec<&RepoDataRecord> = repodata.iter().flat_map(rattler_repodata_gateway::RepoData::iter).collect();
        Ok(numbers
            .iter()
            .map(|number| records.iter().filter(|record| wanted[*number].is(record)).map(|record| (*record).clone()).collect())
            .collect())
    }

    async fn by_url(&self, named: &Named, bases: &[Url]) -> Result<Option<RepoDataRecord>> {
        let subdirs = named.subdir.map_or_else(|| vec![self.subdir, Subdir::NoArch], |subdir| vec![subdir]);
        let mut urls = Vec::new();
        for base in bases {
            for subdir in &subdirs {
                for ending in ["conda", "tar.bz2"] {
                    let (name, version, build) = (&named.name, &named.version, &named.build);
                    let text = format!("{}/{subdir}/{name}-{version}-{build}.{ending}", base.as_str().trim_end_matches('/'));
                    urls.extend(Url::parse(&text).ok());
                }
            }
        }
        let mut cached = Vec::new();
        for url in &urls {
            if fetch::is_cached(&self.session.package_cache, url).await {
                cached.push(url.clone());
            }
        }
        if cached.is_empty() && !self.may_fetch {
            return Ok(None);
        }
        // A channel may serve what its repodata no longer lists.
        let tried = if cached.is_empty() { urls } else { cached };
        for url in tried {
            self.cancel.check()?;
            let archive = Archive { url, md5: None, sha256: None };
            let progress: Arc<dyn Progress> = Arc::new(Silent);
            let (cache, client) = (&self.session.package_cache, self.session.client.clone());
            match install::records_for_archives(std::slice::from_ref(&archive), cache, client, progress, &self.cancel).await {
                Ok(records) => return Ok(records.into_iter().next().filter(|record| named.is(record))),
                Err(error) => tracing::debug!("{error}"),
            }
        }
        Ok(None)
    }
}

/// The URL of a channel that the settings need not know any more.
fn base_of(text: &str) -> Option<Url> {
    if text.contains("://") { Url::parse(text).ok() } else { Url::parse(&format!("https://conda.anaconda.org/{text}")).ok() }
}

/// The error for packages that are nowhere.
pub(super) fn not_found(what: &str, missing: &[(&Named, &Found)]) -> Error {
    let mut error = Error::failure(what.to_owned());
    for (named, found) in missing.iter().take(10) {
        let reason = found.reasons.first().map_or_else(String::new, |reason| format!(": {reason}"));
        error = error.because(format!("`{}` is neither in the cache nor where it came from{reason}", named.title()));
    }
    if missing.len() > 10 {
        error = error.because(format!("and {} more", missing.len() - 10));
    }
    error
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parts(text: &str) -> Option<(String, String, String)> {
        let named = Named::parse(text)?;
        let place = format!("{} {}", named.channel.as_deref().unwrap_or("?"), named.subdir.map_or("?", |subdir| subdir.as_str()));
        Some((place, named.name, format!("{} {}", named.version, named.build)))
    }

    #[test]
    fn names_of_all_histories_are_understood() {
        let of = |place: &str, name: &str, rest: &str| Some((place.to_owned(), name.to_owned(), rest.to_owned()));
        assert_eq!(parts("conda-forge/linux-64::python-3.11.7-h_0"), of("conda-forge linux-64", "python", "3.11.7 h_0"));
        assert_eq!(parts("https://h.example/c/noarch::a-b-1-0"), of("https://h.example/c noarch", "a-b", "1 0"));
        assert_eq!(parts("file:///c d/linux-64::x-1.0-py_0"), of("file:///c d linux-64", "x", "1.0 py_0"));
        assert_eq!(parts("defaults::x-1-0.tar.bz2"), of("defaults ?", "x", "1 0"));
        assert_eq!(parts("x-1-0"), of("? ?", "x", "1 0"));
        for bad in ["", "x", "x-1", "--", "a b-1-0", "c/linux-64::../x-1-0"] {
            assert_eq!(parts(bad), None, "{bad}");
        }
    }
}
