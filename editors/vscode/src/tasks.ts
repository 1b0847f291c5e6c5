// Tasks: a list of the agent's tasks, their progress, and their changes, which are accepted hunk by hunk.
//
// The gateway runs the tasks. The tree shows the server's notifications (`keystroke/task`); answers go through the
// server, which refuses a change while a file it touches has unsaved changes.

import * as vscode from "vscode";
import { LanguageClient } from "vscode-languageclient/node";
import type { Run } from "./status";

interface Hunk {
  number: number;
  path: string;
  first: number;
  before: string;
  after: string;
}

interface Question {
  id: string;
  kind: "command" | "change";
  text: string;
  command: string;
  hunks: Hunk[];
}

interface Task {
  id: string;
  status: string;
  workspace: string;
  instruction: string;
  model: string;
  line: string;
  question: Question | null;
  receipts: { model: string; tokens: number; seconds: number }[];
}

interface TaskEvent {
  type: string;
  task_id: string;
  task?: Task;
  line?: string;
  question?: Question;
}

type Row = { task: Task; hunk?: Hunk; note?: string; place?: number };

const RUNNING = new Set(["queued", "working", "asking"]);
const ICONS: Record<string, string> = {
  queued: "clock",
  working: "sync~spin",
  asking: "question",
  done: "check",
  proposed: "diff",
  failed: "error",
  interrupted: "debug-pause",
  undone: "discard",
};
const KEPT = 50; // lines of one task
const SCHEME = "keystroke-task";

export class Tasks implements vscode.TreeDataProvider<Row>, vscode.TextDocumentContentProvider, vscode.Disposable {
  private readonly changed = new vscode.EventEmitter<undefined>();
  readonly onDidChangeTreeData = this.changed.event;
  private readonly tasks = new Map<string, Task>();
  private readonly lines = new Map<string, string[]>();
  private readonly left = new Map<string, Set<number>>(); // hunks that are not wanted
  private readonly view: vscode.TreeView<Row>;
  private readonly parts: vscode.Disposable[];

  constructor(
    client: LanguageClient,
    private readonly run: Run,
  ) {
    this.view = vscode.window.createTreeView("keystroke.tasks", { treeDataProvider: this, manageCheckboxStateManually: true });
    this.parts = [
      this.view,
      this.changed,
      vscode.workspace.registerTextDocumentContentProvider(SCHEME, this),
      client.onNotification("keystroke/task", (event: TaskEvent) => this.told(event)),
      this.view.onDidChangeCheckboxState((event) => this.checked(event.items)),
    ];
  }

  dispose(): void {
    this.parts.forEach((part) => part.dispose());
  }

  // ── the tree ────────────────────────────────────────────────────────────────────────────────

  getChildren(row?: Row): Row[] {
    if (row === undefined) {
      return [...this.tasks.values()].map((task) => ({ task }));
    }
    const { task } = row;
    if (row.hunk !== undefined || row.note !== undefined) {
      return [];
    }
    const lines = (this.lines.get(task.id) ?? []).map((note, place) => ({ task, note, place }));
    return [...lines, ...(task.question?.hunks ?? []).map((hunk) => ({ task, hunk }))];
  }

  /** Items keep their identity while the list is drawn anew, so that a click is not lost. */
  getTreeItem({ task, hunk, note, place }: Row): vscode.TreeItem {
    if (note !== undefined) {
      return Object.assign(new vscode.TreeItem(note), { id: `${task.id}:note${place}`, tooltip: note });
    }
    if (hunk !== undefined) {
      const item = new vscode.TreeItem(`${hunk.path}:${hunk.first}`);
      item.id = `${task.id}:${task.question?.id ?? ""}:${hunk.number}`;
      item.description = hunk.after.trim().split("\n")[0] ?? "";
      item.tooltip = new vscode.MarkdownString().appendCodeblock(diffOf(hunk), "diff");
      const wanted = !this.left.get(task.id)?.has(hunk.number);
      item.checkboxState = wanted ? vscode.TreeItemCheckboxState.Checked : vscode.TreeItemCheckboxState.Unchecked;
      item.command = this.opens(task);
      return item;
    }
    const open = RUNNING.has(task.status) ? vscode.TreeItemCollapsibleState.Expanded : vscode.TreeItemCollapsibleState.Collapsed;
    const item = new vscode.TreeItem(task.instruction.split("\n")[0], open);
    item.id = `${task.id}:${RUNNING.has(task.status)}`; // what runs is open, what has ended is not
    item.description = [task.status, task.question?.text ?? task.line].filter(Boolean).join(": ");
    item.iconPath = new vscode.ThemeIcon(ICONS[task.status] ?? "circle");
    item.contextValue = task.status;
    const spent = task.receipts.map((r) => `${r.model} ${r.tokens} tokens in ${r.seconds.toFixed(1)} s`);
    item.tooltip = [task.instruction, task.line, ...spent].filter(Boolean).join("\n");
    item.accessibilityInformation = { label: `${task.instruction}. ${item.description}` };
    return item;
  }

  /** The change of a task as a document, for `keystroke-task:ID.diff`. */
  async provideTextDocumentContent(uri: vscode.Uri): Promise<string> {
    const id = uri.path.replace(/\.diff$/, "");
    const known = (await this.run("keystroke.taskDiff", id).catch(() => undefined)) as { diff: string } | undefined;
    return known?.diff ?? "This task has changed nothing.\n";
  }

  // ── what the server tells ───────────────────────────────────────────────────────────────────

  /** The tasks of the folders that are open. */
  async look(): Promise<void> {
    const found = (await this.run("keystroke.tasks").catch(() => [])) as Task[];
    this.tasks.clear();
    found.forEach((task) => this.tasks.set(task.id, task));
    this.draw();
  }

  private told(event: TaskEvent): void {
    const known = event.task ?? this.tasks.get(event.task_id);
    if (known === undefined) {
      void this.look();
      return;
    }
    if (!this.tasks.has(known.id)) {
      const others = [...this.tasks.values()];
      this.tasks.clear();
      [known, ...others].forEach((task) => this.tasks.set(task.id, task));
    }
    if (event.task !== undefined) {
      this.tasks.set(known.id, event.task);
    }
    const task = this.tasks.get(known.id) as Task;
    if (event.type === "task.began") {
      task.status = "working";
    } else if (event.type === "task.doing" || event.type === "task.noted") {
      task.line = event.line ?? "";
      this.lines.set(task.id, [...(this.lines.get(task.id) ?? []), task.line].slice(-KEPT));
    } else if (event.type === "task.asked" && event.question !== undefined) {
      task.status = "asking";
      task.question = event.question;
      this.left.delete(task.id);
      void this.ask(task, event.question);
    } else if (event.type === "task.answered") {
      task.status = "working";
      task.question = null;
    } else if (event.type.endsWith(".delta") || event.type === "task.spent") {
      return;
    }
    this.draw();
  }

  private draw(): void {
    const waiting = [...this.tasks.values()].filter((task) => task.status === "asking").length;
    this.view.badge = waiting ? { value: waiting, tooltip: `${waiting} waiting for your answer` } : undefined;
    this.changed.fire(undefined);
  }

  // ── what the user does ──────────────────────────────────────────────────────────────────────

  /** Give a task about the folder that is open. */
  async give(): Promise<void> {
    const instruction = await vscode.window.showInputBox({
      prompt: "What should be done in this folder?",
      placeHolder: "for example: make the tests in tests/test_calc.py pass",
    });
    if (!instruction?.trim()) {
      return;
    }
    const check = await vscode.window.showInputBox({
      prompt: "A command that must pass afterwards; leave empty for none",
      placeHolder: "for example: pytest -q",
    });
    if (check === undefined) {
      return;
    }
    await this.tried(async () => {
      await this.run("keystroke.task", instruction, { check });
      await vscode.commands.executeCommand("keystroke.tasks.focus");
    });
  }

  readonly approve = (row: Row): Promise<void> => this.answer(row.task, "approve");
  readonly reject = (row: Row): Promise<void> => this.answer(row.task, "reject");
  readonly stop = (row: Row): Promise<void> => this.act(row.task, "cancel");
  readonly apply = (row: Row): Promise<void> => this.act(row.task, "apply");
  readonly undo = (row: Row): Promise<void> => this.act(row.task, "undo");

  readonly steer = async (row: Row): Promise<void> => {
    const line = await vscode.window.showInputBox({ prompt: "What should it know or do otherwise?" });
    if (line?.trim()) {
      await this.act(row.task, "steer", { line });
    }
  };

  readonly shown = async (row: Row | string): Promise<void> => {
    const id = typeof row === "string" ? row : row.task.id;
    const document = await vscode.workspace.openTextDocument(vscode.Uri.parse(`${SCHEME}:${id}.diff`));
    await vscode.languages.setTextDocumentLanguage(document, "diff");
    await vscode.window.showTextDocument(document, { preview: true });
  };

  private opens(task: Task): vscode.Command {
    return { command: "keystroke.showTaskChange", title: "Show the change", arguments: [task.id] };
  }

  private checked(items: readonly [Row, vscode.TreeItemCheckboxState][]): void {
    for (const [{ task, hunk }, state] of items) {
      const left = this.left.get(task.id) ?? new Set<number>();
      if (hunk !== undefined) {
        if (state === vscode.TreeItemCheckboxState.Checked) {
          left.delete(hunk.number);
        } else {
          left.add(hunk.number);
        }
      }
      this.left.set(task.id, left);
    }
    this.draw();
  }

  private async ask(task: Task, question: Question): Promise<void> {
    const what = question.kind === "command" ? `Run: ${question.command}` : question.text;
    const yes = question.kind === "command" ? "Run" : "Accept";
    const choice = await vscode.window.showInformationMessage(`Keystroke: ${what}`, yes, ...(question.hunks.length ? ["Show"] : []), "Reject");
    if (this.tasks.get(task.id)?.question?.id !== question.id || choice === undefined) {
      return; // answered in the tree meanwhile, or to be answered there
    }
    if (choice === "Show") {
      await this.shown(task.id);
      await vscode.commands.executeCommand("keystroke.tasks.focus");
    } else {
      await this.answer(task, choice === yes ? "approve" : "reject");
    }
  }

  private async answer(task: Task, what: "approve" | "reject"): Promise<void> {
    const question = this.tasks.get(task.id)?.question;
    if (!question) {
      return;
    }
    const left = this.left.get(task.id);
    const hunks = question.hunks.map((hunk) => hunk.number).filter((number) => !left?.has(number));
    const some = what === "approve" && left?.size ? { hunks } : {};
    await this.act(task, what, { question: question.id, ...some });
  }

  private async act(task: Task, what: string, fields: object = {}): Promise<void> {
    await this.tried(async () => {
      const now = (await this.run("keystroke.taskAct", task.id, what, fields)) as Task;
      this.tasks.set(task.id, now);
      this.draw();
    });
  }

  private async tried(work: () => Promise<void>): Promise<void> {
    try {
      await work();
    } catch (error) {
      await vscode.window.showWarningMessage(`Keystroke: ${(error as Error).message}`);
    }
  }
}

function diffOf(hunk: Hunk): string {
  const lines = (text: string, sign: string): string[] => (text ? text.replace(/\n$/, "").split("\n").map((line) => sign + line) : []);
  return [...lines(hunk.before, "-"), ...lines(hunk.after, "+")].join("\n");
}
