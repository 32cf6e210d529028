"""Scores a split with the best prompt of a workdir, zero-shot, or with the majority class.

With --prompt it scores the rows of --input with an export instead, whose texts are generated as the
fields of --config.generate say. With several prompts, --column or --route selects the prompt of
each row, and the prompts share batches.
"""

import itertools
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxprompt.cli import bank, log
from jaxprompt.cli.options import (
    SPLITS,
    Parser,
    add_process_flags,
    choose_mesh,
    join_processes,
    load_run,
    path,
)
from jaxprompt.config.run import RunConfig
from jaxprompt.data.sources.records import (
    Record,
    check_columns,
    from_file,
    from_stdin,
    output_lines,
)
from jaxprompt.data.tasks.readers.dialogues import indices_of_last_turns
from jaxprompt.errors import InputError
from jaxprompt.files import check_output, dumps, write_output

if TYPE_CHECKING:
    from jaxprompt.data.text.encoded import Predictions, Split
    from jaxprompt.models.scorer import Scorer
    from jaxprompt.serving.stream import Predictor

_RUN_FLAGS = (
    "config", "workdir", "split", "majority", "output", "prefix",
    "coordinator", "processes", "process", "cluster", "timeout",
)  # fmt: skip


def main(argv: Sequence[str]) -> int:
    """Prints the metrics of a split as JSON, and writes its predictions to --output."""
    parser = Parser(__name__, __doc__)
    parser.add_argument("--split", default="dev", choices=SPLITS, help="default: dev")
    parser.add_argument(
        "--output", type=path, help="JSONL output file: each row with its prediction"
    )
    parser.add_argument("--prefix", default="", help="prefix of the names of the new columns")
    parser.add_argument(
        "--majority",
        action="store_true",
        help="score the most frequent class of the full training set; needs no backbone",
    )
    bank.add_serving_flags(parser)
    add_process_flags(parser)
    args, overrides = parser.read(argv)
    if args.prompt or bank.selecting_flag(args):
        bank.refuse_flags(
            parser, args, _RUN_FLAGS, "is only valid for runs, and --prompt scores exports"
        )
        print(dumps(evaluate_exports(args, overrides)))
        return 0
    bank.refuse_flags(parser, args, bank.SERVING, "is only valid with --prompt")
    config = load_run(args, overrides)
    if args.majority:
        print(dumps(majority(config, args.split, args.output)))
        return 0
    with join_processes(args) as is_first:
        metrics = evaluate(choose_mesh(config), args.workdir, args.split, args.output, args.prefix)
        if is_first:
            print(dumps(metrics))
    return 0


def evaluate(
    config: RunConfig, workdir: str | None, split: str, output: str | None = None, prefix: str = ""
) -> dict[str, Any]:
    """Returns the metrics of a split, and writes its rows to `output` in the format of `predict`.

    Raises:
      InputError: if the split is missing.
    """
    from jaxprompt.build.check import check_metric_package
    from jaxprompt.build.evaluation import make_evaluate_fn
    from jaxprompt.build.examples import data_files
    from jaxprompt.build.task import cache_shared_prefix
    from jaxprompt.parallel import processes
    from jaxprompt.parallel.compilation import enable_compilation_cache
    from jaxprompt.runs.restore import is_zero_shot, restore_run

    if not is_zero_shot(config) and workdir is None:
        raise InputError("--workdir is missing; see --help")
    check_metric_package(config)
    output_path = processes.run_on_first(
        lambda: check_output(output, data_files(config)) if output else None
    )
    enable_compilation_cache(config.train.compilation_cache)
    trained = restore_run(config, workdir or "", [split])  # zero-shot reads no workdir
    if split not in trained.splits:
        raise InputError(
            f"task {trained.scorer.task.name} has no {split} split here; give data.files.{split}"
        )
    # Only a message, and the split is scored: the files may have been fixed since.
    for line in trained.changed_splits if processes.is_first() else ():
        log(line)
    scorer, examples = cache_shared_prefix(config, trained.scorer), trained.splits[split]
    # Before anything is scored: rows with a column of that name are refused at once.
    if output and scorer.scores_targets:
        raise InputError(
            f"--output={output} writes generated texts, but task.metric={scorer.task.metric} "
            "generates none; remove it, or use predict"
        )
    records = _read_records(config, scorer, split, prefix) if output else []
    judge = make_evaluate_fn(config, scorer, trained.placement)
    metrics, scores = judge(examples, trained.weights.trainable, trained.weights.frozen)
    if output_path:
        _write_records(output_path, scorer, records, examples, scores, prefix)
    return {"split": split, "examples": examples.size, **metrics}


def evaluate_exports(args: Namespace, overrides: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Scores rows with one export or several.

    Returns:
      The metrics; for several exports by the name of each prompt.

    Raises:
      InputError: for config fields other than those of `generate`, for a row that cannot be read,
        and if no row has a label.
    """
    if not (args.prompt and args.input):
        raise InputError("--prompt and --input must be given together; give both")
    bank.check_serving_flags(args)
    measure = _measure_bank if bank.selecting_flag(args) else _measure_export
    metrics = measure(args, overrides)
    if not metrics:
        raise InputError(
            f"{args.input}: no row has a known label of its prompt's task; add labelled rows"
        )
    return metrics


def _read_input(args: Namespace, columns: Sequence[str] = ()) -> Iterator[Record]:
    """Reads the first record at once, and the others when they are requested."""
    records = from_stdin(()) if args.input == "-" else from_file(args.input, columns)
    return itertools.chain(list(itertools.islice(records, 1)), records)


def _measure_bank(args: Namespace, overrides: Sequence[tuple[str, str]]) -> dict[str, Any]:
    from jaxprompt.serving.stream import several_prompts

    inputs = _read_input(args)
    prompts = bank.open_bank(args, overrides, router=bank.read_router(args))
    metrics = _measure(args, several_prompts(prompts, args.column), inputs)
    return metrics if any(values["examples"] for values in metrics.values()) else {}


def _measure_export(args: Namespace, overrides: Sequence[tuple[str, str]]) -> dict[str, Any]:
    from jaxprompt.build.prompt_artifact import read_export
    from jaxprompt.heads import make_head
    from jaxprompt.serving.stream import one_prompt

    (prompt,) = args.prompt
    metadata = read_export(prompt)[1]
    head = make_head(metadata.head.name, **metadata.head.fields)
    answers = "" if head.WRITES else head.OF
    generation = bank.read_generation(metadata.generate, overrides, prompt, answers)
    inputs = _read_input(args, metadata.task.columns)
    exported, placement = bank.open_export(args, prompt)
    scorer = exported.scorer
    if scorer.head.WRITES:
        scorer = scorer.writing(generation.max_new_tokens)
    predictor = one_prompt(scorer, exported.params, placement, generation)
    metrics = _measure(args, predictor, inputs).get("", {})
    return metrics if metrics.get("examples") else {}


def _measure(
    args: Namespace, predictor: "Predictor", inputs: Iterator[Record]
) -> dict[str, dict[str, Any]]:
    """Returns the metrics of each prompt and the number of its labelled examples."""
    from jaxprompt.scoring.metrics import check_package
    from jaxprompt.serving.stream import Totals, answer_chunks

    for scorer in predictor.scorers:
        check_package(scorer.task.metric, scorer.task.kind)
    totals, size = Totals(predictor), bank.chunk_size(args)
    for chunk, answers in answer_chunks(predictor, predictor.read(inputs), size):
        totals.add(chunk, answers)
    for line in totals.messages():
        log(line)
    metrics = totals.metrics().items()
    return {
        name: {"examples": count, **values} for name, (values, count, total) in metrics if total
    }


def majority(config: RunConfig, split: str, output: str | None) -> dict[str, Any]:
    """Scores the majority baseline. Raises InputError if predictions are requested, too."""
    from jaxprompt.runs.majority import measure_majority

    if output:
        raise InputError(
            f"--majority predicts one class for all examples; remove --output={output}"
        )
    return measure_majority(config, split)


def _read_records(config: RunConfig, scorer: "Scorer", split: str, prefix: str) -> list[Record]:
    """Reads the rows for --output; none may have a column with the name of a new column."""
    from jaxprompt.build.examples import read_split_rows

    rows = read_split_rows(config, scorer.task, split)
    records = [Record(origin, row, example=example) for origin, row, example in rows]
    return list(check_columns(records, scorer.head.columns(scorer.task), prefix))


def _write_records(
    path: Path,
    scorer: "Scorer",
    records: Sequence[Record],
    split: "Split",
    scores: "Predictions",
    prefix: str,
) -> None:
    rows = [(r.origin, r.row, r.example) for r in records if r.row is not None and r.example]
    if split.size > len(rows):  # f1c is scored turn by turn; a row is answered by its last one
        assert not isinstance(scores, list)  # which texts are
        ends = indices_of_last_turns(scorer.task, rows)
        split, scores = split._replace(counts=split.counts[ends]), scores[ends]
    answers = scorer.answers([example for *_, example in rows], split, scores)
    write_output(path, output_lines(records, answers, prefix))
