//! The whole channel, made from a real interpreter where the machine has one that can be relocated.

use super::*;
use crate::report::Silent;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::process::{Command, Output};
use std::sync::{Mutex, OnceLock};

fn options(cache: &Path, interpreter: Option<PathBuf>) -> HostOptions {
    HostOptions { cache_dir: cache.to_path_buf(), interpreter, path_env: None, home: None, wanted: Vec::new() }
}

/// A channel made once for all tests from TARE_HOST_PYTHON, or from the first interpreter found that can be relocated.
fn real() -> Option<&'static (tempfile::TempDir, HostOptions, HostChannel)> {
    static REAL: OnceLock<Option<(tempfile::TempDir, HostOptions, HostChannel)>> = OnceLock::new();
    let made = REAL.get_or_init(|| {
        let dir = tempfile::tempdir().unwrap();
        let mut search = options(dir.path(), None);
        search.path_env = std::env::var_os("PATH");
        search.home = std::env::var_os("HOME").map(PathBuf::from);
        let mut named: Vec<PathBuf> = std::env::var_os("TARE_HOST_PYTHON").map(PathBuf::from).into_iter().collect();
        if named.is_empty() {
            named = discover::candidates(&search).into_iter().map(|candidate| candidate.path).collect();
            // The version that the quickstart asks for first.
            named.sort_by_key(|path| !path.ends_with("python3.11"));
        }
        named
            .into_iter()
            .find_map(|path| {
                let options = options(dir.path(), Some(path));
                materialize(&options, &Silent).ok().map(|channel| (options, channel))
            })
            .map(|(options, channel)| (dir, options, channel))
    });
    if made.is_none() {
        eprintln!("skipped: no relocatable CPython on this machine (set TARE_HOST_PYTHON)");
    }
    made.as_ref()
}

fn packages(channel: &HostChannel, subdir: &str) -> Vec<PathBuf> {
    let mut files: Vec<_> = fs::read_dir(channel.root.join(subdir)).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.retain(|path| path.extension().is_some_and(|end| end == "conda"));
    files.sort();
    files
}

/// Lays a package down as a package manager does: unpack, check every file against paths.json, replace the placeholder.
fn install(package: &Path, prefix: &Path, site_packages: &str) -> PathBuf {
    let unpacked = tempfile::tempdir().unwrap().keep();
    rattler_package_streaming::fs::extract(package, &unpacked).unwrap();
    let paths: serde_json::Value = serde_json::from_slice(&fs::read(unpacked.join("info/paths.json")).unwrap()).unwrap();
    let listed = fs::read_to_string(unpacked.join("info/files")).unwrap();
    let mut count = 0;
    for entry in paths["paths"].as_array().unwrap() {
        let path = entry["_path"].as_str().unwrap();
        let from = unpacked.join(path);
        let to = prefix.join(match path.strip_prefix("site-packages/") {
            Some(rest) => format!("{site_packages}/{rest}"),
            None => path.to_owned(),
        });
        fs::create_dir_all(to.parent().unwrap()).unwrap();
        if entry["path_type"] == "softlink" {
            symlink(fs::read_link(&from).unwrap(), &to).unwrap();
        } else {
            let bytes = fs::read(&from).unwrap();
            assert_eq!(entry["size_in_bytes"], bytes.len());
            assert_eq!(entry["sha256"], hex(&compute_bytes_digest::<Sha256>(&bytes)), "{path}");
            let mode = fs::metadata(&from).unwrap().permissions().mode() & 0o777;
            assert!(mode == 0o644 || mode == 0o755, "{path}: {mode:o}");
            match entry["prefix_placeholder"].as_str() {
                Some(placeholder) => {
                    let text = String::from_utf8(bytes).unwrap();
                    assert!(text.contains(placeholder), "{path}");
                    fs::write(&to, text.replace(placeholder, prefix.to_str().unwrap())).unwrap();
                }
                None => fs::write(&to, bytes).unwrap(),
            }
            fs::set_permissions(&to, fs::Permissions::from_mode(mode)).unwrap();
        }
        count += 1;
    }
    assert_eq!(listed.lines().count(), count);
    unpacked
}

fn run(prefix: &Path, arguments: &[&str]) -> Output {
    Command::new(prefix.join("bin/python")).args(arguments).env_clear().env("PATH", "/usr/bin:/bin").output().unwrap()
}

fn output(prefix: &Path, arguments: &[&str]) -> String {
    let output = run(prefix, arguments);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments:?}: {errors}");
    String::from_utf8(output.stdout).unwrap()
}

/// One environment for all tests, with `pip` and `setuptools` where they are bundled.
fn environment() -> Option<&'static (PathBuf, PathBuf, tempfile::TempDir)> {
    static MADE: OnceLock<Option<(PathBuf, PathBuf, tempfile::TempDir)>> = OnceLock::new();
    let made = MADE.get_or_init(|| {
        let (_, _, channel) = real()?;
        let dir = tempfile::tempdir().unwrap();
        let prefix = fs::canonicalize(dir.path()).unwrap().join("env");
        let python = packages(channel, &this_subdir());
        let short = channel.interpreters[0].version.as_ref().unwrap().rsplit_once('.').unwrap().0.to_owned();
        let site_packages = format!("lib/python{short}/site-packages");
        let unpacked = install(&python[0], &prefix, &site_packages);
        for package in packages(channel, "noarch") {
            fs::remove_dir_all(install(&package, &prefix, &site_packages)).unwrap();
        }
        Some((prefix, unpacked, dir))
    });
    made.as_ref()
}

/// The prefix of the interpreter that was packaged.
fn original() -> PathBuf {
    let (_, _, channel) = real().unwrap();
    channel.interpreters[0].path.parent().unwrap().parent().unwrap().to_path_buf()
}

#[test]
fn the_same_interpreter_gives_the_same_bytes_and_is_found_again() {
    let Some((_, options, channel)) = real() else { return };
    let again = materialize(options, &Silent).unwrap();
    assert_eq!(&again, channel);

    let other = tempfile::tempdir().unwrap();
    let second = materialize(&HostOptions { cache_dir: other.path().join("deep/er"), ..options.clone() }, &Silent).unwrap();
    assert_eq!(second.interpreters, channel.interpreters);
    for subdir in [this_subdir(), "noarch".to_owned()] {
        let (first, second) = (channel.root.join(&subdir), second.root.join(&subdir));
        assert_eq!(fs::read(first.join("repodata.json")).unwrap(), fs::read(second.join("repodata.json")).unwrap());
        for package in packages(channel, &subdir) {
            assert!(fs::read(&package).unwrap() == fs::read(second.join(package.file_name().unwrap())).unwrap(), "{package:?}");
        }
    }
}

#[test]
fn what_is_broken_in_the_cache_is_made_again_and_many_at_once_agree() {
    let Some((_, options, channel)) = real() else { return };
    let dir = tempfile::tempdir().unwrap();
    let options = HostOptions { cache_dir: dir.path().to_path_buf(), ..options.clone() };
    // As a kill leaves it: half a stage.
    fs::create_dir_all(dir.path().join("host").join("work").join("0123/stage/bin")).unwrap();
    let results = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| results.lock().unwrap().push(materialize(&options, &Silent).unwrap()));
        }
    });
    let results = results.into_inner().unwrap();
    assert_eq!(results.len(), 4);
    assert!(results.iter().all(|made| made == &results[0] && made.interpreters == channel.interpreters));
    assert_eq!(fs::read_dir(dir.path().join("host/work")).unwrap().count(), 0);

    let package = &packages(&results[0], &this_subdir())[0];
    let before = fs::read(package).unwrap();
    fs::remove_file(package).unwrap();
    materialize(&options, &Silent).unwrap();
    assert!(fs::read(package).unwrap() == before);
    // Cut short in both places, through the hard link or not.
    let key = fs::read_dir(dir.path().join("host/packages")).unwrap().next().unwrap().unwrap().path();
    for place in [package.clone(), key.join(package.file_name().unwrap())] {
        fs::write(place, b"cut").unwrap();
    }
    fs::write(results[0].root.join("channel.json"), b"{").unwrap();
    materialize(&options, &Silent).unwrap();
    assert!(fs::read(package).unwrap() == before);
}

#[test]
fn the_environment_stands_on_its_own() {
    let Some((prefix, unpacked, _)) = environment() else { return };
    let program = r#"
import sys, sysconfig, ssl, sqlite3, ctypes, hashlib, zlib, readline, json, os, venv, ensurepip, decimal, socket
sqlite3.connect(":memory:").execute("select 1").fetchone()
hashlib.sha256(b"x").hexdigest(), ssl.create_default_context(), ctypes.CDLL(None).getpid()
maps = sorted({line.split(None, 5)[5].strip() for line in open("/proc/self/maps") if len(line.split(None, 5)) == 6})
print(json.dumps({"prefixes": [sys.prefix, sys.base_prefix, sys.exec_prefix], "executable": sys.executable,
    "paths": sysconfig.get_paths(), "path": sys.path, "maps": maps, "vars": [str(v) for v in sysconfig.get_config_vars().values()]}))
"#;
    let answer: serde_json::Value = serde_json::from_str(&output(prefix, &["-c", program])).unwrap();
    let new = prefix.to_str().unwrap();
    let old = original();
    let old = old.to_str().unwrap();
    for part in ["prefixes", "paths", "path"] {
        let values: Vec<&serde_json::Value> = match &answer[part] {
            serde_json::Value::Array(values) => values.iter().collect(),
            serde_json::Value::Object(values) => values.values().collect(),
            _ => unreachable!(),
        };
        for value in values.iter().filter_map(|value| value.as_str()).filter(|value| !value.is_empty()) {
            assert!(value.starts_with(new), "{part}: {value}");
        }
    }
    let text = answer.to_string();
    assert!(old == "/usr/local" || !text.contains(&format!("{old}/")), "the original is still known:\n{text}");
    let mapped = answer["maps"].as_array().unwrap().iter().filter(|path| path.as_str().unwrap().starts_with(new)).count();
    assert!(mapped >= 2, "{}", answer["maps"]);

    assert_eq!(check_system_libraries(unpacked).unwrap(), Vec::<String>::new());
    let info = host_info(unpacked).unwrap().unwrap();
    assert!(info.machine_bound && info.system_libraries.iter().any(|library| library.soname == "libc.so.6" && library.present));
    for folder in ["bin", "lib"] {
        assert!(prefix.join(folder).is_dir());
    }
}

#[test]
fn pip_runs_and_virtual_environments_can_be_made() {
    let Some((prefix, ..)) = environment() else { return };
    let (_, _, channel) = real().unwrap();
    if packages(channel, "noarch").is_empty() {
        eprintln!("skipped: this CPython bundles no wheels");
        return;
    }
    let version = output(prefix, &["-m", "pip", "--version"]);
    assert!(version.contains(prefix.to_str().unwrap()), "{version}");
    assert!(output(prefix, &["-m", "pip", "list", "--disable-pip-version-check"]).contains("pip "));
    let venv = prefix.parent().unwrap().join("venv");
    output(prefix, &["-m", "venv", venv.to_str().unwrap()]);
    let inside = output(&venv, &["-c", "import sys, pip, ssl; print(sys.prefix, sys.base_prefix)"]);
    assert_eq!(inside.trim(), format!("{} {}", venv.display(), prefix.display()));
}

#[test]
fn an_extension_module_builds_with_the_flags_of_sysconfig() {
    let Some((prefix, ..)) = environment() else { return };
    if Command::new("cc").arg("--version").output().is_err() {
        eprintln!("skipped: no C compiler");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let source = "#include <Python.h>\nstatic struct PyModuleDef def = {PyModuleDef_HEAD_INIT, \"tiny\", 0, -1, 0};\nPyMODINIT_FUNC PyInit_tiny(void) { return PyModule_Create(&def); }\n";
    fs::write(dir.path().join("tiny.c"), source).unwrap();
    let program = r#"
import subprocess, sysconfig, sys, os
get = sysconfig.get_config_var
where = sys.argv[1]
target = os.path.join(where, "tiny" + get("EXT_SUFFIX"))
command = ["cc", "-shared", "-fPIC", "-I" + sysconfig.get_path("include"), os.path.join(where, "tiny.c"), "-o", target]
command += (get("LDFLAGS") or "").split()
if get("Py_ENABLE_SHARED"):
    command += ["-L" + get("LIBDIR"), "-lpython" + get("LDVERSION")]
subprocess.check_call(command)
sys.path.insert(0, where)
import tiny
print(tiny.__file__)
print(open("/proc/self/maps").read())
"#;
    let text = output(prefix, &["-c", program, dir.path().to_str().unwrap()]);
    assert!(text.starts_with(dir.path().to_str().unwrap()));
    assert!(!text.contains(&format!("{}/lib", original().display())), "{text}");
}

/// One interpreter that does not run is asked again after a while; the packages of the others stay where they are.
#[test]
fn a_refusal_that_may_pass_is_tried_again_later() {
    let Some((_, _, channel)) = real() else { return };
    let dir = tempfile::tempdir().unwrap();
    let root = fs::canonicalize(dir.path()).unwrap();
    let bin = root.join("bin");
    fs::create_dir(&bin).unwrap();
    fs::write(bin.join("python3.9"), b"\x7fELF and nothing else").unwrap();
    fs::set_permissions(bin.join("python3.9"), fs::Permissions::from_mode(0o755)).unwrap();
    let found = channel.interpreters[0].path.parent().unwrap();
    let mut options = options(&root.join("cache"), None);
    options.path_env = Some(std::env::join_paths([&bin, found]).unwrap());
    let first = materialize(&options, &Silent).unwrap();
    let refused: Vec<_> = first.refused().map(|(path, _)| path.to_path_buf()).collect();
    assert!(refused.contains(&bin.join("python3.9")), "{refused:?}");
    let package = packages(&first, &this_subdir())[0].clone();
    let manifest = first.root.join("channel.json");
    let inode = |path: &Path| std::os::unix::fs::MetadataExt::ino(&fs::metadata(path).unwrap());
    let before = (inode(&package), inode(&manifest));
    assert_eq!(materialize(&options, &Silent).unwrap(), first);
    assert_eq!((inode(&package), inode(&manifest)), before);

    let old = SystemTime::now() - RETRY_AFTER - Duration::from_secs(60);
    File::options().append(true).open(&manifest).unwrap().set_modified(old).unwrap();
    assert_eq!(materialize(&options, &Silent).unwrap(), first);
    assert_eq!(inode(&package), before.0);
    assert_ne!(inode(&manifest), before.1);
}

/// What a folder of interpreters that cannot be used says.
#[test]
fn without_a_usable_interpreter_each_is_named_with_the_reason() {
    let dir = tempfile::tempdir().unwrap();
    let root = fs::canonicalize(dir.path()).unwrap();
    let bin = root.join("bin");
    fs::create_dir(&bin).unwrap();
    // Starts like an ELF file and is none; the system refuses to run it.
    fs::write(bin.join("python3.11"), b"\x7fELF and nothing else").unwrap();
    fs::set_permissions(bin.join("python3.11"), fs::Permissions::from_mode(0o755)).unwrap();
    symlink("loop", bin.join("python3")).unwrap();
    symlink("python3", bin.join("loop")).unwrap();
    let fixed = |error: Error| format!("{error}\n{}", error.hints().join("\n")).replace(root.to_str().unwrap(), "ROOT");

    let only = options(&root.join("cache"), Some(bin.join("python3.11")));
    insta::assert_snapshot!(fixed(materialize(&only, &Silent).unwrap_err()), @r"
    no CPython on this machine can be used for the `host` channel: `ROOT/bin/python3.11`: it cannot be started: Exec format error (os error 8)
    let TARE_HOST_PYTHON name a relocatable CPython, one built from source or by pyenv or uv, or unset it to search for one
    where conda-forge can be reached, start from it instead: tare create -f envs/quickstart-conda.yml
    ");
    let looping = options(&root.join("cache"), Some(bin.join("python3")));
    let error = materialize(&looping, &Silent).unwrap_err();
    assert_eq!(error.kind(), crate::error::Kind::Usage);
    insta::assert_snapshot!(fixed(error), @r"
    `ROOT/bin/python3` (TARE_HOST_PYTHON) is no interpreter for the `host` channel: Too many levels of symbolic links (os error 40)
    set TARE_HOST_PYTHON to the python3 executable of a CPython installation, or unset it to search for one
    or take Python from conda-forge: envs/quickstart-conda.yml
    ");
    let missing = options(&root.join("cache"), Some(root.join("nowhere")));
    insta::assert_snapshot!(fixed(materialize(&missing, &Silent).unwrap_err()), @r"
    `ROOT/nowhere` (TARE_HOST_PYTHON) is no interpreter for the `host` channel: No such file or directory (os error 2)
    set TARE_HOST_PYTHON to the python3 executable of a CPython installation, or unset it to search for one
    or take Python from conda-forge: envs/quickstart-conda.yml
    ");
}

#[test]
fn a_cache_that_cannot_be_made_is_an_error_with_its_path() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("file"), "").unwrap();
    let error = materialize(&options(&dir.path().join("file"), None), &Silent).unwrap_err();
    assert!(error.to_string().contains("file/host/work"), "{error}");
}

/// The C compiler's view of the ELF edits: programs that find their library only if the edit is right.
mod edits {
    use super::*;
    use crate::elf::{self, PathTag};

    fn cc(dir: &Path, arguments: &[&str]) -> bool {
        match Command::new("cc").current_dir(dir).args(arguments).output() {
            Ok(output) => {
                assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
                true
            }
            Err(_) => {
                eprintln!("skipped: no C compiler");
                false
            }
        }
    }

    /// `bin/main` needs `lib/libanswer.so`, which needs `lib/libinner.so`. `flags`: for the link of both.
    fn tree(flags: &[&str]) -> Option<tempfile::TempDir> {
        let dir = tempfile::tempdir().unwrap();
        let at = dir.path();
        for folder in ["bin", "lib"] {
            fs::create_dir(at.join(folder)).unwrap();
        }
        fs::write(at.join("inner.c"), "int inner(void) { return 42; }\n").unwrap();
        fs::write(at.join("answer.c"), "int inner(void); int answer(void) { return inner(); }\n").unwrap();
        let main = "#include <stdio.h>\nstatic char room[100000];\nint answer(void);\nint main(void) { room[5] = 1; return printf(\"%d %d\\n\", answer(), room[99999]) < 0; }\n";
        fs::write(at.join("main.c"), main).unwrap();
        let with = |fixed: &[&str]| -> bool { cc(at, &[fixed, flags].concat()) };
        let made = cc(at, &["-shared", "-fPIC", "inner.c", "-o", "lib/libinner.so"])
            && with(&["-shared", "-fPIC", "answer.c", "-Llib", "-linner", "-o", "lib/libanswer.so"])
            && with(&["main.c", "-Llib", "-lanswer", "-Wl,-rpath-link,lib", "-o", "bin/main"]);
        made.then_some(dir)
    }

    fn runs(dir: &Path) -> Result<String, String> {
        let output = Command::new(dir.join("bin/main")).env_clear().output().unwrap();
        if output.status.success() {
            Ok(String::from_utf8(output.stdout).unwrap())
        } else {
            Err(format!("{}: {}", output.status, String::from_utf8_lossy(&output.stderr)))
        }
    }

    /// Edits both files and checks that the program runs, here and after a move. Returns how much the files grew.
    fn edit_and_run(flags: &[&str], tag: PathTag) -> Option<[u64; 2]> {
        let dir = tree(flags)?;
        assert!(runs(dir.path()).unwrap_err().contains("cannot open shared object file"));
        let mut grown = [0; 2];
        for (index, (file, value)) in [("bin/main", "$ORIGIN/../lib"), ("lib/libanswer.so", "$ORIGIN")].into_iter().enumerate() {
            let path = dir.path().join(file);
            let data = fs::read(&path).unwrap();
            let edited = elf::set_search_path(&data, tag, value).unwrap();
            let (old, new) = (elf::read(&data).unwrap(), elf::read(&edited).unwrap());
            assert_eq!(new.search_paths, [(tag, value.to_owned())]);
            assert_eq!((old.needed, old.soname, old.glibc), (new.needed, new.soname, new.glibc));
            assert_eq!(elf::set_search_path(&edited, tag, value).unwrap(), edited, "a second edit changes nothing");
            grown[index] = (edited.len() - data.len()) as u64;
            fs::write(&path, edited).unwrap();
        }
        assert_eq!(runs(dir.path()), Ok("42 0\n".to_owned()));
        let moved = tempfile::tempdir().unwrap();
        let target = moved.path().join("elsewhere");
        fs::rename(dir.path(), &target).unwrap();
        assert_eq!(runs(&target), Ok("42 0\n".to_owned()));
        if Command::new("strip").arg(target.join("bin/main")).output().is_ok() {
            assert_eq!(runs(&target), Ok("42 0\n".to_owned()), "after strip");
        }
        Some(grown)
    }

    #[test]
    fn a_long_old_path_is_replaced_in_place() {
        let flags = ["-Wl,-rpath,/nowhere/that/is/long/enough/for/it", "-Wl,--enable-new-dtags"];
        assert!(matches!(edit_and_run(&flags, PathTag::Runpath), None | Some([0, 0])));
        let flags = ["-Wl,-rpath,/nowhere/that/is/long/enough/for/it", "-Wl,--disable-new-dtags"];
        assert!(matches!(edit_and_run(&flags, PathTag::Rpath), None | Some([0, 0])));
    }

    #[test]
    fn a_short_or_missing_old_path_gets_a_segment() {
        for flags in
            [["-Wl,-rpath,/x", "-Wl,--enable-new-dtags"].as_slice(), &[], &["-Wl,-z,max-page-size=65536"], &["-Wl,-z,noseparate-code"]]
        {
            if let Some(grown) = edit_and_run(flags, PathTag::Runpath) {
                assert!(grown.iter().all(|bytes| *bytes > 0), "{flags:?}");
            }
        }
        edit_and_run(&["-Wl,-rpath,/x", "-Wl,--disable-new-dtags"], PathTag::Rpath);
    }

    #[test]
    fn a_program_at_a_fixed_address_gets_a_segment_too() {
        let Some(dir) = tree(&[]) else { return };
        cc(dir.path(), &["-no-pie", "-fno-pie", "main.c", "-Llib", "-lanswer", "-Wl,-rpath-link,lib", "-o", "bin/main"]);
        for (file, value) in [("bin/main", "$ORIGIN/../lib"), ("lib/libanswer.so", "$ORIGIN")] {
            let path = dir.path().join(file);
            fs::write(&path, elf::set_search_path(&fs::read(&path).unwrap(), PathTag::Runpath, value).unwrap()).unwrap();
        }
        assert_eq!(runs(dir.path()), Ok("42 0\n".to_owned()));
    }

    #[test]
    fn a_string_that_another_one_uses_is_not_overwritten() {
        let dir = tempfile::tempdir().unwrap();
        // The linker stores `long_name` as the tail of the search path.
        fs::write(dir.path().join("x.c"), "int long_name(void) { return 1; }\n").unwrap();
        if !cc(dir.path(), &["-shared", "-fPIC", "x.c", "-s", "-o", "libx.so", "-Wl,-rpath,/nowhere/at/all/long_name"]) {
            return;
        }
        let data = fs::read(dir.path().join("libx.so")).unwrap();
        let stored = data.windows(10).filter(|window| *window == b"long_name\0").count();
        assert_eq!(stored, 1, "the linker shares the string");
        let edited = elf::set_search_path(&data, PathTag::Runpath, "$ORIGIN").unwrap();
        fs::write(dir.path().join("libx.so"), &edited).unwrap();
        fs::write(dir.path().join("m.c"), "int long_name(void); int main(void) { return long_name() - 1; }\n").unwrap();
        assert!(cc(dir.path(), &["m.c", "-L.", "-lx", "-Wl,-rpath,$ORIGIN", "-o", "m"]));
        let status = Command::new(dir.path().join("m")).env_clear().status().unwrap();
        assert!(status.success());
    }

    #[test]
    fn a_compiled_in_path_leads_nowhere_afterwards() {
        let dir = tempfile::tempdir().unwrap();
        let text = "#include <stdio.h>\nint main(void) { puts(\"/opt/some/long/prefix\"); puts(\"/opt/some/long/prefix/lib\"); puts(\"/opt/some/long/prefixed\"); puts(\"see /opt/some/long/prefix\"); return 0; }\n";
        fs::write(dir.path().join("m.c"), text).unwrap();
        if !cc(dir.path(), &["m.c", "-o", "m"]) {
            return;
        }
        let mut data = fs::read(dir.path().join("m")).unwrap();
        assert_eq!(elf::blunt_embedded_path(&mut data, "/opt/some/long/prefix").unwrap(), 2);
        assert_eq!(elf::blunt_embedded_path(&mut data, "/opt/short").unwrap(), 0);
        fs::write(dir.path().join("m"), data).unwrap();
        let output = Command::new(dir.path().join("m")).output().unwrap();
        let expected = "/proc/0/e/long/prefix\n/proc/0/e/long/prefix/lib\n/opt/some/long/prefixed\nsee /opt/some/long/prefix\n";
        assert_eq!(String::from_utf8(output.stdout).unwrap(), expected);
    }

    proptest::proptest! {
        /// No damage makes the reader or the editor panic.
        #[test]
        fn damaged_files_are_errors(cut in 0_usize..4096, hits in proptest::collection::vec((proptest::prop_oneof![0_usize..1200, 0_usize..65536], proptest::prelude::any::<u8>()), 0..24)) {
            static SOUND: OnceLock<Option<Vec<u8>>> = OnceLock::new();
            let sound = SOUND.get_or_init(|| fs::read("/bin/true").ok());
            if let Some(sound) = sound {
                let keep = if cut < 1024 { sound.len() * (cut + 1) / 1024 } else { sound.len() };
                let mut data = sound[..keep].to_vec();
                for (at, byte) in hits {
                    let at = at % data.len();
                    data[at] = byte;
                }
                let _ = elf::read(&data);
                let _ = elf::set_search_path(&data, PathTag::Runpath, "$ORIGIN");
                let _ = elf::blunt_embedded_path(&mut data, "/opt/some/long/prefix");
            }
        }
    }
}

#[test]
fn what_is_noted_of_a_package_does_not_depend_on_the_channel_of_the_moment() {
    let lasting = |text: &str| lasting_url(&text.parse().unwrap()).to_string();
    assert_eq!(
        lasting("file:///c/host/channels/0123456789abcdef/linux-64/python-3.11.9-host_1_0.conda"),
        "file:///c/host/channels/pool/linux-64/python-3.11.9-host_1_0.conda"
    );
    assert_eq!(lasting("file:///c/host/channels/0123456789abcdef/"), "file:///c/host/channels/pool/");
    assert_eq!(lasting("https://host.example/linux-64/x.conda"), "https://host.example/linux-64/x.conda");
}
