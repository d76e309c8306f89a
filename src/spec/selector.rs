//! Platform selectors: `# [linux and not aarch64]` behind an item, `sel(linux): item`.
//!
//! Words are those of conda-lock and conda-build plus every subdir name; `and`, `or`, `not` and parentheses combine them.

use std::ops::Range;

use rattler_conda_types::Subdir;

use super::source::nearest;

/// A parsed selector.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Expr {
    /// A platform word, lower case.
    Word(String),
    /// `not x`
    Not(Box<Expr>),
    /// `x and y`
    And(Box<Expr>, Box<Expr>),
    /// `x or y`
    Or(Box<Expr>, Box<Expr>),
}

/// What is wrong with a selector, and where in its text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SelectorError {
    /// Byte range in the selector's text.
    pub span: Range<usize>,
    /// Message in the house style.
    pub message: String,
    /// The next thing to try.
    pub hint: Option<String>,
}

const MAX_DEPTH: usize = 50;

/// Words with a meaning of their own; subdir names are accepted besides.
pub const WORDS: &[&str] = &[
    "linux",
    "linux32",
    "linux64",
    "unix",
    "osx",
    "osx64",
    "macos",
    "win",
    "win32",
    "win64",
    "arm64",
    "aarch64",
    "ppc64le",
    "armv7l",
    "armv6l",
    "s390x",
    "riscv64",
    "x86",
    "x86_64",
    "emscripten",
    "wasi",
];

/// Is `word` a platform word?
pub fn is_word(word: &str) -> bool {
    let word = word.to_ascii_lowercase();
    WORDS.contains(&word.as_str()) || is_subdir_word(&word)
}

fn is_subdir_word(word: &str) -> bool {
    word.contains('-') && subdir_names().any(|name| name == word)
}

/// The names of all subdirs that stand for a machine.
pub fn subdir_names() -> impl Iterator<Item = &'static str> {
    super::known_subdirs().iter().copied()
}

fn holds(word: &str, subdir: &str) -> bool {
    let (system, machine) = subdir.split_once('-').unwrap_or((subdir, ""));
    match word {
        "linux" => system == "linux",
        "linux32" => subdir == "linux-32",
        "linux64" => subdir == "linux-64",
        "unix" => matches!(system, "linux" | "osx" | "freebsd" | "zos" | "emscripten" | "wasi"),
        "osx" | "macos" => system == "osx",
        "osx64" => subdir == "osx-64",
        "win" => system == "win",
        "win32" => subdir == "win-32",
        "win64" => subdir == "win-64",
        "arm64" => machine == "arm64",
        "aarch64" => machine == "aarch64",
        "x86" => matches!(machine, "32" | "64"),
        "x86_64" => machine == "64",
        "emscripten" | "wasi" => system == word,
        "ppc64le" | "armv7l" | "armv6l" | "s390x" | "riscv64" => machine == word,
        other => other == subdir,
    }
}

impl Expr {
    /// Parses an expression; case does not matter.
    ///
    /// # Errors
    /// Unknown words (python selectors such as `py>=39` too), missing operands, unbalanced parentheses, absurd nesting.
    pub fn parse(text: &str) -> Result<Expr, SelectorError> {
        let mut parser = Parser { text, tokens: tokens(text)?, at: 0 };
        let expr = parser.or(0)?;
        match parser.peek() {
            None => Ok(expr),
            Some((span, token)) => {
                let hint = matches!(token, Token::Word(_)).then(|| "join words with `and` or `or`".to_owned());
                Err(SelectorError { message: format!("unexpected `{}` in a platform selector", &text[span.clone()]), span, hint })
            }
        }
    }

    /// Does the selector hold for `subdir`?
    pub fn matches(&self, subdir: Subdir) -> bool {
        match self {
            Expr::Word(word) => holds(word, subdir.as_str()),
            Expr::Not(inner) => !inner.matches(subdir),
            Expr::And(a, b) => a.matches(subdir) && b.matches(subdir),
            Expr::Or(a, b) => a.matches(subdir) || b.matches(subdir),
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Token {
    Open,
    Close,
    Word(String),
}

fn tokens(text: &str) -> Result<Vec<(Range<usize>, Token)>, SelectorError> {
    let mut out = Vec::new();
    let mut chars = text.char_indices().peekable();
    while let Some((start, c)) = chars.next() {
        match c {
            c if c.is_whitespace() => {}
            '(' => out.push((start..start + 1, Token::Open)),
            ')' => out.push((start..start + 1, Token::Close)),
            _ => {
                let mut end = start + c.len_utf8();
                while let Some(&(at, c)) = chars.peek() {
                    if c.is_whitespace() || matches!(c, '(' | ')') {
                        break;
                    }
                    end = at + c.len_utf8();
                    chars.next();
                }
                let word = text[start..end].to_ascii_lowercase();
                if !matches!(word.as_str(), "and" | "or" | "not") && !is_word(&word) {
                    return Err(unknown_word(start..end, &text[start..end]));
                }
                out.push((start..end, Token::Word(word)));
            }
        }
    }
    Ok(out)
}

fn unknown_word(span: Range<usize>, word: &str) -> SelectorError {
    let lower = word.to_ascii_lowercase();
    let hint = if ["py", "np", "cuda", "vc", "r_", "environ", "os."].iter().any(|start| lower.starts_with(start))
        && !lower.starts_with("python_")
    {
        "selectors of recipes (`py>=39`, `cuda_compiler_version`, …) have no meaning here: only platforms can be selected".to_owned()
    } else if matches!(lower.as_str(), "&&" | "&" | "||" | "|" | "!") || lower.starts_with('!') {
        "write `and`, `or` and `not`".to_owned()
    } else if let Some(near) = nearest(&lower, WORDS.iter().copied().chain(subdir_names())) {
        format!("did you mean `{near}`?")
    } else {
        format!("platform words are {} and subdir names such as `linux-64`", WORDS[..12].join(", "))
    };
    SelectorError { span, message: format!("unknown word `{}` in a platform selector", super::source::quote(word)), hint: Some(hint) }
}

struct Parser<'a> {
    text: &'a str,
    tokens: Vec<(Range<usize>, Token)>,
    at: usize,
}

impl Parser<'_> {
    fn peek(&self) -> Option<(Range<usize>, Token)> {
        self.tokens.get(self.at).cloned()
    }

    fn word(&self, want: &str) -> bool {
        matches!(self.tokens.get(self.at), Some((_, Token::Word(word))) if word == want)
    }

    fn or(&mut self, depth: usize) -> Result<Expr, SelectorError> {
        let mut left = self.and(depth)?;
        while self.word("or") {
            self.at += 1;
            left = Expr::Or(Box::new(left), Box::new(self.and(depth)?));
        }
        Ok(left)
    }

    fn and(&mut self, depth: usize) -> Result<Expr, SelectorError> {
        let mut left = self.not(depth)?;
        while self.word("and") {
            self.at += 1;
            left = Expr::And(Box::new(left), Box::new(self.not(depth)?));
        }
        Ok(left)
    }

    fn not(&mut self, depth: usize) -> Result<Expr, SelectorError> {
        if depth > MAX_DEPTH || self.at > 200 {
            return Err(SelectorError {
                span: 0..self.text.len(),
                message: "a platform selector is nested too deeply".to_owned(),
                hint: None,
            });
        }
        let Some((span, token)) = self.peek() else {
            let end = self.text.len();
            return Err(SelectorError {
                span: end..end,
                message: if self.tokens.is_empty() { "empty platform selector" } else { "a platform selector ends too early" }.to_owned(),
                hint: Some("write for example `# [linux and not aarch64]`".to_owned()),
            });
        };
        self.at += 1;
        match token {
            Token::Word(word) if word == "not" => Ok(Expr::Not(Box::new(self.not(depth + 1)?))),
            Token::Word(word) if word == "and" || word == "or" => Err(SelectorError {
                span,
                message: format!("`{word}` needs a platform word on each side"),
                hint: Some("write for example `# [linux and not aarch64]`".to_owned()),
            }),
            Token::Word(word) => Ok(Expr::Word(word)),
            Token::Open => {
                let inner = self.or(depth + 1)?;
                match self.peek() {
                    Some((_, Token::Close)) => {
                        self.at += 1;
                        Ok(inner)
                    }
                    _ => Err(SelectorError { span, message: "a `(` in a platform selector is never closed".to_owned(), hint: None }),
                }
            }
            Token::Close => Err(SelectorError { span, message: "a `)` in a platform selector closes nothing".to_owned(), hint: None }),
        }
    }
}

/// A selector found in a comment: the byte range of the expression inside the comment.
///
/// `# [expr]` is a selector. Where text stands before the bracket (`# only there [win]`), it is one only if every word
/// is a platform word or an operator, so that ordinary comments stay comments; `[text](link)` never is one.
pub fn in_comment(comment: &str) -> Option<Range<usize>> {
    let trimmed_start = comment.len() - comment.trim_start_matches(['#', ' ', '\t']).len();
    let mut found = None;
    let mut from = trimmed_start;
    while let Some(open) = comment[from..].find('[').map(|at| at + from) {
        let close = comment[open..].find(']').map(|at| at + open)?;
        let inner = open + 1..close;
        let linked = comment[close + 1..].starts_with('(');
        let words = || comment[inner.clone()].split(|c: char| c.is_whitespace() || matches!(c, '(' | ')')).filter(|word| !word.is_empty());
        let plain = words().all(|word| is_word(word) || matches!(word.to_ascii_lowercase().as_str(), "and" | "or" | "not"))
            && words().next().is_some();
        if !linked && (open == trimmed_start || plain) {
            found.get_or_insert(inner);
        }
        from = close + 1;
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn holds_for(text: &str) -> Vec<&'static str> {
        let expr = Expr::parse(text).unwrap();
        ["linux-64", "linux-aarch64", "linux-ppc64le", "osx-64", "osx-arm64", "win-64", "win-arm64"]
            .into_iter()
            .filter(|name| expr.matches(name.parse().unwrap()))
            .collect()
    }

    #[test]
    fn words_and_operators() {
        assert_eq!(holds_for("linux"), ["linux-64", "linux-aarch64", "linux-ppc64le"]);
        assert_eq!(holds_for("linux64"), ["linux-64"]);
        assert_eq!(holds_for("linux-64"), ["linux-64"]);
        assert_eq!(holds_for("unix and not osx and not aarch64"), ["linux-64", "linux-ppc64le"]);
        assert_eq!(holds_for("osx64 or (win and not arm64)"), ["osx-64", "win-64"]);
        assert_eq!(holds_for("not (linux or osx)"), ["win-64", "win-arm64"]);
        assert_eq!(holds_for("not linux or linux64"), ["linux-64", "osx-64", "osx-arm64", "win-64", "win-arm64"]);
        assert_eq!(holds_for("ARM64"), ["osx-arm64", "win-arm64"]);
        assert_eq!(holds_for("x86_64 and unix"), ["linux-64", "osx-64"]);
        assert_eq!(holds_for("ppc64le"), ["linux-ppc64le"]);
        assert_eq!(holds_for("win64"), ["win-64"]);
    }

    #[test]
    fn and_binds_tighter_than_or_and_not_tightest() {
        assert_eq!(holds_for("osx or linux and aarch64"), ["linux-aarch64", "osx-64", "osx-arm64"]);
        assert_eq!(holds_for("not win and arm64"), ["osx-arm64"]);
    }

    #[test]
    fn what_is_wrong_is_named_with_its_place() {
        for (text, message, at) in [
            ("linus", "unknown word `linus`", 0),
            ("linux and py>=36", "unknown word `py>=36`", 10),
            ("", "empty", 0),
            ("linux and", "ends too early", 9),
            ("and linux", "`and` needs", 0),
            ("(linux", "never closed", 0),
            ("linux)", "unexpected `)`", 5),
            (")", "closes nothing", 0),
            ("linux osx", "unexpected `osx`", 6),
            ("linux && osx", "unknown word `&&`", 6),
        ] {
            let error = Expr::parse(text).unwrap_err();
            assert!(error.message.contains(message), "{text}: {error:?}");
            assert_eq!(error.span.start, at, "{text}");
        }
        assert_eq!(Expr::parse("linus").unwrap_err().hint.as_deref(), Some("did you mean `linux`?"));
        assert!(Expr::parse(&"(".repeat(100_000)).is_err());
        assert!(Expr::parse(&"not ".repeat(100_000)).is_err());
        assert!(Expr::parse(&vec!["linux"; 1000].join(" or ")).is_err());
    }

    #[test]
    fn only_some_comments_are_selectors() {
        for (comment, want) in [
            ("# [linux]", Some("linux")),
            ("#[ win ]", Some(" win ")),
            ("# [nonsense]", Some("nonsense")),
            ("# only on windows [win or osx] please", Some("win or osx")),
            ("# see [the docs](https://x)", None),
            ("# [linux](https://x)", None),
            ("# for a[0] only", None),
            ("# pip install dask[distributed]", None),
            ("# open [", None),
            ("# note [] ", None),
            ("#       GCC 13", None),
        ] {
            assert_eq!(in_comment(comment).map(|span| &comment[span]), want, "{comment}");
        }
    }
}
