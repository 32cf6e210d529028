"""Reads the tensors of a GGUF file under their names in transformers, quantised ones as float32.

llama.cpp changes some tensors: it reorders the rows of the queries and keys of some architectures,
and it stores a Gemma norm as the factor 1 + w. Both changes are undone on reading.
"""

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np

from jaxprompt.convert.blocks import ReadBlock, TensorEntry, as_matrix, make_reader
from jaxprompt.convert.gguf.config import ADVICE, GEMMAS, read_gguf_config
from jaxprompt.convert.quantize import Planes
from jaxprompt.data.text.gguf_header import Header, TensorInfo, read_header
from jaxprompt.errors import InputError, check_extra
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
# The names in transformers that differ in a model type; "" = has no such tensor.
_NAMES_BY_TYPE = {
    "phi3": {
        "attn_qkv": "self_attn.qkv_proj", "attn_q": "", "attn_k": "", "attn_v": "",
        "ffn_up": "mlp.gate_up_proj", "ffn_gate": "",
    },
    "olmo2": _HEAD_NORM_NAMES | {
        "attn_norm": "", "ffn_norm": "", "post_attention_norm": "post_attention_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
    "cohere2": {"ffn_norm": ""},
    "glm4": {
        "ffn_up": "mlp.gate_up_proj", "ffn_gate": "",
        "post_attention_norm": "post_self_attn_layernorm", "post_ffw_norm": "post_mlp_layernorm",
    },
}  # fmt: skip
# Architectures whose rows of a head are reordered. The others rotate as transformers does, by
# halves (olmo2, phi3, qwen) or by neighbours (cohere2, glm4).
_REORDERED = ("llama", "mistral", "smollm3", "granite")
# Rotary frequencies, which are in the config.
_IGNORED = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")


# Types with blocks of 32 values whose codes are used as they are: a block's fields, bits per code.
_SCALE_FIELD = ("scale", "<f2")
_CODE_TYPES = {
    2: (np.dtype([_SCALE_FIELD, ("codes", "u1", 16)]), 4),  # Q4_0
    3: (np.dtype([_SCALE_FIELD, ("minimum", "<f2"), ("codes", "u1", 16)]), 4),  # Q4_1
    8: (np.dtype([_SCALE_FIELD, ("codes", "u1", 32)]), 8),  # Q8_0
}


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
    """Returns the name of a tensor in transformers; None if it has none."""
    stem, _, suffix = name.rpartition(".")
    *layer, part = stem.split(".")
    if not layer:
        is_known = part in _MODEL_NAMES and suffix == "weight"
        return f"{_MODEL_NAMES[part]}.weight" if is_known else None
    model_type = hf["model_type"]
    modules = _LAYER_NAMES | _NAMES_BY_TYPE.get(model_type, {})
    if model_type in ("gemma2", "gemma3_text"):
        modules |= _SANDWICH_NAMES
    if model_type in ("qwen3", "gemma3_text"):
        modules |= _HEAD_NORM_NAMES
    has_bias = hf.get("mlp_bias") if part.startswith("ffn") else hf.get("attention_bias")
    has_bias = has_bias or (model_type == "qwen2" and part in ("attn_q", "attn_k", "attn_v"))
    has_bias = has_bias and (model_type, part) != ("glm4", "attn_output")
    if not modules.get(part) or (suffix == "bias" and not has_bias):
        return None
    return f"model.layers.{layer[-1]}.{modules[part]}.{suffix}"


def _tensor_entry(
    header: Header, file: BinaryIO, hf: dict[str, Any], name: str, place: TensorInfo
) -> TensorEntry:
    path, (rows, width) = header.path, as_matrix(place.shape)
    num_values, item = _item_layout(path, name, place.kind)
    items = width // num_values
    end = place.start + rows * items * item.itemsize
    if end > header.size:
        raise InputError(
            f"{path} is cut short: {name} ends at byte {end:,}, but the file has only "
            f"{header.size:,} bytes; download it again"
        )
    is_norm = header.architecture in GEMMAS and name.endswith("norm.weight")
    tensor = _GgufTensor(
        read_items=make_reader(path, file, place.start, items, item),
        kind=place.kind,
        num_values=num_values,
        vector=width if len(place.shape) == 1 else 0,
        order=_row_order(header, hf, name),
        has_one=is_norm,
    )
    is_quantized = place.kind not in _FLOAT_TYPES
    dtype = "float32" if is_quantized or is_norm else item.name
    read_planes = tensor.read_planes if place.kind in _CODE_TYPES else None
    return TensorEntry(path, place.shape, dtype, tensor.read, is_quantized, read_planes)


def _row_order(header: Header, hf: dict[str, Any], name: str) -> np.ndarray | None:
    """Returns the order of a head's rows in the file, of queries and keys, [D], or None.

    llama.cpp rotates dimensions 2j and 2j + 1 of a head together, transformers j and j + D/2.
    """
    parts = ("attn_q.weight", "attn_k.weight", "attn_q.bias", "attn_k.bias")
    if header.architecture not in _REORDERED or not name.endswith(parts):
        return None
    # Our row j is the file's row 2j, our row j + D/2 its row 2j + 1.
    return np.arange(hf["head_dim"]).reshape(-1, 2).T.reshape(-1)


@dataclass(frozen=True)
class _GgufTensor:
    """Reads blocks of a tensor in our order, quantised ones as float32.

    Rows in the file consist of items, a value or a block of values each.
    """

    read_items: ReadBlock
    kind: int
    num_values: int  # of an item
    vector: int  # its size; 0 = a matrix
    order: np.ndarray | None  # see `_row_order`
    has_one: bool  # whether the file contains 1 + w

    def read(self, rows: slice, columns: slice) -> np.ndarray:
        if self.order is not None and self.vector:
            # A bias is one row, so its values are permuted like the kernel's rows.
            heads = self._values(rows, slice(0, self.vector)).reshape(-1, len(self.order))
            values = np.ascontiguousarray(heads[:, self.order].reshape(1, -1)[:, columns])
        else:
            values = self._values(rows, columns)
        # Our Gemma adds the 1 itself, as in transformers.
        return values.astype(np.float32) - np.float32(1) if self.has_one else values

    def read_planes(self, rows: slice, columns: slice, bits: int) -> Planes | None:
        """Reads codes, scales and minima."""
        layout, file_bits = _CODE_TYPES[self.kind]
        if bits < file_bits:
            return None
        span = slice(columns.start // BLOCK, columns.stop // BLOCK)
        blocks = self._items(rows, span).view(layout)
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

    def _values(self, rows: slice, columns: slice) -> np.ndarray:
        if self.kind in _FLOAT_TYPES:
            return self._items(rows, columns)
        first = columns.start // self.num_values
        items = self._items(rows, slice(first, -(-columns.stop // self.num_values)))
        offset = first * self.num_values
        values = _dequantize(items, self.kind)[:, columns.start - offset : columns.stop - offset]
        return np.ascontiguousarray(values)

    def _items(self, rows: slice, columns: slice) -> np.ndarray:
        """Reads complete items; those of a matrix are in our order."""
        if self.order is None or self.vector:
            return self.read_items(rows, columns)
        size = len(self.order)
        start = rows.start // size * size
        heads = self.read_items(slice(start, -(-rows.stop // size) * size), columns)
        head, row = np.divmod(np.arange(rows.start, rows.stop), size)
        return heads[head * size + self.order[row] - start]


def _item_layout(path: Path, name: str, kind: int) -> tuple[int, np.dtype]:
    """Returns the number of values of an item, and its dtype, opaque for a quantised block."""
    if kind in _FLOAT_TYPES:
        return 1, _FLOAT_TYPES[kind]
    check_extra("gguf", "gguf", "a quantised GGUF file")
    import gguf

    try:
        num_values, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)]
        item = np.dtype((np.void, size))
        # A trial, because gguf also knows the sizes of types that it cannot dequantize.
        _dequantize(np.zeros((1, 1), item), kind)
    except (ValueError, KeyError, RuntimeError) as error:
        raise InputError(
            f"{name} in {path} has a type ({error}) that the installed package gguf cannot "
            "dequantise; run: pip install -U gguf, or use a file of another type, e.g. Q8_0"
        ) from error
    return num_values, item


def _dequantize(items: np.ndarray, kind: int) -> np.ndarray:
    """Dequantizes items [n, m] to float32 [n, m * values of an item]."""
    import gguf.quants

    data = np.ascontiguousarray(items).view(np.uint8).reshape(len(items), -1)
    # The caller checks for values that are not finite, and names the tensor.
    with np.errstate(all="ignore"):
        values = gguf.quants.dequantize(data, gguf.GGMLQuantizationType(kind))
    return values.astype(np.float32, copy=False)
