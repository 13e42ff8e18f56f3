/** The sound of a new message: a short tone, off until the user turns it on. */
import { useCallback, useEffect, useState } from 'react';
import type { ChatClient } from '../../src/index.js';
import { isAttended } from './attention.js';
import { isMuted } from './muting.js';
import { base } from './session.js';
import { ofBrowser } from './store.js';

/** The least time between two tones. */
const QUIET_MS = 1_500;

const keyOf = (user: string) => `chat-sound ${base.pathname} ${user}`;

/** Deletes this user's choice to hear messages. */
export const forgetSound = (user: string): void => ofBrowser.remove(keyOf(user));

/** The switch for the sound. */
export interface Sounding {
  on: boolean;
  toggle: () => void;
}

/** Plays two short tones, which fade out. */
function play(): void {
  const audio = new AudioContext();
  // Browsers keep it silent until the user has clicked somewhere.
  if (audio.state === 'suspended') return void audio.close();
  const volume = audio.createGain();
  volume.connect(audio.destination);
  volume.gain.setValueAtTime(0.12, audio.currentTime);
  volume.gain.exponentialRampToValueAtTime(0.001, audio.currentTime + 0.35);
  const tone = audio.createOscillator();
  tone.frequency.setValueAtTime(660, audio.currentTime);
  tone.frequency.setValueAtTime(880, audio.currentTime + 0.1);
  tone.connect(volume);
  tone.onended = () => void audio.close();
  tone.start();
  tone.stop(audio.currentTime + 0.35);
}

/** Plays a sound for messages that the user does not see come. Returns the switch. */
export function useSound(chat: ChatClient, user: string, selected: string | undefined): Sounding {
  const [on, setOn] = useState(() => ofBrowser.get(keyOf(user)) === 'on');
  useEffect(() => {
    if (!on) return;
    let last = 0;
    return chat.on('message', ({ conversation, sender, kind, deleted }) => {
      const item = chat.inbox.get(conversation);
      if (sender === user || kind !== 'text' || deleted || !item || isMuted(item)) return;
      if ((conversation === selected && isAttended()) || Date.now() - last < QUIET_MS) return;
      last = Date.now();
      play();
    });
  }, [on, chat, user, selected]);
  const toggle = useCallback(() => {
    if (on) forgetSound(user);
    else ofBrowser.set(keyOf(user), 'on');
    // The click lets the page play, and the user hears what to expect.
    if (!on) play();
    setOn(!on);
  }, [on, user]);
  return { on, toggle };
}
