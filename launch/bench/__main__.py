"""Measures what the docs report of speed and size, beside PEFT and torch where they do the same.

usage: python launch/bench CASE --output F [flags]     python launch/bench CASE --help
A case is a file of this folder. It prints a Markdown table and writes all figures as JSON to F.
Where sides are compared, each has processes of its own on the cores of --cores, and they take
turns: run that on an idle machine.
"""

import argparse
import importlib
import pkgutil
import sys
from pathlib import Path

from jaxprompt.errors import InputError
from launch.bench.process import Result, SideEnded, report

FOLDER = Path(__file__).resolve().parent

SHARED = ("models", "process")  # what cases share


def cases() -> list[str]:
    """Lists the cases by their file names."""
    names = (module.name for module in pkgutil.iter_modules([str(FOLDER)]))
    return sorted(name for name in names if name not in (*SHARED, "__main__"))


def main(words: list[str]) -> int:
    """Measures a case, or answers as one of its sides. -> the exit code"""
    if not words or words[0] not in cases():
        print(f"{__doc__}\ncases: {', '.join(cases())}", file=sys.stderr)
        return 2
    case = importlib.import_module(f"launch.bench.{words[0]}")
    parser = argparse.ArgumentParser(
        prog=f"python launch/bench {words[0]}", description=case.__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    sides = getattr(case, "SIDES", {})
    parser.add_argument(
        "--side", choices=sides, help="answer as one side, to the measuring process"
    )
    parser.add_argument("--output", help="JSON file of all figures")
    parser.add_argument("--cores", default="", help="as 0,1; none = all that this process may use")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each side")
    case.flags(parser)
    args = parser.parse_args(words[1:])
    if args.side:
        try:
            sides[args.side](args)
        except InputError as error:
            print(f"bench: {error}", file=sys.stderr)
            return 2
        return 0
    if not args.output:
        parser.error("give --output, the JSON file of all figures")
    if not Path(args.output).absolute().parent.is_dir():
        parser.error(f"--output={args.output} is in a folder that does not exist; create it")
    if args.rounds is not None and args.rounds < 1:  # None: the case chooses
        parser.error(f"--rounds={args.rounds} must be at least 1")
    try:
        result = case.measure(args)
    except (InputError, SideEnded, BrokenPipeError) as error:  # the last from closing its input
        print(f"bench: {error}", file=sys.stderr)
        return 2
    result = result if isinstance(result, Result) else Result(result)
    if result.rows:
        report(args.output, result.rows, **result.facts)
    return int(result.failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
