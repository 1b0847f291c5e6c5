"""The live channel's words: buffers mirrored key by key, suggestions, next edits and findings about them.

Offsets count code points of the buffer's text (a JavaScript client converts from UTF-16; Python and Rust
have them as they are). A change says which version it starts from; its edits happen one after another, each
counted in the text the one before it left. Every `complete` ends in exactly one `suggestion` that is `done`,
one `not_shown` or one `error` with its id; where a larger model reads along, a
`suggestion.revised` may follow.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from keystroke.protocol.response import ErrorDetail

Offset = Annotated[int, Meta(ge=0, le=2**40)]
Version = Annotated[int, Meta(ge=0, le=2**53)]
BufferName = Annotated[str, Meta(min_length=1, max_length=4096)]  # the document's URI, or any name
RequestId = Annotated[str, Meta(min_length=1, max_length=128)]
MAX_DELTAS = 10_000  # edits in one change; an editor that changes more sends the whole text again

Outcome = Literal["shown", "accepted", "partial", "dismissed"]
Extent = Literal["auto", "line", "block"]


class Delta(Struct, frozen=True):
    """Replace [start, end) by `text`."""

    start: Offset
    end: Offset
    text: str


# What a client says


class BufferOpen(Struct, tag_field="type", tag="buffer.open", kw_only=True):
    """Open a buffer, or replace all of one that is open; its context is warmed at once. `path`: where the
    file lies, in the workspace `root`; both only serve to find rules, imports and a language. `cursor`: where
    the user is, so that the context is warmed there."""

    buffer: BufferName
    text: str
    version: Version = 0
    path: str | None = None
    root: str | None = None
    language: str | None = None  # a language id as editors use them: "python", "typescriptreact", ...
    cursor: Offset | None = None


class BufferChange(Struct, tag_field="type", tag="buffer.change", kw_only=True):
    """`base`: the version the edits start from; `version`: the one they lead to, above it. `cursor`: where
    the user types on, if that is known; then the answer is begun before it is asked for."""

    buffer: BufferName
    base: Version
    version: Version
    edits: Annotated[list[Delta], Meta(max_length=MAX_DELTAS)]
    cursor: Offset | None = None


class BufferCursor(Struct, tag_field="type", tag="buffer.cursor", kw_only=True):
    """The user went there without typing: the context is warmed for the key to come. Never answered; about
    another version than the mirrored one it means nothing."""

    buffer: BufferName
    version: Version
    cursor: Offset


class BufferClose(Struct, tag_field="type", tag="buffer.close", kw_only=True):
    buffer: BufferName


class Complete(Struct, tag_field="type", tag="complete", kw_only=True):
    """Ask for the text at `cursor`. A newer request of the same buffer takes the place of an older one.
    `invoked`: the user asked by hand, so nothing is held back for calm's sake. `selected`: what the editor's
    own list would put there; the suggestion replaces the same span, begins with the same text and goes on."""

    id: RequestId
    buffer: BufferName
    version: Version
    cursor: Offset
    invoked: bool = False
    extent: Extent = "auto"
    selected: Delta | None = None


class NextEditAsk(Struct, tag_field="type", tag="next_edit.ask", kw_only=True):
    """Ask where to change next, now. Without asking, `next_edit` events come after changes."""

    id: RequestId
    buffer: BufferName
    version: Version
    cursor: Offset


class Feedback(Struct, tag_field="type", tag="feedback", kw_only=True):
    """What became of a suggestion or a next edit. `length`: characters taken by a partial acceptance."""

    id: RequestId
    buffer: BufferName
    outcome: Outcome
    length: Offset = 0


class Cancel(Struct, tag_field="type", tag="cancel", kw_only=True):
    """Stop a request. It ends with `not_shown`, reason "cancelled"."""

    id: RequestId


class ProblemsAsk(Struct, tag_field="type", tag="problems.ask", kw_only=True):
    """Ask what would not run: syntax, undefined names, wrong imports. Answered by `problems`."""

    id: RequestId
    buffer: BufferName
    version: Version


Refactoring = Literal[
    "rename", "extract_function", "extract_variable", "inline", "move", "change_signature", "organise_imports"
]


class RefactorAsk(Struct, tag_field="type", tag="refactor.ask", kw_only=True):
    """Ask for a refactoring of what lies at [start, end). Answered by `changes`. `name`: the new name, or for
    `move` the module to move to, or for `change_signature` the new parameter list."""

    id: RequestId
    buffer: BufferName
    version: Version
    kind: Refactoring
    start: Offset
    end: Offset
    name: str = ""


class EditAsk(Struct, tag_field="type", tag="edit.ask", kw_only=True):
    """Ask a model for a minimal edit of the lines of [start, end), or of the whole buffer where they are
    equal. Answered by `changes`; needs a model that follows instructions."""

    id: RequestId
    buffer: BufferName
    version: Version
    start: Offset
    end: Offset
    instruction: Annotated[str, Meta(min_length=1, max_length=20_000)]


LiveRequest = (
    BufferOpen
    | BufferChange
    | BufferCursor
    | BufferClose
    | Complete
    | NextEditAsk
    | Feedback
    | Cancel
    | ProblemsAsk
    | RefactorAsk
    | EditAsk
)


# What the server says


class LiveReceipt(Struct, frozen=True, kw_only=True):
    """Where the time of one key went. A suggestion typed through, or from the cache, computed nothing."""

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
    """The buffer is mirrored and its context is warm. `warm` False: it is not, and `note` says why: this
    model or file gets no completions, or the server could not warm it yet (`queue_full`, say); a key will."""

    buffer: str
    version: int
    model: str
    warm: bool = True
    note: str = ""
    receipt: LiveReceipt = LiveReceipt()


class Resync(Struct, tag_field="type", tag="resync", kw_only=True):
    """The mirror cannot follow: send `buffer.open` with the whole text. `have`: the version mirrored."""

    buffer: str
    reason: Literal["unknown_buffer", "version_gap", "bad_edit", "evicted"]
    have: int | None = None


class Suggestion(Struct, tag_field="type", tag="suggestion", kw_only=True):
    """Replace [start, end) by `text` in version `version`; most often an insertion at the cursor. Not `done`:
    more lines may follow under the same id; each such event carries the whole text so far."""

    id: str
    buffer: str
    version: int
    start: int
    end: int
    text: str
    done: bool = True
    extent: Literal["rest", "line", "block"] = "line"
    confidence: float = 0.0  # geometric mean of the chosen tokens' probabilities
    receipt: LiveReceipt = LiveReceipt()


class NotShown(Struct, tag_field="type", tag="not_shown", kw_only=True):
    """There is nothing to show, and why. `hidden`: what was made but held back, for whoever wants to look."""

    id: str
    buffer: str
    version: int
    reason: str
    hidden: str = ""
    receipt: LiveReceipt = LiveReceipt()


Verdict = Literal["confirmed", "lengthened", "replaced", "offered"]


class SuggestionRevised(Struct, tag_field="type", tag="suggestion.revised", kw_only=True):
    """What a larger model made of a request that has ended, at most once for each and only while its version
    stands: [start, end) should be replaced by `text`. `confirmed`: by what was shown; `lengthened`: by that
    and more; `replaced`: by something else, of which it is sure; `offered`: nothing was shown before."""

    id: str  # the request's
    buffer: str
    version: int
    verdict: Verdict
    start: int
    end: int
    text: str
    extent: Literal["rest", "line", "block"] = "line"
    confidence: float = 0.0
    receipt: LiveReceipt = LiveReceipt()


class Change(Struct, frozen=True, kw_only=True):
    """One edit of a suggestion that may reach into other buffers."""

    buffer: str
    start: int
    end: int
    text: str


class NextEdit(Struct, tag_field="type", tag="next_edit", kw_only=True):
    """Jump to `change`, and take it. `others`: the rest of the same intent, in order. Rebased while the user
    types: a later event with the same id takes this one's place. `answers`: the asks it answers."""

    id: str
    buffer: str  # the buffer whose change led here
    version: int
    cause: str  # "rename", "repeat", "signature", "model"
    title: str
    change: Change
    others: list[Change] = []
    answers: list[str] = []


class NextEditDropped(Struct, tag_field="type", tag="next_edit.dropped", kw_only=True):
    """An offer is gone (`id` is its own), or nothing is offered to an ask (`id` is the ask's); and why."""

    id: str
    buffer: str
    reason: str


class LiveFix(Struct, frozen=True, kw_only=True):
    title: str
    edits: list[Delta]


class LiveFinding(Struct, frozen=True, kw_only=True):
    rule: str
    cwe: int
    severity: Literal["low", "medium", "high", "critical"]
    message: str
    start: int
    end: int
    origin: str = ""
    fixes: list[LiveFix] = []
    suggestions: list[LiveFix] = []  # only the direction is known: a client shows them under that word


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


class Problems(Struct, tag_field="type", tag="problems", kw_only=True):
    """All problems of this version; they replace the earlier ones."""

    id: str
    buffer: str
    version: int
    problems: list[Problem]
    elapsed_ms: float = 0.0


class FileEdits(Struct, frozen=True, kw_only=True):
    """Edits of one text, all at once: offsets count in the text before them. `buffer` where it is open, else
    `path`, and the text is the file's."""

    edits: list[Delta]
    buffer: str | None = None
    path: str | None = None


class Changes(Struct, tag_field="type", tag="changes", kw_only=True):
    """What a refactoring or an edit would do, to be made by the client as one step. Empty: nothing to do."""

    id: str
    buffer: str
    version: int
    title: str
    files: list[FileEdits]


class LiveError(Struct, tag_field="type", tag="error", kw_only=True):
    status: int
    error: ErrorDetail
    id: str | None = None
    buffer: str | None = None


LiveEvent = (
    Ready
    | Resync
    | Suggestion
    | NotShown
    | SuggestionRevised
    | NextEdit
    | NextEditDropped
    | Diagnostics
    | Problems
    | Changes
    | LiveError
)
