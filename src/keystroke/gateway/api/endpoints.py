"""What each address does.

One small function an endpoint: read, ask the layer that knows, write. Nothing is decided here but the
form of the answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from typing import Any, cast

from starlette.requests import Request
from starlette.responses import Response as HttpResponse
from starlette.responses import StreamingResponse

from keystroke.config import AssistSettings
from keystroke.errors import InputError, KeystrokeError
from keystroke.gateway.access.keys import Caller, KeyRing
from keystroke.gateway.access.security import bearer_offered, check_host, check_origin, check_page
from keystroke.gateway.api.completions import TextRun, Texts
from keystroke.gateway.api.infill import infill_body, infill_request
from keystroke.gateway.api.models import catalog
from keystroke.gateway.api.openapi import document
from keystroke.gateway.api.page import asset_response, index_response
from keystroke.gateway.api.response_run import ResponseRun
from keystroke.gateway.api.responses import Responses
from keystroke.gateway.api.status import load_lines, status
from keystroke.gateway.record import metrics
from keystroke.gateway.transport.http import (
    PROGRESS,
    Answering,
    EventStream,
    error_response,
    json_response,
    read_body,
    text_response,
)
from keystroke.gateway.work.priority import Priority
from keystroke.gateway.work.routing import Task
from keystroke.gateway.work.service import Service
from keystroke.protocol import codec


class Endpoints:
    def __init__(
        self,
        service: Service,
        keys: KeyRing,
        *,
        host: str,
        origins: tuple[str, ...],
        max_body: int,
        assist: AssistSettings | None = None,
    ) -> None:
        self.service = service
        self.keys = keys
        self.responses = Responses(service)
        self.texts = Texts(service, assist)
        self._host = host
        self._origins = origins
        self._max_body = max_body

    def admit(self, headers: Any, subprotocols: Sequence[str] = ()) -> Caller:
        """Who asks, from the headers alone. A page cannot set a header on a socket, so its key may come as a
        subprotocol there. Raises Unauthorized or Forbidden."""
        host = headers.get("host")
        check_host(host, self._host, self._origins)
        check_origin(headers.get("origin"), host, self._origins)
        return self.keys.check(headers.get("authorization") or bearer_offered(subprotocols))

    def admit_to_files(self, headers: Any) -> Caller:
        """`admit`, for what reads and changes files of this machine."""
        caller = self.admit(headers)
        check_page(headers.get("origin"), headers.get("host"), self._origins)
        return caller

    # Responses

    async def create_response(self, request: Request) -> HttpResponse:
        caller = self.admit(request.headers)
        wanted = codec.decode_create(await read_body(request, self._max_body))
        background = bool(wanted.background)
        if wanted.stream:
            stream = EventStream(named=True)
            stream.detached = background
            stream.run = await self.responses.create(wanted, caller, stream.sink, on_done=stream.finish)
            stream.headers.update(self._limit_headers(caller, stream.run.entry.name))
            return stream
        run = await self.responses.create(wanted, caller, lambda _messages: None)
        headers = self._limit_headers(caller, run.entry.name)
        if background:
            return json_response(run.response, headers=headers)
        response = run.response
        await Answering(request).until(run.over, run.cancel)
        if response.status == "failed" and run.answer is not None and run.answer.outcome is not None:
            error = run.answer.outcome.error
            if error is not None:
                raise error
        return json_response(response, headers=headers)

    async def fetch_response(self, request: Request) -> HttpResponse:
        caller = self.admit(request.headers)
        if request.query_params.get("stream", "").lower() in ("true", "1"):
            return self._resumed(request, caller)
        return json_response(await self.responses.fetch(request.path_params["response_id"], caller))

    def _resumed(self, request: Request, caller: Caller) -> HttpResponse:
        """The events of a response behind `starting_after`, and what follows."""
        after = request.query_params.get("starting_after", "-1")
        if not after.removeprefix("-").isdecimal() or len(after) > 12:
            raise InputError("starting_after must be the number of an event.", param="starting_after")
        wanted = request.path_params["response_id"]
        replay = self.responses.replays.find(wanted, caller)
        stream = EventStream(named=True)
        stream.run = run = cast("ResponseRun", replay.run)
        replay.take_up(stream.sink, wanted, int(after))
        run.on_done = stream.finish
        if run.over.is_set():
            stream.finish()
        return stream

    async def cancel_response(self, request: Request) -> HttpResponse:
        caller = self.admit(request.headers)
        return json_response(await self.responses.cancel(request.path_params["response_id"], caller))

    async def delete_response(self, request: Request) -> HttpResponse:
        caller = self.admit(request.headers)
        wanted = request.path_params["response_id"]
        await self.responses.forget(wanted, caller)
        return json_response({"id": wanted, "object": "response", "deleted": True})

    # Chat, completions, infill

    async def chat(self, request: Request) -> HttpResponse:
        caller = self.admit(request.headers)
        wanted = codec.decode_chat(await read_body(request, self._max_body))
        if wanted.stream:
            stream = EventStream(named=False, progress=PROGRESS in request.headers)
            return await self._stream(stream, self.texts.chat(wanted, caller, stream.sink), caller)
        run = await self.texts.chat(wanted, caller, lambda _messages: None)
        return await self._whole(request, run, caller)

    async def completions(self, request: Request) -> HttpResponse:
        caller = self.admit(request.headers)
        wanted = codec.decode_completion(await read_body(request, self._max_body))
        edit = await Answering(request).whole(self.texts.foreign(wanted, caller))
        if edit is not None:
            return text_response(edit, stream=bool(wanted.stream))
        if wanted.stream:
            stream = EventStream(named=False, progress=PROGRESS in request.headers)
            return await self._stream(stream, self.texts.complete(wanted, caller, stream.sink), caller)
        run = await self.texts.complete(wanted, caller, lambda _messages: None)
        return await self._whole(request, run, caller)

    async def infill(self, request: Request) -> HttpResponse:
        caller = self.admit(request.headers)
        wanted = codec.decode_infill(await read_body(request, self._max_body))
        completion, extra = infill_request(wanted)
        run = await self.texts.complete(completion, caller, lambda _messages: None, extra=extra)
        if wanted.t_max_predict_ms:
            run.answer.limit_time(wanted.t_max_predict_ms / 1e3)
        await Answering(request).until(run.over, run.cancel)
        if run.error is not None and not run.answer.timed_out:
            raise run.error
        return json_response(infill_body(run))

    async def _stream(self, stream: EventStream, making: Any, caller: Caller) -> HttpResponse:
        stream.run = await making
        stream.run.answer.after = stream.finish
        stream.headers.update(self._limit_headers(caller, stream.run.answer.work.model))
        return stream

    async def _whole(self, request: Request, run: TextRun, caller: Caller) -> HttpResponse:
        await Answering(request).until(run.over, run.cancel)
        if run.error is not None:
            raise run.error
        return json_response(run.serializer.body, headers=self._limit_headers(caller, run.answer.work.model))

    # The playground

    async def page(self, request: Request) -> HttpResponse:
        check_host(request.headers.get("host"), self._host, self._origins)
        return index_response()

    async def page_file(self, request: Request) -> HttpResponse:
        return asset_response(request, request.path_params["name"])

    # About the server

    async def models(self, request: Request) -> HttpResponse:
        self.admit(request.headers)
        return json_response(catalog(self.service.registry))

    async def load(self, request: Request) -> HttpResponse:
        """Load a model, with progress as lines of JSON."""
        self.admit(request.headers)
        wanted = codec.decode_load(await read_body(request, self._max_body))
        routing = self.service.choose(wanted.model, lambda: Task(Priority.CHAT, converses=True))
        return StreamingResponse(load_lines(self.service, routing.model), media_type="application/x-ndjson")

    async def status(self, request: Request) -> HttpResponse:
        self.admit(request.headers)
        return json_response(status(self.service, version("keystroke")))

    async def health(self, request: Request) -> HttpResponse:
        """That the server runs, to anybody; what it serves, to those who may ask it."""
        try:
            self.admit(request.headers)
        except KeystrokeError:
            return json_response({"status": "ok"})
        return json_response({"status": "ok", "models": sorted(self.service.registry.entries)})

    async def metrics(self, request: Request) -> HttpResponse:
        self.admit(request.headers)
        for entry in self.service.registry.entries.values():
            scheduler = entry.scheduler
            self.service.metrics.sample(entry.name, scheduler.waiting, scheduler.running, entry.stats())
        return HttpResponse(self.service.metrics.render(), media_type=metrics.CONTENT_TYPE)

    async def openapi(self, _request: Request) -> HttpResponse:
        return json_response(document())

    def _limit_headers(self, caller: Caller, model: str) -> dict[str, str]:
        return self.service.limit_headers(caller, model)

    async def failed(self, _request: Request, error: Exception) -> HttpResponse:
        assert isinstance(error, KeystrokeError)
        self.service.metrics.rejected.labels(error.code).inc()
        return error_response(error)
