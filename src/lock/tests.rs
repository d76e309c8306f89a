//! Tests of the readers and writers: real files, malformed files, conversions.

use std::collections::BTreeSet;
use std::path::PathBuf;

use super::*;

fn data() -> Option<PathBuf> {
    let folder = std::env::var_os("TARE_SHARED_DATA").map_or_else(|| PathBuf::from("../shared/data"), PathBuf::from).join("locks");
    if folder.is_dir() {
        return Some(folder);
    }
    eprintln!("skipped: no shared data");
    None
}

/// Every environment of a file.
fn environments(path: &Path) -> Vec<ReadOptions> {
    let text = std::fs::read_to_string(path).unwrap();
    let Ok(document) = serde_yaml::from_str::<serde_yaml::Value>(&text) else { return vec![ReadOptions::default()] };
    let names: Vec<String> = document
        .get("environments")
        .and_then(serde_yaml::Value::as_mapping)
        .map(|map| map.keys().filter_map(serde_yaml::Value::as_str).map(str::to_owned).collect())
        .unwrap_or_default();
    if names.is_empty() {
        return vec![ReadOptions::default()];
    }
    names.into_iter().map(|name| ReadOptions { environment: Some(name), ..ReadOptions::default() }).collect()
}

/// The packages of a lock: platform, name, version, build, URL, hashes, dependencies.
fn conda(lock: &Lock) -> BTreeSet<String> {
    let mut all = BTreeSet::new();
    for platform in &lock.platforms {
        for record in &platform.conda {
            let package = &record.package_record;
            let mut depends = package.depends.clone();
            depends.sort();
            all.insert(format!(
                "{} {} {} {} {} {:?} {:?} {depends:?}",
                platform.name,
                package.name.as_normalized(),
                package.version,
                package.build,
                record.url,
                package.md5.map(|hash| hex(&hash)),
                package.sha256.map(|hash| hex(&hash)),
            ));
        }
    }
    all
}

fn pypi(lock: &Lock) -> BTreeSet<(String, LockedPypi)> {
    let mut all = BTreeSet::new();
    for platform in &lock.platforms {
        for package in &platform.pypi {
            all.insert((platform.name.clone(), package.clone()));
        }
    }
    all
}

fn files() -> Option<Vec<PathBuf>> {
    let mut names: Vec<PathBuf> = std::fs::read_dir(data()?).unwrap().map(|entry| entry.unwrap().path()).collect();
    names.sort();
    Some(names)
}

#[test]
fn every_real_lock_comes_back_the_same_from_a_tare_lock() {
    use rayon::iter::{IntoParallelRefIterator, ParallelIterator};
    let Some(names) = files() else { return };
    let counts: Vec<(usize, usize)> = names
        .par_iter()
        .map(|path| {
            let (mut read_environments, mut packages) = (0, 0);
            for options in environments(path) {
                read_environments += 1;
                let lock = read_file(path, &options).unwrap_or_else(|error| panic!("{error}"));
                let text = write_tare(&lock).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
                let again = read("tare.lock", text.as_bytes(), &options).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
                assert_eq!(conda(&lock), conda(&again), "{}", path.display());
                assert_eq!(pypi(&lock), pypi(&again), "{}", path.display());
                assert_eq!(lock.channels, again.channels);
                assert_eq!(again.source, Format::Tare);
                packages += conda(&lock).len() + pypi(&lock).len();
                assert_eq!(text, write_tare(&again).unwrap(), "{}", path.display());
            }
            (read_environments, packages)
        })
        .collect();
    let (environments, packages) = counts.iter().fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1));
    eprintln!("{} files, {environments} environments, {packages} packages", names.len());
    assert!(names.len() >= 29 && environments >= 37 && packages > 16_000, "{environments} {packages}");
}

#[test]
fn real_locks_go_through_conda_lock_or_are_refused_with_a_name() {
    use rayon::iter::{IntoParallelRefIterator, ParallelIterator};
    let Some(names) = files() else { return };
    // For other tools' parsers, by hand: a folder to leave the files in.
    let keep = std::env::var_os("TARE_TEST_KEEP").map(PathBuf::from);
    let results: Vec<Result<(), String>> = names.par_iter().flat_map_iter(|path| through_conda_lock(path, keep.as_deref())).collect();
    let refused: BTreeSet<&String> = results.iter().filter_map(|result| result.as_ref().err()).collect();
    for error in &refused {
        eprintln!("refused: {error}");
        assert!(error.contains("cannot be put into a conda-lock file"), "{error}");
    }
    let converted = results.iter().filter(|result| result.is_ok()).count();
    eprintln!("{converted} converted of {}", results.len());
    assert!(converted >= 20, "{converted} {refused:#?}");
}

/// Each environment of a file written as conda-lock and read again, or why it was refused.
fn through_conda_lock(path: &Path, keep: Option<&Path>) -> Vec<Result<(), String>> {
    let identity = |lock: &Lock| -> BTreeSet<String> {
        let mut all = BTreeSet::new();
        for platform in &lock.platforms {
            for record in &platform.conda {
                let package = &record.package_record;
                all.insert(format!("{} {} {:?} {:?}", platform.name, record.url, package.md5, package.sha256));
            }
            all.extend(platform.pypi.iter().map(|package| format!("{} {} {:?}", platform.name, package.location, package.hashes)));
        }
        all
    };
    let mut results = Vec::new();
    for (number, options) in environments(path).into_iter().enumerate() {
        let lock = read_file(path, &options).unwrap();
        let text = match write_conda_lock(&lock) {
            Ok(text) => text,
            Err(error) => {
                results.push(Err(error.to_string()));
                continue;
            }
        };
        if let Some(folder) = keep {
            let name = format!("{}-{number}-conda-lock.yml", path.file_name().unwrap().display());
            std::fs::write(folder.join(name), &text).unwrap();
        }
        let again = read("conda-lock.yml", text.as_bytes(), &ReadOptions::default()).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(again.source, Format::CondaLock);
        assert_eq!(identity(&lock), identity(&again), "{}", path.display());
        assert!(text == write_conda_lock(&again).unwrap(), "{}", path.display());
        results.push(Ok(()));
    }
    results
}

/// A small lock of the newest version, to be broken.
const GOOD: &str = "\
version: 7
platforms:
- name: linux-64
  virtual-packages:
  - __glibc=2.28=0
environments:
  default:
    channels:
    - url: https://conda.example/forge/
    indexes:
    - https://pypi.example/simple
    packages:
      linux-64:
      - conda: https://conda.example/forge/linux-64/zlib-1.3-h1_0.conda
      - pypi: https://files.example/a-1.0-py3-none-any.whl
packages:
- conda: https://conda.example/forge/linux-64/zlib-1.3-h1_0.conda
  sha256: aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa
  md5: bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb
  depends:
  - libc >=2
- pypi: https://files.example/a-1.0-py3-none-any.whl
  name: a
  version: '1.0'
  sha256: cccccccccccccccccccccccccccccccccccccccccccccccccccccccccccccccc
  requires_dist:
  - b>=1
";

const GOOD_CONDA_LOCK: &str = "\
version: 1
metadata:
  content_hash: {linux-64: abc}
  channels:
  - url: conda-forge
    used_env_vars: []
  platforms:
  - linux-64
  sources: []
package:
- name: zlib
  version: '1.3'
  manager: conda
  platform: linux-64
  dependencies: {libc: '>=2'}
  url: https://conda.anaconda.org/conda-forge/linux-64/zlib-1.3-h1_0.conda
  hash:
    md5: bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb
  category: main
  optional: false
";

const GOOD_PYLOCK: &str = "\
lock-version = '1.0'
created-by = 'test'
[[packages]]
name = 'Some_Name'
version = '1.0'
index = 'https://user:hunter2@pypi.example/simple'
wheels = [
    {url = 'https://files.example/some_name-1.0-cp311-cp311-linux.whl', hashes = {sha256 = 'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa'}},
    {url = 'https://files.example/some_name-1.0-cp312-cp312-linux.whl', hashes = {sha256 = 'bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb'}},
]
[[packages]]
name = 'tool'
vcs = {type = 'git', url = 'https://git.example/tool', commit-id = '0123456789012345678901234567890123456789', subdirectory = 'x'}
[[packages]]
name = 'local'
directory = {path = 'libs/local', editable = true}
";

fn read_text(name: &str, text: &str) -> Result<Lock> {
    read(name, text.as_bytes(), &ReadOptions::default())
}

#[test]
fn malformed_locks_are_refused_with_place_and_hint() {
    let hash = "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa";
    let cases: Vec<(&str, String, &str)> = vec![
        ("tare.lock", String::new(), "is empty"),
        ("tare.lock", "dependencies: [python]\n".into(), "no lock"),
        ("tare.lock", "just some words\n".into(), "no lock"),
        ("pixi.lock", GOOD.replace("version: 7", "version: 8"), "version 8"),
        ("pixi.lock", GOOD.replace("version: 7", "version: seven"), "whole number"),
        ("pixi.lock", GOOD.replace("version: 7\n", ""), "version"),
        ("pixi.lock", GOOD.replace("- name: linux-64", "- name: amiga-68k"), "amiga-68k"),
        ("pixi.lock", GOOD.replace(hash, "abc"), "sha256"),
        ("pixi.lock", GOOD.replace("md5: bbbb", "md5: zzzz"), "md5"),
        ("pixi.lock", GOOD.replace("  name: a\n", ""), "name"),
        ("pixi.lock", GOOD.replace("zlib-1.3-h1_0.conda\n  sha", "zlib-1.4-h1_0.conda\n  sha"), "does not describe"),
        ("pixi.lock", GOOD.replace("h1_0.conda", "h1_0.zip"), "conda"),
        ("pixi.lock", GOOD.replace("  depends:\n  - libc >=2\n", "  depends: 7\n"), "depends"),
        ("pixi.lock", GOOD.replace("    channels:\n    - url: https://conda.example/forge/\n", ""), "channels"),
        ("pixi.lock", GOOD.replace("b>=1", "b_ >=1"), "malformed requirement"),
        ("pixi.lock", GOOD.replace("b>=1", "ü>=1"), "malformed requirement"),
        ("pixi.lock", GOOD.replace("__glibc=2.28=0", "glibc"), "virtual package"),
        ("pixi.lock", GOOD[..GOOD.len() - 180].to_owned() + "\n  : [", "malformed"),
        ("tare.lock", format!("{GOOD}tare:\n  schema: 99\n"), "newer tare"),
        ("tare.lock", format!("{GOOD}tare:\n  platforms: 7\n"), "`tare:` map"),
        ("conda-lock.yml", GOOD_CONDA_LOCK.replace("manager: conda", "manager: npm"), "npm"),
        ("conda-lock.yml", GOOD_CONDA_LOCK.replace("  platform: linux-64\n", ""), "platform"),
        ("conda-lock.yml", GOOD_CONDA_LOCK.replace("md5: bbbb", "md5: "), "md5"),
        ("conda-lock.yml", GOOD_CONDA_LOCK.replace("zlib-1.3-h1_0", "other-1.3-h1_0"), "disagree"),
        ("conda-lock.yml", GOOD_CONDA_LOCK.replace("  platform: linux-64", "  platform: win-64"), "win-64"),
        ("explicit.txt", "@EXPLICIT\nzlib\n".into(), "no package URL"),
        ("explicit.txt", "@EXPLICIT\nhttps://c.example/f/linux-64/a-1-0.conda#xyz\n".into(), "hash"),
        ("explicit.txt", "@EXPLICIT\nhttps://c.example/f/linux-64/a-1-0.conda\nhttps://c.example/f/osx-64/b-1-0.conda\n".into(), "osx-64"),
        ("explicit.txt", "@EXPLICIT\nhttps://c.example/f/linux-64/a-1-0.conda\nhttps://c.example/f/linux-64/a-2-0.conda\n".into(), "twice"),
        ("pylock.toml", GOOD_PYLOCK.replace("lock-version = '1.0'", "lock-version = '2.0'"), "2.0"),
        ("pylock.toml", GOOD_PYLOCK.replace("'1.0'\ncreated", "1.0\ncreated"), "malformed"),
        ("pylock.toml", GOOD_PYLOCK.replace("directory = {path = 'libs/local', editable = true}", ""), "no source"),
        ("pylock.toml", GOOD_PYLOCK.replace(hash, "abc"), "sha256"),
    ];
    for (name, text) in [("pixi.lock", GOOD), ("conda-lock.yml", GOOD_CONDA_LOCK), ("pylock.toml", GOOD_PYLOCK)] {
        read_text(name, text).unwrap_or_else(|error| panic!("{error}"));
    }
    for (name, text, expected) in cases {
        match read_text(name, &text) {
            Ok(_) => panic!("{name} was read, wanted `{expected}`\n{text}"),
            Err(error) => {
                assert!(error.to_string().contains(expected), "wanted `{expected}`: {error}");
                assert!(!error.places().is_empty(), "{error}");
                assert!(!error.hints().is_empty(), "{error}");
                assert_eq!(error.exit_code(), 2, "{error}");
            }
        }
    }
}

#[test]
fn a_pylock_holds_the_pypi_half_and_no_secret() {
    let lock = read_text("pylock.toml", GOOD_PYLOCK).unwrap();
    let packages = &lock.platforms[0].pypi;
    assert_eq!(packages.iter().map(|package| package.name.as_str()).collect::<Vec<_>>(), ["local", "some-name", "tool"]);
    assert!(packages[0].editable);
    assert_eq!(packages[1].other_files.len(), 1);
    assert_eq!(lock.indexes, ["https://pypi.example/simple"]);
    let vcs = packages[2].vcs.clone().unwrap();
    assert_eq!((vcs.url.as_str(), vcs.subdirectory.as_deref()), ("https://git.example/tool", Some("x")));
    let error = write_conda_lock(&lock).unwrap_err().to_string();
    assert!(error.contains("`any`"), "{error}");
}

#[test]
fn secrets_never_reach_a_lock() {
    let text = GOOD
        .replace("https://conda.example/forge/", "https://user:hunter2@conda.example/t/to-ken/forge/")
        .replace("https://pypi.example", "https://me:hunter2@pypi.example")
        .replace("https://files.example", "https://me:hunter2@files.example");
    let lock = read_text("pixi.lock", &text).unwrap();
    for written in [write_tare(&lock).unwrap(), write_pixi(&lock).unwrap(), write_conda_lock(&lock).unwrap()] {
        assert!(!written.contains("hunter2") && !written.contains("to-ken"), "{written}");
    }
    for (name, value, secret) in [
        ("HF_TOKEN", "x", true),
        ("TOKENIZERS_PARALLELISM", "false", false),
        ("AWS_SECRET_ACCESS_KEY", "x", true),
        ("DATABASE", "postgres://me:pw@host/db", true),
        ("OMP_NUM_THREADS", "8", false),
    ] {
        assert_eq!(make::is_secret(name, value), secret, "{name}");
    }
}

proptest::proptest! {
    #![proptest_config(proptest::prelude::ProptestConfig { cases: 96, failure_persistence: None, ..Default::default() })]
    #[test]
    fn broken_bytes_are_no_panic(which in 0_usize..3, at in 0_usize..900, len in 0_usize..40, put in "[ -~\n]{0,8}") {
        let (name, text) = [("pixi.lock", GOOD), ("conda-lock.yml", GOOD_CONDA_LOCK), ("pylock.toml", GOOD_PYLOCK)][which];
        let start = at.min(text.len());
        let end = (start + len).min(text.len());
        let broken = format!("{}{put}{}", &text[..start], &text[end..]);
        if let Err(error) = read_text(name, &broken) {
            proptest::prop_assert!(!error.places().is_empty());
        }
    }
}
