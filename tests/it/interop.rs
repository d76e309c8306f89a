//! Other tools over tare. They run where they are installed: `TARE_TEST_CONDA_LOCK` or `conda-lock` on PATH; `TARE_TEST_PY_RATTLER`, a Python that has
//! py-rattler; `TARE_TEST_UV` or `uv` on PATH.

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

/// A tool by its variable, else on PATH; says so where there is none.
fn tool(variable: &str, name: &str) -> Option<PathBuf> {
    let named = std::env::var_os(variable).map(PathBuf::from);
    let found = named
        .or_else(|| std::env::split_paths(&std::env::var_os("PATH")?).map(|folder| folder.join(name)).find(|path| path.is_file()))
        .filter(|path| !path.to_string_lossy().contains("shims"));
    if found.is_none() {
        println!("skipped: no {name} ({variable})");
    }
    found
}

/// A lock with both halves: a conda package, wheels of a folder, a repository at a commit, and what only tare notes.
fn both_halves(env: &TestEnv) {
    let wheels = env.work().join("wheels");
    crate::pip_locks::wheel(&wheels, "alpha", "1.0", &["beta>=1"]);
    crate::pip_locks::wheel(&wheels, "beta", "2.0", &[]);
    let hash = |name: &str| crate::common::channel::hex(&<sha2::Sha256 as sha2::Digest>::digest(std::fs::read(wheels.join(name)).unwrap()));
    let package = |name: &str, file: &str, version: &str, requires: &str| {
        format!(
            "- pypi: file://{}\n  name: {name}\n  version: '{version}'\n  sha256: {}\n{requires}",
            wheels.join(file).display(),
            hash(file)
        )
    };
    let (alpha, beta) = ("alpha-1.0-py3-none-any.whl", "beta-2.0-py3-none-any.whl");
    let listed: String = [alpha, beta].map(|file| format!("      - pypi: file://{}\n", wheels.join(file).display())).concat();
    let conda = "https://conda.anaconda.org/conda-forge/linux-64/python-3.11.9-h_0.conda";
    env.write(
        "hand.lock",
        format!(
            "version: 7\nplatforms:\n- name: linux-64\nenvironments:\n  default:\n    channels:\n    - url: https://conda.anaconda.org/conda-forge/\n    indexes:\n    - https://pypi.example/simple\n    packages:\n      linux-64:\n      - conda: {conda}\n{listed}packages:\n- conda: {conda}\n  sha256: {}\n  md5: {}\n  depends: []\n{}{}tare:\n  schema: 1\n  name: demo\n  platforms:\n    linux-64:\n      pypi-requested:\n        alpha: []\n",
            "ab".repeat(32),
            "cd".repeat(16),
            package("alpha", alpha, "1.0", "  requires_dist:\n  - beta>=1\n"),
            package("beta", beta, "2.0", ""),
        ),
    );
    for (format, file) in [("tare", "tare.lock"), ("pixi", "pixi.lock"), ("pylock", "pylock.toml"), ("pip", "requirements.txt")] {
        env.tare(&["convert", "hand.lock", "--to", format, "-o", file]).ok();
    }
}

#[test]
fn py_rattler_reads_our_locks() {
    let Some(python) = tool("TARE_TEST_PY_RATTLER", "python-with-rattler") else { return };
    let env = TestEnv::new();
    both_halves(&env);
    assert!(std::fs::read_to_string(env.work().join("tare.lock")).unwrap().contains("\ntare:\n"));
    let script = "import sys\nfrom rattler.lock import LockFile\nfor _, env in LockFile.from_path(sys.argv[1]).environments():\n for platform in env.platforms():\n  for p in env.packages(platform): print(p.name, p.version if 'Pypi' in type(p).__name__ else p.package_record.version, p.hashes.sha256.hex() if p.hashes else '')\n";
    let read = |file: &str| {
        let out = Command::new(&python).args(["-c", script, file]).current_dir(env.work()).output().unwrap();
        assert!(out.status.success(), "{file}: {}", String::from_utf8_lossy(&out.stderr));
        String::from_utf8(out.stdout).unwrap()
    };
    let ours = read("tare.lock");
    assert_eq!(ours, read("pixi.lock"));
    let lines: Vec<&str> = ours.lines().collect();
    assert_eq!(lines.len(), 3, "{ours}");
    assert!(
        lines[0].starts_with(&format!("python 3.11.9 {}", "ab".repeat(32)))
            && lines[1].starts_with("alpha 1.0 ")
            && lines[2].starts_with("beta 2.0 "),
        "{ours}"
    );
}

#[test]
fn uv_installs_our_pylock_and_requirements() {
    let Some(uv) = tool("TARE_TEST_UV", "uv") else { return };
    let env = TestEnv::new();
    both_halves(&env);
    for file in ["pylock.toml", "requirements.txt"] {
        let target = env.work().join(format!("into-{file}"));
        let out = Command::new(&uv)
            .args(["--offline", "pip", "install", "--no-cache", "--no-index", "--find-links", "wheels", "--no-deps", "--target"])
            .arg(&target)
            .args(["-r", file])
            .current_dir(env.work())
            .output()
            .unwrap();
        assert!(out.status.success(), "{file}: {}", String::from_utf8_lossy(&out.stderr));
        assert!(target.join("alpha/__init__.py").exists() && target.join("beta-2.0.dist-info/METADATA").exists(), "{file}");
    }
}
