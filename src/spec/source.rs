//! Bytes to text, and places in that text.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::error::{Error, Place, Result};

/// Largest text that is read, in bytes.
pub const MAX_TEXT: usize = 16 << 20;

/// One decoded input text. Offsets everywhere in `spec` are byte offsets into `text`.
#[derive(Debug, Clone)]
pub struct Text {
    /// As the user named it.
    pub name: Arc<str>,
    /// Decoded to UTF-8, without byte order mark, every line break a `\n`.
    pub text: Arc<str>,
    /// `text` with credentials in URLs overwritten by `*`, byte for byte as long: this is what places show.
    shown: Arc<str>,
    /// Folder that relative paths in the text start from.
    pub base_dir: Option<PathBuf>,
}

impl Text {
    /// Decodes an input.
    ///
    /// # Errors
    /// The text is neither UTF-8 nor UTF-16, holds control characters, or is larger than [`MAX_TEXT`].
    pub fn decode(name: &str, bytes: &[u8], base_dir: Option<PathBuf>) -> Result<Self> {
        if bytes.len() > MAX_TEXT {
            return Err(Error::usage(format!(
                "`{}` is too large for an environment file: {} bytes, the limit is {MAX_TEXT}",
                mask_secrets(name),
                bytes.len()
            )));
        }
        let decoded = decode_bytes(bytes).map_err(|reason| {
            Error::usage(format!("cannot read `{}` as text", mask_secrets(name)))
                .because(reason)
                .hint("save the file as UTF-8 (UTF-16 is read, too)")
        })?;
        let text = Self::new(name, &decoded, base_dir);
        if let Some((offset, bad)) = text.text.char_indices().find(|&(_, c)| is_forbidden(c)) {
            return Err(Error::usage(format!("`{}` holds the control character U+{:04X}", text.name, u32::from(bad)))
                .at(text.place(offset..offset + bad.len_utf8(), "here"))
                .hint("is this a text file? remove the character, or save the file again as UTF-8"));
        }
        Ok(text)
    }

    /// A text that is in memory already; line breaks are normalised.
    pub fn new(name: &str, text: &str, base_dir: Option<PathBuf>) -> Self {
        let text: Arc<str> = if text.contains('\r') { text.replace("\r\n", "\n").replace('\r', "\n").into() } else { text.into() };
        let masked = mask_secrets(&text);
        let shown = if *masked == *text { text.clone() } else { masked.into() };
        Text { name: mask_secrets(name).into(), text, shown, base_dir }
    }

    /// The place of a span, with credentials hidden.
    pub fn place(&self, span: Range<usize>, label: impl Into<String>) -> Place {
        Place {
            name: self.name.clone(),
            text: self.shown.clone(),
            offset: span.start.min(self.shown.len()),
            len: span.end.saturating_sub(span.start),
            label: label.into(),
        }
    }

    /// The span's text, or nothing if the span is not one of this text.
    pub fn slice(&self, span: Range<usize>) -> &str {
        self.text.get(span).unwrap_or("")
    }

    /// From `offset` to the end of its line.
    pub fn rest_of_line(&self, offset: usize) -> Range<usize> {
        let rest = self.text.get(offset..).unwrap_or("");
        offset..offset + rest.find('\n').unwrap_or(rest.len())
    }

    /// The lines with the byte offset of their start.
    pub fn lines(&self) -> impl Iterator<Item = (usize, &str)> {
        let mut offset = 0;
        self.text.split('\n').map(move |line| {
            let start = offset;
            offset += line.len() + 1;
            (start, line)
        })
    }
}

fn is_forbidden(c: char) -> bool {
    matches!(c, '\0'..='\x08' | '\x0b' | '\x0c' | '\x0e'..='\x1f' | '\x7f'..='\u{84}' | '\u{86}'..='\u{9f}' | '\u{fffe}' | '\u{ffff}')
}

/// UTF-8 first, then UTF-16 (as conda does); a byte order mark decides, and UTF-16 without one is recognised by its
/// zero bytes, which no UTF-8 text has.
fn decode_bytes(bytes: &[u8]) -> Result<String, String> {
    if let Some(rest) = bytes.strip_prefix(b"\xef\xbb\xbf") {
        return utf8(rest);
    }
    if let Some(rest) = bytes.strip_prefix(b"\xff\xfe") {
        return utf16(rest, u16::from_le_bytes);
    }
    if let Some(rest) = bytes.strip_prefix(b"\xfe\xff") {
        return utf16(rest, u16::from_be_bytes);
    }
    let (mut even, mut odd) = (0_usize, 0_usize);
    for pair in bytes.chunks_exact(2).take(512) {
        even += usize::from(pair[0] == 0);
        odd += usize::from(pair[1] == 0);
    }
    if bytes.len() >= 4 && bytes.len().is_multiple_of(2) && even + odd > 0 {
        let pairs = (bytes.len() / 2).min(512);
        if odd * 2 > pairs && even == 0 {
            return utf16(bytes, u16::from_le_bytes);
        }
        if even * 2 > pairs && odd == 0 {
            return utf16(bytes, u16::from_be_bytes);
        }
    }
    utf8(bytes)
}

fn utf8(bytes: &[u8]) -> Result<String, String> {
    match std::str::from_utf8(bytes) {
        Ok(text) => Ok(text.to_owned()),
        Err(error) => {
            let line = bytes[..error.valid_up_to()].iter().filter(|&&b| b == b'\n').count() + 1;
            Err(format!("not UTF-8: byte 0x{:02x} at offset {} (line {line})", bytes[error.valid_up_to()], error.valid_up_to()))
        }
    }
}

fn utf16(bytes: &[u8], unit: fn([u8; 2]) -> u16) -> Result<String, String> {
    if !bytes.len().is_multiple_of(2) {
        return Err("UTF-16 text with an odd number of bytes: it was cut off".to_owned());
    }
    let units: Vec<u16> = bytes.chunks_exact(2).map(|pair| unit([pair[0], pair[1]])).collect();
    String::from_utf16(&units).map_err(|_| "UTF-16 text with half a surrogate pair".to_owned())
}

/// Overwrites credentials in every URL of `text` with `*`, one per byte, so that offsets stay valid: user names and
/// passwords (not those that are only `$VAR` or `${VAR}`, nor the `git` of `ssh://git@`), `/t/TOKEN/` segments, and
/// values of query keys such as `token`.
pub fn mask_secrets(text: &str) -> String {
    if !text.contains("://") {
        return text.to_owned();
    }
    let mut out = text.as_bytes().to_vec();
    let mut mask = |range: Range<usize>| out[range].fill(b'*');
    for (at, _) in text.match_indices("://") {
        let start = at + 3;
        let rest = &text[start..];
        let url_len =
            rest.find(|c: char| c.is_whitespace() || matches!(c, '"' | '\'' | '`' | '<' | '>' | '|' | '\\')).unwrap_or(rest.len());
        let url = &rest[..url_len];
        let authority_len = url.find(['/', '?', '#']).unwrap_or(url.len());
        let mut path_start = authority_len;
        let mut user_len = url[..authority_len].rfind('@');
        // A password that holds an unescaped `/`, `?` or `#`: `https://user:pa/ss@host/…`.
        if user_len.is_none()
            && url[..authority_len].split_once(':').is_some_and(|(_, port)| port.parse::<u16>().is_err() && !port.is_empty())
        {
            user_len = url.find('@');
            path_start = user_len.map_or(path_start, |len| len + url[len..].find('/').unwrap_or(url.len() - len));
        }
        // Cut off before its `@`: a port would be a number.
        if user_len.is_none()
            && let Some((user, password)) = url[..authority_len].split_once(':')
            && !password.is_empty()
            && !is_variable(password)
            && password.parse::<u16>().is_err()
        {
            mask(start + user.len() + 1..start + authority_len);
        }
        if let Some(user_len) = user_len {
            let user = &url[..user_len];
            if user != "git" && !user.split(':').all(|part| part.is_empty() || is_variable(part)) {
                mask(start..start + user_len);
            }
        }
        // Channels: `/t/TOKEN/` directly after the host.
        let path = &url[path_start..];
        if let Some(token) = path.strip_prefix("/t/") {
            let len = token.find(['/', '?', '#']).unwrap_or(token.len());
            if !is_variable(&token[..len]) {
                mask(start + path_start + 3..start + path_start + 3 + len);
            }
        }
        for key in ["token=", "password=", "passwd=", "secret=", "key=", "signature=", "credential="] {
            for (found, _) in url.to_ascii_lowercase().match_indices(key) {
                if !url[..found].contains(['?', '#']) {
                    continue;
                }
                let value = found + key.len();
                let len = url[value..].find(['&', '#']).unwrap_or(url.len() - value);
                if !is_variable(&url[value..value + len]) {
                    mask(start + value..start + value + len);
                }
            }
        }
    }
    // Only whole characters of a `&str` were overwritten, by ASCII.
    String::from_utf8(out).unwrap_or_else(|_| "***".to_owned())
}

fn is_variable(text: &str) -> bool {
    let Some(rest) = text.strip_prefix('$') else { return false };
    let name = rest.strip_prefix('{').and_then(|rest| rest.strip_suffix('}')).unwrap_or(rest);
    !name.is_empty() && name.bytes().all(|b| b == b'_' || b.is_ascii_alphanumeric())
}

/// A path without `.`, and `..` resolved by name, as URLs do.
pub(crate) fn clean_path(path: &Path) -> PathBuf {
    use std::path::Component;
    let mut out = PathBuf::new();
    for part in path.components() {
        match (part, out.components().next_back()) {
            (Component::CurDir, _) | (Component::ParentDir, Some(Component::RootDir | Component::Prefix(_))) => {}
            (Component::ParentDir, Some(Component::Normal(_))) => {
                out.pop();
            }
            (part, _) => out.push(part),
        }
    }
    out
}

/// Text for a message: credentials hidden, one line, not endless.
pub fn quote(text: &str) -> String {
    const LIMIT: usize = 120;
    let masked: String = mask_secrets(text).chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    if masked.chars().count() > LIMIT {
        let head: String = masked.chars().take(LIMIT).collect();
        return format!("{head}…");
    }
    masked
}

/// Replaces `$NAME` and `${NAME}` by the variable's value; what is not set stays as written and is reported in the second value.
pub fn expand_variables(text: &str, env: &dyn Fn(&str) -> Option<String>) -> (String, Vec<String>) {
    expand(text, env, true)
}

/// Replaces `${NAME}` only, with NAME in upper case, digits and `_` (pip's rule).
pub fn expand_braced(text: &str, env: &dyn Fn(&str) -> Option<String>) -> String {
    expand(text, env, false).0
}

fn expand(text: &str, env: &dyn Fn(&str) -> Option<String>, bare: bool) -> (String, Vec<String>) {
    let mut out = String::with_capacity(text.len());
    let mut missing = Vec::new();
    let mut rest = text;
    while let Some(at) = rest.find('$') {
        out.push_str(&rest[..at]);
        rest = &rest[at..];
        let after = &rest[1..];
        let word = |text: &str| text.bytes().take_while(|&b| b == b'_' || b.is_ascii_alphanumeric()).count();
        let found = if let Some(inner) = after.strip_prefix('{') {
            let len = word(inner);
            let allowed = bare || inner[..len].bytes().all(|b| !b.is_ascii_lowercase());
            (len > 0 && inner[len..].starts_with('}') && allowed).then(|| (&inner[..len], len + 3))
        } else if bare {
            let len = word(after);
            (len > 0).then(|| (&after[..len], len + 1))
        } else {
            None
        };
        match found {
            Some((name, len)) => {
                match env(name) {
                    Some(value) => out.push_str(&value),
                    None => {
                        missing.push(name.to_owned());
                        out.push_str(&rest[..len]);
                    }
                }
                rest = &rest[len..];
            }
            None => {
                out.push('$');
                rest = after;
            }
        }
    }
    out.push_str(rest);
    (out, missing)
}

/// The known word that is probably meant, if one is close enough.
pub fn nearest<'a>(word: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    if word.len() > 64 {
        return None;
    }
    let lower = word.to_lowercase();
    known
        .into_iter()
        .map(|name| (strsim::damerau_levenshtein(&lower, &name.to_lowercase()), name))
        .filter(|(distance, name)| *distance <= 1 + name.len().min(word.len()) / 4)
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, name)| name)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn utf16_bytes(text: &str, little: bool, bom: bool) -> Vec<u8> {
        let mut out = Vec::new();
        let marked = if bom { format!("\u{feff}{text}") } else { text.to_owned() };
        for unit in marked.encode_utf16() {
            out.extend(if little { unit.to_le_bytes() } else { unit.to_be_bytes() });
        }
        out
    }

    #[test]
    fn every_encoding_gives_the_same_text() {
        let text = "name: ä\r\ndependencies: [x]\r";
        let want = "name: ä\ndependencies: [x]\n";
        let mut inputs = vec![text.as_bytes().to_vec(), [b"\xef\xbb\xbf", text.as_bytes()].concat()];
        for little in [true, false] {
            for bom in [true, false] {
                inputs.push(utf16_bytes(text, little, bom));
            }
        }
        for bytes in inputs {
            assert_eq!(&*Text::decode("e.yml", &bytes, None).unwrap().text, want);
        }
    }

    #[test]
    fn what_is_no_text_says_where() {
        let error = Text::decode("e.yml", b"name: x\n\xff\xfe", None).unwrap_err();
        assert!(error.causes()[0].contains("byte 0xff at offset 8 (line 2)"), "{error}");
        let error = Text::decode("e.yml", b"name: x\ndep\0s", None).unwrap_err();
        assert_eq!(error.places()[0].line_column(), (2, 4));
        assert!(error.message().contains("U+0000"));
        assert!(Text::decode("e", b"\xff\xfea", None).unwrap_err().causes()[0].contains("odd number"));
        assert!(Text::decode("e", b"\xff\xfe\x00\xd8", None).unwrap_err().causes()[0].contains("surrogate"));
        assert!(Text::decode("e", &vec![b'a'; MAX_TEXT + 1], None).unwrap_err().message().contains("too large"));
    }

    #[test]
    fn credentials_are_masked_and_nothing_moves() {
        for (text, want) in [
            ("a https://me:pässword@host/x b", "a https://************@host/x b"),
            ("https://tok@host/x", "https://***@host/x"),
            ("git+ssh://git@github.com/x/y", "git+ssh://git@github.com/x/y"),
            ("https://$USER:${PW}@host/x", "https://$USER:${PW}@host/x"),
            ("https://host/t/to-ken-1/conda-forge", "https://host/t/********/conda-forge"),
            ("https://u:p/w@host/t/tok/x", "https://*****@host/t/***/x"),
            ("https://me:hunter2 @host/x", "https://me:******* @host/x"),
            ("https://host:8080/x@y", "https://host:8080/x@y"),
            ("https://host/x?access_token=abc&b=1", "https://host/x?access_token=***&b=1"),
            ("https://host/x.conda#md5", "https://host/x.conda#md5"),
        ] {
            let masked = mask_secrets(text);
            assert_eq!(masked, want);
            assert_eq!(masked.len(), text.len());
        }
    }

    #[test]
    fn variables_expand_in_both_forms() {
        let env = |name: &str| (name == "TEAM").then(|| "blue".to_owned());
        assert_eq!(expand_variables("a/$TEAM/${TEAM}x/$$NO/${bad-}/$", &env), ("a/blue/bluex/$$NO/${bad-}/$".into(), vec!["NO".into()]));
        assert_eq!(expand_braced("$TEAM ${TEAM} ${team} ${NO}", &env), "$TEAM blue ${team} ${NO}");
    }
}
