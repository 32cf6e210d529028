"""Tasks that pre-train prompts on running text (Gu et al. 2022, "PPT", section 3).

`make_forms` prepares a pattern for a backbone. `make` of nsp, selection or cls makes a task from it
and some documents of an indexed corpus, and `PptSamples` returns its batches. An example is a pure
function of its row and of the seed and number of the visit to it. `to_pretraining_form` gives a
downstream task the pattern of any of them, `to_selection_form` that of a selection.
"""

from jaxprompt.corpus.ppt.annotations import (
    PUBLISHED_THRESHOLDS,
    Annotations,
    AnnotationWriter,
    check_classes,
    check_thresholds,
    check_unfinished,
)
from jaxprompt.corpus.ppt.forms import Form, Forms, make_forms
from jaxprompt.corpus.ppt.patterns import PATTERNS, TASKS, Pattern, get_pattern
from jaxprompt.corpus.ppt.reading import UnitEncoder
from jaxprompt.corpus.ppt.samples import PptSamples
from jaxprompt.corpus.ppt.selection import option_counts
from jaxprompt.corpus.ppt.unified import to_pretraining_form, to_selection_form
from jaxprompt.corpus.ppt.units import Units

__all__ = [
    "PATTERNS",
    "PUBLISHED_THRESHOLDS",
    "TASKS",
    "AnnotationWriter",
    "Annotations",
    "Form",
    "Forms",
    "Pattern",
    "PptSamples",
    "UnitEncoder",
    "Units",
    "check_classes",
    "check_thresholds",
    "check_unfinished",
    "get_pattern",
    "make_forms",
    "option_counts",
    "to_pretraining_form",
    "to_selection_form",
]
