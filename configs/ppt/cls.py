"""Pseudo-labels of single texts; give ppt.annotations besides.

The argument is a kind of backbone: `--config=configs/ppt/cls.py:masked`.
configs/ppt/__init__.py has the values, which are those of the released code.
"""

from configs.ppt import pretrain


def get_config(kind="t5"):
    """Returns one run; give corpus.path and backbone.path."""
    return pretrain("cls", kind)
