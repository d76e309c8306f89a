use super::*;
use crate::gpu::alloc::TieBreak;
use crate::gpu::alloc::sizes::round_size;
use crate::gpu::trace::read::tests::shared_snapshots;
use crate::gpu::trace::start::{Cutting, reconstruct};
use crate::gpu::trace::{Limits, open};

fn recorded(snapshot: &Snapshot, device: u32, policy: Policy) -> Outcome {
    let config = AllocConfig::default();
    let cutting = Cutting { round: |bytes| round_size(bytes, &config.roundup_power2_divisions), expandable: false };
    let start = reconstruct(snapshot, device, &cutting, &Default::default());
    assert!(start.notes.is_empty(), "{:?}", start.notes);
    run(snapshot, device, &start, policy, &config).unwrap()
}

#[test]
fn every_recorded_trace_comes_out_address_for_address() {
    let Some(files) = shared_snapshots() else {
        println!("skipped: no shared data");
        return;
    };
    let mut sum = Fidelity::default();
    let mut bad = Vec::new();
    for file in files {
        let snapshot = open(&file, &Limits::default()).unwrap();
        for device in snapshot.devices() {
            if !snapshot.trace(device).iter().any(|entry| entry.action == Action::Alloc) {
                continue;
            }
            let outcome = recorded(&snapshot, device, Policy::proven());
            let f = &outcome.fidelity;
            println!(
                "{:<36} addresses {}/{}, segment_allocs {}/{}, segment_frees {}/{}, blocks at the end {}/{}, reserved peak {} recorded {} {}",
                file.file_name().unwrap().to_string_lossy(),
                f.addresses_exact,
                f.addresses,
                f.segment_allocs_exact,
                f.segment_allocs,
                f.segment_frees_exact,
                f.segment_frees,
                f.final_blocks_exact,
                f.final_blocks,
                outcome.peaks.reserved.bytes,
                outcome.recorded_reserved_peak.bytes,
                f.first_difference.as_ref().map_or(String::new(), |difference| format!("{difference:?}")),
            );
            if !f.is_exact()
                || outcome.peaks.reserved.bytes != outcome.recorded_reserved_peak.bytes
                || f.final_blocks != f.final_blocks_exact
            {
                bad.push(file.clone());
            }
            sum.addresses += f.addresses;
            sum.addresses_exact += f.addresses_exact;
            sum.segment_allocs += f.segment_allocs;
            sum.segment_allocs_exact += f.segment_allocs_exact;
            sum.segment_frees += f.segment_frees;
            sum.segment_frees_exact += f.segment_frees_exact;
        }
    }
    println!(
        "all traces: addresses {}/{}, segment_allocs {}/{}, segment_frees {}/{}",
        sum.addresses_exact, sum.addresses, sum.segment_allocs_exact, sum.segment_allocs, sum.segment_frees_exact, sum.segment_frees
    );
    assert!(sum.addresses > 40_000 && sum.segment_allocs > 5_000 && sum.segment_frees > 4_000);
    assert!(bad.is_empty(), "not exact: {bad:?}");
}

#[test]
fn another_order_of_ties_is_not_exact() {
    let Some(files) = shared_snapshots() else {
        println!("skipped: no shared data");
        return;
    };
    let (mut addresses, mut exact, mut whole, mut traces) = (0, 0, 0, 0);
    for file in files {
        let snapshot = open(&file, &Limits::default()).unwrap();
        for device in snapshot.devices() {
            if !snapshot.trace(device).iter().any(|entry| entry.action == Action::Alloc) {
                continue;
            }
            let f = recorded(&snapshot, device, Policy::proven().with_tie_break(TieBreak::AddressDescending)).fidelity;
            traces += 1;
            whole += u64::from(f.is_exact());
            addresses += f.addresses;
            exact += f.addresses_exact;
        }
    }
    println!("highest address first: {exact} of {addresses} addresses, {whole} of {traces} traces exact");
    assert!(whole * 2 < traces && exact < addresses * 3 / 4);
}
