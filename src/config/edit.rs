//! `tare config set|unset|append`: changes config.toml in place; comments and order stay.

use std::io::Write;
use std::path::Path;

use serde_json::Value;
use toml_edit::{Array, DocumentMut, Item, Table, value};

use super::keys::{self, Key, Kind};
use crate::error::{Error, Result};

/// Sets `key` (or, for maps, `key.NAME`) to `text`. A list takes its items separated by commas (or what its
/// environment variable uses); a list inside of a map is separated by commas.
///
/// # Errors
/// `Kind::Usage` for an unknown key or a value of a wrong type; an I/O error with the path.
pub fn set(file: &Path, key: &str, text: &str) -> Result<()> {
    let (setting, part) = resolve(key)?;
    change(file, |document| {
        let parsed = parse(setting, part, text)?;
        match part {
            None => put(document.as_table_mut(), setting.name, parsed),
            Some(part) => put(sub_table(document, setting)?, part, parsed),
        }
        Ok(())
    })
}

/// Adds `text` to the end of a list, unless it is in it.
///
/// # Errors
/// As [`set`]; also for a key that is no list.
pub fn append(file: &Path, key: &str, text: &str) -> Result<()> {
    let (setting, part) = resolve(key)?;
    if !matches!((setting.kind, part), (Kind::List(_), None) | (Kind::MapOfLists, Some(_))) {
        return Err(
            Error::usage(format!("`{key}` is no list")).hint(format!("it is {}: tare config set {key} VALUE", setting.kind.expects()))
        );
    }
    change(file, |document| {
        let (table, name): (&mut dyn toml_edit::TableLike, &str) = match part {
            None => (document.as_table_mut(), setting.name),
            Some(part) => (sub_table(document, setting)?, part),
        };
        let item = table.entry(name).or_insert_with(|| value(Array::new()));
        if let Some(one) = item.as_str().map(str::to_owned) {
            *item = value(Array::from_iter([one]));
        }
        let Some(list) = item.as_array_mut() else {
            return Err(Error::usage(format!("`{key}` in `{}` is no list", file.display())));
        };
        if !list.iter().any(|item| item.as_str() == Some(text)) {
            list.push(text);
        }
        Ok(())
    })
}

/// Removes `key` (or one entry of a map).
///
/// # Errors
/// `Kind::Usage` for an unknown key and for one that is not in the file; an I/O error with the path.
pub fn unset(file: &Path, key: &str) -> Result<()> {
    let (setting, part) = resolve(key)?;
    change(file, |document| {
        let removed = match part {
            None => {
                let mut names = vec![setting.name];
                names.extend(setting.aliases);
                let spelled: Vec<String> = document
                    .as_table()
                    .iter()
                    .map(|(name, _)| name.to_owned())
                    .filter(|name| names.contains(&name.replace('-', "_").as_str()))
                    .collect();
                spelled.iter().filter(|name| document.as_table_mut().remove(name).is_some()).count() > 0
            }
            Some(part) => document
                .as_table_mut()
                .get_mut(setting.name)
                .and_then(Item::as_table_like_mut)
                .and_then(|table| table.remove(part))
                .is_some(),
        };
        if removed {
            Ok(())
        } else {
            Err(Error::usage(format!("`{key}` is not set in `{}`", file.display())).hint("see where it comes from: tare config"))
        }
    })
}

fn resolve(key: &str) -> Result<(&'static Key, Option<&str>)> {
    let (name, part) = match key.split_once('.') {
        Some((name, part)) => (name, Some(part)),
        None => (key, None),
    };
    let Some(setting) = keys::find(name) else {
        let nearest = keys::keys()
            .iter()
            .map(|key| (strsim::jaro_winkler(key.name, name), key.name))
            .filter(|(score, _)| *score > 0.8)
            .max_by(|left, right| left.0.total_cmp(&right.0));
        let error = Error::usage(format!("there is no setting `{name}`"));
        return Err(match nearest {
            Some((_, known)) => error.hint(format!("did you mean `{known}`?")),
            None => error.hint("all settings: tare config"),
        });
    };
    let is_map = matches!(setting.kind, Kind::Map | Kind::MapOfLists);
    match part {
        Some("") => Err(Error::usage(format!("`{key}` names no entry"))),
        Some(_) if !is_map => Err(Error::usage(format!("`{name}` has no parts")).because(format!("it is {}", setting.kind.expects()))),
        _ => Ok((setting, part)),
    }
}

fn parse(setting: &Key, part: Option<&str>, text: &str) -> Result<Value> {
    let kind = match (setting.kind, part) {
        (Kind::Map, Some(_)) => Kind::Text,
        (Kind::MapOfLists, Some(_)) => Kind::List(','),
        (Kind::Map | Kind::MapOfLists, None) => {
            return Err(Error::usage(format!("`{}` is {}", setting.name, setting.kind.expects()))
                .hint(format!("set one entry: tare config set {}.NAME VALUE", setting.name)));
        }
        (kind, _) => kind,
    };
    let value = kind.parse_text(text).map_err(|why| Error::usage(format!("`{}`: {why}", setting.name)))?;
    if setting.name == "exclude_newer" {
        super::parse_exclude_newer(text, jiff::Timestamp::now()).map_err(Error::usage)?;
    }
    Ok(value)
}

fn put(table: &mut dyn toml_edit::TableLike, name: &str, new: Value) {
    let mut item = match new {
        Value::Bool(flag) => value(flag),
        Value::Number(number) => match (number.as_i64(), number.as_f64()) {
            (Some(whole), _) => value(whole),
            (None, Some(fraction)) => value(fraction),
            (None, None) => value(number.to_string()),
        },
        Value::Array(items) => value(items.into_iter().filter_map(|item| item.as_str().map(str::to_owned)).collect::<Array>()),
        Value::String(text) => value(text),
        other => value(other.to_string()),
    };
    // The comment behind a value belongs to the line, not to the value.
    if let (Some(old), Some(new)) = (table.get(name).and_then(Item::as_value), item.as_value_mut()) {
        *new.decor_mut() = old.decor().clone();
    }
    // In place, so that the comment above the key stays.
    match table.get_mut(name) {
        Some(slot) => *slot = item,
        None => {
            table.insert(name, item);
        }
    }
}

fn sub_table<'a>(document: &'a mut DocumentMut, setting: &Key) -> Result<&'a mut dyn toml_edit::TableLike> {
    let item = document.as_table_mut().entry(setting.name).or_insert_with(|| Item::Table(Table::new()));
    item.as_table_like_mut().ok_or_else(|| Error::usage(format!("`{}` in the file is no table", setting.name)))
}

/// Reads, changes, checks and replaces the file in one step, so that a reader sees the old or the new one.
fn change(file: &Path, edit: impl FnOnce(&mut DocumentMut) -> Result<()>) -> Result<()> {
    let bytes = match crate::files::read(file, super::MAX_FILE) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Vec::new(),
        Err(error) => return Err(Error::io("read", file, &error)),
    };
    let text = String::from_utf8(bytes).map_err(|error| Error::usage(format!("`{}` is not UTF-8", file.display())).because(error))?;
    let name = file.display().to_string();
    // Says what is wrong, with its place, before anything is changed.
    super::toml_file::read(&name, &text, &mut Vec::new())?;
    let mut document: DocumentMut =
        text.parse().map_err(|error: toml_edit::TomlError| Error::usage(format!("`{name}` is not valid TOML")).because(error.message()))?;
    edit(&mut document)?;
    let new = document.to_string();
    super::toml_file::read(&name, &new, &mut Vec::new())?;
    let folder = file.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let write = || -> std::io::Result<()> {
        fs_err::create_dir_all(folder)?;
        let target = fs_err::canonicalize(file).unwrap_or_else(|_| file.to_path_buf());
        let folder = target.parent().unwrap_or(folder);
        let mut temporary = tempfile::NamedTempFile::new_in(folder)?;
        temporary.write_all(new.as_bytes())?;
        if let Ok(data) = target.metadata() {
            temporary.as_file().set_permissions(data.permissions())?;
        }
        temporary.persist(&target).map_err(|error| error.error)?;
        Ok(())
    };
    write().map_err(|error| Error::io("write", file, &error))
}
