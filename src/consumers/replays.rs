//! Sends again what a webhook has got before, because an operator asks for it.
//!
//! A replay has a state, which names it, and for each conversation a lagging row, whose heads are its end, and an offset. It
//! ends with these rows. It follows nothing: each gateway reads the shards that the ring gives it, and asks owners for
//! the entries. If two gateways do so for a while, events are repeated.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use futures_util::{FutureExt, StreamExt, future::BoxFuture, stream, stream::FuturesUnordered};
use metrics::counter;
use tokio::time::{Instant, sleep};
use uuid::Uuid;

use super::{
    follower::Line,
    states::States,
    webhooks::{
        dispatcher::Webhook,
        endpoint::Outcome,
        events::{Event, Origin},
    },
};
use crate::{
    chat::{CatchUp, Error},
    clock,
    cluster::Router,
    model::{
        ConsumerName, ConversationId, Cursor, Millis, Seq, UserId, limits::WEBHOOK_BATCH_BYTES_MAX,
    },
    store::{ConsumerState, EventAt, LaggingRow, SKIPPED_DAYS, SkippedRow, Store, consumer_shard},
    tasks::contain,
};

/// Replays at once, of all webhooks.
const REPLAYS_MAX: usize = 16;
/// The time between two looks for new replays.
const LOOK_EVERY: Duration = Duration::from_secs(5);
/// The first and the longest pause between two looks for conversations of a replay, and after a request that failed.
const PAUSE: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));
/// Entries, and rows, that are read at once.
const PAGE: usize = 256;
/// Attempts for an event that is rejected.
const ATTEMPTS: u32 = 3;
/// If the receiver does not take so many conversations in a row, it is down.
const REFUSED_IN_A_ROW: usize = 3;
/// Conversations that are prepared at once.
const PREPARED_AT_ONCE: usize = 32;
/// The reason of a replay of which not all rows are stored yet.
const BEGINS: &str = "it begins";
/// The time after which such a replay was given up by whoever began it.
const BEGINS_WITHIN: Duration = Duration::from_secs(3_600);

/// Runs the replays of a gateway's webhooks.
#[derive(Clone)]
pub(super) struct Replays {
    pub(super) webhooks: Vec<(Webhook, Arc<Line>)>,
    pub(super) router: Arc<Router>,
    pub(super) store: Arc<dyn Store>,
    pub(super) states: Arc<States>,
}

/// Begins a replay of some conversations, each from an entry to its present head. Returns its name, and the number of
/// conversations that have such entries.
///
/// # Errors
/// `UnknownConversation`; `Conflict` if too many replays run; `Unavailable` if the store or an owner does not answer.
pub(super) async fn begin(
    states: &States,
    webhook: &ConsumerName,
    mut from: Vec<(ConversationId, Seq)>,
) -> Result<(ConsumerName, usize), Error> {
    let (router, store) = (&states.router, &states.store);
    let running = store.consumers().await?;
    if running.iter().filter(|(name, _)| name.is_replay()).count() >= REPLAYS_MAX {
        return Err(Error::Conflict(
            "16 replays run at once; wait for one to end".into(),
        ));
    }
    // Of one that is named twice, the lowest.
    from.sort_unstable();
    from.dedup_by_key(|(conversation, _)| *conversation);
    let heads = from.into_iter().map(|(conversation, seq)| async move {
        let row = store.conversation(conversation).await?;
        row.ok_or(Error::UnknownConversation)?;
        let nothing = CatchUp {
            after: Seq::MAX,
            limit: 1,
        };
        let page = router.ask(conversation, UserId::gateway(), nothing).await?;
        Ok((conversation, seq, page.head))
    });
    let heads: Vec<_> = stream::iter(heads)
        .buffered(PREPARED_AT_ONCE)
        .collect()
        .await;
    let heads: Vec<_> = heads.into_iter().collect::<Result<_, Error>>()?;
    let heads: Vec<_> = heads
        .into_iter()
        .filter(|(_, seq, head)| seq <= head)
        .collect();
    let replay = webhook.replay(Uuid::now_v7());
    states.set(&replay, true, Some(BEGINS.into())).await?;
    let count = heads.len();
    let rows = heads.into_iter().map(|(conversation, seq, head)| {
        let replay = &replay;
        async move {
            let start = Cursor(seq.saturating_sub(1), 0);
            let offset = (conversation, replay.clone(), start);
            // First, so that each row that is found has one.
            store.set_offsets(&[offset]).await?;
            let end = Cursor(head, 0);
            store
                .set_lagging(replay, conversation, end, clock::wall())
                .await
        }
    });
    let rows: Vec<_> = stream::iter(rows)
        .buffer_unordered(PREPARED_AT_ONCE)
        .collect()
        .await;
    rows.into_iter().collect::<Result<(), _>>()?;
    states.set(&replay, true, None).await?;
    Ok((replay, count))
}

/// Returns when a replay began. Its name ends with a UUIDv7.
fn began(replay: &ConsumerName) -> Millis {
    let id = replay.as_str().rsplit(':').next();
    let time = id.and_then(|id| id.parse::<Uuid>().ok()?.get_timestamp());
    time.map_or(0, |time| {
        let (seconds, nanos) = time.to_unix();
        i64::try_from(seconds * 1_000 + u64::from(nanos) / 1_000_000).unwrap_or_default()
    })
}

fn age(replay: &ConsumerName) -> Duration {
    let millis = clock::wall() - began(replay);
    Duration::from_millis(u64::try_from(millis).unwrap_or_default())
}

impl Replays {
    /// Looks for replays again and again, and runs them.
    pub(super) async fn run(self) {
        let mut running: FuturesUnordered<BoxFuture<'_, ConsumerName>> = FuturesUnordered::new();
        let mut known: BTreeSet<ConsumerName> = BTreeSet::new();
        loop {
            match self.store.consumers().await {
                Ok(states) => {
                    let replays = states.into_iter().map(|(name, _)| name);
                    for name in replays.filter(ConsumerName::is_replay) {
                        if known.len() < REPLAYS_MAX && known.insert(name.clone()) {
                            running.push(self.run_one(name).boxed());
                        }
                    }
                }
                Err(error) => {
                    crate::seldom::seldom!(WARN, "the replays could not be read", %error);
                }
            }
            let wait = sleep(LOOK_EVERY);
            tokio::pin!(wait);
            loop {
                tokio::select! {
                    biased;
                    Some(ended) = running.next(), if !running.is_empty() => drop(known.remove(&ended)),
                    () = &mut wait => break,
                }
            }
        }
    }

    /// Runs a replay until it has ended everywhere.
    async fn run_one(&self, replay: ConsumerName) -> ConsumerName {
        let (mut pause, mut refused) = (PAUSE.0, Refused::new());
        loop {
            match self.step(&replay, &mut refused).await {
                Ok(Step::Ended) => return replay,
                Ok(Step::Sent) => pause = PAUSE.0,
                Ok(Step::Nothing) => pause = (pause * 2).min(PAUSE.1),
                Err(error) => {
                    tracing::debug!(%replay, %error, "a replay is tried again");
                    pause = (pause * 2).min(PAUSE.1);
                }
            }
            sleep(pause).await;
        }
    }

    /// Sends everything of the shards that the ring gives this gateway.
    async fn step(&self, replay: &ConsumerName, refused: &mut Refused) -> Result<Step, Error> {
        let Some(state) = self.store.consumer_state(replay).await? else {
            return Ok(Step::Ended);
        };
        let begins = state.reason.is_some() && age(replay) < BEGINS_WITHIN;
        let mut pass = Pass::default();
        for shard in (0..=u8::MAX).filter(|shard| self.router.scans(replay, *shard)) {
            let mut after = None;
            loop {
                let rows = self.store.lagging(replay, shard, after, PAGE).await?;
                let Some(last) = rows.last() else {
                    break;
                };
                after = Some(last.conversation);
                for row in &rows {
                    pass.has_rows = true;
                    // Others go on while one is not taken.
                    let until = refused.get(&row.conversation).copied();
                    if until.is_some_and(|until| until > Instant::now()) {
                        continue;
                    }
                    match self.row(replay, row, until.is_some(), &mut pass).await {
                        None => drop(refused.remove(&row.conversation)),
                        Some(after) => {
                            refused.insert(row.conversation, Instant::now() + after);
                        }
                    }
                    if pass.refused_in_a_row >= REFUSED_IN_A_ROW {
                        return Ok(Step::Nothing);
                    }
                }
            }
        }
        if !pass.has_rows && !begins {
            self.end(replay, &state).await
        } else if pass.has_sent {
            Ok(Step::Sent)
        } else {
            Ok(Step::Nothing)
        }
    }

    /// Sends what is left of a conversation, or removes it from a replay that is too old. Returns the time after which it is
    /// to be tried again, if it is.
    async fn row(
        &self,
        replay: &ConsumerName,
        row: &LaggingRow,
        has_failed: bool,
        pass: &mut Pass,
    ) -> Option<Duration> {
        let mut webhooks = self.webhooks.iter();
        let found = webhooks.find(|(webhook, _)| replay.is_replay_of(&webhook.name));
        let is_old = age(replay) > Duration::from_secs(u64::from(SKIPPED_DAYS) * 86_400);
        let sent = match found {
            _ if is_old => {
                let removed = self.store.remove_replay(replay, row.conversation).await;
                removed.map(|()| None).map_err(Error::from)
            }
            Some((webhook, line)) => {
                let sending = self.conversation(replay, webhook, line, row, has_failed);
                let sent = contain("a replay", row.conversation, sending).await;
                sent.unwrap_or_else(|| Err(Error::unavailable("it panicked")))
            }
            // A gateway that has the webhook sends it.
            None => Ok(Some(PAUSE.1)),
        };
        match sent {
            Ok(None) => {
                (pass.has_sent, pass.refused_in_a_row) = (true, 0);
                None
            }
            Ok(again) => {
                pass.refused_in_a_row += 1;
                again
            }
            // Others go on meanwhile.
            Err(error) => {
                tracing::debug!(%replay, conversation = %row.conversation, %error, "it is tried again");
                Some(PAUSE.1)
            }
        }
    }

    /// Ends a replay that has no conversation left, as the gateway of its first shard.
    async fn end(&self, replay: &ConsumerName, state: &ConsumerState) -> Result<Step, Error> {
        if !self.router.scans(replay, 0) {
            return Ok(Step::Nothing);
        }
        for shard in 0..=u8::MAX {
            if !self.store.lagging(replay, shard, None, 1).await?.is_empty() {
                return Ok(Step::Nothing);
            }
        }
        self.store
            .remove_consumer_state(replay, state.version + 1)
            .await?;
        tracing::info!(%replay, "a replay has ended");
        Ok(Step::Ended)
    }

    /// Sends what is left of a conversation. Returns the time after which it is to be tried again, if nothing can be sent now.
    async fn conversation(
        &self,
        replay: &ConsumerName,
        webhook: &Webhook,
        line: &Arc<Line>,
        row: &LaggingRow,
        has_failed: bool,
    ) -> Result<Option<Duration>, Error> {
        let id = row.conversation;
        let offsets = self.store.offsets(id).await?;
        let offset = offsets.iter().find(|(name, _)| name == replay);
        let details = self.store.conversation(id).await?;
        let (Some((_, offset)), Some(details)) = (offset, details) else {
            self.store.remove_replay(replay, id).await?;
            return Ok(None);
        };
        let origin = Origin {
            conversation: id,
            kind: details.details.kind,
            replayed: true,
        };
        let mut reached = offset.0;
        while reached < row.heads.0 {
            if !line.is_enabled()
                || line.is_down()
                || !self.router.scans(replay, consumer_shard(id))
            {
                return Ok(Some(PAUSE.1));
            }
            let page = CatchUp {
                after: reached,
                limit: PAGE,
            };
            let page = self.router.ask(id, UserId::gateway(), page).await?;
            let mut events = Vec::new();
            for entry in page.entries.iter().filter(|entry| entry.seq <= row.heads.0) {
                let state = page.state(entry.seq);
                let event = Event::of_entry(origin, &webhook.filter, entry, state);
                events.extend(event.map(|event| (entry.seq, event)));
                reached = entry.seq;
            }
            if page.entries.is_empty() {
                return Err(Error::Closed);
            }
            let refused = self.send(webhook, line, id, events, has_failed).await?;
            let upto = refused.map_or(reached, |(seq, _)| seq - 1);
            let stored = (id, replay.clone(), Cursor(upto, 0));
            self.store.set_offsets(&[stored]).await?;
            if let Some((_, after)) = refused {
                return Ok(Some(after));
            }
        }
        self.store.remove_replay(replay, id).await?;
        Ok(None)
    }

    /// Sends events in their order. Returns the seq of the first one that the receiver does not take now, and the time after
    /// which it is to be tried again.
    async fn send(
        &self,
        webhook: &Webhook,
        line: &Arc<Line>,
        conversation: ConversationId,
        events: Vec<(Seq, Event)>,
        has_failed: bool,
    ) -> Result<Option<(Seq, Duration)>, Error> {
        let mut left = &events[..];
        // Events in the next request. After a batch that was not taken, one: so those before a bad one arrive.
        let mut most = if has_failed { 1 } else { webhook.limits.batch };
        let mut attempts = 0;
        while let Some((seq, _)) = left.first() {
            let (now, later) = left.split_at(batch(left, most));
            let sent: Vec<Event> = now.iter().map(|(_, event)| event.clone()).collect();
            let (outcome, error) = webhook.receiver.deliver(&sent).await;
            match outcome {
                Outcome::Accepted => {
                    count(webhook, "replayed", now.len());
                    (left, attempts) = (later, 0);
                    most = webhook.limits.batch.min(2 * most);
                }
                Outcome::Rejected(_) if now.len() > 1 => most = 1,
                Outcome::Rejected(status) => {
                    attempts += 1;
                    if attempts < ATTEMPTS {
                        sleep(PAUSE.0 * attempts).await;
                        continue;
                    }
                    let row = SkippedRow {
                        conversation,
                        at: EventAt::Entry(*seq),
                        status: Some(status),
                    };
                    self.store
                        .add_skipped(&webhook.name, clock::today(), &row)
                        .await?;
                    count(webhook, "skipped", 1);
                    (left, attempts) = (later, 0);
                }
                Outcome::Unavailable { retry_after, .. } => {
                    line.note_error(error);
                    let after = PAUSE.1.max(retry_after.unwrap_or_default());
                    return Ok(Some((*seq, after)));
                }
                Outcome::Gone => {
                    self.states.receiver_is_gone(line);
                    return Ok(Some((*seq, PAUSE.1)));
                }
            }
        }
        Ok(None)
    }
}

/// The conversations of a replay that were not taken, each with the time of the next try.
type Refused = BTreeMap<ConversationId, Instant>;

/// What happened in a step of a replay.
#[derive(Default)]
struct Pass {
    has_rows: bool,
    has_sent: bool,
    /// Conversations in a row that the receiver did not take.
    refused_in_a_row: usize,
}

/// The end of a step of a replay.
enum Step {
    Sent,
    Nothing,
    Ended,
}

/// Returns how many events a request has, of so many at most.
fn batch(events: &[(Seq, Event)], most: usize) -> usize {
    let mut bytes = 0;
    let fits = events.iter().take(most).take_while(|(_, event)| {
        bytes += event.bytes();
        bytes <= WEBHOOK_BATCH_BYTES_MAX
    });
    fits.count().max(1)
}

fn count(webhook: &Webhook, result: &'static str, events: usize) {
    let consumer = webhook.name.as_str().to_owned();
    counter!("chat_consumer_events_total", "consumer" => consumer, "result" => result)
        .increment(events as u64);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_replay_knows_its_webhook_and_when_it_began() {
        let before = clock::wall();
        let webhook = ConsumerName::webhook("search");
        let replay = webhook.replay(Uuid::now_v7());
        assert!(replay.is_replay_of(&webhook) && !webhook.is_replay_of(&webhook));
        assert!((before - 1..before + 60_000).contains(&began(&replay)));
        assert!(age(&ConsumerName::push()) > Duration::from_secs(86_400));
    }
}
