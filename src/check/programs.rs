//! The steps that run programs in the environment.

use std::ffi::{OsStr, OsString};
use std::path::Path;

use serde_json::{Value, json};

use super::child::{self, Ended, Run};
use super::report::Verdict;
use super::steps::{Outcome, State, without};
use crate::gpu::trace::{self, report as replay};
use crate::prefix::Environment;

pub(super) const START: &str = include_str!("python/start.py");
const TENSORS: &str = include_str!("python/tensors.py");
const ALLOCATOR: &str = include_str!("python/allocator.py");
const SLATE: &str = include_str!("python/slate.py");

/// Variables whose absence is tried where a program failed.
const SUSPECTS: &[&str] = &["LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH", "PYTHONHOME"];

/// Runs a program in the environment, in an empty folder.
pub(super) fn run(state: &State<'_>, program: &str, arguments: &[&OsStr], env: &Environment) -> Result<Run, String> {
    let Some(python) = &state.subject.python else { return Err("there is no Python in the environment".into()) };
    let folder = tempfile::tempdir().map_err(|error| format!("there is no place for temporary files: {error}"))?;
    state.no_time().map_or(Ok(()), Err)?;
    Ok(child::run(python, program, arguments, env, folder.path(), state.time(), &state.options.cancel))
}

/// The variables for a program of torch; or why none can be run.
fn ready(state: &State<'_>) -> Result<Environment, Box<Outcome>> {
    if state.torch.is_none() {
        return Err(Outcome::not_tested("there is no torch in the environment").into());
    }
    if !state.runs {
        return Err(Outcome::not_tested("the interpreter does not start").into());
    }
    state.env.clone().map_err(|why| Outcome::not_tested(why).into())
}

fn text(answer: &Value, key: &str) -> Option<String> {
    answer.get(key).and_then(Value::as_str).map(str::to_owned)
}

/// The failure of a program of torch: what it said, how it ended, and whether it works without variables that are under suspicion.
fn failure(state: &State<'_>, run: &Run, program: &str, arguments: &[&OsStr], env: &Environment) -> Outcome {
    if let Some(outcome) = state.cut_short(run) {
        return outcome;
    }
    let answer = run.answer();
    let stage = answer.as_ref().and_then(|answer| text(answer, "stage")).or_else(|| run.stage.clone());
    let mut outcome = match answer.as_ref().and_then(|answer| text(answer, "error")) {
        Some(error) => {
            let kind = answer.as_ref().and_then(|answer| text(answer, "kind")).unwrap_or_default();
            let first = error.lines().next().unwrap_or_default().to_owned();
            let import = stage.as_deref() == Some("import");
            let mut outcome = Outcome::fail(if import {
                format!("torch does not import: {kind}: {first}")
            } else if kind == "AssertionError" {
                first
            } else {
                format!("{kind}{}: {first}", stage.map(|stage| format!(" during `{stage}`")).unwrap_or_default())
            });
            outcome = outcome.all_seen(error.lines().skip(1).map(str::to_owned));
            outcome.all_seen(answer.as_ref().and_then(|answer| text(answer, "cause")))
        }
        None => {
            let mut outcome = Outcome::fail(format!("the program {}", run.ended_text())).all_seen(run.last_errors(8));
            if run.ended == Ended::TimedOut {
                outcome = outcome.remedy("if the machine is only slow, give it more time: --timeout 600");
            }
            outcome
        }
    };
    if run.ended == Ended::Signal(9) {
        outcome = outcome.seen("the system ends programs this way when memory runs out");
    }
    let suspects: Vec<&str> =
        SUSPECTS.iter().copied().filter(|name| env.get(OsStr::new(name)).is_some_and(|value| !value.is_empty())).collect();
    if !suspects.is_empty()
        && run.ended != Ended::TimedOut
        && let Ok(again) = self::run(state, program, arguments, &without(env, &suspects))
        && again.answer().is_some_and(|answer| answer.get("ok") == Some(&json!(true)))
    {
        let names = suspects.join(", ");
        return outcome.seen(format!("it works without {names}")).remedy(format!("unset {}", suspects.join(" ")));
    }
    if outcome.remedies.is_empty() {
        outcome = outcome.remedy(if state.libraries_fail {
            "do what the step `libraries` says, and check again".to_owned()
        } else {
            state.torch_again()
        });
    }
    outcome
}

pub(super) fn on_cpu(state: &mut State<'_>) -> Outcome {
    let env = match ready(state) {
        Ok(env) => env,
        Err(outcome) => return *outcome,
    };
    let run = match run(state, TENSORS, &[OsStr::new("cpu")], &env) {
        Ok(run) => run,
        Err(why) => return Outcome::not_tested(why),
    };
    let answer = run.answer().filter(|answer| answer.get("ok") == Some(&json!(true)) && run.ended == Ended::Exited(0));
    let Some(answer) = answer else { return failure(state, &run, TENSORS, &[OsStr::new("cpu")], &env) };
    let version = text(&answer, "torch").filter(|version| !version.is_empty());
    let (Some(version), PROGRAMS) = (version, programs(&answer)) else { return not_ours(state, &answer) };
    state.cpu_ok = true;
    let mut outcome = Outcome::pass(format!(
        "torch {version} imports in {:.1} s; {PROGRAMS} programs with known results",
        answer.get("import_seconds").and_then(Value::as_f64).unwrap_or(0.0),
    ));
    if let Some(file) = text(&answer, "file") {
        outcome = outcome.seen(format!("imported from `{file}`"));
    }
    // What is imported and what was read from files must be one and the same.
    if let (Some(read), Some(version)) = (&state.torch, text(&answer, "torch"))
        && read.version != version
    {
        outcome = outcome.remark(format!("its files say {}, what is imported says {version}", read.version));
    }
    if let Some(line) = run.last_errors(1).pop() {
        outcome = outcome.remark(format!("it wrote to stderr: {line}"));
    }
    outcome.details(answer)
}

/// How many programs with known results there are.
const PROGRAMS: u64 = 6;

fn programs(answer: &Value) -> u64 {
    answer.get("programs").and_then(Value::as_u64).unwrap_or(0)
}

/// Something answered without having run the program to its end: an interpreter that is none, a torch that is none.
fn not_ours(state: &State<'_>, answer: &Value) -> Outcome {
    let python = state.subject.python.as_ref().map(|path| format!("`{}`", path.display())).unwrap_or_default();
    Outcome::fail(format!("the answer is not that of the program: {} of {PROGRAMS} programs with known results were run", programs(answer)))
        .seen(format!("{python} wrote: {}", answer.to_string().chars().take(300).collect::<String>()))
        .remedy(state.torch_again())
        .details(answer.clone())
}

/// Why no program on the GPU is run.
fn not_on_gpu(state: &State<'_>) -> Option<Outcome> {
    if let Some(outcome) = state.without_cuda_torch() {
        return Some(outcome);
    }
    if let Some(outcome) = state.without_gpu() {
        return Some(outcome);
    }
    (!state.cpu_ok).then(|| Outcome::not_tested("torch does not even run on the CPU"))
}

pub(super) fn on_gpu(state: &mut State<'_>) -> Outcome {
    if let Some(outcome) = not_on_gpu(state) {
        return outcome;
    }
    let env = match ready(state) {
        Ok(env) => env,
        Err(outcome) => return *outcome,
    };
    let arguments = [OsStr::new("cuda")];
    let run = match run(state, TENSORS, &arguments, &env) {
        Ok(run) => run,
        Err(why) => return Outcome::not_tested(why),
    };
    let answer = run.answer().filter(|answer| answer.get("ok") == Some(&json!(true)) && run.ended == Ended::Exited(0));
    let Some(answer) = answer else { return failure(state, &run, TENSORS, &arguments, &env) };
    if answer.get("available") != Some(&json!(true)) {
        let hidden = env.get(OsStr::new("CUDA_VISIBLE_DEVICES")).is_some_and(|value| value.is_empty() || value == "-1");
        if hidden {
            return Outcome::not_tested("CUDA_VISIBLE_DEVICES hides every GPU").remedy("unset CUDA_VISIBLE_DEVICES");
        }
        let why = text(&answer, "unavailable").unwrap_or_default();
        return Outcome::fail(format!("the driver shows a GPU, and torch does not see it: {why}"))
            .all_seen(run.last_errors(4))
            .remedy(
                "see the steps `architectures`, `driver` and `libraries`; in a container, check that it was started with access to GPUs",
            )
            .details(answer);
    }
    let devices: Vec<String> = answer
        .get("devices")
        .and_then(Value::as_array)
        .into_iter()
        .flatten()
        .map(|device| {
            format!(
                "cuda:{} {} ({})",
                device.get("index").and_then(Value::as_u64).unwrap_or(0),
                text(device, "name").unwrap_or_default(),
                text(device, "capability").unwrap_or_default()
            )
        })
        .collect();
    if devices.is_empty() {
        return Outcome::not_tested("torch shows no device").details(answer);
    }
    let listed = answer.get("devices").and_then(Value::as_array).into_iter().flatten();
    if let Some(short) = listed.clone().find(|device| programs(device) != PROGRAMS) {
        return not_ours(state, short);
    }
    state.gpu_ok = true;
    let mut outcome = Outcome::pass(format!("{PROGRAMS} programs with known results on each of: {}", devices.join(", ")));
    if let Some(version) = answer.get("cudnn").and_then(Value::as_u64) {
        outcome = outcome.seen(format!("cuDNN {version} loads"));
    }
    if devices.len() < state.options.machine.devices.len() {
        outcome = outcome.remark(format!("torch sees {} of {} GPUs", devices.len(), state.options.machine.devices.len()));
    }
    if let Some(line) = run.last_errors(1).pop() {
        outcome = outcome.remark(format!("it wrote to stderr: {line}"));
    }
    outcome.details(answer)
}

/// Runs one of the programs that need a GPU that works: its answer, or the outcome that it leads to.
fn on_working_gpu(state: &State<'_>, program: &str, arguments: &[&OsStr]) -> Result<Value, Box<Outcome>> {
    if let Some(outcome) = not_on_gpu(state) {
        return Err(outcome.into());
    }
    if !state.gpu_ok {
        return Err(Outcome::not_tested("torch does not run on the GPU").into());
    }
    let env = ready(state)?;
    let run = run(state, program, arguments, &env).map_err(|why| Box::new(Outcome::not_tested(why)))?;
    match run.answer() {
        Some(answer) if answer.get("ok") == Some(&json!(true)) && run.ended == Ended::Exited(0) => Ok(answer),
        Some(answer) if text(&answer, "kind").is_some_and(|kind| kind == "OutOfMemoryError") => {
            Err(Outcome::not_tested("the GPU has too little free memory for the program").all_seen(text(&answer, "error")).into())
        }
        // A torch that cannot record is no broken torch.
        Some(answer) if text(&answer, "kind").is_some_and(|kind| kind == "AttributeError") => {
            Err(Outcome::not_tested("this torch cannot do it").all_seen(text(&answer, "error")).into())
        }
        _ => Err(failure(state, &run, program, arguments, &env).into()),
    }
}

pub(super) fn allocator(state: &mut State<'_>) -> Outcome {
    let folder = match tempfile::tempdir() {
        Ok(folder) => folder,
        Err(error) => return Outcome::not_tested(format!("there is no place for temporary files: {error}")),
    };
    let file: OsString = folder.path().join("snapshot.pickle").into();
    let answer = match on_working_gpu(state, ALLOCATOR, &[&file]) {
        Ok(answer) => answer,
        Err(outcome) => return *outcome,
    };
    replayed(Path::new(&file), &answer)
}

/// Compares a recording with the model.
fn replayed(file: &Path, answer: &Value) -> Outcome {
    let report =
        trace::open(file, &trace::Limits::default()).and_then(|snapshot| replay::report(&snapshot, &replay::ReplayOptions::default()));
    let report = match report {
        Ok(report) => report,
        Err(error) => {
            return Outcome::fail("what torch recorded cannot be read")
                .seen(error.to_string())
                .remedy("report this, with the version of torch");
        }
    };
    let f = &report.fidelity;
    let seen = format!(
        "{} of {} addresses, {} of {} segments, {} driver calls more than recorded",
        f.addresses_exact,
        f.addresses,
        f.segment_allocs_exact + f.segment_maps_exact,
        f.segment_allocs + f.segment_maps,
        f.extra_driver_calls
    );
    let details = json!({ "fidelity": f, "policy": report.policy, "torch": answer.get("torch"), "conf": report.conf });
    let rules = format!("rules of torch {}: {}", report.policy.version, report.policy.because);
    let outcome = if f.addresses == 0 {
        Outcome::not_tested("torch recorded no allocations")
    } else if report.exact {
        Outcome::pass(format!("equal address for address: {seen}"))
    } else {
        let mut outcome = Outcome::fail(format!("not equal: {seen}"));
        if let Some(difference) = &f.first_difference {
            outcome = outcome.seen(format!("first difference at event {}: {}", difference.event, difference.what));
        }
        outcome.remedy("this torch's allocator has rules that tare does not know: `gpu whatif` and `gpu replay` are not to be relied upon for it; report the version")
    };
    outcome.seen(rules).details(details)
}

pub(super) fn clean_slate(state: &mut State<'_>) -> Outcome {
    // The package of the notebooks names what holds memory; it need not be installed.
    let package = tempfile::tempdir().ok().filter(|folder| crate::notebook::write_sources(folder.path()).is_ok());
    let arguments: Vec<&OsStr> = package.iter().map(|folder| folder.path().as_os_str()).collect();
    let answer = match on_working_gpu(state, SLATE, &arguments) {
        Ok(answer) => answer,
        Err(outcome) => return *outcome,
    };
    let at = |key: &str| -> Option<(u64, u64)> {
        let part = answer.get(key)?;
        Some((part.get("allocated")?.as_u64()?, part.get("reserved")?.as_u64()?))
    };
    let (Some(baseline), Some(busy), Some(after)) = (at("baseline"), at("busy"), at("after")) else {
        return Outcome::not_tested("the program did not measure").details(answer);
    };
    let human = crate::gpu::human;
    let line =
        |what: &str, (allocated, reserved): (u64, u64)| format!("{what}: {} allocated, {} reserved", human(allocated), human(reserved));
    let mut outcome = if busy.0 <= baseline.0 {
        Outcome::not_tested("the program took no memory")
    } else if after == baseline {
        Outcome::pass("allocated and reserved are back where they were")
    } else {
        let more = |now: u64, then: u64| if now >= then { human(now - then) } else { format!("-{}", human(then - now)) };
        Outcome::fail(format!(
            "{} allocated and {} reserved stay beyond the baseline",
            more(after.0, baseline.0),
            more(after.1, baseline.1)
        ))
        .remedy("something keeps tensors or their memory after `del`, `gc.collect()` and `empty_cache()`: a hook, a debugger or a patched torch; look into it with `tare gpu summary` on a snapshot")
    };
    outcome = outcome
        .seen(line("baseline after a first matrix product", baseline))
        .seen(line("with tensors", busy))
        .seen(line("after their release", after));
    for holder in answer.get("holders").and_then(Value::as_array).into_iter().flatten().take(8) {
        let nbytes = holder.get("bytes").and_then(Value::as_u64).unwrap_or(0);
        let (kind, place) = (text(holder, "kind").unwrap_or_default(), text(holder, "where").unwrap_or_default());
        let line = text(holder, "release").map(|line| format!("; to let go: {line}")).unwrap_or_default();
        outcome = outcome.seen(format!("{} held by {kind}: {place}{line}", human(nbytes)));
    }
    match at("without_workspaces") {
        Some(rest) if baseline.0 > 0 => {
            outcome = outcome.seen(format!(
                "of the baseline, {} are workspaces of the libraries; {}",
                human(baseline.0.saturating_sub(rest.0)),
                line("without them", rest)
            ));
            if rest.0 > 0 && outcome.verdict == Verdict::Pass {
                outcome = outcome.remark(format!("{} stay allocated even without workspaces", human(rest.0)));
            }
        }
        None if baseline.0 > 0 => outcome = outcome.seen("the baseline is workspaces of the libraries; this torch cannot give them back"),
        _ => {}
    }
    outcome.details(answer)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_programs_print_one_line_of_json_and_are_ascii() {
        for (name, program) in [("start", START), ("tensors", TENSORS), ("allocator", ALLOCATOR), ("slate", SLATE)] {
            assert!(program.is_ascii(), "{name}");
            assert_eq!(program.matches("print(").count(), 1, "{name}");
            assert!(program.contains("print(json.dumps(result))"), "{name}");
        }
    }
}
