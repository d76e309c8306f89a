//! Files in an environment that no package brought.

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use super::Prefix;
use crate::error::Result;

impl Prefix {
    /// Files and links in the environment that belong to none of its packages (those of channels, and the Python packages that tare installed), relative to
    /// it, sorted. `conda-meta`, `__clobbers__` and what lies in a `__pycache__` is not looked at.
    ///
    /// # Errors
    /// `conda-meta` cannot be read. A damaged record counts as none.
    pub fn files_of_nobody(&self) -> Result<Vec<PathBuf>> {
        let mut owned: HashSet<PathBuf> = HashSet::new();
        if let Ok(manifest) = crate::files::read_text(&self.path().join("conda-meta/tare/files")) {
            owned.extend(manifest.lines().filter_map(|line| line.split_once(' ')).map(|(_, path)| PathBuf::from(path)));
        }
        let (records, _) = self.records_and_damage()?;
        for record in records {
            owned.extend(record.files);
        }
        let mut found = Vec::new();
        collect(self.path(), Path::new(""), &owned, &mut found);
        found.sort();
        Ok(found)
    }
}

fn collect(prefix: &Path, folder: &Path, owned: &HashSet<PathBuf>, found: &mut Vec<PathBuf>) {
    let Ok(entries) = std::fs::read_dir(prefix.join(folder)) else { return };
    for entry in entries.flatten() {
        let path = folder.join(entry.file_name());
        if path == Path::new("conda-meta") || path == Path::new("__clobbers__") || entry.file_name() == "__pycache__" {
            continue;
        }
        let Ok(kind) = entry.file_type() else { continue };
        if kind.is_dir() {
            collect(prefix, &path, owned, found);
        } else if !owned.contains(&path) {
            found.push(path);
        }
    }
}
