/** A virtual table: only visible rows are in the DOM. */

import type { ComponentChildren, JSX } from "preact";
import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import { useSize } from "./parts";

const ROW = 27;
const HEAD = 30;
// Browsers cap an element's height (Firefox at about 17.8 million pixels). A longer table scrolls in
// proportion, and the wheel still moves it row by row.
const TALLEST = 8_000_000;

export interface Head {
  name: string;
  title: string;
  help?: string;
  numeric: boolean;
}

interface Props {
  label: string;
  heads: Head[];
  total: number;
  cells: (index: number) => ComponentChildren[] | null;
  rowKey: (index: number) => string;
  rowName: (index: number) => string | null;
  isChosen: (index: number) => boolean;
  isPinned?: (index: number) => boolean;
  cursor: number | null;
  sort: string;
  descending: boolean;
  onSort: (name: string) => void;
  onChoose: (index: number) => void;
  onOpen: (index: number) => void;
  onWindow?: (first: number, last: number) => void;
}

export function VirtualTable(props: Props): JSX.Element {
  const { heads, total, cursor } = props;
  const [ref, size] = useSize();
  const [top, setTop] = useState(0);
  const setBySelf = useRef(-1);
  const rowsInSight = Math.max(1, Math.floor((size.height - HEAD) / ROW));
  const lastTop = Math.max(0, total - rowsInSight);
  const height = Math.min(TALLEST, total * ROW + HEAD);
  const scrollable = Math.max(0, height - size.height);
  const isScaled = total * ROW + HEAD > TALLEST;
  const first = Math.min(Math.floor(top), lastTop);
  const last = Math.min(total, first + rowsInSight + 2);

  const scrollToRow = (row: number): void => {
    const next = Math.max(0, Math.min(lastTop, row));
    setTop(next);
    if (ref.current === null) return;
    const pixels = isScaled ? (next / (lastTop || 1)) * scrollable : next * ROW;
    setBySelf.current = Math.round(pixels);
    ref.current.scrollTop = pixels;
  };
  const onScroll = (): void => {
    const pixels = ref.current?.scrollTop ?? 0;
    if (Math.abs(pixels - setBySelf.current) <= 1) return;
    setBySelf.current = -1;
    setTop(isScaled ? (pixels / (scrollable || 1)) * lastTop : pixels / ROW);
  };
  useEffect(() => {
    const element = ref.current;
    if (element === null || !isScaled) return;
    const onWheel = (event: WheelEvent): void => {
      if (event.deltaY === 0 || event.shiftKey) return;
      event.preventDefault();
      const rows = event.deltaMode === 0 ? event.deltaY / ROW : event.deltaY;
      scrollToRow(top + rows);
    };
    element.addEventListener("wheel", onWheel, { passive: false });
    return () => element.removeEventListener("wheel", onWheel);
  });
  useLayoutEffect(() => {
    if (cursor === null || size.height === 0) return;
    if (cursor < first) scrollToRow(cursor);
    else if (cursor >= first + rowsInSight) scrollToRow(cursor - rowsInSight + 1);
  }, [cursor, size.height > 0]);
  useEffect(() => props.onWindow?.(first, last), [first, last, total]);

  const shift = isScaled ? 0 : -(top - first) * ROW;
  const body: JSX.Element[] = [];
  for (let index = first; index < last; index++) {
    const cells = props.cells(index);
    const classes = [
      props.isChosen(index) ? "chosen" : "",
      props.isPinned?.(index) === true ? "pinned" : "",
      index % 2 === 1 ? "odd" : "",
    ].join(" ");
    body.push(
      <tr
        key={props.rowKey(index)}
        class={classes}
        aria-rowindex={index + 2}
        aria-selected={props.isChosen(index)}
        data-index={index}
        data-row={props.rowName(index)}
        onClick={() => props.onChoose(index)}
        onDblClick={() => props.onOpen(index)}
      >
        {cells === null
          ? heads.map((head) => <td key={head.name} class="pending" />)
          : cells.map((cell, at) => (
              <td key={heads[at]!.name} class={heads[at]!.numeric ? "numeric" : ""} data-column={heads[at]!.name}>
                {cell}
              </td>
            ))}
      </tr>,
    );
  }
  return (
    <div class="virtual" ref={ref} onScroll={onScroll} tabIndex={-1}>
      <div class="sizer" style={{ height: `${height}px` }}>
        <div class="window" style={{ maxHeight: `${size.height}px` }}>
          <table aria-label={props.label} aria-rowcount={total + 1}>
            <thead>
              <tr aria-rowindex={1}>
                {heads.map((head) => head.title === "" ? <td key={head.name} /> : (
                  <th
                    key={head.name}
                    scope="col"
                    class={head.numeric ? "numeric" : ""}
                    aria-sort={
                      props.sort === head.name ? (props.descending ? "descending" : "ascending") : "none"
                    }
                  >
                    <button type="button" title={head.help} onClick={() => props.onSort(head.name)}>
                      {head.title}
                      <span aria-hidden="true" class="arrow">
                        {props.sort === head.name ? (props.descending ? "↓" : "↑") : ""}
                      </span>
                    </button>
                  </th>
                ))}
              </tr>
            </thead>
            <tbody style={{ transform: `translateY(${shift}px)` }}>{body}</tbody>
          </table>
        </div>
      </div>
    </div>
  );
}
