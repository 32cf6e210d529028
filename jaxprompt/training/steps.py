"""Train and eval steps: factories of pure functions; no host callbacks, no closed-over rates."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxprompt import rng
from jaxprompt.models.generation import generate
from jaxprompt.models.model import KeyValues, Model
from jaxprompt.parallel.sharding import constrain
from jaxprompt.training.optim import learning_rates
from jaxprompt.training.state import TrainState
from jaxprompt.tree import Flat, merge
from jaxprompt.types import Batch, Objective


def _evaluate(model: Model, params, batch: Batch, objective: Objective, key, *, deterministic):
    """Gives an objective's sum, and (normaliser, other sums, the batch of those after it)."""
    seen = objective.view(batch, rng.for_name(key, "view")) if objective.view else batch
    scores = model.forward(params, seen, head=objective.head, deterministic=deterministic, key=key)
    given = scores, seen.labels, seen.weights
    total, n = objective.loss(*given)
    sums = objective.sums(*given) if objective.sums else {}
    return total, (n, sums, objective.then(seen, scores) if objective.then else None)


def make_train_step(
    model: Model,
    tx: optax.GradientTransformation,
    objectives: Sequence[Objective],
    *,
    accumulate: int = 1,
):
    """Makes (state, frozen, batch) -> (state, metrics).

    Gradients are taken over `state.trainable` alone. `accumulate` cuts the batch into that many
    parts and adds their sums, so the result is that of the whole batch, but for what is random:
    each part has a key of its own, by which dropout and fluency's masks are others. A step whose
    loss or gradient is not finite changes nothing but the counters. metrics["sums"] holds, by
    name, what objectives count, metrics["lr"] the learning rate by part where `tx` is of
    `make_optimizer`.
    """

    def term(trainable: Flat, frozen: Flat, batch: Batch, objective: Objective, key):
        return _evaluate(
            model, merge(trainable, frozen), batch, objective, key, deterministic=False
        )

    def terms(trainable: Flat, frozen: Flat, batch: Batch, key):
        """Gives (sum, normaliser, gradient of the sum) of every objective, and its other sums."""
        grad = jax.value_and_grad(term, has_aux=True)
        # Each draws for itself: one objective more leaves what the others drop as it was.
        keys = [jax.random.fold_in(key, number) for number in range(len(objectives))]
        found, counted = [], []
        for objective, own in zip(objectives, keys, strict=True):
            (total, (n, sums, after)), grads = grad(trainable, frozen, batch, objective, own)
            found.append((total, n, grads))
            counted.append(sums)
            # What a term leaves for the next, as a generator its draws for the discriminator.
            batch = batch if after is None else after
        return found, counted

    def step(state: TrainState, frozen: Flat, batch: Batch) -> tuple[TrainState, dict[str, Any]]:
        # Of the step's number, not of the key before: a resumed run drops what it would have.
        step_key = rng.at_step(rng.from_numbers(state.key), state.step)
        if accumulate == 1:
            found, counted = terms(state.trainable, frozen, batch, step_key)
        else:
            size = batch.index.shape[0] // accumulate  # examples of a part

            # Every part lies over all devices, as the whole batch does: it takes one example of
            # each `accumulate`, so that none is sent to another device. [B*K, ...] -> [A, ...]
            def cut(x):
                x = x.reshape(size, accumulate, -1, *x.shape[1:]).swapaxes(0, 1)
                x = x.reshape(accumulate, -1, *x.shape[3:])
                return constrain(x, None, "act_batch", *[None] * (x.ndim - 2))

            parts = (jax.tree.map(cut, batch), jax.random.split(step_key, accumulate))
            nothing = (jnp.zeros(()), jnp.zeros(()), jax.tree.map(jnp.zeros_like, state.trainable))

            def add(carry, part):
                more, counted = terms(state.trainable, frozen, *part)
                return jax.tree.map(jnp.add, carry, more), counted

            # In a loop, so that the activations of one part are held at a time.
            found, counted = jax.lax.scan(add, [nothing] * len(objectives), parts)
            counted = jax.tree.map(lambda x: x.sum(0), counted)
        # Divided here and not in each part: parts may have counted different numbers of labels.
        loss, grads = 0.0, jax.tree.map(jnp.zeros_like, state.trainable)
        for objective, (total, n, more) in zip(objectives, found, strict=True):
            # A batch without a label adds nothing, instead of 0 / 0.
            share = objective.weight / jnp.maximum(n, 1e-9)
            loss += share * total
            grads = jax.tree.map(lambda g, m, share=share: g + share * m, grads, more)
        # Before `tx` clips it, so that what is logged and judged is the gradient's own.
        norm = optax.tree.norm(grads)
        finite = jnp.isfinite(loss) & jnp.isfinite(norm)
        updates, opt_state = tx.update(grads, state.opt_state, state.trainable)
        rates = learning_rates(opt_state)  # also of a step that is skipped
        moved = (optax.apply_updates(state.trainable, updates), opt_state)
        # A choice and no branch: under vmap, as in a grid, one run may be finite and another not.
        keep = lambda new, old: jnp.where(finite, new, old)
        trainable, opt_state = jax.tree.map(keep, moved, (state.trainable, state.opt_state))
        bad = 1 - finite.astype(jnp.int32)
        new = TrainState(
            # A skipped step counts: its batch is used up, and keys and data follow the number.
            state.step + 1,
            trainable,
            opt_state,
            state.skipped + bad,
            (state.streak + 1) * bad,
            state.key,
        )
        measured = {
            "loss": loss, "grad_norm": norm, "skipped": new.skipped, "streak": new.streak,
        }  # fmt: skip
        measured |= {"lr": rates} if rates else {}
        sums = {
            objective.name: {"loss": total, "n": n, **more}
            for objective, (total, n, _), more in zip(objectives, found, counted, strict=True)
            if more
        }
        return new, measured | {"sums": sums} if sums else measured

    return step


def tell_broken(streak: int, step: int, skipped: int) -> str:
    """Says after `streak` steps in a row that were not finite what to change.

    `step` is the newest of them, `skipped` how many of all steps up to it were not finite.
    """
    if skipped >= step:  # nothing has moved yet
        return (
            f"the first {step} steps were not finite, whatever the learning rate; set "
            "backbone.dtype=float32, or backbone.rescale=100 for a T5, and see what the prompt "
            "starts from"
        )
    return (
        f"{streak} steps in a row were not finite, up to step {step}; lower optim.lr or set "
        "optim.clip, and start in another workdir"
    )


def with_flags(step):
    """Makes (state, frozen, batch, flags) -> (state, metrics, the highest of the flags)."""

    def flagged(state: TrainState, frozen: Flat, batch: Batch, flags: jax.Array):
        return *step(state, frozen, batch), flags.max()

    return flagged


def make_generate_step(model: Model, **settings: Any):
    """Makes (trainable, frozen, batch) -> ids [B, max_new] of the texts that the model writes.

    The last argument is that of `make_eval_step`'s. Before a batch is given to it `check_room`
    looks at it: a step that is compiled does not know how long the rows are.
    """

    def step(trainable: Flat, frozen: Flat, batch: Batch, front_kv: KeyValues | None = None):
        params = merge(trainable, frozen)
        return generate(model, params, batch, front_kv=front_kv, checked=True, **settings).ids

    return step


def make_eval_step(model: Model, head: str = "main"):
    """Makes (trainable, frozen, batch) -> scores [B, C], without dropout.

    The last argument is what `Model.run_front` gave for these numbers, if anything.
    """

    def step(trainable: Flat, frozen: Flat, batch: Batch, front_kv: KeyValues | None = None):
        return model.forward(merge(trainable, frozen), batch, head=head, front_kv=front_kv)

    return step


def make_count_step(model: Model, objectives: Sequence[Objective]):
    """Makes (trainable, frozen, batch, key) -> {objective: {"loss", "n", ...}}, without dropout.

    These are sums: those of several batches add up. The key is for what objectives draw.
    """

    def step(trainable: Flat, frozen: Flat, batch: Batch, key) -> dict[str, dict[str, Any]]:
        params, counted = merge(trainable, frozen), {}
        for number, objective in enumerate(objectives):
            own = jax.random.fold_in(key, number)
            total, (n, sums, after) = _evaluate(
                model, params, batch, objective, own, deterministic=True
            )
            counted[objective.name] = {"loss": total, "n": n, **sums}
            batch = batch if after is None else after
        return counted

    return step
