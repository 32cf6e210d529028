"""Pseudo-labels of single texts; give ppt.annotations besides."""

from configs.ppt import pretrain


def get_config(kind="t5"):
    """Returns one run; give corpus.path and backbone.path. Kinds: see configs/ppt."""
    return pretrain("cls", kind)
