"""Trains a tokenizer on a corpus, for a backbone that is trained from scratch."""

from collections.abc import Sequence

from jaxprompt.cli import log
from jaxprompt.cli.options import Parser, path, require_flags, whole
from jaxprompt.config.load import load_config


def main(argv: Sequence[str]) -> int:
    """Reads the documents of the config block `corpus`; prints a summary of the tokenizer."""
    parser = Parser(__name__, __doc__, config=False)
    parser.takes_overrides = True
    parser.add_argument(
        "--config", type=path, help="a config with a block `corpus`, e.g. configs/adapt/mlm.py"
    )
    parser.add_argument("--family", help="bert | electra | roberta | gpt2 | t5")
    parser.add_argument(
        "--size", type=whole, default=30_000, help="size of the vocabulary (default: 30000)"
    )
    parser.add_argument("--output", type=path, help="output folder")
    parser.add_argument("--cased", action="store_true", help="bert, electra: keep upper case")
    args, overrides = parser.read(argv)
    require_flags(args, "config", "family", "output")
    config = load_config(args.config, overrides)
    # Imported here, so that --help and a bad flag answer at once.
    from jaxprompt.build.check import check_config
    from jaxprompt.build.corpus import learn_tokenizer

    check_config(config)
    tokenizer = learn_tokenizer(
        config, args.family, args.output, args.size, lowercase=not args.cased
    )
    log(f"{args.output}: {args.family} tokenizer of {len(tokenizer):,} tokens")
    return 0
