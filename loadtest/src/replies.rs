//! Latencies of replies, which are matched to requests by their ids.

use std::{collections::HashMap, time::Duration};

use hdrhistogram::Histogram;
use memchr::memmem;

use crate::{
    client::{SENT, digits, seq},
    latency::{LATENCY_US_MAX, latencies},
};

/// Beginning of a reply, before its id.
const ID: &[u8] = br#"{"id":"#;
const PONG: &[u8] = br#""type":"pong""#;
const OK: &[u8] = br#""type":"ok""#;

/// Requests without a reply, and latencies of replies.
pub(crate) struct Replies {
    /// When each request without a reply was due, in microseconds, by request id.
    due_us: HashMap<u32, u64>,
    /// Microseconds from due to acknowledged.
    pub(crate) sent: Histogram<u64>,
    /// Microseconds from due to the answer of a ping.
    pub(crate) pong: Histogram<u64>,
    /// Microseconds from due to the acknowledgement of a change.
    pub(crate) changed: Histogram<u64>,
    /// Request ids and seqs of acknowledged messages, if somebody takes them.
    seqs: Option<Vec<(u32, u64)>>,
    /// Number of errors.
    pub(crate) refused: u64,
    /// The first error.
    pub(crate) refusal: Option<String>,
}

impl Replies {
    pub(crate) fn new() -> anyhow::Result<Self> {
        Ok(Self {
            due_us: HashMap::new(),
            sent: latencies()?,
            pong: latencies()?,
            changed: latencies()?,
            seqs: None,
            refused: 0,
            refusal: None,
        })
    }

    /// Keeps the seqs of acknowledged messages for `take_seqs` from now on.
    pub(crate) fn keep_seqs(&mut self) {
        self.seqs.get_or_insert_default();
    }

    /// The request ids and seqs of the messages acknowledged since the last call.
    pub(crate) fn take_seqs(&mut self) -> Vec<(u32, u64)> {
        self.seqs.as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// The number of requests without a reply.
    pub(crate) fn missing(&self) -> usize {
        self.due_us.len()
    }

    /// Notes a request.
    pub(crate) fn expect(&mut self, id: u32, due: Duration) {
        self.due_us.insert(id, due.as_micros() as u64);
    }

    /// Notes a frame, which may be a reply.
    pub(crate) fn note(&mut self, frame: &[u8], now_us: u64) {
        let Some(id) = id(frame) else { return };
        let Some(due_us) = self.due_us.remove(&id) else {
            return;
        };
        let late = now_us.saturating_sub(due_us).clamp(1, LATENCY_US_MAX);
        if memmem::find(frame, SENT).is_some() {
            self.sent.saturating_record(late);
            if let (Some(seqs), Some(seq)) = (&mut self.seqs, seq(frame)) {
                seqs.push((id, seq));
            }
        } else if memmem::find(frame, PONG).is_some() {
            self.pong.saturating_record(late);
        } else if memmem::find(frame, OK).is_some() {
            self.changed.saturating_record(late);
        } else {
            self.refused += 1;
            self.refusal
                .get_or_insert_with(|| String::from_utf8_lossy(frame).into_owned());
        }
    }

    /// Forgets the latencies so far.
    pub(crate) fn forget(&mut self) {
        self.sent.reset();
        self.pong.reset();
        self.changed.reset();
    }
}

fn id(frame: &[u8]) -> Option<u32> {
    let rest = frame.strip_prefix(ID)?;
    let end = rest.iter().position(|b| !b.is_ascii_digit())?;
    u32::try_from(digits(&rest[..end])?).ok()
}
