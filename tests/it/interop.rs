//! Other tools over tare. They run where they are installed: `TARE_TEST_CONDA_LOCK` or `conda-lock` on PATH.

use std::path::PathBuf;
use std::process::Command;

use serde_json::json;

use crate::common::TestEnv;
use crate::common::channel::Package;
use crate::create::small_channel;

fn conda_lock() -> Option<PathBuf> {
    let named = std::env::var_os("TARE_TEST_CONDA_LOCK").map(PathBuf::from);
    let found = named
        .or_else(|| std::env::split_paths(&std::env::var_os("PATH")?).map(|folder| folder.join("conda-lock")).find(|path| path.is_file()));
    if found.is_none() {
        println!("skipped: no conda-lock (pip install conda-lock, or TARE_TEST_CONDA_LOCK)");
    }
    found
}

/// conda-lock locks with tare as its conda, with and without CUDA, updates one package of a lock, and installs it.
#[test]
fn conda_lock_drives_tare() {
    let Some(conda_lock) = conda_lock() else { return };
    let env = TestEnv::new();
    let mut channel = small_channel(&env);
    channel.add(&Package::new("pytorch", "2.7.1").build("cuda126_0").depends(&["__cuda >=12"]).key("build_number", json!(300)));
    channel.add(&Package::new("pytorch", "2.7.1").build("cpu_0"));
    env.write(
        "environment.yml",
        format!("name: demo\nchannels:\n  - {}\ndependencies:\n  - app\n  - pytorch\nplatforms: [linux-64]\n", channel.url()),
    );
    let run = |args: &[&str]| {
        let mut command = Command::new(&conda_lock);
        command.args(args).args(["--conda", env!("CARGO_BIN_EXE_tare")]).env_clear().current_dir(env.work());
        for (name, value) in env.command(&[]).get_envs() {
            if let Some(value) = value {
                command.env(name, value);
            }
        }
        let ran = env.ran(command.output().unwrap());
        assert_eq!(ran.code, 0, "{args:?}\n{}\n{}", ran.stdout, ran.stderr);
    };
    let lock = |name: &str| std::fs::read_to_string(env.work().join(name)).unwrap();
    run(&["lock", "-f", "environment.yml", "--lockfile", "cuda.yml", "--with-cuda", "12.6"]);
    assert!(lock("cuda.yml").contains("pytorch-2.7.1-cuda126_0.conda"));
    run(&["lock", "-f", "environment.yml", "--lockfile", "cpu.yml", "--without-cuda"]);
    assert!(lock("cpu.yml").contains("pytorch-2.7.1-cpu_0.conda"));
    assert!(lock("cpu.yml").contains("app-1.0-0.conda") && lock("cpu.yml").contains("lib-2.0-0.tar.bz2"));

    // Only what was named moves.
    channel.add(&Package::new("app", "1.1").depends(&["lib >=1"]).prefixed("bin/app", "#!/bin/sh\necho new {PREFIX}\n"));
    channel.add(&Package::new("lib", "3.0").file("lib/lib.txt", "three"));
    run(&["lock", "-f", "environment.yml", "--lockfile", "cpu.yml", "--without-cuda", "--update", "app"]);
    assert!(lock("cpu.yml").contains("app-1.1-0.conda") && lock("cpu.yml").contains("lib-2.0-0.tar.bz2"), "{}", lock("cpu.yml"));

    let prefix = env.envs().join("locked");
    run(&["install", "--prefix", prefix.to_str().unwrap(), "cpu.yml"]);
    env.tare(&["run", "-n", "locked", "app"]).ok().stdout_has("new [ENVS]/locked");
    assert_eq!(std::fs::read_to_string(prefix.join("lib/lib.txt")).unwrap(), "two");
}
