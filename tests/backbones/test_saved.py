"""Saved folders in torch: every key in its place, the outputs of the model that was read."""

import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from folders import CARD, KINDS, save_model
from pairs import assert_near, compiled, draw_tokens, make_batch, read_ours

from jaxprompt.convert.folder import read_config
from jaxprompt.convert.load import load_backbone
from jaxprompt.convert.save import save_backbone
from jaxprompt.parallel.sharding import make_placement
from jaxprompt.types import Injection

torch = pytest.importorskip("torch")

MODEL = 1e-4  # max abs, float32
AUTO = {
    "bert-trunk": "AutoModel", "discriminator": "AutoModelForPreTraining",
    "t5": "AutoModelForSeq2SeqLM", "t5-gated": "AutoModelForSeq2SeqLM",
    "mt5": "AutoModelForSeq2SeqLM", "bart": "AutoModelForSeq2SeqLM", "gpt2": "AutoModelForCausalLM",
    "phi3": "AutoModelForCausalLM", "gpt_neox": "AutoModelForCausalLM",
    "opt": "AutoModelForCausalLM",
    "mixtral": "AutoModelForCausalLM", "qwen3-moe": "AutoModelForCausalLM",
    "gpt-oss": "AutoModelForCausalLM", "t5gemma": "AutoModelForSeq2SeqLM",
}  # fmt: skip


def read_torch(folder, name):
    """Reads a folder. -> (model, names of keys that are missing or unexpected)"""
    model, report = getattr(transformers, name).from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not report["mismatched_keys"]
    with torch.no_grad():
        for parameter in model.parameters():  # torch rounds by where a tensor begins
            parameter.data = parameter.data.clone()
    return model.eval(), sorted([*report["missing_keys"], *report["unexpected_keys"]])


def run_torch(model, batch):
    with torch.no_grad():
        ids = torch.tensor(batch.encoder.ids).long()
        if batch.decoder is None:
            out = model(input_ids=ids)
        else:
            out = model(
                input_ids=ids, decoder_input_ids=torch.tensor(batch.decoder.ids).long(),
                use_cache=False,
            )  # fmt: skip
    return (out.logits if "logits" in out else out.last_hidden_state).numpy()


def scores(module, batch):
    x = module(batch, Injection(), deterministic=True)
    heads = module.cfg.model_heads
    if "rtd" in heads:
        return module.rtd(x)
    if not heads & {"mlm", "lm"}:
        return x
    table, bias = module.lm_table()
    logits = jnp.einsum("bth,vh->btv", module.lm_features(x), table)
    return logits if bias is None else logits + bias


def round_trip(source, out, family):
    """Reads a folder to eight devices, and saves it from there."""
    place, config = make_placement(2, 4, fsdp=True), read_config(source)
    loaded = load_backbone(source, family, config, placement=place)
    save_backbone(out, family, config, loaded.params, tokenizer=source, card=CARD, run="r")


@pytest.mark.default_cases(
    "bert-untied",
    "roberta",
    "xlm-roberta",
    "albert",
    "deberta-v2",
    "mt5",
    "bart",
    "gpt2",
    "gpt-oss",
)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "bert-both"])
def test_torch_loads_and_scores_it_alike(tmp_path, kind):
    torch.set_num_threads(1)
    family, name, _ = KINDS[kind]
    save_model(tmp_path / "in", kind)
    round_trip(tmp_path / "in", tmp_path / "out", family)
    tokens = lambda seed: draw_tokens(53, lengths=(9, 9, 9), seed=seed)
    batch = make_batch(tokens(0), tokens(1) if family in ("t5", "t5gemma", "bart") else None)
    before, _ = read_torch(tmp_path / "in", name)
    after, astray = read_torch(tmp_path / "out", AUTO.get(kind, "AutoModelForMaskedLM"))
    assert type(after) is type(before) and not astray
    expected, actual = run_torch(before, batch), run_torch(after, batch)
    np.testing.assert_array_equal(actual, expected)
    assert expected.std() > 0.03  # 1e-4 of numbers like these means something
    module, params, _ = read_ours(tmp_path / "out", family)
    assert_near(compiled(module, scores)(params, batch), actual, MODEL)


def test_a_pooler_beside_the_head_is_kept_though_torchs_masked_lm_has_none(tmp_path):
    save_model(tmp_path / "in", "bert-both")
    round_trip(tmp_path / "in", tmp_path / "out", "bert")
    _, astray = read_torch(tmp_path / "out", "AutoModelForMaskedLM")
    assert astray == ["bert.pooler.dense.bias", "bert.pooler.dense.weight"]
    trunk, _ = read_torch(tmp_path / "out", "AutoModel")
    pooler, _ = read_torch(tmp_path / "in", "AutoModel")
    assert torch.equal(trunk.pooler.dense.weight, pooler.pooler.dense.weight)
