use std::sync::Arc;

use serde_json::{Map, Number, Value};
use toml_edit::{Document, Item, Value as TomlValue};

use super::{Entry, keys, unknown_key};
use crate::error::{Error, Place, Result};

/// The entries of a config.toml.
///
/// # Errors
/// `Kind::Usage` with the place: text that is no TOML, a value of a wrong type.
pub(super) fn read(name: &str, text: &str, notes: &mut Vec<String>) -> Result<Vec<Entry>> {
    let shown: Arc<str> = crate::spec::source::mask_secrets(text).into();
    let shown = if shown.len() == text.len() { shown } else { Arc::from(text) };
    let file: Arc<str> = name.into();
    let place = |span: Option<std::ops::Range<usize>>, label: String| {
        let span = span.unwrap_or(0..0);
        Place {
            name: file.clone(),
            text: shown.clone(),
            offset: span.start.min(text.len()),
            len: span.end.saturating_sub(span.start),
            label,
        }
    };
    let document = Document::parse(text).map_err(|error| {
        Error::usage("this is not valid TOML").because(error.message().trim()).at(place(error.span(), "here".to_owned()))
    })?;
    let mut entries: Vec<Entry> = Vec::new();
    for (word, item) in document.as_table().iter() {
        let Some(key) = keys::find(word) else {
            unknown_key(name, word, notes);
            continue;
        };
        let place = place(item.span().or_else(|| document.as_table().key(word).and_then(|key| key.span())), key.kind.expects());
        let value = key
            .kind
            .check(json(item))
            .map_err(|why| Error::usage(format!("`{word}`: {why}")).at(place.clone()).hint(format!("`{}` is {}", key.name, key.about)))?;
        if let Some(earlier) = entries.iter().find(|earlier| earlier.key.name == key.name) {
            let mut error = Error::usage(format!("`{word}` and another name of the same setting both stand here")).at(place);
            if let Some(place) = &earlier.place {
                error = error.at(place.clone());
            }
            return Err(error.hint(format!("keep only `{}`", key.name)));
        }
        entries.push(Entry { key, value, place: Some(place) });
    }
    Ok(entries)
}

/// TOML as JSON; dates become text.
pub(super) fn json(item: &Item) -> Value {
    match item {
        Item::None => Value::Null,
        Item::Value(value) => json_value(value),
        Item::Table(table) => Value::Object(table.iter().map(|(name, item)| (name.to_owned(), json(item))).collect::<Map<_, _>>()),
        Item::ArrayOfTables(tables) => Value::Array(
            tables.iter().map(|table| Value::Object(table.iter().map(|(name, item)| (name.to_owned(), json(item))).collect())).collect(),
        ),
    }
}

fn json_value(value: &TomlValue) -> Value {
    match value {
        TomlValue::String(text) => Value::String(text.value().clone()),
        TomlValue::Integer(number) => Value::Number(Number::from(*number.value())),
        TomlValue::Float(number) => Number::from_f64(*number.value()).map_or(Value::Null, Value::Number),
        TomlValue::Boolean(value) => Value::Bool(*value.value()),
        TomlValue::Datetime(value) => Value::String(value.value().to_string()),
        TomlValue::Array(items) => Value::Array(items.iter().map(json_value).collect()),
        TomlValue::InlineTable(table) => {
            Value::Object(table.iter().map(|(name, value)| (name.to_owned(), json_value(value))).collect::<Map<_, _>>())
        }
    }
}
