//! Byte code against its source: PEP 552.

use std::path::{Path, PathBuf};

use rayon::iter::{IntoParallelRefIterator, ParallelIterator};

use super::{Fault, Finding};

/// SipHash with `c` rounds a word and `d` at the end, for the key `(key, 0)`: what `importlib.util.source_hash` uses (1-3 since Python 3.11, 2-4 before).
pub(super) fn siphash(key: u64, data: &[u8], c: usize, d: usize) -> u64 {
    let mut v = [0x736f_6d65_7073_6575 ^ key, 0x646f_7261_6e64_6f6d, 0x6c79_6765_6e65_7261 ^ key, 0x7465_6462_7974_6573];
    let round = |v: &mut [u64; 4]| {
        v[0] = v[0].wrapping_add(v[1]);
        v[1] = v[1].rotate_left(13) ^ v[0];
        v[0] = v[0].rotate_left(32);
        v[2] = v[2].wrapping_add(v[3]);
        v[3] = v[3].rotate_left(16) ^ v[2];
        v[0] = v[0].wrapping_add(v[3]);
        v[3] = v[3].rotate_left(21) ^ v[0];
        v[2] = v[2].wrapping_add(v[1]);
        v[1] = v[1].rotate_left(17) ^ v[2];
        v[2] = v[2].rotate_left(32);
    };
    let absorb = |v: &mut [u64; 4], word: u64| {
        v[3] ^= word;
        for _ in 0..c {
            round(v);
        }
        v[0] ^= word;
    };
    let mut chunks = data.chunks_exact(8);
    for chunk in &mut chunks {
        absorb(&mut v, chunk.iter().rev().fold(0, |word, byte| word << 8 | u64::from(*byte)));
    }
    let tail = chunks.remainder().iter().rev().fold(0u64, |word, byte| word << 8 | u64::from(*byte));
    absorb(&mut v, tail | (data.len() as u64) << 56);
    v[2] ^= 0xff;
    for _ in 0..d {
        round(&mut v);
    }
    v[0] ^ v[1] ^ v[2] ^ v[3]
}

/// Whether a byte code file of the unchecked kind is of another source than `source`. Python looks at the source of all other kinds itself.
fn is_stale(pyc: &[u8], source: &[u8]) -> bool {
    let Some(header) = pyc.get(..16) else { return false };
    let word = |at: usize| u32::from_le_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
    if word(4) != 0b01 {
        return false;
    }
    let key = u64::from(word(0));
    let stored = u64::from_le_bytes([header[8], header[9], header[10], header[11], header[12], header[13], header[14], header[15]]);
    stored != siphash(key, source, 1, 3) && stored != siphash(key, source, 2, 4)
}

/// Byte code in the site-packages folders that Python would use although its source is another one.
pub(super) fn stale(root: &Path, site_packages: &[PathBuf]) -> Vec<Finding> {
    let mut files = Vec::new();
    for folder in site_packages {
        collect(&root.join(folder), &mut files);
    }
    files
        .par_iter()
        .filter_map(|pyc| {
            let mut head = [0u8; 16];
            let mut file = crate::files::open(pyc).ok()?;
            std::io::Read::read_exact(&mut file, &mut head).ok()?;
            if head[4..8] != [1, 0, 0, 0] {
                return None;
            }
            let name = pyc.file_name()?.to_str()?;
            let source = pyc.parent()?.parent()?.join(format!("{}.py", name.split(".cpython-").next()?));
            let source = crate::files::read(&source, crate::files::MOST).ok()?;
            is_stale(&head, &source).then(|| Finding {
                fault: Fault::StalePyc,
                path: pyc.strip_prefix(root).unwrap_or(pyc).to_string_lossy().into_owned(),
                package: None,
                detail: Some("it was made of another source, and Python does not look".to_owned()),
            })
        })
        .collect()
}

fn collect(folder: &Path, files: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        let Ok(kind) = entry.file_type() else { continue };
        if kind.is_dir() {
            collect(&entry.path(), files);
        } else if kind.is_file()
            && folder.file_name().is_some_and(|name| name == "__pycache__")
            && entry.file_name().to_str().is_some_and(|name| name.contains(".cpython-") && name.ends_with(".pyc"))
        {
            files.push(entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn siphash_agrees_with_the_reference() {
        // SipHash 2-4 of nothing with an all-zero key.
        assert_eq!(siphash(0, b"", 2, 4), 0x1e92_4b9d_7377_00d7);
    }

    #[test]
    fn python_agrees_about_the_hash() {
        let script = "import _imp, importlib.util, sys\nm=int.from_bytes(importlib.util.MAGIC_NUMBER,'little')\nfor s in (b'', b'x = 1\\n', b'abcdefgh'*5+b'z'):\n print(m, int.from_bytes(_imp.source_hash(m, s),'little'))";
        let Ok(output) = std::process::Command::new("python3").args(["-c", script]).output() else {
            eprintln!("skipped: no python3");
            return;
        };
        let text = String::from_utf8(output.stdout).unwrap();
        let sources: [&[u8]; 3] = [b"", b"x = 1\n", b"abcdefghabcdefghabcdefghabcdefghabcdefghz"];
        assert_eq!(text.lines().count(), 3, "{text}");
        for (line, source) in text.lines().zip(sources) {
            let (key, hash) = line.split_once(' ').unwrap();
            let (key, hash): (u64, u64) = (key.parse().unwrap(), hash.parse().unwrap());
            assert!(siphash(key, source, 1, 3) == hash || siphash(key, source, 2, 4) == hash);
        }
    }
}
