"""Texts of a refactoring: files of the workspace, overlaid by unsaved buffers.

Rope reads files through this and cannot write. It sees every text with LF line ends and no byte order mark;
offsets and edits are converted, so a file keeps its line ends.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from pathlib import Path

from keystroke.analysis.project_files import python_files
from keystroke.errors import Forbidden, InputError, NotFound
from keystroke.text import Edit
from keystroke.text.encoding import declared_encoding, decode

MAX_BYTES = 4 << 20  # a larger file is data; rope would take minutes over it


class OverlaySources:
    def __init__(self, root: Path, overlay: Mapping[str, str]) -> None:
        self.root = root.resolve()
        self.overlay = dict(overlay)
        self._texts: dict[str, str] = {}

    def text(self, path: str) -> str:
        """The text of the open buffer, or of the file."""
        if path in self.overlay:
            return self.overlay[path]
        if path not in self._texts:
            file = self.root / path
            if not file.resolve().is_relative_to(self.root):
                raise Forbidden(f"{path} leads outside the workspace {self.root}; it is not touched")
            try:
                if file.stat().st_size > MAX_BYTES:
                    raise InputError(f"{path} is larger than {MAX_BYTES >> 20} MB; it is not refactored")
                self._texts[path] = decode(file.read_bytes(), path).text
            except (FileNotFoundError, NotADirectoryError):
                raise NotFound(f"{path} does not exist in {self.root}; check the path") from None
            except OSError as error:
                raise InputError(f"{path} cannot be read: {error.strerror}") from None
        return self._texts[path]

    def files_containing(self, word: str) -> list[str]:
        """The readable files of the project that contain `word`."""
        found = []
        for path in dict.fromkeys([*self.overlay, *python_files(self.root)]):
            try:
                if word in self.text(path) and (self.root / path).exists():
                    found.append(path)
            except InputError:
                continue
        return found

    # The file system interface that rope calls.

    def read(self, path: str) -> bytes:
        name = self.name(path)
        if name is None:
            return Path(path).read_bytes()  # the interpreter's own modules
        text = self.text(name).replace("\r\n", "\n")
        encoded = text.encode("utf-8", "surrogatepass")
        declared = declared_encoding(encoded)
        try:
            return text.encode(declared) if declared else encoded
        except (UnicodeEncodeError, LookupError):
            return encoded

    def name(self, path: str) -> str | None:
        try:
            return Path(path).resolve().relative_to(self.root).as_posix()
        except ValueError:
            return None

    def _refuse(self, *_: object) -> None:
        raise InputError("a refactoring only plans; it writes nothing")

    create_file = create_folder = move = remove = write = _refuse


def lf_offset(text: str, offset: int) -> int:
    """An offset in `text` as an offset in the same text with LF line ends."""
    if not 0 <= offset <= len(text):
        raise InputError(f"offset {offset} is outside the text, which has {len(text)} characters")
    return offset - text.count("\r\n", 0, offset)


def restore_line_ends(text: str, edits: tuple[Edit, ...]) -> tuple[Edit, ...]:
    """Edits of the LF text as edits of `text` itself."""
    if "\r\n" not in text:
        return edits
    ends: list[int] = []  # offsets in the LF text of the line ends that have a CR before them here
    at = text.find("\r\n")
    while at >= 0:
        ends.append(at - len(ends))
        at = text.find("\r\n", at + 2)

    def restore(offset: int) -> int:
        return offset + bisect_right(ends, offset - 1)

    crlf = 2 * len(ends) > text.count("\n")
    return tuple(
        Edit(restore(e.start), restore(e.end), e.text.replace("\n", "\r\n") if crlf else e.text)
        for e in edits
    )
