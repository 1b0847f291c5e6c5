// Elements from data. Text only ever becomes text nodes: nothing here parses markup, so no file, name or
// answer can become part of the page's code.

type Child = Node | string | null | undefined | false;
type Attributes = Record<string, string | number | boolean | ((event: never) => void) | undefined>;

export function h<K extends keyof HTMLElementTagNameMap>(
  tag: K, attributes: Attributes = {}, ...children: Child[]
): HTMLElementTagNameMap[K] {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === false) continue;
    if (typeof value === "function") element.addEventListener(name, value as EventListener);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children) if (child) element.append(child);
  return element;
}

export function need<T extends HTMLElement>(id: string): T {
  const found = document.getElementById(id);
  if (!found) throw new Error(`the page has no #${id}`);
  return found as T;
}

/** Say it in this element; what says so already is left alone, since replacing it costs a layout. */
export function set(element: HTMLElement, text: string): void {
  if (element.textContent !== text) element.textContent = text;
}

let saying = 0;
/** Tell a screen reader, politely; the last of several in a short while. */
export function announce(text: string, wait = 0): void {
  clearTimeout(saying);
  saying = window.setTimeout(() => { need("announcer").textContent = text; }, wait);
}

/** After the frame that shows what was just changed. */
export function painted(then: (now: number) => void): void {
  requestAnimationFrame(() => {
    const channel = new MessageChannel();
    channel.port1.onmessage = () => { then(performance.now()); };
    channel.port2.postMessage(0);
  });
}

/** Follow a stream's end unless the reader scrolled away from it. */
export function following(box: HTMLElement, change: () => void): void {
  const near = box.scrollHeight - box.scrollTop - box.clientHeight < 40;
  change();
  if (near) box.scrollTop = box.scrollHeight;
}

/** A chat answer: prose and fenced code, as text. `use` is offered for each block of code. */
export function prose(text: string, use?: (code: string) => void): Node[] {
  const nodes: Node[] = [];
  for (const [place, part] of text.split(/^```/m).entries()) {
    if (place % 2 === 0) {
      if (part.trim()) nodes.push(h("p", {}, part.replace(/^\n|\n$/g, "")));
      continue;
    }
    const code = part.slice(part.indexOf("\n") + 1).replace(/\n$/, "");
    nodes.push(h("pre", { tabindex: 0 }, h("code", {}, code)));
    if (use) nodes.push(h("button", { type: "button", class: "small", click: () => { use(code); } }, "Insert into the file"));
  }
  return nodes;
}
