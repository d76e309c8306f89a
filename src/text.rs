//! Small texts that every module writes.

/// Lower-case hex.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A word of a command in a hint, quoted for a shell where that is needed.
pub(crate) fn quoted(text: &str) -> String {
    if !text.is_empty() && text.chars().all(|c| c.is_ascii_alphanumeric() || "/._-+@%=:,".contains(c)) {
        text.to_owned()
    } else {
        format!("'{}'", text.replace('\'', r"'\''"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_quoted_where_a_shell_would_take_them_apart() {
        for (word, shown) in
            [("/a/b-1.yml", "/a/b-1.yml"), ("", "''"), ("two words", "'two words'"), ("it's", r"'it'\''s'"), ("a;b", "'a;b'")]
        {
            assert_eq!(quoted(word), shown);
        }
        assert_eq!(hex(&[0, 15, 255]), "000fff");
    }
}
