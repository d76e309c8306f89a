//! What would go with an environment and no channel could bring back.

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use crate::error::Result;
use crate::prefix::Prefix;
use crate::pypi::installed::{self, Installed};

/// What is in an environment beside what tare installed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Lost {
    /// Files of nobody, relative to the environment, sorted.
    pub files: Vec<PathBuf>,
    /// Python packages that pip or another tool installed, by name.
    pub python: Vec<String>,
}

impl Lost {
    /// Looks into the environment at `prefix`.
    ///
    /// # Errors
    /// It is no environment, or `conda-meta` cannot be read.
    pub fn with(prefix: &Path) -> Result<Self> {
        let prefix = Prefix::open(prefix)?;
        let mut files = prefix.files_of_nobody()?;
        if files.is_empty() {
            return Ok(Lost::default());
        }
        let others: Vec<Installed> = installed::read(&prefix).into_iter().filter(|installed| !installed.is_ours()).collect();
        let theirs: HashSet<&Path> = others.iter().flat_map(Installed::owns).collect();
        files.retain(|path| !theirs.contains(path.as_path()));
        Ok(Lost { files, python: others.into_iter().map(|installed| installed.name).collect() })
    }

    /// Nothing would be lost.
    pub fn is_empty(&self) -> bool {
        self.files.is_empty() && self.python.is_empty()
    }

    /// One line a kind: the first few by name, and how many more.
    pub fn lines(&self) -> Vec<String> {
        let mut lines = Vec::new();
        if !self.files.is_empty() {
            lines.push(format!("files that belong to no package: {}", few(self.files.iter().map(|path| path.display().to_string()))));
        }
        if !self.python.is_empty() {
            lines.push(format!("Python packages that tare did not install: {}", few(self.python.iter().cloned())));
        }
        lines
    }
}

fn few(names: impl ExactSizeIterator<Item = String>) -> String {
    let more = names.len().saturating_sub(5);
    let shown: Vec<String> = names.take(5).map(|name| format!("`{name}`")).collect();
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    format!("{}{more}", shown.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_lost_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let at = |path: &str| folder.path().join(path);
        let site = "lib/python3.11/site-packages";
        for path in ["conda-meta/tare", "bin", "notes", &format!("{site}/odd-1.0.dist-info"), &format!("{site}/__pycache__")] {
            std::fs::create_dir_all(at(path)).unwrap();
        }
        std::fs::write(at("conda-meta/tare/files"), "3 bin/tool\n- bin/link\n").unwrap();
        for path in ["bin/tool", "bin/link", "conda-meta/mine", &format!("{site}/__pycache__/x.pyc")] {
            std::fs::write(at(path), "x").unwrap();
        }
        assert!(Lost::with(folder.path()).unwrap().is_empty());
        std::fs::write(at(&format!("{site}/odd.py")), "").unwrap();
        std::fs::write(at(&format!("{site}/odd-1.0.dist-info/METADATA")), "Metadata-Version: 2.1\nName: odd\nVersion: 1.0\n").unwrap();
        std::fs::write(
            at(&format!("{site}/odd-1.0.dist-info/RECORD")),
            "odd.py,,\nodd-1.0.dist-info/METADATA,,\nodd-1.0.dist-info/RECORD,,\n",
        )
        .unwrap();
        for nth in 0..7 {
            std::fs::write(at(&format!("notes/{nth}")), "").unwrap();
        }
        let lost = Lost::with(folder.path()).unwrap();
        assert_eq!((lost.files.len(), lost.python.as_slice()), (7, &["odd".to_owned()][..]));
        assert_eq!(
            lost.lines(),
            [
                "files that belong to no package: `notes/0`, `notes/1`, `notes/2`, `notes/3`, `notes/4` and 2 more",
                "Python packages that tare did not install: `odd`"
            ]
        );
        assert!(Lost::with(&at("nowhere")).is_err());
    }
}
