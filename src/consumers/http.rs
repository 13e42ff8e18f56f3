//! Sends requests to addresses that others chose: webhooks and push. Each name is resolved once for a connection, each
//! address is checked, and the socket connects to a checked address. So a name cannot change between the check and the
//! connection. Redirects are not followed, and no proxy is used.

use std::{
    collections::HashMap,
    error::Error,
    fmt, io,
    net::{IpAddr, SocketAddr, ToSocketAddrs as _},
    sync::{Arc, Mutex},
    time::Duration,
};

use async_trait::async_trait;
use bytes::{Bytes, BytesMut};
pub use reqwest::{
    Url,
    header::{HeaderMap, HeaderName, HeaderValue},
};
use reqwest::{
    dns::{Addrs, Name, Resolve, Resolving},
    header::RETRY_AFTER,
    redirect,
};
use tokio::sync::Semaphore;

use super::address::{Class, RefusedAddress};
use crate::{
    clock,
    model::limits::{HTTP_ANSWER_BYTES_MAX, HTTP_LOOKUPS_MAX, HTTP_REQUESTS_MAX},
    tasks::lock,
};

const CONNECT_MAX: Duration = Duration::from_secs(5);
/// A connection without requests is closed after this time.
const IDLE_MAX: Duration = Duration::from_secs(60);
/// Idle connections that are kept for each host.
const IDLE_CONNECTIONS_MAX: usize = 64;
/// Time between two pings on a connection of HTTP/2 with requests, and the longest time until the answer.
const PING_EVERY: Duration = Duration::from_secs(10);
/// The longest pause that a `Retry-After` can ask for.
pub const RETRY_AFTER_MAX: Duration = Duration::from_secs(3_600);
const USER_AGENT: &str = concat!("chat-gateway/", env!("CARGO_PKG_VERSION"));

/// A request to send.
#[derive(Clone, Debug)]
pub struct Request {
    pub url: Url,
    pub class: Arc<Class>,
    pub headers: HeaderMap,
    pub body: Bytes,
    /// The time until the whole answer.
    pub timeout: Duration,
}

/// An answer, whatever its status.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Response {
    pub status: u16,
    /// How long the receiver asks to wait, at most [`RETRY_AFTER_MAX`].
    pub retry_after: Option<Duration>,
    /// The begin of the body, at most [`HTTP_ANSWER_BYTES_MAX`] bytes.
    pub body: Bytes,
}

/// Why there is no answer. The texts contain no path of the address, because it may be secret.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Failure {
    /// Nothing was sent, because the destination is not allowed.
    #[error("refused: {0}")]
    Refused(String),
    #[error("{0}")]
    Network(String),
    #[error("no answer in time")]
    Timeout,
}

/// Finds the addresses of a name.
#[async_trait]
pub trait Lookup: Send + Sync {
    async fn lookup(&self, name: &str) -> io::Result<Vec<IpAddr>>;
}

/// Asks the resolver of this machine. A lookup that hangs keeps a thread, so only some run at once.
struct SystemLookup(Arc<Semaphore>);

#[async_trait]
impl Lookup for SystemLookup {
    async fn lookup(&self, name: &str) -> io::Result<Vec<IpAddr>> {
        let permit = self.0.clone().acquire_owned().await;
        let name = name.to_owned();
        let work = move || {
            let found = (name.as_str(), 0).to_socket_addrs();
            drop(permit);
            Ok(found?.map(|address| address.ip()).collect())
        };
        tokio::task::spawn_blocking(work).await?
    }
}

/// Sends requests, and keeps connections. There is one for the whole gateway.
pub struct Client {
    lookup: Arc<dyn Lookup>,
    /// A client for each class, without and with encryption. A connection that one class may have is not used for another.
    clients: Mutex<HashMap<(Arc<Class>, bool), reqwest::Client>>,
    places: Semaphore,
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client").finish_non_exhaustive()
    }
}

impl Default for Client {
    fn default() -> Self {
        Self::resolving(Arc::new(SystemLookup(Arc::new(Semaphore::new(
            HTTP_LOOKUPS_MAX,
        )))))
    }
}

impl Client {
    /// Makes a client that asks `lookup` for the addresses of names.
    #[must_use]
    pub fn resolving(lookup: Arc<dyn Lookup>) -> Self {
        Self {
            lookup,
            clients: Mutex::default(),
            places: Semaphore::new(HTTP_REQUESTS_MAX),
        }
    }

    /// Sends a request by POST and reads the answer. At most [`HTTP_REQUESTS_MAX`] requests are sent at once; more wait
    /// before their timeout begins.
    ///
    /// # Errors
    /// There is no answer.
    pub async fn post(&self, request: Request) -> Result<Response, Failure> {
        let allowed = request.class.check_url(&request.url);
        allowed.map_err(Failure::Refused)?;
        let is_encrypted = request.url.scheme() == "https";
        let client = self.client(&request.class, is_encrypted)?;
        let _place = self.places.acquire().await;
        let sent = client
            .post(request.url)
            .headers(request.headers)
            .body(request.body)
            .timeout(request.timeout)
            .send();
        let mut answer = sent.await.map_err(failure)?;
        let body = body(&mut answer).await.map_err(failure)?;
        Ok(Response {
            status: answer.status().as_u16(),
            retry_after: answer.headers().get(RETRY_AFTER).and_then(retry_after),
            body,
        })
    }

    fn client(&self, class: &Arc<Class>, is_encrypted: bool) -> Result<reqwest::Client, Failure> {
        let mut clients = lock(&self.clients);
        let key = (class.clone(), is_encrypted);
        if let Some(client) = clients.get(&key) {
            return Ok(client.clone());
        }
        let resolver = Resolver {
            class: class.clone(),
            lookup: self.lookup.clone(),
        };
        let client = build(resolver, is_encrypted).map_err(failure)?;
        clients.insert(key, client.clone());
        Ok(client)
    }
}

/// Only an encrypted connection needs the certificates of this machine.
fn build(resolver: Resolver, is_encrypted: bool) -> reqwest::Result<reqwest::Client> {
    let builder = reqwest::Client::builder()
        .dns_resolver(resolver)
        .redirect(redirect::Policy::none())
        .no_proxy()
        .referer(false)
        .user_agent(USER_AGENT)
        .connect_timeout(CONNECT_MAX)
        .pool_idle_timeout(IDLE_MAX)
        .pool_max_idle_per_host(IDLE_CONNECTIONS_MAX)
        .http2_keep_alive_interval(PING_EVERY)
        .http2_keep_alive_timeout(PING_EVERY)
        .https_only(is_encrypted);
    let builder = if is_encrypted {
        builder
    } else {
        builder.tls_certs_only([])
    };
    builder.build()
}

/// Resolves a name to the addresses that its class allows.
struct Resolver {
    class: Arc<Class>,
    lookup: Arc<dyn Lookup>,
}

impl Resolve for Resolver {
    fn resolve(&self, name: Name) -> Resolving {
        let (class, lookup) = (self.class.clone(), self.lookup.clone());
        Box::pin(async move {
            let found = lookup.lookup(name.as_str()).await?;
            let (mut allowed, mut refused) = (Vec::new(), None);
            for address in found {
                match class.check(address) {
                    // The port of the URL replaces this one.
                    Ok(()) => allowed.push(SocketAddr::new(address, 0)),
                    Err(error) => refused = Some(error),
                }
            }
            match refused {
                Some(refused) if allowed.is_empty() => Err(refused.into()),
                _ => Ok(Box::new(allowed.into_iter()) as Addrs),
            }
        })
    }
}

async fn body(answer: &mut reqwest::Response) -> reqwest::Result<Bytes> {
    let mut body = BytesMut::new();
    while let Some(chunk) = answer.chunk().await? {
        let fits = HTTP_ANSWER_BYTES_MAX - body.len();
        body.extend_from_slice(&chunk[..chunk.len().min(fits)]);
        if chunk.len() >= fits {
            break;
        }
    }
    Ok(body.freeze())
}

/// Reads seconds or a date.
fn retry_after(value: &HeaderValue) -> Option<Duration> {
    let text = value.to_str().ok()?.trim();
    let after = match text.parse() {
        Ok(seconds) => Duration::from_secs(seconds),
        Err(_) => {
            let at = httpdate::parse_http_date(text).ok()?;
            let at = at.duration_since(std::time::UNIX_EPOCH).ok()?;
            let now = u64::try_from(clock::wall()).unwrap_or_default();
            at.saturating_sub(Duration::from_millis(now))
        }
    };
    Some(after.min(RETRY_AFTER_MAX))
}

fn failure(error: reqwest::Error) -> Failure {
    let error = error.without_url();
    let mut causes = Vec::new();
    let mut next: Option<&(dyn Error + 'static)> = Some(&error);
    while let Some(cause) = next {
        if let Some(refused) = cause.downcast_ref::<RefusedAddress>() {
            return Failure::Refused(refused.to_string());
        }
        causes.push(cause.to_string());
        next = cause.source();
    }
    if error.is_timeout() {
        return Failure::Timeout;
    }
    Failure::Network(causes.join(": "))
}

#[cfg(test)]
mod tests;
