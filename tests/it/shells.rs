//! `init`, `activate`, `deactivate`, `shell`, `shell-hook` in real shells, in a terminal where a person would sit at one.

use std::collections::BTreeMap;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use crate::common::TestEnv;
use crate::common::terminal::{Terminal, parse, program};

/// A value with everything that means something to a shell.
const HARD: &str = "it's $HOME `id` $(id) \"q\" \\ %n ! * ü\nsecond line ";

const SHELLS: [&str; 3] = ["bash", "zsh", "fish"];

/// An environment with nothing but what activation looks at. Its scripts write what happens to `log` beside the environments.
fn environment(env: &TestEnv, prefix: &Path, variables: &serde_json::Value) {
    let log = env.path().join("log");
    let name = if prefix.parent() == Some(&env.envs()) { prefix.file_name().unwrap().to_str().unwrap() } else { "odd" };
    for folder in ["conda-meta", "bin", "etc/conda/activate.d", "etc/conda/deactivate.d"] {
        std::fs::create_dir_all(prefix.join(folder)).unwrap();
    }
    std::fs::write(prefix.join("conda-meta/state"), serde_json::json!({ "version": 1, "env_vars": variables }).to_string()).unwrap();
    let hello = prefix.join(format!("bin/hello-{name}"));
    std::fs::write(&hello, "#!/bin/sh\necho hello\n").unwrap();
    std::fs::set_permissions(hello, std::fs::Permissions::from_mode(0o755)).unwrap();
    for nth in [1, 2] {
        for (what, set, unset) in [
            ("sh", format!("export SCRIPT_{name}=on"), format!("unset SCRIPT_{name}")),
            ("fish", format!("set -gx SCRIPT_{name} on"), format!("set -e SCRIPT_{name}")),
        ] {
            let script = |kind: &str, then: &str| {
                let text = format!("echo {kind} {name} {nth} >> '{}'\n{then}\n", log.display());
                std::fs::write(prefix.join(format!("etc/conda/{kind}.d/{nth}.{what}")), text).unwrap();
            };
            script("activate", &set);
            script("deactivate", &unset);
        }
    }
}

fn log(env: &TestEnv) -> Vec<String> {
    let text = std::fs::read_to_string(env.path().join("log")).unwrap_or_default();
    let _ = std::fs::remove_file(env.path().join("log"));
    text.lines().map(str::to_owned).collect()
}

/// A PATH on which the program is found by its name.
fn path() -> String {
    let own = Path::new(env!("CARGO_BIN_EXE_tare")).parent().unwrap();
    format!("{}:{}", own.display(), std::env::var("PATH").unwrap())
}

/// A home with start-up files whose prompt is `prompt> `, which count in RC and in PATH how often they are read.
fn home(env: &TestEnv) {
    let home = env.home();
    std::fs::create_dir_all(home.join(".config/fish")).unwrap();
    let posix = "PS1='prompt> '\nexport RC=\"${RC-}x\"\nexport PATH=\"$PATH:/from/rc\"\n";
    std::fs::write(home.join(".bashrc"), posix).unwrap();
    std::fs::write(home.join(".zshrc"), format!("setopt prompt_subst\n{posix}")).unwrap();
    let fish = "function fish_prompt\necho -n 'prompt> '\nend\nset -gx RC \"$RC\"x\nset -gx PATH $PATH /from/rc\nset fish_greeting\n";
    std::fs::write(home.join(".config/fish/config.fish"), fish).unwrap();
}

/// Initialises and starts an interactive shell; `None` if it is not installed.
fn shell(env: &TestEnv, name: &str, vars: &[(&str, &str)]) -> Option<Terminal> {
    let program = program(name)?;
    home(env);
    let mut init = env.command(&["init", name]);
    env.ran(init.env("PATH", path()).output().unwrap()).ok();
    let path = path();
    let vars = [&[("PATH", path.as_str())], vars].concat();
    Some(Terminal::start(env, &format!("{} -i", program.display()), &vars))
}

fn diff(before: &BTreeMap<String, String>, after: &BTreeMap<String, String>) -> Vec<String> {
    let names: std::collections::BTreeSet<&String> = before.keys().chain(after.keys()).collect();
    names
        .into_iter()
        .filter(|name| before.get(*name) != after.get(*name))
        .map(|name| format!("{name}: {:?} -> {:?}", before.get(name), after.get(name)))
        .collect()
}

/// The last prompt that is shown.
fn prompt(text: &str) -> String {
    let at = text.rfind("prompt> ").unwrap_or_else(|| panic!("no prompt in {text:?}"));
    let start = text[..at].rfind(['\n', '\r', '\u{7}', '\u{1b}']).map_or(0, |at| at + 1);
    let shown = &text[start..at + "prompt> ".len()];
    // What is left of a control sequence before it.
    let clean = shown.find('(').map_or("prompt> ", |at| &shown[at..]);
    clean.to_owned()
}

#[test]
fn activation_changes_a_shell_and_deactivation_brings_everything_back() {
    for name in SHELLS {
        let env = TestEnv::new();
        let (one, two) = (env.envs().join("one"), env.envs().join("two"));
        environment(&env, &one, &serde_json::json!({ "HARD": HARD, "OVER": "one", "EMPTY": "one", "SOME_PATH": "/a:/b" }));
        environment(&env, &two, &serde_json::json!({ "OVER": "two", "TWO": "2" }));
        let vars = [("OVER", "before $x"), ("EMPTY", ""), ("SOME_PATH", "/old:/er")];
        let Some(mut shell) = shell(&env, name, &vars) else { continue };
        let start = shell.variables();
        assert!(start["PATH"].ends_with(":/from/rc"), "{name}");
        let get = |map: &BTreeMap<String, String>, key: &str| map.get(key).cloned().unwrap_or_else(|| "<unset>".into());

        shell.run("tare activate one");
        let first = shell.variables();
        let is = |key: &str, value: &str| assert_eq!(get(&first, key), value, "{name} {key}: {}", "");
        is("PATH", &format!("{}/bin:{}", one.display(), start["PATH"]));
        is("CONDA_PREFIX", one.to_str().unwrap());
        is("CONDA_DEFAULT_ENV", "one");
        is("CONDA_PROMPT_MODIFIER", "(one) ");
        is("CONDA_SHLVL", "1");
        is("HARD", HARD);
        is("OVER", "one");
        is("EMPTY", "one");
        is("SOME_PATH", "/a:/b");
        is("SCRIPT_one", "on");
        assert_eq!(log(&env), ["activate one 1", "activate one 2"], "{name}");
        assert!(shell.run("hello-one").contains("hello\r"), "{name}");
        assert_eq!(prompt(&shell.text()), "(one) prompt> ", "{name}");

        // Another one: the first is left, and its variables with it.
        shell.run("tare activate two");
        let second = shell.variables();
        assert_eq!(get(&second, "PATH"), format!("{}/bin:{}", two.display(), start["PATH"]), "{name}");
        for (key, value) in [
            ("HARD", "<unset>"),
            ("OVER", "two"),
            ("EMPTY", ""),
            ("TWO", "2"),
            ("CONDA_SHLVL", "2"),
            ("SCRIPT_one", "<unset>"),
            ("SOME_PATH", "/old:/er"),
        ] {
            assert_eq!(get(&second, key), value, "{name} {key}");
        }
        assert_eq!(log(&env), ["deactivate one 2", "deactivate one 1", "activate two 1", "activate two 2"], "{name}");
        assert_eq!(prompt(&shell.text()), "(two) prompt> ", "{name}");

        // The same again: scripts and variables anew.
        std::fs::write(two.join("conda-meta/state"), r#"{"version": 1, "env_vars": {"NEW": "n"}}"#).unwrap();
        shell.run("tare activate two");
        let again = shell.variables();
        for (key, value) in [("NEW", "n"), ("TWO", "<unset>"), ("OVER", "before $x"), ("CONDA_SHLVL", "2")] {
            assert_eq!(get(&again, key), value, "{name} {key}");
        }
        assert_eq!(get(&again, "PATH"), get(&second, "PATH"), "{name}");
        assert_eq!(log(&env), ["deactivate two 2", "deactivate two 1", "activate two 1", "activate two 2"], "{name}");

        // What the user does in between stays.
        shell.run(if name == "fish" { "set -gx PATH /mine $PATH" } else { "PATH=/mine:$PATH" });
        shell.run("tare deactivate");
        let back = shell.variables();
        let mut expected = first.clone();
        expected.insert("PATH".into(), format!("/mine:{}", first["PATH"]));
        assert_eq!(diff(&expected, &back), [""; 0], "{name}: the first one is active again");
        log(&env);
        shell.run("tare deactivate");
        let mut expected = start.clone();
        expected.insert("PATH".into(), format!("/mine:{}", start["PATH"]));
        assert_eq!(diff(&expected, &shell.variables()), [""; 0], "{name}: all is as it was");
        assert_eq!(log(&env), ["deactivate one 2", "deactivate one 1"], "{name}");
        assert_eq!(prompt(&shell.text()), "prompt> ", "{name}");
        assert!(shell.run("tare deactivate").contains("no environment is active"), "{name}");
        // Nothing of ours is left, in the shell itself either.
        let left = shell.run(if name == "fish" { "set -n | grep -i __tare; functions -a | grep __tare" } else { "set | grep -a ^__tare" });
        assert!(!left.contains("__tare_"), "{name}: {left}");
        assert_eq!(shell.end("exit 3"), 3, "{name}");
    }
}

#[test]
fn stacked_odd_and_deleted_environments() {
    for name in SHELLS {
        let env = TestEnv::new();
        let one = env.envs().join("one");
        let odd = env.work().join("it's $(touch pwned) `touch pwned` [a-z]* %n ${x} \\ ! \"q\" ü");
        let (two, three) = (env.envs().join("two"), env.envs().join("three"));
        environment(&env, &one, &serde_json::json!({ "OVER": "one", "ONE": "1" }));
        environment(&env, &odd, &serde_json::json!({ "OVER": "odd" }));
        environment(&env, &two, &serde_json::json!({ "OVER": "two" }));
        environment(&env, &three, &serde_json::json!({ "OVER": "three" }));
        let Some(mut shell) = shell(&env, name, &[("ODD", odd.to_str().unwrap()), ("OVER", "before"), ("BROKEN", "/a\nb")]) else {
            continue;
        };
        let start = shell.variables();
        shell.run("tare activate one");
        let first = shell.variables();
        shell.run("tare activate --stack \"$ODD\"");
        let both = shell.variables();
        assert_eq!(both["CONDA_PREFIX"], odd.to_str().unwrap(), "{name}: {}", shell.text());
        assert_eq!(both["PATH"], format!("{}/bin:{}", odd.display(), first["PATH"]), "{name}");
        assert_eq!((both["OVER"].as_str(), both["ONE"].as_str(), both["CONDA_STACKED_2"].as_str()), ("odd", "1", "true"), "{name}");
        assert!(shell.run("hello-odd; hello-one").matches("hello\r").count() == 2, "{name}");
        assert_eq!(log(&env), ["activate one 1", "activate one 2", "activate odd 1", "activate odd 2"], "{name}");
        shell.run("tare deactivate");
        assert_eq!(diff(&first, &shell.variables()), [""; 0], "{name}: {}", shell.text());
        log(&env);
        // An environment that is deleted while it is active, and one that is deleted while it waits below.
        shell.run("tare activate two; tare activate three");
        std::fs::remove_dir_all(&three).unwrap();
        std::fs::remove_dir_all(&two).unwrap();
        let shown = shell.run("tare deactivate");
        // The script that would have taken this back is gone.
        let mut now = shell.variables();
        assert_eq!(now.remove("SCRIPT_three").as_deref(), Some("on"), "{name}");
        assert_eq!(diff(&first, &now), [""; 0], "{name}: {shown}");
        std::fs::remove_dir_all(&one).unwrap();
        shell.run("tare deactivate");
        let mut expected = start.clone();
        expected.insert("SCRIPT_one".into(), "on".into());
        expected.insert("SCRIPT_three".into(), "on".into());
        let now = shell.variables();
        assert_eq!(diff(&expected, &now), [""; 0], "{name}");
        assert!(!env.work().join("pwned").exists(), "{name}");
        // Errors change nothing and are seen.
        let before = shell.variables();
        let shown = shell.run("tare activate nowhere");
        assert!(shown.contains("there is no environment `nowhere`"), "{name}: {shown}");
        let shown = shell.run("tare activate \"$BROKEN\"");
        assert!(shown.contains("contains a line break"), "{name}: {shown}");
        let shown = shell.run("tare activate");
        assert!(shown.contains("no environment is named and none is active"), "{name}: {shown}");
        let shown = shell.run("tare activate --help");
        assert!(shown.contains("Activate an environment in this shell") && !shown.contains("__hook"), "{name}: {shown}");
        let shown = shell.run("tare activate --no-such-option");
        assert!(shown.contains("unexpected argument"), "{name}: {shown}");
        assert_eq!(diff(&before, &shell.variables()), [""; 0], "{name}");
        // Everything else is the program's own.
        let shown = shell.run("tare --version");
        assert!(shown.contains(env!("CARGO_PKG_VERSION")), "{name}: {shown}");
        let status =
            if name == "fish" { "tare list -n nowhere; echo code-$status-code" } else { "tare list -n nowhere; echo code-$?-code" };
        assert!(shell.run(status).contains("code-1-code"), "{name}");
    }
}

#[test]
fn an_environment_of_conda_comes_back_as_it_was() {
    for name in SHELLS {
        let env = TestEnv::new();
        let (base, one) = (env.home().join("miniforge3"), env.envs().join("one"));
        environment(&env, &base, &serde_json::json!({ "OVER": "base" }));
        environment(&env, &one, &serde_json::json!({ "OVER": "one" }));
        let path = format!("{}/bin:{}/condabin:{}", base.display(), base.display(), path());
        let vars = [
            ("CONDA_PREFIX", base.to_str().unwrap()),
            ("CONDA_DEFAULT_ENV", "base"),
            ("CONDA_PROMPT_MODIFIER", "(base) "),
            ("CONDA_SHLVL", "1"),
            ("CONDA_EXE", "/x/bin/conda"),
            ("OVER", "base"),
            ("__CONDA_SHLVL_0_OVER", "before"),
            ("PATH", &path),
        ];
        let Some(mut shell) = shell(&env, name, &vars) else { continue };
        let start = shell.variables();
        shell.run("tare activate one");
        let active = shell.variables();
        assert_eq!((active["CONDA_SHLVL"].as_str(), active["CONDA_PREFIX_1"].as_str()), ("2", base.to_str().unwrap()), "{name}");
        assert_eq!(active["PATH"], start["PATH"].replacen(base.to_str().unwrap(), one.to_str().unwrap(), 1), "{name}");
        assert_eq!(log(&env)[..2], ["deactivate odd 2", "deactivate odd 1"], "{name}");
        shell.run("tare deactivate");
        let mut back = shell.variables();
        // Its variables are known now, and its scripts have run.
        assert!(back.remove("__TARE_ENV_1").is_some() && back.remove("SCRIPT_odd").is_some(), "{name}");
        if name == "bash" {
            // The default environment of conda is named by its path, as it lies in no folder `envs`.
            back.insert("CONDA_DEFAULT_ENV".into(), "base".into());
            back.insert("CONDA_PROMPT_MODIFIER".into(), "(base) ".into());
        }
        let changed = diff(&start, &back);
        assert!(
            changed.iter().all(|line| line.starts_with("CONDA_DEFAULT_ENV") || line.starts_with("CONDA_PROMPT_MODIFIER")),
            "{name}: {changed:?}"
        );
        shell.run("tare deactivate");
        let end = shell.variables();
        assert_eq!((end["OVER"].as_str(), end["CONDA_SHLVL"].as_str()), ("before", "0"), "{name}");
        assert!(!end.contains_key("CONDA_PREFIX") && !end["PATH"].contains("miniforge3/bin:"), "{name}");
    }
}

#[test]
fn scripts_with_strict_options_live_on() {
    let env = TestEnv::new();
    let prefix = env.envs().join("one");
    environment(&env, &prefix, &serde_json::json!({ "A": "a" }));
    std::fs::write(prefix.join("etc/conda/activate.d/3.sh"), "echo \"$NEVER_SET\" >/dev/null\nfalse\n").unwrap();
    std::fs::write(prefix.join("etc/conda/deactivate.d/3.sh"), "echo \"$NEVER_SET\" >/dev/null\nfalse\n").unwrap();
    home(&env);
    for (name, rc, options) in
        [("bash", ".bashrc", "set -euo pipefail"), ("zsh", ".zshrc", "set -euo pipefail"), ("sh", "", "set -eu"), ("dash", "", "set -eu")]
    {
        let Some(program) = program(name) else { continue };
        let (on, off) = if rc.is_empty() {
            ("eval \"$(tare shell-hook -n one -s posix)\"", "eval \"$(tare shell-hook --deactivate -s posix)\"")
        } else {
            let mut init = env.command(&["init", name]);
            env.ran(init.env("PATH", path()).output().unwrap()).ok();
            ("tare activate one", "tare deactivate")
        };
        let load = if rc.is_empty() { String::new() } else { format!("unset PS1; RC=; . ~/{rc}; unset PS1\n") };
        let script = format!(
            "{load}before=$(env | grep -v -e ^_= -e ^RC=)\n{options}\nalias x=y\n{on}\n{on}\n[ \"$A\" = a ]\nhello-one\n{off}\n\
             after=$(env | grep -v -e ^_= -e ^RC=)\n[ \"$before\" = \"$after\" ]\ncase $- in *e*) echo strict;; esac\ncase $- in *u*) echo strict;; esac\necho lived\n"
        );
        let output = env.other(program.to_str().unwrap()).args(["-c", &script]).env("PATH", path()).output().unwrap();
        let ran = env.ran(output).ok();
        assert_eq!(ran.stdout, "hello\nstrict\nstrict\nlived\n", "{name}: {}", ran.stderr);
    }
}

#[test]
fn reading_the_block_starts_no_process() {
    let env = TestEnv::new();
    for (name, rc) in [("bash", ".bashrc"), ("zsh", ".zshrc"), ("fish", ".config/fish/conf.d/tare.fish")] {
        let Some(program) = program(name) else { continue };
        env.tare(&["init", name]).ok();
        let kind = if name == "fish" { "functions -q tare; and echo function" } else { "typeset -f tare >/dev/null && echo function" };
        let file = env.home().join(rc);
        // Nothing can be found to be started, and the file names only this program, in the function.
        let script = format!("{} '{}'; {kind}", if name == "fish" { "source" } else { "." }, file.display());
        let output =
            env.other(program.to_str().unwrap()).args(["-c", &script]).env("PATH", "/nowhere").env("HOME", "/nowhere").output().unwrap();
        let ran = env.ran(output);
        assert_eq!((ran.stdout.as_str(), ran.stderr.as_str()), ("function\n", ""), "{name}");
        let text = std::fs::read_to_string(&file).unwrap();
        let top: Vec<&str> = text.lines().filter(|line| !line.starts_with([' ', '#', '}']) && *line != "end").collect();
        assert!(matches!(top[..], [one] if one.starts_with("function tare")), "{name}: {top:?}");
    }
}

#[test]
fn init_writes_and_takes_out_its_block() {
    let env = TestEnv::new();
    home(&env);
    let rc = env.home().join(".bashrc");
    let old = std::fs::read(&rc).unwrap();
    let dry = env.tare(&["init", "bash", "--dry-run"]).ok();
    assert!(dry.stdout.contains("would write into [HOME]/.bashrc") && dry.stdout.contains("function tare {"), "{}", dry.stdout);
    assert_eq!(std::fs::read(&rc).unwrap(), old);
    env.tare(&["init", "bash"]).ok().stdout_has("bash: wrote into [HOME]/.bashrc").stderr_has("open a new shell");
    env.tare(&["init", "bash"]).ok().stdout_has("nothing to do");
    let document = env.tare(&["init", "--all", "--json"]).ok().json();
    let shells: Vec<&str> = document["shells"].as_array().unwrap().iter().map(|one| one["shell"].as_str().unwrap()).collect();
    assert!(shells.contains(&"bash"), "{shells:?}");
    env.tare(&["init", "zsh", "powershell"]).ok();
    assert!(env.home().join(".zshrc").exists() && env.home().join(".config/powershell/profile.ps1").exists());
    env.tare(&["init", "--all", "--reverse"]).ok().stdout_has("bash: took the block of tare out of [HOME]/.bashrc");
    assert_eq!(std::fs::read(&rc).unwrap(), old);
    for made in [".config/powershell/profile.ps1", ".config/fish/conf.d/tare.fish"] {
        assert!(!env.home().join(made).exists(), "{made}");
    }
    let zdotdir = env.work().join("z dir");
    let mut init = env.command(&["init", "zsh"]);
    env.ran(init.env("ZDOTDIR", &zdotdir).output().unwrap()).ok();
    assert!(zdotdir.join(".zshrc").exists());
    env.tare(&["init", "tcsh"]).expect_code(2).stderr_has("hint: ");
    env.tare(&["init", "posix"]).expect_code(2).stderr_has("shell-hook");
    // Without it, `activate` says what to do; with it, but not loaded, too.
    let ask = |args: &[&str]| {
        let mut command = env.command(args);
        env.ran(command.env("SHELL", "/bin/bash").output().unwrap()).expect_code(1)
    };
    ask(&["activate", "x"]).stderr_has("tare init bash").stderr_has("eval \"$(tare shell-hook -n x)\"");
    ask(&["deactivate"]).stderr_has("--deactivate");
    env.tare(&["init", "bash"]).ok();
    ask(&["activate", "./x"]).stderr_has("is not loaded").stderr_has("-p ./x");
}

/// A start-up file that is no file, and a home that is none: refused at once, and nothing is written anywhere.
#[test]
fn init_refuses_what_is_no_file_and_no_home() {
    let env = TestEnv::new();
    let rc = env.home().join(".bashrc");
    let made = std::process::Command::new("mkfifo").arg(&rc).status().unwrap();
    assert!(made.success());
    std::fs::create_dir(env.home().join(".zshrc")).unwrap();
    std::os::unix::fs::symlink("/dev/null", env.home().join(".zshenv")).unwrap();
    for args in [&["init", "bash"][..], &["init", "bash", "--undo"], &["init", "bash", "--dry-run"], &["init", "fish", "bash"]] {
        env.tare(args).expect_code(1).stderr_has("[HOME]/.bashrc").stderr_has("named pipe");
    }
    assert!(!env.home().join(".config/fish").exists(), "all or none");
    env.tare(&["init", "zsh"]).expect_code(1).stderr_has("a folder");
    // Without the function, `activate` looks whether it is set up.
    let mut ask = env.command(&["activate", "x"]);
    env.ran(ask.env("SHELL", "/bin/bash").output().unwrap()).expect_code(1).stderr_has("not set up");
    std::fs::remove_file(&rc).unwrap();
    std::os::unix::fs::symlink(env.path().join("elsewhere"), &rc).unwrap();
    env.tare(&["init", "bash"]).ok();
    assert!(std::fs::symlink_metadata(&rc).unwrap().is_symlink() && env.path().join("elsewhere").is_file());

    // A list of environments and settings that are pipes are no reason to wait either.
    let env = TestEnv::new();
    std::fs::create_dir_all(env.home().join(".conda")).unwrap();
    std::fs::create_dir_all(env.home().join(".config/tare")).unwrap();
    for name in [".conda/environments.txt", ".condarc", ".config/tare/config.toml"] {
        assert!(std::process::Command::new("mkfifo").arg(env.home().join(name)).status().unwrap().success());
    }
    let mut channel = crate::common::channel::Channel::new(env.path().join("channel"));
    channel.add(&crate::common::channel::Package::new("p", "1.0").file("share/p", "p"));
    env.tare(&["create", "-n", "e", "--override-channels", "-c", &channel.url(), "p"]).ok();
    env.tare(&["env", "list"]).ok().stdout_has("[ENVS]/e");
    env.tare(&["config", "set", "offline", "true"]).expect_code(1).stderr_has("named pipe");
    env.tare(&["remove", "-n", "e", "--all"]).ok();
}

#[test]
fn a_home_that_is_empty_or_relative_is_refused_where_something_would_be_written() {
    let mut channel_env = TestEnv::new();
    channel_env = channel_env.var("TARE_TEST", "1");
    let mut channel = crate::common::channel::Channel::new(channel_env.path().join("channel"));
    channel.add(&crate::common::channel::Package::new("p", "1.0").file("share/p", "p"));
    let url = channel.url();
    for (home, why) in [("", "HOME is empty"), ("rel/home", "HOME is `rel/home`, which is no absolute path")] {
        let env = TestEnv::new();
        let run = |args: &[&str], named: bool| {
            let mut command = env.command(args);
            command.env("HOME", home);
            if !named {
                command.env_remove("TARE_CACHE_DIR").env_remove("TARE_ROOT");
            }
            env.ran(command.output().unwrap())
        };
        for args in [
            &["init", "bash"][..],
            &["init", "zsh", "fish", "powershell"],
            &["init", "--all"],
            &["init", "--all", "--undo"],
            &["config", "set", "offline", "true"],
            &["config", "path"],
            &["create", "-p", "made", "--override-channels", "-c", &url, "p"],
            &["search", "--override-channels", "-c", &url, "p"],
            &["clean", "--all"],
        ] {
            run(args, false).expect_code(2).stderr_has(why).stderr_has("hint: ");
        }
        run(&["create", "-n", "made", "--override-channels", "-c", &url, "p"], false).expect_code(2);
        // Of what is named, and of what only reads, no home is asked.
        run(&["info"], false).ok();
        run(&["config"], false).ok();
        run(&["create", "-n", "made", "--override-channels", "-c", &url, "p"], true).ok();
        run(&["list", "-n", "made"], true).ok().stdout_has("p");
        let mut channels = env.command(&["create", "-p", "other", "--override-channels", "-c", &url, "p"]);
        channels.env("HOME", home).env("TARE_CACHE_DIR", "~/cache");
        env.ran(channels.output().unwrap()).expect_code(2).stderr_has("`~/cache`");
        // Nothing was written to wherever that leads.
        assert_eq!(std::fs::read_dir(env.work()).unwrap().count(), 0, "{home:?}");
        assert_eq!(std::fs::read_dir(env.home()).unwrap().count(), 0, "{home:?}");
    }
    let env = TestEnv::new();
    let nowhere = env.path().join("nowhere");
    let mut command = env.command(&["init", "bash"]);
    env.ran(command.env("HOME", &nowhere).output().unwrap()).expect_code(1).stderr_has("is not there");
    assert!(!nowhere.exists());
    let mut command = env.command(&["init", "zsh"]);
    env.ran(command.env("ZDOTDIR", "zdot").output().unwrap()).expect_code(2).stderr_has("ZDOTDIR");
    assert_eq!(std::fs::read_dir(env.work()).unwrap().count(), 0);
}

/// Several at once and killed at any moment: the file is the old one or has the block once, and nothing else is left in the end.
#[test]
fn init_at_the_same_time_and_killed() {
    let env = TestEnv::new();
    let rc = env.home().join(".bashrc");
    let old: Vec<u8> = (0..200_000_u32).map(|nth| (nth.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    std::fs::write(&rc, &old).unwrap();
    std::fs::set_permissions(&rc, std::fs::Permissions::from_mode(0o640)).unwrap();
    let blocks = |text: &[u8]| text.windows(b"# >>> tare initialize >>>".len()).filter(|part| part == b"# >>> tare initialize >>>").count();
    let start = |args: &[&str]| env.command(args).stdout(std::process::Stdio::null()).stderr(std::process::Stdio::null()).spawn().unwrap();
    let children: Vec<_> = (0..6).map(|_| start(&["init", "bash"])).collect();
    for mut child in children {
        assert!(child.wait().unwrap().success());
    }
    let with = std::fs::read(&rc).unwrap();
    assert!(with.starts_with(&old) && blocks(&with) == 1);
    let whole = {
        let started = std::time::Instant::now();
        env.tare(&["init", "bash", "--undo"]).ok();
        started.elapsed()
    };
    for round in 0..24_u32 {
        let mut child = start(if round % 2 == 0 { &["init", "bash"] } else { &["init", "bash", "--undo"] });
        std::thread::sleep(whole.mul_f64((f64::from(round) * 0.618_034).fract()));
        let _ = child.kill();
        child.wait().unwrap();
        let text = std::fs::read(&rc).unwrap();
        assert!(text == old || text == with, "round {round}");
    }
    env.tare(&["init", "bash"]).ok();
    env.tare(&["init", "bash", "--undo"]).ok();
    assert_eq!(std::fs::read(&rc).unwrap(), old);
    assert_eq!(std::fs::metadata(&rc).unwrap().permissions().mode() & 0o7777, 0o640);
    let left: Vec<_> = std::fs::read_dir(env.home()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left, [".bashrc"]);
}

#[test]
fn shell_starts_a_shell_inside() {
    for name in SHELLS {
        let Some(program) = program(name) else { continue };
        let env = TestEnv::new();
        let odd = env.work().join("it's $x [y] ü");
        environment(&env, &env.envs().join("one"), &serde_json::json!({ "A": HARD }));
        environment(&env, &odd, &serde_json::json!({ "A": "odd" }));
        home(&env);
        let tare = env!("CARGO_BIN_EXE_tare");
        let shell_path = program.to_str().unwrap();
        let vars = [("TMPDIR", env.path().to_str().unwrap()), ("ODD", odd.to_str().unwrap())];
        let mut shell = Terminal::start(&env, &format!("env SHELL={shell_path} {tare} shell -n one --shell {name}"), &vars);
        let inside = shell.variables();
        let one = env.envs().join("one");
        assert!(
            inside["PATH"].starts_with(&format!("{}/bin:", one.display())) && inside["PATH"].ends_with(":/from/rc"),
            "{name}: {}",
            inside["PATH"]
        );
        assert_eq!((inside["A"].as_str(), inside["RC"].as_str(), inside["CONDA_SHLVL"].as_str()), (HARD, "x", "1"), "{name}");
        assert!(!inside.contains_key("ZDOTDIR") && !inside.contains_key("ENV"), "{name}");
        assert_eq!(prompt(&shell.text()), "(one) prompt> ", "{name}");
        // No set-up was needed for this either.
        shell.run("tare activate \"$ODD\"");
        assert_eq!(shell.variables()["A"], "odd", "{name}: {}", shell.text());
        shell.run("tare deactivate; tare deactivate");
        assert!(!shell.variables().contains_key("CONDA_PREFIX"), "{name}");
        let files = shell.run("ls -l /proc/self/fd; ls -a \"$TMPDIR\"");
        assert!(!files.contains("deleted") && !files.contains("tare-zsh"), "{name}: {files}");
        assert_eq!(shell.end("exit 7"), 7, "{name}");

        let script = if name == "fish" { "echo $CONDA_DEFAULT_ENV; exit 9" } else { "echo \"$CONDA_DEFAULT_ENV\"; exit 9" };
        let ran = env.tare(&["shell", "-n", "one", "--shell", name, "--", "-c", script]).expect_code(9);
        assert_eq!(ran.stdout, "one\n", "{name}");
        let ran = env.tare_with_stdin(&["shell", "-n", "one", "--shell", name], b"hello-one\nexit 4\n").expect_code(4);
        assert_eq!(ran.stdout, "hello\n", "{name}");
    }
    let env = TestEnv::new();
    env.tare(&["shell", "-n", "nowhere"]).expect_code(1).stderr_has("nowhere");
    environment(&env, &env.envs().join("one"), &serde_json::json!({ "not a name": "x" }));
    env.tare(&["shell", "-n", "one", "--shell", "bash"]).expect_code(1).stderr_has("not a name");
}

#[test]
fn changeps1_is_honoured() {
    for name in SHELLS {
        for (setting, expected) in [("changeps1: false", "prompt> "), ("env_prompt: '<{name}> '", "<one> prompt> ")] {
            let env = TestEnv::new();
            environment(&env, &env.envs().join("one"), &serde_json::json!({}));
            std::fs::write(env.home().join(".condarc"), format!("{setting}\n")).unwrap();
            let Some(mut shell) = shell(&env, name, &[]) else { continue };
            shell.run("tare activate one");
            let shown = shell.run("");
            assert!(shown.contains(expected), "{name} {setting}: {shown:?}");
            assert_eq!(shown.contains("one>") || shown.contains("(one"), setting.starts_with("env"), "{name}: {shown:?}");
        }
    }
}

#[test]
fn completion_works_with_the_function() {
    let env = TestEnv::new();
    let Some(mut shell) = shell(&env, "bash", &[]) else { return };
    shell.run("eval \"$(tare completions bash)\"");
    // A tab after the first letters.
    assert!(shell.run("tare deacti\t").contains("tare deactivate"), "{}", shell.text());
    let env = TestEnv::new();
    let Some(mut shell) = self::shell(&env, "fish", &[]) else { return };
    shell.run("tare completions fish | source");
    assert!(shell.run("complete -C 'tare deacti'").contains("Deactivate the active environment"), "{}", shell.text());
}

/// After `install` and the like the active environment is activated anew: what came may have scripts and variables.
#[test]
fn a_change_of_packages_is_seen_at_once() {
    let env = TestEnv::new();
    let mut channel = crate::common::channel::Channel::new(env.path().join("channel"));
    channel.add(&crate::common::channel::Package::new("tool", "1.0").file("etc/conda/env_vars.d/tool.json", r#"{"TOOL": "here"}"#));
    channel.add(&crate::common::channel::Package::new("first", "1.0").file("share/first", "x"));
    env.tare(&["create", "-n", "e", "--override-channels", "-c", &channel.url(), "first"]).ok();
    for name in SHELLS {
        let Some(mut shell) = shell(&env, name, &[("NO_COLOR", "1")]) else { continue };
        shell.run("tare activate e");
        let shown = shell.run(&format!("tare install -n e tool --override-channels -c {}", channel.url()));
        assert_eq!(shell.variables().get("TOOL").map(String::as_str), Some("here"), "{name}: {shown}");
        shell.run("tare remove -n e tool");
        assert_eq!(shell.variables().get("TOOL"), None, "{name}");
    }
}

/// A stored script works later and elsewhere, twice too.
#[test]
fn a_stored_hook_works_in_another_process() {
    let env = TestEnv::new();
    let prefix: PathBuf = env.envs().join("one");
    environment(&env, &prefix, &serde_json::json!({ "OVER": "one" }));
    let script = env.tare(&["shell-hook", "-n", "one", "-s", "posix"]).ok().stdout.replace("[ENVS]", env.envs().to_str().unwrap());
    let script = script.replace("[ROOT]", env.path().to_str().unwrap());
    let file = env.write("hook.sh", script);
    for (name, start) in [("sh", "/usr/bin"), ("bash", ""), ("zsh", "/x::/usr/bin:")] {
        let Some(program) = program(name) else { continue };
        let line = format!(". '{0}'; . '{0}'; /usr/bin/env -0", file.display());
        let output = env.other(program.to_str().unwrap()).args(["-c", &line]).env("PATH", start).env("OVER", "else").output().unwrap();
        let after = parse(&output.stdout);
        let first = format!("{}/bin", prefix.display());
        let expected = if start.is_empty() { format!("{first}:{first}") } else { format!("{first}:{first}:{start}") };
        assert_eq!((after["PATH"].as_str(), after["OVER"].as_str()), (expected.as_str(), "one"), "{name}");
    }
}
