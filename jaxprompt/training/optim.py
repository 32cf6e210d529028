"""Schedules, and optax chains with hyperparameters in the state, so that runs can be vmapped."""

import dataclasses
import functools
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxprompt.config.run import Cosine, Exponential, InverseSqrt, Linear, Warmup
from jaxprompt.config.run import Schedule as ScheduleConfig
from jaxprompt.errors import InputError, nearest
from jaxprompt.parallel.sharding import MODELS, STACKED

OPTIMIZERS = ("adamw", "adafactor")
Constants: TypeAlias = dict[str, Any]  # scalars by name, of numpy or JAX
ScheduleFn: TypeAlias = Callable[[jnp.ndarray], jnp.ndarray]


@dataclasses.dataclass(frozen=True, eq=False)
class Schedule:
    """The factor on the learning rate as a function of the step."""

    factor: Callable[[Any, Constants], Any]
    constants: Constants  # those of the run's length, which may be arguments of a program

    def __call__(self, step: Any, constants: Constants | None = None) -> Any:
        """Returns the factor in a step, with these constants or those of the schedule."""
        return self.factor(step, self.constants if constants is None else constants)


def lr_by_part(
    parts: Collection[str], lr: float, part_lrs: Mapping[str, float | None]
) -> dict[str, float]:
    """Returns the learning rate of each trainable part: lr_<part> if set, else `lr`.

    Raises InputError for the learning rate of a part that does not train.
    """
    for part, part_lr in part_lrs.items():
        if part_lr is not None and part not in parts:
            raise InputError(
                f"optim.lr_{part}={part_lr}, but no parameter of the {part} trains; leave it out, "
                f"or add {part}/.* to config.trainable"
            )
    explicit = {part: part_lr for part, part_lr in part_lrs.items() if part_lr is not None}
    return {part: explicit.get(part, lr) for part in sorted(parts)}


def make_schedule(schedule: ScheduleConfig, *, total: int, epoch: int) -> Schedule:
    """Returns the factor on the learning rate as a function of the step.

    constant; linear: to 0 at `total`; warmup_linear, cosine: linear warmup, then to 0 at
    `total`, linearly or along half a cosine; exponential: gamma ** (step // epoch); inverse_sqrt:
    1 / sqrt(max(step + 1, warmup)) (Raffel et al. 2020, section 3.1.2). Raises InputError for a
    warmup that is longer than the run.
    """
    if isinstance(schedule, Linear):
        return Schedule(_linear_decay, _decay_constants(total))
    if isinstance(schedule, Exponential):

        def decay_by_epoch(step, c):
            return schedule.gamma ** (step // c["epoch"]).astype(jnp.float32)

        return Schedule(decay_by_epoch, {"epoch": np.int32(epoch)})
    if not isinstance(schedule, Warmup):
        return Schedule(lambda step, c: 1.0, {})
    warmup_steps = schedule.warmup(total)
    constants: Constants = {"warmup_steps": np.int32(warmup_steps)}
    if isinstance(schedule, InverseSqrt):
        return Schedule(
            lambda step, c: 1.0 / jnp.sqrt(jnp.maximum(step + 1.0, c["warmup_steps"])), constants
        )
    if warmup_steps >= total:
        raise InputError(
            f"optim.schedule.warmup_steps={warmup_steps} must be less than the {total} steps of "
            "the run"
        )
    # The factor is 1 / warmup_steps in the first step, and 1 in step `warmup_steps - 1`.
    rise_steps = max(warmup_steps - 1, 1)
    constants |= {
        "rise": np.float32(1 / max(warmup_steps, 1) - 1.0),
        "rise_steps": np.int32(rise_steps),
        "rise_per_step": _reciprocal(rise_steps),
    }
    decay = _cosine_decay if isinstance(schedule, Cosine) else _linear_decay
    return Schedule(_after_warmup(decay), constants | _decay_constants(total - warmup_steps))


def _reciprocal(steps: int) -> np.float32:
    # XLA multiplies by it where a program divides by a constant: a run has the same results
    # whether its constants are in the program or are arguments.
    return np.float32(1) / np.float32(steps)


def _decay_constants(steps: int) -> Constants:
    per_step = _reciprocal(steps)
    return {
        "decay_steps": np.int32(steps),
        "decay_per_step": per_step,
        "decay_angle": np.float32(np.pi) * per_step,
    }


def _linear_decay(step, c: Constants):
    return 1 - jnp.clip(step, 0, c["decay_steps"]) * c["decay_per_step"]


def _cosine_decay(step, c: Constants):
    return 0.5 * (1 + jnp.cos(jnp.minimum(step, c["decay_steps"]) * c["decay_angle"]))


def _after_warmup(decay: Callable[[Any, Constants], Any]) -> Callable[[Any, Constants], Any]:
    def factor(step, c: Constants):
        rise = c["rise"] * (1 - jnp.clip(step, 0, c["rise_steps"]) * c["rise_per_step"]) + 1.0
        return jnp.where(step < c["warmup_steps"], rise, decay(step - c["warmup_steps"], c))

    return factor


def decay_mask(no_decay: Sequence[str]) -> Callable[[Mapping[str, object]], dict[str, bool]]:
    """Returns a mask of the flat names with weight decay: those that no pattern matches."""
    patterns = [re.compile(pattern) for pattern in no_decay]
    return lambda flat: {name: not any(p.fullmatch(name) for p in patterns) for name in flat}


def check_no_decay(
    patterns: Sequence[str], defaults: Sequence[str], trainable: Iterable[str]
) -> None:
    """Raises InputError for an unusual pattern that matches no trainable parameter."""
    names = list(trainable)
    for pattern in patterns:
        if pattern not in defaults and not any(re.fullmatch(pattern, name) for name in names):
            suggestion = nearest(pattern.replace(".*", ""), names)
            raise InputError(
                f"optim.no_decay: {pattern!r} matches no trainable parameter; {suggestion}"
            )


def _adamw(schedule: ScheduleFn, mask, b1: float, b2: float, eps: float):
    """AdamW: the decay is scaled by the learning rate (Loshchilov & Hutter 2019)."""

    def make(lr, weight_decay):
        return optax.chain(
            optax.scale_by_adam(b1=b1, b2=b2, eps=eps),
            # After Adam, so that its second moment does not divide the decay.
            optax.add_decayed_weights(weight_decay, mask),
            optax.scale_by_schedule(schedule),
            optax.scale(-lr),
        )

    return make


def _adafactor(schedule: ScheduleFn, mask, decay_rate: float, scaled: bool):
    """Adafactor with absolute decay (Shazeer & Stern 2018).

    For prompt tuning: unfactored and unscaled (Lester et al. 2021, section 3). `scaled` as T5 was
    trained: factored, with learning rates relative to each matrix (algorithms 4 and 5, section 8).
    """
    rms = optax.scale_by_factored_rms(factored=scaled, decay_rate=decay_rate)
    # Update clipping with d = 1 (section 6).
    steps = [rms, optax.clip_by_block_rms(1.0)]
    if scaled:
        # The lower bound of a matrix's root mean square: epsilon_2 of algorithm 4.
        steps.append(optax.scale_by_param_block_rms(1e-3))
    by_matrix = _by_matrix(optax.chain(*steps))

    def make(lr, weight_decay):
        return optax.chain(
            by_matrix,
            optax.scale_by_schedule(schedule),
            optax.scale(lr),
            # After the learning rate, so that neither it nor the schedule scales the decay.
            optax.add_decayed_weights(weight_decay, mask),
            optax.scale(-1.0),
        )

    return make


class LearningRateState(NamedTuple):
    """The learning rate in an optimizer state, read by `learning_rates`."""

    # int32 scalar, updates
    count: jnp.ndarray  # type: ignore[assignment]  # optax's name, and the leaf's in checkpoints
    learning_rate: jnp.ndarray  # float32 scalar, of the newest update


def _record_lr(lr_at: ScheduleFn) -> optax.GradientTransformation:
    """Stores the learning rate of an update in the state for the log; changes no update."""

    def init(_):
        return LearningRateState(jnp.zeros((), jnp.int32), jnp.zeros(()))

    def update(updates, state, _=None):
        # scale_by_schedule also uses the count before the update.
        lr = jnp.asarray(lr_at(state.count), jnp.float32)
        return updates, LearningRateState(state.count + 1, lr)

    return optax.GradientTransformation(init, update)


def learning_rates(opt_state: Any) -> dict[str, jnp.ndarray]:
    """Returns the learning rate of the newest update by part: prompt, head, backbone."""

    def is_lr_state(x):
        return isinstance(x, LearningRateState)

    lrs = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(opt_state, is_leaf=is_lr_state):
        if is_lr_state(leaf):
            group = next(key.key for key in path if hasattr(key, "key"))
            lrs[group.split("/")[0]] = leaf.learning_rate
    return lrs


def shown_lr(lrs: Mapping[str, float]) -> float | dict[str, float]:
    """Returns one learning rate if all parts have the same, else one per part."""
    by_part = {part: float(lr) for part, lr in lrs.items()}
    return next(iter(by_part.values())) if len(set(by_part.values())) == 1 else by_part


def _by_matrix(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """Applies a transformation to every leaf separately, and to every layer of a stacked leaf."""

    def per_layer(function, name: str):
        part, path = name.split("/", 1)
        stacked = part in MODELS and path.split("/")[0] in STACKED
        return jax.vmap(function) if stacked else function

    def present(flat):  # without the leaves of other parts, which optax.partition hides
        return {name: x for name, x in flat.items() if not isinstance(x, optax.MaskedNode)}

    def init(params):
        return {name: per_layer(tx.init, name)({name: p}) for name, p in present(params).items()}

    def update(grads, state, params):
        results = {
            name: per_layer(tx.update, name)({name: g}, state[name], {name: params[name]})
            for name, g in present(grads).items()
        }
        new_updates = {name: updates[name] for name, (updates, _) in results.items()}
        new_states = {name: leaf_state for name, (_, leaf_state) in results.items()}
        # Leaves of other parts are returned unchanged, as optax.partition requires.
        return {**grads, **new_updates}, new_states

    return optax.GradientTransformation(init, update)


def _partition_label(leaf: str, groups: Collection[str]) -> str:
    first, second, *_ = leaf.split("/")
    label = f"{first}/{second}"
    return label if label in groups else first


def make_optimizer(
    name: str,
    schedule: Callable[..., Any],
    lrs: Mapping[str, float],
    *,
    weight_decay: float = 0.0,
    no_decay: Sequence[str] = (),
    clip: float = 0.0,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    decay_rate: float = 0.8,
    scaled: bool = False,
) -> optax.GradientTransformation:
    """Returns an optax chain: clip by global norm, then one optimizer per part.

    `lrs` maps the first part of a flat name ("prompt", "head", "backbone"), or the first two
    ("head/topics"), to its learning rate; a `scaled` Adafactor multiplies it by each matrix's
    root mean square. Learning rates and weight decay are leaves of the state. `update` takes the
    constants of a `Schedule` as an argument.
    """
    mask = decay_mask(no_decay)

    def chain(schedule: ScheduleFn) -> optax.GradientTransformation:
        def with_recorded_lr(make):
            return lambda lr, weight_decay: optax.chain(
                make(lr, weight_decay), _record_lr(lambda count: lr * schedule(count))
            )

        if name == "adafactor":
            make = _adafactor(schedule, mask, decay_rate, scaled)
        else:
            make = _adamw(schedule, mask, b1, b2, eps)
        # Learning rates are leaves of the state, so that runs of a grid share one program.
        parts = {
            part: optax.inject_hyperparams(with_recorded_lr(make))(lr=lr, weight_decay=weight_decay)
            for part, lr in lrs.items()
        }
        # Outside of the partition, to clip by the norm of all parts together.
        tx = optax.partition(
            parts, lambda flat: {leaf: _partition_label(leaf, parts) for leaf in flat}
        )
        return optax.chain(optax.clip_by_global_norm(clip), tx) if clip else tx

    def update(grads, state, params=None, *, constants: Constants | None = None):
        # With constants that are arguments, runs of other lengths use the same program.
        arguments = {} if constants is None else {"constants": constants}
        return chain(functools.partial(schedule, **arguments)).update(grads, state, params)

    return optax.GradientTransformationExtraArgs(chain(schedule).init, update)
