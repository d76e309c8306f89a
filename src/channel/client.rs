use std::path::Path;
use std::sync::{Arc, RwLock};
use std::time::Duration;

use http::HeaderMap;
use http::header::{AUTHORIZATION, HeaderValue, RETRY_AFTER};
use rattler_networking::mirror_middleware::Mirror;
use rattler_networking::{AuthenticationMiddleware, AuthenticationStorage, LazyClient, MirrorMiddleware, OciMiddleware, OfflineMiddleware};
use reqwest::{Request, Response};
use reqwest_middleware::{ClientBuilder, ClientWithMiddleware, Middleware, Next};
use reqwest_retry::{DefaultRetryableStrategy, Retryable, RetryableStrategy};
use url::Url;

use super::expand::{Credential, Secret};
use super::redact::{redact_text, redact_url};
use crate::config::{Settings, SslVerify};
use crate::error::{Error, Result};
use crate::report::Progress;

/// How often and after how long a failed request is repeated.
#[derive(Debug, Clone, Copy)]
pub struct RetryPolicy {
    /// Repetitions after the first try.
    pub max: u32,
    /// Wait before the first repetition; doubled each time, and half as much again at random.
    pub base: Duration,
    /// No wait is longer, whatever the server asks for.
    pub longest: Duration,
}

impl RetryPolicy {
    /// `max` repetitions from half a second up.
    pub fn new(max: u32) -> Self {
        RetryPolicy { max, base: Duration::from_millis(500), longest: Duration::from_secs(60) }
    }

    fn wait(&self, repetition: u32, asked: Option<Duration>) -> Duration {
        let doubled = self.base.saturating_mul(1 << repetition.min(16));
        // No random number generator is needed to keep clients from coming back in step.
        let jitter = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |now| now.subsec_nanos() % 512);
        let wait = doubled + doubled.mul_f64(f64::from(jitter) / 1024.0);
        wait.max(asked.unwrap_or_default()).min(self.longest)
    }
}

/// Secrets that stood in channel URLs, shared by the client and whoever learns of a channel.
pub(super) type Credentials = Arc<RwLock<Vec<Credential>>>;

/// Everything the client is made from, checked already.
pub(super) struct ClientOptions {
    pub offline: bool,
    pub storage: AuthenticationStorage,
    pub credentials: Credentials,
    pub retry: RetryPolicy,
    certificates: Vec<reqwest::Certificate>,
    verify: bool,
    proxies: Vec<(String, Url)>,
    mirrors: Vec<(Url, Vec<Url>)>,
    connect_timeout: Duration,
    read_timeout: Duration,
}

impl ClientOptions {
    /// Checks certificates, proxies and mirrors, so that what is wrong is told at once and not at the first request.
    pub fn new(settings: &Settings, storage: AuthenticationStorage, retry: RetryPolicy, progress: &dyn Progress) -> Result<Self> {
        let mut certificates = Vec::new();
        let mut verify = true;
        match &settings.ssl_verify.value {
            SslVerify::System => {}
            SslVerify::Off => {
                verify = false;
                if !settings.offline.value {
                    progress.warn(
                        &format!(
                            "TLS certificates are not checked (`ssl_verify: false`, {}): anybody on the way can change what is downloaded",
                            settings.ssl_verify.source
                        ),
                        &["name the missing certificate instead: ssl_verify: /path/to/ca.pem".to_owned()],
                    );
                }
            }
            SslVerify::Bundle(file) => certificates = read_bundle(file, &settings.ssl_verify.source)?,
        }
        let mut proxies = Vec::new();
        for (scope, text) in &settings.proxy_servers.value {
            if text.trim().is_empty() || text.eq_ignore_ascii_case("none") {
                continue;
            }
            let text = if text.contains("://") { text.clone() } else { format!("http://{text}") };
            let url = Url::parse(&text).ok().filter(|url| matches!(url.scheme(), "http" | "https") && url.has_host()).ok_or_else(|| {
                Error::usage(format!("`proxy_servers` of {}: `{}` is no proxy's URL", settings.proxy_servers.source, redact_text(&text)))
                    .hint("for example http://proxy:3128 (SOCKS proxies are not supported)")
            })?;
            proxies.push((scope.trim_end_matches('/').to_owned(), url));
        }
        let mut mirrors = Vec::new();
        for (key, urls) in &settings.mirrors.value {
            let wrong = |text: &str| Error::usage(format!("`mirrors` of {}: `{}` is no URL", settings.mirrors.source, redact_text(text)));
            let from = if key.contains("://") {
                Url::parse(&format!("{}/", key.trim_end_matches('/'))).map_err(|_| wrong(key))?
            } else {
                // The name of a channel (micromamba's `mirrored_channels`).
                let alias = settings.channel_alias.value.as_str().trim_end_matches('/');
                Url::parse(&format!("{alias}/{}/", key.trim_matches('/'))).map_err(|_| wrong(key))?
            };
            let to = urls
                .iter()
                .map(|text| Url::parse(&format!("{}/", text.trim_end_matches('/'))).map_err(|_| wrong(text)))
                .collect::<Result<Vec<_>>>()?;
            if !to.is_empty() {
                mirrors.push((from, to));
            }
        }
        Ok(ClientOptions {
            offline: settings.offline.value,
            storage,
            credentials: Credentials::default(),
            retry,
            certificates,
            verify,
            proxies,
            mirrors,
            connect_timeout: settings.connect_timeout.value,
            read_timeout: settings.read_timeout.value,
        })
    }

    /// A client that is built at its first use: nothing of TLS is touched for folders alone.
    pub fn lazy(self) -> LazyClient {
        LazyClient::new(move || self.build())
    }

    fn build(self) -> ClientWithMiddleware {
        let mut builder = reqwest::Client::builder()
            .user_agent(concat!("tare/", env!("CARGO_PKG_VERSION")))
            .no_gzip()
            .dns_resolver(Arc::new(super::names::Names::default()))
            .connect_timeout(self.connect_timeout)
            .read_timeout(self.read_timeout)
            .tls_danger_accept_invalid_certs(!self.verify);
        if !self.certificates.is_empty() {
            builder = builder.tls_certs_merge(self.certificates);
        }
        if !self.proxies.is_empty() {
            let proxies = self.proxies;
            let mut proxy = reqwest::Proxy::custom(move |url| choose_proxy(&proxies, url));
            proxy = proxy.no_proxy(reqwest::NoProxy::from_env());
            builder = builder.proxy(proxy);
        }
        let (client, broken) = match builder.build() {
            Ok(client) => (client, None),
            // The certificates of the system cannot be read, for example. The reason belongs to whoever asks for something.
            Err(error) => (bare_client(), Some(chain(&error))),
        };
        let mut client = ClientBuilder::new(client);
        if self.offline {
            client = client.with(OfflineMiddleware);
        }
        if let Some(reason) = broken {
            client = client.with(Broken(reason));
        }
        client = client.with(Retry(self.retry));
        if !self.mirrors.is_empty() {
            let map = self.mirrors.into_iter().map(|(from, to)| {
                (from, to.into_iter().map(|url| Mirror { url, no_zstd: false, no_bz2: false, max_failures: Some(8) }).collect())
            });
            client = client.with(MirrorMiddleware::from_map(map.collect()));
        }
        let authentication = AuthenticationMiddleware::from_auth_storage(self.storage.clone());
        client = client.with(Authenticate { credentials: self.credentials, storage: self.storage.clone(), stored: authentication });
        let plain = bare_client();
        client = client.with(OciMiddleware::new(plain).with_authentication_storage(self.storage));
        client.build()
    }
}

/// A client that cannot fail to build: no certificate of the system is read.
fn bare_client() -> reqwest::Client {
    reqwest::Client::builder().no_gzip().no_proxy().tls_danger_accept_invalid_certs(false).tls_certs_only([]).build().unwrap_or_default()
}

fn read_bundle(file: &Path, source: &str) -> Result<Vec<reqwest::Certificate>> {
    let wrong = |why: String| {
        Error::usage(format!("the certificates in `{}` cannot be used", file.display()))
            .because(why)
            .hint(format!("the file is named by {source}; it must hold certificates in PEM form"))
    };
    if file.is_dir() {
        return Err(wrong("it is a folder: name one file".to_owned()));
    }
    let bytes = fs_err::read(file).map_err(|error| wrong(error.to_string()))?;
    let certificates = reqwest::Certificate::from_pem_bundle(&bytes).map_err(|error| wrong(chain(&error)))?;
    if certificates.is_empty() {
        return Err(wrong("there is no `-----BEGIN CERTIFICATE-----` in it".to_owned()));
    }
    // The encoding is looked at only where a client is built; one that trusts nothing else is built in no time.
    reqwest::Client::builder().no_proxy().tls_certs_only(certificates.iter().cloned()).build().map_err(|error| wrong(chain(&error)))?;
    Ok(certificates)
}

/// conda's rules: `scheme://host` before `scheme` before `all`.
fn choose_proxy(proxies: &[(String, Url)], url: &Url) -> Option<Url> {
    let find = |scope: &str| proxies.iter().find(|(name, _)| name == scope).map(|(_, proxy)| proxy.clone());
    let host = url.host_str().unwrap_or_default();
    find(&format!("{}://{host}", url.scheme()))
        .or_else(|| find(url.scheme()))
        .or_else(|| find(&format!("all://{host}")))
        .or_else(|| find("all"))
}

/// An error and what is behind it, in one line, without secrets.
pub(crate) fn chain(error: &(dyn std::error::Error + 'static)) -> String {
    let mut parts: Vec<String> = Vec::new();
    let mut next = Some(error);
    while let Some(error) = next {
        let text = error.to_string();
        if !parts.iter().any(|part| part.contains(&text)) {
            parts.push(text);
        }
        next = error.source();
    }
    redact_text(&parts.join(": "))
}

struct Broken(String);

#[async_trait::async_trait]
impl Middleware for Broken {
    async fn handle(&self, _: Request, _: &mut http::Extensions, _: Next<'_>) -> reqwest_middleware::Result<Response> {
        Err(reqwest_middleware::Error::middleware(std::io::Error::other(format!("the HTTP client could not be set up: {}", self.0))))
    }
}

/// Repeats requests that failed for a reason that passes: no connection, 408, 429 and 5xx. Waits as long as the server
/// asks for with `Retry-After` (seconds or a date).
struct Retry(RetryPolicy);

#[async_trait::async_trait]
impl Middleware for Retry {
    async fn handle(&self, request: Request, extensions: &mut http::Extensions, next: Next<'_>) -> reqwest_middleware::Result<Response> {
        let mut repetition = 0;
        loop {
            let Some(copy) = request.try_clone() else { return next.run(request, extensions).await };
            let result = next.clone().run(copy, extensions).await;
            let transient = matches!(DefaultRetryableStrategy.handle(&result), Some(Retryable::Transient));
            if !transient || repetition >= self.0.max {
                return result;
            }
            let asked = result.as_ref().ok().and_then(|response| retry_after(response.headers()));
            let wait = self.0.wait(repetition, asked);
            repetition += 1;
            let why = match &result {
                Ok(response) => response.status().to_string(),
                Err(error) => chain(error),
            };
            tracing::info!(url = %redact_url(request.url()), %why, ?wait, repetition, "the request is repeated");
            tokio::time::sleep(wait).await;
        }
    }
}

fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let text = headers.get(RETRY_AFTER)?.to_str().ok()?.trim();
    if let Ok(seconds) = text.parse::<u64>() {
        return Some(Duration::from_secs(seconds));
    }
    let date = jiff::fmt::rfc2822::parse(text).ok()?.timestamp();
    Duration::try_from(date.duration_since(jiff::Timestamp::now())).ok()
}

/// A secret out of a channel's URL, else what is stored for the host.
struct Authenticate {
    credentials: Credentials,
    storage: AuthenticationStorage,
    stored: AuthenticationMiddleware,
}

impl Authenticate {
    fn is_stored(&self, url: &Url) -> bool {
        self.storage.get_by_url(url.clone()).is_ok_and(|(_, found)| found.is_some())
    }
}

#[async_trait::async_trait]
impl Middleware for Authenticate {
    async fn handle(
        &self,
        mut request: Request,
        extensions: &mut http::Extensions,
        next: Next<'_>,
    ) -> reqwest_middleware::Result<Response> {
        let found = {
            let credentials = self.credentials.read().unwrap_or_else(std::sync::PoisonError::into_inner);
            credentials
                .iter()
                .filter(|credential| request.url().as_str().starts_with(credential.prefix.as_str()))
                .max_by_key(|credential| credential.prefix.as_str().len())
                .map(|credential| credential.secret.clone())
        };
        match found {
            None => self.stored.handle(request, extensions, next).await,
            // A URL with a user alone: the password is where passwords are kept, or the user is the token.
            Some(Secret::Basic { password, .. }) if password.is_empty() && self.is_stored(request.url()) => {
                self.stored.handle(request, extensions, next).await
            }
            Some(Secret::Token { at, token }) => {
                let path = request.url().path().to_owned();
                if let (Some(before), Some(after)) = (path.get(..at), path.get(at..))
                    && !after.starts_with(&format!("/t/{token}"))
                {
                    request.url_mut().set_path(&format!("{before}/t/{token}{after}"));
                }
                next.run(request, extensions).await
            }
            Some(Secret::Basic { user, password }) => {
                let mut value = HeaderValue::from_str(&format!("Basic {}", base64(format!("{user}:{password}").as_bytes())))
                    .map_err(reqwest_middleware::Error::middleware)?;
                value.set_sensitive(true);
                request.headers_mut().entry(AUTHORIZATION).or_insert(value);
                next.run(request, extensions).await
            }
        }
    }
}

/// RFC 4648 base64 with padding.
fn base64(bytes: &[u8]) -> String {
    const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut out = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for chunk in bytes.chunks(3) {
        let group = [chunk[0], chunk.get(1).copied().unwrap_or(0), chunk.get(2).copied().unwrap_or(0)];
        let bits = u32::from(group[0]) << 16 | u32::from(group[1]) << 8 | u32::from(group[2]);
        for position in 0..4 {
            if position <= chunk.len() {
                out.push(char::from(ALPHABET[(bits >> (18 - 6 * position) & 63) as usize]));
            } else {
                out.push('=');
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base64_matches_the_rfc() {
        for (text, encoded) in
            [("", ""), ("f", "Zg=="), ("fo", "Zm8="), ("foo", "Zm9v"), ("foob", "Zm9vYg=="), ("fooba", "Zm9vYmE="), ("foobar", "Zm9vYmFy")]
        {
            assert_eq!(base64(text.as_bytes()), encoded);
        }
        assert_eq!(base64(&[255, 254, 253]), "//79");
    }

    #[test]
    fn a_server_may_ask_for_a_wait_but_not_for_ever() {
        let policy = RetryPolicy { max: 3, base: Duration::from_millis(100), longest: Duration::from_secs(5) };
        assert!(policy.wait(0, None) >= Duration::from_millis(100));
        assert!(policy.wait(0, None) <= Duration::from_millis(150));
        assert!(policy.wait(2, None) >= Duration::from_millis(400));
        assert_eq!(policy.wait(0, Some(Duration::from_secs(2))), Duration::from_secs(2));
        assert_eq!(policy.wait(0, Some(Duration::from_secs(7200))), Duration::from_secs(5));
        assert_eq!(policy.wait(60, None), Duration::from_secs(5));
    }

    #[test]
    fn retry_after_is_seconds_or_a_date() {
        let headers = |text: &str| HeaderMap::from_iter([(RETRY_AFTER, HeaderValue::from_str(text).unwrap())]);
        assert_eq!(retry_after(&headers("7")), Some(Duration::from_secs(7)));
        assert_eq!(retry_after(&headers("soon")), None);
        assert_eq!(retry_after(&headers("Wed, 21 Oct 2015 07:28:00 GMT")), None);
        let wait = retry_after(&headers("Wed, 21 Oct 2099 07:28:00 GMT")).unwrap();
        assert!(wait > Duration::from_secs(86400 * 365));
    }

    #[test]
    fn the_closest_proxy_wins() {
        let url = |text: &str| Url::parse(text).unwrap();
        let proxies = vec![
            ("https".to_owned(), url("http://general:1")),
            ("https://special.example".to_owned(), url("http://special:2")),
            ("all".to_owned(), url("http://all:3")),
        ];
        assert_eq!(choose_proxy(&proxies, &url("https://special.example/x")), Some(url("http://special:2")));
        assert_eq!(choose_proxy(&proxies, &url("https://other.example/x")), Some(url("http://general:1")));
        assert_eq!(choose_proxy(&proxies, &url("http://other.example/x")), Some(url("http://all:3")));
    }
}
