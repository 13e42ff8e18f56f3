/** A file that is being uploaded. The code that sends it is loaded with the first one. */
import { onAbort, unless } from './backoff.js';
import { ChatError } from './codes.js';
import { Emitter } from './emitter.js';
import type { Attachment, AttachmentId, ConversationId } from './types.js';

/** `waiting`: for a connection, or for other uploads. `ready`: messages may have it. */
export type UploadState = 'waiting' | 'uploading' | 'ready' | 'failed';

/** The events of an upload, by name. */
export interface UploadEvents {
  /** The gateway has more bytes, or they are sent again. Both numbers are bytes. */
  progress: { sent: number; size: number };
  state: UploadState;
}

/** The optional facts of a file to upload. */
export interface AttachOptions {
  /** The name. Default: the one of a `File`. */
  name?: string;
  /** A description for people who cannot see the file. */
  alt?: string;
  /** Ends the upload as `abort()` does, until it is ready. */
  signal?: AbortSignal;
}

/** What sends the files of one client. */
export interface Sender {
  /** Sends a file. Resolves with its id when messages may have it. */
  run(upload: Upload, signal: AbortSignal): Promise<AttachmentId>;
  /** Has the gateway erase a file, or what came of it. */
  drop(id: AttachmentId): void;
}

/** A file that is being uploaded to a conversation. `conversation.attach()` returns it. */
export class Upload extends Emitter<UploadEvents> {
  readonly conversation: ConversationId;
  readonly blob: Blob;
  readonly name: string;
  /** The size in bytes. */
  readonly size: number;
  /** A description for people who cannot see the file. It may be changed until the message is sent. */
  alt: string | undefined;
  state: UploadState = 'waiting';
  /** `kept`: the file stayed as it was, and may say where and with what it was made. Tell the user before it is sent. Known once
   * the state is `ready`. */
  declare metadata?: 'kept' | undefined;
  /** The number of bytes that the gateway has. */
  sent = 0;
  /** Why it failed. */
  error: ChatError | undefined;
  /** @internal The id at the gateway, once it knows the file. */
  id: AttachmentId | undefined;
  /** @internal Where the gateway lists the missing parts, if they go to its file storage. */
  parts: string | undefined;
  /** Resolves with the id when messages may have the file; rejects when the upload failed. A new promise after `retry()`. */
  done!: Promise<AttachmentId>;
  #sender: () => Promise<Sender>;
  #over!: AbortController;
  #signal: AbortSignal | undefined;
  /** Ends listening to the signal. */
  #off: (() => void) | undefined;

  /** @internal */
  constructor(conversation: ConversationId, blob: Blob, { name, alt, signal }: AttachOptions, sender: () => Promise<Sender>) {
    super();
    this.conversation = conversation;
    this.blob = blob;
    this.name = name ?? (blob as File).name ?? 'file';
    this.size = blob.size;
    this.alt = alt;
    this.#sender = sender;
    this.#signal = signal;
    this.#start();
    if (signal?.aborted) this.abort();
  }

  /** Ends the upload, or gives up a file that no message has. The state is then `failed`. */
  abort(): void {
    const { id } = this;
    const error = new ChatError('closed', 'the upload was aborted');
    this.#over.abort(error);
    this.#set(Promise.reject(error));
    this.set('failed', error);
    this.id = undefined;
    if (id) this.#sender().then((sender) => sender.drop(id), noop);
  }

  /** Begins a failed upload again, where it broke off. */
  retry(): void {
    if (this.state === 'failed') this.#start();
  }

  /** @internal The attachment as the list shows it before the message is stored. */
  get attachment(): Attachment {
    const { id, name, size, alt, blob, state } = this;
    return { ...(state === 'ready' && { id: id! }), name, size, ...(blob.type && { mime: blob.type }), ...(alt && { alt }) };
  }

  /** @internal */
  set(state: UploadState, error?: ChatError): void {
    this.error = error;
    if (this.state === state) return;
    this.state = state;
    this.emit('state', state);
  }

  /** @internal */
  progress(sent: number): void {
    this.sent = sent;
    this.emit('progress', { sent, size: this.size });
  }

  #start(): void {
    this.#over = new AbortController();
    this.set('waiting');
    this.#off?.();
    this.#off = this.#signal && onAbort(this.#signal, () => this.abort());
    this.#set(this.#run(this.#over.signal));
  }

  #set(done: Promise<AttachmentId>): void {
    this.done = done;
    // The state shows the same, so a caller that does not wait gets no unhandled rejection.
    done.catch(noop);
  }

  async #run(signal: AbortSignal): Promise<AttachmentId> {
    try {
      const id = await unless(
        signal,
        this.#sender().then((sender) => sender.run(this, signal)),
      );
      if (signal.aborted) throw signal.reason;
      this.set('ready');
      return id;
    } catch (error) {
      // After `abort()` it may have begun again.
      if (!signal.aborted) this.set('failed', error as ChatError);
      throw error;
    } finally {
      // One signal may be for many uploads.
      if (signal === this.#over.signal) this.#off?.();
    }
  }
}

const noop = () => {};
