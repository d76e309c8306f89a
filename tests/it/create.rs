//! `tare create` over small local channels.

use serde_json::json;

use crate::common::TestEnv;
use crate::common::channel::{Channel, Package};

/// A channel with an application, a library in two versions and a GPU and a CPU build.
pub fn small_channel(env: &TestEnv) -> Channel {
    let mut channel = Channel::new(env.path().join("channel"));
    channel.add(&Package::new("lib", "1.0").file("lib/lib.txt", "one"));
    channel.add(&Package::new("lib", "2.0").file("lib/lib.txt", "two").tar_bz2());
    channel.add(
        &Package::new("app", "1.0")
            .depends(&["lib >=1"])
            .prefixed("bin/app", "#!/bin/sh\necho prefix {PREFIX}\necho variable $GREETING\nexit ${1:-0}\n")
            .file("share/app/data", "data")
            .symlink("bin/app-link", "app"),
    );
    channel.add(&Package::new("compute", "1.0").build("cuda126_0").depends(&["__cuda >=12.6"]).file("share/compute", "gpu"));
    channel.add(&Package::new("other", "1.0").file("share/app/data", "clash"));
    channel
}

fn environment_yml(channel: &Channel, rest: &str) -> String {
    format!("name: demo\nchannels:\n  - {}\n  - nodefaults\n{rest}", channel.url())
}

#[test]
fn creates_lists_and_runs() {
    let env = TestEnv::new();
    let channel = small_channel(&env);
    env.write("environment.yml", environment_yml(&channel, "dependencies:\n  - app\nvariables:\n  GREETING: hello\n"));
    let made = env.tare(&["create", "-f", "environment.yml"]).ok();
    assert_eq!(made.stdout, "", "create has no data to print");
    made.stderr_has("demo").stderr_has("tare run -n demo");

    let prefix = env.envs().join("demo");
    assert_eq!(std::fs::read_to_string(prefix.join("lib/lib.txt")).unwrap(), "two");
    env.tare(&["run", "-n", "demo", "app"]).ok().stdout_has("prefix [ENVS]/demo\n").stdout_has("variable hello\n");
    env.tare(&["run", "-n", "demo", "app-link", "7"]).expect_code(7);
    // The command takes the place of tare: what ends it is what the caller sees, and a shell shows 128 + signal number.
    for (signal, number) in [("TERM", 15), ("KILL", 9)] {
        let script = format!("{} run -n demo sh -c 'kill -{signal} $$'; echo $?", env!("CARGO_BIN_EXE_tare"));
        let mut shell = std::process::Command::new("sh");
        shell.args(["-c", &script]);
        for (name, value) in env.command(&[]).get_envs() {
            if let Some(value) = value {
                shell.env(name, value);
            }
        }
        let out = shell.current_dir(env.work()).output().unwrap();
        assert_eq!(String::from_utf8_lossy(&out.stdout).trim(), (128 + number).to_string());
    }
    env.tare(&["run", "-n", "demo", "no-such-command"]).expect_code(127).stderr_has("no-such-command");
    env.write("plain", "not a program");
    env.tare(&["run", "-n", "demo", "./plain"]).expect_code(126);
    env.tare(&["run", "-n", "nowhere", "true"]).expect_code(125).stderr_has("nowhere");

    let list = env.tare(&["list", "-n", "demo", "--json"]).ok().json();
    let names: Vec<_> = list.as_array().unwrap().iter().map(|package| package["name"].as_str().unwrap().to_owned()).collect();
    assert_eq!(names, ["app", "lib"]);
    let known = env.tare(&["env", "list", "--json"]).ok().json();
    assert!(known["envs"].as_array().unwrap().iter().any(|path| path.as_str().unwrap().ends_with("/demo")), "{known}");

    let meta = prefix.join("conda-meta");
    let record: serde_json::Value = serde_json::from_slice(&std::fs::read(meta.join("app-1.0-0.json")).unwrap()).unwrap();
    assert_eq!(record["depends"], json!(["lib >=1"]));
    assert_eq!(record["files"], json!(["bin/app", "bin/app-link", "share/app/data"]));
    assert!(record["link"].get("source").is_none() && record.get("extracted_package_dir").is_none(), "{record:#}");
    let history = std::fs::read_to_string(meta.join("history")).unwrap();
    assert!(history.contains("::app-1.0-0") && history.contains("# update specs: "), "{history}");
    let state: serde_json::Value = serde_json::from_slice(&std::fs::read(meta.join("state")).unwrap()).unwrap();
    assert_eq!(state["env_vars"]["GREETING"], "hello");
    let known = std::fs::read_to_string(env.home().join(".conda/environments.txt")).unwrap();
    assert!(known.lines().any(|line| line == prefix.display().to_string()), "{known}");
    // Only the environment and its lock file are left.
    let left: Vec<_> = std::fs::read_dir(env.envs()).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    assert!(left.iter().all(|name| name == "demo" || name == ".demo.lock"), "{left:?}");
}

#[test]
fn an_existing_target_is_kept_unless_it_is_the_same() {
    let env = TestEnv::new();
    let channel = small_channel(&env);
    let file = environment_yml(&channel, "dependencies: [app]\n");
    env.write("environment.yml", &file);
    env.tare(&["create", "-f", "environment.yml"]).ok();
    env.tare(&["create", "-f", "environment.yml"]).ok().stderr_has("nothing to do");
    let again = env.tare(&["create", "-f", "environment.yml", "--json"]).ok().json();
    assert_eq!(again["message"].as_str().map(|text| text.contains("nothing to do")), Some(true), "{again}");

    env.write("environment.yml", file.replace("[app]", "[lib=1.0]"));
    env.tare(&["create", "-f", "environment.yml"]).expect_code(1).stderr_has("--force");
    assert!(env.envs().join("demo/bin/app").exists());
    env.tare(&["create", "-f", "environment.yml", "--force"]).ok();
    assert!(!env.envs().join("demo/bin/app").exists());
    assert_eq!(std::fs::read_to_string(env.envs().join("demo/lib/lib.txt")).unwrap(), "one");

    // A broken environment is not "the same".
    std::fs::remove_file(env.envs().join("demo/lib/lib.txt")).unwrap();
    env.tare(&["create", "-f", "environment.yml"]).expect_code(1).stderr_has("lib/lib.txt");
    env.tare(&["create", "-f", "environment.yml", "--force"]).ok();

    std::fs::create_dir(env.work().join("empty")).unwrap();
    env.tare(&["create", "-p", "empty", "-f", "environment.yml"]).ok();
    assert!(env.work().join("empty/conda-meta/history").exists());

    env.write("mine/notes.txt", "precious");
    for force in [&[][..], &["--force"]] {
        let args = [&["create", "-p", "mine", "-f", "environment.yml"], force].concat();
        env.tare(&args).expect_code(1).stderr_has("mine");
        assert_eq!(std::fs::read_to_string(env.work().join("mine/notes.txt")).unwrap(), "precious");
    }
    env.write("file", "x");
    env.tare(&["create", "-p", "file", "-f", "environment.yml"]).expect_code(1);
}

#[test]
fn dry_run_has_the_shape_of_conda() {
    let env = TestEnv::new();
    let channel = small_channel(&env);
    let plan = env
        .tare(&["create", "--prefix", "p", "--dry-run", "--json", "--override-channels", "--channel", &channel.url(), "app"])
        .ok()
        .json();
    assert_eq!(plan["success"], true);
    assert_eq!(plan["dry_run"], true);
    assert_eq!(plan["prefix"], "[WORK]/p");
    for action in ["FETCH", "LINK"] {
        let packages = plan["actions"][action].as_array().unwrap();
        let names: Vec<_> = packages.iter().map(|package| package["name"].as_str().unwrap()).collect();
        assert_eq!(names, ["lib", "app"], "dependencies first");
        for package in packages {
            for key in
                ["name", "version", "build_string", "build_number", "channel", "url", "fn", "dist_name", "md5", "sha256", "size", "subdir"]
            {
                assert!(!package[key].is_null(), "{key} is missing in {package:#}");
            }
        }
    }
    assert!(!env.work().join("p").exists());
    assert!(plan["virtual_packages"].as_array().is_some_and(|list| !list.is_empty()), "{plan:#}");
}

#[test]
fn the_platform_of_conda_subdir_and_flags_is_honoured() {
    let env = TestEnv::new();
    let mut channel = small_channel(&env);
    channel.add(&Package::new("arm", "1").subdir("linux-aarch64"));
    let args = ["create", "-n", "x", "--dry-run", "--json", "--override-channels", "-c", &channel.url(), "arm"];
    env.tare(&args).expect_code(3);
    let plan = env.tare(&[&args[..], &["--platform", "linux-aarch64"]].concat()).ok().json();
    assert_eq!(plan["actions"]["LINK"][0]["subdir"], "linux-aarch64");
    let env = env.var("CONDA_SUBDIR", "linux-aarch64");
    env.tare(&args).ok();
}

#[test]
fn the_gpu_is_never_decided_silently() {
    let env = TestEnv::new();
    let mut channel = small_channel(&env);
    channel.add(&Package::new("pytorch", "2.7.1").build("cuda126_py311_0").depends(&["__cuda >=12"]).key("build_number", json!(300)));
    channel.add(&Package::new("pytorch", "2.7.1").build("cpu_generic_0").key("build_number", json!(0)));
    let args = |more: &[&'static str]| -> Vec<String> {
        let base = ["create", "-n", "x", "--dry-run", "--override-channels", "-c", &channel.url()];
        base.iter().map(|arg| arg.to_string()).chain(more.iter().map(|arg| arg.to_string())).collect()
    };
    let run = |more: &[&'static str]| {
        let args = args(more);
        env.tare(&args.iter().map(String::as_str).collect::<Vec<_>>())
    };
    run(&["pytorch"]).ok().stderr_has("CPU build").stderr_has("--cuda");
    run(&["pytorch", "--cuda", "12.6"]).ok().stderr_has("CUDA");
    run(&["pytorch", "--gpu", "require"]).expect_code(3).stderr_has("__cuda");
    run(&["pytorch", "--virtual-package", "__cuda=12.6", "--gpu", "none"]).ok().stderr_has("CPU build");
    run(&["pytorch", "--cuda", "12.6", "--gpu", "none"]).expect_code(2).stderr_has("contradict");
    run(&["compute"]).expect_code(3).stderr_has("--cuda 12.6");
    let json = run(&["pytorch", "--cuda", "12.6", "--json"]).ok().json();
    let cuda = json["virtual_packages"].as_array().unwrap().iter().find(|package| package["name"] == "__cuda").unwrap().clone();
    assert_eq!(cuda["provenance"], "assumed");
    assert_eq!(cuda["version"], "12.6");
    run(&["pytorch", "--cuda", "twelve"]).expect_code(2).stderr_has("twelve");
}

#[test]
fn explicit_lists_install_with_whole_metadata() {
    let env = TestEnv::new();
    let channel = small_channel(&env);
    env.tare(&["create", "-n", "a", "--override-channels", "-c", &channel.url(), "app"]).ok();
    let list = env.tare(&["list", "-n", "a", "--explicit", "--sha256"]).ok().stdout;
    assert!(list.contains("@EXPLICIT\n"), "{list}");
    // What people's editors do to such files.
    let list = list.replace("[ROOT]", &env.path().display().to_string()).replace("@EXPLICIT\n", "@EXPLICIT\n\n   # a comment\n \t\n");
    env.write("explicit.txt", &list);
    std::fs::remove_dir_all(channel.root().join("linux-64").join("repodata.json")).unwrap_or_default();
    env.tare(&["create", "-n", "b", "-f", "explicit.txt"]).ok();
    let record: serde_json::Value =
        serde_json::from_slice(&std::fs::read(env.envs().join("b/conda-meta/app-1.0-0.json")).unwrap()).unwrap();
    assert_eq!(record["depends"], json!(["lib >=1"]));
    let strip = |name: &str| {
        crate::common::tree(&env.envs().join(name), &["conda-meta/history", "conda-meta/tare/environment.json", "bin/app"])
            .into_iter()
            .filter(|line| !line.starts_with("conda-meta/"))
            .collect::<Vec<_>>()
    };
    assert_eq!(strip("a"), strip("b"));

    env.write("wrong.txt", list.replace(".conda#", ".conda#0000"));
    env.tare(&["create", "-n", "c", "-f", "wrong.txt"]).expect_code(2).stderr_has("wrong.txt:");
    let digest_at = list.find(".conda#").unwrap() + 7;
    let mut bad = list.clone();
    bad.replace_range(digest_at..digest_at + 8, "00000000");
    env.write("bad.txt", bad);
    let refused = env.tare(&["create", "-n", "c", "-f", "bad.txt"]);
    assert_ne!(refused.code, 0);
    assert!(
        refused.stderr.contains("sha256") || refused.stderr.contains("SHA256") || refused.stderr.contains("hash"),
        "{}",
        refused.stderr
    );
    assert!(!env.envs().join("c").exists());
}

#[test]
fn packages_that_overwrite_each_other_are_refused() {
    let env = TestEnv::new();
    let channel = small_channel(&env);
    let args = ["create", "-n", "x", "--override-channels", "-c", &channel.url(), "app", "other"];
    env.tare(&args).expect_code(1).stderr_has("share/app/data").stderr_has("--clobber");
    assert!(!env.envs().join("x").exists());
    env.tare(&[&args[..], &["--clobber"]].concat()).ok();
}

#[test]
fn link_modes_give_the_same_files() {
    use std::os::unix::fs::MetadataExt;
    let env = TestEnv::new();
    let channel = small_channel(&env);
    for (mode, shared) in [("copy", Some(false)), ("hardlink", Some(true)), ("auto", None)] {
        env.tare(&["create", "-n", mode, "--link-mode", mode, "--override-channels", "-c", &channel.url(), "app"]).ok();
        let about = std::fs::metadata(env.envs().join(mode).join("lib/lib.txt")).unwrap();
        if let Some(shared) = shared {
            assert_eq!(about.nlink() > 1, shared, "{mode}");
        }
    }
    let trees: Vec<_> = ["copy", "hardlink", "auto"]
        .map(|mode| crate::common::tree(&env.envs().join(mode), &["conda-meta/history", "environment.json", "bin/app"]))
        .into_iter()
        .map(|tree| tree.into_iter().filter(|line| !line.starts_with("conda-meta")).collect::<Vec<_>>())
        .collect();
    assert_eq!(trees[0], trees[1]);
    assert_eq!(trees[0], trees[2]);
}

#[test]
fn removed_and_recreated_it_has_the_same_bytes() {
    let env = TestEnv::new();
    let channel = small_channel(&env);
    let create = || env.tare(&["create", "-n", "x", "--override-channels", "-c", &channel.url(), "app"]).ok();
    let without = ["conda-meta/history"];
    create();
    let first = crate::common::tree(&env.envs().join("x"), &without);
    std::fs::remove_dir_all(env.envs().join("x")).unwrap();
    create();
    assert_eq!(first, crate::common::tree(&env.envs().join("x"), &without));
}

#[test]
fn a_pip_section_is_never_ignored_silently() {
    let env = TestEnv::new();
    let channel = small_channel(&env);
    env.write("environment.yml", environment_yml(&channel, "dependencies:\n  - app\n  - pip:\n      - requests\n"));
    env.tare(&["create", "-f", "environment.yml"]).expect_code(3).stderr_has("--no-pip").stderr_has("no package `pip`");
    assert!(!env.envs().join("demo").exists());
    env.tare(&["create", "-f", "environment.yml", "--no-pip"]).ok().stderr_has("pip");
    env.write("empty.yml", environment_yml(&channel, "dependencies:\n  - app\n  - pip: []\n"));
    env.tare(&["create", "-n", "e", "-f", "empty.yml"]).ok();
}

#[test]
fn a_file_from_stdin_and_several_files() {
    let env = TestEnv::new();
    let channel = small_channel(&env);
    env.tare_with_stdin(&["create", "-f", "-"], environment_yml(&channel, "dependencies: [lib]\n").as_bytes()).ok();
    assert!(env.envs().join("demo/lib/lib.txt").exists());
    env.write("a.yml", environment_yml(&channel, "dependencies: [lib=1.0]\nvariables: {A: 1, B: 1}\n"));
    env.write("b.yml", "name: second\ndependencies: [app]\nvariables: {B: 2}\n");
    env.tare(&["create", "-f", "a.yml", "-f", "b.yml"]).ok();
    let state = std::fs::read_to_string(env.envs().join("second/conda-meta/state")).unwrap();
    let state: serde_json::Value = serde_json::from_str(&state).unwrap();
    assert_eq!(state["env_vars"], json!({ "A": "1", "B": "2" }));
    assert!(env.envs().join("second/bin/app").exists());
}

#[test]
fn an_unsatisfiable_request_says_what_is_there() {
    let env = TestEnv::new();
    let channel = small_channel(&env);
    let create = |spec: &str| env.tare(&["create", "-n", "x", "--override-channels", "-c", &channel.url(), spec]);
    create("lib>=3").expect_code(3).stderr_has("lib").stderr_has("2.0");
    create("lob").expect_code(3).stderr_has("lib");
    create("compute").expect_code(3).stderr_has("__cuda").stderr_has("--cuda");
    let json = env.tare(&["create", "-n", "x", "--json", "--override-channels", "-c", &channel.url(), "lib>=3"]).expect_code(3).json();
    assert_eq!(json["success"], false);
    assert_eq!(json["error"]["kind"], "unsatisfiable");
}

#[test]
fn a_damaged_download_is_named_and_leaves_nothing() {
    let env = TestEnv::new();
    let mut channel = small_channel(&env);
    let archive = channel.add(&Package::new("broken", "1.0").file("share/x", "x"));
    let whole = std::fs::read(&archive).unwrap();
    let args = ["create", "-n", "x", "--override-channels", "-c", &channel.url(), "broken", "app"];
    std::fs::write(&archive, &whole[..whole.len() / 2]).unwrap();
    let refused = env.tare(&args);
    assert_ne!(refused.code, 0);
    assert!(refused.stderr.contains("broken-1.0-0"), "{}", refused.stderr);
    assert!(!env.envs().join("x").exists());
    std::fs::remove_file(&archive).unwrap();
    let refused = env.tare(&args);
    assert_ne!(refused.code, 0);
    assert!(refused.stderr.contains("broken-1.0-0"), "{}", refused.stderr);
    std::fs::write(&archive, &whole).unwrap();
    env.tare(&args).ok();
}

#[test]
fn a_damaged_cache_is_repaired() {
    let env = TestEnv::new();
    let channel = small_channel(&env);
    let args = |name: &'static str| ["create", "-n", name, "--link-mode", "copy", "--override-channels", "-c"].map(str::to_owned).to_vec();
    let create = |name: &'static str| {
        let mut args = args(name);
        args.extend([channel.url(), "app".to_owned()]);
        env.tare(&args.iter().map(String::as_str).collect::<Vec<_>>())
    };
    create("a").ok();
    // Cut one file short, remove another, whatever layout the cache has.
    let mut folders = vec![env.cache()];
    let (mut cut, mut removed) = (0, 0);
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.ends_with("lib/lib.txt") {
                std::fs::write(&path, "").unwrap();
                cut += 1;
            } else if path.ends_with("share/app/data") {
                std::fs::remove_file(&path).unwrap();
                removed += 1;
            }
        }
    }
    assert!(cut > 0 && removed > 0);
    create("b").ok();
    assert_eq!(std::fs::read_to_string(env.envs().join("b/lib/lib.txt")).unwrap(), "two");
    assert_eq!(std::fs::read_to_string(env.envs().join("b/share/app/data")).unwrap(), "data");
}

#[test]
fn noarch_python_packages_get_entry_points_for_the_python_of_the_environment() {
    use std::os::unix::fs::PermissionsExt;
    let env = TestEnv::new();
    let mut channel = small_channel(&env);
    // Not a real interpreter: it cannot compile, which is said and is no failure.
    channel
        .add(&Package::new("python", "3.11.9").file("bin/python3.11", "#!/bin/sh\necho ran \"$1\"\n").symlink("bin/python", "python3.11"));
    channel.add(
        &Package::new("tool", "1.0")
            .noarch_python(&["tool = tool.cli:main"])
            .depends(&["python >=3.9"])
            .file("site-packages/tool/cli.py", "def main(): pass\n")
            .file("python-scripts/other", "#!/opt/anaconda/bin/python\nprint()\n"),
    );
    let made = env.tare(&["create", "-n", "x", "--override-channels", "-c", &channel.url(), "tool"]).ok();
    made.stderr_has("were not compiled");
    let prefix = env.envs().join("x");
    assert!(prefix.join("lib/python3.11/site-packages/tool/cli.py").is_file());
    let script = std::fs::read_to_string(prefix.join("bin/tool")).unwrap();
    assert!(script.lines().next().unwrap().contains(&prefix.join("bin/python3.11").display().to_string()), "{script}");
    assert_eq!(std::fs::metadata(prefix.join("bin/tool")).unwrap().permissions().mode() & 0o7777, 0o755);
    env.tare(&["run", "-n", "x", "tool"]).ok().stdout_has("ran [ENVS]/x/bin/tool");
}

#[test]
fn a_spec_with_a_channel_brings_its_channel_along() {
    let env = TestEnv::new();
    let channel = small_channel(&env);
    let mut other = Channel::new(env.path().join("other"));
    other.add(&Package::new("lib", "1.5").file("lib/lib.txt", "other"));
    env.write(
        "environment.yml",
        format!("name: demo\nchannels:\n  - {}\n  - nodefaults\ndependencies:\n  - app\n  - {}::lib\n", channel.url(), other.url()),
    );
    env.tare(&["create", "-f", "environment.yml"]).ok();
    assert_eq!(std::fs::read_to_string(env.envs().join("demo/lib/lib.txt")).unwrap(), "other");
}

#[test]
fn unknown_keys_are_named_with_their_place() {
    let env = TestEnv::new();
    let channel = small_channel(&env);
    env.write("environment.yml", environment_yml(&channel, "chanels: [x]\ndependencies: [lib]\n"));
    env.tare(&["create", "-f", "environment.yml"]).ok().stderr_has("environment.yml:5:1").stderr_has("channels");
}

#[test]
fn what_was_taken_back_is_no_difference() {
    let env = TestEnv::new();
    let channel = small_channel(&env);
    let file = |rest: &str| env.write("environment.yml", environment_yml(&channel, rest));
    let create = |more: &[&str]| env.tare(&[&["create", "-f", "environment.yml"], more].concat());
    file("dependencies:\n  - lib >=1\nvariables:\n  GREETING: hello\n");
    create(&[]).ok();
    let digest = || env.tare(&["env", "digest", "-n", "demo"]).ok().stdout;
    let first = digest();
    env.tare(&["install", "-n", "demo", "app"]).ok();
    create(&[]).expect_code(1).stderr_has("what differs: the dependencies\n");
    env.tare(&["remove", "-n", "demo", "app"]).ok();
    for more in [&[][..], &["--dry-run"]] {
        create(more).ok().stderr_has("is already as asked: nothing to do");
    }
    // The way to it does not count, only what there is.
    assert_eq!(digest(), first);
    env.tare(&["install", "-n", "demo", "--revision", "0"]).ok();
    // The same asked for in other words.
    file("dependencies:\n  - \"lib>=1\"  # a library\nvariables: {GREETING: hello}\n");
    create(&[]).ok().stderr_has("nothing to do");
    // Asked for otherwise, though what is there does.
    file("dependencies:\n  - lib\nvariables: {GREETING: hello}\n");
    create(&[]).expect_code(1).stderr_has("what differs: the dependencies\n");
    file("dependencies:\n  - lib >=1\nvariables: {GREETING: servus}\n");
    create(&[]).expect_code(1).stderr_has("what differs: the variables\n");
    create(&["--dry-run"]).ok().stderr_has("what differs: the variables\n").stdout_has("would create");
    file("dependencies:\n  - lib >=1\nvariables: {GREETING: hello}\n");
    env.tare(&["env", "config", "vars", "set", "-n", "demo", "GREETING=hi"]).ok();
    create(&[]).expect_code(1).stderr_has("the variables");
    env.tare(&["env", "config", "vars", "set", "-n", "demo", "GREETING=hello"]).ok();
    create(&["--gpu", "none"]).expect_code(1).stderr_has("what is asked of the GPU");
    // Back to the first revision is back to its digest, whatever went on in between.
    env.tare(&["install", "-n", "demo", "lib=1.0", "app"]).ok();
    env.tare(&["install", "-n", "demo", "--revision", "0"]).ok();
    assert_eq!(digest(), first);
    create(&[]).ok().stderr_has("nothing to do");
    // Taken away without what is asked for: the state counts, and not the words alone.
    env.tare(&["remove", "-n", "demo", "lib"]).ok();
    create(&[]).expect_code(1).stderr_has("what differs: the dependencies\n");
}

#[test]
fn a_file_in_whose_place_a_link_stands_is_no_longer_as_installed() {
    let env = TestEnv::new();
    let channel = small_channel(&env);
    env.write("environment.yml", environment_yml(&channel, "dependencies:\n  - app\n"));
    env.tare(&["lock", "-f", "environment.yml"]).ok();
    let modes: &[&str] = &["hardlink", "copy", "symlink"];
    for mode in modes {
        let prefix = env.envs().join(mode);
        let sync = || env.tare(&["sync", "-n", mode, "--link-mode", mode, "--json"]).ok().json()["changed"].as_bool().unwrap();
        assert!(sync() && !sync(), "{mode}: what was made is not as made");
        let file = prefix.join("share/app/data");
        assert_eq!(std::fs::symlink_metadata(&file).unwrap().is_symlink(), *mode == "symlink");
        if *mode == "symlink" {
            continue;
        }
        // With the same contents: only what it is differs.
        std::fs::rename(&file, prefix.join("share/app/.data")).unwrap();
        std::os::unix::fs::symlink(".data", &file).unwrap();
        let told = env.tare(&["sync", "-n", mode, "--link-mode", mode, "--force"]).ok();
        told.stderr_has("`share/app/data` is a symbolic link and no regular file");
        assert!(std::fs::symlink_metadata(&file).unwrap().is_file() && !sync());
        // Changed and back: what the lock made, to the byte, though a channel says more of its packages than a lock.
        let digest = || env.tare(&["env", "digest", "-n", mode]).ok().stdout;
        let before = digest();
        env.tare(&["install", "-n", mode, "lib=1.0"]).ok();
        env.tare(&["install", "-n", mode, "--revision", "1", "--link-mode", mode]).ok();
        assert!(!sync(), "{mode}: the lock is forgotten");
        assert_eq!(digest(), before);
    }
}
