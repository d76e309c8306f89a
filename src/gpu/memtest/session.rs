//! The patterns over the blocks: passes, canaries, caches, copy rate.

use std::time::Duration;

use super::blocks::Block;
use super::plan::{self, Op, Rule, Stretch, Test};
use super::report::{Cause, DeviceReport, Finding, Hex, PassFigure, Status, Step};
use super::rig::{Rig, Stop, Tally};
use super::{Level, MOST_PASSES};
use crate::gpu::driver::DriverResult;
use crate::gpu::human;
use crate::gpu::kernels::host::{READ_MARK, mix};
use crate::gpu::kernels::{Kernel, Kernels, Pattern};
use crate::report::{Progress, TaskId};

/// Tiles that the cache test looks at on the quick level.
const QUICK_TILES: usize = 32;
/// Tiles between two looks at the results.
const TILES_A_LOOK: usize = 64;
/// Wrong words from which on the kernels are looked at first.
const MANY: u64 = 4096;
/// Copies of which the median is the card's own rate.
const COPIES: usize = 5;

/// Why a step was not done.
pub(super) const BUDGET: &str = "the time budget was spent before it was complete";
/// How long the cause of wrong words is looked for when the budget is spent.
const DIAGNOSIS: Duration = Duration::from_secs(20);
const KERNELS: &str = "kernels";
const KERNELS_TITLE: &str = "a planted error is seen, once and where it is";

/// A test under way on one card.
pub(super) struct Session<'a, 'd, K: Kernels> {
    pub rig: &'a mut Rig<'d, K>,
    pub out: &'a mut DeviceReport,
    pub blocks: Vec<Block>,
    /// Wrong words by block.
    pub hits: Vec<u64>,
    pub seed: u64,
    /// How often a cause was looked for.
    pub diagnoses: u32,
    inverted: bool,
    /// A search overwrote the guards.
    pub replant: bool,
    progress: &'a dyn Progress,
    task: TaskId,
    done: u64,
    /// Errors and marks planted so far: each lies elsewhere.
    probes: u64,
}

/// The step in a report, made if it is not there.
pub(super) fn step_mut<'r>(out: &'r mut DeviceReport, name: &'static str, title: &'static str) -> &'r mut Step {
    if let Some(at) = out.steps.iter().position(|step| step.name == name) {
        return &mut out.steps[at];
    }
    out.steps.push(Step { name, title, status: Status::Pass, cause: None, detail: None, passes: 0, mismatches: 0, seconds: 0.0 });
    let last = out.steps.len() - 1;
    &mut out.steps[last]
}

/// Sets a step that was not done. A step that is there with passes keeps its verdict.
pub(super) fn not_tested(out: &mut DeviceReport, name: &'static str, title: &'static str, cause: Cause, detail: impl Into<String>) {
    let step = step_mut(out, name, title);
    if step.passes == 0 && step.status == Status::Pass {
        step.status = Status::NotTested;
        step.cause = Some(cause);
        step.detail = Some(detail.into());
    }
}

impl<'a, 'd, K: Kernels> Session<'a, 'd, K> {
    pub(super) fn new(
        rig: &'a mut Rig<'d, K>,
        out: &'a mut DeviceReport,
        blocks: Vec<Block>,
        seed: u64,
        progress: &'a dyn Progress,
        task: TaskId,
    ) -> Self {
        let hits = vec![0; blocks.len()];
        Session { rig, out, blocks, hits, seed, diagnoses: 0, inverted: false, replant: false, progress, task, done: 0, probes: 0 }
    }

    pub(super) fn words(&self) -> u64 {
        self.blocks.iter().map(|block| block.payload().words).sum()
    }

    /// The part of a block that an address lies in.
    pub(super) fn locate(&self, address: u64) -> Option<(&Block, Stretch)> {
        let block = self.blocks.iter().find(|block| address >= block.address && address - block.address < block.bytes)?;
        let [head, tail] = block.guards();
        [block.payload(), head, tail].into_iter().find(|stretch| stretch.contains(address)).map(|stretch| (block, stretch))
    }

    /// Pushes what is under test out of the cache, by reads that are seen to be made.
    pub(super) fn evict(&mut self) -> Result<(), Stop> {
        let mark = self.rig.plant_mark(self.probes)?;
        let (rig, evictor) = (&mut *self.rig, Evictor { blocks: &self.blocks });
        rig.timed(|rig| {
            evictor.evict(rig)?;
            rig.read(&mark)
        })?;
        self.mark_was_read("evicting")
    }

    /// The read kernel has put the mark into its sink; else it did not run, or the words are not what was written to them.
    fn mark_was_read(&mut self, when: &str) -> Result<(), Stop> {
        for attempt in 0..3 {
            let words = self.rig.marked()?;
            self.probes += 1;
            if words.first() == Some(&READ_MARK) {
                if attempt > 0 {
                    self.kernels_surprised(Cause::FlippedBit, format!("a read (while {when}) missed its mark once, then found it"));
                }
                return Ok(());
            }
            let marks = words.iter().skip(1).filter(|word| **word != 0).count();
            if marks != 1 || !words.contains(&READ_MARK) {
                self.kernels_surprised(Cause::FlippedBit, format!("words of the test's own changed (while {when})"));
                return Ok(());
            }
            let mark = self.rig.plant_mark(self.probes)?;
            self.rig.timed(|rig| rig.read(&mark))?;
        }
        let what = format!("the kernel `{}` did not read what it should (while {when})", Kernel::Read.name());
        self.kernels_surprised(Cause::Kernels, what);
        Err(Stop::Broken)
    }

    /// The step of the kernels has failed, whatever it said before.
    fn kernels_surprised(&mut self, cause: Cause, text: String) {
        let step = step_mut(self.out, KERNELS, KERNELS_TITLE);
        (step.status, step.cause, step.detail) = (Status::Fail, Some(cause), Some(text.clone()));
        self.out.findings.push(Finding { cause, step: KERNELS, text, addresses: Vec::new(), period: None, call: None, code: None });
    }

    /// A comparison that found nothing must find an error that is planted where it has just looked: in `stretch`, by the same launches.
    fn prove(&mut self, name: &'static str, title: &'static str, op: Op, stretch: &Stretch) -> Result<(), Stop> {
        for attempt in 0..3u32 {
            self.probes += 1;
            let random = mix(self.seed ^ self.probes);
            // Of the modulo test only every 20th word is looked at.
            let start = random % stretch.words.max(1);
            let places = (0..plan::MODULUS.min(stretch.words)).map(|step| stretch.address + 8 * ((start + step) % stretch.words));
            let Some((place, right)) = places.filter_map(|place| Some((place, op.expected(stretch, place)?))).next() else { return Ok(()) };
            let planted = (place, right, right ^ 1 << (random >> 58));
            self.rig.put(place, &[planted.2])?;
            let outcome = self.run_on(stretch, op).and_then(|()| self.rig.tally());
            let held = self.rig.word(place)?;
            self.rig.put(place, &[right])?;
            let tally = outcome?;
            match tally.without(planted) {
                Some(rest) if rest.clean() => return Ok(()),
                // More than was planted.
                Some(rest) => return self.failed(name, title, op, &rest),
                None if !tally.clean() => return self.failed(name, title, op, &tally),
                None if held != planted.2 => {
                    self.word_broken(name, title, "", place, planted.2, held)?;
                    self.rig.put(place, &[right])?;
                    return Ok(());
                }
                None if attempt < 2 => {}
                None => {
                    let what = format!("a `{}` in `{name}` did not see an error planted at {place:#x}: its kernel does nothing", op.kind());
                    self.kernels_surprised(Cause::Kernels, what);
                }
            }
        }
        Err(Stop::Broken)
    }

    fn advance(&mut self) {
        self.done += 1;
        self.progress.advance_to(self.task, self.done);
    }

    pub(super) fn note_pass(&mut self, step: &'static str, kind: &'static str, bytes: u64, milliseconds: f64) {
        let gb_per_s = if milliseconds > 0.0 { bytes as f64 / milliseconds / 1e6 } else { 0.0 };
        if self.out.passes.len() < MOST_PASSES {
            self.out.passes.push(PassFigure { step, kind, bytes, milliseconds, gb_per_s });
        }
    }

    /// Runs one op over all blocks. Milliseconds on the device.
    pub(super) fn pass(&mut self, step: &'static str, op: Op) -> Result<f64, Stop> {
        if let Op::Wait(time) = op {
            self.rig.driver.pause(time);
            return Ok(0.0);
        }
        if op.checks() {
            self.evict()?;
        }
        let result = self.rig.result();
        let stretches: Vec<Stretch> = self.blocks.iter().map(Block::payload).collect();
        let ordered: Vec<&Stretch> = if op.descending() { stretches.iter().rev().collect() } else { stretches.iter().collect() };
        let milliseconds = self.rig.timed(|rig| {
            for stretch in ordered {
                for (kernel, words, arguments) in op.launches(stretch, result) {
                    rig.launch(kernel, words, &arguments)?;
                }
            }
            Ok(())
        })?;
        let bytes = stretches.iter().map(|stretch| op.bytes(stretch.words)).sum();
        self.note_pass(step, op.kind(), bytes, milliseconds);
        Ok(milliseconds)
    }

    /// Runs a test and then looks at the canaries. `name` and `title` are those of the step it counts for. With `again`, a spent
    /// budget takes nothing back from the step.
    pub(super) fn run(&mut self, test: &Test, name: &'static str, title: &'static str, again: bool) -> Result<(), Stop> {
        let began = self.rig.driver.now();
        step_mut(self.out, name, title);
        let outcome = self.run_ops(test, name, title, again);
        let seconds = self.rig.driver.now().saturating_sub(began).as_secs_f64();
        step_mut(self.out, name, title).seconds += seconds;
        if matches!(outcome, Err(Stop::Budget { .. })) && !again {
            self.out_of_time(name, title);
        }
        outcome?;
        self.check_canaries()
    }

    /// The budget was spent while a step was under way.
    pub(super) fn out_of_time(&mut self, name: &'static str, title: &'static str) {
        let step = step_mut(self.out, name, title);
        if step.status == Status::Pass {
            step.status = Status::NotTested;
            step.cause = Some(Cause::Budget);
            step.detail = Some(BUDGET.into());
        }
    }

    fn run_ops(&mut self, test: &Test, name: &'static str, title: &'static str, again: bool) -> Result<(), Stop> {
        for op in &test.ops {
            let too_long = match op {
                Op::Wait(time) => self.rig.left().is_some_and(|left| left <= *time),
                _ => self.rig.over(),
            };
            if too_long {
                if !again {
                    self.out_of_time(name, title);
                }
                return if self.rig.over() { Err(Stop::Budget { busy: false }) } else { Ok(()) };
            }
            self.pass(name, *op)?;
            step_mut(self.out, name, title).passes += 1;
            self.advance();
            if op.checks() {
                let tally = self.rig.tally()?;
                if !tally.clean() {
                    self.failed(name, title, *op, &tally)?;
                    return Ok(());
                }
            }
        }
        // Every test ends with a comparison that changes nothing.
        if let Some(op) = test.ops.last().filter(|op| op.only_reads()) {
            let number = mix(self.seed ^ self.probes ^ 0xB10C) as usize % self.blocks.len().max(1);
            if let Some(stretch) = self.blocks.get(number).map(Block::payload) {
                self.prove(name, title, *op, &stretch)?;
            }
        }
        Ok(())
    }

    /// Counts wrong words for a step and looks for the cause, for which there is a little more time than the budget.
    fn failed(&mut self, name: &'static str, title: &'static str, op: Op, tally: &Tally) -> Result<(), Stop> {
        let deadline = self.rig.deadline;
        self.rig.deadline = deadline.map(|deadline| deadline.max(self.rig.driver.now()) + DIAGNOSIS);
        let outcome = self.failed_in_time(name, title, op, tally);
        self.rig.deadline = deadline;
        outcome
    }

    fn failed_in_time(&mut self, name: &'static str, title: &'static str, op: Op, tally: &Tally) -> Result<(), Stop> {
        // Where so much is wrong it may be a kernel that does not run rather than the memory.
        let before = self.out.findings.len();
        let outcome = match if tally.count() > MANY { self.kernel_fault() } else { Ok(None) } {
            Ok(Some(what)) => {
                self.kernels_surprised(Cause::Kernels, what);
                return Err(Stop::Broken);
            }
            Ok(None) => self.diagnose(name, op, tally),
            Err(stop) => Err(stop),
        };
        if matches!(outcome, Err(Stop::Budget { .. })) && self.out.findings.len() == before {
            // Wrong all the same.
            let (address, expected, got) = tally.records().next().unwrap_or((tally.lowest(), 0, 0));
            self.keep(name, None, address, expected, got, None);
            self.out.findings.push(Finding {
                cause: Cause::FlippedBit,
                step: name,
                text: format!("the word at {address:#x} was wrong, and the time budget was spent before more was known"),
                addresses: vec![Hex(address)],
                period: None,
                call: None,
                code: None,
            });
        }
        let cause = self.out.findings[before.min(self.out.findings.len())..].iter().map(|finding| finding.cause).min();
        let cause = cause.or_else(|| self.out.findings.iter().map(|finding| finding.cause).min());
        // What was written over the result may say any number.
        let count = tally.count().clamp(1, self.words().max(1));
        let step = step_mut(self.out, name, title);
        step.status = Status::Fail;
        step.cause = step.cause.filter(|_| step.mismatches > 0).or(cause);
        step.mismatches = step.mismatches.saturating_add(count);
        step.detail = Some(format!("{} wrong word{}", step.mismatches, crate::gpu::plural(step.mismatches)));
        outcome
    }

    /// Writes the guards of all blocks.
    pub(super) fn plant_canaries(&mut self) -> Result<(), Stop> {
        self.inverted = false;
        let guards: Vec<(Rule, Stretch)> =
            self.blocks.iter().flat_map(|block| block.guards().map(|stretch| (block.canary(false), stretch))).collect();
        self.rig.timed(|rig| {
            for (rule, stretch) in &guards {
                for (kernel, words, arguments) in Op::Fill(*rule).launches(stretch, 0) {
                    rig.launch(kernel, words, &arguments)?;
                }
            }
            Ok(())
        })?;
        Ok(())
    }

    /// Compares the guards of all blocks and turns every bit of them round.
    fn check_canaries(&mut self) -> Result<(), Stop> {
        const NAME: &str = "canaries";
        const TITLE: &str = "guard words at both ends of each block stay as they are";
        if std::mem::take(&mut self.replant) {
            return self.plant_canaries();
        }
        let result = self.rig.result();
        let inverted = self.inverted;
        let guards: Vec<(Op, Stretch)> = self
            .blocks
            .iter()
            .flat_map(|block| {
                let op = Op::Exchange { from: block.canary(inverted), to: block.canary(!inverted), descending: false };
                block.guards().map(|stretch| (op, stretch))
            })
            .collect();
        let milliseconds = self.rig.timed(|rig| {
            for (op, stretch) in &guards {
                for (kernel, words, arguments) in op.launches(stretch, result) {
                    rig.launch(kernel, words, &arguments)?;
                }
            }
            Ok(())
        })?;
        self.inverted = !inverted;
        let step = step_mut(self.out, NAME, TITLE);
        step.passes += 1;
        step.seconds += milliseconds / 1e3;
        let tally = self.rig.tally()?;
        if tally.clean() {
            return self.prove_exchange();
        }
        // Any block's rule will do to name the op: the block of each address has its own.
        let op = guards.first().map_or(Op::Verify(plan::OWN), |(op, _)| *op);
        self.failed(NAME, TITLE, op, &tally)?;
        self.plant_canaries()
    }

    /// The kernel that compares and writes must do both, on the test's own field.
    fn prove_exchange(&mut self) -> Result<(), Stop> {
        self.probes += 1;
        let random = mix(self.seed ^ self.probes ^ 0xE8C);
        let field = self.rig.field();
        let stretch = Stretch { words: 64, ..field };
        let (from, to) = (Rule::new(Pattern::Random, random, 0), Rule::new(Pattern::Random, !random, 0));
        let op = Op::Exchange { from, to, descending: random & 1 == 1 };
        let mut words: Vec<u64> = (0..stretch.words).map(|at| from.value(0, stretch.origin + at)).collect();
        let at = random % stretch.words;
        words[at as usize] ^= 1 << (random >> 58);
        self.rig.put(stretch.address, &words)?;
        self.run_on(&stretch, op)?;
        let tally = self.rig.tally()?;
        let after = self.rig.words(stretch.address, stretch.words)?;
        let written = after.iter().enumerate().all(|(at, word)| *word == to.value(0, stretch.origin + at as u64));
        if written && tally.count() == 1 {
            return Ok(());
        }
        // Words that cannot hold what is written to them, or a kernel that does not do its work.
        if let Some((address, expected, got)) = self.slot_fault()? {
            self.own_words_broken(KERNELS, address, expected, got)?;
            return if self.rig.next_slot() { self.rig.reset() } else { Err(Stop::Broken) };
        }
        self.rig.reset()?;
        let what = match self.kernel_fault()? {
            Some(what) => what,
            None => {
                self.kernels_surprised(Cause::FlippedBit, "a word of the test's own field was wrong once, then right".into());
                return Ok(());
            }
        };
        self.kernels_surprised(Cause::Kernels, what);
        Err(Stop::Broken)
    }

    /// What a pass expects of an address. The guards of each block have a rule of their own.
    pub(super) fn expected(&self, op: Op, address: u64) -> Option<u64> {
        let (block, stretch) = self.locate(address)?;
        let canary = matches!(op, Op::Exchange { from, .. } if from.pattern == Pattern::Canary);
        match (op, canary, stretch == block.payload()) {
            (Op::Exchange { from, to, descending }, true, false) => {
                let rule = Rule { p0: block.number as u64, ..from };
                Op::Exchange { from: rule, to, descending }.expected(&stretch, address)
            }
            (_, false, true) => op.expected(&stretch, address),
            _ => None,
        }
    }

    /// Tiles of half the L2 cache: written, read while they are in the cache, and read again after they were pushed out of it.
    pub(super) fn caches(&mut self, level: Level, again: bool) -> Result<(), Stop> {
        const NAME: &str = "caches";
        const TITLE: &str = "read through the L2 cache, and again after eviction";
        let l2 = self.rig.l2();
        let words = (l2 / 16).max(1024);
        if 8 * self.words() < 4 * l2 {
            let why = format!("the memory under test is less than four times the L2 cache of {}", human(l2));
            not_tested(self.out, NAME, TITLE, Cause::Unsupported, why);
            return Ok(());
        }
        let mut tiles = Vec::new();
        for block in &self.blocks {
            let payload = block.payload();
            for at in (0..payload.words).step_by(words as usize) {
                let tile = Stretch { address: payload.address + 8 * at, words: words.min(payload.words - at), origin: payload.origin + at };
                tiles.push((block.number, tile));
            }
        }
        if level == Level::Quick && tiles.len() > QUICK_TILES {
            let all = tiles.len();
            tiles = (0..QUICK_TILES).map(|number| tiles[number * all / QUICK_TILES]).collect();
        }
        let rule = Rule::new(Pattern::Random, mix(self.seed ^ 0x12), 0);
        let result = self.rig.result();
        let middle = self.blocks.len() / 2;
        // What is read to push a tile out lies in the other half.
        let halves = [self.blocks[..middle].to_vec(), self.blocks[middle..].to_vec()];
        for batch in tiles.chunks(TILES_A_LOOK) {
            if self.rig.over() {
                if !again {
                    self.out_of_time(NAME, TITLE);
                }
                return Err(Stop::Budget { busy: false });
            }
            let mark = self.rig.plant_mark(self.probes)?;
            let milliseconds = self.rig.timed(|rig| {
                for (block, tile) in batch {
                    let other = if *block < middle || middle == 0 { &halves[1] } else { &halves[0] };
                    for op in [Op::Fill(rule), Op::Verify(rule)] {
                        for (kernel, words, arguments) in op.launches(tile, result) {
                            rig.launch(kernel, words, &arguments)?;
                        }
                    }
                    Evictor { blocks: other }.evict(rig)?;
                    for (kernel, words, arguments) in Op::Verify(rule).launches(tile, result) {
                        rig.launch(kernel, words, &arguments)?;
                    }
                }
                rig.read(&mark)
            })?;
            self.mark_was_read("reading tiles past the cache")?;
            let step = step_mut(self.out, NAME, TITLE);
            step.passes += 1;
            step.seconds += milliseconds / 1e3;
            let tally = self.rig.tally()?;
            if !tally.clean() {
                self.failed(NAME, TITLE, Op::Verify(rule), &tally)?;
                break;
            }
            if let Some((_, tile)) = batch.last() {
                self.prove(NAME, TITLE, Op::Verify(rule), tile)?;
            }
        }
        self.advance();
        self.check_canaries()
    }

    /// The card's own copy rate in 10^9 bytes read and written a second: the better of the driver's copy and of the copy kernel,
    /// each the median of some, over the largest block.
    pub(super) fn copy_rate(&mut self) -> Result<Option<f64>, Stop> {
        let Some(payload) = self.blocks.iter().map(Block::payload).max_by_key(|stretch| stretch.words) else { return Ok(None) };
        let half = payload.words / 2;
        let (from, to) = (payload.address, payload.address + 8 * half);
        let mut best: f64 = 0.0;
        for by_kernel in [false, true] {
            let mut rates = Vec::new();
            for _ in 0..COPIES {
                let milliseconds = self.rig.timed(|rig| {
                    if by_kernel { rig.launch(Kernel::Copy, half, &[to, from, half]) } else { rig.copy(to, from, 8 * half) }
                })?;
                if milliseconds > 0.0 {
                    rates.push(16.0 * half as f64 / milliseconds / 1e6);
                }
            }
            best = best.max(median(&mut rates).unwrap_or(0.0));
        }
        Ok((best > 0.0).then_some(best))
    }

    /// Tries the kernels on the test's own field: sound words give nothing, a planted error gives exactly itself. Slots that do
    /// not hold what is written to them are reported and left.
    pub(super) fn try_kernels(&mut self) -> Result<(), Stop> {
        const NAME: &str = KERNELS;
        const TITLE: &str = KERNELS_TITLE;
        let mut surprises = 0;
        loop {
            if let Some((address, expected, got)) = self.slot_fault()? {
                self.own_words_broken(NAME, address, expected, got)?;
                if !self.rig.next_slot() {
                    return Err(Stop::Broken);
                }
                continue;
            }
            self.rig.reset()?;
            let Some(what) = self.kernel_fault()? else { break };
            surprises += 1;
            if surprises < 3 {
                continue;
            }
            self.out.findings.push(Finding {
                cause: Cause::Kernels,
                step: NAME,
                text: what.clone(),
                addresses: Vec::new(),
                period: None,
                call: None,
                code: None,
            });
            let step = step_mut(self.out, NAME, TITLE);
            (step.status, step.cause, step.detail) = (Status::Fail, Some(Cause::Kernels), Some(what));
            return Err(Stop::Broken);
        }
        let step = step_mut(self.out, NAME, TITLE);
        step.passes += 1;
        if surprises > 0 {
            let field = self.rig.field();
            step.status = Status::Fail;
            step.cause = Some(Cause::FlippedBit);
            step.detail = Some("wrong once, then right".into());
            let finding = Finding {
                cause: Cause::FlippedBit,
                step: NAME,
                text: format!("a word of the test's own field at {:#x} was wrong once, then right", field.address),
                addresses: vec![Hex(field.address)],
                period: None,
                call: None,
                code: None,
            };
            self.out.mismatch_count += 1;
            self.out.findings.push(finding);
        }
        Ok(())
    }

    /// Notes that a word of the test's own memory did not hold what was written to it.
    fn own_words_broken(&mut self, step: &'static str, address: u64, expected: u64, got: u64) -> Result<(), Stop> {
        self.word_broken(step, KERNELS_TITLE, " (the test's own)", address, expected, got)
    }

    /// Notes that a word did not hold what was written to it. It holds something else afterwards. Kernels are not needed for it.
    fn word_broken(
        &mut self,
        step: &'static str,
        title: &'static str,
        whose: &str,
        address: u64,
        expected: u64,
        got: u64,
    ) -> Result<(), Stop> {
        self.out.mismatch_count += 1;
        self.keep(step, None, address, expected, got, None);
        let probed = self.probe_words(&[(address, 1)], false)?;
        let (cause, how) = match probed.first() {
            Some(probed) if probed.stuck() => (Cause::StuckBit, probed.text("")),
            Some(probed) => (Cause::FlippedBit, probed.text("")),
            None => (Cause::FlippedBit, "written again, it holds".to_owned()),
        };
        self.out.findings.push(Finding {
            cause,
            step,
            text: format!("the word at {address:#x}{whose} reads {got:#018x} after {expected:#018x} was written; {how}"),
            addresses: vec![Hex(address)],
            period: None,
            call: None,
            code: None,
        });
        let step = step_mut(self.out, step, title);
        (step.status, step.cause) = (Status::Fail, Some(cause));
        Ok(())
    }

    /// The first word of the present slot that does not read as it was written by the host.
    fn slot_fault(&mut self) -> Result<Option<(u64, u64, u64)>, Stop> {
        let (address, bytes) = self.rig.slot();
        let words = bytes / 8;
        for round in 0..3u64 {
            let data: Vec<u64> = (0..words)
                .map(|at| match round {
                    0 => address + 8 * at,
                    1 => !(address + 8 * at),
                    _ => 0,
                })
                .collect();
            self.rig.put(address, &data)?;
            let seen = self.rig.words(address, words)?;
            if let Some(at) = (0..data.len()).find(|at| seen.get(*at) != data.get(*at)) {
                return Ok(Some((address + 8 * at as u64, data[at], seen.get(at).copied().unwrap_or(0))));
            }
        }
        Ok(None)
    }

    /// What a kernel did wrong on the field, in words.
    fn kernel_fault(&mut self) -> Result<Option<String>, Stop> {
        let field = self.rig.field();
        let rule = Rule::new(Pattern::Random, mix(self.seed ^ 0x7E57), 0);
        let place = field.address + 8 * (mix(self.seed) % (field.words / 2));
        let bit = 1u64 << (self.seed % 64);
        let wrong = |op: Op| op.expected(&field, place).unwrap_or(0) ^ bit;
        let residue = field.index(place) % plan::MODULUS;
        let value = mix(self.seed ^ 5);
        // Neither fill may be left out: what they write must not be there before.
        let constant = Rule::new(Pattern::Constant, !value, 0);
        // Each comparison, after what has to be written before it.
        let modulo = |inside| Op::ModuloFill { residue, value: if inside { value } else { !value }, inside };
        let checks: [(&[Op], Op); 4] = [
            (&[Op::Fill(rule)], Op::Verify(rule)),
            (&[Op::Fill(rule)], Op::Exchange { from: rule, to: rule.inverse(), descending: true }),
            (&[Op::Fill(constant), modulo(true), modulo(false)], Op::ModuloVerify { residue, value }),
            (&[Op::Fill(rule), Op::MoveOut, Op::MoveBack], Op::VerifyMoved(rule)),
        ];
        for (writes, check) in checks {
            for planted in [false, true] {
                for op in writes {
                    self.run_on(&field, *op)?;
                }
                if planted {
                    self.rig.put(place, &[wrong(check)])?;
                }
                self.run_on(&field, check)?;
                let tally = self.rig.tally()?;
                let expected: Vec<(u64, u64, u64)> =
                    if planted { vec![(place, check.expected(&field, place).unwrap_or(0), wrong(check))] } else { Vec::new() };
                let seen: Vec<(u64, u64, u64)> = tally.records().collect();
                if tally.count() != expected.len() as u64 || seen != expected || !tally.rest_is_clean() {
                    return Ok(Some(format!(
                        "the kernels counted {} wrong word{} in a `{}` where there {} (planted at {place:#x})",
                        tally.count(),
                        crate::gpu::plural(tally.count()),
                        check.kind(),
                        if planted { "is one" } else { "is none" },
                    )));
                }
            }
        }
        let after = self.rig.words(field.address, 2)?;
        let still = |at: u64| (after.get(at as usize).copied(), Op::VerifyMoved(rule).expected(&field, field.address + 8 * at));
        for at in 0..2 {
            let (seen, expected) = still(at);
            if seen != expected && field.address + 8 * at != place {
                return Ok(Some(format!("the copy kernel left {seen:x?} where {expected:x?} belongs")));
            }
        }
        for planted in [true, false] {
            let mark = self.rig.plant_mark(self.probes)?;
            self.probes += 1;
            if planted {
                self.rig.timed(|rig| rig.read(&mark))?;
            }
            let words = self.rig.marked()?;
            if (words.first() == Some(&READ_MARK)) != planted {
                return Ok(Some(format!("the kernel `{}` did not read what it should", Kernel::Read.name())));
            }
        }
        Ok(None)
    }

    fn run_on(&mut self, stretch: &Stretch, op: Op) -> Result<(), Stop> {
        let result = self.rig.result();
        self.rig.timed(|rig| {
            op.launches(stretch, result).iter().try_for_each(|(kernel, words, arguments)| rig.launch(*kernel, *words, arguments))
        })?;
        Ok(())
    }
}

/// Reads that push everything else out of the cache.
struct Evictor<'b> {
    blocks: &'b [Block],
}

impl Evictor<'_> {
    /// Queues the reads. They begin in the middle: what a pass looks at first was then neither just written nor just read.
    fn evict<K: Kernels>(&self, rig: &Rig<'_, K>) -> DriverResult<()> {
        let mut left = 2 * rig.l2();
        let middle = self.blocks.len() / 2;
        for block in self.blocks[middle..].iter().chain(&self.blocks[..middle]) {
            if left == 0 {
                break;
            }
            let payload = block.payload();
            let words = payload.words.min(left.div_ceil(8));
            rig.read(&Stretch { words, ..payload })?;
            left = left.saturating_sub(8 * words);
        }
        Ok(())
    }
}

/// The middle value; sorts.
pub(super) fn median(values: &mut [f64]) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied()
}
