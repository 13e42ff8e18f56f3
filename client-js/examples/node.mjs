// A chat in the terminal: node examples/node.mjs ws://127.0.0.1:8080/v1/ws TOKEN bob
// `target/release/chat-gateway token alice` prints a token for development. Run `npm run build` first.
import { createInterface } from 'node:readline';
import WebSocket from 'ws';
import { ChatClient } from '../dist/index.js';

const [url, token, other] = process.argv.slice(2);
const chat = new ChatClient(url, { token, WebSocket });
chat.on('state', ({ at }) => console.log(`· ${at}`));
chat.on('error', (error) => console.error(`· ${error.message}`));
await chat.connect();

const dm = await chat.dm(other);
dm.open();
await dm.whenLoaded();
for (const { sender, body } of dm.messages) console.log(`${sender}: ${body}`);
dm.on('message', ({ sender, body, seq }) => {
  if (sender !== chat.user) console.log(`${sender}: ${body}`);
  dm.read(seq);
});

const lines = createInterface({ input: process.stdin });
lines.on('line', (text) => {
  dm.send(text).then(
    ({ seq }) => console.log(`· stored as number ${seq}`),
    (error) => console.error(`· not sent: ${error.message}`),
  );
});
// Pending messages are sent before the program ends.
lines.on('close', async () => {
  while (dm.messages.some(({ state }) => state === 'sending')) await new Promise((wait) => setTimeout(wait, 50));
  chat.disconnect();
});
