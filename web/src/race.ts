// Two models on the same prompt, side by side: who speaks first, who is done first, how many tokens a second.
// One model against itself (with drafts, without) takes turns: each has the engine alone.
// A model that converses gets a turn; one that only completes gets the prompt as the beginning of a file.

import { ask, streamed } from "./access";
import { announce, following, h, need } from "./dom";
import type { ModelStatus } from "./protocol";
import type { Receipts } from "./receipts";
import type { TurnEnd, Turns } from "./turns";

const LONGEST = 160; // tokens: long enough to see who is ahead

class Pane {
  readonly model: HTMLSelectElement;
  readonly drafts: HTMLInputElement;
  private readonly out: HTMLElement;
  private readonly note: HTMLElement;
  private stream = "";
  private aborter: AbortController | null = null;
  private began = 0;
  private first = 0;
  private over: (() => void) | null = null;
  tokens = 0;
  seconds = 0;
  failed = false;

  constructor(side: string, private readonly turns: Turns, private readonly receipts: Receipts) {
    this.model = need(`race-model-${side}`);
    this.drafts = need(`race-drafts-${side}`);
    this.out = need(`race-out-${side}`);
    this.note = need(`race-note-${side}`);
  }

  run(prompt: string, chats: boolean, tokens: number): Promise<void> {
    this.out.textContent = "";
    this.note.textContent = "…";
    this.began = performance.now();
    this.first = this.tokens = this.seconds = 0;
    this.failed = false;
    return new Promise((resolve) => {
      this.over = resolve;
      if (chats) {
        const body = { model: this.model.value, store: false, temperature: 0, drafts: this.drafts.checked, max_output_tokens: tokens };
        this.stream = this.turns.begin(body, [{ role: "user", content: prompt }], {
          waiting: (position) => { this.note.textContent = `waiting, place ${position}`; },
          text: (delta) => { this.text(delta); },
          ended: (end) => { this.ended(end); },
        });
      } else void this.complete(prompt, tokens);
    });
  }

  stop(): void { this.turns.stop(this.stream); this.aborter?.abort(); }

  mark(text: string): void { this.note.textContent = `${text} · ${this.note.textContent}`; }

  private async complete(prompt: string, tokens: number): Promise<void> {
    this.aborter = new AbortController();
    try {
      const answer = await ask("/v1/completions", {
        model: this.model.value, prompt, stream: true, temperature: 0, max_tokens: tokens, drafts: this.drafts.checked, stream_options: { include_usage: true },
      }, this.aborter.signal);
      type Chunk = { choices?: { text: string }[]; usage?: { completion_tokens: number }; error?: { message: string } };
      for await (const chunk of streamed<Chunk>(answer)) {
        if (chunk.error) throw new Error(chunk.error.message);
        if (chunk.usage) this.tokens = chunk.usage.completion_tokens;
        if (chunk.choices?.[0]?.text) this.text(chunk.choices[0].text);
      }
      this.finish("");
    } catch (error) {
      this.finish((error as Error).name === "AbortError" ? "stopped" : (error as Error).message);
    }
  }

  private text(delta: string): void {
    this.first ||= performance.now();
    following(this.out, () => { this.out.append(delta); });
    const seconds = (performance.now() - this.began) / 1000;
    this.note.textContent = `${seconds.toFixed(1)} s`;
  }

  private ended(end: TurnEnd): void {
    this.stream = "";
    this.tokens = end.receipt?.output_tokens ?? 0;
    this.finish(end.message ?? (end.status === "cancelled" ? "stopped" : ""));
  }

  private finish(problem: string): void {
    const now = performance.now();
    this.seconds = (now - this.began) / 1000;
    this.failed = Boolean(problem);
    const writing = now - (this.first || now);
    const speed = this.tokens > 1 && writing > 0 ? `${Math.round((this.tokens - 1) / writing * 1000)} tok/s` : "";
    if (this.tokens > 1) this.receipts.speed(this.tokens - 1, writing);
    const first = this.first ? `first after ${Math.round(this.first - this.began)} ms` : "";
    this.note.textContent = [problem, `${this.seconds.toFixed(2)} s`, `${this.tokens} tokens`, speed, first].filter(Boolean).join(" · ");
    this.over?.();
    this.over = null;
  }
}

export class Race {
  private readonly left: Pane;
  private readonly right: Pane;
  private models: ModelStatus[] = [];
  private running = false;

  constructor(turns: Turns, receipts: Receipts) {
    this.left = new Pane("a", turns, receipts);
    this.right = new Pane("b", turns, receipts);
    const form = need<HTMLFormElement>("race-form"), line = need<HTMLTextAreaElement>("race-line");
    form.addEventListener("submit", (event) => { event.preventDefault(); void this.go(line.value); });
    line.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); void this.go(line.value); }
    });
    need("race").addEventListener("keydown", (event) => { if (event.key === "Escape") this.stop(); });
    need("race-stop").addEventListener("click", () => { this.stop(); });
  }

  offer(models: ModelStatus[]): void {
    const known = this.models.map((m) => m.name).join();
    this.models = models;
    if (models.map((m) => m.name).join() === known) return;
    for (const [place, pane] of [this.left, this.right].entries()) {
      pane.model.replaceChildren(...models.map((m) => h("option", { value: m.name }, `${m.name} (${m.role})`)));
      pane.model.selectedIndex = Math.min(place, models.length - 1);
    }
    if (models.length === 1) this.right.drafts.checked = false; // one model: with drafts against without
  }

  private stop(): void { this.left.stop(); this.right.stop(); }

  private async go(prompt: string): Promise<void> {
    if (this.running || !prompt.trim()) return;
    this.running = true;
    need("race-stop").hidden = false;
    const converses = (pane: Pane) => this.models.find((m) => m.name === pane.model.value)?.chat ?? true;
    const both = converses(this.left) && converses(this.right);
    const panes = [this.left, this.right];
    if (this.left.model.value === this.right.model.value) // one engine: side by side they would wait for each other
      for (const pane of panes) await pane.run(prompt, both, LONGEST);
    else await Promise.all(panes.map((pane) => pane.run(prompt, both, LONGEST)));
    this.running = false;
    need("race-stop").hidden = true;
    const first = panes.filter((pane) => !pane.failed).sort((a, b) => a.seconds - b.seconds).at(0);
    first?.mark("first");
    announce(first ? `${first.model.value} was first: ${first.seconds.toFixed(1)} seconds, ${first.tokens} tokens.` : "Nobody finished.");
  }
}
