//! `tare notebook`

use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::{Args, Subcommand, ValueHint};
use serde_json::{Value, json};

use super::args::EnvironmentArgs;
use super::context::{Context, environment};
use crate::change;
use crate::error::{Error, Result};
use crate::install::Cancel;
use crate::notebook::{self, DataDirs, Done, Options, Place};
use crate::text::quoted;
use crate::ui::table;

/// Make environments Jupyter kernels, and clear the slate between experiments
#[derive(Debug, Subcommand)]
pub enum NotebookCommand {
    Install(NotebookInstallArgs),
    List(NotebookListArgs),
    Remove(NotebookRemoveArgs),
    /// Starts the kernel of an environment: what kernelspecs call
    #[command(hide = true)]
    Launch(LaunchArgs),
}

/// Install `tare_notebook` into an environment and make the environment a Jupyter kernel
///
/// The kernel starts as `tare run` does: with the environment's variables and activation scripts, and without LD_LIBRARY_PATH of the server.
///
/// Examples:
///   tare notebook install -n vision
///   tare notebook install -n vision --display-name "Vision (A100)"
///   tare notebook install -p ./env --prefix /opt/jupyterhub
#[derive(Debug, Args)]
#[command(verbatim_doc_comment)]
pub struct NotebookInstallArgs {
    /// Name of the environment [default: the active one]
    #[arg(short = 'n', value_name = "NAME", conflicts_with = "path")]
    pub environment: Option<String>,
    /// Path of the environment
    #[arg(short = 'p', value_name = "PATH", value_hint = ValueHint::DirPath)]
    pub path: Option<PathBuf>,
    /// Name of the kernel [default: `tare-` and the environment's name]
    #[arg(long = "name", value_name = "KERNEL")]
    pub kernel: Option<String>,
    /// What people see in the list of kernels
    #[arg(long, value_name = "TEXT")]
    pub display_name: Option<String>,
    /// Put the kernelspec into the user's Jupyter data (the default; JUPYTER_DATA_DIR is honoured)
    #[arg(long, conflicts_with = "jupyter_prefix")]
    pub user: bool,
    /// Put the kernelspec into `share/jupyter` of this folder, such as the environment that Jupyter itself runs from, as `ipykernel install` does
    #[arg(long = "prefix", value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub jupyter_prefix: Option<PathBuf>,
    /// Only install the package
    #[arg(long, conflicts_with_all = ["kernel", "display_name", "user", "jupyter_prefix"])]
    pub no_kernel: bool,
    /// Seconds to wait while another tare changes the environment
    #[arg(long, value_name = "SECONDS")]
    pub lock_timeout: Option<u64>,
    /// Change an environment that is marked as frozen too
    #[arg(long)]
    pub override_frozen: bool,
}

/// List the kernels that tare made
#[derive(Debug, Args)]
pub struct NotebookListArgs {
    /// Look into `share/jupyter` of this folder too
    #[arg(long = "prefix", value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub jupyter_prefix: Option<PathBuf>,
}

/// Remove a kernel that tare made; the environment stays as it is
#[derive(Debug, Args)]
pub struct NotebookRemoveArgs {
    /// Name of the kernel, as `tare notebook list` shows it
    #[arg(value_name = "KERNEL", required = true)]
    pub kernels: Vec<String>,
    /// Look into `share/jupyter` of this folder too
    #[arg(long = "prefix", value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub jupyter_prefix: Option<PathBuf>,
}

/// Arguments of a kernelspec.
#[derive(Debug, Args)]
pub struct LaunchArgs {
    /// Path of the environment
    #[arg(long)]
    pub prefix: PathBuf,
    /// The file that says how clients reach the kernel
    pub connection_file: String,
}

fn dirs() -> Result<DataDirs> {
    DataDirs::new(crate::config::home_dir().as_deref(), |name| std::env::var(name).ok())
}

fn absolute(path: &Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.to_owned())
}

fn binary() -> Result<PathBuf> {
    std::env::current_exe().map_err(|error| Error::failure("the path of this program cannot be told").because(error))
}

/// Says which kernels go on to start an environment that was renamed by its old path. Returns their names.
pub(super) fn left_behind(from: &Path, to: &Path, context: &Context<'_>) -> Vec<String> {
    let Ok(dirs) = dirs() else { return Vec::new() };
    let kernels = notebook::list(&dirs, Some(to));
    let left: Vec<&notebook::Kernel> = kernels.iter().filter(|kernel| kernel.prefix == from).collect();
    for kernel in &left {
        let user = dirs.kernels(&Place::User);
        let place = match kernel.folder.strip_prefix(&user) {
            Ok(_) => String::new(),
            // DIR/share/jupyter/kernels/NAME
            Err(_) => kernel
                .folder
                .ancestors()
                .nth(4)
                .map_or_else(String::new, |folder| format!(" --prefix {}", quoted(&folder.display().to_string()))),
        };
        let again = format!(
            "tare notebook install -p {} --name {} --display-name {}{place}",
            quoted(&to.display().to_string()),
            quoted(&kernel.name),
            quoted(&kernel.display_name)
        );
        context.printer.warn(
            &format!("the Jupyter kernel `{}` starts the environment by its old path, `{}`", kernel.name, from.display()),
            &[format!("to have it start the renamed one: tare notebook remove {}{place} && {again}", quoted(&kernel.name))],
        );
    }
    left.iter().map(|kernel| kernel.name.clone()).collect()
}

pub async fn run(command: NotebookCommand, context: &Context<'_>) -> Result<u8> {
    match command {
        NotebookCommand::Install(args) => install(&args, context).await,
        NotebookCommand::List(args) => list(&args, context),
        NotebookCommand::Remove(args) => remove(&args, context),
        NotebookCommand::Launch(args) => launch(&args),
    }
}

/// `notebook launch`: needs no configuration.
pub fn launch(args: &LaunchArgs) -> Result<u8> {
    notebook::launch(&args.prefix, &args.connection_file, &environment())
}

async fn install(args: &NotebookInstallArgs, context: &Context<'_>) -> Result<u8> {
    let prefix = context.locate(&EnvironmentArgs { name: args.environment.clone(), prefix: args.path.clone() })?;
    let options = Options {
        name: args.kernel.clone(),
        display_name: args.display_name.clone(),
        place: args.jupyter_prefix.as_deref().map_or(Place::User, |folder| Place::Prefix(absolute(folder))),
        binary: binary()?,
        no_kernel: args.no_kernel,
        dirs: dirs()?,
    };
    let change = change::Options {
        lock_timeout: args.lock_timeout.map(Duration::from_secs),
        override_frozen: args.override_frozen,
        command: std::env::args_os().map(|arg| arg.to_string_lossy().into_owned()).collect(),
        cancel: Cancel::new(),
        ..change::Options::default()
    };
    let done = notebook::install(&prefix, &options, &change, &context.settings, context.printer.progress()).await?;
    tell(&done, context);
    context.printer.json(&done);
    Ok(0)
}

fn tell(done: &Done, context: &Context<'_>) {
    let printer = context.printer;
    let package = if done.changed { "installed" } else { "is there already" };
    printer.note(&format!("tare_notebook {} {package} in `{}`", done.package, done.prefix.display()));
    if let Some(kernel) = &done.kernel {
        printer.note(&format!("the kernel `{}` (\"{}\") is in `{}`", kernel.name, kernel.display_name, kernel.folder.display()));
    }
    printer.note("in a notebook: %load_ext tare_notebook, then %tare mem and %tare zero");
}

/// At the end of `create --notebook`: package and kernel. An environment without ipykernel stays without a kernel, and that is said.
pub async fn after_create(prefix: &Path, wanted: bool, document: &mut Value, context: &Context<'_>) -> Result<()> {
    if !wanted {
        return Ok(());
    }
    let no_kernel = !notebook::has_ipykernel(prefix);
    if no_kernel {
        let place = quoted(&prefix.display().to_string());
        let add = format!("add it, then make the kernel: {} && tare notebook install -p {place}", notebook::add_ipykernel(prefix));
        context.printer.warn("the environment has no ipykernel, so it is no Jupyter kernel", &[add]);
    }
    let options = Options { binary: binary()?, no_kernel, dirs: dirs()?, ..Options::default() };
    let change = change::Options {
        command: std::env::args_os().map(|arg| arg.to_string_lossy().into_owned()).collect(),
        cancel: Cancel::new(),
        ..change::Options::default()
    };
    let done = notebook::install(prefix, &options, &change, &context.settings, context.printer.progress()).await?;
    tell(&done, context);
    document["notebook"] = json!(done);
    Ok(())
}

fn list(args: &NotebookListArgs, context: &Context<'_>) -> Result<u8> {
    let kernels = notebook::list(&dirs()?, args.jupyter_prefix.as_deref().map(absolute).as_deref());
    if kernels.is_empty() {
        context.printer.note("tare has made no kernels: tare notebook install -n NAME");
    } else {
        let head = ["kernel", "shown as", "state", "environment"].map(str::to_owned).to_vec();
        let rows = kernels.iter().map(|kernel| {
            vec![kernel.name.clone(), kernel.display_name.clone(), kernel.state.text().to_owned(), kernel.prefix.display().to_string()]
        });
        let rows: Vec<Vec<String>> = std::iter::once(head).chain(rows).collect();
        context.printer.data(&table::columns(&rows, &[]));
    }
    context.printer.json(&json!({ "kernels": kernels }));
    Ok(0)
}

fn remove(args: &NotebookRemoveArgs, context: &Context<'_>) -> Result<u8> {
    let (dirs, prefix) = (dirs()?, args.jupyter_prefix.as_deref().map(absolute));
    let mut removed = Vec::new();
    for name in &args.kernels {
        for kernel in notebook::remove(name, &dirs, prefix.as_deref())? {
            context.printer.note(&format!("removed the kernel `{}` from `{}`", kernel.name, kernel.folder.display()));
            removed.push(kernel);
        }
    }
    context.printer.json(&json!({ "removed": removed }));
    Ok(0)
}
