/** Who is signed in. Replace it by the session of your application: with this cookie, everybody may be anybody. */
import { cookies } from 'next/headers';

export const COOKIE = 'example-session';

/** Returns the user who is signed in. */
export async function currentUser(): Promise<string | undefined> {
  return (await cookies()).get(COOKIE)?.value || undefined;
}
