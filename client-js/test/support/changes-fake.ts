/** A fake gateway with messages that change, and clients of it. */
import { afterEach, beforeEach, expect, vi } from 'vitest';
import { ChatClient, type ChatMessage, type ChatOptions, memoryStorage } from '../../src/index.js';
import { ChangingServer } from './changing-server.js';

/** Waits until `check` returns a true value. */
export const until = (check: () => unknown) => vi.waitUntil(check, { timeout: 10_000, interval: 5 });

/** The server of the current test. */
export let server: ChangingServer;
const made: ChatClient[] = [];
export const make = (options: Partial<ChatOptions> = {}) => {
  const options_ = { token: 't', user: 'alice', WebSocket: server.WebSocket, storage: memoryStorage(), ...options };
  const client = new ChatClient('ws://fake', options_);
  made.push(client);
  return client;
};
export const connect = async (options: Partial<ChatOptions> = {}) => {
  const client = make(options);
  await client.connect();
  if (server.entries.length) await until(() => client.inbox.get('c'));
  return client;
};
/** Returns the conversation with its live list. */
export const open = async (client: ChatClient) => {
  const conversation = client.conversation('c');
  conversation.open();
  await conversation.whenLoaded();
  return conversation;
};
export const settled = (ms = 40) => new Promise((resolve) => setTimeout(resolve, ms));
export const show = ({ body, deleted, reactions, mine, editedAt }: ChatMessage) => ({
  body,
  ...(deleted && { deleted: deleted.by }),
  ...(reactions && { reactions }),
  ...(mine && { mine }),
  ...(editedAt && { edited: true }),
});
/** Expects that a client shows exactly what the server has. */
export const expectSame = (client: ChatClient) => {
  const shown = client.conversation('c').messages.map(show);
  const stored = (server.history({ limit: 300 }) as { messages: Record<string, never>[] }).messages;
  const plain = stored.map(({ body, deleted, reactions = {}, mine, edited_at }) =>
    show({ body, deleted, mine, editedAt: deleted ? 0 : edited_at, ...(Object.keys(reactions).length && { reactions }) } as never),
  );
  expect(shown).toEqual(plain);
};
export const breakOnce = (type: string, before = false) => {
  const answer = server.answers[type]!;
  server.answers[type] = (request) => {
    server.answers[type] = answer;
    if (!before) answer(request);
    return void server.socket.end(1006);
  };
};

/** Begins each test with a new server and ends its clients. */
export function setUpServer(): void {
  beforeEach(() => {
    server = new ChangingServer();
    for (let i = 1; i <= 5; i++) server.write(i % 2 ? 'alice' : 'bob', `${i}`);
    vi.spyOn(Math, 'random').mockReturnValue(0.01);
  });
  afterEach(() => {
    for (const client of made.splice(0)) client.disconnect();
    vi.restoreAllMocks();
  });
}
