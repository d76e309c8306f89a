//! Other tools over tare. They run where they are installed: `TARE_TEST_CONDA_LOCK` or `conda-lock` on PATH; `TARE_TEST_PY_RATTLER`, a Python that has
//! py-rattler; `TARE_TEST_UV` or `uv` on PATH; `TARE_TEST_PIP`, a Python with pip (one that reads pylock.toml reads ours), else the Python of the tests.

use std::path::PathBuf;
use std::process::Command;

use serde_json::json;

use crate::common::TestEnv;
use crate::common::channel::{Channel, Package, hex};
use crate::common::server::TestServer;
use crate::common::wheel::Wheel;
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

/// An index on loopback with what a lock has: `alpha` that needs `beta`, and `direct`, named by its URL. The names, versions and hashes.
fn index(server: &TestServer) -> Vec<(String, String, String)> {
    let wheels = [
        Wheel::new("alpha", "1.0").file("alpha.py", "").header("Requires-Dist: beta>=1"),
        Wheel::new("beta", "2.0").file("beta.py", ""),
        Wheel::new("direct", "1.0").file("direct.py", ""),
    ];
    // A newer one, which nobody may choose.
    let newer = Wheel::new("beta", "3.0").file("beta.py", "newer");
    let hash = |wheel: &Wheel| hex(&<sha2::Sha256 as sha2::Digest>::digest(wheel.build()));
    for wheel in wheels.iter().chain([&newer]) {
        server.put(&format!("/files/{}", wheel.file_name()), wheel.build());
    }
    for name in ["alpha", "beta"] {
        let links: String = wheels
            .iter()
            .chain([&newer])
            .filter(|wheel| wheel.name == name)
            .map(|wheel| format!("<a href=\"/files/{0}#sha256={1}\">{0}</a>\n", wheel.file_name(), hash(wheel)))
            .collect();
        server.put(&format!("/simple/{name}/"), format!("<!DOCTYPE html><html><body>\n{links}</body></html>"));
    }
    wheels.iter().map(|wheel| (wheel.name.clone(), wheel.version.clone(), hash(wheel))).collect()
}

/// The exports for pip and uv of a lock and of the environment made from it: `lock-requirements.txt`, `env-pylock.toml`, ….
fn exports(env: &TestEnv, server: &TestServer, packages: &[(String, String, String)]) -> Vec<String> {
    let mut channel = Channel::new(env.path().join("channel"));
    let python = channel.add(&crate::wheels::python("3.11.4"));
    let wheels = packages
        .iter()
        .map(|(name, version, sha256)| {
            let wheel = Wheel::new(name, version);
            let mut ready = crate::wheels::ready(env, &wheel, name != "beta");
            let direct = name == "direct";
            ready.record.requires_dist = if name == "alpha" { vec!["beta>=1".to_owned()] } else { Vec::new() };
            ready.record.source = tare::pypi::PypiSource::Archive {
                url: server.url(&format!("/files/{}", wheel.file_name())).parse().unwrap(),
                sha256: Some(sha256.clone()),
                size: None,
                index: (!direct).then(|| server.url("/simple/").parse().unwrap()),
                direct,
                subdirectory: None,
            };
            ready
        })
        .collect();
    crate::wheels::make(env, "e", &[python], wheels);
    env.tare(&["export", "-n", "e", "--format", "tare", "-o", "tare.lock"]).ok();
    let mut files = Vec::new();
    for (format, file) in [("pip", "requirements.txt"), ("pylock", "pylock.toml")] {
        // A name as the specification has it: `pylock.NAME.toml`.
        let named = |source: &str| if format == "pip" { format!("{source}-{file}") } else { format!("pylock.{source}.toml") };
        let (of_env, of_lock) = (named("env"), named("lock"));
        env.tare(&["export", "-n", "e", "--format", format, "-o", &of_env]).ok();
        env.tare(&["convert", "tare.lock", "--to", format, "-o", &of_lock]).ok();
        files.extend([of_env, of_lock]);
    }
    files
}

#[test]
fn uv_syncs_and_compiles_what_we_export() {
    let Some(uv) = tool("TARE_TEST_UV", "uv") else { return };
    let (env, server) = (TestEnv::new(), TestServer::new());
    let packages = index(&server);
    let run = |args: &[&str]| {
        let mut command = env.other(uv.to_str().unwrap());
        command.args(args).env("UV_CACHE_DIR", env.path().join("uv")).env("UV_NO_CONFIG", "1").env("UV_PYTHON_DOWNLOADS", "never");
        let ran = env.ran(command.output().unwrap());
        assert_eq!(ran.code, 0, "{args:?}\n{}\n{}", ran.stdout, ran.stderr);
        ran
    };
    let simple = server.url("/simple/");
    for file in exports(&env, &server, &packages) {
        let target = env.work().join(format!("into-{file}"));
        let target = target.to_str().unwrap();
        let planned = run(&["pip", "sync", "--dry-run", "--index-url", &simple, "--target", target, &file]).stderr;
        for (name, version, _) in &packages {
            // What is named by its URL is shown with it.
            let shown = format!(" + {name}=={version}");
            assert!(planned.contains(&shown) || (name == "direct" && planned.contains(" + direct @ http://")), "{file}\n{planned}");
        }
        assert_eq!(planned.matches("\n + ").count(), 3, "{file}\n{planned}");
        run(&["pip", "sync", "--index-url", &simple, "--target", target, &file]);
        for (name, version, _) in &packages {
            assert!(std::path::Path::new(target).join(format!("{name}-{version}.dist-info/METADATA")).is_file(), "{file}");
        }
        if !file.ends_with(".txt") {
            continue;
        }
        let compiled = run(&["pip", "compile", "--no-header", "--no-annotate", "--generate-hashes", "--index-url", &simple, &file]).stdout;
        let one_line = compiled.replace(" \\\n    ", " ");
        for (name, version, sha256) in &packages {
            let line =
                one_line.lines().find(|line| line.starts_with(&format!("{name} ")) || line.starts_with(&format!("{name}=="))).unwrap();
            assert!(line.contains(sha256) && (line.contains(version) || name == "direct"), "{compiled}");
        }
        assert_eq!(one_line.lines().filter(|line| !line.is_empty()).count(), 3, "{compiled}");
        // And back: what uv locks of it is what we read.
        let back = format!("pylock.{}.toml", file.trim_end_matches(".txt").replace(['.', '-'], ""));
        run(&["pip", "compile", "--format", "pylock.toml", "--index-url", &simple, &file, "-o", &back]);
        let again = env.tare(&["convert", &back, "--to", "pip"]).ok().stdout;
        for (name, _, sha256) in &packages {
            assert!(again.lines().any(|line| line.starts_with(name.as_str()) && line.contains(sha256)), "{again}");
        }
    }
}

#[test]
fn pip_reads_what_we_export() {
    let python =
        ["TARE_TEST_PIP", "TARE_HOST_PYTHON"].iter().find_map(std::env::var_os).map_or_else(|| PathBuf::from("python3"), PathBuf::from);
    let (env, server) = (TestEnv::new(), TestServer::new());
    let pip = |args: &[&str]| {
        let mut command = Command::new(&python);
        command.args(["-m", "pip", "--isolated", "--disable-pip-version-check", "--no-cache-dir"]).args(args).current_dir(env.work());
        command.env("NO_PROXY", "127.0.0.1").env_remove("PIP_INDEX_URL").env_remove("PIP_REQUIRE_VIRTUALENV");
        env.ran(command.output().unwrap())
    };
    let version = pip(&["--version"]).stdout;
    let Some(major) =
        version.strip_prefix("pip ").and_then(|rest| rest.split('.').next()?.parse::<u32>().ok()).filter(|major| *major >= 23)
    else {
        println!("skipped: no pip 23 or newer (TARE_TEST_PIP)");
        return;
    };
    let packages = index(&server);
    let simple = server.url("/simple/");
    for file in exports(&env, &server, &packages) {
        // What `pip lock` and others write; pip itself reads it from version 26 on.
        if file.ends_with(".toml") && major < 26 {
            println!("skipped: pip {major} does not read pylock.toml ({file})");
            continue;
        }
        let target = format!("into-{file}");
        for more in [&["--require-hashes"][..], &["--no-deps"]] {
            if file.ends_with(".toml") && more == ["--require-hashes"] {
                continue;
            }
            let ran = pip(&[
                &["install", "--dry-run", "--quiet", "--report", "-", "--target", &target, "--index-url", &simple][..],
                more,
                &["-r", &file],
            ]
            .concat());
            assert_eq!(ran.code, 0, "{file} {more:?}\n{}\n{}", ran.stdout, ran.stderr);
            let report: serde_json::Value = serde_json::from_str(&ran.stdout).unwrap_or_else(|error| panic!("{error}\n{}", ran.stdout));
            let mut found: Vec<(String, String, String)> = report["install"]
                .as_array()
                .unwrap()
                .iter()
                .map(|item| {
                    let text = |value: &serde_json::Value| value.as_str().unwrap_or_default().to_owned();
                    let hash = &item["download_info"]["archive_info"]["hashes"]["sha256"];
                    (text(&item["metadata"]["name"]), text(&item["metadata"]["version"]), text(hash))
                })
                .collect();
            found.sort();
            assert_eq!(found, packages, "{file} {more:?}");
        }
    }
}
