// A printable key of a keyboard becomes a change at once. The browser would first edit the page by itself, lay it out,
// and have the editor read back what happened: half of the time between a key and its change on the wire. Whatever is
// not plainly one key and its character (composition, soft keyboards, dictation, corrections) stays the browser's.

import { type Extension, Prec } from "@codemirror/state";
import { EditorView } from "@codemirror/view";

export function typing(): Extension {
  let key = ""; // of the keydown that the next input belongs to
  return Prec.highest(EditorView.domEventHandlers({
    keydown(event) { key = event.ctrlKey || event.metaKey ? "" : event.key; return false; },
    beforeinput(event, view) {
      const { data } = event, expected = key;
      key = "";
      if (event.inputType !== "insertText" || !data || data !== expected || !event.cancelable) return false;
      if (event.isComposing || view.composing || view.compositionStarted || view.state.readOnly) return false;
      view.dispatch(view.state.replaceSelection(data), { userEvent: "input.type", scrollIntoView: true });
      return true; // handled: the browser does not edit
    },
  }));
}
