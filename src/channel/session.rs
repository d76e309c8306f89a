use std::collections::{HashMap, HashSet};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use futures::StreamExt;
use rattler_cache::package_cache::{PackageCache, PackageCacheLayer};
use rattler_cache::validation::ValidationMode;
use rattler_conda_types::{Channel, MatchSpec, PackageName, RepoDataRecord, Subdir};
use rattler_networking::LazyClient;
use rattler_repodata_gateway::fetch::CacheAction;
use rattler_repodata_gateway::sparse::{PackageFormatSelection, SparseRepoData};
use rattler_repodata_gateway::{
    CacheClearMode, ChannelConfig, ChannelRelationsMode, DownloadReporter, Gateway, GatewayError, RepoData, RepoDataSource, Reporter,
    Source, SourceConfig, SubdirSelection,
};
use sha2::{Digest, Sha256};
use url::Url;

use super::client::{ClientOptions, Credentials, RetryPolicy, chain};
use super::expand::ResolvedChannel;
use super::redact::redact_url;
use crate::config::Settings;
use crate::error::{Error, Kind, Result};
use crate::report::{Phase, Progress, TaskId};
use crate::spec::Fetched;

/// What a session can be told besides the settings.
#[derive(Debug, Clone, Default)]
pub struct SessionOptions {
    /// Retries; by default `max_retries` of the settings, from half a second up.
    pub retry: Option<RetryPolicy>,
}

/// What was read of channels that are folders.
type Folders = Arc<Mutex<HashMap<(Url, Subdir), Arc<SparseRepoData>>>>;

/// One client, one package cache, one repodata gateway.
#[derive(Clone)]
pub struct Session {
    /// Built at its first use.
    pub client: LazyClient,
    /// tare's cache first, then the read-only layers of `pkgs_dirs`.
    pub package_cache: PackageCache,
    /// Repodata over http; prefer [`Session::repodata`], which names what fails.
    pub gateway: Gateway,
    /// tare's cache folder.
    pub cache_dir: PathBuf,
    /// No network.
    pub offline: bool,
    /// Where credentials are looked up.
    pub storage: rattler_networking::AuthenticationStorage,
    /// Limits requests at the same time; share it with downloads.
    pub requests: Arc<tokio::sync::Semaphore>,
    credentials: Credentials,
    progress: Arc<dyn Progress>,
    folders: Folders,
}

impl std::fmt::Debug for Session {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Session").field("cache_dir", &self.cache_dir).field("offline", &self.offline).finish_non_exhaustive()
    }
}

/// Longest text that [`Session::fetch_text`] takes, in bytes.
const MAX_TEXT: usize = 64 << 20;

impl Session {
    /// Opens a session. No network and no TLS is touched before the first request.
    ///
    /// # Errors
    /// Settings that cannot work: unreadable certificates or credentials, a proxy or mirror that is no URL, a cache
    /// folder that cannot be made.
    pub fn open(settings: &Settings, progress: Arc<dyn Progress>) -> Result<Self> {
        Self::open_with(settings, progress, SessionOptions::default())
    }

    /// As [`Session::open`].
    ///
    /// # Errors
    /// As [`Session::open`].
    pub fn open_with(settings: &Settings, progress: Arc<dyn Progress>, options: SessionOptions) -> Result<Self> {
        let storage = super::auth::storage(settings, progress.as_ref())?;
        let retry = options.retry.unwrap_or_else(|| RetryPolicy::new(settings.max_retries.value));
        let client = ClientOptions::new(settings, storage.clone(), retry, progress.as_ref())?;
        let credentials = client.credentials.clone();
        let client = client.lazy();
        let cache_dir = settings.cache_dir()?.to_owned();
        rattler_cache::ensure_cache_dir(&cache_dir).map_err(|error| {
            Error::io("make the cache folder", &cache_dir, &error).hint("choose another place for the cache: TARE_CACHE_DIR=PATH")
        })?;
        let packages = cache_dir.join(rattler_cache::PACKAGE_CACHE_DIR);
        // Whoever takes a package from the cache looks at its files himself, more closely (`install::fetch`).
        let mut layers = vec![PackageCacheLayer::new(&packages).with_validation_mode(ValidationMode::Skip)];
        for folder in &settings.pkgs_dirs.value {
            // Layers that are not there contribute nothing; the writable one always comes first.
            if *folder != packages && folder.is_dir() {
                layers.push(PackageCacheLayer::new(folder).with_validation_mode(ValidationMode::Skip));
            }
        }
        let package_cache = PackageCache::from_layers(layers, true);
        let offline = settings.offline.value;
        let requests = Arc::new(tokio::sync::Semaphore::new(settings.concurrency.value));
        let gateway = Gateway::builder()
            .with_cache_dir(cache_dir.join(rattler_cache::REPODATA_CACHE_DIR))
            .with_package_cache(package_cache.clone())
            .with_client(client.clone())
            .with_max_concurrent_requests(requests.clone())
            .with_max_concurrent_io(256)
            .with_channel_config(ChannelConfig {
                default: SourceConfig {
                    zstd_enabled: settings.repodata_use_zst.value,
                    bz2_enabled: true,
                    sharded_enabled: settings.repodata_use_shards.value,
                    cache_action: if offline { CacheAction::ForceCacheOnly } else { CacheAction::CacheOrFetch },
                    missing_shards_are_empty: false,
                },
                per_channel: HashMap::new(),
            })
            .finish();
        Ok(Session {
            client,
            package_cache,
            gateway,
            cache_dir,
            offline,
            storage,
            requests,
            credentials,
            progress,
            folders: Arc::default(),
        })
    }

    /// The same session without progress and remarks, for look-ups that are not the user's business.
    #[must_use]
    pub fn quiet(&self) -> Self {
        Session { progress: Arc::new(crate::report::Silent), ..self.clone() }
    }

    /// Lets the client use the secrets that stood in the channels' URLs. [`Session::repodata`] and its like do it
    /// themselves; needed only to download from a channel that was never asked for repodata.
    pub fn trust(&self, channels: &[ResolvedChannel]) {
        let mut known = self.credentials.write().unwrap_or_else(PoisonError::into_inner);
        for credential in channels.iter().filter_map(|channel| channel.credential.as_ref()) {
            if !known.contains(credential) {
                known.push(credential.clone());
            }
        }
    }

    /// Takes the secrets out of the channel of a spec (`https://USER:PASSWORD@host/channel::name`) and lets the client use
    /// them: specs are matched with records, whose channels hold none, and are written into the environment.
    ///
    /// # Errors
    /// A URL with both a token and a password.
    pub fn trust_spec(&self, spec: &mut MatchSpec) -> Result<()> {
        let Some(channel) = &spec.channel else { return Ok(()) };
        let mut url = Url::clone(channel.base_url.url());
        let Some(credential) = super::expand::take_secret(&mut url)? else { return Ok(()) };
        let name = url.as_str().trim_end_matches('/').to_owned();
        spec.channel = Some(Arc::new(Channel { platforms: channel.platforms.clone(), base_url: url.into(), name: Some(name) }));
        let mut known = self.credentials.write().unwrap_or_else(PoisonError::into_inner);
        if !known.contains(&credential) {
            known.push(credential);
        }
        Ok(())
    }

    /// Lets the client use user and password in the URL of a Python package index, or of a file: for everything on that server, because the files
    /// of an index lie elsewhere than its pages. Anything that is no such URL is passed over.
    pub fn trust_index(&self, url: &str) {
        let Ok(mut url) = Url::parse(url) else { return };
        url.set_query(None);
        url.set_fragment(None);
        let Ok(Some(credential)) = super::expand::take_secret(&mut url) else { return };
        let mut known = self.credentials.write().unwrap_or_else(PoisonError::into_inner);
        // Files lie anywhere on the server; where two indexes of one server differ in credentials, those below the index get its own.
        let near = url.path().trim_end_matches('/').trim_end_matches("/simple").to_owned() + "/";
        for path in [near.as_str(), "/"] {
            let mut credential = credential.clone();
            credential.prefix.set_path(path);
            if !known.iter().any(|known| known.prefix == credential.prefix) {
                known.push(credential);
            }
        }
    }

    /// The records of all packages that `specs` name, with `recursive` also of their dependencies; one [`RepoData`] per
    /// channel and subdir, in the order of the channels.
    ///
    /// # Errors
    /// `Kind::Network` for a channel that does not answer, is not there, or is not in the cache while offline;
    /// `Kind::Failure` for a folder whose repodata cannot be read. The channel and the reason are named.
    pub async fn repodata(
        &self,
        channels: &[ResolvedChannel],
        subdirs: &[Subdir],
        specs: &[MatchSpec],
        recursive: bool,
    ) -> Result<Vec<RepoData>> {
        let opened = self.open_channels(channels, subdirs).await?;
        let sources: Vec<Source> = opened.iter().map(|opened| opened.source.clone()).collect();
        let output = self
            .gateway
            .query(sources, subdirs.iter().copied(), specs.iter().cloned())
            .recursive(recursive)
            .channel_relations(ChannelRelationsMode::Disabled)
            .with_reporter(Bridge::new(self.progress.clone()))
            .execute()
            .await
            .map_err(|error| self.describe(&error, channels, subdirs))?;
        for warning in &output.warnings {
            self.progress.warn(&super::redact_text(&warning.to_string()), &[]);
        }
        Ok(output.repodata)
    }

    /// All package names of the channels.
    ///
    /// # Errors
    /// As [`Session::repodata`].
    pub async fn names(&self, channels: &[ResolvedChannel], subdirs: &[Subdir]) -> Result<Vec<PackageName>> {
        let opened = self.open_channels(channels, subdirs).await?;
        let mut names: Vec<PackageName> = opened
            .into_iter()
            .flat_map(|opened| opened.names)
            .filter_map(|name| PackageName::try_from(name).ok())
            .collect::<HashSet<_>>()
            .into_iter()
            .collect();
        names.sort_by(|left, right| left.as_normalized().cmp(right.as_normalized()));
        Ok(names)
    }

    /// Every record of every package that `spec` names (version and build are not filtered by), best channel first.
    ///
    /// # Errors
    /// As [`Session::repodata`].
    pub async fn records(&self, channels: &[ResolvedChannel], subdirs: &[Subdir], name: &PackageName) -> Result<Vec<RepoDataRecord>> {
        let spec = MatchSpec::from(name.clone());
        let repodata = self.repodata(channels, subdirs, &[spec], false).await?;
        Ok(repodata.iter().flat_map(RepoData::iter).filter(|record| record.package_record.name == *name).cloned().collect())
    }

    /// Fetches a small text over http(s), or reads it from a `file:` URL.
    ///
    /// # Errors
    /// `Kind::Network` with the URL (secrets masked) and the reason; `Kind::Usage` for another scheme.
    pub async fn fetch_text(&self, url: &Url) -> Result<Fetched> {
        let name = redact_url(url);
        let failed = |why: String| Error::network(format!("cannot fetch `{name}`")).because(why);
        match url.scheme() {
            "file" => {
                let path = url.to_file_path().map_err(|()| Error::usage(format!("`{name}` is no path on this machine")))?;
                let mut bytes = Vec::new();
                fs_err::File::open(&path)
                    .and_then(|file| file.take(MAX_TEXT as u64 + 1).read_to_end(&mut bytes))
                    .map_err(|error| Error::io("read", &path, &error))?;
                if bytes.len() > MAX_TEXT {
                    return Err(Error::failure(format!("`{name}` is longer than {MAX_TEXT} bytes")));
                }
                Ok(Fetched { name, bytes, base_dir: None })
            }
            "http" | "https" => {
                if self.offline {
                    return Err(failed("the network is off (`--offline`)".to_owned()).hint("download the file yourself and give its path"));
                }
                let response = self.client.client().get(url.clone()).send().await.map_err(|error| failed(chain(&error)))?;
                let status = response.status();
                if !status.is_success() {
                    let error = failed(format!("the server answers {status}"));
                    return Err(if matches!(status.as_u16(), 401 | 403) { error.hint(login_hint(url)) } else { error });
                }
                let mut bytes = Vec::new();
                let mut stream = response.bytes_stream();
                while let Some(chunk) = stream.next().await {
                    bytes.extend_from_slice(&chunk.map_err(|error| failed(chain(&error)))?);
                    if bytes.len() > MAX_TEXT {
                        return Err(failed(format!("it is longer than {MAX_TEXT} bytes")));
                    }
                }
                Ok(Fetched { name, bytes, base_dir: None })
            }
            scheme => Err(Error::usage(format!("`{name}`: `{scheme}:` is not supported")).hint("http, https and file are")),
        }
    }

    /// Makes sure that every channel answers for every subdir, and names the one that does not.
    async fn open_channels(&self, channels: &[ResolvedChannel], subdirs: &[Subdir]) -> Result<Vec<Opened>> {
        self.trust(channels);
        let opened = futures::future::join_all(channels.iter().map(|channel| self.open_channel(channel, subdirs))).await;
        opened.into_iter().collect()
    }

    async fn open_channel(&self, channel: &ResolvedChannel, subdirs: &[Subdir]) -> Result<Opened> {
        if channel.channel.base_url.url().scheme() == "file" {
            let this = self.clone();
            let channel = channel.clone();
            let subdirs = subdirs.to_vec();
            return tokio::task::spawn_blocking(move || this.open_folder(&channel, &subdirs))
                .await
                .map_err(|error| Error::failure("reading repodata was stopped").because(error))?;
        }
        let asked = futures::future::join_all(subdirs.iter().map(|&subdir| async move {
            let names = self
                .gateway
                .names([channel.channel.as_ref().clone()], [subdir])
                .channel_relations(ChannelRelationsMode::Disabled)
                .with_reporter(Bridge::new(self.progress.clone()))
                .execute()
                .await;
            (subdir, names)
        }))
        .await;
        let mut names = Vec::new();
        let mut present = Vec::new();
        let mut missing = None;
        for (subdir, answer) in asked {
            match answer {
                Ok(found) => {
                    names.extend(found.names.iter().map(|name| name.as_source().to_owned()));
                    present.push(subdir);
                }
                // Any other subdir that is not there counts as empty already.
                Err(GatewayError::SubdirNotFoundError(error)) if subdir == Subdir::NoArch => missing = Some(chain(error.as_ref())),
                Err(error) => {
                    let described = self.describe(&error, std::slice::from_ref(channel), &[subdir]);
                    if is_malformed(&error) {
                        // A login page or a broken copy must not be believed again at the next run.
                        let _ = self.gateway.clear_repodata_cache(
                            &channel.channel,
                            SubdirSelection::Some(HashSet::from([subdir.to_string()])),
                            CacheClearMode::InMemoryAndDisk,
                        );
                    }
                    return Err(described);
                }
            }
        }
        let Some(why) = missing else {
            return Ok(Opened { source: Source::Channel(channel.channel.as_ref().clone()), names });
        };
        if names.is_empty() {
            let url = redact_url(channel.channel.base_url.url());
            return Err(Error::network(format!("there is no channel `{}`", channel.display))
                .because(format!("`{url}` has repodata for none of: {}", list(subdirs)))
                .because(why)
                .hint("check the spelling; a private channel may answer like this without credentials: tare auth login HOST"));
        }
        self.progress.note(&format!("the channel `{}` has no `noarch`; it counts as empty", channel.display));
        let partial = Partial { gateway: self.gateway.clone(), channel: channel.channel.as_ref().clone(), present, names: names.clone() };
        Ok(Opened { source: Source::Custom(Arc::new(partial)), names })
    }

    /// A channel that is a folder: repodata.json of each subdir, or repodata.json.zst unpacked into the cache.
    fn open_folder(&self, channel: &ResolvedChannel, subdirs: &[Subdir]) -> Result<Opened> {
        let url = channel.channel.base_url.url();
        let root = url.to_file_path().map_err(|()| Error::usage(format!("`{url}` is no path on this machine")))?;
        // Large channels: a subdir per thread.
        let read = |subdir: Subdir| -> Result<Option<Arc<SparseRepoData>>> {
            let key = (Url::clone(url), subdir);
            let known = self.folders.lock().unwrap_or_else(PoisonError::into_inner).get(&key).cloned();
            let sparse = match known {
                Some(sparse) => Some(sparse),
                None => self.read_folder(channel, &root.join(subdir.as_str()), subdir)?.map(Arc::new),
            };
            if let Some(sparse) = &sparse {
                self.folders.lock().unwrap_or_else(PoisonError::into_inner).insert(key, sparse.clone());
            }
            Ok(sparse)
        };
        let read = &read;
        let found: Vec<Arc<SparseRepoData>> = std::thread::scope(|scope| {
            let readers: Vec<_> = subdirs.iter().map(|&subdir| scope.spawn(move || read(subdir))).collect();
            readers
                .into_iter()
                .filter_map(|reader| reader.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)).transpose())
                .collect::<Result<_>>()
        })?;
        if found.is_empty() {
            let has: Vec<Subdir> = Subdir::all().filter(|subdir| root.join(subdir.as_str()).is_dir()).collect();
            self.progress.note(&format!("the channel `{}` has nothing for {}, only for: {}", channel.display, list(subdirs), list(&has)));
        }
        let names = found
            .iter()
            .flat_map(|sparse| sparse.package_names(PackageFormatSelection::default()).map(str::to_owned).collect::<Vec<_>>())
            .collect();
        Ok(Opened { source: Source::SparseRepoData(found), names })
    }

    fn read_folder(&self, channel: &ResolvedChannel, folder: &Path, subdir: Subdir) -> Result<Option<SparseRepoData>> {
        let plain = folder.join("repodata.json");
        let packed = folder.join("repodata.json.zst");
        let (file, shown) = if plain.is_file() {
            (plain.clone(), plain)
        } else if packed.is_file() {
            (self.unpack(&packed)?, packed)
        } else {
            return Ok(None);
        };
        let read = SparseRepoData::from_file(channel.channel.as_ref().clone(), subdir.as_str(), &file, None);
        read.map(Some).map_err(|error| {
            Error::failure(format!("the repodata of the channel `{}` cannot be read", channel.display))
                .because(format!("`{}`: {}", shown.display(), chain(&error)))
                .hint("make the channel's index anew: conda index FOLDER")
        })
    }

    /// repodata.json.zst to a file of the cache, named by its path, size and time.
    fn unpack(&self, packed: &Path) -> Result<PathBuf> {
        let wrong = |error: &std::io::Error| Error::io("unpack", packed, error);
        let data = packed.metadata().map_err(|error| wrong(&error))?;
        let mut hash = Sha256::new();
        hash.update(packed.as_os_str().as_encoded_bytes());
        hash.update(format!("|{}|{:?}", data.len(), data.modified().ok()));
        let name: String = crate::text::hex(&hash.finalize()[..12]);
        let folder = self.cache_dir.join(rattler_cache::REPODATA_CACHE_DIR);
        let target = folder.join(format!("folder-{name}.json"));
        if target.is_file() {
            return Ok(target);
        }
        let unpack = || -> std::io::Result<()> {
            fs_err::create_dir_all(&folder)?;
            let mut temporary = tempfile::NamedTempFile::new_in(&folder)?;
            let mut decoder = zstd::stream::read::Decoder::new(fs_err::File::open(packed)?)?;
            std::io::copy(&mut decoder, &mut temporary)?;
            temporary.persist(&target).map_err(|error| error.error)?;
            Ok(())
        };
        unpack().map_err(|error| wrong(&error).hint("is the file complete? make the channel's index anew"))?;
        Ok(target)
    }

    /// What the gateway says, with the channel, the URL and what to do.
    fn describe(&self, error: &GatewayError, channels: &[ResolvedChannel], subdirs: &[Subdir]) -> Error {
        let text = chain(error);
        let named: Vec<&ResolvedChannel> = match channels {
            [one] => vec![one],
            several => {
                several.iter().filter(|channel| text.contains(redact_url(channel.channel.base_url.url()).trim_end_matches('/'))).collect()
            }
        };
        let which = match named.as_slice() {
            [channel] => format!("the channel `{}`", channel.display),
            _ => "a channel".to_owned(),
        };
        let place = named.first().map(|channel| redact_url(channel.channel.base_url.url()).trim_end_matches('/').to_owned());
        let at = match (&place, subdirs) {
            (Some(place), [subdir]) => format!("{place}/{subdir}"),
            (Some(place), _) => place.clone(),
            (None, _) => String::new(),
        };
        if self.offline {
            return match error {
                GatewayError::ShardNotCached(package) => {
                    Error::network(format!("the records of `{package}` are not in the cache, and the network is off"))
                        .because(format!("{which} is known here only as far as earlier runs asked for it"))
                        .hint("run the command once without --offline")
                }
                _ => Error::network(format!("the repodata of {which} is not in the cache, and the network is off"))
                    .because(format!("missing: `{at}`"))
                    .because(text)
                    .hints_from(named.first().filter(|channel| channel.appended).map(|channel| appended_hint(&channel.display)))
                    .hint("run the command once without --offline, or name a channel that is a folder"),
            };
        }
        if let Some(io) = own_disk(error) {
            return Error::failure(format!("cannot keep the repodata of {which} in the cache `{}`", self.cache_dir.display()))
                .because(io)
                .hint("free some disk space there, or choose another place for the cache: TARE_CACHE_DIR=PATH");
        }
        if is_malformed(error) {
            let local = named.first().is_some_and(|channel| channel.channel.base_url.url().scheme() == "file");
            let error = |kind| Error::new(kind, format!("what {which} serves is no repodata")).because(format!("`{at}`")).because(&text);
            if local {
                return error(Kind::Failure).hint("make the index of the folder anew, for example with `conda index`");
            }
            return error(Kind::Network).hint("open the address in a browser: a login page, a proxy or a broken mirror may be in the way");
        }
        let status = status_of(error);
        let certificate = text.contains("invalid peer certificate");
        let appended = named.first().filter(|channel| channel.appended).map(|channel| appended_hint(&channel.display));
        let made = Error::network(format!("{which} does not answer")).because(format!("`{at}`")).because(text).hints_from(appended);
        match (status, named.first()) {
            (Some(401 | 403), Some(channel)) => Error::network(format!("{which} refuses access"))
                .because(format!("`{at}` answers {}", status.unwrap_or_default()))
                .hint(login_hint(channel.channel.base_url.url())),
            (Some(407), _) => made.hint("the proxy wants credentials: proxy_servers: {https: http://USER:PASSWORD@proxy:3128}"),
            _ if certificate => made
                .hint("if the network has a certificate authority of its own, name its certificate: ssl_verify: /path/to/ca.pem in .condarc, or SSL_CERT_FILE=/path/to/ca.pem"),
            _ => made.hint("try again later, use a mirror (`mirrors` in config.toml), or `--offline` with what is in the cache"),
        }
    }
}

fn list(subdirs: &[Subdir]) -> String {
    subdirs.iter().map(|subdir| subdir.as_str()).collect::<Vec<_>>().join(", ")
}

/// How to leave out a channel that nobody named.
pub(crate) fn appended_hint(channel: &str) -> String {
    format!("`{channel}` was not named but appended; to leave it out, list `nodefaults` among the channels (or --override-channels)")
}

pub(crate) fn login_hint(url: &Url) -> String {
    format!("store credentials for it: tare auth login {}", url.host_str().unwrap_or("HOST"))
}

/// The status of the response behind an error. (The errors are transparent: their `source()` skips the one that knows.)
fn status_of(error: &GatewayError) -> Option<u16> {
    use rattler_repodata_gateway::fetch::FetchRepoDataError;
    let status = match error {
        GatewayError::ReqwestError(error) => error.status(),
        GatewayError::FetchRepoDataError(FetchRepoDataError::HttpError(error)) => error.status(),
        _ => None,
    };
    status.map(|status| status.as_u16())
}

/// What the system said about a file of the cache, if that is what failed.
fn own_disk(error: &GatewayError) -> Option<&std::io::Error> {
    use rattler_repodata_gateway::fetch::FetchRepoDataError;
    let io = match error {
        GatewayError::IoError(_, io)
        | GatewayError::FetchRepoDataError(FetchRepoDataError::FailedToDownload(_, io) | FetchRepoDataError::IoError(io)) => io,
        _ => return None,
    };
    io.raw_os_error().is_some().then_some(io)
}

/// Something came, and it was not what it should be.
fn is_malformed(error: &GatewayError) -> bool {
    use rattler_repodata_gateway::fetch::FetchRepoDataError;
    match error {
        _ if own_disk(error).is_some() => false,
        GatewayError::IoError(..) | GatewayError::ShardHashMismatch(_) | GatewayError::Generic(_) => true,
        GatewayError::FetchRepoDataError(FetchRepoDataError::FailedToDownload(_, error)) => {
            // The decoder's complaint, not the connection's.
            !error.get_ref().is_some_and(|inner| inner.is::<reqwest::Error>())
        }
        _ => false,
    }
}

struct Opened {
    source: Source,
    names: Vec<String>,
}

/// A channel without `noarch`: asks the gateway for the subdirs that are there.
struct Partial {
    gateway: Gateway,
    channel: Channel,
    present: Vec<Subdir>,
    names: Vec<String>,
}

#[async_trait::async_trait]
impl RepoDataSource for Partial {
    async fn fetch_package_records(&self, platform: Subdir, name: &PackageName) -> Result<Vec<Arc<RepoDataRecord>>, GatewayError> {
        if !self.present.contains(&platform) {
            return Ok(Vec::new());
        }
        let output = self
            .gateway
            .query([self.channel.clone()], [platform], [MatchSpec::from(name.clone())])
            .recursive(false)
            .channel_relations(ChannelRelationsMode::Disabled)
            .execute()
            .await?;
        Ok(output.repodata.iter().flat_map(|repodata| repodata.iter_arc().cloned().collect::<Vec<_>>()).collect())
    }

    fn package_names(&self, platform: Subdir) -> Vec<String> {
        if self.present.contains(&platform) { self.names.clone() } else { Vec::new() }
    }
}

/// Repodata downloads as progress.
struct Bridge {
    progress: Arc<dyn Progress>,
    tasks: Mutex<Vec<(TaskId, bool)>>,
}

impl Bridge {
    fn new(progress: Arc<dyn Progress>) -> Self {
        Bridge { progress, tasks: Mutex::default() }
    }
}

impl Reporter for Bridge {
    fn download_reporter(&self) -> Option<&dyn DownloadReporter> {
        Some(self)
    }
}

impl DownloadReporter for Bridge {
    fn on_download_start(&self, url: &Url) -> usize {
        // `conda-forge/linux-64`: the two parts before the file's name.
        let parts: Vec<&str> = url.path_segments().map(|parts| parts.filter(|part| !part.is_empty()).collect()).unwrap_or_default();
        let label = parts.iter().rev().skip(1).take(2).rev().copied().collect::<Vec<_>>().join("/");
        let label = if label.is_empty() { redact_url(url) } else { label };
        let task = self.progress.start(Phase::Repodata, &label, None);
        let mut tasks = self.tasks.lock().unwrap_or_else(PoisonError::into_inner);
        tasks.push((task, false));
        tasks.len() - 1
    }

    fn on_download_progress(&self, _: &Url, index: usize, done: usize, total: Option<usize>) {
        let mut tasks = self.tasks.lock().unwrap_or_else(PoisonError::into_inner);
        let Some((task, has_total)) = tasks.get_mut(index) else { return };
        if let (Some(total), false) = (total, *has_total) {
            *has_total = true;
            self.progress.set_total(*task, total as u64);
        }
        self.progress.advance_to(*task, done as u64);
    }

    fn on_download_complete(&self, _: &Url, index: usize) {
        let tasks = self.tasks.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((task, _)) = tasks.get(index) {
            self.progress.finish(*task);
        }
    }
}

#[cfg(test)]
mod tests;
