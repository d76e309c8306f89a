//! Tests of the whole reader: real files, malformed inputs, random text.

mod malformed;
mod random;
mod reading;
mod real_files;

use std::path::PathBuf;

use rattler_conda_types::Subdir;

use super::*;

fn env(name: &str) -> Option<String> {
    match name {
        "HOME" => Some("/home/me".to_owned()),
        "TEAM" => Some("blue".to_owned()),
        "SECRET" => Some("hunter2".to_owned()),
        _ => None,
    }
}

fn options_for(subdir: Subdir) -> ReadOptions {
    ReadOptions { subdir, root_dir: PathBuf::from("/project"), env, target_given: false }
}

fn options() -> ReadOptions {
    options_for(Subdir::Linux64)
}

fn fetched(name: &str, text: impl AsRef<[u8]>) -> Fetched {
    Fetched { name: name.to_owned(), bytes: text.as_ref().to_vec(), base_dir: Some(PathBuf::from("/files")) }
}

fn read_text(name: &str, text: &str) -> Result<EnvSpec> {
    read(&[fetched(name, text)], &[], &options())
}

fn read_yml(text: &str) -> EnvSpec {
    read_text("environment.yml", text).unwrap_or_else(|error| panic!("{error}\n{text}"))
}

fn deps(spec: &EnvSpec) -> Vec<&str> {
    spec.dependencies.iter().map(Dependency::text).collect()
}

fn pip(spec: &EnvSpec) -> Vec<&str> {
    spec.pip.iter().map(|item| item.text.as_str()).collect()
}

fn channels(spec: &EnvSpec) -> Vec<&str> {
    spec.channels.iter().map(|channel| channel.text.as_str()).collect()
}
