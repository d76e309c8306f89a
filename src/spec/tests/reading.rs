//! What the dialect accepts.

use rattler_conda_types::Subdir;

use super::*;

fn warnings(spec: &EnvSpec) -> Vec<String> {
    spec.warnings.iter().map(ToString::to_string).collect()
}

#[test]
fn everything_in_one_file() {
    let spec = read_yml(
        r#"
name: train
channels: ["https://mirror.example/$TEAM/conda-forge", "${TEAM}", conda-forge, nodefaults, ./local, pyviz/label/dev]
dependencies:
  - python=3.11
  - conda-forge::pytorch-gpu=2.7.*
  - libblas=*=*openblas
  - pywin32            # [win]
  - sel(linux): triton
  - https://mirror.example/x/linux-64/a-1.0-h1_0.conda
  - ./built/b-2.0-0.tar.bz2
  - pip
  - pip:
      - --extra-index-url https://download.pytorch.org/whl/cu126
      - einops==0.8.1
      - ./libs/mytool          # relative to this file
  - uv: ["rich", colorama  # [win]
      ]
variables: {TOKENIZERS_PARALLELISM: false, OMP_NUM_THREADS: 8, V: 1.10, E: , Q: "x: y"}
platforms: [linux-64, osx-arm64, linux-64]
category: main
"#,
    );
    assert_eq!(spec.name.as_deref(), Some("train"));
    assert_eq!(channels(&spec), ["https://mirror.example/blue/conda-forge", "blue", "conda-forge", "./local", "pyviz/label/dev"]);
    assert!(spec.nodefaults && spec.channels_declared);
    assert_eq!(
        deps(&spec),
        [
            "python=3.11",
            "conda-forge::pytorch-gpu=2.7.*",
            "libblas=*=*openblas",
            "triton",
            "https://mirror.example/x/linux-64/a-1.0-h1_0.conda",
            "./built/b-2.0-0.tar.bz2",
            "pip"
        ]
    );
    let Dependency::Package { url, .. } = &spec.dependencies[5] else { panic!() };
    assert_eq!(url.as_str(), "file:///files/built/b-2.0-0.tar.bz2");
    assert_eq!(pip(&spec), ["--extra-index-url https://download.pytorch.org/whl/cu126", "einops==0.8.1", "./libs/mytool", "rich"]);
    let variables: Vec<_> = spec.variables.iter().map(|(name, value)| format!("{name}={value}")).collect();
    assert_eq!(variables, ["TOKENIZERS_PARALLELISM=false", "OMP_NUM_THREADS=8", "V=1.10", "E=", "Q=x: y"]);
    assert_eq!(spec.platforms, [Subdir::Linux64, Subdir::OsxArm64]);
    assert_eq!(spec.category.as_deref(), Some("main"));
    assert!(spec.warnings.is_empty(), "{:?}", warnings(&spec));
    assert_eq!(spec.sources.len(), 1);
    assert_eq!(spec.sources[0].sha256.len(), 64);
    assert_eq!(spec.dependencies[1].place().unwrap().line_column(), (6, 5));
}

#[test]
fn absent_and_empty_parts() {
    let spec = read_yml("dependencies:\n");
    assert!(spec.dependencies.is_empty() && spec.name.is_none() && !spec.channels_declared);
    let spec = read_yml("name:\nchannels:\nvariables:\nplatforms: ~\ncategory: null\nprefix:\ndependencies: []\n");
    assert!(spec.name.is_none() && !spec.channels_declared && spec.prefix.is_none() && spec.category.is_none());
    let spec = read_yml("channels: []\ndependencies: [pip: [], uv: ]\n");
    assert!(spec.channels_declared && spec.pip.is_empty());
    assert_eq!(read_yml("name: 123\ndependencies: []").name.as_deref(), Some("123"));
    assert_eq!(read_yml("name: 1.10\ndependencies: []").name.as_deref(), Some("1.10"));
}

#[test]
fn selectors_of_both_kinds_in_one_file() {
    let text = "dependencies:
  - a  # [linux]
  - b  # only there [osx or win64]
  - sel(unix and not aarch64): c
  - sel(win):
      - d
      - e =1
  - pip:  # [not win]
      - x
      - y  # [aarch64]
      - sel(osx): z
  - sel(linux):
      pip: [w]
";
    let read_for = |subdir| {
        let spec = read(&[fetched("environment.yml", text)], &[], &options_for(subdir)).unwrap();
        assert!(spec.warnings.is_empty(), "{:?}", warnings(&spec));
        format!("{} | {}", deps(&spec).join(" "), pip(&spec).join(" "))
    };
    assert_eq!(read_for(Subdir::Linux64), "a c | x w");
    assert_eq!(read_for(Subdir::LinuxAarch64), "a | x y w");
    assert_eq!(read_for(Subdir::OsxArm64), "b c | x z");
    assert_eq!(read_for(Subdir::Win64), "b d e =1 | ");
}

#[test]
fn selectors_on_channels_variables_and_flow_lists() {
    let spec = read_yml(
        "channels:\n  - a # [win]\n  - b # [linux]\nvariables:\n  X: 1 # [osx]\n  Y: 2 # [linux]\ndependencies: [p, # [linux]\n  q # [win]\n  ]\n",
    );
    assert_eq!((channels(&spec), deps(&spec)), (vec!["b"], vec!["p"]));
    assert_eq!(spec.variables.keys().collect::<Vec<_>>(), ["Y"]);
}

#[test]
fn ordinary_comments_are_no_selectors() {
    let spec = read_yml("dependencies:\n  # [viz]\n  - a # see [docs](https://x)\n  - b # needs dask[array]\n  - c#d # e\n");
    assert_eq!(deps(&spec), ["a", "b", "c#d"]);
    assert!(spec.warnings.is_empty());
}

#[test]
fn a_selector_behind_nothing_is_a_warning() {
    let spec = read_yml("name: x # [linux]\ndependencies:\n  # [win]\n  - a\n");
    assert_eq!(warnings(&spec).len(), 2, "{:?}", warnings(&spec));
    assert!(warnings(&spec)[0].starts_with("environment.yml:1:9: this platform selector"));
}

#[test]
fn unknown_keys_are_warnings_with_the_nearest_key() {
    let spec = read_yml("channel: [a]\npip-repositories: [b]\nfoo: 1\npip: [x]\ndependencies: []\n");
    let shown = warnings(&spec);
    assert!(shown[0].starts_with("environment.yml:1:1: the key `channel`"), "{shown:?}");
    let hints: Vec<_> = spec.warnings.iter().map(|warning| warning.hints()[0].as_str()).collect();
    assert!(
        hints[0].contains("`channels`")
            && hints[1].contains("--extra-index-url")
            && hints[2].contains("known keys")
            && hints[3].contains("indent it")
    );
}

#[test]
fn what_conda_reads_past_is_a_warning() {
    let spec = read_yml("dependencies:\n  - dask[array]\n  - tqdm=\n  - pip:\n  - numpy\n");
    assert_eq!(deps(&spec), ["dask[array]", "tqdm=", "numpy"]);
    let shown = warnings(&spec);
    assert!(shown[0].starts_with("environment.yml:2:5: `[array]`") && shown[1].starts_with("environment.yml:3:5:"), "{shown:?}");
    assert!(shown[2].contains("`pip:` is empty") && spec.warnings[2].hints()[0].contains("indent"));
}

#[test]
fn anchors_merge_keys_and_maps_with_several_keys() {
    let spec = read_yml("x-common: &c [numpy, scipy]\nvariables: &v {A: 1}\ndependencies: *c\n");
    assert_eq!(deps(&spec), ["numpy", "scipy"]);
    let spec = read_yml("dependencies:\n  - pip: [a]\n    uv: [b]\n  - pip: [c]\n");
    assert_eq!(pip(&spec), ["a", "b", "c"]);
    let spec = read_yml("base: &b\n  name: n\n  channels: [c]\n<<: *b\ndependencies: [d]\n");
    assert_eq!((spec.name.as_deref(), channels(&spec)), (Some("n"), vec!["c"]));
}

#[test]
fn prefixes() {
    let prefix = |text: &str| read_yml(&format!("prefix: {text}\ndependencies: []")).prefix;
    assert_eq!(prefix("~/envs/a"), Some("/home/me/envs/a".into()));
    assert_eq!(prefix("'~'"), Some("/home/me".into()));
    assert_eq!(prefix("/opt/$TEAM"), Some("/opt/blue".into()));
    assert_eq!(prefix("envs/a"), Some("/files/envs/a".into()));
    let spec = read_yml("prefix: C:\\Users\\me\\envs\\a\ndependencies: []");
    assert!(spec.prefix.is_none() && warnings(&spec)[0].contains("another system"));
}

#[test]
fn a_bad_name_does_not_matter_where_another_is_given() {
    let input = [fetched("e.yml", "name: base\ndependencies: []\n")];
    assert!(read(&input, &[], &options()).is_err());
    let spec = read(&input, &[], &ReadOptions { target_given: true, ..options() }).unwrap();
    assert!(spec.name.is_none() && spec.warnings.len() == 1);
}

#[test]
fn an_unset_variable_in_a_channel_stays_and_is_a_warning() {
    let spec = read_yml("channels: ['https://$NOPE@host/c']\ndependencies: []\n");
    assert_eq!(channels(&spec), ["https://$NOPE@host/c"]);
    assert!(warnings(&spec)[0].contains("`NOPE`"));
}

#[test]
fn kinds_are_found_by_content_first() {
    for (name, text, kind) in [
        ("x.txt", "# c\n@EXPLICIT\n", FileKind::Explicit),
        ("x.yml", "  @EXPLICIT  \n", FileKind::Explicit),
        ("x.txt", "name: a\ndependencies:\n  - b\n", FileKind::EnvironmentYml),
        ("x.txt", "numpy\n", FileKind::List),
        ("requirements.txt", "numpy:x\n", FileKind::List),
        ("pixi.lock", "version: 6\nenvironments:\n", FileKind::EnvironmentYml),
        ("x.yml", "numpy\n", FileKind::EnvironmentYml),
        ("x.YAML", "", FileKind::EnvironmentYml),
        ("<stdin>", "numpy=1\nscipy >=1\n", FileKind::List),
        ("<stdin>", "dependecies:\n  - x\n", FileKind::EnvironmentYml),
        ("<stdin>", "{\"dependencies\": []}", FileKind::EnvironmentYml),
        ("https://host/raw/env?x=a.b", "conda-forge::numpy\n", FileKind::List),
        ("https://host/e.yml?token=1", "x\n", FileKind::EnvironmentYml),
    ] {
        assert_eq!(detect_kind(name, text), kind, "{name} {text:?}");
    }
}

#[test]
fn lists_of_match_specs() {
    let text = "# head\n\nnumpy >=1  # why\n   \n  # indented\n\tscipy=1=py_0\nwin-only # [win]\nhttps://h.example/c/noarch/a-1-0.conda\n~/b-1-0.conda\n";
    let spec = read_text("packages.txt", text).unwrap();
    assert_eq!(deps(&spec), ["numpy >=1", "scipy=1=py_0", "https://h.example/c/noarch/a-1-0.conda", "~/b-1-0.conda"]);
    let Dependency::Package { url, .. } = &spec.dependencies[3] else { panic!() };
    assert_eq!(url.as_str(), "file:///home/me/b-1-0.conda");
    assert_eq!(spec.dependencies[1].place().unwrap().line_column(), (6, 2));
}

#[test]
fn explicit_lists() {
    let (md5, sha) = ("0123456789abcdef0123456789ABCDEF", "a".repeat(64));
    let text = format!(
        "# made by hand\n# platform: linux-64\n@EXPLICIT\n\n  \n  # indented comment\nhttps://me:hunter2@h.example/t/tok/c/linux-64/a-1-0.conda#{md5}\n\
         https://h.example/b-1-0.tar.bz2#sha256:{sha}\nc/d-1.0-0.conda#{sha}   # remark\n~/e-1-0.conda\n$TEAM/f-1-0.conda\n/abs/../g-1-0.conda\nfile:///x/h-1-0.conda\n"
    );
    let spec = read_text("explicit.txt", &text).unwrap().explicit.unwrap();
    assert_eq!(spec.platform, Some(Subdir::Linux64));
    let urls: Vec<_> = spec.packages.iter().map(|package| package.url.as_str()).collect();
    assert_eq!(
        urls,
        [
            "https://me:hunter2@h.example/t/tok/c/linux-64/a-1-0.conda",
            "https://h.example/b-1-0.tar.bz2",
            "file:///files/c/d-1.0-0.conda",
            "file:///home/me/e-1-0.conda",
            "file:///files/blue/f-1-0.conda",
            "file:///g-1-0.conda",
            "file:///x/h-1-0.conda"
        ]
    );
    assert!(matches!(spec.packages[0].hash, Some(ExplicitHash::Md5(hash)) if hash[0] == 0x01 && hash[15] == 0xef));
    assert!(matches!(spec.packages[1].hash, Some(ExplicitHash::Sha256(hash)) if hash[31] == 0xaa));
    assert!(matches!(spec.packages[2].hash, Some(ExplicitHash::Sha256(_))));
    assert!(spec.packages[3].hash.is_none());
    assert_eq!(spec.packages[0].place.as_ref().unwrap().line_column(), (7, 1));
    assert!(!spec.packages[0].place.as_ref().unwrap().text.contains("hunter2"));
    let other = read(&[fetched("e.txt", "# platform: win-64\n@EXPLICIT\n")], &[], &options()).unwrap();
    assert!(warnings(&other).iter().any(|warning| warning.contains("win-64")));
}

#[test]
fn several_files_merge_as_conda_merges() {
    let a = fetched(
        "a.yml",
        "name: a\nchannels: [x, y]\ncategory: p\nvariables: {A: 1, B: 1}\nplatforms: [linux-64]\ndependencies: [p, q, pip: [u, v]]\n",
    );
    let b = fetched("b.yml", "name: b\nchannels: [z, y, nodefaults]\nvariables: {B: 2, C: 2}\ndependencies: [q, r, pip: [v, w]]\n");
    let c = fetched("c.txt", "s\np\n");
    let spec = read(&[a, b, c], &["t=1".to_owned(), "q".to_owned()], &options()).unwrap();
    assert_eq!(spec.name.as_deref(), Some("b"));
    assert_eq!(channels(&spec), ["z", "y", "x"]);
    assert!(spec.nodefaults);
    assert_eq!(deps(&spec), ["p", "q", "r", "s", "t=1"]);
    assert_eq!(pip(&spec), ["u", "v", "w"]);
    assert_eq!(spec.variables.values().collect::<Vec<_>>(), ["1", "2", "2"]);
    assert_eq!((spec.category.as_deref(), spec.platforms.len(), spec.sources.len()), (Some("p"), 1, 3));
}

#[test]
fn explicit_lists_stand_alone() {
    let explicit = || fetched("a.txt", "@EXPLICIT\nhttps://h.example/a-1-0.conda\n");
    let two = read(&[explicit(), explicit()], &[], &options()).unwrap();
    assert_eq!(two.explicit.unwrap().packages.len(), 2);
    for (inputs, command_line) in [
        (vec![explicit()], vec!["numpy".to_owned()]),
        (vec![explicit(), fetched("b.yml", "dependencies: [numpy]")], vec![]),
        (vec![fetched("b.yml", "dependencies: [pip: [numpy]]"), explicit()], vec![]),
    ] {
        let error = read(&inputs, &command_line, &options()).unwrap_err();
        assert!(error.to_string().contains("cannot be combined"), "{error}");
        assert!(error.to_string().contains("`numpy`") && !error.places().is_empty());
    }
    let other = fetched("b.txt", "# platform: win-64\n@EXPLICIT\n");
    let first = fetched("a.txt", "# platform: linux-64\n@EXPLICIT\n");
    assert!(read(&[first, other], &[], &options()).unwrap_err().message().contains("different platforms"));
}

#[test]
fn a_relative_package_in_a_file_from_a_url_is_an_error() {
    let mut input = fetched("https://h.example/e.yml", "dependencies: [./a-1-0.conda]");
    input.base_dir = None;
    assert!(read(&[input], &[], &options()).unwrap_err().message().contains("comes from a URL"));
}

#[test]
fn a_match_spec_may_name_its_url() {
    let spec = read_yml("dependencies:\n  - numpy[url='https://h.example/c/numpy-1-0.zip']\n");
    let Dependency::Match { spec, .. } = &spec.dependencies[0] else { panic!() };
    assert!(spec.url.is_some());
}

#[test]
fn the_command_line() {
    let spec = read(&[], &["python=3.11".to_owned(), " numpy ".to_owned(), "./x-1-0.conda".to_owned()], &options()).unwrap();
    assert_eq!(deps(&spec), ["python=3.11", "numpy", "./x-1-0.conda"]);
    let Dependency::Package { url, .. } = &spec.dependencies[2] else { panic!() };
    assert_eq!(url.as_str(), "file:///project/x-1-0.conda");
    let error = read(&[], &["environment.yml".to_owned()], &options()).unwrap_err();
    assert!(error.hints()[0].contains("-f environment.yml"));
    let error = read(&[], &["a".to_owned(), "numpy≥1".to_owned()], &options()).unwrap_err();
    assert!(error.to_string().starts_with("<argument 2>:1:1: invalid match spec"), "{error}");
    // Python packages, as `remove` and `why` name them.
    let words = ["python", "pypi::einops>=0.8", "pypi::dask[complete] ; python_version >= '3.9'", "pypi::einops>=0.8"];
    let spec = read(&[], &words.map(str::to_owned), &options()).unwrap();
    assert_eq!(deps(&spec), ["python"]);
    assert_eq!(spec.pip.len(), 2);
    assert_eq!(spec.pip[0].shown(), "einops>=0.8");
    for (word, hint) in [("pip:einops", "'pypi::einops'"), ("pypi:einops", "'pypi::einops'"), ("pip::einops>1", "'pypi::einops>1'")] {
        let error = read(&[], &[word.to_owned()], &options()).unwrap_err();
        assert!(error.exit_code() == 2 && error.hints()[0].contains(hint), "{word}: {error}");
    }
    for word in ["pypi::", "pypi::-e .", "pypi::./folder", "pypi::--pre", "pypi::a b", "pypi::a\nb"] {
        let error = read(&[], &[word.to_owned()], &options()).unwrap_err();
        assert!(error.exit_code() == 2 && error.to_string().starts_with("<argument 1>:1:1"), "{word}: {error}");
    }
    let error = read_text("environment.yml", "dependencies:\n  - pypi::einops\n").unwrap_err();
    assert!(error.hints()[0].contains("under `- pip:`"), "{error}");
}

#[test]
fn inputs() {
    assert_eq!(Input::parse("-").unwrap(), Input::Stdin);
    assert_eq!(Input::parse("a/b.yml").unwrap(), Input::File("a/b.yml".into()));
    assert_eq!(Input::parse("file:///a/b.yml").unwrap(), Input::File("/a/b.yml".into()));
    assert!(matches!(Input::parse("https://me:pw@h/x.yml").unwrap(), Input::Url(_)));
    assert_eq!(Input::parse("https://me:pw@h/x.yml").unwrap().name(), "https://*****@h/x.yml");
    assert!(Input::parse("").is_err() && Input::parse("s3://x/y").is_err() && Input::parse("https://").is_err());
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("environment.yaml"), "dependencies: [x]").unwrap();
    let fetched = Input::parse("environment.yaml").unwrap().read_local(dir.path()).unwrap().unwrap();
    assert_eq!((fetched.bytes.len(), fetched.base_dir.as_deref()), (17, Some(dir.path())));
    let error = Input::parse("environment.yml").unwrap().read_local(dir.path()).unwrap_err();
    assert!(error.hints()[0].contains("environment.yaml"), "{error:?}");
    assert_eq!(error.exit_code(), 2);
    let error = Input::parse(".").unwrap().read_local(dir.path()).unwrap_err();
    assert!(error.hints()[0].contains("environment.yml"), "{error:?}");
}
