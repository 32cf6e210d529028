"""Every published size is built from its config by shapes alone, and has the known parameters."""

import math

import jax
import numpy as np
import pytest

from jaxprompt.backbones import make_backbone
from jaxprompt.build.backbone import get_family
from jaxprompt.models.model import backbone_shapes
from jaxprompt.planning.published import published
from jaxprompt.tree import count, flatten
from jaxprompt.types import Batch, Tokens

# d_model, d_kv, d_ff, layers of each stack, heads
T5 = {
    "t5-small": (512, 64, 2048, 6, 8),
    "t5-base": (768, 64, 3072, 12, 12),
    "t5-large": (1024, 64, 4096, 24, 16),
    "t5-3b": (1024, 128, 16384, 24, 32),
    "t5-11b": (1024, 128, 65536, 24, 128),
}
# Also those of the LM-adapted and of flan.
T5_V1_1 = {
    "small": (512, 64, 1024, 8, 6),
    "base": (768, 64, 2048, 12, 12),
    "large": (1024, 64, 2816, 24, 16),
    "xl": (2048, 64, 5120, 24, 32),
    "xxl": (4096, 64, 10240, 24, 64),
}
# width, layers, heads
GPT2 = {
    "gpt2": (768, 12, 12),
    "gpt2-medium": (1024, 24, 16),
    "gpt2-large": (1280, 36, 20),
    "gpt2-xl": (1600, 48, 25),
}
PARAMETERS = {
    "t5-small": 60_506_624,
    "t5-base": 222_903_552,
    "t5-large": 737_668_096,
    "t5-3b": 2_851_598_336,
    "t5-11b": 11_307_321_344,
    "t5-v1_1-small": 76_961_152,
    "t5-v1_1-base": 247_577_856,
    "t5-v1_1-large": 783_150_080,
    "t5-v1_1-xl": 2_849_757_184,
    "t5-v1_1-xxl": 11_135_332_352,
    "mt5-small": 300_176_768,
    "mt5-base": 582_401_280,
    "mt5-large": 1_229_581_312,
    "mt5-xl": 3_742_619_648,
    "mt5-xxl": 12_921_057_280,
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
}
LLAMAS = {
    "HuggingFaceTB/SmolLM2-135M": 134_515_008,
    "HuggingFaceTB/SmolLM2-360M": 361_821_120,
    "HuggingFaceTB/SmolLM2-1.7B": 1_711_376_384,
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": 1_100_048_384,
    "meta-llama/Llama-2-7b-hf": 6_738_415_616,
    "meta-llama/Llama-2-13b-hf": 13_015_864_320,
    "meta-llama/Llama-2-70b-hf": 68_976_648_192,
    "meta-llama/Llama-3.1-8B": 8_030_261_248,
    "meta-llama/Llama-3.1-70B": 70_553_706_496,
    "meta-llama/Llama-3.2-1B": 1_235_814_400,
    "meta-llama/Llama-3.2-3B": 3_212_749_824,
    "mistralai/Mistral-7B-v0.1": 7_241_732_096,
    "mistralai/Mistral-7B-v0.3": 7_248_023_552,
    "Qwen/Qwen2.5-0.5B": 494_032_768,
    "Qwen/Qwen2.5-1.5B": 1_543_714_304,
    "Qwen/Qwen2.5-7B": 7_615_616_512,
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "google/gemma-2b": 2_506_172_416,
    "google/gemma-7b": 8_537_680_896,
    "google/gemma-2-2b": 2_614_341_888,
    "google/gemma-2-9b": 9_241_705_984,
    "google/gemma-3-270m": 268_098_176,
    "google/gemma-3-1b-pt": 999_885_952,
}


def t5_config(sizes, vocab, **more):
    names = ("d_model", "d_kv", "d_ff", "num_layers", "num_heads")
    return dict(zip(names, sizes, strict=True), vocab_size=vocab, pad_token_id=0) | more


UNTIED = dict(feed_forward_proj="gated-gelu", tie_word_embeddings=False)
CONFIGS = {name: t5_config(sizes, 32128) for name, sizes in T5.items()}
for size, sizes in T5_V1_1.items():
    CONFIGS[f"t5-v1_1-{size}"] = t5_config(sizes, 32128, **UNTIED)
    CONFIGS[f"mt5-{size}"] = t5_config(sizes, 250112, **UNTIED, model_type="mt5")
for name, (width, layers, heads) in GPT2.items():
    CONFIGS[name] = dict(
        n_embd=width, n_layer=layers, n_head=heads, vocab_size=50257, n_positions=1024
    )


def counted_by_hand(hf):
    """Counts from the papers' description of a block."""
    if "n_embd" in hf:
        h = hf["n_embd"]
        block = 4 * h * h + 4 * h + 8 * h * h + 5 * h + 4 * h
        return (50257 + 1024) * h + hf["n_layer"] * block + 2 * h
    h, inner = hf["d_model"], hf["num_heads"] * hf["d_kv"]
    untied = "tie_word_embeddings" in hf
    mlp = (3 if untied else 2) * h * hf["d_ff"]
    block = 4 * h * inner + mlp + 2 * h, 8 * h * inner + mlp + 3 * h
    tables = (2 if untied else 1) * hf["vocab_size"] * h
    return tables + hf["num_layers"] * sum(block) + 2 * 32 * hf["num_heads"] + 2 * h


def counted_by_torch(hf):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    if "n_embd" in hf:
        config, kind = transformers.GPT2Config(**hf), transformers.GPT2LMHeadModel
    else:
        config, kind = transformers.T5Config(**hf), transformers.T5ForConditionalGeneration
    with torch.device("meta"):
        model = kind(config)
    total = sum(parameter.numel() for parameter in model.parameters())
    # Today's transformers ties on making a model what the checkpoints hold untied.
    return total + hf["vocab_size"] * hf["d_model"] if "tie_word_embeddings" in hf else total


def abstract(hf, **options):
    """Returns the shapes of a backbone's parameters; nothing is computed."""
    plain = "gpt2" if "n_embd" in hf else "t5"
    family = get_family(hf["model_type"]) if "model_type" in hf else plain
    module = make_backbone(family, hf, ("lm",), **options)
    ids, rows = np.zeros((1, 2), np.int32), np.zeros(1, np.int32)
    tokens = Tokens(ids, ids == 0, ids - 1, ids, ids, ids)
    batch = Batch(tokens, ids, rows, rows, rows, decoder=tokens if family == "t5" else None)
    init = lambda key: module.init(key, batch, method="init_all")["params"]
    return jax.eval_shape(init, jax.random.key(0))


@pytest.mark.parametrize("name", LLAMAS)
def test_llamas(name):
    module = make_backbone("llama", published()[name].hf, ("lm",), stack="scan")
    shapes = backbone_shapes(module).values()
    assert sum(math.prod(leaf.shape) for leaf in shapes) == LLAMAS[name]


def test_every_llama_is_counted():
    found = {
        name for name, own in published().items() if get_family(own.hf["model_type"]) == "llama"
    }
    assert found == LLAMAS.keys()


def test_all_are_here():
    assert CONFIGS.keys() == PARAMETERS.keys()


@pytest.mark.default_cases(
    "t5-small", "t5-v1_1-xxl", "mt5-small", "mt5-base", "gpt2", "gpt2-medium", "gpt2-xl"
)
@pytest.mark.parametrize("name", PARAMETERS)
def test_published_size(name):
    hf = CONFIGS[name]
    shapes = abstract(hf, stack="scan")
    assert count(shapes) == PARAMETERS[name] == counted_by_hand(hf) == counted_by_torch(hf)


@pytest.mark.long_cases("t5-11b")
@pytest.mark.parametrize("name", ["t5-11b", "mt5-small"])
def test_unrolled_has_the_same_shapes(name):
    leaves = flatten(abstract(CONFIGS[name], stack="unroll"))
    assert {n: x.shape for n, x in leaves.items()} == {
        n: x.shape for n, x in flatten(abstract(CONFIGS[name], stack="scan")).items()
    }
    hf = CONFIGS[name]
    inner = (hf["num_heads"], hf["d_kv"])
    kernel = leaves["decoder_layers/cross/query/kernel"]
    assert kernel.shape == (hf["num_layers"], hf["d_model"], *inner)
    assert np.prod(inner) != hf["d_model"]


# With the head of a masked language model.
ENCODERS = {
    "microsoft/deberta-base": ("Deberta", 139_244_121),
    "microsoft/deberta-xlarge": ("Deberta", 758_905_945),
    "microsoft/deberta-v2-xlarge": ("DebertaV2", 887_085_156),
    "microsoft/deberta-v3-base": ("DebertaV2", 184_551_780),
    "albert/albert-xxlarge-v2": ("Albert", 206_368_944),
    "answerdotai/ModernBERT-large": ("ModernBert", 395_881_664),
}


@pytest.mark.long_cases(
    "microsoft/deberta-base", "microsoft/deberta-v2-xlarge", "albert/albert-xxlarge-v2"
)
@pytest.mark.parametrize("name", ENCODERS)
def test_published_encoder(name):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    kind, known = ENCODERS[name]
    hf = published()[name].hf
    fields = {field: value for field, value in hf.items() if field != "model_type"}
    with torch.device("meta"):
        config = getattr(transformers, f"{kind}Config")(**fields)
        model = getattr(transformers, f"{kind}ForMaskedLM")(config)
    module = make_backbone(get_family(hf["model_type"]), hf, ("mlm",), stack="scan")
    ids, rows = np.zeros((1, 2), np.int32), np.zeros(1, np.int32)
    batch = Batch(Tokens(ids, ids == 0, ids - 1, ids, ids, ids), ids, rows, rows, rows)
    init = lambda key: module.init(key, batch, method="init_all")["params"]
    found = count(jax.eval_shape(init, jax.random.key(0)))
    assert found == known == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", ["THUDM/glm-2b", "THUDM/glm-10b"])
def test_published_glm(name):
    """Words, two tables of positions, and 12 H^2 + 13 H a layer; the output is the words' table."""
    hf = published()[name].hf
    vocabulary, width = hf["vocab_size"], hf["hidden_size"]
    layers, places = hf["num_layers"], 2 * (hf["max_sequence_length"] + 1)
    known = (vocabulary + places + 2) * width + layers * (12 * width**2 + 13 * width)
    found = count(flatten(abstract(hf, stack="scan")))
    assert found == known == {"THUDM/glm-2b": 1_920_122_880, "THUDM/glm-10b": 9_880_682_496}[name]
