//! Free blocks in the order the allocator searches them.
//!
//! One [`FreeSet`] holds the free blocks of one pool and stream, ordered by (size, tie). Sizes are binned
//! monotonically (exact below 32 KiB, 32 bins a power of two above), a bitmap names the bins in use, and every bin is
//! sorted: the exact best fit is a look at two bitmap words and one bin.

use std::collections::{BTreeMap, BTreeSet};

use super::block::NONE;

/// Bins below this index hold one multiple of 512 each.
const EXACT: usize = 64;
const BINS: usize = EXACT + 49 * 32;
const WORDS: usize = BINS.div_ceil(64);
/// A bin keeps its smallest keys in an array of at most this length, the rest in a tree.
const ARRAY: usize = 256;

/// Position of a free block in the search order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Key {
    pub size: u64,
    pub tie: u64,
    pub id: u32,
}

#[inline]
fn bin_of(size: u64) -> usize {
    let units = size >> 9;
    if units < EXACT as u64 {
        units as usize
    } else {
        let exponent = units.ilog2() as usize;
        EXACT + (exponent - 6) * 32 + (units >> (exponent - 5) & 31) as usize
    }
}

#[derive(Debug, Default)]
struct Bin {
    /// The smallest keys, in descending order: the first one to take is the last.
    keys: Vec<Key>,
    /// Keys greater than all in `keys`.
    rest: Option<Box<BTreeSet<Key>>>,
}

impl Bin {
    #[inline]
    fn insert(&mut self, key: Key) {
        if let Some(rest) = &mut self.rest
            && self.keys.first().is_none_or(|largest| key > *largest)
        {
            rest.insert(key);
            return;
        }
        let at = if self.keys.len() <= 8 {
            // Short bins are the rule: a scan from the small end beats a binary search.
            let mut at = self.keys.len();
            while at > 0 && self.keys[at - 1] < key {
                at -= 1;
            }
            at
        } else {
            self.keys.partition_point(|other| *other > key)
        };
        self.keys.insert(at, key);
        if self.keys.len() > ARRAY {
            let largest = self.keys.remove(0);
            self.rest.get_or_insert_default().insert(largest);
        }
    }

    #[inline]
    fn remove(&mut self, key: Key) -> bool {
        let at = if self.keys.len() <= 8 {
            self.keys.iter().rposition(|other| *other == key)
        } else {
            let at = self.keys.partition_point(|other| *other > key);
            (self.keys.get(at) == Some(&key)).then_some(at)
        };
        match at {
            Some(at) => {
                self.keys.remove(at);
                if self.keys.is_empty() && self.rest.is_some() {
                    self.refill();
                }
                true
            }
            None => {
                self.rest.as_mut().is_some_and(|rest| rest.remove(&key)) && {
                    if self.rest.as_ref().is_some_and(|rest| rest.is_empty()) {
                        self.rest = None;
                    }
                    true
                }
            }
        }
    }

    #[cold]
    fn refill(&mut self) {
        if let Some(rest) = &mut self.rest {
            for _ in 0..ARRAY / 2 {
                let Some(key) = rest.pop_first() else { break };
                self.keys.push(key);
            }
            self.keys.reverse();
            if rest.is_empty() {
                self.rest = None;
            }
        }
    }

    fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }

    /// The smallest key >= `from`.
    #[inline]
    fn at_least(&self, from: &Key) -> Option<Key> {
        match self.keys.last() {
            Some(smallest) if smallest >= from => return Some(*smallest),
            _ => {}
        }
        let at = self.keys.partition_point(|other| *other >= *from);
        if at > 0 {
            return Some(self.keys[at - 1]);
        }
        self.rest.as_ref().and_then(|rest| rest.range(*from..).next().copied())
    }

    /// The largest key < `before`.
    fn below(&self, before: &Key) -> Option<Key> {
        let tail = self.rest.as_ref().and_then(|rest| rest.range(..*before).next_back().copied());
        tail.or_else(|| {
            let at = self.keys.partition_point(|other| *other >= *before);
            self.keys.get(at).copied()
        })
    }

    fn for_each(&self, mut f: impl FnMut(Key)) {
        self.keys.iter().rev().for_each(|key| f(*key));
        self.rest.iter().flat_map(|rest| rest.iter()).for_each(|key| f(*key));
    }
}

/// The free blocks of one pool and stream.
#[derive(Debug)]
pub(crate) struct FreeSet {
    bins: Vec<Bin>,
    words: [u64; WORDS],
    summary: u64,
    len: usize,
}

impl Default for FreeSet {
    fn default() -> Self {
        let mut bins = Vec::new();
        bins.resize_with(BINS, Bin::default);
        FreeSet { bins, words: [0; WORDS], summary: 0, len: 0 }
    }
}

impl FreeSet {
    #[inline]
    pub fn insert(&mut self, key: Key) {
        let bin = bin_of(key.size);
        self.bins[bin].insert(key);
        self.words[bin / 64] |= 1 << (bin % 64);
        self.summary |= 1 << (bin / 64);
        self.len += 1;
    }

    /// Whether the key was there.
    #[inline]
    pub fn remove(&mut self, key: Key) -> bool {
        let bin = bin_of(key.size);
        let found = self.bins[bin].remove(key);
        if found {
            self.len -= 1;
            if self.bins[bin].is_empty() {
                self.words[bin / 64] &= !(1 << (bin % 64));
                if self.words[bin / 64] == 0 {
                    self.summary &= !(1 << (bin / 64));
                }
            }
        }
        found
    }

    #[inline]
    fn next_bin(&self, from: usize) -> Option<usize> {
        if from >= BINS {
            return None;
        }
        let word = from / 64;
        let here = self.words[word] & (u64::MAX << (from % 64));
        if here != 0 {
            return Some(word * 64 + here.trailing_zeros() as usize);
        }
        let above = if word + 1 >= 64 { 0 } else { self.summary & (u64::MAX << (word + 1)) };
        if above == 0 {
            return None;
        }
        let word = above.trailing_zeros() as usize;
        Some(word * 64 + self.words[word].trailing_zeros() as usize)
    }

    fn prev_bin(&self, before: usize) -> Option<usize> {
        (0..before).rev().find(|bin| self.words[bin / 64] >> (bin % 64) & 1 == 1)
    }

    /// The first key at or after `from`.
    #[inline]
    pub fn at_least(&self, from: Key) -> Option<Key> {
        let bin = bin_of(from.size);
        if self.words[bin / 64] >> (bin % 64) & 1 == 1
            && let Some(key) = self.bins[bin].at_least(&from)
        {
            return Some(key);
        }
        let bin = self.next_bin(bin + 1)?;
        self.bins[bin].keys.last().copied()
    }

    /// The best fit for `size`.
    #[inline]
    pub fn best_fit(&self, size: u64) -> Option<Key> {
        self.at_least(Key { size, tie: 0, id: 0 })
    }

    /// The key after `key`.
    pub fn after(&self, key: Key) -> Option<Key> {
        self.at_least(if key.id == NONE { Key { tie: key.tie + 1, id: 0, ..key } } else { Key { id: key.id + 1, ..key } })
    }

    /// The last key before `key`, which need not be in the set.
    pub fn before(&self, key: Key) -> Option<Key> {
        let bin = bin_of(key.size);
        self.bins[bin].below(&key).or_else(|| {
            let bin = self.prev_bin(bin)?;
            self.bins[bin].below(&Key { size: u64::MAX, tie: u64::MAX, id: NONE })
        })
    }

    /// All keys in search order.
    pub fn for_each(&self, mut f: impl FnMut(Key)) {
        let mut from = 0;
        while let Some(bin) = self.next_bin(from) {
            self.bins[bin].for_each(&mut f);
            from = bin + 1;
        }
    }

    pub fn len(&self) -> usize {
        self.len
    }
}

/// Free and unmapped blocks of one stream in one pool.
#[derive(Debug)]
pub(crate) struct StreamBlocks {
    pub stream: u64,
    pub free: FreeSet,
    /// Unmapped blocks by address.
    pub unmapped: BTreeMap<u64, u32>,
}

/// One pool: small or large, default or private.
#[derive(Debug)]
pub(crate) struct Pool {
    pub small: bool,
    /// Index of the private pool that owns it, or [`NONE`].
    pub private: u32,
    /// By ascending stream handle: the order in which caches are walked.
    pub streams: Vec<StreamBlocks>,
    /// Searches so far; counts only while garbage collection is on.
    pub searches: u64,
}

impl Pool {
    pub fn new(small: bool, private: u32) -> Self {
        Pool { small, private, streams: Vec::new(), searches: 0 }
    }

    #[inline]
    pub fn stream(&self, stream: u64) -> Option<&StreamBlocks> {
        match self.streams.first() {
            Some(first) if first.stream == stream => Some(first),
            _ => self.streams.binary_search_by_key(&stream, |s| s.stream).ok().map(|at| &self.streams[at]),
        }
    }

    #[inline]
    pub fn stream_mut(&mut self, stream: u64) -> &mut StreamBlocks {
        let at = match self.streams.first() {
            Some(first) if first.stream == stream => 0,
            _ => match self.streams.binary_search_by_key(&stream, |s| s.stream) {
                Ok(at) => at,
                Err(at) => {
                    self.streams.insert(at, StreamBlocks { stream, free: FreeSet::default(), unmapped: BTreeMap::new() });
                    at
                }
            },
        };
        &mut self.streams[at]
    }

    /// Free blocks in search order: by stream, then size, then tie.
    pub fn for_each_free(&self, mut f: impl FnMut(Key)) {
        for stream in &self.streams {
            stream.free.for_each(&mut f);
        }
    }

    pub fn free_len(&self) -> usize {
        self.streams.iter().map(|s| s.free.len()).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bins_are_monotone_and_within_bounds() {
        let mut last = 0;
        for exponent in 0..64 {
            for part in 0..64u64 {
                let size = (1u64 << exponent).saturating_add(((1u128 << exponent) * u128::from(part) / 64) as u64);
                let bin = bin_of(size);
                assert!(bin >= last && bin < BINS, "{size}");
                last = bin;
            }
        }
        assert!(bin_of(u64::MAX) < BINS);
    }

    #[test]
    fn the_set_agrees_with_a_tree_also_in_crowded_bins() {
        let (mut set, mut model) = (FreeSet::default(), BTreeSet::new());
        let mut state = 7u64;
        let mut random = move |n: u64| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 33) % n
        };
        for step in 0..60_000 {
            let size = match random(3) {
                0 => 512 * (1 + random(3)),
                1 => (1 << 20) + 512 * random(64),
                _ => 512 << random(40),
            };
            let key = Key { size, tie: random(400) * 512, id: random(2) as u32 };
            if random(5) < 3 {
                if model.insert(key) {
                    set.insert(key);
                }
            } else {
                assert_eq!(set.remove(key), model.remove(&key), "step {step}");
            }
            let probe = Key { size: size + random(3) * 512, ..key };
            assert_eq!(set.at_least(probe), model.range(probe..).next().copied());
            assert_eq!(set.after(probe), model.range((std::ops::Bound::Excluded(probe), std::ops::Bound::Unbounded)).next().copied());
            assert_eq!(set.before(probe), model.range(..probe).next_back().copied());
            assert_eq!(set.len(), model.len());
        }
        let mut all = Vec::new();
        set.for_each(|key| all.push(key));
        assert!(all.iter().eq(model.iter()));
        assert!(set.bins[1].rest.is_some(), "the test must reach crowded bins");
    }
}
