//! `pip:` sections, with an index on loopback and the interpreter of this machine.

use std::path::Path;
use std::time::Duration;

use sha2::Digest;

use crate::common::channel::{Channel, Package, hex};
use crate::common::server::{Fault, Guard, TestServer};
use crate::common::{Ran, TestEnv, tree};

/// A small index of made-up packages.
struct Index {
    server: TestServer,
    pages: std::cell::RefCell<std::collections::BTreeMap<String, String>>,
}

fn zipped(files: &[(String, String)]) -> Vec<u8> {
    use std::io::Write;
    let mut zip = zip::ZipWriter::new(std::io::Cursor::new(Vec::new()));
    for (name, text) in files {
        zip.start_file(name, zip::write::SimpleFileOptions::default().last_modified_time(zip::DateTime::default())).expect("a member");
        zip.write_all(text.as_bytes()).expect("a member");
    }
    zip.finish().expect("an archive").into_inner()
}

fn base64(bytes: &[u8], alphabet: &[u8; 64]) -> String {
    let mut out = String::new();
    for chunk in bytes.chunks(3) {
        let bits = chunk.iter().fold(0_u32, |bits, byte| bits << 8 | u32::from(*byte)) << (8 * (3 - chunk.len()));
        for position in 0..=chunk.len() {
            out.push(char::from(alphabet[(bits >> (18 - 6 * position) & 63) as usize]));
        }
    }
    out
}

/// A wheel with one module that is called as the package.
fn wheel(name: &str, version: &str, head: &[&str]) -> Vec<u8> {
    let info = format!("{name}-{version}.dist-info");
    let mut metadata = format!("Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n");
    for line in head {
        metadata.push_str(&format!("{line}\n"));
    }
    let mut files = vec![
        (format!("{name}.py"), format!("version = '{version}'\n")),
        (format!("{info}/METADATA"), metadata),
        (format!("{info}/WHEEL"), "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n".to_owned()),
    ];
    const URLSAFE: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
    let mut record: String = files
        .iter()
        .map(|(name, text)| format!("{name},sha256={},{}\n", base64(&sha2::Sha256::digest(text), URLSAFE), text.len()))
        .collect();
    record.push_str(&format!("{info}/RECORD,,\n"));
    files.push((format!("{info}/RECORD"), record));
    zipped(&files)
}

/// A project that builds itself and needs nothing for it. `check`: Python lines run before each build.
fn project(name: &str, version: &str, check: &str) -> Vec<(String, String)> {
    let backend = format!(
        r#"
import base64, hashlib, os, sys, zipfile
NAME, VERSION = '{name}', '{version}'
def make(folder, files):
{check}
    info = '%s-%s.dist-info' % (NAME, VERSION)
    files = dict(files)
    files[info + '/METADATA'] = 'Metadata-Version: 2.1\nName: %s\nVersion: %s\n' % (NAME, VERSION)
    files[info + '/WHEEL'] = 'Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n'
    record = ''
    for path, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b'=').decode()
        record += '%s,sha256=%s,%d\n' % (path, digest, len(text))
    files[info + '/RECORD'] = record + info + '/RECORD,,\n'
    file = '%s-%s-py3-none-any.whl' % (NAME, VERSION)
    with zipfile.ZipFile(os.path.join(folder, file), 'w') as archive:
        for path, text in files.items():
            archive.writestr(zipfile.ZipInfo(path), text)
    return file
def build_wheel(folder, config_settings=None, metadata_directory=None):
    return make(folder, {{NAME + '.py': 'built_in = %r\n' % sys.prefix}})
def build_editable(folder, config_settings=None, metadata_directory=None):
    return make(folder, {{NAME + '.pth': os.path.join(os.getcwd(), 'src') + '\n'}})
"#,
        check = if check.is_empty() { "    pass" } else { check }
    );
    vec![
        ("backend.py".to_owned(), backend),
        (
            "pyproject.toml".to_owned(),
            format!(
                "[build-system]\nrequires = []\nbuild-backend = \"backend\"\nbackend-path = [\".\"]\n[project]\nname = \"{name}\"\nversion = \"{version}\"\n"
            ),
        ),
    ]
}

impl Index {
    fn new() -> Self {
        Index { server: TestServer::new(), pages: std::cell::RefCell::default() }
    }

    fn url(&self) -> String {
        self.server.url("/simple/")
    }

    /// Lists a file. `attributes`: such as ` data-yanked="why"`.
    fn file(&self, name: &str, file: &str, bytes: &[u8], attributes: &str) -> String {
        let hash = hex(&sha2::Sha256::digest(bytes));
        self.server.put(&format!("/files/{file}"), bytes);
        let mut pages = self.pages.borrow_mut();
        let page = pages.entry(name.to_owned()).or_default();
        page.push_str(&format!("<a href=\"/files/{file}#sha256={hash}\"{attributes}>{file}</a>\n"));
        let html = format!("<!DOCTYPE html><html><body>\n{page}</body></html>");
        self.server.put(&format!("/simple/{name}/"), html.into_bytes());
        hash
    }

    fn wheel(&self, name: &str, version: &str, head: &[&str]) -> String {
        let metadata = format!("Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{}\n", head.join("\n"));
        self.server.put(&format!("/files/{name}-{version}-py3-none-any.whl.metadata"), metadata.into_bytes());
        self.file(name, &format!("{name}-{version}-py3-none-any.whl"), &wheel(name, version, head), "")
    }

    fn sdist(&self, name: &str, version: &str, check: &str) {
        let files: Vec<_> = project(name, version, check)
            .into_iter()
            .chain([("PKG-INFO".to_owned(), format!("Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"))])
            .map(|(file, text)| (format!("{name}-{version}/{file}"), text))
            .collect();
        self.file(name, &format!("{name}-{version}.zip"), &zipped(&files), "");
    }
}

/// A world with the interpreter of this machine, a small channel and an index.
struct World {
    env: TestEnv,
    index: Index,
    channel: Channel,
    engine: &'static str,
}

fn has_uv() -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&path).any(|folder| folder.join("uv").is_file());
    if !found {
        eprintln!("skipped: no uv on the PATH");
    }
    found
}

impl World {
    /// `None` after saying so where the machine has no interpreter that can be packaged.
    fn new(engine: &'static str) -> Option<Self> {
        let env = TestEnv::new().var("TARE_PIP_RESOLVER", engine).var("PIP_RETRIES", "0").var("UV_HTTP_RETRIES", "0");
        let mut channel = Channel::new(env.path().join("channel"));
        channel.add(
            &Package::new("numlib", "1.26.4")
                .build("py_0")
                .depends(&["python"])
                .noarch_python(&[])
                .file("site-packages/numlib.py", "version = '1.26.4'\n")
                .file("site-packages/numlib-1.26.4.dist-info/METADATA", "Metadata-Version: 2.1\nName: NumLib\nVersion: 1.26.4\n")
                .file("site-packages/numlib-1.26.4.dist-info/INSTALLER", "conda\n"),
        );
        channel.add(&Package::new("clib", "2.5").file("share/clib/version", "2.5\n"));
        let world = World { env, index: Index::new(), channel, engine };
        let ran = world.create("probe", &["python=3.11"], "");
        if ran.code != 0 && ran.stderr.contains("no relocatable CPython") {
            eprintln!("skipped: no relocatable CPython 3.11 on this machine");
            return None;
        }
        ran.ok();
        Some(world)
    }

    fn write(&self, name: &str, dependencies: &[&str], section: &str) -> String {
        let mut text = format!("name: {name}\nchannels: [host, '{}', nodefaults]\ndependencies:\n  - pip\n", self.channel.url());
        for dependency in dependencies {
            text.push_str(&format!("  - {dependency}\n"));
        }
        if !section.is_empty() {
            text.push_str(&format!("  - pip:\n      - --index-url {}\n", self.index.url()));
            for line in section.lines() {
                text.push_str(&format!("      - {line}\n"));
            }
        }
        let file = format!("{name}.yml");
        self.env.write(&file, text);
        file
    }

    fn create(&self, name: &str, dependencies: &[&str], section: &str) -> Ran {
        let file = self.write(name, dependencies, section);
        self.env.tare(&["create", "-f", &file, "--no-compile"])
    }

    fn python(&self, name: &str, code: &str) -> String {
        self.env.tare(&["run", "-n", name, "python", "-c", code]).ok().stdout.trim().to_owned()
    }

    fn absent(&self, name: &str) {
        assert!(!self.env.envs().join(name).exists(), "{name} was made");
        let left: Vec<_> = std::fs::read_dir(self.env.cache().join("throwaway")).into_iter().flatten().collect();
        assert!(left.is_empty(), "{left:?}");
    }
}

const PYTHON: &[&str] = &["python=3.11"];

fn what_is_asked_for(world: &World) {
    let index = &world.index;
    index.wheel("app", "1.0", &["Requires-Dist: base>=1", "Provides-Extra: more", "Requires-Dist: addon ; extra == 'more'"]);
    index.wheel("base", "1.0", &[]);
    index.wheel("base", "1.5", &[]);
    index.wheel("base", "2.0rc1", &[]);
    index.wheel("addon", "3", &[]);
    world.env.write("reqs/more.txt", "app[more]\n-c hold.txt\nwindowsonly ; sys_platform == 'win32'\n");
    world.env.write("reqs/hold.txt", "base<1.5\n");
    let planned = {
        let file = world.write("asked", PYTHON, "-r reqs/more.txt");
        world.env.tare(&["create", "-f", &file, "--dry-run", "--json"]).ok().json()
    };
    let rows: Vec<String> = planned["pypi"]
        .as_array()
        .expect("a list")
        .iter()
        .map(|row| format!("{} {} {} {}", row["name"], row["version"], row["requested"], row["extras"]))
        .collect();
    assert_eq!(rows, [r#""addon" "3" false []"#, r#""app" "1.0" true ["more"]"#, r#""base" "1.0" false []"#]);
    assert_eq!(planned["pip_resolver"]["name"], world.engine);
    world.create("asked", PYTHON, "-r reqs/more.txt").ok();
    assert_eq!(world.python("asked", "import app, base, addon; print(app.version, base.version, addon.version)"), "1.0 1.0 3");
    let shown = world.env.tare(&["list", "-n", "asked"]).ok();
    assert!(
        shown.stdout.lines().any(|line| line.split_whitespace().collect::<Vec<_>>() == ["app", "1.0", "pypi_0", "pypi"]),
        "{}",
        shown.stdout
    );
    // Nothing is asked of anybody where nothing changed; the file that `-r` names is part of the request.
    let before = world.index.server.seen().len();
    world.create("asked", PYTHON, "-r reqs/more.txt").ok().stderr_has("nothing to do");
    assert_eq!(world.index.server.seen().len(), before);
    world.env.write("reqs/hold.txt", "base<1\n");
    let differs = world.create("asked", PYTHON, "-r reqs/more.txt").expect_code(1);
    differs.stderr_has("what differs: the `pip:` section\n").stderr_has("hint: to change it in place: tare update -f asked.yml --prune\n");
    // Who asked for what, in both halves.
    let why = |args: &[&str]| world.env.tare(&[&["why"], args].concat()).ok();
    why(&["-n", "asked", "addon"])
        .stdout_has("addon 3 pypi_0\n╰─ requested in the `pip:` section: `app[more]` (app 1.0)\n   ╰─ needs `addon ; extra == 'more'`\n");
    let json = why(&["-n", "asked", "pypi::base", "--json"]).json();
    assert_eq!((json["source"].as_str(), json["requested"].as_bool(), json["version"].as_str()), (Some("pypi"), Some(false), Some("1.0")));
    assert_eq!(json["needed_by"][0], serde_json::json!(["pypi::app", "base>=1"]));
    let steps = json["paths"][0].as_array().unwrap();
    assert_eq!((steps[0]["source"].as_str(), steps[0]["spec"].as_str()), (Some("pypi"), Some("app[more]")));
    why(&["-n", "asked", "pip"]).stdout_has("requested: `pip`");
    world.env.tare(&["why", "-n", "asked", "aded"]).expect_code(1);
    world.env.tare(&["why", "-n", "asked", "bose"]).expect_code(1).stderr_has("did you mean `base`?");
    world.env.write("reqs/hold.txt", "base<1.5\n");
    world.env.tare(&["lock", "-f", "asked.yml", "-o", "asked.lock"]).ok();
    why(&["--lock", "asked.lock", "addon"]).stdout_has("requested in the `pip:` section").stdout_has("needs `addon ; extra == 'more'`");
    world.env.tare(&["why", "--lock", "asked.lock", "nosuch"]).expect_code(1).stderr_has("`nosuch` is not in the lock");
    world.env.write("reqs/hold.txt", "base<1\n");
    // Changes: another file adds, an equal one with --prune takes away.
    world.write("asked", PYTHON, "addon");
    world
        .env
        .tare(&["update", "-n", "asked", "-f", "asked.yml", "--prune", "--no-compile"])
        .ok()
        // It was only needed before, and is asked for now.
        .stderr_has("addon 3 linked anew\n")
        .stderr_has("changed `asked`: 1 Python package linked, 2 Python packages removed, ");
    assert_eq!(
        world.python("asked", "import importlib.util as u; print([bool(u.find_spec(n)) for n in ('app', 'base', 'addon')])"),
        "[False, False, True]"
    );
    world.write("asked", PYTHON, "base");
    world.env.tare(&["install", "-n", "asked", "-f", "asked.yml", "--no-compile"]).ok();
    assert_eq!(world.python("asked", "import base, addon; print(base.version)"), "1.5");
    let skipped = {
        let file = world.write("skipped", PYTHON, "app");
        world.env.tare(&["create", "-f", &file, "--no-compile", "--no-pip"]).ok()
    };
    skipped.stderr_has("skipped (--no-pip)");
    assert!(!world.env.envs().join("skipped/lib/python3.11/site-packages/app.py").exists());
}

fn named_on_the_command_line(world: &World) {
    let index = &world.index;
    index.wheel("app", "1.0", &["Requires-Dist: base>=1", "Provides-Extra: more", "Requires-Dist: addon ; extra == 'more'"]);
    index.wheel("base", "1.5", &[]);
    index.wheel("addon", "3", &[]);
    world.create("named", PYTHON, "base\naddon").ok();
    let why = |args: &[&str]| world.env.tare(&[&["why"], args].concat()).ok();
    // By the name on the command line, as `remove` takes them.
    let index = ("PIP_INDEX_URL", index.url());
    let install = |args: &[&str]| {
        let mut command = world.env.command(&[&["install", "-n", "named", "--no-compile"], args].concat());
        world.env.ran(command.env(index.0, &index.1).output().unwrap())
    };
    let added = install(&["pypi::app[more]<2"]).ok().stderr_has("app 1.0 added").stderr_has(": 1 Python package linked, ");
    assert!(!added.stderr.contains("is added to the dependencies"), "{}", added.stderr);
    assert_eq!(world.python("named", "import app, addon, base; print(app.version, base.version)"), "1.0 1.5");
    why(&["-n", "named", "app"]).stdout_has("`app[more]<2`");
    why(&["-n", "named", "base"]).stdout_has("requested in the `pip:` section: `base`");
    install(&["pypi::app"]).ok();
    install(&["pip:app"]).expect_code(2).stderr_has("hint: a package of the Python package index is named by two colons: 'pypi::app'");
    install(&["neverheardof"]).expect_code(3).stderr_has("'pypi::neverheardof', or a line under `pip:`");
    world.index.wheel("base", "1.7", &[]);
    let mut command = world.env.command(&["update", "-n", "named", "--no-compile", "pypi::base"]);
    world.env.ran(command.env(index.0, &index.1).output().unwrap()).ok().stderr_has("base 1.5 -> 1.7");
    world.env.tare(&["update", "-n", "named", "pypi::absent"]).expect_code(1).stderr_has("tare install 'pypi::absent'");
    world.env.tare(&["create", "-n", "copy", "--clone", "named"]).ok().stderr_has("as a copy: ").stderr_has("3 Python packages linked");
    world.env.tare(&["remove", "-n", "named", "pypi::app"]).ok().stderr_has("app 1.0 removed");
}

fn one_of_each(world: &World) {
    let index = &world.index;
    index.wheel("numlib", "2.0", &[]);
    index.wheel("plain", "1", &["Requires-Dist: numlib"]);
    index.wheel("modern", "1", &["Requires-Dist: numlib>=2"]);
    index.wheel("choosy", "1", &["Requires-Dist: numlib<2"]);
    index.wheel("choosy", "2", &["Requires-Dist: numlib>=2"]);
    let with = &["python=3.11", "numlib=1.26"];
    world.create("one", with, "plain\nnumlib>=1.20\nchoosy").ok();
    // A conda package that a Python package needs as well.
    let all = world.env.tare(&["why", "-n", "one", "numlib", "--all"]).ok();
    all.stdout_has("├─ requested: `numlib 1.26.*`").stdout_has("`pip:` section: `choosy` (choosy 1)\n│  ╰─ needs `numlib<2`");
    assert_eq!(world.python("one", "import numlib, plain, choosy; print(numlib.version, choosy.version)"), "1.26.4 1");
    let list = world.env.tare(&["list", "-n", "one"]).ok().stdout;
    assert_eq!(list.lines().filter(|line| line.starts_with("numlib ")).count(), 1, "{list}");
    let conflict = world.create("conflict", with, "modern").expect_code(3);
    let conflict = conflict.stderr_has("numlib>=2").stderr_has("the conda package `numlib-1.26.4-py_0` provides `numlib 1.26.4`");
    assert!(!conflict.stderr.contains("throwaway"), "{}", conflict.stderr);
    world.absent("conflict");
    world.create("direct", with, "numlib>=2").expect_code(3).stderr_has("direct.yml:9").stderr_has("numlib-1.26.4-py_0");
    world.absent("direct");
}

fn sources(world: &World) {
    let index = &world.index;
    index.sdist("needslib", "1", "    print(open(os.path.join(sys.prefix, 'share/clib/version')).read())");
    index.sdist("broken", "1", "    sys.exit('this cannot be built: no flux capacitor')");
    for (folder, name) in [("folder", "folderpkg"), ("editable", "editpkg")] {
        for (file, text) in project(name, "4", "") {
            world.env.write(&format!("{folder}/{file}"), text);
        }
    }
    world.env.write("editable/src/editmod.py", "x = 'edited'\n");
    world.create("sources", &["python=3.11", "clib"], "needslib\n./folder\n-e ./editable").ok();
    let prefix = world.env.envs().join("sources");
    assert_eq!(world.python("sources", "import needslib, folderpkg, editmod; print(editmod.x)"), "edited");
    // The module holds the path it was built in, which is no more.
    let built = std::fs::read_to_string(prefix.join("lib/python3.11/site-packages/needslib.py")).unwrap();
    assert!(!built.contains("throwaway"), "{built}");
    let direct = std::fs::read_to_string(prefix.join("lib/python3.11/site-packages/editpkg-4.dist-info/direct_url.json")).unwrap();
    assert!(direct.contains("\"editable\":true"), "{direct}");
    for line in tree(&prefix, &[]) {
        let file = prefix.join(line.split(' ').next().unwrap());
        assert!(!std::fs::read(&file).is_ok_and(|bytes| bytes.windows(11).any(|window| window == b"/throwaway/")), "{}", file.display());
    }
    world.create("nolib", PYTHON, "broken").expect_code(1).stderr_has("no flux capacitor").stderr_has("could not be built");
    world.absent("nolib");
}

fn what_goes_wrong(world: &World) {
    let index = &world.index;
    index.file("foreign", "foreign-1-cp311-cp311-win_amd64.whl", &wheel("foreign", "1", &[]), "");
    world.create("foreign", PYTHON, "foreign").expect_code(3);
    world.absent("foreign");
    index.file(
        "future",
        "future-1-py3-none-any.whl",
        &wheel("future", "1", &["Requires-Python: >=3.99"]),
        " data-requires-python=\"&gt;=3.99\"",
    );
    world.create("future", PYTHON, "future").expect_code(3);
    index.file("taken", "taken-1-py3-none-any.whl", &wheel("taken", "1", &[]), " data-yanked=\"it eats files\"");
    world.create("taken", PYTHON, "taken==1").ok().stderr_has("yanked");
    let hash = index.wheel("hashed", "1", &[]);
    world.create("hashed", PYTHON, &format!("hashed==1 --hash=sha256:{hash}\n--require-hashes")).ok();
    world.create("badhash", PYTHON, &format!("hashed==1 --hash=sha256:{}", "0".repeat(64))).expect_code(5);
    world.absent("badhash");
    // The index lists one file and serves another.
    index.wheel("swapped", "1", &[]);
    index.server.put("/files/swapped-1-py3-none-any.whl", wheel("swapped", "1", &["Summary: another"]));
    world.create("swapped", PYTHON, "swapped").expect_code(5);
    world.absent("swapped");
    index.server.fault("/simple/gone/", Fault::Status { code: 503, times: 50, headers: vec![] });
    world.create("gone", PYTHON, "gone").expect_code(7);
    let down = format!("--index-url http://127.0.0.1:{}/simple/\nanything", TestServer::closed_port());
    world.create("down", PYTHON, &down).expect_code(7).stderr_has("index cannot be used");
    world.absent("down");
    let file = world.write("offline", PYTHON, "neverseen");
    world.env.tare(&["create", "--offline", "-f", &file]).expect_code(7).stderr_has("--offline");
    world.absent("offline");
}

fn secrets(world: &World) {
    let index = Index::new();
    index.wheel("private", "1", &[]);
    const STANDARD: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    index.server.guard(Guard::Basic(base64(b"me:hunter2xyzab", STANDARD)));
    let url = index.url().replace("http://", "http://me:${TARE_TEST_TOKEN}@");
    let file = world.write("secret", PYTHON, &format!("--index-url {url}\nprivate"));
    let mut command = world.env.command(&["create", "-f", &file, "--no-compile", "--json", "-v"]);
    let ran = world.env.ran(command.env("TARE_TEST_TOKEN", "hunter2xyzab").output().unwrap());
    let ran = ran.ok();
    assert!(!ran.stdout.contains("hunter2") && !ran.stderr.contains("hunter2"), "{}\n{}", ran.stdout, ran.stderr);
    let prefix = world.env.envs().join("secret");
    for folder in [prefix.as_path(), &world.env.cache()] {
        for line in tree(folder, &[]) {
            let file = folder.join(line.split(' ').next().unwrap());
            let holds = std::fs::read(&file).is_ok_and(|bytes| bytes.windows(10).any(|window| window == b"hunter2xyz"));
            assert!(!holds, "{}", file.display());
        }
    }
    let file = world.write("denied", PYTHON, &format!("--index-url {url}\nprivate"));
    let mut command = world.env.command(&["create", "-f", &file]);
    let ran = world.env.ran(command.env("TARE_TEST_TOKEN", "wrongxyz").output().unwrap());
    assert!(ran.code == 7 && !ran.stderr.contains("wrongxyz"), "{} {}", ran.code, ran.stderr);
}

/// What the engine is let in with, tare's own download is let in with; nobody else gets it, and it is written nowhere.
fn credentials(world: &World) {
    const STANDARD: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let secret = base64(b"me:hunter2xyzab", STANDARD);
    let netrc = "machine 127.0.0.1 login me password hunter2xyzab\n";
    let commented = format!("# mine\n{netrc}");
    type Case<'a> = (&'a str, &'a str, &'a str, &'a [(&'a str, &'a str)]);
    let mut cases: Vec<Case<'_>> = vec![
        ("pipconf", ".config/pip/pip.conf", "[global]\nindex-url = FULL\n", &[]),
        ("pipenv", "", "", &[("PIP_INDEX_URL", "FULL")]),
        ("netrc", ".netrc", netrc, &[("PIP_INDEX_URL", "PLAIN")]),
        ("netrcnotes", ".netrc", &commented, &[("PIP_INDEX_URL", "PLAIN")]),
    ];
    if world.engine == "uv" {
        let named = "[[index]]\nname = \"in-house\"\nurl = \"PLAIN\"\ndefault = true\n";
        cases = vec![
            cases[0],
            ("uvtoml", ".config/uv/uv.toml", "[[index]]\nurl = \"FULL\"\ndefault = true\n", &[]),
            ("uvenv", "", "", &[("UV_DEFAULT_INDEX", "FULL")]),
            (
                "uvnamed",
                ".config/uv/uv.toml",
                named,
                &[("UV_INDEX_IN_HOUSE_USERNAME", "me"), ("UV_INDEX_IN_HOUSE_PASSWORD", "hunter2xyzab")],
            ),
        ];
    }
    let head = format!("channels: [host, '{}', nodefaults]\ndependencies:\n  - pip\n  - python=3.11\n  - pip:\n", world.channel.url());
    let yaml = world.env.write("private.yml", format!("{head}      - inner\n"));
    for (name, file, text, variables) in cases {
        let (index, elsewhere) = (Index::new(), TestServer::new());
        index.wheel("inner", "1", &["Requires-Dist: outer"]);
        // A file of another server stands in the same index.
        let bytes = wheel("outer", "1", &[]);
        let hash = hex(&sha2::Sha256::digest(&bytes));
        elsewhere.put("/outer-1-py3-none-any.whl", bytes);
        let page = format!("<a href=\"{}#sha256={hash}\">outer-1-py3-none-any.whl</a>", elsewhere.url("/outer-1-py3-none-any.whl"));
        index.server.put("/simple/outer/", page.into_bytes());
        index.server.guard(Guard::Basic(secret.clone()));
        let filled = |text: &str| {
            let with = |user: &str| index.url().replace("http://", user);
            text.replace("FULL", &with("http://me:hunter2xyzab@")).replace("PLAIN", &index.url())
        };
        let path = world.env.home().join(file);
        if !file.is_empty() {
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(&path, filled(text)).unwrap();
        }
        let run = |args: &[&str]| {
            // Each time from the server.
            let _ = std::fs::remove_dir_all(world.env.cache().join("pkgs/.tare-wheels"));
            let mut command = world.env.command(args);
            command.envs(variables.iter().map(|(name, value)| (*name, filled(value)))).env("RUST_LOG", "trace");
            let ran = world.env.ran(command.output().unwrap());
            for part in ["hunter2", secret.as_str()] {
                assert!(!ran.stdout.contains(part) && !ran.stderr.contains(part), "{name}: {}\n{}", ran.stdout, ran.stderr);
            }
            assert_eq!(ran.code, 0, "{name}: {}\n{}", ran.stdout, ran.stderr);
        };
        // tare itself comes for the file.
        let fetched = || {
            let mine = |seen: &&crate::common::server::Seen| {
                seen.status == 200
                    && seen.path.ends_with("inner-1-py3-none-any.whl")
                    && seen.headers.get("user-agent").is_some_and(|agent| agent.starts_with("tare/"))
            };
            index.server.seen().iter().filter(mine).count()
        };
        run(&["create", "-n", name, "-f", yaml.to_str().unwrap(), "--no-compile", "--json", "-vv"]);
        assert_eq!(fetched(), 1, "{name}");
        if matches!(name, "pipconf" | "netrc") {
            // From the lock too, which knows of no credentials.
            run(&["lock", "-f", yaml.to_str().unwrap(), "-o", "private.lock", "--upgrade"]);
            run(&["sync", "-n", &format!("{name}-synced"), "private.lock", "--no-compile"]);
            assert_eq!(fetched(), 2, "{name}");
        }
        for folder in [&world.env.envs().join(name), &world.env.cache(), &world.env.work()] {
            for line in tree(folder, &[]) {
                let file = folder.join(line.split(' ').next().unwrap());
                let holds = std::fs::read(&file).is_ok_and(|bytes| bytes.windows(10).any(|window| window == b"hunter2xyz"));
                assert!(!holds, "{name}: {}", file.display());
            }
        }
        if !file.is_empty() {
            std::fs::remove_file(path).unwrap();
        }
        let asked = elsewhere.seen();
        assert!(asked.iter().any(|seen| seen.path.starts_with("/outer")), "{name}: {asked:?}");
        // netrc knows machines and no ports: the other server is on the same machine.
        let let_in = name.starts_with("netrc");
        assert!(let_in || asked.iter().all(|seen| !seen.headers.contains_key("authorization")), "{name}: {asked:?}");
    }
}

/// A lock for machines of other kinds: markers are judged for them, and wheels are those for them.
fn other_platforms(engine: &'static str) {
    if engine == "uv" && !has_uv() {
        return;
    }
    let env = TestEnv::new().var("TARE_PIP_RESOLVER", engine).var("PIP_RETRIES", "0").var("UV_HTTP_RETRIES", "0");
    // Some Python of this machine runs the resolver.
    let mut path = std::env::split_paths(&std::env::var_os("PATH").unwrap_or_default()).collect::<Vec<_>>();
    path.splice(0..0, std::env::var_os("TARE_HOST_PYTHON").iter().filter_map(|python| Some(Path::new(python).parent()?.to_owned())));
    let env = env.var("PATH", std::env::join_paths(path).unwrap().to_str().unwrap());
    if !env.other("python3").args(["-m", "pip", "--version"]).output().is_ok_and(|output| output.status.success()) {
        eprintln!("skipped: no Python with pip on the PATH");
        return;
    }
    let mut channel = Channel::new(env.path().join("channel"));
    for subdir in ["osx-arm64", "win-64", "linux-aarch64"] {
        let file = if subdir == "win-64" { "python.exe" } else { "bin/python3.12" };
        channel.add(&Package::new("python", "3.12.4").build("0_cpython").subdir(subdir).file(file, "another machine's"));
    }
    channel.add(&Package::new("pip", "24.0").noarch_python(&[]).depends(&["python"]).file("site-packages/pip/__init__.py", ""));
    let index = Index::new();
    let needs = [
        "Requires-Dist: on-windows ; sys_platform == 'win32'",
        "Requires-Dist: on-mac ; platform_system == 'Darwin'",
        "Requires-Dist: on-arm ; platform_machine == 'aarch64' or platform_machine == 'arm64'",
        "Requires-Dist: on-intel ; platform_machine == 'x86_64' or platform_machine == 'AMD64'",
        "Requires-Dist: of-old ; python_full_version < '3.12.4'",
        "Requires-Dist: of-new ; python_version == '3.12'",
    ];
    index.wheel("marked", "1", &needs);
    for (name, module) in
        [("on-windows", "on_windows"), ("on-mac", "on_mac"), ("on-arm", "on_arm"), ("on-intel", "on_intel"), ("of-new", "of_new")]
    {
        index.file(name, &format!("{module}-1-py3-none-any.whl"), &wheel(module, "1", &[]), "");
    }
    for platform in ["manylinux_2_17_x86_64", "macosx_11_0_arm64", "win_amd64"] {
        index.file("native", &format!("native-1-cp312-cp312-{platform}.whl"), &wheel("native", "1", &[]), "");
    }
    index.sdist("fromsource", "1", "");
    let write = |section: &str| {
        let head = format!("channels: ['{}', nodefaults]\ndependencies: [python, pip, {{pip: [", channel.url());
        env.write("env.yml", format!("name: x\n{head}'--index-url {}', {section}]}}]\n", index.url()));
    };
    let lock = |platforms: &[&str]| {
        let mut args = vec!["lock", "-f", "env.yml", "--upgrade"];
        for platform in platforms {
            args.extend(["--platform", platform]);
        }
        env.tare(&args)
    };
    write("marked");
    lock(&["osx-arm64", "win-64", "linux-aarch64"]).ok();
    for (platform, names) in [
        ("osx-arm64", ["marked", "of-new", "on-arm", "on-mac"].as_slice()),
        ("win-64", &["marked", "of-new", "on-intel", "on-windows"]),
        ("linux-aarch64", &["marked", "of-new", "on-arm"]),
    ] {
        let planned = env.tare(&["export", "tare.lock", "--platform", platform, "--format", "pip"]).ok().stdout;
        let lines = planned.lines().filter(|line| line.contains("--hash="));
        let mut found: Vec<&str> = lines.map(|line| line.split([' ', '=']).next().unwrap()).collect();
        found.sort_unstable();
        assert_eq!(found, names, "{platform}: {planned}");
        assert_eq!(planned.matches("--hash=sha256:").count(), names.len(), "{planned}");
    }
    write("native");
    lock(&["osx-arm64", "win-64"]).ok();
    let text = std::fs::read_to_string(env.work().join("tare.lock")).unwrap();
    assert!(text.contains("macosx_11_0_arm64") && text.contains("win_amd64") && !text.contains("manylinux"), "{text}");
    // Where there is none, that is said, with the platform; the lock stays.
    lock(&["linux-aarch64"]).expect_code(3).stderr_has("native").stderr_has("linux-aarch64");
    write("fromsource");
    lock(&["osx-arm64"]).expect_code(3).stderr_has("fromsource").stderr_has("osx-arm64");
    assert_eq!(std::fs::read_to_string(env.work().join("tare.lock")).unwrap(), text);
}

#[test]
fn pip_locks_for_other_platforms() {
    other_platforms("pip");
}

#[test]
fn uv_locks_for_other_platforms() {
    other_platforms("uv");
}

fn interrupted(world: &World) {
    world.index.server.fault("/simple/slow/", Fault::Slow(Duration::from_secs(8)));
    world.index.wheel("slow", "1", &[]);
    let file = world.write("slow", PYTHON, "slow");
    let before = world.index.server.seen().len();
    let child = world
        .env
        .command(&["create", "-f", &file])
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let folder = world.env.cache().join("throwaway");
    let started = std::time::Instant::now();
    // The page is being asked for once the requirements are written; a request is noted only when it is answered.
    while started.elapsed() < Duration::from_secs(60) && !has_file(&folder, "requirements.txt") {
        std::thread::sleep(Duration::from_millis(20));
    }
    std::thread::sleep(Duration::from_millis(300));
    rustix::process::kill_process(
        rustix::process::Pid::from_raw(i32::try_from(child.id()).unwrap()).unwrap(),
        rustix::process::Signal::INT,
    )
    .unwrap();
    let ran = world.env.ran(child.wait_with_output().unwrap());
    assert_eq!(ran.code, 130, "{}", ran.stderr);
    assert!(started.elapsed() < Duration::from_secs(60) && world.index.server.seen().len() <= before + 1);
    world.absent("slow");
    // What a kill leaves is removed by the next run.
    std::fs::create_dir_all(folder.join("deadbeef/env/lib")).unwrap();
    std::fs::write(folder.join("deadbeef/lock"), "").unwrap();
    world.create("after", PYTHON, "nothing-of-that-name").expect_code(3);
    world.absent("after");
}

fn has_file(folder: &Path, name: &str) -> bool {
    std::fs::read_dir(folder).into_iter().flatten().flatten().any(|entry| entry.path().join(name).exists())
}

fn run(engine: &'static str, parts: &[fn(&World)]) {
    if engine == "uv" && !has_uv() {
        return;
    }
    let Some(mut world) = World::new(engine) else { return };
    for part in parts {
        // A server lives for so long only.
        world.index = Index::new();
        part(&world);
    }
}

#[test]
fn pip_resolves_and_changes_follow() {
    run("pip", &[what_is_asked_for, named_on_the_command_line, one_of_each, secrets, credentials]);
}

#[test]
fn pip_builds_and_what_goes_wrong_leaves_nothing() {
    run("pip", &[sources, what_goes_wrong, interrupted]);
}

#[test]
fn uv_resolves_and_changes_follow() {
    run("uv", &[what_is_asked_for, named_on_the_command_line, one_of_each, secrets, credentials]);
}

#[test]
fn uv_builds_and_what_goes_wrong_leaves_nothing() {
    run("uv", &[sources, what_goes_wrong, interrupted]);
}
