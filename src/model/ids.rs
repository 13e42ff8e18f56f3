//! Identifiers. Each has its own type, so that the compiler finds a confusion.

use std::{fmt, str::FromStr, sync::Arc};

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use uuid::Uuid;

use super::{limits::USER_ID_BYTES_MAX, text::is_plain};

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum InvalidId {
    #[error("a user id has 1 to {USER_ID_BYTES_MAX} bytes, this one has {0}")]
    Length(usize),
    #[error("a user id has only visible characters, and no white space")]
    Characters,
}

/// A user id, from the token's `sub`: 1 to [`USER_ID_BYTES_MAX`] bytes of visible characters without white
/// space.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct UserId(Arc<str>);

impl UserId {
    /// Checks `text` and makes it a user id.
    ///
    /// # Errors
    /// [`InvalidId`] if `text` is empty, too long, or contains a character that is not allowed.
    pub fn new(text: &str) -> Result<Self, InvalidId> {
        if text.is_empty() || text.len() > USER_ID_BYTES_MAX {
            return Err(InvalidId::Length(text.len()));
        }
        if !is_plain(text) {
            return Err(InvalidId::Characters);
        }
        Ok(Self(text.into()))
    }

    /// Returns the actor of the gateways' own operations. A user with the same id gets no additional rights.
    #[must_use]
    pub fn gateway() -> Self {
        Self("gateway".into())
    }

    /// Returns the name under which the store keeps which ranks the gateways have reserved. No user can have it, because it
    /// has a space.
    #[must_use]
    pub fn of_ranks() -> Self {
        Self("reserved ranks".into())
    }

    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for UserId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for UserId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for UserId {
    type Err = InvalidId;

    fn from_str(text: &str) -> Result<Self, InvalidId> {
        Self::new(text)
    }
}

impl Serialize for UserId {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.0)
    }
}

impl<'de> Deserialize<'de> for UserId {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Text;
        impl de::Visitor<'_> for Text {
            type Value = UserId;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a user id")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<UserId, E> {
                UserId::new(text).map_err(E::custom)
            }
        }
        deserializer.deserialize_str(Text)
    }
}

/// Defines a UUID type. It is text in readable formats and 16 bytes in binary ones; both are read in both.
macro_rules! uuid_id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $name(pub Uuid);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(&self.0, f)
            }
        }

        impl FromStr for $name {
            type Err = uuid::Error;

            fn from_str(text: &str) -> Result<Self, uuid::Error> {
                text.parse().map(Self)
            }
        }

        impl Serialize for $name {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                if serializer.is_human_readable() {
                    serializer.serialize_str(self.0.hyphenated().encode_lower(&mut [0; 36]))
                } else {
                    serializer.serialize_bytes(self.0.as_bytes())
                }
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                if deserializer.is_human_readable() {
                    deserializer.deserialize_str(AnyUuid).map(Self)
                } else {
                    deserializer.deserialize_bytes(AnyUuid).map(Self)
                }
            }
        }
    };
}

struct AnyUuid;

impl de::Visitor<'_> for AnyUuid {
    type Value = Uuid;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a UUID")
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<Uuid, E> {
        text.parse()
            .map_err(|_| E::invalid_value(de::Unexpected::Str(text), &self))
    }

    fn visit_bytes<E: de::Error>(self, bytes: &[u8]) -> Result<Uuid, E> {
        Uuid::from_slice(bytes).map_err(|_| E::invalid_value(de::Unexpected::Bytes(bytes), &self))
    }
}

uuid_id! {
    /// The id of a conversation. That of a dm is computed from its two users (version 5). All others are random
    /// (version 4 or 7), so that nobody can create a group with the id of a dm.
    ConversationId
}
uuid_id! {
    /// The id of a message, chosen by its sender. Two requests with the same id are the same message.
    ClientId
}
uuid_id! {
    /// The id of a message for people and other systems: a time UUID (version 1). Its time is the [`Rank`] of the message, which
    /// orders inboxes. The order within a conversation never depends on it.
    MessageId
}
uuid_id! {
    /// The id of an uploaded file: random (version 4), so that nobody can guess one.
    AttachmentId
}
uuid_id! {
    /// The id of a gateway process. Each start has a new one.
    GatewayId
}

/// The name space of dm ids. It is part of the stored format and must never change.
const DM_NAMESPACE: Uuid = Uuid::from_u128(0x6d9c_5d0e_0b0f_4a53_8a0e_6d2f_3c41_77d1);

impl ConversationId {
    /// Returns the id of the dm of these two users, in either order. A user may have one with themselves.
    #[must_use]
    pub fn dm(one: &UserId, other: &UserId) -> Self {
        let (low, high) = if one <= other {
            (one, other)
        } else {
            (other, one)
        };
        // User ids contain no control characters, so the separator cannot be part of one.
        let name = format!("{low}\u{0}{high}");
        Self(Uuid::new_v5(&DM_NAMESPACE, name.as_bytes()))
    }

    #[must_use]
    pub fn random() -> Self {
        Self(Uuid::new_v4())
    }

    /// Returns whether a client may choose this id for a group or a channel.
    #[must_use]
    pub fn may_be_chosen(self) -> bool {
        matches!(self.0.get_version_num(), 4 | 7)
    }
}

/// What inboxes are ordered by: the rank of a conversation's newest entry. It is a time of a hybrid logical clock, in the unit
/// of time UUIDs: 100 ns since 15 October 1582. So it may be ahead of every wall clock.
pub type Rank = u64;

impl MessageId {
    /// Returns the rank of the message. Zero if the id is no time UUID.
    #[must_use]
    pub fn rank(self) -> Rank {
        if self.0.get_version_num() != 1 {
            return 0;
        }
        let (low, middle, high, _) = self.0.as_fields();
        (u64::from(high & 0xfff) << 48) | (u64::from(middle) << 32) | u64::from(low)
    }
}

/// A client connection of this gateway.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub struct SessionId(pub u64);

impl fmt::Display for SessionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:x}", self.0)
    }
}

/// A subject that sessions subscribe to, and gateways with such sessions are interested in.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Serialize, Deserialize)]
pub enum Topic {
    /// All events for one user: messages of dms and groups, changes of membership, receipts, typing.
    User(UserId),
    /// The messages of one channel.
    Channel(ConversationId),
    /// The presence of one user: online or offline.
    Presence(UserId),
}

#[cfg(test)]
mod tests {
    use super::*;

    fn user(name: &str) -> UserId {
        UserId::new(name).unwrap()
    }

    #[test]
    fn a_dm_has_one_id_whoever_asks() {
        let id = ConversationId::dm(&user("alice"), &user("bob"));
        assert_eq!(id, ConversationId::dm(&user("bob"), &user("alice")));
        assert_ne!(id, ConversationId::dm(&user("alice"), &user("bobby")));
        assert!(!id.may_be_chosen());
        // The id is part of the stored format: it must be the same in every version.
        assert_eq!(id.to_string(), "3ed719bc-703a-5957-93c7-9bce59d4ad0e");
    }

    #[test]
    fn user_ids_are_checked() {
        assert_eq!(UserId::new(""), Err(InvalidId::Length(0)));
        assert_eq!(UserId::new(&"x".repeat(65)), Err(InvalidId::Length(65)));
        assert_eq!(UserId::new("a\u{0}b"), Err(InvalidId::Characters));
        assert_eq!(UserId::new("a b"), Err(InvalidId::Characters));
        for hidden in ["al\u{200b}ice", "\u{202e}ecila", "alice\u{ad}", "\u{2800}"] {
            assert_eq!(UserId::new(hidden), Err(InvalidId::Characters));
        }
        assert!(UserId::new("zoë@example.org").is_ok());
    }
}
