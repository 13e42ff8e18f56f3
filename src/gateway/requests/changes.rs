//! Requests that change messages, and that read their changes and reactions.

use futures_util::{FutureExt, future::BoxFuture};

use super::{Gateway, items};
use crate::{
    chat::{self, DeleteMessages, EditMessage, GetChanges, GetReactors, NewContent},
    model::{
        ConversationId, Rev, Seq, UserId,
        limits::{CHANGES_PAGE_MAX, DELETE_SEQS_MAX, EMOJI_BYTES_MAX},
        text,
    },
    protocol::{
        Answer, Changes, ChangesRequest, Delete, Edit, Item, Okay, Reaction, ReactionsPage,
        ReactionsRequest, ReactorItem,
    },
};

type Answered<'a> = BoxFuture<'a, Result<Answer, chat::Error>>;

pub(super) fn edit(gateway: &Gateway, user: UserId, r: Edit) -> Answered<'_> {
    let edit = EditMessage {
        seq: r.seq,
        content: NewContent {
            body: r.body,
            attachments: r.attachments,
        },
        base_rev: r.base_rev,
        at: None,
    };
    revise(gateway, user, r.conversation, checked_seq(r.seq), edit)
}

pub(super) fn delete(gateway: &Gateway, user: UserId, r: Delete) -> Answered<'_> {
    let checked = checked_seqs(&r.seqs);
    let delete = DeleteMessages {
        seqs: r.seqs,
        as_moderator: r.as_moderator,
        at: None,
    };
    revise(gateway, user, r.conversation, checked, delete)
}

/// Adds a reaction, or removes it if not `on`.
pub(super) fn react(gateway: &Gateway, user: UserId, r: Reaction, on: bool) -> Answered<'_> {
    let checked = checked_seq(r.seq).and_then(|()| checked_emoji(&r.emoji, on));
    let react = chat::React {
        seq: r.seq,
        emoji: r.emoji,
        on,
        at: None,
    };
    revise(gateway, user, r.conversation, checked, react)
}

/// Changes messages, unless a check failed. The answer contains the rev.
fn revise<A: chat::Ask<Output = Rev> + Send + 'static>(
    gateway: &Gateway,
    user: UserId,
    conversation: ConversationId,
    checked: Result<(), chat::Error>,
    change: A,
) -> Answered<'_> {
    async move {
        checked?;
        let rev = gateway.router.ask(conversation, user, change).await?;
        Ok(Answer::Ok(Okay {
            rev: Some(rev),
            ..Okay::default()
        }))
    }
    .boxed()
}

pub(super) async fn reactions(
    gateway: &Gateway,
    user: UserId,
    r: ReactionsRequest,
) -> Result<Answer, chat::Error> {
    checked_seq(r.seq)?;
    let emoji = r.emoji.map(|emoji| {
        checked_emoji(&emoji, false)?;
        Ok::<_, chat::Error>(text::emoji(&emoji).unwrap_or(emoji))
    });
    let asked = GetReactors {
        seq: r.seq,
        emoji: emoji.transpose()?,
        after: r.after,
        limit: items(r.limit)?,
    };
    let page = gateway.router.ask(r.conversation, user, asked).await?;
    let item = |r: chat::Reactor| ReactorItem {
        user: r.user,
        emoji: r.emoji,
        at: r.at,
    };
    Ok(Answer::Reactions(ReactionsPage {
        items: page.items.into_iter().map(item).collect(),
        next: page.next,
    }))
}

pub(super) async fn changes(
    gateway: &Gateway,
    user: UserId,
    r: ChangesRequest,
) -> Result<Answer, chat::Error> {
    let limit = match r.limit.unwrap_or(CHANGES_PAGE_MAX) {
        0 => return Err(chat::Error::invalid("limit must be at least 1")),
        limit => limit.min(CHANGES_PAGE_MAX),
    };
    let after = r.after;
    let asked = GetChanges { after, limit };
    let page = gateway.router.ask(r.conversation, user, asked).await?;
    Ok(Answer::Changes(Changes {
        after: page.after,
        rev: page.rev,
        items: page.items.into_iter().map(Item::of).collect(),
        more: page.more,
        reset: page.reset,
    }))
}

fn checked_seq(seq: Seq) -> Result<(), chat::Error> {
    if seq == 0 {
        return Err(chat::Error::invalid("seq must be at least 1"));
    }
    Ok(())
}

fn checked_seqs(seqs: &[Seq]) -> Result<(), chat::Error> {
    if seqs.len() > DELETE_SEQS_MAX {
        return Err(chat::Error::TooLarge {
            what: "messages that one request deletes".into(),
            max: DELETE_SEQS_MAX,
        });
    }
    if seqs.is_empty() {
        return Err(chat::Error::invalid("seqs must name at least one message"));
    }
    seqs.iter().try_for_each(|&seq| checked_seq(seq))
}

/// Checks the emoji of a request before the owner is asked, which finds its stored form. One that is removed or looked for
/// may have been stored in another form.
fn checked_emoji(emoji: &str, is_new: bool) -> Result<(), chat::Error> {
    if !text::is_reaction_key(emoji) {
        return Err(chat::Error::Invalid(format!(
            "emoji must have 1 to {EMOJI_BYTES_MAX} bytes, without white space and control characters"
        )));
    }
    match text::emoji(emoji) {
        Err(wrong) if is_new => Err(chat::Error::Invalid(format!("{emoji:?} {wrong}"))),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seqs_begin_at_one_and_their_number_is_limited() {
        let invalid = |seqs: &[Seq]| matches!(checked_seqs(seqs), Err(chat::Error::Invalid(_)));
        assert!(invalid(&[]) && invalid(&[0]) && invalid(&[1, 2, 0]));
        let most: Vec<Seq> = (1..=DELETE_SEQS_MAX as Seq).collect();
        assert_eq!(checked_seqs(&most), Ok(()));
        let more: Vec<Seq> = (1..=DELETE_SEQS_MAX as Seq + 1).collect();
        assert!(matches!(
            checked_seqs(&more),
            Err(chat::Error::TooLarge { max: 256, .. })
        ));
    }

    #[test]
    fn an_emoji_is_checked_before_the_owner_is_asked() {
        assert_eq!(checked_emoji("👍🏽", true), Ok(()));
        for wrong in ["", "a b", "\n", &"x".repeat(65)] {
            assert!(checked_emoji(wrong, true).is_err(), "{wrong:?}");
            assert!(checked_emoji(wrong, false).is_err(), "{wrong:?}");
        }
        assert!(checked_emoji("x", true).is_err());
        assert_eq!(checked_emoji("x", false), Ok(()), "it may be stored");
    }
}
