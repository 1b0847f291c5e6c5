"""Readers of foreign bytes end with a result or one of the program's own errors, whatever they are given.

Each reader gets a corpus of valid inputs and mutations of it: bits turned, pieces cut, repeated, exchanged
between inputs, numbers replaced by extreme ones. The runs are seeded and bounded; KEYSTROKE_FUZZ multiplies
their number for a longer search.
"""

from __future__ import annotations

import json
import os
import random
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from keystroke.assist.edit.blocks import parse_blocks
from keystroke.assist.edit.patch import (
    UnreadablePatch,
    is_envelope,
    is_unified,
    parse_envelope,
    parse_unified,
)
from keystroke.assist.tool_calls.forms import GLM, HARMONY, HERMES, LLAMA, MISTRAL, NAMED, QWEN
from keystroke.assist.tool_calls.parser import answer_parser
from keystroke.assist.tool_calls.patches import calls_from_patch
from keystroke.assist.tool_calls.tools import OfferedTool, whole_toolset
from keystroke.engine.adapter import AdapterShape, read_adapter, write_adapter
from keystroke.engine.checkpoint.gguf_header import open_header, read_metadata
from keystroke.engine.checkpoint.safetensors_file import SafetensorsFile
from keystroke.engine.sandbox import compile_template, render_template
from keystroke.engine.speculative.head_file import CONFIG, NORMS, WEIGHTS, HeadConfig, open_head
from keystroke.errors import KeystrokeError
from keystroke.protocol import codec

RUNS = 150 * int(os.environ.get("KEYSTROKE_FUZZ", "1"))
EXTREMES = (
    b"\x00" * 8,
    b"\xff" * 8,
    b"\xff" * 7 + b"\x7f",
    b"\x00" * 7 + b"\x80",
    b"-1",
    b"9" * 30,
    b"1e999",
)


def mutations(corpus: Sequence[bytes], runs: int = RUNS) -> Iterator[bytes]:
    """The corpus, then `runs` mutations of it."""
    yield from corpus
    choose = random.Random(20)
    for _ in range(runs):
        data = bytearray(choose.choice(corpus))
        for _ in range(choose.randint(1, 4)):
            at = choose.randrange(len(data) + 1)
            kind = choose.randrange(6)
            if kind == 0 and data:
                data[at % len(data)] ^= 1 << choose.randrange(8)
            elif kind == 1:
                del data[at : at + choose.randrange(64)]
            elif kind == 2:
                data[at:at] = data[at : at + choose.randrange(64)] * choose.randint(1, 3)
            elif kind == 3:
                other = choose.choice(corpus)
                start = choose.randrange(len(other) + 1)
                data[at:at] = other[start : start + choose.randrange(64)]
            elif kind == 4:
                extreme = choose.choice(EXTREMES)
                data[at : at + len(extreme)] = extreme
            else:
                data[at:at] = bytes(choose.randrange(256) for _ in range(choose.randrange(8)))
        yield bytes(data)


def search(corpus: Sequence[bytes], read: Callable[[bytes], object], *errors: type[Exception]) -> int:
    """Read every mutation; the number of those that were refused. Any other exception fails the test."""
    refused = 0
    expected: tuple[type[Exception], ...] = (KeystrokeError, *errors)
    for data in mutations(corpus):
        try:
            read(data)
        except expected:
            refused += 1
        except Exception as error:
            pytest.fail(f"{type(error).__name__}: {error!s:.200} for {data[:200]!r}")
    return refused


def texts(read: Callable[[str], object]) -> Callable[[bytes], object]:
    return lambda data: read(data.decode("utf-8", "replace"))


EVENTS = [
    json.dumps(event).encode()
    for event in (
        {"type": "response.create", "response": {"model": "m", "input": "x", "max_output_tokens": 4}},
        {"type": "response.create", "input": [{"role": "user", "content": [{"type": "input_text"}]}]},
        {"type": "response.cancel", "response_id": "resp_1"},
        {"type": "session.update", "session": {}},
        {"type": "open", "path": "a.py", "text": "x = 1\n", "version": 1},
        [[[[{"a": None}]]]],
    )
]  # fmt: skip


@pytest.mark.parametrize(
    "decode", [codec.decode_client_event, codec.decode_live_request, codec.decode_server_event]
)
def test_the_protocol_decoder(decode: Callable[[bytes], object]) -> None:
    assert search([*EVENTS, b"[" * 5000 + b"]" * 5000], decode) > RUNS // 2


def _string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def _gguf() -> bytes:
    """A small valid file: three fields of metadata, one tensor."""
    fields = [
        _string(b"general.architecture") + struct.pack("<I", 8) + _string(b"llama"),
        _string(b"llama.block_count") + struct.pack("<II", 4, 1),
        _string(b"tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, 2) + _string(b"a") + _string(b"b"),
    ]
    tensor = _string(b"token_embd.weight") + struct.pack("<IQQIQ", 2, 4, 2, 0, 0)
    head = b"GGUF" + struct.pack("<IQQ", 3, 1, len(fields)) + b"".join(fields) + tensor
    return head + bytes(-len(head) % 32) + bytes(32)


def test_gguf_headers(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"

    def read(data: bytes) -> None:
        path.write_bytes(data)
        open_header(path)
        read_metadata(path)

    assert search([_gguf()], read) > 0


def _safetensors(metadata: dict[str, str] | None = None) -> bytes:
    header: dict[str, object] = {"w": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}}
    if metadata:
        header["__metadata__"] = metadata
    packed = json.dumps(header).encode()
    return struct.pack("<Q", len(packed)) + packed + np.arange(4, dtype=np.float32).tobytes()


def test_safetensors_headers(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"

    def read(data: bytes) -> None:
        path.write_bytes(data)
        file = SafetensorsFile(path)
        for name in file.entries:
            file.tensor(name)

    assert search([_safetensors(), _safetensors({"format": "pt"})], read) > 0


def test_adapter_files(tmp_path: Path) -> None:
    path = tmp_path / "adapter"

    def read(data: bytes) -> None:
        path.write_bytes(data)
        read_adapter(path)

    shape = AdapterShape(layers=1, hidden=4, queries=4, attended=4, intermediate=4, rank=2)
    sizes = {"qkv": (4, 4), "output": (4, 4), "gate_up": (8, 4), "down": (4, 4)}
    pairs = {
        (0, name): (np.ones((2, columns), np.float32), np.ones((rows, 2), np.float32))
        for name, (rows, columns) in sizes.items()
    }
    write_adapter(path, shape, pairs, {"target": "m"})
    read(path.read_bytes())  # the corpus is valid
    assert search([path.read_bytes(), _safetensors({"format": "keystroke-adapter-1"})], read) > 0


def test_draft_heads(tmp_path: Path) -> None:
    config = HeadConfig("m", 8, 4, 1, 1, 4, 4, 2, (1, 2), 1e-5)
    tensors: dict[str, np.ndarray[Any, Any]] = {"vocabulary": np.array([1, 3], np.int32)}
    for name, (rows, columns) in config.matrices.items():
        tensors[f"{name}.scale"] = np.ones(rows, np.float32)
        tensors[f"{name}.weight"] = np.ones((rows, columns), np.int8)
    tensors |= {f"{name}.weight": np.ones(4, np.float32) for name in NORMS}
    header, data = {}, b""
    kinds = {"float32": "F32", "int32": "I32", "int8": "I8"}
    for name, value in sorted(tensors.items(), key=lambda item: -item[1].itemsize):
        place = [len(data), len(data) + value.nbytes]
        header[name] = {"dtype": kinds[value.dtype.name], "shape": list(value.shape), "data_offsets": place}
        data += value.tobytes()
    packed = json.dumps(header).encode()
    packed += b" " * (-len(packed) % 8)
    weights = struct.pack("<Q", len(packed)) + packed + data
    (tmp_path / CONFIG).write_text(config.to_json())
    (tmp_path / WEIGHTS).write_bytes(weights)
    open_head(tmp_path)  # the corpus is valid

    def read(name: str) -> Callable[[bytes], object]:
        def mutated(data: bytes) -> object:
            (tmp_path / name).write_bytes(data)
            return open_head(tmp_path)

        return mutated

    assert search([weights], read(WEIGHTS)) > 0
    (tmp_path / WEIGHTS).write_bytes(weights)
    assert search([config.to_json().encode()], read(CONFIG)) > 0


TEMPLATES = [
    b"{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{% endfor %}",
    b"{%- if tools %}{{ tools | tojson(indent=2) }}{% endif %}{{ 'a' * 3 }}{{ messages[0].content | trim }}",
    b"{% macro m(x) %}{{ x }}{% endmacro %}{{ m(messages) }}{% set ns = namespace(a=1) %}{{ ns.a ** 2 }}",
    b"{{ raise_exception('no') }}{{ strftime_now('%Y') }}{{ ''.__class__ }}",
]


def test_chat_templates() -> None:
    variables = {"messages": [{"role": "user", "content": "hello"}], "tools": [{"name": "f"}]}

    def read(source: str) -> None:
        kind, _ = render_template(compile_template(source), variables)
        assert kind in ("text", "refused", "damaged", "failed")

    assert search(TEMPLATES, texts(read)) > 0


PATCHES = [
    b"*** Begin Patch\x0b*** Update File: a.py\n@@\n-x\n+y\n*** End Patch\n",  # found by a longer search
    b"*** Begin Patch\n*** Update File: a.py\n@@ def f():\n-x\n+y\n*** Add File: b\n+new\n*** End Patch\n",
    b"*** Begin Patch\n*** Delete File: c\n*** Update File: d\n*** Move to: e\n@@\n a\n-b\n+c\n*** End Patch",
    b"--- a/x.py\n+++ b/x.py\n@@ -1,2 +1,2 @@\n a\n-b\n+c\n\\ No newline at end of file\n",
    b"--- /dev/null\n+++ b/new\n@@ -0,0 +1 @@\n+x\n",
    b"a.py\n```python\n<<<<<<< SEARCH\nold\n=======\nnew\n>>>>>>> REPLACE\n```\n",
]


def test_patches() -> None:
    def read(answer: str) -> None:
        calls_from_patch(answer)
        if is_envelope(answer):
            parse_envelope(answer)
        if is_unified(answer):
            parse_unified(answer)

    search(PATCHES, texts(read), UnreadablePatch)


def test_blocks_of_edits() -> None:
    search(PATCHES, texts(lambda answer: parse_blocks(answer, ["a.py", "x.py"])))


CALLS = [
    b'before <tool_call>\n{"name": "read", "arguments": {"path": "a\\u00e9"}}\n</tool_call> after',
    b'[TOOL_CALLS][{"name": "read", "arguments": {"path": "a"}}] [TOOL_CALLS]read[ARGS]{"path": "b"}',
    b"<tool_call>\n<function=read>\n<parameter=path>\na\n</parameter>\n</function>\n</tool_call>",
    b"<tool_call>read\n<arg_key>path</arg_key>\n<arg_value>a</arg_value>\n</tool_call>",
    b'<|channel|>commentary to=functions.read <|constrain|>json<|message|>{"path": "a"}<|call|>',
    b'<think>why</think>{"name": "read", "parameters": {"path": "a"}}```json\n{"a": 1}\n```',
]


@pytest.mark.parametrize(
    "form", [HERMES, LLAMA, MISTRAL, QWEN, GLM, NAMED, HARMONY], ids=lambda form: form.name
)
def test_tool_call_parsers(form: object) -> None:
    schema = {"type": "object", "properties": {"path": {"type": "string"}}}
    tools = whole_toolset([OfferedTool("read", description="Read a file.", parameters=schema)])
    choose = random.Random(21)

    def read(text: str) -> None:
        parser = answer_parser(form, tools)  # type: ignore[arg-type]
        while text:
            size = choose.randint(1, 20)
            parser.feed(text[:size])
            text = text[size:]
        parser.finish()

    search(CALLS, texts(read))
