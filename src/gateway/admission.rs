//! The limits of connections. Every socket of the client listener is counted from before its first byte is read until
//! it is closed: in total, by address, and separately while it is unauthenticated.

use std::{
    net::IpAddr,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
};

use dashmap::DashMap;
use governor::{DefaultKeyedRateLimiter, RateLimiter};
use ipnet::IpNet;
use metrics::{counter, gauge};
use tokio::time::Instant;

use super::{
    address::{among, counted},
    quota,
};
use crate::{
    config::Config,
    model::limits::{INTERNAL_CONNECTIONS_MAX, REFUSALS_AT_ONCE_MAX},
    protocol::{ErrorCode, Refusal},
    tasks::lock,
};

/// The share of one address in `limits.unauthenticated_connections`: one part in this many.
const UNAUTHENTICATED_PER_ADDRESS: usize = 4;

/// The limits of a listener and the sockets that count against them.
pub struct Admission {
    connections_max: usize,
    per_address_max: usize,
    unauthenticated_max: usize,
    /// The rate of new sockets and rejected tokens per address. `None` means no limit.
    rate: Option<DefaultKeyedRateLimiter<IpAddr>>,
    /// Addresses that exceed that rate with rejected tokens, each with the time until which none of its tokens is
    /// checked.
    guessing: DashMap<IpAddr, Instant>,
    trusted_proxies: Vec<IpNet>,
    proxy_protocol: bool,
    open: AtomicUsize,
    unauthenticated: AtomicUsize,
    /// The sockets of each address that has an open one.
    addresses: DashMap<IpAddr, Sockets>,
    refusing: AtomicUsize,
}

/// The number of sockets of one address.
#[derive(Default)]
struct Sockets {
    open: usize,
    unauthenticated: usize,
}

/// The reasons for which connections are refused, as they are counted.
pub const REFUSED_CONNECTS: [&str; 8] = [
    "address",
    "address connections",
    "address unauthenticated",
    "connections",
    "draining",
    "origin",
    "subprotocol",
    "unauthenticated",
];

/// The limit because of which a socket is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Full {
    Connections,
    Unauthenticated,
    Address,
    AddressUnauthenticated,
    AddressRate,
}

impl Full {
    pub(super) fn refusal(self) -> Refusal {
        use ErrorCode::{RateLimited, Unavailable};
        let (code, message) = match self {
            Self::Connections => (Unavailable, "too many connections"),
            Self::Unauthenticated => (Unavailable, "too many connections without a token"),
            Self::Address => (RateLimited, "too many connections of this address"),
            Self::AddressUnauthenticated => (
                RateLimited,
                "too many connections of this address without a token",
            ),
            Self::AddressRate => (RateLimited, "too many new connections of this address"),
        };
        Refusal {
            code,
            message: message.into(),
            retry_after_ms: Some(1000),
        }
    }

    pub(super) fn count(self) {
        let reason = match self {
            Self::Connections => "connections",
            Self::Unauthenticated => "unauthenticated",
            Self::Address => "address connections",
            Self::AddressUnauthenticated => "address unauthenticated",
            Self::AddressRate => "address",
        };
        counter!("chat_connects_refused_total", "reason" => reason).increment(1);
    }
}

impl Admission {
    #[must_use]
    pub fn new(config: &Config) -> Self {
        let limits = &config.limits;
        let rate = RateLimiter::keyed(quota(
            limits.connects_per_second_per_address,
            limits.connects_burst_per_address,
        ));
        Self {
            connections_max: limits.connections,
            per_address_max: limits.connections_per_address,
            unauthenticated_max: limits.unauthenticated_connections,
            rate: Some(rate),
            trusted_proxies: config.client.trusted_proxies.clone(),
            proxy_protocol: config.client.proxy_protocol,
            ..Self::internal()
        }
    }

    /// Returns the limits of the internal port: few connections, without a limit per address.
    #[must_use]
    pub fn internal() -> Self {
        Self {
            connections_max: INTERNAL_CONNECTIONS_MAX,
            per_address_max: INTERNAL_CONNECTIONS_MAX,
            unauthenticated_max: INTERNAL_CONNECTIONS_MAX * UNAUTHENTICATED_PER_ADDRESS,
            rate: None,
            guessing: DashMap::new(),
            trusted_proxies: Vec::new(),
            proxy_protocol: false,
            open: AtomicUsize::new(0),
            unauthenticated: AtomicUsize::new(0),
            addresses: DashMap::new(),
            refusing: AtomicUsize::new(0),
        }
    }

    /// Counts a socket that was just accepted.
    pub(super) fn admit(self: &Arc<Self>) -> Result<Place, Full> {
        if !add(&self.open, self.connections_max) {
            return Err(Full::Connections);
        }
        if !add(&self.unauthenticated, self.unauthenticated_max) {
            self.open.fetch_sub(1, Ordering::AcqRel);
            return Err(Full::Unauthenticated);
        }
        Ok(Place {
            admission: self.clone(),
            address: None,
            authenticated: false,
        })
    }

    /// Returns whether one more refused socket may be answered. If so, the caller must call [`refused`](Self::refused)
    /// afterwards.
    pub(super) fn refuse(&self) -> bool {
        add(&self.refusing, REFUSALS_AT_ONCE_MAX)
    }

    pub(super) fn refused(&self) {
        self.refusing.fetch_sub(1, Ordering::AcqRel);
    }

    pub(super) fn trusted_proxies(&self) -> &[IpNet] {
        &self.trusted_proxies
    }

    pub(super) fn is_trusted_proxy(&self, peer: IpAddr) -> bool {
        among(&self.trusted_proxies, peer)
    }

    pub(super) fn proxy_protocol(&self) -> bool {
        self.proxy_protocol
    }

    /// Returns whether this peer may connect at all. With the PROXY protocol, only trusted proxies may if any are
    /// configured.
    pub(super) fn may_connect(&self, peer: IpAddr) -> bool {
        !self.proxy_protocol || self.trusted_proxies.is_empty() || self.is_trusted_proxy(peer)
    }

    /// Returns whether an address recently sent too many rejected tokens.
    pub(super) fn is_guessing(&self, address: IpAddr) -> bool {
        let until = self.guessing.get(&counted(address)).map(|until| *until);
        until.is_some_and(|until| Instant::now() < until)
    }

    /// Counts a rejected token of an address.
    pub(super) fn wrong_token(&self, address: IpAddr) {
        use governor::clock::{Clock as _, DefaultClock};
        let address = counted(address);
        if let Some(rate) = &self.rate
            && let Err(not_until) = rate.check_key(&address)
        {
            let wait = not_until.wait_time_from(DefaultClock::default().now());
            self.guessing.insert(address, Instant::now() + wait);
        }
    }

    /// Drops addresses without recent connections, and updates the metrics. It is called every few seconds.
    pub(super) fn keep_up(&self) {
        if let Some(rate) = &self.rate {
            rate.retain_recent();
            rate.shrink_to_fit();
        }
        let now = Instant::now();
        self.guessing.retain(|_, until| now < *until);
        gauge!("chat_sockets").set(self.open.load(Ordering::Acquire) as f64);
        let unauthenticated = self.unauthenticated.load(Ordering::Acquire);
        gauge!("chat_sockets_unauthenticated").set(unauthenticated as f64);
    }
}

/// The place of a socket in the limits. Dropping it frees the place.
pub(super) struct Place {
    admission: Arc<Admission>,
    /// The address for which it counts, once that is known.
    address: Option<IpAddr>,
    authenticated: bool,
}

/// The place of a connection, which its session takes.
#[derive(Clone)]
pub(super) struct SharedPlace(Arc<Mutex<Option<Place>>>);

impl SharedPlace {
    pub(super) fn new(place: Place) -> Self {
        Self(Arc::new(Mutex::new(Some(place))))
    }

    pub(super) fn authenticated(&self) {
        if let Some(place) = &mut *lock(&self.0) {
            place.authenticated();
        }
    }

    /// Takes the place for a session.
    pub(super) fn take(&self) -> Result<Place, Full> {
        lock(&self.0).take().ok_or(Full::Connections)
    }

    /// Takes the place like [`take`](Self::take), and counts it for the address that a proxy named.
    pub(super) fn take_for(&self, address: IpAddr) -> Result<Place, Full> {
        let mut place = lock(&self.0);
        place.as_mut().ok_or(Full::Connections)?.assign(address)?;
        place.take().ok_or(Full::Connections)
    }
}

impl Place {
    pub(super) fn admission(&self) -> &Admission {
        &self.admission
    }

    /// Counts the socket for an address.
    pub(super) fn assign(&mut self, address: IpAddr) -> Result<(), Full> {
        let address = counted(address);
        let admission = &self.admission;
        if let Some(rate) = &admission.rate
            && rate.check_key(&address).is_err()
        {
            return Err(Full::AddressRate);
        }
        let unauthenticated_max =
            (admission.unauthenticated_max / UNAUTHENTICATED_PER_ADDRESS).max(1);
        let mut sockets = admission.addresses.entry(address).or_default();
        if sockets.open >= admission.per_address_max {
            return Err(Full::Address);
        }
        if !self.authenticated && sockets.unauthenticated >= unauthenticated_max {
            return Err(Full::AddressUnauthenticated);
        }
        sockets.open += 1;
        sockets.unauthenticated += usize::from(!self.authenticated);
        drop(sockets);
        self.address = Some(address);
        Ok(())
    }

    /// Stops counting the socket as unauthenticated, because its client sent a valid token.
    pub(super) fn authenticated(&mut self) {
        if self.authenticated {
            return;
        }
        self.authenticated = true;
        self.admission
            .unauthenticated
            .fetch_sub(1, Ordering::AcqRel);
        if let Some(address) = &self.address
            && let Some(mut sockets) = self.admission.addresses.get_mut(address)
        {
            sockets.unauthenticated -= 1;
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.authenticated();
        self.admission.open.fetch_sub(1, Ordering::AcqRel);
        if let Some(address) = &self.address {
            if let Some(mut sockets) = self.admission.addresses.get_mut(address) {
                sockets.open -= 1;
            }
            self.admission
                .addresses
                .remove_if(address, |_, sockets| sockets.open == 0);
        }
    }
}

fn add(count: &AtomicUsize, max: usize) -> bool {
    let added = count.fetch_update(Ordering::AcqRel, Ordering::Acquire, |n| {
        (n < max).then_some(n + 1)
    });
    added.is_ok()
}
