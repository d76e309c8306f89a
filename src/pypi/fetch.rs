//! Every wheel of a plan into the cache, checked, before anything of an environment is touched.
//!
//! Wheels lie unpacked in `.tare-wheels` of each package cache, one folder a wheel, named by distribution, version and the start of the SHA-256 of the
//! wheel: builds for different platforms, or two builds of one version, never meet. A download is written to a file in the same folder while it is
//! hashed, and unpacked from there, so that no wheel is ever in memory as a whole.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use futures::{StreamExt, TryStreamExt, stream};
use rattler_cache::package_cache::{CacheReporter, PackageCache};
use rattler_networking::LazyClient;
use rayon::iter::{IndexedParallelIterator, IntoParallelRefIterator, ParallelIterator};
use sha2::{Digest, Sha256};
use url::Url;

use super::wheel::{self, Trouble, Unpacked};
use super::{CoreMetadata, PypiRecord, PypiSource, ReadyWheel, WheelFile};
use crate::error::{Error, Kind, Result};
use crate::install::cache::{ShardLock, lock_entry, share_entries};
use crate::install::fetch::{Downloads, blocking, evict, shown};
use crate::install::{CacheCheck, Cancel, cancel, hex_text, set_mode, space};
use crate::report::{Phase, Progress};

/// The folder of unpacked wheels in a package cache.
pub(crate) const WHEELS: &str = ".tare-wheels";

/// What is known of an entry, in its folder; written last.
const ABOUT: &str = "wheel.json";

/// How often a download that breaks off is taken up again.
const RESUMES: u32 = 4;

/// A wheel in the cache, checked.
#[derive(Debug, Clone)]
pub(crate) struct CachedWheel {
    pub ready: ReadyWheel,
    /// The folder of unpacked wheels it is in.
    pub root: PathBuf,
    /// The unpacked wheel.
    pub folder: PathBuf,
    pub about: Arc<Unpacked>,
}

/// What to fetch with.
pub(crate) struct WheelFetcher<'a> {
    pub cache: &'a PackageCache,
    pub client: LazyClient,
    pub check: CacheCheck,
    /// Simultaneous downloads.
    pub concurrency: usize,
    pub progress: Arc<dyn Progress>,
    pub cancel: Cancel,
}

/// The SHA-256 of the wheel file in hex, if it is known.
fn expected_hash(ready: &ReadyWheel) -> Option<String> {
    let hash = match (&ready.wheel, &ready.record.source) {
        (WheelFile::Local { sha256, .. }, _) => Some(sha256),
        (WheelFile::Remote, PypiSource::Archive { sha256, .. }) => sha256.as_ref(),
        (WheelFile::Remote, _) => None,
    };
    hash.map(|hash| hash.to_ascii_lowercase())
}

fn label(ready: &ReadyWheel) -> String {
    format!("{} {}", ready.record.name, ready.record.version)
}

/// Name of the folder in the cache.
fn entry_name(record: &PypiRecord, sha256: &str) -> String {
    // A version may hold `+`, `!` and nothing else that is odd in a file name.
    format!("{}-{}-{}", record.name, record.version, &sha256[..32])
}

/// The metadata of a wheel that is in the cache as it was unpacked.
pub(crate) fn cached_metadata(cache: &PackageCache, record: &PypiRecord) -> Option<CoreMetadata> {
    let PypiSource::Archive { sha256: Some(sha256), .. } = &record.source else { return None };
    let sha256 = sha256.to_ascii_lowercase();
    wheel::from_hex(&sha256)?;
    cache.layers().iter().find_map(|layer| {
        let folder = layer.path().join(WHEELS).join(entry_name(record, &sha256));
        let about: Unpacked = serde_json::from_slice(&std::fs::read(folder.join(ABOUT)).ok()?).ok()?;
        let own = format!("{}/METADATA", about.dist_info);
        let entry = about.files.iter().find(|entry| entry.scheme == wheel::Scheme::Site && entry.path == own)?;
        let text = std::fs::read(folder.join(entry.cached())).ok()?;
        let good = about.format == wheel::FORMAT && about.sha256 == sha256 && Sha256::digest(&text)[..] == entry.sha256[..];
        good.then(|| CoreMetadata::parse(&String::from_utf8_lossy(&text)))
    })
}

/// The last segment of a URL, decoded.
fn file_name_of(url: &Url) -> String {
    let last = url.path_segments().and_then(|mut segments| segments.next_back()).unwrap_or_default();
    crate::channel::percent_decode(last)
}

impl WheelFetcher<'_> {
    /// The folders of wheels, first the writable one.
    fn roots(&self) -> impl Iterator<Item = PathBuf> {
        self.cache.layers().iter().map(|layer| layer.path().join(WHEELS))
    }

    /// Locks that keep entries in place until they are dropped; `None` if one was taken away since it was looked at. To be taken after everything
    /// else was fetched: whoever holds them waits for nothing.
    pub(crate) async fn hold(&self, cached: &[CachedWheel]) -> Result<Option<Vec<ShardLock>>> {
        let entries = cached.iter().map(|cached| (cached.root.clone(), entry_name(&cached.ready.record, &cached.about.sha256)));
        let locks = share_entries(entries, &self.cancel).await?;
        Ok(cached.iter().all(|cached| cached.folder.join(ABOUT).exists()).then_some(locks))
    }

    /// Whether a wheel is in the cache and good; nothing is fetched.
    pub(crate) async fn present(&self, ready: &ReadyWheel) -> Result<bool> {
        Ok(self.look_up(ready).await?.is_some())
    }

    /// Brings every wheel into the cache and checks it. Keeps no locks: see [`WheelFetcher::hold`].
    ///
    /// # Errors
    /// A wheel cannot be downloaded (kind network), is not what it should be (kind verification), or cannot be written; cancelled.
    pub(crate) async fn ensure(&self, wheels: &[ReadyWheel]) -> Result<Vec<CachedWheel>> {
        if wheels.is_empty() {
            return Ok(Vec::new());
        }
        let task = self.progress.start(Phase::Unpack, "checking the cache of wheels", Some(wheels.len() as u64));
        let done = &std::sync::atomic::AtomicU64::new(0);
        let found: Vec<Option<CachedWheel>> = stream::iter(0..wheels.len())
            .map(|number| async move {
                let found = self.look_up(&wheels[number]).await;
                self.progress.advance_to(task, done.fetch_add(1, std::sync::atomic::Ordering::Relaxed) + 1);
                found
            })
            .buffered(16)
            .try_collect()
            .await
            .inspect_err(|_| self.progress.finish(task))?;
        self.progress.finish(task);
        let missing: Vec<&ReadyWheel> = wheels.iter().zip(&found).filter(|(_, found)| found.is_none()).map(|(ready, _)| ready).collect();
        if missing.is_empty() {
            return Ok(found.into_iter().flatten().collect());
        }
        let sizes = missing.iter().filter_map(|ready| match &ready.record.source {
            PypiSource::Archive { size, .. } if ready.wheel == WheelFile::Remote => *size,
            _ => None,
        });
        let total = space::total(sizes);
        let root = self.writable()?;
        space::require(&root, total, "the wheels to download", "choose another place for the cache: TARE_CACHE_DIR=PATH")?;
        let label = format!("{} {}", missing.len(), if missing.len() == 1 { "wheel" } else { "wheels" });
        let reporter = Arc::new(Downloads::start(self.progress.clone(), &label, missing.len(), total));
        let fetched = stream::iter(found.into_iter().enumerate())
            .map(|(number, found)| {
                let reporter = reporter.clone();
                async move {
                    match found {
                        Some(found) => Ok(found),
                        None => self.obtain(&wheels[number], &reporter).await,
                    }
                }
            })
            .buffered(self.concurrency.max(1))
            .try_collect();
        let result = tokio::select! {
            result = fetched => result,
            () = self.cancel.cancelled() => Err(cancel::interrupted()),
        };
        reporter.finish();
        result
    }

    fn writable(&self) -> Result<PathBuf> {
        self.cache.layers().iter().find(|layer| !layer.is_readonly()).map(|layer| layer.path().join(WHEELS)).ok_or_else(|| {
            Error::failure("none of the package caches can be written").hint("set TARE_CACHE_DIR to a folder that you can write")
        })
    }

    /// Looks for a good copy; `None` if there is none (absent, damaged, or the hash is not known).
    async fn look_up(&self, ready: &ReadyWheel) -> Result<Option<CachedWheel>> {
        self.cancel.check()?;
        let Some(sha256) = expected_hash(ready) else { return Ok(None) };
        check_hash_text(ready, &sha256)?;
        for root in self.roots() {
            let name = entry_name(&ready.record, &sha256);
            let folder = root.join(&name);
            if !folder.is_dir() {
                continue;
            }
            let _lock = share_entries([(root.clone(), name)], &self.cancel).await?;
            if let Some(found) = self.read(ready, root, folder, &sha256, self.check).await? {
                return Ok(Some(found));
            }
        }
        Ok(None)
    }

    /// Reads and checks an entry; `None` if it is not there or not good.
    async fn read(
        &self,
        ready: &ReadyWheel,
        root: PathBuf,
        folder: PathBuf,
        sha256: &str,
        check: CacheCheck,
    ) -> Result<Option<CachedWheel>> {
        let (at, sha256) = (folder.clone(), sha256.to_owned());
        match blocking(move || read_and_check(&at, &sha256, check)).await? {
            Ok(Some(about)) => Ok(Some(CachedWheel { ready: ready.clone(), root, folder, about: Arc::new(about) })),
            Ok(None) => Ok(None),
            Err(damage) => {
                tracing::warn!("the cached copy of {} is damaged: {damage}", label(ready));
                Ok(None)
            }
        }
    }

    /// Downloads (or reads) and unpacks into the first writable cache.
    async fn obtain(&self, ready: &ReadyWheel, reporter: &Arc<Downloads>) -> Result<CachedWheel> {
        let root = self.writable()?;
        fs_err::create_dir_all(&root).map_err(|error| Error::io("create the folder", &root, &error))?;
        let known = expected_hash(ready);
        let _lock = match &known {
            Some(sha256) => {
                let name = entry_name(&ready.record, sha256);
                let lock = lock_entry(&root, &name, &self.cancel).await?;
                // Another process may have fetched it while we waited.
                let folder = root.join(&name);
                if folder.is_dir() {
                    if let Some(found) = self.read(ready, root.clone(), folder.clone(), sha256, self.check).await? {
                        reporter.skip(found.about.size);
                        return Ok(found);
                    }
                    self.progress.note(&format!("the cached copy of {} is damaged and is made again", label(ready)));
                    evict(&folder)?;
                }
                Some(lock)
            }
            None => None,
        };
        let got = self.get(ready, &root, known.as_deref(), reporter).await?;
        let lock = match _lock {
            Some(lock) => lock,
            None => lock_entry(&root, &entry_name(&ready.record, &got.sha256), &self.cancel).await?,
        };
        let found = self.unpack(ready, &root, got).await?;
        drop(lock);
        reporter.unpacked();
        Ok(found)
    }

    /// The wheel as an open file, its hash compared with what is expected.
    async fn get(&self, ready: &ReadyWheel, root: &Path, known: Option<&str>, reporter: &Arc<Downloads>) -> Result<Got> {
        let (url, size) = match (&ready.wheel, &ready.record.source) {
            (WheelFile::Local { path, .. }, _) => return self.open(ready, path, known, None).await,
            (WheelFile::Remote, PypiSource::Archive { url, size, .. }) => (url, *size),
            (WheelFile::Remote, _) => {
                return Err(Error::failure(format!("`{}` is not a wheel of an index, and no wheel of it was built", label(ready))));
            }
        };
        if url.scheme() == "file" {
            let path = url.to_file_path().map_err(|()| Error::usage(format!("`{}` is no path on this machine", shown(url))))?;
            return self.open(ready, &path, known, size).await;
        }
        let mut tries = 0;
        loop {
            tries += 1;
            let got = self.download(ready, url, size, root, reporter).await?;
            let wrong = match (known, size) {
                (_, Some(size)) if size != got.size => Some((format!("has {} bytes", got.size), format!("{size} bytes"))),
                (Some(known), _) if known != got.sha256 => Some((format!("has the SHA-256 {}", got.sha256), known.to_owned())),
                _ => None,
            };
            match wrong {
                None => return Ok(got),
                // A proxy may have served a stale or cut copy: once more, then it is the index's fault.
                Some(_) if tries < 2 => tracing::warn!("{}: not what was asked for, fetching it once more", label(ready)),
                Some((found, expected)) => return Err(mismatch(ready, &shown(url), &found, &expected)),
            }
        }
    }

    /// A wheel that is a file already.
    async fn open(&self, ready: &ReadyWheel, path: &Path, known: Option<&str>, size: Option<u64>) -> Result<Got> {
        let at = path.to_owned();
        let cancel = self.cancel.clone();
        let got = blocking(move || -> Result<Got> {
            let file = File::open(&at).map_err(|error| Error::io("read the wheel", &at, &error))?;
            let (sha256, size) = hash_of(&file, &cancel)?.map_err(|error| Error::io("read the wheel", &at, &error))?;
            let file_name = at.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
            Ok(Got { file, file_name, sha256, size, from: at.display().to_string(), temporary: None })
        })
        .await??;
        if let Some(known) = known.filter(|known| *known != got.sha256) {
            return Err(mismatch(ready, &got.from, &format!("has the SHA-256 {}", got.sha256), known));
        }
        if let Some(size) = size.filter(|size| *size != got.size) {
            return Err(mismatch(ready, &got.from, &format!("has {} bytes", got.size), &format!("{size} bytes")));
        }
        Ok(got)
    }

    /// Streams a wheel into a file beside the entries. A body that breaks off is taken up where it broke, if the server can do that.
    async fn download(&self, ready: &ReadyWheel, url: &Url, size: Option<u64>, root: &Path, reporter: &Arc<Downloads>) -> Result<Got> {
        let place = shown(url);
        let failed = |why: String| {
            Error::network(format!("cannot fetch the wheel of {}", label(ready))).because(format!("from {place}")).because(why)
        };
        let temporary =
            tempfile::Builder::new().prefix(".download-").tempfile_in(root).map_err(|error| Error::io("create a file in", root, &error))?;
        let index = reporter.on_download_start();
        let path = temporary.path().to_owned();
        let disk = move |error: std::io::Error| Error::io("write", &path, &error);
        let mut sink = Sink { file: temporary.reopen().map_err(&disk)?, hasher: Sha256::new(), written: 0 };
        let mut tries = 0;
        let mut tag: Option<http::HeaderValue> = None;
        loop {
            let mut request = self.client.client().get(url.clone());
            if sink.written > 0
                && let Some(tag) = &tag
            {
                request =
                    request.header(http::header::RANGE, format!("bytes={}-", sink.written)).header(http::header::IF_RANGE, tag.clone());
            } else if sink.written > 0 {
                sink = sink.restarted().map_err(&disk)?;
            }
            let response = request.send().await.map_err(|error| failed(crate::channel::chain(&error)))?;
            let status = response.status();
            if !status.is_success() {
                let error = failed(format!("the server answers {status}"));
                return Err(match status.as_u16() {
                    401 | 403 => error.hint(crate::channel::login_hint(url)),
                    404 | 410 => error.hint("the index no longer has the file: resolve again"),
                    _ => error,
                });
            }
            if status.as_u16() != 206 && sink.written > 0 {
                sink = sink.restarted().map_err(&disk)?;
            }
            // A strong entity tag names the very bytes, so that two halves fit together.
            tag = response.headers().get(http::header::ETAG).filter(|tag| tag.as_bytes().starts_with(b"\"")).cloned();
            let mut arrived = sink.written;
            let announced = response.content_length().map(|rest| rest + arrived);
            let (sender, mut receiver) = tokio::sync::mpsc::channel::<bytes::Bytes>(16);
            let writer = tokio::task::spawn_blocking(move || {
                let mut result = Ok(());
                while let Some(chunk) = receiver.blocking_recv() {
                    result = sink.write(&chunk);
                    if result.is_err() {
                        break;
                    }
                }
                (sink, result)
            });
            let mut body = response.bytes_stream();
            let (mut broken, mut too_long) = (None, false);
            let limit = size.or(announced);
            while let Some(chunk) = body.next().await {
                match chunk {
                    Ok(chunk) => {
                        arrived += chunk.len() as u64;
                        reporter.on_download_progress(index, arrived, None);
                        too_long = limit.is_some_and(|limit| arrived > limit);
                        if too_long || sender.send(chunk).await.is_err() {
                            break;
                        }
                    }
                    Err(error) => {
                        broken = Some(crate::channel::chain(&error));
                        break;
                    }
                }
            }
            drop(sender);
            drop(body);
            let (back, result) = writer.await.map_err(|error| Error::failure("a worker thread stopped unexpectedly").because(error))?;
            sink = back;
            result.map_err(&disk)?;
            if too_long {
                // Not what was asked for, whatever the rest of it is.
                sink.written = announced.unwrap_or(arrived);
                break;
            }
            if broken.is_none() && announced.is_some_and(|announced| sink.written < announced) {
                broken = Some("the connection was closed in the middle".to_owned());
            }
            match broken {
                None => break,
                Some(why) if tries < RESUMES => {
                    tries += 1;
                    tracing::info!("{}: {why}, taken up at {} bytes", label(ready), sink.written);
                    tokio::time::sleep(std::time::Duration::from_millis(100 << tries)).await;
                }
                Some(why) => return Err(failed(why)),
            }
        }
        reporter.on_download_completed(index);
        let Sink { file, hasher, written } = sink;
        Ok(Got {
            file,
            file_name: file_name_of(url),
            sha256: hex_text(&hasher.finalize()),
            size: written,
            from: place,
            temporary: Some(temporary),
        })
    }

    /// Unpacks into a folder beside the entries and gives it its name. The caller holds the lock of the entry.
    async fn unpack(&self, ready: &ReadyWheel, root: &Path, got: Got) -> Result<CachedWheel> {
        let entry = entry_name(&ready.record, &got.sha256);
        let (record, cancel, at, from) = (ready.record.clone(), self.cancel.clone(), root.to_owned(), got.from.clone());
        let name = got.file_name.clone();
        let made = blocking(move || -> std::result::Result<Unpacked, Trouble> {
            let stage = tempfile::Builder::new()
                .prefix(".unpack-")
                .tempdir_in(&at)
                .map_err(|error| Error::io("create a folder in", &at, &error))?;
            let about = wheel::unpack(got.file, &got.file_name, &got.sha256, &record.name, &record.version, stage.path(), &cancel)?;
            let text =
                serde_json::to_vec(&about).map_err(|error| Error::failure("cannot write what is known of a wheel").because(error))?;
            let path = stage.path().join(ABOUT);
            fs_err::write(&path, text).map_err(|error| Error::io("write", &path, &error))?;
            set_mode(stage.path(), 0o755)?;
            let folder = at.join(entry);
            if folder.exists() {
                evict(&folder)?;
            }
            let made = stage.keep();
            std::fs::rename(&made, &folder).map_err(|error| {
                let _ = std::fs::remove_dir_all(&made);
                Error::io("rename", &made, &error)
            })?;
            Ok(about)
        })
        .await?;
        match made {
            Ok(about) => {
                let folder = root.join(entry_name(&ready.record, &about.sha256));
                Ok(CachedWheel { ready: ready.clone(), root: root.to_owned(), folder, about: Arc::new(about) })
            }
            Err(Trouble::Here(error)) => Err(error),
            Err(Trouble::Refused(why)) => Err(Error::new(Kind::Verification, format!("the wheel `{name}` cannot be installed"))
                .because(why)
                .because(format!("it came from {from}"))),
        }
    }
}

/// A wheel file that is at hand.
struct Got {
    file: File,
    file_name: String,
    sha256: String,
    size: u64,
    /// For messages.
    from: String,
    /// Removes the download when it is dropped.
    #[allow(dead_code)]
    temporary: Option<tempfile::NamedTempFile>,
}

/// Where a download goes.
struct Sink {
    file: File,
    hasher: Sha256,
    written: u64,
}

impl Sink {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        self.hasher.update(bytes);
        self.file.write_all(bytes)?;
        self.written += bytes.len() as u64;
        Ok(())
    }

    fn restarted(mut self) -> std::io::Result<Self> {
        self.file.set_len(0)?;
        self.file.seek(SeekFrom::Start(0))?;
        Ok(Sink { file: self.file, hasher: Sha256::new(), written: 0 })
    }
}

fn check_hash_text(ready: &ReadyWheel, sha256: &str) -> Result<()> {
    if wheel::from_hex(sha256).is_some() {
        return Ok(());
    }
    Err(Error::new(Kind::Verification, format!("the SHA-256 of {} is none: `{sha256}`", label(ready))))
}

fn mismatch(ready: &ReadyWheel, from: &str, found: &str, expected: &str) -> Error {
    Error::new(Kind::Verification, format!("the wheel of {} is not what was asked for", label(ready)))
        .because(format!("{from} {found}"))
        .because(format!("expected {expected}"))
        .hint("if the index replaced the file, resolve again")
}

/// SHA-256 in hex and size of a file.
fn hash_of(mut file: &File, cancel: &Cancel) -> Result<std::io::Result<(String, u64)>> {
    let mut hasher = Sha256::new();
    let mut buffer = vec![0_u8; 1 << 20];
    let mut size = 0;
    loop {
        cancel.check()?;
        match file.read(&mut buffer) {
            Ok(0) => return Ok(Ok((hex_text(&hasher.finalize()), size))),
            Ok(read) => {
                hasher.update(&buffer[..read]);
                size += read as u64;
            }
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => return Ok(Err(error)),
        }
    }
}

/// Reads what is known of an entry and looks at its files. `None`: not there, or of another layout. The error says what is wrong.
fn read_and_check(folder: &Path, sha256: &str, check: CacheCheck) -> std::result::Result<Option<Unpacked>, String> {
    let path = folder.join(ABOUT);
    let Ok(bytes) = std::fs::read(&path) else { return Ok(None) };
    let about: Unpacked = serde_json::from_slice(&bytes).map_err(|error| format!("`{ABOUT}`: {error}"))?;
    if about.format != wheel::FORMAT || about.sha256 != sha256 {
        return Ok(None);
    }
    let unpacked = std::fs::metadata(&path).and_then(|metadata| metadata.modified()).ok();
    let damage = about.files.par_iter().with_min_len(256).find_map_first(|entry| {
        let shown = &entry.path;
        let path = folder.join(entry.cached());
        let Ok(metadata) = std::fs::symlink_metadata(&path) else { return Some(format!("`{shown}` is missing")) };
        if !metadata.is_file() {
            return Some(format!("`{shown}` is no file"));
        }
        if metadata.len() != entry.size {
            return Some(format!("`{shown}` has {} bytes instead of {}", metadata.len(), entry.size));
        }
        #[cfg(unix)]
        if check == CacheCheck::Full {
            use std::os::unix::fs::PermissionsExt;
            let (mode, wanted) = (metadata.permissions().mode() & 0o7777, if entry.executable { 0o755 } else { 0o644 });
            if mode != wanted {
                return Some(format!("`{shown}` has the mode {mode:04o} instead of {wanted:04o}"));
            }
        }
        let changed = match (metadata.modified(), unpacked) {
            (Ok(modified), Some(unpacked)) => modified > unpacked,
            _ => false,
        };
        if changed || check == CacheCheck::Full {
            match rattler_digest::compute_file_digest::<rattler_digest::Sha256>(&path) {
                Ok(found) if found[..] == entry.sha256[..] => {}
                Ok(_) => return Some(format!("the contents of `{shown}` were changed")),
                Err(error) => return Some(format!("`{shown}` cannot be read: {error}")),
            }
        }
        None
    });
    match damage {
        Some(damage) => Err(damage),
        None => Ok(Some(about)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_in_urls_are_decoded() {
        let url = Url::parse("https://pypi.example/a/torch-2.7.1%2Bcu126-cp311-cp311-linux_x86_64.whl#sha256=x").unwrap();
        assert_eq!(file_name_of(&url), "torch-2.7.1+cu126-cp311-cp311-linux_x86_64.whl");
    }
}
