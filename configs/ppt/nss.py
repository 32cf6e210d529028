"""Next-sentence selection among 6 options, which pre-trains prompts for multiple choice.

The argument is a kind of backbone: `--config=configs/ppt/nss.py:masked`.
configs/ppt/__init__.py has the values, those of the released code.
"""

from configs.ppt import pretrain


def get_config(kind="t5"):
    """Returns one run; set corpus.path and backbone.path."""
    return pretrain("nss", kind)
