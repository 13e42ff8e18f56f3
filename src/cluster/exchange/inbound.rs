//! Receives the messages of peers, and hands each to the part of this gateway that it is for.

use metrics::counter;

use super::Exchange;
use crate::{
    chat::Guarantee,
    cluster::wire::{
        answers::Asked,
        link::Token,
        message::{Delivered, Interest, PeerMessage, encode},
        peers::Receive,
        question::AnyQuestion,
    },
    model::{Epoch, GatewayId, Topic},
    tasks::lock,
};

impl Receive for Exchange {
    fn receive(&self, from: GatewayId, message: PeerMessage) -> Option<Asked> {
        match message {
            PeerMessage::Ask { id, ask } => return Some(self.asked(from, id, ask)),
            // The link took them for the question that waits: `Peers::received`.
            PeerMessage::Answer { .. } | PeerMessage::AnswerPart { .. } => {}
            PeerMessage::Publish { part, publication } => {
                let done = (publication.guarantee == Guarantee::Confirmed).then(|| {
                    let peers = self.peers.clone();
                    Token::new(move |taken| {
                        peers.send(from, encode(&PeerMessage::Published { part, taken }), None);
                    })
                });
                self.home.deliver(&publication, done.as_ref());
            }
            PeerMessage::Published { part, taken } => self.delivery.acknowledged(part, from, taken),
            PeerMessage::ReadBySender {
                user,
                channel,
                seq,
                texts,
            } => self.home.record_read(channel, &user, (seq, texts)),
            PeerMessage::Deliver(delivered) => {
                if let Delivered::Publication(publication) = &delivered {
                    tracing::trace!(me = %self.me, %from, %publication, "received");
                }
                self.take(delivered);
            }
            PeerMessage::Interests { version, topics } => {
                self.interested(from, &topics, version);
            }
            PeerMessage::Announced { version } => self.announced(from, version),
            PeerMessage::Uninterested { topic } => {
                tracing::trace!(me = %self.me, %from, ?topic, "uninterested");
                self.home.uninterested(from, &topic);
            }
            PeerMessage::Away { user, away } => self.home.presence.away(&user, from, away),
            PeerMessage::Adopted { version } => {
                self.members.peer_adopted(from, version);
                let ring = self.members.ring().load_full();
                let left = ring.version() <= version && !ring.members().contains(&from);
                self.forget_left(|gateway| left && gateway == from);
            }
            PeerMessage::Leaving => {
                lock(&self.leaving).insert(from);
            }
            PeerMessage::Ring(row) => self.members.learn(&row, None),
        }
        None
    }
}

impl Exchange {
    /// Notes that some sockets of a gateway are interested in these topics.
    pub(super) fn interested(&self, gateway: GatewayId, topics: &[Interest], version: Epoch) {
        tracing::trace!(me = %self.me, %gateway, version, ?topics, "announced");
        for interest in topics {
            self.home.interested(gateway, interest, version);
            if let (Topic::Channel(channel), Some(passed)) = (&interest.topic, interest.passed) {
                lock(&self.behind).push((*channel, gateway, passed));
            }
        }
    }

    /// Notes that a member has announced all its interests.
    pub(super) fn announced(&self, member: GatewayId, version: Epoch) {
        tracing::trace!(me = %self.me, %member, version, "announced everything");
        self.home.announced(member, version);
        self.members.wake();
    }

    /// Returns how a question is answered.
    fn asked(&self, from: GatewayId, id: u64, ask: AnyQuestion) -> Asked {
        counter!("chat_operations_forwarded_total").increment(1);
        // Noted at once, because what follows on the link relies on the interest.
        self.here.gateways.note(from, ask.interest());
        let answer = ask.answered(self.here.clone());
        Asked { id, answer }
    }

    /// Delivers something to the sockets here.
    pub(super) fn take(&self, delivered: Delivered) {
        if let Delivered::Resync { channel, .. } = delivered {
            let channels = self.channels.clone();
            self.tasks
                .spawn_until_drained(async move { channels.check_spectators(channel).await });
        }
        self.here.sockets.deliver(delivered);
    }
}
