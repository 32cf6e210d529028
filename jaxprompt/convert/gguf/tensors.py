"""Reads the tensors of a GGUF file under their names in transformers, quantised ones as float32.

llama.cpp changes some tensors: it reorders the rows of Llama's queries and keys, and it stores a
Gemma norm as the factor 1 + w. Both changes are undone on reading.
"""

import functools
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import ml_dtypes
import numpy as np

from jaxprompt.convert.blocks import ReadBlock, TensorEntry, as_matrix, make_reader
from jaxprompt.convert.gguf.config import ADVICE, GEMMAS, read_gguf_config
from jaxprompt.convert.quantize import Planes
from jaxprompt.data.text.gguf_header import Header, TensorInfo, read_header
from jaxprompt.errors import InputError
from jaxprompt.tree import BLOCK

# By ggml's type numbers (ggml.h); all others are quantized.
_FLOAT_TYPES = {
    0: np.dtype(np.float32), 1: np.dtype(np.float16), 28: np.dtype(np.float64),
    30: np.dtype(ml_dtypes.bfloat16),
}  # fmt: skip
_MODEL_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_HEAD_NORM_NAMES = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
# Of Gemmas whose layers also have norms after the attention and the MLP.
_SANDWICH_NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_IGNORED = ("rope_freqs.weight",)  # rotary frequencies, which are in the config


# Types with blocks of 32 values whose codes are used as they are: a block's fields, bits per code.
_SCALE_FIELD = ("scale", "<f2")
_CODE_TYPES = {
    2: (np.dtype([_SCALE_FIELD, ("codes", "u1", 16)]), 4),  # Q4_0
    3: (np.dtype([_SCALE_FIELD, ("minimum", "<f2"), ("codes", "u1", 16)]), 4),  # Q4_1
    8: (np.dtype([_SCALE_FIELD, ("codes", "u1", 32)]), 8),  # Q8_0
}


class _ItemType(NamedTuple):
    """How values of a tensor type are stored: rows consist of items, a value or a block each."""

    num_values: int  # of an item
    item: np.dtype
    dtype: str  # of the values that are read
    # items [n, m] -> float32 [n, m * num_values]; None = not quantized
    dequantize: Callable[[np.ndarray], np.ndarray] | None


def open_gguf(path: Path, stack: ExitStack) -> dict[str, TensorEntry]:
    """Opens a GGUF file, which `stack` closes.

    Returns:
      The tensors by their names in transformers.

    Raises:
      InputError: if the file is damaged or cut short, or contains an unsupported model or a tensor
        type that the gguf package cannot dequantise.
    """
    header, hf = read_header(path), read_gguf_config(path)
    file = stack.enter_context(path.open("rb"))
    entries = {}
    for name, place in header.tensors.items():
        if name in _IGNORED:
            continue
        hf_name = _hf_name(name, hf)
        if hf_name is None:  # llama.cpp would compute with it
            raise InputError(
                f"{path} has {name}, which is not supported for {hf['model_type']}; {ADVICE}"
            )
        entries[hf_name] = _tensor_entry(header, file, hf, name, place)
    return entries


def _hf_name(name: str, hf: dict[str, Any]) -> str | None:
    """Returns the name in transformers, None if the model has no such tensor."""
    stem, _, suffix = name.rpartition(".")
    *layer, part = stem.split(".")
    if not layer:
        is_known = part in _MODEL_NAMES and suffix == "weight"
        return f"{_MODEL_NAMES[part]}.weight" if is_known else None
    modules, model_type = dict(_LAYER_NAMES), hf["model_type"]
    if model_type in ("gemma2", "gemma3_text"):
        modules |= _SANDWICH_NAMES
    if model_type in ("qwen3", "gemma3_text"):
        modules |= _HEAD_NORM_NAMES
    has_bias = hf.get("mlp_bias") if part.startswith("ffn") else hf.get("attention_bias")
    has_bias = has_bias or (model_type == "qwen2" and part in ("attn_q", "attn_k", "attn_v"))
    if part not in modules or (suffix == "bias" and not has_bias):
        return None
    return f"model.layers.{layer[-1]}.{modules[part]}.{suffix}"


def _tensor_entry(
    header: Header, file: BinaryIO, hf: dict[str, Any], name: str, place: TensorInfo
) -> TensorEntry:
    path, (rows, width) = header.path, as_matrix(place.shape)
    item_type = _item_type(path, name, place.kind)
    items = width // item_type.num_values
    end = place.start + rows * items * item_type.item.itemsize
    if end > header.size:
        raise InputError(
            f"{path} is cut short: {name} ends at byte {end:,}, but the file has only "
            f"{header.size:,} bytes; download it again"
        )
    read, read_planes = make_reader(path, file, place.start, items, item_type.item), None
    order, is_vector = _row_order(header, hf, name), len(place.shape) == 1
    if order is not None and not is_vector:
        # Before dequantization, so that only requested rows are dequantized.
        read = _in_head_order(read, order)
    if item_type.dequantize is not None:
        read_planes = _make_planes_reader(read, place.kind)
        read = _dequantized(read, item_type.dequantize, item_type.num_values)
    # A bias is one row, so its values are permuted like the kernel's rows.
    if order is not None and is_vector:
        read = _vector_in_order(read, order, width)
    dtype = item_type.dtype
    # Our Gemma adds the 1 itself, as in transformers.
    if header.architecture in GEMMAS and name.endswith("norm.weight"):
        read, dtype = _minus_one(read), "float32"
    is_quantized = item_type.dequantize is not None
    return TensorEntry(path, place.shape, dtype, read, is_quantized, read_planes)


def _make_planes_reader(
    read: ReadBlock, kind: int
) -> Callable[[slice, slice, int], Planes | None] | None:
    """Returns a function that reads codes, scales and minima; None for a type without them."""
    if kind not in _CODE_TYPES:
        return None
    layout, file_bits = _CODE_TYPES[kind]

    def read_planes(rows: slice, columns: slice, bits: int) -> Planes | None:
        if bits < file_bits:
            return None
        blocks = read(rows, slice(columns.start // BLOCK, columns.stop // BLOCK)).view(layout)
        codes, scale = blocks["codes"], blocks["scale"]  # [rows, blocks, bytes], [rows, blocks]
        if file_bits == 8:  # signed
            codes = codes.view(np.uint8) ^ 128
        elif bits == 8:
            codes = np.concatenate([codes & 15, codes >> 4], axis=-1)
        # Without a minimum, the middle code is 0; the product with a power of 2 is exact.
        has_minimum = "minimum" in (layout.names or ())
        lowest = np.float16(-(2 ** (file_bits - 1)))
        with np.errstate(over="ignore"):
            minimum = blocks["minimum"] if has_minimum else scale * lowest
        if not np.isfinite(minimum).all():
            return None
        return Planes(np.ascontiguousarray(codes).reshape(len(codes), -1), scale, minimum)

    return read_planes


def _dequantized(
    read: ReadBlock, dequantize: Callable[[np.ndarray], np.ndarray], num_values: int
) -> ReadBlock:
    """Returns a reader of values, which dequantizes whole items."""

    def read_values(rows: slice, columns: slice) -> np.ndarray:
        first = columns.start // num_values
        block = dequantize(read(rows, slice(first, -(-columns.stop // num_values))))
        start = first * num_values
        return np.ascontiguousarray(block[:, columns.start - start : columns.stop - start])

    return read_values


def _minus_one(read: ReadBlock) -> ReadBlock:
    return lambda rows, columns: read(rows, columns).astype(np.float32) - np.float32(1)


def _row_order(header: Header, hf: dict[str, Any], name: str) -> np.ndarray | None:
    """Returns the order of a head's rows in the file for a Llama's queries and keys, [D], or None.

    llama.cpp rotates dimensions 2j and 2j + 1 of a head together, transformers j and j + D/2.
    """
    parts = ("attn_q.weight", "attn_k.weight", "attn_q.bias", "attn_k.bias")
    if header.architecture not in ("llama", "mistral") or not name.endswith(parts):
        return None
    # Our row j is the file's row 2j, our row j + D/2 its row 2j + 1.
    return np.arange(hf["head_dim"]).reshape(-1, 2).T.reshape(-1)


def _in_head_order(read: ReadBlock, order: np.ndarray) -> ReadBlock:
    """Returns a reader of rows in our order, which reads whole heads."""
    size = len(order)

    def read_rows(rows: slice, columns: slice) -> np.ndarray:
        start = rows.start // size * size
        block = read(slice(start, -(-rows.stop // size) * size), columns)
        heads, rows_in_head = np.divmod(np.arange(rows.start, rows.stop), size)
        return block[heads * size + order[rows_in_head] - start]

    return read_rows


def _vector_in_order(read: ReadBlock, order: np.ndarray, width: int) -> ReadBlock:
    def read_vector(rows: slice, columns: slice) -> np.ndarray:
        vector = read(rows, slice(0, width)).reshape(-1, len(order))[:, order]
        return np.ascontiguousarray(vector.reshape(1, -1)[:, columns])

    return read_vector


def _item_type(path: Path, name: str, kind: int) -> _ItemType:
    if kind in _FLOAT_TYPES:
        return _ItemType(1, _FLOAT_TYPES[kind], _FLOAT_TYPES[kind].name, None)
    try:
        return _quantized_type(kind)
    except (ValueError, KeyError, RuntimeError) as error:
        raise InputError(
            f"{name} in {path} has a type ({error}) that the installed package gguf cannot "
            "dequantise; run: pip install -U gguf, or use a file of another type, e.g. Q8_0"
        ) from error


@functools.cache
def _quantized_type(kind: int) -> _ItemType:
    """Looks up a type. Raises ValueError, KeyError or RuntimeError if gguf cannot dequantize it."""
    import gguf.quants

    ggml_type = gguf.GGMLQuantizationType(kind)
    num_values, size = gguf.GGML_QUANT_SIZES[ggml_type]

    def dequantize(items: np.ndarray) -> np.ndarray:
        data = np.ascontiguousarray(items).view(np.uint8).reshape(len(items), -1)
        # The caller checks for values that are not finite, and names the tensor.
        with np.errstate(all="ignore"):
            return gguf.quants.dequantize(data, ggml_type).astype(np.float32, copy=False)

    item = np.dtype((np.void, size))  # an opaque block
    # A trial, because gguf also knows the sizes of types that it cannot dequantize.
    dequantize(np.zeros((1, 1), item))
    return _ItemType(num_values, item, "float32", dequantize)
