//! The configuration of the allocator: the grammar of `PYTORCH_CUDA_ALLOC_CONF` (`c10/core/AllocatorConfig.cpp`,
//! `c10/cuda/CUDAAllocatorConfig.cpp`).
//!
//! ```text
//! conf  = [ entry { "," entry } [ "," ] ]
//! entry = key ":" ( value | "[" item { "," item } "]" )
//! ```
//! White space counts nowhere. Where PyTorch reads on in spite of a wrong separator, so does this reader, with a
//! warning; where PyTorch takes the number at the front of `64abc`, this reader refuses.

use std::fmt;

use super::policy::{Policy, TorchVersion};
use super::sizes::{Divisions, LARGE_SEGMENT, MIB, MIN_LARGE_ALLOC, ROUNDUP_INTERVALS};
use crate::error::{Error, Place};

/// Variables that configure the allocator, in the order in which PyTorch looks for them: the first that is set counts.
pub const VARIABLES: [&str; 3] = ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF"];

/// All keys, sorted.
pub const KEYS: [&str; 20] = [
    "backend",
    "expandable_segments",
    "expandable_segments_reserve",
    "expandable_segments_reserve_by_class",
    "garbage_collection_threshold",
    "graph_capture_record_stream_reuse",
    "large_segment_size_mb",
    "max_non_split_rounding_mb",
    "max_split_size_mb",
    "per_process_memory_fraction",
    "pinned_free_catch_all",
    "pinned_max_cached_size_mb",
    "pinned_max_round_threshold_mb",
    "pinned_num_register_threads",
    "pinned_reserve_segment_size_mb",
    "pinned_use_background_threads",
    "pinned_use_cuda_host_register",
    "release_lock_on_cudamalloc",
    "roundup_power2_divisions",
    "throw_on_cudamalloc_oom",
];

/// Which allocator the configuration selects.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize)]
pub enum Backend {
    /// The caching allocator that this crate models.
    #[default]
    #[serde(rename = "native")]
    Native,
    /// The driver's stream-ordered pools; native settings do nothing.
    #[serde(rename = "cudaMallocAsync")]
    CudaMallocAsync,
}

/// How much address space an expandable segment reserves.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub enum Reserve {
    /// A fraction of the device's memory.
    Fraction(f64),
    /// GiB.
    GiB(f64),
}

impl fmt::Display for Reserve {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Reserve::Fraction(part) => write!(f, "{part}"),
            Reserve::GiB(gib) => write!(f, "{gib}G"),
        }
    }
}

/// Settings for pinned host memory, kept so that they can be shown; this crate does not model that allocator.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct PinnedConfig {
    pub use_cuda_host_register: bool,
    /// A power of two, at most 128.
    pub num_register_threads: u64,
    pub use_background_threads: bool,
    /// MiB; 0 is off.
    pub reserve_segment_size_mb: u64,
    pub free_catch_all: bool,
    /// MiB.
    pub max_round_threshold_mb: Option<u64>,
    /// MiB.
    pub max_cached_size_mb: Option<u64>,
}

impl Default for PinnedConfig {
    fn default() -> Self {
        PinnedConfig {
            use_cuda_host_register: false,
            num_register_threads: 1,
            use_background_threads: false,
            reserve_segment_size_mb: 0,
            free_catch_all: false,
            max_round_threshold_mb: None,
            max_cached_size_mb: None,
        }
    }
}

/// Settings of the allocator, with PyTorch's defaults. Sizes in bytes.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct AllocConfig {
    pub backend: Backend,
    /// `None`: unlimited.
    pub max_split_size: Option<u64>,
    pub max_non_split_rounding_size: u64,
    /// In (0, 1); 0 is off.
    pub garbage_collection_threshold: f64,
    pub roundup_power2_divisions: Divisions,
    pub expandable_segments: bool,
    pub large_segment_size: u64,
    pub release_lock_on_cudamalloc: bool,
    /// In [0, 1].
    pub per_process_memory_fraction: f64,
    pub throw_on_cudamalloc_oom: bool,
    pub graph_capture_record_stream_reuse: bool,
    pub expandable_segments_reserve: Option<Reserve>,
    /// Reserves of streams that are given a class in code; kept, but no stream has a class here.
    pub expandable_segments_reserve_by_class: Vec<(String, Reserve)>,
    /// Settings of the allocator of pinned host memory; none of them changes device memory.
    pub pinned: PinnedConfig,
    /// Every request goes straight to the driver (`PYTORCH_NO_CUDA_MEMORY_CACHING`).
    pub no_caching: bool,
}

impl Default for AllocConfig {
    fn default() -> Self {
        AllocConfig {
            backend: Backend::Native,
            max_split_size: None,
            max_non_split_rounding_size: LARGE_SEGMENT,
            garbage_collection_threshold: 0.0,
            roundup_power2_divisions: [0; ROUNDUP_INTERVALS],
            expandable_segments: false,
            large_segment_size: LARGE_SEGMENT,
            release_lock_on_cudamalloc: false,
            per_process_memory_fraction: 1.0,
            throw_on_cudamalloc_oom: false,
            graph_capture_record_stream_reuse: false,
            expandable_segments_reserve: None,
            expandable_segments_reserve_by_class: Vec::new(),
            pinned: PinnedConfig::default(),
            no_caching: false,
        }
    }
}

/// Something in a configuration that probably is not what its author wants.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct ConfigWarning {
    /// The key it is about; may be empty.
    pub key: String,
    pub message: String,
}

impl fmt::Display for ConfigWarning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

/// A configuration text that PyTorch would refuse, with the place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfigError {
    /// What is wrong.
    pub message: String,
    /// What to write instead.
    pub hint: String,
    /// The whole text.
    pub text: String,
    /// Byte offset and length of the wrong part.
    pub offset: usize,
    pub len: usize,
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (at character {})", self.message, self.text[..self.offset].chars().count() + 1)
    }
}

impl std::error::Error for ConfigError {}

impl ConfigError {
    /// As an error for people; `name` says where the text comes from, for example a variable.
    pub fn into_error(self, name: &str) -> Error {
        let place = Place { name: name.into(), text: self.text.into(), offset: self.offset, len: self.len, label: String::new() };
        let error = Error::usage(self.message).at(place);
        if self.hint.is_empty() { error } else { error.hint(self.hint) }
    }
}

/// Facts about the machine that decide whether a setting works.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Surroundings {
    /// Windows Subsystem for Linux.
    pub wsl2: bool,
    /// Linux before 5.6, or not Linux: no way to share expandable segments between processes.
    pub no_pidfd: bool,
}

/// What [`from_env`] found.
#[derive(Debug, Clone, PartialEq)]
pub struct FromEnv {
    pub config: AllocConfig,
    /// The variable that counted.
    pub variable: Option<&'static str>,
    pub warnings: Vec<ConfigWarning>,
}

/// Reads the configuration from environment variables, through `get`.
///
/// # Errors
/// A text that PyTorch would refuse.
pub fn from_env(get: impl Fn(&str) -> Option<String>, policy: &Policy) -> Result<FromEnv, Error> {
    let mut found = FromEnv { config: AllocConfig::default(), variable: None, warnings: Vec::new() };
    let warn = |key: &str, message: String| ConfigWarning { key: key.to_owned(), message };
    let set: Vec<(&'static str, String)> = VARIABLES.into_iter().filter_map(|name| Some((name, get(name)?))).collect();
    let effective = |name: &str| name != "PYTORCH_ALLOC_CONF" || (policy.alloc_conf_variable && !policy.alloc_conf_ignored);
    if let Some((name, text)) = set.iter().find(|(name, _)| effective(name)) {
        found.variable = Some(name);
        found.warnings = found.config.update(text, policy).map_err(|error| error.into_error(name))?;
    }
    for (name, text) in &set {
        if !effective(name) {
            found.warnings.push(warn(
                name,
                format!("`{name}` does nothing for CUDA in torch {}: set PYTORCH_CUDA_ALLOC_CONF instead", policy.version),
            ));
        } else if found.variable != Some(name) && set.iter().any(|(other, value)| found.variable == Some(other) && value != text) {
            let winner = found.variable.unwrap_or_default();
            found.warnings.push(warn(name, format!("`{name}` is not read, because `{winner}` is set too")));
        }
    }
    found.config.no_caching = get("PYTORCH_NO_CUDA_MEMORY_CACHING").is_some_and(|value| value == "1" || !value.is_empty() && value != "0");
    Ok(found)
}

impl AllocConfig {
    /// Reads a configuration text under the rules of `policy`.
    ///
    /// # Errors
    /// A text that PyTorch of that version would refuse.
    pub fn parse(text: &str, policy: &Policy) -> Result<(Self, Vec<ConfigWarning>), ConfigError> {
        let mut config = AllocConfig::default();
        let warnings = config.update(text, policy)?;
        Ok((config, warnings))
    }

    /// Applies a text on top (`torch.cuda.memory._set_allocator_settings`): `max_split_size_mb`,
    /// `roundup_power2_divisions` and `garbage_collection_threshold` go back to their defaults first, other settings
    /// keep their values. On an error nothing changes.
    ///
    /// # Errors
    /// A text that PyTorch of that version would refuse.
    pub fn update(&mut self, text: &str, policy: &Policy) -> Result<Vec<ConfigWarning>, ConfigError> {
        let mut config = AllocConfig {
            max_split_size: None,
            roundup_power2_divisions: [0; ROUNDUP_INTERVALS],
            garbage_collection_threshold: 0.0,
            ..self.clone()
        };
        let mut reader = Reader { text, tokens: tokenize(text), at: 0, policy, warnings: Vec::new(), native: None };
        while reader.at < reader.tokens.len() {
            reader.entry(&mut config)?;
        }
        let mut warnings = reader.warnings;
        if let (Backend::CudaMallocAsync, Some(key)) = (config.backend, reader.native) {
            warnings.push(ConfigWarning {
                key: key.clone(),
                message: format!("`{key}` does nothing with `backend:cudaMallocAsync`: it is a setting of the native allocator"),
            });
        }
        *self = config;
        Ok(warnings)
    }

    /// Settings that do nothing, or harm, under the rules of `policy` and on this machine.
    pub fn warnings(&self, policy: &Policy, surroundings: &Surroundings) -> Vec<ConfigWarning> {
        let mut all = Vec::new();
        let mut warn = |key: &str, message: String| all.push(ConfigWarning { key: key.to_owned(), message });
        if self.garbage_collection_threshold > 0.0 && self.per_process_memory_fraction >= 1.0 {
            warn(
                "garbage_collection_threshold",
                "`garbage_collection_threshold` does nothing without a memory fraction below 1: add `per_process_memory_fraction` or call \
                 torch.cuda.set_per_process_memory_fraction"
                    .to_owned(),
            );
        }
        if self.expandable_segments {
            if surroundings.wsl2 {
                warn("expandable_segments", "`expandable_segments` fails on WSL2: cuMemSetAccess answers with code 999 there".to_owned());
            }
            if surroundings.no_pidfd {
                warn(
                    "expandable_segments",
                    "tensors in expandable segments cannot be shared with other processes on this kernel (needs Linux 5.6)".to_owned(),
                );
            }
            if self.max_split_size.is_some() && policy.split_with_expandable_crashes {
                warn(
                    "max_split_size_mb",
                    format!("`max_split_size_mb` together with `expandable_segments` crashes torch {} (fixed in 2.5)", policy.version),
                );
            }
            if !self.large_segment_size.is_multiple_of(2 * MIB) {
                warn(
                    "large_segment_size_mb",
                    "`large_segment_size_mb` is no multiple of 2 MiB, the unit that expandable segments are mapped in".to_owned(),
                );
            }
        } else if self.expandable_segments_reserve.is_some() || !self.expandable_segments_reserve_by_class.is_empty() {
            warn("expandable_segments_reserve", "`expandable_segments_reserve` does nothing without `expandable_segments:True`".to_owned());
        }
        if self.max_non_split_rounding_size != LARGE_SEGMENT && self.max_split_size.is_none() {
            warn("max_non_split_rounding_mb", "`max_non_split_rounding_mb` does nothing without `max_split_size_mb`".to_owned());
        }
        if self.backend == Backend::CudaMallocAsync {
            warn(
                "backend",
                "`backend:cudaMallocAsync` replaces the native allocator: what is predicted for the native one does not hold".to_owned(),
            );
        }
        if self.no_caching {
            warn(
                "PYTORCH_NO_CUDA_MEMORY_CACHING",
                "`PYTORCH_NO_CUDA_MEMORY_CACHING` turns caching off: all other settings of the native allocator do nothing".to_owned(),
            );
        }
        if self.release_lock_on_cudamalloc {
            warn(
                "release_lock_on_cudamalloc",
                "`release_lock_on_cudamalloc` changes how long threads wait, not how much memory is held".to_owned(),
            );
        }
        if let Some((key, _)) = self.entries().into_iter().find(|(key, _)| key.starts_with("pinned_")) {
            warn(key, format!("`{key}` concerns pinned host memory: it changes nothing of device memory"));
        }
        if self.graph_capture_record_stream_reuse {
            warn(
                "graph_capture_record_stream_reuse",
                "`graph_capture_record_stream_reuse` is not modelled: blocks freed during a capture are kept until its end".to_owned(),
            );
        }
        all
    }

    /// What `other` (for example a text from a recorded snapshot) and this one differ in, by key.
    pub fn differing_keys(&self, other: &AllocConfig) -> Vec<&'static str> {
        let (mine, theirs) = (self.entries(), other.entries());
        KEYS.into_iter()
            .filter(|key| {
                let value = |entries: &[(&'static str, String)]| entries.iter().find(|(k, _)| k == key).map(|(_, v)| v.clone());
                value(&mine) != value(&theirs)
            })
            .collect()
    }

    /// Key and value of what differs from the defaults, in the order in which it can be read back.
    fn entries(&self) -> Vec<(&'static str, String)> {
        let default = AllocConfig::default();
        let mut entries = Vec::new();
        let mut put = |key, differs: bool, value: String| {
            if differs {
                entries.push((key, value));
            }
        };
        let flag = |on: bool| if on { "True".to_owned() } else { "False".to_owned() };
        put(
            "backend",
            self.backend != default.backend,
            match self.backend {
                Backend::Native => "native".to_owned(),
                Backend::CudaMallocAsync => "cudaMallocAsync".to_owned(),
            },
        );
        put("expandable_segments", self.expandable_segments, flag(self.expandable_segments));
        // Before the split limit, which is checked against it.
        put("large_segment_size_mb", self.large_segment_size != default.large_segment_size, (self.large_segment_size / MIB).to_string());
        if let Some(bytes) = self.max_split_size {
            put("max_split_size_mb", true, (bytes / MIB).to_string());
        }
        put(
            "max_non_split_rounding_mb",
            self.max_non_split_rounding_size != default.max_non_split_rounding_size,
            (self.max_non_split_rounding_size / MIB).to_string(),
        );
        put("garbage_collection_threshold", self.garbage_collection_threshold > 0.0, self.garbage_collection_threshold.to_string());
        put(
            "roundup_power2_divisions",
            self.roundup_power2_divisions != default.roundup_power2_divisions,
            show_divisions(&self.roundup_power2_divisions),
        );
        put("per_process_memory_fraction", self.per_process_memory_fraction < 1.0, self.per_process_memory_fraction.to_string());
        put("throw_on_cudamalloc_oom", self.throw_on_cudamalloc_oom, flag(true));
        put("release_lock_on_cudamalloc", self.release_lock_on_cudamalloc, flag(true));
        put("graph_capture_record_stream_reuse", self.graph_capture_record_stream_reuse, flag(true));
        if let Some(reserve) = self.expandable_segments_reserve {
            put("expandable_segments_reserve", true, reserve.to_string());
        }
        let classes: Vec<String> =
            self.expandable_segments_reserve_by_class.iter().map(|(name, reserve)| format!("{name}:{reserve}")).collect();
        put("expandable_segments_reserve_by_class", !classes.is_empty(), format!("[{}]", classes.join(",")));
        let (pinned, plain) = (&self.pinned, &default.pinned);
        put("pinned_use_cuda_host_register", pinned.use_cuda_host_register, flag(true));
        put(
            "pinned_num_register_threads",
            pinned.num_register_threads != plain.num_register_threads,
            pinned.num_register_threads.to_string(),
        );
        put("pinned_use_background_threads", pinned.use_background_threads, flag(true));
        put("pinned_reserve_segment_size_mb", pinned.reserve_segment_size_mb != 0, pinned.reserve_segment_size_mb.to_string());
        put("pinned_free_catch_all", pinned.free_catch_all, flag(true));
        if let Some(mb) = pinned.max_round_threshold_mb {
            put("pinned_max_round_threshold_mb", true, mb.to_string());
        }
        if let Some(mb) = pinned.max_cached_size_mb {
            put("pinned_max_cached_size_mb", true, mb.to_string());
        }
        entries
    }
}

/// A list that reads back as the same table whichever rule `>` follows: every interval is named.
fn show_divisions(divisions: &Divisions) -> String {
    if divisions.iter().all(|d| *d == divisions[0]) && divisions[0].is_power_of_two() {
        return divisions[0].to_string();
    }
    let items: Vec<String> = divisions.iter().enumerate().map(|(at, d)| format!("{}:{d}", 1u64 << at)).collect();
    format!("[{}]", items.join(","))
}

impl fmt::Display for AllocConfig {
    /// The shortest text that reads back as this configuration: settings at their defaults are left out.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, (key, value)) in self.entries().into_iter().enumerate() {
            write!(f, "{}{key}:{value}", if at > 0 { "," } else { "" })?;
        }
        Ok(())
    }
}

#[derive(Debug)]
struct Token {
    text: String,
    offset: usize,
    end: usize,
}

impl Token {
    fn is(&self, text: &str) -> bool {
        self.text == text
    }
}

/// `, : [ ]` are tokens; white space is dropped, also inside words.
fn tokenize(text: &str) -> Vec<Token> {
    let mut tokens = Vec::new();
    let mut word: Option<Token> = None;
    for (offset, c) in text.char_indices() {
        let end = offset + c.len_utf8();
        if matches!(c, ',' | ':' | '[' | ']') {
            tokens.extend(word.take());
            tokens.push(Token { text: c.to_string(), offset, end });
        } else if !c.is_ascii_whitespace() && c != '\x0B' {
            let word = word.get_or_insert(Token { text: String::new(), offset, end });
            word.text.push(c);
            word.end = end;
        }
    }
    tokens.extend(word);
    tokens
}

struct Reader<'a> {
    text: &'a str,
    tokens: Vec<Token>,
    at: usize,
    policy: &'a Policy,
    warnings: Vec<ConfigWarning>,
    /// A setting of the native allocator that was seen.
    native: Option<String>,
}

type Read<T> = Result<T, ConfigError>;

impl Reader<'_> {
    fn error_at(&self, at: usize, message: impl Into<String>, hint: impl Into<String>) -> ConfigError {
        let (offset, len) = match self.tokens.get(at) {
            Some(token) => (token.offset, token.end - token.offset),
            None => (self.text.len(), 0),
        };
        ConfigError { message: message.into(), hint: hint.into(), text: self.text.to_owned(), offset, len }
    }

    /// Passes a separator; another token in its place is skipped as PyTorch does, with a warning.
    fn separator(&mut self, wanted: &str, key: &str) -> Read<()> {
        let Some(token) = self.tokens.get(self.at) else {
            return Err(self.error_at(self.at, format!("`{key}` ends where `{wanted}` should follow"), "write it as KEY:VALUE"));
        };
        if !token.is(wanted) {
            let message = format!("`{}` stands where `{wanted}` should, after `{key}`; PyTorch skips it without a word", token.text);
            self.warnings.push(ConfigWarning { key: key.to_owned(), message });
        }
        self.at += 1;
        Ok(())
    }

    /// The next token as a value.
    fn value(&mut self, key: &str) -> Read<String> {
        let Some(token) = self.tokens.get(self.at) else {
            return Err(self.error_at(self.at, format!("`{key}` has no value"), "write it as KEY:VALUE"));
        };
        let text = token.text.clone();
        self.at += 1;
        Ok(text)
    }

    fn boolean(&mut self, key: &str) -> Read<bool> {
        let at = self.at;
        match self.value(key)?.as_str() {
            "True" => Ok(true),
            "False" => Ok(false),
            other => Err(self.error_at(at, format!("`{key}` is `{other}`"), format!("exactly True or False, for example {key}:True"))),
        }
    }

    fn integer(&mut self, key: &str) -> Read<u64> {
        let at = self.at;
        let text = self.value(key)?;
        let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        match text.parse() {
            Ok(number) if digits => Ok(number),
            Err(_) if digits => Err(self.error_at(at, format!("`{key}` is `{text}`, which is too large"), format!("at most {}", u64::MAX))),
            _ => Err(self.error_at(at, format!("`{key}` is `{text}`, which is no whole number"), "digits only, without unit or sign")),
        }
    }

    fn number(&mut self, key: &str) -> Read<f64> {
        let at = self.at;
        let text = self.value(key)?;
        match text.parse::<f64>() {
            Ok(number) if number.is_finite() => Ok(number),
            _ => Err(self.error_at(at, format!("`{key}` is `{text}`, which is no number"), "a decimal number, for example 0.8")),
        }
    }

    fn entry(&mut self, config: &mut AllocConfig) -> Read<()> {
        let at = self.at;
        let key = self.value("")?;
        if !self.known(&key) {
            return Err(self.unknown(at, &key));
        }
        self.separator(":", &key)?;
        let value_at = self.at;
        if !key.starts_with("pinned_") && key != "backend" {
            self.native = Some(key.clone());
        }
        match key.as_str() {
            "backend" => {
                config.backend = match self.value(&key)?.as_str() {
                    "native" => Backend::Native,
                    "cudaMallocAsync" => Backend::CudaMallocAsync,
                    other => {
                        return Err(self.error_at(value_at, format!("`backend` is `{other}`"), "native or cudaMallocAsync"));
                    }
                }
            }
            "expandable_segments" => config.expandable_segments = self.boolean(&key)?,
            "large_segment_size_mb" => {
                let mb = self.integer(&key)?;
                if mb <= MIN_LARGE_ALLOC / MIB {
                    return Err(self.error_at(value_at, format!("`{key}` is {mb}"), "more than 10"));
                }
                let bytes = mb.min(u64::MAX / MIB) * MIB;
                if let Some(limit) = config.max_split_size.filter(|limit| *limit < bytes) {
                    return Err(self.error_at(
                        value_at,
                        format!("`{key}` is {mb}, more than `max_split_size_mb`, which is {}", limit / MIB),
                        "a split limit must be at least the large segment size",
                    ));
                }
                config.large_segment_size = bytes;
            }
            "max_split_size_mb" => {
                let mb = self.integer(&key)?;
                let least = if self.policy.max_split_may_equal_segment { config.large_segment_size / MIB } else { LARGE_SEGMENT / MIB + 1 };
                if mb < least {
                    return Err(self.error_at(
                        value_at,
                        format!("`{key}` is {mb}"),
                        format!("at least {least} in torch {}", self.policy.version),
                    ));
                }
                config.max_split_size = Some(mb.min(u64::MAX / MIB) * MIB);
            }
            "max_non_split_rounding_mb" => {
                let mb = self.integer(&key)?;
                if mb < LARGE_SEGMENT / MIB {
                    return Err(self.error_at(value_at, format!("`{key}` is {mb}"), "at least 20"));
                }
                config.max_non_split_rounding_size = mb.min(u64::MAX / MIB) * MIB;
            }
            "garbage_collection_threshold" => {
                let threshold = self.number(&key)?;
                if !(threshold > 0.0 && threshold < 1.0) {
                    return Err(self.error_at(value_at, format!("`{key}` is {threshold}"), "more than 0 and less than 1"));
                }
                config.garbage_collection_threshold = threshold;
            }
            "roundup_power2_divisions" => self.divisions(config)?,
            "per_process_memory_fraction" => {
                let fraction = self.number(&key)?;
                if !(0.0..=1.0).contains(&fraction) {
                    return Err(self.error_at(value_at, format!("`{key}` is {fraction}"), "from 0 to 1"));
                }
                config.per_process_memory_fraction = fraction;
            }
            "throw_on_cudamalloc_oom" => config.throw_on_cudamalloc_oom = self.boolean(&key)?,
            "release_lock_on_cudamalloc" | "release_lock_on_hipmalloc" => config.release_lock_on_cudamalloc = self.boolean(&key)?,
            "graph_capture_record_stream_reuse" => config.graph_capture_record_stream_reuse = self.boolean(&key)?,
            "expandable_segments_reserve" => config.expandable_segments_reserve = Some(self.reserve(&key)?),
            "expandable_segments_reserve_by_class" => {
                config.expandable_segments_reserve_by_class.clear();
                self.list(&key, |reader| {
                    let class = reader.value("expandable_segments_reserve_by_class")?;
                    reader.separator(":", &class)?;
                    let reserve = reader.reserve("expandable_segments_reserve_by_class")?;
                    config.expandable_segments_reserve_by_class.push((class, reserve));
                    Ok(())
                })?;
            }
            "pinned_use_cuda_host_register" | "pinned_use_hip_host_register" => {
                config.pinned.use_cuda_host_register = self.boolean(&key)?;
            }
            "pinned_num_register_threads" => {
                let threads = self.integer(&key)?;
                if !threads.is_power_of_two() || threads > 128 {
                    return Err(self.error_at(value_at, format!("`{key}` is {threads}"), "a power of two up to 128"));
                }
                config.pinned.num_register_threads = threads;
            }
            "pinned_use_background_threads" => config.pinned.use_background_threads = self.boolean(&key)?,
            "pinned_reserve_segment_size_mb" => config.pinned.reserve_segment_size_mb = self.integer(&key)?,
            "pinned_free_catch_all" => config.pinned.free_catch_all = self.boolean(&key)?,
            "pinned_max_round_threshold_mb" => config.pinned.max_round_threshold_mb = Some(self.integer(&key)?),
            "pinned_max_cached_size_mb" => config.pinned.max_cached_size_mb = Some(self.integer(&key)?),
            _ => return Err(self.unknown(at, &key)),
        }
        if self.at < self.tokens.len() {
            self.separator(",", &key)?;
        }
        Ok(())
    }

    /// `[item,item]`, each item by `read`. PyTorch needs the brackets.
    fn list(&mut self, key: &str, mut read: impl FnMut(&mut Self) -> Read<()>) -> Read<()> {
        let open = self.at;
        if !self.value(key)?.eq("[") {
            return Err(self.error_at(open, format!("`{key}` is no list"), format!("write it as {key}:[NAME:VALUE,…]")));
        }
        loop {
            match self.tokens.get(self.at) {
                None => {
                    return Err(self.error_at(open, format!("the list of `{key}` has no end"), "close it with `]`"));
                }
                Some(token) if token.is("]") => {
                    self.at += 1;
                    return Ok(());
                }
                Some(_) => {}
            }
            read(self)?;
            if self.tokens.get(self.at).is_some_and(|token| !token.is("]")) {
                self.separator(",", key)?;
            }
        }
    }

    fn divisions(&mut self, config: &mut AllocConfig) -> Read<()> {
        let key = "roundup_power2_divisions";
        let value_at = self.at;
        if !self.tokens.get(self.at).is_some_and(|token| token.is("[")) {
            let all = self.integer(key)?;
            let all = u32::try_from(all).ok().filter(|all| all.is_power_of_two());
            let Some(all) = all else {
                return Err(self.error_at(value_at, format!("`{key}` is no power of two"), "1, 2, 4, 8, …, or a list"));
            };
            config.roundup_power2_divisions = [all; ROUNDUP_INTERVALS];
            return Ok(());
        }
        let rest_after_last = self.policy.roundup_rest_after_last;
        let table = &mut config.roundup_power2_divisions;
        let (mut first, mut last) = (true, 0);
        self.list(key, |reader| {
            let at = reader.at;
            let start = reader.value(key)?;
            let index = if start == ">" {
                None
            } else {
                match start.parse::<u64>() {
                    Ok(mb) if mb.is_power_of_two() && start.bytes().all(|byte| byte.is_ascii_digit()) => {
                        Some((mb.ilog2() as usize).min(ROUNDUP_INTERVALS - 1))
                    }
                    _ => {
                        let message = format!("an interval of `{key}` begins at `{start}`");
                        return Err(reader.error_at(at, message, "a power of two in MB, or `>` for the rest"));
                    }
                }
            };
            reader.separator(":", key)?;
            let at = reader.at;
            let parts = reader.integer(key)?;
            let Some(parts) = u32::try_from(parts).ok().filter(|parts| *parts == 0 || parts.is_power_of_two()) else {
                return Err(reader.error_at(at, format!("`{key}` has {parts} divisions"), "0 (off) or a power of two"));
            };
            match index {
                None => table[(last + usize::from(rest_after_last)).min(ROUNDUP_INTERVALS)..].fill(parts),
                Some(index) => {
                    if first {
                        table[..index].fill(parts);
                        first = false;
                    }
                    table[index] = parts;
                    last = index;
                }
            }
            Ok(())
        })
    }

    /// `0.5` (of the device) or `40G`.
    fn reserve(&mut self, key: &str) -> Read<Reserve> {
        let at = self.at;
        let text = self.value(key)?;
        let (digits, gib) = match text.strip_suffix('G') {
            Some(digits) => (digits, true),
            None => (text.as_str(), false),
        };
        match digits.parse::<f64>() {
            Ok(number) if number.is_finite() && number > 0.0 => Ok(if gib { Reserve::GiB(number) } else { Reserve::Fraction(number) }),
            _ => Err(self.error_at(at, format!("`{key}` is `{text}`"), "a fraction of the device (0.5) or GiB (40G), more than 0")),
        }
    }

    /// Whether this version has the key.
    fn known(&self, key: &str) -> bool {
        self.exists(key) && self.since(key).is_none()
    }

    fn exists(&self, key: &str) -> bool {
        KEYS.contains(&key) || matches!(key, "release_lock_on_hipmalloc" | "pinned_use_hip_host_register")
    }

    /// The version that brought a key which the present one lacks.
    fn since(&self, key: &str) -> Option<TorchVersion> {
        let p = self.policy;
        match key {
            "large_segment_size_mb" if !p.large_segment_option => Some(TorchVersion::new(2, 11)),
            "throw_on_cudamalloc_oom" if !p.throw_on_oom_option => Some(TorchVersion::new(2, 11)),
            "per_process_memory_fraction" if !p.fraction_option => Some(TorchVersion::new(2, 9)),
            "expandable_segments_reserve" | "expandable_segments_reserve_by_class" if !p.reserve_option => Some(TorchVersion::new(2, 15)),
            _ => None,
        }
    }

    fn unknown(&self, at: usize, key: &str) -> ConfigError {
        if let Some(since) = self.since(key) {
            let message = format!("torch {} has no setting `{key}`", self.policy.version);
            return self.error_at(at, message, format!("it came with torch {since} or near it"));
        }
        if let Some((name, value)) = key.split_once('=')
            && KEYS.contains(&name)
        {
            let hint = format!("key and value are separated by `:`, not by `=`: write `{name}:{}`", value.escape_debug());
            return self.error_at(at, format!("unrecognized key `{}`", key.escape_debug()), hint);
        }
        let near = KEYS.iter().min_by_key(|known| distance(known, key)).filter(|known| distance(known, key) <= 1 + known.len() / 4);
        let hint = match near {
            Some(near) => format!("did you mean `{near}`?"),
            None if key.contains('=') => "key and value are separated by `:`, not by `=`".to_owned(),
            None => format!("known settings: {}", KEYS.join(", ")),
        };
        self.error_at(at, format!("unrecognized key `{}`", key.escape_debug()), hint)
    }
}

/// Edit distance, for suggestions.
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().take(64).collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.chars().take(64).enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, y) in b.iter().enumerate() {
            let next = (diagonal + usize::from(x != *y)).min(row[j] + 1).min(row[j + 1] + 1);
            diagonal = row[j + 1];
            row[j + 1] = next;
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use rstest::rstest;

    fn newest() -> Policy {
        Policy::pytorch(TorchVersion::NEWEST_READ)
    }

    fn read(text: &str) -> AllocConfig {
        match AllocConfig::parse(text, &newest()) {
            Ok((config, warnings)) if warnings.is_empty() => config,
            other => panic!("{text}: {other:?}"),
        }
    }

    fn refusal(text: &str, policy: &Policy) -> (String, String, usize) {
        let error = AllocConfig::parse(text, policy).expect_err(text);
        (error.message, error.hint, error.offset)
    }

    #[test]
    fn all_settings_are_read() {
        let config = read(
            " backend : native, max_split_size_mb:128,max_non_split_rounding_mb:64, garbage_collection_threshold:0.8,\
             roundup_power2_divisions:4,expandable_segments:True,release_lock_on_cudamalloc:True,per_process_memory_fraction:0.5,\
             throw_on_cudamalloc_oom:True,graph_capture_record_stream_reuse:True,expandable_segments_reserve:40G,\
             expandable_segments_reserve_by_class:[serving:0.25,ads:8G],pinned_use_cuda_host_register:True,\
             pinned_num_register_threads:8,pinned_use_background_threads:True,pinned_reserve_segment_size_mb:16,\
             pinned_free_catch_all:True,pinned_max_round_threshold_mb:1,pinned_max_cached_size_mb:2,",
        );
        assert_eq!(config.max_split_size, Some(128 * MIB));
        assert_eq!(config.max_non_split_rounding_size, 64 * MIB);
        assert_eq!(config.garbage_collection_threshold, 0.8);
        assert_eq!(config.roundup_power2_divisions, [4; 16]);
        assert!(config.expandable_segments && config.release_lock_on_cudamalloc && config.throw_on_cudamalloc_oom);
        assert_eq!(config.per_process_memory_fraction, 0.5);
        assert_eq!(config.expandable_segments_reserve, Some(Reserve::GiB(40.0)));
        assert_eq!(config.expandable_segments_reserve_by_class[1], ("ads".to_owned(), Reserve::GiB(8.0)));
        assert_eq!(config.pinned.num_register_threads, 8);
        assert_eq!(config.pinned.max_cached_size_mb, Some(2));
        assert_eq!(read(&config.to_string()), config);
    }

    #[test]
    fn the_vectors_of_pytorchs_own_tests() {
        let at = |config: &AllocConfig, mb: u64| config.roundup_power2_divisions[super::super::sizes::division_index(mb * MIB)];
        let config = read("roundup_power2_divisions:[64:8,128:2,256:4,512:2,1024:4,>:1]");
        let values: Vec<u32> = [32, 64, 128, 256, 512, 1024, 2048].map(|mb| at(&config, mb)).into();
        assert_eq!(values, [8, 8, 2, 4, 2, 4, 1]);
        let config = read("roundup_power2_divisions:[128:8,256:16,512:1,2048:8,>:2]");
        assert_eq!([64, 1024, 2048, 4096].map(|mb| at(&config, mb)), [8, 0, 8, 2]);
        let old = Policy::pytorch(TorchVersion::new(2, 1));
        let (config, _) = AllocConfig::parse("roundup_power2_divisions:[128:8,256:4,>:2]", &old).expect("valid");
        assert_eq!([128, 256, 512].map(|mb| at(&config, mb)), [8, 2, 2], "older: from the last one named");
    }

    #[test]
    fn order_matters_for_segment_size_and_split_limit() {
        assert_eq!(read("large_segment_size_mb:25,max_split_size_mb:25").large_segment_size, 25 * MIB);
        let (message, _, offset) = refusal("max_split_size_mb:20,large_segment_size_mb:25", &newest());
        assert_eq!((message.as_str(), offset), ("`large_segment_size_mb` is 25, more than `max_split_size_mb`, which is 20", 43));
        let (message, hint, _) = refusal("large_segment_size_mb:25,max_split_size_mb:20", &newest());
        assert_eq!((message.as_str(), hint.as_str()), ("`max_split_size_mb` is 20", "at least 25 in torch 2.15"));
        let old = Policy::pytorch(TorchVersion::new(2, 7));
        assert_eq!(refusal("max_split_size_mb:20", &old).1, "at least 21 in torch 2.7");
        assert!(AllocConfig::parse("max_split_size_mb:21", &old).is_ok());
        assert_eq!(refusal("large_segment_size_mb:32", &old).0, "torch 2.7 has no setting `large_segment_size_mb`");
        assert!(refusal("large_segment_size_mb:10", &newest()).1.contains("more than 10"));
    }

    #[rstest]
    #[case("expandable_segments:true", "`expandable_segments` is `true`", 20)]
    #[case("expandable_segments", "`expandable_segments` ends where `:` should follow", 19)]
    #[case("expandable_segments:", "`expandable_segments` has no value", 20)]
    #[case("expandible_segments:True", "unrecognized key `expandible_segments`", 0)]
    #[case("expandable_segments=True", "unrecognized key `expandable_segments=True`", 0)]
    #[case("max_split_size_mb:64MB", "`max_split_size_mb` is `64MB`, which is no whole number", 18)]
    #[case("max_split_size_mb:-1", "`max_split_size_mb` is `-1`, which is no whole number", 18)]
    #[case("max_split_size_mb:99999999999999999999", "`max_split_size_mb` is `99999999999999999999`, which is too large", 18)]
    #[case("garbage_collection_threshold:1", "`garbage_collection_threshold` is 1", 29)]
    #[case("garbage_collection_threshold:0.0", "`garbage_collection_threshold` is 0", 29)]
    #[case("garbage_collection_threshold:nan", "`garbage_collection_threshold` is `nan`, which is no number", 29)]
    #[case("max_non_split_rounding_mb:19", "`max_non_split_rounding_mb` is 19", 26)]
    #[case("per_process_memory_fraction:1.01", "`per_process_memory_fraction` is 1.01", 28)]
    #[case("backend:cuda", "`backend` is `cuda`", 8)]
    #[case("roundup_power2_divisions:3", "`roundup_power2_divisions` is no power of two", 25)]
    #[case("roundup_power2_divisions:[3:4]", "an interval of `roundup_power2_divisions` begins at `3`", 26)]
    #[case("roundup_power2_divisions:[4:3]", "`roundup_power2_divisions` has 3 divisions", 28)]
    #[case("roundup_power2_divisions:[4:4", "the list of `roundup_power2_divisions` has no end", 25)]
    #[case("pinned_num_register_threads:3", "`pinned_num_register_threads` is 3", 28)]
    #[case("expandable_segments_reserve:-1G", "`expandable_segments_reserve` is `-1G`", 28)]
    #[case("expandable_segments:True,,", "unrecognized key `,`", 25)]
    fn refusals_name_the_place(#[case] text: &str, #[case] message: &str, #[case] offset: usize) {
        let refused = refusal(text, &newest());
        assert_eq!((refused.0.as_str(), refused.2), (message, offset));
        assert!(!refused.1.is_empty(), "a hint");
    }

    #[test]
    fn an_equals_sign_is_told_with_the_right_text() {
        let refused = refusal("expandable_segments=True", &newest());
        assert_eq!(refused.1, "key and value are separated by `:`, not by `=`: write `expandable_segments:True`");
    }

    #[test]
    fn an_error_for_people_has_the_variable_and_the_place() {
        let error = AllocConfig::parse("expandible_segments:True", &newest()).expect_err("typo").into_error("PYTORCH_CUDA_ALLOC_CONF");
        assert_eq!(error.to_string(), "PYTORCH_CUDA_ALLOC_CONF:1:1: unrecognized key `expandible_segments`");
        assert_eq!(error.hints(), ["did you mean `expandable_segments`?"]);
        assert_eq!(error.exit_code(), 2);
    }

    #[test]
    fn wrong_separators_are_skipped_as_pytorch_does_but_not_silently() {
        let (config, warnings) =
            AllocConfig::parse("expandable_segments , True : max_split_size_mb:32", &newest()).expect("PyTorch reads on");
        assert!(config.expandable_segments);
        assert_eq!(config.max_split_size, Some(32 * MIB));
        assert_eq!(warnings.len(), 2);
        assert!(warnings[0].message.starts_with("`,` stands where `:` should, after `expandable_segments`"));
    }

    #[test]
    fn a_second_text_resets_three_settings_and_keeps_the_others() {
        let mut config = read("max_split_size_mb:64,garbage_collection_threshold:0.5,roundup_power2_divisions:2,expandable_segments:True");
        config.update("max_non_split_rounding_mb:40", &newest()).expect("valid");
        assert_eq!((config.max_split_size, config.garbage_collection_threshold), (None, 0.0));
        assert_eq!(config.roundup_power2_divisions, [0; 16]);
        assert!(config.expandable_segments);
        let before = config.clone();
        assert!(config.update("expandable_segments:False,nonsense:1", &newest()).is_err());
        assert_eq!(config, before);
        assert_eq!(config.differing_keys(&AllocConfig::default()), ["expandable_segments", "max_non_split_rounding_mb"]);
    }

    #[test]
    fn settings_that_do_nothing_are_named() {
        let keys = |text: &str, policy: &Policy, surroundings: Surroundings| -> Vec<String> {
            let (config, mut warnings) = AllocConfig::parse(text, policy).expect(text);
            warnings.extend(config.warnings(policy, &surroundings));
            warnings.into_iter().map(|warning| warning.key).collect()
        };
        let (policy, here) = (newest(), Surroundings::default());
        assert_eq!(keys("garbage_collection_threshold:0.8", &policy, here), ["garbage_collection_threshold"]);
        assert!(keys("garbage_collection_threshold:0.8,per_process_memory_fraction:0.9", &policy, here).is_empty());
        assert_eq!(keys("expandable_segments:True", &policy, Surroundings { wsl2: true, ..here }), ["expandable_segments"]);
        assert_eq!(
            keys("expandable_segments:True,max_split_size_mb:64", &Policy::pytorch(TorchVersion::new(2, 4)), here),
            ["max_split_size_mb"]
        );
        assert!(keys("expandable_segments:True,max_split_size_mb:64", &Policy::pytorch(TorchVersion::new(2, 5)), here).is_empty());
        assert_eq!(keys("backend:cudaMallocAsync,max_split_size_mb:64", &policy, here), ["max_split_size_mb", "backend"]);
        assert_eq!(keys("max_non_split_rounding_mb:64", &policy, here), ["max_non_split_rounding_mb"]);
        assert_eq!(keys("expandable_segments_reserve:0.5", &policy, here), ["expandable_segments_reserve"]);
        assert_eq!(keys("release_lock_on_cudamalloc:True", &policy, here), ["release_lock_on_cudamalloc"]);
        assert_eq!(keys("pinned_num_register_threads:8,pinned_free_catch_all:True", &policy, here), ["pinned_num_register_threads"]);
        assert_eq!(keys("expandable_segments:True,large_segment_size_mb:25", &policy, here), ["large_segment_size_mb"]);
    }

    #[test]
    fn the_first_variable_that_counts_wins() {
        let env = |pairs: &'static [(&str, &str)]| {
            move |name: &str| pairs.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned())
        };
        let both: &[(&str, &str)] =
            &[("PYTORCH_ALLOC_CONF", "expandable_segments:True"), ("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")];
        let found = from_env(env(both), &newest()).expect("valid");
        assert_eq!((found.variable, found.config.expandable_segments), (Some("PYTORCH_CUDA_ALLOC_CONF"), false));
        assert_eq!(found.warnings[0].message, "`PYTORCH_ALLOC_CONF` is not read, because `PYTORCH_CUDA_ALLOC_CONF` is set too");
        let one: &[(&str, &str)] = &[("PYTORCH_ALLOC_CONF", "expandable_segments:True"), ("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")];
        let found = from_env(env(one), &newest()).expect("valid");
        assert!(found.config.expandable_segments && found.config.no_caching);
        let found = from_env(env(one), &Policy::pytorch(TorchVersion::new(2, 9))).expect("valid");
        assert_eq!((found.variable, found.config.expandable_segments), (None, false));
        assert_eq!(found.warnings[0].key, "PYTORCH_ALLOC_CONF");
        let bad: &[(&str, &str)] = &[("PYTORCH_HIP_ALLOC_CONF", "x:1")];
        assert!(from_env(env(bad), &newest()).expect_err("unknown key").to_string().starts_with("PYTORCH_HIP_ALLOC_CONF:1:1:"));
    }

    proptest! {
        #[test]
        fn any_text_is_read_or_refused_at_a_place(text in r#"([a-z_]{0,4}|max_split_size_mb|expandable_segments|roundup_power2_divisions|[:,\[\]> ]|[0-9.G]{1,4}|True|ä){0,12}"#) {
            match AllocConfig::parse(&text, &newest()) {
                Ok((config, _)) => {
                    let (again, warnings) = AllocConfig::parse(&config.to_string(), &newest()).expect("canonical text");
                    prop_assert_eq!(again, config);
                    prop_assert!(warnings.is_empty());
                }
                Err(error) => {
                    prop_assert!(text.is_char_boundary(error.offset) && text.is_char_boundary(error.offset + error.len));
                    prop_assert!(!error.to_string().is_empty());
                }
            }
        }

        #[test]
        fn what_is_shown_reads_back(split in proptest::option::of(20u64..4096), large in 11u64..64, gc in 1u32..100, table in proptest::array::uniform16(0u32..6), fraction in 0u32..=100) {
            let config = AllocConfig {
                max_split_size: split.map(|mb| mb.max(large) * MIB),
                large_segment_size: large * MIB,
                garbage_collection_threshold: f64::from(gc % 100) / 100.0,
                roundup_power2_divisions: table.map(|log| if log == 0 { 0 } else { 1 << log }),
                per_process_memory_fraction: f64::from(fraction) / 100.0,
                ..AllocConfig::default()
            };
            prop_assert_eq!(read(&config.to_string()), config);
        }
    }
}
