//! `verify --repair` and `install --revision`: back to what was installed.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::json;

use crate::common::channel::{Channel, Package};
use crate::common::{Ran, TestEnv, tree};

fn channel(env: &TestEnv) -> Channel {
    let mut channel = Channel::new(env.path().join("channel"));
    for (version, text) in [("1.0", "one"), ("2.0", "two")] {
        channel
            .add(&Package::new("lib", version).file("lib/lib.txt", text).file("lib/libx.so.1", text).symlink("lib/libx.so", "libx.so.1"));
    }
    channel.add(
        &Package::new("app", "1.0")
            .depends(&["lib"])
            .prefixed("bin/app", "#!/bin/sh\necho app {PREFIX}\n")
            .file("bin/plain", "#!/bin/sh\necho plain\n")
            .file("share/app/data", "data"),
    );
    channel.add(&Package::new("tool", "1.0").file("share/tool/tool.txt", "tool"));
    channel
}

fn made(specs: &[&str]) -> (TestEnv, Channel) {
    let env = TestEnv::new();
    let channel = channel(&env);
    tare(&env, &channel, &[&["create", "-n", "e"], specs].concat()).ok();
    (env, channel)
}

fn tare(env: &TestEnv, channel: &Channel, args: &[&str]) -> Ran {
    env.tare(&[args, &["--override-channels", "-c", &channel.url()]].concat())
}

fn chmod(path: impl AsRef<Path>, mode: u32) {
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
}

type Plant = (&'static str, fn(&Path));

/// What is done to an environment, each alone and all together.
const PLANTS: [Plant; 12] = [
    ("a flipped bit", |root| {
        let mut bytes = std::fs::read(root.join("share/app/data")).unwrap();
        bytes[0] ^= 1;
        std::fs::write(root.join("share/app/data"), bytes).unwrap();
    }),
    ("a cut file", |root| std::fs::write(root.join("lib/lib.txt"), "").unwrap()),
    ("an edited script", |root| std::fs::write(root.join("bin/app"), "#!/bin/sh\necho mine\n").unwrap()),
    ("a missing file", |root| std::fs::remove_file(root.join("share/tool/tool.txt")).unwrap()),
    ("a missing folder", |root| std::fs::remove_dir_all(root.join("share/app")).unwrap()),
    ("a program that cannot be executed", |root| chmod(root.join("bin/plain"), 0o644)),
    ("a file that all may write", |root| chmod(root.join("lib/libx.so.1"), 0o666)),
    ("a link to another file", |root| {
        std::fs::remove_file(root.join("lib/libx.so")).unwrap();
        std::os::unix::fs::symlink("lib.txt", root.join("lib/libx.so")).unwrap();
    }),
    ("a folder in place of a file", |root| {
        std::fs::remove_file(root.join("bin/plain")).unwrap();
        std::fs::create_dir(root.join("bin/plain")).unwrap();
    }),
    ("a missing record", |root| std::fs::remove_file(root.join("conda-meta/tool-1.0-0.json")).unwrap()),
    ("a record that is none", |root| std::fs::write(root.join("conda-meta/app-1.0-0.json"), "{").unwrap()),
    ("an edited record", |root| {
        let path = root.join("conda-meta/lib-2.0-0.json");
        let text = std::fs::read_to_string(&path).unwrap().replace("\"lib/lib.txt\"", "\"lib/other.txt\"");
        std::fs::write(path, text).unwrap();
    }),
];

#[test]
fn every_planted_fault_is_repaired_and_the_environment_is_the_same_again() {
    let (env, channel) = made(&["app", "tool"]);
    let prefix = env.envs().join("e");
    std::fs::write(prefix.join("share/mine"), "mine").unwrap();
    let whole = tree(&prefix, &[]);
    let repair = |what: &str| {
        env.tare(&["verify", "-n", "e"]).expect_code(5);
        let dry = env.tare(&["verify", "-n", "e", "--repair", "--dry-run", "--json"]).expect_code(5).json();
        assert_ne!(dry["repair"]["packages"], json!([]), "{what}: {dry:#}");
        let ran = env.tare(&["verify", "-n", "e", "--repair", "--json"]);
        assert_eq!(ran.code, 0, "{what}\n{}\n{}", ran.stdout, ran.stderr);
        assert_ne!(ran.json()["repair"]["repaired"], json!([]), "{what}");
        assert_eq!(tree(&prefix, &[]), whole, "{what}");
        env.tare(&["verify", "-n", "e"]).ok();
    };
    for (what, plant) in PLANTS {
        plant(&prefix);
        repair(what);
    }
    for (_, plant) in PLANTS.iter().filter(|(what, _)| !what.contains("folder")) {
        plant(&prefix);
    }
    repair("all of them");
    // Nothing to do is nothing written, and needs no channel.
    std::fs::remove_dir_all(channel.root()).unwrap();
    env.tare(&["verify", "-n", "e", "--repair"]).ok().stdout_has("ok: ");
    assert_eq!(tree(&prefix, &[]), whole);
}

#[test]
fn the_cache_is_enough_and_what_it_lacks_is_named() {
    let (env, channel) = made(&["app", "tool", "--copy"]);
    let prefix = env.envs().join("e");
    let whole = tree(&prefix, &[]);
    std::fs::remove_dir_all(channel.root()).unwrap();
    for (_, plant) in &PLANTS[..8] {
        // Some remove what others change.
        if prefix.join("share/app").exists() {
            plant(&prefix);
        }
    }
    std::fs::remove_file(prefix.join("conda-meta/app-1.0-0.json")).unwrap();
    // Without repodata the record is made from the archive; that it is the right one is known by the digest of all packages.
    env.tare(&["--offline", "verify", "-n", "e", "--repair"]).ok();
    let without = ["app-1.0-0.json", "tare/environment.json"];
    let rest: Vec<String> = whole.into_iter().filter(|line| !without.iter().any(|name| line.contains(name))).collect();
    assert_eq!(tree(&prefix, &without), rest);

    // Nothing at all is left of it.
    std::fs::remove_dir_all(env.cache()).unwrap();
    std::fs::create_dir(env.cache()).unwrap();
    std::fs::remove_file(prefix.join("conda-meta/app-1.0-0.json")).unwrap();
    std::fs::remove_file(prefix.join("share/tool/tool.txt")).unwrap();
    let whole = tree(&prefix, &[]);
    let ran = env.tare(&["verify", "-n", "e", "--repair"]).expect_code(5);
    ran.stderr_has("`app` cannot be repaired").stderr_has("`tool` cannot be repaired").stdout_has("missing  conda-meta/app-1.0-0.json");
    assert_eq!(tree(&prefix, &[]), whole);
}

#[test]
fn damaged_copies_in_the_cache_are_not_used() {
    let (env, channel) = made(&["app", "tool", "--copy"]);
    let prefix = env.envs().join("e");
    let whole = tree(&prefix, &[]);
    let damage = || {
        for entry in std::fs::read_dir(env.cache().join("pkgs")).unwrap().flatten() {
            let file = entry.path().join("share/tool/tool.txt");
            if file.exists() {
                std::fs::write(file, "bad!").unwrap();
            }
        }
        for name in ["share/tool/tool.txt", "share/app/data"] {
            // Not into the file of the cache.
            std::fs::remove_file(prefix.join(name)).unwrap();
            std::fs::write(prefix.join(name), "").unwrap();
        }
    };
    damage();
    env.tare(&["verify", "-n", "e", "--repair"]).ok().stderr_has("is damaged and is fetched again");
    assert_eq!(tree(&prefix, &[]), whole);
    // Where they cannot be fetched again the rest is repaired all the same.
    damage();
    std::fs::remove_dir_all(channel.root()).unwrap();
    let ran = env.tare(&["verify", "-n", "e", "--repair"]).expect_code(5);
    ran.stderr_has("linked 1 package anew: app").stderr_has("`tool` cannot be repaired").stdout_has("changed  share/tool/tool.txt");
    assert_eq!(std::fs::read_to_string(prefix.join("share/app/data")).unwrap(), "data");
}

#[test]
fn what_is_not_tares_to_repair_is_named_and_stays() {
    let (env, channel) = made(&["app", "tool"]);
    let prefix = env.envs().join("e");
    let site = prefix.join("lib/python3.11/site-packages");
    std::fs::create_dir_all(site.join("mod-1.dist-info")).unwrap();
    std::fs::write(site.join("mod.py"), "changed").unwrap();
    for (name, text) in [
        ("METADATA", "Name: mod\nVersion: 1\n"),
        ("INSTALLER", "pip\n"),
        ("RECORD", "mod.py,sha256=47DEQpj8HBSa-_TImW-5JCeuQeRkm5NMpJWZG3hSuFU,0\nmod-1.dist-info/METADATA,,\nmod-1.dist-info/RECORD,,\n"),
    ] {
        std::fs::write(site.join("mod-1.dist-info").join(name), text).unwrap();
    }
    std::fs::write(prefix.join("bin/extra"), "#!/bin/sh\n").unwrap();
    std::fs::write(prefix.join("conda-meta/other-1-0.json"), "not a record").unwrap();
    std::fs::write(prefix.join("conda-meta/state"), r#"{"version": 1, "env_vars": {"A": "b"}}"#).unwrap();
    std::fs::remove_dir_all(prefix.join("share/tool")).unwrap();
    std::os::unix::fs::symlink(env.work(), prefix.join("share/tool")).unwrap();
    std::fs::write(prefix.join("share/app/data"), "x").unwrap();
    let ran = env.tare(&["verify", "-n", "e", "--repair"]).expect_code(5);
    let ran = ran.stderr_has("linked 1 package anew: app").stderr_has("`tool` cannot be repaired: `share/tool` is no folder");
    let ran = ran.stderr_has("--no-extra").stderr_has("pip install --force-reinstall").stderr_has("tare env config vars set");
    let ran = ran.stdout_has("extra  bin/extra").stdout_has("foreign  conda-meta/other-1-0.json").stdout_has("changed  conda-meta/state");
    ran.stdout_has("changed  lib/python3.11/site-packages/mod.py").stdout_has("missing  share/tool/tool.txt");
    assert_eq!(std::fs::read_to_string(prefix.join("share/app/data")).unwrap(), "data");
    assert_eq!(std::fs::read_to_string(prefix.join("conda-meta/other-1-0.json")).unwrap(), "not a record");
    assert_eq!(std::fs::read_dir(env.work()).unwrap().count(), 0, "never through a link of the user");
    // A second time there is nothing left to link anew.
    let again = env.tare(&["verify", "-n", "e", "--repair", "--json"]).expect_code(5).json();
    assert_eq!((&again["repair"]["packages"], &again["success"]), (&json!([]), &json!(false)), "{again:#}");

    std::fs::write(prefix.join("conda-meta/frozen"), "{}").unwrap();
    env.tare(&["verify", "-n", "e", "--repair"]).expect_code(1).stderr_has("--override-frozen");
    env.tare(&["verify", "-n", "e", "--repair", "--override-frozen"]).expect_code(5);
    // A moved environment is not half repaired.
    std::fs::remove_file(prefix.join("conda-meta/frozen")).unwrap();
    std::fs::rename(&prefix, env.envs().join("moved")).unwrap();
    env.tare(&["verify", "-n", "moved", "--repair"]).expect_code(5).stderr_has("tare relocate");
    drop(channel);
}

#[test]
fn an_environment_of_another_tool_stays_one() {
    let (env, _channel) = made(&["tool"]);
    let prefix = env.envs().join("e");
    std::fs::remove_dir_all(prefix.join("conda-meta/tare")).unwrap();
    let whole = tree(&prefix, &[]);
    std::fs::write(prefix.join("share/tool/tool.txt"), "x").unwrap();
    env.tare(&["verify", "-n", "e", "--repair"]).ok();
    assert_eq!(tree(&prefix, &[]), whole);
}

/// SIGKILL at moments all over a repair. `TARE_TEST_KILLS_REPAIR` is their number.
#[test]
fn a_killed_repair_leaves_the_damaged_or_the_repaired_environment() {
    let env = TestEnv::new();
    let mut channel = Channel::new(env.path().join("channel"));
    let mut wide = Package::new("wide", "1.0");
    for number in 0..300 {
        wide = wide.file(&format!("share/wide/{}/{number}", number % 7), format!("{number}").repeat(50));
    }
    channel.add(&wide);
    tare(&env, &channel, &["create", "-n", "e", "wide"]).ok();
    let prefix = env.envs().join("e");
    let good = tree(&prefix, &[]);
    let damage = || {
        for number in [3, 77, 150] {
            let _ = std::fs::remove_file(prefix.join(format!("share/wide/{}/{number}", number % 7)));
        }
    };
    damage();
    let bad = tree(&prefix, &[]);
    let started = Instant::now();
    env.tare(&["verify", "-n", "e", "--repair"]).ok();
    let duration = started.elapsed().as_secs_f64();
    let rounds: u32 = std::env::var("TARE_TEST_KILLS_REPAIR").ok().and_then(|text| text.parse().ok()).unwrap_or(12);
    let (mut before, mut after) = (0, 0);
    for round in 0..rounds {
        damage();
        let mut child = env.command(&["verify", "-n", "e", "--repair", "--quiet"]).stdout(std::process::Stdio::null()).spawn().unwrap();
        std::thread::sleep(Duration::from_secs_f64(duration * f64::from(round) / f64::from(rounds)));
        let _ = child.kill();
        child.wait().unwrap();
        match tree(&prefix, &[]) {
            state if state == bad => before += 1,
            state if state == good => after += 1,
            state => panic!("a mixture: {state:#?}"),
        }
        env.tare(&["verify", "-n", "e", "--repair"]).ok();
        assert_eq!(tree(&prefix, &[]), good);
        let left: Vec<_> = std::fs::read_dir(env.envs()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert!(left.iter().all(|name| name == "e" || name == ".e.lock"), "{left:?}");
    }
    println!("{rounds} kills of repairs: damaged {before}, repaired {after}");
    assert!(before > 0, "no kill came before the end");
}

fn packages(env: &TestEnv) -> Vec<String> {
    let list = env.tare(&["list", "-n", "e", "--export"]).ok().stdout;
    list.lines().filter(|line| !line.starts_with('#')).map(str::to_owned).collect()
}

#[test]
fn an_earlier_revision_comes_back() {
    let (env, channel) = made(&["app", "lib=1.0"]);
    let prefix = env.envs().join("e");
    let first = tree(&prefix, &["history", "revisions.json"]);
    let digest = |env: &TestEnv| env.tare(&["env", "digest", "-n", "e"]).ok().stdout;
    let first_digest = digest(&env);
    std::fs::write(prefix.join("share/app/mine"), "mine").unwrap();
    tare(&env, &channel, &["install", "-n", "e", "tool", "lib=2.0"]).ok();
    env.tare(&["remove", "-n", "e", "tool"]).ok();
    assert_eq!(packages(&env), ["app=1.0=0", "lib=2.0=0"]);

    env.tare(&["install", "-n", "e", "--revision", "3"]).expect_code(2).stderr_has("there are 0 to 2");
    env.tare(&["install", "-n", "e", "--revision", "-1"]).expect_code(2);
    env.tare(&["install", "-n", "e", "--revision", "0", "tool"]).expect_code(2);
    let plan = env.tare(&["install", "-n", "e", "--revision", "1", "--dry-run", "--json"]).ok().json();
    assert_eq!(plan["actions"]["LINK"][0]["name"], "tool");
    assert_eq!(packages(&env), ["app=1.0=0", "lib=2.0=0"]);
    env.tare(&["install", "-n", "e", "--revision", "1"]).ok().stderr_has("tool 1.0 added");
    assert_eq!(packages(&env), ["app=1.0=0", "lib=2.0=0", "tool=1.0=0"]);

    // The channel is gone: the cache has what is needed.
    std::fs::remove_dir_all(channel.root()).unwrap();
    env.tare(&["--offline", "install", "-n", "e", "--revision", "0"]).ok().stderr_has("lib 2.0 -> 1.0").stderr_has("tool 1.0 removed");
    assert_eq!(packages(&env), ["app=1.0=0", "lib=1.0=0"]);
    assert_eq!(std::fs::read_to_string(prefix.join("lib/lib.txt")).unwrap(), "one");
    assert_eq!(std::fs::read_to_string(prefix.join("share/app/mine")).unwrap(), "mine");
    env.tare(&["verify", "-n", "e"]).ok();
    // It is a revision of its own, and what was asked for is what was asked for then.
    let revisions = env.tare(&["list", "-n", "e", "--revisions"]).ok().stdout;
    assert_eq!(revisions.matches("(rev ").count(), 5, "{revisions}");
    assert!(revisions.contains("(rev 4)") && revisions.contains("lib  {2.0"), "{revisions}");
    let requested = env.tare(&["export", "-n", "e", "--from-history"]).ok().stdout;
    assert!(requested.contains("lib=1.0") && !requested.contains("tool"), "{requested}");
    // All of it, its records and notes too, though no channel describes the packages any more.
    assert_eq!(tree(&prefix, &["history", "revisions.json", "share/app/mine"]), first);
    std::fs::remove_file(prefix.join("share/app/mine")).unwrap();
    assert_eq!(digest(&env), first_digest);
    std::fs::write(prefix.join("share/app/mine"), "mine").unwrap();
    env.tare(&["install", "-n", "e", "--revision", "0"]).ok().stderr_has("nothing to do");

    // Neither there nor here.
    std::fs::remove_dir_all(env.cache()).unwrap();
    std::fs::create_dir(env.cache()).unwrap();
    let whole = tree(&prefix, &[]);
    env.tare(&["install", "-n", "e", "--revision", "1"])
        .expect_code(1)
        .stderr_has("cannot go back to revision 1")
        .stderr_has("`lib 2.0 0`");
    assert_eq!(tree(&prefix, &[]), whole);
}

#[test]
fn a_history_of_conda_is_gone_back_in() {
    let (env, channel) = made(&["app", "lib=2.0"]);
    let prefix = env.envs().join("e");
    let url = channel.url();
    // As conda writes it: the whole state first, then differences.
    std::fs::write(
        prefix.join("conda-meta/history"),
        format!(
            "==> 2024-01-01 10:00:00 <==\n# cmd: conda create\n# conda version: 24.1.0\n+{url}/linux-64::lib-1.0-0\n# update specs: ['lib']\n\
             ==> 2024-01-02 10:00:00 <==\n# cmd: conda install app lib=2.0\n# conda version: 24.1.0\n-{url}/linux-64::lib-1.0-0\n\
             +{url}/linux-64::app-1.0-0\n+{url}/linux-64::lib-2.0-0\n# update specs: ['app', 'lib=2.0']\n"
        ),
    )
    .unwrap();
    std::fs::remove_dir_all(prefix.join("conda-meta/tare")).unwrap();
    env.tare(&["install", "-n", "e", "--revision", "0"]).ok();
    assert_eq!(packages(&env), ["lib=1.0=0"]);
    env.tare(&["install", "-n", "e", "--revision", "1"]).ok();
    assert_eq!(packages(&env), ["app=1.0=0", "lib=2.0=0"]);
    std::fs::write(prefix.join("conda-meta/history"), "").unwrap();
    env.tare(&["install", "-n", "e", "--revision", "0"]).expect_code(1).stderr_has("no history");
}

#[test]
fn modes_of_another_tool_are_no_fault_after_a_change() {
    let (env, channel) = made(&["tool", "lib"]);
    let prefix = env.envs().join("e");
    std::fs::remove_dir_all(prefix.join("conda-meta/tare")).unwrap();
    std::fs::remove_file(prefix.join("lib/libx.so")).unwrap();
    std::os::unix::fs::symlink("libx.so.1", prefix.join("lib/libx.so")).unwrap();
    // As conda leaves them where a package was built with a loose umask. Not in the cache, whose file it is.
    let file = prefix.join("share/tool/tool.txt");
    std::fs::remove_file(&file).unwrap();
    std::fs::write(&file, "tool").unwrap();
    chmod(&file, 0o664);
    tare(&env, &channel, &["install", "-n", "e", "app"]).ok();
    env.tare(&["verify", "-n", "e"]).ok();
    env.tare(&["remove", "-n", "e", "app"]).ok();
    env.tare(&["verify", "-n", "e"]).ok();
    chmod(&file, 0o644);
    env.tare(&["verify", "-n", "e"]).expect_code(5).stdout_has("0644 instead of 0664");
}

#[test]
fn a_dry_run_changes_nothing_and_siblings_are_named() {
    let (env, channel) = made(&["app", "tool"]);
    tare(&env, &channel, &["create", "-n", "sibling", "app", "tool"]).ok();
    let (prefix, sibling) = (env.envs().join("e"), env.envs().join("sibling"));
    use std::os::unix::fs::MetadataExt;
    let inode = |path: &Path| std::fs::metadata(path).unwrap().ino();
    if inode(&prefix.join("share/app/data")) != inode(&sibling.join("share/app/data")) {
        eprintln!("skipped: no hard links here");
        return;
    }
    // Written into the file that the cache and the other environment have too.
    std::fs::write(prefix.join("share/app/data"), "tada").unwrap();
    chmod(prefix.join("share/tool/tool.txt"), 0o666);
    let trees = || {
        let cache = env.cache().join("pkgs");
        // Locks come and go.
        let cache: Vec<String> = tree(&cache, &[".lock"]).into_iter().filter(|line| !line.starts_with(".tare-locks/")).collect();
        (tree(&prefix, &[]), tree(&sibling, &[]), cache)
    };
    let before = trees();
    let dry = env.tare(&["verify", "-n", "e", "--repair", "--dry-run"]).expect_code(5);
    let dry = dry.stderr_has("would link 2 packages anew: app, tool").stderr_has("would fetch again").stderr_has("app, tool");
    dry.stderr_has("another environment has the same damaged files, which this does not repair: `[ENVS]/sibling`: `share/app/data`")
        .stderr_has("tare verify -p [ENVS]/sibling --repair");
    assert_eq!(before, trees());
    // What cannot come is known without trying.
    let archives: Vec<_> = std::fs::read_dir(channel.root().join("linux-64")).unwrap().map(|entry| entry.unwrap().path()).collect();
    let aside = env.path().join("aside");
    std::fs::rename(channel.root(), &aside).unwrap();
    assert!(archives.len() > 1);
    env.tare(&["verify", "-n", "e", "--repair", "--dry-run"])
        .expect_code(5)
        .stderr_has("`app` cannot be repaired")
        .stderr_has("is not there");
    std::fs::rename(&aside, channel.root()).unwrap();

    let done = env.tare(&["verify", "-n", "e", "--repair", "--json"]).ok().json();
    assert_eq!(done["repair"]["fetched"], json!(["app", "tool"]));
    assert_eq!(done["repair"]["siblings"][0]["files"], json!(["share/app/data", "share/tool/tool.txt"]));
    // Nothing was written into the file of the other one.
    assert_eq!(std::fs::read_to_string(sibling.join("share/app/data")).unwrap(), "tada");
    assert_eq!(std::fs::metadata(sibling.join("share/tool/tool.txt")).unwrap().mode() & 0o777, 0o666);
    assert_ne!(inode(&prefix.join("share/app/data")), inode(&sibling.join("share/app/data")));
    let told = env.tare(&["verify", "-n", "sibling", "--repair"]).ok();
    told.stderr_has("repaired `share/tool/tool.txt`: it had the wrong mode")
        .stderr_has("repaired `share/app/data`: its content was changed");
    env.tare(&["verify", "-n", "e"]).ok();
    env.tare(&["verify", "-n", "sibling"]).ok();
}
