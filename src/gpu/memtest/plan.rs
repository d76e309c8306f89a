//! Which patterns are written and read back at which level.

use std::time::Duration;

use super::Level;
use crate::gpu::kernels::host::{self, mix};
use crate::gpu::kernels::{Kernel, Launch, Pattern};

/// A pattern with its parameters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Rule {
    pub pattern: Pattern,
    pub p0: u64,
    pub p1: u64,
}

impl Rule {
    pub(super) const fn new(pattern: Pattern, p0: u64, p1: u64) -> Self {
        Rule { pattern, p0, p1 }
    }

    /// The pattern with every bit the other way round.
    pub(super) const fn inverse(self) -> Self {
        match self.pattern {
            Pattern::Random | Pattern::Canary => Rule { p1: !self.p1, ..self },
            _ => Rule { p0: !self.p0, ..self },
        }
    }

    pub(super) const fn value(self, address: u64, index: u64) -> u64 {
        host::value(self.pattern as u64, address, index, self.p0, self.p1)
    }
}

pub(super) const OWN: Rule = Rule::new(Pattern::OwnAddress, 0, 0);

/// Modulus of the modulo test: a number of words that no burst, row or bank is a multiple of.
pub(super) const MODULUS: u64 = 20;
/// By how many words the second copy of a block move is shifted.
const SHIFT: u64 = 32;

/// One pass over the memory.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Op {
    Fill(Rule),
    Verify(Rule),
    /// Compares with the first and writes the second, word by word.
    Exchange {
        from: Rule,
        to: Rule,
        descending: bool,
    },
    ModuloFill {
        residue: u64,
        value: u64,
        inside: bool,
    },
    ModuloVerify {
        residue: u64,
        value: u64,
    },
    /// First half of each block to the second.
    MoveOut,
    /// Second half back to the first, rotated.
    MoveBack,
    /// Compares what a fill of the first half with a pattern (of the index alone) became by both moves.
    VerifyMoved(Rule),
    Wait(Duration),
}

/// A part of the memory that lies side by side.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Stretch {
    pub address: u64,
    pub words: u64,
    /// Index of the first word.
    pub origin: u64,
}

impl Stretch {
    /// Words of a half, for the block move.
    fn half(&self) -> u64 {
        self.words / 2
    }

    pub(super) fn index(&self, address: u64) -> u64 {
        self.origin + (address - self.address) / 8
    }

    pub(super) fn contains(&self, address: u64) -> bool {
        address >= self.address && address - self.address < 8 * self.words
    }
}

impl Op {
    pub(super) const fn kind(self) -> &'static str {
        match self {
            Op::Fill(_) => "fill",
            Op::Verify(_) | Op::VerifyMoved(_) => "verify",
            Op::Exchange { .. } => "exchange",
            Op::ModuloFill { .. } => "modulo-fill",
            Op::ModuloVerify { .. } => "modulo-verify",
            Op::MoveOut | Op::MoveBack => "move",
            Op::Wait(_) => "wait",
        }
    }

    /// Whether it compares.
    pub(super) const fn checks(self) -> bool {
        matches!(self, Op::Verify(_) | Op::Exchange { .. } | Op::ModuloVerify { .. } | Op::VerifyMoved(_))
    }

    /// Whether the memory is as it was before, so that a wrong word can be read again.
    pub(super) const fn only_reads(self) -> bool {
        matches!(self, Op::Verify(_) | Op::ModuloVerify { .. } | Op::VerifyMoved(_))
    }

    /// Bytes read and written for a stretch. Kernels that touch every 20th word move whole sectors of 32 bytes.
    pub(super) const fn bytes(self, words: u64) -> u64 {
        match self {
            Op::Fill(_) | Op::Verify(_) | Op::VerifyMoved(_) => 8 * words,
            Op::Exchange { .. } => 16 * words,
            Op::ModuloFill { inside: true, .. } | Op::ModuloVerify { .. } => 32 * words.div_ceil(MODULUS),
            Op::ModuloFill { inside: false, .. } => 8 * words,
            Op::MoveOut | Op::MoveBack => 16 * (words / 2),
            Op::Wait(_) => 0,
        }
    }

    pub(super) const fn descending(self) -> bool {
        matches!(self, Op::Exchange { descending: true, .. })
    }

    /// What a comparing pass expects of the word at an address of the stretch.
    pub(super) fn expected(self, stretch: &Stretch, address: u64) -> Option<u64> {
        let index = stretch.index(address);
        match self {
            Op::Verify(rule) | Op::Exchange { from: rule, .. } => Some(rule.value(address, index)),
            Op::ModuloVerify { residue, value } => (index % MODULUS == residue).then_some(value),
            Op::VerifyMoved(rule) => {
                let (half, at) = (stretch.half(), index - stretch.origin);
                let shift = SHIFT.min(half);
                let source = if at >= 2 * half {
                    return None;
                } else if at >= half {
                    at - half
                } else if at >= shift {
                    at - shift
                } else {
                    half - shift + at
                };
                Some(rule.value(0, stretch.origin + source))
            }
            _ => None,
        }
    }

    /// The launches for one stretch.
    pub(super) fn launches(self, stretch: &Stretch, result: u64) -> Vec<(Kernel, u64, Vec<u64>)> {
        let Stretch { address: base, words, origin } = *stretch;
        let verify = |base: u64, words: u64, origin: u64, rule: Rule| {
            (Kernel::Verify, words, vec![base, words, origin, rule.pattern as u64, rule.p0, rule.p1, result])
        };
        let half = stretch.half();
        let shift = SHIFT.min(half);
        match self {
            Op::Fill(rule) => vec![(Kernel::Fill, words, vec![base, words, origin, rule.pattern as u64, rule.p0, rule.p1])],
            Op::Verify(rule) => vec![verify(base, words, origin, rule)],
            Op::Exchange { from, to, descending } => {
                let expect = [from.pattern as u64, from.p0, from.p1, result];
                let write = [to.pattern as u64, to.p0, to.p1, u64::from(descending)];
                vec![(Kernel::VerifyWrite, words, [&[base, words, origin], &expect[..], &write[..]].concat())]
            }
            Op::ModuloFill { residue, value, inside } => {
                vec![(Kernel::ModuloFill, words, vec![base, words, origin, MODULUS, residue, value, u64::from(inside)])]
            }
            Op::ModuloVerify { residue, value } => {
                vec![(Kernel::ModuloVerify, words, vec![base, words, origin, MODULUS, residue, value, result])]
            }
            Op::MoveOut => vec![(Kernel::Copy, half, vec![base + 8 * half, base, half])],
            Op::MoveBack => vec![
                (Kernel::Copy, half - shift, vec![base + 8 * shift, base + 8 * half, half - shift]),
                (Kernel::Copy, shift, vec![base, base + 8 * (2 * half - shift), shift]),
            ],
            Op::VerifyMoved(rule) => vec![
                verify(base, shift, origin + half - shift, rule),
                verify(base + 8 * shift, half - shift, origin, rule),
                verify(base + 8 * half, half, origin, rule),
            ],
            Op::Wait(_) => Vec::new(),
        }
    }
}

/// What one pass of a launch list is, for progress and verdicts.
#[derive(Debug, Clone)]
pub(super) struct Test {
    pub name: &'static str,
    pub title: &'static str,
    pub ops: Vec<Op>,
}

fn exchange(from: Rule, to: Rule, descending: bool) -> Op {
    Op::Exchange { from, to, descending }
}

/// Moving inversions: a pattern, its complement on the way up, the pattern again on the way down, and a last look.
fn inversions(rule: Rule) -> Vec<Op> {
    let inverse = rule.inverse();
    vec![Op::Fill(rule), exchange(rule, inverse, false), exchange(inverse, rule, true), Op::Verify(rule)]
}

/// A pattern and its complement.
fn both(rule: Rule) -> Vec<Op> {
    vec![Op::Fill(rule), exchange(rule, rule.inverse(), false), Op::Verify(rule.inverse())]
}

/// A chain of patterns, each compared when the next is written.
fn chain(rules: impl IntoIterator<Item = Rule>) -> Vec<Op> {
    let mut ops = Vec::new();
    let mut last = None;
    for (step, rule) in rules.into_iter().enumerate() {
        ops.push(match last {
            None => Op::Fill(rule),
            Some(from) => exchange(from, rule, step % 2 == 0),
        });
        last = Some(rule);
    }
    ops.extend(last.map(Op::Verify));
    ops
}

fn test(name: &'static str, title: &'static str, ops: Vec<Op>) -> Test {
    Test { name, title, ops }
}

/// Addresses come first: with aliased memory every other pattern can only say that something is wrong.
pub(super) fn addresses() -> Test {
    test("own-address", "each word holds its own address, then the complement", both(OWN))
}

pub(super) fn random(seed: u64, count: u64) -> Test {
    let ops = (0..count).flat_map(|number| inversions(Rule::new(Pattern::Random, mix(seed ^ number), 0))).collect();
    test("random", "seeded random words and their complements", ops)
}

/// The patterns of a level, in order, without the tests that go by tiles or wait.
pub(super) fn tests(level: Level, seed: u64, fade: Duration) -> Vec<Test> {
    let pick = |quick: u64, standard: u64, thorough: u64| match level {
        Level::Quick => quick,
        Level::Standard => standard,
        Level::Thorough => thorough,
    };
    let spread = |count: u64, of: u64| (0..count).map(move |number| number * of / count.max(1));
    let walk = |invert: u64| spread(pick(2, 8, 64), 64).map(move |shift| Rule::new(Pattern::Walking, invert, shift));
    let constant = |value| Rule::new(Pattern::Constant, value, 0);
    let shifted = |pattern, of: u64, count: u64| spread(count, of).flat_map(move |shift| both(Rule::new(pattern, 1, shift))).collect();
    let mut tests = vec![
        addresses(),
        test("walking-ones", "a one walks through zeros", chain(walk(0))),
        test("walking-zeros", "a zero walks through ones", chain(walk(u64::MAX))),
        test(
            "moving-inversions",
            "zeros to ones upwards and back downwards",
            if level == Level::Quick {
                inversions(constant(0))
            } else {
                [inversions(constant(0)), inversions(constant(0x0F0F_0F0F_0F0F_0F0F))].concat()
            },
        ),
        test("checkerboard", "alternating bits in alternating words", both(Rule::new(Pattern::Checkerboard, 0xAAAA_AAAA_AAAA_AAAA, 0))),
        test("shift-8", "a byte with one bit, shifted from word to word", shifted(Pattern::Shift8, 8, pick(1, 2, 8))),
        test("shift-32", "32 bits with one bit, shifted from half word to half word", shifted(Pattern::Shift32, 32, pick(1, 2, 32))),
        random(seed, pick(1, 2, 4)),
    ];
    let modulo = spread(pick(1, 4, 20), MODULUS)
        .flat_map(|residue| {
            let value = mix(seed ^ residue ^ 0x20);
            let fill = |inside| Op::ModuloFill { residue, value: if inside { value } else { !value }, inside };
            // The neighbours are written twice after the word that is then looked at.
            [Op::Fill(constant(!value)), fill(true), fill(false), fill(false), Op::ModuloVerify { residue, value }]
        })
        .collect();
    tests.push(test("modulo-20", "every 20th word must survive what is written around it", modulo));
    let moved = Rule::new(Pattern::Random, mix(seed ^ 0xB10C), 0);
    tests.push(test(
        "block-move",
        "blocks copied out and back in rotated",
        vec![Op::Fill(moved), Op::MoveOut, Op::MoveBack, Op::VerifyMoved(moved)],
    ));
    if !fade.is_zero() {
        let hold = |rule| [Op::Fill(rule), Op::Wait(fade), Op::Verify(rule)];
        tests.push(test("bit-fade", "zeros and ones, each left alone for a while", [hold(constant(0)), hold(constant(u64::MAX))].concat()));
    }
    tests
}

/// A launch with a grid that fits the device.
pub(super) fn launch(kernel: Kernel, words: u64, arguments: &[u64], multiprocessors: u32) -> Launch {
    const BLOCK: u32 = 256;
    let blocks = words.div_ceil(u64::from(BLOCK) * 4).clamp(1, u64::from(multiprocessors.max(1)) * 32);
    Launch::new(kernel, u32::try_from(blocks).unwrap_or(1), BLOCK, arguments)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::kernels::host::Memory;
    use proptest::prelude::*;

    struct Plain(Vec<u64>);

    impl Memory for Plain {
        fn load(&mut self, address: u64) -> u64 {
            self.0[(address / 8) as usize]
        }
        fn store(&mut self, address: u64, value: u64) {
            self.0[(address / 8) as usize] = value;
        }
    }

    const RESULT: u64 = 0;
    const BASE: u64 = 8 * 1024;

    /// Runs a test on plain memory; before the op `at`, `spoil` is called. Gives the mismatches and whether all that were recorded
    /// are where the op expects what it says.
    fn play(test: &Test, words: u64, origin: u64, at: usize, spoil: impl Fn(&mut Plain)) -> u64 {
        let mut memory = Plain(vec![0x5A5A; 1024 + words as usize]);
        memory.0[..1024].fill(0);
        let stretch = Stretch { address: BASE, words, origin };
        for (number, op) in test.ops.iter().enumerate() {
            if number == at {
                spoil(&mut memory);
            }
            let before = memory.0[0];
            for (kernel, words, arguments) in op.launches(&stretch, RESULT) {
                host::run(&launch(kernel, words, &arguments, 4), &mut memory);
            }
            for record in before..memory.0[0].min(host::RECORDS) {
                let place = (host::RESULT_RECORDS + 3 * record) as usize;
                assert_eq!(op.expected(&stretch, memory.0[place]), Some(memory.0[place + 1]), "{} op {number}", test.name);
            }
        }
        memory.0[0]
    }

    proptest! {
        #![proptest_config(proptest::test_runner::Config { cases: 12, ..Default::default() })]
        /// Sound memory gives no mismatch; one flipped bit before a comparison gives exactly one.
        #[test]
        fn each_test_finds_what_it_should(seed: u64, words in 130u64..400, origin in 0u64..100, word: u64, bit in 0u32..64) {
            for level in [Level::Quick, Level::Thorough] {
                for test in tests(level, seed, Duration::from_secs(1)) {
                    prop_assert_eq!(play(&test, words, origin, usize::MAX, |_| ()), 0, "{}", test.name);
                    let checks: Vec<usize> = (0..test.ops.len()).filter(|at| test.ops[*at].checks()).collect();
                    let at = checks[seed as usize % checks.len()];
                    let stretch = Stretch { address: BASE, words, origin };
                    let place = BASE + 8 * (word % words);
                    let seen = test.ops[at].expected(&stretch, place).is_some();
                    let found = play(&test, words, origin, at, |memory| memory.0[place as usize / 8] ^= 1 << bit);
                    prop_assert_eq!(found, u64::from(seen), "{} at op {}", test.name, at);
                }
            }
        }

        /// A bit that is stuck is found by every test that writes both values to every bit.
        #[test]
        fn the_complement_has_every_bit_the_other_way_round(p0: u64, p1: u64, address: u64, index in 0u64..1 << 40) {
            for pattern in Pattern::ALL {
                let rule = Rule::new(pattern, p0, p1);
                prop_assert_eq!(rule.inverse().value(address & !7, index), !rule.value(address & !7, index), "{:?}", pattern);
            }
        }
    }
}
