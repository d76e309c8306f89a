//! Distributions of pip against their `RECORD` (the binary distribution format of PyPA) and `Requires-Dist`.

use std::collections::{HashMap, HashSet};
use std::path::{Component, Path, PathBuf};
use std::str::FromStr;
use std::sync::atomic::Ordering;

use pep508_rs::{MarkerTree, Requirement, VersionOrUrl};
use rayon::iter::{IntoParallelRefIterator, ParallelIterator};
use url::Url;

use super::{Counts, Fault, Finding, finding, hash_file};
use crate::prefix::{self, Distribution};

/// One line of a `RECORD`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Line {
    pub path: String,
    /// SHA-256; other algorithms are not compared.
    pub sha256: Option<[u8; 32]>,
    pub size: Option<u64>,
}

/// Fields of a line of comma-separated values; quotes as in RFC 4180. `None` if a quote is not closed.
fn fields(line: &str) -> Option<Vec<String>> {
    let mut fields = Vec::new();
    let mut field = String::new();
    let mut characters = line.chars().peekable();
    loop {
        if characters.peek() == Some(&'"') {
            characters.next();
            loop {
                match characters.next()? {
                    '"' if characters.peek() == Some(&'"') => {
                        characters.next();
                        field.push('"');
                    }
                    '"' => break,
                    c => field.push(c),
                }
            }
        }
        loop {
            match characters.next() {
                Some(',') => {
                    fields.push(std::mem::take(&mut field));
                    break;
                }
                Some(c) => field.push(c),
                None => {
                    fields.push(field);
                    return Some(fields);
                }
            }
        }
    }
}

/// Base64 with the alphabet for URLs, without padding.
fn base64(text: &str) -> Option<[u8; 32]> {
    let mut out = Vec::with_capacity(33);
    let (mut bits, mut count) = (0u32, 0);
    for byte in text.trim_end_matches('=').bytes() {
        let value = match byte {
            b'A'..=b'Z' => byte - b'A',
            b'a'..=b'z' => byte - b'a' + 26,
            b'0'..=b'9' => byte - b'0' + 52,
            b'-' | b'+' => 62,
            b'_' | b'/' => 63,
            _ => return None,
        };
        bits = bits << 6 | u32::from(value);
        count += 6;
        if count >= 8 {
            count -= 8;
            out.push((bits >> count) as u8);
            bits &= (1 << count) - 1;
        }
    }
    out.try_into().ok()
}

/// The lines of a `RECORD`; an error names the line (from 1) that makes no sense.
pub(super) fn parse(text: &str) -> Result<Vec<Line>, usize> {
    let mut lines = Vec::new();
    for (number, line) in text.lines().enumerate().filter(|(_, line)| !line.is_empty()) {
        let bad = number + 1;
        let fields = fields(line).filter(|fields| fields.len() == 3 && !fields[0].is_empty()).ok_or(bad)?;
        let sha256 = match fields[1].split_once('=') {
            Some(("sha256", value)) => Some(base64(value).ok_or(bad)?),
            Some(_) => None,
            None if fields[1].is_empty() => None,
            None => return Err(bad),
        };
        let size = if fields[2].is_empty() { None } else { Some(fields[2].trim().parse().map_err(|_| bad)?) };
        lines.push(Line { path: fields[0].clone(), sha256, size });
    }
    Ok(lines)
}

/// `folder/path` without `..`; `None` if it leaves the prefix.
fn inside(folder: &Path, path: &str) -> Option<PathBuf> {
    let mut parts: Vec<Component<'_>> = folder.components().collect();
    for component in Path::new(path).components() {
        match component {
            Component::ParentDir => {
                parts.pop()?;
            }
            Component::CurDir => {}
            Component::Normal(_) => parts.push(component),
            Component::RootDir | Component::Prefix(_) => return None,
        }
    }
    Some(parts.into_iter().collect())
}

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
    let text = match std::fs::read(root.join(&record)) {
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
            let Some(hash) = line.sha256 else {
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
    if let Ok(text) = std::fs::read_to_string(info.join("installed-files.txt")) {
        owned.extend(text.lines().filter_map(|line| inside(&distribution.path, line)));
        return;
    }
    let text = std::fs::read_to_string(info.join("top_level.txt")).unwrap_or_default();
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
            let text = String::from_utf8_lossy(&std::fs::read(metadata).unwrap_or_default()).into_owned();
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_are_comma_separated_values() {
        let lines = parse("a/b.py,sha256=47DEQpj8HBSa-_TImW-5JCeuQeRkm5NMpJWZG3hSuFU,0\n\"x,\"\"y\"\".py\",,\nRECORD,,\n").unwrap();
        assert_eq!(lines[0].sha256.unwrap()[..3], [0xe3, 0xb0, 0xc4]);
        assert_eq!((lines[0].size, lines[1].path.as_str()), (Some(0), "x,\"y\".py"));
        for (text, line) in [("a,b\n", 1), ("a,,\n\"b,,\n", 2), ("a,sha256=!!,1\n", 1), ("a,,x\n", 1), (",,\n", 1), ("a,nonsense,\n", 1)] {
            assert_eq!(parse(text), Err(line), "{text}");
        }
        assert_eq!(inside(Path::new("lib/python3.11/site-packages"), "../../../bin/x"), Some("bin/x".into()));
        assert_eq!(inside(Path::new("a"), "../../x"), None);
    }

    proptest::proptest! {
        #[test]
        fn no_record_makes_it_panic(text in "(?s).{0,120}") {
            let _ = parse(&text);
        }
    }
}
