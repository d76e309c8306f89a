//! Kernelspecs: folders with a `kernel.json` where Jupyter looks for kernels (jupyter_client's documentation, "Kernel specs"; jupyter_core's data
//! folders). Those that tare makes say so in their metadata, and no other is touched.

use std::path::{Path, PathBuf};

use serde::Serialize;
use serde_json::{Value, json};

use super::Options;
use crate::error::{Error, Result};
use crate::install::metadata::write_file;

const SCHEMA: u32 = 1;

/// Bytes of a kernel's name, which is that of a folder.
const LONGEST_NAME: usize = 100;
/// Characters of a name for people.
const LONGEST_TEXT: usize = 200;

/// Where a kernelspec goes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Place {
    /// The user's own Jupyter data.
    #[default]
    User,
    /// `share/jupyter` of this folder: that of another environment, or `/usr/local`.
    Prefix(PathBuf),
}

/// Where Jupyter keeps its data.
#[derive(Debug, Clone, Default)]
pub struct DataDirs {
    /// JUPYTER_DATA_DIR, else the usual place of the system.
    pub user: PathBuf,
    /// JUPYTER_PATH, and what the system shares.
    pub more: Vec<PathBuf>,
}

impl DataDirs {
    /// As jupyter_core finds them.
    ///
    /// # Errors
    /// There is no home folder and no variable that names the place.
    pub fn new(home: Option<&Path>, env: impl Fn(&str) -> Option<String>) -> Result<Self> {
        let set = |name: &str| env(name).filter(|value| !value.is_empty());
        let usual = || {
            if cfg!(target_os = "macos") {
                home.map(|home| home.join("Library/Jupyter"))
            } else if cfg!(windows) {
                set("APPDATA").map(|folder| Path::new(&folder).join("jupyter"))
            } else {
                set("XDG_DATA_HOME")
                    .map(PathBuf::from)
                    .or_else(|| home.map(|home| home.join(".local/share")))
                    .map(|data| data.join("jupyter"))
            }
        };
        let user = set("JUPYTER_DATA_DIR").map(PathBuf::from).or_else(usual).ok_or_else(|| {
            Error::failure("there is no home folder for Jupyter's data").hint("name the place: JUPYTER_DATA_DIR, or --prefix")
        })?;
        let mut more: Vec<PathBuf> = set("JUPYTER_PATH").map(|value| std::env::split_paths(&value).collect()).unwrap_or_default();
        if cfg!(unix) {
            more.extend([PathBuf::from("/usr/local/share/jupyter"), PathBuf::from("/usr/share/jupyter")]);
        }
        more.retain(|folder| !folder.as_os_str().is_empty());
        Ok(DataDirs { user, more })
    }

    /// The folder of kernels for a place.
    pub fn kernels(&self, place: &Place) -> PathBuf {
        match place {
            Place::User => self.user.join("kernels"),
            Place::Prefix(prefix) => prefix.join("share/jupyter/kernels"),
        }
    }
}

/// Whether a kernel can be started.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum KernelState {
    /// As it should be.
    Ready,
    /// The environment is not there.
    EnvironmentGone,
    /// The environment has no ipykernel.
    NoIpykernel,
    /// It starts, but the environment has no `tare_notebook`.
    NoPackage,
    /// The `tare` that starts it is not there.
    ProgramGone,
}

impl KernelState {
    /// For people.
    pub fn text(self) -> &'static str {
        match self {
            KernelState::Ready => "ready",
            KernelState::EnvironmentGone => "environment is gone",
            KernelState::NoIpykernel => "no ipykernel",
            KernelState::NoPackage => "no tare_notebook",
            KernelState::ProgramGone => "program is gone",
        }
    }
}

/// A kernel that tare made.
#[derive(Debug, Clone, Serialize)]
pub struct Kernel {
    /// Name of its folder.
    pub name: String,
    /// What people see.
    pub display_name: String,
    /// The environment.
    pub prefix: PathBuf,
    /// The folder of the kernelspec.
    pub folder: PathBuf,
    /// Whether it can be started.
    pub state: KernelState,
}

/// A name for the kernel of an environment: `tare-NAME`, of the characters that Jupyter takes.
pub fn default_name(prefix: &Path) -> String {
    let folder = prefix.file_name().map(|name| name.to_string_lossy().to_lowercase()).unwrap_or_default();
    // An environment inside a project is called after the project.
    let hidden = folder.starts_with('.') || folder == "env" || folder == "venv";
    let parent = prefix.parent().and_then(Path::file_name).map(|name| name.to_string_lossy().to_lowercase());
    let base = if hidden { parent.unwrap_or(folder) } else { folder };
    let mut slug: String = base.chars().map(|c| if c.is_ascii_alphanumeric() || "._-".contains(c) { c } else { '-' }).collect();
    slug.truncate(LONGEST_NAME - "tare-".len());
    slug = slug.trim_matches(['-', '.', '_']).to_owned();
    if slug.is_empty() { "tare".to_owned() } else { format!("tare-{slug}") }
}

fn check_name(name: &str) -> Result<()> {
    let good = !name.is_empty() && !name.starts_with('.') && name.chars().all(|c| c.is_ascii_alphanumeric() || "._-".contains(c));
    if good && name.len() <= LONGEST_NAME {
        return Ok(());
    }
    if good {
        return Err(Error::usage(format!("the name of a kernel is no longer than {LONGEST_NAME} characters"))
            .hint("what people see may be longer: --display-name"));
    }
    let name = crate::spec::quote(name);
    Err(Error::usage(format!("`{name}` cannot be the name of a kernel"))
        .because("Jupyter takes letters and digits of ASCII, `-`, `.` and `_`")
        .hint("what people see may be anything: --display-name"))
}

/// What people see stands in menus, tables and logs: one line of text.
fn check_display_name(text: &str) -> Result<String> {
    let refuse = |why: String| Err(Error::usage(format!("`{}` cannot be the name that people see", crate::spec::quote(text))).because(why));
    // Marks that turn the direction of what stands around them.
    let turns = |c: char| matches!(c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    if let Some(bad) = text.chars().find(|c| c.is_control() || matches!(c, '\u{2028}' | '\u{2029}') || turns(*c)) {
        return refuse(format!("it holds the control character U+{:04X}", u32::from(bad)));
    }
    let text = text.trim();
    if text.is_empty() {
        return refuse("it is empty".to_owned());
    }
    if text.chars().count() > LONGEST_TEXT {
        return refuse(format!("it is longer than {LONGEST_TEXT} characters"));
    }
    Ok(text.to_owned())
}

/// A kernelspec; `None` where there is none that can be read.
fn read(file: &Path) -> Option<Value> {
    // Anything else than a file (a pipe, say) is not waited for.
    std::fs::metadata(file).ok().filter(std::fs::Metadata::is_file)?;
    serde_json::from_slice(&std::fs::read(file).ok()?).ok()
}

/// Whether a folder holds nothing but what a killed run of [`stage`] left.
fn is_left_over(folder: &Path) -> bool {
    std::fs::read_dir(folder).is_ok_and(|entries| entries.flatten().all(|entry| entry.file_name().to_string_lossy().starts_with(STAGED)))
}

/// The environment of a kernel.json that tare made.
fn environment_of(spec: &Value) -> Option<PathBuf> {
    spec["metadata"]["tare"]["prefix"].as_str().map(PathBuf::from)
}

/// The kernel that is to be written; refuses to take the place of another.
pub(super) fn prepare(prefix: &Path, options: &Options) -> Result<Kernel> {
    let name = match &options.name {
        Some(name) => name.to_lowercase(),
        None => default_name(prefix),
    };
    check_name(&name)?;
    let asked = options.display_name.as_deref().map(check_display_name).transpose()?;
    let folder = options.dirs.kernels(&options.place).join(&name);
    let folder = std::path::absolute(&folder).unwrap_or(folder);
    // In this order: another one may write its kernelspec in between.
    let occupied = folder.exists() && !is_left_over(&folder);
    let there = read(&folder.join("kernel.json"));
    if occupied {
        match there.as_ref().and_then(environment_of) {
            Some(other) if other == prefix => {}
            Some(other) => return Err(taken(&name, &other)),
            None => return Err(foreign(&name, &folder)),
        }
    }
    let shown = name.strip_prefix("tare-").unwrap_or(&name);
    // Made again: it keeps the name that people know.
    let before = there.as_ref().and_then(|spec| spec["display_name"].as_str()).and_then(|text| check_display_name(text).ok());
    let display_name = asked.or(before).unwrap_or_else(|| format!("Python ({shown})"));
    Ok(Kernel { name, display_name, prefix: prefix.to_owned(), folder, state: KernelState::Ready })
}

/// Beginning of the names of files that become kernel.json.
const STAGED: &str = ".kernel.json.new";

/// A kernelspec that is written but not in its place.
pub(super) struct Staged {
    kernel: Kernel,
    file: Option<tempfile::NamedTempFile>,
}

/// Writes the kernelspec beside its place, so that what forbids it is known before anything else is changed.
///
/// # Errors
/// The place cannot be written; a path that a kernelspec cannot hold.
pub(super) fn stage(kernel: &Kernel, binary: &Path) -> Result<Staged> {
    let text = |path: &Path| {
        let refuse = |why: &str| {
            Error::failure(format!("the path `{}` cannot be written into a kernelspec", crate::spec::quote(&path.display().to_string())))
                .because(why)
        };
        let text = path.to_str().ok_or_else(|| refuse("it is not UTF-8"))?;
        // Jupyter replaces such words in the command.
        if ["{connection_file}", "{prefix}", "{resource_dir}"].iter().any(|word| text.contains(word)) {
            return Err(refuse("Jupyter would replace the word in braces"));
        }
        Ok(text.to_owned())
    };
    let spec = json!({
        "argv": [text(binary)?, "notebook", "launch", "--prefix", text(&kernel.prefix)?, "{connection_file}"],
        "display_name": kernel.display_name,
        "language": "python",
        "interrupt_mode": "signal",
        "metadata": {
            "debugger": true,
            "tare": { "schema_version": SCHEMA, "prefix": text(&kernel.prefix)?, "version": env!("CARGO_PKG_VERSION") },
        },
    });
    let unwritable = |error: &std::io::Error| {
        Error::io("write the kernelspec into", &kernel.folder, error)
            .hint("choose another place: JUPYTER_DATA_DIR, or --prefix DIR")
            .hint("to install only the package: --no-kernel")
    };
    std::fs::create_dir_all(&kernel.folder).map_err(|error| unwritable(&error))?;
    let file = tempfile::Builder::new().prefix(STAGED).tempfile_in(&kernel.folder).map_err(|error| {
        let _ = std::fs::remove_dir(&kernel.folder);
        unwritable(&error)
    })?;
    write_file(file.path(), format!("{spec:#}\n").as_bytes())?;
    Ok(Staged { kernel: kernel.clone(), file: Some(file) })
}

impl Staged {
    /// Puts it in its place. A server that reads at this moment sees the old one or the new one.
    ///
    /// # Errors
    /// The place cannot be written, or another environment took the name meanwhile.
    pub fn place(mut self) -> Result<()> {
        let path = self.kernel.folder.join("kernel.json");
        let failed = |error: std::io::Error| Error::io("write", &path, &error);
        let Some(file) = self.file.take() else { return Ok(()) };
        let file = match file.persist_noclobber(&path) {
            Ok(_) => return Ok(()),
            Err(error) if path.exists() => error.file,
            Err(error) => return Err(failed(error.error)),
        };
        match read(&path).as_ref().and_then(environment_of) {
            Some(other) if other != self.kernel.prefix => Err(taken(&self.kernel.name, &other)),
            Some(_) => file.persist(&path).map(drop).map_err(|error| failed(error.error)),
            None => Err(foreign(&self.kernel.name, &self.kernel.folder)),
        }
    }
}

impl Drop for Staged {
    fn drop(&mut self) {
        drop(self.file.take());
        // A folder that is still empty was made for this.
        let _ = std::fs::remove_dir(&self.kernel.folder);
    }
}

fn taken(name: &str, other: &Path) -> Error {
    Error::failure(format!("the kernel `{name}` is that of another environment"))
        .because(format!("`{}`", other.display()))
        .hint("give this one a name of its own: --name NAME")
        .hint(format!("or remove the other: tare notebook remove {name}"))
}

fn foreign(name: &str, folder: &Path) -> Error {
    Error::failure(format!("there is a kernel `{name}` that tare did not make"))
        .because(format!("`{}`", folder.display()))
        .hint("give this one a name of its own: --name NAME")
}

/// Every kernel that tare made, by name. `prefix`: look there too.
pub fn list(dirs: &DataDirs, prefix: Option<&Path>) -> Vec<Kernel> {
    let mut folders = vec![dirs.kernels(&Place::User)];
    folders.extend(dirs.more.iter().map(|folder| folder.join("kernels")));
    folders.extend(prefix.map(|prefix| dirs.kernels(&Place::Prefix(prefix.to_owned()))));
    let mut found: Vec<Kernel> = Vec::new();
    for entry in folders.iter().filter_map(|folder| std::fs::read_dir(folder).ok()).flatten().flatten() {
        let folder = entry.path();
        let Some(spec) = read(&folder.join("kernel.json")) else { continue };
        let Some(prefix) = environment_of(&spec) else { continue };
        if found.iter().any(|kernel| kernel.folder == folder) {
            continue;
        }
        let program = spec["argv"][0].as_str().map(Path::new);
        let state = if !prefix.join("conda-meta").is_dir() {
            KernelState::EnvironmentGone
        } else if program.is_some_and(|program| program.is_absolute() && !program.exists()) {
            KernelState::ProgramGone
        } else if !super::has_ipykernel(&prefix) {
            KernelState::NoIpykernel
        } else if !super::has_package(&prefix) {
            KernelState::NoPackage
        } else {
            KernelState::Ready
        };
        let name = entry.file_name().to_string_lossy().into_owned();
        // Others may have written into it.
        let display_name = crate::spec::quote(spec["display_name"].as_str().unwrap_or(&name));
        found.push(Kernel { name, display_name, prefix, folder, state });
    }
    found.sort_by(|a, b| (&a.name, &a.folder).cmp(&(&b.name, &b.folder)));
    found
}

/// The folders of kernelspecs of tare that lie in the environment itself, relative to it.
pub(crate) fn inside(prefix: &Path) -> Vec<PathBuf> {
    let folder = Path::new("share/jupyter/kernels");
    let entries = std::fs::read_dir(prefix.join(folder)).into_iter().flatten().flatten();
    let ours = entries.filter(|entry| read(&entry.path().join("kernel.json")).as_ref().and_then(environment_of).is_some());
    ours.map(|entry| folder.join(entry.file_name())).collect()
}

/// Removes the kernelspec of a kernel that tare made. The environment stays as it is.
///
/// # Errors
/// There is none of that name, or tare did not make it.
pub fn remove(name: &str, dirs: &DataDirs, prefix: Option<&Path>) -> Result<Vec<Kernel>> {
    let wanted = name.to_lowercase();
    let all = list(dirs, prefix);
    let (mine, others): (Vec<Kernel>, Vec<Kernel>) = all.into_iter().partition(|kernel| kernel.name == wanted);
    if mine.is_empty() {
        let folder = dirs.kernels(&Place::User).join(&wanted);
        if check_name(&wanted).is_ok() && folder.join("kernel.json").exists() {
            return Err(Error::failure(format!("tare did not make the kernel `{name}`"))
                .because(format!("`{}`", folder.display()))
                .hint(format!("leave it to Jupyter: jupyter kernelspec remove {wanted}")));
        }
        let names: Vec<&str> = others.iter().map(|kernel| kernel.name.as_str()).collect();
        let error = Error::failure(format!("there is no kernel `{name}`"));
        return Err(if names.is_empty() {
            error.because("tare has made none")
        } else {
            error.hint(format!("there are: {}", names.join(", ")))
        });
    }
    for kernel in &mine {
        match std::fs::remove_dir_all(&kernel.folder) {
            // Another one was quicker.
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            result => result.map_err(|error| Error::io("remove", &kernel.folder, &error))?,
        }
    }
    Ok(mine)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn options(folder: &Path) -> Options {
        let dirs = DataDirs { user: folder.join("jupyter"), more: Vec::new() };
        Options { dirs, binary: PathBuf::from("/opt/tare"), ..Options::default() }
    }

    #[test]
    fn names_are_what_jupyter_takes() {
        for (path, name) in [
            ("/envs/vision", "tare-vision"),
            ("/envs/My Env", "tare-my-env"),
            ("/srv/project/.venv", "tare-project"),
            ("/srv/project/env", "tare-project"),
            ("/envs/größe", "tare-gr--e"),
            ("/envs/日本", "tare"),
        ] {
            assert_eq!(default_name(Path::new(path)), name);
            assert!(check_name(name).is_ok());
        }
        let long = default_name(Path::new(&format!("/envs/{}", "x".repeat(250))));
        assert!(long.len() == LONGEST_NAME && check_name(&long).is_ok());
        for bad in ["", "a b", "../x", ".hidden", "a/b", "ä", "a\nb", &"x".repeat(101)] {
            assert!(check_name(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn data_folders_follow_the_variables() {
        let home = Path::new("/home/u");
        let with = |pairs: &'static [(&str, &str)]| {
            DataDirs::new(Some(home), move |name| pairs.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned())).unwrap()
        };
        if cfg!(target_os = "linux") {
            assert_eq!(with(&[]).user, home.join(".local/share/jupyter"));
            assert_eq!(with(&[("XDG_DATA_HOME", "/x")]).user, Path::new("/x/jupyter"));
            assert_eq!(with(&[("JUPYTER_DATA_DIR", "/j"), ("XDG_DATA_HOME", "/x")]).user, Path::new("/j"));
            assert_eq!(with(&[("JUPYTER_PATH", "/a:/b")]).more[..2], [PathBuf::from("/a"), PathBuf::from("/b")]);
            assert!(DataDirs::new(None, |_| None).is_err());
        }
    }

    #[test]
    fn only_its_own_kernels_are_touched() {
        let folder = tempfile::tempdir().unwrap();
        let options = options(folder.path());
        let prefix = folder.path().join("envs/a");
        std::fs::create_dir_all(prefix.join("conda-meta")).unwrap();
        let kernel = prepare(&prefix, &options).unwrap();
        stage(&kernel, &options.binary).unwrap().place().unwrap();
        // Again is fine; for another environment it is not.
        assert!(prepare(&prefix, &options).is_ok());
        let other = Options { name: Some("tare-a".into()), ..options.clone() };
        let error = prepare(&folder.path().join("envs/b"), &other).unwrap_err();
        assert!(error.message().contains("another environment"), "{error}");
        let foreign = options.dirs.kernels(&Place::User).join("python3");
        std::fs::create_dir_all(&foreign).unwrap();
        std::fs::write(foreign.join("kernel.json"), "{\"argv\":[\"python\"]}").unwrap();
        assert!(
            prepare(&prefix, &Options { name: Some("python3".into()), ..options.clone() }).unwrap_err().message().contains("did not make")
        );
        let listed = list(&options.dirs, None);
        assert_eq!(listed.len(), 1);
        assert_eq!((listed[0].name.as_str(), listed[0].state), ("tare-a", KernelState::ProgramGone));
        assert!(remove("python3", &options.dirs, None).unwrap_err().message().contains("did not make"));
        assert!(remove("nope", &options.dirs, None).is_err());
        assert!(remove("../a", &options.dirs, None).is_err());
        assert_eq!(remove("tare-a", &options.dirs, None).unwrap().len(), 1);
        assert!(list(&options.dirs, None).is_empty());
        assert!(foreign.exists());
    }

    #[test]
    fn what_people_see_is_one_line() {
        for good in ["Vision (A100)", "  größe \u{1f600} \"q\" 'x' $HOME `a` {b} <b>", "日本"] {
            assert_eq!(check_display_name(good).unwrap(), good.trim());
        }
        for bad in ["", "  ", "a\nb", "a\x1b[31mb", "a\u{202e}b", "a\0b", "a\tb", "a\u{2028}b", &"x".repeat(201)] {
            let error = check_display_name(bad).unwrap_err();
            assert!(error.exit_code() == 2 && !error.to_string().contains(['\n', '\x1b']), "{error}");
        }
    }

    #[test]
    fn what_a_killed_run_left_is_taken_over_and_a_name_is_had_by_one() {
        let folder = tempfile::tempdir().unwrap();
        let options = Options { name: Some("mine".into()), ..options(folder.path()) };
        let (a, b) = (folder.path().join("envs/a"), folder.path().join("envs/b"));
        let kernels = options.dirs.kernels(&Place::User).join("mine");
        std::fs::create_dir_all(&kernels).unwrap();
        std::fs::write(kernels.join(".kernel.json.newXYZ"), "{").unwrap();
        let first = prepare(&a, &options).unwrap();
        std::fs::remove_file(kernels.join(".kernel.json.newXYZ")).unwrap();
        // Both looked before either wrote.
        let second = prepare(&b, &options).unwrap();
        let (first, second) = (stage(&first, &options.binary).unwrap(), stage(&second, &options.binary).unwrap());
        first.place().unwrap();
        assert!(second.place().unwrap_err().message().contains("another environment"));
        assert_eq!(list(&options.dirs, None).iter().map(|kernel| kernel.prefix.clone()).collect::<Vec<_>>(), std::slice::from_ref(&a));
        assert_eq!(std::fs::read_dir(&kernels).unwrap().count(), 1);
        // The same one again is no clash.
        let again = prepare(&a, &options).unwrap();
        stage(&again, &options.binary).unwrap().place().unwrap();
        // What is staged and not placed leaves nothing.
        let other = prepare(&b, &Options { name: Some("other".into()), ..options.clone() }).unwrap();
        drop(stage(&other, &options.binary).unwrap());
        assert!(!other.folder.exists());
        let braces = prepare(&folder.path().join("{prefix}"), &Options { name: Some("braces".into()), ..options.clone() }).unwrap();
        assert!(stage(&braces, &options.binary).is_err_and(|error| error.to_string().contains("cannot be written into a kernelspec")));
    }
}
