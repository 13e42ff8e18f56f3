//! The checks of the settings of push notifications.

use reqwest::Url;

use super::Checks;
use crate::consumers::push::is_host_pattern;

impl Checks<'_> {
    pub(super) fn push(&mut self) {
        let push = &self.loaded.config.push;
        self.check(push.grace_s <= 300, "push.grace_s", "must be from 0 to 300");
        self.check(
            (60..=2_419_200).contains(&push.ttl_s),
            "push.ttl_s",
            "must be from 60 to 2419200 (four weeks, the most that push services allow)",
        );
    }

    pub(super) fn web_push(&mut self) {
        let web = &self.loaded.config.push.web;
        self.check(
            web.key_file.is_some() == web.contact.is_some(),
            "push.web.key_file",
            "must be set together with push.web.contact",
        );
        self.check(
            web.contact.as_deref().is_none_or(is_contact),
            "push.web.contact",
            "must be an address such as mailto:admin@example.org or https://example.org/contact",
        );
        self.check(!web.hosts.is_empty(), "push.web.hosts", "must not be empty");
        for (i, host) in web.hosts.iter().enumerate() {
            self.check(
                is_host_pattern(host),
                &format!("push.web.hosts[{i}]"),
                "must be a name such as push.example.org or *.push.example.org, with or without a port",
            );
        }
    }

    pub(super) fn fcm_and_apns(&mut self) {
        let push = &self.loaded.config.push;
        let (fcm, apns) = (&push.fcm, &push.apns);
        for (key, url) in [("push.fcm.url", &fcm.url), ("push.apns.url", &apns.url)] {
            self.check(
                url.as_deref().is_none_or(is_https_origin),
                key,
                "must be an address without a path, such as https://push.example.org",
            );
        }
        self.check(
            fcm.key_file.is_some() || fcm.url.is_none(),
            "push.fcm.url",
            "must be set together with push.fcm.key_file",
        );
        let set = [&apns.key_id, &apns.team_id, &apns.topic].map(Option::is_some);
        self.check(
            set == [apns.key_file.is_some(); 3],
            "push.apns.key_file",
            "must be set together with push.apns.key_id, push.apns.team_id and push.apns.topic",
        );
        for (key, id) in [
            ("push.apns.key_id", &apns.key_id),
            ("push.apns.team_id", &apns.team_id),
        ] {
            self.check(
                id.as_deref().is_none_or(is_apple_id),
                key,
                "must have 10 characters of A-Z and 0-9",
            );
        }
        let in_topics = |c: char| c.is_ascii_alphanumeric() || "-.".contains(c);
        let is_topic = |topic: &str| !topic.is_empty() && topic.chars().all(in_topics);
        self.check(
            apns.topic.as_deref().is_none_or(is_topic),
            "push.apns.topic",
            "must be the bundle id of the app, such as org.example.chat",
        );
    }
}

fn is_contact(text: &str) -> bool {
    let is_known = |url: &Url| match url.scheme() {
        "mailto" => url.path().contains('@'),
        scheme => scheme == "https",
    };
    Url::parse(text).is_ok_and(|url| is_known(&url))
}

fn is_https_origin(text: &str) -> bool {
    let is_origin = |url: Url| {
        url.scheme() == "https" && url.origin().ascii_serialization() == text.trim_end_matches('/')
    };
    Url::parse(text).is_ok_and(is_origin)
}

fn is_apple_id(id: &str) -> bool {
    let in_ids = |b: u8| b.is_ascii_uppercase() || b.is_ascii_digit();
    id.len() == 10 && id.bytes().all(in_ids)
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use crate::config::{Config, Error};

    /// Returns what is wrong with some settings.
    fn wrong(settings: &str) -> Vec<String> {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        write!(file, "[auth]\ndevelopment = true\n{settings}").unwrap();
        match Config::load(Some(file.path().to_owned())) {
            Ok(_) => Vec::new(),
            Err(Error::Checks(wrong)) => wrong,
            Err(other) => panic!("{other}"),
        }
    }

    #[test]
    fn wrong_settings_of_push_are_named() {
        for (settings, named) in [
            ("[push]\ngrace_s = 301", "push.grace_s"),
            ("[push]\nttl_s = 59", "push.ttl_s"),
            ("[push]\nttl_s = 2419201", "push.ttl_s"),
            ("[push.web]\nkey_file = \"a\"", "push.web.key_file"),
            (
                "[push.web]\ncontact = \"mailto:a@b.org\"",
                "push.web.key_file",
            ),
            (
                "[push.web]\nkey_file = \"a\"\ncontact = \"a@b.org\"",
                "push.web.contact",
            ),
            (
                "[push.web]\nkey_file = \"a\"\ncontact = \"mailto:\"",
                "push.web.contact",
            ),
            ("[push.web]\nhosts = []", "push.web.hosts"),
            ("[push.web]\nhosts = [\"*\"]", "push.web.hosts"),
            ("[push.fcm]\nurl = \"https://a.org\"", "push.fcm.url"),
            (
                "[push.fcm]\nkey_file = \"a\"\nurl = \"http://a.org\"",
                "push.fcm.url",
            ),
            (
                "[push.fcm]\nkey_file = \"a\"\nurl = \"https://a.org/b\"",
                "push.fcm.url",
            ),
            ("[push.apns]\nkey_file = \"a\"", "push.apns.key_file"),
            ("[push.apns]\nkey_id = \"ABC123DEFG\"", "push.apns.key_file"),
            (
                "[push.apns]\nkey_file = \"a\"\nkey_id = \"x\"\nteam_id = \"ABC123DEFG\"\ntopic = \"a\"",
                "push.apns.key_id",
            ),
            (
                "[push.apns]\nkey_file = \"a\"\nkey_id = \"ABC123DEFG\"\nteam_id = \"ABC123DEFG\"\ntopic = \"a/b\"",
                "push.apns.topic",
            ),
        ] {
            let wrong = wrong(settings);
            assert!(
                wrong.len() == 1 && wrong[0].starts_with(named),
                "{settings}: {wrong:?}"
            );
        }
        let right = "[push]\ngrace_s = 0\nttl_s = 60\ncontent = \"none\"\nallow = [\"127.0.0.0/8\"]\n\
            [push.web]\nkey_file = \"a\"\ncontact = \"https://a.org/contact\"\nhosts = [\"localhost:8443\"]\n\
            [push.fcm]\nkey_file = \"a\"\nurl = \"https://localhost:8444\"\n\
            [push.apns]\nkey_file = \"a\"\nkey_id = \"ABC123DEFG\"\nteam_id = \"DEF123GHIJ\"\ntopic = \"org.example.chat\"\n\
            url = \"https://localhost:8445/\"";
        assert_eq!(wrong(right), Vec::<String>::new());
    }
}
