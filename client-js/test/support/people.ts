/** Users of the chat page in a real Chromium. `PAGE=dist` uses the page in `page/dist` instead of the one in the gateway;
 * `SCREENSHOTS=folder` keeps pictures. */
import { mkdirSync, readFileSync } from 'node:fs';
import { join } from 'node:path';
import { type Browser, type BrowserContext, type BrowserContextOptions, chromium, type Locator, type Page } from 'playwright-core';
import { afterAll, afterEach, beforeAll, expect } from 'vitest';
import { disconnectAll, Gateway, PATIENCE_MS } from './gateway.js';

const ARGS = ['--no-sandbox', '--headless', '--disable-gpu', '--disable-quic', '--no-first-run'];
const QUIET = ['--disable-background-networking', '--disable-component-update', '--disable-sync'];
/** A page that the test hands to the browser comes from no network. Without this flag it must not reach the gateway. */
const OF_DIST = process.env.PAGE === 'dist' ? ['--disable-features=LocalNetworkAccessChecks'] : [];

/** The users of one gateway, in one browser. */
export class People {
  #gateway: Gateway;
  #browser: Browser | undefined;
  #contexts: BrowserContext[] = [];
  /** The browser's complaints: a violated policy, a failed script, a request to another host. */
  #complaints: string[] = [];
  #also: string | undefined;

  /** @param also Another origin that the page may reach: a bucket. */
  constructor(gateway: Gateway, also?: string) {
    this.#gateway = gateway;
    this.#also = also;
  }

  async launch(): Promise<void> {
    this.#browser = await chromium.launch({ executablePath: '/usr/bin/chromium', args: [...ARGS, ...QUIET, ...OF_DIST] });
  }

  /** Ends all clients and contexts after a test. Fails if the browser complained. */
  async leave(): Promise<void> {
    disconnectAll();
    for (const context of this.#contexts.splice(0)) await context.close();
    expect(this.#complaints.splice(0)).toEqual([]);
  }

  async close(): Promise<void> {
    await this.#browser?.close();
  }

  /** Returns a browser context: another user, or another device.
   * @param address The address of a proxy, if not of the gateway. */
  async person(options: BrowserContextOptions = {}, address = this.#gateway.page): Promise<BrowserContext> {
    const context = await this.#browser!.newContext({ locale: 'en-GB', ...options });
    context.setDefaultTimeout(PATIENCE_MS);
    this.#contexts.push(context);
    if (process.env.PAGE === 'dist') {
      await context.route(/\/((page|emoji)\.(js|css))?(\?.*)?$/, async (route) => {
        const url = route.request().url();
        const name = new URL(url).pathname.split('/').at(-1) || 'index.html';
        // The gateway may be an earlier build, which has no file of this name.
        const { 'content-length': _, ...headers } = (await route.fetch({ url: url.replace('/emoji.', '/page.') })).headers();
        await route.fulfill({ headers, body: readFileSync(join(import.meta.dirname, '../../page/dist', name)) });
      });
    }
    context.on('page', (page) => {
      page.on('pageerror', (error) => this.#complaints.push(`${error}`));
      page.on('console', (message) => {
        const text = message.text();
        // Some tests stop the gateway, or have it refuse or forget an upload, so these errors are expected.
        const isExpected = /ERR_CONNECTION_REFUSED|WebSocket connection to|ERR_EMPTY|ERR_CONNECTION_RESET|status of 413/.test(text);
        const isForgotten = /status of 404/.test(text) && message.location().url.endsWith('/upload');
        // A tab that shows a file asks the bucket for an icon.
        const isIcon = this.#also !== undefined && message.location().url === `${this.#also}/favicon.ico`;
        if (message.type() === 'error' && !isExpected && !isForgotten && !isIcon)
          this.#complaints.push(`${text} ${message.location().url}`);
      });
      page.on('request', (request) => {
        const isAllowed = [address, this.#also].some((origin) => origin && request.url().startsWith(origin));
        if (!isAllowed) this.#complaints.push(`request to another host: ${request.url()}`);
      });
    });
    return context;
  }

  /** Opens the page and signs in. Resolves when the page is connected. */
  async signIn(context: BrowserContext, name: string, query = '', address = this.#gateway.page): Promise<Page> {
    const page = await context.newPage();
    await page.goto(address + query);
    await page.getByLabel('Name').fill(name);
    await page.getByRole('button', { name: 'Sign in' }).click();
    await connected(page);
    return page;
  }
}

/** Gives all tests of a file one gateway and one browser, and ends all clients after each test.
 * @param settings The settings of the gateway.
 * @param lines Returns the lines to import before the gateway starts.
 * @param also Another origin that the page may reach. */
export function setUp(
  settings: Record<string, string> = {},
  lines?: () => readonly object[],
  also?: string,
): { gateway: Gateway; people: People } {
  const gateway = new Gateway(settings);
  const people = new People(gateway, also);
  beforeAll(async () => {
    if (lines) gateway.import(lines());
    await gateway.start();
    await people.launch();
  });
  afterEach(() => people.leave());
  afterAll(async () => {
    await people.close();
    await gateway.close();
  });
  return { gateway, people };
}

/** Waits until the page shows that it is connected. */
export const connected = (page: Page) => page.locator('.connection', { hasText: 'Connected' }).waitFor({ state: 'attached' });

/** Sends a message. */
export async function write(page: Page, text: string): Promise<void> {
  await page.getByLabel('Message', { exact: true }).fill(text);
  await page.keyboard.press('Enter');
}

/** Returns the texts of the messages in the document. */
export const texts = (page: Page) => page.locator('.message .body').allTextContents();

/** Opens a direct chat by the dialog. */
export async function openDm(page: Page, name: string): Promise<void> {
  await page.getByRole('button', { name: 'New conversation' }).click();
  await page.getByLabel('With').fill(name);
  await page.getByRole('button', { name: 'Open', exact: true }).click();
  // Until the dialog is closed, the field of the conversation before is there.
  await page.getByLabel('With').waitFor({ state: 'detached' });
  await page.getByLabel('Message', { exact: true }).waitFor();
}

/** Pastes or drops a file, with a text beside it if there is one. */
export const give = (target: Locator, type: 'paste' | 'drop', name: string, { size = 1, mime = '', text = '' } = {}): Promise<void> =>
  target.evaluate(
    (element, [type, name, size, mime, text]) => {
      const data = new DataTransfer();
      data.items.add(new File([new Uint8Array(size)], name, { type: mime }));
      if (text) data.setData('text/plain', text);
      const options = { bubbles: true, cancelable: true };
      element.dispatchEvent(
        type === 'paste'
          ? new ClipboardEvent('paste', { ...options, clipboardData: data })
          : new DragEvent('drop', { ...options, dataTransfer: data }),
      );
    },
    [type, name, size, mime, text] as const,
  );

/** Keeps a picture of the page, if `SCREENSHOTS` is set. */
export async function picture(page: Page, name: string): Promise<void> {
  const folder = process.env.SCREENSHOTS;
  if (!folder) return;
  mkdirSync(folder, { recursive: true });
  await page.screenshot({ path: join(folder, `${name}.png`) });
}
