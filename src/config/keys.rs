use serde_json::{Map, Number, Value};

/// The type of a setting, and how an environment variable spells it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// `true`, `false`, and what YAML 1.1 and conda also take: yes, no, on, off, 1, 0.
    Bool,
    /// Any scalar, as text.
    Text,
    /// One of these words.
    Word(&'static [&'static str]),
    /// A whole number.
    Integer,
    /// A number of seconds.
    Seconds,
    /// A list of texts; the separator is for environment variables.
    List(char),
    /// Name to text.
    Map,
    /// Name to a list of texts.
    MapOfLists,
    /// `true`, `false` or a path.
    BoolOrText,
}

/// A setting.
#[derive(Debug)]
pub struct Key {
    /// Its name in files.
    pub name: &'static str,
    /// Other names in .condarc files.
    pub aliases: &'static [&'static str],
    /// Its type.
    pub kind: Kind,
    /// Environment variables that set it, weakest first.
    pub variables: &'static [&'static str],
    /// May stand in .condarc files (all may stand in config.toml).
    pub condarc: bool,
    /// One line about it.
    pub about: &'static str,
}

const fn key(name: &'static str, kind: Kind, variables: &'static [&'static str], condarc: bool, about: &'static str) -> Key {
    Key { name, aliases: &[], kind, variables, condarc, about }
}

const fn aliased(aliases: &'static [&'static str], key: Key) -> Key {
    Key { aliases, ..key }
}

static KEYS: &[Key] = &[
    aliased(
        &["channel"],
        key("channels", Kind::List(','), &["CONDA_CHANNELS"], true, "channels when none are asked for, and appended when some are"),
    ),
    key("default_channels", Kind::List(','), &["CONDA_DEFAULT_CHANNELS"], true, "what `defaults` stands for"),
    key("channel_alias", Kind::Text, &["CONDA_CHANNEL_ALIAS"], true, "where a channel name lives"),
    key("custom_channels", Kind::Map, &[], true, "channel name to the location it lives in"),
    key("custom_multichannels", Kind::MapOfLists, &[], true, "one name for several channels"),
    key(
        "channel_priority",
        Kind::Word(&["auto", "strict", "flexible", "disabled"]),
        &["CONDA_CHANNEL_PRIORITY"],
        true,
        "auto, strict, flexible or disabled",
    ),
    aliased(
        &["mirrored_channels"],
        key("mirrors", Kind::MapOfLists, &[], true, "base URL (or channel name) to the URLs asked in its place"),
    ),
    key("root", Kind::Text, &["TARE_ROOT"], false, "folder that holds `envs`"),
    aliased(
        &["envs_path"],
        key("envs_dirs", Kind::List(':'), &["CONDA_ENVS_PATH", "CONDA_ENVS_DIRS"], true, "folders of named environments"),
    ),
    key("pkgs_dirs", Kind::List(','), &["CONDA_PKGS_DIRS"], true, "package caches that are only read"),
    key("cache_dir", Kind::Text, &["TARE_CACHE_DIR"], false, "tare's own cache"),
    key("subdir", Kind::Text, &["CONDA_SUBDIR"], true, "platform that environments are for"),
    key("offline", Kind::Bool, &["CONDA_OFFLINE", "TARE_OFFLINE"], true, "no network"),
    aliased(&["verify_ssl"], key("ssl_verify", Kind::BoolOrText, &["CONDA_SSL_VERIFY"], true, "true, false or a PEM file")),
    key("proxy_servers", Kind::Map, &[], true, "scheme, or scheme and host, to the proxy's URL"),
    key("pinned_packages", Kind::List('&'), &["CONDA_PINNED_PACKAGES"], true, "match specs that restrict every solve"),
    key("create_default_packages", Kind::List(','), &["CONDA_CREATE_DEFAULT_PACKAGES"], true, "match specs added to every new environment"),
    key("exclude_newer", Kind::Text, &["CONDA_EXCLUDE_NEWER", "TARE_EXCLUDE_NEWER"], true, "builds from after this time do not exist"),
    aliased(&["virtual_packages"], key("override_virtual_packages", Kind::Map, &[], true, "virtual package to version")),
    aliased(&["copy"], key("always_copy", Kind::Bool, &["CONDA_ALWAYS_COPY"], true, "never hardlink")),
    key("allow_softlinks", Kind::Bool, &["CONDA_ALLOW_SOFTLINKS"], true, "symlinks into the cache are allowed"),
    key(
        "link_mode",
        Kind::Word(&["auto", "reflink", "hardlink", "copy", "symlink"]),
        &["TARE_LINK_MODE"],
        false,
        "auto, reflink, hardlink, copy or symlink",
    ),
    key("changeps1", Kind::Bool, &["CONDA_CHANGEPS1"], true, "show the active environment before the prompt"),
    key("env_prompt", Kind::Text, &[], true, "what is shown: {default_env}, {stacked_env}, {name}, {prefix}"),
    key("compile", Kind::Bool, &["TARE_COMPILE"], false, "compile Python byte code"),
    aliased(
        &["remote_connect_timeout_secs"],
        key("connect_timeout", Kind::Seconds, &["CONDA_REMOTE_CONNECT_TIMEOUT_SECS"], true, "seconds until a connection stands"),
    ),
    aliased(
        &["remote_read_timeout_secs"],
        key("read_timeout", Kind::Seconds, &["CONDA_REMOTE_READ_TIMEOUT_SECS"], true, "seconds between two reads"),
    ),
    aliased(
        &["remote_max_retries"],
        key("max_retries", Kind::Integer, &["CONDA_REMOTE_MAX_RETRIES"], true, "retries after a failed request"),
    ),
    aliased(&["fetch_threads"], key("concurrency", Kind::Integer, &["CONDA_FETCH_THREADS"], true, "requests at the same time")),
    key(
        "pip_resolver",
        Kind::Word(&["auto", "uv", "pip"]),
        &["TARE_PIP_RESOLVER"],
        false,
        "what resolves `pip:` sections: auto (uv where there is one), uv or pip",
    ),
    key("repodata_use_shards", Kind::Bool, &["CONDA_REPODATA_USE_SHARDS"], true, "sharded repodata where a channel has it"),
    key("repodata_use_zst", Kind::Bool, &["CONDA_REPODATA_USE_ZST"], true, "repodata.json.zst where a channel has it"),
    key("keyring", Kind::Bool, &["TARE_KEYRING"], false, "ask the system's keyring for credentials"),
];

/// All settings, in the order of `tare config`.
pub fn keys() -> &'static [Key] {
    KEYS
}

/// A setting by its name or alias; `-` counts as `_`.
pub(super) fn find(name: &str) -> Option<&'static Key> {
    let name = name.replace('-', "_");
    KEYS.iter().find(|key| key.name == name || key.aliases.contains(&name.as_str()))
}

fn parse_bool(text: &str) -> Option<bool> {
    match text.trim().to_ascii_lowercase().as_str() {
        "true" | "yes" | "on" | "y" | "1" => Some(true),
        "false" | "no" | "off" | "n" | "0" => Some(false),
        _ => None,
    }
}

fn shown(value: &Value) -> String {
    let text = match value {
        Value::String(text) => crate::channel::redact_text(text),
        Value::Array(_) => return "a list".to_owned(),
        Value::Object(_) => return "a map".to_owned(),
        Value::Null => return "nothing".to_owned(),
        other => other.to_string(),
    };
    format!("`{}`", text.chars().filter(|c| !c.is_control()).take(60).collect::<String>())
}

impl Kind {
    /// What is expected, for messages.
    pub fn expects(self) -> String {
        match self {
            Kind::Bool => "true or false".to_owned(),
            Kind::Text => "a text".to_owned(),
            Kind::Word(words) => words.join(", "),
            Kind::Integer => "a whole number".to_owned(),
            Kind::Seconds => "a number of seconds".to_owned(),
            Kind::List(_) => "a list of texts".to_owned(),
            Kind::Map => "a map of names to texts".to_owned(),
            Kind::MapOfLists => "a map of names to lists".to_owned(),
            Kind::BoolOrText => "true, false or a path".to_owned(),
        }
    }

    /// Checks a value out of a file and brings it into the one form that merging knows.
    pub(super) fn check(self, value: Value) -> Result<Value, String> {
        let wrong = |value: &Value| Err(format!("expected {}, found {}", self.expects(), shown(value)));
        let scalar = |value: Value| match value {
            Value::String(text) => Ok(Value::String(text)),
            Value::Bool(_) | Value::Number(_) => Ok(Value::String(value.to_string())),
            other => Err(other),
        };
        match (self, value) {
            (Kind::Bool, Value::Bool(value)) => Ok(Value::Bool(value)),
            (Kind::Bool, Value::String(text)) => {
                parse_bool(&text).map(Value::Bool).ok_or_else(|| format!("expected true or false, found {}", shown(&Value::String(text))))
            }
            (Kind::BoolOrText, Value::Bool(value)) => Ok(Value::Bool(value)),
            (Kind::BoolOrText, Value::String(text)) => Ok(parse_bool(&text).map(Value::Bool).unwrap_or(Value::String(text))),
            (Kind::Word(words), value) => {
                // conda's older spelling of channel_priority.
                let value = match value {
                    Value::Bool(true) if words.contains(&"flexible") => Value::String("flexible".to_owned()),
                    Value::Bool(false) if words.contains(&"disabled") => Value::String("disabled".to_owned()),
                    other => other,
                };
                match &value {
                    Value::String(text) => {
                        let lower = text.trim().to_ascii_lowercase();
                        let lower = match parse_bool(&lower) {
                            Some(true) if words.contains(&"flexible") => "flexible".to_owned(),
                            Some(false) if words.contains(&"disabled") => "disabled".to_owned(),
                            _ => lower,
                        };
                        if words.contains(&lower.as_str()) { Ok(Value::String(lower)) } else { wrong(&value) }
                    }
                    _ => wrong(&value),
                }
            }
            (Kind::Integer, Value::Number(number)) if number.is_u64() => Ok(Value::Number(number)),
            (Kind::Integer, Value::String(text)) => text
                .trim()
                .parse::<u64>()
                .map(|number| Value::Number(number.into()))
                .map_err(|_| format!("expected a whole number, found {}", shown(&Value::String(text)))),
            (Kind::Seconds, Value::Number(number)) => Ok(Value::Number(number)),
            (Kind::Seconds, Value::String(text)) => text
                .trim()
                .parse::<f64>()
                .ok()
                .and_then(Number::from_f64)
                .map(Value::Number)
                .ok_or_else(|| format!("expected a number of seconds, found {}", shown(&Value::String(text)))),
            (Kind::Text, value) => scalar(value).or_else(|value| wrong(&value)),
            (Kind::List(_), Value::Array(items)) => Ok(Value::Array(
                items
                    .into_iter()
                    .map(|item| scalar(item).map_err(|item| format!("expected a list of texts, found {} in it", shown(&item))))
                    .collect::<Result<_, _>>()?,
            )),
            (Kind::List(_), value) => match scalar(value) {
                // conda takes one text for a list of one.
                Ok(value) => Ok(Value::Array(vec![value])),
                Err(value) => wrong(&value),
            },
            (Kind::Map, Value::Object(items)) => {
                let mut out = Map::new();
                for (name, item) in items {
                    let item = match item {
                        Value::Null => Value::String(String::new()),
                        other => scalar(other).map_err(|item| format!("`{name}`: expected a text, found {}", shown(&item)))?,
                    };
                    out.insert(name, item);
                }
                Ok(Value::Object(out))
            }
            (Kind::MapOfLists, Value::Object(items)) => {
                let mut out = Map::new();
                for (name, item) in items {
                    let list = Kind::List(',').check(item).map_err(|why| format!("`{name}`: {why}"))?;
                    out.insert(name, list);
                }
                Ok(Value::Object(out))
            }
            (_, value) => wrong(&value),
        }
    }

    /// A value out of an environment variable or the command line of `tare config set`.
    pub(super) fn parse_text(self, text: &str) -> Result<Value, String> {
        match self {
            Kind::List(separator) => Ok(Value::Array(
                text.split(separator).map(str::trim).filter(|item| !item.is_empty()).map(|item| Value::String(item.to_owned())).collect(),
            )),
            Kind::Map | Kind::MapOfLists => Err("a map cannot be given as one text".to_owned()),
            _ => self.check(Value::String(text.trim().to_owned())),
        }
    }
}
