// The wire's words that the page uses: see schema/live_requests.json and schema/live_events.json.
// Offsets on the wire count code points; in the page they count UTF-16 units (offsets.ts converts).

export interface Delta { start: number; end: number; text: string }

export interface Receipt {
  model: string;
  source?: string;
  prompt_tokens?: number;
  reused_tokens: number;
  computed_tokens: number;
  output_tokens: number;
  queue_ms: number;
  prefill_ms: number;
  decode_ms: number;
  total_ms: number;
  network_ms?: number;
  first_token_ms?: number;
  drafted_tokens?: number;
  accepted_tokens?: number;
}

export type Verdict = "confirmed" | "lengthened" | "replaced" | "offered";

export interface Fix { title: string; edits: Delta[] }
export interface Finding {
  rule?: string; code?: string; cwe?: number; severity: string; message: string;
  start: number; end: number; fixes: Fix[]; suggestions?: Fix[];
}
export interface Change { buffer: string; start: number; end: number; text: string }
export interface ErrorDetail { type: string; code: string; message: string }

export type LiveEvent =
  | { type: "ready"; buffer: string; version: number; model: string; warm: boolean; note: string; receipt: Receipt }
  | { type: "resync"; buffer: string; reason: string }
  | { type: "suggestion"; id: string; buffer: string; version: number; start: number; end: number; text: string; done: boolean; receipt: Receipt }
  | { type: "suggestion.revised"; id: string; buffer: string; version: number; verdict: Verdict; start: number; end: number; text: string; receipt: Receipt }
  | { type: "not_shown"; id: string; buffer: string; version: number; reason: string; receipt: Receipt }
  | { type: "next_edit"; id: string; buffer: string; version: number; cause: string; title: string; change: Change; others: Change[] }
  | { type: "next_edit.dropped"; id: string; buffer: string; reason: string }
  | { type: "diagnostics"; buffer: string; version: number; findings: Finding[]; elapsed_ms: number }
  | { type: "problems"; id: string; buffer: string; version: number; problems: Finding[] }
  | { type: "changes"; id: string; buffer: string; version: number; title: string; files: { buffer?: string; path?: string; edits: Delta[] }[] }
  | { type: "error"; status: number; error: ErrorDetail; id?: string; buffer?: string };

export interface Response {
  id: string; status: string; model: string;
  error?: { code: string; message: string } | null;
  incomplete_details?: { reason: string } | null;
  queue_position?: number; receipt?: Receipt; routing?: { model: string; role: string; reason: string };
}
export type ResponseEvent =
  | { type: "response.output_text.delta"; delta: string; stream_id?: string }
  | { type: "error"; status: number; error: ErrorDetail; stream_id?: string }
  | { type: string; response?: Response; stream_id?: string; message?: string };

export interface ModelStatus {
  name: string; role: string; state: "loaded" | "loading" | "offered" | "remote";
  chat: boolean | null; parameters: number | null; precision: string | null;
}
