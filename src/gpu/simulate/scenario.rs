//! The scenario file: a strict reader of a small TOML dialect, with the place of every mistake.
//!
//! The dialect is described in `docs/gpu-summary.md`. Nothing is guessed: an unknown key, a name that no earlier step
//! allocates, a size without a meaning are errors with line and column.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;

use serde::Serialize;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::networks;
use crate::error::{Error, Place, Result};
use crate::gpu::alloc::{AllocConfig, Policy, TorchVersion};

/// The most allocations one run of a scenario may make; more is refused when the file is read.
pub const MAX_ALLOCATIONS: u64 = 20_000_000;

/// A whole scenario, checked.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Scenario {
    /// Short name, for headings.
    pub name: String,
    /// One paragraph on what it shows; may be empty.
    pub summary: String,
    /// Seed of every random choice: the same file gives the same run.
    pub seed: u64,
    /// The card.
    pub device: DeviceSpec,
    /// The allocator under test.
    pub allocator: AllocatorSpec,
    /// What happens, in order.
    pub phases: Vec<Phase>,
    /// What else to try; empty means the default set.
    pub variations: Vec<Variation>,
    /// Every name that some step allocates, in order of first appearance.
    pub names: Vec<String>,
}

/// The simulated card. Sizes in bytes.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct DeviceSpec {
    /// Physical memory.
    pub capacity: u64,
    /// What the driver context of this process takes before the first tensor.
    pub context: u64,
    /// What other processes hold.
    pub other_processes: u64,
}

/// Which rules and which configuration line.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct AllocatorSpec {
    /// The PyTorch version whose rules apply, such as `2.10`.
    pub torch: String,
    /// The text of `PYTORCH_CUDA_ALLOC_CONF`.
    pub conf: String,
    /// `torch.cuda.set_per_process_memory_fraction`, if called.
    pub memory_fraction: Option<f64>,
}

/// A part of the scenario that gets its own line in the table.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Phase {
    /// Unique name.
    pub name: String,
    /// How often its steps run.
    pub repeat: u32,
    /// What the author expects under the unchanged configuration.
    pub expect: Expect,
    /// Whether the run goes on with the next phase after an out of memory here.
    pub on_oom: OnOom,
    /// The steps.
    pub steps: Vec<Step>,
}

/// The expected outcome of a phase.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Expect {
    /// No expectation.
    Any,
    /// It completes.
    Completes,
    /// It runs out of memory.
    Oom,
}

/// What an out of memory does to the run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum OnOom {
    /// The run ends.
    Stop,
    /// The phase ends, the next one runs.
    Continue,
}

/// One thing to try beside the scenario as written.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Variation {
    /// Name in the table.
    pub name: String,
    /// Configuration line instead of the scenario's; `None` keeps it.
    pub conf: Option<String>,
    /// Whether `empty_cache` is called after each phase.
    pub empty_cache: bool,
    /// Phases by name in another order; `None` keeps the order.
    pub order: Option<Vec<String>>,
}

/// One step with the line it stands on.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Step {
    /// 1-based line in the scenario file.
    pub line: usize,
    /// What it does.
    pub action: Action,
}

/// What a step does.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Action {
    /// Allocate `count` tensors into the group `name`.
    Alloc {
        /// Group they join.
        name: String,
        /// Size of each; a random size is drawn for each.
        size: Size,
        /// How many.
        count: u64,
        /// Stream they belong to; 0 is the default stream.
        stream: u32,
        /// When they are freed without a `free` step.
        lifetime: Lifetime,
    },
    /// Free the members of the groups that match `pattern`.
    Free {
        /// Group name, `*` matches any run of characters.
        pattern: String,
        /// Order of the frees.
        order: Order,
        /// Which members stay.
        keep: Keep,
    },
    /// Allocate (and free) what a network allocates.
    Network {
        /// Which network and pass.
        spec: networks::Spec,
        /// Mini-batch size.
        batch: Dim,
        /// Group prefix: `PREFIX.weights`, `PREFIX.saved`, and so on.
        name: String,
        /// Stream of the tensors.
        stream: u32,
    },
    /// `torch.cuda.empty_cache()`.
    EmptyCache,
    /// Wait for all work on the device; pending events complete.
    Synchronize,
    /// `Tensor.record_stream(stream)` on the members of the groups that match.
    RecordStream {
        /// Group name or pattern.
        pattern: String,
        /// The other stream.
        stream: u32,
    },
    /// The work queued on a stream takes this many further steps to complete.
    Busy {
        /// The stream.
        stream: u32,
        /// For how many following steps its events stay incomplete.
        steps: u32,
    },
    /// Give a variable a value.
    Set {
        /// Name of the variable.
        variable: String,
        /// Its values.
        value: Value,
    },
    /// Run the steps several times.
    Repeat {
        /// How often.
        times: u32,
        /// The steps.
        steps: Vec<Step>,
    },
}

/// A size in bytes.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Size {
    /// Always the same.
    Fixed(u64),
    /// Drawn from a range, both ends included.
    Random {
        /// Smallest.
        min: u64,
        /// Largest.
        max: u64,
        /// Rounded down to a multiple of this (but not below `min`).
        multiple: u64,
        /// Uniform in the logarithm rather than in the size.
        log: bool,
    },
    /// One of these, drawn.
    OneOf(Vec<u64>),
    /// Product of the dimensions times the element size.
    Shape {
        /// Dimensions.
        dims: Vec<Dim>,
        /// Bytes of one element.
        element: u64,
    },
}

/// A dimension: the product of a number and of variables.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Dim {
    /// The number.
    pub factor: u64,
    /// The variables.
    pub variables: Vec<String>,
}

/// What a variable takes at a `set` step.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Value {
    /// One number.
    Fixed(u64),
    /// Drawn from a range, both ends included, in steps of `multiple`.
    Random {
        /// Smallest.
        min: u64,
        /// Largest.
        max: u64,
        /// Step.
        multiple: u64,
    },
    /// One after the other, from the start again after the last.
    Cycle(Vec<u64>),
}

/// When a tensor dies without a `free` step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Lifetime {
    /// Never.
    Scenario,
    /// At the end of the phase.
    Phase,
    /// After so many iterations of the innermost loop around it (0: at the end of this one), drawn from the range.
    Iterations {
        /// Smallest.
        min: u32,
        /// Largest.
        max: u32,
    },
}

/// Order of the frees of one step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Order {
    /// Oldest first.
    Forward,
    /// Newest first.
    Reverse,
    /// Shuffled with the scenario's seed.
    Random,
}

/// Which members of the groups a `free` step leaves alive.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Keep {
    /// None.
    None,
    /// Every n-th, counted from the oldest.
    Every(u64),
    /// The newest n.
    Last(u64),
    /// Each with this probability.
    Fraction(f64),
}

/// Longest text of a scenario, bytes (4 MiB).
pub const LARGEST_FILE: usize = 4 << 20;

/// Reads a scenario.
///
/// `name` is the path or name that messages show. Errors: kind usage, with the place, for anything the dialect does not know.
pub fn parse(name: &str, text: &str) -> Result<Scenario> {
    if text.len() > LARGEST_FILE {
        return Err(Error::usage(format!("`{name}` is {} bytes, more than the {LARGEST_FILE} that a scenario may have", text.len()))
            .hint("use `repeat` and `count` instead of writing every step out"));
    }
    let reader = Reader { name: name.into(), text: text.into() };
    let root = DeTable::parse(text).map_err(|error| {
        let span = error.span().unwrap_or(0..0);
        reader.error(span, format!("not valid TOML: {}", first_line(error.message())))
    })?;
    reader.scenario(root.get_ref())
}

fn first_line(text: &str) -> String {
    text.lines().collect::<Vec<_>>().join("; ")
}

/// Parses a size such as `12MiB`, `1.5 GiB`, `20MB` or `512` (bytes). `None` when it is none.
///
/// Binary units are powers of 1024, `KB`, `MB`, `GB`, `TB` powers of 1000.
pub fn parse_size(text: &str) -> Option<u64> {
    let text = text.trim();
    let split = text.find(|c: char| !(c.is_ascii_digit() || c == '.' || c == '_')).unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    let number = number.replace('_', "");
    let scale: u64 = match unit.trim() {
        "" | "B" => 1,
        "KiB" | "K" => 1 << 10,
        "MiB" | "M" => 1 << 20,
        "GiB" | "G" => 1 << 30,
        "TiB" | "T" => 1 << 40,
        "KB" => 1_000,
        "MB" => 1_000_000,
        "GB" => 1_000_000_000,
        "TB" => 1_000_000_000_000,
        _ => return None,
    };
    if let Ok(whole) = number.parse::<u64>() {
        return whole.checked_mul(scale);
    }
    let value: f64 = number.parse().ok()?;
    let bytes = value * scale as f64;
    (bytes.is_finite() && (0.0..1e18).contains(&bytes)).then_some(bytes.round() as u64)
}

/// Bytes of one element of a dtype, by PyTorch's names and the usual short ones.
pub fn dtype_size(name: &str) -> Option<u64> {
    DTYPES.iter().find(|(known, _)| *known == name).map(|(_, size)| *size)
}

const DTYPES: &[(&str, u64)] = &[
    ("float64", 8),
    ("f64", 8),
    ("int64", 8),
    ("i64", 8),
    ("complex64", 8),
    ("float32", 4),
    ("f32", 4),
    ("int32", 4),
    ("i32", 4),
    ("float16", 2),
    ("f16", 2),
    ("bfloat16", 2),
    ("bf16", 2),
    ("int16", 2),
    ("int8", 1),
    ("uint8", 1),
    ("bool", 1),
    ("float8", 1),
];

type Value_<'a, 'i> = &'a Spanned<DeValue<'i>>;

/// Nearest of `known` to `word`, if near enough to be a slip.
fn nearest<'k>(word: &str, known: impl IntoIterator<Item = &'k str>) -> Option<&'k str> {
    known
        .into_iter()
        .map(|candidate| (strsim::damerau_levenshtein(&word.to_lowercase(), &candidate.to_lowercase()), candidate))
        .filter(|(distance, candidate)| *distance <= 1.max(candidate.chars().count() / 3))
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, candidate)| candidate)
}

/// Whether `name` matches `pattern`, in which `*` stands for any run of characters.
pub fn glob(pattern: &str, name: &str) -> bool {
    match pattern.split_once('*') {
        None => pattern == name,
        Some((head, tail)) => {
            let Some(rest) = name.strip_prefix(head) else { return false };
            rest.char_indices().map(|(at, _)| at).chain([rest.len()]).any(|at| glob(tail, &rest[at..]))
        }
    }
}

struct Reader {
    name: Arc<str>,
    text: Arc<str>,
}

/// What has been seen so far, for checks across steps.
#[derive(Default)]
struct Scope {
    names: Vec<String>,
    variables: BTreeSet<String>,
    loops: usize,
}

/// One table while it is read: every key must be asked for.
struct Table<'a, 'i> {
    reader: &'a Reader,
    table: &'a DeTable<'i>,
    span: Range<usize>,
    what: &'a str,
}

impl<'a, 'i> Table<'a, 'i> {
    fn only(&self, known: &[&str]) -> Result<()> {
        for key in self.table.keys() {
            let word = key.get_ref().as_ref();
            if !known.contains(&word) {
                let mut error = self.reader.error(key.span(), format!("unknown key `{word}` in {}", self.what));
                error = match nearest(word, known.iter().copied()) {
                    Some(near) => error.hint(format!("did you mean `{near}`?")),
                    None => error.hint(format!("known keys here: {}", backticked(known))),
                };
                return Err(error);
            }
        }
        Ok(())
    }

    fn get(&self, key: &str) -> Option<Value_<'a, 'i>> {
        self.table.get(key)
    }

    fn need(&self, key: &str) -> Result<Value_<'a, 'i>> {
        self.get(key).ok_or_else(|| self.reader.error(self.span.clone(), format!("{} has no `{key}`", self.what)))
    }

    fn text(&self, key: &str) -> Result<Option<String>> {
        self.get(key).map(|value| self.reader.text(value, key)).transpose()
    }

    fn size(&self, key: &str, default: u64) -> Result<u64> {
        self.get(key).map_or(Ok(default), |value| self.reader.bytes(value, key))
    }

    fn number(&self, key: &str, default: u64, range: Range<u64>) -> Result<u64> {
        self.get(key).map_or(Ok(default), |value| self.reader.number(value, key, range))
    }

    fn flag(&self, key: &str, default: bool) -> Result<bool> {
        match self.get(key) {
            None => Ok(default),
            Some(value) => match value.get_ref() {
                DeValue::Boolean(flag) => Ok(*flag),
                other => Err(self.reader.wrong(value, key, "true or false", other)),
            },
        }
    }
}

fn backticked(words: &[&str]) -> String {
    words.iter().map(|word| format!("`{word}`")).collect::<Vec<_>>().join(", ")
}

const U32: Range<u64> = 1..4_294_967_296;
const STREAM: Range<u64> = 0..1024;

impl Reader {
    fn place(&self, span: Range<usize>, label: &str) -> Place {
        Place {
            name: self.name.clone(),
            text: self.text.clone(),
            offset: span.start,
            len: span.end.saturating_sub(span.start),
            label: label.to_owned(),
        }
    }

    fn error(&self, span: Range<usize>, message: String) -> Error {
        Error::usage(message).at(self.place(span, ""))
    }

    fn line(&self, span: Range<usize>) -> usize {
        self.place(span, "").line_column().0
    }

    fn wrong(&self, value: Value_<'_, '_>, key: &str, wanted: &str, got: &DeValue<'_>) -> Error {
        self.error(value.span(), format!("`{key}` must be {wanted}, not {}", kind_of(got)))
    }

    fn table<'a, 'i>(&'a self, value: Value_<'a, 'i>, what: &'a str) -> Result<Table<'a, 'i>> {
        match value.get_ref() {
            DeValue::Table(table) => Ok(Table { reader: self, table, span: value.span(), what }),
            other => Err(self.wrong(value, what, "a table", other)),
        }
    }

    fn array<'a, 'i>(&self, value: Value_<'a, 'i>, key: &str) -> Result<Vec<Value_<'a, 'i>>> {
        match value.get_ref() {
            DeValue::Array(array) => Ok(array.iter().collect()),
            other => Err(self.wrong(value, key, "a list", other)),
        }
    }

    fn text(&self, value: Value_<'_, '_>, key: &str) -> Result<String> {
        match value.get_ref() {
            DeValue::String(text) => Ok(text.as_ref().to_owned()),
            other => Err(self.wrong(value, key, "a string", other)),
        }
    }

    fn name(&self, value: Value_<'_, '_>, key: &str) -> Result<String> {
        let text = self.text(value, key)?;
        if text.is_empty() || text.chars().any(|c| !(c.is_alphanumeric() || matches!(c, '.' | '_' | '-' | ' ' | '/' | '[' | ']'))) {
            return Err(self
                .error(value.span(), format!("`{key}` is no name: `{text}`"))
                .because("a name has letters, digits, spaces and `._-/[]`"));
        }
        Ok(text)
    }

    /// A heading: any line of text.
    fn heading(&self, value: Value_<'_, '_>, key: &str) -> Result<String> {
        let text = self.text(value, key)?;
        if text.trim().is_empty() || text.chars().any(char::is_control) || text.chars().count() > 80 {
            return Err(self.error(value.span(), format!("`{key}` must be one line of 1 to 80 characters")));
        }
        Ok(text)
    }

    fn number(&self, value: Value_<'_, '_>, key: &str, range: Range<u64>) -> Result<u64> {
        let DeValue::Integer(integer) = value.get_ref() else {
            return Err(self.wrong(value, key, "a whole number", value.get_ref()));
        };
        match i128::from_str_radix(integer.as_str(), integer.radix()) {
            Ok(number) if number >= i128::from(range.start) && number < i128::from(range.end) => Ok(number as u64),
            _ => Err(self.error(value.span(), format!("`{key}` must lie between {} and {}", range.start, range.end - 1))),
        }
    }

    fn float(&self, value: Value_<'_, '_>, key: &str) -> Result<f64> {
        let text = match value.get_ref() {
            DeValue::Float(float) => float.as_str().to_owned(),
            DeValue::Integer(integer) => integer.as_str().to_owned(),
            other => return Err(self.wrong(value, key, "a number", other)),
        };
        match text.parse::<f64>() {
            Ok(number) if (0.0..=1.0).contains(&number) => Ok(number),
            _ => Err(self.error(value.span(), format!("`{key}` must lie between 0 and 1"))),
        }
    }

    fn bytes(&self, value: Value_<'_, '_>, key: &str) -> Result<u64> {
        match value.get_ref() {
            DeValue::Integer(_) => self.number(value, key, 0..(1 << 60)),
            DeValue::String(text) => match parse_size(text) {
                Some(bytes) if bytes < 1 << 60 => Ok(bytes),
                _ => Err(self
                    .error(value.span(), format!("`{key}` is no size: `{text}`"))
                    .hint("write a number of bytes or a number with B, KiB, MiB, GiB, TiB, KB, MB, GB or TB, such as \"20MiB\"")),
            },
            other => Err(self.wrong(value, key, "a size", other)),
        }
    }

    fn positive_bytes(&self, value: Value_<'_, '_>, key: &str) -> Result<u64> {
        match self.bytes(value, key)? {
            0 => Err(self.error(value.span(), format!("`{key}` must be more than 0 bytes"))),
            bytes => Ok(bytes),
        }
    }

    fn choice<'k>(&self, value: Value_<'_, '_>, key: &str, known: &[&'k str]) -> Result<&'k str> {
        let text = self.text(value, key)?;
        known.iter().find(|word| **word == text).copied().ok_or_else(|| {
            let error = self.error(value.span(), format!("`{key}` cannot be `{text}`"));
            match nearest(&text, known.iter().copied()) {
                Some(near) => error.hint(format!("did you mean `{near}`?")),
                None => error.hint(format!("known: {}", backticked(known))),
            }
        })
    }

    fn scenario(&self, root: &DeTable<'_>) -> Result<Scenario> {
        let top = Table { reader: self, table: root, span: 0..0, what: "the scenario" };
        top.only(&["name", "summary", "seed", "device", "allocator", "phase", "variation"])?;
        let name = self.name(top.need("name")?, "name")?;
        let device = self.device(&self.table(top.need("device")?, "[device]")?)?;
        let allocator = match top.get("allocator") {
            Some(value) => self.allocator(&self.table(value, "[allocator]")?)?,
            None => AllocatorSpec { torch: "2.10".into(), conf: String::new(), memory_fraction: None },
        };
        let mut scope = Scope::default();
        let mut phases: Vec<Phase> = Vec::new();
        for value in self.array(top.need("phase")?, "phase")? {
            let phase = self.phase(&self.table(value, "[[phase]]")?, &mut scope)?;
            if phases.iter().any(|known| known.name == phase.name) {
                return Err(self.error(value.span(), format!("two phases are called `{}`", phase.name)));
            }
            phases.push(phase);
        }
        if phases.is_empty() {
            return Err(self.error(0..0, "the scenario has no [[phase]]".into()));
        }
        let mut variations = Vec::new();
        if let Some(value) = top.get("variation") {
            for value in self.array(value, "variation")? {
                variations.push(self.variation(&self.table(value, "[[variation]]")?, &allocator.torch, &phases)?);
            }
        }
        let total = phases.iter().map(|phase| work(&phase.steps).saturating_mul(u64::from(phase.repeat))).fold(0u64, u64::saturating_add);
        if total > MAX_ALLOCATIONS {
            return Err(self
                .error(0..0, format!("the scenario would make about {total} steps and allocations; {MAX_ALLOCATIONS} is the limit"))
                .hint("lower `repeat`, `times` or `count`"));
        }
        Ok(Scenario {
            name,
            summary: top.text("summary")?.unwrap_or_default().trim().to_owned(),
            seed: top.number("seed", 0, 0..u64::MAX)?,
            device,
            allocator,
            phases,
            variations,
            names: scope.names,
        })
    }

    fn device(&self, table: &Table<'_, '_>) -> Result<DeviceSpec> {
        table.only(&["capacity", "context", "other_processes"])?;
        let value = table.need("capacity")?;
        let capacity = self.positive_bytes(value, "capacity")?;
        let context = table.size("context", 450 << 20)?;
        let other_processes = table.size("other_processes", 0)?;
        if context.saturating_add(other_processes) >= capacity {
            return Err(self
                .error(value.span(), "`capacity` leaves nothing for tensors".into())
                .because(format!("`context` and `other_processes` take {} of {capacity} bytes", context.saturating_add(other_processes))));
        }
        Ok(DeviceSpec { capacity, context, other_processes })
    }

    fn allocator(&self, table: &Table<'_, '_>) -> Result<AllocatorSpec> {
        table.only(&["torch", "conf", "memory_fraction"])?;
        let torch = match table.get("torch") {
            None => "2.10".to_owned(),
            Some(value) => {
                let text = self.text(value, "torch")?;
                if let Err(error) = text.parse::<TorchVersion>() {
                    return Err(error.at(self.place(value.span(), "")));
                }
                text
            }
        };
        let conf = table.text("conf")?.unwrap_or_default();
        if let Some(value) = table.get("conf") {
            self.conf(&conf, value, &torch)?;
        }
        let memory_fraction = table.get("memory_fraction").map(|value| self.float(value, "memory_fraction")).transpose()?;
        Ok(AllocatorSpec { torch, conf, memory_fraction })
    }

    /// Checks a configuration line under the rules of a torch version.
    fn conf(&self, conf: &str, value: Value_<'_, '_>, torch: &str) -> Result<()> {
        let policy = Policy::pytorch(torch.parse::<TorchVersion>()?);
        AllocConfig::parse(conf, &policy).map(|_| ()).map_err(|error| {
            let span = value.span();
            // A plain string stands in the file as it is: then the very part can be shown.
            let span = match self.text.get(span.start + 1..span.end.saturating_sub(1)) {
                Some(raw) if raw == conf => span.start + 1 + error.offset..span.start + 1 + error.offset + error.len,
                _ => span,
            };
            let made = self.error(span, error.message);
            if error.hint.is_empty() { made } else { made.hint(error.hint) }
        })
    }

    fn phase(&self, table: &Table<'_, '_>, scope: &mut Scope) -> Result<Phase> {
        table.only(&["name", "repeat", "expect", "on_oom", "step"])?;
        let name = self.heading(table.need("name")?, "name")?;
        let repeat = table.number("repeat", 1, U32)? as u32;
        let expect = match table.get("expect") {
            None => Expect::Any,
            Some(value) => match self.choice(value, "expect", &["completes", "oom", "any"])? {
                "completes" => Expect::Completes,
                "oom" => Expect::Oom,
                _ => Expect::Any,
            },
        };
        let on_oom = match table.get("on_oom") {
            None => OnOom::Stop,
            Some(value) => match self.choice(value, "on_oom", &["stop", "continue"])? {
                "continue" => OnOom::Continue,
                _ => OnOom::Stop,
            },
        };
        scope.loops += 1;
        let steps = self.steps(table.need("step")?, scope)?;
        scope.loops -= 1;
        Ok(Phase { name, repeat, expect, on_oom, steps })
    }

    fn variation(&self, table: &Table<'_, '_>, torch: &str, phases: &[Phase]) -> Result<Variation> {
        table.only(&["name", "conf", "empty_cache", "order"])?;
        let name = self.heading(table.need("name")?, "name")?;
        let conf = table.text("conf")?;
        if let (Some(conf), Some(value)) = (&conf, table.get("conf")) {
            self.conf(conf, value, torch)?;
        }
        let order = match table.get("order") {
            None => None,
            Some(value) => {
                let mut order: Vec<String> = Vec::new();
                let known: Vec<&str> = phases.iter().map(|phase| phase.name.as_str()).collect();
                for item in self.array(value, "order")? {
                    let word = self.choice(item, "order", &known)?.to_owned();
                    if order.contains(&word) {
                        return Err(self.error(item.span(), format!("`order` names `{word}` twice")));
                    }
                    order.push(word);
                }
                if order.len() != phases.len() {
                    return Err(self.error(value.span(), format!("`order` names {} of {} phases", order.len(), phases.len())));
                }
                Some(order)
            }
        };
        let empty_cache = table.flag("empty_cache", false)?;
        if conf.is_none() && order.is_none() && !empty_cache {
            return Err(self
                .error(table.span.clone(), format!("variation `{name}` changes nothing"))
                .hint("give it `conf`, `empty_cache` or `order`"));
        }
        Ok(Variation { name, conf, empty_cache, order })
    }

    fn steps(&self, value: Value_<'_, '_>, scope: &mut Scope) -> Result<Vec<Step>> {
        let steps = self
            .array(value, "step")?
            .into_iter()
            .map(|value| self.step(&self.table(value, "a step")?, scope))
            .collect::<Result<Vec<_>>>()?;
        if steps.is_empty() {
            return Err(self.error(value.span(), "the list of steps is empty".into()));
        }
        Ok(steps)
    }

    fn step(&self, table: &Table<'_, '_>, scope: &mut Scope) -> Result<Step> {
        const VERBS: &[&str] = &["alloc", "free", "network", "empty_cache", "synchronize", "record_stream", "busy", "set", "repeat"];
        let found: Vec<_> = table.table.keys().filter(|key| VERBS.contains(&key.get_ref().as_ref())).collect();
        let verb = match found.as_slice() {
            [verb] => *verb,
            [] => {
                let first = table.table.keys().next();
                let span = first.map_or(table.span.clone(), |key| key.span());
                let error = self.error(span, "a step does nothing".into()).because(format!("it needs one of {}", backticked(VERBS)));
                return Err(match first.and_then(|key| nearest(key.get_ref(), VERBS.iter().copied())) {
                    Some(near) => error.hint(format!("did you mean `{near}`?")),
                    None => error,
                });
            }
            [one, two, ..] => {
                return Err(self
                    .error(two.span(), format!("a step does one thing, and this one has `{}` and `{}`", one.get_ref(), two.get_ref()))
                    .hint("write two steps"));
            }
        };
        let line = self.line(verb.span());
        let verb = verb.get_ref().as_ref();
        let value = table.need(verb)?;
        let action = match verb {
            "alloc" => self.alloc(table, value, scope)?,
            "free" => self.free(table, value, scope)?,
            "network" => self.network(table, value, scope)?,
            "record_stream" => {
                table.only(&["record_stream", "stream"])?;
                let pattern = self.pattern(value, "record_stream", scope)?;
                let stream = self.number(table.need("stream")?, "stream", STREAM)? as u32;
                Action::RecordStream { pattern, stream }
            }
            "busy" => {
                table.only(&["busy", "steps"])?;
                let stream = self.number(value, "busy", STREAM)? as u32;
                Action::Busy { stream, steps: table.number("steps", 1, U32)? as u32 }
            }
            "set" => self.set(table, value, scope)?,
            "repeat" => {
                table.only(&["repeat", "step"])?;
                let times = self.number(value, "repeat", U32)? as u32;
                scope.loops += 1;
                let steps = self.steps(table.need("step")?, scope)?;
                scope.loops -= 1;
                Action::Repeat { times, steps }
            }
            verb => {
                table.only(&[verb])?;
                if !table.flag(verb, true)? {
                    return Err(self.error(value.span(), format!("`{verb} = false` does nothing")).hint("leave the step out"));
                }
                if verb == "empty_cache" { Action::EmptyCache } else { Action::Synchronize }
            }
        };
        Ok(Step { line, action })
    }

    fn alloc(&self, table: &Table<'_, '_>, value: Value_<'_, '_>, scope: &mut Scope) -> Result<Action> {
        table.only(&["alloc", "size", "shape", "dtype", "count", "stream", "lifetime"])?;
        let name = self.name(value, "alloc")?;
        let size = match (table.get("size"), table.get("shape")) {
            (Some(_), Some(shape)) => {
                return Err(self.error(shape.span(), "`alloc` takes `size` or `shape`, not both".into()));
            }
            (None, None) => {
                return Err(self.error(value.span(), format!("`alloc = \"{name}\"` has neither `size` nor `shape`")));
            }
            (Some(size), None) => {
                if let Some(dtype) = table.get("dtype") {
                    return Err(self.error(dtype.span(), "`dtype` goes with `shape`, not with `size`".into()));
                }
                self.size(size)?
            }
            (None, Some(shape)) => {
                let dims = self.array(shape, "shape")?.into_iter().map(|dim| self.dim(dim, "shape", scope)).collect::<Result<Vec<_>>>()?;
                if dims.is_empty() {
                    return Err(self.error(shape.span(), "`shape` is empty".into()));
                }
                let fixed = dims.iter().try_fold(1u64, |product, dim| product.checked_mul(dim.factor)).and_then(|n| n.checked_mul(8));
                if fixed.is_none_or(|bytes| bytes >= 1 << 60) {
                    return Err(self.error(shape.span(), "`shape` is too large".into()));
                }
                Size::Shape { dims, element: self.dtype(table)? }
            }
        };
        let lifetime = match table.get("lifetime") {
            None => Lifetime::Scenario,
            Some(value) => self.lifetime(value, scope)?,
        };
        if !scope.names.contains(&name) {
            scope.names.push(name.clone());
        }
        let count = table.number("count", 1, 1..MAX_ALLOCATIONS)?;
        let stream = table.number("stream", 0, STREAM)? as u32;
        Ok(Action::Alloc { name, size, count, stream, lifetime })
    }

    fn dtype(&self, table: &Table<'_, '_>) -> Result<u64> {
        let Some(value) = table.get("dtype") else { return Ok(4) };
        let names: Vec<&str> = DTYPES.iter().map(|(name, _)| *name).collect();
        let name = self.choice(value, "dtype", &names)?;
        Ok(dtype_size(name).unwrap_or(4))
    }

    fn lifetime(&self, value: Value_<'_, '_>, scope: &Scope) -> Result<Lifetime> {
        let limit = 0..1_000_000;
        match value.get_ref() {
            DeValue::String(_) => Ok(match self.choice(value, "lifetime", &["scenario", "phase", "iteration"])? {
                "phase" => Lifetime::Phase,
                "iteration" => Lifetime::Iterations { min: 0, max: 0 },
                _ => Lifetime::Scenario,
            }),
            DeValue::Integer(_) => {
                let times = self.number(value, "lifetime", limit)? as u32;
                Ok(Lifetime::Iterations { min: times, max: times })
            }
            DeValue::Table(_) => {
                let table = self.table(value, "`lifetime`")?;
                table.only(&["min", "max"])?;
                let min = self.number(table.need("min")?, "min", limit.clone())? as u32;
                let max = self.number(table.need("max")?, "max", limit)? as u32;
                if min > max {
                    return Err(self.error(value.span(), format!("`min` ({min}) is more than `max` ({max})")));
                }
                debug_assert!(scope.loops > 0);
                Ok(Lifetime::Iterations { min, max })
            }
            other => Err(self.wrong(value, "lifetime", "\"phase\", \"iteration\", a number of iterations or { min, max }", other)),
        }
    }

    fn size(&self, value: Value_<'_, '_>) -> Result<Size> {
        match value.get_ref() {
            DeValue::Table(_) => {
                let table = self.table(value, "`size`")?;
                table.only(&["min", "max", "multiple", "log"])?;
                let min = self.positive_bytes(table.need("min")?, "min")?;
                let max = self.positive_bytes(table.need("max")?, "max")?;
                let multiple = table.size("multiple", 1)?.max(1);
                if min > max {
                    return Err(self.error(value.span(), format!("`min` ({min} bytes) is more than `max` ({max} bytes)")));
                }
                Ok(Size::Random { min, max, multiple, log: table.flag("log", false)? })
            }
            DeValue::Array(_) => {
                let sizes =
                    self.array(value, "size")?.into_iter().map(|size| self.positive_bytes(size, "size")).collect::<Result<Vec<_>>>()?;
                if sizes.is_empty() {
                    return Err(self.error(value.span(), "`size` is an empty list".into()));
                }
                Ok(Size::OneOf(sizes))
            }
            _ => Ok(Size::Fixed(self.positive_bytes(value, "size")?)),
        }
    }

    fn dim(&self, value: Value_<'_, '_>, key: &str, scope: &Scope) -> Result<Dim> {
        match value.get_ref() {
            DeValue::Integer(_) => Ok(Dim { factor: self.number(value, key, 1..(1 << 40))?, variables: Vec::new() }),
            DeValue::String(text) => {
                let mut dim = Dim { factor: 1, variables: Vec::new() };
                for part in text.split('*').map(str::trim) {
                    if let Ok(number) = part.parse::<u64>() {
                        dim.factor = match dim.factor.checked_mul(number) {
                            Some(factor) if factor > 0 && factor < 1 << 40 => factor,
                            _ => return Err(self.error(value.span(), format!("`{key}` has an impossible dimension: `{text}`"))),
                        };
                    } else if scope.variables.contains(part) {
                        dim.variables.push(part.to_owned());
                    } else {
                        let error = self.error(value.span(), format!("`{key}` uses `{part}`, which no earlier step sets"));
                        return Err(match nearest(part, scope.variables.iter().map(String::as_str)) {
                            Some(near) => error.hint(format!("did you mean `{near}`?")),
                            None => error.hint(format!("add a step before it: {{ set = \"{part}\", value = 128 }}")),
                        });
                    }
                }
                Ok(dim)
            }
            other => Err(self.wrong(value, key, "a number or a product such as \"B*128\"", other)),
        }
    }

    fn pattern(&self, value: Value_<'_, '_>, key: &str, scope: &Scope) -> Result<String> {
        let pattern = self.text(value, key)?;
        if scope.names.iter().any(|name| glob(&pattern, name)) {
            return Ok(pattern);
        }
        let error = self.error(value.span(), format!("`{key}` names `{pattern}`, which no earlier step allocates"));
        Err(match nearest(&pattern, scope.names.iter().map(String::as_str)) {
            Some(near) => error.hint(format!("did you mean `{near}`?")),
            None if scope.names.is_empty() => error.hint("allocate something first"),
            None => error.hint(format!("allocated so far: {}", backticked(&scope.names.iter().map(String::as_str).collect::<Vec<_>>()))),
        })
    }

    fn free(&self, table: &Table<'_, '_>, value: Value_<'_, '_>, scope: &Scope) -> Result<Action> {
        table.only(&["free", "order", "keep_every", "keep_last", "keep_fraction"])?;
        let pattern = self.pattern(value, "free", scope)?;
        let order = match table.get("order") {
            None => Order::Forward,
            Some(value) => match self.choice(value, "order", &["forward", "reverse", "random"])? {
                "reverse" => Order::Reverse,
                "random" => Order::Random,
                _ => Order::Forward,
            },
        };
        let keeps: Vec<&str> = ["keep_every", "keep_last", "keep_fraction"].into_iter().filter(|key| table.get(key).is_some()).collect();
        let keep = match keeps.as_slice() {
            [] => Keep::None,
            ["keep_every"] => Keep::Every(table.number("keep_every", 1, U32)?),
            ["keep_last"] => Keep::Last(table.number("keep_last", 1, U32)?),
            ["keep_fraction"] => Keep::Fraction(self.float(table.need("keep_fraction")?, "keep_fraction")?),
            [one, two, ..] => {
                let span = table.need(two)?.span();
                return Err(self.error(span, format!("`free` takes `{one}` or `{two}`, not both")));
            }
            [_] => Keep::None,
        };
        Ok(Action::Free { pattern, order, keep })
    }

    fn set(&self, table: &Table<'_, '_>, value: Value_<'_, '_>, scope: &mut Scope) -> Result<Action> {
        table.only(&["set", "value", "random", "cycle", "multiple"])?;
        let variable = self.text(value, "set")?;
        if variable.is_empty()
            || !variable.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
            || variable.as_bytes()[0].is_ascii_digit()
        {
            return Err(self.error(value.span(), format!("`set` is no variable name: `{variable}`")));
        }
        const LIMIT: Range<u64> = 1..(1 << 40);
        let numbers = |value: Value_<'_, '_>, key: &str| -> Result<Vec<u64>> {
            self.array(value, key)?.into_iter().map(|item| self.number(item, key, LIMIT)).collect()
        };
        if let (Some(multiple), None) = (table.get("multiple"), table.get("random")) {
            return Err(self.error(multiple.span(), "`multiple` goes with `random`".into()));
        }
        let made = match (table.get("value"), table.get("random"), table.get("cycle")) {
            (Some(value), None, None) => Value::Fixed(self.number(value, "value", LIMIT)?),
            (None, Some(value), None) => match numbers(value, "random")?.as_slice() {
                [min, max] if min <= max => Value::Random { min: *min, max: *max, multiple: table.number("multiple", 1, LIMIT)? },
                _ => return Err(self.error(value.span(), "`random` must be [min, max] with min <= max".into())),
            },
            (None, None, Some(value)) => match numbers(value, "cycle")? {
                list if list.is_empty() => return Err(self.error(value.span(), "`cycle` is an empty list".into())),
                list => Value::Cycle(list),
            },
            _ => {
                return Err(self.error(value.span(), format!("`set = \"{variable}\"` needs exactly one of `value`, `random` and `cycle`")));
            }
        };
        scope.variables.insert(variable.clone());
        Ok(Action::Set { variable, value: made })
    }

    fn network(&self, table: &Table<'_, '_>, value: Value_<'_, '_>, scope: &mut Scope) -> Result<Action> {
        table.only(&["network", "run", "as", "batch", "image", "dtype", "stream"])?;
        let network = self.choice(value, "network", networks::NAMES)?;
        let run = self.choice(table.need("run")?, "run", networks::RUNS)?;
        let name = match table.get("as") {
            Some(value) => self.name(value, "as")?,
            None => network.to_owned(),
        };
        let needs_batch = matches!(run, "forward" | "backward" | "inference");
        let batch = match table.get("batch") {
            Some(value) => self.dim(value, "batch", scope)?,
            None if needs_batch => {
                return Err(self.error(value.span(), format!("`run = \"{run}\"` needs a `batch`")));
            }
            None => Dim { factor: 1, variables: Vec::new() },
        };
        let image = table.number("image", 224, 32..4097)?;
        let spec = networks::Spec { network: network.to_owned(), run: run.to_owned(), image, element: self.dtype(table)? };
        for part in networks::groups(run) {
            let full = format!("{name}.{part}");
            if !scope.names.contains(&full) {
                scope.names.push(full);
            }
        }
        if run == "backward" && !scope.names.iter().any(|known| *known == format!("{name}.saved")) {
            return Err(self
                .error(value.span(), format!("`backward` of `{name}` comes before its `forward`"))
                .hint("add a step before it with run = \"forward\" and the same `as`"));
        }
        Ok(Action::Network { spec, batch, name, stream: table.number("stream", 0, STREAM)? as u32 })
    }
}

fn kind_of(value: &DeValue<'_>) -> &'static str {
    match value {
        DeValue::String(_) => "a string",
        DeValue::Integer(_) => "a whole number",
        DeValue::Float(_) => "a number with a fraction",
        DeValue::Boolean(_) => "true or false",
        DeValue::Datetime(_) => "a date",
        DeValue::Array(_) => "a list",
        DeValue::Table(_) => "a table",
    }
}

/// An upper estimate of steps and allocations of one pass.
fn work(steps: &[Step]) -> u64 {
    steps
        .iter()
        .map(|step| match &step.action {
            Action::Alloc { count, .. } => *count,
            Action::Repeat { times, steps } => work(steps).saturating_mul(u64::from(*times)),
            Action::Network { .. } => 2_000,
            _ => 1,
        })
        .fold(0, u64::saturating_add)
}
