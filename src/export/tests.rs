use std::path::PathBuf;

use crate::export::{Format, Options, Subject, export};
use crate::prefix::{self, Hashes, ListOptions, Prefix};

fn shared() -> Option<PathBuf> {
    let here = std::env::var_os("TARE_SHARED_DATA")
        .map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../shared/data"), PathBuf::from);
    here.join("prefixes").is_dir().then_some(here)
}

fn compared(name: &str) -> String {
    let version = format!("26.7.1+tare.{}", env!("CARGO_PKG_VERSION"));
    name.replace(&version, "{VERSION}")
}

/// What conda printed for the environments of the shared data, and what tare prints: the same bytes, but for the path and the version.
#[test]
fn conda_prints_the_same_bytes() {
    let Some(shared) = shared() else {
        eprintln!("skipped: no shared data");
        return;
    };
    let (mut same, mut answered, mut refused) = (0, 0, Vec::new());
    let mut wrong = Vec::new();
    let mut folders: Vec<PathBuf> = std::fs::read_dir(shared.join("prefixes")).unwrap().map(|entry| entry.unwrap().path()).collect();
    folders.sort();
    for folder in folders {
        let prefix = Prefix::open(&folder).unwrap();
        let subject = Subject::of_prefix(&prefix, vec!["conda-forge".to_owned()]).unwrap();
        let platform = Some(rattler_conda_types::Subdir::Linux64);
        let exported = |format: Format, change: &dyn Fn(&mut Options)| {
            let mut options = Options { tool_platform: platform, ..Options::default() };
            change(&mut options);
            export(&subject, format, &options).map(|exported| exported.text)
        };
        let list = || prefix::rows(&prefix, &ListOptions::default()).unwrap();
        let mut files: Vec<PathBuf> = std::fs::read_dir(folder.join("expected")).unwrap().map(|entry| entry.unwrap().path()).collect();
        files.sort();
        for file in files {
            let name = file.file_name().unwrap().to_str().unwrap();
            let expected = std::fs::read_to_string(&file).unwrap();
            let ours = match name {
                "env-export.yml" => exported(Format::EnvironmentYaml, &|_| {}),
                "env-export-no-builds.yml" => exported(Format::EnvironmentYaml, &|options| options.no_builds = true),
                "env-export-from-history.yml" => exported(Format::EnvironmentYaml, &|options| options.from_history = true),
                "export.json" => exported(Format::EnvironmentJson, &|_| {}),
                "export-explicit.txt" => exported(Format::Explicit, &|_| {}),
                "export-requirements.txt" => exported(Format::Requirements, &|_| {}),
                "list.txt" => Ok(prefix::list_text(&prefix, &list())),
                "list.json" => Ok(format!("{:#}", serde_json::json!(list()))),
                "list-export.txt" => Ok(prefix::export_text(&list(), platform)),
                "list-explicit-md5.txt" => prefix::explicit_text(&prefix, Hashes::Md5, platform),
                "list-explicit-sha256.txt" => prefix::explicit_text(&prefix, Hashes::Sha256, platform),
                "list-revisions.txt" => prefix.history().map(|revisions| prefix::revisions_text(&revisions)),
                other => panic!("what command wrote {other}?"),
            };
            let shown = format!("{}/{name}", folder.file_name().unwrap().to_str().unwrap());
            if let Some(refusal) = expected.strip_prefix("EXIT ") {
                let reason = refusal.lines().find(|line| line.contains("Error")).unwrap_or_default();
                refused.push(format!(
                    "{shown}: {} (conda: {})",
                    if ours.is_ok() { "tare answers" } else { "tare refuses too" },
                    &reason[..reason.len().min(70)]
                ));
                continue;
            }
            answered += 1;
            let ours = ours.unwrap_or_else(|error| format!("ERROR {error}"));
            let ours = compared(&ours.replace(&*folder.canonicalize().unwrap().to_string_lossy(), "{PREFIX}"));
            // The order of the folder is the order of the file system; a copy of the data may have another one.
            let unsorted = name == "export-explicit.txt" || (name == "env-export-from-history.yml" && subject.requested.is_empty());
            if ours == expected {
                same += 1;
            } else {
                let sorted = |text: &str| {
                    let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
                    lines.sort();
                    lines
                };
                let note = if unsorted && sorted(&ours) == sorted(&expected) { " (only the order)" } else { "" };
                let line = ours.lines().zip(expected.lines()).find(|(a, b)| a != b);
                wrong.push(format!("{shown}{note}: {line:?}"));
            }
        }
    }
    println!("{same}/{answered} files of conda are the same bytes; where conda refuses:\n{}", refused.join("\n"));
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
