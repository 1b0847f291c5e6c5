// The next edit: marked at its position; one key goes there, and the same key applies it.
//
// A change of the text discards the offer, and a new one is requested after a pause.

import * as vscode from "vscode";
import { LanguageClient, State } from "vscode-languageclient/node";

const PAUSE = 200; // milliseconds without a key; the server waits some more by itself

interface Offered {
  text: string;
  range: { start: { line: number; character: number }; end: { line: number; character: number } };
  textDocument: { uri: string; version: number };
  command?: { command: string; arguments?: unknown[] };
}

export class NextEdits implements vscode.Disposable {
  private readonly added = vscode.window.createTextEditorDecorationType({
    after: { color: new vscode.ThemeColor("editorGhostText.foreground"), fontStyle: "italic", margin: "0 0 0 0.4em" },
    overviewRulerColor: new vscode.ThemeColor("editorInfo.foreground"),
  });
  private readonly removed = vscode.window.createTextEditorDecorationType({
    textDecoration: "line-through",
    opacity: "0.6",
  });
  private readonly parts: vscode.Disposable[];
  private offer: Offered | undefined;
  private asking: vscode.CancellationTokenSource | undefined;
  private timer: NodeJS.Timeout | undefined;

  constructor(
    private readonly client: LanguageClient,
    private readonly wanted: (document: vscode.TextDocument) => boolean,
  ) {
    this.parts = [
      this.added,
      this.removed,
      vscode.workspace.onDidChangeTextDocument((event) => {
        if (event.contentChanges.length > 0 && event.document === vscode.window.activeTextEditor?.document) {
          this.letGo();
          if (this.wanted(event.document)) {
            this.timer = setTimeout(() => void this.ask(), PAUSE);
          }
        }
      }),
      vscode.window.onDidChangeActiveTextEditor(() => this.mark()),
    ];
  }

  dispose(): void {
    this.letGo();
    this.parts.forEach((part) => part.dispose());
  }

  /** Go to the place offered; at the place, take it. */
  async take(): Promise<void> {
    const offer = this.offer ?? (await this.ask());
    if (offer === undefined) {
      vscode.window.setStatusBarMessage("Keystroke: no next edit", 3000);
      return;
    }
    const document = await vscode.workspace.openTextDocument(vscode.Uri.parse(offer.textDocument.uri));
    const range = this.client.protocol2CodeConverter.asRange(offer.range);
    const here = vscode.window.activeTextEditor;
    if (here?.document !== document || here.selection.active.line !== range.start.line) {
      const editor = await vscode.window.showTextDocument(document);
      editor.selection = new vscode.Selection(range.start, range.start);
      editor.revealRange(range, vscode.TextEditorRevealType.InCenterIfOutsideViewport);
      this.mark();
      return;
    }
    const edit = new vscode.WorkspaceEdit();
    edit.replace(document.uri, range, offer.text);
    this.letGo();
    if ((await vscode.workspace.applyEdit(edit)) && offer.command !== undefined) {
      const { command, arguments: args } = offer.command;
      await this.client.sendRequest("workspace/executeCommand", { command, arguments: args });
    }
  }

  private async ask(): Promise<Offered | undefined> {
    const editor = vscode.window.activeTextEditor;
    if (editor === undefined || this.client.state !== State.Running) {
      return undefined;
    }
    this.asking?.cancel();
    const asking = (this.asking = new vscode.CancellationTokenSource());
    const { document, selection } = editor;
    const params = {
      textDocument: { uri: document.uri.toString(), version: document.version },
      position: this.client.code2ProtocolConverter.asPosition(selection.active),
      context: { triggerKind: 2 },
    };
    try {
      const answer = await this.client.sendRequest<{ edits: Offered[] }>(
        "textDocument/copilotInlineEdit",
        params,
        asking.token,
      );
      if (!asking.token.isCancellationRequested) {
        this.offer = answer.edits[0];
        this.mark();
      }
    } catch {
      return undefined; // cancelled, or the server is gone: the next key asks again
    }
    return this.offer;
  }

  private letGo(): void {
    clearTimeout(this.timer);
    this.asking?.cancel();
    this.offer = undefined;
    this.mark();
  }

  private mark(): void {
    for (const editor of vscode.window.visibleTextEditors) {
      const offer = this.offer?.textDocument.uri === editor.document.uri.toString() ? this.offer : undefined;
      const range = offer && this.client.protocol2CodeConverter.asRange(offer.range);
      const first = offer?.text.split("\n").find((line) => line.trim() !== "") ?? "";
      const after = { contentText: first === offer?.text ? first : `${first} …` };
      editor.setDecorations(this.added, range && first ? [{ range, renderOptions: { after } }] : []);
      editor.setDecorations(this.removed, range && !range.isEmpty ? [range] : []);
    }
  }
}
