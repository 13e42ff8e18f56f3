/** Sends files to the gateway by tus 1.0.0, or in parts to its file storage (docs/attachments.md). Loaded with the first upload. */
import { abortable, backoff, delay, retryDelay, unless, within } from './backoff.js';
import { ChatError, type ErrorCode, lost } from './codes.js';
import type { Dispose } from './emitter.js';
import { httpUrl } from './http-url.js';
import type { AttachmentId, ConversationId, Inspected, Millis } from './types.js';
import type { Sender, Upload } from './upload.js';

export { OutboxFiles } from './outbox-files.js';

/** The number of bytes in one request of tus. The gateway chooses the size of parts for its file storage. */
const PART_BYTES = 4 << 20;
/** The number of uploads at the same time. The gateway allows four of a user, on all devices. */
const AT_ONCE = 3;
/** The number of temporary refusals in a row after which an upload fails. A broken connection is none. */
const REFUSALS_MAX = 8;
/** The time after which the client asks whether the gateway has looked at a file. It doubles: an event says it too, but may be
 * missed. */
const LOOK_MS = 1_000;
const LOOK_MAX_MS = 60_000;
/** The time after which a file storage has not answered. A part of 16 MiB takes half an hour at 10 kB/s. */
const PART_TIMEOUT_MS = 60 * 60 * 1000;
/** The number of missing parts that the gateway lists at once. */
const PARTS_LISTED = 100;

/** What uploads need of the client. */
export interface TransferHost {
  /** Resolves when there is a connection, and the conversation is created. Rejects when there will be none. */
  ready(conversation: ConversationId, signal: AbortSignal): Promise<void>;
  /** Calls `handler` when the connection ends, too. */
  on(name: 'state', handler: () => void): Dispose;
  /** Calls `handler` when the gateway has looked at a file. */
  on(name: 'attachment', handler: (event: Inspected) => void): Dispose;
  /** Returns the URL of the gateway. */
  readonly url: () => Promise<string> | string;
  /** Returns a token, a new one if the gateway refused the last. */
  token(isRefused: boolean): Promise<string>;
  /** Returns the time of the gateway. */
  now(): Millis;
}

/** A part that the file storage does not have, with an address that needs no token. */
interface Part {
  offset: number;
  size: number;
  url: string;
}

/** How often in a row an upload failed for a time. */
interface Tries {
  attempt: number;
  refusals: number;
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

/** Returns the error of a file storage that did not take a part, while the gateway answers. The next list has new addresses. */
const untaken = (why: string, cause?: Error) =>
  Object.assign(new Refused(503, cause ? 'unreachable' : 'unavailable', `the file storage ${why}`), { cause });

/** The uploads of one client. */
export class Transfers implements Sender {
  #host: TransferHost;
  #active = 0;
  /** Wakes the uploads that wait for their turn. */
  #queue: (() => void)[] = [];

  constructor(host: TransferHost) {
    this.#host = host;
  }

  /** Sends a file on each new connection, until messages may have it or it is refused for good. Resolves with its id. */
  async run(upload: Upload, signal: AbortSignal): Promise<AttachmentId> {
    const tries: Tries = { attempt: 0, refusals: 0 };
    for (; ; tries.attempt++) {
      const { sent } = upload;
      try {
        await this.#host.ready(upload.conversation, signal);
        return await this.#whileConnected(signal, (over) => this.#complete(upload, over, tries));
      } catch (thrown) {
        if (signal.aborted) throw signal.reason;
        const error = thrown as ChatError;
        // Such as `fetch` in an environment without it.
        if (thrown instanceof ReferenceError) throw new ChatError('invalid', thrown.message, { cause: thrown });
        // Any other error is one of `fetch`: the network broke, or the file cannot be read.
        if (!(error instanceof ChatError)) await checkReadable(upload.blob, upload.sent);
        if (upload.sent > sent) tries.attempt = tries.refusals = 0;
        const isOver = error instanceof ChatError && !error.temporary;
        if (isOver || (error instanceof Refused && ++tries.refusals > REFUSALS_MAX)) throw error;
        upload.set('waiting');
        // A storage or a disk that fails does not say for how long.
        await delay(Math.max(retryDelay({ retryAfterMs: error.retryAfterMs ?? 0 }, tries.attempt), backoff(tries.attempt)), signal);
      }
    }
  }

  /** Has the gateway erase a file, or what came of it. If that fails, a sweep erases it later. */
  drop(id: AttachmentId): void {
    void this.#send('DELETE', placeOf(id), { 'tus-resumable': '1.0.0' }).catch(() => {});
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

  /** Sends what the gateway does not have yet, and waits until it has looked at the file. */
  async #complete(upload: Upload, signal: AbortSignal, tries: Tries): Promise<AttachmentId> {
    const sent = await this.#inTurn(signal, () => this.#sendAll(upload, signal));
    const id = upload.id!;
    // Other files have their turn meanwhile.
    const state = isUnseen(sent) ? await this.#looked(upload, id, signal, tries) : sent;
    if (state === 'ready') return id;
    // A retry sends it anew.
    upload.id = undefined;
    throw state === 'blocked'
      ? new ChatError('forbidden', 'the file was blocked: the gateway found something harmful in it')
      : new ChatError('conflict', `the file is ${state}`);
  }

  /** Waits until the gateway has looked at a file. Returns its state. */
  async #looked(upload: Upload, id: AttachmentId, signal: AbortSignal, tries: Tries): Promise<string> {
    let told: string | undefined;
    let wake = () => {};
    const off = this.#host.on('attachment', ({ file, state, metadata }) => {
      if (file !== id) return;
      told = state;
      upload.metadata = metadata;
      wake();
    });
    try {
      for (let ms = LOOK_MS; ; ms = Math.min(2 * ms, LOOK_MAX_MS)) {
        await abortable<void>(signal, (resolve) => {
          // It may have been told while the last request was on its way.
          if (told) return void resolve();
          wake = resolve;
          const timer = setTimeout(resolve, ms);
          return () => clearTimeout(timer);
        });
        const state = told ?? (await this.#progress(upload, id, signal))?.state ?? 'erased';
        tries.attempt = tries.refusals = 0;
        if (!isUnseen(state)) return state;
      }
    } finally {
      off();
    }
  }

  /** Calls `work` when few enough files are being sent. */
  async #inTurn<T>(signal: AbortSignal, work: () => Promise<T>): Promise<T> {
    while (this.#active >= AT_ONCE) await unless(signal, new Promise<void>((resolve) => this.#queue.push(resolve)));
    this.#active++;
    try {
      return await work();
    } finally {
      this.#active--;
      for (const begin of this.#queue.splice(0)) begin();
    }
  }

  /** Sends what the gateway does not have yet. Returns the state of the file. */
  async #sendAll(upload: Upload, signal: AbortSignal): Promise<string> {
    const known = upload.id && (await this.#progress(upload, upload.id, signal));
    // An upload expires, also a complete one that no message has. It then begins anew.
    const isKept = known && !/^eras/.test(known.state);
    const { offset, state } = isKept ? known : { offset: 0, state: 'pending' };
    if (!isKept) await this.#create(upload, signal);
    upload.set('uploading');
    if (state === 'pending') return upload.parts ? this.#sendParts(upload, upload.parts, signal) : this.#append(upload, offset, signal);
    upload.progress(upload.size);
    return state;
  }

  /** Sends the bytes from `offset` on by tus. Returns the state of the file. */
  async #append(upload: Upload, offset: number, signal: AbortSignal): Promise<string> {
    let state = 'pending';
    upload.progress(offset);
    while (offset < upload.size) {
      const headers = {
        'tus-resumable': '1.0.0',
        'content-type': 'application/offset+octet-stream',
        'upload-offset': `${offset}`,
      };
      const body = upload.blob.slice(offset, offset + PART_BYTES);
      ({ offset, state } = progressOf(upload, await this.#send('PATCH', placeOf(upload.id!), headers, signal, body)));
      upload.progress(offset);
    }
    return state;
  }

  /** Sends the missing parts to the file storage, and completes the file. Returns its state.
   * @param path Where the gateway lists them. */
  async #sendParts(upload: Upload, path: string, signal: AbortSignal): Promise<string> {
    const taken = new Set<number>();
    for (;;) {
      const asked = await this.#send('POST', path, {}, signal);
      const { parts, expires_at: expiresAt } = (await asked.json()) as { parts: Part[]; expires_at: Millis };
      if (!parts.length) break;
      const bytes = parts.reduce((sum, { size }) => sum + size, 0);
      // After a full list there may be more missing parts.
      const last = parts.at(-1)!;
      let sent = (parts.length < PARTS_LISTED ? upload.size : last.offset + last.size) - bytes;
      upload.progress(sent);
      if (parts.some(({ offset }) => taken.has(offset))) throw untaken('lost a part');
      for (const part of parts) {
        // The list has new addresses. The first one is tried in any case, because a clock may be wrong.
        if (part !== parts[0] && this.#host.now() > expiresAt) break;
        await put(upload.blob, part, signal);
        taken.add(part.offset);
        upload.progress((sent += part.size));
      }
    }
    upload.progress(upload.size);
    const answer = await this.#send('POST', `/v1/attachments/${upload.id}/complete`, {}, signal);
    const { state, metadata } = (await answer.json()) as Pick<Inspected, 'metadata'> & { state: string };
    upload.metadata = metadata;
    return state;
  }

  /** Has the gateway note the file. It answers where the bytes go. */
  async #create(upload: Upload, signal: AbortSignal): Promise<void> {
    const { conversation, name, size, alt } = upload;
    const body = JSON.stringify({ conversation, name, size, ...(alt && { alt }) });
    const answer = await this.#send('POST', '/v1/attachments', { 'content-type': 'application/json' }, signal, body);
    const { id, upload: to } = (await answer.json()) as { id: AttachmentId; upload: { parts?: string } };
    upload.id = id;
    upload.parts = to.parts;
  }

  /** Returns how much of a file the gateway has, and its state; undefined if it does not know the file any more. */
  async #progress(upload: Upload, id: AttachmentId, signal: AbortSignal) {
    try {
      return progressOf(upload, await this.#send('HEAD', placeOf(id), { 'tus-resumable': '1.0.0' }, signal));
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
    const url = await httpUrl(this.#host, path);
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

const isUnseen = (state: string) => state === 'pending' || state === 'scanning';
const placeOf = (id: AttachmentId) => `/v1/attachments/${id}/upload`;

/** Sends a part to the file storage. */
async function put(blob: Blob, { offset, size, url }: Part, signal: AbortSignal): Promise<void> {
  const body = blob.slice(offset, offset + size);
  // The address is of another host, and needs no token.
  const work = (over: AbortSignal) => fetch(url, { method: 'PUT', body, signal: over, credentials: 'omit' });
  const answer = await within(PART_TIMEOUT_MS, work, signal).catch(async (error: Error) => {
    if (signal.aborted) throw signal.reason ?? error;
    await checkReadable(blob, offset);
    throw untaken(`cannot be reached: ${error.message}`, error);
  });
  if (!answer.ok) throw untaken(`answered ${answer.status}`);
}

/** Throws if the bytes at an offset are gone: the file was changed or deleted, or the browser lost it. */
async function checkReadable(blob: Blob, offset: number): Promise<void> {
  try {
    // React Native cannot read blobs.
    await blob.slice(offset, offset + 1).arrayBuffer?.();
  } catch (cause) {
    throw new ChatError('not_found', 'the file cannot be read any more: choose it again', { cause });
  }
}

/** Returns the offset and the state in an answer, and notes what it says of the metadata. */
function progressOf(upload: Upload, { headers }: Response): { offset: number; state: string } {
  // An answer from before the gateway looked at the file may come after the event that said it.
  if (headers.get('file-metadata') === 'kept') upload.metadata = 'kept';
  return { offset: Number(headers.get('upload-offset')), state: headers.get('file-state') ?? 'ready' };
}
