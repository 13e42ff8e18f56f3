//! The edge: what strangers can reach. Sessions over WebSocket, the HTTP interface for back ends, and the
//! internal port. Knows no table and no ring version.

mod admin;
mod http;
mod listener;
mod openapi;
mod page;
mod rates;
mod requests;
mod resume;
mod session;
mod upgrade;

use std::{
    net::IpAddr,
    sync::{Arc, atomic::AtomicU64},
};

use governor::{DefaultKeyedRateLimiter, Quota, RateLimiter};

use crate::{
    auth::Tokens,
    cluster::Router,
    config::{self, Config},
    fanout::Hub,
    tasks::Tasks,
};

pub use admin::Admin;
pub use listener::{bind, serve};

/// What every session and every HTTP request needs.
pub struct Gateway {
    pub(crate) router: Arc<Router>,
    pub(crate) hub: Arc<Hub>,
    pub(crate) tokens: Tokens,
    pub(crate) limits: config::Limits,
    pub(crate) session: config::Session,
    pub(crate) drain: config::Drain,
    pub(crate) origins: Vec<String>,
    pub(crate) tasks: Tasks,
    next_session: AtomicU64,
    connects: DefaultKeyedRateLimiter<IpAddr>,
    rates: rates::Rates,
    sent: session::Counters,
    metrics: requests::Metrics,
}

impl Gateway {
    #[must_use]
    pub fn new(
        config: &Config,
        router: Arc<Router>,
        hub: Arc<Hub>,
        tokens: Tokens,
        tasks: Tasks,
    ) -> Self {
        let limits = config.limits.clone();
        let connects = RateLimiter::keyed(quota(
            limits.connects_per_second_per_address,
            limits.connects_burst_per_address,
        ));
        let rates = rates::Rates::new(&limits);
        Self {
            router,
            hub,
            tokens,
            limits,
            session: config.session.clone(),
            drain: config.drain.clone(),
            origins: config.client.origins.clone(),
            tasks,
            next_session: AtomicU64::new(1),
            connects,
            rates,
            sent: session::Counters::default(),
            metrics: requests::Metrics::default(),
        }
    }

    /// Forgets addresses and users that have not come lately. To be called every few seconds.
    pub fn forget_rates(&self) {
        self.connects.retain_recent();
        self.connects.shrink_to_fit();
        self.rates.forget();
    }

    /// To be called every few seconds.
    pub async fn flush_presence(&self) {
        self.router.flush_presence().await;
    }

    /// What strangers may ask over HTTP.
    pub fn public(self: &Arc<Self>) -> axum::Router {
        http::routes(self.clone())
    }
}

/// So many per second, and at most `burst` at once (generic cell rate algorithm).
fn quota(per_second: u32, burst: u32) -> Quota {
    let one = std::num::NonZeroU32::MIN;
    let per_second = std::num::NonZeroU32::new(per_second).unwrap_or(one);
    let burst = std::num::NonZeroU32::new(burst).unwrap_or(one);
    Quota::per_second(per_second).allow_burst(burst)
}
