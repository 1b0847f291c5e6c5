"""What the file and the project have said before in a place like this one: an n-gram cache beside the model.

Pure; one object for one answer. The line the cursor stands in is no evidence, whatever it was before
somebody began to change it. The file itself is looked at as it is now, other files as they were when their
index was made; the file counts more.
"""

from __future__ import annotations

from keystroke.analysis.text_index import CONTEXT, Context, Lexicon, TextIndex
from keystroke.engine.mixing import Prediction

_NEAR = 3.0  # places of the same file count so much
_REACH = 120_000  # characters above and below the cursor that are looked at


class FileText:
    """What is above and below the cursor's line, as an index that is made anew only where that changed: keys
    in one line find it ready. For one thread at a time."""

    def __init__(self) -> None:
        self._lexicon = Lexicon()
        self._made: tuple[str, str, TextIndex] | None = None

    def index(self, before: str, after: str) -> TextIndex:
        """Of the file around a cursor with this text on either side."""
        above = before[: before.rfind("\n") + 1][-_REACH:]
        start = after.find("\n")
        below = after[start + 1 :][:_REACH] if start >= 0 else ""
        if self._made is None or self._made[:2] != (above, below):
            lexed = self._lexicon.lexed
            index = TextIndex.of(self._lexicon, [("below", lexed(below)), ("above", lexed(above))])
            self._made = above, below, index
        return self._made[2]


class NgramCache:
    """`before`: the text that the model's answer follows; `after`: what is right of and below the cursor.
    `file` is the buffer's own."""

    def __init__(
        self,
        before: str,
        after: str,
        file: FileText,
        project: TextIndex | None = None,
        path: str | None = None,
        *,
        ends_line: bool = True,
    ) -> None:
        self.ends_line = ends_line
        self._before, self._after, self._file = before, after, file
        self._project, self._path = project, path
        self._near: TextIndex | None = None

    def after(self, said: str) -> Prediction | None:
        if self._near is None:  # made by whoever asks first, which is never the event loop
            self._near = self._file.index(self._before, self._after)
        context = Context.before(self._before[-CONTEXT:] + said)
        near = self._near.after(context)
        far = self._project.after(context, without=self._path) if self._project is not None else None
        length = max((seen.length for seen in (near, far) if seen is not None), default=0)
        counts: dict[str, float] = {}
        for seen, worth in ((near, _NEAR), (far, 1.0)):
            if seen is not None and seen.length == length:
                for text, count in seen.followed.items():
                    counts[text] = counts.get(text, 0.0) + worth * count
        return Prediction(length, counts) if counts else None
