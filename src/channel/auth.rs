//! Credentials by host, as the rattler family stores them: the file of RATTLER_AUTH_FILE, the system's keyring,
//! `~/.rattler/credentials.json`, and netrc files for reading.
//!
//! Nothing here prints or returns a secret.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use rattler_networking::authentication_storage::backends::file::FileStorage;
use rattler_networking::authentication_storage::backends::keyring::KeyringAuthenticationStorage;
use rattler_networking::{Authentication, AuthenticationStorage};

use super::client::chain;
use super::netrc::Netrc;
use super::redact::redact_text;
use crate::config::{Environment, Settings, expand_home};
use crate::error::{Error, Result};
use crate::report::Progress;

/// What is stored for a host.
#[derive(Clone)]
pub enum Secret {
    /// Sent as `Authorization: Bearer`.
    Token(String),
    /// Sent as HTTP basic authentication.
    Basic {
        /// User name.
        user: String,
        /// Password.
        password: String,
    },
    /// Put into the path: `/t/TOKEN/`.
    CondaToken(String),
}

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.kind())
    }
}

impl Secret {
    fn kind(&self) -> &'static str {
        match self {
            Secret::Token(_) => "token",
            Secret::Basic { .. } => "user and password",
            Secret::CondaToken(_) => "conda token",
        }
    }
}

/// A host that something is stored for.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Stored {
    /// Host name or `*.domain`.
    pub host: String,
    /// Where: a file, the keyring.
    pub place: String,
    /// It is the one that is used for the host.
    pub active: bool,
}

/// The storage that reads and writes credentials.
///
/// # Errors
/// A credentials file that cannot be read (`Kind::Usage`, with its path). A bad netrc file is a warning.
pub fn storage(settings: &Settings, progress: &dyn Progress) -> Result<AuthenticationStorage> {
    let env = &settings.env;
    let mut storage = AuthenticationStorage::empty();
    if let Some(file) = env.get("RATTLER_AUTH_FILE").filter(|text| !text.is_empty()) {
        storage.add_backend(Arc::new(open(expand_home(&file, settings.home.as_deref()), "RATTLER_AUTH_FILE")?));
    }
    if settings.keyring.value && keyring_reachable(env) {
        storage.add_backend(Arc::new(KeyringAuthenticationStorage::default()));
    }
    if let Some(home) = &settings.home {
        storage.add_backend(Arc::new(open(home.join(".rattler").join("credentials.json"), "the default place")?));
    }
    let (netrc, named) = match env.get("NETRC").filter(|text| !text.is_empty()) {
        Some(file) => (Some(expand_home(&file, settings.home.as_deref())), true),
        None => (settings.home.as_ref().map(|home| home.join(".netrc")), false),
    };
    if let Some(file) = netrc
        && (named || file.exists())
    {
        match Netrc::read(&file) {
            Ok(netrc) => storage.add_backend(Arc::new(netrc)),
            Err(()) => progress.warn(
                &format!("the netrc file `{}` could not be read and is not used", file.display()),
                &["each entry is `machine HOST login USER password PASSWORD`".to_owned()],
            ),
        }
    }
    Ok(storage)
}

fn open(file: PathBuf, source: &str) -> Result<FileStorage> {
    FileStorage::from_path(file.clone()).map_err(|error| {
        Error::usage(format!("the credentials in `{}` cannot be read", file.display()))
            .because(chain(&error))
            .hint(format!("the file is named by {source}; it must hold JSON: {{\"HOST\": {{\"BearerToken\": \"…\"}}}}"))
    })
}

/// Without a session bus a look-up in the keyring can only fail, slowly.
fn keyring_reachable(env: &Environment) -> bool {
    if !cfg!(target_os = "linux") {
        return true;
    }
    let bus = env.get("XDG_RUNTIME_DIR").filter(|text| !text.is_empty()).map(|folder| Path::new(&folder).join("bus"));
    env.get("DBUS_SESSION_BUS_ADDRESS").is_some_and(|text| !text.is_empty()) || bus.is_some_and(|bus| bus.exists())
}

/// `HOST`, `HOST:PORT` or a URL to the host that credentials are stored for (`*.domain` stands for all hosts below).
///
/// # Errors
/// `Kind::Usage` for anything else.
pub fn host_of(text: &str) -> Result<String> {
    let wrong =
        || Error::usage(format!("`{}` is no host", redact_text(text))).hint("give a host name or a URL: tare auth login repo.example.org");
    let trimmed = text.trim();
    if let Some(domain) = trimmed.strip_prefix("*.") {
        return if url::Host::parse(domain).is_ok() { Ok(trimmed.to_ascii_lowercase()) } else { Err(wrong()) };
    }
    let with_scheme = if trimmed.contains("://") { trimmed.to_owned() } else { format!("https://{trimmed}") };
    let url = url::Url::parse(&with_scheme).map_err(|_| wrong())?;
    if !url.username().is_empty() || url.password().is_some() {
        return Err(wrong().because("it holds credentials: give them by `--username` and standard input"));
    }
    url.host_str().filter(|host| !host.is_empty()).map(str::to_owned).ok_or_else(wrong)
}

/// Stores a secret for a host; an older one in the same place is replaced. Returns the host and where it was stored.
///
/// # Errors
/// An empty secret or one with line breaks (`Kind::Usage`); no place that takes it.
pub fn login(settings: &Settings, host: &str, secret: &Secret, progress: &dyn Progress) -> Result<Stored> {
    let host = host_of(host)?;
    let check = |what: &str, text: &str| {
        if text.is_empty() {
            return Err(Error::usage(format!("the {what} is empty")).hint("it is read from standard input or asked for"));
        }
        if text.chars().any(char::is_control) {
            return Err(Error::usage(format!("the {what} holds a line break or another control character")));
        }
        Ok(())
    };
    let authentication = match secret {
        Secret::Token(token) => {
            check("token", token)?;
            Authentication::BearerToken(token.clone())
        }
        Secret::CondaToken(token) => {
            check("token", token)?;
            if token.contains(['/', '?', '#', '%']) || token.chars().any(char::is_whitespace) {
                return Err(Error::usage("a conda token is part of a path: it holds no `/`, `?`, `#`, `%` or blanks"));
            }
            Authentication::CondaToken(token.clone())
        }
        Secret::Basic { user, password } => {
            check("user name", user)?;
            check("password", password)?;
            if user.contains(':') {
                return Err(
                    Error::usage("a user name cannot hold `:`").because("HTTP basic authentication separates user and password by it")
                );
            }
            Authentication::BasicHTTP { username: user.clone(), password: password.clone() }
        }
    };
    let storage = storage(settings, progress)?;
    for backend in &storage.backends {
        match backend.store(&host, &authentication) {
            Ok(()) => return Ok(Stored { host, place: backend.name(), active: true }),
            Err(error) => tracing::debug!(place = backend.name(), error = chain(&error), "the credentials were not stored here"),
        }
    }
    let mut error = Error::failure(format!("the credentials for `{host}` could not be stored"));
    if let Err(missing) = settings.home("them") {
        error = missing.causes().iter().fold(error, Error::because);
    }
    Err(error
        .because(format!("tried: {}", storage.backends.iter().map(|backend| backend.name()).collect::<Vec<_>>().join(", ")))
        .hint("name a file for them: RATTLER_AUTH_FILE=~/.config/tare/credentials.json"))
}

/// Removes what is stored for a host, wherever it is (netrc files are not changed). Returns the places.
///
/// # Errors
/// `Kind::Usage` if nothing is stored; a place that refuses.
pub fn logout(settings: &Settings, host: &str, progress: &dyn Progress) -> Result<Vec<Stored>> {
    let host = host_of(host)?;
    let storage = storage(settings, progress)?;
    let mut removed = Vec::new();
    let mut netrc = None;
    for backend in &storage.backends {
        if !backend.get(&host).is_ok_and(|found| found.is_some()) {
            continue;
        }
        let place = backend.name();
        match backend.delete(&host) {
            Ok(()) => removed.push(Stored { host: host.clone(), place, active: true }),
            Err(_) if place.contains("netrc") => netrc = Some(place),
            Err(error) => {
                return Err(
                    Error::failure(format!("the credentials for `{host}` could not be removed from {place}")).because(chain(&error))
                );
            }
        }
    }
    if let Some(place) = netrc {
        let message = format!("{place} has credentials for `{host}`, too, and is not changed");
        if removed.is_empty() {
            return Err(Error::usage(message).hint("remove them with an editor"));
        }
        progress.warn(&message, &["remove them with an editor".to_owned()]);
    } else if removed.is_empty() {
        return Err(Error::usage(format!("nothing is stored for `{host}`")).hint("see what is: tare auth status"));
    }
    Ok(removed)
}

/// The hosts that something is stored for, without the secrets.
///
/// # Errors
/// As [`storage`].
pub fn status(settings: &Settings, progress: &dyn Progress) -> Result<Vec<Stored>> {
    let storage = storage(settings, progress)?;
    let listed = storage
        .list_keys_with_sources()
        .map_err(|error| Error::failure("the stored credentials cannot be listed").because(chain(&error)))?;
    Ok(listed.into_iter().map(|entry| Stored { host: entry.host, place: entry.source, active: entry.active }).collect())
}
