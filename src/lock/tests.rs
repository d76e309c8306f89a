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

#[test]
fn every_real_lock_comes_back_the_same_from_a_tare_lock() {
    let Some(folder) = data() else { return };
    let (mut files, mut read_environments, mut packages) = (0, 0, 0);
    let mut names: Vec<PathBuf> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    names.sort();
    for path in names {
        files += 1;
        for options in environments(&path) {
            read_environments += 1;
            let lock = read_file(&path, &options).unwrap_or_else(|error| panic!("{error}"));
            let text = write_tare(&lock).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
            assert_eq!(text, write_tare(&lock).unwrap());
            let again =
                read("tare.lock", text.as_bytes(), &ReadOptions { environment: options.environment.clone(), ..ReadOptions::default() })
                    .unwrap_or_else(|error| panic!("{}: {error}", path.display()));
            assert_eq!(conda(&lock), conda(&again), "{}", path.display());
            assert_eq!(pypi(&lock), pypi(&again), "{}", path.display());
            assert_eq!(lock.channels, again.channels);
            assert_eq!(again.source, Format::Tare);
            packages += conda(&lock).len() + pypi(&lock).len();
            assert_eq!(text, write_tare(&again).unwrap(), "{}", path.display());
        }
    }
    eprintln!("{files} files, {read_environments} environments, {packages} packages");
    assert!(files >= 29 && packages > 5000, "{files} {packages}");
}

#[test]
fn real_locks_go_through_conda_lock_or_are_refused_with_a_name() {
    let Some(folder) = data() else { return };
    let (mut converted, mut refused) = (0, BTreeSet::new());
    let mut names: Vec<PathBuf> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    names.sort();
    for path in names {
        for options in environments(&path) {
            let lock = read_file(&path, &options).unwrap();
            match write_conda_lock(&lock) {
                Err(error) => {
                    assert!(error.to_string().contains("cannot be put into a conda-lock file"), "{error}");
                    refused.insert(error.to_string());
                }
                Ok(text) => {
                    converted += 1;
                    assert_eq!(text, write_conda_lock(&lock).unwrap());
                    let again = read("conda-lock.yml", text.as_bytes(), &ReadOptions::default())
                        .unwrap_or_else(|error| panic!("{}: {error}", path.display()));
                    assert_eq!(again.source, Format::CondaLock);
                    let identity = |lock: &Lock| -> BTreeSet<String> {
                        lock.platforms
                            .iter()
                            .flat_map(|platform| {
                                let conda = platform.conda.iter().map(|record| {
                                    let package = &record.package_record;
                                    format!("{} {} {:?} {:?}", platform.name, record.url, package.md5, package.sha256)
                                });
                                conda.chain(
                                    platform
                                        .pypi
                                        .iter()
                                        .map(|package| format!("{} {} {:?}", platform.name, package.location, package.hashes)),
                                )
                            })
                            .collect()
                    };
                    assert_eq!(identity(&lock), identity(&again), "{}", path.display());
                    assert_eq!(text, write_conda_lock(&again).unwrap(), "{}", path.display());
                }
            }
        }
    }
    for error in &refused {
        eprintln!("refused: {error}");
    }
    eprintln!("{converted} converted");
    assert!(converted >= 20, "{converted} {refused:#?}");
}
