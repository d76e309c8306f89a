//! `tare gpu`

use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use clap::{Args, Subcommand, ValueHint};
use serde_json::json;

use crate::child::{self, Limits};
use crate::error::{Error, Result};
use crate::gpu::alloc::TorchVersion;
use crate::gpu::info::{self as gpu_info, NvmlView};
use crate::gpu::memtest::{self, Level, apart};
use crate::gpu::simulate;
use crate::gpu::summary::{self, html};
use crate::gpu::top as gpu_top;
use crate::gpu::trace::{self, Snapshot, report, whatif};
use crate::install::{Cancel, CancelOnDrop};
use crate::ui::{Printer, live, table};

/// The GPUs of this machine, and GPU memory explained and predicted
#[derive(Debug, Subcommand)]
pub enum GpuCommand {
    /// Show the GPUs, the driver by each of its layers, error counters and processes
    Info,
    Top(TopArgs),
    Selftest(SelftestArgs),
    Replay(ReplayArgs),
    Whatif(WhatifArgs),
    Summary(SummaryArgs),
    Simulate(SimulateArgs),
}

/// Watch the memory of every GPU and of the processes on it; `q` ends it
#[derive(Debug, Args)]
pub struct TopArgs {
    /// Print once and end, as it is where the output is no terminal
    #[arg(long)]
    pub once: bool,
    /// Seconds between two looks
    #[arg(long, value_name = "SECONDS", default_value_t = 1.0, value_parser = seconds)]
    pub interval: f64,
}

fn seconds(text: &str) -> Result<f64, String> {
    text.parse().ok().filter(|seconds| (0.1..=3600.0).contains(seconds)).ok_or_else(|| "give a number from 0.1 to 3600".to_owned())
}

/// Test the memory of GPUs, the driver's path to it and tare's allocator: PASS, FAIL or NOT TESTED
///
/// Ends with 0 for PASS, 6 for FAIL. NOT TESTED (no GPU, a busy one, memory that cannot be had) ends with 0, or with 8 under
/// `--require-gpu`.
///
/// Examples:
///   tare gpu selftest --level quick
///   tare gpu selftest --device cuda:1 --level thorough --budget 30m
///   tare gpu selftest --device sim:8GiB,stuck=0x12345678:3
#[derive(Debug, Args)]
#[command(verbatim_doc_comment)]
pub struct SelftestArgs {
    /// cuda:N, all, or a simulated card with faults, such as sim:8GiB,flip=1GiB:3; can be repeated [default: all]
    #[arg(long = "device", value_name = "DEVICE")]
    pub devices: Vec<String>,
    /// quick: seconds; standard: a minute or so; thorough: until the budget is spent
    #[arg(long, value_name = "LEVEL", default_value = "standard")]
    pub level: LevelArg,
    /// Begin no further pass after this time, such as 30s, 10m or 2h [default: 10m for thorough, else none]
    #[arg(long, value_name = "TIME", value_parser = time)]
    pub budget: Option<Duration>,
    /// How long one call of the driver may take before it counts as hanging: FAIL [default: 60s]
    #[arg(long, value_name = "TIME", value_parser = time)]
    pub call_limit: Option<Duration>,
    /// Leave this much memory free, such as 2GiB [default: a small part of the card]
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub reserve: Option<u64>,
    /// Test a card that other processes compute on, as far as its memory is free
    #[arg(long)]
    pub even_if_busy: bool,
    /// Only through native segments [default: all patterns through these, a short test through expandable ones]
    #[arg(long, conflicts_with = "expandable")]
    pub native: bool,
    /// Only through expandable segments
    #[arg(long)]
    pub expandable: bool,
    /// Also leave zeros and ones alone for this time, each, and look again
    #[arg(long, value_name = "TIME", value_parser = time)]
    pub fade: Option<Duration>,
    /// Seed of the random patterns [default: always the same]
    #[arg(long, value_name = "NUMBER")]
    pub seed: Option<u64>,
    /// End with 8 where anything that should have been tested was not
    #[arg(long)]
    pub require_gpu: bool,
}

/// How much the self-test does.
#[derive(Debug, Clone, Copy, clap::ValueEnum)]
pub enum LevelArg {
    Quick,
    Standard,
    Thorough,
}

impl From<LevelArg> for Level {
    fn from(level: LevelArg) -> Self {
        match level {
            LevelArg::Quick => Level::Quick,
            LevelArg::Standard => Level::Standard,
            LevelArg::Thorough => Level::Thorough,
        }
    }
}

fn time(text: &str) -> Result<Duration, String> {
    let split = text.find(|c: char| !(c.is_ascii_digit() || c == '.')).unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    let scale = match unit.trim() {
        "" | "s" => 1.0,
        "m" | "min" => 60.0,
        "h" => 3600.0,
        _ => return Err("give a time such as 30s, 10m or 2h".to_owned()),
    };
    let seconds = number.parse::<f64>().ok().map(|number| number * scale).filter(|seconds| (0.0..=30.0 * 86400.0).contains(seconds));
    seconds.map(Duration::from_secs_f64).ok_or_else(|| "give a time such as 30s, 10m or 2h, at most 30 days".to_owned())
}

fn size(text: &str) -> Result<u64, String> {
    simulate::scenario::parse_size(text).ok_or_else(|| "give a size such as 2GiB or 500MiB".to_owned())
}

/// Which recording, and how it is read.
#[derive(Debug, Args)]
pub struct SnapshotArgs {
    /// File written by `torch.cuda.memory._dump_snapshot`, or the same as JSON
    #[arg(value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub file: PathBuf,
    /// Device to look at [default: the one with most events]
    #[arg(long, value_name = "ORDINAL")]
    pub device: Option<u32>,
    /// Rules of this torch version [default: those that reproduce the recording best]
    #[arg(long, value_name = "VERSION")]
    pub torch: Option<String>,
}

/// Replay a recorded snapshot through the allocator: how exact is the model, and who held the memory
#[derive(Debug, Args)]
pub struct ReplayArgs {
    #[command(flatten)]
    pub snapshot: SnapshotArgs,
    /// Show this many holders and segments
    #[arg(long, value_name = "COUNT", default_value_t = 10)]
    pub top: usize,
}

/// Predict what other settings or another card would have done with a recorded run
///
/// Examples:
///   tare gpu whatif run.pickle --conf expandable_segments:True --conf max_split_size_mb:128
///   tare gpu whatif run.pickle --capacity 24GiB --sweep
#[derive(Debug, Args)]
#[command(verbatim_doc_comment)]
pub struct WhatifArgs {
    #[command(flatten)]
    pub snapshot: SnapshotArgs,
    /// Settings as for PYTORCH_CUDA_ALLOC_CONF; can be repeated
    #[arg(long = "conf", value_name = "SETTINGS")]
    pub confs: Vec<String>,
    /// Memory of the card that the process can use, such as 24GiB
    #[arg(long, value_name = "SIZE")]
    pub capacity: Option<String>,
    /// Search the settings and recommend one line
    #[arg(long)]
    pub sweep: bool,
    /// The answer is for WSL2
    #[arg(long)]
    pub wsl2: bool,
}

/// Say what holds the memory of a snapshot, and why the rest is not free
#[derive(Debug, Args)]
pub struct SummaryArgs {
    /// File written by `torch.cuda.memory._dump_snapshot`, or the same as JSON
    #[arg(value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub file: PathBuf,
    /// Only this device
    #[arg(long, value_name = "ORDINAL")]
    pub device: Option<u32>,
    /// Show this many holders and segments
    #[arg(long, value_name = "COUNT", default_value_t = 10)]
    pub top: usize,
    /// Write a page for a browser: memory over time, segments at any moment, holders; it needs no network
    #[arg(long, value_name = "OUT", value_hint = ValueHint::FilePath)]
    pub html: Option<PathBuf>,
    /// With `--html`: compare these settings on the page; can be repeated
    #[arg(long = "conf", value_name = "SETTINGS", requires = "html")]
    pub confs: Vec<String>,
}

/// Run a scripted scenario on a simulated GPU, as written and with other settings
#[derive(Debug, Args)]
pub struct SimulateArgs {
    /// Scenario file, or the name of one that comes with tare: two-models, training-loop, notebook, serving
    #[arg(value_name = "SCENARIO")]
    pub scenario: String,
    /// Write a page for a browser
    #[arg(long, value_name = "OUT", value_hint = ValueHint::FilePath)]
    pub html: Option<PathBuf>,
    /// Print the scenario instead of running it
    #[arg(long, conflicts_with = "html")]
    pub show: bool,
}

pub fn run(command: GpuCommand, printer: &Printer) -> Result<u8> {
    match command {
        GpuCommand::Info => info(printer),
        GpuCommand::Top(args) => top(&args, printer),
        GpuCommand::Selftest(args) => selftest(&args, printer),
        GpuCommand::Replay(args) => replay(&args, printer),
        GpuCommand::Whatif(args) => what_if(&args, printer),
        GpuCommand::Summary(args) => summarise(&args, printer),
        GpuCommand::Simulate(args) => simulate(&args, printer),
    }
}

fn this_program() -> Result<PathBuf> {
    std::env::current_exe()
        .map_err(|error| Error::failure("this program's own path is unknown, so it cannot ask the driver").because(error))
}

/// The command of a child that asks a driver library.
pub(super) fn prober() -> Result<impl Fn(&str) -> Command + Sync> {
    let program = this_program()?;
    Ok(move |route: &str| {
        let mut command = Command::new(&program);
        command.args(["__gpu-probe", route]);
        command
    })
}

/// The body of the hidden command: see [`gpu_info::probe_main`].
pub fn probe(route: &str, interval: f64, printer: &Printer) -> Result<u8> {
    if route != "watch" {
        printer.raw(&format!("{}\n", gpu_info::probe_main(route)));
        return Ok(0);
    }
    // Ends with the parent, by a signal.
    loop {
        printer.raw(&format!("{}\n", gpu_info::probe_main("nvml")));
        std::thread::sleep(Duration::from_secs_f64(interval.clamp(0.1, 3600.0)));
    }
}

fn info(printer: &Printer) -> Result<u8> {
    let info = gpu_info::look(&prober()?, std::path::Path::new("/"), gpu_info::LIMIT);
    for remark in &info.remarks {
        printer.warn(remark, &[]);
    }
    for hint in &info.hints {
        printer.note(&format!("hint: {hint}"));
    }
    printer.json(&info);
    printer.data(&info.text());
    if info.nothing() {
        printer.note("tare needs no GPU to make environments for one: see `--cuda` of `tare lock` and `tare create`");
    }
    Ok(0)
}

fn selftest(args: &SelftestArgs, printer: &Printer) -> Result<u8> {
    let request = apart::Request {
        devices: args.devices.clone(),
        level: args.level.into(),
        budget: args.budget,
        reserve: args.reserve,
        even_if_busy: args.even_if_busy,
        segments: match (args.native, args.expandable) {
            (true, _) => memtest::Segments::Native,
            (_, true) => memtest::Segments::Expandable,
            _ => memtest::Segments::Both,
        },
        fade: args.fade.unwrap_or_default(),
        seed: args.seed,
        call_limit: args.call_limit.unwrap_or(apart::CALL_LIMIT),
    };
    let told = if request.is_simulated() {
        apart::Told::from(&memtest::selftest(&request.devices, &request.options(), &*printer.progress())?)
    } else {
        let (program, progress) = (this_program()?, printer.progress());
        super::block_on(super::blocking(move |cancel| {
            let command = |request: &str, notes: &std::path::Path| {
                let mut command = Command::new(&program);
                command.args(["__gpu-selftest", request]).arg(notes);
                command
            };
            apart::selftest_apart(&request, &command, &*progress, &|| cancel.is_cancelled())
        }))?
    };
    let code = if args.require_gpu { told.codes.1 } else { told.codes.0 };
    let mut document = told.document;
    document["success"] = json!(code == 0);
    printer.json(&document);
    printer.data(&told.text);
    Ok(code)
}

/// The body of the hidden command: see [`apart::main`].
pub fn selftest_apart(request: &str, notes: &std::path::Path, printer: &Printer) -> Result<u8> {
    apart::main(request, notes, &|text| printer.raw(text));
    Ok(0)
}

fn top(args: &TopArgs, printer: &Printer) -> Result<u8> {
    let folder = gpu_top::offers_folder();
    let host_pids = !crate::gpu::nvml::pids_are_ours();
    let combine = move |view: &NvmlView| gpu_top::combine(view, &gpu_top::offers(&folder), host_pids);
    if args.once || printer.is_json() || !live::possible() {
        let view = gpu_info::ask_in_child(&prober()?, "nvml", gpu_info::LIMIT);
        let view = view.unwrap_or_else(|problem| NvmlView { problem: Some(format!("NVML {problem}")), ..NvmlView::default() });
        let top = combine(&view);
        printer.json(&top);
        printer.data(&top.text(100, table::columns));
        return Ok(0);
    }
    let (mut command, interval) = (prober()?("watch"), args.interval);
    command.arg(interval.to_string());
    // A signal flips the switch, and the terminal is given back before this process ends or stops.
    let signals = Arc::new(TerminalSignals::default());
    super::block_on(async move {
        let handlers =
            handlers().map_err(|error| Error::failure("cannot wait for signals").because(error).hint("print once instead: `--once`"))?;
        let listening = tokio::spawn(listen(handlers, signals.clone()));
        let result = super::blocking({
            let signals = signals.clone();
            move |cancel| watch(command, interval, &combine, &signals, cancel)
        })
        .await;
        listening.abort();
        result?;
        match signals.ended() {
            Some(name) => Err(Error::new(crate::error::Kind::Interrupted, format!("stopped by {name}"))),
            None => Ok(0),
        }
    })
}

/// What signals other than those that end every command ask of a program that has the terminal.
#[derive(Default)]
struct TerminalSignals {
    ended: std::sync::Mutex<Option<&'static str>>,
    stop: AtomicBool,
    again: AtomicBool,
}

impl TerminalSignals {
    /// The signal that ends it, if one came.
    fn ended(&self) -> Option<&'static str> {
        *self.ended.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

/// Handlers of the signals that [`listen`] waits for. They must be there before the terminal is taken.
fn handlers() -> std::io::Result<[tokio::signal::unix::Signal; 4]> {
    use rustix::process::Signal;
    use tokio::signal::unix::{SignalKind, signal};
    let on = |kind: Signal| signal(SignalKind::from_raw(kind.as_raw()));
    Ok([on(Signal::HUP)?, on(Signal::QUIT)?, on(Signal::TSTP)?, on(Signal::CONT)?])
}

/// SIGHUP and SIGQUIT end it, SIGTSTP stops it, and after SIGCONT the terminal is taken again.
async fn listen(handlers: [tokio::signal::unix::Signal; 4], signals: Arc<TerminalSignals>) {
    let [mut hangup, mut quit, mut stop, mut again] = handlers;
    loop {
        let ended = tokio::select! {
            _ = hangup.recv() => "SIGHUP",
            _ = quit.recv() => "SIGQUIT",
            _ = stop.recv() => {
                signals.stop.store(true, Ordering::SeqCst);
                continue;
            }
            _ = again.recv() => {
                signals.again.store(true, Ordering::SeqCst);
                continue;
            }
        };
        *signals.ended.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = Some(ended);
    }
}

/// Draws what the child says until a key or a signal ends it. The child ends with it.
fn watch(
    command: Command,
    interval: f64,
    combine: &dyn Fn(&NvmlView) -> gpu_top::Top,
    signals: &TerminalSignals,
    cancel: &Cancel,
) -> Result<()> {
    let (sender, views) = std::sync::mpsc::channel();
    let over = Cancel::new();
    let end = CancelOnDrop::new(over.clone());
    let asking = std::thread::spawn(move || {
        let mut send = |line: &str| {
            if let Ok(view) = serde_json::from_str::<NvmlView>(line) {
                let _ = sender.send(Ok(view));
            }
        };
        let limits = Limits { deadline: None, stop: &|| over.is_cancelled(), ..Limits::until(Instant::now()) };
        let ran = child::run_lines(command, &limits, &mut send);
        let _ = sender.send(Err(ran.ended.problem(Duration::ZERO).unwrap_or_else(|| "ended".to_owned())));
    });
    let mut screen = live::Screen::open()?;
    let mut last: Option<(Instant, NvmlView)> = None;
    let mut problem = None;
    let begin = Instant::now();
    while !cancel.is_cancelled() && signals.ended().is_none() {
        let (stop, again) = (signals.stop.swap(false, Ordering::SeqCst), signals.again.swap(false, Ordering::SeqCst));
        if stop && !again {
            screen.give();
            let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::STOP);
            // This thread may run on for a moment before the process stands still.
            while !signals.again.swap(false, Ordering::SeqCst) && !cancel.is_cancelled() && signals.ended().is_none() {
                std::thread::sleep(Duration::from_millis(10));
            }
        }
        if stop || again {
            screen.take();
        }
        for answer in views.try_iter() {
            match answer {
                Ok(view) => last = Some((Instant::now(), view)),
                Err(why) => problem = Some(format!("NVML {why}")),
            }
        }
        let (columns, _) = screen.size();
        let mut text = match &last {
            Some((_, view)) => combine(view).text(columns, table::columns),
            None => "asking the driver\n".to_owned(),
        };
        let silent = last.as_ref().map_or(begin, |(at, _)| *at).elapsed().as_secs_f64();
        if let Some(problem) = &problem {
            text.push_str(&format!("{problem}\n"));
        } else if silent > interval + 5.0 {
            text.push_str(&format!("the driver has not answered for {silent:.0} s\n"));
        }
        screen.draw("tare gpu top", "q quits", &text);
        match screen.key(Duration::from_millis(200)) {
            live::Key::Quit => break,
            // To everything in the foreground, as the terminal would; the signal that comes back stops this process.
            live::Key::Suspend => drop(rustix::process::kill_current_process_group(rustix::process::Signal::TSTP)),
            live::Key::None | live::Key::Other => {}
        }
    }
    drop(screen);
    drop(end);
    let _ = asking.join();
    Ok(())
}

fn version(text: Option<&str>) -> Result<Option<TorchVersion>> {
    text.map(|text| text.parse().map_err(|error| Error::usage(format!("`{text}` is no torch version")).because(error).hint("such as 2.8")))
        .transpose()
}

/// An error of what is in a snapshot names the file.
fn about(error: Error, file: &std::path::Path) -> Error {
    if error.kind() == crate::error::Kind::Failure { error.context(format!("cannot use the snapshot `{}`", file.display())) } else { error }
}

fn open(file: &std::path::Path, device: Option<u32>) -> Result<Snapshot> {
    let snapshot = trace::open(file, &trace::Limits::default())?;
    if let Some(device) = device
        && !snapshot.devices().contains(&device)
    {
        let there: Vec<String> = snapshot.devices().iter().map(ToString::to_string).collect();
        return Err(Error::usage(format!("the snapshot has nothing of device {device}")).hint(format!("it has: {}", there.join(", "))));
    }
    Ok(snapshot)
}

fn replay(args: &ReplayArgs, printer: &Printer) -> Result<u8> {
    let version = version(args.snapshot.torch.as_deref())?;
    let snapshot = open(&args.snapshot.file, args.snapshot.device)?;
    let options = report::ReplayOptions { device: args.snapshot.device, version, config: None, limit: args.top };
    let report = report::report(&snapshot, &options).map_err(|error| about(error, &args.snapshot.file))?;
    printer.json(&report);
    printer.data(&report.text());
    Ok(0)
}

fn what_if(args: &WhatifArgs, printer: &Printer) -> Result<u8> {
    let version = version(args.snapshot.torch.as_deref())?;
    let capacity = args
        .capacity
        .as_deref()
        .map(|text| {
            simulate::scenario::parse_size(text)
                // No card is that small: a unit was forgotten.
                .filter(|bytes| *bytes >= 1 << 20)
                .ok_or_else(|| {
                    Error::usage(format!("`{text}` is no size")).hint("such as 24GiB, 80000MiB or a number of bytes, at least 1 MiB")
                })
        })
        .transpose()?;
    let snapshot = open(&args.snapshot.file, args.snapshot.device)?;
    let mut options = whatif::WhatIfOptions {
        device: args.snapshot.device,
        version,
        confs: args.confs.clone(),
        capacity,
        sweep: args.sweep,
        ..whatif::WhatIfOptions::default()
    };
    options.surroundings.wsl2 = args.wsl2;
    let report = whatif::what_if(&snapshot, &options).map_err(|error| about(error, &args.snapshot.file))?;
    printer.json(&report);
    printer.data(&report.text());
    Ok(0)
}

fn summarise(args: &SummaryArgs, printer: &Printer) -> Result<u8> {
    if let Some(out) = &args.html {
        check_out(out, Some(&args.file))?;
    }
    let snapshot = open(&args.file, args.device)?;
    let options = summary::Options { top: args.top.max(1), device: args.device, ..summary::Options::default() };
    let summary = summary::summarise(&snapshot, &options);
    if let Some(out) = &args.html {
        let compare = if args.confs.is_empty() {
            Vec::new()
        } else {
            let options = whatif::WhatIfOptions { device: args.device, confs: args.confs.clone(), ..whatif::WhatIfOptions::default() };
            html::Comparison::rows(&whatif::what_if(&snapshot, &options)?)
        };
        let title = args.file.file_name().map_or_else(|| "snapshot".into(), |name| name.to_string_lossy());
        write(out, &html::page(&snapshot, &summary, &title, &compare), printer)?;
    }
    printer.json(&summary);
    printer.data(&summary::text(&summary, args.top.max(1)));
    Ok(0)
}

fn simulate(args: &SimulateArgs, printer: &Printer) -> Result<u8> {
    let (name, text) = match simulate::shipped(&args.scenario) {
        Some(text) => (args.scenario.clone(), text.to_owned()),
        None => {
            let path = std::path::Path::new(&args.scenario);
            let text = read_bounded(path).map_err(|error| {
                let names: Vec<&str> = simulate::SHIPPED.iter().map(|(name, _)| *name).collect();
                Error::io("read", path, &error)
                    .with_kind(crate::error::Kind::Usage)
                    .hint(format!("scenarios that come with tare: {}", names.join(", ")))
            })?;
            (args.scenario.clone(), text)
        }
    };
    if let Some(out) = &args.html {
        check_out(out, Some(std::path::Path::new(&args.scenario)))?;
    }
    let scenario = simulate::parse(&name, &text)?;
    if args.show {
        printer.json(&json!({ "scenario": text }));
        printer.data(&text);
        return Ok(0);
    }
    let report = simulate::run(&scenario)?;
    if let Some(out) = &args.html {
        let written = simulate::Variation { name: "as written".into(), conf: None, empty_cache: false, order: None };
        let (_, snapshot) = simulate::record(&scenario, &written)?;
        let summary = summary::summarise(&snapshot, &summary::Options::default());
        write(out, &html::page(&snapshot, &summary, &name, &report.comparisons()), printer)?;
    }
    printer.data(&simulate::text(&report));
    if let Some(first) = report.surprises.first() {
        let mut error = Error::failure("the scenario did not come out as it expects").because(first);
        for more in &report.surprises[1..] {
            error = error.because(more);
        }
        return Err(error);
    }
    printer.json(&report);
    Ok(0)
}

/// The text of a scenario; a device or a file without an end is cut off.
fn read_bounded(path: &std::path::Path) -> std::io::Result<String> {
    use std::io::Read;
    let most = simulate::scenario::LARGEST_FILE as u64;
    let mut text = String::new();
    let read = std::fs::File::open(path)?.take(most + 1).read_to_string(&mut text)?;
    if read as u64 > most { Err(std::io::Error::other("it is longer than 4 MiB")) } else { Ok(text) }
}

/// A page must not take the place of what it is made from, nor of a device.
pub(super) fn check_out(out: &std::path::Path, input: Option<&std::path::Path>) -> Result<()> {
    if out.as_os_str() == "-" {
        // Only a page of `gpu` is made from something.
        return Err(match input {
            Some(_) => Error::usage("a page cannot be written to stdout").hint("name a file: --html memory.html"),
            None => Error::usage("`-o` takes the name of a file, and `-` is none")
                .hint("the report on stdout: leave `-o` out, and choose with --format html|junit|json"),
        });
    }
    let same = |input: &std::path::Path| matches!((std::fs::canonicalize(out), std::fs::canonicalize(input)), (Ok(a), Ok(b)) if a == b);
    if input.is_some_and(same) {
        return Err(Error::usage(format!("`--html {}` would overwrite the input", out.display())));
    }
    if std::fs::metadata(out).is_ok_and(|about| !about.is_file()) {
        return Err(Error::usage(format!("`{}` is no ordinary file", out.display())));
    }
    // Through a link to the file that it names.
    let out = &std::fs::canonicalize(out).unwrap_or_else(|_| out.to_owned());
    let folder = out.parent().filter(|folder| !folder.as_os_str().is_empty());
    if folder.is_some_and(|folder| !folder.is_dir()) {
        return Err(Error::usage(format!("there is no folder for `{}`", out.display())));
    }
    Ok(())
}

fn write(out: &std::path::Path, page: &str, printer: &Printer) -> Result<()> {
    crate::files::write_whole(out, page.as_bytes()).map_err(|error| Error::io("write", out, &error))?;
    printer.note(&format!("wrote `{}` ({})", out.display(), crate::ui::human_bytes(page.len() as u64)));
    Ok(())
}
