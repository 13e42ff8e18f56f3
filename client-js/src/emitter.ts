/** Takes a handler away again. */
export type Dispose = () => void;

type Handler<Event> = (event: Event) => void;

/** Typed events. A handler that throws harms no other one; its error is reported as an uncaught one. */
export class Emitter<Events> {
  /** By the function that was given: what is called for it. */
  #handlers: { [name in keyof Events]?: Map<Handler<never>, Handler<never>> } = {};

  /** Calls `handler` for each event; the same function twice is once. Returns what takes it away. */
  on<Name extends keyof Events>(name: Name, handler: Handler<Events[Name]>): Dispose {
    return this.#add(name, handler, handler);
  }

  /** Calls `handler` for the next event only. */
  once<Name extends keyof Events>(name: Name, handler: Handler<Events[Name]>): Dispose {
    const off = this.#add(name, handler, (event: Events[Name]) => {
      off();
      handler(event);
    });
    return off;
  }

  /** Takes a handler of `on` or `once` away. */
  off<Name extends keyof Events>(name: Name, handler: Handler<Events[Name]>): void {
    this.#handlers[name]?.delete(handler);
    this.listened();
  }

  /** @internal */
  hasListener(name: keyof Events): boolean {
    return !!this.#handlers[name]?.size;
  }

  /** Somebody listens to some event. */
  protected get hasListeners(): boolean {
    return Object.keys(this.#handlers).some((name) => this.hasListener(name as keyof Events));
  }

  /** A handler was added or taken away. */
  protected listened(): void {}

  /** @internal */
  emit<Name extends keyof Events>(name: Name, event: Events[Name]): void {
    for (const handler of [...(this.#handlers[name]?.values() ?? [])]) {
      try {
        (handler as Handler<Events[Name]>)(event);
      } catch (error) {
        queueMicrotask(() => {
          throw error;
        });
      }
    }
  }

  #add<Name extends keyof Events>(name: Name, key: Handler<Events[Name]>, handler: Handler<Events[Name]>): Dispose {
    (this.#handlers[name] ??= new Map()).set(key, handler);
    this.listened();
    return () => this.off(name, key);
  }
}
