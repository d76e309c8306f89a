use std::path::{Path, PathBuf};

use serde::Serialize;

use super::cache::{LOCK_FOLDER, lock_all};
use super::cancel::Cancel;
use super::swap::remove_tree;
use crate::error::{Error, Result};
use crate::pypi::fetch::WHEELS;
use crate::report::Progress;

/// A kind of thing in the cache folder.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum CacheKind {
    /// Unpacked packages.
    Packages,
    /// Unpacked wheels.
    Wheels,
    /// The index of channels.
    Repodata,
    /// Packages made from Python installations of this machine.
    Host,
    /// What interrupted downloads and unpacking left.
    Temporary,
    /// Anything else: detection results and the like.
    Other,
}

/// One thing in the cache.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct CacheItem {
    /// What it is.
    pub kind: CacheKind,
    /// Where it is.
    pub path: PathBuf,
    /// Bytes on disk, hard links counted once per item.
    pub bytes: u64,
    /// Whether some environment shares its files by hard links. `None` where that cannot be told (copies and reflinks share nothing visible).
    pub in_use: Option<bool>,
}

/// Where the parts of the cache are: the layout of `rattler_cache` under one folder.
#[derive(Debug, Clone)]
pub struct CacheFolders {
    /// The cache folder.
    pub root: PathBuf,
    /// Unpacked packages: `pkgs` in `root`.
    pub packages: PathBuf,
    /// The index of channels: `repodata` in `root`.
    pub repodata: PathBuf,
    /// The `host` channel: `host` in `root`.
    pub host: PathBuf,
}

impl CacheFolders {
    /// The usual layout under `root`.
    pub fn under(root: &Path) -> Self {
        CacheFolders {
            root: root.to_owned(),
            packages: root.join(rattler_cache::PACKAGE_CACHE_DIR),
            repodata: root.join(rattler_cache::REPODATA_CACHE_DIR),
            host: root.join("host"),
        }
    }
}

fn size_and_links(path: &Path) -> (u64, bool) {
    let Ok(metadata) = std::fs::symlink_metadata(path) else { return (0, false) };
    if metadata.is_dir() {
        let mut total = (0, false);
        for entry in std::fs::read_dir(path).into_iter().flatten().flatten() {
            let (bytes, linked) = size_and_links(&entry.path());
            total = (total.0 + bytes, total.1 || linked);
        }
        return total;
    }
    #[cfg(unix)]
    {
        use std::os::unix::fs::MetadataExt;
        (metadata.blocks() * 512, metadata.is_file() && metadata.nlink() > 1)
    }
    #[cfg(not(unix))]
    {
        (metadata.len(), false)
    }
}

fn is_temporary(name: &str) -> bool {
    name.starts_with('.') && name != LOCK_FOLDER && name != ".lock"
}

fn entries_of(folder: &Path) -> Vec<(String, PathBuf)> {
    let mut entries: Vec<_> = std::fs::read_dir(folder)
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| (entry.file_name().to_string_lossy().into_owned(), entry.path()))
        .collect();
    entries.sort();
    entries
}

/// Lists what is in the cache, with sizes. An absent cache is empty.
pub fn list(folders: &CacheFolders) -> Vec<CacheItem> {
    let mut items = Vec::new();
    let mut add = |kind, path: PathBuf| {
        let (bytes, linked) = size_and_links(&path);
        let in_use = matches!(kind, CacheKind::Packages | CacheKind::Wheels).then_some(linked);
        items.push(CacheItem { kind, path, bytes, in_use });
    };
    for (name, path) in entries_of(&folders.packages) {
        if name == LOCK_FOLDER || !path.is_dir() {
            continue;
        }
        if is_temporary(&name) && name != WHEELS {
            add(CacheKind::Temporary, path);
        } else if name == WHEELS || name.starts_with("wheels-v") {
            for (name, path) in entries_of(&path) {
                // A download is a file.
                if name != LOCK_FOLDER && (path.is_dir() || is_temporary(&name)) {
                    add(if is_temporary(&name) { CacheKind::Temporary } else { CacheKind::Wheels }, path);
                }
            }
        } else {
            add(CacheKind::Packages, path);
        }
    }
    for (_, path) in entries_of(&folders.repodata) {
        add(CacheKind::Repodata, path);
    }
    if folders.host.exists() {
        add(CacheKind::Host, folders.host.clone());
    }
    let built = folders.root.join(crate::pypi::BUILT_FOLDER);
    for (name, path) in entries_of(&built) {
        add(if is_temporary(&name) { CacheKind::Temporary } else { CacheKind::Wheels }, path);
    }
    // Folders of runs that go on are not the cache's.
    for path in crate::pypi::throwaway::abandoned(&folders.root) {
        add(CacheKind::Temporary, path);
    }
    let throwaway = folders.root.join(crate::pypi::throwaway::FOLDER);
    for (_, path) in entries_of(&folders.root) {
        if ![&folders.packages, &folders.repodata, &folders.host, &built, &throwaway].contains(&&path) {
            add(CacheKind::Other, path);
        }
    }
    items
}

/// What to remove.
#[derive(Debug, Clone, Default)]
pub struct CleanOptions {
    /// Kinds to remove; temporary things always go with packages.
    pub kinds: Vec<CacheKind>,
    /// Packages that environments share by hard links too.
    pub also_in_use: bool,
    /// Only say what would go.
    pub dry_run: bool,
}

/// What was (or would be) removed.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Cleaned {
    /// The things.
    pub removed: Vec<CacheItem>,
    /// Bytes freed; hard-linked files free nothing while an environment has them.
    pub bytes: u64,
}

/// Removes parts of the cache, waiting until no process links from it.
///
/// # Errors
/// Something cannot be removed; cancelled.
pub async fn clean(folders: &CacheFolders, options: &CleanOptions, progress: &dyn Progress, cancel: &Cancel) -> Result<Cleaned> {
    let touches_packages = options.kinds.iter().any(|kind| matches!(kind, CacheKind::Packages | CacheKind::Wheels | CacheKind::Temporary));
    let _locks = if touches_packages && !options.dry_run && folders.packages.is_dir() {
        let mut locks = lock_all(&folders.packages, cancel).await?;
        let wheels = folders.packages.join(WHEELS);
        if wheels.is_dir() {
            locks.extend(lock_all(&wheels, cancel).await?);
        }
        locks
    } else {
        Vec::new()
    };
    let mut cleaned = Cleaned::default();
    for item in list(folders) {
        let wanted =
            options.kinds.contains(&item.kind) || (item.kind == CacheKind::Temporary && options.kinds.contains(&CacheKind::Packages));
        if !wanted || (item.in_use == Some(true) && !options.also_in_use) {
            continue;
        }
        cancel.check()?;
        if !options.dry_run {
            progress.note(&format!("removing `{}`", item.path.display()));
            remove(&item)?;
        }
        cleaned.bytes += item.bytes;
        cleaned.removed.push(item);
    }
    Ok(cleaned)
}

fn remove(item: &CacheItem) -> Result<()> {
    let fail = |error: std::io::Error| Error::io("remove", &item.path, &error);
    if matches!(item.kind, CacheKind::Packages | CacheKind::Wheels) {
        // The notes beside it first: an entry without them is fetched again, one with them is believed.
        for suffix in [".lock", ".md5"] {
            let mut name = item.path.as_os_str().to_owned();
            name.push(suffix);
            match std::fs::remove_file(PathBuf::from(name)) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(fail(error)),
                _ => {}
            }
        }
    }
    remove_tree(&item.path).map_err(fail)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::Silent;

    #[tokio::test]
    async fn packages_that_an_environment_shares_stay_unless_asked_for() {
        let root = tempfile::tempdir().unwrap();
        let folders = CacheFolders::under(root.path());
        for name in ["a-1-0", "b-1-0", ".b-1-0XyZ"] {
            std::fs::create_dir_all(folders.packages.join(name)).unwrap();
            std::fs::write(folders.packages.join(name).join("file"), vec![b'x'; 5000]).unwrap();
        }
        std::fs::write(folders.packages.join("b-1-0.lock"), "x").unwrap();
        for name in ["w-1-abc", ".unpack-XyZ", LOCK_FOLDER] {
            std::fs::create_dir_all(folders.packages.join(WHEELS).join(name)).unwrap();
        }
        std::fs::write(folders.packages.join(WHEELS).join(".download-Q"), "x").unwrap();
        std::fs::create_dir_all(&folders.repodata).unwrap();
        std::fs::write(folders.repodata.join("x.json"), "{}").unwrap();
        std::fs::hard_link(folders.packages.join("a-1-0/file"), root.path().join("environment-file")).unwrap();
        let options = CleanOptions { kinds: vec![CacheKind::Packages], ..CleanOptions::default() };
        let dry = clean(&folders, &CleanOptions { dry_run: true, ..options.clone() }, &Silent, &Cancel::new()).await.unwrap();
        let mut kinds: Vec<CacheKind> = dry.removed.iter().map(|item| item.kind).collect();
        kinds.sort();
        assert_eq!(kinds, [CacheKind::Packages, CacheKind::Temporary, CacheKind::Temporary, CacheKind::Temporary]);
        assert!(dry.bytes >= 10_000);
        assert!(folders.packages.join("b-1-0").exists());
        clean(&folders, &options, &Silent, &Cancel::new()).await.unwrap();
        assert!(folders.packages.join("a-1-0").exists());
        for gone in ["b-1-0", "b-1-0.lock", ".b-1-0XyZ"] {
            assert!(!folders.packages.join(gone).exists(), "{gone}");
        }
        assert!(folders.repodata.join("x.json").exists());
        assert!(folders.packages.join(WHEELS).join("w-1-abc").exists() && !folders.packages.join(WHEELS).join(".download-Q").exists());
        let wheels = CleanOptions { kinds: vec![CacheKind::Wheels], also_in_use: true, dry_run: false };
        clean(&folders, &wheels, &Silent, &Cancel::new()).await.unwrap();
        assert!(!folders.packages.join(WHEELS).join("w-1-abc").exists() && folders.packages.join(WHEELS).join(LOCK_FOLDER).exists());
        let everything = CleanOptions { kinds: vec![CacheKind::Packages, CacheKind::Repodata], also_in_use: true, dry_run: false };
        clean(&folders, &everything, &Silent, &Cancel::new()).await.unwrap();
        assert!(!folders.packages.join("a-1-0").exists() && !folders.repodata.join("x.json").exists());
        assert!(root.path().join("environment-file").exists());
    }
}
