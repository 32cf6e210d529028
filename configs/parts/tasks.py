"""Tasks by name; each function fills the task and data blocks, and the head of its answers."""

from configs.parts import heads


def topics(c):
    """The six-topic set that ships in the package: 16 + 16 rows per class, 240 test rows."""
    c.task.name = "topics"
    c.data.max_len = 64


def _hold_out(c, name, *, size=500, length=64):
    c.task.name = name
    c.data.protocol = {"name": "holdout", "size": size}
    c.data.max_len = length


def trec(c):
    """TREC question types; 500 rows of train become dev."""
    _hold_out(c, "trec")


def sst2(c):
    """SST-2."""
    c.task.name = "sst2"
    c.data.max_len = 128


def mpqa(c):
    """MPQA opinion polarity; 500 rows of train become dev."""
    _hold_out(c, "mpqa")


def cola(c):
    """CoLA, acceptable English; 500 rows of train become dev."""
    _hold_out(c, "cola")


def rte(c):
    """RTE, entailment; 250 rows of train become dev."""
    _hold_out(c, "rte", size=250, length=256)


def wic(c):
    """WiC, a word in two sentences; 500 rows of train become dev."""
    _hold_out(c, "wic")


def copa(c):
    """COPA, causes and effects; 80 rows of train become dev."""
    _hold_out(c, "copa", size=80)


def mrpc(c):
    """MRPC, paraphrases."""
    c.task.name = "mrpc"
    c.data.max_len = 128


def boolq(c):
    """BoolQ, questions of yes or no about a passage."""
    c.task.name = "boolq"
    c.data.max_len = 256


def conll2003(c):
    """Named entities of CoNLL 2003, a tag for every word."""
    heads.tags(c)
    c.task.name = "conll2003"
    c.data.max_len = 128


def conll05(c):
    """Semantic roles of CoNLL 2005, from files of your own; the longest sentences take windows."""
    heads.tags(c)
    c.task.name = "conll05"
    c.data.max_len = 152


def squad(c):
    """Questions whose answer stands in the text, as SQuAD 1.1 has them."""
    heads.spans(c, stride=64)
    c.task.name = "squad"
    c.data.max_len = 256
