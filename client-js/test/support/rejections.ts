/** Rejections that nobody handles. */
import { expect } from 'vitest';

const rejections: unknown[] = [];
const note = (error: unknown) => rejections.push(error);

/** Begins to note them. */
export function noteRejections(): void {
  process.on('unhandledRejection', note);
}

/** Ends that, and fails if there were some. */
export async function expectNoRejections(): Promise<void> {
  await new Promise((resolve) => setTimeout(resolve));
  process.off('unhandledRejection', note);
  expect(rejections.splice(0)).toEqual([]);
}
