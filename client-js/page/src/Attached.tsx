/** The row of files above the field to write in: previews, progress, and descriptions of pictures. */
import { useEffect, useRef, useState } from 'react';
import { cut } from '../../src/cut.js';
import type { Upload } from '../../src/index.js';
import { useUpload } from '../../src/react.js';
import { numberOf } from './attaching.js';
import { isPictureType, sizeOf } from './Files.js';
import { KeptNote } from './kept.js';
import { Icon } from './parts.js';
import { Name } from './words.js';

/** The longer side of a preview in pixels of the canvas. */
const PREVIEW_PX = 128;
/** Code points of a description. */
const ALT_MAX = 300;

interface Props {
  files: readonly Upload[];
  onRemove: (file: Upload) => void;
}

export function Attached({ files, onRemove }: Props) {
  if (!files.length) return null;
  return (
    <ul className="attached" aria-label="Attached files">
      {files.map((file) => (
        <AttachedFile key={numberOf(file)} file={file} onRemove={onRemove} />
      ))}
    </ul>
  );
}

/** Returns the largest size of a file, if that is why it was refused: it will never be taken. */
function maxOf(error: Upload['error']): number {
  const [, max = 0] = (error?.code === 'too_large' && /^a file has (?:1 to|at most) (\d+) bytes$/.exec(error.message)) || [];
  return Number(max);
}

function AttachedFile({ file, onRemove }: { file: Upload; onRemove: (file: Upload) => void }) {
  const { name } = file;
  const { size, sent, state, error, metadata } = useUpload(file);
  const isPicture = isPictureType(file.blob.type);
  const max = maxOf(error);
  const [alt, setAlt] = useState(file.alt ?? '');
  return (
    <li data-state={state}>
      {isPicture && <Preview file={file} />}
      <div>
        <p>
          <Name of={name} /> <small>{sizeOf(size)}</small>
        </p>
        {state === 'failed' ? (
          <p role="alert" className="problem">
            {max ? `A file may have at most ${sizeOf(max)}.` : (error?.message ?? 'Not uploaded.')}
          </p>
        ) : (
          <progress aria-label={`Upload of ${name}`} max={Math.max(1, size)} value={state === 'ready' ? Math.max(1, size) : sent} />
        )}
        <div role="status">{metadata === 'kept' && <KeptNote name={name} />}</div>
        {isPicture && (
          <input
            aria-label={`Description of ${name}`}
            placeholder="Description"
            value={alt}
            onChange={({ target: { value } }) => {
              const short = cut(value, ALT_MAX);
              setAlt(short);
              file.alt = short.trim() || undefined;
            }}
            // Enter would send the message.
            onKeyDown={(event) => event.key === 'Enter' && event.preventDefault()}
          />
        )}
      </div>
      {state === 'failed' && !max && (
        <button type="button" className="quiet" aria-label={`Upload ${name} again`} title="Try again" onClick={() => file.retry()}>
          <Icon name="again" />
        </button>
      )}
      <button type="button" className="quiet" aria-label={`Remove ${name}`} title="Remove" onClick={() => onRemove(file)}>
        <Icon name="close" />
      </button>
    </li>
  );
}

/** A small picture of a file. It is drawn, because the page's policy allows no picture from memory. */
function Preview({ file }: { file: Upload }) {
  const canvas = useRef<HTMLCanvasElement>(null);
  useEffect(() => {
    let isOver = false;
    createImageBitmap(file.blob)
      .then((picture) => {
        const { width, height } = picture;
        const scale = Math.min(1, PREVIEW_PX / Math.max(width, height));
        const to = canvas.current;
        if (to && !isOver) {
          to.width = Math.max(1, Math.round(width * scale));
          to.height = Math.max(1, Math.round(height * scale));
          to.getContext('2d')?.drawImage(picture, 0, 0, to.width, to.height);
        }
        picture.close();
      })
      // The gateway says whether it is a picture. Without a preview it can be sent, too.
      .catch(() => {});
    return () => {
      isOver = true;
    };
  }, [file]);
  return (
    <span aria-hidden="true">
      <canvas ref={canvas} width={1} height={1} />
    </span>
  );
}
