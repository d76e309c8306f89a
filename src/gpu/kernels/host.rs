//! The kernels of the memory test: names, arguments, patterns, the layout of results, and what each of them does, as
//! plain Rust over a [`Memory`]. This file needs nothing else of the crate, so that a simulated driver can include it.
//!
//! Memory is tested in words of 64 bits, in the order of the device (little endian). Every argument of every kernel is a
//! `u64`. `base` and every other address is a multiple of 8; a kernel may use wider accesses inside the range, but never
//! touches a byte outside `base .. base + 8 * words`. `words` may be 0: then nothing is touched.
//!
//! A pattern gives each word a value from its address, its index and two parameters: see [`value`]. The index of the word
//! at `base + 8 * i` is `origin + i`; it goes on from block to block.
//!
//! A *result* is [`RESULT_WORDS`] words of device memory, all zero before the first launch that gets it. Launches add to it:
//!
//! | word | meaning |
//! |---|---|
//! | 0 | mismatches (atomic add) |
//! | 1 | highest address of a mismatch (atomic max) |
//! | 2 | complement of the lowest address of a mismatch (atomic max) |
//! | 3 | not used |
//! | 4 .. 68 | for each bit, lowest first: how often 0 was expected and 1 was read |
//! | 68 .. 132 | the same for 1 expected and 0 read |
//! | 132 .. | records of 3 words: address, expected, got |
//!
//! The number of a mismatch is the value of word 0 before it was counted. Mismatches with a number below [`RECORDS`] are
//! recorded, in the place of their number; those below [`HISTOGRAM_LIMIT`] are counted by bit.

/// Mismatches that are recorded one by one.
pub const RECORDS: u64 = 256;
/// Mismatches that are counted by bit; beyond, a card that is wrong everywhere would only be slow to say so.
pub const HISTOGRAM_LIMIT: u64 = 1 << 20;
/// First word of the counts of bits read as 1 where 0 was expected.
pub const RESULT_SET: u64 = 4;
/// First word of the counts of bits read as 0 where 1 was expected.
pub const RESULT_CLEARED: u64 = RESULT_SET + 64;
/// First word of the records.
pub const RESULT_RECORDS: u64 = RESULT_CLEARED + 64;
/// Words of a result.
pub const RESULT_WORDS: u64 = RESULT_RECORDS + 3 * RECORDS;
/// Bytes of a result.
pub const RESULT_BYTES: u64 = 8 * RESULT_WORDS;

/// The upper 16 bits of every canary word.
pub const CANARY_MARK: u64 = 0xC0DE;

/// What the read kernel puts into its sink when the words that one of its threads read come to it: certainly where one word of the range is this and
/// all others are 0.
pub const READ_MARK: u64 = 0x9E37_79B9_7F4A_7C15;

/// The kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kernel {
    /// Writes a pattern.
    Fill,
    /// Compares with a pattern.
    Verify,
    /// Compares each word with a pattern and then writes another one to it: a step of moving inversions.
    VerifyWrite,
    /// Copies words; the ranges do not overlap.
    Copy,
    /// Reads every word and changes nothing: pushes everything else out of the caches.
    Read,
    /// Writes a value to the words whose index has a residue, or to all others.
    ModuloFill,
    /// Compares the words whose index has a residue with a value.
    ModuloVerify,
}

impl Kernel {
    /// All of them.
    pub const ALL: [Kernel; 7] =
        [Kernel::Fill, Kernel::Verify, Kernel::VerifyWrite, Kernel::Copy, Kernel::Read, Kernel::ModuloFill, Kernel::ModuloVerify];

    /// The name of the function in the module.
    pub const fn name(self) -> &'static str {
        match self {
            Kernel::Fill => "tare_fill",
            Kernel::Verify => "tare_verify",
            Kernel::VerifyWrite => "tare_verify_write",
            Kernel::Copy => "tare_copy",
            Kernel::Read => "tare_read",
            Kernel::ModuloFill => "tare_modulo_fill",
            Kernel::ModuloVerify => "tare_modulo_verify",
        }
    }

    /// The kernel of a name.
    pub fn from_name(name: &str) -> Option<Kernel> {
        Kernel::ALL.into_iter().find(|kernel| kernel.name() == name)
    }

    /// Its arguments in order, each a `u64`.
    ///
    /// * `pattern`, `p0`, `p1`: what is expected, or written: see [`value`]. `next`, `q0`, `q1`: what is written after it.
    /// * `descending`: 0 or 1; with 1 a thread goes through its words from the end.
    /// * `sink`: address of one word. A kernel that reads must use it so that the reads are not optimised away: see
    ///   [`READ_MARK`]. Where the range holds something else, what it holds after the launch means nothing.
    /// * `modulus` > 0, `residue` < `modulus`; `inside` 1: the words with `index % modulus == residue`, 0: all others.
    pub const fn arguments(self) -> &'static [&'static str] {
        match self {
            Kernel::Fill => &["base", "words", "origin", "pattern", "p0", "p1"],
            Kernel::Verify => &["base", "words", "origin", "pattern", "p0", "p1", "result"],
            Kernel::VerifyWrite => &["base", "words", "origin", "pattern", "p0", "p1", "result", "next", "q0", "q1", "descending"],
            Kernel::Copy => &["to", "from", "words"],
            Kernel::Read => &["base", "words", "sink"],
            Kernel::ModuloFill => &["base", "words", "origin", "modulus", "residue", "value", "inside"],
            Kernel::ModuloVerify => &["base", "words", "origin", "modulus", "residue", "value", "result"],
        }
    }
}

/// The largest number of arguments of a kernel.
pub const MOST_ARGUMENTS: usize = 11;

/// A kernel with its arguments, ready to go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Launch {
    pub kernel: Kernel,
    /// Thread blocks. Kernels loop over the grid, so any number above 0 is right.
    pub grid: u32,
    /// Threads of a block: a multiple of 32, at most 1024.
    pub block: u32,
    arguments: [u64; MOST_ARGUMENTS],
}

impl Launch {
    /// A launch. Arguments that the kernel does not have are left out; missing ones are 0.
    pub fn new(kernel: Kernel, grid: u32, block: u32, arguments: &[u64]) -> Self {
        let mut all = [0; MOST_ARGUMENTS];
        for (slot, argument) in all.iter_mut().zip(arguments.iter().take(kernel.arguments().len())) {
            *slot = *argument;
        }
        Launch { kernel, grid, block, arguments: all }
    }

    /// The arguments in the order of [`Kernel::arguments`].
    pub fn arguments(&self) -> &[u64] {
        &self.arguments[..self.kernel.arguments().len()]
    }

    /// Memory that the launch reads or writes: address and bytes of each range, without empty ones.
    pub fn ranges(&self) -> impl Iterator<Item = (u64, u64)> + use<> {
        let a = self.arguments;
        let bytes = |words: u64| words.saturating_mul(8);
        let ranges = match self.kernel {
            Kernel::Fill | Kernel::ModuloFill => [(a[0], bytes(a[1])), (0, 0)],
            Kernel::Verify | Kernel::VerifyWrite | Kernel::ModuloVerify => [(a[0], bytes(a[1])), (a[6], RESULT_BYTES)],
            Kernel::Copy => [(a[0], bytes(a[2])), (a[1], bytes(a[2]))],
            Kernel::Read => [(a[0], bytes(a[1])), (a[2], 8)],
        };
        ranges.into_iter().filter(|(_, bytes)| *bytes > 0)
    }
}

/// The patterns, by number. `!x` is the bitwise complement; indices and sums wrap.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u64)]
pub enum Pattern {
    /// `(address + p1) ^ p0`.
    OwnAddress = 0,
    /// `p0`.
    Constant = 1,
    /// `p0` at even indices, `!p0` at odd ones.
    Checkerboard = 2,
    /// `(1 << (index + p1) % 64) ^ p0`.
    Walking = 3,
    /// The low byte of `p0`, rotated left by `(index + p1) % 8`, in all eight bytes.
    Shift8 = 4,
    /// The low 32 bits of `p0`, rotated left by `(2 * index + p1) % 32` in the low half and by one more (modulo 32) in the high half.
    Shift32 = 5,
    /// `mix(p0 + (index + 1) * 0x9E3779B97F4A7C15) ^ p1`, where [`mix`] is the finaliser of splitmix64.
    Random = 6,
    /// Guard words: [`CANARY_MARK`] in the upper 16 bits, then the low 32 bits of `p0` (the block), then the low 16 of the index;
    /// all of it `^ p1`.
    Canary = 7,
}

impl Pattern {
    /// All of them, in the order of their numbers.
    pub const ALL: [Pattern; 8] = [
        Pattern::OwnAddress,
        Pattern::Constant,
        Pattern::Checkerboard,
        Pattern::Walking,
        Pattern::Shift8,
        Pattern::Shift32,
        Pattern::Random,
        Pattern::Canary,
    ];
}

/// The finaliser of splitmix64: a bijection that spreads every bit.
pub const fn mix(mut z: u64) -> u64 {
    z = (z ^ z >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ z >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ z >> 31
}

/// The value of a word. An unknown pattern is 0 everywhere.
pub const fn value(pattern: u64, address: u64, index: u64, p0: u64, p1: u64) -> u64 {
    match pattern {
        0 => address.wrapping_add(p1) ^ p0,
        1 => p0,
        2 => p0 ^ 0u64.wrapping_sub(index & 1),
        3 => (1 << (index.wrapping_add(p1) & 63)) ^ p0,
        4 => (p0 as u8).rotate_left((index.wrapping_add(p1) & 7) as u32) as u64 * 0x0101_0101_0101_0101,
        5 => {
            let shift = (index.wrapping_mul(2).wrapping_add(p1) & 31) as u32;
            (p0 as u32).rotate_left(shift) as u64 | ((p0 as u32).rotate_left((shift + 1) & 31) as u64) << 32
        }
        6 => mix(p0.wrapping_add(index.wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15))) ^ p1,
        7 => ((CANARY_MARK << 48) | ((p0 & 0xFFFF_FFFF) << 16) | (index & 0xFFFF)) ^ p1,
        _ => 0,
    }
}

/// Device memory, word by word. Addresses are multiples of 8.
pub trait Memory {
    fn load(&mut self, address: u64) -> u64;
    fn store(&mut self, address: u64, value: u64);
}

/// Adds one mismatch to the result at `result`.
pub fn note_mismatch(memory: &mut impl Memory, result: u64, address: u64, expected: u64, got: u64) {
    let number = memory.load(result);
    memory.store(result, number + 1);
    let highest = memory.load(result + 8).max(address);
    memory.store(result + 8, highest);
    let lowest = memory.load(result + 16).max(!address);
    memory.store(result + 16, lowest);
    if number < HISTOGRAM_LIMIT {
        for bit in (0..64).filter(|bit| (expected ^ got) >> bit & 1 == 1) {
            let first = if got >> bit & 1 == 1 { RESULT_SET } else { RESULT_CLEARED };
            let place = result + 8 * (first + bit);
            let count = memory.load(place);
            memory.store(place, count + 1);
        }
    }
    if number < RECORDS {
        let place = result + 8 * (RESULT_RECORDS + 3 * number);
        memory.store(place, address);
        memory.store(place + 8, expected);
        memory.store(place + 16, got);
    }
}

/// Runs a launch, word after word. Ranges are the caller's to check: [`Launch::ranges`].
pub fn run(launch: &Launch, memory: &mut impl Memory) {
    let a = launch.arguments;
    match launch.kernel {
        Kernel::Fill => {
            for i in 0..a[1] {
                let address = a[0] + 8 * i;
                memory.store(address, value(a[3], address, a[2].wrapping_add(i), a[4], a[5]));
            }
        }
        Kernel::Verify => {
            for i in 0..a[1] {
                let address = a[0] + 8 * i;
                let (expected, got) = (value(a[3], address, a[2].wrapping_add(i), a[4], a[5]), memory.load(address));
                if expected != got {
                    note_mismatch(memory, a[6], address, expected, got);
                }
            }
        }
        Kernel::VerifyWrite => {
            for step in 0..a[1] {
                let i = if a[10] == 0 { step } else { a[1] - 1 - step };
                let (address, index) = (a[0] + 8 * i, a[2].wrapping_add(i));
                let (expected, got) = (value(a[3], address, index, a[4], a[5]), memory.load(address));
                if expected != got {
                    note_mismatch(memory, a[6], address, expected, got);
                }
                memory.store(address, value(a[7], address, index, a[8], a[9]));
            }
        }
        Kernel::Copy => {
            for i in 0..a[2] {
                let word = memory.load(a[1] + 8 * i);
                memory.store(a[0] + 8 * i, word);
            }
        }
        Kernel::Read => {
            let mut marks = 0;
            for i in 0..a[1] {
                match memory.load(a[0] + 8 * i) {
                    0 => {}
                    READ_MARK => marks += 1,
                    // Nothing is said of other words: the rest need not be looked at.
                    _ => return,
                }
            }
            if marks == 1 {
                memory.store(a[2], READ_MARK);
            }
        }
        Kernel::ModuloFill => {
            for i in 0..a[1] {
                if (a[2].wrapping_add(i) % a[3].max(1) == a[4]) == (a[6] != 0) {
                    memory.store(a[0] + 8 * i, a[5]);
                }
            }
        }
        Kernel::ModuloVerify => {
            for i in (0..a[1]).filter(|i| a[2].wrapping_add(*i) % a[3].max(1) == a[4]) {
                let address = a[0] + 8 * i;
                let got = memory.load(address);
                if got != a[5] {
                    note_mismatch(memory, a[6], address, a[5], got);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_those_of_the_table() {
        let at = |pattern: Pattern, index, p0, p1| value(pattern as u64, 0x7000 + 8 * index, index, p0, p1);
        assert_eq!(at(Pattern::OwnAddress, 2, 0, 0), 0x7010);
        assert_eq!(at(Pattern::OwnAddress, 2, u64::MAX, 8), !0x7018);
        assert_eq!([at(Pattern::Checkerboard, 4, 0xAA, 0), at(Pattern::Checkerboard, 5, 0xAA, 0)], [0xAA, !0xAA]);
        assert_eq!(
            [at(Pattern::Walking, 63, 0, 0), at(Pattern::Walking, 64, 0, 0), at(Pattern::Walking, 64, u64::MAX, 1)],
            [1 << 63, 1, !2]
        );
        assert_eq!(at(Pattern::Shift8, 7, 0x01, 0), 0x8080_8080_8080_8080);
        assert_eq!(at(Pattern::Shift32, 15, 1, 0), 0x8000_0000_4000_0000);
        assert_eq!(at(Pattern::Shift32, 15, 1, 1), 0x0000_0001_8000_0000);
        // The first outputs of splitmix64 with seed 1234567.
        assert_eq!(at(Pattern::Random, 0, 1_234_567, 0), 6_457_827_717_110_365_317);
        assert_eq!(at(Pattern::Random, 1, 1_234_567, u64::MAX), !3_203_168_211_198_807_973);
        assert_eq!(at(Pattern::Canary, 0x1_0003, 5, 0), 0xC0DE_0000_0005_0003);
        assert_eq!(at(Pattern::Canary, 0x1_0003, 5, u64::MAX), !0xC0DE_0000_0005_0003);
        assert!(Pattern::ALL.iter().enumerate().all(|(number, pattern)| *pattern as usize == number));
    }

    #[test]
    fn every_kernel_is_found_by_its_name() {
        for kernel in Kernel::ALL {
            assert_eq!(Kernel::from_name(kernel.name()), Some(kernel));
            assert!(kernel.arguments().len() <= MOST_ARGUMENTS);
        }
        assert_eq!(Kernel::from_name("tare"), None);
    }
}
