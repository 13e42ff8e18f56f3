/** The part of WebCrypto that the SDK uses, which React Native lacks. Import this file before the SDK. */
// Sets crypto.getRandomValues. Math.random of Hermes has a seed of 32 bits, so ids made with it would collide.
import 'react-native-get-random-values';
import { sha1 } from '@noble/hashes/legacy.js';

// The ids of direct chats are hashes of the users' names. With it, chat.dm() works without a connection.
const digest = async (_algorithm: 'SHA-1', data: Uint8Array) => sha1(data).buffer;
const { crypto } = globalThis as unknown as { crypto: { subtle?: object } };
crypto.subtle ??= { digest };
