// The VS Code extension: starts the language server and registers the commands.
//
// The status item is in status.ts, tasks in tasks.ts, the next edit in nextEdit.ts.

import * as vscode from "vscode";
import {
  ClientCapabilities,
  LanguageClient,
  type Middleware,
  type ServerOptions,
  State,
  TransportKind,
} from "vscode-languageclient/node";
import { NextEdits } from "./nextEdit";
import { Status } from "./status";
import { Tasks } from "./tasks";

let client: LanguageClient | undefined;
let program: Program & ServerOptions; // the client reads it at each start

export async function activate(context: vscode.ExtensionContext): Promise<void> {
  program = serverProgram();
  let status: Status | undefined;
  const middleware: Middleware = {
    provideInlineCompletionItems: async (document, position, about, token, next) => {
      if (!wanted("ghostText", document)) {
        status?.off(document);
        return undefined;
      }
      const items = await next(document, position, about, token);
      void status?.answered(document);
      return items;
    },
  };
  client = new LanguageClient("keystroke", "Keystroke", program, {
    documentSelector: [{ scheme: "file" }, { scheme: "untitled" }],
    middleware,
  });
  client.registerFeature({
    fillClientCapabilities: (capabilities: ClientCapabilities) => {
      capabilities.experimental = { ...(capabilities.experimental as object), keystrokeTasks: true };
    },
    initialize: () => undefined,
    getState: () => ({ kind: "static" }),
    clear: () => undefined,
  });
  // A larger model has something better to show than what stands there: the editor asks again.
  client.onNotification("keystroke/suggestionRevised", (revised: { uri: string }) => {
    const shown = vscode.window.activeTextEditor?.document.uri.toString();
    if (shown === revised.uri) {
      void vscode.commands.executeCommand("editor.action.inlineSuggest.trigger");
    }
  });
  status = new Status(client, run);
  const tasks = new Tasks(client, run);
  const nextEdits = new NextEdits(client, (document) => wanted("nextEdit", document));
  const command = (name: string, does: (...args: never[]) => unknown): vscode.Disposable =>
    vscode.commands.registerCommand(name, does);
  context.subscriptions.push(
    status,
    tasks,
    nextEdits,
    command("keystroke.editByInstruction", editByInstruction),
    command("keystroke.suppressHere", suppressHere),
    command("keystroke.nextEdit", () => nextEdits.take()),
    // The editor itself can take part of a suggestion; the server hears of it as the typing it is.
    command("keystroke.acceptWord", () => vscode.commands.executeCommand("editor.action.inlineSuggest.acceptNextWord")),
    command("keystroke.acceptLine", () => vscode.commands.executeCommand("editor.action.inlineSuggest.acceptNextLine")),
    command("keystroke.showStatus", () => status.menu()),
    command("keystroke.toggleGhostText", toggleGhostText),
    command("keystroke.restart", () => restart()),
    command("keystroke.newTask", () => tasks.give()),
    command("keystroke.refreshTasks", () => tasks.look()),
    command("keystroke.showTaskChange", tasks.shown),
    command("keystroke.approveTask", tasks.approve),
    command("keystroke.rejectTask", tasks.reject),
    command("keystroke.steerTask", tasks.steer),
    command("keystroke.stopTask", tasks.stop),
    command("keystroke.applyTask", tasks.apply),
    command("keystroke.undoTask", tasks.undo),
    vscode.workspace.onDidChangeConfiguration(async (event) => {
      const starts = ["command", "arguments", "model", "gateway"].some((name) =>
        event.affectsConfiguration(`keystroke.${name}`),
      );
      if (starts) {
        await restart();
      }
    }),
  );
  await start();
  void tasks.look();
}

export async function deactivate(): Promise<void> {
  await client?.stop();
}

interface Program {
  command: string;
  args: string[];
  transport: TransportKind;
}

function serverProgram(): Program & ServerOptions {
  const settings = vscode.workspace.getConfiguration("keystroke");
  const model = settings.get<string>("model", "").trim();
  const gateway = settings.get<string>("gateway", "").trim();
  return {
    command: settings.get<string>("command", "keystroke"),
    args: [
      "lsp",
      ...(model ? ["--model", model] : []),
      ...(gateway ? ["--gateway", gateway] : []),
      ...settings.get<string[]>("arguments", []),
    ],
    transport: TransportKind.stdio,
  };
}

async function start(): Promise<void> {
  try {
    await client?.start();
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

/** With the settings as they are now. */
async function restart(): Promise<void> {
  Object.assign(program, serverProgram());
  await client?.stop().catch(() => undefined);
  await start();
}

/** Whether the user wants this here: switched on, and not off for the language. */
function wanted(feature: "ghostText" | "nextEdit", document: vscode.TextDocument): boolean {
  const settings = vscode.workspace.getConfiguration("keystroke", document);
  return settings.get<boolean>(feature, true) && !settings.get<string[]>("offForLanguages", []).includes(document.languageId);
}

async function toggleGhostText(): Promise<void> {
  const settings = vscode.workspace.getConfiguration("keystroke");
  await settings.update("ghostText", !settings.get<boolean>("ghostText", true), vscode.ConfigurationTarget.Global);
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
