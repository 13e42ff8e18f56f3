import { defineConfig } from 'vitest/config';
import { BaseSequencer, type TestSpecification } from 'vitest/node';

/** Runs the longest file first, so that it does not run alone at the end. */
class LongestFirst extends BaseSequencer {
  override async sort(files: TestSpecification[]): Promise<TestSpecification[]> {
    const isLongest = (file: TestSpecification) => Number(file.moduleId.endsWith('network.test.ts'));
    return (await super.sort(files)).sort((a, b) => isLongest(b) - isLongest(a));
  }
}

export default defineConfig({
  test: {
    include: ['test/**/*.test.ts'],
    testTimeout: 240_000,
    hookTimeout: 120_000,
    // Each file runs a real gateway or browser, which need the other cores.
    maxWorkers: 2,
    sequence: { sequencer: LongestFirst },
    reporters: ['default'],
  },
});
