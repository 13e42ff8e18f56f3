//! The encoded form of a publication. Every build of this protocol writes and reads it, so it stays as it is when
//! [`Publication`] changes: it has no cursor and no guarantee, which follow from the rest. The entries and changes in it are
//! encoded as their types say, so their new fields need `#[serde(default)]`. For `#[serde(with)]`.

use std::sync::Arc;

use serde::{Deserialize, Deserializer, Serialize, Serializer, ser::Error};

use crate::{
    chat::{
        Audience, Body, Changed, Guarantee, MembershipChange, MembershipNotice, Publication,
        Reacted, Receipt,
    },
    model::{ConversationId, Cursor, Details, Entry, FileNotice, Seq, UserId},
};

#[derive(Serialize, Deserialize)]
enum Encoded {
    Entry {
        conversation: ConversationId,
        entry: Arc<Entry>,
        audience: Audience,
    },
    Receipt {
        conversation: ConversationId,
        user: UserId,
        read_seq: Option<Seq>,
        delivered_seq: Option<Seq>,
        audience: Audience,
        away: bool,
    },
    Typing {
        conversation: ConversationId,
        user: UserId,
        audience: Audience,
    },
    Place {
        conversation: ConversationId,
        seq: Seq,
        place: MembershipChange,
        details: Details,
        audience: Audience,
    },
    Changed {
        conversation: ConversationId,
        at: Cursor,
        changed: Arc<Changed>,
        audience: Audience,
        confirmed: bool,
    },
    Reacted {
        conversation: ConversationId,
        reacted: Reacted,
        user: UserId,
    },
    File {
        conversation: ConversationId,
        notice: FileNotice,
        user: UserId,
    },
}

pub(super) fn serialize<S: Serializer>(
    publication: &Publication,
    to: S,
) -> Result<S::Ok, S::Error> {
    let conversation = publication.conversation;
    let audience = publication.audience.clone();
    let encoded = match &publication.body {
        Body::Entry(entry) => Encoded::Entry {
            conversation,
            entry: entry.clone(),
            audience,
        },
        Body::Receipt(receipt) => Encoded::Receipt {
            conversation,
            user: receipt.user.clone(),
            read_seq: receipt.read_seq,
            delivered_seq: receipt.delivered_seq,
            audience,
            away: receipt.away,
        },
        Body::Typing(user) => Encoded::Typing {
            conversation,
            user: user.clone(),
            audience,
        },
        Body::Membership(notice) => Encoded::Place {
            conversation,
            seq: publication.at.0,
            place: notice.change,
            details: notice.details.clone(),
            audience,
        },
        Body::Changed(changed) => Encoded::Changed {
            conversation,
            at: publication.at,
            changed: changed.clone(),
            audience,
            confirmed: publication.guarantee == Guarantee::Confirmed,
        },
        Body::Reacted(reacted) => Encoded::Reacted {
            conversation,
            reacted: reacted.as_ref().clone(),
            user: one_user(audience)?,
        },
        Body::File(notice) => Encoded::File {
            conversation,
            notice: notice.as_ref().clone(),
            user: one_user(audience)?,
        },
        Body::Read(_) => {
            return Err(S::Error::custom(
                "`PeerMessage::ReadBySender` says what a sender has read",
            ));
        }
    };
    encoded.serialize(to)
}

fn one_user<E: Error>(audience: Audience) -> Result<UserId, E> {
    match audience {
        Audience::User(user) => Ok(user),
        Audience::Members(_) | Audience::Channel => {
            Err(E::custom("a reaction or a file is published to its user"))
        }
    }
}

pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Publication, D::Error> {
    Ok(match Encoded::deserialize(from)? {
        Encoded::Entry {
            conversation,
            entry,
            audience,
        } => Publication::entry(conversation, entry, audience),
        Encoded::Receipt {
            conversation,
            user,
            read_seq,
            delivered_seq,
            audience,
            away,
        } => {
            let receipt = Receipt {
                user,
                read_seq,
                delivered_seq,
                away,
            };
            Publication::receipt(conversation, receipt, audience)
        }
        Encoded::Typing {
            conversation,
            user,
            audience,
        } => Publication::typing(conversation, user, audience),
        Encoded::Place {
            conversation,
            seq,
            place: change,
            details,
            audience,
        } => {
            let notice = Arc::new(MembershipNotice { change, details });
            Publication::membership(conversation, seq, notice, audience)
        }
        Encoded::Changed {
            conversation,
            at,
            changed,
            audience,
            confirmed,
        } => Publication::changed(conversation, at, changed, audience, confirmed),
        Encoded::Reacted {
            conversation,
            reacted,
            user,
        } => Publication::reacted(conversation, reacted, user),
        Encoded::File {
            conversation,
            notice,
            user,
        } => Publication::file(conversation, notice, user),
    })
}

#[cfg(test)]
mod tests;
