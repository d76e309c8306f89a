use std::collections::HashSet;
use std::path::Path;
use std::sync::Arc;

use rattler_conda_types::{Channel, Subdir};
use url::Url;

use super::host;
use super::redact::{redact_text, redact_url};
use crate::config::{Settings, expand_home};
use crate::error::{Error, Place, Result};
use crate::report::Progress;

/// A channel as it was asked for.
pub trait ChannelSource {
    /// Name, URL or path, variables expanded.
    fn text(&self) -> &str;
    /// Where it stands, for errors.
    fn place(&self) -> Option<&Place>;
}

impl ChannelSource for String {
    fn text(&self) -> &str {
        self
    }
    fn place(&self) -> Option<&Place> {
        None
    }
}

impl ChannelSource for &str {
    fn text(&self) -> &str {
        self
    }
    fn place(&self) -> Option<&Place> {
        None
    }
}

impl ChannelSource for crate::spec::ChannelEntry {
    fn text(&self) -> &str {
        &self.text
    }
    fn place(&self) -> Option<&Place> {
        self.place.as_ref()
    }
}

/// A secret that stood in a channel's URL.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Credential {
    /// Requests to URLs that begin with this get the secret.
    pub prefix: Url,
    pub secret: Secret,
}

#[derive(Clone, PartialEq, Eq)]
pub(super) enum Secret {
    /// `/t/TOKEN` is put behind these first `at` bytes of the path.
    Token {
        at: usize,
        token: String,
    },
    Basic {
        user: String,
        password: String,
    },
}

impl std::fmt::Debug for Credential {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Credential({}, ..)", self.prefix)
    }
}

/// A channel that can be asked.
#[derive(Debug, Clone)]
pub struct ResolvedChannel {
    /// Its URL holds no secrets.
    pub channel: Arc<Channel>,
    /// Short name, or the URL without secrets.
    pub display: String,
    /// The channel made from this machine's own interpreters.
    pub is_host: bool,
    pub(super) credential: Option<Credential>,
    /// Nobody named it: it is configured, and came last because `nodefaults` was not among those named.
    pub appended: bool,
}

/// How channels are expanded.
#[derive(Clone, Copy)]
pub struct ExpandOptions<'a> {
    /// `--override-channels`: nothing configured is added.
    pub override_channels: bool,
    /// Some input had a `channels` key, or `-c` was given.
    pub declared: bool,
    /// `nodefaults` was among the channels.
    pub nodefaults: bool,
    /// Where relative paths start.
    pub root_dir: &'a Path,
    /// Makes the `host` channel and returns its URL; called at most once, and only if the channel is asked for.
    pub host: Option<&'a dyn Fn() -> Result<Url>>,
}

/// The channels in order of priority, and what the user should know about them.
#[derive(Debug, Clone, Default)]
pub struct Expanded {
    /// Without duplicates.
    pub channels: Vec<ResolvedChannel>,
    /// Defaults that were used or appended.
    pub notes: Vec<String>,
}

/// Turns channel names, paths and URLs into channels.
///
/// Without any channel the configured ones are used. With some, and without `nodefaults` or `--override-channels`, the
/// configured ones are appended last (CEP 24), which a note tells. `defaults` stands for `default_channels`, the names
/// of `custom_multichannels` for their lists, and `NAME/label/LABEL` is a name.
///
/// # Errors
/// `Kind::Usage` with the place: an empty name, a URL that is none, a scheme that is not supported, a folder that does
/// not exist, a list that contains itself, `--override-channels` without a channel.
pub fn expand<C: ChannelSource>(entries: &[C], settings: &Settings, options: ExpandOptions<'_>) -> Result<Expanded> {
    let mut work = Work { settings, options, out: Expanded::default(), seen: HashSet::new(), host: None };
    for entry in entries {
        if entry.text().trim() == "nodefaults" {
            continue;
        }
        work.add(entry.text().trim(), &mut Vec::new()).map_err(|error| match entry.place() {
            Some(place) => error.at(place.clone()),
            None => error,
        })?;
    }
    let nodefaults = options.nodefaults || entries.iter().any(|entry| entry.text().trim() == "nodefaults");
    let configured = || settings.channels.value.iter().filter(|name| name.trim() != "nodefaults");
    if options.override_channels {
        if work.out.channels.is_empty() {
            return Err(Error::usage("`--override-channels` leaves no channel").hint("name one: -c conda-forge"));
        }
    } else if !nodefaults {
        let listed = work.out.channels.len();
        let nothing_asked = !options.declared && entries.is_empty();
        for name in configured() {
            work.add(name, &mut Vec::new()).map_err(|error| error.context(format!("`channels` of {}", settings.channels.source)))?;
        }
        for channel in &mut work.out.channels[listed..] {
            channel.appended = !nothing_asked;
        }
        let added: Vec<String> = work.out.channels[listed..].iter().map(|channel| format!("`{}`", channel.display)).collect();
        if !added.is_empty() {
            let source = &settings.channels.source;
            let added = added.join(", ");
            work.out.notes.push(if nothing_asked {
                format!("no channels were given: {added} is used ({source})")
            } else {
                format!("{added} was appended to the channels ({source}); `nodefaults` or `--override-channels` turns this off")
            });
        }
    }
    if work.out.channels.is_empty() {
        return Err(Error::usage("there is no channel to take packages from")
            .because("`nodefaults` leaves out the configured ones")
            .hint("list one: `channels: [conda-forge]`"));
    }
    Ok(work.out)
}

/// Makes the `host` channel (or finds it unchanged in the cache) and returns its URL: what [`ExpandOptions::host`] wants.
/// `wanted`: see [`host::HostOptions::wanted`].
///
/// # Errors
/// As [`host::materialize`].
pub fn host_url(settings: &Settings, wanted: Vec<String>, progress: &dyn Progress) -> Result<Url> {
    let env = &settings.env;
    let options = host::HostOptions {
        cache_dir: settings.cache_dir()?.to_owned(),
        interpreter: env.get("TARE_HOST_PYTHON").filter(|text| !text.is_empty()).map(|text| expand_home(&text, settings.home.as_deref())),
        path_env: env.get("PATH").map(Into::into),
        home: settings.home.clone(),
        wanted,
    };
    Ok(host::materialize(&options, progress)?.url)
}

struct Work<'a> {
    settings: &'a Settings,
    options: ExpandOptions<'a>,
    out: Expanded,
    seen: HashSet<String>,
    host: Option<Url>,
}

/// Names that conda's own defaults know at another place than the alias.
const ANACONDA_NAMES: &[&str] = &["pkgs/main", "pkgs/r", "pkgs/msys2", "pkgs/pro", "pkgs/free"];

impl Work<'_> {
    fn add(&mut self, text: &str, inside: &mut Vec<String>) -> Result<()> {
        if text.is_empty() {
            return Err(Error::usage("the name of a channel is empty"));
        }
        if text.chars().any(char::is_control) {
            return Err(Error::usage("the name of a channel holds control characters"));
        }
        if text == "host" {
            return self.add_host();
        }
        let multi: Option<Vec<String>> = match self.settings.custom_multichannels.value.get(text) {
            Some(list) => Some(list.clone()),
            None if text == "defaults" => Some(self.settings.default_channels.value.clone()),
            None => None,
        };
        if let Some(list) = multi {
            if inside.iter().any(|name| name == text) || inside.len() > 16 {
                return Err(Error::usage(format!("the channel list `{text}` contains itself"))
                    .because(format!("{} -> {text}", inside.join(" -> "))));
            }
            inside.push(text.to_owned());
            for name in &list {
                self.add(name.trim(), inside)?;
            }
            inside.pop();
            return Ok(());
        }
        let (url, name) = self.locate(text)?;
        self.push(url, name)
    }

    fn add_host(&mut self) -> Result<()> {
        if self.host.is_none() {
            let Some(make) = self.options.host else {
                return Err(Error::failure("the `host` channel cannot be made here"));
            };
            self.host = Some(make()?);
        }
        let Some(url) = self.host.clone() else { return Ok(()) };
        if self.seen.insert(url.as_str().trim_end_matches('/').to_owned()) {
            let channel = Channel { platforms: None, base_url: url.into(), name: Some("host".to_owned()) };
            self.out.channels.push(ResolvedChannel {
                channel: Arc::new(channel),
                display: "host".to_owned(),
                is_host: true,
                appended: false,
                credential: None,
            });
        }
        Ok(())
    }

    /// The URL of a channel, and its name where it has one.
    fn locate(&self, text: &str) -> Result<(Url, Option<String>)> {
        if text.contains("://") || text.starts_with("file:") {
            return Ok((parse_url(text)?, None));
        }
        if is_path(text) {
            return Ok((self.folder(text)?, None));
        }
        let name = text.trim_matches('/');
        if let Some(bad) = name
            .chars()
            .find(|c| c.is_whitespace() || matches!(c, ':' | '\\' | '[' | ']' | '<' | '>' | '"' | '\'' | '`' | '?' | '#' | '*' | '@' | '='))
        {
            return Err(Error::usage(format!("`{}` is no name of a channel", redact_text(text)))
                .because(format!("it contains `{bad}`"))
                .hint("a channel is a name (conda-forge), a URL (https://…) or a folder (./channel)"));
        }
        if name.is_empty() || name.split('/').any(|part| matches!(part, "" | "." | "..")) {
            return Err(Error::usage(format!("`{text}` is no name of a channel")));
        }
        // The longest configured beginning of the name wins: `a/b` before `a`.
        let mut end = name.len();
        loop {
            if let Some(location) = self.settings.custom_channels.value.get(&name[..end]) {
                return Ok((join(&self.location(location)?, name)?, Some(name.to_owned())));
            }
            match name[..end].rfind('/') {
                Some(at) => end = at,
                None => break,
            }
        }
        if ANACONDA_NAMES.contains(&name) {
            return Ok((join(&parse_url("https://repo.anaconda.com")?, name)?, Some(name.to_owned())));
        }
        Ok((join(&self.settings.channel_alias.value, name)?, Some(name.to_owned())))
    }

    /// A value of `custom_channels`: URL, host without a scheme, or folder.
    fn location(&self, text: &str) -> Result<Url> {
        if text.contains("://") || text.starts_with("file:") {
            return parse_url(text);
        }
        if is_path(text) {
            let path = self.options.root_dir.join(expand_home(text, self.settings.home.as_deref()));
            return folder_url(&path);
        }
        parse_url(&format!("https://{text}"))
    }

    fn folder(&self, text: &str) -> Result<Url> {
        let path = self.options.root_dir.join(expand_home(text, self.settings.home.as_deref()));
        let path = crate::spec::clean_path(&path);
        check_folder(&path, text)?;
        folder_url(&path)
    }

    fn push(&mut self, mut url: Url, name: Option<String>) -> Result<()> {
        strip_subdir(&mut url);
        if url.scheme() == "file" {
            let path = url.to_file_path().map_err(|()| Error::usage(format!("`{url}` is no path on this machine")))?;
            check_folder(&path, url.as_str())?;
        }
        let credential = take_secret(&mut url)?;
        let key = url.as_str().trim_end_matches('/').to_owned();
        if !self.seen.insert(key.clone()) {
            return Ok(());
        }
        let alias = self.settings.channel_alias.value.as_str().trim_end_matches('/');
        let name = name.or_else(|| key.strip_prefix(alias).and_then(|rest| rest.strip_prefix('/')).map(str::to_owned));
        let display = match &name {
            Some(name) => name.clone(),
            None => redact_url(&url).trim_end_matches('/').to_owned(),
        };
        let channel = Channel { platforms: None, base_url: url.into(), name: Some(name.unwrap_or(key)) };
        self.out.channels.push(ResolvedChannel { channel: Arc::new(channel), display, is_host: false, credential, appended: false });
        Ok(())
    }
}

/// Does a channel's text name a folder?
fn is_path(text: &str) -> bool {
    let bytes = text.as_bytes();
    text == "."
        || text == ".."
        || text == "~"
        || ["/", "./", "../", "~/", "\\\\", ".\\", "..\\"].iter().any(|start| text.starts_with(start))
        || (bytes.len() > 2 && bytes[0].is_ascii_alphabetic() && bytes[1] == b':' && matches!(bytes[2], b'/' | b'\\'))
}

fn folder_url(path: &Path) -> Result<Url> {
    Url::from_directory_path(path).map_err(|()| Error::usage(format!("`{}` is no folder that can be written as a URL", path.display())))
}

/// A folder is a channel if repodata lies in one of its subdirs.
fn check_folder(path: &Path, shown: &str) -> Result<()> {
    if !path.is_dir() {
        let why = if path.exists() { "it is no folder" } else { "it does not exist" };
        return Err(Error::usage(format!("the channel `{shown}` cannot be used")).because(format!("`{}`: {why}", path.display())));
    }
    let has_repodata = |folder: &Path| folder.join("repodata.json").is_file() || folder.join("repodata.json.zst").is_file();
    if Subdir::all().any(|subdir| has_repodata(&path.join(subdir.as_str()))) {
        return Ok(());
    }
    if has_repodata(path) {
        let subdir = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        return Err(
            Error::usage(format!("the channel `{shown}` is a subdir, not a channel")).hint(format!("name the folder above `{subdir}`"))
        );
    }
    Err(Error::usage(format!("the folder `{shown}` is no channel"))
        .because("there is no repodata.json in it (looked in its folders named like platforms, and noarch)")
        .hint(format!("make an index of the packages in it: conda index {}", path.display())))
}

fn parse_url(text: &str) -> Result<Url> {
    let url = Url::parse(text).map_err(|error| Error::usage(format!("`{}` is no URL", redact_text(text))).because(error))?;
    match url.scheme() {
        "http" | "https" | "oci" if url.has_host() => {}
        "file" => {}
        "http" | "https" | "oci" => return Err(Error::usage(format!("`{}` names no host", redact_text(text)))),
        scheme => {
            return Err(Error::usage(format!("channels cannot be reached by `{scheme}:`"))
                .because(format!("`{}`", redact_text(text)))
                .hint("http, https, oci and file are supported"));
        }
    }
    if url.query().is_some() || url.fragment().is_some() {
        return Err(Error::usage(format!("the channel `{}` has a query or a fragment", redact_text(text)))
            .hint("a channel's URL ends with its name"));
    }
    Ok(url)
}

fn join(base: &Url, name: &str) -> Result<Url> {
    let mut url = base.clone();
    {
        let mut segments = url.path_segments_mut().map_err(|()| Error::usage(format!("no channel can live at `{}`", redact_url(base))))?;
        segments.pop_if_empty().extend(name.split('/'));
    }
    Ok(url)
}

/// `https://host/channel/linux-64` means the channel (as in conda).
fn strip_subdir(url: &mut Url) {
    let mut parts: Vec<String> = url.path_segments().map(|parts| parts.map(str::to_owned).collect()).unwrap_or_default();
    while parts.last().is_some_and(String::is_empty) {
        parts.pop();
    }
    if parts.last().is_some_and(|last| last.parse::<Subdir>().is_ok()) {
        parts.pop();
    }
    // The parts are encoded already.
    url.set_path(&if parts.is_empty() { "/".to_owned() } else { format!("/{}/", parts.join("/")) });
}

/// Takes token, user and password out of a channel's URL.
pub(super) fn take_secret(url: &mut Url) -> Result<Option<Credential>> {
    let mut secret = None;
    if url.scheme() == "file" {
        return Ok(None);
    }
    if !url.username().is_empty() || url.password().is_some() {
        let decode = |text: &str| percent_decode(text);
        let (user, password) = (decode(url.username()), decode(url.password().unwrap_or_default()));
        secret = Some(Secret::Basic { user, password });
        let cleared = url.set_username("").is_ok() && url.set_password(None).is_ok();
        if !cleared {
            return Err(Error::usage(format!("the credentials in `{}` cannot be used", redact_url(url))));
        }
    }
    let path = url.path().to_owned();
    if let Some(at) = path.find("/t/") {
        let after = &path[at + 3..];
        let end = after.find('/').unwrap_or(after.len());
        let (token, rest) = after.split_at(end);
        if !token.is_empty() {
            if secret.is_some() {
                return Err(Error::usage(format!("`{}` has a token and a password", redact_url(url))).hint("use one of the two"));
            }
            secret = Some(Secret::Token { at, token: token.to_owned() });
            let clean = format!("{}{rest}", &path[..at]);
            url.set_path(&clean);
        }
    }
    Ok(secret.map(|secret| Credential { prefix: url.clone(), secret }))
}

pub(crate) fn percent_decode(text: &str) -> String {
    let bytes = text.as_bytes();
    let mut out = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while at < bytes.len() {
        let hex = (bytes[at] == b'%').then(|| text.get(at + 1..at + 3)).flatten().and_then(|hex| u8::from_str_radix(hex, 16).ok());
        match hex {
            Some(byte) => {
                out.push(byte);
                at += 3;
            }
            None => {
                out.push(bytes[at]);
                at += 1;
            }
        }
    }
    String::from_utf8_lossy(&out).into_owned()
}

#[cfg(test)]
mod tests;
