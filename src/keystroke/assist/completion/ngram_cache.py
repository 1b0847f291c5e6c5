"""What the file and the project have said before in a place like this one: an n-gram cache beside the model.

Law: pure; one object for one answer. The line the cursor stands in is no evidence, whatever it was before
somebody began to change it. The file itself is looked at as it is now, other files as they were when their
index was made; the file counts more.
"""

from __future__ import annotations

from collections import Counter

from keystroke.analysis.text_index import Context, Lexicon, Seen, TextIndex
from keystroke.engine.mixing import Prediction

_NEAR = 3.0  # places of the same file count so much
_REACH = 120_000  # characters above and below the cursor that are looked at


class NgramCache:
    """`before`: the text that the model's answer follows; `after`: what is right of and below the cursor.
    `lexicon` is the buffer's own: a key only costs the lines it changed."""

    def __init__(
        self,
        before: str,
        after: str,
        lexicon: Lexicon,
        project: TextIndex | None = None,
        path: str | None = None,
        *,
        ends_line: bool = True,
    ) -> None:
        self.ends_line = ends_line
        self._before, self._after, self._lexicon = before, after, lexicon
        self._project, self._path = project, path
        self._file: TextIndex | None = None

    def after(self, said: str) -> Prediction | None:
        context = Context.before(self._before + said)
        near = self._own().after(context)
        far = self._project.after(context, without=self._path) if self._project is not None else None
        length = max((seen.length for seen in (near, far) if seen is not None), default=0)
        counts: Counter[str] = Counter()
        for seen, worth in ((near, _NEAR), (far, 1.0)):
            if seen is not None and seen.length == length:
                _add(counts, seen, worth)
        return Prediction(length, counts) if counts else None

    def _own(self) -> TextIndex:
        if self._file is None:  # made by whoever asks first, which is never the event loop
            above = self._before[: self._before.rfind("\n") + 1][-_REACH:]
            start = self._after.find("\n")
            below = self._after[start + 1 :][:_REACH] if start >= 0 else ""
            lexed = self._lexicon.lexed
            self._file = TextIndex.of(self._lexicon, [("below", lexed(below)), ("above", lexed(above))])
        return self._file


def _add(counts: Counter[str], seen: Seen, worth: float) -> None:
    for text, count in seen.followed.items():
        counts[text] += worth * count  # type: ignore[assignment]
