// The list below the file: every finding with its fixes, and the keys that go through them. A fix is applied
// as one undoable change; a suggestion says that it is one.

import type { ChangeSet } from "@codemirror/state";
import type { Command, EditorView } from "@codemirror/view";
import { announce, h, need } from "./dom";
import type { Span } from "./live";
import { findings as field, setFindings } from "./marks";

export class Findings {
  private readonly list = need("findings");
  private readonly count = need("findings-count");
  private readonly known: Record<"audit" | "problems", Span[]> = { audit: [], problems: [] };
  private rows: Span[] = []; // what the list shows, in its order
  private drawn = ""; // and how: an answer that changes nothing to see touches nothing
  private spoken = "";
  private fresh = true; // nothing was typed since the findings came
  private wanted = -1; // where a fix was asked for while they were being looked for anew
  private clicked: [message: string, place: number] | null = null; // the same, in the list
  view!: EditorView;

  set(kind: "audit" | "problems", found: Span[]): void {
    this.known[kind] = found;
    const all = this.all();
    if (!same(all, this.view.state.field(field))) this.view.dispatch({ effects: setFindings.of(all) });
    this.draw(all);
    const told = all.map((f) => f.message).join(" ");
    if (told && told !== this.spoken) announce(`${all.length} finding${all.length > 1 ? "s" : ""}: ${all[0].message}`, 800);
    this.spoken = told;
    this.fresh = true;
    const asked = this.wanted;
    if (kind === "audit") this.wanted = -1;
    if (asked >= 0 && asked === this.view.state.selection.main.head) this.fix(this.view);
    const row = this.clicked ? this.rows.findIndex((f) => f.message === this.clicked?.[0] && f.fixes.length > 0) : -1;
    if (this.clicked && row >= 0) this.apply(row, this.clicked[1]);
  }

  private draw(all: Span[]): void {
    const doc = this.view.state.doc, line = (f: Span) => doc.lineAt(Math.min(f.from, doc.length)).number;
    this.rows = all.slice(0, 100);
    const seen = JSON.stringify(this.rows.map((f) => [f.severity, line(f), f.message, f.fixes.map((x) => x.title)]));
    if (seen === this.drawn) return;
    this.drawn = seen;
    this.count.textContent = all.length ? String(all.length) : "none";
    this.list.replaceChildren(...this.rows.map((f, row) => this.row(f, row, line(f))));
  }

  /** Keys fell: places move along; fixes are for the text they were made for, so they wait for the next answer. */
  follow(changes: ChangeSet): void {
    this.fresh = false;
    this.wanted = -1;
    this.clicked = null;
    for (const kind of ["audit", "problems"] as const)
      this.known[kind] = this.known[kind].map((f) => ({ ...f, from: changes.mapPos(f.from, 1), to: changes.mapPos(f.to, -1), fixes: [] }));
    this.rows = this.rows.map((f) => ({ ...f, from: changes.mapPos(f.from, 1), to: changes.mapPos(f.to, -1), fixes: [] }));
  }

  readonly next: Command = (view) => {
    const all = this.all(), at = view.state.selection.main.from;
    const found = all.find((f) => f.from > at) ?? all[0];
    if (found) this.go(found);
    return Boolean(found);
  };

  readonly fix: Command = (view) => {
    const at = view.state.selection.main.head, line = view.state.doc.lineAt(at);
    const here = this.all().filter((f) => f.from <= line.to && f.to >= line.from);
    const ready = here.filter((f) => f.fixes.length);
    const found = ready.find((f) => f.from <= at && at <= f.to) ?? ready[0];
    this.wanted = !found && here.length > 0 && !this.fresh ? at : -1;
    if (found) this.make(found, 0);
    return here.length > 0;
  };

  private all(): Span[] {
    return [...this.known.problems, ...this.known.audit].sort((a, b) => a.from - b.from);
  }

  private row(found: Span, row: number, line: number): HTMLElement {
    return h("li", { class: `severity-${found.severity}` },
      h("button", { type: "button", class: "place", click: () => { this.go(this.rows[row]); } }, `line ${line}`),
      h("span", { class: "what" }, `${found.message} `, h("span", { class: "note" }, found.cwe ? `CWE-${found.cwe}` : found.code ?? "")),
      ...found.fixes.map((fix, place) => h("button", { type: "button", class: "fix small", click: () => { this.apply(row, place); } },
        fix.sure ? `Fix: ${fix.title}` : `Suggestion: ${fix.title}`)));
  }

  private go(found: Span): void {
    this.view.dispatch({ selection: { anchor: found.from }, scrollIntoView: true });
    this.view.focus();
    announce(found.message);
  }

  /** A fix of the list; if keys fell since it was made, the next answer brings it for the text of now. */
  private apply(row: number, place: number): void {
    const found = this.rows[row];
    if (!found.fixes.length && !this.fresh) { this.clicked = [found.message, place]; return; }
    this.make(found, place);
  }

  private make(found: Span, place: number): void {
    const fix = found.fixes[place];
    this.clicked = null;
    if (!fix) return;
    this.view.dispatch({
      changes: fix.edits.map((e) => ({ from: e.start, to: e.end, insert: e.text })), userEvent: "input.fix", scrollIntoView: true,
    });
    this.view.focus();
    announce(`Fixed: ${fix.title}`);
  }
}

/** Whether the same places are underlined. */
function same(a: readonly Span[], b: readonly Span[]): boolean {
  return a.length === b.length && a.every((f, i) => f.from === b[i].from && f.to === b[i].to && f.severity === b[i].severity);
}
