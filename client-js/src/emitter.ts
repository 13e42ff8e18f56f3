/** Takes a handler away again. */
export type Dispose = () => void;

/** Typed events. A handler that throws harms no other one; its error is reported as an uncaught one. */
export class Emitter<Events> {
  #handlers = new Map<keyof Events, Set<(event: never) => void>>();

  /** Calls `handler` for each event; the same function twice is once. Returns what takes it away. */
  on<Name extends keyof Events>(name: Name, handler: (event: Events[Name]) => void): Dispose {
    let handlers = this.#handlers.get(name);
    if (!handlers) this.#handlers.set(name, (handlers = new Set()));
    handlers.add(handler);
    this.listened();
    return () => {
      handlers.delete(handler);
      this.listened();
    };
  }

  /** Somebody listens to some event. */
  protected get hasListeners(): boolean {
    return [...this.#handlers.values()].some((handlers) => handlers.size > 0);
  }

  /** A handler was added or taken away. */
  protected listened(): void {}

  /** @internal */
  emit<Name extends keyof Events>(name: Name, event: Events[Name]): void {
    for (const handler of [...(this.#handlers.get(name) ?? [])]) {
      try {
        (handler as (event: Events[Name]) => void)(event);
      } catch (error) {
        queueMicrotask(() => {
          throw error;
        });
      }
    }
  }
}
