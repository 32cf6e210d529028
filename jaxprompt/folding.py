"""Folding: a trained method as the constants that it adds, without what computed them."""

import dataclasses
from typing import Any

import jax
import numpy as np

from jaxprompt.model import Model, Params
from jaxprompt.prompts import Method
from jaxprompt.prompts.fixed import PARTS
from jaxprompt.prompts.fixed import Prompt as Fixed
from jaxprompt.tree import Flat, merge
from jaxprompt.types import Batch


def fold(model: Model, params: Params, batch: Batch) -> tuple[Method, dict[str, Any]]:
    """Computes the injection once. -> (the `fixed` method, its params as float32 numpy arrays)

    `batch` is any batch: the injection must not depend on it.
    """
    streams = jax.device_get(model.inject(params, batch))._asdict()
    prompt = model.prompt
    fields = {"shift": prompt.position_shift(), "shift_decoder": prompt.decoder_shift()}
    arrays: dict[str, Any] = {}
    for stream, (slots, prefix) in streams.items():
        name = PARTS[stream]
        if slots is not None:
            fields[f"{name}slots"] = slots.shape[1]
            arrays[f"{name}slots"] = np.asarray(slots[0], np.float32)
        if prefix is not None:
            inside = np.flatnonzero(prefix.mask.any(axis=(1, 2)))
            first, last = int(inside[0]), int(inside[-1]) + 1
            span = {"length": prefix.k.shape[2], "first": first, "last": last}
            fields |= {name + field: value for field, value in span.items()}
            arrays[f"{name}k"] = np.asarray(prefix.k[first:last, 0], np.float32)  # [L, P, N, D]
            arrays[f"{name}v"] = np.asarray(prefix.v[first:last, 0], np.float32)
    return Fixed(dims=prompt.dims, **fields), arrays


def fold_flat(
    model: Model, trainable: Flat, frozen: Flat, batch: Batch
) -> tuple[Model, Flat, Flat]:
    """Folds the prompt of a model whose numbers are divided. -> (model, trainable, frozen)"""
    prompt, arrays = fold(model, merge(trainable, frozen), batch)
    others = lambda flat: {n: x for n, x in flat.items() if not n.startswith("prompt/")}
    folded = {f"prompt/{name}": array for name, array in arrays.items()}
    return dataclasses.replace(model, prompt=prompt), others(trainable) | folded, others(frozen)
