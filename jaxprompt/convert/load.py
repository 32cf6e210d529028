"""Fills the parameter tree of a backbone from a checkpoint folder, tensor by tensor."""

import hashlib
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from jaxprompt.convert.names import FAMILIES, IGNORED, Family, Tensor
from jaxprompt.convert.weights import Weights, open_weights
from jaxprompt.errors import InputError, nearest
from jaxprompt.tree import unflatten

_DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
_FILE_DTYPES = ("float64", "float32", "float16", "bfloat16")


class Report(NamedTuple):
    """What a checkpoint gave."""

    heads: tuple[str, ...]  # loaded, of "pooler", "mlm", "rtd"
    fresh: tuple[str, ...]  # heads of the family that the checkpoint does not hold
    missing: tuple[str, ...]  # file names of the tensors of those heads
    unused: tuple[str, ...]  # tensors of the file that were not read
    tied: bool  # the MLM head multiplies the word table; False: params hold mlm/table
    bytes: int  # of the filled tree
    fingerprint: str  # the same for the same weights, however they are named and sharded


class Loaded(NamedTuple):
    """The parameters of a backbone, a nested dict of numpy arrays, and how they came about."""

    params: dict[str, Any]
    report: Report


def load_backbone(
    folder: str | Path, family: str, config: Mapping[str, Any], *, dtype: str = "float32"
) -> Loaded:
    """Reads the trunk and every head that the checkpoint holds, one tensor at a time.

    `config` is the folder's config.json; `dtype` is "float32" or "bfloat16". The fingerprint is
    the SHA-256 over the name (ours), shape, dtype and bytes of each tensor in the file. Raises
    InputError where a tensor of the trunk or part of a head is missing or has another shape than
    config.json says.
    """
    table = _family(family)
    if dtype not in _DTYPES:
        raise InputError(f"backbone dtype {dtype!r} is not one of {', '.join(_DTYPES)}.")
    sizes = _axis_sizes(config, family)
    with open_weights(folder) as weights:
        names = _Names(weights, table)
        heads = names.heads()
        filler = _Filler(weights, names, sizes, _DTYPES[dtype])
        wanted = [t for t in table.trunk if sizes["E"] != sizes["H"] or "project" not in t.path]
        wanted += [tensor for head in heads for tensor in table.heads[head]]
        tied = "mlm" not in heads or _is_tied(weights, names, table, config)
        if not tied:
            wanted.append(table.decoder)
        names.require(wanted, sizes["L"])
        for tensor in wanted:
            filler.fill(tensor)
        fresh = tuple(head for head in table.heads if head not in heads)
        report = Report(
            heads=heads,
            fresh=fresh,
            missing=tuple(names.today(t) for head in fresh for t in table.heads[head]),
            unused=names.unused(sizes["L"], heads),
            tied=tied,
            bytes=sum(array.nbytes for array in filler.flat.values()),
            fingerprint=_digest(*sorted(filler.digests)),
        )
    return Loaded(unflatten(filler.flat), report)


def present_heads(folder: str | Path, family: str) -> set[str]:
    """Lists the heads that a checkpoint holds, from its tensor names alone."""
    with open_weights(folder) as weights:
        return set(_Names(weights, _family(family)).heads())


class _Names:
    """Finds our tensors in a file, whether or not it carries the family's prefix."""

    def __init__(self, weights: Weights, family: Family):
        self.family = family
        self.folder = weights.folder
        self.names = set(weights.names())
        prefixed = any(name.startswith(family.prefix) for name in self.names)
        self.prefix = family.prefix if prefixed else ""

    def find(self, tensor: Tensor, layer: int = 0) -> str | None:
        """Returns the file's name of a tensor, None where the file lacks it."""
        return next((name for name in self._candidates(tensor, layer) if name in self.names), None)

    def today(self, tensor: Tensor, layer: int = 0) -> str:
        """Returns the name that today's checkpoints give a tensor."""
        return self._candidates(tensor, layer)[-1]

    def heads(self) -> tuple[str, ...]:
        """Lists the heads of which the file holds at least one tensor."""
        return tuple(
            head for head, tensors in self.family.heads.items() if any(map(self.find, tensors))
        )

    def require(self, wanted: Iterable[Tensor], layers: int) -> None:
        """Raises InputError where the file lacks one of the tensors."""
        lost = [
            self.today(tensor, i)
            for tensor in wanted
            for i in range(layers if _is_stacked(tensor) else 1)
            if self.find(tensor, i) is None
        ]
        if lost:
            raise InputError(
                f"{self.folder} lacks {len(lost)} of the needed tensors: {', '.join(lost[:5])}"
                f"{', ...' if len(lost) > 5 else ''}; give a complete checkpoint whose config.json "
                "belongs to it."
            )

    def unused(self, layers: int, heads: Iterable[str]) -> tuple[str, ...]:
        """Lists the tensors of the file that are neither read nor another name of one read."""
        known = list(self.family.trunk)
        known += [tensor for head in heads for tensor in self.family.heads[head]]
        known += [self.family.decoder] if "mlm" in heads else []
        read = {
            name
            for tensor in known
            for i in range(layers if _is_stacked(tensor) else 1)
            for name in self._candidates(tensor, i)
        }
        return tuple(sorted(n for n in self.names - read if not n.endswith(IGNORED)))

    def _candidates(self, tensor: Tensor, layer: int) -> list[str]:
        with_prefix = tensor.path.startswith(("embed/", "layers/", "pooler/"))
        prefix = self.prefix if with_prefix else ""
        return [prefix + source.format(i=layer) for source in tensor.sources]


class _Filler:
    """Copies tensors of the file into arrays of ours; holds one tensor beside them."""

    def __init__(self, weights: Weights, names: _Names, sizes: dict[str, int], dtype: np.dtype):
        self.weights, self.names, self.sizes, self.dtype = weights, names, sizes, dtype
        self.flat: dict[str, np.ndarray] = {}
        self.digests: list[str] = []

    def fill(self, tensor: Tensor) -> None:
        """Reads a tensor of every layer, transposed, cast and stacked as the tree has it."""
        ours = tuple(self.sizes[axis] for axis in tensor.axes)
        if not _is_stacked(tensor):
            self.flat[tensor.path] = np.empty(ours, self.dtype)
            self._copy(tensor, 0, self.flat[tensor.path])
            return
        stacked = np.empty((self.sizes["L"], *ours), self.dtype)
        for i in range(self.sizes["L"]):
            self._copy(tensor, i, stacked[i])
        self.flat[tensor.path] = stacked

    def _copy(self, tensor: Tensor, layer: int, target: np.ndarray) -> None:
        name = self.names.find(tensor, layer)
        shape = tuple(math.prod(self.sizes[a] for a in merged) for merged in tensor.file_axes)
        if self.weights.shape(name) != shape:
            raise InputError(
                f"{name} in {self.weights.folder} has shape {list(self.weights.shape(name))}, "
                f"config.json says {list(shape)}; give the config.json of these weights."
            )
        file_dtype = self.weights.dtype(name)
        if file_dtype not in _FILE_DTYPES:
            raise InputError(
                f"{name} in {self.weights.folder} is {file_dtype}; only {', '.join(_FILE_DTYPES)} "
                "are read, give a checkpoint that is not quantized."
            )
        array = np.ascontiguousarray(self.weights.read(name))
        path = f"{tensor.path}/{layer}" if _is_stacked(tensor) else tensor.path
        self.digests.append(_digest(path, str(list(shape)), file_dtype, array.view(np.uint8)))
        source = array.T if tensor.transposed else array  # [out, in] -> [in, out]
        target.reshape(source.shape)[...] = source  # the slices are contiguous: a view


def _family(family: str) -> Family:
    if family not in FAMILIES:
        raise InputError(f"unknown backbone family {family!r}; {nearest(family, FAMILIES)}")
    return FAMILIES[family]


def _axis_sizes(config: Mapping[str, Any], family: str) -> dict[str, int]:
    """Reads the size of every axis letter from config.json."""

    def read(field: str) -> int:
        value = config.get(field)
        if not isinstance(value, int) or value < 1:
            raise InputError(f"config.json has {field}={value!r}; it must be a positive integer.")
        return value

    width, heads = read("hidden_size"), read("num_attention_heads")
    if width % heads:
        raise InputError(f"hidden_size={width} must divide by num_attention_heads={heads}.")
    embed = read("embedding_size") if family == "electra" else width
    return {
        "V": read("vocab_size"),
        "P": read("max_position_embeddings"),
        "S": read("type_vocab_size"),
        "E": embed,
        "H": width,
        "N": heads,
        "D": width // heads,
        "F": read("intermediate_size"),
        "X": embed,
        "L": read("num_hidden_layers"),
        "1": 1,
    }


def _is_tied(weights: Weights, names: _Names, family: Family, config: Mapping[str, Any]) -> bool:
    """Tells whether the output table is the word table: config.json says so and no other is there.

    Torch files hold a copy of the word table; a table of other numbers is used though
    config.json says tied, as transformers does.
    """
    if not config.get("tie_word_embeddings", True):
        return False
    decoder, word = names.find(family.decoder), names.find(family.trunk[0])
    if decoder is None or word is None:
        return True
    if weights.shape(decoder) != weights.shape(word):
        return False
    return np.array_equal(weights.read(decoder), weights.read(word))


def _is_stacked(tensor: Tensor) -> bool:
    return tensor.path.startswith("layers/")


def _digest(*parts: str | np.ndarray) -> str:
    """Hashes parts so that no two lists of parts run together."""
    total = hashlib.sha256()
    for part in parts:
        total.update(hashlib.sha256(part.encode() if isinstance(part, str) else part).digest())
    return total.hexdigest()
