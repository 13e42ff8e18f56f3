// Prints the size of the core as an application ships it: bundled, minified and gzipped. Fails above the limit.
import { resolve } from 'node:path';
import { gzipSync } from 'node:zlib';
import { build } from 'esbuild';

const LIMIT = 18.6 * 1024;

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
console.log(`core with JSON: ${core.gzipped} bytes gzipped (${core.bytes} minified); the limit is ${LIMIT}`);
for (const { path, gzipped } of core.later) console.log(`loaded later:   ${gzipped} bytes gzipped, ${path.replace(/.*\/(.*)-.*/, '$1')}`);
console.log(`react hooks:    ${react.gzipped} bytes gzipped (${react.bytes} minified)`);

// Builds the file for `<script src>`, used as `const { ChatClient } = chatGateway`.
await build({
  entryPoints: ['dist/index.js'],
  bundle: true,
  minify: true,
  format: 'iife',
  globalName: 'chatGateway',
  target: 'es2022',
  outfile: 'dist/chat-gateway.global.js',
});
if (core.gzipped > LIMIT) {
  console.error(`the core is ${core.gzipped - LIMIT} bytes too large: shorten it, or load a part later`);
  process.exit(1);
}
