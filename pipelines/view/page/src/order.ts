/** Row order, the same as the server's, so that reports and the live page agree. */

import type { Row, Value } from "./answers";

/** Integers beyond 2^53, as `valueOf` writes them. */
const LARGE = /^-?\d{16,20}$/;

export function compare(a: Value | undefined, b: Value | undefined): number {
  if (typeof a !== "string" || typeof b !== "string") return Number(a) - Number(b);
  if (LARGE.test(a) && LARGE.test(b)) return Number(BigInt(a) - BigInt(b));
  return a < b ? -1 : a > b ? 1 : 0;
}

/** Sort rows in the page as the server does: nulls and NaN last, equal rows in the order they came. */
export function sorted(rows: Row[], column: string, descending: boolean): Row[] {
  if (column === "") return rows;
  const sign = descending ? -1 : 1;
  return rows.toSorted((a, b) => {
    const [x, y] = [a[column] ?? null, b[column] ?? null];
    const [isXLast, isYLast] = [x === null || Number.isNaN(x), y === null || Number.isNaN(y)];
    if (isXLast || isYLast) return Number(isXLast) - Number(isYLast);
    return sign * compare(x, y);
  });
}
