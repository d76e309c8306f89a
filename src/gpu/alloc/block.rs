//! Blocks in a slab, and the table from address to block.

/// Names a block of one allocator. Ids are reused after the block is merged away or its segment released.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize)]
#[serde(transparent)]
pub struct BlockId(pub(crate) u32);

/// Names a segment of one allocator: one driver allocation, or one reserved address range (expandable).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize)]
#[serde(transparent)]
pub struct SegmentId(pub(crate) u32);

/// No block, segment or entry.
pub(crate) const NONE: u32 = u32::MAX;

/// What a block is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize)]
pub enum BlockState {
    /// Handed out.
    #[serde(rename = "active_allocated")]
    Allocated,
    /// Freed by its owner, but another stream may still be using it.
    #[serde(rename = "active_pending_free")]
    PendingFree,
    /// In the cache.
    #[serde(rename = "inactive")]
    Free,
    /// Address space without memory (expandable segments only).
    #[serde(rename = "unmapped")]
    Unmapped,
}

/// What a malloc and a free look at fills the first cache line.
#[derive(Debug, Clone)]
#[repr(C, align(64))]
pub(crate) struct Block {
    pub addr: u64,
    pub size: u64,
    /// While free: decides between blocks of the same size, lowest first.
    pub tie: u64,
    /// Stale while free.
    pub requested: u64,
    pub prev: u32,
    pub next: u32,
    /// While free: children in the tree of the bin.
    pub left: u32,
    pub right: u32,
    /// The cache it goes to.
    pub heap: u32,
    pub segment: u32,
    /// Entry in the table of streams that used this block, or [`NONE`].
    pub uses: u32,
    pub state: BlockState,
    pub expandable: bool,
    pub small: bool,
    /// Whether this slab entry is in use.
    pub live: bool,
    pub stream: u64,
    pub tag: u64,
    /// Number of this block object, for [`super::policy::TieBreak::Registration`].
    pub registration: u64,
    /// The pool's search count when the block went into the cache.
    pub gc_mark: u64,
    pub pool: u32,
    /// Events not yet seen done.
    pub events: u32,
}

impl Block {
    /// Whether it shares its segment with other blocks.
    #[inline]
    pub fn is_split(&self) -> bool {
        self.prev != NONE || self.next != NONE
    }
}

/// All blocks of an allocator.
#[derive(Debug)]
pub(crate) struct Slab {
    items: Vec<Block>,
    /// First unused entry; unused entries are chained by `next`.
    spare: u32,
    len: usize,
}

impl Default for Slab {
    fn default() -> Self {
        Slab { items: Vec::new(), spare: NONE, len: 0 }
    }
}

impl Slab {
    #[inline]
    pub fn insert(&mut self, block: Block) -> u32 {
        self.len += 1;
        match self.items.get_mut(self.spare as usize) {
            Some(place) => {
                let id = self.spare;
                self.spare = place.next;
                *place = block;
                id
            }
            None => {
                self.items.push(block);
                (self.items.len() - 1) as u32
            }
        }
    }

    #[inline]
    pub fn remove(&mut self, id: u32) {
        let block = &mut self.items[id as usize];
        debug_assert!(block.live);
        block.live = false;
        block.next = self.spare;
        self.spare = id;
        self.len -= 1;
    }

    /// Live blocks, in slab order.
    pub fn iter(&self) -> impl Iterator<Item = (u32, &Block)> {
        self.items.iter().enumerate().filter(|(_, block)| block.live).map(|(id, block)| (id as u32, block))
    }

    pub fn get(&self, id: u32) -> Option<&Block> {
        self.items.get(id as usize).filter(|block| block.live)
    }

    pub fn len(&self) -> usize {
        self.len
    }
}

impl std::ops::Index<u32> for Slab {
    type Output = Block;
    #[inline]
    fn index(&self, id: u32) -> &Block {
        &self.items[id as usize]
    }
}

impl std::ops::IndexMut<u32> for Slab {
    #[inline]
    fn index_mut(&mut self, id: u32) -> &mut Block {
        &mut self.items[id as usize]
    }
}

/// Address to block: open addressing, linear probing, removal by shifting back. Grows only when the number of
/// entries reaches a new high.
#[derive(Debug)]
pub(crate) struct AddressTable {
    /// (address, block); block [`NONE`] marks an empty slot.
    slots: Vec<(u64, u32)>,
    len: usize,
    shift: u32,
}

impl Default for AddressTable {
    fn default() -> Self {
        AddressTable { slots: vec![(0, NONE); 64], len: 0, shift: 64 - 6 }
    }
}

impl AddressTable {
    #[inline]
    fn home(&self, addr: u64) -> usize {
        // Fibonacci hashing: the top bits.
        (addr.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> self.shift) as usize
    }

    /// The slot of an address and its block.
    #[inline]
    pub fn find(&self, addr: u64) -> Option<(usize, u32)> {
        let mask = self.slots.len() - 1;
        let mut at = self.home(addr) & mask;
        loop {
            let (key, id) = self.slots[at];
            if id == NONE {
                return None;
            }
            if key == addr {
                return Some((at, id));
            }
            at = (at + 1) & mask;
        }
    }

    #[inline]
    pub fn get(&self, addr: u64) -> Option<u32> {
        self.find(addr).map(|(_, id)| id)
    }

    #[inline]
    pub fn insert(&mut self, addr: u64, id: u32) {
        if self.len * 2 >= self.slots.len() {
            self.grow();
        }
        let mask = self.slots.len() - 1;
        let mut at = self.home(addr) & mask;
        while self.slots[at].1 != NONE {
            debug_assert_ne!(self.slots[at].0, addr, "address handed out twice");
            at = (at + 1) & mask;
        }
        self.slots[at] = (addr, id);
        self.len += 1;
    }

    #[cfg(test)]
    pub fn remove(&mut self, addr: u64) -> Option<u32> {
        let (slot, id) = self.find(addr)?;
        self.remove_at(slot);
        Some(id)
    }

    /// Empties a slot that [`find`](Self::find) named.
    #[inline]
    pub fn remove_at(&mut self, slot: usize) {
        let mask = self.slots.len() - 1;
        let (mut hole, mut at) = (slot, slot);
        loop {
            at = (at + 1) & mask;
            let (key, id) = self.slots[at];
            if id == NONE {
                break;
            }
            // An entry may move back to the hole unless its home lies after the hole.
            let home = self.home(key) & mask;
            if (at.wrapping_sub(home) & mask) >= (at.wrapping_sub(hole) & mask) {
                self.slots[hole] = (key, id);
                hole = at;
            }
        }
        self.slots[hole].1 = NONE;
        self.len -= 1;
    }

    fn grow(&mut self) {
        let wider = vec![(0, NONE); self.slots.len() * 2];
        let old = std::mem::replace(&mut self.slots, wider);
        self.shift -= 1;
        self.len = 0;
        for (addr, id) in old {
            if id != NONE {
                self.insert(addr, id);
            }
        }
    }

    pub fn len(&self) -> usize {
        self.len
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    #[test]
    fn the_table_agrees_with_a_hash_map_through_growth_and_removal() {
        let (mut table, mut model) = (AddressTable::default(), HashMap::new());
        let mut state = 1u64;
        for step in 0..200_000u32 {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let addr = 0x7f00_0000_0000 + ((state >> 40) % 3000) * 512;
            if state >> 63 == 0 && !model.contains_key(&addr) {
                table.insert(addr, step);
                model.insert(addr, step);
            } else {
                assert_eq!(table.remove(addr), model.remove(&addr));
            }
            assert_eq!(table.len(), model.len());
        }
        for (addr, id) in &model {
            assert_eq!(table.get(*addr), Some(*id));
        }
    }
}
