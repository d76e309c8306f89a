//! YAML as conda writes it (ruamel.yaml, YAML 1.2, block style, mappings indented by two, sequences by four with the dash at two).
//!
//! serde_yaml quotes and indents otherwise, and the bytes are to be the same.

use std::fmt::Write as _;

/// Line width at which scalars with spaces are folded.
const WIDTH: usize = 80;

/// A value of a document.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Node {
    /// Text.
    Text(String),
    /// A block sequence.
    List(Vec<Node>),
    /// A block mapping, in order.
    Map(Vec<(String, Node)>),
}

impl Node {
    /// A sequence of texts.
    pub fn texts(items: impl IntoIterator<Item = impl Into<String>>) -> Self {
        Node::List(items.into_iter().map(|item| Node::Text(item.into())).collect())
    }
}

/// The document of a mapping.
pub fn document(entries: &[(String, Node)]) -> String {
    let mut text = String::new();
    map(&mut text, entries, 0, true);
    text
}

fn map(text: &mut String, entries: &[(String, Node)], indent: usize, fresh: bool) {
    for (index, (key, value)) in entries.iter().enumerate() {
        if index > 0 || !fresh || indent == 0 {
            text.push_str(&" ".repeat(if index == 0 && fresh { 0 } else { indent }));
        }
        scalar(text, key, indent, false);
        text.push(':');
        match value {
            Node::Text(value) => {
                text.push(' ');
                scalar(text, value, indent + 2, true);
                text.push('\n');
            }
            Node::List(items) if items.is_empty() => text.push_str(" []\n"),
            Node::Map(entries) if entries.is_empty() => text.push_str(" {}\n"),
            Node::List(items) => {
                text.push('\n');
                list(text, items, indent);
            }
            Node::Map(entries) => {
                text.push('\n');
                map(text, entries, indent + 2, false);
            }
        }
    }
}

fn list(text: &mut String, items: &[Node], indent: usize) {
    for item in items {
        text.push_str(&" ".repeat(indent + 2));
        text.push_str("- ");
        match item {
            Node::Text(value) => {
                scalar(text, value, indent + 6, true);
                text.push('\n');
            }
            Node::Map(entries) if !entries.is_empty() => map(text, entries, indent + 4, true),
            Node::Map(_) => text.push_str("{}\n"),
            Node::List(items) if items.is_empty() => text.push_str("[]\n"),
            Node::List(items) => list(text, items, indent + 2),
        }
    }
}

/// Writes a scalar in the plainest style that reads back as the same text. `indent`: of continuation lines; `fold`: long ones may be folded.
fn scalar(text: &mut String, value: &str, indent: usize, fold: bool) {
    let column = text.len() - text.rfind('\n').map_or(0, |at| at + 1);
    if value
        .chars()
        .any(|c| c == '\u{85}' || c == '\u{feff}' || ('\u{7f}'..='\u{9f}').contains(&c) || c < ' ' || matches!(c, '\u{2028}' | '\u{2029}'))
    {
        double_quoted(text, value);
    } else if value.is_empty() || is_other_type(value) || !can_be_plain(value) {
        let quoted = format!("'{}'", value.replace('\'', "''"));
        folded(text, &quoted, column, indent, fold);
    } else {
        folded(text, value, column, indent, fold);
    }
}

/// Breaks the line at a single space once it is wider than [`WIDTH`].
fn folded(text: &mut String, value: &str, mut column: usize, indent: usize, fold: bool) {
    let mut rest = value;
    while let Some(at) = rest.find(' ') {
        let (word, tail) = rest.split_at(at);
        text.push_str(word);
        column += word.chars().count();
        let spaces = tail.len() - tail.trim_start_matches(' ').len();
        rest = &tail[spaces..];
        let inside = !rest.is_empty() && rest != "'" && !word.is_empty() && word != "'";
        if fold && spaces == 1 && column > WIDTH && inside {
            text.push('\n');
            text.push_str(&" ".repeat(indent));
            column = indent;
        } else {
            text.push_str(&" ".repeat(spaces));
            column += spaces;
        }
    }
    text.push_str(rest);
}

fn double_quoted(text: &mut String, value: &str) {
    text.push('"');
    for c in value.chars() {
        match c {
            '"' => text.push_str("\\\""),
            '\\' => text.push_str("\\\\"),
            '\n' => text.push_str("\\n"),
            '\r' => text.push_str("\\r"),
            '\t' => text.push_str("\\t"),
            '\0' => text.push_str("\\0"),
            '\u{7}' => text.push_str("\\a"),
            '\u{8}' => text.push_str("\\b"),
            '\u{b}' => text.push_str("\\v"),
            '\u{c}' => text.push_str("\\f"),
            '\u{1b}' => text.push_str("\\e"),
            '\u{85}' => text.push_str("\\N"),
            '\u{2028}' => text.push_str("\\L"),
            '\u{2029}' => text.push_str("\\P"),
            c if (c as u32) < 0x20 || ('\u{7f}'..='\u{9f}').contains(&c) => {
                let _ = write!(text, "\\x{:02X}", c as u32);
            }
            '\u{feff}' => text.push_str("\\uFEFF"),
            c => text.push(c),
        }
    }
    text.push('"');
}

/// Whether a plain scalar of this text would be a number, truth value, null, time or merge key.
fn is_other_type(value: &str) -> bool {
    if matches!(value, "~" | "null" | "Null" | "NULL" | "true" | "True" | "TRUE" | "false" | "False" | "FALSE" | "<<" | "=") {
        return true;
    }
    let unsigned = value.strip_prefix(['-', '+']).unwrap_or(value);
    let all = |text: &str, accept: fn(char) -> bool| !text.is_empty() && text.chars().all(accept);
    if matches!(unsigned, ".inf" | ".Inf" | ".INF") || matches!(value, ".nan" | ".NaN" | ".NAN") {
        return true;
    }
    let digits = |c: char| c.is_ascii_digit() || c == '_';
    let of_base = |prefix: &str, accept: fn(char) -> bool| unsigned.strip_prefix(prefix).is_some_and(|rest| all(rest, accept));
    if of_base("0b", |c| matches!(c, '0' | '1' | '_'))
        || of_base("0o", |c| matches!(c, '0'..='7' | '_'))
        || of_base("0x", |c| c.is_ascii_hexdigit() || c == '_')
    {
        return true;
    }
    if unsigned.starts_with(|c: char| c.is_ascii_digit()) && all(unsigned, digits) {
        return true;
    }
    is_float(unsigned) || is_time(value)
}

/// `1.5`, `1.`, `.5`, `1e5`, `1.5e+3`.
fn is_float(text: &str) -> bool {
    let (mantissa, exponent) = match text.find(['e', 'E']) {
        Some(at) => (&text[..at], Some(&text[at + 1..])),
        None => (text, None),
    };
    if let Some(exponent) = exponent {
        let digits = exponent.strip_prefix(['-', '+']).unwrap_or(exponent);
        if digits.is_empty() || !digits.chars().all(|c| c.is_ascii_digit()) {
            return false;
        }
    }
    let number = |text: &str| text.chars().all(|c| c.is_ascii_digit() || c == '_');
    match mantissa.split_once('.') {
        Some((whole, fraction)) => {
            number(whole)
                && number(fraction)
                && (whole.starts_with(|c: char| c.is_ascii_digit())
                    || (whole.is_empty() && fraction.starts_with(|c: char| c.is_ascii_digit())))
        }
        None => exponent.is_some() && mantissa.starts_with(|c: char| c.is_ascii_digit()) && number(mantissa),
    }
}

/// `2026-01-01` and longer times.
fn is_time(text: &str) -> bool {
    let bytes = text.as_bytes();
    let digits = |range: std::ops::Range<usize>| bytes.get(range).is_some_and(|part| part.iter().all(u8::is_ascii_digit));
    if !(digits(0..4) && bytes.get(4) == Some(&b'-')) {
        return false;
    }
    if bytes.len() == 10 && digits(5..7) && bytes[7] == b'-' && digits(8..10) {
        return true;
    }
    // A date with a time behind it.
    let mut parts = text[5..].splitn(2, '-');
    let month = parts.next().unwrap_or_default();
    let rest = parts.next().unwrap_or_default();
    let day_len = rest.bytes().take_while(u8::is_ascii_digit).count();
    let number = |part: &str| (1..=2).contains(&part.len()) && part.bytes().all(|byte| byte.is_ascii_digit());
    number(month)
        && (1..=2).contains(&day_len)
        && rest[day_len..].starts_with(['T', 't', ' ', '\t'])
        && rest[day_len..].trim_start_matches(['T', 't', ' ', '\t']).starts_with(|c: char| c.is_ascii_digit())
        && rest.contains(':')
}

/// Whether the syntax lets this text stand without quotes in block context.
fn can_be_plain(value: &str) -> bool {
    let mut characters = value.chars();
    let first = characters.next().unwrap_or(' ');
    let second = characters.next();
    if value.starts_with(' ') || value.ends_with(' ') || value.starts_with("---") || value.starts_with("...") {
        return false;
    }
    if matches!(first, '#' | ',' | '[' | ']' | '{' | '}' | '&' | '*' | '!' | '|' | '>' | '\'' | '"' | '%' | '@' | '`') {
        return false;
    }
    if matches!(first, '?' | ':' | '-') && second.is_none_or(|c| c == ' ') {
        return false;
    }
    !value.contains(": ") && !value.ends_with(':') && !value.contains(" #")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scalars_are_quoted_only_where_they_must_be() {
        let shown = |value: &str| {
            let mut text = String::new();
            scalar(&mut text, value, 2, true);
            text
        };
        for plain in ["a", "python=3.11", "a b", "/x/y", "1.2.3", "2026c", "yes", "on", "a:b", "=x", "-a", "0x", "e5", "http://x#y"]
        {
            assert_eq!(shown(plain), plain);
        }
        for quoted in [
            "8",
            "false",
            "null",
            "~",
            "1.5",
            ".5",
            "1e5",
            "1_000",
            "0x1F",
            "0o7",
            "2026-01-01",
            "",
            " a",
            "a ",
            "a: b",
            "a #b",
            "*x",
            "- a",
            "-",
            "<<",
            "=",
            "+.inf",
        ] {
            assert_eq!(shown(quoted), format!("'{}'", quoted.replace('\'', "''")), "{quoted}");
        }
        assert_eq!(shown("it's"), "it's");
        assert_eq!(shown("'it"), "'''it'");
        assert_eq!(shown("a\nb\u{1}"), "\"a\\nb\\x01\"");
    }

    #[test]
    fn long_texts_are_folded_and_read_back() {
        let words = vec!["word"; 60].join(" ");
        let text = document(&[(
            "variables".into(),
            Node::Map(vec![("A".into(), Node::Text(words.clone())), ("B".into(), Node::Text("1".into()))]),
        )]);
        assert!(text.lines().count() > 3 && text.contains("\n    word"), "{text}");
        let read: serde_yaml::Value = serde_yaml::from_str(&text).unwrap();
        assert_eq!(read["variables"]["A"].as_str(), Some(words.as_str()));
        assert_eq!(read["variables"]["B"].as_str(), Some("1"));
    }

    proptest::proptest! {
        #[test]
        fn what_is_written_reads_back(values in proptest::collection::vec("[ -~äé\n\t]{0,30}", 0..4), key in "[A-Z_]{1,8}") {
            let text = document(&[
                (key.clone(), Node::texts(values.clone())),
                ("last".into(), Node::List(vec![Node::Map(vec![("pip".into(), Node::texts(values.clone()))])])),
            ]);
            let read: serde_yaml::Value = serde_yaml::from_str(&text).unwrap();
            let texts = |value: &serde_yaml::Value| -> Vec<String> {
                value.as_sequence().unwrap().iter().map(|item| item.as_str().unwrap_or("NOT A TEXT").to_owned()).collect()
            };
            proptest::prop_assert_eq!(texts(&read[key.as_str()]), values.clone());
            proptest::prop_assert_eq!(texts(&read["last"][0]["pip"]), values);
        }
    }
}
