"""Labels texts, or writes on, with an exported prompt: texts, JSONL or stdin in, JSONL out."""

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxprompt.cli.options import Parser
from jaxprompt.errors import InputError, has_surrogate


def main(argv: Sequence[str]) -> int:
    """Writes one JSON line an example: the input, its label, score and all class scores."""
    parser = Parser(__doc__, config=False)
    parser.add_argument("--prompt", help="folder of an export (default: WORKDIR/export)")
    parser.add_argument("--workdir", help="folder of the run that was exported")
    parser.add_argument("--text", action="append", help="a text; may be given several times")
    parser.add_argument("--input", help="JSONL file, - = stdin (the default without --text)")
    parser.add_argument("--output", help="JSONL file to write (default: stdout)")
    parser.add_argument("--backbone", default="", help="backbone, if not where the card says")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--batch", type=int, default=64, help="examples a batch (default: 64)")
    parser.add_argument("--mesh", default="1x1", help="devices, data x model (default: 1x1)")
    parser.add_argument("--generate", action="store_true", help="write a text instead of a label")
    parser.add_argument("--force", action="store_true", help="accept other backbone weights")
    args, overrides = parser.read(argv)
    if overrides:
        raise InputError("predict takes no --config: the exported card says all")
    if not (args.prompt or args.workdir):
        raise InputError("--prompt or --workdir is missing; see --help")
    if args.text and args.input:
        raise InputError("give --text or --input, not both")
    if args.batch < 1:
        raise InputError(f"--batch={args.batch} must be at least 1")

    from jaxprompt.data.tasks import read_example
    from jaxprompt.exported import read_export, unpack
    from jaxprompt.files import write_atomic

    where = args.prompt or str(Path(args.workdir) / "export")
    _, card = read_export(where)
    rows = list(_rows(args, card["task"]["fields"]))
    if not rows:
        raise InputError(f"{args.input or 'stdin'} holds no text; give at least one")
    block = dict(
        path=args.backbone, revision="", init="", family="", dtype=args.dtype, stack="scan",
        remat="none", attention="auto", dropout=None, sentinel="", rescale=1.0,
    )  # fmt: skip
    placement = _placement(args.mesh, args.batch)
    exported = unpack(
        where, backbone=block, batch=args.batch, placement=placement, force=args.force
    )
    scorer = exported.scorer
    examples = [read_example(scorer.task, row, origin, need_label=False) for origin, row in rows]
    written = args.generate or scorer.is_text
    answers = (write if written else label)(exported, examples, placement)
    lines = [
        _line(origin, row, answer) for (origin, row), answer in zip(rows, answers, strict=True)
    ]
    if args.output:
        write_atomic(args.output, "".join(lines))
    else:
        sys.stdout.write("".join(lines))
    return 0


def label(exported: Any, examples: Sequence[Any], placement: Any) -> Iterator[dict[str, Any]]:
    """Yields label, score and all class scores of each example."""
    from jaxprompt.data.batching import EvalBatches
    from jaxprompt.evaluate import drop_absent, place_step, predict_scores, probabilities

    scorer = exported.scorer
    split = scorer.encode(examples)
    forward = lambda _, params, batch: scorer.model.forward(params, batch)
    step = place_step(placement, forward)
    batches = EvalBatches(split.rows, split.labels, scorer.layout)
    scores = predict_scores(step, {}, exported.params, batches, len(examples))
    scores = drop_absent(scores, split.counts, scorer.classes)
    found = zip(examples, probabilities(scores, scorer.classes), split.counts, strict=True)
    for example, values, count in found:
        names = (scorer.task.labels or example.choices)[:count]
        best = int(values[:count].argmax())
        known = dict(zip(names, map(float, values), strict=False))
        yield {"label": names[best], "score": float(values[best]), "scores": known}


def write(exported: Any, examples: Sequence[Any], placement: Any) -> Iterator[dict[str, Any]]:
    """Yields the text that the model writes after each example."""
    from jaxprompt.data.batching import EvalBatches
    from jaxprompt.evaluate import make_writer, write_texts

    how = exported.card["generate"]
    scorer = exported.scorer.writing(how["max_new"])
    split = scorer.encode(examples)
    pad = scorer.layout.pad_id
    step = make_writer(placement, how, scorer.model, scorer.tokenizer, pad)
    batches = EvalBatches(split.rows, split.labels, scorer.layout)
    texts = write_texts(step, {}, exported.params, batches, len(examples), scorer.tokenizer)
    yield from ({"generated": text} for text in texts)


def _line(origin: str, row: dict[str, Any], answer: dict[str, Any]) -> str:
    """Writes one example. Raises InputError where a number is none that JSON knows."""
    for part, what in ((answer, "the model's scores"), (row, "the example's own numbers")):
        try:
            json.dumps(part, allow_nan=False)
        except ValueError as error:
            cure = (
                "the prompt's numbers are too large for this backbone: try --dtype=float32, and "
                "train again with a lower optim.lr"
                if part is answer
                else "mend the example, JSON has no NaN"
            )
            raise InputError(f"{origin}: {what} are not finite; {cure}") from error
    return json.dumps(row | answer, ensure_ascii=False) + "\n"


def _placement(mesh: str, batch: int) -> Any:
    from jaxprompt.sharding import make_placement

    sizes = mesh.split("x")
    if len(sizes) != 2 or not all(size.isdecimal() for size in sizes):
        raise InputError(f"--mesh={mesh!r} must be DATAxMODEL, as in 2x4")
    placement = make_placement(*map(int, sizes))
    if batch % int(sizes[0]):
        raise InputError(f"--batch={batch} does not divide over the {sizes[0]} of --mesh={mesh}")
    return placement


def _rows(args: Any, fields: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields (origin, row). A plain line of stdin, like --text, is the task's one field."""
    if args.text:
        for number, text in enumerate(args.text, 1):
            yield f"--text {number}", _one_field(text, fields, "--text")
        return
    if args.input and args.input != "-":
        from jaxprompt.data.files import read_file

        rows = read_file(args.input)
        yield from ((rows.origin(i), dict(row)) for i, row in enumerate(rows))
        return
    from jaxprompt.files import parse_json

    if hasattr(sys.stdin, "reconfigure"):  # bytes that are no UTF-8 come as halves of pairs
        sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")
    for number, line in enumerate(sys.stdin, 1):
        text = line.strip()
        if has_surrogate(text):
            raise InputError(f"stdin:{number}: not UTF-8; convert it, e.g. with iconv -t UTF-8")
        if not text:
            continue
        if text[0] != "{":
            yield f"stdin:{number}", _one_field(text, fields, "a plain line")
            continue
        try:
            yield f"stdin:{number}", parse_json(text)
        except ValueError as error:
            raise InputError(f"stdin:{number}: broken JSON ({error}); mend it") from error


def _one_field(text: str, fields: Sequence[str], source: str) -> dict[str, str]:
    if len(fields) != 1:
        raise InputError(
            f"the task has {len(fields)} fields, {', '.join(fields)}: {source} cannot tell them "
            "apart; give JSON lines"
        )
    return {fields[0]: text}
