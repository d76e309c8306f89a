//! `export`, `list` in conda's forms, `convert`, `verify`, `diff`.

use std::path::{Path, PathBuf};

use crate::common::TestEnv;

fn shared() -> Option<PathBuf> {
    let here = std::env::var_os("TARE_SHARED_DATA")
        .map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../shared/data"), PathBuf::from);
    here.join("prefixes").is_dir().then(|| here.canonicalize().unwrap())
}

/// The commands that answer as conda's did, by the file with its answer.
const COMMANDS: [(&str, &[&str]); 12] = [
    ("env-export.yml", &["env", "export"]),
    ("env-export-no-builds.yml", &["env", "export", "--no-builds"]),
    ("env-export-from-history.yml", &["env", "export", "--from-history"]),
    ("export.json", &["export", "--format", "json"]),
    ("export-explicit.txt", &["export", "--format", "explicit"]),
    ("export-requirements.txt", &["export", "--format", "requirements"]),
    ("list.txt", &["list"]),
    ("list.json", &["list", "--json"]),
    ("list-export.txt", &["list", "--export"]),
    ("list-explicit-md5.txt", &["list", "--explicit", "--md5"]),
    ("list-explicit-sha256.txt", &["list", "--explicit", "--sha256"]),
    ("list-revisions.txt", &["list", "--revisions"]),
];

#[test]
fn the_program_prints_what_conda_prints() {
    let Some(shared) = shared() else {
        eprintln!("skipped: no shared data");
        return;
    };
    let version = format!("26.7.1+tare.{}", env!("CARGO_PKG_VERSION"));
    let env = TestEnv::new().var("CONDA_SUBDIR", "linux-64").var("CONDA_CHANNELS", "conda-forge");
    let (mut same, mut total, mut wrong) = (0, 0, Vec::new());
    for name in ["bare", "mac-notebook", "train", "vision_exp"] {
        let prefix = shared.join("prefixes").join(name);
        for (file, command) in COMMANDS {
            let expected = std::fs::read_to_string(prefix.join("expected").join(file)).unwrap();
            if expected.starts_with("EXIT ") {
                continue;
            }
            total += 1;
            let mut arguments = command.to_vec();
            arguments.extend(["-p", prefix.to_str().unwrap()]);
            let ran = env.tare(&arguments);
            let ours = ran.stdout.replace(prefix.to_str().unwrap(), "{PREFIX}").replace(&version, "{VERSION}");
            if ran.code == 0 && ours == expected { same += 1 } else { wrong.push(format!("{name}/{file}: {}", ran.stderr)) }
        }
    }
    println!("{same}/{total} outputs of the program are conda's, byte for byte");
    assert!(wrong.is_empty(), "{wrong:#?}");
}

fn prefix_with(env: &TestEnv, name: &str) -> PathBuf {
    let prefix = env.envs().join(name);
    std::fs::create_dir_all(prefix.join("conda-meta")).unwrap();
    std::fs::write(prefix.join("conda-meta/history"), "==> 2026-01-01 10:00:00 <==\n# cmd: x\n# update specs: ['a']\n").unwrap();
    prefix
}

fn record(prefix: &Path, name: &str, version: &str) {
    let sha = format!("{:064x}", name.len());
    let text = format!(
        r#"{{"name":"{name}","version":"{version}","build":"0","build_number":0,"subdir":"linux-64","depends":[],"fn":"{name}-{version}-0.conda",
        "url":"https://user:pw@conda.anaconda.org/t/tk-secret/c/linux-64/{name}-{version}-0.conda","channel":"c","sha256":"{sha}","files":[]}}"#
    );
    std::fs::write(prefix.join(format!("conda-meta/{name}-{version}-0.json")), text).unwrap();
}

#[test]
fn every_format_is_without_secrets_and_deterministic() {
    let env = TestEnv::new();
    let prefix = prefix_with(&env, "e");
    record(&prefix, "a", "1.0");
    record(&prefix, "pip", "25");
    let info = prefix.join("lib/python3.11/site-packages/tool-1.dist-info");
    std::fs::create_dir_all(&info).unwrap();
    std::fs::write(info.join("METADATA"), "Name: tool\nVersion: 1\n").unwrap();
    let direct = r#"{"url":"https://user:pw@host.example/tool.git","vcs_info":{"vcs":"git","commit_id":"0123456789012345678901234567890123456789"}}"#;
    std::fs::write(info.join("direct_url.json"), direct).unwrap();
    for format in [
        "environment-yaml",
        "environment-json",
        "requirements",
        "pip",
        "pixi",
        "tare",
        "pylock",
        "dockerfile",
        "apptainer",
        "cyclonedx",
        "spdx",
    ] {
        let first = env.tare(&["export", "-n", "e", "--format", format, "--direct-urls"]).ok();
        for secret in ["pw", "tk-secret", "user:"] {
            assert!(!first.stdout.contains(secret), "{format}: {}", first.stdout);
        }
        let kept = format != "requirements" && format != "explicit";
        assert_eq!(first.stdout.contains("0123456789012345678901234567890123456789"), kept, "{format}: {}", first.stdout);
        let second = env.tare(&["export", "-n", "e", "--format", format, "--direct-urls"]).ok();
        assert_eq!(first.stdout, second.stdout, "{format}");
    }
    env.tare(&["export", "-n", "e", "--format", "explicit"]).expect_code(1).stderr_has("`tool`");
    // conda-lock has archives by URL only.
    env.tare(&["export", "-n", "e", "--format", "conda-lock"]).expect_code(2).stderr_has("`tool`");
    env.tare(&["export", "-n", "e", "--format", "nonsense"]).expect_code(2).stderr_has("environment-yaml");
    env.tare(&["export", "-n", "e", "-o", "strange.xyz"]).expect_code(2).stderr_has("--format");
    env.tare(&["export", "-n", "e", "-o", "bom.cdx.json"]).ok();
    assert!(std::fs::read_to_string(env.work().join("bom.cdx.json")).unwrap().contains("\"CycloneDX\""));
    env.tare(&["export", "-n", "e", "--requested"]).ok().stdout_has("- tool @ git+https://host.example/tool.git@0123");
}

#[test]
fn locks_are_converted_and_compared() {
    let env = TestEnv::new();
    let prefix = prefix_with(&env, "e");
    record(&prefix, "a", "1.0");
    record(&prefix, "bb", "2.0");
    for name in ["tare.lock", "pixi.lock", "x.conda-lock.yml", "explicit.txt", "environment.yml"] {
        env.tare(&["export", "-n", "e", "--sha256", "-o", name]).ok();
        env.tare(&["diff", "e", name]).ok().stdout_has("no differences");
    }
    for name in ["tare.lock", "pixi.lock", "x.conda-lock.yml", "explicit.txt"] {
        let yaml = env.tare(&["convert", name, "--to", "environment-yaml"]).ok().stdout;
        assert!(yaml.contains("  - a=1.0=0\n  - bb=2.0=0\n"), "{name}: {yaml}");
        env.tare(&["convert", name, "--to", "conda-lock", "-o", "again.conda-lock.yml"]).ok();
        env.tare(&["diff", name, "again.conda-lock.yml"]).ok();
        env.tare(&["verify", "-n", "e", name]).ok();
    }
    std::fs::remove_file(prefix.join("conda-meta/bb-2.0-0.json")).unwrap();
    record(&prefix, "bb", "3.0");
    env.tare(&["diff", "tare.lock", "e"]).expect_code(4).stdout_has("~ bb  2.0 -> 3.0");
    let json = env.tare(&["diff", "tare.lock", "e", "--json"]).expect_code(4).json();
    assert_eq!((json["equal"].as_bool(), json["differences"][0]["fields"][0].as_str()), (Some(false), Some("version")));
    env.tare(&["diff", "tare.lock", "e", "--markdown"]).expect_code(4).stdout_has("| ~ | bb | 2.0 | 3.0 |");
    env.tare(&["verify", "-n", "e", "tare.lock"]).expect_code(5).stdout_has("not as locked  (bb)");
    let json = env.tare(&["verify", "-n", "e", "tare.lock", "--json"]).expect_code(5).json();
    assert_eq!(json["findings"][0]["fault"], "drift");
    env.tare(&["diff", "no-such-file.lock", "e"]).expect_code(2);
}

#[test]
fn channels_survive_an_export() {
    use crate::common::channel::{Channel, Package};
    let env = TestEnv::new();
    let (mut first, mut second) = (Channel::new(env.path().join("first")), Channel::new(env.path().join("second")));
    first.add(&Package::new("a", "1.0").file("share/a", ""));
    second.add(&Package::new("a", "2.0").file("share/a", ""));
    second.add(&Package::new("b", "1.0").file("share/b", ""));
    let (one, two) = (first.url(), second.url());
    env.write("environment.yml", format!("name: e\nchannels: ['{one}', '{two}', nodefaults]\ndependencies: [a]\n"));
    env.tare(&["create", "-f", "environment.yml"]).ok();
    env.tare(&["create", "-n", "flags", "--override-channels", "-c", &one, "-c", &two, "a"]).ok();
    env.tare(&["lock", "-f", "environment.yml"]).ok();
    env.tare(&["sync", "-n", "synced"]).ok();
    let wanted = serde_json::json!([one, two, "nodefaults"]);
    let real = |text: &str| text.replace("[ROOT]", &env.path().display().to_string()).replace("[ENVS]", &env.envs().display().to_string());
    for (number, name) in ["e", "flags", "synced"].into_iter().enumerate() {
        for (more, forms) in [&[][..], &["--requested"], &["--from-history"], &["--no-builds"]].into_iter().enumerate() {
            let text = real(&env.tare(&[&["export", "-n", name], forms].concat()).ok().stdout);
            let read: serde_json::Value = serde_yaml::from_str(&text).unwrap();
            let channels: Vec<&str> =
                read["channels"].as_array().unwrap().iter().map(|name| name.as_str().unwrap().trim_end_matches('/')).collect();
            let expected: Vec<&str> = wanted.as_array().unwrap().iter().map(|name| name.as_str().unwrap().trim_end_matches('/')).collect();
            assert_eq!(channels, expected, "{name} {forms:?}");
            env.write("again.yml", &text);
            let again = format!("again{number}{more}");
            // A channel more would have to be fetched, and nothing can be here.
            let made = env.tare(&["create", "-n", &again, "-f", "again.yml"]).ok();
            assert!(!made.stderr.contains("appended"), "{}", made.stderr);
            env.tare(&["diff", "e", &again]).ok();
        }
    }
    let converted = real(&env.tare(&["convert", "tare.lock", "--to", "environment-yaml"]).ok().stdout);
    assert!(converted.contains("- nodefaults"), "{converted}");
}

#[test]
fn what_is_made_of_this_machine_is_refused_for_others() {
    let env = TestEnv::new();
    let prefix = prefix_with(&env, "e");
    record(&prefix, "a", "1.0");
    let lock = env.tare(&["export", "-n", "e", "--format", "tare"]).ok().stdout;
    // As `tare lock` writes a package of `host`: nothing can be read off its address.
    let lock = lock.replace("https://conda.anaconda.org/c/", "host:///");
    let facts = "  name: a\n  version: '1.0'\n  build: '0'\n  build_number: 0\n  subdir: linux-64\n  sha256:";
    env.write("host.lock", lock.replace("  sha256:", facts));
    for format in ["dockerfile", "apptainer", "explicit", "conda-lock"] {
        for command in [["export", "host.lock", "--format", format], ["convert", "host.lock", "--to", format]] {
            let told = env.tare(&command);
            assert!(told.code != 0 && told.stdout.is_empty(), "{command:?}: {}", told.stdout);
            told.stderr_has("`a`").stderr_has("`host`");
        }
    }
    env.tare(&["convert", "host.lock", "--to", "environment-yaml"]).ok().stdout_has("- host");
    // tare reads its own pixi.lock with it, so it is written, and told.
    env.tare(&["convert", "host.lock", "--to", "pixi"]).ok().stderr_has("pixi cannot: `a` is of the channel `host`");
}

#[test]
fn the_name_of_a_file_goes_through_its_lock() {
    use crate::common::channel::{Channel, Package};
    let env = TestEnv::new();
    let mut channel = Channel::new(env.path().join("channel"));
    channel.add(&Package::new("a", "1.0").file("share/a", ""));
    env.write("environment.yml", format!("name: demo\nchannels: ['{}', nodefaults]\ndependencies: [a]\n", channel.url()));
    env.tare(&["lock", "-f", "environment.yml"]).ok();
    env.tare(&["export", "tare.lock", "--format", "environment-yaml"]).ok().stdout_has("name: demo\n");
    env.tare(&["export", "tare.lock", "-o", "again.yml"]).ok().stderr_has("wrote `again.yml`: environment-yaml");
    // A list without packages is allowed, and told.
    env.write("empty.txt", "@EXPLICIT\n");
    env.tare(&["create", "-n", "empty", "-f", "empty.txt"]).ok().stderr_has("`empty.txt` lists no package");
    env.write("requirements.txt", "no-such-package\n");
    let list = ["create", "-n", "r", "--override-channels", "-c", &channel.url(), "-f", "requirements.txt"];
    env.tare(&list).expect_code(3).stderr_has("if it is pip's, make an environment.yml");
    // What is damaged is said before it is made anew.
    env.tare(&["sync", "-n", "synced"]).ok();
    std::fs::remove_file(env.envs().join("synced/share/a")).unwrap();
    env.tare(&["sync", "-n", "synced"]).ok().stderr_has("is not as installed: `share/a` is missing; it is made anew");
    assert!(env.envs().join("synced/share/a").exists());
    // Commands of other tools.
    env.tare(&["add", "numpy"]).expect_code(2).stderr_has("tare install -n NAME PACKAGE");
    env.tare(&["freeze", "--json"]).expect_code(2).stdout_has("--format pip");
    let venv = env.path().join("venv");
    std::fs::create_dir_all(&venv).unwrap();
    std::fs::write(venv.join("pyvenv.cfg"), "home = /usr/bin\n").unwrap();
    let told = env.tare(&["install", "-p", venv.to_str().unwrap(), "a"]).expect_code(1);
    told.stderr_has("is a virtual environment of Python").stderr_has("-m pip install NAME");
}
