/** The addresses of uploaded files. Loaded when an application first calls `attachment()`. */
import { ChatError } from './codes.js';
import { httpUrl } from './http-url.js';
import type { AttachmentId, AttachmentUrl, Millis, Replies, Request } from './types.js';

/** The number of ids in one request, which the gateway limits. */
const IDS_AT_ONCE = 50;
/** The number of files whose addresses are kept. */
const KNOWN_MAX = 1_000;
/** How long before its expiry an address is requested again. */
const EXPIRING_MS = 30_000;

/** What the addresses need of the client. */
export interface AddressHost {
  request<R extends Request>(request: R): Promise<Replies[R['type']]>;
  /** Returns the URL of the gateway. */
  readonly url: () => Promise<string> | string;
  /** Returns the time of the gateway. */
  now(): Millis;
}

/** An address that is known or requested, and when it expires: Infinity while it is requested. */
interface Known {
  address: Promise<AttachmentUrl>;
  expiresAt: Millis;
}

/** The promises of requested addresses, by id. */
type Asked = Map<AttachmentId, { resolve(address: AttachmentUrl): void; reject(error: unknown): void }>;

/** The addresses of one client. */
export class Addresses {
  #host: AddressHost;
  /** By id, the oldest first. */
  #known = new Map<AttachmentId, Known>();
  /** The ids that the next request asks for. */
  #next: Asked = new Map();

  constructor(host: AddressHost) {
    this.#host = host;
  }

  /** Returns the addresses of a file. Requests of one tick are sent together. */
  get(id: AttachmentId): Promise<AttachmentUrl> {
    const known = this.#known.get(id);
    if (known && known.expiresAt - this.#host.now() > EXPIRING_MS) return known.address;
    this.#known.delete(id);
    const address = new Promise<AttachmentUrl>((resolve, reject) => {
      if (!this.#next.size) queueMicrotask(() => this.#ask());
      this.#next.set(id, { resolve, reject });
    });
    const entry: Known = { address, expiresAt: Infinity };
    this.#known.set(id, entry);
    const forget = () => this.#known.get(id) === entry && this.#known.delete(id);
    address.then(({ expiresAt }) => (entry.expiresAt = expiresAt), forget);
    const [oldest] = this.#known.keys();
    if (this.#known.size > KNOWN_MAX) this.#known.delete(oldest!);
    return address;
  }

  #ask(): void {
    const all = [...this.#next];
    this.#next.clear();
    while (all.length) void this.#askFor(new Map(all.splice(0, IDS_AT_ONCE)));
  }

  async #askFor(asked: Asked): Promise<void> {
    try {
      const { items } = await this.#host.request({ type: 'attachment_urls', ids: [...asked.keys()] });
      for (const { url, thumb, ...item } of items) {
        const [full, small] = await Promise.all([url, thumb].map((path) => path && this.#absolute(path)));
        asked.get(item.id)?.resolve({ ...item, url: full!, ...(small && { thumb: small }) });
      }
      for (const { reject } of asked.values()) reject(new ChatError('not_found', 'there is no such file, or the user may not see it'));
    } catch (error) {
      for (const { reject } of asked.values()) reject(error);
    }
  }

  /** Returns the URL of a path of the gateway. An address in a bucket is one already. */
  async #absolute(path: string): Promise<string> {
    return path.startsWith('/') ? httpUrl(this.#host, path) : path;
  }
}
