//! `run`: a command in an environment.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
#[cfg(unix)]
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use super::Prefix;
use crate::child::{self, Descendants, Ended, Keep, Limits};
use crate::error::{Error, Kind, Result};

/// The variables of a process.
pub type Environment = BTreeMap<OsString, OsString>;

/// How to run a command.
#[derive(Debug, Clone, Default)]
pub struct RunOptions {
    /// The folder to run in; the current one if none.
    pub cwd: Option<PathBuf>,
    /// Variables to set on top (`--env K=V`), in order.
    pub set: Vec<(String, String)>,
    /// Start from a small set of variables instead of the caller's (`--clean-env`).
    pub clean: bool,
}

/// Variables that `--clean-env` keeps, and prefixes of names that it keeps.
const KEPT: &[&str] = &[
    "HOME",
    "USER",
    "LOGNAME",
    "SHELL",
    "TERM",
    "COLORTERM",
    "LANG",
    "TZ",
    "TMPDIR",
    "DISPLAY",
    "WAYLAND_DISPLAY",
    "SSH_AUTH_SOCK",
    "NO_COLOR",
    "CUDA_VISIBLE_DEVICES",
];
const KEPT_PREFIXES: &[&str] = &["LC_", "XDG_", "NVIDIA_"];

/// The name to show for an environment: the folder name.
pub(super) fn display_name(prefix: &Path) -> String {
    let parent = prefix.parent().and_then(Path::file_name);
    match (parent, prefix.file_name()) {
        (Some(parent), Some(name)) if parent == "envs" => name.to_string_lossy().into_owned(),
        _ => prefix.to_string_lossy().into_owned(),
    }
}

/// Variables in `env` that make programs of an environment use files of other places, each with what it does. Nothing is changed: some set-ups
/// need them.
pub fn remarks(env: &Environment) -> Vec<String> {
    let set = |name: &str| env.get(OsStr::new(name)).is_some_and(|value| !value.is_empty());
    [
        ("LD_LIBRARY_PATH", "libraries of the environment may be shadowed by others"),
        ("LD_PRELOAD", "a library is put before those of the environment"),
        ("PYTHONPATH", "Python finds modules of other places first"),
        ("PYTHONHOME", "Python looks for its standard library elsewhere"),
    ]
    .iter()
    .filter(|(name, _)| set(name))
    .map(|(name, what)| format!("{name} is set: {what}"))
    .collect()
}

fn scripts(prefix: &Path) -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> = std::fs::read_dir(prefix.join("etc/conda/activate.d"))
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "sh") && path.is_file())
        .collect();
    found.sort();
    found
}

/// How the scripts of an environment are run when its variables are worked out.
pub struct Activation<'a> {
    /// How long all of them together may take.
    pub limit: Duration,
    /// Asked now and then: whether nobody wants the answer any more.
    pub stop: &'a dyn Fn() -> bool,
    /// What becomes of processes that they start in the background.
    pub descendants: Descendants,
}

impl Default for Activation<'_> {
    fn default() -> Self {
        Activation { limit: Duration::from_secs(600), stop: &|| false, descendants: Descendants::Leave }
    }
}

/// The variables that a command in the environment gets when the caller has `env`. Scripts in `etc/conda/activate.d` are run to find out what they
/// change; without any no process is started. What they start in the background stays, and is not waited for.
///
/// # Errors
/// The variables of the environment cannot be read, or its scripts cannot be started, fail, or take too long (kind run, 125).
pub fn run_environment(prefix: &Prefix, env: &Environment) -> Result<Environment> {
    run_environment_with(prefix, env, &Activation::default())
}

/// As [`run_environment`], with a say in how the scripts are run.
///
/// # Errors
/// As there; stopped (kind interrupted).
pub fn run_environment_with(prefix: &Prefix, env: &Environment, activation: &Activation<'_>) -> Result<Environment> {
    // An environment that is active is left, not stacked upon.
    let mut result = super::activate::without_active(env);
    let own = |name: &str| OsString::from(name);
    let bin = prefix.path().join("bin");
    let active = env.get(OsStr::new("CONDA_PREFIX")).map(PathBuf::from);
    // The folder of an environment that is active already goes; everything else stays in order.
    let old = env.get(OsStr::new("PATH")).cloned().unwrap_or_default();
    let dropped = active.as_ref().map(|active| active.join("bin"));
    let rest = std::env::split_paths(&old).filter(|path| *path != bin && Some(path) != dropped.as_ref() && !path.as_os_str().is_empty());
    let path = std::env::join_paths([bin.clone()].into_iter().chain(rest))
        .map_err(|error| Error::new(Kind::Run(125), format!("the path `{}` cannot be part of PATH", bin.display())).because(error))?;
    result.insert(own("PATH"), path);
    result.insert(own("CONDA_SHLVL"), "1".into());
    result.insert(own("CONDA_PREFIX"), prefix.path().into());
    result.insert(own("CONDA_DEFAULT_ENV"), display_name(prefix.path()).into());
    result.insert(own("CONDA_PROMPT_MODIFIER"), format!("({}) ", display_name(prefix.path())).into());
    for (name, value) in prefix.all_variables()? {
        result.insert(name.into(), value.into());
    }
    let scripts = scripts(prefix.path());
    if scripts.is_empty() { Ok(result) } else { source(&scripts, &result, activation) }
}

/// Most bytes of variables that are read.
const MOST_VARIABLES: usize = 64 << 20;

/// Runs scripts in one shell and returns the variables afterwards.
fn source(scripts: &[PathBuf], env: &Environment, activation: &Activation<'_>) -> Result<Environment> {
    // Their output is not the command's: it goes to stderr. fd 3 brings the variables back.
    const SCRIPT: &str = r#"exec 3>&1 1>&2
for tare_script in "$@"; do . "$tare_script"; done
unset tare_script
exec env -0 >&3"#;
    let shell = ["/bin/bash", "/usr/bin/bash", "/usr/local/bin/bash"]
        .iter()
        .map(Path::new)
        .find(|path| path.exists())
        .map_or_else(|| PathBuf::from("/bin/sh"), Path::to_owned);
    let mut command = Command::new(&shell);
    command.arg("-c").arg(SCRIPT).arg("tare").args(scripts).env_clear().envs(env);
    let limits = Limits {
        deadline: Some(Instant::now() + activation.limit),
        stop: activation.stop,
        stdout: Keep::First(MOST_VARIABLES),
        stderr: Keep::Inherit,
        descendants: activation.descendants,
    };
    // The end of the shell is waited for, not that of its output: what a script leaves in the background may hold that open.
    let ran = child::run(command, &limits);
    let names = || scripts.iter().map(|script| format!("`{}`", script.display())).collect::<Vec<_>>().join(", ");
    let failed = |why: String| Error::new(Kind::Run(125), "the activation scripts of the environment failed").because(why).because(names());
    match &ran.ended {
        Ended::NotStarted(error) => {
            return Err(Error::new(Kind::Run(125), "cannot run the activation scripts of the environment")
                .because(format!("`{}`", shell.display()))
                .because(error));
        }
        Ended::Stopped => return Err(crate::install::cancel::interrupted()),
        Ended::TimedOut => {
            return Err(failed(format!("they did not end within {:.0} s", activation.limit.as_secs_f64()))
                .hint("a script that starts a program for long must do so in the background: PROGRAM &"));
        }
        Ended::Exited(0) => {}
        ended => return Err(failed(ended.problem(activation.limit).unwrap_or_default())),
    }
    let after = parse_env(&ran.stdout);
    if after.is_empty() {
        return Err(failed("they ended the shell".to_owned()));
    }
    Ok(after
        .into_iter()
        .filter(|(name, _)| !matches!(name.to_str(), Some("_" | "SHLVL" | "PWD" | "OLDPWD")) || env.contains_key(name))
        .map(|(name, value)| {
            // The shell's own bookkeeping is not the scripts' doing.
            let keep = matches!(name.to_str(), Some("_" | "SHLVL" | "PWD" | "OLDPWD"));
            let value = if keep { env.get(&name).cloned().unwrap_or(value) } else { value };
            (name, value)
        })
        .collect())
}

fn parse_env(bytes: &[u8]) -> Environment {
    bytes
        .split(|byte| *byte == 0)
        .filter_map(|entry| {
            let at = entry.iter().position(|byte| *byte == b'=')?;
            Some((os_string(&entry[..at]), os_string(&entry[at + 1..])))
        })
        .filter(|(name, _)| !name.is_empty())
        .collect()
}

#[cfg(unix)]
fn os_string(bytes: &[u8]) -> OsString {
    use std::os::unix::ffi::OsStrExt;
    OsStr::from_bytes(bytes).to_owned()
}

#[cfg(not(unix))]
fn os_string(bytes: &[u8]) -> OsString {
    String::from_utf8_lossy(bytes).into_owned().into()
}

/// `env` cut down to what `--clean-env` keeps, with the system's own PATH.
fn cleaned(env: &Environment) -> Environment {
    let mut kept: Environment = env
        .iter()
        .filter(|(name, _)| {
            name.to_str().is_some_and(|name| KEPT.contains(&name) || KEPT_PREFIXES.iter().any(|prefix| name.starts_with(prefix)))
        })
        .map(|(name, value)| (name.clone(), value.clone()))
        .collect();
    kept.insert("PATH".into(), "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin".into());
    kept
}

#[cfg(unix)]
fn is_executable(path: &Path) -> bool {
    path.is_file() && rustix::fs::access(path, rustix::fs::Access::EXEC_OK).is_ok()
}

#[cfg(not(unix))]
fn is_executable(path: &Path) -> bool {
    path.is_file()
}

/// Finds `program` as a shell would: names with a slash as they are (against `cwd`), others in the folders of `path`.
fn find(program: &OsStr, path: &OsStr, cwd: &Path) -> Result<PathBuf> {
    let shown = program.to_string_lossy();
    let not_executable = |path: &Path| {
        Error::new(Kind::Run(126), format!("`{shown}` cannot be executed"))
            .because(format!("`{}` is not an executable file", path.display()))
    };
    if program.is_empty() {
        return Err(Error::new(Kind::Run(127), "the name of the command is empty"));
    }
    if Path::new(program).components().count() > 1 || shown.contains('/') {
        let full = cwd.join(program);
        return if is_executable(&full) {
            Ok(full)
        } else if full.exists() {
            Err(not_executable(&full))
        } else {
            Err(Error::new(Kind::Run(127), format!("there is no `{shown}`")))
        };
    }
    let mut unusable = None;
    for folder in std::env::split_paths(path) {
        let full = cwd.join(folder).join(program);
        if is_executable(&full) {
            return Ok(full);
        }
        if full.is_file() {
            unusable.get_or_insert(full);
        }
    }
    match unusable {
        Some(path) => Err(not_executable(&path)),
        None => {
            let error = Error::new(Kind::Run(127), format!("there is no command `{shown}`"))
                .because("it is neither in the environment nor on PATH");
            Err(if shown.starts_with('-') {
                error.hint("options of `tare run` stand before the command: tare run --help")
            } else if shown.contains(char::is_whitespace) {
                error.hint("give the command and its arguments as words of their own, or run a shell: sh -c 'COMMANDS'")
            } else {
                error.hint("a package with a similar name may have it: tare search NAME")
            })
        }
    }
}

/// Everything needed to start the command: made apart from starting it.
fn prepare(prefix: &Prefix, argv: &[OsString], options: &RunOptions, env: &Environment) -> Result<(PathBuf, Environment)> {
    let Some(program) = argv.first() else {
        return Err(Error::usage("there is no command to run").hint("tare run -n NAME COMMAND ..."));
    };
    let base = if options.clean { cleaned(env) } else { env.clone() };
    let mut variables = run_environment(prefix, &base).map_err(|error| error.with_kind(Kind::Run(125)))?;
    for (name, value) in &options.set {
        if name.is_empty() || name.contains(['=', '\0']) || value.contains('\0') {
            return Err(Error::usage(format!("{name:?} cannot be the name of a variable")).hint("--env NAME=VALUE"));
        }
        variables.insert(name.into(), value.into());
    }
    let here = std::env::current_dir().unwrap_or_else(|_| PathBuf::from("/"));
    let cwd = options.cwd.as_ref().map_or_else(|| here.clone(), |cwd| here.join(cwd));
    if options.cwd.is_some() && !cwd.is_dir() {
        return Err(Error::new(Kind::Run(125), format!("`{}` is no folder", cwd.display())).hint("choose another one: --cwd PATH"));
    }
    let path = variables.get(OsStr::new("PATH")).cloned().unwrap_or_default();
    Ok((find(program, &path, &cwd)?, variables))
}

/// Runs `argv` in the environment. On Unix this process becomes the command (signals, the terminal and the exit code are its own) and the function
/// returns only if that fails; elsewhere it waits and returns the exit code.
///
/// # Errors
/// Kind run: 125 if the environment cannot be prepared, 126 if the command cannot be executed, 127 if there is none of that name.
pub fn run(prefix: &Prefix, argv: &[OsString], options: &RunOptions, env: &Environment) -> Result<u8> {
    let (program, variables) = prepare(prefix, argv, options, env)?;
    start(&program, argv, &variables, options.cwd.as_deref())
}

/// As [`run`], with exactly these variables and no environment.
pub(super) fn execute(argv: &[OsString], env: &Environment) -> Result<u8> {
    let path = env.get(OsStr::new("PATH")).cloned().unwrap_or_default();
    let here = std::env::current_dir().unwrap_or_else(|_| PathBuf::from("/"));
    let name = argv.first().map(OsString::as_os_str).unwrap_or_default();
    start(&find(name, &path, &here)?, argv, env, None)
}

fn start(program: &Path, argv: &[OsString], variables: &Environment, cwd: Option<&Path>) -> Result<u8> {
    let mut command = Command::new(program);
    command.args(&argv[1..]).env_clear().envs(variables);
    if let Some(cwd) = cwd {
        command.current_dir(cwd);
    }
    #[cfg(unix)]
    {
        use std::os::unix::process::CommandExt;
        // The name as typed: some programs look at it.
        command.arg0(&argv[0]);
        let error = command.exec();
        Err(Error::new(Kind::Run(126), format!("`{}` cannot be executed", program.display()))
            .because(&error)
            .hints_from(interpreter_hint(program, &error)))
    }
    #[cfg(not(unix))]
    {
        let status = command
            .status()
            .map_err(|error| Error::new(Kind::Run(126), format!("`{}` cannot be executed", program.display())).because(error))?;
        Ok(u8::try_from(status.code().unwrap_or(1)).unwrap_or(1))
    }
}

/// A file that is there but "not found" is a script whose interpreter is missing, or a program for another system.
#[cfg(unix)]
fn interpreter_hint(program: &Path, error: &std::io::Error) -> Option<String> {
    if error.kind() != std::io::ErrorKind::NotFound {
        return None;
    }
    let mut head = [0u8; 256];
    let read = std::fs::File::open(program).and_then(|mut file| file.read(&mut head)).ok()?;
    let line = head[..read].strip_prefix(b"#!")?.split(|byte| *byte == b'\n').next()?;
    Some(format!("the interpreter it asks for may be missing: `{}`", String::from_utf8_lossy(line).trim()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn environment(pairs: &[(&str, &str)]) -> Environment {
        pairs.iter().map(|(name, value)| (OsString::from(name), OsString::from(value))).collect()
    }

    fn prefix(folder: &Path) -> Prefix {
        let path = folder.canonicalize().unwrap().join("envs/train");
        std::fs::create_dir_all(path.join("conda-meta")).unwrap();
        std::fs::create_dir_all(path.join("bin")).unwrap();
        Prefix::open(path).unwrap()
    }

    fn text<'a>(env: &'a Environment, name: &str) -> &'a str {
        env.get(OsStr::new(name)).and_then(|value| value.to_str()).unwrap_or("<unset>")
    }

    #[test]
    fn without_scripts_the_variables_are_worked_out_directly() {
        let folder = tempfile::tempdir().unwrap();
        let prefix = prefix(folder.path());
        std::fs::write(prefix.path().join("conda-meta/state"), r#"{"version":1,"env_vars":{"lower":"x","N":"1"}}"#).unwrap();
        let bin = prefix.path().join("bin");
        let before = environment(&[
            ("PATH", &format!("/old/env/bin:/usr/bin:{}:/bin", bin.display())),
            ("CONDA_PREFIX", "/old/env"),
            ("CONDA_SHLVL", "2"),
            ("KEEP", "me"),
        ]);
        let after = run_environment(&prefix, &before).unwrap();
        assert_eq!(text(&after, "PATH"), format!("{}:/usr/bin:/bin", bin.display()));
        assert_eq!(text(&after, "CONDA_PREFIX"), prefix.path().to_str().unwrap());
        assert_eq!(
            (text(&after, "CONDA_DEFAULT_ENV"), text(&after, "CONDA_SHLVL"), text(&after, "lower"), text(&after, "KEEP")),
            ("train", "1", "x", "me")
        );
    }

    #[cfg(unix)]
    #[test]
    fn scripts_of_activate_d_are_run_and_may_print() {
        let folder = tempfile::tempdir().unwrap();
        let prefix = prefix(folder.path());
        let scripts = prefix.path().join("etc/conda/activate.d");
        std::fs::create_dir_all(&scripts).unwrap();
        std::fs::write(scripts.join("1.sh"), "echo noise\nexport FROM_SCRIPT=\"a\nb $CONDA_PREFIX\"\nunset GONE\n").unwrap();
        std::fs::write(scripts.join("2.fish"), "nonsense").unwrap();
        let before = environment(&[("PATH", "/usr/bin:/bin"), ("GONE", "x"), ("SHLVL", "7")]);
        let after = run_environment(&prefix, &before).unwrap();
        assert_eq!(text(&after, "FROM_SCRIPT"), format!("a\nb {}", prefix.path().display()));
        assert_eq!((text(&after, "GONE"), text(&after, "SHLVL"), text(&after, "PWD")), ("<unset>", "7", "<unset>"));
        std::fs::write(scripts.join("3.sh"), "exit 3\n").unwrap();
        assert_eq!(run_environment(&prefix, &before).unwrap_err().exit_code(), 125);
    }

    #[cfg(unix)]
    #[test]
    fn what_cannot_be_run_has_its_own_exit_code() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let prefix = prefix(folder.path());
        let env = environment(&[("PATH", "/usr/bin:/bin")]);
        let try_run =
            |argv: &[&str], options: &RunOptions| prepare(&prefix, &argv.iter().map(OsString::from).collect::<Vec<_>>(), options, &env);
        let code = |argv: &[&str]| try_run(argv, &RunOptions::default()).unwrap_err().exit_code();
        assert_eq!(code(&["no-such-command-here"]), 127);
        assert_eq!(code(&["./no/such"]), 127);
        assert_eq!(code(&[""]), 127);
        assert_eq!(code(&[]), 2);
        std::fs::write(prefix.path().join("bin/data"), "x").unwrap();
        assert_eq!(code(&["data"]), 126);
        let cwd = RunOptions { cwd: Some("/no/such/folder".into()), ..RunOptions::default() };
        assert_eq!(try_run(&["true"], &cwd).unwrap_err().exit_code(), 125);
        std::fs::set_permissions(prefix.path().join("bin/data"), std::fs::Permissions::from_mode(0o755)).unwrap();
        assert_eq!(try_run(&["data"], &RunOptions::default()).unwrap().0, prefix.path().join("bin/data"));
        let (_, clean) =
            try_run(&["true"], &RunOptions { clean: true, set: vec![("A".into(), "b=c".into())], ..RunOptions::default() }).unwrap();
        assert_eq!(text(&clean, "A"), "b=c");
        let options = RunOptions { set: vec![("A=B".into(), String::new())], ..RunOptions::default() };
        assert_eq!(try_run(&["true"], &options).unwrap_err().exit_code(), 2);
    }

    #[test]
    fn shadowing_variables_are_named() {
        assert_eq!(remarks(&environment(&[("LD_LIBRARY_PATH", "/usr/local/cuda/lib64"), ("PYTHONPATH", "")])).len(), 1);
    }
}
