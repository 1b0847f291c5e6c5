"""The handlers of the HTTP routes, except those of tasks.

A handler gets an authenticated `ApiRequest` with its decoded body, calls the layer that does the work, and
returns the reply. Access and decoding are declared in `gateway/routes.py`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Generic, TypeVar

from starlette.requests import Request
from starlette.responses import Response as HttpResponse
from starlette.responses import StreamingResponse

from keystroke.config import AssistSettings
from keystroke.errors import InputError
from keystroke.gateway.access.keys import ANONYMOUS, Caller
from keystroke.gateway.api.choices import Choices, starting_choices
from keystroke.gateway.api.completions import TextCompletions, TextRun
from keystroke.gateway.api.infill import infill_body, infill_request
from keystroke.gateway.api.models import model_catalog, models_etag
from keystroke.gateway.api.page import asset_response, index_response
from keystroke.gateway.api.response_request import TURN_STATE, turn_state
from keystroke.gateway.api.response_run import ResponseRun
from keystroke.gateway.api.responses import Responses
from keystroke.gateway.api.status import load_lines, server_status
from keystroke.gateway.record import metrics
from keystroke.gateway.tasks.manager import TaskManager
from keystroke.gateway.transport.http import (
    CHAT,
    PROGRESS,
    PROGRESS_INTERVAL,
    RESPONSES,
    EventStream,
    StreamFormat,
    json_response,
    run_or_cancel,
    text_response,
    wait_or_cancel,
)
from keystroke.gateway.work.priority import Priority
from keystroke.gateway.work.routing import RoutingRequest
from keystroke.gateway.work.service import Service
from keystroke.protocol.faults import ModelNotFound, NoSuitableModel, ResponseNotFound
from keystroke.protocol.requests import ChatRequest, CompletionRequest, CreateRequest, InfillRequest
from keystroke.protocol.status import LoadRequest

Body = TypeVar("Body")
Translated = TypeVar("Translated")


@dataclass(frozen=True, slots=True)
class ApiRequest(Generic[Body]):
    """A request whose caller was checked and whose body was decoded."""

    http: Request
    caller: Caller
    body: Body

    def with_body(self, body: Translated) -> ApiRequest[Translated]:
        """The same request in another API's terms."""
        return ApiRequest(self.http, self.caller, body)

    def path_value(self, name: str) -> str:
        value: str = self.http.path_params[name]
        return value

    def query_value(self, name: str, default: str = "") -> str:
        return self.http.query_params.get(name, default)


class Endpoints:
    def __init__(self, service: Service, tasks: TaskManager, assist: AssistSettings | None = None) -> None:
        self.service = service
        self.tasks = tasks
        self.responses = Responses(service)
        self.texts = TextCompletions(service, assist)

    # Responses

    async def create_response(self, call: ApiRequest[CreateRequest]) -> HttpResponse:
        request, caller = call.body, call.caller
        state = turn_state(call.http.headers)
        if request.stream:
            stream = EventStream(RESPONSES)
            begin = self.responses.create(
                request, caller, stream.sink, on_done=stream.finish, turn_state=state
            )
            run = await run_or_cancel(call.http, begin)
            stream.attach(run, self._response_headers(caller, run))
            return stream
        begin = self.responses.create(request, caller, lambda _messages: None, turn_state=state)
        run = await (begin if request.background else run_or_cancel(call.http, begin))
        headers = self._response_headers(caller, run)
        response = run.response
        if not run.background:
            await wait_or_cancel(call.http, run.over, run.cancel)
            if run.failure is not None:
                raise run.failure
        return json_response(response, headers=headers)

    def _response_headers(self, caller: Caller, run: ResponseRun) -> dict[str, str]:
        limits = self.service.limit_headers(caller, run.entry.name)
        etag = models_etag(self.service.registry)
        return {**limits, TURN_STATE: run.affinity, "x-models-etag": etag}

    async def count_input_tokens(self, call: ApiRequest[CreateRequest]) -> HttpResponse:
        return json_response(await self.responses.count_tokens(call.body, call.caller))

    async def compact(self, call: ApiRequest[CreateRequest]) -> HttpResponse:
        work = self.responses.compact(call.body, call.caller)
        return json_response(await run_or_cancel(call.http, work))

    async def refuse_embeddings(self, _call: ApiRequest[None]) -> HttpResponse:
        raise NoSuitableModel(
            "No model here makes embeddings; /v1/embeddings is not served. Use /v1/responses, "
            "/v1/chat/completions or /v1/completions.",
            param="model",
        )

    async def fetch_response(self, call: ApiRequest[None]) -> HttpResponse:
        """The response; with `stream` its events after `starting_after`, then those that follow."""
        response_id = call.path_value("response_id")
        if call.query_value("stream").lower() not in ("true", "1"):
            return json_response(await self.responses.fetch(response_id, call.caller))
        after = call.query_value("starting_after", "-1")
        if not after.removeprefix("-").isdecimal() or len(after) > 12:
            raise InputError("starting_after must be the number of an event.", param="starting_after")
        stream = EventStream(RESPONSES)
        try:
            run = self.responses.find_run(response_id, call.caller)
        except ResponseNotFound:
            run = await self.responses.resume_turn(
                response_id, call.caller, stream.sink, on_done=stream.finish
            )
            stream.attach(run, {})
            return stream
        stream.attach(run, {})
        run.resume_events(stream.sink, response_id, int(after), on_done=stream.finish)
        if run.over.is_set():
            stream.finish()
        return stream

    async def cancel_response(self, call: ApiRequest[None]) -> HttpResponse:
        return json_response(await self.responses.cancel(call.path_value("response_id"), call.caller))

    async def delete_response(self, call: ApiRequest[None]) -> HttpResponse:
        response_id = call.path_value("response_id")
        await self.responses.delete(response_id, call.caller)
        return json_response({"id": response_id, "object": "response", "deleted": True})

    # Chat, completions, infill

    async def chat(self, call: ApiRequest[ChatRequest]) -> HttpResponse:
        return await self.answer_text(call, self.texts.chat)

    async def completions(self, call: ApiRequest[CompletionRequest]) -> HttpResponse:
        request, caller = call.body, call.caller
        edit = await run_or_cancel(call.http, self.texts.foreign(request, caller))
        if edit is not None:
            return text_response(edit, stream=bool(request.stream))
        return await self.answer_text(call, self.texts.complete)

    async def infill(self, call: ApiRequest[InfillRequest]) -> HttpResponse:
        completion, extra = infill_request(call.body)
        run = await self.texts.complete(completion, call.caller, lambda _messages: None, extra=extra)
        if call.body.t_max_predict_ms:
            run.answer.limit_time(call.body.t_max_predict_ms / 1e3)
        await wait_or_cancel(call.http, run.over, run.cancel)
        if run.error is not None and not run.answer.timed_out:
            raise run.error
        return json_response(infill_body(run))

    async def answer_text(
        self,
        call: ApiRequest[Any],
        start: Callable[..., Awaitable[TextRun]],
        form: StreamFormat = CHAT,
        *,
        progress: float | None = None,
    ) -> HttpResponse:
        """The reply to a request that `start` runs: a stream in the given form, or the whole answer.
        `progress`: seconds between notices before the first token, for clients that do not ask for them."""
        begin: Callable[..., Awaitable[TextRun | Choices]] = start
        if (count := getattr(call.body, "n", None) or 1) > 1:
            begin = starting_choices(start, count)
        if call.body.stream:
            if PROGRESS in call.http.headers:
                progress = PROGRESS_INTERVAL
            stream = EventStream(form, progress=progress)
            work = begin(call.body, call.caller, stream.sink, on_done=stream.finish)
            run = await run_or_cancel(call.http, work)
            stream.attach(run, self.service.limit_headers(call.caller, run.work.model))
            return stream
        run = await run_or_cancel(call.http, begin(call.body, call.caller, lambda _messages: None))
        await wait_or_cancel(call.http, run.over, run.cancel)
        if run.error is not None:
            raise run.error
        headers = self.service.limit_headers(call.caller, run.work.model)
        return json_response(run.serializer.body, headers=headers)

    # The playground

    async def page(self, _call: ApiRequest[None]) -> HttpResponse:
        return index_response()

    async def page_file(self, call: ApiRequest[None]) -> HttpResponse:
        return asset_response(call.http, call.path_value("name"))

    # The server itself

    async def models(self, call: ApiRequest[None]) -> HttpResponse:
        etag = f'"{models_etag(self.service.registry)}"'
        if etag in call.http.headers.get("if-none-match", ""):  # a list, or weak
            return HttpResponse(status_code=304, headers={"etag": etag})
        return json_response(model_catalog(self.service.registry), headers={"etag": etag})

    async def model(self, call: ApiRequest[None]) -> HttpResponse:
        name = call.path_value("model")
        listed = model_catalog(self.service.registry)["data"]
        found = next((one for one in listed if one["id"] == name), None)
        if found is None:
            self.service.registry.resolve(name)  # raises, with the names that there are
            raise ModelNotFound(f"{name:.80} is not loaded; request it to load it.", param="model")
        return json_response(found)

    async def load(self, call: ApiRequest[LoadRequest]) -> HttpResponse:
        """Load a model; the progress comes as lines of JSON."""
        chat = RoutingRequest(Priority.CHAT, converses=True)
        routing = self.service.choose(call.body.model, lambda: chat)
        return StreamingResponse(load_lines(self.service, routing.model), media_type="application/x-ndjson")

    async def status(self, _call: ApiRequest[None]) -> HttpResponse:
        return json_response(server_status(self.service, version("keystroke")))

    async def health(self, call: ApiRequest[None]) -> HttpResponse:
        """Whether the server runs; the models only for callers with access to them."""
        if call.caller is ANONYMOUS:
            return json_response({"status": "ok"})
        return json_response({"status": "ok", "models": sorted(self.service.registry.entries)})

    async def metrics(self, _call: ApiRequest[None]) -> HttpResponse:
        for entry in self.service.registry.entries.values():
            scheduler = entry.scheduler
            self.service.metrics.sample(entry.name, scheduler.waiting, scheduler.running, entry.stats())
        return HttpResponse(self.service.metrics.render(), media_type=metrics.CONTENT_TYPE)
