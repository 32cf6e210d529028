"""Soft prompts and prefixes on decoders against PEFT: equal numbers give equal logits."""

import jax
import numpy as np
import pytest
import transformers
from reference_peft import peft
from tiny import jit

from jaxprompt.backbones import make_backbone
from jaxprompt.convert.folder import read_config
from jaxprompt.convert.load import load_backbone
from jaxprompt.convert.peft import read_peft, write_peft
from jaxprompt.models.model import Model
from jaxprompt.models.text_keys import text_keys
from jaxprompt.prompts import make_prompt
from jaxprompt.types import Batch, Tokens

torch = pytest.importorskip("torch")
cartridge = pytest.importorskip("peft.tuners.cartridge.utils")

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")

TOLERANCE = 1e-4  # max abs, float32
P, VOCAB = 4, 60
T5 = dict(
    vocab_size=VOCAB, d_model=24, num_heads=4, d_kv=6, d_ff=40, num_layers=4,
    feed_forward_proj="gated-gelu", decoder_start_token_id=0,
    relative_attention_num_buckets=8, relative_attention_max_distance=12,
)  # fmt: skip
GPT2 = dict(vocab_size=VOCAB, n_embd=24, n_layer=3, n_head=4, n_positions=32)
LLAMA = dict(
    vocab_size=VOCAB, hidden_size=24, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, intermediate_size=40, max_position_embeddings=32, bos_token_id=1,
    eos_token_id=2, tie_word_embeddings=True,
)  # fmt: skip
KEY_HEADS = {"gpt2": 4, "llama": 2}


def base_model(folder, family, **changes):
    """Saves a random model and returns it as torch reads it."""
    torch.manual_seed(1)
    torch.set_num_threads(1)
    if family == "t5":
        cls, config = transformers.T5ForConditionalGeneration, transformers.T5Config(**T5 | changes)
    elif family == "llama":
        cls, config = transformers.LlamaForCausalLM, transformers.LlamaConfig(**LLAMA | changes)
    else:
        cls, config = transformers.GPT2LMHeadModel, transformers.GPT2Config(**GPT2 | changes)
    model = cls(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return cls.from_pretrained(folder).eval()


def with_adapter(model, kind, folder, **fields):
    """Wraps a model in a random adapter and saves it."""
    config_class = {"soft": peft.PromptTuningConfig, "prefix": peft.PrefixTuningConfig}[kind]
    task = "SEQ_2_SEQ_LM" if model.config.is_encoder_decoder else "CAUSAL_LM"
    model = peft.get_peft_model(model, config_class(task_type=task, num_virtual_tokens=P, **fields))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "prompt_encoder" in name:
                parameter.normal_()
    model.save_pretrained(folder)
    return model.eval()


def text(seed=5, lengths=(7, 4, 2)):
    """Draws right-padded ids. -> ids, mask [B, T]"""
    mask = np.arange(max(lengths))[None] < np.array(lengths)[:, None]
    ids = np.random.default_rng(seed).integers(5, VOCAB, mask.shape)
    return np.where(mask, ids, 0), mask


def tokens_of(ids, mask, slots=0, shift=0):
    """Lays soft tokens in front, or moves the positions."""
    width = [(0, 0), (slots, 0)]
    slot = np.pad(np.full(ids.shape, -1), width) + np.pad(0 * ids, width)
    slot[:, :slots] = np.arange(slots)
    ids, mask = np.pad(ids, width), np.pad(mask, width, constant_values=True)
    positions = np.where(mask, mask.cumsum(1) - 1 + shift, 0)
    ids, slot, positions = (x.astype(np.int32) for x in (ids, slot, positions))
    return Tokens(ids, mask, slot, positions, 0 * ids, np.zeros(ids.shape, np.int8))


def our_logits(folder, prompt_name, fields, table, encoder, decoder=None):
    """Puts a table into our method and runs the loaded backbone. -> [B, T, V]"""
    config = read_config(folder)
    family = config["model_type"]
    backbone, report = load_backbone(folder, family, config)
    assert report.tied
    module = make_backbone(family, config, report.heads)
    prompt = make_prompt(prompt_name, module.dims, **fields)
    rows = np.arange(len(encoder.ids), dtype=np.int32)
    batch = Batch(encoder, 0 * rows[:, None], 0 * rows, np.ones(len(rows)), rows, decoder)
    model = Model(module, prompt, {})
    drawn = jax.eval_shape(lambda: model.init(jax.random.key(0), backbone))["prompt"]
    assert jax.tree.map(np.shape, drawn) == jax.tree.map(np.shape, table)

    @jit
    def logits(params):
        bound = module.bind({"params": params["backbone"]})
        return bound.lm_features(model.hidden(params, batch)) @ bound.lm_table()[0].T

    return np.asarray(logits({"backbone": backbone, "prompt": table}))


def prefix_table(adapter):
    return np.stack([adapter.k, adapter.v], axis=1)  # [L, 2, P, N, D]


def their_logits(model, ids, mask, **more):
    with torch.no_grad():
        return model(
            input_ids=torch.tensor(ids), attention_mask=torch.tensor(mask).long(), **more
        ).logits.numpy()


def assert_agree(found, expected, mask):
    assert found.shape == expected.shape
    assert np.abs(found - expected)[mask].max() <= TOLERANCE
    assert np.abs(expected[mask]).max() > 0.3


@pytest.mark.long_cases("gpt2-soft")
@pytest.mark.parametrize("kind", ["soft", "prefix"])
@pytest.mark.parametrize("family", KEY_HEADS)
def test_a_decoder(tmp_path, family, kind):
    """Soft tokens take the positions 0 .. P - 1; behind a prefix the text starts at P."""
    base = base_model(tmp_path / "base", family)
    theirs = with_adapter(base, kind, tmp_path / "adapter")
    ids, mask = text()
    adapter = read_peft(tmp_path / "adapter")
    assert adapter.stream == "encoder"
    if kind == "soft":
        table, tokens = adapter.soft, tokens_of(ids, mask, slots=P)
    else:
        table, tokens = prefix_table(adapter), tokens_of(ids, mask, shift=P)
    found = our_logits(tmp_path / "base", kind, dict(length=P), {"table": table}, tokens)
    assert_agree(found, their_logits(theirs, ids, mask), tokens.mask)

    prefix = None if kind == "soft" else (adapter.k, adapter.v)
    write_peft(
        tmp_path / "ours", base="tiny", layers=3, heads=KEY_HEADS[family], soft=adapter.soft,
        prefix=prefix, task_type="CAUSAL_LM",
    )  # fmt: skip
    plain = base_model(tmp_path / "base", family)
    loaded = peft.PeftModel.from_pretrained(plain, tmp_path / "ours").eval()
    np.testing.assert_array_equal(their_logits(loaded, ids, mask), their_logits(theirs, ids, mask))


@pytest.mark.long
@pytest.mark.parametrize("modules", [1, 2])
def test_t5_soft_prompt(tmp_path, modules):
    """PEFT's second half of rows, which a decoder once took, is never used."""
    base = base_model(tmp_path / "base", "t5", d_kv=10)
    theirs = with_adapter(base, "soft", tmp_path / "adapter", num_transformer_submodules=modules)
    (ids, mask), (fed, fed_mask) = text(), text(6, (3, 5, 1))
    expected = their_logits(theirs, ids, mask, decoder_input_ids=torch.tensor(fed))
    adapter = read_peft(tmp_path / "adapter")
    rows = theirs.get_prompt_embedding_to_save("default").numpy()
    assert len(rows) == modules * P
    np.testing.assert_array_equal(adapter.soft, rows[:P])
    streams = tokens_of(ids, mask, slots=P), tokens_of(fed, fed_mask)
    found = our_logits(tmp_path / "base", "soft", dict(length=P), {"table": adapter.soft}, *streams)
    assert_agree(found, expected, fed_mask)

    write_peft(
        tmp_path / "ours", base="tiny", layers=4, heads=4, soft=adapter.soft,
        task_type="SEQ_2_SEQ_LM",
    )  # fmt: skip
    again = read_peft(tmp_path / "ours")
    assert again.config["num_transformer_submodules"] == 1
    np.testing.assert_array_equal(again.soft, adapter.soft)
    plain = base_model(tmp_path / "base", "t5", d_kv=10)
    loaded = peft.PeftModel.from_pretrained(plain, tmp_path / "ours").eval()
    np.testing.assert_array_equal(
        their_logits(loaded, ids, mask, decoder_input_ids=torch.tensor(fed)), expected
    )


@pytest.mark.long_cases("4-*")
@pytest.mark.parametrize("layers, head_dim", [(4, 6), (3, 6), (4, 10)])
def test_t5_prefix(tmp_path, layers, head_dim):
    """PEFT's prefix is a decoder-self prefix of ours, some of its rows used twice, some never."""
    base = base_model(tmp_path / "base", "t5", num_layers=layers, d_kv=head_dim)
    fields = {"token_dim": 4 * head_dim}
    theirs = with_adapter(base, "prefix", tmp_path / "adapter", **fields)
    (ids, mask), (fed, fed_mask) = text(), text(6, (3, 5, 1))
    expected = their_logits(theirs, ids, mask, decoder_input_ids=torch.tensor(fed))
    adapter = read_peft(tmp_path / "adapter")
    assert adapter.stream == "decoder" and adapter.k.shape == (layers, P, 4, head_dim)
    streams = tokens_of(ids, mask), tokens_of(fed, fed_mask, shift=P)
    table = {"decoder_table": prefix_table(adapter)}
    found = our_logits(tmp_path / "base", "prefix", dict(length=0, decoder=P), table, *streams)
    assert_agree(found, expected, fed_mask)
    half = np.roll(adapter.k, layers // 2, axis=0)
    assert (layers % 2 == 0) == np.array_equal(half, adapter.k)  # layers share rows in pairs


@pytest.mark.parametrize("family", KEY_HEADS)
def test_a_prefix_from_a_text_starts_as_in_peft(tmp_path, family):
    """Past keys of the first P tokens, as PEFT takes them over."""
    base = base_model(tmp_path / "base", family)
    ids = np.random.default_rng(2).integers(5, VOCAB, 9)
    with torch.no_grad():
        past = base(input_ids=torch.tensor(ids)[None], use_cache=True).past_key_values
    config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=P)
    theirs = peft.get_peft_model(base, config)
    cartridge.initialize_kv_prefix_from_past_key_values(theirs, past_key_values=past)
    theirs.save_pretrained(tmp_path / "adapter")
    adapter = read_peft(tmp_path / "adapter")
    config = read_config(tmp_path / "base")
    backbone, report = load_backbone(tmp_path / "base", family, config)
    module = make_backbone(family, config, report.heads)
    found = text_keys(module, backbone, ids[:P])["encoder"]
    for values, expected in zip(found, (adapter.k, adapter.v), strict=True):
        np.testing.assert_allclose(values, expected, rtol=0, atol=1e-5)
