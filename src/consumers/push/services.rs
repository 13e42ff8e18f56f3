//! Which push services do not answer. This file is pure.

use std::{collections::HashMap, time::Duration};

use reqwest::Url;
use serde::Deserialize;
use tokio::time::Instant;

use super::PAUSE_MAX;
use crate::model::{Device, PushProvider};

/// Failures in a row after which nothing is sent to a service for a while.
const FAILURES_MAX: u32 = 3;
/// The first and the longest of these pauses.
const PAUSE: (Duration, Duration) = (Duration::from_secs(1), PAUSE_MAX);
/// Services with failures that are remembered. Users choose hosts below `push.web.hosts`.
const SERVICES_MAX: usize = 1_000;

/// The push services that have failed lately.
#[derive(Default)]
pub(super) struct Services {
    failed: HashMap<String, Failed>,
    succeeded: HashMap<PushProvider, Instant>,
}

struct Failed {
    in_a_row: u32,
    until: Instant,
    /// Whether a notification finds out whether the service answers again.
    is_probed: bool,
}

/// Returns the push service of a device: its provider, and of a browser the host.
pub(super) fn service_of(device: &Device) -> String {
    #[derive(Deserialize)]
    struct Endpoint {
        endpoint: String,
    }
    match device.provider {
        PushProvider::Fcm => "fcm".into(),
        PushProvider::Apns => "apns".into(),
        PushProvider::Web => {
            let endpoint = serde_json::from_str::<Endpoint>(&device.token).ok();
            let url = endpoint.and_then(|endpoint| Url::parse(&endpoint.endpoint).ok());
            url.and_then(|url| url.host_str().map(Into::into))
                .unwrap_or_default()
        }
    }
}

impl Services {
    /// Returns how long nothing is to be sent to a service. One notification may be sent at the end of each pause.
    pub(super) fn pause(&mut self, service: &str, now: Instant) -> Option<Duration> {
        let failed = self.failed.get_mut(service)?;
        if failed.in_a_row < FAILURES_MAX {
            return None;
        }
        if failed.until > now {
            // A notification that finds out has its answer soon.
            return Some(if failed.is_probed {
                PAUSE.0
            } else {
                failed.until - now
            });
        }
        failed.is_probed = true;
        failed.until = now + PAUSE.1;
        None
    }

    /// Notes that a service has answered.
    pub(super) fn answered(&mut self, service: &str) {
        self.failed.remove(service);
    }

    /// Notes that a device got something, or that its service knows it no more.
    pub(super) fn succeeded_now(&mut self, service: &str, provider: PushProvider, now: Instant) {
        self.answered(service);
        self.succeeded.insert(provider, now);
    }

    /// Notes that a service did not answer, or could not do anything.
    pub(super) fn failed(&mut self, service: &str, now: Instant) {
        if self.failed.len() >= SERVICES_MAX && !self.failed.contains_key(service) {
            self.failed.retain(|_, failed| failed.until > now);
            if self.failed.len() >= SERVICES_MAX {
                return;
            }
        }
        let failed = self.failed.entry(service.to_owned());
        let failed = failed.or_insert(Failed {
            in_a_row: 0,
            until: now,
            is_probed: false,
        });
        // Those that were sent together count once.
        if failed.in_a_row >= FAILURES_MAX && !failed.is_probed {
            return;
        }
        failed.in_a_row += 1;
        failed.is_probed = false;
        let doubled = PAUSE.0 * 2_u32.pow(failed.in_a_row.saturating_sub(FAILURES_MAX).min(6));
        failed.until = now + doubled.min(PAUSE.1);
    }

    /// Returns when a device of this provider got something last.
    pub(super) fn succeeded(&self, provider: PushProvider) -> Option<Instant> {
        self.succeeded.get(&provider).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_service_that_does_not_answer_is_asked_seldom_until_it_does() {
        let (mut services, start) = (Services::default(), Instant::now());
        for _ in 0..FAILURES_MAX {
            assert_eq!(services.pause("a", start), None);
            services.failed("a", start);
        }
        services.failed("a", start);
        assert_eq!(services.pause("a", start), Some(PAUSE.0), "sent together");
        assert_eq!(services.pause("b", start), None);
        let later = start + PAUSE.0;
        assert_eq!(services.pause("a", later), None, "one finds out");
        assert_eq!(services.pause("a", later), Some(PAUSE.0), "the others wait");
        services.failed("a", later);
        assert_eq!(services.pause("a", later), Some(2 * PAUSE.0));
        services.succeeded_now("a", PushProvider::Web, later);
        assert_eq!(services.pause("a", later), None);
        assert_eq!(services.succeeded(PushProvider::Web), Some(later));
        for number in 0..2 * SERVICES_MAX {
            services.failed(&number.to_string(), later);
        }
        assert!(services.failed.len() <= SERVICES_MAX);
    }
}
