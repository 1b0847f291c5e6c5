// Tasks beside the file: what one does as it does it, its change hunk by hunk, approved, steered, stopped, undone.
// A task lives on the server: a page that comes back asks for the events after the last one it saw.

import { ask, sentence, streamed } from "./access";
import { announce, following, h, need } from "./dom";
import { rows } from "./edit";

interface Hunk { number: number; path: string; first: number; before: string; after: string }
interface Question { id: string; kind: "command" | "change"; text: string; command: string; hunks: Hunk[] }
interface Task {
  id: string; status: string; workspace: string; instruction: string; model: string; line: string; diff: string; entry: string;
  question: Question | null; receipts: { model: string; tokens: number; seconds: number }[]; sequence_number: number;
}
interface Event {
  type: string; sequence_number: number; task?: Task; line?: string; delta?: string; failed?: boolean; position?: number;
  question?: Question; approved?: boolean; diff?: string;
}

const RUNNING = new Set(["queued", "working", "asking"]);
const PAUSE = 800; // ms before a lost stream is asked for again

export class Tasks {
  private readonly folder = need<HTMLInputElement>("task-folder");
  private readonly line = need<HTMLTextAreaElement>("task-line");
  private readonly log = need("task-log");
  private readonly hunks = need("task-hunks");
  private readonly list = need<HTMLSelectElement>("task-list");
  private task: Task | null = null;
  private question: Question | null = null;
  private following: AbortController | null = null;
  private writing: HTMLElement | null = null;

  constructor() {
    need<HTMLFormElement>("task-form").addEventListener("submit", (event) => { event.preventDefault(); void this.submit(); });
    this.line.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); void this.submit(); }
    });
    need("tasks").addEventListener("keydown", (event) => { if (event.key === "Escape") void this.act("cancel"); });
    need("task-stop").addEventListener("click", () => { void this.act("cancel"); });
    need("task-yes").addEventListener("click", () => { void this.answer("approve"); });
    need("task-no").addEventListener("click", () => { void this.answer("reject"); });
    need("task-apply").addEventListener("click", () => { void this.act("apply", { hunks: this.wanted() }); });
    need("task-undo").addEventListener("click", () => { void this.act("undo"); });
    this.list.addEventListener("change", () => { if (this.list.value) this.follow(this.list.value); });
  }

  /** See whether the server has tasks, and which. */
  async look(): Promise<void> {
    const answer = await ask("/v1/tasks");
    need("tab-tasks").hidden = !answer.ok;
    if (!answer.ok) return;
    const known = ((await answer.json()) as { data: Task[] }).data.slice(0, 50);
    this.list.replaceChildren(h("option", { value: "" }, known.length ? "choose …" : "none"),
      ...known.map((t) => h("option", { value: t.id }, `${t.status}: ${t.instruction.slice(0, 60)}`)));
    if (!this.folder.value && known.length) this.folder.value = known[0].workspace;
  }

  private get running(): boolean { return this.task !== null && RUNNING.has(this.task.status); }

  private async submit(): Promise<void> {
    const text = this.line.value.trim();
    if (!text) return;
    this.line.value = "";
    if (this.running) { await this.act("steer", { line: text }); return; }
    const check = need<HTMLInputElement>("task-check").value.trim();
    const answer = await ask("/v1/tasks", { workspace: this.folder.value.trim(), instruction: text, check });
    if (!answer.ok) { this.line.value = text; this.say(await sentence(answer)); return; }
    this.follow(((await answer.json()) as Task).id);
  }

  private follow(id: string): void {
    this.following?.abort();
    this.following = new AbortController();
    this.log.replaceChildren();
    this.hunks.replaceChildren();
    this.writing = null;
    void this.watch(id, this.following.signal);
  }

  private async watch(id: string, signal: AbortSignal): Promise<void> {
    for (let after = 0; !signal.aborted;) {
      try {
        const answer = await ask(`/v1/tasks/${id}/events?after=${after}`, undefined, signal);
        if (answer.status === 404) { this.say(await sentence(answer)); return; }
        for await (const event of streamed<Event>(answer)) { after = event.sequence_number; this.take(event); }
        const now = await ask(`/v1/tasks/${id}`, undefined, signal);
        if (now.ok) { this.show((await now.json()) as Task); void this.look(); return; }
      } catch { /* lost: asked for again below, from where it was */ }
      await new Promise((resolve) => { setTimeout(resolve, PAUSE); });
    }
  }

  private take(event: Event): void {
    if (event.task) this.show(event.task);
    if (event.type === "task.text.delta" || event.type === "task.output.delta") { this.write(event.delta ?? ""); return; }
    this.writing = null;
    if (event.type === "task.doing") this.row(event.line ?? "", "note");
    else if (event.type === "task.noted") this.row(event.line ?? "", event.failed ? "problem" : "");
    else if (event.type === "task.queued" && event.position) this.say(`waiting, place ${event.position}`);
    else if (event.type === "task.steered") this.row(`You: ${event.line ?? ""}`, "");
    else if (event.type === "task.asked" && event.question) this.asked(event.question);
    else if (event.type === "task.answered") { this.asked(null); this.row(event.approved ? "approved" : "rejected", "note"); }
  }

  private show(task: Task): void {
    this.task = task;
    const spent = task.receipts.map((r) => `${r.model} ${r.tokens} tokens in ${r.seconds.toFixed(1)} s`).join(", ");
    this.say([task.status, task.line, spent].filter(Boolean).join(" · "));
    need("task-stop").hidden = !this.running;
    need("task-go").textContent = this.running ? "Steer" : "Do it";
    need("task-done").hidden = !(task.status === "proposed" || (task.status === "done" && task.entry));
    need("task-apply").hidden = task.status !== "proposed";
    need("task-undo").hidden = task.status !== "done";
    if (task.question && task.question.id !== this.question?.id) this.asked(task.question);
    if (!task.question) this.asked(null);
    if (!this.running) announce(`Task ${task.status}. ${task.line}`);
  }

  private asked(question: Question | null): void {
    this.question = question;
    need("task-question").hidden = !question;
    if (!question) { if (this.task?.status !== "proposed") this.hunks.replaceChildren(); return; }
    need("task-asked").textContent = question.kind === "command" ? `Run: ${question.command}` : question.text;
    this.hunks.replaceChildren(...question.hunks.map((hunk) => h("li", { class: "hunk" },
      h("label", { class: "place" }, h("input", { type: "checkbox", checked: true, "data-hunk": hunk.number }), ` ${hunk.path}, line ${hunk.first}`),
      h("pre", { tabindex: 0, "aria-label": `Hunk in ${hunk.path}` },
        ...(hunk.before ? rows(hunk.before.replace(/\n$/, ""), "-") : []), ...(hunk.after ? rows(hunk.after.replace(/\n$/, ""), "+") : [])))));
    announce(question.text);
  }

  private wanted(): number[] | undefined {
    const boxes = [...this.hunks.querySelectorAll<HTMLInputElement>("[data-hunk]")];
    return boxes.every((box) => box.checked) ? undefined : boxes.filter((box) => box.checked).map((box) => Number(box.dataset.hunk));
  }

  private async answer(how: "approve" | "reject"): Promise<void> {
    if (this.question) await this.act(how, { question: this.question.id, hunks: how === "approve" ? this.wanted() : undefined });
  }

  private async act(what: string, body: unknown = {}): Promise<void> {
    if (!this.task || (what === "cancel" && !this.running)) return;
    const answer = await ask(`/v1/tasks/${this.task.id}/${what}`, body);
    if (!answer.ok) { this.say(await sentence(answer)); return; }
    if (!this.running) this.show((await answer.json()) as Task);
  }

  private row(text: string, kind: string): void {
    following(this.log, () => { this.log.append(h("p", { class: kind }, text)); });
  }

  private write(delta: string): void {
    following(this.log, () => {
      if (!this.writing) this.log.append(this.writing = h("pre", {}));
      this.writing.append(delta);
    });
  }

  private say(text: string): void { need("task-note").textContent = text; }
}
