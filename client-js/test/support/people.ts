/** People before a real Chromium. `PAGE=dist` takes the page as it was just built and not the one in the gateway, and
 * `SCREENSHOTS=folder` keeps pictures. */
import { mkdirSync, readFileSync } from 'node:fs';
import { join } from 'node:path';
import { type Browser, type BrowserContext, type BrowserContextOptions, chromium, type Page } from 'playwright-core';
import { afterAll, afterEach, beforeAll, expect } from 'vitest';
import { disconnectAll, Gateway, PATIENCE_MS } from './gateway.js';

const ARGS = ['--no-sandbox', '--headless', '--disable-gpu', '--disable-quic', '--no-first-run'];
const QUIET = ['--disable-background-networking', '--disable-component-update', '--disable-sync'];
/** What the test hands to the browser comes from no network, and may else not reach the gateway. */
const OF_DIST = process.env.PAGE === 'dist' ? ['--disable-features=LocalNetworkAccessChecks'] : [];

export class People {
  #gateway: Gateway;
  #browser: Browser | undefined;
  #contexts: BrowserContext[] = [];
  /** What the browser complained of: a policy that was broken, a script that failed, something from elsewhere. */
  #complaints: string[] = [];

  constructor(gateway: Gateway) {
    this.#gateway = gateway;
  }

  async launch(): Promise<void> {
    this.#browser = await chromium.launch({ executablePath: '/usr/bin/chromium', args: [...ARGS, ...QUIET, ...OF_DIST] });
  }

  /** After each test: everybody leaves, and nothing was complained of. */
  async leave(): Promise<void> {
    disconnectAll();
    for (const context of this.#contexts.splice(0)) await context.close();
    expect(this.#complaints.splice(0)).toEqual([]);
  }

  async close(): Promise<void> {
    await this.#browser?.close();
  }

  /** A browser of its own: another person, or another device. By way of another address, if that is given. */
  async person(options: BrowserContextOptions = {}, address = this.#gateway.page): Promise<BrowserContext> {
    const context = await this.#browser!.newContext({ locale: 'en-GB', ...options });
    context.setDefaultTimeout(PATIENCE_MS);
    this.#contexts.push(context);
    if (process.env.PAGE === 'dist') {
      await context.route(/\/(page\.(js|css))?(\?.*)?$/, async (route) => {
        const name = new URL(route.request().url()).pathname.split('/').at(-1) || 'index.html';
        const { 'content-length': _, ...headers } = (await route.fetch()).headers();
        await route.fulfill({ headers, body: readFileSync(join(import.meta.dirname, '../../page/dist', name)) });
      });
    }
    context.on('page', (page) => {
      page.on('pageerror', (error) => this.#complaints.push(`${error}`));
      page.on('console', (message) => {
        const text = message.text();
        // A gateway that is not there is what some tests are about.
        if (message.type() === 'error' && !/ERR_CONNECTION_REFUSED|WebSocket connection to|ERR_EMPTY|ERR_CONNECTION_RESET/.test(text)) {
          this.#complaints.push(text);
        }
      });
      page.on('request', (request) => {
        if (!request.url().startsWith(address)) this.#complaints.push(`from elsewhere: ${request.url()}`);
      });
    });
    return context;
  }

  async signIn(context: BrowserContext, name: string, query = '', address = this.#gateway.page): Promise<Page> {
    const page = await context.newPage();
    await page.goto(address + query);
    await page.getByLabel('Name').fill(name);
    await page.getByRole('button', { name: 'Sign in' }).click();
    await connected(page);
    return page;
  }
}

/** Gives all tests of a file one gateway and one browser. After each test everybody leaves.
 * @param settings Settings of the gateway.
 * @param lines Returns what is imported before the gateway starts. */
export function setUp(settings: Record<string, string> = {}, lines?: () => readonly object[]): { gateway: Gateway; people: People } {
  const gateway = new Gateway(settings);
  const people = new People(gateway);
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

export const connected = (page: Page) => page.locator('.connection', { hasText: 'Connected' }).waitFor({ state: 'attached' });

export async function write(page: Page, text: string): Promise<void> {
  await page.getByLabel('Message', { exact: true }).fill(text);
  await page.keyboard.press('Enter');
}

export const texts = (page: Page) => page.locator('.message .body').allTextContents();

export async function openDm(page: Page, name: string): Promise<void> {
  await page.getByRole('button', { name: 'New conversation' }).click();
  await page.getByLabel('With').fill(name);
  await page.getByRole('button', { name: 'Open', exact: true }).click();
  await page.getByLabel('Message', { exact: true }).waitFor();
}

export async function picture(page: Page, name: string): Promise<void> {
  const folder = process.env.SCREENSHOTS;
  if (!folder) return;
  mkdirSync(folder, { recursive: true });
  await page.screenshot({ path: join(folder, `${name}.png`) });
}
