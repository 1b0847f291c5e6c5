// Ghost text in the editor: shown at the cursor, kept while it is typed, taken whole or by the word.
// Knows the editor's state only; where suggestions come from is another's business.

import { type EditorState, type Extension, StateEffect, StateField } from "@codemirror/state";
import { type Command, Decoration, type DecorationSet, EditorView, WidgetType } from "@codemirror/view";

export interface Ghost { id: string; at: number; to: number; text: string }

export const setGhost = StateEffect.define<Ghost | null>();

class GhostText extends WidgetType {
  constructor(private readonly text: string, private readonly block: boolean) { super(); }
  eq(other: GhostText): boolean { return other.text === this.text && other.block === this.block; }
  toDOM(): HTMLElement {
    const element = document.createElement(this.block ? "div" : "span");
    element.className = this.block ? "ghost ghost-lines" : "ghost";
    element.setAttribute("aria-hidden", "true"); // said through the announcer instead, once it stays
    element.textContent = this.text;
    return element;
  }
  ignoreEvent(): boolean { return true; }
}

const field = StateField.define<Ghost | null>({
  create: () => null,
  update(ghost, transaction) {
    for (const effect of transaction.effects) if (effect.is(setGhost)) return effect.value;
    if (!ghost || (!transaction.docChanged && !transaction.selection)) return ghost;
    const { newDoc, state } = transaction;
    const head = state.selection.main.head;
    const grown = newDoc.length - transaction.startState.doc.length;
    if (transaction.docChanged && grown > 0 && head === ghost.at + grown && ghost.to === ghost.at) {
      const typed = newDoc.sliceString(ghost.at, head); // the key agrees with what is shown: it stays, shorter
      if (ghost.text.startsWith(typed) && ghost.text.length > typed.length)
        return { ...ghost, at: head, to: head, text: ghost.text.slice(typed.length) };
    }
    return !transaction.docChanged && head === ghost.at && state.selection.main.empty ? ghost : null;
  },
  provide: (self) => EditorView.decorations.from(self, (ghost) => ghost ? drawn(ghost) : Decoration.none),
});

function drawn(ghost: Ghost): DecorationSet {
  const [first, ...rest] = ghost.text.split("\n");
  const marks = [Decoration.widget({ widget: new GhostText(first, false), side: 1 }).range(ghost.at)];
  if (rest.length)
    marks.push(Decoration.widget({ widget: new GhostText(rest.join("\n"), true), side: 2, block: true }).range(ghost.at));
  return Decoration.set(marks, true);
}

export function ghostOf(state: EditorState): Ghost | null { return state.field(field, false) ?? null; }

export type Taken = (ghost: Ghost, outcome: "accepted" | "partial" | "dismissed", length: number) => void;

/** Whole, or its next word: what is typed next with one key. */
export function accept(taken: Taken, part: "all" | "word"): Command {
  return (view) => {
    const ghost = ghostOf(view.state);
    if (!ghost) return false;
    const piece = part === "all" ? ghost.text : /^\s*(?:\w+|[^\w\s]+)/.exec(ghost.text)?.[0] ?? ghost.text;
    const whole = piece.length === ghost.text.length;
    const rest = whole ? null : { ...ghost, at: ghost.at + piece.length, to: ghost.to + piece.length, text: ghost.text.slice(piece.length) };
    view.dispatch({
      changes: { from: ghost.at, to: whole ? ghost.to : ghost.at, insert: piece },
      selection: { anchor: ghost.at + piece.length }, effects: setGhost.of(rest), userEvent: "input.complete", scrollIntoView: true,
    });
    taken(ghost, whole ? "accepted" : "partial", piece.length);
    return true;
  };
}

export function dismiss(taken: Taken): Command {
  return (view) => {
    const ghost = ghostOf(view.state);
    if (!ghost) return false;
    view.dispatch({ effects: setGhost.of(null) });
    taken(ghost, "dismissed", 0);
    return true;
  };
}

export function ghostText(): Extension { return field; }
