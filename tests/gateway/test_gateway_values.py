"""The gateway's small parts: limits, keys, routing, calls in text, prompts, origins, the outbox."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from gateway_support import scripted_model
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Learner
from tokenizers import decoders, models, pre_tokenizers, trainers

from keystroke.assist.tool_calls.patches import patch_from_call
from keystroke.assist.tool_calls.tools import OfferedTool, short_toolset, whole_toolset
from keystroke.config import ServerSettings
from keystroke.engine.model import Model
from keystroke.engine.tokenizer.huggingface import from_spec
from keystroke.errors import ConfigError, Forbidden, InputError, RateLimited, Unauthorized
from keystroke.gateway.access.keys import LOCAL, KeyRing, digest, make_key
from keystroke.gateway.access.limits import RateBudget, RateLimiter
from keystroke.gateway.access.security import build_key_ring, check_host, check_origin, is_loopback
from keystroke.gateway.api import prompts
from keystroke.gateway.transport.frames import text_frame_header
from keystroke.gateway.transport.outbox import BEHIND, HIGH, Outbox
from keystroke.gateway.work.priority import Priority, Tier, rank
from keystroke.gateway.work.registry import ModelRegistry, local_entry
from keystroke.gateway.work.routing import ModelCandidate, Router, RoutingRequest
from keystroke.protocol.events import Created, TextDelta
from keystroke.protocol.faults import ModelNotFound
from keystroke.protocol.items import ContentPart, Item
from keystroke.protocol.response import Response

# Limits


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_requests_and_tokens_refill_and_say_when_to_come_back() -> None:
    clock = Clock()
    limits = RateLimiter({"m": RateBudget(requests_per_minute=2, tokens_per_minute=600)}, clock)
    for _ in range(2):
        limits.admit("k", "m", 10).settle(10)
    with pytest.raises(RateLimited) as caught:
        limits.admit("k", "m", 10)
    assert caught.value.retry_after == pytest.approx(30)
    clock.now += caught.value.retry_after
    permit = limits.admit("k", "m", 10)
    assert permit.headers["x-ratelimit-limit-requests"] == "2"
    assert permit.headers["x-ratelimit-remaining-requests"] == "0"
    permit.settle(900)
    clock.now += 60
    with pytest.raises(RateLimited, match="tokens a minute"):
        limits.admit("k", "m", 590)


def test_keys_and_models_have_budgets_of_their_own() -> None:
    limits = RateLimiter({"m": RateBudget(requests_per_minute=1)}, Clock())
    limits.admit("a", "m", 1)
    limits.admit("b", "m", 1)
    limits.admit("a", "unlimited", 1)
    with pytest.raises(RateLimited):
        limits.admit("a", "m", 1)
    assert limits.headers("a", "unlimited") == {}


def test_concurrent_responses_are_counted_and_given_back_once() -> None:
    limits = RateLimiter({"m": RateBudget(concurrent=1)}, Clock())
    permit = limits.admit("k", "m", 1)
    with pytest.raises(RateLimited):
        limits.admit("k", "m", 1)
    permit.settle(1)
    permit.settle(1)
    limits.admit("k", "m", 1)
    with pytest.raises(RateLimited):
        limits.admit("k", "m", 1)


def test_a_request_larger_than_the_bucket_passes_when_the_bucket_is_full() -> None:
    limits = RateLimiter({"m": RateBudget(tokens_per_minute=100)}, Clock())
    limits.admit("k", "m", 5000)
    with pytest.raises(RateLimited):
        limits.admit("k", "m", 1)


# Keys and origins


def test_a_key_opens_until_it_is_revoked_and_only_its_hash_is_kept() -> None:
    key, token = make_key("bob")
    ring = KeyRing(required=True)
    ring.set_stored_keys([key])
    assert token not in repr(key)
    assert ring.authenticate(f"Bearer {token}").name == "bob"
    for wrong in (
        None,
        "Bearer",
        f"Bearer {token}x",
        f"Basic {token}",
        "Bearer ks_zz_yy",
        f"Bearer {key.id}",
    ):
        with pytest.raises(Unauthorized):
            ring.authenticate(wrong)
    ring.set_stored_keys([])
    with pytest.raises(Unauthorized):
        ring.authenticate(f"Bearer {token}")


def test_a_loopback_ring_lets_everyone_in_as_local_and_knows_its_keys() -> None:
    key, token = make_key("bob")
    ring = KeyRing(required=False)
    ring.set_stored_keys([key])
    assert ring.authenticate(None) == LOCAL
    assert ring.authenticate("Bearer whatever") == LOCAL
    assert ring.authenticate(f"Bearer {token}").id == key.id


def test_keys_are_required_beyond_loopback_or_where_some_were_given() -> None:
    assert not build_key_ring(ServerSettings(), {}).required
    assert build_key_ring(ServerSettings(host="0.0.0.0"), {}).required
    given = build_key_ring(ServerSettings(), {"KEYSTROKE_API_KEY": "a, b"})
    assert given.required
    assert given.authenticate("Bearer b").id == f"static_{digest('b')[:16]}"
    assert digest("a") != "a"


@pytest.mark.parametrize(
    ("host", "local"),
    [("127.0.0.1", True), ("localhost", True), ("::1", True), ("[::1]", True), ("0.0.0.0", False),
     ("192.168.1.5", False), ("example.com", False), ("127.0.0.1.evil.com", False)],
)  # fmt: skip
def test_loopback_is_told_from_the_rest(host: str, local: bool) -> None:
    assert is_loopback(host) is local


def test_pages_of_other_sites_are_refused_and_programs_are_not() -> None:
    check_origin(None, "127.0.0.1:8012")
    check_origin("http://127.0.0.1:8012", "127.0.0.1:8012")
    check_origin("http://localhost:3000", "127.0.0.1:8012")
    check_origin("https://app.example", "127.0.0.1:8012", ("https://app.example",))
    for origin in ("https://evil.example", "null", "http://127.0.0.1.evil.example"):
        with pytest.raises(Forbidden):
            check_origin(origin, "127.0.0.1:8012")
    with pytest.raises(Forbidden):
        check_origin("http://localhost:3000", "server.example")


def test_a_loopback_server_refuses_a_repointed_domain() -> None:
    check_host("localhost:8012", "127.0.0.1")
    check_host("anything", "0.0.0.0")
    check_host("app.example", "127.0.0.1", ("https://app.example",))  # behind a proxy
    for host in ("rebound.example:8012", "[", "localhost.rebound.example"):
        with pytest.raises(Forbidden):
            check_host(host, "127.0.0.1", ("https://app.example", "*"))


def test_what_is_no_origin_is_refused_not_a_fault() -> None:
    for origin in ("http://[", "http://[::1", "\x00"):
        with pytest.raises(Forbidden):
            check_origin(origin, "127.0.0.1:8012")


def test_a_given_key_is_known_by_itself_not_by_its_place() -> None:
    both = KeyRing(required=True, static=["first", "second"])
    later = KeyRing(required=True, static=["second"])
    caller = both.authenticate("Bearer second")
    assert later.authenticate("Bearer second") == caller
    assert later.still_accepts(caller)
    assert not later.still_accepts(both.authenticate("Bearer first"))


# Priorities and routing


def test_a_lane_beats_every_tier() -> None:
    order = sorted((rank(priority, tier), priority, tier) for priority in Priority for tier in Tier)
    assert [priority for _, priority, _ in order] == sorted([*Priority] * len(Tier))
    assert rank(Priority.GHOST, Tier.FLEX) < rank(Priority.CHAT, Tier.PRIORITY)


BOTH = Router([ModelCandidate("small", "fast"), ModelCandidate("large", "deep")])


@pytest.mark.parametrize(
    ("task", "model", "reason"),
    [
        (RoutingRequest(Priority.GHOST, "", 10), "small", "interactive"),
        (RoutingRequest(Priority.CHAT, "fix the typo", 10), "small", "short interactive"),
        (RoutingRequest(Priority.CHAT, "think hard about this", 10), "large", "asked for depth"),
        (RoutingRequest(Priority.CHAT, "quickly: migrate this", 10), "small", "asked for speed"),
        (RoutingRequest(Priority.CHAT, "find the race condition", 10), "large", "looks hard"),
        (RoutingRequest(Priority.CHAT, "x", 500_000), "large", "long"),
        (RoutingRequest(Priority.BACKGROUND, "x", 10, background=True), "large", "background"),
        (RoutingRequest(Priority.CHAT, "x", 10, effort="high"), "large", "effort"),
    ],
)
def test_auto_routes_by_task_size_and_words_and_says_why(
    task: RoutingRequest, model: str, reason: str
) -> None:
    name, _, why = BOTH.choose(task)
    assert name == model
    assert reason in why


def test_without_a_deep_model_the_fast_one_answers_and_says_so() -> None:
    name, role, why = Router([ModelCandidate("small", "fast")]).choose(
        RoutingRequest(Priority.CHAT, "think hard", 1)
    )
    assert (name, role) == ("small", "fast")
    assert "no deep model" in why


def test_the_registry_finds_names_and_roles_and_hints_at_near_ones() -> None:
    registry = ModelRegistry([local_entry("tiny", scripted_model(name="tiny"))])
    assert registry.resolve("fast") == registry.resolve("tiny") == "tiny"
    with pytest.raises(ModelNotFound, match="did you mean tiny"):
        registry.resolve("tinny")
    with pytest.raises(ConfigError):
        ModelRegistry([])


# Prompts


def bpe_model() -> Model:
    """A model whose tokens reach across characters, learnt from this file."""
    learner = Learner(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    learner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False
    )
    learner.train([__file__], trainer)
    plain = scripted_model()
    return Model("bpe", plain.engine, from_spec(json.loads(learner.to_str())), plain.chat)


BYTES, BPE = scripted_model(), bpe_model()


def test_items_become_messages_that_templates_accept() -> None:
    items = [
        Item(role="developer", content="rules"),
        Item(role="user", content=[ContentPart(text="hi "), ContentPart(text="there")]),
        Item(type="reasoning", id="rs"),
        Item(role="assistant", content="let me look"),
        Item(type="function_call", call_id="c1", name="f", arguments='{"x":1}'),
        Item(type="custom_tool_call", call_id="c2", name="apply_patch", input="patch"),
        Item(type="function_call_output", call_id="c1", output="one"),
        Item(type="custom_tool_call_output", call_id="c2", output=[ContentPart(text="done")]),
        Item(type="web_search_call", id="ws"),
        Item(role="developer", content="later"),
    ]
    assert prompts.messages_of("be brief", items) == [
        {"role": "system", "content": "be brief\n\nrules"},
        {"role": "user", "content": "hi there"},
        {
            "role": "assistant",
            "content": "let me look",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}},
                {
                    "id": "c2",
                    "type": "function",
                    "function": {"name": "apply_patch", "arguments": {"input": "patch"}},
                },
            ],
        },
        {"role": "tool", "content": "one", "tool_call_id": "c1", "name": "f"},
        {"role": "tool", "content": "done", "tool_call_id": "c2", "name": "apply_patch"},
        {"role": "user", "content": "later"},
    ]  # fmt: skip


def test_a_small_model_is_reminded_of_its_task_behind_what_it_read() -> None:
    text = {"properties": {"cmd": {"type": "string"}}, "required": ["cmd"]}
    run = OfferedTool("exec_command", parameters=text)
    patch = OfferedTool("apply_patch", custom=True, grammar=("lark", 'start: "*** Begin Patch"'))
    call: dict[str, Any] = {"call_id": "c1", "name": "exec_command", "arguments": '{"cmd": "cat a.py"}'}
    read = [
        Item(role="user", content="Fix a.py."),
        Item(type="function_call", **call),
        Item(type="function_call_output", call_id="c1", output="x = 1"),
    ]
    wrote = [
        Item(type="custom_tool_call", call_id="c2", name="apply_patch", input=patch_from_call(
            "write_file", {"path": "a.py", "content": "x = 2"}
        )),
        Item(type="custom_tool_call_output", call_id="c2", output="Success"),
    ]  # fmt: skip
    small = short_toolset([run, patch])
    said = [m["content"] for m in prompts.messages_of(None, [*read, *wrote], toolset=small)]
    assert said[2] == "x = 1\n\nNow do what was asked: Fix a.py."
    assert said[-1] == "Success"  # or it would do it again
    large = prompts.messages_of(None, read, toolset=whole_toolset([run, patch]))
    assert large[2]["content"] == "x = 1"
    # A continued conversation is reminded in the same words: the tokens in the cache stay those of the whole.
    joined = prompts.messages_of(None, [read[2]], read[:2], toolset=small)
    assert joined[0]["content"] == said[2]
    view = OfferedTool(
        "read", parameters={"properties": {"filePath": {"type": "string"}}, "required": ["filePath"]}
    )
    numbered = [
        read[0],
        Item(type="function_call", call_id="c3", name="read", arguments='{"filePath": "a.py"}'),
    ]
    numbered.append(Item(type="function_call_output", call_id="c3", output="1: x = 1\n2: y = 2"))
    found = prompts.messages_of(None, numbered, toolset=short_toolset([view, patch]))[2]["content"]
    assert found == "x = 1\ny = 2\n\nNow do what was asked: Fix a.py."
    long = [Item(role="user", content="word " * 200), *read[1:]]
    assert prompts.messages_of(None, long, toolset=small)[2]["content"] == "x = 1"


def test_a_continued_conversation_has_the_tokens_of_one_rendered_whole() -> None:
    model = scripted_model()
    first = [Item(role="system", content="s"), Item(role="user", content="one <end> look-alike")]
    answer = "the answer"
    held = [*prompts.render_conversation(model, prompts.messages_of(None, first), []), *answer.encode(), 258]
    new = [Item(role="user", content="two")]
    joined = prompts.continue_tokens(model, held, prompts.messages_of(None, new, first))
    everything = [*first, Item(role="assistant", content=answer), *new]
    assert joined is not None
    assert joined == prompts.render_conversation(model, prompts.messages_of(None, everything), [])


@given(st.text(min_size=1, max_size=40))
def test_the_quick_join_is_the_one_the_template_gives(text: str) -> None:
    for model in (BYTES, BPE):
        quick = prompts._quick_join(model, text, {})
        if quick is not None:
            assert quick == prompts._render_join(model, [{"role": "user", "content": text}], {})


def test_the_quick_join_takes_ordinary_text() -> None:
    assert prompts._quick_join(BYTES, "rename x to y", {}) is not None
    assert prompts._quick_join(BPE, "rename x to y", {}) is not None
    assert prompts._quick_join(BYTES, "a <end> look-alike", {}) is None


def test_images_are_refused_with_the_place_they_stand() -> None:
    with pytest.raises(InputError, match=r"input\[1\] holds input_image"):
        prompts.items_of([Item(role="user"), Item(role="user", content=[ContentPart(type="input_image")])])


# The outbox and frames


def delta(number: int, item: str = "m") -> TextDelta:
    return TextDelta(item, 0, 0, str(number % 10), [], number)


async def test_a_client_that_keeps_up_gets_every_delta_by_itself() -> None:
    outbox = Outbox(lambda: None, lambda: None)
    outbox.put(None, [delta(1), delta(2)])
    batch = await outbox.next_batch()
    assert batch is not None
    assert [m.delta for _, m in batch] == ["1", "2"]


async def test_deltas_join_when_the_client_is_behind_and_keep_their_order() -> None:
    outbox = Outbox(lambda: None, lambda: None)
    created = Created(response=Response(id="r", created_at=0, model="m", status="queued"), sequence_number=5)
    outbox.put(None, [delta(n) for n in range(BEHIND)] + [created] + [delta(n, "n") for n in (6, 7)])
    batch = await outbox.next_batch()
    assert batch is not None
    messages: list[Any] = [m for _, m in batch]
    assert [getattr(m, "delta", "created") for m in messages] == ["01234567", "created", "67"]
    assert messages[0].sequence_number == BEHIND - 1


async def test_answers_pause_when_far_behind_and_resume_once_written() -> None:
    calls: list[str] = []
    outbox = Outbox(lambda: calls.append("pause"), lambda: calls.append("resume"))
    outbox.put(None, [delta(n) for n in range(HIGH + 1)])
    assert calls == ["pause"]
    await outbox.next_batch()
    outbox.mark_written()
    assert calls == ["pause", "resume"]


async def test_answers_pause_while_a_write_takes_long_and_resume_once_it_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("keystroke.gateway.transport.outbox.BLOCKED", -1.0)  # every write takes long
    calls: list[str] = []
    outbox = Outbox(lambda: calls.append("pause"), lambda: calls.append("resume"))
    outbox.put(None, [delta(0)])
    assert not calls
    await outbox.next_batch()
    outbox.put(None, [delta(1)])
    assert calls == ["pause"]
    outbox.mark_written()
    assert calls == ["pause", "resume"]


async def test_a_closed_outbox_gives_what_it_holds_and_then_none() -> None:
    outbox = Outbox(lambda: None, lambda: None)
    outbox.put(None, [delta(1)])
    outbox.close()
    outbox.put(None, [delta(2)])
    first, second = await outbox.next_batch(), await asyncio.wait_for(outbox.next_batch(), 1)
    assert first is not None
    assert [m.delta for _, m in first] == ["1"]
    assert second is None


@pytest.mark.parametrize("size", [0, 1, 125, 126, 127, 65_535, 65_536, 100_000])
def test_frame_headers_are_those_a_websocket_parser_reads(size: int) -> None:
    from websockets.frames import Frame, Opcode

    payload = b"x" * size
    assert text_frame_header(size) + payload == Frame(Opcode.TEXT, payload).serialize(mask=False)
