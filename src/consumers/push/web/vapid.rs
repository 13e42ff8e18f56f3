//! The identity of this gateway for push services (RFC 8292): a token for each of them.

use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};
use quick_cache::sync::Cache;
use serde::Serialize;

use super::super::keys::SigningKey;

/// Seconds for which a token is valid. Push services accept at most 24 hours.
const VALID_S: u64 = 12 * 3_600;
/// Seconds before its end in which a token is no longer used: clocks differ, and a request takes time.
const MARGIN_S: u64 = 3_600;
/// Tokens that are kept, one for each origin of push services. `*.notify.windows.com` has many.
const TOKENS_MAX: usize = 256;

#[derive(Serialize)]
struct Claims<'a> {
    aud: &'a str,
    exp: u64,
    sub: &'a str,
}

#[derive(Clone)]
struct Token {
    authorization: String,
    expires_s: u64,
}

/// Signs tokens.
pub(super) struct Vapid {
    key: SigningKey,
    public: String,
    contact: String,
    tokens: Cache<String, Token>,
}

impl Vapid {
    pub(super) fn new(key: SigningKey, contact: String) -> Self {
        Self {
            public: URL_SAFE_NO_PAD.encode(key.public()),
            key,
            contact,
            tokens: Cache::new(TOKENS_MAX),
        }
    }

    /// Returns the public key as base64url text.
    pub(super) fn public(&self) -> &str {
        &self.public
    }

    /// Returns the header `authorization` for the push service at an origin.
    pub(super) fn authorization(&self, audience: &str, now_s: u64) -> Option<String> {
        if let Some(token) = self.tokens.get(audience) {
            let left_s = token.expires_s.saturating_sub(now_s);
            // More than a new token has: the clock was set back.
            if (MARGIN_S..=VALID_S).contains(&left_s) {
                return Some(token.authorization);
            }
        }
        let expires_s = now_s + VALID_S;
        let claims = Claims {
            aud: audience,
            exp: expires_s,
            sub: &self.contact,
        };
        let token = self.key.sign(None, &claims).ok()?;
        let authorization = format!("vapid t={token}, k={}", self.public);
        let token = Token {
            authorization: authorization.clone(),
            expires_s,
        };
        self.tokens.insert(audience.to_owned(), token);
        Some(authorization)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::consumers::push::fixtures::{p256_pem, token_part};

    #[test]
    fn a_token_is_for_one_push_service_and_some_hours() {
        let key = SigningKey::parse(p256_pem().as_bytes()).unwrap();
        let vapid = Vapid::new(key, "mailto:a@example.org".into());
        let at = |audience: &str, now_s| vapid.authorization(audience, now_s).unwrap();
        let (one, now) = ("https://one.example.org", 1_800_000_000);
        let first = at(one, now);
        let token = first
            .trim_start_matches("vapid t=")
            .split(", k=")
            .next()
            .unwrap();
        let claims =
            serde_json::json!({"aud": one, "exp": now + VALID_S, "sub": "mailto:a@example.org"});
        assert_eq!(token_part(token, 1), claims);
        assert_eq!(token_part(token, 0)["alg"], "ES256");
        assert_eq!(at(one, now + VALID_S - MARGIN_S), first);
        assert_ne!(at("https://other.example.org", now), first);
        let later = at(one, now + VALID_S - MARGIN_S + 1);
        assert_ne!(later, first);
        assert_ne!(at(one, now), later, "the clock was set back");
    }

    #[test]
    fn only_some_tokens_are_kept() {
        let key = SigningKey::parse(p256_pem().as_bytes()).unwrap();
        let vapid = Vapid::new(key, "mailto:a@example.org".into());
        for host in 0..2 * TOKENS_MAX {
            vapid.authorization(&format!("https://{host}.example.org"), 1);
        }
        assert!(vapid.tokens.len() <= TOKENS_MAX);
    }
}
