/** What a conversation needs of its client. */
import type { ChangeFeed } from './change-feed.js';
import type { Feed } from './feed.js';
import type { Inbox } from './inbox.js';
import type { Marks } from './marks.js';
import type { Outbox } from './outbox.js';
import type { ConversationId, HistoryPage, Millis, Replies, Request, UserId } from './types.js';
import type { AttachOptions, Upload } from './upload.js';

export interface Host {
  readonly user: UserId | undefined;
  readonly inbox: Inbox;
  readonly outbox: Outbox;
  readonly feed: Feed;
  readonly changeFeed: ChangeFeed;
  /** Queues a watermark. */
  mark(...mark: Parameters<Marks['add']>): void;
  /** How far the gateway's clock is ahead of this one. */
  readonly ahead: Millis;
  /** Returns the time of the gateway. */
  now(): Millis;
  /** Returns a page, and notes the rev of its states. */
  history(request: Request & { type: 'history' }, signal?: AbortSignal): Promise<HistoryPage>;
  request<R extends Request>(request: R, options?: { signal?: AbortSignal | undefined }): Promise<Replies[R['type']]>;
  upload(conversation: ConversationId, blob: Blob, options: AttachOptions): Upload;
  /** Sends a request that has no answer. */
  post(request: Request): void;
  /** Keeps the conversation, or lets it be collected. */
  hold(conversation: { readonly id: ConversationId }, held: boolean): void;
}
