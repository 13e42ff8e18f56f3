/** Tokens that a real gateway refuses: the client says why. */
import { createHmac } from 'node:crypto';
import { afterAll, afterEach, beforeAll, expect, test } from 'vitest';
import { disconnectAll, Gateway } from './support/gateway.js';

const SECRET = 'a secret of at least 32 bytes, for tests only';
const gateway = new Gateway({ auth__keys: `[{algorithm = "HS256", secret = "${SECRET}"}]` });
beforeAll(async () => void (await gateway.start()));
afterEach(disconnectAll);
afterAll(() => gateway.close());

const base64 = (value: string | Buffer) => Buffer.from(value).toString('base64url');
/** Returns a token with these claims. */
function signed(claims: object, secret = SECRET): string {
  const text = [{ alg: 'HS256', typ: 'JWT' }, claims].map((part) => base64(JSON.stringify(part))).join('.');
  return `${text}.${base64(createHmac('sha256', secret).update(text).digest())}`;
}
const now = () => Math.floor(Date.now() / 1000);

test.each([
  ['a wrong secret', () => signed({ sub: 'alice', exp: now() + 60 }, 'x'.repeat(40)), /its signature does not fit the key/],
  ['no exp', () => signed({ sub: 'alice' }), /it has no exp/],
  ['an exp in the past', () => signed({ sub: 'alice', exp: now() - 60 }), /the token has expired/],
])('a token with %s is refused with the reason', async (_, token, reason) => {
  for (const codec of ['json', 'msgpack'] as const) {
    const client = gateway.client('alice', { token: async () => token(), codec });
    await expect(client.connect()).rejects.toMatchObject({ code: 'unauthorized', message: expect.stringMatching(reason) });
    expect(client.state.error).toMatchObject({ name: 'ChatError', message: expect.stringMatching(reason) });
  }
});
