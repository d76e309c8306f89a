//! `pip` and `setuptools`: the wheels that `ensurepip` bundles, as noarch python packages.
//!
//! Sources: PEP 427 (wheel layout), PEP 376 and the core metadata specification (RECORD, INSTALLER, METADATA),
//! CEP 17 and conda's `info/link.json` (noarch python packages, entry points).

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use rattler_conda_types::package::{BuildString, EntryPoint, IndexJson, LinkJson, NoArchLinks, PythonEntryPoints};
use rattler_conda_types::{NoArchType, PackageName, ParseStrictness, VersionSpec, VersionWithSource};
use zip::ZipArchive;

use super::Trouble;
use super::archive::{Package, Stage, json};

/// The wheels in `folder` that are packaged, sorted.
pub(super) fn bundled(folder: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    let mut wheels: Vec<_> = entries
        .filter_map(Result::ok)
        .map(|entry| entry.path())
        .filter(|path| {
            let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
            (name.starts_with("pip-") || name.starts_with("setuptools-")) && name.ends_with("-none-any.whl")
        })
        .collect();
    wheels.sort();
    wheels
}

/// Packages one wheel. `stage`: a folder to work in; `out`: where the package goes.
///
/// # Errors
/// A refusal with the reason for a wheel that is damaged or holds what cannot be packaged.
pub(super) fn package(wheel: &Path, stage: PathBuf, out: &Path) -> Result<Package, Trouble> {
    let shown = wheel.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let refuse = |why: String| Trouble::Refuse(format!("its bundled wheel `{shown}` cannot be packaged: {why}"));
    let contents = read(wheel).map_err(&refuse)?;

    let info = info_folder(&contents).map_err(&refuse)?;
    let text = |name: &str| contents.get(&format!("{info}/{name}")).map(|bytes| String::from_utf8_lossy(bytes).into_owned());
    let metadata = text("METADATA").ok_or_else(|| refuse("it has no METADATA".into()))?;
    let header = |key: &str| headers(&metadata, key).into_iter().next();
    let name = header("Name").ok_or_else(|| refuse("METADATA has no name".into()))?;
    let version = header("Version").ok_or_else(|| refuse("METADATA has no version".into()))?;
    let version = VersionWithSource::from_str(&version).map_err(|error| refuse(error.to_string()))?;
    let name = PackageName::from_str(&name.to_lowercase().replace('_', "-")).map_err(|error| refuse(error.to_string()))?;
    // What is asked for without a condition would be missing. Extras always carry one.
    if let Some(needed) = headers(&metadata, "Requires-Dist").iter().find(|line| !line.contains(';')) {
        return Err(refuse(format!("it requires `{needed}`")));
    }

    let mut staged = Stage::new(stage)?;
    let mut rows = Vec::new();
    for (path, bytes) in &contents {
        let place = if let Some((data, rest)) = path.split_once(".data/").filter(|(data, _)| !data.contains('/')) {
            match rest.split_once('/') {
                Some(("purelib" | "platlib", rest)) => rest.to_owned(),
                _ => return Err(refuse(format!("`{data}.data/{rest}` has no place in a noarch package"))),
            }
        } else {
            path.clone()
        };
        if place == format!("{info}/RECORD") || place == format!("{info}/INSTALLER") {
            continue;
        }
        staged.file(&format!("site-packages/{place}"), bytes, false, false)?;
        rows.push((place, Some(bytes.as_slice())));
    }
    let installer = format!("{info}/INSTALLER");
    staged.file(&format!("site-packages/{installer}"), b"conda\n", false, false)?;
    rows.push((installer, Some(b"conda\n")));
    rows.push((format!("{info}/RECORD"), None));
    rows.sort();
    let record: String = rows.iter().map(|(path, bytes)| record_row(path, *bytes)).collect();
    staged.file(&format!("site-packages/{info}/RECORD"), record.as_bytes(), false, false)?;

    let entry_points = console_scripts(&text("entry_points.txt").unwrap_or_default()).map_err(&refuse)?;
    let depends = vec![python_requirement(header("Requires-Python").as_deref())];
    let described = entry_points.iter().map(|point| point.to_string()).collect::<Vec<_>>().join("\n");
    let hash = staged.fingerprint(&[&depends.join("\n"), &described]);
    let index = IndexJson {
        arch: None,
        build: BuildString::from_str(&format!("host_{hash}_0")).map_err(|error| refuse(error.to_string()))?,
        build_number: 0,
        constrains: Vec::new(),
        depends,
        extra_depends: BTreeMap::new(),
        features: None,
        flags: Vec::new(),
        license: header("License-Expression").or_else(|| header("License")).filter(|text| text.len() < 80),
        license_family: None,
        name,
        noarch: NoArchType::python(),
        platform: None,
        purls: None,
        python_site_packages_path: None,
        repodata_revision: None,
        subdir: Some("noarch".to_owned()),
        timestamp: None,
        track_features: Vec::new(),
        version,
    };
    let link = LinkJson { noarch: NoArchLinks::Python(PythonEntryPoints { entry_points }), package_metadata_version: 1 };
    let about = serde_json::json!({
        "summary": header("Summary").unwrap_or_default(),
        "description": format!("Packaged from the wheel {shown} that the ensurepip of a CPython on this machine bundles."),
        "extra": { "tare": { "channel": "host", "machine_bound": true } },
    });
    let files = BTreeMap::from([("link.json".to_owned(), json(&link)?), ("about.json".to_owned(), json(&about)?)]);
    Ok(staged.finish(&index, &files, out)?)
}

/// Every file of the wheel by its path, with paths that lead elsewhere refused.
fn read(wheel: &Path) -> Result<BTreeMap<String, Vec<u8>>, String> {
    let file = File::open(wheel).map_err(|error| error.to_string())?;
    let mut zip = ZipArchive::new(std::io::BufReader::new(file)).map_err(|error| error.to_string())?;
    let mut contents = BTreeMap::new();
    for index in 0..zip.len() {
        let mut entry = zip.by_index(index).map_err(|error| error.to_string())?;
        if entry.is_dir() {
            continue;
        }
        let name = entry.name().map_err(|error| error.to_string())?.into_owned();
        let wild = name.starts_with('/') || name.contains('\\') || name.split('/').any(|part| matches!(part, "" | "." | ".."));
        if wild {
            return Err(format!("it holds a file named `{name}`"));
        }
        let mut bytes = Vec::new();
        entry.read_to_end(&mut bytes).map_err(|error| format!("`{name}`: {error}"))?;
        contents.insert(name, bytes);
    }
    Ok(contents)
}

/// The one `NAME-VERSION.dist-info` folder.
fn info_folder(contents: &BTreeMap<String, Vec<u8>>) -> Result<String, String> {
    let folders: BTreeSet<&str> = contents
        .keys()
        .filter_map(|path| path.split_once('/'))
        .map(|(first, _)| first)
        .filter(|first| first.ends_with(".dist-info"))
        .collect();
    match Vec::from_iter(folders)[..] {
        [one] => Ok(one.to_owned()),
        [] => Err("it has no .dist-info folder".into()),
        _ => Err("it has several .dist-info folders".into()),
    }
}

/// Values of `key` in the headers of a METADATA text (up to the first empty line).
fn headers(metadata: &str, key: &str) -> Vec<String> {
    let lines = metadata.lines().take_while(|line| !line.is_empty());
    let values = lines.filter_map(|line| line.split_once(": ").filter(|(found, _)| found.eq_ignore_ascii_case(key)));
    values.map(|(_, value)| value.trim().to_owned()).collect()
}

/// `[console_scripts]` of an entry_points.txt. Names with a Python version in them (`pip3.11`) are left out: they tell where the
/// wheel was made, not where it is installed.
fn console_scripts(text: &str) -> Result<Vec<EntryPoint>, String> {
    let mut section = "";
    let mut points = BTreeMap::new();
    for line in text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with(['#', ';'])) {
        if let Some(name) = line.strip_prefix('[').and_then(|line| line.strip_suffix(']')) {
            section = name.trim();
        } else if section == "console_scripts" {
            let command = line.split_once('=').map_or(line, |(command, _)| command).trim();
            if !command.rsplit_once('.').is_some_and(|(_, minor)| minor.bytes().all(|byte| byte.is_ascii_digit())) {
                let point = EntryPoint::from_str(line).map_err(|error| format!("entry point `{line}`: {error}"))?;
                points.insert(command.to_owned(), point);
            }
        }
    }
    Ok(points.into_values().collect())
}

/// `>=3.7` -> `python >=3.7`; a requirement that a match spec cannot say -> `python`.
fn python_requirement(requires: Option<&str>) -> String {
    let spec: String = requires.unwrap_or_default().split_whitespace().collect();
    if spec.is_empty() || VersionSpec::from_str(&spec, ParseStrictness::Strict).is_err() {
        return "python".to_owned();
    }
    format!("python {spec}")
}

/// One row of RECORD. RECORD itself has neither hash nor size.
fn record_row(path: &str, bytes: Option<&[u8]>) -> String {
    let digest = bytes.map(rattler_digest::compute_bytes_digest::<rattler_digest::Sha256>);
    let file = digest.as_ref().zip(bytes).map(|(digest, bytes)| (&digest[..], bytes.len() as u64));
    crate::pypi::record_file::row(path, file)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    fn wheel(dir: &Path, files: &[(&str, &str)]) -> PathBuf {
        let path = dir.join("pip-23.2.1-py3-none-any.whl");
        let mut zip = zip::ZipWriter::new(File::create(&path).unwrap());
        for (name, text) in files {
            zip.start_file(*name, zip::write::SimpleFileOptions::default()).unwrap();
            zip.write_all(text.as_bytes()).unwrap();
        }
        zip.finish().unwrap();
        path
    }

    const METADATA: &str = "Metadata-Version: 2.1\nName: pip\nVersion: 23.2.1\nRequires-Python: >=3.7\n\nName: not this\n";
    const ENTRY_POINTS: &str = "[console_scripts]\npip = pip._internal.cli.main:main\npip3 = pip._internal.cli.main:main\npip3.11 = pip._internal.cli.main:main\n\n[other]\nx = y:z\n";

    #[test]
    fn a_wheel_becomes_the_same_package_every_time() {
        let dir = tempfile::tempdir().unwrap();
        let files = [
            ("pip/__init__.py", "x = 1\n"),
            ("pip-23.2.1.dist-info/METADATA", METADATA),
            ("pip-23.2.1.dist-info/entry_points.txt", ENTRY_POINTS),
            ("pip-23.2.1.dist-info/RECORD", "stale\n"),
        ];
        let wheel = wheel(dir.path(), &files);
        let first = package(&wheel, dir.path().join("stage"), dir.path()).unwrap();
        let second = package(&wheel, dir.path().join("other stage"), dir.path()).unwrap();
        assert_eq!(first.record, second.record);
        assert_eq!(first.record.depends, ["python >=3.7"]);
        assert_eq!(first.subdir, "noarch");
        assert!(first.record.noarch.is_python());

        let out = dir.path().join("out");
        rattler_package_streaming::fs::extract(&dir.path().join(&first.file_name), &out).unwrap();
        let read = |path: &str| fs::read_to_string(out.join(path)).unwrap();
        let link: serde_json::Value = serde_json::from_str(&read("info/link.json")).unwrap();
        let points = ["pip = pip._internal.cli.main:main", "pip3 = pip._internal.cli.main:main"];
        assert_eq!(link["noarch"]["entry_points"], serde_json::json!(points));
        let record = read("site-packages/pip-23.2.1.dist-info/RECORD");
        // printf 'x = 1\n' | openssl dgst -sha256 -binary | basenc --base64url
        assert!(record.contains("pip/__init__.py,sha256=nia_NpkRxFwkPGhBR7I_yeHc_PJX0pmhxjIBam_NM_Q,6\n"), "{record}");
        assert!(record.contains("pip-23.2.1.dist-info/RECORD,,\n") && !record.contains("stale"));
        assert_eq!(read("site-packages/pip-23.2.1.dist-info/INSTALLER"), "conda\n");
    }

    #[test]
    fn damaged_and_wild_wheels_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let try_it = |files: &[(&str, &str)]| {
            let wheel = wheel(dir.path(), files);
            match package(&wheel, dir.path().join("stage"), dir.path()) {
                Err(Trouble::Refuse(why)) => why,
                other => panic!("{other:?}"),
            }
        };
        let why = try_it(&[("../evil", "")]);
        assert_eq!(why, "its bundled wheel `pip-23.2.1-py3-none-any.whl` cannot be packaged: it holds a file named `../evil`");
        assert!(try_it(&[("a.py", "")]).ends_with("it has no .dist-info folder"));
        assert!(try_it(&[("p.dist-info/METADATA", "Name: pip\n")]).ends_with("METADATA has no version"));
        let needy = METADATA.replace("Requires-Python: >=3.7", "Requires-Dist: six");
        assert!(try_it(&[("p.dist-info/METADATA", &needy)]).ends_with("it requires `six`"));
        fs::write(dir.path().join("pip-1-py3-none-any.whl"), "no zip").unwrap();
        let broken = package(&dir.path().join("pip-1-py3-none-any.whl"), dir.path().join("stage"), dir.path());
        assert!(matches!(broken, Err(Trouble::Refuse(_))));
    }

    #[test]
    fn python_requirements() {
        assert_eq!(python_requirement(Some(">=3.7, !=3.9.1")), "python >=3.7,!=3.9.1");
        assert_eq!(python_requirement(Some("~~3")), "python");
        assert_eq!(python_requirement(None), "python");
    }
}
