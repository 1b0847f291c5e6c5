// The editor's side of Keystroke: starts the language server and asks the user where the protocol cannot.
//
// Law: everything intelligent is the server's. This file knows commands, keys and one status item.

import * as vscode from "vscode";
import { LanguageClient, State, TransportKind } from "vscode-languageclient/node";
import { NextEdits } from "./nextEdit";

let client: LanguageClient | undefined;

export async function activate(context: vscode.ExtensionContext): Promise<void> {
  const settings = vscode.workspace.getConfiguration("keystroke");
  const program = {
    command: settings.get<string>("command", "keystroke"),
    args: ["lsp", ...settings.get<string[]>("arguments", [])],
    transport: TransportKind.stdio,
  };
  client = new LanguageClient("keystroke", "Keystroke", program, {
    documentSelector: [{ scheme: "file" }, { scheme: "untitled" }],
  });
  // A larger model has something better to show than what stands there: the editor asks again.
  client.onNotification("keystroke/suggestionRevised", (revised: { uri: string }) => {
    const shown = vscode.window.activeTextEditor?.document.uri.toString();
    if (shown === revised.uri) {
      void vscode.commands.executeCommand("editor.action.inlineSuggest.trigger");
    }
  });
  const status = new Status(client);
  const nextEdits = new NextEdits(client);
  context.subscriptions.push(
    status,
    nextEdits,
    vscode.commands.registerCommand("keystroke.editByInstruction", editByInstruction),
    vscode.commands.registerCommand("keystroke.suppressHere", suppressHere),
    vscode.commands.registerCommand("keystroke.nextEdit", () => nextEdits.take()),
    // The editor itself can take part of a suggestion; the server hears of it as the typing it is.
    alias("keystroke.acceptWord", "editor.action.inlineSuggest.acceptNextWord"),
    alias("keystroke.acceptLine", "editor.action.inlineSuggest.acceptNextLine"),
    vscode.commands.registerCommand("keystroke.showStatus", () => status.ask()),
  );
  try {
    await client.start();
  } catch {
    const choice = await vscode.window.showErrorMessage(
      `Keystroke could not start "${program.command}". Install it, or set keystroke.command.`,
      "Open settings",
    );
    if (choice !== undefined) {
      await vscode.commands.executeCommand("workbench.action.openSettings", "keystroke.command");
    }
  }
}

export async function deactivate(): Promise<void> {
  await client?.stop();
}

function alias(name: string, command: string): vscode.Disposable {
  return vscode.commands.registerCommand(name, () => vscode.commands.executeCommand(command));
}

function run(command: string, ...args: unknown[]): Promise<unknown> {
  if (client === undefined || client.state !== State.Running) {
    return Promise.reject(new Error("Keystroke is not running."));
  }
  return client.sendRequest("workspace/executeCommand", { command, arguments: args });
}

async function editByInstruction(): Promise<void> {
  const editor = vscode.window.activeTextEditor;
  if (editor === undefined || client === undefined) {
    return;
  }
  const whole = editor.selection.isEmpty;
  const instruction = await vscode.window.showInputBox({
    prompt: whole ? "What should change in this file?" : "What should change in the selection?",
    placeHolder: "for example: return early when the list is empty",
  });
  if (instruction?.trim()) {
    const range = whole ? null : client.code2ProtocolConverter.asRange(editor.selection);
    await run("keystroke.edit", editor.document.uri.toString(), range, instruction);
  }
}

async function suppressHere(): Promise<void> {
  const editor = vscode.window.activeTextEditor;
  if (editor === undefined) {
    return;
  }
  const line = editor.selection.active.line;
  const found = vscode.languages
    .getDiagnostics(editor.document.uri)
    .filter((d) => d.source === "keystroke" && d.range.start.line <= line && line <= d.range.end.line);
  const rules = [...new Set(found.map((d) => String(d.code)))];
  const rule = rules.length > 1 ? await vscode.window.showQuickPick(rules) : rules[0];
  if (rule === undefined) {
    await vscode.window.showInformationMessage("Keystroke has found nothing on this line.");
    return;
  }
  const reason = await vscode.window.showInputBox({ prompt: `Why is ${rule} fine here?` });
  const place = found.find((d) => String(d.code) === rule);
  if (reason?.trim() && place !== undefined) {
    await run("keystroke.suppress", editor.document.uri.toString(), place.range.start.line, rule, reason);
  }
}

class Status implements vscode.Disposable {
  private readonly item = vscode.window.createStatusBarItem("keystroke", vscode.StatusBarAlignment.Right, 100);
  private readonly timer: NodeJS.Timeout;

  constructor(private readonly server: LanguageClient) {
    this.item.name = "Keystroke";
    this.item.command = "keystroke.showStatus";
    this.show(false);
    this.item.show();
    this.timer = setInterval(() => void this.look(), 5000);
    server.onDidChangeState(() => void this.look());
  }

  async ask(): Promise<void> {
    if (!(await this.look())) {
      await run("keystroke.reconnect").catch(() => undefined);
      this.server.outputChannel.show(true);
    }
  }

  dispose(): void {
    clearInterval(this.timer);
    this.item.dispose();
  }

  private async look(): Promise<boolean> {
    const answer = await run("keystroke.status").catch(() => undefined);
    const connected = (answer as { connected?: boolean } | undefined)?.connected === true;
    this.show(connected);
    return connected;
  }

  private show(connected: boolean): void {
    this.item.text = connected ? "$(zap) Keystroke" : "$(debug-disconnect) Keystroke";
    this.item.tooltip = connected ? "Keystroke is connected" : "No gateway; click to connect again";
  }
}
