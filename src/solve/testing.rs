//! What the tests of this module share: targets, synthetic records, the real repodata, and a picture of an error.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, OnceLock};

use rattler_conda_types::package::{BuildString, DistArchiveIdentifier};
use rattler_conda_types::{
    Channel, ChannelConfig, GenericVirtualPackage, MatchSpec, NoArchType, PackageName, PackageRecord, ParseMatchSpecOptions,
    RepoDataRecord, Subdir,
};
use rattler_repodata_gateway::sparse::{PackageFormatSelection, SparseRepoData};

use super::{ChannelRecords, Request, Solution, solve_records};
use crate::error::{Error, Result};
use crate::platform::{GpuDetection, Provenance, Target, VirtualPackage};

/// A target with these virtual packages (`name=version=build`).
pub fn target(subdir: Subdir, virtual_packages: &[&str]) -> Target {
    Target {
        subdir,
        subdir_source: "test".into(),
        is_native: true,
        virtual_packages: virtual_packages
            .iter()
            .map(|text| {
                let mut parts = text.split('=');
                let package = GenericVirtualPackage {
                    name: PackageName::new_unchecked(parts.next().expect("a name")),
                    version: parts.next().unwrap_or("0").parse().expect("a version"),
                    build_string: BuildString::new_unchecked(parts.next().unwrap_or("0")),
                };
                VirtualPackage { package, provenance: Provenance::Detected, source: "nvml".into() }
            })
            .collect(),
        gpu: GpuDetection::default(),
        remarks: Vec::new(),
    }
}

pub fn linux(extra: &[&str]) -> Target {
    let mut all = vec!["__linux=5.15=0", "__unix=0=0", "__glibc=2.35=0", "__archspec=1=x86_64_v3"];
    all.extend(extra);
    target(Subdir::Linux64, &all)
}

/// A match spec, read as the command line would.
pub fn spec(text: &str) -> MatchSpec {
    MatchSpec::from_str(text, ParseMatchSpecOptions::lenient()).unwrap_or_else(|error| panic!("{text}: {error}"))
}

pub fn request(target: Target, specs: &[&str]) -> Request {
    let mut request = Request::new(target);
    request.specs = specs.iter().map(|text| spec(text)).collect();
    request.channels = vec!["conda-forge".into()];
    request
}

/// A synthetic record `name version build`, of a channel.
pub fn record(channel: &str, name_version_build: &str, depends: &[&str], constrains: &[&str]) -> RepoDataRecord {
    let parts: Vec<&str> = name_version_build.split(' ').collect();
    let (name, version, build) = (parts[0], parts[1], parts.get(2).copied().unwrap_or("0"));
    let number = build.rsplit('_').next().and_then(|tail| tail.parse().ok()).unwrap_or(0);
    let mut package = PackageRecord::new(
        PackageName::new_unchecked(name),
        version.parse::<rattler_conda_types::VersionWithSource>().expect("a version"),
        BuildString::new_unchecked(build),
    );
    package.build_number = number;
    package.subdir = "linux-64".into();
    package.noarch = NoArchType::none();
    package.depends = depends.iter().map(|text| (*text).to_owned()).collect();
    package.constrains = constrains.iter().map(|text| (*text).to_owned()).collect();
    let file = format!("{name}-{version}-{build}.conda");
    RepoDataRecord {
        package_record: package,
        url: format!("https://conda.anaconda.org/{channel}/linux-64/{file}").parse().expect("a URL"),
        identifier: file.parse::<DistArchiveIdentifier>().expect("a file name"),
        channel: Some(format!("https://conda.anaconda.org/{channel}/")),
    }
}

/// Sets the build time of a record, in the form `2024-05-01`.
pub fn dated(mut record: RepoDataRecord, date: &str) -> RepoDataRecord {
    let moment = date.parse::<jiff::civil::Date>().expect("a date").to_zoned(jiff::tz::TimeZone::UTC).expect("a moment").timestamp();
    record.package_record.timestamp = Some(rattler_conda_types::utils::TimestampMs::from_timestamp_millis(moment));
    record
}

/// Solves over synthetic records, one list a channel.
pub fn solve_synthetic(request: &Request, channels: &[Vec<RepoDataRecord>]) -> Result<Solution> {
    let views: Vec<ChannelRecords<'_>> =
        channels.iter().map(|records| ChannelRecords { records: records.iter().collect(), multi_channel: None }).collect();
    solve_records(request, &views)
}

/// `name version build` of every record, in order.
pub fn names(solution: &Solution) -> Vec<String> {
    solution
        .records
        .iter()
        .map(|record| {
            format!("{} {} {}", record.package_record.name.as_normalized(), record.package_record.version, record.package_record.build)
        })
        .collect()
}

/// An error as a person would see it, roughly.
pub fn picture(error: &Error) -> String {
    let mut out = format!("exit {}: {}", error.exit_code(), error.message());
    for cause in error.causes() {
        out.push_str("\n  - ");
        out.push_str(&cause.replace('\n', "\n    "));
    }
    for hint in error.hints() {
        out.push_str("\nhint: ");
        out.push_str(hint);
    }
    out
}

/// The shared real data, or a note that the test is skipped.
pub fn shared_data() -> Option<PathBuf> {
    let path = std::env::var_os("TARE_SHARED_DATA")
        .map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../shared/data"), PathBuf::from);
    if path.join("solves.json").is_file() {
        Some(path)
    } else {
        // The one thing a test may say.
        #[allow(clippy::print_stdout)]
        {
            println!("skipped: no shared data");
        }
        None
    }
}

type Loaded = Arc<Option<SparseRepoData>>;

/// The repodata of one real channel and subdir, decompressed once per test process.
fn sparse(channel: &str, subdir: &str) -> Loaded {
    static CACHE: OnceLock<Mutex<HashMap<(String, String), Loaded>>> = OnceLock::new();
    let cache = CACHE.get_or_init(Mutex::default);
    let mut cache = cache.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    cache
        .entry((channel.to_owned(), subdir.to_owned()))
        .or_insert_with(|| {
            let path = shared_data().expect("shared data").join("channels").join(channel).join(subdir).join("repodata.json.zst");
            let packed = std::fs::read(path).ok();
            Arc::new(packed.map(|packed| {
                let plain = zstd::decode_all(packed.as_slice()).expect("a zstd file");
                let config = ChannelConfig::default_with_root_dir(PathBuf::from("/"));
                let channel = Channel::from_str(channel, &config).expect("a channel");
                SparseRepoData::from_bytes(channel, subdir, plain.into(), None).expect("repodata")
            }))
        })
        .clone()
}

/// Real records needed for the specs, one list per channel and subdir in priority order.
pub fn real_records(channels: &[String], subdir: &str, specs: &[MatchSpec]) -> Vec<Vec<RepoDataRecord>> {
    let loaded: Vec<Loaded> = channels.iter().flat_map(|channel| [sparse(channel, subdir), sparse(channel, "noarch")]).collect();
    let data: Vec<&SparseRepoData> = loaded.iter().filter_map(|data| (**data).as_ref()).collect();
    let names: Vec<PackageName> = specs.iter().filter_map(|spec| spec.name.as_exact().cloned()).collect();
    SparseRepoData::load_records_recursive(data, names, None, PackageFormatSelection::default()).expect("records")
}

/// Solves over the real records of the request's channels.
pub fn solve_real(request: &Request) -> Result<Solution> {
    let records = real_records(&request.channels, &request.target.subdir.to_string(), &request.specs);
    solve_synthetic(request, &records)
}
