'use server';
/** The sign-in of this example, without a password. Replace it by that of your application. */
import { cookies } from 'next/headers';
import { COOKIE } from './session';

export async function signIn(form: FormData): Promise<void> {
  const user = String(form.get('user')).trim().toLowerCase();
  // The gateway takes no other user ids. The page shows the field again.
  if (!user || Buffer.byteLength(user) > 64) return;
  (await cookies()).set(COOKIE, user, { httpOnly: true, sameSite: 'lax', secure: process.env.NODE_ENV === 'production' });
}

export async function signOut(): Promise<void> {
  (await cookies()).delete(COOKIE);
}
