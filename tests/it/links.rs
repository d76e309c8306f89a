//! How files get from the cache into an environment, and how environments are exchanged: every link mode, on one device and across two, on file systems that
//! share extents and on others, from a cache that is only read, in a container's layers.
//!
//! The file systems are made in files and mounted, which needs root, loop devices and the programs `mkfs.*`; what is not there is said.
//! `TARE_TEST_LINK_MATRIX=1` tries every mode between every two of them; otherwise that is done on each, and between them only what tare would choose.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::common::channel::{Channel, Package};
use crate::common::{TestEnv, tree};

fn succeeds(command: &mut Command) -> bool {
    command.output().is_ok_and(|output| output.status.success())
}

/// Something mounted for the time of a test.
struct Mount(PathBuf);

impl Mount {
    /// A file system in a file. `None` after saying why, where the machine has no such file system or allows no mounts.
    fn new(env: &TestEnv, kind: &str, megabytes: u64) -> Option<Self> {
        let (image, at) = (env.path().join(format!("{kind}.img")), env.path().join(kind));
        std::fs::File::create(&image).unwrap().set_len(megabytes << 20).unwrap();
        if !succeeds(Command::new(format!("mkfs.{kind}")).arg("-q").arg(&image)) {
            println!("skipped: no mkfs.{kind}");
            return None;
        }
        Self::at(&at, &["-o", "loop", "-t", kind, image.to_str().unwrap()])
    }

    /// `None` after saying so, where mounting is not allowed.
    fn at(at: &Path, args: &[&str]) -> Option<Self> {
        std::fs::create_dir_all(at).unwrap();
        if succeeds(Command::new("mount").args(args).arg(at)) {
            return Some(Mount(at.to_owned()));
        }
        println!("skipped: `mount {}` is not possible here", args.join(" "));
        None
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

const BIG: usize = 20_000;

/// Two versions of a package, and one more.
fn channel(env: &TestEnv) -> Channel {
    let mut channel = Channel::new(env.path().join("channel"));
    for version in ["1.0", "2.0"] {
        channel.add(
            &Package::new("p", version)
                .file("share/data", version.repeat(BIG / 3))
                .prefixed("bin/p", &format!("#!/bin/sh\necho {version} {{PREFIX}}\n"))
                .symlink("share/link", "data"),
        );
    }
    channel.add(&Package::new("q", "1.0").file("share/q", "q"));
    channel
}

/// What the file system can do, found out without tare.
fn possible(from: &Path, to: &Path, kind: &str) -> bool {
    let (probe, target) = (from.join("probe"), to.join("probed"));
    if !probe.exists() {
        std::fs::write(&probe, vec![1; BIG]).unwrap();
    }
    let done = match kind {
        "hardlink" => std::fs::hard_link(&probe, &target).is_ok(),
        "reflink" => succeeds(Command::new("cp").arg("--reflink=always").args([&probe, &target])),
        _ => true,
    };
    let _ = std::fs::remove_file(&target);
    done
}

/// Whether the kernel says that the extents of a file are shared; `None` without the program that asks it.
fn shares_extents(file: &Path) -> Option<bool> {
    let output = Command::new("filefrag").args(["-s", "-v"]).arg(file).output().ok().filter(|output| output.status.success())?;
    Some(String::from_utf8_lossy(&output.stdout).contains("shared"))
}

/// How an installed file really came from the package's own one.
fn really(installed: &Path, cached: &Path, what: &str) -> &'static str {
    let (about, source) = (std::fs::symlink_metadata(installed).unwrap(), std::fs::symlink_metadata(cached).unwrap());
    if about.is_symlink() {
        assert_eq!(std::fs::read_link(installed).unwrap(), cached, "{what}");
        return "symlink";
    }
    if (about.dev(), about.ino()) == (source.dev(), source.ino()) {
        return "hardlink";
    }
    assert_eq!(about.nlink(), 1, "{what}");
    match shares_extents(installed) {
        Some(true) => "reflink",
        _ => "copy",
    }
}

/// The unpacked package in a package cache.
fn cached(packages: &Path) -> Option<PathBuf> {
    let mut entries = std::fs::read_dir(packages).ok()?.map(|entry| entry.unwrap().path()).filter(|path| path.is_dir());
    entries.find(|path| path.file_name().unwrap().to_string_lossy().starts_with("p-1.0-0"))
}

/// A folder on each kind of file system there is, by name.
fn places(env: &TestEnv) -> (Vec<(String, PathBuf)>, Vec<Mount>) {
    let mut mounts: Vec<Mount> =
        [("btrfs", 256), ("xfs", 512), ("ext4", 64)].iter().filter_map(|(kind, size)| Mount::new(env, kind, *size)).collect();
    mounts.extend(Mount::at(&env.path().join("tmpfs"), &["-t", "tmpfs", "-o", "size=64m", "tmpfs"]));
    let mut places: Vec<(String, PathBuf)> = vec![("disk".into(), env.path().join("disk"))];
    for mount in &mounts {
        let name = mount.0.file_name().unwrap().to_string_lossy().into_owned();
        if name == "btrfs" {
            // A device number of its own: no hard links to it, but shared extents.
            let inner = mount.0.join("inner");
            if succeeds(Command::new("btrfs").args(["subvolume", "create"]).arg(&inner)) {
                places.push(("subvolume".into(), inner));
            }
        }
        places.push((name, mount.0.join("top")));
    }
    // The same file system by another mount: the kernel allows no hard link from one to the other.
    if let Some((name, folder)) = places.iter().find(|(name, _)| name == "xfs").or(places.first()).cloned() {
        let (other, source) = (env.path().join("bound"), folder.join("bound"));
        std::fs::create_dir_all(&source).unwrap();
        if let Some(mount) = Mount::at(&other, &["--bind", source.to_str().unwrap()]) {
            mounts.push(mount);
            places.push((format!("bound-{name}"), other));
        }
    }
    for (_, folder) in &places {
        std::fs::create_dir_all(folder).unwrap();
    }
    (places, mounts)
}

#[test]
fn every_link_mode_on_one_device_and_across_two() {
    let env = TestEnv::new();
    let channel = channel(&env);
    let url = channel.url();
    let (places, _mounts) = places(&env);
    let whole = std::env::var_os("TARE_TEST_LINK_MATRIX").is_some();
    let mut reference = None;
    let mut table = Vec::new();
    for (cache_name, cache_place) in &places {
        for (place, folder) in &places {
            let chosen: Vec<&str> =
                ["reflink", "hardlink"].into_iter().filter(|kind| possible(cache_place, folder, kind)).chain(["copy"]).collect();
            let modes: &[&str] = if whole || cache_name == place { &["auto", "reflink", "hardlink", "copy", "symlink"] } else { &["auto"] };
            for mode in modes {
                let cache = cache_place.join("cache");
                let prefix = folder.join(format!("env-{cache_name}-{mode}"));
                let mut command = env.command(&["create", "--override-channels", "-c", &url, "--link-mode", mode, "--json", "p=1.0", "-p"]);
                let ran = env.ran(command.arg(&prefix).env("TARE_CACHE_DIR", &cache).output().unwrap());
                let what = format!("{mode}, cache on {cache_name}, environment on {place}");
                // A mode that is asked for and cannot be is refused, and nothing is made.
                if matches!(*mode, "reflink" | "hardlink") && !chosen.contains(mode) {
                    assert!(
                        ran.code == 1 && ran.stdout.contains("--link-mode auto") && !prefix.exists(),
                        "{what}: {} {}",
                        ran.code,
                        ran.stdout
                    );
                    table.push(format!("{what}: refused"));
                    continue;
                }
                assert_eq!(ran.code, 0, "{what}: {}{}", ran.stdout, ran.stderr);
                let wanted = if *mode == "auto" { chosen[0] } else { mode };
                assert_eq!(ran.json()["installed"]["link_modes"][0][1], wanted, "{what}");
                let used = really(&prefix.join("share/data"), &cached(&cache.join("pkgs")).unwrap().join("share/data"), &what);
                // The kernel may share extents where it was asked to copy, and without `filefrag` a reflink looks like a copy.
                let alike =
                    matches!((wanted, used), ("copy", "reflink")) || (wanted, used) == ("reflink", "copy") && !known_to_share(&prefix);
                assert!(used == wanted || alike, "{what}: {used}");
                table.push(format!("{what}: {wanted}"));
                // The contents are the same whatever the way.
                let mut lines = tree(&prefix.join("share"), &["data"]);
                lines.push(std::fs::read_to_string(prefix.join("share/data")).unwrap());
                lines.push(std::fs::read_link(prefix.join("share/link")).unwrap().display().to_string());
                assert_eq!(*reference.get_or_insert_with(|| lines.clone()), lines, "{what}");
                let output = Command::new(prefix.join("bin/p")).output().unwrap();
                assert_eq!(String::from_utf8(output.stdout).unwrap().trim(), format!("1.0 {}", prefix.display()), "{what}");
                std::fs::remove_dir_all(&prefix).unwrap();
            }
        }
    }
    println!("{}\n{} places, {} cases", table.join("\n"), places.len(), table.len());
}

/// Whether `filefrag` can be asked here at all.
fn known_to_share(prefix: &Path) -> bool {
    shares_extents(&prefix.join("share/data")).is_some()
}

/// The exchange of two folders, on every kind of file system: the old environment goes as a whole, and nothing of it stays.
#[test]
fn environments_are_changed_on_every_file_system() {
    let env = TestEnv::new();
    let channel = channel(&env);
    let url = channel.url();
    let from = ["--override-channels", "-c", &url];
    let (places, _mounts) = places(&env);
    for (place, folder) in &places {
        let (a, b) = (folder.join("a"), folder.join("b"));
        std::fs::create_dir(&a).unwrap();
        std::fs::create_dir(&b).unwrap();
        let exchanged = rustix::fs::renameat_with(rustix::fs::CWD, &a, rustix::fs::CWD, &b, rustix::fs::RenameFlags::EXCHANGE);
        println!("{place}: RENAME_EXCHANGE {exchanged:?}");
        std::fs::remove_dir(&b).unwrap();
        let prefix = a;
        let text = prefix.to_str().unwrap();
        let tare = |args: &[&str]| {
            let mut command = env.command(&[args, &["-p", text]].concat());
            env.ran(command.env("TARE_CACHE_DIR", folder.join("cache")).output().unwrap())
        };
        // Into a folder that is there and empty.
        tare(&[&["create", "p=1.0"][..], &from].concat()).ok();
        std::fs::write(prefix.join("mine"), "mine").unwrap();
        let before = std::fs::metadata(&prefix).unwrap().ino();
        tare(&[&["install", "q"][..], &from].concat()).ok();
        assert_ne!(std::fs::metadata(&prefix).unwrap().ino(), before, "{place}: exchanged");
        tare(&[&["install", "p=2.0"][..], &from].concat()).ok();
        tare(&["remove", "q"]).ok();
        let output = Command::new(prefix.join("bin/p")).output().unwrap();
        assert_eq!(String::from_utf8(output.stdout).unwrap().trim(), format!("2.0 {text}"), "{place}");
        assert_eq!(std::fs::read_to_string(prefix.join("mine")).unwrap(), "mine", "{place}");
        assert!(!prefix.join("share/q").exists(), "{place}");
        tare(&["verify"]).ok();
        tare(&[&["create", "--force", "p=1.0"][..], &from].concat()).ok().stderr_has("`mine`");
        assert!(!prefix.join("mine").exists());
        tare(&["remove", "--all"]).ok();
        let mut left: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        left.retain(|name| !matches!(name.as_str(), "cache" | "bound" | "probe"));
        assert_eq!(left, [""; 0], "{place}");
    }
}

/// An empty subvolume is a folder that rename(2) does not replace; a subvolume that holds an environment is exchanged like any folder.
#[test]
fn a_subvolume_may_be_the_environment() {
    let env = TestEnv::new();
    let channel = channel(&env);
    let url = channel.url();
    let from = ["--override-channels", "-c", &url];
    let Some(mount) = Mount::new(&env, "btrfs", 256) else { return };
    let subvolume = |name: &str| {
        let at = mount.0.join(name);
        assert!(succeeds(Command::new("btrfs").args(["subvolume", "create"]).arg(&at)), "btrfs-progs come with mkfs.btrfs");
        at
    };
    let empty = subvolume("empty");
    env.tare(&[&["create", "-p", empty.to_str().unwrap(), "p=1.0"][..], &from].concat()).ok();
    assert!(Command::new(empty.join("bin/p")).output().unwrap().status.success());
    // Not where somebody has put something.
    let full = subvolume("full");
    std::fs::write(full.join("mine"), "mine").unwrap();
    env.tare(&[&["create", "-p", full.to_str().unwrap(), "p=1.0"][..], &from].concat()).expect_code(1).stderr_has("other things in it");
    assert_eq!(tree(&full, &[]).len(), 1);
    std::fs::remove_file(full.join("mine")).unwrap();
    let copied = Command::new("cp").arg("-a").arg(empty.join(".")).arg(&full).status().unwrap();
    assert!(copied.success());
    let full = full.to_str().unwrap();
    env.tare(&["relocate", "-p", full]).ok();
    env.tare(&[&["install", "-p", full, "q"][..], &from].concat()).ok();
    env.tare(&["remove", "-p", full, "--all"]).ok();
    let left: Vec<_> = std::fs::read_dir(&mount.0).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    assert_eq!(left, ["empty"]);
}

/// In a container, an environment of an image's layer is a folder that the kernel refuses to rename (EXDEV).
#[test]
fn environments_of_a_lower_layer_are_changed_and_removed() {
    let env = TestEnv::new();
    let channel = channel(&env);
    let url = channel.url();
    let from = ["--override-channels", "-c", &url];
    // An overlay of its own file system: not every one can hold the upper layer.
    let base = env.path().join("layers");
    let Some(_base) = Mount::at(&base, &["-t", "tmpfs", "-o", "size=64m", "tmpfs"]) else { return };
    let (lower, upper, merged) = (base.join("lower"), base.join("upper"), env.path().join("merged"));
    let over = |folders: &str| -> Option<Mount> {
        for folder in [&lower, &upper, &base.join("work")] {
            std::fs::create_dir_all(folder).unwrap();
        }
        Mount::at(&merged, &["-t", "overlay", "-o", folders, "overlay"])
    };
    let folders = format!("lowerdir={},upperdir={},workdir={}", lower.display(), upper.display(), base.join("work").display());
    let names = ["changed", "updated", "replaced", "removed", "renamed", "killed"];
    {
        let Some(_image) = over(&folders) else { return };
        for name in names {
            env.tare(&[&["create", "-p", merged.join(name).to_str().unwrap(), "p=1.0"][..], &from].concat()).ok();
        }
        std::fs::create_dir(merged.join("empty")).unwrap();
    }
    // The image is finished: what was written is the lower layer of the next.
    let copied = Command::new("cp").arg("-a").arg(upper.join(".")).arg(&lower).status().unwrap();
    assert!(copied.success());
    std::fs::remove_dir_all(&upper).unwrap();
    std::fs::remove_dir_all(base.join("work")).unwrap();
    let Some(_container) = over(&folders) else { return };
    let renamed = std::fs::rename(merged.join("empty"), merged.join("other"));
    println!("renaming a folder of the lower layer: {renamed:?}");
    if renamed.is_ok() {
        std::fs::rename(merged.join("other"), merged.join("empty")).unwrap();
    }

    let at = |name: &str| merged.join(name).to_str().unwrap().to_owned();
    let says = |name: &str| String::from_utf8(Command::new(merged.join(name).join("bin/p")).output().unwrap().stdout).unwrap();
    std::fs::write(merged.join("changed/mine"), "mine").unwrap();
    env.tare(&[&["install", "-p", &at("changed"), "q"][..], &from].concat()).ok();
    assert!(merged.join("changed/share/q").exists() && says("changed") == format!("1.0 {}\n", at("changed")));
    assert_eq!(std::fs::read_to_string(merged.join("changed/mine")).unwrap(), "mine");
    env.tare(&["verify", "-p", &at("changed")]).ok();
    // It is of the upper layer now, and is exchanged as elsewhere.
    env.tare(&["remove", "-p", &at("changed"), "q"]).ok();
    env.tare(&[&["install", "-p", &at("updated"), "p=2.0"][..], &from].concat()).ok();
    assert_eq!(says("updated"), format!("2.0 {}\n", at("updated")));
    env.tare(&[&["create", "--force", "-p", &at("replaced"), "q"][..], &from].concat()).ok();
    assert!(!merged.join("replaced/bin").exists());
    env.tare(&["remove", "-p", &at("removed"), "--all"]).ok();
    env.tare(&["rename", "-p", &at("renamed"), &at("new")]).ok();
    assert!(!merged.join("renamed").exists() && says("new") == format!("1.0 {}\n", at("new")));
    env.tare(&[&["create", "-p", &at("empty"), "p=1.0"][..], &from].concat()).ok();
    // Killed at any moment: the old one, the new one, or neither for the moment; the next run finishes.
    let started = std::time::Instant::now();
    env.tare(&[&["install", "-p", &at("empty"), "q"][..], &from].concat()).ok();
    let whole = started.elapsed();
    for round in 0..6_u32 {
        let (args, done) = (["install", "-p", &at("killed"), "q"], merged.join("killed/share/q"));
        let mut child = env
            .command(&[&args[..], &from].concat())
            .stderr(std::process::Stdio::null())
            .stdout(std::process::Stdio::null())
            .spawn()
            .unwrap();
        std::thread::sleep(whole.mul_f64(0.5 + 0.1 * f64::from(round)));
        let _ = child.kill();
        child.wait().unwrap();
        env.tare(&[&args[..], &from].concat()).ok();
        assert!(done.exists() && says("killed") == format!("1.0 {}\n", at("killed")), "round {round}");
    }
    let mut left: Vec<_> = std::fs::read_dir(&merged).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    left.sort();
    assert_eq!(left, ["changed", "empty", "killed", "new", "replaced", "updated"]);
}

/// A cache on a file system that is mounted for reading only: used by the best way that leads out of it.
#[test]
fn a_cache_that_is_mounted_for_reading_only() {
    let env = TestEnv::new();
    let channel = channel(&env);
    let url = channel.url();
    let from = ["--override-channels", "-c", &url];
    let (places, _mounts) = places(&env);
    for (name, layer) in &places {
        let filled = env.path().join(format!("env-{name}"));
        let mut command = env.command(&[&["create", "-p", filled.to_str().unwrap(), "p=1.0"][..], &from].concat());
        env.ran(command.env("TARE_CACHE_DIR", layer.join("shared")).output().unwrap()).ok();
        std::fs::write(layer.join("shared/pkgs/probe"), vec![1; BIG]).unwrap();
        let locked = env.path().join(format!("read-only-{name}"));
        let packages = layer.join("shared/pkgs");
        let Some(_mount) = Mount::at(&locked, &["--bind", packages.to_str().unwrap()]) else { return };
        assert!(succeeds(Command::new("mount").args(["-o", "remount,bind,ro"]).arg(&locked)));
        assert!(std::fs::write(locked.join("x"), "").is_err());
        // Out of it to the same file system, to another one, and (on the whole matrix) to every one.
        let whole = std::env::var_os("TARE_TEST_LINK_MATRIX").is_some();
        for (place, folder) in places.iter().filter(|(place, _)| whole || place == name || place == "xfs" || place == "disk") {
            let expected = ["reflink", "hardlink", "copy"].into_iter().find(|kind| possible(&locked, folder, kind)).unwrap();
            let prefix = folder.join(format!("from-{name}"));
            let cache = env.path().join("own-cache");
            let _ = std::fs::remove_dir_all(&cache);
            std::fs::create_dir(&cache).unwrap();
            let mut command = env.command(&[&["create", "--json", "-p", prefix.to_str().unwrap(), "p=1.0"][..], &from].concat());
            let ran = env.ran(command.env("TARE_CACHE_DIR", &cache).env("CONDA_PKGS_DIRS", &locked).output().unwrap()).ok();
            assert_eq!(ran.json()["installed"]["link_modes"][0][1], expected, "{name} to {place}");
            assert!(cached(&cache.join("pkgs")).is_none(), "{name} to {place}: taken from the layer");
            let used = really(&prefix.join("share/data"), &cached(&locked).unwrap().join("share/data"), place);
            assert!(used == expected || (expected, used) == ("copy", "reflink"), "{name} to {place}: {used}");
            println!("read-only cache on {name}, environment on {place}: {used}");
            std::fs::remove_dir_all(&prefix).unwrap();
        }
    }
}

/// Packages of a cache that is only read are used from there, and nothing in it changes.
#[test]
fn a_cache_that_is_only_read_is_used_and_left_alone() {
    let env = TestEnv::new();
    let mut channel = Channel::new(env.path().join("channel"));
    channel.add(&Package::new("p", "1.0").file("share/data", "data"));
    let url = channel.url();
    let from = ["--override-channels", "-c", &url];
    env.tare(&[&["create", "-n", "first", "p"][..], &from].concat()).ok();
    let layer = env.path().join("layer");
    let packages = env.cache().join("pkgs");
    let source: &Path = if packages.is_dir() { &packages } else { &env.cache() };
    assert!(Command::new("cp").arg("-a").arg(source).arg(&layer).status().unwrap().success());
    let before = tree(&layer, &[]);
    std::fs::remove_dir_all(env.cache()).unwrap();
    std::fs::create_dir(env.cache()).unwrap();
    // The archive is gone: only the layer has the package.
    std::fs::remove_file(channel.root().join("linux-64/p-1.0-0.conda")).unwrap();
    let mut command = env.command(&[&["create", "-n", "second", "p"][..], &from].concat());
    env.ran(command.env("CONDA_PKGS_DIRS", &layer).output().unwrap()).ok();
    assert_eq!(std::fs::read_to_string(env.envs().join("second/share/data")).unwrap(), "data");
    assert_eq!(tree(&layer, &[]), before);
}
