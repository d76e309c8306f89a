//! The system's shared libraries that a package of the `host` channel uses, and whether this machine has them.

use std::fs;
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};

/// `info/host.json` of a `python` package of the `host` channel.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct HostInfo {
    /// Version of this file's format: 1.
    pub format: u32,
    /// The package only promises to work on the machine it was made on.
    pub machine_bound: bool,
    /// Version of the interpreter, for instance `3.11.7`.
    pub version: String,
    /// The C library that the package's files need at least, for instance `2.34`.
    pub glibc: String,
    /// Shared libraries that are not in the package, sorted by name.
    pub system_libraries: Vec<SystemLibrary>,
    /// Absolute folders, outside the standard ones, in which files of the package look for such libraries.
    pub library_folders: Vec<String>,
    /// What the installation had and the package has not, in words.
    pub left_out: Vec<String>,
    /// Files in which the compiled-in path of the installation was made to lead nowhere.
    pub blunted: Vec<String>,
}

/// A shared library that stays the system's.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct SystemLibrary {
    /// The name that the loader looks for, for instance `libssl.so.3`.
    pub soname: String,
    /// Whether the machine had it when the package was made. A module that could not be imported then is not expected to work.
    pub present: bool,
    /// Files of the package that need it, relative to the prefix.
    pub needed_by: Vec<String>,
}

/// Reads `info/host.json` of an unpacked package or of one that was laid down by hand; none if it is no `python` of the `host` channel.
///
/// # Errors
/// The file is there and cannot be read or understood.
pub fn host_info(package: &Path) -> Result<Option<HostInfo>> {
    let path = package.join("info/host.json");
    let bytes = match fs::read(&path) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(Error::io("read", &path, &error)),
    };
    serde_json::from_slice(&bytes).map(Some).map_err(|error| Error::failure(format!("cannot read `{}`", path.display())).because(error))
}

/// Names of the shared libraries that an unpacked package of the `host` channel needs of the system and that this machine lacks.
/// Empty for any other package. Libraries that were missing when the package was made are not counted.
///
/// Looks where the loader looks, but for LD_LIBRARY_PATH: the folders recorded in the package, those of `/etc/ld.so.conf`, and the
/// standard ones (`ld.so(8)`), for a file of this machine's ELF class and architecture.
///
/// # Errors
/// As [`host_info`].
pub fn check_system_libraries(package: &Path) -> Result<Vec<String>> {
    let Some(info) = host_info(package)? else { return Ok(Vec::new()) };
    let places = folders(&info.library_folders);
    let machine = this_machine();
    let missing = info.system_libraries.into_iter().filter(|library| library.present && find(&library.soname, machine, &places).is_none());
    Ok(missing.map(|library| library.soname).collect())
}

/// `e_machine` of the architecture this program was built for; 0 where it is not known.
fn this_machine() -> u16 {
    match std::env::consts::ARCH {
        "x86_64" => object::elf::EM_X86_64,
        "aarch64" => object::elf::EM_AARCH64,
        "powerpc64" => object::elf::EM_PPC64,
        "s390x" => object::elf::EM_S390,
        "riscv64" => object::elf::EM_RISCV,
        _ => 0,
    }
}

/// The folders that the loader searches, `first` before all others.
pub(super) fn folders(first: &[String]) -> Vec<PathBuf> {
    let mut out: Vec<PathBuf> = first.iter().map(PathBuf::from).collect();
    read_config(Path::new("/etc/ld.so.conf"), 0, &mut out);
    let triple = match std::env::consts::ARCH {
        "powerpc64" => "powerpc64le-linux-gnu".to_owned(),
        arch => format!("{arch}-linux-gnu"),
    };
    for root in ["/lib", "/usr/lib"] {
        out.push(Path::new(root).join(&triple));
        out.push(PathBuf::from(format!("{root}64")));
        out.push(PathBuf::from(root));
    }
    out
}

/// Folders of an ld.so.conf, with its `include` lines followed (a `*` in the last part only, as every distribution has it).
fn read_config(path: &Path, depth: u32, out: &mut Vec<PathBuf>) {
    if depth > 4 {
        return;
    }
    let text = fs::read(path).unwrap_or_default();
    for line in String::from_utf8_lossy(&text).lines() {
        let line = line.split('#').next().unwrap_or_default().trim();
        if let Some(pattern) = line.strip_prefix("include").filter(|rest| rest.starts_with(char::is_whitespace)) {
            let pattern = path.parent().unwrap_or(Path::new("/")).join(pattern.trim());
            for file in matching(&pattern) {
                read_config(&file, depth + 1, out);
            }
        } else if line.starts_with('/') {
            out.push(PathBuf::from(line));
        }
    }
}

fn matching(pattern: &Path) -> Vec<PathBuf> {
    let (Some(folder), Some(name)) = (pattern.parent(), pattern.file_name().and_then(|name| name.to_str())) else { return Vec::new() };
    let Some((start, end)) = name.split_once('*') else { return vec![pattern.to_path_buf()] };
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    let fits = |name: &str| name.len() >= start.len() + end.len() && name.starts_with(start) && name.ends_with(end);
    let mut files: Vec<_> =
        entries.filter_map(Result::ok).filter(|entry| entry.file_name().to_str().is_some_and(fits)).map(|entry| entry.path()).collect();
    files.sort();
    files
}

/// The first file of that name in `folders` that is a 64-bit ELF file for `machine` (any machine if 0).
pub(super) fn find(soname: &str, machine: u16, folders: &[PathBuf]) -> Option<PathBuf> {
    use std::io::Read;
    if soname.contains('/') {
        return Some(PathBuf::from(soname)).filter(|path| path.is_file());
    }
    folders.iter().map(|folder| folder.join(soname)).find(|path| {
        let mut start = [0; 20];
        let read = path.is_file() && fs::File::open(path).and_then(|mut file| file.read_exact(&mut start)).is_ok();
        let number = if start[5] == 2 { u16::from_be_bytes([start[18], start[19]]) } else { u16::from_le_bytes([start[18], start[19]]) };
        read && start.starts_with(b"\x7fELF") && start[4] == 2 && (machine == 0 || number == machine)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_libraries_are_named_and_those_missing_from_the_start_are_not() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(check_system_libraries(dir.path()).unwrap(), Vec::<String>::new());
        let library = |soname: &str, present| SystemLibrary { soname: soname.into(), present, needed_by: vec!["bin/python3.11".into()] };
        let own = dir.path().join("own");
        fs::create_dir(&own).unwrap();
        let mut elf = b"\x7fELF\x02\x01\x01".to_vec();
        elf.resize(18, 0);
        elf.extend_from_slice(&this_machine().to_le_bytes());
        fs::write(own.join("libown.so.1"), &elf).unwrap();
        elf[4] = 1;
        fs::write(own.join("libother-class.so.1"), &elf).unwrap();
        let info = HostInfo {
            format: 1,
            machine_bound: true,
            version: "3.11.7".into(),
            glibc: "2.17".into(),
            system_libraries: vec![
                library("libgone-for-good.so.9", true),
                library("libnever-there.so.9", false),
                library("libother-class.so.1", true),
                library("libown.so.1", true),
            ],
            library_folders: vec![own.to_string_lossy().into_owned()],
            left_out: Vec::new(),
            blunted: Vec::new(),
        };
        fs::create_dir(dir.path().join("info")).unwrap();
        fs::write(dir.path().join("info/host.json"), serde_json::to_vec(&info).unwrap()).unwrap();
        assert_eq!(check_system_libraries(dir.path()).unwrap(), ["libgone-for-good.so.9", "libother-class.so.1"]);
        fs::write(dir.path().join("info/host.json"), "{").unwrap();
        assert!(check_system_libraries(dir.path()).unwrap_err().to_string().contains("host.json"));
    }

    #[test]
    fn ld_so_conf_is_read_with_its_includes_and_loops_end() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("conf.d")).unwrap();
        fs::write(dir.path().join("ld.so.conf"), "# x\n/first # why\ninclude conf.d/*.conf\ninclude ld.so.conf\nrelative\n").unwrap();
        fs::write(dir.path().join("conf.d/b.conf"), "/second\n").unwrap();
        fs::write(dir.path().join("conf.d/b.txt"), "/not this\n").unwrap();
        let mut out = Vec::new();
        read_config(&dir.path().join("ld.so.conf"), 0, &mut out);
        assert_eq!(out[..2], ["/first", "/second"].map(PathBuf::from));
        assert!(!out.contains(&PathBuf::from("/not this")));
    }
}
