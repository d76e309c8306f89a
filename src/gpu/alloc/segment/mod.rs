//! Segments: what the driver gave, whole or page by page.

pub(crate) mod expandable;

use super::block::NONE;
use expandable::Expandable;

/// One driver allocation or one reserved address range.
#[derive(Debug)]
pub(crate) struct Segment {
    pub addr: u64,
    /// Bytes of the driver allocation, or of the address range.
    pub size: u64,
    pub stream: u64,
    pub pool: u32,
    /// First block.
    pub head: u32,
    /// Tag of the request that made the driver be asked.
    pub tag: u64,
    pub expandable: Option<Box<Expandable>>,
    pub live: bool,
}

/// All segments of an allocator.
#[derive(Debug, Default)]
pub(crate) struct Segments {
    items: Vec<Segment>,
    free: Vec<u32>,
}

impl Segments {
    pub fn insert(&mut self, segment: Segment) -> u32 {
        match self.free.pop() {
            Some(id) => {
                self.items[id as usize] = segment;
                id
            }
            None => {
                self.items.push(segment);
                (self.items.len() - 1) as u32
            }
        }
    }

    pub fn remove(&mut self, id: u32) {
        let segment = &mut self.items[id as usize];
        segment.live = false;
        segment.expandable = None;
        segment.head = NONE;
        self.free.push(id);
    }

    pub fn iter(&self) -> impl Iterator<Item = (u32, &Segment)> {
        self.items.iter().enumerate().filter(|(_, segment)| segment.live).map(|(id, segment)| (id as u32, segment))
    }

    pub fn get(&self, id: u32) -> Option<&Segment> {
        self.items.get(id as usize).filter(|segment| segment.live)
    }
}

impl std::ops::Index<u32> for Segments {
    type Output = Segment;
    #[inline]
    fn index(&self, id: u32) -> &Segment {
        &self.items[id as usize]
    }
}

impl std::ops::IndexMut<u32> for Segments {
    #[inline]
    fn index_mut(&mut self, id: u32) -> &mut Segment {
        &mut self.items[id as usize]
    }
}
