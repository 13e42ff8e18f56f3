// A back end in Node that issues chat tokens to its users and serves a folder: node server.mjs FOLDER
// Run npm install first. CHAT_SECRET is the secret in the gateway's auth.keys.
import { createHash, randomBytes } from 'node:crypto';
import { readFile } from 'node:fs/promises';
import { createServer } from 'node:http';
import { extname, join, normalize } from 'node:path';
import { SignJWT } from 'jose';

const { CHAT_SECRET = '', SUPPORT_PASSWORD, PORT = '3000' } = process.env;
const [folder = '.'] = process.argv.slice(2);
if (Buffer.byteLength(CHAT_SECRET) < 32) throw new Error('CHAT_SECRET needs at least 32 bytes. Generate one with: openssl rand -base64 48');

/** Returns a token of a user. The SDK asks for a new one before it expires. */
const mint = (user) =>
  new SignJWT().setProtectedHeader({ alg: 'HS256' }).setSubject(user).setExpirationTime('15m').sign(Buffer.from(CHAT_SECRET));

/** Returns the user. Put your own sign-in here; in this example a cookie makes each browser a visitor. */
function visitor(request, response) {
  let session = /(?:^|; )session=([\w-]+)/.exec(request.headers.cookie ?? '')?.[1];
  if (!session) {
    session = randomBytes(24).toString('base64url');
    response.setHeader('set-cookie', `session=${session}; HttpOnly; SameSite=Lax; Path=/`);
  }
  // Other users see the user id, so it must not reveal the session.
  return `visitor-${createHash('sha256').update(session).digest('hex').slice(0, 12)}`;
}

/** Whether a request is from the support team, which signs in with the browser's password dialog. */
const isSupport = ({ headers }) =>
  SUPPORT_PASSWORD !== undefined && headers.authorization === `Basic ${btoa(`support:${SUPPORT_PASSWORD}`)}`;

const TYPES = { '.html': 'text/html; charset=utf-8', '.js': 'text/javascript; charset=utf-8' };

async function answer(request, response) {
  const { pathname } = new URL(request.url, 'http://localhost');
  const desk = pathname.startsWith('/desk/');
  if (desk && !isSupport(request)) {
    response.writeHead(401, { 'www-authenticate': 'Basic realm="support"' }).end();
  } else if (pathname.endsWith('/chat-token')) {
    const token = await mint(desk ? 'support' : visitor(request, response));
    response.writeHead(200, { 'content-type': 'application/json', 'cache-control': 'no-store' }).end(JSON.stringify({ token }));
  } else {
    const path = normalize(pathname.endsWith('/') ? `${pathname}index.html` : pathname);
    const file = await readFile(join(folder, path));
    response.writeHead(200, { 'content-type': TYPES[extname(path)] ?? 'application/octet-stream' }).end(file);
  }
}

createServer((request, response) => {
  answer(request, response).catch(() => response.writeHead(404).end('not found'));
}).listen(Number(PORT), '127.0.0.1', () => console.log(`http://localhost:${PORT}/`));
