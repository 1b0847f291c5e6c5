// The status item: the model, its speed, and why nothing is suggested.
//
// It shows the last receipt: the milliseconds of the last answer, and tokens per second if the answer was generated on
// request. Often it was not: the server starts with the key, before VS Code requests a suggestion.

import * as vscode from "vscode";
import { LanguageClient, State } from "vscode-languageclient/node";

export type Run = (command: string, ...args: unknown[]) => Promise<unknown>;

interface Receipt {
  shown?: boolean;
  reason?: string;
  model?: string;
  source?: string;
  prompt_tokens: number;
  reused_tokens: number;
  output_tokens: number;
  queue_ms: number;
  prefill_ms: number;
  decode_ms: number;
  total_ms: number;
}

const LOOK = 5000; // milliseconds between looks at whether the gateway is there
const QUIET = new Set(["superseded", "stale_version", "cancelled"]); // said of a key that the next one overtook

export class Status implements vscode.Disposable {
  private readonly item = vscode.window.createStatusBarItem("keystroke", vscode.StatusBarAlignment.Right, 100);
  private readonly timer: NodeJS.Timeout;
  private readonly parts: vscode.Disposable[];
  private connected = false;
  private model = "";
  private speed = "";
  private took = "";
  private reason = "";
  private detail = "";

  constructor(
    private readonly client: LanguageClient,
    private readonly run: Run,
  ) {
    this.item.name = "Keystroke";
    this.item.command = "keystroke.showStatus";
    this.draw();
    this.item.show();
    this.timer = setInterval(() => void this.look(), LOOK);
    this.parts = [
      client.onDidChangeState(() => void this.look()),
      vscode.window.onDidChangeActiveTextEditor(() => this.became("", "")),
      vscode.workspace.onDidChangeConfiguration((event) => {
        if (event.affectsConfiguration("keystroke.ghostText")) {
          this.became("", "");
        }
      }),
    ];
  }

  dispose(): void {
    clearInterval(this.timer);
    this.parts.forEach((part) => part.dispose());
    this.item.dispose();
  }

  /** Ghost text is switched off for this document. */
  off(document: vscode.TextDocument): void {
    this.became(`off for ${document.languageId}`, "");
  }

  /** The server has answered a request for ghost text: ask it what became of it. */
  async answered(document: vscode.TextDocument): Promise<void> {
    const paid = await this.client
      .sendRequest<Partial<Receipt>>("keystroke/receipt", { uri: document.uri.toString() })
      .catch(() => ({}) as Partial<Receipt>);
    if (paid.total_ms === undefined || QUIET.has(paid.reason ?? "")) {
      return;
    }
    const told = paid as Receipt;
    this.connected = true;
    this.model = told.model || this.model;
    if (told.output_tokens > 1 && told.decode_ms > 0) {
      this.speed = `${Math.round((told.output_tokens / told.decode_ms) * 1000)} tok/s`;
    }
    this.took = `${ms(told.total_ms)} ms`;
    this.became((told.reason ?? "").replaceAll("_", " "), sentence(told));
  }

  /** What one can do about it. */
  async menu(): Promise<void> {
    const there = await this.look();
    const on = vscode.workspace.getConfiguration("keystroke").get<boolean>("ghostText", true);
    const choices = [
      ...(there ? [] : [{ label: "$(debug-disconnect) Connect again", does: () => this.run("keystroke.reconnect") }]),
      { label: on ? "$(circle-slash) Switch ghost text off" : "$(zap) Switch ghost text on", does: named("keystroke.toggleGhostText") },
      { label: "$(list-tree) Tasks", does: named("keystroke.tasks.focus") },
      { label: "$(gear) Settings", does: () => vscode.commands.executeCommand("workbench.action.openSettings", "keystroke") },
      { label: "$(output) What the server says", does: () => this.client.outputChannel.show(true) },
      { label: "$(debug-restart) Restart the server", does: named("keystroke.restart") },
    ];
    const chosen = await vscode.window.showQuickPick(choices, { title: this.title(), placeHolder: this.detail || undefined });
    await Promise.resolve(chosen?.does()).catch((error: Error) => vscode.window.showWarningMessage(error.message));
  }

  private async look(): Promise<boolean> {
    const answer = (await this.run("keystroke.status").catch(() => undefined)) as { connected?: boolean; model?: string } | undefined;
    this.connected = answer?.connected === true;
    this.model = answer?.model || this.model;
    this.draw();
    return this.connected;
  }

  private became(reason: string, detail: string): void {
    this.reason = reason;
    this.detail = detail;
    this.draw();
  }

  private title(): string {
    return ["Keystroke", this.model, this.speed, this.took].filter(Boolean).join(" · ");
  }

  private draw(): void {
    const on = vscode.workspace.getConfiguration("keystroke").get<boolean>("ghostText", true);
    const there = this.connected && this.client.state === State.Running;
    const icon = !there ? "debug-disconnect" : !on ? "circle-slash" : this.reason ? "dash" : "zap";
    const words = [this.model || "Keystroke", this.speed || this.took].filter(Boolean).join(" ");
    this.item.text = `$(${icon}) ${there ? words : "Keystroke"}`;
    const why = !there ? "No gateway; click to reconnect" : !on ? "Ghost text is off" : this.reason ? `Nothing shown: ${this.reason}` : this.title();
    this.item.tooltip = [why, this.detail].filter(Boolean).join("\n");
    this.item.accessibilityInformation = { label: `${this.title()}. ${why}` };
  }
}

function named(command: string): () => Thenable<unknown> {
  return () => vscode.commands.executeCommand(command);
}

function ms(value: number): string {
  return value < 10 ? value.toFixed(1) : value.toFixed(0);
}

function sentence(told: Receipt): string {
  const parts = `queue ${ms(told.queue_ms)}, prefill ${ms(told.prefill_ms)}, decode ${ms(told.decode_ms)}`;
  return `${ms(told.total_ms)} ms (${parts}) · ${told.reused_tokens} of ${told.prompt_tokens} tokens reused · ${(told.source ?? "").replaceAll("_", " ")}`;
}
