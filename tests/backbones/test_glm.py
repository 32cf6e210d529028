"""GLM against an independent statement of it in torch: logits, gradients, generation, files."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pairs import (
    assert_near,
    make_batch,
    make_tokens,
    randomise,
    read_ours,
    run,
    states_and_logits,
    write_checkpoint,
)
from tiny import jit, make_params
from torch_glm import GLM

from jaxprompt.errors import InputError
from jaxprompt.heads.linear import Classifier
from jaxprompt.models.model import Model
from jaxprompt.models.prompt_attention import attend_prompt
from jaxprompt.prompts import make_prompt
from jaxprompt.types import Injection, Prefix, Role, Stream

torch = pytest.importorskip("torch")

HF = dict(
    model_type="glm", vocab_size=60, hidden_size=32, num_layers=3, num_attention_heads=4,
    max_sequence_length=24, block_position_encoding=True,
)  # fmt: skip
SOURCES = [[2, 9, 8, 3, 7, 4], [2, 3, 11, 4], [2, 12, 13, 14, 15, 3, 4]]  # 3 is the blank
ANSWERS = [[5, 21, 22, 23], [5, 24], [5, 25, 26]]
BLANKS = [row.index(3) for row in SOURCES]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """One model in torch, and ours read from its file as the release has it."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("glm")
    model = randomise(GLM(HF))
    write_checkpoint(folder, HF, {f"glm.{name}": x for name, x in model.state_dict().items()})
    module, params, report = read_ours(folder, "glm")
    assert report.unused == () and report.heads == ("lm",) and report.tied
    return model, module, params, folder


def pad(rows, side="right"):
    width = max(map(len, rows)) + 2
    ids, mask = np.zeros((len(rows), width), np.int32), np.zeros((len(rows), width), bool)
    for i, row in enumerate(rows):
        here = slice(width - len(row), width) if side == "left" else slice(0, len(row))
        ids[i, here], mask[i, here] = row, True
    return make_tokens(ids, mask)


def batch_of(sources=SOURCES, answers=ANSWERS, side="right", shift=0):
    tokens = pad(sources, side)
    roles = np.where(tokens.ids == 3, Role.LABEL, Role.TEXT).astype(np.int8)
    positions = np.where(tokens.mask, tokens.positions + shift, 0)
    return make_batch(tokens._replace(roles=roles, positions=positions), pad(answers))


def expected_logits(model, fronts=None, shift=0, blanks=BLANKS):
    rows = zip(SOURCES, ANSWERS, blanks, strict=True)
    return [
        model(torch.tensor(a), torch.tensor(b), at, None if fronts is None else fronts(i), shift)
        for i, (a, b, at) in enumerate(rows)
    ]


def check(actual, expected, tolerance=1e-5):
    for row, reference in zip(actual, expected, strict=True):
        assert_near(row[: len(reference)], reference.detach(), tolerance)


@pytest.mark.parametrize("side, stack", [("right", "unroll"), ("left", "scan")])
def test_logits(pair, side, stack):
    model, module, params, _ = pair
    module = module.clone(cfg=dataclasses.replace(module.cfg, stack=stack))
    _, logits = run(None, batch_of(side=side), module=module, params=params)
    check(logits, expected_logits(model))
    assert np.asarray(logits).std() > 0.3


def test_without_a_blank_the_answer_stands_at_the_end(pair):
    model, module, params, _ = pair
    batch = batch_of()
    tokens = batch.encoder._replace(roles=np.full_like(batch.encoder.roles, Role.TEXT))
    _, logits = run(None, batch._replace(encoder=tokens), module=module, params=params)
    check(logits, expected_logits(model, blanks=[len(row) - 1 for row in SOURCES]))


def test_a_prefix_is_seen_by_input_and_answer(pair):
    """One prompt for all rows, and one a row; positions moved on as P-tuning v2 has them."""
    model, module, params, _ = pair
    config, length = module.cfg, 2
    for rows in (1, len(SOURCES)):
        k, v = np.random.default_rng(rows).normal(
            size=(2, config.layers, rows, length, config.heads, 8)
        )
        k, v = k.astype(np.float32), v.astype(np.float32)
        prefix = Prefix(k, v, np.ones((config.layers, rows, length), bool))
        injection = Injection(Stream(prefix=prefix))
        _, logits = run(None, batch_of(shift=2), injection, module=module, params=params)

        def fronts(i, k=k, v=v, rows=rows):
            return [
                tuple(torch.tensor(x[at, i % rows]) for x in (k, v)) for at in range(config.layers)
            ]

        check(logits, expected_logits(model, fronts, shift=2))


def test_input_and_answer_attend_to_a_prefix(pair):
    """The shares of `inspect`, of both, by the probabilities in torch."""
    model, module, params, _ = pair
    length, batch = 2, batch_of()
    prompt = make_prompt("prefix", module.dims, length=length, shift=False)
    ours = Model(module, prompt, {"main": Classifier(3)})
    whole = make_params(ours, params)
    actual = jit(lambda p, b: attend_prompt(ours, p, b))(whole, batch)
    assert set(actual) == {"encoder", "decoder"}
    table = torch.tensor(np.asarray(whole["prompt"]["table"]))  # [L, 2, P, N, D]
    for i, (source, answer, blank) in enumerate(zip(SOURCES, ANSWERS, BLANKS, strict=True)):
        model(torch.tensor(source), torch.tensor(answer), blank, [(k, v) for k, v in table])
        layers = model.transformer["layers"]
        mass = np.stack(
            [layer.probs[..., :length].sum(-1).numpy() for layer in layers]
        )  # [L, N, T]
        inside, written = np.split(mass, [len(source)], axis=-1)
        assert_near(actual["encoder"].tokens[i], inside.mean(-1), 1e-5)
        assert_near(actual["decoder"].tokens[i], written.mean(-1), 1e-5)
        assert_near(actual["decoder"].read[i], written[..., 0], 1e-5)
        even = length / (length + len(source) + 1 + np.arange(len(answer)))
        assert_near(actual["decoder"].uniform[i], even.mean(), 1e-6)
    assert np.isnan(actual["encoder"].read).all()


def test_gradients(pair):
    model, module, params, _ = pair
    batch, weights = batch_of(), np.random.default_rng(1).normal(size=(3, 4, 60))
    model.zero_grad()
    said = expected_logits(model)
    sum(
        (output * torch.tensor(w[: len(output)])).sum()
        for output, w in zip(said, weights, strict=True)
    ).backward()
    real = batch.decoder.mask[..., None]

    def loss(params):
        _, logits = module.apply({"params": params}, batch, Injection(), method=states_and_logits)
        masked = jnp.where(real, logits, 0)[:, :4]
        return (masked * weights).sum()

    actual = jit(jax.grad(loss))(params)
    torch_grads = {name: p.grad.numpy() for name, p in model.named_parameters()}
    assert_near(actual["embed"]["word"]["table"], torch_grads["word_embeddings.weight"], 3e-4)
    for name, ours in (("position", "position"), ("block_position", "inner")):
        theirs = torch_grads[f"transformer.{name}_embeddings.weight"]
        assert_near(actual["embed"][ours]["table"], theirs, 3e-4)
    fused = torch_grads["transformer.layers.1.attention.query_key_value.weight"]
    parts = [actual["layers"]["attention"][x]["kernel"][1] for x in ("query", "key", "value")]
    assert_near(np.concatenate([np.asarray(x).reshape(32, 32).T for x in parts]), fused, 3e-4)


def test_a_token_at_a_time_is_the_whole_at_once(pair):
    _, module, params, _ = pair
    batch = batch_of(answers=[row[:1] for row in ANSWERS])
    said = np.array([[5, 21, 22, 23]] * 3, np.int32)
    whole = batch._replace(decoder=make_tokens(said))
    expected, _ = run(None, whole, module=module, params=params)
    batch = batch._replace(decoder=make_tokens(said[:, :1]))

    def one_by_one(module):
        x, cache = module.prefill(batch, Injection(), 3)
        layers, actual = module.reading_layers(), [x[:, -1]]
        for i in range(1, 4):
            at = np.full(3, i, np.int32)
            x, cache = module.extend(layers, said[:, i], at, cache, i - 1)
            actual.append(x)
        return jnp.stack(actual, 1)

    actual = jit(lambda p: module.apply({"params": p}, method=one_by_one))(params)
    assert_near(actual, expected, 1e-5)


def test_an_answer_longer_than_the_positions_is_refused(pair):
    _, module, params, _ = pair
    long = batch_of(answers=[[5] * 23] * 3)  # and two columns of padding
    with pytest.raises(InputError, match="up to 25 tokens exceeds the model's 24 positions"):
        run(None, long, module=module, params=params)
    with pytest.raises(InputError, match="up to 30 tokens"):
        module.apply({"params": params}, batch_of(), Injection(), 24, method="prefill")


def test_names_without_a_prefix_are_read(pair, tmp_path):
    model, _, params, _ = pair
    write_checkpoint(tmp_path, HF, model.state_dict())
    _, again, report = read_ours(tmp_path, "glm")
    assert report.unused == ()
    same = jax.tree.map(np.array_equal, again, params)
    assert all(jax.tree.leaves(same))
