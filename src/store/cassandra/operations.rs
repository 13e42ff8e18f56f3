//! The implementation of the trait `Store`.

use std::collections::BTreeSet;

use async_trait::async_trait;
use futures_util::{StreamExt, stream};
use metrics::{counter, gauge};
use uuid::Uuid;

use super::{
    super::{
        Activity, Applied, AppliedChanges, ChangeRow, ChangesTail, ConversationRow, Erasure, Error,
        Heartbeat, InboxKey, InboxRow, InboxWrite, LogPage, LogRow, LogTail, Mark, ParticipantRow,
        PublicPage, ReactorsPage, Result, RingRow, SendRow, Store, Tail, first_of_tail,
        public::{PublicScan, Step},
        reactors::Position,
    },
    Cassandra,
    batches::Unit,
    columns::{
        ConversationColumns, MessageColumns, PUBLIC_SHARDS, ParticipantColumns, PublicColumns, big,
        first_of, public_shard_of, shard_of, shards_of, small, unsigned,
    },
    erase::last_due,
    inbox::InboxColumns,
    ring::{RingColumns, level_column, level_of},
    unavailable,
};
use crate::model::{ClientId, ConversationId, GatewayId, Kind, Millis, Rev, Seq, UserId};

/// Partitions of one listing that are read concurrently.
const SHARDS_AT_ONCE: usize = 16;
/// Rows of an inbox that one request reads by their keys. ScyllaDB refuses more than 100.
const INBOX_ROWS_AT_ONCE: usize = 100;
/// Minutes of a gateway's activity that the repair after a crash reads. Inbox rows are written within seconds.
const ACTIVITY_MINUTES: i32 = 3;

#[async_trait]
impl Store for Cassandra {
    async fn append(
        &self,
        conversation: ConversationId,
        rows: &[LogRow],
        activity: Option<Activity>,
    ) -> Result<()> {
        const OPERATION: &str = "append";
        self.open_buckets(OPERATION, conversation, rows).await?;
        let s = &self.statements;
        let mut units = s.messages(conversation, rows);
        units.extend(rows.iter().map(|row| s.send(conversation, row)));
        units.extend(s.references_of(rows));
        units.extend(
            activity
                .into_iter()
                .flat_map(|a| s.activity(conversation, a)),
        );
        self.batches.write(OPERATION, units).await
    }

    async fn settle(&self, conversation: ConversationId, rows: &[LogRow]) -> Result<()> {
        const OPERATION: &str = "settle";
        self.open_buckets(OPERATION, conversation, rows).await?;
        let s = &self.statements;
        let mut before: Vec<Unit> = rows.iter().map(|row| s.send(conversation, row)).collect();
        // Rule [refs-settle]: the message may be the only one that has the file.
        before.extend(s.references_of(rows));
        self.batches.write(OPERATION, before).await?;
        let units = s.messages(conversation, rows);
        self.batches.write(OPERATION, units).await
    }

    async fn tail(&self, conversation: ConversationId, seqs: u64) -> Result<LogTail> {
        const OPERATION: &str = "tail";
        let s = &self.statements;
        let head: Option<(Option<i64>, Option<i64>, Option<i64>)> =
            self.read_one(OPERATION, &s.head, (conversation.0,)).await?;
        let (bucket, settled, changes_bucket) = head.unwrap_or_default();
        let bucket = bucket.map_or(0, unsigned);
        let settled = settled.map_or(0, unsigned);
        let newest: Option<MessageColumns> = self
            .read_one(OPERATION, &s.newest_message, (conversation.0, big(bucket)))
            .await?;
        // A bucket is recorded before its first row is written, so it may still be empty.
        let newest = match newest {
            Some(row) => row.seq(),
            None => first_of(bucket).saturating_sub(1),
        };
        let first = first_of_tail(newest, seqs);
        let LogPage { mut rows, states } = if newest == 0 {
            LogPage::default()
        } else {
            self.range(OPERATION, conversation, first, newest).await?
        };
        rows.reverse();
        Ok(LogTail {
            tail: Tail {
                first,
                rows,
                settled,
            },
            states,
            may_have_changes: changes_bucket.is_some(),
        })
    }

    async fn log(&self, conversation: ConversationId, from: Seq, to: Seq) -> Result<LogPage> {
        let mut page = self.range("log", conversation, from, to).await?;
        // Rows are newest first, the highest epoch first.
        page.rows.dedup_by_key(|row| row.record.seq);
        page.rows.reverse();
        Ok(page)
    }

    async fn find_ends(&self, conversation: ConversationId, record: bool) -> Result<bool> {
        self.find_heads(conversation, record).await
    }

    async fn set_settled(&self, conversation: ConversationId, seq: Seq) -> Result<()> {
        let values = Box::new((big(seq), big(seq), conversation.0));
        let unit = Unit::one(&self.statements.set_settled, values, 50);
        self.batches.write("set_settled", vec![unit]).await
    }

    async fn append_changes(
        &self,
        conversation: ConversationId,
        rows: &[ChangeRow],
        activity: Option<Activity>,
    ) -> Result<()> {
        const OPERATION: &str = "append_changes";
        self.open_change_buckets(OPERATION, conversation, rows)
            .await?;
        let s = &self.statements;
        let mut units = s.changes(conversation, rows);
        units.extend(
            activity
                .into_iter()
                .flat_map(|a| s.activity(conversation, a)),
        );
        self.batches.write(OPERATION, units).await
    }

    async fn changes_tail(&self, conversation: ConversationId, revs: u64) -> Result<ChangesTail> {
        self.newest_changes(conversation, revs).await
    }

    async fn changes(
        &self,
        conversation: ConversationId,
        from: Rev,
        to: Rev,
    ) -> Result<Vec<ChangeRow>> {
        let mut rows = self.change_range("changes", conversation, from, to).await?;
        // Rows are newest first, the highest epoch first.
        rows.dedup_by_key(|row| row.record.rev);
        rows.reverse();
        Ok(rows)
    }

    async fn set_changes_settled(&self, conversation: ConversationId, rev: Rev) -> Result<()> {
        let values = Box::new((big(rev), big(rev), conversation.0));
        let unit = Unit::one(&self.statements.set_changes_settled, values, 50);
        self.batches.write("set_changes_settled", vec![unit]).await
    }

    async fn apply_changes(
        &self,
        conversation: ConversationId,
        kind: Kind,
        applied: &AppliedChanges,
    ) -> Result<()> {
        let s = &self.statements;
        let mut units = Vec::new();
        let states = applied.states.iter();
        units.extend(states.map(|(seq, state)| s.state(conversation, *seq, state)));
        units.retain(|unit| !unit.statements.is_empty());
        let reactors = applied.reactors.iter();
        units.extend(reactors.flat_map(|row| s.reactor(conversation, kind, row)));
        for write in &applied.inbox {
            units.extend(s.inbox_write(write));
        }
        let references = applied.references.iter().copied();
        units.extend(references.flat_map(|reference| s.changed_reference(reference)));
        let deleted = applied.deleted.iter();
        units.extend(deleted.map(|deleted| s.deleted(conversation, deleted)));
        self.batches.write("apply_changes", units).await
    }

    async fn erase(&self, conversation: ConversationId, erasures: &[Erasure]) -> Result<()> {
        self.erase_entries(conversation, erasures).await
    }

    async fn reactors(
        &self,
        conversation: ConversationId,
        kind: Kind,
        seq: Seq,
        emoji: Option<&str>,
        after: Option<&str>,
        limit: usize,
    ) -> Result<ReactorsPage> {
        let after = after.and_then(|text| Position::read(text, emoji));
        self.reactors_page(conversation, kind, seq, emoji, after, limit)
            .await
    }

    async fn reactions_of(
        &self,
        conversation: ConversationId,
        user: &UserId,
        from: Seq,
        to: Seq,
    ) -> Result<Vec<(Seq, String, bool)>> {
        self.user_reactions(conversation, user, from, to).await
    }

    async fn sends(
        &self,
        conversation: ConversationId,
        sender: &UserId,
        client_id: ClientId,
    ) -> Result<Vec<SendRow>> {
        let values = (conversation.0, sender.as_str(), client_id.0);
        let rows: Vec<(i64, i64)> = self.read("sends", &self.statements.sends, values).await?;
        let send = |(epoch, seq)| SendRow {
            epoch: unsigned(epoch),
            seq: unsigned(seq),
        };
        Ok(rows.into_iter().map(send).collect())
    }

    async fn conversation(&self, conversation: ConversationId) -> Result<Option<ConversationRow>> {
        const OPERATION: &str = "conversation";
        let row: Option<ConversationColumns> = self
            .read_one(OPERATION, &self.statements.conversation, (conversation.0,))
            .await?;
        row.map_or(Ok(None), |row| row.row(OPERATION))
    }

    async fn apply(&self, conversation: ConversationId, applied: &Applied) -> Result<()> {
        const OPERATION: &str = "apply";
        let Applied {
            conversation: row,
            participants,
            inbox,
        } = applied;
        let kind = row.details.kind;
        let s = &self.statements;
        let mut units: Vec<Unit> = participants
            .iter()
            .map(|p| s.participant_row(conversation, kind, p))
            .collect();
        units.extend(inbox.iter().flat_map(|write| s.inbox_write(write)));
        self.batches.write(OPERATION, units).await?;
        // The details come last, so that a conversation that exists has its participants.
        self.batches
            .write(OPERATION, s.details(conversation, row))
            .await
    }

    async fn participants(
        &self,
        conversation: ConversationId,
        kind: Kind,
        after: Option<&UserId>,
        limit: usize,
    ) -> Result<Vec<ParticipantRow>> {
        const OPERATION: &str = "participants";
        let first = after.map_or(0, |user| shard_of(kind, user));
        let shard = async |shard: i32| -> Result<Vec<ParticipantRow>> {
            let mut after = match after {
                Some(user) if shard == first => user.as_str().to_owned(),
                _ => String::new(),
            };
            let mut found = Vec::new();
            loop {
                let values = (conversation.0, shard, after.as_str(), small(limit));
                let rows: Vec<ParticipantColumns> = self
                    .read(OPERATION, &self.statements.participants, values)
                    .await?;
                let full = rows.len() == limit;
                after = rows.last().map(|r| r.user_id.clone()).unwrap_or_default();
                for row in rows {
                    found.extend(row.row(OPERATION)?);
                }
                // Watermarks without a membership may have taken the place of rows.
                if !full || found.len() >= limit {
                    return Ok(found);
                }
            }
        };
        let mut shards = stream::iter((first..shards_of(kind)).map(shard)).buffered(SHARDS_AT_ONCE);
        let mut page = Vec::new();
        while page.len() < limit
            && let Some(rows) = shards.next().await
        {
            page.extend(rows?);
        }
        page.truncate(limit);
        Ok(page)
    }

    async fn participant(
        &self,
        conversation: ConversationId,
        kind: Kind,
        user: &UserId,
    ) -> Result<Option<ParticipantRow>> {
        const OPERATION: &str = "participant";
        let values = (conversation.0, shard_of(kind, user), user.as_str());
        let row: Option<ParticipantColumns> = self
            .read_one(OPERATION, &self.statements.participant, values)
            .await?;
        row.map_or(Ok(None), |row| row.row(OPERATION))
    }

    async fn mark(&self, conversation: ConversationId, kind: Kind, mark: &Mark) -> Result<()> {
        let Mark {
            user,
            read_seq,
            read_texts,
            delivered_seq,
        } = mark;
        let s = &self.statements;
        let mut units = Vec::with_capacity(2);
        units.extend(s.marks(conversation, kind, user, *read_seq, *delivered_seq));
        let read = |seq| s.inbox_read(conversation, user, seq, *read_texts);
        units.extend(read_seq.map(read));
        self.batches.write("mark", units).await
    }

    async fn inbox(&self, user: &UserId) -> Result<Vec<InboxRow>> {
        const OPERATION: &str = "inbox";
        let rows: Vec<InboxColumns> = self
            .read_pages(
                OPERATION,
                &self.statements.inbox,
                (user.as_str().to_owned(),),
            )
            .await?;
        rows.into_iter().map(|r| r.row(OPERATION)).collect()
    }

    async fn inbox_count(&self, user: &UserId, most: usize) -> Result<usize> {
        let statement = &self.statements.inbox_count;
        let values = (
            user.as_str().to_owned(),
            i32::try_from(most).unwrap_or(i32::MAX),
        );
        let rows: Vec<(uuid::Uuid,)> = self.read_pages("inbox_count", statement, values).await?;
        Ok(rows.len())
    }

    async fn inbox_rows(&self, user: &UserId, keys: &[InboxKey]) -> Result<Vec<InboxRow>> {
        const OPERATION: &str = "inbox_rows";
        let mut rows = Vec::with_capacity(keys.len());
        for some in keys.chunks(INBOX_ROWS_AT_ONCE) {
            let ids: Vec<_> = some.iter().map(|key| key.conversation.0).collect();
            let values = (user.as_str(), ids);
            let found: Vec<InboxColumns> = self
                .read(OPERATION, &self.statements.inbox_rows, values)
                .await?;
            for columns in found {
                rows.push(columns.row(OPERATION)?);
            }
        }
        Ok(rows)
    }

    async fn write_inbox(&self, writes: Vec<InboxWrite>) -> Result<()> {
        let units: Vec<Unit> = writes
            .iter()
            .flat_map(|write| self.statements.inbox_write(write))
            .collect();
        self.batches.write("write_inbox", units).await
    }

    async fn public_conversations(
        &self,
        after: Option<ConversationId>,
        limit: usize,
    ) -> Result<PublicPage> {
        const OPERATION: &str = "public_conversations";
        let s = &self.statements;
        let mut scan = PublicScan::new(limit);
        let mut after = after;
        let mut shard = after.map_or(0, public_shard_of);
        while shard < PUBLIC_SHARDS {
            let count = small(scan.rows_wanted());
            let rows: Vec<PublicColumns> = match after {
                None => {
                    let values = (shard, count);
                    self.read(OPERATION, &s.public_first, values).await?
                }
                Some(id) => {
                    let values = (shard, id.0, count);
                    self.read(OPERATION, &s.public, values).await?
                }
            };
            let rows = rows.into_iter().map(|row| {
                let id = ConversationId(row.conversation_id);
                Ok((id, row.row(OPERATION)?))
            });
            match scan.add(rows, shard + 1 == PUBLIC_SHARDS)? {
                Step::Complete => break,
                Step::After(id) => after = Some(id),
                Step::Exhausted => (shard, after) = (shard + 1, None),
            }
        }
        Ok(scan.into_page())
    }

    async fn activity(&self, gateway: GatewayId) -> Result<Vec<ConversationId>> {
        const OPERATION: &str = "activity";
        let newest = &self.statements.newest_activity_minutes;
        let values = (gateway.0, ACTIVITY_MINUTES);
        let minutes: Vec<(i32,)> = self.read(OPERATION, newest, values).await?;
        let mut found = BTreeSet::new();
        for (minute,) in minutes {
            let rows: Vec<(Uuid,)> = self
                .read_pages(OPERATION, &self.statements.activity, (gateway.0, minute))
                .await?;
            found.extend(rows.into_iter().map(|(id,)| ConversationId(id)));
        }
        Ok(found.into_iter().collect())
    }

    async fn forget_activity(&self, gateway: GatewayId) -> Result<()> {
        const OPERATION: &str = "forget_activity";
        let s = &self.statements;
        let minutes: Vec<(i32,)> = self
            .read_pages(OPERATION, &s.activity_minutes, (gateway.0,))
            .await?;
        if minutes.is_empty() {
            return Ok(());
        }
        let minutes = minutes
            .into_iter()
            .map(|(minute,)| Unit::one(&s.delete_activity, Box::new((gateway.0, minute)), 50))
            .collect();
        self.batches.write(OPERATION, minutes).await?;
        let all = Unit::one(&s.delete_activity_minutes, Box::new((gateway.0,)), 50);
        self.batches.write(OPERATION, vec![all]).await
    }

    async fn active_gateways(&self) -> Result<Vec<GatewayId>> {
        let rows: Vec<(Uuid,)> = self
            .read_pages("active_gateways", &self.statements.active_gateways, ())
            .await?;
        Ok(rows.into_iter().map(|(id,)| GatewayId(id)).collect())
    }

    async fn last_seen(&self, user: &UserId) -> Result<Option<Millis>> {
        let row: Option<(Option<i64>,)> = self
            .read_one("last_seen", &self.statements.last_seen, (user.as_str(),))
            .await?;
        Ok(row.and_then(|(at,)| at))
    }

    async fn set_last_seen(&self, seen: &[(UserId, Millis)]) -> Result<()> {
        let unit = |(user, at): &(UserId, Millis)| {
            let values = Box::new((*at, *at, user.as_str().to_owned()));
            Unit::one(&self.statements.set_last_seen, values, 100)
        };
        self.batches
            .write("set_last_seen", seen.iter().map(unit).collect())
            .await
    }

    async fn ring(&self) -> Result<Option<RingRow>> {
        // This does not wait behind other reads, because the gateway's lease depends on it.
        let rows = self.rows("ring", &self.statements.ring, ()).await;
        self.noted(rows.map(|rows| rows.into_iter().next().map(RingColumns::row)))
    }

    async fn propose_ring(&self, before: Option<&RingRow>, next: &RingRow) -> Result<bool> {
        let s = &self.statements;
        let members: Vec<Uuid> = next.members.iter().map(|m| m.0).collect();
        let version = big(next.version);
        let level = next.level.max(before.map_or(0, |before| before.level));
        let id = Uuid::new_v4();
        let level = level_column(level);
        let proposed = match before {
            None => {
                let values = (version, members, id, level);
                self.transaction(&s.insert_ring, values).await
            }
            Some(before) => {
                let values = (version, members, id, level, big(before.version));
                self.transaction(&s.update_ring, values).await
            }
        };
        match proposed {
            Ok(applied) => Ok(applied),
            Err(error) => {
                tracing::info!(%error, "the outcome of a ring proposal is unknown; reading it back");
                self.proposal_made(id).await
            }
        }
    }

    async fn beat(&self, gateway: GatewayId, beat: &Heartbeat) -> Result<()> {
        let counter = big(beat.counter);
        let level = level_column(beat.level);
        let values = (counter, beat.address.as_str(), counter, level, gateway.0);
        // A heartbeat does not wait behind other writes.
        let written = self
            .session
            .execute_unpaged(&self.statements.set_heartbeat.prepared, values);
        let written = written.await.map(drop);
        self.noted(written.map_err(|error| unavailable("beat", "write", error)))
    }

    async fn heartbeat(&self, gateway: GatewayId) -> Result<Option<Heartbeat>> {
        // As the ring: a gateway whose heartbeat is read late looks dead.
        let read = self.rows("heartbeat", &self.statements.heartbeat, (gateway.0,));
        let rows: Vec<(String, i64, Option<i32>)> = read.await?;
        let beat = |(address, counter, level)| Heartbeat {
            address,
            counter: unsigned(counter),
            level: level_of(level),
        };
        Ok(rows.into_iter().next().map(beat))
    }

    async fn sweep(&self) -> Result<()> {
        // All other rows that expire have a time to live.
        self.repeat_erasures(last_due()).await
    }

    fn is_shared(&self) -> bool {
        true
    }

    fn measure(&self) {
        let driver = self.session.get_metrics();
        let requests =
            driver.get_requests_unpaged_num() + driver.get_requests_automatically_paged_num();
        let errors = driver.get_errors_unpaged_num() + driver.get_errors_automatically_paged_num();
        counter!("chat_store_driver_requests_total").absolute(requests);
        counter!("chat_store_driver_errors_total").absolute(errors);
        counter!("chat_store_driver_retries_total").absolute(driver.get_retries_num());
        counter!("chat_store_driver_timeouts_total").absolute(driver.get_request_timeouts());
        gauge!("chat_store_driver_connections").set(driver.get_total_connections() as f64);
        let nodes = self.session.get_cluster_state();
        let (up, down): (Vec<_>, Vec<_>) = nodes
            .get_nodes_info()
            .iter()
            .partition(|node| node.is_connected());
        gauge!("chat_store_nodes", "state" => "up").set(up.len() as f64);
        gauge!("chat_store_nodes", "state" => "down").set(down.len() as f64);
    }

    fn healthy(&self) -> Result<()> {
        match &*self.unreachable() {
            None => Ok(()),
            Some(reason) => Err(Error::Unavailable {
                operation: "ring",
                reason: reason.clone(),
            }),
        }
    }

    async fn close(&self) -> Result<()> {
        self.closing.cancel();
        self.written.cancelled().await;
        Ok(())
    }
}
