//! Names of environments and where they are.

use std::collections::HashSet;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::error::{Error, Result};
use crate::install::{Stamp, environments_file};

/// The environment a command is about.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Which {
    /// `-n`.
    pub name: Option<String>,
    /// `-p`.
    pub prefix: Option<PathBuf>,
}

/// Where environments are looked for.
#[derive(Debug, Clone)]
pub struct Places {
    /// Folders of named environments, first one for new ones (`--root`, TARE_ROOT, `envs_dirs`, else `~/.local/share/tare/envs`).
    pub envs_dirs: Vec<PathBuf>,
    /// The user's home folder.
    pub home: Option<PathBuf>,
    /// The active environment: CONDA_PREFIX.
    pub active: Option<PathBuf>,
    /// More folders of environments of other tools, such as MAMBA_ROOT_PREFIX/envs.
    pub other_dirs: Vec<PathBuf>,
    /// A name means an environment of the first folder and no other: the root was named for this call.
    pub only_root: bool,
}

impl Places {
    /// Places for the given environments directories, with what the process environment says of the rest.
    pub fn new(envs_dirs: Vec<PathBuf>, home: Option<PathBuf>, env: impl Fn(&str) -> Option<String>) -> Self {
        let set = |key: &str| env(key).filter(|value| !value.is_empty()).map(PathBuf::from);
        let mut other_dirs = Vec::new();
        other_dirs.extend(set("MAMBA_ROOT_PREFIX").map(|root| root.join("envs")));
        other_dirs.extend(set("CONDA_EXE").and_then(|exe| Some(exe.parent()?.parent()?.join("envs"))));
        if let Some(home) = &home {
            other_dirs.push(home.join(".conda/envs"));
            other_dirs
                .extend(["micromamba", "miniforge3", "mambaforge", "miniconda3", "anaconda3"].map(|name| home.join(name).join("envs")));
            other_dirs.push(home.join(".local/share/mamba/envs"));
        }
        other_dirs.push(PathBuf::from("/opt/conda/envs"));
        Places { envs_dirs, home, active: set("CONDA_PREFIX"), other_dirs, only_root: false }
    }

    fn all_dirs(&self) -> impl Iterator<Item = &PathBuf> {
        self.envs_dirs.iter().chain(&self.other_dirs)
    }

    fn registered(&self) -> Vec<PathBuf> {
        let Some(home) = &self.home else { return Vec::new() };
        let Ok(bytes) = crate::files::read(&environments_file(home), 16 << 20) else { return Vec::new() };
        String::from_utf8_lossy(&bytes).lines().map(str::trim).filter(|line| !line.is_empty()).map(PathBuf::from).collect()
    }
}

/// Accepts names that CEP 24 allows for an environment.
///
/// # Errors
/// Usage: empty; `base` and `root`, which do not exist here; a path, a space, `:` or `#` in it; a leading `.` or `-`; control characters.
pub fn validate_name(name: &str) -> Result<()> {
    if matches!(name, "base" | "root") {
        return Err(Error::usage(format!("`{name}` cannot be the name of an environment"))
            .because("tare has no base environment: the tool is one program outside all of them")
            .hint("choose another name: -n NAME"));
    }
    let refuse = |why: &str| Err(Error::usage(format!("{name:?} cannot be the name of an environment")).because(why));
    if name.is_empty() {
        return refuse("it is empty");
    }
    if name.contains(['/', '\\']) {
        return refuse("it is a path").map_err(|error: Error| error.hint(format!("to name an environment by its path: -p '{name}'")));
    }
    if let Some(bad) = name.chars().find(|c| matches!(c, ' ' | ':' | '#') || c.is_control() || c.is_whitespace()) {
        return refuse(&format!("it contains {bad:?}"));
    }
    if name.starts_with(['.', '-']) {
        return refuse("it starts with `.` or `-`");
    }
    if name.len() > 200 {
        return refuse("it is longer than 200 bytes");
    }
    Ok(())
}

/// The path for a new environment: `-p`, else the name in the first environments directory.
///
/// # Errors
/// Usage: neither is given, or a bad name.
pub fn place_for_new(which: &Which, places: &Places) -> Result<PathBuf> {
    if let Some(prefix) = &which.prefix {
        return crate::install::resolve_prefix(prefix);
    }
    let Some(name) = &which.name else {
        return Err(Error::usage("the environment has no name").hint("name it: -n NAME, or a path: -p PATH, or `name:` in the file"));
    };
    validate_name(name)?;
    let Some(folder) = places.envs_dirs.first() else {
        return Err(Error::usage("there is no folder for named environments").hint("set TARE_ROOT, or name a path: -p PATH"));
    };
    crate::install::resolve_prefix(&folder.join(name))
}

fn is_environment(path: &Path) -> bool {
    path.join("conda-meta").is_dir()
}

/// Finds an existing environment: by path; by name in the environments directories, in `~/.conda/environments.txt` and in the directories of
/// conda and micromamba; or the active one. Where the root was named for this call, a name is looked for there only.
///
/// # Errors
/// None is given and none is active (usage); there is none of that name: the message lists near names.
pub fn locate(which: &Which, places: &Places) -> Result<PathBuf> {
    if let Some(prefix) = &which.prefix {
        return crate::install::resolve_prefix(prefix);
    }
    let Some(name) = &which.name else {
        return match &places.active {
            Some(active) => crate::install::resolve_prefix(active),
            None => Err(Error::usage("no environment is named and none is active").hint("name one: -n NAME or -p PATH")),
        };
    };
    validate_name(name)?;
    // An interrupted swap may hide the environment for the moment; opening it then says what to do.
    let usable = |path: &PathBuf| is_environment(path) || crate::install::needs_recovery(path);
    let own = if places.only_root { places.envs_dirs.get(..1).unwrap_or_default() } else { &places.envs_dirs };
    if let Some(found) = own.iter().map(|folder| folder.join(name)).find(usable) {
        return crate::install::resolve_prefix(&found);
    }
    if places.only_root {
        return Err(not_there(name, places));
    }
    let registered =
        places.registered().into_iter().find(|path| path.file_name().is_some_and(|last| last == name.as_str()) && usable(path));
    if let Some(found) = registered.or_else(|| places.other_dirs.iter().map(|folder| folder.join(name)).find(usable)) {
        return crate::install::resolve_prefix(&found);
    }
    Err(not_there(name, places))
}

fn not_there(name: &str, places: &Places) -> Error {
    let root = places.envs_dirs.first().filter(|_| places.only_root);
    let mut near: Vec<(f64, String)> = list_known(places, false)
        .into_iter()
        .filter(|known| root.is_none_or(|root| known.prefix.parent() == Some(root)))
        .filter_map(|known| known.name)
        .map(|known| (strsim::jaro_winkler(&known, name), known))
        .filter(|(score, _)| *score > 0.8)
        .collect();
    near.sort_by(|a, b| b.0.total_cmp(&a.0));
    let mut error = Error::failure(format!("there is no environment `{name}`"));
    if let Some(root) = root {
        error = error.because(format!("the root was named, so only `{}` is looked in", root.display()));
    }
    if let Some((_, close)) = near.first() {
        error = error.hint(format!("did you mean `{close}`?"));
    }
    error.hint("the environments there are: tare env list")
}

/// An environment on this machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct KnownEnvironment {
    /// Its name, if it lies in a folder of named environments.
    pub name: Option<String>,
    /// Where it is.
    pub prefix: PathBuf,
    /// Whether it is the active one.
    pub active: bool,
    /// Whether tare made it.
    pub made_by_tare: bool,
    /// Bytes that removing it would free: hard-linked files not counted. Only if asked for.
    pub bytes: Option<u64>,
}

/// All environments that are found, sorted by name, then path. Entries of lists that are no environments any more are left out.
pub fn list_known(places: &Places, sizes: bool) -> Vec<KnownEnvironment> {
    let mut paths: Vec<PathBuf> = Vec::new();
    for folder in places.all_dirs() {
        let mut found: Vec<PathBuf> = std::fs::read_dir(folder)
            .into_iter()
            .flatten()
            .flatten()
            .filter(|entry| !entry.file_name().to_string_lossy().starts_with('.'))
            .map(|entry| entry.path())
            .collect();
        found.sort();
        paths.extend(found);
    }
    paths.extend(places.registered());
    paths.extend(places.active.clone());
    let mut seen = HashSet::new();
    let active = places.active.as_ref().and_then(|path| path.canonicalize().ok());
    let mut known: Vec<KnownEnvironment> = paths
        .into_iter()
        .filter(|path| is_environment(path))
        .filter_map(|path| {
            let canonical = path.canonicalize().ok()?;
            if !seen.insert(canonical.clone()) {
                return None;
            }
            let named = path.parent().is_some_and(|parent| places.all_dirs().any(|folder| folder == parent));
            Some(KnownEnvironment {
                name: if named { path.file_name().map(|name| name.to_string_lossy().into_owned()) } else { None },
                active: active.as_ref() == Some(&canonical),
                made_by_tare: matches!(Stamp::read(&path), Ok(Some(_))),
                bytes: sizes.then(|| own_bytes(&path)),
                prefix: path,
            })
        })
        .collect();
    known.sort_by(|a, b| a.name.is_none().cmp(&b.name.is_none()).then_with(|| a.name.cmp(&b.name)).then_with(|| a.prefix.cmp(&b.prefix)));
    known
}

fn own_bytes(path: &Path) -> u64 {
    let Ok(metadata) = std::fs::symlink_metadata(path) else { return 0 };
    if metadata.is_dir() {
        return std::fs::read_dir(path).into_iter().flatten().flatten().map(|entry| own_bytes(&entry.path())).sum();
    }
    #[cfg(unix)]
    {
        use std::os::unix::fs::MetadataExt;
        if metadata.nlink() > 1 { 0 } else { metadata.blocks() * 512 }
    }
    #[cfg(not(unix))]
    {
        metadata.len()
    }
}

/// The table of `env list`, as conda prints it: `*` marks the active one.
pub fn environments_text(known: &[KnownEnvironment]) -> String {
    let mut text = String::from("# conda environments:\n#\n");
    for environment in known {
        let mark = if environment.active { "*" } else { " " };
        let name = environment.name.as_deref().unwrap_or("");
        let _ = writeln!(text, "{name:<20}  {mark}  {}", environment.prefix.display());
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn places(root: &Path) -> Places {
        Places {
            envs_dirs: vec![root.join("envs")],
            home: Some(root.join("home")),
            active: None,
            other_dirs: vec![root.join("micromamba/envs")],
            only_root: false,
        }
    }

    fn environment(path: &Path) {
        std::fs::create_dir_all(path.join("conda-meta")).unwrap();
    }

    #[test]
    fn names_follow_cep_24() {
        for good in ["train", "py3.11", "a_b-c", "ümlaut"] {
            validate_name(good).unwrap();
        }
        for bad in ["", "base", "root", "a/b", "a b", "a:b", "a#b", ".x", "-x", "a\\b", "a\nb", "..", &"x".repeat(300)] {
            assert_eq!(validate_name(bad).unwrap_err().exit_code(), 2, "{bad:?}");
        }
        assert!(!validate_name("base").unwrap_err().hints().is_empty());
    }

    #[test]
    fn names_are_found_in_all_places_and_own_ones_win() {
        let root = tempfile::tempdir().unwrap();
        let root = root.path().canonicalize().unwrap();
        let places = places(&root);
        let which = |name: &str| Which { name: Some(name.to_owned()), prefix: None };
        environment(&root.join("envs/a"));
        environment(&root.join("micromamba/envs/a"));
        environment(&root.join("micromamba/envs/b"));
        environment(&root.join("far/c"));
        crate::install::register(&root.join("home"), &root.join("far/c"), true).unwrap();
        crate::install::register(&root.join("home"), &root.join("gone/d"), true).unwrap();
        assert_eq!(locate(&which("a"), &places).unwrap(), root.join("envs/a"));
        assert_eq!(locate(&which("b"), &places).unwrap(), root.join("micromamba/envs/b"));
        assert_eq!(locate(&which("c"), &places).unwrap(), root.join("far/c"));
        assert!(locate(&which("d"), &places).is_err());
        let rooted = Places { only_root: true, ..places.clone() };
        assert_eq!(locate(&which("a"), &rooted).unwrap(), root.join("envs/a"));
        assert!(locate(&which("b"), &rooted).unwrap_err().causes()[0].contains("only"));
        assert!(locate(&which("c"), &rooted).is_err());
        environment(&root.join("envs/training"));
        let error = locate(&which("trainin"), &places).unwrap_err();
        assert_eq!(error.hints()[0], "did you mean `training`?");
        assert_eq!(locate(&Which::default(), &places).unwrap_err().exit_code(), 2);
        assert_eq!(place_for_new(&which("new"), &places).unwrap(), root.join("envs/new"));
        assert_eq!(place_for_new(&which("base"), &places).unwrap_err().exit_code(), 2);
        let active = Places { active: Some(root.join("far/c")), ..places };
        assert_eq!(locate(&Which::default(), &active).unwrap(), root.join("far/c"));
        let text = environments_text(&list_known(&active, true)).replace(&*root.to_string_lossy(), "");
        insta::assert_snapshot!(text, @r"
        # conda environments:
        #
        a                        /envs/a
        a                        /micromamba/envs/a
        b                        /micromamba/envs/b
        training                 /envs/training
                              *  /far/c
        ");
    }
}
