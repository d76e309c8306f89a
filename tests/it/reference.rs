//! Documents that are generated: they are compared with what the code says.

use crate::common::TestEnv;

/// Compares a document with its generated text; `TARE_UPDATE_DOCS=1` writes it instead.
fn compare(name: &str, text: &str) {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("docs").join(name);
    if std::env::var_os("TARE_UPDATE_DOCS").is_some() {
        std::fs::write(&path, text).unwrap();
    }
    let written = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(written == text, "docs/{name} is out of date: TARE_UPDATE_DOCS=1 cargo test --test it reference");
}

#[test]
fn the_command_line_reference_is_current() {
    compare("cli.md", &tare::cli::reference());
}

#[test]
fn completions_for_every_shell() {
    let env = TestEnv::new();
    for shell in ["bash", "zsh", "fish", "powershell", "elvish"] {
        env.tare(&["completions", shell]).ok().stdout_has("tare");
    }
}

#[test]
fn usage_errors_are_json_with_json() {
    let env = TestEnv::new();
    let ran = env.tare(&["create", "--json", "--no-such-option"]).expect_code(2);
    assert_eq!(ran.json()["error"]["kind"], "usage");
    env.tare(&["create", "--no-such-option"]).expect_code(2).stderr_has("--no-such-option");
    env.tare(&["--version"]).ok().stdout_has("tare 0");
    env.tare(&["--help"]).ok().stdout_has("create");
}
