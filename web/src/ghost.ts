// Ghost text in the editor: shown at the cursor, kept while it is typed, taken whole or by the word.
// Knows the editor's state only; where suggestions come from is another's business.

import { type EditorState, type Extension, StateEffect, StateField } from "@codemirror/state";
import { type Command, Decoration, type DecorationSet, EditorView, WidgetType } from "@codemirror/view";

/** `sure`: a larger model says so too. `seen`: what stood here before that model changed it, and until when it
 * counts: whoever presses Tab in the moment of the change takes what they were looking at. */
export interface Ghost { id: string; at: number; to: number; text: string; sure?: boolean; seen?: { text: string; to: number; at: number; until: number } }

const REACTION = 250; // ms in which nobody reads and presses a key

export const setGhost = StateEffect.define<Ghost | null>();

class GhostText extends WidgetType {
  constructor(private readonly text: string, private readonly block: boolean, private readonly shade: string) { super(); }
  eq(other: GhostText): boolean { return other.text === this.text && other.block === this.block && other.shade === this.shade; }
  toDOM(): HTMLElement {
    const element = document.createElement(this.block ? "div" : "span");
    element.className = `ghost${this.block ? " ghost-lines" : ""}${this.shade}`;
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
        return { ...ghost, at: head, to: head, text: ghost.text.slice(typed.length), seen: undefined };
    }
    return !transaction.docChanged && head === ghost.at && state.selection.main.empty ? ghost : null;
  },
  provide: (self) => EditorView.decorations.from(self, (ghost) => ghost ? drawn(ghost) : Decoration.none),
});

function drawn(ghost: Ghost): DecorationSet {
  const [first, ...rest] = ghost.text.split("\n");
  const shade = !ghost.sure ? "" : ghost.seen ? " ghost-sure ghost-changed" : " ghost-sure";
  const marks = [Decoration.widget({ widget: new GhostText(first, false, shade), side: 1 }).range(ghost.at)];
  if (rest.length)
    marks.push(Decoration.widget({ widget: new GhostText(rest.join("\n"), true, shade), side: 2, block: true }).range(ghost.at));
  return Decoration.set(marks, true);
}

export function ghostOf(state: EditorState): Ghost | null { return state.field(field, false) ?? null; }

/** The ghost text once a larger model has spoken of it; null where it has nothing to do with what stands there. */
export function revised(state: EditorState, said: Omit<Ghost, "sure" | "seen">, now: number): Ghost | null {
  const { head, empty } = state.selection.main, shown = ghostOf(state);
  if (!empty || head !== said.at || (shown && shown.id !== said.id)) return null;
  const seen = shown && shown.text !== said.text ? { text: shown.text, to: shown.to, at: shown.at, until: now + REACTION } : undefined;
  return { ...said, sure: true, seen };
}

export type Taken = (ghost: Ghost, outcome: "accepted" | "partial" | "dismissed", length: number) => void;

/** Whole, or its next word: what is typed next with one key. */
export function accept(taken: Taken, part: "all" | "word"): Command {
  return (view) => {
    const shown = ghostOf(view.state);
    if (!shown) return false;
    const ghost = shown.seen && performance.now() < shown.seen.until ? { ...shown, ...shown.seen } : shown;
    const piece = part === "all" ? ghost.text : /^\s*(?:\w+|[^\w\s]+)/.exec(ghost.text)?.[0] ?? ghost.text;
    const whole = piece.length === ghost.text.length;
    const rest = whole ? null : { id: ghost.id, at: ghost.at + piece.length, to: ghost.to + piece.length, text: ghost.text.slice(piece.length), sure: ghost.sure };
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
