//! One test a rule, for the rules that recorded traces do not reach.

use super::random::Random;
use crate::gpu::alloc::*;
use crate::gpu::driver::sim::{AddressOrder, SimConfig, SimGpu};
use crate::gpu::driver::{Call, Driver, StreamId, code};

const MIB: u64 = 1 << 20;
const MAIN: StreamId = StreamId::DEFAULT;

type Alloc = DeviceAllocator<SimGpu>;

fn newest() -> Policy {
    Policy::pytorch(TorchVersion::NEWEST_READ)
}

fn with(capacity: u64, text: &str, policy: Policy) -> (SimGpu, Alloc) {
    let gpu = SimGpu::new(capacity);
    let (config, _) = AllocConfig::parse(text, &newest()).expect(text);
    (gpu.clone(), DeviceAllocator::new(gpu, policy, config))
}

fn plain(text: &str) -> (SimGpu, Alloc) {
    with(1 << 30, text, Policy::proven())
}

fn take(allocator: &mut Alloc, bytes: u64) -> u64 {
    allocator.malloc(bytes, MAIN).expect("there is room").address
}

fn takes(allocator: &mut Alloc, bytes: u64, times: usize) -> Vec<u64> {
    (0..times).map(|_| take(allocator, bytes)).collect()
}

fn give(allocator: &mut Alloc, addresses: &[u64]) {
    for address in addresses {
        allocator.free(*address).expect("live");
    }
}

fn reserved(allocator: &Alloc) -> u64 {
    allocator.raw_stats().reserved_bytes.all.current
}

fn oom(result: Result<Allocation, AllocError>) -> Box<OutOfMemory> {
    match result {
        Err(AllocError::OutOfMemory(oom)) => oom,
        other => panic!("expected out of memory, got {other:?}"),
    }
}

fn ok(allocator: &Alloc) {
    allocator.validate().unwrap_or_else(|why| panic!("{why}"));
}

// ---- requests at the edges ------------------------------------------------------------------------------------------

#[test]
fn zero_bytes_get_the_null_address_and_one_exbibyte_is_refused() {
    let (gpu, mut a) = plain("");
    let nothing = a.malloc(0, MAIN).expect("nothing is always there");
    assert!(nothing.is_null());
    a.free(0).expect("null is accepted");
    assert!(matches!(a.malloc(1 << 60, MAIN), Err(AllocError::TooLarge { requested }) if requested == 1 << 60));
    assert_eq!(oom(a.malloc((1 << 60) - 1, MAIN)).tried.last(), Some(&Step::Retry));
    assert_eq!(gpu.calls(Call::MemAlloc), 2, "only the last request asked, twice");
    assert_eq!(a.raw_stats().allocation.all.allocated, 0);
}

#[test]
fn wrong_frees_are_refused() {
    let (_, mut a) = plain("");
    let x = take(&mut a, 1000);
    assert!(matches!(a.free(x + 512), Err(AllocError::NotAllocated { .. })));
    a.free(x).expect("live");
    assert_eq!(a.free(x).expect_err("twice").to_string(), format!("address {x:#x} is not allocated here"));
    assert!(a.record_stream(x, StreamId(1)).is_err());
    ok(&a);
}

#[test]
fn segments_are_2_20_or_rounded_mib() {
    let (_, mut a) = plain("");
    for (bytes, taken) in [(1, 2), (MIB, 2), (MIB + 1, 20), (10 * MIB - 1, 20), (10 * MIB, 10), (21 * MIB + 1, 22)] {
        let got = a.malloc(bytes, MAIN).expect("room");
        let expected = if bytes == MIB { 0 } else { taken * MIB };
        // The second small request and the second medium one fit into what is there.
        if got.taken > 0 {
            assert_eq!(got.taken, expected, "{bytes}");
        } else {
            assert!(matches!(bytes, MIB | 10_485_759), "{bytes}");
        }
    }
    let (_, mut a) = with(1 << 30, "large_segment_size_mb:64", newest());
    assert_eq!(a.malloc(2 * MIB, MAIN).expect("room").taken, 64 * MIB);
    assert_eq!(a.malloc(10 * MIB, MAIN).expect("room").taken, 0, "from the rest of the 64 MiB");
}

#[test]
fn shrinking_a_tensor_below_1_mib_can_raise_the_total() {
    let (_, mut a) = plain("");
    let x = take(&mut a, 2 * MIB);
    give(&mut a, &[x]);
    take(&mut a, MIB / 2);
    assert_eq!(reserved(&a), 22 * MIB);
    let (_, mut a) = plain("");
    let x = take(&mut a, 2 * MIB);
    give(&mut a, &[x]);
    take(&mut a, 2 * MIB);
    assert_eq!(reserved(&a), 20 * MIB);
}

#[test]
fn order_decides_fragmentation_unless_segments_expand() {
    let run = |text: &str, first: u64, second: u64| {
        let (_, mut a) = plain(text);
        let blocks = takes(&mut a, first * MIB, (128 / first) as usize);
        give(&mut a, &blocks);
        takes(&mut a, second * MIB, (128 / second) as usize);
        ok(&a);
        reserved(&a) / MIB
    };
    assert_eq!(run("", 16, 32), 256);
    assert_eq!(run("", 32, 16), 128);
    assert_eq!(run("expandable_segments:True", 16, 32), 140);
    assert_eq!(run("expandable_segments:True", 32, 16), 140);
}

// ---- splitting ------------------------------------------------------------------------------------------------------

#[test]
fn a_large_block_keeps_a_rest_of_up_to_1_mib_and_a_small_one_splits_at_512_bytes() {
    for (bytes, size) in [(19 * MIB, 20 * MIB), (19 * MIB - 512, 19 * MIB - 512)] {
        let (_, mut a) = plain("");
        give(&mut a, &[]);
        let x = take(&mut a, 20 * MIB);
        give(&mut a, &[x]);
        assert_eq!(a.malloc(bytes, MAIN).expect("cached").size, size);
    }
    let (_, mut a) = plain("");
    let x = a.malloc(MIB, MAIN).expect("room");
    let y = a.malloc(MIB - 512, MAIN).expect("room");
    assert_eq!((x.size, y.size), (MIB, MIB - 512));
    assert_eq!(a.malloc(1, MAIN).expect("the rest").address, y.address + MIB - 512);
    assert_eq!(a.raw_stats().inactive_split.all.current, 0);
    ok(&a);
}

#[test]
fn split_limits_keep_large_blocks_whole() {
    let text = "max_split_size_mb:32,max_non_split_rounding_mb:20";
    let (_, mut a) = plain(text);
    let x = take(&mut a, 40 * MIB);
    assert_eq!(a.raw_stats().oversize_allocations.current, 1);
    assert_eq!(a.raw_stats().oversize_segments.current, 1);
    give(&mut a, &[x]);
    // Below the limit: a block at or above it is not used.
    let small = a.malloc(31 * MIB, MAIN).expect("room");
    assert_eq!(small.taken, 32 * MIB, "a new segment, although 40 MiB are cached");
    // At or above: it is used whole, if less than 20 MiB larger.
    let fits = a.malloc(32 * MIB, MAIN).expect("cached");
    assert_eq!((fits.taken, fits.size, fits.address), (0, 40 * MIB, x));
    give(&mut a, &[x]);
    let y = take(&mut a, 60 * MIB);
    give(&mut a, &[y]);
    let z = a.malloc(40 * MIB, MAIN).expect("cached");
    assert_eq!(z.address, x, "best fit");
    let w = a.malloc(40 * MIB, MAIN).expect("room");
    assert_eq!(w.taken, 40 * MIB, "60 >= 40 + 20: too large");
    let v = a.malloc(40 * MIB + 1, MAIN).expect("cached");
    assert_eq!((v.address, v.size), (y, 60 * MIB), "60 < 40 MiB + 512 + 20 MiB");
    assert_eq!(a.raw_stats().oversize_allocations.current, 4, "31 MiB got a block of 32");
    assert_eq!(a.raw_stats().oversize_segments.current, 4, "32 MiB counts too");
    ok(&a);
}

#[test]
fn a_split_limit_frees_only_what_is_needed_before_everything_is_freed() {
    // 180 MiB: three cached blocks of 40, 50 and 60 MiB, 30 left.
    let (gpu, mut a) = with(180 * MIB, "max_split_size_mb:32", Policy::proven());
    let blocks = [40, 50, 60].map(|mb| take(&mut a, mb * MIB));
    give(&mut a, &blocks);
    // 39 MiB: 40 fits the cache. 85 MiB: nothing fits; 60, then 50 go back.
    let got = a.malloc(85 * MIB, MAIN).expect("after giving back");
    assert_eq!((got.taken, got.retried), (86 * MIB, false));
    assert_eq!(gpu.calls(Call::MemFree), 2);
    assert!(a.segments().any(|segment| segment.address == blocks[0]), "40 MiB stay");
    // One block that would do on its own goes alone: 61 MiB are wanted, 62 are cached but 20 more than asked.
    let (gpu, mut a) = with(100 * MIB, "max_split_size_mb:32", Policy::proven());
    let blocks = [34, 60].map(|mb| take(&mut a, mb * MIB));
    give(&mut a, &blocks);
    let got = a.malloc(36 * MIB, MAIN).expect("after giving back");
    assert_eq!((got.taken, gpu.calls(Call::MemFree)), (36 * MIB, 1));
    assert!(a.segments().any(|segment| segment.address == blocks[0]));
    ok(&a);
}

// ---- ties -----------------------------------------------------------------------------------------------------------

#[test]
fn equal_blocks_are_taken_by_address_or_by_age() {
    let chosen = |policy: Policy, order| {
        let gpu = SimGpu::with(SimConfig { order, ..SimConfig::new(1 << 30) });
        let mut a = DeviceAllocator::new(gpu, policy, AllocConfig::default());
        let blocks = takes(&mut a, 12 * MIB, 2);
        give(&mut a, &[blocks[1], blocks[0]]);
        let got = take(&mut a, 12 * MIB);
        blocks.iter().position(|block| *block == got)
    };
    let old = Policy::proven();
    assert_eq!(chosen(old, AddressOrder::Ascending), Some(0));
    assert_eq!(chosen(old, AddressOrder::Descending), Some(1), "lowest address");
    assert_eq!(chosen(newest(), AddressOrder::Descending), Some(0), "oldest object");
    assert_eq!(chosen(old.with_tie_break(TieBreak::AddressDescending), AddressOrder::Ascending), Some(1));
}

#[test]
fn the_remainder_of_a_split_keeps_its_age_and_the_front_is_new() {
    let policy = newest();
    let (_, mut a) = with(1 << 30, "", policy);
    // Segment 1 is split: front (new), remainder (old). Segment 2 is newer than the remainder.
    let front = take(&mut a, 8 * MIB);
    let second = take(&mut a, 12 * MIB); // from the remainder of 12 MiB: old object, handed out whole
    let third = take(&mut a, 12 * MIB); // a segment of its own
    assert_eq!(second, front + 8 * MIB);
    give(&mut a, &[third, second]);
    assert_eq!(take(&mut a, 12 * MIB), second, "the remainder is the oldest object");
    ok(&a);
}

// ---- streams --------------------------------------------------------------------------------------------------------

#[test]
fn streams_do_not_share_free_blocks() {
    let (gpu, mut a) = plain("");
    let side = gpu.stream_create().expect("stream");
    let x = take(&mut a, 1000);
    give(&mut a, &[x]);
    assert_eq!(a.malloc(1000, side).expect("room").taken, 2 * MIB);
    assert_eq!(a.malloc(1000, MAIN).expect("cached").address, x);
}

#[test]
fn a_block_used_on_another_stream_waits_for_it() {
    let (gpu, mut a) = plain("");
    let side = gpu.stream_create().expect("stream");
    let x = take(&mut a, 1000);
    a.record_stream(x, MAIN).expect("no-op on its own stream");
    a.record_stream(x, side).expect("live");
    a.record_stream(x, side).expect("twice is once");
    gpu.work(side, 10);
    give(&mut a, &[x]);
    let stats = a.raw_stats();
    assert_eq!((stats.allocation.all.current, stats.active.all.current), (0, 1));
    assert_eq!((a.pending_frees(), gpu.calls(Call::EventRecord)), (1, 1));
    assert!(matches!(a.free(x), Err(AllocError::NotAllocated { why: "was freed already and waits for another stream", .. })));
    let y = take(&mut a, 1000);
    assert_ne!(y, x, "not done yet");
    gpu.advance(10);
    assert_eq!(a.raw_stats().active.all.current, 2, "nobody looked yet");
    assert_eq!(take(&mut a, 1000), x, "the next request looks first");
    ok(&a);
    assert_eq!(gpu.usage().events, 1, "events are used again");
    a.record_stream(x, side).expect("live");
    give(&mut a, &[x]);
    assert_eq!(gpu.usage().events, 1);
}

#[test]
fn late_events_hold_memory_until_seen_and_do_not_hold_up_other_streams() {
    let (gpu, mut a) = plain("");
    let (one, two) = (gpu.stream_create().expect("stream"), gpu.stream_create().expect("stream"));
    let [x, y, z] = [3, 4, 5].map(|kib| take(&mut a, kib * 1024));
    a.record_stream(x, one).expect("live");
    a.record_stream(y, one).expect("live");
    a.record_stream(z, two).expect("live");
    gpu.delay_events(100);
    give(&mut a, &[x]);
    gpu.delay_events(0);
    give(&mut a, &[y, z]);
    a.process_events().expect("no faults");
    assert_eq!(a.pending_frees(), 2, "y waits behind x on the same stream; z is free");
    gpu.advance(100);
    a.process_events().expect("no faults");
    assert_eq!(a.pending_frees(), 0);
    ok(&a);
}

#[test]
fn emptying_the_cache_waits_for_pending_frees() {
    let (gpu, mut a) = plain("");
    let side = gpu.stream_create().expect("stream");
    let x = take(&mut a, 30 * MIB);
    a.record_stream(x, side).expect("live");
    gpu.work(side, 1000);
    give(&mut a, &[x]);
    let released = a.empty_cache().expect("no faults");
    assert_eq!(released.iter().map(|r| r.size).sum::<u64>(), 30 * MIB);
    assert_eq!(a.raw_stats().num_sync_all_streams, 1);
    assert_eq!(gpu.usage().bytes, 0);
}

/// PyTorch #189504: the retry waits for pending frees, but does not search the cache again.
#[test]
fn a_block_that_becomes_free_during_the_retry_is_not_searched_for() {
    let (gpu, mut a) = with(40 * MIB, "", Policy::proven());
    let side = gpu.stream_create().expect("stream");
    let keep = take(&mut a, 2 * MIB);
    let x = take(&mut a, 18 * MIB); // the rest of the same 20 MiB segment
    let _other = take(&mut a, 20 * MIB);
    a.record_stream(x, side).expect("live");
    gpu.work(side, 1000);
    give(&mut a, &[x]);
    let error = oom(a.malloc(18 * MIB, MAIN));
    assert_eq!(error.attribution.split_pinned, 18 * MIB, "it fits, and is free by now");
    assert_eq!(take(&mut a, 18 * MIB), x, "so the next request gets it");
    assert_eq!(keep, x - 2 * MIB);
    ok(&a);
}

// ---- limits and running out -----------------------------------------------------------------------------------------

#[test]
fn everything_is_tried_in_order_before_running_out() {
    let text = "max_split_size_mb:32,garbage_collection_threshold:0.9,per_process_memory_fraction:0.99";
    let (gpu, mut a) = with(64 * MIB, text, newest());
    a.set_pressure_callback(|_| Vec::new());
    let pool = a.create_pool(PoolOptions { use_on_oom: true, no_split: false });
    let _live = take(&mut a, 40 * MIB);
    let error = oom(a.malloc(30 * MIB, MAIN));
    use Step::*;
    assert_eq!(error.tried, [Search, Callback, GarbageCollect, Driver, FallbackPool, ReleaseOversize, ReleaseCached, Retry]);
    let stats = a.raw_stats();
    assert_eq!((stats.num_ooms, stats.num_alloc_retries, stats.num_sync_all_streams), (1, 1, 1));
    assert_eq!(gpu.calls(Call::MemAlloc), 1, "the fraction limit stops it before the driver is asked");
    assert_eq!((error.alloc_size, error.allowed), (30 * MIB, Some((0.99 * 64.0 * 1048576.0) as u64)));
    a.release_pool(pool).expect("one user");
    ok(&a);
}

#[test]
fn the_retry_gives_back_what_is_cached() {
    let (gpu, mut a) = with(64 * MIB, "", Policy::proven());
    let blocks = takes(&mut a, 20 * MIB, 3);
    give(&mut a, &blocks);
    let got = a.malloc(50 * MIB, MAIN).expect("after emptying the cache");
    assert!(got.retried);
    assert_eq!((a.raw_stats().num_alloc_retries, a.raw_stats().num_ooms), (1, 0));
    assert_eq!((gpu.calls(Call::MemFree), reserved(&a)), (3, 50 * MIB));
    // Other processes' memory counts.
    gpu.set_others(14 * MIB);
    let error = oom(a.malloc(2 * MIB, MAIN));
    assert_eq!((error.others, error.free), (14 * MIB, 0));
    ok(&a);
}

#[test]
fn the_callback_may_free_before_the_driver_is_asked() {
    let (gpu, mut a) = with(64 * MIB, "", Policy::proven());
    let spare = take(&mut a, 40 * MIB);
    let mut once = Some(spare);
    a.set_pressure_callback(move |_| once.take().into_iter().collect());
    assert_eq!(take(&mut a, 40 * MIB), spare);
    assert_eq!(gpu.calls(Call::MemAlloc), 1);
}

#[test]
fn a_memory_fraction_limits_and_1_lifts_it() {
    let (gpu, mut a) = with(100 * MIB, "", newest());
    a.set_memory_fraction(0.5).expect("in range");
    take(&mut a, 40 * MIB);
    let error = oom(a.malloc(12 * MIB, MAIN));
    assert_eq!(error.allowed, Some(50 * MIB));
    assert!(error.pytorch_message().contains(" is free. 50.00 MiB allowed; Of the allocated memory 40.00 MiB is allocated by PyTorch"));
    assert!(error.hints()[0].contains("memory fraction"));
    assert_eq!(gpu.calls(Call::MemAlloc), 1);
    a.set_memory_fraction(1.0).expect("in range");
    take(&mut a, 12 * MIB);
    assert!(matches!(a.set_memory_fraction(1.5), Err(AllocError::Argument(_))));
    // Older: a fraction of 1 is a limit like any other, here the whole device.
    let (_, mut a) = with(100 * MIB, "", Policy::pytorch(TorchVersion::new(2, 7)));
    a.set_memory_fraction(1.0).expect("in range");
    assert_eq!(oom(a.malloc(102 * MIB, MAIN)).allowed, Some(100 * MIB));
}

#[test]
fn a_request_over_the_fraction_can_be_rejected_at_once() {
    let (gpu, mut a) = with(100 * MIB, "throw_on_cudamalloc_oom:True,per_process_memory_fraction:0.5", newest());
    let x = take(&mut a, 40 * MIB);
    give(&mut a, &[x]);
    let error = oom(a.malloc(45 * MIB, MAIN));
    assert!(error.rejected);
    assert_eq!(error.tried, [Step::Search, Step::Driver]);
    let stats = a.raw_stats();
    assert_eq!((stats.num_oom_rejections, stats.num_ooms, stats.num_alloc_retries), (1, 0, 0));
    assert_eq!((gpu.calls(Call::MemFree), reserved(&a)), (0, 40 * MIB), "nothing was given back");
    assert_eq!(
        error.pytorch_message(),
        "Allocation was preemptively rejected because it would exceed per_process_memory_fraction limit. Requested size: 46.00 MiB"
    );
}

#[test]
fn garbage_collection_frees_old_whole_blocks_of_the_large_pool() {
    let text = "garbage_collection_threshold:0.5,per_process_memory_fraction:0.8";
    let (gpu, mut a) = with(200 * MIB, text, newest());
    // Limit 160, threshold 80; 92 reserved.
    let x = take(&mut a, 1000);
    let blocks = takes(&mut a, 30 * MIB, 3);
    give(&mut a, &[x, blocks[0]]);
    for _ in 0..5 {
        let x = take(&mut a, 1000); // searches of the small pool age nothing here
        give(&mut a, &[x]);
    }
    give(&mut a, &[blocks[1]]);
    let keep = take(&mut a, 30 * MIB); // ages what stays; the oldest object is taken
    assert_eq!(keep, blocks[0]);
    give(&mut a, &[blocks[2], keep]);
    assert_eq!(gpu.calls(Call::MemFree), 0);
    let got = a.malloc(40 * MIB, MAIN).expect("room"); // a miss
    // Ages at the miss: 2 for the second block, 1 for the others; the mean is 4/3. 12 MiB had to go, 30 went.
    assert_eq!((gpu.calls(Call::MemFree), got.retried), (1, false), "before the driver was asked");
    assert!(a.segments().all(|segment| segment.address != blocks[1]));
    ok(&a);
    // Without a fraction below 1 the threshold does nothing.
    let (gpu, mut a) = with(200 * MIB, "garbage_collection_threshold:0.1", newest());
    let blocks = takes(&mut a, 30 * MIB, 3);
    give(&mut a, &blocks);
    take(&mut a, 40 * MIB);
    assert_eq!(gpu.calls(Call::MemFree), 0);
}

#[test]
fn garbage_collection_takes_all_blocks_at_or_above_the_mean_age() {
    let (gpu, mut a) = with(1 << 30, "garbage_collection_threshold:0.05,per_process_memory_fraction:0.9", newest());
    let blocks = takes(&mut a, 30 * MIB, 4);
    // Freed with 0, 1, 2 and 3 searches of the large pool to come before the miss (and the miss itself).
    for (at, block) in blocks.iter().enumerate() {
        give(&mut a, &[*block]);
        if at < 3 {
            take(&mut a, 2 * MIB * (10 + at as u64) * 2); // 40, 44, 48 MiB: misses
        }
    }
    // The threshold (about 46 MiB) was passed long ago, so every miss collected what was oldest.
    assert_eq!(gpu.calls(Call::MemFree), 3, "each miss freed the one block that was cached then");
    assert!(a.segments().any(|segment| segment.address == blocks[3]));
    ok(&a);
}

// ---- giving back ----------------------------------------------------------------------------------------------------

#[test]
fn the_cache_goes_back_large_first_by_size_and_address() {
    let (gpu, mut a) = plain("");
    let side = gpu.stream_create().expect("stream");
    let large = [40 * MIB, 12 * MIB, 12 * MIB, 2 * MIB].map(|bytes| take(&mut a, bytes));
    let small = take(&mut a, 100);
    let other = a.malloc(14 * MIB, side).expect("room").address;
    let pinned = take(&mut a, 4 * MIB); // shares the 20 MiB segment with the 2 MiB block
    give(&mut a, &[small, large[0], other, large[2], large[1], large[3]]);
    let released: Vec<(u64, bool)> = a.empty_cache().expect("no faults").iter().map(|r| (r.address, r.small)).collect();
    assert_eq!(released, [(large[1], false), (large[2], false), (large[0], false), (other, false), (small, true)]);
    assert_eq!(reserved(&a), 20 * MIB, "one live block of 4 MiB pins 20 MiB");
    let pins = a.pinned(8);
    assert_eq!((pins.len(), pins[0].free, pins[0].holders[0].address), (1, 16 * MIB, pinned));
    ok(&a);
}

#[test]
fn a_single_segment_can_be_released() {
    let (_, mut a) = plain("");
    let x = take(&mut a, 12 * MIB);
    let y = take(&mut a, 2 * MIB);
    assert!(a.release_segment(x).is_err(), "live");
    give(&mut a, &[x]);
    assert_eq!(a.release_segment(x).expect("free").size, 12 * MIB);
    assert!(a.release_segment(y).is_err() && a.release_segment(x).is_err());
    ok(&a);
}

// ---- expandable segments --------------------------------------------------------------------------------------------

#[test]
fn expandable_segments_map_whole_pages_and_grow_in_place() {
    let (gpu, mut a) = plain("expandable_segments:True");
    let x = a.malloc(30 * MIB, MAIN).expect("room");
    assert_eq!((x.size, x.taken, x.taken_address), (30 * MIB, 40 * MIB, x.address));
    assert_eq!(gpu.calls(Call::MemCreate), 2, "two pages of 20 MiB");
    assert_eq!(gpu.calls(Call::MemSetAccess), 1);
    // 10 MiB are mapped and free: 25 more need one more page, right behind.
    let y = a.malloc(25 * MIB, MAIN).expect("room");
    assert_eq!((y.address, y.taken), (x.address + 30 * MIB, 20 * MIB));
    let small = a.malloc(512, MAIN).expect("room");
    assert_eq!((small.taken, gpu.usage().reservations), (2 * MIB, 2), "small and large have ranges of their own");
    let stats = a.raw_stats();
    assert_eq!((stats.segment.all.allocated, stats.num_device_alloc), (0, 3), "maps are not segments");
    assert_eq!(stats.inactive_split.all.current, 0);
    let reserved_range = a.segments().find(|segment| !segment.small).expect("large").size;
    assert_eq!(reserved_range, ((1u64 << 30) * 9 / 8).next_multiple_of(20 * MIB));
    ok(&a);
}

#[test]
fn unmapping_gives_back_whole_pages_inside_free_blocks_only() {
    let (gpu, mut a) = plain("expandable_segments:True");
    let blocks = takes(&mut a, 15 * MIB, 4); // 60 MiB: pages 0-20-40-60
    give(&mut a, &[blocks[1], blocks[2]]); // 15..45 free: only page 20..40 is wholly free
    let released = a.empty_cache().expect("no faults");
    assert_eq!(released.len(), 1);
    assert_eq!((released[0].address, released[0].size, released[0].expandable), (blocks[0] + 20 * MIB, 20 * MIB, true));
    assert_eq!((gpu.calls(Call::StreamSynchronize), gpu.calls(Call::MemUnmap)), (1, 1));
    let states: Vec<(BlockState, u64)> =
        a.segments().flat_map(|segment| a.blocks_of(segment.id).collect::<Vec<_>>()).map(|b| (b.state, b.size / MIB)).collect();
    use BlockState::*;
    assert_eq!(states[..5], [(Allocated, 15), (Free, 5), (Unmapped, 20), (Free, 5), (Allocated, 15)]);
    let snapshot = a.snapshot();
    let ranges: Vec<(u64, u64)> = snapshot.segments.iter().map(|s| ((s.address - blocks[0]) / MIB, s.total_size / MIB)).collect();
    assert_eq!(ranges, [(0, 20), (40, 20)], "one segment a mapped range");
    // 28 MiB fit into the hole plus the free ends: 5 + 20 + 5.
    let hole = a.malloc(28 * MIB, MAIN).expect("room");
    assert_eq!((hole.address, hole.taken), (blocks[0] + 15 * MIB, 20 * MIB));
    give(&mut a, &[hole.address, blocks[0], blocks[3]]);
    a.empty_cache().expect("no faults");
    assert_eq!((gpu.usage().bytes, gpu.usage().reservations), (0, 0), "an unmapped range is dropped");
    ok(&a);
}

#[test]
fn the_growable_tail_is_spared() {
    let (_, mut a) = plain("expandable_segments:True");
    let x = take(&mut a, 14 * MIB); // tail: 6 MiB mapped, unmapped behind
    let tail_start = x + 14 * MIB;
    let y = take(&mut a, 6 * MIB); // fills the page
    let z = take(&mut a, 12 * MIB); // second page; tail of 8 MiB
    assert_eq!((y, z), (tail_start, x + 20 * MIB));
    give(&mut a, &[x]); // a hole of 14 MiB
    // 5 MiB: best fit is the 8 MiB tail, but counted with what it could grow to it is the largest.
    let got = a.malloc(5 * MIB, MAIN).expect("cached");
    assert_eq!(got.address, x, "the hole is used, the tail kept");
    ok(&a);
}

#[test]
fn with_expansion_turned_off_its_blocks_are_passed_over() {
    let (_, mut a) = plain("expandable_segments:True");
    let x = take(&mut a, 12 * MIB);
    give(&mut a, &[x]);
    let off = AllocConfig::default();
    a.set_config(off);
    let got = a.malloc(12 * MIB, MAIN).expect("room");
    assert_eq!(got.taken, 12 * MIB, "a segment of its own");
    give(&mut a, &[got.address]);
    assert_eq!(take(&mut a, 11 * MIB), got.address);
    ok(&a);
}

#[test]
fn running_out_while_mapping_undoes_the_pages_of_that_call() {
    let (gpu, mut a) = with(50 * MIB, "expandable_segments:True", Policy::proven());
    let x = take(&mut a, 15 * MIB);
    let error = oom(a.malloc(50 * MIB, MAIN));
    assert!(error.expandable_segments && error.hints().iter().all(|hint| !hint.contains("expandable_segments:True")));
    assert_eq!((reserved(&a), gpu.usage().bytes, a.stranded_bytes()), (20 * MIB, 20 * MIB, 0));
    give(&mut a, &[x]);
    let y = a.malloc(40 * MIB, MAIN).expect("20 cached, 20 more fit");
    assert_eq!((y.address, y.taken), (x, 20 * MIB));
    ok(&a);
}

#[test]
fn a_failing_access_call_is_an_error_with_the_books_right() {
    let (gpu, mut a) = plain("expandable_segments:True");
    gpu.fail(Call::MemSetAccess, 1, code::UNKNOWN);
    let error = a.malloc(30 * MIB, MAIN).expect_err("as on WSL2");
    assert_eq!(error.to_string(), "`cuMemSetAccess` failed with CUDA_ERROR_UNKNOWN (999)");
    assert_eq!((gpu.usage().bytes, reserved(&a)), (0, 0));
    ok(&a);
    // Undoing fails too: the pages are remembered, and used by the next attempt.
    gpu.fail(Call::MemSetAccess, 1, code::UNKNOWN);
    gpu.fail(Call::MemUnmap, 1, code::UNKNOWN);
    gpu.fail(Call::MemRelease, 1, code::UNKNOWN);
    a.malloc(30 * MIB, MAIN).expect_err("again");
    assert_eq!((gpu.usage().bytes, a.stranded_bytes(), reserved(&a)), (40 * MIB, 40 * MIB, 0));
    ok(&a);
    take(&mut a, 30 * MIB);
    assert_eq!((gpu.usage().bytes, a.stranded_bytes(), reserved(&a)), (40 * MIB, 0, 40 * MIB));
    ok(&a);
}

#[test]
fn address_space_can_run_out_before_memory() {
    let (gpu, mut a) = plain("expandable_segments:True");
    gpu.limit_addresses(64 * MIB);
    assert_eq!(oom(a.malloc(MIB * 2, MAIN)).free, 1 << 30);
    let (_, mut a) = with(1 << 30, "expandable_segments:True,expandable_segments_reserve:0.05", newest());
    oom(a.malloc(100 * MIB, MAIN));
    take(&mut a, 40 * MIB);
    ok(&a);
}

// ---- private pools --------------------------------------------------------------------------------------------------

#[test]
fn private_pools_keep_their_memory_until_released() {
    let (gpu, mut a) = plain("");
    let x = take(&mut a, 12 * MIB);
    give(&mut a, &[x]);
    let pool = a.create_pool(PoolOptions::default());
    a.begin_allocate(pool, StreamFilter::All, false).expect("once");
    assert!(a.begin_allocate(pool, StreamFilter::All, false).is_err());
    let y = a.malloc(12 * MIB, MAIN).expect("room");
    assert_eq!(y.taken, 12 * MIB, "the default pool's free block is not used");
    a.end_allocate(pool).expect("open");
    assert!(a.end_allocate(pool).is_err());
    give(&mut a, &[y.address]);
    assert_eq!(take(&mut a, 12 * MIB), x, "and the other way round");
    assert_eq!(a.stats().reserved_bytes_by_private_pools[&format!("0_{}", pool.1)], 12 * MIB);
    assert_eq!(a.attribution().private_pools, 12 * MIB);
    a.release_pool(pool).expect("a user");
    assert_eq!(a.empty_cache().expect("no faults").len(), 0, "its maker still uses it");
    a.release_pool(pool).expect("the last user");
    assert!(a.release_pool(pool).is_err());
    let released = a.empty_cache().expect("no faults");
    assert_eq!((released.len(), released[0].pool, released[0].address), (1, pool, y.address));
    assert!(a.pool_users(pool).is_err(), "gone");
    assert_eq!(gpu.usage().bytes, 12 * MIB);
    ok(&a);
}

#[test]
fn the_newest_matching_diversion_wins() {
    let (gpu, mut a) = plain("");
    let side = gpu.stream_create().expect("stream");
    let (one, two) = (a.create_pool(PoolOptions::default()), a.create_pool(PoolOptions::default()));
    a.begin_allocate(one, StreamFilter::All, false).expect("once");
    a.begin_allocate(two, StreamFilter::Streams(vec![side]), false).expect("once");
    let pool_of = |a: &mut Alloc, stream| {
        let got = a.malloc(100, stream).expect("room");
        a.block_at(got.address).expect("live").pool
    };
    assert_eq!((pool_of(&mut a, MAIN), pool_of(&mut a, side)), (one, two));
    a.end_allocate(one).expect("open");
    let mine = StreamFilter::Thread(std::thread::current().id());
    a.begin_allocate(one, mine, false).expect("once");
    assert_eq!(pool_of(&mut a, side), one);
}

#[test]
fn pools_can_serve_as_a_last_resort_and_can_forbid_splitting() {
    let (_, mut a) = with(64 * MIB, "", Policy::proven());
    let pool = a.create_pool(PoolOptions { use_on_oom: true, no_split: true });
    a.begin_allocate(pool, StreamFilter::All, false).expect("once");
    let x = take(&mut a, 40 * MIB);
    a.end_allocate(pool).expect("open");
    give(&mut a, &[x]);
    let _fill = take(&mut a, 24 * MIB);
    let got = a.malloc(16 * MIB, MAIN).expect("from the pool");
    assert_eq!((got.address, got.size, got.retried), (x, 40 * MIB, false), "whole");
    give(&mut a, &[x]);
    // Before 2.8 there is no such resort.
    let (_, mut a) = with(64 * MIB, "", Policy::pytorch(TorchVersion::new(2, 7)));
    let pool = a.create_pool(PoolOptions { use_on_oom: true, no_split: false });
    a.begin_allocate(pool, StreamFilter::All, false).expect("once");
    let x = take(&mut a, 40 * MIB);
    a.end_allocate(pool).expect("open");
    give(&mut a, &[x]);
    oom(a.malloc(30 * MIB, MAIN));
}

#[test]
fn frees_of_shared_blocks_wait_for_the_end_of_a_capture() {
    let (gpu, mut a) = with(1 << 30, "", newest());
    let side = gpu.stream_create().expect("stream");
    let [before, during] = [600, 6000].map(|bytes| take(&mut a, bytes));
    a.record_stream(before, side).expect("live");
    let pool = a.create_pool(PoolOptions::default());
    a.begin_allocate(pool, StreamFilter::Streams(vec![side]), true).expect("once");
    a.record_stream(during, side).expect("live");
    give(&mut a, &[before, during]);
    a.process_events().expect("nothing to do");
    assert_eq!((a.pending_frees(), gpu.calls(Call::EventRecord)), (2, 0), "no events during a capture");
    a.end_allocate(pool).expect("open");
    gpu.work(side, 5);
    a.process_events().expect("no faults");
    assert_eq!((a.pending_frees(), gpu.calls(Call::EventRecord)), (1, 1), "uses named during the capture are done with it");
    gpu.advance(5);
    a.process_events().expect("no faults");
    assert_eq!(a.pending_frees(), 0);
    ok(&a);
}

// ---- driver failures ------------------------------------------------------------------------------------------------

#[test]
fn a_free_whose_event_fails_has_not_happened() {
    let (gpu, mut a) = plain("");
    let side = gpu.stream_create().expect("stream");
    let other = gpu.stream_create().expect("stream");
    let x = take(&mut a, 1000);
    a.record_stream(x, side).expect("live");
    a.record_stream(x, other).expect("live");
    gpu.fail(Call::EventRecord, 2, code::ILLEGAL_ADDRESS);
    assert!(matches!(a.free(x), Err(AllocError::Driver(error)) if error.code == code::ILLEGAL_ADDRESS));
    assert_eq!((a.raw_stats().allocation.all.current, a.pending_frees()), (1, 0));
    ok(&a);
    a.free(x).expect("now it works");
    assert_eq!((a.pending_frees(), gpu.usage().events), (1, 2), "the events of the first attempt are used");
    ok(&a);
}

#[test]
fn a_segment_that_the_driver_does_not_take_back_stays_cached() {
    let (gpu, mut a) = plain("");
    let blocks = takes(&mut a, 12 * MIB, 3);
    give(&mut a, &blocks);
    gpu.fail(Call::MemFree, 2, code::UNKNOWN);
    assert!(a.empty_cache().is_err());
    assert_eq!((reserved(&a), gpu.usage().bytes), (24 * MIB, 24 * MIB));
    ok(&a);
    assert_eq!(a.empty_cache().expect("well again").len(), 2);
}

#[test]
fn errors_other_than_out_of_memory_are_passed_on_at_once() {
    let (gpu, mut a) = plain("");
    gpu.fail(Call::MemAlloc, 1, code::ILLEGAL_ADDRESS);
    assert!(matches!(a.malloc(100, MAIN), Err(AllocError::Driver(_))));
    assert_eq!((gpu.calls(Call::MemAlloc), a.raw_stats().num_ooms), (1, 0));
    gpu.fail(Call::MemAlloc, 1, 12345);
    assert_eq!(
        a.malloc(100, MAIN).expect_err("fails").to_string(),
        "`cuMemAlloc` failed with code 12345, which this version does not know"
    );
    ok(&a);
}

// ---- reports --------------------------------------------------------------------------------------------------------

#[test]
fn out_of_memory_says_what_is_pinned_and_by_whom() {
    let (gpu, mut a) = with(64 * MIB, "", Policy::proven());
    let mut rest = Vec::new();
    for at in 0..3 {
        a.malloc_tagged(4 * MIB, MAIN, 100 + at).expect("room");
        rest.push(take(&mut a, 16 * MIB)); // the rest of the 20 MiB segment
    }
    give(&mut a, &rest);
    gpu.set_others(2 * MIB);
    let error = oom(a.malloc(40 * MIB, MAIN));
    assert_eq!((error.requested, error.capacity, error.others), (40 * MIB, 64 * MIB, 2 * MIB));
    assert_eq!(error.attribution.unallocated() + error.allocated, error.reserved);
    let holders: Vec<u64> = error.pinned.iter().flat_map(|pinned| pinned.holders.iter().map(|h| h.tag)).collect();
    assert_eq!(holders, [100, 101, 102]);
    assert_eq!(error.attribution.split_pinned, 48 * MIB);
    assert!(error.hints()[0].contains("expandable_segments:True"));
    let shown: crate::error::Error = AllocError::OutOfMemory(error).into();
    assert_eq!(shown.exit_code(), 6);
    assert!(shown.message().starts_with("out of memory on GPU 0: 40.00 MiB requested"), "{shown}");
    assert!(shown.causes().iter().any(|cause| cause.contains("pinned by 1 live block(s), the largest 4.00 MiB")));
}

#[test]
fn statistics_follow_a_known_run() {
    let (_, mut a) = plain("");
    let x = take(&mut a, 3 * MIB);
    let y = take(&mut a, 100);
    give(&mut a, &[x]);
    let flat = a.stats().flatten();
    let expect = [
        ("allocated_bytes.all.current", 512),
        ("allocated_bytes.all.peak", 3 * MIB as i64 + 512),
        ("allocated_bytes.large_pool.freed", 3 * MIB as i64),
        ("requested_bytes.small_pool.current", 100),
        ("reserved_bytes.all.current", 22 * MIB as i64),
        ("segment.all.current", 2),
        ("inactive_split.small_pool.current", 1),
        ("inactive_split_bytes.all.current", 2 * MIB as i64 - 512),
        ("inactive_split.large_pool.peak", 1),
        ("num_device_alloc", 2),
        ("max_split_size", -1),
    ];
    for (name, value) in expect {
        assert_eq!(flat[name], value, "{name}");
    }
    a.reset_peak();
    a.reset_accumulated();
    assert_eq!(a.stats().flatten()["allocated_bytes.all.peak"], 512);
    assert_eq!(a.stats().flatten()["num_device_alloc"], 0);
    give(&mut a, &[y]);
}

#[test]
fn without_caching_every_request_goes_to_the_driver() {
    let gpu = SimGpu::new(64 * MIB);
    let mut a = DeviceAllocator::new(gpu.clone(), Policy::proven(), AllocConfig { no_caching: true, ..AllocConfig::default() });
    let x = take(&mut a, 1000);
    assert_eq!(gpu.usage().allocations, 1);
    give(&mut a, &[x]);
    assert_eq!(gpu.usage().allocations, 0);
    assert!(a.free(x).is_err());
}

// ---- recorded states ------------------------------------------------------------------------------------------------

fn seed(address: u64, sizes: &[(u64, BlockState)], stream: u64, small: bool, expandable: bool) -> SegmentSeed {
    let mut at = address;
    let blocks = sizes
        .iter()
        .map(|(size, state)| {
            let block = BlockSeed { address: at, size: *size, requested: *size - 1, state: *state, tag: at };
            at += size;
            block
        })
        .collect();
    SegmentSeed { address, size: at - address, stream: StreamId(stream), small, expandable, pool: PoolId::DEFAULT, blocks }
}

#[test]
fn a_recorded_state_is_taken_up_where_it_was() {
    use BlockState::*;
    let (gpu, mut a) = plain("");
    let base = 0x7f00_0000_0000;
    a.restore(&[
        seed(base, &[(MIB, Allocated), (512, Free), (MIB - 512, PendingFree)], 0, true, false),
        seed(base + 64 * MIB, &[(12 * MIB, Free)], 7, false, false),
    ])
    .expect("possible");
    ok(&a);
    let stats = a.stats();
    assert_eq!((stats.reserved_bytes.all.current, stats.segment.all.current), (14 * MIB, 2));
    assert_eq!((stats.allocation.all.current, stats.active.all.current, stats.inactive_split.all.current), (1, 2, 1));
    assert_eq!(a.malloc(1, MAIN).expect("cached").address, base + MIB);
    assert_eq!(a.malloc(12 * MIB, StreamId(7)).expect("cached").address, base + 64 * MIB);
    a.finish_free(base + MIB + 512).expect("pending");
    assert!(a.finish_free(base).is_err());
    a.begin_free(base).expect("live");
    assert_eq!(a.raw_stats().active.all.current, 3);
    a.finish_free(base).expect("pending");
    assert_eq!(a.block_at(base + MIB).expect("live").size, 512);
    ok(&a);
    assert_eq!(gpu.calls(Call::MemAlloc), 0);
    assert!(a.restore(&[]).is_err(), "not empty");
}

#[test]
fn recorded_expandable_ranges_become_one_segment_that_grows() {
    use BlockState::*;
    let (_, mut a) = plain("expandable_segments:True");
    let base = 0x7f00_0000_0000;
    a.restore(&[
        seed(base + 80 * MIB, &[(5 * MIB, Free), (15 * MIB, Allocated)], 0, false, true),
        seed(base, &[(30 * MIB, Allocated), (10 * MIB, Free)], 0, false, true),
        seed(base + 40 * MIB, &[(20 * MIB, Free)], 0, false, true),
    ])
    .expect("possible");
    ok(&a);
    assert_eq!(a.segments().count(), 1);
    let segment = a.segments().next().expect("one");
    assert_eq!((segment.mapped, a.blocks_of(segment.id).count()), (80 * MIB, 6), "alloc, free (merged), gap, free, alloc, tail");
    assert_eq!(a.malloc(30 * MIB, MAIN).expect("merged").address, base + 30 * MIB);
}

#[test]
fn impossible_states_are_refused() {
    use BlockState::*;
    let base = 0x7f00_0000_0000;
    let bad: [Vec<SegmentSeed>; 5] = [
        vec![seed(base, &[(MIB, Free), (MIB, Free)], 0, true, false)],
        vec![seed(base, &[(2 * MIB, Free)], 0, true, false), seed(base + MIB, &[(2 * MIB, Free)], 0, true, false)],
        vec![SegmentSeed { size: 4 * MIB, ..seed(base, &[(2 * MIB, Free)], 0, true, false) }],
        vec![seed(base, &[(MIB, Unmapped), (MIB, Free)], 0, true, true)],
        vec![SegmentSeed { address: u64::MAX - 5, ..seed(base, &[(2 * MIB, Free)], 0, true, false) }],
    ];
    for seeds in bad {
        let (_, mut a) = plain("");
        assert!(matches!(a.restore(&seeds), Err(AllocError::BadState { .. })), "{seeds:?}");
        assert_eq!(a.segments().count(), 0);
        a.malloc(1, MAIN).expect("still usable");
    }
}

// ---- snapshot and trace ---------------------------------------------------------------------------------------------

/// Just enough of an unpickler to read what is written back into JSON.
fn unpickle(bytes: &[u8]) -> serde_json::Value {
    use serde_json::{Map, Value};
    let (mut stack, mut marks, mut memo): (Vec<Value>, Vec<usize>, Vec<Value>) = (Vec::new(), Vec::new(), Vec::new());
    let mut at = 0;
    let mut next = |n: usize| {
        at += n;
        &bytes[at - n..at]
    };
    loop {
        match next(1)[0] {
            0x80 => assert_eq!(next(1), [4]),
            b'}' => stack.push(Value::Object(Map::new())),
            b']' => stack.push(Value::Array(Vec::new())),
            b'(' => marks.push(stack.len()),
            b'u' => {
                let items = stack.split_off(marks.pop().expect("mark"));
                let Some(Value::Object(map)) = stack.last_mut() else { panic!("no dict") };
                for pair in items.chunks(2) {
                    map.insert(pair[0].as_str().expect("key").to_owned(), pair[1].clone());
                }
            }
            b'e' => {
                let items = stack.split_off(marks.pop().expect("mark"));
                let Some(Value::Array(list)) = stack.last_mut() else { panic!("no list") };
                list.extend(items);
            }
            0x86 => {
                let pair = stack.split_off(stack.len() - 2);
                stack.push(Value::Array(pair));
            }
            b'N' => stack.push(Value::Null),
            0x88 => stack.push(true.into()),
            0x89 => stack.push(false.into()),
            b'K' => stack.push(next(1)[0].into()),
            b'M' => stack.push(u16::from_le_bytes(next(2).try_into().expect("2")).into()),
            b'J' => stack.push(i32::from_le_bytes(next(4).try_into().expect("4")).into()),
            0x8A => {
                let len = next(1)[0] as usize;
                let mut wide = [0; 16];
                let raw = next(len);
                if raw[len - 1] >= 0x80 {
                    wide = [0xFF; 16];
                }
                wide[..len].copy_from_slice(raw);
                let number = i128::from_le_bytes(wide);
                stack.push(u64::try_from(number).map_or_else(|_| (number as i64).into(), Value::from));
            }
            b'G' => stack.push(f64::from_be_bytes(next(8).try_into().expect("8")).into()),
            0x8C => {
                let len = next(1)[0] as usize;
                stack.push(std::str::from_utf8(next(len)).expect("text").into());
            }
            b'X' => {
                let len = u32::from_le_bytes(next(4).try_into().expect("4")) as usize;
                stack.push(std::str::from_utf8(next(len)).expect("text").into());
            }
            0x94 => memo.push(stack.last().expect("value").clone()),
            b'h' => stack.push(memo[next(1)[0] as usize].clone()),
            b'j' => stack.push(memo[u32::from_le_bytes(next(4).try_into().expect("4")) as usize].clone()),
            b'.' => return stack.pop().expect("a value"),
            other => panic!("opcode {other:#x}"),
        }
    }
}

#[test]
fn the_pickle_reads_back_as_the_snapshot() {
    let (_, mut a) = plain("max_split_size_mb:64,garbage_collection_threshold:0.25");
    a.record_history(1000);
    let mut random = Random(5);
    let mut live = Vec::new();
    for step in 0..300 {
        if random.below(3) < 2 {
            live.push(a.malloc_tagged(random.size() / 4 + 1, MAIN, step % 290).expect("room").address);
        } else if let Some(address) = live.pop() {
            give(&mut a, &[address]);
        }
    }
    let frames = |tag: u64| vec![snapshot::Frame { name: format!("layer{tag}"), filename: "model.py".into(), line: tag }];
    let snapshot = a.snapshot_with(&frames);
    assert_eq!(unpickle(&snapshot.to_pickle()), serde_json::to_value(&snapshot).expect("plain data"));
    assert_eq!(snapshot.to_pickle(), snapshot.to_pickle(), "same state, same bytes");
    assert_eq!(snapshot.allocator_settings.conf, "max_split_size_mb:64,garbage_collection_threshold:0.25");
    assert_eq!(snapshot.allocator_settings.roundup_power2_divisions.len(), 16);
    let total: u64 = snapshot.segments.iter().map(|segment| segment.total_size).sum();
    assert_eq!(total, reserved(&a));
    let last = snapshot.device_traces[0].last().expect("events");
    assert_eq!((last.action, last.size), (Action::Snapshot, a.raw_stats().allocated_bytes.all.current));
}

#[test]
fn the_trace_is_a_ring_of_the_newest_entries() {
    let (_, mut a) = with(40 * MIB, "", Policy::proven());
    a.record_history(6);
    let x = take(&mut a, 30 * MIB);
    let names = |a: &Alloc| a.history().map(|entry| entry.action.name()).collect::<Vec<_>>();
    assert_eq!(names(&a), ["segment_alloc", "alloc"]);
    give(&mut a, &[x]);
    oom(a.malloc(50 * MIB, MAIN));
    assert_eq!(names(&a), ["segment_alloc", "alloc", "free_requested", "free_completed", "segment_free", "oom"]);
    let entry = *a.history().last().expect("oom");
    assert_eq!((entry.addr, entry.size), (40 * MIB, 50 * MIB), "free bytes of the device, and the request");
    take(&mut a, 5);
    assert_eq!(names(&a).len(), 6);
    a.record_history(0);
    assert_eq!(a.history().count(), 0);
}
