//! The pages behind an expandable segment: a reserved address range that physical memory is mapped into, page by
//! page (PyTorch: `ExpandableSegment`).
//!
//! Every driver call may fail. A page is therefore in one of four states, and what a failed call leaves behind
//! (memory created but not mapped, or mapped but not handed over) is remembered and used by the next attempt.

use crate::gpu::driver::{Driver, DriverError, MemHandle, StreamId};

use super::super::sizes::round_up;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Page {
    Empty,
    /// Part of a block. No handle: taken over from a recorded state.
    Mapped(Option<MemHandle>),
    /// Physical memory that could not be given back.
    Held(MemHandle),
    /// Mapped, but part of no block: a failed call could not be undone.
    Stuck(MemHandle),
}

#[derive(Debug)]
pub(crate) struct Expandable {
    pub base: u64,
    /// Bytes of a page: 2 MiB or the large segment size.
    pub page: u64,
    /// Bytes of address space.
    pub reserved: u64,
    /// State of the pages touched so far, from the base.
    pages: Vec<Page>,
    /// Bytes that are part of blocks.
    pub mapped: u64,
}

/// What [`Expandable::unmap`] did.
pub(crate) struct Unmapped {
    pub addr: u64,
    pub bytes: u64,
    pub error: Option<DriverError>,
}

impl Expandable {
    pub fn new(base: u64, page: u64, reserved: u64) -> Self {
        Expandable { base, page, reserved, pages: Vec::new(), mapped: 0 }
    }

    /// Whether `range` lies in the reserved addresses.
    fn pages_of(&mut self, addr: u64, bytes: u64) -> std::ops::Range<usize> {
        let first = ((addr - self.base) / self.page) as usize;
        let end = (round_up(addr - self.base + bytes, self.page).min(self.reserved) / self.page) as usize;
        if self.pages.len() < end {
            self.pages.resize(end, Page::Empty);
        }
        first..end
    }

    /// Takes over pages that a recorded state says are mapped.
    pub fn adopt(&mut self, addr: u64, bytes: u64) {
        for at in self.pages_of(addr, bytes) {
            self.pages[at] = Page::Mapped(None);
        }
        self.mapped += bytes;
    }

    /// Maps at least `bytes` from `addr` (a page boundary), rounded up to whole pages. Returns the bytes mapped; 0
    /// when the device has no memory left.
    pub fn map<D: Driver>(&mut self, driver: &D, addr: u64, bytes: u64) -> Result<u64, DriverError> {
        let range = self.pages_of(addr, bytes);
        let result = self.try_map(driver, range.clone());
        match result {
            Ok(()) => {
                let bytes = range.len() as u64 * self.page;
                self.mapped += bytes;
                Ok(bytes)
            }
            Err(error) => {
                for at in range {
                    self.clean(driver, at);
                }
                if error.is_out_of_memory() { Ok(0) } else { Err(error) }
            }
        }
    }

    fn try_map<D: Driver>(&mut self, driver: &D, range: std::ops::Range<usize>) -> Result<(), DriverError> {
        for at in range.clone() {
            if self.pages[at] == Page::Empty {
                self.pages[at] = Page::Held(driver.mem_create(self.page)?);
            }
        }
        for at in range.clone() {
            if let Page::Held(handle) = self.pages[at] {
                driver.mem_map(self.address(at), self.page, handle)?;
                self.pages[at] = Page::Stuck(handle);
            }
        }
        driver.mem_set_access(self.address(range.start), range.len() as u64 * self.page)?;
        for at in range {
            if let Page::Stuck(handle) = self.pages[at] {
                self.pages[at] = Page::Mapped(Some(handle));
            }
        }
        Ok(())
    }

    fn address(&self, page: usize) -> u64 {
        self.base + page as u64 * self.page
    }

    /// Gives back what a failed call left at a page. Whether nothing is left.
    fn clean<D: Driver>(&mut self, driver: &D, at: usize) -> bool {
        if let Page::Stuck(handle) = self.pages[at]
            && driver.mem_unmap(self.address(at), self.page).is_ok()
        {
            self.pages[at] = Page::Held(handle);
        }
        if let Page::Held(handle) = self.pages[at]
            && driver.mem_release(handle).is_ok()
        {
            self.pages[at] = Page::Empty;
        }
        self.pages[at] == Page::Empty
    }

    /// Unmaps the whole pages inside the range, after waiting for the stream. Stops at the first failure; the pages
    /// before it are unmapped.
    pub fn unmap<D: Driver>(&mut self, driver: &D, addr: u64, bytes: u64, stream: StreamId) -> Unmapped {
        let begin = round_up(addr - self.base, self.page);
        let end = (addr - self.base + bytes) / self.page * self.page;
        let mut done = Unmapped { addr: self.base + begin, bytes: 0, error: None };
        if begin >= end {
            return done;
        }
        if let Err(error) = driver.stream_synchronize(stream) {
            done.error = Some(error);
            return done;
        }
        for at in (begin / self.page) as usize..(end / self.page) as usize {
            if let Err(error) = driver.mem_unmap(self.address(at), self.page) {
                done.error = Some(error);
                break;
            }
            done.bytes += self.page;
            self.mapped -= self.page;
            if let Page::Mapped(Some(handle)) = self.pages[at] {
                self.pages[at] = Page::Held(handle);
                if let Err(error) = driver.mem_release(handle) {
                    done.error = Some(error);
                    break;
                }
            }
            self.pages[at] = Page::Empty;
        }
        done
    }

    /// Physical bytes that failed calls left behind.
    pub fn stranded(&self) -> u64 {
        self.pages.iter().filter(|page| matches!(page, Page::Held(_) | Page::Stuck(_))).count() as u64 * self.page
    }

    /// Gives the address range back. Nothing may be mapped into blocks any more.
    pub fn release<D: Driver>(&mut self, driver: &D) -> Result<(), DriverError> {
        for at in 0..self.pages.len() {
            if let Page::Stuck(handle) = self.pages[at] {
                driver.mem_unmap(self.address(at), self.page)?;
                self.pages[at] = Page::Held(handle);
            }
            if let Page::Held(handle) = self.pages[at] {
                driver.mem_release(handle)?;
                self.pages[at] = Page::Empty;
            }
        }
        driver.address_free(self.base, self.reserved)
    }

    /// Gives everything back as far as the driver lets it; for the end of an allocator.
    pub fn abandon<D: Driver>(&mut self, driver: &D) {
        for at in 0..self.pages.len() {
            if let Page::Mapped(handle) = self.pages[at] {
                let unmapped = driver.mem_unmap(self.address(at), self.page).is_ok();
                self.pages[at] = match handle {
                    Some(handle) if unmapped => Page::Held(handle),
                    _ => Page::Empty,
                };
            }
        }
        let _ = self.release(driver);
    }
}
