//! Random and mutated text: an answer or an error whose places lie in the text, never a panic.

use proptest::prelude::*;

use super::*;

fn check(error: &Error) {
    assert!(!error.message().is_empty() && error.to_string().len() < 5000, "{}", error.to_string().len());
    for place in error.places() {
        place.line_column();
        assert!(place.text.get(place.offset..place.offset + place.len).is_some(), "{}+{} of {}", place.offset, place.len, place.text.len());
    }
}

fn read_every_way(bytes: &[u8]) {
    for name in ["environment.yml", "packages.txt", "<stdin>"] {
        match read(&[fetched(name, bytes)], &[], &options()) {
            Ok(spec) => spec.warnings.iter().for_each(check),
            Err(error) => check(&error),
        }
    }
}

/// Lines that environment files are made of.
fn line() -> impl Strategy<Value = String> {
    let word = prop::sample::select(vec![
        "name",
        "channels",
        "dependencies",
        "variables",
        "pip",
        "uv",
        "sel(linux)",
        "sel(",
        "python",
        "=3.11",
        ">=1,<2",
        "[x]",
        "# [win]",
        "# [",
        "&a",
        "*a",
        "<<",
        "{{ x }}",
        "'",
        "\"",
        "-",
        "- ",
        ": ",
        ":",
        "{",
        "}",
        "[",
        "]",
        ",",
        "|",
        ">",
        "!!str",
        "~",
        "::",
        "@EXPLICIT",
        "#sha256:",
        "https://u:p@h/x-1-0.conda",
        "$X",
        "${X}",
        "--hash=sha256:",
        "-r",
        "-e .",
        "git+",
        ";",
        "\\",
        "\t",
        "ä",
        "\u{feff}",
        "...",
        "---",
        "%YAML",
    ]);
    (0_usize..5, prop::collection::vec(word, 0..5)).prop_map(|(indent, words)| " ".repeat(indent * 2) + &words.concat())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_bytes(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        read_every_way(&bytes);
    }

    #[test]
    fn random_text(text in "\\PC{0,80}") {
        read_every_way(text.as_bytes());
        if let Err(error) = parse_match_spec(&text, None) {
            check(&error);
        }
    }

    #[test]
    fn random_lines(lines in prop::collection::vec(line(), 0..12)) {
        read_every_way(lines.join("\n").as_bytes());
    }

    #[test]
    fn random_match_specs(text in "[a-z\\-]{0,6}[ =<>!~|,\\[\\]'\":*./()^$#;@0-9a-z]{0,30}") {
        if let Err(error) = parse_match_spec(&text, None) {
            check(&error);
        }
    }

    #[test]
    fn random_requirements(text in "(-[a-z-]{0,8}|[a-z]{0,6})[ =<>!~|,\\[\\]'\":*./()\\\\$#;@+0-9a-z{}é\u{feff}\n]{0,40}") {
        let text = Text::new("r.txt", &text, None);
        if let Err(error) = requirements::parse_file(&text, &env) {
            check(&error);
        }
    }

    #[test]
    fn random_selectors(text in "(linux|win|and|or|not|\\(|\\)| |x){0,12}") {
        if let Err(error) = selector::Expr::parse(&text) {
            prop_assert!(text.get(error.span.clone()).is_some());
        }
    }

    #[test]
    fn masking_keeps_the_length(text in "[a-z:/@?=&$ {}ä]{0,20}(://[a-z:/@?=&$ {}ä]{0,30}){0,3}") {
        prop_assert_eq!(mask_secrets(&text).len(), text.len());
    }

    /// What the user wrote in `user:password@` never comes out again, whatever surrounds it.
    #[test]
    fn passwords_never_show(before in "[ -~]{0,10}", after in "[a-z/.:# -]{0,20}") {
        let url = format!("{before}https://me:hunter2@h.example/{after}");
        for text in [
            format!("dependencies:\n  - '{}'\n", url.replace('\'', "")),
            format!("channels:\n  - \"{}\"\ndependencies: [x y z w]\n", url.replace(['"', '\\'], "")),
            format!("dependencies:\n  - pip:\n    - '{}'\n", url.replace('\'', "")),
            format!("{url}\n"),
            format!("@EXPLICIT\n{url}\n"),
        ] {
            for name in ["environment.yml", "packages.txt"] {
                if let Err(error) = read_text(name, &text) {
                    prop_assert!(!format!("{error:?}").contains("hunter2"), "{:?}", error);
                }
            }
        }
    }
}

/// Every real file, cut, doubled and with bytes changed.
#[test]
fn mutated_real_files() {
    let Some(dir) = super::real_files::data_dir() else {
        println!("skipped: no shared data");
        return;
    };
    let mut state = 0x9e37_79b9_u64;
    let mut random = |below: usize| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state % below.max(1) as u64) as usize
    };
    let mut files: Vec<_> = std::fs::read_dir(dir)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|e| e == "yml"))
        .collect();
    files.sort();
    assert_eq!(files.len(), 120);
    for path in files {
        let mut bytes = std::fs::read(path).unwrap();
        bytes.truncate(3000);
        for _ in 0..6 {
            let mut changed = bytes.clone();
            for _ in 0..=random(4) {
                let at = random(changed.len());
                match random(4) {
                    0 => changed.truncate(at),
                    1 if !changed.is_empty() => {
                        const BYTES: &[u8] = b"-:#[]{}'\"&*!|>%@` \t\n\\,?~$=\0\xff";
                        changed[at] = BYTES[random(BYTES.len())];
                    }
                    2 => {
                        let end = (at + random(40)).min(changed.len());
                        changed.drain(at..end);
                    }
                    _ => {
                        let end = (at + random(40)).min(changed.len());
                        let part = changed[at..end].to_vec();
                        let to = random(changed.len());
                        changed.splice(to..to, part);
                    }
                }
            }
            read_every_way(&changed);
        }
    }
}
