//! `install --revision`: back to the packages of an earlier revision of the history.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use indexmap::IndexMap;
use rattler_conda_types::{MatchSpec, RepoDataRecord};

use super::find::{Finder, Named, not_found};
use super::{ChangePlan, Open, Options, Outcome, open, run};
use crate::channel::Session;
use crate::config::Settings;
use crate::create;
use crate::error::{Error, Result};
use crate::install;
use crate::prefix::{self, Revision};
use crate::pypi::fetch::WheelFetcher;
use crate::pypi::revisions::Book;
use crate::pypi::{ReadyWheel, WheelFile};
use crate::report::Progress;

/// The packages after revision `number`, as the history names them: what conda makes of it.
pub(super) fn state_at(revisions: &[Revision], number: usize) -> BTreeSet<String> {
    let mut state = BTreeSet::new();
    for revision in revisions.iter().take(number + 1) {
        for gone in &revision.removed {
            state.remove(gone);
        }
        state.extend(revision.added.iter().cloned());
    }
    state
}

/// Makes the packages of the environment those of revision `number`, each the very one if it can still be had: from the cache, or from where it came.
/// Nothing is solved. The change is a new revision; files of nobody and variables stay, as in every change.
///
/// # Errors
/// As for [`super::change`]; a revision that is not there; packages that are neither in the cache nor in their channels.
pub async fn revert(number: usize, options: &Options, settings: &Settings, progress: Arc<dyn Progress>) -> Result<Outcome> {
    let path = prefix::locate(&options.which, &create::places(settings))?;
    let mut open = open(&path, options, &*progress).await?;
    let revisions = open.prefix.history()?;
    let Some(last) = revisions.len().checked_sub(1) else {
        return Err(Error::failure(format!("the environment `{}` has no history", open.prefix.path().display()))
            .because("`conda-meta/history` is missing or empty: the tool that made it keeps none"));
    };
    if number > last {
        let range = if last == 0 { "the only one is 0".to_owned() } else { format!("there are 0 to {last}") };
        return Err(Error::usage(format!("there is no revision {number}")).because(range).hint("what each one did: tare list --revisions"));
    }
    let state = state_at(&revisions, number);
    let mut records: Vec<RepoDataRecord> = Vec::new();
    let mut missing: Vec<Named> = Vec::new();
    for text in &state {
        let named = Named::parse(text).ok_or_else(|| {
            Error::failure(format!("revision {number} cannot be understood")).because(format!("`{text}` names no package"))
        })?;
        let installed = open.known.iter().map(|known| &known.record.repodata_record).find(|record| {
            install::history_name(record) == *text
                || (named.is(record) && named.channel.as_deref().is_none_or(|name| same_channel(name, record)))
        });
        match installed {
            Some(record) => records.push(record.clone()),
            None => missing.push(named),
        }
    }
    let subdir = open.prefix.subdir().ok_or_else(|| Error::failure("the platform of the environment cannot be told"))?;
    let session = Session::open(settings, progress.clone())?;
    let book = Book::read(open.prefix.path(), &revisions)?;
    if !missing.is_empty() {
        let facts = open.stamp.as_ref().map_or(&serde_json::Value::Null, |stamp| &stamp.metadata);
        let channels: Vec<String> =
            facts["channels"].as_array().into_iter().flatten().filter_map(|name| Some(name.as_str()?.to_owned())).collect();
        let channels = if channels.is_empty() { settings.channels.value.clone() } else { channels };
        let finder = Finder { settings, session: &session, subdir, channels, cancel: options.cancel.clone(), may_fetch: !options.dry_run };
        let found = finder.find(&missing).await?;
        let lacking: Vec<_> = missing.iter().zip(&found).filter(|(_, found)| found.records.is_empty()).collect();
        if !lacking.is_empty() {
            let error = not_found(&format!("cannot go back to revision {number}"), &lacking);
            return Err(if session.offline { error.hint("the network is off: without --offline the channels are asked") } else { error });
        }
        for record in found.into_iter().filter_map(|found| found.records.into_iter().next()) {
            // As it was described when it was installed.
            let noted = state.iter().filter_map(|text| book.record(text)).find(|noted| is_same(noted, &record));
            records.push(noted.cloned().unwrap_or(record));
        }
    }
    check_names(&records, number)?;
    warn_about_needs(&records, &*progress);

    let records = crate::solve::topological(records);
    let mut plan = ChangePlan::new(&open, &records, &BTreeSet::new())?;
    let then = prefix::requested_after(&revisions[..=number]);
    let names: BTreeSet<&str> = records.iter().map(|record| record.package_record.name.as_normalized()).collect();
    let requested: IndexMap<String, String> = then.into_iter().filter(|(name, _)| names.contains(name.as_str())).collect();
    plan.update_specs = requested
        .iter()
        .filter(|(name, text)| open.requested.get(*name) != Some(*text))
        .filter_map(|(_, text)| crate::spec::parse_match_spec(text, None).ok())
        .collect();
    plan.remove_specs = open.requested.keys().filter(|name| !requested.contains_key(*name)).cloned().collect();
    plan.requested = requested;
    let then_request = book.request(number);
    plan.same_input = then_request.is_none_or(|request| super::requests::same(&request.metadata, open.stamp.as_ref()));
    let whole = python_half(&mut plan, &open, &book, number, &session, settings, options, progress.clone()).await?;
    plan.warn_about_pip(&*progress);
    if options.dry_run || plan.is_nothing(&open) {
        return Ok(Outcome { plan, changed: None });
    }
    let mut link = install::Plan::new(open.prefix.path(), subdir, plan.link.clone());
    link.link_mode = create::link_mode(options.link_mode, settings)?;
    link.compile = then_request.map_or(settings.compile.value, |request| request.compiled) && !options.no_compile;
    link.clobber = options.clobber;
    link.external_links = if options.allow_external_links { install::ExternalLinks::Warn } else { install::ExternalLinks::Deny };
    link.link_scripts = create::link_scripts(&options.allow_link_scripts)?;
    link.concurrency = settings.concurrency.value;
    link.requested = plan.requested_specs();
    link.command.clone_from(&options.command);
    link.cancel = options.cancel.clone();
    link.metadata = open.stamp.as_ref().map_or(serde_json::Value::Null, |stamp| stamp.metadata.clone());
    let mut same_input = false;
    if let Some(request) = then_request {
        link.metadata = request.metadata.clone();
        let specs: Vec<MatchSpec> = request.requested.iter().filter_map(|text| crate::spec::parse_match_spec(text, None).ok()).collect();
        if specs.len() >= link.requested.len() {
            link.requested = specs;
        }
        // Variables and what other tools installed do not go back.
        same_input = whole && request.state_sha256 == install::state_sha256(&open.prefix.variables()?);
    }
    if let Some(facts) = link.metadata.as_object_mut().filter(|_| !same_input) {
        super::forget_input(facts);
    }
    let changed = run(&plan, &mut open, link, &session, settings, progress).await?;
    Ok(Outcome { plan, changed: Some(changed) })
}

/// Whether two records are of one archive, as far as both tell. The hash that is noted is what the archive is checked against.
fn is_same(noted: &RepoDataRecord, found: &RepoDataRecord) -> bool {
    let (a, b) = (&noted.package_record, &found.package_record);
    let differs =
        (a.sha256.is_some() && b.sha256.is_some() && a.sha256 != b.sha256) || (a.md5.is_some() && b.md5.is_some() && a.md5 != b.md5);
    noted.identifier == found.identifier && noted.url == found.url && !differs
}

/// Takes the Python packages of the revision into the plan, each the very wheel; `false` if not all of them come. tare's own tooling and what another
/// tool installed stay.
#[allow(clippy::too_many_arguments)]
async fn python_half(
    plan: &mut ChangePlan,
    open: &Open,
    book: &Book,
    number: usize,
    session: &Session,
    settings: &Settings,
    options: &Options,
    progress: Arc<dyn Progress>,
) -> Result<bool> {
    let Some(noted) = book.at(number) else {
        progress.warn(
            &format!("nothing is recorded of the Python packages of revision {number}: those that are there stay"),
            &["it was made by another tool, or by a tare that did not record them".to_owned()],
        );
        return Ok(false);
    };
    let mut wanted = Vec::new();
    let mut lost = Vec::new();
    for noted in noted {
        match &noted.source {
            Some(source) => wanted.push(source.ready()),
            None => {
                let there = open.python.iter().any(|installed| installed.name == noted.name && installed.version == noted.version);
                if !there {
                    lost.push(format!("{} {}", noted.name, noted.version));
                }
            }
        }
    }
    if !lost.is_empty() {
        progress.warn(
            &format!("revision {number} had Python packages that another tool installed, and they do not come back: {}", lost.join(", ")),
            &["install them with that tool: tare run python -m pip install NAME==VERSION".to_owned()],
        );
    }
    let same = |ready: &ReadyWheel| open.python.iter().any(|installed| installed.is(ready));
    let fetcher = WheelFetcher {
        cache: &session.package_cache,
        client: session.client.clone(),
        check: install::CacheCheck::default(),
        concurrency: settings.concurrency.value,
        progress: progress.clone(),
        cancel: options.cancel.clone(),
    };
    for ready in wanted.iter().filter(|ready| !same(ready)) {
        // What was built here is nowhere else.
        if matches!(ready.wheel, WheelFile::Local { .. }) && !fetcher.present(ready).await? {
            return Err(Error::failure(format!("cannot go back to revision {number}"))
                .because(format!(
                    "the wheel of `{} {}` was built on this machine and is no longer in the cache",
                    ready.record.name, ready.record.version
                ))
                .hint("resolve it again: tare install -f environment.yml"));
        }
    }
    plan.take_python(open, &wanted, true);
    Ok(lost.is_empty())
}

/// Whether the record comes from the channel that a history names.
fn same_channel(name: &str, record: &RepoDataRecord) -> bool {
    let known = install::channel_name(record);
    let plain = |text: &str| text.trim_end_matches('/').trim_start_matches("https://conda.anaconda.org/").to_owned();
    // `defaults` stands for several.
    plain(&known) == plain(name) || (name == "defaults" && known.contains("pkgs/"))
}

fn check_names(records: &[RepoDataRecord], number: usize) -> Result<()> {
    let mut seen: BTreeMap<&str, &RepoDataRecord> = BTreeMap::new();
    for record in records {
        let name = record.package_record.name.as_normalized();
        if let Some(other) = seen.insert(name, record) {
            return Err(Error::failure(format!("revision {number} cannot be understood")).because(format!(
                "it has two versions of `{name}`: {} and {}",
                other.package_record.version, record.package_record.version
            )));
        }
    }
    Ok(())
}

/// A history that another tool kept badly names a set that does not hold together.
fn warn_about_needs(records: &[RepoDataRecord], progress: &dyn Progress) {
    for record in records {
        for text in &record.package_record.depends {
            let Ok(spec) = MatchSpec::from_str(text, rattler_conda_types::ParseStrictness::Lenient) else { continue };
            let Some(name) = spec.name.as_exact() else { continue };
            if name.as_normalized().starts_with("__") || spec.condition.is_some() {
                continue;
            }
            if !records.iter().any(|record| record.package_record.name == *name) {
                let needs = record.package_record.name.as_normalized();
                progress.warn(&format!("`{needs}` needs `{text}`, which that revision does not have"), &[]);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_state_is_the_sum_of_the_revisions_up_to_it() {
        let revision = |added: &[&str], removed: &[&str]| Revision {
            added: added.iter().map(ToString::to_string).collect(),
            removed: removed.iter().map(ToString::to_string).collect(),
            ..Revision::default()
        };
        let revisions = [revision(&["a-1-0", "b-1-0"], &[]), revision(&["a-2-0"], &["a-1-0"]), revision(&[], &["b-1-0"])];
        let names = |number: usize| state_at(&revisions, number).into_iter().collect::<Vec<_>>();
        assert_eq!(names(0), ["a-1-0", "b-1-0"]);
        assert_eq!(names(1), ["a-2-0", "b-1-0"]);
        assert_eq!(names(2), ["a-2-0"]);
    }
}
