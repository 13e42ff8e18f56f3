//! The one thing that the providers need of the network: a POST request.

use std::{fmt, time::Duration};

use async_trait::async_trait;
use bytes::Bytes;

pub use crate::consumers::http::{Failure, Response};
use crate::consumers::http::{HeaderMap, HeaderName, HeaderValue, Url};

/// Sends POST requests. The implementation follows no redirects, bounds the body that it reads, and connects only to
/// addresses that the destination allows.
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
    pub destination: Destination,
    pub headers: HeaderMap,
    pub body: Bytes,
    pub timeout: Duration,
}

impl fmt::Debug for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Request")
            .field("destination", &self.destination)
            .finish_non_exhaustive()
    }
}

/// Whether a user or the operator chose the address of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Destination {
    /// A user: https and public addresses only.
    User,
    /// The operator: https, public addresses, and the networks that the settings allow.
    Operator,
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
