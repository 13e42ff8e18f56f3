/** Reactions on several devices, the inbox and quotes when messages change, against a fake gateway. */
import 'fake-indexeddb/auto';
import { describe, expect, test } from 'vitest';
import type { ChatClient } from '../src/index.js';
import { msgpack } from '../src/msgpack.js';
import { connect, expectSame, open, server, settled, setUpServer, until } from './support/changes-fake.js';

setUpServer();

describe('reactions of one user on several devices', () => {
  test('`by`, `reacted` and `mine` keep the own ones right', async () => {
    const client = await connect();
    const list = await open(client);
    // The phone reacts.
    server.change('alice', { type: 'react', seq: 2, emoji: '👍' });
    server.change('bob', { type: 'react', seq: 2, emoji: '👍' });
    expect(list.message(2)).toMatchObject({ reactions: { '👍': 2 }, mine: ['👍'] });
    server.change('alice', { type: 'unreact', seq: 2, emoji: '👍' });
    expectSame(client);
    // `by` alone says it too.
    server.isDeaf = true;
    server.change('alice', { type: 'react', seq: 1, emoji: '🔥' });
    server.isDeaf = false;
    server.push({ type: 'changed', conversation: 'c', after: 3, rev: 4, items: server.items(3, 4) });
    expect(list.message(1)).toMatchObject({ reactions: { '🔥': 1 }, mine: ['🔥'] });
    // In a busy channel the counts come later than `reacted`, in one event without `by`.
    server.isDeaf = true;
    server.change('alice', { type: 'react', seq: 4, emoji: '🎉' });
    server.change('bob', { type: 'react', seq: 4, emoji: '🎉' });
    server.isDeaf = false;
    server.push({ type: 'reacted', conversation: 'c', seq: 4, emoji: '🎉', on: true, rev: 5 });
    expect(list.message(4)).toMatchObject({ reactions: { '🎉': 1 }, mine: ['🎉'] });
    server.push({ type: 'changed', conversation: 'c', after: 4, rev: 6, items: server.items(4, 6) });
    expectSame(client);
    // An old note changes nothing.
    server.push({ type: 'reacted', conversation: 'c', seq: 2, emoji: '👍', on: true, rev: 1 });
    expectSame(client);
  });

  test.each([1, 256])('what another device did while this one was away is pushed, %i revs in an event', async (revs) => {
    server.isResuming = true;
    server.eventRevs = revs;
    server.change('alice', { type: 'react', seq: 2, emoji: '🚀' });
    server.change('alice', { type: 'unreact', seq: 2, emoji: '🚀' });
    const client = await connect();
    const list = await open(client);
    server.socket.end(1006);
    server.change('alice', { type: 'react', seq: 2, emoji: '👍' });
    server.change('bob', { type: 'react', seq: 2, emoji: '👍' });
    server.write('bob', '6');
    server.change('bob', { type: 'react', seq: 6, emoji: '🎉' });
    server.change('alice', { type: 'react', seq: 6, emoji: '🎉' });
    await until(() => client.state.at === 'connected' && list.messages.length === 6);
    await settled();
    expect([list.message(2)!.mine, list.message(6)!.mine]).toEqual([['👍'], ['🎉']]);
    // What the phone undid meanwhile is undone here too.
    server.socket.end(1006);
    server.change('alice', { type: 'unreact', seq: 2, emoji: '👍' });
    server.change('bob', { type: 'react', seq: 2, emoji: '🔥' });
    await until(() => client.cursors().c![1] === server.rev);
    expectSame(client);
    expect(server.received('changes')).toEqual([]);
  });

  test('a subscription gets them before its reply', async () => {
    server.change('bob', { type: 'react', seq: 2, emoji: '🚀' });
    const client = await connect();
    const list = await open(client);
    server.isDeaf = true;
    for (const user of ['alice', 'bob']) server.change(user, { type: 'react', seq: 2, emoji: '👍' });
    server.isDeaf = false;
    await list.subscribe();
    expectSame(client);
    expect(server.received('changes')).toEqual([]);
  });

  test('a reaction that is pending is counted once', async () => {
    const client = await connect();
    const list = await open(client);
    const react = server.answers.react!;
    let go = () => {};
    server.answers.react = (request) => {
      server.answers.react = react;
      const answer = react(request) as object;
      go = () => server.socket.say({ ...answer, id: request.id });
      return undefined;
    };
    const done = list.react(2, '👍');
    await until(() => server.rev === 1);
    expect(list.message(2)).toMatchObject({ reactions: { '👍': 1 }, mine: ['👍'], pending: ['react'] });
    go();
    await done;
    expectSame(client);
    expect((await list.reactions(2)).items).toEqual([{ user: 'alice', emoji: '👍', at: 1 }]);
  });

  test('emoji are not names: they are translated nowhere', async () => {
    const client = await connect();
    const list = await open(client);
    for (const emoji of [':thumbs_up:', 'constructor', '__proto__']) await list.react(2, emoji);
    expect(Object.keys(list.message(2)!.reactions!)).toEqual([':thumbs_up:', 'constructor', '__proto__']);
    expectSame(client);
    // The library refuses such a key.
    const frame = JSON.parse('{ "type": "changed", "items": [{ "reactions": { "__proto__": 2, "nine byte": 1, "👍": 1 } }] }');
    expect(JSON.stringify(msgpack.decode(msgpack.encode(frame) as never))).toBe(JSON.stringify(frame));
  });
});

describe('the inbox', () => {
  const unread = (client: ChatClient) => client.inbox.get('c')!.unread;

  test('counts only messages of people that are not deleted, live', async () => {
    const client = await connect();
    expect(unread(client)).toBe(0);
    for (const body of ['6', '7', '8']) server.write('bob', body);
    server.write('bob', '', 'system');
    expect(unread(client)).toBe(3);
    const deleted = { type: 'changed', conversation: 'c', after: 0, rev: 1 };
    server.change('bob', { type: 'delete', seqs: [7] });
    expect(unread(client)).toBe(2);
    server.push({ ...deleted, items: server.items(0, 1) });
    server.push({ ...deleted, after: 1, rev: 1, items: server.items(0, 1) });
    expect(unread(client)).toBe(2);
    // A message that was read does not count again.
    server.change('bob', { type: 'delete', seqs: [2] });
    expect(unread(client)).toBe(2);
    await client.inbox.refresh({ all: true });
    expect(unread(client)).toBe(2);
  });

  test('does not count a message that came deleted, nor its deletion', async () => {
    const client = await connect();
    server.isDeaf = true;
    server.write('bob', '6');
    const message = server.write('bob', '7');
    server.change('bob', { type: 'delete', seqs: [7] });
    server.isDeaf = false;
    server.push(server.message(server.entries[5]!, false));
    server.push(server.message(message, false));
    expect(unread(client)).toBe(1);
    server.push({ type: 'changed', conversation: 'c', after: 0, rev: 1, items: server.items(0, 1) });
    expect(unread(client)).toBe(1);
  });

  test('stays right when a page of the inbox is older or newer than the events', async () => {
    const client = await connect();
    for (const body of ['6', '7', '8']) server.write('bob', body);
    const old = server.item();
    server.answers.inbox = () => {
      // The page was read before all of these.
      server.write('bob', '9');
      server.write('bob', '', 'system');
      server.change('bob', { type: 'delete', seqs: [7] });
      server.change('bob', { type: 'edit', seq: 9, body: 'nine' });
      server.answers.inbox = () => ({ type: 'inbox', items: [server.item()] });
      return { type: 'inbox', items: [old] };
    };
    await client.inbox.refresh();
    expect(unread(client)).toBe(3);
    const [after, to] = [server.rev - 2, server.rev];
    await client.inbox.refresh();
    expect(unread(client)).toBe(3);
    // The page contains the deletion; its event comes later.
    server.push({ type: 'changed', conversation: 'c', after, rev: to, items: server.items(after, to) });
    expect(unread(client)).toBe(3);
    // The same with an event that also has a later change.
    server.isDeaf = true;
    server.change('bob', { type: 'delete', seqs: [8] });
    await client.inbox.refresh();
    expect(unread(client)).toBe(2);
    server.change('bob', { type: 'edit', seq: 9, body: 'neun' });
    server.isDeaf = false;
    server.push({ type: 'changed', conversation: 'c', after: to, rev: to + 2, items: server.items(to, to + 2) });
    expect(unread(client)).toBe(2);
  });

  test('is right after reading a part, with system entries and deletions between', async () => {
    server.write('bob', '', 'system');
    for (let i = 7; i <= 12; i++) server.write('bob', `${i}`);
    server.change('bob', { type: 'delete', seqs: [8, 12] });
    const client = await connect();
    expect(unread(client)).toBe(4);
    const list = await open(client);
    list.read(9);
    expect(unread(client)).toBe(2);
    await client.inbox.refresh();
    expect(unread(client)).toBe(2);
    list.read();
    expect(unread(client)).toBe(0);
  });

  test('asks after a part was read on another device, if it cannot know the number', async () => {
    for (let i = 6; i <= 12; i++) server.write('bob', `${i}`, i === 10 ? 'system' : 'text');
    const client = await connect();
    expect(unread(client)).toBe(6);
    server.readSeq = 9;
    server.push({ type: 'receipt', conversation: 'c', user: 'alice', read_seq: 9 });
    await settled();
    expect(unread(client)).toBe(2);
  });

  test('is right after a live `resync`', async () => {
    const client = await connect();
    server.isDeaf = true;
    for (const body of ['6', '7', '8']) server.write('bob', body);
    server.write('bob', '', 'system');
    server.isDeaf = false;
    const before = server.received('inbox').length;
    for (let i = 0; i < 10; i++) server.push({ type: 'resync', conversation: 'c', head: 9 });
    await settled();
    expect(client.inbox.get('c')).toMatchObject({ unread: 3, lastSeq: 9, lastMessage: { kind: 'system' } });
    expect(server.received('inbox').length - before).toBeLessThan(3);
  });

  test('its preview follows edits and deletions', async () => {
    const client = await connect();
    server.write('bob', 'last');
    server.change('bob', { type: 'edit', seq: 6, body: 'edited' });
    expect(client.inbox.items[0]!.lastMessage).toMatchObject({ preview: 'edited' });
    server.change('bob', { type: 'edit', seq: 2, body: 'another' });
    expect(client.inbox.items[0]!.lastMessage).toMatchObject({ preview: 'edited' });
    server.change('bob', { type: 'delete', seqs: [6] });
    expect(client.inbox.items[0]!.lastMessage).toMatchObject({ preview: '', deleted: true });
  });
});

test('quoted messages outside of the list follow edits and deletions', async () => {
  for (let i = 6; i <= 60; i++) server.write('bob', `${i}`);
  const client = await connect();
  const list = await open(client);
  expect(list.message(2)).toBeUndefined();
  expect(await list.loadMessage(2)).toMatchObject({ body: '2' });
  let changes = 0;
  list.on('change', () => changes++);
  server.change('bob', { type: 'edit', seq: 2, body: 'edited' });
  await settled();
  expect(list.message(2)).toMatchObject({ body: 'edited' });
  expect(changes).toBe(1);
  expect(list.message(2)).toBe(list.message(2));
  server.change('bob', { type: 'delete', seqs: [2] });
  expect(list.message(2)).toMatchObject({ body: '', deleted: { by: 'bob' } });
});
