//! The GPU side: drivers, the caching allocator and what can be told from recorded traces. Knows nothing of conda.

/// PyTorch's caching allocator over any [`driver::Driver`].
pub mod alloc;
/// Device memory, virtual memory management, streams and events, real or simulated.
pub mod driver;
/// The fake driver libraries in tests.
#[cfg(test)]
pub mod fakes;
/// The GPUs of this machine, by every layer of the driver.
pub mod info;
/// The kernels of the memory test.
pub mod kernels;
/// The self-test of device memory.
pub mod memtest;
/// The driver's own view: memory, processes, error counters, versions.
pub mod nvml;
/// Scripted scenarios on the simulated GPU.
pub mod simulate;
/// Who holds the memory of a snapshot, and why the rest is not free: figures, timeline, page.
pub mod summary;
/// A live view of every card's memory.
pub mod top;
/// Recorded snapshots: reader, replay, what-if.
pub mod trace;

/// Bytes for people: `512 B`, `1.50 KiB`, `23.25 GiB`.
pub fn human(bytes: u64) -> String {
    human_to(bytes, 2)
}

/// The ending of a counted noun: `s`, or nothing for one.
pub fn plural(count: u64) -> &'static str {
    if count == 1 { "" } else { "s" }
}

/// Bytes for people with `places` decimals above 1023 B. Exact bytes belong into JSON.
pub fn human_to(bytes: u64, places: usize) -> String {
    const UNITS: [&str; 5] = ["KiB", "MiB", "GiB", "TiB", "PiB"];
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    // What would be printed as 1024 of one unit is 1 of the next.
    let next = 1024.0 - 0.5 * 0.1f64.powi(i32::try_from(places).unwrap_or(i32::MAX));
    let mut value = bytes as f64 / 1024.0;
    let mut unit = 0;
    while value >= next && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    format!("{value:.places$} {}", UNITS[unit])
}
