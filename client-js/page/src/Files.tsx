/** The files of a message: pictures as thumbnails, which open in a window, videos and sounds in players, and others as links. */
import { Fragment, useEffect, useState } from 'react';
import type { Attachment, AttachmentUrl } from '../../src/index.js';
import { KeptNoteOf } from './kept.js';
import { Player, playerOf } from './Player.js';
import { Dialog } from './parts.js';
import { Name, plain } from './words.js';

/** The largest thumbnail in CSS pixels. */
const [WIDTH_MAX, HEIGHT_MAX] = [320, 240];
/** The least side of a thumbnail, so that very narrow pictures can be seen and clicked. */
const SIDE_MIN = 32;
/** The time after which an address is requested again, if that failed for a while. */
const AGAIN_MS = 5_000;

const PICTURES = ['image/jpeg', 'image/png', 'image/gif', 'image/webp'];

/** Whether the page shows files of this media type as pictures. */
export const isPictureType = (mime: string | undefined): boolean => PICTURES.includes(mime ?? '');

/** Returns a number of bytes as text. */
export function sizeOf(bytes: number): string {
  if (bytes < 1024) return `${bytes} ${bytes === 1 ? 'byte' : 'bytes'}`;
  const kib = Math.ceil(bytes / 1024);
  if (kib < 1024) return `${kib} KiB`;
  const [size, unit] = bytes < 1024 ** 3 ? [bytes / 1024 ** 2, 'MiB'] : [bytes / 1024 ** 3, 'GiB'];
  return `${size.toLocaleString(undefined, { maximumFractionDigits: 1 })} ${unit}`;
}

/** What the rows need for their files. */
export interface FileActions {
  /** Returns the addresses of an uploaded file. */
  address: (id: string) => Promise<AttachmentUrl>;
}

/** @param own Whether the user uploaded them. */
export function Files({ files, actions, own }: { files: readonly Attachment[]; actions: FileActions; own: boolean }) {
  return files.map((file, i) => {
    const { id, url, name, mime, width, height } = file;
    const key = `${id ?? url ?? name} ${i}`;
    if (id) {
      const isPicture = isPictureType(mime) && width && height;
      return (
        <Fragment key={key}>
          {playerOf(mime) && <Player file={file} actions={actions} />}
          {isPicture ? <Picture file={file} actions={actions} /> : <FileLink file={file} actions={actions} />}
          {own && <KeptNoteOf id={id} />}
        </Fragment>
      );
    }
    return (
      <a
        key={key}
        className="attachment"
        href={url && /^https?:/i.test(url) ? url : undefined}
        target="_blank"
        rel="noopener noreferrer nofollow ugc"
      >
        <NameAndSize file={file} />
      </a>
    );
  });
}

function NameAndSize({ file: { name, url, size } }: { file: Attachment }) {
  return (
    <>
      <Name of={name || url || 'a file'} />
      {size !== undefined && <small> {sizeOf(size)}</small>}
    </>
  );
}

/** Returns the addresses of a file as soon as they are known, or why the user may not have them. */
function useAddress(id: string, actions: FileActions): { address?: AttachmentUrl; error?: Error } {
  const [found, setFound] = useState<{ address?: AttachmentUrl; error?: Error }>({});
  useEffect(() => {
    let timer: ReturnType<typeof setTimeout> | undefined;
    let isOver = false;
    const ask = () =>
      actions.address(id).then(
        (address) => isOver || setFound({ address }),
        (error) => {
          if (isOver) return;
          // Without a connection it is requested again, while the message is shown.
          if (error.temporary || error.code === 'closed') timer = setTimeout(ask, AGAIN_MS);
          else setFound({ error });
        },
      );
    void ask();
    return () => {
      isOver = true;
      clearTimeout(timer);
    };
  }, [id, actions]);
  return found;
}

/** A thumbnail. Its space is there before its bytes are, so that no message moves. */
function Picture({ file, actions }: { file: Attachment; actions: FileActions }) {
  const { id, name, alt, width, height } = file;
  const { address, error } = useAddress(id!, actions);
  const [isBroken, setIsBroken] = useState(false);
  /** Whether it is shown in full. That ends with the message, so a deleted picture does not stay in sight. */
  const [isShown, setIsShown] = useState(false);
  if (error || isBroken) return <FileLink file={file} actions={actions} />;
  const scale = Math.min(1, WIDTH_MAX / width!, HEIGHT_MAX / height!);
  const [w, h] = [width!, height!].map((side) => Math.max(SIDE_MIN, Math.round(side * scale)));
  const text = alt || name || 'A picture';
  return (
    <>
      <button
        type="button"
        className="picture"
        style={{ width: `${w}px`, aspectRatio: `${w} / ${h}` }}
        title={plain(alt || name || '')}
        aria-label={`Show ${text}`}
        onClick={() => setIsShown(true)}
      >
        {address && <img src={address.thumb ?? address.url} alt={text} draggable={false} onError={() => setIsBroken(true)} />}
      </button>
      {isShown && <Lightbox file={file} actions={actions} onClose={() => setIsShown(false)} />}
    </>
  );
}

/** A file that is downloaded when the user asks for it. */
function FileLink({ file, actions }: { file: Attachment; actions: FileActions }) {
  const [problem, setProblem] = useState<string>();
  const download = async () => {
    try {
      setProblem(undefined);
      save((await actions.address(file.id!)).url, file);
    } catch (error) {
      setProblem((error as Error).message);
    }
  };
  return (
    <>
      <button type="button" className="attachment" title="Download" onClick={download}>
        <NameAndSize file={file} />
      </button>
      {problem && (
        <p role="alert" className="problem">
          {problem}
        </p>
      )}
    </>
  );
}

/** Downloads an address. */
function save(url: string, { name = 'file', mime }: Attachment): void {
  const link = document.createElement('a');
  link.href = url;
  link.download = plain(name);
  // Of other media types no browser shows anything.
  if (/^(image|video|audio)\//.test(mime ?? '')) Object.assign(link, elsewhere(url));
  link.click();
}

/** Returns the attributes of a link that must not leave the chat: browsers ignore `download` on one to a bucket, of another origin. */
const elsewhere = (url: string) => (new URL(url).origin === location.origin ? {} : { target: '_blank', rel: 'noopener' });

/** A picture in full, with a link to download it. */
function Lightbox({ file, actions, onClose }: { file: Attachment; actions: FileActions; onClose: () => void }) {
  const { id, name, alt, width, height } = file;
  const { address, error } = useAddress(id!, actions);
  return (
    <Dialog title={plain(name || 'A picture')} className="lightbox" onClose={onClose}>
      {error ? (
        <p role="alert" className="problem">
          {error.message}
        </p>
      ) : (
        <img src={address?.url} alt={alt || name || 'A picture'} width={width} height={height} />
      )}
      {alt && <p>{alt}</p>}
      {address && (
        <a data-first href={address.url} download={plain(name ?? '')} {...elsewhere(address.url)}>
          Download
        </a>
      )}
    </Dialog>
  );
}
