"""One open buffer of a live connection: keeps its mirror and passes every change to what follows the text.

Those are the suggestions, the audit, the next-edit tracker and the record of outcomes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from keystroke.assist.completion import LiveCompletion, WithheldReason
from keystroke.gateway.live.audit import BufferAudit
from keystroke.gateway.live.mirror import BufferMirror
from keystroke.gateway.live.next_edit import BufferNextEdit
from keystroke.gateway.live.outcomes import BufferOutcomes
from keystroke.gateway.live.suggestions import SuggestionRunner
from keystroke.protocol import live_messages as live
from keystroke.text import Edit


class LiveBuffer:
    """`audit`, `next_edit` and `outcomes` are None where the settings switch them off."""

    def __init__(
        self,
        mirror: BufferMirror,
        completion: LiveCompletion,
        suggestions: SuggestionRunner,
        *,
        send: Callable[[live.LiveEvent], None],
        audit: BufferAudit | None,
        next_edit: BufferNextEdit | None,
        outcomes: BufferOutcomes | None,
    ) -> None:
        self.mirror, self.completion = mirror, completion
        self.suggestions, self._send = suggestions, send
        self._audit, self._next_edit, self._outcomes = audit, next_edit, outcomes

    def open(self) -> None:
        """Warm the context and audit the text."""
        self.suggestions.open()
        if self._audit is not None:
            self._audit.apply_edits(self.mirror.text, self.mirror.version, ())
        if self._outcomes is not None:
            self._outcomes.tune()

    def change(
        self, edits: Sequence[Edit], version: int, cursor: int | None, others: Callable[[], dict[str, str]]
    ) -> None:
        """Apply the editor's edits. Raises InputError, with nothing changed, for an edit outside the text.
        `others` returns the texts of the other buffers in the same language."""
        mirror = self.mirror
        before = mirror.apply_edits(edits, version)
        if self._audit is not None:
            self._audit.apply_edits(mirror.text, version, edits)
        if self._next_edit is not None:
            self._next_edit.apply_edits(before, edits, others())
        if self._outcomes is not None:
            self._outcomes.apply_edits(edits, mirror.text)
        self.suggestions.apply_edits(edits, cursor)

    def move_cursor(self, request: live.BufferCursor) -> None:
        mirror = self.mirror
        if (
            request.version == mirror.version
            and request.cursor <= len(mirror.text)
            and request.cursor != mirror.cursor
        ):
            mirror.cursor = request.cursor
            self.suggestions.move_cursor()

    def apply_feedback(self, feedback: live.Feedback) -> None:
        if self._outcomes is not None:
            self._outcomes.record_feedback(feedback)
        if self._next_edit is None or not self._next_edit.apply_feedback(feedback, self.mirror.text):
            self.suggestions.apply_feedback(feedback)

    def send_next_edit(self, request: live.NextEditAsk) -> None:
        """Send the current next edit again, or why there is none."""
        if request.version == self.mirror.version and self._next_edit is not None:
            self._next_edit.answer_request(request.id)
            return
        stale = request.version != self.mirror.version
        reason = WithheldReason.STALE if stale else WithheldReason.DISABLED
        self._send(live.NextEditDropped(id=request.id, buffer=self.mirror.name, reason=reason))

    def close(self) -> None:
        for part in (self.suggestions, self._audit, self._next_edit, self._outcomes):
            if part is not None:
                part.close()
