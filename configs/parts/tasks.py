"""Tasks by name; each function fills the blocks `task` and `data`, and `head` where needed."""

from configs.parts import heads


def topics(config):
    """Six topics, part of the package: 16 + 16 examples per class, 240 for test."""
    config.task.name = "topics"
    config.data.max_len = 64


def _hold_out(config, name, *, size=500, length=64):
    config.task.name = name
    config.data.protocol = {"name": "holdout", "size": size}
    config.data.max_len = length


def trec(config):
    """TREC question types; 500 examples of train become dev."""
    _hold_out(config, "trec")


def sst2(config):
    """SST-2."""
    config.task.name = "sst2"
    config.data.max_len = 128


def mpqa(config):
    """MPQA opinion polarity; 500 examples of train become dev."""
    _hold_out(config, "mpqa")


def cola(config):
    """CoLA, grammatical acceptability; 500 examples of train become dev."""
    _hold_out(config, "cola")


def rte(config):
    """RTE, entailment; 250 examples of train become dev."""
    _hold_out(config, "rte", size=250, length=256)


def wic(config):
    """WiC, the sense of a word in two sentences; 500 examples of train become dev."""
    _hold_out(config, "wic")


def copa(config):
    """COPA, causes and effects; 80 examples of train become dev."""
    _hold_out(config, "copa", size=80)


def mrpc(config):
    """MRPC, paraphrases."""
    config.task.name = "mrpc"
    config.data.max_len = 128


def boolq(config):
    """BoolQ, yes-or-no questions about a passage."""
    config.task.name = "boolq"
    config.data.max_len = 256


def conll2003(config):
    """Named entities of CoNLL 2003."""
    heads.tags(config)
    config.task.name = "conll2003"
    config.data.max_len = 128


def conll05(config):
    """Semantic roles of CoNLL 2005, from your own files; long sentences are split in windows."""
    heads.tags(config)
    config.task.name = "conll05"
    config.data.max_len = 152


def squad(config):
    """SQuAD 1.1, questions whose answer is a span of the text."""
    heads.spans(config, stride=64)
    config.task.name = "squad"
    config.data.max_len = 256
