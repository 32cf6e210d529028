"""Pre-trains a prompt for a frozen backbone on a corpus; the same command resumes."""

import sys
from collections.abc import Sequence
from typing import Any

from jaxprompt import signals
from jaxprompt.cli import sweep
from jaxprompt.cli.options import (
    Parser,
    add_hosts,
    load_config,
    need,
    resolved,
    several_hosts,
)
from jaxprompt.cli.train import drive, facts
from jaxprompt.errors import escape
from jaxprompt.runlog import dumps


def main(argv: Sequence[str]) -> int:
    """Trains and prints the scores of held-out documents as JSON; `export` writes the prompt.

    A grid of runs prints a table.
    """
    parser = Parser(__doc__, fields=True)
    add_hosts(parser)
    args, overrides = parser.read(argv)
    need(args, "config", "workdir")
    c = load_config(args.config, overrides)
    with several_hosts(args) as is_first:
        if sweep.is_grid(c):
            return sweep.train_grid(c, args.workdir, "pretrain")
        result = run(c, args.workdir)
        if result is not None and is_first:
            print(dumps(result))
    return 0


def run(c: Any, workdir: str) -> dict[str, Any] | None:
    """Runs a config in a workdir. Returns its result, None where a signal ended it early."""
    from jaxprompt import build, run_folder
    from jaxprompt.build import ppt
    from jaxprompt.compiled import keep_programs

    build.check_config(c)
    ppt.check_ppt(c)
    run_folder.check_workdir(workdir, resolved(c), build.FREE)
    keep_programs(c.train.compilation_cache)
    with run_folder.lock(workdir):
        return _run(c, workdir)


def _run(c: Any, workdir: str) -> dict[str, Any] | None:
    from jaxprompt import build, hosts, loop, rng, steps, tree
    from jaxprompt.build import adapting, ppt, records, starting
    from jaxprompt.build.meter import Meter
    from jaxprompt.checkpoint import Checkpoints
    from jaxprompt.data.denoise.batches import Visits
    from jaxprompt.run_folder import guard_workdir, read_result, write_record, write_result
    from jaxprompt.state import place_state

    # -- text and backbone: everything that a config can get wrong --------------------------------
    finished, started = read_result(workdir), Checkpoints(workdir).latest()
    signals.note(loop.saved_at(started))
    hosts.agree(facts(c) | {"result.json": str(bool(finished))})
    placement = build.build_placement(c)
    asked = ppt.open_asked(c, placement)
    tell = lambda line: print(escape(line), file=sys.stderr)
    vocab = asked.backbone.module.cfg.vocab
    corpus = adapting.read_corpus(c, asked.scorer.tokenizer, vocab, workdir, tell)
    if started is None:
        signals.note("before the first step; the indexed corpus is kept")
    share = placement.share()
    text = ppt.read_text(c, corpus, asked, share)
    ppt.check_same(workdir, text.facts, c.ppt.annotations)
    task, held = text.tasks
    batches = Visits(text.rows, batch=c.data.batch, seed=c.seed, share=share)
    plan = build.make_plan(c.train, batches.steps_per_epoch, c.data.batch)
    counts = starting.count_tokens(c, None, corpus.token_counts)
    asked, learned = ppt.load(c, asked, placement, counts)
    record = records.make_record(
        c, text.facts, asked.scorer.template, asked.backbone.family, learned.report.fingerprint
    )
    records.check_repeated(workdir, record)
    if finished is not None:
        batches.close()
        say = f"already pre-trained, nothing to do: {workdir} (delete it to start again)"
        print(escape(say), file=sys.stderr)
        return finished
    measure = adapting.build_scores(placement, learned, text.held, c.seed, ppt.scoring(held))
    tx = build.build_optimizer(c, learned.trainable, plan, batches.steps_per_epoch)
    step = steps.make_train_step(
        learned.model, tx, learned.objectives, accumulate=c.optim.accumulate
    )
    state = place_state(placement, learned.trainable, tx, rng.key_for(c.seed, "dropout"))

    # -- the run ----------------------------------------------------------------------------------
    guard_workdir(workdir, resolved(c), build.FREE)
    write_record(workdir, record)
    flops = ppt.flops_of(learned, tx, state, next(iter(text.held)), c.data.batch, placement)
    meter = Meter(batches, ppt.scoring(task), flops, c.backbone.dtype)
    drops = c.backbone.dropout != 0 or c.prompt.get("dropout", 0) != 0
    job = loop.Job(
        placement, step, state, learned.frozen, batches, meter.take,
        measure, lambda found: -found["loss"], plan, c.train,
        drops, meter.describe,
    )  # fmt: skip

    def begin(log: Any) -> None:
        tell_start(log, c, corpus, asked, text, learned, plan, started)
        for line in build.tell_kernel(c, placement, asked.backbone.module):
            log.say(line)

    ended = drive(job, workdir, started, begin)
    if ended is None:
        return None

    # -- the result -------------------------------------------------------------------------------
    result = {
        "task": c.ppt.task,
        "method": c.prompt.name,
        "seed": c.seed,
        "trained": tree.count(learned.trainable),
        "total": tree.count(learned.trainable) + tree.count(learned.frozen),
        "steps": ended.step,
        "skipped": ended.skipped,
        "best_step": ended.best["step"],
        "held_out": ended.best["dev"],
        "time": ended.time,
    }
    write_result(workdir, result)
    return result


def tell_start(log, c, corpus, asked, text, learned, plan, started) -> None:
    """Says what was read, what was left out of it, and what trains."""
    from jaxprompt import tree
    from jaxprompt.build import ppt

    for line in ppt.told(c, asked.backbone, learned.report, corpus):
        log.say(line)
    for line in ppt.told_task(asked, text):
        log.say(line)
    log.say(tree.overview(learned.trainable, learned.frozen))
    where = "from the start" if started is None else f"resumed at step {started}"
    log.say(f"{plan.total} steps of {c.data.batch} x {c.data.max_len} tokens, {where}")
