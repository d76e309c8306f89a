//! Whole installations of small packages that are made on the spot.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rattler_cache::package_cache::PackageCache;
use rattler_conda_types::compression_level::CompressionLevel;
use rattler_conda_types::package::{DistArchiveIdentifier, IndexJson};
use rattler_conda_types::{MatchSpec, PackageRecord, ParseStrictness, RepoDataRecord, Subdir};
use rattler_networking::LazyClient;
use url::Url;

use super::*;
use crate::report::Silent;

const PLACEHOLDER: &str = "/opt/placeholder_placeholder_placeholder_placeholder_placeholder_placeholder";

/// A package to be made.
pub(crate) struct Recipe {
    name: &'static str,
    version: &'static str,
    noarch_python: bool,
    depends: Vec<&'static str>,
    files: Vec<(String, String, u32)>,
    links: Vec<(&'static str, &'static str)>,
    entry_points: Vec<&'static str>,
}

pub(crate) fn recipe(name: &'static str) -> Recipe {
    Recipe {
        name,
        version: "1.0",
        noarch_python: false,
        depends: Vec::new(),
        files: Vec::new(),
        links: Vec::new(),
        entry_points: Vec::new(),
    }
}

impl Recipe {
    pub(crate) fn file(mut self, path: &str, text: &str) -> Self {
        self.files.push((path.to_owned(), text.to_owned(), 0o644));
        self
    }
    pub(crate) fn program(mut self, path: &str, text: &str) -> Self {
        self.files.push((path.to_owned(), text.to_owned(), 0o755));
        self
    }
    fn link(mut self, path: &'static str, target: &'static str) -> Self {
        self.links.push((path, target));
        self
    }
    fn noarch(mut self, entry_points: &[&'static str]) -> Self {
        self.noarch_python = true;
        self.entry_points = entry_points.to_vec();
        self.depends.push("python");
        self
    }
    pub(crate) fn version(mut self, version: &'static str) -> Self {
        self.version = version;
        self
    }
}

/// A channel folder, a cache and a place for environments, all temporary.
pub(crate) struct World {
    folder: tempfile::TempDir,
}

impl World {
    pub(crate) fn new() -> Self {
        World { folder: tempfile::tempdir().unwrap() }
    }

    pub(crate) fn root(&self) -> PathBuf {
        self.folder.path().canonicalize().unwrap()
    }

    fn cache(&self) -> PackageCache {
        PackageCache::new(self.root().join("cache/pkgs"))
    }

    /// Builds the package and returns its record.
    pub(crate) fn build(&self, recipe: &Recipe) -> RepoDataRecord {
        use std::os::unix::fs::PermissionsExt;
        let source = tempfile::tempdir_in(self.root()).unwrap();
        let subdir = if recipe.noarch_python { "noarch" } else { "linux-64" };
        let mut paths = Vec::new();
        let mut entries = Vec::new();
        for (path, text, mode) in &recipe.files {
            let full = source.path().join(path);
            std::fs::create_dir_all(full.parent().unwrap()).unwrap();
            std::fs::write(&full, text).unwrap();
            std::fs::set_permissions(&full, std::fs::Permissions::from_mode(*mode)).unwrap();
            paths.push(PathBuf::from(path));
            let mut entry = serde_json::json!({
                "_path": path, "path_type": "hardlink", "size_in_bytes": text.len(), "sha256": metadata::sha256_hex(text.as_bytes()),
            });
            if text.contains(PLACEHOLDER) {
                entry["prefix_placeholder"] = PLACEHOLDER.into();
                entry["file_mode"] = "text".into();
            }
            entries.push(entry);
        }
        for (path, target) in &recipe.links {
            let full = source.path().join(path);
            std::fs::create_dir_all(full.parent().unwrap()).unwrap();
            std::os::unix::fs::symlink(target, &full).unwrap();
            paths.push(PathBuf::from(path));
            entries.push(serde_json::json!({ "_path": path, "path_type": "softlink" }));
        }
        let mut index = serde_json::json!({
            "name": recipe.name, "version": recipe.version, "build": "h0_0", "build_number": 0, "subdir": subdir, "depends": recipe.depends,
            "timestamp": 1_700_000_000_000_u64,
        });
        if recipe.noarch_python {
            index["noarch"] = "python".into();
        }
        let mut info = vec![("info/index.json", index), ("info/paths.json", serde_json::json!({ "paths_version": 1, "paths": entries }))];
        if !recipe.entry_points.is_empty() {
            let link = serde_json::json!({
                "package_metadata_version": 1, "noarch": { "type": "python", "entry_points": recipe.entry_points },
            });
            info.push(("info/link.json", link));
        }
        std::fs::create_dir_all(source.path().join("info")).unwrap();
        for (path, value) in info {
            std::fs::write(source.path().join(path), value.to_string()).unwrap();
            paths.push(PathBuf::from(path));
        }
        let stem = format!("{}-{}-h0_0", recipe.name, recipe.version);
        let folder = self.root().join("channel").join(subdir);
        std::fs::create_dir_all(&folder).unwrap();
        let archive = folder.join(format!("{stem}.conda"));
        let paths: Vec<PathBuf> = paths.iter().map(|path| source.path().join(path)).collect();
        let time = "2023-11-14T22:13:20Z".parse().unwrap();
        rattler_package_streaming::write::write_conda_package(
            std::fs::File::create(&archive).unwrap(),
            source.path(),
            &paths,
            CompressionLevel::Lowest,
            Some(1),
            &stem,
            Some(&time),
            None,
        )
        .unwrap();
        self.record(&archive)
    }

    fn record(&self, archive: &Path) -> RepoDataRecord {
        let index: IndexJson = rattler_package_streaming::seek::read_package_file(archive).unwrap();
        let bytes = std::fs::read(archive).unwrap();
        let sha256 = rattler_digest::compute_bytes_digest::<rattler_digest::Sha256>(&bytes);
        let record = PackageRecord::from_index_json(index, Some(bytes.len() as u64), Some(sha256), None).unwrap();
        RepoDataRecord {
            package_record: record,
            identifier: DistArchiveIdentifier::try_from_path(archive).unwrap(),
            url: Url::from_file_path(archive).unwrap(),
            channel: Some("https://conda.anaconda.org/t/tk-secret/test".to_owned()),
        }
    }

    pub(crate) fn plan(&self, name: &str, records: &[RepoDataRecord]) -> Plan {
        let mut plan = Plan::new(self.root().join("envs").join(name), Subdir::Linux64, records.to_vec());
        plan.home = Some(self.root().join("home"));
        plan.command = vec!["tare".into(), "create".into()];
        plan.metadata = serde_json::json!({ "input_digest": "abc" });
        plan
    }

    pub(crate) async fn create(&self, plan: &Plan) -> Result<Installed> {
        create_with(plan, &self.cache(), LazyClient::default(), Arc::new(Silent)).await
    }

    fn envs(&self) -> Vec<String> {
        let mut names: Vec<String> = std::fs::read_dir(self.root().join("envs"))
            .into_iter()
            .flatten()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }
}

/// Path, kind, mode and contents of everything in a folder, but for the time in the history.
pub(crate) fn snapshot(folder: &Path) -> Vec<(String, String)> {
    use std::os::unix::fs::PermissionsExt;
    fn walk(root: &Path, folder: &Path, found: &mut Vec<(String, String)>) {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            let metadata = std::fs::symlink_metadata(&path).unwrap();
            let name = path.strip_prefix(root).unwrap().to_str().unwrap().to_owned();
            let mode = metadata.permissions().mode() & 0o7777;
            if metadata.is_symlink() {
                found.push((name, format!("-> {}", std::fs::read_link(&path).unwrap().display())));
            } else if metadata.is_dir() {
                found.push((name, format!("dir {mode:o}")));
                walk(root, &path, found);
            } else {
                let mut bytes = std::fs::read(&path).unwrap();
                if name == "conda-meta/history" {
                    let text = String::from_utf8(bytes).unwrap();
                    bytes = text.lines().filter(|line| !line.starts_with("==>")).collect::<Vec<_>>().join("\n").into_bytes();
                }
                found.push((name, format!("file {mode:o} {}", metadata::sha256_hex(&bytes))));
            }
        }
    }
    let mut found = Vec::new();
    walk(folder, folder, &mut found);
    found.sort();
    found
}

pub(crate) fn read(path: impl AsRef<Path>) -> String {
    std::fs::read_to_string(path).unwrap()
}

fn two_packages(world: &World) -> Vec<RepoDataRecord> {
    let tool = recipe("tool")
        .program("bin/tool", &format!("#!{PLACEHOLDER}/bin/sh\necho tool\n"))
        .file("share/tool/data", "data\n")
        .link("bin/t", "tool");
    let library = recipe("library").file("lib/library.txt", "library\n").file("etc/library.conf", &format!("home={PLACEHOLDER}/lib\n"));
    vec![world.build(&tool), world.build(&library)]
}

#[tokio::test]
async fn a_path_that_a_shell_would_run_is_refused_where_scripts_hold_it() {
    let world = World::new();
    let scripts = two_packages(&world);
    let python = recipe("python").version("3.11.1").program("bin/python3.11", "#!/bin/sh\n");
    let points = vec![world.build(&python), world.build(&recipe("points").noarch(&["run = points:start"]))];
    let long = "l".repeat(100);
    for name in ["a $(b)", "a `b`", "a \"b", "a \\b", "a '''b", &format!("{long}$(b)")] {
        for records in [&scripts, &points] {
            let plan = world.plan(name, records);
            let error = world.create(&plan).await.unwrap_err();
            assert_eq!(error.exit_code(), 2, "{name}: {error}");
            assert!(error.message().contains("cannot be an environment with") && !error.hints().is_empty(), "{error}");
            assert!(!plan.prefix.exists(), "{name}");
        }
        // Nothing in it names the path to a shell.
        world.create(&world.plan(name, &scripts[1..])).await.unwrap();
    }
    // These mean nothing between double quotes, or there is no line for a shell.
    for name in ["it's b", "a;b c", "x$(b)"] {
        world.create(&world.plan(name, &scripts)).await.unwrap();
    }
}

#[tokio::test]
async fn an_environment_is_made_whole_with_all_its_metadata() {
    let world = World::new();
    let mut plan = world.plan("e", &two_packages(&world));
    plan.requested = vec![MatchSpec::from_str("tool >=1", ParseStrictness::Lenient).unwrap()];
    plan.variables.insert("A".into(), "1".into());
    let installed = world.create(&plan).await.unwrap();
    let prefix = &plan.prefix;
    assert_eq!((installed.linked, installed.compiled), (2, 0));
    assert!(matches!(installed.link_mode_used(), LinkMode::Reflink | LinkMode::Hardlink));
    assert_eq!(read(prefix.join("bin/tool")), format!("#!{}/bin/sh\necho tool\n", prefix.display()));
    assert_eq!(std::fs::read_link(prefix.join("bin/t")).unwrap(), Path::new("tool"));
    assert_eq!(read(prefix.join("conda-meta/state")), "{\n  \"version\": 1,\n  \"env_vars\": {\n    \"A\": \"1\"\n  }\n}\n");
    let record: serde_json::Value = serde_json::from_str(&read(prefix.join("conda-meta/tool-1.0-h0_0.json"))).unwrap();
    assert_eq!(record["requested_spec"], "tool >=1");
    assert_eq!(record["files"], serde_json::json!(["bin/t", "bin/tool", "share/tool/data"]));
    assert!(record["paths_data"]["paths"][1]["sha256_in_prefix"].is_string());
    for gone in ["link", "extracted_package_dir", "package_tarball_full_path"] {
        assert!(record.get(gone).is_none(), "{gone}");
    }
    assert_eq!(record["channel"], "https://conda.anaconda.org/test");
    let history = read(prefix.join("conda-meta/history"));
    assert!(
        history.contains("+test/linux-64::library-1.0-h0_0\n+test/linux-64::tool-1.0-h0_0\n# update specs: ['tool >=1']\n"),
        "{history}"
    );
    assert_eq!(world.envs(), ["e"]);
    assert_eq!(read(world.root().join("home/.conda/environments.txt")), format!("{}\n", prefix.display()));
    for entry in snapshot(prefix) {
        assert!(!read_bytes(prefix, &entry.0).windows(9).any(|window| window == b"tk-secret"), "{entry:?}");
    }
    // Done again it is the same, and a difference is noticed.
    let TargetState::Environment(existing) = state_of_target(prefix).unwrap() else { panic!() };
    assert_eq!(difference(&existing, &plan), None);
    let mut other = plan.clone();
    other.records.pop();
    assert!(!same_as(&existing, &other));
    std::fs::remove_file(prefix.join("share/tool/data")).unwrap();
    assert_eq!(difference(&existing, &plan).unwrap(), "`share/tool/data` is missing");
}

fn read_bytes(prefix: &Path, name: &str) -> Vec<u8> {
    std::fs::read(prefix.join(name)).unwrap_or_default()
}

#[tokio::test]
async fn the_same_packages_give_the_same_bytes_whatever_the_link_mode_and_umask() {
    let world = World::new();
    let mut plan = world.plan("e", &two_packages(&world));
    world.create(&plan).await.unwrap();
    let first = snapshot(&plan.prefix);
    assert!(
        first.contains(&("bin".into(), "dir 755".into()))
            && first.iter().any(|(name, what)| name == "bin/tool" && what.starts_with("file 755"))
    );
    for mode in [LinkMode::Hardlink, LinkMode::Copy] {
        std::fs::remove_dir_all(&plan.prefix).unwrap();
        std::fs::remove_dir_all(world.root().join("cache")).unwrap();
        plan.records.reverse();
        plan.link_mode = mode;
        let old = rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o077));
        let result = world.create(&plan).await;
        rustix::process::umask(old);
        assert_eq!(result.unwrap().link_mode_used(), mode);
        assert_eq!(snapshot(&plan.prefix), first, "{mode}");
    }
}

#[tokio::test]
async fn a_target_that_is_something_else_is_left_alone() {
    let world = World::new();
    let records = two_packages(&world);
    let plan = world.plan("e", &records);
    std::fs::create_dir_all(&plan.prefix).unwrap();
    std::fs::write(plan.prefix.join("mine"), "precious").unwrap();
    for replace in [false, true] {
        let error = world.create(&Plan { replace, ..plan.clone() }).await.unwrap_err();
        assert!(error.message().contains("folder with other things"), "{error}");
    }
    assert_eq!(read(plan.prefix.join("mine")), "precious");
    let file = world.plan("file", &records);
    std::fs::write(&file.prefix, "x").unwrap();
    assert!(world.create(&file).await.unwrap_err().message().contains("is a file"));
    let empty = world.plan("empty", &records);
    std::fs::create_dir(&empty.prefix).unwrap();
    world.create(&empty).await.unwrap();
    let error = world.create(&empty).await.unwrap_err();
    assert!(error.hints().iter().any(|hint| hint.contains("--force")), "{error}");
    std::fs::write(empty.prefix.join("foreign"), "x").unwrap();
    world.create(&Plan { replace: true, ..empty.clone() }).await.unwrap();
    assert!(!empty.prefix.join("foreign").exists());
    std::fs::write(empty.prefix.join("conda-meta/frozen"), "").unwrap();
    assert!(world.create(&Plan { replace: true, ..empty.clone() }).await.unwrap_err().message().contains("frozen"));
    assert_eq!(world.envs(), ["e", "empty", "file"]);
}

#[tokio::test]
async fn a_damaged_cache_entry_is_repaired() {
    let world = World::new();
    let plan = world.plan("e", &two_packages(&world));
    let package = world.root().join("cache/pkgs/tool-1.0-h0_0");
    let damages: [(&str, &dyn Fn()); 4] = [
        ("cut", &|| std::fs::write(package.join("share/tool/data"), "da").unwrap()),
        ("changed, same size", &|| {
            // Not in place: a hard link of the first environment would change too.
            std::fs::remove_file(package.join("share/tool/data")).unwrap();
            std::thread::sleep(Duration::from_millis(20));
            std::fs::write(package.join("share/tool/data"), "DATA\n").unwrap();
        }),
        ("gone", &|| std::fs::remove_file(package.join("bin/tool")).unwrap()),
        ("no metadata", &|| std::fs::remove_file(package.join("info/paths.json")).unwrap()),
    ];
    for (what, damage) in damages {
        world.create(&plan).await.unwrap();
        std::fs::remove_dir_all(&plan.prefix).unwrap();
        damage();
        world.create(&plan).await.unwrap_or_else(|error| panic!("{what}: {error}"));
        assert_eq!(read(plan.prefix.join("share/tool/data")), "data\n", "{what}");
        assert!(read(plan.prefix.join("bin/tool")).contains("echo tool"), "{what}");
        std::fs::remove_dir_all(&plan.prefix).unwrap();
    }
}

#[tokio::test]
async fn archives_that_are_not_what_they_should_be_leave_nothing() {
    let world = World::new();
    let mut records = two_packages(&world);
    // Another hash.
    records[0].package_record.sha256 = Some(rattler_digest::compute_bytes_digest::<rattler_digest::Sha256>(b"else"));
    let plan = world.plan("e", &records);
    let error = world.create(&plan).await.unwrap_err();
    assert_eq!((error.exit_code(), error.message()), (5, "the package tool 1.0 h0_0 is not what was asked for"), "{error}");
    // Only an MD5, and a wrong one; then the right one.
    records[0].package_record.sha256 = None;
    records[0].package_record.md5 = Some(rattler_digest::compute_bytes_digest::<rattler_digest::Md5>(b"else"));
    assert_eq!(world.create(&world.plan("e", &records)).await.unwrap_err().exit_code(), 5);
    let bytes = std::fs::read(records[0].url.to_file_path().unwrap()).unwrap();
    records[0].package_record.md5 = Some(rattler_digest::compute_bytes_digest::<rattler_digest::Md5>(&bytes));
    world.create(&world.plan("md5", &records)).await.unwrap();
    // The wrong one again, now that the package is in the cache.
    records[0].package_record.md5 = Some(rattler_digest::compute_bytes_digest::<rattler_digest::Md5>(b"else"));
    assert_eq!(world.create(&world.plan("e", &records)).await.unwrap_err().exit_code(), 5);
    // Cut off.
    let records = two_packages(&world);
    let archive = records[1].url.to_file_path().unwrap();
    let cut = &std::fs::read(&archive).unwrap()[..300];
    std::fs::write(&archive, cut).unwrap();
    std::fs::remove_dir_all(world.root().join("cache")).unwrap();
    assert_eq!(world.create(&world.plan("e", &records)).await.unwrap_err().exit_code(), 5);
    std::fs::remove_file(&archive).unwrap();
    let error = world.create(&world.plan("e", &records)).await.unwrap_err();
    assert!(error.message().contains("is not there"), "{error}");
    assert_eq!(world.envs(), ["md5"]);
}

#[tokio::test]
async fn files_of_two_packages_are_refused_unless_allowed_or_identical() {
    let world = World::new();
    let a = world.build(&recipe("a").file("share/x", "from a\n").file("share/same", "same\n"));
    let mut b = recipe("b").file("share/x", "from b\n").file("share/same", "same\n");
    b.depends.push("a");
    let b = world.build(&b);
    let mut plan = world.plan("e", &[b, a]);
    let error = world.create(&plan).await.unwrap_err();
    assert_eq!(error.exit_code(), 1);
    assert_eq!(error.causes(), ["`share/x`: `a` and `b`"]);
    assert!(world.envs().is_empty());
    plan.clobber = true;
    let installed = world.create(&plan).await.unwrap();
    assert_eq!(read(plan.prefix.join("share/x")), "from b\n");
    assert_eq!(read(plan.prefix.join("__clobbers__/a/share/x")), "from a\n");
    assert_eq!(installed.clobbered.iter().map(|clobber| clobber.identical).collect::<Vec<_>>(), [true, false]);
    // Identical only.
    let c = world.build(&recipe("c").file("share/same", "same\n"));
    let a = plan.records.pop().unwrap();
    world.create(&world.plan("same", &[a, c])).await.unwrap();
    // A file where another package needs a folder.
    let d = world.build(&recipe("d").file("share/same/inner", "x"));
    let error = world.create(&world.plan("mixed", &[world.build(&recipe("c").file("share/same", "same\n")), d])).await.unwrap_err();
    assert!(error.message().contains("`share/same` is a file or link of `c`"), "{error}");
}

#[tokio::test]
async fn links_out_of_the_environment_are_named_or_refused_and_never_written_through() {
    let world = World::new();
    let outside = world.root().join("outside");
    std::fs::create_dir(&outside).unwrap();
    let leaked: &'static str = Box::leak(outside.to_str().unwrap().to_owned().into_boxed_str());
    let evil = world.build(&recipe("evil").link("share/door", leaked));
    let user = world.build(&recipe("user").file("share/door/file", "x"));
    let mut plan = world.plan("e", std::slice::from_ref(&evil));
    plan.external_links = ExternalLinks::Deny;
    assert_eq!(world.create(&plan).await.unwrap_err().exit_code(), 5);
    plan.external_links = ExternalLinks::Warn;
    world.create(&plan).await.unwrap();
    let through = world.plan("through", &[evil, user]);
    assert_eq!(world.create(&through).await.unwrap_err().exit_code(), 1);
    assert_eq!(std::fs::read_dir(&outside).unwrap().count(), 0);
}

#[tokio::test]
async fn a_killed_run_is_tidied_up_by_the_next() {
    let world = World::new();
    let plan = world.plan("e", &two_packages(&world));
    let left = world.root().join("envs/.e.tare-stage-1-abcdef");
    std::fs::create_dir_all(left.join("conda-meta")).unwrap();
    std::fs::write(world.root().join("envs/.e.lock"), "{}").unwrap();
    // Unpacking into the cache was interrupted too.
    std::fs::create_dir_all(world.root().join("cache/pkgs/tool-1.0-h0_0/info")).unwrap();
    std::fs::write(world.root().join("cache/pkgs/tool-1.0-h0_0.lock"), 3_u64.to_be_bytes()).unwrap();
    let installed = world.create(&plan).await.unwrap();
    assert_eq!(installed.recovered.removed, 1);
    assert_eq!(world.envs(), ["e"]);
}

#[tokio::test]
async fn cancelling_leaves_nothing_behind() {
    let world = World::new();
    let plan = world.plan("e", &two_packages(&world));
    plan.cancel.cancel();
    assert_eq!(world.create(&plan).await.unwrap_err().exit_code(), 130);
    assert!(world.envs().is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn eight_at_once_on_a_cold_cache_all_succeed() {
    let world = Arc::new(World::new());
    let records = two_packages(&world);
    let tasks: Vec<_> = (0..8)
        .map(|number| {
            let (world, records) = (world.clone(), records.clone());
            // A cache object of its own each, as in a process of its own.
            tokio::spawn(async move { world.create(&world.plan(&format!("e{number}"), &records)).await })
        })
        .collect();
    for task in tasks {
        task.await.unwrap().unwrap();
    }
    assert_eq!(world.envs().len(), 8);
}

#[tokio::test]
async fn explicit_archives_get_complete_records() {
    let world = World::new();
    let mut with_depends = recipe("tool").file("x", "x");
    with_depends.depends.push("library >=1");
    let built = world.build(&with_depends);
    let archive = Archive { url: built.url.clone(), md5: None, sha256: None };
    let records =
        records_for_archives(std::slice::from_ref(&archive), &world.cache(), LazyClient::default(), Arc::new(Silent), &Cancel::new())
            .await
            .unwrap();
    assert_eq!(records[0].package_record.depends, ["library >=1"]);
    assert_eq!(records[0].package_record.sha256, built.package_record.sha256);
    assert!(records[0].channel.as_deref().unwrap().ends_with("/channel"), "{:?}", records[0].channel);
    // An archive that lies about its name.
    let renamed = built.url.to_file_path().unwrap().with_file_name("other-1.0-h0_0.conda");
    std::fs::copy(built.url.to_file_path().unwrap(), &renamed).unwrap();
    let archive = Archive { url: Url::from_file_path(&renamed).unwrap(), md5: None, sha256: None };
    let error =
        records_for_archives(&[archive], &world.cache(), LazyClient::default(), Arc::new(Silent), &Cancel::new()).await.unwrap_err();
    assert_eq!(error.exit_code(), 5, "{error}");
}

#[tokio::test]
async fn link_scripts_run_only_where_allowed_and_in_the_finished_place() {
    let world = World::new();
    let script = "echo \"$PREFIX\" > \"$PREFIX/ran\"\n";
    let records = [world.build(&recipe("s").program("bin/.s-post-link.sh", script))];
    let plan = world.plan("e", &records);
    let installed = world.create(&plan).await.unwrap();
    assert_eq!(installed.skipped_link_scripts.len(), 1);
    assert!(!plan.prefix.join("ran").exists());
    let mut plan = world.plan("allowed", &records);
    plan.link_scripts.allow = vec!["s".parse().unwrap()];
    assert_eq!(world.create(&plan).await.unwrap().ran_link_scripts.len(), 1);
    assert_eq!(read(plan.prefix.join("ran")).trim(), plan.prefix.to_str().unwrap());
    let failing = [world.build(&recipe("s").version("2").program("bin/.s-post-link.sh", "echo no luck >&2; exit 4\n"))];
    let mut plan = world.plan("failing", &failing);
    plan.link_scripts.allow = vec!["s".parse().unwrap()];
    let error = world.create(&plan).await.unwrap_err();
    assert!(error.causes().contains(&"no luck".to_owned()), "{error}");
    assert!(plan.prefix.join("conda-meta/history").exists());
}

/// An interpreter on this machine to stand in for the one of the environment.
pub(crate) fn host_python() -> Option<(PathBuf, String)> {
    let output = std::process::Command::new("python3")
        .args(["-c", "import sys; print(sys.executable); print('%d.%d' % sys.version_info[:2])"])
        .output()
        .ok()
        .filter(|output| output.status.success())?;
    let text = String::from_utf8(output.stdout).ok()?;
    let mut lines = text.lines();
    Some((PathBuf::from(lines.next()?), lines.next()?.to_owned()))
}

#[tokio::test]
async fn noarch_files_are_compiled_once_and_for_good() {
    let Some((interpreter, version)) = host_python() else {
        eprintln!("skipped: no python3 on PATH");
        return;
    };
    let world = World::new();
    let version: &'static str = Box::leak(version.into_boxed_str());
    let path: &'static str = Box::leak(format!("bin/python{version}").into_boxed_str());
    let python = recipe("python").version(version).program(path, &format!("#!/bin/sh\nexec '{}' \"$@\"\n", interpreter.display()));
    let mut library = recipe("lib").noarch(&["run-lib = lib.main:start"]);
    for (path, text) in [
        ("site-packages/lib/__init__.py", "NAMES = {'b', 'a', 'c'}\ndef f(x): return x in {'q', 'r', 's', 1.5}\n"),
        ("site-packages/lib/main.py", "from lib import f\ndef start(): return f('q')\n"),
        ("site-packages/lib/broken.py", "def (:\n"),
        ("site-packages/lib/data.txt", "no code\n"),
    ] {
        library = library.file(path, text);
    }
    let second = recipe("other").noarch(&[]).file("site-packages/other.py", "X = 'lib'\nY = frozenset(['b', 'a'])\n");
    let records = [world.build(&python), world.build(&library), world.build(&second)];
    let mut plan = world.plan("e", &records);
    let installed = world.create(&plan).await.unwrap();
    assert_eq!((installed.compiled, installed.not_compiled), (3, None));
    let site = plan.prefix.join(format!("lib/python{version}/site-packages"));
    let tag = version.replace('.', "");
    let pyc = site.join(format!("lib/__pycache__/__init__.cpython-{tag}.pyc"));
    let bytes = std::fs::read(&pyc).unwrap();
    // PEP 552: flags word 1 is "hash-based, not checked".
    assert_eq!(bytes[4..8], [1, 0, 0, 0]);
    let source = site.join("lib/__init__.py").to_str().unwrap().to_owned();
    assert!(bytes.windows(source.len()).any(|window| window == source.as_bytes()));
    let record: serde_json::Value = serde_json::from_str(&read(plan.prefix.join("conda-meta/lib-1.0-h0_0.json"))).unwrap();
    let listed = record["paths_data"]["paths"].as_array().unwrap().iter().filter(|entry| entry["path_type"] == "pyc_file").count();
    assert_eq!(listed, 2);
    let first = snapshot(&plan.prefix);
    let strays: Vec<_> = first.iter().filter(|(name, _)| name.contains("tare-compile") || name.contains("broken.cpython")).collect();
    assert!(strays.is_empty(), "{strays:?}");
    let entry_point = plan.prefix.join("bin/run-lib");
    assert!(read(&entry_point).starts_with(&format!("#!{}/bin/python{version}\n", plan.prefix.display())));
    assert!(first.iter().any(|(name, what)| name == "bin/run-lib" && what.starts_with("file 755")));
    std::fs::remove_dir_all(&plan.prefix).unwrap();
    world.create(&plan).await.unwrap();
    assert_eq!(snapshot(&plan.prefix), first);
    // The interpreter takes the byte code: it runs without the source.
    std::fs::remove_file(site.join("other.py")).unwrap();
    std::fs::rename(site.join(format!("__pycache__/other.cpython-{tag}.pyc")), site.join("other.pyc")).unwrap();
    let output =
        std::process::Command::new(&interpreter).args(["-c", "import other; print(other.X)"]).env("PYTHONPATH", &site).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), "lib", "{output:?}");
    // Left out on request, and where the interpreter does not run.
    plan = world.plan("without", &records);
    plan.compile = false;
    assert_eq!(world.create(&plan).await.unwrap().compiled, 0);
    let broken = world.build(&recipe("python").version(version).file("share/nothing", "x"));
    let installed = world.create(&world.plan("broken", &[broken, records[1].clone()])).await.unwrap();
    assert!(installed.not_compiled.unwrap().contains("does not start"));
}

#[tokio::test]
async fn a_read_only_layer_serves_what_it_has() {
    let world = World::new();
    let records = two_packages(&world);
    world.create(&world.plan("fill", &records[..1])).await.unwrap();
    let lower = world.root().join("lower");
    std::fs::rename(world.root().join("cache/pkgs"), &lower).unwrap();
    std::fs::remove_dir_all(lower.join(super::cache::LOCK_FOLDER)).unwrap();
    use std::os::unix::fs::PermissionsExt;
    std::fs::set_permissions(&lower, std::fs::Permissions::from_mode(0o555)).unwrap();
    let upper = world.root().join("upper");
    let layered = || PackageCache::new_layered([lower.clone(), upper.clone()], false, rattler_cache::validation::ValidationMode::Skip);
    create_with(&world.plan("e", &records), &layered(), LazyClient::default(), Arc::new(Silent)).await.unwrap();
    assert!(!upper.join("tool-1.0-h0_0").exists() && upper.join("library-1.0-h0_0").exists());
    // Damaged down there: fetched into the layer above.
    std::fs::write(lower.join("tool-1.0-h0_0/share/tool/data"), "cut").unwrap();
    create_with(&world.plan("e2", &records), &layered(), LazyClient::default(), Arc::new(Silent)).await.unwrap();
    assert!(upper.join("tool-1.0-h0_0").exists());
    assert_eq!(read(world.root().join("envs/e2/share/tool/data")), "data\n");
    std::fs::set_permissions(&lower, std::fs::Permissions::from_mode(0o755)).unwrap();
}

/// Serves one file over HTTP and cuts the first answers short.
fn serve(bytes: Vec<u8>, cut_answers: usize) -> Url {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/linux-64/", listener.local_addr().unwrap());
    std::thread::spawn(move || {
        for (number, stream) in listener.incoming().enumerate() {
            let mut stream = stream.unwrap();
            let mut request = [0u8; 4096];
            let _ = std::io::Read::read(&mut stream, &mut request);
            let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\nconnection: close\r\n\r\n", bytes.len());
            let _ = stream.write_all(head.as_bytes());
            let body = if number < cut_answers { &bytes[..bytes.len() / 2] } else { &bytes[..] };
            let _ = stream.write_all(body);
        }
    });
    url.parse().unwrap()
}

#[tokio::test]
async fn a_download_that_is_cut_off_is_tried_again() {
    let world = World::new();
    let mut records = two_packages(&world);
    let file = records[0].url.path_segments().unwrap().next_back().unwrap().to_owned();
    let bytes = std::fs::read(records[0].url.to_file_path().unwrap()).unwrap();
    records[0].url = serve(bytes, 1).join(&file).unwrap();
    world.create(&world.plan("e", &records)).await.unwrap();
    // Nobody there: kind network, with a name in the message.
    records[0].url = "http://127.0.0.1:1/linux-64/".parse::<Url>().unwrap().join(&file).unwrap();
    std::fs::remove_dir_all(world.root().join("cache")).unwrap();
    let error = world.create(&world.plan("e2", &records)).await.unwrap_err();
    assert_eq!((error.exit_code(), error.message()), (7, "cannot fetch tool 1.0 h0_0"), "{error}");
    assert!(error.causes().iter().any(|cause| cause.contains("127.0.0.1:1")), "{error}");
}
