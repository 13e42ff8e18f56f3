/** Returns the URL of a path of the gateway, which a proxy may serve under another one.
 * @param gateway Its URL ends with the two parts of the path that the gateway itself knows. */
export async function httpUrl(gateway: { readonly url: () => Promise<string> | string }, path: string): Promise<string> {
  const url = await gateway.url();
  // The `URL` of React Native appends a slash in some versions, and resolves no `../`.
  const href = /^\w+:/.test(url) ? url : new URL(url, location.href).href;
  return href.replace(/^(?:ws|http)(s?:\/\/[^/?#]+.*?)(\/[^/?#]*){0,2}([?#].*)?$/i, (_, base) => `http${base}${path}`);
}
