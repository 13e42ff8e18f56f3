use super::*;
use crate::model::MessageId;

const GROUP: ConversationId = ConversationId(Uuid::from_u128(7));

/// A row with as many people's messages up to it. `None` if the entry is none.
fn row(seq: Seq, texts: u64, is_message: bool) -> LogRow {
    let id = Uuid::from_u128(seq.into());
    filled(Entry {
        seq,
        message_id: MessageId(id),
        client_id: ClientId(id),
        sender: UserId::gateway(),
        at: 1,
        content: if is_message {
            Content::text("hi")
        } else {
            Content::System(SystemChange::Joined)
        },
        texts,
    })
}

fn walked(seqs: &[Seq], to: Seq) -> Vec<RangeInclusive<Seq>> {
    let mut walk = Walk::default();
    let mut holes = Vec::new();
    for &seq in seqs {
        holes.extend(walk.pass(seq, row(seq, 0, true)));
    }
    holes.extend(walk.end(to, None));
    holes.iter().map(|hole| hole.from..=hole.to).collect()
}

#[test]
fn holes_are_found_anywhere() {
    assert_eq!(walked(&[1, 2, 3], 3), []);
    assert_eq!(walked(&[], 0), []);
    assert_eq!(walked(&[], 3), [1..=3]);
    assert_eq!(walked(&[2, 3, 7], 9), [1..=1, 4..=6, 8..=9]);
    // The row after the certain part is passed too.
    assert_eq!(walked(&[1, 3], 2), [2..=2]);
}

/// What takes the place of entries 4 to 6: whether each is a message, and the number of messages up to it.
fn lost(before: Option<LogRow>, after: Option<LogRow>) -> Vec<(bool, u64)> {
    let hole = Hole {
        before,
        from: 4,
        to: 6,
        after,
    };
    let lost = Lost::of(GROUP, &hole);
    let entries = (4..=6).map(|seq| lost.entry(seq));
    entries
        .map(|entry| (is_message(&entry), entry.texts))
        .collect()
}

#[test]
fn as_many_messages_are_filled_as_were_lost() {
    let before = Some(row(3, 2, true));
    let (message, other) = (true, false);
    assert_eq!(
        lost(before.clone(), Some(row(7, 6, true))),
        [(message, 3), (message, 4), (message, 5)]
    );
    assert_eq!(
        lost(before.clone(), Some(row(7, 4, true))),
        [(message, 3), (other, 3), (other, 3)]
    );
    assert_eq!(
        lost(before.clone(), Some(row(7, 4, false))),
        [(message, 3), (message, 4), (other, 4)]
    );
    // Without a later entry nobody knows.
    assert_eq!(
        lost(before, None),
        [(message, 3), (message, 4), (message, 5)]
    );
}

#[test]
fn what_fills_a_place_is_always_the_same() {
    let hole = |from| Hole {
        before: Some(row(3, 2, true)),
        from,
        to: 6,
        after: Some(row(7, 5, true)),
    };
    let first = Lost::of(GROUP, &hole(4)).entry(4);
    assert_eq!(first, Lost::of(GROUP, &hole(4)).entry(4));
    let second = Lost::of(GROUP, &hole(4)).entry(5);
    assert_ne!(first.message_id, second.message_id);
    assert_ne!(first.client_id, second.client_id);
    // The first was filled, then the process ended.
    let rest = Hole {
        before: Some(filled(first)),
        ..hole(5)
    };
    let again = Lost::of(GROUP, &rest).entry(5);
    assert_eq!(again, second);
}
