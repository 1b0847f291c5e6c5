"""Which draft head is used: named, found beside the model or in the library, refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from keystroke.engine.checkpoint.spec import ModelSpec, RopeSpec
from keystroke.engine.speculative.find_head import find_head
from keystroke.engine.speculative.head_file import CONFIG, WEIGHTS, HeadConfig
from keystroke.errors import NotFound, UsageError

SPEC = ModelSpec(
    architecture="qwen2",
    name="Coder",
    vocab_size=203,
    hidden=128,
    layers=3,
    heads=4,
    kv_heads=2,
    head_dim=64,
    intermediate=192,
    norm_eps=1e-6,
    rope=RopeSpec(),
    context_length=256,
    tied=True,
)


def head(folder: Path, target: str = "Coder", hidden: int = 128) -> Path:
    folder.mkdir(parents=True)
    config = HeadConfig(target, 203, hidden, 4, 2, 64, 192, 120, (1, 2), 1e-6)
    (folder / CONFIG).write_text(config.to_json())
    (folder / WEIGHTS).touch()
    return folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    file = tmp_path / "here" / "coder.gguf"
    file.parent.mkdir()
    file.touch()
    return file


def test_a_head_beside_the_model_or_in_the_library_is_found_and_its_own_is_preferred(
    model: Path, tmp_path: Path
) -> None:
    library = tmp_path / "models"
    assert find_head("auto", model, SPEC, (library,)) is None
    cousin = head(library / "a-draft", target="Cousin of the same sizes")
    assert find_head("auto", model, SPEC, (library,)) == cousin
    own = head(library / "b-draft")
    assert find_head("auto", model, SPEC, (library,)) == own
    assert find_head("auto", model, SPEC, ()) is None
    beside = head(model.parent / "coder-draft")
    assert find_head("auto", model, SPEC, (library,)) == beside
    assert find_head("off", model, SPEC, (library,)) is None


def test_heads_of_other_models_and_half_copied_ones_are_passed_over(model: Path, tmp_path: Path) -> None:
    head(tmp_path / "models" / "other-draft", hidden=256)
    (head(tmp_path / "models" / "broken-draft") / CONFIG).write_text("{")
    assert find_head("auto", model, SPEC, (tmp_path / "models",)) is None


def test_a_head_that_was_named_must_be_there_and_fit(model: Path, tmp_path: Path) -> None:
    assert find_head(str(head(tmp_path / "named")), model, SPEC, ()) == tmp_path / "named"
    with pytest.raises(NotFound, match=r"speculation\.draft_head"):
        find_head(str(tmp_path / "nowhere"), model, SPEC, ())
    with pytest.raises(UsageError, match="cannot draft for Coder"):
        find_head(str(head(tmp_path / "wrong", hidden=256)), model, SPEC, ())
