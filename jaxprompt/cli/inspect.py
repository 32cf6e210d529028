"""Shows what a run learned: nearest words, hidden states, confusion matrix, attention.

Text is printed to stdout. Figures, inspect.json and inspect.html, a page that works offline, are
written to WORKDIR/inspect. With --exports=DIR it compares the prompts in a folder instead, and
writes similarity.png and similarity.json there. Needs matplotlib.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxprompt.cli import log, print_text
from jaxprompt.cli.options import SPLITS, Parser, choose_mesh, load_run, path, require_flags, whole
from jaxprompt.errors import InputError, brief, check_extra, escape


def main(argv: Sequence[str]) -> int:
    """Prints the nearest words of each trained vector and R_D per step, and writes the page."""
    args, overrides = _make_parser().read(argv)
    if args.exports:
        return _compare(args)
    require_flags(args, "workdir")
    check_extra("plots", "matplotlib", "inspect")
    check_extra("plots", "sklearn", "inspect")
    config = choose_mesh(load_run(args, overrides))

    from jaxprompt.inspection.findings import InspectOptions, inspect_run
    from jaxprompt.inspection.report import list_errors, list_instances, list_words, write_report

    options = InspectOptions(
        args.split, args.steps, args.top, args.examples, args.instances, args.errors
    )
    findings = inspect_run(config, args.workdir, options, log)
    for remark in findings.remarks:
        log(remark)
    paths = write_report(findings, args.workdir, f"Run {Path(args.workdir).resolve().name}")
    print(list_words(findings), end="")
    print(list_instances(findings, sys.stdout.isatty()), end="")
    print(list_errors(findings), end="")
    if findings.states is not None:
        for step, separation in findings.states.separations.items():
            print(f"R_D at step {step}: {separation.ratio:.4f}")
    for part, note in findings.notes.items():
        print_text(f"{part}: {note}")
    print_text(f"{len(paths)} files; {paths[0]} shows all of them")
    return 0


def _make_parser() -> Parser:
    parser = Parser(__name__, __doc__)
    parser.add_argument("--split", default="dev", choices=SPLITS, help="default: dev")
    parser.add_argument(
        "--top", type=whole, default=5, help="nearest words per trained vector (default: 5)"
    )
    parser.add_argument(
        "--steps",
        type=steps_list,
        default=(),
        help="steps whose hidden states are plotted, e.g. 0,30,60 (default: a few)",
    )
    parser.add_argument(
        "--examples",
        type=whole,
        default=1000,
        help="maximum examples for hidden states and attention (default: 1000)",
    )
    parser.add_argument(
        "--instances",
        type=whole,
        default=5,
        help="for prompts that are computed from the text: number of texts to show with the words "
        "nearest to their prompt (default: 5)",
    )
    parser.add_argument(
        "--errors",
        type=whole,
        default=10,
        help="number of misclassified examples to list, the most confident first (default: 10)",
    )
    parser.add_argument(
        "--exports",
        type=path,
        metavar="DIR",
        help="compare the exports in a folder by the cosine similarity of their mean tokens",
    )
    return parser


def _compare(args: argparse.Namespace) -> int:
    if args.workdir or args.config:
        raise InputError("--exports compares a folder of exports; remove --workdir and --config")

    check_extra("plots", "matplotlib", "inspect --exports")
    from jaxprompt.inspection.similarity import compare_exports, format_pairs, write_similarity

    similarity = compare_exports(args.exports)
    print(escape(format_pairs(similarity)), end="")
    for file in write_similarity(similarity, args.exports):
        log(str(file))
    return 0


def steps_list(text: str) -> tuple[int, ...]:
    """Reads --steps, e.g. 0,30,60. For argparse, as the type of the flag."""
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise argparse.ArgumentTypeError(f"{brief(text)} must be steps, e.g. 0,30,60") from None
