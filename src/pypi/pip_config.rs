//! pip's own settings: its files and its variables, as pip's documentation ("Configuration") and `configparser.RawConfigParser` have them.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use super::section::Options;
use crate::prefix::Environment;

/// Reads a variable; `None` where it is empty or not set.
pub(super) type Var<'a> = dyn Fn(&str) -> Option<String> + 'a;

/// Largest settings file that is read, in bytes.
const MOST: u64 = 1 << 20;

/// One setting as it stands in a file.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Setting {
    /// `global`, or the command that it is for.
    pub section: String,
    /// In lower case, with dashes, without the dashes of an option: `index-url`.
    pub key: String,
    /// Lines that go on are joined by line feeds.
    pub value: String,
}

/// The files of pip that count, later ones more. `prefix`: of the interpreter that pip would run on.
pub(super) fn files(var: &Var<'_>, home: Option<&Path>, etc: &Path, prefix: Option<&Path>) -> Vec<PathBuf> {
    let named = var("PIP_CONFIG_FILE");
    if named.as_deref() == Some("/dev/null") {
        return Vec::new();
    }
    let mut files: Vec<PathBuf> = match var("XDG_CONFIG_DIRS") {
        Some(folders) => std::env::split_paths(&folders).map(|folder| folder.join("pip/pip.conf")).collect(),
        None => vec![etc.join("xdg/pip/pip.conf")],
    };
    files.push(etc.join("pip.conf"));
    let named = named.map(PathBuf::from).filter(|file| file.exists());
    if named.is_none()
        && let Some(home) = home
    {
        files.push(home.join(".pip/pip.conf"));
        let plain = var("XDG_CONFIG_HOME").map_or_else(|| home.join(".config"), PathBuf::from).join("pip/pip.conf");
        let apple = home.join("Library/Application Support/pip");
        files.push(if cfg!(target_os = "macos") && apple.is_dir() { apple.join("pip.conf") } else { plain });
    }
    files.extend(prefix.map(|prefix| prefix.join("pip.conf")));
    files.extend(named);
    files
}

/// What a file says, in its order. What is no setting is passed over.
pub(super) fn read(file: &Path) -> Vec<Setting> {
    crate::files::read(file, MOST).map(|bytes| parse(&String::from_utf8_lossy(&bytes))).unwrap_or_default()
}

fn parse(text: &str) -> Vec<Setting> {
    let mut found: Vec<Setting> = Vec::new();
    let mut section: Option<String> = None;
    // How far the line of the last setting is indented; a line that is more so goes on with it.
    let mut open: Option<usize> = None;
    for line in text.lines() {
        let trimmed = line.trim();
        if trimmed.is_empty() || trimmed.starts_with(['#', ';']) {
            continue;
        }
        let indent = line.len() - line.trim_start().len();
        if let Some(setting) = open.filter(|open| indent > *open).and_then(|_| found.last_mut()) {
            setting.value.push('\n');
            setting.value.push_str(trimmed);
            continue;
        }
        open = None;
        if let Some(name) = trimmed.strip_prefix('[').and_then(|rest| Some(&rest[..rest.rfind(']')?])) {
            section = Some(name.to_owned());
            continue;
        }
        if let Some((section, (key, value))) = section.as_ref().zip(trimmed.split_once(['=', ':'])) {
            found.push(Setting { section: section.clone(), key: normal(key), value: value.trim().to_owned() });
            open = Some(indent);
        }
    }
    found
}

fn normal(key: &str) -> String {
    key.trim().to_lowercase().replace('_', "-").trim_start_matches("--").to_owned()
}

/// pip's settings that say where to look and how: uv does not read them itself.
#[derive(Debug, Default)]
pub(super) struct PipSettings {
    values: BTreeMap<String, String>,
}

impl PipSettings {
    /// What counts for `pip install` in `env`, on the interpreter of `prefix`.
    pub(super) fn of(env: &Environment, prefix: &Path, etc: &Path) -> Self {
        let var =
            |name: &str| env.get(OsStr::new(name)).filter(|value| !value.is_empty()).map(|value| value.to_string_lossy().into_owned());
        let home = var("HOME").map(PathBuf::from);
        // A command's own section counts more than `[global]`, and the variables of the process more than both.
        let mut found: BTreeMap<String, (u8, String)> = BTreeMap::new();
        let mut set = |weight: u8, key: String, value: String| {
            if found.get(&key).is_none_or(|(known, _)| weight >= *known) {
                found.insert(key, (weight, value));
            }
        };
        for setting in files(&var, home.as_deref(), etc, Some(prefix)).iter().flat_map(|file| read(file)) {
            match setting.section.as_str() {
                "global" => set(0, setting.key, setting.value),
                "install" => set(1, setting.key, setting.value),
                _ => {}
            }
        }
        for (name, value) in env {
            let (Some(name), value) = (name.to_str(), value.to_string_lossy()) else { continue };
            // pip's own test: whatever case the name has.
            let Some(key) = name.get(..4).filter(|start| start.eq_ignore_ascii_case("PIP_")).map(|_| normal(&name[4..])) else { continue };
            if !matches!(key.as_str(), "version" | "help") && !value.is_empty() {
                set(2, key, value.into_owned());
            }
        }
        PipSettings { values: found.into_iter().map(|(key, (_, value))| (key, value)).collect() }
    }

    pub(super) fn list(&self, key: &str) -> Vec<&str> {
        self.values.get(key).map(|value| value.split_whitespace().collect()).unwrap_or_default()
    }

    pub(super) fn one(&self, key: &str) -> Option<&str> {
        self.list(key).first().copied()
    }

    fn is_on(&self, key: &str) -> bool {
        self.one(key).is_some_and(|value| matches!(value.to_ascii_lowercase().as_str(), "1" | "true" | "yes" | "on" | "y" | "t"))
    }

    /// Lines for a requirements file, where neither the section nor uv's own settings decide.
    pub(super) fn lines(&self, options: &Options, cwd: &Path) -> Vec<String> {
        let mut lines = Vec::new();
        if let Some(url) = self.one("index-url").filter(|_| options.index_url.is_none()) {
            lines.push(format!("--index-url {url}"));
        }
        lines.extend(self.list("extra-index-url").iter().map(|url| format!("--extra-index-url {url}")));
        for place in self.list("find-links") {
            if place.contains("://") {
                lines.push(format!("--find-links {place}"));
            } else {
                // pip passes over folders that are not there.
                let folder = crate::spec::clean_path(&cwd.join(place));
                if folder.exists() {
                    lines.push(format!("--find-links {}", folder.display()));
                }
            }
        }
        if self.is_on("no-index") && !options.no_index {
            lines.push("--no-index".to_owned());
        }
        lines
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_read_as_pip_reads_it() {
        let text = "index-url = https://before.example\n[global]\nindex-url = https://pypi.example/simple\n# no = 1\n  ; no = 2\nExtra_Index_URL:\n  https://a.example\n\n  # not this\n  https://b.example\nno value\n\t--timeout = 7\n[install]\n  find-links =\n    /w\n  trusted-host = h = x\n";
        let found: Vec<String> = parse(text).iter().map(|one| format!("{}.{}={:?}", one.section, one.key, one.value)).collect();
        assert_eq!(
            found,
            [
                r#"global.index-url="https://pypi.example/simple""#,
                r#"global.extra-index-url="\nhttps://a.example\nhttps://b.example""#,
                r#"global.timeout="7""#,
                r#"install.find-links="\n/w""#,
                r#"install.trusted-host="h = x""#,
            ]
        );
    }

    #[test]
    fn the_settings_of_pip_are_handed_over() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str, text: &str| {
            let path = folder.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        at("etc/pip.conf", "[global]\nindex-url = https://etc.example/simple\ntrusted-host = etc.example\n");
        at(
            "home/.config/pip/pip.conf",
            "[global]\nno-index = yes\n[freeze]\ntimeout = 10\n[install]\nfind-links = https://a.example/w /nonexistent\n",
        );
        at("prefix/pip.conf", "[global]\nfind-links = https://less.example\ncert = /ca.pem\n");
        let of = |more: &[(&str, &str)]| {
            let mut env: Environment = [("HOME".into(), folder.path().join("home").into_os_string())].into();
            env.extend(more.iter().map(|(name, value)| ((*name).into(), (*value).into())));
            PipSettings::of(&env, &folder.path().join("prefix"), &folder.path().join("etc"))
        };
        let settings = of(&[("PIP_INDEX_URL", "https://env.example/simple"), ("PIP_VERSION", "1"), ("PIP_TIMEOUT", "")]);
        let lines = settings.lines(&Options::default(), Path::new("/"));
        assert_eq!(lines, ["--index-url https://env.example/simple", "--find-links https://a.example/w", "--no-index"]);
        assert_eq!(
            (settings.one("cert"), settings.one("trusted-host"), settings.one("timeout")),
            (Some("/ca.pem"), Some("etc.example"), None)
        );
        let own = Options { index_url: Some("https://section.example".into()), no_index: true, ..Options::default() };
        assert_eq!(settings.lines(&own, Path::new("/")), ["--find-links https://a.example/w"]);
        assert_eq!(of(&[("PIP_CONFIG_FILE", "/dev/null")]).lines(&Options::default(), Path::new("/")), [""; 0]);
        at("named.conf", "[install]\nindex-url = https://named.example\n");
        let named = folder.path().join("named.conf").display().to_string();
        let settings = of(&[("PIP_CONFIG_FILE", &named)]);
        assert_eq!(settings.lines(&Options::default(), Path::new("/"))[0], "--index-url https://named.example");
        assert_eq!(settings.one("no-index"), None);
    }
}
