//! conda's own formats, byte for byte: `environment-yaml`, `environment-json`, `explicit`, `requirements`.

use std::fmt::Write as _;

use rattler_conda_types::{MatchSpec, ParseStrictness, RepoDataRecord};

use super::yaml::{self, Node};
use super::{Exported, Options, Subject};
use crate::error::{Error, Result};
use crate::prefix::{self, Hashes};

/// conda's text of a match spec. `channel`: keep the channel in front.
pub fn match_spec_text(text: &str, channel: bool) -> String {
    let Ok(spec) = MatchSpec::from_str(text, ParseStrictness::Lenient) else { return text.to_owned() };
    let Some(name) = spec.name.as_exact() else { return text.to_owned() };
    let mut shown = String::new();
    if channel && let Some(channel) = &spec.channel {
        let _ = write!(shown, "{}::", channel.name());
    }
    shown.push_str(name.as_normalized());
    let mut brackets: Vec<String> = Vec::new();
    let special = |text: &str| text.contains(['>', '<', '$', '^', '|', ',']);
    let build = spec.build.as_ref().map(ToString::to_string);
    let mut exact = false;
    if let Some(version) = spec.version.as_ref().map(ToString::to_string) {
        if version == "*" {
            if build.is_none() {
                return shown;
            }
        } else if special(&version) {
            brackets.push(format!("version='{version}'"));
        } else if version.starts_with("!=") || version.starts_with("~=") {
            if build.is_some() { brackets.push(format!("version='{version}'")) } else { shown.push_str(&version) }
        } else if let Some(start) = version.strip_suffix(".*") {
            let _ = write!(shown, "={start}");
        } else if let Some(start) = version.strip_suffix('*') {
            let _ = write!(shown, "={start}");
        } else {
            let bare = version.strip_prefix("==").unwrap_or(&version);
            let _ = write!(shown, "=={bare}");
            exact = true;
        }
    }
    if let Some(build) = build {
        if special(&build) {
            brackets.push(format!("build='{build}'"));
        } else if build.contains('*') || !exact {
            brackets.push(format!("build={build}"));
        } else {
            let _ = write!(shown, "={build}");
        }
    }
    if let Some(number) = &spec.build_number {
        brackets.push(format!("build_number={number}"));
    }
    if !brackets.is_empty() {
        let _ = write!(shown, "[{}]", brackets.join(","));
    }
    shown
}

fn pinned(record: &RepoDataRecord, builds: bool) -> String {
    let package = &record.package_record;
    let name = package.name.as_normalized();
    if builds { format!("{name}={}={}", package.version, package.build) } else { format!("{name}={}", package.version) }
}

/// What stands under `dependencies`.
fn dependencies(subject: &Subject, options: &Options) -> (Vec<String>, Vec<String>, Vec<String>) {
    let mut notes = Vec::new();
    if options.requested {
        return requested(subject, options);
    }
    if options.from_history {
        if subject.requested.is_empty() {
            notes.push("there is no record of what was asked for: every package is listed, as conda does".to_owned());
            return (subject.listed.iter().map(|index| pinned(&subject.conda[*index], !options.no_builds)).collect(), Vec::new(), notes);
        }
        if !subject.python.is_empty() {
            notes.push(format!(
                "--from-history leaves out {}, as conda does; --requested keeps them",
                names(subject.python.iter().map(|p| p.name.as_str()))
            ));
        }
        return (subject.requested.values().map(|spec| match_spec_text(spec, false)).collect(), Vec::new(), notes);
    }
    let conda = subject.conda.iter().map(|record| pinned(record, !options.no_builds)).collect();
    let lost: Vec<&str> = subject.python.iter().filter(|package| !package.is_from_index()).map(|package| package.name.as_str()).collect();
    if !lost.is_empty() && !options.direct_urls {
        notes.push(format!(
            "the origin of {} (a repository, URL or folder) is not in conda's format; --direct-urls writes it",
            names(lost.into_iter())
        ));
    }
    let pip = subject.python.iter().map(|package| if options.direct_urls { package.requirement() } else { package.pin() }).collect();
    (conda, pip, notes)
}

/// tare's own short form: what was asked for with its channel, and with versions where wanted.
fn requested(subject: &Subject, options: &Options) -> (Vec<String>, Vec<String>, Vec<String>) {
    let mut notes = Vec::new();
    let first = subject.all_channels().into_iter().next().unwrap_or_default();
    let channel_of = |record: &RepoDataRecord| {
        let name = prefix::channel_canonical(record);
        if name == first || name == "<unknown>" { String::new() } else { format!("{name}::") }
    };
    let record_of = |name: &str| subject.conda.iter().find(|record| record.package_record.name.as_normalized() == name);
    let mut conda = Vec::new();
    if subject.requested.is_empty() && !subject.conda.is_empty() {
        notes.push("there is no record of what was asked for: the packages that no other one needs are listed".to_owned());
        for record in subject.leaves() {
            let pin = if options.pin_versions { pinned(record, false) } else { record.package_record.name.as_normalized().to_owned() };
            conda.push(format!("{}{pin}", channel_of(record)));
        }
    }
    for (name, spec) in &subject.requested {
        let Some(record) = record_of(name) else {
            notes.push(format!("`{spec}` was asked for, but no such package is installed any more"));
            continue;
        };
        let has_version =
            MatchSpec::from_str(spec, ParseStrictness::Lenient).is_ok_and(|spec| spec.version.is_some() || spec.build.is_some());
        let text = if options.pin_versions && !has_version { pinned(record, false) } else { match_spec_text(spec, false) };
        conda.push(format!("{}{text}", channel_of(record)));
    }
    let pip: Vec<String> = subject.requested_python().into_iter().map(super::PythonPackage::requirement).collect();
    if !pip.is_empty() && record_of("pip").is_none_or(|_| !subject.requested.contains_key("pip")) && record_of("pip").is_some() {
        conda.push("pip".to_owned());
    }
    (conda, pip, notes)
}

/// Names in backticks, separated by commas.
pub(crate) fn names<'a>(names: impl Iterator<Item = &'a str>) -> String {
    let quoted: Vec<String> = names.map(|name| format!("`{name}`")).collect();
    quoted.join(", ")
}

fn channels(subject: &Subject, options: &Options) -> Vec<String> {
    // The history says nothing of channels, so conda writes the configured ones only.
    let history = options.from_history && !options.requested && !(subject.requested.is_empty());
    let mut channels = if history { subject.channels.clone() } else { subject.all_channels() };
    if subject.nodefaults {
        channels.push("nodefaults".to_owned());
    }
    channels
}

fn entries(subject: &Subject, options: &Options) -> (Vec<(String, Node)>, Vec<String>) {
    let (conda, pip, mut notes) = dependencies(subject, options);
    notes.extend(super::container::secret_notes(subject));
    let mut dependencies: Vec<Node> = conda.into_iter().map(Node::Text).collect();
    if !pip.is_empty() {
        dependencies.push(Node::Map(vec![("pip".to_owned(), Node::texts(pip))]));
    }
    let mut entries = Vec::new();
    if let Some(name) = &subject.name {
        entries.push(("name".to_owned(), Node::Text(name.clone())));
    }
    entries.push(("channels".to_owned(), Node::texts(channels(subject, options))));
    entries.push(("dependencies".to_owned(), Node::List(dependencies)));
    if !subject.variables.is_empty() {
        let variables = subject.variables.iter().map(|(name, value)| (name.clone(), Node::Text(value.clone()))).collect();
        entries.push(("variables".to_owned(), Node::Map(variables)));
    }
    // A path of this machine has no place in a file for others.
    if let Some(prefix) = subject.prefix.as_ref().filter(|_| !options.requested && !options.no_prefix) {
        entries.push(("prefix".to_owned(), Node::Text(prefix.display().to_string())));
    }
    (entries, notes)
}

/// `environment-yaml`.
pub fn environment_yaml(subject: &Subject, options: &Options) -> Exported {
    let (entries, notes) = entries(subject, options);
    Exported { text: yaml::document(&entries), notes }
}

fn json(node: Node) -> serde_json::Value {
    match node {
        Node::Text(text) => text.into(),
        Node::List(items) => items.into_iter().map(json).collect(),
        Node::Map(entries) => serde_json::Value::Object(entries.into_iter().map(|(key, value)| (key, json(value))).collect()),
    }
}

/// `environment-json`: the same document.
pub fn environment_json(subject: &Subject, options: &Options) -> Exported {
    let (entries, notes) = entries(subject, options);
    Exported { text: format!("{:#}\n", json(Node::Map(entries))), notes }
}

/// `explicit`. Without hashes the order is that of conda's export (of the folder); with them that of `conda list --explicit`.
///
/// # Errors
/// Python packages that no conda package brought, or packages without URL: the format cannot hold them. A hash that is asked for is not known.
pub fn explicit(subject: &Subject, options: &Options) -> Result<Exported> {
    if !subject.python.is_empty() {
        return Err(Error::failure("an explicit list cannot hold Python packages that pip installed")
            .because(format!("installed by pip: {}", names(subject.python.iter().map(|package| package.name.as_str()))))
            .hint("a format that can: environment-yaml")
            .hint("the conda packages alone: tare list --explicit"));
    }
    let without: Vec<&str> = subject
        .conda
        .iter()
        .filter(|record| prefix::known_url(record).is_none())
        .map(|record| record.package_record.name.as_normalized())
        .collect();
    if !without.is_empty() {
        return Err(
            Error::failure("an explicit list is made of URLs").because(format!("no URL is known for {}", names(without.into_iter())))
        );
    }
    let bound: Vec<&str> = subject
        .conda
        .iter()
        .filter(|record| crate::lock::is_machine_bound(record))
        .map(|record| record.package_record.name.as_normalized())
        .collect();
    if !bound.is_empty() {
        return Err(Error::failure("an explicit list is of use on other machines only if they have the packages")
            .because(format!("made from this machine's Python by the channel `host`: {}", names(bound.into_iter())))
            .hint("formats that can say so: environment-yaml, tare"));
    }
    let (missing, kind): (Vec<&str>, &str) = match options.hashes {
        Hashes::None => (Vec::new(), ""),
        Hashes::Md5 => (lacking(subject, |record| record.package_record.md5.is_none()), "MD5"),
        Hashes::Sha256 => (lacking(subject, |record| record.package_record.sha256.is_none()), "SHA-256"),
    };
    if !missing.is_empty() {
        let hint = if kind == "MD5" { "--sha256" } else { "--md5" };
        return Err(Error::failure(format!("the {kind} of {} is not known", names(missing.into_iter()))).hint(format!("try {hint}")));
    }
    let order = match options.hashes {
        Hashes::None => subject.listed.clone(),
        _ => prefix::install_order(&subject.conda),
    };
    let text = prefix::explicit_lines(
        order.into_iter().map(|index| &subject.conda[index]),
        options.hashes,
        options.tool_platform.or(subject.platform),
    );
    Ok(Exported { text, notes: platform_note(subject, options) })
}

fn lacking(subject: &Subject, lacks: impl Fn(&RepoDataRecord) -> bool) -> Vec<&str> {
    subject.conda.iter().filter(|record| lacks(record)).map(|record| record.package_record.name.as_normalized()).collect()
}

/// conda writes the platform it runs on; a note where the packages are for another one.
pub(crate) fn platform_note(subject: &Subject, options: &Options) -> Vec<String> {
    match (options.tool_platform, subject.platform) {
        (Some(tool), Some(packages)) if tool != packages => {
            vec![format!("the line `# platform: {tool}` names this machine, as conda does; the packages are for {packages}")]
        }
        _ => Vec::new(),
    }
}

/// `requirements`: match specs, conda's file of that name.
pub fn requirements(subject: &Subject, options: &Options) -> Exported {
    let mut text = prefix::header(options.tool_platform.or(subject.platform));
    text.push_str(
        "# Note: This is a conda requirements file (MatchSpec format)\n# Contains conda package specifications, not pip requirements\n\n",
    );
    for record in &subject.conda {
        let package = &record.package_record;
        let channel = prefix::channel_canonical(record);
        let channel = if channel == "<unknown>" { String::new() } else { format!("{channel}::") };
        let _ = writeln!(text, "{channel}{}=={}={}", package.name.as_normalized(), package.version, package.build);
    }
    let mut notes = platform_note(subject, options);
    if !subject.python.is_empty() {
        notes.push(format!(
            "the format cannot hold what pip installed, and leaves out {}, as conda does; pip's own format is `pip`",
            names(subject.python.iter().map(|package| package.name.as_str()))
        ));
    }
    Exported { text, notes }
}

#[cfg(test)]
mod tests {
    use super::match_spec_text;

    #[test]
    fn match_specs_are_written_as_conda_writes_them() {
        for (text, expected) in [
            ("python=3.11", "python=3.11"),
            ("python==3.11", "python==3.11"),
            ("numpy >=1.2,<3", "numpy[version='>=1.2,<3']"),
            ("pytorch", "pytorch"),
            ("pytorch=2.1.0=py3.11_cuda", "pytorch==2.1.0=py3.11_cuda"),
            ("pytorch=*=*cuda*", "pytorch[build=*cuda*]"),
            ("conda-forge::x", "x"),
            ("x!=1.2", "x!=1.2"),
        ] {
            assert_eq!(match_spec_text(text, false), expected, "{text}");
        }
        assert_eq!(match_spec_text("conda-forge::x=1", true), "conda-forge::x=1");
    }
}
