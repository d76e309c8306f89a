//! Distributions of pip against their `RECORD` (the binary distribution format of PyPA) and `Requires-Dist`.

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::atomic::Ordering;

use pep508_rs::{MarkerTree, Requirement, VersionOrUrl};
use rayon::iter::{IntoParallelRefIterator, ParallelIterator};
use url::Url;

use super::{Counts, Fault, Finding, finding, hash_file};
use crate::prefix::{self, Distribution};
use crate::pypi::install::INSTALLER;
use crate::pypi::record_file::{Line, inside, parse};

/// Checks the files of a distribution and adds them to `owned`.
pub(super) fn check(
    root: &Path,
    distribution: &Distribution,
    owned: &mut HashSet<PathBuf>,
    counts: &Counts,
    contents: bool,
) -> Vec<Finding> {
    let name = distribution.name.as_str();
    let Some(site) = distribution.path.parent() else { return Vec::new() };
    owned.insert(distribution.path.clone());
    let info = root.join(&distribution.path);
    let record = distribution.path.join("RECORD");
    let text = match crate::files::read(&root.join(&record), crate::files::MOST) {
        Ok(bytes) => String::from_utf8_lossy(&bytes).into_owned(),
        Err(_) => {
            own_without_record(root, distribution, site, owned);
            // egg-info has no RECORD; a dist-info without one was not installed by the rules.
            return if distribution.path.extension().is_some_and(|extension| extension == "dist-info") && info.is_dir() {
                vec![finding(Fault::Missing, &record, name)]
            } else {
                Vec::new()
            };
        }
    };
    let lines = match parse(&text) {
        Ok(lines) => lines,
        Err(number) => {
            own_without_record(root, distribution, site, owned);
            return vec![Finding {
                detail: Some(format!("line {number} is not `path,hash,size`")),
                ..finding(Fault::DamagedRecord, &record, name)
            }];
        }
    };
    let mut files: Vec<(PathBuf, &Line)> = Vec::new();
    for line in &lines {
        // Absolute paths and such outside (data files of some installers) are not this environment's.
        let relative = match Path::new(&line.path).strip_prefix(root) {
            Ok(relative) => Some(relative.to_owned()),
            Err(_) => inside(site, &line.path),
        };
        if let Some(relative) = relative {
            owned.insert(relative.clone());
            files.push((relative, line));
        }
    }
    let mut found: Vec<Finding> = files
        .par_iter()
        .filter_map(|(relative, line)| {
            let full = root.join(relative);
            let metadata = match std::fs::symlink_metadata(&full) {
                Ok(metadata) => metadata,
                // Byte code comes and goes.
                Err(_) if relative.extension().is_some_and(|extension| extension == "pyc") => return None,
                Err(_) => return Some(finding(Fault::Missing, relative, name)),
            };
            if metadata.is_symlink() && !full.exists() {
                return Some(finding(Fault::DanglingLink, relative, name));
            }
            let Some(hash) = line.sha256() else {
                if relative.file_name().is_none_or(|file| file != "RECORD") {
                    counts.not_comparable.fetch_add(1, Ordering::Relaxed);
                }
                return None;
            };
            if !contents {
                counts.files.fetch_add(1, Ordering::Relaxed);
                let len = std::fs::metadata(&full).map(|metadata| metadata.len()).unwrap_or(metadata.len());
                return line.size.filter(|size| *size != len).map(|size| Finding {
                    detail: Some(format!("{len} bytes instead of {size}")),
                    ..finding(Fault::Changed, relative, name)
                });
            }
            match hash_file(&full) {
                Ok((actual, len)) => {
                    counts.files.fetch_add(1, Ordering::Relaxed);
                    counts.bytes.fetch_add(len, Ordering::Relaxed);
                    let detail = match line.size {
                        Some(size) if size != len => format!("{len} bytes instead of {size}"),
                        _ => "its content differs".to_owned(),
                    };
                    (actual != hash || line.size.is_some_and(|size| size != len))
                        .then(|| Finding { detail: Some(detail), ..finding(Fault::Changed, relative, name) })
                }
                Err(error) => Some(Finding { detail: Some(error.to_string()), ..finding(Fault::Unreadable, relative, name) }),
            }
        })
        .collect();
    found.extend(files.iter().filter_map(|(relative, _)| mode(root, relative, name)));
    found
}

/// What tare installed from wheels against its own notes, which an edited `RECORD` does not change. A distribution of another version is another tool's and
/// is found as such.
pub(super) fn noted(root: &Path, distributions: &[Distribution], owned: &mut HashSet<PathBuf>) -> Vec<Finding> {
    let (records, damaged) = crate::pypi::installed::noted(root);
    let mut found: Vec<Finding> = damaged
        .into_iter()
        .map(|path| Finding {
            fault: Fault::DamagedRecord,
            path,
            package: None,
            detail: Some("it is no record of a Python package".to_owned()),
        })
        .collect();
    for record in records {
        let name = record.record.name.as_ref();
        let there = distributions.iter().find(|distribution| distribution.name == name);
        if there.is_some_and(|there| there.path != Path::new(&record.dist_info)) {
            continue;
        }
        let installer = crate::files::read_text(&root.join(&record.dist_info).join("INSTALLER")).unwrap_or_default();
        if !matches!(installer.trim(), "" | INSTALLER) {
            // The same version once more, by another tool.
            continue;
        }
        owned.extend(record.files.iter().map(|file| PathBuf::from(&file.path)));
        owned.insert(PathBuf::from(&record.dist_info));
        if there.is_none() {
            found.push(Finding {
                detail: Some("the Python package is gone".to_owned()),
                ..finding(Fault::Missing, Path::new(&record.dist_info), name)
            });
            continue;
        }
        let own = format!("{}/RECORD", record.dist_info);
        let intact = record
            .files
            .iter()
            .find(|file| file.path == own)
            .is_some_and(|file| hash_file(&root.join(&file.path)).is_ok_and(|(actual, _)| actual == file.sha256));
        if intact {
            // It lists the same files with the same hashes.
            continue;
        }
        found.extend(
            record
                .files
                .par_iter()
                .filter_map(|file| {
                    let path = Path::new(&file.path);
                    match hash_file(&root.join(path)) {
                        Ok((actual, _)) if actual == file.sha256 => None,
                        Ok(_) => {
                            let detail = if file.path == own {
                                "it is not the list that tare wrote"
                            } else {
                                "its content is not what tare installed"
                            };
                            Some(Finding { detail: Some(detail.to_owned()), ..finding(Fault::Changed, path, name) })
                        }
                        Err(_) if path.extension().is_some_and(|extension| extension == "pyc") => None,
                        Err(_) => Some(finding(Fault::Missing, path, name)),
                    }
                })
                .collect::<Vec<_>>(),
        );
    }
    found
}

/// Modes that no installer gives.
#[cfg(unix)]
fn mode(root: &Path, relative: &Path, package: &str) -> Option<Finding> {
    use std::os::unix::fs::PermissionsExt;
    let full = root.join(relative);
    let metadata = std::fs::symlink_metadata(&full).ok().filter(std::fs::Metadata::is_file)?;
    let mode = metadata.permissions().mode() & 0o7777;
    let program = relative.parent().is_some_and(|parent| parent == Path::new("bin")) && super::is_program(&full);
    (mode & 0o7002 != 0 || mode & 0o400 == 0 || (program && mode & 0o100 == 0))
        .then(|| Finding { detail: Some(format!("{mode:04o}")), ..finding(Fault::WrongMode, relative, package) })
}

#[cfg(not(unix))]
fn mode(_: &Path, _: &Path, _: &str) -> Option<Finding> {
    None
}

/// Without a `RECORD` the files are those of its folder, of `installed-files.txt` and of the modules it names.
fn own_without_record(root: &Path, distribution: &Distribution, site: &Path, owned: &mut HashSet<PathBuf>) {
    let info = root.join(&distribution.path);
    own_all(root, &distribution.path, owned);
    if let Ok(text) = crate::files::read_text(&info.join("installed-files.txt")) {
        owned.extend(text.lines().filter_map(|line| inside(&distribution.path, line)));
        return;
    }
    let text = crate::files::read_text(&info.join("top_level.txt")).unwrap_or_default();
    let modules: Vec<String> = text.lines().map(|line| line.trim().to_owned()).chain([distribution.name.replace('-', "_")]).collect();
    for module in modules.iter().filter(|module| !module.is_empty()) {
        own_all(root, &site.join(module), owned);
        owned.insert(site.join(format!("{module}.py")));
    }
}

fn own_all(root: &Path, relative: &Path, owned: &mut HashSet<PathBuf>) {
    for entry in std::fs::read_dir(root.join(relative)).into_iter().flatten().flatten() {
        let path = relative.join(entry.file_name());
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            own_all(root, &path, owned);
        } else {
            owned.insert(path);
        }
    }
}

/// `Requires-Dist` of what pip installed, without the lines that depend on a marker.
pub(super) fn unmet(root: &Path, distributions: &[Distribution]) -> Vec<Finding> {
    if distributions.is_empty() {
        return Vec::new();
    }
    let mut versions: HashMap<String, String> = HashMap::new();
    for site in prefix::site_packages(root) {
        for entry in std::fs::read_dir(root.join(&site)).into_iter().flatten().flatten() {
            let file = entry.file_name().to_string_lossy().into_owned();
            let metadata = match Path::new(&file).extension().and_then(|extension| extension.to_str()) {
                Some("dist-info") => entry.path().join("METADATA"),
                Some("egg-info") if entry.path().is_dir() => entry.path().join("PKG-INFO"),
                Some("egg-info") => entry.path(),
                _ => continue,
            };
            let text = String::from_utf8_lossy(&crate::files::read(&metadata, crate::files::MOST).unwrap_or_default()).into_owned();
            let field = |key: &str| text.lines().take_while(|line| !line.is_empty()).find_map(|line| line.strip_prefix(key)).map(str::trim);
            if let (Some(name), Some(version)) = (field("Name:"), field("Version:")) {
                versions.insert(prefix::normalize(name), version.to_owned());
            }
        }
    }
    for distribution in distributions {
        versions.entry(distribution.name.clone()).or_insert_with(|| distribution.version.clone());
    }
    let mut found = Vec::new();
    for distribution in distributions {
        for text in crate::export::python_package(root, distribution).requires {
            let Ok(requirement) = Requirement::<Url>::from_str(&text) else { continue };
            if requirement.marker != MarkerTree::TRUE {
                continue;
            }
            let wanted = prefix::normalize(requirement.name.as_ref());
            let detail = match (versions.get(&wanted), &requirement.version_or_url) {
                (None, _) => format!("needs `{text}`, which is not installed"),
                (Some(version), Some(VersionOrUrl::VersionSpecifier(specifiers))) => match pep508_rs::pep440_rs::Version::from_str(version)
                {
                    Ok(parsed) if !specifiers.contains(&parsed) => format!("needs `{text}`, and {version} is installed"),
                    _ => continue,
                },
                _ => continue,
            };
            found.push(Finding {
                fault: Fault::UnmetDependency,
                path: String::new(),
                package: Some(distribution.name.clone()),
                detail: Some(detail),
            });
        }
    }
    found
}
