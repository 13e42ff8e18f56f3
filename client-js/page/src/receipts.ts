/** How far the members of a group have received and read its messages, as it changes. */
import { useCallback, useEffect, useRef, useState } from 'react';
import type { ChatClient, Conversation, Participant, UserId } from '../../src/index.js';
import { useConnection } from '../../src/react.js';

/** Members in an answer of the gateway: the most that it allows. */
const ANSWER = 200;
/** The time in milliseconds for which receipts are gathered before they are shown. */
const GATHER_MS = 100;
/** The time in milliseconds for which changes of the members are gathered before the list is loaded again. */
const RELOAD_MS = 1_000;

type Watermarks = Pick<Participant, 'readSeq' | 'deliveredSeq'>;
type Receipts = ReadonlyMap<UserId, Watermarks>;

/** Returns a member with the newest watermarks: those of the list, or those of a receipt that came after it was made. */
const upToDate = (member: Participant, receipts: Receipts): Participant => {
  const { readSeq = 0, deliveredSeq = 0 } = receipts.get(member.user) ?? {};
  const read = Math.max(readSeq, member.readSeq ?? 0);
  return { ...member, readSeq: read, deliveredSeq: Math.max(read, deliveredSeq, member.deliveredSeq ?? 0) };
};

/** Returns all members with their watermarks, undefined until they are loaded; why they could not be loaded; and a function that
 * tries again. They are loaded when the component is mounted, when members come or go, and on each new connection. Between these,
 * receipts and answers change them: a conversation's `change` event does not come for a receipt that changes the state of no message. */
export function useReceipts(chat: ChatClient, conversation: Conversation) {
  const [listed, setListed] = useState<Participant[]>();
  const [problem, setProblem] = useState<string>();
  const [receipts, setReceipts] = useState<Receipts>(new Map());
  const [attempt, setAttempt] = useState(0);
  const load = useCallback(() => setAttempt((attempt) => attempt + 1), []);
  const connected = useConnection(chat).at === 'connected';
  /** Whether the members are being loaded, and whether they changed since that began. */
  const loading = useRef({ runs: false, isStale: false });

  useEffect(() => {
    const risen = new Map<UserId, Watermarks>();
    let showing: ReturnType<typeof setTimeout> | undefined;
    let reloading: ReturnType<typeof setTimeout> | undefined;
    const rise = (user: UserId, read = 0, delivered = 0) => {
      const { readSeq = 0, deliveredSeq = 0 } = risen.get(user) ?? {};
      risen.set(user, { readSeq: Math.max(read, readSeq), deliveredSeq: Math.max(delivered, deliveredSeq) });
      showing ??= setTimeout(() => {
        showing = undefined;
        setReceipts(new Map(risen));
      }, GATHER_MS);
    };
    const reload = () => {
      reloading = undefined;
      // Ending the one that runs would leave a busy large group without any.
      if (loading.current.runs) loading.current.isStale = true;
      else load();
    };
    const stops = [
      chat.on('receipt', (receipt) => {
        if (receipt.conversation === conversation.id) rise(receipt.user, receipt.readSeq, receipt.deliveredSeq);
      }),
      conversation.on('message', ({ system, sender, seq }) => {
        // The sender of a message has read the earlier ones. The gateway sends no receipt for that.
        if (!system) rise(sender, seq);
        else reloading ??= setTimeout(reload, RELOAD_MS);
      }),
    ];
    return () => {
      for (const stop of stops) stop();
      clearTimeout(showing);
      clearTimeout(reloading);
    };
  }, [chat, conversation, load]);

  // biome-ignore lint/correctness/useExhaustiveDependencies: loads again with each attempt.
  useEffect(() => {
    if (!connected) return;
    const over = new AbortController();
    const run = { runs: true, isStale: false };
    loading.current = run;
    const loadAll = async () => {
      const all: Participant[] = [];
      for await (const page of conversation.participants({ limit: ANSWER, signal: over.signal })) all.push(...page);
      if (over.signal.aborted) return;
      setListed(all);
      setProblem(undefined);
    };
    loadAll()
      .catch((error: Error) => !over.signal.aborted && setProblem(error.message))
      .finally(() => {
        run.runs = false;
        if (run.isStale && !over.signal.aborted) load();
      });
    return () => {
      run.runs = false;
      over.abort();
    };
  }, [conversation, connected, attempt, load]);

  return { members: listed?.map((member) => upToDate(member, receipts)), problem, load, connected };
}
