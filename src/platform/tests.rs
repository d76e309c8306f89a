use std::path::Path;
use std::time::{Duration, Instant};

use super::*;

/// A machine made of files: no driver unless something is put there.
struct Machine {
    folder: tempfile::TempDir,
}

impl Machine {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        for below in ["root/proc/driver/nvidia", "root/sys/module/nvidia", "root/dev", "bin", "cache"] {
            std::fs::create_dir_all(folder.path().join(below)).unwrap();
        }
        let machine = Machine { folder };
        machine.write("root/proc/sys/kernel/random/boot_id", "boot-1\n");
        machine.route("nvml", "");
        machine
    }

    fn path(&self, below: &str) -> std::path::PathBuf {
        self.folder.path().join(below)
    }

    fn write(&self, below: &str, text: &str) {
        let path = self.path(below);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }

    fn script(&self, below: &str, body: &str) {
        use std::os::unix::fs::PermissionsExt;
        self.write(below, &format!("#!/bin/sh\n{body}\n"));
        std::fs::set_permissions(self.path(below), std::fs::Permissions::from_mode(0o755)).unwrap();
    }

    /// What the child says for a route; the other routes say that there is nothing.
    fn route(&self, name: &str, body: &str) {
        let nothing = r#"echo "{\"name\":\"$1\",\"problem\":\"no library\"}""#;
        self.script("bin/child", &format!("if [ \"$1\" = {name} ]; then :\n{body}\nexit 0; fi\n{nothing}"));
    }

    fn smi(&self, body: &str) {
        self.script("bin/nvidia-smi", body);
    }

    fn options<const N: usize>(&self, variables: [(&str, &str); N]) -> TargetOptions {
        let bin = self.path("bin").display().to_string();
        let mut map: std::collections::HashMap<String, String> =
            variables.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        map.insert("PATH".to_owned(), bin);
        let mut options = TargetOptions::new(Environment::from_map(map), Some(self.path("cache")));
        options.probe = gpu::Probe {
            root: self.path("root"),
            child: Some(vec![self.path("bin/child").into_os_string()]),
            limit: Duration::from_millis(1500),
            cache: false,
        };
        options
    }
}

fn value(target: &Target, name: &str) -> Option<(String, Provenance, String)> {
    target.get(name).map(|package| (package.package.version.to_string(), package.provenance, package.source.clone()))
}

fn some(version: &str, provenance: Provenance, source: &str) -> Option<(String, Provenance, String)> {
    Some((version.to_owned(), provenance, source.to_owned()))
}

const XML: &str = r#"cat <<'X'
<nvidia_smi_log>
<driver_version>550.54.14</driver_version>
<cuda_version>12.4</cuda_version>
</nvidia_smi_log>
X"#;

fn smi_with_devices(xml: &str) -> String {
    format!(
        "case \"$1\" in\n--query-gpu*) echo '0, NVIDIA H100 80GB HBM3, 81559, 9.0'; echo '1, Tesla T4, 15360, 7.5';;\n*) {xml}\n;;\nesac"
    )
}

#[test]
fn a_machine_without_a_driver_has_no_cuda_and_every_route_says_why() {
    let machine = Machine::new();
    let target = target(&machine.options([])).unwrap();
    assert!(target.is_native);
    assert_eq!(target.subdir_source, "this machine");
    assert!(target.cuda().is_none() && target.get("__cuda_arch").is_none());
    assert_eq!(target.gpu.routes.iter().map(|route| route.name.as_str()).collect::<Vec<_>>(), ["nvml", "libcuda", "nvidia-smi", "kernel"]);
    assert!(target.gpu.routes.iter().all(|route| route.problem.is_some()), "{:?}", target.gpu.routes);
    assert_eq!(target.get("__unix").unwrap().provenance, Provenance::Detected);
    assert_eq!(target.get("__archspec").unwrap().package.version.to_string(), "1");
    assert_eq!(value(&target, "__linux").unwrap().2, "uname");
    assert_eq!(value(&target, "__glibc").unwrap().1, Provenance::Detected);
}

#[test]
fn the_first_route_that_answers_wins() {
    let machine = Machine::new();
    machine.smi(&smi_with_devices(XML));
    machine.write("root/sys/module/nvidia/version", "550.54.14\n");
    let found = target(&machine.options([])).unwrap();
    assert_eq!(value(&found, "__cuda"), some("12.4", Provenance::Detected, "nvidia-smi"));
    assert_eq!(value(&found, "__cuda_arch"), some("7.5", Provenance::Detected, "nvidia-smi"));
    assert_eq!(found.gpu.devices.len(), 2);
    assert_eq!(found.gpu.devices[0].memory_bytes, Some(81559 << 20));
    assert!(found.remarks.is_empty(), "{:?}", found.remarks);

    machine.route("nvml", r#"echo junk of the library; echo "{\"name\":\"nvml\",\"cuda\":\"12.2\"}""#);
    let found = target(&machine.options([])).unwrap();
    assert_eq!(value(&found, "__cuda"), some("12.2", Provenance::Detected, "nvml"));
}

#[test]
fn a_route_that_hangs_is_killed_and_the_others_count() {
    let machine = Machine::new();
    machine.route("nvml", "/bin/sleep 60");
    machine.smi("/bin/sleep 60 & wait");
    machine.write(
        "root/proc/driver/nvidia/version",
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.54.03  Tue Jun  6 22:20:39 UTC 2023\nGCC version: 12\n",
    );
    let begin = Instant::now();
    let found = target(&machine.options([])).unwrap();
    assert!(begin.elapsed() < Duration::from_millis(2000), "{:?}", begin.elapsed());
    assert_eq!(value(&found, "__cuda"), some("12.2", Provenance::Detected, "kernel"));
    let remarks = found.remarks.join("\n");
    assert!(remarks.contains("nvml: did not answer within 1.5 s"), "{remarks}");
    assert!(remarks.contains("nvidia-smi: did not answer within"), "{remarks}");
    assert!(remarks.contains("only the kernel module answered (driver 535.54.03)"), "{remarks}");
}

#[test]
fn a_child_that_crashes_or_talks_nonsense_is_no_answer() {
    for (body, problem) in [
        ("kill -SEGV $$", "crashed: SIGSEGV"),
        ("echo '{\"name\":\"libcuda\",\"cuda\":\"12.0\"}'", "gave no answer"),
        ("echo '{'", "gave no answer"),
        ("/bin/dd if=/dev/zero bs=1024 count=4096 2>/dev/null", "crashed"),
        ("exit 5", "ended with exit code 5"),
    ] {
        let machine = Machine::new();
        machine.route("nvml", body);
        let found = target(&machine.options([])).unwrap();
        let said = found.gpu.routes[0].problem.clone().unwrap_or_default();
        assert!(said.contains(problem) || (problem == "crashed" && said.contains("no answer")), "{body}: {said}");
        assert!(found.cuda().is_none(), "{body}");
    }
    let machine = Machine::new();
    machine.route("nvml", "echo '{\"name\":\"nvml\",\"cuda\":\"; rm -rf\"}'");
    assert!(target(&machine.options([])).unwrap().cuda().is_none());
}

#[test]
fn nvidia_smi_may_fail_in_many_ways() {
    for (body, problem) in [
        (
            "echo 'Failed to initialize NVML: Driver/library version mismatch'; echo 'NVML library version: 550.90'; exit 18",
            "version mismatch",
        ),
        ("echo garbage; exit 0", "its first line: garbage"),
        ("exit 9", "ended with exit code 9: nothing"),
        ("echo '<cuda_version>N/A</cuda_version>'", "said no CUDA version"),
        ("printf '<cuda_version>12.4'", "said no CUDA version"),
        ("printf '\\377\\376\\000'", "said no CUDA version"),
    ] {
        let machine = Machine::new();
        machine.smi(body);
        let found = target(&machine.options([])).unwrap();
        let said = found.gpu.routes[2].problem.clone().unwrap_or_default();
        assert!(said.contains(problem), "{body}: {said}");
        assert!(found.cuda().is_none());
    }
}

#[test]
fn driver_and_library_of_two_versions_are_flagged() {
    let machine = Machine::new();
    machine.write("root/sys/module/nvidia/version", "535.54.03\n");
    machine.smi("echo 'Failed to initialize NVML: Driver/library version mismatch' ; exit 18");
    let found = target(&machine.options([])).unwrap();
    assert!(found.remarks[0].contains("driver/library version mismatch") && found.remarks[0].contains("535.54.03"), "{:?}", found.remarks);

    machine.smi(&smi_with_devices(XML));
    let found = target(&machine.options([])).unwrap();
    assert!(found.remarks[0].contains("the kernel module is 535.54.03, the driver's libraries are 550.54.14"), "{:?}", found.remarks);

    let routes = |nvml: &str, libcuda: &str| {
        format!(
            "if [ \"$1\" = nvml ]; then echo '{{\"name\":\"nvml\",\"cuda\":\"{nvml}\"}}'; exit; fi; if [ \"$1\" = libcuda ]; then echo '{{\"name\":\"libcuda\",\"cuda\":\"{libcuda}\"}}'; fi"
        )
    };
    machine.script("bin/child", &routes("12.2", "12.6"));
    machine.smi("exit 1");
    let found = target(&machine.options([])).unwrap();
    assert_eq!(value(&found, "__cuda"), some("12.2", Provenance::Detected, "nvml"));
    assert!(found.remarks.iter().any(|remark| remark.contains("NVML says CUDA 12.2 and libcuda says 12.6")), "{:?}", found.remarks);
}

#[test]
fn the_second_look_comes_from_the_cache_until_something_changes() {
    let machine = Machine::new();
    machine.route("nvml", &format!("echo x >> {}; echo '{{\"name\":\"nvml\",\"cuda\":\"12.4\"}}'", machine.path("asked").display()));
    let mut options = machine.options([]);
    options.probe.cache = true;
    let asked = || std::fs::read_to_string(machine.path("asked")).unwrap_or_default().len();
    assert!(!target(&options).unwrap().gpu.from_cache);
    assert_eq!(asked(), 2);
    let second = target(&options).unwrap();
    assert!(second.gpu.from_cache);
    assert_eq!(value(&second, "__cuda"), some("12.4", Provenance::Detected, "nvml"));
    assert_eq!(asked(), 2);
    machine.write("root/proc/sys/kernel/random/boot_id", "boot-2\n");
    assert!(!target(&options).unwrap().gpu.from_cache);
    machine.write("root/sys/module/nvidia/version", "550.54.14");
    assert!(!target(&options).unwrap().gpu.from_cache);
    machine.write("root/dev/nvidia0", "");
    assert!(!target(&options).unwrap().gpu.from_cache);
    assert_eq!(asked(), 8);
    // A damaged cache is looked past, and a folder that cannot be written costs nothing but time.
    for entry in std::fs::read_dir(machine.path("cache/detection")).unwrap() {
        std::fs::write(entry.unwrap().path(), "{").unwrap();
    }
    assert!(!target(&options).unwrap().gpu.from_cache);
    options.cache_dir = Some(Path::new("/proc/no/such").to_path_buf());
    assert!(target(&options).unwrap().cuda().is_some());
}

#[test]
fn flags_before_variables_before_files_before_detection() {
    let machine = Machine::new();
    machine.smi(&smi_with_devices(XML));
    let mut options = machine.options([]);
    let cuda = |options: &TargetOptions| value(&target(options).unwrap(), "__cuda");
    assert_eq!(cuda(&options), some("12.4", Provenance::Detected, "nvidia-smi"));
    options.overrides.insert("cuda".to_owned(), ("12.5".to_owned(), "/etc/conda/.condarc".to_owned()));
    assert_eq!(cuda(&options), some("12.5", Provenance::Overridden, "/etc/conda/.condarc"));
    options.variables.insert("CONDA_OVERRIDE_CUDA".to_owned(), "12.6".to_owned());
    assert_eq!(cuda(&options), some("12.6", Provenance::Overridden, "`variables` CONDA_OVERRIDE_CUDA"));
    let with_env = machine.options([("CONDA_OVERRIDE_CUDA", "12.7")]);
    options.env = with_env.env;
    assert_eq!(cuda(&options), some("12.7", Provenance::Overridden, "CONDA_OVERRIDE_CUDA"));
    options.cuda = Some("12.8".to_owned());
    assert_eq!(cuda(&options), some("12.8", Provenance::Assumed, "--cuda"));
    options.cuda = None;
    options.virtual_packages = vec!["__cuda=12.9".to_owned()];
    assert_eq!(cuda(&options), some("12.9", Provenance::Assumed, "--virtual-package"));
    options.virtual_packages.clear();
    options.gpu = GpuIntent::None;
    assert_eq!(cuda(&options), None);
}

#[test]
fn an_empty_override_removes_and_takes_the_capability_along() {
    let machine = Machine::new();
    machine.smi(&smi_with_devices(XML));
    let found = target(&machine.options([("CONDA_OVERRIDE_CUDA", ""), ("CONDA_OVERRIDE_GLIBC", "2.17")])).unwrap();
    assert!(found.cuda().is_none() && found.get("__cuda_arch").is_none());
    assert_eq!(value(&found, "__glibc"), some("2.17", Provenance::Overridden, "CONDA_OVERRIDE_GLIBC"));
    assert_eq!(found.virtual_packages.iter().filter(|package| package.package.name.as_normalized() == "__glibc").count(), 1);
    assert!(found.remarks.iter().any(|remark| remark == "`__cuda` was removed by CONDA_OVERRIDE_CUDA"), "{:?}", found.remarks);

    let lone = Machine::new();
    let found = target(&lone.options([("CONDA_OVERRIDE_CUDA_ARCH", "8.6")])).unwrap();
    assert!(found.get("__cuda_arch").is_none());
    assert!(
        found.remarks.iter().any(|remark| remark.contains("`__cuda_arch` from CONDA_OVERRIDE_CUDA_ARCH was dropped")),
        "{:?}",
        found.remarks
    );
    let found = target(&lone.options([("CONDA_OVERRIDE_CUDA_ARCH", "8.6"), ("CONDA_OVERRIDE_CUDA", "12.1")])).unwrap();
    assert_eq!(value(&found, "__cuda_arch"), some("8.6", Provenance::Overridden, "CONDA_OVERRIDE_CUDA_ARCH"));
}

#[test]
fn another_platform_gets_documented_defaults_and_no_gpu() {
    let machine = Machine::new();
    machine.smi(&smi_with_devices(XML));
    let mut options = machine.options([("CONDA_OVERRIDE_OSX", "14.0")]);
    let describe = |target: &Target| {
        target.virtual_packages.iter().map(|package| format!("{} {:?}", package.package, package.provenance)).collect::<Vec<_>>().join("\n")
    };
    options.platform = Some("linux-ppc64le".to_owned());
    let found = target(&options).unwrap();
    assert!(!found.is_native && found.gpu.routes.is_empty());
    insta::assert_snapshot!(describe(&found), @r"
    __unix=0=0 Detected
    __linux=4.18=0 Default
    __glibc=2.28=0 Default
    __archspec=1=ppc64le Default
    ");
    assert!(found.remarks[0].contains("`__glibc=2.28=0`"), "{:?}", found.remarks);
    options.platform = Some("osx-arm64".to_owned());
    insta::assert_snapshot!(describe(&target(&options).unwrap()), @r"
    __unix=0=0 Detected
    __osx=14.0=0 Overridden
    __archspec=1=m1 Default
    ");
    options.platform = Some("win-64".to_owned());
    options.cuda = Some("12.6".to_owned());
    insta::assert_snapshot!(describe(&target(&options).unwrap()), @r"
    __win=10.0=0 Default
    __cuda=12.6=0 Assumed
    __archspec=1=x86_64 Default
    ");
}

#[test]
fn the_platform_comes_from_flag_variable_or_file() {
    let machine = Machine::new();
    let mut options = machine.options([]);
    options.subdir = Some(("osx-64".to_owned(), "/home/x/.condarc".to_owned()));
    assert_eq!(target(&options).unwrap().subdir_source, "/home/x/.condarc");
    options.env = machine.options([("CONDA_SUBDIR", "win-64")]).env;
    let found = target(&options).unwrap();
    assert_eq!((found.subdir, found.subdir_source.as_str()), (Subdir::Win64, "CONDA_SUBDIR"));
    options.platform = Some("linux-aarch64".to_owned());
    assert_eq!(target(&options).unwrap().subdir, Subdir::LinuxAarch64);
}

#[test]
fn bad_options_are_refused_with_a_hint() {
    let machine = Machine::new();
    let fails = |change: &dyn Fn(&mut TargetOptions)| {
        let mut options = machine.options([]);
        change(&mut options);
        let error = target(&options).unwrap_err();
        assert_eq!(error.exit_code(), 2);
        format!("{error} | {}", error.hints().join(" / "))
    };
    let out = [
        fails(&|options| options.platform = Some("linux-46".to_owned())),
        fails(&|options| options.platform = Some("noarch".to_owned())),
        fails(&|options| options.platform = Some("\u{1F980}".to_owned())),
        fails(&|options| options.cuda = Some("twelve".to_owned())),
        fails(&|options| options.cuda = Some("12.4.1".to_owned())),
        fails(&|options| options.cuda = Some("0".to_owned())),
        fails(&|options| options.virtual_packages = vec!["cuda=12".to_owned()]),
        fails(&|options| options.virtual_packages = vec!["__cuda".to_owned()]),
        fails(&|options| options.virtual_packages = vec!["__glibc>=2".to_owned()]),
        fails(&|options| options.virtual_packages = vec!["__glibc=2.*".to_owned()]),
        fails(&|options| options.virtual_packages = vec!["__glibc==2".to_owned()]),
        fails(&|options| options.virtual_packages = vec!["__glibc=2.28=".to_owned()]),
        fails(&|options| options.virtual_packages = vec!["__glibc=2.28".to_owned(), "__glibc=2.17".to_owned()]),
        fails(&|options| options.virtual_packages = vec!["__cuda_arch=8".to_owned()]),
        fails(&|options| options.virtual_packages = vec!["__archspec=2=zen4".to_owned()]),
        fails(&|options| {
            options.virtual_packages = vec!["__cuda=12.2".to_owned()];
            options.cuda = Some("12.4".to_owned());
        }),
        fails(&|options| {
            options.gpu = GpuIntent::None;
            options.cuda = Some("12.4".to_owned());
        }),
        fails(&|options| options.env = Environment::from_pairs([("CONDA_OVERRIDE_CUDA", "newest")])),
        fails(&|options| {
            options.overrides.insert("a b".to_owned(), ("1".to_owned(), "x".to_owned()));
        }),
    ];
    for line in &out {
        assert!(line.contains('`'), "{line}");
    }
    insta::assert_snapshot!(out[..5].join("\n"), @r"
    --platform: there is no platform `linux-46` | did you mean `linux-64`?
    --platform: `noarch` is no platform of a machine | noarch packages are always looked at; name a machine: --platform linux-64
    --platform: there is no platform `🦀` | common ones: linux-64, linux-aarch64, osx-64, osx-arm64, win-64
    --cuda: `twelve` is no CUDA version: it is not of the form MAJOR.MINOR | give major and minor, as nvidia-smi prints them: --cuda 12.6
    --cuda: `12.4.1` is no CUDA version: a driver's CUDA version has two parts | give major and minor, as nvidia-smi prints them: --cuda 12.6
    ");
}

#[test]
fn good_options_are_taken() {
    let machine = Machine::new();
    let with = |text: &str| {
        let mut options = machine.options([]);
        options.virtual_packages = vec![text.to_owned()];
        let found = target(&options).unwrap();
        found
            .virtual_packages
            .iter()
            .filter(|package| package.provenance == Provenance::Assumed)
            .map(|package| package.package.to_string())
            .collect::<Vec<_>>()
            .join(" ")
    };
    assert_eq!(with("__glibc=2.28"), "__glibc=2.28=0");
    assert_eq!(with("__archspec=1=x86_64_v3"), "__archspec=1=x86_64_v3");
    assert_eq!(with("__archspec=zen4"), "__archspec=1=zen4");
    assert_eq!(with("__cuda=12"), "__cuda=12.0=0");
    assert_eq!(with("__mine=1.0=x"), "__mine=1.0=x");
    assert_eq!(with("__glibc="), "");
}

#[test]
fn the_table_of_drivers_knows_its_bounds() {
    for (driver, cuda) in [
        ("550.54.14", Some("12.4")),
        ("551.1", Some("12.4")),
        ("600.1", Some("13.1")),
        ("390.1", None),
        ("410.48", Some("10.0")),
        ("x", None),
    ] {
        assert_eq!(gpu::cuda_of_driver(driver).as_deref(), cuda, "{driver}");
    }
}

#[test]
fn the_child_answers_json_for_every_route() {
    for route in ["nvml", "libcuda", "devices", "other"] {
        let answer: Route = serde_json::from_str(&detect_child_main(route)).unwrap();
        assert_eq!(answer.name, route);
    }
}

/// Not a test of its own: what [`the_driver_of_this_machine`] runs as its child.
#[test]
#[ignore = "runs as a child of another test"]
fn as_a_child() {
    use std::io::Write;
    let route = std::env::args().next_back().unwrap_or_default();
    writeln!(std::io::stdout(), "\n{}", detect_child_main(&route)).unwrap();
}

/// With a real driver: NVML answers, libcuda agrees, and an empty CUDA_VISIBLE_DEVICES changes nothing.
#[test]
fn the_driver_of_this_machine() {
    use std::io::Write;
    if !Path::new("/proc/driver/nvidia/version").exists() {
        std::io::stderr().write_all(b"skipped: no NVIDIA driver\n").unwrap();
        return;
    }
    let cache = tempfile::tempdir().unwrap();
    let mut options = TargetOptions::new(Environment::process(), Some(cache.path().to_path_buf()));
    let program = std::env::current_exe().unwrap().into_os_string();
    let mut child = vec![program];
    child.extend(["--ignored", "--nocapture", "--exact", "platform::tests::as_a_child"].map(Into::into));
    options.probe.child = Some(child);
    let begin = Instant::now();
    let found = target(&options).unwrap();
    let first = begin.elapsed();
    assert!(first < Duration::from_millis(2100), "{first:?}");
    let (cuda, source) = found.gpu.cuda.clone().expect("a driver without a CUDA version");
    writeln!(
        std::io::stderr(),
        "{first:?} __cuda={cuda} ({source}) {:?} {:?} {:?}",
        found.gpu.compute_capability,
        found.gpu.devices,
        found.gpu.routes
    )
    .unwrap();
    assert_eq!(source, "nvml");
    let begin = Instant::now();
    assert!(target(&options).unwrap().gpu.from_cache);
    assert!(begin.elapsed() < Duration::from_millis(100), "{:?}", begin.elapsed());
}

#[test]
fn other_names_of_platforms_lead_to_conda_s() {
    for (text, meant) in [
        ("linux-arm64", "`linux-aarch64`"),
        ("linux-arm", "`linux-aarch64`"),
        ("linux/arm64", "`linux-aarch64`"),
        ("aarch64", "`linux-aarch64`"),
        ("macos-arm64", "`osx-arm64`"),
        ("darwin-x86_64", "`osx-64`"),
        ("macos", "`osx-arm64` or `osx-64`"),
        ("windows", "`win-64`"),
        ("linux", "`linux-64`"),
        ("linux-x86_64", "`linux-64`"),
        ("linux-46", "`linux-64`"),
    ] {
        let error = parse_subdir(text, "--platform").expect_err("no conda name");
        assert_eq!(error.hints(), [format!("did you mean {meant}?")], "{text}");
    }
}
