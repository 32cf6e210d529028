"""Goes on with a backbone's own pre-training on a corpus; the same command resumes."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxprompt import signals
from jaxprompt.cli.options import Parser, add_hosts, load_config, need, resolved, several_hosts
from jaxprompt.cli.train import drive, facts
from jaxprompt.errors import escape
from jaxprompt.training.log import dumps


def main(argv: Sequence[str]) -> int:
    """Trains, prints the scores of held-out text as JSON, and writes the backbone."""
    parser = Parser(__doc__, fields=True)
    add_hosts(parser)
    parser.add_argument(
        "--score", action="store_true", help="score held-out text as the weights are, no more"
    )
    args, overrides = parser.read(argv)
    need(args, "config", "workdir")
    c = load_config(args.config, overrides)
    with several_hosts(args) as is_first:
        result = run(c, args.workdir, score=args.score)
        if result is not None and is_first:
            print(dumps(result))
    return 0


def run(c: Any, workdir: str, *, score: bool = False) -> dict[str, Any] | None:
    """Runs a config in a workdir. Returns its result, None where a signal ended it early.

    With `score` the result is the scores of held-out text before the first step, and nothing is
    bound to the workdir.
    """
    from jaxprompt.assembly import adapt, from_config
    from jaxprompt.parallel.compilation import keep_programs
    from jaxprompt.training import run_folder

    from_config.check_config(c)
    adapt.check_objective(c)
    if not score:
        run_folder.check_workdir(workdir, resolved(c), from_config.FREE)
    keep_programs(c.train.compilation_cache)
    with run_folder.lock(workdir):
        return _run(c, workdir, score)


def _run(c: Any, workdir: str, score: bool) -> dict[str, Any] | None:
    from jaxprompt import rng, tree
    from jaxprompt.assembly import adapt, from_config, records
    from jaxprompt.convert.save import save_backbone
    from jaxprompt.corpus import check_unchanged
    from jaxprompt.corpus.denoise.batches import Pass, Visits
    from jaxprompt.data.tokenizer import load_tokenizer
    from jaxprompt.files import write_atomic
    from jaxprompt.parallel import processes
    from jaxprompt.training import loop, steps
    from jaxprompt.training.checkpoint import Checkpoints
    from jaxprompt.training.replaced_tokens import tie
    from jaxprompt.training.run_folder import (
        guard_workdir,
        read_record,
        read_result,
        write_record,
        write_result,
    )
    from jaxprompt.training.state import place_state
    from jaxprompt.training.throughput import Meter

    # -- text and backbone: everything that a config can get wrong --------------------------------
    saved = finished = started = None
    if not score:
        saved, finished = read_record(workdir), read_result(workdir)
        started = Checkpoints(workdir).latest()
        signals.note(loop.saved_at(started))
    processes.agree(facts(c) | {"result.json": str(bool(finished))})
    placement = from_config.build_placement(c)
    backbone = adapt.open_adaptable(c, placement)
    tokenizer = load_tokenizer(backbone.folder)
    denoiser = adapt.make_denoiser(c, tokenizer, backbone)
    tell = lambda line: print(escape(line), file=sys.stderr)
    corpus = adapt.read_corpus(c, tokenizer, backbone.module.cfg.vocab, workdir, tell)
    if started is None:
        signals.note("before the first step; the indexed corpus is kept")
    if saved is not None:
        check_unchanged(saved["corpus"], corpus.fingerprint)
    rows, held = adapt.read_rows(c, corpus, denoiser, tokenizer)
    share = placement.share()
    batches = Visits(rows, batch=c.data.batch, seed=c.seed, share=share)
    dev = Pass(
        held, batch=c.data.eval_batch, seed=c.data.seed, limit=c.corpus.dev_rows, share=share
    )
    plan = from_config.make_plan(c.train, batches.steps_per_epoch, c.data.batch)
    adapted = adapt.load_adaptable(c, backbone, placement)
    measure = adapt.build_scores(placement, adapted, dev, c.seed)
    if score:
        batches.close()
        return {"held_out": measure(adapted.trainable), "rows": dev.size}
    record = {
        "corpus": corpus.fingerprint,
        "backbone": {"family": adapted.backbone.family, "fingerprint": adapted.fingerprint},
    }
    records.check_repeated(workdir, record)
    if finished is not None:
        batches.close()
        say = f"already adapted, nothing to do: {workdir} (delete it to start again)"
        print(escape(say), file=sys.stderr)
        return finished
    tx = from_config.build_optimizer(c, adapted.trainable, plan, batches.steps_per_epoch)
    step = steps.make_train_step(
        adapted.model, tx, adapted.objectives, accumulate=c.optim.accumulate
    )
    state = place_state(placement, adapted.trainable, tx, rng.key_for(c.seed, "dropout"))

    # -- the run ----------------------------------------------------------------------------------
    guard_workdir(workdir, resolved(c), from_config.FREE)
    write_record(workdir, record)
    flops = adapt.flops_of(adapted, next(iter(dev)), c.data.batch, placement)
    meter = Meter(batches, adapt.score_sums, flops, c.backbone.dtype)
    job = loop.Job(
        placement, step, state, adapted.frozen, batches, meter.take,
        measure, lambda found: -found["loss"], plan, c.train,
        c.backbone.dropout != 0, meter.describe,
    )  # fmt: skip

    def begin(log: Any) -> None:
        tell_start(log, c, corpus, rows, dev, adapted, plan, started)
        for line in from_config.tell_kernel(c, placement, adapted.backbone.module):
            log.say(line)

    ended = drive(job, workdir, started, begin)
    if ended is None:
        return None

    # -- the result: a folder that transformers loads ---------------------------------------------
    result = {
        "objective": c.objective.name,
        "seed": c.seed,
        "trained": tree.count(adapted.trainable),
        "steps": ended.step,
        "skipped": ended.skipped,
        "best_step": ended.best["step"],
        "held_out": ended.best["dev"],
        "time": ended.time,
    }
    params = tree.merge(ended.numbers, adapted.frozen)
    card = result | {
        "corpus": f"{c.corpus.path}, {len(corpus):,} documents, {corpus.num_tokens:,} tokens",
        "start": c.backbone.init or f"{c.backbone.path} ({adapted.report.fingerprint[:12]})",
    }
    given = dict(tokenizer=backbone.folder, card=card, run=str(workdir))
    given |= {"rescale": c.backbone.rescale}
    own = adapted.backbone
    save_backbone(Path(workdir) / "backbone", own.family, own.hf, params["backbone"], **given)
    if adapted.generator is not None:
        own, both = adapted.generator, tie(params["generator"], params["backbone"])
        save_backbone(Path(workdir) / "generator", own.family, own.hf, both, **given)
    if c.objective.examples:
        text = adapt.fill(c, placement, adapted, ended.numbers, held, tokenizer)
        if processes.is_first():
            write_atomic(Path(workdir) / "examples.txt", text)
    write_result(workdir, result)
    return result


def tell_start(log, c, corpus, rows, dev, adapted, plan, started) -> None:
    """Says what was read, what trains, and what is fresh."""
    from jaxprompt import tree

    source = c.backbone.init or c.backbone.path
    log.say(f"backbone {source} ({adapted.backbone.family}), {adapted.report.fingerprint[:12]}")
    if adapted.report.fresh:
        log.say(f"fresh, not in the checkpoint: {', '.join(adapted.report.fresh)}")
    if adapted.generator is not None:
        log.say(f"generator {c.objective.generator_path or 'drawn'} ({adapted.generator.family})")
    log.say(
        f"corpus {c.corpus.path}: {len(corpus):,} documents, {corpus.num_tokens:,} tokens; "
        f"{len(rows):,} rows of {c.data.max_len}, {dev.size} held-out rows"
    )
    if corpus.skipped:
        log.say(f"{corpus.skipped} documents were left out, the first: {corpus.first_skipped}")
    log.say(tree.overview(adapted.trainable, adapted.frozen))
    where = "from the start" if started is None else f"resumed at step {started}"
    log.say(f"{c.objective.name}: {plan.total} steps, {where}")
