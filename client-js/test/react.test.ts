/** The React hooks, in StrictMode, which mounts, unmounts and mounts again, and in server rendering. */
import { createElement, StrictMode, useEffect } from 'react';
import { createRoot } from 'react-dom/client';
import { renderToString } from 'react-dom/server';
import { afterEach, expect, test, vi } from 'vitest';
import { ChatClient } from '../src/index.js';
import { useConnection, useConversation, useInbox, usePresence, useUpload } from '../src/react.js';
import { Upload } from '../src/upload.js';
import { FakeServer } from './support/fake-server.js';
import { until } from './support/gateway.js';

/** The part of a document that a component without output needs. */
function container(): Element {
  const node = { nodeType: 1, nodeName: 'DIV', tagName: 'DIV', namespaceURI: 'http://www.w3.org/1999/xhtml', addEventListener() {} };
  const ownerDocument = { nodeType: 9, nodeName: '#document', addEventListener() {}, activeElement: null };
  return Object.assign(node, { ownerDocument, removeEventListener() {}, textContent: '' }) as unknown as Element;
}

// React uses these also after the last test.
Object.assign(globalThis, { window: globalThis, HTMLIFrameElement: class {} });

const rejections: unknown[] = [];
const note = (error: unknown) => rejections.push(error);
process.on('unhandledRejection', note);
afterEach(() => {
  expect(rejections).toEqual([]);
});

function fake(): { server: FakeServer; client: ChatClient } {
  const server = new FakeServer();
  const message = { conversation: 'c', seq: 1, message_id: 'm', client_id: 'x', sender: 'bob', kind: 'text', body: 'hi', at: 1 };
  server.answers.history = () => ({ type: 'history', messages: [message], rev: 0, head: 1 });
  server.answers.conversation = () => ({ type: 'conversation', conversation: 'c', kind: 'group', participant_count: 2, role: 'member' });
  server.answers.participants = () => ({ type: 'participants', items: [] });
  server.answers.watch = () => ({ type: 'presence', items: [{ user: 'bob', online: true }] });
  return { server, client: new ChatClient('ws://fake', { token: 't', WebSocket: server.WebSocket }) };
}

interface Seen {
  at: string;
  bodies: string[];
  loaded: boolean;
  online: boolean | undefined;
}

function Everything({ client, seen }: { client: ChatClient; seen: Seen[] }) {
  useEffect(() => {
    void client.connect();
    return () => client.disconnect();
  }, [client]);
  const { at } = useConnection(client);
  const { loaded } = useInbox(client);
  const { messages } = useConversation(client, 'c');
  const online = usePresence(client, 'bob')?.online;
  seen.push({ at, loaded, online, bodies: messages.map(({ body }) => body) });
  return null;
}

test('in StrictMode all hooks have their data, and no rejection is unhandled', async () => {
  for (let run = 0; run < 10; run++) {
    const { client } = fake();
    const seen: Seen[] = [];
    const root = createRoot(container());
    root.render(createElement(StrictMode, null, createElement(Everything, { client, seen })));
    await until(() => {
      const last = seen.at(-1);
      return last?.at === 'connected' && last.loaded && last.online && last.bodies[0] === 'hi';
    });
    root.unmount();
    await until(() => client.state.at === 'idle');
  }
});

test('server rendering does not depend on the state of the client, and React does not warn', async () => {
  const errors = vi.spyOn(console, 'error').mockImplementation(() => {});
  const { client } = fake();
  const seen: Seen[] = [];
  const element = createElement(Everything, { client, seen });
  renderToString(element);
  await client.connect();
  const close = client.conversation('c').open();
  await client.conversation('c').whenLoaded();
  renderToString(element);
  expect(seen).toEqual([seen[0], seen[0]]);
  expect(seen[0]).toEqual({ at: 'idle', loaded: false, online: undefined, bodies: [] });
  expect(errors).not.toHaveBeenCalled();
  errors.mockRestore();
  close();
  client.disconnect();
});

function Progress({ upload, seen }: { upload: Upload; seen: unknown[] }) {
  const { state, sent, size, error } = useUpload(upload);
  seen.push([state, sent, size, error]);
  return null;
}

test('useUpload shows the progress and the end of an upload', async () => {
  let end = (_: string) => {};
  const sender = { run: () => new Promise<string>((resolve) => (end = resolve)), drop() {} };
  const upload = new Upload('c', new Blob(['four']), {}, async () => sender);
  const seen: unknown[] = [];
  const root = createRoot(container());
  root.render(createElement(Progress, { upload, seen }));
  await until(() => seen.length);
  upload.set('uploading');
  upload.progress(3);
  await until(() => `${seen.at(-1)}` === 'uploading,3,4,');
  end('file');
  await until(() => `${seen.at(-1)}` === 'ready,3,4,');
  // It is rendered once for each change.
  expect(seen.length).toBeLessThanOrEqual(4);
  root.unmount();
});
