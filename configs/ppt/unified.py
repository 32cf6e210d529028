"""Next-sentence selection among 2 to 16 options, which pre-trains one prompt for all tasks.

The argument is a kind of backbone: `--config=configs/ppt/unified.py:masked`.
configs/ppt/__init__.py has the values, those of the released code.
"""

from configs.ppt import pretrain


def get_config(kind="t5"):
    """Returns one run; set corpus.path and backbone.path."""
    return pretrain("unified", kind)
