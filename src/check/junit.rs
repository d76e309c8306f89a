//! The report for CI systems: JUnit XML. A step is a test case; NOT TESTED is skipped.

use std::time::Duration;

use quick_junit::{NonSuccessKind, Property, Report as Junit, TestCase, TestCaseStatus, TestSuite, XmlString};

use super::report::{Class, Report, Verdict};
use crate::error::{Error, Result};

/// One test suite an environment.
///
/// # Errors
/// Never for reports that were made by a check.
pub fn junit(reports: &[Report]) -> Result<String> {
    let mut document = Junit::new("tare check");
    let seconds = |value: f64| Duration::try_from_secs_f64(value.max(0.0)).unwrap_or_default();
    for report in reports {
        let mut suite = TestSuite::new(report.prefix.display().to_string());
        suite.set_time(seconds(report.steps.iter().map(|step| step.seconds).sum()));
        for (name, value) in [
            ("time", Some(report.time.clone())),
            ("verdict", Some(report.verdict.name().to_owned())),
            ("level", Some(report.level.clone())),
            ("tare", Some(report.tare_version.clone())),
            ("driver", report.driver.version.clone()),
            ("lock_digest", report.lock_digest.clone()),
        ] {
            if let Some(value) = value {
                suite.add_property(Property::new(name, value));
            }
        }
        for fact in &report.environment {
            suite.add_property(Property::new(fact.name.as_str(), fact.value.as_str()));
        }
        for step in &report.steps {
            let lines = |title: &str, lines: &[String]| lines.iter().map(|line| format!("{title}{line}\n")).collect::<String>();
            let body = format!("{}\n{}{}", step.reason, lines("", &step.evidence), lines("note: ", &step.remarks));
            let status = match step.verdict {
                Verdict::Pass => TestCaseStatus::success(),
                Verdict::NotTested => {
                    let mut status = TestCaseStatus::skipped();
                    status.set_message(step.reason.as_str());
                    status
                }
                Verdict::Fail => {
                    let mut status = TestCaseStatus::non_success(NonSuccessKind::Failure);
                    status.set_message(step.reason.as_str());
                    status.set_type(if step.class == Class::Files { "verification" } else { "gpu-check" });
                    status.set_description(format!("{body}{}", lines("hint: ", &step.remedies)));
                    status
                }
            };
            let mut case = TestCase::new(step.id.as_str(), status);
            case.set_classname(XmlString::new(&step.title));
            case.set_time(seconds(step.seconds));
            if step.verdict != Verdict::Fail {
                case.set_system_out(body);
            }
            suite.add_test_case(case);
        }
        document.add_test_suite(suite);
    }
    document.to_string().map_err(|error| Error::failure("the JUnit report cannot be written").because(error))
}
