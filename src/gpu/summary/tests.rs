use std::path::PathBuf;

use super::attribution::Rounding;
use super::*;
use crate::gpu::trace::model::{Block, Frame, Segment, Settings, SizeClass, StackId, TraceEntry};
use crate::gpu::trace::{self, Limits};

/// The real snapshots, read once, or an empty list (and a word about it) where they are not at hand.
fn real() -> &'static [(String, Snapshot)] {
    static ALL: std::sync::OnceLock<Vec<(String, Snapshot)>> = std::sync::OnceLock::new();
    ALL.get_or_init(read_all)
}

fn read_all() -> Vec<(String, Snapshot)> {
    let root = std::env::var_os("TARE_SHARED_DATA")
        .map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../shared/data"), PathBuf::from);
    let Ok(entries) = std::fs::read_dir(root.join("snapshots")) else {
        println!("skipped: no shared data");
        return Vec::new();
    };
    let mut paths: Vec<PathBuf> =
        entries.filter_map(|entry| Some(entry.ok()?.path())).filter(|path| path.extension().is_some_and(|ext| ext == "pickle")).collect();
    paths.sort();
    paths
        .into_iter()
        .map(|path| {
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            (name, trace::open(&path, &Limits::default()).unwrap())
        })
        .collect()
}

#[test]
fn every_reserved_byte_of_every_real_snapshot_has_exactly_one_cause() {
    for (name, snapshot) in real() {
        let summary = summarise(snapshot, &Options::default());
        let reserved: u64 = snapshot.segments.iter().map(|segment| segment.total_size).sum();
        assert_eq!(summary.devices.iter().map(|device| device.reserved).sum::<u64>(), reserved, "{name}");
        for device in &summary.devices {
            assert_eq!(device.split.total(), device.reserved, "{name}");
            assert_eq!(device.split.unexplained, 0, "{name}");
            assert_eq!(device.streams.iter().map(|stream| stream.split.total()).sum::<u64>(), device.reserved, "{name}");
            for segment in &device.segments {
                assert_eq!(segment.split.total(), segment.size, "{name} {}", segment.address);
            }
            let handed_out = device.split.allocated + device.split.rounding + device.split.unsplit;
            assert_eq!(handed_out, device.allocated, "{name}");
            // The file's own sums.
            let told: u64 = snapshot.segments_of(device.device).map(|segment| segment.allocated_size).sum();
            assert_eq!(device.allocated, told, "{name}");
            assert_eq!(device.holders.iter().map(|holder| holder.bytes).sum::<u64>(), device.active, "{name}");
            assert_eq!(device.empty_cache.returns + device.empty_cache.stays + device.allocated, device.reserved, "{name}");
        }
    }
}

#[test]
fn the_timeline_of_every_real_recording_ends_at_the_recorded_state() {
    for (name, snapshot) in real() {
        let rounding = Rounding::of(snapshot.settings.as_ref());
        for device in summarise(snapshot, &Options::default()).devices {
            let history = history::rebuild(snapshot, device.device, &rounding);
            let totals = history.totals();
            assert_eq!(*totals.allocated.last().unwrap(), device.allocated, "{name}");
            assert_eq!(*totals.active.last().unwrap(), device.active, "{name}");
            assert_eq!(*totals.reserved.last().unwrap(), device.reserved, "{name}");
            assert!(totals.active.iter().zip(&totals.reserved).all(|(active, reserved)| active <= reserved), "{name}");
            assert_eq!(history.contradictions, 0, "{name}");
        }
    }
}

#[test]
fn derived_block_sizes_are_the_recorded_ones() {
    let (mut exact, mut all) = (0, 0);
    for (name, snapshot) in real() {
        let rounding = Rounding::of(snapshot.settings.as_ref());
        for device in snapshot.devices() {
            let recorded = history::rebuild(snapshot, device, &rounding);
            let derived = history::rebuild_with(snapshot, device, &rounding, false);
            let (mut here, mut good) = (0, 0);
            for (a, b) in recorded.blocks.iter().zip(&derived.blocks).filter(|(a, b)| a.exact && !b.exact) {
                assert_eq!((a.address, a.from), (b.address, b.from));
                here += 1;
                good += usize::from(a.size == b.size);
            }
            if good < here {
                println!("{name}: {good} of {here}");
            }
            exact += good;
            all += here;
        }
    }
    println!("derived sizes equal to the recorded ones: {exact}/{all}");
    assert_eq!(exact, all);
}

/// Two segments' worth of everything: a pinned large segment, a free one, a waiting one, an expandable one, a private pool.
fn made() -> Snapshot {
    let mut snapshot = Snapshot::empty(Generation::V3);
    let mut stack = |name: &str, file: &str, line| {
        let (name, file) = (snapshot.names.intern(name), snapshot.names.intern(file));
        let frame = snapshot.names.intern_frame(Frame { name, file, line });
        snapshot.names.intern_stack(&[frame])
    };
    let train = stack("train", "/home/me/train.py", 12);
    let cache = stack("remember", "/home/me/hooks.py", 3);
    const M: u64 = 1 << 20;
    let mut add = |address: u64, pool_id, expandable, class, blocks: &[(u64, u64, BlockState, StackId)]| {
        let mut at = address;
        let blocks: Vec<Block> = blocks
            .iter()
            .map(|(size, requested_size, state, stack)| {
                let block = Block { address: at, size: *size, requested_size: *requested_size, state: *state, stack: *stack };
                at += size;
                block
            })
            .collect();
        snapshot.segments.push(Segment {
            device: 0,
            address,
            total_size: at - address,
            allocated_size: 0,
            active_size: 0,
            requested_size: 0,
            stream: 0,
            class,
            pool_id,
            expandable,
            stack: StackId::EMPTY,
            blocks,
        });
    };
    use BlockState::{ActiveAllocated as Used, ActivePendingFree as Waits, Inactive as Free};
    add(0x1000_0000, (0, 0), false, SizeClass::Large, &[(18 * M, 0, Free, train), (2 * M, 2 * M - 100, Used, cache)]);
    add(0x2000_0000, (0, 0), false, SizeClass::Large, &[(40 * M, 0, Free, train)]);
    add(0x3000_0000, (0, 0), false, SizeClass::Large, &[(20 * M, 20 * M, Waits, train), (10 * M, 0, Free, train)]);
    add(
        0x4000_0000,
        (0, 0),
        true,
        SizeClass::Large,
        &[(30 * M, 30 * M, Used, train), (50 * M, 0, Free, train), (5 * M, 5 * M, Used, train), (15 * M, 0, Free, train)],
    );
    add(0x5000_0000, (1, 7), false, SizeClass::Large, &[(20 * M, 0, Free, train)]);
    // 12 MiB of which 11.5 were asked for: the half was too little to split off.
    add(0x6000_0000, (0, 0), false, SizeClass::Large, &[(12 * M, 12 * M - M / 2, Used, train)]);
    snapshot
}

#[test]
fn each_cause_is_told_apart() {
    let snapshot = made();
    let summary = summarise(&snapshot, &Options::default());
    let device = &summary.devices[0];
    const M: u64 = 1 << 20;
    assert_eq!(
        device.split,
        Split {
            allocated: (2 + 30 + 5 + 12) * M - 100 - M / 2,
            rounding: 100,
            unsplit: M / 2,
            pending: 20 * M,
            pinned: 18 * M + 10 * M,
            private_pools: 20 * M,
            cached: 40 * M,
            // 30 to 80 MiB are free: the pages at 40 and 60; 85 to 100 is less than a page.
            expandable_pages: 40 * M,
            expandable_rest: 10 * M + 15 * M,
            unexplained: 0,
        }
    );
    assert_eq!(device.split.total(), device.reserved);
    assert_eq!(
        device.empty_cache,
        EmptyCache { returns: (40 + 30 + 40) * M, after_waiting: 30 * M, private_pools: 20 * M, stays: (18 + 25) * M }
    );
    assert_eq!(device.expandable_tails, 15 * M);
    let fates: Vec<Fate> = device.segments.iter().map(|segment| segment.fate).collect();
    assert_eq!(fates, [Fate::Pinned, Fate::Free, Fate::Pending, Fate::Pinned, Fate::PrivatePool, Fate::Full]);
    let remember = device.holders.iter().find(|holder| holder.frame.as_deref() == Some("remember (/home/me/hooks.py:3)")).unwrap();
    assert_eq!((remember.bytes, remember.segments_pinned_alone, remember.stranded_alone), (2 * M, 1, 18 * M));
    insta::assert_snapshot!(text(&summary, 10), @r#"
    reserved by PyTorch                                    222.00 MiB  100.0 %
      in use by tensors                                     48.50 MiB   21.8 %
      rounding of sizes                                         100 B    0.0 %
      remainders too small to split off                    512.00 KiB    0.2 %
      freed, waiting for another stream                     20.00 MiB    9.0 %
      free, but pinned by a block in the same segment       28.00 MiB   12.6 %
      free, in private pools (CUDA graphs)                  20.00 MiB    9.0 %
      cached: whole free segments                           40.00 MiB   18.0 %
      cached: whole free pages of expandable segments       40.00 MiB   18.0 %
      free parts of expandable pages in use                 25.00 MiB   11.3 %
      (of which growable tails of expandable segments)      15.00 MiB

    empty_cache() would return 110.00 MiB now (30.00 MiB of it after waiting for another stream) and leave 43.00 MiB free but pinned; 20.00 MiB more if the private pools are no longer used
    outside of PyTorch (context, other processes): not recorded in a snapshot; run on the machine itself to see it

    streams and pools
      stream 0x0: 202.00 MiB in 5 segments, 48.50 MiB allocated
      stream 0x0, pool 1.7: 20.00 MiB in 1 segment, 0 B allocated

    holders; what each strands: free memory in segments that nobody else uses
         67.00 MiB in     4 blocks     10.00 MiB  train (/home/me/train.py:12)
          2.00 MiB in     1 block      18.00 MiB  remember (/home/me/hooks.py:3)

    pinned segments: 2, the largest hole first
      18.00 MiB of 20.00 MiB free at 0x10000000, held by 2.00 MiB in 1 block
              2.00 MiB  remember (/home/me/hooks.py:3)
      10.00 MiB of 30.00 MiB free at 0x30000000, held by 20.00 MiB in 1 block
             20.00 MiB  train (/home/me/train.py:12), waiting for a stream
    note: no events were recorded: nothing is known about the time before the snapshot (`torch.cuda.memory._record_memory_history()` records them)
    note: whether a private pool is still in use is not recorded; its free memory counts as kept

    note: the file does not record the allocator's configuration; rounding follows the defaults
    "#);
}

#[test]
fn figures_of_the_driver_tell_context_and_other_processes_apart() {
    let snapshot = made();
    let reserved: u64 = snapshot.segments.iter().map(|segment| segment.total_size).sum();
    let view = DriverView {
        device: 0,
        total: Some(16 << 30),
        used: Some(reserved + (3 << 30)),
        this_process: Some(reserved + (500 << 20)),
        other_processes: Some((3 << 30) - (500 << 20)),
    };
    let summary = summarise(&snapshot, &Options { driver: vec![view], ..Options::default() });
    let outside = summary.devices[0].outside;
    assert_eq!(outside.context, Some(500 << 20));
    assert_eq!(outside.together, Some(3 << 30));
    assert_eq!(outside.free, Some((13 << 30) - reserved));
    // Without them everything is unknown, not zero.
    assert_eq!(summarise(&snapshot, &Options::default()).devices[0].outside, Outside::default());
}

#[test]
fn lifetimes_span_what_the_recording_missed() {
    let mut snapshot = Snapshot::empty(Generation::V2);
    const M: u64 = 1 << 20;
    let event = |action, addr, size| TraceEntry::new(action, addr, size, 0);
    snapshot.traces = vec![vec![
        event(Action::FreeRequested, 0x1000_0000, 3 * M),      // alive before
        event(Action::FreeCompleted, 0x1000_0000, 3 * M),      //
        event(Action::SegmentFree, 0x1000_0000, 20 * M),       // its segment goes
        event(Action::SegmentAlloc, 0x2000_0000, 12 * M),      //
        event(Action::Alloc, 0x2000_0000, 11 * M + 1),         // not split: less than 1 MiB would be left
        event(Action::FreeRequested, 0x2000_0000, 11 * M + 1), //
        event(Action::FreeCompleted, 0x2000_0000, 11 * M + 1),
        event(Action::Oom, 7 * M, 40 * M),
    ]];
    let block = Block { address: 0x2000_0000, size: 12 * M, requested_size: 0, state: BlockState::Inactive, stack: StackId::EMPTY };
    snapshot.segments.push(Segment {
        device: 0,
        address: 0x2000_0000,
        total_size: 12 * M,
        allocated_size: 0,
        active_size: 0,
        requested_size: 0,
        stream: 0,
        class: SizeClass::Large,
        pool_id: (0, 0),
        expandable: false,
        stack: StackId::EMPTY,
        blocks: vec![block],
    });
    let history = history::rebuild(&snapshot, 0, &Rounding::of(None));
    let totals = history.totals();
    assert_eq!(totals.active, [3 * M, 3 * M, 0, 0, 0, 12 * M, 12 * M, 0, 0]);
    assert_eq!(totals.allocated, [3 * M, 0, 0, 0, 0, 12 * M, 0, 0, 0]);
    assert_eq!(totals.reserved, [20 * M, 20 * M, 20 * M, 0, 12 * M, 12 * M, 12 * M, 12 * M, 12 * M]);
    let summary = summarise(&snapshot, &Options::default());
    let timeline = summary.devices[0].timeline.as_ref().unwrap();
    assert_eq!(timeline.peak_active, Peak { bytes: 12 * M, event: Some(4), time_us: None });
    assert_eq!(timeline.peak_reserved, Peak { bytes: 20 * M, event: None, time_us: None });
    assert_eq!((timeline.ooms[0].wanted, timeline.ooms[0].device_free, timeline.ooms[0].reserved), (40 * M, 7 * M, 12 * M));
    assert_eq!(summary.devices[0].outside.free, Some(7 * M));
}

#[test]
fn unmapping_the_middle_of_an_expandable_segment_leaves_two_ranges() {
    let mut snapshot = Snapshot::empty(Generation::V3);
    const P: u64 = 20 << 20;
    let event = |action, addr, size| TraceEntry::new(action, addr, size, 0);
    snapshot.traces = vec![vec![
        event(Action::SegmentMap, P, 3 * P),
        event(Action::Alloc, P, 3 * P),
        event(Action::FreeRequested, P, 3 * P),
        event(Action::FreeCompleted, P, 3 * P),
        event(Action::SegmentUnmap, 2 * P, P),
    ]];
    let history = history::rebuild(&snapshot, 0, &Rounding::of(None));
    assert_eq!(history.totals().reserved, [0, 3 * P, 3 * P, 3 * P, 3 * P, 2 * P]);
    assert!(history.segments.iter().all(|life| life.expandable));
}

#[test]
fn rounding_follows_the_specification() {
    let with = |list: &[(u64, u64)]| Rounding::of(Some(&Settings { roundup_power2_divisions: list.to_vec(), ..Settings::default() }));
    let plain = Rounding::of(None);
    assert_eq!([0, 1, 512, 513, 1 << 20].map(|n| plain.round(n)), [512, 512, 512, 1024, 1 << 20]);
    let all: Vec<(u64, u64)> = (0..16).map(|k| (1 << k, 4)).collect();
    let quarters = with(&all);
    assert_eq!(quarters.round(1200), 1536, "below 512 x divisions the plain rule holds");
    assert_eq!(quarters.round((1 << 20) + 1), (1 << 20) + (1 << 18));
    assert_eq!(quarters.round(1 << 21), 1 << 21);
    assert_eq!(quarters.round((1 << 36) + 5), (1 << 36) + (1 << 34), "sizes beyond the last interval use it");
    assert_eq!(with(&[(1, 0), (2, 8)]).round((1 << 20) + 1), (1 << 20) + 512);
}

#[test]
fn names_cannot_break_the_page_or_the_terminal() {
    let hostile = "</script><script>alert(1)</script><!--\u{2028}\u{1b}[31m\u{202e}\"'`${x}";
    let mut snapshot = made();
    let (name, file) = (snapshot.names.intern(hostile), snapshot.names.intern("/x/<img src=x onerror=alert(2)>.py"));
    let frame = snapshot.names.intern_frame(Frame { name, file, line: 1 });
    let stack = snapshot.names.intern_stack(&[frame]);
    for block in snapshot.segments.iter_mut().flat_map(|segment| &mut segment.blocks) {
        block.stack = stack;
    }
    snapshot.warnings.push(format!("odd key {hostile}"));
    snapshot.settings = Some(Settings { conf: hostile.into(), ..Settings::default() });
    let summary = summarise(&snapshot, &Options::default());
    let compare = [html::Comparison { label: hostile.into(), note: hostile.into(), ..html::Comparison::default() }];
    let page = html::page(&snapshot, &summary, hostile, &compare);
    assert_eq!(page.matches("</script").count(), 2, "the two script elements of the page and no other");
    assert_eq!(page.matches("<script").count(), 2);
    assert!(!page.contains("<img") && !page.contains("<!--"));
    let data = page.split_once("id=\"data\">").unwrap().1.split_once("</script>").unwrap().0;
    let data: serde_json::Value = serde_json::from_str(data).unwrap();
    assert_eq!(data["frames"][0][0], hostile);
    let text = text(&summary, 10);
    assert!(text.contains("alert(1)") && !text.contains(['\u{1b}', '\u{202e}']));
}

#[test]
fn the_page_asks_nothing_of_the_network() {
    let snapshot = made();
    let page = html::page(&snapshot, &summarise(&snapshot, &Options::default()), "a.pickle", &[]);
    for word in ["http://", "https://", "src=", "href=", "@import", "url(", "fetch(", "XMLHttpRequest", "WebSocket", "innerHTML", "eval("] {
        assert!(!page.contains(word), "{word}");
    }
    assert!(page.contains("default-src 'none'"));
    for marker in ["{{STYLE}}", "{{DATA}}", "{{SCRIPT}}"] {
        assert!(!page.contains(marker));
    }
}

#[test]
fn a_snapshot_without_anything_says_so() {
    let snapshot = Snapshot::empty(Generation::V1);
    let summary = summarise(&snapshot, &Options::default());
    insta::assert_snapshot!(text(&summary, 10), @r"
    note: the file does not record the allocator's configuration; rounding follows the defaults
    note: the file holds no segments and no events
    ");
    assert!(html::page(&snapshot, &summary, "empty", &[]).contains("no segments and no events"));
}

#[test]
fn sizes_read_well() {
    let told = [0, 1023, 1024, 1536, (1 << 20) - 1, 1 << 20, 25_000_000_000, u64::MAX].map(human);
    assert_eq!(told, ["0 B", "1023 B", "1.00 KiB", "1.50 KiB", "1.00 MiB", "1.00 MiB", "23.28 GiB", "16384.00 PiB"]);
}

proptest::proptest! {
    /// Whatever the blocks, the causes sum to the segment and nothing panics.
    #[test]
    fn the_split_sums_for_any_segment(
        blocks in proptest::collection::vec((0u64..1 << 24, 0u64..1 << 25, 0u8..3), 0..20),
        total in 0u64..1 << 26, expandable: bool, private: bool, small: bool,
    ) {
        let mut snapshot = Snapshot::empty(Generation::V2);
        let mut address = 0x1000;
        let blocks = blocks.into_iter().map(|(size, requested_size, state)| {
            let state = [BlockState::ActiveAllocated, BlockState::ActivePendingFree, BlockState::Inactive][usize::from(state)];
            let block = Block { address, size, requested_size, state, stack: StackId::EMPTY };
            address += size;
            block
        }).collect();
        snapshot.segments.push(Segment {
            device: 3, address: 0x1000, total_size: total, allocated_size: 0, active_size: 0, requested_size: 0, stream: 1,
            class: if small { SizeClass::Small } else { SizeClass::Large }, pool_id: (u64::from(private), 0), expandable,
            stack: StackId::EMPTY, blocks,
        });
        let summary = summarise(&snapshot, &Options::default());
        proptest::prop_assert_eq!(summary.devices[0].split.total(), total);
        proptest::prop_assert!(summary.devices[0].empty_cache.returns <= total);
        text(&summary, 3);
        html::page(&snapshot, &summary, "x", &[]);
    }

    /// Sizes and addresses of a damaged file, however large, are no overflow.
    #[test]
    fn impossible_figures_are_left_out(address: u64, total_size: u64, size: u64, requested_size: u64, addr: u64, wanted: u64, time_us: i64) {
        let mut snapshot = Snapshot::empty(Generation::V2);
        for state in [BlockState::ActiveAllocated, BlockState::Inactive] {
            let blocks = vec![Block { address, size, requested_size, state, stack: StackId::EMPTY }; 2];
            snapshot.segments.push(Segment {
                device: 0, address, total_size, allocated_size: 0, active_size: 0, requested_size: 0, stream: 0,
                class: SizeClass::Large, pool_id: (0, 0), expandable: false, stack: StackId::EMPTY, blocks,
            });
        }
        snapshot.traces = vec![
            [Action::SegmentFree, Action::SegmentAlloc, Action::Alloc, Action::FreeCompleted, Action::Oom]
                .map(|action| TraceEntry { time_us, ..TraceEntry::new(action, addr, wanted, 0) })
                .to_vec(),
        ];
        let summary = summarise(&snapshot, &Options::default());
        let device = &summary.devices[0];
        proptest::prop_assert_eq!(device.split.total(), device.reserved);
        text(&summary, 3);
        html::page(&snapshot, &summary, "x", &[]);
    }

    /// Any list of events, however contradictory, gives lifetimes that make sense and a page.
    #[test]
    fn contradictory_events_are_no_panic(events in proptest::collection::vec((0u8..9, 0u64..40, 0u64..40), 0..60)) {
        use Action::{Alloc, Annotate, FreeCompleted, FreeRequested, Oom, SegmentAlloc, SegmentFree, SegmentMap, SegmentUnmap};
        let mut snapshot = Snapshot::empty(Generation::V2);
        snapshot.traces = vec![events.into_iter().map(|(action, addr, size)| {
            let action = [Alloc, FreeRequested, FreeCompleted, SegmentAlloc, SegmentFree, SegmentMap, SegmentUnmap, Oom, Annotate][usize::from(action)];
            TraceEntry::new(action, addr << 19, size << 19, size % 2)
        }).collect()];
        let summary = summarise(&snapshot, &Options::default());
        let history = history::rebuild(&snapshot, 0, &Rounding::of(None));
        for life in &history.blocks {
            proptest::prop_assert!(life.from <= life.until);
            proptest::prop_assert!(life.released <= life.until);
        }
        for life in &history.segments {
            proptest::prop_assert!(life.from <= life.until && life.size > 0);
        }
        text(&summary, 3);
        html::page(&snapshot, &summary, "x", &[]);
    }
}

#[test]
fn a_free_that_completes_alone_was_requested_before_the_recording() {
    for (name, snapshot) in real().iter().filter(|(name, _)| name == "format-v0-history.pickle") {
        let timeline = summarise(snapshot, &Options::default()).devices.remove(0).timeline.unwrap();
        assert_eq!(timeline.peak_allocated.bytes, 5_683_450_880, "{name}");
        assert_eq!(timeline.peak_active.bytes, 5_692_347_392, "{name}");
    }
}

#[test]
fn characters_that_turn_text_around_do_not_come_out() {
    assert_eq!(clean("a\u{202e}b\u{2066}c\u{9b}d\u{1b}[31m\u{200f}e"), "a\u{fffd}b\u{fffd}c\u{fffd}d\u{fffd}[31m\u{fffd}e");
}
