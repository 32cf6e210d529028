"""Labels every unit of a corpus with a classifier, which it trains first; the same command resumes.

The config is the classifier's, as `train` takes it, with the text besides: corpus.* says what is
labelled, and must be as `pretrain` will have it; ppt.thresholds what is counted as sure. Neither
binds the workdir, so one classifier labels many corpora. A workdir that `train` has finished, of
any method and of a task with classes from the worst to the best, is taken as it is.
"""

import json
from collections.abc import Sequence

from jaxprompt.cli.options import Parser, add_hosts, need, several_hosts
from jaxprompt.config.load import load_config


def main(argv: Sequence[str]) -> int:
    """Writes labels for ppt.annotations; prints how many there are of each class, as JSON."""
    parser = Parser(__name__, __doc__)
    parser.add_argument("--output", help="folder to write, which ppt.annotations takes")
    add_hosts(parser)
    args, overrides = parser.read(argv)
    need(args, "config", "workdir", "output")
    config = load_config(args.config, overrides)
    own = [given for given in overrides if not given[0].startswith(("corpus.", "ppt.thresholds"))]
    # The classifier's own config: what is said of the text alone must not bind its workdir.
    classifier = load_config(args.config, own)
    from jaxprompt.runs import annotate  # only here, so that a bad flag is answered at once

    with several_hosts(args) as is_first:
        result = annotate.run(config, classifier, args.workdir, args.output)
        if result is not None and is_first:
            print(json.dumps(result, ensure_ascii=False))
    return 0
