//! What a peer asks is worked out here, and sent back: a long answer in parts, and only a few of these at a time, so that
//! it neither exceeds a frame nor fills the queue of its link.

use std::sync::Arc;

use futures_util::{FutureExt, StreamExt, future::BoxFuture, stream::FuturesUnordered};
use tokio::{
    select,
    sync::{Semaphore, mpsc},
};

use super::{
    link::{ASKS_MAX, Link, Token},
    message::{ANSWER_BYTES_MAX, Answer, MESSAGE_BYTES_MAX, Message, PART_BYTES, Refuse, encode},
};
use crate::chat::Error;

/// Bytes of an answer that is queued at once. A longer one waits for its turn.
const SHORT_BYTES: usize = 16 << 10;
/// Bytes of longer answers in the queue of one link.
const QUEUED_BYTES_MAX: usize = 8 << 20;
/// Bytes of longer answers that wait for their turn, for one peer. One more is refused as busy.
const WAITING_BYTES_MAX: usize = 128 << 20;

const _: () = assert!(PART_BYTES <= QUEUED_BYTES_MAX);
const _: () = assert!(ANSWER_BYTES_MAX <= WAITING_BYTES_MAX);

/// A peer's question.
pub(super) struct Asked {
    pub id: u64,
    /// Makes the answer that refuses it.
    pub refuse: Refuse,
    pub answer: BoxFuture<'static, Answer>,
}

impl Asked {
    /// The answer when too many others are being worked out.
    pub(super) fn busy(&self) -> Message {
        Message::Answer {
            id: self.id,
            answer: (self.refuse)(Error::BUSY),
        }
    }
}

/// Answers one peer, in the order in which it asked as far as beginning goes. Outlives connections.
pub(super) async fn answer(link: Arc<Link>, mut work: mpsc::Receiver<Asked>) {
    let turns = Arc::new(Semaphore::new(QUEUED_BYTES_MAX));
    let mut answering = FuturesUnordered::<BoxFuture<'static, (u64, Refuse, Answer)>>::new();
    let mut sending = FuturesUnordered::new();
    let mut waiting = 0;
    loop {
        select! {
           biased;
            Some(bytes) = sending.next(), if !sending.is_empty() => waiting -= bytes,
            Some((id, refuse, answer)) = answering.next(), if !answering.is_empty() => {
                let bytes = encode(&Message::Answer { id, answer });
                let room = WAITING_BYTES_MAX - waiting;
                match refusal(bytes.len(), room, link.takes_parts()) {
                    Some(error) => {
                        let answer = refuse(error);
                        link.send(encode(&Message::Answer { id, answer }), None);
                    }
                    None if bytes.len() <= SHORT_BYTES => link.send(bytes, None),
                    None => {
                        waiting += bytes.len();
                        sending.push(send_long(&link, &turns, id, bytes));
                    }
                }
            }
            more = work.recv(), if answering.len() < ASKS_MAX => match more {
                Some(Asked { id, refuse, answer }) => {
                    answering.push(answer.map(move |answer| (id, refuse, answer)).boxed());
                }
                None => return,
            },
        }
    }
}

/// Why an answer of so many bytes is not sent, if it is not.
fn refusal(bytes: usize, room: usize, takes_parts: bool) -> Option<Error> {
    if bytes > ANSWER_BYTES_MAX {
        return Some(Error::TooLarge {
            what: "an answer between gateways, in bytes,".into(),
            max: ANSWER_BYTES_MAX,
        });
    }
    if bytes > MESSAGE_BYTES_MAX && !takes_parts {
        return Some(Error::unavailable(
            "the answer is too long for a gateway of an earlier version",
        ));
    }
    (bytes > SHORT_BYTES && bytes > room).then_some(Error::BUSY)
}

/// Sends a long answer, each part when it is its turn; returns how many bytes that were.
async fn send_long(
    link: &Arc<Link>,
    turns: &Arc<Semaphore>,
    id: u64,
    bytes: bytes::Bytes,
) -> usize {
    let whole = bytes.len();
    let in_parts = whole > PART_BYTES && link.takes_parts();
    let mut rest = bytes;
    while !rest.is_empty() {
        let next = if in_parts {
            let bytes = rest.split_to(PART_BYTES.min(rest.len()));
            let last = rest.is_empty();
            encode(&Message::AnswerPart { id, bytes, last })
        } else {
            std::mem::take(&mut rest)
        };
        let turn = u32::try_from(next.len().min(QUEUED_BYTES_MAX)).unwrap_or(u32::MAX);
        let Ok(turn) = turns.clone().acquire_many_owned(turn).await else {
            break;
        };
        // The turn ends when the peer has dealt with it.
        link.send(next, Some(Token::new(move |_| drop(turn))));
    }
    whole
}
