use std::path::Path;

use super::*;

struct Home {
    folder: tempfile::TempDir,
}

impl Home {
    fn new() -> Self {
        let home = Home { folder: tempfile::tempdir().unwrap() };
        std::fs::create_dir_all(home.path("home")).unwrap();
        home
    }

    fn path(&self, below: &str) -> std::path::PathBuf {
        self.folder.path().join(below)
    }

    fn write(&self, below: &str, text: &str) {
        let path = self.path(below);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }

    fn options<const N: usize>(&self, variables: [(&str, &str); N]) -> LoadOptions {
        LoadOptions {
            no_config: false,
            config_file: None,
            env: Environment::from_pairs(variables),
            home: Some(self.path("home")),
            cwd: self.path("home"),
            system_root: self.path("system"),
        }
    }

    fn load<const N: usize>(&self, variables: [(&str, &str); N]) -> Settings {
        load(&self.options(variables)).unwrap()
    }

    fn shown(&self, text: &str) -> String {
        text.replace(&self.folder.path().display().to_string(), "~")
    }
}

#[test]
fn without_files_there_are_defaults() {
    let home = Home::new();
    let settings = home.load([]);
    assert_eq!(settings.channels, Sourced { value: vec!["conda-forge".to_owned()], source: "default".to_owned() });
    assert_eq!(settings.cache_dir().unwrap(), home.path("home/.cache/tare"));
    assert_eq!(settings.envs_dirs.value, [home.path("home/.local/share/tare/envs")]);
    assert_eq!(settings.channel_priority.value, "auto");
    assert!(settings.files.is_empty() && settings.notes.is_empty());
    for (name, _, source) in settings.describe() {
        assert!(source == "default", "{name} comes from {source}");
    }
    assert_eq!(settings.describe().len(), keys().len());
}

#[test]
fn files_are_read_in_condas_order_and_lists_are_joined() {
    let home = Home::new();
    home.write("system/etc/conda/.condarc", "channels: [system]\nssl_verify: false\n");
    home.write("system/var/lib/conda/condarc.d/b.yml", "channels: [b]\n");
    home.write("system/var/lib/conda/condarc.d/a.yaml", "channels: [a]\n");
    home.write("system/var/lib/conda/condarc.d/c.txt", "channels: [never]\n");
    home.write("home/.conda/.condarc", "channels: [dot-conda]\n");
    home.write("home/.condarc", "channels:\n  - user\n  - system\nssl_verify: true\nchannel_priority: true\n");
    home.write("prefix/.condarc", "channels: prefix\n");
    home.write("named.yml", "channels: [named]\n");
    home.write("home/.config/tare/config.toml", "channels = [\"tare\"]\nlink-mode = \"copy\"\n");
    let prefix = home.path("prefix").display().to_string();
    let named = home.path("named.yml").display().to_string();
    let settings = home.load([("CONDA_PREFIX", &prefix), ("CONDARC", &named), ("CONDA_CHANNELS", "env1, env2")]);
    assert_eq!(settings.channels.value, ["env1", "env2", "tare", "named", "prefix", "user", "system", "dot-conda", "b", "a"]);
    insta::assert_snapshot!(home.shown(&settings.channels.source), @"env CONDA_CHANNELS, ~/home/.config/tare/config.toml, ~/named.yml, ~/prefix/.condarc, ~/home/.condarc, ~/home/.conda/.condarc, ~/system/var/lib/conda/condarc.d/b.yml, ~/system/var/lib/conda/condarc.d/a.yaml, ~/system/etc/conda/.condarc");
    assert_eq!(settings.ssl_verify.value, SslVerify::System);
    assert_eq!(settings.channel_priority.value, "flexible");
    assert_eq!(settings.link_mode.value, "copy");
    assert_eq!(settings.files.len(), 8);
    let none = load(&LoadOptions { no_config: true, ..home.options([("CONDA_CHANNELS", "env1")]) }).unwrap();
    assert_eq!(none.channels.value, ["env1"]);
}

#[test]
fn maps_are_joined_key_by_key() {
    let home = Home::new();
    home.write(
        "system/etc/conda/.condarc",
        "proxy_servers:\n  http: http://old:1\n  https: http://user:secret@kept:2\ncustom_channels: {a: https://one}\n",
    );
    home.write("home/.condarc", "proxy_servers: {http: \"http://new:3\"}\noverride_virtual_packages: {cuda: 12.10, glibc: }\n");
    let settings = home.load([]);
    assert_eq!(settings.proxy_servers.value["http"], "http://new:3");
    assert_eq!(settings.proxy_servers.value["https"], "http://user:secret@kept:2");
    // 12.10 is no 12.1.
    assert_eq!(settings.override_virtual_packages.value["cuda"], "12.10");
    assert_eq!(settings.override_virtual_packages.value["glibc"], "");
    let described = serde_json::to_string(&settings.describe()).unwrap();
    assert!(!described.contains("secret") && described.contains("user:********@kept"), "{described}");
}

#[test]
fn variables_and_home_are_expanded() {
    let home = Home::new();
    home.write("home/.condarc", "channels: ['https://$USER_NAME:${TOKEN}@host/$MISSING/x']\nenvs_dirs: [~/envs, rel, $ROOT/envs]\npkgs_dirs: ~/pkgs\nssl_verify: ~/ca.pem\n");
    let settings = home.load([("USER_NAME", "u"), ("TOKEN", "t"), ("ROOT", "/r")]);
    assert_eq!(settings.channels.value, ["https://u:t@host/$MISSING/x"]);
    assert_eq!(settings.envs_dirs.value[..3], [home.path("home/envs"), home.path("home/rel"), "/r/envs".into()]);
    assert_eq!(settings.pkgs_dirs.value, [home.path("home/pkgs")]);
    assert_eq!(settings.ssl_verify.value, SslVerify::Bundle(home.path("home/ca.pem")));
}

#[test]
fn the_variables_of_conda_and_tare_count() {
    let home = Home::new();
    home.write("home/.condarc", "pkgs_dirs: [/from/file]\n");
    let settings = home.load([
        ("CONDA_PKGS_DIRS", "/p1,/p2"),
        ("CONDA_ENVS_DIRS", "/e1:/e2"),
        ("TARE_ROOT", "/root-folder"),
        ("TARE_CACHE_DIR", "/cache"),
        ("CONDA_OFFLINE", "yes"),
        ("CONDA_CHANNEL_PRIORITY", "Strict"),
        ("CONDA_REMOTE_MAX_RETRIES", "7"),
        ("CONDA_PINNED_PACKAGES", "a=1&b"),
        ("REQUESTS_CA_BUNDLE", "/ca.pem"),
        ("CONDA_SUBDIR", ""),
    ]);
    assert_eq!(settings.pkgs_dirs.value, [Path::new("/p1"), Path::new("/p2"), Path::new("/from/file")]);
    assert_eq!(settings.envs_dirs.value[..3], [Path::new("/root-folder/envs"), Path::new("/e1"), Path::new("/e2")]);
    assert_eq!(settings.cache_dir, Sourced { value: Some("/cache".into()), source: "env TARE_CACHE_DIR".to_owned() });
    assert!(settings.offline.value);
    assert_eq!(settings.channel_priority.value, "strict");
    assert_eq!(settings.max_retries.value, 7);
    assert_eq!(settings.pinned_packages.value, ["a=1", "b"]);
    assert_eq!(settings.ssl_verify, Sourced { value: SslVerify::Bundle("/ca.pem".into()), source: "env REQUESTS_CA_BUNDLE".to_owned() });
    assert_eq!(settings.subdir.value, None);
}

#[test]
fn what_is_wrong_is_told_with_its_place() {
    let home = Home::new();
    let mut out = String::new();
    for text in [
        "channels: [a\n",
        "- a\n",
        "just text\n",
        "channels:\n  a: b\n",
        "offline: maybe\n",
        "channel_priority: highest\n",
        "remote_max_retries: many\n",
        "custom_channels: [a]\n",
        "channels: [a, [b]]\n",
        "offline: true\noffline: false\n",
        "channels: [a]\nchannel: b\n",
        "remote_connect_timeout_secs: -3\n",
        "channel_alias: 'http://[::1'\n",
        "channel_alias: 's3://bucket'\n",
        "exclude_newer: tomorrow\n",
        "channels: &a [*a]\n",
        "a: \t- b\n\tc: d\n",
        "proxy_servers: {http: [x]}\n",
    ] {
        home.write("home/.condarc", text);
        let error = load(&home.options([])).unwrap_err();
        assert_eq!(error.exit_code(), 2, "{text}");
        out.push_str(&format!("{}\n", home.shown(&error.to_string())));
        assert_eq!(
            error.places().first().map(|place| &*place.name),
            Some(&*home.path("home/.condarc").display().to_string()),
            "{text}: {error}"
        );
    }
    insta::assert_snapshot!(out, @r"
    ~/home/.condarc:1:11: this is not valid YAML: unclosed bracket '['
    ~/home/.condarc:1:1: a .condarc is a map of settings
    ~/home/.condarc:1:1: a .condarc is a map of settings
    ~/home/.condarc:2:3: `channels`: expected a list of texts, found a map
    ~/home/.condarc:1:10: `offline`: expected true or false, found `maybe`
    ~/home/.condarc:1:19: `channel_priority`: expected auto, strict, flexible, disabled, found `highest`
    ~/home/.condarc:1:21: `remote_max_retries`: expected a whole number, found `many`
    ~/home/.condarc:1:18: `custom_channels`: expected a map of names to texts, found a list
    ~/home/.condarc:1:11: `channels`: expected a list of texts, found a list in it
    ~/home/.condarc:2:1: the key `offline` stands twice
    ~/home/.condarc:2:10: `channel` and another name of the same setting both stand here
    ~/home/.condarc:1:30: `connect_timeout`: `-3.0` is not between 0 and 86400 seconds
    ~/home/.condarc:1:16: `channel_alias`: `http://[::1` is no URL: invalid IPv6 address
    ~/home/.condarc:1:16: `channel_alias`: a channel cannot be reached by `s3:`
    ~/home/.condarc:1:16: `exclude_newer`: `tomorrow` is neither a date (2026-01-31), a time (2026-01-31T12:00:00Z) nor an age (7d)
    ~/home/.condarc:1:15: an alias inside of what it stands for
    ~/home/.condarc:1:5: this is not valid YAML: block sequence entries are not allowed in this context
    ~/home/.condarc:1:16: `proxy_servers`: `http`: expected a text, found a list
    ");
}

#[test]
fn the_same_for_toml() {
    let home = Home::new();
    let mut out = String::new();
    for text in [
        "channels = [\n",
        "channels = 1.5.2\n",
        "offline = \"perhaps\"\n",
        "[channels]\na = 1\n",
        "mirrors = { x = { y = 1 } }\n",
        "link-mode = \"move\"\n",
        "link_mode = \"copy\"\nlink-mode = \"copy\"\n",
        "max_retries = -1\n",
        "max_retries = 101\n",
    ] {
        home.write("home/.config/tare/config.toml", text);
        let error = load(&home.options([])).unwrap_err();
        assert_eq!(error.exit_code(), 2, "{text}");
        assert!(!error.places().is_empty(), "{text}: {error}");
        out.push_str(&format!("{}\n", home.shown(&error.to_string())));
    }
    insta::assert_snapshot!(out, @r"
    ~/home/.config/tare/config.toml:1:13: this is not valid TOML: unclosed array, expected `]`
    ~/home/.config/tare/config.toml:1:15: this is not valid TOML: invalid float, expected nothing
    ~/home/.config/tare/config.toml:1:11: `offline`: expected true or false, found `perhaps`
    ~/home/.config/tare/config.toml:1:1: `channels`: expected a list of texts, found a map
    ~/home/.config/tare/config.toml:1:11: `mirrors`: `x`: expected a list of texts, found a map
    ~/home/.config/tare/config.toml:1:13: `link-mode`: expected auto, reflink, hardlink, copy, symlink, found `move`
    ~/home/.config/tare/config.toml:2:13: `link-mode` and another name of the same setting both stand here
    ~/home/.config/tare/config.toml:1:15: `max_retries`: expected a whole number, found `-1`
    ~/home/.config/tare/config.toml:1:15: `max_retries`: `101` is no whole number from 0 to 100
    ");
}

#[test]
fn files_that_cannot_be_read() {
    let home = Home::new();
    std::fs::create_dir_all(home.path("home/.condarc")).unwrap();
    let settings = home.load([]);
    assert!(settings.notes[0].contains("was not read"), "{:?}", settings.notes);
    let error = load(&home.options([("CONDARC", "/no/such")])).unwrap_err();
    assert_eq!(error.exit_code(), 2);
    assert!(load(&home.options([("TARE_CONFIG", "/no/such")])).is_err());
    std::fs::remove_dir(home.path("home/.condarc")).unwrap();
    std::fs::write(home.path("home/.condarc"), b"channels: [\xff]\n").unwrap();
    assert!(load(&home.options([])).unwrap_err().to_string().contains("is not UTF-8"));
    std::fs::write(home.path("home/.condarc"), b"\xef\xbb\xbfchannels: [bom]\r\n").unwrap();
    assert_eq!(home.load([]).channels.value, ["bom"]);
    for empty in ["", "# only a comment\n", "---\n", "channels:\n"] {
        home.write("home/.condarc", empty);
        assert_eq!(home.load([]).channels.source, "default");
    }
    let error = load(&home.options([("CONDA_OFFLINE", "perhaps")])).unwrap_err();
    assert!(error.to_string().starts_with("CONDA_OFFLINE: expected true or false"), "{error}");
}

#[test]
fn unknown_keys_are_noted_only() {
    let home = Home::new();
    home.write("home/.condarc", "show_channel_urls: true\nchanels: [a]\n");
    let notes = home.load([]).notes;
    assert_eq!(notes.len(), 2);
    assert!(notes[1].ends_with("`chanels` is not a key that is used here; did you mean `channels`?"), "{notes:?}");
}

#[test]
fn editing_keeps_comments_and_checks() {
    let home = Home::new();
    let file = home.path("home/.config/tare/config.toml");
    edit::set(&file, "offline", "true").unwrap();
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "offline = true\n");
    std::fs::write(&file, "# mine\noffline = true # for the train\nchannels = [\"a\"]\n").unwrap();
    edit::set(&file, "offline", "no").unwrap();
    edit::append(&file, "channels", "b").unwrap();
    edit::append(&file, "channels", "b").unwrap();
    edit::set(&file, "proxy_servers.https", "http://p:1").unwrap();
    edit::append(&file, "mirrors.conda-forge", "https://m/conda-forge").unwrap();
    edit::set(&file, "max-retries", "5").unwrap();
    insta::assert_snapshot!(std::fs::read_to_string(&file).unwrap(), @r#"
    # mine
    offline = false # for the train
    channels = ["a", "b"]
    max_retries = 5

    [proxy_servers]
    https = "http://p:1"

    [mirrors]
    conda-forge = ["https://m/conda-forge"]
    "#);
    let settings = home.load([]);
    assert_eq!(settings.channels.value, ["a", "b"]);
    assert_eq!(settings.proxy_servers.value["https"], "http://p:1");
    assert_eq!(settings.max_retries.value, 5);
    edit::unset(&file, "offline").unwrap();
    edit::unset(&file, "proxy_servers.https").unwrap();
    assert!(!home.load([]).offline.value);
    for (key, value) in [
        ("offlin", "true"),
        ("offline", "perhaps"),
        ("offline.x", "true"),
        ("proxy_servers", "x"),
        ("proxy_servers.", "x"),
        ("link_mode", "fast"),
        ("exclude_newer", "soon"),
    ] {
        assert_eq!(edit::set(&file, key, value).unwrap_err().exit_code(), 2, "{key}={value}");
    }
    assert_eq!(edit::append(&file, "offline", "x").unwrap_err().exit_code(), 2);
    assert_eq!(edit::unset(&file, "offline").unwrap_err().exit_code(), 2);
    std::fs::write(&file, "channels = [\n").unwrap();
    assert!(edit::set(&file, "offline", "true").unwrap_err().to_string().contains("not valid TOML"));
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "channels = [\n");
}

#[test]
fn exclude_newer_takes_dates_times_and_ages() {
    let now: jiff::Timestamp = "2026-06-15T12:00:00Z".parse().unwrap();
    let parse = |text: &str| parse_exclude_newer(text, now).map(|time| time.to_string());
    assert_eq!(parse("2026-01-31").unwrap(), "2026-01-31T23:59:59.999999999Z");
    assert_eq!(parse("2026-01-31T10:00:00+02:00").unwrap(), "2026-01-31T08:00:00Z");
    assert_eq!(parse("7d").unwrap(), "2026-06-08T12:00:00Z");
    assert_eq!(parse("P1M").unwrap(), "2026-05-15T12:00:00Z");
    for bad in ["", "tomorrow", "2026-13-01", "7 parsecs"] {
        assert!(parse(bad).is_err(), "{bad}");
    }
}

proptest::proptest! {
    #[test]
    fn any_text_as_a_file_is_no_panic(text in "(channels|offline|a|proxy_servers|[-: \\[\\]{}&*!|>'\"%#,\\n\\t]|[a-z]|\u{e9}){0,40}") {
        let _ = condarc::read("x", &text, &mut Vec::new());
        let _ = toml_file::read("x", &text, &mut Vec::new());
        let env = Environment::from_pairs([("a", "b")]);
        let _ = expand_variables(&text, &env);
        let _ = crate::channel::redact_text(&text);
    }

    #[test]
    fn dollars_and_braces(text in "[$a{}b]{0,12}") {
        let env = Environment::from_pairs([("a", "X")]);
        let out = expand_variables(&text, &env);
        proptest::prop_assert!(out.len() <= text.len() + 8);
    }
}

/// An empty or relative HOME leads to wherever the program happens to run: it counts as none, and what needs one says so.
#[test]
fn a_home_that_is_no_absolute_path_is_none() {
    let home = Home::new();
    for (text, shown) in [("", "HOME is empty"), ("some/where", "HOME is `some/where`, which is no absolute path")] {
        let options = LoadOptions { home: Some(text.into()), ..home.options([("HOME", text)]) };
        let settings = load(&options).unwrap();
        assert_eq!((settings.home.as_ref(), settings.cache_dir.value.as_ref(), settings.config_file.as_ref()), (None, None, None));
        assert!(settings.envs_dirs.value.is_empty());
        for error in [settings.home("x").unwrap_err(), settings.cache_dir().unwrap_err(), settings.config_file().unwrap_err()] {
            assert_eq!((error.exit_code(), error.causes()), (2, &[shown.to_owned()][..]));
        }
        for variable in ["TARE_CACHE_DIR", "TARE_ROOT", "TARE_CONFIG", "CONDA_ENVS_DIRS", "CONDA_PKGS_DIRS"] {
            let options = LoadOptions { env: Environment::from_pairs([("HOME", text), (variable, "~/x")]), ..options.clone() };
            let error = load(&options).unwrap_err();
            assert!(error.exit_code() == 2 && error.to_string().contains(variable) && error.to_string().contains("`~/x`"), "{error}");
        }
        // What is named does not need it.
        let named = [("HOME", text), ("XDG_CONFIG_HOME", "/c"), ("XDG_DATA_HOME", "/d"), ("TARE_CACHE_DIR", "/cache")];
        let settings = load(&LoadOptions { env: Environment::from_pairs(named), ..options }).unwrap();
        assert_eq!(settings.config_file().unwrap(), Path::new("/c/tare/config.toml"));
        assert_eq!(
            (settings.cache_dir().unwrap(), settings.envs_dirs.value.as_slice()),
            (Path::new("/cache"), &["/d/tare/envs".into()][..])
        );
    }
}

#[cfg(unix)]
#[test]
fn a_pipe_that_lies_where_settings_are_looked_for_is_not_waited_for() {
    let home = Home::new();
    let pipe = |below: &str| {
        let path = home.path(below);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        rustix::fs::mknodat(rustix::fs::CWD, path, rustix::fs::FileType::Fifo, rustix::fs::Mode::RWXU, 0).unwrap();
    };
    pipe("home/.condarc");
    pipe("home/.config/tare/config.toml");
    let settings = home.load([]);
    assert_eq!(settings.notes.iter().filter(|note| note.ends_with("it is a named pipe")).count(), 2, "{:?}", settings.notes);
    assert!(settings.files.is_empty());
    let error = edit::set(settings.config_file().unwrap(), "offline", "true").unwrap_err();
    assert!(error.to_string().contains("config.toml") && error.causes()[0].contains("a named pipe"), "{error:?}");
}
