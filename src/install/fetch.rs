//! Every package into the cache, verified, before anything of an environment is touched.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use futures::{StreamExt, TryStreamExt, stream};
use rattler_cache::package_cache::{CacheKey, CacheReporter, PackageCache, PackageCacheError, PackageCacheLayerError};
use rattler_conda_types::package::{
    CondaArchiveIdentifier, DistArchiveIdentifier, DistArchiveType, IndexJson, LinkJson, PackageFile, PathType, PathsJson,
};
use rattler_conda_types::{PackageRecord, RepoDataRecord};
use rattler_digest::{Md5, Md5Hash, Sha256, Sha256Hash};
use rattler_networking::LazyClient;
use rattler_networking::retry_policies::default_retry_policy;
use rattler_package_streaming::ExtractError;
use rattler_redaction::Redact;
use rayon::iter::{IndexedParallelIterator, IntoParallelRefIterator, ParallelIterator};
use url::Url;

use super::cache::{ShardLock, lock_entry, share_entries};
use super::cancel::{Cancel, interrupted};
use super::metadata::{hex, set_mode};
use super::swap::remove_tree;
use crate::error::{Error, Kind, Result};
use crate::report::{Phase, Progress, TaskId};

/// How much of a cached package is looked at before it is used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum CacheCheck {
    /// Every file is there with its size; the contents of files written to since they were unpacked are read too.
    #[default]
    Changed,
    /// The contents of every file are read.
    Full,
}

/// A package in the cache, checked.
#[derive(Debug, Clone)]
pub(crate) struct Cached {
    pub record: RepoDataRecord,
    /// The unpacked package.
    pub folder: PathBuf,
    pub index: IndexJson,
    pub paths: PathsJson,
    pub link: Option<LinkJson>,
}

/// What to fetch with.
pub(crate) struct Fetcher<'a> {
    pub cache: &'a PackageCache,
    pub client: LazyClient,
    pub check: CacheCheck,
    /// Simultaneous downloads.
    pub concurrency: usize,
    pub progress: Arc<dyn Progress>,
    pub cancel: Cancel,
}

/// A URL with secrets masked, for messages.
pub(crate) fn shown(url: &Url) -> String {
    url.clone().redact().to_string()
}

fn label(record: &PackageRecord) -> String {
    format!("{} {} {}", record.name.as_normalized(), record.version, record.build)
}

/// A package to be found in the cache or fetched.
#[derive(Debug, Clone)]
struct Wanted {
    label: String,
    url: Url,
    key: CacheKey,
    /// Name of the folder in the cache, for the lock.
    entry: String,
    /// For a wheel, which needs its record to be unpacked.
    wheel: Option<PackageRecord>,
    /// The only hash there is, so the cache, which knows SHA-256 only, cannot compare it.
    md5_only: Option<Md5Hash>,
    size: Option<u64>,
}

impl Wanted {
    fn of_record(record: &RepoDataRecord, cache_origin: bool) -> Self {
        let package = &record.package_record;
        let wheel = matches!(record.identifier.archive_type, DistArchiveType::Wheel(_));
        let key = if wheel { CacheKey::from_wheel_record(package) } else { CacheKey::from(package) };
        Wanted {
            label: label(package),
            url: record.url.clone(),
            key: with_origin(key, &record.url, cache_origin),
            entry: format!("{}-{}-{}", package.name.as_normalized(), package.version, package.build),
            wheel: wheel.then(|| package.clone()),
            md5_only: if package.sha256.is_none() { package.md5 } else { None },
            size: package.size,
        }
    }

    fn local_path(&self) -> Option<PathBuf> {
        if self.url.scheme() == "file" { self.url.to_file_path().ok() } else { None }
    }
}

fn with_origin(key: CacheKey, url: &Url, cache_origin: bool) -> CacheKey {
    match (cache_origin, url.scheme() == "file", url.to_file_path()) {
        (false, ..) => key,
        (true, true, Ok(path)) => key.with_path(&path),
        (true, ..) => key.with_url(url.clone()),
    }
}

/// The parts of a cached package that are read from it.
struct Contents {
    folder: PathBuf,
    index: IndexJson,
    paths: PathsJson,
    link: Option<LinkJson>,
}

impl Fetcher<'_> {
    /// Brings every record into the cache and checks it. The locks returned keep the entries in place until they are dropped.
    pub(crate) async fn fetch_all(&self, records: &[RepoDataRecord]) -> Result<(Vec<Cached>, Vec<ShardLock>)> {
        for record in records {
            record.package_record.validate_identity(&record.identifier)?;
        }
        let wanted: Vec<Wanted> = records.iter().map(|record| Wanted::of_record(record, self.cache.cache_origin())).collect();
        // Another process may evict an entry between our check of it and our lock on it: look again under the lock.
        for _ in 0..5 {
            let contents = self.fetch_wanted(&wanted).await?;
            let locks = share_entries(
                contents.iter().zip(&wanted).map(|(contents, wanted)| (layer_of(self.cache, &contents.folder), wanted.entry.clone())),
                &self.cancel,
            )
            .await?;
            if contents.iter().any(|contents| !contents.folder.join(IndexJson::package_path()).exists()) {
                continue;
            }
            let mut cached = Vec::with_capacity(records.len());
            for (contents, record) in contents.into_iter().zip(records) {
                check_identity(&contents, &record.package_record, &record.url)?;
                cached.push(Cached {
                    record: record.clone(),
                    folder: contents.folder,
                    index: contents.index,
                    paths: contents.paths,
                    link: contents.link,
                });
            }
            return Ok((cached, locks));
        }
        Err(Error::failure("the package cache is being emptied by another process").hint("run again when it is done"))
    }

    /// Whether a good copy is in the cache. Nothing is fetched or mended.
    pub(crate) async fn present(&self, record: &RepoDataRecord) -> Result<bool> {
        record.package_record.validate_identity(&record.identifier)?;
        let wanted = Wanted::of_record(record, self.cache.cache_origin());
        Ok(self.look_up(&wanted).await?.is_some())
    }

    async fn fetch_wanted(&self, wanted: &[Wanted]) -> Result<Vec<Contents>> {
        let check = self.progress.start(Phase::Unpack, "checking packages in the cache", Some(wanted.len() as u64));
        let done = &std::sync::atomic::AtomicU64::new(0);
        let found: Vec<Option<Contents>> = stream::iter(0..wanted.len())
            .map(|number| async move {
                let found = self.look_up(&wanted[number]).await;
                let done = done.fetch_add(1, std::sync::atomic::Ordering::Relaxed) + 1;
                self.progress.advance_to(check, done);
                found
            })
            .buffered(16)
            .try_collect()
            .await
            .inspect_err(|_| self.progress.finish(check))?;
        self.progress.finish(check);
        let missing: Vec<&Wanted> = wanted.iter().zip(&found).filter(|(_, found)| found.is_none()).map(|(wanted, _)| wanted).collect();
        if missing.is_empty() {
            return Ok(found.into_iter().flatten().collect());
        }
        self.check_cache_space(&missing)?;
        let total = super::space::total(missing.iter().filter_map(|wanted| wanted.size));
        let label = format!("{} {}", missing.len(), if missing.len() == 1 { "package" } else { "packages" });
        let reporter = Arc::new(Downloads::start(self.progress.clone(), &label, missing.len(), total));
        let fetched = stream::iter(found.into_iter().enumerate())
            .map(|(number, found)| {
                let reporter = reporter.clone();
                async move {
                    match found {
                        Some(contents) => Ok(contents),
                        None => self.obtain(&wanted[number], reporter).await,
                    }
                }
            })
            .buffered(self.concurrency.max(1))
            .try_collect();
        let result = tokio::select! {
            result = fetched => result,
            () = self.cancel.cancelled() => Err(interrupted()),
        };
        reporter.finish();
        result
    }

    /// Looks for a good copy in the layers of the cache; `None` if there is none (absent, other hash, damaged).
    async fn look_up(&self, wanted: &Wanted) -> Result<Option<Contents>> {
        self.cancel.check()?;
        for layer in self.cache.layers() {
            let _lock = share_entries([(layer.path().to_owned(), wanted.entry.clone())], &self.cancel).await?;
            // Any error here means that this layer has no usable copy.
            let Ok(found) = layer.try_validate(&wanted.key).await else { continue };
            if let Some(md5) = wanted.md5_only
                && !md5_is_recorded(found.path(), &md5)
            {
                continue;
            }
            let (folder, check) = (found.path().to_owned(), self.check);
            match blocking(move || read_and_check(&folder, check)).await? {
                Ok(contents) => return Ok(Some(contents)),
                Err(damage) => tracing::warn!("the cached copy of {} is damaged: {damage}", wanted.label),
            }
        }
        Ok(None)
    }

    /// Downloads (or reads) and unpacks into the first writable layer.
    async fn obtain(&self, wanted: &Wanted, reporter: Arc<Downloads>) -> Result<Contents> {
        let layers: Vec<_> = self.cache.layers().iter().filter(|layer| !layer.is_readonly()).cloned().collect();
        let Some(layer) = layers.first() else {
            return Err(
                Error::failure("none of the package caches can be written").hint("set TARE_CACHE_DIR to a folder that you can write")
            );
        };
        let layer_path = layer.path().to_owned();
        fs_err::create_dir_all(&layer_path).map_err(|error| Error::io("create the folder", &layer_path, &error))?;
        let _lock = lock_entry(&layer_path, &wanted.entry, &self.cancel).await?;
        // Another process may have fetched it while we waited.
        if let Ok(found) = layer.try_validate(&wanted.key).await
            && wanted.md5_only.is_none_or(|md5| md5_is_recorded(found.path(), &md5))
        {
            let (folder, check) = (found.path().to_owned(), self.check);
            if let Ok(contents) = blocking({
                let folder = folder.clone();
                move || read_and_check(&folder, check)
            })
            .await?
            {
                reporter.skip(wanted.size.unwrap_or(0));
                return Ok(contents);
            }
            self.progress.note(&format!("the cached copy of {} is damaged and is fetched again", wanted.label));
            evict(&folder)?;
        }
        let cache = PackageCache::from_layers(layers, self.cache.cache_origin());
        let mut tries = 0;
        let folder = loop {
            tries += 1;
            let got = tokio::select! {
                got = self.get(&cache, wanted, reporter.clone()) => got,
                bytes = outgrown(&layer_path, &wanted.entry, unpacked_limit(wanted)) => Err(too_large(wanted, bytes)),
            };
            match got {
                Ok(folder) => break folder,
                // A proxy may have served a stale or cut copy: once more, then it is the channel's fault.
                Err(failure) if failure.hash_mismatch && tries < 2 && wanted.local_path().is_none() => {
                    tracing::warn!("{}: {}, fetching it once more", wanted.label, failure.error);
                }
                Err(failure) => return Err(failure.error),
            }
        };
        if let Some(md5) = wanted.md5_only {
            record_md5(&folder, &md5)?;
        }
        reporter.unpacked();
        // What was just unpacked is hashed whole: a list of files that lies is found before anything is linked.
        let limit = unpacked_limit(wanted).unwrap_or(u64::MAX);
        let unpacked = folder.clone();
        let bytes = blocking(move || tree_bytes(&unpacked)).await?;
        if bytes > limit {
            evict(&folder)?;
            return Err(too_large(wanted, bytes).error);
        }
        let contents = blocking(move || {
            if let Some(special) = special_file(&folder, &folder) {
                return Ok((Err(special), folder));
            }
            make_modes_uniform(&folder)?;
            Ok::<_, Error>((read_and_check(&folder, CacheCheck::Full), folder))
        })
        .await??;
        match contents {
            (Ok(contents), _) => Ok(contents),
            (Err(damage), folder) => {
                evict(&folder)?;
                Err(Error::new(Kind::Verification, format!("the package {} does not contain what it says", wanted.label))
                    .because(damage)
                    .because(format!("it came from {}", shown(&wanted.url)))
                    .hint("tell the channel's maintainers; use another build of the package"))
            }
        }
    }

    async fn get(&self, cache: &PackageCache, wanted: &Wanted, reporter: Arc<Downloads>) -> Result<PathBuf, Failure> {
        let reporter: Option<Arc<dyn CacheReporter>> = Some(reporter);
        let metadata = match wanted.local_path() {
            Some(path) => {
                if let Some(md5) = wanted.md5_only {
                    let file = path.clone();
                    let found = blocking(move || rattler_digest::compute_file_digest::<Md5>(&file))
                        .await
                        .map_err(Failure::from)?
                        .map_err(|error| Failure::from(Error::io("read", &path, &error)))?;
                    if found != md5 {
                        return Err(mismatch(wanted, &hex(&md5), &hex(&found)));
                    }
                }
                let sha256 = wanted.key.sha256();
                let (archive, wheel) = (path.clone(), wanted.wheel.clone());
                // Straight from the archive; the key decides the place.
                cache
                    .get_or_fetch(
                        wanted.key.clone(),
                        move |destination| {
                            let (archive, wheel) = (archive.clone(), wheel.clone());
                            async move {
                                let result = match wheel {
                                    Some(record) => {
                                        rattler_package_streaming::tokio::fs::extract_wheel(&archive, &destination, &record).await?
                                    }
                                    None => rattler_package_streaming::tokio::fs::extract(&archive, &destination).await?,
                                };
                                match sha256 {
                                    Some(expected) if expected != result.sha256 => Err(ExtractError::HashMismatch {
                                        url: archive.display().to_string(),
                                        destination: destination.display().to_string(),
                                        expected: hex(&expected),
                                        actual: hex(&result.sha256),
                                        total_size: result.total_size,
                                    }),
                                    _ => Ok(Some(result.sha256)),
                                }
                            }
                        },
                        reporter,
                    )
                    .await
            }
            None => match &wanted.wheel {
                Some(record) => {
                    cache
                        .get_or_fetch_wheel_from_url_with_retry(
                            record,
                            wanted.url.clone(),
                            self.client.clone(),
                            default_retry_policy(),
                            reporter,
                            None,
                        )
                        .await
                }
                None => {
                    // The cache adds the origin itself.
                    let key = wanted.key.clone();
                    cache
                        .get_or_fetch_from_url_with_retry(
                            key,
                            wanted.url.clone(),
                            self.client.clone(),
                            default_retry_policy(),
                            reporter,
                            None,
                        )
                        .await
                }
            },
        };
        metadata.map(|metadata| metadata.path().to_owned()).map_err(|error| failure(wanted, &error))
    }

    /// Refuses before a download that certainly does not fit.
    fn check_cache_space(&self, missing: &[&Wanted]) -> Result<()> {
        let Some(layer) = self.cache.layers().iter().find(|layer| !layer.is_readonly()) else { return Ok(()) };
        let needed = super::space::total(missing.iter().filter_map(|wanted| wanted.size));
        super::space::require(layer.path(), needed, "the packages to download", "choose another place for the cache: TARE_CACHE_DIR=PATH")
    }
}

/// An archive may unpack to this many times its size, and to [`UNPACKED_FLOOR`] in any case. Real packages stay far below.
pub(crate) const UNPACKED_RATIO: u64 = 200;

/// Bytes.
pub(crate) const UNPACKED_FLOOR: u64 = 256 << 20;

/// Bytes that a package may unpack to; `None` if the size of its archive is not known.
fn unpacked_limit(wanted: &Wanted) -> Option<u64> {
    let on_disk = wanted.local_path().and_then(|path| std::fs::metadata(path).ok()).map(|metadata| metadata.len());
    Some(on_disk.or(wanted.size)?.saturating_mul(UNPACKED_RATIO).max(UNPACKED_FLOOR))
}

/// Resolves when what is being unpacked for `entry` has more bytes than `limit`. The caller holds the lock of the entry, so every temporary folder of its
/// name is of this unpacking or of a dead one.
async fn outgrown(layer: &Path, entry: &str, limit: Option<u64>) -> u64 {
    let Some(limit) = limit else { return std::future::pending().await };
    let head = format!(".{entry}");
    loop {
        tokio::time::sleep(std::time::Duration::from_millis(100)).await;
        let (layer, head) = (layer.to_owned(), head.clone());
        let bytes = blocking(move || {
            let entries = std::fs::read_dir(&layer).into_iter().flatten().flatten();
            entries.filter(|entry| entry.file_name().to_string_lossy().starts_with(&head)).map(|entry| tree_bytes(&entry.path())).sum()
        })
        .await
        .unwrap_or(0_u64);
        if bytes > limit {
            return bytes;
        }
    }
}

fn tree_bytes(path: &Path) -> u64 {
    match std::fs::symlink_metadata(path) {
        Ok(metadata) if metadata.is_dir() => {
            std::fs::read_dir(path).into_iter().flatten().flatten().map(|entry| tree_bytes(&entry.path())).sum()
        }
        Ok(metadata) => metadata.len(),
        Err(_) => 0,
    }
}

fn too_large(wanted: &Wanted, bytes: u64) -> Failure {
    Error::new(Kind::Verification, format!("the package {} unpacks to far more than a package can be", wanted.label))
        .because(format!("it unpacks to {} or more", super::space::human(bytes)))
        .because(format!("it came from {}", shown(&wanted.url)))
        .hint("this is how an archive looks that is made to fill disks: tell the channel's maintainers")
        .into()
}

/// The first thing below `folder` that no package has: a device, a pipe or a socket; `info` as a link. `root` is the unpacked package.
fn special_file(folder: &Path, root: &Path) -> Option<String> {
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        let shown = path.strip_prefix(root).unwrap_or(&path).to_owned();
        let Ok(kind) = entry.file_type() else { return Some(format!("`{}` cannot be looked at", shown.display())) };
        if kind.is_dir() {
            if let Some(found) = special_file(&path, root) {
                return Some(found);
            }
        } else if kind.is_symlink() {
            // What is read before anything is linked; recipes in `info` may hold links.
            let read = shown.parent() == Some(Path::new("info")) && shown.extension().is_none_or(|extension| extension == "json");
            if read || shown == Path::new("info") {
                return Some(format!("`{}` is a symbolic link", shown.display()));
            }
        } else if !kind.is_file() {
            return Some(format!("`{}` is a device, a pipe or a socket", shown.display()));
        }
    }
    None
}

struct Failure {
    error: Error,
    hash_mismatch: bool,
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Failure { error, hash_mismatch: false }
    }
}

fn mismatch(wanted: &Wanted, expected: &str, found: &str) -> Failure {
    Failure {
        error: Error::new(Kind::Verification, format!("the package {} is not what was asked for", wanted.label))
            .because(format!("{} has the hash {found}", shown(&wanted.url)))
            .because(format!("expected {expected}"))
            .hint("if the channel replaced the file, update the lock or the channel's cached index (tare clean --repodata)"),
        hash_mismatch: true,
    }
}

/// The error of the cache as one of ours, with the right kind.
fn failure(wanted: &Wanted, error: &PackageCacheError) -> Failure {
    let inner = match error {
        PackageCacheError::LayerError(layer) => match layer.downcast_ref::<PackageCacheLayerError>() {
            Some(PackageCacheLayerError::FetchError(fetch)) => Some(fetch.clone()),
            _ => None,
        },
        _ => None,
    };
    let extract = inner.as_deref().and_then(|error| error.downcast_ref::<ExtractError>());
    if let Some(ExtractError::HashMismatch { expected, actual, .. }) = extract {
        return mismatch(wanted, expected, actual);
    }
    let place = shown(&wanted.url);
    let source: &(dyn std::error::Error + 'static) = match &inner {
        Some(inner) => &**inner,
        None => error,
    };
    if let Some(io) = own_disk(source) {
        let made = Error::failure(format!("cannot unpack {}", wanted.label)).because(io);
        return match io.kind() {
            std::io::ErrorKind::PermissionDenied => made.hint("the package and the cache (TARE_CACHE_DIR) must be open to you"),
            _ => made.hint("free some disk space, or choose another place for the cache (TARE_CACHE_DIR)"),
        }
        .into();
    }
    let network = wanted.local_path().is_none() && is_of_the_network(source);
    let local_missing = wanted.local_path().is_some_and(|path| !path.exists());
    let made = match (network, local_missing) {
        (true, _) => Error::network(format!("cannot fetch {}", wanted.label)).because(format!("from {place}")).because_of(source),
        (_, true) => Error::failure(format!("the package {} is not there", wanted.label)).because(format!("{place} does not exist")),
        _ => Error::new(Kind::Verification, format!("cannot unpack {}", wanted.label))
            .because(format!("from {place}"))
            .because_of(source)
            .hint("the archive may be cut or damaged: fetch it again"),
    };
    made.into()
}

/// Whether a connection failed, also one that broke off while the archive was unpacked from it.
fn is_of_the_network(error: &(dyn std::error::Error + 'static)) -> bool {
    let inside = |io: &std::io::Error| {
        let inner: Option<&(dyn std::error::Error + 'static)> = match io.get_ref() {
            Some(inner) => Some(inner),
            None => None,
        };
        inner.is_some_and(is_of_the_network)
    };
    let mut next = Some(error);
    while let Some(error) = next {
        if error.is::<reqwest::Error>() || matches!(error.downcast_ref(), Some(ExtractError::ReqwestError(_))) {
            return true;
        }
        // The source of an I/O error is the source of what it wraps, so what it wraps is looked at too.
        if error.downcast_ref().is_some_and(inside) || matches!(error.downcast_ref(), Some(ExtractError::IoError(io)) if inside(io)) {
            return true;
        }
        next = error.source();
    }
    false
}

/// A failure of the disk that is unpacked to, rather than of the archive. The unpacker wraps errors of the system and keeps their kind.
fn own_disk<'a>(error: &'a (dyn std::error::Error + 'static)) -> Option<&'a std::io::Error> {
    use std::io::ErrorKind::{PermissionDenied, QuotaExceeded, ReadOnlyFilesystem, StorageFull};
    let mut next = Some(error);
    while let Some(error) = next {
        let io = match error.downcast_ref::<ExtractError>() {
            Some(ExtractError::IoError(io) | ExtractError::CouldNotCreateDestination(io)) => Some(io),
            _ => error.downcast_ref::<std::io::Error>(),
        };
        if let Some(io) = io
            && matches!(io.kind(), StorageFull | QuotaExceeded | PermissionDenied | ReadOnlyFilesystem)
        {
            return Some(io);
        }
        next = error.source();
    }
    None
}

/// The layer that holds `folder`.
pub(crate) fn layer_of(cache: &PackageCache, folder: &Path) -> PathBuf {
    cache
        .layers()
        .iter()
        .map(rattler_cache::package_cache::PackageCacheLayer::path)
        .find(|layer| folder.starts_with(layer))
        .map_or_else(|| folder.parent().unwrap_or(folder).to_owned(), Path::to_owned)
}

fn sidecar(folder: &Path, suffix: &str) -> PathBuf {
    let mut name = folder.as_os_str().to_owned();
    name.push(suffix);
    PathBuf::from(name)
}

/// The MD5 of the archive an entry came from, for records that have no SHA-256.
fn md5_is_recorded(folder: &Path, md5: &Md5Hash) -> bool {
    std::fs::read_to_string(sidecar(folder, ".md5")).is_ok_and(|text| text.trim() == hex(md5))
}

fn record_md5(folder: &Path, md5: &Md5Hash) -> Result<()> {
    let path = sidecar(folder, ".md5");
    fs_err::write(&path, hex(md5)).map_err(|error| Error::io("write", &path, &error))
}

/// The SHA-256 of the archive an entry came from, as the cache recorded it: 32 bytes after an 8-byte revision.
pub(crate) fn recorded_sha256(folder: &Path) -> Option<Sha256Hash> {
    let bytes = std::fs::read(sidecar(folder, ".lock")).ok()?;
    Sha256Hash::try_from(bytes.get(8..40)?).ok()
}

/// Takes a bad entry out of the cache. Renamed first, so that it is gone at once.
pub(crate) fn evict(folder: &Path) -> Result<()> {
    let parent = folder.parent().unwrap_or(folder);
    let aside = tempfile::Builder::new()
        .prefix(".tare-damaged-")
        .tempdir_in(parent)
        .map_err(|error| Error::io("create a folder in", parent, &error))?;
    let aside_path = aside.keep();
    let result = std::fs::rename(folder, aside_path.join("entry"));
    let _ = std::fs::remove_file(sidecar(folder, ".md5"));
    let _ = remove_tree(&aside_path);
    result.map_err(|error| Error::io("remove the damaged cache entry", folder, &error))
}

fn check_identity(contents: &Contents, record: &PackageRecord, url: &Url) -> Result<()> {
    let index = &contents.index;
    if index.name.as_normalized() == record.name.as_normalized()
        && index.version.version() == record.version.version()
        && index.build == record.build
    {
        return Ok(());
    }
    Err(Error::new(Kind::Verification, format!("the archive of {} holds another package", label(record))).because(format!(
        "{} says that it is {} {} {}",
        shown(url),
        index.name.as_normalized(),
        index.version,
        index.build
    )))
}

trait Identity {
    fn validate_identity(&self, identifier: &DistArchiveIdentifier) -> Result<()>;
}

impl Identity for PackageRecord {
    /// Refuses names that would lead out of the cache or of `conda-meta`.
    fn validate_identity(&self, identifier: &DistArchiveIdentifier) -> Result<()> {
        let text = format!("{}-{}-{}", self.name.as_normalized(), self.version, self.build);
        if text.contains(['/', '\\', '\0', '\n']) || text.starts_with('.') {
            return Err(Error::new(Kind::Verification, format!("the package record of {text:?} is not acceptable"))
                .because(format!("name, version or build of `{identifier}` would be a path")));
        }
        Ok(())
    }
}

/// Reads the metadata of an unpacked package and checks its files. The inner error says what is wrong.
fn read_and_check(folder: &Path, check: CacheCheck) -> std::result::Result<Contents, String> {
    let index = IndexJson::from_package_directory(folder).map_err(|error| format!("`info/index.json`: {error}"))?;
    let paths =
        PathsJson::from_package_directory_with_deprecated_fallback(folder).map_err(|error| format!("`info/paths.json`: {error}"))?;
    let link = match LinkJson::from_package_directory(folder) {
        Ok(link) => Some(link),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => None,
        Err(error) => return Err(format!("`info/link.json`: {error}")),
    };
    // The cache writes this file when unpacking is done, and unpacking gives files the older times of the archive.
    let unpacked = std::fs::metadata(sidecar(folder, ".lock")).and_then(|metadata| metadata.modified()).ok();
    // A link in the place of a folder would make files of this machine files of the package.
    let mut folders: std::collections::HashSet<&Path> = std::collections::HashSet::new();
    for entry in &paths.paths {
        for above in entry.relative_path.ancestors().skip(1).filter(|above| !above.as_os_str().is_empty()) {
            if !folders.insert(above) {
                break;
            }
        }
    }
    let mut folders: Vec<&Path> = folders.into_iter().collect();
    folders.sort();
    for above in folders {
        let linked = super::link::safe_path(above).is_ok()
            && std::fs::symlink_metadata(folder.join(above)).is_ok_and(|metadata| metadata.is_symlink());
        if linked {
            return Err(format!("`{}` is a symbolic link, and files are listed below it", above.display()));
        }
    }
    let damage = paths.paths.par_iter().with_min_len(256).find_map_first(|entry| {
        let shown = entry.relative_path.display();
        if let Err(reason) = super::link::safe_path(&entry.relative_path) {
            return Some(format!("`{shown}` {reason}"));
        }
        let path = folder.join(&entry.relative_path);
        let metadata = match std::fs::symlink_metadata(&path) {
            Ok(metadata) => metadata,
            Err(_) => return Some(format!("`{shown}` is missing")),
        };
        match entry.path_type {
            PathType::Directory if !metadata.is_dir() => return Some(format!("`{shown}` is no folder")),
            PathType::SoftLink if !metadata.is_symlink() => return Some(format!("`{shown}` is no symbolic link")),
            PathType::HardLink if !metadata.is_file() => return Some(format!("`{shown}` is no file")),
            PathType::Directory | PathType::SoftLink => return None,
            PathType::HardLink => {}
        }
        if let Some(size) = entry.size_in_bytes
            && size != metadata.len()
        {
            return Some(format!("`{shown}` has {} bytes instead of {size}", metadata.len()));
        }
        if check == CacheCheck::Full
            && let Some(mode) = odd_mode(&metadata)
        {
            return Some(format!("`{shown}` has the mode {mode:04o}"));
        }
        let changed = match (metadata.modified(), unpacked) {
            (Ok(modified), Some(unpacked)) => modified > unpacked,
            _ => false,
        };
        if (changed || check == CacheCheck::Full)
            && let Some(expected) = entry.sha256
        {
            match rattler_digest::compute_file_digest::<Sha256>(&path) {
                Ok(found) if found == expected => {}
                Ok(_) => return Some(format!("the contents of `{shown}` were changed")),
                Err(error) => return Some(format!("`{shown}` cannot be read: {error}")),
            }
        }
        None
    });
    match damage {
        Some(damage) => Err(damage),
        None => Ok(Contents { folder: folder.to_owned(), index, paths, link }),
    }
}

/// A mode that no unpacking gives, whatever the umask: a file of an environment is one with that of the cache, and so is its mode.
fn odd_mode(metadata: &std::fs::Metadata) -> Option<u32> {
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        let mode = metadata.permissions().mode() & 0o7777;
        (mode & 0o7002 != 0 || mode & 0o400 == 0).then_some(mode)
    }
    #[cfg(not(unix))]
    {
        let _ = metadata;
        None
    }
}

/// Gives the files of a freshly unpacked package the modes 0755 or 0644: the unpacker honours the umask of whoever happens to run it.
fn make_modes_uniform(folder: &Path) -> Result<()> {
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        let entries = std::fs::read_dir(folder).map_err(|error| Error::io("read the folder", folder, &error))?;
        for entry in entries {
            let path = entry.map_err(|error| Error::io("read the folder", folder, &error))?.path();
            let metadata = std::fs::symlink_metadata(&path).map_err(|error| Error::io("look at", &path, &error))?;
            let mode = metadata.permissions().mode() & 0o7777;
            if metadata.is_dir() {
                set_mode(&path, 0o755)?;
                make_modes_uniform(&path)?;
            } else if metadata.is_file() {
                let wanted = if mode & 0o111 != 0 { 0o755 } else { 0o644 };
                if mode != wanted {
                    set_mode(&path, wanted)?;
                }
            }
        }
        set_mode(folder, 0o755)?;
    }
    #[cfg(not(unix))]
    let _ = folder;
    Ok(())
}

/// Runs `work` on a thread for blocking work.
pub(crate) async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T> {
    tokio::task::spawn_blocking(work).await.map_err(|error| Error::failure("a worker thread stopped unexpectedly").because(error))
}

/// Adds up the bytes of all downloads for one bar.
pub(crate) struct Downloads {
    progress: Arc<dyn Progress>,
    download: TaskId,
    unpack: TaskId,
    state: Mutex<DownloadState>,
}

#[derive(Default)]
struct DownloadState {
    next: usize,
    bytes: HashMap<usize, u64>,
    base: u64,
    unpacked: u64,
}

impl Downloads {
    /// `label`: what comes, with its number.
    pub(crate) fn start(progress: Arc<dyn Progress>, label: &str, count: usize, total: u64) -> Self {
        let download = progress.start(Phase::Download, label, (total > 0).then_some(total));
        let unpack = progress.start(Phase::Unpack, "unpacking packages", Some(count as u64));
        Downloads { progress, download, unpack, state: Mutex::default() }
    }

    fn state(&self) -> MutexGuard<'_, DownloadState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn show(&self, state: &DownloadState) {
        self.progress.advance_to(self.download, state.base.saturating_add(state.bytes.values().sum::<u64>()));
    }

    /// A package turned out to need no download.
    pub(crate) fn skip(&self, bytes: u64) {
        let mut state = self.state();
        state.base = state.base.saturating_add(bytes);
        state.unpacked += 1;
        self.show(&state);
        self.progress.advance_to(self.unpack, state.unpacked);
    }

    pub(crate) fn unpacked(&self) {
        let mut state = self.state();
        state.unpacked += 1;
        self.progress.advance_to(self.unpack, state.unpacked);
    }

    pub(crate) fn finish(&self) {
        self.progress.finish(self.download);
        self.progress.finish(self.unpack);
    }
}

impl CacheReporter for Downloads {
    fn on_validate_start(&self) -> usize {
        0
    }
    fn on_validate_complete(&self, _: usize) {}
    fn on_download_start(&self) -> usize {
        let mut state = self.state();
        state.next += 1;
        let index = state.next;
        state.bytes.insert(index, 0);
        index
    }
    fn on_download_progress(&self, index: usize, bytes: u64, _: Option<u64>) {
        let mut state = self.state();
        state.bytes.insert(index, bytes);
        self.show(&state);
    }
    fn on_download_completed(&self, _: usize) {}
}

/// Whether the archive of this URL lies unpacked in the cache.
pub(crate) async fn is_cached(cache: &PackageCache, url: &Url) -> bool {
    let Some(conda) = CondaArchiveIdentifier::try_from_url(url) else { return false };
    let key = with_origin(CacheKey::from(conda), url, cache.cache_origin());
    for layer in cache.layers() {
        if layer.try_validate(&key).await.is_ok() {
            return true;
        }
    }
    false
}

/// An archive named by URL, as in an `@EXPLICIT` list or a package given by path.
#[derive(Debug, Clone)]
pub struct Archive {
    /// Where it is: http(s) or file.
    pub url: Url,
    /// Its MD5, if the list says it.
    pub md5: Option<Md5Hash>,
    /// Its SHA-256, if the list says it.
    pub sha256: Option<Sha256Hash>,
}

impl Fetcher<'_> {
    /// Fetches archives and makes full records from the metadata inside them.
    pub(crate) async fn records_of(&self, archives: &[Archive]) -> Result<Vec<RepoDataRecord>> {
        let cache_origin = self.cache.cache_origin();
        let wanted = archives
            .iter()
            .map(|archive| {
                let unknown = || {
                    Error::usage(format!("{} does not name a package", shown(&archive.url)))
                        .hint("the file name must be NAME-VERSION-BUILD.conda or NAME-VERSION-BUILD.tar.bz2")
                };
                let conda = CondaArchiveIdentifier::try_from_url(&archive.url).ok_or_else(unknown)?;
                let entry = format!("{}-{}-{}", conda.identifier.name, conda.identifier.version, conda.identifier.build_string);
                let label = format!("{} {} {}", conda.identifier.name, conda.identifier.version, conda.identifier.build_string);
                let mut key = CacheKey::from(conda).with_opt_sha256(archive.sha256);
                if archive.sha256.is_none() {
                    key = key.with_opt_md5(archive.md5);
                }
                Ok(Wanted {
                    label,
                    url: archive.url.clone(),
                    key: with_origin(key, &archive.url, cache_origin),
                    entry,
                    wheel: None,
                    md5_only: if archive.sha256.is_none() { archive.md5 } else { None },
                    size: None,
                })
            })
            .collect::<Result<Vec<_>>>()?;
        let contents = self.fetch_wanted(&wanted).await?;
        contents
            .into_iter()
            .zip(archives)
            .map(|(contents, archive)| {
                let unknown = || Error::usage(format!("{} does not name a package", shown(&archive.url)));
                let identifier = CondaArchiveIdentifier::try_from_url(&archive.url).ok_or_else(unknown)?;
                let sha256 = archive.sha256.or_else(|| recorded_sha256(&contents.folder));
                let size = archive.url.to_file_path().ok().and_then(|path| std::fs::metadata(path).ok()).map(|metadata| metadata.len());
                // The folder above the archive is the subdir if it is named like one; it decides over a wrong or missing field inside.
                let subdir = archive
                    .url
                    .path_segments()
                    .and_then(|segments| segments.rev().nth(1).map(str::to_owned))
                    .filter(|name| name.parse::<rattler_conda_types::Subdir>().is_ok());
                let mut index = contents.index.clone();
                if index.subdir.is_none() {
                    index.subdir = subdir.clone();
                }
                let record = PackageRecord::from_index_json(index, size, sha256, archive.md5).map_err(|error| {
                    Error::new(Kind::Verification, format!("{} does not say its platform", shown(&archive.url))).because(error)
                })?;
                let named = (&identifier.identifier.name, &identifier.identifier.version, &identifier.identifier.build_string);
                if named.0.to_lowercase() != record.name.as_normalized()
                    || *named.1 != record.version.to_string()
                    || named.2.as_str() != record.build.as_str()
                {
                    return Err(Error::new(
                        Kind::Verification,
                        format!("{} holds another package than its name says", shown(&archive.url)),
                    )
                    .because(format!("inside it is {}", label(&record))));
                }
                let channel = subdir.and_then(|_| {
                    let mut channel = archive.url.clone();
                    channel.path_segments_mut().ok()?.pop().pop();
                    Some(channel.to_string())
                });
                Ok(RepoDataRecord { package_record: record, identifier: identifier.into(), url: archive.url.clone(), channel })
            })
            .collect()
    }
}
