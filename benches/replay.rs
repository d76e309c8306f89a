//! Replay of a generated trace of ten million events, and reading pickles against CPython.
//!
//! `cargo bench --bench replay`. Prints events a second, MB a second and peak memory; CPython is measured where `python3` exists.

use std::collections::HashMap;
use std::hint::black_box;
use std::io::Write as _;
use std::time::Instant;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use tare::gpu::alloc::{AllocConfig, DeviceAllocator, Policy};
use tare::gpu::driver::StreamId;
use tare::gpu::driver::sim::SimGpu;
use tare::gpu::trace::replay::Replayer;
use tare::gpu::trace::start::StartState;
use tare::gpu::trace::{Action, Limits, TraceEntry, read_bytes};

const EVENTS: u64 = 10_000_000;

struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (z ^ (z >> 31)) % n
    }
}

/// A training run: parameters that stay, then steps, each from a repertoire of `PATTERNS`, that allocate activations, free them in
/// about reverse order and leave nothing. Once every pattern has run, the cache repeats itself, so the run can be as long as
/// wanted while only one round of the repertoire is kept.
struct Run {
    /// Everything up to the first repetition.
    warm_up: Vec<TraceEntry>,
    round: Vec<TraceEntry>,
}

const PATTERNS: usize = 24;

impl Run {
    fn record() -> Self {
        let mut allocator = DeviceAllocator::new(SimGpu::new(1 << 40), Policy::proven(), AllocConfig::default());
        allocator.record_history(usize::MAX >> 1);
        let mut random = Random(7);
        for _ in 0..400 {
            let size = [4096, 1 << 20, 16 << 20][random.below(3) as usize];
            allocator.malloc(size + random.below(size), StreamId::DEFAULT).expect("room");
        }
        let mut warm_up = 0;
        for round in 0..3 {
            if round == 2 {
                warm_up = allocator.history().count();
            }
            for pattern in 0..PATTERNS {
                let mut random = Random(1000 + pattern as u64);
                let mut live = Vec::new();
                for _ in 0..6000 {
                    if random.below(8) < 5 || live.is_empty() {
                        let size = match random.below(8) {
                            0..=3 => 512 + random.below(1 << 20),
                            4..=6 => (1 << 20) + random.below(9 << 20),
                            _ => (10 << 20) + random.below(50 << 20),
                        };
                        live.push(allocator.malloc(size, StreamId::DEFAULT).expect("room").address);
                    } else {
                        let back = random.below(8.min(live.len() as u64)) as usize;
                        let address = live.remove(live.len() - 1 - back);
                        allocator.free(address).expect("live");
                    }
                }
                while let Some(address) = live.pop() {
                    allocator.free(address).expect("live");
                }
            }
        }
        let mut entries: Vec<TraceEntry> = allocator
            .history()
            .map(|entry| {
                let action = match entry.action.name() {
                    "alloc" => Action::Alloc,
                    "free_requested" => Action::FreeRequested,
                    "free_completed" => Action::FreeCompleted,
                    "segment_alloc" => Action::SegmentAlloc,
                    other => panic!("{other} in a run that never runs short"),
                };
                TraceEntry { time_us: 1, ..TraceEntry::new(action, entry.addr, entry.size, entry.stream) }
            })
            .collect();
        let round = entries.split_off(warm_up);
        assert!(round.iter().all(|entry| entry.action != Action::SegmentAlloc), "the cache must repeat itself");
        Run { warm_up: entries, round }
    }

    fn events(&self) -> impl Iterator<Item = &TraceEntry> {
        self.warm_up.iter().chain(self.round.iter().cycle()).take(EVENTS as usize)
    }
}

/// Peak and present resident memory of this process in MiB.
fn memory() -> (u64, u64) {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let field = |name: &str| {
        let line = status.lines().find(|line| line.starts_with(name)).unwrap_or_default();
        line.split_whitespace().nth(1).and_then(|kib| kib.parse::<u64>().ok()).unwrap_or(0) / 1024
    };
    (field("VmHWM:"), field("VmRSS:"))
}

/// Processor seconds of this process so far: unlike wall time, these hardly depend on what else the machine does.
fn cpu() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
    let ticks = |at: usize| fields.get(at).and_then(|field| field.parse::<f64>().ok()).unwrap_or(0.0);
    (ticks(11) + ticks(12)) / 100.0
}

fn replay_once(run: &Run) -> u64 {
    let mut replayer = Replayer::new(None, &StartState::default(), Policy::proven(), AllocConfig::default()).expect("an empty start");
    for entry in run.events() {
        replayer.feed(entry);
    }
    let outcome = replayer.finish();
    assert!(outcome.fidelity.is_exact(), "{:?}", outcome.fidelity);
    outcome.fidelity.addresses_exact
}

fn replay(c: &mut Criterion) {
    let run = Run::record();
    let before = memory();
    let (started, cpu_before) = (Instant::now(), cpu());
    let exact = replay_once(&run);
    let (seconds, cpu_seconds) = (started.elapsed().as_secs_f64(), cpu() - cpu_before);
    println!(
        "replay: {EVENTS} events in {seconds:.2} s ({cpu_seconds:.2} s of processor time), {:.2} million events/s ({:.2} million a processor second), {exact} addresses exact; resident memory {} MiB before, {} MiB after",
        EVENTS as f64 / seconds / 1e6,
        EVENTS as f64 / cpu_seconds / 1e6,
        before.1,
        memory().1
    );
    let mut group = c.benchmark_group("replay");
    group.sample_size(10).throughput(Throughput::Elements(EVENTS));
    group.bench_function("ten million events", |b| b.iter(|| black_box(replay_once(&run))));
    group.finish();
}

/// Writes pickles as PyTorch does: all keys and frames memoised.
struct Pickler {
    out: Vec<u8>,
    memo: HashMap<String, u32>,
    next: u32,
}

impl Pickler {
    fn memoize(&mut self) -> u32 {
        self.out.push(0x94);
        self.next += 1;
        self.next - 1
    }

    fn get(&mut self, index: u32) {
        if index < 256 {
            self.out.extend([b'h', index as u8]);
        } else {
            self.out.push(b'j');
            self.out.extend(index.to_le_bytes());
        }
    }

    fn text(&mut self, text: &str) {
        if let Some(index) = self.memo.get(text).copied() {
            return self.get(index);
        }
        self.out.extend([0x8c, text.len() as u8]);
        self.out.extend(text.as_bytes());
        let index = self.memoize();
        self.memo.insert(text.to_owned(), index);
    }

    fn number(&mut self, number: u64) {
        match number {
            0..=0xFF => self.out.extend([b'K', number as u8]),
            0x100..=0xFFFF => {
                self.out.push(b'M');
                self.out.extend((number as u16).to_le_bytes());
            }
            0x1_0000..=0x7FFF_FFFF => {
                self.out.push(b'J');
                self.out.extend((number as u32).to_le_bytes());
            }
            _ => {
                self.out.extend([0x8a, 8]);
                self.out.extend(number.to_le_bytes());
            }
        }
    }
}

/// `events` events of `run`, each with a new list of 20 to 50 frames, as in recorded files.
fn pickle(run: &Run, events: usize) -> Vec<u8> {
    let mut p = Pickler { out: vec![0x80, 4, b'}', 0x94, b'('], memo: HashMap::new(), next: 1 };
    p.text("segments");
    p.out.push(b']');
    p.memoize();
    p.text("device_traces");
    p.out.push(b']');
    p.memoize();
    p.out.push(b']');
    p.memoize();
    let mut frames: Vec<u32> = Vec::new();
    let mut random = Random(3);
    for (at, entry) in run.events().take(events).enumerate() {
        if at % 1000 == 0 {
            p.out.push(b'(');
        }
        p.out.push(b'}');
        p.memoize();
        p.out.push(b'(');
        p.text("action");
        p.text(entry.action.name());
        p.text("addr");
        p.number(entry.addr);
        p.text("size");
        p.number(entry.size);
        p.text("stream");
        p.number(0);
        p.text("time_us");
        p.number(1_748_730_219_793_252 + at as u64);
        p.text("frames");
        p.out.push(b']');
        p.memoize();
        p.out.push(b'(');
        let depth = 20 + random.below(30);
        let mut state = random.below(300);
        for level in 0..depth {
            let which = (state * 7 + level) as usize % 400;
            state = state * 5 / 6;
            if which < frames.len() {
                p.get(frames[which]);
            } else {
                p.out.push(b'}');
                frames.push(p.memoize());
                p.out.push(b'(');
                p.text("name");
                p.text(&format!("function_{}", frames.len() % 90));
                p.text("filename");
                p.text(&format!("/app/lib/module_{}.py", frames.len() % 40));
                p.text("line");
                p.number(frames.len() as u64 * 3);
                p.out.push(b'u');
            }
        }
        p.out.extend(b"eu");
        if at % 1000 == 999 || at + 1 == events {
            p.out.push(b'e');
        }
    }
    p.out.extend(b"au.");
    p.out
}

/// Best of three in processor seconds, and peak memory in MiB, of CPython's unpickler.
fn python(bytes: &[u8]) -> Option<(f64, u64)> {
    let path = std::env::temp_dir().join(format!("tare-bench-{}.pickle", std::process::id()));
    std::fs::File::create(&path).ok()?.write_all(bytes).ok()?;
    let code = "import pickle,sys,time,resource\nbest=1e9\nfor _ in range(3):\n t=time.process_time(); s=pickle.load(open(sys.argv[1],'rb')); \
                best=min(best,time.process_time()-t); del s\nprint(best, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss//1024)";
    let output = std::process::Command::new("python3").args(["-c", code]).arg(&path).output();
    let _ = std::fs::remove_file(&path);
    let text = String::from_utf8(output.ok().filter(|output| output.status.success())?.stdout).ok()?;
    let mut words = text.split_whitespace();
    Some((words.next()?.parse().ok()?, words.next()?.parse().ok()?))
}

fn read(c: &mut Criterion) {
    let run = Run::record();
    let bytes = pickle(&run, 500_000);
    let megabytes = bytes.len() as f64 / 1e6;
    let before = memory();
    let (mut best, mut best_cpu) = (f64::MAX, f64::MAX);
    for _ in 0..3 {
        let (started, cpu_before) = (Instant::now(), cpu());
        let snapshot = read_bytes(&bytes, &Limits::default()).expect("a sound pickle");
        best = best.min(started.elapsed().as_secs_f64());
        best_cpu = best_cpu.min(cpu() - cpu_before);
        assert_eq!(snapshot.trace(0).len(), 500_000);
        println!(
            "read: {megabytes:.1} MB, {} stacks, {} frames; resident memory {} MiB before, {} MiB with the result, peak {} MiB",
            snapshot.names.stack_count(),
            snapshot.names.frame_count(),
            before.1,
            memory().1,
            memory().0
        );
    }
    println!("read: {:.0} MB/s, {:.0} MB a processor second", megabytes / best, megabytes / best_cpu);
    match python(&bytes) {
        Some((cpu, peak)) => println!(
            "read: CPython {:.0} MB a processor second ({:.1} times slower), peak memory {peak} MiB",
            megabytes / cpu,
            cpu / best_cpu
        ),
        None => println!("read: skipped CPython: no python3"),
    }
    let mut group = c.benchmark_group("read");
    group.sample_size(10).throughput(Throughput::Bytes(bytes.len() as u64));
    group.bench_function("pickle", |b| b.iter(|| black_box(read_bytes(&bytes, &Limits::default()).map(|snapshot| snapshot.bytes_read))));
    group.finish();
}

criterion_group!(benches, read, replay);
criterion_main!(benches);
