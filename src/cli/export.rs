//! `tare export`

use std::path::Path;

use serde_json::json;

use super::args::{ExportArgs, ExportShapeArgs, OutputArgs};
use super::context::Context;
use crate::error::{Error, Result};
use crate::export::{self, Exported, Format, Options, Subject};
use crate::prefix::{Hashes, Prefix};

pub fn export(args: &ExportArgs, context: &Context<'_>) -> Result<u8> {
    let asked = match &args.format {
        // `conda env export --json` is the JSON form of the file.
        None if context.printer.is_json() && args.output.output.is_none() => Some("environment-json"),
        asked => asked.as_deref(),
    };
    let format = format(asked, &args.output)?;
    let options = options(&args.shape, context)?;
    let exported = match &args.lock {
        Some(lock) => export::export_file(lock, format, &options, args.shape.platform.as_deref())?,
        None => {
            let prefix = Prefix::open_any(context.locate(&args.environment)?)?;
            export::export_prefix(&prefix, channels(context), format, &options)?
        }
    };
    write(&exported, format, &args.output, context)
}

/// The names of the configured channels.
pub fn channels(context: &Context<'_>) -> Vec<String> {
    context.settings.channels.value.iter().map(|channel| crate::channel::redact_text(channel)).collect()
}

/// The format asked for, else that of the output's name.
pub fn format(asked: Option<&str>, output: &OutputArgs) -> Result<Format> {
    if let Some(asked) = asked {
        return asked.parse();
    }
    let Some(path) = &output.output else { return Ok(Format::EnvironmentYaml) };
    Format::of_file(&path.to_string_lossy()).ok_or_else(|| {
        Error::usage(format!("the name `{}` does not tell which format is wanted", path.display())).hint("say which: --format FORMAT")
    })
}

pub fn options(shape: &ExportShapeArgs, context: &Context<'_>) -> Result<Options> {
    let source_date_epoch = match std::env::var("SOURCE_DATE_EPOCH") {
        Ok(text) if !text.is_empty() => {
            Some(text.trim().parse().map_err(|_| Error::usage(format!("SOURCE_DATE_EPOCH=`{text}` is no number of seconds")))?)
        }
        _ => None,
    };
    Ok(Options {
        no_builds: shape.no_builds,
        from_history: shape.from_history,
        requested: shape.requested,
        pin_versions: shape.pin_versions,
        direct_urls: shape.direct_urls,
        configured: channels(context),
        no_prefix: shape.no_prefix,
        hashes: match (shape.md5, shape.sha256) {
            (true, _) => Hashes::Md5,
            (_, true) => Hashes::Sha256,
            _ => Hashes::None,
        },
        tool_platform: context.tool_platform(),
        source_date_epoch,
        cyclonedx_1_5: shape.cyclonedx_version == "1.5",
    })
}

/// Writes an export to where it was asked for; remarks go to stderr.
pub fn write(exported: &Exported, format: Format, output: &OutputArgs, context: &Context<'_>) -> Result<u8> {
    let printer = context.printer;
    for note in &exported.notes {
        printer.warn(note, &[]);
    }
    match &output.output {
        Some(path) if path != Path::new("-") => {
            crate::files::write_whole(path, exported.text.as_bytes()).map_err(|error| Error::io("write", path, &error))?;
            printer.json(&json!({ "format": format.name(), "path": path }));
            printer.note(&format!("wrote `{}`: {}", path.display(), format.name()));
        }
        _ if printer.is_json() => match serde_json::from_str::<serde_json::Value>(&exported.text) {
            Ok(_) => printer.raw(&exported.text),
            Err(_) => printer.json(&json!({ "format": format.name(), "text": exported.text })),
        },
        _ => printer.raw(&exported.text),
    }
    Ok(0)
}

/// For commands that take an environment by its folder.
pub fn subject_of_folder(path: &Path, context: &Context<'_>) -> Result<Subject> {
    Subject::of_prefix(&Prefix::open_any(path)?, channels(context))
}
