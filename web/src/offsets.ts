// UTF-16 units (the editor's) to code points (the wire's) and back. A text without surrogate pairs, which is
// almost every file, costs nothing; else what stands before the place is counted.

import type { Text } from "@codemirror/state";

const PAIR = /[\ud800-\udbff][\udc00-\udfff]/g;

export function pairs(text: string): number {
  return text.match(PAIR)?.length ?? 0;
}

export function hasPairs(doc: Text): boolean {
  for (const piece of doc.iter()) if (/[\ud800-\udbff]/.test(piece)) return true;
  return false;
}

export class Offsets {
  constructor(private readonly doc: Text, private readonly plain: boolean) {}

  toWire(at: number): number {
    if (this.plain) return at;
    let found = 0;
    for (const piece of this.doc.iterRange(0, at)) found += pairs(piece);
    return at - found;
  }

  fromWire(at: number): number {
    if (this.plain) return Math.min(at, this.doc.length);
    let points = 0, units = 0;
    for (const piece of this.doc.iter()) {
      for (const character of piece) {
        if (points === at) return units;
        points += 1;
        units += character.length;
      }
    }
    return units;
  }
}
