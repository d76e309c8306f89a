//! The self-test on simulated cards: sound ones pass, and every planted fault is found with its cause.

use std::cell::Cell;

use super::report::{Cause, Report, Status};
use super::simulated::{ROUNDS, SimCard};
use super::*;
use crate::gpu::alloc::AllocError;
use crate::gpu::driver::sim::SimGpu;
use crate::gpu::kernels::host::mix;
use crate::report::Silent;

const MIB: u64 = 1 << 20;
/// What the clean run on a card of 48 MiB covers for certain, in physical addresses: the test's own segment comes first.
const CAPACITY: u64 = 48 * MIB;

fn options() -> Options {
    Options { rounds: Some(ROUNDS), ..Options::new(Level::Quick) }
}

fn check(description: &str, options: &Options) -> Report {
    let card = SimCard::parse(description).unwrap_or_else(|error| panic!("{description}: {error}"));
    run(&[Box::new(card)], options, &Silent)
}

#[test]
fn a_sound_card_passes_at_every_level() {
    for level in [Level::Quick, Level::Standard, Level::Thorough] {
        let report = check("64MiB", &Options { rounds: Some(ROUNDS), ..Options::new(level) });
        let card = &report.devices[0];
        assert_eq!((report.status, report.exit_code(true)), (Status::Pass, 0), "{}", report.text());
        assert!(card.coverage.of_free > 0.85, "{}", report.text());
        assert!(card.steps.iter().all(|step| step.status == Status::Pass && step.passes > 0), "{}", report.text());
        assert!(card.copy_gb_per_s.is_some_and(|rate| rate > 0.0) && card.bandwidth.len() >= 6, "{}", report.text());
    }
}

#[test]
fn two_hundred_sound_runs_pass() {
    for run in 0..200u64 {
        // Card, seed, kind of segments and what others hold change from run to run.
        let size = 24 + 8 * (run % 5);
        let others = if run % 3 == 0 { ",others=4MiB" } else { "" };
        let segments = [Segments::Both, Segments::Native, Segments::Expandable][run as usize % 3];
        let report = check(&format!("{size}MiB{others}"), &Options { seed: mix(run), segments, ..options() });
        assert_eq!((report.status, report.exit_code(true)), (Status::Pass, 0), "run {run}: {}", report.text());
    }
}

/// A physical address that is under test: past the granule of the test's own words, before what is left as a reserve.
fn covered(random: u64) -> u64 {
    2 * MIB + random % (36 * MIB)
}

/// Forty faults of every kind: description, verdict, cause.
fn planted() -> Vec<(String, Status, Cause)> {
    let mut list = Vec::new();
    let random = |number: u64| mix(mix(number) ^ 0xFA57);
    for number in 0..8 {
        let (place, bit, value) = (covered(random(number)), random(number) >> 40 & 7, number & 1);
        list.push((format!("stuck={place:#x}:{bit}:{value}"), Status::Fail, Cause::StuckBit));
    }
    for number in 8..13 {
        let (place, bit, nth) = (covered(random(number)), random(number) >> 40 & 7, 1 + random(number) % 20);
        list.push((format!("flip={place:#x}:{bit}@{nth}"), Status::Fail, Cause::FlippedBit));
        list.push((format!("misread={place:#x}:{bit}@{nth}"), Status::Fail, Cause::FlippedBit));
    }
    for number in 13..19 {
        let from = 1 + random(number) % 18;
        let to = 1 + (from + random(number) % 17) % 18;
        // At the start, or in the middle of the test.
        let when = if number % 2 == 0 { String::new() } else { format!("@{}", 2 + random(number) % 12) };
        let at = format!("alias={}MiB:{}MiB{when},granule=64KiB", 2 * from, 2 * to);
        list.push((at, Status::Fail, Cause::AliasedAddresses));
    }
    // The granule of the test's own words answers for another one.
    list.push(("alias=20MiB:0,granule=64KiB".into(), Status::Fail, Cause::AliasedAddresses));
    list.push(("stuck=0x2008:1:1".into(), Status::Fail, Cause::StuckBit));
    for (call, nth, code) in [
        ("cuMemAlloc", 2, 999),
        ("cuLaunchKernel", 57, 719),
        ("cuLaunchKernel", 150, 4_000_000_001u32),
        ("cuMemcpyDtoH", 20, 214),
        ("cuEventQuery", 40, 700),
        ("cuStreamCreate", 1, 46),
        ("cuModuleLoadData", 1, 222),
        ("cuMemMap", 3, 1),
    ] {
        list.push((format!("code={call}:{nth}:{code}"), Status::Fail, Cause::DriverError));
    }
    list.push(("late-events=3".into(), Status::Fail, Cause::LateEvents));
    list.push(("stuck-events".into(), Status::Fail, Cause::LateEvents));
    list.push(("ecc=2".into(), Status::Fail, Cause::EccErrors));
    list.push(("ecc-uncorrected=1".into(), Status::Fail, Cause::EccErrors));
    list.push(("remap=1".into(), Status::Fail, Cause::RowsRemapped));
    list.push(("remap-pending".into(), Status::Fail, Cause::RowsRemapped));
    list.push(("xid=63".into(), Status::Fail, Cause::Xid));
    list.push(("leak=2MiB".into(), Status::Fail, Cause::Leak));
    list.push((format!("oom={}", 12 * MIB), Status::NotTested, Cause::OutOfMemory));
    list.push(("code-from=cuMemAlloc:1:2".into(), Status::NotTested, Cause::OutOfMemory));
    list.push(("busy=8MiB".into(), Status::NotTested, Cause::Busy));
    list
}

#[test]
fn forty_and_more_planted_faults_are_found_with_their_cause() {
    let list = planted();
    assert!(list.len() >= 40, "{}", list.len());
    let mut wrong = Vec::new();
    for (fault, status, cause) in list {
        let report = check(&format!("{}MiB,{fault}", CAPACITY / MIB), &options());
        let codes = (report.exit_code(false), report.exit_code(true));
        let right = if status == Status::Fail { (6, 6) } else { (0, 8) };
        if (report.status, report.devices[0].cause, codes) != (status, Some(cause), right) {
            wrong.push(format!("{fault}: expected {status:?} {cause:?}\n{}", report.text()));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// An allocator that breaks its promises, over one that keeps them.
struct Evil<'l, K: Kernels> {
    inner: CachingAllocator<&'l Ledger<K>>,
    how: How,
    taken: Cell<u32>,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum How {
    /// The fourth block begins in the middle of the third.
    Overlap,
    /// An address that the driver never gave.
    Elsewhere,
    /// Not at a multiple of 512 bytes.
    Askew,
    /// The third block is the second again.
    Twice,
    /// Segments are kept in spite of `empty_cache`.
    Hoards,
}

impl<K: Kernels> Source for Evil<'_, K> {
    fn take(&self, bytes: u64) -> Result<u64, AllocError> {
        let address = Source::take(&self.inner, bytes)?;
        let count = self.taken.get() + 1;
        self.taken.set(count);
        Ok(match (self.how, count) {
            (How::Overlap, 4) => address - bytes / 2,
            (How::Elsewhere, 3) => address + (1 << 40),
            (How::Askew, 3) => address + 8,
            (How::Twice, 3) => address - bytes,
            _ => address,
        })
    }
    fn give(&self, address: u64) -> Result<(), AllocError> {
        Source::give(&self.inner, address)
    }
    fn empty_cache(&self) -> Result<(), AllocError> {
        if self.how == How::Hoards { Ok(()) } else { Source::empty_cache(&self.inner) }
    }
    fn reserved(&self) -> u64 {
        Source::reserved(&self.inner)
    }
    fn validate(&self) -> Result<(), String> {
        Source::validate(&self.inner)
    }
}

#[test]
fn a_broken_allocator_is_told_from_broken_memory() {
    for how in [How::Overlap, How::Elsewhere, How::Askew, How::Twice, How::Hoards] {
        for segments in [Segments::Native, Segments::Expandable] {
            let gpu = SimGpu::new(64 * MIB);
            let report = test_with(
                &gpu,
                &health::NoHealth("no NVML".into()),
                "sim",
                &Options { segments, ..options() },
                &Silent,
                &|ledger, config| {
                    Box::new(Evil { inner: CachingAllocator::new(ledger, Policy::proven(), config), how, taken: Cell::new(0) })
                },
            );
            let text = Report::new(Level::Quick, vec![report.clone()]).text();
            assert_eq!((report.status, report.cause), (Status::Fail, Some(Cause::AllocatorFault)), "{how:?} {segments:?}: {text}");
            assert_eq!(gpu.usage().bytes, 0, "{how:?}: nothing stays behind");
        }
    }
}

#[test]
fn what_is_no_failure_is_none() {
    // Refused virtual memory management, a moment without memory, memory that another process takes, no counters.
    for (fault, step) in [
        ("vmm-refused", Some(("expandable-segments", Cause::Unsupported))),
        ("no-vmm", Some(("expandable-segments", Cause::Unsupported))),
        ("code=cuMemAlloc:3:2", None),
        ("grab=2MiB", None),
        ("xid=13", None),
        ("no-nvml", Some(("ecc", Cause::Unsupported))),
        ("others=8MiB", None),
    ] {
        let options = if fault == "xid=13" { Options { even_if_busy: true, ..options() } } else { options() };
        let fault = if fault == "xid=13" { "xid=13,busy=2MiB" } else { fault };
        let report = check(&format!("64MiB,{fault}"), &options);
        assert_eq!((report.status, report.exit_code(true)), (Status::Pass, 0), "{fault}: {}", report.text());
        if let Some((name, cause)) = step {
            let step = report.devices[0].steps.iter().find(|step| step.name == name).expect("the step is there");
            assert_eq!((step.status, step.cause), (Status::NotTested, Some(cause)), "{fault}");
            assert!(step.detail.is_some());
        }
    }
    let asked = check("64MiB,vmm-refused", &Options { segments: Segments::Expandable, ..options() });
    assert_eq!((asked.status, asked.exit_code(false), asked.exit_code(true)), (Status::NotTested, 0, 8), "{}", asked.text());
    assert_eq!(asked.devices[0].cause, Some(Cause::Unsupported));
}

#[test]
fn a_spent_budget_is_no_pass() {
    let report = check("64MiB", &Options { budget: Some(Duration::from_micros(1500)), ..options() });
    let card = &report.devices[0];
    assert_eq!((report.status, card.cause), (Status::NotTested, Some(Cause::Budget)), "{}", report.text());
    assert!(card.steps.iter().any(|step| step.name == "own-address" && step.status == Status::Pass), "{}", report.text());
    assert!(card.steps.iter().any(|step| step.name == "books" && step.status == Status::Pass), "{}", report.text());
}

#[test]
fn cards_are_tested_side_by_side_and_the_worst_counts() {
    let cards: Vec<Box<dyn Card>> = ["32MiB", "48MiB,stuck=0x900000:2", "64MiB,busy=8MiB"]
        .map(|text| Box::new(SimCard::parse(text).expect("valid")) as Box<dyn Card>)
        .into_iter()
        .collect();
    let report = run(&cards, &options(), &Silent);
    let verdicts: Vec<Status> = report.devices.iter().map(|card| card.status).collect();
    assert_eq!(verdicts, [Status::Pass, Status::Fail, Status::NotTested]);
    assert_eq!((report.status, report.exit_code(false)), (Status::Fail, 6));
}

#[test]
fn evidence_says_where_and_what() {
    let report = check("64MiB,stuck=0x900003:2:1,granule=64KiB", &options());
    let card = &report.devices[0];
    let (bits, wrong) = (&card.bits, &card.mismatches);
    assert!(bits.iter().all(|bit| bit.bit == 26 && bit.cleared == 0 && bit.set > 0) && bits.len() == 1, "{bits:?}");
    assert!(wrong.iter().all(|wrong| wrong.xor.0 == 1 << 26 && wrong.address == wrong_address(wrong)), "{wrong:?}");
    let block = wrong[0].block.expect("in a block");
    assert!(card.blocks[block].mismatches > 0);
    assert_eq!(card.blocks[block].offset + wrong[0].address.0 - card.blocks[block].address.0, wrong[0].offset.expect("offset"));
    let alias = check("64MiB,alias=8MiB:24MiB,granule=64KiB", &options());
    let finding = &alias.devices[0].findings[0];
    assert_eq!((finding.cause, finding.addresses.len() % 2), (Cause::AliasedAddresses, 0), "{}", alias.text());
    let json = serde_json::to_value(&report).expect("serialises");
    assert_eq!(json["status"], "fail");
    assert_eq!(json["devices"][0]["findings"][0]["cause"], "stuck-bit");
    assert!(json["devices"][0]["mismatches"][0]["xor"] == "0x0000000004000000", "{json}");

    fn wrong_address(wrong: &report::Mismatch) -> report::Hex {
        report::Hex(wrong.address.0 & !7)
    }
}
