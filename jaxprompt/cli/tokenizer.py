"""Trains a tokenizer on a corpus, for a backbone that is to be made from nothing."""

import sys
from collections.abc import Sequence

from jaxprompt.cli.options import Parser, need
from jaxprompt.config.load import load_config
from jaxprompt.errors import escape


def main(argv: Sequence[str]) -> int:
    """Reads the documents that the block `corpus` of a config names; prints what was written."""
    parser = Parser(__name__, __doc__, config=False)
    parser.add_argument("--config", help="a config with a block `corpus`, as configs/adapt/mlm.py")
    parser.add_argument("--family", help="bert | electra | roberta | gpt2 | t5")
    parser.add_argument("--size", type=int, default=30_000, help="tokens (default: 30000)")
    parser.add_argument("--output", help="folder that is written")
    parser.add_argument("--cased", action="store_true", help="bert, electra: keep upper case")
    args, overrides = parser.read(argv)
    need(args, "config", "family", "output")
    config = load_config(args.config, overrides)
    # Imported here, so that --help and a bad flag answer at once.
    from jaxprompt.build.check import check_config
    from jaxprompt.build.corpus import learn_tokenizer

    check_config(config)
    tokenizer = learn_tokenizer(
        config, args.family, args.output, args.size, lowercase=not args.cased
    )
    print(
        escape(f"{args.output}: {args.family} tokenizer of {len(tokenizer):,} tokens"),
        file=sys.stderr,
    )
    return 0
