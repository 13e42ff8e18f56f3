//! Publications outward: from a conversation's owner to the sockets concerned. One publication is encoded
//! once per codec, whatever the number of sockets.

use std::sync::Arc;

use super::home::Home;
use crate::{
    chat::{Audience, Handed, Place, Publication, Publish},
    fanout::{Encoded, Hub},
    model::{ConversationId, Details, Kind, Seq, Topic, UserId},
    protocol::{ConversationChange, ConversationEvent, Event, Message},
    store::{InboxFace, InboxWrite},
};

pub struct Delivery {
    hub: Arc<Hub>,
    home: Arc<Home>,
}

impl Delivery {
    #[must_use]
    pub fn new(hub: Arc<Hub>, home: Arc<Home>) -> Self {
        Self { hub, home }
    }

    fn deliver(&self, conversation: ConversationId, audience: &Audience, event: Event) {
        let event = Encoded::new(event);
        match audience {
            Audience::Members(members) => {
                for (user, _) in &members.users {
                    self.hub.deliver(&Topic::User(user.clone()), &event);
                }
            }
            Audience::Channel => self.hub.deliver(&Topic::Channel(conversation), &event),
            Audience::User(user) => self.hub.deliver(&Topic::User(user.clone()), &event),
        }
    }

    /// A user's place in a conversation decides what their sessions are subscribed to.
    fn place(
        &self,
        conversation: ConversationId,
        seq: Seq,
        place: Place,
        details: &Details,
        user: &UserId,
    ) {
        let face = InboxFace {
            seq,
            kind: details.kind,
            name: details.name.clone(),
            joined_seq: seq,
            last: None,
        };
        let write = InboxWrite {
            user: user.clone(),
            conversation,
            kind: details.kind,
            face: None,
            read_seq: None,
            left_seq: None,
        };
        match (place, details.kind) {
            (Place::Added, Kind::Channel) => {
                self.home.placed(&InboxWrite {
                    face: Some(face),
                    read_seq: Some(seq),
                    ..write
                });
                for session in self.hub.sessions_of(user) {
                    self.hub.subscribe(&Topic::Channel(conversation), &session);
                }
            }
            (Place::Removed, kind) => {
                self.home.placed(&InboxWrite {
                    left_seq: Some(seq),
                    ..write
                });
                if kind == Kind::Channel {
                    for session in self.hub.sessions_of(user) {
                        self.hub
                            .unsubscribe(&Topic::Channel(conversation), &session);
                    }
                }
            }
            // An entry published to its members says it all.
            (Place::Added, Kind::Dm | Kind::Group) | (Place::Updated, _) => {}
        }
    }
}

impl Publish for Delivery {
    fn publish(&self, publication: Publication) -> Handed {
        match publication {
            Publication::Entry {
                conversation,
                entry,
                audience,
            } => {
                // Rule [overlay]: noted first, then delivered. Whoever registers in between is told twice,
                // never not at all.
                match &audience {
                    Audience::Members(members) => {
                        self.home.published(conversation, members, &entry);
                    }
                    Audience::Channel | Audience::User(_) => self.home.placed(&InboxWrite {
                        user: entry.sender.clone(),
                        conversation,
                        kind: Kind::Channel,
                        face: None,
                        read_seq: Some(entry.seq),
                        left_seq: None,
                    }),
                }
                let message = Message::of(conversation, entry.as_ref().clone());
                self.deliver(conversation, &audience, Event::Message(Box::new(message)));
            }
            Publication::Receipt {
                conversation,
                user,
                read_seq,
                delivered_seq,
                audience,
            } => {
                let receipt = Event::Receipt {
                    conversation,
                    user,
                    read_seq,
                    delivered_seq,
                };
                self.deliver(conversation, &audience, receipt);
            }
            Publication::Typing {
                conversation,
                user,
                audience,
            } => {
                self.deliver(
                    conversation,
                    &audience,
                    Event::Typing { conversation, user },
                );
            }
            Publication::Place {
                conversation,
                seq,
                place,
                details,
                audience,
            } => {
                match &audience {
                    Audience::User(user) => self.place(conversation, seq, place, &details, user),
                    Audience::Members(members) => {
                        for (user, _) in &members.users {
                            self.place(conversation, seq, place, &details, user);
                        }
                    }
                    Audience::Channel => {}
                }
                let change = match place {
                    Place::Added => ConversationChange::Added,
                    Place::Removed => ConversationChange::Removed,
                    Place::Updated => ConversationChange::Updated,
                };
                let details = (place != Place::Removed).then_some(details);
                let event = ConversationEvent {
                    conversation,
                    change,
                    details,
                };
                self.deliver(conversation, &audience, Event::Conversation(event));
            }
        }
        Handed::Done
    }
}
