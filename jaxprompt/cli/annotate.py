"""Trains a classifier and labels every unit of a corpus with it; the same command resumes.

The config is that of the classifier, as for `train`, plus the text: corpus.* selects the text to
label, and must be the same in `pretrain`; ppt.thresholds sets the probability above which a label
counts. The workdir does not depend on these fields, so one classifier can label many corpora. The
workdir of a finished `train` run is used as it is, for any method, if the classes of its task are
ordered from worst to best.
"""

from collections.abc import Sequence

from jaxprompt.cli.options import Parser, add_process_flags, join_processes, path, require_flags
from jaxprompt.config.load import load_config
from jaxprompt.files import json_line


def main(argv: Sequence[str]) -> int:
    """Writes labels for ppt.annotations; prints the number of labels per class as JSON."""
    parser = Parser(__name__, __doc__)
    parser.add_argument("--output", type=path, help="output folder, to be used as ppt.annotations")
    add_process_flags(parser)
    args, overrides = parser.read(argv)
    require_flags(args, "config", "workdir", "output")
    config = load_config(args.config, overrides)
    # The classifier's config without the fields of the text, which its workdir does not depend on.
    text_fields = ("corpus.", "ppt.thresholds")
    of_classifier = [(name, x) for name, x in overrides if not name.startswith(text_fields)]
    classifier = load_config(args.config, of_classifier)
    from jaxprompt.runs import annotate  # only here, so that a bad flag is answered at once

    with join_processes(args) as is_first:
        result = annotate.annotate_corpus(config, classifier, args.workdir, args.output)
        if result is not None and is_first:
            print(json_line(result))
    return 0
