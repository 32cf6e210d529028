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

from jaxprompt.convert.blocks import Entry, Read, as_matrix, make_reader, unreadable
from jaxprompt.convert.gguf.config import CURE, GEMMAS, read_gguf_config
from jaxprompt.convert.quantize import Planes
from jaxprompt.data.text.gguf_header import Header, TensorInfo, read_header
from jaxprompt.errors import InputError
from jaxprompt.tree import BLOCK

# By ggml's numbers of types (ggml.h); all others are quantized.
_PLAIN = {
    0: np.dtype(np.float32), 1: np.dtype(np.float16), 28: np.dtype(np.float64),
    30: np.dtype(ml_dtypes.bfloat16),
}  # fmt: skip
_WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Of the Gemmas whose layers have a norm behind each part too.
_SANDWICH = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_SPARE = ("rope_freqs.weight",)  # a table of the turns, which the config says


# Types of 32 numbers in a block whose codes are taken over: the bytes of one, bits of a code.
_HALF = ("scale", "<f2")
_BLOCKS = {
    2: (np.dtype([_HALF, ("codes", "u1", 16)]), 4),  # Q4_0
    3: (np.dtype([_HALF, ("minimum", "<f2"), ("codes", "u1", 16)]), 4),  # Q4_1
    8: (np.dtype([_HALF, ("codes", "u1", 32)]), 8),  # Q8_0
}


class _Packing(NamedTuple):
    """How a tensor type is stored in the file."""

    numbers: int  # in an item, of which a row has a whole number
    item: np.dtype
    dtype: str  # of what is read
    unpack: Callable[[np.ndarray], np.ndarray] | None  # items [n, m] -> float32 [n, m * numbers]


def open_gguf(path: Path, stack: ExitStack) -> dict[str, Entry]:
    """Opens a GGUF file, which `stack` closes.

    Returns:
      The tensors by their names in transformers.

    Raises:
      InputError: if the file is damaged or cut short, or contains an unsupported model or a tensor
        type that the gguf package cannot dequantise.
    """
    header = read_header(path)
    hf = read_gguf_config(path)
    try:
        file = stack.enter_context(path.open("rb"))
    except OSError as error:
        raise unreadable(path, error) from error
    for name in header.tensors:
        if name not in _SPARE and not _is_read(name, hf):
            raise InputError(
                f"{path} has {name}, which is not supported for {hf['model_type']}; {CURE}"
            )
    return {
        _rename(header.architecture, name): _entry(header, file, hf, name, place)
        for name, place in header.tensors.items()
        if name not in _SPARE
    }


def _is_read(name: str, hf: dict[str, Any]) -> bool:
    """Returns whether the model that the metadata describe has a tensor."""
    first, *inner = name.split(".")
    if first != "blk" or len(inner) != 3:
        return first in _WHOLE and inner == ["weight"]
    _, part, end = inner
    kind = hf["model_type"]
    if end == "bias":
        biased = hf.get("mlp_bias") if part.startswith("ffn") else hf.get("attention_bias")
        return bool(biased) or (kind == "qwen2" and part in ("attn_q", "attn_k", "attn_v"))
    if part in ("attn_q_norm", "attn_k_norm"):
        return kind in ("qwen3", "gemma3_text")
    return part in _LAYER or (part in _SANDWICH and kind in ("gemma2", "gemma3_text"))


def _rename(architecture: str, name: str) -> str:
    """Returns the name in transformers, or the same name if transformers has no such tensor."""
    first, *inner = name.split(".")
    if first == "blk" and len(inner) == 3:
        layer, part, end = inner
        sandwich = _SANDWICH if architecture in ("gemma2", "gemma3") else {}
        if found := sandwich.get(part) or _LAYER.get(part):
            return f"model.layers.{layer}.{found}.{end}"
    if first in _WHOLE and len(inner) == 1:
        return f"{_WHOLE[first]}.{inner[0]}"
    return name


def _entry(
    header: Header, file: BinaryIO, hf: dict[str, Any], name: str, place: TensorInfo
) -> Entry:
    path, (rows, width) = header.path, as_matrix(place.shape)
    packing = _packing(path, name, place.kind)
    if width % packing.numbers:
        raise InputError(
            f"{name} in {path} has rows of {width} values, which do not divide into blocks of "
            f"{packing.numbers}; the file is damaged: download it again"
        )
    items = width // packing.numbers
    end = place.start + rows * items * packing.item.itemsize
    if end > header.size:
        raise InputError(
            f"{path} is cut short: {name} ends at byte {end:,}, but the file has only "
            f"{header.size:,} bytes; download it again"
        )
    read, planes = make_reader(path, file, place.start, items, packing.item), None
    order, is_vector = _order(header, hf, name, place), len(place.shape) == 1
    if order is not None and not is_vector:
        read = _in_order(read, order)  # while rows are packed: only those asked for are unpacked
    if packing.unpack is not None:
        planes = _planes(read, place.kind)
        read = _unpacked(read, packing.unpack, packing.numbers)
    # A bias is one row, so its numbers are permuted as the kernel's rows are.
    if order is not None and is_vector:
        read = _vector_in_order(read, order, width)
    dtype = packing.dtype
    # The reader of a Gemma adds the 1 itself, as transformers does.
    if header.architecture in GEMMAS and name.endswith("norm.weight"):
        read, dtype = _less_one(read), "float32"
    return Entry(path, place.shape, dtype, read, packing.unpack is not None, planes)


def _planes(read: Read, kind: int) -> Callable[[slice, slice, int], Planes | None] | None:
    """Makes what reads the codes of a type whose blocks have 32 numbers, scale and minimum."""
    if kind not in _BLOCKS:
        return None
    layout, held = _BLOCKS[kind]

    def read_planes(rows: slice, columns: slice, bits: int) -> Planes | None:
        if bits < held:
            return None
        blocks = read(rows, slice(columns.start // BLOCK, columns.stop // BLOCK)).view(layout)
        codes, scale = blocks["codes"], blocks["scale"]  # [rows, blocks, bytes], [rows, blocks]
        if held == 8:  # signed
            codes = codes.view(np.uint8) ^ 128
        elif bits == 8:
            codes = np.concatenate([codes & 15, codes >> 4], axis=-1)
        # Of the types without one: what stands for 0 is in the middle, and powers of 2 are exact.
        given = "minimum" in (layout.names or ())
        middle = np.float16(-(2 ** (held - 1)))
        with np.errstate(over="ignore"):
            minimum = blocks["minimum"] if given else scale * middle
        if not np.isfinite(minimum).all():
            return None
        return Planes(np.ascontiguousarray(codes).reshape(len(codes), -1), scale, minimum)

    return read_planes


def _unpacked(read: Read, unpack: Callable[[np.ndarray], np.ndarray], numbers: int) -> Read:
    """Reads the blocks that hold what is asked for, and cuts off what more they hold."""

    def read_numbers(rows: slice, columns: slice) -> np.ndarray:
        first = columns.start // numbers
        block = unpack(read(rows, slice(first, -(-columns.stop // numbers))))
        skipped = first * numbers
        cut = block[:, columns.start - skipped : columns.stop - skipped]
        return np.ascontiguousarray(cut)

    return read_numbers


def _less_one(read: Read) -> Read:
    return lambda rows, columns: read(rows, columns).astype(np.float32) - np.float32(1)


def _order(header: Header, hf: dict[str, Any], name: str, place: TensorInfo) -> np.ndarray | None:
    """Returns the order of a head's rows in the file, for a Llama's queries and keys. -> [D]

    llama.cpp turns numbers 2j and 2j + 1 of a head together, transformers j and j + D/2.
    """
    fields = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
    part = name.split(".")[2:3]
    if header.architecture not in ("llama", "mistral") or not part or part[0] not in fields:
        return None
    heads = hf[fields[part[0]]]
    rows = place.shape[0] if place.shape else 1
    if rows % (2 * heads):
        raise InputError(
            f"{name} in {header.path} has {rows} rows, which must be divisible by twice the "
            f"{heads} heads of its metadata; download the file again"
        )
    # Our row j is the file's 2j, our row j + D/2 its 2j + 1.
    return np.arange(rows // heads).reshape(-1, 2).T.reshape(-1)


def _in_order(read: Read, order: np.ndarray) -> Read:
    """Reads the rows of whole heads, and picks those that are asked for."""
    size = len(order)

    def read_rows(rows: slice, columns: slice) -> np.ndarray:
        # From the beginning of a head to the end of one: its rows are permuted within it.
        start = rows.start // size * size
        block = read(slice(start, -(-rows.stop // size) * size), columns)
        heads, place = np.divmod(np.arange(rows.start, rows.stop), size)
        return block[heads * size + order[place] - start]

    return read_rows


def _vector_in_order(read: Read, order: np.ndarray, width: int) -> Read:
    def read_vector(rows: slice, columns: slice) -> np.ndarray:
        whole = read(rows, slice(0, width)).reshape(-1, len(order))[:, order]
        return np.ascontiguousarray(whole.reshape(1, -1)[:, columns])

    return read_vector


def _packing(path: Path, name: str, kind: int) -> _Packing:
    if kind in _PLAIN:
        return _Packing(1, _PLAIN[kind], _PLAIN[kind].name, None)
    try:
        return _quantized(kind)
    except ImportError:
        raise InputError(
            f"{name} in {path} is quantised, and the package gguf, which dequantises it, is not "
            "installed; run: pip install gguf"
        ) from None
    except (ValueError, KeyError, RuntimeError) as error:
        raise InputError(
            f"{name} in {path} has a type ({error}) that the installed package gguf cannot "
            "dequantise; run: pip install -U gguf, or use a file of another type, e.g. Q8_0"
        ) from error


@functools.cache
def _quantized(kind: int) -> _Packing:
    """Looks a type up. Raises ValueError, KeyError or RuntimeError where it is not unpacked."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    known = GGMLQuantizationType(kind)
    numbers, size = GGML_QUANT_SIZES[known]

    def unpack(items: np.ndarray) -> np.ndarray:
        data = np.ascontiguousarray(items).view(np.uint8).reshape(len(items), -1)
        # What is not finite is found by who reads the blocks, with the tensor's name.
        with np.errstate(all="ignore"):
            return dequantize(data, known).astype(np.float32, copy=False)

    # A quantized block as one opaque item, by which the plain reader can count.
    item = np.dtype((np.void, size))
    # A trial: gguf knows the sizes of types that it cannot unpack, and says so only when asked to.
    unpack(np.zeros((1, 1), item))
    return _Packing(numbers, item, "float32", unpack)
