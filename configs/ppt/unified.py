"""Next-sentence selection among 2 to 16 options, which pre-trains one prompt for all tasks."""

from configs.ppt import pretrain


def get_config(kind="t5"):
    """Returns one run; give corpus.path and backbone.path. Kinds: see configs/ppt."""
    return pretrain("unified", kind)
