//! tare: reproducible Python and PyTorch/CUDA environments, weighed before they are used.
//!
//! ```text
//! environment.yml ─ spec ─> EnvSpec ─┐
//! machine, flags  ─ platform ─> Target ├─ solve ─> Solution ─> install ─> Prefix ─ check ─> Report
//! channels        ─ channel ─> records ┘                                   gpu ─┘
//! ```
//! Nothing flows back up: `install` knows no YAML, `solve` no files of a prefix, `gpu` nothing of conda;
//! `cli` holds no logic and only `ui` writes to the terminal.
#![deny(unsafe_code)]

/// Changing an environment: install, update, remove, copy, rename, variables.
pub mod change;
/// Channel names to URLs, credentials, mirrors, repodata; the `host` channel.
pub mod channel;
/// The whole check of an environment: steps, report, pages.
pub mod check;
/// Programs in a process of their own: time limit, bounded output, an end for all they started.
pub mod child;
/// Command line: arguments in, one library call, result to `ui`.
pub mod cli;
/// .condarc subset, tare's config.toml and environment variables: one `Settings`.
pub mod config;
/// The main job in one call: inputs to an environment.
pub mod create;
/// Two of prefix, lock and request compared.
pub mod diff;
/// What ELF files ask of the loader.
pub mod elf;
/// One error type: kind (exit code), message, causes, hints, place.
pub mod error;
/// An environment or a lock as text for other tools.
pub mod export;
/// Reading files that may be something else than files.
mod files;
/// The GPU side: drivers, the caching allocator, traces.
pub mod gpu;
/// A solution to a prefix: fetch, stage, link, compile, rename.
pub mod install;
/// Locks: readers and writers of every format, the check against the inputs, making an environment from one.
pub mod lock;
/// Environments as Jupyter kernels; the Python package `tare_notebook`.
pub mod notebook;
/// Subdir and virtual packages of the machine the environment is for.
pub mod platform;
/// An installed environment: names, records, activation, run.
pub mod prefix;
/// The pip half of an environment.
pub mod pypi;
/// Progress and remarks from library code to whoever shows them.
pub mod report;
/// Inputs to a solution: the path that every planning command takes.
pub mod resolve;
/// Searching the channels.
pub mod search;
/// Request, target and records to a solution; explanations.
pub mod solve;
/// What the user asked for: environment.yml, match specs, requirements, explicit lists.
pub mod spec;
mod text;
/// The only writer to stdout and stderr.
pub mod ui;
/// Files of an environment against what their packages say.
pub mod verify;
/// Why a package is there.
pub mod why;
