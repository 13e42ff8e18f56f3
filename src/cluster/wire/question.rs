//! What gateways ask each other: each question with the type of its answer. A new one is a row of the table below and an
//! `impl Answers` in `inward/here`, and is asked only from a new [level](crate::model::Level) on, because an earlier gateway
//! refuses it. If it can be long, it belongs into the table of sizes in `message.rs`.

use std::sync::Arc;

use futures_util::future::BoxFuture;
use serde::{Deserialize, Serialize};

use crate::{
    chat::{Error, Operation, Outcome},
    model::{
        ConversationId, Cursor, Device, Epoch, Kind, Rank, Rev, Seq, SettingsChange, Topic,
        UploadBegun, UploadLimits, UserId,
    },
    protocol::{DeviceItem, PresenceItem},
    store::{InboxRow, InboxSettings},
};

/// A question to a gateway.
pub(crate) trait Question: Into<AnyQuestion> {
    type Answer;

    /// Returns the topic in which the asking gateway is interested from now on, and the version of the ring as of which.
    fn interest(&self) -> Option<(Topic, Epoch)> {
        None
    }

    /// Takes the answer out of a response. `None` if that answers another question.
    fn take(response: AnyAnswer) -> Option<Self::Answer>;
}

/// What a part of a gateway has if it answers this kind of question.
pub(crate) trait Answers<Q: Question> {
    /// # Errors
    /// `Moved` if another gateway must be asked; otherwise as the question has it.
    fn answer(&self, question: Q) -> impl Future<Output = Result<Q::Answer, Error>> + Send;
}

/// The answer to any question, or its refusal.
pub(crate) type Answered = Result<AnyAnswer, Error>;

macro_rules! questions {
    ($(
        $(#[$about:meta])*
        $name:ident { $($field:ident: $kind:ty),* $(,)? } -> $answer:ty $(, interested in |$of:ident| $topic:expr)?;
    )*) => {
        $(
            $(#[$about])*
            #[derive(Debug, Clone, Serialize, Deserialize)]
            pub(crate) struct $name { $(pub $field: $kind),* }

            impl Question for $name {
                type Answer = $answer;

                $(fn interest(&self) -> Option<(Topic, Epoch)> {
                    let $of = self;
                    Some(($topic, self.version))
                })?

                fn take(response: AnyAnswer) -> Option<$answer> {
                    match response {
                        AnyAnswer::$name(answer) => Some(answer),
                        _ => None,
                    }
                }
            }

            impl From<$name> for AnyQuestion {
                fn from(question: $name) -> Self {
                    Self::$name(question)
                }
            }
        )*

        /// Any question.
        #[derive(Debug, Clone, Serialize, Deserialize)]
        pub(crate) enum AnyQuestion { $($name($name)),* }

        impl AnyQuestion {
            /// Returns the topic in which the asking gateway is interested from now on, and the version of the ring as of which.
            pub(crate) fn interest(&self) -> Option<(Topic, Epoch)> {
                match self { $(Self::$name(question) => question.interest()),* }
            }

            /// Has the question answered. Each future is boxed by itself, so that a short one is not as large as the largest.
            pub(crate) fn answered<H>(self, here: Arc<H>) -> BoxFuture<'static, Answered>
            where
                H: $(Answers<$name> +)* Send + Sync + 'static,
            {
                match self {
                    $(Self::$name(question) => {
                        Box::pin(async move { here.answer(question).await.map(AnyAnswer::$name) })
                    })*
                }
            }
        }

        /// The answer to a question of the same name.
        #[derive(Debug, Serialize, Deserialize)]
        pub(crate) enum AnyAnswer { $($name($answer)),* }
    };
}

questions! {
    /// An operation, for a conversation's owner.
    Operate { conversation: ConversationId, actor: UserId, operation: Operation } -> Outcome;
    /// A user's home learns that a session has come. The answer is the conversations that the user is in.
    Register { user: UserId, version: Epoch } -> Vec<InboxRef>, interested in |it| Topic::User(it.user.clone());
    /// The rows of a user's inbox, or of some conversations in it, for the user's home.
    ReadInbox { user: UserId, some: Option<Vec<ConversationId>> } -> Vec<InboxRow>;
    /// The conversations from which the page of an inbox before a position is chosen, for the user's home.
    OrderInbox { user: UserId, before: Option<Position>, limit: usize } -> InboxOrder;
    /// A user's presence now, and from now on when it changes. For the user's home.
    Watch { user: UserId, version: Epoch } -> PresenceItem, interested in |it| Topic::Presence(it.user.clone());
    /// A user's presence, for the user's home.
    ReadPresence { user: UserId } -> PresenceItem;
    /// A channel's entries and changes from now on, for its owner. The answer is the channel's position.
    WantChannel { channel: ConversationId, version: Epoch } -> Cursor, interested in |it| Topic::Channel(it.channel);
    /// Any gateway closes its sessions of the user. The answer is their number.
    Disconnect { user: UserId } -> usize;
    /// A user's devices, for the user's home.
    ListDevices { user: UserId } -> Vec<DeviceItem>;
    /// Registers a device, at the user's home, which gives it its version.
    SetDevice { user: UserId, device: Device } -> ();
    /// Removes a device, at the user's home.
    RemoveDevice { user: UserId, device: String } -> ();
    /// A user becomes the owner of a token, or is no longer its owner. For the gateway of the token.
    SetToken { hash: [u8; 32], user: UserId, device: String, claims: bool } -> ();
    /// What a user sets for a conversation, for the user's home.
    SetSettings { user: UserId, conversation: ConversationId, change: SettingsChange } -> InboxSettings;
    /// A user begins to upload so many bytes. For the user's home.
    BeginUpload { user: UserId, bytes: u64, limits: UploadLimits } -> UploadBegun;
    /// Users are to be notified of messages. For their home, which answers at once for whom it has not decided yet.
    Push { conversation: ConversationId, users: ToNotify } -> Vec<UserId>;
}

/// A conversation that a user is in, as their inbox refers to it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct InboxRef {
    pub conversation: ConversationId,
    pub kind: Kind,
    /// The newest entry of a dm or group. Only the owner of a channel knows that of the channel.
    pub last_seq: Option<Seq>,
    /// The rev of the newest change of a dm or group. It is zero for a channel.
    pub rev: Rev,
}

/// The position of a conversation in an inbox: the rank of its newest entry, and its id, so that the order is total.
pub(crate) type Position = (Rank, ConversationId);

/// The conversations from which a page of an inbox is chosen.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct InboxOrder {
    /// The positions of the dms and groups that may be on the page, newest entry first. There is one more than the page
    /// has room for, if there are so many.
    pub newest: Vec<Position>,
    /// All channels that the user is in. Only their owners know their newest entries.
    pub channels: Vec<ConversationId>,
}

/// Users who are to be notified, each of the message at this seq.
pub type ToNotify = Vec<(UserId, Seq)>;
