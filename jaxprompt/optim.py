"""Schedules, and optax chains whose numbers stay in the state, so that runs can be vmapped."""

import re
from collections.abc import Callable, Mapping, Sequence

import jax.numpy as jnp
import optax

from jaxprompt.errors import InputError, nearest

Schedule = Callable[[jnp.ndarray], jnp.ndarray]
SCHEDULES = ("constant", "linear", "warmup_linear", "exponential", "inverse_sqrt")
OPTIMIZERS = ("adamw", "adafactor")


def make_schedule(name: str, *, total: int, warmup: int, gamma: float, epoch: int) -> Schedule:
    """Makes the factor on the learning rate as a function of the step.

    constant; linear: to 0 at `total`; warmup_linear: up over `warmup` steps, then to 0 at `total`;
    exponential: gamma ** (step // epoch); inverse_sqrt: 1 / sqrt(step + 1). Raises InputError.
    """
    if name == "constant":
        return optax.constant_schedule(1.0)
    if name == "linear":
        return optax.linear_schedule(1.0, 0.0, total)
    if name == "warmup_linear":
        if not 0 <= warmup < total:
            raise InputError(f"optim.warmup_steps={warmup} must be below the run's {total} steps")
        up = optax.linear_schedule(1 / max(warmup, 1), 1.0, max(warmup - 1, 1))
        return optax.join_schedules([up, optax.linear_schedule(1.0, 0.0, total - warmup)], [warmup])
    if name == "exponential":
        return lambda step: gamma ** (step // epoch).astype(jnp.float32)
    if name == "inverse_sqrt":
        return lambda step: 1.0 / jnp.sqrt(step + 1.0)
    raise InputError(f"unknown optim.schedule {name!r}; {nearest(name, SCHEDULES)}")


def decay_mask(no_decay: Sequence[str]) -> Callable[[Mapping[str, object]], dict[str, bool]]:
    """Marks the flat names that weight decay falls on: those that no pattern matches."""
    patterns = [re.compile(pattern) for pattern in no_decay]
    return lambda flat: {name: not any(p.fullmatch(name) for p in patterns) for name in flat}


def _adamw(schedule: Schedule, mask, b1: float, b2: float, eps: float):
    """AdamW: the decay is scaled by the rate (Loshchilov & Hutter 2019)."""

    def make(lr, weight_decay):
        return optax.chain(
            optax.scale_by_adam(b1=b1, b2=b2, eps=eps),
            optax.add_decayed_weights(weight_decay, mask),
            optax.scale_by_schedule(schedule),
            optax.scale(-lr),
        )

    return make


def _adafactor(schedule: Schedule, mask, decay_rate: float):
    """Adafactor, unfactored and unscaled, absolute decay (Lester et al. 2021, section 3)."""

    def make(lr, weight_decay):
        return optax.chain(
            optax.scale_by_factored_rms(factored=False, decay_rate=decay_rate),
            optax.clip_by_block_rms(1.0),
            optax.scale_by_schedule(schedule),
            optax.scale(lr),
            optax.add_decayed_weights(weight_decay, mask),
            optax.scale(-1.0),
        )

    return make


def make_optimizer(
    name: str,
    schedule: Schedule,
    rates: Mapping[str, float],
    *,
    weight_decay: float = 0.0,
    no_decay: Sequence[str] = (),
    clip: float = 0.0,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    decay_rate: float = 0.8,
) -> optax.GradientTransformation:
    """Makes the chain: clip by the global norm, then one optimizer a part with its own rate.

    `rates` maps the first part of a flat name ("prompt", "head", "backbone") to its learning rate.
    Rates and weight decay are leaves of the state. Raises InputError for an unknown name.
    """
    mask = decay_mask(no_decay)
    if name == "adamw":
        make = _adamw(schedule, mask, b1, b2, eps)
    elif name == "adafactor":
        make = _adafactor(schedule, mask, decay_rate)
    else:
        raise InputError(f"unknown optim.name {name!r}; {nearest(name, OPTIMIZERS)}")
    parts = {
        part: optax.inject_hyperparams(make)(lr=rate, weight_decay=weight_decay)
        for part, rate in rates.items()
    }
    labels = lambda flat: {leaf: leaf.split("/")[0] for leaf in flat}
    tx = optax.partition(parts, labels)
    return optax.chain(optax.clip_by_global_norm(clip), tx) if clip else tx
