//! Statistics under PyTorch's names (`torch.cuda.memory_stats`).

use indexmap::IndexMap;

/// One figure over time. Counts or bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
pub struct Stat {
    /// Now.
    pub current: u64,
    /// Highest value since the start or the last reset of peaks.
    pub peak: u64,
    /// Sum of all increases since the start or the last reset of sums.
    pub allocated: u64,
    /// Sum of all decreases likewise.
    pub freed: u64,
}

impl Stat {
    /// Adds `n`.
    #[inline]
    pub fn increase(&mut self, n: u64) {
        self.current += n;
        self.peak = self.peak.max(self.current);
        self.allocated += n;
    }

    /// Takes `n` away.
    #[inline]
    pub fn decrease(&mut self, n: u64) {
        debug_assert!(self.current >= n, "a statistic fell below zero");
        self.current = self.current.wrapping_sub(n);
        self.freed += n;
    }

    #[inline]
    fn change(&mut self, n: i64) {
        if n >= 0 { self.increase(n as u64) } else { self.decrease(n.unsigned_abs()) }
    }

    fn reset_peak(&mut self) {
        self.peak = self.current;
    }

    fn reset_accumulated(&mut self) {
        self.allocated = 0;
        self.freed = 0;
    }
}

/// A figure for both pools together and each of them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
pub struct StatArray {
    pub all: Stat,
    pub large_pool: Stat,
    pub small_pool: Stat,
}

impl StatArray {
    #[inline]
    fn pool(&mut self, small: bool) -> &mut Stat {
        if small { &mut self.small_pool } else { &mut self.large_pool }
    }
    /// Adds `n` for the small or large pool.
    #[inline]
    pub fn increase(&mut self, small: bool, n: u64) {
        self.all.increase(n);
        self.pool(small).increase(n);
    }
    /// Takes `n` away likewise.
    #[inline]
    pub fn decrease(&mut self, small: bool, n: u64) {
        self.all.decrease(n);
        self.pool(small).decrease(n);
    }
    /// Adds `n`, which may be negative.
    #[inline]
    pub(crate) fn change(&mut self, small: bool, n: i64) {
        self.all.change(n);
        self.pool(small).change(n);
    }
    fn each(&mut self, f: fn(&mut Stat)) {
        f(&mut self.all);
        f(&mut self.large_pool);
        f(&mut self.small_pool);
    }
}

/// All statistics of one allocator. Bytes count blocks after rounding, unless said otherwise.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize)]
pub struct Stats {
    /// Number of requests served and not yet freed by their owner.
    pub allocation: StatArray,
    /// Number of segments from the driver; ranges mapped into expandable segments do not count.
    pub segment: StatArray,
    /// Number of blocks allocated or waiting for another stream.
    pub active: StatArray,
    /// Number of free blocks that share their segment with others, so that the segment cannot go back.
    pub inactive_split: StatArray,
    pub allocated_bytes: StatArray,
    pub reserved_bytes: StatArray,
    pub active_bytes: StatArray,
    pub inactive_split_bytes: StatArray,
    /// Bytes before rounding.
    pub requested_bytes: StatArray,
    /// Blocks at or above max_split_size.
    pub oversize_allocations: Stat,
    /// Segments at or above max_split_size.
    pub oversize_segments: Stat,
    /// Driver allocations tried again after the cache was emptied.
    pub num_alloc_retries: u64,
    pub num_ooms: u64,
    pub num_sync_all_streams: u64,
    pub num_device_alloc: u64,
    pub num_device_free: u64,
    /// Requests refused before the driver was asked (`throw_on_cudamalloc_oom`).
    pub num_oom_rejections: u64,
    /// In bytes; -1 is unlimited.
    pub max_split_size: i64,
    /// Reserved bytes of each private pool, by `"id0_id1"`.
    pub reserved_bytes_by_private_pools: std::collections::BTreeMap<String, u64>,
}

impl Stats {
    fn arrays(&mut self) -> [&mut StatArray; 9] {
        [
            &mut self.allocation,
            &mut self.segment,
            &mut self.active,
            &mut self.inactive_split,
            &mut self.allocated_bytes,
            &mut self.reserved_bytes,
            &mut self.active_bytes,
            &mut self.inactive_split_bytes,
            &mut self.requested_bytes,
        ]
    }

    /// Sets every peak to the present value (`torch.cuda.reset_peak_memory_stats`).
    pub fn reset_peak(&mut self) {
        self.arrays().into_iter().for_each(|array| array.each(Stat::reset_peak));
        self.oversize_allocations.reset_peak();
        self.oversize_segments.reset_peak();
    }

    /// Sets sums and counts to zero (`torch.cuda.reset_accumulated_memory_stats`).
    pub fn reset_accumulated(&mut self) {
        self.arrays().into_iter().for_each(|array| array.each(Stat::reset_accumulated));
        self.oversize_allocations.reset_accumulated();
        self.oversize_segments.reset_accumulated();
        self.num_alloc_retries = 0;
        self.num_ooms = 0;
        self.num_sync_all_streams = 0;
        self.num_device_alloc = 0;
        self.num_device_free = 0;
        self.num_oom_rejections = 0;
    }

    /// The flat form of `torch.cuda.memory_stats`: `"active_bytes.all.current"` and so on, sorted by name.
    pub fn flatten(&self) -> IndexMap<String, i64> {
        let mut flat = IndexMap::new();
        let value = serde_json::to_value(self).unwrap_or_default();
        flatten_into(&mut flat, "", &value);
        flat.sort_keys();
        flat
    }
}

fn flatten_into(flat: &mut IndexMap<String, i64>, name: &str, value: &serde_json::Value) {
    if let serde_json::Value::Object(fields) = value {
        for (key, inner) in fields {
            let inner_name = if name.is_empty() { key.clone() } else { format!("{name}.{key}") };
            flatten_into(flat, &inner_name, inner);
        }
    } else if let Some(number) = value.as_i64() {
        flat.insert(name.to_owned(), number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flat_names_are_those_of_memory_stats() {
        let mut stats = Stats { max_split_size: -1, ..Stats::default() };
        stats.allocated_bytes.increase(true, 512);
        stats.allocated_bytes.decrease(true, 512);
        stats.reserved_bytes_by_private_pools.insert("0_1".into(), 7);
        let flat = stats.flatten();
        assert_eq!(flat["allocated_bytes.all.peak"], 512);
        assert_eq!(flat["allocated_bytes.small_pool.freed"], 512);
        assert_eq!(flat["allocated_bytes.large_pool.allocated"], 0);
        assert_eq!(flat["max_split_size"], -1);
        assert_eq!(flat["reserved_bytes_by_private_pools.0_1"], 7);
        assert_eq!(flat.len(), 9 * 12 + 2 * 4 + 7 + 1);
        assert!(flat.keys().is_sorted());
        stats.reset_peak();
        assert_eq!(stats.allocated_bytes.all.peak, 0);
        stats.reset_accumulated();
        assert_eq!(stats.allocated_bytes.all, Stat::default());
    }
}
