//! Networks that fail, caches that vanish and many processes at once, during changes: a clear error or a recovery, nothing half done.

use std::process::Stdio;
use std::time::{Duration, Instant};

use crate::common::channel::{Channel, Package};
use crate::common::server::{Fault, TestServer};
use crate::common::{TestEnv, tree};

/// Two versions of a library, and packages on top of it.
fn channel(env: &TestEnv) -> Channel {
    let mut channel = Channel::new(env.path().join("channel"));
    for version in ["1.0", "2.0"] {
        let mut lib = Package::new("lib", version);
        for nth in 0..40 {
            lib = lib.file(&format!("share/lib/{nth}"), format!("{nth} {version}").repeat(50));
        }
        channel.add(&lib);
    }
    for nth in 0..4 {
        channel.add(&Package::new(&format!("top{nth}"), "1.0").depends(&["lib"]).file(&format!("share/top{nth}"), "top".repeat(500)));
    }
    channel
}

fn empty_cache(env: &TestEnv) {
    std::fs::remove_dir_all(env.cache()).unwrap();
    std::fs::create_dir(env.cache()).unwrap();
}

fn leftovers(env: &TestEnv) -> Vec<String> {
    let names = std::fs::read_dir(env.envs()).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    names.filter(|name| name.starts_with('.') && !name.ends_with(".lock")).collect()
}

#[test]
fn a_network_that_fails_during_a_change_leaves_the_old_environment() {
    let env = TestEnv::new().var("CONDA_REMOTE_MAX_RETRIES", "1");
    let mut channel = channel(&env);
    let server = TestServer::new();
    server.mount("/ch", channel.root());
    let url = server.url("/ch");
    let from = ["--override-channels", "-c", &url];
    env.tare(&[&["create", "-n", "e", "lib=1.0"][..], &from].concat()).ok();
    let prefix = env.envs().join("e");
    let before = tree(&prefix, &[]);
    let install = [&["install", "-n", "e", "top0"][..], &from].concat();
    let update = [&["update", "-n", "e", "lib=2.0"][..], &from].concat();
    let replace = [&["create", "-n", "e", "--force", "lib=2.0"][..], &from].concat();
    let storm = || Fault::Status { code: 503, times: 10_000, headers: vec![] };
    for args in [&install, &update, &replace] {
        for (path, fault) in [
            ("/ch/linux-64/", storm()),
            ("/ch/linux-64/top0-", storm()),
            ("/ch/linux-64/lib-2", storm()),
            ("/ch/linux-64/top0-", Fault::Truncate { after: 100, times: 10_000 }),
            ("/ch/linux-64/lib-2", Fault::Truncate { after: 100, times: 10_000 }),
            ("/ch/linux-64/lib-2", Fault::Hangup { times: 10_000 }),
            ("/ch/linux-64/top0-", Fault::Hangup { times: 10_000 }),
        ] {
            let concerned = path.ends_with('/') || path.contains(if args[0] == "install" { "top0" } else { "lib-2" });
            if !concerned {
                continue;
            }
            empty_cache(&env);
            server.fault(path, fault.clone());
            let ran = env.tare(args);
            assert_eq!(ran.code, 7, "{} {path} {fault:?}: {}", args[0], ran.stderr);
            assert!(ran.stderr.contains("error: "), "{}", ran.stderr);
            assert_eq!(tree(&prefix, &[]), before, "{} {path} {fault:?}", args[0]);
            assert_eq!(leftovers(&env), [""; 0]);
            server.heal();
        }
    }
    // A storm that ends while there are tries left is none; `remove` needs no network.
    empty_cache(&env);
    server.fault("/ch/linux-64/top0-", Fault::Status { code: 503, times: 1, headers: vec![] });
    env.tare(&install).ok();
    server.fault("/", storm());
    env.tare(&["remove", "-n", "e", "top0"]).ok();
    server.heal();
    // A wrong hash is no matter of the network.
    let now = tree(&prefix, &[]);
    for (archive, args) in [
        ("top1-1.0-0.conda", &["install", "-n", "e", "top1"][..]),
        ("lib-2.0-0.conda", &["update", "-n", "e", "lib=2.0"]),
        ("lib-2.0-0.conda", &["create", "-n", "e", "--force", "lib=2.0"]),
    ] {
        channel.edit("linux-64", archive, |record| record["sha256"] = serde_json::json!("00".repeat(32)));
        empty_cache(&env);
        let ran = env.tare(&[args, &from].concat());
        assert_eq!(ran.code, 5, "{args:?}: {}", ran.stderr);
        assert!(ran.stderr.contains(archive.split('-').next().unwrap()), "{args:?}: {}", ran.stderr);
        assert_eq!(tree(&prefix, &[]), now, "{args:?}");
        assert_eq!(leftovers(&env), [""; 0], "{args:?}");
    }
}

#[test]
fn a_cache_that_vanishes_under_a_change_is_an_error_or_no_matter() {
    let env = TestEnv::new();
    let channel = channel(&env);
    let url = channel.url();
    let from = ["--override-channels", "-c", &url];
    env.tare(&[&["create", "-n", "e", "lib=1.0"][..], &from].concat()).ok();
    let prefix = env.envs().join("e");
    let count = |name: &str| std::fs::read_dir(prefix.join(name)).map_or(0, Iterator::count);
    // `update` too: between two versions, and the environment is wholly of one of them.
    let text = |nth: usize| std::fs::read_to_string(prefix.join(format!("share/lib/{nth}"))).unwrap();
    for round in 0..6_u64 {
        let wanted = if round % 2 == 0 { "lib=2.0" } else { "lib=1.0" };
        let args = [&["update", "-n", "e", wanted][..], &from].concat();
        let child = env.command(&args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        std::thread::sleep(Duration::from_millis(20 + 40 * round));
        let _ = std::fs::remove_dir_all(env.cache());
        let _ = std::fs::create_dir(env.cache());
        let ran = env.ran(child.wait_with_output().unwrap());
        assert!(!ran.stderr.contains("panicked") && matches!(ran.code, 0 | 1 | 5 | 7), "{}: {}", ran.code, ran.stderr);
        let version = if text(0).starts_with("0 1.0") { "1.0" } else { "2.0" };
        assert!(count("share/lib") == 40 && (0..40).all(|nth| text(nth).starts_with(&format!("{nth} {version}"))), "round {round}");
        assert!(ran.code != 0 || wanted.ends_with(version), "round {round}");
        env.tare(&args).ok();
        assert!(text(7).starts_with(&format!("7 {}", &wanted[4..])), "round {round}");
        assert_eq!(leftovers(&env), [""; 0]);
    }
    for round in 0..6_u64 {
        let args: Vec<&str> =
            if round % 2 == 0 { vec!["install", "-n", "e", "top0", "top1"] } else { vec!["remove", "-n", "e", "top0", "top1"] };
        let args = if round % 2 == 0 { [&args[..], &from].concat() } else { args };
        let child = env.command(&args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        std::thread::sleep(Duration::from_millis(20 + 40 * round));
        let _ = std::fs::remove_dir_all(env.cache());
        let _ = std::fs::create_dir(env.cache());
        let ran = env.ran(child.wait_with_output().unwrap());
        assert!(!ran.stderr.contains("panicked") && matches!(ran.code, 0 | 1 | 5 | 7), "{}: {}", ran.code, ran.stderr);
        let whole = (count("share/lib") == 40) && matches!(count("share"), 1 | 3);
        assert!(whole, "round {round}: {:?}", tree(&prefix, &[]));
        if ran.code != 0 {
            env.tare(&args).ok();
        }
        assert_eq!(count("share"), if round % 2 == 0 { 3 } else { 1 });
        assert_eq!(leftovers(&env), [""; 0]);
    }
}

/// Eight processes change the same and different environments. `TARE_TEST_SOAK_SECONDS` makes it longer.
#[test]
fn eight_processes_change_the_same_and_different_environments() {
    let seconds = std::env::var("TARE_TEST_SOAK_SECONDS").ok().and_then(|text| text.parse().ok()).unwrap_or(4);
    let env = TestEnv::new();
    let channel = channel(&env);
    let url = channel.url();
    let from = ["--override-channels", "-c", &url];
    for name in ["a", "b"] {
        env.tare(&[&["create", "-n", name, "lib=1.0"][..], &from].concat()).ok();
    }
    let end = Instant::now() + Duration::from_secs(seconds);
    let done = std::sync::atomic::AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for worker in 0..8_usize {
            let (env, from, done) = (&env, &from, &done);
            scope.spawn(move || {
                let own = format!("own{worker}");
                let name = if worker < 6 { ["a", "b"][worker % 2] } else { own.as_str() };
                let top = format!("top{}", worker % 4);
                if worker >= 6 {
                    env.tare(&[&["create", "-n", name, "lib=1.0"][..], from].concat()).ok();
                }
                let mut round = 0;
                while Instant::now() < end {
                    let install = [&["install", "-n", name, &top][..], from].concat();
                    let update = [&["install", "-n", name, ["lib=1.0", "lib=2.0"][round / 4 % 2]][..], from].concat();
                    let args: &[&str] = match round % 4 {
                        0 => &install,
                        1 => &["list", "-n", name],
                        2 => &update,
                        _ => &["remove", "-n", name, &top, "--no-prune"],
                    };
                    let ran = env.tare(args);
                    // Another one may have removed the package in the meantime; that is said.
                    let gone = args[0] == "remove" && ran.code == 1 && ran.stderr.contains(&top);
                    assert!(ran.code == 0 || gone, "{args:?}: {}", ran.stderr);
                    done.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
                    round += 1;
                }
            });
        }
    });
    for name in ["a", "b", "own6", "own7"] {
        env.tare(&["verify", "-n", name]).ok();
        let files = std::fs::read_dir(env.envs().join(name).join("share/lib")).unwrap().count();
        assert_eq!(files, 40, "{name}");
    }
    assert_eq!(leftovers(&env), [""; 0]);
    println!("{} commands by 8 processes in {seconds} s", done.load(std::sync::atomic::Ordering::SeqCst));
}

/// What the other tests leave out: everything written out before the rename.
#[test]
fn a_change_that_is_written_out_is_the_same() {
    let env = TestEnv::new().var("TARE_NO_SYNC", "0");
    let channel = channel(&env);
    let url = channel.url();
    let from = ["--override-channels", "-c", &url];
    env.tare(&[&["create", "-n", "e", "lib=1.0"][..], &from].concat()).ok();
    env.tare(&[&["install", "-n", "e", "top0"][..], &from].concat()).ok();
    assert_eq!(std::fs::read_to_string(env.envs().join("e/share/top0")).unwrap(), "top".repeat(500));
}
