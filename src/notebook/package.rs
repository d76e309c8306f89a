//! The wheel of `tare_notebook`, made from the sources that this program carries.

use std::io::{Cursor, Write};
use std::path::Path;
use std::str::FromStr;

use sha2::{Digest, Sha256};
use url::Url;
use zip::write::SimpleFileOptions;

use crate::error::{Error, Result};
use crate::install::hex_text;
use crate::pypi::record_file::base64_url;
use crate::pypi::{Name, PypiRecord, PypiSource, ReadyWheel, TOOLING, Version, WheelFile};

/// Name of the distribution.
pub const PACKAGE: &str = "tare-notebook";

const VERSION: &str = env!("CARGO_PKG_VERSION");

macro_rules! sources {
    ($($name:literal),* $(,)?) => {
        &[$(($name, include_str!(concat!("../../python/tare_notebook/", $name)))),*]
    };
}

/// Every file of the package, sorted.
const SOURCES: &[(&str, &str)] = sources![
    "__init__.py",
    "_binary.py",
    "_driver.py",
    "_experiment.py",
    "_holders.py",
    "_ipython.py",
    "_magics.py",
    "_memory.py",
    "_restart.py",
    "_safe.py",
    "_search.py",
    "_tables.py",
    "_torch.py",
    "_version.py",
    "_zero.py",
    "pytest_plugin.py",
];

/// File name of the wheel (PEP 427).
pub fn wheel_file_name() -> String {
    format!("tare_notebook-{VERSION}-py3-none-any.whl")
}

/// Writes the package into a folder, for programs that use it without its being installed.
///
/// # Errors
/// The folder cannot be written.
pub fn write_sources(folder: &Path) -> Result<()> {
    let package = folder.join("tare_notebook");
    std::fs::create_dir_all(&package).map_err(|error| Error::io("create", &package, &error))?;
    for (name, text) in SOURCES {
        let path = package.join(name);
        std::fs::write(&path, text).map_err(|error| Error::io("write", &path, &error))?;
    }
    Ok(())
}

/// The wheel. `binary`: path of the `tare` that the package is to call, remembered in `_binary.json`. The same input gives the same bytes: sorted,
/// without clock times.
///
/// # Errors
/// The archive cannot be made.
pub fn wheel_bytes(binary: &Path) -> Result<Vec<u8>> {
    let info = format!("tare_notebook-{VERSION}.dist-info");
    let mut files: Vec<(String, Vec<u8>)> = SOURCES
        .iter()
        .map(|(name, text)| {
            let text = if *name == "_version.py" { text.replace("\"0.0.0\"", &format!("\"{VERSION}\"")) } else { (*text).to_owned() };
            (format!("tare_notebook/{name}"), text.into_bytes())
        })
        .collect();
    let remembered = serde_json::json!({ "binary": binary.display().to_string() });
    files.push(("tare_notebook/_binary.json".to_owned(), format!("{remembered}\n").into_bytes()));
    files.sort();
    let metadata = format!(
        "Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: {VERSION}\nSummary: A clean slate in notebooks: zero GPU memory between experiments, and name \
         what will not let go\nLicense: {}\nRequires-Python: >=3.9\nProvides-Extra: notebook\nRequires-Dist: ipython ; extra == \"notebook\"\n",
        env!("CARGO_PKG_LICENSE"),
    );
    files.push((format!("{info}/METADATA"), metadata.into_bytes()));
    files.push((format!("{info}/WHEEL"), b"Wheel-Version: 1.0\nGenerator: tare\nRoot-Is-Purelib: true\nTag: py3-none-any\n".to_vec()));
    let mut record: String =
        files.iter().map(|(path, bytes)| format!("{path},sha256={},{}\n", base64_url(&Sha256::digest(bytes)), bytes.len())).collect();
    record.push_str(&format!("{info}/RECORD,,\n"));
    files.push((format!("{info}/RECORD"), record.into_bytes()));
    let failed = |error: &dyn std::fmt::Display| Error::failure("the wheel of `tare_notebook` cannot be made").because(error);
    let mut zip = zip::ZipWriter::new(Cursor::new(Vec::new()));
    let options = SimpleFileOptions::default()
        .compression_method(zip::CompressionMethod::Deflated)
        .last_modified_time(zip::DateTime::default())
        .unix_permissions(0o644);
    for (path, bytes) in &files {
        zip.start_file(path.as_str(), options).map_err(|error| failed(&error))?;
        zip.write_all(bytes).map_err(|error| failed(&error))?;
    }
    Ok(zip.finish().map_err(|error| failed(&error))?.into_inner())
}

/// The wheel in the cache, ready to be linked.
///
/// # Errors
/// The cache cannot be written.
pub(super) fn ready(cache: &Path, binary: &Path) -> Result<ReadyWheel> {
    let bytes = wheel_bytes(binary)?;
    let sha256 = hex_text(&Sha256::digest(&bytes));
    let folder = cache.join("notebook").join(&sha256[..16]);
    let path = folder.join(wheel_file_name());
    if std::fs::read(&path).ok().as_deref() != Some(bytes.as_slice()) {
        std::fs::create_dir_all(&folder).map_err(|error| Error::io("create", &folder, &error))?;
        let mut file = tempfile::NamedTempFile::new_in(&folder).map_err(|error| Error::io("write", &folder, &error))?;
        file.write_all(&bytes).map_err(|error| Error::io("write", &path, &error))?;
        file.persist(&path).map_err(|error| Error::io("write", &path, &error.error))?;
    }
    let bad = |what: &dyn std::fmt::Display| Error::failure("the wheel of `tare_notebook` cannot be described").because(what);
    let record = PypiRecord {
        name: Name::from_str(PACKAGE).map_err(|error| bad(&error))?,
        version: Version::from_str(VERSION).map_err(|error| bad(&error))?,
        source: PypiSource::Archive {
            // Where the cache lies is nothing to remember: the program makes the wheel again.
            url: Url::parse(&format!("{TOOLING}:///{}", wheel_file_name())).map_err(|error| bad(&error))?,
            sha256: Some(sha256.clone()),
            size: Some(bytes.len() as u64),
            index: None,
            direct: false,
            subdirectory: None,
        },
        requires_dist: vec!["ipython ; extra == \"notebook\"".to_owned()],
        requires_python: Some(">=3.9".to_owned()),
        requested: true,
        extras: Vec::new(),
    };
    Ok(ReadyWheel { record, wheel: WheelFile::Local { path, sha256 } })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::io::Read;

    use super::*;

    #[test]
    fn every_source_is_carried() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("python/tare_notebook");
        let mut there: Vec<String> = std::fs::read_dir(folder)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
            .filter(|name| name.ends_with(".py"))
            .collect();
        there.sort();
        let carried: Vec<&str> = SOURCES.iter().map(|(name, _)| *name).collect();
        assert_eq!(carried, there);
    }

    #[test]
    fn the_wheel_is_the_same_every_time_and_its_record_is_right() {
        let bytes = wheel_bytes(Path::new("/opt/tare")).unwrap();
        assert_eq!(bytes, wheel_bytes(Path::new("/opt/tare")).unwrap());
        assert_ne!(bytes, wheel_bytes(Path::new("/opt/other")).unwrap());
        let mut archive = zip::ZipArchive::new(Cursor::new(bytes)).unwrap();
        let mut contents = std::collections::BTreeMap::new();
        for index in 0..archive.len() {
            let mut entry = archive.by_index(index).unwrap();
            let mut bytes = Vec::new();
            entry.read_to_end(&mut bytes).unwrap();
            contents.insert(entry.name().unwrap().into_owned(), bytes);
        }
        let info = format!("tare_notebook-{VERSION}.dist-info");
        let record = String::from_utf8(contents[&format!("{info}/RECORD")].clone()).unwrap();
        for line in record.lines() {
            let fields: Vec<&str> = line.split(',').collect();
            let bytes = &contents[fields[0]];
            if fields[1].is_empty() {
                assert!(fields[0].ends_with("/RECORD"));
                continue;
            }
            assert_eq!(fields[1], format!("sha256={}", base64_url(&Sha256::digest(bytes))), "{line}");
            assert_eq!(fields[2], bytes.len().to_string());
        }
        assert_eq!(record.lines().count(), contents.len());
        assert_eq!(contents["tare_notebook/_binary.json"], b"{\"binary\":\"/opt/tare\"}\n");
        let version = String::from_utf8(contents["tare_notebook/_version.py"].clone()).unwrap();
        assert!(version.contains(&format!("__version__ = \"{VERSION}\"")), "{version}");
    }
}
