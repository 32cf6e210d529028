"""Factories of train and eval steps: pure functions without host callbacks."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import optax

from jaxprompt import rng
from jaxprompt.models.generation import Generated, generate
from jaxprompt.models.model import KeyValues, Model
from jaxprompt.models.sampling import RowKeys
from jaxprompt.parallel.sharding import constrain
from jaxprompt.training.optim import Constants, learning_rates
from jaxprompt.training.state import TrainState
from jaxprompt.tree import Flat, Params, merge
from jaxprompt.types import Batch, Objective

TrainStep = Callable[..., tuple[TrainState, dict[str, Any]]]


class StepModel(Protocol):
    """Interface of the model of a step: a Model or a Pair."""

    def forward(
        self,
        params: Params,
        batch: Batch,
        *,
        head: str,
        deterministic: bool,
        key: jax.Array | None,
    ) -> Any:
        """Returns the scores of one head for a batch."""


class _Term(NamedTuple):
    """Result of an objective, summed over a batch or its parts."""

    total: jax.Array  # of the losses
    n: jax.Array  # what they are divided by
    grads: Flat  # of `total`


def _evaluate(model: StepModel, params, batch: Batch, objective: Objective, key, *, deterministic):
    """Returns the sum of an objective, and (normaliser, other sums, batch for later objectives)."""
    view = objective.view(batch, rng.for_name(key, "view")) if objective.view else batch
    scores = model.forward(params, view, head=objective.head, deterministic=deterministic, key=key)
    outputs = scores, view.labels, view.weights
    total, n = objective.loss(*outputs)
    sums = objective.sums(*outputs) if objective.sums else {}
    return total, (n, sums, objective.then(view, scores) if objective.then else None)


def make_train_step(
    model: StepModel,
    tx: optax.GradientTransformation,
    objectives: Sequence[Objective],
    *,
    accumulate: int = 1,
) -> TrainStep:
    """Returns a train step (state, frozen, batch, constants of the schedule) -> (state, metrics).

    Gradients are taken only over `state.trainable`. `accumulate` splits the batch into that many
    parts and adds their sums, so the result is that of the whole batch except for randomness: each
    part has its own key for dropout and the masks of fluency. A step with a non-finite loss or
    gradient changes only the counters. metrics["sums"] has the sums of objectives by name,
    metrics["lr"] the learning rate by part if `tx` comes from `make_optimizer`. Without constants
    those of the schedule of `tx` are in the program.
    """

    compute_terms = _make_terms(model, objectives)
    if accumulate > 1:
        compute_terms = _accumulate_terms(compute_terms, len(objectives), accumulate)

    update = optax.with_extra_args_support(tx).update

    def step(
        state: TrainState, frozen: Flat, batch: Batch, constants: Constants | None = None
    ) -> tuple[TrainState, dict[str, Any]]:
        # From the step number, so that a resumed run has the same dropout.
        step_key = rng.at_step(rng.from_key_data(state.key), state.step)
        terms, counts = compute_terms(state.trainable, frozen, batch, step_key)
        loss, grads = _weighted_sum(terms, objectives, state.trainable)
        # Before `tx` clips the gradient.
        norm = optax.tree.norm(grads)
        finite = jnp.isfinite(loss) & jnp.isfinite(norm)
        updates, opt_state = update(grads, state.opt_state, state.trainable, constants=constants)
        lrs = learning_rates(opt_state)  # also of a step that is skipped
        state = _next_state(state, updates, opt_state, finite)
        metrics = {
            "loss": loss, "grad_norm": norm, "skipped": state.skipped, "streak": state.streak,
        }  # fmt: skip
        metrics |= {"lr": lrs} if lrs else {}
        sums = {
            objective.name: {"loss": term.total, "n": term.n, **sums}
            for objective, term, sums in zip(objectives, terms, counts, strict=True)
            if sums
        }
        return state, metrics | {"sums": sums} if sums else metrics

    return step


def _make_terms(model: StepModel, objectives: Sequence[Objective]):
    """Returns (trainable, frozen, batch, key) -> (terms, other sums) of all objectives."""

    def total(trainable: Flat, frozen: Flat, batch: Batch, objective: Objective, key):
        params = merge(trainable, frozen)
        return _evaluate(model, params, batch, objective, key, deterministic=False)

    def compute_terms(trainable: Flat, frozen: Flat, batch: Batch, key):
        grad = jax.value_and_grad(total, has_aux=True)
        # A key for each, so that another objective does not change the dropout of the others.
        keys = [jax.random.fold_in(key, number) for number in range(len(objectives))]
        terms, counts = [], []
        for objective, objective_key in zip(objectives, keys, strict=True):
            (loss, (n, sums, after)), grads = grad(
                trainable, frozen, batch, objective, objective_key
            )
            terms.append(_Term(loss, n, grads))
            counts.append(sums)
            # An objective may change the batch of the next: a generator, that of its discriminator.
            batch = batch if after is None else after
        return terms, counts

    return compute_terms


def _accumulate_terms(compute_terms, num_terms: int, num_parts: int):
    """Wraps `compute_terms` to add up the parts of a batch."""

    def accumulate(trainable: Flat, frozen: Flat, batch: Batch, key):
        size = batch.index.shape[0] // num_parts  # examples of a part

        # Every part takes each `num_parts`-th example, so that it is divided over all devices like
        # the whole batch, and no example moves to another device. [B*K, ...] -> [A, ...]
        def split(x):
            x = x.reshape(size, num_parts, -1, *x.shape[1:]).swapaxes(0, 1)
            x = x.reshape(num_parts, -1, *x.shape[3:])
            return constrain(x, None, "act_batch", *[None] * (x.ndim - 2))

        def add_part(terms, part):
            part_terms, counts = compute_terms(trainable, frozen, *part)
            return jax.tree.map(jnp.add, terms, part_terms), counts

        parts = (jax.tree.map(split, batch), jax.random.split(key, num_parts))
        zero = _Term(jnp.zeros(()), jnp.zeros(()), jax.tree.map(jnp.zeros_like, trainable))
        # A loop keeps the activations of only one part in memory.
        terms, counts = jax.lax.scan(add_part, [zero] * num_terms, parts)
        return terms, jax.tree.map(lambda x: x.sum(0), counts)

    return accumulate


def _weighted_sum(terms: Sequence[_Term], objectives: Sequence[Objective], trainable: Flat):
    """Divides terms by their normalisers and adds them weighted. Returns (loss, gradient)."""
    # Divided here and not in each part: parts may have different numbers of labels.
    loss: jax.Array | float = 0.0
    grads = jax.tree.map(jnp.zeros_like, trainable)
    for objective, (total, n, term_grads) in zip(objectives, terms, strict=True):
        # A batch without labels adds 0, not 0 / 0.
        scale = objective.weight / jnp.maximum(n, 1e-9)
        loss += scale * total
        grads = jax.tree.map(lambda g, t, scale=scale: g + scale * t, grads, term_grads)
    return loss, grads


def _next_state(state: TrainState, updates: Flat, opt_state: Any, finite) -> TrainState:
    """Counts a step, and applies its updates if it is `finite`."""
    updated = (optax.apply_updates(state.trainable, updates), opt_state)

    # where, not cond: under vmap, as in a grid, one run may be finite and another not.
    def choose(new, old):
        return jnp.where(finite, new, old)

    trainable, opt_state = jax.tree.map(choose, updated, (state.trainable, state.opt_state))
    is_skipped = 1 - finite.astype(jnp.int32)
    return TrainState(
        # A skipped step counts, because keys and data depend on the step number.
        state.step + 1,
        trainable,
        opt_state,
        state.skipped + is_skipped,
        (state.streak + 1) * is_skipped,
        state.key,
    )


def nonfinite_message(streak: int, step: int, skipped: int) -> str:
    """Returns the error message after `streak` non-finite steps in a row.

    `step` is the newest of them, `skipped` the number of all non-finite steps so far.
    """
    if skipped >= step:  # nothing has moved yet
        return (
            f"the first {step} steps had a non-finite loss or gradient, so the learning rate is "
            "not the cause; set backbone.dtype=float32, or backbone.rescale=100 for a T5, and "
            "check how the prompt is initialised"
        )
    return (
        f"{streak} steps in a row had a non-finite loss or gradient, up to step {step}; lower "
        "optim.lr or set optim.clip, and start in another workdir"
    )


def with_flags(step):
    """Returns (state, frozen, batch, flags, ...) -> (state, metrics, maximum of the flags)."""

    def flagged(state: TrainState, frozen: Flat, batch: Batch, flags: jax.Array, *constants: Any):
        return *step(state, frozen, batch, *constants), flags.max()

    return flagged


def make_generate_step(model: Model, **settings: Any) -> Callable[..., Generated]:
    """Returns (trainable, frozen, batch) -> the generated texts.

    The optional last arguments are that of `make_eval_step`, and the origin of random keys. Call
    `check_new_tokens` on a batch first: a compiled step does not know the lengths of its rows.
    """

    def step(
        trainable: Flat,
        frozen: Flat,
        batch: Batch,
        shared_kv: KeyValues | None = None,
        row_keys: RowKeys | None = None,
    ):
        inputs = dict(settings, shared_kv=shared_kv, row_keys=row_keys)
        return generate(model, merge(trainable, frozen), batch, checked=True, **inputs)

    return step


def make_eval_step(model: Model):
    """Returns (trainable, frozen, batch) -> scores [B, C], without dropout.

    The optional last argument is the result of `Model.run_shared_prefix` for these parameters.
    """

    def step(trainable: Flat, frozen: Flat, batch: Batch, shared_kv: KeyValues | None = None):
        return model.forward(merge(trainable, frozen), batch, shared_kv=shared_kv)

    return step


def make_count_step(model: StepModel, objectives: Sequence[Objective]):
    """Returns (trainable, frozen, batch, key) -> {objective: {"loss", "n", ...}}, without dropout.

    These are sums, which add up over batches. The key is for random objectives.
    """

    def step(trainable: Flat, frozen: Flat, batch: Batch, key) -> dict[str, dict[str, Any]]:
        params, sums_by_name = merge(trainable, frozen), {}
        for index, objective in enumerate(objectives):
            total, (n, sums, after) = _evaluate(
                model, params, batch, objective, jax.random.fold_in(key, index), deterministic=True
            )
            sums_by_name[objective.name] = {"loss": total, "n": n, **sums}
            batch = batch if after is None else after
        return sums_by_name

    return step
