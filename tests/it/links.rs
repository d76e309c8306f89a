//! How files get from the cache into an environment: every link mode, on one device and across two, from a cache that is only read.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::common::channel::{Channel, Package};
use crate::common::{TestEnv, tree};

/// A file system in a file, mounted for the time of a test.
struct Mount(PathBuf);

impl Mount {
    /// `None` after saying why, where the machine has no such file system or allows no mounts.
    fn new(env: &TestEnv, kind: &str, megabytes: u64) -> Option<Self> {
        let (image, at) = (env.path().join(format!("{kind}.img")), env.path().join(kind));
        let ok = |command: &mut Command| command.output().is_ok_and(|output| output.status.success());
        std::fs::File::create(&image).unwrap().set_len(megabytes << 20).unwrap();
        std::fs::create_dir(&at).unwrap();
        if !ok(Command::new(format!("mkfs.{kind}")).arg("-q").arg(&image)) {
            println!("skipped: no mkfs.{kind}");
            return None;
        }
        if !ok(Command::new("mount").args(["-o", "loop", "-t", kind]).arg(&image).arg(&at)) {
            println!("skipped: {kind} cannot be mounted here");
            return None;
        }
        Some(Mount(at))
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

#[test]
fn every_link_mode_on_one_device_and_across_two() {
    let env = TestEnv::new();
    let mut channel = Channel::new(env.path().join("channel"));
    let big = "data ".repeat(4000);
    channel.add(
        &Package::new("p", "1.0").file("share/data", &big).prefixed("bin/p", "#!/bin/sh\necho {PREFIX}\n").symlink("share/link", "data"),
    );
    let url = channel.url();
    let mut places: Vec<(String, PathBuf)> = vec![("disk".into(), env.path().join("disk"))];
    let memory = tempfile::Builder::new().prefix("tare-test-").tempdir_in("/dev/shm").ok();
    match &memory {
        Some(folder) => places.push(("tmpfs".into(), folder.path().to_owned())),
        None => println!("skipped: no tmpfs at /dev/shm"),
    }
    let mounts: Vec<Mount> = [("btrfs", 256), ("xfs", 512)].iter().filter_map(|(kind, size)| Mount::new(&env, kind, *size)).collect();
    places.extend(mounts.iter().map(|mount| (mount.0.file_name().unwrap().to_string_lossy().into_owned(), mount.0.clone())));
    let mut reference = None;
    for (cache_name, cache) in &places {
        for (place, folder) in &places {
            for mode in ["auto", "reflink", "hardlink", "copy", "symlink"] {
                let cache = cache.join("cache");
                let prefix = folder.join(format!("env-{cache_name}-{mode}"));
                std::fs::create_dir_all(&cache).unwrap();
                std::fs::create_dir_all(folder).unwrap();
                let mut command = env.command(&["create", "--override-channels", "-c", &url, "--link-mode", mode, "p", "-p"]);
                let ran = env.ran(command.arg(&prefix).env("TARE_CACHE_DIR", &cache).output().unwrap());
                let what = format!("{mode}, cache on {cache_name}, environment on {place}");
                // A mode that is asked for and cannot be is refused, and nothing is made.
                if ran.code != 0 && (mode == "reflink" || (mode == "hardlink" && cache_name != place)) {
                    assert!(ran.code == 1 && ran.stderr.contains("--link-mode auto") && !prefix.exists(), "{what}: {}", ran.stderr);
                    continue;
                }
                assert_eq!(ran.code, 0, "{what}: {}", ran.stderr);
                let data = prefix.join("share/data");
                let about = std::fs::symlink_metadata(&data).unwrap();
                assert_eq!(std::fs::read_to_string(&data).unwrap(), big, "{what}");
                match mode {
                    "hardlink" if cache_name == place => assert!(about.nlink() > 1, "{what}"),
                    "copy" => assert!(about.is_file() && about.nlink() == 1, "{what}"),
                    "reflink" => assert!(about.is_file(), "{what}"),
                    "symlink" => assert!(about.is_symlink() || about.is_file(), "{what}"),
                    _ => assert!(about.is_file(), "{what}"),
                }
                // The contents are the same whatever the way.
                let mut lines = tree(&prefix.join("share"), &["data"]);
                lines.push(std::fs::read_link(prefix.join("share/link")).unwrap().display().to_string());
                assert_eq!(*reference.get_or_insert_with(|| lines.clone()), lines, "{what}");
                let output = Command::new(prefix.join("bin/p")).output().unwrap();
                assert_eq!(String::from_utf8(output.stdout).unwrap().trim(), prefix.to_str().unwrap(), "{what}");
                std::fs::remove_dir_all(&prefix).unwrap();
            }
        }
    }
    println!("{} places: {:?}", places.len(), places.iter().map(|(name, _)| name).collect::<Vec<_>>());
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
