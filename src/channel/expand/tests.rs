use super::*;
use crate::config::{Environment, LoadOptions, load};

fn settings(condarc: &str) -> (tempfile::TempDir, Settings) {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join(".condarc"), condarc).unwrap();
    let settings = load(&LoadOptions {
        no_config: false,
        config_file: None,
        env: Environment::empty(),
        home: Some(folder.path().to_path_buf()),
        cwd: folder.path().to_path_buf(),
        system_root: folder.path().join("none"),
    })
    .unwrap();
    (folder, settings)
}

fn options(root_dir: &Path) -> ExpandOptions<'_> {
    ExpandOptions { override_channels: false, declared: true, nodefaults: false, root_dir, host: None }
}

/// `display url` of each channel, then the notes.
fn shown(expanded: &Expanded, folder: &Path) -> String {
    let mut out = String::new();
    for channel in &expanded.channels {
        out.push_str(&format!("{} {}\n", channel.display, channel.channel.base_url));
    }
    for note in &expanded.notes {
        out.push_str(&format!("note: {note}\n"));
    }
    out.replace(&folder.display().to_string(), "ROOT")
}

#[test]
fn defaults_are_used_or_appended() {
    let (folder, settings) = settings("");
    let run = |entries: &[&str], change: &dyn Fn(&mut ExpandOptions<'_>)| {
        let mut options = options(folder.path());
        change(&mut options);
        expand(entries, &settings, options).map(|expanded| shown(&expanded, folder.path())).unwrap_or_else(|error| error.to_string())
    };
    insta::assert_snapshot!(run(&[], &|options| options.declared = false), @r"
    conda-forge https://conda.anaconda.org/conda-forge/
    note: no channels were given: `conda-forge` is used (default)
    ");
    insta::assert_snapshot!(run(&["pytorch", "nvidia"], &|_| {}), @r"
    pytorch https://conda.anaconda.org/pytorch/
    nvidia https://conda.anaconda.org/nvidia/
    conda-forge https://conda.anaconda.org/conda-forge/
    note: `conda-forge` was appended to the channels (default); `nodefaults` or `--override-channels` turns this off
    ");
    insta::assert_snapshot!(run(&["pytorch", "nodefaults"], &|_| {}), @"pytorch https://conda.anaconda.org/pytorch/");
    insta::assert_snapshot!(run(&["pytorch"], &|options| options.nodefaults = true), @"pytorch https://conda.anaconda.org/pytorch/");
    insta::assert_snapshot!(run(&["pytorch"], &|options| options.override_channels = true), @"pytorch https://conda.anaconda.org/pytorch/");
    // The configured one is listed already: nothing is appended and nothing is said.
    insta::assert_snapshot!(run(&["conda-forge", "pytorch"], &|_| {}), @r"
    conda-forge https://conda.anaconda.org/conda-forge/
    pytorch https://conda.anaconda.org/pytorch/
    ");
    insta::assert_snapshot!(run(&[], &|options| options.override_channels = true), @"`--override-channels` leaves no channel");
    insta::assert_snapshot!(run(&["nodefaults"], &|_| {}), @"there is no channel to take packages from: `nodefaults` leaves out the configured ones");
}

#[test]
fn names_labels_aliases_and_lists() {
    let (folder, settings) = settings(
        "channels: [all]\nchannel_alias: https://mirror.example/conda/\ncustom_channels: {special: 'https://special.example/base', special/deep: 'https://deep.example', here: ./local}\ncustom_multichannels: {all: [conda-forge, special/x], outer: [all, defaults]}\n",
    );
    let expanded = expand(
        &[
            "special",
            "special/label/dev",
            "special/deep/y",
            "conda-forge/label/rc",
            "outer",
            "https://mirror.example/conda/conda-forge/linux-64",
            "pkgs/free",
            "https://Other.example/a/b//",
        ],
        &settings,
        options(folder.path()),
    )
    .unwrap();
    insta::assert_snapshot!(shown(&expanded, folder.path()), @r"
    special https://special.example/base/special/
    special/label/dev https://special.example/base/special/label/dev/
    special/deep/y https://deep.example/special/deep/y/
    conda-forge/label/rc https://mirror.example/conda/conda-forge/label/rc/
    conda-forge https://mirror.example/conda/conda-forge/
    special/x https://special.example/base/special/x/
    https://repo.anaconda.com/pkgs/main https://repo.anaconda.com/pkgs/main/
    https://repo.anaconda.com/pkgs/r https://repo.anaconda.com/pkgs/r/
    https://repo.anaconda.com/pkgs/msys2 https://repo.anaconda.com/pkgs/msys2/
    pkgs/free https://repo.anaconda.com/pkgs/free/
    https://other.example/a/b https://other.example/a/b/
    ");
}

#[test]
fn secrets_leave_the_url() {
    let (folder, settings) = settings("channels: ['https://conda.anaconda.org/t/tk-SECRET/private']\n");
    let mut options = options(folder.path());
    options.override_channels = false;
    let expanded =
        expand(&["https://user:SECRET%2F@host.example:8443/chan", "https://host.example/base/t/tk-SECRET/chan"], &settings, options)
            .unwrap();
    let text = format!("{}{:?}", shown(&expanded, folder.path()), expanded);
    assert!(!text.contains("SECRET"), "{text}");
    insta::assert_snapshot!(shown(&expanded, folder.path()), @r"
    https://host.example:8443/chan https://host.example:8443/chan/
    https://host.example/base/chan https://host.example/base/chan/
    private https://conda.anaconda.org/private/
    note: `private` was appended to the channels (ROOT/.condarc); `nodefaults` or `--override-channels` turns this off
    ");
    assert_eq!(
        expanded.channels[0].credential,
        Some(Credential {
            prefix: "https://host.example:8443/chan/".parse().unwrap(),
            secret: Secret::Basic { user: "user".to_owned(), password: "SECRET/".to_owned() }
        })
    );
    assert!(
        matches!(&expanded.channels[1].credential, Some(Credential { secret: Secret::Token { at: 5, token }, .. }) if token == "tk-SECRET")
    );
    assert!(matches!(&expanded.channels[2].credential, Some(Credential { secret: Secret::Token { at: 0, .. }, .. })));
}

#[test]
fn folders_are_channels() {
    let (folder, settings) = settings("");
    let make = |below: &str| {
        std::fs::create_dir_all(folder.path().join(below)).unwrap();
        std::fs::write(folder.path().join(below).join("repodata.json"), "{}").unwrap();
    };
    make("chan/noarch");
    make("sp ace/linux-64");
    std::fs::create_dir_all(folder.path().join("empty")).unwrap();
    std::fs::write(folder.path().join("file"), "").unwrap();
    let mut options = options(folder.path());
    options.override_channels = true;
    let absolute = format!("file://{}", folder.path().join("chan").display());
    let absolute_path = folder.path().join("chan/").display().to_string();
    let expanded =
        expand(&["./chan", "chan/../chan", &absolute, &absolute_path, "~/sp ace", "./chan/noarch"][..1], &settings, options).unwrap();
    assert_eq!(expanded.channels.len(), 1);
    let expanded = expand(&["./chan", &absolute, &absolute_path, "~/sp ace", &format!("{absolute}/noarch")], &settings, options).unwrap();
    let root = format!("file://{}", folder.path().display());
    assert_eq!(
        expanded.channels.iter().map(|channel| channel.channel.base_url.as_str().replace(&root, "ROOT")).collect::<Vec<_>>(),
        ["ROOT/chan/", "ROOT/sp%20ace/"]
    );
    let fails =
        |text: &str| expand(&[text], &settings, options).unwrap_err().to_string().replace(&folder.path().display().to_string(), "ROOT");
    insta::assert_snapshot!([fails("./nothing"), fails("./empty"), fails("./file"), fails("./chan/noarch")].join("\n"), @r"
    the channel `./nothing` cannot be used: `ROOT/nothing`: it does not exist
    the folder `./empty` is no channel: there is no repodata.json in it (looked in its folders named like platforms, and noarch)
    the channel `./file` cannot be used: `ROOT/file`: it is no folder
    the channel `./chan/noarch` is a subdir, not a channel
    ");
}

#[test]
fn wrong_names_are_refused() {
    let (folder, settings) = settings("custom_multichannels: {loop: [other], other: [loop]}\n");
    let mut out = String::new();
    for text in [
        "",
        "a b",
        "a:b",
        "s3://bucket/x",
        "ftp://host/x",
        "http://",
        "https://host/x?y=1",
        "a//b",
        "../..",
        "a/../b",
        "-c\u{7}",
        "loop",
        "http://[::1/x",
        "user@host",
        "[x]",
        "a=b",
        "host",
    ] {
        let mut options = options(folder.path());
        options.override_channels = true;
        let error = expand(&[text], &settings, options).unwrap_err();
        out.push_str(&format!(
            "{}\n",
            error.to_string().replace(&folder.path().display().to_string(), "ROOT").replace(
                &folder
                    .path()
                    .parent()
                    .unwrap()
                    .parent()
                    .map(|path| path.display().to_string())
                    .filter(|path| path.len() > 1)
                    .unwrap_or("\0".to_owned()),
                "ABOVE"
            )
        ));
    }
    insta::assert_snapshot!(out, @r"
    the name of a channel is empty
    `a b` is no name of a channel: it contains ` `
    `a:b` is no name of a channel: it contains `:`
    channels cannot be reached by `s3:`: `s3://bucket/x`
    channels cannot be reached by `ftp:`: `ftp://host/x`
    `http://` is no URL: empty host
    the channel `https://host/x?y=1` has a query or a fragment
    `a//b` is no name of a channel
    the folder `../..` is no channel: there is no repodata.json in it (looked in its folders named like platforms, and noarch)
    `a/../b` is no name of a channel
    the name of a channel holds control characters
    the channel list `loop` contains itself: loop -> other -> loop
    `http://[::1/x` is no URL: invalid IPv6 address
    `user@host` is no name of a channel: it contains `@`
    `[x]` is no name of a channel: it contains `[`
    `a=b` is no name of a channel: it contains `=`
    the `host` channel cannot be made here
    ");
}

#[test]
fn the_host_channel_is_made_once_and_only_when_asked_for() {
    let (folder, settings) = settings("");
    let made = std::cell::Cell::new(0);
    let make = || {
        made.set(made.get() + 1);
        Ok("file:///cache/host/".parse::<Url>().unwrap())
    };
    let mut options = options(folder.path());
    options.host = Some(&make);
    let expanded = expand(&["pytorch"], &settings, options).unwrap();
    assert!(expanded.channels.iter().all(|channel| !channel.is_host));
    assert_eq!(made.get(), 0);
    let expanded = expand(&["host", "pytorch", "host"], &settings, options).unwrap();
    assert_eq!(made.get(), 1);
    assert!(expanded.channels[0].is_host);
    assert_eq!(expanded.channels.len(), 3);
}

proptest::proptest! {
    #[test]
    fn any_name_is_no_panic(text in "(https?://|file://|/|\\.|~|t/|@|:|[a-z]|%2|\u{e9}|\\[|\\]| ){0,12}") {
        let home = std::path::PathBuf::from("/nowhere");
        let settings = Settings::defaults(&home).unwrap();
        let _ = expand(&[text.as_str()], &settings, options(&home));
    }
}
