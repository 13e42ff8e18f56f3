//! The requests of clients: one table, from which their decoder, their names in metrics, their costs, their routes over HTTP and
//! those routes' description follow.

use std::collections::HashMap;

use serde::{
    Deserialize,
    de::{DeserializeOwned, IgnoredAny},
};
use utoipa::ToSchema;

use super::{
    changed::Changes,
    device::{Away, DeviceSet, NamedDevice, SettingsSet},
    file::AttachmentUrls,
    frame::{
        ConversationAnswer, Created, HistoryPage, InboxPage, Okay, ParticipantsPage, PublicPage,
        ReactionsPage, Sent,
    },
    list::{at_most, given_objects_at_most, objects_at_most},
    route::{Described, Given},
};
use crate::model::{
    Attachment, ClientId, ConversationId, Cursor, Kind, Posting, Rev, Role, Seq, UserId,
    limits::{ATTACHMENTS_MAX, DELETE_SEQS_MAX, GROUP_PARTICIPANTS_MAX, WATCHED_MAX},
};

/// A frame from a client, with a valid header.
#[derive(Debug)]
pub struct Incoming {
    /// The id that the client chose. The reply repeats it.
    pub id: Option<u64>,
    /// The request, or the reason why it is invalid.
    pub request: Result<Request, String>,
}

/// The method of a route.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Method {
    Get,
    Put,
    Post,
    Patch,
    Delete,
}

/// How back ends ask a request.
pub struct Route {
    pub method: Method,
    pub path: &'static str,
    pub scope: &'static str,
    pub description: &'static str,
    /// The name of the type of the body, if there is one.
    pub body: Option<&'static str>,
    pub read: fn(&Given<'_>) -> Result<Request, String>,
    pub fields: fn() -> Described,
    pub answer: fn() -> Described,
}

/// An encoded request, whose type is known.
pub(super) trait EncodedRequest: Copy {
    /// Decodes the fields of the request.
    ///
    /// # Errors
    /// The text that says what is wrong with them.
    fn read<T: DeserializeOwned>(self) -> Result<T, String>;
}

/// Makes [`Request`] from the table of requests. A row has the `type` of the request and its fields; in brackets `page`, if the
/// answer may be as large as a page, and `cost`, the bytes of work for it beside its size and its answer; and after `=`, if back
/// ends may ask it, its route, the scope, and the type of the answer. What such a request has beside the fields of its path is in
/// the query, or in a body, which OpenAPI knows by the name after `body`. The comment of a row is its description.
macro_rules! requests {
    ($(
        $(#[doc = $doc:literal])*
        $name:literal => $request:ident $(($fields:ty))? $([$($property:tt)*])?
            $(= $method:ident $path:literal $scope:literal $(body $body:literal)? -> $answer:ty)?;
    )*) => {
        #[derive(Debug)]
        pub enum Request {
            $($(#[doc = $doc])* $request $(($fields))?,)*
        }

        impl Request {
            /// Decodes the request with this `type`. `None` if there is no such request.
            pub(super) fn decode(name: &str, encoded: impl EncodedRequest) -> Option<Result<Self, String>> {
                Some(match name {
                    $($name => requests!(@decode encoded, $request $(($fields))?),)*
                    _ => return None,
                })
            }

            /// Returns the `type` of the request, for metrics.
            #[must_use]
            pub fn name(&self) -> &'static str {
                match self {
                    $(Self::$request { .. } => $name,)*
                }
            }

            /// Returns whether the answer may be as large as a page.
            #[must_use]
            pub fn asks_for_a_page(&self) -> bool {
                match self {
                    $(Self::$request { .. } => requests!(@page $($($property)*)?),)*
                }
            }

            /// Returns the cost in bytes of the work for the request, in addition to its size and its answer.
            #[must_use]
            pub fn work_bytes(&self) -> usize {
                $(requests!(@cost self $request $($($property)*)?);)*
                0
            }

            /// Returns the routes of the requests that back ends may ask.
            #[must_use]
            pub fn routes() -> Vec<Route> {
                [$(
                    requests!(@route $request [$($doc)*] $(($fields))? $([$method $path $scope ($($body)?) $answer])?),
                )*]
                .into_iter()
                .flatten()
                .collect()
            }
        }
    };
    (@decode $encoded:ident, $request:ident($fields:ty)) => {
        $encoded.read::<$fields>().map(Self::$request)
    };
    (@decode $encoded:ident, $request:ident) => {
        $encoded.read::<IgnoredAny>().map(|_| Self::$request)
    };
    (@page page $($rest:tt)*) => { true };
    (@page $other:tt $($rest:tt)*) => { requests!(@page $($rest)*) };
    (@page) => { false };
    (@cost $this:ident $request:ident cost ($cost:expr)) => {
        if let Self::$request(fields) = $this {
            return applied(fields, $cost);
        }
    };
    (@cost $this:ident $request:ident $other:ident $($rest:tt)*) => { requests!(@cost $this $request $($rest)*) };
    (@cost $this:ident $request:ident) => {};
    (@route $request:ident [$($doc:literal)*] ($fields:ty) [$method:ident $path:literal $scope:literal ($($body:literal)?) $answer:ty]) => {
        Some(Route {
            method: Method::$method,
            path: $path,
            scope: $scope,
            description: concat!($($doc),*),
            body: [$($body)?].first().copied(),
            read: |given| given.read::<$fields>().map(Self::$request),
            fields: Described::of::<$fields>,
            answer: Described::of::<$answer>,
        })
    };
    (@route $request:ident [$($doc:literal)*] $(($fields:ty))?) => { None };
}

fn applied<T>(fields: &T, cost: impl Fn(&T) -> usize) -> usize {
    cost(fields)
}

/// The cost of watching a user, because their last-seen time is read.
const WATCH_BYTES: usize = 512;
/// The cost of a page of an inbox, because many rows are read.
const INBOX_BYTES: usize = 64 << 10;
/// The cost of a page of public conversations, participants, reactions or changes, even if few rows are returned.
const LISTING_BYTES: usize = 16 << 10;
/// The cost of the address of a file, because the file, its references and a message are read.
const FILE_BYTES: usize = 2 << 10;
/// The cost of each further message that one request deletes. So 256 of them take a budget of the default size, and then
/// as long as separate requests.
const DELETE_BYTES: usize = 8 << 10;

/// Returns the cost of a deletion. A longer list is refused without any work.
fn deletion(Delete { seqs, .. }: &Delete) -> usize {
    match seqs.len() {
        count @ 1..=DELETE_SEQS_MAX => (count - 1) * DELETE_BYTES,
        _ => 0,
    }
}

requests! {
    "connect" => Connect(Connect);
    "cursors" => Cursors(Cursors);
    "refresh" => Refresh(Refresh);
    /// Lists the user's conversations, newest first.
    "inbox" => Inbox(InboxRequest) [page cost(|_| INBOX_BYTES)] = Get "/v1/inbox" "messages:read" -> InboxPage;
    /// Creates a conversation, or returns the existing one.
    "create" => Create(Create) = Post "/v1/conversations" "conversations:write" body "Create" -> Created;
    /// Returns the details of a conversation and its numbers of participants and messages.
    "conversation" => Conversation(Named)
        = Get "/v1/conversations/{conversation}" "conversations:read" -> ConversationAnswer;
    /// Lists the participants with their roles and watermarks.
    "participants" => Participants(ParticipantsRequest) [page cost(|_| LISTING_BYTES)]
        = Get "/v1/conversations/{conversation}/participants" "conversations:read" -> ParticipantsPage;
    /// Adds a user.
    "add" => Add(NamedUser)
        = Post "/v1/conversations/{conversation}/participants" "conversations:write" body "TokenRequest" -> Okay;
    /// Removes a user.
    "remove" => Remove(NamedUser)
        = Delete "/v1/conversations/{conversation}/participants/{user}" "conversations:write" -> Okay;
    /// Adds the acting user to a public conversation.
    "join" => Join(Named) = Post "/v1/conversations/{conversation}/join" "conversations:write" -> Okay;
    /// Removes the acting user from the conversation.
    "leave" => Leave(Named) = Post "/v1/conversations/{conversation}/leave" "conversations:write" -> Okay;
    /// Changes the role of a participant.
    "set_role" => SetRole(SetRole)
        = Put "/v1/conversations/{conversation}/participants/{user}/role" "conversations:write" body "RoleBody" -> Okay;
    /// Changes the name, who may post, or whether the conversation is public.
    "update" => Update(Update) = Patch "/v1/conversations/{conversation}" "conversations:write" body "UpdateBody" -> Okay;
    /// Sends a message. It is stored durably before the answer.
    "send" => Send(Send)
        = Post "/v1/conversations/{conversation}/messages" "messages:write" body "SendBody" -> Sent;
    /// Returns a page of the history, oldest first.
    "history" => History(HistoryRequest) [page]
        = Get "/v1/conversations/{conversation}/messages" "messages:read" -> HistoryPage;
    /// Marks everything up to `seq` as read by the acting user.
    "read" => Read(Mark) = Post "/v1/conversations/{conversation}/read" "messages:write" body "MarkBody" -> Okay;
    /// Marks everything up to `seq` as delivered to the acting user.
    "delivered" => Delivered(Mark)
        = Post "/v1/conversations/{conversation}/delivered" "messages:write" body "MarkBody" -> Okay;
    "typing" => Typing(Named);
    "watch" => Watch(Users) [cost(|watch| watch.users.len() * WATCH_BYTES)];
    "unwatch" => Unwatch(Users);
    "subscribe" => Subscribe(Subscribe) [page];
    "unsubscribe" => Unsubscribe(Named);
    /// Lists public groups and channels.
    "public" => Public(PublicRequest) [page cost(|_| LISTING_BYTES)] = Get "/v1/public" "conversations:read" -> PublicPage;
    "ping" => Ping;
    /// Replaces the body of a message of the acting user, and its attachments if the request names them.
    "edit" => Edit(Edit)
        = Patch "/v1/conversations/{conversation}/messages/{seq}" "messages:write" body "EditBody" -> Okay;
    // Over HTTP moderators may do it too, so its routes are not made from this table.
    "delete" => Delete(Delete) [cost(deletion)];
    /// Adds a reaction of the acting user.
    "react" => React(Reaction)
        = Put "/v1/conversations/{conversation}/messages/{seq}/reactions/{emoji}" "messages:write" -> Okay;
    /// Removes a reaction of the acting user.
    "unreact" => Unreact(Reaction)
        = Delete "/v1/conversations/{conversation}/messages/{seq}/reactions/{emoji}" "messages:write" -> Okay;
    /// Lists the users who reacted to a message.
    "reactions" => Reactions(ReactionsRequest) [page cost(|_| LISTING_BYTES)]
        = Get "/v1/conversations/{conversation}/messages/{seq}/reactions" "messages:read" -> ReactionsPage;
    /// Lists the messages that changed after a rev.
    "changes" => Changes(ChangesRequest) [page cost(|_| LISTING_BYTES)]
        = Get "/v1/conversations/{conversation}/changes" "messages:read" -> Changes;
    "attachment_urls" => AttachmentUrls(AttachmentUrls) [cost(|asked| asked.ids.len() * FILE_BYTES)];
    // Users may ask these over HTTP too, with their own tokens.
    "device_set" => DeviceSet(DeviceSet);
    "device_remove" => DeviceRemove(NamedDevice);
    "devices" => Devices;
    "away" => Away(Away);
    "settings_set" => SettingsSet(SettingsSet);
}

#[derive(Debug, Deserialize)]
pub struct Connect {
    pub token: String,
    /// The name of the client's device, for logs.
    #[serde(default)]
    pub device: Option<String>,
    #[serde(default)]
    pub cursors: Option<HashMap<ConversationId, Cursor>>,
    /// Whether more cursors follow in `cursors` frames.
    #[serde(default)]
    pub more: bool,
}

/// More cursors of a `connect`.
#[derive(Debug, Deserialize)]
pub struct Cursors {
    pub cursors: HashMap<ConversationId, Cursor>,
    #[serde(default)]
    pub more: bool,
}

#[derive(Debug, Deserialize)]
pub struct Refresh {
    pub token: String,
}

#[derive(Debug, Deserialize, ToSchema)]
pub struct InboxRequest {
    #[serde(default)]
    pub limit: Option<usize>,
    /// The `next` of the previous page.
    #[serde(default)]
    pub before: Option<String>,
}

#[derive(Debug, Deserialize, ToSchema)]
pub struct Create {
    pub kind: Kind,
    #[serde(default, deserialize_with = "at_most::<_, _, GROUP_PARTICIPANTS_MAX>")]
    #[schema(value_type = Vec<String>)]
    pub participants: Vec<UserId>,
    #[serde(default)]
    pub name: Option<String>,
    /// The id of a group or channel, if the client chooses it (UUID version 4 or 7). It makes a repeated creation
    /// idempotent.
    #[serde(default)]
    #[schema(value_type = Option<String>, format = Uuid)]
    pub conversation: Option<ConversationId>,
    #[serde(default)]
    pub public: bool,
    #[serde(default)]
    pub posting: Posting,
}

#[derive(Debug, Deserialize, ToSchema)]
pub struct Named {
    #[schema(value_type = String, format = Uuid)]
    pub conversation: ConversationId,
}

#[derive(Debug, Deserialize, ToSchema)]
pub struct NamedUser {
    #[schema(value_type = String, format = Uuid)]
    pub conversation: ConversationId,
    #[schema(value_type = String)]
    pub user: UserId,
}

#[derive(Debug, Deserialize, ToSchema)]
pub struct SetRole {
    #[schema(value_type = String, format = Uuid)]
    pub conversation: ConversationId,
    #[schema(value_type = String)]
    pub user: UserId,
    pub role: Role,
}

#[derive(Debug, Deserialize, ToSchema)]
pub struct Update {
    #[schema(value_type = String, format = Uuid)]
    pub conversation: ConversationId,
    #[serde(default)]
    pub name: Option<String>,
    #[serde(default)]
    pub posting: Option<Posting>,
    #[serde(default)]
    pub public: Option<bool>,
}

#[derive(Debug, Deserialize, ToSchema)]
pub struct ParticipantsRequest {
    #[schema(value_type = String, format = Uuid)]
    pub conversation: ConversationId,
    /// The `next` of the previous page.
    #[serde(default)]
    #[schema(value_type = Option<String>)]
    pub after: Option<UserId>,
    #[serde(default)]
    pub limit: Option<usize>,
}

#[derive(Debug, Deserialize, ToSchema)]
pub struct Send {
    #[schema(value_type = String, format = Uuid)]
    pub conversation: ConversationId,
    #[schema(value_type = String, format = Uuid)]
    pub client_id: ClientId,
    pub body: String,
    #[serde(default, deserialize_with = "objects_at_most::<_, _, ATTACHMENTS_MAX>")]
    pub attachments: Vec<Attachment>,
    #[serde(default)]
    pub reply_to: Option<Seq>,
    #[serde(default)]
    pub retry: bool,
}

#[derive(Debug, Deserialize, ToSchema)]
pub struct HistoryRequest {
    #[schema(value_type = String, format = Uuid)]
    pub conversation: ConversationId,
    #[serde(default)]
    pub before: Option<Seq>,
    #[serde(default)]
    pub after: Option<Seq>,
    #[serde(default)]
    pub around: Option<Seq>,
    #[serde(default)]
    pub limit: Option<usize>,
}

#[derive(Debug, Deserialize, ToSchema)]
pub struct Edit {
    #[schema(value_type = String, format = Uuid)]
    pub conversation: ConversationId,
    pub seq: Seq,
    pub body: String,
    /// All attachments that the message has afterwards. Without this field it keeps those that it has; an empty list removes
    /// them.
    #[serde(
        default,
        deserialize_with = "given_objects_at_most::<_, _, ATTACHMENTS_MAX>"
    )]
    pub attachments: Option<Vec<Attachment>>,
    /// The rev of the content that the caller has seen. If the content changed after it, the edit is refused.
    #[serde(default)]
    pub base_rev: Option<Rev>,
}

#[derive(Debug, Deserialize)]
pub struct Delete {
    pub conversation: ConversationId,
    #[serde(deserialize_with = "at_most::<_, _, DELETE_SEQS_MAX>")]
    pub seqs: Vec<Seq>,
    /// Whether a back end deletes the messages of others. It is never part of a frame.
    #[serde(skip)]
    pub as_moderator: bool,
}

#[derive(Debug, Deserialize, ToSchema)]
pub struct Reaction {
    #[schema(value_type = String, format = Uuid)]
    pub conversation: ConversationId,
    pub seq: Seq,
    pub emoji: String,
}

#[derive(Debug, Deserialize, ToSchema)]
pub struct ReactionsRequest {
    #[schema(value_type = String, format = Uuid)]
    pub conversation: ConversationId,
    pub seq: Seq,
    /// Only the users of this emoji.
    #[serde(default)]
    pub emoji: Option<String>,
    /// The `next` of the previous page.
    #[serde(default)]
    pub after: Option<String>,
    #[serde(default)]
    pub limit: Option<usize>,
}

#[derive(Debug, Deserialize, ToSchema)]
pub struct ChangesRequest {
    #[schema(value_type = String, format = Uuid)]
    pub conversation: ConversationId,
    /// The rev up to which the caller has all changes.
    pub after: Rev,
    /// Revs of one page, at most 256.
    #[serde(default)]
    pub limit: Option<usize>,
}

#[derive(Debug, Deserialize, ToSchema)]
pub struct Mark {
    #[schema(value_type = String, format = Uuid)]
    pub conversation: ConversationId,
    pub seq: Seq,
    /// Whether the session of the request is away. It is never part of a frame.
    #[serde(skip)]
    pub away: bool,
}

#[derive(Debug, Deserialize)]
pub struct Users {
    #[serde(deserialize_with = "at_most::<_, _, WATCHED_MAX>")]
    pub users: Vec<UserId>,
}

#[derive(Debug, Deserialize)]
pub struct Subscribe {
    pub conversation: ConversationId,
    #[serde(default)]
    pub after: Option<Seq>,
    /// The rev up to which the client has all changes.
    #[serde(default)]
    pub rev: Option<Rev>,
}

#[derive(Debug, Deserialize, ToSchema)]
pub struct PublicRequest {
    /// The `next` of the previous page.
    #[serde(default)]
    #[schema(value_type = Option<String>)]
    pub after: Option<ConversationId>,
    #[serde(default)]
    pub limit: Option<usize>,
}
