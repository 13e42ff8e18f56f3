// Receives the gateway's webhooks and searches the messages: node receiver.mjs
// Run npm ci first. WEBHOOK_SECRET is a secret of the webhook in the gateway's configuration.
import { createServer } from 'node:http';
import { text } from 'node:stream/consumers';
import { Webhook } from 'standardwebhooks';

const webhook = new Webhook(process.env.WEBHOOK_SECRET);
const messages = new Map();

/** Applies an event. Events may come again, so applying one twice must do no harm. */
function apply({ type, data }) {
  const key = (seq) => `${data.conversation} ${seq}`;
  if (type === 'message.created' && !data.deleted) messages.set(key(data.seq), data);
  if (type === 'message.updated' && messages.has(key(data.seq))) messages.get(key(data.seq)).body = data.body ?? '';
  if (type === 'message.deleted') for (const seq of data.seqs) messages.delete(key(seq));
}

createServer(async (request, response) => {
  const { pathname, searchParams } = new URL(request.url, 'http://localhost');
  if (pathname === '/search') {
    const found = [...messages.values()].filter(({ body }) => body.includes(searchParams.get('q') ?? ''));
    return response.setHeader('content-type', 'application/json').end(JSON.stringify(found));
  }
  try {
    const event = webhook.verify(await text(request), request.headers);
    (event.type === 'batch' ? event.data.events : [event]).forEach(apply);
    response.writeHead(204).end();
  } catch (error) {
    response.writeHead(400).end(error.message);
  }
}).listen(Number(process.env.PORT ?? 3001), '127.0.0.1', () => console.log('waiting for webhooks'));
