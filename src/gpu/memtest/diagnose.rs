//! From wrong words to a cause.
//!
//! A word that was wrong is written with ones and zeros and read back past the cache, again and again: bits that never follow are stuck, bits
//! that follow at times are weak. If they follow, the word is either shared with another address (writing one changes the other) or was wrong once. Contents
//! alone never decide: one flipped bit in a word that holds its address gives another valid address.

use super::blocks::Block;
use super::plan::{OWN, Op, Rule, Stretch};
use super::report::{BitCount, Cause, Finding, Hex, Mismatch};
use super::rig::{Stop, Tally};
use super::session::Session;
use super::{MOST_DIAGNOSES, MOST_MISMATCHES};
use crate::gpu::human;
use crate::gpu::kernels::host::{self, mix};
use crate::gpu::kernels::{Kernels, Pattern};
use crate::gpu::plural;

/// Wrong words that are looked at closely.
const PROBES: usize = 8;
/// Candidates for aliases that are tried.
const CANDIDATES: usize = 16;

/// Greatest common divisor.
fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// At which distance wrong addresses repeat: the greatest common divisor of the distances of at least three, if it is more
/// than chance (two words) or if they lie side by side.
pub(super) fn period(addresses: &[u64]) -> Option<u64> {
    let mut sorted = addresses.to_vec();
    sorted.sort_unstable();
    sorted.dedup();
    if sorted.len() < 3 {
        return None;
    }
    let steps: Vec<u64> = sorted.windows(2).map(|pair| pair[1] - pair[0]).collect();
    let common = steps.iter().copied().fold(0, gcd);
    (common > 16 || steps.iter().all(|step| *step == common)).then_some(common)
}

/// How often ones and zeros are written to a word that was wrong, and how often each of them is read back.
const ROUNDS: u32 = 4;
const LOOKS: u32 = 2;

/// A word that did not follow what was written to it, at least once.
pub(super) struct Probed {
    address: u64,
    /// Bits that read 1 every time.
    ones: u64,
    /// Bits that read 0 every time.
    zeros: u64,
    /// Bits that were ever wrong.
    wrong: u64,
    /// Reads that were wrong, of all.
    bad: u32,
    reads: u32,
}

fn bits_of(mask: u64) -> String {
    (0..64).filter(|bit| mask >> bit & 1 == 1).map(|bit: u32| bit.to_string()).collect::<Vec<_>>().join(", ")
}

impl Probed {
    /// It has bits that never change; else they do at times.
    pub(super) fn stuck(&self) -> bool {
        self.ones | self.zeros != 0
    }

    /// What its bits do: "bit 3 of the word at 0x1000 always reads 1". `whose` comes after the number of the bit.
    pub(super) fn text(&self, whose: &str) -> String {
        if self.stuck() {
            let stuck = [(self.ones, 1), (self.zeros, 0)].into_iter().filter(|(mask, _)| *mask != 0);
            return stuck.map(|(mask, value)| format!("bit {}{whose} always reads {value}", bits_of(mask))).collect::<Vec<_>>().join("; ");
        }
        let bits = bits_of(self.wrong);
        if self.bad == self.reads {
            return format!("bit {bits}{whose} reads the opposite of what is written");
        }
        format!("bit {bits}{whose} is wrong now and then: in {} of {} reads after it was written", self.bad, self.reads)
    }
}

impl<K: Kernels> Session<'_, '_, K> {
    /// Keeps a wrong word as evidence, if there is room.
    pub(super) fn keep(&mut self, step: &'static str, at: Option<(usize, u64)>, address: u64, expected: u64, got: u64, again: Option<u64>) {
        if self.out.mismatches.len() < MOST_MISMATCHES {
            self.out.mismatches.push(Mismatch {
                step,
                address: Hex(address),
                offset: at.map(|(_, offset)| offset),
                block: at.map(|(block, _)| block),
                expected: Hex(expected),
                got: Hex(got),
                xor: Hex(expected ^ got),
                again: again.map(Hex),
            });
        }
        for bit in (0..64).filter(|bit| (expected ^ got) >> bit & 1 == 1) {
            let (set, cleared) = if got >> bit & 1 == 1 { (1, 0) } else { (0, 1) };
            self.count_bit(bit, set, cleared);
        }
    }

    fn count_bit(&mut self, bit: u32, set: u64, cleared: u64) {
        let bits = &mut self.out.bits;
        match bits.binary_search_by_key(&bit, |count| count.bit) {
            Ok(at) => {
                bits[at].set += set;
                bits[at].cleared += cleared;
            }
            Err(at) => bits.insert(at, BitCount { bit, set, cleared }),
        }
    }

    /// Block and offset in the memory under test.
    fn place(&self, address: u64) -> Option<(usize, u64)> {
        let (block, _) = self.locate(address)?;
        let before: u64 = self.blocks[..block.number].iter().map(|block| block.bytes).sum();
        Some((block.number, before + address - block.address))
    }

    /// Whether a tally is what comparing kernels write: otherwise something else wrote into it.
    fn sane(&self, op: Op, tally: &Tally) -> bool {
        let records: Vec<(u64, u64, u64)> = tally.records().collect();
        tally.count() > 0
            && records.len() as u64 == tally.count().min(host::RECORDS)
            && records.iter().all(|(address, expected, got)| expected != got && self.expected(op, *address) == Some(*expected))
            && self.locate(tally.lowest()).is_some()
            && self.locate(tally.highest()).is_some()
            && tally.rest_is_clean()
    }

    /// Finds out why words were wrong. The memory holds something else afterwards.
    pub(super) fn diagnose(&mut self, step: &'static str, op: Op, tally: &Tally) -> Result<(), Stop> {
        if !self.sane(op, tally) {
            return self.diagnose_results(step, tally);
        }
        self.out.mismatch_count += tally.count();
        let records: Vec<(u64, u64, u64)> = tally.records().collect();
        let picks = pick(&records);
        let mut again = Vec::new();
        if op.only_reads() {
            self.evict()?;
            for (address, _, _) in &picks {
                again.push((*address, self.rig.word(*address)?));
            }
        }
        let read_again = |address: u64| again.iter().find(|(at, _)| *at == address).map(|(_, word)| *word);
        for (address, expected, got) in &records {
            let at = self.place(*address);
            if let Some((block, _)) = at {
                self.hits[block] += 1;
            }
            if self.out.mismatches.len() < MOST_MISMATCHES {
                // Counted by bit below, all of them at once.
                let bits = self.out.bits.clone();
                self.keep(step, at, *address, *expected, *got, read_again(*address));
                self.out.bits = bits;
            }
        }
        let counts: Vec<(u64, u64)> = tally.set().iter().copied().zip(tally.cleared().iter().copied()).collect();
        for (bit, (set, cleared)) in counts.into_iter().enumerate().filter(|(_, (set, cleared))| set + cleared > 0) {
            self.count_bit(bit as u32, set, cleared);
        }
        if self.diagnoses >= MOST_DIAGNOSES {
            return Ok(());
        }
        self.diagnoses += 1;

        let addresses: Vec<u64> = picks.iter().map(|record| record.0).collect();
        let probed = self.probe_words(&addresses.iter().map(|address| (*address, 1)).collect::<Vec<_>>(), true)?;
        let period = period(&records.iter().map(|record| record.0).collect::<Vec<_>>());
        self.found_broken(step, &probed, period);
        let loose: Vec<(u64, u64, u64)> =
            picks.iter().copied().filter(|record| probed.iter().all(|probed| probed.address != record.0)).collect();
        if loose.is_empty() {
            return Ok(());
        }
        let pairs = self.search_aliases(op, &loose)?;
        if !pairs.is_empty() {
            self.found_aliases(step, &pairs, tally.count());
            return Ok(());
        }
        let guard = matches!(op, Op::Exchange { from, .. } if from.pattern == Pattern::Canary);
        let (address, expected, got) = loose[0];
        let mut finding = Finding {
            cause: Cause::FlippedBit,
            step,
            text: String::new(),
            addresses: loose.iter().map(|record| Hex(record.0)).collect(),
            period,
            call: None,
            code: None,
        };
        if guard && (expected ^ got).count_ones() >= 16 {
            let block = self.locate(address).map_or(0, |(block, _)| block.number);
            finding.cause = Cause::AllocatorFault;
            finding.text = format!("a guard of block {block} at {address:#x} was overwritten: {got:#018x} instead of {expected:#018x}");
        } else {
            let bits = (expected ^ got).count_ones();
            let how = match read_again(address) {
                Some(word) if word == expected => "; a second read was right, so the read was wrong and not what is stored",
                Some(_) => "; what is stored was wrong, and holds when it is written again",
                None => "; written again, it holds",
            };
            let count = loose.len() as u64;
            finding.text = format!(
                "{} word{} wrong once: {bits} bit{} of the word at {address:#x} (xor {:#018x}){how}",
                count,
                if count == 1 { " was" } else { "s were" },
                plural(u64::from(bits)),
                expected ^ got,
            );
        }
        self.out.findings.push(finding);
        Ok(())
    }

    /// Findings on words that do not follow: the stuck ones, and those that are wrong now and then.
    fn found_broken(&mut self, step: &'static str, probed: &[Probed], period: Option<u64>) {
        for (stuck, cause) in [(true, Cause::StuckBit), (false, Cause::FlippedBit)] {
            let these: Vec<&Probed> = probed.iter().filter(|probed| probed.stuck() == stuck).collect();
            if these.is_empty() {
                continue;
            }
            let mut parts: Vec<String> = Vec::new();
            for probed in these.iter().take(3) {
                parts.push(probed.text(&format!(" of the word at {:#x}", probed.address)));
            }
            if these.len() > 3 {
                parts.push(format!("and {} words more", these.len() - 3));
            }
            self.push(Finding {
                cause,
                step,
                text: parts.join("; "),
                addresses: these.iter().map(|probed| Hex(probed.address)).collect(),
                period,
                call: None,
                code: None,
            });
        }
    }

    /// Adds a finding, unless the same was found before.
    fn push(&mut self, finding: Finding) {
        let known = |earlier: &Finding| earlier.cause == finding.cause && earlier.addresses == finding.addresses;
        if !self.out.findings.iter().any(known) {
            self.out.findings.push(finding);
        }
    }

    fn found_aliases(&mut self, step: &'static str, pairs: &[(u64, u64)], words: u64) {
        let (a, b) = pairs[0];
        let ours = self.rig.driver.same_memory(a, b);
        let mut text = format!(
            "{a:#x} and {b:#x} are the same memory: what is written to one is read from the other ({} apart, about {} of it)",
            human(a.abs_diff(b)),
            human(8 * words)
        );
        if ours {
            text.push_str("; the allocator mapped one piece of memory at both");
        }
        let distances: Vec<u64> = pairs.iter().map(|(a, b)| a.abs_diff(*b)).collect();
        self.push(Finding {
            cause: if ours { Cause::AllocatorFault } else { Cause::AliasedAddresses },
            step,
            text,
            addresses: pairs.iter().flat_map(|(a, b)| [Hex(*a), Hex(*b)]).collect(),
            period: distances.first().copied().filter(|first| distances.iter().all(|distance| distance == first)),
            call: None,
            code: None,
        });
    }

    /// Writes zeros and ones into runs of words (address and number) and reads them back, past the cache where `past_cache` says so, several times. The words
    /// that did not follow each time. They hold ones afterwards.
    pub(super) fn probe_words(&mut self, runs: &[(u64, u64)], past_cache: bool) -> Result<Vec<Probed>, Stop> {
        let mut probed: Vec<Probed> = runs
            .iter()
            .flat_map(|(address, words)| (0..*words).map(move |at| address + 8 * at))
            .map(|address| Probed { address, ones: u64::MAX, zeros: u64::MAX, wrong: 0, bad: 0, reads: 0 })
            .collect();
        for _ in 0..ROUNDS {
            for value in [0, u64::MAX] {
                for (address, words) in runs {
                    self.rig.put(*address, &vec![value; *words as usize])?;
                }
                if past_cache {
                    self.evict()?;
                }
                for _ in 0..LOOKS {
                    let mut seen = Vec::with_capacity(probed.len());
                    for (address, words) in runs {
                        seen.extend(self.rig.words(*address, *words)?);
                    }
                    for (probed, got) in probed.iter_mut().zip(seen) {
                        probed.ones &= got;
                        probed.zeros &= !got;
                        probed.wrong |= got ^ value;
                        probed.bad += u32::from(got != value);
                        probed.reads += 1;
                    }
                }
            }
        }
        probed.retain(|probed| probed.wrong != 0);
        Ok(probed)
    }

    /// The address of another word of the memory under test (or of the test's own) that `word` is, by the own-address pattern.
    fn decode(&self, rule: Rule, address: u64, word: u64) -> Option<u64> {
        let other = word ^ rule.p0;
        (rule.pattern == Pattern::OwnAddress && other != address && other.is_multiple_of(8) && self.locate(other).is_some())
            .then_some(other)
    }

    /// Pairs of addresses that are the same memory, tried by writing.
    fn search_aliases(&mut self, op: Op, loose: &[(u64, u64, u64)]) -> Result<Vec<(u64, u64)>, Stop> {
        if let Op::Verify(rule) | Op::Exchange { from: rule, .. } = op
            && rule.pattern == Pattern::OwnAddress
        {
            let candidates = loose.iter().filter_map(|(address, _, got)| Some((*address, self.decode(rule, *address, *got)?))).collect();
            let pairs = self.confirm(candidates)?;
            if !pairs.is_empty() {
                return Ok(pairs);
            }
        }
        self.search_all()
    }

    /// Fills everything with its own address and follows what is found elsewhere.
    fn search_all(&mut self) -> Result<Vec<(u64, u64)>, Stop> {
        self.replant = true;
        self.rig.reset()?;
        let payloads: Vec<Stretch> =
            self.blocks.iter().flat_map(|block: &Block| [block.payload(), block.guards()[0], block.guards()[1]]).collect();
        let result = self.rig.result();
        for op in [Op::Fill(OWN), Op::Verify(OWN)] {
            self.rig.timed(|rig| {
                for stretch in &payloads {
                    for (kernel, words, arguments) in op.launches(stretch, result) {
                        rig.launch(kernel, words, &arguments)?;
                    }
                }
                Ok(())
            })?;
        }
        let tally = self.rig.tally()?;
        // Where the result words are shared, what looks like a record is none.
        let mut candidates: Vec<(u64, u64)> = tally
            .records()
            .filter(|(address, expected, _)| address == expected && self.locate(*address).is_some())
            .filter_map(|(address, _, got)| Some((address, self.decode(OWN, address, got)?)))
            .collect();
        // Memory that is also the result words shows up there.
        for (at, word) in tally.raw.iter().enumerate() {
            let address = result + 8 * at as u64;
            let shares = word & 0xFFF == address & 0xFFF;
            candidates.extend(self.decode(OWN, address, *word).filter(|_| shares).map(|other| (address, other)));
        }
        self.confirm(candidates)
    }

    /// Those candidates where writing one address changes what the other reads.
    fn confirm(&mut self, mut candidates: Vec<(u64, u64)>) -> Result<Vec<(u64, u64)>, Stop> {
        candidates.truncate(CANDIDATES);
        let mut pairs = Vec::new();
        for (number, (a, b)) in candidates.into_iter().enumerate() {
            let mut shared = false;
            for (from, to) in [(a, b), (b, a)] {
                let word = mix(self.seed ^ mix(number as u64) ^ from);
                self.rig.put(to, &[!word])?;
                self.rig.put(from, &[word])?;
                self.evict()?;
                shared |= self.rig.word(to)? == word;
            }
            if shared {
                pairs.push((a, b));
            }
        }
        Ok(pairs)
    }

    /// Something else than a comparing kernel wrote into the result words.
    fn diagnose_results(&mut self, step: &'static str, tally: &Tally) -> Result<(), Stop> {
        self.out.mismatch_count += tally.count().clamp(1, self.words().max(1));
        let result = self.rig.result();
        let probed = self.probe_words(&[(result, host::RESULT_WORDS)], true)?;
        if !probed.is_empty() && probed.len() < 64 {
            for probed in &probed {
                let (expected, got) = if probed.ones != 0 { (0, probed.ones) } else { (u64::MAX, !probed.wrong) };
                self.keep(step, None, probed.address, expected, got, Some(got));
            }
            self.found_broken(step, &probed, None);
            if !self.rig.next_slot() {
                return Err(Stop::Broken);
            }
            return self.rig.reset();
        }
        let pairs = self.search_all()?;
        if !pairs.is_empty() {
            self.found_aliases(step, &pairs, pairs.len() as u64);
            return Err(Stop::Broken);
        }
        let (at, got) = tally.raw.iter().enumerate().find(|(_, word)| **word != 0).map_or((0, 0), |(at, word)| (at as u64, *word));
        let address = result + 8 * at;
        self.keep(step, None, address, 0, got, None);
        self.push(Finding {
            cause: Cause::FlippedBit,
            step,
            text: format!("the word at {address:#x} (the test's own) held {got:#018x} where nothing was written; written again, it holds"),
            addresses: vec![Hex(address)],
            period: None,
            call: None,
            code: None,
        });
        self.rig.reset()
    }
}

/// The records to look at closely: the first, the last and some between.
fn pick(records: &[(u64, u64, u64)]) -> Vec<(u64, u64, u64)> {
    if records.len() <= PROBES {
        return records.to_vec();
    }
    (0..PROBES).map(|number| records[number * (records.len() - 1) / (PROBES - 1)]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_period_needs_three_and_more_than_chance() {
        assert_eq!(period(&[0x1000, 0x3000]), None);
        assert_eq!(period(&[0x1000, 0x3000, 0x9000]), Some(0x2000));
        assert_eq!(period(&[0x9000, 0x1000, 0x3000, 0x3000, 0x3008]), None);
        assert_eq!(period(&[8, 16, 24, 32]), Some(8), "side by side");
    }
}
