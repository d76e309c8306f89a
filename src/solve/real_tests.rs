//! Over the real repodata of `../shared/data`; skipped, saying so, where that is absent.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use rattler_conda_types::Subdir;

use super::testing::{linux, names, picture, request, shared_data, solve_real, spec, target};
use super::{GpuVariant, PriorityChoice, Request};
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
