//! netrc files as Python's `netrc` module (and so pip) reads them: with comments, quotes and macros, which the parser of the rattler family refuses.
//!
//! A `default` entry is not used: it would hand its password to every host that tare asks.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use rattler_networking::Authentication;
use rattler_networking::authentication_storage::backends::netrc::NetRcStorageError;
use rattler_networking::authentication_storage::{AuthenticationStorageError, StorageBackend};

/// The machines of a netrc file. For reading only.
pub(super) struct Netrc {
    path: PathBuf,
    machines: BTreeMap<String, (String, String)>,
}

impl std::fmt::Debug for Netrc {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Netrc({}, ..)", self.path.display())
    }
}

/// Words of a netrc file, one after the other.
struct Words<'a>(&'a str);

impl Words<'_> {
    fn rest_of_line(&mut self) {
        self.0 = self.0.find('\n').map_or("", |at| &self.0[at..]);
    }

    /// The next word; `\` takes the meaning of the next character, and `"` holds blanks together. `None` at the end; the error is an open quote.
    fn next(&mut self) -> Result<Option<String>, ()> {
        self.0 = self.0.trim_start();
        let quoted = self.0.starts_with('"');
        let mut chars = self.0.char_indices().skip(usize::from(quoted));
        let mut word = String::new();
        while let Some((at, c)) = chars.next() {
            if if quoted { c == '"' } else { c.is_whitespace() } {
                self.0 = &self.0[at + usize::from(quoted)..];
                return Ok(Some(word));
            }
            match c {
                '\\' => word.extend(chars.next().map(|(_, c)| c)),
                c => word.push(c),
            }
        }
        self.0 = "";
        if quoted { Err(()) } else { Ok((!word.is_empty()).then_some(word)) }
    }
}

fn machines(text: &str) -> Result<BTreeMap<String, (String, String)>, ()> {
    let mut machines: BTreeMap<String, (String, String)> = BTreeMap::new();
    let mut words = Words(text);
    // The machine that is described; none behind `default`.
    let mut at: Option<String> = None;
    let mut inside = false;
    while let Some(word) = words.next()? {
        match word.as_str() {
            "machine" => {
                let name = words.next()?.ok_or(())?;
                // The first entry of a name counts.
                at = (!machines.contains_key(&name)).then(|| name.clone());
                machines.entry(name).or_default();
                inside = true;
            }
            "default" => (at, inside) = (None, true),
            "macdef" => {
                // Up to an empty line.
                words.rest_of_line();
                words.0 = words.0.find("\n\n").map_or("", |at| &words.0[at..]);
                inside = false;
            }
            "login" | "user" | "password" | "account" if inside => {
                let value = words.next()?.ok_or(())?;
                if let Some((user, password)) = at.as_ref().and_then(|name| machines.get_mut(name)) {
                    match word.as_str() {
                        "password" => *password = value,
                        "account" => {}
                        _ => *user = value,
                    }
                }
            }
            word if word.starts_with('#') => words.rest_of_line(),
            _ => return Err(()),
        }
    }
    Ok(machines)
}

impl Netrc {
    /// Reads a file. The error says nothing of what is in it.
    pub fn read(path: &Path) -> Result<Self, ()> {
        let text = std::fs::read_to_string(path).map_err(drop)?;
        Ok(Netrc { path: path.to_owned(), machines: machines(&text)? })
    }

    fn refuse() -> AuthenticationStorageError {
        NetRcStorageError::NotSupportedError("netrc files are only read".to_owned()).into()
    }
}

impl StorageBackend for Netrc {
    fn name(&self) -> String {
        format!("netrc ({})", self.path.display())
    }

    fn store(&self, _: &str, _: &Authentication) -> Result<(), AuthenticationStorageError> {
        Err(Self::refuse())
    }

    fn get(&self, host: &str) -> Result<Option<Authentication>, AuthenticationStorageError> {
        let found = self.machines.get(host);
        Ok(found.map(|(user, password)| Authentication::BasicHTTP { username: user.clone(), password: password.clone() }))
    }

    fn list_keys(&self) -> Result<Vec<String>, AuthenticationStorageError> {
        Ok(self.machines.keys().cloned().collect())
    }

    fn delete(&self, _: &str) -> Result<(), AuthenticationStorageError> {
        Err(Self::refuse())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comments_quotes_and_macros_are_understood() {
        let text = "# machine no login no password no\nmachine a.example login me password pa#ss # a remark\n\
                    machine b.example\n\tlogin \"two words\"\n\taccount x\n\tpassword \"q\\\"uo\\\\te\"\n\
                    macdef init\n  machine c.example\n  login x\n\nmachine a.example login late password late\n\
                    default login anonymous password any\n#end";
        let found = machines(text).unwrap();
        let pair = |user: &str, password: &str| (user.to_owned(), password.to_owned());
        assert_eq!(found.len(), 2, "{:?}", found.keys());
        assert_eq!(found["a.example"], pair("me", "pa#ss"));
        assert_eq!(found["b.example"], pair("two words", "q\"uo\\te"));
        for bad in ["machine", "machine a login", "login me", "machine geheim geheim geheim", "machine a password \"open"] {
            assert!(machines(bad).is_err(), "{bad}");
        }
        assert!(machines("").unwrap().is_empty());
    }
}
