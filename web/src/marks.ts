// What is drawn over the text: findings as underlines, the next edit where it would happen. Both follow the
// text while it changes; applying them is the page's business.

import { type Extension, StateEffect, StateField } from "@codemirror/state";
import { Decoration, EditorView, WidgetType } from "@codemirror/view";
import type { Jump, Span } from "./live";

export const setFindings = StateEffect.define<Span[]>();
export const setJump = StateEffect.define<Jump | null>();

export const findings = StateField.define<Span[]>({
  create: () => [],
  update(value, transaction) {
    for (const effect of transaction.effects) if (effect.is(setFindings)) return effect.value;
    if (!transaction.docChanged || !value.length) return value;
    const map = (at: number, side: number) => transaction.changes.mapPos(at, side);
    // A fix is offered for the text it was made for; while keys fall the underline moves and the fix waits.
    return value.map((f) => ({ ...f, from: map(f.from, 1), to: map(f.to, -1), fixes: [] }));
  },
  provide: (self) => EditorView.decorations.from(self, (value) => Decoration.set(
    value.filter((f) => f.to > f.from).map((f) => Decoration.mark({ class: `finding finding-${f.severity}` }).range(f.from, f.to)), true,
  )),
});

class Insertion extends WidgetType {
  constructor(private readonly text: string) { super(); }
  eq(other: Insertion): boolean { return other.text === this.text; }
  toDOM(): HTMLElement {
    const element = document.createElement("span");
    element.className = "jump-new";
    element.setAttribute("aria-hidden", "true");
    element.textContent = this.text;
    return element;
  }
}

export const jump = StateField.define<Jump | null>({
  create: () => null,
  update(value, transaction) {
    for (const effect of transaction.effects) if (effect.is(setJump)) return effect.value;
    if (!value || !transaction.docChanged) return value;
    return { ...value, from: transaction.changes.mapPos(value.from, 1), to: transaction.changes.mapPos(value.to, -1) };
  },
  provide: (self) => EditorView.decorations.from(self, (value) => {
    if (!value || value.to < value.from) return Decoration.none;
    const marks = [Decoration.widget({ widget: new Insertion(value.text), side: 1 }).range(value.to)];
    if (value.to > value.from) marks.push(Decoration.mark({ class: "jump-old" }).range(value.from, value.to));
    return Decoration.set(marks, true);
  }),
});

export function marks(): Extension { return [findings, jump]; }
