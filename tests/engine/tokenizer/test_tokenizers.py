"""Text survives every tokenizer byte for byte, and only the caller can make a control token of it."""

from __future__ import annotations

import contextlib
import json
import random
from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers

from keystroke.engine.tokenizer import (
    ByteTokenizer,
    StreamDecoder,
    Tokenizer,
    load_tokenizer,
)
from keystroke.engine.tokenizer.gguf import PRE_TOKENIZERS, build_tokenizer
from keystroke.engine.tokenizer.huggingface import (
    DEEPSEEK_PATTERNS,
    GPT4O_PATTERN,
    LLAMA3_PATTERN,
    QWEN2_PATTERN,
    QWEN35_PATTERN,
    SEED_PATTERN,
    TEKKEN_PATTERN,
    from_spec,
)
from keystroke.engine.tokenizer.incremental import IncrementalEncoder
from keystroke.errors import InputError, ModelDamaged, NotFound, UnsupportedModel, UsageError

CORPUS = [
    Path(__file__).read_text(encoding="utf-8"),
    "naïve café 日本語 🙂 don't we'll 12345 x=1\r\n\r\n\tif  y :\n\n\n",
]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def trained(stages: list[pre_tokenizers.PreTokenizer]) -> tokenizers.Tokenizer:
    machine = tokenizers.Tokenizer(models.BPE())
    machine.pre_tokenizer = pre_tokenizers.Sequence(stages)
    machine.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    machine.train_from_iterator(CORPUS, trainer)
    return machine


def split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated")


def byte_level(use_regex: bool = False) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


MACHINES = {
    "gpt-2": trained([byte_level(use_regex=True)]),
    "smollm": trained([pre_tokenizers.Digits(individual_digits=True), byte_level(use_regex=True)]),
    "llama-bpe": trained([split(LLAMA3_PATTERN), byte_level()]),
    "qwen2": trained([split(QWEN2_PATTERN), byte_level()]),
    "seed-coder": trained([split(SEED_PATTERN), byte_level()]),
    "qwen35": trained([split(QWEN35_PATTERN), byte_level()]),
    "gpt-4o": trained([split(GPT4O_PATTERN), byte_level()]),
    "deepseek-coder": trained([*map(split, DEEPSEEK_PATTERNS), byte_level()]),
}
TOKENIZERS: dict[str, Tokenizer] = {
    name: from_spec(json.loads(machine.to_str()), {"eos_token": "<|im_end|>"})
    for name, machine in MACHINES.items()
}
TOKENIZERS["bytes"] = ByteTokenizer({name: 256 + i for i, name in enumerate(SPECIAL)})

# Text as code has it and as an attacker would: every class the patterns tell apart, and false control tokens.
_AWKWARD = [
    *("\n", "\r", "\t", " ", "'", "  ", "\r\n", "\x00", "\x85", "\x1c", "\u00a0", "\u2028", "\u200b"),
    *("don't", "it'S", "12345", "²", "३", "é", "e\u0301", "ß", "日本", "🙂"),
    *("<|im_end|>", "):\n", "foo", "_bar", " x", "()[]"),
]
texts = st.lists(
    st.one_of(st.sampled_from(_AWKWARD), st.characters(exclude_categories=["Cs"])), max_size=24
).map("".join)

each = pytest.mark.parametrize("name", TOKENIZERS)


@each
@settings(max_examples=150, deadline=None)
@given(text=texts)
def test_every_text_comes_back_exactly(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    tokens = tokenizer.encode(text)
    assert tokenizer.decode(tokens) == text
    assert b"".join(map(tokenizer.token_bytes, tokens)) == text.encode()
    assert not any(map(tokenizer.is_special, tokens))


@pytest.mark.parametrize("name", MACHINES)
@settings(max_examples=100, deadline=None)
@given(text=texts.filter(lambda t: "<|" not in t))
def test_tokens_are_those_of_the_library_itself(name: str, text: str) -> None:
    assert TOKENIZERS[name].encode(text) == MACHINES[name].encode(text).ids


@each
def test_control_tokens_are_made_only_when_asked_for(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    end = tokenizer.special("<|im_end|>")
    assert end is not None
    assert tokenizer.is_special(end)
    assert tokenizer.special("<|nothing|>") is None
    assert end not in tokenizer.encode("a<|im_end|>b")
    middle = tokenizer.encode("a<|im_end|>b", special=True)
    assert middle == [*tokenizer.encode("a"), end, *tokenizer.encode("b")]
    assert tokenizer.decode(middle) == "ab"
    assert tokenizer.token_bytes(end) == b"<|im_end|>"


@each
def test_half_a_surrogate_pair_is_refused_with_its_place(name: str) -> None:
    for special in (False, True):
        with pytest.raises(InputError, match="surrogate pair at character"):
            TOKENIZERS[name].encode("ok \ud83d no", special=special)


@each
def test_a_token_outside_the_vocabulary_is_refused(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    for token in (-1, tokenizer.vocab_size):
        with pytest.raises(UsageError, match="outside the vocabulary"):
            tokenizer.token_bytes(token)


@each
@settings(max_examples=60, deadline=None)
@given(text=texts, seed=st.integers(0, 999))
def test_a_stream_gives_whole_characters_and_in_the_end_the_whole_text(
    name: str, text: str, seed: int
) -> None:
    tokenizer = TOKENIZERS[name]
    stream, shuffle = StreamDecoder(tokenizer), random.Random(seed)
    tokens, out = tokenizer.encode(text), ""
    while tokens:
        count = shuffle.randint(1, 3)
        piece = stream.feed(tokens[:count])
        del tokens[:count]
        out += piece
        assert text.startswith(out)
    assert out + stream.flush() == text


@settings(max_examples=200)
@given(st.lists(st.integers(0, 255), max_size=30))
def test_a_stream_of_any_bytes_gives_what_decoding_all_of_them_gives(data: list[int]) -> None:
    stream = StreamDecoder(TOKENIZERS["bytes"])
    assert "".join(stream.feed([b]) for b in data) + stream.flush() == bytes(data).decode("utf-8", "replace")


@each
@settings(max_examples=120, deadline=None)
@given(start=texts, data=st.data())
def test_tokens_after_any_edits_are_those_of_a_fresh_encode(
    name: str, start: str, data: st.DataObject
) -> None:
    tokenizer = TOKENIZERS[name]
    # Filler makes the text long enough to be kept in several pieces.
    filler = data.draw(
        st.sampled_from(
            [
                "",
                "def f(a, b):\n    return a\n\n\n" * 12,
                "x" * 300,
                "\n \n" * 120,
                "a  b\n" * 70,
                "x1 = = 2\n" * 40,
            ]
        )
    )
    encoder = IncrementalEncoder(tokenizer, filler + start + filler)
    same = encoder.tokens
    for _ in range(data.draw(st.integers(1, 6))):
        begin = data.draw(st.integers(0, len(encoder.text)))
        end = min(len(encoder.text), begin + data.draw(st.sampled_from([0, 0, 1, 2, 7, 200])))
        expected = encoder.text[:begin] + (typed := data.draw(texts)) + encoder.text[end:]
        before = list(encoder.tokens)
        change = encoder.edit(begin, end, typed)
        assert encoder.text == expected
        assert encoder.tokens == tokenizer.encode(expected)
        assert before[: change.start] + change.tokens + before[change.end :] == encoder.tokens
    assert encoder.tokens is same


@pytest.mark.parametrize("name", MACHINES)
def test_a_keystroke_encodes_a_neighbourhood_and_not_the_text(name: str) -> None:
    text = "class A:\n" + "    def method(self, value):\n        return value + 1\n\n" * 400
    encoder = IncrementalEncoder(TOKENIZERS[name], text)
    for place in (0, 40, len(text) // 2, len(text)):
        assert len(encoder.edit(place, place, "x").tokens) < 400


@pytest.mark.parametrize(("start", "end"), [(-1, 0), (2, 1), (0, 6)])
def test_an_edit_outside_the_text_changes_nothing(start: int, end: int) -> None:
    encoder = IncrementalEncoder(TOKENIZERS["gpt-2"], "hello")
    with pytest.raises(InputError, match="text of 5 characters"):
        encoder.edit(start, end, "x")
    with pytest.raises(InputError, match="surrogate"):
        encoder.edit(0, 1, "\udc00")
    assert encoder.text == "hello"
    assert encoder.tokens == TOKENIZERS["gpt-2"].encode("hello")


def test_text_that_is_not_normalised_comes_back_as_it_was() -> None:
    spec = json.loads(MACHINES["qwen2"].to_str()) | {"normalizer": {"type": "NFC"}}
    tokenizer = from_spec(spec)
    assert tokenizer.decode(tokenizer.encode("e\u0301")) == "e\u0301"


def test_added_runs_of_space_are_text_and_all_other_added_tokens_are_controls() -> None:
    spec = json.loads(MACHINES["gpt-2"].to_str())
    exact = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    size = len(spec["model"]["vocab"])
    spec["added_tokens"] += [
        {"id": size, "content": "     "} | exact,
        {"id": size + 1, "content": "<tool>"} | exact,
    ]
    tokenizer = from_spec(spec)
    text = "a     <tool> b"
    assert size in tokenizer.encode(text)
    assert size + 1 not in tokenizer.encode(text)
    assert size + 1 in tokenizer.encode(text, special=True)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.cuts("a b c", 0, 5) == ()  # a cut could part a run of spaces


def test_no_cuts_are_offered_where_words_are_not_split_apart() -> None:
    spec = json.loads(MACHINES["gpt-2"].to_str())
    for stages in (
        [split(r"\p{N}"), byte_level()],
        [split(r"\s?\p{L}+"), byte_level()],
        [split("x"), byte_level()],
    ):
        machine = tokenizers.Tokenizer.from_str(json.dumps(spec))
        machine.pre_tokenizer = pre_tokenizers.Sequence(stages)
        assert from_spec(json.loads(machine.to_str())).cuts("a b c", 0, 5) == ()


def test_a_prefix_space_makes_cuts_unsafe_and_none_are_offered() -> None:
    spec = json.loads(MACHINES["gpt-2"].to_str())
    spec["pre_tokenizer"] = {
        "type": "ByteLevel",
        "add_prefix_space": True,
        "trim_offsets": True,
        "use_regex": True,
    }
    assert from_spec(spec).cuts("a b c", 0, 5) == ()
    assert TOKENIZERS["gpt-2"].cuts("a b c", 0, 5) == [1, 3]


# From files


def save(folder: Path, name: str, config: dict[str, Any]) -> Path:
    (folder / "tokenizer.json").write_text(MACHINES[name].to_str(), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def test_a_folder_says_how_sequences_begin_and_end(tmp_path: Path) -> None:
    config = {"add_bos_token": True, "bos_token": {"content": "<|im_start|>"}, "eos_token": "<|im_end|>"}
    tokenizer = load_tokenizer(save(tmp_path, "qwen2", config))
    assert tokenizer.bos == tokenizer.special("<|im_start|>")
    assert tokenizer.eos == tokenizer.special("<|im_end|>")


def write_gguf(path: Path, name: str, *, pre: str | None = None, model: str = "gpt2") -> Path:
    spec = json.loads(MACHINES[name].to_str())
    vocabulary = sorted(spec["model"]["vocab"], key=spec["model"]["vocab"].get)
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(pre or name)
    writer.add_token_list(vocabulary)
    writer.add_token_types([3 if token in SPECIAL else 1 for token in vocabulary])
    writer.add_token_merges([" ".join(m) for m in spec["model"]["merges"]])
    writer.add_eos_token_id(vocabulary.index("<|im_end|>"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("name", MACHINES)
@settings(max_examples=60, deadline=None)
@given(text=texts)
def test_a_gguf_gives_the_tokens_of_the_tokenizer_it_was_made_from(name: str, text: str) -> None:
    assert from_gguf(name).encode(text) == TOKENIZERS[name].encode(text)


_built: dict[str, Tokenizer] = {}


def from_gguf(name: str) -> Tokenizer:
    if name not in _built:
        spec = json.loads(MACHINES[name].to_str())
        vocabulary = sorted(spec["model"]["vocab"], key=spec["model"]["vocab"].get)
        _built[name] = build_tokenizer(
            {
                "tokenizer.ggml.model": "gpt2",
                "tokenizer.ggml.pre": name,
                "tokenizer.ggml.tokens": vocabulary,
                "tokenizer.ggml.token_type": [3 if t in SPECIAL else 1 for t in vocabulary],
                "tokenizer.ggml.merges": [" ".join(m) for m in spec["model"]["merges"]],
            },
            "test.gguf",
        )
    return _built[name]


@pytest.mark.parametrize("name", MACHINES)
def test_a_gguf_file_is_read_and_keeps_its_control_tokens(name: str, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_gguf(tmp_path / "m.gguf", name))
    assert tokenizer.encode("def f(x):\n") == TOKENIZERS[name].encode("def f(x):\n")
    assert tokenizer.special("<|im_start|>") == TOKENIZERS[name].special("<|im_start|>")
    assert tokenizer.eos == tokenizer.special("<|im_end|>")
    assert tokenizer.vocab_size == TOKENIZERS[name].vocab_size


_SAMPLE = "def f(x):\n\treturn 'é' <|im_end|> 1234\n" * 3


@pytest.mark.parametrize("name", MACHINES)
def test_a_kept_tokenizer_is_the_one_that_was_built(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, cache = write_gguf(tmp_path / "m.gguf", name), tmp_path / "cache"
    built = load_tokenizer(file)
    load_tokenizer(file, cache)
    with monkeypatch.context() as patch:
        patch.setattr("keystroke.engine.tokenizer.gguf.build_tokenizer", None)  # it must not be built again
        again = load_tokenizer(file, cache)
    for special in (False, True):
        assert again.encode(_SAMPLE, special=special) == built.encode(_SAMPLE, special=special)
    assert again.decode(again.encode(_SAMPLE)) == _SAMPLE
    for field in ("vocab_size", "bos", "eos", "starts_with_space"):
        assert getattr(again, field) == getattr(built, field), field
    assert again.cuts(_SAMPLE, 0, 20) == built.cuts(_SAMPLE, 0, 20)
    assert [again.token_bytes(t) for t in range(again.vocab_size)] == [
        built.token_bytes(t) for t in range(built.vocab_size)
    ]


def test_a_kept_tokenizer_that_is_damaged_or_of_another_file_is_built_again(tmp_path: Path) -> None:
    file, cache = write_gguf(tmp_path / "m.gguf", "gpt-2"), tmp_path / "cache"
    wanted = load_tokenizer(file, cache).encode(_SAMPLE)
    (kept,) = cache.iterdir()
    whole = kept.read_bytes()
    for damage in (b"", whole[:-1], whole.replace(b"im_end", b"im_foo"), whole[: len(whole) // 2]):
        kept.write_bytes(damage)
        assert load_tokenizer(file, cache).encode(_SAMPLE) == wanted
        assert kept.read_bytes() == whole
    write_gguf(file, "qwen2" if "qwen2" in MACHINES else list(MACHINES)[-1])
    load_tokenizer(file, cache)
    assert len(list(cache.iterdir())) == 2


def test_a_cache_that_cannot_be_written_only_costs_time(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file stands where the folder should be")
    file = write_gguf(tmp_path / "m.gguf", "gpt-2")
    assert load_tokenizer(file, tmp_path / "cache").encode(_SAMPLE) == load_tokenizer(file).encode(_SAMPLE)


def test_every_pre_tokenizer_of_a_gguf_can_be_built_and_cut() -> None:
    spec = json.loads(MACHINES["gpt-2"].to_str())
    for stages in PRE_TOKENIZERS.values():
        spec["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": stages}
        assert from_spec(spec).cuts("a b", 0, 3) == [1]


def test_patterns_are_those_of_the_published_tokenizers() -> None:
    """As tokenizer.json of Qwen3.5, gpt-oss and Mistral's Tekken state them."""
    assert QWEN35_PATTERN == (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
        r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    before, short = r"[^\r\n\p{L}\p{N}]?", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    after = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    words = f"{before}{upper}*{lower}+{short}|{before}{upper}+{lower}*{short}"
    assert words + r"|\p{N}{1,3}" + after == GPT4O_PATTERN
    assert words.replace(short, "") + r"|\p{N}" + after == TEKKEN_PATTERN


def test_an_unknown_way_of_splitting_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="'viking'"):
        load_tokenizer(write_gguf(tmp_path / "m.gguf", "gpt-2", pre="viking"))
    with pytest.raises(UnsupportedModel, match="'bert' tokenizer"):
        load_tokenizer(write_gguf(tmp_path / "n.gguf", "gpt-2", model="bert"))


def test_a_gguf_cut_short_anywhere_is_called_damaged(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "m.gguf", "gpt-2").read_bytes()
    file = tmp_path / "cut.gguf"
    for size in (0, 3, 20, 24, 60, 2000, len(whole) // 2, len(whole) - 40):
        file.write_bytes(whole[:size])
        with pytest.raises(ModelDamaged):
            load_tokenizer(file)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 3000), st.binary(min_size=1, max_size=8))
def test_a_gguf_with_wild_bytes_never_raises_anything_but_a_named_error(
    tmp_path_factory: pytest.TempPathFactory, place: int, wild: bytes
) -> None:
    folder = tmp_path_factory.getbasetemp() / "wild"
    folder.mkdir(exist_ok=True)
    original = folder / "m.gguf"
    if not original.exists():
        write_gguf(original, "gpt-2")
    data = bytearray(original.read_bytes())
    data[place : place + len(wild)] = wild
    file = folder / "wild.gguf"
    file.write_bytes(data)
    with contextlib.suppress(ModelDamaged, UnsupportedModel):
        load_tokenizer(file)


def test_missing_and_broken_files_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no model at"):
        load_tokenizer(tmp_path / "nothing.gguf")
    with pytest.raises(NotFound, match=r"no tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelDamaged, match="cannot be read as JSON"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": {"type": "BPE", "vocab": 3}}')
    with pytest.raises(ModelDamaged, match="not valid"):
        load_tokenizer(tmp_path)


@each
def test_ids_that_only_pad_the_embedding_are_no_text(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    beyond = [tokenizer.vocab_size, tokenizer.vocab_size + 99]
    tokens = [*tokenizer.encode("a"), *beyond, *tokenizer.encode("b")]
    assert tokenizer.decode(tokens) == StreamDecoder(tokenizer).feed(tokens) == "ab"


def test_unused_rows_of_a_gguf_count_but_are_no_text() -> None:
    padded = build_tokenizer(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "gpt-2",
            "tokenizer.ggml.tokens": [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ab", "[PAD257]"],
            "tokenizer.ggml.token_type": [*[1] * 257, 5],
            "tokenizer.ggml.merges": ["a b"],
        },
        "padded.gguf",
    )
    assert padded.vocab_size == 258
    assert padded.encode("ab") == [256]
    assert padded.decode([256, 257]) == "ab"
    assert padded.special("[PAD257]") is None


# Sentencepiece

PIECES = [
    "<unk>",
    "<s>",
    "</s>",
    *(f"<0x{b:02X}>" for b in range(256)),
    "▁",
    "▁▁",
    "a",
    "b",
    "c",
    "ab",
    "▁a",
    "▁ab",
    "abc",
    "\n",
]


def sentencepiece(**more: object) -> Tokenizer:
    kinds = [2, 3, 3, *[6] * 256, *[1] * (len(PIECES) - 259)]
    scores = [0.0] * 259 + [-float(i) for i in range(len(PIECES) - 259)]
    return build_tokenizer(
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": PIECES,
            "tokenizer.ggml.scores": scores,
            "tokenizer.ggml.token_type": kinds,
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
            "tokenizer.ggml.unknown_token_id": 0,
            **{f"tokenizer.ggml.{k}": v for k, v in more.items()},
        },
        "spm.gguf",
    )


def reference_sentencepiece(text: str) -> list[int]:
    """Join the neighbours whose union has the best score, leftmost first, until nothing joins."""
    rank = {piece: i for i, piece in enumerate(PIECES) if i >= 259}
    parts = list(text.replace(" ", "▁"))
    while True:
        pairs = [
            (rank[parts[i] + parts[i + 1]], i)
            for i in range(len(parts) - 1)
            if parts[i] + parts[i + 1] in rank
        ]
        if not pairs:
            break
        _, at = min(pairs)
        parts[at : at + 2] = ["".join(parts[at : at + 2])]
    return [t for p in parts for t in ([rank[p]] if p in rank else [3 + b for b in p.encode()])]


@settings(max_examples=200, deadline=None)
@given(st.text("abc \nxé", max_size=20))
def test_sentencepiece_tables_give_the_tokens_of_its_algorithm(text: str) -> None:
    tokenizer = sentencepiece()
    assert tokenizer.encode(text) == reference_sentencepiece(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_sentencepiece_model_begins_with_its_first_token_and_never_makes_one_of_text() -> None:
    tokenizer = sentencepiece()
    assert tokenizer.starts_with_space
    assert not sentencepiece(add_space_prefix=False).starts_with_space
    assert (tokenizer.bos, tokenizer.eos) == (1, 2)
    assert 1 not in tokenizer.encode("<s>")
    assert tokenizer.encode("ab<s>", special=True)[-1] == 1


@pytest.mark.parametrize("model", ["llama", "gpt2"])
def test_white_space_that_a_gguf_file_adds_keeps_its_number(model: str) -> None:
    """As in Gemma's files, where line ends and indents lie before the other tokens."""
    letters = [*"abc", "▁", "ab"]
    tokenizer = build_tokenizer(
        {
            "tokenizer.ggml.model": model,
            "tokenizer.ggml.tokens": ["<unk>", "\n", "\n\n", "    ", *letters],
            "tokenizer.ggml.token_type": [3, 4, 4, 4, *[1] * len(letters)],
            "tokenizer.ggml.scores": [0.0] * (4 + len(letters)),
            "tokenizer.ggml.merges": ["a b"],
            "tokenizer.ggml.unknown_token_id": 0,
            "tokenizer.ggml.add_space_prefix": False,
        },
        "test.gguf",
    )
    assert tokenizer.encode("a\n    b\n\nc") == [4, 1, 3, 5, 2, 6]
    assert tokenizer.decode([4, 1, 3, 5, 2, 6]) == "a\n    b\n\nc"
