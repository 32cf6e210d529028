"""Next-sentence selection among 6 options, which pre-trains prompts for multiple choice."""

from configs.ppt import pretrain


def get_config(kind="t5"):
    """Returns one run; give corpus.path and backbone.path. Kinds: see configs/ppt."""
    return pretrain("nss", kind)
