/** What edits, deletions and reactions do to a message. Pure functions: no I/O, and no value is changed in place. */
import { isSame } from './gather.js';
import type { ChatMessage, EntryState, FailedChange, Stored } from './list.js';
import type { OutboxChange, OutboxEntry } from './storage.js';
import type { Attachment, ChangedItem, Message, Millis, Reactions, Rev, Seq, UserId } from './types.js';

/** The state of an entry that never changed. */
const UNCHANGED: EntryState = { rev: 0, content: 0, counts: {}, mine: [], mineRev: 0, toggles: {} };

const stateOf = ({ revs }: Stored): EntryState => revs ?? UNCHANGED;

/** Returns the rev of the text that a reader of this entry sees. */
export const contentRev = (entry: Stored): Rev => {
  const { rev, content } = stateOf(entry);
  // Without its state, an entry shows the text of before the reset.
  return rev === Infinity ? content : Math.max(rev, content);
};

/** Returns a message with its state.
 * @param isPage Whether it is an entry of the history, which has all of the user's own reactions. */
export function stateful(message: Message, isPage: boolean): Pick<Stored, 'revs'> {
  const { rev = 0, reactions: counts = {}, mine } = message;
  // A pushed message with reactions may lack the user's own ones.
  const mineRev = isPage || mine ? rev : 0;
  return rev || message.reactions ? { revs: { ...UNCHANGED, rev, content: rev, counts, mine: mine ?? [], mineRev } } : {};
}

/** Returns an entry whose state is not known any more. It ignores changes until a page replaces it. */
export function forgotten(entry: Stored): Stored {
  return { ...entry, revs: { ...stateOf(entry), content: contentRev(entry), rev: Infinity, mineRev: Infinity } };
}

/** Whether an entry of a page is newer than the known one. */
export function isNewer(page: Stored, known: Stored): boolean {
  const { rev } = stateOf(known);
  return rev === Infinity || rev <= stateOf(page).rev;
}

/** Applies a change that the gateway reported, if it is newer than the entry.
 * @param me The client's user. */
export function changed(entry: Stored, item: ChangedItem, me: UserId | undefined): Stored {
  let state = stateOf(entry);
  const { rev, by, mine } = item;
  let next = entry;
  if (mine && rev >= state.mineRev && state.rev !== Infinity) {
    const later = Object.entries(state.toggles).filter(([, toggle]) => toggle.rev > rev);
    state = { ...state, mine, mineRev: rev, toggles: Object.fromEntries(later) };
  }
  // A pushed message may contain the reaction, and does not say whose it is.
  if (by && by.user === me) state = toggled(state, by.emoji, by.on, rev);
  if (rev > state.rev) {
    if (item.reactions) state = { ...state, counts: item.reactions };
    // An edit of this device that was acknowledged may be newer than the item.
    const { body, attachments, editedAt } = item;
    if (body !== undefined && rev >= state.content) next = withText(entry, body, attachments, editedAt);
    else if (body === entry.body) next = { ...entry, ...(editedAt && { editedAt }) };
    if (item.deleted) next = { ...withText(entry, '', [], undefined), deleted: item.deleted };
    state = { ...state, rev };
  }
  return state === stateOf(entry) ? entry : shown(next, state);
}

/** Applies a reaction of the user on any device. */
export function reacted(entry: Stored, emoji: string, on: boolean, rev: Rev): Stored {
  const state = toggled(stateOf(entry), emoji, on, rev);
  return state === stateOf(entry) ? entry : shown(entry, state);
}

/** Returns an entry that contains all changes up to `rev`: its counts contain the user's own reactions up to there. */
export function upTo(entry: Stored, rev: Rev): Stored {
  const state = stateOf(entry);
  const isCounted = Object.values(state.toggles).some((toggle) => toggle.rev > state.rev && toggle.rev <= rev);
  return isCounted ? shown(entry, { ...state, rev }) : entry;
}

/** Applies a change of this device that the gateway acknowledged.
 * @param ahead How far the clock of the gateway is ahead. */
export function acknowledged(entry: Stored, { change, at, user }: OutboxEntry, rev: Rev, ahead: Millis): Stored {
  const state = stateOf(entry);
  if (!change) return entry;
  if (change.type === 'react' || change.type === 'unreact') return reacted(entry, change.emoji, change.type === 'react', rev);
  // The entry contains it, or something newer.
  if (state.rev >= rev || entry.deleted) return entry;
  const next = optimistic(entry, change, user, at + ahead);
  // The text was the same already, or the event of an earlier attempt brought it, with the gateway's time.
  const isKnown = isSame(next, { ...entry, editedAt: at + ahead });
  return shown(isKnown ? entry : next, change.type === 'edit' ? { ...state, content: rev } : state);
}

/** Returns a message as it is to be shown while changes wait: with those that were not refused, and with the newest one that was.
 * @param ahead How far the clock of the gateway is ahead. */
export function pending<M extends ChatMessage>(message: M, waiting: readonly OutboxEntry[], ahead: Millis): M {
  let next = message;
  const names: OutboxChange['type'][] = [];
  let failedChange: FailedChange | undefined;
  for (const { change, clientId: key, failed: error, user, at } of waiting) {
    if (!change) continue;
    if (error) failedChange = { key, type: change.type, error, ...(change.type === 'edit' && { body: change.body }) };
    else {
      next = optimistic(next, change, user, at + ahead);
      names.push(change.type);
    }
  }
  if (failedChange && !next.deleted) next = { ...next, failedChange };
  return names.length ? { ...next, pending: names } : next;
}

/** Whether two messages or edits have the same text and attachments. */
export const sameText = (a: Pick<OutboxEntry, 'body'> & { attachments?: Attachment[] | undefined }, b: typeof a): boolean =>
  a.body === b.body && isSame(a.attachments ?? [], b.attachments ?? []);

/** Returns what a change concerns: seqs, or the key of a message that has none. Changes with a common one are sent in order. */
export function keysOf(change: OutboxChange): (string | Seq)[] {
  return change.type === 'delete' ? change.seqs : [change.seq ?? change.of!];
}

function optimistic<M extends ChatMessage>(message: M, change: OutboxChange, user: UserId, at: Millis): M {
  if (message.deleted) return message;
  if (change.type === 'edit') return withText(message, change.body, change.attachments ?? message.attachments, at);
  if (change.type === 'delete') return withReactions({ ...withText(message, '', [], undefined), deleted: { by: user, at } }, {}, []);
  const { emoji } = change;
  const counts = new Map(Object.entries(message.reactions ?? {}));
  const mine = new Set(message.mine);
  count(counts, mine, emoji, change.type === 'react');
  return withReactions(message, Object.fromEntries(counts), [...mine]);
}

function withText<M extends ChatMessage>(message: M, body: string, attachments: M['attachments'], editedAt: Millis | undefined): M {
  const { attachments: _, editedAt: __, ...rest } = message;
  return { ...rest, body, ...(attachments?.length && { attachments }), ...(editedAt && { editedAt }) } as M;
}

function withReactions<M extends ChatMessage>(message: M, reactions: Reactions, mine: readonly string[]): M {
  const { reactions: _, mine: __, ...rest } = message;
  const has = Object.keys(reactions).length > 0;
  return { ...rest, ...(has && { reactions }), ...(mine.length && { mine }) } as M;
}

/** Adds or removes one reaction of the user. */
function count(counts: Map<string, number>, mine: Set<string>, emoji: string, on: boolean): void {
  if (mine.has(emoji) === on) return;
  mine[on ? 'add' : 'delete'](emoji);
  const now = (counts.get(emoji) ?? 0) + (on ? 1 : -1);
  if (now > 0) counts.set(emoji, now);
  else counts.delete(emoji);
}

/** Notes that the user added or removed a reaction at `rev`. Per emoji the newest one counts. */
function toggled(state: EntryState, emoji: string, on: boolean, rev: Rev): EntryState {
  const known = Object.hasOwn(state.toggles, emoji) ? state.toggles[emoji] : undefined;
  if (rev <= Math.max(state.mineRev, known?.rev ?? 0)) return state;
  const mine = new Set(state.mine);
  if (known) mine[known.on ? 'add' : 'delete'](emoji);
  return { ...state, mine: [...mine], toggles: { ...state.toggles, [emoji]: { rev, on } } };
}

/** Returns an entry with a state, and with the reactions that follow from it. */
function shown(entry: Stored, state: EntryState): Stored {
  const next = { ...entry, revs: state };
  if (entry.deleted) return withReactions(next, {}, []);
  const counts = new Map(Object.entries(state.counts));
  const mine = new Set(state.mine);
  for (const [emoji, { rev, on }] of Object.entries(state.toggles)) {
    // The counts do not contain a reaction that is newer than they are.
    if (rev > state.rev) count(counts, mine, emoji, on);
    else mine[on ? 'add' : 'delete'](emoji);
  }
  return withReactions(next, Object.fromEntries(counts), [...mine]);
}
