//! pip's requirements file: the Python packages that no conda package brought.

use std::fmt::Write as _;

use super::{Exported, Origin, Subject};

/// One line a package; with `--hash` where every file's hash is known (pip wants all or none).
pub fn requirements(subject: &Subject) -> Exported {
    let hash_of = |origin: &Origin| match origin {
        Origin::Index { sha256, .. } | Origin::Archive { sha256, .. } => sha256.clone(),
        Origin::Vcs { .. } | Origin::Directory { .. } => None,
    };
    let with_hashes =
        !subject.python.is_empty() && subject.python.iter().all(|package| hash_of(&package.origin).is_some_and(|hash| hash.len() == 64));
    let mut text = String::from("# The Python packages that no conda package brought; install with: pip install --no-deps -r FILE\n");
    for package in &subject.python {
        // The fragment of an archive already has its hash; pip takes it there as well.
        let _ = write!(text, "{}", package.requirement());
        if with_hashes && let Some(hash) = hash_of(&package.origin) {
            let _ = write!(text, " --hash=sha256:{hash}");
        }
        text.push('\n');
    }
    let mut notes = Vec::new();
    if !subject.conda.is_empty() {
        notes.push(format!("the format holds Python packages of an index only: {} conda packages are left out", subject.conda.len()));
    }
    Exported { text, notes }
}
