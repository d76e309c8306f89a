//! What runs on what: drivers, toolkits, devices and the code made for them.

use serde::Serialize;

/// A version as numbers: `13.2`, `550.54.14`, `9.26.0.51`. Parts that are no numbers end it.
pub fn numbers(text: &str) -> Vec<u64> {
    let mut out = Vec::new();
    for part in text.split(['.', '-', '+']) {
        let digits: String = part.chars().take_while(char::is_ascii_digit).collect();
        let Ok(number) = digits.parse() else { break };
        out.push(number);
        if digits.len() < part.len() {
            break;
        }
    }
    out
}

/// `MAJOR.MINOR` of a version; the minor is 0 where there is none.
pub fn major_minor(text: &str) -> Option<(u64, u64)> {
    let numbers = numbers(text);
    Some((*numbers.first()?, numbers.get(1).copied().unwrap_or(0)))
}

/// How a driver and a toolkit go together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum DriverFit {
    /// The driver is as new as the toolkit, or newer.
    Full,
    /// Same major version, older minor version: runs, without compilation of newer PTX and without features of the newer driver.
    Minor,
    /// The driver's major version is older: nothing runs.
    TooOld,
}

/// Whether a driver that supports CUDA up to `driver` runs programs made with `toolkit`.
pub fn driver_fit(driver: (u64, u64), toolkit: (u64, u64)) -> DriverFit {
    if driver >= toolkit {
        DriverFit::Full
    } else if driver.0 == toolkit.0 {
        DriverFit::Minor
    } else {
        DriverFit::TooOld
    }
}

/// What a device can run of the code in a library.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", tag = "how", content = "architecture")]
pub enum DeviceFit {
    /// Code made for this architecture runs.
    Native(u32),
    /// The driver compiles the PTX of this architecture first.
    Ptx(u32),
    /// Nothing in the library runs.
    None,
}

/// Chips that are part of a system on a chip: code for other chips of their generation does not run on them.
const INTEGRATED: [u32; 6] = [53, 62, 72, 87, 101, 110];

/// Whether code for `sm` runs on a device of compute capability `device` (75 for 7.5): PyTorch's `DEVICE_REQUIREMENT` (torch 2.15).
pub fn code_runs(sm: u32, device: u32, cuda: Option<(u64, u64)>) -> bool {
    if sm == device || matches!((sm, device), (101, 110) | (110, 101)) {
        return true;
    }
    if INTEGRATED.contains(&sm) {
        return false;
    }
    if INTEGRATED.contains(&device) {
        // Lifted for 8.7 with CUDA 13.2.
        return device == 87 && matches!(sm, 80 | 86) && cuda.is_some_and(|cuda| cuda >= (13, 2));
    }
    sm / 10 == device / 10 && device % 10 >= sm % 10
}

/// The best that a device can do with code for `sms` and PTX for `ptx`.
pub fn device_fit(sms: &[u32], ptx: &[u32], device: u32, cuda: Option<(u64, u64)>) -> DeviceFit {
    if let Some(sm) = sms.iter().copied().filter(|sm| code_runs(*sm, device, cuda)).max() {
        return DeviceFit::Native(sm);
    }
    match ptx.iter().copied().filter(|ptx| *ptx <= device).max() {
        Some(ptx) => DeviceFit::Ptx(ptx),
        None => DeviceFit::None,
    }
}

/// `7.5` -> 75.
pub fn capability(text: &str) -> Option<u32> {
    let (major, minor) = text.split_once('.')?;
    major.parse::<u32>().ok()?.checked_mul(10)?.checked_add(minor.parse().ok()?)
}

/// 75 -> `7.5`.
pub fn capability_text(device: u32) -> String {
    format!("{}.{}", device / 10, device % 10)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::solve::preflight;

    #[test]
    fn a_driver_runs_toolkits_of_its_own_major_version_and_older() {
        for (driver, toolkit, expected) in [
            ((13, 2), (13, 2), DriverFit::Full),
            ((13, 0), (12, 9), DriverFit::Full),
            ((12, 4), (12, 6), DriverFit::Minor),
            ((12, 8), (13, 0), DriverFit::TooOld),
            ((11, 8), (12, 0), DriverFit::TooOld),
        ] {
            assert_eq!(driver_fit(driver, toolkit), expected, "{driver:?} {toolkit:?}");
        }
        assert_eq!(preflight::floor(13), Some("580.65.06"));
        assert_eq!(preflight::bundled((12, 6)), Some("560.28.03"));
        assert_eq!(preflight::bundled((13, 5)), None);
    }

    #[test]
    fn code_runs_on_later_chips_of_its_generation_only() {
        for (sm, device, expected) in [
            (75, 75, true),
            (80, 86, true),
            (80, 89, true),
            (86, 80, false),
            (90, 100, false),
            (50, 53, false),
            (80, 87, false),
            (53, 53, true),
            (87, 89, false),
            (100, 103, true),
            (100, 101, false),
            (101, 110, true),
            (120, 121, true),
        ] {
            assert_eq!(code_runs(sm, device, Some((12, 8))), expected, "{sm} on {device}");
        }
        assert!(code_runs(80, 87, Some((13, 2))));
        assert_eq!(device_fit(&[75, 80, 90], &[], 61, None), DeviceFit::None);
        assert_eq!(device_fit(&[75, 80, 86], &[80], 120, None), DeviceFit::Ptx(80));
        assert_eq!(device_fit(&[75, 80, 86], &[80], 86, None), DeviceFit::Native(86));
        assert_eq!(device_fit(&[], &[90], 80, None), DeviceFit::None);
    }

    #[test]
    fn versions_are_numbers_until_something_else_comes() {
        assert_eq!(numbers("9.26.0.51"), [9, 26, 0, 51]);
        assert_eq!(numbers("2.15.0+cu132"), [2, 15, 0]);
        assert_eq!(numbers("x"), [] as [u64; 0]);
        assert_eq!(major_minor("12"), Some((12, 0)));
        assert_eq!(capability("12.1"), Some(121));
        assert_eq!(capability("x.1"), None);
        assert_eq!(capability_text(121), "12.1");
    }
}
