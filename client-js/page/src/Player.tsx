/** Videos and sounds of messages, played in place. */
import { useCallback, useEffect, useRef, useState } from 'react';
import type { Attachment } from '../../src/index.js';
import type { FileActions } from './Files.js';
import { plain } from './words.js';

/** The media types that the gateway serves to be played. */
const PLAYERS: Readonly<Record<string, 'video' | 'audio'>> = {
  'video/mp4': 'video',
  'video/webm': 'video',
  'audio/mpeg': 'audio',
  'audio/ogg': 'audio',
};

/** Returns the element that plays files of a media type, if the page plays them. */
export const playerOf = (mime: string | undefined): 'video' | 'audio' | undefined =>
  mime !== undefined && Object.hasOwn(PLAYERS, mime) ? PLAYERS[mime] : undefined;

/** A video or a sound. It asks for its address when it comes into sight. */
export function Player({ file, actions }: { file: Attachment; actions: FileActions }) {
  const { id, name, alt, mime } = file;
  const box = useRef<HTMLDivElement>(null);
  const [url, setUrl] = useState<string>();
  const [isBroken, setIsBroken] = useState(false);
  /** Where to go on with a new address. */
  const resume = useRef<{ at: number; isPlaying: boolean }>(undefined);
  const media = useRef<HTMLMediaElement>(null);
  const load = useCallback(() => {
    actions.address(id!).then(
      ({ url }) => setUrl(url),
      () => setIsBroken(true),
    );
  }, [id, actions]);
  useEffect(() => {
    const seen = new IntersectionObserver((entries) => {
      if (!entries.at(-1)?.isIntersecting) return;
      seen.disconnect();
      load();
    });
    seen.observe(box.current!);
    return () => seen.disconnect();
  }, [load]);
  // A sound loads nothing before it is played.
  useEffect(() => {
    if (url && resume.current?.isPlaying) media.current?.play().catch(() => {});
  }, [url]);
  /** Goes on with a new address, because addresses expire. If there is none, the file itself is broken. */
  const reload = async ({ currentTime, paused }: HTMLMediaElement) => {
    const next = await actions.address(id!).catch(() => undefined);
    if (!next || next.url === url) return setIsBroken(true);
    resume.current = { at: currentTime, isPlaying: !paused };
    setUrl(next.url);
  };
  const again = () => {
    setIsBroken(false);
    setUrl(undefined);
    load();
  };
  const Media = playerOf(mime)!;
  return (
    <div ref={box} className={`player ${Media}`}>
      {isBroken && (
        <button type="button" onClick={again}>
          It cannot be played now. Try again
        </button>
      )}
      {url && !isBroken && (
        <Media
          ref={media as never}
          src={url}
          controls
          preload={Media === 'video' ? 'metadata' : 'none'}
          aria-label={plain(alt || name || `A ${Media === 'video' ? 'video' : 'sound'}`)}
          onError={({ currentTarget }) => void reload(currentTarget)}
          onLoadedMetadata={({ currentTarget }) => {
            const at = resume.current?.at;
            resume.current = undefined;
            if (at) currentTarget.currentTime = at;
          }}
        />
      )}
    </div>
  );
}
