// The editor: CodeMirror with ghost text, marks and our keys. It reports keys and changes; it asks nobody.

import { defaultKeymap, history, historyKeymap, indentLess, indentMore } from "@codemirror/commands";
import { bracketMatching, indentOnInput, indentUnit, syntaxHighlighting } from "@codemirror/language";
import { search, searchKeymap } from "@codemirror/search";
import { Compartment, EditorState, type Extension, Prec, type Transaction, type TransactionSpec } from "@codemirror/state";
import {
  type Command, EditorView, drawSelection, highlightSpecialChars, keymap, lineNumbers,
} from "@codemirror/view";
import { classHighlighter } from "@lezer/highlight";
import { blinking } from "./cursor";
import { type Taken, accept, dismiss, ghostText } from "./ghost";
import { colours } from "./languages";
import { marks } from "./marks";
import { typing } from "./typing";

export interface Keys { jump: Command; fix: Command; nextFinding: Command; instruct: Command; invoke: Command; chat: Command }
/** `typed` is told before anything is drawn, so that the server computes while the key is being painted. */
export interface Reports { taken: Taken; typed(transaction: Transaction): void; update: Parameters<typeof EditorView.updateListener.of>[0] }

const LARGE = 1_000_000; // characters from which a file is not coloured: typing stays quick

const language = new Compartment();

function extensions(name: string, size: number, keys: Keys, reports: Reports): Extension {
  return [
    Prec.highest(keymap.of([
      { key: "Tab", run: accept(reports.taken, "all") },
      { key: "Tab", run: keys.jump },
      { key: "Tab", run: indentMore, shift: indentLess },
      { key: "Ctrl-ArrowRight", mac: "Alt-ArrowRight", run: accept(reports.taken, "word") },
      { key: "Escape", run: dismiss(reports.taken) },
      { key: "Alt-\\", run: keys.invoke },
      { key: "F8", run: keys.nextFinding },
      { key: "Alt-Enter", run: keys.fix },
      { key: "Mod-k", run: keys.instruct, preventDefault: true },
      { key: "Mod-Alt-j", run: keys.chat },
    ])),
    typing(), keymap.of([...searchKeymap, ...historyKeymap, ...defaultKeymap]),
    lineNumbers(), history(), drawSelection({ cursorBlinkRate: 0 }), blinking, highlightSpecialChars(), indentOnInput(), bracketMatching(),
    search({ top: true }), syntaxHighlighting(classHighlighter), indentUnit.of("    "), EditorState.tabSize.of(4),
    EditorView.contentAttributes.of({ "aria-label": "Code; Escape, then Tab, leaves the editor", spellcheck: "false", autocapitalize: "off", autocorrect: "off" }),
    EditorView.cspNonce.of(document.querySelector<HTMLMetaElement>("meta[name=style-nonce]")?.content ?? ""),
    EditorView.updateListener.of(reports.update), ghostText(), marks(), language.of(size < LARGE ? colours(name) : []),
    size < LARGE ? EditorView.lineWrapping : [], // no part of a line hides under the line numbers
  ];
}

export function makeEditor(parent: HTMLElement, doc: string, name: string, keys: Keys, reports: Reports): EditorView {
  return new EditorView({
    parent, state: EditorState.create({ doc, extensions: extensions(name, doc.length, keys, reports) }),
    dispatchTransactions: (transactions, view) => {
      for (const transaction of transactions) if (transaction.docChanged) reports.typed(transaction);
      view.update(transactions);
    },
  });
}

export function freshState(doc: string, name: string, keys: Keys, reports: Reports): EditorState {
  return EditorState.create({ doc, extensions: extensions(name, doc.length, keys, reports) });
}

export function recolour(name: string, size: number): TransactionSpec {
  return { effects: language.reconfigure(size < LARGE ? colours(name) : []) };
}
