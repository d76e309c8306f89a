//! An installed CPython as a relocatable conda package.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Component, Path, PathBuf};
use std::str::FromStr;

use rattler_conda_types::package::{BuildString, IndexJson};
use rattler_conda_types::{NoArchType, PackageName, VersionWithSource};

use super::Trouble;
use super::archive::{PLACEHOLDER, Package, Stage, json};
use super::probe::Answer;
use super::system::{self, HostInfo, SystemLibrary};
use crate::elf::{self, ElfInfo, PathTag};

/// Versions before this one have been without any fixes for years and lay their files out differently.
const OLDEST_MINOR: u32 = 8;

/// What is left out of the standard library, as recorded in the package.
const LEFT_OUT: [&str; 5] = [
    "site-packages and dist-packages",
    "__pycache__",
    "static and object files of config-*",
    "tests of the standard library (test.support is kept)",
    "EXTERNALLY-MANAGED",
];

/// Folders with tests below the standard library.
const TESTS: [&str; 7] =
    ["lib2to3/tests", "idlelib/idle_test", "tkinter/test", "unittest/test", "ctypes/test", "distutils/tests", "sqlite3/test"];

/// The installation being packaged: its places relative to the prefix.
struct Home {
    /// The prefix with links resolved.
    prefix: PathBuf,
    /// The prefix in all ways that files may spell it, longest first.
    spellings: Vec<String>,
    /// `lib/python3.11`
    stdlib: String,
    /// `lib/python3.11`, or with `lib64`.
    platstdlib: String,
    /// `lib/python3.11/site-packages`
    site_packages: String,
    /// `include/python3.11`
    include: String,
    /// `python3.11`, `python3.13t`
    executable: String,
}

/// Checks what an interpreter says of itself.
///
/// # Errors
/// The reason why it is refused.
pub(super) fn judge(answer: &Answer) -> Result<(), String> {
    if answer.implementation != "cpython" {
        return Err(format!("it is {}, not CPython", answer.implementation));
    }
    if answer.major != 3 || answer.minor < OLDEST_MINOR {
        return Err(format!("it is Python {}, and `host` packages 3.{OLDEST_MINOR} and later", answer.version));
    }
    let prefix = &answer.base_prefix;
    if prefix == Path::new("/usr") || prefix == Path::new("/") {
        return Err("it belongs to the Linux distribution: its files are spread over `/usr` and cannot be relocated".into());
    }
    if answer.patched || answer.paths.get("purelib").is_some_and(|path| path.ends_with("dist-packages")) {
        return Err("it is patched by the Linux distribution (dist-packages, local install schemes) and cannot be relocated".into());
    }
    if answer.base_exec_prefix != *prefix {
        return Err(format!("its parts are spread over `{}` and `{}`", prefix.display(), answer.base_exec_prefix.display()));
    }
    Ok(())
}

/// Packages the installation behind `answer`. `stage`: a folder to work in; `out`: where the package goes; `subdir`: `linux-64`.
///
/// # Errors
/// A refusal with the reason when the installation cannot be relocated; a failure when the cache cannot be written.
pub(super) fn package(answer: &Answer, subdir: &str, stage: PathBuf, out: &Path) -> Result<Package, Trouble> {
    judge(answer).map_err(Trouble::Refuse)?;
    let home = Home::of(answer)?;
    let mut staged = Stage::new(stage)?;
    let mut parts = Parts::default();
    home.collect(&mut parts)?;
    let relocated = home.relocate(&mut parts)?;

    for (path, part) in &parts.0 {
        match part {
            Part::Link(target) => staged.link(path, target)?,
            Part::File { bytes, executable } => {
                let replaced = if home.names_prefix(path) { replace_prefix(bytes, &home.spellings) } else { None };
                match replaced {
                    Some(text) => staged.file(path, &text, *executable, true)?,
                    None => staged.file(path, bytes, *executable, false)?,
                }
            }
        }
    }
    for needed in [format!("bin/{}", home.executable), format!("{}/os.py", home.stdlib)] {
        if !staged.contains(&needed) {
            return Err(Trouble::Refuse(format!("it has no `{needed}`")));
        }
    }

    let Relocated { glibc, system_libraries, library_folders, blunted } = relocated;
    let Some((glibc_major, glibc_minor)) = glibc else {
        return Err(Trouble::Refuse("it is not built for the GNU C library".into()));
    };
    let depends = vec!["__linux".to_owned(), format!("__glibc >={glibc_major}.{glibc_minor}")];
    let info = HostInfo {
        format: 1,
        machine_bound: true,
        version: answer.version.clone(),
        glibc: format!("{glibc_major}.{glibc_minor}"),
        system_libraries,
        library_folders,
        left_out: LEFT_OUT.map(str::to_owned).to_vec(),
        blunted,
    };
    let info_bytes = json(&info)?;
    let hash = staged.fingerprint(&[&depends.join("\n"), &String::from_utf8_lossy(&info_bytes)]);
    let failed = |error: &dyn std::fmt::Display| Trouble::Refuse(format!("its version `{}` is odd: {error}", answer.version));
    let (platform, arch) = match subdir.split_once('-') {
        Some(("linux", "64")) => (Some("linux".to_owned()), Some("x86_64".to_owned())),
        Some((platform, arch)) => (Some(platform.to_owned()), Some(arch.to_owned())),
        None => (None, None),
    };
    let index = IndexJson {
        arch,
        build: BuildString::from_str(&format!("host_{hash}_0")).map_err(|error| failed(&error))?,
        build_number: 0,
        constrains: Vec::new(),
        depends,
        extra_depends: BTreeMap::new(),
        features: None,
        flags: Vec::new(),
        license: Some("Python-2.0".to_owned()),
        license_family: Some("PSF".to_owned()),
        name: PackageName::from_str("python").map_err(|error| failed(&error))?,
        noarch: NoArchType::none(),
        platform,
        purls: None,
        python_site_packages_path: Some(home.site_packages.clone()),
        repodata_revision: None,
        subdir: Some(subdir.to_owned()),
        timestamp: None,
        track_features: Vec::new(),
        version: VersionWithSource::from_str(&answer.version).map_err(|error| failed(&error))?,
    };
    let about = serde_json::json!({
        "home": "https://www.python.org/",
        "license": "Python-2.0",
        "summary": "CPython as it is installed on this machine, made relocatable",
        "description": "Bound to the machine it was made on: it uses the system's shared libraries, see info/host.json.",
        "extra": { "tare": { "channel": "host", "machine_bound": true } },
    });
    let mut files = BTreeMap::from([("host.json".to_owned(), info_bytes), ("about.json".to_owned(), json(&about)?)]);
    if let Some(Part::File { bytes, .. }) = parts.0.get(&format!("{}/LICENSE.txt", home.stdlib)) {
        files.insert("licenses/LICENSE.txt".to_owned(), bytes.clone());
    }
    Ok(staged.finish(&index, &files, out)?)
}

/// One thing to be packaged.
enum Part {
    File {
        bytes: Vec<u8>,
        executable: bool,
    },
    /// The target, relative to the link's folder.
    Link(String),
}

/// By path relative to the prefix, with `/`.
#[derive(Default)]
struct Parts(BTreeMap<String, Part>);

/// What was learnt while the ELF files were edited.
struct Relocated {
    glibc: Option<(u32, u32)>,
    system_libraries: Vec<SystemLibrary>,
    /// Folders outside the prefix that a search path names and that hold a library in use.
    library_folders: Vec<String>,
    /// Files in which the compiled-in prefix was made to lead nowhere.
    blunted: Vec<String>,
}

impl Home {
    fn of(answer: &Answer) -> Result<Self, Trouble> {
        let prefix = fs::canonicalize(&answer.base_prefix)
            .map_err(|error| Trouble::Refuse(format!("its prefix `{}` cannot be read: {error}", answer.base_prefix.display())))?;
        let below = |name: &str| -> Result<String, Trouble> {
            let path = answer.paths.get(name).ok_or_else(|| Trouble::Refuse(format!("it does not tell its `{name}` folder")))?;
            // The folder may not exist yet (site-packages), its prefix does.
            let full = path.strip_prefix(&answer.base_prefix).map(|rest| prefix.join(rest)).unwrap_or_else(|_| path.clone());
            let full = fs::canonicalize(&full).unwrap_or(full);
            let inside = full.strip_prefix(&prefix).ok().and_then(relative_text);
            inside.ok_or_else(|| {
                Trouble::Refuse(format!("its `{name}` folder `{}` lies outside its prefix `{}`", path.display(), prefix.display()))
            })
        };
        let mut spellings: Vec<String> = [&answer.base_prefix, &prefix, &PathBuf::from(&answer.built_prefix)]
            .iter()
            .filter(|path| path.is_absolute() && path.components().count() > 1)
            .filter_map(|path| path.to_str().map(|text| text.trim_end_matches('/').to_owned()))
            .collect();
        spellings.sort_by(|a, b| b.len().cmp(&a.len()).then_with(|| a.cmp(b)));
        spellings.dedup();
        let flags: String = answer.abiflags.chars().filter(|flag| "td".contains(*flag)).collect();
        let names = [format!("python3.{}{flags}", answer.minor), format!("python3.{}", answer.minor), "python3".to_owned()];
        let executable = names.iter().find(|name| prefix.join("bin").join(name).is_file());
        let executable = executable.ok_or_else(|| Trouble::Refuse(format!("it has no `{}/bin/{}`", prefix.display(), names[1])))?;
        Ok(Home {
            stdlib: below("stdlib")?,
            platstdlib: below("platstdlib")?,
            site_packages: below("purelib")?,
            include: below("include")?,
            executable: executable.clone(),
            spellings,
            prefix,
        })
    }

    /// `lib` or `lib64`: where libpython and other libraries of the package go.
    fn lib(&self) -> &str {
        self.stdlib.split('/').next().unwrap_or("lib")
    }

    /// `3.11`, `3.13t`
    fn short(&self) -> &str {
        self.executable.strip_prefix("python").unwrap_or("3")
    }

    /// Whether a file is one of those that the build writes the prefix into on purpose. Other files only mention paths
    /// (`/usr/local/etc/…` in mimetypes.py) and stay as they are.
    fn names_prefix(&self, path: &str) -> bool {
        let (folder, name) = path.rsplit_once('/').unwrap_or(("", path));
        let generated = name.starts_with("_sysconfigdata") || name.starts_with("_sysconfig_vars") || name == "build-details.json";
        folder == "bin" || folder.ends_with("/pkgconfig") || folder.contains("/config-") || generated
    }

    fn collect(&self, parts: &mut Parts) -> Result<(), Trouble> {
        self.collect_bin(parts)?;
        self.collect_tree(parts, &self.stdlib)?;
        if self.platstdlib != self.stdlib {
            self.collect_tree(parts, &self.platstdlib)?;
        }
        if self.prefix.join(&self.include).is_dir() {
            self.collect_tree(parts, &self.include)?;
        }
        let short = self.short().to_owned();
        for lib in BTreeSet::from([self.lib(), "lib"]) {
            let full = format!("libpython{short}");
            for name in self.names(lib) {
                if name.strip_prefix(&full).is_some_and(|rest| rest.starts_with(".so")) {
                    self.add(parts, &format!("{lib}/{name}"))?;
                }
            }
            let stable = format!("{lib}/libpython3.so");
            // The stable-ABI library belongs to the version it loads.
            let belongs = fs::read(self.prefix.join(&stable))
                .ok()
                .and_then(|bytes| elf::read(&bytes).ok())
                .is_some_and(|info| info.needed.iter().any(|needed| needed.starts_with(&format!("{full}.so"))));
            if belongs {
                self.add(parts, &stable)?;
            }
            let folder = format!("{lib}/pkgconfig");
            for name in self.names(&folder) {
                if name == format!("python-{short}.pc") || name == format!("python-{short}-embed.pc") {
                    self.add(parts, &format!("{folder}/{name}"))?;
                    let general = if name.ends_with("-embed.pc") { "python3-embed.pc" } else { "python3.pc" };
                    parts.0.insert(format!("{folder}/{general}"), Part::Link(name));
                }
            }
        }
        let page = format!("share/man/man1/python{short}.1");
        if self.prefix.join(&page).is_file() {
            self.add(parts, &page)?;
        }
        Ok(())
    }

    /// The interpreter and its own scripts, and the general names that point to them.
    fn collect_bin(&self, parts: &mut Parts) -> Result<(), Trouble> {
        let short = self.short();
        for (stem, suffix, general) in [
            ("python", "", ["python", "python3"].as_slice()),
            ("python", "-config", &["python-config", "python3-config"]),
            ("pydoc", "", &["pydoc", "pydoc3"]),
            ("idle", "", &["idle", "idle3"]),
            ("2to3-", "", &["2to3"]),
        ] {
            let name = format!("{stem}{short}{suffix}");
            if !self.prefix.join("bin").join(&name).is_file() {
                continue;
            }
            self.add_resolved(parts, &format!("bin/{name}"))?;
            for general in general.iter().filter(|general| **general != name) {
                parts.0.insert(format!("bin/{general}"), Part::Link(name.clone()));
            }
        }
        Ok(())
    }

    /// File names in a folder below the prefix, sorted; nothing if it cannot be read.
    fn names(&self, folder: &str) -> Vec<String> {
        let Ok(entries) = fs::read_dir(self.prefix.join(folder)) else { return Vec::new() };
        let mut names: Vec<_> = entries.filter_map(Result::ok).filter_map(|entry| entry.file_name().into_string().ok()).collect();
        names.sort();
        names
    }

    fn collect_tree(&self, parts: &mut Parts, top: &str) -> Result<(), Trouble> {
        let mut folders = VecDeque::from([top.to_owned()]);
        while let Some(folder) = folders.pop_front() {
            let at = self.prefix.join(&folder);
            let unreadable = |error: std::io::Error| Trouble::Refuse(format!("`{}` cannot be read: {error}", at.display()));
            for entry in fs::read_dir(&at).map_err(unreadable)? {
                let entry = entry.map_err(unreadable)?;
                let Ok(name) = entry.file_name().into_string() else {
                    return Err(Trouble::Refuse(format!("a file name in `{}` is not UTF-8", at.display())));
                };
                let path = format!("{folder}/{name}");
                if self.is_left_out(&path) {
                    continue;
                }
                let kind = entry.file_type().map_err(unreadable)?;
                if kind.is_dir() {
                    folders.push_back(path);
                } else if kind.is_file() || kind.is_symlink() {
                    self.add(parts, &path)?;
                }
                // Sockets and the like are no part of a standard library.
            }
        }
        Ok(())
    }

    fn is_left_out(&self, path: &str) -> bool {
        let name = path.rsplit('/').next().unwrap_or(path);
        if path == self.site_packages || matches!(name, "__pycache__" | "site-packages" | "dist-packages" | "EXTERNALLY-MANAGED") {
            return true;
        }
        let inside = [&self.stdlib, &self.platstdlib].into_iter().find_map(|top| path.strip_prefix(&format!("{top}/")));
        let Some(inside) = inside else { return false };
        if let Some(rest) = inside.strip_prefix("test/") {
            return !(rest == "__init__.py" || rest == "support" || rest.starts_with("support/"));
        }
        if TESTS.contains(&inside) {
            return true;
        }
        let top = inside.split('/').next().unwrap_or(inside);
        match top {
            "lib-dynload" => name.starts_with("_test") || name.starts_with("_xxtest") || name.starts_with("_ctypes_test"),
            _ if top.starts_with("config-") => name.ends_with(".a") || name.ends_with(".o"),
            _ => false,
        }
    }

    /// Adds a file or link. A link that stays inside the package stays a link; any other is followed.
    fn add(&self, parts: &mut Parts, path: &str) -> Result<(), Trouble> {
        let at = self.prefix.join(path);
        let unreadable = |error: std::io::Error| Trouble::Refuse(format!("`{}` cannot be read: {error}", at.display()));
        if !fs::symlink_metadata(&at).map_err(unreadable)?.is_symlink() {
            return self.add_resolved(parts, path);
        }
        // A dangling or looping link leads nowhere here either.
        let Ok(full) = fs::canonicalize(&at) else { return Ok(()) };
        let folder = path.rsplit_once('/').map_or("", |(folder, _)| folder);
        let same_folder = full.parent() == fs::canonicalize(self.prefix.join(folder)).ok().as_deref();
        if same_folder
            && full.is_file()
            && let Some(name) = full.file_name().and_then(|name| name.to_str())
        {
            // Its target comes along, whatever its name.
            if !parts.0.contains_key(&format!("{folder}/{name}")) {
                self.add_resolved(parts, &format!("{folder}/{name}"))?;
            }
            parts.0.insert(path.to_owned(), Part::Link(name.to_owned()));
            return Ok(());
        }
        if full.is_file() { self.add_resolved(parts, path) } else { Ok(()) }
    }

    /// Adds the file that `path` leads to, under the name `path`.
    fn add_resolved(&self, parts: &mut Parts, path: &str) -> Result<(), Trouble> {
        let at = self.prefix.join(path);
        let unreadable = |error: std::io::Error| Trouble::Refuse(format!("`{}` cannot be read: {error}", at.display()));
        let executable = fs::metadata(&at).map_err(unreadable)?.permissions().mode() & 0o111 != 0;
        let bytes = fs::read(&at).map_err(unreadable)?;
        parts.0.insert(path.to_owned(), Part::File { bytes, executable });
        Ok(())
    }

    /// Brings private libraries along, gives every ELF file a search path inside the package, and notes what stays the system's.
    fn relocate(&self, parts: &mut Parts) -> Result<Relocated, Trouble> {
        let lib = self.lib().to_owned();
        let mut infos = BTreeMap::new();
        let mut queue: VecDeque<String> = VecDeque::new();
        for (path, part) in &parts.0 {
            if matches!(part, Part::File { bytes, .. } if elf::is_elf(bytes)) {
                queue.push_back(path.clone());
            }
        }
        let executable = format!("bin/{}", self.executable);
        let mut machine = None;
        // The folders a library was found in, by the package's path of the file: an added library's `$ORIGIN` is its old place.
        let mut origins: BTreeMap<String, PathBuf> = BTreeMap::new();
        while let Some(path) = queue.pop_front() {
            let Some(Part::File { bytes, .. }) = parts.0.get(&path) else { continue };
            let info = elf::read(bytes).map_err(|why| Trouble::Refuse(format!("`{path}` cannot be read: {why}")))?;
            if path == executable {
                machine = Some(info.machine);
                if info.interpreter.as_deref().is_some_and(|loader| loader.contains("musl")) {
                    return Err(Trouble::Refuse("it is built for the musl C library".into()));
                }
            }
            let origin = origins.get(&path).cloned().unwrap_or_else(|| self.folder_of(&path));
            for soname in &info.needed {
                let packaged = format!("{lib}/{soname}");
                if soname.contains('/') || parts.0.contains_key(&packaged) {
                    continue;
                }
                let own = info.search_paths.iter().flat_map(|(_, path)| expand(path, &origin));
                let mut folders: Vec<PathBuf> = own.chain([self.prefix.join(&lib)]).collect();
                folders.dedup();
                let found = folders.iter().map(|folder| folder.join(soname)).find(|file| self.holds(file));
                if let Some(found) = found
                    && let Ok(bytes) = fs::read(&found)
                    && elf::is_elf(&bytes)
                {
                    if let Some(folder) = found.parent() {
                        origins.insert(packaged.clone(), folder.to_path_buf());
                    }
                    parts.0.insert(packaged.clone(), Part::File { bytes, executable: true });
                    queue.push_back(packaged);
                }
            }
            infos.insert(path, info);
        }
        self.collect_tcl(parts)?;

        let Some(machine) = machine else { return Err(Trouble::Refuse(format!("`{executable}` is not an ELF file"))) };
        let mut glibc = None;
        let mut users: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
        let mut library_folders = BTreeSet::new();
        let mut blunted = Vec::new();
        for (path, info) in &infos {
            glibc = glibc.max(info.glibc);
            let origin = origins.get(path).cloned().unwrap_or_else(|| self.folder_of(path));
            let is_packaged = |soname: &String| parts.0.contains_key(&format!("{lib}/{soname}"));
            let outside: Vec<&String> = info.needed.iter().filter(|soname| !is_packaged(soname)).collect();
            let kept = self.kept_folders(info, &origin, &outside);
            for soname in &outside {
                users.entry((*soname).clone()).or_default().insert(path.clone());
            }
            let wants_own = info.needed.iter().any(is_packaged);
            library_folders.extend(kept.iter().cloned());
            let edits = new_search_paths(info, &to_lib(path, &lib), &kept, wants_own);
            let embeds = path == &executable || info.soname.as_ref().is_some_and(|soname| soname.starts_with("libpython"));
            let Some(Part::File { bytes, .. }) = parts.0.get_mut(path) else { continue };
            for (tag, value) in edits {
                *bytes = elf::set_search_path(bytes, tag, &value)
                    .map_err(|why| Trouble::Refuse(format!("`{path}` cannot be given the search path `{value}`: {why}")))?;
            }
            if embeds {
                let mut count = 0;
                for old in &self.spellings {
                    count += elf::blunt_embedded_path(bytes, old).map_err(|why| Trouble::Refuse(format!("`{path}`: {why}")))?;
                }
                if count > 0 {
                    blunted.push(path.clone());
                }
            }
        }
        let library_folders: Vec<String> = library_folders.into_iter().collect();
        let places = system::folders(&library_folders);
        let system_libraries = users
            .into_iter()
            .map(|(soname, users)| SystemLibrary {
                present: system::find(&soname, machine, &places).is_some(),
                soname,
                needed_by: users.into_iter().collect(),
            })
            .collect();
        Ok(Relocated { glibc, system_libraries, library_folders, blunted })
    }

    /// Tcl and Tk read scripts from folders beside their libraries: they come along when the libraries do.
    fn collect_tcl(&self, parts: &mut Parts) -> Result<(), Trouble> {
        let lib = self.lib();
        let brought = |name: &str| parts.0.keys().any(|path| path.starts_with(&format!("{lib}/lib{name}")));
        let wanted: Vec<&str> = ["tcl", "tk"].into_iter().filter(|name| brought(name)).collect();
        for name in self.names(lib) {
            let version = wanted.iter().find_map(|stem| name.strip_prefix(stem));
            let is_version = version.is_some_and(|rest| rest.starts_with(|first: char| first.is_ascii_digit()));
            if is_version && self.prefix.join(lib).join(&name).is_dir() {
                self.collect_tree(parts, &format!("{lib}/{name}"))?;
            }
        }
        Ok(())
    }

    /// The real folder of a packaged path.
    fn folder_of(&self, path: &str) -> PathBuf {
        let folder = path.rsplit_once('/').map_or("", |(folder, _)| folder);
        let full = self.prefix.join(folder);
        fs::canonicalize(&full).unwrap_or(full)
    }

    /// Whether a file exists and its folder is inside the prefix.
    fn holds(&self, file: &Path) -> bool {
        let folder = file.parent().and_then(|folder| fs::canonicalize(folder).ok());
        folder.is_some_and(|folder| folder.starts_with(&self.prefix)) && file.is_file()
    }

    /// Absolute folders of the old search paths that lie outside the prefix and hold one of the libraries `outside`.
    fn kept_folders(&self, info: &ElfInfo, origin: &Path, outside: &[&String]) -> Vec<String> {
        let mut kept = Vec::new();
        for folder in info.search_paths.iter().flat_map(|(_, path)| expand(path, origin)) {
            let Ok(real) = fs::canonicalize(&folder) else { continue };
            let useful = outside.iter().any(|soname| real.join(soname).is_file());
            if let Some(text) = real.to_str()
                && useful
                && !real.starts_with(&self.prefix)
                && !text.contains([':', '$'])
                && !kept.iter().any(|known| known == text)
            {
                kept.push(text.to_owned());
            }
        }
        kept
    }
}

/// The folders of a search path with `$ORIGIN` put in. Relative and empty entries (the current folder) are dropped: what they
/// mean depends on where a program is started.
fn expand(search_path: &str, origin: &Path) -> Vec<PathBuf> {
    let origin = origin.to_string_lossy();
    search_path
        .split(':')
        .map(|entry| PathBuf::from(entry.replace("${ORIGIN}", &origin).replace("$ORIGIN", &origin)))
        .filter(|folder| folder.is_absolute())
        .collect()
}

/// The search paths to set: our own folder first if a packaged library is wanted, then `kept`. A file that has no search path and
/// wants no packaged library is left alone.
fn new_search_paths(info: &ElfInfo, own: &str, kept: &[String], wants_own: bool) -> Vec<(PathTag, String)> {
    if info.search_paths.is_empty() && !wants_own {
        return Vec::new();
    }
    let entries = std::iter::once(own.to_owned()).chain(kept.iter().cloned());
    let value = entries.collect::<Vec<_>>().join(":");
    let tags: BTreeSet<PathTag> = info.search_paths.iter().map(|(tag, _)| *tag).collect();
    if tags.is_empty() {
        return vec![(PathTag::Runpath, value)];
    }
    tags.into_iter().map(|tag| (tag, value.clone())).collect()
}

/// `bin/python3.11` -> `$ORIGIN/../lib`, `lib/x.so` -> `$ORIGIN`, `lib/python3.11/lib-dynload/x.so` -> `$ORIGIN/../..`.
fn to_lib(path: &str, lib: &str) -> String {
    let folder: Vec<&str> = path.split('/').rev().skip(1).collect::<Vec<_>>().into_iter().rev().collect();
    let mut out = "$ORIGIN".to_owned();
    if folder.first() == Some(&lib) {
        out.push_str(&"/..".repeat(folder.len() - 1));
    } else {
        out.push_str(&"/..".repeat(folder.len()));
        out.push('/');
        out.push_str(lib);
    }
    out
}

/// A relative path as text with `/`; none if it is not plain (`..`) or not UTF-8 or empty.
fn relative_text(path: &Path) -> Option<String> {
    let parts: Option<Vec<&str>> = path
        .components()
        .map(|part| match part {
            Component::Normal(name) => name.to_str(),
            _ => None,
        })
        .collect();
    parts.filter(|parts| !parts.is_empty()).map(|parts| parts.join("/"))
}

/// Replaces every whole-path occurrence of the prefixes by the placeholder. None if there is none. Works on bytes: the text may be
/// in any encoding that keeps ASCII.
fn replace_prefix(bytes: &[u8], prefixes: &[String]) -> Option<Vec<u8>> {
    if elf::is_elf(bytes) {
        return None;
    }
    let mut out = Vec::with_capacity(bytes.len());
    let mut at = 0;
    let mut changed = false;
    while at < bytes.len() {
        let rest = &bytes[at..];
        let hit = if rest[0] == b'/' && may_start(&bytes[..at]) {
            prefixes.iter().find(|prefix| rest.starts_with(prefix.as_bytes()) && may_end(&rest[prefix.len()..]))
        } else {
            None
        };
        match hit {
            Some(prefix) => {
                out.extend_from_slice(PLACEHOLDER.as_bytes());
                at += prefix.len();
                changed = true;
            }
            None => {
                out.push(rest[0]);
                at += 1;
            }
        }
    }
    changed.then_some(out)
}

/// Whether a path can start after `before`: not within a longer path, but right after `-L`, `-I` and the like, and after the
/// lone dot with which the Makefile writes a path below a staging folder.
fn may_start(before: &[u8]) -> bool {
    match before {
        [head @ .., b'.'] if !head.ends_with(b".") && !head.ends_with(b"/") && !head.last().is_some_and(u8::is_ascii_alphanumeric) => true,
        [.., b'-', b'L' | b'I' | b'R' | b'F'] => true,
        [.., last] => !(last.is_ascii_alphanumeric() || matches!(last, b'_' | b'-' | b'.' | b'/' | 0x80..)),
        [] => true,
    }
}

/// Whether a path component ends before `after`.
fn may_end(after: &[u8]) -> bool {
    match after {
        [b'.', next, ..] => !next.is_ascii_alphanumeric(),
        [next, ..] => !(next.is_ascii_alphanumeric() || matches!(next, b'_' | b'-' | 0x80..)),
        [] => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(prefix: &str) -> Answer {
        let paths = [("stdlib", "lib/python3.11"), ("purelib", "lib/python3.11/site-packages")];
        Answer {
            implementation: "cpython".into(),
            version: "3.11.7".into(),
            major: 3,
            minor: 11,
            base_prefix: prefix.into(),
            base_exec_prefix: prefix.into(),
            built_prefix: prefix.into(),
            abiflags: String::new(),
            wheels: String::new(),
            patched: false,
            paths: paths.iter().map(|(name, path)| ((*name).to_owned(), Path::new(prefix).join(path))).collect(),
        }
    }

    #[test]
    fn what_cannot_be_relocated_is_refused_with_the_reason() {
        assert_eq!(judge(&answer("/opt/python")), Ok(()));
        let reason = |change: &dyn Fn(&mut Answer)| {
            let mut answer = answer("/opt/python");
            change(&mut answer);
            judge(&answer).unwrap_err()
        };
        assert_eq!(reason(&|a| a.implementation = "pypy".into()), "it is pypy, not CPython");
        assert_eq!(
            reason(&|a| (a.version, a.major, a.minor) = ("2.7.18".into(), 2, 7)),
            "it is Python 2.7.18, and `host` packages 3.8 and later"
        );
        assert!(reason(&|a| a.base_prefix = "/usr".into()).contains("belongs to the Linux distribution"));
        assert!(reason(&|a| a.patched = true).contains("patched by the Linux distribution"));
        assert!(reason(&|a| drop(a.paths.insert("purelib".into(), "/opt/python/lib/python3/dist-packages".into()))).contains("patched"));
        assert_eq!(reason(&|a| a.base_exec_prefix = "/opt/arch".into()), "its parts are spread over `/opt/python` and `/opt/arch`");
    }

    #[test]
    fn search_paths_lead_to_the_library_folder() {
        assert_eq!(to_lib("bin/python3.11", "lib"), "$ORIGIN/../lib");
        assert_eq!(to_lib("lib/libpython3.11.so.1.0", "lib"), "$ORIGIN");
        assert_eq!(to_lib("lib/python3.11/lib-dynload/_ssl.so", "lib"), "$ORIGIN/../..");
        assert_eq!(to_lib("lib/python3.11/lib-dynload/_ssl.so", "lib64"), "$ORIGIN/../../../lib64");
    }

    #[test]
    fn search_paths_drop_the_current_folder_and_know_both_forms_of_origin() {
        let folders = expand("/a:$ORIGIN/../lib::lib:${ORIGIN}/x", Path::new("/p/bin"));
        assert_eq!(folders, ["/a", "/p/bin/../lib", "/p/bin/x"].map(PathBuf::from));
    }

    #[test]
    fn only_whole_paths_are_replaced_and_other_bytes_kept() {
        let prefixes = vec!["/opt/py/3.11.7".to_owned(), "/opt/py".to_owned()];
        let text = b"a=/opt/py/3.11.7/lib -L/opt/py/3.11.7/lib '/opt/py' /opt/pypy /x/opt/py /opt/py-2 /opt/py.d ./opt/py/x a./opt/py ../opt/py end /opt/py.\xff\n";
        let replaced = replace_prefix(text, &prefixes).unwrap();
        let back = String::from_utf8_lossy(&replaced).replace(PLACEHOLDER, "@");
        assert_eq!(back, "a=@/lib -L@/lib '@' /opt/pypy /x/opt/py /opt/py-2 /opt/py.d .@/x a./opt/py ../opt/py end @.\u{fffd}\n");
        assert_eq!(replace_prefix(b"nothing here", &prefixes), None);
        assert_eq!(replace_prefix(b"\x7fELF /opt/py", &prefixes), None);
    }
}
