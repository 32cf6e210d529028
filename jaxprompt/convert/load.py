"""Loads the parameters of a backbone from a checkpoint folder, straight into their shards."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from jaxprompt.convert.hf_config import read_tied
from jaxprompt.convert.shapes import (
    axis_sizes,
    feed_forward_type,
    file_names,
    file_shape,
    gate_activation,
    get_family,
    model_traits,
    num_copies,
    select_tensors,
)
from jaxprompt.convert.tensor_reader import ParameterFiller, hash_parts
from jaxprompt.convert.tensors import IGNORED, Family, Tensor
from jaxprompt.convert.weights import FLOATS, CheckpointTensors, open_weights
from jaxprompt.data.text.gguf_header import is_gguf
from jaxprompt.errors import InputError
from jaxprompt.layers.quantized import (
    BLOCK_BITS,
    QUANTIZED,
    check_blocks,
    input_axes,
    storage_of,
)
from jaxprompt.parallel.sharding import Placement
from jaxprompt.tree import unflatten

_FOLDER_ADVICE = "give a complete, unquantised checkpoint with the config.json that belongs to it"
_GGUF_ADVICE = "the file is damaged or of an unsupported kind: use another"
DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


class LoadReport(NamedTuple):
    """What a checkpoint contains."""

    heads: tuple[str, ...]  # loaded, of "pooler", "mlm", "mask_decoder", "rtd", "lm"
    absent: tuple[str, ...]  # heads of the family not in the file, or those that were initialized
    missing: tuple[str, ...]  # file names of the tensors of those heads
    unused: tuple[str, ...]  # tensors of the file that were not read
    tied: bool  # the LM head uses the word table; False: params have a separate table
    bytes: int  # of all parameters
    # Equal for equal weights, however they are named and sharded; begins with "int8-" or "int4-" if
    # they are quantized.
    fingerprint: str
    requantized: int = 0  # matrices whose codes in the file are not those requested


class Loaded(NamedTuple):
    """The parameters of a backbone, a nested dict of arrays, and a report on their origin."""

    params: dict[str, Any]
    report: LoadReport


def load_backbone(
    folder: str | Path,
    family: str,
    config: Mapping[str, Any],
    *,
    dtype: str = "float32",
    rescale: float = 1.0,
    quantize: str = "none",
    placement: Placement | None = None,
    separate_layers: bool = False,
) -> Loaded:
    """Reads the trunk and every head in the checkpoint, one block of a tensor at a time.

    The fingerprint is the SHA-256 over the name (ours), shape, dtype and bytes of each tensor in
    the file. It is the same for every placement. The processes of a mesh divide the hashing by
    bytes and gather the digests, so all of them must call this function. Each process reads what
    its shards contain (whole rows if part of a row is less than a page of the file) and what it
    hashes.

    Args:
      folder: the checkpoint, or a .gguf file.
      family: the backbone family.
      config: the folder's config.json.
      dtype: "float32" or "bfloat16".
      rescale: divides T5's residual stream by this factor: all weights that write into it are
        divided, so that norms return the same values and float16 does not overflow (PPT's released
        code uses 100).
      quantize: "int8" or "int4" stores the matrices of the layers and the embedding tables as
        codes, "fp8" the matrices alone (layers/quantized); everything else has `dtype`. Blocks
        of a GGUF file's Q8_0, Q4_0 and Q4_1 are used as they are if `quantize` has as many bits or
        more.
      placement: if given, each parameter is a jax.Array with the sharding
        `placement.param_sharding`, and embedding tables are padded with zero rows to
        `placement.padded_vocab`; otherwise parameters are numpy arrays. Memory is needed for the
        shards of this process, each once, and for a few blocks.
      separate_layers: whether the layers of a parameter are separate arrays, as a `LayerList`.

    Raises:
      InputError: if a tensor of the trunk or part of a head is missing, or its shape differs from
        config.json.
    """
    table = get_family(family)
    sizes, gate = axis_sizes(config, table), gate_activation(config)
    if rescale != 1.0 and not (gate or feed_forward_type(config) == "relu"):
        raise InputError(
            f"rescale={rescale} needs a gated or relu feed-forward block, but config.json has "
            f"{config['feed_forward_proj']!r}; use rescale=1"
        )
    with open_weights(folder) as weights:
        names = _FileNames(weights, table, sizes.get("I", 1), quantized_by(config))
        heads = names.heads(config)
        has_vocab_head = bool({"mlm", "lm"} & set(heads))
        tied = not has_vocab_head or (read_tied(config, family) and _is_tied(weights, names, table))
        tensors = select_tensors(table, config, sizes, heads, tied=tied)
        names_by_tensor = names.locate(tensors, sizes)
        storage = storage_of(quantize, folder)
        if storage in BLOCK_BITS:
            for tensor in tensors:
                if axes := input_axes(tensor.path, storage):
                    size = sizes[(tensor.stack + tensor.axes)[axes[-1]]]
                    check_blocks(f"backbone/{tensor.path}", size, quantize)
        filler = ParameterFiller(
            weights, sizes, DTYPES[dtype], rescale, placement, storage, separate_layers
        )
        flat, digests = filler.fill(names_by_tensor)
        absent = tuple(head for head in table.heads if head not in heads)
        missing = select_tensors(table._replace(trunk=()), config, sizes, absent, tied=True)
        prefix = f"{quantize}-" if quantize in QUANTIZED else ""
        report = LoadReport(
            heads=heads,
            absent=absent,
            missing=tuple(map(names.current, missing)),
            # The output table of a tied file is a copy of the word table and not unused.
            unused=names.unused({*tensors, table.decoder} if has_vocab_head else tensors, sizes),
            tied=tied,
            bytes=sum(array.nbytes for array in flat.values()),
            # Sorted, because threads and processes end in any order.
            fingerprint=prefix + hash_parts(*sorted(digests)),
            requantized=len(filler.requantized),
        )
    return Loaded(unflatten(flat), report)


def quantized_by(config: Mapping[str, Any]) -> str:
    """Returns the quantisation method named in a config.json, "" if there is none."""
    block = config.get("quantization_config")
    return str(block.get("quant_method") or "another library") if isinstance(block, dict) else ""


def present_heads(folder: str | Path, family: str, config: Mapping[str, Any]) -> set[str]:
    """Returns the heads in a checkpoint, from its config.json and the names of its tensors."""
    with open_weights(folder) as weights:
        return set(_FileNames(weights, get_family(family)).heads(config))


class _FileNames:
    """Finds our tensors in a file, with or without the family's prefix."""

    def __init__(
        self,
        weights: CheckpointTensors,
        family: Family,
        group_size: int = 1,
        quantized_by: str = "",
    ):
        self.family, self.weights, self.group_size = family, weights, group_size
        self.quantized_by = quantized_by
        self.folder, self.is_gguf = weights.folder, is_gguf(weights.folder)
        self.source = "its metadata" if self.is_gguf else "config.json"
        self.names = set(weights.entries)
        # A bare model is saved without the prefix, a model with a head with it.
        prefixed = any(name.startswith(family.prefix) for name in self.names)
        self.prefix = family.prefix if prefixed else ""

    def find(self, tensor: Tensor, layer: int = 0) -> str:
        """Returns the name of a tensor in the file; "" if the file lacks it."""
        names = (*self._candidates(tensor, layer), *tensor.elsewhere)
        return next((name for name in names if name in self.names), "")

    def current(self, tensor: Tensor, layer: int = 0) -> str:
        """Returns the name of a tensor in current checkpoints."""
        return self._candidates(tensor, layer)[-1]

    def heads(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        """Lists the heads of the model for which the file has at least one tensor."""
        unless, traits = self.family.unless, model_traits(self.family, config)

        def is_present(head: str, tensors: Iterable[Tensor]) -> bool:
            if unless.get(head) in self.names:
                return False
            tensors = [tensor for tensor in tensors if tensor.when in traits]
            # A head without tensors is the output table, or the word table in its place.
            if head == "mlm" and not tensors:
                return read_tied(config, "") or bool(self.find(self.family.decoder))
            return any(map(self.find, tensors))

        present = [head for head, tensors in self.family.heads.items() if is_present(head, tensors)]
        return (*present, *self.family.always)

    def locate(
        self, tensors: Iterable[Tensor], sizes: Mapping[str, int]
    ) -> dict[Tensor, list[str]]:
        """Returns the names of each tensor in the file, one per layer.

        Raises:
          InputError: if the file lacks one, has more layers, or another shape or dtype.
        """
        layers = {tensor: range(num_copies(tensor, sizes)) for tensor in tensors}
        if (count := max(map(len, layers.values()), default=0)) > len(self.names):
            raise self._error(
                f"{self.folder} has {len(self.names)} tensors, but {self.source} says {count:,} "
                "layers"
            )
        names = {tensor: [self.find(tensor, i) for i in layers[tensor]] for tensor in layers}
        missing = [
            self.current(tensor, i)
            for tensor in layers
            for i in layers[tensor]
            if not names[tensor][i]
        ]
        if missing:
            listed = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
            raise self._error(f"{self.folder} lacks {len(missing)} of the needed tensors: {listed}")
        for tensor, layer_names in names.items():
            if tensor.stack and (extra := self.find(tensor, len(layer_names))):
                raise self._error(f"{self.folder} has {extra}, more layers than {self.source} says")
            for name in layer_names:
                self._check(name, file_shape(tensor, sizes))
        return names

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        entry = self.weights.entries[name]
        if entry.shape != shape:
            raise self._error(
                f"{name} in {self.folder} has shape {list(entry.shape)}, but {self.source} says "
                f"{list(shape)}"
            )
        if entry.dtype not in FLOATS:
            raise self._error(
                f"{name} in {self.folder} has dtype {entry.dtype}, not one of {', '.join(FLOATS)}"
            )

    def _error(self, problem: str) -> InputError:
        """Returns the error for tensors that do not match config.json."""
        if self.quantized_by:
            return InputError(
                f"{self.folder} contains weights quantised with {self.quantized_by}, which is not "
                "supported; give the unquantised checkpoint, with backbone.quantize=int8 or int4 "
                "if you want quantisation"
            )
        return InputError(f"{problem}; {_GGUF_ADVICE if self.is_gguf else _FOLDER_ADVICE}")

    def unused(self, tensors: Iterable[Tensor], sizes: Mapping[str, int]) -> tuple[str, ...]:
        """Lists the tensors of the file that are not read.

        Omits an equal copy of a tensor under another of its names, but lists a copy with other
        values: the first name is read, and the rest may be from an older version.
        """
        read: set[str] = set()
        for tensor in tensors:
            for i in range(num_copies(tensor, sizes)):
                # T5's files contain the word table under up to three names.
                name = self.find(tensor, i)
                others = self.names.intersection(self._candidates(tensor, i)) - {name}
                # An untied model of transformers has two vocabulary biases, and uses one of them.
                has_two = tensor.path == "mlm/bias"
                read |= {name, *(n for n in others if has_two or _is_equal(self.weights, n, name))}
        return tuple(sorted(n for n in self.names - read if not n.endswith(IGNORED)))

    def _candidates(self, tensor: Tensor, layer: int) -> list[str]:
        return file_names(tensor, layer, self.prefix, self.group_size)


def _is_tied(weights: CheckpointTensors, names: _FileNames, family: Family) -> bool:
    """Returns whether there is no output table that differs from the word embeddings.

    Torch files contain a copy of the word embeddings. A table with other values is used even if
    config.json says tied, as in transformers.
    """
    decoder, word = names.find(family.decoder), names.find(family.trunk[0])
    return not decoder or not word or _is_equal(weights, decoder, word)


def _is_equal(weights: CheckpointTensors, one: str, other: str) -> bool:
    """Compares two tensors of the file."""
    same_shape = weights.entries[one].shape == weights.entries[other].shape
    if not same_shape or {weights.entries[one].dtype, weights.entries[other].dtype} - set(FLOATS):
        return False
    # Block by block: a table may have gigabytes.
    columns = slice(0, weights.matrix(one)[1])
    return all(
        np.array_equal(
            weights.read_block(one, rows, columns), weights.read_block(other, rows, columns)
        )
        for rows in weights.blocks(one)
    )
