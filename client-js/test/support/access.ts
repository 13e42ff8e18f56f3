/** Measures the accessibility of a page: what axe finds, and the contrast of edges and icons. */
import { readFileSync } from 'node:fs';
import { createRequire } from 'node:module';
import type { Page } from 'playwright-core';
import { picture } from './people.js';

const AXE = readFileSync(createRequire(import.meta.url).resolve('axe-core/axe.min.js'), 'utf8');

/** Returns what axe finds in the current view, with light and dark colours. */
export async function violations(page: Page, view: string): Promise<string[]> {
  const found: string[] = [];
  // `innerWidth` of a phone grows with content that is too wide.
  const width = await page.evaluate(() => document.documentElement.scrollWidth);
  if (width > page.viewportSize()!.width) found.push(`${view}: ${width} pixels wide`);
  if (!(await page.evaluate(() => 'axe' in globalThis))) await page.evaluate(AXE);
  for (const colorScheme of ['light', 'dark'] as const) {
    await page.emulateMedia({ colorScheme, reducedMotion: 'reduce' });
    found.push(...(await page.evaluate(run, colorScheme)).map((text) => `${view}, ${colorScheme}: ${text}`));
    await picture(page, `${view}-${colorScheme}`.replaceAll(' ', '-'));
  }
  return found;
}

/** Runs axe; called in the page. With dark colours it checks only contrast. */
async function run(colorScheme: string): Promise<string[]> {
  type Found = { id: string; nodes: { target: unknown; failureSummary: string }[] };
  const { axe } = globalThis as unknown as { axe: { run: (options: object) => Promise<{ violations: Found[] }> } };
  const only = { runOnly: { type: 'rule', values: ['color-contrast'] } };
  const { violations } = await axe.run({ resultTypes: ['violations'], ...(colorScheme === 'dark' && only) });
  const found = violations.flatMap(({ id, nodes }) => nodes.map(({ target, failureSummary }) => `${id} ${target} ${failureSummary}`));
  // axe does not measure the edges of fields and buttons, nor icons that stand for a word.
  const canvas = document.createElement('canvas').getContext('2d', { willReadFrequently: true })!;
  const rgb = (colours: string[]) => {
    canvas.clearRect(0, 0, 1, 1);
    for (const colour of colours) {
      canvas.fillStyle = colour;
      canvas.fillRect(0, 0, 1, 1);
    }
    return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const light = (colour: number[]) => {
    const [r, g, b] = colour.map((v) => (v / 255 <= 0.04045 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r! + 0.7152 * g! + 0.0722 * b!;
  };
  const behind = (element: Element | null): string[] =>
    element ? [...behind(element.parentElement), getComputedStyle(element).backgroundColor] : ['#fff'];
  const ratio = (colour: string, element: Element | null) => {
    const under = behind(element);
    const [a, b] = [light(rgb([...under, colour])), light(rgb(under))];
    return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  };
  for (const control of document.querySelectorAll('button, select, textarea, input:not([type=checkbox], [type=radio]), .state')) {
    if (!control.checkVisibility() || (control as HTMLButtonElement).disabled) continue;
    const { borderTopColor, borderTopStyle, backgroundColor, color } = getComputedStyle(control);
    const hasEdge = borderTopStyle !== 'none' && !/, 0\)$/.test(borderTopColor);
    const best = hasEdge
      ? Math.max(ratio(borderTopColor, control.parentElement), ratio(backgroundColor, control.parentElement))
      : ratio(color, control);
    const name = control.getAttribute('aria-label') ?? control.textContent;
    if (best < 3) found.push(`the edge or icon of ${control.tagName} ${name}: contrast ${best.toFixed(2)}`);
  }
  return found;
}
