"""P-tuning on the facts of a relation of LAMA, the backbone frozen (Liu et al. 2021, section 4.2).

The argument is MODEL, masked, or causal for a GPT-2. Columns of other names than LAMA's follow as
SUBJECT,OBJECT, and where the files hold several relations the one that is learned as
COLUMN=RELATION: `--config=p_tuning/lama:masked,subject,object,relation=capital`. Give the train,
dev and test files by data.source, and by task.vocabulary the words that are ranked: a row whose
object is no word of it, or no single token, is left out, as the released code leaves it out.
Numbers are those of that code. Its Adam adds weight decay to the gradient and drops the last batch
of an epoch; here the optimizer is AdamW, and a last batch is smaller.
"""

from configs.base import get_config as base
from configs.parts import heads, methods
from jaxprompt.errors import InputError, check_known

MODELS = {  # (3,3,3), and (3,3,0) where the object is predicted at the end
    "masked": ("google-bert/bert-base-cased", "[soft*3] [mask] [soft*3] {{{}}} [soft*3]", 9),
    "causal": ("openai-community/gpt2", "[soft*3] {{{}}} [soft*3] [mask]", 6),
}
COLUMNS = ("sub_label", "obj_label")
RELATION = "predicate_id"  # LAMA's column of it
# Those of T-REx in LAMA.
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
            f"p_tuning/lama:{name} must be MODEL or MODEL,SUBJECT,OBJECT, and behind these "
            "COLUMN=RELATION where files hold several relations"
        )
    subject, label = columns or COLUMNS
    c = base()
    c.seed = 34
    c.backbone.path = path
    c.task.name, c.task.metric = "custom", "hit_at_1"
    c.task.fields, c.task.label = (subject,), label
    c.task.template = template.format(subject)
    c.data.only = only
    c.task.vocabulary = "common_vocab_cased.txt"  # what LAMA calls its list
    methods.p_tuning(c, length=length, lr=1e-5, hidden=384)  # half of the embeddings' width
    heads.verbalizer(c, scores="full")  # the loss; metrics rank the words of the list
    c.optim.weight_decay, c.optim.no_decay, c.optim.clip = 5e-4, (), 0.0
    c.optim.schedule = {"name": "exponential", "gamma": 0.98}
    c.data.max_len, c.data.batch = 64, 8
    c.train.total_epochs, c.train.patience = 100.0, 20
    return c


def sweep():
    """Yields a run of each relation, of files that hold all; a model's row has their mean."""
    for model in MODELS:
        for relation in RELATIONS:
            yield {"config": model, "data.only": f"{RELATION}={relation}"}
