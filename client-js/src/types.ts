/** The types of the protocol (docs/protocol.md). Fields are `camelCase` here and `snake_case` on the wire; `wire.ts`
 * translates them. */

import type { ErrorCode } from './codes.js';

/** A UUID as text. */
export type ConversationId = string;
/** The UUID of an uploaded file, as text. */
export type AttachmentId = string;
/** The name of a user: 1 to 64 bytes without white space. */
export type UserId = string;
/** The sequence number of an entry in its conversation: 1, 2, 3 … without gaps. */
export type Seq = number;
/** The number of a change in its conversation: 1, 2, 3 … A higher one is newer. */
export type Rev = number;
/** A time in milliseconds since 1970, UTC. */
export type Millis = number;

/** The kind of a conversation. */
export type Kind = 'dm' | 'group' | 'channel';
/** What a participant may do in a conversation. */
export type Role = 'member' | 'admin' | 'owner';
/** Who may send messages to a conversation. */
export type Posting = 'everyone' | 'admins';

/** A file of a message: a link with a `url`, or an uploaded file with an `id`, whose address `chat.attachment(id)` returns. Of
 * an uploaded file only `id` and `alt` are sent, and the gateway adds the other fields. While it is being uploaded, it has
 * neither `url` nor `id`. */
export interface Attachment {
  /** The URL of a link, `http:` or `https:`. */
  url?: string;
  /** The id of an uploaded file. */
  id?: AttachmentId;
  name?: string;
  /** The media type. */
  mime?: string;
  /** The size in bytes. */
  size?: number;
  /** A description for people who cannot see the file. */
  alt?: string;
  /** The width of a picture in pixels. */
  width?: number;
  /** The height of a picture in pixels. */
  height?: number;
}

/** The addresses of an uploaded file, which anyone who has them can use until they expire. */
export interface AttachmentUrl {
  id: AttachmentId;
  url: string;
  /** The address of a small picture. */
  thumb?: string;
  /** The time of the gateway when the addresses expire: five to ten minutes later. */
  expiresAt: Millis;
}

/** The change that a system entry records. */
export type SystemChange =
  | { change: 'created'; kind: Kind; name: string | null; posting: Posting; public: boolean; participants: UserId[] }
  | { change: 'added' | 'removed'; user: UserId }
  | { change: 'joined' | 'left' }
  | { change: 'role_set'; user: UserId; role: Role }
  | { change: 'updated'; name?: string; posting?: Posting; public?: boolean };

/** The deletion of a message. */
export interface Deletion {
  by: UserId;
  at: Millis;
}

/** How often each emoji was used on a message. */
export type Reactions = Readonly<Record<string, number>>;

/** An entry of a conversation's log. */
export interface Message {
  conversation: ConversationId;
  seq: Seq;
  messageId: string;
  clientId: string;
  sender: UserId;
  kind: 'text' | 'system';
  body: string;
  attachments?: Attachment[];
  replyTo?: Seq;
  system?: SystemChange;
  at: Millis;
  /** The time of the newest edit. */
  editedAt?: Millis;
  /** Who deleted the message. Its text and attachments are gone. */
  deleted?: Deletion;
  reactions?: Reactions;
  /** The emoji with which the user reacted. */
  mine?: readonly string[];
  /** The rev of the newest change of this entry; absent if there is none. */
  rev?: Rev;
}

/** The newest state of one entry after a change. Only the fields that changed are present. */
export interface ChangedItem {
  seq: Seq;
  rev: Rev;
  body?: string;
  attachments?: Attachment[];
  editedAt?: Millis;
  deleted?: Deletion;
  reactions?: Reactions;
  /** The reaction that was added or removed, if it was only one. */
  by?: { user: UserId; emoji: string; on: boolean };
  /** All emoji with which the user reacted, at `rev`. Answers to `changes` have it, and what a new connection missed. */
  mine?: readonly string[];
}

/** The entries that changed after the rev `after` and up to `rev`. */
export interface Changed {
  conversation: ConversationId;
  after: Rev;
  rev: Rev;
  items: ChangedItem[];
  /** The client missed too many changes: everything that the application keeps of this conversation may be outdated. */
  reset?: boolean;
}

/** The user added or removed a reaction, on this device or another one. */
export interface Reacted {
  conversation: ConversationId;
  seq: Seq;
  emoji: string;
  on: boolean;
  rev: Rev;
}

/** One reaction of one user. */
export interface Reaction {
  user: UserId;
  emoji: string;
  at: Millis;
}

/** The answer to a change of a message. */
export interface Accepted {
  rev: Rev;
}

/** The newest message of a conversation, as the inbox shows it. */
export interface LastMessage {
  seq: Seq;
  messageId: string;
  at: Millis;
  sender: UserId;
  kind: 'text' | 'system';
  /** The beginning of the text: at most 100 code points, and whole grapheme clusters. Without text, it is that of the name, or
   * else the URL, of the first attachment. */
  preview: string;
  /** Whether it was deleted. `preview` is then empty. */
  deleted?: boolean;
}

/** A conversation in the inbox. */
export interface InboxItem {
  conversation: ConversationId;
  kind: Kind;
  /** The name; of a dm, the other user. */
  name?: string;
  lastSeq: Seq;
  /** The rev of the newest change that the item contains. */
  rev: Rev;
  lastMessage: LastMessage | null;
  readSeq: Seq;
  /** The number of unread messages of people, without deleted ones. */
  unread: number;
  joinedSeq: Seq;
  /** The time until which the user muted the conversation. Absent or null if it was not muted. Muting never changes `unread`. */
  mutedUntil?: Millis | null;
  /** Whether its messages are pushed to the user's devices. Absent if the user never set it, which is `on`, or at an older gateway. */
  push?: 'on' | 'off';
  /** The version of these settings. Absent if there are none. */
  settingsVersion?: number;
}

/** What a user set for a conversation. A setting that is absent did not change. */
export interface Settings {
  conversation: ConversationId;
  /** Of two versions the higher one is newer. */
  version: number;
  mutedUntil?: Millis | null;
  push?: 'on' | 'off';
}

/** The token of an app, from its push service. */
export interface AppToken {
  provider: 'fcm' | 'apns';
  token: string;
}

/** A `PushSubscription` of a browser, or its `toJSON()`. */
export interface WebSubscription {
  endpoint?: string;
  keys?: Record<string, string>;
  toJSON?(): { endpoint?: string; keys?: Record<string, string> };
}

/** What a push says: the sender and the text, or only the conversation, the seq and the badge. */
export type PushContent = 'full' | 'none';

/** A device to which messages are pushed. */
export interface Device {
  /** The id that the device chose. */
  device: string;
  provider: 'web' | AppToken['provider'];
  content?: PushContent;
}

/** The devices of a user. */
export interface Devices {
  items: Device[];
  /** The `applicationServerKey` with which browsers subscribe. Absent or null if the gateway pushes to no browsers. */
  webKey?: string | null;
}

/** The properties of a conversation that events carry. */
export interface Details {
  kind: Kind;
  name?: string;
  createdAt: Millis;
  createdBy: UserId;
  posting: Posting;
  public: boolean;
}

/** All properties of a conversation. */
export interface ConversationDetails extends Details {
  conversation: ConversationId;
  participantCount: number;
  /** The number of messages of people, without deleted ones. */
  messageCount: number;
  /** The seq of the newest entry. */
  head?: Seq;
  rev?: Rev;
  /** The role of the user; absent if the user is not a participant. */
  role?: Role;
}

/** A participant of a conversation. */
export interface Participant {
  user: UserId;
  role: Role;
  joinedSeq: Seq;
  /** The `delivered` watermark. In a channel only the user's own item has it, and `readSeq`. */
  deliveredSeq?: Seq;
  readSeq?: Seq;
}

/** The acknowledgement of a message. */
export interface Sent {
  seq: Seq;
  messageId: string;
  at: Millis;
  /** Whether an earlier attempt stored the message. */
  duplicate: boolean;
}

/** A page of a conversation's log. */
export interface HistoryPage {
  /** The entries, oldest first. */
  messages: Message[];
  /** The entries contain all changes up to this rev. */
  rev: Rev;
  /** The seq of the newest entry of the conversation. */
  head: Seq;
}

/** A public group or channel. */
export interface PublicConversation {
  conversation: ConversationId;
  kind: Kind;
  name?: string;
  createdAt: Millis;
}

/** Whether a user is online. */
export interface Presence {
  user: UserId;
  online: boolean;
  lastSeen?: Millis;
}

/** The limits of the gateway. */
export interface Limits {
  frameBytes: number;
  bodyBytes: number;
  attachments: number;
  groupParticipants: number;
  pageEntries: number;
  requestsPerSecond: number;
  requestsBurst: number;
  watchedUsers: number;
  cursors: number;
  /** The time in seconds within which a message may be edited; 0 is for ever. */
  editWindowS?: number;
  /** The number of different emoji on one message. */
  reactions?: number;
  /** The number of messages that one `delete` may name. */
  deleteSeqs?: number;
}

/** The answer to `connect`. */
export interface Connected {
  user: UserId;
  session: string;
  gateway: string;
  expiresAt: Millis;
  pingIntervalMs: number;
  limits: Limits;
  time: Millis;
}

/** New watermarks of a user. */
export interface Receipt {
  conversation: ConversationId;
  user: UserId;
  readSeq?: Seq;
  deliveredSeq?: Seq;
}

/** A user is typing in a conversation. */
export interface Typing {
  conversation: ConversationId;
  user: UserId;
}

/** The user was added to or removed from a conversation, or its details changed. `removed` carries no details. */
export interface ConversationChange extends Partial<Details> {
  conversation: ConversationId;
  change: 'added' | 'removed' | 'updated';
}

/** The client missed too much for a replay. The messages up to `head` are in the history. */
export interface Resync {
  conversation: ConversationId;
  head: Seq;
}

type In<Type extends string> = { type: Type; conversation: ConversationId };

/** Every request of the protocol. The connection adds the id. */
export type Request =
  | { type: 'connect'; token: string; device?: string; cursors?: Record<ConversationId, [Seq, Rev]>; more?: boolean }
  | { type: 'cursors'; cursors: Record<ConversationId, [Seq, Rev]>; more?: boolean }
  | { type: 'refresh'; token: string }
  | { type: 'inbox'; limit?: number; before?: string }
  | {
      type: 'create';
      kind: Kind;
      participants?: UserId[];
      name?: string;
      conversation?: ConversationId;
      public?: boolean;
      posting?: Posting;
    }
  | In<'conversation' | 'join' | 'leave' | 'typing' | 'unsubscribe'>
  | (In<'participants'> & { after?: UserId; limit?: number })
  | (In<'add' | 'remove'> & { user: UserId })
  | (In<'set_role'> & { user: UserId; role: Role })
  | (In<'update'> & { name?: string; posting?: Posting; public?: boolean })
  | (In<'send'> & { clientId: string; body: string; attachments?: Attachment[]; replyTo?: Seq; retry?: boolean })
  | (In<'history'> & { before?: Seq; after?: Seq; around?: Seq; limit?: number })
  | (In<'read' | 'delivered'> & { seq: Seq })
  | { type: 'watch' | 'unwatch'; users: UserId[] }
  | (In<'subscribe'> & { after?: Seq; rev?: Rev })
  | (In<'edit'> & { seq: Seq; body: string; attachments?: Attachment[]; baseRev?: Rev })
  | (In<'delete'> & { seqs: Seq[] })
  | (In<'react' | 'unreact'> & { seq: Seq; emoji: string })
  | (In<'reactions'> & { seq: Seq; emoji?: string; after?: string; limit?: number })
  | (In<'changes'> & { after: Rev; limit?: number })
  | { type: 'public'; after?: ConversationId; limit?: number }
  | { type: 'ping' }
  | { type: 'attachment_urls'; ids: AttachmentId[] }
  | ({ type: 'device_set'; device: string; content?: PushContent } & (
      | AppToken
      | { provider: 'web'; subscription: { endpoint: string; keys: { p256dh: string; auth: string } } }
    ))
  | { type: 'device_remove'; device: string }
  | { type: 'devices' }
  | { type: 'away'; away: boolean }
  | (In<'settings_set'> & { mutedUntil?: Millis; push?: 'on' | 'off' });

/** The answer to each request, by its type. */
export interface Replies {
  connect: Connected;
  /** `cursors` has no answer. `connect` is answered after the last of them. */
  cursors: unknown;
  refresh: { expiresAt: Millis };
  inbox: { items: InboxItem[]; next?: string };
  create: { conversation: ConversationId; existed: boolean };
  conversation: ConversationDetails;
  participants: { items: Participant[]; next?: UserId };
  add: { seq?: Seq };
  remove: { seq?: Seq };
  join: { seq?: Seq };
  leave: { seq?: Seq };
  set_role: { seq?: Seq };
  update: { seq?: Seq };
  send: Sent;
  history: HistoryPage;
  read: unknown;
  delivered: unknown;
  typing: unknown;
  watch: { items: Presence[] };
  unwatch: { items: Presence[] };
  subscribe: { head: Seq; rev?: Rev };
  edit: Accepted;
  delete: Accepted;
  react: Accepted;
  unreact: Accepted;
  reactions: { items: Reaction[]; next?: string };
  changes: { after: Rev; rev: Rev; items: ChangedItem[]; more?: boolean; reset?: boolean };
  unsubscribe: unknown;
  public: { items: PublicConversation[]; next?: ConversationId };
  ping: { time: Millis };
  attachment_urls: { items: AttachmentUrl[] };
  device_set: unknown;
  device_remove: unknown;
  devices: Devices;
  away: unknown;
  settings_set: { version: number };
}

/** What the gateway found when it looked at a file that the user uploaded, on any device. */
export interface Inspected {
  file: AttachmentId;
  /** Whether messages may have it, or the scanner found something in it. */
  state: 'ready' | 'blocked';
  mime?: string;
  /** The size of a picture in pixels, as it is shown. */
  width?: number;
  height?: number;
  /** `kept`: the file is as it was uploaded, so it may say where and with what it was made. Tell its uploader. */
  metadata?: 'kept';
}

/** A frame that the gateway pushes. */
export type ServerEvent =
  | ({ type: 'message' } & Message)
  | ({ type: 'receipt' } & Receipt)
  | ({ type: 'typing' } & Typing)
  | ({ type: 'presence' } & Presence)
  | ({ type: 'conversation' } & ConversationChange)
  | ({ type: 'resync' } & Resync)
  | ({ type: 'changed' } & Changed)
  | ({ type: 'reacted' } & Reacted)
  | ({ type: 'attachment' } & Inspected)
  | ({ type: 'settings' } & Settings)
  | { type: 'reconnect'; afterMs: number }
  | { type: 'error'; code: ErrorCode; message: string };
