import { join } from 'node:path';
import { defineConfig } from 'vite';

const gateway = process.env.GATEWAY ?? 'http://127.0.0.1:8080';

export default defineConfig({
  // Relative URLs let a proxy serve the page under any path.
  base: './',
  build: {
    // The files are committed and compiled into the gateway: src/gateway/page.rs names each one. The service worker is a file of its own.
    outDir: 'dist',
    emptyOutDir: true,
    assetsInlineLimit: 0,
    modulePreload: { polyfill: false },
    target: 'es2022',
    chunkSizeWarningLimit: 1000,
    rollupOptions: {
      input: { page: join(import.meta.dirname, 'index.html'), worker: join(import.meta.dirname, 'src/worker.ts') },
      output: {
        // The gateway serves a fixed list of files, so all code but MessagePack is in one.
        manualChunks: (id) => (/msgpack|worker\.ts/.test(id) ? undefined : 'page'),
        entryFileNames: '[name].js',
        chunkFileNames: '[name].js',
        assetFileNames: 'page[extname]',
      },
    },
  },
  esbuild: { jsx: 'automatic', legalComments: 'none' },
  server: { proxy: { '/v1': { target: gateway, ws: true } } },
});
