import { signIn } from './actions';
import { Chat } from './chat';
import { currentUser } from './session';

export default async function Page() {
  const user = await currentUser();
  if (!user) {
    return (
      <form action={signIn}>
        <label>
          Name <input name="user" maxLength={64} required />
        </label>{' '}
        <button type="submit">Sign in</button>
      </form>
    );
  }
  // Another user needs another client. The address is read when the page is asked for, not when it is built.
  return <Chat key={user} user={user} url={process.env.CHAT_URL ?? 'ws://127.0.0.1:8080/v1/ws'} />;
}
