use std::borrow::Cow;

use rattler_redaction::{DEFAULT_REDACTION_STR, redact_signatures_in_text};
use url::Url;

/// A URL as it may be shown: password (or a lone user name, which may be a token), `/t/TOKEN/` and signatures masked.
pub fn redact_url(url: &Url) -> String {
    redact_text(url.as_str())
}

/// Masks credentials in all URLs of a text, also in ones without a scheme (`user:password@proxy:3128`).
pub fn redact_text(text: &str) -> String {
    let masked = redact_signatures_in_text(text, DEFAULT_REDACTION_STR);
    let masked = mask_user_info(&masked);
    mask_tokens(&masked)
}

fn ends_url(c: char) -> bool {
    c.is_whitespace() || c.is_control() || matches!(c, '"' | '\'' | '`' | '<' | '>' | ',' | '(' | ')' | '|')
}

/// In each word: what stands before the last `@` of the authority.
fn mask_user_info(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for (index, word) in split_words(text).into_iter().enumerate() {
        // Words and separators alternate, beginning with a word.
        if index % 2 == 1 {
            out.push_str(word);
            continue;
        }
        let start = word.find("://").map_or(0, |at| at + 3);
        let (scheme, rest) = word.split_at(start);
        let end = rest.find(['/', '?', '#']).unwrap_or(rest.len());
        let (authority, path) = rest.split_at(end);
        match authority.rsplit_once('@') {
            // `name@host` without a scheme is an address of a person or `git@host`, no credential.
            Some((user, host)) if !scheme.is_empty() || user.contains(':') => {
                out.push_str(scheme);
                match user.split_once(':') {
                    Some((name, _)) => {
                        out.push_str(name);
                        out.push(':');
                        out.push_str(DEFAULT_REDACTION_STR);
                    }
                    None => out.push_str(DEFAULT_REDACTION_STR),
                }
                out.push('@');
                out.push_str(host);
                out.push_str(path);
            }
            _ => out.push_str(word),
        }
    }
    out
}

fn split_words(text: &str) -> Vec<&str> {
    let mut parts = Vec::new();
    let mut rest = text;
    loop {
        let end = rest.find(ends_url).unwrap_or(rest.len());
        let (word, after) = rest.split_at(end);
        parts.push(word);
        if after.is_empty() {
            return parts;
        }
        let end = after.find(|c: char| !ends_url(c)).unwrap_or(after.len());
        let (separator, next) = after.split_at(end);
        parts.push(separator);
        rest = next;
    }
}

/// `/t/TOKEN` of a URL with a host (a folder `/t/x` of a path or file URL is none).
fn mask_tokens(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for (index, word) in split_words(text).into_iter().enumerate() {
        if index % 2 == 1 || word.starts_with(['/', '.', '~']) || word.starts_with("file:") {
            out.push_str(word);
            continue;
        }
        let mut rest: Cow<'_, str> = Cow::Borrowed(word);
        let mut done = String::new();
        while let Some(at) = rest.find("/t/") {
            let after = &rest[at + 3..];
            let end = after.find(['/', '?', '#']).unwrap_or(after.len());
            done.push_str(&rest[..at + 3]);
            if end > 0 {
                done.push_str(DEFAULT_REDACTION_STR);
            }
            rest = Cow::Owned(after[end..].to_owned());
        }
        out.push_str(&done);
        out.push_str(&rest);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_are_masked_wherever_they_stand() {
        for (text, shown) in [
            ("https://user:pw@host/x", "https://user:********@host/x"),
            ("https://TOKEN@host/x", "https://********@host/x"),
            ("https://user:p@w@host:8080/x", "https://user:********@host:8080/x"),
            ("https://conda.anaconda.org/t/ab-12/conda-forge/", "https://conda.anaconda.org/t/********/conda-forge/"),
            ("https://host/a/t/ab-12", "https://host/a/t/********"),
            ("host/t/ab-12/c", "host/t/********/c"),
            ("user:pw@proxy:3128", "user:********@proxy:3128"),
            ("get (https://u:p@h/t/x/c): gone, and http://a:b@c", "get (https://u:********@h/t/********/c): gone, and http://a:********@c"),
            ("https://h/x?sig=abc&y=1", "https://h/x?sig=********&y=1"),
        ] {
            assert_eq!(redact_text(text), shown, "{text}");
        }
    }

    #[test]
    fn plain_text_stays() {
        for text in ["conda-forge", "/t/folder/x", "file:///t/folder", "git@host", "a, b (c)", "", "https://host/table/x", "ü ö"] {
            assert_eq!(redact_text(text), text);
        }
    }
}
