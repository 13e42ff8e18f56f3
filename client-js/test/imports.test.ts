/** Source files must not import each other in a circle, not even for types. */
import { readdirSync, readFileSync } from 'node:fs';
import { join } from 'node:path';
import { expect, test } from 'vitest';

const SOURCES = join(import.meta.dirname, '../src');
/** Matches `import … from`, `export … from` and `import(…)`, types included. */
const IMPORT = /\b(?:from|import)\s*\(?\s*'\.\/([\w-]+)\.js'/g;

/** Returns the names of the files that each source file imports. */
function importsOf(folder: string): Map<string, string[]> {
  const names = readdirSync(folder).filter((name) => name.endsWith('.ts'));
  const read = (name: string) => [...readFileSync(join(folder, name), 'utf8').matchAll(IMPORT)].map(([, imported]) => `${imported}.ts`);
  return new Map(names.map((name) => [name, read(name)]));
}

/** Returns one path for each import that leads back to a file on its own path. */
function circles(imports: ReadonlyMap<string, readonly string[]>): string[] {
  const found: string[] = [];
  const finished = new Set<string>();
  const visit = (name: string, path: readonly string[]): void => {
    const start = path.indexOf(name);
    if (start >= 0) found.push([...path.slice(start), name].join(' > '));
    if (start >= 0 || finished.has(name)) return;
    for (const imported of imports.get(name) ?? []) visit(imported, [...path, name]);
    finished.add(name);
  };
  for (const name of imports.keys()) visit(name, []);
  return found;
}

test('the check finds a circle, and every import is of a file in the folder', () => {
  expect(circles(new Map(Object.entries({ a: ['b', 'c'], b: ['c'], c: ['a'] })))).toEqual(['a > b > c > a']);
  const imports = importsOf(SOURCES);
  expect(imports.get('client.ts')).toEqual(expect.arrayContaining(['conversation.ts', 'types.ts', 'watcher.ts']));
  for (const imported of [...imports.values()].flat()) expect([...imports.keys()]).toContain(imported);
});

test('no source files import each other in a circle', () => {
  expect(circles(importsOf(SOURCES))).toEqual([]);
});
