//! Python packages from wheels in environments that are changed, copied, moved and removed from.

use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

use rattler_cache::package_cache::PackageCache;
use rattler_conda_types::Subdir;
use rattler_networking::LazyClient;
use sha2::Digest;
use tare::install::{Archive, Cancel, Plan, create_with, records_for_archives};
use tare::pypi::{Name, PypiPlan, PypiRecord, PypiSource, ReadyWheel, Version, WheelFile};
use tare::report::Silent;

use crate::common::channel::{Channel, Package, hex};
use crate::common::wheel::Wheel;
use crate::common::{TestEnv, tree};

pub const SITE: &str = "lib/python3.11/site-packages";

pub fn python(version: &str) -> Package {
    let short = version.rsplit_once('.').unwrap().0;
    Package::new("python", version).file(&format!("bin/python{short}"), "#!/bin/sh\necho fake\n")
}

pub fn ready(env: &TestEnv, wheel: &Wheel, requested: bool) -> ReadyWheel {
    let path = wheel.write(&env.path().join("index"));
    let bytes = std::fs::read(&path).unwrap();
    let requires_dist = wheel.headers.iter().filter_map(|line| line.strip_prefix("Requires-Dist: ")).map(str::to_owned).collect();
    ReadyWheel {
        record: PypiRecord {
            name: Name::from_str(&wheel.name).unwrap(),
            version: Version::from_str(&wheel.version).unwrap(),
            source: PypiSource::Archive {
                url: url::Url::from_file_path(&path).unwrap(),
                sha256: Some(hex(&sha2::Sha256::digest(&bytes))),
                size: Some(bytes.len() as u64),
                index: None,
                direct: false,
                subdirectory: None,
            },
            requires_dist,
            requires_python: None,
            requested,
            extras: Vec::new(),
        },
        wheel: WheelFile::Remote,
    }
}

/// Makes the environment `name` of conda archives and wheels.
pub fn make(env: &TestEnv, name: &str, archives: &[PathBuf], wheels: Vec<ReadyWheel>) -> PathBuf {
    let archives: Vec<Archive> =
        archives.iter().map(|path| Archive { url: url::Url::from_file_path(path).unwrap(), md5: None, sha256: None }).collect();
    let prefix = env.envs().join(name);
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(async {
        let cache = PackageCache::new(env.cache().join("pkgs"));
        let progress: Arc<dyn tare::report::Progress> = Arc::new(Silent);
        let records = records_for_archives(&archives, &cache, LazyClient::default(), progress.clone(), &Cancel::new()).await.unwrap();
        let mut plan = Plan::new(&prefix, Subdir::Linux64, records);
        plan.requested = vec!["python 3.11.*".parse().unwrap()];
        plan.compile = false;
        plan.register = false;
        plan.pypi = Some(PypiPlan { wheels, python: Version::from_str("3.11.4").unwrap(), engine: None, clobber: false });
        create_with(&plan, &cache, LazyClient::default(), progress).await.unwrap();
    });
    prefix
}

/// What pip would leave of a package with one module and one script.
pub fn as_pip_would(prefix: &Path, name: &str, requires: &[&str]) {
    let info = prefix.join(SITE).join(format!("{name}-1.0.dist-info"));
    std::fs::create_dir_all(&info).unwrap();
    let mut metadata = format!("Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n");
    requires.iter().for_each(|line| metadata += &format!("Requires-Dist: {line}\n"));
    let script = format!("#!{}/bin/python3.11\nimport {name}\n", prefix.display());
    let mut record = String::new();
    for (path, listed, text) in [
        (prefix.join(SITE).join(format!("{name}.py")), format!("{name}.py"), "X = 1\n".to_owned()),
        (prefix.join(format!("bin/{name}")), format!("../../../bin/{name}"), script),
        (info.join("METADATA"), format!("{name}-1.0.dist-info/METADATA"), metadata),
        (info.join("INSTALLER"), format!("{name}-1.0.dist-info/INSTALLER"), "pip\n".to_owned()),
    ] {
        let digest = sha2::Sha256::digest(&text);
        record += &format!("{listed},sha256={},{}\n", crate::common::wheel::base64(&digest), text.len());
        std::fs::write(&path, text).unwrap();
        use std::os::unix::fs::PermissionsExt;
        let mode = if path.starts_with(prefix.join("bin")) { 0o755 } else { 0o644 };
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
    }
    std::fs::write(info.join("RECORD"), record + &format!("{name}-1.0.dist-info/RECORD,,\n")).unwrap();
}

fn names(env: &TestEnv, environment: &str) -> Vec<String> {
    let list = env.tare(&["list", "-n", environment, "--json"]).ok().json();
    list.as_array()
        .unwrap()
        .iter()
        .map(|row| format!("{}{}", if row["channel"] == "pypi" { "pypi::" } else { "" }, row["name"].as_str().unwrap()))
        .collect()
}

/// Nothing is wrong but that other tools installed things.
fn verified(env: &TestEnv, environment: &str) {
    let ran = env.tare(&["verify", "-n", environment, "--json"]);
    let report = ran.json();
    let wrong: Vec<_> = report["findings"].as_array().unwrap().iter().filter(|finding| finding["fault"] != "foreign").collect();
    assert!(wrong.is_empty(), "{wrong:#?}\n{}", ran.stderr);
}

fn tools() -> [Wheel; 3] {
    [
        Wheel::new("a", "1.0").file("a.py", "A = 1\n").entry_points("[console_scripts]\na-run = a:main\n"),
        Wheel::new("b", "1.0")
            .file("b/__init__.py", "B = 1\n")
            .header("Requires-Dist: a>=1")
            .program("b-1.0.data/scripts/b-raw", "#!python\nb\n"),
        Wheel::new("free", "1.0").file("free.py", "F = 1\n").header("Requires-Dist: a ; extra == 'x'"),
    ]
}

#[test]
fn removing_takes_what_needs_it_along_and_leaves_the_rest() {
    let env = TestEnv::new();
    let mut channel = Channel::new(env.path().join("channel"));
    let archives = [channel.add(&python("3.11.4")), channel.add(&Package::new("a", "7").file("share/a", "conda's\n"))];
    let wheels = tools().iter().map(|wheel| ready(&env, wheel, true)).collect();
    let prefix = make(&env, "x", &archives, wheels);
    as_pip_would(&prefix, "c", &["b"]);
    as_pip_would(&prefix, "d", &[]);
    std::fs::create_dir_all(prefix.join(SITE).join("__pycache__")).unwrap();
    std::fs::write(prefix.join(SITE).join("__pycache__/a.cpython-311.pyc"), "byte code of run time").unwrap();
    assert_eq!(names(&env, "x"), ["a", "pypi::a", "pypi::b", "pypi::c", "pypi::d", "pypi::free", "python"]);
    verified(&env, "x");

    let before = tree(&prefix, &[]);
    env.tare(&["remove", "-n", "x", "pypi::a", "--dry-run"]).ok().stderr_has("would be removed too");
    assert_eq!(tree(&prefix, &[]), before);
    let ran = env.tare(&["remove", "-n", "x", "pypi::a"]).ok();
    assert!(ran.stderr.contains("`pypi::b`, `pypi::c`"), "{}", ran.stderr);
    assert_eq!(names(&env, "x"), ["a", "pypi::d", "pypi::free", "python"]);
    let left: Vec<String> = tree(&prefix, &[]).into_iter().filter(|line| !line.starts_with("conda-meta/history")).collect();
    for gone in
        ["a.py", "a.cpython", "b/__init__", "bin/a-run", "bin/b-raw", "bin/c ", "tare/pypi/a.json", "a-1.0.dist-info", "c-1.0.dist-info"]
    {
        assert!(!left.iter().any(|line| line.contains(gone)), "{gone}: {left:#?}");
    }
    assert!(prefix.join("share/a").exists() && prefix.join("conda-meta/tare/pypi/free.json").exists());
    verified(&env, "x");
    // The conda package of a name is meant first, and said so.
    let wheels = vec![ready(&env, &tools()[0], true)];
    let prefix = make(&env, "y", &archives, wheels);
    env.tare(&["remove", "-n", "y", "a"]).ok().stderr_has("`pypi::a`");
    assert_eq!(names(&env, "y"), ["pypi::a", "python"]);
    env.tare(&["remove", "-n", "y", "a"]).ok();
    assert_eq!(names(&env, "y"), ["python"]);
    assert!(!prefix.join("bin/a-run").exists());
    env.tare(&["remove", "-n", "y", "pypi::a"]).expect_code(1);
    // What pip took away before is no obstacle.
    let prefix = make(&env, "z", &archives, tools().iter().map(|wheel| ready(&env, wheel, true)).collect());
    std::fs::remove_dir_all(prefix.join(SITE).join("free-1.0.dist-info")).unwrap();
    std::fs::remove_file(prefix.join(SITE).join("free.py")).unwrap();
    env.tare(&["remove", "-n", "z", "pypi::b"]).ok();
    assert_eq!(names(&env, "z"), ["a", "pypi::a", "python"]);
    assert!(!prefix.join("conda-meta/tare/pypi/free.json").exists());
    verified(&env, "z");
}

#[test]
fn changes_of_conda_packages_keep_python_packages() {
    let env = TestEnv::new();
    let mut channel = Channel::new(env.path().join("channel"));
    let archives = [channel.add(&python("3.11.4"))];
    channel.add(&python("3.12.1"));
    channel.add(&Package::new("tool", "1").file("share/tool", "tool\n"));
    channel.add(&Package::new("rival", "1").file(&format!("{SITE}/a.py"), "other\n"));
    channel.add(&Package::new("twin", "1").file(&format!("{SITE}/a.py"), "A = 1\n"));
    let url = channel.url();
    let mut wheels: Vec<ReadyWheel> = tools().iter().map(|wheel| ready(&env, wheel, true)).collect();
    let native = Wheel::new("native", "1.0").tag("cp311-cp311-manylinux_2_17_x86_64").file("native.so", "machine code");
    wheels.push(ready(&env, &native, true));
    let prefix = make(&env, "x", &archives, wheels);
    as_pip_would(&prefix, "c", &[]);
    let inode = |path: &str| {
        use std::os::unix::fs::MetadataExt;
        std::fs::metadata(prefix.join(path)).unwrap().ino()
    };
    let a = format!("{SITE}/a.py");
    let before = inode(&a);
    let args = |rest: &[&'static str]| -> Vec<String> {
        let mut args: Vec<String> = ["install", "-n", "x", "--override-channels", "-c", &url].map(str::to_owned).to_vec();
        args.extend(rest.iter().map(ToString::to_string));
        args
    };
    let run = |rest: &[&'static str]| {
        let args = args(rest);
        env.tare(&args.iter().map(String::as_str).collect::<Vec<_>>())
    };
    run(&["tool"]).ok();
    assert_eq!(names(&env, "x"), ["pypi::a", "pypi::b", "pypi::c", "pypi::free", "pypi::native", "python", "tool"]);
    assert_eq!(inode(&a), before);
    verified(&env, "x");
    // Nothing to do is nothing done.
    let whole = tree(&prefix, &[]);
    run(&["tool"]).ok();
    assert_eq!(tree(&prefix, &[]), whole);
    // A conda package does not overwrite a wheel's file, and both are named.
    let ran = run(&["rival"]).expect_code(1);
    assert!(ran.stderr.contains("`pypi::a` and `rival`") && ran.stderr.contains("tare remove pypi::a"), "{}", ran.stderr);
    assert_eq!(tree(&prefix, &[]), whole);
    // The very same file is no clash.
    run(&["twin"]).ok();
    verified(&env, "x");
    env.tare(&["remove", "-n", "x", "pypi::a"]).ok();
    assert!(prefix.join(&a).exists(), "it is the conda package's too");
    // Another Python: what can follows, the rest is named.
    let ran = run(&["python=3.12"]).ok();
    assert!(ran.stderr.contains("Python moves from 3.11 to 3.12") && ran.stderr.contains("`c`, `native`"), "{}", ran.stderr);
    assert!(!ran.stderr.contains("`free`"), "{}", ran.stderr);
    assert!(prefix.join("lib/python3.12/site-packages/free-1.0.dist-info/RECORD").exists());
    assert!(!prefix.join(SITE).join("free.py").exists());
}

#[test]
fn copies_and_moved_environments_name_their_own_place() {
    let env = TestEnv::new();
    let mut channel = Channel::new(env.path().join("channel"));
    let archives = [channel.add(&python("3.11.4"))];
    let prefix = make(&env, "x", &archives, tools().iter().map(|wheel| ready(&env, wheel, true)).collect());
    as_pip_would(&prefix, "c", &[]);
    let here = |environment: &str| {
        let prefix = env.envs().join(environment);
        for script in ["a-run", "b-raw", "c"] {
            let text = std::fs::read_to_string(prefix.join("bin").join(script)).unwrap();
            assert!(text.starts_with(&format!("#!{}/bin/python3.11\n", prefix.display())), "{environment} {script}: {text}");
        }
        verified(&env, environment);
    };
    here("x");
    env.tare(&["create", "-n", "copy", "--clone", "x"]).ok();
    here("copy");
    // Without the wheels in the cache their files are copied.
    std::fs::remove_dir_all(env.cache().join("pkgs/.tare-wheels")).unwrap();
    std::fs::remove_dir_all(env.path().join("index")).unwrap();
    env.tare(&["create", "-n", "second", "--clone", "x"]).ok();
    here("second");
    env.tare(&["rename", "-n", "second", "third"]).ok();
    here("third");
    std::fs::rename(env.envs().join("third"), env.envs().join("moved")).unwrap();
    env.tare(&["relocate", "-n", "moved"]).ok();
    here("moved");
    assert_eq!(names(&env, "moved"), ["pypi::a", "pypi::b", "pypi::c", "pypi::free", "python"]);
}

#[test]
fn verify_tells_what_was_done_to_a_wheel() {
    let env = TestEnv::new();
    let mut channel = Channel::new(env.path().join("channel"));
    let archives = [channel.add(&python("3.11.4"))];
    let prefix = make(&env, "x", &archives, tools().iter().map(|wheel| ready(&env, wheel, true)).collect());
    env.tare(&["verify", "-n", "x"]).ok();
    // A file, and its line in the list along with it.
    let site = prefix.join(SITE);
    std::fs::remove_file(site.join("a.py")).unwrap();
    std::fs::write(site.join("a.py"), "EVIL = 1\n").unwrap();
    env.tare(&["verify", "-n", "x"]).expect_code(5).stdout_has("changed  lib/python3.11/site-packages/a.py  (a)");
    let record = site.join("a-1.0.dist-info/RECORD");
    let text = std::fs::read_to_string(&record).unwrap();
    let digest = crate::common::wheel::base64(&sha2::Sha256::digest("EVIL = 1\n"));
    let forged: String = text
        .lines()
        .map(|line| if line.starts_with("a.py,") { format!("a.py,sha256={digest},9\n") } else { format!("{line}\n") })
        .collect();
    std::fs::write(&record, forged).unwrap();
    let ran = env.tare(&["verify", "-n", "x"]).expect_code(5);
    assert!(ran.stdout.contains("not the list that tare wrote") && ran.stdout.contains("not what tare installed"), "{}", ran.stdout);
}

#[test]
fn a_kill_while_wheels_are_linked_leaves_all_or_nothing() {
    let env = TestEnv::new();
    let mut channel = Channel::new(env.path().join("channel"));
    let archives = [channel.add(&python("3.11.4"))];
    let mut wide = Wheel::new("wide", "1.0");
    for number in 0..1500 {
        wide = wide.file(&format!("wide/m{number}.py"), format!("N = {number}\n"));
    }
    let prefix = make(&env, "x", &archives, vec![ready(&env, &wide, true)]);
    let expected = tree(&prefix.join(SITE), &["direct_url.json"]).len();
    let started = std::time::Instant::now();
    env.tare(&["create", "-n", "timed", "--clone", "x"]).ok();
    let whole = started.elapsed();
    let copy = env.envs().join("copy");
    let mut absent = 0;
    for round in 0..8 {
        let mut child = env.command(&["create", "-n", "copy", "--clone", "x"]).stderr(std::process::Stdio::null()).spawn().unwrap();
        std::thread::sleep(whole.mul_f64(0.1 + 0.11 * f64::from(round)));
        let _ = child.kill();
        let _ = child.wait();
        if copy.exists() {
            assert_eq!(tree(&copy.join(SITE), &["direct_url.json"]).len(), expected, "round {round}");
            std::fs::remove_dir_all(&copy).unwrap();
        } else {
            absent += 1;
        }
    }
    env.tare(&["create", "-n", "copy", "--clone", "x"]).ok();
    verified(&env, "copy");
    assert!(absent > 0, "no kill came before the end");
    let left: Vec<_> = std::fs::read_dir(env.envs())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| name.contains("tare-stage"))
        .collect();
    assert!(left.is_empty(), "{left:?}");
}
