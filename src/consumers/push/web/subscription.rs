//! The subscription of a browser, as `PushSubscription.toJSON()` gives it, and its checks.

use std::fmt;

use aws_lc_rs::agreement::{ECDH_P256, ParsedPublicKey, UnparsedPublicKey};
use reqwest::Url;
use serde::{Deserialize, Serialize};

use super::base64;

/// Bytes of an endpoint. Those of today have up to about 800.
const ENDPOINT_BYTES_MAX: usize = 2_048;
/// Bytes of the browser's public key, a point that is not compressed, and of its secret.
const P256DH_BYTES: usize = 65;
const AUTH_BYTES: usize = 16;
/// The first byte of a point that is not compressed.
const UNCOMPRESSED: u8 = 4;

/// Where a browser gets notifications, and how they are encrypted for it.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Subscription {
    pub endpoint: String,
    pub keys: SubscriptionKeys,
}

/// The keys of a subscription, as base64url text.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SubscriptionKeys {
    pub p256dh: String,
    pub auth: String,
}

impl fmt::Debug for Subscription {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Subscription")
    }
}

impl fmt::Debug for SubscriptionKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SubscriptionKeys")
    }
}

/// The reason why a subscription is not accepted.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum InvalidSubscription {
    #[error("the endpoint is not an https address of at most 2048 bytes")]
    Endpoint,
    #[error("the endpoint's host is not in push.web.hosts")]
    Host,
    #[error("p256dh is not a point on the curve P-256: 65 bytes as base64url")]
    P256dh,
    #[error("auth is not 16 bytes as base64url")]
    Auth,
}

/// A subscription that was checked.
pub(super) struct Receiver {
    pub(super) endpoint: Url,
    pub(super) keys: ReceiverKeys,
}

/// The keys of a browser.
pub(super) struct ReceiverKeys {
    pub(super) p256dh: [u8; P256DH_BYTES],
    pub(super) auth: [u8; AUTH_BYTES],
}

impl Subscription {
    /// Checks the subscription against the hosts of known push services.
    pub(super) fn receiver(&self, hosts: &[String]) -> Result<Receiver, InvalidSubscription> {
        use InvalidSubscription::{Auth, Endpoint, Host, P256dh};
        let fits = |endpoint: &&String| endpoint.len() <= ENDPOINT_BYTES_MAX;
        let endpoint = Some(&self.endpoint).filter(fits);
        let endpoint = endpoint.and_then(|endpoint| Url::parse(endpoint).ok());
        let is_plain = |url: &Url| {
            url.scheme() == "https" && url.username().is_empty() && url.password().is_none()
        };
        let endpoint = endpoint.filter(is_plain).ok_or(Endpoint)?;
        if !hosts.iter().any(|pattern| is_host(&endpoint, pattern)) {
            return Err(Host);
        }
        let point: [u8; P256DH_BYTES] = decoded(&self.keys.p256dh).ok_or(P256dh)?;
        let parsed = UnparsedPublicKey::new(&ECDH_P256, &point[..]);
        let parsed = ParsedPublicKey::try_from(parsed).map_err(|_| P256dh)?;
        if point[0] != UNCOMPRESSED || parsed.alg() != &ECDH_P256 {
            return Err(P256dh);
        }
        Ok(Receiver {
            endpoint,
            keys: ReceiverKeys {
                p256dh: point,
                auth: decoded(&self.keys.auth).ok_or(Auth)?,
            },
        })
    }
}

fn decoded<const N: usize>(text: &str) -> Option<[u8; N]> {
    // A longer text cannot be one of N bytes, so it is not decoded.
    (text.len() <= 2 * N)
        .then(|| base64(text))??
        .try_into()
        .ok()
}

/// Splits a pattern into its name, whether it means the names below, and its port.
fn parts(pattern: &str) -> Option<(&str, bool, u16)> {
    let (name, port) = match pattern.rsplit_once(':') {
        Some((name, port)) => (name, port.parse().ok().filter(|&port| port > 0)?),
        None => (pattern, 443),
    };
    let below = name.strip_prefix("*.");
    Some((below.unwrap_or(name), below.is_some(), port))
}

/// Whether a text can be in `push.web.hosts`.
#[must_use]
pub fn is_host_pattern(pattern: &str) -> bool {
    let in_names = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "-.".contains(c);
    let is_label = |label: &str| !label.is_empty();
    parts(pattern).is_some_and(|(name, below, _)| {
        name.chars().all(in_names)
            && name.split('.').all(is_label)
            // All names below a top-level domain are too many.
            && (!below || name.contains('.'))
    })
}

fn is_host(endpoint: &Url, pattern: &str) -> bool {
    let (Some(host), Some((name, below, port))) = (endpoint.host_str(), parts(pattern)) else {
        return false;
    };
    let is_name = if below {
        let label = host.strip_suffix(name).and_then(|l| l.strip_suffix('.'));
        label.is_some_and(|label| !label.is_empty())
    } else {
        host == name
    };
    is_name && endpoint.port_or_known_default() == Some(port)
}

/// A subscription of the browser in RFC 8291.
#[cfg(test)]
pub(super) fn fixture(endpoint: &str) -> Subscription {
    let p256dh =
        "BCVxsr7N_eNgVRqvHtD0zTZsEc6-VV-JvLexhqUzORcxaOzi6-AYWXvTBHm4bjyPjs7Vd8pZGH6SRpkNtoIAiw4";
    Subscription {
        endpoint: endpoint.into(),
        keys: SubscriptionKeys {
            p256dh: p256dh.into(),
            auth: "BTBZMqHH6r4Tts7J_aSIgg".into(),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn result(subscription: &Subscription) -> Result<(), InvalidSubscription> {
        let hosts = ["push.example.org", "*.notify.example.com", "localhost:8443"];
        subscription.receiver(&hosts.map(String::from)).map(drop)
    }

    #[test]
    fn an_endpoint_is_an_https_address_of_a_known_host() {
        let long = format!("https://push.example.org/{}", "x".repeat(2_048));
        for (endpoint, expected) in [
            ("https://push.example.org/send/1?a=b", Ok(())),
            ("https://PUSH.example.org:443/", Ok(())),
            ("https://a.notify.example.com/", Ok(())),
            ("https://a.b.notify.example.com/", Ok(())),
            ("https://localhost:8443/1", Ok(())),
            ("https://localhost/1", Err(InvalidSubscription::Host)),
            (
                "https://notify.example.com/",
                Err(InvalidSubscription::Host),
            ),
            (
                "https://.notify.example.com/",
                Err(InvalidSubscription::Host),
            ),
            (
                "https://anotify.example.com/",
                Err(InvalidSubscription::Host),
            ),
            (
                "https://a.push.example.org/",
                Err(InvalidSubscription::Host),
            ),
            (
                "https://push.example.org.evil.org/",
                Err(InvalidSubscription::Host),
            ),
            (
                "https://push.example.org:8443/",
                Err(InvalidSubscription::Host),
            ),
            ("https://127.0.0.1/", Err(InvalidSubscription::Host)),
            (
                "https://push.example.org@evil.org/",
                Err(InvalidSubscription::Endpoint),
            ),
            (
                "https://a@push.example.org/",
                Err(InvalidSubscription::Endpoint),
            ),
            (
                "http://push.example.org/",
                Err(InvalidSubscription::Endpoint),
            ),
            ("push.example.org", Err(InvalidSubscription::Endpoint)),
            ("", Err(InvalidSubscription::Endpoint)),
            (&long, Err(InvalidSubscription::Endpoint)),
        ] {
            assert_eq!(result(&fixture(endpoint)), expected, "{endpoint}");
        }
    }

    #[test]
    fn keys_are_a_point_on_the_curve_and_a_secret() {
        let with = |change: fn(&mut SubscriptionKeys)| {
            let mut subscription = fixture("https://push.example.org/1");
            change(&mut subscription.keys);
            result(&subscription)
        };
        let zeros = |bytes: usize| "A".repeat(bytes * 4 / 3);
        assert_eq!(with(|keys| keys.auth.push_str("==")), Ok(()));
        for keys in [
            with(|keys| keys.p256dh.clear()),
            with(|keys| keys.p256dh.truncate(40)),
            with(|keys| keys.p256dh.replace_range(60..61, "x")),
            with(|keys| keys.p256dh.replace_range(60..61, "+")),
            with(|keys| keys.p256dh = "A".repeat(1_000_000)),
        ] {
            assert_eq!(keys, Err(InvalidSubscription::P256dh));
        }
        assert_eq!(zeros(15).len(), 20);
        for keys in [
            with(|keys| keys.auth.clear()),
            with(|keys| keys.auth.push('A')),
            with(|keys| keys.auth = "é".into()),
        ] {
            assert_eq!(keys, Err(InvalidSubscription::Auth));
        }
        let shown = format!("{:?}", fixture("https://push.example.org/1"));
        assert_eq!(shown, "Subscription");
    }

    #[test]
    fn patterns_of_hosts_are_checked() {
        for pattern in ["push.example.org", "*.push.apple.com", "localhost:8443"] {
            assert!(is_host_pattern(pattern), "{pattern}");
        }
        for pattern in [
            "",
            "*",
            "*.",
            "*.com",
            "a.*.org",
            "A.org",
            "https://a.org",
            "a.org/",
            "a.org:",
            "a.org:0",
            "a..org",
            "[::1]",
        ] {
            assert!(!is_host_pattern(pattern), "{pattern}");
        }
    }
}
