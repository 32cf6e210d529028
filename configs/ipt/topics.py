"""Topic classifiers that pre-train the word embeddings and encoders of IPT (section 4.2 and A.3).

The argument is ENCODER,PLACE,TASK: `--config=configs/ipt/topics.py:cnn`, `:lstm,prefix` or
`:cnn,prompt,yahoo_answers_topics`. Encoder `none` trains the word embeddings alone. `export` the
run to topics/ENCODER-PLACE, e.g. topics/cnn-prompt: the tables start from there.

The paper has 13 categories of Wikipedia. Its released code has 2,000 texts for dev and 500 for
test, and no training file: set data.files.train to your own, with the columns "text" and "label".
The topics of Yahoo! Answers are public.

The word embeddings train with the encoder, as the paper says; in the released code they keep their
initial values. Its optimizers are SGD at 0.005, batches of 1, 35 epochs (cnn); Adam at 0.003,
batches of 2, 2 epochs (lstm); Adam at 1e-4, batches of 32, 10 epochs (mlp). Here all encoders have
Adam at 0.003, batches of 32, 10 epochs.
"""

from configs.base import paper as base
from configs.ipt import LENGTH
from configs.parts import heads, methods
from jaxprompt.config.load import read_argument

ENCODERS = ("cnn", "lstm", "mlp", "none")
PLACES = ("prompt", "prefix")
TASKS = ("custom", "yahoo_answers_topics")
WORDS = 200  # of a text (released code)


def get_config(argument="cnn"):
    """Returns one run."""
    encoder, on, task = read_argument(
        argument, ENCODER=("cnn", ENCODERS), PLACE=("prompt", PLACES), TASK=("custom", TASKS)
    )
    config = base()
    config.backbone.path = "FacebookAI/roberta-large"  # only its tokenizer and width are used
    config.task.name = task
    heads.topics(config)
    # Without an encoder, each word of the text is one vector.
    length = WORDS if encoder == "none" else LENGTH
    methods.ipt(config, lr=3e-3, length=length, encoder=encoder, on=on)
    if on == "prefix":  # without a prefix of the task to add them to
        config.prompt.added, config.prompt.coefficient = False, 1.0
    ratio, holdout = 10_000.0, 0.005  # of 140,000 per class
    if task == "custom":
        config.task.fields = ("text",)
        ratio, holdout = 0.9, 0.1
    config.data.protocol = {"name": "fraction", "ratio": ratio, "holdout": holdout}
    config.data.max_len = WORDS + 2 + (length if on == "prompt" else 0)
    config.data.batch, config.train.total_epochs = 32, 10.0
    config.optim.schedule = {"name": "constant"}
    return config


def sweep():
    """Yields the six classifiers that the tables start from."""
    for place in PLACES:
        for encoder in ("cnn", "lstm", "mlp"):
            yield {"config": f"{encoder},{place}"}
