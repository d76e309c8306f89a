//! The steps of a check.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::{Duration, Instant};

use pep508_rs::pep440_rs::{Version as PyVersion, VersionSpecifiers};
use rattler_conda_types::{MatchSpec, Matches, ParseStrictness, PrefixRecord};
use serde_json::{Value, json};

use super::archs::{self, FatBinaries};
use super::child::{Ended, Run};
use super::compat::{self, DeviceFit, DriverFit, capability_text, major_minor, numbers};
use super::loader::{self, Places, Resolution};
use super::report::{Class, Fact, MemoryPicture, Verdict};
use super::torch::{self, Build, Component, Torch};
use super::{Kind, Level, MemoryOutcome, Options, Subject, programs};
use crate::notebook::{self, DataDirs, KernelState};
use crate::prefix::Environment;
use crate::report::{Progress, Silent};
use crate::solve::preflight;
use crate::text::quoted;
use crate::verify::{self, Fault};

/// What a step came to.
#[derive(Debug, Clone)]
pub(super) struct Outcome {
    pub verdict: Verdict,
    pub reason: String,
    pub evidence: Vec<String>,
    pub remarks: Vec<String>,
    pub remedies: Vec<String>,
    pub details: Value,
}

impl Outcome {
    fn new(verdict: Verdict, reason: impl Into<String>) -> Self {
        Outcome { verdict, reason: reason.into(), evidence: Vec::new(), remarks: Vec::new(), remedies: Vec::new(), details: Value::Null }
    }
    pub(super) fn pass(reason: impl Into<String>) -> Self {
        Self::new(Verdict::Pass, reason)
    }
    pub(super) fn fail(reason: impl Into<String>) -> Self {
        Self::new(Verdict::Fail, reason)
    }
    pub(super) fn not_tested(reason: impl Into<String>) -> Self {
        Self::new(Verdict::NotTested, reason)
    }
    pub(super) fn seen(mut self, line: impl Into<String>) -> Self {
        self.evidence.push(line.into());
        self
    }
    pub(super) fn all_seen(mut self, lines: impl IntoIterator<Item = String>) -> Self {
        self.evidence.extend(lines);
        self
    }
    pub(super) fn remark(mut self, line: impl Into<String>) -> Self {
        self.remarks.push(line.into());
        self
    }
    pub(super) fn remedy(mut self, line: impl Into<String>) -> Self {
        self.remedies.push(line.into());
        self
    }
    pub(super) fn details(mut self, value: Value) -> Self {
        self.details = value;
        self
    }
}

type Work = fn(&mut State<'_>) -> Outcome;

/// What is left of the time for the whole check, else the limit of each program.
fn left(options: &Options<'_>) -> Duration {
    options.whole.map_or(options.limit, |(end, _)| end.saturating_duration_since(Instant::now()))
}

/// Id, title, class, whether `--require-gpu` needs it, the work.
pub(super) const ALL: &[(&str, &str, Class, bool, Work)] = &[
    ("files", "files are as installed", Class::Files, false, files),
    ("interpreter", "the interpreter starts clean", Class::Gpu, false, interpreter),
    ("torch", "which torch there is", Class::Gpu, true, which_torch),
    ("architectures", "torch has code for the GPU", Class::Gpu, true, architectures),
    ("versions", "CUDA libraries fit together", Class::Gpu, true, versions),
    ("driver", "the driver runs them", Class::Gpu, true, driver),
    ("libraries", "every library torch needs is there", Class::Gpu, false, libraries),
    ("cpu", "torch imports and computes on the CPU", Class::Gpu, false, programs::on_cpu),
    ("gpu", "torch computes on the GPU", Class::Gpu, true, programs::on_gpu),
    ("allocator", "torch's allocator does what tare's model says", Class::Gpu, true, programs::allocator),
    ("clean-slate", "memory goes back when tensors go", Class::Gpu, true, programs::clean_slate),
    ("memory", "the GPU's memory holds what is written", Class::Gpu, true, memory),
];

/// What is known so far.
pub(super) struct State<'a> {
    pub subject: &'a Subject,
    pub options: &'a Options<'a>,
    pub progress: &'a dyn Progress,
    records: Vec<PrefixRecord>,
    /// The variables of programs in the environment; a text if they cannot be worked out.
    pub env: Result<Environment, String>,
    /// What the interpreter said at its start.
    start: Option<Value>,
    /// Whether Python programs can be run at all.
    pub runs: bool,
    sites: Vec<PathBuf>,
    pub torch: Option<Torch>,
    components: Vec<Component>,
    resolution: Option<Resolution>,
    /// Whether the loader would not find what torch needs.
    pub libraries_fail: bool,
    /// Whether the CPU program ran through.
    pub cpu_ok: bool,
    /// Whether the GPU program ran through.
    pub gpu_ok: bool,
    /// For the page.
    pub picture: Option<MemoryPicture>,
}

/// At most so many lines of evidence of one kind; the rest is counted.
const MOST_LINES: usize = 12;

fn cut(mut lines: Vec<String>, what: &str) -> Vec<String> {
    let more = lines.len().saturating_sub(MOST_LINES);
    if more > 0 {
        lines.truncate(MOST_LINES);
        lines.push(format!("and {more} more {what}"));
    }
    lines
}

pub(super) fn plural(count: usize, one: &str) -> String {
    crate::resolve::count(count, one)
}

impl<'a> State<'a> {
    pub fn new(subject: &'a Subject, options: &'a Options<'a>, progress: &'a dyn Progress) -> Self {
        let records = subject.prefix.records_and_damage().map(|(records, _)| records).unwrap_or_default();
        let root = subject.prefix.path();
        State {
            subject,
            options,
            progress,
            records,
            env: subject.environment(&options.env, left(options), &options.cancel).map_err(|error| error.to_string()),
            start: None,
            runs: false,
            sites: crate::prefix::site_packages(root).into_iter().map(|site| root.join(site)).collect(),
            torch: None,
            components: Vec::new(),
            resolution: None,
            libraries_fail: false,
            cpu_ok: false,
            gpu_ok: false,
            picture: None,
        }
    }

    /// How long a program may run that is started now.
    pub fn time(&self) -> Duration {
        left(self.options)
    }

    /// Why nothing can be begun any more.
    pub fn no_time(&self) -> Option<String> {
        let (_, whole) = self.options.whole?;
        self.time().is_zero().then(|| format!("no time was left for it: the whole check had {} s (`--timeout`)", whole.as_secs()))
    }

    /// A program that did not end in `limit` had so little of the time for the whole check that this says nothing of it.
    pub fn cut_short(&self, run: &Run) -> Option<Outcome> {
        let (_, whole) = self.options.whole?;
        (run.ended == Ended::TimedOut && run.limit < whole / 2).then(|| {
            Outcome::not_tested(format!(
                "it was ended after {:.0} s: so much was left of the {} s for the whole check (`--timeout`)",
                run.limit.as_secs_f64(),
                whole.as_secs()
            ))
        })
    }

    /// The version of the interpreter, once it has started.
    fn python_version(&self) -> Option<&str> {
        self.start.as_ref()?.get("version")?.as_str()
    }

    /// The table of the environment.
    pub fn facts(&self) -> Vec<Fact> {
        let mut facts = Vec::new();
        let mut add = |name: &str, value: String| facts.push(Fact { name: name.to_owned(), value });
        add("made by", self.subject.kind.name().to_owned());
        if let Some(version) = self.python_version() {
            add("Python", version.to_owned());
        }
        if !self.records.is_empty() {
            add("conda packages", self.records.len().to_string());
        }
        if let Some(torch) = &self.torch {
            add("torch", torch.version.clone());
            add("built for", torch.build.text());
            if let Some((name, version, build)) = &torch.conda {
                add("conda package", format!("{name} {version} {build}"));
            }
        }
        for component in &self.components {
            add(&component.package, component.version.clone());
        }
        facts
    }

    /// A remedy that brings the files of packages back; of all, where none is named. Python packages are `NAME==VERSION`.
    pub fn again(&self, conda: &BTreeSet<String>, python: &BTreeSet<String>) -> String {
        let argument = self.subject.argument();
        let list = |names: &BTreeSet<String>| names.iter().map(|name| quoted(name)).collect::<Vec<_>>().join(" ");
        if !python.is_empty() && conda.is_empty() && python.len() <= 8 {
            let program = self.subject.program();
            return format!("install again: {program} -m pip install --force-reinstall --no-deps {}", list(python));
        }
        let named = !conda.is_empty() && python.is_empty() && conda.len() <= 8;
        match self.subject.kind {
            Kind::Tare if named => format!("link the files anew: tare install {argument} --force-reinstall {}", list(conda)),
            Kind::Tare => {
                format!("make it again from what it was made of: tare create {argument} --force -f FILE, or tare sync {argument} LOCK")
            }
            Kind::Conda if named => format!("install again with the tool that made it: {}", list(conda)),
            Kind::Conda => format!("see what is wrong: tare verify {argument}; then install it again with the tool that made it"),
            Kind::Venv | Kind::Interpreter => "make it anew, and install its packages again".to_owned(),
        }
    }

    /// The same for torch.
    pub fn torch_again(&self) -> String {
        let mut names = (BTreeSet::new(), BTreeSet::new());
        if let Some(torch) = &self.torch {
            match &torch.conda {
                Some((name, ..)) => drop(names.0.insert(name.clone())),
                None => drop(names.1.insert(torch.requirement())),
            }
        }
        self.again(&names.0, &names.1)
    }

    /// The step cannot be done without a torch that was built for CUDA.
    pub fn without_cuda_torch(&self) -> Option<Outcome> {
        match &self.torch {
            None => Some(Outcome::not_tested("there is no torch in the environment")),
            Some(torch) => match &torch.build {
                Build::Cuda(_) => None,
                Build::Cpu => Some(Outcome::not_tested("torch is a CPU build")),
                Build::Rocm(version) => Some(Outcome::not_tested(format!("torch is a build for ROCm {version}; only CUDA is tested"))),
            },
        }
    }

    /// The step cannot be done without a GPU.
    pub fn without_gpu(&self) -> Option<Outcome> {
        (!self.options.machine.has_gpu()).then(|| Outcome::not_tested(self.options.machine.why_none()))
    }
}

fn files(state: &mut State<'_>) -> Outcome {
    let contents = state.options.level != Level::Quick;
    // Files beside those of packages are looked for where an environment has packages, not in the system's folders.
    let extra = state.subject.kind != Kind::Interpreter;
    let none = BTreeSet::new();
    let options = verify::Options { extra, contents };
    let report = match state.options.whole {
        None => verify::verify(&state.subject.prefix, options, &Silent),
        Some((_, whole)) => {
            // Reading cannot be broken off; it ends with this process at the latest.
            let (sender, receiver) = std::sync::mpsc::channel();
            let prefix = state.subject.prefix.clone();
            std::thread::spawn(move || drop(sender.send(verify::verify(&prefix, options, &Silent))));
            match receiver.recv_timeout(state.time()) {
                Ok(report) => report,
                Err(_) => {
                    return Outcome::not_tested(format!(
                        "the files were not all read in the {} s for the whole check (`--timeout`)",
                        whole.as_secs()
                    ));
                }
            }
        }
    };
    let report = match report {
        Ok(report) => report,
        Err(error) => return Outcome::fail("what was installed cannot be read").seen(error.to_string()).remedy(state.again(&none, &none)),
    };
    let how = if contents { "content" } else { "presence and size" };
    if report.packages == 0 && report.python_packages == 0 {
        return Outcome::not_tested("nothing was installed that says what its files are");
    }
    let mild = |fault: Fault| matches!(fault, Fault::Extra | Fault::Foreign | Fault::Drift);
    let line = |finding: &verify::Finding| {
        let mut line = finding.fault.name().to_owned();
        if !finding.path.is_empty() {
            line.push_str(&format!(": {}", finding.path));
        }
        if let Some(package) = &finding.package {
            line.push_str(&format!(" (of {package})"));
        }
        if let Some(detail) = &finding.detail {
            line.push_str(&format!(": {detail}"));
        }
        line
    };
    let bad: Vec<&verify::Finding> = report.findings.iter().filter(|finding| !mild(finding.fault)).collect();
    let looked = format!(
        "{} of {} and {} compared by {how}",
        plural(report.files as usize, "file"),
        plural(report.packages, "conda package"),
        plural(report.python_packages, "Python package")
    );
    let mut outcome = if bad.is_empty() {
        Outcome::pass(looked)
    } else {
        let moved = bad.iter().any(|finding| finding.fault == Fault::Moved);
        let distributions = state.subject.prefix.pip_distributions();
        let reason = if moved {
            "the environment was moved: its files name another place".to_owned()
        } else {
            format!("{} not as installed", if bad.len() == 1 { "1 thing is".to_owned() } else { format!("{} things are", bad.len()) })
        };
        let mut outcome = Outcome::fail(reason).all_seen(cut(bad.iter().map(|finding| line(finding)).collect(), "faults")).seen(looked);
        if moved {
            outcome = outcome.remedy(match state.subject.kind {
                Kind::Tare => format!("repair it where it is now: tare relocate {}", state.subject.argument()),
                _ => "move it back, or make it anew at this place: scripts and some libraries name the place where they were installed"
                    .to_owned(),
            });
        }
        if bad.iter().any(|finding| finding.fault == Fault::UnmetDependency) {
            outcome = outcome.remedy("install what is missing, or the versions that are asked for");
        }
        let (mut conda, mut python) = (BTreeSet::new(), BTreeSet::new());
        let mut unnamed = false;
        for finding in bad.iter().filter(|finding| !matches!(finding.fault, Fault::Moved | Fault::UnmetDependency)) {
            let name = finding.package.as_deref().unwrap_or_default();
            if state.records.iter().any(|record| record.name().as_normalized() == name) {
                conda.insert(name.to_owned());
            } else if let Some(found) = distributions.iter().find(|distribution| distribution.name == name) {
                python.insert(format!("{}=={}", found.name, found.version));
            } else {
                unnamed = true;
            }
        }
        if unnamed {
            outcome = outcome.remedy(state.again(&none, &none));
        } else if !conda.is_empty() || !python.is_empty() {
            outcome = outcome.remedy(state.again(&conda, &python));
        }
        outcome
    };
    let mild: Vec<String> = report.findings.iter().filter(|finding| mild(finding.fault)).map(line).collect();
    if !mild.is_empty() {
        outcome.remarks.push(format!(
            "{} beside what was installed: tare verify {} lists them",
            plural(mild.len(), "file or package"),
            state.subject.argument()
        ));
    }
    if report.not_comparable > 0 {
        outcome.evidence.push(format!("{} without a size or hash to compare with", plural(report.not_comparable as usize, "file")));
    }
    outcome.details(json!({
        "contents": contents,
        "files": report.files,
        "bytes": report.bytes,
        "conda_packages": report.packages,
        "python_packages": report.python_packages,
        "not_comparable": report.not_comparable,
        "faults": bad.len(),
    }))
}

/// Variables that change what a program of the environment loads.
const VARIABLES: &[(&str, &str)] = &[
    ("PYTHONPATH", "Python finds modules of other places first"),
    ("PYTHONHOME", "Python looks for its standard library elsewhere"),
    ("LD_LIBRARY_PATH", "the loader may take libraries of other places"),
    ("LD_PRELOAD", "a library is loaded before all others"),
    ("CUDA_HOME", "what is compiled at run time uses that toolkit, not the environment's"),
    ("CUDA_PATH", "what is compiled at run time uses that toolkit, not the environment's"),
    ("PYTORCH_SKIP_CUDNN_COMPATIBILITY_CHECK", "torch does not compare cuDNN's version"),
];

fn interpreter(state: &mut State<'_>) -> Outcome {
    let Some(python) = state.subject.python.clone() else {
        return Outcome::not_tested("there is no Python in the environment");
    };
    let env = match &state.env {
        Ok(env) => env.clone(),
        Err(why) => {
            return Outcome::fail("the variables of the environment cannot be worked out")
                .seen(why.clone())
                .remedy("repair or remove the script or file that the message names");
        }
    };
    let set: Vec<(String, String, String)> = VARIABLES
        .iter()
        .filter_map(|(name, what)| {
            let value = env.get(OsStr::new(name)).filter(|value| !value.is_empty())?;
            Some(((*name).to_owned(), value.to_string_lossy().into_owned(), (*what).to_owned()))
        })
        .collect();
    let run = match programs::run(state, programs::START, &[], &env) {
        Ok(run) => run,
        Err(why) => return Outcome::not_tested(why),
    };
    if let Some(outcome) = state.cut_short(&run) {
        return outcome;
    }
    // What is no interpreter may print an object as well.
    let Some(start) =
        run.answer().filter(|start| start.get("version").and_then(Value::as_str).is_some_and(|version| major_minor(version).is_some()))
    else {
        let mut outcome = Outcome::fail(format!("the interpreter {}", run.ended_text()))
            .seen(format!("`{}`", python.display()))
            .all_seen(run.last_errors(6));
        let polluted: Vec<&str> = set.iter().map(|(name, ..)| name.as_str()).collect();
        if !polluted.is_empty() {
            let clean = programs::run(state, programs::START, &[], &without(&env, &polluted)).ok();
            outcome = if clean.is_some_and(|run| run.answer().is_some()) {
                outcome.seen(format!("it starts without {}", polluted.join(", "))).remedy(format!("unset {}", polluted.join(" ")))
            } else {
                outcome
            };
        }
        if python.canonicalize().is_err() {
            outcome = outcome
                .seen("its interpreter is a link to a file that is not there: the Python it was made from was removed or updated")
                .remedy("make the environment again with a Python that is there");
        } else if outcome.remedies.is_empty() {
            outcome = outcome.remedy(state.again(&BTreeSet::new(), &BTreeSet::new()));
        }
        return outcome;
    };
    state.runs = true;
    let text = |key: &str| start.get(key).and_then(Value::as_str).map(str::to_owned);
    let list = |key: &str| -> Vec<String> {
        start.get(key).and_then(Value::as_array).into_iter().flatten().filter_map(|value| value.as_str().map(str::to_owned)).collect()
    };
    let sites: Vec<PathBuf> = list("sites").into_iter().map(PathBuf::from).collect();
    if !sites.is_empty() {
        state.sites = sites;
    }
    let folders = state.subject.folders();
    let inside = |path: &str| {
        let real = Path::new(path).canonicalize().unwrap_or_else(|_| PathBuf::from(path));
        folders.iter().any(|folder| Path::new(path).starts_with(folder) || real.starts_with(folder))
    };
    let (mut faults, mut remedies, mut remarks) = (Vec::new(), Vec::new(), Vec::new());
    if let Some(prefix) = text("prefix").filter(|prefix| !inside(prefix)) {
        faults.push(format!("it takes `{prefix}` for its place, not `{}`", state.subject.prefix.path().display()));
        remedies.push(if set.iter().any(|(name, ..)| name == "PYTHONHOME") {
            "unset PYTHONHOME".to_owned()
        } else {
            state.again(&BTreeSet::new(), &BTreeSet::new())
        });
    }
    let torch_from = text("torch");
    if let Some(path) = torch_from.as_deref().filter(|path| !inside(path)) {
        let user = text("user_site").is_some_and(|user| path.starts_with(&user));
        faults.push(if user {
            format!("torch would come from the user's own packages: `{path}`")
        } else {
            format!("torch would come from another place: `{path}`")
        });
        remedies.push(if user {
            "export PYTHONNOUSERSITE=1, or remove it there: pip uninstall torch".to_owned()
        } else {
            "unset PYTHONPATH".to_owned()
        });
    }
    for (name, value, what) in &set {
        remarks.push(format!("{name} is set to `{value}`: {what}"));
    }
    if let Some(value) = env.get(OsStr::new("CUDA_VISIBLE_DEVICES")) {
        let value = value.to_string_lossy().into_owned();
        remarks.push(if value.is_empty() || value == "-1" {
            "CUDA_VISIBLE_DEVICES hides every GPU from programs".to_owned()
        } else {
            format!("CUDA_VISIBLE_DEVICES is set to `{value}`: programs see only those GPUs")
        });
    }
    if start.get("user_site_enabled") == Some(&json!(true)) && start.get("user_site_exists") == Some(&json!(true)) {
        remarks.push(format!(
            "packages of the user are visible in it: `{}` (PYTHONNOUSERSITE=1 turns that off)",
            text("user_site").unwrap_or_default()
        ));
    }
    for name in ["sitecustomize", "usercustomize"] {
        if let Some(path) = text(name) {
            remarks.push(format!("`{name}` runs at every start: `{path}`"));
        }
    }
    let (mut code, mut usual) = (Vec::new(), Vec::new());
    for file in start.get("pth").and_then(Value::as_array).into_iter().flatten() {
        let path = file.get("path").and_then(Value::as_str).unwrap_or_default();
        if file.get("code").and_then(Value::as_array).is_some_and(|lines| !lines.is_empty()) {
            let name = Path::new(path).file_name().map_or_else(|| path.to_owned(), |name| name.to_string_lossy().into_owned());
            if is_usual(&name) { usual.push(name) } else { code.push(name) }
        }
        for place in file.get("adds").and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_str) {
            if place.starts_with('/') && !inside(place) {
                remarks.push(format!("`{path}` adds a folder of another place: `{place}`"));
            }
        }
    }
    if !code.is_empty() {
        remarks.push(format!(
            "{} in site-packages run code at every start: {}",
            plural(code.len(), ".pth file"),
            cut(code, "files").join(", ")
        ));
    }
    remarks.extend(kernels(state));
    if start.get("torch_loaded") == Some(&json!(true)) {
        remarks.push("torch is imported at every start, before the program".to_owned());
    }
    let version = text("version").unwrap_or_default();
    let mut outcome = if faults.is_empty() {
        Outcome::pass(format!("Python {version} starts in {:.2} s", run.elapsed.as_secs_f64()))
    } else {
        Outcome::fail(faults[0].clone()).all_seen(faults[1..].to_vec())
    };
    outcome = outcome.seen(format!("`{}`: {} {version}", python.display(), text("implementation").unwrap_or_default()));
    if !usual.is_empty() {
        outcome = outcome.seen(format!("run code at every start, as usual: {}", cut(usual, "files").join(", ")));
    }
    outcome.remarks = remarks;
    outcome.remedies = remedies;
    state.start = Some(start.clone());
    outcome.details(start)
}

/// Jupyter kernels that tare made of the environment and that are not as they should be.
fn kernels(state: &State<'_>) -> Vec<String> {
    let text = |name: &str| state.options.env.get(OsStr::new(name)).map(|value| value.to_string_lossy().into_owned());
    let home = text("HOME").filter(|home| !home.is_empty()).map(PathBuf::from);
    let Ok(dirs) = DataDirs::new(home.as_deref(), text) else { return Vec::new() };
    let prefix = state.subject.prefix.path();
    let same = |other: &Path| other == prefix || matches!((other.canonicalize(), prefix.canonicalize()), (Ok(a), Ok(b)) if a == b);
    notebook::list(&dirs, Some(prefix))
        .into_iter()
        .filter(|kernel| same(&kernel.prefix))
        .filter_map(|kernel| {
            let again = format!("tare notebook install {} --name {}", state.subject.argument(), quoted(&kernel.name));
            let name = &kernel.name;
            match kernel.state {
                KernelState::NoPackage => {
                    Some(format!("its Jupyter kernel `{name}` has no `tare_notebook`, so notebooks have no `%tare`: {again}"))
                }
                KernelState::NoIpykernel => {
                    Some(format!("its Jupyter kernel `{name}` does not start, for want of ipykernel: {}", notebook::add_ipykernel(prefix)))
                }
                KernelState::ProgramGone => {
                    Some(format!("its Jupyter kernel `{name}` does not start: the `tare` that it names is gone: {again}"))
                }
                KernelState::Ready | KernelState::EnvironmentGone => None,
            }
        })
        .collect()
}

/// Files of setuptools, virtualenv and pip that most environments have.
fn is_usual(name: &str) -> bool {
    matches!(name, "distutils-precedence.pth" | "_virtualenv.pth") || name.starts_with("__editable__.") || name.ends_with("-nspkg.pth")
}

/// `env` without some variables.
pub(super) fn without(env: &Environment, names: &[&str]) -> Environment {
    env.iter().filter(|(name, _)| !names.iter().any(|other| *name == *other)).map(|(name, value)| (name.clone(), value.clone())).collect()
}

/// Signs in what the user asked for that a CUDA build was wanted: the first sign, in words.
fn wanted_cuda(state: &State<'_>) -> Option<String> {
    let prefix = &state.subject.prefix;
    let stamp = prefix.stamp().ok().flatten();
    let mut specs: Vec<String> = stamp.as_ref().map(|stamp| stamp.requested.clone()).unwrap_or_default();
    specs.extend(prefix.requested_specs().unwrap_or_default().into_values());
    for spec in specs {
        let lower = spec.to_lowercase();
        let name =
            lower.rsplit("::").next().unwrap_or_default().split([' ', '=', '<', '>', '[', '!', '~']).next().unwrap_or_default().to_owned();
        let framework = name.contains("torch") || name == "libtorch";
        if matches!(name.as_str(), "pytorch-gpu" | "pytorch-cuda") || (framework && (lower.contains("cuda") || lower.contains("cu1"))) {
            return Some(format!("`{spec}` was asked for"));
        }
    }
    let metadata = stamp.map(|stamp| stamp.metadata).unwrap_or_default();
    let text = |value: &Value| value.as_str().map(str::to_owned);
    if metadata.get("gpu_intent").and_then(text).as_deref() == Some("require") {
        return Some("it was made with `--gpu require`".to_owned());
    }
    if metadata.get("gpu").and_then(|gpu| gpu.get("variant")).and_then(text).as_deref() == Some("cuda") {
        return Some("what was solved for it was a CUDA build".to_owned());
    }
    None
}

fn which_torch(state: &mut State<'_>) -> Outcome {
    state.components = torch::components(&state.sites, &state.records);
    // What would be imported, else what lies in site-packages.
    let imported = state.start.as_ref().and_then(|start| start.get("torch")?.as_str()).map(PathBuf::from);
    // A folder without the package's file is what an uninstallation left: Python imports it as an empty package.
    let leftover = imported.as_deref().filter(|path| path.is_dir()).map(Path::to_owned);
    let folder = imported
        .as_deref()
        .filter(|path| !path.is_dir())
        .map(|path| path.parent().unwrap_or(path).to_owned())
        .or_else(|| torch::find(&state.sites));
    let Some(folder) = folder else {
        let mut outcome = Outcome::not_tested("there is no torch in the environment");
        if let Some(path) = leftover {
            outcome = outcome.remark(format!("`{}` is a folder without torch's files, left by an uninstallation", path.display()));
        }
        return outcome
            .seen(format!("looked in {}", state.sites.iter().map(|site| format!("`{}`", site.display())).collect::<Vec<_>>().join(", ")))
            .remedy(state.subject.add("pytorch", "torch"));
    };
    let read = torch::read(&folder, state.subject.prefix.path(), &state.records, state.python_version());
    // Remedies name it.
    state.torch = Some(read.clone());
    let wanted = wanted_cuda(state);
    let what = format!("torch {}: {}", read.version, read.build.text());
    let mut outcome = if !read.contradictions.is_empty() {
        let reason = match &read.version_file {
            Err(why) => format!("torch is not whole: {why}"),
            Ok(()) => format!("torch {} contradicts itself: files of two builds are mixed, or some are missing", read.version),
        };
        Outcome::fail(reason).all_seen(read.contradictions.clone()).remedy(state.torch_again())
    } else if read.build == Build::Cpu && state.options.require_gpu {
        Outcome::fail(format!("{what}, and a GPU build is required"))
    } else if read.build == Build::Cpu
        && let Some(sign) = &wanted
    {
        Outcome::pass(what.clone()).remark(format!("a CUDA build was wanted ({sign}), and a CPU build is there: GPU work will not run"))
    } else {
        Outcome::pass(what.clone())
    };
    if read.build == Build::Cpu {
        let argument = state.subject.argument();
        let hint = match state.subject.kind {
            Kind::Tare | Kind::Conda => {
                format!("for a GPU build: tare install {argument} --gpu require pytorch (from a machine without a GPU, add --cuda 12.6)")
            }
            _ => "for a GPU build: install torch from the index of a CUDA version, such as one that ends in `/whl/cu126`".to_owned(),
        };
        if let (Some(sign), Verdict::Fail) = (&wanted, outcome.verdict) {
            outcome = outcome.seen(format!("a CUDA build was wanted: {sign}"));
        }
        if outcome.verdict == Verdict::Fail || wanted.is_some() || state.options.machine.has_gpu() {
            if wanted.is_none() && outcome.verdict == Verdict::Pass {
                outcome = outcome.remark("this machine has a GPU, and this build does not use it");
            }
            outcome = outcome.remedy(hint);
        }
    }
    let copies = state.sites.iter().filter(|site| site.join("torch").is_dir()).count();
    if copies > 1 {
        outcome = outcome.remark(format!("there are {copies} copies of torch on its path; the first is used"));
    }
    outcome = outcome.seen(format!("`{}`", folder.display())).all_seen(read.evidence.clone());
    let details = json!({ "torch": read, "components": state.components, "wanted_cuda": wanted });
    outcome.details(details)
}

fn sm_list(list: &[u32]) -> String {
    if list.is_empty() { "none".to_owned() } else { list.iter().map(|sm| format!("sm_{sm}")).collect::<Vec<_>>().join(" ") }
}

fn architectures(state: &mut State<'_>) -> Outcome {
    if let Some(outcome) = state.without_cuda_torch() {
        return outcome;
    }
    let Some(torch) = &state.torch else { return Outcome::not_tested("there is no torch in the environment") };
    let mut evidence = Vec::new();
    let flags = torch.object("libtorch_python.so").map(archs::flags).and_then(|read| match read {
        Ok(flags) => flags,
        Err(why) => {
            evidence.push(format!("`libtorch_python.so` cannot be read: {why}"));
            None
        }
    });
    let binaries: Option<FatBinaries> = torch.cuda_library().and_then(|path| match archs::fat_binaries(path) {
        Ok(found) => found.filter(|found| found.containers > 0),
        Err(why) => {
            evidence.push(format!("the GPU code in `libtorch_cuda.so` cannot be read: {why}"));
            None
        }
    });
    let (code, ptx) = match (&binaries, &flags) {
        (Some(found), _) => {
            evidence.push(format!(
                "machine code in `libtorch_cuda.so` ({}): {}{}",
                plural(found.containers as usize, "fat binary").replace("binarys", "binaries"),
                sm_list(&found.whole()),
                match found.partial() {
                    partial if partial.is_empty() => String::new(),
                    partial => format!("; some kernels also for {}", sm_list(&partial)),
                }
            ));
            (found.whole(), found.whole_ptx())
        }
        (None, Some((code, ptx))) => (code.clone(), ptx.clone()),
        (None, None) => {
            return Outcome::not_tested("the files of torch do not tell which GPUs they are for").all_seen(evidence);
        }
    };
    if let Some((flags, compute)) = &flags {
        evidence.push(format!("compile flags in `libtorch_python.so`: {}", sm_list(flags)));
        if !compute.is_empty() {
            evidence.push(format!("PTX for {}", compute.iter().map(|sm| format!("compute_{sm}")).collect::<Vec<_>>().join(" ")));
        }
    }
    let mut remarks = Vec::new();
    if let (Some(found), Some((flags, _))) = (&binaries, &flags) {
        let whole: BTreeSet<u32> = found.whole().into_iter().collect();
        if whole != flags.iter().copied().collect() {
            remarks.push("the code in the library is not for the GPUs that torch says it was compiled for".to_owned());
        }
    }
    let details = json!({ "code": code, "ptx": ptx, "flags": flags, "fat_binaries": binaries });
    let finish = |outcome: Outcome| {
        let mut outcome = outcome.all_seen(evidence).details(details);
        outcome.remarks.extend(remarks);
        outcome
    };
    let machine = &state.options.machine;
    if !machine.has_gpu() {
        return finish(Outcome::not_tested(format!("{} to compare {} with", no_gpu(&machine.why_none()), sm_list(&code))));
    }
    let (mut fits, mut misfits, mut unknown, mut compiled) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for device in &machine.devices {
        let Some(capability) = device.compute_capability.as_deref().and_then(compat::capability) else {
            unknown.push(device.name.clone());
            continue;
        };
        let named = format!("{} ({})", device.name, capability_text(capability));
        match compat::device_fit(&code, &ptx, capability, torch.cuda()) {
            DeviceFit::Native(sm) => fits.push(format!("{named} runs sm_{sm}")),
            DeviceFit::Ptx(sm) => {
                compiled.push(format!("{named}: the driver compiles the PTX of compute_{sm} at first use, which takes minutes and needs a driver as new as the toolkit"));
                fits.push(format!("{named} runs the PTX of compute_{sm}"));
            }
            DeviceFit::None => misfits.push(format!("{named}: nothing in torch runs on it")),
        }
    }
    if !misfits.is_empty() {
        let newest = code.iter().copied().max().unwrap_or(0);
        let oldest = machine
            .devices
            .iter()
            .filter_map(|device| device.compute_capability.as_deref().and_then(compat::capability))
            .min()
            .unwrap_or(0);
        let remedy = if oldest > newest {
            "the GPU is newer than this torch: install a newer torch"
        } else {
            "this torch has no code for the GPU: install a build for an older CUDA version, or an older torch"
        };
        return finish(Outcome::fail(misfits.join("; ")).all_seen(fits).remedy(remedy));
    }
    if fits.is_empty() {
        return finish(Outcome::not_tested(format!("the compute capability of {} is not known", unknown.join(", "))));
    }
    let mut outcome = Outcome::pass(fits.join("; "));
    outcome.remarks.extend(compiled);
    if !unknown.is_empty() {
        outcome.remarks.push(format!("the compute capability of {} is not known", unknown.join(", ")));
    }
    finish(outcome)
}

fn no_gpu(why: &str) -> String {
    format!("{why}: nothing")
}

/// Libraries of the toolkit that a torch asks for, with the major version in their names: (`libcudnn.so`, 9).
fn needed_majors(resolution: &Resolution) -> Vec<(String, u64)> {
    let names = resolution.found.keys().chain(resolution.missing.iter().map(|missing| &missing.name));
    let mut out: Vec<(String, u64)> = names
        .filter(|name| loader::is_cuda(name))
        .filter_map(|name| {
            let (stem, version) = name.split_once(".so.")?;
            Some((format!("{stem}.so"), version.split('.').next()?.parse().ok()?))
        })
        .collect();
    out.sort();
    out.dedup();
    out
}

/// Versions of a library that the environment has, by the numbers in their names.
fn present_majors(folders: &[PathBuf], stem: &str) -> BTreeSet<u64> {
    let start = format!("{stem}.");
    folders
        .iter()
        .flat_map(|folder| std::fs::read_dir(folder).into_iter().flatten().flatten())
        .filter_map(|entry| entry.file_name().to_str()?.strip_prefix(&start)?.split('.').next()?.parse().ok())
        .collect()
}

/// Folders of an environment in which libraries of the toolkit lie.
fn library_folders(state: &State<'_>) -> Vec<PathBuf> {
    let mut folders = vec![state.subject.prefix.path().join("lib")];
    for site in &state.sites {
        folders.push(site.join("torch/lib"));
        folders.extend(std::fs::read_dir(site.join("nvidia")).into_iter().flatten().flatten().map(|entry| entry.path().join("lib")));
    }
    folders.retain(|folder| folder.is_dir());
    folders
}

fn resolved<'s>(state: &'s mut State<'_>) -> Option<&'s Resolution> {
    if state.resolution.is_none() {
        let torch = state.torch.as_ref()?;
        if torch.objects.is_empty() {
            return None;
        }
        let library_path = match &state.env {
            Ok(env) => env
                .get(OsStr::new("LD_LIBRARY_PATH"))
                .map(|value| std::env::split_paths(value).filter(|path| !path.as_os_str().is_empty()).collect()),
            Err(_) => None,
        };
        let mut inside = state.subject.folders();
        // Where torch itself comes from is the environment that matters, even if that is a fault of its own.
        inside.extend(torch.folder.parent().map(Path::to_owned));
        let places = Places {
            inside,
            sites: state.sites.clone(),
            program: state.subject.python.clone(),
            library_path: library_path.unwrap_or_default(),
            system: loader::system_folders(&state.options.root),
        };
        state.resolution = Some(loader::resolve(&torch.objects, &places));
    }
    state.resolution.as_ref()
}

/// "NCCL version 2.30.7+cuda13.2" among the strings of a library: the CUDA version at its end.
fn nccl_cuda(path: &Path) -> Option<(u64, u64)> {
    use std::io::{Read, Seek, SeekFrom};
    let mut file = crate::files::open(path).ok()?;
    for (offset, size) in crate::elf::sections_of(path, ".rodata").ok()? {
        let mut bytes = vec![0u8; usize::try_from(size.min(64 << 20)).ok()?];
        file.seek(SeekFrom::Start(offset)).and_then(|_| file.read_exact(&mut bytes)).ok()?;
        let found = bytes.split(|byte| *byte == 0 || *byte == b'\n').find_map(|text| {
            let text = std::str::from_utf8(text).ok()?;
            text.contains("NCCL version ").then(|| text.split_once("+cuda").and_then(|(_, version)| major_minor(version)))?
        });
        if found.is_some() {
            return found;
        }
    }
    None
}

fn versions(state: &mut State<'_>) -> Outcome {
    if let Some(outcome) = state.without_cuda_torch() {
        return outcome;
    }
    let folders = library_folders(state);
    let resolution = resolved(state).cloned();
    let Some(torch) = &state.torch else { return Outcome::not_tested("there is no torch in the environment") };
    let (mut faults, mut remedies, mut remarks, mut evidence) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    let mut compared = 0usize;
    let cuda = torch.cuda();

    // 1. What torch's files ask for by name, against the files there are.
    for (stem, major) in resolution.as_ref().map(needed_majors).unwrap_or_default() {
        let present = present_majors(&folders, &stem);
        if present.is_empty() {
            continue;
        }
        compared += 1;
        if present.contains(&major) {
            if matches!(stem.as_str(), "libcudart.so" | "libcudnn.so" | "libcublas.so" | "libnccl.so") {
                evidence.push(format!("torch asks for `{stem}.{major}`: it is there"));
            }
        } else {
            let list: Vec<String> = present.iter().map(|found| format!("`{stem}.{found}`")).collect();
            faults.push(format!("torch asks for `{stem}.{major}`, and the environment has {}", list.join(", ")));
        }
    }
    // 2. What torch's metadata asks for, against the packages there are.
    for (name, specifiers) in &torch.requires {
        let (Some((what, _)), Ok(wanted)) = (torch::component_of(name), VersionSpecifiers::from_str(specifiers)) else { continue };
        let Some(found) = state.components.iter().find(|component| component.package == *name) else {
            let other = state.components.iter().find(|component| component.what == what);
            match other {
                Some(other) => {
                    remarks.push(format!("torch names `{name}{specifiers}`; the environment has `{} {}`", other.package, other.version))
                }
                None => remarks.push(format!("torch names `{name}{specifiers}`, and no package of that name is there")),
            }
            continue;
        };
        let Ok(version) = PyVersion::from_str(&found.version) else { continue };
        compared += 1;
        if wanted.contains(&version) {
            evidence.push(format!("`{name} {version}` is what torch names"));
            continue;
        }
        let asked = wanted.iter().find_map(|specifier| (specifier.operator().to_string() == "==").then(|| specifier.version().to_string()));
        let (has, needs) = (numbers(&found.version), asked.as_deref().map(numbers).unwrap_or_default());
        let part = |list: &[u64], at: usize| list.get(at).copied().unwrap_or(0);
        let text = format!("`{name} {version}` is there, torch was built with `{specifiers}`");
        if !needs.is_empty() && part(&has, 0) != part(&needs, 0) {
            faults.push(format!("{text}: another major version"));
        } else if what == "cudnn" && part(&has, 1) < part(&needs, 1) {
            // torch/backends/cudnn: the major version must match and the minor version must not be older.
            faults.push(format!("{text}: older than what it was built with, which torch refuses"));
        } else {
            remarks.push(text);
        }
    }
    for depends in &torch.conda_depends {
        let Ok(spec) = MatchSpec::from_str(depends, ParseStrictness::Lenient) else { continue };
        let Some(name) = spec.name.as_exact().map(|name| name.as_normalized().to_owned()) else { continue };
        if torch::component_of(&name).is_none() {
            continue;
        }
        if let Some(record) = state.records.iter().find(|record| record.name().as_normalized() == name) {
            compared += 1;
            let package = &record.repodata_record.package_record;
            if spec.matches(package) {
                evidence.push(format!("`{name} {}` is what torch's package asks for", package.version));
            } else {
                faults.push(format!("`{name} {}` is there, torch's package asks for `{depends}`", package.version));
            }
        }
    }
    // 3. Packages that are for another major version of CUDA.
    if let Some((major, _)) = cuda {
        for component in &state.components {
            let Some(other) = component.for_cuda.filter(|other| *other != major) else { continue };
            let same = state.components.iter().any(|good| good.what == component.what && good.for_cuda == Some(major));
            if same {
                remarks.push(format!(
                    "`{} {}` is for CUDA {other} and lies beside the one for CUDA {major}",
                    component.package, component.version
                ));
            } else if matches!(component.what, "runtime" | "cublas" | "cudnn" | "nccl" | "cufft" | "nvrtc") {
                compared += 1;
                faults.push(format!("`{} {}` is for CUDA {other}, torch for CUDA {major}", component.package, component.version));
            }
        }
        for component in &state.components {
            let Some(found) = major_minor(&component.version).filter(|_| component.what == "runtime" && component.package != "cudatoolkit")
            else {
                continue;
            };
            compared += 1;
            evidence.push(format!(
                "runtime: `{} {}`, torch was built with CUDA {}.{}",
                component.package,
                component.version,
                major,
                cuda.map_or(0, |cuda| cuda.1)
            ));
            if found.0 != major {
                faults.push(format!("the runtime is CUDA {}.{}, torch was built with CUDA {major}", found.0, found.1));
            } else if Some(found) < cuda {
                remarks.push(format!(
                    "the runtime is CUDA {}.{}, older than what torch was built with; functions that came later are missing",
                    found.0, found.1
                ));
            }
        }
        if let Some(path) = resolution.as_ref().and_then(|resolution| resolution.found.get("libnccl.so.2"))
            && let Some(found) = nccl_cuda(path)
        {
            compared += 1;
            evidence.push(format!("NCCL in `{}` was built with CUDA {}.{}", path.display(), found.0, found.1));
            if found.0 != major {
                faults.push(format!("NCCL was built with CUDA {}.{}, torch with CUDA {major}", found.0, found.1));
            }
        }
    }
    let details = json!({ "components": state.components, "compared": compared });
    if !faults.is_empty() {
        remedies.push(match state.subject.kind {
            Kind::Tare | Kind::Conda => {
                format!("let the solver choose all of them together: tare update {} pytorch", state.subject.argument())
            }
            _ => format!(
                "install the versions that torch names: {} -m pip install --force-reinstall {}",
                state.subject.program(),
                quoted(&torch.requirement())
            ),
        });
        let mut outcome = Outcome::fail(faults[0].clone()).all_seen(faults[1..].to_vec()).all_seen(evidence).details(details);
        (outcome.remarks, outcome.remedies) = (remarks, remedies);
        return outcome;
    }
    let mut outcome = if compared == 0 {
        Outcome::not_tested("the environment does not tell the versions of its CUDA libraries")
    } else {
        Outcome::pass(format!(
            "{} agree with torch for CUDA {}",
            plural(compared, "version"),
            cuda.map_or_else(|| "?".into(), |(a, b)| format!("{a}.{b}"))
        ))
    };
    outcome = outcome.all_seen(evidence).details(details);
    outcome.remarks = remarks;
    outcome
}

fn driver(state: &mut State<'_>) -> Outcome {
    if let Some(outcome) = state.without_cuda_torch() {
        return outcome;
    }
    let machine = &state.options.machine;
    if let Some(outcome) = broken(machine) {
        return outcome;
    }
    let Some(limit) = machine.driver.cuda.as_deref().and_then(major_minor) else {
        return Outcome::not_tested(if machine.driver.version.is_some() {
            "the driver does not say which CUDA it supports".to_owned()
        } else {
            machine.why_none()
        });
    };
    let Some(toolkit) = state.torch.as_ref().and_then(Torch::cuda) else {
        return Outcome::not_tested("which CUDA torch was built for is not known");
    };
    // The runtime that is there counts where it is newer than what torch was built with.
    let runtime = state
        .components
        .iter()
        .filter(|component| component.what == "runtime")
        .filter_map(|component| major_minor(&component.version))
        .filter(|found| found.0 == toolkit.0)
        .max()
        .unwrap_or(toolkit)
        .max(toolkit);
    let named =
        format!("driver {} (CUDA up to {}.{})", machine.driver.version.as_deref().unwrap_or("of unknown version"), limit.0, limit.1);
    let evidence = vec![
        format!("{named}, says {}", machine.driver.source.as_deref().unwrap_or("nobody")),
        format!("torch was built for CUDA {}.{}; the runtime is {}.{}", toolkit.0, toolkit.1, runtime.0, runtime.1),
    ];
    let compat_package = state.components.iter().find(|component| component.what == "compat");
    let mut outcome = match compat::driver_fit(limit, runtime) {
        DriverFit::Full => Outcome::pass(format!("{named} runs CUDA {}.{}", runtime.0, runtime.1)),
        DriverFit::Minor => {
            Outcome::pass(format!("{named} runs CUDA {}.{} by minor-version compatibility", runtime.0, runtime.1)).remark(format!(
                "code that is compiled at run time (`torch.compile`, PTX) may need a newer driver{}",
                preflight::bundled(runtime)
                    .map(|driver| format!(": CUDA {}.{} came with {driver}", runtime.0, runtime.1))
                    .unwrap_or_default()
            ))
        }
        DriverFit::TooOld => {
            let oldest = preflight::floor(runtime.0);
            let mut outcome = Outcome::fail(format!("{named} is too old for CUDA {}", runtime.0));
            if let Some(oldest) = oldest {
                outcome = outcome
                    .seen(format!("CUDA {} needs driver {oldest} or newer", runtime.0))
                    .remedy(format!("update the driver to {oldest} or newer"));
            }
            if let Some(package) = compat_package {
                outcome =
                    outcome.remark(format!("`{} {}` is there: on data-centre GPUs it may lift this", package.package, package.version));
            }
            outcome.remedy(match state.subject.kind {
                Kind::Tare | Kind::Conda => {
                    format!(
                        "or take a torch for this driver: tare update {} --cuda {}.{} pytorch",
                        state.subject.argument(),
                        limit.0,
                        limit.1
                    )
                }
                _ => format!("or install a torch that was built for CUDA {}.{} or older", limit.0, limit.1),
            })
        }
    };
    // A driver by its number that is older than the oldest for this major version runs nothing, whatever its libraries say (a forward-compatibility package).
    if let (Some(version), Some(oldest)) = (&machine.driver.version, preflight::floor(runtime.0))
        && outcome.verdict == Verdict::Pass
        && numbers(version) < numbers(oldest)
    {
        outcome = outcome.remark(format!(
            "the kernel's driver {version} is older than {oldest}: CUDA {} runs here only by a forward-compatibility package",
            runtime.0
        ));
    }
    outcome.remarks.extend(machine.remarks.iter().cloned());
    outcome.all_seen(evidence).details(json!({
        "driver": machine.driver,
        "torch_cuda": format!("{}.{}", toolkit.0, toolkit.1),
        "runtime": format!("{}.{}", runtime.0, runtime.1),
    }))
}

/// The CUDA driver library is there and fails.
fn broken(machine: &super::Machine) -> Option<Outcome> {
    let problem = machine.broken.as_ref()?;
    Some(
        Outcome::fail(format!("the driver does not work: {problem}"))
            .remedy(machine.driver.hint.clone().unwrap_or_else(|| "see `tare gpu info`; reboot, or install the driver again".to_owned())),
    )
}

/// The Python package whose RECORD lists a library of that name.
fn owner_of(sites: &[PathBuf], name: &str) -> Option<String> {
    let end = format!("/{name},");
    for site in sites {
        for entry in std::fs::read_dir(site).into_iter().flatten().flatten() {
            let file = entry.file_name().to_string_lossy().into_owned();
            let Some(stem) = file.strip_suffix(".dist-info") else { continue };
            let record = crate::files::read_text(&entry.path().join("RECORD")).unwrap_or_default();
            if record.lines().any(|line| line.contains(&end)) {
                return Some(stem.replacen('-', " ", 1));
            }
        }
    }
    None
}

fn libraries(state: &mut State<'_>) -> Outcome {
    if state.torch.is_none() {
        return Outcome::not_tested("there is no torch in the environment");
    }
    let Some(found) = resolved(state).cloned() else {
        return Outcome::not_tested("torch has no shared objects here");
    };
    let root = state.subject.prefix.path();
    let short = |path: &Path| path.strip_prefix(root).unwrap_or(path).display().to_string();
    let (mut faults, mut remedies, mut remarks) = (Vec::new(), Vec::new(), Vec::new());
    for missing in &found.missing {
        let by = missing.needed_by.first().map(|path| short(path)).unwrap_or_default();
        let more = missing.needed_by.len().saturating_sub(1);
        let mut line = format!(
            "`{}` is nowhere: `{by}` needs it{}",
            missing.name,
            if more > 0 { format!(", and {more} more") } else { String::new() }
        );
        if let Some(owner) = owner_of(&state.sites, &missing.name) {
            line.push_str(&format!("; it belongs to `{owner}`, whose file is gone"));
            let (name, version) = owner.split_once(' ').unwrap_or((&owner, ""));
            remedies.push(format!(
                "install it again: {} -m pip install --force-reinstall --no-deps {}",
                state.subject.program(),
                quoted(&format!("{}=={version}", name.replace('_', "-")))
            ));
        } else if let Some(record) = state
            .records
            .iter()
            .find(|record| record.files.iter().any(|file| file.file_name().is_some_and(|file| file == missing.name.as_str())))
        {
            line.push_str(&format!("; it belongs to `{}`, whose file is gone", record.name().as_normalized()));
            remedies.push(format!(
                "install it again: tare install {} --force-reinstall {}",
                state.subject.argument(),
                record.name().as_normalized()
            ));
        }
        faults.push(line);
    }
    for old in &found.old {
        faults.push(format!(
            "`{}` is too old: `{}` needs {} of it{}",
            short(&old.path),
            short(&old.needed_by),
            old.versions.last().cloned().unwrap_or_default(),
            old.has.as_ref().map(|has| format!(", it has up to {has}")).unwrap_or_default()
        ));
        remedies.push(if old.name.starts_with("libc.so") {
            "this torch needs a newer Linux distribution: use an older torch, or a container".to_owned()
        } else {
            match state.subject.kind {
                Kind::Tare | Kind::Conda if old.name.starts_with("libstdc++") => {
                    format!("take a newer one into the environment: tare install {} libstdcxx-ng", state.subject.argument())
                }
                _ => format!(
                    "the file that is found first is too old: update what it belongs to, or take it out of LD_LIBRARY_PATH ({})",
                    old.path.display()
                ),
            }
        });
    }
    for (path, why) in &found.unreadable {
        faults.push(format!("`{}` cannot be read as a library: {why}", short(path)));
    }
    for shadow in &found.shadowed {
        faults.push(format!("`{}` would come from LD_LIBRARY_PATH (`{}`) instead of the environment", shadow.name, shadow.path.display()));
    }
    if !found.shadowed.is_empty() {
        remedies.push("unset LD_LIBRARY_PATH".to_owned());
    }
    let strict = matches!(state.subject.kind, Kind::Tare | Kind::Conda | Kind::Venv);
    for outside in &found.outside {
        let line = format!("`{}` comes from outside of the environment: `{}`", outside.name, outside.path.display());
        if strict && loader::is_cuda(&outside.name) { faults.push(line) } else { remarks.push(line) }
    }
    if strict && found.outside.iter().any(|outside| loader::is_cuda(&outside.name)) {
        remedies.push("an update of the system changes what torch runs on: install the CUDA libraries into the environment".to_owned());
    }
    let mut evidence = Vec::new();
    for (name, path) in &found.driver {
        evidence.push(match path {
            Some(path) => format!("`{name}` is the driver's: `{}`", path.display()),
            None => format!("`{name}` is the driver's, which this machine does not have; torch starts without it"),
        });
    }
    if !found.preloaded.is_empty() {
        evidence
            .push(format!("torch loads itself what its libraries do not find: {}", cut(found.preloaded.clone(), "libraries").join(", ")));
    }
    // A library that is the driver's is needed at the start by some builds.
    state.libraries_fail = !faults.is_empty();
    let looked = format!("{} of torch and what they need: {} names", plural(found.files, "file"), found.found.len());
    remedies.dedup();
    let details = json!(found);
    let mut outcome = if faults.is_empty() {
        Outcome::pass(format!("{} libraries, all found", found.found.len()))
    } else {
        if !faults.is_empty() && remedies.is_empty() {
            remedies.push(state.torch_again());
        }
        Outcome::fail(if faults.len() == 1 {
            faults[0].clone()
        } else {
            format!("{} libraries would not load, or not the right ones", faults.len())
        })
        .all_seen(if faults.len() == 1 { Vec::new() } else { cut(faults, "libraries") })
    };
    outcome = outcome.all_seen(evidence).seen(looked).details(details);
    outcome.remarks = cut(remarks, "libraries");
    outcome.remedies = remedies;
    outcome
}

fn memory(state: &mut State<'_>) -> Outcome {
    if let Some(outcome) = state.without_gpu() {
        return broken(&state.options.machine).unwrap_or(outcome);
    }
    let Some(test) = state.options.memory else {
        return Outcome::not_tested("the memory test was left out");
    };
    let MemoryOutcome { passed, reason, evidence, remarks, remedies, details, picture } =
        test.run(state.options.level, state.options.whole.map(|_| state.time()), &state.options.cancel, state.progress);
    state.picture = picture;
    Outcome {
        verdict: match passed {
            Some(true) => Verdict::Pass,
            Some(false) => Verdict::Fail,
            None => Verdict::NotTested,
        },
        reason,
        evidence,
        remarks,
        remedies,
        details,
    }
}
