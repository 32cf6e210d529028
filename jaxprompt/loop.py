"""The loop of a run: it trains, looks at dev, keeps the best, saves, and resumes after a cut."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from jaxprompt import build, sharding
from jaxprompt.checkpoint import Checkpoints
from jaxprompt.compiled import jit
from jaxprompt.errors import InputError
from jaxprompt.runlog import RunLog
from jaxprompt.sharding import Placement
from jaxprompt.state import TrainState
from jaxprompt.steps import with_flags
from jaxprompt.tree import Flat
from jaxprompt.types import Batch


class Job(NamedTuple):
    """What a run does, built and checked."""

    placement: Placement
    step: Callable[[TrainState, Flat, Batch], tuple[TrainState, dict[str, Any]]]
    state: TrainState  # before the first step
    frozen: Flat
    batches: Any  # what `take` draws from: get_state, set_state, close
    take: Callable[[], Batch]  # the next batch, on the host
    measure: Callable[[Flat], dict[str, float]]  # dev, of what trains
    decide: Callable[[dict[str, float]], float]  # the number of dev that is to be high
    plan: build.Plan
    train: Any  # the config's block
    dropped: bool = True  # it has dropout
    # (metrics of a step, steps since the last pause or record, their seconds) -> what is written
    describe: Callable[[dict[str, Any], int, float], dict[str, Any]] = lambda found, *_: found


class Ended(NamedTuple):
    """How a run ended."""

    step: int
    skipped: int
    best: dict[str, Any]  # step, value, dev
    numbers: Flat  # the best
    time: dict[str, float]


class Stand(NamedTuple):
    """Where a run stands."""

    checkpoints: Checkpoints
    state: TrainState
    position: dict[str, Any]  # JSON
    step: int


def take_up(job: Job, workdir: str) -> Stand:
    """Goes to the newest checkpoint of a run, or to its start.

    Raises InputError for a checkpoint that is damaged, or of another model.
    """
    checkpoints, state = Checkpoints(workdir), job.state
    position: dict[str, Any] = {"best": None, "since": 0, "done": False}
    started = checkpoints.latest()
    if started is not None:
        state, position = checkpoints.restore(state)
        if position["best"] is not None:
            checkpoints.check_best(position["best"]["step"])
        job.batches.set_state(position["data"])
        for leaf in jax.tree.leaves(job.state):  # else both would stay in memory
            leaf.delete()
    checkpoints.rewind(-1 if started is None else started)
    return Stand(checkpoints, state, position, started or 0)


def run(job: Job, stand: Stand, log: RunLog, terminated: Callable[[], bool]) -> Ended | None:
    """Trains from where a run stands to the end.

    Returns None where SIGTERM ended it early; it is saved then. Raises InputError after too many
    steps in a row that were not finite.
    """
    alone, place, plan = jax.process_count() == 1, job.placement, job.plan
    checkpoints, state, position, step = stand
    train_step = jit(
        sharding.within(place, with_flags(job.step)), donate_argnums=0, dropped=job.dropped,
        # The state comes back to where it was: else the next step would be another program.
        out_shardings=(jax.tree.map(lambda x: x.sharding, state), *[place.replicated] * 2),
    )  # fmt: skip

    def save() -> None:
        checkpoints.save(step, state, position | {"data": job.batches.get_state()})

    clock, seen, pending = time.monotonic(), set(), None
    since = step, clock  # what a rate counts from
    stop, flags = False, sharding.put_flag(place, False)
    while step < plan.total and not position["done"]:
        batch = job.take()
        shape = batch.encoder.ids.shape
        if is_new := shape not in seen:
            seen.add(shape)
            log.say(f"compiling the step for {shape[0]} rows x {shape[1]} tokens")
        if not alone:
            flags = sharding.put_flag(place, terminated())
        batch = sharding.put_batch(place, batch)
        state, measured, raised = train_step(state, job.frozen, batch, flags)
        step += 1
        if is_new:  # it runs from now on
            since = step - 1, time.monotonic()
        # The step before is looked at, so that the device never waits for the host.
        if pending is not None:
            _stop_if_broken(pending[0], job.train.max_streak, save, step)
            stop = bool(pending[1])  # the same on every process
        pending = measured, raised
        if step % job.train.log_steps == 0 or step == plan.total:
            found = jax.device_get(measured)  # waits for the step
            now = time.monotonic()
            said = job.describe(found, step - since[0], now - since[1])
            spent = {"seconds": now - clock} | said.pop("time", {})
            log.write(step, **said, time=spent)
            since = step, now
        log.progress(step)
        last = step == plan.total
        if step % plan.evaluate == 0 or last:
            dev = job.measure(state.trainable)
            log.write(step, dev=dev, time={"seconds": time.monotonic() - clock})
            value, best = job.decide(dev), position["best"]
            if best is None or value > best["value"]:  # a tie keeps the earlier
                position |= {"best": {"step": step, "value": value, "dev": dev}, "since": 0}
                checkpoints.save_best(step, state.trainable, position["best"])
            else:
                position["since"] += 1
            position["done"] = last or 0 < job.train.patience <= position["since"]
            if position["done"] or not plan.save:
                save()
            since = step, time.monotonic()
        if plan.save and step % plan.save == 0:
            save()
            since = step, time.monotonic()
        if (terminated() if alone else stop) and not position["done"]:
            save()
            log.say(f"stopped by SIGTERM at step {step}; the same command resumes")
            return None
    if pending is not None:
        _stop_if_broken(pending[0], job.train.max_streak, save, step)
    job.batches.close()
    numbers, best = checkpoints.restore_best(state.trainable, position["best"]["step"])
    spent = {"seconds": time.monotonic() - clock, "compilations": len(seen)}
    return Ended(step, int(state.skipped), best, numbers, spent)


def _stop_if_broken(measured: Any, limit: int, save: Callable[[], None], step: int) -> None:
    if int(measured["streak"]) < limit:
        return
    save()
    raise InputError(
        f"{limit} steps in a row were not finite, up to step {step}; the last good state is saved. "
        "Lower optim.lr or set optim.clip, and start in another --workdir"
    )
