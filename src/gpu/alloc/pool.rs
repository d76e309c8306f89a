//! Free blocks in the order the allocator searches them.
//!
//! One [`FreeSet`] holds the free blocks of one pool and stream, ordered by (size, tie). Sizes are binned
//! monotonically (exact below 32 KiB, 32 bins a power of two above), a bitmap names the bins in use, and every bin is
//! a treap whose nodes lie in one array: the exact best fit is a look at two bitmap words and a walk down one tree,
//! which mostly has one node. The heap is used only when more blocks are free at once than ever before.

use std::collections::BTreeMap;

use super::block::NONE;

/// Bins below this index hold one multiple of 512 each.
const EXACT: usize = 64;
const BINS: usize = EXACT + 49 * 32;
const WORDS: usize = BINS.div_ceil(64);

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

#[derive(Debug, Clone, Copy)]
struct Node {
    key: Key,
    left: u32,
    right: u32,
    priority: u32,
}

/// Priorities decide the shape of a treap; any fixed scrambling of the key will do.
#[inline]
fn priority(key: Key) -> u32 {
    ((key.tie ^ key.size << 20).wrapping_add(u64::from(key.id)).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32) as u32
}

/// The free blocks of one pool and stream.
#[derive(Debug)]
pub(crate) struct FreeSet {
    roots: Vec<u32>,
    nodes: Vec<Node>,
    /// First unused node; unused nodes are chained by `left`.
    spare: u32,
    words: [u64; WORDS],
    summary: u64,
    len: usize,
}

impl Default for FreeSet {
    fn default() -> Self {
        FreeSet { roots: vec![NONE; BINS], nodes: Vec::new(), spare: NONE, words: [0; WORDS], summary: 0, len: 0 }
    }
}

impl FreeSet {
    /// `key` must not be in the set.
    #[inline]
    pub fn insert(&mut self, key: Key) {
        let bin = bin_of(key.size);
        let node = Node { key, left: NONE, right: NONE, priority: priority(key) };
        let id = if self.spare == NONE {
            self.nodes.push(node);
            (self.nodes.len() - 1) as u32
        } else {
            let id = self.spare;
            self.spare = self.nodes[id as usize].left;
            self.nodes[id as usize] = node;
            id
        };
        self.len += 1;
        let root = self.roots[bin];
        if root == NONE {
            self.roots[bin] = id;
            self.words[bin / 64] |= 1 << (bin % 64);
            self.summary |= 1 << (bin / 64);
        } else {
            self.roots[bin] = self.insert_below(root, id);
        }
    }

    /// Inserts node `id` into the tree at `root`; returns the new root.
    fn insert_below(&mut self, root: u32, id: u32) -> u32 {
        let new = self.nodes[id as usize];
        let (mut top, mut parent, mut right, mut at) = (root, NONE, false, root);
        while at != NONE && self.nodes[at as usize].priority >= new.priority {
            parent = at;
            right = self.nodes[at as usize].key < new.key;
            at = if right { self.nodes[at as usize].right } else { self.nodes[at as usize].left };
        }
        match parent {
            NONE => top = id,
            parent if right => self.nodes[parent as usize].right = id,
            parent => self.nodes[parent as usize].left = id,
        }
        // Split what was here: smaller keys to the left of the new node, greater ones to the right.
        let (mut left_end, mut right_end) = (NONE, NONE);
        while at != NONE {
            let node = self.nodes[at as usize];
            if node.key < new.key {
                match left_end {
                    NONE => self.nodes[id as usize].left = at,
                    end => self.nodes[end as usize].right = at,
                }
                left_end = at;
                at = node.right;
            } else {
                match right_end {
                    NONE => self.nodes[id as usize].right = at,
                    end => self.nodes[end as usize].left = at,
                }
                right_end = at;
                at = node.left;
            }
        }
        if left_end != NONE {
            self.nodes[left_end as usize].right = NONE;
        }
        if right_end != NONE {
            self.nodes[right_end as usize].left = NONE;
        }
        top
    }

    /// Whether the key was there.
    #[inline]
    pub fn remove(&mut self, key: Key) -> bool {
        let bin = bin_of(key.size);
        let (mut parent, mut right, mut at) = (NONE, false, self.roots[bin]);
        loop {
            if at == NONE {
                return false;
            }
            let node = &self.nodes[at as usize];
            if node.key == key {
                break;
            }
            parent = at;
            right = node.key < key;
            at = if right { node.right } else { node.left };
        }
        self.unlink(bin, at, parent, right);
        true
    }

    /// Takes a node out of its bin's tree; `right` says on which side of `parent` it hangs.
    #[inline]
    fn unlink(&mut self, bin: usize, at: u32, parent: u32, right: bool) {
        let node = self.nodes[at as usize];
        let joined = if node.left == NONE {
            node.right
        } else if node.right == NONE {
            node.left
        } else {
            self.join(node.left, node.right)
        };
        match parent {
            NONE => {
                self.roots[bin] = joined;
                if joined == NONE {
                    self.words[bin / 64] &= !(1 << (bin % 64));
                    if self.words[bin / 64] == 0 {
                        self.summary &= !(1 << (bin / 64));
                    }
                }
            }
            parent if right => self.nodes[parent as usize].right = joined,
            parent => self.nodes[parent as usize].left = joined,
        }
        self.nodes[at as usize].left = self.spare;
        self.spare = at;
        self.len -= 1;
    }

    /// Takes the best fit for `size` out of the set.
    #[inline]
    pub fn take_best_fit(&mut self, size: u64) -> Option<Key> {
        let mut bin = bin_of(size);
        let (mut at, mut parent, mut right) = (self.roots[bin], NONE, false);
        let mut best = (NONE, NONE, false);
        while at != NONE {
            let node = &self.nodes[at as usize];
            if node.key.size >= size {
                best = (at, parent, right);
                (parent, right, at) = (at, false, node.left);
            } else {
                (parent, right, at) = (at, true, node.right);
            }
        }
        if best.0 == NONE {
            bin = self.next_bin(bin + 1)?;
            best.0 = self.roots[bin];
            loop {
                let left = self.nodes[best.0 as usize].left;
                if left == NONE {
                    break;
                }
                best = (left, best.0, false);
            }
        }
        let key = self.nodes[best.0 as usize].key;
        self.unlink(bin, best.0, best.1, best.2);
        Some(key)
    }

    /// Joins two trees, all keys of the first being smaller.
    fn join(&mut self, mut left: u32, mut right: u32) -> u32 {
        let (mut top, mut end, mut end_right) = (NONE, NONE, false);
        loop {
            let next = if left == NONE {
                right
            } else if right == NONE || self.nodes[left as usize].priority >= self.nodes[right as usize].priority {
                left
            } else {
                right
            };
            match end {
                NONE => top = next,
                end if end_right => self.nodes[end as usize].right = next,
                end => self.nodes[end as usize].left = next,
            }
            if left == NONE || right == NONE {
                return top;
            }
            end = next;
            if next == left {
                left = self.nodes[next as usize].right;
                end_right = true;
            } else {
                right = self.nodes[next as usize].left;
                end_right = false;
            }
        }
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
        let above = self.summary & (u64::MAX << word << 1);
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
        let (mut at, mut best) = (self.roots[bin], None);
        while at != NONE {
            let node = &self.nodes[at as usize];
            at = if node.key >= from {
                best = Some(node.key);
                node.left
            } else {
                node.right
            };
        }
        if best.is_some() {
            return best;
        }
        let mut at = self.roots[self.next_bin(bin + 1)?];
        loop {
            let node = &self.nodes[at as usize];
            if node.left == NONE {
                return Some(node.key);
            }
            at = node.left;
        }
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
        let below = |root: u32| {
            let (mut at, mut best) = (root, None);
            while at != NONE {
                let node = &self.nodes[at as usize];
                at = if node.key < key {
                    best = Some(node.key);
                    node.right
                } else {
                    node.left
                };
            }
            best
        };
        below(self.roots[bin]).or_else(|| below(self.roots[self.prev_bin(bin)?]))
    }

    /// All keys in search order.
    pub fn for_each(&self, mut f: impl FnMut(Key)) {
        let mut next = self.best_fit(0);
        while let Some(key) = next {
            f(key);
            next = self.after(key);
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

    /// The stream's blocks, if it has had any.
    #[inline]
    pub fn known_stream_mut(&mut self, stream: u64) -> Option<&mut StreamBlocks> {
        match self.streams.first() {
            Some(first) if first.stream == stream => self.streams.first_mut(),
            _ => self.streams.binary_search_by_key(&stream, |s| s.stream).ok().map(|at| &mut self.streams[at]),
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
    use std::collections::BTreeSet;

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
    fn the_set_agrees_with_a_tree() {
        let (mut set, mut model, mut peak) = (FreeSet::default(), BTreeSet::new(), 0);
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
            if random(10) == 0 {
                let best = model.range(Key { size, tie: 0, id: 0 }..).next().copied();
                assert_eq!(set.take_best_fit(size), best);
                best.map(|best| model.remove(&best));
            }
            assert_eq!(set.len(), model.len());
            peak = peak.max(set.len());
        }
        let mut all = Vec::new();
        set.for_each(|key| all.push(key));
        assert!(all.iter().eq(model.iter()));
        assert_eq!(set.nodes.len(), peak, "nodes are used again");
    }
}
