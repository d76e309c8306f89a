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
    /// The flat form of `torch.cuda.memory_stats`: `"active_bytes.all.current"` and so on, sorted by name.
    pub fn flatten(&self) -> IndexMap<String, i64> {
        let mut flat = IndexMap::new();
        let value = serde_json::to_value(self).unwrap_or_default();
        flatten_into(&mut flat, "", &value);
        flat.sort_keys();
        flat
    }
}

/// One pool's part of a [`Gauge`].
#[derive(Debug, Clone, Copy, Default)]
struct Meter {
    current: u64,
    peak: u64,
    allocated: u64,
    /// `freed` is this and `allocated` less `current`.
    base: u64,
}

impl Meter {
    fn freed(&self) -> u64 {
        self.base.wrapping_add(self.allocated).wrapping_sub(self.current)
    }

    fn read(&self) -> Stat {
        Stat { current: self.current, peak: self.peak, allocated: self.allocated, freed: self.freed() }
    }
}

/// A [`StatArray`] as the allocator keeps it: what follows from the rest is worked out when it is read.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Gauge {
    /// Large, small.
    pools: [Meter; 2],
    /// Highest sum of both.
    peak: u64,
}

impl Gauge {
    /// Both pools now.
    #[inline]
    pub fn current(&self) -> u64 {
        self.pools[0].current + self.pools[1].current
    }

    #[inline]
    pub fn increase(&mut self, small: bool, n: u64) {
        let meter = &mut self.pools[usize::from(small)];
        meter.current += n;
        meter.allocated += n;
        meter.peak = meter.peak.max(meter.current);
        self.peak = self.peak.max(self.current());
    }

    #[inline]
    pub fn decrease(&mut self, small: bool, n: u64) {
        let meter = &mut self.pools[usize::from(small)];
        debug_assert!(meter.current >= n, "a statistic fell below zero");
        meter.current = meter.current.wrapping_sub(n);
    }

    /// Adds `n`, which may be negative.
    #[inline]
    pub fn change(&mut self, small: bool, n: i64) {
        if n >= 0 { self.increase(small, n as u64) } else { self.decrease(small, n.unsigned_abs()) }
    }

    fn read(&self) -> StatArray {
        let [large_pool, small_pool] = self.pools.map(|meter| meter.read());
        let all = Stat {
            current: large_pool.current + small_pool.current,
            peak: self.peak,
            allocated: large_pool.allocated + small_pool.allocated,
            freed: large_pool.freed + small_pool.freed,
        };
        StatArray { all, large_pool, small_pool }
    }

    fn reset_peak(&mut self) {
        self.pools.iter_mut().for_each(|meter| meter.peak = meter.current);
        self.peak = self.current();
    }

    fn reset_accumulated(&mut self) {
        for meter in &mut self.pools {
            meter.allocated = 0;
            meter.base = meter.current;
        }
    }
}

/// [`Stats`] as the allocator keeps them.
#[derive(Debug, Clone, Default)]
pub(crate) struct Counters {
    pub allocation: Gauge,
    pub allocated_bytes: Gauge,
    pub active: Gauge,
    pub active_bytes: Gauge,
    pub requested_bytes: Gauge,
    pub inactive_split: Gauge,
    pub inactive_split_bytes: Gauge,
    pub segment: Gauge,
    pub reserved_bytes: Gauge,
    /// The rest; its arrays are not used.
    pub rest: Stats,
}

impl Counters {
    fn gauges(&mut self) -> [&mut Gauge; 9] {
        [
            &mut self.allocation,
            &mut self.allocated_bytes,
            &mut self.active,
            &mut self.active_bytes,
            &mut self.requested_bytes,
            &mut self.inactive_split,
            &mut self.inactive_split_bytes,
            &mut self.segment,
            &mut self.reserved_bytes,
        ]
    }

    pub fn read(&self) -> Stats {
        Stats {
            allocation: self.allocation.read(),
            segment: self.segment.read(),
            active: self.active.read(),
            inactive_split: self.inactive_split.read(),
            allocated_bytes: self.allocated_bytes.read(),
            reserved_bytes: self.reserved_bytes.read(),
            active_bytes: self.active_bytes.read(),
            inactive_split_bytes: self.inactive_split_bytes.read(),
            requested_bytes: self.requested_bytes.read(),
            ..self.rest.clone()
        }
    }

    /// `torch.cuda.reset_peak_memory_stats`.
    pub fn reset_peak(&mut self) {
        self.gauges().into_iter().for_each(Gauge::reset_peak);
        self.rest.oversize_allocations.reset_peak();
        self.rest.oversize_segments.reset_peak();
    }

    /// `torch.cuda.reset_accumulated_memory_stats`.
    pub fn reset_accumulated(&mut self) {
        self.gauges().into_iter().for_each(Gauge::reset_accumulated);
        self.rest.oversize_allocations.reset_accumulated();
        self.rest.oversize_segments.reset_accumulated();
        self.rest.num_alloc_retries = 0;
        self.rest.num_ooms = 0;
        self.rest.num_sync_all_streams = 0;
        self.rest.num_device_alloc = 0;
        self.rest.num_device_free = 0;
        self.rest.num_oom_rejections = 0;
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
        let mut counters = Counters { rest: Stats { max_split_size: -1, ..Stats::default() }, ..Counters::default() };
        counters.allocated_bytes.increase(true, 512);
        counters.allocated_bytes.decrease(true, 512);
        let mut stats = counters.read();
        stats.reserved_bytes_by_private_pools.insert("0_1".into(), 7);
        let flat = stats.flatten();
        assert_eq!(flat["allocated_bytes.all.peak"], 512);
        assert_eq!(flat["allocated_bytes.small_pool.freed"], 512);
        assert_eq!(flat["allocated_bytes.large_pool.allocated"], 0);
        assert_eq!(flat["max_split_size"], -1);
        assert_eq!(flat["reserved_bytes_by_private_pools.0_1"], 7);
        assert_eq!(flat.len(), 9 * 12 + 2 * 4 + 7 + 1);
        assert!(flat.keys().is_sorted());
        counters.reset_peak();
        assert_eq!(counters.read().allocated_bytes.all.peak, 0);
        counters.reset_accumulated();
        assert_eq!(counters.read().allocated_bytes.all, Stat::default());
    }

    #[test]
    fn what_is_worked_out_on_reading_equals_what_would_have_been_counted() {
        let (mut gauge, mut counted) = (Gauge::default(), StatArray::default());
        let mut state = 3u64;
        for step in 0..5000 {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let (small, n) = (state >> 60 & 1 == 1, state >> 40 & 0xFFF);
            let now = if small { counted.small_pool.current } else { counted.large_pool.current };
            if state >> 62 == 0 && now >= n {
                gauge.decrease(small, n);
                counted.decrease(small, n);
            } else if state >> 62 == 1 && now >= n {
                gauge.change(small, -(n as i64));
                counted.decrease(small, n);
            } else {
                gauge.change(small, n as i64);
                counted.increase(small, n);
            }
            if step % 700 == 0 {
                gauge.reset_peak();
                gauge.reset_accumulated();
                for stat in [&mut counted.all, &mut counted.small_pool, &mut counted.large_pool] {
                    stat.reset_peak();
                    stat.reset_accumulated();
                }
            }
            assert_eq!(gauge.read(), counted, "step {step}");
        }
    }
}
