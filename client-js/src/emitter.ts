/** Undoes the call that returned it: removes the handler, closes the list, or ends the watch. */
export type Dispose = () => void;

type Handler<Event> = (event: Event) => void;

/** A source of typed events. The error of a handler that throws is reported as uncaught; the other handlers still run. */
export class Emitter<Events> {
  /** By the function that was passed: the function to call. */
  #handlers: { [name in keyof Events]?: Map<Handler<never>, Handler<never>> } = {};

  /** Calls `handler` for each event. A function that is added twice is called once. Returns a function that removes it. */
  on<Name extends keyof Events>(name: Name, handler: Handler<Events[Name]>): Dispose {
    return this.#add(name, handler, handler);
  }

  /** Calls `handler` for the next event only. Returns a function that removes it. */
  once<Name extends keyof Events>(name: Name, handler: Handler<Events[Name]>): Dispose {
    const off = this.#add(name, handler, (event: Events[Name]) => {
      off();
      handler(event);
    });
    return off;
  }

  /** Removes a handler that `on` or `once` added. */
  off<Name extends keyof Events>(name: Name, handler: Handler<Events[Name]>): void {
    this.#handlers[name]?.delete(handler);
    this.listened();
  }

  /** @internal */
  hasListener(name: keyof Events): boolean {
    return !!this.#handlers[name]?.size;
  }

  /** Whether any event has a handler. */
  protected get hasListeners(): boolean {
    return Object.keys(this.#handlers).some((name) => this.hasListener(name as keyof Events));
  }

  /** Called after a handler was added or removed. */
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
