// The key, and asking the server over HTTP. The key lives in sessionStorage: this tab's, gone with it. It may
// come in the address after #key=, which browsers never send; it is taken out of the address at once.

const NAME = "keystroke.key";

export function takeKeyFromAddress(): void {
  const found = /[#&]key=([^&]+)/.exec(location.hash);
  if (!found) return;
  sessionStorage.setItem(NAME, decodeURIComponent(found[1]));
  history.replaceState(null, "", location.pathname + location.search);
}

export function key(): string { return sessionStorage.getItem(NAME) ?? ""; }

export function setKey(value: string): void {
  if (value) sessionStorage.setItem(NAME, value);
  else sessionStorage.removeItem(NAME);
}

/** What a socket offers: browsers cannot set its headers, so the key travels as a subprotocol. */
export function subprotocols(): string[] {
  if (!key()) return ["keystroke"];
  const bytes = new TextEncoder().encode(key());
  const coded = btoa(String.fromCharCode(...bytes)).replace(/\+/g, "-").replace(/\//g, "_").replace(/=+$/, "");
  return ["keystroke", `keystroke.bearer.${coded}`];
}

export function ask(path: string, body?: unknown, signal?: AbortSignal, method?: string): Promise<globalThis.Response> {
  const headers: Record<string, string> = {};
  if (key()) headers.authorization = `Bearer ${key()}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  return fetch(path, {
    method: method ?? (body === undefined ? "GET" : "POST"), headers, signal,
    body: body === undefined ? undefined : JSON.stringify(body),
  });
}

/** The data of server-sent events, parsed, as they come. */
export async function* streamed<T>(answer: globalThis.Response): AsyncGenerator<T> {
  if (!answer.ok || !answer.body) throw new Error(await sentence(answer));
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let held = ""; ;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (held + value).split("\n");
    held = lines.pop() ?? "";
    for (const line of lines) if (line.startsWith("data: {")) yield JSON.parse(line.slice(6)) as T;
  }
}

export async function sentence(answer: globalThis.Response): Promise<string> {
  try { return (await answer.json()).error.message as string; } catch { return `the server answered ${answer.status}`; }
}
