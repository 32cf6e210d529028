"""Learns a prompt; the same command resumes a run that was cut off."""

import sys
from collections.abc import Callable, Sequence
from typing import Any

from jaxprompt import signals
from jaxprompt.cli import sweep
from jaxprompt.cli.options import (
    Parser,
    add_hosts,
    fields,
    load_config,
    need,
    resolved,
    several_hosts,
)
from jaxprompt.errors import escape
from jaxprompt.training.log import dumps


def main(argv: Sequence[str]) -> int:
    """Trains, then scores the test split once. Exit code 0."""
    parser = Parser(__doc__, fields=True)
    add_hosts(parser)
    args, overrides = parser.read(argv)
    need(args, "config", "workdir")
    c = load_config(args.config, overrides)
    with several_hosts(args) as is_first:
        if sweep.is_grid(c):
            return sweep.train_grid(c, args.workdir)
        result = run(c, args.workdir)
        if result is not None and is_first:
            print(dumps(result))
    return 0


def run(c: Any, workdir: str) -> dict[str, Any] | None:
    """Runs a config in a workdir. Returns its result, None where a signal ended it early."""
    from jaxprompt.assembly import from_config
    from jaxprompt.parallel.compilation import keep_programs
    from jaxprompt.training import run_folder

    from_config.check_config(c)
    run_folder.check_workdir(workdir, resolved(c), from_config.FREE)
    keep_programs(c.train.compilation_cache)
    with run_folder.lock(workdir):
        return _run(c, workdir)


def _run(c: Any, workdir: str) -> dict[str, Any] | None:
    # Imported here, so that --help and a bad flag answer at once.
    import jax

    from jaxprompt import rng, tree
    from jaxprompt.assembly import from_config, records, starting_text
    from jaxprompt.assembly.examples import describe_examples
    from jaxprompt.assembly.pipeline import load_weights
    from jaxprompt.parallel import processes
    from jaxprompt.training import loop, steps
    from jaxprompt.training.checkpoint import Checkpoints
    from jaxprompt.training.run_folder import guard_workdir, read_result, write_record, write_result
    from jaxprompt.training.state import place_state

    # -- data and model: everything that a config can get wrong ----------------------------------
    alone = jax.process_count() == 1
    finished, started = read_result(workdir), Checkpoints(workdir).latest()
    signals.note(loop.saved_at(started))
    processes.agree(facts(c) | {"result.json": str(bool(finished))})
    placement = from_config.build_placement(c)
    backbone = from_config.open_fitting(c, placement)
    examples = from_config.read_examples(c)
    scorer = from_config.scorer_from_config(c, backbone, examples, placement)
    splits = from_config.encode_splits(scorer, examples)
    if not alone:
        processes.agree({f"the rows of {name}": part.digest() for name, part in splits.items()})
    batches = from_config.train_batches(c, scorer, splits["train"])
    plan = from_config.make_plan(c.train, batches.steps_per_epoch, c.data.batch)
    backbone, loaded = load_weights(backbone, placement)
    scorer = scorer.with_backbone(backbone)
    record = records.make_record(
        c, describe_examples(examples), scorer.template, backbone.family, loaded.report.fingerprint
    )
    records.check_repeated(workdir, record)
    if finished is not None:
        say = f"already trained, nothing to do: {workdir} (delete it to train again)"
        print(escape(say), file=sys.stderr)
        return finished
    counts = starting_text.count_tokens(
        c, splits["train"], lambda: starting_text.count_corpus(c, scorer, workdir)
    )
    weights = from_config.start(c, scorer, loaded, counts, placement)
    trainable, frozen, report = weights
    tx = from_config.build_optimizer(c, trainable, plan, batches.steps_per_epoch)
    objectives = from_config.build_objectives(c)
    kept, fill = from_config.keeping.plan_keeping(c, scorer, splits, weights, placement, workdir)
    measure = from_config.build_measure(c, scorer, placement, kept)
    score = lambda name, numbers: measure(splits[name], numbers, frozen)

    # -- the run --------------------------------------------------------------------------------
    guard_workdir(workdir, resolved(c), from_config.FREE)
    write_record(workdir, record)
    job = loop.Job(
        placement, steps.make_train_step(kept.model, tx, objectives, accumulate=c.optim.accumulate),
        place_state(placement, trainable, tx, rng.key_for(c.seed, "dropout")), frozen, batches,
        lambda: kept.give(splits["train"], next(batches)), lambda numbers: score("dev", numbers),
        lambda dev: dev[scorer.task.metric], plan, c.train,
    )  # fmt: skip

    def begin(log: Any) -> None:
        tell_start(log, c, backbone, scorer, splits, weights, plan, started)
        for line in from_config.tell_kernel(c, placement, backbone.module):
            log.say(line)
        fill(log.say)

    ended = drive(job, workdir, started, begin)
    if ended is None:
        return None

    # -- the result: test once, with the best prompt ---------------------------------------------
    result = {
        "method": c.prompt.name,
        "seed": c.seed,
        "trained": tree.count(trainable),
        "total": tree.count(trainable) + tree.count(frozen),
        "steps": ended.step,
        "skipped": ended.skipped,
        "best_step": ended.best["step"],
        "dev": ended.best["dev"],
    }
    if c.train.test and "test" in splits:
        result["test"] = score("test", ended.numbers)
    result["time"] = ended.time
    write_result(workdir, result)
    return result


def drive(job: Any, workdir: str, started: int | None, begin: Callable[[Any], None]) -> Any:
    """Takes a job up and follows it to its end. -> how it ended, None where a signal cut it

    `started` is the checkpoint's step, None = from the start; `begin` says to the log what begins.
    """
    from jaxprompt.parallel import processes
    from jaxprompt.training import loop
    from jaxprompt.training.log import RunLog

    stand = loop.take_up(job, workdir)
    with RunLog(
        workdir,
        tensorboard=job.train.tensorboard,
        total=job.plan.total,
        enabled=processes.is_first(),
    ) as log:
        log.resume(-1 if started is None else started)
        begin(log)
        with signals.held() as heard:
            ended = loop.run(job, stand, log, heard)
    if ended is not None:
        signals.note("after the last step; it is saved, and the same command completes the run")
        # One that came during the last step, on any process.
        signals.check(max(map(int, processes.gather(str(heard())))))
    return ended


def facts(c: Any) -> dict[str, str]:
    """Lists what the processes of a run must have in common before they read anything."""
    from jaxprompt.convert.artifact import package_versions

    own = ("backbone.path", "data.cache_dir", "data.source", "data.files")  # a host's own places
    shown = {name: str(value) for name, value in fields(c).items() if not name.startswith(own)}
    return shown | {f"version of {name}": text for name, text in package_versions().items()}


def tell_start(log, c, backbone, scorer, splits, weights, plan, started) -> None:
    """Says what was read, what trains, and what is fresh."""
    from jaxprompt import tree
    from jaxprompt.assembly import from_config

    report = weights.report
    log.say(f"backbone {c.backbone.path} ({backbone.family}), weights {report.fingerprint[:12]}")
    log.say(f"  heads in the checkpoint: {', '.join(report.heads) or 'none'}")
    if report.unused:
        log.say(f"  unused: {len(report.unused)} tensors, {', '.join(report.unused[:5])}")
    if c.prompt.get("init"):
        log.say(f"prompt from {c.prompt.init}")
    log.say(f"task {scorer.task.name}, template {scorer.template!r}")
    log.say("  " + ", ".join(f"{name} {len(part.labels)}" for name, part in splits.items()))
    for line in from_config.tell_examples(scorer, splits):
        log.say(f"  {line}")
    log.say(tree.overview(weights.trainable, weights.frozen))
    fresh = sorted({"/".join(n.split("/")[:3]) for n in weights.trainable if n.startswith("head/")})
    if fresh:
        log.say(f"fresh, not in the checkpoint: {', '.join(fresh)}")
    where = "from the start" if started is None else f"resumed at step {started}"
    log.say(f"{plan.total} steps, {where}")
