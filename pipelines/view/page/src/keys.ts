/** Keyboard shortcuts: each view registers its own while it is mounted, and the help lists them. */

import { useEffect, useRef } from "preact/hooks";

export interface Key {
  key: string;
  does: string;
  run: (event: KeyboardEvent) => void;
}

const groups = new Map<object, { title: string; keys: Key[] }>();

/** All active shortcuts, by title. */
export function keysNow(): { title: string; keys: Key[] }[] {
  return [...groups.values()].filter((group) => group.keys.length > 0);
}

const SCROLLS = new Set(["ArrowDown", "ArrowUp", "PageDown", "PageUp", "Home", "End", " "]);

function isWriting(target: EventTarget | null): target is HTMLElement {
  return (
    target instanceof HTMLElement &&
    (target.isContentEditable || target.matches("input:not([type=checkbox]):not([type=range]), textarea, select"))
  );
}

window.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (document.querySelector("dialog[open]") !== null) return; // the browser closes it on Escape
  if (isWriting(event.target)) {
    if (event.key !== "Escape") return;
    event.target.blur();
  }
  // The browser scrolls what has the focus, which before the first click is nothing.
  if (event.target === document.body && SCROLLS.has(event.key)) document.querySelector("main")?.focus({ preventScroll: true });
  // Focused buttons and links handle their own keys.
  const onControl = event.target instanceof HTMLElement && event.target.matches("button, a, summary, input");
  if (onControl && (event.key === "Enter" || event.key === " ")) return;
  for (const group of [...groups.values()].reverse()) {
    const key = group.keys.find((one) => one.key === event.key);
    if (key !== undefined) {
      event.preventDefault();
      key.run(event);
      return;
    }
  }
});

/** Register shortcuts while the component is mounted. */
export function useKeys(title: string, keys: Key[]): void {
  const own = useRef({});
  groups.set(own.current, { title, keys });
  useEffect(() => {
    const name = own.current;
    return () => {
      groups.delete(name);
    };
  }, []);
}
