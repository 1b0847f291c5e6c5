// The latency strip: every key's receipt as a bar, and where its time went. Milliseconds from the key to the
// frame that shows its answer: queue, prefill, decode on the server; network between; render here.

import type { Stamp } from "./live";
import { h, need, set } from "./dom";
import type { Receipt } from "./protocol";

const PARTS = ["queue", "prefill", "decode", "network", "render"] as const;
const KEPT = 160;
const FULL = 60; // ms of a bar's full height

interface Row { parts: Record<(typeof PARTS)[number], number>; total: number; receipt: Receipt; reason: string }

export class Receipts {
  private readonly rows: Row[] = []; // not drawn yet
  private readonly strip = need<HTMLOListElement>("strip");
  private readonly detail = need("receipt");
  private readonly meter = need("speed");

  constructor() {
    this.strip.addEventListener("click", (event) => { this.pick(event.target as HTMLElement); });
    this.strip.addEventListener("focusin", (event) => { this.pick(event.target as HTMLElement); });
    this.strip.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1, Home: -KEPT, End: KEPT }[event.key];
      if (!step) return;
      event.preventDefault();
      const bars = [...this.strip.querySelectorAll("button")];
      const at = bars.indexOf(document.activeElement as HTMLButtonElement);
      bars[Math.max(0, Math.min(bars.length - 1, at + step))]?.focus();
    });
  }

  /** `now`: when the frame was out that shows the answer; before it came, where the key agreed with what stood
   * there: then nothing but drawing lay between the key and the frame. `drawn`: when the editor had it. */
  add(stamp: Stamp, now: number, drawn = now): void {
    const { receipt } = stamp;
    const away = Math.max(0, stamp.received - stamp.sent), early = now < stamp.received;
    const network = away - Math.min(receipt.total_ms, away);
    const render = now - stamp.received + Math.max(0, stamp.sent - stamp.key);
    const parts = early
      ? { queue: 0, prefill: 0, decode: 0, network: 0, render: now - stamp.key }
      : { queue: receipt.queue_ms, prefill: receipt.prefill_ms, decode: receipt.decode_ms, network, render };
    const spent = { input_ms: stamp.sent - stamp.key, script_ms: drawn - stamp.received, frame_ms: now - drawn }; // of render
    const row: Row = { parts, total: now - stamp.key, receipt, reason: stamp.reason };
    performance.measure(stamp.reason ? "key-to-silence" : "key-to-paint", {
      start: stamp.key, end: now, detail: { ...parts, source: early ? "kept" : receipt.source, server_ms: receipt.total_ms, ...spent },
    });
    this.rows.push(row);
    if (this.rows.length === 1) idle(() => { this.draw(); });
  }

  /** Bars for all keys since the last time: when the browser has nothing better to do. */
  private draw(): void {
    const rows = this.rows.splice(0).slice(-KEPT), last = rows.at(-1);
    if (!last) return;
    this.speed(last.receipt.output_tokens, last.receipt.decode_ms);
    for (const old of this.strip.querySelectorAll("[tabindex='0']")) old.setAttribute("tabindex", "-1");
    this.strip.append(...rows.map((row) => h("li", {}, bar(row))));
    (this.strip.lastElementChild?.firstElementChild as HTMLElement).tabIndex = 0;
    while (this.strip.children.length > KEPT) this.strip.firstElementChild?.remove();
    this.strip.scrollLeft = this.strip.scrollWidth;
    if (!this.strip.contains(document.activeElement)) this.detail.textContent = sentence(last);
  }

  /** Tokens a second of the answer that came last. */
  speed(tokens: number, ms: number): void {
    if (tokens > 1 && ms > 0) set(this.meter, `${Math.round(tokens / ms * 1000).toLocaleString("en")} tok/s`);
  }

  private pick(target: HTMLElement): void {
    const label = target.closest("button")?.getAttribute("aria-label");
    if (label) this.detail.textContent = label;
  }
}

function bar(row: Row): HTMLElement {
  const made = h("button", { type: "button", tabindex: -1, class: row.reason ? "bar silent" : "bar", "aria-label": sentence(row) });
  for (const part of PARTS) {
    const piece = h("span", { class: `part ${part}` });
    piece.style.height = `${Math.min(100, row.parts[part] / FULL * 100)}%`;
    made.append(piece);
  }
  return made;
}

function idle(then: () => void): void {
  if ("requestIdleCallback" in window) requestIdleCallback(then, { timeout: 500 });
  else setTimeout(then, 50);
}

function sentence(row: Row): string {
  const { receipt, parts } = row, ms = (value: number) => value < 10 ? value.toFixed(1) : value.toFixed(0);
  const spent = PARTS.map((part) => `${part} ${ms(parts[part])}`).join(" · ");
  const tokens = `${receipt.reused_tokens.toLocaleString("en")} tokens reused, ${receipt.computed_tokens} computed, ${receipt.output_tokens} written`;
  const what = row.reason ? `nothing shown (${row.reason.replaceAll("_", " ")})` : (receipt.source ?? "computed").replaceAll("_", " ");
  return `${ms(row.total)} ms: ${spent} · ${tokens} · ${what}`;
}
