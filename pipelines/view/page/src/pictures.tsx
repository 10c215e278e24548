/** Pictures of a dataset's store. */

import type { JSX } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { picture } from "./answers";
import { Dialog } from "./dialogs";
import { useAnswer } from "./parts";
import { useSession } from "./session";
import { count, short } from "./text";
import type { PictureSpan } from "./token_layout";

/** A picture as a data URL: null if the store does not have it, undefined until it is loaded. */
export function usePictureUrl(sha256: string | null): string | null | undefined {
  const { dataset } = useSession();
  const key = sha256 === null || dataset === null ? null : `${dataset.id} ${sha256}`;
  return useAnswer(key, () => picture(dataset!.id, sha256!)).value?.url;
}

function nameOf({ sha256 }: PictureSpan): string {
  return sha256.slice(0, "sha256:".length + 8);
}

/** "264 tokens, 15 to 278, sha256:1a2b3c4d". */
export function captionOf(span: PictureSpan): string {
  const { start, length } = span;
  const range = length === 1 ? short(start) : `${short(start)} to ${short(start + length - 1)}`;
  return `${count(length, "token")}, ${range}, ${nameOf(span)}`;
}

function Shown({ span, url }: { span: PictureSpan; url: string | null | undefined }): JSX.Element | null {
  if (url === undefined) return null;
  if (url === null) return <p class="note">The store of the dataset does not have this picture.</p>;
  return <img class="picture" src={url} alt={`picture ${nameOf(span)}`} title={span.sha256} />;
}

interface Props {
  span: PictureSpan;
  style: { top: string; left: string; width: string; height: string };
  onOpen: () => void;
}

/** A picture at its tokens; it is loaded once it is in sight. */
export function TokenPicture({ span, style, onOpen }: Props): JSX.Element {
  const ref = useRef<HTMLElement>(null);
  const [isSeen, setSeen] = useState(false);
  useEffect(() => {
    const observer = new IntersectionObserver((entries) => setSeen((seen) => seen || entries.some((one) => one.isIntersecting)));
    observer.observe(ref.current!);
    return () => observer.disconnect();
  }, []);
  const url = usePictureUrl(isSeen ? span.sha256 : null);
  const shown = <Shown span={span} url={url} />;
  return (
    <figure class="token-picture" ref={ref} style={style} data-tokens={`${span.start} ${span.length}`}>
      {typeof url === "string" ? <button type="button" onClick={onOpen}>{shown}</button> : shown}
      <figcaption>{captionOf(span)}</figcaption>
    </figure>
  );
}

/** A picture in its full size. */
export function PictureDialog({ span, onClose }: { span: PictureSpan; onClose: () => void }): JSX.Element {
  return (
    <Dialog title={captionOf(span)} onClose={onClose}>
      <Shown span={span} url={usePictureUrl(span.sha256)} />
    </Dialog>
  );
}
