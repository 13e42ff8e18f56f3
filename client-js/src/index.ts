export { indexedDbStorage } from './browser-storage.js';
export { ChatClient, type ChatOptions, type ClientEvents, type Logger, type NewConversation, type RequestOptions } from './client.js';
export { ChatError, type ErrorCode, UnauthorizedError } from './codes.js';
export type { State, TokenReason, TokenSource } from './connection.js';
export type {
  Conversation,
  ConversationEvents,
  EditOptions,
  SendOptions,
} from './conversation.js';
export type { Dispose } from './emitter.js';
export type { Inbox } from './inbox.js';
export type { ChangeType, ChatMessage, FailedChange, MessageState } from './list.js';
export { memoryStorage, type OutboxChange, type OutboxEntry, type OutboxStorage } from './storage.js';
export type * from './types.js';
export type { AttachOptions, Upload, UploadEvents, UploadState } from './upload.js';
