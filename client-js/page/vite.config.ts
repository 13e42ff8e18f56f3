import { join } from 'node:path';
import { defineConfig } from 'vite';
import { emojiData } from './emoji-data.js';

const gateway = process.env.GATEWAY ?? 'http://127.0.0.1:8080';

export default defineConfig({
  // Relative URLs let a proxy serve the page under any path.
  base: './',
  plugins: [emojiData],
  build: {
    // The files are committed and compiled into the gateway: src/gateway/page.rs names each one. The service worker is a file of its own.
    outDir: 'dist',
    // The licences of the packages in it ask to go with it.
    license: { fileName: 'licenses.md' },
    emptyOutDir: true,
    assetsInlineLimit: 0,
    modulePreload: { polyfill: false },
    target: 'es2022',
    chunkSizeWarningLimit: 1000,
    rollupOptions: {
      input: { page: join(import.meta.dirname, 'index.html'), worker: join(import.meta.dirname, 'src/worker.ts') },
      output: {
        // The gateway serves a fixed list of files, so all code is in one but MessagePack and the picker of emoji.
        manualChunks: (id) => {
          if (/msgpack|worker\.ts/.test(id)) return undefined;
          return /EmojiPicker|emoji-data|frimousse|virtual:emoji/.test(id) ? 'emoji' : 'page';
        },
        entryFileNames: '[name].js',
        // After an upgrade a page that is open may load a newer file, which imports from it by these names.
        minifyInternalExports: false,
        chunkFileNames: '[name].js',
        assetFileNames: 'page[extname]',
      },
    },
  },
  esbuild: { jsx: 'automatic', legalComments: 'none' },
  server: { proxy: { '/v1': { target: gateway, ws: true } } },
});
