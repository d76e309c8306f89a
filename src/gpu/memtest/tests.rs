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
        list.push((format!("alias={}MiB:{}MiB{when}", 2 * from, 2 * to), Status::Fail, Cause::AliasedAddresses));
    }
    // The granule of the test's own words answers for another one.
    list.push(("alias=20MiB:0".into(), Status::Fail, Cause::AliasedAddresses));
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
