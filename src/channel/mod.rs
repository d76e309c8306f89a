//! Channels: names to URLs, credentials, the HTTP client, repodata and packages.
//!
//! [`expand`] turns what a person wrote into [`ResolvedChannel`]s, [`Session`] talks to them. A resolved channel's URL
//! holds no secrets: a token or password in a channel's URL is kept apart and put into requests only.

/// Credentials: where they are stored, and how they get in and out.
pub mod auth;
/// The HTTP client: timeouts, certificates, proxies, retries, mirrors, credentials.
mod client;
/// Names, labels, aliases, paths and URLs to channels.
mod expand;
/// The channel made from the interpreters of this machine.
pub mod host;
/// Credentials in netrc files.
mod names;
mod netrc;
/// Masking secrets in anything that is shown.
mod redact;
/// Repodata, packages and texts over one client and one set of caches.
mod session;
/// A loopback HTTP server with faults on demand.
#[cfg(test)]
pub(crate) mod test_server;

pub use client::RetryPolicy;
pub(crate) use client::chain;
pub(crate) use expand::percent_decode;
pub use expand::{ChannelSource, ExpandOptions, Expanded, ResolvedChannel, expand, host_url};
pub use redact::{mask_secrets, redact_text, redact_url, secrets_in};
pub use session::{Session, SessionOptions};
pub(crate) use session::{appended_hint, login_hint};
