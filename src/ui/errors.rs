//! Errors and warnings as text (for people) and as JSON (for programs).

use annotate_snippets::{AnnotationKind, Level, Renderer, Snippet};
use serde_json::{Value, json};

use super::SCHEMA_VERSION;
use crate::error::{Error, Place};

/// What the headline says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Severity {
    Error,
    Warning,
}

const RED: anstyle::Style = anstyle::AnsiColor::Red.on_default().bold();
const YELLOW: anstyle::Style = anstyle::AnsiColor::Yellow.on_default().bold();
const CYAN: anstyle::Style = anstyle::AnsiColor::Cyan.on_default().bold();

/// The text of an error: headline, snippet, causes, hints. Ends with a line feed. Escape codes are always in it;
/// the stream removes them where they are not wanted.
pub fn render(error: &Error, severity: Severity) -> String {
    let (style, word, level) = match severity {
        Severity::Error => (RED, "error", Level::ERROR),
        Severity::Warning => (YELLOW, "warning", Level::WARNING),
    };
    let mut text = String::new();
    let places = error.places();
    if places.is_empty() {
        text.push_str(&format!("{style}{word}{style:#}: {}\n", error.message()));
    } else {
        let mut group =
            level.primary_title(error.message().to_owned()).elements(std::iter::empty::<Snippet<'_, annotate_snippets::Annotation<'_>>>());
        for (nth, place) in places.iter().enumerate() {
            let kind = if nth == 0 { AnnotationKind::Primary } else { AnnotationKind::Context };
            let mut annotation = kind.span(span(place));
            if !place.label.is_empty() {
                annotation = annotation.label(place.label.clone());
            }
            group = group.element(Snippet::source(place.text.to_string()).path(place.name.to_string()).annotation(annotation));
        }
        text.push_str(&Renderer::styled().render(&[group]));
        text.push('\n');
    }
    for cause in error.causes() {
        for (nth, line) in cause.lines().enumerate() {
            text.push_str(if nth == 0 { "  ╰─ " } else { "     " });
            text.push_str(line);
            text.push('\n');
        }
    }
    for hint in error.hints() {
        for (nth, line) in hint.lines().enumerate() {
            if nth == 0 {
                text.push_str(&format!("{CYAN}hint{CYAN:#}: {line}\n"));
            } else {
                text.push_str(&format!("      {line}\n"));
            }
        }
    }
    text
}

/// A span that lies on character boundaries inside the text.
fn span(place: &Place) -> std::ops::Range<usize> {
    let down = |mut at: usize| {
        at = at.min(place.text.len());
        while !place.text.is_char_boundary(at) {
            at -= 1;
        }
        at
    };
    let start = down(place.offset);
    let end = down(place.offset.saturating_add(place.len)).max(start);
    start..end
}

/// The JSON document of an error: `{"schema_version", "success": false, "message", "error": {…}}`.
pub fn error_json(error: &Error) -> Value {
    let places: Vec<Value> = error
        .places()
        .iter()
        .map(|place| {
            let (line, column) = place.line_column();
            json!({ "file": &*place.name, "line": line, "column": column, "label": place.label })
        })
        .collect();
    json!({
        "schema_version": SCHEMA_VERSION,
        "success": false,
        "message": error.to_string(),
        "error": {
            "kind": error.kind(),
            "exit_code": error.exit_code(),
            "message": error.message(),
            "causes": error.causes(),
            "hints": error.hints(),
            "places": places,
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plain(error: &Error) -> String {
        anstream::adapter::strip_str(&render(error, Severity::Error)).to_string()
    }

    #[test]
    fn without_a_place() {
        let error =
            Error::failure("no build of `pytorch 2.7.*` runs here").because("needs `__cuda`\nwhich is absent").hint("add `--cuda 12.6`");
        insta::assert_snapshot!(plain(&error), @r"
        error: no build of `pytorch 2.7.*` runs here
          ╰─ needs `__cuda`
             which is absent
        hint: add `--cuda 12.6`
        ");
    }

    #[test]
    fn with_two_places() {
        let text: std::sync::Arc<str> = "name: a\nchannels: [x]\nname: b\n".into();
        let place = |offset, label: &str| Place { name: "env.yml".into(), text: text.clone(), offset, len: 4, label: label.into() };
        let error = Error::usage("duplicate key `name`").at(place(22, "again here")).at(place(0, "first here"));
        insta::assert_snapshot!(plain(&error), @r"
        error: duplicate key `name`
         --> env.yml:3:1
          |
        3 | name: b
          | ^^^^ again here
          |
         ::: env.yml:1:1
          |
        1 | name: a
          | ---- first here
        ");
    }

    #[test]
    fn spans_outside_the_text_are_clamped() {
        for offset in 0..12 {
            let place = Place { name: "x".into(), text: "ä: ü\r\n".into(), offset, len: usize::MAX, label: "here".into() };
            assert!(plain(&Error::usage("bad").at(place)).contains("bad"));
        }
    }

    #[test]
    fn json_has_kind_hints_and_places() {
        let place = Place { name: "x".into(), text: "a\nb".into(), offset: 2, len: 1, label: String::new() };
        let value = error_json(&Error::usage("bad").hint("do").at(place));
        assert_eq!(value["error"]["kind"], "usage");
        assert_eq!(value["error"]["exit_code"], 2);
        assert_eq!(value["error"]["places"][0]["line"], 2);
        assert_eq!(value["message"], "x:2:1: bad");
        assert_eq!(value["success"], false);
    }
}
