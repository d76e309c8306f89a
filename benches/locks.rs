//! What CI waits for: `lock --check`, a `sync` that has nothing to do, `verify`, `diff`, and reading a big lock.
//!
//! `cargo bench --bench locks`. The commands are measured as whole processes, from start to exit. With `TARE_TEST_PY_RATTLER` (a Python that has py-rattler)
//! reading the lock is measured there as well.

use std::fmt::Write as _;
use std::hint::black_box;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use rayon::iter::{IntoParallelRefIterator, ParallelIterator};
use tare::lock::{self, ReadOptions};
use tare::prefix::Prefix;
use tare::report::Silent;
use tare::verify;

#[allow(dead_code)]
#[path = "../tests/it/common/channel.rs"]
mod channel;

use channel::{Channel, Package};

/// As in the program itself.
#[global_allocator]
static GLOBAL: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Packages of the environment.
const PACKAGES: usize = 300;
/// Files of each: 30,000 in all.
const FILES: usize = 100;

struct World {
    root: tempfile::TempDir,
    prefix: PathBuf,
}

impl World {
    /// A channel, a lock of everything in it, and the environment.
    fn new() -> Self {
        let root = tempfile::tempdir().expect("a folder");
        let mut channel = Channel::new(root.path().join("channel"));
        let mut random = 1u64;
        for number in 0..PACKAGES {
            let mut package = Package::new(&format!("package-{number}"), "1.0");
            if number > 0 {
                package = package.depends(&[&format!("package-{} >=1", number / 2), &format!("package-{} >=1,<2", number / 3)]);
            }
            for file in 0..FILES {
                random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                // Most files are small, some are not.
                let size = if random >> 60 == 0 { 64 << 10 } else { 200 + (random >> 50) as usize % 8000 };
                let contents: Vec<u8> = (0..size).map(|at| (random >> (at % 57)) as u8).collect();
                package = package.file(&format!("lib/p{number}/{}/file{file}.txt", file % 7), contents);
            }
            channel.add(&package);
        }
        let world = World { prefix: root.path().join("env"), root };
        let names: String = (0..PACKAGES).step_by(10).map(|number| format!("  - package-{number} >=1\n")).collect();
        let file =
            format!("name: bench\nchannels: ['{}', nodefaults]\ndependencies:\n  - package-{}\n{names}", channel.url(), PACKAGES - 1);
        world.write("environment.yml", &file);
        world.run(&["lock", "-q", "-f", "environment.yml"]);
        let all: String = (0..PACKAGES).map(|number| format!("  - package-{number}\n")).collect();
        world.write("all.yml", &format!("name: bench\nchannels: ['{}', nodefaults]\ndependencies:\n{all}", channel.url()));
        world.run(&["lock", "-q", "-f", "all.yml", "-o", "all.lock"]);
        world.run(&["sync", "-q", "-p", world.prefix.to_str().expect("a path"), "all.lock"]);
        world
    }

    fn write(&self, name: &str, text: &str) {
        std::fs::write(self.root.path().join(name), text).expect("a file");
    }

    fn run(&self, args: &[&str]) {
        let out = Command::new(env!("CARGO_BIN_EXE_tare"))
            .args(args)
            .current_dir(self.root.path())
            .env("HOME", self.root.path())
            .env("TARE_CACHE_DIR", self.root.path().join("cache"))
            .env("TARE_ROOT", self.root.path())
            .env("CONDA_OVERRIDE_CUDA", "")
            .env_remove("CONDA_PREFIX")
            .stdin(Stdio::null())
            .output()
            .expect("the program runs");
        assert!(out.status.code().is_some_and(|code| matches!(code, 0 | 4)), "{args:?}: {}", String::from_utf8_lossy(&out.stderr));
    }
}

fn files_below(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).expect("a folder").flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            files_below(&entry.path(), found);
        } else {
            found.push(entry.path());
        }
    }
}

fn commands(criterion: &mut Criterion) {
    let world = World::new();
    let prefix = world.prefix.to_str().expect("a path").to_owned();
    let mut group = criterion.benchmark_group("300 packages");
    group.sample_size(20).measurement_time(Duration::from_secs(5));
    group.bench_function("lock --check", |bench| bench.iter(|| world.run(&["lock", "--check", "-q", "-f", "all.yml", "all.lock"])));
    group.bench_function("sync, nothing to do", |bench| bench.iter(|| world.run(&["sync", "-q", "-p", &prefix, "all.lock"])));
    group.bench_function("diff of two locks", |bench| bench.iter(|| world.run(&["diff", "tare.lock", "all.lock"])));
    group.finish();

    let mut files = Vec::new();
    files_below(&world.prefix.join("lib"), &mut files);
    let bytes: u64 = files.iter().map(|file| std::fs::metadata(file).expect("a file").len()).sum();
    let mut group = criterion.benchmark_group(format!("{} files", files.len()));
    group.sample_size(10).measurement_time(Duration::from_secs(10)).throughput(Throughput::Bytes(bytes));
    group.bench_function("reading them once, on all cores", |bench| {
        bench.iter(|| {
            files
                .par_iter()
                .map_init(
                    || vec![0u8; 256 << 10],
                    |buffer, file| {
                        let mut file = std::fs::File::open(file).expect("a file");
                        let mut total = 0;
                        while let Ok(read @ 1..) = file.read(buffer) {
                            total += black_box(&buffer[..read]).len();
                        }
                        total
                    },
                )
                .sum::<usize>()
        });
    });
    let opened = Prefix::open(&world.prefix).expect("an environment");
    group.bench_function("verify", |bench| {
        bench.iter(|| {
            let report = verify::verify(&opened, verify::Options::default(), &Silent).expect("a report");
            assert!(report.is_ok(), "{}", report.text());
            report.files
        });
    });
    group.finish();
}

/// A lock of 2 MB, for two platforms.
fn big_lock() -> String {
    let mut explicit = String::from("@EXPLICIT\n");
    for number in 0..3300 {
        let _ = writeln!(
            explicit,
            "https://conda.anaconda.org/conda-forge/linux-64/package-{number}-1.{number}.0-h{number:07x}_0.conda#{number:064x}"
        );
    }
    let mut lock = lock::read("explicit.txt", explicit.as_bytes(), &ReadOptions::default()).expect("a list");
    for platform in &mut lock.platforms {
        for (number, record) in platform.conda.iter_mut().enumerate() {
            record.package_record.depends = (1..9).map(|step| format!("package-{} >=1.0,<3.0a0", (number * step) % 3300)).collect();
            record.package_record.license = Some("BSD-3-Clause".to_owned());
            record.package_record.size = Some(1_234_567);
        }
        platform.complete = true;
    }
    lock::write_pixi(&lock).expect("a lock")
}

fn reading(criterion: &mut Criterion) {
    let text = big_lock();
    let mut group = criterion.benchmark_group(format!("a pixi.lock of {:.1} MB", text.len() as f64 / 1e6));
    group.sample_size(10).measurement_time(Duration::from_secs(5)).throughput(Throughput::Bytes(text.len() as u64));
    group.bench_function("read", |bench| bench.iter(|| lock::read("pixi.lock", text.as_bytes(), &ReadOptions::default()).expect("a lock")));
    group.finish();
    let Some(python) = std::env::var_os("TARE_TEST_PY_RATTLER") else { return };
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("pixi.lock");
    std::fs::write(&file, &text).expect("a file");
    let script = "import sys, time\nfrom rattler.lock import LockFile\ntimes = []\nfor _ in range(10):\n start = time.perf_counter()\n LockFile.from_path(sys.argv[1])\n times.append(time.perf_counter() - start)\nprint(f'py-rattler reads it in {sorted(times)[5] * 1000:.1f} ms (median of 10)')";
    let out = Command::new(python).args(["-c", script]).arg(&file).output().expect("Python runs");
    println!("{}{}", String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
}

criterion_group!(benches, commands, reading);
criterion_main!(benches);
