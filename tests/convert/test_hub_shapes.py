"""Published shapes against the parameter counts that transformers gives for the checkpoints."""

import math

import pytest

from jaxprompt.config.run import BackboneConfig
from jaxprompt.models.model import backbone_shapes
from jaxprompt.planning.abstract_run import open_or_published
from jaxprompt.planning.published import published_checkpoints

# Of AutoModelForPreTraining, or ForConditionalGeneration; each table once.
COUNTS = {
    "google-t5/t5-small": 60_506_624,
    "t5-base": 222_903_552,
    "google-t5/t5-large": 737_668_096,
    "google-t5/t5-3b": 2_851_598_336,
    "google-t5/t5-11b": 11_307_321_344,
    "google/t5-v1_1-small": 76_961_152,
    "google/t5-base-lm-adapt": 247_577_856,
    "google/flan-t5-large": 783_150_080,
    "google/t5-xl-lm-adapt": 2_849_757_184,
    "google/t5-v1_1-xxl": 11_135_332_352,
    "google/mt5-small": 300_176_768,
    "google/mt5-base": 582_401_280,
    "google/mt5-large": 1_229_581_312,
    "google/mt5-xl": 3_742_619_648,
    "google/mt5-xxl": 12_921_057_280,
    "openai-community/gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "openai-community/gpt2-xl": 1_557_611_200,
    "facebook/bart-base": 139_420_416,
    "facebook/bart-large": 406_291_456,
    "distilbert-base-uncased": 66_985_530,
    "distilbert/distilbert-base-cased": 65_812_036,
    # The trunk with its pooler, and the masked-language-model head beside the word table.
    "google-bert/bert-base-uncased": 109_482_240 + 590_592 + 1_536 + 30_522,
    "bert-large-uncased": 335_141_888 + 1_049_600 + 2_048 + 30_522,
    "FacebookAI/roberta-base": 124_645_632 + 590_592 + 1_536 + 50_265,
    "roberta-large": 355_359_744 + 1_049_600 + 2_048 + 50_265,
}


@pytest.mark.long_cases(
    "google/t5-v1_1-*",
    "t5-base",
    "google-t5/t5-large",
    "google/t5-xl-lm-adapt",
    "google/mt5-large",
    "google/mt5-xl",
)
@pytest.mark.parametrize("name", COUNTS)
def test_counts_are_those_of_the_checkpoints(name):
    backbone, notes = open_or_published(BackboneConfig(path=name))
    shapes = backbone_shapes(backbone.module).values()
    assert sum(math.prod(leaf.shape) for leaf in shapes) == COUNTS[name]
    assert name in notes[0]


@pytest.mark.parametrize("name", sorted(published_checkpoints()))
def test_every_shape_makes_a_backbone(name):
    backbone, _ = open_or_published(BackboneConfig(path=name))
    dims = backbone.module.dims
    hf = published_checkpoints()[name].hf
    assert dims.layers and dims.vocab == hf.get("encoder", hf)["vocab_size"]
