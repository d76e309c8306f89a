//! What people get wrong: each input has its message, its place and its hint, and none panics.

use super::*;

/// File name, text, part of "message: causes", line and column, part of the hints.
type Case = (&'static str, &'static str, &'static str, (usize, usize), &'static str);

const YML: &str = "environment.yml";
const TXT: &str = "packages.txt";

const CASES: &[Case] = &[
    // The document.
    (YML, "", "`environment.yml` is empty", (1, 1), "dependencies: [python]"),
    (YML, "# only a comment\n\n", "is empty", (1, 1), "dependencies"),
    (YML, "---\n...\n", "is empty", (1, 1), "dependencies"),
    (YML, "- python\n- numpy\n", "is a list where an environment file is a mapping", (1, 1), "put `dependencies:` above the list"),
    (YML, "python\n", "is text where", (1, 1), "keys such as `name:`"),
    (YML, "name: a\ndependencies: []\n---\nname: b\ndependencies: []\n", "more than one YAML document", (3, 1), "file of its own"),
    (YML, "name: a\nname: b\ndependencies: []\n", "the key `name` stands twice", (2, 1), "merge the two"),
    (YML, "dependencies: [a]\nchannels: []\ndependencies: [b]\n", "the key `dependencies` stands twice", (3, 1), "merge the two"),
    (YML, "dependencies:\n\t- python\n", "not valid YAML", (2, 2), "tabs"),
    (YML, "dependencies:\n  - python\n - numpy\n", "not valid YAML", (3, 2), "indentation"),
    (YML, "dependencies: [python, numpy\n", "not valid YAML", (1, 15), "every `[` and `{` is closed"),
    (YML, "name: \"a\ndependencies: []\n", "not valid YAML", (2, 1), "a quote is never closed"),
    (YML, "dependencies:\n  - *numpy\n", "not valid YAML", (2, 5), "must be quoted"),
    (YML, "dependencies:\n  - @scope/x\n", "not valid YAML", (2, 5), "begins with `@` must be quoted"),
    (YML, "dependencies:\n  - a: b: c\n", "not valid YAML", (2, 9), "indentation"),
    (YML, "dependencies:\n  - !!python/object:os.system x\n", "tag", (2, 31), "remove the tag"),
    (YML, "dependencies: &d\n  - *d\n", "", (2, 5), ""),
    (YML, "{% if cuda %}\ndependencies: []\n{% endif %}\n", "not valid YAML", (1, 2), "template"),
    (YML, "name: {{ name }}\ndependencies: []\n", "a key of a mapping is not text", (1, 8), "template"),
    (YML, "dependencies:\n  - numpy={{ numpy }}\n", "invalid match spec", (2, 5), "render it first"),
    (YML, "name: a\ndependencies: [x]\0\n", "control character U+0000", (2, 18), "UTF-8"),
    (YML, "? [a, b]\n: c\ndependencies: []\n", "a key of a mapping is not text", (1, 3), "plain name"),
    (YML, "x: {<<: 3}\ndependencies: []\n", "`<<` merges mappings only", (1, 9), "&anchor"),
    (YML, "a: &a {b: 1}\nc:\n  <<: *a\n  <<: *a\ndependencies: []\n", "the key `<<` stands twice", (4, 3), "merge the two"),
    // Keys.
    (
        YML,
        "name: a\ndependecies:\n  - python\n",
        "`dependencies` is missing",
        (2, 1),
        "did you mean `dependencies` instead of `dependecies`",
    ),
    (YML, "name: a\nchannels: [conda-forge]\n", "`dependencies` is missing", (1, 1), "`dependencies: []` for none"),
    (YML, "version: 6\nenvironments: {}\npackages: []\n", "this is a lock file", (1, 1), "the lock was made from"),
    (YML, "name: [a]\ndependencies: []\n", "`name` must be text, not a list", (1, 7), ""),
    (YML, "name: base\ndependencies: []\n", "conda's own installation", (1, 7), "-n NAME"),
    (YML, "name: root\ndependencies: []\n", "`root` cannot be the name", (1, 7), "-n NAME"),
    (YML, "name: my env\ndependencies: []\n", "a blank is not allowed", (1, 7), "letters, digits"),
    (YML, "name: envs/a\ndependencies: []\n", "`/` is not allowed", (1, 7), "-p"),
    (YML, "name: \"a#b\"\ndependencies: []\n", "`#` is not allowed", (1, 7), ""),
    (YML, "name: ..\ndependencies: []\n", "no usable folder name", (1, 7), ""),
    (YML, "name: ''\ndependencies: []\n", "it is empty", (1, 7), ""),
    (YML, "prefix: $NOPE/x\ndependencies: []\n", "`NOPE`, which is not set", (1, 9), "-p"),
    (YML, "prefix: ~other/x\ndependencies: []\n", "another user's home", (1, 9), "whole path"),
    (YML, "channels: conda-forge\ndependencies: []\n", "`channels` must be a list, not text", (1, 11), "channels: [conda-forge]"),
    (YML, "channels:\n  - conda-forge: x\ndependencies: []\n", "a channel must be text, not a mapping", (2, 5), ""),
    (YML, "channels:\n  -\n  - x\ndependencies: []\n", "an empty channel", (2, 4), "remove the `-`"),
    (YML, "channels: [conda-forge::numpy]\ndependencies: []\n", "is a match spec, not a channel", (1, 12), "- conda-forge"),
    (YML, "channels: [a b]\ndependencies: []\n", "invalid channel `a b`", (1, 12), "one channel an item"),
    (YML, "platforms: linux-64\ndependencies: []\n", "`platforms` must be a list", (1, 12), "[linux-64]"),
    (YML, "platforms: [linux-46]\ndependencies: []\n", "unknown platform `linux-46`", (1, 13), "did you mean `linux-64`"),
    (YML, "platforms: [noarch]\ndependencies: []\n", "unknown platform `noarch`", (1, 13), ""),
    (YML, "variables:\n  - A=1\ndependencies: []\n", "`variables` must be a mapping, not a list", (2, 3), "NAME: value"),
    (YML, "variables: {A: [1]}\ndependencies: []\n", "the variable `A` must be text, not a list", (1, 16), "quotes"),
    (YML, "variables: {A B: 1}\ndependencies: []\n", "cannot be the name of a variable", (1, 13), "letters"),
    (YML, "category: [a]\ndependencies: []\n", "`category` must be text", (1, 11), ""),
    // Dependencies.
    (YML, "dependencies: python\n", "`dependencies` must be a list, not text", (1, 15), "- python"),
    (YML, "dependencies:\n  python: 3.11\n", "`dependencies` must be a list, not a mapping", (2, 3), "python=3.11"),
    (YML, "dependencies:\n  - python: 3.11\n", "unknown section `python`", (2, 5), "`- python=3.11`"),
    (YML, "dependencies:\n  - pipp:\n    - x\n", "unknown section `pipp`", (2, 5), "did you mean `pip:`"),
    (YML, "dependencies:\n  - npm: [x]\n", "unknown section `npm`", (2, 5), ""),
    (YML, "dependencies:\n  - 3.11\n", "a dependency must be text, not a number", (2, 5), "a name comes first"),
    (YML, "dependencies:\n  -\n  - x\n", "an empty dependency", (2, 4), "remove the `-`"),
    (YML, "dependencies:\n  - [a, b]\n", "a dependency must be text, not a list", (2, 5), "one `-` or `[` too many"),
    (YML, "dependencies:\n  - python >=3.9 <4 foo\n", "invalid match spec", (2, 5), "join conditions"),
    (YML, "dependencies:\n  - numpy >=1.20 <2\n", "`<2` stands where the build belongs", (2, 5), "`name >=1.2,<2`"),
    (YML, "dependencies:\n  - numpy:\n", "unknown section `numpy`", (2, 5), "write `- numpy`, without a colon"),
    (YML, "dependencies:\n  - python 3.11 foo bar baz\n", "`bar baz` is too much", (2, 5), "one package an item"),
    (YML, "dependencies:\n  - =\n", "the package name is missing", (2, 5), "python=3.11"),
    (YML, "dependencies:\n  - python>=\n", "invalid match spec `python>=`", (2, 5), "version is missing"),
    (YML, "dependencies:\n  - \"\"\n", "empty match spec", (2, 5), "name of a package"),
    (YML, "dependencies:\n  - -c pytorch foo\n", "cannot begin with `-`", (2, 5), "`pytorch::foo`"),
    (YML, "dependencies:\n  - -r requirements.txt\n", "cannot begin with `-`", (2, 5), "`pip:` section"),
    (YML, "dependencies:\n  - conda-forge:dev::numpy\n", "invalid channel `conda-forge:dev`", (2, 5), "`conda-forge/label/dev::numpy`"),
    (YML, "dependencies:\n  - 'conda-forge::'\n", "no package name behind `::`", (2, 5), ""),
    (YML, "dependencies:\n  - numpy≥1.20\n", "it holds `≥`", (2, 5), "`>=`"),
    (YML, "dependencies:\n  - pythön\n", "it holds `ö`", (2, 5), "ASCII"),
    (YML, "dependencies:\n  - num*\n", "invalid match spec `num*`", (2, 5), "whole name"),
    (YML, "dependencies:\n  - numpy[verion='1']\n", "invalid match spec", (2, 5), "keys in brackets"),
    (YML, "dependencies:\n  - numpy; python_version < '3'\n", "pip's syntax", (2, 5), "# [linux]"),
    (YML, "dependencies:\n  - git+https://github.com/x/y\n", "is no package", (2, 5), "`pip:` section"),
    (YML, "dependencies:\n  - x @ https://example.org/x.whl\n", "is no package", (2, 5), "`pip:` section"),
    (YML, "dependencies:\n  - https://example.org/a.zip\n", "must end in .conda or .tar.bz2", (2, 5), "`pip:`"),
    (YML, "dependencies:\n  - ./foo.conda\n", "not named NAME-VERSION-BUILD", (2, 5), ""),
    (YML, "dependencies:\n  - ./a-1-0.conda#123\n", "invalid hash `123`: 3 hex digits", (2, 5), "32 hex digits"),
    // Selectors.
    (YML, "dependencies:\n  - x  # [linus]\n", "unknown word `linus`", (2, 11), "did you mean `linux`"),
    (YML, "dependencies:\n  - x  # [py>=39]\n", "unknown word `py>=39`", (2, 11), "recipes"),
    (YML, "dependencies:\n  - x  # [linux and]\n", "ends too early", (2, 20), ""),
    (YML, "dependencies:\n  - x  # [(linux]\n", "never closed", (2, 11), ""),
    (YML, "dependencies:\n  - sel(linuks): x\n", "unknown word `linuks`", (2, 9), "did you mean"),
    (YML, "dependencies:\n  - sel(linux: x\n", "is no selector", (2, 5), "sel(linux)"),
    (YML, "dependencies:\n  - sel(win): '>='\n", "invalid match spec", (2, 15), ""),
    // pip.
    (YML, "dependencies:\n  - pip: numpy\n", "`pip` must be a list, not text", (2, 10), "- pip: [\"numpy\"]"),
    (YML, "dependencies:\n  - pip:\n      numpy: 1\n", "`pip` must be a list, not a mapping", (3, 7), "one `- requirement` a line"),
    (YML, "dependencies:\n  - pip:\n    - \"numpy ; python_version < '3'>\u{feff}\"\n", "U+FEFF", (3, 7), ""),
    (YML, "dependencies:\n  - pip:\n    - numpy==1.0é\n", "not allowed here", (3, 7), ""),
    (YML, "dependencies:\n  - pip:\n    - numpy=1.2\n", "invalid item `numpy=1.2` for pip", (3, 7), "two `=`"),
    (YML, "dependencies:\n  - pip:\n    - --indx-url https://x\n", "unknown option `--indx-url`", (3, 7), "`--index-url`"),
    (YML, "dependencies:\n  - pip:\n    - 1.2\n", "must be text, not a number", (3, 7), ""),
    (YML, "dependencies:\n  - pip:\n    -\n", "an empty item of `pip:`", (3, 6), ""),
    (YML, "dependencies:\n  - pip:\n    - a: b\n", "must be text, not a mapping", (3, 7), "quoted"),
    (YML, "dependencies:\n  - pip:\n    - [a]\n", "must be text, not a list", (3, 7), ""),
    (YML, "dependencies:\n  - pip:\n    - pip install x\n", "it is a command", (3, 7), "`- x`"),
    (YML, "dependencies:\n  - uv: [\"x==1 --hash=sha256:12\"]\n", "64 hex digits", (2, 10), "sha256"),
    // Lists and explicit lists.
    (TXT, "numpy\n-r other.txt\n", "a requirements file of pip", (2, 1), "- pip: [\"-r packages.txt\"]"),
    (TXT, "requests[socks]>=2\n", "a requirements file of pip", (1, 1), "environment.yml"),
    (TXT, "torch==2.0 ; python_version < '3.9'\n", "only pip understands", (1, 1), ""),
    (TXT, "numpy >=1\n\n  scipy ==\n", "invalid match spec `scipy ==`", (3, 3), ""),
    (TXT, "[project]\nname = 'x'\n", "looks like TOML", (1, 1), "environment.yml"),
    (TXT, "@EXPLICIT\npython=3.11\n", "`python=3.11` is no package URL", (2, 1), "remove `@EXPLICIT`"),
    (TXT, "@EXPLICIT\nhttps://x.org/c/linux-64/a-1-0.conda#12345\n", "invalid hash `12345`: 5 hex digits", (2, 1), "32 hex digits"),
    (TXT, "@EXPLICIT\nhttps://x.org/a-1-0.conda#sha1:aa\n", "unknown algorithm `sha1`", (2, 1), ""),
    (TXT, "@EXPLICIT\nhttps://x.org/a-1-0.conda#zz\n", "not hex digits", (2, 1), ""),
    (TXT, "@EXPLICIT\nhttps://x.org/a-1-0.whl\n", "must end in .conda", (2, 1), "wheels"),
    (TXT, "@EXPLICIT\nhttps://x.org/a.conda\n", "not named NAME-VERSION-BUILD", (2, 1), ""),
    (TXT, "@EXPLICIT\n$NOPE/a-1-0.conda\n", "variable `NOPE` is not set", (2, 1), "export NOPE"),
    (TXT, "@EXPLICIT\nhtp://x/a-1-0.conda\n", "unknown URL scheme `htp`", (2, 1), ""),
    (TXT, "# platform: linux-46\n@EXPLICIT\n", "unknown platform `linux-46`", (1, 1), "linux-64"),
    (TXT, "# platform: linux-64\n# platform: win-64\n@EXPLICIT\n", "two different platforms", (2, 1), ""),
    (TXT, "@EXPLICIT\n@IMPLICIT\n", "unknown marker", (2, 1), "@EXPLICIT"),
];

#[test]
fn every_malformed_input_has_message_place_and_hint() {
    let mut wrong = Vec::new();
    for (name, text, message, place, hint) in CASES {
        let error = match read_text(name, text) {
            Ok(_) => {
                wrong.push(format!("{text:?}: was accepted"));
                continue;
            }
            Err(error) => error,
        };
        let shown = std::iter::once(error.message()).chain(error.causes().iter().map(String::as_str)).collect::<Vec<_>>().join(": ");
        let at = error.places().first().map(Place::line_column);
        let hints = error.hints().join(" | ");
        if !shown.contains(message) || at != Some(*place) || !hints.contains(hint) || error.exit_code() != 2 {
            wrong.push(format!("{text:?}:\n   {shown}\n   at {at:?} (want {place:?})\n   hints: {hints}"));
        }
        let first = shown.chars().next().unwrap();
        if first.is_uppercase() || shown.ends_with('.') {
            wrong.push(format!("style: {shown}"));
        }
    }
    assert!(wrong.is_empty(), "{}\n{} of {}", wrong.join("\n"), wrong.len(), CASES.len());
    assert!(CASES.len() >= 45);
}

#[test]
fn a_duplicate_key_shows_both_places() {
    let error = read_text(YML, "name: a\ndependencies: []\nname: b\n").unwrap_err();
    assert_eq!(error.places().iter().map(Place::line_column).collect::<Vec<_>>(), [(3, 1), (1, 1)]);
}

#[test]
fn places_survive_every_encoding() {
    let text = "name: ä\r\ndependencies:\r\n  - pythön\r\n";
    let utf16 = |little: bool, bom: bool| -> Vec<u8> {
        let text = if bom { format!("\u{feff}{text}") } else { text.to_owned() };
        text.encode_utf16().flat_map(|unit| if little { unit.to_le_bytes() } else { unit.to_be_bytes() }).collect()
    };
    let mut inputs = vec![text.as_bytes().to_vec(), [b"\xef\xbb\xbf", text.as_bytes()].concat()];
    inputs.extend([utf16(true, true), utf16(true, false), utf16(false, true), utf16(false, false)]);
    for bytes in inputs {
        let error = read(&[fetched(YML, bytes)], &[], &options()).unwrap_err();
        let place = &error.places()[0];
        assert_eq!(place.line_column(), (3, 5));
        assert_eq!(&place.text[place.offset..place.offset + place.len], "pythön");
    }
}

#[test]
fn no_message_or_place_holds_a_password() {
    let inputs = [
        (YML, "channels: [\"https://me:hunter2@host/x y\"]\ndependencies: [a b c d e]\n"),
        (YML, "channels: [\"https://me:hunter2@host/x::y\"]\ndependencies: []\n"),
        (YML, "dependencies: [\"https://me:hunter2@host/x.zip\"]\n"),
        (YML, "dependencies: [\"https://me:hunter2@host/x.conda\"]\n"),
        (YML, "dependencies: [\"https://host/t/hunter2/x.conda\"]\n"),
        (YML, "dependencies: [\"https://me:hunter2@host/c::=\"]\n"),
        (YML, "dependencies: [\"https://me:hunter2@host/c::x:y::\"]\n"),
        (YML, "dependencies: [pip: [\"--indx-url https://me:hunter2@host\"]]\n"),
        (YML, "dependencies: [pip: [\"x @ https://me:hunter2@host:bad/\"]]\n"),
        (YML, "dependencies: [pip: [\"https://me:hunter2@host:bad/\"]]\n"),
        (YML, "dependencies: [pip: [\"git+https://me:hunter2@host/x y z\"]]\n"),
        (YML, "dependencies: [pip: [\"-e https://me:${SECRET}@host/x\"]]\n"),
        (YML, "dependencies: [pip: [\"--index-url ssh://me:${SECRET}@host/x\"]]\n"),
        (YML, "dependencies: [pip: [\"numpy @ https://me:${SECRET}@ho st/x\"]]\n"),
        (YML, "dependencies: [pip: [\"-r gopher://me:${SECRET}@host/x\"]]\n"),
        (YML, "https://me:hunter2@host/x: 1\ndependencies: []\nname: a b\n"),
        (TXT, "@EXPLICIT\nhttps://me:hunter2@host/x.whl\n"),
        (TXT, "@EXPLICIT\nhttps://me:hunter2@host/a-1-0.conda#zz\n"),
        (TXT, "@EXPLICIT\nhttps://me:hunter2@host:bad/a-1-0.conda\n"),
        (TXT, "@EXPLICIT\nhttps://me:$SECRET@host:bad/a-1-0.conda\n"),
        (TXT, "@EXPLICIT\nhttps://me:$SECRET@host/hunter-2\n"),
        (TXT, "--extra-index-url https://me:hunter2@host/x\n"),
    ];
    for (name, text) in inputs {
        let error = read_text(name, text).expect_err(text);
        let everything = format!("{error:?}");
        assert!(!everything.contains("hunter2"), "{text}\n{everything}");
    }
    let name = "https://me:hunter2@host/environment.yml";
    let error = read(&[fetched(name, "name: a")], &[], &options()).unwrap_err();
    assert!(!format!("{error:?}").contains("hunter2"));
    assert!(!format!("{:?}", Input::parse("ftp://me:hunter2@host/x").unwrap_err()).contains("hunter2"));
    assert!(!format!("{:?}", Input::parse("https://me:hunter2@ho st/x").unwrap_err()).contains("hunter2"));
}

#[test]
fn absurd_lengths_are_refused() {
    for text in [
        format!("dependencies: [{}]\n", "x".repeat(100_000)),
        format!("dependencies:\n  - x {}\n", "1,".repeat(5000)),
        format!("dependencies:\n  - x{}\n", "[".repeat(900)),
        format!("dependencies:\n  - \"x {}1{}\"\n", "(".repeat(900), ")".repeat(900)),
        format!("name: {}\ndependencies: []\n", "x".repeat(5000)),
        format!("dependencies: [pip: ['{}']]\n", "x".repeat(30_000)),
    ] {
        let error = read_text(YML, &text).expect_err(&text[..60]);
        assert!(error.to_string().len() < 1000, "{error}");
    }
}
