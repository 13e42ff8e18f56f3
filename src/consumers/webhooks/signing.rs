//! Signs requests as Standard Webhooks 1.0.0 says: HMAC-SHA256 of the id, the time and the body.

use std::{fmt, str::FromStr};

use aws_lc_rs::hmac;
use base64::{Engine as _, engine::general_purpose::STANDARD};

pub const ID_HEADER: &str = "webhook-id";
pub const TIMESTAMP_HEADER: &str = "webhook-timestamp";
pub const SIGNATURE_HEADER: &str = "webhook-signature";

const PREFIX: &str = "whsec_";
const BYTES_MIN: usize = 24;
const BYTES_MAX: usize = 64;

/// A secret that a webhook and its receiver share.
#[derive(Clone)]
pub struct Secret(hmac::Key);

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}

impl FromStr for Secret {
    /// What a secret must be.
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let bytes = text
            .strip_prefix(PREFIX)
            .and_then(|text| STANDARD.decode(text).ok());
        match bytes {
            Some(bytes) if (BYTES_MIN..=BYTES_MAX).contains(&bytes.len()) => {
                Ok(Self(hmac::Key::new(hmac::HMAC_SHA256, &bytes)))
            }
            _ => Err("must be whsec_ and the base64 of 24 to 64 bytes"),
        }
    }
}

/// Returns the value of `webhook-signature`: one signature for each secret. `now_s` is also the value of
/// `webhook-timestamp`, in seconds since 1970.
#[must_use]
pub fn signature(secrets: &[Secret], id: &str, now_s: u64, body: &[u8]) -> String {
    let signed = secrets.iter().map(|Secret(key)| {
        let mut context = hmac::Context::with_key(key);
        context.update(format!("{id}.{now_s}.").as_bytes());
        context.update(body);
        format!("v1,{}", STANDARD.encode(context.sign()))
    });
    signed.collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECRET: &str = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
    const OTHER: &str = "whsec_AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=";

    /// The vector that the libraries of Standard Webhooks test.
    #[test]
    fn a_request_is_signed_like_the_standard_says() {
        let secret = SECRET.parse().unwrap();
        let id = "msg_p5jXN8AQM9LWM0D4loKWxJek";
        let body = br#"{"test": 2432232314}"#;
        assert_eq!(
            signature(&[secret], id, 1_614_265_330, body),
            "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="
        );
    }

    #[test]
    fn each_secret_signs() {
        let secrets: [Secret; 2] = [SECRET.parse().unwrap(), OTHER.parse().unwrap()];
        let both = signature(&secrets, "id", 1, b"body");
        let (one, other) = both.split_once(' ').unwrap();
        assert_eq!(one, signature(&secrets[..1], "id", 1, b"body"));
        assert_eq!(other, signature(&secrets[1..], "id", 1, b"body"));
        assert_ne!(one, other);
        for (id, now_s, body) in [("ie", 1, "body"), ("id", 2, "body"), ("id", 1, "bode")] {
            assert_ne!(both, signature(&secrets, id, now_s, body.as_bytes()));
        }
    }

    #[test]
    fn a_secret_has_24_to_64_bytes_and_is_not_shown() {
        let secret = |bytes: usize| format!("{PREFIX}{}", STANDARD.encode(vec![7; bytes]));
        for (text, fine) in [
            (secret(23), false),
            (secret(24), true),
            (secret(64), true),
            (secret(65), false),
            (secret(32).replace(PREFIX, ""), false),
            (secret(32).replace(PREFIX, "whsk_"), false),
            (format!("{}!", secret(32)), false),
        ] {
            assert_eq!(text.parse::<Secret>().is_ok(), fine, "{text}");
        }
        assert_eq!(format!("{:?}", secret(24).parse::<Secret>()), "Ok(***)");
    }
}
