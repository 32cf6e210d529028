"""Pre-trains a prompt for a frozen backbone on a corpus; the same command resumes."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxprompt.cli import sweep
from jaxprompt.cli.options import (
    Parser,
    add_hosts,
    load_config,
    need,
    resolved,
    several_hosts,
)
from jaxprompt.cli.train import drive, facts, keep_compiled, read_result, write_result


def main(argv: Sequence[str]) -> int:
    """Trains and prints the scores of held-out documents as JSON; `export` writes the prompt.

    A grid of runs prints a table.
    """
    parser = Parser(__doc__)
    add_hosts(parser)
    args, overrides = parser.read(argv)
    need(args, "config", "workdir")
    c = load_config(args.config, overrides)
    keep_compiled(Path(args.workdir) / "compiled")
    with several_hosts(args) as is_first:
        if sweep.is_grid(c):
            return sweep.train_grid(c, args.workdir, "pretrain")
        result = run(c, args.workdir)
        if result is not None and is_first:
            print(json.dumps(result))
    return 0


def run(c: Any, workdir: str) -> dict[str, Any] | None:
    """Runs a config in a workdir. Returns its result, None where SIGTERM ended it early."""
    from jaxprompt import build, hosts, loop, rng, steps, tree
    from jaxprompt.build import adapting, ppt
    from jaxprompt.build.meter import Meter
    from jaxprompt.checkpoint import Checkpoints, check_workdir, guard_workdir
    from jaxprompt.data.denoise.batches import Visits
    from jaxprompt.files import make_folder, write_atomic
    from jaxprompt.state import place_state

    # -- text and backbone: everything that a config can get wrong --------------------------------
    build.check_config(c)
    ppt.check_ppt(c)
    check_workdir(workdir, resolved(c), build.FREE)
    finished, started = read_result(Path(workdir) / "result.json"), Checkpoints(workdir).latest()
    hosts.agree(facts(c) | {"result.json": str(bool(finished))})
    if finished is not None:
        say = f"already pre-trained, nothing to do: {workdir} (delete it to start again)"
        print(say, file=sys.stderr)
        return finished
    make_folder(workdir)
    placement = build.build_placement(c)
    asked = ppt.open_asked(c, placement)
    tell = lambda line: print(line, file=sys.stderr)
    vocab = asked.backbone.module.cfg.vocab
    corpus = adapting.read_corpus(c, asked.scorer.tokenizer, vocab, workdir, tell)
    share, path = placement.share(), Path(workdir) / ppt.CORPUS
    text = ppt.read_text(c, corpus, asked, share)
    if path.exists():
        ppt.check_same(path, text.facts, c.ppt.annotations)
    task, held = text.tasks
    batches = Visits(text.rows, batch=c.data.batch, seed=c.seed, share=share)
    plan = build.make_plan(c.train, batches.steps_per_epoch, c.data.batch)
    asked, learned = ppt.load(c, asked, placement)
    measure = adapting.build_scores(placement, learned, text.held, c.seed, ppt.scoring(held))
    tx = build.build_optimizer(c, learned.trainable, plan, batches.steps_per_epoch)
    step = steps.make_train_step(
        learned.model, tx, learned.objectives, accumulate=c.optim.accumulate
    )
    state = place_state(placement, learned.trainable, tx, rng.key_for(c.seed, "dropout"))

    # -- the run ----------------------------------------------------------------------------------
    guard_workdir(workdir, resolved(c), build.FREE)
    if hosts.is_first():
        write_atomic(path, json.dumps(text.facts))
    flops = ppt.flops_of(learned, tx, state, next(iter(text.held)), c.data.batch, placement)
    meter = Meter(batches, ppt.scoring(task), flops, c.backbone.dtype)
    drops = c.backbone.dropout != 0 or c.prompt.get("dropout", 0) != 0
    job = loop.Job(
        placement, step, state, learned.frozen, batches, meter.take,
        measure, lambda found: -found["loss"], plan, c.train, learned.report.fingerprint,
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
