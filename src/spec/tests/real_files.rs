//! 120 environment files of public projects against what conda's own reader makes of them.

use std::collections::BTreeMap;
use std::path::PathBuf;

use rattler_conda_types::{MatchSpec, ParseStrictness, Subdir, VersionSpec};
use serde_json::Value;

use super::*;

/// Files that read differently from conda on purpose. The same table, with the reasons at length, is in `docs/environment-yml.md`.
const DIFFERENT: &[(&str, &str)] = &[
    ("env-012.yml", "`sel(…)` sections are applied, conda ignores them"),
    ("env-046.yml", "`-e git+{ARGH_PATH_PLACEHOLDER}#egg=argh` is an unrendered template, refused"),
    ("env-059.yml", "`name: DMAI-Assignment 2` has a blank, which CEP 24 forbids"),
    ("env-055.yml", "`sel(…)` sections are applied, conda ignores them"),
    ("env-089.yml", "comment selectors are applied, conda ignores them"),
    ("env-102.yml", "`sel(…)` sections are applied, conda ignores them"),
    ("env-118.yml", "`name: {{ env_name }}` is a template, refused with a hint"),
];

pub(super) fn data_dir() -> Option<PathBuf> {
    let dir = std::env::var_os("TARE_SHARED_DATA")
        .map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../shared/data"), PathBuf::from)
        .join("envs");
    dir.join("expected.json").is_file().then_some(dir)
}

fn version(text: &Value) -> Option<VersionSpec> {
    let parsed =
        text.as_str().map(|text| VersionSpec::from_str(text, ParseStrictness::Lenient).unwrap_or_else(|error| panic!("{text}: {error}")));
    no_any(parsed)
}

/// `*` is no constraint.
fn no_any(version: Option<VersionSpec>) -> Option<VersionSpec> {
    version.filter(|version| *version != VersionSpec::Any)
}

/// As conda shows it: a URL, but `defaults` by name.
fn channel_name(spec: &MatchSpec) -> Option<String> {
    spec.channel.as_ref().map(|channel| match channel.name() {
        "defaults" => "defaults".to_owned(),
        _ => channel.base_url.as_str().trim_end_matches('/').to_owned(),
    })
}

/// All ways in which `found` differs from `want`.
fn differences(found: &EnvSpec, want: &Value, written_channels: bool) -> Vec<String> {
    let mut out = Vec::new();
    let mut differ = |what: &str, found: String, want: String| {
        if found != want {
            out.push(format!("{what}: {found} instead of {want}"));
        }
    };
    differ("name", format!("{:?}", found.name), format!("{:?}", want["name"].as_str().map(ToOwned::to_owned)));
    let want_channels: Vec<&str> = want["channels"].as_array().unwrap().iter().map(|channel| channel.as_str().unwrap()).collect();
    if written_channels {
        let named: Vec<&str> = want_channels.iter().copied().filter(|channel| *channel != "nodefaults").collect();
        differ("channels", format!("{:?}", channels(found)), format!("{named:?}"));
        differ("nodefaults", found.nodefaults.to_string(), want_channels.contains(&"nodefaults").to_string());
    } else {
        differ("channels", format!("{:?} {}", channels(found), found.channels_declared), "[] false".to_owned());
    }
    differ(
        "pip",
        format!("{:?}", pip(found)),
        format!("{:?}", want["pip"].as_array().unwrap().iter().map(|item| item.as_str().unwrap()).collect::<Vec<_>>()),
    );
    let variables: BTreeMap<&str, &str> = found.variables.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
    let want_variables: BTreeMap<&str, &str> =
        want["variables"].as_object().unwrap().iter().map(|(name, value)| (name.as_str(), value.as_str().unwrap())).collect();
    differ("variables", format!("{variables:?}"), format!("{want_variables:?}"));
    let specs: Vec<(&MatchSpec, &str)> = found
        .dependencies
        .iter()
        .map(|dependency| match dependency {
            Dependency::Match { spec, text, .. } => (spec, text.as_str()),
            Dependency::Package { .. } => panic!("no file has one"),
        })
        .collect();
    // conda adds `pip` where a `pip:` section stands without it.
    let mut want_specs: Vec<&Value> = want["specs"].as_array().unwrap().iter().collect();
    if want_specs.len() == specs.len() + 1 && !found.pip.is_empty() {
        let at = want_specs.iter().rposition(|spec| spec["raw"] == "pip");
        want_specs.remove(at.unwrap());
    }
    differ("number of specs", specs.len().to_string(), want_specs.len().to_string());
    for ((spec, written), want) in specs.iter().zip(&want_specs) {
        differ(written, format!("{}", spec.name), want["name"].as_str().unwrap().to_owned());
        differ(&format!("version of {written}"), format!("{:?}", no_any(spec.version.clone())), format!("{:?}", version(&want["version"])));
        differ(
            &format!("build of {written}"),
            format!("{:?}", spec.build.as_ref().map(ToString::to_string)),
            format!("{:?}", want["build"].as_str()),
        );
        differ(&format!("channel of {written}"), format!("{:?}", channel_name(spec)), format!("{:?}", want["channel"].as_str()));
    }
    out
}

#[test]
fn every_real_file_reads_as_conda_reads_it_or_is_in_the_table() {
    let Some(dir) = data_dir() else {
        println!("skipped: no shared data");
        return;
    };
    let expected: Value = serde_json::from_slice(&std::fs::read(dir.join("expected.json")).unwrap()).unwrap();
    let mut wrong = Vec::new();
    for (name, want) in expected.as_object().unwrap() {
        let bytes = std::fs::read(dir.join(name)).unwrap();
        let listed = DIFFERENT.iter().find(|(file, _)| file == name);
        let decoded = Text::decode(name, &bytes, None).unwrap();
        let written_channels = decoded.text.lines().any(|line| line.starts_with("channels:"));
        let found = read(&[Fetched { name: name.clone(), bytes, base_dir: None }], &[], &options());
        let differences = match &found {
            Ok(found) => differences(found, want, written_channels),
            Err(error) => vec![error.to_string()],
        };
        match (listed, differences.is_empty()) {
            (None, false) => wrong.push(format!("{name}: {}", differences.join("\n    "))),
            (Some(_), true) => wrong.push(format!("{name}: is in the table, but reads as conda reads it")),
            _ => {}
        }
    }
    assert!(wrong.is_empty(), "{} files:\n{}", wrong.len(), wrong.join("\n"));
    assert_eq!(expected.as_object().unwrap().len(), 120);
}

/// The files of the table read as the table says.
#[test]
fn the_files_of_the_table_read_as_the_table_says() {
    let Some(dir) = data_dir() else {
        println!("skipped: no shared data");
        return;
    };
    let load = |name: &str, subdir| {
        let bytes = std::fs::read(dir.join(name)).unwrap();
        read(&[Fetched { name: name.to_owned(), bytes, base_dir: None }], &[], &options_for(subdir))
    };
    let has = |spec: &EnvSpec, name: &str| deps(spec).iter().any(|dep| dep.starts_with(name));
    let linux = load("env-012.yml", Subdir::Linux64).unwrap();
    let osx = load("env-012.yml", Subdir::OsxArm64).unwrap();
    assert!(deps(&linux).contains(&"cxx-compiler <1.11") && has(&linux, "sysroot_linux-64"));
    assert!(deps(&osx).contains(&"cxx-compiler") && !has(&osx, "sysroot_linux-64"));
    let linux = load("env-055.yml", Subdir::Linux64).unwrap();
    assert!(has(&linux, "gdb") && has(&linux, "valgrind") && !has(&linux, "lldb"));
    assert!(has(&load("env-055.yml", Subdir::Osx64).unwrap(), "lldb"));
    assert!(deps(&load("env-089.yml", Subdir::Linux64).unwrap()).contains(&"pytorch~=2.1.0 *cuda12*"));
    assert!(deps(&load("env-089.yml", Subdir::OsxArm64).unwrap()).contains(&"pytorch~=2.1.0"));
    assert_ne!(deps(&load("env-102.yml", Subdir::Linux64).unwrap()), deps(&load("env-102.yml", Subdir::Win64).unwrap()));
    for name in ["env-046.yml", "env-059.yml", "env-118.yml"] {
        let error = load(name, Subdir::Linux64).unwrap_err();
        assert!(!error.hints().is_empty() && !error.places().is_empty(), "{error}");
    }
}
