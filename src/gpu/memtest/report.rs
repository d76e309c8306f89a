//! What a self-test found, as values that serialise under stable names.

use serde::{Serialize, Serializer};

use super::health::{EccCounters, GpuProcess, Replaced};
use super::ledger::Outstanding;
use crate::gpu::driver::DeviceProperties;

/// The verdict on a step, a card or all of them. PASS is said only of what was done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
pub enum Status {
    /// Done, and right.
    #[serde(rename = "pass")]
    Pass,
    /// Not done; the reason says why.
    #[serde(rename = "not-tested")]
    NotTested,
    /// Done, and wrong.
    #[serde(rename = "fail")]
    Fail,
}

impl Status {
    /// `PASS`, `FAIL`, `NOT TESTED`.
    pub const fn text(self) -> &'static str {
        match self {
            Status::Pass => "PASS",
            Status::NotTested => "NOT TESTED",
            Status::Fail => "FAIL",
        }
    }
}

/// Why a card failed, or was not tested.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Cause {
    // Failures, the most telling first.
    /// Blocks overlap, lie where the driver gave nothing, or the books are wrong.
    AllocatorFault,
    /// Two addresses are the same memory.
    AliasedAddresses,
    /// Bits that cannot be changed.
    StuckBit,
    /// Bits that were wrong once and right when written or read again.
    FlippedBit,
    /// A driver call failed, other than for lack of memory.
    DriverError,
    /// Work did not end within the time limit.
    Timeout,
    /// An event was not done although its stream was.
    LateEvents,
    /// The kernels do not do what they should.
    Kernels,
    /// Memory did not come back, and nobody else took it.
    Leak,
    /// Error counters of the card moved.
    EccErrors,
    /// Rows were remapped, or wait for it.
    RowsRemapped,
    /// The driver reported an Xid event.
    Xid,
    // Reasons not to test.
    /// There is no device or no driver.
    NoDevice,
    /// Other processes compute on the card.
    Busy,
    /// The memory could not be had.
    OutOfMemory,
    /// The driver refuses what is needed.
    Unsupported,
    /// The time budget was spent.
    Budget,
    /// An earlier step failed in a way that makes going on pointless.
    Stopped,
}

/// An address or word in JSON: `0x…`, because JSON readers lose digits of 64-bit numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Hex(pub u64);

impl Serialize for Hex {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&format_args!("{:#018x}", self.0))
    }
}

impl std::fmt::Display for Hex {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

/// One step with its verdict.
#[derive(Debug, Clone, Serialize)]
pub struct Step {
    /// Stable name: `own-address`, `walking`, `books`.
    pub name: &'static str,
    /// What it does, for people.
    pub title: &'static str,
    pub status: Status,
    /// Of a failure or of a step that was not done.
    pub cause: Option<Cause>,
    /// Why it failed or was not done, or a figure worth knowing.
    pub detail: Option<String>,
    /// Passes over the memory.
    pub passes: u64,
    /// Words that were wrong.
    pub mismatches: u64,
    /// By the clock of the driver.
    pub seconds: f64,
}

/// A wrong word.
#[derive(Debug, Clone, Serialize)]
pub struct Mismatch {
    /// The step that found it.
    pub step: &'static str,
    pub address: Hex,
    /// Bytes from the start of the memory under test, block after block; `None` outside of it (the test's own words).
    pub offset: Option<u64>,
    /// Which block.
    pub block: Option<usize>,
    pub expected: Hex,
    pub got: Hex,
    pub xor: Hex,
    /// What a second read gave, where nothing was written in between.
    pub again: Option<Hex>,
}

/// Something found to be wrong, with its cause.
#[derive(Debug, Clone, Serialize)]
pub struct Finding {
    pub cause: Cause,
    pub step: &'static str,
    /// One sentence.
    pub text: String,
    /// Addresses that matter: the broken words, or pairs of aliases.
    pub addresses: Vec<Hex>,
    /// Distance in bytes at which it repeats, if it does.
    pub period: Option<u64>,
    /// Of a driver error.
    pub call: Option<String>,
    /// Of a driver error: the `CUresult`.
    pub code: Option<u32>,
}

/// How often a bit was wrong.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct BitCount {
    /// 0 is the lowest of the 64.
    pub bit: u32,
    /// Expected 0, read 1.
    pub set: u64,
    /// Expected 1, read 0.
    pub cleared: u64,
}

/// One pass over the memory.
#[derive(Debug, Clone, Serialize)]
pub struct PassFigure {
    pub step: &'static str,
    /// `fill`, `verify`, `exchange`, …
    pub kind: &'static str,
    /// Bytes read and written.
    pub bytes: u64,
    pub milliseconds: f64,
    /// 10^9 bytes a second; 0 where the time was too short to measure.
    pub gb_per_s: f64,
}

/// The bandwidth of a kind of pass.
#[derive(Debug, Clone, Serialize)]
pub struct Bandwidth {
    pub kind: &'static str,
    pub passes: u64,
    /// Median, in 10^9 bytes a second.
    pub gb_per_s: f64,
    /// Part of the card's own copy rate.
    pub of_copy_rate: Option<f64>,
}

/// How much was tested.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Coverage {
    /// Bytes that every pattern of the level went through.
    pub bytes: u64,
    /// Bytes of the card.
    pub total: u64,
    /// Bytes free at the start.
    pub free: u64,
    /// Bytes left free on purpose.
    pub reserve: u64,
    pub of_total: f64,
    pub of_free: f64,
    /// Why less than 90 % of the free memory without the reserve was taken.
    pub shortfall: Option<String>,
}

/// A block of memory under test.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct BlockFigure {
    pub address: Hex,
    pub bytes: u64,
    /// Bytes from the start of the memory under test.
    pub offset: u64,
    /// Wrong words found in it.
    pub mismatches: u64,
}

/// Whether everything was given back. Bytes.
#[derive(Debug, Clone, Serialize)]
pub struct Books {
    /// Free memory of the card after the warm-up.
    pub baseline_free: u64,
    /// The same after the test and `empty_cache`.
    pub final_free: u64,
    /// What the allocator still holds.
    pub reserved: u64,
    /// What the driver was asked for and not given back.
    pub outstanding: Outstanding,
    /// Processes that hold more than before: pid and bytes.
    pub taken_by: Vec<(u32, u64)>,
}

/// The driver's own view, before and after.
#[derive(Debug, Clone, Default, Serialize)]
pub struct HealthFigures {
    pub source: String,
    pub ecc_before: Option<EccCounters>,
    pub ecc_after: Option<EccCounters>,
    pub replaced_before: Option<Replaced>,
    pub replaced_after: Option<Replaced>,
    pub xids: Option<Vec<u64>>,
    pub processes: Option<Vec<GpuProcess>>,
}

/// One card.
#[derive(Debug, Clone, Serialize)]
pub struct DeviceReport {
    /// As it was asked for: `cuda:0`.
    pub device: String,
    pub properties: Option<DeviceProperties>,
    pub status: Status,
    pub cause: Option<Cause>,
    /// The verdict in one sentence.
    pub summary: String,
    /// Next things to try.
    pub hints: Vec<String>,
    /// `native` or `expandable`: through which kind of segments the patterns went.
    pub segments: &'static str,
    /// Of the random patterns: the same seed gives the same test.
    pub seed: u64,
    pub seconds: f64,
    pub coverage: Coverage,
    pub steps: Vec<Step>,
    pub findings: Vec<Finding>,
    /// Wrong words in all.
    pub mismatch_count: u64,
    /// The first of them, at most [`super::MOST_MISMATCHES`].
    pub mismatches: Vec<Mismatch>,
    /// Bits that were ever wrong.
    pub bits: Vec<BitCount>,
    /// The card's own copy rate: median of copies on the device, 10^9 bytes read and written a second.
    pub copy_gb_per_s: Option<f64>,
    pub bandwidth: Vec<Bandwidth>,
    /// The first passes, at most [`super::MOST_PASSES`].
    pub passes: Vec<PassFigure>,
    pub blocks: Vec<BlockFigure>,
    pub books: Option<Books>,
    pub health: HealthFigures,
}

/// A whole self-test.
#[derive(Debug, Clone, Serialize)]
pub struct Report {
    pub status: Status,
    /// Why nothing was tested, where there is no card to speak of.
    pub reason: Option<String>,
    pub hints: Vec<String>,
    pub level: super::Level,
    pub devices: Vec<DeviceReport>,
}

impl Report {
    /// Puts the verdicts together: a failure counts most, then what was not tested.
    pub fn new(level: super::Level, devices: Vec<DeviceReport>) -> Self {
        let status = devices.iter().map(|device| device.status).max().unwrap_or(Status::NotTested);
        Report { status, reason: None, hints: Vec::new(), level, devices }
    }

    /// Nothing could be tested.
    pub fn not_tested(level: super::Level, reason: impl Into<String>, hints: Vec<String>) -> Self {
        Report { status: Status::NotTested, reason: Some(reason.into()), hints, level, devices: Vec::new() }
    }

    /// 0 for PASS, 6 for FAIL; NOT TESTED is 0, or 8 where a test was required.
    pub fn exit_code(&self, required: bool) -> u8 {
        match self.status {
            Status::Pass => 0,
            Status::Fail => crate::error::Kind::GpuCheck.exit_code(),
            Status::NotTested if required => crate::error::Kind::NotTested.exit_code(),
            Status::NotTested => 0,
        }
    }
}
