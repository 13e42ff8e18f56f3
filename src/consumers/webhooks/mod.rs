//! Webhooks: requests that tell other systems of messages and changes, signed as Standard Webhooks 1.0.0 says.

pub mod endpoint;
pub mod events;
pub mod signing;

use std::{sync::Arc, time::Duration};

use super::{address::Class, http::Url};
use events::Filter;
use signing::Secret;

/// The settings of a webhook.
#[derive(Clone, Debug)]
pub struct Settings {
    pub name: String,
    pub url: Url,
    pub class: Arc<Class>,
    pub filter: Filter,
    /// One to four. Each signs each request, so that a secret can be replaced without a gap.
    pub secrets: Vec<Secret>,
    /// Events in one request at most.
    pub batch: usize,
    /// Requests of one gateway at once.
    pub connections: usize,
    pub timeout: Duration,
}
