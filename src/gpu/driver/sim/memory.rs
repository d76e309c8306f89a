//! Contents of the simulated card's memory. What a kernel filled is kept as the rule it was filled by, until someone writes a
//! part of it: a card of many GiB can be filled and compared without holding its bytes.

use std::collections::HashMap;

use crate::gpu::kernels::host::{self, Pattern};

/// Bytes that are held or ruled together.
pub(super) const CHUNK: u64 = 16 << 10;
/// What memory holds before it is written.
pub(super) const POISON: u8 = 0xCD;

/// Words that follow a pattern: the word `i` after the start is `host::value(pattern, address + 8 i, index + i, p0, p1)`.
/// Two rules that give the same words by a shift of address, index or parameters are equal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Rule {
    pattern: u64,
    address: u64,
    index: u64,
    p0: u64,
    p1: u64,
}

/// Not a pattern of the kernels: `p0` where the index (kept modulo the modulus) has the residue, else `p1`. `address` holds the
/// modulus (upper half) and the residue.
const MODULO: u64 = u64::MAX;

impl Rule {
    /// `inside` at the indices with `index % modulus == residue`, `outside` at the others. Both numbers below 2^32.
    fn modulo(index: u64, modulus: u64, residue: u64, inside: u64, outside: u64) -> Self {
        if inside == outside {
            return Rule::new(Pattern::Constant as u64, 0, 0, inside, 0);
        }
        Rule { pattern: MODULO, address: modulus << 32 | residue, index: index % modulus, p0: inside, p1: outside }
    }

    /// The words inside and outside the residue, where they are two constants. `index` is that of the first word.
    fn split(&self, index: u64, modulus: u64, residue: u64) -> Option<(u64, u64)> {
        match self.pattern {
            MODULO if self.address == (modulus << 32 | residue) && self.index == index % modulus => Some((self.p0, self.p1)),
            1 => Some((self.p0, self.p0)),
            _ => None,
        }
    }

    /// This rule with `value` written inside or outside the residue, where that is a rule again.
    pub(super) fn with_residue(&self, index: u64, modulus: u64, residue: u64, value: u64, inside: bool) -> Option<Self> {
        let (within, without) = self.split(index, modulus, residue)?;
        let (within, without) = if inside { (value, without) } else { (within, value) };
        Some(Rule::modulo(index, modulus, residue, within, without))
    }

    /// Whether all words of the residue are known to be `value`.
    pub(super) fn holds_residue(&self, index: u64, modulus: u64, residue: u64, value: u64) -> bool {
        self.split(index, modulus, residue).is_some_and(|(inside, _)| inside == value)
    }

    pub(super) fn new(pattern: u64, address: u64, index: u64, p0: u64, p1: u64) -> Self {
        let plain = Rule { pattern, address: 0, index: 0, p0, p1: 0 };
        match Pattern::ALL.get(pattern as usize) {
            Some(Pattern::OwnAddress) => Rule { address: address.wrapping_add(p1), ..plain },
            Some(Pattern::Constant) => plain,
            Some(Pattern::Checkerboard) => Rule { index: index & 1, ..plain },
            Some(Pattern::Walking) => Rule { index: index.wrapping_add(p1) & 63, ..plain },
            Some(Pattern::Shift8) => Rule { index: index.wrapping_add(p1) & 7, ..plain },
            Some(Pattern::Random | Pattern::Canary) => Rule { index, p1, ..plain },
            Some(Pattern::Shift32) | None => Rule { pattern, address, index, p0, p1 },
        }
    }

    fn constant(byte: u8) -> Self {
        Rule::new(Pattern::Constant as u64, 0, 0, u64::from_le_bytes([byte; 8]), 0)
    }

    /// The rule of what follows `bytes` (a multiple of 8) later.
    pub(super) fn after(self, bytes: u64) -> Self {
        if self.pattern == MODULO {
            return Rule { index: self.index.wrapping_add(bytes / 8) % (self.address >> 32), ..self };
        }
        Rule::new(self.pattern, self.address.wrapping_add(bytes), self.index.wrapping_add(bytes / 8), self.p0, self.p1)
    }

    pub(super) fn word(&self, number: u64) -> u64 {
        if self.pattern == MODULO {
            let at = self.index.wrapping_add(number) % (self.address >> 32);
            return if at == self.address & 0xFFFF_FFFF { self.p0 } else { self.p1 };
        }
        host::value(self.pattern, self.address.wrapping_add(8 * number), self.index.wrapping_add(number), self.p0, self.p1)
    }

    /// Writes the bytes from `offset` on.
    fn render(&self, offset: u64, out: &mut [u8]) {
        let (mut at, mut done) = (offset, 0);
        while done < out.len() {
            let word = self.word(at / 8).to_le_bytes();
            let piece = &word[(at % 8) as usize..];
            let len = piece.len().min(out.len() - done);
            out[done..done + len].copy_from_slice(&piece[..len]);
            done += len;
            at += len as u64;
        }
    }
}

#[derive(Debug, Clone)]
enum Chunk {
    Rule(Rule),
    Bytes(Box<[u8]>),
}

impl Chunk {
    fn bytes(&mut self) -> &mut [u8] {
        if let Chunk::Rule(rule) = self {
            let mut bytes = vec![0; CHUNK as usize].into_boxed_slice();
            rule.render(0, &mut bytes);
            *self = Chunk::Bytes(bytes);
        }
        match self {
            Chunk::Bytes(bytes) => bytes,
            // Made above.
            Chunk::Rule(_) => &mut [],
        }
    }
}

#[derive(Debug)]
enum Granule {
    /// Stretches that each follow a rule, by where they begin; the first begins at 0.
    Runs(Vec<(u64, Rule)>),
    Chunks(Vec<Chunk>),
}

/// More stretches than that are held in chunks.
const MOST_RUNS: usize = 12;

/// Puts a rule over `from .. to` of stretches that end at `unit`.
fn lay(runs: &[(u64, Rule)], unit: u64, from: u64, to: u64, rule: Rule) -> Vec<(u64, Rule)> {
    let mut laid: Vec<(u64, Rule)> = Vec::with_capacity(runs.len() + 2);
    let mut push = |start: u64, rule: Rule| {
        // Stretches that go on by the same rule are one.
        if laid.last().is_none_or(|(before, held)| held.after(start - before) != rule) {
            laid.push((start, rule));
        }
    };
    for (start, held) in runs.iter().take_while(|(start, _)| *start < from) {
        push(*start, *held);
    }
    push(from, rule);
    for (number, (start, held)) in runs.iter().enumerate() {
        let end = runs.get(number + 1).map_or(unit, |next| next.0);
        if end > to {
            let at = to.max(*start);
            push(at, held.after(at - start));
        }
    }
    laid
}

/// The stretch that an offset lies in: where it begins and ends, and its rule.
fn run_at(runs: &[(u64, Rule)], unit: u64, offset: u64) -> (u64, u64, Rule) {
    let number = runs.partition_point(|(start, _)| *start <= offset).saturating_sub(1);
    let end = runs.get(number + 1).map_or(unit, |next| next.0);
    runs.get(number).map_or((0, unit, Rule::constant(POISON)), |(start, rule)| (*start, end, *rule))
}

/// Physical memory. Ranges given to its methods lie in one granule.
#[derive(Debug)]
pub(super) struct Memory {
    unit: u64,
    granules: HashMap<u32, Granule>,
}

impl Memory {
    pub(super) fn new(unit: u64) -> Self {
        Memory { unit, granules: HashMap::new() }
    }

    pub(super) fn forget(&mut self, granule: u32) {
        self.granules.remove(&granule);
    }

    /// Host bytes behind it.
    pub(super) fn held(&self) -> u64 {
        let chunks = |granule: &Granule| match granule {
            Granule::Runs(_) => 0,
            Granule::Chunks(chunks) => chunks.iter().filter(|chunk| matches!(chunk, Chunk::Bytes(_))).count(),
        };
        self.granules.values().map(chunks).sum::<usize>() as u64 * CHUNK
    }

    fn chunk(&mut self, physical: u64) -> &mut Chunk {
        let unit = self.unit;
        let granule = self.granules.entry((physical / unit) as u32).or_insert_with(|| Granule::Runs(vec![(0, Rule::constant(POISON))]));
        if let Granule::Runs(runs) = granule {
            let chunk = |number: u64| {
                let (from, to) = (number * CHUNK, (number + 1) * CHUNK);
                let (start, end, rule) = run_at(runs, unit, from);
                if end >= to {
                    return Chunk::Rule(rule.after(from - start));
                }
                let mut bytes = vec![0; CHUNK as usize].into_boxed_slice();
                let mut at = from;
                while at < to {
                    let (start, end, rule) = run_at(runs, unit, at);
                    rule.render(at - start, &mut bytes[(at - from) as usize..(end.min(to) - from) as usize]);
                    at = end;
                }
                Chunk::Bytes(bytes)
            };
            *granule = Granule::Chunks((0..unit / CHUNK).map(chunk).collect());
        }
        match granule {
            Granule::Chunks(chunks) => &mut chunks[(physical % unit / CHUNK) as usize],
            Granule::Runs(_) => unreachable!("it was just cut into chunks"),
        }
    }

    /// Cuts a range where chunks end: physical address, offset and length.
    fn cut(physical: u64, len: u64) -> impl Iterator<Item = (u64, usize, usize)> {
        let mut at = 0;
        std::iter::from_fn(move || {
            let start = physical + at;
            let piece = (CHUNK - start % CHUNK).min(len - at);
            let item = (start, at as usize, piece as usize);
            at += piece;
            (piece > 0).then_some(item)
        })
    }

    pub(super) fn byte(&mut self, physical: u64) -> &mut u8 {
        &mut self.chunk(physical).bytes()[(physical % CHUNK) as usize]
    }

    pub(super) fn write(&mut self, physical: u64, data: &[u8]) {
        for (start, from, len) in Self::cut(physical, data.len() as u64) {
            let within = (start % CHUNK) as usize;
            self.chunk(start).bytes()[within..within + len].copy_from_slice(&data[from..from + len]);
        }
    }

    pub(super) fn read(&self, physical: u64, out: &mut [u8]) {
        let within = physical % self.unit;
        match self.granules.get(&((physical / self.unit) as u32)) {
            None => out.fill(POISON),
            Some(Granule::Runs(runs)) => {
                let (mut at, to) = (within, within + out.len() as u64);
                while at < to {
                    let (start, end, rule) = run_at(runs, self.unit, at);
                    rule.render(at - start, &mut out[(at - within) as usize..(end.min(to) - within) as usize]);
                    at = end;
                }
            }
            Some(Granule::Chunks(chunks)) => {
                for (start, from, len) in Self::cut(physical, out.len() as u64) {
                    let offset = (start % CHUNK) as usize;
                    let out = &mut out[from..from + len];
                    match &chunks[(start % self.unit / CHUNK) as usize] {
                        Chunk::Rule(rule) => rule.render(offset as u64, out),
                        Chunk::Bytes(bytes) => out.copy_from_slice(&bytes[offset..offset + len]),
                    }
                }
            }
        }
    }

    /// Makes whole words (`physical` and `bytes` are multiples of 8) follow a rule.
    pub(super) fn fill(&mut self, physical: u64, bytes: u64, rule: Rule) {
        if bytes == 0 {
            return;
        }
        let (unit, within) = (self.unit, physical % self.unit);
        if bytes == unit {
            self.granules.insert((physical / unit) as u32, Granule::Runs(vec![(0, rule)]));
            return;
        }
        let granule = self.granules.entry((physical / unit) as u32).or_insert_with(|| Granule::Runs(vec![(0, Rule::constant(POISON))]));
        if let Granule::Runs(runs) = granule {
            let laid = lay(runs, unit, within, within + bytes, rule);
            if laid.len() <= MOST_RUNS {
                *runs = laid;
                return;
            }
        }
        for (start, from, len) in Self::cut(physical, bytes) {
            let rule = rule.after(from as u64);
            let chunk = self.chunk(start);
            if len as u64 == CHUNK {
                *chunk = Chunk::Rule(rule);
            } else {
                let within = (start % CHUNK) as usize;
                rule.render(0, &mut chunk.bytes()[within..within + len]);
            }
        }
    }

    /// How many bytes from `physical` on are known to follow one rule, up to `most`, and that rule.
    pub(super) fn run(&self, physical: u64, most: u64) -> Option<(u64, Rule)> {
        let within = physical % self.unit;
        match self.granules.get(&((physical / self.unit) as u32)) {
            None => Some((most.min(self.unit - within), Rule::constant(POISON))),
            Some(Granule::Runs(runs)) => {
                let (start, end, rule) = run_at(runs, self.unit, within);
                // A rule counts whole words.
                (within.is_multiple_of(8)).then(|| ((end - within).min(most), rule.after(within - start)))
            }
            Some(Granule::Chunks(chunks)) => match &chunks[(within / CHUNK) as usize] {
                Chunk::Rule(rule) if within.is_multiple_of(8) => Some(((CHUNK - physical % CHUNK).min(most), rule.after(physical % CHUNK))),
                _ => None,
            },
        }
    }

    /// The one rule of a range, where it is known to have one.
    pub(super) fn rule(&self, physical: u64, bytes: u64) -> Option<Rule> {
        self.run(physical, bytes).filter(|(len, _)| *len == bytes).map(|(_, rule)| rule)
    }

    /// Whether the words are known to follow a rule. When not, they have to be looked at.
    pub(super) fn follows(&self, physical: u64, bytes: u64, rule: Rule) -> bool {
        let mut at = 0;
        while at < bytes {
            match self.run(physical + at, bytes - at) {
                Some((len, held)) if held == rule.after(at) => at += len,
                _ => return false,
            }
        }
        true
    }

    /// Copies as far as the source follows one rule, from whole words to whole words. Answers the bytes copied; 0 where bytes
    /// have to be.
    pub(super) fn copy(&mut self, to: u64, from: u64, bytes: u64) -> u64 {
        if !(to.is_multiple_of(8) && bytes.is_multiple_of(8)) {
            return 0;
        }
        match self.run(from, bytes) {
            Some((len, rule)) if len.is_multiple_of(8) => {
                self.fill(to, len, rule);
                len
            }
            _ => 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const UNIT: u64 = 64 << 10;

    proptest! {
        /// Rules, bytes and copies in any mixture give what plain bytes give.
        #[test]
        fn a_memory_of_rules_holds_the_bytes(steps in proptest::collection::vec((0u8..4, 0u64..8, 0..2 * UNIT / 8, 1..UNIT / 8, any::<u64>()), 1..25)) {
            let mut memory = Memory::new(UNIT);
            let mut plain = vec![POISON; 2 * UNIT as usize];
            for (kind, pattern, start, words, seed) in steps {
                let whole = seed % 3 == 0;
                let start = if whole { start * 8 / UNIT * UNIT } else { start * 8 };
                let bytes = if whole { UNIT } else { (8 * words).min(UNIT - start % UNIT) };
                let range = start as usize..(start + bytes) as usize;
                let rule = Rule::new(pattern, 0x1000 + start, seed % 1000, seed, seed >> 60);
                match kind {
                    0 | 1 => {
                        memory.fill(start, bytes, rule);
                        rule.render(0, &mut plain[range.clone()]);
                        prop_assert!(bytes % CHUNK != 0 || start % CHUNK != 0 || memory.follows(start, bytes, rule));
                    }
                    2 => {
                        let data: Vec<u8> = (0..bytes).map(|at| (at ^ seed) as u8).collect();
                        memory.write(start, &data);
                        plain[range.clone()].copy_from_slice(&data);
                    }
                    _ => {
                        let from = ((start + UNIT) % (2 * UNIT)) as usize;
                        let copied = memory.copy(start, from as u64, bytes) as usize;
                        plain.copy_within(from..from + copied, start as usize);
                    }
                }
                let mut seen = vec![0; bytes as usize];
                memory.read(start, &mut seen);
                prop_assert_eq!(&seen[..], &plain[range]);
                if memory.follows(start, bytes, rule) {
                    rule.render(0, &mut seen);
                    prop_assert_eq!(&seen[..], &plain[start as usize..(start + bytes) as usize]);
                }
            }
        }
    }
}
