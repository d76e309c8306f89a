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

/// What conda exports and lists can be read back; every line becomes one dependency or package.
#[test]
fn exports_and_lists_of_conda_read() {
    let Some(dir) = data_dir() else {
        println!("skipped: no shared data");
        return;
    };
    let data = dir.parent().unwrap();
    let mut files: Vec<PathBuf> = Vec::new();
    for prefix in std::fs::read_dir(data.join("prefixes")).unwrap() {
        let expected = prefix.unwrap().path().join("expected");
        for name in [
            "export-explicit.txt",
            "list-explicit-md5.txt",
            "list-explicit-sha256.txt",
            "list-export.txt",
            "export-requirements.txt",
            "env-export.yml",
            "env-export-no-builds.yml",
            "env-export-from-history.yml",
            "export.json",
        ] {
            files.push(expected.join(name));
        }
    }
    files.extend((1..=4).map(|n| data.join(format!("locks/explicit-{n}.txt"))));
    let mut read_count = 0;
    for path in files {
        let Ok(bytes) = std::fs::read(&path) else { continue };
        if bytes.starts_with(b"EXIT ") {
            continue;
        }
        let text = String::from_utf8(bytes).unwrap().replace("{PREFIX}", "/envs/x").replace("{VERSION}", "26.7.1");
        let name = path.display().to_string();
        let spec = read(&[Fetched { name: name.clone(), bytes: text.clone().into_bytes(), base_dir: None }], &[], &options())
            .unwrap_or_else(|error| panic!("{error:?}"));
        let lines = text.lines().filter(|line| !line.trim().is_empty() && !line.starts_with(['#', '@'])).count();
        if name.ends_with(".txt") {
            let found = spec.explicit.map_or(spec.dependencies.len(), |explicit| explicit.packages.len());
            assert_eq!(found, lines, "{name}");
        } else {
            assert!(spec.name.is_some() && spec.prefix.is_some(), "{name}");
            assert!(!spec.dependencies.is_empty(), "{name}");
        }
        read_count += 1;
    }
    assert!(read_count >= 20, "{read_count}");
}

/// A lock file is refused as such.
#[test]
fn lock_files_are_refused_as_such() {
    let Some(dir) = data_dir() else {
        println!("skipped: no shared data");
        return;
    };
    let mut count = 0;
    for entry in std::fs::read_dir(dir.parent().unwrap().join("locks")).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        let bytes = std::fs::read(&path).unwrap();
        // The large ones take seconds in a debug build and say the same.
        if name.starts_with("explicit") || bytes.len() > 150_000 {
            continue;
        }
        let error = read(&[Fetched { name, bytes, base_dir: None }], &[], &options()).unwrap_err();
        assert!(error.to_string().contains("this is a lock file"), "{error}");
        count += 1;
    }
    assert!(count >= 5, "{count}");
}
