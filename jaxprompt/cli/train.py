"""Learns a prompt; the same command resumes a run that was cut off."""

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxprompt.cli import sweep
from jaxprompt.cli.options import (
    Parser,
    Terminated,
    add_hosts,
    fields,
    load_config,
    need,
    resolved,
    several_hosts,
)
from jaxprompt.errors import InputError


def main(argv: Sequence[str]) -> int:
    """Trains, then scores the test split once. Exit code 0, also after SIGTERM."""
    parser = Parser(__doc__)
    add_hosts(parser)
    args, overrides = parser.read(argv)
    need(args, "config", "workdir")
    c = load_config(args.config, overrides)
    keep_compiled(Path(args.workdir) / "compiled")
    with several_hosts(args) as is_first:
        if sweep.is_grid(c):
            return sweep.train_grid(c, args.workdir)
        result = run(c, args.workdir)
        if result is not None and is_first:
            print(json.dumps(result))
    return 0


def run(c: Any, workdir: str) -> dict[str, Any] | None:
    """Runs a config in a workdir. Returns its result, None where SIGTERM ended it early."""
    # Imported here, so that --help and a bad flag answer at once.
    import jax

    from jaxprompt import build, hosts, rng, sharding, steps, tree
    from jaxprompt.checkpoint import Checkpoints, check_workdir, guard_workdir
    from jaxprompt.compiled import jit
    from jaxprompt.files import make_folder, write_atomic
    from jaxprompt.runlog import RunLog
    from jaxprompt.scorer import load_weights
    from jaxprompt.state import place_state

    # -- data and model: everything that a config can get wrong ----------------------------------
    alone = jax.process_count() == 1
    build.check_config(c)
    check_workdir(workdir, resolved(c), build.FREE)
    finished, checkpoints = read_result(Path(workdir) / "result.json"), Checkpoints(workdir)
    started = checkpoints.latest()
    hosts.agree(facts(c) | {"result.json": str(bool(finished))})
    if finished is not None:
        say = f"already trained, nothing to do: {workdir} (delete it to train again)"
        print(say, file=sys.stderr)
        return finished
    make_folder(workdir)
    placement = build.build_placement(c)
    backbone = build.open_fitting(c, placement)
    examples = build.read_examples(c)
    scorer = build.scorer_from_config(c, backbone, examples, placement)
    splits = build.encode_splits(scorer, examples)
    if not alone:
        hosts.agree({f"the rows of {name}": part.digest() for name, part in splits.items()})
    batches = build.train_batches(c, scorer, splits["train"])
    plan = build.make_plan(c.train, batches.steps_per_epoch, c.data.batch)
    backbone, loaded = load_weights(backbone, placement)
    scorer = scorer.with_backbone(backbone)
    weights = build.start(c, scorer, loaded, splits["train"], placement)
    trainable, frozen, report = weights
    tx = build.build_optimizer(c, trainable, plan, batches.steps_per_epoch)
    objectives = build.build_objectives(c)
    kept, fill = build.keeping.plan_keeping(c, scorer, splits, weights, placement, workdir)
    step_of = steps.make_train_step(kept.model, tx, objectives, accumulate=c.optim.accumulate)
    measure = build.build_measure(c, scorer, placement, kept)
    score = lambda name, numbers: measure(splits[name], numbers, frozen)

    # -- where the run stands ---------------------------------------------------------------------
    guard_workdir(workdir, resolved(c), build.FREE)
    state = place_state(placement, trainable, tx, rng.key_for(c.seed, "dropout"))
    train_step = jit(
        sharding.within(placement, steps.with_flags(step_of)), donate_argnums=0,
        # The state comes back to where it was: else the next step would be another program.
        out_shardings=(jax.tree.map(lambda x: x.sharding, state), *[placement.replicated] * 2),
    )  # fmt: skip
    position: dict[str, Any] = {"best": None, "since": 0, "done": False}
    if started is not None:
        state, position = checkpoints.restore(state)
        build.check_backbone(position, report.fingerprint, workdir)
        batches.set_state(position["data"])
    step = -1 if started is None else started
    checkpoints.rewind(step)
    step = max(step, 0)

    with RunLog(
        workdir, tensorboard=c.train.tensorboard, total=plan.total, enabled=hosts.is_first()
    ) as log:
        log.resume(-1 if started is None else started)
        tell_start(log, c, backbone, scorer, splits, weights, plan, started)
        fill(log.say)

        def save() -> None:
            stand = {"data": batches.get_state(), "fingerprint": report.fingerprint}
            checkpoints.save(step, state, position | stand)

        # -- the loop -----------------------------------------------------------------------------
        clock, seen, pending = time.monotonic(), set(), None
        stop, flags = False, sharding.put_flag(placement, False)
        with Terminated() as terminated:
            while step < plan.total and not position["done"]:
                batch = kept.give(splits["train"], next(batches))
                shape = batch.encoder.ids.shape
                if shape not in seen:
                    seen.add(shape)
                    log.say(f"compiling the step for {shape[0]} rows x {shape[1]} tokens")
                if not alone:
                    flags = sharding.put_flag(placement, terminated())
                batch = sharding.put_batch(placement, batch)
                state, measured, raised = train_step(state, frozen, batch, flags)
                step += 1
                # The step before is looked at, so that the device never waits for the host.
                if pending is not None:
                    stop_if_broken(pending[0], c.train.max_streak, save, step)
                    stop = bool(pending[1])  # the same on every process
                pending = measured, raised
                if step % c.train.log_steps == 0 or step == plan.total:
                    seconds = {"seconds": time.monotonic() - clock}
                    log.write(step, **jax.device_get(measured), time=seconds)
                log.progress(step)
                last = step == plan.total
                if step % plan.evaluate == 0 or last:
                    dev = score("dev", state.trainable)
                    log.write(step, dev=dev, time={"seconds": time.monotonic() - clock})
                    value, best = dev[scorer.task.metric], position["best"]
                    if best is None or value > best["value"]:  # a tie keeps the earlier
                        position |= {"best": {"step": step, "value": value, "dev": dev}, "since": 0}
                        info = position["best"] | {"fingerprint": report.fingerprint}
                        checkpoints.save_best(step, state.trainable, info)
                    else:
                        position["since"] += 1
                    position["done"] = last or 0 < c.train.patience <= position["since"]
                    if position["done"] or not plan.save:
                        save()
                if plan.save and step % plan.save == 0:
                    save()
                if (terminated() if alone else stop) and not position["done"]:
                    save()
                    log.say(f"stopped by SIGTERM at step {step}; the same command resumes")
                    return None
            if pending is not None:
                stop_if_broken(pending[0], c.train.max_streak, save, step)
        batches.close()

        # -- the result: test once, with the best prompt -----------------------------------------
        numbers, best = checkpoints.restore_best(state.trainable)
        result = {
            "method": c.prompt.name,
            "seed": c.seed,
            "trained": tree.count(trainable),
            "total": tree.count(trainable) + tree.count(frozen),
            "steps": step,
            "skipped": int(state.skipped),
            "best_step": best["step"],
            "dev": best["dev"],
        }
        if c.train.test and "test" in splits:
            result["test"] = score("test", numbers)
        result["time"] = {"seconds": time.monotonic() - clock, "compilations": len(seen)}
        if hosts.is_first():
            write_atomic(Path(workdir) / "result.json", json.dumps(result, indent=2) + "\n")
        return result


def facts(c: Any) -> dict[str, str]:
    """Lists what the processes of a run must have in common before they read anything."""
    from jaxprompt.convert.artifact import package_versions

    own = ("backbone.path", "data.cache_dir", "data.source", "data.files")  # a host's own places
    shown = {name: str(value) for name, value in fields(c).items() if not name.startswith(own)}
    return shown | {f"version of {name}": text for name, text in package_versions().items()}


def keep_compiled(folder: Path) -> None:
    """Keeps compiled programs for resumed runs and further seeds, unless JAX is told of a place."""
    import jax

    if not jax.config.jax_compilation_cache_dir:
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)


def stop_if_broken(measured: Any, limit: int, save: Any, step: int) -> None:
    """Raises InputError after `limit` steps in a row that were not finite; the state is saved."""
    if int(measured["streak"]) < limit:
        return
    save()
    raise InputError(
        f"{limit} steps in a row were not finite, up to step {step}; the last good state is saved. "
        "Lower optim.lr or set optim.clip, and start in another --workdir"
    )


def tell_start(log, c, backbone, scorer, splits, weights, plan, started) -> None:
    """Says what was read, what trains, and what is fresh."""
    from jaxprompt import tree

    report = weights.report
    log.say(f"backbone {c.backbone.path} ({backbone.family}), weights {report.fingerprint[:12]}")
    log.say(f"  heads in the checkpoint: {', '.join(report.heads) or 'none'}")
    if report.unused:
        log.say(f"  unused: {len(report.unused)} tensors, {', '.join(report.unused[:5])}")
    log.say(f"task {scorer.task.name}, template {scorer.template!r}")
    log.say("  " + ", ".join(f"{name} {len(part.labels)}" for name, part in splits.items()))
    log.say(tree.overview(weights.trainable, weights.frozen))
    fresh = sorted({"/".join(n.split("/")[:3]) for n in weights.trainable if n.startswith("head/")})
    if fresh:
        log.say(f"fresh, not in the checkpoint: {', '.join(fresh)}")
    where = "from the start" if started is None else f"resumed at step {started}"
    log.say(f"{plan.total} steps, {where}")


def read_result(path: Path) -> dict[str, Any] | None:
    """Reads a result, None where there is none. Raises InputError for a damaged one."""
    try:
        return json.loads(path.read_text()) if path.exists() else None
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read ({error}); delete it and train again") from error
