use std::io::Write;
use std::time::{Duration, Instant};

use serde_json::json;

use super::super::expand::{ExpandOptions, expand};
use super::super::test_server::{Fault, Guard, TestServer};
use super::*;
use crate::config::{Environment, LoadOptions, load};

/// Remembers what it was told.
#[derive(Default)]
struct Notes {
    lines: Mutex<Vec<String>>,
    downloads: Mutex<Vec<String>>,
}

impl Progress for Notes {
    fn note(&self, message: &str) {
        self.lines.lock().unwrap().push(message.to_owned());
    }
    fn warn(&self, message: &str, hints: &[String]) {
        self.lines.lock().unwrap().push(format!("warning: {message} {}", hints.join(" ")));
    }
    fn start(&self, _: Phase, label: &str, _: Option<u64>) -> TaskId {
        self.downloads.lock().unwrap().push(label.to_owned());
        TaskId(0)
    }
    fn set_total(&self, _: TaskId, _: u64) {}
    fn advance_to(&self, _: TaskId, _: u64) {}
    fn finish(&self, _: TaskId) {}
}

struct World {
    home: tempfile::TempDir,
    notes: Arc<Notes>,
}

const BOTH: [Subdir; 2] = [Subdir::Linux64, Subdir::NoArch];

impl World {
    fn new(condarc: &str) -> Self {
        let home = tempfile::tempdir().unwrap();
        std::fs::write(home.path().join(".condarc"), condarc).unwrap();
        World { home, notes: Arc::default() }
    }

    fn settings<const N: usize>(&self, variables: [(&str, &str); N]) -> Settings {
        load(&LoadOptions {
            no_config: false,
            config_file: None,
            env: Environment::from_pairs(variables),
            home: Some(self.home.path().to_path_buf()),
            cwd: self.home.path().to_path_buf(),
            system_root: self.home.path().join("none"),
        })
        .unwrap()
    }

    fn open<const N: usize>(&self, variables: [(&str, &str); N]) -> (Settings, Session) {
        let settings = self.settings(variables);
        let retry = RetryPolicy { max: 2, base: Duration::from_millis(5), longest: Duration::from_secs(2) };
        let session = Session::open_with(&settings, self.notes.clone(), SessionOptions { retry: Some(retry) }).unwrap();
        (settings, session)
    }

    fn channels(&self, settings: &Settings, names: &[&str]) -> Vec<ResolvedChannel> {
        let options = ExpandOptions { override_channels: true, declared: true, nodefaults: false, root_dir: self.home.path(), host: None };
        expand(names, settings, options).unwrap().channels
    }

    /// `name=version` of all records that a recursive query for `foo` finds, sorted; or the error's text.
    async fn query<const N: usize>(&self, variables: [(&str, &str); N], names: &[&str]) -> Result<Vec<String>, Error> {
        let (settings, session) = self.open(variables);
        let channels = self.channels(&settings, names);
        let spec = MatchSpec::from(PackageName::new_unchecked("foo"));
        let repodata = session.repodata(&channels, &BOTH, &[spec], true).await?;
        let mut found: Vec<String> = repodata
            .iter()
            .flat_map(RepoData::iter)
            .map(|record| format!("{}={}", record.package_record.name.as_normalized(), record.package_record.version))
            .collect();
        found.sort();
        Ok(found)
    }
}

/// foo (linux-64) needs bar (noarch); baz is there for nobody.
fn repodata(subdir: &str) -> String {
    let package = |name: &str, depends: serde_json::Value| json!({"build": "0", "build_number": 0, "depends": depends, "md5": "0".repeat(32), "sha256": "0".repeat(64), "name": name, "version": "1.0", "size": 1, "subdir": subdir, "timestamp": 1600000000});
    let packages = if subdir == "noarch" {
        json!({"bar-1.0-0.conda": package("bar", json!([])), "baz-1.0-0.conda": package("baz", json!([]))})
    } else {
        json!({"foo-1.0-0.conda": package("foo", json!(["bar"]))})
    };
    json!({"info": {"subdir": subdir}, "packages": {}, "packages.conda": packages, "repodata_version": 1}).to_string()
}

fn zst(text: &[u8]) -> Vec<u8> {
    let mut encoder = zstd::stream::write::Encoder::new(Vec::new(), 1).unwrap();
    encoder.write_all(text).unwrap();
    encoder.finish().unwrap()
}

fn serve(server: &TestServer, channel: &str) {
    for subdir in ["linux-64", "noarch"] {
        server.put(&format!("/{channel}/{subdir}/repodata.json"), repodata(subdir));
    }
}

fn folder_channel(world: &World, subdirs: &[(&str, &[u8])]) {
    for (name, bytes) in subdirs {
        let path = world.home.path().join("chan").join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, bytes).unwrap();
    }
}

fn good() -> Vec<String> {
    vec!["bar=1.0".to_owned(), "foo=1.0".to_owned()]
}

#[tokio::test]
async fn plain_packed_and_sharded_repodata_give_the_same() {
    let server = TestServer::new();
    serve(&server, "plain");
    for subdir in ["linux-64", "noarch"] {
        server.put(&format!("/packed/{subdir}/repodata.json.zst"), zst(repodata(subdir).as_bytes()));
    }
    let world = World::new("");
    assert_eq!(world.query([], &[&server.url("/plain")]).await.unwrap(), good());
    assert_eq!(world.query([], &[&server.url("/packed")]).await.unwrap(), good());
    assert_eq!(server.count("GET", "/packed/linux-64/repodata.json"), 0);
    let labels = world.notes.downloads.lock().unwrap().clone();
    assert!(labels.contains(&"plain/linux-64".to_owned()) && labels.contains(&"packed/noarch".to_owned()), "{labels:?}");
}

/// JSON as MessagePack; a text `bytes:HEX` becomes binary.
fn msgpack(value: &serde_json::Value) -> Vec<u8> {
    fn put(value: &serde_json::Value, out: &mut Vec<u8>) {
        let length = |out: &mut Vec<u8>, code: u8, len: usize| {
            out.push(code);
            out.extend((len as u32).to_be_bytes());
        };
        match value {
            serde_json::Value::Null => out.push(0xc0),
            serde_json::Value::Bool(flag) => out.push(0xc2 + u8::from(*flag)),
            serde_json::Value::Number(number) => {
                out.push(0xcf);
                out.extend(number.as_u64().unwrap().to_be_bytes());
            }
            serde_json::Value::String(text) => match text.strip_prefix("bytes:") {
                Some(hex) => {
                    length(out, 0xc6, hex.len() / 2);
                    out.extend((0..hex.len()).step_by(2).map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap()));
                }
                None => {
                    length(out, 0xdb, text.len());
                    out.extend(text.as_bytes());
                }
            },
            serde_json::Value::Array(items) => {
                length(out, 0xdd, items.len());
                items.iter().for_each(|item| put(item, out));
            }
            serde_json::Value::Object(items) => {
                length(out, 0xdf, items.len());
                for (name, item) in items {
                    put(&json!(name), out);
                    put(item, out);
                }
            }
        }
    }
    let mut out = Vec::new();
    put(value, &mut out);
    out
}

fn hex_sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Puts a channel's records into shards (CEP 16), one for each package name.
fn serve_shards(server: &TestServer, channel: &str) {
    for subdir in ["linux-64", "noarch"] {
        let whole: serde_json::Value = serde_json::from_str(&repodata(subdir)).unwrap();
        let mut shards = serde_json::Map::new();
        for (file, record) in whole["packages.conda"].as_object().unwrap() {
            let mut record = record.clone();
            for hash in ["md5", "sha256"] {
                let hex = record[hash].as_str().unwrap().to_owned();
                record[hash] = json!(format!("bytes:{hex}"));
            }
            let shard = zst(&msgpack(&json!({"packages": {}, "packages.conda": {file: record}, "removed": []})));
            let hash = hex_sha256(&shard);
            server.put(&format!("/{channel}/{subdir}/shards/{hash}.msgpack.zst"), shard);
            shards.insert(record["name"].as_str().unwrap().to_owned(), json!(format!("bytes:{hash}")));
        }
        let index = json!({"info": {"subdir": subdir, "base_url": "./", "shards_base_url": "./shards/", "created_at": "2026-01-01T00:00:00Z"}, "shards": shards});
        server.put(&format!("/{channel}/{subdir}/repodata_shards.msgpack.zst"), zst(&msgpack(&index)));
    }
}

#[tokio::test]
async fn sharded_repodata_is_preferred_and_cached() {
    let server = TestServer::new();
    serve_shards(&server, "c");
    let world = World::new("");
    assert_eq!(world.query([], &[&server.url("/c")]).await.unwrap(), good());
    assert_eq!(server.count("GET", ".json") + server.count("GET", ".json.zst"), 0);
    // Only the shards of what was asked for: foo and its dependency bar, not baz.
    assert_eq!(server.seen().iter().filter(|seen| seen.path.contains("/shards/")).count(), 2);
    assert_eq!(world.query([("CONDA_OFFLINE", "1")], &[&server.url("/c")]).await.unwrap(), good());
    let (settings, session) = world.open([("CONDA_OFFLINE", "1")]);
    let channels = world.channels(&settings, &[&server.url("/c")]);
    let error = session.records(&channels, &BOTH, &PackageName::new_unchecked("baz")).await.unwrap_err();
    assert_eq!(error.exit_code(), 7);
    assert!(error.to_string().starts_with("the records of `baz` are not in the cache, and the network is off"), "{error}");
    let whole = World::new("repodata_use_shards: false\n").query([], &[&server.url("/c")]).await.unwrap_err();
    assert!(whole.to_string().contains("there is no channel"), "{whole}");
}

#[tokio::test]
async fn damaged_shards_are_errors_that_name_the_channel() {
    for damage in ["index", "shard", "swapped"] {
        let server = TestServer::new();
        serve_shards(&server, "c");
        match damage {
            "index" => server.fault("/c/noarch/repodata_shards.msgpack.zst", Fault::Body(b"<html>log in</html>".to_vec())),
            "shard" => server.fault("/c/noarch/shards/", Fault::Body(b"<html>log in</html>".to_vec())),
            _ => {
                server.fault("/c/noarch/shards/", Fault::Body(zst(&msgpack(&json!({"packages": {}, "packages.conda": {}, "removed": []})))))
            }
        };
        let world = World::new("");
        let error = world.query([], &[&server.url("/c")]).await.expect_err(damage);
        assert_eq!(error.exit_code(), 7, "{damage}: {error}");
        assert!(error.to_string().contains(&server.url("/c")) && error.to_string().contains("no repodata"), "{damage}: {error}");
        server.heal();
        assert_eq!(world.query([], &[&server.url("/c")]).await.unwrap(), good(), "{damage}");
    }
}

#[tokio::test]
async fn a_second_run_takes_repodata_from_the_cache_also_offline() {
    let server = TestServer::new();
    serve(&server, "c");
    let url = server.url("/c");
    let world = World::new("");
    let error = world.query([("CONDA_OFFLINE", "1")], &[&url]).await.unwrap_err();
    assert_eq!(error.exit_code(), 7);
    assert!(
        error.to_string().contains("is not in the cache, and the network is off") && error.to_string().contains(&format!("{url}/linux-64")),
        "{error}"
    );
    assert!(server.seen().is_empty());
    assert_eq!(world.query([], &[&url]).await.unwrap(), good());
    let before = server.seen().len();
    assert_eq!(world.query([("CONDA_OFFLINE", "1")], &[&url]).await.unwrap(), good());
    assert_eq!(server.seen().len(), before);
}

#[tokio::test]
async fn errors_that_pass_are_waited_out() {
    for fault in [
        Fault::Status { code: 503, times: 2, headers: Vec::new() },
        Fault::Status { code: 429, times: 1, headers: Vec::new() },
        Fault::Hangup { times: 2 },
    ] {
        let server = TestServer::new();
        serve(&server, "c");
        server.fault("/c/noarch/repodata.json", fault.clone());
        let world = World::new("repodata_use_shards: false\nrepodata_use_zst: false\n");
        assert_eq!(world.query([], &[&server.url("/c")]).await.unwrap(), good(), "{fault:?}");
    }
}

#[tokio::test]
async fn a_body_that_breaks_off_is_fetched_again() {
    let server = TestServer::new();
    serve(&server, "c");
    server.fault("/c/linux-64/repodata.json", Fault::Truncate { after: 20, times: 1 });
    let world = World::new("repodata_use_shards: false\nrepodata_use_zst: false\n");
    assert_eq!(world.query([], &[&server.url("/c")]).await.unwrap(), good());
}

#[tokio::test]
async fn a_server_is_given_the_time_it_asks_for() {
    let server = TestServer::new();
    server.put("/file", "text");
    server.fault("/file", Fault::Status { code: 429, times: 1, headers: vec![("Retry-After".to_owned(), "1".to_owned())] });
    let (_, session) = World::new("").open([]);
    let begin = Instant::now();
    let text = session.fetch_text(&server.url("/file").parse().unwrap()).await.unwrap();
    assert_eq!(text.bytes, b"text");
    assert!(begin.elapsed() >= Duration::from_secs(1));
    assert_eq!(server.count("GET", "/file"), 2);
}

#[tokio::test]
async fn a_channel_that_is_down_is_named_with_the_reason() {
    let up = TestServer::new();
    serve(&up, "good");
    let world = World::new("repodata_use_shards: false\n");
    let down = format!("http://127.0.0.1:{}/gone", TestServer::closed_port());
    let error = world.query([], &[&up.url("/good"), &down]).await.unwrap_err();
    assert_eq!(error.exit_code(), 7);
    let text = error.to_string();
    assert!(text.starts_with(&format!("the channel `{down}` does not answer: `{down}/")), "{text}");
    assert!(text.contains("refused"), "{text}");
    let down = TestServer::new();
    down.fault("/", Fault::Status { code: 503, times: 1000, headers: Vec::new() });
    let text = world.query([], &[&down.url("/c")]).await.unwrap_err().to_string();
    assert!(text.contains("does not answer") && text.contains("503"), "{text}");
}

#[tokio::test]
async fn a_slow_server_times_out() {
    let server = TestServer::new();
    serve(&server, "c");
    server.fault("/c/", Fault::Slow(Duration::from_secs(3)));
    let world = World::new("remote_read_timeout_secs: 0.2\n");
    let begin = Instant::now();
    let error = world.query([], &[&server.url("/c")]).await.unwrap_err();
    assert!(begin.elapsed() < Duration::from_secs(3), "{:?}", begin.elapsed());
    assert!(error.to_string().contains("timed out") || error.to_string().contains("timeout"), "{error}");
}

#[tokio::test]
async fn credentials_reach_the_server_and_no_message() {
    let world = World::new("repodata_use_shards: false\n");
    let server = TestServer::new();
    serve(&server, "c");
    // user:pa/ss
    server.guard(Guard::Basic("dXNlcjpwYS9zcw==".to_owned()));
    let refused = world.query([], &[&server.url("/c")]).await.unwrap_err();
    assert!(refused.to_string().contains("refuses access") && refused.hints()[0].contains("tare auth login 127.0.0.1"), "{refused}");
    let with_password = format!("http://user:pa%2Fss@127.0.0.1:{}/c", server.port());
    assert_eq!(world.query([], &[&with_password]).await.unwrap(), good());
    let wrong = format!("http://user:geheim@127.0.0.1:{}/c", server.port());
    let error = world.query([], &[&wrong]).await.unwrap_err();
    assert!(!format!("{error:?}").contains("geheim"), "{error:?}");

    let server = TestServer::new();
    serve(&server, "c");
    server.guard(Guard::Token("tk-geheim".to_owned()));
    let world = World::new("repodata_use_shards: false\n");
    let (settings, session) = world.open([]);
    let channels = world.channels(&settings, &[&server.url("/t/tk-geheim/c")]);
    let records = session.records(&channels, &BOTH, &PackageName::new_unchecked("foo")).await.unwrap();
    assert_eq!(records.len(), 1);
    assert!(!format!("{records:?}").contains("geheim"), "{records:?}");
    assert_eq!(records[0].url.as_str(), server.url("/c/linux-64/foo-1.0-0.conda"));
    // The same client downloads packages, and finds the token again.
    server.put("/c/linux-64/foo-1.0-0.conda", "x");
    assert_eq!(session.fetch_text(&records[0].url).await.unwrap().bytes, b"x");
}

#[tokio::test]
async fn stored_credentials_are_used_and_can_be_removed() {
    let world = World::new("repodata_use_shards: false\n");
    let settings = world.settings([]);
    let login = |secret| super::super::auth::login(&settings, "http://127.0.0.1:8080/x", &secret, world.notes.as_ref());
    let stored = login(super::super::auth::Secret::Token("geheim".to_owned())).unwrap();
    assert_eq!(stored.host, "127.0.0.1");
    let server = TestServer::new();
    serve(&server, "c");
    server.guard(Guard::Bearer("geheim".to_owned()));
    assert_eq!(world.query([], &[&server.url("/c")]).await.unwrap(), good());
    let status = super::super::auth::status(&settings, world.notes.as_ref()).unwrap();
    assert_eq!(status.len(), 1);
    assert!(!format!("{status:?}").contains("geheim"));

    login(super::super::auth::Secret::CondaToken("ct".to_owned())).unwrap();
    server.guard(Guard::Token("ct".to_owned()));
    let (_, session) = world.open([]);
    assert!(session.fetch_text(&server.url("/c/noarch/repodata.json").parse().unwrap()).await.is_ok());

    super::super::auth::logout(&settings, "127.0.0.1", world.notes.as_ref()).unwrap();
    assert_eq!(super::super::auth::logout(&settings, "127.0.0.1", world.notes.as_ref()).unwrap_err().exit_code(), 2);
    let (_, session) = world.open([]);
    assert!(session.fetch_text(&server.url("/c/noarch/repodata.json").parse().unwrap()).await.is_err());
    for bad in [
        super::super::auth::Secret::Token(String::new()),
        super::super::auth::Secret::Token("a\nb".to_owned()),
        super::super::auth::Secret::CondaToken("a/b".to_owned()),
        super::super::auth::Secret::Basic { user: "a:b".to_owned(), password: "x".to_owned() },
    ] {
        assert_eq!(login(bad).unwrap_err().exit_code(), 2);
    }
    for bad in ["", "a b", "http://u:p@host", "://"] {
        assert_eq!(super::super::auth::host_of(bad).unwrap_err().exit_code(), 2, "{bad}");
    }
}

#[tokio::test]
async fn netrc_and_the_rattler_file_are_read() {
    let world = World::new("repodata_use_shards: false\n");
    let netrc = world.home.path().join("my-netrc");
    std::fs::write(&netrc, "machine 127.0.0.1 login user password pa/ss\n").unwrap();
    let server = TestServer::new();
    serve(&server, "c");
    server.guard(Guard::Basic("dXNlcjpwYS9zcw==".to_owned()));
    let netrc = netrc.display().to_string();
    assert_eq!(world.query([("NETRC", &netrc)], &[&server.url("/c")]).await.unwrap(), good());
    let file = world.home.path().join("auth.json");
    std::fs::write(&file, r#"{"127.0.0.1": {"BearerToken": "geheim"}}"#).unwrap();
    server.guard(Guard::Bearer("geheim".to_owned()));
    let (_, session) = world.open([("RATTLER_AUTH_FILE", &file.display().to_string()), ("NETRC", &netrc)]);
    assert!(session.fetch_text(&server.url("/c/noarch/repodata.json").parse().unwrap()).await.is_ok());
    std::fs::write(&file, "{\"a\": geheim").unwrap();
    let settings = world.settings([("RATTLER_AUTH_FILE", &file.display().to_string())]);
    let error = Session::open(&settings, world.notes.clone()).unwrap_err();
    assert!(error.to_string().contains("auth.json") && !error.to_string().contains("geheim"), "{error}");
    std::fs::write(world.home.path().join("my-netrc"), "machine geheim geheim geheim").unwrap();
    let _ = world.open([("NETRC", &netrc)]);
    assert!(!world.notes.lines.lock().unwrap().join("\n").contains("geheim"));
}

#[tokio::test]
async fn mirrors_are_asked_in_the_channels_place_and_replaced_when_down() {
    let up = TestServer::new();
    serve(&up, "mirror");
    let down = TestServer::new();
    down.fault("/", Fault::Status { code: 502, times: 1000, headers: Vec::new() });
    let world = World::new(&format!(
        "repodata_use_shards: false\nrepodata_use_zst: false\nmirrors:\n  'http://channel.invalid/c': ['{}', '{}']\n",
        down.url("/mirror"),
        up.url("/mirror")
    ));
    assert_eq!(world.query([], &["http://channel.invalid/c"]).await.unwrap(), good());
    assert!(!down.seen().is_empty());
}

#[tokio::test]
async fn redirects_are_followed() {
    let server = TestServer::new();
    serve(&server, "real");
    server.fault("/c/", Fault::Redirect(server.url("/real/")));
    let world = World::new("repodata_use_shards: false\n");
    assert_eq!(world.query([], &[&server.url("/c")]).await.unwrap(), good());
}

#[tokio::test]
async fn a_proxy_is_used_for_its_scheme() {
    let proxy = TestServer::new();
    for subdir in ["linux-64", "noarch"] {
        proxy.put(&format!("http://channel.invalid/c/{subdir}/repodata.json"), repodata(subdir));
    }
    let world = World::new(&format!("repodata_use_shards: false\nproxy_servers: {{http: '127.0.0.1:{}'}}\n", proxy.port()));
    assert_eq!(world.query([], &["http://channel.invalid/c"]).await.unwrap(), good());
}

#[tokio::test]
async fn missing_subdirs_and_missing_channels() {
    let world = World::new("repodata_use_shards: false\n");
    let server = TestServer::new();
    server.put("/only-noarch/noarch/repodata.json", repodata("noarch"));
    server.put("/only-linux/linux-64/repodata.json", repodata("linux-64"));
    assert_eq!(world.query([], &[&server.url("/only-noarch")]).await.unwrap(), Vec::<String>::new());
    assert_eq!(world.query([], &[&server.url("/only-linux"), &server.url("/only-noarch")]).await.unwrap(), good());
    assert!(world.notes.lines.lock().unwrap().iter().any(|line| line.contains("has no `noarch`")));
    let error = world.query([], &[&server.url("/only-noarch"), &server.url("/neither")]).await.unwrap_err();
    assert_eq!(error.exit_code(), 7);
    assert!(error.to_string().starts_with(&format!("there is no channel `{}`", server.url("/neither"))), "{error}");
}

/// Bodies that are no repodata, and what is made of them.
#[tokio::test]
async fn malformed_repodata_over_http_is_an_error_that_names_it_and_is_not_cached() {
    let html = b"<!DOCTYPE html><html>log in</html>".to_vec();
    let cases: Vec<(&str, Vec<u8>)> = vec![
        ("repodata.json", html.clone()),
        ("repodata.json", Vec::new()),
        ("repodata.json", b"{".to_vec()),
        ("repodata.json", b"[]".to_vec()),
        ("repodata.json", b"null".to_vec()),
        ("repodata.json", b"\"text\"".to_vec()),
        ("repodata.json", b"{\"packages\": []}".to_vec()),
        ("repodata.json", b"\x00\xff\xfe\x01".to_vec()),
        ("repodata.json", repodata("noarch").into_bytes()[..200].to_vec()),
        ("repodata.json.zst", html),
        ("repodata.json.zst", zst(repodata("noarch").as_bytes())[..60].to_vec()),
        ("repodata.json.zst", zst(b"{\"packages\": 1}")),
        ("repodata.json.zst", Vec::new()),
    ];
    for (file, body) in cases {
        let server = TestServer::new();
        server.put("/c/linux-64/repodata.json", repodata("linux-64"));
        server.put(&format!("/c/noarch/{file}"), body.clone());
        let world = World::new("repodata_use_shards: false\n");
        let error = world.query([], &[&server.url("/c")]).await.expect_err(&format!("{file} {body:?}"));
        let text = error.to_string();
        assert_eq!(error.exit_code(), 7, "{text}");
        assert!(
            text.contains(&server.url("/c/noarch")) && text.contains("no repodata"),
            "{file} {:?}: {text}",
            String::from_utf8_lossy(&body)
        );
        assert!(!error.hints().is_empty());
        // Repaired on the server, it works at once.
        let good_body = if file.ends_with("zst") { zst(repodata("noarch").as_bytes()) } else { repodata("noarch").into_bytes() };
        server.put(&format!("/c/noarch/{file}"), good_body);
        assert_eq!(world.query([], &[&server.url("/c")]).await.unwrap(), good(), "after {file} {body:?}");
    }
}

#[tokio::test]
async fn malformed_folders_are_errors_that_name_the_file() {
    let truncated = zst(repodata("noarch").as_bytes());
    let cases: Vec<(&str, &[u8])> = vec![
        ("noarch/repodata.json", b""),
        ("noarch/repodata.json", b"<html>"),
        ("noarch/repodata.json", b"{\"packages\": {\"x\": "),
        ("noarch/repodata.json", b"{\"packages.conda\": 7}"),
        ("noarch/repodata.json.zst", b"garbage"),
        ("noarch/repodata.json.zst", &truncated[..40]),
    ];
    for (file, body) in cases {
        let world = World::new("");
        folder_channel(&world, &[(file, body)]);
        let error = world.query([], &["./chan"]).await.expect_err(file);
        assert!(error.to_string().contains(&format!("chan/{file}")), "{error}");
        assert_eq!(error.exit_code(), 1, "{error}");
    }
}

#[tokio::test]
async fn records_that_are_wrong_in_themselves() {
    let base = json!({"build": "0", "build_number": 0, "depends": [], "name": "foo", "version": "1.0", "subdir": "noarch"});
    let mut outcomes = String::new();
    for (what, change) in [
        ("timestamp in seconds", json!({"timestamp": 1600000000})),
        ("timestamp in milliseconds", json!({"timestamp": 1600000000000u64})),
        ("no hashes", json!({})),
        ("unknown field", json!({"shiny": {"new": true}})),
        ("version missing", json!({"version": null})),
        ("version is no version", json!({"version": "not a version!"})),
        ("depends is text", json!({"depends": "bar"})),
        ("hash too short", json!({"sha256": "abc"})),
        ("build number is text", json!({"build_number": "one"})),
        ("bad dependency", json!({"depends": ["bar >=1,<"]})),
        ("negative size", json!({"size": -1})),
    ] {
        let mut record = base.clone();
        record.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
        let text = json!({"packages": {}, "packages.conda": {"foo-1.0-0.conda": record}}).to_string();
        let world = World::new("");
        folder_channel(&world, &[("noarch/repodata.json", text.as_bytes())]);
        let outcome = match world.query([], &["./chan"]).await {
            Ok(found) => format!("taken {found:?}"),
            Err(error) => {
                assert!(!error.hints().is_empty() && error.to_string().contains("chan"), "{error}");
                "refused".to_owned()
            }
        };
        outcomes.push_str(&format!("{what}: {outcome}\n"));
    }
    insta::assert_snapshot!(outcomes, @r#"
    timestamp in seconds: taken ["foo=1.0"]
    timestamp in milliseconds: taken ["foo=1.0"]
    no hashes: taken ["foo=1.0"]
    unknown field: taken ["foo=1.0"]
    version missing: refused
    version is no version: refused
    depends is text: refused
    hash too short: refused
    build number is text: refused
    bad dependency: taken ["foo=1.0"]
    negative size: refused
    "#);
}

#[tokio::test]
async fn folders_need_neither_network_nor_tls() {
    let world = World::new("");
    folder_channel(
        &world,
        &[("linux-64/repodata.json.zst", &zst(repodata("linux-64").as_bytes())), ("noarch/repodata.json", repodata("noarch").as_bytes())],
    );
    assert_eq!(world.query([("CONDA_OFFLINE", "1")], &["./chan"]).await.unwrap(), good());
    // Twice: the unpacked copy is used again.
    assert_eq!(world.query([("CONDA_OFFLINE", "1")], &["./chan"]).await.unwrap(), good());
    let (settings, session) = world.open([]);
    let names = session.names(&world.channels(&settings, &["./chan"]), &BOTH).await.unwrap();
    assert_eq!(names.iter().map(PackageName::as_normalized).collect::<Vec<_>>(), ["bar", "baz", "foo"]);
}

#[tokio::test]
async fn settings_that_cannot_work_are_told_at_once() {
    let home = tempfile::tempdir().unwrap();
    let pem = home.path().join("ca.pem");
    std::fs::write(&pem, "no certificate").unwrap();
    for condarc in [
        format!("ssl_verify: {}\n", pem.display()),
        "ssl_verify: /no/such.pem\n".to_owned(),
        "ssl_verify: /\n".to_owned(),
        "proxy_servers: {https: 'socks5://x:1'}\n".to_owned(),
        "proxy_servers: {https: 'http://'}\n".to_owned(),
        "mirrors: {'http://[::1': [x]}\n".to_owned(),
        "mirrors: {a: ['not a url']}\n".to_owned(),
    ] {
        let world = World::new(&condarc);
        let error = Session::open(&world.settings([]), world.notes.clone()).expect_err(&condarc);
        assert_eq!(error.exit_code(), 2, "{error}");
    }
    let world = World::new("ssl_verify: false\n");
    Session::open(&world.settings([]), world.notes.clone()).unwrap();
    assert!(world.notes.lines.lock().unwrap()[0].contains("TLS certificates are not checked"));
}

#[tokio::test]
async fn texts_that_cannot_be_fetched() {
    let server = TestServer::new();
    let (_, session) = World::new("").open([]);
    let fetch = |text: String| {
        let session = session.clone();
        async move { session.fetch_text(&text.parse().unwrap()).await.unwrap_err() }
    };
    let error = fetch(server.url("/t/geheim/none")).await;
    assert_eq!(error.exit_code(), 7);
    assert!(error.to_string().contains("404") && !error.to_string().contains("geheim"), "{error}");
    assert_eq!(fetch("ftp://host/x".to_owned()).await.exit_code(), 2);
    assert_eq!(fetch("file:///no/such/file".to_owned()).await.exit_code(), 1);
    server.put("/cut", vec![b'x'; 1000]).fault("/cut", Fault::Truncate { after: 10, times: 100 });
    assert_eq!(fetch(server.url("/cut")).await.exit_code(), 7);
    let (_, offline) = World::new("offline: true\n").open([]);
    let error = offline.fetch_text(&server.url("/x").parse().unwrap()).await.unwrap_err();
    assert!(error.to_string().contains("the network is off"), "{error}");
}

#[tokio::test]
async fn real_channels_are_read_from_folders_and_over_http() {
    let data =
        std::env::var_os("TARE_SHARED_DATA").map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared/data"), PathBuf::from);
    let source = data.join("channels/pytorch");
    if !source.is_dir() {
        std::io::stderr().write_all(b"skipped: no shared data\n").unwrap();
        return;
    }
    let world = World::new("repodata_use_shards: false\n");
    let (settings, session) = world.open([]);
    let name = PackageName::new_unchecked("pytorch");
    let from_folder = session.records(&world.channels(&settings, &[&source.display().to_string()]), &BOTH, &name).await.unwrap();
    let server = TestServer::new();
    server.mount("/pytorch", &source);
    let over_http = session.records(&world.channels(&settings, &[&server.url("/pytorch")]), &BOTH, &name).await.unwrap();
    assert!(from_folder.len() > 100, "{}", from_folder.len());
    assert_eq!(from_folder.len(), over_http.len());
    assert_eq!(from_folder[0].package_record, over_http[0].package_record);
    assert!(over_http[0].url.as_str().starts_with(&server.url("/pytorch/linux-64/")));
}
