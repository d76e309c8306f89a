//! Files of no package where packages have theirs.

use std::collections::{BTreeMap, HashSet};
use std::path::{Path, PathBuf};

use super::{Expected, Fault, Finding};
use crate::prefix::{self, Distribution};

/// Folders in which a file of no package is a fault. Elsewhere (`etc`, `share`, `var`, …) programs and people put files of their own.
const WATCHED: [&str; 6] = ["bin", "sbin", "lib", "include", "libexec", "Scripts"];

/// What is in the watched folders of packages, and anywhere in site-packages, without belonging to a package. Run-time `__pycache__` is none of it.
pub(super) fn find(
    root: &Path,
    owned: &HashSet<PathBuf>,
    expected: &BTreeMap<&Path, Vec<Expected<'_>>>,
    distributions: &[Distribution],
) -> Vec<Finding> {
    let mut folders: HashSet<PathBuf> = HashSet::new();
    for path in owned {
        let Some(parent) = path.parent() else { continue };
        if parent.components().next().is_some_and(|first| WATCHED.iter().any(|watched| first.as_os_str() == *watched)) {
            folders.insert(parent.to_owned());
        }
    }
    // A virtual environment and pip own files in `bin` that are in no list.
    let venv = expected.is_empty();
    let mut found = Vec::new();
    let mut extra = |path: PathBuf| {
        found.push(Finding { fault: Fault::Extra, path: path.to_string_lossy().into_owned(), package: None, detail: None });
    };
    let sites = prefix::site_packages(root);
    for folder in &folders {
        if sites.iter().any(|site| folder.starts_with(site)) || folder.file_name().is_some_and(|name| name == "__pycache__") {
            continue;
        }
        if venv && !folder.starts_with("lib") {
            continue;
        }
        for entry in std::fs::read_dir(root.join(folder)).into_iter().flatten().flatten() {
            let path = folder.join(entry.file_name());
            let Ok(kind) = entry.file_type() else { continue };
            if kind.is_dir() || owned.contains(&path) {
                continue;
            }
            extra(path);
        }
    }
    let linked: HashSet<PathBuf> = distributions.iter().map(|distribution| distribution.path.clone()).collect();
    for site in &sites {
        walk(root, site, site, owned, &linked, &mut extra);
    }
    found
}

fn walk(root: &Path, site: &Path, folder: &Path, owned: &HashSet<PathBuf>, linked: &HashSet<PathBuf>, extra: &mut impl FnMut(PathBuf)) {
    for entry in std::fs::read_dir(root.join(folder)).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let path = folder.join(&name);
        let Ok(kind) = entry.file_type() else { continue };
        if kind.is_dir() {
            // Byte code is made at run time; a stale one is found by its own check.
            if name != "__pycache__" {
                walk(root, site, &path, owned, linked, extra);
            }
            continue;
        }
        if owned.contains(&path) || linked.contains(&path) || (kind.is_symlink() && owned.iter().any(|owned| owned.starts_with(&path))) {
            continue;
        }
        // pip's list of linked projects of old setuptools.
        if folder == site && name == "easy-install.pth" {
            continue;
        }
        extra(path);
    }
}
