//! The one thing that the providers need of the network: a POST request.

use std::{fmt, sync::Arc, time::Duration};

use async_trait::async_trait;
use bytes::Bytes;
use ipnet::IpNet;

pub use crate::consumers::http::{Failure, Response};
use crate::consumers::{
    address::Class,
    http::{self, HeaderMap, HeaderName, HeaderValue, Url},
};

/// Sends POST requests. The implementation follows no redirects, bounds the body that it reads, and connects only to
/// addresses that are allowed.
#[async_trait]
pub trait Post: Send + Sync {
    /// Sends a request and reads the response, whatever its status is.
    ///
    /// # Errors
    /// [`Failure`] if there is no response.
    async fn post(&self, request: Request) -> Result<Response, Failure>;
}

/// A request. Its debug text has neither the headers nor the address: both may let others send notifications.
pub struct Request {
    pub url: Url,
    pub headers: HeaderMap,
    pub body: Bytes,
    pub timeout: Duration,
}

impl fmt::Debug for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Request").finish_non_exhaustive()
    }
}

/// Sends requests to public addresses and to networks that the operator allows, over https. The hosts are those of the
/// settings, also for browsers.
pub struct Https {
    client: http::Client,
    class: Arc<Class>,
}

impl Https {
    /// It has connections of its own, so that push services that do not answer take no room from webhooks.
    #[must_use]
    pub fn new(allow: Vec<IpNet>) -> Self {
        let class = Class::Operator {
            allow,
            http: false,
            development: false,
        };
        Self {
            client: http::Client::default(),
            class: Arc::new(class),
        }
    }
}

#[async_trait]
impl Post for Https {
    async fn post(&self, request: Request) -> Result<Response, Failure> {
        let Request {
            url,
            headers,
            body,
            timeout,
        } = request;
        let request = http::Request {
            url,
            class: self.class.clone(),
            headers,
            body,
            timeout,
        };
        self.client.post(request).await
    }
}

/// Puts headers together. A value that no header can have is left out; all that users choose was checked before.
pub(super) fn headers<const N: usize>(pairs: [(&'static str, &str); N]) -> HeaderMap {
    let pairs = pairs.into_iter().filter_map(|(name, value)| {
        let mut value = HeaderValue::from_str(value).ok()?;
        value.set_sensitive(name == "authorization");
        Some((HeaderName::from_static(name), value))
    });
    pairs.collect()
}
