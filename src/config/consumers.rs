//! The settings of webhooks, and of the consumers in general.

use std::fmt;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use super::{Config, checks::Checks};
use crate::{
    consumers::{
        address::Class,
        http::Url,
        webhooks::{self, events, signing::Secret},
    },
    model::{
        Kind,
        limits::{HTTP_REQUESTS_MAX, WEBHOOKS_MAX},
    },
};

/// Consumers of the log: webhooks and push.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Consumers {
    /// Seconds between two writes of an offset. After a crash, as many seconds of events are sent again.
    pub offset_flush_s: u64,
    /// Seconds after which it is stored that a conversation lags.
    pub lagging_after_s: u64,
    /// Lagging conversations that are asked to catch up at once.
    pub catch_up: usize,
}

impl Default for Consumers {
    fn default() -> Self {
        Self {
            offset_flush_s: 30,
            lagging_after_s: 30,
            catch_up: 64,
        }
    }
}

/// An address to which events are sent.
#[derive(Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Webhook {
    pub name: String,
    pub url: String,
    /// If empty, all but `message.reacted`.
    #[serde(default)]
    pub events: Vec<String>,
    /// If empty, all.
    #[serde(default)]
    pub kinds: Vec<Kind>,
    #[serde(default)]
    pub secrets: Vec<String>,
    #[serde(default = "batch")]
    pub batch: usize,
    #[serde(default = "connections")]
    pub connections: usize,
    #[serde(default = "timeout_ms")]
    pub timeout_ms: u64,
    /// Networks that are allowed besides public addresses.
    #[serde(default)]
    pub allow: Vec<IpNet>,
    #[serde(default)]
    pub http: bool,
}

fn batch() -> usize {
    100
}

fn connections() -> usize {
    4
}

fn timeout_ms() -> u64 {
    15_000
}

impl fmt::Debug for Webhook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The path of the URL may be secret too.
        let url = self.url.parse::<Url>().ok();
        f.debug_struct("Webhook")
            .field("name", &self.name)
            .field("host", &url.as_ref().and_then(Url::host_str))
            .field("secrets", &self.secrets.len())
            .finish_non_exhaustive()
    }
}

impl Config {
    /// Returns the webhooks. Settings that are wrong were refused at the start, and are left out.
    #[must_use]
    pub fn webhooks(&self) -> Vec<webhooks::Settings> {
        let settings = |webhook: &Webhook| webhook.settings(self.auth.development);
        self.webhooks.iter().filter_map(settings).collect()
    }
}

impl Webhook {
    fn settings(&self, development: bool) -> Option<webhooks::Settings> {
        let events = self.events.iter().map(|name| name.parse().ok());
        let secrets = self.secrets.iter().map(|text| text.parse().ok());
        Some(webhooks::Settings {
            name: self.name.clone(),
            url: self.url.parse().ok()?,
            class: self.class(development).into(),
            filter: events::Filter {
                events: events.collect::<Option<_>>()?,
                kinds: self.kinds.clone(),
            },
            secrets: secrets.collect::<Option<_>>()?,
            batch: self.batch,
            connections: self.connections,
            timeout: std::time::Duration::from_millis(self.timeout_ms),
        })
    }

    fn class(&self, development: bool) -> Class {
        Class::Operator {
            allow: self.allow.clone(),
            http: self.http,
            development,
        }
    }
}

impl Checks<'_> {
    pub(super) fn consumers(&mut self) {
        let Config { consumers, .. } = &self.loaded.config;
        for (name, value, most) in [
            ("offset_flush_s", consumers.offset_flush_s, 1..=300),
            ("lagging_after_s", consumers.lagging_after_s, 5..=60),
            ("catch_up", consumers.catch_up as u64, 1..=1_024),
        ] {
            self.within(&format!("consumers.{name}"), value, most);
        }
    }

    pub(super) fn webhooks(&mut self) {
        let Config { webhooks, .. } = &self.loaded.config;
        let text = format!("there can be at most {WEBHOOKS_MAX}");
        self.check(webhooks.len() <= WEBHOOKS_MAX, "webhooks", &text);
        let connections: usize = webhooks.iter().map(|webhook| webhook.connections).sum();
        let text = format!("all connections together must be at most {HTTP_REQUESTS_MAX}");
        self.check(connections <= HTTP_REQUESTS_MAX, "webhooks", &text);
        for (i, webhook) in webhooks.iter().enumerate() {
            let at = format!("webhooks[{i}]");
            let is_new = webhooks[..i].iter().all(|other| other.name != webhook.name);
            let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
            let is_name = (1..=32).contains(&webhook.name.len()) && webhook.name.chars().all(plain);
            self.check(
                is_name && is_new,
                &format!("{at}.name"),
                "must be 1 to 32 characters of a-z, 0-9 and -, and no other webhook may have it",
            );
            self.webhook_url(&at, webhook);
            self.webhook_lists(&at, webhook);
            self.within(&format!("{at}.batch"), webhook.batch as u64, 1..=1_000);
            let connections = webhook.connections as u64;
            self.within(&format!("{at}.connections"), connections, 1..=64);
            self.within(
                &format!("{at}.timeout_ms"),
                webhook.timeout_ms,
                1_000..=30_000,
            );
        }
    }

    fn webhook_url(&mut self, at: &str, webhook: &Webhook) {
        let key = format!("{at}.url");
        let Ok(url) = webhook.url.parse::<Url>() else {
            let text = "must be an address such as https://chat.example.org/hook";
            return self.check(false, &key, text);
        };
        self.check(
            url.username().is_empty() && url.password().is_none(),
            &key,
            "must not contain a user or password: requests are signed with webhooks.secrets",
        );
        let class = webhook.class(self.loaded.config.auth.development);
        let text = class.check_url(&url).err().unwrap_or_default();
        let hint =
            "Allow private networks with allow = [\"10.0.0.0/8\"], and http with http = true";
        self.check(text.is_empty(), &key, &format!("{text}. {hint}"));
    }

    fn webhook_lists(&mut self, at: &str, webhook: &Webhook) {
        let names = events::EventType::ALL.map(events::EventType::name);
        let text = format!("must be one of {}", names.join(", "));
        for (i, name) in webhook.events.iter().enumerate() {
            let key = format!("{at}.events[{i}]");
            self.check(names.contains(&name.as_str()), &key, &text);
        }
        let key = format!("{at}.secrets");
        let count = webhook.secrets.len();
        self.check((1..=4).contains(&count), &key, "there must be 1 to 4");
        for secret in &webhook.secrets {
            // The secret itself is not shown.
            let text = secret.parse::<Secret>().err().unwrap_or_default();
            let hint = "Generate one with: echo whsec_$(openssl rand -base64 32)";
            self.check(text.is_empty(), &key, &format!("{text}. {hint}"));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    const SECRET: &str = "whsec_AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=";

    /// Loads a file with these lines of one webhook besides a name and a secret.
    fn load(lines: &str) -> Result<super::super::Loaded, String> {
        load_all(&format!(
            "[[webhooks]]\nname = \"crm\"\nsecrets = [\"{SECRET}\"]\n{lines}"
        ))
    }

    fn load_all(text: &str) -> Result<super::super::Loaded, String> {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        write!(file, "[auth]\ndevelopment = true\n{text}").unwrap();
        Config::load(Some(file.path().into())).map_err(|error| error.to_string())
    }

    fn wrong(lines: &str) -> String {
        match load(lines) {
            Ok(_) => panic!("accepted: {lines}"),
            Err(text) => text,
        }
    }

    const URL: &str = "url = \"https://crm.example.org/hook?token=hidden\"\n";

    #[test]
    fn a_webhook_has_defaults_and_shows_no_secrets() {
        let loaded = load(URL).unwrap();
        let [settings] = &loaded.config.webhooks()[..] else {
            panic!("there is one");
        };
        assert_eq!((settings.batch, settings.connections), (100, 4));
        assert_eq!(settings.timeout.as_secs(), 15);
        assert_eq!(settings.filter, events::Filter::default());
        for text in [
            format!("{:?}", loaded.config),
            format!("{:?}", settings.secrets),
            loaded.show(),
        ] {
            assert!(!text.contains("AAECAwQF"), "{text}");
        }
        assert!(!format!("{:?}", loaded.config).contains("hidden"));
    }

    #[test]
    fn a_webhook_is_checked() {
        let also = |line: &str| wrong(&format!("{URL}{line}"));
        assert!(also("events = [\"message.sent\"]").contains("message.created"));
        assert!(also("kinds = [\"team\"]").contains("kinds"));
        assert!(also("batch = 1001").contains("from 1 to 1000"));
        assert!(also("connections = 65").contains("from 1 to 64"));
        assert!(also("timeout_ms = 999").contains("from 1000 to 30000"));
        assert!(also("allow = [\"10.0.0.0/33\"]").contains("allow"));
        for (url, part) in [
            ("crm.example.org", "such as https://"),
            ("http://crm.example.org/", "http = true"),
            ("https://10.0.0.7/", "private"),
            ("https://[::ffff:10.0.0.7]/", "IPv4"),
            ("https://me:pw@example.org/", "user or password"),
            ("ftp://example.org/", "only https"),
        ] {
            let text = wrong(&format!("url = \"{url}\""));
            assert!(text.contains(part), "{url}: {text}");
        }
        assert!(load("url = \"http://127.0.0.1:3000/\"").is_ok());
        assert!(load("url = \"https://10.0.0.7/\"\nallow = [\"10.0.0.0/8\"]").is_ok());
        let webhook = |name: &str, secrets: &str, more: &str| {
            format!("[[webhooks]]\nname = \"{name}\"\nsecrets = {secrets}\n{URL}{more}\n")
        };
        let one = format!("[\"{SECRET}\"]");
        assert!(load_all(&webhook("a-1", &one, "")).is_ok());
        for text in [
            webhook("A", &one, ""),
            webhook("", &one, ""),
            webhook(&"a".repeat(33), &one, ""),
            webhook("a:b", &one, ""),
            webhook("a", "[]", ""),
            webhook("a", "[\"whsec_aGk=\"]", ""),
            webhook("a", &format!("{:?}", [SECRET; 5]), ""),
            webhook("a", &one, "") + &webhook("a", &one, ""),
            (0..17)
                .map(|i| webhook(&format!("a{i}"), &one, ""))
                .collect(),
            (0..5)
                .map(|i| webhook(&format!("a{i}"), &one, "connections = 64"))
                .collect(),
        ] {
            let error = load_all(&text).err().unwrap_or_default();
            assert!(error.contains("webhooks"), "accepted: {text}");
            assert!(!error.contains("aGk=") && !error.contains("AAECAwQF"));
        }
    }

    #[test]
    fn the_general_settings_have_bounds() {
        for (line, part) in [
            ("offset_flush_s = 0", "from 1 to 300"),
            ("offset_flush_s = 301", "from 1 to 300"),
            ("lagging_after_s = 61", "from 5 to 60"),
            ("catch_up = 0", "from 1 to 1024"),
        ] {
            let error = load_all(&format!("[consumers]\n{line}"))
                .err()
                .unwrap_or_default();
            assert!(error.contains(part), "{line}: {error}");
        }
    }
}
