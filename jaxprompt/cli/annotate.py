"""Labels every unit of a corpus with a classifier, which it trains first; the same command resumes.

The config is the classifier's, as `train` takes it, with the text besides: corpus.* says what is
labelled, and must be as `pretrain` will have it; ppt.thresholds what is counted as sure. Neither
binds the workdir, so one classifier labels many corpora. A workdir that `train` has finished, of
any method and of a task with classes from the worst to the best, is taken as it is.
"""

import contextlib
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

from jaxprompt import signals
from jaxprompt.cli import train
from jaxprompt.cli.options import Parser, add_hosts, load_config, need, several_hosts
from jaxprompt.errors import escape

_PAUSE = 10.0  # seconds between two reports


def main(argv: Sequence[str]) -> int:
    """Writes labels for ppt.annotations; prints how many there are of each class, as JSON."""
    parser = Parser(__doc__)
    parser.add_argument("--output", help="folder to write, which ppt.annotations takes")
    add_hosts(parser)
    args, overrides = parser.read(argv)
    need(args, "config", "workdir", "output")
    c = load_config(args.config, overrides)
    own = [given for given in overrides if not given[0].startswith(("corpus.", "ppt.thresholds"))]
    classifier = load_config(args.config, own)
    with several_hosts(args) as is_first:
        result = run(c, classifier, args.workdir, args.output)
        if result is not None and is_first:
            print(json.dumps(result, ensure_ascii=False))
    return 0


def run(c: Any, classifier: Any, workdir: str, output: str) -> dict[str, Any] | None:
    """Labels the text of a config. Returns the counts, None where a signal ended the training,
    and on all processes but the first.
    """
    from jaxprompt.assembly import annotate, from_config
    from jaxprompt.assembly.pretrain import thresholds_of
    from jaxprompt.corpus.ppt import AnnotationWriter, check_unfinished
    from jaxprompt.files import make_folder
    from jaxprompt.parallel import processes
    from jaxprompt.parallel.compilation import keep_programs
    from jaxprompt.training.run_folder import lock, read_result

    # -- text and classifier ----------------------------------------------------------------------
    annotate.check_annotator(c)
    keep_programs(c.train.compilation_cache)
    check_unfinished(output)
    trained = from_config.is_zero_shot(classifier) or read_result(workdir) is not None
    annotate.check_saved(classifier, workdir, trained)
    processes.agree(train.facts(c) | {"--output": output, "result.json": str(trained)})
    make_folder(workdir)
    say = lambda line: print(escape(line), file=sys.stderr, flush=True)
    corpus = annotate.read_units(c, workdir, say)
    processes.agree({"the indexed text": corpus.folder.name})
    if not trained and train.run(classifier, workdir) is None:
        return None
    signals.note("with the classifier trained; the same command goes on")
    annotator = annotate.open_annotator(classifier, c, workdir)
    label = annotate.make_labeller(annotator, corpus)

    # -- labels -----------------------------------------------------------------------------------
    total, thresholds = corpus.num_units, thresholds_of(c)
    with lock(output), contextlib.ExitStack() as stack:
        writer = processes.on_first(
            lambda: AnnotationWriter(output, corpus, annotator.classes, annotator.mark)
        )
        if writer:
            stack.callback(writer.close)
        tell = say if writer else lambda line: None
        first = done = int(processes.gather(str(writer.done if writer else ""))[0])
        signals.note(_kept(done, total))
        tell(f"annotator {annotator.mark}")
        tell(f"corpus {c.corpus.path}: {len(corpus):,} documents, {total:,} units, {done:,} done")
        start = said = time.monotonic()
        for part in label(done):
            processes.on_first(lambda part=part: writer.append(part))
            done, now = done + len(part), time.monotonic()
            signals.note(_kept(done, total))
            if now - said > _PAUSE or done == total:
                tell(_progress(done, total, (done - first) / (now - start)))
                said = now
        seconds = time.monotonic() - start
        found = processes.on_first(lambda: writer.seal())
    if found is None:
        return None
    labelled, kept = found.counts([0] * len(thresholds)), found.counts(thresholds)
    named = lambda values: dict(zip(found.classes, values, strict=True))
    return {
        "annotator": annotator.mark,
        "corpus": c.corpus.path,
        "units": total,
        "left_out": total - int(labelled.sum()),
        "labels": named(labelled.tolist()),
        "thresholds": named(thresholds),
        "kept": named(kept.tolist()),
        "kept_share": float(kept.sum() / total),
        "output": output,
        "time": {"seconds": seconds, "units_per_second": (total - first) / seconds},
    }


def _kept(done: int, total: int) -> str:
    return f"with {done:,} of {total:,} units annotated; they are kept, the same command goes on"


def _progress(done: int, total: int, rate: float) -> str:
    minutes, left = divmod(round((total - done) / rate), 60)
    return f"labelled {done:,}/{total:,} units, {rate:,.0f} a second, {minutes}:{left:02d} left"
