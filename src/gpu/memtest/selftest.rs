//! Cards by name, and the whole test of them.

use super::real::CudaCard;
use super::report::{Cause, DeviceReport, Report};
use super::simulated::{ROUNDS, SimCard};
use super::{Card, Options, conclude, empty, run, unopened};
use crate::error::{Error, Result};
use crate::gpu::driver::cuda::{Cuda, CudaProblem};
use crate::report::Progress;

/// Tests the cards of these names side by side: `cuda:N`, `all`, or `sim:SIZE[,FAULT…]`; without a name all of the machine.
/// That there is no card is a report too, with NOT TESTED.
///
/// # Errors
/// A name that means nothing, or a device that does not exist where others do (usage).
pub fn selftest(names: &[String], options: &Options, progress: &dyn Progress) -> Result<Report> {
    let all = ["all".to_owned()];
    let names = if names.is_empty() { &all[..] } else { names };
    let mut options = options.clone();
    let mut cards: Vec<Box<dyn Card>> = Vec::new();
    let mut missing = Vec::new();
    for name in names {
        let found = if let Some(description) = name.strip_prefix("sim:") {
            // Its clock says nothing about when it is enough.
            options.rounds = options.rounds.or(Some(ROUNDS));
            cards.push(Box::new(SimCard::parse(description)?));
            continue;
        } else if name == "all" || name == "cuda" {
            Cuda::open().and_then(|cuda| cuda.count()).map(|count| (0..count.max(1)).collect())
        } else {
            let ordinal = name.strip_prefix("cuda:").and_then(|number| number.parse::<u32>().ok());
            Ok(vec![ordinal.ok_or_else(|| unknown(name))?])
        };
        let ordinals: Vec<u32> = match found {
            Ok(ordinals) => ordinals,
            Err(problem) => {
                missing.push(without(name, &options, &problem));
                continue;
            }
        };
        for ordinal in ordinals {
            match CudaCard::find(Some(ordinal)) {
                Ok(found) => {
                    for card in found {
                        // Two tests at once on one card would each find what the other takes.
                        if !cards.iter().any(|other| other.name() == Card::name(&card)) {
                            cards.push(Box::new(card));
                        }
                    }
                }
                Err(problem @ CudaProblem::NoSuchDevice { count: 1.., .. }) => {
                    return Err(Error::usage(format!("there is no `{name}`")).because(&problem).hint(problem.hint()));
                }
                Err(problem) => missing.push(without(&format!("cuda:{ordinal}"), &options, &problem)),
            }
        }
    }
    // One line says it all where there is nothing else to say.
    if cards.is_empty()
        && let [only] = &missing[..]
        && only.findings.is_empty()
    {
        return Ok(Report::not_tested(options.level, only.summary.clone(), only.hints.clone()));
    }
    let mut report = run(&cards, &options, progress);
    report.devices.append(&mut missing);
    Ok(Report::new(options.level, report.devices))
}

fn unknown(name: &str) -> Error {
    Error::usage(format!("`{name}` names no device")).hint("such as cuda:0, all, or sim:8GiB for a simulated card")
}

/// The report on a card that cannot be reached: a failed call is a failure, all else is a reason not to test.
fn without(name: &str, options: &Options, problem: &CudaProblem) -> DeviceReport {
    let mut out = match problem {
        CudaProblem::Failed(error) => unopened(name, options, *error),
        problem => {
            let mut out = empty(name, options);
            let cause = match problem {
                CudaProblem::DriverTooOld { .. } | CudaProblem::DeviceTooOld { .. } | CudaProblem::MissingSymbol(_) => Cause::Unsupported,
                _ => Cause::NoDevice,
            };
            super::not_tested(&mut out, "warm-up", super::WARM_UP, cause, problem.to_string());
            conclude(&mut out);
            out.hints.clear();
            out
        }
    };
    out.hints.insert(0, problem.hint());
    if out.cause == Some(Cause::NoDevice) {
        out.hints.push("`--device sim:8GiB` runs the test on a simulated card".to_owned());
    }
    out
}
