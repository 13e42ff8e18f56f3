//! The edge, which clients can reach: sessions over WebSocket, the HTTP interface for back ends, and the internal port.
//! It knows neither tables nor ring versions.

mod address;
mod admin;
mod admission;
mod conditions;
mod consumers;
mod development;
mod files;
#[cfg(test)]
mod fixture;
mod headers;
mod host;
mod http;
mod listener;
mod openapi;
mod page;
mod pages;
mod rates;
mod reply;
mod requests;
mod resume;
mod service;
mod session;
mod unread;
mod upgrade;

use std::sync::{Arc, atomic::AtomicU64};

use axum::routing::get;
use governor::{DefaultKeyedRateLimiter, Quota, RateLimiter};

use crate::{
    auth::Tokens,
    cluster::{Channels, Cluster, Router, Users},
    config::{self, Config},
    consumers::{Control, push},
    fanout::Hub,
    model::UserId,
    tasks::Tasks,
};

pub use admin::Admin;
pub use admission::{Admission, REFUSED_CONNECTS};
pub use files::{Dropped, Eraser, Erasing, FileBytes, Files, PICTURE_OUTCOMES};
pub use listener::{bind, serve};
pub use service::SCOPES;

/// The parts that every session and HTTP request uses.
pub struct Gateway {
    pub(crate) router: Arc<Router>,
    pub(crate) users: Arc<Users>,
    pub(crate) channels: Arc<Channels>,
    pub(crate) hub: Arc<Hub>,
    pub(crate) tokens: Tokens,
    pub(crate) limits: config::Limits,
    pub(crate) session: config::Session,
    pub(crate) messages: config::Messages,
    pub(crate) drain: config::Drain,
    pub(crate) origins: Vec<String>,
    pub(crate) tasks: Tasks,
    next_session: AtomicU64,
    pub(crate) admission: Arc<Admission>,
    /// The request rate of each back end.
    services: DefaultKeyedRateLimiter<UserId>,
    rates: rates::Rates,
    sent: session::Counters,
    metrics: requests::Metrics,
    /// Uploaded files. `None` if there are no uploads.
    pub(crate) files: Option<Arc<Files>>,
    pub(crate) eraser: Eraser,
    /// The consumers of the log. `None` if there are none.
    pub(crate) consumers: Option<Arc<Control>>,
    /// The push services. `None` if nothing is pushed.
    pub(crate) push: Option<Arc<push::Providers>>,
}

impl Gateway {
    #[must_use]
    pub fn new(
        config: &Config,
        cluster: &Cluster,
        hub: Arc<Hub>,
        tokens: Tokens,
        tasks: Tasks,
        (files, eraser): (Option<Arc<Files>>, Eraser),
        consumers: Option<Arc<Control>>,
    ) -> Self {
        let limits = config.limits.clone();
        let services = RateLimiter::keyed(quota(
            limits.service_requests_per_second,
            limits.service_requests_burst,
        ));
        let rates = rates::Rates::new(&limits, limits.bytes_burst());
        Self {
            router: cluster.router.clone(),
            users: cluster.users.clone(),
            channels: cluster.channels.clone(),
            hub,
            tokens,
            limits,
            session: config.session.clone(),
            messages: config.messages.clone(),
            drain: config.drain.clone(),
            origins: config.client.origins.clone(),
            tasks,
            next_session: AtomicU64::new(1),
            admission: Arc::new(Admission::new(config)),
            services,
            rates,
            sent: session::Counters::default(),
            metrics: requests::Metrics::default(),
            files,
            eraser,
            consumers,
            push: None,
        }
    }

    /// Sets the push services.
    pub fn with_push(mut self, push: Option<Arc<push::Providers>>) -> Self {
        self.push = push;
        self
    }

    /// Drops the rates of addresses, services and users that were not active recently. It is called every few seconds.
    pub fn keep_up(&self) {
        self.admission.keep_up();
        self.services.retain_recent();
        self.services.shrink_to_fit();
        self.rates.forget();
        if let Some(files) = &self.files {
            files.keep_up();
        }
    }

    /// Sends the presence changes collected since the last call. It is called every few seconds.
    pub async fn flush_presence(&self) {
        self.users.flush_presence().await;
    }

    /// Returns the routes of the public port.
    pub fn public(self: &Arc<Self>) -> axum::Router {
        let documents = axum::Router::new().route("/openapi.json", get(openapi::served));
        let bucket = self.files.as_ref().and_then(|files| files.place());
        let page = page::routes(bucket.as_deref());
        http::routes(self.clone(), documents.merge(page))
    }
}

/// Returns a rate of `per_second` on average and `burst` at once (generic cell rate algorithm).
fn quota(per_second: u32, burst: u32) -> Quota {
    let one = std::num::NonZeroU32::MIN;
    let per_second = std::num::NonZeroU32::new(per_second).unwrap_or(one);
    let burst = std::num::NonZeroU32::new(burst).unwrap_or(one);
    Quota::per_second(per_second).allow_burst(burst)
}
