//! Where CPython interpreters may lie, found by looking at files only: nothing is run here, so that a cached channel costs
//! a few milliseconds.

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::HostOptions;

/// An interpreter's file, and how it changes when the installation changes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Candidate {
    /// The executable with all symbolic links resolved.
    pub path: PathBuf,
    /// A text that differs when the installation was changed: device, inode, size and time of the files that matter.
    pub stamp: String,
}

/// All candidates, in the order of preference: `TARE_HOST_PYTHON` alone if set, else PATH, pyenv, uv, /usr/local, conda prefixes.
pub(super) fn candidates(options: &HostOptions) -> Vec<Candidate> {
    let mut found = Found::default();
    for folder in options.path_env.iter().flat_map(std::env::split_paths).filter(|folder| folder.is_absolute()) {
        match pyenv_of_shims(&folder) {
            Some(root) => found.versions(&root.join("versions")),
            None => found.bin(&folder),
        }
    }
    if let Some(home) = &options.home {
        found.versions(&home.join(".pyenv/versions"));
        found.versions(&home.join(".local/share/uv/python"));
    }
    found.bin(Path::new("/usr/local/bin"));
    if let Some(home) = &options.home {
        for name in ["miniforge3", "miniconda3", "mambaforge", "anaconda3"] {
            found.bin(&home.join(name).join("bin"));
            found.versions(&home.join(name).join("envs"));
        }
        for root in [".conda/envs", "micromamba/envs", ".local/share/mamba/envs"] {
            found.versions(&home.join(root));
        }
        // Every tool of the conda family writes the environments it makes into this list.
        let listed = crate::files::read(&home.join(".conda/environments.txt"), 16 << 20).unwrap_or_default();
        for line in String::from_utf8_lossy(&listed).lines().map(str::trim).filter(|line| line.starts_with('/')) {
            found.bin(&Path::new(line).join("bin"));
        }
    }
    found.list
}

/// The one candidate that `TARE_HOST_PYTHON` names: `path` with links resolved, or what a virtual environment stands on.
pub(super) fn named(path: &Path) -> std::io::Result<Candidate> {
    let path = base_of(fs::canonicalize(path)?);
    Ok(Candidate { stamp: stamp(&path), path })
}

/// Whether the file starts like an ELF file; a shim or a wrapper script does not.
pub(super) fn starts_like_elf(path: &Path) -> bool {
    let mut magic = [0; 4];
    // A FIFO would block on open.
    fs::metadata(path).is_ok_and(|meta| meta.is_file())
        && File::open(path).and_then(|mut file| file.read_exact(&mut magic)).is_ok()
        && &magic == b"\x7fELF"
}

#[derive(Default)]
struct Found {
    list: Vec<Candidate>,
    seen: BTreeSet<PathBuf>,
}

impl Found {
    /// The interpreters in one `bin` folder.
    fn bin(&mut self, folder: &Path) {
        if holds_host_python(folder) {
            return;
        }
        for name in interpreter_names(folder) {
            let Ok(path) = fs::canonicalize(folder.join(name)) else { continue };
            if !starts_like_elf(&path) {
                continue;
            }
            let path = base_of(path);
            if path.parent().is_some_and(holds_host_python) || !self.seen.insert(path.clone()) {
                continue;
            }
            self.list.push(Candidate { stamp: stamp(&path), path });
        }
    }

    /// The `bin` folders of all installations directly in `folder`, sorted by name.
    fn versions(&mut self, folder: &Path) {
        let Ok(entries) = fs::read_dir(folder) else { return };
        let mut names: Vec<OsString> = entries.filter_map(Result::ok).map(|entry| entry.file_name()).collect();
        names.sort();
        for name in names {
            self.bin(&folder.join(name).join("bin"));
        }
    }
}

/// `python`, `python3`, `python3.11`, `python3.13t` in `folder`, sorted.
fn interpreter_names(folder: &Path) -> Vec<OsString> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    let mut names: Vec<_> = entries.filter_map(Result::ok).map(|entry| entry.file_name()).filter(|name| is_interpreter(name)).collect();
    names.sort();
    names
}

fn is_interpreter(name: &OsStr) -> bool {
    let Some(rest) = name.to_str().and_then(|name| name.strip_prefix("python")) else { return false };
    match rest {
        "" | "3" => true,
        rest => {
            let minor = rest.strip_prefix("3.").map(|minor| minor.strip_suffix('t').unwrap_or(minor));
            minor.is_some_and(|minor| !minor.is_empty() && minor.bytes().all(|byte| byte.is_ascii_digit()))
        }
    }
}

/// pyenv puts `ROOT/shims` on PATH: scripts that pick a version by the current folder. The versions themselves are what counts.
pub(super) fn pyenv_of_shims(folder: &Path) -> Option<PathBuf> {
    let root = folder.parent()?;
    (folder.file_name()? == "shims" && root.join("versions").is_dir()).then(|| root.to_path_buf())
}

/// A virtual environment made with copies instead of links names its base in `pyvenv.cfg`.
fn base_of(path: PathBuf) -> PathBuf {
    let mut path = path;
    // A virtual environment of a virtual environment names the base directly; a few steps are plenty.
    for _ in 0..4 {
        let Some(prefix) = path.parent().and_then(Path::parent) else { break };
        let Ok(text) = fs::read(prefix.join("pyvenv.cfg")) else { break };
        let text = String::from_utf8_lossy(&text);
        let home = text.lines().find_map(|line| {
            let (key, value) = line.split_once('=')?;
            (key.trim() == "home").then(|| PathBuf::from(value.trim()))
        });
        let Some(home) = home else { break };
        let name = path.file_name().unwrap_or(OsStr::new("python3"));
        let base = [name, OsStr::new("python3"), OsStr::new("python")].into_iter().find_map(|name| fs::canonicalize(home.join(name)).ok());
        match base {
            Some(base) if base != path => path = base,
            _ => break,
        }
    }
    path
}

/// Whether the prefix of this `bin` folder was itself made from the `host` channel.
fn holds_host_python(bin: &Path) -> bool {
    let Some(prefix) = bin.parent() else { return false };
    let Ok(entries) = fs::read_dir(prefix.join("conda-meta")) else { return false };
    entries.filter_map(Result::ok).any(|entry| {
        let name = entry.file_name();
        let name = name.to_string_lossy();
        name.starts_with("python-") && name.contains("-host_") && name.ends_with(".json")
    })
}

/// The stamp of an installation: its executable, its libpython, its stdlib folder and what `ensurepip` bundles.
fn stamp(path: &Path) -> String {
    let mut out = String::new();
    let mut add = |path: &Path| {
        if let Ok(meta) = fs::metadata(path) {
            let line = format!("{} {} {} {} {}\n", meta.dev(), meta.ino(), meta.len(), meta.mtime(), meta.mtime_nsec());
            out.push_str(&path.to_string_lossy());
            out.push(' ');
            out.push_str(&line);
        }
    };
    add(path);
    let Some(prefix) = path.parent().and_then(Path::parent) else { return out };
    for lib in ["lib", "lib64"] {
        let lib = prefix.join(lib);
        let Ok(entries) = fs::read_dir(&lib) else { continue };
        let mut names: Vec<_> = entries.filter_map(Result::ok).map(|entry| entry.file_name()).collect();
        names.sort();
        for name in names {
            let text = name.to_string_lossy();
            if text.starts_with("libpython") {
                add(&lib.join(&name));
            } else if text.starts_with("python3") {
                let stdlib = lib.join(&name);
                for part in ["", "os.py", "lib-dynload", "ensurepip/_bundled"] {
                    add(&stdlib.join(part));
                }
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_interpreters() {
        for name in ["python", "python3", "python3.11", "python3.13t"] {
            assert!(is_interpreter(OsStr::new(name)), "{name}");
        }
        for name in
            ["python2", "python2.7", "python3-config", "python3.11-config", "pythonw", "python3.", "python3.t", "ipython", "python3.11m"]
        {
            assert!(!is_interpreter(OsStr::new(name)), "{name}");
        }
    }

    /// A file with the first bytes of an ELF executable.
    fn fake_elf(path: &Path) {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, b"\x7fELF\x02\x01\x01").unwrap();
    }

    fn paths(options: &HostOptions, below: &Path) -> Vec<String> {
        let found = candidates(options);
        let inside = found.iter().filter_map(|candidate| candidate.path.strip_prefix(below).ok());
        inside.map(|path| path.display().to_string()).collect()
    }

    #[test]
    fn every_place_is_searched_once_and_shims_loops_and_own_prefixes_are_passed_over() {
        let dir = tempfile::tempdir().unwrap();
        let root = fs::canonicalize(dir.path()).unwrap();
        let home = root.join("home");
        fake_elf(&root.join("first/bin/python3.12"));
        std::os::unix::fs::symlink("python3.12", root.join("first/bin/python3")).unwrap();
        std::os::unix::fs::symlink("loop", root.join("first/bin/python")).unwrap();
        std::os::unix::fs::symlink("python", root.join("first/bin/loop")).unwrap();
        fake_elf(&home.join(".pyenv/versions/3.11.7/bin/python3.11"));
        fake_elf(&home.join(".local/share/uv/python/cpython-3.13/bin/python3.13"));
        fake_elf(&root.join("conda/bin/python3.10"));
        fake_elf(&root.join("made/bin/python3.11"));
        fs::create_dir_all(root.join("made/conda-meta")).unwrap();
        fs::write(root.join("made/conda-meta/python-3.11.7-host_00000000_0.json"), "{}").unwrap();
        fs::create_dir_all(home.join(".conda")).unwrap();
        let listed = format!("{0}/conda\n{0}/made\n{0}/gone\nrelative\n\u{e4}\n", root.display());
        fs::write(home.join(".conda/environments.txt"), listed).unwrap();
        fs::create_dir_all(home.join(".pyenv/shims")).unwrap();
        fs::write(home.join(".pyenv/shims/python3"), "#!/bin/sh\n").unwrap();
        // A virtual environment made of copies leads to its base.
        fake_elf(&root.join("venv/bin/python3"));
        fs::write(root.join("venv/pyvenv.cfg"), format!("home = {}/first/bin\n", root.display())).unwrap();

        let path = ["venv/bin", "made/bin", "home/.pyenv/shims", "first/bin", "nowhere"].map(|part| root.join(part));
        let options = HostOptions {
            cache_dir: root.join("cache"),
            interpreter: None,
            path_env: Some(std::env::join_paths(path).unwrap()),
            home: Some(home),
            wanted: Vec::new(),
        };
        let expected = [
            "first/bin/python3.12",
            "home/.pyenv/versions/3.11.7/bin/python3.11",
            "home/.local/share/uv/python/cpython-3.13/bin/python3.13",
            "conda/bin/python3.10",
        ];
        assert_eq!(paths(&options, &root), expected);
    }

    #[test]
    fn the_stamp_changes_with_the_installation() {
        let dir = tempfile::tempdir().unwrap();
        let exe = dir.path().join("bin/python3.11");
        fake_elf(&exe);
        let before = named(&exe).unwrap();
        assert_eq!(before, named(&exe).unwrap());
        fs::create_dir_all(dir.path().join("lib")).unwrap();
        fs::write(dir.path().join("lib/libpython3.11.so.1.0"), "x").unwrap();
        assert_ne!(before.stamp, named(&exe).unwrap().stamp);
    }
}
