import { defineConfig } from 'tsdown';

export default defineConfig({
  entry: ['src/index.ts', 'src/react.ts', 'src/push-worker.ts'],
  format: ['esm', 'cjs'],
  target: 'es2022',
  platform: 'neutral',
  dts: true,
  fixedExtension: false,
  hash: false,
  // Constants are inlined, because not every bundler does that. The rest stays readable.
  outputOptions: { minify: { compress: { sequences: false, joinVars: false }, mangle: false, codegen: false } },
});
