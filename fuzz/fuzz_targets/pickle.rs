//! Any bytes as a snapshot file: an error or a sound snapshot, never a panic, and no more memory than the budget.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tare_fuzz::gpu::trace::{Limits, read_bytes};

fuzz_target!(|data: &[u8]| {
    let limits = Limits { base: 4 << 20, per_byte: 24, total: 256 << 20, string: 1 << 20 };
    if let Ok(snapshot) = read_bytes(data, &limits) {
        for device in snapshot.devices() {
            for entry in snapshot.trace(device) {
                let _ = snapshot.pool_of(entry);
                let _ = snapshot.names.user_frame(entry.stack).map(|frame| snapshot.names.describe(frame));
            }
        }
    }
});
