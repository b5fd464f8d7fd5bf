"""Read the weights of Moonshine from an ONNX file: as much of its format as that needs, and nothing that runs.

An ONNX file is one protobuf message. Its graph (field 7) has nodes (1), with inputs (1) and a name (3), and constant
tensors (5), with dimensions (1), a type (2), a name (8) and bytes (9). Matrices lost their names in the export; they
are known by the node that multiplies with them, and lie the other way round.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from confide.encoders.convert import save_folder
from confide.errors import UserError

_FLOAT = 1


def convert_onnx(file: Path, folder: Path) -> None:
    """Write the encoder of Moonshine as a transformers folder; sizes follow from the tensors' shapes."""
    (graph,) = _of(memoryview(file.read_bytes()), 7)
    constants = dict(_constants(graph))
    found = {name: tensor for name, tensor in constants.items() if name.endswith((".weight", ".bias"))}
    for node in _of(graph, 1):
        (name,) = map(_text, _of(node, 3))
        path, _, operation = name.removeprefix("/").replace("/", ".").rpartition(".")
        given = [
            constants[each] for each in map(_text, _of(node, 1)) if each.startswith("onnx::") and each in constants
        ]
        if operation == "MatMul" and given:
            found[f"{path.replace('self_attn.dense', 'self_attn.o_proj')}.weight"] = given[0].T.contiguous()
        if path == "groupnorm" and operation in ("Mul", "Add") and given:
            found[f"groupnorm.{'weight' if operation == 'Mul' else 'bias'}"] = given[0].flatten()
    if "conv1.weight" not in found:
        raise UserError(f"{file.name} holds no encoder of Moonshine; expected the tensor conv1.weight")
    blocks = sum(name.endswith(".mlp.fc1.weight") for name in found)
    middle, width = found["layers.0.mlp.fc1.weight"].shape
    config = {
        "model_type": "moonshine", "architectures": ["MoonshineModel"], "hidden_size": width,
        "intermediate_size": middle, "encoder_num_hidden_layers": blocks,
    }  # fmt: skip
    extractor = {"feature_extractor_type": "Wav2Vec2FeatureExtractor", "do_normalize": False, "sampling_rate": 16_000}
    save_folder(folder, {f"model.encoder.{name}": tensor for name, tensor in found.items()}, config, extractor)


def _constants(graph: memoryview) -> Iterator[tuple[str, Tensor]]:
    """The graph's tensors of 32-bit floats, by name."""
    for constant in _of(graph, 5):
        shape, kind, name, raw = [], 0, "", b""
        for field, value in _fields(constant):
            if isinstance(value, int):
                shape += [value] if field == 1 else []
                kind = value if field == 2 else kind
            elif field == 8:
                name = _text(value)
            elif field == 9:
                raw = bytes(value)
        if kind == _FLOAT:
            yield name, torch.from_numpy(np.frombuffer(raw, "<f4").reshape(shape).copy())


def _of(message: memoryview, wanted: int) -> list[memoryview]:
    return [value for field, value in _fields(message) if field == wanted and not isinstance(value, int)]


def _fields(message: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """The numbers and values of a protobuf message's fields."""
    place = 0
    while place < len(message):
        key, place = _varint(message, place)
        field, kind = key >> 3, key & 7
        if kind == 0:
            value, place = _varint(message, place)
            yield field, value
            continue
        if kind == 2:
            size, place = _varint(message, place)
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
        else:
            raise UserError(f"a field of kind {kind} at byte {place}; expected an ONNX file: it is damaged")
        yield field, message[place : place + size]
        place += size


def _varint(message: memoryview, place: int) -> tuple[int, int]:
    """A number of any size, seven bits a byte, and where it ends."""
    value = shift = 0
    while True:
        byte = message[place]
        value |= (byte & 127) << shift
        place, shift = place + 1, shift + 7
        if byte < 128:
            return value, place


def _text(value: memoryview) -> str:
    return bytes(value).decode()
