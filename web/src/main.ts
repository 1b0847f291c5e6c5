// The page put together: the editor on the live channel, and what stands around it.

import { EditorSelection, type Text } from "@codemirror/state";
import { type Command, type EditorView, type ViewUpdate } from "@codemirror/view";
import { ask, key, setKey, takeKeyFromAddress } from "./access";
import { Chat } from "./chat";
import { announce, h, need, painted, set } from "./dom";
import { Instructed } from "./edit";
import { type Keys, type Reports, freshState, makeEditor, recolour } from "./editor";
import { Findings } from "./findings";
import { type Ghost, ghostOf, revised, setGhost } from "./ghost";
import { languageOf } from "./languages";
import { Live, type Revised, type Stamp, type Suggested } from "./live";
import { jump, setJump } from "./marks";
import { Race } from "./race";
import { Receipts } from "./receipts";
import { selectTab, wireTabs } from "./tabs";
import { Tasks } from "./tasks";
import { toggleTheme, useTheme } from "./theme";
import { Turns } from "./turns";
import type { ModelStatus } from "./protocol";

const EXAMPLE = `import sqlite3


class Inventory:
    """Items by name, kept in a database."""

    def __init__(self, path: str) -> None:
        self.connection = sqlite3.connect(path)

    def find(self, name: str):
        return self.connection.execute("SELECT * FROM items WHERE name = '%s'" % name).fetchall()

    def add(self, name: str, count: int) -> None:
        `;

takeKeyFromAddress();
useTheme();

const nameInput = need<HTMLInputElement>("file-name");
const silence = need("silence");
const receipts = new Receipts();
const findings = new Findings();
let lineEnd = "\n";
const kept = new Map<number, number>(); // when the frame was out that showed the rest of agreeing ghost text
let pressed = 0; // when the key that is being handled was pressed
let view: EditorView;
let live: Live;
let instructed: Instructed;

const jumpKey: Command = (editor) => {
  const target = editor.state.field(jump);
  if (!target) return false;
  const { from, to } = editor.state.selection.main;
  if (from !== target.from || to !== target.to) {
    editor.dispatch({ selection: EditorSelection.single(target.from, target.to), scrollIntoView: true });
    announce(`${target.title}. Tab again makes this change.`);
    return true;
  }
  live.feedback(target.id, "accepted");
  editor.dispatch({
    changes: { from: target.from, to: target.to, insert: target.text },
    selection: { anchor: target.from + target.text.length }, effects: setJump.of(null), userEvent: "input.jump",
  });
  return true;
};

const keys: Keys = {
  jump: jumpKey, fix: findings.fix, nextFinding: findings.next,
  invoke: () => { live.complete(pressed || performance.now(), true); return true; },
  instruct: () => { selectTab("edit"); instructed.focus(); return true; },
  chat: () => { selectTab("chat"); need("chat-line").focus(); return true; },
};
const reports: Reports = {
  taken: (ghost: Ghost, outcome, length) => {
    live.feedback(ghost.id, outcome, length);
    if (outcome === "accepted") announce("Taken.");
    if (outcome === "dismissed") live.refuse();
  },
  typed: (transaction) => { live.changed(transaction.changes, transaction.newDoc, transaction.newSelection.main.head, pressed || performance.now()); },
  update,
};

function update(change: ViewUpdate): void {
  const cursor = change.state.selection.main.head;
  if (change.docChanged) {
    const key = pressed;
    if (key && ghostOf(change.state)) painted((now) => { kept.clear(); kept.set(key, now); });
    instructed.follow(change.changes);
    findings.follow(change.changes);
  } else if (change.selectionSet) live.moved(cursor);
  if (change.transactions.some((t) => t.effects.some((e) => e.is(setJump)))) drawJump();
}

function drawJump(): void {
  const target = view.state.field(jump), box = need("jump");
  box.hidden = !target;
  if (!target) { box.replaceChildren(); return; }
  const line = view.state.doc.lineAt(target.from).number, more = target.others ? `, then ${target.others} more` : "";
  box.replaceChildren(
    h("button", { type: "button", class: "small", click: () => { view.focus(); jumpKey(view); } }, "Next edit (Tab)"),
    ` ${target.title} (line ${line}${more}) `,
    h("button", { type: "button", class: "small", "aria-label": "Dismiss the next edit", click: () => {
      live.feedback(target.id, "dismissed");
      view.dispatch({ effects: setJump.of(null) });
      view.focus();
    } }, "✕"),
  );
}

function suggested(what: Suggested, stamp: Stamp): void {
  const state = view.state, { head, empty } = state.selection.main;
  const before = what.from <= head ? state.doc.sliceString(what.from, head) : null;
  if (!empty || before === null || what.to < head || !what.text.startsWith(before)) {
    silent({ ...stamp, reason: "cursor_moved" });
    return;
  }
  const text = what.text.slice(before.length), shown = ghostOf(state);
  const stands = shown?.text === text && shown.at === head;
  if (text && !stands) view.dispatch({ effects: setGhost.of({ id: what.id, at: head, to: what.to, text }) });
  const drawn = performance.now();
  live.feedback(what.id, "shown");
  set(silence, "");
  announce(`Suggestion: ${text.slice(0, 200)}`, 900);
  painted((now) => { receipts.add(stamp, (stands && kept.get(stamp.key)) || now, drawn); });
}

function silent(stamp: Stamp): void {
  if (stamp.reason !== "superseded" && stamp.reason !== "stale_version") {
    if (ghostOf(view.state)) view.dispatch({ effects: setGhost.of(null) });
    set(silence, stamp.reason.replaceAll("_", " "));
    receipts.add(stamp, performance.now());
  }
}

/** A larger model has read the same text in a pause of the keys: what it is sure of stands there a shade firmer,
 * what it changes fades in; the cursor, the lines and what was typed stay where they are. */
function secondMind(what: Revised): void {
  const ghost = revised(view.state, what, performance.now());
  if (!ghost) return;
  view.dispatch({ effects: setGhost.of(ghost) });
  if (what.verdict === "offered") live.feedback(what.id, "shown");
  silence.textContent = `${what.verdict} by ${what.model}`;
  if (what.verdict !== "confirmed") announce(`Suggestion: ${what.text.slice(0, 200)}`, 900);
}

addEventListener("keydown", (event) => { pressed = event.timeStamp; }, true);
addEventListener("keyup", () => { pressed = 0; }, true);

view = makeEditor(need("editor"), EXAMPLE, "python", keys, reports);
findings.view = view;
live = new Live(view.state.doc, {
  state: (state) => {
    const chip = need("state");
    chip.textContent = { open: "connected", lost: "reconnecting", connecting: "connecting", refused: "key needed" }[state];
    chip.dataset.state = state;
    if (state === "open") void models();
    if (state === "refused") openKey();
  },
  ready: (model, _warm, note) => { need("model").textContent = model; silence.textContent = note.replaceAll("_", " "); },
  suggested, silent, revised: secondMind,
  jump: (target) => { view.dispatch({ effects: setJump.of(target) }); announce(`Next edit: ${target.title}. Tab goes there.`, 900); },
  noJump: (id) => { if (view.state.field(jump)?.id === id) view.dispatch({ effects: setJump.of(null) }); },
  findings: (kind, found) => { findings.set(kind, found); },
  failed: (message) => { silence.textContent = message; announce(message); },
});
instructed = new Instructed(view, live);
const turns = new Turns();
const race = new Race(turns, receipts);
const chatModel = need<HTMLSelectElement>("chat-model");
const chat = new Chat(turns, {
  model: () => chatModel.value || "auto",
  file: () => ({ name: nameInput.value, text: view.state.doc.toString() }),
  insert: (code) => { view.dispatch(view.state.replaceSelection(code)); view.focus(); },
}, receipts);
const tasks = new Tasks();

async function models(): Promise<void> {
  try {
    const answer = await ask("/v1/status");
    if (!answer.ok) return;
    const found = ((await answer.json()) as { models: ModelStatus[] }).models;
    race.offer(found);
    chat.instructing(found.some((m) => m.chat !== false));
    const chosen = chatModel.value, names = ["auto", ...found.filter((m) => m.chat !== false).map((m) => m.name)];
    chatModel.replaceChildren(...names.map((name) => h("option", { value: name }, name)));
    if (names.includes(chosen)) chatModel.value = chosen;
    await tasks.look();
  } catch { /* the connection went; it comes back by itself */ }
}

// Files

function show(name: string, text: string): void {
  nameInput.value = name;
  lineEnd = text.includes("\r\n") ? "\r\n" : "\n";
  const language = languageOf(name);
  view.setState(freshState(text, language, keys, reports));
  findings.set("audit", []);
  findings.set("problems", []);
  drawJump();
  live.show(name, language, view.state.doc, 0);
  view.focus();
}

async function open(file: File | undefined): Promise<void> {
  if (!file) return;
  if (file.size > 32 << 20) { silence.textContent = "Files above 32 MB are not opened here."; return; }
  show(file.name, await file.text());
}

function whole(doc: Text): string { return doc.sliceString(0, doc.length, lineEnd); }

need("open-button").addEventListener("click", () => { need("file").click(); });
need<HTMLInputElement>("file").addEventListener("change", (event) => {
  const input = event.target as HTMLInputElement;
  void open(input.files?.[0]).then(() => { input.value = ""; });
});
addEventListener("dragover", (event) => { if (event.dataTransfer?.types.includes("Files")) event.preventDefault(); });
addEventListener("drop", (event) => {
  if (!event.dataTransfer?.files.length) return;
  event.preventDefault();
  void open(event.dataTransfer.files[0]);
});
need("save").addEventListener("click", () => {
  const address = URL.createObjectURL(new Blob([whole(view.state.doc)], { type: "text/plain" }));
  h("a", { href: address, download: nameInput.value || "untitled.txt" }).click();
  setTimeout(() => { URL.revokeObjectURL(address); }, 10_000);
});
nameInput.addEventListener("change", () => {
  const language = languageOf(nameInput.value);
  view.dispatch(recolour(language, view.state.doc.length));
  live.show(nameInput.value, language, view.state.doc, view.state.selection.main.head);
});

// Key, help, theme

function openKey(): void {
  const dialog = need<HTMLDialogElement>("key-dialog");
  if (!dialog.open) dialog.showModal();
}
need<HTMLDialogElement>("key-dialog").addEventListener("close", () => {
  const dialog = need<HTMLDialogElement>("key-dialog"), input = need<HTMLInputElement>("key-input");
  if (dialog.returnValue === "ok" && input.value !== key()) { setKey(input.value.trim()); live.socket.connect(); turns.reconnect(); }
  input.value = "";
});
need("key-button").addEventListener("click", openKey);
need("help-button").addEventListener("click", () => { need<HTMLDialogElement>("help").showModal(); });
need("theme").addEventListener("click", toggleTheme);
wireTabs();

view.dispatch({ selection: { anchor: view.state.doc.length } });
live.show(nameInput.value, "python", view.state.doc, view.state.doc.length);
view.focus();
