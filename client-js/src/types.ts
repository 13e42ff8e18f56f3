/** The words of the protocol (docs/protocol.md), as types. Fields are `camelCase` here and `snake_case` on the wire: `wire.ts`
 * translates. */

import type { ErrorCode } from './codes.js';

/** A UUID as text. */
export type ConversationId = string;
/** 1 to 64 bytes, no white space. */
export type UserId = string;
/** A place in a conversation: 1, 2, 3 … without gaps. */
export type Seq = number;
/** Milliseconds since 1970, UTC. */
export type Millis = number;

export type Kind = 'dm' | 'group' | 'channel';
export type Role = 'member' | 'admin' | 'owner';
export type Posting = 'everyone' | 'admins';

export interface Attachment {
  /** `http:` or `https:`. */
  url: string;
  name?: string;
  /** Its media type. */
  mime?: string;
  /** Bytes. */
  size?: number;
}

/** What a system entry says has changed. */
export type SystemChange =
  | { change: 'created'; kind: Kind; name: string | null; posting: Posting; public: boolean; participants: UserId[] }
  | { change: 'added' | 'removed'; user: UserId }
  | { change: 'joined' | 'left' }
  | { change: 'role_set'; user: UserId; role: Role }
  | { change: 'updated'; name?: string; posting?: Posting; public?: boolean };

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
}

export interface LastMessage {
  seq: Seq;
  messageId: string;
  at: Millis;
  sender: UserId;
  kind: 'text' | 'system';
  /** The first 100 characters. */
  preview: string;
}

export interface InboxItem {
  conversation: ConversationId;
  kind: Kind;
  /** Of a dm: the other user. */
  name?: string;
  lastSeq: Seq;
  rev: number;
  lastMessage: LastMessage | null;
  readSeq: Seq;
  unread: number;
  joinedSeq: Seq;
}

export interface Details {
  kind: Kind;
  name?: string;
  createdAt: Millis;
  createdBy: UserId;
  posting: Posting;
  public: boolean;
}

export interface ConversationDetails extends Details {
  conversation: ConversationId;
  participantCount: number;
  messageCount: number;
  /** Absent for who only looks in. */
  role?: Role;
}

export interface Participant {
  user: UserId;
  role: Role;
  joinedSeq: Seq;
  /** In a channel, only of oneself; so is `readSeq`. */
  deliveredSeq?: Seq;
  readSeq?: Seq;
}

export interface Sent {
  seq: Seq;
  messageId: string;
  at: Millis;
  /** It was stored before, by an earlier try. */
  duplicate: boolean;
}

export interface HistoryPage {
  /** Oldest first. */
  messages: Message[];
  rev: number;
  /** The newest entry of the conversation. */
  head: Seq;
}

export interface PublicConversation {
  conversation: ConversationId;
  kind: Kind;
  name?: string;
  createdAt: Millis;
}

export interface Presence {
  user: UserId;
  online: boolean;
  lastSeen?: Millis;
}

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
}

export interface Connected {
  user: UserId;
  session: string;
  gateway: string;
  expiresAt: Millis;
  pingIntervalMs: number;
  limits: Limits;
  time: Millis;
}

export interface Receipt {
  conversation: ConversationId;
  user: UserId;
  readSeq?: Seq;
  deliveredSeq?: Seq;
}

export interface Typing {
  conversation: ConversationId;
  user: UserId;
}

/** This user's place in a conversation, or its details, changed. The details are there unless it was removed. */
export interface ConversationChange extends Partial<Details> {
  conversation: ConversationId;
  change: 'added' | 'removed' | 'updated';
}

/** Too much was missed to be pushed: what lies between is in the history. */
export interface Resync {
  conversation: ConversationId;
  head: Seq;
}

type In<Type extends string> = { type: Type; conversation: ConversationId };

/** Every request a client may make; its id is added by the connection. */
export type Request =
  | { type: 'connect'; token: string; device?: string; cursors?: Record<ConversationId, [Seq, number]>; more?: boolean }
  | { type: 'cursors'; cursors: Record<ConversationId, [Seq, number]>; more?: boolean }
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
  | (In<'subscribe'> & { after?: Seq })
  | { type: 'public'; after?: ConversationId; limit?: number }
  | { type: 'ping' };

/** What each request is answered with, if not with an error. */
export interface Replies {
  connect: Connected;
  /** Has no reply: that of `connect` comes after the last of them. */
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
  subscribe: { head: Seq };
  unsubscribe: unknown;
  public: { items: PublicConversation[]; next?: ConversationId };
  ping: { time: Millis };
}

/** What a gateway says without being asked. */
export type ServerEvent =
  | ({ type: 'message' } & Message)
  | ({ type: 'receipt' } & Receipt)
  | ({ type: 'typing' } & Typing)
  | ({ type: 'presence' } & Presence)
  | ({ type: 'conversation' } & ConversationChange)
  | ({ type: 'resync' } & Resync)
  | { type: 'reconnect'; afterMs: number }
  | { type: 'error'; code: ErrorCode; message: string };
