"""An n-gram cache: predicts from what followed the same words in the file and in the project.

One object serves one answer. The cursor's own line is not used as evidence. The file is read as it is now,
other files as they were when they were indexed; occurrences in the file weigh more.
"""

from __future__ import annotations

from keystroke.analysis.text_index import CONTEXT, Lexicon, TextContext, TextIndex
from keystroke.engine.mixing import Continuations

_FILE_WEIGHT = 3.0  # of an occurrence in the same file; one elsewhere weighs 1
_REACH = 120_000  # characters above and below the cursor that are indexed


class FileText:
    """An index of the text above and below the cursor's line, rebuilt only when that text changes.

    Not safe for concurrent use.
    """

    def __init__(self) -> None:
        self._lexicon = Lexicon()
        self._indexed: tuple[str, str, TextIndex] | None = None

    def index(self, text: str, cursor: int) -> TextIndex:
        start, end = text.rfind("\n", 0, cursor) + 1, text.find("\n", cursor)
        above = text[max(0, start - _REACH) : start]
        below = text[end + 1 : end + 1 + _REACH] if end >= 0 else ""
        if self._indexed is None or self._indexed[:2] != (above, below):
            lexed = self._lexicon.lex
            index = TextIndex.build(self._lexicon, [("below", lexed(below)), ("above", lexed(above))])
            self._indexed = above, below, index
        return self._indexed[2]


class NgramCache:
    """`repeated`: characters left of the cursor that the model's answer repeats. `path`: the file's own,
    which the project's index may hold too."""

    def __init__(
        self,
        text: str,
        cursor: int,
        file: FileText,
        project: TextIndex | None = None,
        path: str | None = None,
        *,
        repeated: int = 0,
        ends_line: bool = True,
    ) -> None:
        self.ends_line = ends_line
        self._text, self._cursor, self._file = text, cursor, file
        self._before = text[max(0, cursor - repeated - CONTEXT) : cursor - repeated]
        self._project, self._path = project, path
        self._near: TextIndex | None = None

    def predict(self, answer: str) -> Continuations | None:
        if self._near is None:  # built on the first call, which the engine's thread makes
            self._near = self._file.index(self._text, self._cursor)
        context = TextContext.before(self._before + answer)
        near = self._near.find_continuations(context)
        length = near.length if near is not None else 0
        far = None
        if self._project is not None:  # what matches less than the file does not count
            far = self._project.find_continuations(context, self._path, length)
        length = far.length if far is not None else length
        counts: dict[str, float] = {}
        for seen, worth in ((near, _FILE_WEIGHT), (far, 1.0)):
            if seen is not None and seen.length == length:
                for text, count in seen.followed.items():
                    counts[text] = counts.get(text, 0.0) + worth * count
        return Continuations(length, counts) if counts else None
