/** Starts a real storage that is compatible with S3: tests/s3server. */
import { spawn } from 'node:child_process';
import { mkdirSync, mkdtempSync, readdirSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { freePort, until } from './gateway.js';

const SERVER = process.env.S3_SERVER ?? join(import.meta.dirname, '../../../target/s3server/debug/s3-server');
const NAME = 'files-of-chat';
const ACCESS = 'the-access-key';
const SECRET = 'a secret that only gateways know';

export interface Bucket {
  origin: string;
  /** The settings of a gateway that keeps files here. */
  settings: Record<string, string>;
  /** The names of all objects. */
  objects(): string[];
  end(): void;
}

export async function startBucket(): Promise<Bucket> {
  const root = mkdtempSync(join(tmpdir(), 'chat-test-s3-'));
  mkdirSync(join(root, NAME));
  const address = `127.0.0.1:${await freePort()}`;
  const child = spawn(SERVER, [address, root, ACCESS, SECRET], { stdio: ['ignore', 'pipe', 'inherit'] });
  let said = '';
  child.stdout.on('data', (text) => (said += text));
  await until(() => {
    if (child.exitCode !== null) throw new Error('the storage did not start');
    return said.includes('ready');
  });
  const origin = `http://${address}`;
  return {
    origin,
    settings: {
      attachments__store: 's3',
      attachments__s3__endpoint: origin,
      attachments__s3__bucket: NAME,
      attachments__s3__access_key: ACCESS,
      attachments__s3__secret_key: SECRET,
    },
    objects: () =>
      readdirSync(join(root, NAME), { recursive: true, withFileTypes: true })
        .filter((entry) => entry.isFile())
        .map(({ name }) => name),
    end: () => {
      child.kill('SIGKILL');
      rmSync(root, { recursive: true, force: true });
    },
  };
}
