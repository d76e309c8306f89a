//! Free blocks in the order the allocator searches them.
//!
//! One [`FreeSet`] holds the free blocks of one pool and stream, ordered by (size, tie). Sizes are binned
//! monotonically (exact below 32 KiB, 32 bins a power of two above), a bitmap names the bins in use, and every bin is
//! a treap whose links lie in the blocks themselves: the exact best fit is a look at two bitmap words and a walk down
//! one tree, which mostly has one node. A set itself never grows.

use std::collections::BTreeMap;

use super::block::{NONE, Slab};

/// Bins below this index hold one multiple of 512 each.
const EXACT: usize = 64;
/// A power of two, so that a masked index needs no check; the last ones stay empty.
const BINS: usize = 2048;
const WORDS: usize = BINS / 64;

/// Position of a free block in the search order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Key {
    pub size: u64,
    /// Differs between the blocks of one set.
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

/// Priorities decide the shape of a treap; any fixed scrambling of the block's index will do.
#[inline]
fn priority(id: u32) -> u32 {
    let mixed = id.wrapping_mul(0x9E37_79B1);
    (mixed ^ mixed >> 15).wrapping_mul(0x85EB_CA77)
}

#[inline]
fn key(slab: &Slab, id: u32) -> Key {
    let block = &slab[id];
    Key { size: block.size, tie: block.tie, id }
}

/// Whether block `id` comes before (size, tie).
#[inline]
fn is_before(slab: &Slab, id: u32, size: u64, tie: u64) -> bool {
    let block = &slab[id];
    block.size < size || (block.size == size && block.tie < tie)
}

/// The free blocks of one pool and stream. Every method gets the slab that holds them.
#[derive(Debug)]
pub(crate) struct FreeSet {
    summary: u64,
    len: usize,
    words: [u64; WORDS],
    roots: Box<[u32; BINS]>,
}

impl Default for FreeSet {
    fn default() -> Self {
        FreeSet { summary: 0, len: 0, words: [0; WORDS], roots: Box::new([NONE; BINS]) }
    }
}

impl FreeSet {
    #[inline]
    fn root(&self, bin: usize) -> u32 {
        self.roots[bin % BINS]
    }

    /// Adds a block that is in no set; its size and tie must stay as they are until it is taken out.
    #[inline]
    pub fn insert(&mut self, slab: &mut Slab, id: u32) {
        let block = &mut slab[id];
        (block.left, block.right) = (NONE, NONE);
        let bin = bin_of(block.size);
        self.len += 1;
        let root = self.root(bin);
        self.roots[bin % BINS] = if root == NONE {
            self.words[bin / 64 % WORDS] |= 1 << (bin % 64);
            self.summary |= 1 << (bin / 64);
            id
        } else {
            Self::insert_below(slab, root, id)
        };
    }

    /// Inserts block `id` into the tree at `root`; returns the new root.
    fn insert_below(slab: &mut Slab, root: u32, id: u32) -> u32 {
        let (size, tie, urgent) = (slab[id].size, slab[id].tie, priority(id));
        let (mut top, mut parent, mut right, mut at) = (root, NONE, false, root);
        while at != NONE && priority(at) >= urgent {
            parent = at;
            right = is_before(slab, at, size, tie);
            at = if right { slab[at].right } else { slab[at].left };
        }
        match parent {
            NONE => top = id,
            parent if right => slab[parent].right = id,
            parent => slab[parent].left = id,
        }
        // Split what was here: smaller keys to the left of the new node, greater ones to the right.
        let (mut left_end, mut right_end) = (NONE, NONE);
        while at != NONE {
            if is_before(slab, at, size, tie) {
                match left_end {
                    NONE => slab[id].left = at,
                    end => slab[end].right = at,
                }
                left_end = at;
                at = slab[at].right;
            } else {
                match right_end {
                    NONE => slab[id].right = at,
                    end => slab[end].left = at,
                }
                right_end = at;
                at = slab[at].left;
            }
        }
        if left_end != NONE {
            slab[left_end].right = NONE;
        }
        if right_end != NONE {
            slab[right_end].left = NONE;
        }
        top
    }

    /// Takes a block out. Whether it was there.
    #[inline]
    pub fn remove(&mut self, slab: &mut Slab, id: u32) -> bool {
        let (size, tie) = (slab[id].size, slab[id].tie);
        let bin = bin_of(size);
        let (mut parent, mut right, mut at) = (NONE, false, self.root(bin));
        while at != id {
            if at == NONE {
                return false;
            }
            parent = at;
            right = is_before(slab, at, size, tie);
            at = if right { slab[at].right } else { slab[at].left };
        }
        self.unlink(slab, bin, at, parent, right);
        true
    }

    /// Takes a node out of its bin's tree; `right` says on which side of `parent` it hangs.
    #[inline(always)]
    fn unlink(&mut self, slab: &mut Slab, bin: usize, at: u32, parent: u32, right: bool) {
        let (below_left, below_right) = (slab[at].left, slab[at].right);
        self.len -= 1;
        if parent == NONE && below_left == NONE && below_right == NONE {
            // Alone in its bin, as most are.
            self.roots[bin % BINS] = NONE;
            let word = &mut self.words[bin / 64 % WORDS];
            *word &= !(1 << (bin % 64));
            if *word == 0 {
                self.summary &= !(1 << (bin / 64));
            }
        } else {
            let joined = Self::join(slab, below_left, below_right);
            match parent {
                NONE => self.roots[bin % BINS] = joined,
                parent if right => slab[parent].right = joined,
                parent => slab[parent].left = joined,
            }
        }
    }

    /// Takes the best fit for `size` out of the set.
    #[inline]
    pub fn take_best_fit(&mut self, slab: &mut Slab, size: u64) -> Option<u32> {
        let mut bin = bin_of(size);
        let (mut at, mut parent, mut right) = (self.root(bin), NONE, false);
        let mut best = (NONE, NONE, false);
        while at != NONE {
            let block = &slab[at];
            if block.size >= size {
                best = (at, parent, right);
                (parent, right, at) = (at, false, block.left);
            } else {
                (parent, right, at) = (at, true, block.right);
            }
        }
        if best.0 == NONE {
            bin = self.next_bin(bin + 1)?;
            best = (self.root(bin), NONE, false);
            loop {
                let left = slab[best.0].left;
                if left == NONE {
                    break;
                }
                best = (left, best.0, false);
            }
        }
        self.unlink(slab, bin, best.0, best.1, best.2);
        Some(best.0)
    }

    /// Joins two trees, all keys of the first being smaller.
    fn join(slab: &mut Slab, mut left: u32, mut right: u32) -> u32 {
        if left == NONE {
            return right;
        }
        if right == NONE {
            return left;
        }
        let (mut top, mut end, mut end_right) = (NONE, NONE, false);
        loop {
            let take_left = right == NONE || (left != NONE && priority(left) >= priority(right));
            let next = if take_left { left } else { right };
            match end {
                NONE => top = next,
                end if end_right => slab[end].right = next,
                end => slab[end].left = next,
            }
            if left == NONE || right == NONE {
                return top;
            }
            end = next;
            end_right = take_left;
            if take_left {
                left = slab[next].right;
            } else {
                right = slab[next].left;
            }
        }
    }

    #[inline]
    fn next_bin(&self, from: usize) -> Option<usize> {
        let word = from / 64;
        let here = self.words[word % WORDS] & (u64::MAX << (from % 64));
        if here != 0 {
            return Some(word * 64 + here.trailing_zeros() as usize);
        }
        let above = self.summary & (u64::MAX << word << 1);
        if above == 0 {
            return None;
        }
        let word = above.trailing_zeros() as usize;
        Some(word * 64 + self.words[word % WORDS].trailing_zeros() as usize)
    }

    fn prev_bin(&self, before: usize) -> Option<usize> {
        (0..before).rev().find(|bin| self.words[bin / 64] >> (bin % 64) & 1 == 1)
    }

    /// The first key at or after `from`.
    #[inline]
    pub fn at_least(&self, slab: &Slab, from: Key) -> Option<Key> {
        let bin = bin_of(from.size);
        let (mut at, mut best) = (self.root(bin), NONE);
        while at != NONE {
            at = if is_before(slab, at, from.size, from.tie) {
                slab[at].right
            } else {
                best = at;
                slab[at].left
            };
        }
        if best == NONE {
            best = self.root(self.next_bin(bin + 1)?);
            loop {
                match slab[best].left {
                    NONE => break,
                    left => best = left,
                }
            }
        }
        Some(key(slab, best))
    }

    /// The best fit for `size`.
    #[inline]
    pub fn best_fit(&self, slab: &Slab, size: u64) -> Option<Key> {
        self.at_least(slab, Key { size, tie: 0, id: 0 })
    }

    /// The first key with a greater size or tie.
    pub fn after(&self, slab: &Slab, key: Key) -> Option<Key> {
        match key.tie.checked_add(1) {
            Some(tie) => self.at_least(slab, Key { tie, ..key }),
            None => self.at_least(slab, Key { size: key.size.checked_add(1)?, tie: 0, ..key }),
        }
    }

    /// The last key with a smaller size or tie; `key` need not be in the set.
    pub fn before(&self, slab: &Slab, from: Key) -> Option<Key> {
        let bin = bin_of(from.size);
        let below = |root: u32| {
            let (mut at, mut best) = (root, None);
            while at != NONE {
                at = if is_before(slab, at, from.size, from.tie) {
                    best = Some(key(slab, at));
                    slab[at].right
                } else {
                    slab[at].left
                };
            }
            best
        };
        below(self.root(bin)).or_else(|| below(self.root(self.prev_bin(bin)?)))
    }

    /// All keys in search order.
    pub fn for_each(&self, slab: &Slab, mut f: impl FnMut(Key)) {
        let mut next = self.best_fit(slab, 0);
        while let Some(key) = next {
            f(key);
            next = self.after(slab, key);
        }
    }

    pub fn len(&self) -> usize {
        self.len
    }
}

/// Free and unmapped blocks of one stream in one pool.
#[derive(Debug, Default)]
pub(crate) struct Heap {
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
    /// (stream handle, heap), ascending: the order in which caches are walked.
    pub streams: Vec<(u64, u32)>,
    /// Searches so far; counts only while garbage collection is on.
    pub searches: u64,
}

impl Pool {
    pub fn new(small: bool, private: u32) -> Self {
        Pool { small, private, streams: Vec::new(), searches: 0 }
    }

    /// The stream's heap, if it has had any block; else where it would go.
    #[inline]
    pub fn heap(&self, stream: u64) -> Result<u32, usize> {
        match self.streams.first() {
            Some(&(first, heap)) if first == stream => Ok(heap),
            _ => self.streams.binary_search_by_key(&stream, |s| s.0).map(|at| self.streams[at].1),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::alloc::block::{Block, BlockState};
    use std::collections::BTreeSet;

    #[test]
    fn bins_are_monotone_and_within_bounds() {
        let mut last = 0;
        for exponent in 0..64 {
            for part in 0..64u64 {
                let size = (1u64 << exponent).saturating_add(((1u128 << exponent) * u128::from(part) / 64) as u64);
                let bin = bin_of(size);
                assert!(bin >= last && bin < BINS - 1, "{size}");
                last = bin;
            }
        }
        assert!(bin_of(u64::MAX) < BINS - 1);
    }

    fn block(size: u64, tie: u64) -> Block {
        Block {
            addr: 0,
            size,
            tie,
            requested: 0,
            prev: NONE,
            next: NONE,
            left: NONE,
            right: NONE,
            heap: 0,
            segment: 0,
            uses: NONE,
            state: BlockState::Free,
            expandable: false,
            small: false,
            live: true,
            stream: 0,
            tag: 0,
            registration: 0,
            gc_mark: 0,
            pool: 0,
            events: 0,
        }
    }

    #[test]
    fn the_set_agrees_with_a_tree() {
        let (mut slab, mut set, mut model) = (Slab::default(), FreeSet::default(), BTreeSet::new());
        let mut state = 7u64;
        let mut random = move |n: u64| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 33) % n
        };
        let absent = slab.insert(block(512, 77));
        for step in 0..60_000 {
            let size = match random(3) {
                0 => 512 * (1 + random(3)),
                1 => (1 << 20) + 512 * random(64),
                _ => 512 << random(40),
            };
            let tie = random(400) * 512;
            let first = |from: Key, model: &BTreeSet<Key>| model.range(Key { id: 0, ..from }..).next().copied();
            let there = first(Key { size, tie, id: 0 }, &model).filter(|key| (key.size, key.tie) == (size, tie));
            match there {
                None if random(5) < 3 => {
                    let id = slab.insert(block(size, tie));
                    set.insert(&mut slab, id);
                    model.insert(Key { size, tie, id });
                }
                None => assert!(!set.remove(&mut slab, absent), "step {step}"),
                Some(key) => {
                    assert!(set.remove(&mut slab, key.id), "step {step}");
                    slab.remove(key.id);
                    model.remove(&key);
                }
            }
            let probe = Key { size: size + random(3) * 512, tie, id: 0 };
            assert_eq!(set.at_least(&slab, probe), first(probe, &model));
            assert_eq!(set.after(&slab, probe), first(Key { tie: probe.tie + 1, ..probe }, &model));
            assert_eq!(set.before(&slab, probe), model.range(..probe).next_back().copied());
            if random(10) == 0 {
                let best = first(Key { size, tie: 0, id: 0 }, &model);
                assert_eq!(set.take_best_fit(&mut slab, size), best.map(|best| best.id));
                if let Some(best) = best {
                    slab.remove(best.id);
                    model.remove(&best);
                }
            }
            assert_eq!(set.len(), model.len());
        }
        assert!(model.len() > 500);
        let mut all = Vec::new();
        set.for_each(&slab, |key| all.push(key));
        assert!(all.iter().eq(model.iter()));
    }
}
