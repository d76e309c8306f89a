//! Random operations: against the model, and against a driver that fails.

use std::collections::BTreeMap;

use super::model::{Model, State};
use crate::gpu::alloc::*;
use crate::gpu::driver::sim::{AddressOrder, SimConfig, SimGpu, SimUsage};
use crate::gpu::driver::{Driver, StreamId};

const MIB: u64 = 1 << 20;
const STREAMS: u64 = 3;

pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        let x = self.0;
        (x ^ x >> 32).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 16
    }
    pub fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }
    /// Sizes as in training: mostly small, some around every limit, a few large.
    pub fn size(&mut self) -> u64 {
        match self.below(10) {
            0..=3 => 1 + self.below(4096),
            4 | 5 => 1 + self.below(MIB),
            6 => MIB - 1024 + self.below(2048),
            7 => 1 + self.below(10 * MIB),
            8 => 10 * MIB - 1024 + self.below(2048),
            _ => 1 + self.below(48 * MIB),
        }
    }
}

/// Operations of a long test: `TARE_ALLOC_OPS`, else `default`.
fn operations(default: u64) -> u64 {
    std::env::var("TARE_ALLOC_OPS").ok().and_then(|n| n.parse().ok()).unwrap_or(default)
}

fn compare(allocator: &DeviceAllocator<SimGpu>, model: &Model, layout: bool, step: u64) {
    let (stats, figures) = (allocator.raw_stats(), &model.figures);
    let pairs = [
        (stats.allocation.all, figures.allocation),
        (stats.allocated_bytes.all, figures.allocated),
        (stats.active.all, figures.active),
        (stats.active_bytes.all, figures.active_bytes),
        (stats.requested_bytes.all, figures.requested),
        (stats.segment.all, figures.segment),
        (stats.reserved_bytes.all, figures.reserved),
    ];
    for (at, (stat, figure)) in pairs.into_iter().enumerate() {
        assert_eq!(
            (stat.current, stat.peak, stat.allocated, stat.freed),
            (figure.current, figure.peak, figure.up, figure.down),
            "figure {at}, step {step}"
        );
    }
    assert_eq!((stats.num_alloc_retries, stats.num_ooms), (figures.retries, figures.ooms), "step {step}");
    if !layout {
        return;
    }
    let (count, bytes) = model.inactive_split();
    assert_eq!((stats.inactive_split.all.current, stats.inactive_split_bytes.all.current), (count, bytes), "step {step}");
    let mut real: Vec<(u64, u64, u64, u8)> = Vec::new();
    for block in allocator.blocks() {
        let state = match block.state {
            BlockState::Allocated => 0,
            BlockState::PendingFree => 1,
            BlockState::Free => 2,
            BlockState::Unmapped => 3,
        };
        real.push((block.address, block.size, block.stream.0, state));
    }
    let mut plain: Vec<(u64, u64, u64, u8)> = Vec::new();
    for seg in &model.segs {
        for block in &seg.blocks {
            let state = match block.state {
                State::Allocated => 0,
                State::Pending => 1,
                State::Free => 2,
                State::Unmapped => 3,
            };
            plain.push((block.addr, block.size, seg.stream, state));
        }
    }
    real.sort_unstable();
    plain.sort_unstable();
    assert_eq!(real, plain, "step {step}");
    allocator.validate().unwrap_or_else(|why| panic!("step {step}: {why}"));
}

/// Runs the allocator and the model side by side. Returns how many requests ran out of memory.
fn side_by_side(seed: u64, steps: u64, policy: Policy, config: AllocConfig, ascending: bool) -> u64 {
    let mut random = Random(seed);
    let capacity = (96 + random.below(200)) / 2 * 2 * MIB;
    let order = if ascending { AddressOrder::Ascending } else { AddressOrder::Descending };
    let gpu = SimGpu::with(SimConfig { order, ..SimConfig::new(capacity) });
    for _ in 1..STREAMS {
        gpu.stream_create().expect("no faults here");
    }
    let mut allocator = DeviceAllocator::new(gpu.clone(), policy, config.clone());
    let mut model = Model::new(capacity, ascending, STREAMS as usize, policy, config);
    let mut live: Vec<u64> = Vec::new();
    let mut pools: Vec<PoolId> = Vec::new();
    let mut open: Vec<PoolId> = Vec::new();
    for step in 0..steps {
        match random.below(1000) {
            0..=479 => {
                let (size, stream) = (random.size(), random.below(STREAMS));
                let plain = model.malloc(size, stream);
                match allocator.malloc(size, StreamId(stream)) {
                    Ok(got) => {
                        assert_eq!(Some((got.address, got.size)), plain, "step {step}");
                        live.push(got.address);
                    }
                    Err(AllocError::OutOfMemory(_)) => {
                        assert_eq!(None, plain, "step {step}");
                        // Make room, as a program would.
                        for _ in 0..live.len() / 2 {
                            let address = live.swap_remove(random.below(live.len() as u64) as usize);
                            allocator.free(address).expect("live");
                            model.free(address);
                        }
                    }
                    Err(other) => panic!("step {step}: {other}"),
                }
            }
            480..=879 if !live.is_empty() => {
                let address = live.swap_remove(random.below(live.len() as u64) as usize);
                allocator.free(address).expect("live");
                model.free(address);
            }
            880..=929 if !live.is_empty() => {
                let address = live[random.below(live.len() as u64) as usize];
                let stream = random.below(STREAMS);
                allocator.record_stream(address, StreamId(stream)).expect("live");
                model.record_stream(address, stream);
            }
            930..=959 => {
                let (stream, duration) = (random.below(STREAMS), random.below(20));
                gpu.work(StreamId(stream), duration);
                model.work(stream, duration);
            }
            960..=979 => {
                let duration = random.below(30);
                gpu.advance(duration);
                model.advance(duration);
            }
            980..=983 => {
                allocator.process_events().expect("no faults here");
                model.process_events();
            }
            984..=986 => {
                let released: Vec<(u64, u64)> =
                    allocator.empty_cache().expect("no faults here").into_iter().map(|r| (r.address, r.size)).collect();
                assert_eq!(released, model.empty_cache(), "step {step}: what went back, in order");
            }
            987 | 988 if pools.len() < 3 => {
                let options = PoolOptions { use_on_oom: random.below(2) == 0, no_split: random.below(4) == 0 };
                let pool = allocator.create_pool(options);
                model.create_pool(pool.1, options.use_on_oom, options.no_split);
                pools.push(pool);
            }
            989..=991 if !pools.is_empty() => {
                let pool = pools[random.below(pools.len() as u64) as usize];
                if !open.contains(&pool) {
                    let only = (random.below(2) == 0).then(|| random.below(STREAMS));
                    let filter = only.map_or(StreamFilter::All, |stream| StreamFilter::Streams(vec![StreamId(stream)]));
                    let graph = random.below(2) == 0;
                    allocator.begin_allocate(pool, filter, graph).expect("not open");
                    model.begin(pool.1, only, graph);
                    open.push(pool);
                }
            }
            992..=994 if !open.is_empty() => {
                let pool = open.swap_remove(random.below(open.len() as u64) as usize);
                allocator.end_allocate(pool).expect("open");
                allocator.release_pool(pool).expect("has users");
                model.end(pool.1);
                model.release_pool(pool.1);
            }
            995 if !pools.is_empty() => {
                let pool = pools[random.below(pools.len() as u64) as usize];
                if !open.contains(&pool) {
                    pools.retain(|other| *other != pool);
                    allocator.release_pool(pool).expect("has its maker as user");
                    model.release_pool(pool.1);
                }
            }
            996 => {
                let fraction = [1.0, 0.9, 0.6][random.below(3) as usize];
                allocator.set_memory_fraction(fraction).expect("in range");
                model.fraction = (fraction < 1.0 || policy.full_fraction_limits).then_some((fraction * capacity as f64) as u64);
            }
            997 => {
                let on = !allocator.config().expandable_segments;
                let fraction = model.fraction;
                if random.below(4) == 0 {
                    let mut config = allocator.config().clone();
                    config.expandable_segments = on;
                    allocator.set_config(config.clone());
                    model.config = config;
                    // A new configuration sets the limit from its own fraction.
                    model.fraction = None;
                    let _ = fraction;
                }
            }
            _ => {}
        }
        compare(&allocator, &model, step % 50 == 0, step);
    }
    compare(&allocator, &model, true, steps);
    let ooms = model.figures.ooms;
    drop(allocator);
    assert_eq!(SimUsage { streams: 0, ..gpu.usage() }, SimUsage::default(), "everything goes back in the end");
    ooms
}

fn configurations() -> Vec<(Policy, AllocConfig)> {
    let newest = Policy::pytorch(TorchVersion::NEWEST_READ);
    let texts = [
        "",
        "expandable_segments:True",
        "max_split_size_mb:24,max_non_split_rounding_mb:20",
        "garbage_collection_threshold:0.6",
        "roundup_power2_divisions:[1:4,4:8,>:2]",
        "expandable_segments:True,large_segment_size_mb:12,max_split_size_mb:30",
        "garbage_collection_threshold:0.3,max_split_size_mb:20,expandable_segments:True",
        "large_segment_size_mb:32",
    ];
    let mut all = Vec::new();
    for text in texts {
        let (config, _) = AllocConfig::parse(text, &newest).expect(text);
        for policy in [
            Policy::proven(),
            newest,
            Policy::pytorch(TorchVersion::new(2, 4)),
            Policy::proven().with_tie_break(TieBreak::AddressDescending),
        ] {
            all.push((policy, config.clone()));
        }
    }
    all
}

/// 32 configurations; by default 64,000 operations in all.
#[test]
fn the_model_agrees_on_every_address_figure_and_release() {
    let configurations = configurations();
    let steps = operations(64_000) / configurations.len() as u64;
    let mut ooms = 0;
    for (at, (policy, config)) in configurations.into_iter().enumerate() {
        ooms += side_by_side(at as u64 * 7919 + 1, steps, policy, config, at % 2 == 0);
    }
    assert!(ooms > 100, "the capacity must be small enough to run out of memory, but it did so only {ooms} times");
}

/// What a program knows of its own allocations, and writes into them.
struct Program {
    gpu: SimGpu,
    /// Start to (bytes, requested, stamp).
    live: BTreeMap<u64, (u64, u64, u64)>,
    order: Vec<u64>,
    stamps: u64,
    handed_out: u64,
    peak: u64,
    bytes: u64,
    requested: u64,
}

impl Program {
    fn new(gpu: SimGpu) -> Self {
        Program { gpu, live: BTreeMap::new(), order: Vec::new(), stamps: 0, handed_out: 0, peak: 0, bytes: 0, requested: 0 }
    }

    /// Where stamps go: at both ends, and at some places between.
    fn places(size: u64) -> impl Iterator<Item = u64> {
        [0, size / 1024 * 512, size - 8].into_iter()
    }

    fn took(&mut self, got: &Allocation, requested: u64, step: u64) {
        let end = got.address + got.size;
        assert!(got.size >= requested && got.size.is_multiple_of(512) && got.address.is_multiple_of(512));
        if let Some((before, (size, ..))) = self.live.range(..end).next_back() {
            assert!(before + size <= got.address, "step {step}: {:#x} overlaps the live block {before:#x}", got.address);
        }
        self.stamps += 1;
        for at in Self::places(got.size) {
            self.gpu.copy_to_device(got.address + at, &(self.stamps ^ at).to_le_bytes()).expect("a block is accessible");
        }
        self.live.insert(got.address, (got.size, requested, self.stamps));
        self.order.push(got.address);
        self.handed_out += got.size;
        self.bytes += got.size;
        self.requested += requested;
        self.peak = self.peak.max(self.bytes);
    }

    /// Index in `order` of a block to do something with.
    fn pick(&self, random: &mut Random) -> Option<usize> {
        (!self.order.is_empty()).then(|| random.below(self.order.len() as u64) as usize)
    }

    fn verify(&self, address: u64, step: u64) {
        let (size, _, stamp) = self.live[&address];
        for at in Self::places(size) {
            let mut word = [0; 8];
            self.gpu.copy_to_host(&mut word, address + at).expect("a live block is accessible");
            assert_eq!(u64::from_le_bytes(word), stamp ^ at, "step {step}: {:#x}+{at:#x} was overwritten", address);
        }
    }

    fn gave(&mut self, at: usize) {
        let address = self.order.swap_remove(at);
        let (size, requested, _) = self.live.remove(&address).expect("live");
        self.bytes -= size;
        self.requested -= requested;
    }

    fn check(&self, allocator: &DeviceAllocator<SimGpu>, step: u64) {
        let stats = allocator.raw_stats();
        assert_eq!(stats.allocation.all.current, self.live.len() as u64, "step {step}");
        assert_eq!(stats.allocated_bytes.all.current, self.bytes, "step {step}");
        assert_eq!(stats.allocated_bytes.all.allocated, self.handed_out, "step {step}");
        assert_eq!(stats.allocated_bytes.all.peak, self.peak, "step {step}");
        assert!(stats.requested_bytes.all.current >= self.requested, "step {step}");
        assert!(stats.active_bytes.all.current >= self.bytes, "step {step}");
        // No byte is lost: what the driver gave is in the books, or known to be stranded by a failed call.
        assert_eq!(stats.reserved_bytes.all.current + allocator.stranded_bytes(), self.gpu.usage().bytes, "step {step}");
    }
}

/// Random operations on a driver of which one call in `odds` fails. Returns the number of failures seen.
fn with_faults(seed: u64, steps: u64, odds: u64, text: &str) -> u64 {
    let policy = Policy::pytorch(TorchVersion::NEWEST_READ);
    let (config, _) = AllocConfig::parse(text, &policy).expect(text);
    let mut random = Random(seed);
    let gpu = SimGpu::with(SimConfig { order: AddressOrder::FirstFit, ..SimConfig::new(192 * MIB) });
    for _ in 1..STREAMS {
        gpu.stream_create().expect("not failing yet");
    }
    gpu.fail_randomly(seed, odds);
    let mut allocator = DeviceAllocator::new(gpu.clone(), policy, config);
    let mut program = Program::new(gpu.clone());
    let mut failures = 0;
    for step in 0..steps {
        match random.below(100) {
            0..=44 if program.order.len() < 400 => {
                let requested = random.size();
                match allocator.malloc_tagged(requested, StreamId(random.below(STREAMS)), step) {
                    Ok(got) => program.took(&got, requested, step),
                    Err(AllocError::OutOfMemory(oom)) => {
                        assert_eq!(oom.attribution.reserved, oom.reserved);
                        for _ in 0..program.order.len() / 3 {
                            if allocator.free(program.order[0]).is_ok() {
                                program.gave(0);
                            }
                        }
                    }
                    Err(AllocError::Driver(_)) => failures += 1,
                    Err(other) => panic!("step {step}: {other}"),
                }
            }
            ..=89 => {
                if let Some(at) = program.pick(&mut random) {
                    let address = program.order[at];
                    program.verify(address, step);
                    match allocator.free(address) {
                        Ok(()) => program.gave(at),
                        // The block must still be ours.
                        Err(AllocError::Driver(_)) => {
                            failures += 1;
                            assert_eq!(allocator.block_at(address).map(|block| block.state), Some(BlockState::Allocated));
                        }
                        Err(other) => panic!("step {step}: {other}"),
                    }
                }
            }
            90..=95 => {
                if let Some(at) = program.pick(&mut random) {
                    allocator.record_stream(program.order[at], StreamId(random.below(STREAMS))).expect("live");
                }
                gpu.work(StreamId(random.below(STREAMS)), random.below(9));
            }
            96 | 97 => gpu.advance(random.below(9)),
            98 => failures += u64::from(allocator.process_events().is_err()),
            _ if random.below(8) == 0 => failures += u64::from(allocator.empty_cache().is_err()),
            _ => {}
        }
        if step % 64 == 0 {
            program.check(&allocator, step);
        }
        if step % 2000 == 0 {
            allocator.validate().unwrap_or_else(|why| panic!("step {step}: {why}"));
        }
    }
    // Once the driver is well again, everything can go back.
    gpu.heal();
    while let Some(&address) = program.order.first() {
        program.verify(address, steps);
        allocator.free(address).expect("the driver is well");
        program.gave(0);
    }
    allocator.empty_cache().expect("the driver is well");
    allocator.validate().unwrap_or_else(|why| panic!("{why}"));
    assert_eq!(allocator.raw_stats().reserved_bytes.all.current, 0);
    drop(allocator);
    let usage = gpu.usage();
    assert_eq!(SimUsage { streams: 0, host_bytes: 0, ..usage }, SimUsage::default(), "after the end");
    failures
}

/// Four configurations; by default 1,000,000 operations in all, one driver call in 30 failing.
#[test]
fn the_books_stay_right_whatever_call_fails() {
    let steps = operations(1_000_000) / 4;
    for (seed, text) in [
        "",
        "expandable_segments:True",
        "max_split_size_mb:24,garbage_collection_threshold:0.5,per_process_memory_fraction:0.9",
        "expandable_segments:True,large_segment_size_mb:12",
    ]
    .into_iter()
    .enumerate()
    {
        let failures = with_faults(seed as u64 + 5, steps, 30, text);
        assert!(failures > steps / 2000, "{text}: only {failures} driver failures came through");
    }
}

/// Whole blocks are filled when handed out and read when given up: two live blocks that share a byte would show.
#[test]
fn data_written_into_a_block_is_there_when_it_is_freed() {
    for text in ["", "expandable_segments:True", "roundup_power2_divisions:4"] {
        let policy = Policy::pytorch(TorchVersion::NEWEST_READ);
        let (config, _) = AllocConfig::parse(text, &policy).expect(text);
        let gpu = SimGpu::new(64 * MIB);
        let mut allocator = DeviceAllocator::new(gpu.clone(), policy, config);
        let mut random = Random(99);
        let mut live: Vec<(u64, u64, u32)> = Vec::new();
        for step in 0..3000u32 {
            if random.below(2) == 0 && live.len() < 60 {
                let got =
                    allocator.malloc(1 + random.below(if step % 50 == 0 { 3 * MIB } else { 40_000 }), StreamId::DEFAULT).expect("room");
                gpu.memset_d32(got.address, step, got.size / 4, StreamId::DEFAULT).expect("inside");
                live.push((got.address, got.size, step));
            } else if !live.is_empty() {
                let (address, size, stamp) = live.swap_remove(random.below(live.len() as u64) as usize);
                let mut bytes = vec![0; size as usize];
                gpu.copy_to_host(&mut bytes, address).expect("inside");
                assert!(bytes.chunks_exact(4).all(|word| word == stamp.to_ne_bytes()), "{text}: {address:#x} was overwritten");
                allocator.free(address).expect("live");
            }
        }
    }
}

/// The check above can fail: the same program over an allocator that hands out overlapping blocks.
#[test]
#[should_panic(expected = "overlaps the live block")]
fn overlapping_blocks_are_noticed() {
    let gpu = SimGpu::new(64 * MIB);
    let mut allocator = DeviceAllocator::new(gpu.clone(), Policy::proven(), AllocConfig::default());
    let mut program = Program::new(gpu);
    let got = allocator.malloc(4096, StreamId::DEFAULT).expect("room");
    program.took(&got, 4096, 0);
    program.took(&Allocation { address: got.address + 3584, size: 512, ..got }, 512, 1);
}

#[test]
fn threads_share_one_device() {
    let gpu = SimGpu::new(1 << 30);
    let allocator = CachingAllocator::new(gpu.clone(), Policy::proven(), AllocConfig::default());
    let per_thread = 3000;
    std::thread::scope(|scope| {
        for thread in 0..4u64 {
            let (allocator, gpu) = (&allocator, &gpu);
            scope.spawn(move || {
                let mut random = Random(thread + 1);
                let mut live: Vec<u64> = Vec::new();
                for step in 0..per_thread {
                    if random.below(2) == 0 && live.len() < 50 {
                        let got = allocator.malloc_tagged(1 + random.below(2 * MIB), StreamId(0), thread).expect("room");
                        gpu.copy_to_device(got.address, &(thread << 32 | step).to_le_bytes()).expect("inside");
                        gpu.copy_to_device(got.address + got.size - 8, &got.address.to_le_bytes()).expect("inside");
                        live.push(got.address);
                    } else if !live.is_empty() {
                        let address = live.swap_remove(random.below(live.len() as u64) as usize);
                        let block = allocator.lock().block_at(address).expect("live");
                        assert_eq!(block.tag, thread);
                        let (mut front, mut back) = ([0; 8], [0; 8]);
                        gpu.copy_to_host(&mut front, address).expect("inside");
                        gpu.copy_to_host(&mut back, address + block.size - 8).expect("inside");
                        assert_eq!((u64::from_le_bytes(front) >> 32, u64::from_le_bytes(back)), (thread, address));
                        allocator.free(address).expect("live");
                    }
                }
                for address in live {
                    allocator.free(address).expect("live");
                }
            });
        }
    });
    allocator.lock().validate().unwrap_or_else(|why| panic!("{why}"));
    assert_eq!(allocator.stats().allocation.all.current, 0);
    allocator.empty_cache().expect("no faults");
    assert_eq!(gpu.usage().bytes, 0);
}
