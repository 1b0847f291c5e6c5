// One WebSocket that comes back by itself: at once, then after growing pauses, and as soon as the machine is
// online again. What to say first on a new connection is its user's; nothing is queued while there is none.

import { ask, subprotocols } from "./access";

export type State = "connecting" | "open" | "lost" | "refused";

export interface Listener<E> {
  opened(): void;
  event(event: E, received: number): void;
  changed(state: State): void;
}

const FIRST_PAUSE = 200, LONGEST_PAUSE = 8000;

export class Socket<E> {
  state: State = "connecting";
  private socket: WebSocket | null = null;
  private pause = FIRST_PAUSE;
  private timer = 0;

  constructor(private readonly path: string, private readonly listener: Listener<E>) {
    addEventListener("online", () => { if (this.state !== "open") this.connect(); });
    this.connect();
  }

  connect(): void {
    clearTimeout(this.timer);
    this.socket?.close();
    this.become(this.state === "open" ? "lost" : this.state);
    const address = new URL(this.path, location.href);
    address.protocol = address.protocol.replace("http", "ws");
    const socket = new WebSocket(address, subprotocols());
    this.socket = socket;
    socket.onopen = () => { this.pause = FIRST_PAUSE; this.become("open"); this.listener.opened(); };
    socket.onmessage = (message: MessageEvent<string>) => {
      this.listener.event(JSON.parse(message.data) as E, performance.now());
    };
    socket.onclose = () => { if (this.socket === socket) void this.lost(); };
  }

  send(message: unknown): boolean {
    if (this.socket?.readyState !== WebSocket.OPEN) return false;
    this.socket.send(JSON.stringify(message));
    return true;
  }

  private async lost(): Promise<void> {
    this.become("lost");
    this.timer = window.setTimeout(() => { this.connect(); }, this.pause * (0.75 + Math.random() / 2));
    this.pause = Math.min(this.pause * 2, LONGEST_PAUSE);
    try { // a refused upgrade looks like a lost one; asking over HTTP tells them apart
      const status = (await ask("/v1/models")).status;
      if (status === 401 || status === 403) { clearTimeout(this.timer); this.become("refused"); }
    } catch { /* not there: the timer tries again */ }
  }

  private become(state: State): void {
    if (state === this.state && state !== "lost") return;
    this.state = state;
    this.listener.changed(state);
  }
}
