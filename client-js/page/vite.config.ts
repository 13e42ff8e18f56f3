import { defineConfig } from 'vite';

const gateway = process.env.GATEWAY ?? 'http://127.0.0.1:8080';

export default defineConfig({
  // Relative, so that a proxy may serve the page under a path of its own.
  base: './',
  build: {
    // In the repository, and in the gateway: src/gateway/page.rs names each file.
    outDir: 'dist',
    emptyOutDir: true,
    assetsInlineLimit: 0,
    modulePreload: { polyfill: false },
    target: 'es2022',
    chunkSizeWarningLimit: 1000,
    rollupOptions: {
      output: {
        // One file of the page's own: the gateway serves these files, and no others.
        manualChunks: (id) => (/msgpack/.test(id) ? undefined : 'page'),
        entryFileNames: 'page.js',
        chunkFileNames: '[name].js',
        assetFileNames: 'page[extname]',
      },
    },
  },
  esbuild: { jsx: 'automatic', legalComments: 'none' },
  server: { proxy: { '/v1': { target: gateway, ws: true } } },
});
