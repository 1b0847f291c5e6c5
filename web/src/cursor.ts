// The cursor's blinking: a class put on and taken off twice a second while nothing else happens. An animation would
// have the browser compose sixty frames a second for it, on the cores that the model needs.

import { EditorView, ViewPlugin, type ViewUpdate } from "@codemirror/view";

const RATE = 600; // ms on, ms off

export const blinking = ViewPlugin.fromClass(class {
  private timer = 0;

  constructor(private readonly view: EditorView) { this.stay(); }

  update(change: ViewUpdate): void {
    if (change.docChanged || change.selectionSet || change.focusChanged) this.stay();
  }

  destroy(): void { clearInterval(this.timer); }

  /** Seen for a while after each key, then blinking as long as the editor has the focus. */
  private stay(): void {
    clearInterval(this.timer);
    this.view.dom.classList.remove("cursor-off");
    if (this.view.hasFocus && !matchMedia("(prefers-reduced-motion: reduce)").matches)
      this.timer = window.setInterval(() => { this.view.dom.classList.toggle("cursor-off"); }, RATE);
  }
});
