//! Where a malformed lock is wrong. The fast readers stop without saying where; this one walks the text once more, slowly.

use rattler_lock::ParseCondaLockError;

use crate::error::{Error, Result};
use crate::spec::Text;
use crate::spec::yaml::{self, Entry, Node, Value};

/// The newest pixi.lock that is read.
const NEWEST: u64 = 7;

const AGAIN: &str = "make it again: tare lock -f environment.yml";

/// Every error of a reader names a place and the next thing to do.
pub(super) fn complete(text: &Text, error: Error) -> Error {
    let error = if error.places().is_empty() { error.at(text.place(text.rest_of_line(0), "in this file")) } else { error };
    if error.hints().is_empty() { error.hint(AGAIN) } else { error }
}

/// `error` with the place of the first occurrence of `needle`, if there is one.
pub(super) fn at_text(text: &Text, error: Error, needle: &str) -> Error {
    match text.text.find(needle).filter(|_| !needle.is_empty()) {
        Some(at) => error.at(text.place(at..at + needle.len(), "here")),
        None => error.at(text.place(0..0, "in this file")),
    }
}

/// A serde_yaml error whose text began at byte `start` of `text`.
pub(super) fn yaml_at(text: &Text, message: &str, error: &serde_yaml::Error, start: usize) -> Error {
    let at = error.location().map_or(start, |location| {
        // The reader counts characters; a lock is hardly ever anything but ASCII, so that is only made right where it is not.
        let rest = text.text.get(start..).unwrap_or("");
        let offset = if rest.is_ascii() {
            location.index()
        } else {
            rest.char_indices().nth(location.index()).map_or(rest.len(), |(offset, _)| offset)
        };
        start + offset.min(rest.len())
    });
    let reason = error.to_string();
    let reason = reason.split(" at line ").next().unwrap_or_default().to_owned();
    Error::usage(message).because(crate::spec::mask_secrets(&reason)).at(text.place(text.rest_of_line(at), "here")).hint(AGAIN)
}

/// The text is none of the formats.
pub(super) fn not_a_lock(text: &Text) -> Error {
    let error = Error::usage(format!("`{}` is no lock", text.name)).at(text.place(text.rest_of_line(0), "this is how it begins"));
    if text.text.trim().is_empty() {
        return Error::usage(format!("the lock `{}` is empty", text.name)).at(text.place(0..0, "here")).hint(AGAIN);
    }
    if text.text.lines().any(|line| line.starts_with("dependencies:")) {
        return error
            .because("it has `dependencies:`, so it is an environment.yml")
            .hint(format!("to lock it: tare lock -f {}", text.name));
    }
    error
        .because("tare.lock, pixi.lock, conda-lock.yml, @EXPLICIT lists and pylock.toml are read")
        .hint("to make a lock: tare lock -f environment.yml")
}

/// An environment that the file does not have.
pub(super) fn no_environment(text: &Text, wanted: &str, names: &[String]) -> Error {
    let error = Error::usage(format!("`{}` has no environment `{wanted}`", text.name));
    if names.is_empty() {
        return error;
    }
    error
        .because(format!("it has {}", names.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ")))
        .hint(format!("--environment {}", names[0]))
}

/// The place of what `rattler_lock` refuses.
pub(super) fn pixi(text: &Text, error: &ParseCondaLockError) -> Error {
    if let ParseCondaLockError::ParseError(yaml) = error
        && yaml.location().is_some()
    {
        return yaml_at(text, "the lock is malformed", yaml, 0);
    }
    match yaml::parse(text) {
        // Not even YAML for the stricter reader (such as a key that is there twice).
        Err(error) => error.context("the lock is malformed").hint(AGAIN),
        Ok(document) => {
            let found = match &document.root {
                Some(root) => Walk { text }.pixi(root),
                None => Err(not_a_lock(text)),
            };
            match found {
                Err(place) => place,
                Ok(()) => {
                    // Said in the reader's words, at the value that it names.
                    let reason = crate::spec::mask_secrets(&error.to_string());
                    let quoted = reason.split(['`', '"', '\'']).nth(1).unwrap_or_default().to_owned();
                    at_text(text, Error::usage("the lock is malformed").because(&reason).hint(AGAIN), &quoted)
                }
            }
        }
    }
}

struct Walk<'a> {
    text: &'a Text,
}

fn get<'a>(entries: &'a [Entry], key: &str) -> Option<&'a Entry> {
    entries.iter().find(|entry| entry.key == key)
}

impl Walk<'_> {
    fn wrong(&self, node: &Node, message: impl Into<String>, why: impl Into<String>) -> Error {
        let span = match &node.value {
            Value::Scalar { .. } => node.span.clone(),
            // The start of a list or mapping, not pages of it.
            _ => {
                let line = self.text.rest_of_line(node.span.start);
                line.start..line.end.min(node.span.end).max(line.start)
            }
        };
        Error::usage(message).because(why.into()).at(self.text.place(span, "here")).hint(AGAIN)
    }

    fn missing(&self, node: &Node, key: &str, what: &str) -> Error {
        self.wrong(node, format!("{what} lacks `{key}`"), "the lock was cut short or edited")
    }

    fn mapping<'n>(&self, node: &'n Node, what: &str) -> Result<&'n [Entry]> {
        match &node.value {
            Value::Mapping(entries) => Ok(entries),
            _ => Err(self.wrong(node, format!("{what} must be a mapping"), format!("it is {}", node.describe()))),
        }
    }

    fn sequence<'n>(&self, node: &'n Node, what: &str) -> Result<&'n [Node]> {
        match &node.value {
            Value::Sequence(items) => Ok(items),
            _ => Err(self.wrong(node, format!("{what} must be a list"), format!("it is {}", node.describe()))),
        }
    }

    fn text<'n>(&self, node: &'n Node, what: &str) -> Result<&'n str> {
        match node.scalar() {
            Some(text) if !node.is_null() => Ok(text),
            _ => Err(self.wrong(node, format!("{what} must be text"), format!("it is {}", node.describe()))),
        }
    }

    fn hash(&self, entries: &[Entry], key: &str, digits: usize) -> Result<()> {
        let Some(entry) = get(entries, key).filter(|entry| !entry.value.is_null()) else { return Ok(()) };
        let text = self.text(&entry.value, &format!("`{key}`"))?;
        if text.len() == digits && text.bytes().all(|b| b.is_ascii_hexdigit()) {
            return Ok(());
        }
        Err(self.wrong(
            &entry.value,
            format!("malformed `{key}`"),
            format!("{digits} hex digits are needed, here are {} characters", text.chars().count()),
        ))
    }

    fn pixi(&self, root: &Node) -> Result<()> {
        let top = self.mapping(root, "a lock")?;
        let Some(version) = get(top, "version") else { return Err(self.missing(root, "version", "the lock")) };
        let number: u64 = self.text(&version.value, "`version`")?.parse().map_err(|_| {
            self.wrong(&version.value, "`version` of the lock must be a whole number", format!("it is {}", version.value.describe()))
        })?;
        if number > NEWEST {
            return Err(Error::usage(format!("the lock has version {number}; up to version {NEWEST} is understood"))
                .because("a newer pixi wrote it")
                .at(self.text.place(version.value.span.clone(), "here"))
                .hint("update tare, or write it with an older pixi"));
        }
        if number == 0 {
            return Err(self.wrong(&version.value, "there is no version 0 of pixi.lock", "versions 1 to 7 are read"));
        }
        if number <= 3 {
            return self.old(root, top);
        }
        if number >= 7 {
            let Some(platforms) = get(top, "platforms") else { return Err(self.missing(root, "platforms", "the lock")) };
            for platform in self.sequence(&platforms.value, "`platforms`")? {
                let entries = self.mapping(platform, "a platform")?;
                let Some(name) = get(entries, "name") else { return Err(self.missing(platform, "name", "a platform")) };
                let name_text = self.text(&name.value, "the platform's name")?;
                let subdir = get(entries, "subdir").map_or(&name.value, |entry| &entry.value);
                let subdir_text = if std::ptr::eq(subdir, &name.value) { name_text } else { self.text(subdir, "`subdir`")? };
                if subdir_text.parse::<rattler_conda_types::Subdir>().is_err() {
                    return Err(self.wrong(
                        subdir,
                        format!("unknown platform `{subdir_text}`"),
                        "a platform of another name needs a known `subdir:`",
                    ));
                }
            }
        }
        let known: Vec<(String, String)> = match get(top, "packages") {
            None => return Err(self.missing(root, "packages", "the lock")),
            Some(packages) => self.packages(&packages.value)?,
        };
        let Some(environments) = get(top, "environments") else { return Err(self.missing(root, "environments", "the lock")) };
        for environment in self.mapping(&environments.value, "`environments`")? {
            let what = format!("the environment `{}`", environment.key);
            let entries = self.mapping(&environment.value, &what)?;
            let Some(channels) = get(entries, "channels") else { return Err(self.missing(&environment.value, "channels", &what)) };
            for channel in self.sequence(&channels.value, "`channels`")? {
                let entries = self.mapping(channel, "a channel")?;
                let Some(url) = get(entries, "url") else { return Err(self.missing(channel, "url", "a channel")) };
                self.text(&url.value, "`url` of a channel")?;
            }
            let Some(packages) = get(entries, "packages") else { return Err(self.missing(&environment.value, "packages", &what)) };
            for platform in self.mapping(&packages.value, "`packages` of an environment")? {
                for selector in self.sequence(&platform.value, "the packages of a platform")? {
                    let Some(first) = self.mapping(selector, "a package of an environment")?.first() else { continue };
                    let location = self.text(&first.value, "the location of a package")?;
                    if !known.iter().any(|(_, package)| package == location) {
                        return Err(self.wrong(
                            &first.value,
                            format!("{what} has a package on {} that the lock does not describe", platform.key),
                            "there is no entry of this location under `packages:`",
                        ));
                    }
                }
            }
        }
        Ok(())
    }

    /// Kind and location of each package.
    fn packages(&self, node: &Node) -> Result<Vec<(String, String)>> {
        let mut known = Vec::new();
        for package in self.sequence(node, "`packages`")? {
            let entries = self.mapping(package, "a package")?;
            let keys = ["conda", "pypi", "conda_source", "source"];
            let (kind, location) = match entries.iter().find(|entry| keys.contains(&entry.key.as_str())) {
                Some(entry) => (entry.key.clone(), entry),
                None => {
                    let kind = get(entries, "kind").and_then(|entry| entry.value.scalar()).unwrap_or_default().to_owned();
                    match get(entries, "url").or_else(|| get(entries, "path")) {
                        Some(entry) => (kind, entry),
                        None => return Err(self.missing(package, "conda` or `pypi", "a package")),
                    }
                }
            };
            let text = self.text(&location.value, "the location of a package")?;
            if text.contains("://") && !text.contains('+') && url::Url::parse(text).is_err() {
                return Err(self.wrong(&location.value, "the location of a package is no URL", "it cannot be parsed"));
            }
            if kind == "conda" && !text.ends_with(".conda") && !text.ends_with(".tar.bz2") {
                return Err(self.wrong(&location.value, "this is no conda package", "the file name must end in .conda or .tar.bz2"));
            }
            if kind == "pypi" && get(entries, "name").is_none() {
                return Err(self.missing(package, "name", "a PyPI package"));
            }
            self.hash(entries, "sha256", 64)?;
            self.hash(entries, "md5", 32)?;
            for key in ["depends", "constrains", "requires_dist"] {
                if let Some(list) = get(entries, key) {
                    for item in self.sequence(&list.value, &format!("`{key}`"))? {
                        self.text(item, &format!("an item of `{key}`"))?;
                    }
                }
            }
            if let Some(version) = get(entries, "version") {
                let text = self.text(&version.value, "`version`")?;
                if kind == "conda" && text.parse::<rattler_conda_types::Version>().is_err() {
                    return Err(self.wrong(
                        &version.value,
                        format!("`{text}` is no version"),
                        "conda versions are numbers and letters with dots",
                    ));
                }
            }
            known.push((kind, text.to_owned()));
        }
        Ok(known)
    }

    /// Versions 1 to 3, and conda-lock, which they came from.
    fn old(&self, root: &Node, top: &[Entry]) -> Result<()> {
        let Some(metadata) = get(top, "metadata") else { return Err(self.missing(root, "metadata", "the lock")) };
        let facts = self.mapping(&metadata.value, "`metadata`")?;
        for key in ["channels", "platforms"] {
            let Some(list) = get(facts, key) else { return Err(self.missing(&metadata.value, key, "`metadata`")) };
            for item in self.sequence(&list.value, &format!("`{key}`"))? {
                if key == "platforms" {
                    let name = self.text(item, "a platform")?;
                    if name.parse::<rattler_conda_types::Subdir>().is_err() {
                        return Err(self.wrong(item, format!("unknown platform `{name}`"), "platforms are named like `linux-64`"));
                    }
                }
            }
        }
        let Some(packages) = get(top, "package") else { return Err(self.missing(root, "package", "the lock")) };
        for package in self.sequence(&packages.value, "`package`")? {
            let entries = self.mapping(package, "a package")?;
            for key in ["name", "version", "manager", "platform", "url"] {
                let Some(entry) = get(entries, key) else { return Err(self.missing(package, key, "a package")) };
                let text = self.text(&entry.value, &format!("`{key}`"))?;
                if key == "manager" && !matches!(text, "conda" | "pip" | "pypi") {
                    return Err(self.wrong(&entry.value, format!("unknown manager `{text}`"), "packages are of `conda` or `pip`"));
                }
                if key == "platform" && text.parse::<rattler_conda_types::Subdir>().is_err() {
                    return Err(self.wrong(&entry.value, format!("unknown platform `{text}`"), "platforms are named like `linux-64`"));
                }
                if key == "url" && text.contains("://") && !text.contains('+') && url::Url::parse(text).is_err() {
                    return Err(self.wrong(&entry.value, "`url` of a package is no URL", "it cannot be parsed"));
                }
            }
            if let Some(hash) = get(entries, "hash").filter(|entry| !entry.value.is_null()) {
                let hashes = self.mapping(&hash.value, "`hash`")?;
                self.hash(hashes, "sha256", 64)?;
                self.hash(hashes, "md5", 32)?;
            }
        }
        Ok(())
    }
}

/// The place of what the conda-lock reader refuses, found by walking the text; `fallback` where the walk finds nothing wrong.
pub(super) fn conda_lock(text: &Text, fallback: Error) -> Error {
    let Ok(document) = yaml::parse(text) else { return fallback };
    let Some(root) = &document.root else { return not_a_lock(text) };
    let walk = Walk { text };
    match walk.mapping(root, "a lock").and_then(|top| walk.old(root, top)) {
        Err(found) => found,
        Ok(()) => fallback,
    }
}
