import { memoryStorage, type OutboxStorage } from '../../src/index.js';

/** Returns a storage in memory that keeps files, too. */
export function keeping(): OutboxStorage & { kept: Map<string, Blob[]> } {
  const memory = memoryStorage();
  const kept = new Map<string, Blob[]>();
  return {
    ...memory,
    kept,
    remove: async (clientId) => {
      kept.delete(clientId);
      return memory.remove(clientId);
    },
    keep: async (clientId, files) => kept.set(clientId, files),
    files: async (clientId) => kept.get(clientId) ?? [],
  };
}
