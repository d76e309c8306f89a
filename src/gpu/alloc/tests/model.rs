//! The rules a second time, as plainly as possible: one list of segments, each a list of blocks, everything found by
//! looking at all of it. No code is shared with the allocator, except configuration and policy values.

use crate::gpu::alloc::{AllocConfig, Policy, TieBreak};

const MIB: u64 = 1 << 20;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    Allocated,
    Pending,
    Free,
    Unmapped,
}

#[derive(Debug, Clone)]
pub struct Blk {
    pub addr: u64,
    pub size: u64,
    pub requested: u64,
    pub state: State,
    events: u32,
    /// Other streams, and whether they were named during a capture.
    uses: Vec<(u64, bool)>,
    born: u64,
    mark: u64,
}

#[derive(Debug, Clone)]
pub struct Seg {
    pub stream: u64,
    pub small: bool,
    /// 0 is the default pool.
    pub pool: u64,
    pub expandable: bool,
    page: u64,
    pub blocks: Vec<Blk>,
}

#[derive(Debug)]
struct PoolState {
    id: u64,
    users: u32,
    use_on_oom: bool,
    no_split: bool,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Figure {
    pub current: u64,
    pub peak: u64,
    pub up: u64,
    pub down: u64,
}

impl Figure {
    fn add(&mut self, n: u64) {
        self.current += n;
        self.up += n;
        self.peak = self.peak.max(self.current);
    }
    fn sub(&mut self, n: u64) {
        self.current -= n;
        self.down += n;
    }
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Figures {
    pub allocation: Figure,
    pub allocated: Figure,
    pub active: Figure,
    pub active_bytes: Figure,
    pub requested: Figure,
    pub segment: Figure,
    pub reserved: Figure,
    pub retries: u64,
    pub ooms: u64,
}

pub struct Model {
    pub config: AllocConfig,
    policy: Policy,
    capacity: u64,
    used: u64,
    ascending: bool,
    low: u64,
    high: u64,
    pub segs: Vec<Seg>,
    born: u64,
    pub fraction: Option<u64>,
    searches: Vec<((u64, bool), u64)>,
    clock: u64,
    busy: Vec<u64>,
    /// Per stream: (done at, segment address of block) in order.
    queues: Vec<Vec<(u64, u64)>>,
    deferred: Vec<u64>,
    diversions: Vec<(u64, Option<u64>, bool)>,
    pools: Vec<PoolState>,
    pub figures: Figures,
}

type Place = (usize, usize);

impl Model {
    pub fn new(capacity: u64, ascending: bool, streams: usize, policy: Policy, config: AllocConfig) -> Self {
        Model {
            config,
            policy,
            capacity,
            used: 0,
            ascending,
            low: 1 << 36,
            high: 1 << 46,
            segs: Vec::new(),
            born: 0,
            fraction: None,
            searches: Vec::new(),
            clock: 0,
            busy: vec![0; streams],
            queues: vec![Vec::new(); streams],
            deferred: Vec::new(),
            diversions: Vec::new(),
            pools: Vec::new(),
            figures: Figures::default(),
        }
    }

    pub fn work(&mut self, stream: u64, duration: u64) {
        let at = &mut self.busy[stream as usize];
        *at = (*at).max(self.clock) + duration;
    }

    pub fn advance(&mut self, duration: u64) {
        self.clock += duration;
    }

    fn address(&mut self, bytes: u64) -> u64 {
        let bytes = bytes.div_ceil(2 * MIB) * 2 * MIB;
        if self.ascending {
            self.low += bytes;
            self.low - bytes
        } else {
            self.high -= bytes;
            self.high
        }
    }

    fn born(&mut self) -> u64 {
        self.born += 1;
        self.born
    }

    fn blk(&mut self, addr: u64, size: u64, state: State) -> Blk {
        let born = self.born();
        Blk { addr, size, requested: 0, state, events: 0, uses: Vec::new(), born, mark: 0 }
    }

    fn capturing(&self) -> bool {
        self.diversions.iter().any(|(_, _, graph)| *graph || !self.policy.only_graphs_capture)
    }

    fn collecting(&self) -> bool {
        self.fraction.is_some() && self.config.garbage_collection_threshold > 0.0
    }

    fn searched(&mut self, pool: u64, small: bool) -> &mut u64 {
        let at = match self.searches.iter().position(|(key, _)| *key == (pool, small)) {
            Some(at) => at,
            None => {
                self.searches.push(((pool, small), 0));
                self.searches.len() - 1
            }
        };
        &mut self.searches[at].1
    }

    fn tie(&self, block: &Blk) -> u64 {
        match self.policy.tie_break {
            TieBreak::Address => block.addr,
            TieBreak::AddressDescending => u64::MAX - block.addr,
            TieBreak::Registration => block.born,
        }
    }

    fn limit(&self) -> u64 {
        self.config.max_split_size.unwrap_or(u64::MAX)
    }

    fn round(&self, n: u64) -> u64 {
        if n < 512 {
            return 512;
        }
        let mut interval = 0;
        while interval < 15 && n >= (2 * MIB) << interval {
            interval += 1;
        }
        let parts = u64::from(self.config.roundup_power2_divisions[interval]);
        if parts > 1 && n > 512 * parts {
            let mut floor = 512;
            while floor * 2 <= n {
                floor *= 2;
            }
            let step = floor / parts;
            return n.div_ceil(step) * step;
        }
        n.div_ceil(512) * 512
    }

    /// All free blocks of a pool and stream in search order.
    fn free_blocks(&self, pool: u64, small: bool, stream: Option<u64>) -> Vec<Place> {
        let mut all = Vec::new();
        for (s, seg) in self.segs.iter().enumerate() {
            if seg.pool == pool && seg.small == small && stream.is_none_or(|stream| seg.stream == stream) {
                all.extend(seg.blocks.iter().enumerate().filter(|(_, b)| b.state == State::Free).map(|(b, _)| (s, b)));
            }
        }
        all.sort_by_key(|&(s, b)| {
            let block = &self.segs[s].blocks[b];
            (self.segs[s].stream, block.size, self.tie(block))
        });
        all
    }

    fn search(&mut self, pool: u64, small: bool, stream: u64, size: u64) -> Option<Place> {
        if self.collecting() {
            *self.searched(pool, small) += 1;
        }
        let fitting: Vec<Place> =
            self.free_blocks(pool, small, Some(stream)).into_iter().filter(|&(s, b)| self.segs[s].blocks[b].size >= size).collect();
        let growable = |&(s, b): &Place| {
            let blocks = &self.segs[s].blocks;
            blocks[b].size + blocks.get(b + 1).filter(|next| next.state == State::Unmapped).map_or(0, |next| next.size)
        };
        let mut at = 0;
        let first = fitting.first()?;
        if self.segs[first.0].expandable {
            if self.config.expandable_segments {
                while self.segs[fitting[at].0].expandable && fitting.get(at + 1).is_some_and(|next| growable(next) < growable(&fitting[at]))
                {
                    at += 1;
                }
            } else {
                at = fitting.iter().position(|place| !self.segs[place.0].expandable)?;
            }
        }
        let found = fitting[at];
        let bytes = self.segs[found.0].blocks[found.1].size;
        let limit = self.limit();
        if (size < limit && bytes >= limit) || (size >= limit && bytes >= size + self.config.max_non_split_rounding_size) {
            return None;
        }
        Some(found)
    }

    pub fn malloc(&mut self, requested: u64, stream: u64) -> Option<(u64, u64)> {
        if !self.capturing() {
            self.process_events();
        }
        let size = self.round(requested);
        let small = size <= MIB;
        let pool = self.diversions.iter().rev().find(|(_, only, _)| only.is_none_or(|only| only == stream)).map_or(0, |(pool, _, _)| *pool);
        let found = match self.search(pool, small, stream, size) {
            Some(found) => found,
            None => self.miss(pool, small, stream, size)?,
        };
        Some(self.hand_out(found, requested, size))
    }

    fn miss(&mut self, pool: u64, small: bool, stream: u64, size: u64) -> Option<Place> {
        let wanted = if small {
            2 * MIB
        } else if size < 10 * MIB {
            self.config.large_segment_size
        } else {
            size.div_ceil(2 * MIB) * 2 * MIB
        };
        if self.collecting() {
            self.collect();
        }
        if let Some(found) = self.take(pool, small, stream, size, wanted) {
            return Some(found);
        }
        if pool == 0 && self.policy.pool_fallback {
            for id in self.pools.iter().filter(|pool| pool.use_on_oom).map(|pool| pool.id).collect::<Vec<_>>() {
                if let Some(found) = self.search(id, small, stream, size) {
                    return Some(found);
                }
            }
        }
        if self.config.max_split_size.is_some()
            && self.release_oversize(pool, small, stream, size)
            && let Some(found) = self.take(pool, small, stream, size, wanted)
        {
            return Some(found);
        }
        if !self.capturing() {
            self.empty_cache();
            self.figures.retries += 1;
            if let Some(found) = self.take(pool, small, stream, size, wanted) {
                return Some(found);
            }
        }
        self.figures.ooms += 1;
        None
    }

    fn take(&mut self, pool: u64, small: bool, stream: u64, size: u64, wanted: u64) -> Option<Place> {
        if self.fraction.is_some_and(|limit| self.figures.reserved.current + wanted > limit) {
            return None;
        }
        if self.config.expandable_segments {
            return self.grow(pool, small, stream, size);
        }
        if self.used + wanted > self.capacity {
            return None;
        }
        self.used += wanted;
        let addr = self.address(wanted);
        let block = self.blk(addr, wanted, State::Free);
        self.segs.push(Seg { stream, small, pool, expandable: false, page: 0, blocks: vec![block] });
        self.figures.segment.add(1);
        self.figures.reserved.add(wanted);
        Some((self.segs.len() - 1, 0))
    }

    fn grow(&mut self, pool: u64, small: bool, stream: u64, size: u64) -> Option<Place> {
        let mut starts: Vec<(u64, Place)> = Vec::new();
        for (s, seg) in self.segs.iter().enumerate().filter(|(_, g)| g.expandable && (g.pool, g.small, g.stream) == (pool, small, stream)) {
            for b in 0..seg.blocks.len() {
                if seg.blocks[b].state == State::Unmapped {
                    let first = if b > 0 && seg.blocks[b - 1].state == State::Free { b - 1 } else { b };
                    let room: u64 = seg.blocks[first..]
                        .iter()
                        .take_while(|block| matches!(block.state, State::Free | State::Unmapped))
                        .map(|block| block.size)
                        .sum();
                    if room >= size {
                        starts.push((seg.blocks[b].addr, (s, first)));
                    }
                }
            }
        }
        starts.sort();
        let (mut s, mut b) = match starts.first() {
            Some((_, place)) => *place,
            None => {
                let page = if small { 2 * MIB } else { self.config.large_segment_size };
                let bytes = (self.capacity + self.capacity / 8).div_ceil(page) * page;
                if bytes < size {
                    return None;
                }
                let addr = self.address(bytes);
                let block = self.blk(addr, bytes, State::Unmapped);
                self.segs.push(Seg { stream, small, pool, expandable: true, page, blocks: vec![block] });
                (self.segs.len() - 1, 0)
            }
        };
        if self.segs[s].blocks[b].state == State::Unmapped {
            let bytes = self.segs[s].blocks[b].size.min(size);
            (s, b) = self.map(s, b, bytes)?;
        }
        while self.segs[s].blocks[b].size < size {
            let bytes = (size - self.segs[s].blocks[b].size).min(self.segs[s].blocks[b + 1].size);
            (s, b) = self.map(s, b + 1, bytes)?;
        }
        Some((s, b))
    }

    /// Maps the front of an unmapped block and says where the free block around it is then.
    fn map(&mut self, s: usize, b: usize, bytes: u64) -> Option<Place> {
        let page = self.segs[s].page;
        let bytes = bytes.div_ceil(page) * page;
        if self.used + bytes > self.capacity {
            if self.segs[s].blocks.len() == 1 {
                self.segs.remove(s);
            }
            return None;
        }
        self.used += bytes;
        self.figures.reserved.add(bytes);
        let (addr, size) = (self.segs[s].blocks[b].addr, self.segs[s].blocks[b].size);
        if bytes < size {
            let rest = self.blk(addr + bytes, size - bytes, State::Unmapped);
            self.segs[s].blocks[b].size = bytes;
            self.segs[s].blocks.insert(b + 1, rest);
        }
        self.segs[s].blocks[b].state = State::Free;
        let b = self.merge_around(s, b);
        self.stamp(s, b);
        Some((s, b))
    }

    fn stamp(&mut self, s: usize, b: usize) {
        let mark = *self.searched(self.segs[s].pool, self.segs[s].small);
        self.segs[s].blocks[b].mark = mark;
    }

    /// Merges a block with neighbours of its own state; the block keeps its birth. Its index then.
    fn merge_around(&mut self, s: usize, mut b: usize) -> usize {
        let blocks = &mut self.segs[s].blocks;
        if b > 0 && blocks[b - 1].state == blocks[b].state {
            let other = blocks.remove(b - 1);
            b -= 1;
            blocks[b].addr = other.addr;
            blocks[b].size += other.size;
        }
        if b + 1 < blocks.len() && blocks[b + 1].state == blocks[b].state {
            let other = blocks.remove(b + 1);
            blocks[b].size += other.size;
        }
        b
    }

    fn hand_out(&mut self, (s, b): Place, requested: u64, size: u64) -> (u64, u64) {
        let seg = &self.segs[s];
        let rest = seg.blocks[b].size - size;
        let no_split = self.pools.iter().any(|pool| pool.id == seg.pool && pool.no_split);
        let split = !no_split && if seg.small || self.config.expandable_segments { rest >= 512 } else { size < self.limit() && rest > MIB };
        if split {
            let front = self.blk(self.segs[s].blocks[b].addr, size, State::Allocated);
            let remainder = &mut self.segs[s].blocks[b];
            remainder.addr += size;
            remainder.size -= size;
            self.segs[s].blocks.insert(b, front);
            self.stamp(s, b + 1);
        }
        let block = &mut self.segs[s].blocks[b];
        block.state = State::Allocated;
        block.requested = requested;
        let bytes = block.size;
        let addr = block.addr;
        self.figures.allocation.add(1);
        self.figures.allocated.add(bytes);
        self.figures.active.add(1);
        self.figures.active_bytes.add(bytes);
        self.figures.requested.add(requested);
        (addr, bytes)
    }

    fn find(&self, addr: u64) -> Place {
        for (s, seg) in self.segs.iter().enumerate() {
            for (b, block) in seg.blocks.iter().enumerate() {
                if block.addr == addr && matches!(block.state, State::Allocated | State::Pending) {
                    return (s, b);
                }
            }
        }
        panic!("the model has no live block at {addr:#x}");
    }

    pub fn record_stream(&mut self, addr: u64, stream: u64) {
        let (s, b) = self.find(addr);
        let capturing = self.capturing();
        if self.segs[s].stream == stream {
            return;
        }
        let uses = &mut self.segs[s].blocks[b].uses;
        match uses.iter_mut().find(|(known, _)| *known == stream) {
            Some((_, captured)) => *captured &= capturing,
            None => uses.push((stream, capturing)),
        }
    }

    pub fn free(&mut self, addr: u64) {
        let (s, b) = self.find(addr);
        let block = &mut self.segs[s].blocks[b];
        block.state = State::Pending;
        let (bytes, shared) = (block.size, !block.uses.is_empty());
        self.figures.allocation.sub(1);
        self.figures.allocated.sub(bytes);
        if !shared {
            self.complete(addr);
        } else if self.capturing() {
            self.deferred.push(addr);
        } else {
            self.record_events(addr, false);
        }
    }

    fn record_events(&mut self, addr: u64, skip_captured: bool) {
        let (s, b) = self.find(addr);
        let uses = std::mem::take(&mut self.segs[s].blocks[b].uses);
        for (stream, captured) in uses {
            if captured && skip_captured {
                continue;
            }
            let done = self.busy[stream as usize].max(self.clock);
            self.queues[stream as usize].push((done, addr));
            self.segs[s].blocks[b].events += 1;
        }
        if self.segs[s].blocks[b].events == 0 {
            self.complete(addr);
        }
    }

    fn complete(&mut self, addr: u64) {
        let (s, b) = self.find(addr);
        let block = &mut self.segs[s].blocks[b];
        block.state = State::Free;
        let (bytes, requested) = (block.size, block.requested);
        let b = self.merge_around(s, b);
        self.stamp(s, b);
        self.figures.active.sub(1);
        self.figures.active_bytes.sub(bytes);
        self.figures.requested.sub(requested);
    }

    pub fn process_events(&mut self) {
        self.events(false);
    }

    fn events(&mut self, wait: bool) {
        if self.capturing() {
            return;
        }
        for addr in std::mem::take(&mut self.deferred) {
            self.record_events(addr, true);
        }
        for stream in 0..self.queues.len() {
            while let Some(&(done, addr)) = self.queues[stream].first() {
                if wait {
                    self.clock = self.clock.max(done);
                } else if done > self.clock {
                    break;
                }
                self.queues[stream].remove(0);
                let (s, b) = self.find(addr);
                self.segs[s].blocks[b].events -= 1;
                if self.segs[s].blocks[b].events == 0 {
                    self.complete(addr);
                }
            }
        }
    }

    fn give_back(&mut self, s: usize) -> (u64, u64) {
        let seg = self.segs.remove(s);
        self.clock = self.clock.max(self.busy.iter().copied().max().unwrap_or(0));
        let (addr, size) = (seg.blocks[0].addr, seg.blocks[0].size);
        self.used -= size;
        self.figures.segment.sub(1);
        self.figures.reserved.sub(size);
        (addr, size)
    }

    /// A segment that is one free block and not expandable, by address.
    fn whole(&self, addr: u64) -> Option<usize> {
        self.segs.iter().position(|seg| !seg.expandable && seg.blocks.len() == 1 && seg.blocks[0].addr == addr)
    }

    fn release_pool_part(&mut self, pool: u64, small: bool, out: &mut Vec<(u64, u64)>) {
        let free: Vec<(u64, bool)> =
            self.free_blocks(pool, small, None).into_iter().map(|(s, b)| (self.segs[s].blocks[b].addr, self.segs[s].expandable)).collect();
        for (addr, _) in free.iter().filter(|(_, expandable)| !expandable) {
            if let Some(s) = self.whole(*addr) {
                out.push(self.give_back(s));
            }
        }
        for (addr, _) in free.iter().filter(|(_, expandable)| *expandable) {
            self.unmap(*addr, out);
        }
    }

    fn unmap(&mut self, addr: u64, out: &mut Vec<(u64, u64)>) {
        for s in 0..self.segs.len() {
            let Some(b) = self.segs[s].blocks.iter().position(|block| block.addr == addr && block.state == State::Free) else { continue };
            let (page, base) = (self.segs[s].page, self.segs[s].blocks[0].addr);
            let size = self.segs[s].blocks[b].size;
            let begin = base + (addr - base).div_ceil(page) * page;
            let end = base + (addr + size - base) / page * page;
            if begin >= end {
                return;
            }
            self.clock = self.clock.max(self.busy[self.segs[s].stream as usize]);
            let mut b = b;
            self.segs[s].blocks[b].addr = begin;
            self.segs[s].blocks[b].size = end - begin;
            if begin > addr {
                let front = self.blk(addr, begin - addr, State::Free);
                self.segs[s].blocks.insert(b, front);
                self.stamp(s, b);
                b += 1;
            }
            if addr + size > end {
                let back = self.blk(end, addr + size - end, State::Free);
                self.segs[s].blocks.insert(b + 1, back);
                self.stamp(s, b + 1);
            }
            self.segs[s].blocks[b].state = State::Unmapped;
            self.merge_around(s, b);
            self.used -= end - begin;
            self.figures.reserved.sub(end - begin);
            out.push((begin, end - begin));
            if self.segs[s].blocks.len() == 1 {
                self.segs.remove(s);
            }
            return;
        }
    }

    pub fn empty_cache(&mut self) -> Vec<(u64, u64)> {
        let mut out = Vec::new();
        if !self.capturing() {
            self.events(true);
            self.release_pool_part(0, false, &mut out);
            self.release_pool_part(0, true, &mut out);
        }
        for id in self.pools.iter().filter(|pool| pool.users == 0).map(|pool| pool.id).collect::<Vec<_>>() {
            self.release_pool_part(id, true, &mut out);
            self.release_pool_part(id, false, &mut out);
            if !self.segs.iter().any(|seg| seg.pool == id) {
                self.pools.retain(|pool| pool.id != id);
            }
        }
        out
    }

    fn release_oversize(&mut self, pool: u64, small: bool, stream: u64, size: u64) -> bool {
        let (limit, wanted) = (self.limit(), size.max(self.limit()));
        let free: Vec<(u64, u64, bool)> = self
            .free_blocks(pool, small, Some(stream))
            .into_iter()
            .map(|(s, b)| (self.segs[s].blocks[b].addr, self.segs[s].blocks[b].size, self.segs[s].expandable))
            .collect();
        let fit = free.iter().position(|(_, bytes, _)| *bytes >= wanted);
        if let Some(at) = fit
            && !free[at].2
        {
            return match self.whole(free[at].0) {
                Some(s) => {
                    self.give_back(s);
                    true
                }
                None => false,
            };
        }
        let mut sum = 0;
        for (addr, bytes, _) in free[..fit.unwrap_or(free.len())].iter().rev() {
            if sum >= wanted || *bytes < limit {
                break;
            }
            if let Some(s) = self.whole(*addr) {
                self.give_back(s);
                sum += bytes;
            }
        }
        sum >= wanted
    }

    fn collect(&mut self) {
        let threshold = (self.config.garbage_collection_threshold * self.fraction.unwrap_or(0) as f64) as u64;
        let total = self.figures.reserved.current;
        if total <= threshold {
            return;
        }
        let now = *self.searched(0, false);
        // (address, size, age, expandable) of blocks that are whole segments
        let mut left: Vec<(u64, u64, u64, bool)> = self
            .free_blocks(0, false, None)
            .into_iter()
            .filter(|(s, _)| self.segs[*s].blocks.len() == 1)
            .map(|(s, b)| {
                (self.segs[s].blocks[b].addr, self.segs[s].blocks[b].size, now - self.segs[s].blocks[b].mark, self.segs[s].expandable)
            })
            .collect();
        let mut reclaimed = 0;
        while reclaimed < total - threshold && !left.is_empty() {
            let mean = left.iter().map(|(_, _, age, _)| *age).sum::<u64>() as f64 / left.len() as f64;
            let go: Vec<_> = left.iter().copied().filter(|(_, _, age, expandable)| !expandable && *age as f64 >= mean).collect();
            // The mean stays as it was at the start of the pass.
            if go.is_empty() {
                return;
            }
            for (addr, bytes, ..) in go {
                if let Some(s) = self.whole(addr) {
                    self.give_back(s);
                }
                reclaimed += bytes;
                left.retain(|(other, ..)| *other != addr);
            }
        }
    }

    pub fn create_pool(&mut self, id: u64, use_on_oom: bool, no_split: bool) {
        self.pools.push(PoolState { id, users: 1, use_on_oom, no_split });
    }

    pub fn begin(&mut self, id: u64, only: Option<u64>, graph: bool) {
        for pool in self.pools.iter_mut().filter(|pool| pool.id == id) {
            pool.users += 1;
        }
        self.diversions.push((id, only, graph));
    }

    pub fn end(&mut self, id: u64) {
        self.diversions.retain(|(pool, ..)| *pool != id);
    }

    pub fn release_pool(&mut self, id: u64) {
        for pool in self.pools.iter_mut().filter(|pool| pool.id == id) {
            pool.users -= 1;
            if pool.users == 0 {
                pool.use_on_oom = false;
                pool.no_split = false;
            }
        }
    }

    /// Free non-expandable blocks that share their segment: number and bytes.
    pub fn inactive_split(&self) -> (u64, u64) {
        let split = self.segs.iter().filter(|seg| !seg.expandable && seg.blocks.len() > 1).flat_map(|seg| &seg.blocks);
        split.filter(|block| block.state == State::Free).fold((0, 0), |(n, bytes), block| (n + 1, bytes + block.size))
    }
}
