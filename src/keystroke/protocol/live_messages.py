"""Messages of the live channel: mirrored buffers, suggestions, next edits and findings.

Offsets count code points of the buffer's text (a JavaScript client converts from UTF-16). A change names the
version it starts from; its edits apply one after another, each to the text that the previous one left. Every
`complete` ends with exactly one `suggestion` that is `done`, one `not_shown` or one `error` with its id; if a
larger model is configured, a `suggestion.revised` may follow.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from keystroke.errors import KeystrokeError
from keystroke.protocol.faults import error_detail
from keystroke.protocol.response import ErrorDetail

Offset = Annotated[int, Meta(ge=0, le=2**40)]
Version = Annotated[int, Meta(ge=0, le=2**53)]
BufferName = Annotated[str, Meta(min_length=1, max_length=4096)]  # the document's URI, or any name
RequestId = Annotated[str, Meta(min_length=1, max_length=128)]
MAX_DELTAS = 10_000  # edits in one change; an editor that changes more sends the whole text again

Outcome = Literal["shown", "accepted", "partial", "dismissed"]
Extent = Literal["auto", "line", "block"]


class BufferEdit(Struct, frozen=True):
    """Replace [start, end) by `text`."""

    start: Offset
    end: Offset
    text: str


# Requests of a client


class BufferOpen(Struct, tag_field="type", tag="buffer.open", kw_only=True):
    """Open a buffer, or replace the text of an open one; its context is warmed up at once. `path`: the file's
    path in the workspace `root`; both are only used to find rules, imports and the language. `cursor`: the
    position to warm up."""

    buffer: BufferName
    text: str
    version: Version = 0
    path: str | None = None
    root: str | None = None
    language: str | None = None  # a language id as editors use them: "python", "typescriptreact", ...
    cursor: Offset | None = None


class BufferChange(Struct, tag_field="type", tag="buffer.change", kw_only=True):
    """`base`: the version the edits start from; `version`: the higher one they lead to. `cursor`: where the
    user types, if known; then a completion is started before it is requested."""

    buffer: BufferName
    base: Version
    version: Version
    edits: Annotated[list[BufferEdit], Meta(max_length=MAX_DELTAS)]
    cursor: Offset | None = None


class BufferCursor(Struct, tag_field="type", tag="buffer.cursor", kw_only=True):
    """The cursor moved without typing: the context there is warmed up. Never answered, and ignored for
    another version than the mirrored one."""

    buffer: BufferName
    version: Version
    cursor: Offset


class BufferClose(Struct, tag_field="type", tag="buffer.close", kw_only=True):
    buffer: BufferName


class BufferRequest(Struct, tag_field="type", kw_only=True):
    """A request about one version of a buffer."""

    id: RequestId
    buffer: BufferName
    version: Version

    @property
    def place(self) -> dict[str, Any]:
        """The fields that name the request in its answer."""
        return {"id": self.id, "buffer": self.buffer, "version": self.version}


class Complete(BufferRequest, tag="complete", kw_only=True):
    """Request the text at `cursor`. A newer request of the same buffer supersedes an older one. `invoked`:
    the user requested it explicitly, so the gate withholds nothing. `selected`: the selected item of the
    editor's own list; the suggestion replaces the same span and begins with the same text."""

    cursor: Offset
    invoked: bool = False
    extent: Extent = "auto"
    selected: BufferEdit | None = None


class NextEditAsk(BufferRequest, tag="next_edit.ask", kw_only=True):
    """Request the next edit now. `next_edit` events also follow changes without a request."""

    cursor: Offset


class Feedback(Struct, tag_field="type", tag="feedback", kw_only=True):
    """The outcome of a suggestion or a next edit. `length`: characters accepted by a partial acceptance."""

    id: RequestId
    buffer: BufferName
    outcome: Outcome
    length: Offset = 0


class CancelRequest(Struct, tag_field="type", tag="cancel", kw_only=True):
    """Stop a request. It ends with `not_shown`, reason "cancelled"."""

    id: RequestId


class ProblemsAsk(BufferRequest, tag="problems.ask", kw_only=True):
    """Request syntax errors, undefined names and wrong imports. Answered by `problems`."""


Refactoring = Literal[
    "rename", "extract_function", "extract_variable", "inline", "move", "change_signature", "organise_imports"
]


class RefactorAsk(BufferRequest, tag="refactor.ask", kw_only=True):
    """Request a refactoring of the code at [start, end). Answered by `changes`. `name`: the new name, or for
    `move` the module to move to, or for `change_signature` the new parameter list."""

    kind: Refactoring
    start: Offset
    end: Offset
    name: str = ""


class EditAsk(BufferRequest, tag="edit.ask", kw_only=True):
    """Request a minimal edit of the lines of [start, end), or of the whole buffer if they are equal, from a
    model that follows instructions. Answered by `changes`."""

    start: Offset
    end: Offset
    instruction: Annotated[str, Meta(min_length=1, max_length=20_000)]


LiveRequest = (
    BufferOpen | BufferChange | BufferCursor | BufferClose | Complete | NextEditAsk | Feedback |
    CancelRequest | ProblemsAsk | RefactorAsk | EditAsk
)  # fmt: skip


# Events of the server


class LiveReceipt(Struct, frozen=True, kw_only=True):
    """Tokens and times of one request. A suggestion that was typed through or cached computed nothing."""

    model: str = ""
    source: Literal["computed", "continued", "typed_through", "cached", "none"] = "computed"
    prompt_tokens: int = 0
    reused_tokens: int = 0
    computed_tokens: int = 0
    output_tokens: int = 0
    queue_ms: float = 0.0
    prefill_ms: float = 0.0
    decode_ms: float = 0.0
    total_ms: float = 0.0  # from the request's arrival, or the key's where that began the work, to the answer


class Ready(Struct, tag_field="type", tag="ready", kw_only=True):
    """The buffer is mirrored and its context is warm. If `warm` is False, `note` says why: this model or file
    gets no completions, or the server could not warm it up yet (for example `queue_full`)."""

    buffer: str
    version: int
    model: str
    warm: bool = True
    note: str = ""
    receipt: LiveReceipt = LiveReceipt()


class Resync(Struct, tag_field="type", tag="resync", kw_only=True):
    """The mirror is out of step: send `buffer.open` with the whole text. `have`: the mirrored version."""

    buffer: str
    reason: Literal["unknown_buffer", "version_gap", "bad_edit", "evicted"]
    have: int | None = None


class BufferAnswer(Struct, tag_field="type", kw_only=True):
    """`id` is the request's; a next edit that nobody requested has one of its own."""

    id: str
    buffer: str
    version: int


class Suggestion(BufferAnswer, tag="suggestion", kw_only=True):
    """Replace [start, end) by `text` in version `version`; most often an insertion at the cursor. Not `done`:
    more lines may follow under the same id; each such event carries the whole text so far."""

    start: int
    end: int
    text: str
    done: bool = True
    extent: Literal["rest", "line", "block"] = "line"
    confidence: float = 0.0  # geometric mean of the chosen tokens' probabilities
    receipt: LiveReceipt = LiveReceipt()


class NotShown(BufferAnswer, tag="not_shown", kw_only=True):
    """Nothing is shown, with the reason. `hidden`: the text that was computed but withheld."""

    reason: str
    hidden: str = ""
    receipt: LiveReceipt = LiveReceipt()


Verdict = Literal["confirmed", "lengthened", "replaced", "offered"]


class SuggestionRevised(BufferAnswer, tag="suggestion.revised", kw_only=True):
    """A larger model's answer to a request that has ended, at most one for each and only while its version is
    current: replace [start, end) by `text`. `confirmed`: the text that was shown; `lengthened`: that text and
    more; `replaced`: another text with high confidence; `offered`: nothing was shown before."""

    verdict: Verdict
    start: int
    end: int
    text: str
    extent: Literal["rest", "line", "block"] = "line"
    confidence: float = 0.0
    receipt: LiveReceipt = LiveReceipt()


class NextEditChange(Struct, frozen=True, kw_only=True):
    """One edit of a suggestion that may reach into other buffers."""

    buffer: str
    start: int
    end: int
    text: str


class NextEdit(BufferAnswer, tag="next_edit", kw_only=True):
    """A proposed edit elsewhere. `buffer`: where the change that led to it was made. `others`: further
    edits of the same intent, in order. Rebased while the user types: a later event with the same id
    replaces this one. `answers`: ids of the requests it answers."""

    cause: str  # "rename", "repeat", "signature", "model"
    title: str
    change: NextEditChange
    others: list[NextEditChange] = []
    answers: list[str] = []


class NextEditDropped(Struct, tag_field="type", tag="next_edit.dropped", kw_only=True):
    """A proposal is withdrawn (`id` is its own), or a request gets none (`id` is the request's)."""

    id: str
    buffer: str
    reason: str


class LiveFix(Struct, frozen=True, kw_only=True):
    title: str
    edits: list[BufferEdit]
    changes: str = ""  # of a suggestion: what it may change besides the weakness


class LiveFinding(Struct, frozen=True, kw_only=True):
    rule: str
    cwe: int
    severity: Literal["low", "medium", "high", "critical"]
    message: str
    start: int
    end: int
    origin: str = ""
    fixes: list[LiveFix] = []
    suggestions: list[LiveFix] = []  # not proved; a client labels them as suggestions


class Diagnostics(Struct, tag_field="type", tag="diagnostics", kw_only=True):
    """All findings about this version; they replace the earlier ones."""

    buffer: str
    version: int
    findings: list[LiveFinding]
    elapsed_ms: float = 0.0


class Problem(Struct, frozen=True, kw_only=True):
    """`code` names the kind of problem: "syntax-error", "undefined-name", ..."""

    code: str
    severity: Literal["error", "warning", "information", "hint"]
    message: str
    start: int
    end: int
    fixes: list[LiveFix] = []


class Problems(BufferAnswer, tag="problems", kw_only=True):
    """All problems of this version; they replace the earlier ones."""

    problems: list[Problem]
    elapsed_ms: float = 0.0


class FileEdits(Struct, frozen=True, kw_only=True):
    """Edits of one text, all at once: offsets count in the text before them. `buffer` where it is open, else
    `path`, and the text is the file's."""

    edits: list[BufferEdit]
    buffer: str | None = None
    path: str | None = None


class Changes(BufferAnswer, tag="changes", kw_only=True):
    """The edits of a refactoring or an edit request; the client applies them as one step. May be empty."""

    title: str
    files: list[FileEdits]


class LiveError(Struct, tag_field="type", tag="error", kw_only=True):
    status: int
    error: ErrorDetail
    id: str | None = None
    buffer: str | None = None


def live_error(error: KeystrokeError, request: str | None, buffer: str | None) -> LiveError:
    """`request`: the id of the request that failed."""
    return LiveError(status=error.status, error=error_detail(error), id=request, buffer=buffer)


LiveEvent = (
    Ready | Resync | Suggestion | NotShown | SuggestionRevised | NextEdit | NextEditDropped |
    Diagnostics | Problems | Changes | LiveError
)  # fmt: skip
