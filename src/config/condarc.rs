use serde_json::{Map, Number, Value};

use super::{Entry, keys, unknown_key};
use crate::error::{Error, Result};
use crate::spec::source::Text;
use crate::spec::yaml::{self, Node, Scalar};

/// The entries of a .condarc file that are used here.
///
/// # Errors
/// `Kind::Usage` with the place: text that is no YAML, a top level that is no map, a value of a wrong type.
pub(super) fn read(name: &str, text: &str, notes: &mut Vec<String>) -> Result<Vec<Entry>> {
    let text = Text::decode(name, text.as_bytes(), None)?;
    let Some(root) = yaml::parse(&text)?.root else { return Ok(Vec::new()) };
    if root.is_null() {
        return Ok(Vec::new());
    }
    let yaml::Value::Mapping(pairs) = root.value else {
        return Err(Error::usage("a .condarc is a map of settings")
            .at(text.place(root.span, "this is no map"))
            .hint("write one `key: value` a line, for example `channels: [conda-forge]`"));
    };
    let mut entries: Vec<Entry> = Vec::new();
    for pair in pairs {
        let key = match keys::find(&pair.key) {
            Some(key) if key.condarc => key,
            _ => {
                unknown_key(name, &pair.key, notes);
                continue;
            }
        };
        if pair.value.is_null() {
            // An empty value means: not set.
            continue;
        }
        let place = text.place(pair.value.span.clone(), key.kind.expects());
        let mut value = key.kind.check(json(&pair.value)).map_err(|why| {
            Error::usage(format!("`{}`: {why}", pair.key)).at(place.clone()).hint(format!("`{}` is {}", key.name, key.about))
        })?;
        if key.name == "mirrors"
            && let Value::Object(items) = &mut value
        {
            items.retain(|_, urls| urls.as_array().is_none_or(|urls| !urls.is_empty()));
        }
        if let Some(earlier) = entries.iter().find(|earlier| earlier.key.name == key.name) {
            let mut error = Error::usage(format!("`{}` and another name of the same setting both stand here", pair.key)).at(place);
            if let Some(place) = &earlier.place {
                error = error.at(place.clone());
            }
            return Err(error.hint(format!("keep only `{}`", key.name)));
        }
        entries.push(Entry { key, value, place: Some(place) });
    }
    Ok(entries)
}

/// The node as JSON: booleans and whole numbers keep their type, all else is text as it is written (`1.10` stays `1.10`).
fn json(node: &Node) -> Value {
    match &node.value {
        yaml::Value::Sequence(items) => Value::Array(items.iter().map(json).collect()),
        yaml::Value::Mapping(entries) => {
            Value::Object(entries.iter().map(|entry| (entry.key.clone(), json(&entry.value))).collect::<Map<_, _>>())
        }
        yaml::Value::Scalar { text, .. } => match node.scalar_kind() {
            Some(Scalar::Null) => Value::Null,
            Some(Scalar::Bool) => Value::Bool(text.eq_ignore_ascii_case("true")),
            // `010`, `+1` and `1.10` stay as they are written.
            Some(Scalar::Number) => match text.parse::<u64>() {
                Ok(number) if text == "0" || !text.starts_with(['0', '+']) => Value::Number(Number::from(number)),
                _ => Value::String(text.clone()),
            },
            _ => Value::String(text.clone()),
        },
    }
}
