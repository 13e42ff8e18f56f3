//! Which push services do not answer. This file is pure.

use std::{collections::HashMap, time::Duration};

use reqwest::Url;
use serde::Deserialize;
use tokio::time::Instant;

use crate::model::{Device, PushProvider};

/// Failures in a row after which nothing is sent to a service for a while.
const FAILURES_MAX: u32 = 3;
/// The first and the longest of these pauses.
const PAUSE: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));
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
            return Some(failed.until - now);
        }
        // This one finds out whether it answers again. The others wait for it.
        failed.until = now + PAUSE.1;
        None
    }

    /// Notes whether a service has answered.
    pub(super) fn answered(
        &mut self,
        service: &str,
        provider: PushProvider,
        has_failed: bool,
        now: Instant,
    ) {
        if !has_failed {
            self.failed.remove(service);
            self.succeeded.insert(provider, now);
            return;
        }
        if self.failed.len() >= SERVICES_MAX && !self.failed.contains_key(service) {
            self.failed.retain(|_, failed| failed.until > now);
        }
        if self.failed.len() < SERVICES_MAX || self.failed.contains_key(service) {
            let failed = self.failed.entry(service.to_owned());
            let failed = failed.or_insert(Failed {
                in_a_row: 0,
                until: now,
            });
            failed.in_a_row += 1;
            let doubled = PAUSE.0 * 2_u32.pow(failed.in_a_row.saturating_sub(FAILURES_MAX).min(6));
            failed.until = now + doubled.min(PAUSE.1);
        }
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
        let answered = |services: &mut Services, failed, now| {
            services.answered("a", PushProvider::Web, failed, now);
        };
        for _ in 0..FAILURES_MAX {
            assert_eq!(services.pause("a", start), None);
            answered(&mut services, true, start);
        }
        assert_eq!(services.pause("a", start), Some(PAUSE.0));
        assert_eq!(services.pause("b", start), None);
        let later = start + PAUSE.0;
        assert_eq!(services.pause("a", later), None, "one finds out");
        assert_eq!(services.pause("a", later), Some(PAUSE.1), "the others wait");
        answered(&mut services, true, later);
        assert_eq!(services.pause("a", later), Some(2 * PAUSE.0));
        answered(&mut services, false, later);
        assert_eq!(services.pause("a", later), None);
        assert_eq!(services.succeeded(PushProvider::Web), Some(later));
        for number in 0..2 * SERVICES_MAX {
            services.answered(&number.to_string(), PushProvider::Web, true, later);
        }
        assert!(services.failed.len() <= SERVICES_MAX);
    }
}
