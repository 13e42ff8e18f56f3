/** Builds examples that belong to a framework, with the SDK of this repository, and without the framework. */
import { execFile } from 'node:child_process';
import { readFileSync } from 'node:fs';
import { join } from 'node:path';
import { promisify } from 'node:util';
import { type BuildOptions, build, type Plugin } from 'esbuild';

const CLIENT = join(import.meta.dirname, '../..');
export const EXAMPLES = join(CLIENT, '../examples');

/** Installs packages of an example in a folder, in the versions that its `package.json` asks for. */
export async function install(example: string, folder: string, ...names: string[]): Promise<void> {
  const { dependencies } = JSON.parse(readFileSync(join(EXAMPLES, example, 'package.json'), 'utf8'));
  const wanted = names.map((name) => `${name}@${dependencies[name]}`);
  await promisify(execFile)('npm', ['install', '--silent', '--prefer-offline', '--prefix', folder, ...wanted]);
}

/** Bundles a module that is part of an example.
 * @param source The text of the module.
 * @param instead What takes the place of modules, by the name under which they are imported: their text.
 * @param folder A folder with the packages of the example. */
export function bundle(
  example: string,
  source: string,
  { instead = {}, folder = '', ...options }: { instead?: Record<string, string>; folder?: string } & BuildOptions,
): ReturnType<typeof build> {
  const resolveDir = join(EXAMPLES, example);
  const replace: Plugin = {
    name: 'replace',
    setup({ onResolve, onLoad }) {
      onResolve({ filter: /^/ }, ({ path }) => (Object.hasOwn(instead, path) ? { path, namespace: 'instead' } : undefined));
      onLoad({ filter: /^/, namespace: 'instead' }, ({ path }) => ({ contents: instead[path]!, loader: 'jsx', resolveDir }));
    },
  };
  return build({
    stdin: { contents: source, resolveDir, loader: 'tsx' },
    bundle: true,
    jsx: 'automatic',
    plugins: [replace],
    nodePaths: [join(CLIENT, 'node_modules'), join(folder, 'node_modules')],
    alias: { '@chat-gateway/client/react': join(CLIENT, 'src/react.ts'), '@chat-gateway/client': join(CLIENT, 'src/index.ts') },
    logLevel: 'error',
    ...options,
  });
}
