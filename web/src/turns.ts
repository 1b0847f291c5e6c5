// Turns over the Responses socket: one stream of text each, to be stopped or steered while it comes.
// Keeps the words of each conversation, so that a turn can begin anew where the server no longer knows it.

import type { Receipt, Response, ResponseEvent } from "./protocol";
import { Socket } from "./socket";

export interface TurnEnd { status: string; model: string; receipt?: Receipt; message?: string; id?: string }

export interface TurnListener {
  waiting?(position: number): void;
  text(delta: string): void;
  steered?(): void;
  ended(end: TurnEnd): void;
}

export interface Message { role: "user" | "assistant"; content: string }

interface Running { listener: TurnListener; response: string; body: Record<string, unknown>; history: Message[]; retried: boolean; steering: boolean }

const LOST = "The connection was lost; what was said stays, ask again.";
const PATIENCE = 5000; // ms that a turn waits for a connection that is coming back

export class Turns {
  private readonly running = new Map<string, Running>();
  private readonly unsent = new Set<string>(); // turns that wait for a connection
  private streams = 0;
  private readonly socket: Socket<ResponseEvent>;

  constructor() {
    this.socket = new Socket<ResponseEvent>("/v1/responses", {
      opened: () => { for (const stream of [...this.unsent]) this.ask(stream); },
      event: (event) => { this.take(event); },
      changed: (state) => { if (state !== "open") this.lost(); },
    });
  }

  reconnect(): void { this.socket.connect(); }

  /** Begin a turn; what comes back names its stream. `history` is all that was said, the question last. */
  begin(body: Record<string, unknown>, history: Message[], listener: TurnListener): string {
    const stream = `page${++this.streams}`;
    const run: Running = { listener, response: "", body, history, retried: false, steering: false };
    this.running.set(stream, run);
    this.ask(stream);
    return stream;
  }

  /** Sends a turn, now or as soon as there is a connection: the editor's own may be back before this one. */
  private ask(stream: string): void {
    const run = this.running.get(stream);
    if (!run) return;
    const known = Boolean(run.body.previous_response_id);
    if (this.create(stream, run, known ? run.history.slice(-1) : run.history)) { this.unsent.delete(stream); return; }
    if (this.unsent.has(stream)) return;
    this.unsent.add(stream);
    window.setTimeout(() => { if (this.unsent.has(stream)) this.end(stream, { status: "failed", model: "", message: LOST }); }, PATIENCE);
    this.socket.connect();
  }

  stop(stream: string): void {
    const run = this.running.get(stream);
    if (run?.response) this.socket.send({ type: "response.cancel", response_id: run.response });
  }

  steer(stream: string, input: string): boolean {
    const run = this.running.get(stream);
    if (!run?.response) return false;
    run.steering = this.socket.send({ type: "response.steer", previous_response_id: run.response, input });
    return run.steering;
  }

  private create(stream: string, run: Running, input: Message[]): boolean {
    return this.socket.send({ type: "response.create", ...run.body, stream_id: stream, input: input.map((m) => ({ type: "message", ...m })) });
  }

  private take(event: ResponseEvent): void {
    const stream = event.stream_id ?? "", run = this.running.get(stream);
    if (!run) return;
    if (event.type === "response.output_text.delta") { run.listener.text((event as { delta: string }).delta); return; }
    if (event.type === "error") { this.refused(stream, run, event as unknown as { error: { code: string; message: string } }); return; }
    const response = "response" in event ? event.response : undefined;
    if (event.type === "response.steer.failed") { run.steering = false; return; }
    if (!response) return;
    if (event.type === "response.created") run.response = response.id;
    else if (event.type === "response.queued") run.listener.waiting?.(response.queue_position ?? 0);
    else if (/^response\.(completed|incomplete|failed|cancelled)$/.test(event.type)) this.finished(stream, run, response);
  }

  private finished(stream: string, run: Running, response: Response): void {
    if (response.incomplete_details?.reason === "steered" || (run.steering && response.status === "completed")) {
      run.steering = false; // its successor goes on under the same stream
      run.listener.steered?.();
      return;
    }
    this.end(stream, {
      status: response.status, model: response.model, receipt: response.receipt, message: response.error?.message, id: response.id,
    });
  }

  private refused(stream: string, run: Running, event: { error: { code: string; message: string } }): void {
    if (event.error.code === "previous_response_not_found" && !run.retried) {
      run.retried = true;
      delete run.body.previous_response_id;
      if (this.create(stream, run, run.history)) return;
    }
    this.end(stream, { status: "failed", model: "", message: event.error.message });
  }

  private lost(): void {
    for (const stream of [...this.running.keys()].filter((stream) => !this.unsent.has(stream))) this.end(stream, { status: "failed", model: "", message: LOST });
  }

  private end(stream: string, end: TurnEnd): void {
    const run = this.running.get(stream);
    this.running.delete(stream);
    this.unsent.delete(stream);
    run?.listener.ended(end);
  }
}
