//! What an unfriendly world gives: secrets that must not show, full disks, paths that are no text, claims that are absurd.

use std::os::unix::ffi::OsStrExt;
use std::process::Stdio;

use serde_json::json;

use crate::common::channel::{Channel, Package};
use crate::common::server::{Fault, Guard, TestServer};
use crate::common::{Ran, TestEnv};
use crate::create::small_channel;

const TOKEN: &str = "t0ken-of-mine";
const PASSWORD: &str = "passw0rd-of-mine";
/// `user:passw0rd-of-mine`, as it goes over the wire.
const ENCODED: &str = "dXNlcjpwYXNzdzByZC1vZi1taW5l";

#[track_caller]
fn no_secrets(env: &TestEnv, ran: &Ran) {
    for secret in [TOKEN, PASSWORD, ENCODED] {
        for text in [&ran.stdout, &ran.stderr] {
            let line = text.lines().find(|line| line.contains(secret));
            assert_eq!(line, None);
        }
        let mut folders = vec![env.envs(), env.work(), env.cache(), env.home().join(".conda")];
        while let Some(folder) = folders.pop() {
            for entry in std::fs::read_dir(&folder).into_iter().flatten().flatten() {
                if entry.file_type().unwrap().is_dir() {
                    folders.push(entry.path());
                } else if let Ok(bytes) = std::fs::read(entry.path()) {
                    let found = bytes.windows(secret.len()).any(|part| part == secret.as_bytes());
                    assert!(!found, "{} holds a secret", entry.path().display());
                }
            }
        }
    }
}

#[test]
fn secrets_of_urls_are_in_no_output_log_or_file() {
    for guard in [Guard::Token(TOKEN.into()), Guard::Basic(ENCODED.into())] {
        let env = TestEnv::new().var("CONDA_REMOTE_MAX_RETRIES", "0");
        let channel = small_channel(&env);
        let server = TestServer::new();
        server.mount("/ch", channel.root());
        let url = match &guard {
            Guard::Token(_) => server.url(&format!("/t/{TOKEN}/ch")),
            _ => server.url("/ch").replace("://", &format!("://user:{PASSWORD}@")),
        };
        server.guard(guard);
        let attached = format!("-c{url}");
        let spec = format!("{url}::app");
        let logs = ["-vvv", "--log-file", "log.txt"];
        let create = |more: &[&str]| env.tare(&[&["create", "--override-channels", &attached], more, &logs].concat());
        for (more, code) in [
            (&["-n", "a", "app"][..], 0),
            (&["-n", "b", &spec], 0),
            (&["-n", "c", "absent"], 3),
            (&["-n", "d", "app", "--cuda", &url], 2),
            (&["-n", "d", "app", "--gpu", &url], 2),
            (&["-n", "d", "app", "--json", "--gpu", &url], 2),
            (&["-n", "d", "--json", &format!("{url}::app[x")], 2),
            (&["-n", "d", "-f", &format!("{url}/absent.yml")], 7),
        ] {
            no_secrets(&env, &create(more).expect_code(code));
        }
        // The channel of a spec is the channel without its secret.
        let record = std::fs::read_to_string(env.envs().join("b/conda-meta/app-1.0-0.json")).unwrap();
        assert!(record.contains(&server.url("/ch")), "{record}");
        std::fs::write(env.home().join(".condarc"), format!("channels: ['{url}']\n")).unwrap();
        for args in
            [&["info"][..], &["info", "--json"], &["config"], &["list", "-n", "b", "--explicit"], &["list", "-n", "b", "--revisions"]]
        {
            no_secrets(&env, &env.tare(args).ok());
        }
    }
}

#[test]
fn output_that_cannot_be_written_is_a_failure() {
    let env = TestEnv::new();
    let channel = small_channel(&env);
    env.tare(&["create", "-n", "a", "--override-channels", "-c", &channel.url(), "app"]).ok();
    for args in [&["list", "-n", "a", "--explicit"][..], &["list", "-n", "a", "--json"], &["--help"], &["completions", "bash"]] {
        let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
        let output = env.command(args).stdout(full).stderr(Stdio::piped()).output().unwrap();
        env.ran(output).expect_code(1).stderr_has("cannot write to standard output");
        // Nobody reads: that is not ours to judge.
        let mut child = env.command(args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        drop(child.stdout.take());
        env.ran(child.wait_with_output().unwrap()).ok();
    }
}

#[test]
fn arguments_that_are_no_text_are_refused() {
    let env = TestEnv::new();
    let channel = small_channel(&env);
    let odd = std::ffi::OsStr::from_bytes(b"odd-\xff");
    for option in ["-p", "-n", "-f", "-c", "--root", "--log-file"] {
        let mut command = env.command(&["create", "--override-channels", "-c", &channel.url(), "app"]);
        let ran = env.ran(command.arg(option).arg(odd).output().unwrap());
        assert!(!ran.stderr.contains("panicked") && ran.code == 2, "{option}: {} {}", ran.code, ran.stderr);
    }
}

#[test]
fn absurd_sizes_are_no_panic() {
    let env = TestEnv::new();
    let mut channel = small_channel(&env);
    for name in ["app-1.0-0.conda", "lib-1.0-0.conda"] {
        channel.edit("linux-64", name, |record| record["size"] = json!(u64::MAX));
    }
    let args = ["create", "-n", "x", "--override-channels", "-c", &channel.url(), "app", "lib=1"];
    env.tare(&args).expect_code(1).stderr_has("not enough space");
    env.tare(&[&args[..], &["--dry-run"]].concat()).ok();
    let planned = env.tare(&[&args[..], &["--dry-run", "--json"]].concat()).ok().json();
    assert_eq!(planned["success"], json!(true));
}

#[test]
fn a_link_script_that_fails_fails_the_command() {
    let env = TestEnv::new();
    let mut channel = Channel::new(env.path().join("channel"));
    channel.add(&Package::new("scripted", "1.0").file("bin/.scripted-post-link.sh", "echo no such luck >&2; exit 3\n"));
    let args = ["create", "-n", "x", "--override-channels", "-c", &channel.url(), "scripted"];
    let failed = env.tare(&[&args[..], &["--allow-link-script", "scripted"]].concat());
    failed.expect_code(1).stderr_has("no such luck").stderr_has("the environment is complete apart from that");
    // It is there, and known.
    env.tare(&["list", "-n", "x"]).ok().stdout_has("scripted");
    assert!(std::fs::read_to_string(env.home().join(".conda/environments.txt")).unwrap().contains("/envs/x"));
    // The hint names the option that there is.
    let skipped = ["create", "-n", "y", "--override-channels", "-c", &channel.url(), "scripted"];
    env.tare(&skipped).ok().stderr_has("--allow-link-script NAME");
}

#[test]
fn a_download_that_always_breaks_off_is_of_the_network() {
    let env = TestEnv::new().var("CONDA_REMOTE_MAX_RETRIES", "0");
    let channel = small_channel(&env);
    let server = TestServer::new();
    server.mount("/ch", channel.root());
    server.fault("/ch/linux-64/app-", Fault::Truncate { after: 60, times: 1000 });
    let args = ["create", "-n", "x", "--override-channels", "-c", &server.url("/ch"), "app"];
    env.tare(&args).expect_code(7).stderr_has("cannot fetch app 1.0 0");
    assert!(!env.envs().join("x").exists());
    server.heal();
    env.tare(&args).ok();
}

#[test]
fn certificates_that_are_none_are_an_error_of_the_setting() {
    let env = TestEnv::new();
    let channel = small_channel(&env);
    for text in ["", "junk", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", "-----BEGIN CERTIFICATE-----\nAA"] {
        let file = env.write("ca.pem", text);
        std::fs::write(env.home().join(".condarc"), format!("ssl_verify: {}\n", file.display())).unwrap();
        let args = ["create", "-n", "x", "--override-channels", "-c", &channel.url(), "app"];
        env.tare(&args).expect_code(2).stderr_has("ca.pem").stderr_has("hint: ");
    }
}

#[test]
fn a_name_is_no_suggestion_for_itself() {
    let env = TestEnv::new();
    let mut channel = small_channel(&env);
    channel.edit("linux-64", "compute-1.0-cuda126_0.conda", |record| record["depends"] = json!(["a[version=<]"]));
    let ran = env.tare(&["create", "-n", "x", "--override-channels", "-c", &channel.url(), "compute"]).expect_code(3);
    assert!(!ran.stderr.contains("did you mean `compute`"), "{}", ran.stderr);
    ran.stderr_has("is left out");
}

#[test]
fn ctrl_c_ends_a_command_that_waits_for_its_input() {
    let env = TestEnv::new();
    let channel = small_channel(&env);
    for _ in 0..4 {
        let mut command = env.command(&["create", "-n", "x", "--override-channels", "-c", &channel.url(), "-f", "-"]);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let silent = child.stdin.take();
        std::thread::sleep(std::time::Duration::from_millis(700));
        let pid = rustix::process::Pid::from_raw(child.id() as i32).unwrap();
        rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
        let started = std::time::Instant::now();
        while child.try_wait().unwrap().is_none() {
            if started.elapsed().as_secs() > 10 {
                child.kill().unwrap();
                panic!("it goes on");
            }
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
        env.ran(child.wait_with_output().unwrap()).expect_code(130);
        drop(silent);
    }
}
