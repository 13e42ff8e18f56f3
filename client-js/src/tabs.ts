/** The tabs of a browser in which the same user is signed in. */
import type { Note } from './outbox-entry.js';

/** The exchange of one tab with the others. */
export class Tabs {
  #channel: BroadcastChannel | undefined;
  #over = new AbortController();
  /** Whether an error was reported. */
  #told = false;
  #failed: (error: Error) => void;

  constructor(failed: (error: Error) => void) {
    this.#failed = failed;
  }

  /** Begins the exchange. */
  open(name: string, heard: (note: Note) => void): void {
    try {
      this.#channel ??= new BroadcastChannel(name);
      this.#channel.onmessage = ({ data }) => heard(data as Note);
    } catch (error) {
      this.#alone(error);
    }
  }

  tell(note: Note): void {
    try {
      this.#channel?.postMessage(note);
    } catch (error) {
      this.#alone(error);
    }
  }

  /** Calls `work` when no other tab holds the lock of this name. Outside of browsers, where there are no
   * locks, calls it at once.
   * @param signal Ends the wait for the lock. By default `close()` ends it. */
  async locked(name: string, work: () => Promise<unknown>, signal = this.#over.signal): Promise<void> {
    try {
      await (this.#channel && globalThis.navigator ? navigator.locks.request(this.#channel.name + name, { signal }, work) : work());
    } catch (error) {
      if (signal.aborted) return;
      this.#alone(error);
      await work();
    }
  }

  close(): void {
    this.#channel?.close();
    this.#channel = undefined;
    this.#over.abort();
    this.#over = new AbortController();
  }

  /** Reports once that this tab cannot coordinate with others. The gateway still stores each message once. */
  #alone(error: unknown): void {
    if (!this.#told) this.#failed(new Error(`Tabs cannot share the outbox: ${error}`));
    this.#told = true;
  }
}
