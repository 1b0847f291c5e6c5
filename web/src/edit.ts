// Edits by instruction: a diff of the smallest hunks, each taken or left by one key. Hunks move with the text,
// so the file may be typed in while they are looked at.

import type { ChangeSet, Text } from "@codemirror/state";
import type { EditorView } from "@codemirror/view";
import { announce, h, need } from "./dom";
import type { Live } from "./live";

interface Hunk { from: number; to: number; text: string; element: HTMLElement }

export class Instructed {
  private readonly form = need<HTMLFormElement>("edit-form");
  private readonly line = need<HTMLTextAreaElement>("edit-line");
  private readonly stop = need<HTMLButtonElement>("edit-stop");
  private readonly list = need("hunks");
  private readonly note = need("edit-note");
  private hunks: Hunk[] = [];
  private running: AbortController | null = null;

  constructor(private readonly view: EditorView, private readonly live: Live) {
    this.form.addEventListener("submit", (event) => { event.preventDefault(); void this.ask(); });
    this.line.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); void this.ask(); }
    });
    this.stop.addEventListener("click", () => { this.running?.abort(); });
    need("edit").addEventListener("keydown", (event) => { if (event.key === "Escape") this.running?.abort(); });
    need("take-all").addEventListener("click", () => { for (const hunk of [...this.hunks].reverse()) this.take(hunk); });
    need("leave-all").addEventListener("click", () => { for (const hunk of [...this.hunks]) this.leave(hunk); });
    this.list.addEventListener("keydown", (event) => { this.key(event); });
  }

  /** Ask for an edit of what is selected, or of the whole file. */
  focus(): void { this.line.focus(); this.line.select(); }

  /** The text changed under the hunks. */
  follow(changes: ChangeSet): void {
    for (const hunk of this.hunks) {
      hunk.from = changes.mapPos(hunk.from, 1);
      hunk.to = Math.max(hunk.from, changes.mapPos(hunk.to, -1));
    }
  }

  private async ask(): Promise<void> {
    const instruction = this.line.value.trim();
    if (!instruction || this.running) return;
    this.clear();
    this.note.textContent = "asking …";
    this.stop.hidden = false;
    const { from, to } = this.view.state.selection.main;
    this.running = new AbortController();
    try {
      const began = performance.now();
      const edits = await this.live.instruct(instruction, from, to, this.running.signal);
      const doc = this.view.state.doc;
      this.hunks = edits.map((e) => this.drawn(doc, e.start, e.end, e.text));
      const s = ((performance.now() - began) / 1000).toFixed(1);
      this.say(edits.length ? `${edits.length} hunk${edits.length > 1 ? "s" : ""} in ${s} s` : "Nothing to change.");
      this.list.querySelector<HTMLElement>("[tabindex]")?.focus();
    } catch (error) {
      this.say((error as Error).message);
    } finally {
      this.running = null;
      this.stop.hidden = true;
      this.update();
    }
  }

  private say(text: string): void { this.note.textContent = text; announce(text); }

  private drawn(doc: Text, from: number, to: number, text: string): Hunk {
    const first = doc.lineAt(from), last = doc.lineAt(to);
    const after = doc.sliceString(first.from, from) + text + doc.sliceString(to, last.to);
    const before = doc.sliceString(first.from, last.to);
    const hunk: Hunk = { from, to, text, element: h("li", { tabindex: 0, class: "hunk", "aria-label": `Hunk at line ${first.number}` }) };
    hunk.element.append(
      h("div", { class: "place" }, `line ${first.number}`),
      h("pre", {}, ...rows(before, "-"), ...rows(after, "+")),
      h("div", { class: "row" },
        h("button", { type: "button", class: "small", click: () => { this.take(hunk); } }, "Take (a)"),
        h("button", { type: "button", class: "small", click: () => { this.leave(hunk); } }, "Leave (r)")),
    );
    this.list.append(hunk.element);
    return hunk;
  }

  private key(event: KeyboardEvent): void {
    const element = (event.target as HTMLElement).closest<HTMLElement>(".hunk");
    const hunk = this.hunks.find((known) => known.element === element);
    if (!hunk || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "a") this.take(hunk);
    else if (event.key === "r") this.leave(hunk);
    else if (event.key === "ArrowDown") (hunk.element.nextElementSibling as HTMLElement | null)?.focus();
    else if (event.key === "ArrowUp") (hunk.element.previousElementSibling as HTMLElement | null)?.focus();
    else return;
    event.preventDefault();
  }

  private take(hunk: Hunk): void {
    this.remove(hunk);
    this.view.dispatch({ changes: { from: hunk.from, to: hunk.to, insert: hunk.text }, userEvent: "input.edit" });
    announce("Taken.");
  }

  private leave(hunk: Hunk): void { this.remove(hunk); announce("Left."); }

  private remove(hunk: Hunk): void {
    const next = (hunk.element.nextElementSibling ?? hunk.element.previousElementSibling) as HTMLElement | null;
    const inside = hunk.element.contains(document.activeElement);
    this.hunks = this.hunks.filter((known) => known !== hunk);
    hunk.element.remove();
    if (inside) { if (next) next.focus(); else this.view.focus(); }
    this.update();
  }

  private clear(): void { this.hunks = []; this.list.replaceChildren(); this.update(); }

  private update(): void { need("hunk-bar").hidden = !this.hunks.length; }
}

export function rows(text: string, sign: string): HTMLElement[] {
  return text.split("\n").map((line) => h("span", { class: sign === "+" ? "added" : "removed" }, `${sign} ${line}\n`));
}
