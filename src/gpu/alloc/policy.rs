//! Which rules hold in which torch version, and what proves it.
//!
//! The rules are those of PyTorch's native CUDA caching allocator (`c10/cuda/CUDACachingAllocator.cpp`). A rule counts
//! as proven where recorded traces come out address for address under it ([`Evidence::Traces`]); everything else is
//! printed as unverified, with what it rests on.

use std::fmt;
use std::str::FromStr;

/// A torch version, as far as the rules care.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TorchVersion {
    pub major: u32,
    pub minor: u32,
}

impl TorchVersion {
    /// `major.minor`.
    pub const fn new(major: u32, minor: u32) -> Self {
        TorchVersion { major, minor }
    }
    /// The newest version whose rules this crate knows in full from traces.
    pub const NEWEST_PROVEN: TorchVersion = TorchVersion::new(2, 10);
    /// The newest version whose source was read for these rules.
    pub const NEWEST_READ: TorchVersion = TorchVersion::new(2, 15);
}

impl fmt::Display for TorchVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

impl FromStr for TorchVersion {
    type Err = crate::error::Error;

    /// Reads `2.7`, `2.7.1`, `2.7.1+cu126`, `v2.7`.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let bad = || {
            crate::error::Error::usage(format!("`{}` is not a torch version", text.escape_debug()))
                .hint("write it as MAJOR.MINOR, for example 2.7")
        };
        let mut parts = text.trim().trim_start_matches('v').split(['.', '+']);
        let mut number = || parts.next().and_then(|part| part.parse().ok());
        let (Some(major), Some(minor)) = (number(), number()) else { return Err(bad()) };
        Ok(TorchVersion { major, minor })
    }
}

/// How free blocks of equal size on one stream are ordered; the first one is taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum TieBreak {
    /// Lowest address first: every torch up to 2.10.
    Address,
    /// Highest address first: no torch does this; the control experiment of replay.
    AddressDescending,
    /// Oldest block object first. An object is made by a driver allocation, or as the front part of a split; the
    /// remainder of a split and the result of a merge keep their old number. torch 2.11 and later.
    Registration,
}

/// What a rule rests on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Evidence {
    /// Recorded traces come out exactly, and stop doing so when the rule is changed.
    Traces,
    /// Read in the source of that version; no trace reaches it.
    Source,
    /// Taken from memory or extrapolated.
    Assumed,
}

impl Evidence {
    /// Whether recorded traces prove the rule.
    pub fn is_verified(self) -> bool {
        self == Evidence::Traces
    }
}

impl fmt::Display for Evidence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Evidence::Traces => "verified by traces",
            Evidence::Source => "unverified (read in the source, no trace reaches it)",
            Evidence::Assumed => "unverified (assumed)",
        })
    }
}

/// One line of the policy table.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct RuleRow {
    /// The rule's short name, stable.
    pub rule: &'static str,
    /// What holds under this policy.
    pub value: String,
    pub evidence: Evidence,
}

/// The rules of one torch version.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Policy {
    /// The torch version these rules are for.
    pub version: TorchVersion,
    pub tie_break: TieBreak,
    /// `roundup_power2_divisions`: whether `>` fills from the interval after the last one named (newer) or from that
    /// one itself (older).
    pub roundup_rest_after_last: bool,
    /// Whether `max_split_size_mb` may equal the large segment size (newer) or must exceed 20 (older).
    pub max_split_may_equal_segment: bool,
    /// Whether the option `large_segment_size_mb` exists.
    pub large_segment_option: bool,
    /// Whether `expandable_segments_reserve` and `_by_class` exist.
    pub reserve_option: bool,
    /// Whether only graph captures count as capturing (newer), or every pool that is being allocated to (older).
    pub only_graphs_capture: bool,
    /// Whether pools may serve as a last resort before an out-of-memory error (`use_on_oom`).
    pub pool_fallback: bool,
    /// Whether `throw_on_cudamalloc_oom` exists.
    pub throw_on_oom_option: bool,
    /// Whether `per_process_memory_fraction` exists as an option.
    pub fraction_option: bool,
    /// Whether a fraction of exactly 1 sets a limit (older) or lifts it (newer).
    pub full_fraction_limits: bool,
    /// Whether `max_split_size_mb` together with expandable segments crashes (before 2.5).
    pub split_with_expandable_crashes: bool,
    /// Whether `PYTORCH_ALLOC_CONF` is read at all (2.9 on).
    pub alloc_conf_variable: bool,
    /// Whether `PYTORCH_ALLOC_CONF` exists but does nothing for CUDA (2.9).
    pub alloc_conf_ignored: bool,
}

impl Policy {
    /// The rules of PyTorch `version`. Versions newer than the newest one read get that one's rules, unverified.
    pub const fn pytorch(version: TorchVersion) -> Self {
        let TorchVersion { major, minor } = version;
        let key = if major < 2 {
            0
        } else if major > 2 {
            u32::MAX
        } else {
            minor
        };
        Policy {
            version,
            tie_break: if key >= 11 { TieBreak::Registration } else { TieBreak::Address },
            roundup_rest_after_last: key >= 9,
            max_split_may_equal_segment: key >= 11,
            large_segment_option: key >= 11,
            reserve_option: key >= 15,
            only_graphs_capture: key >= 11,
            pool_fallback: key >= 8,
            throw_on_oom_option: key >= 11,
            fraction_option: key >= 9,
            full_fraction_limits: key < 9,
            split_with_expandable_crashes: key < 5,
            alloc_conf_variable: key >= 9,
            alloc_conf_ignored: key == 9,
        }
    }

    /// The rules of the newest version that traces prove.
    pub const fn proven() -> Self {
        Self::pytorch(TorchVersion::NEWEST_PROVEN)
    }

    /// The same rules with another tie-break.
    #[must_use]
    pub const fn with_tie_break(mut self, tie_break: TieBreak) -> Self {
        self.tie_break = tie_break;
        self
    }

    /// What the core rules (rounding, best fit with its tie-break, splitting, merging, when to ask the driver and for
    /// how much) rest on under the default configuration.
    pub fn core_evidence(&self) -> Evidence {
        match self.tie_break {
            TieBreak::Address if self.version >= TorchVersion::new(2, 0) && self.version <= TorchVersion::NEWEST_PROVEN => Evidence::Traces,
            TieBreak::Registration if self.version > TorchVersion::NEWEST_PROVEN && self.version <= TorchVersion::NEWEST_READ => {
                Evidence::Source
            }
            _ => Evidence::Assumed,
        }
    }

    /// The table rule x value x evidence for this version, in the order of the documentation.
    pub fn table(&self) -> Vec<RuleRow> {
        let read = if self.version <= TorchVersion::NEWEST_READ { Evidence::Source } else { Evidence::Assumed };
        let core = self.core_evidence();
        let mapped = |yes: bool, a: &str, b: &str| if yes { a.to_owned() } else { b.to_owned() };
        let row = |rule, value: String, evidence| RuleRow { rule, value, evidence };
        vec![
            row("rounding", "multiples of 512 B, at least 512 B".into(), core),
            row("pools", "small up to 1 MiB after rounding, else large; free blocks are never shared between streams".into(), core),
            row("segment-size", "2 MiB; 20 MiB below 10 MiB; else up to the next 2 MiB".into(), core),
            row("best-fit", "smallest free block that fits".into(), core),
            row(
                "tie-break",
                match self.tie_break {
                    TieBreak::Address => "lowest address".into(),
                    TieBreak::AddressDescending => "highest address (control)".into(),
                    TieBreak::Registration => "oldest block object (registration counter)".into(),
                },
                core,
            ),
            row("split", "small: rest >= 512 B; large: rest > 1 MiB".into(), core),
            row("merge", "with free neighbours, previous first".into(), core),
            row("release-order", "large pool by size and address, then small pool; only whole segments".into(), core),
            row("split-limit", "a request below max_split_size takes no block at or above it; above, slack is limited".into(), read),
            row(
                "split-limit-minimum",
                mapped(self.max_split_may_equal_segment, "at least large_segment_size_mb", "more than 20 MiB"),
                read,
            ),
            row(
                "roundup-divisions",
                mapped(
                    self.roundup_rest_after_last,
                    "`>` fills from the interval after the last named",
                    "`>` fills from the last named interval",
                ),
                Evidence::Assumed.max(read),
            ),
            row(
                "large-segment-size",
                mapped(self.large_segment_option, "option large_segment_size_mb", "fixed 20 MiB"),
                if self.large_segment_option { read } else { core },
            ),
            row("garbage-collection", "by age of unsplit blocks of the large pool, only with a memory fraction below 1".into(), read),
            row(
                "memory-fraction",
                mapped(self.full_fraction_limits, "a fraction of 1 still sets a limit", "a fraction of 1 lifts the limit"),
                Evidence::Assumed.max(read),
            ),
            row("out-of-memory-order", self.oom_order(), read),
            row("record-stream", "an event per other stream; reuse when a later malloc sees all done".into(), read),
            row("expandable-segments", "pages of 2 MiB (small) and of the large segment size; 9/8 of the device reserved".into(), read),
            row(
                "capture",
                mapped(self.only_graphs_capture, "only graph captures defer frees", "any pool being allocated to defers frees"),
                Evidence::Assumed.max(read),
            ),
            row("private-pools", "memory goes back by empty_cache after the last user released the pool".into(), read),
            row("size-cap", "requests of 2^60 B and more are refused".into(), Evidence::Assumed),
        ]
    }

    fn oom_order(&self) -> String {
        let mut order = String::new();
        if self.pool_fallback {
            order.push_str("use_on_oom pools, ");
        }
        order.push_str("oversize cached blocks, all cached blocks, error");
        order
    }

    /// The table as text, one line a rule.
    pub fn describe(&self) -> String {
        use fmt::Write as _;
        let mut text = format!("rules of torch {}\n", self.version);
        for row in self.table() {
            let _ = writeln!(text, "  {:<22} {} [{}]", row.rule, row.value, row.evidence);
        }
        text
    }
}

impl Default for Policy {
    fn default() -> Self {
        Policy::proven()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read_leniently_and_refused_with_a_hint() {
        for text in ["2.7", "v2.7.1", "2.7.1+cu126", " 2.7.0a0 "] {
            assert_eq!(text.parse::<TorchVersion>().ok(), Some(TorchVersion::new(2, 7)), "{text}");
        }
        let error = "two".parse::<TorchVersion>().err().map(|e| (e.to_string(), e.hints().len()));
        assert_eq!(error, Some(("`two` is not a torch version".into(), 1)));
    }

    #[test]
    fn the_tie_break_changes_with_2_11_and_is_then_unverified() {
        let old = Policy::pytorch(TorchVersion::new(2, 10));
        assert_eq!((old.tie_break, old.core_evidence()), (TieBreak::Address, Evidence::Traces));
        let new = Policy::pytorch(TorchVersion::new(2, 11));
        assert_eq!((new.tie_break, new.core_evidence()), (TieBreak::Registration, Evidence::Source));
        assert_eq!(Policy::pytorch(TorchVersion::new(3, 0)).core_evidence(), Evidence::Assumed);
        assert_eq!(old.with_tie_break(TieBreak::AddressDescending).core_evidence(), Evidence::Assumed);
        assert!(new.describe().contains("oldest block object (registration counter) [unverified"));
    }
}
