//! `RECORD`: the list of files of an installed distribution, or of a wheel (binary distribution format of PyPA, PEP 376 and PEP 427).

use std::path::{Component, Path, PathBuf};

/// One line of a `RECORD`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Line {
    pub path: String,
    pub hash: Option<Hash>,
    pub size: Option<u64>,
}

/// A hash in a `RECORD`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Hash {
    /// As written: `sha256`.
    pub algorithm: String,
    pub digest: Vec<u8>,
}

impl Line {
    /// The SHA-256, if that is the hash that is given.
    pub(crate) fn sha256(&self) -> Option<[u8; 32]> {
        self.hash.as_ref().filter(|hash| hash.algorithm == "sha256").and_then(|hash| hash.digest.as_slice().try_into().ok())
    }
}

/// Fields of a line of comma-separated values; quotes as in RFC 4180. `None` if a quote is not closed.
fn fields(line: &str) -> Option<Vec<String>> {
    let mut fields = Vec::new();
    let mut field = String::new();
    let mut characters = line.chars().peekable();
    loop {
        if characters.peek() == Some(&'"') {
            characters.next();
            loop {
                match characters.next()? {
                    '"' if characters.peek() == Some(&'"') => {
                        characters.next();
                        field.push('"');
                    }
                    '"' => break,
                    c => field.push(c),
                }
            }
        }
        loop {
            match characters.next() {
                Some(',') => {
                    fields.push(std::mem::take(&mut field));
                    break;
                }
                Some(c) => field.push(c),
                None => {
                    fields.push(field);
                    return Some(fields);
                }
            }
        }
    }
}

/// Base64 with the alphabet for URLs (the other one is accepted too), without padding.
fn base64(text: &str) -> Option<Vec<u8>> {
    let mut out = Vec::with_capacity(33);
    let (mut bits, mut count) = (0u32, 0);
    for byte in text.trim_end_matches('=').bytes() {
        let value = match byte {
            b'A'..=b'Z' => byte - b'A',
            b'a'..=b'z' => byte - b'a' + 26,
            b'0'..=b'9' => byte - b'0' + 52,
            b'-' | b'+' => 62,
            b'_' | b'/' => 63,
            _ => return None,
        };
        bits = bits << 6 | u32::from(value);
        count += 6;
        if count >= 8 {
            count -= 8;
            out.push((bits >> count) as u8);
            bits &= (1 << count) - 1;
        }
    }
    Some(out)
}

/// The bytes of a digest in the alphabet for URLs, without padding.
pub(crate) fn base64_url(bytes: &[u8]) -> String {
    const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
    let mut out = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for chunk in bytes.chunks(3) {
        let group = chunk.iter().fold(0_u32, |group, byte| group << 8 | u32::from(*byte)) << (8 * (3 - chunk.len()));
        for digit in 0..=chunk.len() {
            out.push(char::from(ALPHABET[(group >> (18 - 6 * digit) & 63) as usize]));
        }
    }
    out
}

/// The lines of a `RECORD`; an error names the line (from 1) that makes no sense.
pub(crate) fn parse(text: &str) -> Result<Vec<Line>, usize> {
    let mut lines = Vec::new();
    for (number, line) in text.lines().enumerate().filter(|(_, line)| !line.is_empty()) {
        let bad = number + 1;
        let fields = fields(line).filter(|fields| fields.len() == 3 && !fields[0].is_empty()).ok_or(bad)?;
        let hash = match fields[1].split_once('=') {
            Some(("sha256", value)) => {
                Some(Hash { algorithm: "sha256".to_owned(), digest: base64(value).filter(|digest| digest.len() == 32).ok_or(bad)? })
            }
            Some((algorithm, value)) => Some(Hash { algorithm: algorithm.to_owned(), digest: base64(value).unwrap_or_default() }),
            None if fields[1].is_empty() => None,
            None => return Err(bad),
        };
        let size = if fields[2].is_empty() { None } else { Some(fields[2].trim().parse().map_err(|_| bad)?) };
        lines.push(Line { path: fields[0].clone(), hash, size });
    }
    Ok(lines)
}

/// One line: path, `sha256=` and the digest, size. A `RECORD` itself has neither hash nor size.
pub(crate) fn row(path: &str, file: Option<(&[u8], u64)>) -> String {
    let path = if path.contains([',', '"', '\n', '\r']) { format!("\"{}\"", path.replace('"', "\"\"")) } else { path.to_owned() };
    match file {
        Some((digest, size)) => format!("{path},sha256={},{size}\n", base64_url(digest)),
        None => format!("{path},,\n"),
    }
}

/// `folder/path` without `..`; `None` if it leaves the prefix.
pub(crate) fn inside(folder: &Path, path: &str) -> Option<PathBuf> {
    let mut parts: Vec<Component<'_>> = folder.components().collect();
    for component in Path::new(path).components() {
        match component {
            Component::ParentDir => {
                parts.pop()?;
            }
            Component::CurDir => {}
            Component::Normal(_) => parts.push(component),
            Component::RootDir | Component::Prefix(_) => return None,
        }
    }
    Some(parts.into_iter().collect())
}

/// The text by which a `RECORD` in `site` (site-packages) names `path`; both relative to the prefix, `/` between parts.
pub(crate) fn named_from(site: &Path, path: &Path) -> String {
    let mut name = String::new();
    let rest = match path.strip_prefix(site) {
        Ok(rest) => rest,
        Err(_) => {
            for _ in site.components() {
                name.push_str("../");
            }
            path
        }
    };
    let parts: Vec<_> = rest.components().map(|part| part.as_os_str().to_string_lossy()).collect();
    name + &parts.join("/")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_are_comma_separated_values() {
        let lines = parse("a/b.py,sha256=47DEQpj8HBSa-_TImW-5JCeuQeRkm5NMpJWZG3hSuFU,0\n\"x,\"\"y\"\".py\",,\nRECORD,,\n").unwrap();
        assert_eq!(lines[0].sha256().unwrap()[..3], [0xe3, 0xb0, 0xc4]);
        assert_eq!((lines[0].size, lines[1].path.as_str()), (Some(0), "x,\"y\".py"));
        for (text, line) in [("a,b\n", 1), ("a,,\n\"b,,\n", 2), ("a,sha256=!!,1\n", 1), ("a,,x\n", 1), (",,\n", 1), ("a,nonsense,\n", 1)] {
            assert_eq!(parse(text), Err(line), "{text}");
        }
        assert_eq!(inside(Path::new("lib/python3.11/site-packages"), "../../../bin/x"), Some("bin/x".into()));
        assert_eq!(inside(Path::new("a"), "../../x"), None);
    }

    #[test]
    fn what_is_written_is_read_back() {
        let digest: Vec<u8> = (0..32).collect();
        for path in ["a", "a,b", "a\"b", "../../../bin/x"] {
            let lines = parse(&row(path, Some((&digest, 7)))).unwrap();
            assert_eq!((lines[0].path.as_str(), lines[0].sha256().unwrap().to_vec(), lines[0].size), (path, digest.clone(), Some(7)));
        }
        let site = Path::new("lib/python3.11/site-packages");
        for path in ["bin/x", "lib/python3.11/site-packages/a/b.py", "etc/x"] {
            assert_eq!(inside(site, &named_from(site, Path::new(path))).unwrap(), Path::new(path));
        }
    }

    proptest::proptest! {
        #[test]
        fn no_record_makes_it_panic(text in "(?s).{0,120}") {
            let _ = parse(&text);
        }
    }
}
