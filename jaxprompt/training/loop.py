"""The loop of a run: it trains, looks at dev, keeps the best, saves, and resumes after a cut."""

import contextlib
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from jaxprompt import signals
from jaxprompt.errors import InputError
from jaxprompt.parallel import sharding
from jaxprompt.parallel.compilation import jit
from jaxprompt.parallel.sharding import Placement
from jaxprompt.training.checkpoint import Checkpoints
from jaxprompt.training.log import RunLog
from jaxprompt.training.optim import shown_rate
from jaxprompt.training.state import TrainState
from jaxprompt.training.steps import tell_broken, with_flags
from jaxprompt.tree import Flat
from jaxprompt.types import Batch


class Milestones(NamedTuple):
    """How long a run is and when it evaluates and saves, in steps."""

    total: int
    evaluate: int
    save: int


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
    plan: Milestones
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


def run(job: Job, stand: Stand, log: RunLog, heard: Callable[[], int]) -> Ended | None:
    """Trains from where a run stands to the end.

    `heard` gives the signal that asks for a stop, 0 where none does. Returns None where one ended
    it early; it is saved then. Raises InputError after too many steps in a row that were not
    finite.
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
        signals.note(saved_at(step))

    clock, seen, pending = time.monotonic(), set(), None
    since = step, clock  # what a rate counts from
    stop, flags = 0, sharding.put_flag(place, 0)
    while step < plan.total and not position["done"]:
        batch = job.take()
        shape = batch.encoder.ids.shape
        if is_new := shape not in seen:
            seen.add(shape)
            log.say(f"compiling the step for {shape[0]} rows x {shape[1]} tokens")
        if not alone:
            flags = sharding.put_flag(place, heard())
        batch = sharding.put_batch(place, batch)
        # Nothing is lost before the first step, which compiles; of several processes all must stop.
        with signals.at_once() if alone and step == stand.step else contextlib.nullcontext():
            state, measured, raised = train_step(state, job.frozen, batch, flags)
        step += 1
        if step == 1:
            signals.note("before the first checkpoint; nothing was saved")
        if is_new:  # it runs from now on
            since = step - 1, time.monotonic()
        # The step before is looked at, so that the device never waits for the host.
        if pending is not None:
            _stop_if_broken(pending[0], job.train.max_streak, save, step - 1)
            stop = int(pending[1])  # the same on every process
        pending = measured, raised
        if step % job.train.log_steps == 0 or step == plan.total:
            found = jax.device_get(measured)  # waits for the step
            found["lr"] = shown_rate(found["lr"])
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
        number = heard() if alone else stop
        if number and not position["done"]:
            save()
            log.say(signals.stopped(number, f"at step {step}; saved, the same command resumes"))
            return None
    if pending is not None:
        _stop_if_broken(pending[0], job.train.max_streak, save, step)
    job.batches.close()
    numbers, best = checkpoints.restore_best(state.trainable, position["best"]["step"])
    spent = {"seconds": time.monotonic() - clock, "compilations": len(seen)}
    return Ended(step, int(state.skipped), best, numbers, spent)


def saved_at(step: int | None) -> str:
    """Says of a run that a signal ends what it saved; None where it has no checkpoint."""
    if step is None:
        return "before the first step; nothing was saved"
    return f"with step {step} saved; the same command resumes"


def _stop_if_broken(measured: Any, limit: int, save: Callable[[], None], step: int) -> None:
    if int(measured["streak"]) < limit:
        return
    save()
    said = tell_broken(limit, step, int(measured["skipped"]))
    raise InputError(f"{said}. The last good state is saved")
