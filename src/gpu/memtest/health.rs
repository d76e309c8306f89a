//! The driver's own view of a card, as far as it can be had: error counters, remapped rows, Xid events, processes.

/// A value, or why it cannot be had here (`NVML says: not supported`). What cannot be had is NOT TESTED.
pub type Reading<T> = Result<T, String>;

/// ECC error counters of the whole card, all locations summed up. Volatile ones count since the driver was loaded,
/// aggregate ones since the card was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
pub struct EccCounters {
    pub volatile_corrected: u64,
    pub volatile_uncorrected: u64,
    pub aggregate_corrected: u64,
    pub aggregate_uncorrected: u64,
}

/// Rows of memory that were replaced (Ampere and later), or pages that were retired (before).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
pub struct Replaced {
    /// Because of errors that ECC corrected.
    pub corrected: u64,
    /// Because of errors that ECC could not correct.
    pub uncorrected: u64,
    /// Another one is waiting for the next reset.
    pub pending: bool,
    /// Replacing failed; always false for retired pages.
    pub failed: bool,
}

/// A process that has a context on the card.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct GpuProcess {
    /// As the driver numbers it: inside a container this is the host's number.
    pub pid: u32,
    /// The command, where it can be seen.
    pub name: Option<String>,
    /// Device memory in bytes, where the driver tells.
    pub bytes: Option<u64>,
    /// Compute rather than graphics.
    pub compute: bool,
    /// This process. Where the numbers are not those of this process's namespace: one that came after the source was made
    /// and was not there before.
    pub own: bool,
}

/// What the driver tells about one card. Make it before the first context on the card, so that it can tell whose a process is.
pub trait HealthSource: Send + Sync {
    /// Who answers, for texts: `NVML 550.54.14`.
    fn name(&self) -> String;
    /// Error counters; an error also where ECC is off.
    fn ecc(&self) -> Reading<EccCounters>;
    /// Remapped rows, or retired pages where the card has those.
    fn replaced(&self) -> Reading<Replaced>;
    /// Starts to collect Xid events.
    fn watch_xids(&self) -> Reading<()>;
    /// Codes of the Xid events since the last call, in order. An error where [`watch_xids`](Self::watch_xids) failed.
    fn xids(&self) -> Reading<Vec<u64>>;
    /// Who has a context on the card.
    fn processes(&self) -> Reading<Vec<GpuProcess>>;
}

/// Nobody to ask.
#[derive(Debug, Clone)]
pub struct NoHealth(pub String);

impl HealthSource for NoHealth {
    fn name(&self) -> String {
        "none".to_owned()
    }
    fn ecc(&self) -> Reading<EccCounters> {
        Err(self.0.clone())
    }
    fn replaced(&self) -> Reading<Replaced> {
        Err(self.0.clone())
    }
    fn watch_xids(&self) -> Reading<()> {
        Err(self.0.clone())
    }
    fn xids(&self) -> Reading<Vec<u64>> {
        Err(self.0.clone())
    }
    fn processes(&self) -> Reading<Vec<GpuProcess>> {
        Err(self.0.clone())
    }
}
