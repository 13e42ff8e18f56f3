// A back end in Node that gives its users chat tokens, and serves a folder: node server.mjs FOLDER
// Before: npm install. CHAT_SECRET is the secret in the gateway's auth.keys.
import { createHash, randomBytes } from 'node:crypto';
import { readFile } from 'node:fs/promises';
import { createServer } from 'node:http';
import { extname, join, normalize } from 'node:path';
import { SignJWT } from 'jose';

const { CHAT_SECRET = '', SUPPORT_PASSWORD, PORT = '3000' } = process.env;
const [folder = '.'] = process.argv.slice(2);
if (Buffer.byteLength(CHAT_SECRET) < 32) throw new Error('CHAT_SECRET: at least 32 bytes. Make one: openssl rand -base64 48');

/** The SDK asks for a new token before this one expires. */
const mint = (user) =>
  new SignJWT().setProtectedHeader({ alg: 'HS256' }).setSubject(user).setExpirationTime('15m').sign(Buffer.from(CHAT_SECRET));

/** Your own sign-in stands here. In this example each browser is a visitor, whom a cookie recognizes. */
function visitor(request, response) {
  let session = /(?:^|; )session=([\w-]+)/.exec(request.headers.cookie ?? '')?.[1];
  if (!session) {
    session = randomBytes(24).toString('base64url');
    response.setHeader('set-cookie', `session=${session}; HttpOnly; SameSite=Lax; Path=/`);
  }
  // Everyone may see a user id, and nobody else the session.
  return `visitor-${createHash('sha256').update(session).digest('hex').slice(0, 12)}`;
}

/** Who answers the visitors signs in with a password, which the browser asks for. */
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
