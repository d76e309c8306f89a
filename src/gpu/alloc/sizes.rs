//! Rounding and the sizes that decide where a request goes (PyTorch: `round_size`, `get_allocation_size`).

/// Every block size is a multiple of this many bytes.
pub const MIN_BLOCK: u64 = 512;
/// Rounded requests up to this size come from the small pool.
pub const SMALL_SIZE: u64 = MIB;
/// Segment size of the small pool, and its page under expandable segments.
pub const SMALL_BUFFER: u64 = 2 * MIB;
/// Default segment size for requests between 1 MiB and 10 MiB, and the large page under expandable segments.
pub const LARGE_SEGMENT: u64 = 20 * MIB;
/// Requests from this size on get a segment of their own.
pub const MIN_LARGE_ALLOC: u64 = 10 * MIB;
/// Such a segment is a multiple of this.
pub const ROUND_LARGE: u64 = 2 * MIB;
/// Requests of this many bytes and more are refused (1 EiB).
pub const REQUEST_LIMIT: u64 = 1 << 60;
/// Number of intervals of `roundup_power2_divisions`: 1 MiB, 2 MiB, … 32 GiB and above.
pub const ROUNDUP_INTERVALS: usize = 16;
/// 2^20 bytes.
pub const MIB: u64 = 1 << 20;

/// Divisions per power of two, one entry an interval; 0 or 1 is off.
pub type Divisions = [u32; ROUNDUP_INTERVALS];

/// Rounds `n` up to a multiple of `unit`, a power of two or any other positive number. Saturates.
pub const fn round_up(n: u64, unit: u64) -> u64 {
    match n % unit {
        0 => n,
        rest => n.saturating_add(unit - rest),
    }
}

/// Which entry of [`Divisions`] holds for a request of `n` bytes: by powers of two from 1 MiB, clamped at both ends.
pub const fn division_index(n: u64) -> usize {
    let log = if n == 0 { 0 } else { n.ilog2() };
    let index = log.saturating_sub(20) as usize;
    if index < ROUNDUP_INTERVALS { index } else { ROUNDUP_INTERVALS - 1 }
}

/// Rounds `n` up to the next of `divisions` (a power of two) equal steps between the powers of two around it.
pub const fn next_division(n: u64, divisions: u64) -> u64 {
    if n.is_power_of_two() {
        return n;
    }
    let floor = 1u64 << n.ilog2();
    let step = floor >> divisions.ilog2();
    if step == 0 {
        return floor.saturating_mul(2);
    }
    let low = n & !(step - 1);
    if low == n { n } else { low + step }
}

/// The block size for a request of `n` bytes, below [`REQUEST_LIMIT`].
#[inline]
pub const fn round_size(n: u64, divisions: &Divisions) -> u64 {
    if n < MIN_BLOCK {
        return MIN_BLOCK;
    }
    let parts = divisions[division_index(n)] as u64;
    if parts > 1 && n > MIN_BLOCK * parts { next_division(n, parts) } else { (n + MIN_BLOCK - 1) & !(MIN_BLOCK - 1) }
}

/// Whether an ordinary block of the large pool is split, when a request of `size` bytes (rounded) leaves `rest` of it.
#[inline]
pub const fn large_splits(size: u64, rest: u64, max_split_size: Option<u64>) -> bool {
    rest > SMALL_SIZE
        && match max_split_size {
            Some(limit) => size < limit,
            None => true,
        }
}

/// How many bytes to ask the driver for when a block of `size` bytes (rounded) is missing.
#[inline]
pub const fn segment_size(size: u64, large_segment: u64) -> u64 {
    if size <= SMALL_SIZE {
        SMALL_BUFFER
    } else if size < MIN_LARGE_ALLOC {
        large_segment
    } else {
        round_up(size, ROUND_LARGE)
    }
}

/// Formats bytes the way PyTorch's out-of-memory message does: `512 bytes`, `2.00 KiB`, `20.00 MiB`, `23.65 GiB`.
/// (The exact text is from memory: unverified.)
pub fn format_size(bytes: u64) -> String {
    const KIB: f64 = 1024.0;
    let value = bytes as f64;
    if bytes <= 1024 {
        format!("{bytes} bytes")
    } else if bytes <= 1 << 20 {
        format!("{:.2} KiB", value / KIB)
    } else if bytes <= 1 << 30 {
        format!("{:.2} MiB", value / KIB / KIB)
    } else {
        format!("{:.2} GiB", value / KIB / KIB / KIB)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    const OFF: Divisions = [0; ROUNDUP_INTERVALS];

    #[rstest]
    #[case(1, 512)]
    #[case(511, 512)]
    #[case(512, 512)]
    #[case(513, 1024)]
    #[case(1 << 20, 1 << 20)]
    #[case((1 << 20) + 1, (1 << 20) + 512)]
    #[case(REQUEST_LIMIT - 1, REQUEST_LIMIT)]
    fn sizes_are_multiples_of_512(#[case] n: u64, #[case] want: u64) {
        assert_eq!(round_size(n, &OFF), want);
    }

    #[rstest]
    #[case(1200, 4, 1280)]
    #[case(1024, 4, 1024)]
    #[case(1025, 4, 1280)]
    #[case(1300, 4, 1536)]
    #[case(1900, 4, 2048)]
    #[case(3, 4, 4)]
    fn divisions_step_between_powers_of_two(#[case] n: u64, #[case] parts: u64, #[case] want: u64) {
        assert_eq!(next_division(n, parts), want);
    }

    #[test]
    fn divisions_hold_only_above_512_times_their_number_and_may_leave_multiples_of_512() {
        let all = [8; ROUNDUP_INTERVALS];
        assert_eq!(round_size(4096, &all), 4096);
        assert_eq!(round_size(3000, &all), 3072, "3000 <= 512 * 8: plain rounding");
        assert_eq!(round_size(4097, &all), 4608);
        assert_eq!(round_size(17 * MIB, &all), 18 * MIB);
        let by_interval = {
            let mut d = OFF;
            d[5] = 8;
            d
        };
        assert_eq!(round_size(33 * MIB, &by_interval), 36 * MIB, "interval 32 MiB");
        assert_eq!(round_size(65 * MIB, &by_interval), 65 * MIB, "interval 64 MiB is off");
    }

    #[rstest]
    #[case(1, 0)]
    #[case(MIB, 0)]
    #[case(2 * MIB - 1, 0)]
    #[case(2 * MIB, 1)]
    #[case(32 << 30, 15)]
    #[case(1 << 50, 15)]
    fn the_interval_is_clamped(#[case] n: u64, #[case] want: usize) {
        assert_eq!(division_index(n), want);
    }

    #[rstest]
    #[case(512, 2 * MIB)]
    #[case(MIB, 2 * MIB)]
    #[case(MIB + 512, 20 * MIB)]
    #[case(10 * MIB - 512, 20 * MIB)]
    #[case(10 * MIB, 10 * MIB)]
    #[case(10 * MIB + 512, 12 * MIB)]
    #[case(21 * MIB, 22 * MIB)]
    fn segment_sizes(#[case] size: u64, #[case] want: u64) {
        assert_eq!(segment_size(size, LARGE_SEGMENT), want);
    }

    #[test]
    fn sizes_read_as_in_pytorch() {
        assert_eq!(format_size(512), "512 bytes");
        assert_eq!(format_size(20 * MIB), "20.00 MiB");
        assert_eq!(format_size(25_394_085_888), "23.65 GiB");
    }
}
