"""The ACP agent: runs each prompt as a task of the gateway.

Later prompts of a session resume its task with its conversation. The gateway decides what a task may do, and
the editor asks the user for permission. Cancelling a prompt stops its task within a step.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from acp import PROTOCOL_VERSION, RequestError
from acp.interfaces import Client
from acp.schema import (
    AgentCapabilities,
    AllowedOutcome,
    Implementation,
    InitializeResponse,
    NewSessionResponse,
    PromptCapabilities,
    PromptResponse,
    SessionMode,
    SessionModeState,
    SetSessionModeResponse,
)

from keystroke.clients.acp.updates import ALLOW, OPTIONS, Updates
from keystroke.clients.task_client import TaskClient
from keystroke.errors import KeystrokeError
from keystroke.protocol import tasks as wire

MODES = {
    "all": ("Ask before changes", "Every change and every command needs approval."),
    "commands": (
        "Ask before commands",
        "Changes are applied at once and can be undone; commands need approval.",
    ),
    "never": ("Do not ask", "Commands run in the sandbox without asking."),
}


@dataclass(slots=True)
class AcpSession:
    cwd: str
    approve: str = "all"
    task: str | None = None  # the task that the next prompt resumes
    cancelled: bool = False


class TaskAgent:
    """`options` are fields of every task: model, attempts, check and so on."""

    def __init__(self, client: TaskClient, version: str, options: dict[str, Any] | None = None) -> None:
        self._client, self._version, self._options = client, version, options or {}
        self._sessions: dict[str, AcpSession] = {}
        self._editor: Client | None = None

    def on_connect(self, conn: Client) -> None:
        self._editor = conn

    async def initialize(self, protocol_version: int, **_: Any) -> InitializeResponse:
        return InitializeResponse(
            protocol_version=min(protocol_version, PROTOCOL_VERSION),
            agent_capabilities=AgentCapabilities(
                prompt_capabilities=PromptCapabilities(embedded_context=True)
            ),
            agent_info=Implementation(name="keystroke", title="Keystroke", version=self._version),
        )

    async def authenticate(self, method_id: str, **_: Any) -> None:
        """Nothing to do: the gateway belongs to this user."""

    async def new_session(self, cwd: str, **_: Any) -> NewSessionResponse:
        name = f"session_{secrets.token_hex(8)}"
        session = self._sessions[name] = AcpSession(cwd, self._options.get("approve", "all"))
        modes = [SessionMode(id=key, name=title, description=text) for key, (title, text) in MODES.items()]
        return NewSessionResponse(
            session_id=name, modes=SessionModeState(current_mode_id=session.approve, available_modes=modes)
        )

    async def set_session_mode(self, session_id: str, mode_id: str, **_: Any) -> SetSessionModeResponse:
        if mode_id not in MODES:
            raise RequestError.invalid_params({"message": f"there is no mode {mode_id:.40}"})
        self._session(session_id).approve = mode_id
        return SetSessionModeResponse()

    async def prompt(self, session_id: str, prompt: Sequence[Any], **_: Any) -> PromptResponse:
        session = self._session(session_id)
        session.cancelled = False
        instruction, files = _parse_prompt(prompt, session.cwd)
        if not instruction.strip():
            raise RequestError.invalid_params({"message": "the prompt contains no text"})
        try:
            task, after = await self._start_task(session, instruction, files)
            session.task = task
            ended = await self._stream_task(session_id, session, task, after)
        except KeystrokeError as error:
            await self._send_text(session_id, error.message)
            return PromptResponse(stop_reason="cancelled" if session.cancelled else "refusal")
        stopped = ended is None or ended.status == "interrupted"
        return PromptResponse(stop_reason="cancelled" if stopped else "end_turn")

    async def cancel(self, session_id: str, **_: Any) -> None:
        session = self._session(session_id)
        session.cancelled = True
        if session.task is not None:
            with contextlib.suppress(KeystrokeError):
                await self._client.act(session.task, "cancel")

    def _session(self, session_id: str) -> AcpSession:
        session = self._sessions.get(session_id)
        if session is None:
            raise RequestError.invalid_params({"message": f"there is no session {session_id:.60}"})
        return session

    async def _start_task(self, session: AcpSession, instruction: str, files: list[str]) -> tuple[str, int]:
        """Start or resume the task of a prompt. Returns its id and the last sequence number before it."""
        if session.task is not None:
            before = await self._client.get(session.task)
            if before.status not in ("queued", "working", "asking"):
                await self._client.act(session.task, "resume", instruction=instruction)
                return session.task, before.sequence_number
        fields = {**self._options, "approve": session.approve}
        if files:
            fields["files"] = files
        return (await self._client.create(session.cwd, instruction, **fields)).id, 0

    async def _stream_task(
        self, session_id: str, session: AcpSession, task: str, after: int
    ) -> wire.Task | None:
        assert self._editor is not None
        updates = Updates(lambda path: str(Path(session.cwd) / path))
        async with contextlib.aclosing(self._client.events(task, after)) as events:
            async for event in events:
                for update in updates.from_event(event):
                    await self._editor.session_update(session_id, update)
                if isinstance(event, wire.TaskAsked):
                    await self._request_permission(session_id, session, task, event.question, updates)
                elif isinstance(event, wire.TaskEnded):
                    return event.task
        return None

    async def _request_permission(
        self, session_id: str, session: AcpSession, task: str, question: wire.TaskQuestion, updates: Updates
    ) -> None:
        assert self._editor is not None
        read = lambda path: _read(Path(session.cwd) / path)  # noqa: E731
        call = await asyncio.to_thread(updates.permission_request, question, read)
        answer = await self._editor.request_permission(session_id, call, list(OPTIONS))
        yes = isinstance(answer.outcome, AllowedOutcome) and answer.outcome.option_id == ALLOW
        with contextlib.suppress(KeystrokeError):  # it was stopped or answered elsewhere meanwhile
            await self._client.act(task, "approve" if yes else "reject", question=question.id)

    async def _send_text(self, session_id: str, sentence: str) -> None:
        from acp import helpers

        if self._editor is not None:
            await self._editor.session_update(session_id, helpers.update_agent_message_text(f"{sentence}\n"))


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode()
    except (OSError, ValueError):
        return ""


def _parse_prompt(prompt: Sequence[Any], cwd: str) -> tuple[str, list[str]]:
    """The text of a prompt and the workspace files it refers to."""
    texts, files = [], []
    for block in prompt:
        if block.type == "text":
            texts.append(block.text)
        elif block.type in ("resource_link", "resource"):
            uri = str(block.uri if block.type == "resource_link" else block.resource.uri)
            path = uri.removeprefix("file://")
            with contextlib.suppress(ValueError):
                files.append(Path(path).relative_to(cwd).as_posix())
    return "\n".join(texts), list(dict.fromkeys(files))
