//! The promises about uploaded files.

use std::{collections::BTreeSet, sync::Arc};

use super::{Checked, row, somebody};
use crate::{
    clock,
    model::{
        Attachment, AttachmentId, Content, ConversationId, Entry, FileFacts, FileResult, FileState,
        Kind, Metadata,
    },
    store::{AppliedChanges, FileRow, LogRow, Reference, Store, WORK_SHARDS, WorkShard},
};

pub(super) async fn check(store: &dyn Store) -> Checked {
    a_file_is_read_as_it_was_written(store).await?;
    references_follow_messages_and_changes(store).await?;
    work_is_listed_until_it_is_finished(store).await?;
    usage_only_rises(store).await
}

fn file() -> AttachmentId {
    AttachmentId(uuid::Uuid::new_v4())
}

fn facts() -> FileFacts {
    FileFacts {
        uploader: somebody(),
        conversation: ConversationId::random(),
        name: "a cat.png".into(),
        size: 70_000,
        alt: Some("a cat".into()),
        created_at: clock::wall(),
        upload: None,
    }
}

async fn a_file_is_read_as_it_was_written(store: &dyn Store) -> Checked {
    let (id, other, none) = (file(), file(), file());
    assert_eq!(store.files(&[id]).await?, []);
    let facts = facts();
    store.create_file(id, &facts, 20_000).await?;
    let in_bucket = FileFacts {
        upload: Some("2~upload_of.a-bucket".into()),
        ..self::facts()
    };
    store.create_file(other, &in_bucket, 20_000).await?;
    assert_eq!(store.files(&[other]).await?[0].1.facts, in_bucket);
    let mut wanted = FileRow {
        facts,
        result: None,
        state: FileState::Pending,
    };
    assert_eq!(store.files(&[id]).await?, [(id, wanted.clone())]);
    let result = FileResult {
        sha256: "ab".repeat(32),
        size: 69_000,
        mime: "image/png".into(),
        pixels: Some((640, 480)),
        thumbnail: Some("image/jpeg".into()),
        metadata: None,
    };
    let kept = FileResult {
        metadata: Some(Metadata::Kept),
        ..result.clone()
    };
    store.set_file_result(other, &kept).await?;
    assert_eq!(store.files(&[other]).await?[0].1.result, Some(kept));
    store.set_file_result(id, &result).await?;
    wanted.result = Some(result);
    // Rule [state-rises].
    for (set, state) in [
        (FileState::Ready, FileState::Ready),
        (FileState::Scanning, FileState::Ready),
        (FileState::Erased, FileState::Erased),
        (FileState::Erasing, FileState::Erased),
    ] {
        store.set_file_state(id, set).await?;
        wanted.state = state;
        assert_eq!(store.files(&[id]).await?, [(id, wanted.clone())]);
    }
    store.forget_file(other).await?;
    let forgotten = store.files(&[other]).await?;
    let [(_, row)] = &forgotten[..] else {
        panic!("{forgotten:?}");
    };
    assert_eq!(row.state, FileState::Erased);
    assert_eq!((row.facts.name.as_str(), &row.facts.alt), ("", &None));
    assert_eq!(row.facts.upload, in_bucket.upload, "a sweep needs it again");
    let both = store.files(&[none, other, id]).await?;
    let both: BTreeSet<_> = both.into_iter().map(|(id, _)| id).collect();
    assert_eq!(both, BTreeSet::from([id, other]));
    Ok(())
}

/// Returns a message that has these files.
fn message(seq: u64, files: &[AttachmentId]) -> LogRow {
    let mut entry = Entry::clone(&row(seq, 1, "see").record);
    let attachment = |id: &AttachmentId| Attachment {
        id: Some(*id),
        name: Some("a cat.png".into()),
        mime: Some("image/png".into()),
        size: Some(70_000),
        alt: Some("a cat".into()),
        width: Some(640),
        height: Some(480),
        ..Attachment::default()
    };
    entry.content = Content::Text {
        body: "see".into(),
        attachments: files.iter().map(attachment).collect(),
        reply_to: None,
    };
    LogRow {
        record: Arc::new(entry),
        ..row(seq, 1, "")
    }
}

async fn references_follow_messages_and_changes(store: &dyn Store) -> Checked {
    let conversation = ConversationId::random();
    let (one, other) = (file(), file());
    let rows = [message(1, &[one, other]), message(2, &[one])];
    store.append(conversation, &rows[..1], None).await?;
    store.settle(conversation, &rows[1..]).await?;
    assert_eq!(store.log(conversation, 1, 2).await?.rows, rows);
    let reference = |file, seq, rev, on| Reference { file, seq, rev, on };
    let both = [reference(one, 1, 0, true), reference(one, 2, 0, true)];
    assert_eq!(store.references(one).await?, both);
    assert_eq!(
        store.references(other).await?,
        [reference(other, 1, 0, true)]
    );
    let apply = async |references: Vec<Reference>| {
        let applied = AppliedChanges {
            references,
            ..AppliedChanges::default()
        };
        store
            .apply_changes(conversation, Kind::Group, &applied)
            .await
    };
    let off = reference(one, 1, 7, false);
    apply(vec![off]).await?;
    // A late change, and a message that is settled again, change nothing.
    apply(vec![reference(one, 1, 3, true)]).await?;
    store.settle(conversation, &rows).await?;
    assert_eq!(store.references(one).await?, [off, both[1]]);
    Ok(())
}

async fn work_is_listed_until_it_is_finished(store: &dyn Store) -> Checked {
    // A day of its own for each run.
    let day = 1_000_000
        + u32::from(u16::from_be_bytes(
            *file().0.as_bytes().first_chunk().unwrap_or(&[0; 2]),
        ));
    let id = file();
    store.create_file(id, &facts(), day).await?;
    let shard = WorkShard::of(day, id);
    let listed = async || store.work(shard, None, 100).await;
    assert!(listed().await?.contains(&id));
    let mut files = BTreeSet::from_iter(listed().await?);
    while files.len() < 5 {
        let file = file();
        if WorkShard::of(day, file) == shard {
            store.add_work(day, file).await?;
            files.insert(file);
        }
    }
    store.add_work(day, id).await?;
    // Pages have every file once.
    let (mut found, mut after) = (Vec::new(), None);
    loop {
        let page = store.work(shard, after, 2).await?;
        let Some(last) = page.last() else { break };
        after = Some(*last);
        found.extend(page);
    }
    assert_eq!(found.len(), files.len());
    assert_eq!(BTreeSet::from_iter(found), files);
    let next_day = WorkShard {
        day: day + 1,
        ..shard
    };
    assert_eq!(store.work(next_day, None, 1).await?, []);
    assert!(store.work_shards().await?.contains(&shard));
    assert!(shard.shard < WORK_SHARDS);
    store.finish_work(shard).await?;
    assert_eq!(listed().await?, []);
    assert!(!store.work_shards().await?.contains(&shard));
    Ok(())
}

async fn usage_only_rises(store: &dyn Store) -> Checked {
    let (user, today) = (somebody(), clock::today());
    assert_eq!(store.usage(&user, today).await?, 0);
    store.set_usage(&user, today, 500).await?;
    store.set_usage(&user, today, 200).await?;
    assert_eq!(store.usage(&user, today).await?, 500);
    assert_eq!(store.usage(&user, today - 1).await?, 0);
    store.sweep().await?;
    assert_eq!(store.usage(&user, today).await?, 500);
    Ok(())
}
