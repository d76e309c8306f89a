//! The command line. Doc comments are the help texts and the CLI reference.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum, ValueHint};

use crate::ui::ColorChoice;

/// Reproducible Python and PyTorch/CUDA environments, weighed before they are used.
#[derive(Debug, Parser)]
#[command(
    name = "tare",
    version,
    propagate_version = true,
    max_term_width = 100,
    after_help = "Exit codes: 0 ok, 1 failure, 2 usage, 3 unsatisfiable, 4 drift, 5 verification failed, 6 GPU check failed, 7 network or offline, 8 a required check could not run."
)]
pub struct Cli {
    #[command(flatten)]
    pub global: Global,
    #[command(subcommand)]
    pub command: Command,
}

/// Options of every command.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Global options")]
pub struct Global {
    /// Print one JSON document on stdout, also for errors
    #[arg(long, global = true)]
    pub json: bool,
    /// Print errors only
    #[arg(short, long, global = true, conflicts_with = "verbose")]
    pub quiet: bool,
    /// Print more; twice for debug logs, three times for traces
    #[arg(short, long, global = true, action = clap::ArgAction::Count)]
    pub verbose: u8,
    /// Use only what is in the cache or on this machine
    #[arg(long, global = true, env = "TARE_OFFLINE", value_parser = clap::builder::FalseyValueParser::new(), action = clap::ArgAction::SetTrue)]
    pub offline: bool,
    /// When to use colours
    #[arg(long, global = true, value_enum, default_value_t, value_name = "WHEN")]
    pub color: ColorChoice,
    /// Append debug logs to FILE
    #[arg(long, global = true, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub log_file: Option<PathBuf>,
    /// Read no configuration files
    #[arg(long, global = true)]
    pub no_config: bool,
    /// Read tare's configuration from FILE instead of the usual place
    #[arg(long, global = true, value_name = "FILE", value_hint = ValueHint::FilePath, env = "TARE_CONFIG")]
    pub config_file: Option<PathBuf>,
    /// Folder whose `envs` holds the `-n NAME` environments
    #[arg(long, global = true, value_name = "DIR", value_hint = ValueHint::DirPath, env = "TARE_ROOT")]
    pub root: Option<PathBuf>,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    Create(Box<CreateArgs>),
    Install(Box<InstallArgs>),
    Lock(Box<LockArgs>),
    Sync(Box<SyncArgs>),
    Update(Box<UpdateArgs>),
    Remove(Box<RemoveArgs>),
    Rename(Box<RenameArgs>),
    Relocate(Box<RelocateArgs>),
    List(ListArgs),
    Export(ExportArgs),
    Convert(ConvertArgs),
    Verify(VerifyArgs),
    Check(CheckArgs),
    Diff(DiffArgs),
    #[command(subcommand)]
    Env(EnvCommand),
    Run(RunArgs),
    Init(InitArgs),
    Activate(ActivateArgs),
    Deactivate(DeactivateArgs),
    Shell(ShellArgs),
    ShellHook(ShellHookArgs),
    Info(InfoArgs),
    Search(SearchArgs),
    Why(WhyArgs),
    Config(ConfigArgs),
    Clean(CleanArgs),
    #[command(subcommand)]
    Auth(AuthCommand),
    #[command(subcommand)]
    Gpu(super::gpu::GpuCommand),
    #[command(subcommand)]
    Notebook(super::notebook::NotebookCommand),
    Completions(CompletionsArgs),
    /// Asks a driver library in a process of its own, for `gpu info` and `gpu top`
    #[command(name = "__gpu-probe", hide = true)]
    GpuProbe {
        /// What to ask: `libcuda`, `nvml`, or `watch` for NVML again and again
        route: String,
        /// Seconds between two answers of `watch`
        #[arg(default_value_t = 1.0)]
        interval: f64,
    },
    /// The self-test of GPUs in a process of its own, so that a driver that crashes or hangs does so there
    #[command(name = "__gpu-selftest", hide = true)]
    GpuSelftest {
        /// What to test, as JSON
        request: String,
        /// File for notes of the calls that are made
        notes: PathBuf,
    },
    /// Prints what the shell function of `tare init` evaluates
    #[command(name = "__hook", hide = true)]
    Hook(HookArgs),
    /// Detects the GPU driver in a process of its own, so that a crash or a hang of a driver library stays there
    #[command(name = "__detect-gpu", hide = true)]
    DetectGpu {
        /// The route to ask
        route: String,
    },
}

/// An environment by name or by path.
#[derive(Debug, Clone, Default, Args)]
pub struct EnvironmentArgs {
    /// Name of the environment
    #[arg(short, long, value_name = "NAME", conflicts_with = "prefix")]
    pub name: Option<String>,
    /// Path of the environment
    #[arg(short, long, value_name = "PATH", value_hint = ValueHint::DirPath)]
    pub prefix: Option<PathBuf>,
}

/// Where packages come from.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Channels")]
pub struct ChannelArgs {
    /// Channel to search, in priority order: a name, URL, folder, or `host`; can be repeated
    #[arg(short, long = "channel", value_name = "CHANNEL")]
    pub channels: Vec<String>,
    /// Use only the channels given with `-c`, or in the files where none is given
    #[arg(long)]
    pub override_channels: bool,
    /// How channel order limits the choice of packages
    #[arg(long, value_enum, value_name = "MODE", conflicts_with_all = ["strict_channel_priority", "no_channel_priority"])]
    pub channel_priority: Option<PriorityArg>,
    /// Same as `--channel-priority strict`
    #[arg(long, hide = true, conflicts_with = "no_channel_priority")]
    pub strict_channel_priority: bool,
    /// Same as `--channel-priority disabled`
    #[arg(long, hide = true)]
    pub no_channel_priority: bool,
    /// What resolves `pip:` sections [default: uv where the environment or the machine has it, else pip]
    #[arg(long, value_enum, value_name = "PROGRAM")]
    pub pip_resolver: Option<PipResolverArg>,
    /// Ignore packages uploaded after this time (a date, an RFC 3339 time, or an age such as `7d`)
    #[arg(long, value_name = "TIME")]
    pub exclude_newer: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum PriorityArg {
    /// Strict, and flexible with a warning where strict has no solution
    Auto,
    /// A package comes from the first channel that has it
    Strict,
    /// Earlier channels are preferred
    Flexible,
    /// Channel order does not matter
    Disabled,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum PipResolverArg {
    /// uv where the environment or the machine has it, else pip
    Auto,
    /// uv of the environment or of the machine
    Uv,
    /// pip of the environment
    Pip,
}

/// The machine the environment is for.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Machine")]
pub struct TargetArgs {
    /// Solve for another platform, such as linux-aarch64
    #[arg(long, alias = "subdir", value_name = "PLATFORM")]
    pub platform: Option<String>,
    /// Assume a driver that supports this CUDA version, such as 12.6
    #[arg(long, value_name = "VERSION")]
    pub cuda: Option<String>,
    /// Assume a virtual package instead of detecting it; can be repeated
    #[arg(long = "virtual-package", value_name = "NAME=VERSION[=BUILD]")]
    pub virtual_packages: Vec<String>,
    /// auto: take the driver as it is; require: refuse CPU builds; none: solve without a GPU
    #[arg(long, value_enum, value_name = "INTENT")]
    pub gpu: Option<GpuArg>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum GpuArg {
    Auto,
    Require,
    None,
}

/// How packages are put into the environment.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Installation")]
pub struct LinkArgs {
    /// How files get from the cache into the environment
    #[arg(long, value_enum, value_name = "MODE", conflicts_with = "copy")]
    pub link_mode: Option<LinkModeArg>,
    /// Same as `--link-mode copy`
    #[arg(long)]
    pub copy: bool,
    /// Do not compile Python files
    #[arg(long)]
    pub no_compile: bool,
    /// Let a later package overwrite files of an earlier one
    #[arg(long)]
    pub clobber: bool,
    /// Accept packages with symbolic links that point out of the environment
    #[arg(long)]
    pub allow_external_links: bool,
    /// Run the link scripts of this package; can be repeated
    #[arg(long = "allow-link-script", value_name = "PACKAGE")]
    pub allow_link_scripts: Vec<String>,
    /// Seconds to wait for another process that is changing the environment
    #[arg(long, value_name = "SECONDS")]
    pub lock_timeout: Option<u64>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum LinkModeArg {
    /// Reflink, else hard link, else copy
    Auto,
    Reflink,
    Hardlink,
    Copy,
    Symlink,
}

/// Create an environment from match specs or files
///
/// Examples:
///   tare create -f environment.yml
///   tare create -n train -c conda-forge python=3.11 pytorch-gpu
///   tare create -n ci --platform linux-64 --cuda 12.6 --dry-run --json -f environment.yml
#[derive(Debug, Clone, Args)]
#[command(verbatim_doc_comment)]
pub struct CreateArgs {
    /// Match specs, such as `python=3.11` or `conda-forge::numpy>=2`, and Python packages: `pypi::einops>=0.8`
    #[arg(value_name = "SPEC")]
    pub specs: Vec<String>,
    #[command(flatten)]
    pub environment: EnvironmentArgs,
    /// environment.yml, list of match specs or @EXPLICIT list: a path, an http(s) URL, or `-` for stdin; can be repeated
    #[arg(short, long = "file", value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub files: Vec<String>,
    /// Install what this lock says, without solving: tare.lock, pixi.lock, conda-lock.yml or an @EXPLICIT list. With `-f`, the lock must satisfy the files
    #[arg(long, value_name = "LOCK", value_hint = ValueHint::FilePath)]
    pub lock: Option<PathBuf>,
    /// Same as `--lock tare.lock`
    #[arg(long, conflicts_with = "lock")]
    pub locked: bool,
    /// Print what would be done
    #[arg(short, long)]
    pub dry_run: bool,
    /// Accepted for scripts written for conda: tare never asks
    #[arg(short, long)]
    pub yes: bool,
    /// Replace an existing environment that differs; files in it that belong to no package go with it
    #[arg(long)]
    pub force: bool,
    /// With `--force`: replace an environment that is marked as frozen too
    #[arg(long)]
    pub override_frozen: bool,
    /// Make a copy of this environment (a name or a path)
    #[arg(long, value_name = "ENVIRONMENT", conflicts_with_all = ["specs", "files", "force"])]
    pub clone: Option<String>,
    /// Skip the `pip:` sections of the files
    #[arg(long)]
    pub no_pip: bool,
    /// Leave out the packages that the configuration adds to each new environment
    #[arg(long)]
    pub no_default_packages: bool,
    /// Check the environment at the end, as `tare check` does: the exit code is the check's, the environment stays
    #[arg(long, conflicts_with = "dry_run")]
    pub check: bool,
    /// With `--check`: what cannot be tested on a GPU ends with exit code 8
    #[arg(long, requires = "check")]
    pub require_gpu: bool,
    /// Install `tare_notebook` too, and make the environment a Jupyter kernel, as `tare notebook install` does
    #[arg(long, conflicts_with = "dry_run")]
    pub notebook: bool,
    #[command(flatten)]
    pub channels: ChannelArgs,
    #[command(flatten)]
    pub target: TargetArgs,
    #[command(flatten)]
    pub link: LinkArgs,
}

/// Options of every command that changes an environment.
#[derive(Debug, Clone, Default, Args)]
pub struct ChangeArgs {
    #[command(flatten)]
    pub environment: EnvironmentArgs,
    /// Print what would be done
    #[arg(short, long)]
    pub dry_run: bool,
    /// tare never asks; a whole environment with files that belong to no package is removed only with this
    #[arg(short, long)]
    pub yes: bool,
    /// Change an environment that is marked as frozen (`conda-meta/frozen`) too
    #[arg(long)]
    pub override_frozen: bool,
}

/// Install packages into an existing environment
///
/// Everything that is there stays as it is where the request allows. Until the new state is complete the environment stays as it was.
///
/// Examples:
///   tare install -n train numpy 'scipy>=1.11'
///   tare install -n train -f more.yml
///   tare install -n train --revision 2
#[derive(Debug, Clone, Args)]
#[command(verbatim_doc_comment)]
pub struct InstallArgs {
    /// Match specs, and Python packages: `pypi::einops>=0.8`
    #[arg(value_name = "SPEC", required_unless_present_any = ["files", "revision"])]
    pub specs: Vec<String>,
    /// environment.yml, list of match specs or @EXPLICIT list; can be repeated
    #[arg(short, long = "file", value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub files: Vec<String>,
    #[command(flatten)]
    pub change: ChangeArgs,
    /// Go back to the packages of this revision (`tare list --revisions`); nothing is solved
    #[arg(long, value_name = "NUMBER", conflicts_with_all = ["specs", "files", "force_reinstall"])]
    pub revision: Option<usize>,
    /// Link the named packages anew even if nothing about them changes
    #[arg(long)]
    pub force_reinstall: bool,
    /// Skip the `pip:` sections of the files
    #[arg(long)]
    pub no_pip: bool,
    #[command(flatten)]
    pub channels: ChannelArgs,
    #[command(flatten)]
    pub target: TargetArgs,
    #[command(flatten)]
    pub link: LinkArgs,
}

/// Update packages of an environment, or make it equal to a file
///
/// With names: those packages move to their newest. Without names and files: all of them do. What was asked for when a package
/// was installed (`python=3.11`) holds on; to lift it, ask for something else: tare install python=3.12
///
/// Examples:
///   tare update -n train numpy
///   tare update -n train
///   tare update -f environment.yml --prune
#[derive(Debug, Clone, Args)]
#[command(verbatim_doc_comment)]
pub struct UpdateArgs {
    /// Names of installed packages, or match specs of them; `pypi::NAME` for Python packages
    #[arg(value_name = "SPEC")]
    pub specs: Vec<String>,
    /// environment.yml, list of match specs or @EXPLICIT list; can be repeated
    #[arg(short, long = "file", value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub files: Vec<String>,
    /// Update all packages; this is what happens without SPEC and FILE
    #[arg(short, long, conflicts_with_all = ["specs", "files"])]
    pub all: bool,
    /// Remove what the files do not ask for or need: the environment becomes what `create` makes of them
    #[arg(long, requires = "files")]
    pub prune: bool,
    #[command(flatten)]
    pub change: ChangeArgs,
    /// Skip the `pip:` sections of the files
    #[arg(long)]
    pub no_pip: bool,
    #[command(flatten)]
    pub channels: ChannelArgs,
    #[command(flatten)]
    pub target: TargetArgs,
    #[command(flatten)]
    pub link: LinkArgs,
}

/// Remove packages from an environment, or a whole environment
///
/// Packages that need the removed ones go too, and so do those that nothing else needs.
///
/// Examples:
///   tare remove -n train scipy
///   tare remove -n train --all
#[derive(Debug, Clone, Args)]
#[command(verbatim_doc_comment, visible_alias = "uninstall")]
pub struct RemoveArgs {
    /// Names of installed packages
    #[arg(value_name = "PACKAGE", required_unless_present = "all")]
    pub packages: Vec<String>,
    /// Remove the environment with everything in it
    #[arg(long, conflicts_with = "packages")]
    pub all: bool,
    /// Keep packages that only the removed ones needed
    #[arg(long)]
    pub no_prune: bool,
    #[command(flatten)]
    pub change: ChangeArgs,
    /// Seconds to wait for another process that is changing the environment
    #[arg(long, value_name = "SECONDS")]
    pub lock_timeout: Option<u64>,
}

/// Give an environment another name or path
///
/// The environment is made at the new place, then the old one is removed: at every moment one of the two is there.
///
/// Examples:
///   tare rename train train-2024
///   tare rename -p ./env ./env-old
#[derive(Debug, Clone, Args)]
#[command(verbatim_doc_comment)]
pub struct RenameArgs {
    /// Old name or path (not with -n or -p), and new name or path
    #[arg(value_name = "NAME", required = true, num_args = 1..=2)]
    pub names: Vec<String>,
    #[command(flatten)]
    pub change: ChangeArgs,
    #[command(flatten)]
    pub link: LinkArgs,
}

/// Lock the exact packages of an environment, for one or more platforms
///
/// The lock is a pixi.lock (version 7) with one more map, `tare:`. What an older lock at the same place holds is kept where the request allows.
/// With `--check`, nothing is solved or fetched: the exit code is 0 if the lock still satisfies the files and 4 if it does not.
///
/// Examples:
///   tare lock -f environment.yml
///   tare lock -f environment.yml --platform linux-64 --platform osx-arm64 --cuda 12.6
///   tare lock -f environment.yml --update numpy
///   tare lock --check -f environment.yml
#[derive(Debug, Clone, Args)]
#[command(verbatim_doc_comment)]
pub struct LockArgs {
    /// Match specs; with `--check`, the lock to check [default: tare.lock]
    #[arg(value_name = "SPEC")]
    pub specs: Vec<String>,
    /// environment.yml, list of match specs or @EXPLICIT list: a path, an http(s) URL, or `-` for stdin; can be repeated
    #[arg(short, long = "file", value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub files: Vec<String>,
    /// The lock to write
    #[arg(short, long, value_name = "LOCK", default_value = "tare.lock", value_hint = ValueHint::FilePath)]
    pub output: PathBuf,
    /// Only check whether the lock still satisfies the files
    #[arg(long, conflicts_with_all = ["update", "upgrade", "dry_run"])]
    pub check: bool,
    /// Let this package move to its newest version; can be repeated
    #[arg(long, value_name = "PACKAGE", conflicts_with = "upgrade")]
    pub update: Vec<String>,
    /// Let every package move to its newest version
    #[arg(long)]
    pub upgrade: bool,
    /// With `--check`: the environment of a pixi.lock
    #[arg(long, value_name = "NAME", requires = "check")]
    pub environment: Option<String>,
    /// Leave out the `pip:` sections of the files
    #[arg(long)]
    pub no_pip: bool,
    /// Print what would change and write nothing
    #[arg(short, long)]
    pub dry_run: bool,
    /// Platform to lock for, such as linux-64; can be repeated [default: those of the file, else of the older lock, else this machine's]
    #[arg(long = "platform", alias = "subdir", value_name = "PLATFORM", help_heading = "Machine")]
    pub platforms: Vec<String>,
    /// Assume a driver that supports this CUDA version, such as 12.6
    #[arg(long, value_name = "VERSION", help_heading = "Machine")]
    pub cuda: Option<String>,
    /// Assume a virtual package instead of detecting it; can be repeated
    #[arg(long = "virtual-package", value_name = "NAME=VERSION[=BUILD]", help_heading = "Machine")]
    pub virtual_packages: Vec<String>,
    /// auto: take the driver as it is; require: refuse CPU builds; none: lock without a GPU
    #[arg(long, value_enum, value_name = "INTENT", help_heading = "Machine")]
    pub gpu: Option<GpuArg>,
    #[command(flatten)]
    pub channels: ChannelArgs,
}

/// Make an environment exactly what a lock says
///
/// No solver runs. An environment that is there already is exchanged as a whole; where it is what the lock says, nothing is done.
///
/// Examples:
///   tare sync -n train
///   tare sync -p ./env conda-lock.yml
#[derive(Debug, Clone, Args)]
#[command(verbatim_doc_comment)]
pub struct SyncArgs {
    /// tare.lock, pixi.lock, conda-lock.yml or an @EXPLICIT list
    #[arg(value_name = "LOCK", default_value = "tare.lock", value_hint = ValueHint::FilePath)]
    pub lock: PathBuf,
    #[command(flatten)]
    pub target: EnvironmentArgs,
    /// Which environment of a pixi.lock [default: `default`, or the only one]
    #[arg(long, value_name = "NAME")]
    pub environment: Option<String>,
    /// Which platform of the lock, by its name there [default: this machine's]
    #[arg(long, alias = "subdir", value_name = "PLATFORM")]
    pub platform: Option<String>,
    /// Category of a conda-lock file; can be repeated [default: main and dev]
    #[arg(long = "category", value_name = "CATEGORY")]
    pub categories: Vec<String>,
    /// Skip the PyPI half of the lock
    #[arg(long)]
    pub no_pip: bool,
    /// Replace an environment even if files in it belong to no package: they are lost
    #[arg(long)]
    pub force: bool,
    /// Print what would be done
    #[arg(short, long)]
    pub dry_run: bool,
    /// Accepted for scripts written for conda: tare never asks
    #[arg(short, long)]
    pub yes: bool,
    #[command(flatten)]
    pub link: LinkArgs,
}

/// Repair an environment whose folder was moved
///
/// Packages are linked anew from the cache for the place where the environment is now; its old path in your text files is replaced.
#[derive(Debug, Clone, Args)]
pub struct RelocateArgs {
    #[command(flatten)]
    pub change: ChangeArgs,
    #[command(flatten)]
    pub link: LinkArgs,
}

/// List the packages of an environment
#[derive(Debug, Clone, Args)]
pub struct ListArgs {
    /// Only packages whose name matches this regular expression
    #[arg(value_name = "REGEX")]
    pub pattern: Option<String>,
    #[command(flatten)]
    pub environment: EnvironmentArgs,
    /// Print an @EXPLICIT list
    #[arg(long, conflicts_with_all = ["export", "revisions", "canonical"])]
    pub explicit: bool,
    /// With `--explicit`: add MD5 sums
    #[arg(long, requires = "explicit", conflicts_with = "sha256")]
    pub md5: bool,
    /// With `--explicit`: add SHA-256 sums
    #[arg(long, requires = "explicit")]
    pub sha256: bool,
    /// Print `name=version=build` lines
    #[arg(short, long, conflicts_with = "revisions")]
    pub export: bool,
    /// Print the history of the environment
    #[arg(short, long)]
    pub revisions: bool,
    /// Print `channel/platform::name-version-build` lines
    #[arg(short, long, conflicts_with_all = ["export", "revisions"])]
    pub canonical: bool,
    /// Columns of the table, separated by commas: arch, build, build_number, channel, channel_name, constrains, depends, dist_str, license, md5, name, platform, sha256, size, subdir, timestamp, url, version
    #[arg(long, value_name = "FIELDS", value_delimiter = ',')]
    pub fields: Vec<String>,
    /// Last name first
    #[arg(long)]
    pub reverse: bool,
    /// Match the whole name
    #[arg(short, long, short_alias = 'F')]
    pub full_name: bool,
    /// Leave out packages that pip installed
    #[arg(long)]
    pub no_pip: bool,
}

/// Write an environment or a lock in the format of another tool
///
/// Examples:
///   tare export -n train > environment.yml
///   tare export -n train --requested --pin-versions
///   tare export -n train --format explicit --sha256 -o explicit.txt
///   tare export tare.lock --format dockerfile -o Dockerfile
#[derive(Debug, Clone, Args)]
#[command(verbatim_doc_comment)]
pub struct ExportArgs {
    /// A lock instead of an environment
    #[arg(value_name = "LOCK", value_hint = ValueHint::FilePath, conflicts_with_all = ["name", "prefix"])]
    pub lock: Option<PathBuf>,
    #[command(flatten)]
    pub environment: EnvironmentArgs,
    /// environment-yaml, environment-json, explicit, requirements, pip, conda-lock, pixi, pylock, dockerfile, apptainer, cyclonedx or spdx [default: from the name of the output, else environment-yaml]
    #[arg(long, value_name = "FORMAT")]
    pub format: Option<String>,
    #[command(flatten)]
    pub output: OutputArgs,
    #[command(flatten)]
    pub shape: ExportShapeArgs,
}

/// Where an export goes.
#[derive(Debug, Clone, Default, Args)]
pub struct OutputArgs {
    /// Write to FILE instead of stdout
    #[arg(short, long, short_alias = 'f', alias = "file", value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub output: Option<PathBuf>,
}

/// What an export holds.
#[derive(Debug, Clone, Default, Args)]
pub struct ExportShapeArgs {
    /// Leave out build strings
    #[arg(long)]
    pub no_builds: bool,
    /// Only the match specs of the history, as conda does
    #[arg(long, conflicts_with = "requested")]
    pub from_history: bool,
    /// What was asked for, with channels and the Python packages
    #[arg(long)]
    pub requested: bool,
    /// With `--requested`: add versions where none was asked for
    #[arg(long, requires = "requested")]
    pub pin_versions: bool,
    /// Write repositories, URLs and folders of Python packages instead of their versions
    #[arg(long)]
    pub direct_urls: bool,
    /// Leave out the path of the environment
    #[arg(long)]
    pub no_prefix: bool,
    /// explicit: add MD5 sums
    #[arg(long, conflicts_with = "sha256")]
    pub md5: bool,
    /// explicit: add SHA-256 sums
    #[arg(long)]
    pub sha256: bool,
    /// Platform of a lock for several [default: this machine's]
    #[arg(long, alias = "subdir", value_name = "PLATFORM")]
    pub platform: Option<String>,
    /// Version of CycloneDX: 1.5 or 1.6
    #[arg(long, value_name = "VERSION", default_value = "1.6", value_parser = ["1.5", "1.6"])]
    pub cyclonedx_version: String,
}

/// Write a lock, list or environment in another format, without network
#[derive(Debug, Clone, Args)]
pub struct ConvertArgs {
    /// tare.lock, pixi.lock, conda-lock.yml, @EXPLICIT list, pylock.toml, or the folder of an environment
    #[arg(value_name = "FROM", value_hint = ValueHint::AnyPath)]
    pub from: PathBuf,
    /// Format to write [default: from the name of the output]
    #[arg(long, value_name = "FORMAT", required_unless_present = "output")]
    pub to: Option<String>,
    #[command(flatten)]
    pub output: OutputArgs,
    #[command(flatten)]
    pub shape: ExportShapeArgs,
}

/// Check every file of an environment against what its packages say
///
/// Exit code 0 if all is as installed, 5 if not. With `--repair`, packages with missing or changed files are linked anew first;
/// the exit code is 5 if something is left that cannot be repaired.
///
/// Examples:
///   tare verify -n train
///   tare verify -n train tare.lock
///   tare verify -n train --repair
#[derive(Debug, Clone, Args)]
#[command(verbatim_doc_comment)]
pub struct VerifyArgs {
    /// Also compare the packages with this lock
    #[arg(value_name = "LOCK", value_hint = ValueHint::FilePath)]
    pub lock: Option<PathBuf>,
    #[command(flatten)]
    pub environment: EnvironmentArgs,
    /// Do not look for files that belong to no package
    #[arg(long)]
    pub no_extra: bool,
    /// Link damaged packages anew from the cache, or from where they came; your own files stay
    #[arg(long)]
    pub repair: bool,
    /// With `--repair`: print what would be done
    #[arg(short, long, requires = "repair")]
    pub dry_run: bool,
    /// With `--repair`: repair an environment that is marked as frozen too
    #[arg(long, requires = "repair")]
    pub override_frozen: bool,
    /// With `--repair`: seconds to wait for another process that is changing the environment
    #[arg(long, value_name = "SECONDS", requires = "repair")]
    pub lock_timeout: Option<u64>,
}

/// Weigh an environment: will GPU work in it be right on this machine?
///
/// Each step is PASS, FAIL or NOT TESTED, with the reason; what was not done is never PASS. Exit code 0 if nothing failed, 5 if files are not as
/// installed, 6 if another step failed, 8 if `--require-gpu` was given and a step for the GPU could not be done.
///
/// Examples:
///   tare check -n train
///   tare check -n train --require-gpu --format junit -o check.xml
///   tare check --python .venv/bin/python --format html -o check.html
#[derive(Debug, Clone, Args)]
#[command(verbatim_doc_comment)]
pub struct CheckArgs {
    #[command(flatten)]
    pub environment: EnvironmentArgs,
    /// Check what this interpreter belongs to: a path, or a name on PATH
    #[arg(long, value_name = "PYTHON", value_hint = ValueHint::ExecutablePath, conflicts_with_all = ["name", "prefix"])]
    pub python: Option<std::ffi::OsString>,
    /// Check every known environment
    #[arg(long, conflicts_with_all = ["name", "prefix", "python"])]
    pub all: bool,
    #[command(flatten)]
    pub how: CheckHowArgs,
    /// What to print [default: from the name of the output, else text]
    #[arg(long, value_enum, value_name = "FORMAT")]
    pub format: Option<CheckFormatArg>,
    /// Write the report to FILE, and print the text for people
    #[arg(short, long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub output: Option<PathBuf>,
}

/// How an environment is checked.
#[derive(Debug, Clone, Args)]
pub struct CheckHowArgs {
    /// quick: seconds; standard: compare the contents of all files, test the memory; thorough: test the memory for long
    #[arg(long, value_enum, value_name = "LEVEL", default_value = "quick")]
    pub level: CheckLevelArg,
    /// A CPU build is a failure, and what cannot be tested on a GPU ends with exit code 8
    #[arg(long)]
    pub require_gpu: bool,
    /// Seconds for the whole check of an environment: each program gets what is left, and a step that has no time left is NOT TESTED
    /// [default: no limit for the whole; 180 for each program, and 300, 1800 or 7200 for the memory test by level]
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub timeout: Option<u64>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum CheckLevelArg {
    Quick,
    Standard,
    Thorough,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum CheckFormatArg {
    Text,
    Json,
    Junit,
    Html,
}

/// Compare two of environments, locks and environment files
///
/// Exit code 0 if they are equal, 4 if not.
#[derive(Debug, Clone, Args)]
pub struct DiffArgs {
    /// Name or folder of an environment, a lock, or an environment.yml
    #[arg(value_name = "A", value_hint = ValueHint::AnyPath)]
    pub a: String,
    /// The same
    #[arg(value_name = "B", value_hint = ValueHint::AnyPath)]
    pub b: String,
    /// text, or markdown: a table for a pull request
    #[arg(long, value_enum, value_name = "FORMAT", default_value_t = DiffFormat::Text)]
    pub format: DiffFormat,
    /// Same as `--format markdown`
    #[arg(long, hide = true, conflicts_with = "format")]
    pub markdown: bool,
    /// Compare this platform of locks only
    #[arg(long, alias = "subdir", value_name = "PLATFORM")]
    pub platform: Option<String>,
}

/// How differences are printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum DiffFormat {
    Text,
    Markdown,
}

/// Manage environments
#[derive(Debug, Subcommand)]
pub enum EnvCommand {
    /// Same as `tare create`
    Create(Box<CreateArgs>),
    /// Same as `tare export`
    Export(Box<ExportArgs>),
    /// Same as `tare update`
    Update(Box<UpdateArgs>),
    /// Same as `tare remove --all`
    Remove(Box<EnvRemoveArgs>),
    /// Settings of an environment
    #[command(subcommand)]
    Config(EnvConfigCommand),
    Digest(EnvDigestArgs),
    /// List the known environments
    List,
}

/// Print one hash of everything in an environment: content, modes, links, byte code
///
/// The same lock gives the same digest at the same path, and with `--relocatable` at any path. History and byte code of runs do not count.
#[derive(Debug, Clone, Args)]
pub struct EnvDigestArgs {
    #[command(flatten)]
    pub environment: EnvironmentArgs,
    /// Undo the replacements of the path of the environment that its packages list
    #[arg(long)]
    pub relocatable: bool,
    /// Print a line for each file too, to be compared with those of another environment
    #[arg(long)]
    pub files: bool,
}

/// Remove a whole environment
#[derive(Debug, Clone, Args)]
pub struct EnvRemoveArgs {
    #[command(flatten)]
    pub change: ChangeArgs,
    /// Seconds to wait for another process that is changing the environment
    #[arg(long, value_name = "SECONDS")]
    pub lock_timeout: Option<u64>,
}

#[derive(Debug, Subcommand)]
pub enum EnvConfigCommand {
    /// Variables that activation sets
    #[command(subcommand)]
    Vars(VarsCommand),
}

#[derive(Debug, Subcommand)]
pub enum VarsCommand {
    /// Show the variables
    List {
        #[command(flatten)]
        environment: EnvironmentArgs,
    },
    /// Set variables
    Set {
        /// `NAME=VALUE`
        #[arg(value_name = "NAME=VALUE", required = true)]
        variables: Vec<String>,
        #[command(flatten)]
        environment: EnvironmentArgs,
        /// Change an environment that is marked as frozen too
        #[arg(long)]
        override_frozen: bool,
    },
    /// Remove variables
    Unset {
        /// Names of variables
        #[arg(value_name = "NAME", required = true)]
        variables: Vec<String>,
        #[command(flatten)]
        environment: EnvironmentArgs,
        /// Change an environment that is marked as frozen too
        #[arg(long)]
        override_frozen: bool,
    },
}

/// Run a command in an environment
///
/// The exit code is the command's (128 + signal number where a signal ended it); 125 when tare fails, 126 when the
/// command cannot be executed, 127 when it does not exist.
#[derive(Debug, Clone, Args)]
pub struct RunArgs {
    #[command(flatten)]
    pub environment: EnvironmentArgs,
    /// Working directory
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub cwd: Option<PathBuf>,
    /// Set a variable for the command; can be repeated
    #[arg(short, long = "env", value_name = "NAME=VALUE")]
    pub env: Vec<String>,
    /// Start from an almost empty environment instead of the caller's
    #[arg(long)]
    pub clean_env: bool,
    /// Accepted for scripts written for conda: output is never captured
    #[arg(short = 's', long, alias = "live-stream", hide = true)]
    pub no_capture_output: bool,
    /// The command and its arguments
    #[arg(value_name = "COMMAND", required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    pub command: Vec<std::ffi::OsString>,
}

/// Set a shell up for `tare activate`
///
/// Writes a function `tare` into the start-up file of the shell: ~/.bashrc, .zshrc (in ZDOTDIR), fish/conf.d/tare.fish, or the profile
/// of PowerShell. Everything else in the file stays; reading the function starts no process. Open a new shell afterwards.
///
/// Examples:
///   tare init
///   tare init bash zsh --dry-run
///   tare init --all --undo
#[derive(Debug, Clone, Args)]
#[command(verbatim_doc_comment)]
pub struct InitArgs {
    /// bash, zsh, fish or powershell [default: the calling shell]
    #[arg(value_name = "SHELL")]
    pub shells: Vec<String>,
    /// Every one of these shells that is installed; with `--undo`, every one
    #[arg(long, conflicts_with = "shells")]
    pub all: bool,
    /// Take out again what `init` has written
    #[arg(long, visible_alias = "reverse")]
    pub undo: bool,
    /// Print what would be written
    #[arg(short, long)]
    pub dry_run: bool,
}

/// Activate an environment in this shell
///
/// What is active is deactivated first, and comes back with `tare deactivate`. Naming the active environment runs its scripts and sets its variables
/// anew. The shell has to be set up once: tare init
///
/// Examples:
///   tare activate train
///   tare activate ./env
///   tare activate --stack tools
#[derive(Debug, Clone, Args)]
#[command(verbatim_doc_comment)]
pub struct ActivateArgs {
    /// Name or path of the environment [default: the active one, anew]
    #[arg(value_name = "ENVIRONMENT", conflicts_with_all = ["name", "prefix"], value_hint = ValueHint::DirPath)]
    pub target: Option<String>,
    #[command(flatten)]
    pub environment: EnvironmentArgs,
    /// Keep the active environment in effect below this one
    #[arg(long, overrides_with = "no_stack")]
    pub stack: bool,
    /// The opposite of `--stack`, which is what happens anyway
    #[arg(long, hide = true)]
    pub no_stack: bool,
}

/// Deactivate the active environment in this shell
///
/// Variables get their old values back, and the environment that was active before is active again.
#[derive(Debug, Clone, Args)]
pub struct DeactivateArgs {}

/// Start a new shell in an environment
///
/// The shell reads your start-up files first; the exit code is the shell's. Arguments after `--` are handed to it, which then is not interactive.
///
/// Examples:
///   tare shell -n train
///   tare shell -n train --shell zsh
///   tare shell -n train -- -c 'python -V'
#[derive(Debug, Clone, Args)]
#[command(verbatim_doc_comment)]
pub struct ShellArgs {
    #[command(flatten)]
    pub environment: EnvironmentArgs,
    /// bash, zsh, fish, powershell or posix [default: the calling shell]
    #[arg(short, long, value_name = "SHELL")]
    pub shell: Option<String>,
    /// Arguments for the shell
    #[arg(value_name = "ARG", last = true)]
    pub args: Vec<std::ffi::OsString>,
}

/// What the shell function asks for.
#[derive(Debug, Clone, Args)]
pub struct HookArgs {
    /// The shell that evaluates it
    pub shell: String,
    #[command(subcommand)]
    pub command: HookCommand,
}

#[derive(Debug, Clone, Subcommand)]
pub enum HookCommand {
    Activate(ActivateArgs),
    Deactivate(DeactivateArgs),
    /// Activates the active environment anew, if there is one
    Reactivate,
}

/// Print the script that activates an environment
///
/// Examples:
///   eval "$(tare shell-hook -n train)"
///   tare shell-hook -n train -s fish | source
#[derive(Debug, Clone, Args)]
#[command(verbatim_doc_comment)]
pub struct ShellHookArgs {
    #[command(flatten)]
    pub environment: EnvironmentArgs,
    /// Shell the script is for: posix, bash, zsh, fish or powershell [default: the calling shell]
    #[arg(short, long, value_name = "SHELL")]
    pub shell: Option<String>,
    /// Keep the active environment in effect below this one
    #[arg(long)]
    pub stack: bool,
    /// Print the script that deactivates the active environment
    #[arg(long, conflicts_with_all = ["name", "prefix", "stack"])]
    pub deactivate: bool,
}

/// Show what tare knows of this machine, its configuration and its caches
#[derive(Debug, Clone, Args)]
pub struct InfoArgs {
    #[command(flatten)]
    pub target: TargetArgs,
    /// Also list the known environments
    #[arg(short, long)]
    pub envs: bool,
}

/// Search the channels for packages
#[derive(Debug, Clone, Args)]
pub struct SearchArgs {
    /// Match spec; `*` is allowed in the name
    #[arg(value_name = "SPEC")]
    pub spec: String,
    /// Show every build with its dependencies
    #[arg(short, long)]
    pub info: bool,
    /// Show at most this many versions (0: all)
    #[arg(long, value_name = "COUNT", default_value_t = 20)]
    pub limit: usize,
    #[command(flatten)]
    pub channels: ChannelArgs,
    #[command(flatten)]
    pub target: TargetArgs,
}

/// Explain why a package is in an environment or a lock
#[derive(Debug, Clone, Args)]
pub struct WhyArgs {
    /// Name of the package, of either half; `pypi::NAME` for the Python package where both have one of that name
    #[arg(value_name = "PACKAGE")]
    pub package: String,
    #[command(flatten)]
    pub environment: EnvironmentArgs,
    /// Look into a lock instead of an environment
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath, conflicts_with_all = ["name", "prefix"])]
    pub lock: Option<PathBuf>,
    /// With `--lock`: the platform [default: that of this machine, or the only one]
    #[arg(long, value_name = "PLATFORM", requires = "lock")]
    pub platform: Option<String>,
    /// Show every path, not only the shortest ones
    #[arg(short, long)]
    pub all: bool,
}

/// Show or change the configuration
#[derive(Debug, Clone, Args)]
pub struct ConfigArgs {
    #[command(subcommand)]
    pub command: Option<ConfigCommand>,
}

#[derive(Debug, Clone, Subcommand)]
pub enum ConfigCommand {
    /// Show every value with its source
    List {
        /// Only this key
        key: Option<String>,
    },
    /// Set a value in tare's configuration file
    Set { key: String, value: String },
    /// Add a value to a list in tare's configuration file
    Append { key: String, value: String },
    /// Remove a value from tare's configuration file
    Unset { key: String },
    /// Print the path of tare's configuration file
    Path,
}

/// Remove caches and leftovers
#[derive(Debug, Clone, Args)]
pub struct CleanArgs {
    /// Everything below
    #[arg(short, long)]
    pub all: bool,
    /// Unused packages
    #[arg(short, long)]
    pub packages: bool,
    /// Every package, also those that environments are linked to
    #[arg(long)]
    pub force_packages: bool,
    /// Repodata
    #[arg(short = 'i', long, alias = "index-cache")]
    pub repodata: bool,
    /// The host channel
    #[arg(long)]
    pub host: bool,
    /// Leftovers of killed runs
    #[arg(long, alias = "tempfiles")]
    pub leftovers: bool,
    /// Print what would be removed
    #[arg(short, long)]
    pub dry_run: bool,
    /// Accepted for scripts written for conda: tare never asks
    #[arg(short, long)]
    pub yes: bool,
}

/// Manage credentials for channels
#[derive(Debug, Clone, Subcommand)]
pub enum AuthCommand {
    /// Store credentials for a host
    Login {
        /// Host, such as `repo.example.com` or `*.example.com`
        host: String,
        /// Bearer token; `-` reads it from stdin
        #[arg(long, value_name = "TOKEN", conflicts_with_all = ["conda_token", "username"])]
        token: Option<String>,
        /// Token of the `/t/TOKEN/` kind; `-` reads it from stdin
        #[arg(long, value_name = "TOKEN", conflicts_with = "username")]
        conda_token: Option<String>,
        /// User name for basic authentication
        #[arg(short, long, value_name = "NAME", requires = "password")]
        username: Option<String>,
        /// Password for basic authentication; `-` reads it from stdin
        #[arg(long, value_name = "PASSWORD", requires = "username")]
        password: Option<String>,
    },
    /// Forget the credentials for a host
    Logout { host: String },
    /// List the hosts that credentials are stored for
    #[command(alias = "list")]
    Status,
}

/// Print a completion script
#[derive(Debug, Clone, Args)]
pub struct CompletionsArgs {
    #[arg(value_enum)]
    pub shell: clap_complete::Shell,
}
