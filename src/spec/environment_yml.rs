//! The reader of environment.yml (CEP 24, plus what micromamba and conda-lock add). `docs/environment-yml.md` is its reference.

use std::collections::HashSet;
use std::ops::Range;
use std::path::{Path, PathBuf};

use super::source::{Text, expand_variables, mask_secrets, nearest, quote};
use super::yaml::{self, Document, Entry, Node, Scalar, Value, looks_like_template, template_hint};
use super::{ChannelEntry, EnvSpec, ReadOptions, check_name, requirements, selector};
use crate::error::{Error, Result};

/// The top-level keys that have a meaning.
pub const KEYS: [&str; 7] = ["name", "prefix", "channels", "dependencies", "variables", "platforms", "category"];
/// Sub-sections of `dependencies`.
pub const SECTIONS: [&str; 2] = ["pip", "uv"];

/// The selector in a comment, if there is one.
pub(super) fn comment_selector(text: &Text, comment: &Range<usize>) -> Result<Option<selector::Expr>> {
    let Some(inner) = selector::in_comment(text.slice(comment.clone())) else { return Ok(None) };
    let start = comment.start + inner.start;
    parse_selector(text, start..comment.start + inner.end, true).map(Some)
}

fn parse_selector(text: &Text, span: Range<usize>, in_comment: bool) -> Result<selector::Expr> {
    selector::Expr::parse(text.slice(span.clone())).map_err(|error| {
        let at = span.start + error.span.start..span.start + error.span.end;
        let mut made = Error::usage(error.message).at(text.place(at, "here")).hints_from(error.hint);
        if in_comment {
            made = made.hint("if this is only a remark, write it without square brackets");
        }
        made
    })
}

/// Reads one environment.yml into `out`.
///
/// # Errors
/// See the reference; each with its place and a hint.
pub(super) fn read(text: &Text, options: &ReadOptions, out: &mut EnvSpec) -> Result<()> {
    let document = yaml::parse(text)?;
    let Some(root) = &document.root else { return Err(empty_file(text)) };
    if root.is_null() {
        return Err(empty_file(text));
    }
    let mut reader = Reader { text, options, document: &document, out, used: HashSet::new() };
    let Value::Mapping(entries) = &root.value else { return Err(reader.root_is_no_mapping(root)) };
    reader.top_level(entries)?;
    reader.unused_selectors();
    Ok(())
}

fn empty_file(text: &Text) -> Error {
    Error::usage(format!("`{}` is empty", text.name))
        .at(text.place(0..0, "nothing here"))
        .hint("an environment file needs at least `dependencies: [python]`")
}

struct Reader<'a> {
    text: &'a Text,
    options: &'a ReadOptions,
    document: &'a Document,
    out: &'a mut EnvSpec,
    /// Starts of the comments whose selector was applied.
    used: HashSet<usize>,
}

impl Reader<'_> {
    fn at(&self, error: Error, span: &Range<usize>) -> Error {
        // A collection is shown by its first line.
        let line = self.text.rest_of_line(span.start);
        error.at(self.text.place(span.start..span.end.min(line.end).max(span.start), ""))
    }

    fn warn(&mut self, error: Error, span: &Range<usize>) {
        let warning = self.at(error, span);
        self.out.warnings.push(warning);
    }

    fn root_is_no_mapping(&self, root: &Node) -> Error {
        let error = Error::usage(format!("`{}` is {} where an environment file is a mapping", self.text.name, root.describe()));
        let error = self.at(error, &root.span);
        match (&root.value, root.scalar()) {
            (_, Some(text)) if looks_like_template(text) => template_hint(error),
            (Value::Sequence(_), _) => error.hint("put `dependencies:` above the list"),
            _ => error.hint("an environment file has keys such as `name:`, `channels:` and `dependencies:`"),
        }
    }

    /// "`X` must be a list, not text".
    fn wrong_type(&self, what: &str, want: &str, node: &Node) -> Error {
        let error = self.at(Error::usage(format!("{what} must be {want}, not {}", node.describe())), &node.span);
        let shown = self.text.slice(node.span.start..node.span.end.min(self.text.rest_of_line(node.span.start).end));
        if shown.starts_with("{{") || shown.starts_with("{%") { template_hint(error) } else { error }
    }

    fn top_level(&mut self, entries: &[Entry]) -> Result<()> {
        let find = |key: &str| entries.iter().find(|entry| entry.key == key);
        let missing = find("dependencies").is_none();
        for entry in entries {
            if KEYS.contains(&entry.key.as_str()) {
                continue;
            }
            let near = nearest(&entry.key, KEYS);
            if missing && near == Some("dependencies") {
                let error = Error::usage("the key `dependencies` is missing");
                return Err(self
                    .at(error, &entry.key_span)
                    .hint(format!("did you mean `dependencies` instead of `{}`?", quote(&entry.key))));
            }
            let warning = self.unknown_key(&entry.key, near);
            self.warn(warning, &entry.key_span);
        }
        if missing {
            let mut error = Error::usage("the key `dependencies` is missing");
            let keys: Vec<&str> = entries.iter().map(|entry| entry.key.as_str()).collect();
            let lock = keys.contains(&"package") || (keys.contains(&"packages") && keys.contains(&"environments"));
            if lock {
                error = error.because("this is a lock file, not an environment file").hint("give the file that the lock was made from");
            } else {
                error = error.hint("write `dependencies:` and below it one `- package` a line; `dependencies: []` for none");
            }
            let span = entries.first().map_or(0..0, |entry| entry.key_span.clone());
            return Err(self.at(error, &span));
        }
        if let Some(entry) = find("name") {
            self.name(&entry.value)?;
        }
        if let Some(entry) = find("prefix") {
            self.prefix(&entry.value)?;
        }
        if let Some(entry) = find("channels") {
            self.channels(&entry.value)?;
        }
        if let Some(entry) = find("platforms") {
            self.platforms(&entry.value)?;
        }
        if let Some(entry) = find("category") {
            self.out.category = self.text_value("`category`", &entry.value)?;
        }
        if let Some(entry) = find("variables") {
            self.variables(&entry.value)?;
        }
        if let Some(entry) = find("dependencies") {
            self.dependencies(&entry.value)?;
        }
        Ok(())
    }

    fn unknown_key(&self, key: &str, near: Option<&str>) -> Error {
        let warning = Error::usage(format!("the key `{}` has no meaning and is ignored", quote(key)));
        match (key, near) {
            ("pip" | "uv", _) => warning.hint(format!("indent it below `dependencies:`, as an item `- {key}:`")),
            ("pip-repositories", _) => warning.hint("write `- --extra-index-url URL` into the `pip:` section"),
            ("channel_priority" | "channel-priority", _) => warning.hint("use the option `--channel-priority`"),
            ("allow-pypi-requests", _) => warning,
            (_, Some(near)) => warning.hint(format!("did you mean `{near}`?")),
            _ => warning.hint(format!("known keys are {}", KEYS.join(", "))),
        }
    }

    /// A scalar as text; `None` if null.
    fn text_value(&self, what: &str, node: &Node) -> Result<Option<String>> {
        match (node.scalar(), node.scalar_kind()) {
            (_, Some(Scalar::Null)) => Ok(None),
            (Some(text), _) => Ok(Some(text.trim().to_owned())),
            _ => Err(self.wrong_type(what, "text", node)),
        }
    }

    fn name(&mut self, node: &Node) -> Result<()> {
        let Some(name) = self.text_value("`name`", node)? else { return Ok(()) };
        match check_name(&name) {
            Ok(()) => self.out.name = Some(name),
            Err(error) if self.options.target_given => {
                let warning = error.because("it is not used, because another name or prefix was given");
                self.warn(warning, &node.span);
            }
            Err(error) => return Err(self.at(error, &node.span)),
        }
        Ok(())
    }

    fn prefix(&mut self, node: &Node) -> Result<()> {
        let Some(written) = self.text_value("`prefix`", node)? else { return Ok(()) };
        let bytes = written.as_bytes();
        let windows = bytes.len() > 2 && bytes[0].is_ascii_alphabetic() && bytes[1] == b':' && matches!(bytes[2], b'\\' | b'/');
        if windows && !cfg!(windows) {
            let warning = Error::usage("`prefix` is a path of another system and is ignored")
                .hint("remove the line: `-n` and `-p` say where to install");
            self.warn(warning, &node.span);
            return Ok(());
        }
        let (expanded, missing) = expand_variables(&written, &|name| (self.options.env)(name));
        if let Some(name) = missing.first() {
            let error = Error::usage(format!("`prefix` uses the variable `{name}`, which is not set"));
            return Err(self.at(error, &node.span).hint(format!("set it (export {name}=…), or give `-p`")));
        }
        let path = if expanded == "~" || expanded.starts_with("~/") {
            let Some(home) = (self.options.env)("HOME").filter(|home| Path::new(home).is_absolute()) else {
                return Err(self
                    .at(Error::usage("`prefix` begins with `~`, but HOME is not set, or no absolute path"), &node.span)
                    .hint("write the whole path"));
            };
            Path::new(&home).join(expanded[1..].trim_start_matches('/'))
        } else if expanded.starts_with('~') {
            let error = Error::usage("only `~` and `~/…` are expanded in `prefix`, not another user's home");
            return Err(self.at(error, &node.span).hint("write the whole path"));
        } else {
            PathBuf::from(expanded)
        };
        let base = self.text.base_dir.as_deref().unwrap_or(&self.options.root_dir);
        self.out.prefix = Some(self.options.root_dir.join(base).join(path));
        Ok(())
    }

    fn channels(&mut self, node: &Node) -> Result<()> {
        let items = match &node.value {
            Value::Sequence(items) => items,
            _ if node.is_null() => return Ok(()),
            Value::Scalar { text, .. } => {
                let shown = quote(text);
                return Err(self.wrong_type("`channels`", "a list", node).hint(format!("write `channels: [{shown}]`")));
            }
            Value::Mapping(_) => return Err(self.wrong_type("`channels`", "a list", node).hint("write one `- channel` a line")),
        };
        self.out.channels_declared = true;
        for item in items {
            if !self.selected(item.span.end)? {
                continue;
            }
            let written = match (item.scalar(), item.scalar_kind()) {
                (_, Some(Scalar::Null)) => {
                    return Err(self.at(Error::usage("an empty channel"), &item.span).hint("remove the `-`, or write a channel behind it"));
                }
                (Some(text), _) => text.trim(),
                _ => return Err(self.wrong_type("a channel", "text", item).hint("write `- conda-forge`, a URL or a path")),
            };
            if written.is_empty() {
                return Err(self.at(Error::usage("an empty channel"), &item.span).hint("remove the item"));
            }
            if written == "nodefaults" {
                self.out.nodefaults = true;
                continue;
            }
            if looks_like_template(written) {
                return Err(template_hint(self.at(Error::usage(format!("invalid channel `{}`", quote(written))), &item.span)));
            }
            if written.starts_with('-') || (written.contains(char::is_whitespace) && !written.contains(['/', '\\'])) {
                let error = Error::usage(format!("invalid channel `{}`", quote(written)));
                return Err(self.at(error, &item.span).hint("write one channel an item: a name, a URL or a path"));
            }
            if let Some((channel, _)) = mask_secrets(written).rsplit_once("::") {
                let error = Error::usage(format!("`{}` is a match spec, not a channel", quote(written)));
                return Err(self.at(error, &item.span).hint(format!("write only `- {}`", quote(channel))));
            }
            let (expanded, missing) = expand_variables(written, &|name| (self.options.env)(name));
            if let Some(name) = missing.first() {
                let warning = Error::usage(format!("the variable `{name}` in a channel is not set, so it stays as written"))
                    .hint(format!("set it: export {name}=…"));
                self.warn(warning, &item.span);
            }
            let place = self.text.place(item.span.clone(), "");
            self.out.channels.push(ChannelEntry { text: expanded, place: Some(place) });
        }
        Ok(())
    }

    fn platforms(&mut self, node: &Node) -> Result<()> {
        let Value::Sequence(items) = &node.value else {
            if node.is_null() {
                return Ok(());
            }
            let error = self.wrong_type("`platforms`", "a list", node);
            return Err(error.hint("write `platforms: [linux-64]`"));
        };
        for item in items {
            let Some(written) = item.scalar() else { return Err(self.wrong_type("a platform", "text", item)) };
            match super::machine_subdir(written.trim()) {
                Some(subdir) if self.out.platforms.contains(&subdir) => {}
                Some(subdir) => self.out.platforms.push(subdir),
                None => return Err(self.at(super::explicit::unknown_platform(written), &item.span)),
            }
        }
        Ok(())
    }

    fn variables(&mut self, node: &Node) -> Result<()> {
        let Value::Mapping(entries) = &node.value else {
            if node.is_null() {
                return Ok(());
            }
            return Err(self.wrong_type("`variables`", "a mapping", node).hint("write `NAME: value`, one a line, without `-`"));
        };
        for entry in entries {
            if entry.key.is_empty() || entry.key.contains(['=', '\0']) || entry.key.contains(char::is_whitespace) {
                let error = Error::usage(format!("`{}` cannot be the name of a variable", quote(&entry.key)));
                return Err(self.at(error, &entry.key_span).hint("names hold letters, digits and `_`"));
            }
            let end = entry.value.span.end.max(entry.key_span.end);
            if !self.selected(end)? {
                continue;
            }
            let value = match (entry.value.scalar(), entry.value.scalar_kind()) {
                (_, Some(Scalar::Null)) => String::new(),
                (Some(text), _) => text.to_owned(),
                _ => {
                    let what = format!("the variable `{}`", quote(&entry.key));
                    return Err(self.wrong_type(&what, "text", &entry.value).hint("put the value into quotes"));
                }
            };
            self.out.variables.insert(entry.key.clone(), value);
        }
        Ok(())
    }

    /// Judges the selector in the comment behind `end`, if there is one.
    fn selected(&mut self, end: usize) -> Result<bool> {
        let Some(comment) = self.document.comment_behind(self.text, end) else { return Ok(true) };
        let Some(expr) = comment_selector(self.text, &comment)? else { return Ok(true) };
        self.used.insert(comment.start);
        Ok(expr.matches(self.options.subdir))
    }

    /// A comment that reads like a selector but stands behind nothing that can be selected.
    fn unused_selectors(&mut self) {
        let mut warnings = Vec::new();
        for comment in &self.document.comments {
            let written = self.text.slice(comment.clone());
            if self.used.contains(&comment.start) {
                continue;
            }
            let Some(inner) = selector::in_comment(written) else { continue };
            let opens = written[..inner.start].trim_start_matches(['#', ' ', '\t']) == "[";
            if opens && selector::Expr::parse(&written[inner]).is_ok() {
                warnings.push(comment.clone());
            }
        }
        for span in warnings {
            let warning = Error::usage("this platform selector stands behind no item and is ignored")
                .hint("put it on the same line, directly behind the item");
            self.warn(warning, &span);
        }
    }

    fn dependencies(&mut self, node: &Node) -> Result<()> {
        let items = match &node.value {
            Value::Sequence(items) => items,
            _ if node.is_null() => return Ok(()),
            Value::Scalar { text, .. } => {
                let shown = quote(text);
                return Err(self.wrong_type("`dependencies`", "a list", node).hint(format!("write `- {shown}` on a line of its own")));
            }
            Value::Mapping(entries) => {
                let error = self.wrong_type("`dependencies`", "a list", node);
                return Err(match entries.first() {
                    Some(entry) if entry.value.scalar().is_some() => error.hint(format!(
                        "write `- {}={}` instead of `{0}: {1}`",
                        quote(&entry.key),
                        quote(entry.value.scalar().unwrap_or(""))
                    )),
                    _ => error.hint("write one `- package` a line"),
                });
            }
        };
        for (index, item) in items.iter().enumerate() {
            self.dependency(item, index + 1 < items.len(), 0)?;
        }
        Ok(())
    }

    fn dependency(&mut self, item: &Node, more: bool, depth: usize) -> Result<()> {
        match &item.value {
            Value::Scalar { text, .. } => {
                match item.scalar_kind() {
                    Some(Scalar::Null) => {
                        return Err(self
                            .at(Error::usage("an empty dependency"), &item.span)
                            .hint("remove the `-`, or write a package behind it"));
                    }
                    Some(Scalar::Number | Scalar::Bool) => {
                        return Err(self.wrong_type("a dependency", "text", item).hint("a name comes first: `python=3.11`"));
                    }
                    _ => {}
                }
                if !self.selected(item.span.end)? {
                    return Ok(());
                }
                let place = self.text.place(item.span.clone(), "");
                let dependency =
                    super::parse_dependency(text.trim(), self.text.base_dir.as_deref(), self.options, place, &mut self.out.warnings)?;
                self.out.dependencies.push(dependency);
                Ok(())
            }
            Value::Sequence(_) => Err(self.wrong_type("a dependency", "text", item).hint("is one `-` or `[` too many?")),
            Value::Mapping(entries) => {
                if self.text.slice(item.span.clone()).starts_with("{{") {
                    return Err(template_hint(self.at(Error::usage("this is no dependency"), &item.span)));
                }
                for entry in entries {
                    self.section(entry, more, depth)?;
                }
                Ok(())
            }
        }
    }

    /// The expression of `sel(expr)`, if the key is one.
    fn sel_key(&mut self, entry: &Entry) -> Result<Option<bool>> {
        let key = entry.key.trim();
        let Some(inner) = key.strip_prefix("sel(") else { return Ok(None) };
        let Some(inner) = inner.strip_suffix(')') else {
            let error = Error::usage(format!("`{}` is no selector", quote(key)));
            return Err(self.at(error, &entry.key_span).hint("write `- sel(linux): package`"));
        };
        // Where the key is written plainly its words have places.
        let source = self.text.slice(entry.key_span.clone());
        let expr = match source.find("sel(") {
            Some(at) if source[at + 4..].starts_with(inner) => {
                let start = entry.key_span.start + at + 4;
                parse_selector(self.text, start..start + inner.len(), false)?
            }
            _ => selector::Expr::parse(inner)
                .map_err(|error| self.at(Error::usage(error.message).hints_from(error.hint), &entry.key_span))?,
        };
        Ok(Some(expr.matches(self.options.subdir)))
    }

    fn section(&mut self, entry: &Entry, more: bool, depth: usize) -> Result<()> {
        if depth > 4 {
            return Err(self
                .at(Error::usage("selectors inside of selectors"), &entry.key_span)
                .hint("combine them: `sel(linux and not aarch64)`"));
        }
        if let Some(holds) = self.sel_key(entry)? {
            let nodes: Vec<&Node> = match &entry.value.value {
                Value::Sequence(items) => items.iter().collect(),
                _ => vec![&entry.value],
            };
            // What is not selected must still be well-formed.
            let kept = (self.out.dependencies.len(), self.out.pip.len());
            for node in nodes {
                self.dependency(node, false, depth + 1)?;
            }
            if !holds {
                self.out.dependencies.truncate(kept.0);
                self.out.pip.truncate(kept.1);
            }
            return Ok(());
        }
        let key = entry.key.trim();
        if !SECTIONS.contains(&key) {
            return Err(self.unknown_section(entry));
        }
        let header = self
            .text
            .slice(entry.key_span.end..self.text.text.len())
            .find(':')
            .map_or(entry.key_span.end, |at| entry.key_span.end + at + 1);
        let wanted = match &entry.value.value {
            Value::Sequence(_) if entry.value.span.start > self.text.rest_of_line(header).end => self.selected(header)?,
            Value::Sequence(_) => self.selected(entry.value.span.end)?,
            _ => self.selected(header)?,
        };
        let items = match &entry.value.value {
            Value::Sequence(items) => items,
            _ if entry.value.is_null() => {
                if more {
                    let warning = Error::usage(format!("`{key}:` is empty"))
                        .hint(format!("if the items below are for {key}, indent them deeper than `- {key}:`"));
                    self.warn(warning, &entry.key_span);
                }
                return Ok(());
            }
            Value::Scalar { text, .. } => {
                let shown = quote(text);
                return Err(self.wrong_type(&format!("`{key}`"), "a list", &entry.value).hint(format!("write `- {key}: [\"{shown}\"]`")));
            }
            Value::Mapping(_) => {
                return Err(self.wrong_type(&format!("`{key}`"), "a list", &entry.value).hint("write one `- requirement` a line"));
            }
        };
        let kept = self.out.pip.len();
        for item in items {
            self.pip_item(key, item, depth)?;
        }
        if !wanted {
            self.out.pip.truncate(kept);
        }
        Ok(())
    }

    fn unknown_section(&self, entry: &Entry) -> Error {
        let key = entry.key.trim();
        let error = Error::usage(format!("unknown section `{}` among the dependencies", quote(key)));
        let error = self.at(error, &entry.key_span);
        match (entry.value.scalar(), nearest(key, SECTIONS)) {
            (_, Some(near)) => error.hint(format!("did you mean `{near}:`?")),
            (Some(_), _) if entry.value.is_null() => {
                error.hint(format!("write `- {}`, without a colon behind it", quote(key.trim_end_matches(':'))))
            }
            (Some(value), _) if key.contains("//") || value.starts_with("//") => error.hint("put the URL into quotes"),
            (Some(value), _) => error.hint(format!("if it is a package, write `- {}={}`", quote(key), quote(value))),
            _ => error.hint("sections are `pip:`, `uv:` and `sel(linux):`"),
        }
    }

    fn pip_item(&mut self, section: &str, item: &Node, depth: usize) -> Result<()> {
        match &item.value {
            Value::Scalar { text, .. } => {
                match item.scalar_kind() {
                    Some(Scalar::Null) => {
                        return Err(self
                            .at(Error::usage(format!("an empty item of `{section}:`")), &item.span)
                            .hint("remove the `-`, or write a requirement behind it"));
                    }
                    Some(Scalar::Number | Scalar::Bool) => {
                        return Err(self
                            .wrong_type(&format!("an item of `{section}:`"), "text", item)
                            .hint("a name comes first: `numpy==1.26`"));
                    }
                    _ => {}
                }
                let selected = self.selected(item.span.end)?;
                let options = self.options;
                let context = requirements::Context { base_dir: self.text.base_dir.as_deref(), env: &|name| (options.env)(name) };
                let span = item.span.clone();
                let source = self.text;
                let found = requirements::parse(text, &context, &|_| Some(source.place(span.clone(), "")))?;
                if found.is_empty() {
                    let error = Error::usage(format!("an empty item of `{section}:`"));
                    return Err(self.at(error, &item.span).hint("remove the item"));
                }
                if selected {
                    self.out.pip.extend(found);
                }
                Ok(())
            }
            Value::Sequence(_) => {
                Err(self.wrong_type(&format!("an item of `{section}:`"), "text", item).hint("is one `-` or `[` too many?"))
            }
            Value::Mapping(entries) => {
                for entry in entries {
                    let Some(holds) = self.sel_key(entry)? else {
                        let error = self.wrong_type(&format!("an item of `{section}:`"), "text", item);
                        return Err(error.hint("text with `: ` in it must be quoted"));
                    };
                    if depth > 4 {
                        return Err(self.at(Error::usage("selectors inside of selectors"), &entry.key_span));
                    }
                    let nodes: Vec<&Node> = match &entry.value.value {
                        Value::Sequence(items) => items.iter().collect(),
                        _ => vec![&entry.value],
                    };
                    let kept = self.out.pip.len();
                    for node in nodes {
                        self.pip_item(section, node, depth + 1)?;
                    }
                    if !holds {
                        self.out.pip.truncate(kept);
                    }
                }
                Ok(())
            }
        }
    }
}
