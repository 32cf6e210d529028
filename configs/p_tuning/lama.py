"""P-tuning on the facts of a relation of LAMA, the backbone frozen (Liu et al. 2021, section 4.2).

The argument is MODEL: `masked`, or `causal` for a GPT-2. If the columns are not named as in LAMA,
add SUBJECT,OBJECT; if the files have several relations, add COLUMN=RELATION to select one:
`--config=p_tuning/lama:masked,subject,object,relation=capital`. Set data.source to the train, dev
and test files, and task.vocabulary to the words to rank. Examples whose object is not one of these
words, or not a single token, are left out, as in the released code. All values are those of that
code. Its Adam adds weight decay to the gradient, and it drops the last batch of an epoch; here the
optimizer is AdamW, and the last batch is smaller.
"""

from configs.base import paper as base
from configs.parts import heads, methods
from jaxprompt.errors import InputError, check_known

MODELS = {  # soft tokens (3, 3, 3), or (3, 3, 0) if the object is predicted at the end
    "masked": ("google-bert/bert-base-cased", "[soft*3] [mask] [soft*3] {{{}}} [soft*3]", 9),
    "causal": ("openai-community/gpt2", "[soft*3] {{{}}} [soft*3] [mask]", 6),
}
COLUMNS = ("sub_label", "obj_label")
RELATION = "predicate_id"  # LAMA's column of the relation
# The relations of T-REx in LAMA.
RELATIONS = tuple(f"P{number}" for number in (
    17, 19, 20, 27, 30, 31, 36, 37, 39, 47, 101, 103, 106, 108, 127, 131, 136, 138, 140, 159, 176,
    178, 190, 264, 276, 279, 361, 364, 407, 413, 449, 463, 495, 527, 530, 740, 937, 1001, 1303,
    1376, 1412,
))  # fmt: skip


def get_config(name="masked"):
    """Returns one run."""
    model, *columns = name.split(",")
    path, template, length = MODELS[check_known("the model", model, MODELS)]
    only = columns.pop() if columns and "=" in columns[-1] else ""
    if len(columns) not in (0, 2):
        raise InputError(
            f"{name!r} must be MODEL or MODEL,SUBJECT,OBJECT, and may end with COLUMN=RELATION"
        )
    subject, label = columns or COLUMNS
    config = base()
    config.seed = 34
    config.backbone.path = path
    config.task.name, config.task.metric = "custom", "hit_at_1"
    config.task.fields, config.task.label = (subject,), label
    config.task.template = template.format(subject)
    config.data.only = only
    config.task.vocabulary = "common_vocab_cased.txt"  # LAMA's name for its list of words
    methods.p_tuning(
        config, length=length, lr=1e-5, hidden=384
    )  # half of the width of the embeddings
    heads.verbalizer(config, scores="full")  # for the loss; the metrics rank the listed words
    config.optim.weight_decay, config.optim.no_decay, config.optim.clip = 5e-4, (), 0.0
    config.optim.schedule = {"name": "exponential", "gamma": 0.98}
    config.data.max_len, config.data.batch = 64, 8
    config.train.total_epochs, config.train.patience = 100.0, 20
    return config


def sweep():
    """Yields a run per relation, for files with all relations; tables show the mean of a model."""
    for model in MODELS:
        for relation in RELATIONS:
            yield {"config": model, "data.only": f"{RELATION}={relation}"}
