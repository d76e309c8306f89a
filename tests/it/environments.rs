//! `list`, `env list`, `run`, `shell-hook`, `info`, `search`, `why`, `config`, `clean`.

use crate::common::TestEnv;
use crate::create::small_channel;

fn with_demo() -> (TestEnv, crate::common::channel::Channel) {
    let env = TestEnv::new();
    let channel = small_channel(&env);
    env.tare(&["create", "-n", "demo", "--override-channels", "-c", &channel.url(), "app"]).ok();
    (env, channel)
}

#[test]
fn why_explains_with_paths() {
    let (env, _channel) = with_demo();
    env.tare(&["why", "-n", "demo", "lib"]).ok().stdout_has("app").stdout_has("lib");
    env.tare(&["why", "-n", "demo", "lob"]).expect_code(1).stderr_has("lob").stderr_has("lib");
    let json = env.tare(&["why", "-n", "demo", "lib", "--json"]).ok().json();
    assert_eq!(json["success"], true, "{json}");
}

#[test]
fn search_finds_versions_and_globs() {
    let (env, channel) = with_demo();
    env.tare(&["search", "--override-channels", "-c", &channel.url(), "lib"]).ok().stdout_has("2.0").stdout_has("1.0");
    env.tare(&["search", "--override-channels", "-c", &channel.url(), "*pp"]).ok().stdout_has("app");
    env.tare(&["search", "--override-channels", "-c", &channel.url(), "lib>=3"]).expect_code(1).stderr_has("2.0");
    let json = env.tare(&["search", "--override-channels", "-c", &channel.url(), "lib", "--json"]).ok().json();
    assert!(json.to_string().contains("\"2.0\""), "{json}");
}

#[test]
fn shell_hook_activates_in_a_real_shell() {
    let (env, _channel) = with_demo();
    let script = env.command(&["shell-hook", "-n", "demo", "-s", "bash"]).output().unwrap();
    assert!(script.status.success());
    let script = String::from_utf8(script.stdout).unwrap();
    let out = std::process::Command::new("bash")
        .args(["-c", &format!("{script}\necho \"$CONDA_PREFIX\"; app")])
        .env_clear()
        .env("PATH", "/usr/bin:/bin")
        .env("HOME", env.home())
        .output()
        .unwrap();
    let printed = String::from_utf8(out.stdout).unwrap();
    let prefix = env.envs().join("demo").display().to_string();
    assert!(printed.starts_with(&format!("{prefix}\nprefix {prefix}\n")), "{printed}{}", String::from_utf8_lossy(&out.stderr));
    env.tare(&["shell-hook", "-n", "demo", "-s", "tcl"]).expect_code(2);
}

#[test]
fn run_passes_variables_and_the_folder() {
    let (env, _channel) = with_demo();
    std::fs::create_dir(env.work().join("sub")).unwrap();
    let shown = env.tare(&["run", "-n", "demo", "--cwd", "sub", "-e", "X=a b", "sh", "-c", "pwd; echo $X; echo $CONDA_DEFAULT_ENV"]).ok();
    assert_eq!(shown.stdout, "[WORK]/sub\na b\ndemo\n");
    env.tare(&["run", "-n", "demo", "-e", "NOVALUE", "true"]).expect_code(125);
    env.tare(&["run", "-n", "demo", "--cwd", "missing", "true"]).expect_code(125);
}

#[test]
fn info_marks_what_was_detected_and_assumed() {
    let env = TestEnv::new().var("CONDA_OVERRIDE_CUDA", "12.4");
    let info = env.tare(&["info", "--json"]).ok().json();
    let find = |info: &serde_json::Value, name: &str| {
        info["virtual_packages"].as_array().unwrap().iter().find(|package| package["name"] == name).cloned().unwrap()
    };
    assert_eq!(find(&info, "__cuda")["provenance"], "overridden");
    assert_eq!(find(&info, "__cuda")["version"], "12.4");
    assert_eq!(find(&info, "__glibc")["provenance"], "detected");
    let info = env.tare(&["info", "--json", "--cuda", "12.6"]).ok().json();
    assert_eq!(find(&info, "__cuda")["provenance"], "assumed");
    assert!(info["pkgs_dirs"].is_array(), "what conda-lock reads");
    env.tare(&["info"]).ok().stdout_has("__cuda");
}

#[test]
fn config_shows_sources_and_sets_values() {
    let env = TestEnv::new();
    std::fs::write(env.home().join(".condarc"), "channels:\n  - nvidia\n").unwrap();
    env.tare(&["config", "list"]).ok().stdout_has("nvidia").stdout_has(".condarc");
    env.tare(&["config", "set", "channel_priority", "flexible"]).ok();
    env.tare(&["config", "list", "channel_priority"]).ok().stdout_has("flexible").stdout_has("config.toml");
    env.tare(&["config", "set", "channel_priority", "sideways"]).expect_code(2).stderr_has("sideways");
    env.tare(&["config", "unset", "channel_priority"]).ok();
    let list = env.tare(&["config", "list", "--json"]).ok().json();
    assert!(list.to_string().contains("nvidia"));
    std::fs::write(env.home().join(".condarc"), "channels: [a\n").unwrap();
    env.tare(&["config", "list"]).expect_code(2).stderr_has(".condarc");
    env.tare(&["--no-config", "config", "list"]).ok();
}

#[test]
fn clean_removes_what_it_says() {
    let (env, channel) = with_demo();
    env.tare(&["clean"]).expect_code(2);
    env.tare(&["clean", "--all", "--dry-run"]).ok();
    env.tare(&["clean", "--all"]).ok();
    env.tare(&["run", "-n", "demo", "app"]).ok();
    env.tare(&["create", "-n", "again", "--override-channels", "-c", &channel.url(), "app"]).ok();
}

#[test]
fn names_are_validated() {
    let env = TestEnv::new();
    let channel = small_channel(&env);
    for (name, says) in [("base", "base"), ("root", "root"), ("a/b", "a/b"), ("a b", "a b"), ("a:b", "a:b"), ("a#b", "a#b"), ("", "name")] {
        let ran = env.tare(&["create", "-n", name, "--override-channels", "-c", &channel.url(), "lib"]);
        assert_eq!(ran.code, 2, "{name}: {}", ran.stderr);
        assert!(ran.stderr.contains(says), "{name}: {}", ran.stderr);
    }
    env.tare(&["create", "--override-channels", "-c", &channel.url(), "lib"]).expect_code(2).stderr_has("-n");
}

#[test]
fn the_name_of_an_environment_in_place_of_a_program_is_pointed_out() {
    let (env, _channel) = with_demo();
    let run = |args: &[&str]| env.tare(&[&["run"], args].concat());
    let hint = "`demo` is an environment: tare run -n demo app 'two words'";
    run(&["demo", "app", "two words"]).expect_code(125).stderr_has(hint);
    let prefix = env.envs().join("demo").display().to_string();
    let mut command = env.command(&["run", "demo", "app", "two words"]);
    env.ran(command.env("CONDA_PREFIX", &prefix).output().unwrap()).expect_code(127).stderr_has(hint);
    let other = run(&["-n", "demo", "nosuch"]).expect_code(127);
    assert!(!other.stderr.contains("is an environment"), "{}", other.stderr);
}

#[test]
fn a_channel_that_nobody_named_is_said_to_be_that() {
    let (env, channel) = with_demo();
    env.write("env.yml", format!("channels: ['{}']\ndependencies: [nosuch]\n", channel.url()));
    let ran = env.tare(&["create", "-n", "x", "-f", "env.yml"]).expect_code(7);
    ran.stderr_has("hint: `conda-forge` was not named but appended; to leave it out, list `nodefaults`");
    let second = crate::common::channel::Channel::new(env.path().join("second"));
    let mut command = env.command(&["create", "-n", "x", "-f", "env.yml"]);
    env.ran(command.env("CONDA_CHANNELS", second.url()).output().unwrap()).expect_code(3).stderr_has("was not named but appended");
}
