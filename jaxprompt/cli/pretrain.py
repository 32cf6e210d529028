"""Pre-trains a prompt for a frozen backbone on a corpus; the same command resumes."""

import sys
from collections.abc import Sequence
from typing import Any

from jaxprompt import signals
from jaxprompt.cli import sweep
from jaxprompt.cli.options import Parser, add_hosts, load_config, need, resolved, several_hosts
from jaxprompt.cli.train import drive, facts
from jaxprompt.errors import escape
from jaxprompt.training.log import dumps


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
    from jaxprompt.assembly import from_config, pretrain
    from jaxprompt.parallel.compilation import keep_programs
    from jaxprompt.training import run_folder

    from_config.check_config(c)
    pretrain.check_ppt(c)
    run_folder.check_workdir(workdir, resolved(c), from_config.FREE)
    keep_programs(c.train.compilation_cache)
    with run_folder.lock(workdir):
        return _run(c, workdir)


def _run(c: Any, workdir: str) -> dict[str, Any] | None:
    from jaxprompt import rng, tree
    from jaxprompt.assembly import adapt, from_config, pretrain, records, starting_text
    from jaxprompt.corpus.denoise.batches import Visits
    from jaxprompt.parallel import processes
    from jaxprompt.training import loop, steps
    from jaxprompt.training.checkpoint import Checkpoints
    from jaxprompt.training.run_folder import guard_workdir, read_result, write_record, write_result
    from jaxprompt.training.state import place_state
    from jaxprompt.training.throughput import Meter

    # -- text and backbone: everything that a config can get wrong --------------------------------
    finished, started = read_result(workdir), Checkpoints(workdir).latest()
    signals.note(loop.saved_at(started))
    processes.agree(facts(c) | {"result.json": str(bool(finished))})
    placement = from_config.build_placement(c)
    asked = pretrain.open_asked(c, placement)
    tell = lambda line: print(escape(line), file=sys.stderr)
    vocab = asked.backbone.module.cfg.vocab
    corpus = adapt.read_corpus(c, asked.scorer.tokenizer, vocab, workdir, tell)
    if started is None:
        signals.note("before the first step; the indexed corpus is kept")
    share = placement.share()
    text = pretrain.read_text(c, corpus, asked, share)
    pretrain.check_same(workdir, text.facts, c.ppt.annotations)
    task, held = text.tasks
    batches = Visits(text.rows, batch=c.data.batch, seed=c.seed, share=share)
    plan = from_config.make_plan(c.train, batches.steps_per_epoch, c.data.batch)
    counts = starting_text.count_tokens(c, None, corpus.token_counts)
    asked, learned = pretrain.load(c, asked, placement, counts)
    record = records.make_record(
        c, text.facts, asked.scorer.template, asked.backbone.family, learned.report.fingerprint
    )
    records.check_repeated(workdir, record)
    if finished is not None:
        batches.close()
        say = f"already pre-trained, nothing to do: {workdir} (delete it to start again)"
        print(escape(say), file=sys.stderr)
        return finished
    measure = adapt.build_scores(placement, learned, text.held, c.seed, pretrain.scoring(held))
    tx = from_config.build_optimizer(c, learned.trainable, plan, batches.steps_per_epoch)
    step = steps.make_train_step(
        learned.model, tx, learned.objectives, accumulate=c.optim.accumulate
    )
    state = place_state(placement, learned.trainable, tx, rng.key_for(c.seed, "dropout"))

    # -- the run ----------------------------------------------------------------------------------
    guard_workdir(workdir, resolved(c), from_config.FREE)
    write_record(workdir, record)
    flops = pretrain.flops_of(learned, tx, state, next(iter(text.held)), c.data.batch, placement)
    meter = Meter(batches, pretrain.scoring(task), flops, c.backbone.dtype)
    drops = c.backbone.dropout != 0 or c.prompt.get("dropout", 0) != 0
    job = loop.Job(
        placement, step, state, learned.frozen, batches, meter.take,
        measure, lambda found: -found["loss"], plan, c.train,
        drops, meter.describe,
    )  # fmt: skip

    def begin(log: Any) -> None:
        tell_start(log, c, corpus, asked, text, learned, plan, started)
        for line in from_config.tell_kernel(c, placement, asked.backbone.module):
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
    from jaxprompt.assembly import pretrain

    for line in pretrain.told(c, asked.backbone, learned.report, corpus):
        log.say(line)
    for line in pretrain.told_task(asked, text):
        log.say(line)
    log.say(tree.overview(learned.trainable, learned.frozen))
    where = "from the start" if started is None else f"resumed at step {started}"
    log.say(f"{plan.total} steps of {c.data.batch} x {c.data.max_len} tokens, {where}")
