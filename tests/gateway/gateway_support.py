"""What gateway tests share: an echo model with a template, and a real server in a thread."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from keystroke.config import (
    AssistSettings,
    LearnSettings,
    NamedModel,
    PathSettings,
    ServerSettings,
    Settings,
    SpeculationSettings,
)
from keystroke.engine.echo import END_OF_TURN, EOS, SPECIAL, EchoEngine, Script
from keystroke.engine.model import Model
from keystroke.engine.templates import ChatTemplate, FimTemplate
from keystroke.engine.tokenizer.byte_tokens import ByteTokenizer
from keystroke.gateway.app import Gateway, uvicorn_config
from keystroke.gateway.record.store import Store, default_url
from keystroke.gateway.transport.socket import SocketLimits
from keystroke.gateway.work.registry import ModelRegistry, local_entry
from prompt_server import PromptServer

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]\n{{ m.content }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]\n{% endif %}"
)
FIM = {"<fim_prefix>": 259, "<fim_suffix>": 260, "<fim_middle>": 261}


def scripted_model(script: Script | None = None, name: str = "echo", **costs: Any) -> Model:
    """A byte-level model that answers by `script`, with a chat template and fill-in-the-middle."""
    return Model(
        name=name,
        engine=EchoEngine(script, **costs),
        tokenizer=ByteTokenizer({**SPECIAL, **FIM}, eos=EOS, vocab_size=320),
        chat=ChatTemplate(TEMPLATE),
        fim=FimTemplate("<fim_prefix>", "<fim_suffix>", "<fim_middle>", stops=frozenset({EOS, END_OF_TURN})),
    )


def last_user(prompt: str) -> str:
    """What the user said last, read back from a rendered prompt."""
    return prompt.rsplit("[user]\n", 1)[-1].split("\n[assistant]", 1)[0]


def echo(prompt: str) -> str:
    return f"You said: {last_user(prompt)}"


@dataclass
class RunningServer:
    gateway: Gateway
    port: int
    engines: dict[str, EchoEngine]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def ws(self) -> str:
        return f"ws://127.0.0.1:{self.port}/v1/responses"

    def settled(self, timeout: float = 60.0) -> bool:
        """Wait until nothing runs; True when every session was given back."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            busy = any(e.live for e in self.engines.values()) or self.gateway.service.active_work
            entries = self.gateway.service.registry.entries.values()
            if not busy and not any(e.scheduler.waiting or e.scheduler.running for e in entries):
                return True
            time.sleep(0.005)
        return False


@contextmanager
def serving(
    *models: Model,
    roles: dict[str, str] | None = None,
    tables: dict[str, NamedModel] | None = None,
    server: ServerSettings | None = None,
    folder: Path | None = None,
    socket_limits: SocketLimits | None = None,
    concurrent: int = 8,
    speculation: bool = False,
    port: int = 0,
    registry: ModelRegistry | None = None,
    learn: LearnSettings | None = None,
    assist: AssistSettings | None = None,
) -> Iterator[RunningServer]:
    """A real server on a free port, in a thread with a loop of its own; for `models`, or a whole registry."""
    settings = Settings(
        server=replace(server or ServerSettings(), port=port, drain_s=0.2),
        paths=PathSettings(state=folder) if folder else PathSettings(),
        speculation=SpeculationSettings(enabled=speculation),  # off: a step is a token
        learn=learn or LearnSettings(),
        assist=assist or AssistSettings(),
    )
    entries = [
        local_entry(
            m.name,
            m,
            role=(roles or {}).get(m.name, "fast"),
            named=(tables or {}).get(m.name, NamedModel(concurrent=concurrent)),
            max_queue=settings.server.max_queue,
        )
        for m in models
    ]
    store = Store(default_url(folder)) if folder is not None else None
    gateway = Gateway(registry or ModelRegistry(entries), settings, store=store, socket_limits=socket_limits)
    config = uvicorn_config(gateway)
    config.lifespan = "on"
    uv = PromptServer(config)
    thread = threading.Thread(target=lambda: asyncio.run(uv.serve()), daemon=True)
    thread.start()
    while not uv.started:
        if not thread.is_alive():
            raise RuntimeError("the server did not start")
        time.sleep(0.005)
    bound = uv.servers[0].sockets[0].getsockname()[1]
    engines = {m.name: m.engine for m in models if isinstance(m.engine, EchoEngine)}
    try:
        yield RunningServer(gateway, bound, engines)
    finally:
        uv.stop()
        thread.join(10)
        assert not thread.is_alive(), "the server did not stop"
