//! `tare info`

use serde_json::json;

use super::args::InfoArgs;
use super::context::{Context, gpu, places};
use crate::create::virtual_packages_json;
use crate::error::Result;
use crate::platform::{self, TargetOptions};
use crate::ui::table;

pub fn info(args: &InfoArgs, context: &Context<'_>) -> Result<u8> {
    let settings = &context.settings;
    let mut options = TargetOptions::from_settings(settings.env.clone(), settings);
    options.platform.clone_from(&args.target.platform);
    options.cuda.clone_from(&args.target.cuda);
    options.gpu = gpu(args.target.gpu);
    options.virtual_packages.clone_from(&args.target.virtual_packages);
    let target = platform::target(&options)?;
    let known = if args.envs || context.printer.is_json() { crate::prefix::list_known(&places(settings), false) } else { Vec::new() };
    let packages_dir = settings.cache_dir.value.as_ref().map(|cache| cache.join(rattler_cache::PACKAGE_CACHE_DIR));
    let mut pkgs_dirs: Vec<_> = packages_dir.into_iter().collect();
    pkgs_dirs.extend(settings.pkgs_dirs.value.iter().cloned());

    // Last checks of the environments shown; of the active one always.
    let active = places(settings).active;
    let shown = known.iter().map(|environment| environment.prefix.clone()).chain(active.filter(|_| known.is_empty()));
    let checks: Vec<(std::path::PathBuf, crate::check::Last)> =
        shown.filter_map(|path| Some((path.clone(), crate::check::last(&crate::prefix::Prefix::open(&path).ok()?)?))).collect();

    let channels: Vec<String> = settings.channels.value.iter().map(|channel| crate::channel::redact_text(channel)).collect();

    context.printer.json(&json!({
        "tare_version": env!("CARGO_PKG_VERSION"),
        // conda's key, which other tools ask for.
        "conda_version": env!("CARGO_PKG_VERSION"),
        "platform": target.subdir.as_str(),
        "platform_source": target.subdir_source,
        "virtual_packages": virtual_packages_json(&target),
        "virtual_pkgs": target.virtual_packages.iter().map(|package| json!([
            package.package.name.as_normalized(), package.package.version.to_string(), package.package.build_string.to_string()
        ])).collect::<Vec<_>>(),
        "gpu": target.gpu,
        "remarks": target.remarks,
        "channels": channels,
        "envs_dirs": settings.envs_dirs.value,
        "pkgs_dirs": pkgs_dirs,
        "cache_dir": settings.cache_dir.value,
        "config_files": settings.files,
        "offline": settings.offline.value,
        "envs": known.iter().map(|environment| &environment.prefix).collect::<Vec<_>>(),
        "last_checks": checks.iter().map(|(path, last)| json!({ "prefix": path, "check": last })).collect::<Vec<_>>(),
    }));

    let mut text = format!("tare {}\n\n", env!("CARGO_PKG_VERSION"));
    let mut rows = vec![vec!["platform".to_owned(), format!("{} ({})", target.subdir, target.subdir_source)]];
    rows.push(vec![
        "environments".into(),
        settings.envs_dirs.value.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(", "),
    ]);
    let cache =
        settings.cache_dir.value.as_ref().map_or_else(|| "none: there is no home folder".to_owned(), |cache| cache.display().to_string());
    rows.push(vec!["cache".into(), cache]);
    rows.push(vec!["channels".into(), channels.join(", ")]);
    let files: Vec<_> = settings.files.iter().map(|path| path.display().to_string()).collect();
    rows.push(vec!["configuration".into(), if files.is_empty() { "no file".into() } else { files.join(", ") }]);
    text.push_str(&table::columns(&rows, &[]));
    text.push_str("\nvirtual packages\n");
    let rows: Vec<Vec<String>> = target
        .virtual_packages
        .iter()
        .map(|package| {
            vec![
                format!("  {}", package.package),
                serde_json::to_value(package.provenance).ok().and_then(|value| value.as_str().map(str::to_owned)).unwrap_or_default(),
                package.source.clone(),
            ]
        })
        .collect();
    text.push_str(&table::columns(&rows, &[]));
    text.push_str("\nGPU driver\n");
    text.push_str(&target.gpu.text());
    for remark in &target.remarks {
        text.push_str(&format!("\nnote: {remark}\n"));
    }
    if args.envs {
        text.push_str("\nenvironments\n");
        text.push_str(&crate::prefix::environments_text(&known));
    }
    if !checks.is_empty() {
        text.push_str("\nlast checks\n");
        let rows: Vec<Vec<String>> = checks.iter().map(|(path, last)| vec![format!("  {}", path.display()), last.text()]).collect();
        text.push_str(&table::columns(&rows, &[]));
    }
    context.printer.data(&text);
    Ok(0)
}
