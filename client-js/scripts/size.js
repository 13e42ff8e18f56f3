// Prints the sizes of the core and of the service worker as an application ships them: bundled, minified and gzipped. Fails above
// their limits.
import { resolve } from 'node:path';
import { gzipSync } from 'node:zlib';
import { build } from 'esbuild';

const LIMIT = 20 * 1024;
const WORKER_LIMIT = 1.4 * 1024;

/** Returns the size of an entry with its static imports, and of each file that it loads later. */
const bundle = async (entry) => {
  const { outputFiles, metafile } = await build({
    entryPoints: [entry],
    bundle: true,
    minify: true,
    metafile: true,
    format: 'esm',
    target: 'es2022',
    splitting: true,
    outdir: 'size',
    write: false,
    external: ['@msgpack/msgpack', 'react'],
  });
  const sizes = (path) => {
    const { contents } = outputFiles.find((file) => file.path === resolve(path));
    return { bytes: contents.length, gzipped: gzipSync(contents, { level: 9 }).length };
  };
  const files = Object.entries(metafile.outputs);
  const [path, { imports }] = files.find(([, { entryPoint }]) => entryPoint === entry);
  const size = sizes(path);
  for (const { path, kind, external } of imports) {
    if (kind !== 'import-statement' || external) continue;
    size.bytes += sizes(path).bytes;
    size.gzipped += sizes(path).gzipped;
  }
  const later = imports.filter(({ kind }) => kind === 'dynamic-import').map(({ path }) => ({ path, ...sizes(path) }));
  return { ...size, later };
};

const core = await bundle('dist/index.js');
const react = await bundle('dist/react.js');
const worker = await bundle('dist/push-worker.js');
console.log(`core with JSON: ${core.gzipped} bytes gzipped (${core.bytes} minified); the limit is ${LIMIT}`);
for (const { path, gzipped } of core.later) console.log(`loaded later:   ${gzipped} bytes gzipped, ${path.replace(/.*\/(.*)-.*/, '$1')}`);
console.log(`react hooks:    ${react.gzipped} bytes gzipped (${react.bytes} minified)`);
console.log(`push worker:    ${worker.gzipped} bytes gzipped (${worker.bytes} minified); the limit is ${WORKER_LIMIT}`);

/** Builds a file that needs no bundler: one that sets a global. */
const script = (entry, globalName, outfile) =>
  build({ entryPoints: [entry], bundle: true, minify: true, format: 'iife', globalName, target: 'es2022', outfile });
// For `<script src>`, used as `const { ChatClient } = chatGateway`.
await script('dist/index.js', 'chatGateway', 'dist/chat-gateway.global.js');
// For `importScripts` in a service worker, used as `chatGatewayPush.handlePush(self)`.
await script('dist/push-worker.js', 'chatGatewayPush', 'dist/chat-gateway.push-worker.js');

let failed = false;
for (const [name, { gzipped }, limit] of [
  ['the core', core, LIMIT],
  ['the push worker', worker, WORKER_LIMIT],
]) {
  if (gzipped <= limit) continue;
  failed = true;
  console.error(`${name} is ${gzipped - limit} bytes too large: shorten it, or load a part later`);
}
if (failed) process.exit(1);
