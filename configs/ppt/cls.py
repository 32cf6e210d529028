"""Classification of single texts with pseudo-labels; also set ppt.annotations.

The argument is a kind of backbone: `--config=configs/ppt/cls.py:masked`.
configs/ppt/__init__.py has the values, those of the released code.
"""

from configs.ppt import pretrain


def get_config(kind="t5"):
    """Returns one run; set corpus.path and backbone.path."""
    return pretrain("cls", kind)
