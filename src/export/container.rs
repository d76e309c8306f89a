//! Container builds: a Dockerfile and an Apptainer definition. The environment is made in one stage by tare and copied, at the same path, into a bare second one.

use std::fmt::Write as _;

use rattler_conda_types::RepoDataRecord;

use super::conda::names;
use super::{Exported, Options, Origin, Subject};
use crate::error::{Error, Result};
use crate::prefix::{self, Hashes};

/// Where the environment lies in the image; the same in both stages, because its files hold the path.
const PREFIX: &str = "/opt/env";
/// What both stages start from: small, with glibc.
const BASE: &str = "debian:bookworm-slim";

struct Parts {
    explicit: String,
    pip: Option<String>,
    cuda: Option<Cuda>,
    notes: Vec<String>,
}

/// The environment uses CUDA; the driver version it asks for, if any package says one.
struct Cuda {
    driver: Option<String>,
}

/// Whether a record is part of CUDA or built for it.
fn is_cuda(record: &RepoDataRecord) -> bool {
    let package = &record.package_record;
    let name = package.name.as_normalized();
    let build = package.build.to_string();
    name.starts_with("cuda-")
        || name == "cudatoolkit"
        || build.contains("cuda")
        || package.depends.iter().any(|text| text.split_whitespace().next() == Some("__cuda"))
}

/// The highest lower bound on `__cuda` in depends and constrains.
fn driver(subject: &Subject) -> Option<String> {
    let mut best: Option<(u64, u64)> = None;
    for record in &subject.conda {
        let package = &record.package_record;
        for text in package.depends.iter().chain(&package.constrains) {
            let Some(rest) = text.strip_prefix("__cuda") else { continue };
            let Some(bound) = rest.trim_start().strip_prefix(">=") else { continue };
            let version = bound.split([',', ' ', '|']).next().unwrap_or_default();
            let mut numbers = version.split('.').map(|part| part.parse::<u64>().unwrap_or(0));
            let version = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
            best = best.max(Some(version));
        }
    }
    best.map(|(major, minor)| format!("{major}.{minor}"))
}

fn parts(subject: &Subject, options: &Options, format: &str) -> Result<Parts> {
    if let Some(platform) = subject.platform.filter(|platform| !platform.is_linux()) {
        return Err(Error::failure(format!("a {format} is for Linux, and these packages are for {platform}")));
    }
    let refuse = |why: &str, packages: Vec<&str>| {
        Err(Error::failure(format!("a {format} cannot hold {}", names(packages.into_iter())))
            .because(why)
            .hint("install them from a repository or an index first"))
    };
    let conda = |bad: &dyn Fn(&RepoDataRecord) -> bool| -> Vec<&str> {
        subject.conda.iter().filter(|record| bad(record)).map(|record| record.package_record.name.as_normalized()).collect()
    };
    let bound = conda(&|record| crate::lock::is_machine_bound(record));
    if !bound.is_empty() {
        return Err(Error::failure(format!("a {format} cannot hold {}", names(bound.into_iter())))
            .because("made from this machine's Python by the channel `host`, which the build cannot reach")
            .hint("take Python from a channel that others can reach, such as conda-forge"));
    }
    let local = conda(&|record| prefix::known_url(record).is_none_or(|url| url.scheme() == "file"));
    if !local.is_empty() {
        return refuse("they come from this machine, not from a channel that the build can reach", local);
    }
    let unhashed = conda(&|record| record.package_record.sha256.is_none());
    if !unhashed.is_empty() {
        return refuse("their SHA-256 is not known, so the build could not check what it gets", unhashed);
    }
    let folders: Vec<&str> = subject
        .python
        .iter()
        .filter(|package| {
            matches!(package.origin, Origin::Directory { .. }) || matches!(package.origin, Origin::Vcs { editable: true, .. })
        })
        .map(|package| package.name.as_str())
        .collect();
    if !folders.is_empty() {
        return refuse("they are folders of this machine", folders);
    }
    let mut notes = secret_notes(subject);
    if subject.python.iter().any(|package| !package.is_from_index()) {
        notes.push("repositories and URLs of Python packages are fetched during the build".to_owned());
    }
    if !subject.python.is_empty() && !subject.conda.iter().any(|record| record.package_record.name.as_normalized() == "pip") {
        return Err(Error::failure(format!("a {format} installs the Python packages with the environment's own pip, and there is none"))
            .because(format!("not from conda packages: {}", names(subject.python.iter().map(|package| package.name.as_str()))))
            .hint("add `pip` to the environment"));
    }
    let order = prefix::install_order(&subject.conda);
    let platform = subject.platform.or(options.tool_platform);
    let explicit = prefix::explicit_lines(order.into_iter().map(|index| &subject.conda[index]), Hashes::Sha256, platform);
    let pip = (!subject.python.is_empty()).then(|| super::pip::requirements(subject).text);
    let cuda = subject.conda.iter().any(is_cuda).then(|| Cuda { driver: driver(subject) });
    Ok(Parts { explicit, pip, cuda, notes })
}

/// A remark on variables whose names look like those of secrets: exports hold their values.
pub(crate) fn secret_notes(subject: &Subject) -> Vec<String> {
    let words = ["TOKEN", "SECRET", "PASSWORD", "PASSWD", "API_KEY", "APIKEY", "ACCESS_KEY", "PRIVATE_KEY", "CREDENTIAL"];
    let found: Vec<&str> = subject
        .variables
        .keys()
        .filter(|name| {
            let name = name.to_uppercase();
            // TOKENIZERS_… is none.
            words.iter().any(|word| name.split(word).nth(1).is_some_and(|rest| !rest.starts_with("IZER")))
        })
        .map(String::as_str)
        .collect();
    if found.is_empty() {
        Vec::new()
    } else {
        vec![format!("the value of the variable {} is in the export: is it a secret?", names(found.into_iter()))]
    }
}

/// A value between double quotes for ENV of a Dockerfile.
fn docker_quoted(value: &str) -> String {
    format!("\"{}\"", value.replace('\\', "\\\\").replace('"', "\\\"").replace('$', "\\$").replace('\n', "\\n"))
}

fn shell_quoted(value: &str) -> String {
    format!("'{}'", value.replace('\'', r"'\''"))
}

/// A word that ends a here-document and is no line of `text`.
fn end_of(text: &str, word: &str) -> String {
    let mut end = word.to_owned();
    while text.lines().any(|line| line == end) {
        end.push('_');
    }
    end
}

/// A variable that a Dockerfile and a shell can hold.
fn check_variables(subject: &Subject, format: &str) -> Result<()> {
    let bad: Vec<&str> = subject
        .variables
        .iter()
        .filter(|(name, value)| {
            !name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
                || name.is_empty()
                || name.starts_with(|c: char| c.is_ascii_digit())
                || value.contains(['\n', '\r', '\0'])
        })
        .map(|(name, _)| name.as_str())
        .collect();
    if bad.is_empty() {
        return Ok(());
    }
    Err(Error::failure(format!("a {format} cannot hold the variables {}", names(bad.into_iter())))
        .because("names have letters, digits and `_`, and values are one line"))
}

/// The Dockerfile (BuildKit syntax, for its here-documents).
///
/// # Errors
/// Packages that a build elsewhere cannot get: from this machine, without hash, editable; another platform than Linux.
pub fn dockerfile(subject: &Subject, options: &Options) -> Result<Exported> {
    check_variables(subject, "Dockerfile")?;
    let parts = parts(subject, options, "Dockerfile")?;
    let name = subject.name.as_deref().unwrap_or("environment");
    let end = end_of(&parts.explicit, "PACKAGES");
    let mut text = String::new();
    let platform = match subject.platform {
        Some(rattler_conda_types::Subdir::Linux64) => "--platform=linux/amd64 ",
        Some(rattler_conda_types::Subdir::LinuxAarch64) => "--platform=linux/arm64 ",
        _ => "",
    };
    let _ = write!(
        text,
        "# syntax=docker/dockerfile:1\n\
         # Environment `{name}`. Build with the tare binary beside this file: docker build -t {} .\n\n\
         FROM {platform}{BASE} AS build\n\
         RUN apt-get update && apt-get install -y --no-install-recommends ca-certificates{} && rm -rf /var/lib/apt/lists/*\n\
         COPY tare /usr/local/bin/tare\n\
         COPY <<'{end}' /build/packages.txt\n{}{end}\n\
         RUN tare create -p {PREFIX} -f /build/packages.txt\n",
        image_name(name),
        if subject.python.iter().any(|package| matches!(package.origin, Origin::Vcs { .. })) { " git" } else { "" },
        parts.explicit,
    );
    if let Some(pip) = &parts.pip {
        let end = end_of(pip, "REQUIREMENTS");
        let _ = write!(
            text,
            "COPY <<'{end}' /build/requirements.txt\n{pip}{end}\n\
             RUN {PREFIX}/bin/python -m pip install --no-deps --no-cache-dir --no-input -r /build/requirements.txt\n"
        );
    }
    let _ = write!(
        text,
        "RUN {{ echo '#!/bin/sh'; tare shell-hook -p {PREFIX} -s posix; echo 'exec \"$@\"'; }} > /build/entrypoint && chmod 0755 /build/entrypoint\n\n\
         FROM {platform}{BASE}\n\
         COPY --from=build {PREFIX} {PREFIX}\n\
         COPY --from=build /build/entrypoint /usr/local/bin/entrypoint\n\
         RUN useradd --create-home --uid 1000 app\n"
    );
    if let Some(cuda) = &parts.cuda {
        text.push_str("ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility\n");
        if let Some(driver) = &cuda.driver {
            let _ = writeln!(text, "ENV NVIDIA_REQUIRE_CUDA=\"cuda>={driver}\"");
        }
    }
    for (name, value) in &subject.variables {
        let _ = writeln!(text, "ENV {name}={}", docker_quoted(value));
    }
    text.push_str("USER 1000:1000\nWORKDIR /home/app\nENTRYPOINT [\"/usr/local/bin/entrypoint\"]\nCMD [\"/bin/sh\"]\n");
    Ok(Exported { text, notes: parts.notes })
}

/// A name that an image can have.
fn image_name(name: &str) -> String {
    let lower: String = name.to_lowercase().chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).collect();
    let trimmed = lower.trim_matches('-');
    if trimmed.is_empty() { "environment".to_owned() } else { trimmed.to_owned() }
}

/// The Apptainer (Singularity) definition, also in two stages; on a GPU machine it runs with `--nv`.
///
/// # Errors
/// As for [`dockerfile`].
pub fn apptainer(subject: &Subject, options: &Options) -> Result<Exported> {
    check_variables(subject, "definition")?;
    let parts = parts(subject, options, "definition")?;
    let name = subject.name.as_deref().unwrap_or("environment");
    let end = end_of(&parts.explicit, "PACKAGES");
    let mut text = String::new();
    let nv = if parts.cuda.is_some() { " --nv" } else { "" };
    let _ = write!(
        text,
        "# Environment `{name}`. Build with the tare binary beside this file: apptainer build {0}.sif {0}.def\n\
         # Run: apptainer run{nv} {0}.sif python\n\
         Bootstrap: docker\nFrom: {BASE}\nStage: build\n\n\
         %files\n    tare /usr/local/bin/tare\n\n\
         %post\n\
         set -e\n\
         apt-get update && apt-get install -y --no-install-recommends ca-certificates{1}\n\
         mkdir -p /build\n\
         cat > /build/packages.txt <<'{end}'\n{2}{end}\n\
         tare create -p {PREFIX} -f /build/packages.txt\n",
        image_name(name),
        if subject.python.iter().any(|package| matches!(package.origin, Origin::Vcs { .. })) { " git" } else { "" },
        parts.explicit,
    );
    if let Some(pip) = &parts.pip {
        let end = end_of(pip, "REQUIREMENTS");
        let _ = write!(
            text,
            "cat > /build/requirements.txt <<'{end}'\n{pip}{end}\n\
             {PREFIX}/bin/python -m pip install --no-deps --no-cache-dir --no-input -r /build/requirements.txt\n"
        );
    }
    let _ = write!(
        text,
        "tare shell-hook -p {PREFIX} -s posix > /build/activate.sh\n\n\
         Bootstrap: docker\nFrom: {BASE}\nStage: final\n\n\
         %files from build\n    {PREFIX} {PREFIX}\n    /build/activate.sh /opt/activate.sh\n\n\
         %environment\n"
    );
    for (name, value) in &subject.variables {
        let _ = writeln!(text, "    export {name}={}", shell_quoted(value));
    }
    if let Some(driver) = parts.cuda.as_ref().and_then(|cuda| cuda.driver.as_ref()) {
        let _ = writeln!(text, "    export NVIDIA_REQUIRE_CUDA='cuda>={driver}'");
    }
    text.push_str("    . /opt/activate.sh\n\n%runscript\n    exec \"$@\"\n");
    Ok(Exported { text, notes: parts.notes })
}
