//! One error type for the whole house: what happened, why, and what to do next.
//!
//! An [`Error`] carries a [`Kind`] (which decides the process exit code), a message, the chain of causes, hints
//! (each the next thing to try) and, where a file written by a person is at fault, the place in it.
//! Message style: lower-case start, no full stop at the end, names in backticks.

use std::fmt;
use std::path::Path;
use std::sync::Arc;

/// `Result` with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What sort of failure this is. The exit codes are public and never change meaning (see `docs/exit-codes.md`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    /// Anything that has no code of its own.
    Failure,
    /// The command line, a file or a setting asks for something that does not exist.
    Usage,
    /// No set of packages satisfies the request.
    Unsatisfiable,
    /// Spec, lock and environment disagree.
    Drift,
    /// A verification of files or packages failed.
    Verification,
    /// A GPU check failed.
    GpuCheck,
    /// A network failure, or something is missing while offline.
    Network,
    /// A required check could not be run.
    NotTested,
    /// Stopped by Ctrl-C or SIGTERM.
    Interrupted,
    /// `run` could not start its command (125), found it not executable (126) or not at all (127).
    Run(u8),
}

impl serde::Serialize for Kind {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

impl Kind {
    /// The name in JSON documents.
    pub const fn name(self) -> &'static str {
        match self {
            Kind::Failure => "failure",
            Kind::Usage => "usage",
            Kind::Unsatisfiable => "unsatisfiable",
            Kind::Drift => "drift",
            Kind::Verification => "verification",
            Kind::GpuCheck => "gpu-check",
            Kind::Network => "network",
            Kind::NotTested => "not-tested",
            Kind::Interrupted => "interrupted",
            Kind::Run(_) => "run",
        }
    }

    /// The process exit code.
    pub const fn exit_code(self) -> u8 {
        match self {
            Kind::Failure => 1,
            Kind::Usage => 2,
            Kind::Unsatisfiable => 3,
            Kind::Drift => 4,
            Kind::Verification => 5,
            Kind::GpuCheck => 6,
            Kind::Network => 7,
            Kind::NotTested => 8,
            Kind::Interrupted => 130,
            Kind::Run(code) => code,
        }
    }
}

/// A place in a text that a person wrote.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// Path or URL as the user gave it; `<stdin>` for standard input.
    pub name: Arc<str>,
    /// The whole text, decoded to UTF-8.
    pub text: Arc<str>,
    /// Byte offset of the start of the span in `text`.
    pub offset: usize,
    /// Length of the span in bytes; 0 for a point.
    pub len: usize,
    /// What the marker says; may be empty.
    pub label: String,
}

impl Place {
    /// 1-based line and column (in characters) of the start of the span.
    pub fn line_column(&self) -> (usize, usize) {
        let mut offset = self.offset.min(self.text.len());
        while !self.text.is_char_boundary(offset) {
            offset -= 1;
        }
        let before = &self.text[..offset];
        let line = before.matches('\n').count() + 1;
        let start = before.rfind('\n').map_or(0, |at| at + 1);
        (line, before[start..].chars().count() + 1)
    }
}

#[derive(Debug, Clone)]
struct Inner {
    kind: Kind,
    message: String,
    causes: Vec<String>,
    hints: Vec<String>,
    places: Vec<Place>,
}

/// An error that a person can act on. Cheap to move, cloneable.
#[derive(Debug, Clone)]
pub struct Error(Box<Inner>);

impl Error {
    /// An error of `kind`. `message`: what happened, lower-case start, no full stop.
    pub fn new(kind: Kind, message: impl Into<String>) -> Self {
        Error(Box::new(Inner { kind, message: message.into(), causes: Vec::new(), hints: Vec::new(), places: Vec::new() }))
    }

    /// Exit code 1.
    pub fn failure(message: impl Into<String>) -> Self {
        Self::new(Kind::Failure, message)
    }

    /// Exit code 2.
    pub fn usage(message: impl Into<String>) -> Self {
        Self::new(Kind::Usage, message)
    }

    /// Exit code 7.
    pub fn network(message: impl Into<String>) -> Self {
        Self::new(Kind::Network, message)
    }

    /// Adds a cause: why it happened, outermost first.
    #[must_use]
    pub fn because(mut self, cause: impl fmt::Display) -> Self {
        self.0.causes.push(cause.to_string());
        self
    }

    /// Adds every error of a `source()` chain as causes.
    #[must_use]
    pub fn because_of(mut self, error: &(dyn std::error::Error + 'static)) -> Self {
        let mut next = Some(error);
        while let Some(error) = next {
            let text = error.to_string();
            // Many libraries repeat the source's text in their own.
            if !self.0.causes.last().is_some_and(|last| last.contains(&text)) {
                self.0.causes.push(text);
            }
            next = error.source();
        }
        self
    }

    /// Adds a hint: the next thing to try.
    #[must_use]
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.0.hints.push(hint.into());
        self
    }

    /// Adds several hints.
    #[must_use]
    pub fn hints_from(mut self, hints: impl IntoIterator<Item = String>) -> Self {
        self.0.hints.extend(hints);
        self
    }

    /// Adds a place in a source text. The first one is the main place.
    #[must_use]
    pub fn at(mut self, place: Place) -> Self {
        self.0.places.push(place);
        self
    }

    /// Replaces the message by `context: message`-style nesting: the old message becomes the first cause.
    #[must_use]
    pub fn context(mut self, message: impl Into<String>) -> Self {
        let old = std::mem::replace(&mut self.0.message, message.into());
        self.0.causes.insert(0, old);
        self
    }

    /// Changes the kind.
    #[must_use]
    pub fn with_kind(mut self, kind: Kind) -> Self {
        self.0.kind = kind;
        self
    }

    /// An I/O error on a path: `cannot VERB \`PATH\``.
    pub fn io(verb: &str, path: &Path, error: &std::io::Error) -> Self {
        let mut made = Self::failure(format!("cannot {verb} `{}`", path.display())).because(error);
        // An error that was wrapped has the kind and no number.
        if matches!(error.kind(), std::io::ErrorKind::StorageFull | std::io::ErrorKind::QuotaExceeded) {
            made =
                made.hint("free some disk space there, or choose another place for the environment (`-p`) or the cache (TARE_CACHE_DIR)");
        }
        made
    }

    pub fn kind(&self) -> Kind {
        self.0.kind
    }
    pub fn message(&self) -> &str {
        &self.0.message
    }
    pub fn causes(&self) -> &[String] {
        &self.0.causes
    }
    pub fn hints(&self) -> &[String] {
        &self.0.hints
    }
    pub fn places(&self) -> &[Place] {
        &self.0.places
    }
    /// The process exit code of this error.
    pub fn exit_code(&self) -> u8 {
        self.0.kind.exit_code()
    }
}

impl fmt::Display for Error {
    /// One line: place, message, causes.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(place) = self.0.places.first() {
            let (line, column) = place.line_column();
            write!(f, "{}:{line}:{column}: ", place.name)?;
        }
        f.write_str(&self.0.message)?;
        for cause in &self.0.causes {
            write!(f, ": {cause}")?;
        }
        Ok(())
    }
}

impl std::error::Error for Error {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_counts_lines_and_characters_from_one() {
        let place = Place { name: "e.yml".into(), text: "a: 1\nä: ö\n".into(), offset: 9, len: 2, label: String::new() };
        assert_eq!(place.line_column(), (2, 4));
        let error = Error::usage("bad value").because("it is bad").at(place);
        assert_eq!(error.to_string(), "e.yml:2:4: bad value: it is bad");
        assert_eq!(error.exit_code(), 2);
    }

    #[test]
    fn an_offset_inside_a_character_or_past_the_end_is_no_panic() {
        for offset in 0..20 {
            let place = Place { name: "x".into(), text: "ä\nb".into(), offset, len: 0, label: String::new() };
            place.line_column();
        }
    }
}
