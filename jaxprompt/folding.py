"""Folding: a trained method as the constants that it adds, without what computed them."""

from typing import Any

import jax
import numpy as np

from jaxprompt.model import Model, Params
from jaxprompt.prompts import Method
from jaxprompt.prompts.fixed import Prompt as Fixed
from jaxprompt.types import Batch


def fold(model: Model, params: Params, batch: Batch) -> tuple[Method, dict[str, Any]]:
    """Computes the injection once. -> (the `fixed` method, its params as float32 numpy arrays)

    `batch` is any batch: the injection must not depend on it.
    """
    slots, prefix = jax.device_get(model.inject(params, batch)).encoder
    fields: dict[str, int] = {"shift": model.prompt.position_shift()}
    arrays: dict[str, Any] = {}
    if slots is not None:
        fields["slots"] = slots.shape[1]
        arrays["slots"] = np.asarray(slots[0], np.float32)
    if prefix is not None:
        inside = np.flatnonzero(prefix.mask.any(axis=(1, 2)))
        first, last = int(inside[0]), int(inside[-1]) + 1
        fields |= {"length": prefix.k.shape[2], "first": first, "last": last}
        arrays["k"] = np.asarray(prefix.k[first:last, 0], np.float32)  # [L, P, N, D]
        arrays["v"] = np.asarray(prefix.v[first:last, 0], np.float32)
    return Fixed(dims=model.prompt.dims, **fields), arrays
