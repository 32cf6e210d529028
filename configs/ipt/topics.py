"""The topic classifier that rows of words and encoders start from (section 4.2 and A.3).

The argument is ENCODER,PLACE,TASK, of which the last may be left out: `configs/ipt/topics.py:cnn`,
`:lstm,prefix` or `:cnn,prompt,yahoo_answers_topics`. `export` it to topics/ENCODER-PLACE, as in
topics/cnn-prompt, where the tables look for it. "none" trains the rows without an encoder.

The paper has 13 categories of Wikipedia. Its released code has 2,000 texts of them for dev and 500
for test, and no file to train on: give your own by data.files.train, in the columns "text" and
"label". The topics of Yahoo! Answers are public.

The rows train with the encoder, as the paper says; in the released code they stay as they began.
Its optimizers differ: SGD at 0.005, batches of 1, 35 epochs (cnn), Adam at 0.003, 2, 2 epochs
(lstm), Adam at 1e-4, 32, 10 epochs (mlp). Here all have Adam at 0.003, batches of 32, 10 epochs.
"""

from configs.base import get_config as base
from configs.ipt import LENGTH
from configs.parts import heads, methods
from jaxprompt.errors import InputError, check_known

ENCODERS = ("cnn", "lstm", "mlp", "none")
PLACES = ("prompt", "prefix")
TASKS = ("custom", "yahoo_answers_topics")
WORDS = 200  # released code: of a text


def get_config(name="cnn"):
    """Returns one run."""
    parts = name.split(",")
    if len(parts) > 3:
        raise InputError(f"{name!r} has {len(parts)} parts; give ENCODER,PLACE,TASK")
    encoder, place, task = (*parts, *("cnn", "prompt", "custom")[len(parts) :])
    check_known("the encoder", encoder, ENCODERS)
    c = base()
    c.backbone.path = "FacebookAI/roberta-large"  # its tokenizer and width; it is not run
    c.task.name = check_known("the task", task, TASKS)
    heads.topics(c)
    # Without an encoder a word of the text is a vector.
    length = WORDS if encoder == "none" else LENGTH
    on = check_known("the place", place, PLACES)
    methods.ipt(c, lr=3e-3, length=length, encoder=encoder, on=on)
    if on == "prefix":  # read as they are: no keys and values of a task are beside them
        c.prompt.added, c.prompt.coefficient = False, 1.0
    ratio, holdout = 10_000.0, 0.005  # of 140,000 per class
    if task == "custom":
        c.task.fields = ("text",)
        ratio, holdout = 0.9, 0.1
    c.data.protocol = {"name": "fraction", "ratio": ratio, "holdout": holdout}
    c.data.max_len = WORDS + 2 + (length if on == "prompt" else 0)
    c.data.batch, c.train.total_epochs = 32, 10.0
    c.optim.schedule = {"name": "constant"}
    return c


def sweep():
    """Yields the six classifiers that the tables start from."""
    for place in PLACES:
        for encoder in ("cnn", "lstm", "mlp"):
            yield {"config": f"{encoder},{place}"}
