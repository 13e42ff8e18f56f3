//! The conformance suite of all backends: `check(&store)` works on an empty or a used store, any number of times. It
//! panics with the broken promise.

mod changes;
mod consumers;
mod erasure;
mod files;

use std::{collections::BTreeSet, sync::Arc};

#[cfg(test)]
pub(super) use erasure::write_and_erase;
pub use erasure::{Doomed, write_marked};
use futures_util::{StreamExt as _, future::join_all, stream};

use super::{
    Activity, Applied, ConversationRow, Heartbeat, InboxKey, InboxRow, InboxSummary, InboxWrite,
    LogRow, Mark, ParticipantRow, Result, RingRow, Store,
};
use crate::{
    clock,
    model::{
        ClientId, Content, ConversationId, DeletedSeqs, Details, Entry, GatewayId, Kind,
        Participant, Posting, Role, Seq, UserId,
        limits::{PAGE_ITEMS_MAX, SCAN_ROWS_MAX},
    },
};

type Checked = Result<()>;

/// Runs the whole suite.
///
/// # Errors
/// The error of an operation that should succeed.
///
/// # Panics
/// Panics if a promise of [`Store`] is broken.
pub async fn check(store: &dyn Store) -> Checked {
    a_log_is_read_as_it_was_written(store).await?;
    the_highest_epoch_is_read(store).await?;
    the_tail_holds_every_epoch(store).await?;
    client_ids_are_found_by_epoch(store).await?;
    many_appends_at_once_all_land(store).await?;
    a_late_change_of_a_conversation_changes_nothing(store).await?;
    a_late_mark_changes_nothing(store).await?;
    a_late_inbox_row_changes_nothing(store).await?;
    a_late_last_seen_changes_nothing(store).await?;
    participants_are_paged(store, Kind::Group).await?;
    participants_are_paged(store, Kind::Channel).await?;
    an_inbox_is_one_read(store).await?;
    rows_of_an_inbox_are_read_by_their_keys(store).await?;
    public_conversations_are_listed(store).await?;
    activity_is_remembered_and_forgotten(store).await?;
    a_ring_version_is_taken_once(store).await?;
    a_level_rises_and_never_falls(store).await?;
    a_heartbeat_only_goes_up(store).await?;
    changes::check(store).await?;
    erasure::what_is_erased_stays_erased(store).await?;
    files::check(store).await?;
    consumers::check(store).await?;
    store.sweep().await?;
    store.healthy()
}

fn user(name: &str) -> UserId {
    UserId::new(name).unwrap_or_else(|e| panic!("{name}: {e}"))
}

fn somebody() -> UserId {
    user(&format!("user-{}", uuid::Uuid::new_v4()))
}

fn client_id() -> ClientId {
    ClientId(uuid::Uuid::new_v4())
}

fn row(seq: Seq, epoch: u64, body: &str) -> LogRow {
    let at = clock::wall();
    LogRow {
        record: Arc::new(Entry {
            seq,
            message_id: clock::message_id(at),
            client_id: client_id(),
            sender: user("alice"),
            at,
            content: Content::text(body),
            texts: 0,
        }),
        epoch,
        settled: seq.saturating_sub(1),
        settle_end: 0,
    }
}

fn seqs(rows: &[LogRow]) -> Vec<Seq> {
    rows.iter().map(|r| r.record.seq).collect()
}

async fn a_log_is_read_as_it_was_written(store: &dyn Store) -> Checked {
    let id = ConversationId::random();
    assert_eq!(store.tail(id, 10).await?.tail.rows, []);
    assert_eq!(store.log(id, 1, 10).await?.rows, []);
    // The rows cross the border of a bucket, which has 4,096 positions.
    let rows: Vec<_> = (1..=4_200)
        .map(|seq| row(seq, 1, &format!("body {seq}")))
        .collect();
    for chunk in rows.chunks(64) {
        store.append(id, chunk, None).await?;
    }
    assert_eq!(store.log(id, 1, 3).await?.rows, rows[..3]);
    assert_eq!(store.log(id, 4_090, 4_100).await?.rows, rows[4_089..4_100]);
    assert_eq!(store.log(id, 4_199, 9_999).await?.rows, rows[4_198..]);
    assert_eq!(store.tail(id, 128).await?.tail.rows, rows[4_200 - 128..]);
    // Repeating rows changes nothing.
    store.append(id, &rows[4_000..4_100], None).await?;
    assert_eq!(store.log(id, 4_000, 4_100).await?.rows, rows[3_999..4_100]);
    assert_eq!(store.tail(id, 1).await?.tail.settled, 0);
    store.set_settled(id, 4_200).await?;
    store.set_settled(id, 4_100).await?;
    assert_eq!(store.tail(id, 1).await?.tail.settled, 4_200);
    Ok(())
}

async fn the_highest_epoch_is_read(store: &dyn Store) -> Checked {
    let id = ConversationId::random();
    let old = [row(1, 1, "old 1"), row(2, 1, "old 2"), row(3, 1, "old 3")];
    let new = [LogRow {
        settle_end: 2,
        ..row(2, 3, "new 2")
    }];
    store.settle(id, &new).await?;
    store.append(id, &old, None).await?;
    let read = store.log(id, 1, 3).await?.rows;
    assert_eq!(read, [old[0].clone(), new[0].clone(), old[2].clone()]);
    Ok(())
}

async fn the_tail_holds_every_epoch(store: &dyn Store) -> Checked {
    let id = ConversationId::random();
    store
        .append(id, &[row(1, 1, "a"), row(2, 1, "b"), row(3, 1, "c")], None)
        .await?;
    store
        .append(id, &[row(3, 2, "d"), row(5, 2, "e")], None)
        .await?;
    assert_eq!(seqs(&store.tail(id, 3).await?.tail.rows), [3, 3, 5]);
    assert_eq!(seqs(&store.tail(id, 100).await?.tail.rows), [1, 2, 3, 3, 5]);
    Ok(())
}

async fn client_ids_are_found_by_epoch(store: &dyn Store) -> Checked {
    let id = ConversationId::random();
    let first = row(7, 1, "x");
    let moved = Arc::new(Entry {
        seq: 9,
        ..Entry::clone(&first.record)
    });
    let again = LogRow {
        epoch: 4,
        record: moved,
        settle_end: 9,
        ..first.clone()
    };
    store.append(id, std::slice::from_ref(&first), None).await?;
    store.settle(id, std::slice::from_ref(&again)).await?;
    let mut found = store
        .sends(id, &first.record.sender, first.record.client_id)
        .await?;
    found.sort_by_key(|s| s.epoch);
    assert_eq!(
        found.iter().map(|s| (s.epoch, s.seq)).collect::<Vec<_>>(),
        [(1, 7), (4, 9)]
    );
    assert_eq!(
        store.sends(id, &somebody(), first.record.client_id).await?,
        []
    );
    assert_eq!(
        store.sends(id, &first.record.sender, client_id()).await?,
        []
    );
    Ok(())
}

async fn many_appends_at_once_all_land(store: &dyn Store) -> Checked {
    let id = ConversationId::random();
    let rows: Vec<_> = (1..=500).map(|seq| row(seq, 1, "at once")).collect();
    let writes = rows
        .iter()
        .map(|r| store.append(id, std::slice::from_ref(r), None));
    join_all(writes)
        .await
        .into_iter()
        .collect::<Result<Vec<_>>>()?;
    assert_eq!(store.log(id, 1, 1_000).await?.rows, rows);
    Ok(())
}

fn details(name: &str) -> Details {
    Details {
        kind: Kind::Group,
        name: Some(name.into()),
        created_at: 1_700_000_000_000,
        created_by: user("alice"),
        posting: Posting::Everyone,
        public: true,
    }
}

fn applied(name: &str, seq: Seq, participants: Vec<ParticipantRow>) -> Applied {
    let conversation = ConversationRow {
        details: details(name),
        participant_count: seq,
        seq,
    };
    Applied {
        conversation,
        participants,
        inbox: Vec::new(),
    }
}

fn mark(user: &UserId, read_seq: Option<Seq>, delivered_seq: Option<Seq>) -> Mark {
    Mark {
        user: user.clone(),
        read_seq,
        read_texts: 0,
        delivered_seq,
    }
}

async fn a_late_change_of_a_conversation_changes_nothing(store: &dyn Store) -> Checked {
    let id = ConversationId::random();
    let bob = somebody();
    let joined = ParticipantRow {
        participant: Participant::joining(bob.clone(), Role::Member, 2),
        seq: 2,
    };
    let mut promoted = joined.clone();
    promoted.participant.role = Role::Admin;
    promoted.seq = 5;
    store
        .apply(id, &applied("second", 5, vec![promoted.clone()]))
        .await?;
    store.apply(id, &applied("first", 2, vec![joined])).await?;
    let read = store
        .conversation(id)
        .await?
        .unwrap_or_else(|| panic!("it was written"));
    assert_eq!(
        (
            read.details.name.as_deref(),
            read.participant_count,
            read.seq
        ),
        (Some("second"), 5, 5)
    );
    assert_eq!(
        store.participant(id, Kind::Group, &bob).await?,
        Some(promoted)
    );
    Ok(())
}

async fn a_late_mark_changes_nothing(store: &dyn Store) -> Checked {
    let id = ConversationId::random();
    let bob = somebody();
    let admin = ParticipantRow {
        participant: Participant::joining(bob.clone(), Role::Admin, 2),
        seq: 2,
    };
    store.apply(id, &applied("marks", 2, vec![admin])).await?;
    for (read_seq, delivered_seq) in [(9, 11), (4, 3)] {
        let mark = mark(&bob, Some(read_seq), Some(delivered_seq));
        store.mark(id, Kind::Group, &mark).await?;
    }
    let p = store
        .participant(id, Kind::Group, &bob)
        .await?
        .unwrap_or_else(|| panic!("it was written"))
        .participant;
    assert_eq!((p.read_seq, p.delivered_seq, p.role), (9, 11, Role::Admin));
    Ok(())
}

async fn a_late_inbox_row_changes_nothing(store: &dyn Store) -> Checked {
    let id = ConversationId::random();
    let bob = somebody();
    let summary = |seq, name: &str| {
        let last = Some(row(seq, 1, name).record.last());
        Some(InboxSummary {
            seq,
            kind: Kind::Group,
            name: Some(name.into()),
            joined_seq: 2,
            last,
            changes: 0,
            texts: 0,
        })
    };
    let write = |summary, read_seq, left_seq| InboxWrite {
        summary,
        read_seq,
        left_seq,
        ..InboxWrite::of(bob.clone(), id, Kind::Group)
    };
    store
        .mark(id, Kind::Group, &mark(&bob, Some(9), None))
        .await?;
    // The two summaries are in one call, the newer one first; it is then written a second time.
    let new = write(summary(8, "new"), Some(3), None);
    store
        .write_inbox(vec![new.clone(), write(summary(7, "old"), None, None)])
        .await?;
    store
        .write_inbox(vec![write(summary(6, "older"), Some(1), None)])
        .await?;
    store.write_inbox(vec![new.clone()]).await?;
    let inbox = store.inbox(&bob).await?;
    assert_eq!(inbox.len(), 1);
    assert_eq!(
        (&inbox[0].summary, inbox[0].read_seq, inbox[0].left_seq),
        (&new.summary, 9, None)
    );
    store.write_inbox(vec![write(None, None, Some(10))]).await?;
    store.write_inbox(vec![write(None, None, Some(1))]).await?;
    assert_eq!(store.inbox(&bob).await?[0].left_seq, Some(10));
    Ok(())
}

async fn a_late_last_seen_changes_nothing(store: &dyn Store) -> Checked {
    let bob = somebody();
    store.set_last_seen(&[(bob.clone(), 2_000)]).await?;
    store.set_last_seen(&[(bob.clone(), 1_000)]).await?;
    assert_eq!(store.last_seen(&bob).await?, Some(2_000));
    assert_eq!(store.last_seen(&somebody()).await?, None);
    Ok(())
}

async fn participants_are_paged(store: &dyn Store, kind: Kind) -> Checked {
    let id = ConversationId::random();
    let rows: Vec<_> = (0..25)
        .map(|i| {
            let participant = Participant::joining(user(&format!("member-{i}")), Role::Member, 1);
            ParticipantRow {
                participant,
                seq: 1,
            }
        })
        .collect();
    let mut pages = applied("pages", 1, rows);
    pages.conversation.details.kind = kind;
    store.apply(id, &pages).await?;
    let mut seen = BTreeSet::new();
    let mut after: Option<UserId> = None;
    loop {
        let page = store.participants(id, kind, after.as_ref(), 10).await?;
        assert!(page.len() <= 10);
        after = page.last().map(|r| r.participant.user.clone());
        let full = page.len() == 10;
        for row in page {
            assert!(seen.insert(row.participant.user), "each participant once");
        }
        if !full {
            break;
        }
    }
    assert_eq!(seen.len(), 25);
    assert_eq!(
        store
            .participant(id, kind, &user("member-2"))
            .await?
            .map(|r| r.seq),
        Some(1)
    );
    assert_eq!(store.participant(id, kind, &user("member")).await?, None);
    Ok(())
}

async fn an_inbox_is_one_read(store: &dyn Store) -> Checked {
    let carol = somebody();
    let ids: Vec<_> = (0..40).map(|_| ConversationId::random()).collect();
    let writes = ids.iter().map(|&conversation| InboxWrite {
        summary: Some(InboxSummary {
            seq: 1,
            kind: Kind::Channel,
            name: None,
            joined_seq: 1,
            last: None,
            changes: 0,
            texts: 0,
        }),
        read_seq: Some(1),
        ..InboxWrite::of(carol.clone(), conversation, Kind::Channel)
    });
    store.write_inbox(writes.collect()).await?;
    let read: BTreeSet<_> = store
        .inbox(&carol)
        .await?
        .into_iter()
        .map(|r| r.conversation)
        .collect();
    assert_eq!(read, ids.into_iter().collect());
    assert_eq!(store.inbox(&somebody()).await?, []);
    Ok(())
}

/// Rows with every cell, and rows with few, are the same if they are read by their keys.
async fn rows_of_an_inbox_are_read_by_their_keys(store: &dyn Store) -> Checked {
    let dora = somebody();
    let ids: Vec<_> = (0..130).map(|_| ConversationId::random()).collect();
    let write = |(number, &conversation): (u64, _)| InboxWrite {
        summary: (number % 5 > 0).then(|| changes::summary(9, 1, 7, "hi")),
        read_seq: Some(number),
        read_texts: number,
        left_seq: (number % 3 == 0).then_some(4),
        deleted: (number % 7 == 0).then_some((3, DeletedSeqs::default())),
        rev: (number % 7 < 2).then_some(5),
        ..InboxWrite::of(dora.clone(), conversation, Kind::Group)
    };
    store
        .write_inbox((0..).zip(&ids).map(write).collect())
        .await?;
    let whole = store.inbox(&dora).await?;
    assert_eq!(whole.len(), ids.len());
    for (most, counted) in [(50, 50), (130, 130), (usize::MAX, 130)] {
        assert_eq!(store.inbox_count(&dora, most).await?, counted);
    }
    assert_eq!(store.inbox_count(&somebody(), 1).await?, 0);
    let unknown = [ConversationId::random()];
    for some in [&ids[..0], &ids[..1], &ids[7..70], &ids[..], &unknown[..]] {
        let keys: Vec<_> = some.iter().copied().map(InboxKey::unknown).collect();
        let read = store.inbox_rows(&dora, &keys).await?;
        let found = |row: &&InboxRow| some.contains(&row.conversation);
        assert_eq!(read.len(), whole.iter().filter(found).count());
        for row in whole.iter().filter(found) {
            assert!(read.contains(row), "{row:?}");
        }
    }
    // A reader who knows which cells there are gets the same.
    for row in whole {
        let key = InboxKey {
            conversation: row.conversation,
            may_have_left: row.left_seq.is_some(),
            may_have_changes: row.newest_rev() > 0,
            may_have_settings: !row.settings.is_unset(),
        };
        assert_eq!(store.inbox_rows(&dora, &[key]).await?, [row]);
        assert_eq!(store.inbox_rows(&somebody(), &[key]).await?, []);
    }
    Ok(())
}

async fn public_conversations_are_listed(store: &dyn Store) -> Checked {
    let (open, closed) = (ConversationId::random(), ConversationId::random());
    store.apply(open, &applied("open", 1, Vec::new())).await?;
    store
        .apply(closed, &applied("closed", 1, Vec::new()))
        .await?;
    let mut hidden = applied("closed", 2, Vec::new());
    hidden.conversation.details.public = false;
    store.apply(closed, &hidden).await?;
    let mut listed = BTreeSet::new();
    let mut after = None;
    loop {
        let page = store.public_conversations(after, 3).await?;
        assert!(page.rows.len() <= 3);
        for row in &page.rows {
            assert!(listed.insert(row.conversation), "each conversation once");
        }
        match page.next {
            Some(next) => after = Some(next),
            None => break,
        }
    }
    assert!(listed.contains(&open) && !listed.contains(&closed));
    what_is_hidden_is_passed_over_some_at_a_time(store).await
}

async fn what_is_hidden_is_passed_over_some_at_a_time(store: &dyn Store) -> Checked {
    let mut hidden = applied("hidden", 1, Vec::new());
    hidden.conversation.details.public = false;
    let ids: Vec<_> = (0..SCAN_ROWS_MAX + 100)
        .map(|_| ConversationId::random())
        .collect();
    let writes = stream::iter(&ids).map(|&id| store.apply(id, &hidden));
    let written: Vec<_> = writes.buffer_unordered(64).collect().await;
    written.into_iter().collect::<Result<Vec<()>>>()?;
    let open = ConversationId::random();
    store.apply(open, &applied("open", 1, Vec::new())).await?;
    let (mut after, mut listed, mut stopped_short) = (None, BTreeSet::new(), false);
    loop {
        let page = store.public_conversations(after, PAGE_ITEMS_MAX).await?;
        listed.extend(page.rows.iter().map(|row| row.conversation));
        let Some(next) = page.next else { break };
        stopped_short |= page.rows.len() < PAGE_ITEMS_MAX;
        after = Some(next);
    }
    assert!(
        stopped_short,
        "one request looks at so many rows, not at all"
    );
    assert!(listed.contains(&open) && ids.iter().all(|id| !listed.contains(id)));
    Ok(())
}

async fn activity_is_remembered_and_forgotten(store: &dyn Store) -> Checked {
    let gateway = GatewayId(uuid::Uuid::new_v4());
    let minute = clock::minute();
    let (one, other) = (ConversationId::random(), ConversationId::random());
    let activity = |minute| Some(Activity { gateway, minute });
    store
        .append(one, &[row(1, 1, "x")], activity(minute - 1))
        .await?;
    store
        .append(one, &[row(2, 1, "x")], activity(minute))
        .await?;
    store
        .append(other, &[row(1, 1, "x")], activity(minute))
        .await?;
    let found: BTreeSet<_> = store.activity(gateway).await?.into_iter().collect();
    assert_eq!(found, BTreeSet::from([one, other]));
    assert_eq!(store.activity(GatewayId(uuid::Uuid::new_v4())).await?, []);
    assert!(store.active_gateways().await?.contains(&gateway));
    store.forget_activity(gateway).await?;
    assert_eq!(store.activity(gateway).await?, []);
    assert!(!store.active_gateways().await?.contains(&gateway));
    Ok(())
}

async fn a_ring_version_is_taken_once(store: &dyn Store) -> Checked {
    let before = store.ring().await?;
    let next = RingRow {
        version: before.as_ref().map_or(0, |row| row.version) + 1,
        members: vec![GatewayId(uuid::Uuid::new_v4())],
        level: before.as_ref().map_or(0, |row| row.level),
    };
    let proposals = (0..5).map(|_| store.propose_ring(before.as_ref(), &next));
    let won = join_all(proposals)
        .await
        .into_iter()
        .collect::<Result<Vec<_>>>()?;
    assert_eq!(
        won.into_iter().filter(|&won| won).count(),
        1,
        "exactly one proposal wins"
    );
    assert_eq!(store.ring().await?, Some(next));
    Ok(())
}

/// Levels are far above those that builds have, because the suite also runs on a store that already has data.
async fn a_level_rises_and_never_falls(store: &dyn Store) -> Checked {
    let Some(before) = store.ring().await? else {
        panic!("an earlier check has made the ring");
    };
    let raised = RingRow {
        level: before.level + 1_000,
        ..before.next(before.members.clone())
    };
    assert!(store.propose_ring(Some(&before), &raised).await?);
    assert_eq!(store.ring().await?, Some(raised.clone()));
    let late = before.next(Vec::new());
    assert!(!store.propose_ring(Some(&before), &late).await?);
    let mut next = raised.next(vec![GatewayId(uuid::Uuid::new_v4()); 2]);
    assert_eq!(next.level, raised.level, "a change of members keeps it");
    next.level = 0;
    assert!(store.propose_ring(Some(&raised), &next).await?);
    next.level = raised.level;
    assert_eq!(store.ring().await?, Some(next));
    Ok(())
}

async fn a_heartbeat_only_goes_up(store: &dyn Store) -> Checked {
    let gateway = GatewayId(uuid::Uuid::new_v4());
    assert_eq!(store.heartbeat(gateway).await?, None);
    let beat = |counter| Heartbeat {
        address: "10.0.0.1:7400".into(),
        counter,
        level: 3,
    };
    store.beat(gateway, &beat(2)).await?;
    store.beat(gateway, &beat(1)).await?;
    assert_eq!(store.heartbeat(gateway).await?, Some(beat(2)));
    Ok(())
}
