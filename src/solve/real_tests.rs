//! Over the real repodata of `../shared/data`; skipped, saying so, where that is absent.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use rattler_conda_types::Subdir;

use super::testing::{linux, names, picture, request, shared_data, solve_real, spec, target};
use super::{PriorityChoice, Request};
use crate::error::Kind;
use crate::platform::GpuIntent;

#[derive(serde::Deserialize)]
struct Row {
    id: String,
    channels: Vec<String>,
    specs: Vec<String>,
    platform: String,
    virtual_packages: Vec<String>,
    channel_priority: String,
    outcome: String,
    #[serde(default)]
    packages: Vec<String>,
}

fn row_request(row: &Row) -> Request {
    let virtuals: Vec<&str> = row.virtual_packages.iter().map(String::as_str).collect();
    let mut request = Request::new(target(row.platform.parse::<Subdir>().expect("a subdir"), &virtuals));
    request.specs = row.specs.iter().map(|text| spec(text)).collect();
    request.channels = row.channels.clone();
    request.priority = match row.channel_priority.as_str() {
        "strict" => PriorityChoice::Strict,
        "disabled" => PriorityChoice::Disabled,
        "flexible" => PriorityChoice::Flexible,
        other => panic!("{other}"),
    };
    request
}

fn rows() -> Option<Vec<Row>> {
    let path = shared_data()?.join("solves.json");
    Some(serde_json::from_str(&std::fs::read_to_string(path).expect("solves.json")).expect("rows"))
}

/// Every recorded request has the same outcome and the same set of packages as the reference solver.
#[test]
fn the_recorded_solves_come_out_the_same() {
    let Some(rows) = rows() else { return };
    assert_eq!(rows.len(), 25);
    let mut wrong = Vec::new();
    let mut slowest = Duration::ZERO;
    let mut times = String::new();
    for row in &rows {
        let request = row_request(row);
        let started = Instant::now();
        let solved = solve_real(&request);
        let took = started.elapsed();
        slowest = slowest.max(took);
        let solve_ms = solved.as_ref().map_or(0, |solution| solution.solve_ms);
        times.push_str(&format!("{:>6} ms ({solve_ms} ms in the solver)  {}\n", took.as_millis(), row.id));
        match (row.outcome.as_str(), solved) {
            ("solved", Ok(solution)) => {
                let got: BTreeSet<String> = names(&solution).iter().map(|name| name.replace(' ', "=")).collect();
                let want: BTreeSet<String> = row.packages.iter().cloned().collect();
                if got != want {
                    let more: Vec<_> = got.difference(&want).collect();
                    let less: Vec<_> = want.difference(&got).collect();
                    wrong.push(format!("{}: unexpected {more:?}, missing {less:?}", row.id));
                }
            }
            ("unsatisfiable", Err(error)) if error.kind() == Kind::Unsatisfiable => {}
            (_, Ok(_)) => wrong.push(format!("{}: solved, but should be {}", row.id, row.outcome)),
            (_, Err(error)) => wrong.push(format!("{}: {}", row.id, picture(&error))),
        }
    }
    #[allow(clippy::print_stdout)]
    {
        println!("{times}");
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

fn solved(
    target: crate::platform::Target,
    channels: &[&str],
    specs: &[&str],
    change: impl FnOnce(&mut Request),
) -> crate::error::Result<super::Solution> {
    let mut request = request(target, specs);
    request.channels = channels.iter().map(|channel| (*channel).to_owned()).collect();
    request.priority = PriorityChoice::Strict;
    change(&mut request);
    solve_real(&request)
}

fn fails(target: crate::platform::Target, channels: &[&str], specs: &[&str], change: impl FnOnce(&mut Request)) -> String {
    match solved(target, channels, specs, change) {
        Ok(solution) => panic!("solved: {:?}", names(&solution)),
        Err(error) => {
            assert_eq!(error.kind(), Kind::Unsatisfiable);
            picture(&error)
        }
    }
}

const TORCH: [&str; 3] = ["pytorch", "nvidia", "conda-forge"];
const FORGE: [&str; 1] = ["conda-forge"];

/// The four recorded requests without a solution, as they are told.
#[test]
fn the_recorded_failures_are_told_shortly() {
    if shared_data().is_none() {
        return;
    }
    let text = fails(linux(&["__cuda=12.4=0"]), &TORCH, &["python=3.12", "pytorch", "torchvision", "pytorch-cuda=12.4"], |_| {});
    insta::assert_snapshot!(text, @r"
    exit 3: no build of `torchvision` can be used here
      - `torchvision` 0.19.0, 0.20.0, 0.20.1 (3 builds) need `pillow >=5.3.0,!=8.3.*`, which needs `libjpeg-turbo >=3.1.4.1,<4.0a0`, but strict channel priority allows that name only from `pytorch`
      - `torchvision` 0.6.1 to 0.14.1 (37 builds) need `python >=3.7,<3.8.0a0`, `>=3.6,<3.7.0a0` or `>=3.5,<3.6.0a0`, of which no build exists
      - `torchvision` 0.6.1 to 0.13.1 (86 builds) need `cudatoolkit >=11.6,<11.7`, `>=10.2,<10.3` or `>=9.2,<9.3`, of which no build exists
      - `torchvision` 0.6.1 to 0.12.0 (71 builds) need `cudatoolkit >=11.5,<11.6` … `>=11.0,<11.1`, but strict channel priority allows that name only from `nvidia`
      - `torchvision` 0.8.2 to 0.10.1 (20 builds) need `jpeg <=9b`, of which no build exists
      - 138 more builds fail for 2 other reasons
    hint: it solves with `--channel-priority flexible`: packages may then come from several channels
    hint: it solves with `python 3.12.*` left free, as `python 3.10.14 hd12c33a_0_cpython`
    hint: the `pytorch` channel has nothing newer than pytorch 2.5: with `-c conda-forge` alone ask for `pytorch-gpu cuda-version=12.4` instead of `pytorch pytorch-cuda`
    ");
    let text = fails(linux(&[]), &FORGE, &["python=3.11", "numpy=1.19"], |_| {});
    insta::assert_snapshot!(text, @r"
    exit 3: no build of `numpy 1.19.*` in `conda-forge` for linux-64
      - the channels have `numpy` 1.18.5 to 2.5.2
    hint: the nearest versions of `numpy` are `1.18.5` and `1.22.0`
    hint: it solves with `numpy 1.19.*` left free, as `numpy 2.4.6 py311h2e04523_0`
    ");
    let text = fails(linux(&[]), &FORGE, &["python=3.11", "pytorch-gpu"], |_| {});
    insta::assert_snapshot!(text, @r"
    exit 3: no build of `pytorch-gpu` can be used here
      - `pytorch-gpu` 2.4.0 to 2.12.0 (27 builds) need `pytorch ==2.12.0 cuda*_mkl*300` … `==2.4.0 cuda118_py311h4ee7bbc_301`, which needs `__cuda`, which this machine does not have: no CUDA driver was found or assumed
      - `pytorch-gpu` 1.11.0 needs `pytorch ==1.11.0 cuda111py310h385535d_1`, which needs `python >=3.10,<3.11.0a0`, but the request is `python 3.11.*`
    hint: only `__cuda` is missing: to solve for a machine with a CUDA driver add `--cuda 12.9`
    hint: it solves with `python 3.11.*` left free, as `python 3.10.20 h267e890_1_cpython`
    ");
    let text = fails(linux(&["__cuda=12.4=0"]), &FORGE, &["python=3.11", "pytorch-gpu", "pytorch=*=cpu*"], |_| {});
    insta::assert_snapshot!(text, @r"
    exit 3: no build of `pytorch-gpu` can be used here
      - `pytorch-gpu` 1.11.0 to 2.12.0 (28 builds) need `pytorch ==2.12.0 cuda*_mkl*300` … `==1.11.0 cuda111py310h385535d_1`, but the request is `pytorch * cpu*`
    hint: it solves with `pytorch * cpu*` left free, as `pytorch 2.12.0 cuda129_mkl_py311_h49b8cc7_300`
    ");
}

/// Other failures over the same data.
#[test]
fn real_failures_are_told_shortly() {
    if shared_data().is_none() {
        return;
    }
    let text = fails(linux(&["__cuda=12.4=0"]), &FORGE, &["python=3.11", "pytorch-cpu"], |request| request.gpu = GpuIntent::Require);
    insta::assert_snapshot!(text, @r"
    exit 3: `--gpu require` refuses this solution: `pytorch 2.12.0 cpu_mkl_py311_h338015a_100` is a CPU build
      - the request asks for the CPU build: `pytorch-cpu`
      - `pytorch * *cuda*` cannot be met
      - no build of `pytorch-cpu` can be used here
      - `pytorch-cpu` 2.1.2 to 2.12.0 (19 builds) need `pytorch ==2.12.0 cpu_mkl*100` … `==2.1.2 cpu_generic_py311h255d53b_4`, but `pytorch * *cuda*` is set by `--gpu require`
    hint: leave out `pytorch-cpu`, or `--gpu require`
    ");
    let text = fails(linux(&["__cuda=11.4=0"]), &FORGE, &["python=3.11", "pytorch-gpu=2.10"], |_| {});
    insta::assert_snapshot!(text, @r"
    exit 3: no build of `pytorch-gpu 2.10.*` can be used here
      - `pytorch-gpu` 2.10.0 (3 builds) need `pytorch ==2.10.0 cuda*_mkl*305`, `==2.10.0 cuda*_mkl*303` or `==2.10.0 cuda*_mkl*301`, which needs `cuda-cudart >=12.9.79,<13.0a0`, which needs `cuda-cudart_linux-64 ==12.9.79 h3f2d84a_0`, which after 1 more step needs `__cuda >=12`, but the driver allows only CUDA 11.4
      - `pytorch-gpu` 2.10.0 needs `pytorch ==2.10.0 cuda*_mkl*302`, which needs `python >=3.14,<3.15.0a0`, but the request is `python 3.11.*`
    hint: it solves for a driver that allows CUDA 12.9; this one allows 11.4: update the driver, or solve for another machine with `--cuda 12.9`
    hint: it solves with `pytorch-gpu 2.10.*` left free, as `pytorch-gpu 2.4.0 cuda118py311h9433a6d_301`
    ");
    let text = fails(linux(&[]), &FORGE, &["python=3.11", "numpy"], |request| {
        request.exclude_newer = Some("2022-01-01T00:00:00Z".parse().expect("a moment"))
    });
    insta::assert_snapshot!(text, @r"
    exit 3: no build of `python 3.11.*` can be used here
      - `python` 3.11.0 to 3.11.15 (20 builds) are newer than `--exclude-newer` allows
    hint: it solves with a later cutoff: `--exclude-newer 2023-01-31`
    hint: it solves with `python 3.11.*` left free, as `python 3.9.10 hc74c709_2_cpython`
    ");
}

#[test]
fn real_outcomes_of_the_gpu() {
    if shared_data().is_none() {
        return;
    }
    let line = |target, channels: &[&str], specs: &[&str]| {
        let solution = solved(target, channels, specs, |request| request.priority = PriorityChoice::Auto).expect("a solution");
        let mut out = solution.gpu.line().expect("a line");
        for lint in solution.lints.iter().chain(&solution.preflight) {
            out.push_str(&format!("\n{:?} {}", lint.level, lint.code));
        }
        out
    };
    insta::assert_snapshot!(line(linux(&[]), &FORGE, &["python=3.11", "pytorch"]), @"pytorch 2.12.0: CPU build, because `__cuda` is absent: add `--cuda 12.9` to pin a GPU build from this machine");
    insta::assert_snapshot!(line(linux(&["__cuda=12.4=0"]), &FORGE, &["python=3.11", "pytorch"]), @r"
    pytorch 2.12.0: CUDA 12.9 build; this machine's driver allows up to 12.4
    Warning driver-minor-compatibility
    ");
    insta::assert_snapshot!(line(linux(&["__cuda=11.4=0"]), &FORGE, &["python=3.11", "pytorch"]), @"pytorch 2.12.0: CPU build, although `__cuda=11.4` is there, because the newest CUDA build that fits is 2.4.0: for the CUDA build add `--gpu require`, or ask for `pytorch=*=*cuda*`");
    insta::assert_snapshot!(line(linux(&[]), &FORGE, &["python=3.11", "jaxlib"]), @"jaxlib 0.10.2: CPU build, because `__cuda` is absent: add `--cuda 12.9` to pin a GPU build from this machine");
    insta::assert_snapshot!(line(target(Subdir::OsxArm64, &["__osx=14.0=0", "__unix=0=0"]), &FORGE, &["python=3.11", "pytorch"]), @"pytorch 2.12.0: CPU build, because there is no CUDA on macOS");
    insta::assert_snapshot!(line(linux(&["__cuda=11.4=0"]), &TORCH, &["python=3.11", "pytorch", "pytorch-cuda=12.1"]), @r"
    pytorch 2.5.1: CUDA 12.1 build; this machine's driver allows up to 11.4
    Warning dead-pytorch-channel
    Warning pytorch-cuda
    Error driver-too-old
    ");
    insta::assert_snapshot!(line(linux(&["__cuda=12.4=0"]), &TORCH, &["python=3.12", "pytorch", "torchvision", "pytorch-cuda=12.4"]), @r"
    pytorch 2.4.0: CUDA 12.4 build; this machine's driver allows up to 12.4
    Warning priority-fell-back
    Warning dead-pytorch-channel
    Warning pytorch-cuda
    ");
}
