"""Tasks that pre-train prompts on running text (Gu et al. 2022, "PPT", section 3).

`make_forms` lays out a pattern for a backbone. `make` of nsp, selection or cls makes a task from it
and some documents of an indexed corpus, and `Rows` returns its batches. An example is a pure
function of its row and of the seed and number of the visit to it. `ask` lays out a downstream task
by the pattern of any of them, `unify` by that of a selection.
"""

from jaxprompt.corpus.ppt.annotations import (
    PUBLISHED,
    Annotations,
    AnnotationWriter,
    check_classes,
    check_thresholds,
    check_unfinished,
)
from jaxprompt.corpus.ppt.forms import Form, Forms, make_forms
from jaxprompt.corpus.ppt.patterns import PATTERNS, TASKS, Pattern, get_pattern
from jaxprompt.corpus.ppt.reading import Reader
from jaxprompt.corpus.ppt.samples import PptSamples
from jaxprompt.corpus.ppt.selection import numbers_of_options
from jaxprompt.corpus.ppt.unified import ask, unify
from jaxprompt.corpus.ppt.units import Units

__all__ = [
    "PATTERNS", "PUBLISHED", "TASKS", "AnnotationWriter", "Annotations", "Form", "Forms", "Pattern",
    "PptSamples", "Reader", "Units", "ask", "check_classes", "check_thresholds", "check_unfinished",
    "get_pattern", "make_forms", "numbers_of_options", "unify",
]  # fmt: skip
