//! The whole check over environments with stand-ins.

mod schema;
mod world;

use std::time::{Duration, Instant};

use world::{Library, World};

use super::*;
use crate::install::Cancel;

/// "files: PASS" and so on, for the messages of failed tests.
fn shown(report: &Report) -> String {
    text::text(report, true)
}

#[track_caller]
fn expect(report: &Report, code: u8, verdicts: &[(&str, Verdict, &str)]) {
    assert_eq!(report.exit_code, code, "{}", shown(report));
    for (id, verdict, part) in verdicts {
        let step = report.step(id).unwrap_or_else(|| panic!("no step `{id}`"));
        assert_eq!(step.verdict, *verdict, "{id}\n{}", shown(report));
        let all = [vec![step.reason.clone()], step.evidence.clone(), step.remarks.clone(), step.remedies.clone()].concat().join("\n");
        assert!(all.contains(part), "`{part}` is not said by `{id}`\n{}", shown(report));
        assert!(step.verdict != Verdict::Fail || !step.remedies.is_empty(), "`{id}` names no remedy\n{}", shown(report));
    }
}

use Verdict::{Fail, NotTested, Pass};

/// What changes a whole environment, the exit code, and what steps say.
type Row = (&'static str, fn(&mut World), u8, &'static [(&'static str, Verdict, &'static str)]);

const ROWS: &[Row] = &[
    (
        "whole, without a GPU",
        |_| {},
        0,
        &[
            ("files", Pass, "by presence and size"),
            ("interpreter", Pass, "starts in"),
            ("torch", Pass, "CUDA 13.2 build"),
            ("architectures", NotTested, "sm_75 sm_80 sm_86 sm_90"),
            ("versions", Pass, "agree with torch"),
            ("driver", NotTested, "no NVIDIA driver"),
            ("libraries", Pass, "`libcuda.so.1` is the driver's"),
            ("cpu", Pass, "6 programs"),
            ("gpu", NotTested, "no NVIDIA driver"),
            ("memory", NotTested, "no NVIDIA driver"),
        ],
    ),
    ("whole, GPU required, none there", |world| world.require_gpu = true, 8, &[("cpu", Pass, ""), ("gpu", NotTested, "no NVIDIA driver")]),
    (
        "whole, with a GPU",
        |world| world.gpu("9.0", "595.10", "13.2"),
        0,
        &[
            ("architectures", Pass, "runs sm_90"),
            ("driver", Pass, "runs CUDA 13.2"),
            ("gpu", Pass, "cuda:0 Stand-in GPU (9.0)"),
            ("allocator", Pass, "2 of 2 addresses"),
            ("clean-slate", Pass, "back where they were"),
            ("memory", NotTested, "left out"),
        ],
    ),
    (
        "a CUDA library was deleted",
        |world| std::fs::remove_file(world.site().join("nvidia/cudnn/lib/libcudnn.so.9")).unwrap(),
        5,
        &[
            ("files", Fail, "libcudnn.so.9"),
            ("libraries", Fail, "it belongs to `nvidia_cudnn_cu13 9.26.0.51`, whose file is gone"),
            ("cpu", Pass, ""),
        ],
    ),
    (
        "a CUDA library is missing with its package",
        |world| world.drop_package("nvidia_cudnn_cu13"),
        6,
        &[("files", Pass, ""), ("libraries", Fail, "`libcudnn.so.9` is nowhere"), ("versions", Pass, "no package of that name is there")],
    ),
    (
        "cuDNN of another major version",
        |world| {
            world.drop_package("nvidia_cudnn_cu13");
            world.add(("nvidia_cudnn_cu13", "8.9.7.29"), "nvidia/cudnn/lib/libcudnn.so.8", &Library::new("libcudnn.so.8").bytes());
        },
        6,
        &[
            ("versions", Fail, "torch asks for `libcudnn.so.9`, and the environment has `libcudnn.so.8`"),
            ("libraries", Fail, "`libcudnn.so.9` is nowhere"),
        ],
    ),
    (
        "cuDNN older than what torch was built with",
        |world| {
            world.drop_package("nvidia_cudnn_cu13");
            world.add(("nvidia_cudnn_cu13", "9.10.0.1"), "nvidia/cudnn/lib/libcudnn.so.9", &Library::new("libcudnn.so.9").bytes());
        },
        6,
        &[("versions", Fail, "which torch refuses"), ("libraries", Pass, "")],
    ),
    (
        "NCCL for another CUDA",
        |world| {
            let nccl = Library::new("libnccl.so.2").section(".rodata", b"NCCL version 2.21.5+cuda12.4\0".to_vec());
            world.add(("nvidia_nccl_cu13", "2.30.7"), "nvidia/nccl/lib/libnccl.so.2", &nccl.bytes());
        },
        6,
        &[("versions", Fail, "NCCL was built with CUDA 12.4, torch with CUDA 13")],
    ),
    (
        "a CPU-only torch",
        cpu_only,
        0,
        &[
            ("torch", Pass, "CPU build"),
            ("versions", NotTested, "torch is a CPU build"),
            ("cpu", Pass, ""),
            ("gpu", NotTested, "torch is a CPU build"),
        ],
    ),
    (
        "a CPU-only torch where a GPU is required",
        |world| {
            cpu_only(world);
            world.require_gpu = true;
        },
        6,
        &[("torch", Fail, "a GPU build is required")],
    ),
    (
        "a CPU-only torch beside a GPU",
        |world| {
            cpu_only(world);
            world.gpu("9.0", "595.10", "13.2");
        },
        0,
        &[("torch", Pass, "this build does not use it")],
    ),
    (
        "a torch of two builds",
        |world| std::fs::write(world.site().join("torch/version.py"), "__version__ = '2.15.0+cpu'\ncuda = None\nhip = None\n").unwrap(),
        5,
        &[("torch", Fail, "contradicts itself")],
    ),
    (
        "no torch",
        |world| {
            world.drop_package("torch");
        },
        0,
        &[
            ("torch", NotTested, "there is no torch in the environment"),
            ("architectures", NotTested, "there is no torch"),
            ("libraries", NotTested, "there is no torch"),
            ("cpu", NotTested, "there is no torch"),
        ],
    ),
    (
        "no torch where a GPU is required",
        |world| {
            world.drop_package("torch");
            world.require_gpu = true;
        },
        8,
        &[("torch", NotTested, "there is no torch")],
    ),
    (
        "the card is newer than torch",
        |world| world.gpu("12.0", "595.10", "13.2"),
        6,
        &[("architectures", Fail, "the GPU is newer than this torch")],
    ),
    (
        "the card is newer than torch, with PTX",
        |world| {
            world.cuda_library(&[75, 80, 86, 90], &[90]);
            world.gpu("12.0", "595.10", "13.2");
        },
        0,
        &[("architectures", Pass, "the driver compiles the PTX of compute_90")],
    ),
    (
        "the card is older than torch",
        |world| world.gpu("6.1", "595.10", "13.2"),
        6,
        &[("architectures", Fail, "this torch has no code for the GPU")],
    ),
    (
        "the CUDA driver library fails",
        |world| {
            world.machine.broken = Some("`cuInit` failed with CUDA_ERROR_CALL_REQUIRES_NEWER_DRIVER (36)".into());
            world.machine.driver.problem = world.machine.broken.clone();
        },
        6,
        &[
            ("driver", Fail, "the driver does not work: `cuInit` failed with CUDA_ERROR_CALL_REQUIRES_NEWER_DRIVER (36)"),
            ("gpu", NotTested, "CUDA_ERROR_CALL_REQUIRES_NEWER_DRIVER"),
            ("memory", Fail, "CUDA_ERROR_CALL_REQUIRES_NEWER_DRIVER"),
        ],
    ),
    (
        "torch's version.py was deleted",
        |world| std::fs::remove_file(world.site().join("torch/version.py")).unwrap(),
        5,
        &[
            ("torch", Fail, "torch is not whole: `torch/version.py` is not there"),
            ("torch", Fail, " torch==2.15.0+cu132"),
            ("cpu", Fail, ""),
        ],
    ),
    (
        "a version.py that says nothing",
        |world| world.add(("torch", "2.15.0+cu132"), "torch/version.py", b"# nothing\n"),
        6,
        &[("torch", Fail, "`torch/version.py` names no version")],
    ),
    (
        "an interpreter that is none",
        |world| stand_in_for_python(world, r#"{"ok": true}"#),
        6,
        &[("interpreter", Fail, "the interpreter ended without an answer"), ("cpu", NotTested, "the interpreter does not start")],
    ),
    (
        "an interpreter that only pretends",
        |world| {
            let prefix = world.prefix().display().to_string();
            stand_in_for_python(world, &format!(r#"{{"ok": true, "version": "3.11.7", "torch": "2.15.0", "prefix": "{prefix}"}}"#));
        },
        6,
        &[("cpu", Fail, "0 of 6 programs with known results were run")],
    ),
    (
        "a Jupyter kernel without the package",
        |world| {
            world.conda = true;
            world.add(("ipykernel", "7.0"), "ipykernel_launcher.py", b"");
            let kernel = world.root().join(".local/share/jupyter/kernels/tare-train");
            std::fs::create_dir_all(&kernel).unwrap();
            let spec = serde_json::json!({ "argv": ["/bin/sh"], "metadata": { "tare": { "prefix": world.prefix() } } });
            std::fs::write(kernel.join("kernel.json"), spec.to_string()).unwrap();
        },
        0,
        &[
            ("interpreter", Pass, "its Jupyter kernel `tare-train` has no `tare_notebook`"),
            ("interpreter", Pass, ": tare notebook install -p "),
            ("interpreter", Pass, " --name tare-train"),
        ],
    ),
    (
        "the driver is too old",
        |world| world.gpu("9.0", "550.54.14", "12.4"),
        6,
        &[("driver", Fail, "CUDA 13 needs driver 580.65.06 or newer")],
    ),
    (
        "the driver is older than the toolkit",
        |world| world.gpu("9.0", "580.65.06", "13.0"),
        0,
        &[("driver", Pass, "by minor-version compatibility")],
    ),
    (
        "torch does not see the GPU",
        |world| {
            world.gpu("9.0", "595.10", "13.2");
            world.set("STAND_IN_GPU", "");
        },
        6,
        &[("gpu", Fail, "torch does not see it: Found no NVIDIA driver"), ("allocator", NotTested, "torch does not run on the GPU")],
    ),
    (
        "the GPU is hidden",
        |world| {
            world.gpu("9.0", "595.10", "13.2");
            world.set("STAND_IN_GPU", "");
            world.set("CUDA_VISIBLE_DEVICES", "");
        },
        0,
        &[("interpreter", Pass, "hides every GPU"), ("gpu", NotTested, "hides every GPU")],
    ),
    (
        "the GPU computes wrongly",
        |world| {
            world.gpu("9.0", "595.10", "13.2");
            world.set("STAND_IN_WRONG", "1");
        },
        6,
        &[
            ("cpu", Pass, ""),
            ("gpu", Fail, "the product of two float32 matrices"),
            ("clean-slate", NotTested, "torch does not run on the GPU"),
        ],
    ),
    (
        "torch's allocator differs",
        |world| {
            world.gpu("9.0", "595.10", "13.2");
            world.set("STAND_IN_OTHER_ADDRESS", "1");
        },
        6,
        &[("allocator", Fail, "first difference at event 4"), ("clean-slate", Pass, "")],
    ),
    (
        "memory stays",
        |world| {
            world.gpu("9.0", "595.10", "13.2");
            world.set("STAND_IN_LEAK", "1");
        },
        6,
        &[("clean-slate", Fail, "3.00 MiB allocated"), ("allocator", Pass, "")],
    ),
    (
        "an import that fails",
        |world| {
            world.add(
                ("torch", "2.15.0+cu132"),
                "torch/__init__.py",
                b"raise ImportError('libcudnn.so.9: cannot open shared object file')\n",
            )
        },
        6,
        &[("files", Pass, ""), ("cpu", Fail, "torch does not import: ImportError: libcudnn.so.9: cannot open"), ("gpu", NotTested, "")],
    ),
    (
        "an import that hangs",
        |world| {
            world.add(("torch", "2.15.0+cu132"), "torch/__init__.py", b"import time\ntime.sleep(600)\n");
            world.limit = Duration::from_secs(1);
        },
        6,
        &[("cpu", Fail, "did not end within 1 s and was killed during `import`")],
    ),
    (
        "an import that crashes",
        |world| {
            world.add(
                ("torch", "2.15.0+cu132"),
                "torch/__init__.py",
                b"import os, signal, sys\nsys.stderr.write('about to go\\n')\nos.kill(os.getpid(), signal.SIGSEGV)\n",
            );
        },
        6,
        &[("cpu", Fail, "SIGSEGV")],
    ),
    (
        "an import that ends the process",
        |world| world.add(("torch", "2.15.0+cu132"), "torch/__init__.py", b"import os\nos._exit(3)\n"),
        6,
        &[("cpu", Fail, "exit code 3 during `import`")],
    ),
    (
        "LD_LIBRARY_PATH is set, and does not matter",
        |world| world.set("LD_LIBRARY_PATH", "/no/such/folder"),
        0,
        &[("interpreter", Pass, "LD_LIBRARY_PATH is set to `/no/such/folder`"), ("libraries", Pass, "")],
    ),
    (
        "LD_LIBRARY_PATH goes before a RUNPATH",
        |world| {
            let other = world.root().join("other");
            std::fs::create_dir_all(&other).unwrap();
            std::fs::write(other.join("libcudart.so.13"), Library::new("libcudart.so.13").bytes()).unwrap();
            let deps = Library::new("libtorch_global_deps.so").needs(&["libcudart.so.13"]).runpath("$ORIGIN/../../nvidia/cu13/lib");
            world.add(("torch", "2.15.0+cu132"), "torch/lib/libtorch_global_deps.so", &deps.bytes());
            world.set("LD_LIBRARY_PATH", other);
        },
        6,
        &[("libraries", Fail, "would come from LD_LIBRARY_PATH")],
    ),
    (
        "LD_LIBRARY_PATH does not go before an RPATH",
        |world| {
            let other = world.root().join("other");
            std::fs::create_dir_all(&other).unwrap();
            std::fs::write(other.join("libcudart.so.13"), Library::new("libcudart.so.13").bytes()).unwrap();
            world.set("LD_LIBRARY_PATH", other);
        },
        0,
        &[("libraries", Pass, "")],
    ),
    (
        "PYTHONPATH brings another torch",
        |world| {
            let other = world.root().join("other/torch");
            std::fs::create_dir_all(&other).unwrap();
            std::fs::write(other.join("__init__.py"), "from .version import __version__\n").unwrap();
            std::fs::write(other.join("version.py"), "__version__ = '1.0+cpu'\ncuda = None\n").unwrap();
            world.set("PYTHONPATH", world.root().join("other"));
        },
        6,
        &[("interpreter", Fail, "torch would come from another place"), ("torch", Pass, "torch 1.0+cpu: CPU build")],
    ),
    (
        "PYTHONHOME leads nowhere",
        |world| world.set("PYTHONHOME", "/no/such/home"),
        // The venv's activation takes it away.
        0,
        &[("interpreter", Pass, "")],
    ),
    (
        "code runs at every start",
        |world| {
            std::fs::write(world.site().join("sitecustomize.py"), "").unwrap();
            std::fs::write(world.site().join("spy.pth"), "import os\n").unwrap();
        },
        0,
        &[("interpreter", Pass, "`sitecustomize` runs at every start"), ("interpreter", Pass, "spy.pth")],
    ),
    (
        "the interpreter does not start",
        |world| std::fs::write(world.site().join("sitecustomize.py"), "import os\nos._exit(9)\n").unwrap(),
        6,
        &[("interpreter", Fail, "exit code 9"), ("torch", Pass, "CUDA 13.2 build"), ("cpu", NotTested, "the interpreter does not start")],
    ),
    (
        "the base of the interpreter is gone",
        |world| {
            let link = world.prefix().join("bin/python");
            std::fs::remove_file(&link).unwrap();
            std::os::unix::fs::symlink("/no/such/python3", link).unwrap();
        },
        6,
        &[("interpreter", Fail, "was removed or updated")],
    ),
    (
        "the environment was moved",
        |world| std::fs::write(world.prefix().join("bin/activate"), "VIRTUAL_ENV=/somewhere/else\n").unwrap(),
        5,
        &[("files", Fail, "was moved"), ("cpu", Pass, "")],
    ),
    (
        "libstdc++ is too old",
        |world| {
            let library =
                Library::new("libc10.so").needs(&["libstdc++.so.6"]).versions_of("libstdc++.so.6", &["GLIBCXX_3.4.29", "GLIBCXX_3.4.32"]);
            world.add(("torch", "2.15.0+cu132"), "torch/lib/libc10.so", &library.bytes());
        },
        6,
        &[("libraries", Fail, "needs GLIBCXX_3.4.32 of it, it has up to GLIBCXX_3.4.29")],
    ),
    (
        "the C library is too old",
        |world| {
            let library = Library::new("libc10.so").needs(&["libc.so.6"]).versions_of("libc.so.6", &["GLIBC_2.39"]);
            world.add(("torch", "2.15.0+cu132"), "torch/lib/libc10.so", &library.bytes());
        },
        6,
        &[("libraries", Fail, "needs a newer Linux distribution")],
    ),
    (
        "torch loads what its search path does not lead to",
        |world| {
            let deps = Library::new("libtorch_global_deps.so").needs(&["libcudart.so.13"]);
            world.add(("torch", "2.15.0+cu132"), "torch/lib/libtorch_global_deps.so", &deps.bytes());
        },
        0,
        &[("libraries", Pass, "torch loads itself what its libraries do not find: libcudart.so.13")],
    ),
    (
        "CUDA comes from the system",
        |world| {
            world.drop_package("nvidia_cuda_runtime");
            std::fs::write(world.root().join("system/lib64/libcudart.so.13"), Library::new("libcudart.so.13").bytes()).unwrap();
        },
        6,
        &[("libraries", Fail, "comes from outside of the environment")],
    ),
    (
        "a library that is none",
        |world| world.add(("torch", "2.15.0+cu132"), "torch/lib/libc10.so", b"version https://git-lfs\n"),
        6,
        &[("files", Pass, ""), ("libraries", Fail, "cannot be read as a library")],
    ),
    (
        "an environment of conda",
        |world| world.conda = true,
        0,
        &[
            ("files", Pass, "4 conda packages"),
            ("torch", Pass, "conda package `pytorch 2.15.0 cuda132_py311_h1_0`"),
            ("versions", Pass, ""),
            ("cpu", Pass, ""),
        ],
    ),
    (
        "an environment of conda that asked for CUDA and got none",
        |world| {
            cpu_only(world);
            world.conda = true;
        },
        6,
        // The build string of the stand-in record says CUDA, its files do not.
        &[("torch", Fail, "contradicts itself")],
    ),
];

/// A program in place of Python that writes one line, whatever it is asked.
fn stand_in_for_python(world: &World, line: &str) {
    let python = world.prefix().join("bin/python");
    std::fs::remove_file(&python).unwrap();
    std::fs::write(&python, format!("#!/bin/sh\necho '{line}'\n")).unwrap();
    std::fs::set_permissions(&python, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
}

fn cpu_only(world: &mut World) {
    for package in ["nvidia_cudnn_cu13", "nvidia_nccl_cu13", "nvidia_cuda_runtime"] {
        world.drop_package(package);
    }
    let init = std::fs::read(world.site().join("torch/__init__.py")).unwrap();
    world.drop_package("torch");
    let torch = ("torch", "2.15.0+cpu");
    world.add(torch, "torch/__init__.py", &init);
    world.add(torch, "torch/version.py", b"__version__ = '2.15.0+cpu'\ncuda = None\nhip = None\n");
    world.add(torch, "torch/lib/libtorch_cpu.so", &Library::new("libtorch_cpu.so").needs(&["libc.so.6"]).bytes());
}

#[test]
fn every_kind_of_environment_gets_its_verdict() {
    if world::python().is_none() {
        return;
    }
    let next = std::sync::atomic::AtomicUsize::new(0);
    let failures = std::sync::Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                while let Some((name, change, code, verdicts)) = ROWS.get(next.fetch_add(1, std::sync::atomic::Ordering::Relaxed)) {
                    let run = std::panic::AssertUnwindSafe(|| {
                        let mut world = World::healthy().unwrap();
                        // Some changes are of files before they are recorded, some of files that are.
                        let after = ["deleted", "two builds", "moved"].iter().any(|word| name.contains(word));
                        if after {
                            world.install();
                        }
                        change(&mut world);
                        if !after {
                            world.install();
                        }
                        expect(&world.check(), *code, verdicts);
                    });
                    if let Err(error) = std::panic::catch_unwind(run) {
                        let said = error.downcast_ref::<String>().cloned();
                        let said = said.or_else(|| error.downcast_ref::<&str>().map(ToString::to_string)).unwrap_or_default();
                        failures.lock().unwrap().push(format!("== {name}: {said}"));
                    }
                }
            });
        }
    });
    let failures = failures.into_inner().unwrap();
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

#[test]
fn an_environment_without_python_or_packages_is_not_tested() {
    let Some(world) = World::empty() else { return };
    std::fs::remove_file(world.prefix().join("bin/python")).unwrap();
    let report = world.check();
    expect(
        &report,
        0,
        &[("files", NotTested, "nothing was installed"), ("interpreter", NotTested, "no Python"), ("torch", NotTested, "no torch")],
    );
    assert_eq!(report.verdict, NotTested);
    assert_eq!(report.summary(), "nothing could be tested");
}

#[test]
fn contents_are_compared_at_higher_levels() {
    let Some(mut world) = World::healthy() else { return };
    world.install();
    let path = world.site().join("torch/lib/libc10.so");
    let mut bytes = std::fs::read(&path).unwrap();
    // A byte that nobody reads, in the padding of the first section header.
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    std::fs::write(&path, bytes).unwrap();
    expect(&world.check(), 0, &[("files", Pass, "presence and size")]);
    world.level = Level::Standard;
    expect(&world.check(), 5, &[("files", Fail, "libc10.so")]);
}

#[test]
fn a_torch_that_says_no_version_is_asked_for_by_name() {
    let Some(world) = World::healthy() else { return };
    // Without metadata as well.
    std::fs::remove_file(world.site().join("torch/version.py")).unwrap();
    let report = world.check();
    let step = report.step("torch").unwrap();
    assert_eq!(step.verdict, Fail, "{}", shown(&report));
    assert!(step.remedies.iter().any(|line| line.ends_with(" -m pip install --force-reinstall --no-deps torch")), "{}", shown(&report));
    assert!(!shown(&report).contains("==of unknown version"), "{}", shown(&report));
}

#[test]
fn the_time_for_the_whole_check_is_kept() {
    let Some(mut world) = World::healthy() else { return };
    world.add(("torch", "2.15.0+cu132"), "torch/__init__.py", b"import time\ntime.sleep(600)\n");
    world.install();
    world.whole = Some(Duration::from_secs(3));
    let started = Instant::now();
    let report = world.check();
    assert!(started.elapsed() < Duration::from_secs(10), "{:?}", started.elapsed());
    expect(
        &report,
        6,
        &[
            ("files", Pass, ""),
            ("cpu", Fail, "and was killed during `import`"),
            ("gpu", NotTested, "no time was left for it: the whole check had 3 s (`--timeout`)"),
            ("memory", NotTested, "no time was left for it"),
        ],
    );
    // A program that gets the little that others have left is not to blame.
    std::fs::write(world.site().join("sitecustomize.py"), "import time\ntime.sleep(1.8)\n").unwrap();
    let report = world.check();
    expect(&report, 0, &[("interpreter", Pass, "starts in"), ("cpu", NotTested, "s for the whole check (`--timeout`)")]);
}

#[test]
fn a_check_can_be_stopped_and_leaves_no_process() {
    let Some(mut world) = World::healthy() else { return };
    let mark = world.root().join("pid");
    let program = format!("import os, time\nopen({:?}, 'w').write(str(os.getpid()))\ntime.sleep(600)\n", mark.display().to_string());
    world.add(("torch", "2.15.0+cu132"), "torch/__init__.py", program.as_bytes());
    world.install();
    let cancel = Cancel::new();
    let switch = cancel.clone();
    let waiter = std::thread::spawn(move || {
        let started = Instant::now();
        let pid = loop {
            match std::fs::read_to_string(&mark).ok().and_then(|text| text.parse::<u32>().ok()) {
                Some(pid) => break pid,
                None if started.elapsed() > Duration::from_secs(40) => panic!("the program did not start"),
                None => std::thread::sleep(Duration::from_millis(10)),
            }
        };
        switch.cancel();
        pid
    });
    let error = world.try_check(None, &cancel).unwrap_err();
    assert_eq!(error.kind(), crate::error::Kind::Interrupted);
    let pid = waiter.join().unwrap();
    assert!(!std::path::Path::new(&format!("/proc/{pid}")).exists(), "process {pid} is still there");
}

struct Faulty;

impl MemoryTest for Faulty {
    fn run(&self, level: Level, _: Option<Duration>, _: &Cancel, _: &dyn Progress) -> MemoryOutcome {
        assert_eq!(level, Level::Quick);
        let piece =
            |offset: u64, bytes: u64, state: &str, note: &str| Piece { device: 0, offset, bytes, state: state.into(), note: note.into() };
        let rate = |name: &str, rate: f64| Rate { device: 0, name: name.into(), bytes_per_second: rate, reference: Some(3.9e12) };
        MemoryOutcome {
            passed: Some(false),
            reason: "2 words of 24 GiB do not hold what is written".into(),
            evidence: vec!["offset 0x1f000 <b>expected</b> 0x55 got 0x57".into()],
            remedies: vec!["take the card out of use".into()],
            picture: Some(MemoryPicture {
                map: vec![
                    piece(0, 2 << 30, "used", "another process"),
                    piece(2 << 30, 20 << 30, "good", ""),
                    piece(9 << 30, 4096, "bad", "bit 1 <stuck>"),
                    piece(22 << 30, 2 << 30, "untested", ""),
                ],
                rates: vec![rate("own address", 3.4e12), rate("moving inversions", 3.6e12), rate("random", 2.9e12)],
            }),
            ..MemoryOutcome::default()
        }
    }
}

#[test]
fn the_reports_say_the_same_in_every_format() {
    let Some(mut world) = World::healthy() else { return };
    world.gpu("9.0", "595.10", "13.2");
    // A name that must be escaped everywhere.
    world.add(("nvidia_cufft", "12.0"), "nvidia/x]]>&<script>.txt", b"x");
    world.install();
    std::fs::remove_file(world.site().join("nvidia/x]]>&<script>.txt")).unwrap();
    let report = world.check_with(Some(&Faulty));
    expect(&report, 5, &[("files", Fail, "]]>&<script>"), ("memory", Fail, "2 words"), ("gpu", Pass, "")]);

    // JSON: the committed schema, and back.
    let document = serde_json::to_value(&report).unwrap();
    schema::validate(&document);
    let back: Report = serde_json::from_value(document).unwrap();
    assert_eq!(back, report);

    // JUnit: read back by a parser.
    let xml = junit::junit(std::slice::from_ref(&report)).unwrap();
    let read = quick_junit::Report::deserialize_from_str(&xml).unwrap();
    let suite = &read.test_suites[0];
    assert_eq!((suite.tests, suite.failures, suite.errors), (12, 2, 0));
    for (case, step) in suite.test_cases.iter().zip(&report.steps) {
        assert_eq!(case.name.as_str(), step.id);
        let matches = match &case.status {
            quick_junit::TestCaseStatus::Success { .. } => step.verdict == Pass,
            quick_junit::TestCaseStatus::Skipped { message, .. } => {
                step.verdict == NotTested && message.as_ref().is_some_and(|message| message.as_str() == step.reason)
            }
            quick_junit::TestCaseStatus::NonSuccess { message, .. } => {
                step.verdict == Fail && message.as_ref().is_some_and(|message| message.as_str() == step.reason)
            }
        };
        assert!(matches, "{}: {:?}", step.id, case.status);
    }

    // HTML: nothing of the environment's names becomes a tag, nothing is asked of the network.
    let page = html::page(std::slice::from_ref(&report));
    assert!(!page.contains("<script") && !page.contains("<b>expected") && !page.contains("<stuck>"));
    assert!(!page.contains("http://") && !page.contains("https://") && !page.contains("src=") && !page.contains("@import"));
    for part in [
        "FAIL: files, memory",
        "&lt;script&gt;",
        "class=\"m-bad\"",
        "moving inversions",
        "87 % of a copy",
        "Stand-in GPU, 24.00 GiB",
        "595.10",
    ] {
        assert!(page.contains(part), "{part}");
    }
    // For looking at it: TARE_CHECK_PAGE=FILE keeps the page.
    if let Some(path) = std::env::var_os("TARE_CHECK_PAGE") {
        std::fs::write(path, &page).unwrap();
    }
    let for_people = text::text(&report, false);
    assert!(for_people.contains("FAIL        memory         2 words of 24 GiB do not hold what is written"), "{for_people}");
    assert!(
        for_people.contains("hint: take the card out of use") && for_people.contains("\nFAIL: files, memory; 10 passed, 0 not tested"),
        "{for_people}"
    );
}

#[test]
fn the_result_is_kept_and_shown_as_outdated_after_a_change() {
    let Some(mut world) = World::healthy() else { return };
    world.conda = true;
    world.install();
    let report = world.check();
    let path = store(&report).unwrap().unwrap();
    assert!(path.ends_with("conda-meta/tare/check.json"));
    let subject = Subject::at(&world.prefix()).unwrap();
    let kept = last(&subject.prefix).unwrap();
    assert!(!kept.outdated && kept.exit_code == 0);
    assert_eq!(kept.summary, report.summary());
    // tare's own note is no fault of the environment.
    expect(&world.check(), 0, &[("files", Pass, "")]);
    let record = std::fs::read_dir(world.prefix().join("conda-meta"))
        .unwrap()
        .flatten()
        .find(|entry| entry.file_name().to_string_lossy().starts_with("nvidia-nccl"));
    std::fs::remove_file(record.unwrap().path()).unwrap();
    assert!(last(&subject.prefix).unwrap().outdated);
    std::fs::write(path, "{").unwrap();
    assert_eq!(last(&subject.prefix), None);
    // A virtual environment has no place for it.
    let venv = World::healthy().unwrap();
    assert_eq!(store(&venv.check()).unwrap(), None);
    assert!(!venv.prefix().join("conda-meta").exists());
}

#[test]
fn an_interpreter_leads_to_its_environment() {
    let Some(world) = World::healthy() else { return };
    world.install();
    let python = world.prefix().join("bin/python");
    let subject = Subject::of_python(python.as_os_str(), &world.env, Duration::from_secs(60), &Cancel::new()).unwrap();
    assert_eq!((subject.kind, subject.prefix.path()), (Kind::Venv, world.prefix().as_path()));
    // One that is no environment: its packages are those of its site-packages.
    let base = world::python().unwrap().0.clone();
    let subject = Subject::of_python(base.as_os_str(), &world.env, Duration::from_secs(60), &Cancel::new()).unwrap();
    assert_eq!(subject.kind, Kind::Interpreter);
    assert!(subject.environment(&world.env, Duration::from_secs(60), &Cancel::new()).is_ok());
    for bad in ["/no/such/python", "no-such-python-here", "/bin/true"] {
        assert_eq!(
            Subject::of_python(bad.as_ref(), &world.env, Duration::from_secs(60), &Cancel::new()).unwrap_err().exit_code(),
            2,
            "{bad}"
        );
    }
}
