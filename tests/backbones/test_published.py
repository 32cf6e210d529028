"""Every published size is built from its config by shapes alone, and has the known parameters."""

import numpy as np
import pytest

from jaxprompt.backbones import make_backbone
from jaxprompt.build.backbone import model_family
from jaxprompt.models.model import backbone_shapes
from jaxprompt.planning.published import published_checkpoints
from jaxprompt.tree import count

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
    "mistralai/Mixtral-8x7B-v0.1": 46_702_792_704,
    "mistralai/Mixtral-8x22B-v0.1": 140_620_634_112,
    "openai/gpt-oss-20b": 20_914_757_184,
    "openai/gpt-oss-120b": 116_829_156_672,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
    "Qwen/Qwen3-235B-A22B": 235_093_634_560,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "google/gemma-2b": 2_506_172_416,
    "google/gemma-7b": 8_537_680_896,
    "google/gemma-2-2b": 2_614_341_888,
    "google/gemma-2-9b": 9_241_705_984,
    "google/gemma-3-270m": 268_098_176,
    "google/gemma-3-1b-pt": 999_885_952,
}
# Model types besides those of Llama, Mistral, Qwen and Gemma.
LATER = {
    "mistralai/Ministral-8B-Instruct-2410": 8_019_808_256,
    "microsoft/Phi-3-mini-4k-instruct": 3_821_079_552,
    "microsoft/Phi-4-mini-instruct": 3_836_021_760,
    "microsoft/phi-4": 14_659_507_200,
    "allenai/OLMo-2-0425-1B": 1_484_916_736,
    "allenai/OLMo-2-1124-7B": 7_298_617_344,
    "allenai/OLMo-2-1124-13B": 13_716_198_400,
    "allenai/Olmo-3-1025-7B": 7_298_011_136,
    "HuggingFaceTB/SmolLM3-3B": 3_075_098_624,
    "ibm-granite/granite-3.3-2b-instruct": 2_533_539_840,
    "ibm-granite/granite-3.3-8b-instruct": 8_170_864_640,
    "CohereLabs/c4ai-command-r7b-12-2024": 8_028_033_024,
    "zai-org/GLM-4-9B-0414": 9_400_279_040,
}
PYTHIAS = {
    "EleutherAI/pythia-70m": 70_426_624,
    "EleutherAI/pythia-160m": 162_322_944,
    "EleutherAI/pythia-410m": 405_334_016,
    "EleutherAI/pythia-1b": 1_011_781_632,
    "EleutherAI/pythia-1.4b": 1_414_647_808,
    "EleutherAI/pythia-2.8b": 2_775_208_960,
    "EleutherAI/pythia-6.9b": 6_857_302_016,
    "EleutherAI/pythia-12b": 11_846_072_320,
    "facebook/opt-125m": 125_239_296,
    "facebook/opt-1.3b": 1_315_758_080,
    "facebook/opt-2.7b": 2_651_596_800,
    "facebook/opt-6.7b": 6_658_473_984,
    "facebook/opt-13b": 12_853_473_280,
}
PARAMETERS = (
    LLAMAS
    | LATER
    | PYTHIAS
    | {
        "google-t5/t5-small": 60_506_624,
        "google-t5/t5-base": 222_903_552,
        "google-t5/t5-large": 737_668_096,
        "google-t5/t5-3b": 2_851_598_336,
        "google-t5/t5-11b": 11_307_321_344,
        "google/t5-v1_1-small": 76_961_152,
        "google/t5-v1_1-base": 247_577_856,
        "google/t5-v1_1-large": 783_150_080,
        "google/t5-v1_1-xl": 2_849_757_184,
        "google/t5-v1_1-xxl": 11_135_332_352,
        "google/mt5-small": 300_176_768,
        "google/mt5-base": 582_401_280,
        "google/mt5-large": 1_229_581_312,
        "google/mt5-xl": 3_742_619_648,
        "google/mt5-xxl": 12_921_057_280,
        "google/t5gemma-2b-2b-ul2": 5_596_853_760,
        "google/t5gemma-9b-9b-prefixlm": 20_333_401_088,
        "openai-community/gpt2": 124_439_808,
        "openai-community/gpt2-medium": 354_823_168,
        "openai-community/gpt2-large": 774_030_080,
        "openai-community/gpt2-xl": 1_557_611_200,
        # With the head of a masked language model.
        "microsoft/deberta-base": 139_244_121,
        "microsoft/deberta-xlarge": 758_905_945,
        "microsoft/deberta-v2-xlarge": 887_085_156,
        "microsoft/deberta-v3-base": 184_551_780,
        "albert/albert-xxlarge-v2": 206_368_944,
        "answerdotai/ModernBERT-large": 395_881_664,
        "facebook/xlm-roberta-xl": 3_482_741_760,
        "facebook/xlm-roberta-xxl": 10_712_994_816,
        "microsoft/mpnet-base": 109_518_527,
        "EuroBERT/EuroBERT-210m": 310_266_624,
        "EuroBERT/EuroBERT-610m": 755_625_600,
        "EuroBERT/EuroBERT-2.1B": 2_403_092_736,
        "THUDM/glm-2b": 1_920_122_880,
        "THUDM/glm-10b": 9_880_682_496,
    }
)
# model_type -> classes of transformers
TORCH = {
    "phi3": ("Phi3Config", "Phi3ForCausalLM"),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM"),
    "olmo3": ("Olmo3Config", "Olmo3ForCausalLM"),
    "smollm3": ("SmolLM3Config", "SmolLM3ForCausalLM"),
    "granite": ("GraniteConfig", "GraniteForCausalLM"),
    "cohere2": ("Cohere2Config", "Cohere2ForCausalLM"),
    "glm4": ("Glm4Config", "Glm4ForCausalLM"),
    "gpt_neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM"),
    "opt": ("OPTConfig", "OPTForCausalLM"),
    "t5": ("T5Config", "T5ForConditionalGeneration"),
    "mt5": ("T5Config", "T5ForConditionalGeneration"),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel"),
    "deberta": ("DebertaConfig", "DebertaForMaskedLM"),
    "deberta-v2": ("DebertaV2Config", "DebertaV2ForMaskedLM"),
    "albert": ("AlbertConfig", "AlbertForMaskedLM"),
    "modernbert": ("ModernBertConfig", "ModernBertForMaskedLM"),
    "mpnet": ("MPNetConfig", "MPNetForMaskedLM"),
    "xlm-roberta-xl": ("XLMRobertaXLConfig", "XLMRobertaXLForMaskedLM"),
    "eurobert": ("EuroBertConfig", "EuroBertForMaskedLM"),
    "t5gemma": ("T5GemmaConfig", "T5GemmaForConditionalGeneration"),
}


def shapes_of(name, stack="scan"):
    """Returns the shapes of a backbone's parameters; nothing is computed."""
    hf = published_checkpoints()[name].hf
    heads = tuple(head for head in published_checkpoints()[name].heads if head != "pooler")
    heads = heads or ("mlm",)  # DeBERTa v3
    return backbone_shapes(make_backbone(model_family(hf["model_type"]), hf, heads, stack=stack))


def counted_by_torch(hf):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    config_class, model_class = (getattr(transformers, name) for name in TORCH[hf["model_type"]])
    fields = {field: value for field, value in hf.items() if field != "model_type"}
    with torch.device("meta"):
        model = model_class(config_class(**fields))
    total = sum(parameter.numel() for parameter in model.parameters())
    # Today's transformers ties on making a model what the checkpoints hold untied.
    is_untied = hf["model_type"] in ("t5", "mt5") and "tie_word_embeddings" in hf
    return total + hf["vocab_size"] * hf["d_model"] if is_untied else total


def test_every_llama_is_counted():
    names = {
        name
        for name, x in published_checkpoints().items()
        if model_family(x.hf["model_type"]) == "llama"
    }
    assert names == LLAMAS.keys() | LATER.keys()


@pytest.mark.default_cases(
    *LLAMAS, "google-t5/t5-small", "google/t5-v1_1-xxl", "google/mt5-small", "google/mt5-base",
    "openai-community/gpt2*", "microsoft/deberta-xlarge", "microsoft/deberta-v3-base",
    "answerdotai/ModernBERT-large", "THUDM/glm-2b", "THUDM/glm-10b",
)  # fmt: skip
@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters(name):
    hf = published_checkpoints()[name].hf
    assert count(shapes_of(name)) == PARAMETERS[name]
    if hf["model_type"] in TORCH:
        assert counted_by_torch(hf) == PARAMETERS[name]


@pytest.mark.long_cases("google-t5/t5-11b")
@pytest.mark.parametrize("name", ["google-t5/t5-11b", "google/mt5-small"])
def test_unrolled_has_the_same_shapes(name):
    leaves = {path: leaf.shape for path, leaf in shapes_of(name, "unroll").items()}
    assert leaves == {path: leaf.shape for path, leaf in shapes_of(name).items()}
    hf = published_checkpoints()[name].hf
    inner = (hf["num_heads"], hf["d_kv"])
    kernel = leaves["backbone/decoder_layers/cross/query/kernel"]
    assert kernel == (hf["num_layers"], hf["d_model"], *inner)
    assert np.prod(inner) != hf["d_model"]
