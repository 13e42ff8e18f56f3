/** Signs a short token of the chat for the user who is signed in. The SDK asks for a new one before it expires. */
import { SignJWT } from 'jose';
import { currentUser } from '../../session';

export async function GET(): Promise<Response> {
  // The page cannot choose the user: only the session does. It is asked first, so that no build runs what follows.
  const user = await currentUser();
  if (!user) return Response.json({ error: 'signed out' }, { status: 401 });
  const secret = Buffer.from(process.env.CHAT_SECRET ?? '');
  if (secret.length < 32) throw new Error('CHAT_SECRET needs at least 32 bytes. Generate one with: openssl rand -base64 48');
  const token = await new SignJWT().setProtectedHeader({ alg: 'HS256' }).setSubject(user).setExpirationTime('15m').sign(secret);
  return Response.json({ token }, { headers: { 'cache-control': 'no-store' } });
}
