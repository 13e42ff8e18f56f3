//! Tests: what was stored when other rules for texts were in force.

use std::sync::Arc;

use super::{GROUP, changes::Fixture, user};
use crate::{
    chat::{EditMessage, Error, NewContent, React},
    model::{Attachment, Change, ChangeOp, EditedContent, Reactions, Rev, Seq, limits::EMOJI_MAX},
    store::{ChangeRow, Store},
};

/// The next owner, after one with other rules stored a change.
async fn after(fixture: &Fixture, rev: Rev, op: ChangeOp) -> Fixture {
    let record = Change {
        rev,
        by: user("alice"),
        at: 1,
        op,
    };
    let rows = [ChangeRow {
        record: Arc::new(record),
        epoch: 1,
        settled: rev - 1,
        settle_end: 0,
    }];
    let stored = fixture.store.append_changes(GROUP, &rows, None).await;
    stored.unwrap();
    fixture.successor(2)
}

#[tokio::test(start_paused = true)]
async fn an_emoji_in_an_older_form_is_removed_once() {
    for older in ["x", "👍\u{fe0e}"] {
        let fixture = Fixture::group().await;
        let seq = fixture.say("alice", "one").await;
        assert_eq!(fixture.react("alice", seq, "👍", true).await, Ok(1));
        let op = ChangeOp::React {
            seq,
            emoji: older.into(),
            on: true,
            reactions: Reactions::from([("👍".into(), 1), (older.into(), 1)]),
        };
        let next = after(&fixture, 2, op).await;
        assert_eq!(next.react("alice", seq, older, false).await, Ok(3));
        assert_eq!(next.react("alice", seq, older, false).await, Ok(3), "again");
        let page = next.page("bob").await;
        let reactions = page.state(seq).and_then(|state| state.reactions.as_ref());
        let expected = Reactions::from([("👍".into(), 1)]);
        assert_eq!(
            reactions.unwrap().reactions,
            expected,
            "the other one stays"
        );
        let none = next.react("bob", seq, "x", false).await;
        assert!(matches!(none, Err(Error::Invalid(_))), "bob never had it");
    }
}

fn link(name: &str) -> Attachment {
    Attachment {
        id: None,
        url: "https://example.org/a".into(),
        name: Some(name.into()),
        mime: None,
        size: None,
        alt: None,
        width: None,
        height: None,
    }
}

async fn edited(fixture: &Fixture, seq: Seq, names: &[&str]) -> Result<Rev, Error> {
    let edit = EditMessage {
        seq,
        content: NewContent {
            body: format!("see {names:?}"),
            attachments: Some(names.iter().map(|name| link(name)).collect()),
        },
        base_rev: None,
        at: None,
    };
    fixture.ask("alice", edit).await
}

#[tokio::test(start_paused = true)]
async fn an_edit_may_name_the_attachments_that_the_message_has() {
    let fixture = Fixture::group().await;
    let seq = fixture.say("alice", "one").await;
    let content = EditedContent {
        body: "two".into(),
        attachments: vec![link("bank.example")],
    };
    let op = ChangeOp::Edit {
        seq,
        content: Some(content),
        edits: vec![1],
        dropped: Vec::new(),
    };
    let next = after(&fixture, 1, op).await;
    assert_eq!(edited(&next, seq, &["bank.example", "more"]).await, Ok(2));
    let refused = edited(&next, seq, &["bank.example", "other.example"]).await;
    assert!(matches!(refused, Err(Error::Invalid(_))), "{refused:?}");
    assert_eq!(edited(&next, seq, &["more"]).await, Ok(3));
    let refused = edited(&next, seq, &["bank.example"]).await;
    assert!(matches!(refused, Err(Error::Invalid(_))), "it is gone");
}

#[tokio::test(start_paused = true)]
async fn an_imported_user_may_have_all_emoji_of_a_message() {
    let fixture = Fixture::group().await;
    let seq = fixture.say("alice", "one").await;
    let react = |number: usize| React {
        seq,
        emoji: format!(":e{number}:"),
        on: true,
        at: Some(7),
    };
    for number in 0..EMOJI_MAX {
        fixture.ask("bob", react(number)).await.unwrap();
    }
    let refused = fixture.ask("bob", react(EMOJI_MAX)).await;
    assert!(matches!(refused, Err(Error::TooLarge { .. })));
}
