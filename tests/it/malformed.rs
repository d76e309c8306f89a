//! Malformed inputs of every kind: no panic, the right exit code, a message that names the place and what to do.

use std::io::Write;

use crate::common::TestEnv;
use crate::create::small_channel;

/// Runs `create -n x -f FILE` for each case and collects what went wrong instead of stopping at the first.
struct Cases<'a> {
    env: &'a TestEnv,
    count: usize,
    wrong: Vec<String>,
}

impl Cases<'_> {
    fn file(&mut self, name: &str, contents: &[u8], code: i32, says: &[&str]) {
        self.env.write(name, contents);
        self.args(&["create", "-n", "x", "-f", name], code, says);
    }

    fn args(&mut self, args: &[&str], code: i32, says: &[&str]) {
        self.count += 1;
        let ran = self.env.tare(args);
        let missing: Vec<_> = says.iter().filter(|text| !ran.stderr.contains(**text)).collect();
        if ran.code != code || !missing.is_empty() || ran.stderr.contains("panicked") || ran.stderr.contains("RUST_BACKTRACE") {
            self.wrong.push(format!("{args:?}: code {} (wanted {code}), missing {missing:?}\n{}", ran.code, ran.stderr));
        }
        if self.env.envs().join("x").exists() {
            self.wrong.push(format!("{args:?}: left an environment behind"));
            let _ = std::fs::remove_dir_all(self.env.envs().join("x"));
        }
    }

    fn done(self) {
        println!("{} malformed inputs", self.count);
        assert!(self.wrong.is_empty(), "{} of {} cases:\n{}", self.wrong.len(), self.count, self.wrong.join("\n---\n"));
    }
}

#[test]
fn environment_files() {
    let env = TestEnv::new();
    let mut cases = Cases { env: &env, count: 0, wrong: vec![] };
    let utf16: Vec<u8> = [0xff, 0xfe].into_iter().chain("name: [\n".encode_utf16().flat_map(u16::to_le_bytes)).collect();
    let deep = format!("dependencies: {}{}\n", "[".repeat(5000), "]".repeat(5000));
    let bomb = {
        let mut text = String::from("a0: &a0 [x, x, x, x, x, x, x, x, x]\n");
        for level in 1..12 {
            text.push_str(&format!("a{level}: &a{level} [{}]\n", vec![format!("*a{}", level - 1); 9].join(", ")));
        }
        text + "dependencies: *a11\n"
    };
    let table: &[(&str, &[u8], &[&str])] = &[
        ("empty.yml", b"", &["empty.yml"]),
        ("only-comment.yml", b"# nothing\n", &["only-comment.yml"]),
        ("list.yml", b"- python\n- numpy\n", &["list.yml:1:1"]),
        ("scalar.yml", b"python\n", &["scalar.yml"]),
        ("no-dependencies.yml", b"name: a\nchannels: [x]\n", &["dependencies"]),
        ("typo.yml", b"name: a\ndependecies:\n  - python\n", &["dependencies", "typo.yml:2"]),
        ("duplicate.yml", b"name: a\ndependencies: [x]\nname: b\n", &["duplicate.yml:3:1", "duplicate.yml:1:1"]),
        ("unclosed.yml", b"name: a\ndependencies: [x\n", &["unclosed.yml:"]),
        ("tabs.yml", b"name: a\ndependencies:\n\t- x\n", &["tabs.yml:3"]),
        ("indent.yml", b"name: a\ndependencies:\n   - x\n  - y\n", &["indent.yml:"]),
        ("quote.yml", b"name: \"a\ndependencies: [x]\n", &["quote.yml:"]),
        ("alias.yml", b"name: a\ndependencies: *none\n", &["alias.yml:2"]),
        ("two-documents.yml", b"name: a\ndependencies: [x]\n---\nname: b\n", &["two-documents.yml:3"]),
        ("binary.yml", &[0, 159, 146, 150, 0, 1, 2, 255], &["binary.yml"]),
        ("latin1.yml", b"name: a\n# caf\xe9\ndependencies: [x]\n", &["latin1.yml"]),
        ("utf16.yml", &utf16, &["utf16.yml"]),
        ("jinja.yml", b"name: a\ndependencies:\n  - python {{ version }}\n  {% if x %}\n  - y\n  {% endif %}\n", &["jinja.yml:"]),
        ("deep.yml", deep.as_bytes(), &["deep.yml"]),
        ("bomb.yml", bomb.as_bytes(), &["bomb.yml"]),
        ("name-list.yml", b"name: [a]\ndependencies: [x]\n", &["name-list.yml:1:7"]),
        ("channels-text.yml", b"channels: conda-forge\ndependencies: [x]\n", &["channels-text.yml:1:11"]),
        ("channels-map.yml", b"channels:\n  - {a: b}\ndependencies: [x]\n", &["channels-map.yml:2"]),
        ("channel-empty.yml", b"channels: ['']\ndependencies: [x]\n", &["channel"]),
        ("channel-scheme.yml", b"channels: ['gopher://x/y', nodefaults]\ndependencies: [x]\n", &["gopher"]),
        ("channel-folder.yml", b"channels: [./missing, nodefaults]\ndependencies: [x]\n", &["missing"]),
        ("dependencies-text.yml", b"dependencies: python\n", &["dependencies-text.yml:1:15"]),
        ("dependencies-map.yml", b"dependencies:\n  python: 3.11\n", &["dependencies-map.yml:2"]),
        ("dependency-number.yml", b"dependencies:\n  - [a, b]\n", &["dependency-number.yml:2"]),
        ("dependency-two-keys.yml", b"dependencies:\n  - a: x\n    b: y\n", &["dependency-two-keys.yml:2"]),
        ("section.yml", b"dependencies:\n  - npm:\n      - left-pad\n", &["section.yml:2", "npm"]),
        ("pip-text.yml", b"dependencies:\n  - pip: requests\n", &["pip-text.yml:2"]),
        ("pip-item.yml", b"dependencies:\n  - pip:\n      - {a: b}\n", &["pip-item.yml:3"]),
        ("pip-spec.yml", b"dependencies:\n  - pip:\n      - 'requests===='\n", &["pip-spec.yml:3"]),
        ("pip-option.yml", b"dependencies:\n  - pip:\n      - --index-ulr https://example.com\n", &["pip-option.yml:3", "--index-url"]),
        ("spec.yml", b"dependencies:\n  - 'numpy >=1.2 <'\n", &["spec.yml:2"]),
        ("spec-brackets.yml", b"dependencies:\n  - 'numpy[version=1'\n", &["spec-brackets.yml:2"]),
        ("spec-empty.yml", b"dependencies:\n  - ''\n", &["spec-empty.yml:2"]),
        ("spec-dash.yml", b"dependencies:\n  - -c pytorch\n", &["spec-dash.yml:2"]),
        ("spec-equals.yml", b"dependencies:\n  - '==1.0'\n", &["spec-equals.yml:2"]),
        ("selector.yml", b"dependencies:\n  - x  # [linnux]\n", &["selector.yml:2", "linux"]),
        ("selector-open.yml", b"dependencies:\n  - x  # [(linux]\n", &["selector-open.yml:2"]),
        ("sel.yml", b"dependencies:\n  - sel(lixux): x\n", &["sel.yml:2"]),
        ("variables.yml", b"dependencies: [x]\nvariables: [A=1]\n", &["variables.yml:2"]),
        ("variable-list.yml", b"dependencies: [x]\nvariables:\n  A: [1]\n", &["variable-list.yml:3"]),
        ("platforms.yml", b"dependencies: [x]\nplatforms: [linux-65]\n", &["platforms.yml:2", "linux-6"]),
        ("archive.yml", b"channels: [nodefaults]\ndependencies:\n  - ./missing.conda\n", &["missing.conda"]),
    ];
    for (name, contents, says) in table {
        cases.file(name, contents, 2, says);
    }
    // Without -n the file's own name counts.
    for name in ["base", "root", "a/b", "a b", "a:b", "'#a'"] {
        env.write("named.yml", format!("name: {name}\ndependencies: [x]\n"));
        cases.args(&["create", "-f", "named.yml"], 2, &["named.yml:1:7"]);
    }
    cases.args(&["create", "-n", "x", "-f", "missing.yml"], 2, &["missing.yml"]);
    cases.args(&["create", "-n", "x", "-f", "."], 2, &["directory"]);
    cases.args(&["create", "-n", "x", "-f", "ftp://example.com/e.yml"], 2, &["ftp"]);
    cases.args(&["create", "-n", "x", "-f", "http://127.0.0.1:9/e.yml", "--offline"], 7, &["127.0.0.1"]);
    cases.done();
}

#[test]
fn specs_and_options() {
    let env = TestEnv::new();
    let channel = small_channel(&env);
    let url = channel.url();
    let mut cases = Cases { env: &env, count: 0, wrong: vec![] };
    for spec in ["lib >=1 <", "lib[", "lib[version='>=1]", "lib==", "[build=x]", "lib>=1>=", "lib 1 2 3 4", "lib[sha256=xyz]"] {
        cases.args(&["create", "-n", "x", "--override-channels", "-c", &url, spec], 2, &[]);
    }
    let with =
        |more: &'static [&'static str]| -> Vec<&str> { [&["create", "-n", "x", "--override-channels", "-c", &url, "lib"], more].concat() };
    for (more, says) in [
        (&["--cuda", "abc"][..], "abc"),
        (&["--virtual-package", "cuda=1"], "__"),
        (&["--virtual-package", "__cuda"], "NAME=VERSION"),
        (&["--platform", "linux-65"], "linux-6"),
        (&["--exclude-newer", "yesterday-ish"], "yesterday-ish"),
        (&["--channel-priority", "maybe"], "maybe"),
        (&["--link-mode", "teleport"], "teleport"),
        (&["-p", "y"], "-"),
        (&["--gpu", "sometimes"], "sometimes"),
    ] {
        cases.args(&with(more), 2, &[says]);
    }
    cases.args(&["create", "-n", "x", "--override-channels", "lib"], 2, &["channel"]);
    cases.args(&["create", "-n", "x", "-c", "/nonexistent/channel", "--override-channels", "lib"], 2, &["/nonexistent/channel"]);
    cases.done();
}

#[test]
fn repodata() {
    let env = TestEnv::new();
    let mut cases = Cases { env: &env, count: 0, wrong: vec![] };
    let good = br#"{"info":{"subdir":"linux-64"},"packages":{},"packages.conda":{}}"#;
    let record = |change: &str| {
        format!(
            r#"{{"info":{{"subdir":"linux-64"}},"packages":{{}},"packages.conda":{{"lib-1-0.conda":{{"name":"lib","version":"1","build":"0","build_number":0,"depends":[],"subdir":"linux-64","sha256":"{}"{change}}}}}}}"#,
            "0".repeat(64)
        )
    };
    let tests: Vec<(&str, Vec<u8>, i32, &str)> = vec![
        ("garbage", b"<html>maintenance</html>".to_vec(), 1, "repodata.json"),
        ("empty", b"".to_vec(), 1, "repodata.json"),
        ("cut", good[..40].to_vec(), 1, "repodata.json"),
        ("null", b"null".to_vec(), 1, "repodata.json"),
        ("list", b"[]".to_vec(), 1, "repodata.json"),
        ("packages-list", br#"{"info":{"subdir":"linux-64"},"packages":[],"packages.conda":{}}"#.to_vec(), 1, "repodata.json"),
        ("bad-version", record("").replace(r#""version":"1""#, r#""version":"!!""#).into_bytes(), 1, "repodata"),
        ("bad-depends", record("").replace(r#""depends":[]"#, r#""depends":7"#).into_bytes(), 1, "repodata"),
        ("absent-archive", record("").into_bytes(), 1, "lib-1-0"),
        ("bad-dependency", record("").replace(r#""depends":[]"#, r#""depends":["other >=<1"]"#).into_bytes(), 3, "lib"),
        ("cycle", record("").replace(r#""depends":[]"#, r#""depends":["lib"]"#).into_bytes(), 1, "lib-1-0"),
        ("no-such-dependency", record("").replace(r#""depends":[]"#, r#""depends":["nothing"]"#).into_bytes(), 3, "nothing"),
    ];
    for (name, contents, code, says) in tests {
        let root = env.path().join(name);
        for (subdir, contents) in [("linux-64", &contents[..]), ("noarch", good)] {
            std::fs::create_dir_all(root.join(subdir)).unwrap();
            std::fs::write(root.join(subdir).join("repodata.json"), contents).unwrap();
        }
        cases.args(&["create", "-n", "x", "--override-channels", "-c", &format!("file://{}", root.display()), "lib"], code, &[says]);
    }
    // A cut zst beside good JSON is not silently half a channel.
    let root = env.path().join("cut-zst");
    for subdir in ["linux-64", "noarch"] {
        std::fs::create_dir_all(root.join(subdir)).unwrap();
        let mut file = std::fs::File::create(root.join(subdir).join("repodata.json.zst")).unwrap();
        file.write_all(&[0x28, 0xb5, 0x2f, 0xfd, 0x04]).unwrap();
    }
    cases.args(&["create", "-n", "x", "--override-channels", "-c", &format!("file://{}", root.display()), "lib"], 1, &["repodata"]);
    std::fs::create_dir_all(env.path().join("not-a-channel")).unwrap();
    let url = format!("file://{}", env.path().join("not-a-channel").display());
    cases.args(&["create", "-n", "x", "--override-channels", "-c", &url, "lib"], 2, &["not-a-channel"]);
    cases.done();
}

#[test]
fn explicit_lists() {
    let env = TestEnv::new();
    let mut cases = Cases { env: &env, count: 0, wrong: vec![] };
    let table: &[(&str, &str, i32, &str)] = &[
        ("words.txt", "@EXPLICIT\nnot a url\n", 2, "words.txt:2"),
        ("spec.txt", "@EXPLICIT\nnumpy=1.26\n", 2, "spec.txt:2"),
        ("kind.txt", "@EXPLICIT\nhttps://example.com/x.zip\n", 2, "kind.txt:2"),
        ("hash.txt", "@EXPLICIT\nhttps://example.com/linux-64/a-1-0.conda#123\n", 2, "hash.txt:2"),
        ("hash-chars.txt", "@EXPLICIT\nhttps://example.com/linux-64/a-1-0.conda#zz345678901234567890123456789012\n", 2, "hash-chars.txt:2"),
        ("twice.txt", "@EXPLICIT\n./a-1-0.conda\n./a-1-0.conda\n", 1, "a-1-0"),
        ("missing.txt", "@EXPLICIT\n./missing-1-0.conda\n", 1, "missing-1-0"),
        ("platform.txt", "# platform: beos-64\n@EXPLICIT\n./a-1-0.conda\n", 2, "beos"),
        ("mixed.txt", "numpy\n@EXPLICIT\n./a-1-0.conda\n", 2, "mixed.txt"),
        ("pip.txt", "requests==2.0\n--index-url https://example.com\n", 2, "pip.txt"),
    ];
    for (name, contents, code, says) in table {
        cases.file(name, contents.as_bytes(), *code, &[says]);
    }
    cases.done();
}

#[test]
fn condarc_and_config() {
    let mut wrong = Vec::new();
    let table: &[(&str, &[u8], &str)] = &[
        (".condarc", b"channels: [a\n", ".condarc:"),
        (".condarc", b"channels:\n  a: b\n", ".condarc:2"),
        (".condarc", b"channel_priority: sideways\n", ".condarc:1"),
        (".condarc", b"ssl_verify: [a]\n", ".condarc:1"),
        (".condarc", b"offline: perhaps\n", ".condarc:1"),
        (".condarc", b"channels: [a]\nchannels: [b]\n", ".condarc:2"),
        (".condarc", b"- a\n", ".condarc"),
        (".condarc", b"channel_alias: 'not a url'\n", "channel_alias"),
        (".condarc", b"channels: [\xff]\n", ".condarc"),
        (".config/tare/config.toml", b"channels = [\n", "config.toml:"),
        (".config/tare/config.toml", b"channels = {a = 1}\n", "config.toml:1"),
        (".config/tare/config.toml", b"link_mode = 'teleport'\n", "config.toml:1"),
    ];
    for (name, contents, says) in table {
        let env = TestEnv::new();
        let path = env.home().join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, contents).unwrap();
        let ran = env.tare(&["create", "-n", "x", "lib"]);
        if ran.code != 2 || !ran.stderr.contains(says) || ran.stderr.contains("panicked") {
            wrong.push(format!("{name} {:?}: {} {}", String::from_utf8_lossy(contents), ran.code, ran.stderr));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n---\n"));
}
