//! What every command that needs the configuration starts from.

use std::path::PathBuf;

use super::args::{ChannelArgs, EnvironmentArgs, Global, GpuArg, LinkModeArg, PipResolverArg, PriorityArg, TargetArgs};
use crate::config::{self, Settings, Sourced};
use crate::error::Result;
use crate::install::LinkMode;
use crate::platform::GpuIntent;
use crate::prefix::{Places, Which};
use crate::pypi::EngineChoice;
use crate::resolve::Inputs;
use crate::solve::PriorityChoice;
use crate::ui::Printer;

/// Settings and printer.
pub struct Context<'a> {
    pub settings: Settings,
    pub printer: &'a Printer,
}

/// Loads the settings and lays the global flags over them.
pub fn settings(global: &Global) -> Result<Settings> {
    let mut options = config::LoadOptions::process()?;
    options.no_config = global.no_config;
    options.config_file.clone_from(&global.config_file);
    let mut settings = config::load(&options)?;
    if global.offline {
        settings.offline = Sourced::flag(true);
    }
    if let Some(root) = &global.root {
        let first = absolute(root).join("envs");
        let mut dirs = vec![first.clone()];
        dirs.extend(settings.envs_dirs.value.iter().filter(|dir| **dir != first).cloned());
        settings.envs_dirs = Sourced::flag(dirs);
    }
    Ok(settings)
}

fn absolute(path: &std::path::Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.to_owned())
}

impl<'a> Context<'a> {
    pub fn load(global: &Global, printer: &'a Printer) -> Result<Self> {
        let settings = settings(global)?;
        for note in &settings.notes {
            // What is wrong in tare's own file is worth a word at once.
            if note.contains("config.toml") { printer.warn(note, &[]) } else { printer.detail(note) }
        }
        Ok(Context { settings, printer })
    }

    /// The platform that tare works for here: what conda writes into the headers of its lists.
    pub fn tool_platform(&self) -> Option<rattler_conda_types::Subdir> {
        let set = self.settings.subdir.value.as_deref().and_then(|text| text.parse().ok());
        set.or_else(rattler_conda_types::Subdir::current)
    }

    /// The prefix that `-n`, `-p` or CONDA_PREFIX name.
    pub fn locate(&self, environment: &EnvironmentArgs) -> Result<PathBuf> {
        locate(environment, &self.settings)
    }
}

/// The prefix that `-n`, `-p` or CONDA_PREFIX name.
pub fn locate(environment: &EnvironmentArgs, settings: &Settings) -> Result<PathBuf> {
    let which = Which { name: environment.name.clone(), prefix: environment.prefix.clone() };
    crate::prefix::locate(&which, &places(settings))
}

/// Where environments are looked for.
pub fn places(settings: &Settings) -> Places {
    crate::create::places(settings)
}

/// The variables of this process.
pub fn environment() -> crate::prefix::Environment {
    std::env::vars_os().collect()
}

/// `--channel-priority` and its two short forms.
pub fn priority(channels: &ChannelArgs) -> Option<PriorityChoice> {
    match channels.channel_priority {
        Some(PriorityArg::Auto) => Some(PriorityChoice::Auto),
        Some(PriorityArg::Strict) => Some(PriorityChoice::Strict),
        Some(PriorityArg::Flexible) => Some(PriorityChoice::Flexible),
        Some(PriorityArg::Disabled) => Some(PriorityChoice::Disabled),
        None if channels.strict_channel_priority => Some(PriorityChoice::Strict),
        None if channels.no_channel_priority => Some(PriorityChoice::Disabled),
        None => None,
    }
}

/// The request part of a command line.
pub fn inputs(specs: &[String], files: &[String], channels: &ChannelArgs, target: &TargetArgs) -> Inputs {
    Inputs {
        files: files.to_vec(),
        specs: specs.to_vec(),
        channels: channels.channels.clone(),
        override_channels: channels.override_channels,
        priority: priority(channels),
        exclude_newer: channels.exclude_newer.clone(),
        pip_resolver: pip_resolver(channels),
        platform: target.platform.clone(),
        cuda: target.cuda.clone(),
        virtual_packages: target.virtual_packages.clone(),
        gpu: gpu(target.gpu),
        ..Inputs::default()
    }
}

/// `--pip-resolver`
pub fn pip_resolver(channels: &ChannelArgs) -> Option<EngineChoice> {
    channels.pip_resolver.map(|arg| match arg {
        PipResolverArg::Auto => EngineChoice::Auto,
        PipResolverArg::Uv => EngineChoice::Uv,
        PipResolverArg::Pip => EngineChoice::Pip,
    })
}

pub fn gpu(arg: Option<GpuArg>) -> GpuIntent {
    match arg {
        None | Some(GpuArg::Auto) => GpuIntent::Auto,
        Some(GpuArg::Require) => GpuIntent::Require,
        Some(GpuArg::None) => GpuIntent::None,
    }
}

pub fn link_mode(arg: LinkModeArg) -> LinkMode {
    match arg {
        LinkModeArg::Auto => LinkMode::Auto,
        LinkModeArg::Reflink => LinkMode::Reflink,
        LinkModeArg::Hardlink => LinkMode::Hardlink,
        LinkModeArg::Copy => LinkMode::Copy,
        LinkModeArg::Symlink => LinkMode::Symlink,
    }
}
