use super::run::Outcome;
use super::scenario::{Action, Lifetime, Size};
use super::*;

const HEAD: &str = "name = \"t\"\n[device]\ncapacity = \"1GiB\"\ncontext = 0\n";

/// A scenario of one phase with these steps.
fn steps(steps: &str) -> String {
    format!("{HEAD}[[phase]]\nname = \"p\"\nstep = [\n{steps}\n]\n")
}

fn refusal(text: &str) -> String {
    let error = match parse("s.toml", text) {
        Ok(scenario) => panic!("accepted: {scenario:?}"),
        Err(error) => error,
    };
    assert_eq!(error.exit_code(), 2, "{error}");
    assert!(!error.places().is_empty(), "{error} has no place");
    let mut told = error.to_string();
    for hint in error.hints() {
        told.push_str(" | hint: ");
        told.push_str(hint);
    }
    told
}

#[test]
fn every_mistake_is_told_with_its_place() {
    let cases: Vec<(String, &str)> = vec![
        ("name = \"t\"\n[device\n".into(), "s.toml:2:8: not valid TOML: "),
        ("name = \"t\"\nname = \"u\"\n".into(), "s.toml:2:1: not valid TOML: duplicate key"),
        (HEAD.into(), "s.toml:1:1: the scenario has no `phase`"),
        (format!("{HEAD}[[phse]]\nname = \"p\"\n"), "s.toml:5:3: unknown key `phse` in the scenario | hint: did you mean `phase`?"),
        (
            "name = \"t\"\n[device]\ncapacity = \"24 gigs\"\n".into(),
            "s.toml:3:12: `capacity` is no size: `24 gigs` | hint: write a number of bytes",
        ),
        ("name = \"t\"\n[device]\ncapacity = \"100MiB\"\n".into(), "s.toml:3:12: `capacity` leaves nothing for tensors: "),
        ("name = \"t\"\n[device]\ncapacity = 0\n".into(), "s.toml:3:12: `capacity` must be more than 0 bytes"),
        (
            "name = \"t\"\n[device]\nsize = 1\n".into(),
            "s.toml:3:1: unknown key `size` in [device] | hint: known keys here: `capacity`, `context`, `other_processes`",
        ),
        (format!("{HEAD}[allocator]\ntorch = \"two\"\n"), "s.toml:6:9: `two` is not a torch version | hint: write it as MAJOR.MINOR"),
        (format!("{HEAD}[allocator]\nconf = \"max_split_size_mb:3\"\n"), "s.toml:6:"),
        (format!("{HEAD}[allocator]\nconf = \"expandable_segment:True\"\n"), "s.toml:6:9: "),
        (format!("{HEAD}[allocator]\nmemory_fraction = 1.5\n"), "s.toml:6:19: `memory_fraction` must lie between 0 and 1"),
        (format!("{HEAD}[[phase]]\nname = \"p\"\nstep = []\n"), "s.toml:7:8: the list of steps is empty"),
        (
            format!("{HEAD}[[phase]]\nname = \"p\"\nrepeat = 0\nstep = [{{ synchronize = true }}]\n"),
            "s.toml:7:10: `repeat` must lie between 1 and 4294967295",
        ),
        (
            format!("{HEAD}[[phase]]\nname = \"p\"\nexpect = \"OOM\"\nstep = []\n"),
            "s.toml:7:10: `expect` cannot be `OOM` | hint: did you mean `oom`?",
        ),
        (
            format!("{}[[phase]]\nname = \"p\"\nstep = [{{ synchronize = true }}]\n", steps("{ synchronize = true }")),
            "s.toml:10:1: two phases are called `p`",
        ),
        (steps("{ aloc = \"a\", size = 1 }"), "s.toml:8:3: a step does nothing: it needs one of `alloc`, `free`"),
        (
            steps("{ alloc = \"a\", free = \"a\", size = 1 }"),
            "s.toml:8:16: a step does one thing, and this one has `alloc` and `free` | hint: write two steps",
        ),
        (steps("{ alloc = \"a\" }"), "s.toml:8:11: `alloc = \"a\"` has neither `size` nor `shape`"),
        (steps("{ alloc = \"a\", size = 1, shape = [2] }"), "s.toml:8:34: `alloc` takes `size` or `shape`, not both"),
        (steps("{ alloc = \"a\", size = 1, dtype = \"f32\" }"), "s.toml:8:34: `dtype` goes with `shape`, not with `size`"),
        (
            steps("{ alloc = \"a\", shape = [2], dtype = \"float31\" }"),
            "s.toml:8:37: `dtype` cannot be `float31` | hint: did you mean `float32`?",
        ),
        (steps("{ alloc = \"a\", size = -5 }"), "s.toml:8:23: `size` must lie between 0 and "),
        (steps("{ alloc = \"a\", size = 1.5 }"), "s.toml:8:23: `size` must be a size, not a number with a fraction"),
        (
            steps("{ alloc = \"a\", size = { min = \"2MiB\", max = \"1MiB\" } }"),
            "s.toml:8:23: `min` (2097152 bytes) is more than `max` (1048576 bytes)",
        ),
        (
            steps("{ alloc = \"a\", shape = [4, \"B\"] }"),
            "s.toml:8:28: `shape` uses `B`, which no earlier step sets | hint: add a step before it: { set = \"B\", value = 128 }",
        ),
        (steps("{ alloc = \"a\", size = 1, sise = 2 }"), "s.toml:8:26: unknown key `sise` in a step | hint: did you mean `size`?"),
        (steps("{ alloc = \"a*\", size = 1 }"), "s.toml:8:11: `alloc` is no name: `a*`: a name has letters"),
        (
            steps("{ alloc = \"acts\", size = 1 }, { free = \"act\" }"),
            "s.toml:8:40: `free` names `act`, which no earlier step allocates | hint: did you mean `acts`?",
        ),
        (steps("{ free = \"x\" }"), "s.toml:8:10: `free` names `x`, which no earlier step allocates | hint: allocate something first"),
        (
            steps("{ alloc = \"a\", size = 1 }, { free = \"a\", keep_every = 2, keep_last = 1 }"),
            "s.toml:8:70: `free` takes `keep_every` or `keep_last`, not both",
        ),
        (steps("{ alloc = \"a\", size = 1 }, { record_stream = \"a\" }"), "s.toml:8:28: a step has no `stream`"),
        (steps("{ alloc = \"a\", size = 1, stream = 5000 }"), "s.toml:8:35: `stream` must lie between 0 and 1023"),
        (steps("{ set = \"1x\", value = 1 }"), "s.toml:8:9: `set` is no variable name: `1x`"),
        (steps("{ set = \"x\", value = 1, cycle = [1] }"), "s.toml:8:9: `set = \"x\"` needs exactly one of `value`, `random` and `cycle`"),
        (steps("{ set = \"x\", random = [5, 2] }"), "s.toml:8:23: `random` must be [min, max] with min <= max"),
        (
            steps("{ network = \"resnet-50\", run = \"weights\" }"),
            "s.toml:8:13: `network` cannot be `resnet-50` | hint: did you mean `resnet-101`?",
        ),
        (steps("{ network = \"vit-large\", run = \"forward\" }"), "s.toml:8:13: `run = \"forward\"` needs a `batch`"),
        (
            steps("{ network = \"vit-large\", run = \"backward\", batch = 2 }"),
            "s.toml:8:13: `backward` of `vit-large` comes before its `forward`",
        ),
        (steps("{ empty_cache = false }"), "s.toml:8:17: `empty_cache = false` does nothing"),
        (
            steps("{ repeat = 4000000, step = [{ alloc = \"a\", size = 1, count = 5000 }] }"),
            "s.toml:1:1: the scenario would make about 20000000000 steps",
        ),
        (format!("{}[[variation]]\nname = \"v\"\n", steps("{ synchronize = true }")), "s.toml:10:1: variation `v` changes nothing"),
        (
            format!("{}[[variation]]\nname = \"v\"\norder = [\"q\"]\n", steps("{ synchronize = true }")),
            "s.toml:12:10: `order` cannot be `q`",
        ),
        (steps("\"alloc\""), "s.toml:8:1: `a step` must be a table, not a string"),
        (steps("{ alloc = \"ä\", sïze = 1 }"), "s.toml:8:"),
    ];
    assert!(cases.len() >= 15);
    let wrong: Vec<String> = cases
        .iter()
        .map(|(text, want)| (want, refusal(text)))
        .filter(|(want, told)| !told.starts_with(**want))
        .map(|(want, told)| format!("wanted {want}\ntold   {told}"))
        .collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn a_mistake_inside_a_configuration_line_is_shown_in_place() {
    let text = format!("{HEAD}[allocator]\nconf = \"expandable_segments:True,max_splt_size_mb:64\"\n[[phase]]\nname=\"p\"\nstep=[]\n");
    let error = parse("s.toml", &text).unwrap_err();
    let place = &error.places()[0];
    assert_eq!(&place.text[place.offset..place.offset + place.len], "max_splt_size_mb", "{error}");
}

#[test]
fn sizes_shapes_and_lifetimes_are_read() {
    let text = steps(
        "{ set = \"B\", value = 3 },
         { alloc = \"a\", shape = [2, \"2*B\", 5], dtype = \"bf16\", count = 4, stream = 1, lifetime = { min = 1, max = 2 } },
         { alloc = \"b\", size = [\"1MiB\", \"2 MiB\"] }, { alloc = \"c\", size = { min = 512, max = \"1KB\", log = true } },",
    );
    let scenario = parse("s.toml", &text).unwrap();
    let Action::Alloc { size: Size::Shape { dims, element }, count: 4, stream: 1, lifetime, .. } = &scenario.phases[0].steps[1].action
    else {
        panic!("{:?}", scenario.phases[0].steps[1])
    };
    assert_eq!((dims[1].factor, dims[1].variables.as_slice(), *element), (2, ["B".to_owned()].as_slice(), 2));
    assert_eq!(*lifetime, Lifetime::Iterations { min: 1, max: 2 });
    assert_eq!(scenario.names, ["a", "b", "c"]);
    let run = run_one(&scenario, &Variation { name: "x".into(), conf: None, empty_cache: false, order: None }).unwrap();
    // 4 tensors of 2 x 6 x 5 x 2 bytes are blocks of 512 bytes; they die with the only iteration of their loop.
    assert_eq!(run.peak_allocated - run.phases[0].allocated, 4 * 512);
    assert_eq!(
        ["20MiB", "1.5 GiB", "7", "3MB", "1_024K"].map(scenario::parse_size),
        [Some(20 << 20), Some(3 << 29), Some(7), Some(3_000_000), Some(1 << 20)]
    );
    assert_eq!(["", "x", "1 TB/s", "-1", "1.2.3", "99999999999999999999", "20000000TiB"].map(scenario::parse_size), [None; 7]);
}

#[test]
fn patterns_match_whole_names() {
    for (pattern, name, want) in [
        ("a", "a", true),
        ("a", "ab", false),
        ("a*", "ab", true),
        ("*b", "ab", true),
        ("a*c*", "abcd", true),
        ("a*c", "abcd", false),
        ("*", "", true),
    ] {
        assert_eq!(scenario::glob(pattern, name), want, "{pattern} {name}");
    }
}

fn run_steps(text: &str) -> Report {
    run(&parse("s.toml", &steps(text)).unwrap()).unwrap()
}

#[test]
fn a_survivor_pins_its_segment_and_is_named() {
    let report = run_steps("{ alloc = \"big\", size = \"8MiB\", count = 2 }, { alloc = \"small\", size = \"2MiB\" }, { free = \"big\" }");
    let phase = &report.runs[0].phases[0];
    assert_eq!((phase.allocated, phase.reserved, phase.split.pinned, phase.empty_cache_returns), (2 << 20, 20 << 20, 18 << 20, 0));
    assert_eq!(phase.largest_free, 16 << 20);
    assert_eq!(phase.pins[0].by, ["small (<t.toml>:8)"]);
    assert_eq!(phase.pinned_by[0].name, "small (line 8)");
    assert_eq!(phase.pinned_by[0].strands, 18 << 20);
    assert!(text(&report).contains("pins after `p`: 2.00 MiB of `small (line 8)` in 1 segment pin 18.00 MiB free"));
}

/// The reports of the shipped scenarios, made once.
fn shipped_reports() -> &'static [Report] {
    static ALL: std::sync::OnceLock<Vec<Report>> = std::sync::OnceLock::new();
    ALL.get_or_init(|| SHIPPED.iter().map(|(name, text)| run(&parse(name, text).unwrap()).unwrap()).collect())
}

#[test]
fn the_books_of_the_allocator_and_of_the_summary_agree_in_every_phase() {
    for ((name, text), report) in SHIPPED.iter().zip(shipped_reports()) {
        let scenario = parse(name, text).unwrap();
        for run in &report.runs {
            for phase in run.phases.iter().filter(|phase| phase.outcome != Outcome::Skipped) {
                assert_eq!(phase.split.total(), phase.reserved, "{name} {} {}", run.name, phase.name);
                assert_eq!(phase.split.allocated + phase.split.rounding + phase.split.unsplit, phase.allocated, "{name} {}", phase.name);
                assert!(phase.nvidia_smi + phase.device_free + scenario.device.other_processes <= scenario.device.capacity, "{name}");
                assert!(phase.allocated <= phase.peak_allocated && phase.reserved <= phase.peak_reserved, "{name}");
            }
        }
    }
}

#[test]
fn what_the_shipped_scenarios_show_holds() {
    let all = shipped_reports();
    for report in all {
        assert!(report.surprises.is_empty(), "{}: {:?}", report.scenario, report.surprises);
    }
    let ends = |report: &Report| -> Vec<(String, bool)> { report.runs.iter().map(|run| (run.name.clone(), run.completes)).collect() };
    let say = |list: &[(&str, bool)]| -> Vec<(String, bool)> { list.iter().map(|(name, done)| ((*name).to_owned(), *done)).collect() };
    assert_eq!(
        ends(&all[0]),
        say(&[
            ("as written", false),
            ("empty_cache() after each phase", true),
            ("expandable_segments:True", true),
            ("max_split_size_mb:64", true),
            ("ViT-Large first", true),
        ])
    );
    // Little allocated, much reserved after the del, and the failure comes with more free bytes than it asks for.
    let two = &all[0].runs[0];
    let del = two.phases.iter().find(|phase| phase.name.starts_with("del")).unwrap();
    assert!(del.reserved > 15 * del.allocated);
    let Outcome::OutOfMemory(oom) = &two.phases.last().unwrap().outcome else { panic!() };
    assert!(oom.free_but_reserved > 3 * oom.requested && oom.largest_free < oom.requested && oom.device_free < oom.requested);
    assert!(oom.message.starts_with("CUDA out of memory. Tried to allocate 192.00 MiB."));
    assert_eq!(
        ends(&all[1]),
        say(&[
            ("as written", false),
            ("empty_cache() after each phase", false),
            ("expandable_segments:True", true),
            ("max_split_size_mb:64", false),
        ])
    );
    // Nothing but letting go of the traceback helps the notebook; then it goes on.
    assert!(all[2].runs.iter().all(|run| !run.completes));
    assert!(all[2].runs.iter().all(|run| run.phases.last().unwrap().outcome == Outcome::Completed));
    let retries: Vec<u64> = all[3].runs.iter().map(|run| run.retries).collect();
    assert!(all[3].runs.iter().all(|run| run.completes) && retries[2] < retries[0], "{retries:?}");
}

#[test]
fn the_same_seed_gives_the_same_run_and_another_seed_another() {
    let text = shipped("serving").unwrap();
    let written = Variation { name: "as written".into(), conf: None, empty_cache: false, order: None };
    let told = |text: &str| serde_json::to_string(&run_one(&parse("a", text).unwrap(), &written).unwrap()).unwrap();
    let once = told(text);
    assert_eq!(once, told(text));
    assert_ne!(once, told(&text.replace("seed = 11", "seed = 12")));
}

#[test]
fn late_events_keep_memory_waiting_until_a_synchronize() {
    let report = run_steps(
        "{ alloc = \"a\", size = \"30MiB\" }, { busy = 1, steps = 100 }, { record_stream = \"a\", stream = 1 }, { free = \"a\" }, { alloc = \"b\", size = \"30MiB\" }",
    );
    let phase = &report.runs[0].phases[0];
    assert_eq!((phase.split.pending, phase.reserved), (30 << 20, 60 << 20));
    let report = run_steps(
        "{ alloc = \"a\", size = \"30MiB\" }, { busy = 1, steps = 100 }, { record_stream = \"a\", stream = 1 }, { free = \"a\" }, { synchronize = true }, { alloc = \"b\", size = \"30MiB\" }",
    );
    let phase = &report.runs[0].phases[0];
    assert_eq!((phase.split.pending, phase.reserved), (0, 30 << 20));
}

#[test]
fn the_recording_of_a_scenario_is_a_snapshot_the_summary_agrees_with() {
    use crate::gpu::summary;
    let scenario = parse("t", shipped("serving").unwrap()).unwrap();
    for conf in [None, Some("expandable_segments:True".to_owned())] {
        let variation = Variation { name: "x".into(), conf, empty_cache: false, order: None };
        let (run, snapshot) = record(&scenario, &variation).unwrap();
        let summary = summary::summarise(&snapshot, &summary::Options::default());
        let device = &summary.devices[0];
        let timeline = device.timeline.as_ref().unwrap();
        assert_eq!(timeline.peak_reserved.bytes, run.peak_reserved);
        assert_eq!(timeline.peak_allocated.bytes, run.peak_allocated);
        let last = run.phases.iter().rev().find(|phase| phase.outcome != Outcome::Skipped).unwrap();
        assert_eq!((device.reserved, device.allocated, device.split), (last.reserved, last.allocated, last.split));
        assert_eq!(timeline.ooms.len(), run.phases.iter().filter(|phase| matches!(phase.outcome, Outcome::OutOfMemory(_))).count());
        assert!(summary::html::page(&snapshot, &summary, "t", &[]).contains("serving.toml"));
    }
}

#[test]
fn the_text_tells_the_story() {
    let report = run_steps("{ alloc = \"old\", size = \"600MiB\" }, { alloc = \"new\", size = \"500MiB\" }");
    insta::assert_snapshot!(text(&report), @r#"
    t

    card 1.00 GiB, context of the process 0 B, other processes 0 B; rules of torch 2.10 (core rules verified by traces), seed 0

    as written
      phase    allocated    reserved  nvidia-smi largest free       pinned  empty_cache  outcome
      p       600.00 MiB  600.00 MiB  600.00 MiB          0 B          0 B          0 B  OUT OF MEMORY at new (500.00 MiB)
      why: `new` (line 8) needs 500.00 MiB from the driver, which has 424.00 MiB; 0 B are reserved but free, in pieces of at most 0 B

    empty_cache() after each phase
      phase    allocated    reserved  nvidia-smi largest free       pinned  empty_cache  outcome
      p       600.00 MiB  600.00 MiB  600.00 MiB          0 B          0 B          0 B  OUT OF MEMORY at new (500.00 MiB)
      why: `new` (line 8) needs 500.00 MiB from the driver, which has 424.00 MiB; 0 B are reserved but free, in pieces of at most 0 B

    expandable_segments:True
      settings unverified (read in the source, no trace reaches it)
      phase    allocated    reserved  nvidia-smi largest free       pinned  empty_cache  outcome
      p       600.00 MiB  600.00 MiB  600.00 MiB          0 B          0 B          0 B  OUT OF MEMORY at new (500.00 MiB)
      why: `new` (line 8) needs 500.00 MiB from the driver, which has 424.00 MiB; 0 B are reserved but free, in pieces of at most 0 B

    max_split_size_mb:64
      settings unverified (read in the source, no trace reaches it)
      phase    allocated    reserved  nvidia-smi largest free       pinned  empty_cache  outcome
      p       600.00 MiB  600.00 MiB  600.00 MiB          0 B          0 B          0 B  OUT OF MEMORY at new (500.00 MiB)
      why: `new` (line 8) needs 500.00 MiB from the driver, which has 424.00 MiB; 0 B are reserved but free, in pieces of at most 0 B

    variation                       peak reserved   peak in use    used retries  outcome
    as written                         600.00 MiB    600.00 MiB 100.0 %       1  out of memory in `p`
    empty_cache() after each phase     600.00 MiB    600.00 MiB 100.0 %       1  out of memory in `p`
    expandable_segments:True           600.00 MiB    600.00 MiB 100.0 %       1  out of memory in `p`
    max_split_size_mb:64               600.00 MiB    600.00 MiB 100.0 %       1  out of memory in `p`
    "#);
}

proptest::proptest! {
    /// Whatever is in the file, the reader answers with a scenario or with an error that has a place.
    #[test]
    fn any_text_is_read_or_refused_with_a_place(at in 0usize..2000, len in 0usize..40, put in "[ -~\n]{0,20}") {
        let text = shipped("two-models").unwrap();
        let chars: Vec<char> = text.chars().collect();
        let at = at.min(chars.len());
        let end = (at + len).min(chars.len());
        let changed: String = chars[..at].iter().chain(put.chars().collect::<Vec<_>>().iter()).chain(&chars[end..]).collect();
        if let Err(error) = parse("x", &changed) {
            proptest::prop_assert!(!error.places().is_empty(), "{}", error);
        }
    }
}

#[test]
fn a_scenario_larger_than_4_mib_is_refused_unread() {
    let error = parse("s.toml", &"#".repeat((4 << 20) + 1)).unwrap_err();
    assert_eq!(error.to_string(), "`s.toml` is 4194305 bytes, more than the 4194304 that a scenario may have");
    assert_eq!((error.exit_code(), error.hints().len()), (2, 1));
}

#[test]
fn what_the_holders_pin_is_what_the_table_says() {
    for report in shipped_reports() {
        for run in &report.runs {
            for phase in run.phases.iter().filter(|phase| phase.pinned_by.len() < 8) {
                let pinned = phase.split.pinned + phase.split.expandable_rest;
                let strands: u64 = phase.pinned_by.iter().map(|group| group.strands).sum();
                assert_eq!(strands, pinned, "{} {} {}", report.scenario, run.name, phase.name);
            }
        }
    }
}
