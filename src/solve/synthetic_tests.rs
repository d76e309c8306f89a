//! Over records made for the purpose.

use std::sync::Arc;
use std::time::Duration;

use rattler_conda_types::{PackageName, RepoDataRecord, Subdir};

use super::testing::{dated, linux, names, picture, record, request, solve_synthetic, spec, target};
use super::{CancellationToken, Favor, GpuVariant, Lookup, PinnedSpec, PriorityChoice, Request, parse_pinned, topological, why};
use crate::error::Kind;
use crate::platform::{GpuIntent, Provenance};

fn cf(text: &str, depends: &[&str]) -> RepoDataRecord {
    record("conda-forge", text, depends, &[])
}

fn fails(request: &Request, channels: &[Vec<RepoDataRecord>]) -> String {
    match solve_synthetic(request, channels) {
        Ok(solution) => panic!("solved: {:?}", names(&solution)),
        Err(error) => {
            assert_eq!(error.kind(), Kind::Unsatisfiable);
            picture(&error)
        }
    }
}

/// A small world: two Pythons, a torch with CPU and CUDA builds for each.
fn world() -> Vec<RepoDataRecord> {
    let mut all = vec![
        cf("python 3.11.9 h1_0", &["__glibc >=2.17,<3.0.a0"]),
        cf("python 3.12.5 h1_0", &["__glibc >=2.17,<3.0.a0"]),
        record("conda-forge", "cuda-version 12.6 h1_3", &[], &["__cuda >=12"]),
        record("conda-forge", "cuda-version 11.8 h1_3", &[], &["__cuda >=11"]),
        cf("numpy 1.26.4 py311_0", &["python >=3.11,<3.12.0a0"]),
        cf("numpy 2.1.0 py312_0", &["python >=3.12,<3.13.0a0"]),
        cf("pytorch-gpu 2.7.0 cuda126_300", &["pytorch 2.7.0 cuda*300"]),
        cf("pytorch-cpu 2.7.0 cpu_100", &["pytorch 2.7.0 cpu*100"]),
    ];
    for (python, tag) in [("python >=3.11,<3.12.0a0", "py311"), ("python >=3.12,<3.13.0a0", "py312")] {
        all.push(record(
            "conda-forge",
            &format!("pytorch 2.7.0 cuda126_{tag}_300"),
            &["__cuda", "cuda-version >=12.6,<13", python],
            &["pytorch-cpu <0.0a0"],
        ));
        all.push(record("conda-forge", &format!("pytorch 2.7.0 cpu_{tag}_100"), &[python], &["pytorch-gpu <0.0a0"]));
    }
    all
}

#[test]
fn auto_leaves_strict_only_where_flexible_helps_and_says_so() {
    let first = vec![record("first", "a 1.0", &["b >=2"], &[]), record("first", "b 1.0", &[], &[])];
    let second = vec![record("second", "b 2.0", &[], &[]), record("second", "c 1.0", &[], &[])];
    let mut wanted = request(linux(&[]), &["a"]);
    wanted.channels = vec!["first".into(), "second".into()];
    let solution = solve_synthetic(&wanted, &[first.clone(), second.clone()]).expect("a solution");
    assert!(solution.priority_fell_back);
    assert_eq!(solution.priority_used, PriorityChoice::Flexible);
    assert_eq!(names(&solution), ["b 2.0 0", "a 1.0 0"]);
    insta::assert_snapshot!(solution.lints[0].message, @"there is no solution with strict channel priority; flexible priority was used: `b (from second)` would not be allowed by strict");

    wanted.specs = vec![spec("b")];
    let solution = solve_synthetic(&wanted, &[first.clone(), second.clone()]).expect("a solution");
    assert!(!solution.priority_fell_back);
    assert_eq!(names(&solution), ["b 1.0 0"]);
    wanted.priority = PriorityChoice::Disabled;
    assert_eq!(names(&solve_synthetic(&wanted, &[first.clone(), second.clone()]).expect("a solution")), ["b 2.0 0"]);

    wanted.priority = PriorityChoice::Strict;
    wanted.specs = vec![spec("a")];
    insta::assert_snapshot!(fails(&wanted, &[first, second]), @r"
    exit 3: no build of `a` can be used here
      - `a` 1.0 needs `b >=2`, but strict channel priority allows that name only from `first`
    hint: it solves with `--channel-priority flexible`: packages may then come from several channels
    ");
}

#[test]
fn a_channel_in_a_spec_also_means_its_mirror() {
    let mut mirrored = record("conda-forge", "a 1.0", &[], &[]);
    mirrored.channel = Some("file:///mirror/conda-forge/".into());
    let other = record("other", "a 2.0", &[], &[]);
    let mut wanted = request(linux(&[]), &["conda-forge::a"]);
    wanted.channels = vec!["other".into(), "file:///mirror/conda-forge".into()];
    let solution = solve_synthetic(&wanted, &[vec![other.clone()], vec![mirrored.clone()]]).expect("a solution");
    assert_eq!(names(&solution), ["a 1.0 0"]);
    wanted.specs = vec![spec("elsewhere::a")];
    insta::assert_snapshot!(fails(&wanted, &[vec![other.clone()], vec![mirrored.clone()]]), @r"
    exit 3: no build of `a` can be used here
      - `a` 1.0, 2.0 (2 builds) are in another channel than the requested `elsewhere`
    hint: it solves with `elsewhere::a` from any channel, as `a 2.0 0` from `other`
    hint: strict and flexible channel priority were both tried
    ");
    wanted.specs = vec![spec("other::a"), spec("conda-forge::a")];
    insta::assert_snapshot!(fails(&wanted, &[vec![other], vec![mirrored]]), @r"
    exit 3: `a` is requested from two channels
      - `other::a` and `conda-forge::a` cannot both hold
    hint: name one channel for it
    ");
}

struct World;

impl Lookup for World {
    fn names(&self) -> Vec<String> {
        ["numpy", "numba", "pytorch", "pytorch-gpu"].map(str::to_owned).to_vec()
    }
    fn other_channels(&self, name: &str) -> Vec<String> {
        if name == "bwa" { vec!["bioconda".into()] } else { Vec::new() }
    }
    fn other_subdirs(&self, name: &str) -> Vec<Subdir> {
        if name == "pywin32" { vec![Subdir::Win64] } else { Vec::new() }
    }
}

#[test]
fn a_name_that_is_nowhere_gets_a_pointer() {
    let mut wanted = request(linux(&[]), &["nunpy"]);
    wanted.lookup = Some(Arc::new(World));
    insta::assert_snapshot!(fails(&wanted, &[world()]), @r"
    exit 3: no package `nunpy` in `conda-forge` for linux-64
    hint: did you mean `numpy`?
    ");
    for (name, hint) in [
        ("bwa", "`bwa` exists in channel `bioconda`: add `-c bioconda`"),
        ("pywin32", "`pywin32` exists in these channels only for `win-64`"),
        (
            "einops-exts",
            "if it is a project of the Python package index: 'pypi::einops-exts', or a line under `pip:` of the environment.yml",
        ),
        ("torch", "the conda package is called `pytorch`"),
    ] {
        wanted.specs = vec![spec(name)];
        let shown = fails(&wanted, &[world()]);
        assert!(shown.contains(hint), "{shown}");
    }
}

#[test]
fn all_missing_names_are_told_at_once() {
    let mut wanted = request(linux(&[]), &["nunpy", "python=3.11", "torch", "numpy=1.27", "nowhere-at-all"]);
    wanted.lookup = Some(Arc::new(World));
    insta::assert_snapshot!(fails(&wanted, &[world()]), @r"
    exit 3: no packages `nunpy`, `torch` and `nowhere-at-all` in `conda-forge` for linux-64
      - also, no build of `numpy 1.27.*` in `conda-forge` for linux-64
      - the channels have `numpy` 1.26.4, 2.1.0
    hint: `nunpy`: did you mean `numpy`?
    hint: `torch`: the conda package is called `pytorch`
    hint: `nowhere-at-all`: if it is a project of the Python package index: 'pypi::nowhere-at-all', or a line under `pip:` of the environment.yml
    ");
}

#[test]
fn a_choice_of_names_and_a_single_build_read_well() {
    let records = vec![cf("abcdef 1.0", &[]), cf("abcdeg 1.0", &[]), cf("abcdeh 1.0", &[])];
    let mut wanted = request(linux(&[]), &["abcdex"]);
    let shown = fails(&wanted, std::slice::from_ref(&records));
    assert!(shown.ends_with("hint: did you mean `abcdef`, `abcdeg` or `abcdeh`?"), "{shown}");
    wanted.specs = vec![spec("abcdef=1.0=other")];
    let shown = fails(&wanted, std::slice::from_ref(&records));
    assert!(shown.contains("the version is there, but its only build, `0`, does not fit"), "{shown}");
    wanted.specs = vec![spec("abcdef=2.0")];
    insta::assert_snapshot!(fails(&wanted, &[records]), @r"
    exit 3: no build of `abcdef 2.0.*` in `conda-forge` for linux-64
      - the channels have `abcdef` 1.0
    hint: it solves with `abcdef=1.0`
    ");
}

#[test]
fn strict_priority_refuses_a_version_that_only_a_later_channel_has() {
    let first = vec![record("first", "bar 1.0", &[], &[])];
    let second = vec![record("second", "bar 2.0", &[], &[])];
    let mut wanted = request(linux(&[]), &["bar>=2"]);
    wanted.channels = vec!["first".into(), "second".into()];
    wanted.priority = PriorityChoice::Strict;
    insta::assert_snapshot!(fails(&wanted, &[first.clone(), second.clone()]), @r"
    exit 3: no build of `bar >=2` can be used here
      - `bar` 2.0 is hidden: strict channel priority allows this name only from `first`
    hint: it solves with `--channel-priority flexible`: packages may then come from several channels
    hint: it solves with `bar >=2` left free, as `bar 1.0 0`
    ");
    wanted.priority = PriorityChoice::Auto;
    let solution = solve_synthetic(&wanted, &[first, second]).expect("a solution");
    assert!(solution.priority_fell_back);
    assert_eq!(names(&solution), ["bar 2.0 0"]);
}

#[test]
fn a_version_or_build_that_is_nowhere_names_the_nearest() {
    let mut wanted = request(linux(&[]), &["numpy=1.27"]);
    insta::assert_snapshot!(fails(&wanted, &[world()]), @r"
    exit 3: no build of `numpy 1.27.*` in `conda-forge` for linux-64
      - the channels have `numpy` 1.26.4, 2.1.0
    hint: it solves with `numpy=2.1.0` or `numpy=1.26.4`
    ");
    wanted.specs = vec![spec("pytorch=2.7=*rocm*")];
    insta::assert_snapshot!(fails(&wanted, &[world()]), @r"
    exit 3: no build of `pytorch ==2.7 *rocm*` in `conda-forge` for linux-64
      - the version is there, but none of its 4 builds fits; the newest are `cuda126_py312_300`, `cuda126_py311_300` and `cpu_py312_100`
    hint: it solves with `pytorch ==2.7 *rocm*` left free, as `pytorch 2.7.0 cpu_py312_100`
    ");
}

#[test]
fn what_the_machine_lacks_is_said_first_and_proven() {
    let mut wanted = request(linux(&[]), &["python=3.11", "pytorch-gpu"]);
    insta::assert_snapshot!(fails(&wanted, &[world()]), @r"
    exit 3: no build of `pytorch-gpu` can be used here
      - `pytorch-gpu` 2.7.0 needs `pytorch ==2.7.0 cuda*300`, which needs `__cuda`, which this machine does not have: no CUDA driver was found or assumed
    hint: only `__cuda` is missing: to solve for a machine with a CUDA driver add `--cuda 12.6`
    ");
    wanted.target = linux(&["__cuda=11.4=0"]);
    insta::assert_snapshot!(fails(&wanted, &[world()]), @r"
    exit 3: no build of `pytorch-gpu` can be used here
      - `pytorch-gpu` 2.7.0 needs `pytorch ==2.7.0 cuda*300`, which needs `cuda-version >=12.6,<13`, which needs `__cuda >=12`, but the driver allows only CUDA 11.4
    hint: it solves for a driver that allows CUDA 12.6; this one allows 11.4: update the driver, or solve for another machine with `--cuda 12.6`
    ");
    wanted.target = linux(&["__cuda=12.4=0"]);
    wanted.gpu = GpuIntent::None;
    insta::assert_snapshot!(fails(&wanted, &[world()]), @r"
    exit 3: no build of `pytorch-gpu` can be used here
      - `pytorch-gpu` 2.7.0 needs `pytorch ==2.7.0 cuda*300`, which needs `__cuda`, which `--gpu none` removes
    hint: it solves with a CUDA 12.6 driver: leave out `--gpu none`, or do not ask for a GPU build
    ");
    // A CUDA driver would not help here, so nobody may say so.
    wanted.gpu = GpuIntent::Auto;
    wanted.target = linux(&[]);
    wanted.specs.push(spec("numpy=2"));
    assert!(!fails(&wanted, &[world()]).contains("--cuda"));
}

#[test]
fn glibc_and_processor_too_old() {
    let records = vec![cf("a 1.0", &["__glibc >=2.28,<3.0.a0"]), cf("b 1.0", &["__archspec 1 x86_64_v4"])];
    let mut wanted = request(target(Subdir::Linux64, &["__glibc=2.17=0", "__archspec=1=x86_64_v3"]), &["a"]);
    insta::assert_snapshot!(fails(&wanted, std::slice::from_ref(&records)), @r"
    exit 3: no build of `a` can be used here
      - `a` 1.0 needs `__glibc >=2.28,<3.0.a0`, but this machine has glibc 2.17
    hint: it solves for a system with glibc 2.28 (this machine has 2.17): to solve for such a machine add `--virtual-package __glibc=2.28`; for this one, ask for older versions
    ");
    wanted.specs = vec![spec("b")];
    insta::assert_snapshot!(fails(&wanted, &[records]), @r"
    exit 3: no build of `b` can be used here
      - `b` 1.0 needs `__archspec ==1 x86_64_v4`, but this processor is another one
    hint: it solves for a processor of the kind `x86_64_v4`: `--virtual-package __archspec=1=x86_64_v4`
    ");
}

#[test]
fn requests_that_clash_with_each_other() {
    let mut wanted = request(linux(&["__cuda=12.6=0"]), &["python=3.11", "numpy=2"]);
    insta::assert_snapshot!(fails(&wanted, &[world()]), @r"
    exit 3: no build of `numpy 2.*` can be used here
      - `numpy` 2.1.0 needs `python >=3.12,<3.13.0a0`, but the request is `python 3.11.*`
    hint: it solves with `python 3.11.*` left free, as `python 3.12.5 h1_0`
    hint: it solves with `numpy 2.*` left free, as `numpy 1.26.4 py311_0`
    ");
    wanted.specs = vec![spec("pytorch-gpu"), spec("pytorch=*=cpu*")];
    insta::assert_snapshot!(fails(&wanted, &[world()]), @r"
    exit 3: no build of `pytorch-gpu` can be used here
      - `pytorch-gpu` 2.7.0 needs `pytorch ==2.7.0 cuda*300`, but the request is `pytorch * cpu*`
    hint: it solves with `pytorch * cpu*` left free, as `pytorch 2.7.0 cuda126_py312_300`
    ");
    // Two packages that agree with the request, but not with each other.
    let records = vec![cf("a 1.0", &["c <2"]), cf("b 1.0", &["c >=2"]), cf("c 1.0", &[]), cf("c 2.0", &[])];
    wanted.specs = vec![spec("a"), spec("b")];
    insta::assert_snapshot!(fails(&wanted, &[records]), @r"
    exit 3: `a` and `b` need different builds of `c`
      - the requested `a` needs `c <2`
      - the requested `b` needs `c >=2`
    ");
}

#[test]
fn a_clash_that_only_a_search_can_see_names_the_smallest_set() {
    // Three packages for two slots.
    let mut records = vec![cf("innocent 1.0", &[])];
    for package in 1..=3 {
        for slot in 1..=2 {
            records.push(cf(&format!("p{package} {slot}.0"), &[&format!("slot{slot} =={package}")]));
            records.push(cf(&format!("slot{slot} {package}"), &[]));
        }
    }
    let wanted = request(linux(&[]), &["innocent", "p1", "p2", "p3"]);
    let shown = fails(&wanted, &[records]);
    assert!(shown.starts_with("exit 3: `p1`, `p2` and `p3` cannot be installed together\n"), "{shown}");
    assert!(shown.lines().count() < 20, "{shown}");
}

#[test]
fn pins_hold_and_are_named() {
    let mut wanted = request(linux(&[]), &["numpy"]);
    wanted.pinned_specs = parse_pinned("# ours\n\nnumpy <2  # until the port\n", "conda-meta/pinned").expect("pins");
    assert_eq!(names(&solve_synthetic(&wanted, &[world()]).expect("a solution")), ["python 3.11.9 h1_0", "numpy 1.26.4 py311_0"]);
    wanted.specs.push(spec("python=3.12"));
    insta::assert_snapshot!(fails(&wanted, &[world()]), @r"
    exit 3: no build of `numpy` can be used here
      - `numpy` 1.26.4 needs `python >=3.11,<3.12.0a0`, but the request is `python 3.12.*`
      - `numpy` 2.1.0 is ruled out: `numpy <2` is set by conda-meta/pinned line 3
    hint: it solves without the pin of conda-meta/pinned line 3
    hint: it solves with `python 3.12.*` left free, as `python 3.11.9 h1_0`
    ");
    let error = parse_pinned("numpy <2\n  python =>3\n", "conda-meta/pinned").expect_err("not a spec");
    assert_eq!(error.places()[0].line_column(), (2, 3));
    // A constraint does not ask for the package.
    wanted.specs = vec![spec("python")];
    wanted.pinned_specs = vec![PinnedSpec { spec: spec("numpy <2"), source: "a pin".into() }];
    assert_eq!(names(&solve_synthetic(&wanted, &[world()]).expect("a solution")), ["python 3.12.5 h1_0"]);
    wanted.pinned_specs.clear();
    wanted.pins = world().into_iter().filter(|record| record.package_record.version.to_string() == "3.11.9").collect();
    assert_eq!(names(&solve_synthetic(&wanted, &[world()]).expect("a solution")), ["python 3.11.9 h1_0"]);
    wanted.specs = vec![spec("numpy=2")];
    insta::assert_snapshot!(fails(&wanted, &[world()]), @r"
    exit 3: no build of `numpy 2.*` can be used here
      - `numpy` 2.1.0 needs `python >=3.12,<3.13.0a0`, but `python 3.11.9 h1_0` is set by a package that must stay as it is
    hint: it solves if `python 3.11.9 h1_0` may change
    hint: it solves with `numpy 2.*` left free, as `numpy 1.26.4 py311_0`
    ");
}

#[test]
fn locked_records_stay_unless_told_otherwise() {
    let mut wanted = request(linux(&[]), &["numpy"]);
    wanted.locked =
        world().into_iter().filter(|record| ["3.11.9", "1.26.4"].contains(&record.package_record.version.to_string().as_str())).collect();
    let solved = |request: &Request| names(&solve_synthetic(request, &[world()]).expect("a solution"));
    assert_eq!(solved(&wanted), ["python 3.11.9 h1_0", "numpy 1.26.4 py311_0"]);
    wanted.update = Favor::Newest;
    assert_eq!(solved(&wanted), ["python 3.12.5 h1_0", "numpy 2.1.0 py312_0"]);
    wanted.update = Favor::AllBut([PackageName::new_unchecked("python"), PackageName::new_unchecked("numpy")].into());
    assert_eq!(solved(&wanted), ["python 3.12.5 h1_0", "numpy 2.1.0 py312_0"]);
}

#[test]
fn exclude_newer_cuts_and_names_the_date_that_would_do() {
    let records = vec![dated(cf("a 1.0", &["u"]), "2023-01-10"), dated(cf("a 2.0", &["u"]), "2024-06-01"), cf("u 1.0", &[])];
    let mut wanted = request(linux(&[]), &["a"]);
    wanted.exclude_newer = Some("2024-01-01T00:00:00Z".parse().expect("a moment"));
    let solution = solve_synthetic(&wanted, std::slice::from_ref(&records)).expect("a solution");
    assert_eq!(names(&solution), ["u 1.0 0", "a 1.0 0"]);
    insta::assert_snapshot!(solution.lints[0].message, @"`u` has no date in the repodata, so `--exclude-newer` lets it through");
    wanted.specs = vec![spec("a=2")];
    insta::assert_snapshot!(fails(&wanted, &[records]), @r"
    exit 3: no build of `a 2.*` can be used here
      - `a` 2.0 is newer than `--exclude-newer` allows
    hint: it solves with a later cutoff: `--exclude-newer 2024-06-02`
    hint: it solves with `a 2.*` left free, as `a 1.0 0`
    ");
}

#[test]
fn timestamps_in_seconds_and_milliseconds_mean_the_same() {
    for stamp in ["1717200000", "1717200000000"] {
        let text = serde_json::to_string(&cf("a 1.0", &[])).expect("json");
        let text = text.replacen('{', &format!("{{\"timestamp\":{stamp},"), 1);
        let record: RepoDataRecord = serde_json::from_str(&text).expect("a record");
        let mut wanted = request(linux(&[]), &["a"]);
        wanted.exclude_newer = Some("2024-06-01T00:00:01Z".parse().expect("a moment"));
        solve_synthetic(&wanted, &[vec![record.clone()]]).expect("a solution");
        wanted.exclude_newer = Some("2024-05-31T00:00:00Z".parse().expect("a moment"));
        fails(&wanted, &[vec![record]]);
    }
}

fn line(request: &Request) -> String {
    solve_synthetic(request, &[world()]).expect("a solution").gpu.line().expect("a line")
}

#[test]
fn the_gpu_outcome_says_what_and_why() {
    let mut wanted = request(linux(&["__cuda=12.8=0"]), &["python=3.11", "pytorch"]);
    insta::assert_snapshot!(line(&wanted), @"pytorch 2.7.0: CUDA 12.6 build; this machine's driver allows up to 12.8");
    wanted.target.virtual_packages.last_mut().expect("cuda").provenance = Provenance::Assumed;
    wanted.target.virtual_packages.last_mut().expect("cuda").source = "--cuda".into();
    insta::assert_snapshot!(line(&wanted), @"pytorch 2.7.0: CUDA 12.6 build; the driver assumed by `--cuda 12.8` allows up to 12.8");
    wanted.gpu = GpuIntent::None;
    insta::assert_snapshot!(line(&wanted), @"pytorch 2.7.0: CPU build, because `--gpu none` removes `__cuda` from the solve");
    wanted.gpu = GpuIntent::Auto;
    wanted.target = linux(&[]);
    insta::assert_snapshot!(line(&wanted), @"pytorch 2.7.0: CPU build, because `__cuda` is absent: add `--cuda 12.6` to pin a GPU build from this machine");
    wanted.target = linux(&["__cuda=11.4=0"]);
    insta::assert_snapshot!(line(&wanted), @"pytorch 2.7.0: CPU build, although `__cuda=11.4` is there, because no CUDA build fits the request: `pytorch` 2.7.0 needs `cuda-version >=12.6,<13`, which needs `__cuda >=12`, but the driver allows only CUDA 11.4");
    wanted.specs.push(spec("pytorch-cpu"));
    insta::assert_snapshot!(line(&wanted), @"pytorch 2.7.0: CPU build, because the request asks for it (`pytorch-cpu`)");
    wanted.specs = vec![spec("python")];
    let solution = solve_synthetic(&wanted, &[world()]).expect("a solution");
    assert_eq!((solution.gpu.variant, solution.gpu.line()), (GpuVariant::None, None));
}

#[test]
fn require_refuses_a_cpu_build_and_names_what_loses() {
    let mut wanted = request(linux(&["__cuda=12.8=0"]), &["python=3.11", "pytorch"]);
    wanted.gpu = GpuIntent::Require;
    assert_eq!(solve_synthetic(&wanted, &[world()]).expect("a solution").gpu.variant, GpuVariant::Cuda);
    wanted.target = linux(&[]);
    insta::assert_snapshot!(fails(&wanted, &[world()]), @r"
    exit 3: `--gpu require` refuses this solution: `pytorch 2.7.0 cpu_py311_100` is a CPU build
      - `pytorch * *cuda*` cannot be met
      - no build of `pytorch` can be used here
      - `pytorch` 2.7.0 (2 builds) need `__cuda`, which this machine does not have: no CUDA driver was found or assumed
      - `pytorch` 2.7.0 (2 builds) are ruled out: `pytorch * *cuda*` is set by `--gpu require`
    hint: only `__cuda` is missing: to solve for a machine with a CUDA driver add `--cuda 12.6`
    ");
    wanted.target = linux(&["__cuda=12.8=0"]);
    wanted.specs.push(spec("pytorch-cpu"));
    insta::assert_snapshot!(fails(&wanted, &[world()]), @r"
    exit 3: `--gpu require` refuses this solution: `pytorch 2.7.0 cpu_py311_100` is a CPU build
      - the request asks for the CPU build: `pytorch-cpu`
      - `pytorch * *cuda*` cannot be met
      - no build of `pytorch-cpu` can be used here
      - `pytorch-cpu` 2.7.0 needs `pytorch ==2.7.0 cpu*100`, but `pytorch * *cuda*` is set by `--gpu require`
    hint: leave out `pytorch-cpu`, or `--gpu require`
    ");
    // A newer CPU build would win: `require` takes the older CUDA build, and says so.
    let mut more = world();
    more.push(cf("pytorch 2.8.0 cpu_py311_100", &["python >=3.11,<3.12.0a0"]));
    wanted.specs.pop();
    let solution = solve_synthetic(&wanted, std::slice::from_ref(&more)).expect("a solution");
    assert_eq!(solution.gpu.packages[0].build, "cuda126_py311_300");
    assert_eq!(solution.gpu.constraints, ["pytorch * *cuda*"]);
    wanted.gpu = GpuIntent::Auto;
    insta::assert_snapshot!(solve_synthetic(&wanted, &[more]).expect("a solution").gpu.line().expect("a line"), @"pytorch 2.8.0: CPU build, although `__cuda=12.8` is there, because the newest CUDA build that fits is 2.7.0: for the CUDA build add `--gpu require`, or ask for `pytorch=*=*cuda*`");
}

#[test]
fn lints_are_found_and_can_be_silenced() {
    let torch = |text: &str, depends: &[&str]| record("pytorch", text, depends, &[]);
    let records = vec![
        torch("pytorch 2.5.1 py3.11_cpu_0", &["pytorch-mutex 1.0 cpu"]),
        torch("pytorch-mutex 1.0 cpu", &[]),
        torch("cpuonly 2.0 0", &["pytorch-mutex 1.0 cpu"]),
    ];
    let others =
        vec![cf("torchvision 0.20.0 cuda118_py311_0", &["pytorch"]), cf("cudatoolkit 11.8.0 h1_0", &[]), cf("pytorch-cuda 11.8 h1_0", &[])];
    let mut wanted = request(linux(&[]), &["pytorch", "torchvision", "cpuonly", "cudatoolkit", "pytorch-cuda"]);
    wanted.channels = vec!["pytorch".into(), "conda-forge".into()];
    wanted.pip_names = vec!["torch".into()];
    let solution = solve_synthetic(&wanted, &[records.clone(), others.clone()]).expect("a solution");
    let text: Vec<String> = solution.lints.iter().map(|lint| format!("{}: {}", lint.code, lint.message)).collect();
    insta::assert_snapshot!(text.join("\n"), @r"
    dead-pytorch-channel: `pytorch-mutex`, `cpuonly` and `pytorch` come from the `pytorch` channel, which ended with pytorch 2.5: there will be no newer versions and no fixes
    pytorch-cuda: `pytorch-cuda` exists only for the `pytorch` channel
    cudatoolkit: `cudatoolkit` ended with CUDA 11.8: since CUDA 12 the toolkit is many packages
    mixed-torch-channels: packages of the torch family come from different channels: `torchvision` from `conda-forge`, `pytorch` from `pytorch`; they are built against different torch libraries
    cpuonly-with-gpu: `cpuonly` makes torch a CPU build, and the environment also has `pytorch-cuda` and `cudatoolkit`
    torch-twice: `torch` under `pip:` would be installed over the torch that conda installs
    ");
    for lint in &solution.lints {
        assert!(super::lint::CODES.iter().any(|(code, _)| *code == lint.code), "{}", lint.code);
        assert!(!lint.hints.is_empty());
    }
    wanted.silence = solution.lints.iter().map(|lint| lint.code.to_owned()).collect();
    assert_eq!(solve_synthetic(&wanted, &[records, others]).expect("a solution").lints, []);
}

#[test]
fn preflight_follows_the_tables() {
    use super::preflight::{Facts, bundled, check, floor, older};
    assert_eq!((floor(11), floor(12), floor(13)), (Some("450.80.02"), Some("525.60.13"), Some("580.65.06")));
    assert_eq!(bundled((12, 4)), Some("550.54.14"));
    assert_eq!(
        (older("550.54.14", "560.28.03"), older("580.65.06", "580.65.06"), older("1000.1", "580.2"), older("x", "1")),
        (Some(true), Some(false), Some(false), None)
    );
    let judge = |toolkit: &str, cuda: Option<&str>, arch: Option<&str>, driver: Option<&str>| -> Vec<String> {
        let records = vec![cf(&format!("cuda-version {toolkit} h1_3"), &[])];
        let (cuda, arch) = (cuda.map(|text| text.parse().expect("a version")), arch.map(|text| text.parse().expect("a version")));
        check(&Facts { records: &records, cuda: cuda.as_ref(), cuda_arch: arch.as_ref(), driver })
            .iter()
            .map(|lint| lint.code.to_owned())
            .collect()
    };
    assert_eq!(judge("12.4", Some("12.4"), None, None), [""; 0]);
    assert_eq!(judge("11.8", Some("12.4"), None, None), [""; 0]);
    assert_eq!(judge("12.9", Some("12.4"), None, None), ["driver-minor-compatibility"]);
    assert_eq!(judge("13.0", Some("12.9"), None, None), ["driver-too-old"]);
    assert_eq!(judge("12.6", Some("12.4"), None, Some("550.54.14")), ["driver-minor-compatibility"]);
    assert_eq!(judge("12.6", Some("12.4"), None, Some("520.61.05")), ["driver-too-old"]);
    assert_eq!(judge("12.6", None, None, Some("580.65.06")), [""; 0]);
    assert_eq!(judge("13.0", Some("13.0"), Some("7.0"), None), ["card-too-old"]);
    assert_eq!(judge("12.6", Some("13.0"), Some("12.0"), None), ["card-too-new"]);
    assert_eq!(judge("12.8", Some("13.0"), Some("12.0"), None), [""; 0]);
    assert_eq!(judge("11.7", Some("13.0"), Some("9.0"), None), ["card-too-new"]);
    assert_eq!(judge("12.6", None, None, None), [""; 0]);
}

#[test]
fn faulty_records_are_stepped_around_and_named() {
    let mut twin = cf("a 1.0", &[]);
    twin.package_record.depends = vec!["b".into()];
    let mut nested = cf("a 4.0", &[]);
    nested.package_record.depends = vec!["b[when=\"c[when='d']\"]".into()];
    let mut strange = cf("a 5.0", &[]);
    strange.package_record.constrains = vec!["x >=1.*.*,,<".into()];
    let records = vec![
        cf("a 1.0", &[]),
        twin,
        cf("a 2.0", &["b >>=1 ]["]),
        cf("a 3.0", &["\u{0}\u{7f}"]),
        nested,
        strange,
        cf("a 6.0", &["=1.0"]),
        cf("a 7.0", &[""]),
    ];
    let wanted = request(linux(&[]), &["a"]);
    let solution = solve_synthetic(&wanted, std::slice::from_ref(&records)).expect("a solution");
    assert_eq!(names(&solution), ["a 1.0 0"]);
    assert_eq!(solution.warnings.len(), 7, "{:#?}", solution.warnings);
    assert!(solution.warnings.iter().all(|warning| warning.starts_with("`a-")), "{:#?}", solution.warnings);
    let mut newer = wanted;
    newer.specs = vec![spec("a=2")];
    let shown = fails(&newer, &[records]);
    assert!(shown.contains("`a-2.0-0.conda` of `conda-forge` is left out"), "{shown}");
}

#[test]
fn circles_long_chains_and_absurd_constraints_do_not_hurt() {
    let mut records =
        vec![cf("a 1.0", &["b"]), cf("b 1.0", &["c"]), cf("c 1.0", &["a"]), cf("selfish 1.0", &["selfish"]), cf("never 1.0", &["a >2,<1"])];
    for step in 0..3000 {
        records.push(cf(&format!("n{step} 1.0"), &[&format!("n{}", step + 1)]));
    }
    let mut wanted = request(linux(&[]), &["a", "selfish"]);
    assert_eq!(solve_synthetic(&wanted, std::slice::from_ref(&records)).expect("a solution").records.len(), 4);
    wanted.specs = vec![spec("never")];
    insta::assert_snapshot!(fails(&wanted, std::slice::from_ref(&records)), @r"
    exit 3: no build of `never` can be used here
      - `never` 1.0 needs `a >2,<1`, of which no build exists
    ");
    wanted.specs = vec![spec("n0")];
    insta::assert_snapshot!(fails(&wanted, std::slice::from_ref(&records)), @r"
    exit 3: no build of `n0` can be used here
      - `n0` 1.0 needs `n1`, which needs `n2`, which needs `n3`, which after 2996 more steps needs `n3000`, which no channel of this request has
    ");
    records.push(cf("n3000 1.0", &[]));
    let solution = solve_synthetic(&wanted, &[records]).expect("a solution");
    assert_eq!(solution.records.len(), 3001);
    assert_eq!(names(&solution)[0], "n3000 1.0 0");
}

#[test]
fn a_solve_can_be_stopped() {
    let mut wanted = request(linux(&[]), &["python"]);
    let token = CancellationToken::new();
    token.cancel();
    wanted.cancel = Some(token);
    assert_eq!(solve_synthetic(&wanted, &[world()]).expect_err("stopped").kind(), Kind::Interrupted);
    wanted.cancel = None;
    wanted.timeout = Some(Duration::ZERO);
    let error = solve_synthetic(&wanted, &[world()]).expect_err("out of time");
    assert_eq!(error.kind(), Kind::Failure);
    assert!(error.message().starts_with("no solution was found within"));
}

#[test]
fn a_spec_must_name_one_package() {
    let mut wanted = request(linux(&[]), &[]);
    wanted.specs = vec![
        rattler_conda_types::MatchSpec::from_str("py*", rattler_conda_types::ParseMatchSpecOptions::lenient().with_exact_names_only(false))
            .expect("a spec"),
    ];
    assert_eq!(solve_synthetic(&wanted, &[world()]).expect_err("no name").kind(), Kind::Usage);
    wanted.specs.clear();
    assert!(solve_synthetic(&wanted, &[world()]).expect("nothing to do").records.is_empty());
}

#[test]
fn records_are_ordered_by_need_then_name_whatever_the_input_order() {
    let mut records = vec![
        cf("pip 24.0", &["python >=3.8", "setuptools"]),
        cf("python 3.11.9", &["pip", "zlib", "__glibc >=2.17"]),
        cf("setuptools 70", &["python"]),
        cf("zlib 1.3", &[]),
        cf("b 1", &["python"]),
        cf("a 1", &["python", "python", "a"]),
    ];
    let order = |records: &[RepoDataRecord]| -> Vec<String> {
        topological(records.to_vec()).iter().map(|record| record.package_record.name.as_normalized().to_owned()).collect()
    };
    let expected = ["zlib", "python", "a", "b", "setuptools", "pip"];
    for _ in 0..records.len() {
        assert_eq!(order(&records), expected);
        records.rotate_left(1);
    }
    records.reverse();
    assert_eq!(order(&records), expected);
}

#[test]
fn why_shows_the_paths() {
    let records = vec![
        cf("app 1.0", &["web >=2", "core"]),
        cf("web 2.1", &["core >=1,<2", "tls"]),
        cf("core 1.5", &["tls"]),
        cf("tls 3.0", &["web"]),
        cf("tool 0.1", &["core"]),
    ];
    let requested = [spec("app"), spec("tool=0.1")];
    let shown = why(&records, &requested, "TLS").expect("a reason");
    insta::assert_snapshot!(shown.text(), @r"
    tls 3.0 0
    ├─ requested: `app` (app 1.0)
    │  ╰─ needs `core` (core 1.5)
    │     ╰─ needs `tls`
    ├─ requested: `app` (app 1.0)
    │  ╰─ needs `web >=2` (web 2.1)
    │     ╰─ needs `tls`
    ├─ requested: `tool 0.1.*` (tool 0.1)
    │  ╰─ needs `core` (core 1.5)
    │     ╰─ needs `tls`
    ╰─ requested: `app` (app 1.0)
       ╰─ needs `web >=2` (web 2.1)
          ╰─ needs `core >=1,<2` (core 1.5)
             ╰─ needs `tls`
    ");
    assert_eq!(shown.shortest().expect("a path").len(), 3);
    assert!(!shown.requested && !shown.truncated);
    assert_eq!(why(&records, &requested, "app").expect("a reason").paths.len(), 1);
    insta::assert_snapshot!(why(&records, &[], "tls").expect("a reason").text(), @r"
    tls 3.0 0
      nothing that was requested needs it; it is needed by `core` and `web`
    ");
    insta::assert_snapshot!(picture(&why(&records, &requested, "wbe").expect_err("absent")), @r"
    exit 1: `wbe` is not in the environment
    hint: did you mean `web`?
    ");
    // A ladder has 2^20 paths: listed are the first, and it ends.
    let mut ladder = Vec::new();
    for step in 0..20 {
        for side in ["l", "r"] {
            ladder.push(cf(&format!("{side}{step} 1"), &[&format!("l{}", step + 1), &format!("r{}", step + 1)]));
        }
    }
    ladder.extend([cf("l20 1", &["end"]), cf("r20 1", &["end"]), cf("end 1", &[])]);
    let many = why(&ladder, &[spec("l0")], "end").expect("a reason");
    assert!(many.truncated && !many.paths.is_empty() && many.paths.len() <= 50);
}

/// A package nobody keeps a list of, with a CPU and a CUDA build whose build strings do not tell.
fn unlisted() -> Vec<RepoDataRecord> {
    vec![
        cf("simulator 3.1 h111_1", &["__cuda >=12", "cuda-version >=12.4,<13"]),
        cf("simulator 3.1 h222_0", &[]),
        cf("app 1.0", &["simulator"]),
        record("conda-forge", "cuda-version 12.6 h1_3", &[], &["__cuda >=12"]),
    ]
}

#[test]
fn a_package_with_builds_of_both_kinds_needs_no_list() {
    let solved = |request: &Request| solve_synthetic(request, &[unlisted()]);
    for name in ["simulator", "app"] {
        let mut wanted = request(linux(&[]), &[name]);
        let solution = solved(&wanted).expect("a solution");
        assert_eq!(solution.gpu.variant, GpuVariant::Cpu);
        assert_eq!((solution.gpu.packages[0].name.as_str(), solution.gpu.packages[0].variant), ("simulator", GpuVariant::Cpu));
        let line = solution.gpu.line().expect("a line");
        // The solver is run again only for what was asked for.
        let (why, proven) = match name {
            "simulator" => ("because `__cuda` is absent: add `--cuda 12.4` to pin a GPU build from this machine", true),
            _ => (
                "as nothing that was asked for chooses between CUDA and CPU: to have a CUDA build where one fits add `--cuda 12.4 --gpu require`",
                false,
            ),
        };
        assert_eq!((line, solution.gpu.proven), (format!("simulator 3.1: CPU build, {why}"), proven));
        wanted.gpu = GpuIntent::Require;
        let shown = fails(&wanted, &[unlisted()]);
        assert!(shown.starts_with("exit 3: `--gpu require` refuses this solution: `simulator 3.1 h222_0` is a CPU build"), "{shown}");
        assert!(shown.contains("needs `__cuda >=12`, which this machine does not have"), "{shown}");
        wanted.target = linux(&["__cuda=12.6=0"]);
        let solution = solved(&wanted).expect("a solution");
        assert_eq!(solution.gpu.variant, GpuVariant::Cuda);
        assert_eq!(solution.gpu.packages[0].build, "h111_1");
    }
    // Here the solver would take the CPU build, its number being higher.
    let mut records = unlisted();
    records.push(cf("simulator 3.1 h333_7", &[]));
    let asked = request(linux(&["__cuda=12.6=0"]), &["simulator"]);
    let line = solve_synthetic(&asked, std::slice::from_ref(&records)).expect("a solution").gpu.line().expect("a line");
    assert!(line.contains("`simulator=3.1=h111_1`"), "{line}");
    let mut wanted = request(linux(&["__cuda=12.6=0"]), &["app"]);
    let solution = solve_synthetic(&wanted, std::slice::from_ref(&records)).expect("a solution");
    assert_eq!(solution.gpu.variant, GpuVariant::Cpu);
    let line = solution.gpu.line().expect("a line");
    assert!(line.contains("to have a CUDA build where one fits add `--gpu require`"), "{line}");
    wanted.gpu = GpuIntent::Require;
    let solution = solve_synthetic(&wanted, std::slice::from_ref(&records)).expect("a solution");
    assert_eq!((solution.gpu.packages[0].build.as_str(), solution.gpu.variant), ("h111_1", GpuVariant::Cuda));
    assert_eq!(solution.gpu.constraints, ["simulator (CUDA builds)"]);
}

#[test]
fn gpu_none_does_not_hide_a_cuda_build() {
    let records = vec![cf("pytorch 2.5.1 py311_cuda11.8_0", &["pytorch-cuda 11.8.*"]), cf("pytorch-cuda 11.8 h1_0", &[])];
    let mut wanted = request(linux(&[]), &["pytorch", "pytorch-cuda=11.8"]);
    wanted.gpu = GpuIntent::None;
    let solution = solve_synthetic(&wanted, &[records]).expect("a solution");
    assert_eq!(solution.gpu.line().expect("a line"), "pytorch 2.5.1: CUDA 11.8 build; although `--gpu none` was given");
    let lint = solution.lints.iter().find(|lint| lint.code == "gpu-none-cuda").expect("a lint");
    assert_eq!(
        lint.message,
        "`--gpu none` was given, and `pytorch 2.5.1 py311_cuda11.8_0` is a CUDA build: the request `pytorch-cuda 11.8.*` brings it in"
    );
    assert_eq!(lint.hints, ["leave out `pytorch-cuda 11.8.*`, or `--gpu none`"]);
}

#[test]
fn another_toolkit_is_advised_only_where_it_solves_and_was_left_open() {
    let hints = |specs: &[&str], records: Vec<RepoDataRecord>| -> Vec<String> {
        let solution = solve_synthetic(&request(linux(&["__cuda=12.0=0"]), specs), &[records]).expect("a solution");
        solution.preflight.iter().flat_map(|lint| lint.hints.clone()).collect()
    };
    let exact = "for an exact fit add `cuda-version=12.0` to the request";
    assert!(!hints(&["python", "pytorch"], world()).iter().any(|hint| hint.contains("cuda-version=")));
    let mut more = world();
    more.push(record("conda-forge", "cuda-version 12.0 h1_3", &[], &["__cuda >=12"]));
    more.push(cf("pytorch 2.7.0 cuda120_py312_200", &["__cuda", "cuda-version >=12.0,<12.1", "python >=3.12,<3.13.0a0"]));
    assert!(hints(&["python", "pytorch"], more.clone()).iter().any(|hint| hint == exact));
    assert!(!hints(&["python", "pytorch", "cuda-version=12.6"], more).iter().any(|hint| hint.contains("cuda-version=")));
}

#[test]
fn a_driver_is_advised_where_several_requests_lack_it() {
    let mut records = world();
    records.push(cf("other 1.0 cuda130_0", &["__cuda >=12.4"]));
    records.push(cf("third 1.0 cuda130_0", &["__cuda >=11", "python >=3.11,<3.12.0a0"]));
    for number in 1..8 {
        records.push(cf(&format!("old{number} 1.0"), &[&format!("__cuda >=10.{number}")]));
    }
    let all: Vec<String> = ["python=3.11", "pytorch-gpu", "other", "third"]
        .iter()
        .map(|text| (*text).to_owned())
        .chain((1..8).map(|n| format!("old{n}")))
        .collect();
    let all: Vec<&str> = all.iter().map(String::as_str).collect();
    let shown = fails(&request(linux(&[]), &all), &[records]);
    assert!(shown.contains("hint: only `__cuda` is missing: to solve for a machine with a CUDA driver add `--cuda 12.6`"), "{shown}");
}
