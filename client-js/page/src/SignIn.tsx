import { type FormEvent, useState } from 'react';
import { idOf, isShort } from './ids.js';
import { developmentToken, NoDevelopmentTokens, nameOf, newest, type Session, userOf } from './session.js';

/** The page that asks for a name, or for a token. */
export function SignIn({ onSession, problem }: { onSession: (session: Session) => void; problem?: string | undefined }) {
  const [text, setText] = useState(() => nameOf(newest()));
  const [withToken, setWithToken] = useState(false);
  const [error, setError] = useState(problem);
  const [busy, setBusy] = useState(false);

  const submit = async (event: FormEvent) => {
    event.preventDefault();
    const value = text.trim();
    if (!value) return;
    if (withToken) {
      const user = userOf(value);
      if (user) onSession({ user, token: value });
      else setError('This is not a token: it should have three parts, separated by dots.');
      return;
    }
    setBusy(true);
    setError(undefined);
    try {
      const user = idOf(value);
      if (!user) throw new Error('A name needs a letter that can be seen.');
      if (!isShort(user)) throw new Error('This name is too long.');
      await developmentToken(user);
      onSession(user === value ? { user } : { user, name: value });
    } catch (thrown) {
      if (thrown instanceof NoDevelopmentTokens) {
        setWithToken(true);
        setText('');
      } else setError((thrown as Error).message);
    } finally {
      setBusy(false);
    }
  };

  return (
    <main className="sign-in">
      <form onSubmit={submit} aria-labelledby="sign-in-title">
        <img src="icon.svg" alt="" width="56" height="56" />
        <h1 id="sign-in-title">Sign in to chat</h1>
        <p id="sign-in-help">
          {withToken
            ? 'This gateway takes the tokens of your own application. Paste one to look around.'
            : 'The gateway runs in development: any name will do. Open a second window to be somebody else.'}
        </p>
        <label>
          {withToken ? 'Token' : 'Name'}
          <input
            // biome-ignore lint/a11y/noAutofocus: it is the only field of the page.
            autoFocus
            name="user"
            value={text}
            onChange={(event) => setText(event.target.value)}
            // The last name is there to be confirmed or replaced.
            onFocus={(event) => event.target.select()}
            autoComplete="username"
            autoCapitalize="none"
            spellCheck={false}
            aria-describedby="sign-in-help"
            aria-invalid={error !== undefined}
          />
        </label>
        {error && (
          <p role="alert" className="problem">
            {error}
          </p>
        )}
        <button type="submit" className="primary" disabled={busy || !text.trim()}>
          Sign in
        </button>
      </form>
    </main>
  );
}
