"""A task's examples, read, laid out for a backbone and encoded."""

from typing import Any, NamedTuple

from jaxprompt.assembly import from_config
from jaxprompt.assembly.answers import check_room
from jaxprompt.assembly.examples import Examples, read_examples
from jaxprompt.data.text.encoded import Split
from jaxprompt.models.scorer import Backbone, Scorer
from jaxprompt.parallel.sharding import Placement


class Prepared(NamedTuple):
    """What a run learns a task from."""

    examples: Examples
    scorer: Scorer
    splits: dict[str, Split]


def prepare_task(c: Any, placement: Placement, backbone: Backbone, rows: Any = None) -> Prepared:
    """Prepares the task of a checked config; `rows` by split take the place of its files.

    No weights are read. Raises InputError for what is wrong with the data, or does not fit.
    """
    examples = read_examples(c, given=rows)
    scorer = from_config.scorer_from_config(c, backbone, examples, placement)
    splits = from_config.encode_splits(scorer, examples)
    check_room(c, scorer, splits)
    return Prepared(examples, scorer, splits)
