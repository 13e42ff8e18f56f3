//! What a notification says. The same JSON object goes to all providers; APNs and FCM also get a title and a text that
//! the system shows without the app.

use serde::Serialize;

use super::{Content, Notification};
use crate::model::{ConversationId, Kind, MessageId, Seq, UserId, text::cut_before};

/// Bounds of the body and of a conversation's name: characters, and bytes in JSON. FCM and APNs take 4,096 bytes in all,
/// and FCM gets the texts twice, once as JSON in a JSON string.
const BODY: (usize, usize) = (200, 600);
const NAME: (usize, usize) = (64, 200);

/// The content of a notification for apps.
#[derive(Serialize)]
pub(super) struct Payload {
    pub(super) conversation: ConversationId,
    #[serde(skip_serializing_if = "Option::is_none")]
    kind: Option<Kind>,
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    seq: Option<Seq>,
    #[serde(skip_serializing_if = "Option::is_none")]
    message_id: Option<MessageId>,
    #[serde(skip_serializing_if = "Option::is_none")]
    sender: Option<UserId>,
    #[serde(skip_serializing_if = "Option::is_none")]
    body: Option<String>,
    pub(super) badge: u64,
    /// Whether the notification of the conversation is to disappear.
    #[serde(skip_serializing_if = "is_false")]
    pub(super) clear: bool,
    /// The time after which push services drop the notification, in seconds since 1970.
    #[serde(skip)]
    pub(super) expires_at: u64,
}

/// The texts that the system shows. There are none in silent notifications, and none with content `none`.
pub(super) struct Alert<'a> {
    pub(super) title: &'a str,
    /// The sender, if the title is the conversation's name.
    pub(super) subtitle: Option<&'a str>,
    pub(super) body: &'a str,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde calls it")]
fn is_false(flag: &bool) -> bool {
    !flag
}

impl Payload {
    pub(super) fn new(notification: &Notification, content: Content, expires_at: u64) -> Self {
        let message = notification.message.as_ref();
        let shown = message.filter(|_| content == Content::Full);
        Self {
            conversation: notification.conversation,
            kind: shown.map(|message| message.kind),
            name: shown
                .and_then(|message| message.name.as_ref())
                .map(|name| cut(name, NAME)),
            seq: message.map(|message| message.seq),
            message_id: message.map(|message| message.message_id),
            sender: shown.map(|message| message.sender.clone()),
            body: shown.map(|message| cut(&message.body, BODY)),
            badge: notification.badge,
            clear: message.is_none(),
            expires_at,
        }
    }

    pub(super) fn alert(&self) -> Option<Alert<'_>> {
        let (sender, body) = (self.sender.as_ref()?.as_str(), self.body.as_deref()?);
        let name = self.name.as_deref();
        Some(Alert {
            title: name.unwrap_or(sender),
            subtitle: name.map(|_| sender),
            body,
        })
    }

    pub(super) fn json(&self) -> String {
        // Strings, numbers and ids always have a JSON form.
        serde_json::to_string(self).unwrap_or_default()
    }
}

/// Cuts a text between grapheme clusters, after some code points, and before its JSON form gets too long. A cut text ends
/// with "…".
fn cut(text: &str, (chars_max, bytes_max): (usize, usize)) -> String {
    let mut ends = text.char_indices().scan(0, |bytes, (at, c)| {
        let before = *bytes;
        *bytes += json_bytes(c);
        Some((at, before, *bytes))
    });
    let over = ends.by_ref().enumerate();
    let mut last_that_fits = 0;
    for (count, (at, before, after)) in over {
        if count < chars_max && before + '…'.len_utf8() <= bytes_max {
            last_that_fits = at;
        }
        if count == chars_max || after > bytes_max {
            return format!("{}…", cut_before(text, last_that_fits));
        }
    }
    text.to_owned()
}

/// Returns the bytes of a character in a JSON string.
fn json_bytes(c: char) -> usize {
    match c {
        '"' | '\\' | '\n' | '\r' | '\t' | '\u{8}' | '\u{c}' => 2,
        c if c < ' ' => 6,
        c => c.len_utf8(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::consumers::push::fixtures::{message, silent};

    fn value(notification: &Notification, content: Content) -> Value {
        serde_json::from_str(&Payload::new(notification, content, 0).json()).unwrap()
    }

    #[test]
    fn a_notification_says_what_the_device_wants() {
        let notification = message(Some("Lunch"), "See you");
        let conversation = notification.conversation.to_string();
        let id = notification
            .message
            .as_ref()
            .unwrap()
            .message_id
            .to_string();
        let full = json!({
            "conversation": conversation, "kind": "group", "name": "Lunch", "seq": 7, "message_id": id, "sender": "bob",
            "body": "See you", "badge": 3,
        });
        assert_eq!(value(&notification, Content::Full), full);
        let ids = json!({"conversation": conversation, "seq": 7, "message_id": id, "badge": 3});
        assert_eq!(value(&notification, Content::None), ids);
        let clear = json!({"conversation": silent().conversation, "badge": 2, "clear": true});
        assert_eq!(value(&silent(), Content::Full), clear);
        assert_eq!(value(&silent(), Content::None), clear);
    }

    #[test]
    fn the_system_shows_the_conversation_or_else_the_sender() {
        let alert = |name, content| {
            let payload = Payload::new(&message(name, "See you"), content, 0);
            payload.alert().map(|alert| {
                let subtitle = alert.subtitle.map(str::to_owned);
                (alert.title.to_owned(), subtitle, alert.body.to_owned())
            })
        };
        let text = |text: &str| text.to_owned();
        assert_eq!(
            alert(Some("Lunch"), Content::Full),
            Some((text("Lunch"), Some(text("bob")), text("See you")))
        );
        assert_eq!(
            alert(None, Content::Full),
            Some((text("bob"), None, text("See you")))
        );
        assert_eq!(alert(None, Content::None), None);
        assert!(Payload::new(&silent(), Content::Full, 0).alert().is_none());
    }

    #[test]
    fn texts_are_cut_between_characters() {
        assert_eq!(cut("abc", (3, 100)), "abc");
        assert_eq!(cut("abcd", (3, 100)), "ab…");
        assert_eq!(cut("éééé", (3, 100)), "éé…");
        assert_eq!(cut("", (3, 100)), "");
        assert_eq!(cut("éééé", (9, 8)), "éééé");
        assert_eq!(cut("ééééé", (9, 8)), "éé…");
        // An emoji of seven code points, and a letter with a mark, stay whole.
        let family = "👨\u{200d}👩\u{200d}👧\u{200d}👦";
        assert_eq!(
            cut(&family.repeat(3), (20, 600)),
            format!("{family}{family}…")
        );
        assert_eq!(cut("abce\u{301}f", (5, 100)), "abc…");
        assert_eq!(cut(family, (3, 100)), "👨\u{200d}…", "nothing is shorter");
        for text in ["a", "é", "漢", "😀", "\u{1}", "\"", "\n"] {
            let long = text.repeat(1_000);
            let cut = cut(&long, BODY);
            assert!(cut.ends_with('…') && cut.chars().count() <= 200, "{cut}");
            let json = serde_json::to_string(&cut).unwrap();
            assert!((590..=602).contains(&json.len()) || cut.chars().count() == 200);
            assert!(json.len() <= 602, "{json}");
        }
    }
}
