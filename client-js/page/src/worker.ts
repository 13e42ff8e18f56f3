/** The service worker of the page. It only shows pushed messages: the page itself is never served from it. */
import { handlePush, type PushScope } from '../../src/push-worker.js';

const worker = self as unknown as PushScope & { skipWaiting(): void };

// It keeps nothing, so a new version need not wait until all tabs are closed.
worker.addEventListener('install', () => worker.skipWaiting());
handlePush(worker, { icon: 'icon.svg' });
