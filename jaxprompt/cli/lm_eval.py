"""Runs EleutherAI's lm-evaluation-harness with the model `jaxprompt`: a backbone and a prompt.

All other arguments are those of its command `lm_eval`, which `lm_eval run --help` lists:

  jaxprompt lm_eval --model jaxprompt --model_args backbone=PATH,prompt=EXPORT --tasks arc_easy
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from jaxprompt.cli.options import Parser
from jaxprompt.errors import check_extra

_MODEL = "jaxprompt.api.lm_eval:JaxpromptLM"


class _Parser(Parser):
    """Leaves the arguments that it does not know to the harness, as `arguments`."""

    def parse_args(  # type: ignore[override]  # the base class has overloads
        self, args: Any = None, namespace: Any = None
    ) -> argparse.Namespace:
        """Parses the flags of this command."""
        parsed, arguments = self.parse_known_args(args, namespace)
        parsed.arguments = arguments
        return parsed


def main(argv: Sequence[str]) -> int:
    """Runs the command line of the harness, which prints and writes the results."""
    args, _ = _Parser(__name__, __doc__, config=False).read(argv)
    check_extra("lm_eval", "lm_eval", "lm_eval")
    import lm_eval.models  # noqa: F401, registers the models of the harness
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.registry import model_registry

    from jaxprompt.parallel.compilation import enable_compilation_cache

    # The harness up to 0.4.13 reads no entry points.
    if "jaxprompt" not in model_registry:
        model_registry.register("jaxprompt", target=_MODEL)
    enable_compilation_cache()
    sys.argv = ["lm_eval", *args.arguments]
    cli_evaluate()
    return 0
