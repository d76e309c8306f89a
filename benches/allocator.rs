//! The caching allocator's hot path against the `offset-allocator` crate and against a plain `BTreeSet`, and threads
//! contending on one device.
//!
//! One step frees a random live block and requests another, so every figure is the time of one malloc and one free.
//! All contenders see the same sequence of sizes and choices. `offset-allocator` rounds sizes up to its bins (it is no
//! best fit), and gets handles back, so that it needs no table of addresses.
//!
//! Before anything is measured, a counting heap proves that the steady state makes no heap allocation.

use std::alloc::{GlobalAlloc, Layout, System};
use std::collections::{BTreeMap, BTreeSet};
use std::hint::black_box;
use std::sync::atomic::{AtomicU64, Ordering};

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use tare::gpu::alloc::{AllocConfig, CachingAllocator, DeviceAllocator, Policy};
use tare::gpu::driver::StreamId;
use tare::gpu::driver::sim::SimGpu;

struct Counting;

static HEAP: AtomicU64 = AtomicU64::new(0);

unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        HEAP.fetch_add(1, Ordering::Relaxed);
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static GLOBAL: Counting = Counting;

const LIVE: usize = 1024;
const STEPS: usize = 1 << 16;

#[derive(Clone)]
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        self.0 >> 24
    }
    fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }
}

/// Request sizes and which live block goes.
fn sequence(mix: &str) -> Vec<(u64, usize)> {
    let mut random = Random(42);
    (0..STEPS)
        .map(|_| {
            let size = match mix {
                "one-size" => 4096,
                "small" => 1 + random.below(256 << 10),
                // As in training: most requests small, some activations, a few weights.
                _ => match random.below(10) {
                    0..=5 => 1 + random.below(64 << 10),
                    6 | 7 => 1 + random.below(1 << 20),
                    8 => 1 + random.below(8 << 20),
                    _ => 1 + random.below(32 << 20),
                },
            };
            (size, random.below(LIVE as u64) as usize)
        })
        .collect()
}

/// Best fit on a tree of (size, address), without pools, streams or statistics.
struct Plain {
    free: BTreeSet<(u64, u64)>,
    /// Address to (size, free).
    blocks: BTreeMap<u64, (u64, bool)>,
}

impl Plain {
    fn new(size: u64) -> Self {
        Plain { free: BTreeSet::from([(size, 0)]), blocks: BTreeMap::from([(0, (size, true))]) }
    }

    fn malloc(&mut self, size: u64) -> u64 {
        let size = size.next_multiple_of(512);
        let &(whole, at) = self.free.range((size, 0)..).next().expect("large enough");
        self.free.remove(&(whole, at));
        self.blocks.insert(at, (size, false));
        if whole > size {
            self.blocks.insert(at + size, (whole - size, true));
            self.free.insert((whole - size, at + size));
        }
        at
    }

    fn free(&mut self, at: u64) {
        let (mut start, (mut size, _)) = (at, self.blocks[&at]);
        if let Some((&next, &(bytes, true))) = self.blocks.range(at + 1..).next() {
            self.blocks.remove(&next);
            self.free.remove(&(bytes, next));
            size += bytes;
        }
        if let Some((&before, &(bytes, true))) = self.blocks.range(..at).next_back() {
            self.blocks.remove(&at);
            self.free.remove(&(bytes, before));
            start = before;
            size += bytes;
        }
        self.blocks.insert(start, (size, true));
        self.free.insert((size, start));
    }
}

fn device() -> DeviceAllocator<SimGpu> {
    DeviceAllocator::new(SimGpu::new(256 << 30), Policy::proven(), AllocConfig::default())
}

/// Runs the sequence round and round; `step` gets a size and an index below [`LIVE`].
fn run(bencher: &mut criterion::Bencher, steps: &[(u64, usize)], mut step: impl FnMut(u64, usize)) {
    for &(size, at) in steps.iter().chain(steps) {
        step(size, at);
    }
    let mut next = 0;
    bencher.iter(|| {
        let (size, at) = steps[next & (STEPS - 1)];
        next += 1;
        step(size, at);
    });
}

fn steady(c: &mut Criterion) {
    for mix in ["one-size", "small", "training"] {
        let steps = sequence(mix);
        let mut group = c.benchmark_group(format!("malloc+free/{mix}"));
        group.throughput(Throughput::Elements(1));
        group.bench_function("tare", |b| {
            let mut allocator = device();
            let mut live: Vec<u64> = steps.iter().take(LIVE).map(|s| allocator.malloc(s.0, StreamId(0)).expect("room").address).collect();
            run(b, &steps, |size, at| {
                allocator.free(live[at]).expect("live");
                live[at] = allocator.malloc(black_box(size), StreamId(0)).expect("room").address;
            });
        });
        group.bench_function("tare-locked", |b| {
            let allocator = CachingAllocator::from(device());
            let mut live: Vec<u64> = steps.iter().take(LIVE).map(|s| allocator.malloc(s.0, StreamId(0)).expect("room").address).collect();
            run(b, &steps, |size, at| {
                allocator.free(live[at]).expect("live");
                live[at] = allocator.malloc(black_box(size), StreamId(0)).expect("room").address;
            });
        });
        group.bench_function("offset-allocator", |b| {
            let mut allocator: offset_allocator::Allocator = offset_allocator::Allocator::new(u32::MAX / 2);
            let units = |size: u64| size.div_ceil(512) as u32;
            let mut live: Vec<_> = steps.iter().take(LIVE).map(|s| allocator.allocate(units(s.0)).expect("room")).collect();
            run(b, &steps, |size, at| {
                allocator.free(live[at]);
                live[at] = allocator.allocate(units(black_box(size))).expect("room");
            });
        });
        group.bench_function("btreeset", |b| {
            let mut allocator = Plain::new(256 << 30);
            let mut live: Vec<u64> = steps.iter().take(LIVE).map(|s| allocator.malloc(s.0)).collect();
            run(b, &steps, |size, at| {
                allocator.free(live[at]);
                live[at] = allocator.malloc(black_box(size));
            });
        });
        group.finish();
    }
}

fn contention(c: &mut Criterion) {
    let steps = sequence("training");
    let mut group = c.benchmark_group("contention");
    for threads in [1usize, 2, 4] {
        const PER_THREAD: usize = 20_000;
        group.throughput(Throughput::Elements((threads * PER_THREAD) as u64));
        group.bench_with_input(BenchmarkId::from_parameter(threads), &threads, |b, &threads| {
            let allocator = CachingAllocator::from(device());
            b.iter(|| {
                std::thread::scope(|scope| {
                    for thread in 0..threads {
                        let (allocator, steps) = (&allocator, &steps);
                        scope.spawn(move || {
                            let mut live = [0u64; 64];
                            for at in 0..PER_THREAD {
                                let (size, slot) = steps[(at + thread * 1000) & (STEPS - 1)];
                                let slot = slot % live.len();
                                allocator.free(live[slot]).expect("live or null");
                                live[slot] = allocator.malloc(size, StreamId(0)).expect("room").address;
                            }
                            for address in live {
                                allocator.free(address).expect("live or null");
                            }
                        });
                    }
                });
            });
        });
    }
    group.finish();
}

/// The steady state must not touch the heap.
fn heap_free(_: &mut Criterion) {
    for mix in ["one-size", "small", "training"] {
        let steps = sequence(mix);
        let mut allocator = device();
        let mut live: Vec<u64> = steps.iter().take(LIVE).map(|s| allocator.malloc(s.0, StreamId(0)).expect("room").address).collect();
        let mut counts = Vec::with_capacity(8);
        for _ in 0..8 {
            let before = HEAP.load(Ordering::Relaxed);
            for &(size, at) in &steps {
                allocator.free(live[at]).expect("live");
                live[at] = allocator.malloc(size, StreamId(0)).expect("room").address;
            }
            counts.push(HEAP.load(Ordering::Relaxed) - before);
        }
        assert_eq!(counts.last(), Some(&0), "{mix}: heap allocations in rounds of {STEPS} steps: {counts:?}");
    }
}

criterion_group!(benches, heap_free, steady, contention);
criterion_main!(benches);
