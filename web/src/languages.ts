// Which language a file is in, by its name, and how it is coloured. Stream modes: a tenth of a grammar's size.

import { StreamLanguage } from "@codemirror/language";
import { c, cpp, java } from "@codemirror/legacy-modes/mode/clike";
import { go } from "@codemirror/legacy-modes/mode/go";
import { javascript, typescript } from "@codemirror/legacy-modes/mode/javascript";
import { python } from "@codemirror/legacy-modes/mode/python";
import type { Extension } from "@codemirror/state";

const MODES: Record<string, Extension> = {
  python: StreamLanguage.define(python), javascript: StreamLanguage.define(javascript),
  typescript: StreamLanguage.define(typescript), c: StreamLanguage.define(c), cpp: StreamLanguage.define(cpp),
  java: StreamLanguage.define(java), go: StreamLanguage.define(go),
};
const ENDINGS: Record<string, string> = {
  py: "python", pyi: "python", js: "javascript", mjs: "javascript", jsx: "javascript", ts: "typescript", tsx: "typescript",
  c: "c", h: "c", cc: "cpp", cpp: "cpp", hpp: "cpp", java: "java", go: "go",
};

export function languageOf(name: string): string {
  return ENDINGS[name.split(".").pop()?.toLowerCase() ?? ""] ?? "";
}

export function colours(language: string): Extension { return MODES[language] ?? []; }
