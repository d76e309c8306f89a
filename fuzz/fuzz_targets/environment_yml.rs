//! Everything that reads what a person wrote for `create`: environment.yml, lists of match specs, explicit lists, pip's
//! requirements, match specs. Any input gives a value or an error whose places lie in the text; nothing panics or hangs.
#![no_main]
#![allow(dead_code, unused_imports)]

#[path = "../../src/error.rs"]
mod error;
#[path = "../../src/spec/mod.rs"]
mod spec;

use libfuzzer_sys::fuzz_target;
use spec::{Fetched, ReadOptions};

fn env(name: &str) -> Option<String> {
    match name {
        "HOME" => Some("/home/me".to_owned()),
        "TEAM" => Some("blue".to_owned()),
        _ => None,
    }
}

/// A message can be shown, and each of its places lies in its text.
fn check(error: &error::Error) {
    assert!(!error.to_string().is_empty());
    assert!(!error.message().is_empty());
    for place in error.places() {
        place.line_column();
        assert!(place.offset + place.len <= place.text.len(), "{}+{} in {}", place.offset, place.len, place.text.len());
        assert!(place.text.is_char_boundary(place.offset) && place.text.is_char_boundary(place.offset + place.len));
    }
}

fuzz_target!(|data: &[u8]| {
    for subdir in [rattler_conda_types::Subdir::Linux64, rattler_conda_types::Subdir::OsxArm64] {
        let options = ReadOptions { subdir, root_dir: "/project".into(), env, target_given: data.len() % 2 == 0 };
        for name in ["environment.yml", "packages.txt"] {
            let input = Fetched { name: name.to_owned(), bytes: data.to_vec(), base_dir: Some("/project".into()) };
            match spec::read(&[input], &[], &options) {
                Ok(found) => found.warnings.iter().for_each(check),
                Err(error) => check(&error),
            }
        }
        if let (Ok(text), true) = (std::str::from_utf8(data), data.len() < 400) {
            if let Err(error) = spec::read(&[], &[text.to_owned()], &options) {
                check(&error);
            }
            let decoded = spec::Text::new("requirements.txt", text, None);
            if let Err(error) = spec::requirements::parse_file(&decoded, &env) {
                check(&error);
            }
        }
    }
});
