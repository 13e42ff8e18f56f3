/** Whether the user looks at the conversation. A window in sight that has not the focus may be anybody's second screen, and in a
 * narrow window the details cover the messages. */
export const isAttended = (): boolean => !document.hidden && document.hasFocus() && !document.querySelector('main[inert]');

/** Calls back when the user may look at the page again. Returns a function that ends it. */
export function onAttention(listener: () => void): () => void {
  document.addEventListener('visibilitychange', listener);
  addEventListener('focus', listener);
  return () => {
    document.removeEventListener('visibilitychange', listener);
    removeEventListener('focus', listener);
  };
}
