//! Requests about devices and the settings of conversations, and everything that is checked of them.

use base64::{
    Engine as _,
    alphabet::URL_SAFE,
    engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig},
    prelude::BASE64_URL_SAFE_NO_PAD,
};
use reqwest::Url;

use crate::{
    chat::Error,
    gateway::Gateway,
    model::{
        Device, PushProvider, SettingsChange, UserId,
        limits::{DEVICE_ID_BYTES_MAX, MUTED_UNTIL_MAX, TOKEN_BYTES_MAX},
    },
    protocol::{
        Answer, DeviceList, DeviceSet, NamedDevice, Okay, Registration, Request, SettingsSet,
        Subscription, SubscriptionKeys, Switch,
    },
};

/// Bytes of an uncompressed point of P-256, and its first byte.
const PUBLIC_KEY_BYTES: usize = 65;
const UNCOMPRESSED: u8 = 4;
/// Bytes of the secret of a subscription.
const AUTH_BYTES: usize = 16;
/// Browsers write no padding, other clients may.
const BASE64: GeneralPurpose = GeneralPurpose::new(
    &URL_SAFE,
    GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent),
);

/// Answers a request about devices or settings.
pub(super) async fn answer(
    gateway: &Gateway,
    user: UserId,
    request: Request,
) -> Result<Answer, Error> {
    match request {
        Request::DeviceSet(r) => set(gateway, user, r).await,
        Request::DeviceRemove(r) => remove(gateway, user, r).await,
        Request::Devices => list(gateway, user).await,
        Request::SettingsSet(r) => set_settings(gateway, user, r).await,
        _ => Err(Error::invalid("not about devices or settings")),
    }
}

async fn set(gateway: &Gateway, user: UserId, r: DeviceSet) -> Result<Answer, Error> {
    let device = checked(r, gateway.push.is_some())?;
    if let Some(push) = &gateway.push {
        let checked = push.check_device(&device);
        checked.map_err(|invalid| Error::Invalid(invalid.to_string()))?;
    }
    gateway.users.set_device(&user, device).await?;
    Ok(Answer::Ok(Okay::default()))
}

async fn remove(gateway: &Gateway, user: UserId, r: NamedDevice) -> Result<Answer, Error> {
    checked_id(&r.device)?;
    gateway.users.remove_device(&user, r.device).await?;
    Ok(Answer::Ok(Okay::default()))
}

async fn list(gateway: &Gateway, user: UserId) -> Result<Answer, Error> {
    let items = gateway.users.devices(&user).await?;
    let push = gateway.push.as_ref();
    let web_key = push.and_then(|push| push.web_key()).map(Into::into);
    Ok(Answer::Devices(DeviceList { items, web_key }))
}

async fn set_settings(gateway: &Gateway, user: UserId, r: SettingsSet) -> Result<Answer, Error> {
    if r.muted_until.is_none() && r.push.is_none() {
        return Err(Error::invalid("set muted_until or push"));
    }
    if r.muted_until.is_some_and(|until| until > MUTED_UNTIL_MAX) {
        let text = format!("muted_until must be at most {MUTED_UNTIL_MAX}");
        return Err(Error::Invalid(text));
    }
    let change = SettingsChange {
        muted_until: r.muted_until,
        push: r.push.map(Switch::is_on),
    };
    let users = &gateway.users;
    let settings = users.set_settings(&user, r.conversation, change).await?;
    Ok(Answer::Ok(Okay {
        version: Some(settings.version),
        ..Okay::default()
    }))
}

/// Checks a registration. Everything that is known of tokens and endpoints before they are used is checked here.
/// If `hosts_are_known`, the settings of push services say to which hosts the gateway connects.
fn checked(r: DeviceSet, hosts_are_known: bool) -> Result<Device, Error> {
    let DeviceSet {
        device: id,
        registration,
    } = r;
    checked_id(&id)?;
    let Registration {
        provider,
        token,
        subscription,
        content,
    } = registration;
    let token = match (provider, token, subscription) {
        (PushProvider::Web, None, Some(subscription)) => {
            checked_subscription(&subscription, hosts_are_known)?
        }
        (PushProvider::Web, ..) => {
            return Err(Error::invalid("web needs subscription, and no token"));
        }
        (PushProvider::Fcm, Some(token), None) => checked_token(token)?,
        // Hexadecimal digits: equal tokens are stored equally.
        (PushProvider::Apns, Some(token), None) => checked_token(token)?.to_ascii_lowercase(),
        (PushProvider::Fcm | PushProvider::Apns, ..) => {
            return Err(Error::invalid(
                "fcm and apns need token, and no subscription",
            ));
        }
    };
    Ok(Device {
        id,
        provider,
        token,
        content,
        version: 0,
    })
}

fn checked_id(id: &str) -> Result<(), Error> {
    if (1..=DEVICE_ID_BYTES_MAX).contains(&id.len()) && !id.chars().any(char::is_control) {
        return Ok(());
    }
    Err(Error::Invalid(format!(
        "device must have 1 to {DEVICE_ID_BYTES_MAX} bytes, without control characters"
    )))
}

fn checked_token(token: String) -> Result<String, Error> {
    checked_size(&token)?;
    if token.is_empty() || !token.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Err(Error::invalid("token must be visible ASCII characters"));
    }
    Ok(token)
}

fn checked_size(token: &str) -> Result<(), Error> {
    if token.len() <= TOKEN_BYTES_MAX {
        return Ok(());
    }
    Err(Error::TooLarge {
        what: "bytes of a token or subscription".into(),
        max: TOKEN_BYTES_MAX,
    })
}

/// Returns a subscription as it is stored. Equal ones are the same text.
fn checked_subscription(
    subscription: &Subscription,
    hosts_are_known: bool,
) -> Result<String, Error> {
    checked_size(&subscription.endpoint)?;
    let endpoint = checked_endpoint(&subscription.endpoint, hosts_are_known)?;
    let SubscriptionKeys { p256dh, auth } = &subscription.keys;
    let key = |name: &str, text: &str, bytes: usize| {
        checked_size(text)?;
        let key = BASE64.decode(text).ok().filter(|key| key.len() == bytes);
        key.ok_or_else(|| Error::Invalid(format!("{name} must be {bytes} bytes in base64url")))
    };
    let p256dh = key("keys.p256dh", p256dh, PUBLIC_KEY_BYTES)?;
    if p256dh.first() != Some(&UNCOMPRESSED) {
        return Err(Error::invalid("keys.p256dh must be an uncompressed point"));
    }
    let auth = key("keys.auth", auth, AUTH_BYTES)?;
    let stored = Subscription {
        endpoint: endpoint.into(),
        keys: SubscriptionKeys {
            p256dh: BASE64_URL_SAFE_NO_PAD.encode(p256dh),
            auth: BASE64_URL_SAFE_NO_PAD.encode(auth),
        },
    };
    let stored = serde_json::to_string(&stored)
        .map_err(|_| Error::invalid("subscription cannot be stored"))?;
    checked_size(&stored)?;
    Ok(stored)
}

/// Checks the address of a push service: the gateway connects to it. Names that resolve to internal addresses are refused
/// when it connects.
fn checked_endpoint(endpoint: &str, hosts_are_known: bool) -> Result<Url, Error> {
    let invalid = |text: &str| Err(Error::Invalid(format!("subscription.endpoint {text}")));
    let Ok(url) = Url::parse(endpoint) else {
        return invalid("is no URL");
    };
    if url.scheme() != "https" {
        return invalid("must begin with https://");
    }
    if !url.username().is_empty() || url.password().is_some() {
        return invalid("must not have a user");
    }
    if hosts_are_known {
        return Ok(url);
    }
    if url.port().is_some() {
        return invalid("must not have a port");
    }
    // An address, or a name without a dot, is never that of a push service.
    if !url.domain().is_some_and(is_public_name) {
        return invalid("must have the name of a public host");
    }
    Ok(url)
}

/// Names that are never public: <https://www.iana.org/assignments/special-use-domain-names>, and `internal`.
const NOT_PUBLIC: [&str; 7] = [
    "localhost",
    "local",
    "internal",
    "test",
    "invalid",
    "onion",
    "arpa",
];

fn is_public_name(name: &str) -> bool {
    let name = name.strip_suffix('.').unwrap_or(name);
    let last = name.rsplit_once('.').map(|(_, last)| last);
    last.is_some_and(|last| !NOT_PUBLIC.contains(&last))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::PushContent;

    const P256DH: &str =
        "BCVxsr7N_eNgVRqvHtD0zTZsEc6-VV-JvLexhqUzORcxaOzi6-AYWXvTBHm4bjyPjs7Vd8pZGH6SRpkNtoIAiw4";
    const AUTH: &str = "BTBZMqHH6r4Tts7J_aSIgg";

    fn web(endpoint: &str, p256dh: &str, auth: &str) -> Result<Device, Error> {
        let subscription = Subscription {
            endpoint: endpoint.into(),
            keys: SubscriptionKeys {
                p256dh: p256dh.into(),
                auth: auth.into(),
            },
        };
        set(PushProvider::Web, None, Some(subscription))
    }

    fn set(
        provider: PushProvider,
        token: Option<&str>,
        subscription: Option<Subscription>,
    ) -> Result<Device, Error> {
        let set = DeviceSet {
            device: "d".into(),
            registration: Registration {
                provider,
                token: token.map(Into::into),
                subscription,
                content: PushContent::Full,
            },
        };
        checked(set, false)
    }

    #[test]
    fn equal_subscriptions_are_stored_equally() {
        let stored = web("https://push.example.com/a", P256DH, AUTH).unwrap();
        let padded = web(
            "https://PUSH.example.com/a",
            &format!("{P256DH}="),
            &format!("{AUTH}=="),
        );
        assert_eq!(padded.unwrap().token, stored.token);
        let read: Subscription = serde_json::from_str(&stored.token).unwrap();
        assert_eq!(read.keys.auth, AUTH);
    }

    #[test]
    fn only_public_endpoints_are_stored() {
        for endpoint in [
            "http://push.example.com/a",
            "https://127.0.0.1/a",
            "https://[::1]/a",
            "https://2130706433/a",
            "https://0x7f.1/a",
            "https://localhost/a",
            "https://metadata.google.internal/a",
            "https://printer.local./a",
            "https://intranet/a",
            "https://push.example.com:8443/a",
            "https://user@push.example.com/a",
            "file:///etc/passwd",
            "push.example.com",
            "",
        ] {
            let refused = web(endpoint, P256DH, AUTH);
            assert!(matches!(refused, Err(Error::Invalid(_))), "{endpoint}");
        }
        let long = format!("https://push.example.com/{}", "a".repeat(TOKEN_BYTES_MAX));
        assert!(matches!(
            web(&long, P256DH, AUTH),
            Err(Error::TooLarge { .. })
        ));
    }

    #[test]
    fn keys_have_their_lengths() {
        for (p256dh, auth) in [
            (&P256DH[4..], AUTH),
            (P256DH, &AUTH[4..]),
            ("", AUTH),
            (P256DH, "????"),
            (AUTH, P256DH),
            (&P256DH.replacen('B', "C", 1), AUTH),
        ] {
            let refused = web("https://push.example.com/a", p256dh, auth);
            assert!(matches!(refused, Err(Error::Invalid(_))), "{p256dh} {auth}");
        }
    }

    #[test]
    fn a_provider_has_a_token_or_a_subscription() {
        assert!(set(PushProvider::Fcm, Some("a:b-c"), None).is_ok());
        assert!(set(PushProvider::Fcm, None, None).is_err());
        assert!(set(PushProvider::Web, Some("a"), None).is_err());
        for wrong in ["", "a b", "a\n", "ä"] {
            let refused = set(PushProvider::Apns, Some(wrong), None);
            assert!(matches!(refused, Err(Error::Invalid(_))), "{wrong:?}");
        }
        let long = "a".repeat(TOKEN_BYTES_MAX + 1);
        let refused = set(PushProvider::Apns, Some(&long), None);
        assert!(matches!(refused, Err(Error::TooLarge { .. })));
        for (id, ok) in [("", false), ("a", true), ("a\u{7}", false)] {
            assert_eq!(checked_id(id).is_ok(), ok, "{id:?}");
        }
        assert!(checked_id(&"a".repeat(64)).is_ok() && checked_id(&"a".repeat(65)).is_err());
    }
}
