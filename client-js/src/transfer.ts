/** Sends files to the gateway by tus 1.0.0 (docs/attachments.md). Loaded with the first upload. */
import { delay, retryDelay, unless } from './backoff.js';
import { ChatError, type ErrorCode, lost } from './codes.js';
import type { Dispose } from './emitter.js';
import type { AttachmentId, ConversationId } from './types.js';
import type { Sender, Upload } from './upload.js';

/** The number of bytes in one request. */
const PART_BYTES = 4 << 20;
/** The number of uploads at the same time. The gateway allows four of a user, on all devices. */
const AT_ONCE = 3;
/** The number of temporary refusals in a row after which an upload fails. A broken connection is none. */
const REFUSALS_MAX = 8;
/** The time between two questions whether the gateway has looked at a file. */
const LOOK_MS = 500;

/** What uploads need of the client. */
export interface TransferHost {
  /** Resolves when there is a connection, and the conversation is created. Rejects when there will be none. */
  ready(conversation: ConversationId, signal: AbortSignal): Promise<void>;
  /** Calls `handler` when the connection ends, too. */
  on(name: 'state', handler: () => void): Dispose;
  /** Returns the URL of a path of the gateway. */
  http(path: string): Promise<string>;
  /** Returns a token, a new one if the gateway refused the last. */
  token(isRefused: boolean): Promise<string>;
}

/** An answer of the gateway with an error. */
class Refused extends ChatError {
  readonly status: number;

  constructor(status: number, code: ErrorCode, message: string, retryAfterMs?: number) {
    super(code, message, { retryAfterMs });
    this.status = status;
  }

  /** Another offset, or another writer: the next question for the offset clears that up. */
  override get temporary(): boolean {
    return [409, 423, 429].includes(this.status) || this.status >= 500;
  }
}

/** The uploads of one client. */
export class Transfers implements Sender {
  #host: TransferHost;
  #active = 0;
  /** Wakes the uploads that wait for their turn. */
  #queue: (() => void)[] = [];

  constructor(host: TransferHost) {
    this.#host = host;
  }

  /** Sends a file. Resolves with its id when messages may have it. */
  async run(upload: Upload, signal: AbortSignal): Promise<AttachmentId> {
    while (this.#active >= AT_ONCE) await unless(signal, new Promise<void>((resolve) => this.#queue.push(resolve)));
    this.#active++;
    try {
      return await this.#keepSending(upload, signal);
    } finally {
      this.#active--;
      for (const begin of this.#queue.splice(0)) begin();
    }
  }

  /** Has the gateway erase a file, or what came of it. Does nothing without a connection: a sweep erases it later. */
  drop(id: AttachmentId): void {
    void this.#send('DELETE', placeOf(id), { 'tus-resumable': '1.0.0' }).catch(() => {});
  }

  /** Sends a file on each new connection, until it is complete or refused for good. */
  async #keepSending(upload: Upload, signal: AbortSignal): Promise<AttachmentId> {
    let refusals = 0;
    for (let attempt = 0; ; attempt++) {
      await this.#host.ready(upload.conversation, signal);
      const { sent } = upload;
      try {
        return await this.#whileConnected(signal, (over) => this.#sendAll(upload, over));
      } catch (thrown) {
        if (signal.aborted) throw signal.reason;
        const error = thrown as ChatError;
        // Any other error is one of `fetch`: the network broke.
        const isOver = error instanceof ChatError && !error.temporary;
        if (isOver || (error instanceof Refused && ++refusals > REFUSALS_MAX)) throw error;
        if (upload.sent > sent) attempt = refusals = 0;
        upload.set('waiting');
        await delay(retryDelay({ retryAfterMs: error.retryAfterMs }, attempt), signal);
      }
    }
  }

  /** Calls `work` with a signal that is aborted with `signal`, and when the connection ends: a request may hang then. */
  async #whileConnected<T>(signal: AbortSignal, work: (over: AbortSignal) => Promise<T>): Promise<T> {
    const over = new AbortController();
    const end = () => over.abort(lost());
    const off = this.#host.on('state', end);
    signal.addEventListener('abort', end);
    try {
      return await work(over.signal);
    } finally {
      off();
      signal.removeEventListener('abort', end);
    }
  }

  /** Sends what the gateway does not have yet. */
  async #sendAll(upload: Upload, signal: AbortSignal): Promise<AttachmentId> {
    const known = upload.id && (await this.#offset(upload.id, signal));
    let { offset, state } = known || { offset: 0, state: 'pending' };
    const id = known ? upload.id! : (upload.id = await this.#create(upload, signal));
    upload.set('uploading');
    upload.progress(offset);
    while (offset < upload.size) {
      const headers = {
        'tus-resumable': '1.0.0',
        'content-type': 'application/offset+octet-stream',
        'upload-offset': `${offset}`,
      };
      const answer = await this.#send('PATCH', placeOf(id), headers, signal, upload.blob.slice(offset, offset + PART_BYTES));
      ({ offset, state } = progressOf(answer));
      upload.progress(offset);
    }
    // It is complete, and the gateway looks at it.
    while (state === 'pending' || state === 'scanning') {
      await delay(LOOK_MS, signal);
      state = (await this.#offset(id, signal))?.state ?? 'erased';
    }
    if (state === 'ready') return id;
    // A retry sends it anew.
    upload.id = undefined;
    throw new ChatError('conflict', `the file is ${state}`);
  }

  async #create({ conversation, name, size, alt }: Upload, signal: AbortSignal): Promise<AttachmentId> {
    const body = JSON.stringify({ conversation, name, size, ...(alt && { alt }) });
    const answer = await this.#send('POST', '/v1/attachments', { 'content-type': 'application/json' }, signal, body);
    return ((await answer.json()) as { id: AttachmentId }).id;
  }

  /** Returns how much of a file the gateway has; undefined if it does not know the file any more. */
  async #offset(id: AttachmentId, signal: AbortSignal) {
    try {
      return progressOf(await this.#send('HEAD', placeOf(id), { 'tus-resumable': '1.0.0' }, signal));
    } catch (error) {
      if ((error as Refused).status === 404) return undefined;
      throw error;
    }
  }

  /** Sends a request, and once more with a new token if the gateway refuses the known one. */
  async #send(
    method: string,
    path: string,
    headers: Record<string, string>,
    signal?: AbortSignal,
    body: Blob | string | null = null,
  ): Promise<Response> {
    const url = await this.#host.http(path);
    const once = async (isRefused: boolean) => {
      const authorization = `Bearer ${await this.#host.token(isRefused)}`;
      return fetch(url, { method, headers: { ...headers, authorization }, body, ...(signal && { signal }) });
    };
    let answer = await once(false);
    if (answer.status === 401) answer = await once(true);
    if (answer.ok) return answer;
    const { status } = answer;
    // HEAD has no body, and a proxy may answer with a page.
    const said = (await answer.json().catch(() => ({}))) as { code?: ErrorCode; message?: string; retry_after_ms?: number };
    const code = said.code ?? (status === 404 ? 'not_found' : status < 500 ? 'bad_request' : 'unavailable');
    throw new Refused(status, code, said.message ?? `the gateway answered ${status}`, said.retry_after_ms);
  }
}

const placeOf = (id: AttachmentId) => `/v1/attachments/${id}/upload`;

/** Returns the offset and the state in an answer. */
function progressOf({ headers }: Response): { offset: number; state: string } {
  return { offset: Number(headers.get('upload-offset')), state: headers.get('file-state') ?? 'ready' };
}
