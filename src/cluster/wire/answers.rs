//! Answers the requests of peers. A long answer is sent in parts, and only some parts at a time, so that it neither exceeds
//! a frame nor fills the queue of its link.

use std::sync::Arc;

use futures_util::{FutureExt, StreamExt, future::BoxFuture, stream::FuturesUnordered};
use metrics::counter;
use tokio::{
    select,
    sync::{
        Semaphore,
        mpsc::{self, error::TrySendError},
    },
};

use super::{
    link::{ASKS_MAX, Link, Token},
    message::{ANSWER_BYTES_MAX, PART_BYTES, PeerMessage, encode},
    question::Answered,
};
use crate::{chat::Error, tasks::contain};

/// The bytes of an answer up to which it is queued at once. A longer one waits for its turn.
const SHORT_BYTES: usize = 4 << 10;
/// Bytes of longer answers in the queue of one link.
const QUEUED_BYTES_MAX: usize = 8 << 20;
/// Bytes of longer answers that wait for their turn, for one peer. Above this, answers are refused as busy.
const WAITING_BYTES_MAX: usize = 128 << 20;

const _: () = assert!(PART_BYTES <= QUEUED_BYTES_MAX);
const _: () = assert!(ANSWER_BYTES_MAX <= WAITING_BYTES_MAX);

/// A request of a peer.
pub(crate) struct Asked {
    pub id: u64,
    pub answer: BoxFuture<'static, Answered>,
}

impl Asked {
    /// Passes the request to [`answer`], or refuses it as busy if too many are in progress.
    pub(crate) fn begin(self, link: &Link, answering: &mpsc::Sender<Self>) {
        if let Err(TrySendError::Full(Self { id, .. })) = answering.try_send(self) {
            counter!("chat_peer_asks_refused_total").increment(1);
            link.send(refused(id, Error::BUSY), None);
        }
    }
}

/// Answers one peer. Requests begin in the order in which they arrived. It runs across reconnects.
pub(crate) async fn answer(link: Arc<Link>, mut work: mpsc::Receiver<Asked>) {
    let turns = Arc::new(Semaphore::new(QUEUED_BYTES_MAX));
    let peer = link.peer;
    // If one panics, it is answered too, and the others continue.
    let work_out = |Asked { id, answer }: Asked| {
        let answer = contain("an answer to a gateway", peer, answer);
        answer.map(move |answer| (id, answer.unwrap_or(Err(Error::Closed))))
    };
    let mut answering = none_of(work_out);
    let mut sending = FuturesUnordered::new();
    let mut waiting = 0;
    loop {
        select! {
           biased;
            Some(bytes) = sending.next(), if !sending.is_empty() => waiting -= bytes,
            Some((id, answer)) = answering.next(), if !answering.is_empty() => {
                let bytes = encode(&PeerMessage::Answer { id, answer });
                let room = WAITING_BYTES_MAX - waiting;
                match refusal(bytes.len(), room) {
                    Some(error) => link.send(refused(id, error), None),
                    None if bytes.len() <= SHORT_BYTES => link.send(bytes, None),
                    None => {
                        waiting += bytes.len();
                        sending.push(send_long(&link, &turns, id, bytes));
                    }
                }
            }
            more = work.recv(), if answering.len() < ASKS_MAX => match more {
                Some(asked) => answering.push(work_out(asked)),
                None => return,
            },
        }
    }
}

fn refused(id: u64, error: Error) -> bytes::Bytes {
    encode(&PeerMessage::Answer {
        id,
        answer: Err(error),
    })
}

fn none_of<F: Future>(_: impl Fn(Asked) -> F) -> FuturesUnordered<F> {
    FuturesUnordered::new()
}

/// Returns the reason why an answer of so many bytes is not sent, if there is one.
fn refusal(bytes: usize, room: usize) -> Option<Error> {
    if bytes > ANSWER_BYTES_MAX {
        return Some(Error::TooLarge {
            what: "bytes of an answer between gateways".into(),
            max: ANSWER_BYTES_MAX,
        });
    }
    (bytes > SHORT_BYTES && bytes > room).then_some(Error::BUSY)
}

/// Sends a long answer, each part when it has its turn. Returns the bytes of the answer.
async fn send_long(
    link: &Arc<Link>,
    turns: &Arc<Semaphore>,
    id: u64,
    bytes: bytes::Bytes,
) -> usize {
    let whole = bytes.len();
    let in_parts = whole > PART_BYTES;
    let mut rest = bytes;
    while !rest.is_empty() {
        let next = if in_parts {
            let bytes = rest.split_to(PART_BYTES.min(rest.len()));
            let last = rest.is_empty();
            encode(&PeerMessage::AnswerPart { id, bytes, last })
        } else {
            std::mem::take(&mut rest)
        };
        let turn = u32::try_from(next.len().min(QUEUED_BYTES_MAX)).unwrap_or(u32::MAX);
        let Ok(turn) = turns.clone().acquire_many_owned(turn).await else {
            break;
        };
        // The turn ends when the peer acknowledges the part.
        link.send(next, Some(Token::new(move |_| drop(turn))));
    }
    whole
}

#[cfg(test)]
mod tests {
    use std::task::Poll;

    use futures_util::poll;

    use super::*;
    use crate::{
        cluster::wire::{
            link::CallError,
            message::{MESSAGE_BYTES_MAX, decode_batch},
            question::{AnyAnswer, AnyQuestion, ReadInbox},
        },
        model::{ConversationId, GatewayId, Kind, UserId},
        store::{InboxRow, InboxSummary},
    };

    fn alice() -> UserId {
        UserId::new("alice").unwrap()
    }

    fn ask() -> AnyQuestion {
        let (user, some) = (alice(), None);
        ReadInbox { user, some }.into()
    }

    /// Returns an inbox of about so many bytes.
    fn inbox(bytes: usize) -> Answered {
        const ROW_BYTES: usize = 60_000;
        let row = |number| {
            let mut row = InboxRow::empty(ConversationId(uuid::Uuid::from_u128(number as u128)));
            row.summary = Some(InboxSummary {
                seq: 1,
                kind: Kind::Group,
                name: Some("n".repeat(ROW_BYTES)),
                joined_seq: 1,
                last: None,
                changes: 0,
                texts: 0,
            });
            row
        };
        Ok(AnyAnswer::ReadInbox(
            (0..bytes.div_ceil(ROW_BYTES)).map(row).collect(),
        ))
    }

    /// Connects two gateways. The second one answers the requests of the first one with `answers`. Returns what the first
    /// one gets, and the largest number of bytes that were queued.
    async fn exchange(answers: Vec<Answered>) -> (Vec<Answered>, usize) {
        let link = || Arc::new(Link::new(GatewayId(uuid::Uuid::nil())));
        let (here, there) = (link(), link());
        there.connected(here.resume_point()).unwrap();
        here.connected(there.resume_point()).unwrap();
        let (give, work) = mpsc::channel(ASKS_MAX);
        let mut answering = Box::pin(answer(there.clone(), work));
        let asked = answers.iter().map(|_| here.ask(ask()));
        let asked = futures_util::future::join_all(asked);
        for (answer, id) in answers.into_iter().zip(1..) {
            let answer = std::future::ready(answer).boxed();
            let asked = Asked { id, answer };
            asked.begin(&there, &give);
        }
        let mut most = 0;
        let mut asked = Box::pin(asked);
        let mut handled = 0;
        loop {
            if let Poll::Ready(answers) = poll!(&mut asked) {
                assert!(poll!(&mut answering).is_pending());
                let answers = answers.into_iter().map(Result::unwrap);
                return (answers.collect(), most);
            }
            assert!(poll!(&mut answering).is_pending());
            most = most.max(there.queued().1);
            while let Some(frame) = there.next_batch(false) {
                let (batch, messages) = decode_batch(&frame).unwrap();
                assert!(frame.len() <= MESSAGE_BYTES_MAX + 128);
                for message in messages {
                    match message.unwrap() {
                        PeerMessage::Answer { id, answer } => here.answered(id, answer),
                        PeerMessage::AnswerPart { id, bytes, last } => {
                            here.answered_in_part(id, bytes, last);
                        }
                        other => panic!("{other:?}"),
                    }
                }
                handled = batch.first + u64::from(batch.messages) - 1;
            }
            there.acknowledge(handled);
            tokio::task::yield_now().await;
        }
    }

    fn rows(answer: &Answered) -> Result<usize, &Error> {
        match answer {
            Ok(AnyAnswer::ReadInbox(rows)) => Ok(rows.len()),
            Ok(other) => panic!("{other:?}"),
            Err(error) => Err(error),
        }
    }

    #[tokio::test]
    async fn long_answers_come_in_parts_and_fill_no_queue() {
        let answers = vec![inbox(20 << 20), inbox(1_000), inbox(40 << 20)];
        let (got, most) = exchange(answers).await;
        let rows: Vec<_> = got.iter().map(|answer| rows(answer).unwrap()).collect();
        assert_eq!(rows, [350, 1, 700]);
        assert!(most < QUEUED_BYTES_MAX + (1 << 20), "{most} bytes");
    }

    #[tokio::test]
    async fn an_answer_that_is_too_long_is_refused() {
        let (got, _) = exchange(vec![inbox(ANSWER_BYTES_MAX), inbox(1_000)]).await;
        assert!(matches!(rows(&got[0]), Err(Error::TooLarge { .. })));
        assert_eq!(rows(&got[1]), Ok(1), "others are not");
    }

    #[tokio::test]
    async fn more_than_may_wait_is_refused_as_busy() {
        let answers = (0..4).map(|_| inbox(40 << 20)).collect();
        let (got, _) = exchange(answers).await;
        let busy = got
            .iter()
            .filter(|answer| rows(answer) == Err(&Error::BUSY));
        assert_eq!(busy.count(), 1);
    }

    #[tokio::test]
    async fn who_asks_too_much_is_told() {
        let link = Arc::new(Link::new(GatewayId(uuid::Uuid::nil())));
        let (give, _work) = mpsc::channel(1);
        let asked = |id| Asked {
            id,
            answer: std::future::pending().boxed(),
        };
        drop(give.try_send(asked(1)));
        asked(2).begin(&link, &give);
        let frame = link.next_batch(false).unwrap();
        let (_, messages) = decode_batch(&frame).unwrap();
        assert!(matches!(
            &messages[..],
            [Ok(PeerMessage::Answer { id: 2, answer: Err(error) })] if *error == Error::BUSY
        ));
    }

    /// Too many parts, or parts that cannot be read, lose only their answer.
    #[tokio::test]
    async fn parts_that_cannot_be_read_lose_their_answer() {
        let link = Arc::new(Link::new(GatewayId(uuid::Uuid::nil())));
        let ask = || link.ask(ask());
        let (first, second, third) = (ask(), ask(), ask());
        let part = bytes::Bytes::from(vec![0; PART_BYTES]);
        for _ in 0..=ANSWER_BYTES_MAX / PART_BYTES {
            link.answered_in_part(1, part.clone(), false);
        }
        link.answered_in_part(2, part, true);
        link.answered(3, Ok(AnyAnswer::Disconnect(0)));
        assert_eq!(first.await.err(), Some(CallError::Lost));
        assert_eq!(second.await.err(), Some(CallError::Lost));
        assert!(third.await.is_ok());
    }
}
