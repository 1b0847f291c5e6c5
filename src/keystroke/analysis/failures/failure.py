"""A failure of a program as it was printed: the error and its stack frames."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import PurePath


class Language(StrEnum):
    PYTHON = "python"
    NODE = "javascript"
    TYPESCRIPT = "typescript"
    GO = "go"
    JAVA = "java"
    RUST = "rust"
    C = "c"
    CPP = "cpp"
    OTHER = "other"


_BY_SUFFIX = {
    ".py": Language.PYTHON, ".pyi": Language.PYTHON, ".js": Language.NODE, ".mjs": Language.NODE,
    ".cjs": Language.NODE, ".jsx": Language.NODE, ".ts": Language.TYPESCRIPT, ".tsx": Language.TYPESCRIPT,
    ".mts": Language.TYPESCRIPT, ".cts": Language.TYPESCRIPT, ".go": Language.GO, ".java": Language.JAVA,
    ".rs": Language.RUST, ".c": Language.C, ".h": Language.C, ".cc": Language.CPP, ".cpp": Language.CPP,
    ".cxx": Language.CPP, ".hpp": Language.CPP,
}  # fmt: skip


def language_of(path: str) -> Language:
    return _BY_SUFFIX.get(PurePath(path).suffix.lower(), Language.OTHER)


@dataclass(frozen=True, slots=True)
class StackFrame:
    """A position in a file as printed: line and column count from 1, a column of 0 is unknown."""

    path: str
    line: int
    name: str = ""
    column: int = 0


@dataclass(frozen=True, slots=True)
class Failure:
    """One error with its frames, the innermost last. `hint` is the name that the interpreter suggests.
    `compiled`: reported by a compiler."""

    language: Language
    kind: str
    message: str
    frames: tuple[StackFrame, ...]
    hint: str = ""
    compiled: bool = False

    @property
    def place(self) -> tuple[str, str, int]:
        """Identifies a failure that happens again; its message may differ in numbers."""
        last = self.frames[-1] if self.frames else StackFrame("", 0)
        return self.kind, last.path, last.line


# The index of a failure's last line in the output, and the failure.
LocatedFailure = tuple[int, Failure]
