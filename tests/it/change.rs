//! `install`, `update`, `remove`, `rename`, `create --clone`, `env config vars`: an environment is the old one or the new one.

use std::collections::BTreeSet;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::common::channel::{Channel, Package};
use crate::common::{Ran, TestEnv, tree};

/// Two versions of an application and its library, a tool of its own, and packages that clash.
fn channel(env: &TestEnv) -> Channel {
    let mut channel = Channel::new(env.path().join("channel"));
    for (version, text) in [("1.0", "one"), ("2.0", "two")] {
        channel.add(&Package::new("lib", version).file("lib/lib.txt", text).file(&format!("lib/only-{version}"), text));
        channel.add(
            &Package::new("app", version)
                .depends(&[&format!("lib >={version}"), "base"])
                .prefixed("bin/app", &format!("#!/bin/sh\necho {version} {{PREFIX}}\n"))
                .file("share/app/data", text),
        );
        channel.add(&Package::new("tool", version).file("share/tool/tool.txt", text).file(&format!("share/tool-{version}/x"), text));
    }
    channel.add(&Package::new("base", "1.0").file("share/base/base.txt", "base"));
    channel.add(&Package::new("clash", "1.0").file("share/tool/tool.txt", "clash").file("share/clash", "clash"));
    channel
}

/// Runs with the channel of the test and nothing else.
fn tare(env: &TestEnv, channel: &Channel, args: &[&str]) -> Ran {
    env.tare(&[args, &["--override-channels", "-c", &channel.url()]].concat())
}

fn made(specs: &[&str]) -> (TestEnv, Channel) {
    let env = TestEnv::new();
    let channel = channel(&env);
    tare(&env, &channel, &[&["create", "-n", "e"], specs].concat()).ok();
    (env, channel)
}

fn packages(env: &TestEnv, name: &str) -> Vec<String> {
    let list = env.tare(&["list", "-n", name, "--json"]).ok().json();
    let text = |package: &Value| format!("{}={}", package["name"].as_str().unwrap(), package["version"].as_str().unwrap());
    list.as_array().unwrap().iter().map(text).collect()
}

fn read(path: impl AsRef<Path>) -> String {
    std::fs::read_to_string(path.as_ref()).unwrap_or_else(|error| panic!("{}: {error}", path.as_ref().display()))
}

/// What lies beside the environments besides them and their lock files.
fn leftovers(env: &TestEnv) -> Vec<String> {
    let names = std::fs::read_dir(env.envs()).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    names.filter(|name| name.starts_with('.') && !name.ends_with(".lock")).collect()
}

fn inode(path: impl AsRef<Path>) -> u64 {
    std::fs::symlink_metadata(path).unwrap().ino()
}

#[test]
fn install_adds_and_leaves_everything_else_alone() {
    let (env, channel) = made(&["app=1.0", "lib=1.0"]);
    let prefix = env.envs().join("e");
    std::fs::create_dir_all(prefix.join("my notes/deep")).unwrap();
    std::fs::write(prefix.join("my notes/deep/a.txt"), "precious").unwrap();
    std::fs::set_permissions(prefix.join("my notes"), std::fs::Permissions::from_mode(0o700)).unwrap();
    std::fs::create_dir(prefix.join("empty")).unwrap();
    std::fs::write(prefix.join("share/app/mine"), "mine").unwrap();
    std::os::unix::fs::symlink("/nowhere/at/all", prefix.join("dangling")).unwrap();
    std::fs::write(prefix.join("conda-meta/pinned"), "# nothing yet\n").unwrap();
    let before = inode(prefix.join("lib/lib.txt"));

    let dry = tare(&env, &channel, &["install", "-n", "e", "tool", "--dry-run", "--json"]).ok().json();
    assert_eq!(dry["actions"]["LINK"][0]["name"], "tool");
    assert_eq!(dry["actions"]["FETCH"].as_array().unwrap().len(), 1);
    assert_eq!(dry["actions"]["UNLINK"], json!([]));
    assert_eq!(dry["changed"], false);
    assert!(!prefix.join("share/tool").exists());

    let done = tare(&env, &channel, &["install", "-n", "e", "tool", "--json"]).ok().json();
    assert_eq!((&done["success"], &done["changed"], &done["installed"]["kept"]), (&json!(true), &json!(true), &json!(3)), "{done:#}");
    assert_eq!(packages(&env, "e"), ["app=1.0", "base=1.0", "lib=1.0", "tool=2.0"]);
    assert_eq!(read(prefix.join("share/tool/tool.txt")), "two");
    assert_eq!(inode(prefix.join("lib/lib.txt")), before, "what stays is the very same file");
    assert_eq!(read(prefix.join("my notes/deep/a.txt")), "precious");
    assert_eq!(std::fs::metadata(prefix.join("my notes")).unwrap().mode() & 0o7777, 0o700);
    assert!(prefix.join("empty").is_dir());
    assert_eq!(read(prefix.join("share/app/mine")), "mine");
    assert_eq!(std::fs::read_link(prefix.join("dangling")).unwrap(), Path::new("/nowhere/at/all"));
    assert_eq!(read(prefix.join("conda-meta/pinned")), "# nothing yet\n");
    env.tare(&["run", "-n", "e", "app"]).ok().stdout_has("1.0 [ENVS]/e\n");
    let history = read(prefix.join("conda-meta/history"));
    assert_eq!(history.matches("==>").count(), 2, "{history}");
    assert!(history.contains("::tool-2.0-0") && history.contains("# update specs: ['tool']"), "{history}");
    assert_eq!(leftovers(&env), [""; 0]);
    // Once more there is nothing to do, and nothing is written.
    tare(&env, &channel, &["install", "-n", "e", "tool"]).ok().stderr_has("nothing to do");
    assert_eq!(read(prefix.join("conda-meta/history")), history);
}

#[test]
fn install_moves_what_must_move_and_refuses_what_cannot_be() {
    let (env, channel) = made(&["app=1.0"]);
    let prefix = env.envs().join("e");
    assert_eq!(packages(&env, "e"), ["app=1.0", "base=1.0", "lib=2.0"]);
    tare(&env, &channel, &["install", "-n", "e", "lib=1.0"]).ok().stderr_has("lib 2.0 -> 1.0");
    assert_eq!(read(prefix.join("lib/lib.txt")), "one");
    assert!(prefix.join("lib/only-1.0").exists() && !prefix.join("lib/only-2.0").exists());
    let plan = tare(&env, &channel, &["install", "-n", "e", "app=2.0", "lib=2.0", "--dry-run"]).ok();
    plan.stdout_has("~  app").stdout_has("~  lib");
    let whole = tree(&prefix, &[]);
    tare(&env, &channel, &["install", "-n", "e", "app=2.0"]).expect_code(3).stderr_has("lib");
    tare(&env, &channel, &["install", "-n", "e", "no-such-package"]).expect_code(3).stderr_has("no-such-package");
    tare(&env, &channel, &["install", "-n", "nowhere", "tool"]).expect_code(1).stderr_has("nowhere");
    assert_eq!(tree(&prefix, &[]), whole);
    // What the environment was made from is what is searched when nothing else is said.
    env.tare(&["install", "-n", "e", "tool=1.0"]).ok();
    assert_eq!(read(prefix.join("share/tool/tool.txt")), "one");
}

#[test]
fn update_moves_the_named_ones_or_all() {
    let (env, channel) = made(&["app=1.0", "lib=1.0", "tool=1.0"]);
    tare(&env, &channel, &["install", "-n", "e", "app", "lib"]).ok();
    assert_eq!(packages(&env, "e"), ["app=2.0", "base=1.0", "lib=2.0", "tool=1.0"]);
    let prefix = env.envs().join("e");
    let app = inode(prefix.join("share/app/data"));
    // `tool=1.0` was asked for, and holds.
    tare(&env, &channel, &["update", "-n", "e", "tool"]).ok().stderr_has("nothing to do");
    tare(&env, &channel, &["update", "-n", "e"]).ok().stderr_has("nothing to do");
    tare(&env, &channel, &["update", "-n", "e", "tool=2.0"]).ok().stderr_has("tool 1.0 -> 2.0");
    assert!(!prefix.join("share/tool-1.0").exists(), "folders that only an old package needed go");
    assert_eq!(inode(prefix.join("share/app/data")), app);
    tare(&env, &channel, &["update", "-n", "e", "tol"]).expect_code(1).stderr_has("did you mean `tool`?");
    let mut channel = channel;
    channel.add(&Package::new("base", "3.0").file("share/base/base.txt", "new base"));
    channel.add(&Package::new("lib", "3.0").file("lib/lib.txt", "three"));
    tare(&env, &channel, &["update", "-n", "e", "base"]).ok();
    assert_eq!(packages(&env, "e"), ["app=2.0", "base=3.0", "lib=2.0", "tool=2.0"]);
    tare(&env, &channel, &["update", "-n", "e", "--all"]).ok();
    assert_eq!(packages(&env, "e"), ["app=2.0", "base=3.0", "lib=3.0", "tool=2.0"]);
    let plan = tare(&env, &channel, &["install", "-n", "e", "lib=2.0", "--dry-run", "--json"]).ok().json();
    assert_eq!((&plan["actions"]["UNLINK"][0]["version"], &plan["actions"]["LINK"][0]["version"]), (&json!("3.0"), &json!("2.0")));
    assert_eq!(plan["actions"]["UNLINK"][0]["dist_name"], "lib-3.0-0");
}

#[test]
fn update_from_a_file_merges_and_prune_makes_it_equal() {
    let (env, channel) = made(&["tool=1.0"]);
    let prefix = env.envs().join("e");
    std::fs::write(prefix.join("mine"), "mine").unwrap();
    let file = |rest: &str| env.write("environment.yml", format!("name: e\nchannels: ['{}', nodefaults]\n{rest}", channel.url()));
    file("dependencies: [lib=1.0]\nvariables: {A: 1}\n");
    env.tare(&["update", "-f", "environment.yml"]).ok();
    assert_eq!(packages(&env, "e"), ["lib=1.0", "tool=1.0"]);
    env.tare(&["env", "config", "vars", "list", "-n", "e"]).ok().stdout_has("A = 1\n");
    file("dependencies: [app=1.0, lib=1.0]\nvariables: {B: 2}\n");
    env.tare(&["env", "update", "-f", "environment.yml", "--prune"]).ok().stderr_has("tool 1.0 removed");
    assert_eq!(packages(&env, "e"), ["app=1.0", "base=1.0", "lib=1.0"]);
    assert_eq!(env.tare(&["env", "config", "vars", "list", "-n", "e"]).ok().stdout, "B = 2\n");
    assert_eq!(read(prefix.join("mine")), "mine");
    assert!(!prefix.join("share/tool").exists());
    // It now is what `create` makes of the file.
    env.tare(&["update", "-f", "environment.yml", "--prune"]).ok().stderr_has("nothing to do");
    env.tare(&["create", "-f", "environment.yml"]).ok().stderr_has("nothing to do");
    env.tare(&["create", "-f", "environment.yml", "-n", "fresh"]).ok();
    let names = |name: &str| -> BTreeSet<String> {
        tree(&env.envs().join(name), &["history", "environment.json", "mine", "bin/app", "app-1.0-0.json", "tare/files", "revisions.json"])
            .into_iter()
            .collect()
    };
    assert_eq!(names("e"), names("fresh"));
    // An explicit list says all there is.
    let list = env.tare(&["list", "-n", "fresh", "--explicit"]).ok().stdout.replace("[ROOT]", &env.path().display().to_string());
    env.write("explicit.txt", list);
    tare(&env, &channel, &["install", "-n", "e", "tool", "lib=2.0"]).ok();
    env.tare(&["update", "-n", "e", "-f", "explicit.txt"]).ok();
    assert_eq!(packages(&env, "e"), ["app=1.0", "base=1.0", "lib=1.0", "tool=2.0"]);
    env.tare(&["update", "-n", "e", "-f", "explicit.txt", "--prune"]).ok();
    assert_eq!(packages(&env, "e"), ["app=1.0", "base=1.0", "lib=1.0"]);
}

#[test]
fn remove_takes_along_what_needs_it_and_what_only_it_needed() {
    let (env, channel) = made(&["app=1.0", "tool"]);
    let prefix = env.envs().join("e");
    std::fs::write(prefix.join("share/app/mine"), "mine").unwrap();
    // Nothing is solved, so nothing but the environment is needed.
    std::fs::remove_dir_all(channel.root()).unwrap();
    std::fs::remove_dir_all(env.cache()).unwrap();
    std::fs::create_dir(env.cache()).unwrap();
    let plan = env.tare(&["remove", "-n", "e", "app", "--dry-run", "--json"]).ok().json();
    let names: BTreeSet<&str> = plan["actions"]["UNLINK"].as_array().unwrap().iter().map(|p| p["name"].as_str().unwrap()).collect();
    assert_eq!(names, BTreeSet::from(["app", "base", "lib"]));
    env.tare(&["remove", "-n", "e", "ap"]).expect_code(1).stderr_has("did you mean `app`?");
    env.tare(&["remove", "-n", "e", "app=2.0"]).expect_code(1).stderr_has("1.0");
    env.tare(&["remove", "-n", "e", "app", "--no-prune"]).ok();
    assert_eq!(packages(&env, "e"), ["base=1.0", "lib=2.0", "tool=2.0"]);
    assert_eq!(read(prefix.join("share/app/mine")), "mine");
    assert!(!prefix.join("share/app/data").exists());
    env.tare(&["remove", "-n", "e", "tool"]).ok();
    // What stands alone without having been asked for stays.
    assert_eq!(packages(&env, "e"), ["base=1.0", "lib=2.0"]);
    let history = read(prefix.join("conda-meta/history"));
    assert!(history.contains("# remove specs: ['tool']") && history.contains("::tool-2.0-0"), "{history}");
}

#[test]
fn removing_a_library_removes_what_needs_it_and_says_so() {
    let (env, _channel) = made(&["app=1.0", "tool"]);
    env.tare(&["uninstall", "-n", "e", "lib"]).ok().stderr_has("because they need what is removed: `app`");
    assert_eq!(packages(&env, "e"), ["tool=2.0"]);
}

#[test]
fn remove_all_removes_the_environment_and_nothing_else() {
    let (env, _channel) = made(&["tool"]);
    env.tare(&["remove", "--all"]).expect_code(2).stderr_has("-n NAME");
    std::fs::create_dir(env.work().join("plain")).unwrap();
    std::fs::write(env.work().join("plain/x"), "x").unwrap();
    env.tare(&["remove", "--all", "-p", "plain"]).expect_code(1).stderr_has("no environment");
    assert!(env.work().join("plain/x").exists());
    let prefix = env.envs().join("e");
    let mut active = env.command(&["remove", "--all", "-n", "e"]);
    let active = env.ran(active.env("CONDA_PREFIX", &prefix).output().unwrap());
    active.expect_code(1).stderr_has("active");
    std::os::unix::fs::symlink(&prefix, env.work().join("link")).unwrap();
    env.tare(&["env", "remove", "-p", "link", "--dry-run"]).ok().stdout_has("would remove");
    env.tare(&["env", "remove", "-p", "link", "-y"]).ok();
    assert!(!prefix.exists() && std::fs::symlink_metadata(env.work().join("link")).is_err());
    assert_eq!(std::fs::read_dir(env.envs()).unwrap().count(), 0);
    assert_eq!(read(env.home().join(".conda/environments.txt")), "");
    env.tare(&["remove", "--all", "-n", "e"]).expect_code(1).stderr_has("no environment `e`");
}

#[test]
fn pins_hold_and_frozen_environments_are_refused() {
    let (env, channel) = made(&["tool=1.0"]);
    let prefix = env.envs().join("e");
    std::fs::write(prefix.join("conda-meta/pinned"), "tool 1.*  # until the new one is fixed\n").unwrap();
    tare(&env, &channel, &["install", "-n", "e", "tool"]).ok();
    assert_eq!(packages(&env, "e"), ["tool=1.0"]);
    tare(&env, &channel, &["install", "-n", "e", "tool=2.0"]).expect_code(3).stderr_has("conda-meta/pinned line 1");
    std::fs::write(prefix.join("conda-meta/pinned"), "lib 1.*\n").unwrap();
    tare(&env, &channel, &["install", "-n", "e", "lib"]).ok();
    assert_eq!(packages(&env, "e"), ["lib=1.0", "tool=1.0"]);
    std::fs::write(prefix.join("conda-meta/pinned"), "this is [no spec\n").unwrap();
    tare(&env, &channel, &["install", "-n", "e", "tool=2.0"]).expect_code(2).stderr_has("pinned");
    std::fs::remove_file(prefix.join("conda-meta/pinned")).unwrap();
    std::fs::write(env.home().join(".condarc"), "pinned_packages: ['tool <2']\n").unwrap();
    tare(&env, &channel, &["install", "-n", "e", "tool=2.0"]).expect_code(3).stderr_has("pinned_packages");
    std::fs::remove_file(env.home().join(".condarc")).unwrap();

    std::fs::write(prefix.join("conda-meta/frozen"), r#"{"message": "ask the operators"}"#).unwrap();
    let whole = tree(&prefix, &[]);
    for args in [
        &["install", "-n", "e", "app"][..],
        &["update", "-n", "e"],
        &["remove", "-n", "e", "tool"],
        &["remove", "-n", "e", "--all"],
        &["create", "-n", "e", "--force", "app"],
        &["rename", "e", "f"],
        &["env", "config", "vars", "set", "-n", "e", "A=1"],
    ] {
        let with_channel = !matches!(args[0], "remove" | "rename" | "env");
        let ran = if with_channel { tare(&env, &channel, args) } else { env.tare(args) };
        ran.expect_code(1).stderr_has("frozen").stderr_has("ask the operators").stderr_has("--override-frozen");
    }
    assert_eq!(tree(&prefix, &[]), whole);
    tare(&env, &channel, &["install", "-n", "e", "app", "--override-frozen"]).ok();
    assert!(prefix.join("conda-meta/frozen").exists(), "the mark stays");
    env.tare(&["create", "-n", "copy", "--clone", "e"]).ok();
    tare(&env, &channel, &["install", "-n", "copy", "tool=2.0"]).ok();
}

#[test]
fn files_in_the_way_are_not_overwritten() {
    let (env, channel) = made(&["lib"]);
    let prefix = env.envs().join("e");
    std::fs::create_dir_all(prefix.join("share/tool")).unwrap();
    std::fs::write(prefix.join("share/tool/tool.txt"), "mine").unwrap();
    let install = ["install", "-n", "e", "tool=1.0"];
    tare(&env, &channel, &install).expect_code(1).stderr_has("share/tool/tool.txt").stderr_has("--clobber");
    assert_eq!(read(prefix.join("share/tool/tool.txt")), "mine");
    tare(&env, &channel, &[&install[..], &["--clobber"]].concat()).ok().stderr_has("tool.txt.tare-saved");
    assert_eq!(read(prefix.join("share/tool/tool.txt")), "one");
    assert_eq!(read(prefix.join("share/tool/tool.txt.tare-saved")), "mine");
    // The same contents are in nobody's way.
    env.tare(&["remove", "-n", "e", "tool"]).ok();
    std::fs::write(prefix.join("share/tool/tool.txt"), "one").unwrap();
    tare(&env, &channel, &install).ok();

    // A file of another package, and its return.
    tare(&env, &channel, &["install", "-n", "e", "clash"]).expect_code(1).stderr_has("`tool`").stderr_has("`clash`");
    tare(&env, &channel, &["install", "-n", "e", "clash", "--clobber"]).ok();
    assert_eq!(read(prefix.join("share/tool/tool.txt")), "clash");
    env.tare(&["remove", "-n", "e", "clash"]).ok();
    assert_eq!(read(prefix.join("share/tool/tool.txt")), "one");
    assert!(!prefix.join("__clobbers__").exists());
    env.tare(&["remove", "-n", "e", "tool"]).ok();
    assert!(!prefix.join("share/tool/tool.txt").exists());

    // Never through a link of the user, never over a folder of his.
    std::fs::create_dir(env.work().join("data")).unwrap();
    std::fs::remove_dir_all(prefix.join("share")).unwrap();
    std::os::unix::fs::symlink(env.work().join("data"), prefix.join("share")).unwrap();
    tare(&env, &channel, &install).expect_code(1).stderr_has("`share`");
    assert_eq!(std::fs::read_dir(env.work().join("data")).unwrap().count(), 0);
    std::fs::remove_file(prefix.join("share")).unwrap();
    std::fs::create_dir_all(prefix.join("share/tool/tool.txt/folder")).unwrap();
    tare(&env, &channel, &install).expect_code(1).stderr_has("is a folder");
    assert!(prefix.join("share/tool/tool.txt/folder").is_dir());
}

#[test]
fn a_prefix_that_is_a_link_stays_one() {
    let env = TestEnv::new();
    let channel = channel(&env);
    let real = env.path().join("elsewhere");
    std::fs::create_dir(&real).unwrap();
    std::os::unix::fs::symlink(&real, env.envs().join("e")).unwrap();
    tare(&env, &channel, &["create", "-n", "e", "app=1.0"]).ok();
    tare(&env, &channel, &["install", "-n", "e", "tool"]).ok();
    tare(&env, &channel, &["update", "-n", "e", "app=2.0"]).ok();
    env.tare(&["remove", "-n", "e", "tool"]).ok();
    assert_eq!(std::fs::read_link(env.envs().join("e")).unwrap(), real);
    assert_eq!(env.tare(&["run", "-n", "e", "app"]).ok().stdout, "2.0 [ROOT]/elsewhere\n");
    // The parent may be reached by another road.
    std::os::unix::fs::symlink(env.envs(), env.path().join("road")).unwrap();
    tare(&env, &channel, &["create", "-n", "f", "app=1.0"]).ok();
    let road = env.path().join("road/f").display().to_string();
    tare(&env, &channel, &["install", "-p", &road, "app=2.0"]).ok();
    assert_eq!(env.tare(&["run", "-n", "f", "app"]).ok().stdout, "2.0 [ENVS]/f\n");
    // A moved environment is not patched together.
    std::fs::rename(env.envs().join("f"), env.envs().join("g")).unwrap();
    tare(&env, &channel, &["install", "-n", "g", "tool"]).expect_code(1).stderr_has("was moved").stderr_has("tare relocate");
    // It is repaired where it is, with what the user wrote into it.
    let old = env.envs().join("f").display().to_string();
    std::fs::write(env.envs().join("g/mine"), format!("{old}/x {old}2")).unwrap();
    env.tare(&["relocate", "-n", "g"]).ok().stderr_has("repaired");
    assert_eq!(env.tare(&["run", "-n", "g", "app"]).ok().stdout, "2.0 [ENVS]/g\n");
    assert_eq!(read(env.envs().join("g/mine")), format!("{}/x {old}2", env.envs().join("g").display()));
    env.tare(&["relocate", "-n", "g"]).ok().stderr_has("nothing to do");
    tare(&env, &channel, &["install", "-n", "g", "tool"]).ok();
}

/// A mounted file system, unmounted when dropped; `None` where mounting is not allowed.
struct Mounted(PathBuf);

impl Mounted {
    fn tmpfs(at: &Path, size: &str) -> Option<Self> {
        let done = Command::new("mount").args(["-t", "tmpfs", "-o", &format!("size={size},mode=755"), "tmpfs"]).arg(at).output();
        match done {
            Ok(done) if done.status.success() => Some(Mounted(at.to_owned())),
            _ => {
                eprintln!("skipped: mounting is not allowed here");
                None
            }
        }
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).output();
    }
}

#[test]
fn a_cache_without_space_is_no_drift() {
    let env = TestEnv::new();
    env.write("environment.yml", "name: e\nchannels: [host, nodefaults]\ndependencies: [python=3.11]\n");
    let locked = env.tare(&["lock", "-f", "environment.yml"]);
    if locked.code != 0 && locked.stderr.contains("no relocatable CPython") {
        eprintln!("skipped: no relocatable CPython 3.11 on this machine");
        return;
    }
    locked.ok();
    for (number, size) in ["1m", "24m"].into_iter().enumerate() {
        let full = env.path().join(format!("full{number}"));
        std::fs::create_dir(&full).unwrap();
        let Some(_mounted) = Mounted::tmpfs(&full, size) else { return };
        for args in [&["sync"][..], &["create", "-f", "environment.yml"], &["create", "--locked"]] {
            let mut command = env.command(args);
            let ran = env.ran(command.env("TARE_CACHE_DIR", &full).output().unwrap());
            assert_eq!(ran.code, 1, "{size} {args:?}: {}", ran.stderr);
            assert!(ran.stderr.to_lowercase().contains("space"), "{size} {args:?}: {}", ran.stderr);
            assert!(!env.envs().join("e").exists());
        }
    }
}

#[test]
fn mount_points_are_refused_with_the_reason() {
    let (env, channel) = made(&["tool=1.0"]);
    let prefix = env.envs().join("e");
    std::fs::create_dir(prefix.join("data")).unwrap();
    let Some(inner) = Mounted::tmpfs(&prefix.join("data"), "1m") else { return };
    std::fs::write(prefix.join("data/big"), "data").unwrap();
    tare(&env, &channel, &["install", "-n", "e", "lib"]).expect_code(1).stderr_has("mounted inside").stderr_has("umount");
    env.tare(&["remove", "-n", "e", "--all", "--yes"]).expect_code(1).stderr_has("mounted inside");
    tare(&env, &channel, &["create", "-n", "e", "--force", "lib"]).expect_code(1).stderr_has("mounted inside").stderr_has("umount");
    env.tare(&["rename", "e", "f"]).expect_code(1).stderr_has("mounted inside");
    assert_eq!(read(prefix.join("data/big")), "data");
    drop(inner);
    tare(&env, &channel, &["install", "-n", "e", "lib"]).ok();

    let at = env.envs().join("m");
    std::fs::create_dir(&at).unwrap();
    let _mounted = Mounted::tmpfs(&at, "8m").unwrap();
    let copied = Command::new("cp").arg("-a").arg(prefix.join(".")).arg(&at).status().unwrap();
    assert!(copied.success());
    std::fs::remove_dir_all(at.join("conda-meta/tare")).unwrap();
    tare(&env, &channel, &["install", "-n", "m", "app"]).expect_code(1).stderr_has("is a mount point");
    tare(&env, &channel, &["create", "-n", "m", "--force", "app"]).expect_code(1).stderr_has("mount point");
    assert!(at.join("share/tool/tool.txt").exists());
}

/// What no channel can bring back is named before it goes, and goes only if that was said.
#[test]
fn files_of_the_user_are_not_lost_without_a_word() {
    let (env, channel) = made(&["tool=1.0"]);
    let prefix = env.envs().join("e");
    std::fs::create_dir_all(prefix.join("notebooks")).unwrap();
    std::fs::write(prefix.join("notebooks/work.ipynb"), "work").unwrap();
    let whole = tree(&prefix, &[]);
    // conda would ask, and without somebody who answers do nothing.
    for args in [&["remove", "-n", "e", "--all"][..], &["env", "remove", "-n", "e"]] {
        env.tare(args).expect_code(1).stderr_has("`notebooks/work.ipynb`").stderr_has("--yes");
        env.tare(&[args, &["--dry-run"]].concat()).ok().stderr_has("`notebooks/work.ipynb`");
    }
    // Without `--force`, with or without `--yes`, an environment that is there stays, and what would be lost is named.
    for more in [&[][..], &["--yes"]] {
        let refused = tare(&env, &channel, &[&["create", "-n", "e", "lib"], more].concat()).expect_code(1);
        refused.stderr_has("`notebooks/work.ipynb`").stderr_has("tare update -f FILE --prune");
    }
    tare(&env, &channel, &["create", "-n", "e", "--force", "--dry-run", "lib"]).ok().stderr_has("`notebooks/work.ipynb`");
    assert_eq!(tree(&prefix, &[]), whole);
    // Every other change keeps it.
    tare(&env, &channel, &["install", "-n", "e", "lib=1.0"]).ok();
    tare(&env, &channel, &["update", "-n", "e", "--all"]).ok();
    env.tare(&["remove", "-n", "e", "lib"]).ok();
    env.tare(&["rename", "e", "f"]).ok();
    assert_eq!(read(env.envs().join("f/notebooks/work.ipynb")), "work");
    // Said before it happens: a request that cannot be solved loses nothing.
    let failed = tare(&env, &channel, &["create", "-n", "f", "--force", "nowhere"]);
    assert!(failed.code != 0 && failed.stderr.contains("`notebooks/work.ipynb`"), "{}", failed.stderr);
    assert_eq!(read(env.envs().join("f/notebooks/work.ipynb")), "work");
    tare(&env, &channel, &["create", "-n", "f", "--force", "lib"]).ok().stderr_has("`notebooks/work.ipynb`");
    assert!(!env.envs().join("f/notebooks").exists());
    // Nothing to lose: nothing is said.
    let again = tare(&env, &channel, &["create", "-n", "f", "--force", "tool"]).ok();
    assert!(!again.stderr.contains("warning"), "{}", again.stderr);
    std::fs::write(env.envs().join("f/mine"), "mine").unwrap();
    env.tare(&["env", "remove", "-n", "f", "--yes"]).ok();
    assert!(!env.envs().join("f").exists());
}

#[test]
fn a_full_disk_changes_nothing() {
    let env = TestEnv::new();
    let mut channel = channel(&env);
    let noise: Vec<u8> = (0..3_000_000_u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    channel.add(&Package::new("large", "1.0").file("share/large", noise).prefixed("share/p", "{PREFIX}"));
    let Some(_mounted) = Mounted::tmpfs(&env.envs(), "2m") else { return };
    tare(&env, &channel, &["create", "-n", "e", "app=1.0"]).ok();
    let whole = tree(&env.envs().join("e"), &[]);
    tare(&env, &channel, &["install", "-n", "e", "large"]).expect_code(1).stderr_has("not enough space").stderr_has("hint");
    // Full in the middle of the work.
    let filler = env.envs().join("filler");
    let fill = std::fs::metadata("/").map(|_| vec![0_u8; 4 << 20]).unwrap();
    let _ = std::fs::write(&filler, &fill);
    let failed = tare(&env, &channel, &["install", "-n", "e", "tool"]);
    assert_eq!(failed.code, 1, "{}", failed.stderr);
    assert!(failed.stderr.to_lowercase().contains("space"), "{}", failed.stderr);
    assert_eq!(tree(&env.envs().join("e"), &[]), whole);
    assert_eq!(leftovers(&env), [""; 0]);
    // The other changes: an update, a removal, a new environment in its place, another name.
    for args in [
        &["update", "-n", "e", "app=2.0"][..],
        &["install", "-n", "e", "base", "tool"],
        &["create", "-n", "e", "--force", "tool"],
        &["create", "-n", "e", "--force", "large"],
        &["create", "-n", "f", "--clone", "e"],
        &["rename", "e", "f"],
        &["env", "config", "vars", "set", "-n", "e", "LARGE=1"],
    ] {
        if args[0] == "env" {
            // A few bytes may still find a place; half a file must not be.
            let ran = env.tare(args);
            let variables = env.tare(&["env", "config", "vars", "list", "-n", "e", "--json"]).ok().json();
            assert_eq!(variables, if ran.code == 0 { json!({ "LARGE": "1" }) } else { json!({}) }, "{}", ran.stderr);
            assert_eq!(leftovers(&env), [""; 0], "{args:?}");
            continue;
        }
        let failed = if args[0] == "rename" || args.contains(&"--clone") { env.tare(args) } else { tare(&env, &channel, args) };
        assert!(failed.code == 1 && failed.stderr.to_lowercase().contains("space"), "{args:?}: {} {}", failed.code, failed.stderr);
        assert_eq!(tree(&env.envs().join("e"), &[]), whole, "{args:?}");
        assert_eq!(leftovers(&env), [""; 0], "{args:?}");
        assert!(!env.envs().join("f").exists(), "{args:?}");
    }
    // What frees space goes all the same, or says why not.
    let removed = env.tare(&["remove", "-n", "e", "app"]);
    assert!(removed.code == 0 || removed.stderr.to_lowercase().contains("space"), "{}", removed.stderr);
    assert_eq!(leftovers(&env), [""; 0]);
    std::fs::remove_file(&filler).unwrap();
    tare(&env, &channel, &["install", "-n", "e", "tool"]).ok();
    tare(&env, &channel, &["update", "-n", "e", "--all"]).ok();
}

/// The disk of the cache is full instead: nothing can be fetched or unpacked, and the environment is as it was.
#[test]
fn a_full_disk_of_the_cache_changes_nothing() {
    let env = TestEnv::new();
    let mut channel = channel(&env);
    let noise: Vec<u8> = (0..3_000_000_u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    for version in ["1.0", "2.0"] {
        channel.add(&Package::new("large", version).file("share/large", [version.as_bytes(), noise.as_slice()].concat()));
    }
    let Some(_mounted) = Mounted::tmpfs(&env.cache(), "5m") else { return };
    tare(&env, &channel, &["create", "-n", "e", "large=1.0", "app=1.0"]).ok();
    let whole = tree(&env.envs().join("e"), &[]);
    for args in
        [&["update", "-n", "e", "large=2.0"][..], &["install", "-n", "e", "large=2.0"], &["create", "-n", "e", "--force", "large=2.0"]]
    {
        let failed = tare(&env, &channel, args);
        assert!(failed.code == 1 && failed.stderr.to_lowercase().contains("space"), "{args:?}: {} {}", failed.code, failed.stderr);
        assert!(failed.stderr.contains("hint: "), "{args:?}: {}", failed.stderr);
        assert_eq!(tree(&env.envs().join("e"), &[]), whole, "{args:?}");
        assert_eq!(leftovers(&env), [""; 0], "{args:?}");
    }
    // Neither half a package nor a lock is in the way when there is room again, and `remove` never needed any.
    env.tare(&["remove", "-n", "e", "app"]).ok();
    env.tare(&["clean", "--packages"]).ok();
    tare(&env, &channel, &["update", "-n", "e", "large=2.0"]).ok();
    env.tare(&["verify", "-n", "e"]).ok();
}

#[test]
fn a_folder_that_cannot_be_written_is_named() {
    use std::os::unix::process::CommandExt;
    let (env, channel) = made(&["tool=1.0"]);
    let root = rustix::process::geteuid().is_root();
    let run = |args: &[&str]| {
        let mut command = env.command(args);
        if root {
            command.uid(65_534).gid(65_534);
        }
        command.output().map(|output| env.ran(output))
    };
    if root {
        let owned = Command::new("chown").args(["-R", "65534:65534"]).arg(env.path()).status().unwrap();
        assert!(owned.success());
        if !run(&["--version"]).is_ok_and(|ran| ran.code == 0) {
            eprintln!("skipped: another user cannot run the binary here");
            return;
        }
    }
    let whole = tree(&env.envs().join("e"), &[]);
    std::fs::set_permissions(env.envs(), std::fs::Permissions::from_mode(0o555)).unwrap();
    let install = ["install", "-n", "e", "lib", "--override-channels", "-c", &channel.url()];
    let refused = run(&install).unwrap();
    std::fs::set_permissions(env.envs(), std::fs::Permissions::from_mode(0o755)).unwrap();
    refused.expect_code(1).stderr_has("lock file").stderr_has("write in the folder that holds the environment");
    assert_eq!(tree(&env.envs().join("e"), &[]), whole);
    run(&install).unwrap().ok();
}

#[test]
fn environments_of_other_tools_are_changed_with_care() {
    for tool in ["conda", "pixi"] {
        let (env, channel) = made(&["app=1.0", "lib=1.0"]);
        let prefix = env.envs().join("e");
        let meta = prefix.join("conda-meta");
        std::fs::remove_dir_all(meta.join("tare")).unwrap();
        for name in ["app-1.0-0.json", "lib-1.0-0.json", "base-1.0-0.json"] {
            let mut record: Value = serde_json::from_str(&read(meta.join(name))).unwrap();
            record["extracted_package_dir"] = json!("/opt/conda/pkgs/x");
            record["link"] = json!({ "source": "/opt/conda/pkgs/x", "type": 1 });
            record["a_key_of_tomorrow"] = json!([1, 2]);
            record.as_object_mut().unwrap().shift_remove("requested_specs");
            record["requested_spec"] = json!(if name.starts_with("base") { "None" } else { &name[..3] });
            std::fs::write(meta.join(name), serde_json::to_string(&record).unwrap()).unwrap();
        }
        if tool == "conda" {
            let history = "==> 2024-01-01 00:00:00 <==\n# cmd: conda create app=1.0 lib=1.0\n# conda version: 24.1.0\n+x/linux-64::app-1.0-0\n# update specs: ['app=1.0', 'lib=1.0']\n";
            std::fs::write(meta.join("history"), history).unwrap();
        } else {
            std::fs::write(meta.join("history"), "").unwrap();
            std::fs::write(meta.join("pixi"), "{}").unwrap();
        }
        tare(&env, &channel, &["install", "-n", "e", "tool=1.0"]).ok();
        assert_eq!(packages(&env, "e"), ["app=1.0", "base=1.0", "lib=1.0", "tool=1.0"], "{tool}");
        let record: Value = serde_json::from_str(&read(meta.join("lib-1.0-0.json"))).unwrap();
        assert_eq!(record["a_key_of_tomorrow"], json!([1, 2]), "{tool}");
        let history = read(meta.join("history"));
        assert!(history.contains("# update specs: ['tool 1.0.*']") || history.contains("# update specs: ['tool=1.0"), "{history}");
        if tool == "conda" {
            assert!(history.starts_with("==> 2024-01-01"), "{history}");
        } else {
            assert!(meta.join("pixi").exists());
            // The state before is written down first, so that the revision reads as what it was.
            let revisions = env.tare(&["list", "-n", "e", "--revisions", "--json"]).ok().json();
            assert_eq!(revisions[0]["install"].as_array().unwrap().len(), 3, "{revisions:#}");
            assert_eq!(revisions[1]["install"].as_array().unwrap().len(), 1, "{revisions:#}");
        }
        env.tare(&["remove", "-n", "e", "app"]).ok();
        assert_eq!(packages(&env, "e"), ["lib=1.0", "tool=1.0"], "{tool}");
        tare(&env, &channel, &["update", "-n", "e"]).ok();
        // conda's history asked for lib=1.0; pixi's record for any.
        assert_eq!(packages(&env, "e"), [if tool == "conda" { "lib=1.0" } else { "lib=2.0" }, "tool=1.0"], "{tool}");
    }
}

#[test]
fn programs_that_run_in_the_environment_go_on() {
    let env = TestEnv::new();
    let mut channel = channel(&env);
    // Reads a file of the environment again and again, and writes to a log in it that it holds open.
    channel.add(&Package::new("daemon", "1.0").prefixed(
        "bin/daemon",
        "#!/bin/sh\nexec >>{PREFIX}/daemon.log\nwhile ! test -e \"$1\"; do cat {PREFIX}/lib/lib.txt || exit 7; echo; sleep 0.01; done\necho end\n",
    ));
    tare(&env, &channel, &["create", "-n", "e", "daemon", "lib=1.0"]).ok();
    let prefix = env.envs().join("e");
    let stop = env.work().join("stop");
    let mut daemon = env.command(&["run", "-n", "e", "daemon", stop.to_str().unwrap()]).stdout(Stdio::piped()).spawn().unwrap();
    let started = Instant::now();
    while !std::fs::metadata(prefix.join("daemon.log")).is_ok_and(|log| log.len() > 0) {
        assert!(started.elapsed() < Duration::from_secs(20), "the program does not start");
        std::thread::sleep(Duration::from_millis(10));
    }
    tare(&env, &channel, &["install", "-n", "e", "lib=2.0", "tool"]).ok();
    tare(&env, &channel, &["install", "-n", "e", "tool=1.0"]).ok();
    std::thread::sleep(Duration::from_millis(100));
    std::fs::write(&stop, "").unwrap();
    assert!(daemon.wait().unwrap().success(), "the program lost its environment");
    let log = read(prefix.join("daemon.log"));
    assert!(log.starts_with("one\n") && log.ends_with("two\nend\n"), "{log}");
}

#[test]
fn copies_and_new_names() {
    let (env, channel) = made(&["app=1.0", "lib=1.0"]);
    let prefix = env.envs().join("e");
    std::fs::write(prefix.join("bin/mine"), format!("#!/bin/sh\necho {0} {0}2\n", prefix.display())).unwrap();
    std::fs::set_permissions(prefix.join("bin/mine"), std::fs::Permissions::from_mode(0o755)).unwrap();
    std::fs::write(prefix.join("binary"), b"\xff\x00\x01").unwrap();
    std::os::unix::fs::symlink(prefix.join("binary"), prefix.join("absolute")).unwrap();
    env.tare(&["env", "config", "vars", "set", "-n", "e", "A=1"]).ok();
    env.tare(&["create", "-n", "copy", "--clone", "e", "--dry-run"]).ok().stdout_has("would copy");
    env.tare(&["create", "-n", "copy", "--clone", "e"]).ok();
    let copy = env.envs().join("copy");
    assert_eq!(env.tare(&["run", "-n", "copy", "app"]).ok().stdout, "1.0 [ENVS]/copy\n");
    assert_eq!(env.tare(&["run", "-n", "copy", "mine"]).ok().stdout, "[ENVS]/copy [ENVS]/e2\n");
    assert_eq!(std::fs::read(copy.join("binary")).unwrap(), b"\xff\x00\x01");
    assert_ne!(inode(copy.join("binary")), inode(prefix.join("binary")));
    assert_eq!(std::fs::read_link(copy.join("absolute")).unwrap(), copy.join("binary"));
    assert_eq!(env.tare(&["env", "config", "vars", "list", "-n", "copy"]).ok().stdout, "A = 1\n");
    assert_eq!(packages(&env, "copy"), packages(&env, "e"));
    env.tare(&["create", "-n", "copy", "--clone", "e"]).expect_code(1).stderr_has("already");
    env.tare(&["create", "-n", "e", "--clone", "e"]).expect_code(2);
    env.tare(&["create", "-n", "x", "--clone", "nowhere"]).expect_code(1).stderr_has("nowhere");
    // The copy is an environment like any other.
    tare(&env, &channel, &["install", "-n", "copy", "lib=2.0"]).ok();
    assert_eq!(read(prefix.join("lib/lib.txt")), "one");

    env.tare(&["rename", "copy", "e"]).expect_code(1).stderr_has("already");
    env.tare(&["rename", "copy", "base"]).expect_code(2);
    env.tare(&["rename", "copy", "moved"]).ok();
    assert!(!copy.exists());
    assert_eq!(env.tare(&["run", "-n", "moved", "mine"]).ok().stdout, "[ENVS]/moved [ENVS]/e2\n");
    env.tare(&["rename", "-n", "moved", "./far"]).ok();
    assert_eq!(env.tare(&["run", "-p", "far", "app"]).ok().stdout, "1.0 [WORK]/far\n");
    let known = read(env.home().join(".conda/environments.txt"));
    assert_eq!(known.lines().collect::<Vec<_>>(), [prefix.display().to_string(), env.work().join("far").display().to_string()]);
    env.tare(&["rename", "nowhere", "x"]).expect_code(1).stderr_has("nowhere");
    env.tare(&["rename", "e"]).expect_code(2);
    assert_eq!(leftovers(&env), [""; 0]);
    assert!(!env.work().join("far/conda-meta/tare/renamed-from").exists());
}

#[test]
fn variables_are_set_listed_and_unset() {
    let (env, _channel) = made(&["tool"]);
    let vars = |args: &[&str]| env.tare(&[&["env", "config", "vars"], args, &["-n", "e"]].concat());
    assert_eq!(vars(&["list"]).ok().stdout, "");
    vars(&["set", "A=1", "B=x=y z"]).ok();
    assert_eq!(vars(&["list"]).ok().stdout, "A = 1\nB = x=y z\n");
    assert_eq!(vars(&["list", "--json"]).ok().json(), json!({ "A": "1", "B": "x=y z" }));
    assert_eq!(env.tare(&["run", "-n", "e", "sh", "-c", "echo $A $B"]).ok().stdout, "1 x=y z\n");
    vars(&["set", "A=2"]).ok();
    vars(&["unset", "B"]).ok();
    assert_eq!(vars(&["list"]).ok().stdout, "A = 2\n");
    vars(&["unset", "B"]).expect_code(1).stderr_has("`B`");
    for bad in ["1A=x", "=x", "A", "PATH=x"] {
        vars(&["set", bad]).expect_code(2);
    }
    vars(&["unset", "A"]).ok();
    assert!(!env.envs().join("e/conda-meta/state").exists());
}

#[test]
fn noarch_packages_follow_python_and_old_byte_code_goes() {
    let env = TestEnv::new();
    let mut channel = Channel::new(env.path().join("channel"));
    for version in ["3.11.1", "3.12.1"] {
        let minor = &version[..4];
        // No interpreter: nothing can be compiled, which is said and is no failure.
        channel.add(&Package::new("python", version).file(&format!("bin/python{minor}"), "#!/bin/sh\nexit 1\n"));
    }
    for version in ["1.0", "2.0"] {
        channel.add(
            &Package::new("pure", version).depends(&["python"]).noarch_python(&["pure = pure:main"]).file("site-packages/pure.py", version),
        );
    }
    tare(&env, &channel, &["create", "-n", "e", "python=3.11", "pure=1.0"]).ok();
    let prefix = env.envs().join("e");
    let old = prefix.join("lib/python3.11/site-packages");
    std::fs::create_dir_all(old.join("__pycache__")).unwrap();
    std::fs::write(old.join("__pycache__/pure.cpython-311.pyc"), "stale").unwrap();
    std::fs::write(old.join("__pycache__/mine.cpython-311.pyc"), "mine").unwrap();
    tare(&env, &channel, &["install", "-n", "e", "pure=2.0"]).ok();
    assert_eq!(read(old.join("pure.py")), "2.0");
    assert!(!old.join("__pycache__/pure.cpython-311.pyc").exists());
    assert_eq!(read(old.join("__pycache__/mine.cpython-311.pyc")), "mine");
    // Python stays what it is unless it is asked to move.
    tare(&env, &channel, &["install", "-n", "e", "python"]).ok().stderr_has("python 3.11.1 -> 3.12.1");
    assert_eq!(read(prefix.join("lib/python3.12/site-packages/pure.py")), "2.0");
    assert!(!old.join("pure.py").exists());
    assert!(read(prefix.join("bin/pure")).contains("python3.12"));
    let revisions = read(prefix.join("conda-meta/history"));
    assert!(revisions.contains("python-3.12.1"), "{revisions}");
}

#[test]
fn what_cannot_be_fetched_changes_nothing() {
    let (env, channel) = made(&["tool=1.0"]);
    let whole = tree(&env.envs().join("e"), &[]);
    let archive = channel.root().join("linux-64/lib-2.0-0.conda");
    let bytes = std::fs::read(&archive).unwrap();
    let install = || tare(&env, &channel, &["install", "-n", "e", "lib=2.0"]);
    std::fs::write(&archive, &bytes[..bytes.len() / 2]).unwrap();
    assert_ne!(install().code, 0);
    let mut flipped = bytes.clone();
    let middle = flipped.len() / 2;
    flipped[middle] ^= 1;
    std::fs::write(&archive, &flipped).unwrap();
    install().expect_code(5);
    std::fs::remove_file(&archive).unwrap();
    install().expect_code(1).stderr_has("lib 2.0");
    assert_eq!(tree(&env.envs().join("e"), &[]), whole);
    std::fs::write(&archive, &bytes).unwrap();
    install().ok();
}

#[test]
fn changes_at_once_all_count() {
    let env = TestEnv::new();
    let mut channel = Channel::new(env.path().join("channel"));
    for nth in 0..8 {
        channel.add(&Package::new(&format!("part{nth}"), "1.0").file(&format!("share/part{nth}"), "x"));
    }
    channel.add(&Package::new("first", "1.0").file("share/first", "x"));
    tare(&env, &channel, &["create", "-n", "e", "first"]).ok();
    let url = channel.url();
    let children: Vec<_> = (0..8)
        .map(|nth| {
            env.command(&["install", "-n", "e", &format!("part{nth}"), "--override-channels", "-c", &url])
                .stdout(Stdio::piped())
                .stderr(Stdio::piped())
                .spawn()
                .unwrap()
        })
        .collect();
    for child in children {
        env.ran(child.wait_with_output().unwrap()).ok();
    }
    assert_eq!(packages(&env, "e").len(), 9);
    assert_eq!(std::fs::read_dir(env.envs().join("e/share")).unwrap().count(), 9);
    let children: Vec<_> = (0..8)
        .map(|nth| {
            let name = format!("part{nth}");
            let args = if nth % 2 == 0 { vec!["remove", "-n", "e", &name] } else { vec!["env", "config", "vars", "set", "-n", "e", "V=1"] };
            env.command(&args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
        })
        .collect();
    for child in children {
        env.ran(child.wait_with_output().unwrap()).ok();
    }
    assert_eq!(packages(&env, "e").len(), 5);
    assert_eq!(env.tare(&["env", "config", "vars", "list", "-n", "e"]).ok().stdout, "V = 1\n");
    assert_eq!(leftovers(&env), [""; 0]);
}

/// Packages with enough files that a kill finds something under way.
fn wide_channel(env: &TestEnv) -> Channel {
    let mut channel = Channel::new(env.path().join("channel"));
    for version in ["1.0", "2.0"] {
        for name in ["left", "right", "extra"] {
            let mut package =
                Package::new(name, version).prefixed(&format!("bin/{name}"), &format!("#!/bin/sh\necho {version} {{PREFIX}}\n"));
            for nth in 0..60 {
                package = package.file(&format!("share/{name}/{nth}-{version}"), format!("{name} {nth} {version}").repeat(20));
                package = package.file(&format!("share/{name}/{nth}"), format!("{name} {nth} {version}"));
            }
            channel.add(&package);
        }
    }
    channel
}

/// The package files of an environment and the records of its packages: what must never be a mixture. Times of the history are left out.
fn state(prefix: &Path) -> Vec<String> {
    let mut lines: Vec<String> = tree(prefix, &[])
        .into_iter()
        .filter(|line| !line.starts_with("conda-meta/history") && !line.starts_with("conda-meta/tare"))
        .collect();
    lines.extend(read(prefix.join("conda-meta/history")).lines().filter(|line| line.starts_with(['+', '-'])).map(str::to_owned));
    lines
}

fn copy_tree(from: &Path, to: &Path) {
    assert!(Command::new("cp").arg("-a").arg(from).arg(to).status().unwrap().success());
}

/// SIGKILL at random moments of every kind of change. `TARE_TEST_KILLS_CHANGE` is the number of kills in total.
#[test]
fn killed_changes_leave_the_old_or_the_new_environment() {
    let env = TestEnv::new();
    let channel = wide_channel(&env);
    let url = channel.url();
    let (e, f) = (env.envs().join("e"), env.envs().join("f"));
    tare(&env, &channel, &["create", "-n", "e", "left=1.0", "right=1.0"]).ok();
    std::fs::write(e.join("share/left/mine"), "mine").unwrap();
    let pristine = env.path().join("pristine");
    copy_tree(&e, &pristine);
    let from = ["--override-channels", "-c", &url];
    let install = [&["install", "-n", "e", "extra"][..], &from].concat();
    let update = [&["update", "-n", "e", "left=2.0", "right=2.0"][..], &from].concat();
    let commands: [&[&str]; 4] = [&install, &update, &["remove", "-n", "e", "left"], &["rename", "e", "f"]];
    let old = state(&e);
    let timed = |args: &[&str], duration: &mut f64| {
        let started = Instant::now();
        env.tare(args).ok();
        // The machine may get busier or idler: kills are to fall all over the run.
        *duration = (*duration + started.elapsed().as_secs_f64()) / 2.0;
    };
    let reset = || {
        for path in [&e, &f] {
            if path.exists() {
                std::fs::remove_dir_all(path).unwrap();
            }
        }
        copy_tree(&pristine, &e);
    };
    // What each command makes, and how long it takes.
    let mut new = Vec::new();
    let mut durations = Vec::new();
    for (number, args) in commands.iter().enumerate() {
        reset();
        let started = Instant::now();
        env.tare(args).ok();
        durations.push(started.elapsed().as_secs_f64());
        new.push(state(if number == 3 { &f } else { &e }));
        assert_ne!(new[number], old);
    }
    let rounds: usize = std::env::var("TARE_TEST_KILLS_CHANGE").ok().and_then(|text| text.parse().ok()).unwrap_or(24);
    let (mut before, mut after, mut both) = ([0; 4], [0; 4], 0);
    for round in 0..rounds {
        let number = round % 4;
        let args = commands[number];
        reset();
        // A low-discrepancy sequence covers the run evenly without a random source.
        let part = (round as f64 * 0.618_033_988_75 + 0.37 * number as f64).fract() * 1.15;
        let mut child = env.command(args).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        std::thread::sleep(Duration::from_secs_f64((durations[number] * part).max(0.001)));
        let _ = child.kill();
        child.wait().unwrap();
        if number == 3 {
            let (has_old, has_new) = (e.exists(), f.exists());
            assert!(has_old || has_new, "round {round}: the environment is gone");
            if has_old {
                assert_eq!(state(&e), old, "round {round}");
            }
            if has_new {
                assert_eq!(state(&f), new[3], "round {round}");
            }
            both += usize::from(has_old && has_new);
            if has_old {
                before[3] += 1
            } else {
                after[3] += 1
            }
            if has_old || env.envs().join(".e.tare-rename").exists() {
                timed(args, &mut durations[number]);
            }
            assert!(!e.exists(), "round {round}");
            assert_eq!(state(&f), new[3], "round {round}");
            // Whatever comes next works, and finds nothing lying about.
            env.tare(&["remove", "-n", "f", "left"]).ok();
        } else {
            assert!(e.exists() || env.envs().join(".e.tare-swap").exists(), "round {round}: the environment is gone");
            let now = state(&e);
            if now == old {
                before[number] += 1;
            } else {
                assert_eq!(now, new[number], "round {round}: `{}` left a mixture", args[0]);
                after[number] += 1;
            }
            // The command itself comes to its end, unless that is what it had come to.
            if now == old {
                timed(args, &mut durations[number]);
            } else if number < 2 {
                env.tare(args).ok();
            } else {
                env.tare(&["remove", "-n", "e", "right"]).ok();
                continue;
            }
            assert_eq!(state(&e), new[number], "round {round}");
        }
        assert_eq!(leftovers(&env), [""; 0], "round {round}");
        let place = if number == 3 { &f } else { &e };
        assert_eq!(read(place.join("share/left/mine")), "mine");
    }
    println!("{rounds} kills of install, update, remove, rename: old {before:?}, new {after:?}, both names there {both}");
    assert!(before.iter().sum::<usize>() > 0, "no kill came before the end");
}
