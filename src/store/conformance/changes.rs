//! The promises about changes of entries.

use std::{collections::BTreeSet, sync::Arc};

use futures_util::{StreamExt as _, stream};

use super::{Checked, row, somebody, user};
use crate::{
    model::{
        Attachment, AttachmentId, Change, ChangeOp, ContentState, ConversationId, DeletedEntry,
        DeletedSeqs, EditedContent, Entry, EntryState, Kind, ReactionState, Reactions, Rev, Seq,
        UserId, limits::SCAN_ROWS_MAX,
    },
    store::{
        AppliedChanges, ChangeRow, InboxSummary, InboxWrite, LogRow, Mark, ReactorRow, Result,
        Store,
    },
};

pub(super) async fn check(store: &dyn Store) -> Checked {
    changes_are_read_as_they_were_written(store).await?;
    every_kind_of_change_is_stored(store).await?;
    changes_have_epochs(store).await?;
    a_late_state_changes_nothing(store).await?;
    pages_have_states(store).await?;
    the_number_of_texts_is_stored(store).await?;
    a_late_version_of_a_summary_changes_nothing(store).await?;
    deleted_seqs_are_kept(store).await?;
    reactors_are_paged(store, Kind::Group).await?;
    reactors_are_paged(store, Kind::Channel).await?;
    removed_reactions_are_passed_over_some_at_a_time(store).await?;
    reactions_of_a_user_are_found(store).await
}

pub(super) fn change(rev: Rev, epoch: u64, op: ChangeOp) -> ChangeRow {
    ChangeRow {
        record: Arc::new(Change {
            rev,
            by: user("alice"),
            at: 1_700_000_000_000,
            op,
        }),
        epoch,
        settled: rev.saturating_sub(1),
        settle_end: 0,
    }
}

pub(super) fn reaction(rev: Rev, epoch: u64) -> ChangeRow {
    let op = ChangeOp::React {
        seq: 1,
        emoji: "👍".into(),
        on: true,
        reactions: Reactions::from([("👍".into(), rev)]),
    };
    change(rev, epoch, op)
}

pub(super) fn edited(body: &str) -> EditedContent {
    EditedContent {
        body: body.into(),
        attachments: vec![attachment(body)],
    }
}

pub(super) fn attachment(name: &str) -> Attachment {
    Attachment {
        url: format!("https://example.org/{name}"),
        name: Some(name.into()),
        mime: None,
        size: Some(3),
        ..Attachment::default()
    }
}

pub(super) fn content_state(rev: Rev, content: Option<EditedContent>) -> EntryState {
    EntryState {
        content: Some(ContentState {
            rev,
            by: user("alice"),
            at: 1_700_000_000_000,
            content,
            edits: vec![1, rev],
        }),
        reactions: None,
    }
}

pub(super) fn reaction_state(rev: Rev) -> EntryState {
    EntryState {
        content: None,
        reactions: Some(ReactionState {
            rev,
            reactions: Reactions::from([("👍".into(), rev), ("x".into(), 1)]),
        }),
    }
}

pub(super) fn states(states: Vec<(Seq, EntryState)>) -> AppliedChanges {
    AppliedChanges {
        states,
        ..AppliedChanges::default()
    }
}

pub(super) fn revs(rows: &[ChangeRow]) -> Vec<Rev> {
    rows.iter().map(|r| r.record.rev).collect()
}

async fn changes_are_read_as_they_were_written(store: &dyn Store) -> Checked {
    let id = ConversationId::random();
    store.append(id, &[row(1, 1, "x")], None).await?;
    let tail = store.changes_tail(id, 10).await?;
    assert_eq!((tail.tail.rows, tail.tail.settled), (Vec::new(), 0));
    assert_eq!(tail.deleted, (0, DeletedSeqs::default()));
    assert_eq!(store.changes(id, 1, 10).await?, []);
    assert!(!store.tail(id, 1).await?.may_have_changes);
    // The rows cross the border of a bucket, which has 4,096 positions.
    let rows: Vec<_> = (1..=4_200).map(|rev| reaction(rev, 1)).collect();
    store.append_changes(id, &rows[..1], None).await?;
    assert!(store.tail(id, 1).await?.may_have_changes);
    for chunk in rows.chunks(64) {
        store.append_changes(id, chunk, None).await?;
    }
    assert_eq!(store.changes(id, 1, 3).await?, rows[..3]);
    assert_eq!(
        store.changes(id, 4_090, 4_100).await?,
        rows[4_089..4_100].to_vec()
    );
    assert_eq!(store.changes(id, 4_199, 9_999).await?, rows[4_198..]);
    let tail = store.changes_tail(id, 128).await?.tail;
    assert_eq!((tail.rows, tail.settled), (rows[4_200 - 128..].to_vec(), 0));
    store.set_changes_settled(id, 4_200).await?;
    store.set_changes_settled(id, 4_100).await?;
    // Rows that are written again change nothing.
    store.append_changes(id, &rows[..64], None).await?;
    assert_eq!(store.changes_tail(id, 1).await?.tail.settled, 4_200);
    let tail = store.tail(id, 1).await?;
    assert_eq!((tail.tail.settled, tail.may_have_changes), (0, true));
    Ok(())
}

async fn every_kind_of_change_is_stored(store: &dyn Store) -> Checked {
    let id = ConversationId::random();
    let edit = |content| ChangeOp::Edit {
        seq: 7,
        content,
        edits: vec![1, 2],
        dropped: vec![AttachmentId(uuid::Uuid::from_u128(9))],
    };
    let delete = ChangeOp::Delete {
        entries: vec![DeletedEntry {
            seq: 7,
            edits: vec![1, 2],
            files: vec![AttachmentId(uuid::Uuid::from_u128(8))],
        }],
        deleted: DeletedSeqs {
            highest: vec![3, 7],
            count: 9,
        },
    };
    let rows = [
        change(1, 2, edit(Some(edited("new")))),
        change(2, 2, edit(Some(EditedContent::default()))),
        change(3, 2, delete),
        change(4, 2, edit(None)),
        reaction(5, 2),
    ];
    store.append_changes(id, &rows, None).await?;
    assert_eq!(store.changes(id, 1, 5).await?, rows);
    assert!(store.tail(id, 1).await?.may_have_changes);
    Ok(())
}

async fn changes_have_epochs(store: &dyn Store) -> Checked {
    let id = ConversationId::random();
    let old = [reaction(1, 1), reaction(2, 1), reaction(3, 1)];
    let new = [change(
        2,
        3,
        ChangeOp::Edit {
            seq: 1,
            content: Some(edited("new")),
            edits: vec![2],
            dropped: Vec::new(),
        },
    )];
    store.append_changes(id, &new, None).await?;
    store.append_changes(id, &old, None).await?;
    let read = store.changes(id, 1, 3).await?;
    assert_eq!(read, [old[0].clone(), new[0].clone(), old[2].clone()]);
    let tail = store.changes_tail(id, 2).await?.tail.rows;
    assert_eq!(revs(&tail), [2, 2, 3]);
    assert_eq!(tail[..2], [old[1].clone(), new[0].clone()]);
    Ok(())
}

async fn a_late_state_changes_nothing(store: &dyn Store) -> Checked {
    let id = ConversationId::random();
    let entry = row(9, 1, "entry");
    store.append(id, std::slice::from_ref(&entry), None).await?;
    for (content, reactions) in [(5, 4), (3, 8), (5, 7)] {
        let edit = content_state(content, Some(edited(&format!("rev {content}"))));
        let both = vec![(9, edit), (9, reaction_state(reactions))];
        store.apply_changes(id, Kind::Group, &states(both)).await?;
    }
    let expected = EntryState {
        reactions: reaction_state(8).reactions,
        ..content_state(5, Some(edited("rev 5")))
    };
    let page = store.log(id, 9, 9).await?;
    assert_eq!(page.states, [(9, expected)]);
    assert_eq!(page.rows, [entry]);
    let deleted = content_state(6, None);
    let late = vec![(9, content_state(5, Some(edited("rev 5")))), (9, deleted)];
    for state in late.into_iter().rev() {
        store
            .apply_changes(id, Kind::Group, &states(vec![state]))
            .await?;
    }
    assert!(store.log(id, 9, 9).await?.states[0].1.is_deleted());
    Ok(())
}

async fn pages_have_states(store: &dyn Store) -> Checked {
    let id = ConversationId::random();
    // The last seqs of one bucket and the first of the next.
    let rows: Vec<_> = (4_090..=4_100).map(|seq| row(seq, 3, "x")).collect();
    store.append(id, &rows, None).await?;
    // A state without its entry, as a replica may have it for a while, is no entry.
    let changed: Vec<_> = [4_094, 4_095, 4_096, 4_100, 4_101]
        .map(|seq| (seq, reaction_state(seq)))
        .into();
    store
        .apply_changes(id, Kind::Channel, &states(changed.clone()))
        .await?;
    let page = store.log(id, 4_095, 4_099).await?;
    assert_eq!(page.rows, rows[5..10]);
    assert_eq!(page.states, changed[1..3]);
    let tail = store.tail(id, 100).await?;
    assert_eq!(tail.tail.rows, rows);
    assert_eq!(tail.states, changed);
    assert!(store.log(id, 1, 4_089).await?.states.is_empty());
    Ok(())
}

async fn the_number_of_texts_is_stored(store: &dyn Store) -> Checked {
    let id = ConversationId::random();
    let counted = LogRow {
        record: Arc::new(Entry {
            texts: 5,
            ..Entry::clone(&row(7, 1, "x").record)
        }),
        ..row(7, 1, "x")
    };
    let rows = [row(6, 1, "old"), counted];
    store.append(id, &rows, None).await?;
    assert_eq!(store.log(id, 6, 7).await?.rows, rows);
    let bob = somebody();
    let mark = |read_seq, read_texts| Mark {
        user: bob.clone(),
        read_seq: Some(read_seq),
        read_texts,
        delivered_seq: None,
    };
    let read = async || -> Result<_> {
        let row = store.inbox(&bob).await?.remove(0);
        Ok((row.read_seq, row.read_texts))
    };
    for (write, expected) in [
        (mark(7, 5), (7, 5)),
        (mark(6, 4), (7, 5)),
        (mark(9, 6), (9, 6)),
    ] {
        store.mark(id, Kind::Group, &write).await?;
        assert_eq!(read().await?, expected);
    }
    let inbox = InboxWrite {
        read_seq: Some(10),
        read_texts: 7,
        ..InboxWrite::of(bob.clone(), id, Kind::Group)
    };
    store.write_inbox(vec![inbox]).await?;
    assert_eq!(read().await?, (10, 7));
    Ok(())
}

pub(super) fn summary(seq: Seq, changes: u32, texts: u64, body: &str) -> InboxSummary {
    let mut last = row(seq, 1, body).record.last();
    last.deleted = body.is_empty();
    InboxSummary {
        seq,
        kind: Kind::Group,
        name: Some("team".into()),
        joined_seq: 2,
        last: Some(last),
        changes,
        texts,
    }
}

pub(super) fn summary_write(of: &UserId, id: ConversationId, summary: &InboxSummary) -> InboxWrite {
    InboxWrite {
        summary: Some(summary.clone()),
        ..InboxWrite::of(of.clone(), id, Kind::Group)
    }
}

async fn a_late_version_of_a_summary_changes_nothing(store: &dyn Store) -> Checked {
    let (id, bob) = (ConversationId::random(), somebody());
    let versions = [
        summary(8, 0, 6, "first"),
        summary(8, 1, 6, "edited"),
        summary(8, 2, 6, ""),
        summary(9, 0, 7, "next"),
    ];
    for newest in 0..versions.len() {
        for version in versions[..=newest].iter().rev() {
            let write = summary_write(&bob, id, version);
            store.write_inbox(vec![write]).await?;
            let read = store.inbox(&bob).await?.remove(0);
            assert_eq!(read.summary.as_ref(), Some(&versions[newest]));
        }
    }
    let write = |deleted, rev| InboxWrite {
        deleted,
        rev,
        ..InboxWrite::of(bob.clone(), id, Kind::Group)
    };
    let deleted = |rev, seq| {
        let mut deleted = DeletedSeqs::default();
        deleted.add(seq);
        Some((rev, deleted))
    };
    store
        .write_inbox(vec![
            write(deleted(5, 8), Some(7)),
            write(deleted(4, 3), Some(6)),
        ])
        .await?;
    let read = store.inbox(&bob).await?.remove(0);
    assert_eq!((Some(read.deleted), read.rev), (deleted(5, 8), 7));
    assert_eq!(read.summary.as_ref(), versions.last());
    Ok(())
}

async fn deleted_seqs_are_kept(store: &dyn Store) -> Checked {
    let id = ConversationId::random();
    let mut deleted = DeletedSeqs::default();
    let mut all = vec![(0, deleted.clone())];
    for rev in 1..=3 {
        deleted.add(rev * 10);
        all.push((rev, deleted.clone()));
    }
    store.append_changes(id, &[reaction(1, 1)], None).await?;
    for rev in [2, 3, 1] {
        let applied = AppliedChanges {
            deleted: Some(all[rev].clone()),
            ..AppliedChanges::default()
        };
        store.apply_changes(id, Kind::Group, &applied).await?;
    }
    assert_eq!(store.changes_tail(id, 1).await?.deleted, all[3]);
    assert_eq!(store.tail(id, 1).await?.tail.settled, 0);
    Ok(())
}

fn reactor(seq: Seq, emoji: &str, who: &str, rev: Rev, on: bool) -> ReactorRow {
    ReactorRow {
        seq,
        emoji: emoji.into(),
        user: user(who),
        rev,
        on,
        at: 1_700_000_000_000,
    }
}

fn reactors(reactors: Vec<ReactorRow>) -> AppliedChanges {
    AppliedChanges {
        reactors,
        ..AppliedChanges::default()
    }
}

type Reacted = BTreeSet<(String, String)>;

/// Reads all pages of reactors.
async fn all_reactors(
    store: &dyn Store,
    id: ConversationId,
    kind: Kind,
    emoji: Option<&str>,
) -> Result<Reacted> {
    let mut seen = Reacted::new();
    let mut after: Option<String> = None;
    loop {
        let page = store
            .reactors(id, kind, 5, emoji, after.as_deref(), 7)
            .await?;
        assert!(page.items.len() <= 7);
        for item in page.items {
            assert!(item.on && item.seq == 5 && item.rev > 0 && item.at == 1_700_000_000_000);
            let item = (item.emoji, item.user.as_str().to_owned());
            assert!(seen.insert(item), "each reaction once");
        }
        match page.next {
            Some(next) => after = Some(next),
            None => return Ok(seen),
        }
    }
}

async fn reactors_are_paged(store: &dyn Store, kind: Kind) -> Checked {
    let id = ConversationId::random();
    let mut rows = Vec::new();
    let mut expected = Reacted::new();
    for (i, emoji) in ["👍", "x", "xy"].into_iter().enumerate() {
        for n in 0..20 {
            let (who, on) = (format!("user-{n}"), n % 4 != 0);
            rows.push(reactor(5, emoji, &who, 100 + i as Rev, on));
            // A late write changes nothing.
            rows.push(reactor(5, emoji, &who, 50, !on));
            if on {
                expected.insert((emoji.to_owned(), who));
            }
        }
    }
    // A reaction to another entry.
    rows.push(reactor(6, "x", "user-0", 1, true));
    for half in rows.chunks(rows.len() / 2) {
        let half = reactors(half.to_vec());
        store.apply_changes(id, kind, &half).await?;
    }
    assert_eq!(all_reactors(store, id, kind, None).await?, expected);
    let of_x: Reacted = expected
        .iter()
        .filter(|(emoji, _)| emoji == "x")
        .cloned()
        .collect();
    assert_eq!(all_reactors(store, id, kind, Some("x")).await?, of_x);
    assert!(all_reactors(store, id, kind, Some("y")).await?.is_empty());
    let first = store.reactors(id, kind, 5, Some("x"), None, 7).await?;
    for invented in ["", "?", "x", "x ", "👍 user-1", "\0", "999999", "x \u{1}"] {
        let page = store
            .reactors(id, kind, 5, Some("x"), Some(invented), 7)
            .await?;
        assert_eq!(page, first, "{invented:?} is no position");
    }
    let beyond = store
        .reactors(id, kind, 5, None, Some("zz nobody"), 7)
        .await?;
    assert!(beyond.items.len() <= 7);
    Ok(())
}

async fn removed_reactions_are_passed_over_some_at_a_time(store: &dyn Store) -> Checked {
    let id = ConversationId::random();
    let removed = (0..SCAN_ROWS_MAX + 100).map(|n| reactor(5, "x", &format!("user-{n}"), 2, false));
    let mut rows: Vec<_> = removed.collect();
    rows.push(reactor(5, "y", "alice", 2, true));
    let parts: Vec<_> = rows.chunks(100).map(|c| reactors(c.to_vec())).collect();
    let writes = stream::iter(&parts).map(|part| store.apply_changes(id, Kind::Group, part));
    let written: Vec<_> = writes.buffer_unordered(8).collect().await;
    written.into_iter().collect::<Result<Vec<()>>>()?;
    let first = store.reactors(id, Kind::Group, 5, None, None, 50).await?;
    assert_eq!(first.items, [], "one request reads so many rows, not all");
    let next = first.next.as_deref();
    assert!(next.is_some());
    let second = store.reactors(id, Kind::Group, 5, None, next, 50).await?;
    assert_eq!((second.items.len(), second.next), (1, None));
    Ok(())
}

async fn reactions_of_a_user_are_found(store: &dyn Store) -> Checked {
    let id = ConversationId::random();
    let rows = vec![
        reactor(4_000, "x", "bob", 1, true),
        reactor(4_095, "👍", "bob", 4, true),
        reactor(4_095, "x", "bob", 2, true),
        reactor(4_096, "x", "bob", 3, true),
        reactor(4_097, "x", "bob", 6, false),
        reactor(4_097, "x", "bob", 5, true),
        reactor(4_096, "x", "bobby", 7, true),
        reactor(4_200, "x", "bob", 8, true),
    ];
    store
        .apply_changes(id, Kind::Channel, &reactors(rows))
        .await?;
    let found = store.reactions_of(id, &user("bob"), 4_001, 4_199).await?;
    let found: BTreeSet<_> = found.into_iter().collect();
    let expected = [
        (4_095, "👍", true),
        (4_095, "x", true),
        (4_096, "x", true),
        (4_097, "x", false),
    ];
    let expected = expected.map(|(seq, emoji, on)| (seq, emoji.to_owned(), on));
    assert_eq!(found, expected.into());
    assert_eq!(store.reactions_of(id, &somebody(), 1, 100).await?, []);
    Ok(())
}
