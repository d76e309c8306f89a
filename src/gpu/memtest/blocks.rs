//! Taking the memory under test through the allocator, and holding the allocator to what the driver really gave.

use super::ledger::Ledger;
use super::plan::{Rule, Stretch};
use crate::gpu::alloc::{AllocError, CachingAllocator, sizes};
use crate::gpu::driver::{Driver, DriverError, StreamId};
use crate::gpu::human;
use crate::gpu::kernels::{Kernels, Pattern};

/// Words of a guard at each end of a block: 512 bytes.
const GUARD: u64 = 64;
/// More blocks than that are not taken: a card so fragmented is tested in part.
const MOST_BLOCKS: usize = 8192;

/// Where the memory comes from. A trait, so that tests can put a broken allocator in its place.
pub(super) trait Source {
    /// Address of a block of at least `bytes`.
    fn take(&self, bytes: u64) -> Result<u64, AllocError>;
    fn give(&self, address: u64) -> Result<(), AllocError>;
    fn empty_cache(&self) -> Result<(), AllocError>;
    /// Bytes held of the driver.
    fn reserved(&self) -> u64;
    /// Whether the books agree with the blocks.
    fn validate(&self) -> Result<(), String>;
}

impl<D: Driver> Source for CachingAllocator<D> {
    fn take(&self, bytes: u64) -> Result<u64, AllocError> {
        self.malloc(bytes, StreamId::DEFAULT).map(|allocation| allocation.address)
    }
    fn give(&self, address: u64) -> Result<(), AllocError> {
        self.free(address)
    }
    fn empty_cache(&self) -> Result<(), AllocError> {
        CachingAllocator::empty_cache(self).map(|_| ())
    }
    fn reserved(&self) -> u64 {
        self.lock().usage().reserved
    }
    fn validate(&self) -> Result<(), String> {
        self.lock().validate()
    }
}

/// A block under test: guard, payload, guard.
#[derive(Debug, Clone, Copy)]
pub(super) struct Block {
    pub number: usize,
    pub address: u64,
    pub bytes: u64,
    /// Index of the first word of the payload.
    origin: u64,
}

impl Block {
    pub(super) fn payload(&self) -> Stretch {
        Stretch { address: self.address + 8 * GUARD, words: self.bytes / 8 - 2 * GUARD, origin: self.origin }
    }

    pub(super) fn guards(&self) -> [Stretch; 2] {
        [
            Stretch { address: self.address, words: GUARD, origin: 0 },
            Stretch { address: self.address + self.bytes - 8 * GUARD, words: GUARD, origin: GUARD },
        ]
    }

    /// What its guards hold.
    pub(super) fn canary(&self, inverted: bool) -> Rule {
        let rule = Rule::new(Pattern::Canary, self.number as u64, 0);
        if inverted { rule.inverse() } else { rule }
    }
}

/// What taking came to.
pub(super) struct Taken {
    pub blocks: Vec<Block>,
    /// Why it ended short of the budget.
    pub refused: Option<DriverError>,
}

/// What went wrong with taking.
pub(super) enum TakeError {
    /// The allocator broke its promise.
    Allocator(String),
    Driver(DriverError),
}

impl TakeError {
    pub(super) fn from_alloc(error: &AllocError) -> Self {
        match error {
            AllocError::Driver(error) => TakeError::Driver(*error),
            other => TakeError::Allocator(other.to_string()),
        }
    }
}

/// Takes blocks until `budget` bytes are reserved, the driver has only `reserve` left, or says no.
pub(super) fn take<K: Kernels>(
    source: &dyn Source,
    driver: &Ledger<K>,
    expandable: bool,
    budget: u64,
    reserve: u64,
) -> Result<Taken, TakeError> {
    // Pages of expandable segments are as large as their smallest large segment.
    let page = if expandable { sizes::LARGE_SEGMENT } else { sizes::ROUND_LARGE };
    let smallest = if expandable { sizes::LARGE_SEGMENT } else { sizes::MIN_LARGE_ALLOC };
    let largest = sizes::round_up((budget / 256).clamp(smallest, 1 << 30), page);
    let mut ladder = vec![largest];
    while let Some(half) = ladder.last().map(|size| sizes::round_up(size / 2, page)).filter(|half| *half > smallest) {
        if ladder.last() == Some(&half) {
            break;
        }
        ladder.push(half);
    }
    ladder.extend([smallest, sizes::SMALL_SIZE]);
    ladder.dedup();
    let mut taken = Taken { blocks: Vec::new(), refused: None };
    let mut origin = 0;
    for size in ladder {
        while taken.blocks.len() < MOST_BLOCKS {
            let need = if size > sizes::SMALL_SIZE { size } else { sizes::SMALL_BUFFER };
            let reserved = source.reserved();
            // A small block may find room in a segment that is held already.
            let cached = size <= sizes::SMALL_SIZE && held_in(&taken.blocks) + 2 * size <= reserved;
            let free = driver.mem_get_info().map_err(TakeError::Driver)?.free;
            if !cached && (reserved.saturating_add(need) > budget || free < reserve.saturating_add(need)) {
                break;
            }
            let address = match source.take(size) {
                Ok(address) => address,
                Err(AllocError::OutOfMemory(_)) => {
                    taken.refused = Some(DriverError::new(
                        if expandable { crate::gpu::driver::Call::MemCreate } else { crate::gpu::driver::Call::MemAlloc },
                        crate::gpu::driver::code::OUT_OF_MEMORY,
                    ));
                    break;
                }
                Err(error) => return Err(TakeError::from_alloc(&error)),
            };
            let block = Block { number: taken.blocks.len(), address, bytes: size, origin };
            check(&block, &taken.blocks, driver).map_err(TakeError::Allocator)?;
            origin += block.payload().words;
            taken.blocks.push(block);
        }
    }
    source.validate().map_err(TakeError::Allocator)?;
    Ok(taken)
}

fn held_in(blocks: &[Block]) -> u64 {
    blocks.iter().map(|block| block.bytes).sum()
}

/// Holds a block that was handed out against those before it and against what the driver gave.
fn check<K: Kernels>(block: &Block, earlier: &[Block], driver: &Ledger<K>) -> Result<(), String> {
    let what = format!("block {} of {} at {:#x}", block.number, human(block.bytes), block.address);
    if !block.address.is_multiple_of(sizes::MIN_BLOCK) || block.address == 0 {
        return Err(format!("{what} is not at a multiple of {} bytes", sizes::MIN_BLOCK));
    }
    let end = block.address.saturating_add(block.bytes);
    if let Some(other) = earlier.iter().find(|other| other.address < end && block.address < other.address + other.bytes) {
        return Err(format!("{what} overlaps block {} of {} at {:#x}, which is in use", other.number, human(other.bytes), other.address));
    }
    if !driver.grants(block.address, block.bytes) {
        return Err(format!("{what} does not lie in memory that the driver gave"));
    }
    Ok(())
}
