//! The `host` channel with a real interpreter, where the machine has a relocatable one.

use crate::common::TestEnv;

#[test]
fn quickstart_works_without_any_conda_channel() {
    let env = TestEnv::new();
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/envs/quickstart.yml");
    let made = env.tare(&["create", "--offline", "-f", file]);
    if made.code != 0 && made.stderr.contains("no relocatable CPython") {
        eprintln!("skipped: no relocatable CPython 3.11 on this machine");
        return;
    }
    made.ok();
    // Before anything runs: Python writes byte code of its standard library beside the sources.
    let prefix = env.envs().join("quickstart");
    let without = ["conda-meta/history"];
    let first = crate::common::tree(&prefix, &without);
    let shown = env
        .tare(&[
            "run",
            "-n",
            "quickstart",
            "python",
            "-c",
            "import sys, ssl, sqlite3, ctypes; print(sys.prefix); print(sys.version_info[:2]); \
             import re; maps = open('/proc/self/maps').read(); \
             print(sorted({line.split()[-1] for line in maps.splitlines() if 'python' in line and '/' in line and sys.prefix not in line}))",
        ])
        .ok();
    assert_eq!(shown.stdout, "[ENVS]/quickstart\n(3, 11)\n[]\n");
    env.tare(&["run", "-n", "quickstart", "python", "-m", "pip", "--version"]).ok().stdout_has("[ENVS]/quickstart");
    env.tare(&["run", "-n", "quickstart", "pip", "--version"]).ok();

    // A lock asks for one version and `create` for any that fits: what is noted of the package is the same, and there.
    env.tare(&["export", "-n", "quickstart", "--format", "tare", "-o", "tare.lock"]).ok();
    env.tare(&["sync", "-n", "synced"]).ok();
    let origin = |name: &str| -> Vec<(String, serde_json::Value, serde_json::Value)> {
        let meta = std::fs::read_dir(env.envs().join(name).join("conda-meta")).unwrap().map(|entry| entry.unwrap().path());
        let mut found: Vec<_> = meta
            .filter(|path| path.extension().is_some_and(|end| end == "json"))
            .map(|path| {
                let record: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
                (path.file_name().unwrap().to_string_lossy().into_owned(), record["url"].clone(), record["channel"].clone())
            })
            .collect();
        found.sort_by(|a, b| a.0.cmp(&b.0));
        found
    };
    let made = origin("quickstart");
    assert_eq!(made, origin("synced"));
    for (_, url, _) in &made {
        let path = url.as_str().unwrap().strip_prefix("file://").unwrap();
        assert!(path.contains("/host/channels/pool/") && std::path::Path::new(path).is_file(), "{path}");
    }

    std::fs::remove_dir_all(&prefix).unwrap();
    env.tare(&["create", "-f", file]).ok();
    assert_eq!(first, crate::common::tree(&prefix, &without));
}

#[test]
fn a_machine_without_a_usable_interpreter_is_told_what_to_do() {
    let env = TestEnv::new().var("PATH", "/nonexistent").var("TARE_HOST_PYTHON", "/nonexistent/python");
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/envs/quickstart.yml");
    let ran = env.tare(&["create", "-f", file]);
    assert_ne!(ran.code, 0);
    ran.stderr_has("quickstart-conda.yml");
}
