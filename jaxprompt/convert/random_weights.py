"""Randomly initialises a backbone as in its paper, straight into the shards."""

import functools
import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jaxprompt import rng
from jaxprompt.convert.hf_config import read_id, read_positive, read_tied
from jaxprompt.convert.llama_fields import read_type
from jaxprompt.convert.load import DTYPES, Loaded, LoadReport
from jaxprompt.convert.names.tables import FAMILIES
from jaxprompt.convert.shapes import axis_sizes, file_names, get_family, select_tensors
from jaxprompt.convert.tensor_reader import hash_parts
from jaxprompt.convert.tensors import Family, Tensor
from jaxprompt.errors import InputError, with_article
from jaxprompt.parallel.sharding import Placement
from jaxprompt.tree import Flat, flatten, unflatten

# The default padding id, whose rows are zero.
_PAD_IDS = {
    "bart": 1,
    "bert": 0,
    "distilbert": 0,
    "roberta": 1,
    "electra": 0,
    "deberta": 0,
    "albert": 0,
    "modernbert": 50283,
    "deberta_v2": 0,
    "mpnet": 1,
    "xlm_roberta_xl": 1,
    "eurobert": 128001,
}
_ALL_HEADS = {head for family in FAMILIES.values() for head in family.heads}


class Initializer(NamedTuple):
    """How a family is initialised: N(0, deviation^2), constants for biases and norm scales."""

    family: str
    config: Mapping[str, Any]
    sizes: Mapping[str, int]

    def deviation(self, tensor: Tensor) -> float:
        """Returns the standard deviation of a kernel or a table.

        BERT and its variants: one for all, as in the released code. GPT-2 and ModernBERT: weights
        that write into the residual stream are divided by the square root of their number, two a
        layer (Radford et al. 2019, section 2.3). T5: 1 / sqrt(inputs), as in Mesh TensorFlow; its
        attention has no 1 / sqrt(D), so the query's kernel includes it; the word embeddings are
        N(0, 1).
        """
        if self.family != "t5":
            field = "init_std" if self.family == "bart" else "initializer_range"
            base = read_positive(self.config, field, 0.02)
            residual_writers = ["layers/attention/out/kernel", "layers/mlp/down/kernel"]
            if self.family == "modernbert":
                residual_writers += ["mlm/dense/kernel", "mlm/table"]
            if self.family in ("gpt2", "modernbert") and tensor.path in residual_writers:
                return base / math.sqrt(2 * self.sizes["L"])
            return base
        factor = read_positive(self.config, "initializer_factor", 1.0)
        if tensor.path == "embed/word/table":
            return factor
        inputs = tensor.file_axes[-1] if tensor.transposed else "H"
        fan_in = math.prod(self.sizes[axis] for axis in inputs)
        if "/query/" in tensor.path:
            fan_in *= self.sizes["D"]
        return factor / math.sqrt(fan_in)

    def zero_row(self, tensor: Tensor) -> int | None:
        """Returns the row of the padding token, which transformers sets to zero."""
        tables = ["embed/word/table"]
        if self.family in ("roberta", "xlm_roberta_xl", "mpnet"):
            tables.append("embed/position/table")
        if self.family not in _PAD_IDS or tensor.path not in tables:
            return None
        if "pad_token_id" in self.config and self.config["pad_token_id"] is None:
            return None
        return read_id(self.config, "pad_token_id", _PAD_IDS[self.family])

    def constant(self, tensor: Tensor) -> float | None:
        """Returns the constant value of biases and norm scales, None for random parameters."""
        if tensor.path.endswith("/bias"):
            return 0.0
        if tensor.path.endswith("/scale"):
            # Gemma multiplies by 1 + scale.
            is_gemma = self.family == "llama" and read_type(self.config)[1].gemma
            if is_gemma or self.family == "t5gemma":
                return 0.0
            if self.family == "t5":
                return read_positive(self.config, "initializer_factor", 1.0)
            return 1.0
        return None


def init_backbone(
    family: str,
    config: Mapping[str, Any],
    heads: Collection[str],
    *,
    seed: int,
    placement: Placement,
    part: str = "backbone",
    dtype: str = "float32",
    rescale: float = 1.0,
) -> Loaded:
    """Randomly initialises a trunk and heads from a transformers config alone.

    A parameter is the same on every mesh.

    Args:
      family: the backbone family.
      config: a transformers config.json.
      heads: the heads to initialise.
      seed: the random seed.
      placement: where each parameter goes.
      part: the name of the model in the tree, "backbone" or "generator"; models with the same seed
        differ by it.
      dtype: as in load.py.
      rescale: as in load.py.

    Raises:
      InputError: if the config lacks a size or has an invalid deviation, or the family has no such
        head.
    """
    table = check_heads(family, heads)
    sizes = axis_sizes(config, table)
    tied = read_tied(config, family) or not {"mlm", "lm"} & set(heads)
    tensors = select_tensors(table, config, sizes, heads, tied=tied)
    init = Initializer(family, config, sizes)
    flat = _init_params(
        init, tensors, seed=seed, placement=placement, part=part, dtype=dtype, rescale=rescale
    )
    report = LoadReport(
        heads=(),
        absent=tuple(heads),
        missing=(),
        unused=(),
        tied=tied,
        bytes=_num_bytes(flat),
        fingerprint=_fingerprint("drawn", init, tensors, seed=seed, part=part),
    )
    return Loaded(unflatten(flat), report)


def with_heads(
    loaded: Loaded,
    family: str,
    config: Mapping[str, Any],
    heads: Collection[str],
    *,
    seed: int,
    placement: Placement,
    part: str = "backbone",
    dtype: str = "float32",
    rescale: float = 1.0,
) -> Loaded:
    """Reduces a loaded backbone to the requested heads, and randomly initialises missing ones.

    The report lists the initialised heads, `absent`, and their tensors, `missing`.

    Raises:
      InputError: if the family has no such head.
    """
    table = check_heads(family, heads)
    sizes, params, report = axis_sizes(config, table), dict(loaded.params), loaded.report
    # Heads of all families, as a BERT's trunk may be used with ELECTRA's heads.
    known_heads = _ALL_HEADS | table.heads.keys()
    removed = [head for head in params if head in known_heads and head not in heads]
    for head in removed:
        del params[head]
    # Heads of `always` have no tensors of their own.
    absent = [head for head in heads if head in table.heads and head not in params]
    tied = report.tied
    tensors = select_tensors(table._replace(trunk=()), config, sizes, absent, tied=True)
    if "mlm" in absent:
        tied = read_tied(config, family)
        tensors += [] if tied else [table.decoder]
    init = Initializer(family, config, sizes)
    flat, fingerprint = flatten(params), report.fingerprint
    if tensors:
        flat |= _init_params(
            init, tensors, seed=seed, placement=placement, part=part, dtype=dtype, rescale=rescale
        )
        fingerprint = _fingerprint(fingerprint, init, tensors, seed=seed, part=part)
    report = report._replace(
        heads=tuple(head for head in report.heads if head in heads),
        absent=tuple(absent),
        missing=tuple(file_names(tensor, 0, table.prefix)[-1] for tensor in tensors),
        # Without the head there is no output table.
        tied=tied or "mlm" in removed,
        bytes=_num_bytes(flat),
        fingerprint=fingerprint,
    )
    return Loaded(unflatten(flat), report)


def check_heads(family: str, heads: Collection[str]) -> Family:
    """Returns a family. Raises InputError if it lacks one of the heads."""
    table = get_family(family)
    valid = (*table.heads, *table.always)
    invalid = [head for head in heads if head not in valid]
    if invalid:
        raise InputError(
            f"{with_article(family)} has no {invalid[0]} head; use an objective for "
            f"{' or '.join(valid)}, or another backbone"
        )
    return table


def _init_params(
    init: Initializer,
    tensors: Iterable[Tensor],
    *,
    seed: int,
    placement: Placement,
    part: str,
    dtype: str,
    rescale: float,
) -> dict[str, jax.Array]:
    """Initializes parameters one after the other, by flat name."""
    flat: dict[str, jax.Array] = {}
    base = rng.key_for(seed, part)
    for tensor in tensors:
        letters = tensor.stack + tensor.axes
        unpadded = tuple(init.sizes[axis] for axis in letters)
        shape = tuple(
            placement.padded_vocab(size) if axis == "V" else size
            for axis, size in zip(letters, unpadded, strict=True)
        )
        sharding = placement.param_sharding(f"{part}/{tensor.path}", shape)
        if (value := init.constant(tensor)) is not None:
            # A view of one value, so that no host allocates the whole array.
            view = np.broadcast_to(np.asarray(value, DTYPES[dtype]), shape)
            flat[tensor.path] = jax.make_array_from_callback(shape, sharding, view.__getitem__)
            continue
        pad = init.zero_row(tensor)
        sample = _make_sampler(shape, sharding, DTYPES[dtype])
        deviation = init.deviation(tensor) / rescale**tensor.residual
        # By its name, so that it does not depend on the other parameters.
        key = rng.for_name(base, tensor.path)
        # As arguments, not constants, so that all tables of a shape share a program.
        flat[tensor.path] = sample(key, deviation, unpadded[0], -1 if pad is None else pad)
    return flat


@functools.cache
def _make_sampler(shape: tuple[int, ...], sharding: NamedSharding, dtype: np.dtype):
    """Compiles the sampling of an array, once for each shape and sharding."""

    def make(key, deviation, rows, pad):
        x = deviation * jax.random.normal(key, shape)
        # Samples are numbered row by row, so that padding does not change those of real rows.
        index = jnp.arange(shape[0])
        is_real = ((index < rows) & (index != pad)).reshape(-1, *[1] * (len(shape) - 1))
        return jnp.where(is_real, x, 0.0).astype(dtype)

    return jax.jit(make, out_shardings=sharding)


def _fingerprint(
    base: str, init: Initializer, tensors: Iterable[Tensor], *, seed: int, part: str
) -> str:
    """Returns a fingerprint of random parameters, without reading them from the devices."""
    settings = [
        f"{tensor.path} {[init.sizes[axis] for axis in tensor.stack + tensor.axes]}"
        f" {init.constant(tensor)} {init.deviation(tensor)} {init.zero_row(tensor)}"
        for tensor in tensors
    ]
    return hash_parts(base, init.family, part, str(seed), *settings)


def _num_bytes(flat: Flat) -> int:
    return sum(array.nbytes for array in flat.values())
