"""Tasks of tags whose data sets are licensed or bundled files, which data/sources/conll.py reads.

Named entities of CoNLL-2004 and OntoNotes 5, and the semantic roles of the shared tasks of 2005
(Carreras and Màrquez 2005) and 2012 (Pradhan et al. 2012). Tags are found in the training rows. The
input of a role is that of P-tuning v2 (Liu et al. 2022): the sentence, a separator, the predicate.
"""

from jaxprompt.data.tasks.task import Definitions

_ENTITIES = {
    "fields": ("tokens",),
    "tags": "tags",
    "plain": "{tokens}",
    "metric": "entity_f1",
    "columns": ("tokens", "tags"),  # those of a file that has roles too
}
_ROLES = {
    "fields": ("tokens",),
    "tags": "tags",
    "predicate": "predicate",
    "scheme": "iob2",
    "plain": "{tokens} [sep] {predicate}",
    "metric": "role_f1",
}

SEQUENCES: Definitions = {
    "conll04": _ENTITIES,
    "ontonotes5": _ENTITIES,
    "conll05": _ROLES,
    "conll12": _ROLES,
}
