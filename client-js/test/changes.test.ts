/** Edits, deletions and reactions with a real gateway. */
import { afterAll, afterEach, beforeAll, expect, test } from 'vitest';
import { type ChatClient, type Conversation, memoryStorage } from '../src/index.js';
import { BadNetwork } from './support/bad-network.js';
import { disconnectAll, Gateway, until, user } from './support/gateway.js';

let gateway: Gateway;
const proxies: BadNetwork[] = [];
beforeAll(async () => {
  gateway = await new Gateway({ session__ping_interval_ms: '500' }).start();
});
afterEach(() => {
  disconnectAll();
  for (const proxy of proxies.splice(0)) proxy.close();
});
afterAll(() => gateway.close());

async function open(client: ChatClient, id: string): Promise<Conversation> {
  const conversation = client.conversation(id);
  conversation.open();
  await conversation.whenLoaded();
  return conversation;
}
async function behind(): Promise<{ proxy: BadNetwork; url: string }> {
  const proxy = new BadNetwork(gateway.address);
  proxies.push(proxy);
  return { proxy, url: await proxy.start() };
}
/** Returns what a list shows. */
const shown = ({ messages }: Conversation) =>
  messages
    .filter(({ kind }) => kind === 'text')
    .map(({ seq, body, deleted, reactions = {}, mine = [], editedAt }) => {
      return { seq, body, deleted: deleted?.by, reactions, mine: [...mine].sort(), edited: !deleted && editedAt !== undefined };
    });
/** Waits until the list of a user shows what a new client of that user reads. */
async function agree(list: Conversation, who: string): Promise<void> {
  const other = await gateway.connect(who, { storage: memoryStorage() });
  const fresh = await open(other, list.id);
  // A new list has the newest messages only.
  const newest = () => shown(list).slice(-shown(fresh).length);
  await until(() => JSON.stringify(newest()) === JSON.stringify(shown(fresh)), `${who} shows what is stored`).catch(() => {
    expect(newest()).toEqual(shown(fresh));
  });
  // A read mark is sent a moment later.
  await until(async () => {
    await other.inbox.refresh();
    return list.unread === fresh.unread;
  }, `${who} counts the same`);
}

/** Makes a conversation of two users, one of them with two devices. */
async function three(kind: 'dm' | 'group' | 'channel', url?: string) {
  const [a, b] = [user('alice'), user('bob')];
  const [phone, bob] = [await gateway.connect(a), await gateway.connect(b)];
  const laptop = await gateway.connect(a, { storage: memoryStorage() }, url);
  const what = { name: 'G', participants: [b] };
  const made = await (kind === 'dm' ? phone.dm(b) : kind === 'group' ? phone.createGroup(what) : phone.createChannel(what));
  const lists = [await open(phone, made.id), await open(laptop, made.id), await open(bob, made.id)] as const;
  return { a, b, phone: lists[0], laptop: lists[1], his: lists[2], bob, clients: { phone, laptop } };
}

test.each(['dm', 'group', 'channel'] as const)('in a %s all devices show edits, deletions and reactions', async (kind) => {
  const { a, b, phone, laptop, his } = await three(kind);
  const one = await phone.send('one');
  const two = await his.send('two');
  await until(() => laptop.messages.some(({ seq }) => seq === two.seq));
  await laptop.edit(one.seq, 'edited', [{ url: 'https://example.org/a.png' }]);
  await Promise.all([phone.react(two.seq, '👍'), his.react(two.seq, '👍'), his.react(one.seq, ':party_parrot:')]);
  for (const list of [phone, laptop, his]) {
    await until(() => list.message(two.seq)?.reactions?.['👍'] === 2, 'both reactions');
    await until(() => list.message(one.seq)?.body === 'edited', 'the edit');
    expect(list.message(one.seq)!.attachments).toHaveLength(1);
    // The three reactions were made at the same time, so this one may come last.
    await until(() => list.message(one.seq)!.reactions?.[':party_parrot:'] === 1, 'the other reaction');
  }
  await until(() => laptop.message(two.seq)!.mine?.includes('👍'), 'a reaction of the other device');
  const { items } = await his.reactions(two.seq, { emoji: '👍' });
  expect(items.map(({ user }) => user).sort()).toEqual([a, b].sort());
  await laptop.unreact(two.seq, '👍');
  await until(() => !phone.message(two.seq)!.mine, 'removed on the other device');
  await his.delete(two.seq);
  await until(() => phone.message(two.seq)!.deleted?.by === b, 'the deletion');
  await expect(phone.react(two.seq, '👍')).rejects.toMatchObject({ code: 'conflict' });
  await expect(his.edit(one.seq, 'not his')).rejects.toMatchObject({ code: 'forbidden' });
  await agree(phone, a);
  await agree(laptop, a);
  await agree(his, b);
});

test('an admin deletes messages of others in a group, and nobody else', async () => {
  const { phone, his } = await three('group');
  const { seq } = await his.send('rude');
  await phone.delete(seq);
  await until(() => his.message(seq)!.deleted);
  const hers = await phone.send('hers');
  await expect(his.delete(hers.seq)).rejects.toMatchObject({ code: 'forbidden' });
});

test('two devices that edit at once: one of them gets a conflict, and can insist', async () => {
  const { proxy, url } = await behind();
  const { phone, laptop, clients } = await three('group', url);
  const { seq } = await phone.send('first');
  await until(() => laptop.message(seq));
  proxy.mode = 'refused';
  await until(() => clients.laptop.state.at !== 'connected');
  await phone.edit(seq, 'of the phone');
  const late = laptop.edit(seq, 'of the laptop');
  proxy.mode = 'open';
  await expect(late).rejects.toMatchObject({ code: 'conflict' });
  await until(() => laptop.message(seq)!.body === 'of the phone');
  expect(laptop.message(seq)!.failedChange).toMatchObject({ type: 'edit', body: 'of the laptop' });
  laptop.retry(laptop.message(seq)!.failedChange!.key);
  await until(() => phone.message(seq)!.body === 'of the laptop');
});

test('the number of unread messages and the preview follow', async () => {
  const [a, b] = [user('alice'), user('bob')];
  const [alice, bob] = [await gateway.connect(a), await gateway.connect(b)];
  const group = await alice.createGroup({ name: 'G', participants: [b] });
  const his = bob.conversation(group.id);
  await until(() => bob.inbox.get(group.id));
  const sent = [];
  for (let i = 0; i < 4; i++) sent.push(await group.send(`${i}`));
  await group.add(user('carol'));
  await until(() => his.unread === 4, 'the system entry does not count');
  await group.delete(sent[1]!.seq);
  await until(() => his.unread === 3, 'nor does the deleted message');
  await bob.inbox.refresh();
  expect(his.unread).toBe(3);
  await group.delete(sent[3]!.seq);
  await group.edit(sent[2]!.seq, 'edited');
  await until(() => his.unread === 2);
  const list = await open(bob, group.id);
  list.read(sent[0]!.seq);
  expect(list.unread).toBe(1);
  const { seq } = await group.send('last');
  await group.edit(seq, 'really last');
  await until(() => his.item!.lastMessage!.preview === 'really last');
  await group.delete(seq);
  await until(() => his.item!.lastMessage!.deleted);
  await agree(list, b);
});

test('what changed while a client was away is there after the next connection, also after a kill', async () => {
  const { proxy, url } = await behind();
  const { a, phone, laptop, his, clients } = await three('group', url);
  const sent: number[] = [];
  for (let i = 0; i < 10; i++) sent.push((await phone.send(`${i}`)).seq);
  await until(() => laptop.messages.at(-1)?.seq === sent.at(-1));
  proxy.mode = 'refused';
  await until(() => clients.laptop.state.at !== 'connected');
  const waiting = [laptop.edit(sent[0]!, 'offline'), laptop.react(sent[1]!, '🎉'), laptop.delete([sent[2]!, sent[3]!])];
  await phone.edit(sent[5]!, 'online');
  await phone.react(sent[6]!, '👍');
  await his.react(sent[6]!, '👍');
  await his.react(sent[6]!, '🎉');
  await gateway.kill();
  await gateway.start();
  proxy.mode = 'open';
  await Promise.all(waiting);
  await agree(laptop, a);
  await agree(phone, a);
});

test('random changes over a bad network: all devices show the same', async () => {
  const { proxy, url } = await behind();
  const { a, b, phone, laptop, his } = await three('group', url);
  for (let i = 0; i < 20; i++) await phone.send(`${i}`);
  const lists = [phone, laptop, his];
  const pick = <T>(from: readonly T[]) => from[Math.floor(Math.random() * from.length)]!;
  const all: Promise<unknown>[] = [];
  for (let i = 0; i < 300; i++) {
    const list = pick(lists);
    const message = pick(list.messages.filter(({ kind, seq }) => kind === 'text' && seq));
    const { seq } = message;
    const dice = Math.random();
    if (dice < 0.1) all.push(list.send(`more ${i}`));
    else if (dice < 0.4) all.push(list.edit(seq!, `edit ${i}`));
    else if (dice < 0.45) all.push(list.delete(seq!));
    else all.push(Math.random() < 0.7 ? list.react(seq!, pick(['👍', '🎉', '🔥'])) : list.unreact(seq!, pick(['👍', '🎉', '🔥'])));
    if (i % 40 === 20) proxy.cut();
    if (i % 10 === 0) await new Promise((resolve) => setTimeout(resolve, 20));
  }
  const refused = (await Promise.allSettled(all)).flatMap((done) => (done.status === 'rejected' ? [done.reason.code] : []));
  // Bob may not change what Alice wrote, and nobody what is deleted: that is about 85 of them.
  expect(refused.filter((code) => code !== 'forbidden' && code !== 'conflict')).toEqual([]);
  expect(refused.length).toBeLessThan(150);
  await agree(phone, a);
  await agree(laptop, a);
  await agree(his, b);
});
