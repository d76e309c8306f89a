//! Settings: defaults, .condarc files, tare's config.toml and environment variables, merged into one [`Settings`].
//!
//! Weakest first: defaults, the .condarc files in conda's order, config.toml, environment variables (flags are laid on
//! top by the command line). A scalar is taken from the strongest layer; lists are joined, stronger entries first
//! (as conda does); maps are joined key by key. Every value remembers its source.

/// Reading .condarc files, with places for errors.
mod condarc;
/// Changing config.toml and keeping its comments.
pub mod edit;
/// The environment as the rest of the program sees it.
mod environment;
/// The keys, their types, names of variables and defaults.
mod keys;
/// Reading config.toml, with places for errors.
mod toml_file;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use indexmap::IndexMap;
use serde_json::Value;
use url::Url;

use crate::error::{Error, Place, Result};
pub use environment::{Environment, expand_home, expand_variables, home_dir, no_home};
pub use keys::{Key, Kind, keys};

/// A value and where it comes from: `default`, a path, `env CONDA_CHANNELS`, `flag`.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Sourced<T> {
    /// The value.
    pub value: T,
    /// Where it comes from; several sources are joined by `, `, the strongest first.
    pub source: String,
}

impl<T> Sourced<T> {
    /// A value given on the command line.
    pub fn flag(value: T) -> Self {
        Sourced { value, source: "flag".to_owned() }
    }

    /// Whether a flag or a variable gives it, and no file.
    pub fn is_of_this_call(&self) -> bool {
        self.source == "flag" || self.source.starts_with("env ")
    }
}

/// How TLS certificates are checked.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum SslVerify {
    /// Against the certificates of the system.
    System,
    /// Not at all.
    Off,
    /// Against the system's and those of a PEM file.
    Bundle(PathBuf),
}

/// All settings.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Channels used when none are asked for, and appended when some are (CEP 24). Default: conda-forge.
    pub channels: Sourced<Vec<String>>,
    /// What `defaults` stands for.
    pub default_channels: Sourced<Vec<String>>,
    /// Where a channel name lives.
    pub channel_alias: Sourced<Url>,
    /// First part of a channel name to the location it lives in.
    pub custom_channels: Sourced<IndexMap<String, String>>,
    /// A name for several channels.
    pub custom_multichannels: Sourced<IndexMap<String, Vec<String>>>,
    /// `auto`, `strict`, `flexible` or `disabled`.
    pub channel_priority: Sourced<String>,
    /// What resolves `pip:` sections: `auto`, `uv` or `pip`.
    pub pip_resolver: Sourced<String>,
    /// Base URL to the base URLs that are asked in its place.
    pub mirrors: Sourced<IndexMap<String, Vec<String>>>,
    /// `root`: holds `envs`.
    pub root: Sourced<Option<PathBuf>>,
    /// Folders of named environments: new ones go into the first.
    pub envs_dirs: Sourced<Vec<PathBuf>>,
    /// Package caches that are only read.
    pub pkgs_dirs: Sourced<Vec<PathBuf>>,
    /// tare's own cache; `None` where nothing names a place and there is no home folder: see [`Settings::cache_dir`].
    pub cache_dir: Sourced<Option<PathBuf>>,
    /// The subdir environments are for, if not this machine's.
    pub subdir: Sourced<Option<String>>,
    /// No network.
    pub offline: Sourced<bool>,
    /// TLS certificates.
    pub ssl_verify: Sourced<SslVerify>,
    /// Scheme, or scheme and host, to the proxy's URL.
    pub proxy_servers: Sourced<IndexMap<String, String>>,
    /// Match specs that restrict every solve.
    pub pinned_packages: Sourced<Vec<String>>,
    /// Match specs added to every new environment.
    pub create_default_packages: Sourced<Vec<String>>,
    /// Builds from after this instant do not exist.
    pub exclude_newer: Sourced<Option<jiff::Timestamp>>,
    /// Name to version.
    pub override_virtual_packages: Sourced<IndexMap<String, String>>,
    /// Never hardlink.
    pub always_copy: Sourced<bool>,
    /// Symlinks into the cache are allowed where nothing better works.
    pub allow_softlinks: Sourced<bool>,
    /// `auto`, `reflink`, `hardlink`, `copy` or `symlink`.
    pub link_mode: Sourced<String>,
    /// Show the active environment before the prompt.
    pub changeps1: Sourced<bool>,
    /// What is shown there.
    pub env_prompt: Sourced<String>,
    /// Compile byte code.
    pub compile: Sourced<bool>,
    /// Until a connection stands.
    pub connect_timeout: Sourced<Duration>,
    /// Between two reads.
    pub read_timeout: Sourced<Duration>,
    /// Retries after a failed request.
    pub max_retries: Sourced<u32>,
    /// Requests at the same time.
    pub concurrency: Sourced<usize>,
    /// Use sharded repodata where a channel has it.
    pub repodata_use_shards: Sourced<bool>,
    /// Use repodata.json.zst where a channel has it.
    pub repodata_use_zst: Sourced<bool>,
    /// Ask the system's keyring for credentials.
    pub keyring: Sourced<bool>,
    /// config.toml that was read or would be written; `None` without a home folder: see [`Settings::config_file`].
    pub config_file: Option<PathBuf>,
    /// Files that were read, weakest first.
    pub files: Vec<PathBuf>,
    /// Keys that are not used and files that could not be read: worth a line with `-v`.
    pub notes: Vec<String>,
    /// The environment the settings were read in.
    pub env: Environment,
    /// Home folder; see [`home_dir`].
    pub home: Option<PathBuf>,
}

/// Where settings are looked for.
#[derive(Debug, Clone)]
pub struct LoadOptions {
    /// `--no-config`: read no file at all.
    pub no_config: bool,
    /// `--config-file`; else TARE_CONFIG, else the user's config folder.
    pub config_file: Option<PathBuf>,
    /// Environment variables.
    pub env: Environment,
    /// Home folder. One that is no absolute path counts as none.
    pub home: Option<PathBuf>,
    /// For relative paths.
    pub cwd: PathBuf,
    /// Root of the file system that holds `etc/conda` and `var/lib/conda`.
    pub system_root: PathBuf,
}

impl LoadOptions {
    /// This process: its environment, home and working folder.
    ///
    /// # Errors
    /// If the working folder is gone.
    pub fn process() -> Result<Self> {
        let env = Environment::process();
        let cwd = std::env::current_dir().map_err(|error| Error::failure("the working folder cannot be used").because(error))?;
        Ok(LoadOptions { no_config: false, config_file: None, env, home: home_dir(), cwd, system_root: PathBuf::from("/") })
    }
}

/// One value of one layer.
#[derive(Debug, Clone)]
struct Entry {
    key: &'static Key,
    /// Of the JSON type that `key.kind` asks for.
    value: Value,
    place: Option<Place>,
}

/// The values of one file or of the environment.
#[derive(Debug, Clone)]
struct Layer {
    source: String,
    entries: Vec<Entry>,
}

/// Reads and merges all settings.
///
/// # Errors
/// `Kind::Usage` with file, line and column for YAML or TOML that cannot be read and for values of a wrong type; for
/// environment variables with the variable's name. Unknown keys are noted only.
pub fn load(options: &LoadOptions) -> Result<Settings> {
    let options = &LoadOptions { home: options.home.clone().filter(|home| home.is_absolute()), ..options.clone() };
    let mut notes = Vec::new();
    let mut layers = Vec::new();
    let mut files = Vec::new();
    let config_file = config_file(options)?;
    if !options.no_config {
        for (path, named) in condarc_files(options) {
            let Some(text) = read_text(&path, named, &mut notes)? else { continue };
            let name = path.display().to_string();
            layers.push(Layer { entries: condarc::read(&name, &text, &mut notes)?, source: name });
            files.push(path);
        }
        let named = options.config_file.is_some() || options.env.get("TARE_CONFIG").is_some_and(|value| !value.is_empty());
        if let Some(file) = &config_file
            && let Some(text) = read_text(file, named, &mut notes)?
        {
            let name = file.display().to_string();
            layers.push(Layer { entries: toml_file::read(&name, &text, &mut notes)?, source: name });
            files.push(file.clone());
        }
    }
    for key in keys() {
        for variable in key.variables {
            let Some(text) = options.env.get(variable) else { continue };
            if text.trim().is_empty() {
                continue;
            }
            let value = key.kind.parse_text(&text).map_err(|why| Error::usage(format!("{variable}: {why}")))?;
            layers.push(Layer { source: format!("env {variable}"), entries: vec![Entry { key, value, place: None }] });
        }
    }
    merge(options, layers, config_file, files, notes)
}

fn config_file(options: &LoadOptions) -> Result<Option<PathBuf>> {
    if let Some(path) = &options.config_file {
        return Ok(Some(absolute(&options.cwd, path)));
    }
    if let Some(text) = options.env.get("TARE_CONFIG").filter(|text| !text.is_empty()) {
        return path_of(&text, options).map(Some).map_err(|why| Error::usage(format!("TARE_CONFIG: {why}")));
    }
    Ok(xdg("XDG_CONFIG_HOME", ".config", options).map(|folder| folder.join("tare").join("config.toml")))
}

/// A folder of the XDG specification: the variable, where it is an absolute path, else a folder below home.
fn xdg(variable: &str, below_home: &str, options: &LoadOptions) -> Option<PathBuf> {
    match options.env.get(variable).filter(|text| Path::new(text).is_absolute()) {
        Some(text) => Some(PathBuf::from(text)),
        None => Some(options.home.as_ref()?.join(below_home)),
    }
}

/// A path as it is written in a setting, made absolute.
fn path_of(text: &str, options: &LoadOptions) -> Result<PathBuf, String> {
    if options.home.is_none() && (text == "~" || text.starts_with("~/")) {
        return Err(format!("`{text}` has no meaning, because there is no home folder: HOME is not set, empty or no absolute path"));
    }
    Ok(absolute(&options.cwd, &expand_home(text, options.home.as_deref())))
}

fn absolute(cwd: &Path, path: &Path) -> PathBuf {
    cwd.join(path)
}

/// conda's search path, weakest first, and whether the file was named by the user (then it must be there).
fn condarc_files(options: &LoadOptions) -> Vec<(PathBuf, bool)> {
    let mut files = Vec::new();
    let folder = |base: &Path, files: &mut Vec<(PathBuf, bool)>| {
        files.push((base.join(".condarc"), false));
        files.push((base.join("condarc"), false));
        let mut inside: Vec<PathBuf> = fs_err::read_dir(base.join("condarc.d"))
            .map(|entries| entries.filter_map(|entry| Some(entry.ok()?.path())).collect())
            .unwrap_or_default();
        inside.retain(|path| path.extension().is_some_and(|extension| extension == "yml" || extension == "yaml"));
        inside.sort();
        files.extend(inside.into_iter().map(|path| (path, false)));
    };
    folder(&options.system_root.join("etc/conda"), &mut files);
    folder(&options.system_root.join("var/lib/conda"), &mut files);
    let prefix = |name: &str| options.env.get(name).filter(|text| !text.is_empty()).map(PathBuf::from);
    if let Some(root) = prefix("CONDA_ROOT") {
        folder(&root, &mut files);
    }
    if let Some(xdg) = prefix("XDG_CONFIG_HOME") {
        folder(&xdg.join("conda"), &mut files);
    }
    if let Some(home) = &options.home {
        folder(&home.join(".config/conda"), &mut files);
        folder(&home.join(".conda"), &mut files);
        files.push((home.join(".condarc"), false));
    }
    if let Some(active) = prefix("CONDA_PREFIX") {
        folder(&active, &mut files);
    }
    if let Some(text) = options.env.get("CONDARC").filter(|text| !text.is_empty()) {
        files.push((absolute(&options.cwd, &expand_home(&text, options.home.as_deref())), true));
    }
    // A file reached twice (XDG_CONFIG_HOME is ~/.config) counts at its stronger place.
    let mut seen = std::collections::HashSet::new();
    let mut unique: Vec<_> = files.into_iter().rev().filter(|(path, _)| seen.insert(path.clone())).collect();
    unique.reverse();
    unique
}

/// No settings file is anywhere near this long.
const MAX_FILE: u64 = 4 << 20;

fn read_text(path: &Path, named: bool, notes: &mut Vec<String>) -> Result<Option<String>> {
    let read = || -> std::io::Result<Vec<u8>> {
        let file = fs_err::File::open(path)?;
        let mut bytes = Vec::new();
        std::io::Read::read_to_end(&mut std::io::Read::take(file, MAX_FILE + 1), &mut bytes)?;
        Ok(bytes)
    };
    // What the user names may be a pipe, such as `<(…)`; a pipe that merely lies there would be waited for without end.
    if !named && std::fs::metadata(path).is_ok_and(|about| crate::files::kind(&about) == "a named pipe") {
        notes.push(format!("`{}` was not read: it is a named pipe", path.display()));
        return Ok(None);
    }
    let bytes = match read() {
        Ok(bytes) => bytes,
        Err(error) if named => return Err(Error::io("read", path, &error).with_kind(crate::error::Kind::Usage)),
        Err(error) if matches!(error.kind(), std::io::ErrorKind::NotFound | std::io::ErrorKind::NotADirectory) => return Ok(None),
        Err(error) => {
            notes.push(format!("`{}` was not read: {error}", path.display()));
            return Ok(None);
        }
    };
    if bytes.len() as u64 > MAX_FILE {
        return Err(Error::usage(format!("`{}` is longer than {MAX_FILE} bytes: that is no settings file", path.display())));
    }
    let bytes = bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(&bytes);
    match std::str::from_utf8(bytes) {
        Ok(text) => Ok(Some(text.to_owned())),
        Err(error) => Err(Error::usage(format!("`{}` is not UTF-8", path.display())).because(error).hint("save it as UTF-8 text")),
    }
}

/// An unknown key: noted, with the nearest known one.
fn unknown_key(file: &str, name: &str, notes: &mut Vec<String>) {
    let nearest = keys()
        .iter()
        .map(|key| (strsim::jaro_winkler(key.name, name), key.name))
        .filter(|(score, _)| *score > 0.9)
        .max_by(|left, right| left.0.total_cmp(&right.0));
    let shown: String = name.chars().filter(|c| !c.is_control()).take(60).collect();
    notes.push(match nearest {
        Some((_, known)) => format!("`{file}`: `{shown}` is not a key that is used here; did you mean `{known}`?"),
        None => format!("`{file}`: `{shown}` is not a key that is used here"),
    });
}

struct Merged {
    values: BTreeMap<&'static str, (Value, Vec<String>, Option<Place>)>,
}

impl Merged {
    fn add(&mut self, source: &str, entry: Entry) {
        let slot = self.values.entry(entry.key.name);
        match slot {
            std::collections::btree_map::Entry::Vacant(slot) => {
                slot.insert((entry.value, vec![source.to_owned()], entry.place));
            }
            std::collections::btree_map::Entry::Occupied(mut slot) => {
                let (value, sources, place) = slot.get_mut();
                match (entry.value, &mut *value) {
                    (Value::Array(mut stronger), Value::Array(weaker)) => {
                        for item in weaker.drain(..) {
                            if !stronger.contains(&item) {
                                stronger.push(item);
                            }
                        }
                        *weaker = stronger;
                        sources.insert(0, source.to_owned());
                    }
                    (Value::Object(stronger), Value::Object(weaker)) => {
                        weaker.extend(stronger);
                        sources.insert(0, source.to_owned());
                    }
                    (stronger, weaker) => {
                        *weaker = stronger;
                        *sources = vec![source.to_owned()];
                    }
                }
                *place = entry.place;
            }
        }
    }

    fn take<T>(
        &mut self,
        name: &'static str,
        convert: impl FnOnce(Value) -> Result<T, String>,
        default: impl FnOnce() -> T,
    ) -> Result<Sourced<T>> {
        match self.values.remove(name) {
            None => Ok(Sourced { value: default(), source: "default".to_owned() }),
            Some((value, sources, place)) => match convert(value) {
                Ok(value) => Ok(Sourced { value, source: sources.join(", ") }),
                Err(why) => {
                    let error = Error::usage(format!("`{name}`: {why}"));
                    Err(match place {
                        Some(place) => error.at(place),
                        None => error.because(format!("it comes from {}", sources.join(", "))),
                    })
                }
            },
        }
    }
}

fn text(value: Value) -> Result<String, String> {
    match value {
        Value::String(text) => Ok(text),
        other => Ok(other.to_string()),
    }
}

fn boolean(value: Value) -> Result<bool, String> {
    value.as_bool().ok_or_else(|| format!("`{value}` is neither true nor false"))
}

fn strings(value: Value) -> Result<Vec<String>, String> {
    match value {
        Value::Array(items) => items.into_iter().map(text).collect(),
        other => Ok(vec![text(other)?]),
    }
}

fn map(value: Value) -> Result<IndexMap<String, String>, String> {
    match value {
        Value::Object(items) => items.into_iter().map(|(name, value)| Ok((name, text(value)?))).collect(),
        other => Err(format!("`{other}` is no map")),
    }
}

fn map_of_lists(value: Value) -> Result<IndexMap<String, Vec<String>>, String> {
    match value {
        Value::Object(items) => items.into_iter().map(|(name, value)| Ok((name, strings(value)?))).collect(),
        other => Err(format!("`{other}` is no map")),
    }
}

fn seconds(value: Value) -> Result<Duration, String> {
    let number = value.as_f64().ok_or_else(|| format!("`{value}` is no number of seconds"))?;
    if !(number > 0.0 && number <= 86400.0) {
        return Err(format!("`{value}` is not between 0 and 86400 seconds"));
    }
    Ok(Duration::from_secs_f64(number))
}

fn integer(value: Value, largest: u64) -> Result<u64, String> {
    value.as_u64().filter(|number| *number <= largest).ok_or_else(|| format!("`{value}` is no whole number from 0 to {largest}"))
}

fn merge(
    options: &LoadOptions,
    layers: Vec<Layer>,
    config_file: Option<PathBuf>,
    files: Vec<PathBuf>,
    notes: Vec<String>,
) -> Result<Settings> {
    let env = &options.env;
    let mut merged = Merged { values: BTreeMap::new() };
    for layer in layers {
        for mut entry in layer.entries {
            expand(&mut entry.value, env);
            merged.add(&layer.source, entry);
        }
    }
    let path = |text: &str| path_of(text, options);
    let paths = |value: Value| -> Result<Vec<PathBuf>, String> { strings(value)?.iter().map(|text| path(text)).collect() };

    let root = merged.take("root", |value| Ok(Some(path(&text(value)?)?)), || None)?;
    let mut envs_dirs = merged.take("envs_dirs", paths, Vec::new)?;
    if let Some(folder) = &root.value {
        envs_dirs.value.insert(0, folder.join("envs"));
        envs_dirs.source =
            if envs_dirs.source == "default" { root.source.clone() } else { format!("{}, {}", root.source, envs_dirs.source) };
    }
    let own = xdg("XDG_DATA_HOME", ".local/share", options).map(|folder| folder.join("tare").join("envs"));
    envs_dirs.value.extend(own.filter(|own| !envs_dirs.value.contains(own)));
    let alias = |value: Value| {
        let text = text(value)?;
        let with_scheme = if text.contains("://") { text.clone() } else { format!("https://{text}") };
        let url = Url::parse(with_scheme.trim_end_matches('/'))
            .map_err(|error| format!("`{}` is no URL: {error}", crate::channel::redact_text(&text)))?;
        if matches!(url.scheme(), "http" | "https" | "file" | "oci") {
            Ok(url)
        } else {
            Err(format!("a channel cannot be reached by `{}:`", url.scheme()))
        }
    };
    let default_alias = Url::parse("https://conda.anaconda.org").map_err(|error| Error::failure("bad default").because(error))?;
    let ca_bundle = || {
        // requests' and curl's variables; SSL_CERT_FILE replaces the system's own list inside the TLS library.
        ["REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE"]
            .into_iter()
            .find_map(|variable| env.get(variable).filter(|text| !text.is_empty()).map(|text| (variable, text)))
    };
    let mut ssl_verify = merged.take(
        "ssl_verify",
        |value| match value {
            Value::Bool(true) => Ok(SslVerify::System),
            Value::Bool(false) => Ok(SslVerify::Off),
            Value::String(word) if word.eq_ignore_ascii_case("truststore") => Ok(SslVerify::System),
            Value::String(file) => Ok(SslVerify::Bundle(path(&file)?)),
            other => Err(format!("`{other}` is neither true, false nor a path")),
        },
        || SslVerify::System,
    )?;
    if ssl_verify.value == SslVerify::System
        && let Some((variable, text)) = ca_bundle()
    {
        let file = path(&text).map_err(|why| Error::usage(format!("{variable}: {why}")))?;
        ssl_verify = Sourced { value: SslVerify::Bundle(file), source: format!("env {variable}") };
    }
    Ok(Settings {
        channels: merged.take("channels", strings, || vec!["conda-forge".to_owned()])?,
        default_channels: merged.take("default_channels", strings, || {
            ["main", "r", "msys2"].iter().map(|name| format!("https://repo.anaconda.com/pkgs/{name}")).collect()
        })?,
        channel_alias: merged.take("channel_alias", alias, || default_alias)?,
        custom_channels: merged.take("custom_channels", map, IndexMap::new)?,
        custom_multichannels: merged.take("custom_multichannels", map_of_lists, IndexMap::new)?,
        channel_priority: merged.take("channel_priority", text, || "auto".to_owned())?,
        pip_resolver: merged.take("pip_resolver", text, || "auto".to_owned())?,
        mirrors: merged.take("mirrors", map_of_lists, IndexMap::new)?,
        root,
        envs_dirs,
        pkgs_dirs: merged.take("pkgs_dirs", paths, Vec::new)?,
        cache_dir: merged.take(
            "cache_dir",
            |value| Ok(Some(path(&text(value)?)?)),
            || xdg("XDG_CACHE_HOME", ".cache", options).map(|folder| folder.join("tare")),
        )?,
        subdir: merged.take("subdir", |value| Ok(Some(text(value)?)), || None)?,
        offline: merged.take("offline", boolean, || false)?,
        ssl_verify,
        proxy_servers: merged.take("proxy_servers", map, IndexMap::new)?,
        pinned_packages: merged.take("pinned_packages", strings, Vec::new)?,
        create_default_packages: merged.take("create_default_packages", strings, Vec::new)?,
        exclude_newer: merged.take(
            "exclude_newer",
            |value| parse_exclude_newer(&text(value)?, jiff::Timestamp::now()).map(Some),
            || None,
        )?,
        override_virtual_packages: merged.take("override_virtual_packages", map, IndexMap::new)?,
        always_copy: merged.take("always_copy", boolean, || false)?,
        allow_softlinks: merged.take("allow_softlinks", boolean, || false)?,
        link_mode: merged.take("link_mode", text, || "auto".to_owned())?,
        changeps1: merged.take("changeps1", boolean, || true)?,
        env_prompt: merged.take("env_prompt", text, || "({default_env}) ".to_owned())?,
        compile: merged.take("compile", boolean, || true)?,
        connect_timeout: merged.take("connect_timeout", seconds, || Duration::from_secs(30))?,
        read_timeout: merged.take("read_timeout", seconds, || Duration::from_secs(60))?,
        max_retries: merged.take("max_retries", |value| Ok(integer(value, 100)? as u32), || 3)?,
        concurrency: merged.take("concurrency", |value| Ok(integer(value, 1024)?.max(1) as usize), || 50)?,
        repodata_use_shards: merged.take("repodata_use_shards", boolean, || true)?,
        repodata_use_zst: merged.take("repodata_use_zst", boolean, || true)?,
        keyring: merged.take("keyring", boolean, || true)?,
        config_file,
        files,
        notes,
        env: env.clone(),
        home: options.home.clone(),
    })
}

/// `$NAME` and `${NAME}` in every string of a value.
fn expand(value: &mut Value, env: &Environment) {
    match value {
        Value::String(text) => *text = expand_variables(text, env),
        Value::Array(items) => items.iter_mut().for_each(|item| expand(item, env)),
        Value::Object(items) => items.values_mut().for_each(|item| expand(item, env)),
        _ => {}
    }
}

/// A date (`2026-01-31`, the end of that day in UTC), an RFC 3339 time, or an age (`7d`, `P1W`, `36h`).
///
/// # Errors
/// One line that says what was expected.
pub fn parse_exclude_newer(text: &str, now: jiff::Timestamp) -> Result<jiff::Timestamp, String> {
    let text = text.trim();
    if let Ok(time) = text.parse::<jiff::Timestamp>() {
        return Ok(time);
    }
    if let Ok(date) = text.parse::<jiff::civil::Date>()
        && let Ok(midnight) = date.tomorrow().and_then(|next| next.to_zoned(jiff::tz::TimeZone::UTC))
    {
        return midnight.timestamp().checked_sub(jiff::SignedDuration::from_nanos(1)).map_err(|error| error.to_string());
    }
    if let Ok(span) = text.parse::<jiff::Span>()
        && let Ok(zoned) = now.to_zoned(jiff::tz::TimeZone::UTC).checked_sub(span.abs())
    {
        return Ok(zoned.timestamp());
    }
    Err(format!("`{text}` is neither a date (2026-01-31), a time (2026-01-31T12:00:00Z) nor an age (7d)"))
}

impl Settings {
    /// Settings without any file or variable, for tests and tools.
    ///
    /// # Errors
    /// None in practice: the defaults are valid.
    pub fn defaults(home: &Path) -> Result<Self> {
        load(&LoadOptions {
            no_config: true,
            config_file: None,
            env: Environment::empty(),
            home: Some(home.to_path_buf()),
            cwd: home.to_path_buf(),
            system_root: home.to_path_buf(),
        })
    }

    /// The user's home folder.
    ///
    /// # Errors
    /// There is none, or HOME is empty or no absolute path; `what`: what is wanted there.
    pub fn home(&self, what: &str) -> Result<&Path> {
        self.home.as_deref().ok_or_else(|| no_home(&self.env, what))
    }

    /// tare's own cache.
    ///
    /// # Errors
    /// Nothing names a place for it, and there is no home folder.
    pub fn cache_dir(&self) -> Result<&Path> {
        let missing = || no_home(&self.env, "the cache").hint("or name a place for the cache: TARE_CACHE_DIR=PATH");
        self.cache_dir.value.as_deref().ok_or_else(missing)
    }

    /// config.toml, which need not exist.
    ///
    /// # Errors
    /// Nothing names it, and there is no home folder.
    pub fn config_file(&self) -> Result<&Path> {
        let missing = || no_home(&self.env, "the configuration").hint("or name the file: TARE_CONFIG=PATH");
        self.config_file.as_deref().ok_or_else(missing)
    }

    /// Key, value and source of every setting, in a fixed order. Secrets in URLs are masked.
    pub fn describe(&self) -> Vec<(&'static str, Value, String)> {
        fn row<T: serde::Serialize>(name: &'static str, value: &Sourced<T>) -> (&'static str, Value, String) {
            let mut json = serde_json::to_value(&value.value).unwrap_or(Value::Null);
            redact_value(&mut json);
            (name, json, value.source.clone())
        }
        let secs = |value: &Sourced<Duration>| Sourced { value: value.value.as_secs_f64(), source: value.source.clone() };
        let time = |value: &Sourced<Option<jiff::Timestamp>>| Sourced {
            value: value.value.map(|time| time.to_string()),
            source: value.source.clone(),
        };
        let ssl = Sourced {
            value: match &self.ssl_verify.value {
                SslVerify::System => Value::Bool(true),
                SslVerify::Off => Value::Bool(false),
                SslVerify::Bundle(file) => Value::String(file.display().to_string()),
            },
            source: self.ssl_verify.source.clone(),
        };
        vec![
            row("channels", &self.channels),
            row("default_channels", &self.default_channels),
            row(
                "channel_alias",
                &Sourced {
                    value: self.channel_alias.value.as_str().trim_end_matches('/').to_owned(),
                    source: self.channel_alias.source.clone(),
                },
            ),
            row("custom_channels", &self.custom_channels),
            row("custom_multichannels", &self.custom_multichannels),
            row("channel_priority", &self.channel_priority),
            row("pip_resolver", &self.pip_resolver),
            row("mirrors", &self.mirrors),
            row("root", &self.root),
            row("envs_dirs", &self.envs_dirs),
            row("pkgs_dirs", &self.pkgs_dirs),
            row("cache_dir", &self.cache_dir),
            row("subdir", &self.subdir),
            row("offline", &self.offline),
            row("ssl_verify", &ssl),
            row("proxy_servers", &self.proxy_servers),
            row("pinned_packages", &self.pinned_packages),
            row("create_default_packages", &self.create_default_packages),
            row("exclude_newer", &time(&self.exclude_newer)),
            row("override_virtual_packages", &self.override_virtual_packages),
            row("always_copy", &self.always_copy),
            row("allow_softlinks", &self.allow_softlinks),
            row("link_mode", &self.link_mode),
            row("changeps1", &self.changeps1),
            row("env_prompt", &self.env_prompt),
            row("compile", &self.compile),
            row("connect_timeout", &secs(&self.connect_timeout)),
            row("read_timeout", &secs(&self.read_timeout)),
            row("max_retries", &self.max_retries),
            row("concurrency", &self.concurrency),
            row("repodata_use_shards", &self.repodata_use_shards),
            row("repodata_use_zst", &self.repodata_use_zst),
            row("keyring", &self.keyring),
        ]
    }
}

fn redact_value(value: &mut Value) {
    match value {
        Value::String(text) => *text = crate::channel::redact_text(text),
        Value::Array(items) => items.iter_mut().for_each(redact_value),
        Value::Object(items) => items.values_mut().for_each(redact_value),
        _ => {}
    }
}

#[cfg(test)]
mod tests;
