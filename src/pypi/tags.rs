//! Which wheels an interpreter can use: compatibility tags of PEP 425, `manylinux` of PEP 600, `macosx` as the `packaging` library of the PyPA has it.

use std::collections::HashMap;

use rattler_conda_types::Subdir;

use super::Version;
use crate::error::{Error, Result};
use crate::platform::Target;

/// The interpreter and the platform that wheels are for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TagInput {
    /// The platform.
    pub subdir: Subdir,
    /// Major and minor version of CPython.
    pub python: (u64, u64),
    /// Built without the global interpreter lock (`cp313t`).
    pub free_threaded: bool,
    /// Major and minor version of glibc; only on Linux.
    pub glibc: Option<(u64, u64)>,
    /// Major and minor version of macOS; only there.
    pub macos: Option<(u64, u64)>,
}

impl TagInput {
    /// For an interpreter of the conda half. The C library and the system are those of `target`'s virtual packages; where it has none, the oldest
    /// that conda channels are built for (glibc 2.17, macOS 11 and 10.13).
    pub fn new(target: &Target, python: &Version, free_threaded: bool) -> Self {
        let mut release = python.release().iter().copied();
        let python = (release.next().unwrap_or(3), release.next().unwrap_or(0));
        let of = |name: &str| {
            let package = target.virtual_packages.iter().find(|package| package.package.name.as_normalized() == name)?;
            let text = package.package.version.to_string();
            let mut parts = text.split('.').map(|part| part.parse().ok());
            Some((parts.next()??, parts.next().flatten().unwrap_or(0)))
        };
        let subdir = target.subdir;
        let glibc = subdir.is_linux().then(|| of("__glibc").unwrap_or((2, 17)));
        let oldest = if subdir == Subdir::Osx64 { (10, 13) } else { (11, 0) };
        let macos = subdir.is_osx().then(|| of("__osx").unwrap_or(oldest));
        TagInput { subdir, python, free_threaded, glibc, macos }
    }
}

/// The tags that an interpreter accepts, best first.
#[derive(Debug, Clone)]
pub struct Tags {
    rank: HashMap<String, usize>,
    input: TagInput,
}

/// The parts of a wheel's file name (PEP 427).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WheelName {
    /// As written: not normalised.
    pub name: String,
    /// As written.
    pub version: String,
    /// The build tag.
    pub build: Option<String>,
    /// `py2.py3` taken apart.
    pub pythons: Vec<String>,
    /// ABI tags.
    pub abis: Vec<String>,
    /// Platform tags.
    pub platforms: Vec<String>,
}

impl WheelName {
    /// Takes a file name apart.
    ///
    /// # Errors
    /// It is not the name of a wheel.
    pub fn parse(file: &str) -> Result<Self> {
        let bad = || Error::usage(format!("`{file}` is not the file name of a wheel")).hint("NAME-VERSION-PYTHON-ABI-PLATFORM.whl");
        let stem = file.strip_suffix(".whl").ok_or_else(bad)?;
        let parts: Vec<&str> = stem.split('-').collect();
        let (name, version, build, tags) = match parts.as_slice() {
            [name, version, tags @ ..] if tags.len() == 3 => (name, version, None, tags),
            [name, version, build, tags @ ..] if tags.len() == 3 && build.starts_with(|c: char| c.is_ascii_digit()) => {
                (name, version, Some((*build).to_owned()), tags)
            }
            _ => return Err(bad()),
        };
        if parts.iter().any(|part| part.is_empty()) {
            return Err(bad());
        }
        let set = |text: &str| text.split('.').map(str::to_ascii_lowercase).collect::<Vec<_>>();
        Ok(WheelName {
            name: (*name).to_owned(),
            version: (*version).to_owned(),
            build,
            pythons: set(tags[0]),
            abis: set(tags[1]),
            platforms: set(tags[2]),
        })
    }

    /// Every combination `python-abi-platform`.
    fn tags(&self) -> impl Iterator<Item = String> + '_ {
        self.pythons.iter().flat_map(move |python| {
            self.abis.iter().flat_map(move |abi| self.platforms.iter().map(move |platform| format!("{python}-{abi}-{platform}")))
        })
    }

    /// Whether it holds no compiled code: usable by every CPython 3 on every platform.
    pub fn is_pure(&self) -> bool {
        self.abis == ["none"] && self.platforms == ["any"] && self.pythons.iter().any(|python| python == "py3")
    }
}

impl Tags {
    /// All tags for an interpreter.
    pub fn new(input: TagInput) -> Self {
        let platforms = platforms(&input);
        let (major, minor) = input.python;
        let interpreter = format!("cp{major}{minor}");
        // Up to 3.7 the ABI had an `m` for pymalloc.
        let abi = match (input.free_threaded, minor < 8 && major == 3) {
            (true, _) => format!("{interpreter}t"),
            (false, true) => format!("{interpreter}m"),
            (false, false) => interpreter.clone(),
        };
        let mut tags = Vec::new();
        let mut add = |python: &str, abi: &str| {
            for platform in &platforms {
                tags.push(format!("{python}-{abi}-{platform}"));
            }
        };
        add(&interpreter, &abi);
        // The limited API is not there without the lock (PEP 703).
        if !input.free_threaded {
            add(&interpreter, "abi3");
        }
        add(&interpreter, "none");
        if !input.free_threaded {
            for older in (2..minor).rev() {
                add(&format!("cp{major}{older}"), "abi3");
            }
        }
        let generic: Vec<String> = [format!("py{major}{minor}"), format!("py{major}")]
            .into_iter()
            .chain((0..minor).rev().map(|older| format!("py{major}{older}")))
            .collect();
        for python in &generic {
            add(python, "none");
        }
        tags.push(format!("{interpreter}-none-any"));
        tags.extend(generic.iter().map(|python| format!("{python}-none-any")));
        let mut rank = HashMap::with_capacity(tags.len());
        for (number, tag) in tags.into_iter().enumerate() {
            rank.entry(tag).or_insert(number);
        }
        Tags { rank, input }
    }

    /// What the tags are for.
    pub fn input(&self) -> &TagInput {
        &self.input
    }

    /// The platform tags, best first, without `any`.
    pub fn platform_tags(&self) -> Vec<String> {
        platforms(&self.input)
    }

    /// How good a wheel is, 0 being the best; `None` if it cannot be used.
    pub fn rank(&self, wheel: &WheelName) -> Option<usize> {
        wheel.tags().filter_map(|tag| self.rank.get(&tag).copied()).min()
    }

    /// Refuses a wheel that cannot be used here and says why.
    ///
    /// # Errors
    /// Not the file name of a wheel; made for another interpreter or platform (kind unsatisfiable).
    pub fn check(&self, file: &str) -> Result<()> {
        let wheel = WheelName::parse(file)?;
        if self.rank(&wheel).is_some() {
            return Ok(());
        }
        let (major, minor) = self.input.python;
        let mut error = Error::new(crate::error::Kind::Unsatisfiable, format!("the wheel `{file}` cannot be used here")).because(format!(
            "it is for {} on {}, and the environment has CPython {major}.{minor}{} on {}",
            wheel.pythons.join(" or "),
            wheel.platforms.join(" or "),
            if self.input.free_threaded { " (free-threaded)" } else { "" },
            self.input.subdir
        ));
        if let Some((glibc_major, glibc_minor)) = self.input.glibc
            && let Some(wanted) = wheel.platforms.iter().filter_map(|platform| manylinux(platform)).min()
            && wanted > (glibc_major, glibc_minor)
        {
            error = error.because(format!("it needs glibc {}.{}, and there is {glibc_major}.{glibc_minor}", wanted.0, wanted.1));
        }
        Err(error)
    }
}

/// The glibc that a platform tag asks for.
fn manylinux(platform: &str) -> Option<(u64, u64)> {
    for (legacy, version) in [("manylinux1_", (2, 5)), ("manylinux2010_", (2, 12)), ("manylinux2014_", (2, 17))] {
        if platform.starts_with(legacy) {
            return Some(version);
        }
    }
    let mut parts = platform.strip_prefix("manylinux_")?.splitn(3, '_');
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

/// The machine as wheels name it.
fn machine(subdir: Subdir) -> &'static str {
    match subdir {
        Subdir::Linux32 => "i686",
        Subdir::LinuxAarch64 => "aarch64",
        Subdir::LinuxArmV6l => "armv6l",
        Subdir::LinuxArmV7l => "armv7l",
        Subdir::LinuxPpc64le => "ppc64le",
        Subdir::LinuxPpc64 => "ppc64",
        Subdir::LinuxS390X => "s390x",
        Subdir::LinuxRiscv64 => "riscv64",
        Subdir::LinuxLoongArch64 => "loongarch64",
        Subdir::OsxArm64 => "arm64",
        _ => "x86_64",
    }
}

/// Platform tags, best first.
fn platforms(input: &TagInput) -> Vec<String> {
    let machine = machine(input.subdir);
    match input.subdir {
        Subdir::Win64 => vec!["win_amd64".to_owned()],
        Subdir::Win32 => vec!["win32".to_owned()],
        Subdir::WinArm64 => vec!["win_arm64".to_owned()],
        subdir if subdir.is_osx() => macos(input.macos.unwrap_or((11, 0)), machine),
        subdir if subdir.is_linux() => {
            let (major, minor) = input.glibc.unwrap_or((2, 17));
            // PEP 599: the legacy names exist for x86; manylinux2014 for the others too.
            let oldest = if matches!(machine, "x86_64" | "i686") { 5 } else { 17 };
            let mut tags = Vec::new();
            if major == 2 {
                for minor in (oldest..=minor).rev() {
                    tags.push(format!("manylinux_2_{minor}_{machine}"));
                    let legacy = match minor {
                        17 => Some("manylinux2014"),
                        12 => Some("manylinux2010"),
                        5 => Some("manylinux1"),
                        _ => None,
                    };
                    tags.extend(legacy.map(|name| format!("{name}_{machine}")));
                }
            }
            tags.push(format!("linux_{machine}"));
            tags
        }
        _ => Vec::new(),
    }
}

fn macos(version: (u64, u64), machine: &str) -> Vec<String> {
    let mut tags = Vec::new();
    // Since macOS 11 the major version counts, and the minor is 0.
    for major in (11..=version.0).rev() {
        tags.push(format!("macosx_{major}_0_{machine}"));
        tags.push(format!("macosx_{major}_0_universal2"));
    }
    let newest = if version.0 >= 11 { 16 } else { version.1 };
    for minor in (4..=newest).rev() {
        if machine == "x86_64" {
            for format in ["x86_64", "universal2", "intel", "fat64", "fat32", "universal"] {
                tags.push(format!("macosx_10_{minor}_{format}"));
            }
        } else {
            tags.push(format!("macosx_10_{minor}_universal2"));
        }
    }
    tags
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tags(subdir: Subdir, python: (u64, u64)) -> Tags {
        let glibc = subdir.is_linux().then_some((2, 28));
        let macos = subdir.is_osx().then_some((13, 0));
        Tags::new(TagInput { subdir, python, free_threaded: false, glibc, macos })
    }

    fn rank(tags: &Tags, file: &str) -> Option<usize> {
        tags.rank(&WheelName::parse(file).unwrap())
    }

    #[test]
    fn wheels_of_this_platform_are_ranked_and_others_refused() {
        let linux = tags(Subdir::Linux64, (3, 11));
        let order = [
            "a-1-cp311-cp311-manylinux_2_28_x86_64.whl",
            "a-1-cp311-cp311-manylinux_2_17_x86_64.manylinux2014_x86_64.whl",
            "a-1-cp311-cp311-linux_x86_64.whl",
            "a-1-cp311-abi3-manylinux1_x86_64.whl",
            "a-1-cp37-abi3-manylinux2010_x86_64.whl",
            "a-1-py3-none-manylinux_2_12_x86_64.whl",
            "a-1-py2.py3-none-any.whl",
        ];
        let ranks: Vec<usize> = order.iter().map(|file| rank(&linux, file).unwrap_or_else(|| panic!("{file}"))).collect();
        assert!(ranks.is_sorted_by(|a, b| a < b), "{ranks:?}");
        for file in [
            "a-1-cp312-cp312-manylinux_2_17_x86_64.whl",
            "a-1-cp312-abi3-manylinux_2_17_x86_64.whl",
            "a-1-cp311-cp311-manylinux_2_34_x86_64.whl",
            "a-1-cp311-cp311-musllinux_1_2_x86_64.whl",
            "a-1-cp311-cp311-manylinux_2_17_aarch64.whl",
            "a-1-cp311-cp311-win_amd64.whl",
            "a-1-cp311-cp311t-manylinux_2_17_x86_64.whl",
            "a-1-py2-none-any.whl",
            "a-1-pp311-pypy311_pp73-manylinux_2_17_x86_64.whl",
        ] {
            assert_eq!(rank(&linux, file), None, "{file}");
        }
        let error = linux.check("a-1-cp311-cp311-manylinux_2_34_x86_64.whl").unwrap_err();
        assert!(error.to_string().contains("it needs glibc 2.34, and there is 2.28"), "{error}");
        assert_eq!(error.exit_code(), 3);
    }

    #[test]
    fn other_platforms_and_interpreters() {
        assert!(rank(&tags(Subdir::OsxArm64, (3, 12)), "a-1-cp312-cp312-macosx_11_0_arm64.whl").is_some());
        assert!(rank(&tags(Subdir::OsxArm64, (3, 12)), "a-1-cp312-cp312-macosx_10_9_universal2.whl").is_some());
        assert!(rank(&tags(Subdir::OsxArm64, (3, 12)), "a-1-cp312-cp312-macosx_10_9_x86_64.whl").is_none());
        assert!(rank(&tags(Subdir::OsxArm64, (3, 12)), "a-1-cp312-cp312-macosx_14_0_arm64.whl").is_none());
        assert!(rank(&tags(Subdir::Osx64, (3, 12)), "a-1-cp312-cp312-macosx_10_9_x86_64.whl").is_some());
        assert!(rank(&tags(Subdir::Win64, (3, 12)), "a-1-cp312-cp312-win_amd64.whl").is_some());
        assert!(rank(&tags(Subdir::LinuxAarch64, (3, 12)), "a-1-cp312-cp312-manylinux2014_aarch64.whl").is_some());
        assert!(rank(&tags(Subdir::LinuxAarch64, (3, 12)), "a-1-cp312-cp312-manylinux2010_aarch64.whl").is_none());
        assert!(rank(&tags(Subdir::Linux64, (3, 7)), "a-1-cp37-cp37m-manylinux1_x86_64.whl").is_some());
        let free = Tags::new(TagInput { free_threaded: true, ..tags(Subdir::Linux64, (3, 13)).input().clone() });
        assert!(rank(&free, "a-1-cp313-cp313t-manylinux_2_17_x86_64.whl").is_some());
        assert!(rank(&free, "a-1-cp313-cp313-manylinux_2_17_x86_64.whl").is_none());
        assert!(rank(&free, "a-1-cp38-abi3-manylinux_2_17_x86_64.whl").is_none());
        assert!(rank(&free, "a-1-py3-none-any.whl").is_some());
    }

    #[test]
    fn names_that_are_no_wheels() {
        for file in ["a.whl", "a-1.tar.gz", "a-1-py3-none.whl", "a-1-x-py3-none-any.whl", "a--py3-none-any.whl", ".whl", "-----.whl"] {
            assert!(WheelName::parse(file).is_err(), "{file}");
        }
        let wheel = WheelName::parse("a_b-1.0-2-py2.py3-none-any.whl").unwrap();
        assert_eq!((wheel.build.as_deref(), wheel.is_pure()), (Some("2"), true));
    }
}
