"""Conversations that outgrow a model's context continue with a summary of their older part.

System messages and tools stay as they are, so the beginning of the prompt stays in the prefix cache; the
newest items stay as they are; what is between them becomes a summary that the same model writes, followed by
the user's messages, shortened. A client that sends its whole conversation again finds the same summary, so
its prompt keeps its prefix from turn to turn.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Literal

from keystroke.assist.tool_calls.forms import CALL
from keystroke.assist.tool_calls.segments import TextSegment
from keystroke.engine.base import Sampling
from keystroke.engine.generation import Chunk, GenerationParams
from keystroke.errors import Interrupted, KeystrokeError
from keystroke.gateway.access.keys import Caller
from keystroke.gateway.api.answer_form import AnswerForm
from keystroke.gateway.api.prompts import Message, text_length
from keystroke.gateway.work.priority import Priority
from keystroke.gateway.work.registry import ServedModel
from keystroke.gateway.work.remote import RemoteJob
from keystroke.gateway.work.scheduler import Job
from keystroke.gateway.work.service import Service, new_id
from keystroke.protocol.compaction import CompactedWindow, is_head, pack_window, summary_item
from keystroke.protocol.items import CompactionItem, Item, content_text
from keystroke.protocol.requests import ContextManagement
from keystroke.protocol.response import Compacted, Receipt

Reason = Literal["threshold", "context", "truncation", "earlier", "request"]
Render = Callable[[Sequence[Item]], Awaitable["RenderedPrompt"]]

_CONVERSATIONS = 256  # whose summaries are remembered
_SUMMARIES = 4  # of one conversation: its sub-agents share its beginning
_REQUESTS = "What the user wrote, shortened:"
_FIRST = 3  # of the user's messages are never left out of the list
_LINE = 400  # characters of one of them
_SHORTEST_OUTPUT = 400  # characters of a tool's result that is never cut
_ANSWER_ROOM = 1024  # tokens of the context left for the answer, unless the request asks for another number
_INSTRUCTION = (
    "The conversation is too long to continue as it is. Write a summary from which you can continue it: what "
    "the user wants, facts and names that the user stated, decisions, what was done and found in which "
    "files, and what remains to be done. Answer with the summary only, as plain text; do not call tools."
)


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """A prompt: tokens for a local model, messages for a remote one, whose size is an estimate."""

    size: int
    job: Callable[[GenerationParams], Job | RemoteJob]

    @classmethod
    def local(cls, tokens: Sequence[int], affinity: str) -> RenderedPrompt:
        return cls(len(tokens), lambda params: Job(tokens, params, affinity=affinity))

    @classmethod
    def remote(cls, messages: Sequence[Message], form: AnswerForm) -> RenderedPrompt:
        specs, fields = form.toolset.specs or None, form.remote
        size = RemoteJob(GenerationParams(), messages).estimate
        return cls(size, lambda params: RemoteJob(params, messages, specs, fields, form.check))


@dataclass(frozen=True, slots=True)
class CompactionLimit:
    """Tokens of a prompt above which it is compacted, or truncated, and why."""

    tokens: int
    reason: Reason


@dataclass(frozen=True, slots=True)
class FittedConversation:
    """`items` and their prompt after compaction. `item`: the new compaction item."""

    items: list[Item]
    prompt: RenderedPrompt
    compacted: Compacted
    item: CompactionItem | None
    receipt: Receipt | None = None


@dataclass(frozen=True, slots=True)
class ReusedSummary:
    """A conversation whose first items, `original`, were replaced by the first `replaced` of `items`."""

    items: list[Item]
    original: list[Item]
    replaced: int
    compacted: Compacted


@dataclass(frozen=True, slots=True)
class LongConversation:
    """A conversation to compact. `render` makes the prompt of items, `prompt` is that of its own. `name`
    identifies the conversation in later requests; `reused`: the summary that it begins with."""

    items: Sequence[Item]
    prompt: RenderedPrompt
    render: Render
    limit: CompactionLimit
    entry: ServedModel
    caller: Caller
    name: str = ""
    reused: ReusedSummary | None = None


@dataclass(frozen=True, slots=True)
class _Remembered:
    length: int  # items that the summary replaces
    digest: bytes
    window: list[Item]  # what takes their place
    summary: str
    dropped: int


def compaction_limit(
    context: int | None,
    max_tokens: int | None,
    *,
    management: Sequence[ContextManagement] | None = None,
    truncation: str | None = None,
) -> CompactionLimit | None:
    """None: the conversation is never shortened, because the client refuses it or no limit is known."""
    threshold = min((c.compact_threshold for c in management or () if c.compact_threshold), default=None)
    if context is None:
        return None if threshold is None else CompactionLimit(threshold, "threshold")
    fits = context - min(max_tokens or _ANSWER_ROOM, context // 4)
    if threshold is not None and threshold < fits:
        return CompactionLimit(threshold, "threshold")
    if truncation == "auto":
        return CompactionLimit(fits, "truncation")
    if truncation == "disabled" and not management:
        return None
    return CompactionLimit(fits, "context")


# Choosing what is replaced


def head_length(items: Sequence[Item]) -> int:
    """The number of items at the beginning that always stay."""
    return next((at for at, item in enumerate(items) if not is_head(item)), len(items))


def choose_cut(items: Sequence[Item], sizes: Sequence[int], budget: int) -> int | None:
    """The index from which items stay: as many of the newest as fit into `budget`, at least the newest
    message or the newest calls with their results. A result never stays without its call. None: nothing can
    go."""
    head, last = head_length(items), _last_step(items)
    cut, total = len(items), 0
    while cut > head and total + sizes[cut - 1] <= budget:
        cut -= 1
        total += sizes[cut]
    cut = min(cut, last)
    while cut < last and (orphan := _last_orphan(items, cut)) is not None:
        cut = min(orphan + 1, last)
    dropped = items[head:cut]
    return cut if any(item.type != "compaction" for item in dropped) else None


def _last_orphan(items: Sequence[Item], cut: int) -> int | None:
    """The last result from `cut` on whose call is before it."""
    called = {i.call_id for i in items[cut:] if i.type.endswith("_call")}
    results = range(len(items) - 1, cut - 1, -1)
    return next(
        (at for at in results if items[at].type.endswith("_output") and items[at].call_id not in called), None
    )


def _last_step(items: Sequence[Item]) -> int:
    """Where the newest message begins, or the newest calls whose results end the conversation."""
    at = len(items) - 1
    while at > 0 and items[at].type.endswith("_output"):
        at -= 1
    while at > 0 and items[at].type.endswith("_call") and items[at - 1].type.endswith("_call"):
        at -= 1
    return max(at, 0)


def compacted_items(items: Sequence[Item], cut: int, summary: str) -> list[Item]:
    """Head, summary, and what stays; where no user message stays, the newest one that goes is repeated."""
    head = list(items[: head_length(items)])
    tail = list(items[cut:])
    if not any(item.is_from_user for item in tail):
        task = next((item for item in reversed(items[:cut]) if item.is_from_user), None)
        if task is not None:
            tail.insert(0, task)
    return [*head, *([summary_item(summary)] if summary else []), *tail]


def shorten_outputs(items: Sequence[Item], longest: int) -> list[Item]:
    """The items with results of tools cut in the middle to `longest` characters."""
    return [_shorten_output(item, longest) if item.type.endswith("_output") else item for item in items]


def _shorten_output(item: Item, longest: int) -> Item:
    text = item.output if isinstance(item.output, str) else None
    if text is None and isinstance(item.output, list):
        text = content_text(item.output)
    if text is None or len(text) <= longest:
        return item
    half = longest // 2
    missing = len(text) - 2 * half
    shortened = f"{text[:half]}\n[{missing} characters left out]\n{text[-half:]}"
    return Item(type=item.type, id=item.id, call_id=item.call_id, name=item.name, output=shortened)


def user_messages(items: Sequence[Item], room: int) -> str:
    """The user's messages among `items` and in an earlier summary, one shortened line each: the first ones,
    and as many of the newest as fit into `room` characters."""
    lines: list[str] = []
    for item in items:
        text = content_text(item.content)
        if item.type == "compaction":
            _, found, listed = text.partition(_REQUESTS)
            lines += [line.removeprefix("- ") for line in listed.strip().splitlines()] if found else []
        elif item.is_from_user:
            line = " ".join(text.split())
            lines.append(line if len(line) <= _LINE else f"{line[:_LINE]} [...]")
    lines = [line for line in lines if line]
    first, rest = lines[:_FIRST], lines[_FIRST:]
    room -= sum(map(len, first))
    newest: list[str] = []
    for line in reversed(rest):
        room -= len(line) + 3
        if room < 0:
            break
        newest.insert(0, line)
    listed = "\n".join(f"- {line}" for line in (*first, *newest))
    return f"{_REQUESTS}\n{listed}" if listed else ""


def _digest(items: Sequence[Item]) -> bytes:
    """Identifies items by what the model reads of them: clients add ids and states when they repeat them."""
    digest = hashlib.sha256()
    for item in items:
        output = item.output if isinstance(item.output, str) else str(item.output)
        role = item.role or ("user" if item.type == "message" else "")
        content = content_text(item.content)
        for text in (item.type, role, content, item.name, item.arguments, item.input, output):
            data = (text or "").encode("utf-8", "surrogatepass")
            digest.update(b"%d:%b" % (len(data), data))
    return digest.digest()


def _compaction_item(fitted: Sequence[Item], summary: str) -> CompactionItem:
    head = [i for i in fitted if is_head(i)]
    tail = [i for i in fitted if not is_head(i) and i.type != "compaction"]
    return CompactionItem(new_id("cmp"), pack_window(CompactedWindow(head, summary, tail)), summary)


def unchanged_conversation(items: Sequence[Item], prompt: RenderedPrompt) -> FittedConversation:
    """A conversation of which nothing can go, as a compaction item that holds all of it."""
    summary = next((content_text(i.content) for i in items if i.type == "compaction"), "")
    unchanged = Compacted("request", 0, len(items), summary, prompt.size, prompt.size)
    return FittedConversation(list(items), prompt, unchanged, _compaction_item(items, summary))


class Compactor:
    """Makes conversations fit, and remembers the summaries it made. Belongs to the event loop."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._remembered: OrderedDict[tuple[str, str], list[_Remembered]] = OrderedDict()

    def reuse(self, caller: Caller, conversation: str, items: Sequence[Item]) -> ReusedSummary | None:
        """The conversation with its older items replaced by the summary that an earlier turn made of exactly
        these; None where there is none."""
        best: _Remembered | None = None
        for one in self._remembered.get((caller.id, conversation), ()):
            longer = best is None or one.length > best.length
            if longer and one.length < len(items) and _digest(items[: one.length]) == one.digest:
                best = one
        if best is None:
            return None
        window = best.window
        fitted = [*window, *items[best.length :]]
        compacted = Compacted("earlier", best.dropped, len(items) - best.length, best.summary)
        return ReusedSummary(fitted, list(items[: best.length]), len(window), compacted)

    async def fit(self, long: LongConversation) -> FittedConversation | None:
        """The conversation in at most `limit` tokens; None where nothing of it can go. Raises Interrupted; an
        error of the model only leaves its part of the summary empty."""
        items, limit, reused = long.items, long.limit, long.reused
        characters = max(1, text_length(items))
        fixed = (await long.render([Item(role="user", content=".")])).size
        rate = max(long.prompt.size - fixed, 1) / characters  # tokens per character
        room = max(limit.tokens - fixed, limit.tokens // 8)
        allowance = min(max(room // 6, 48), 2048) if limit.reason != "truncation" else 0
        cut = await self._choose_fitting_cut(long, rate, room, allowance)
        if cut is None:
            return await self._shorten(long, items, long.prompt)
        summary, receipt = "", None
        if allowance:
            left_out = items[head_length(items) : cut]
            text, receipt = await self._summarise(long, items[:cut], left_out, allowance, rate)
            words = user_messages(left_out, round(allowance / 2 / rate))
            title = f"Summary of the earlier conversation ({len(left_out)} items that are left out here):"
            summary = "\n".join(part for part in (title, text, words) if part)
        fitted = compacted_items(items, cut, summary)
        tail_length = len(items) - cut
        final = await long.render(fitted)
        shorter = await self._shorten(long, fitted, final)
        if shorter is not None:
            fitted, final = shorter.items, shorter.prompt
        dropped = cut - head_length(items)
        compacted = Compacted(limit.reason, dropped, tail_length, summary, long.prompt.size, final.size)
        if not summary:
            return FittedConversation(fitted, final, compacted, None, receipt)
        if long.name:
            original = [*reused.original, *items[reused.replaced : cut]] if reused else items[:cut]
            window = fitted[: len(fitted) - tail_length]
            self._remember((long.caller.id, long.name), original, window, summary)
        return FittedConversation(fitted, final, compacted, _compaction_item(fitted, summary), receipt)

    async def _choose_fitting_cut(
        self, long: LongConversation, rate: float, room: int, allowance: int
    ) -> int | None:
        """A cut after which about half of the room is free again."""
        items, limit = long.items, long.limit
        sizes = [round(rate * (text_length([item]) + 16)) + 1 for item in items]
        head = sum(sizes[: head_length(items)])
        budget = 0 if limit.reason == "request" else max((room - head) // 2 - allowance, room // 8)
        cut = choose_cut(items, sizes, budget)
        for _ in range(3):
            if cut is None:
                return None
            size = (await long.render(compacted_items(items, cut, ""))).size
            if size + allowance <= limit.tokens or not budget:
                break
            budget //= 2
            cut = choose_cut(items, sizes, budget)
        return cut

    async def _shorten(
        self, long: LongConversation, items: Sequence[Item], prompt: RenderedPrompt
    ) -> FittedConversation | None:
        """The items with long results of tools cut, where they would not fit the model otherwise."""
        limit = long.limit
        bound = limit.tokens if limit.reason != "threshold" else long.entry.context_length
        if bound is None or prompt.size <= bound:
            return None
        longest = max((len(i.output) for i in items if isinstance(i.output, str)), default=0)
        while longest > _SHORTEST_OUTPUT:
            longest = max(longest // 2, _SHORTEST_OUTPUT)
            fitted = shorten_outputs(items, longest)
            final = await long.render(fitted)
            if final.size <= bound:
                compacted = Compacted(limit.reason, 0, len(items), "", prompt.size, final.size)
                return FittedConversation(fitted, final, compacted, None)
        return None

    async def _summarise(
        self,
        long: LongConversation,
        before: Sequence[Item],
        left_out: Sequence[Item],
        allowance: int,
        rate: float,
    ) -> tuple[str, Receipt | None]:
        """The model's summary of `left_out`. It is asked at the end of the conversation as it is in its
        cache, or, where that does not fit, about a transcript."""
        context = long.entry.context_length
        longest = max(allowance // 2, 24)
        question = Item(role="user", content=_INSTRUCTION)
        prompt = await long.render([*before, question])
        if context is not None and prompt.size + longest >= context:
            space = max(context - longest, context // 2)
            while True:
                space = space * 3 // 4
                words = transcript(left_out, round(space / rate))
                prompt = await long.render([Item(role="user", content=f"{words}\n\n{_INSTRUCTION}")])
                if prompt.size + longest < context:
                    break
                if space < 64:
                    return "", None
        params = GenerationParams(longest, Sampling(temperature=0.0), (CALL,))
        try:
            return await self._ask(prompt.job(params), long.entry, long.caller)
        except Interrupted:
            raise
        except KeystrokeError:
            return "", None  # the list of the user's messages remains

    async def _ask(self, job: Job | RemoteJob, entry: ServedModel, caller: Caller) -> tuple[str, Receipt]:
        """The answer to a job. Reasoning is switched off: with it the summary would exceed its allowance."""
        service, model = self._service, entry.model
        if isinstance(job, Job) and model is not None and model.chat is not None:
            job.prompt = model.chat.without_thought(model.tokenizer, list(job.prompt))
        work = await service.enqueue(entry, job, caller, priority=Priority.CHAT)
        parser = AnswerForm().parser(model, job.prompt if isinstance(job, Job) else ())
        pieces: list[str] = []
        async with aclosing(work.items()) as parts:
            async for part in parts:
                if isinstance(part, Chunk) and part.text:
                    pieces += [s.text for s in parser.feed(part.text) if isinstance(s, TextSegment)]
        pieces += [s.text for s in parser.finish() if isinstance(s, TextSegment)]
        return "".join(pieces).strip(), work.current_receipt()

    def _remember(
        self, key: tuple[str, str], original: Sequence[Item], window: list[Item], summary: str
    ) -> None:
        """Remember what takes the place of `original`, for requests that send the same items again."""
        dropped = len(original) - head_length(original)
        kept = self._remembered.setdefault(key, [])
        kept.append(_Remembered(len(original), _digest(original), window, summary, dropped))
        del kept[:-_SUMMARIES]
        self._remembered.move_to_end(key)
        while len(self._remembered) > _CONVERSATIONS:
            self._remembered.popitem(last=False)


def transcript(items: Sequence[Item], room: int) -> str:
    """The items as text, each shortened so that all fit into `room` characters."""
    share = max(80, room // max(len(items), 1))
    lines = []
    for item in items:
        who = item.role or ("user" if item.type == "message" else item.type.replace("_", " "))
        output = item.output if isinstance(item.output, str) else ""
        text = content_text(item.content) or item.arguments or item.input or output
        text = " ".join((f"{item.name} {text}" if item.name else text).split())
        lines.append(f"{who}: {text if len(text) <= share else text[:share] + ' [...]'}")
    return "\n".join(lines)[:room]
