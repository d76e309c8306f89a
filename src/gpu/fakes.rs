//! The fake driver libraries in tests. The loader looks for libraries where LD_LIBRARY_PATH said when the process started, so
//! a test that needs them runs itself once more, alone, in a child that has them.

use std::path::{Path, PathBuf};
use std::process::Command;

/// Says to the child which test it is.
const CHILD: &str = "TARE_TEST_IN_CHILD";

/// Copies the fake libraries to `folder`, under the names that programs look for.
pub fn copy_to(folder: &Path) {
    for (made, names) in
        [("libtare_fake_cuda.so", ["libcuda.so", "libcuda.so.1"]), ("libtare_fake_nvml.so", ["libnvidia-ml.so", "libnvidia-ml.so.1"])]
    {
        for name in names {
            std::fs::copy(built(made), folder.join(name)).expect("the fake library is copied");
        }
    }
}

/// A folder with the fake libraries.
pub fn folder() -> tempfile::TempDir {
    let folder = tempfile::Builder::new().prefix("tare-fake-driver-").tempdir().expect("a folder");
    copy_to(folder.path());
    folder
}

/// A library that cargo built beside this test.
fn built(name: &str) -> PathBuf {
    let program = std::env::current_exe().expect("this program");
    let path = program.parent().expect("a folder").join(name);
    assert!(path.is_file(), "no {}: the test's package depends on it, so cargo builds it", path.display());
    path
}

/// Takes a function away from a library, by changing its name in the table of names.
pub fn without(library: &Path, symbol: &str) {
    let mut bytes = std::fs::read(library).expect("the library");
    let wanted: Vec<u8> = [b"\0", symbol.as_bytes(), b"\0"].concat();
    let places: Vec<usize> = (0..bytes.len() - wanted.len()).filter(|at| bytes[*at..].starts_with(&wanted)).collect();
    assert!(!places.is_empty(), "{} has no {symbol}", library.display());
    for place in places {
        bytes[place + 1] = b'X';
    }
    std::fs::write(library, bytes).expect("the library is written");
}

/// Runs `body` in a child with the fake libraries and `variables`. `module` is `module_path!()`, `test` the name of the calling
/// test, which must do nothing but this.
pub fn in_child(module: &str, test: &str, variables: &[(&str, &str)], body: impl FnOnce()) {
    in_child_with(module, test, variables, |_| {}, body);
}

/// As [`in_child`], with a change to the folder of libraries before.
pub fn in_child_with(module: &str, test: &str, variables: &[(&str, &str)], change: impl FnOnce(&Path), body: impl FnOnce()) {
    let path = format!("{}::{test}", module.split_once("::").map_or(module, |(_, rest)| rest));
    // Several runs of one test differ by their variables.
    let key = format!("{path} {variables:?}");
    match std::env::var(CHILD) {
        Ok(running) if running == key => return body(),
        Ok(_) => return,
        Err(_) => {}
    }
    let folder = folder();
    change(folder.path());
    let output = Command::new(std::env::current_exe().expect("this program"))
        .args([path.as_str(), "--exact", "--nocapture", "--test-threads=1"])
        .env_remove("CUDA_VISIBLE_DEVICES")
        .env("LD_LIBRARY_PATH", folder.path())
        .env("TARE_FAKE_STATE", folder.path().join("state"))
        .env(CHILD, &key)
        .envs(variables.iter().copied())
        .output()
        .expect("the child starts");
    let said = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && said.contains("1 passed"), "{variables:?}: {}\n{said}", output.status);
}
