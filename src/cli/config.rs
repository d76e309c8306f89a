//! `tare config`

use serde_json::{Value, json};

use super::args::ConfigCommand;
use super::context::Context;
use crate::config::edit;
use crate::error::{Error, Result};
use crate::ui::table;

pub fn config(command: Option<ConfigCommand>, context: &Context<'_>) -> Result<u8> {
    let settings = &context.settings;
    let printer = context.printer;
    match command.unwrap_or(ConfigCommand::List { key: None }) {
        ConfigCommand::List { key } => {
            let all = settings.describe();
            if let Some(key) = &key
                && !all.iter().any(|(known, _, _)| known == key)
            {
                return Err(Error::usage(format!("there is no setting `{key}`")).hint("`tare config list` shows all of them"));
            }
            let chosen: Vec<_> = all.into_iter().filter(|(known, _, _)| key.as_ref().is_none_or(|key| key == known)).collect();
            let mut document = serde_json::Map::new();
            for (key, value, source) in &chosen {
                document.insert(key.to_string(), json!({ "value": value, "source": source }));
            }
            // The plain lists that other tools look for.
            printer.json(&json!({ "settings": document, "files": settings.files }));
            let rows: Vec<Vec<String>> =
                chosen.iter().map(|(key, value, source)| vec![key.to_string(), shown(value), format!("[{source}]")]).collect();
            printer.data(&table::columns(&rows, &[]));
        }
        ConfigCommand::Set { key, value } => {
            edit::set(settings.config_file()?, &key, &value)?;
            changed(printer, settings.config_file()?);
        }
        ConfigCommand::Append { key, value } => {
            edit::append(settings.config_file()?, &key, &value)?;
            changed(printer, settings.config_file()?);
        }
        ConfigCommand::Unset { key } => {
            edit::unset(settings.config_file()?, &key)?;
            changed(printer, settings.config_file()?);
        }
        ConfigCommand::Path => {
            let file = settings.config_file()?;
            printer.json(&json!({ "path": file }));
            printer.data(&file.display().to_string());
        }
    }
    Ok(0)
}

fn changed(printer: &crate::ui::Printer, path: &std::path::Path) {
    printer.note(&format!("wrote `{}`", path.display()));
    printer.json(&json!({ "path": path }));
}

fn shown(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Array(items) => items.iter().map(shown).collect::<Vec<_>>().join(", "),
        Value::Null => "-".into(),
        other => other.to_string(),
    }
}
