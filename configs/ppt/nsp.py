"""Next-sentence prediction in three classes, which pre-trains prompts for pairs of texts."""

from configs.ppt import pretrain


def get_config(kind="t5"):
    """Returns one run; give corpus.path and backbone.path. Kinds: see configs/ppt."""
    return pretrain("nsp", kind)
