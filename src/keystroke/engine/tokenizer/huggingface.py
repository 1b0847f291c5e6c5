"""Tokenizers of the `tokenizers` library, from a `tokenizer.json` or built from a GGUF file.

Special tokens are recognised here, and only on request, before the library sees the text. Unicode
normalisation is removed from byte-level tokenizers, so that text round-trips exactly. The bytes of a token
come from the vocabulary.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from keystroke.engine.tokenizer.base import Tokenizer, check_text
from keystroke.engine.tokenizer.byte_tokens import special_pattern
from keystroke.errors import ModelDamaged, NotFound, UnsupportedModel, UsageError

SPACE_MARK = "▁"  # sentencepiece's space
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")

# Valid cuts for all patterns below: no pre-token continues from an ASCII letter or digit into a space or
# newline, and none that ends there depends on what follows.
_CUT = re.compile(r"(?<=[0-9A-Za-z])(?=[ \n])")


class LibraryTokenizer(Tokenizer):
    """`machine` must have no special tokens, no lossy normaliser and no post-processor."""

    def __init__(
        self,
        machine: tokenizers.Tokenizer,
        special: Mapping[str, int],
        *,
        bos: int | None = None,
        eos: int | None = None,
        byte_level: bool = True,
        cuttable: bool = False,
        vocab_size: int | None = None,
    ) -> None:
        self._machine = machine
        self._special = dict(special)
        self._special_ids = frozenset(special.values())
        self.special_pattern = special_pattern(self._special)
        self._byte_level = byte_level
        self._to_bytes = _byte_level if byte_level else _piece_bytes
        self._cuttable = cuttable
        # Filled on demand: an answer uses few tokens, and filling it would delay the first.
        self._bytes = {
            token: added.content.encode() for token, added in machine.get_added_tokens_decoder().items()
        } | {token: piece.encode() for piece, token in special.items()}
        self.bos, self.eos = bos, eos
        if vocab_size is None:
            named = (machine.get_vocab(True).values(), special.values())
            vocab_size = max(max(ids, default=-1) for ids in named) + 1
        self.vocab_size = vocab_size

    def description(self) -> tuple[dict[str, Any], str]:
        """Its parameters and the library's JSON, for `from_description`."""
        values = {
            "special": self._special,
            "bos": self.bos,
            "eos": self.eos,
            "byte_level": self._byte_level,
            "cuttable": self._cuttable,
            "vocab_size": self.vocab_size,
            "starts_with_space": self.starts_with_space,
        }
        return values, self._machine.to_str()

    @classmethod
    def from_description(cls, values: dict[str, Any], machine: str) -> LibraryTokenizer:
        """The tokenizer of a description. Raises ValueError if the library rejects it."""
        values = dict(values)
        spaced = bool(values.pop("starts_with_space"))
        try:
            library = tokenizers.Tokenizer.from_str(machine)
        except Exception as error:  # the library raises bare Exception
            raise ValueError(str(error)) from error
        tokenizer = cls(library, values.pop("special"), **values)
        tokenizer.starts_with_space = spaced
        return tokenizer

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        if special and self.special_pattern is not None:
            tokens: list[int] = []
            for part in self.special_pattern.split(text):
                if part in self._special:
                    tokens.append(self._special[part])
                elif part:
                    tokens.extend(self._encode_plain(part))
            return tokens
        return self._encode_plain(text)

    def _encode_plain(self, text: str) -> list[int]:
        try:
            ids: list[int] = self._machine.encode(text, add_special_tokens=False).ids
            return ids
        except (TypeError, UnicodeEncodeError):
            check_text(text)
            raise

    def token_bytes(self, token: int) -> bytes:
        found = self._bytes.get(token)
        if found is None:
            if not 0 <= token < self.vocab_size:
                raise UsageError(f"token {token} is outside the vocabulary of {self.vocab_size}")
            piece = self._machine.id_to_token(token)  # None for unused rows of the embedding
            found = self._bytes[token] = self._to_bytes(piece or "")
        return found

    def special(self, text: str) -> int | None:
        return self._special.get(text)

    def is_special(self, token: int) -> bool:
        return token in self._special_ids

    def cuts(self, text: str, start: int, end: int) -> Sequence[int]:
        return [m.start() for m in _CUT.finditer(text, start, end)] if self._cuttable else ()


def load_tokenizer_json(folder: Path) -> LibraryTokenizer:
    """The tokenizer of a Hugging Face folder, or of a `tokenizer.json` itself."""
    file = folder if folder.is_file() else folder / "tokenizer.json"
    try:
        spec = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise NotFound(f"{folder} has no tokenizer.json; fetch the model's complete folder") from None
    except (ValueError, OSError) as error:
        raise ModelDamaged(f"{file} cannot be read as JSON; fetch it again") from error
    if not isinstance(spec, dict) or not isinstance(spec.get("model"), dict):
        raise ModelDamaged(f"{file} does not describe a tokenizer; fetch it again")
    if spec["model"].get("type") not in (None, "BPE", "Unigram"):
        raise UnsupportedModel(
            f"{file} holds a {spec['model']['type']} tokenizer; BPE and Unigram ones can be used"
        )
    config = read_json(file.parent / "tokenizer_config.json")
    return from_spec(spec, config)


def from_spec(spec: dict[str, Any], config: Mapping[str, Any] | None = None) -> LibraryTokenizer:
    """Build a tokenizer from the content of a tokenizer.json, changed so that text round-trips exactly."""
    config = config or {}
    special: dict[str, int] = {}
    kept = []
    for added in spec.get("added_tokens") or ():
        # Added tokens of white space are ordinary text; all others are control tokens.
        if added["content"].isspace():
            kept.append(added)
        else:
            special[added["content"]] = added["id"]
    bos = _first_token(spec.get("post_processor"), special)
    spec = {**spec, "added_tokens": kept, "post_processor": None, "truncation": None, "padding": None}
    spec, spaced = _make_lossless(spec)
    try:
        machine = tokenizers.Tokenizer.from_str(json.dumps(spec))
    except Exception as error:  # the library raises bare Exception
        raise ModelDamaged(f"the tokenizer's description is not valid ({error}); fetch it again") from error
    if config.get("add_bos_token") is True:
        bos = special.get(_token_name(config.get("bos_token")) or "", bos)
    elif config.get("add_bos_token") is False:
        bos = None
    eos = special.get(_token_name(config.get("eos_token")) or "")
    byte_level, cuttable = _is_byte_level(spec), is_cuttable(spec)
    tokenizer = LibraryTokenizer(machine, special, bos=bos, eos=eos, byte_level=byte_level, cuttable=cuttable)
    tokenizer.starts_with_space = spaced
    return tokenizer


def _make_lossless(spec: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """The description without what would change text: normalisation before byte-level encoding, and the space
    that sentencepiece puts before the first word. Also returns whether that space was removed."""
    if _is_byte_level(spec):
        return {**spec, "normalizer": None}, False
    normaliser, before = spec.get("normalizer"), spec.get("pre_tokenizer")
    stages = (
        normaliser["normalizers"] if normaliser and normaliser.get("type") == "Sequence" else [normaliser]
    )
    kept = [s for s in stages if s and s.get("type") != "Prepend"]
    spaced = len(kept) < len([s for s in stages if s])
    if before and before.get("type") == "Metaspace":
        spaced = (
            spaced
            or before.get("prepend_scheme", "always") != "never"
            or before.get("add_prefix_space") is True
        )
        before = {**before, "prepend_scheme": "never"}
        before.pop("add_prefix_space", None)
    normaliser = {"type": "Sequence", "normalizers": kept} if kept else None
    return {**spec, "normalizer": normaliser, "pre_tokenizer": before}, spaced


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; empty if the file does not exist."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (ValueError, OSError) as error:
        raise ModelDamaged(f"{path} cannot be read as JSON; fetch it again") from error
    return value if isinstance(value, dict) else {}


GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_PATTERN = LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")
SEED_PATTERN = QWEN2_PATTERN.replace(r" ?[^\s\p{L}\p{N}]+[\r\n]*", r" ?[^\s\p{L}\p{N}\r\n]+")
QWEN35_PATTERN = QWEN2_PATTERN.replace(r"?\p{L}+|", r"?[\p{L}\p{M}]+|").replace(
    r" ?[^\s\p{L}\p{N}]+", r" ?[^\s\p{L}\p{M}\p{N}]+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
TEKKEN_PATTERN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SHORTENED = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
GPT4O_PATTERN = (
    TEKKEN_PATTERN.replace(f"{_LOWER}+|", f"{_LOWER}+{_SHORTENED}|", 1)
    .replace(f"{_LOWER}*|", f"{_LOWER}*{_SHORTENED}|", 1)
    .replace(r"|\p{N}|", r"|\p{N}{1,3}|")
)
DEEPSEEK_PATTERNS = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}")
# Each is a complete pre-tokenizer.
_WHOLE = frozenset(
    {
        *(GPT2_PATTERN, LLAMA3_PATTERN, QWEN2_PATTERN, SEED_PATTERN),
        *(QWEN35_PATTERN, TEKKEN_PATTERN, GPT4O_PATTERN),
    }
)


def is_cuttable(spec: Mapping[str, Any]) -> bool:
    """Whether `_CUT` is valid for this pre-tokenizer: byte-level, with known patterns, and no normaliser."""
    if spec.get("normalizer") is not None or spec.get("added_tokens") or not _is_byte_level(spec):
        return False
    seen: set[str] = set()
    for stage in _stages(spec.get("pre_tokenizer")):
        match stage:
            case {"type": "Digits"}:
                seen.add(r"\p{N}")
            case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}:
                seen.add(GPT2_PATTERN)
            case {"type": "ByteLevel", "add_prefix_space": False}:
                pass
            case {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}:
                seen.add(pattern)
            case _:
                return False
    if not seen <= _WHOLE | set(DEEPSEEK_PATTERNS):
        return False
    return bool(seen & _WHOLE) or seen.issuperset({r"\s?\p{L}+", r"\p{N}"})


def _stages(node: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if node is None:
        return []
    if node.get("type") == "Sequence":
        return [stage for child in node["pretokenizers"] for stage in _stages(child)]
    return [node]


def _is_byte_level(spec: Mapping[str, Any]) -> bool:
    return any(stage.get("type") == "ByteLevel" for stage in _stages(spec.get("pre_tokenizer")))


def _first_token(processor: Mapping[str, Any] | None, special: Mapping[str, int]) -> int | None:
    """The token a TemplateProcessing puts first, if any."""
    if processor is None:
        return None
    if processor.get("type") == "Sequence":
        found = [_first_token(p, special) for p in processor.get("processors", ())]
        return next((b for b in found if b is not None), None)
    if processor.get("type") == "TemplateProcessing" and processor.get("single"):
        first = processor["single"][0]
        if "SpecialToken" in first:
            return special.get(first["SpecialToken"]["id"])
    return None


def _token_name(token: object) -> str | None:
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _byte_alphabet() -> dict[str, int]:
    """The characters of byte-level vocabularies: printable bytes as themselves, the others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [b for b in range(256) if b not in set(printable)]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(hidden)}


BYTE_OF = _byte_alphabet()


def _byte_level(piece: str) -> bytes:
    try:
        return bytes([BYTE_OF[c] for c in piece])
    except KeyError:
        return piece.encode()


def _piece_bytes(piece: str) -> bytes:
    if match := _BYTE_PIECE.fullmatch(piece):
        return bytes((int(match[1], 16),))
    return piece.replace(SPACE_MARK, " ").encode()
