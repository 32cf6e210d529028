"""Shapes of published checkpoints, so that a run can be planned before the download.

Hub id -> the fields of its config.json that shapes depend on, and the heads that it contains.
"""

import functools
from typing import Any, NamedTuple

from jaxprompt.planning.published_llama import list_llamas


class PublishedCheckpoint(NamedTuple):
    """One checkpoint."""

    hf: dict[str, Any]
    heads: tuple[str, ...]


def _t5(width: int, layers: int, heads: int, mlp: int, head_dim: int = 64) -> dict[str, Any]:
    return dict(
        model_type="t5",
        d_model=width,
        num_layers=layers,
        num_heads=heads,
        d_ff=mlp,
        d_kv=head_dim,
        vocab_size=32128,
        pad_token_id=0,
        decoder_start_token_id=0,
        dropout_rate=0.1,
    )


# Raffel et al. 2020, appendix and repository.
_T5 = {
    "small": _t5(512, 6, 8, 2048),
    "base": _t5(768, 12, 12, 3072),
    "large": _t5(1024, 24, 16, 4096),
    "3b": _t5(1024, 24, 32, 16384, 128),
    "11b": _t5(1024, 24, 128, 65536, 128),
}
_GATED = dict(feed_forward_proj="gated-gelu", tie_word_embeddings=False)
# T5 1.1; LM-adapted, flan and mT5 (Xue et al. 2021, table 1) have the same shapes.
_T5_1_1 = {
    "small": _t5(512, 8, 6, 1024) | _GATED,
    "base": _t5(768, 12, 12, 2048) | _GATED,
    "large": _t5(1024, 24, 16, 2816) | _GATED,
    "xl": _t5(2048, 24, 32, 5120) | _GATED,
    "xxl": _t5(4096, 24, 64, 10240) | _GATED,
}
_MT5 = dict(model_type="mt5", vocab_size=250112)
# Radford et al. 2019, table 2: width, layers, heads.
_GPT2 = {"": (768, 12, 12), "-medium": (1024, 24, 16), "-large": (1280, 36, 20)}
_GPT2["-xl"] = (1600, 48, 25)
_BASE, _LARGE = (768, 12, 12), (1024, 24, 16)
_BERT = {
    "bert-base-uncased": (_BASE, 30522),
    "bert-base-cased": (_BASE, 28996),
    "bert-base-chinese": (_BASE, 21128),
    "bert-base-multilingual-cased": (_BASE, 119547),
    "bert-base-multilingual-uncased": (_BASE, 105879),
    "bert-large-uncased": (_LARGE, 30522),
    "bert-large-cased": (_LARGE, 28996),
    "bert-large-uncased-whole-word-masking": (_LARGE, 30522),
    "bert-large-cased-whole-word-masking": (_LARGE, 28996),
}
# Sanh et al. 2019: half of BERT base's layers.
_DISTILBERT = dict(
    model_type="distilbert", dim=768, n_layers=6, n_heads=12, hidden_dim=3072,
    max_position_embeddings=512,
)  # fmt: skip
_DISTILBERT_VOCABS = {
    "distilbert-base-uncased": 30522,
    "distilbert-base-cased": 28996,
    "distilbert-base-multilingual-cased": 119547,
}


def _bart(width: int, layers: int, heads: int) -> dict[str, Any]:
    stacks = {
        f"{stack}_{name}": value
        for stack in ("encoder", "decoder")
        for name, value in dict(layers=layers, attention_heads=heads, ffn_dim=4 * width).items()
    }
    return stacks | dict(
        model_type="bart", d_model=width, vocab_size=50265, max_position_embeddings=1024
    )


# Lewis et al. 2020, section 2.1: layers of each stack.
_BART = {"facebook/bart-base": _bart(768, 6, 12), "facebook/bart-large": _bart(1024, 12, 16)}


# He et al. 2021: both versions of DeBERTa, and mDeBERTa.
_XLARGE = dict(conv_kernel_size=3, conv_act="gelu")
_DEBERTA: dict[str, tuple[tuple[int, int, int], int, dict[str, Any]]] = {
    "deberta-base": (_BASE, 50265, {}),
    "deberta-large": (_LARGE, 50265, {}),
    "deberta-xlarge": ((1024, 48, 16), 50265, {}),
    "deberta-v2-xlarge": ((1536, 24, 24), 128100, _XLARGE),
    "deberta-v2-xxlarge": ((1536, 48, 24), 128100, _XLARGE),
    "deberta-v3-xsmall": ((384, 12, 6), 128100, {}),
    "deberta-v3-small": ((768, 6, 12), 128100, {}),
    "deberta-v3-base": (_BASE, 128100, {}),
    "deberta-v3-large": (_LARGE, 128100, {}),
    "mdeberta-v3-base": (_BASE, 251000, {}),
}
_RELATIVE: dict[str, Any] = dict(
    type_vocab_size=0, relative_attention=True, position_biased_input=False,
    pos_att_type=["p2c", "c2p"],
)  # fmt: skip
_V2: dict[str, Any] = dict(position_buckets=256, norm_rel_ebd="layer_norm", share_att_key=True)
# Lan et al. 2020, table 1.
_ALBERT = {"base": _BASE, "large": _LARGE, "xlarge": (2048, 24, 16), "xxlarge": (4096, 12, 64)}
# Warner et al. 2024, table 4: also the width of the feed-forward blocks.
_MODERNBERT = {"base": ((768, 22, 12), 1152), "large": ((1024, 28, 16), 2624)}


def _t5gemma(width: int, layers: int, heads: int, key_heads: int, mlp: int) -> dict[str, Any]:
    block = dict(
        vocab_size=256000,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        intermediate_size=mlp,
        head_dim=256,
        max_position_embeddings=8192,
    )
    return dict(model_type="t5gemma", encoder=block, decoder=block)


# Zhang et al. 2025: a Gemma 2 for each part.
_T5GEMMA = {
    f"google/t5gemma-{size}-{objective}": hf
    for size, hf in (
        ("2b-2b", _t5gemma(2304, 26, 8, 4, 9216)),
        ("9b-9b", _t5gemma(3584, 42, 16, 8, 14336)),
    )
    for objective in ("ul2", "prefixlm")
}


def _glm(width: int, layers: int, heads: int) -> dict[str, Any]:
    return dict(
        model_type="glm",
        vocab_size=50304,
        hidden_size=width,
        num_layers=layers,
        num_attention_heads=heads,
        max_sequence_length=1024,
        block_position_encoding=True,
    )


# Du et al. 2022, and the release's settings.
_GLM = {"THUDM/glm-2b": _glm(2048, 36, 32), "THUDM/glm-10b": _glm(4096, 48, 64)}
# Biderman et al. 2023, table 1: width, layers, heads, and the vocabulary padded to the devices.
_PYTHIA = {
    "70m": ((512, 6, 8), 50304),
    "160m": ((768, 12, 12), 50304),
    "410m": ((1024, 24, 16), 50304),
    "1b": ((2048, 16, 8), 50304),
    "1.4b": ((2048, 24, 16), 50304),
    "2.8b": ((2560, 32, 32), 50304),
    "6.9b": ((4096, 32, 32), 50432),
    "12b": ((5120, 36, 40), 50688),
}
# Zhang et al. 2022, table 1, except for 350M, whose norms follow the layers.
_OPT = {
    "125m": (768, 12, 12),
    "1.3b": (2048, 24, 32),
    "2.7b": (2560, 32, 32),
    "6.7b": (4096, 32, 32),
    "13b": (5120, 40, 40),
}
# Goyal et al. 2021, table 1.
_XLM_R_XL = {"xl": (2560, 36, 32), "xxl": (4096, 48, 32)}
# Boizard et al. 2025, table 1: width, layers, heads, heads of keys, MLP.
_EUROBERT = {
    "210m": (768, 12, 12, 12, 3072),
    "610m": (1152, 26, 18, 6, 4096),
    "2.1B": (2304, 32, 18, 6, 6144),
}
_ELECTRA = {"small": (256, 12, 4), "base": _BASE, "large": _LARGE}


def _encoder(
    model_type: str, shape: tuple[int, int, int], vocab: int, **fields: Any
) -> dict[str, Any]:
    width, layers, heads = shape
    return (
        dict(
            model_type=model_type,
            vocab_size=vocab,
            hidden_size=width,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            intermediate_size=4 * width,
            max_position_embeddings=512,
            type_vocab_size=2,
        )
        | fields
    )


_PYTHIAS = {
    f"EleutherAI/pythia-{size}": _encoder(
        "gpt_neox", shape, vocab, max_position_embeddings=2048, rotary_pct=0.25
    )
    for size, (shape, vocab) in _PYTHIA.items()
}
_OPTS = {
    f"facebook/opt-{size}": _encoder(
        "opt", shape, 50272, max_position_embeddings=2048, ffn_dim=4 * shape[0]
    )
    for size, shape in _OPT.items()
}


def _other_encoders() -> dict[str, tuple[dict[str, Any], str]]:
    """Returns the fields of XLM-R XL, MPNet and EuroBERT, and the head, by hub id."""
    mpnet = _encoder("mpnet", _BASE, 30527, max_position_embeddings=514)
    encoders = {
        "microsoft/mpnet-base": (mpnet, "mlm"),
        "sentence-transformers/all-mpnet-base-v2": (mpnet, "pooler"),
    }
    offset = dict(max_position_embeddings=514, type_vocab_size=1, pad_token_id=1)
    for size, shape in _XLM_R_XL.items():
        hf = _encoder("xlm-roberta-xl", shape, 250880, **offset)
        encoders[f"facebook/xlm-roberta-{size}"] = hf, "mlm"
    for size, (width, layers, heads, key_heads, mlp) in _EUROBERT.items():
        hf = _encoder(
            "eurobert", (width, layers, heads), 128256, num_key_value_heads=key_heads,
            intermediate_size=mlp, max_position_embeddings=8192, tie_word_embeddings=False,
            rope_theta=250000,
        )  # fmt: skip
        encoders[f"EuroBERT/EuroBERT-{size}"] = hf, "mlm"
    return encoders


@functools.cache
def published_checkpoints() -> dict[str, PublishedCheckpoint]:
    """Returns the known checkpoints by hub id, without the owner too if the hub allows it."""
    checkpoints: dict[str, PublishedCheckpoint] = {}

    def add(owner: str, name: str, hf: dict[str, Any], *heads: str, bare: bool = True) -> None:
        checkpoints[f"{owner}/{name}"] = PublishedCheckpoint(hf, heads)
        # The hub knows the oldest checkpoints without an owner too.
        if bare:
            checkpoints[name] = checkpoints[f"{owner}/{name}"]

    for size, hf in _T5.items():
        add("google-t5", f"t5-{size}", hf, "lm")
    for size, hf in _T5_1_1.items():
        for name in (f"t5-v1_1-{size}", f"t5-{size}-lm-adapt", f"flan-t5-{size}"):
            add("google", name, hf, "lm", bare=False)
        add("google", f"mt5-{size}", hf | _MT5, "lm", bare=False)
    for size, (width, layers, heads) in _GPT2.items():
        hf = dict(model_type="gpt2", vocab_size=50257, n_embd=width, n_layer=layers, n_head=heads)
        add("openai-community", f"gpt2{size}", hf | {"n_positions": 1024}, "lm")
    for name, (shape, vocab) in _BERT.items():
        add("google-bert", name, _encoder("bert", shape, vocab), "pooler", "mlm")
    offset = dict(max_position_embeddings=514, type_vocab_size=1, pad_token_id=1)
    for size, shape in (("base", _BASE), ("large", _LARGE)):
        hf = _encoder("roberta", shape, 50265, **offset)
        add("FacebookAI", f"roberta-{size}", hf, "pooler", "mlm")
        hf = _encoder("xlm-roberta", shape, 250002, **offset)
        add("FacebookAI", f"xlm-roberta-{size}", hf, "pooler", "mlm")
    for name, (hf, head) in _other_encoders().items():
        owner, _, repository = name.partition("/")
        add(owner, repository, hf, head, bare=False)
    for name, vocab in _DISTILBERT_VOCABS.items():
        add("distilbert", name, _DISTILBERT | {"vocab_size": vocab}, "mlm")
    for size, shape in _ELECTRA.items():
        hf = _encoder("electra", shape, 30522, embedding_size=128 if size == "small" else shape[0])
        add("google", f"electra-{size}-discriminator", hf, "rtd", bare=False)
    for name, (shape, vocab, more) in _DEBERTA.items():
        kind = "deberta-v2" if "-v" in name else "deberta"
        hf = _encoder(kind, shape, vocab, **_RELATIVE)
        hf |= (_V2 if "-v" in name else {}) | more
        # v3 is pre-trained by replaced tokens, with a head that transformers has not.
        lm_heads = () if "-v3" in name else ("mlm",)
        add("microsoft", name, hf, *lm_heads, bare=False)
    for size, shape in _ALBERT.items():
        hf = _encoder("albert", shape, 30000, embedding_size=128)
        for version in ("v1", "v2"):
            add("albert", f"albert-{size}-{version}", hf, "pooler", "mlm")
    for size, (shape, mlp) in _MODERNBERT.items():
        hf = _encoder(
            "modernbert", shape, 50368, intermediate_size=mlp, max_position_embeddings=8192
        )
        add("answerdotai", f"ModernBERT-{size}", hf, "mlm", bare=False)
    decoders = _GLM | _PYTHIAS | _OPTS | list_llamas()
    for name, hf in (_BART | _T5GEMMA | decoders).items():
        owner, _, repository = name.partition("/")
        add(owner, repository, hf, "lm", bare=False)
    return checkpoints
