// The conversation beside the file: ask, stop with Escape, redirect with another line while the answer comes.

import { announce, following, h, need, prose } from "./dom";
import type { Receipts } from "./receipts";
import type { Message, TurnEnd, Turns } from "./turns";

export interface Around {
  model(): string;
  file(): { name: string; text: string };
  insert(code: string): void;
}

/** What an empty conversation offers; each is sent with the file. */
const IDEAS = ["Explain what this file does.", "Find a bug in this file.", "Write a test for this file."];

export class Chat {
  private readonly log = need("chat-log");
  private readonly form = need<HTMLFormElement>("chat-form");
  private readonly line = need<HTMLTextAreaElement>("chat-line");
  private readonly stop = need<HTMLButtonElement>("chat-stop");
  private readonly send = need<HTMLButtonElement>("chat-send");
  private readonly withFile = need<HTMLInputElement>("chat-file");
  private history: Message[] = [];
  private previous: string | undefined;
  private stream = "";
  private said = "";
  private answer: HTMLElement | null = null;
  private follows = true;

  constructor(private readonly turns: Turns, private readonly around: Around, private readonly receipts: Receipts) {
    this.form.addEventListener("submit", (event) => { event.preventDefault(); this.submit(); });
    this.line.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); this.submit(); }
    });
    this.stop.addEventListener("click", () => { this.turns.stop(this.stream); });
    need("chat-reset").addEventListener("click", () => { this.reset(); });
    need("chat").addEventListener("keydown", (event) => { if (event.key === "Escape") this.turns.stop(this.stream); });
    this.welcome();
  }

  /** Whether a model of this server follows instructions. */
  instructing(found: boolean): void {
    if (found === this.follows) return;
    this.follows = found;
    if (!this.history.length) this.welcome();
  }

  private welcome(): void {
    const ideas = IDEAS.map((idea) => h("li", {}, h("button", { type: "button", class: "small", click: () => { this.try(idea); } }, idea)));
    this.log.replaceChildren(h("div", { class: "welcome" }, ...(this.follows
      ? [h("p", {}, "Ask about the file. Three things to try:"), h("ul", {}, ...ideas)]
      : [h("p", {}, "No model here follows instructions yet. In a terminal, run ", h("code", {}, "keystroke setup"), ": it chooses one for this machine, installs it, and chat, edits and tasks work.")])));
  }

  private try(idea: string): void {
    this.line.value = idea;
    this.withFile.checked = true;
    this.submit();
  }

  private reset(): void {
    this.turns.stop(this.stream);
    this.history = [];
    this.previous = undefined;
    this.welcome();
    this.line.focus();
  }

  private submit(): void {
    const text = this.line.value.trim();
    if (!text) return;
    this.line.value = "";
    if (this.stream) {
      if (!this.turns.steer(this.stream, text)) { this.line.value = text; return; }
      this.show("user", "You, redirecting", text);
      this.history.push({ role: "assistant", content: this.said }, { role: "user", content: text });
      this.begin();
      return;
    }
    const { name, text: file } = this.around.file();
    const content = this.withFile.checked ? `File ${name}:\n\n${file}\n\n${text}` : text;
    this.withFile.checked = false;
    if (!this.history.length) this.log.replaceChildren();
    this.history.push({ role: "user", content });
    this.show("user", "You", text);
    this.begin();
    const body = { model: this.around.model(), previous_response_id: this.previous };
    this.busy(true);
    const started = this.turns.begin(body, this.history, {
      waiting: (position) => { this.answer?.setAttribute("data-note", `waiting, place ${position}`); },
      text: (delta) => { this.said += delta; this.draw(); },
      steered: () => { /* the line that steered it already stands there */ },
      ended: (end) => { this.ended(end); },
    });
    if (this.answer) this.stream = started;
  }

  private begin(): void {
    this.said = "";
    this.answer = this.show("assistant", "Keystroke", "");
  }

  private show(role: string, name: string, text: string): HTMLElement {
    const body = h("div", { class: "said" }, text);
    following(this.log, () => { this.log.append(h("article", { class: role }, h("h3", {}, name), body)); });
    return body;
  }

  private draw(): void {
    following(this.log, () => { this.answer?.replaceChildren(...prose(this.said)); });
  }

  private ended(end: TurnEnd): void {
    const body = this.answer;
    this.answer = null;
    this.stream = "";
    this.busy(false);
    if (!body) return;
    following(this.log, () => {
      body.replaceChildren(...prose(this.said, (code) => { this.around.insert(code); }));
      if (end.message) body.append(h("p", { class: "problem", role: "alert" }, end.message));
      if (end.status === "cancelled") body.append(h("p", { class: "note" }, "stopped"));
      const receipt = end.receipt;
      if (receipt) body.append(h("p", { class: "note" }, summary(end.model, receipt)));
    });
    if (this.said) this.history.push({ role: "assistant", content: this.said });
    this.previous = end.status === "failed" ? undefined : end.id;
    if (end.receipt) this.receipts.speed(end.receipt.output_tokens, end.receipt.decode_ms);
    announce(end.message ?? (end.status === "cancelled" ? "Stopped." : `Answer: ${this.said.slice(0, 400)}`));
  }

  private busy(now: boolean): void {
    this.stop.hidden = !now;
    this.send.textContent = now ? "Redirect" : "Send";
  }
}

export function summary(model: string, r: { output_tokens: number; decode_ms: number; first_token_ms?: number; reused_tokens: number }): string {
  const speed = r.decode_ms > 0 ? `${Math.round(r.output_tokens / r.decode_ms * 1000)} tok/s` : "";
  return [model, `${r.output_tokens} tokens`, speed, `first after ${Math.round(r.first_token_ms ?? 0)} ms`, `${r.reused_tokens} reused`]
    .filter(Boolean).join(" · ");
}
