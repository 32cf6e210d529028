"""Tasks by name; each function fills the task and data blocks."""


def topics(c):
    """The six-topic set that ships in the package: 16 + 16 rows a class, 240 test rows."""
    c.task.name = "topics"
    c.data.max_len = 64


def trec(c):
    """TREC question types; 500 rows of train become dev."""
    c.task.name = "trec"
    c.data.protocol = "holdout"
    c.data.size = 500
    c.data.max_len = 64


def sst2(c):
    """SST-2."""
    c.task.name = "sst2"
    c.data.max_len = 128


def mpqa(c):
    """MPQA opinion polarity; 500 rows of train become dev."""
    c.task.name = "mpqa"
    c.data.protocol = "holdout"
    c.data.size = 500
    c.data.max_len = 64
