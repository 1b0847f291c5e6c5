"""Streams from a real server: what arrives, in what order, and what a fault turns into."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Iterator

import pytest
from openai_server import DONE, USAGE, OpenAIServer, answer, chat, delta, event, running, stream, text

from keystroke.engine.base import Interrupt, Sampling
from keystroke.engine.generation import Chunk, Finish, GenerationParams
from keystroke.engine.remote import (
    BlockingModel,
    Endpoint,
    RemoteModel,
    RemoteReasoning,
    StreamItem,
    ToolCallDelta,
    Usage,
)
from keystroke.errors import (
    ConfigError,
    ContextOverflow,
    EngineError,
    Forbidden,
    KeystrokeError,
    NotFound,
    RateLimited,
    Unauthorized,
    Unavailable,
    UnsupportedModel,
    UsageError,
)

HELLO = [{"role": "user", "content": "hi"}]
QUICK = {"connect_timeout": 2.0, "first_token_timeout": 20.0, "read_timeout": 20.0}


@pytest.fixture
def server() -> Iterator[OpenAIServer]:
    with running() as started:
        yield started


def remote(server: OpenAIServer, model: str = "test-model", **settings: object) -> RemoteModel:
    return RemoteModel(Endpoint(server.url, **{**QUICK, **settings}), model)  # type: ignore[arg-type]


async def collect(items: AsyncGenerator[StreamItem, None]) -> list[StreamItem]:
    return [item async for item in items]


def said(items: list[StreamItem]) -> str:
    return "".join(item.text for item in items if isinstance(item, Chunk))


async def test_a_chat_is_its_pieces_then_usage_then_one_chunk_with_finish(server: OpenAIServer) -> None:
    async with remote(server) as model:
        items = await collect(model.stream_chat(HELLO))
    assert items == [Chunk("Hello"), Chunk(" world"), Usage(7, 2, 3), Chunk("", finish=Finish.STOP)]


async def test_the_request_carries_what_was_asked_and_nothing_unasked(server: OpenAIServer) -> None:
    params = GenerationParams(
        max_tokens=5, stop=("\n",), sampling=Sampling(temperature=0.5, top_p=0.9, seed=3)
    )
    async with remote(server) as model:
        await collect(model.stream_chat(HELLO, params))
        await collect(model.stream_completion("a"))
    assert server.bodies[0] == {
        "model": "test-model",
        "messages": HELLO,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.5,
        "max_tokens": 5,
        "stop": ["\n"],
        "seed": 3,
        "top_p": 0.9,
    }
    assert set(server.bodies[1]) == {"model", "prompt", "stream", "stream_options", "temperature"}


async def test_tool_calls_and_reasoning_are_values_of_their_own(server: OpenAIServer) -> None:
    call = {"index": 0, "id": "c1", "function": {"name": "read", "arguments": '{"pa'}}
    rest = {"index": 0, "function": {"arguments": 'th":1}'}}
    server.on(
        "/chat/completions",
        stream(
            delta(reasoning_content="hm"),
            delta(tool_calls=[call]),
            delta(tool_calls=[rest]),
            delta(None, "tool_calls"),
            DONE,
        ),
    )
    tools = [{"type": "function", "function": {"name": "read"}}]
    async with remote(server) as model:
        items = await collect(model.stream_chat(HELLO, tools=tools))
    assert items == [
        RemoteReasoning("hm"),
        ToolCallDelta(0, "c1", "read", '{"pa'),
        ToolCallDelta(0, None, None, 'th":1}'),
        Chunk("", finish=Finish.STOP),
    ]
    assert server.bodies[0]["tools"] == tools


async def test_a_field_that_a_server_refuses_is_left_out_from_then_on(server: OpenAIServer) -> None:
    renamed = "Unsupported parameter: 'max_tokens' is not supported. Use 'max_completion_tokens' instead."
    unknown = {"detail": [{"msg": "Extra inputs are not permitted: 'stream_options'"}]}
    server.on(
        "/chat/completions", answer({"error": {"message": renamed}}, 400), answer(unknown, 422), chat("ok")
    )
    async with remote(server) as model:
        for _ in range(2):
            assert said(await collect(model.stream_chat(HELLO, GenerationParams(max_tokens=5)))) == "ok"
    assert len(server.bodies) == 4
    for body in server.bodies[2:]:
        assert body == {
            "model": "test-model",
            "messages": HELLO,
            "stream": True,
            "temperature": 0.0,
            "max_completion_tokens": 5,
        }


async def test_a_server_that_does_not_stream_still_answers(server: OpenAIServer) -> None:
    whole = {
        "choices": [{"message": {"content": "all"}, "finish_reason": "length"}],
        "usage": {"prompt_tokens": 1},
    }
    server.on("/chat/completions", answer(whole))
    async with remote(server) as model:
        assert await collect(model.stream_chat(HELLO)) == [
            Chunk("all"),
            Usage(1, 0, 0),
            Chunk("", finish=Finish.LENGTH),
        ]


async def test_events_may_be_cut_anywhere_by_the_network(server: OpenAIServer) -> None:
    data = b": ping\r\n\r\n" + (delta("né") + delta("ß€", "stop") + USAGE + DONE).replace(b"\n", b"\r\n")
    server.on("/chat/completions", stream(*(data[i : i + 3] for i in range(0, len(data), 3))))
    async with remote(server) as model:
        assert said(await collect(model.stream_chat(HELLO))) == "néß€"


class TestFaults:
    @pytest.mark.parametrize(
        ("parts", "error", "words"),
        [
            ((delta("Hel"), RuntimeError), Unavailable, "broke off in the middle"),
            ((delta("Hel"),), Unavailable, "broke off in the middle"),
            ((), Unavailable, "broke off in the middle"),
            ((delta("Hel"), b"data: {broken\n\n", DONE), EngineError, "not JSON: {broken"),
            ((b"data: [1]\n\n", DONE), EngineError, "not an object"),
            ((event({"choices": ["x"]}),), EngineError, "choice that is not an object"),
            ((event({"error": {"message": "out of memory"}}),), EngineError, "out of memory"),
            ((b'error: {"message": "slot gone"}\n\n',), EngineError, "slot gone"),
            ((event({"object": "error", "message": "too hot"}),), EngineError, "too hot"),
            ((delta("x", "content_filter"), DONE), EngineError, "content filter"),
            ((b"data: " + b"x" * (9 << 20),), EngineError, "more than 8 MiB"),
        ],
    )
    async def test_a_broken_stream_is_one_clear_error(
        self, server: OpenAIServer, parts: tuple[bytes, ...], error: type[KeystrokeError], words: str
    ) -> None:
        server.on("/chat/completions", stream(*parts))
        async with remote(server) as model:
            with pytest.raises(error, match=words) as caught:
                await collect(model.stream_chat(HELLO))
        assert "\n" not in str(caught.value)

    async def test_text_that_came_before_the_break_was_given_out(self, server: OpenAIServer) -> None:
        server.on("/chat/completions", stream(delta("Hel"), RuntimeError))
        async with remote(server) as model:
            items = model.stream_chat(HELLO)
            assert await anext(items) == Chunk("Hel")
            with pytest.raises(Unavailable):
                await anext(items)
        assert len(server.bodies) == 1  # never asked again once text had come

    @pytest.mark.parametrize(
        ("status", "body", "error", "words"),
        [
            (400, {"error": {"message": "bad tools"}}, UsageError, "bad tools"),
            (
                400,
                {"error": {"message": "x", "code": "context_length_exceeded"}},
                ContextOverflow,
                "does not fit",
            ),
            (400, {"message": "maximum context length is 10"}, ContextOverflow, "does not fit"),
            (401, {"error": {"message": "no key"}}, Unauthorized, "wants a valid key"),
            (403, b"", Forbidden, "no reason given"),
            (404, {"detail": "Not Found"}, NotFound, "Not Found"),
            (422, {"detail": [{"msg": "Field required"}]}, UsageError, "Field required"),
            (500, b"<html><h1>Oops</h1>\n</html>", EngineError, "<html><h1>Oops</h1> </html>"),
            (307, b"", ConfigError, "moved to elsewhere"),
        ],
    )
    async def test_a_refusal_is_told_by_kind_with_the_servers_reason(
        self, server: OpenAIServer, status: int, body: object, error: type[KeystrokeError], words: str
    ) -> None:
        server.on("/chat/completions", answer(body, status))
        async with remote(server) as model:
            with pytest.raises(error, match=words):
                await collect(model.stream_chat(HELLO))
        assert len(server.bodies) == 1

    async def test_a_page_instead_of_a_stream_points_at_the_address(self, server: OpenAIServer) -> None:
        server.on("/chat/completions", answer("<html>welcome</html>"))
        async with remote(server) as model:
            with pytest.raises(
                EngineError, match="text/html instead of an event stream; check that base_url"
            ):
                await collect(model.stream_chat(HELLO))

    async def test_silence_before_the_first_token_and_within_an_answer_each_have_a_limit(
        self, server: OpenAIServer
    ) -> None:
        server.on("/chat/completions", stream(b": working\n\n", 60.0))
        async with remote(server, first_token_timeout=0.3) as model:
            with pytest.raises(Unavailable, match=r"sent no token for 0\.3 s"):
                await collect(model.stream_chat(HELLO))
        server.on("/chat/completions", stream(delta("a"), 60.0))
        async with remote(server, read_timeout=0.3) as model:
            with pytest.raises(Unavailable, match=r"fell silent in the middle of the answer for 0\.3 s"):
                await collect(model.stream_chat(HELLO))


class TestRetries:
    @pytest.mark.parametrize("status", [429, 502, 503, 504])
    async def test_a_busy_server_is_asked_again(self, server: OpenAIServer, status: int) -> None:
        busy = answer({"error": "busy"}, status, {"retry-after": "0"})
        server.on("/chat/completions", busy, busy, chat("ok"))
        async with remote(server) as model:
            assert said(await collect(model.stream_chat(HELLO))) == "ok"
        assert len(server.bodies) == 3

    async def test_retries_end_with_the_servers_own_reason(self, server: OpenAIServer) -> None:
        server.on("/chat/completions", answer({"error": "busy"}, 503, {"retry-after": "0"}))
        async with remote(server, retries=2) as model:
            with pytest.raises(Unavailable, match="status 503: busy"):
                await collect(model.stream_chat(HELLO))
        assert len(server.bodies) == 3

    async def test_a_long_wait_is_reported_and_not_waited_for(self, server: OpenAIServer) -> None:
        server.on("/chat/completions", answer({"error": "quota"}, 429, {"retry-after": "3600"}))
        async with remote(server) as model:
            with pytest.raises(RateLimited) as caught:
                await collect(model.stream_chat(HELLO))
        assert (caught.value.retry_after, len(server.bodies)) == (3600.0, 1)

    async def test_a_date_to_return_at_is_understood(self, server: OpenAIServer) -> None:
        past = answer({"error": "busy"}, 503, {"retry-after": "Wed, 21 Oct 2015 07:28:00 GMT"})
        server.on("/chat/completions", past, chat("ok"))
        async with remote(server) as model:
            assert said(await collect(model.stream_chat(HELLO))) == "ok"

    async def test_no_server_is_unavailable_after_the_retries(self, server: OpenAIServer) -> None:
        server.__exit__()
        async with remote(server, retries=1) as model:
            with pytest.raises(Unavailable, match="cannot be reached"):
                await collect(model.stream_chat(HELLO))

    async def test_an_interrupt_ends_the_wait_between_retries(self, server: OpenAIServer) -> None:
        server.on("/chat/completions", answer({"error": "busy"}, 503, {"retry-after": "25"}))
        interrupt = Interrupt()
        async with remote(server) as model:
            asyncio.get_running_loop().call_later(0.2, interrupt.set)
            assert await collect(model.stream_chat(HELLO, interrupt=interrupt)) == [
                Chunk("", finish=Finish.INTERRUPTED)
            ]


class TestCutting:
    async def test_an_interrupt_from_another_thread_closes_the_stream_at_the_server(
        self, server: OpenAIServer
    ) -> None:
        server.on("/chat/completions", chat(*"a" * 400, pause=0.05))
        interrupt = Interrupt()
        items: list[StreamItem] = []
        async with remote(server) as model:
            async for item in model.stream_chat(HELLO, interrupt=interrupt):
                items.append(item)
                if len(items) == 2:
                    threading.Thread(target=interrupt.set).start()
        assert items[-1] == Chunk("", finish=Finish.INTERRUPTED)
        assert len(items) < 400
        assert await asyncio.to_thread(server.cut.wait, 10)

    async def test_an_interrupt_during_silence_does_not_wait_for_the_next_token(
        self, server: OpenAIServer
    ) -> None:
        server.on("/chat/completions", stream(delta("a"), 120.0))
        interrupt = Interrupt()
        async with remote(server, read_timeout=100.0) as model:
            asyncio.get_running_loop().call_later(0.3, interrupt.set)
            items = await collect(model.stream_chat(HELLO, interrupt=interrupt))
        assert items == [Chunk("a"), Chunk("", finish=Finish.INTERRUPTED)]
        assert await asyncio.to_thread(server.cut.wait, 10)

    async def test_an_interrupt_thrown_before_the_start_asks_nothing(self, server: OpenAIServer) -> None:
        interrupt = Interrupt()
        interrupt.set()
        async with remote(server) as model:
            items = await collect(model.stream_completion("x", interrupt=interrupt))
        assert (items, server.bodies) == ([Chunk("", finish=Finish.INTERRUPTED)], [])

    async def test_cancelling_the_task_closes_the_stream_at_the_server(self, server: OpenAIServer) -> None:
        server.on("/chat/completions", stream(delta("a"), 120.0))
        async with remote(server, read_timeout=100.0) as model:
            task = asyncio.create_task(collect(model.stream_chat(HELLO)))
            assert await asyncio.to_thread(server.streaming.wait, 10)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await asyncio.to_thread(server.cut.wait, 10)
            server.on("/chat/completions", chat("still here"))
            assert said(await collect(model.stream_chat(HELLO))) == "still here"

    async def test_one_stream_cut_leaves_the_others_whole(self, server: OpenAIServer) -> None:
        server.on("/chat/completions", chat(*"abcdef", pause=0.05))
        interrupt = Interrupt()
        async with remote(server) as model:
            others = [asyncio.create_task(collect(model.stream_chat(HELLO))) for _ in range(4)]
            async for _ in model.stream_chat(HELLO, interrupt=interrupt):
                interrupt.set()
            assert [said(await other) for other in others] == ["abcdef"] * 4

    async def test_many_streams_of_which_half_are_cut_leave_nothing_running(
        self, server: OpenAIServer
    ) -> None:
        server.on("/chat/completions", chat(*"abcdefghij", pause=0.02))
        before = asyncio.all_tasks()

        async def one(cut: bool) -> str:
            interrupt = Interrupt()
            text = ""
            async for item in model.stream_chat(HELLO, interrupt=interrupt):
                text += item.text if isinstance(item, Chunk) else ""
                if cut and len(text) == 3:
                    interrupt.set()
            return text

        async with remote(server) as model:
            texts = await asyncio.gather(*(one(cut=number % 2 == 0) for number in range(24)))
            assert len(model._transport._idle) <= 8
        assert texts[1::2] == ["abcdefghij"] * 12
        assert all(text.startswith("abc") and len(text) < 10 for text in texts[::2])
        assert asyncio.all_tasks() == before

    async def test_a_finished_answer_leaves_its_connection_for_the_next(self, server: OpenAIServer) -> None:
        async with remote(server) as model:
            for _ in range(3):
                await collect(model.stream_chat(HELLO))
            assert len(model._transport._idle) == 1


class TestSuffix:
    async def test_a_server_that_takes_a_suffix_gets_it(self, server: OpenAIServer) -> None:
        async with remote(server) as model:
            items = await collect(model.stream_completion("def f(a, b):\n    ", "\n"))
        assert (said(items), items[-1]) == ("return a + b", Chunk("", finish=Finish.LENGTH))
        assert server.bodies[0]["suffix"] == "\n"

    async def test_a_refused_suffix_becomes_a_prompt_and_is_not_tried_again(
        self, server: OpenAIServer
    ) -> None:
        refuse = answer({"error": {"message": "suffix is not currently supported"}}, 400)
        server.on("/completions", refuse, text("x"))
        async with remote(server, "Qwen2.5-Coder-1.5B") as model:
            for _ in range(2):
                assert said(await collect(model.stream_completion("P", "S"))) == "x"
        assert [b["prompt"] for b in server.bodies] == [
            "P",
            *["<|fim_prefix|>P<|fim_suffix|>S<|fim_middle|>"] * 2,
        ]
        assert "suffix" not in server.bodies[2]
        assert "<|endoftext|>" in server.bodies[2]["stop"]

    async def test_a_model_of_unknown_format_says_so(self, server: OpenAIServer) -> None:
        server.on("/completions", answer({"error": {"message": "no suffix here"}}, 400))
        async with remote(server, "poet-7b") as model:
            with pytest.raises(UnsupportedModel, match="poet-7b is not known to fill in the middle"):
                await collect(model.stream_completion("P", "S"))

    async def test_another_refusal_is_not_taken_for_one_of_the_suffix(self, server: OpenAIServer) -> None:
        server.on("/completions", answer({"error": {"message": "no such model"}}, 404))
        async with remote(server, "Qwen2.5-Coder-1.5B") as model:
            with pytest.raises(NotFound):
                await collect(model.stream_completion("P", "S"))
        assert len(server.bodies) == 1


class TestKeys:
    async def test_the_key_is_sent_and_shown_nowhere(
        self, server: OpenAIServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level("DEBUG")
        monkeypatch.setenv("MY_KEY", "sk-very-secret")
        server.on(
            "/chat/completions", chat("ok"), answer({"error": {"message": "bad key sk-very-secret"}}, 401)
        )
        async with remote(server, api_key_env="MY_KEY") as model:
            await collect(model.stream_chat(HELLO))
            with pytest.raises(Unauthorized, match="check the key in MY_KEY") as caught:
                await collect(model.stream_chat(HELLO))
            assert server.headers[0]["authorization"] == "Bearer sk-very-secret"
            assert "secret" not in f"{caught.value}{caplog.text}{model.endpoint!r}"

    async def test_a_missing_key_is_named_when_the_server_asks(self, server: OpenAIServer) -> None:
        server.on("/chat/completions", answer({"error": "no"}, 401))
        async with remote(server, api_key_env="UNSET_KEY_NAME") as model:
            with pytest.raises(Unauthorized, match="put a key in UNSET_KEY_NAME"):
                await collect(model.stream_chat(HELLO))
        assert "authorization" not in server.headers[0]

    async def test_a_key_that_no_header_carries_is_refused(
        self, server: OpenAIServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("MY_KEY", "two\nlines")
        async with remote(server, api_key_env="MY_KEY") as model:
            with pytest.raises(ConfigError, match="MY_KEY"):
                await collect(model.stream_chat(HELLO))
        assert server.bodies == []


class TestAddresses:
    def test_an_address_without_a_path_means_the_usual_one(self) -> None:
        assert str(Endpoint("http://localhost:8000").url) == "http://localhost:8000/v1"
        assert str(Endpoint("https://host/api/v3/").url) == "https://host/api/v3"

    @pytest.mark.parametrize(
        "url", ["", "localhost:8000", "ftp://host", "http://", "http://[::1", "http://u:p@host"]
    )
    def test_what_is_no_usable_address_is_refused_without_showing_a_password(self, url: str) -> None:
        with pytest.raises(ConfigError) as caught:
            RemoteModel(Endpoint(url), "m")
        assert "u:p" not in str(caught.value)

    async def test_a_proxy_never_stands_between_us_and_loopback(
        self, server: OpenAIServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
        monkeypatch.setenv("NO_PROXY", "")
        async with remote(server) as model:
            assert said(await collect(model.stream_chat(HELLO))) == "Hello world"


class TestProbing:
    async def test_models_are_listed_with_their_context(self, server: OpenAIServer) -> None:
        async with remote(server) as model:
            assert [(m.id, m.context_length) for m in await model.models()] == [("test-model", 4096)]

    async def test_a_probe_is_a_value_whatever_the_server_does(self, server: OpenAIServer) -> None:
        async with remote(server) as model:
            assert (await model.probe()).ok
        async with remote(server, "other") as model:
            assert "has no model other; it has test-model" in (await model.probe()).detail
        for bad in (answer("nonsense"), answer({"data": 3}), answer({"error": "x"}, 500)):
            server.on("/models", bad)
            async with remote(server) as model:
                health = await model.probe()
            assert not health.ok
            assert health.detail


class TestBlocking:
    def test_the_same_stream_without_an_event_loop(self, server: OpenAIServer) -> None:
        with BlockingModel(remote(server)) as model:
            assert said(list(model.stream_chat(HELLO))) == "Hello world"
            assert said(list(model.stream_completion("x", "y"))) == "return a + b"
            assert model.probe().ok

    def test_leaving_early_closes_the_stream_at_the_server(self, server: OpenAIServer) -> None:
        server.on("/chat/completions", stream(delta("a"), 120.0))
        with BlockingModel(remote(server)) as model:
            for item in model.stream_chat(HELLO):
                assert item == Chunk("a")
                break
            assert server.cut.wait(60)
