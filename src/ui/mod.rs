//! The only writer to stdout and stderr.
//!
//! Data goes to stdout, everything else to stderr. With `--json` exactly one document is written to stdout, also for
//! errors. Colours follow the terminal, `NO_COLOR`, `CLICOLOR_FORCE` and `--color`.

mod errors;
mod github;
/// A screen that is drawn again and again until a key ends it.
pub mod live;
mod progress;
pub mod table;

use std::io::{IsTerminal, Write};
use std::sync::{Arc, OnceLock};

use serde::Serialize;
use serde_json::{Value, json};

use crate::channel::redact_text;
use crate::error::Error;
use crate::report::Progress;

pub use errors::error_json;

/// The version of every JSON document this program prints. A schema changes only with it.
pub const SCHEMA_VERSION: u32 = 1;

/// How much is said on stderr.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub enum Verbosity {
    /// Errors only.
    Quiet,
    /// Errors, warnings, notes, progress.
    #[default]
    Normal,
    /// Also details.
    Verbose,
}

/// When to use colours.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub enum ColorChoice {
    /// As the terminal allows, honouring `NO_COLOR` and `CLICOLOR_FORCE`.
    #[default]
    Auto,
    /// Always.
    Always,
    /// Never.
    Never,
}

/// Writes what commands have to say.
pub struct Printer {
    verbosity: Verbosity,
    json: bool,
    progress: Arc<progress::Bars>,
    lost: Arc<OnceLock<String>>,
}

impl Printer {
    /// A printer. With `json`, text meant for stdout is dropped in favour of the one document given to [`Printer::json`].
    pub fn new(verbosity: Verbosity, json: bool, color: ColorChoice) -> Self {
        match color {
            ColorChoice::Auto => {}
            ColorChoice::Always => anstream::ColorChoice::Always.write_global(),
            ColorChoice::Never => anstream::ColorChoice::Never.write_global(),
        }
        let terminal = std::io::stderr().is_terminal() && std::env::var_os("TERM").is_none_or(|term| term != "dumb");
        let mode = match (verbosity, json) {
            (Verbosity::Quiet, _) | (_, true) => progress::Mode::Hidden,
            _ if terminal => progress::Mode::Bars,
            _ => progress::Mode::Lines,
        };
        Printer { verbosity, json, progress: Arc::new(progress::Bars::new(mode, verbosity, json)), lost: Arc::default() }
    }

    /// Whether `--json` was given.
    pub fn is_json(&self) -> bool {
        self.json
    }

    /// How much is said.
    pub fn verbosity(&self) -> Verbosity {
        self.verbosity
    }

    /// The receiver for progress of library code.
    pub fn progress(&self) -> Arc<dyn Progress> {
        self.progress.clone()
    }

    /// Remarks collected so far (warnings), for the JSON document.
    pub fn warnings(&self) -> Vec<String> {
        self.progress.warnings()
    }

    /// Data: one line or more to stdout. Nothing in JSON mode.
    pub fn data(&self, text: &str) {
        if self.json {
            return;
        }
        self.progress.suspend(|| {
            let mut out = anstream::stdout().lock();
            let end: &[u8] = if text.ends_with('\n') { b"" } else { b"\n" };
            self.written(out.write_all(text.as_bytes()).and_then(|()| out.write_all(end)).and_then(|()| out.flush()));
        });
    }

    /// Data that must reach stdout byte for byte, with no trailing line feed added.
    pub fn raw(&self, text: &str) {
        let mut out = std::io::stdout().lock();
        self.written(out.write_all(text.as_bytes()).and_then(|()| out.flush()));
    }

    /// Remembers that data did not reach stdout. A closed pipe is the reader's choice, not an error of ours.
    fn written(&self, result: std::io::Result<()>) {
        if let Err(error) = result
            && error.kind() != std::io::ErrorKind::BrokenPipe
        {
            let _ = self.lost.set(error.to_string());
        }
    }

    /// Whether data did not reach stdout, which is then said on stderr: a full disk must not look like success.
    pub fn lost_output(&self) -> bool {
        let Some(why) = self.lost.get() else { return false };
        self.stderr(&errors::render(&Error::failure("cannot write to standard output").because(why), errors::Severity::Error));
        true
    }

    /// Whether [`Printer::json`] prints: a large document is not made for nothing.
    pub fn wants_json(&self) -> bool {
        self.json
    }

    /// The one JSON document of a successful command: `schema_version` and `success` are added in front.
    pub fn json(&self, document: &impl Serialize) {
        if !self.json {
            return;
        }
        let value = serde_json::to_value(document).unwrap_or_else(|error| json!({ "message": error.to_string() }));
        let mut all = serde_json::Map::new();
        all.insert("schema_version".into(), json!(SCHEMA_VERSION));
        all.insert("success".into(), json!(true));
        match value {
            Value::Object(map) => all.extend(map),
            other => {
                all.insert("data".into(), other);
            }
        }
        let warnings = self.warnings();
        if !warnings.is_empty() && !all.contains_key("warnings") {
            all.insert("warnings".into(), json!(warnings));
        }
        self.raw(&format!("{:#}\n", Value::Object(all)));
    }

    /// A JSON array or other document printed as it is, where a shape is set by another tool (`list --json`).
    pub fn json_bare(&self, document: &Value) {
        if self.json {
            self.raw(&format!("{document:#}\n"));
        }
    }

    /// As [`Printer::json_bare`], without a line feed at the end.
    pub fn json_exactly(&self, document: &Value) {
        if self.json {
            self.raw(&format!("{document:#}"));
        }
    }

    /// A remark on stderr.
    pub fn note(&self, message: &str) {
        self.progress.note(message);
    }

    /// A detail on stderr, shown with `-v`.
    pub fn detail(&self, message: &str) {
        if self.verbosity >= Verbosity::Verbose {
            self.progress.note(message);
        }
    }

    /// A warning on stderr.
    pub fn warn(&self, message: &str, hints: &[String]) {
        self.progress.warn(message, hints);
    }

    /// A warning with a place and causes, shown like an error.
    pub fn warn_error(&self, warning: &Error) {
        self.progress.remember_warning(&warning.to_string());
        if self.verbosity >= Verbosity::Normal && !self.json {
            self.stderr(&errors::render(warning, errors::Severity::Warning));
        }
        if !warning.places().is_empty() {
            self.annotate("warning", warning);
        }
    }

    /// In GitHub Actions: shows what failed beside the line that is at fault, or with the step. Nothing elsewhere.
    pub fn annotate_error(&self, error: &Error) {
        self.annotate("error", error);
    }

    fn annotate(&self, level: &str, error: &Error) {
        if github::is_on() {
            let workspace = std::env::var_os("GITHUB_WORKSPACE").map(std::path::PathBuf::from);
            self.stderr(&github::annotation(level, error, workspace.as_deref()));
        }
    }

    /// An error: text on stderr, or in JSON mode the error document on stdout.
    pub fn error(&self, error: &Error) {
        self.progress.clear();
        if self.json {
            let mut document = error_json(error);
            redact(&mut document);
            self.raw(&format!("{document:#}\n"));
        } else {
            self.stderr(&errors::render(error, errors::Severity::Error));
        }
        self.annotate_error(error);
    }

    /// A usage error as clap words it.
    pub fn usage(&self, text: &str) {
        self.stderr(text);
    }

    fn stderr(&self, text: &str) {
        self.progress.suspend(|| {
            let _ = anstream::stderr().lock().write_all(redact_text(text).as_bytes());
        });
    }
}

/// Masks secrets in all texts of a document.
fn redact(value: &mut Value) {
    match value {
        Value::String(text) => *text = redact_text(text),
        Value::Array(items) => items.iter_mut().for_each(redact),
        Value::Object(items) => items.values_mut().for_each(redact),
        _ => {}
    }
}

/// Masks secrets in what is written through it, for logs: libraries below us log the URLs they ask. Each write is one
/// whole line of the log, as `tracing_subscriber::fmt` hands it over.
pub struct Masked<W>(pub W);

impl<W: Write> Write for Masked<W> {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.write_all(redact_text(&String::from_utf8_lossy(bytes)).as_bytes())?;
        Ok(bytes.len())
    }
    fn flush(&mut self) -> std::io::Result<()> {
        self.0.flush()
    }
}

/// Bytes for people: `1.5 GiB`. Exact bytes belong into JSON.
pub fn human_bytes(bytes: u64) -> String {
    crate::gpu::human_to(bytes, 1)
}

#[cfg(test)]
mod tests {
    use super::human_bytes;

    #[test]
    fn bytes_for_people() {
        assert_eq!(human_bytes(0), "0 B");
        assert_eq!(human_bytes(1023), "1023 B");
        assert_eq!(human_bytes(1536), "1.5 KiB");
        assert_eq!(human_bytes(u64::MAX), "16384.0 PiB");
    }
}
