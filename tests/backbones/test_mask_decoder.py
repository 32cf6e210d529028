"""DeBERTa's enhanced mask decoder against a torch statement of the released code's."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from pairs import assert_near, read_ours, shake
from test_kinds import KINDS, draw_batch
from tiny import jit

from jaxprompt.backbones import with_lm_states
from jaxprompt.convert.folder import read_config
from jaxprompt.convert.load import present_heads
from jaxprompt.types import Injection, Prefix, Stream

torch = pytest.importorskip("torch")
files = pytest.importorskip("safetensors.torch")

POSITIONS = "deberta.embeddings.position_embeddings.weight"
READS = np.array([[4, 2], [0, 6], [0, 0]], np.int32)


def make(tmp_path, kind):
    """Saves a random model of a kind with the table that transformers has not. -> torch's, table"""
    _, name, sizes = KINDS[kind]
    model_class = getattr(transformers, name)
    torch.manual_seed(7)
    model = shake(model_class(model_class.config_class(**sizes)))
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    table = torch.randn(sizes["max_position_embeddings"], sizes["hidden_size"])
    # An input with positions has its own.
    files.save_file({POSITIONS: table} | files.load_file(file), file, metadata={"format": "pt"})
    return model, table


def decode(model, table, batch):
    """States what emd_context_layer does where the input has no positions. -> states, logits"""
    tokens, encoder = batch.encoder, model.deberta.encoder
    mask = torch.tensor(tokens.mask).long()
    ids, places = (torch.tensor(x).long() for x in (tokens.ids, tokens.positions))
    out = model.deberta(
        input_ids=ids, attention_mask=mask, position_ids=places, output_hidden_states=True
    )
    below = out.hidden_states[-2]
    relative = dict(
        relative_pos=encoder.get_rel_pos(below), rel_embeddings=encoder.get_rel_embedding()
    )
    wide = encoder.get_attention_mask(mask)
    actual = below + table[places]
    for _ in range(2):
        actual, _ = encoder.layer[-1](below, wide, query_states=actual, **relative)
    if model.config.legacy:
        return actual, model.cls(actual)
    return actual, model.lm_predictions(actual, model.deberta.embeddings.word_embeddings)


def scores(module, batch, reads=None):
    hidden = module(batch, Injection(), deterministic=True, output_positions=reads)
    table, bias = module.lm_table()
    return hidden, jnp.einsum("btx,vx->btv", module.lm_features(hidden), table) + bias


@pytest.mark.default_cases("scan-v3")
@pytest.mark.parametrize("kind", ["v3", "v2-xlarge"])
@pytest.mark.parametrize("stack", ["scan", "unroll"])
def test_states_logits_and_gradients_are_those_of_the_released_code(tmp_path, kind, stack):
    model, table = make(tmp_path, kind)
    module, params, report = read_ours(tmp_path, "deberta_v2", stack=stack)
    assert report.heads == ("mlm", "mask_decoder") and not report.unused
    batch = draw_batch(read_config(tmp_path))
    mask, table = batch.encoder.mask, table.requires_grad_()
    states, logits = decode(model, table, batch)
    words = with_lm_states(module)
    run = lambda params: words.apply({"params": params}, batch, method=scores)
    actual = jit(run)(params)
    assert_near(actual[0], states.detach(), 1e-4, mask)
    assert_near(actual[1], logits.detach(), 1e-4, mask)
    # Of heads that read no words the states are the last layer's, as in transformers.
    plain = module.apply({"params": params}, batch, Injection(), deterministic=True)
    assert np.abs(np.asarray(plain) - np.asarray(actual[0]))[mask].max() > 0.1
    weigh = np.random.default_rng(0).normal(size=logits.shape) * mask[..., None] / 10
    (logits * torch.tensor(weigh).float()).sum().backward()
    grads = jit(jax.grad(lambda params: (run(params)[1] * weigh).sum()))(params)
    assert_near(grads["mask_decoder"]["table"], table.grad, 1e-4 * float(table.grad.abs().max()))
    up = model.deberta.encoder.layer[-1].intermediate.dense.weight.grad
    assert_near(grads["layers"]["mlp"]["up"]["kernel"][-1], up.T, 1e-4 * float(up.abs().max()))


@pytest.mark.long
@pytest.mark.parametrize("kind", ["v3", "v1"])
def test_the_positions_that_are_read_are_those_of_all(tmp_path, kind):
    """In front of the last layer stands a prefix too, in all layers or in the last alone."""
    make(tmp_path, kind)
    module, params, _ = read_ours(tmp_path, KINDS[kind][0], stack="scan")
    module, batch = with_lm_states(module), draw_batch(read_config(tmp_path))
    dims = module.dims
    assert dims.max_len == KINDS[kind][2]["max_position_embeddings"]
    k, v = np.random.default_rng(1).normal(
        size=(2, dims.layers, 1, 3, dims.heads, dims.head_dim)
    ).astype(np.float32)  # fmt: skip
    last = np.zeros((dims.layers, 1, 3), bool)
    last[-1] = True
    for prefix in (None, Prefix(k, v, np.ones_like(last)), Prefix(k, v, last)):
        run = lambda reads, prefix=prefix: module.apply(
            {"params": params}, batch, Injection(Stream(prefix=prefix)), deterministic=True,
            output_positions=reads,
        )  # fmt: skip
        whole = np.asarray(jit(run)(None))
        assert_near(jit(run)(READS), whole[np.arange(3)[:, None], READS], 1e-5)


@pytest.mark.long
def test_states_that_are_kept_enter_it(tmp_path):
    make(tmp_path, "v3")
    module, params, _ = read_ours(tmp_path, "deberta_v2", stack="scan")
    module, batch = with_lm_states(module), draw_batch(read_config(tmp_path))
    run = lambda module, batch: module.apply(
        {"params": params}, batch, Injection(), deterministic=True
    )
    whole = run(module, batch)
    for skip in range(1, module.dims.layers + 1):
        states = module.apply({"params": params}, batch, skip, method="enter")
        rest = module.clone(cfg=dataclasses.replace(module.cfg, skip=skip))
        assert_near(run(rest, batch._replace(cached=states)), whole, 1e-5, batch.encoder.mask)


def test_positions_of_the_input_are_none_of_a_decoders(tmp_path):
    make(tmp_path, "v2-apart")
    module, _, report = read_ours(tmp_path, "deberta_v2")
    assert report.heads == ("mlm",) == tuple(module.cfg.model_heads)
    assert present_heads(tmp_path, "deberta_v2", read_config(tmp_path)) == {"mlm"}
    assert with_lm_states(module) is module


def test_a_model_of_replaced_tokens_has_no_head_of_words(tmp_path):
    """Released v3 files hold what is left of one, beside the head that they were trained with."""
    make(tmp_path, "v3")
    config, path = read_config(tmp_path), tmp_path / "model.safetensors"
    assert set(present_heads(tmp_path, "deberta_v2", config)) == {"mlm", "mask_decoder"}
    trained = {"mask_predictions.dense.weight": torch.zeros(2, 2)}
    files.save_file(files.load_file(path) | trained, path)
    assert set(present_heads(tmp_path, "deberta_v2", config)) == set()
