"""Steps and batches of several tasks that train one prompt."""

import zlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny import assert_close, assert_equal, make_batch

from jaxprompt.errors import InputError
from jaxprompt.runs.shared_steps import TaskBatch, TaskBatches, make_shared_step, mix_tasks
from jaxprompt.scoring.losses import cross_entropy
from jaxprompt.training.state import make_state
from jaxprompt.training.steps import make_train_step
from jaxprompt.types import Objective

SIZES = {"a": 100, "b": 400, "c": 900}


class Stream:
    """Counts its batches."""

    def __init__(self, name):
        self.name, self.at, self.closed = name, 0, False

    def __next__(self):
        self.at += 1
        return f"{self.name}{self.at}"

    def get_state(self):
        return {"at": self.at}

    def set_state(self, state):
        self.at = state["at"]

    def close(self):
        self.closed = True


def make_mix(temperature, rows=(4, 8, 8)):
    return mix_tasks(SIZES, dict(zip(SIZES, rows, strict=True)), temperature)


def make_batches(temperature=1.0, seed=3, rows=(4, 8, 8)):
    streams = {name: Stream(name) for name in SIZES}
    return TaskBatches(streams, make_mix(temperature, rows).shares, seed=seed), streams


@pytest.mark.parametrize("temperature, shares", [
    (1.0, (1 / 14, 4 / 14, 9 / 14)), (2.0, (1 / 6, 2 / 6, 3 / 6)), (0.01, (0, 0, 1)),
])  # fmt: skip
def test_a_task_of_n_examples_has_a_share_of_n_to_the_power_of_one_over_the_temperature(
    temperature, shares
):
    mix = make_mix(temperature)
    np.testing.assert_allclose(list(mix.shares.values()), shares, atol=1e-9)
    mean = 4 * shares[0] + 8 * shares[1] + 8 * shares[2]
    assert mix.mean_batch == pytest.approx(mean)
    assert mix.steps_per_epoch == int(1400 / mean)


@pytest.mark.parametrize("seed", [0, 3])
def test_the_task_of_a_batch_is_drawn_by_the_seed_and_its_number(seed):
    batches, _ = make_batches(seed=seed)
    actual, counts = [next(batches) for _ in range(40)], dict.fromkeys(SIZES, 0)
    for number, batch in enumerate(actual):
        bits = np.random.MT19937(np.random.SeedSequence((seed, zlib.crc32(b"tasks"), number)))
        draw = np.random.RandomState(bits).random_sample()
        name = "a" if draw < 1 / 14 else "b" if draw < 5 / 14 else "c"
        counts[name] += 1
        assert (batch.task, batch.batch) == (name, f"{name}{counts[name]}")
    assert min(counts.values()) > 0


def test_a_position_is_saved_and_gone_to():
    first, _ = make_batches()
    before = [next(first) for _ in range(7)]
    saved = first.get_state()
    assert saved["at"] == 7 and sum(stream["at"] for stream in saved["streams"].values()) == len(
        before
    )
    second, streams = make_batches()
    second.set_state(saved)
    assert [next(second) for _ in range(9)] == [next(first) for _ in range(9)]
    with pytest.raises(InputError, match="resume with the same shared.tasks and data"):
        make_batches(temperature=2.0)[0].set_state(saved)
    second.close()
    assert all(stream.closed for stream in streams.values())


TABLES = {"prompt/table": 1.0, "head/a/bias": 2.0, "head/ab/bias": 3.0, "backbone/w": 4.0}


class Biases:
    """Scores three classes by the table, the backbone and the bias of one head."""

    def __init__(self, head):
        self.head = head

    def forward(self, params, batch, **how):
        shared = params["prompt"]["table"] + params["backbone"]["w"]
        scores = shared + params["head"][self.head]["bias"]
        return jnp.broadcast_to(scores, (len(batch.labels), 3))


def test_a_step_moves_the_head_of_its_task_alone():
    """Momentum too stays as it is: Adam's moments and count of steps of the other head."""
    rate = lambda step: 1.0 / (1 + step)
    tx = optax.multi_transform(
        {
            name: optax.adam(lambda step: 0.1 * rate(step))
            for name in ("prompt", "backbone", "head/a", "head/ab")
        },
        {name: name.rpartition("/")[0] for name in TABLES},
    )
    objectives = [Objective("main", cross_entropy)]
    steps = {name: make_train_step(Biases(name), tx, objectives) for name in ("a", "ab")}
    step, batch = jax.jit(make_shared_step(steps)), make_batch(rows=6)
    state = make_state({n: jnp.arange(3.0) + x for n, x in TABLES.items()}, tx, jax.random.key(0))
    for task, other in (("a", "ab"), ("ab", "a"), ("a", "ab")):
        alone, _ = jax.jit(steps[task])(state, {}, batch)
        new, metrics = step(state, {}, TaskBatch(batch, task))
        moved = {n for n in TABLES if np.abs(new.trainable[n] - state.trainable[n]).max() > 0}
        assert moved == {"prompt/table", "backbone/w", f"head/{task}/bias"}
        for name in moved:
            assert_close(new.trainable[name], alone.trainable[name])
        (now, schedule), (before, _) = (
            state_of.opt_state.inner_states[f"head/{other}"].inner_state[:2]
            for state_of in (new, state)
        )
        assert_equal(now, before)
        assert int(new.step) == int(state.step) + 1 and float(metrics["loss"]) > 0
        assert int(schedule.count) == int(new.step)  # schedules go on for all
        state = new
