//! The distributions that the conda half provides, read from the metadata inside its packages: a name mapping would guess.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use sha2::{Digest as _, Sha256};
use url::Url;

use super::{Name, Version};
use crate::error::{Error, Result};
use crate::prefix::Prefix;

/// A distribution of a conda package.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Provided {
    /// Its name for Python.
    pub name: Name,
    /// Its version for Python.
    pub version: Version,
    /// `NAME-VERSION-BUILD` of the conda package that brings it.
    pub package: String,
    /// Name of that package.
    pub package_name: String,
    /// `Requires-Dist` as the metadata has it.
    pub requires_dist: Vec<String>,
    /// `Provides-Extra`.
    pub extras: Vec<String>,
}

/// What the metadata of a distribution says (core metadata; `PKG-INFO` has the same form).
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CoreMetadata {
    /// `Name`.
    pub name: String,
    /// `Version`.
    pub version: String,
    /// `Requires-Dist`.
    pub requires_dist: Vec<String>,
    /// `Requires-Python`.
    pub requires_python: Option<String>,
    /// `Provides-Extra`.
    pub extras: Vec<String>,
}

impl CoreMetadata {
    /// Reads the head of a metadata text; the description behind it is not looked at.
    pub fn parse(text: &str) -> Self {
        let mut metadata = CoreMetadata::default();
        let mut fields: Vec<(String, String)> = Vec::new();
        for line in text.lines() {
            if line.trim().is_empty() {
                break;
            }
            if line.starts_with([' ', '\t']) {
                if let Some((_, value)) = fields.last_mut() {
                    value.push(' ');
                    value.push_str(line.trim());
                }
            } else if let Some((key, value)) = line.split_once(':') {
                fields.push((key.trim().to_ascii_lowercase(), value.trim().to_owned()));
            }
        }
        for (key, value) in fields {
            match key.as_str() {
                "name" => metadata.name = value,
                "version" => metadata.version = value,
                "requires-dist" => metadata.requires_dist.push(value),
                "requires-python" => metadata.requires_python = Some(value),
                "provides-extra" => metadata.extras.push(value),
                _ => {}
            }
        }
        metadata
    }
}

/// The metadata file of a distribution, if `file` (relative to the prefix) is one.
fn is_metadata(file: &Path) -> bool {
    let Some(name) = file.file_name().and_then(|name| name.to_str()) else { return false };
    let parent = file.parent().and_then(Path::file_name).and_then(|name| name.to_str()).unwrap_or_default();
    let in_site = file.ancestors().skip(1).take(2).any(|folder| folder.file_name().is_some_and(|name| name == "site-packages"));
    in_site
        && ((name == "METADATA" && parent.ends_with(".dist-info"))
            || (name == "PKG-INFO" && parent.ends_with(".egg-info"))
            || name.ends_with(".egg-info"))
}

/// The distributions of the conda packages in `prefix`, by name.
///
/// # Errors
/// The records of the prefix cannot be read.
pub fn provided(prefix: &Prefix) -> Result<BTreeMap<Name, Provided>> {
    let mut found = BTreeMap::new();
    for record in prefix.records()? {
        let package = &record.repodata_record.package_record;
        for file in record.files.iter().filter(|file| is_metadata(file)) {
            let Ok(bytes) = std::fs::read(prefix.path().join(file)) else { continue };
            let metadata = CoreMetadata::parse(&String::from_utf8_lossy(&bytes));
            let (Ok(name), Ok(version)) = (Name::from_str(&metadata.name), Version::from_str(&metadata.version)) else {
                tracing::debug!("`{}` has no usable name or version", file.display());
                continue;
            };
            let made = Provided {
                name: name.clone(),
                version,
                package: format!("{}-{}-{}", package.name.as_normalized(), package.version, package.build),
                package_name: package.name.as_normalized().to_owned(),
                requires_dist: metadata.requires_dist,
                extras: metadata.extras,
            };
            found.insert(name, made);
        }
    }
    Ok(found)
}

/// A wheel without contents that stands for a provided distribution, so that a resolver takes it as it is and asks no index about it.
#[derive(Debug, Clone)]
pub struct Stub {
    /// Where the wheel is.
    pub path: PathBuf,
    /// `name @ URL`.
    pub constraint: String,
    /// sha256 of the wheel.
    pub sha256: String,
}

/// Writes stand-ins into `folder`. What a provided distribution needs is the conda half's business and not asked for again; only what an extra of
/// it needs is.
///
/// # Errors
/// Files that cannot be written.
pub fn stubs<'a>(provided: impl Iterator<Item = &'a Provided>, folder: &Path) -> Result<Vec<Stub>> {
    let failed = |path: &Path, error: &dyn std::fmt::Display| Error::failure(format!("cannot write `{}`", path.display())).because(error);
    fs_err::create_dir_all(folder).map_err(|error| Error::io("create the folder", folder, &error))?;
    let mut made = Vec::new();
    for distribution in provided {
        let name = distribution.name.to_string().replace('-', "_");
        let version = distribution.version.to_string();
        let info = format!("{name}-{version}.dist-info");
        let mut metadata = format!("Metadata-Version: 2.1\nName: {}\nVersion: {version}\n", distribution.name);
        for extra in &distribution.extras {
            metadata.push_str(&format!("Provides-Extra: {extra}\n"));
        }
        for requirement in distribution.requires_dist.iter().filter(|requirement| requirement.contains("extra")) {
            metadata.push_str(&format!("Requires-Dist: {requirement}\n"));
        }
        let files = [
            (format!("{info}/METADATA"), metadata),
            (format!("{info}/WHEEL"), "Wheel-Version: 1.0\nGenerator: tare\nRoot-Is-Purelib: true\nTag: py3-none-any\n".to_owned()),
            (format!("{info}/RECORD"), format!("{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")),
        ];
        let path = folder.join(format!("{name}-{version}-py3-none-any.whl"));
        let mut zip = zip::ZipWriter::new(std::io::Cursor::new(Vec::new()));
        let options = zip::write::SimpleFileOptions::default().last_modified_time(zip::DateTime::default());
        for (file, text) in &files {
            zip.start_file(file, options).map_err(|error| failed(&path, &error))?;
            zip.write_all(text.as_bytes()).map_err(|error| failed(&path, &error))?;
        }
        let bytes = zip.finish().map_err(|error| failed(&path, &error))?.into_inner();
        fs_err::write(&path, &bytes).map_err(|error| Error::io("write", &path, &error))?;
        let url = Url::from_file_path(&path).map_err(|()| Error::failure(format!("`{}` is no absolute path", path.display())))?;
        made.push(Stub { constraint: format!("{} @ {url}", distribution.name), sha256: crate::text::hex(&Sha256::digest(&bytes)), path });
    }
    Ok(made)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metadata_with_folded_lines_and_a_description() {
        let text = "Metadata-Version: 2.1\nName: A.B\nVersion: 1.0\nRequires-Dist: x\n >=1\nrequires-dist: y ; extra == 't'\nProvides-Extra: t\n\nName: other\n";
        let metadata = CoreMetadata::parse(text);
        assert_eq!((metadata.name.as_str(), metadata.version.as_str()), ("A.B", "1.0"));
        assert_eq!(metadata.requires_dist, ["x >=1", "y ; extra == 't'"]);
    }

    #[test]
    fn metadata_files_are_those_of_site_packages() {
        for (file, expected) in [
            ("lib/python3.11/site-packages/numpy-1.dist-info/METADATA", true),
            ("Lib/site-packages/numpy-1.dist-info/METADATA", true),
            ("lib/python3.11/site-packages/a.egg-info", true),
            ("lib/python3.11/site-packages/a.egg-info/PKG-INFO", true),
            ("lib/python3.11/site-packages/setuptools/_vendor/a-1.dist-info/METADATA", false),
            ("share/x-1.dist-info/METADATA", false),
            ("lib/python3.11/site-packages/a.egg-info/top_level.txt", false),
        ] {
            assert_eq!(is_metadata(Path::new(file)), expected, "{file}");
        }
    }

    #[test]
    fn a_stand_in_is_a_wheel_that_needs_only_what_its_extras_need() {
        let folder = tempfile::tempdir().unwrap();
        let distribution = Provided {
            name: Name::from_str("a-b").unwrap(),
            version: Version::from_str("1.0").unwrap(),
            package: "a-b-1.0-0".into(),
            package_name: "a-b".into(),
            requires_dist: vec!["x".into(), "y ; extra == 't'".into()],
            extras: vec!["t".into()],
        };
        let made = stubs([&distribution].into_iter(), folder.path()).unwrap();
        assert!(made[0].path.ends_with("a_b-1.0-py3-none-any.whl"));
        let mut wheel = zip::ZipArchive::new(std::fs::File::open(&made[0].path).unwrap()).unwrap();
        let text = std::io::read_to_string(wheel.by_name("a_b-1.0.dist-info/METADATA").unwrap()).unwrap();
        assert!(text.contains("Requires-Dist: y ; extra == 't'") && !text.contains("Requires-Dist: x"), "{text}");
    }
}
