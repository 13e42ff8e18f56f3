/** A TCP proxy that behaves like a bad network between clients and a gateway. */
import { connect, createServer, type Server, type Socket } from 'node:net';

/** `stalled`: data stops, and connections stay open. `refused`: connections end at once. */
type Mode = 'open' | 'stalled' | 'refused';

export class BadNetwork {
  /** The delay of each piece of data in milliseconds, in both directions. */
  delay = 0;
  /** The time in milliseconds for which data is gathered before all of it is passed on. */
  batch = 0;
  /** The number of connections that were accepted. */
  connections = 0;
  #mode: Mode = 'open';
  #server: Server | undefined;
  #pairs = new Set<[client: Socket, gateway: Socket]>();
  #gateway: string;

  constructor(gateway: string) {
    this.#gateway = gateway;
  }

  async start(): Promise<string> {
    this.#server = createServer((client) => this.#accept(client));
    await new Promise<void>((resolve) => this.#server!.listen(0, '127.0.0.1', resolve));
    const { port } = this.#server.address() as { port: number };
    return `ws://127.0.0.1:${port}/v1/ws`;
  }

  set mode(mode: Mode) {
    this.#mode = mode;
    if (mode === 'refused') this.cut();
    for (const pair of this.#pairs) for (const socket of pair) mode === 'stalled' ? socket.pause() : socket.resume();
  }

  /** Ends all connections, without a close frame. */
  cut(): void {
    for (const [client, gateway] of this.#pairs) {
      client.destroy();
      gateway.destroy();
    }
    this.#pairs.clear();
  }

  /** The gateway sees the connections end; the clients see nothing. */
  halfOpen(): void {
    for (const pair of this.#pairs) {
      pair[0].pause();
      pair[0].removeAllListeners('data');
      pair[1].removeAllListeners('close');
      pair[1].destroy();
    }
  }

  close(): void {
    this.cut();
    this.#server?.close();
  }

  #accept(client: Socket): void {
    if (this.#mode === 'refused') return void client.destroy();
    this.connections++;
    const [host, port] = this.#gateway.split(':');
    const gateway = connect(Number(port), host);
    const pair: [Socket, Socket] = [client, gateway];
    this.#pairs.add(pair);
    for (const [from, to] of [pair, [gateway, client] as const]) {
      from.setNoDelay(true);
      from.on('error', () => {});
      let gathered: Buffer[] = [];
      const flush = () => {
        const data = Buffer.concat(gathered);
        gathered = [];
        if (to.writable) to.write(data);
      };
      from.on('data', (data) => {
        if (this.batch) {
          if (gathered.push(data) === 1) setTimeout(flush, this.batch);
        } else if (this.delay) setTimeout(() => to.writable && to.write(data), this.delay);
        else to.write(data);
      });
      from.on('close', () => to.destroy());
      if (this.#mode === 'stalled') from.pause();
    }
  }
}
