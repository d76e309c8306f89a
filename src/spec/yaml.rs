//! YAML as a small tree that knows where everything stands in the text.
//!
//! Limits keep hostile text harmless: nesting [`MAX_DEPTH`], nodes after expansion of aliases [`MAX_NODES`].

use std::collections::HashMap;
use std::ops::Range;

use granit_parser::{Event, Parser, ScalarStyle};

use super::source::{Text, quote};
use crate::error::{Error, Result};

/// Deepest nesting that is read.
pub const MAX_DEPTH: usize = 48;
/// Most nodes in a document, aliases expanded.
pub const MAX_NODES: usize = 200_000;

/// A node with the byte range it comes from. A node that came through an alias has the range of the alias.
#[derive(Debug, Clone)]
pub struct Node {
    /// Byte range in the text.
    pub span: Range<usize>,
    /// What it is.
    pub value: Value,
}

/// The value of a node.
#[derive(Debug, Clone)]
pub enum Value {
    /// Any scalar, unresolved: `1.10` stays `1.10`.
    Scalar {
        /// After quotes, escapes and folding.
        text: String,
        /// Unquoted and untagged: may mean null, a number or a boolean.
        plain: bool,
    },
    /// A list.
    Sequence(Vec<Node>),
    /// A mapping, in order; keys are unique.
    Mapping(Vec<Entry>),
}

/// One `key: value`.
#[derive(Debug, Clone)]
pub struct Entry {
    /// The key's text.
    pub key: String,
    /// Where the key stands.
    pub key_span: Range<usize>,
    /// The value.
    pub value: Node,
}

/// What sort of plain scalar this is (YAML 1.2 core schema, plus YAML 1.1's spellings of null and booleans that conda's reader takes).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scalar {
    /// `null`, `~` or nothing.
    Null,
    /// `true`, `false`.
    Bool,
    /// An integer or a float.
    Number,
    /// Anything else, and everything quoted.
    Text,
}

impl Node {
    /// The scalar's text, if it is one.
    pub fn scalar(&self) -> Option<&str> {
        match &self.value {
            Value::Scalar { text, .. } => Some(text),
            _ => None,
        }
    }

    /// The kind of a scalar; `None` for lists and mappings.
    pub fn scalar_kind(&self) -> Option<Scalar> {
        let Value::Scalar { text, plain } = &self.value else { return None };
        if !plain {
            return Some(Scalar::Text);
        }
        Some(match text.as_str() {
            "" | "~" | "null" | "Null" | "NULL" => Scalar::Null,
            "true" | "True" | "TRUE" | "false" | "False" | "FALSE" => Scalar::Bool,
            text if is_number(text) => Scalar::Number,
            _ => Scalar::Text,
        })
    }

    /// Is it null or empty?
    pub fn is_null(&self) -> bool {
        self.scalar_kind() == Some(Scalar::Null)
    }

    /// For messages: "a list", "a number", …
    pub fn describe(&self) -> &'static str {
        match (&self.value, self.scalar_kind()) {
            (Value::Sequence(_), _) => "a list",
            (Value::Mapping(_), _) => "a mapping",
            (_, Some(Scalar::Null)) => "empty",
            (_, Some(Scalar::Bool)) => "a boolean",
            (_, Some(Scalar::Number)) => "a number",
            _ => "text",
        }
    }

    fn count(&self) -> usize {
        match &self.value {
            Value::Scalar { .. } => 1,
            Value::Sequence(items) => 1 + items.iter().map(Node::count).sum::<usize>(),
            Value::Mapping(entries) => 1 + entries.iter().map(|entry| 1 + entry.value.count()).sum::<usize>(),
        }
    }

    fn depth(&self) -> usize {
        match &self.value {
            Value::Scalar { .. } => 0,
            Value::Sequence(items) => 1 + items.iter().map(Node::depth).max().unwrap_or(0),
            Value::Mapping(entries) => 1 + entries.iter().map(|entry| entry.value.depth()).max().unwrap_or(0),
        }
    }
}

fn is_number(text: &str) -> bool {
    let digits = text.strip_prefix(['+', '-']).unwrap_or(text);
    if let Some(hex) = digits.strip_prefix("0x") {
        return !hex.is_empty() && hex.bytes().all(|b| b.is_ascii_hexdigit());
    }
    if let Some(octal) = digits.strip_prefix("0o") {
        return !octal.is_empty() && octal.bytes().all(|b| matches!(b, b'0'..=b'7'));
    }
    if matches!(digits, ".inf" | ".Inf" | ".INF" | ".nan" | ".NaN" | ".NAN") {
        return true;
    }
    digits.bytes().any(|b| b.is_ascii_digit())
        && digits.bytes().all(|b| b.is_ascii_digit() || matches!(b, b'.' | b'e' | b'E' | b'+' | b'-'))
        && digits.parse::<f64>().is_ok()
}

/// A document: its root (none if there is nothing but comments) and the comments.
#[derive(Debug, Clone)]
pub struct Document {
    /// The root node.
    pub root: Option<Node>,
    /// Byte ranges of the comments, `#` included, in order.
    pub comments: Vec<Range<usize>>,
}

impl Document {
    /// The comment behind `end` on the same line, with only blanks, a comma or closing brackets of flow lists between.
    pub fn comment_behind(&self, text: &Text, end: usize) -> Option<Range<usize>> {
        let at = self.comments.partition_point(|comment| comment.start < end);
        let comment = self.comments.get(at)?;
        let between = text.slice(end..comment.start);
        between.chars().all(|c| matches!(c, ' ' | '\t' | ',')).then(|| comment.clone())
    }
}

enum Frame {
    Sequence {
        anchor: usize,
        start: usize,
        items: Vec<Node>,
    },
    Mapping {
        anchor: usize,
        start: usize,
        entries: Vec<Entry>,
        seen: HashMap<String, usize>,
        key: Option<(String, Range<usize>)>,
        merges: Vec<(Range<usize>, Node)>,
    },
}

/// Parses one document.
///
/// # Errors
/// Anything YAML forbids (with a hint for tabs, templates and unquoted indicators), duplicate keys (both places), keys that
/// are not text, tags other than YAML's own, several documents, and what is beyond the limits.
pub fn parse(text: &Text) -> Result<Document> {
    let options = granit_parser::options! {
        max_buffered_comment_events: 1 << 20,
        flow_nesting_limit: MAX_DEPTH,
        block_nesting_limit: MAX_DEPTH,
    };
    let mut builder =
        Builder { text, stack: Vec::new(), anchors: HashMap::new(), root: None, comments: Vec::new(), nodes: 0, documents: 0 };
    for next in Parser::new_from_str_with_options(&text.text, options) {
        let (event, span) = next.map_err(|error| syntax_error(text, &error))?;
        let fallback = || byte_offset(&text.text, span.start.index());
        let span = match span.byte_range() {
            Some(range) if range.start <= range.end && range.end <= text.text.len() => range,
            _ => fallback()..fallback(),
        };
        builder.event(event, span)?;
    }
    Ok(Document { root: builder.root, comments: builder.comments })
}

/// Refuses a document that is nested deeper than [`MAX_DEPTH`] for readers without such a limit. What cannot be that deep, as all files that tools write,
/// is told by its brackets alone, and anything else wrong with it is left to the reader then.
///
/// # Errors
/// It is nested too deeply, or is no YAML: where.
pub fn refuse_deep(text: &Text) -> Result<()> {
    if !may_be_deep(&text.text) {
        return Ok(());
    }
    let options = granit_parser::options! {
        max_buffered_comment_events: 1 << 20,
        flow_nesting_limit: MAX_DEPTH,
        block_nesting_limit: MAX_DEPTH,
    };
    for next in Parser::new_from_str_with_options(&text.text, options) {
        // Any error: the other reader may go on behind what is one here.
        next.map_err(|error| syntax_error(text, &error))?;
    }
    Ok(())
}

/// Never `false` for a document with flow collections deeper than the limit: a closing bracket counts only against one of its own line, where no quote and
/// no `#` can make it text.
fn may_be_deep(text: &str) -> bool {
    let mut depth = 0;
    for line in text.lines() {
        let closing = !line.contains(['"', '\'', '#']);
        let mut own = 0_usize;
        for byte in line.bytes() {
            match byte {
                b'[' | b'{' => own += 1,
                b']' | b'}' if closing => own = own.saturating_sub(1),
                _ => {}
            }
            if depth + own > MAX_DEPTH {
                return true;
            }
        }
        depth += own;
    }
    false
}

fn byte_offset(text: &str, chars: usize) -> usize {
    text.char_indices().nth(chars).map_or(text.len(), |(at, _)| at)
}

struct Builder<'a> {
    text: &'a Text,
    stack: Vec<Frame>,
    anchors: HashMap<usize, Node>,
    root: Option<Node>,
    comments: Vec<Range<usize>>,
    nodes: usize,
    documents: usize,
}

impl Builder<'_> {
    fn event(&mut self, event: Event<'_>, span: Range<usize>) -> Result<()> {
        match event {
            Event::Comment(..) => self.comments.push(span),
            Event::DocumentStart(..) => {
                self.documents += 1;
                if self.documents > 1 {
                    return Err(Error::usage(format!("`{}` holds more than one YAML document", self.text.name))
                        .at(self.text.place(self.text.rest_of_line(span.start), "a second document starts here"))
                        .hint("put each environment into a file of its own"));
                }
            }
            Event::Scalar(value, style, anchor, tag) => {
                let mut plain = style == ScalarStyle::Plain;
                if let Some(tag) = &tag {
                    self.check_tag(tag, &span)?;
                    plain &= !tag.is_yaml_core_schema_tag("str");
                }
                let node = Node { span, value: Value::Scalar { text: value.into_owned(), plain } };
                self.add(node, anchor)?;
            }
            Event::Alias(id) => {
                let Some(node) = self.anchors.get(&id) else {
                    return Err(Error::usage("an alias inside of what it stands for")
                        .at(self.text.place(self.text.rest_of_line(span.start), "this repeats without end"))
                        .hint("write the value out instead of `*…`"));
                };
                if self.nodes + node.count() > MAX_NODES {
                    return Err(self.too_large(&span));
                }
                if node.depth() + self.stack.len() > MAX_DEPTH {
                    return Err(self.too_deep(&span));
                }
                let mut node = node.clone();
                self.nodes += node.count() - 1;
                // An inner node keeps its own place: that is where a person has to look.
                if node.scalar().is_some() {
                    node.span = span;
                }
                self.add(node, 0)?;
            }
            Event::SequenceStart(_, anchor, tag) => {
                if let Some(tag) = &tag {
                    self.check_tag(tag, &span)?;
                }
                self.open(Frame::Sequence { anchor, start: span.start, items: Vec::new() }, &span)?;
            }
            Event::MappingStart(_, anchor, tag) => {
                if let Some(tag) = &tag {
                    self.check_tag(tag, &span)?;
                }
                self.open(
                    Frame::Mapping { anchor, start: span.start, entries: Vec::new(), seen: HashMap::new(), key: None, merges: Vec::new() },
                    &span,
                )?;
            }
            Event::SequenceEnd | Event::MappingEnd => match self.stack.pop() {
                Some(Frame::Sequence { anchor, start, items }) => {
                    let end = items.last().map_or(start, |item| item.span.end).max(span.end.min(self.flow_end(span.start)));
                    self.add(Node { span: start..end.max(start), value: Value::Sequence(items) }, anchor)?;
                }
                Some(Frame::Mapping { anchor, start, mut entries, seen, merges, .. }) => {
                    for (_, merged) in merges {
                        self.merge(&mut entries, &seen, merged)?;
                    }
                    let end = entries.last().map_or(start, |entry| entry.value.span.end.max(entry.key_span.end));
                    self.add(
                        Node { span: start..end.max(span.end.min(self.flow_end(span.start))).max(start), value: Value::Mapping(entries) },
                        anchor,
                    )?;
                }
                None => {}
            },
            _ => {}
        }
        Ok(())
    }

    /// The end of a flow collection whose end event stands at `offset`, on its bracket; 0 for a block collection, whose end event
    /// stands at the next token, maybe lines below.
    fn flow_end(&self, offset: usize) -> usize {
        if matches!(self.text.text.as_bytes().get(offset), Some(b']' | b'}')) { offset + 1 } else { 0 }
    }

    fn open(&mut self, frame: Frame, span: &Range<usize>) -> Result<()> {
        if self.stack.len() >= MAX_DEPTH {
            return Err(self.too_deep(span));
        }
        if let Some(Frame::Mapping { key: None, .. }) = self.stack.last() {
            return Err(self.key_is_no_text(span));
        }
        self.stack.push(frame);
        Ok(())
    }

    fn add(&mut self, node: Node, anchor: usize) -> Result<()> {
        self.nodes += 1;
        if self.nodes > MAX_NODES {
            return Err(self.too_large(&node.span));
        }
        if anchor != 0 {
            self.anchors.insert(anchor, node.clone());
            self.nodes += node.count();
        }
        let text = self.text;
        match self.stack.last_mut() {
            None => self.root = Some(node),
            Some(Frame::Sequence { items, .. }) => items.push(node),
            Some(Frame::Mapping { entries, seen, key, merges, .. }) => match key.take() {
                Some((name, key_span)) if name == "<<" => merges.push((key_span, node)),
                Some((name, key_span)) => {
                    seen.insert(name.clone(), entries.len());
                    entries.push(Entry { key: name, key_span, value: node });
                }
                None => match node.value {
                    Value::Scalar { text: name, .. } => {
                        let first = match seen.get(&name) {
                            Some(&first) => Some(entries[first].key_span.clone()),
                            None => merges.first().filter(|_| name == "<<").map(|(first, _)| first.clone()),
                        };
                        if let Some(first) = first {
                            return Err(Error::usage(format!("the key `{}` stands twice", quote(&name)))
                                .at(text.place(node.span, "again here"))
                                .at(text.place(first, "first here"))
                                .hint("merge the two, or remove one"));
                        }
                        *key = Some((name, node.span));
                    }
                    _ => return Err(self.key_is_no_text(&node.span)),
                },
            },
        }
        Ok(())
    }

    /// YAML's merge key: entries of the merged mappings that are not there already.
    fn merge(&mut self, entries: &mut Vec<Entry>, seen: &HashMap<String, usize>, merged: Node) -> Result<()> {
        let sources = match merged.value {
            Value::Mapping(_) => vec![merged],
            Value::Sequence(items) => items,
            Value::Scalar { .. } => vec![merged],
        };
        let mut added: Vec<String> = Vec::new();
        for source in sources {
            let Value::Mapping(from) = source.value else {
                return Err(Error::usage("`<<` merges mappings only")
                    .at(self.text.place(self.text.rest_of_line(source.span.start), "not a mapping"))
                    .hint("write `<<: *anchor`, where `&anchor` marks a mapping"));
            };
            for entry in from {
                if !seen.contains_key(&entry.key) && !added.contains(&entry.key) {
                    added.push(entry.key.clone());
                    entries.push(entry);
                }
                if added.len() > 1000 {
                    return Err(self.too_large(&source.span));
                }
            }
        }
        Ok(())
    }

    fn check_tag(&self, tag: &granit_parser::Tag, span: &Range<usize>) -> Result<()> {
        let known = ["str", "int", "float", "bool", "null", "seq", "map", "timestamp", "binary"];
        if known.iter().any(|name| tag.is_yaml_core_schema_tag(name)) || tag.original() == "!" {
            return Ok(());
        }
        Err(Error::usage(format!("the YAML tag `{}` has no meaning here", quote(&tag.original())))
            .at(self.text.place(self.text.rest_of_line(span.start), "tagged value"))
            .hint("remove the tag, or put the text into quotes if it begins with `!`"))
    }

    fn key_is_no_text(&self, span: &Range<usize>) -> Error {
        let error = Error::usage("a key of a mapping is not text").at(self.text.place(self.text.rest_of_line(span.start), "this key"));
        let before = self.text.slice(span.start.saturating_sub(1)..span.start);
        if self.text.slice(span.start..span.start + 1) == "{" || before == "{" {
            template_hint(error)
        } else {
            error.hint("write `key: value` with a plain name as key")
        }
    }

    fn too_deep(&self, span: &Range<usize>) -> Error {
        Error::usage(format!("nested more than {MAX_DEPTH} levels deep"))
            .at(self.text.place(self.text.rest_of_line(span.start), "here"))
            .hint("no environment file needs this: check its indentation and brackets")
    }

    fn too_large(&self, span: &Range<usize>) -> Error {
        Error::usage(format!("more than {MAX_NODES} values after expanding aliases"))
            .at(self.text.place(self.text.rest_of_line(span.start), "here"))
            .hint("no environment file needs this: remove aliases (`*name`)")
    }
}

/// Hint for text that a template engine should have rendered first.
pub fn template_hint(error: Error) -> Error {
    error.hint("this looks like a template (jinja, cookiecutter, …): render it first, then use the result")
}

/// Does the text hold jinja syntax?
pub fn looks_like_template(text: &str) -> bool {
    text.contains("{{") || text.contains("{%")
}

fn syntax_error(text: &Text, error: &granit_parser::ScanError) -> Error {
    let offset = error.marker().byte_offset().unwrap_or_else(|| byte_offset(&text.text, error.marker().index())).min(text.text.len());
    let message = error.info();
    let line_start = text.text.get(..offset).and_then(|before| before.rfind('\n')).map_or(0, |at| at + 1);
    let line = text.slice(text.rest_of_line(line_start));
    let made =
        Error::usage("this is not valid YAML").because(quote(&message)).at(text.place(offset..text.rest_of_line(offset).end, "here"));
    let first = line.trim_start().trim_start_matches("- ").trim_start();
    let near: String = {
        // The culprit is often the line before.
        let previous_start = text.text.get(..line_start.saturating_sub(1)).and_then(|before| before.rfind('\n')).map_or(0, |at| at + 1);
        text.slice(previous_start..line_start + line.len()).to_owned()
    };
    if matches!(error.kind(), granit_parser::ErrorKind::RecursionLimitExceeded) {
        return Error::usage(format!("nested more than {MAX_DEPTH} levels deep"))
            .at(text.place(offset..text.rest_of_line(offset).end, "here"))
            .hint("no environment file needs this: check its indentation and brackets");
    }
    if looks_like_template(&near) {
        template_hint(made)
    } else if near.lines().any(|line| line.chars().take_while(|c| c.is_whitespace()).any(|c| c == '\t')) || message.contains("tab") {
        made.hint("YAML does not allow tabs for indentation: use spaces")
    } else if first.starts_with(['*', '&', '!', '%', '@', '`', '>', '|']) {
        made.hint(format!("text that begins with `{}` must be quoted", &first[..1]))
    } else if message.contains("alias") || message.contains("anchor") {
        made.hint("`*name` needs an `&name` before it; text that begins with `*` must be quoted")
    } else if message.contains("mapping values")
        || message.contains("':'")
        || message.contains("simple key")
        || message.contains("could not find expected")
    {
        made.hint("check the indentation; a key needs `: ` behind it, an item `- ` before it, and text with `: ` or ` #` in it quotes")
    } else if message.contains("quote") || near.matches('"').count() % 2 == 1 || near.matches('\'').count() % 2 == 1 {
        made.hint("a quote is never closed")
    } else if message.contains("flow") || message.contains('[') || message.contains(']') {
        made.hint("check that every `[` and `{` is closed; text that holds brackets must be quoted: \"pkg[extra]\"")
    } else {
        made.hint("check the indentation: items of one list begin in the same column")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(yaml: &str) -> Text {
        Text::new("e.yml", yaml, None)
    }

    fn show(node: &Node) -> String {
        match &node.value {
            Value::Scalar { text, plain } => format!("{text}{}", if *plain { "" } else { "'" }),
            Value::Sequence(items) => format!("[{}]", items.iter().map(show).collect::<Vec<_>>().join(", ")),
            Value::Mapping(entries) => {
                format!("{{{}}}", entries.iter().map(|e| format!("{}: {}", e.key, show(&e.value))).collect::<Vec<_>>().join(", "))
            }
        }
    }

    fn tree(yaml: &str) -> String {
        parse(&text(yaml)).unwrap().root.map(|root| show(&root)).unwrap_or_default()
    }

    #[test]
    fn a_tree_with_anchors_and_merge_keys() {
        assert_eq!(tree("a: &x [1, '2']\nb: *x\nc: !!str 3\n"), "{a: [1, 2'], b: [1, 2'], c: 3'}");
        assert_eq!(tree("d: &d {x: 1, y: 2}\ne:\n  <<: *d\n  y: 3\n"), "{d: {x: 1, y: 2}, e: {y: 3, x: 1}}");
        assert_eq!(tree("a: {p: 1}\nb:\n  <<: [{q: 1, r: 2}, {q: 9, s: 3}]\n"), "{a: {p: 1}, b: {q: 1, r: 2, s: 3}}");
        assert_eq!(tree("# nothing\n"), "");
        assert_eq!(tree("a: |\n  x\n  y\nb: >-\n  p\n  q\n"), "{a: x\ny\n', b: p q'}");
    }

    #[test]
    fn depth_is_told_without_reading_what_cannot_be_deep() {
        let deep = |open: &str, close: &str, times: usize| format!("a:\n  {}{}\n", open.repeat(times), close.repeat(times));
        for hostile in [
            deep("[", "", 200_000),
            deep("{a: ", "}", 1000),
            deep("[\n", "", 1000),
            deep("[']', ", "]", 1000),
            deep("[\"]\n]\", ", "]", 1000),
            deep("[a, # ]\n", "]", 1000),
        ] {
            let start = std::time::Instant::now();
            let error = refuse_deep(&text(&hostile)).unwrap_err();
            assert!(!error.places().is_empty(), "{error}");
            assert!(start.elapsed() < std::time::Duration::from_secs(5));
        }
        assert!(refuse_deep(&text(&deep("[", "]", 60))).unwrap_err().message().contains("nested more than"));
        assert!(!may_be_deep(&"- {name: x, depends: [a, b]}\n".repeat(1000)));
        for fine in ["- {name: 'x', depends: []}\n".repeat(1000), deep("[", "]", MAX_DEPTH - 2)] {
            refuse_deep(&text(&fine)).unwrap();
        }
    }

    #[test]
    fn spans_are_bytes_of_the_text() {
        let text = text("name: ä\ndependencies:\n  - 'b c' # [x]\n  - [p, q] # y\n");
        let document = parse(&text).unwrap();
        let Value::Mapping(entries) = document.root.clone().unwrap().value else { panic!() };
        assert_eq!(text.slice(entries[1].key_span.clone()), "dependencies");
        assert_eq!(text.slice(entries[0].value.span.clone()), "ä");
        let Value::Sequence(items) = &entries[1].value.value else { panic!() };
        assert_eq!(text.slice(items[0].span.clone()), "'b c'");
        assert_eq!(text.slice(items[1].span.clone()), "[p, q]");
        assert_eq!(text.slice(document.comment_behind(&text, items[0].span.end).unwrap()), "# [x]");
        assert_eq!(text.slice(document.comment_behind(&text, items[1].span.end).unwrap()), "# y");
    }

    #[test]
    fn kinds_of_scalars() {
        for (yaml, kind) in [
            ("~", Scalar::Null),
            ("true", Scalar::Bool),
            ("1.10", Scalar::Number),
            ("-3e5", Scalar::Number),
            ("0x1f", Scalar::Number),
            (".inf", Scalar::Number),
            ("1.2.3", Scalar::Text),
            ("1-2", Scalar::Text),
            ("e", Scalar::Text),
            ("'1'", Scalar::Text),
        ] {
            let root = parse(&text(yaml)).unwrap().root.unwrap();
            assert_eq!(root.scalar_kind(), Some(kind), "{yaml}");
        }
    }

    #[test]
    fn a_duplicate_key_shows_both_places() {
        let error = parse(&text("a: 1\nb: 2\na: 3\n")).unwrap_err();
        let places: Vec<_> = error.places().iter().map(|place| place.line_column()).collect();
        assert_eq!(places, [(3, 1), (1, 1)]);
    }

    #[test]
    fn bombs_and_depth_are_refused_quickly() {
        let mut bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n".to_owned();
        for n in 1..12 {
            let before = n - 1;
            bomb += &format!("a{n}: &a{n} [{}]\n", vec![format!("*a{before}"); 9].join(", "));
        }
        assert!(parse(&text(&bomb)).unwrap_err().message().contains("after expanding aliases"));
        assert!(parse(&text(&"[".repeat(5000))).unwrap_err().message().contains("levels deep"));
        assert!(parse(&text(&"- ".repeat(5000))).unwrap_err().message().contains("levels deep"));
        let mut deep = "a0: &a0 [x]\n".to_owned();
        for n in 1..100 {
            deep += &format!("a{n}: &a{n} [*a{}]\n", n - 1);
        }
        assert!(parse(&text(&deep)).unwrap_err().message().contains("levels deep"));
        assert!(parse(&text("a: &a [*a]\n")).is_err());
    }

    #[test]
    fn many_comment_lines_are_fine() {
        let yaml = format!("a:\n{}  - x\n", "  # c\n".repeat(5000));
        assert_eq!(parse(&text(&yaml)).unwrap().comments.len(), 5000);
    }
}
