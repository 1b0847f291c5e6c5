"""Reads Hugging Face folders: config.json, generation_config.json and safetensors files.

A model that the spec cannot express raises UnsupportedModel.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from keystroke.engine.checkpoint.digest import quick_digest
from keystroke.engine.checkpoint.fields import Fields
from keystroke.engine.checkpoint.quantised_folder import AffineGroups, BlockScales, read_fp8, read_mxfp4
from keystroke.engine.checkpoint.safetensors_file import SafetensorsFile, to_float32
from keystroke.engine.checkpoint.spec import HEAD, Checkpoint, ModelSpec, check_shapes
from keystroke.engine.families import family_of, family_of_config
from keystroke.engine.families.config_file import quantisation_method
from keystroke.engine.families.family import ConfigFile, Family, TensorSource
from keystroke.errors import ModelDamaged, UnsupportedModel

_JSON_LIMIT = 64 << 20
# How models with pictures or sound call their text part.
_TEXT_PARTS = {"model.language_model.": "model.", "language_model.model.": "model.", "language_model.": ""}


# Keys beside the text part's configuration that count for it too.
_SHARED = ("architectures", "quantization_config", "quantization")


class HuggingFaceCheckpoint(Checkpoint):
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        config, extra = _read_configuration(folder)
        _find_family(config)  # report an unsupported model before missing files
        self._paths = _weight_files(folder)
        self._home: dict[str, tuple[SafetensorsFile, str]] = {}  # by name without the text part's prefix
        for path in self._paths:
            file = SafetensorsFile(path)
            self._home.update({_text_name(name): (file, name) for name in file.entries})
        self.spec = read_spec(config, extra, _model_name(folder), tied=HEAD not in self._home)
        self._scales = BlockScales.of(config) if quantisation_method(config) == "fp8" else None
        self._groups = AffineGroups.of(config)
        # Hybrids in MLX's layout: convolutions have their channel last, and norms include the one.
        self._shifted = any(
            name.endswith(".linear_attn.conv1d.weight") and file.entries[stored].shape[-1] == 1
            for name, (file, stored) in self._home.items()
        )
        check_shapes(self.spec, self._shape)

    def _source(self, name: str) -> TensorSource:
        """Where a tensor is stored. MLX stacks experts, under another name."""
        for stacked in (name.replace(".mlp.experts.", ".mlp.switch_mlp."), name):
            if ".mlp.experts." in name and stacked in self._home:
                return TensorSource((stacked,), flat=name.endswith(".bias"))
        source = family_of(self.spec.architecture).source(self.spec, name, self._home)
        return replace(source, change="") if self._shifted and source.change == "plus one" else source

    def _shape(self, name: str) -> tuple[int, ...] | None:
        source = self._source(name)
        shapes = {self._stored_shape(part, source) for part in source.names}
        shape = shapes.pop()
        if shapes or shape is None:
            return None
        rows = len(source.names) * shape[0] if source.rows is None else len(source.rows)
        return (rows // source.turned * shape[1], source.turned) if source.turned else (rows, *shape[1:])

    def _has_predictor(self) -> bool:
        return family_of(self.spec.architecture).predicts and "mtp.fc.weight" in self._home

    def _stored_shape(self, name: str, source: TensorSource) -> tuple[int, ...] | None:
        """The shape of a stored tensor as rows: experts one below the other."""
        if (found := self._home.get(name)) is None:
            if f"{name}_blocks" not in self._home:
                return None
            file, stored = self._home[f"{name}_blocks"]  # MXFP4: [experts, rows, blocks, 16]
            *above, blocks, _ = file.entries[stored].shape
            return (int(np.prod(above)), blocks * 32)
        shape = found[0].entries[found[1]].shape
        if (groups := self._groups_of(name)) is not None:
            shape = (*shape[:-1], groups.columns(shape[-1]))
        if source.flat:
            return (int(np.prod(shape)),)
        if name.endswith(".conv1d.weight"):
            return (shape[0], int(np.prod(shape[1:])))
        if source.transposed:
            shape = (*shape[:-2], shape[-1], shape[-2])
        return (shape[0] * shape[1], *shape[2:]) if len(shape) == 3 else shape

    def tensor(self, name: str) -> npt.NDArray[np.float32]:
        values, kind = self.raw(name)
        if kind != "MXFP4":
            return to_float32(values, kind)
        from gguf.constants import GGMLQuantizationType  # imported here: only this type needs it
        from gguf.quants import dequantize

        wide: npt.NDArray[np.float32] = dequantize(np.asarray(values), GGMLQuantizationType.MXFP4)
        return wide

    def raw(self, name: str) -> tuple[npt.NDArray[np.generic], str]:
        source = self._source(name)
        parts = [self._raw_part(part, source) for part in source.names]
        kind = parts[0][1]
        values = parts[0][0] if len(parts) == 1 else np.concatenate([array for array, _ in parts])
        if source.rows is not None:
            values = values[source.rows]
        if source.turned:
            matrices = values.reshape(-1, source.turned, values.shape[-1])
            values = matrices.swapaxes(1, 2).reshape(-1, source.turned)
        if source.change:
            wide = to_float32(values, kind)
            return (wide + np.float32(1) if source.change == "plus one" else -np.exp(wide)), "F32"
        return values, kind

    def _raw_part(self, name: str, source: TensorSource) -> tuple[npt.NDArray[np.generic], str]:
        """One stored tensor as rows."""
        if name not in self._home:
            blocks, scales = (self._home[f"{name}_{part}"] for part in ("blocks", "scales"))
            return read_mxfp4(blocks[0].array(blocks[1]), scales[0].array(scales[1])), "MXFP4"
        file, stored = self._home[name]
        if self._scales is not None and file.entries[stored].type == "F8_E4M3":
            scale = self._home.get(self._scales.name(name))
            if scale is None:
                raise ModelDamaged(f"{self.spec.name} lacks the scales of {name}; download the model again")
            return read_fp8(file.array(stored), scale[0].tensor(scale[1]), self._scales), "F32"
        if (groups := self._groups_of(name)) is not None:
            if groups.mode == "mxfp4":
                return self._mxfp4_blocks(name), "MXFP4"
            return groups.read(*self._group_parts(name)), "F32"
        values, kind = file.raw(stored)
        if source.flat:
            return values.ravel(), kind
        if name.endswith(".conv1d.weight"):
            return values.reshape(len(values), -1), kind
        if source.transposed:
            values = values.swapaxes(-1, -2)
        return (values.reshape(-1, *values.shape[2:]) if values.ndim == 3 else values), kind

    def storage(self, name: str) -> str:
        source = self._source(name)
        first = source.names[0]
        if source.change:
            return "F32"
        if first not in self._home:
            return "MXFP4"
        file, stored = self._home[first]
        kind = file.entries[stored].type
        if (groups := self._groups_of(first)) is not None:
            return "MXFP4" if groups.mode == "mxfp4" else "F32"
        return "F32" if kind == "F8_E4M3" and self._scales is not None else kind

    def affine_groups(
        self, name: str
    ) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.float32], npt.NDArray[np.float32], AffineGroups] | None:
        """A matrix as MLX stores it: words of codes, scales, offsets; None if it is stored otherwise."""
        source = self._source(name)
        parts = [(self._groups_of(part), part) for part in source.names]
        groups = parts[0][0]
        if (
            groups is None
            or groups.mode != "affine"
            or source.rows is not None
            or any(each != groups for each, _ in parts)
        ):
            return None
        words, scales, offsets = (
            np.concatenate(each) for each in zip(*(self._group_parts(part) for _, part in parts), strict=True)
        )
        return words, scales, offsets, groups

    def _groups_of(self, name: str) -> AffineGroups | None:
        """How MLX quantised a stored tensor; None if it did not."""
        if self._groups is None or f"{name.removesuffix('.weight')}.scales" not in self._home:
            return None
        return self._groups.of_tensor(name)

    def _mxfp4_blocks(self, name: str) -> npt.NDArray[np.uint8]:
        """MLX's words of codes and their scales as GGUF's blocks."""
        file, stored = self._home[name]
        place = self._home[f"{name.removesuffix('.weight')}.scales"]
        codes = file.stored_bytes(stored).view(np.uint8).reshape(-1, file.entries[stored].shape[-1] // 4, 16)
        scales = place[0].array(place[1])
        return read_mxfp4(codes, scales.reshape(-1, scales.shape[-1]))

    def _group_parts(
        self, name: str
    ) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        file, stored = self._home[name]
        stem, shape = name.removesuffix(".weight"), file.entries[stored].shape
        words = file.stored_bytes(stored).view("<u4").reshape(-1, shape[-1])
        tables = []
        for part in ("scales", "biases"):
            place = self._home.get(f"{stem}.{part}")
            if place is None:
                raise ModelDamaged(f"{self.spec.name} lacks the {part} of {stem}; download the model again")
            table = place[0].tensor(place[1])
            tables.append(table.reshape(-1, table.shape[-1]))
        return words, tables[0], tables[1]

    def fingerprint(self) -> str:
        small = [self._folder / "config.json", self._folder / "generation_config.json"]
        return quick_digest([path for path in small if path.exists()] + self._paths)

    def close(self) -> None:
        self._home.clear()


def _text_name(name: str) -> str:
    for prefix, instead in _TEXT_PARTS.items():
        if name.startswith(prefix):
            return instead + name.removeprefix(prefix)
    return name


def configured_spec(folder: Path) -> ModelSpec:
    """The spec of a folder's configuration, without weights. Raises UnsupportedModel or ModelDamaged."""
    return read_spec(*_read_configuration(folder), _model_name(folder))


def _read_configuration(folder: Path) -> tuple[Fields, Fields]:
    config = Fields(_read_json(folder / "config.json"), str(folder / "config.json"))
    generation = folder / "generation_config.json"
    return config, Fields(_read_json(generation) if generation.exists() else {}, str(generation))


def read_spec(config: Fields, generation: Fields, name: str, *, tied: bool = False) -> ModelSpec:
    """The spec of a config.json and generation_config.json. `tied`: the default of tie_word_embeddings."""
    family = _find_family(config)
    if "text_config" in config:  # with pictures or sound: the text part alone
        above = {key: config.get(key) for key in _SHARED if key in config}
        config = config.table("text_config").merge(above)
    return family.read_config(ConfigFile(config, generation, name, tied))


def _find_family(config: Fields) -> Family:
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    if not isinstance(name, str) or not name.isprintable():
        raise config.error("architectures", "a list that names the model's architecture")
    return family_of_config(name)


def _model_name(folder: Path) -> str:
    """The folder's name; in the hub's cache, where folders are named by revision, the repository's."""
    if folder.parent.name == "snapshots" and folder.parent.parent.name.startswith("models--"):
        return folder.parent.parent.name.rpartition("--")[2]
    return folder.name or "model"


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        places = _read_json(index).get("weight_map")
        if not isinstance(places, dict) or not all(isinstance(place, str) for place in places.values()):
            raise ModelDamaged(f"{index} does not say which file holds which tensor; download it again")
        names = sorted(set(places.values()))
        for name in names:
            # The index is not trusted: it may only name files of its own folder.
            if Path(name).name != name or not (folder / name).is_file():
                raise ModelDamaged(
                    f"{folder} lacks the file {name!r} that its index names; download the model again"
                )
        return [folder / name for name in names]
    single = folder / "model.safetensors"
    if single.is_file():
        return [single]
    if any(folder.glob("*.bin")) or any(folder.glob("*.pth")):
        raise UnsupportedModel(
            f"{folder} holds its weights as pickled PyTorch files, which can run code when opened; "
            "use a version of the model with safetensors"
        )
    raise ModelDamaged(
        f"{folder} has no model.safetensors and no model.safetensors.index.json; download the model again"
    )


def _read_json(path: Path) -> dict[str, object]:
    try:
        if path.stat().st_size > _JSON_LIMIT:
            raise ModelDamaged(f"{path} is far too large for a configuration; download the model again")
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelDamaged(
            f"{path} cannot be read ({error.strerror}); check the file and its permissions"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ModelDamaged(f"{path} is not valid JSON; download it again") from error
    if not isinstance(value, dict):
        raise ModelDamaged(f"{path} is not a table; download it again")
    return value
