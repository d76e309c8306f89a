//! Simulated cards by description: `sim:8GiB,stuck=0x1234567:3`.

use std::time::Duration;

use super::health::{EccCounters, GpuProcess, HealthSource, Reading, Replaced};
use super::{Card, Opened};
use crate::error::{Error, Result};
use crate::gpu::driver::sim::{MemoryFault, SimConfig, SimGpu};
use crate::gpu::driver::{Call, DriverError, code};
use crate::gpu::simulate::scenario::parse_size;

/// Launch at which counters move and memory goes: after the warm-up, before the end of any test.
const MOVE_AT: u64 = 60;
/// Process number of the others that the simulated card knows.
const SOMEBODY: u32 = 4242;

/// When a fault of memory comes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum When {
    Start,
    /// Before this comparison of the place.
    Check(u64),
}

/// One thing that is not as it should be.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Fault {
    Memory(MemoryFault, When),
    /// Addresses, because granules are known only with the card.
    Alias(u64, u64, When),
    OutOfMemory(u64),
    Code {
        call: Call,
        nth: u64,
        code: u32,
        forever: bool,
    },
    DelayEvents(u64),
    NoVirtualMemory,
    Others(u64),
    Busy(u64),
    Ecc {
        corrected: u64,
        uncorrected: u64,
    },
    Remap(u64),
    RemapPending,
    Xid(u64),
    /// Memory that goes during the test; with or without a process that has it.
    Gone {
        bytes: u64,
        process: bool,
    },
    NoHealth,
    Granule(u64),
}

/// A simulated card with what is wrong with it.
#[derive(Debug, Clone)]
pub struct SimCard {
    name: String,
    capacity: u64,
    faults: Vec<Fault>,
}

/// Faults as they are written, for the documentation and for errors.
pub const FAULTS: [(&str, &str); 22] = [
    ("stuck=ADDRESS:BIT[:VALUE]", "the bit (0 to 7) of a byte always reads as VALUE, 1 if not given"),
    ("flip=ADDRESS:BIT[@N]", "the bit is flipped once, just before the Nth comparison of its place"),
    ("misread=ADDRESS:BIT[@N]", "the bit is read wrong once, in the Nth comparison of its place"),
    ("alias=ADDRESS:ADDRESS[@N]", "the unit of memory (2 MiB) around the first address is answered by that around the second"),
    ("oom=SIZE", "the driver says out of memory once SIZE is in use"),
    ("code=CALL:N:CODE", "the Nth call of a driver function fails with a status code"),
    ("code-from=CALL:N:CODE", "all of them from the Nth on"),
    ("late-events[=MS]", "events are done later than their work (5 ms)"),
    ("stuck-events", "events are never done"),
    ("vmm-refused", "virtual memory management fails with code 999, as on WSL2"),
    ("no-vmm", "the device has no virtual memory management"),
    ("others=SIZE", "held by others that compute nothing"),
    ("busy=SIZE", "held by a process that computes"),
    ("ecc=N", "N corrected memory errors during the test"),
    ("ecc-uncorrected=N", "N uncorrected ones"),
    ("remap=N", "N rows are remapped during the test"),
    ("remap-pending", "a row waits to be remapped"),
    ("xid=N", "the driver reports Xid N during the test"),
    ("leak=SIZE", "memory that does not come back"),
    ("grab=SIZE", "memory that another process takes during the test"),
    ("granule=SIZE", "the unit of memory, for aliases: 64KiB to 2MiB, the default"),
    ("no-nvml", "the driver's own counters cannot be read"),
];

fn address(text: &str) -> Option<u64> {
    match text.strip_prefix("0x") {
        Some(hex) => u64::from_str_radix(&hex.replace('_', ""), 16).ok(),
        None => parse_size(text),
    }
}

impl SimCard {
    /// Reads what follows `sim:`: a size, then faults, separated by commas. `fault=NAME:…` is the same as `NAME=…`.
    ///
    /// # Errors
    /// A size or fault that does not exist (usage).
    pub fn parse(text: &str) -> Result<SimCard> {
        let mut parts = text.split(',').map(str::trim);
        let size = parts.next().unwrap_or_default();
        let capacity = parse_size(size)
            .filter(|bytes| (16 << 20..=1 << 44).contains(bytes))
            .ok_or_else(|| Error::usage(format!("`{size}` is no size of a simulated card")).hint("such as sim:8GiB; at least 16 MiB"))?;
        let mut faults = Vec::new();
        for part in parts {
            let (name, value) = match part.split_once('=').unwrap_or((part, "")) {
                ("fault", value) => value.split_once(':').unwrap_or((value, "")),
                pair => pair,
            };
            faults.push(fault(name, value).ok_or_else(|| unknown(part, name))?);
        }
        let card = SimCard { name: format!("sim:{text}"), capacity, faults };
        card.possible(size)?;
        let inside = |place: u64| place < card.capacity;
        for fault in &card.faults {
            let places = match fault {
                Fault::Memory(
                    MemoryFault::Stick { physical, .. } | MemoryFault::Flip { physical, .. } | MemoryFault::Misread { physical, .. },
                    _,
                ) => vec![*physical],
                Fault::Alias(from, to, _) => vec![*from, *to],
                _ => Vec::new(),
            };
            if let Some(place) = places.into_iter().find(|place| !inside(*place)) {
                return Err(Error::usage(format!("address {place:#x} is outside the card of {size}")));
            }
        }
        Ok(card)
    }

    /// A card that cannot be as it is described would say nothing about the fault.
    fn possible(&self, size: &str) -> Result<()> {
        let human = crate::gpu::human;
        let refuse = |what: String, hint: &str| Err(Error::usage(format!("a card of {size} cannot be like that: {what}")).hint(hint));
        let mut held = 0u64;
        for fault in &self.faults {
            match fault {
                Fault::Others(bytes) | Fault::Busy(bytes) => held = held.saturating_add(*bytes),
                Fault::Gone { bytes, .. } if *bytes > self.capacity => {
                    return refuse(format!("{} would go during the test", human(*bytes)), "`leak` and `grab` take less than the card has");
                }
                Fault::OutOfMemory(bytes) if *bytes > self.capacity => {
                    return refuse(
                        format!("{} are never in use", human(*bytes)),
                        "`oom=SIZE` is the memory in use from which on the driver says out of memory: less than the card has",
                    );
                }
                _ => {}
            }
        }
        if held > self.capacity {
            return refuse(format!("others would hold {}", human(held)), "`others` and `busy` together are at most the size of the card");
        }
        let unit = self.unit();
        for fault in &self.faults {
            if let Fault::Alias(from, to, _) = fault
                && from / unit == to / unit
            {
                return refuse(
                    format!("{from:#x} and {to:#x} lie in one unit of memory ({}), which always answers for itself", human(unit)),
                    "an alias is of two units; `granule=64KiB` makes them smaller",
                );
            }
        }
        Ok(())
    }

    /// Bytes of the unit of memory: the last one that was asked for, else the simulated driver's.
    fn unit(&self) -> u64 {
        let asked = self.faults.iter().rev().find_map(|fault| if let Fault::Granule(bytes) = fault { Some(*bytes) } else { None });
        asked.unwrap_or_else(|| SimConfig::new(self.capacity).granularity)
    }

    /// The card, with its faults. Addresses of faults are physical.
    pub fn build(&self) -> (SimGpu, SimHealth) {
        let mut config = SimConfig { name: "simulated GPU".to_owned(), ..SimConfig::new(self.capacity) };
        let mut health = SimHealth::default();
        for fault in &self.faults {
            match fault {
                Fault::Granule(bytes) => config.granularity = *bytes,
                Fault::NoVirtualMemory => config.virtual_memory = false,
                Fault::Others(bytes) => config.others += bytes,
                Fault::Busy(bytes) => {
                    config.others += bytes;
                    health.busy = Some(*bytes);
                }
                Fault::Ecc { corrected, uncorrected } => {
                    health.ecc.volatile_corrected += corrected;
                    health.ecc.volatile_uncorrected += uncorrected;
                }
                Fault::Remap(rows) => health.remapped += rows,
                Fault::RemapPending => health.pending = true,
                Fault::Xid(xid) => health.xids.push(*xid),
                Fault::Gone { bytes, process: true } => health.taken += bytes,
                Fault::NoHealth => health.silent = true,
                _ => {}
            }
        }
        let unit = config.granularity;
        let gpu = SimGpu::with(config);
        for fault in &self.faults {
            let memory = |fault: MemoryFault, when: When| match when {
                When::Start => gpu.break_at_launch(1, fault),
                When::Check(nth) => gpu.break_at_check(nth, fault),
            };
            match fault {
                Fault::Memory(fault, when) => memory(*fault, *when),
                Fault::Alias(from, to, when) => {
                    let granule = |address: u64| u32::try_from(address / unit).unwrap_or(u32::MAX);
                    memory(MemoryFault::Alias { from: granule(*from), to: granule(*to) }, *when);
                }
                Fault::OutOfMemory(bytes) => gpu.limit_memory(*bytes),
                Fault::Code { call, nth, code, forever: false } => gpu.fail(*call, *nth, *code),
                Fault::Code { call, nth, code, forever: true } => gpu.fail_from(*call, *nth, *code),
                Fault::DelayEvents(time) => gpu.delay_events(*time),
                Fault::Gone { bytes, .. } => gpu.break_at_launch(MOVE_AT, MemoryFault::Gone { bytes: *bytes }),
                _ => {}
            }
        }
        health.gpu = Some(gpu.clone());
        (gpu, health)
    }
}

fn unknown(part: &str, name: &str) -> Error {
    let known = FAULTS.iter().find(|(grammar, _)| grammar.split(['=', '[']).next() == Some(name));
    match known {
        Some((grammar, what)) => Error::usage(format!("`{part}` is no fault of a simulated card")).hint(format!("{grammar}: {what}")),
        None => {
            let names: Vec<&str> = FAULTS.iter().filter_map(|(grammar, _)| grammar.split(['=', '[']).next()).collect();
            Error::usage(format!("there is no fault `{name}` for a simulated card")).hint(format!("faults: {}", names.join(", ")))
        }
    }
}

fn fault(name: &str, value: &str) -> Option<Fault> {
    let (value, nth) = match value.split_once('@') {
        Some((value, nth)) => (value, When::Check(nth.parse().ok().filter(|nth| *nth > 0)?)),
        None => (value, if matches!(name, "flip" | "misread") { When::Check(1) } else { When::Start }),
    };
    let parts: Vec<&str> = value.split(':').collect();
    let bit = |text: &str| text.parse().ok().filter(|bit| *bit < 8).map(|bit: u8| 1u8 << bit);
    let size = || parse_size(value).filter(|bytes| *bytes > 0);
    let bare = |fault: Fault| value.is_empty().then_some(fault);
    Some(match (name, &parts[..]) {
        ("stuck", [place, at]) => Fault::Memory(MemoryFault::Stick { physical: address(place)?, mask: bit(at)?, value: 0xFF }, nth),
        ("stuck", [place, at, value @ ("0" | "1")]) => {
            let value = if *value == "1" { 0xFF } else { 0 };
            Fault::Memory(MemoryFault::Stick { physical: address(place)?, mask: bit(at)?, value }, nth)
        }
        ("flip", [place, at]) => Fault::Memory(MemoryFault::Flip { physical: address(place)?, mask: bit(at)? }, nth),
        ("misread", [place, at]) => Fault::Memory(MemoryFault::Misread { physical: address(place)?, mask: bit(at)? }, nth),
        ("alias", [from, to]) => Fault::Alias(address(from)?, address(to)?, nth),
        ("oom", _) => Fault::OutOfMemory(size()?),
        ("code" | "code-from", [call, count, number]) => Fault::Code {
            call: Call::from_name(call)?,
            nth: count.parse().ok().filter(|nth| *nth > 0)?,
            code: number.parse().ok().filter(|code| *code > 0)?,
            forever: name == "code-from",
        },
        ("late-events", [""]) => Fault::DelayEvents(5_000_000),
        ("late-events", [time]) => Fault::DelayEvents(time.parse::<u64>().ok()?.checked_mul(1_000_000)?),
        ("stuck-events", _) => bare(Fault::DelayEvents(u64::MAX / 4))?,
        ("vmm-refused", _) => bare(Fault::Code { call: Call::MemSetAccess, nth: 1, code: code::UNKNOWN, forever: true })?,
        ("no-vmm", _) => bare(Fault::NoVirtualMemory)?,
        ("others", _) => Fault::Others(size()?),
        ("busy", _) => Fault::Busy(size()?),
        ("ecc", [count]) => Fault::Ecc { corrected: count.parse().ok()?, uncorrected: 0 },
        ("ecc-uncorrected", [count]) => Fault::Ecc { corrected: 0, uncorrected: count.parse().ok()? },
        ("remap", [count]) => Fault::Remap(count.parse().ok()?),
        ("remap-pending", _) => bare(Fault::RemapPending)?,
        ("xid", [number]) => Fault::Xid(number.parse().ok()?),
        ("leak", _) => Fault::Gone { bytes: size()?, process: false },
        ("grab", _) => Fault::Gone { bytes: size()?, process: true },
        ("granule", _) => Fault::Granule(size().filter(|bytes| bytes.is_power_of_two() && (64 << 10..=2 << 20).contains(bytes))?),
        ("no-nvml", _) => bare(Fault::NoHealth)?,
        _ => return None,
    })
}

impl Card for SimCard {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn open(&self) -> std::result::Result<Opened, DriverError> {
        let (gpu, health) = self.build();
        Ok(Opened { driver: Box::new(gpu), health: Box::new(health) })
    }
}

/// What the driver of a simulated card would tell.
#[derive(Debug, Clone, Default)]
pub struct SimHealth {
    gpu: Option<SimGpu>,
    silent: bool,
    busy: Option<u64>,
    taken: u64,
    ecc: EccCounters,
    remapped: u64,
    pending: bool,
    xids: Vec<u64>,
}

impl SimHealth {
    fn moved(&self) -> bool {
        self.gpu.as_ref().is_some_and(|gpu| gpu.calls(Call::LaunchKernel) >= MOVE_AT)
    }

    fn told<T>(&self, value: T) -> Reading<T> {
        if self.silent { Err("the simulated card has no NVML".to_owned()) } else { Ok(value) }
    }
}

impl HealthSource for SimHealth {
    fn name(&self) -> String {
        "simulated".to_owned()
    }
    fn ecc(&self) -> Reading<EccCounters> {
        self.told(if self.moved() { self.ecc } else { EccCounters::default() })
    }
    fn replaced(&self) -> Reading<Replaced> {
        let corrected = if self.moved() { self.remapped } else { 0 };
        self.told(Replaced { corrected, pending: self.pending, ..Replaced::default() })
    }
    fn watch_xids(&self) -> Reading<()> {
        self.told(())
    }
    fn xids(&self) -> Reading<Vec<u64>> {
        self.told(if self.moved() { self.xids.clone() } else { Vec::new() })
    }
    fn processes(&self) -> Reading<Vec<GpuProcess>> {
        let somebody =
            |bytes, compute| GpuProcess { pid: SOMEBODY, name: Some("somebody".into()), bytes: Some(bytes), compute, own: false };
        let mut list: Vec<GpuProcess> = self.busy.map(|bytes| somebody(bytes, true)).into_iter().collect();
        // The context is there as long as the card is.
        list.extend(self.gpu.as_ref().map(|gpu| GpuProcess {
            pid: std::process::id(),
            name: None,
            bytes: Some(gpu.usage().bytes),
            compute: true,
            own: true,
        }));
        if self.taken > 0 {
            list.push(somebody(if self.moved() { self.taken } else { 0 }, false));
        }
        self.told(list)
    }
}

/// How long the clock of a simulated card runs for a pass is no measure of anything: rounds are limited instead.
pub const ROUNDS: u32 = 1;
/// Never waits for real.
pub const TIMEOUT: Duration = Duration::from_secs(60);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptions_are_read() {
        let card = SimCard::parse("64MiB,stuck=0x10_0007:3,flip=8MiB:0@4,alias=2MiB:6MiB,oom=40MiB,code=cuMemAlloc:2:999").expect("valid");
        assert_eq!((card.capacity, card.faults.len()), (64 << 20, 5));
        assert_eq!(card.faults[1], Fault::Memory(MemoryFault::Flip { physical: 8 << 20, mask: 1 }, When::Check(4)));
        let same = SimCard::parse("64MiB,fault=stuck:0x100007:3").expect("valid");
        assert_eq!(same.faults[0], card.faults[0]);
        for (grammar, _) in FAULTS {
            let text = grammar
                .replace("ADDRESS:ADDRESS", "4MiB:8MiB")
                .replace("ADDRESS", "4MiB")
                .replace("BIT", "5")
                .replace("[:VALUE]", ":0")
                .replace("[@N]", "@2")
                .replace("[=MS]", "=7")
                .replace("granule=SIZE", "granule=128KiB")
                .replace("SIZE", "8MiB")
                .replace("CALL", "MemCreate")
                .replace("CODE", "2")
                .replace('N', "3");
            assert!(SimCard::parse(&format!("64MiB,{text}")).is_ok(), "{text}");
        }
    }

    #[test]
    fn what_does_not_exist_is_refused_with_a_hint() {
        for text in [
            "",
            "8",
            "8MiB",
            "x",
            "64MiB,stuck=1",
            "64MiB,stuck=1:9",
            "64MiB,stuck=65MiB:1",
            "64MiB,others=1TiB",
            "64MiB,others=40MiB,busy=40MiB",
            "64MiB,grab=65MiB",
            "64MiB,alias=0:0",
            "64MiB,alias=2MiB:0x3fffff",
            "64MiB,granule=64KiB,alias=0x10000:0x1ffff",
            "64MiB,oom=1GiB",
            "64MiB,melted",
            "64MiB,code=cuX:1:2",
            "64MiB,flip=1:1@0",
            "64MiB,no-vmm=1",
        ] {
            let error = SimCard::parse(text).expect_err(text);
            assert_eq!(error.exit_code(), 2, "{text}: {error}");
        }
        assert!(SimCard::parse("64MiB,alias=64KiB:128KiB,granule=64KiB").is_ok(), "two units");
        assert!(SimCard::parse("64MiB,melted").expect_err("no such fault").hints()[0].contains("stuck"));
        assert!(SimCard::parse("64MiB,stuck=1").expect_err("no bit").hints()[0].starts_with("stuck=ADDRESS:BIT"));
    }
}
