//! Writes one conda package: a folder of files first, then the archive and its record.
//!
//! The same files give the same bytes: entries sorted, owner 0:0, modes 0755 and 0644, one fixed time. That time is
//! 1980-01-01, because neither the zip container of a `.conda` file nor Python's own wheel builders can express an earlier one.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use rattler_conda_types::PackageRecord;
use rattler_conda_types::compression_level::CompressionLevel;
use rattler_conda_types::package::{FileMode, IndexJson, PathType, PathsEntry, PathsJson, PrefixPlaceholder};
use rattler_digest::{Md5, Sha256, Sha256Hash, compute_bytes_digest, compute_file_digest};

use crate::error::{Error, Result};

/// Stands for the prefix in text files. Long, so that other tools, which may only shorten, can replace it too.
pub(super) const PLACEHOLDER: &str = concat!(
    "/opt/tare_host_placehold_placehold_placehold_placehold_placehold_placehold_placehold_placehold_placehold_placehold",
    "_placehold_placehold_placehold_placehold_placehold_placehold_placehold_placehold_placehold_placehold_placehold_pl",
    "acehold_placehold_placehold"
);

/// Speed counts more than size here: the package is read back from the same disk a moment later.
const LEVEL: CompressionLevel = CompressionLevel::Numeric(1);
/// zstd's output is the same for any number of workers; one constant keeps it beyond doubt.
const WORKERS: u32 = 2;

#[derive(Debug, Clone, PartialEq, Eq)]
enum Entry {
    File { sha256: Sha256Hash, size: u64, executable: bool, placeholder: bool },
    Link { target: String },
}

/// The content of a package, being collected in a folder.
#[derive(Debug)]
pub(super) struct Stage {
    dir: PathBuf,
    entries: BTreeMap<String, Entry>,
}

/// A finished package.
#[derive(Debug, Clone, serde::Serialize, serde::Deserialize)]
pub(super) struct Package {
    /// `linux-64` or `noarch`.
    pub subdir: String,
    /// File name in the folder of the subdir.
    pub file_name: String,
    /// What goes into repodata.json.
    pub record: PackageRecord,
}

impl Stage {
    /// Starts a package in `dir`, which must be empty or missing.
    pub fn new(dir: PathBuf) -> Result<Self> {
        fs::create_dir_all(&dir).map_err(|error| Error::io("create", &dir, &error))?;
        Ok(Stage { dir, entries: BTreeMap::new() })
    }

    pub fn contains(&self, path: &str) -> bool {
        self.entries.contains_key(path)
    }

    fn write(&self, path: &str, bytes: &[u8], executable: bool) -> Result<()> {
        let at = self.dir.join(path);
        if let Some(parent) = at.parent() {
            fs::create_dir_all(parent).map_err(|error| Error::io("create", parent, &error))?;
        }
        fs::write(&at, bytes).map_err(|error| Error::io("write", &at, &error))?;
        let mode = if executable { 0o755 } else { 0o644 };
        fs::set_permissions(&at, fs::Permissions::from_mode(mode)).map_err(|error| Error::io("change the mode of", &at, &error))
    }

    /// Adds a file. `placeholder`: its text holds [`PLACEHOLDER`], to be replaced by the prefix.
    pub fn file(&mut self, path: &str, bytes: &[u8], executable: bool, placeholder: bool) -> Result<()> {
        self.write(path, bytes, executable)?;
        let sha256 = compute_bytes_digest::<Sha256>(bytes);
        self.entries.insert(path.to_owned(), Entry::File { sha256, size: bytes.len() as u64, executable, placeholder });
        Ok(())
    }

    /// Adds a symbolic link with a relative target.
    pub fn link(&mut self, path: &str, target: &str) -> Result<()> {
        let at = self.dir.join(path);
        if let Some(parent) = at.parent() {
            fs::create_dir_all(parent).map_err(|error| Error::io("create", parent, &error))?;
        }
        symlink(target, &at).map_err(|error| Error::io("create the link", &at, &error))?;
        self.entries.insert(path.to_owned(), Entry::Link { target: target.to_owned() });
        Ok(())
    }

    /// Eight hexadecimal digits that follow from all paths, contents, modes and link targets, and from `also`.
    pub fn fingerprint(&self, also: &[&str]) -> String {
        let mut text = String::new();
        for (path, entry) in &self.entries {
            let line = match entry {
                Entry::File { sha256, executable, placeholder, .. } => format!("{path}\0{}\0{executable}\0{placeholder}\n", hex(sha256)),
                Entry::Link { target } => format!("{path}\0-> {target}\n"),
            };
            text.push_str(&line);
        }
        for also in also {
            text.push_str(also);
            text.push('\0');
        }
        let mut digest = hex(&compute_bytes_digest::<Sha256>(text.as_bytes()));
        digest.truncate(8);
        digest
    }

    /// Writes `info/` and the archive into `out_dir`. `info`: further files below `info/`, by name.
    pub fn finish(self, index: &IndexJson, info: &BTreeMap<String, Vec<u8>>, out_dir: &Path) -> Result<Package> {
        let subdir = index.subdir.clone().unwrap_or_else(|| "noarch".to_owned());
        let stem = format!("{}-{}-{}", index.name.as_normalized(), index.version, index.build.as_str());
        let mut files: Vec<PathBuf> = self.entries.keys().map(|path| self.dir.join(path)).collect();
        let mut add_info = |name: &str, bytes: &[u8]| -> Result<()> {
            let path = format!("info/{name}");
            self.write(&path, bytes, false)?;
            files.push(self.dir.join(path));
            Ok(())
        };
        add_info("index.json", &json(index)?)?;
        add_info("paths.json", &json(&self.paths_json())?)?;
        let list: String = self.entries.keys().map(|path| format!("{path}\n")).collect();
        add_info("files", list.as_bytes())?;
        for (name, bytes) in info {
            add_info(name, bytes)?;
        }

        let file_name = format!("{stem}.conda");
        let archive = out_dir.join(&file_name);
        let time = jiff::Timestamp::from_second(315_532_800).map_err(|error| Error::failure("bad time").because(error))?;
        let file = fs::File::create(&archive).map_err(|error| Error::io("create", &archive, &error))?;
        let mut writer = std::io::BufWriter::new(file);
        rattler_package_streaming::write::write_conda_package(
            &mut writer,
            &self.dir,
            &files,
            LEVEL,
            Some(WORKERS),
            &stem,
            Some(&time),
            None,
        )
        .and_then(|()| writer.into_inner().map_err(|error| error.into_error()))
        .and_then(|file| file.sync_all())
        .map_err(|error| Error::io("write", &archive, &error))?;

        let read = |error: std::io::Error| Error::io("read", &archive, &error);
        let sha256 = compute_file_digest::<Sha256>(&archive).map_err(read)?;
        let md5 = compute_file_digest::<Md5>(&archive).map_err(read)?;
        let size = fs::metadata(&archive).map_err(read)?.len();
        let record = PackageRecord::from_index_json(index.clone(), Some(size), Some(sha256), Some(md5))
            .map_err(|error| Error::failure(format!("cannot describe `{file_name}`")).because_of(&error))?;
        fs::remove_dir_all(&self.dir).map_err(|error| Error::io("remove", &self.dir, &error))?;
        Ok(Package { subdir, file_name, record })
    }

    fn paths_json(&self) -> PathsJson {
        let entry = |(path, entry): (&String, &Entry)| {
            let mut out = PathsEntry {
                relative_path: PathBuf::from(path),
                no_link: false,
                path_type: PathType::SoftLink,
                prefix_placeholder: None,
                sha256: None,
                size_in_bytes: None,
            };
            if let Entry::File { sha256, size, placeholder, .. } = entry {
                out.path_type = PathType::HardLink;
                out.sha256 = Some(*sha256);
                out.size_in_bytes = Some(*size);
                out.prefix_placeholder = placeholder.then(|| PrefixPlaceholder {
                    file_mode: FileMode::Text,
                    placeholder: PLACEHOLDER.to_owned(),
                    experimental_offsets: None,
                });
            }
            out
        };
        PathsJson { paths: self.entries.iter().map(entry).collect(), paths_version: 1 }
    }
}

/// Pretty JSON with a final newline.
pub(super) fn json(value: &impl serde::Serialize) -> Result<Vec<u8>> {
    let mut bytes = serde_json::to_vec_pretty(value).map_err(|error| Error::failure("cannot write JSON").because(error))?;
    bytes.push(b'\n');
    Ok(bytes)
}

/// Lower-case hexadecimal digits.
pub(super) use crate::text::hex;
