use std::path::PathBuf;

use super::*;

fn shared() -> Option<PathBuf> {
    let here = std::env::var_os("TARE_SHARED_DATA")
        .map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../shared/data"), PathBuf::from);
    here.join("prefixes").is_dir().then_some(here)
}

fn file(folder: &Path, name: &str, text: &str) -> Side {
    let path = folder.join(name);
    std::fs::write(&path, text).unwrap();
    Side::of_file(name, &path, Subdir::Linux64).unwrap()
}

fn explicit(packages: &[&str]) -> String {
    let lines: String = packages.iter().map(|package| format!("https://conda.anaconda.org/c/linux-64/{package}\n")).collect();
    format!("# platform: linux-64\n@EXPLICIT\n{lines}")
}

#[test]
fn locks_differ_in_versions_builds_channels_and_hashes() {
    let folder = tempfile::tempdir().unwrap();
    let hash = |digit: &str| digit.repeat(32);
    let a = file(
        folder.path(),
        "a.txt",
        &explicit(&["gone-1-0.conda", "built-1-h0_0.conda", "new-1-0.conda", &format!("hashed-1-0.conda#{}", hash("a")), "same-1-0.conda"]),
    );
    let b_text = explicit(&["come-1-0.conda", "built-1-h1_0.conda", "new-2-0.conda", &format!("hashed-1-0.conda#{}", hash("b"))])
        + "https://example.org/d/linux-64/same-1-0.conda\n";
    let b = file(folder.path(), "b.txt", &b_text);
    let report = compare(&a, &b, None).unwrap();
    insta::assert_snapshot!(report.text(), @r"
    --- a.txt
    +++ b.txt
    linux-64
      ~ built  1 h0_0 -> 1 h1_0
      + come  1 0 c
      - gone  1 0 c
      ~ hashed  1 #aaaaaaaaaaaa -> 1 #bbbbbbbbbbbb
      ~ new  1 -> 2
      ~ same  1 c -> 1 https://example.org/d
    1 added, 1 removed, 4 changed
    ");
    insta::assert_snapshot!(report.markdown().lines().take(6).collect::<Vec<_>>().join("\n"), @r"
    **a.txt** → **b.txt**: 1 added, 1 removed, 4 changed

    ### `linux-64`

    | | package | before | after |
    |---|---|---|---|
    ");
    assert!(compare(&a, &a, None).unwrap().equal);
}

#[test]
fn a_request_is_compared_with_what_there_is() {
    let folder = tempfile::tempdir().unwrap();
    let lock = file(folder.path(), "l.txt", &explicit(&["python-3.11.9-h0_0.conda", "numpy-1.26.4-py311_0.conda", "more-1-0.conda"]));
    let yml = file(folder.path(), "e.yml", "channels: [c, nodefaults]\ndependencies: [python=3.11, numpy>=2, scipy]\n");
    let report = compare(&yml, &lock, None).unwrap();
    insta::assert_snapshot!(report.text(), @r"
    --- e.yml
    +++ l.txt
    linux-64
      ! numpy  `numpy>=2` is asked for, and there is 1.26.4 py311_0 c
      ! scipy  `scipy` is asked for and not there
    1 missing, 1 not as asked for
    ");
    let other = file(folder.path(), "f.yml", "channels: [c, nodefaults]\ndependencies: [python=3.12, numpy>=2]\nvariables: {A: 1}\n");
    let report = compare(&yml, &other, None).unwrap();
    let changes: Vec<_> = report.differences.iter().map(|difference| (difference.name.as_str(), difference.change)).collect();
    assert_eq!(changes, [("python", Change::Changed), ("scipy", Change::Removed), ("A", Change::Added)]);
}

#[test]
fn an_environment_is_equal_to_its_own_exports() {
    let Some(shared) = shared() else {
        eprintln!("skipped: no shared data");
        return;
    };
    use crate::export::{Format, Options, export};
    let mut equal = 0;
    for name in ["bare", "mac-notebook", "train", "vision_exp"] {
        let prefix = Prefix::open(shared.join("prefixes").join(name)).unwrap();
        let subject = Subject::of_prefix(&prefix, vec!["conda-forge".to_owned()]).unwrap();
        let environment = Side::of_prefix(name, &prefix).unwrap();
        let folder = tempfile::tempdir().unwrap();
        for (format, file) in [
            (Format::EnvironmentYaml, "environment.yml"),
            (Format::Explicit, "explicit.txt"),
            (Format::CondaLock, "conda-lock.yml"),
            (Format::Pixi, "pixi.lock"),
            (Format::Tare, "tare.lock"),
        ] {
            let options = Options { hashes: crate::prefix::Hashes::Sha256, direct_urls: true, no_builds: false, ..Options::default() };
            let text = match export(&subject, format, &options) {
                Ok(exported) => exported.text,
                Err(error) => {
                    // What pip installed from an index has no URL.
                    // conda-lock has one constraint for each dependency.
                    if format == Format::CondaLock && format!("{error}").contains(" twice") {
                        continue;
                    }
                    let expected = if name == "train" { "`einops`" } else { "`rich`" };
                    assert!(!subject.python.is_empty() && format!("{error}").contains(expected), "{name} {file}: {error}");
                    continue;
                }
            };
            let path = folder.path().join(file);
            std::fs::write(&path, &text).unwrap();
            let other = Side::of_file(file, &path, prefix.subdir().unwrap()).unwrap_or_else(|error| panic!("{name} {file}: {error}"));
            let report = compare(&environment, &other, None).unwrap_or_else(|error| panic!("{name} {file}: {error}"));
            assert!(report.equal, "{name} {file}: {}", report.text());
            equal += 1;
        }
    }
    println!("{equal} exports are equal to their environments");
    assert!(equal >= 10);
}

/// Every lock of the shared data, converted to every format that can hold it, has the same packages when read again.
#[test]
fn locks_convert_and_read_back_to_the_same_packages() {
    let Some(shared) = shared() else {
        eprintln!("skipped: no shared data");
        return;
    };
    use crate::export::{Format, Options, export, export_file};
    let folder = tempfile::tempdir().unwrap();
    let (mut same, mut platforms, mut explicit, mut refused) = (0, 0, 0, BTreeMap::<String, usize>::new());
    let mut files: Vec<PathBuf> = std::fs::read_dir(shared.join("locks")).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    for file in &files {
        let label = file.file_name().unwrap().to_str().unwrap();
        let Ok(lock) = lock::read_file(file, &lock::ReadOptions::default()) else {
            *refused.entry("not read (several environments)".into()).or_default() += 1;
            continue;
        };
        let Ok(before) = Side::of_lock(label, &lock) else {
            *refused.entry("packages built from source".into()).or_default() += 1;
            continue;
        };
        for (format, name) in [(Format::Tare, "tare.lock"), (Format::Pixi, "pixi.lock"), (Format::CondaLock, "x.conda-lock.yml")] {
            let exported = match export_file(file, format, &Options::default(), None) {
                Ok(exported) => exported,
                Err(error) => {
                    assert!(error.message().contains('`'), "{label}: {error}");
                    *refused.entry(format!("{name} cannot hold it")).or_default() += 1;
                    continue;
                }
            };
            let path = folder.path().join(name);
            std::fs::write(&path, exported.text).unwrap();
            let after = Side::of_file(name, &path, Subdir::Linux64).unwrap_or_else(|error| panic!("{label} as {name}: {error}"));
            let report = compare(&before, &after, None).unwrap_or_else(|error| panic!("{label} as {name}: {error}"));
            assert!(report.equal, "{label} as {name}: {}", report.text());
            same += 1;
        }
        for platform in lock.platforms.iter().take(1) {
            let subject = Subject::of_lock(&lock, platform).unwrap();
            let of_one = compare(&before, &before, Some(&platform.name)).unwrap();
            assert!(of_one.equal);
            for format in [
                Format::EnvironmentYaml,
                Format::CycloneDx,
                Format::Spdx,
                Format::Explicit,
                Format::Dockerfile,
                Format::Pylock,
                Format::Pip,
            ] {
                let options = Options { direct_urls: true, hashes: crate::prefix::Hashes::Sha256, ..Options::default() };
                let result = if format == Format::Pylock {
                    export_file(file, format, &options, Some(&platform.name))
                } else {
                    export(&subject, format, &options)
                };
                match result {
                    Ok(exported) if format == Format::EnvironmentYaml => {
                        let path = folder.path().join("environment.yml");
                        std::fs::write(&path, exported.text).unwrap();
                        let request =
                            Side::of_file("environment.yml", &path, platform.subdir).unwrap_or_else(|error| panic!("{label}: {error}"));
                        let report = compare(&request, &before, Some(&platform.name)).unwrap();
                        let odd: Vec<_> = report.differences.iter().filter(|difference| difference.half == Half::Conda).collect();
                        assert!(odd.is_empty(), "{label} {}: {odd:?}", platform.name);
                    }
                    Ok(exported) if format == Format::Pylock => {
                        let path = folder.path().join("pylock.toml");
                        std::fs::write(&path, exported.text).unwrap();
                        let again = Side::of_file("pylock.toml", &path, platform.subdir).unwrap_or_else(|error| panic!("{label}: {error}"));
                        let report = compare(&before, &again, Some(&platform.name)).unwrap();
                        let lost: Vec<_> = report.differences.iter().filter(|difference| difference.change != Change::Changed).collect();
                        assert!(lost.is_empty(), "{label} {}: {lost:?}", platform.name);
                    }
                    Ok(exported) if format == Format::Explicit => {
                        let path = folder.path().join("explicit.txt");
                        std::fs::write(&path, exported.text).unwrap();
                        let again =
                            Side::of_file("explicit.txt", &path, platform.subdir).unwrap_or_else(|error| panic!("{label}: {error}"));
                        let report = compare(&before, &again, Some(&platform.name)).unwrap();
                        assert!(report.equal, "{label} {}: {}", platform.name, report.text());
                        explicit += 1;
                    }
                    Ok(exported) => assert!(!exported.text.is_empty()),
                    Err(error) => assert!(format!("{error}").contains('`') || format!("{error}").contains("Linux"), "{label}: {error}"),
                }
            }
            platforms += 1;
        }
    }
    println!("{} locks, {platforms} platforms; {same} conversions and {explicit} explicit lists read back equal; {refused:?}", files.len());
    assert!(same > files.len() && explicit > 0);
}
