//! Where pip and uv are told to look: their own variables and files. Only URLs with credentials matter here: what the engine fetches with them, tare
//! fetches too. Nothing of it is kept or shown.

use std::path::{Path, PathBuf};

use url::Url;

use super::pip_config::{self, Var};
use crate::channel::Session;

/// Lets tare's client use the credentials of the indexes that variables and files of pip and uv name, each for its own origin. What comes first counts.
pub fn trust_configured_indexes(session: &Session) {
    let var = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
    for url in configured(&var, dirs::home_dir().as_deref(), Path::new("/etc")) {
        session.trust_index(&url);
    }
}

/// The URLs, those of uv first, for it is asked first.
fn configured(var: &Var<'_>, home: Option<&Path>, etc: &Path) -> Vec<String> {
    let mut urls = Vec::new();
    for name in ["UV_DEFAULT_INDEX", "UV_INDEX", "UV_INDEX_URL", "UV_EXTRA_INDEX_URL", "UV_FIND_LINKS"] {
        urls.extend(var(name).iter().flat_map(|value| value.split_whitespace()).map(|word| uv_word(word, var)));
    }
    for file in uv_files(var, home, etc) {
        if let Some(table) = std::fs::read_to_string(&file).ok().and_then(|text| text.parse::<toml::Table>().ok()) {
            uv_table(&table, var, &mut urls);
            if let Some(pip) = table.get("pip").and_then(toml::Value::as_table) {
                uv_table(pip, var, &mut urls);
            }
        }
    }
    for name in ["PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"] {
        urls.extend(var(name).iter().flat_map(|value| value.split_whitespace()).map(str::to_owned));
    }
    // Later files count more.
    for file in pip_config::files(var, home, etc, None).iter().rev() {
        let found =
            pip_config::read(file).into_iter().filter(|setting| matches!(&*setting.key, "index-url" | "extra-index-url" | "find-links"));
        urls.extend(found.flat_map(|setting| {
            setting.value.split_whitespace().filter(|word| word.contains("://")).map(str::to_owned).collect::<Vec<_>>()
        }));
    }
    urls
}

/// `URL` or `NAME=URL`.
fn uv_word(word: &str, var: &Var<'_>) -> String {
    match word.split_once('=') {
        Some((name, url)) if !name.contains("://") && url.contains("://") => named(name, url, var),
        _ => word.to_owned(),
    }
}

/// An index with a name takes its credentials from `UV_INDEX_NAME_USERNAME` and `UV_INDEX_NAME_PASSWORD` where its URL has none.
fn named(name: &str, url: &str, var: &Var<'_>) -> String {
    let name: String = name.chars().map(|c| if c.is_ascii_alphanumeric() { c.to_ascii_uppercase() } else { '_' }).collect();
    let (user, password) = (var(&format!("UV_INDEX_{name}_USERNAME")), var(&format!("UV_INDEX_{name}_PASSWORD")));
    let Ok(mut parsed) = Url::parse(url) else { return url.to_owned() };
    if (user.is_some() || password.is_some()) && parsed.password().is_none() {
        if let Some(user) = user {
            let _ = parsed.set_username(&user);
        }
        let _ = parsed.set_password(password.as_deref());
    }
    parsed.to_string()
}

fn uv_table(table: &toml::Table, var: &Var<'_>, urls: &mut Vec<String>) {
    for index in table.get("index").and_then(toml::Value::as_array).into_iter().flatten() {
        if let Some(url) = index.get("url").and_then(toml::Value::as_str) {
            let name = index.get("name").and_then(toml::Value::as_str);
            urls.push(name.map_or_else(|| url.to_owned(), |name| named(name, url, var)));
        }
    }
    for key in ["index-url", "extra-index-url", "find-links"] {
        let words = match table.get(key) {
            Some(toml::Value::Array(list)) => list.iter().filter_map(toml::Value::as_str).collect(),
            Some(toml::Value::String(one)) => vec![one.as_str()],
            _ => Vec::new(),
        };
        urls.extend(words.into_iter().map(str::to_owned));
    }
}

/// The files of uv for the user and the machine, as far as they count; a project's does not, because uv runs in no project.
pub(super) fn uv_files(var: &Var<'_>, home: Option<&Path>, etc: &Path) -> Vec<PathBuf> {
    if var("UV_NO_CONFIG").is_some() {
        return Vec::new();
    }
    if let Some(file) = var("UV_CONFIG_FILE") {
        return vec![PathBuf::from(file)];
    }
    let user = var("XDG_CONFIG_HOME").map(PathBuf::from).or_else(|| Some(home?.join(".config")));
    user.map(|folder| folder.join("uv/uv.toml")).into_iter().chain([etc.join("uv/uv.toml")]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_and_files_of_both_tools_are_read_in_their_order() {
        let home = tempfile::tempdir().unwrap();
        let home = home.path();
        let write = |name: &str, text: &str| {
            let path = home.join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        write(
            ".config/pip/pip.conf",
            "[global]\nindex-url: https://p:1@pip.example/simple\n# extra-index-url = https://no.example\n\
             extra_index_url =\n    https://q:2@more.example/simple\n\n    https://r:3@rest.example/simple\ntimeout = 10\n\
             [install]\n--find-links = https://s:4@links.example/ ./folder\n",
        );
        write("etc/pip.conf", "[global]\nindex-url = https://z:9@etc.example/simple\n");
        write(
            ".config/uv/uv.toml",
            "index-url = \"https://a:b@one.example\"\n[[index]]\nname = \"in-house\"\nurl = \"https://two.example/simple\"\n\
             [pip]\nextra-index-url = [\"https://c:d@three.example\"]\n",
        );
        let of = |pairs: &[(&str, &str)]| {
            configured(
                &|name| pairs.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned()),
                Some(home),
                &home.join("etc"),
            )
        };
        let from_pip = [
            "https://p:1@pip.example/simple",
            "https://q:2@more.example/simple",
            "https://r:3@rest.example/simple",
            "https://s:4@links.example/",
            "https://z:9@etc.example/simple",
        ];
        let from_uv = ["https://two.example/simple", "https://a:b@one.example", "https://c:d@three.example"];
        assert_eq!(of(&[]), [&from_uv[..], &from_pip].concat());
        let with = of(&[
            ("UV_INDEX_IN_HOUSE_USERNAME", "me"),
            ("UV_INDEX_IN_HOUSE_PASSWORD", "p/w"),
            ("UV_INDEX", "https://x.example extra=https://y.example/simple"),
            ("UV_INDEX_EXTRA_PASSWORD", "token"),
            ("PIP_INDEX_URL", "https://v:5@var.example"),
        ]);
        assert_eq!(with[..3], ["https://x.example", "https://:token@y.example/simple", "https://me:p%2Fw@two.example/simple"]);
        assert!(with.contains(&"https://v:5@var.example".to_owned()));
        let none = home.join("named.conf").display().to_string();
        std::fs::write(&none, "[global]\nindex-url = https://n:1@named.example\n").unwrap();
        assert_eq!(of(&[("UV_NO_CONFIG", "1"), ("PIP_CONFIG_FILE", "/dev/null")]), [""; 0]);
        assert_eq!(of(&[("UV_NO_CONFIG", "1"), ("PIP_CONFIG_FILE", &none)]), ["https://n:1@named.example", from_pip[4]]);
    }
}
