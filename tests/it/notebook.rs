//! `tare notebook`: kernels and the Python package.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use crate::common::channel::{Channel, Package};
use crate::common::{TestEnv, tree};

/// An environment with something that passes for Python: it prints its arguments and its variables.
fn environment(env: &TestEnv, ipykernel: bool) -> PathBuf {
    let mut channel = Channel::new(env.path().join("channel"));
    channel.add(
        &Package::new("python", "3.11.9")
            .file("bin/python3.11", "#!/bin/sh\nif [ \"$1\" = -m ]; then echo \"args: $*\"; env; fi\n")
            .symlink("bin/python", "python3.11"),
    );
    channel.add(
        &Package::new("ipykernel", "6.0")
            .noarch_python(&[])
            .depends(&["python"])
            .file("site-packages/ipykernel_launcher.py", "")
            .file("site-packages/ipykernel/__init__.py", ""),
    );
    channel.add(&Package::new("extra", "1.0").file("share/extra", ""));
    let url = channel.url();
    let mut args = vec!["create", "-n", "vision", "--override-channels", "-c", &url, "--no-compile", "python"];
    if ipykernel {
        args.push("ipykernel");
    }
    env.tare(&args).ok();
    env.envs().join("vision")
}

fn kernel_json(env: &TestEnv, name: &str) -> Value {
    let path = env.home().join(".local/share/jupyter/kernels").join(name).join("kernel.json");
    serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap()
}

/// Starts a kernel as Jupyter does: the command of the kernelspec with a connection file.
fn start(env: &TestEnv, spec: &Value) -> (i32, String, String) {
    let argv: Vec<String> = spec["argv"]
        .as_array()
        .unwrap()
        .iter()
        .map(|arg| arg.as_str().unwrap().replace("{connection_file}", "/run/kernel-1.json"))
        .collect();
    let mut command = env.other(&argv[0]);
    let output = command
        .args(&argv[1..])
        .env("LD_LIBRARY_PATH", "/server/lib")
        .env("PYTHONHOME", "/server")
        .env("CONDA_PREFIX", "/server")
        .output()
        .unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
    (output.status.code().unwrap_or(-1), text(output.stdout), text(output.stderr))
}

#[test]
fn an_environment_becomes_a_kernel_that_starts_through_activation() {
    let env = TestEnv::new();
    let prefix = environment(&env, true);
    let done = env.tare(&["notebook", "install", "-n", "vision", "--display-name", "Vision (A100)", "--json"]).ok().json();
    assert_eq!((done["kernel"]["name"].as_str(), done["changed"].as_bool()), (Some("tare-vision"), Some(true)));
    env.tare(&["verify", "-n", "vision"]).ok();
    env.tare(&["env", "config", "vars", "set", "-n", "vision", "WANDB_MODE=offline"]).ok();
    let spec = kernel_json(&env, "tare-vision");
    assert_eq!(spec["display_name"], "Vision (A100)");
    let (code, out, err) = start(&env, &spec);
    assert_eq!(code, 0, "{err}");
    assert!(out.starts_with("args: -m ipykernel_launcher -f /run/kernel-1.json\n"), "{out}");
    let has = |line: &str| out.lines().any(|found| found == line);
    assert!(has("WANDB_MODE=offline") && has(&format!("CONDA_PREFIX={}", prefix.display())), "{out}");
    assert!(out.contains(&format!("\nPATH={}/bin:", prefix.display())), "{out}");
    assert!(!out.contains("LD_LIBRARY_PATH") && !out.contains("PYTHONHOME"), "{out}");

    // The package is a package like any other: listed, verified, removed.
    let record = tree(&prefix.join("lib/python3.11/site-packages"), &[]);
    assert!(record.iter().any(|line| line.starts_with("tare_notebook/_holders.py ")), "{record:?}");
    env.tare(&["list", "-n", "vision"]).ok().stdout_has("tare-notebook").stdout_has("pypi");
    // Again: nothing changes, and people find the kernel under the name they know.
    let again = env.tare(&["notebook", "install", "-n", "vision", "--json"]).ok().json();
    assert_eq!((again["changed"].as_bool(), again["kernel"]["display_name"].as_str()), (Some(false), Some("Vision (A100)")));
    assert_eq!(record, tree(&prefix.join("lib/python3.11/site-packages"), &[]));

    // A change of the environment leaves the kernel as it is.
    env.tare(&["remove", "-n", "vision", "pypi::tare-notebook"]).ok();
    assert!(!prefix.join("lib/python3.11/site-packages/tare_notebook/__init__.py").exists());
    assert_eq!(start(&env, &spec).0, 0);
    env.tare(&["notebook", "install", "-n", "vision", "--no-kernel"]).ok();
    assert!(prefix.join("lib/python3.11/site-packages/tare_notebook/__init__.py").exists());
}

#[test]
fn the_package_is_tares_own_and_no_part_of_the_environment_for_others() {
    let env = TestEnv::new();
    let prefix = environment(&env, true);
    let url = format!("file://{}", env.path().join("channel").display());
    let file = |rest: &str| {
        env.write("environment.yml", format!("name: vision\nchannels: ['{url}', nodefaults]\ndependencies: [python, ipykernel{rest}]\n"))
    };
    file("");
    let create = ["create", "--no-compile", "-f", "environment.yml", "--force"];
    env.tare(&create).ok();
    env.tare(&["export", "-n", "vision", "--format", "tare", "-o", "before.lock"]).ok();
    env.tare(&["notebook", "install", "-n", "vision", "--prefix", prefix.to_str().unwrap()]).ok();
    env.tare(&["notebook", "install", "-n", "vision"]).ok();
    let there = || prefix.join("lib/python3.11/site-packages/tare_notebook/__init__.py").exists();
    assert!(!prefix.join("lib/python3.11/site-packages/tare_notebook-0.1.0.dist-info/direct_url.json").exists());

    // Nothing is to be done, for the input and for the lock.
    env.tare(&create[..4]).ok().stderr_has("nothing to do");
    env.tare(&["sync", "-n", "vision", "before.lock"]).ok().stderr_has("nothing to do");
    env.tare(&["verify", "-n", "vision", "before.lock"]).ok();
    env.tare(&["diff", "vision", "before.lock"]).ok().stderr_has("`tare-notebook==0.1.0` of `vision` is tare's own");
    env.tare(&["update", "-f", "environment.yml", "--prune"]).ok().stderr_has("nothing to do");
    env.tare(&["list", "-n", "vision"]).ok().stdout_has("tare-notebook").stderr_has("is tare's own tooling");
    let rows = env.tare(&["list", "-n", "vision", "--json"]).ok().json();
    let marked: Vec<&str> =
        rows.as_array().unwrap().iter().filter(|row| row["tooling"] == true).filter_map(|row| row["name"].as_str()).collect();
    assert_eq!(marked, ["tare-notebook"]);
    // No format has it, and each says so once.
    for format in [
        "environment-yaml",
        "environment-json",
        "explicit",
        "requirements",
        "pip",
        "conda-lock",
        "pixi",
        "tare",
        "pylock",
        "cyclonedx",
        "spdx",
    ] {
        let ran = env.tare(&["export", "-n", "vision", "--format", format]).ok();
        assert!(!ran.stdout.contains("tare-notebook") && !ran.stdout.contains("tare_notebook"), "{format}\n{}", ran.stdout);
        assert_eq!(ran.stderr.matches("`tare-notebook` is tare's own tooling and left out").count(), 1, "{format}\n{}", ran.stderr);
    }
    let list = env.tare(&["list", "-n", "vision", "--export"]).ok().stderr_has("left out");
    assert!(!list.stdout.contains("tare-notebook"), "{}", list.stdout);

    // It is still verified, and repaired without a cache: the program carries it.
    let module = prefix.join("lib/python3.11/site-packages/tare_notebook/_zero.py");
    std::fs::remove_file(&module).unwrap();
    std::fs::write(&module, "").unwrap();
    env.tare(&["verify", "-n", "vision"]).expect_code(5).stdout_has("tare_notebook/_zero.py");
    std::fs::remove_dir_all(env.cache()).unwrap();
    std::fs::create_dir(env.cache()).unwrap();
    env.tare(&["verify", "-n", "vision", "--repair", "--no-extra"]).ok();
    assert!(std::fs::metadata(&module).unwrap().len() > 0);

    // A copy has the package, and is no kernel; nor does it know what was checked.
    std::fs::write(prefix.join("conda-meta/tare/check.json"), "{}").unwrap();
    env.tare(&["create", "-n", "copy", "--clone", "vision"]).ok();
    let copy = env.envs().join("copy");
    assert!(prefix.join("share/jupyter/kernels/tare-vision/kernel.json").exists());
    assert!(!copy.join("share/jupyter").exists() && !copy.join("conda-meta/tare/check.json").exists());
    assert!(copy.join("lib/python3.11/site-packages/tare_notebook/__init__.py").exists());
    env.tare(&["diff", "vision", "copy"]).ok();
    env.tare(&["verify", "-n", "copy"]).ok();
    env.tare(&["notebook", "list"]).ok().stdout_has("ready");
    std::fs::remove_dir_all(prefix.join("share/jupyter")).unwrap();

    // What takes the place of the environment has it again.
    file(", extra");
    env.tare(&["update", "-f", "environment.yml", "--prune", "--no-compile"]).ok();
    assert!(there());
    env.tare(&["sync", "-n", "vision", "before.lock"]).ok().stderr_has("changed `[ENVS]/vision`");
    assert!(there());
    env.tare(&["create", "--no-compile", "-f", "environment.yml", "--force"]).ok();
    assert!(there());
    env.tare(&["verify", "-n", "vision"]).ok();
    env.tare(&["remove", "-n", "vision", "pypi::tare-notebook"]).ok();
    env.tare(&["create", "--no-compile", "-f", "environment.yml"]).ok().stderr_has("nothing to do");
    env.tare(&["notebook", "list"]).ok().stdout_has("no tare_notebook");
    assert_eq!(env.tare(&["notebook", "list", "--json"]).ok().json()["kernels"][0]["state"], "no-package");
}

#[test]
fn a_renamed_environment_leaves_a_kernel_that_is_told_of() {
    let env = TestEnv::new();
    environment(&env, true);
    env.tare(&["notebook", "install", "-n", "vision", "--display-name", "Vision (A100)"]).ok();
    let quiet = env.tare(&["rename", "vision", "seen"]).ok();
    let hint = "tare notebook remove tare-vision && tare notebook install -p [ENVS]/seen --name tare-vision --display-name 'Vision (A100)'";
    let quiet =
        quiet.stderr_has("the Jupyter kernel `tare-vision` starts the environment by its old path, `[ENVS]/vision`").stderr_has(hint);
    assert_eq!(quiet.stderr.matches("old path").count(), 1);
    let prefix = env.envs().join("seen").display().to_string();
    env.tare(&["notebook", "remove", "tare-vision"]).ok();
    env.tare(&["notebook", "install", "-p", &prefix, "--name", "tare-vision", "--display-name", "Vision (A100)"]).ok();
    assert_eq!(start(&env, &kernel_json(&env, "tare-vision")).0, 0);
    let again = env.tare(&["rename", "seen", "vision", "--json"]).ok().json();
    assert_eq!(again["kernels_left_behind"], serde_json::json!(["tare-vision"]));
    env.tare(&["notebook", "remove", "tare-vision"]).ok();
    assert!(!env.tare(&["rename", "vision", "seen"]).ok().stderr.contains("kernel"));
}

#[test]
fn a_kernel_whose_environment_is_gone_says_so_and_ends() {
    let env = TestEnv::new();
    let prefix = environment(&env, true);
    env.tare(&["notebook", "install", "-n", "vision"]).ok();
    env.tare(&["notebook", "list"]).ok().stdout_has("tare-vision").stdout_has("ready");
    let spec = kernel_json(&env, "tare-vision");
    let moved = env.envs().join("elsewhere");
    std::fs::rename(&prefix, &moved).unwrap();
    let (code, out, err) = start(&env, &spec);
    assert_eq!((code, out.as_str()), (125, ""));
    assert!(err.contains("the environment of this kernel is gone") && err.contains("hint: "), "{err}");
    let json = env.tare(&["notebook", "list", "--json"]).ok().json();
    assert_eq!(json["kernels"][0]["state"], "environment-gone");
    let mut other = spec.clone();
    other["argv"][4] = Value::from(moved.to_str().unwrap());
    let (code, _, err) = start(&env, &other);
    assert!(code == 125 && err.contains("was moved") && err.contains("tare relocate"), "{code} {err}");
    std::fs::rename(&moved, &prefix).unwrap();
    std::fs::remove_file(prefix.join("lib/python3.11/site-packages/ipykernel_launcher.py")).unwrap();
    let (code, _, err) = start(&env, &spec);
    assert!(code == 125 && err.contains("has no ipykernel") && err.contains("tare install -p"), "{code} {err}");
    env.tare(&["notebook", "list"]).ok().stdout_has("no ipykernel");
    env.tare(&["notebook", "remove", "tare-vision"]).ok().stderr_has("removed the kernel `tare-vision`");
    env.tare(&["notebook", "remove", "tare-vision"]).expect_code(1).stderr_has("there is no kernel `tare-vision`");
    assert!(prefix.exists());
}

#[test]
fn what_cannot_be_a_kernel_is_told_how_it_can() {
    let env = TestEnv::new();
    let prefix = environment(&env, false);
    let before = tree(&prefix, &[]);
    env.tare(&["notebook", "install", "-n", "vision"])
        .expect_code(1)
        .stderr_has("has no ipykernel")
        .stderr_has("hint: add it: tare install -p");
    assert_eq!(before, tree(&prefix, &[]));
    env.tare(&["notebook", "install", "-n", "nowhere"]).expect_code(1).stderr_has("nowhere");
    env.tare(&["notebook", "install", "-n", "vision", "--name", "a b"]).expect_code(1);
    env.tare(&["notebook", "list"]).ok().stderr_has("tare has made no kernels");
    // `create --notebook` installs what it can, and says what is missing.
    let url = format!("file://{}", env.path().join("channel").display());
    let args = ["create", "-n", "two", "--override-channels", "-c", &url, "--no-compile", "--notebook", "python"];
    env.tare(&args).ok().stderr_has("the environment has no ipykernel");
    assert!(env.envs().join("two/lib/python3.11/site-packages/tare_notebook/__init__.py").exists());
    let args = ["create", "-n", "three", "--override-channels", "-c", &url, "--no-compile", "--notebook", "python", "ipykernel", "--json"];
    assert_eq!(env.tare(&args).ok().json()["notebook"]["kernel"]["name"], "tare-three");
    let spec = kernel_json(&env, "tare-three");
    assert!(spec["argv"].as_array().unwrap().iter().any(|arg| arg.as_str() == env.envs().join("three").to_str()), "{spec}");
    let there = env.path().join("jupyter-home");
    env.tare(&["notebook", "install", "-n", "three", "--prefix", there.to_str().unwrap(), "--name", "shared"]).ok();
    assert!(there.join("share/jupyter/kernels/shared/kernel.json").exists());
    env.tare(&["notebook", "list", "--prefix", there.to_str().unwrap()]).ok().stdout_has("shared");
}

#[test]
fn hostile_names_and_places_are_refused_and_nothing_is_left() {
    let env = TestEnv::new();
    let prefix = environment(&env, true);
    let before = tree(&prefix, &[]);
    let kernels = env.home().join(".local/share/jupyter/kernels");
    for text in ["", " ", "two\nlines", "\u{1b}[2J", "tab\there", "a\u{202e}b", &"x".repeat(300)] {
        let ran = env.tare(&["notebook", "install", "-n", "vision", "--display-name", text]).expect_code(2);
        assert!(!ran.stderr.contains('\u{1b}') && ran.stderr.contains("name that people see"), "{}", ran.stderr);
    }
    env.tare(&["notebook", "install", "-n", "vision", "--name", &"k".repeat(300)]).expect_code(2);
    env.tare(&["notebook", "install", "-n", "vision", "--name", "a\nb"]).expect_code(2);
    // A place that cannot be written: told before the environment changes.
    std::fs::write(env.path().join("file"), "").unwrap();
    let mut command = env.command(&["notebook", "install", "-n", "vision"]);
    let ran = env.ran(command.env("JUPYTER_DATA_DIR", env.path().join("file/jupyter")).output().unwrap()).expect_code(1);
    ran.stderr_has("write the kernelspec into").stderr_has("JUPYTER_DATA_DIR").stderr_has("--no-kernel");
    assert_eq!(before, tree(&prefix, &[]));
    assert!(!kernels.exists());
    // Odd but harmless text goes through.
    let odd = "\"q\" 'x' $HOME `id` {a} <b> \u{1f600} größe";
    env.tare(&["notebook", "install", "-n", "vision", "--display-name", odd]).ok();
    assert_eq!(kernel_json(&env, "tare-vision")["display_name"], odd);
    env.tare(&["notebook", "list"]).ok().stdout_has(odd);
    // What others wrote into it does not reach the terminal.
    let file = kernels.join("tare-vision/kernel.json");
    let edited = std::fs::read_to_string(&file).unwrap().replace("größe", "\\u001b[2J\\n");
    std::fs::write(&file, edited).unwrap();
    let listed = env.tare(&["notebook", "list"]).ok();
    assert!(!listed.stdout.contains('\u{1b}') && listed.stdout.lines().count() == 2, "{}", listed.stdout);
    // A killed run left a folder without a kernelspec.
    std::fs::remove_file(&file).unwrap();
    std::fs::write(kernels.join("tare-vision/.kernel.json.newAbC"), "{").unwrap();
    env.tare(&["notebook", "install", "-n", "vision"]).ok();
    env.tare(&["notebook", "list"]).ok().stdout_has("ready");
}

#[test]
fn two_at_once_make_one_kernel() {
    let env = TestEnv::new();
    environment(&env, true);
    let mut children: Vec<_> = (0..4)
        .map(|_| {
            let mut command = env.command(&["notebook", "install", "-n", "vision"]);
            command.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped()).spawn().unwrap()
        })
        .collect();
    for child in children.drain(..) {
        env.ran(child.wait_with_output().unwrap()).ok();
    }
    env.tare(&["verify", "-n", "vision"]).ok();
    let folder = env.home().join(".local/share/jupyter/kernels/tare-vision");
    assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 1);
    env.tare(&["notebook", "list"]).ok().stdout_has("ready");
    let children: Vec<_> =
        (0..3).map(|_| env.command(&["notebook", "remove", "tare-vision"]).stderr(std::process::Stdio::piped()).spawn().unwrap()).collect();
    // Whoever is late says that there is none, or has removed the rest of it.
    for child in children {
        let ran = env.ran(child.wait_with_output().unwrap());
        assert!(ran.code == 0 || (ran.code == 1 && ran.stderr.contains("there is no kernel")), "{} {}", ran.code, ran.stderr);
    }
    assert!(!folder.exists());
}

/// The interpreter for the tests in Python; `None` after saying so.
fn python() -> Option<PathBuf> {
    let named = std::env::var_os("TARE_HOST_PYTHON").map(PathBuf::from);
    let found = named.unwrap_or_else(|| "python3".into());
    let asked = Command::new(&found).args(["-c", "import sys; sys.exit(sys.version_info < (3, 9))"]).output();
    if asked.is_ok_and(|output| output.status.success()) {
        return Some(found);
    }
    println!("skipped: no Python 3.9 or newer (TARE_HOST_PYTHON)");
    None
}

fn suite(python: &Path, module: &str) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("python/tests");
    let output = Command::new(python)
        .args(["-B", "-m", "unittest", module])
        .current_dir(folder)
        .env("TARE_TEST_QUICK", "1")
        .env_remove("TARE_TEST_TORCH")
        .env_remove("PYTHONPATH")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}");
    assert!(text.contains("Ran ") && !text.contains("Ran 0 tests"), "{text}");
}

#[test]
fn every_planted_holder_is_found_and_released() {
    if let Some(python) = python() {
        suite(&python, "test_planted");
    }
}

#[test]
fn the_package_does_what_it_says() {
    if let Some(python) = python() {
        suite(&python, "test_notebook");
    }
}

/// In a Jupyter kernel, where `TARE_TEST_JUPYTER` names a Python with ipykernel and jupyter_client.
#[test]
fn it_works_in_a_kernel() {
    match std::env::var_os("TARE_TEST_JUPYTER") {
        Some(python) => suite(Path::new(&python), "test_kernel"),
        None => println!("skipped: no Jupyter (TARE_TEST_JUPYTER)"),
    }
}
