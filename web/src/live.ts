// The editor's text on the live channel: opened whole, then only what changes; every key asks for ghost text.
// Knows versions, offsets and when a key was pressed; what is shown of an answer is its listeners' business.

import type { ChangeSet, Text } from "@codemirror/state";
import { Offsets, hasPairs, pairs } from "./offsets";
import type { Delta, Finding, Fix, LiveEvent, Receipt, Verdict } from "./protocol";
import { Socket, type State } from "./socket";

export interface Suggested { id: string; from: number; to: number; text: string; done: boolean }
export interface Stamp { key: number; sent: number; received: number; receipt: Receipt; reason: string }
export interface Revised { id: string; at: number; to: number; text: string; verdict: Verdict; model: string }
export interface Jump { id: string; title: string; from: number; to: number; text: string; others: number }
export interface Span extends Omit<Finding, "start" | "end" | "fixes" | "suggestions"> {
  from: number; to: number; fixes: { title: string; edits: Delta[]; sure: boolean }[];
}

export interface Watcher {
  state(state: State): void;
  ready(model: string, warm: boolean, note: string): void;
  suggested(what: Suggested, stamp: Stamp): void;
  silent(stamp: Stamp): void;
  revised(what: Revised): void;
  jump(what: Jump): void;
  noJump(id: string): void;
  findings(kind: "audit" | "problems", found: Span[]): void;
  failed(message: string): void;
}

interface Asked { version: number; key: number; sent: number }
interface Edits { resolve(edits: Delta[]): void; reject(error: Error): void; version: number }

let names = 0;
const PROBLEMS_PAUSE = 350; // ms without a key before problems are asked for

export class Live {
  readonly socket: Socket<LiveEvent>;
  private buffer = "";
  private path = "";
  private language = "";
  private version = 0;
  private plain = true;
  private open = false;
  private cursor = 0;
  private ids = 0;
  private problems = 0;
  private refused = -1; // the version at which a suggestion was dismissed, until another is asked for by hand
  private readonly asked = new Map<string, Asked>();
  private readonly edits = new Map<string, Edits>();

  constructor(private doc: Text, private readonly watcher: Watcher) {
    this.socket = new Socket<LiveEvent>("/v1/live", {
      opened: () => { this.reopen(); },
      event: (event, received) => { this.take(event, received); },
      changed: (state) => {
        if (state !== "open") this.drop();
        watcher.state(state);
      },
    });
  }

  /** Another file, or another text of this one. */
  show(path: string, language: string, doc: Text, cursor: number): void {
    if (this.open) this.socket.send({ type: "buffer.close", buffer: this.buffer });
    this.path = path;
    this.language = language;
    this.buffer = `play:${++names}`;
    this.refused = -1;
    this.doc = doc;
    this.plain = !hasPairs(doc);
    this.cursor = cursor;
    this.reopen();
  }

  changed(changes: ChangeSet, doc: Text, cursor: number, key: number): void {
    const old = new Offsets(this.doc, this.plain);
    const edits: Delta[] = [];
    let shift = 0;
    changes.iterChanges((from, to, _a, _b, inserted) => {
      const start = old.toWire(from), end = old.toWire(to), text = inserted.toString();
      edits.push({ start: start + shift, end: end + shift, text });
      const found = pairs(text);
      if (found) this.plain = false;
      shift += text.length - found - (end - start);
    });
    const base = this.version;
    this.doc = doc;
    this.cursor = cursor;
    this.version += 1;
    if (!this.open) return;
    const at = this.offsets.toWire(cursor);
    this.socket.send({ type: "buffer.change", buffer: this.buffer, base, version: this.version, edits, cursor: at });
    this.complete(key, false);
    clearTimeout(this.problems);
    this.problems = window.setTimeout(() => { this.askProblems(); }, PROBLEMS_PAUSE);
  }

  moved(cursor: number): void {
    this.cursor = cursor;
    if (!this.open) return;
    const at = this.offsets.toWire(cursor);
    this.socket.send({ type: "buffer.cursor", buffer: this.buffer, version: this.version, cursor: at });
  }

  complete(key: number, invoked: boolean): void {
    if (!this.open) return;
    const id = `c${++this.ids}`, sent = performance.now(), cursor = this.offsets.toWire(this.cursor);
    if (this.asked.size > 64) this.asked.clear();
    this.asked.set(id, { version: this.version, key, sent });
    if (invoked) this.refused = -1;
    this.socket.send({ type: "complete", id, buffer: this.buffer, version: this.version, cursor, invoked });
  }

  /** What is still on its way for this text is not wanted either. */
  refuse(): void {
    this.asked.clear();
    this.refused = this.version;
  }

  feedback(id: string, outcome: "shown" | "accepted" | "partial" | "dismissed", length = 0): void {
    if (this.open) this.socket.send({ type: "feedback", id, buffer: this.buffer, outcome, length });
  }

  /** The smallest edits for an instruction, in the editor's offsets; none at all if the text moved on. */
  instruct(instruction: string, from: number, to: number, signal: AbortSignal): Promise<Delta[]> {
    return new Promise((resolve, reject) => {
      const id = `e${++this.ids}`, at = this.offsets;
      const sent = this.open && this.socket.send({
        type: "edit.ask", id, buffer: this.buffer, version: this.version,
        start: at.toWire(from), end: at.toWire(to), instruction,
      });
      if (!sent) { reject(new Error("There is no connection; it is tried again by itself.")); return; }
      this.edits.set(id, { resolve, reject, version: this.version });
      signal.addEventListener("abort", () => { this.socket.send({ type: "cancel", id }); });
    });
  }

  private get offsets(): Offsets { return new Offsets(this.doc, this.plain); }

  private drop(): void {
    this.open = false;
    this.asked.clear();
    for (const waiting of this.edits.values()) waiting.reject(new Error("The connection was lost; ask again."));
    this.edits.clear();
  }

  private reopen(): void {
    if (!this.buffer || this.socket.state !== "open") return;
    this.asked.clear();
    this.open = this.socket.send({
      type: "buffer.open", buffer: this.buffer, text: this.doc.toString(), version: this.version,
      path: this.path || undefined, language: this.language || undefined,
      cursor: this.offsets.toWire(this.cursor),
    });
    this.askProblems();
  }

  private askProblems(): void {
    if (this.open) this.socket.send({ type: "problems.ask", id: `p${++this.ids}`, buffer: this.buffer, version: this.version });
  }

  private take(event: LiveEvent, received: number): void {
    if (event.type === "error") { this.failed(event); return; }
    if (event.buffer !== this.buffer) return;
    switch (event.type) {
      case "ready": this.watcher.ready(event.model, event.warm, event.note); return;
      case "resync": this.reopen(); return;
      case "suggestion":
      case "not_shown": this.answered(event, received); return;
      case "suggestion.revised": {
        if (event.version !== this.version || event.version === this.refused) return;
        const at = this.offsets, { id, text, verdict, receipt } = event;
        this.watcher.revised({ id, text, verdict, at: at.fromWire(event.start), to: at.fromWire(event.end), model: receipt.model });
        return;
      }
      case "next_edit": {
        if (event.version !== this.version || event.change.buffer !== this.buffer) return;
        const at = this.offsets, { start, end, text } = event.change;
        this.watcher.jump({
          id: event.id, title: event.title, from: at.fromWire(start), to: at.fromWire(end), text,
          others: event.others.length,
        });
        return;
      }
      case "next_edit.dropped": this.watcher.noJump(event.id); return;
      case "diagnostics": if (event.version === this.version) this.watcher.findings("audit", event.findings.map((f) => this.span(f))); return;
      case "problems": if (event.version === this.version) this.watcher.findings("problems", event.problems.map((f) => this.span(f))); return;
      case "changes": {
        const waiting = this.edits.get(event.id);
        this.edits.delete(event.id);
        if (event.version !== this.version) { waiting?.reject(new Error("The file was changed meanwhile; ask again.")); return; }
        waiting?.resolve(event.files.filter((f) => f.buffer === this.buffer).flatMap((f) => f.edits.map((e) => this.local(e))));
      }
    }
  }

  private answered(event: LiveEvent & { type: "suggestion" | "not_shown" }, received: number): void {
    const edit = this.edits.get(event.id);
    if (edit) { this.edits.delete(event.id); edit.reject(new Error("stopped")); return; }
    const asked = this.asked.get(event.id);
    if (!asked) return;
    const reason = event.type === "suggestion" ? "" : event.reason;
    const stamp = { key: asked.key, sent: asked.sent, received, receipt: event.receipt, reason };
    if (event.type === "not_shown" || event.done) this.asked.delete(event.id);
    if (event.type === "not_shown") { this.watcher.silent(stamp); return; }
    if (event.version !== this.version) { this.watcher.silent({ ...stamp, reason: "stale_version" }); return; }
    const at = this.offsets;
    this.watcher.suggested(
      { id: event.id, from: at.fromWire(event.start), to: at.fromWire(event.end), text: event.text, done: event.done }, stamp,
    );
  }

  private failed(event: LiveEvent & { type: "error" }): void {
    const waiting = event.id ? this.edits.get(event.id) : undefined;
    if (event.id) { this.edits.delete(event.id); this.asked.delete(event.id); }
    if (waiting) waiting.reject(new Error(event.error.message));
    else if (!event.id?.startsWith("p")) this.watcher.failed(event.error.message);
  }

  private local(edit: Delta): Delta {
    const at = this.offsets;
    return { start: at.fromWire(edit.start), end: at.fromWire(edit.end), text: edit.text };
  }

  private span(found: Finding): Span {
    const at = this.offsets, { start, end, fixes, suggestions, ...rest } = found;
    const made = (fix: Fix, sure: boolean) => ({ title: fix.title, edits: fix.edits.map((e) => this.local(e)), sure });
    return {
      ...rest, from: at.fromWire(start), to: at.fromWire(end),
      fixes: [...fixes.map((f) => made(f, true)), ...(suggestions ?? []).map((f) => made(f, false))],
    };
  }
}
