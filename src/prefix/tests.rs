use std::path::Path;

use super::*;

/// An environment with two packages and one distribution of pip.
fn environment(folder: &Path) -> Prefix {
    let path = folder.canonicalize().unwrap().join("envs/e");
    let site = path.join("lib/python3.11/site-packages");
    std::fs::create_dir_all(path.join("conda-meta")).unwrap();
    for (name, version) in [("zlib", "1.3"), ("numpy", "1.26.4")] {
        let record = serde_json::json!({
            "name": name, "version": version, "build": "h0_0", "build_number": 0, "subdir": "linux-64", "depends": [],
            "fn": format!("{name}-{version}-h0_0.conda"), "url": format!("https://user:secret@conda.anaconda.org/t/tk/conda-forge/linux-64/{name}-{version}-h0_0.conda"),
            "channel": "https://conda.anaconda.org/conda-forge", "sha256": "00".repeat(32),
            "files": if name == "numpy" { vec!["lib/python3.11/site-packages/numpy-1.26.4.dist-info/METADATA"] } else { vec![] },
            "paths_data": { "paths_version": 1, "paths": [] }, "requested_spec": "None",
        });
        std::fs::write(path.join(format!("conda-meta/{name}-{version}-h0_0.json")), record.to_string()).unwrap();
    }
    for (folder, name, version) in [("numpy-1.26.4.dist-info", "numpy", "1.26.4"), ("My_Tool-2.0.dist-info", "My.Tool", "2.0")] {
        std::fs::create_dir_all(site.join(folder)).unwrap();
        std::fs::write(
            site.join(folder).join("METADATA"),
            format!("Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n\nName: not this\n"),
        )
        .unwrap();
    }
    Prefix::open(path).unwrap()
}

#[test]
fn the_list_has_condas_shape() {
    let folder = tempfile::tempdir().unwrap();
    let prefix = environment(folder.path());
    let all = rows(&prefix, &ListOptions::default()).unwrap();
    let text = list_text(&prefix, &all).replace(&*folder.path().canonicalize().unwrap().to_string_lossy(), "");
    insta::assert_snapshot!(text, @r"
    # packages in environment at /envs/e:
    #
    # Name                     Version          Build            Channel
    my-tool                    2.0              pypi_0           pypi
    numpy                      1.26.4           h0_0             conda-forge
    zlib                       1.3              h0_0             conda-forge
    ");
    let json = serde_json::to_string(&all[1]).unwrap();
    insta::assert_snapshot!(json, @r#"{"base_url":"https://conda.anaconda.org/conda-forge","build_number":0,"build_string":"h0_0","channel":"conda-forge","dist_name":"numpy-1.26.4-h0_0","name":"numpy","platform":"linux-64","version":"1.26.4"}"#);
    let some = |pattern: &str, full_name| {
        rows(&prefix, &ListOptions { pattern: Some(pattern.into()), full_name, no_pip: true, reverse: false }).map(|rows| rows.len())
    };
    assert_eq!((some("^NUM", false).unwrap(), some("n.*y", true).unwrap()), (1, 1));
    assert!(some("num", true).is_err() && some("tool", false).is_err());
    assert_eq!(some("(", false).unwrap_err().exit_code(), 2);
}

#[test]
fn explicit_lists_have_no_secrets() {
    let folder = tempfile::tempdir().unwrap();
    let prefix = environment(folder.path());
    let text = explicit_text(&prefix, Hashes::Sha256, Some(Subdir::Linux64)).unwrap();
    assert!(text.contains("\n# platform: linux-64\n") && text.contains("\n@EXPLICIT\n"), "{text}");
    assert!(
        text.contains(&format!("\nhttps://conda.anaconda.org/conda-forge/linux-64/zlib-1.3-h0_0.conda#{}\n", "00".repeat(32))),
        "{text}"
    );
    assert!(!text.contains("secret") && !text.contains("/t/"), "{text}");
    assert!(explicit_text(&prefix, Hashes::Md5, None).unwrap().contains("zlib-1.3-h0_0.conda\n"));
    assert!(export_text(&rows(&prefix, &ListOptions::default()).unwrap(), None).ends_with("\nnumpy=1.26.4=h0_0\nzlib=1.3=h0_0\n"));
}

#[test]
fn records_of_other_tools_are_read_with_their_gaps() {
    let folder = tempfile::tempdir().unwrap();
    let prefix = environment(folder.path());
    let write = |name: &str, text: &str| std::fs::write(prefix.path().join("conda-meta").join(name), text).unwrap();
    write(
        "old-1.0-py27_3.json",
        r#"{"name": "old", "version": "1.0", "build": "py27_3", "depends": null, "url": null, "channel": "<unknown>", "timestamp": "never"}"#,
    );
    write(
        "tarball-2-0.json",
        r#"{"name":"tarball","version":"2","build":"0","build_number":0,"url":"https://example.org/c/linux-64/tarball-2-0.tar.bz2","depends":[],"files":["a"]}"#,
    );
    let records = prefix.records().unwrap();
    let old = records.iter().find(|record| record.name().as_normalized() == "old").unwrap();
    assert_eq!(old.repodata_record.package_record.build_number, 3);
    assert_eq!(channel_display(&old.repodata_record), "<unknown>");
    let text = explicit_text(&prefix, Hashes::None, None).unwrap();
    assert!(text.contains("# no URL for: old-1.0-py27_3.conda\n"), "{text}");
    let tarball = records.iter().find(|record| record.name().as_normalized() == "tarball").unwrap();
    assert_eq!(channel_display(&tarball.repodata_record), "https://example.org/c");
    assert_eq!(tarball.repodata_record.package_record.subdir, "linux-64");
}

#[test]
fn damage_is_named_and_does_not_hide_the_rest() {
    let folder = tempfile::tempdir().unwrap();
    let prefix = environment(folder.path());
    std::fs::write(prefix.path().join("conda-meta/bad-1-0.json"), "{").unwrap();
    let error = prefix.records().unwrap_err();
    assert!(error.message().contains("bad-1-0.json"), "{error}");
    let (records, broken) = prefix.records_and_damage().unwrap();
    assert_eq!((records.len(), broken.len()), (2, 1));
    std::fs::write(prefix.path().join("conda-meta/state"), "[]x").unwrap();
    assert!(prefix.variables().unwrap_err().message().contains("conda-meta/state"));
    assert!(Prefix::open(folder.path().join("nothing")).is_err());
    assert!(Prefix::open(folder.path()).unwrap_err().message().contains("is no environment"));
}

#[test]
fn activation_scripts_set_variables_as_written() {
    let folder = tempfile::tempdir().unwrap();
    let prefix = environment(folder.path());
    std::fs::write(prefix.path().join("conda-meta/state"), r#"{"version":1,"env_vars":{"lower_case":"it's $HOME"}}"#).unwrap();
    let shown = prefix.path().to_str().unwrap();
    for (shell, set) in [
        (Shell::Bash, "export lower_case="),
        (Shell::Zsh, "export lower_case="),
        (Shell::Posix, "export lower_case="),
        (Shell::Fish, "set -gx lower_case"),
        (Shell::PowerShell, "${Env:lower_case}"),
    ] {
        let script = Activator { shell, env: &Environment::new(), prompt: Prompt::default() }.activate(&prefix, false).unwrap();
        assert!(script.contains(set) && script.contains(shown), "{shell:?}: {script}");
    }
    assert_eq!("pwsh".parse::<Shell>().unwrap(), Shell::PowerShell);
    assert_eq!("tcsh".parse::<Shell>().unwrap_err().exit_code(), 2);
    assert_eq!(Shell::detect(|_| Some("/usr/bin/fish".into())), Shell::Fish);
}

#[cfg(unix)]
#[test]
fn a_shell_that_evaluates_the_script_is_in_the_environment() {
    let folder = tempfile::tempdir().unwrap();
    let prefix = environment(folder.path());
    std::fs::write(prefix.path().join("conda-meta/state"), r#"{"version":1,"env_vars":{"quoted":"it's $HOME \"q\" `id`"}}"#).unwrap();
    let scripts = prefix.path().join("etc/conda/activate.d");
    std::fs::create_dir_all(&scripts).unwrap();
    std::fs::write(scripts.join("a.sh"), "export FROM_SCRIPT=yes\n").unwrap();
    for (shell, program) in [(Shell::Bash, "bash"), (Shell::Posix, "sh"), (Shell::Zsh, "zsh")] {
        let script = Activator { shell, env: &Environment::new(), prompt: Prompt::default() }.activate(&prefix, false).unwrap();
        let output = std::process::Command::new(program)
            .arg("-c")
            .arg(format!("{script}\nprintf '%s\\n' \"$CONDA_PREFIX\" \"$quoted\" \"$FROM_SCRIPT\" \"$CONDA_SHLVL\" \"${{PATH%%:*}}\""))
            .env_clear()
            .env("PATH", "/usr/bin:/bin")
            .env("HOME", "/home/x")
            .output();
        let Ok(output) = output else {
            eprintln!("skipped: no {program}");
            continue;
        };
        let text = String::from_utf8(output.stdout).unwrap();
        let expected = format!("{0}\nit's $HOME \"q\" `id`\nyes\n1\n{0}/bin\n", prefix.path().display());
        assert_eq!(text, expected, "{program}: {script}\n{}", String::from_utf8_lossy(&output.stderr));
    }
}

#[test]
fn the_hook_as_json_says_what_changes() {
    let folder = tempfile::tempdir().unwrap();
    let prefix = environment(folder.path());
    let env: Environment = [("PATH".into(), "/usr/bin".into()), ("KEEP".into(), "x".into())].into();
    let value = shell_hook_json(&prefix, &env).unwrap();
    let variables = &value["environment_variables"];
    assert_eq!(variables["CONDA_PREFIX"], prefix.path().to_str().unwrap());
    assert_eq!(variables["PATH"], format!("{}/bin:/usr/bin", prefix.path().display()));
    assert!(variables.get("KEEP").is_none());
}
