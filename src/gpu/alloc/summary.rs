//! The text of `torch.cuda.memory_summary`, line for line.

use std::fmt::Write as _;

use super::core::DeviceAllocator;
use super::stats::{Stat, Stats};
use crate::gpu::driver::Driver;

const WIDTH: usize = 75;

/// Bytes in the unit that suits `reference`: the next unit once the reference reaches 768 times 1024 of one.
fn size(bytes: u64, reference: u64) -> String {
    let (mut bytes, mut reference, mut unit) = (bytes, reference as f64, "B  ");
    for next in ["KiB", "MiB", "GiB", "TiB", "PiB"] {
        if reference < 768.0 * 1024.0 {
            break;
        }
        unit = next;
        bytes /= 1024;
        reference /= 1024.0;
    }
    format!("{bytes:>6} {unit}")
}

/// A count in thousands or millions once `reference` reaches 750 times 1000.
fn count(number: u64, reference: u64) -> String {
    let (mut number, mut reference, mut unit) = (number, reference as f64, " ");
    for next in ["K", "M"] {
        if reference < 750.0 * 1000.0 {
            break;
        }
        unit = next;
        number /= 1000;
        reference /= 1000.0;
    }
    format!("{number:>7} {unit} ")
}

type Format = fn(u64, u64) -> String;

fn row(text: &mut String, name: &str, stat: &Stat, reference: &Stat, format: Format) {
    let _ = writeln!(
        text,
        "| {name:<21} | {} | {} | {} | {} |",
        format(stat.current, reference.current),
        format(stat.peak, reference.peak),
        format(stat.allocated, reference.allocated),
        format(stat.freed, reference.freed)
    );
}

/// The summary of `stats` for the device with index `device`. `abbreviated` leaves out the rows of the two pools.
pub fn memory_summary(stats: &Stats, device: u32, abbreviated: bool) -> String {
    let rule = |text: &mut String, fill: &str| {
        let _ = writeln!(text, "|{}|", fill.repeat(WIDTH));
    };
    let mut text = String::new();
    rule(&mut text, "=");
    let _ = writeln!(text, "| {:16} PyTorch CUDA memory summary, device ID {device:<17} |", "");
    rule(&mut text, "-");
    let _ =
        writeln!(text, "|  {:9} CUDA OOMs: {:<12} | {:6} cudaMalloc retries: {:<8}  |", "", stats.num_ooms, "", stats.num_alloc_retries);
    rule(&mut text, "=");
    let _ = writeln!(text, "|        Metric         | Cur Usage  | Peak Usage | Tot Alloc  | Tot Freed  |");
    let metrics = [
        (&stats.allocated_bytes, "Allocated memory", size as Format),
        (&stats.active_bytes, "Active memory", size),
        (&stats.requested_bytes, "Requested memory", size),
        (&stats.reserved_bytes, "GPU reserved memory", size),
        (&stats.inactive_split_bytes, "Non-releasable memory", size),
        (&stats.allocation, "Allocations", count),
        (&stats.active, "Active allocs", count),
        (&stats.segment, "GPU reserved segments", count),
        (&stats.inactive_split, "Non-releasable allocs", count),
    ];
    for (array, name, format) in metrics {
        rule(&mut text, "-");
        row(&mut text, name, &array.all, &array.all, format);
        if !abbreviated {
            row(&mut text, "      from large pool", &array.large_pool, &array.all, format);
            row(&mut text, "      from small pool", &array.small_pool, &array.all, format);
        }
    }
    for (stat, name) in [(&stats.oversize_allocations, "Oversize allocations"), (&stats.oversize_segments, "Oversize GPU segments")] {
        rule(&mut text, "-");
        row(&mut text, name, stat, stat, count);
    }
    rule(&mut text, "=");
    text
}

impl<D: Driver> DeviceAllocator<D> {
    /// The text of `torch.cuda.memory_summary(abbreviated=…)`, with its trailing newline.
    pub fn memory_summary(&self, abbreviated: bool) -> String {
        memory_summary(&self.raw_stats(), self.device(), abbreviated)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_follow_the_reference_value() {
        assert_eq!(size(786_431, 786_431), "786431 B  ");
        assert_eq!(size(786_432, 786_432), "   768 KiB");
        assert_eq!(size(1_048_576, 805_306_368), "     1 MiB");
        assert_eq!(count(749_999, 749_999), " 749999   ");
        assert_eq!(count(750_000, 750_000), "    750 K ");
        assert_eq!(count(1, 750_000_000), "      0 M ");
    }

    #[test]
    fn the_layout_is_pytorchs() {
        let mut stats = Stats { num_ooms: 2, num_alloc_retries: 5, ..Stats::default() };
        stats.allocated_bytes.increase(true, 512);
        stats.allocated_bytes.increase(false, 3 << 20);
        stats.allocated_bytes.decrease(false, 1 << 20);
        stats.allocation.increase(true, 1);
        stats.oversize_segments.increase(1);
        let text = memory_summary(&stats, 3, false);
        assert!(text.lines().all(|line| line.chars().count() == WIDTH + 2));
        assert!(text.ends_with("=|\n"));
        assert_eq!(text.lines().count(), 6 + 9 * 4 + 4 + 1);
        let abbreviated = memory_summary(&stats, 3, true);
        insta::assert_snapshot!(abbreviated, @r"
        |===========================================================================|
        |                  PyTorch CUDA memory summary, device ID 3                 |
        |---------------------------------------------------------------------------|
        |            CUDA OOMs: 2            |        cudaMalloc retries: 5         |
        |===========================================================================|
        |        Metric         | Cur Usage  | Peak Usage | Tot Alloc  | Tot Freed  |
        |---------------------------------------------------------------------------|
        | Allocated memory      |   2048 KiB |   3072 KiB |   3072 KiB |   1024 KiB |
        |---------------------------------------------------------------------------|
        | Active memory         |      0 B   |      0 B   |      0 B   |      0 B   |
        |---------------------------------------------------------------------------|
        | Requested memory      |      0 B   |      0 B   |      0 B   |      0 B   |
        |---------------------------------------------------------------------------|
        | GPU reserved memory   |      0 B   |      0 B   |      0 B   |      0 B   |
        |---------------------------------------------------------------------------|
        | Non-releasable memory |      0 B   |      0 B   |      0 B   |      0 B   |
        |---------------------------------------------------------------------------|
        | Allocations           |       1    |       1    |       1    |       0    |
        |---------------------------------------------------------------------------|
        | Active allocs         |       0    |       0    |       0    |       0    |
        |---------------------------------------------------------------------------|
        | GPU reserved segments |       0    |       0    |       0    |       0    |
        |---------------------------------------------------------------------------|
        | Non-releasable allocs |       0    |       0    |       0    |       0    |
        |---------------------------------------------------------------------------|
        | Oversize allocations  |       0    |       0    |       0    |       0    |
        |---------------------------------------------------------------------------|
        | Oversize GPU segments |       1    |       1    |       1    |       0    |
        |===========================================================================|
        ");
        let head: Vec<&str> = text.lines().take(10).collect();
        insta::assert_snapshot!(head.join("\n"), @r"
        |===========================================================================|
        |                  PyTorch CUDA memory summary, device ID 3                 |
        |---------------------------------------------------------------------------|
        |            CUDA OOMs: 2            |        cudaMalloc retries: 5         |
        |===========================================================================|
        |        Metric         | Cur Usage  | Peak Usage | Tot Alloc  | Tot Freed  |
        |---------------------------------------------------------------------------|
        | Allocated memory      |   2048 KiB |   3072 KiB |   3072 KiB |   1024 KiB |
        |       from large pool |   2048 KiB |   3072 KiB |   3072 KiB |   1024 KiB |
        |       from small pool |      0 KiB |      0 KiB |      0 KiB |      0 KiB |
        ");
    }
}
