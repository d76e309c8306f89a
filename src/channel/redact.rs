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

/// In each word: what stands before the last `@` of the authority, of every URL in it; and `USER:PASSWORD@HOST` without a scheme.
fn mask_user_info(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for (index, word) in split_words(text).into_iter().enumerate() {
        // Words and separators alternate, beginning with a word.
        if index % 2 == 1 {
            out.push_str(word);
            continue;
        }
        for piece in pieces(word) {
            match credential(piece) {
                Some((start, secret)) => {
                    out.push_str(&piece[..start]);
                    out.push_str(DEFAULT_REDACTION_STR);
                    out.push_str(&piece[start + secret.len()..]);
                }
                None => out.push_str(piece),
            }
        }
    }
    out
}

/// Where the secret of a URL (or of `USER:PASSWORD@HOST`) begins, and the secret: the password, or a lone user name, which may be a token.
fn credential(piece: &str) -> Option<(usize, &str)> {
    let start = piece.find("://").map_or(0, |at| at + 3);
    let rest = &piece[start..];
    let authority = &rest[..rest.find(['/', '?', '#']).unwrap_or(rest.len())];
    let (user, host) = authority.rsplit_once('@')?;
    if start == 0 && !is_credential(user, host.trim_end_matches(':')) {
        return None;
    }
    Some(match user.split_once(':') {
        Some((name, secret)) => (start + name.len() + 1, secret),
        None => (start, user),
    })
}

/// Passwords and tokens in a text that are long enough to be looked for elsewhere: what is cut up by a program that takes a URL for a list of
/// paths is no URL any more.
pub fn secrets_in(text: &str) -> Vec<String> {
    let words = split_words(text).into_iter().step_by(2).flat_map(pieces);
    words
        .filter_map(|piece| {
            let (start, secret) = credential(piece)?;
            // A user name alone is often a plain word.
            let password = start > 0 && piece[..start].ends_with(':');
            (secret.len() >= if password { 6 } else { 16 }).then(|| secret.to_owned())
        })
        .collect()
}

/// Masks these secrets wherever they stand.
pub fn mask_secrets(text: &str, secrets: &[String]) -> String {
    secrets
        .iter()
        .fold(text.to_owned(), |text, secret| if text.contains(secret) { text.replace(secret, DEFAULT_REDACTION_STR) } else { text })
}

/// The word cut before each URL in it: a list of paths may hold several (`https://a:b@c/d:https://e:f@g/h`).
fn pieces(word: &str) -> Vec<&str> {
    let mut cuts = vec![0];
    for (at, _) in word.match_indices("://") {
        let scheme = word[..at].bytes().rev().take_while(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'+' | b'-' | b'.')).count();
        cuts.push(at - scheme);
    }
    cuts.push(word.len());
    cuts.windows(2).filter(|pair| pair[0] < pair[1]).map(|pair| &word[pair[0]..pair[1]]).collect()
}

/// Whether what stands before and after an `@`, without a scheme, is a user with a password at a host, as proxies are written
/// (`user:password@proxy:3128`). Addresses of persons (`mailto:me@host`), `git@host`, images (`name:tag@sha256:…`), versions and places
/// (`file.py:12@main`) are none. In doubt it is one: a word that is masked for nothing costs less than a password that is shown.
fn is_credential(user: &str, host: &str) -> bool {
    let Some((name, secret)) = user.split_once(':') else { return false };
    let (bare, port) = match host.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((bare, port)) => (bare, port.strip_prefix(':')),
        None => host.rsplit_once(':').map_or((host, None), |(bare, port)| (bare, Some(port))),
    };
    let port_right = port.is_none_or(|port| !port.is_empty() && port.len() <= 5 && port.bytes().all(|byte| byte.is_ascii_digit()));
    let host_right = !bare.is_empty() && bare.chars().all(|c| c.is_alphanumeric() || matches!(c, '.' | '-' | '_' | ':' | '%'));
    if secret.is_empty() || !port_right || !host_right || matches!(name, "mailto" | "sip" | "sips" | "xmpp" | "acct") {
        return false;
    }
    // A host that can only be one decides; a single word may be anything, and then it depends on what would be the password.
    let number = secret.chars().all(|c| c.is_ascii_digit() || c == '.');
    port.is_some() || bare.contains(['.', ':']) || bare == "localhost" || (secret.chars().count() >= 4 && !number)
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
            ("user:pw@proxy.example", "user:********@proxy.example"),
            ("user:hunter2@proxy", "user:********@proxy"),
            (":hunter2@localhost", ":********@localhost"),
            ("u:p@[::1]:3128", "u:********@[::1]:3128"),
            ("https_proxy=user:p:w@proxy:3128", "https_proxy=user:********@proxy:3128"),
            ("/a:https://u:p@h/s:/b", "/a:https://u:********@h/s:/b"),
            ("https://u:p@h/s:https://TOKEN@g/t", "https://u:********@h/s:https://********@g/t"),
            ("https://u:p@h:https://v:q@g", "https://u:********@h:https://v:********@g"),
            ("u:p@h.example:https://v:q@g", "u:********@h.example:https://v:********@g"),
            ("get (https://u:p@h/t/x/c): gone, and http://a:b@c", "get (https://u:********@h/t/********/c): gone, and http://a:********@c"),
            ("https://h/x?sig=abc&y=1", "https://h/x?sig=********&y=1"),
        ] {
            assert_eq!(redact_text(text), shown, "{text}");
        }
    }

    #[test]
    fn secrets_are_found_and_masked_where_no_url_is_left() {
        let found =
            secrets_in("https://me:hunter2@h/x:https://u:short@g, proxy=a:sec:ret@h.example https://0123456789abcdef@h https://name@h");
        assert_eq!(found, ["hunter2", "sec:ret", "0123456789abcdef"]);
        assert_eq!(mask_secrets("/tmp/hunter2@h/x", &found), "/tmp/********@h/x");
    }

    #[test]
    fn plain_text_stays() {
        for text in [
            "conda-forge",
            "/t/folder/x",
            "file:///t/folder",
            "git@host",
            "git@host:group/project",
            "a:b@c",
            "mailto:me@example.org",
            "python:3.11@main",
            "file.py:12@main",
            "image:latest@sha256:0123abcd",
            "pkg:pypi/torch@2.8",
            "/lib:/x@y",
            "a, b (c)",
            "",
            "https://host/table/x",
            "ü ö",
        ] {
            assert_eq!(redact_text(text), text);
        }
    }
}
