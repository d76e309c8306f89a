//! Side by side with rattler's own command line tool, on the same cached data: start-up, planning, creating, changing, reading a large channel.
//!
//! ```text
//! cargo install rattler-bin --version 0.5.14 --locked
//! cargo bench --bench peers                       # every row; or name rows: start solve create update channel
//! ```
//! `RATTLER` names the other tool (default: `rattler` on PATH), `TARE_BENCH_DIR` a folder for the generated channels (several GB, kept between
//! runs), `TARE_SHARED_DATA` the recorded repodata that the `solve` row needs. Runs alternate between the tools; each figure is the median, so that
//! the ratio of one line comes from one stretch of time. Prints Markdown.

#[path = "../tests/it/common/channel.rs"]
#[allow(dead_code, reason = "the benches use a part of the test channels")]
mod channel;

use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use channel::{Channel, Package};
use rattler_conda_types::{PackageRecord, Shard};
use serde_json::{Value, json};
use sha2::Digest as _;

/// What one run took.
#[derive(Clone, Copy, Debug)]
struct Cost {
    wall: f64,
    cpu: f64,
    peak_mib: f64,
}

struct Tool {
    name: &'static str,
    program: PathBuf,
    home: PathBuf,
}

impl Tool {
    fn command(&self, args: &[String]) -> Command {
        let mut command = Command::new(&self.program);
        command
            .args(args)
            .env_clear()
            .env("PATH", "/usr/local/bin:/usr/bin:/bin")
            .env("HOME", &self.home)
            .env("SHELL", "/bin/bash")
            .env("CONDA_OVERRIDE_CUDA", "12.4")
            .env("RATTLER_CACHE_DIR", self.home.join("cache"))
            .env("TARE_CACHE_DIR", self.home.join("cache"))
            .env("TARE_ROOT", self.home.join("envs"))
            .current_dir(&self.home)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped());
        if let Ok(python) = std::env::var("TARE_HOST_PYTHON") {
            command.env("TARE_HOST_PYTHON", python);
        }
        command
    }

    #[allow(clippy::zombie_processes, reason = "`wait` reaps it: only the system call tells the peak memory")]
    /// Runs to the end; a failure ends the bench with what the tool said.
    fn run(&self, args: &[String]) -> Cost {
        let start = Instant::now();
        let mut child = self.command(args).process_group(0).spawn().unwrap_or_else(|error| panic!("{}: {error}", self.program.display()));
        let stderr = child.stderr.take().expect("a pipe");
        let reader = std::thread::spawn(move || BufReader::new(stderr).lines().map_while(Result::ok).collect::<Vec<_>>());
        let (status, usage) = wait(&child);
        let wall = start.elapsed().as_secs_f64();
        let said = reader.join().expect("a reader");
        assert!(status == 0, "`{} {}` ended with status {status}:\n{}", self.name, args.join(" "), said.join("\n"));
        let seconds = |time: libc::timeval| time.tv_sec as f64 + time.tv_usec as f64 / 1e6;
        Cost { wall, cpu: seconds(usage.ru_utime) + seconds(usage.ru_stime), peak_mib: usage.ru_maxrss as f64 / 1024.0 }
    }
}

/// The exit status and what the kernel counted.
fn wait(child: &Child) -> (i32, libc::rusage) {
    let mut status = 0;
    // SAFETY: both pointers are to live values of the right type, and the child is ours and not waited for elsewhere.
    let (usage, got) = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        let got = libc::wait4(child.id().cast_signed(), &raw mut status, 0, &raw mut usage);
        (usage, got)
    };
    assert!(got > 0, "the child is gone");
    (status, usage)
}

fn strings<const N: usize>(args: [&str; N]) -> Vec<String> {
    args.iter().map(ToString::to_string).collect()
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn medians(costs: &[Cost]) -> Cost {
    let of = |pick: fn(&Cost) -> f64| median(costs.iter().map(pick).collect());
    Cost { wall: of(|cost| cost.wall), cpu: of(|cost| cost.cpu), peak_mib: of(|cost| cost.peak_mib) }
}

/// Runs `ours` and `theirs` in turn, each after its preparation, and prints one line of the table.
fn row(
    what: &str,
    times: usize,
    tools: (&Tool, &Tool),
    mut ours: impl FnMut(&Tool) -> Vec<String>,
    mut theirs: impl FnMut(&Tool) -> Vec<String>,
) {
    let (mut our_costs, mut their_costs) = (Vec::new(), Vec::new());
    for _ in 0..times {
        let args = ours(tools.0);
        our_costs.push(tools.0.run(&args));
        let args = theirs(tools.1);
        their_costs.push(tools.1.run(&args));
    }
    let (our, their) = (medians(&our_costs), medians(&their_costs));
    let milli = |seconds: f64| format!("{:.1}", seconds * 1e3);
    println!(
        "| {what} | {} | {} | **{:.2}** | {} | {} | {:.2} | {:.0} | {:.0} | {:.2} |",
        milli(our.wall),
        milli(their.wall),
        our.wall / their.wall,
        milli(our.cpu),
        milli(their.cpu),
        our.cpu / their.cpu,
        our.peak_mib,
        their.peak_mib,
        our.peak_mib / their.peak_mib
    );
}

/// One line for something only tare does.
fn alone(what: &str, times: usize, tool: &Tool, mut args: impl FnMut(&Tool) -> Vec<String>) {
    let costs: Vec<Cost> = (0..times)
        .map(|_| {
            let args = args(tool);
            tool.run(&args)
        })
        .collect();
    let cost = medians(&costs);
    println!("| {what} | {:.1} | | | {:.1} | | | {:.0} | | |", cost.wall * 1e3, cost.cpu * 1e3, cost.peak_mib);
}

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }
    fn bytes(&mut self, count: usize) -> Vec<u8> {
        (0..count.div_ceil(8)).flat_map(|_| self.next().to_le_bytes()).take(count).collect()
    }
}

const PACKAGES: usize = 300;

/// 300 packages with about 30,000 files and 2 GB: 180 noarch Python packages, 120 with libraries, of which a third mention their prefix.
fn big_environment(folder: &Path) -> Channel {
    let done = folder.join("complete");
    if !done.exists() {
        let _ = std::fs::remove_dir_all(folder);
    }
    let mut channel = Channel::new(folder);
    let mut random = Random(11);
    let python =
        Package::new("python", "3.11.9").build("0_cpython").file("bin/python3.11", "#!/bin/sh\nexec /usr/bin/env python3 \"$@\"\n");
    channel.add(&python.symlink("bin/python", "python3.11"));
    for number in 0..PACKAGES - 1 {
        let name = format!("part-{number:03}");
        let versions: &[&str] = if number == 7 { &["1.0", "2.0"] } else { &["1.0"] };
        for version in versions {
            let mut package = Package::new(&name, version);
            if number % 5 < 3 {
                package = package.noarch_python(&[]).depends(&["python >=3.11"]);
                for file in 0..100 {
                    // A few KB of valid Python: what is compiled is compiled for real.
                    let body: String =
                        (0..60).map(|line| format!("def f{line}(x):\n    return x * {} + {line}\n", random.next() % 1000)).collect();
                    package = package.file(&format!("site-packages/part_{number:03}/module_{file}.py"), body);
                }
            } else {
                package = package.depends(&["python >=3.11"]);
                for file in 0..100 {
                    let mut bytes = random.bytes(85 * 1024);
                    bytes.extend(std::iter::repeat_n(0u8, 80 * 1024));
                    package = package.file(&format!("lib/part-{number:03}/data_{file}.so"), bytes);
                }
                if number % 3 == 0 {
                    package = package.prefixed(&format!("bin/part-{number:03}"), "#!{PREFIX}/bin/python\nprint('x')\n");
                }
            }
            channel.add(&package);
        }
    }
    let depends: Vec<String> = (0..PACKAGES - 1).filter(|number| *number != 7).map(|number| format!("part-{number:03}")).collect();
    let depends: Vec<&str> = depends.iter().map(String::as_str).chain(["part-007"]).collect();
    channel.add(&Package::new("everything", "1.0").depends(&depends));
    std::fs::write(done, "").expect("a mark");
    channel
}

fn record(name: &str, version: &str, number: usize, depends: &[String]) -> Value {
    let digest = sha2::Sha256::digest(format!("{name}{version}{number}"));
    json!({
        "build": format!("py311h{:07x}_{}", digest[0] as u64 * 65_537 % 0xfff_ffff, number % 4), "build_number": number % 4, "name": name, "version": version,
        "depends": depends, "constrains": [], "license": "BSD-3-Clause", "md5": channel::hex(&digest[..16]), "sha256": channel::hex(&digest),
        "size": 100_000 + number, "subdir": "linux-64", "timestamp": 1_700_000_000_000_u64 + number as u64,
    })
}

const NAMES: usize = 24_000;
const RECORDS: usize = 600_000;

/// A channel of 600,000 records in 24,000 names, as one zst file and as shards.
fn big_channel(folder: &Path) {
    if folder.join("complete").exists() {
        return;
    }
    let _ = std::fs::remove_dir_all(folder);
    let (plain, sharded) = (folder.join("plain/linux-64"), folder.join("sharded/linux-64"));
    for path in [&plain, &sharded, &folder.join("plain/noarch"), &folder.join("sharded/noarch")] {
        std::fs::create_dir_all(path).expect("a folder");
    }
    let mut random = Random(5);
    let mut all: BTreeMap<String, Value> = BTreeMap::new();
    let mut shards = BTreeMap::new();
    for name_number in 0..NAMES {
        let name = format!("package-{name_number:05}");
        let mut shard = Shard::default();
        for number in 0..RECORDS / NAMES {
            let depends: Vec<String> = (0..1 + random.next() % 8)
                .filter_map(|_| {
                    let other = (random.next() as usize) % (name_number / 2 + 1);
                    (other != name_number).then(|| format!("package-{other:05} >={}.0,<{}.0a0", random.next() % 3, 4 + random.next() % 9))
                })
                .collect();
            let value = record(&name, &format!("{}.{}.{}", 3 + number / 10, number % 10, number % 3), number, &depends);
            let file = format!("{name}-{}-{}.conda", value["version"].as_str().unwrap_or(""), value["build"].as_str().unwrap_or(""));
            let parsed: PackageRecord = serde_json::from_value(value.clone()).expect("a record");
            shard.conda_packages.insert(file.parse().expect("a file name"), parsed);
            all.insert(file, value);
        }
        let bytes = zstd::encode_all(rmp_serde::to_vec_named(&shard).expect("a shard").as_slice(), 3).expect("a shard");
        let digest = sha2::Sha256::digest(&bytes);
        std::fs::write(sharded.join(format!("{}.msgpack.zst", channel::hex(&digest))), &bytes).expect("a shard");
        shards.insert(name, Bytes(digest.to_vec()));
    }
    let repodata = |subdir: &str, packages: &BTreeMap<String, Value>| {
        json!({ "info": { "subdir": subdir }, "packages": {}, "packages.conda": packages, "removed": [], "repodata_version": 1 })
            .to_string()
    };
    let write = |path: PathBuf, text: &[u8]| std::fs::write(path, zstd::encode_all(text, 3).expect("repodata")).expect("repodata");
    write(plain.join("repodata.json.zst"), repodata("linux-64", &all).as_bytes());
    write(folder.join("plain/noarch/repodata.json.zst"), repodata("noarch", &BTreeMap::new()).as_bytes());
    let index = |subdir: &str, shards: BTreeMap<String, Bytes>| {
        rmp_serde::to_vec_named(&Index {
            info: Info { subdir: subdir.into(), base_url: "./".into(), shards_base_url: "./".into() },
            shards,
        })
        .expect("an index")
    };
    write(sharded.join("repodata_shards.msgpack.zst"), &index("linux-64", shards));
    write(folder.join("sharded/noarch/repodata_shards.msgpack.zst"), &index("noarch", BTreeMap::new()));
    std::fs::write(folder.join("complete"), "").expect("a mark");
}

#[derive(serde::Serialize)]
struct Info {
    subdir: String,
    base_url: String,
    shards_base_url: String,
}

#[derive(serde::Serialize)]
struct Index {
    info: Info,
    shards: BTreeMap<String, Bytes>,
}

/// A byte string: what the sharded index holds hashes as (CEP 16).
struct Bytes(Vec<u8>);

impl serde::Serialize for Bytes {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_bytes(&self.0)
    }
}

/// A file server on loopback, ended when dropped.
struct Server(Child, String);

impl Server {
    fn start(folder: &Path) -> Self {
        let mut child = Command::new("python3")
            .args(["-u", "-m", "http.server", "0", "--bind", "127.0.0.1", "--protocol", "HTTP/1.1"])
            .current_dir(folder)
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("python3 for the file server");
        let mut line = String::new();
        BufReader::new(child.stdout.take().expect("a pipe")).read_line(&mut line).expect("a line");
        let port = line.split("port ").nth(1).and_then(|rest| rest.split(' ').next()).expect("a port").to_string();
        Server(child, format!("http://127.0.0.1:{port}"))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// ext4 passes over inodes that were freed in the last five seconds: creating files right after a removal would time that.
fn settle() {
    std::thread::sleep(Duration::from_secs(6));
}

fn remove(path: &Path) {
    if let Err(error) = std::fs::remove_dir_all(path) {
        assert!(error.kind() == std::io::ErrorKind::NotFound, "{}: {error}", path.display());
    }
}

fn prefix(tool: &Tool) -> PathBuf {
    tool.home.join("prefix")
}

fn shown(path: &Path) -> String {
    path.display().to_string()
}

fn ours(channel: &str, rest: &[&str], tool: &Tool) -> Vec<String> {
    let mut args = strings(["create", "--override-channels", "-c", channel, "-p"]);
    args.push(shown(&prefix(tool)));
    args.extend(rest.iter().map(ToString::to_string));
    args
}

fn theirs(channel: &str, rest: &[&str], tool: &Tool) -> Vec<String> {
    let mut args = strings(["create", "-c", channel, "-p"]);
    args.push(shown(&prefix(tool)));
    args.extend(rest.iter().map(ToString::to_string));
    args
}

fn solves(tools: (&Tool, &Tool), folder: &Path) {
    let data = std::env::var_os("TARE_SHARED_DATA").map_or_else(|| PathBuf::from("../shared/data"), PathBuf::from);
    let Ok(text) = std::fs::read_to_string(data.join("solves.json")) else {
        println!("skipped: no shared data for the solves");
        return;
    };
    let rows: Value = serde_json::from_str(&text).expect("solves.json");
    let rows = rows.as_array().or_else(|| rows["solves"].as_array()).expect("a list").clone();
    let texts = |value: &Value| {
        value.as_array().map_or_else(Vec::new, |list| list.iter().filter_map(|v| v.as_str().map(ToString::to_string)).collect())
    };
    for number in [0usize, 1, 6, 12, 13] {
        let row_data = &rows[number];
        let mut channels = Vec::new();
        for name in texts(&row_data["channels"]) {
            let target = folder.join("recorded").join(&name);
            for subdir in ["linux-64", "noarch"] {
                let file = target.join(subdir).join("repodata.json");
                if !file.exists() {
                    std::fs::create_dir_all(target.join(subdir)).expect("a folder");
                    let source = data.join("channels").join(&name).join(subdir).join("repodata.json.zst");
                    let json = match std::fs::read(&source) {
                        Ok(bytes) => zstd::decode_all(bytes.as_slice()).expect("repodata"),
                        Err(_) => json!({ "info": { "subdir": subdir }, "packages": {}, "packages.conda": {} }).to_string().into_bytes(),
                    };
                    std::fs::write(&file, json).expect("repodata");
                }
            }
            channels.push(format!("file://{}", target.display()));
        }
        let mut common: Vec<String> = vec!["--platform".into(), "linux-64".into(), "--dry-run".into()];
        for package in texts(&row_data["virtual_packages"]) {
            common.push("--virtual-package".into());
            common.push(package);
        }
        let priority = row_data["channel_priority"].as_str().unwrap_or("strict").to_string();
        common.extend(["--channel-priority".into(), priority]);
        // rattler-bin reads a build only in brackets.
        let specs: Vec<String> = texts(&row_data["specs"]).iter().map(|spec| bracketed(spec)).collect();
        let args = |first: &[&str], tool: &Tool| {
            let mut args: Vec<String> = first.iter().map(ToString::to_string).collect();
            for channel in &channels {
                args.extend(["-c".into(), channel.clone()]);
            }
            args.extend(["-p".into(), shown(&prefix(tool))]);
            args.extend(common.iter().cloned());
            args.extend(specs.iter().cloned());
            args
        };
        remove(&prefix(tools.0));
        remove(&prefix(tools.1));
        row(
            &format!("plan: {}", specs.join(" ").replace('*', "\\*")),
            5,
            tools,
            |tool| args(&["create", "--override-channels"], tool),
            |tool| args(&["create"], tool),
        );
    }
}

/// `name=version=build` as `name[version='…', build='…']`, which both tools read alike; any other spec as it is.
fn bracketed(spec: &str) -> String {
    match spec.split('=').collect::<Vec<_>>()[..] {
        [name, "*", build] => format!("{name}[build='{build}']"),
        [name, version, build] if ![name, version, build].contains(&"") => format!("{name}[version='{version}', build='{build}']"),
        _ => spec.to_string(),
    }
}

fn main() {
    let wanted: Vec<String> = std::env::args().skip(1).filter(|arg| !arg.starts_with("--")).collect();
    let wants = |name: &str| wanted.is_empty() || wanted.iter().any(|wanted| wanted == name);
    let folder =
        std::env::var_os("TARE_BENCH_DIR").map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("target/peers"), PathBuf::from);
    std::fs::create_dir_all(&folder).expect("a folder");
    let rattler = std::env::var_os("RATTLER").map_or_else(|| PathBuf::from("rattler"), PathBuf::from);
    if Command::new(&rattler).arg("--version").stdout(Stdio::null()).status().is_err() {
        println!("skipped: no `{}`; cargo install rattler-bin --version 0.5.14 --locked", rattler.display());
        return;
    }
    let tool = |name: &'static str, program: PathBuf| {
        let home = folder.join("home").join(name);
        std::fs::create_dir_all(&home).expect("a folder");
        Tool { name, program, home }
    };
    let tare = tool("tare", PathBuf::from(env!("CARGO_BIN_EXE_tare")));
    let rattler = tool("rattler", rattler);
    let tools = (&tare, &rattler);
    println!("| what | tare ms | rattler ms | ratio | tare CPU ms | rattler CPU ms | ratio | tare MiB | rattler MiB | ratio |");
    println!("|---|---|---|---|---|---|---|---|---|---|");
    let _ = std::io::stdout().flush();

    if wants("solve") {
        solves(tools, &folder);
    }
    if wants("start") || wants("create") || wants("update") {
        let channel = if folder.join("environment/complete").exists() {
            format!("file://{}", folder.join("environment").display())
        } else {
            big_environment(&folder.join("environment")).url()
        };
        let specs = ["everything", "part-007=1.0"];
        let newer = ["everything", "part-007=2.0"];
        // The first creation fills the caches.
        for tool in [&tare, &rattler] {
            for specs in [newer, specs] {
                remove(&prefix(tool));
                let args = if tool.name == "tare" {
                    ours(&channel, &[&specs[..], &["--no-compile"]].concat(), tool)
                } else {
                    theirs(&channel, &specs, tool)
                };
                tool.run(&args);
            }
        }
        if wants("start") {
            row("`--version`", 21, tools, |_| strings(["--version"]), |_| strings(["--version"]));
            let with = |before: &[&str], after: &[&str], tool: &Tool| {
                let mut args: Vec<String> = before.iter().map(ToString::to_string).collect();
                args.extend(["-p".into(), shown(&prefix(tool))]);
                args.extend(after.iter().map(ToString::to_string));
                args
            };
            row("`shell-hook`", 21, tools, |tool| with(&["shell-hook"], &[], tool), |tool| with(&["shell-hook"], &[], tool));
            row("`run true`", 21, tools, |tool| with(&["run"], &["true"], tool), |tool| with(&["run"], &["true"], tool));
        }
        if wants("create") {
            let fresh = |tool: &Tool| {
                remove(&prefix(tool));
                settle();
            };
            row(
                "create, 300 packages, warm cache, not compiled",
                5,
                tools,
                |tool| {
                    fresh(tool);
                    ours(&channel, &[&specs[..], &["--no-compile"]].concat(), tool)
                },
                |tool| {
                    fresh(tool);
                    theirs(&channel, &specs, tool)
                },
            );
            row(
                "create again (nothing to do)",
                11,
                tools,
                |tool| ours(&channel, &[&specs[..], &["--no-compile"]].concat(), tool),
                |tool| theirs(&channel, &specs, tool),
            );
            alone("create with compiled Python files (18,000 files)", 3, &tare, |tool| {
                fresh(tool);
                let mut args = strings(["create", "--override-channels", "-c", "host", "-c", &channel, "-p"]);
                args.push(shown(&prefix(tool)));
                args.extend(specs.iter().map(ToString::to_string));
                args
            });
        }
        if wants("update") {
            row(
                "update one package of 300",
                5,
                tools,
                |tool| {
                    remove(&prefix(tool));
                    tool.run(&ours(&channel, &[&specs[..], &["--no-compile"]].concat(), tool));
                    settle();
                    let mut args = strings(["install", "--no-compile", "--override-channels", "-c", &channel, "-p"]);
                    args.push(shown(&prefix(tool)));
                    args.push(newer[1].into());
                    args
                },
                |tool| {
                    remove(&prefix(tool));
                    tool.run(&theirs(&channel, &specs, tool));
                    settle();
                    theirs(&channel, &newer, tool)
                },
            );
        }
    }
    if wants("channel") {
        // A home of their own: the caches of the other rows stay.
        let cold = |tool: &Tool| {
            let home = folder.join("cold").join(tool.name);
            std::fs::create_dir_all(&home).expect("a folder");
            Tool { name: tool.name, program: tool.program.clone(), home }
        };
        let (tare, rattler) = (cold(&tare), cold(&rattler));
        let tools = (&tare, &rattler);
        big_channel(&folder.join("channel"));
        let server = Server::start(&folder.join("channel"));
        for kind in ["plain", "sharded"] {
            let url = format!("{}/{kind}", server.1);
            let cold = |tool: &Tool| {
                remove(&tool.home.join("cache"));
                remove(&prefix(tool));
                std::thread::sleep(Duration::from_millis(200));
            };
            row(
                &format!("plan one package, cold, 600,000 records ({kind})"),
                3,
                tools,
                |tool| {
                    cold(tool);
                    ours(&url, &["--dry-run", "package-00900"], tool)
                },
                |tool| {
                    cold(tool);
                    theirs(&url, &["--dry-run", "package-00900"], tool)
                },
            );
            row(
                &format!("the same again from the cache ({kind})"),
                3,
                tools,
                |tool| ours(&url, &["--dry-run", "package-00900"], tool),
                |tool| theirs(&url, &["--dry-run", "package-00900"], tool),
            );
        }
    }
}
