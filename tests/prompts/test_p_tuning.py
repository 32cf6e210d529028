"""P-tuning's encoder beside torch's LSTM and PEFT's, and what it injects."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import assert_close, assert_equal, make_batch

from configs import base
from configs.p_tuning import superglue
from jaxprompt import tree
from jaxprompt.layers.recurrent import BiLstm
from jaxprompt.prompts import make_prompt
from jaxprompt.training.optim import decay_mask
from jaxprompt.types import Dims

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft.tuners.p_tuning")

DIMS = Dims(vocab=53, width=16, embed=12, layers=2, heads=2, head_dim=8, max_len=40)


def start(**fields):
    prompt = make_prompt("p_tuning", DIMS, **fields)
    args = make_batch(rows=3), jnp.zeros((53, 12))
    return prompt, prompt.init(jax.random.key(0), *args, deterministic=True)["params"], args


def lstm_of(state, layers):
    """Reads torch's LSTM: both directions side by side, its two biases as one."""
    both = lambda name: np.stack([state[f"{name}{way}"].numpy() for way in ("", "_reverse")])
    results = {}
    for layer in range(layers):
        results[f"input{layer}"] = both(f"weight_ih_l{layer}").swapaxes(1, 2)
        results[f"recurrent{layer}"] = both(f"weight_hh_l{layer}").swapaxes(1, 2)
        results[f"bias{layer}"] = both(f"bias_ih_l{layer}") + both(f"bias_hh_l{layer}")
    return results


def stack_of(state, numbers):
    """Reads torch's linear layers by their places in a Sequential."""
    return {
        f"linear{n}": {
            "kernel": state[f"{at}.weight"].numpy().T, "bias": state[f"{at}.bias"].numpy()
        }
        for n, at in enumerate(numbers)
    }  # fmt: skip


@pytest.mark.default_cases("2-lengths2")
@pytest.mark.parametrize("layers, lengths", [(1, None), (3, None), (2, [5, 2, 1])])
def test_the_lstm_is_torchs(layers, lengths):
    torch.manual_seed(0)
    theirs = torch.nn.LSTM(6, 4, layers, bidirectional=True, batch_first=True)
    x = torch.randn(3, 5, 6)
    inputs = x
    if lengths:
        inputs = torch.nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
    with torch.no_grad():
        expected, _ = theirs(inputs)
    if lengths:
        expected, _ = torch.nn.utils.rnn.pad_packed_sequence(expected, batch_first=True)
    params = lstm_of(theirs.state_dict(), layers)
    ours = BiLstm(4, layers)
    init_params = ours.init(jax.random.key(0), jnp.asarray(x))["params"]
    assert jax.tree.map(jnp.shape, init_params) == jax.tree.map(np.shape, params)
    sizes = None if lengths is None else jnp.array(lengths)
    actual = np.array(ours.apply({"params": params}, jnp.asarray(x), sizes))
    if lengths:
        actual *= (np.arange(5) < np.array(lengths)[:, None])[..., None]
    assert_close(actual, expected.numpy(), 1e-6)


@pytest.mark.long_cases("LSTM")
@pytest.mark.parametrize("kind", ["LSTM", "MLP"])
def test_the_encoder_is_pefts(kind):
    torch.manual_seed(0)
    config = peft.PromptEncoderConfig(
        encoder_reparameterization_type=kind, encoder_hidden_size=10, encoder_num_layers=2,
        num_virtual_tokens=5, token_dim=12, num_transformer_submodules=1,
    )  # fmt: skip
    theirs = peft.PromptEncoder(config).eval()
    with torch.no_grad():
        expected = theirs(torch.arange(5)[None]).numpy()
    state = theirs.state_dict()
    params = {"table": state["embedding.weight"].numpy()}
    if kind == "LSTM":
        fields = dict(hidden=10, inner=20)
        lstm = {name.removeprefix("lstm_head."): x for name, x in state.items()}
        params |= {"lstm": lstm_of(lstm, 2)}
        params["mlp"] = stack_of(state, ("mlp_head.0", "mlp_head.2"))
    else:
        fields = dict(encoder="mlp", linear=3, inner=10)
        params["mlp"] = stack_of(state, ("mlp_head.0", "mlp_head.2", "mlp_head.4"))
    prompt, init_params, args = start(length=5, **fields)
    assert jax.tree.map(jnp.shape, init_params) == jax.tree.map(np.shape, params)
    actual = prompt.apply({"params": params}, *args, deterministic=True)
    assert_close(actual.encoder.slots, expected, 1e-6)


def test_without_an_encoder_the_rows_are_the_table():
    prompt, params, args = start(encoder="none", length=4)
    assert params.keys() == {"table"}
    assert_equal(
        prompt.apply({"params": params}, *args, deterministic=True).encoder.slots,
        params["table"][None],
    )
    assert not prompt.folds() and prompt.num_slots() == 4


def test_the_encoder_is_folded_away():
    prompt, params, _ = start()
    assert prompt.folds() and prompt.num_slots() == 9
    assert params["lstm"]["recurrent0"].shape == (2, 12, 48)
    assert params["mlp"]["linear0"]["kernel"].shape == (24, 12)


@pytest.mark.parametrize(
    "fields, widths",
    [
        ({}, [24, 12, 12]),  # 0: that of the word embeddings, whatever that of the backbone is
        ({"hidden": 5}, [10, 12, 12]),
        ({"hidden": 5, "inner": 7}, [10, 7, 12]),
        ({"encoder": "mlp", "linear": 3, "inner": 7}, [12, 7, 7, 12]),
        ({"encoder": "mlp", "linear": 1, "inner": 7}, [12, 12]),
    ],
)
def test_widths_of_the_linear_layers(fields, widths):
    """Those between them are `inner`; behind an LSTM the first reads both directions."""
    _, params, _ = start(**fields)
    actual = [params["mlp"][f"linear{number}"]["kernel"].shape for number in range(len(widths) - 1)]
    assert actual == list(itertools.pairwise(widths)) and len(params["mlp"]) == len(actual)


@pytest.mark.long
def test_it_starts_as_torch_does():
    """Embeddings of N(0, 1), weights of U(-1/sqrt(n), 1/sqrt(n)), two biases as one."""
    prompt = make_prompt("p_tuning", DIMS._replace(embed=256), length=64)
    args = make_batch(rows=3), jnp.zeros((53, 256))
    params = prompt.init(jax.random.key(0), *args, deterministic=True)["params"]
    assert np.std(params["table"]) == pytest.approx(1, abs=0.02)
    limit = 256**-0.5
    for name, terms in (("input1", 1), ("recurrent1", 1), ("bias1", 2)):
        weights = np.ravel(params["lstm"][name])
        assert np.abs(weights).max() <= terms * limit
        assert weights.std() == pytest.approx(limit * (terms / 3) ** 0.5, rel=0.05)
    kernel = params["mlp"]["linear0"]["kernel"]
    assert np.std(kernel) == pytest.approx((512**-0.5) / 3**0.5, rel=0.02)


@pytest.mark.parametrize("task", superglue.TASKS)
def test_the_recipe_decays_the_backbone_and_not_the_encoder(task):
    """The released code has an optimizer for each; that of the encoder has no decay."""
    config = superglue.get_config(task)
    _, params, _ = start(length=config.prompt.length)
    encoder = [f"prompt/{name}" for name in tree.flatten(params)]
    weights = ["backbone/layers/attention/q/kernel", "backbone/embed/word/table"]
    spared = ["backbone/layers/attention/q/bias", "backbone/layers/attention_norm/scale"]
    mask = decay_mask(config.optim.no_decay)(dict.fromkeys([*encoder, *weights, *spared]))
    assert [name for name, decays in mask.items() if decays] == weights
    assert len(encoder) > 4 and config.optim.weight_decay == 0.1


@pytest.mark.parametrize("task", superglue.TASKS)
def test_the_recipe_has_a_rate_for_the_backbone(task):
    """Section 4.3 and the released code: both are tuned, or the pseudo tokens alone."""
    both, alone = superglue.get_config(task), superglue.get_config(f"{task},frozen")
    published = superglue.TASKS[task]
    assert (both.optim.lr, both.optim.lr_backbone) == (published.rate, 1e-5)
    warmup = {"name": "warmup_linear", "warmup_steps": 150}
    assert both.optim.schedule.to_dict() == {0: {"name": "linear"}, 150: warmup}[published.warmup]
    assert alone.optim.lr_backbone == base.get_config().optim.lr_backbone
    assert (both.trainable, alone.trainable) == (("prompt/.*", "backbone/.*"), ())
    for config in (both, alone):
        assert config.train.total_steps == published.steps and config.train.total_epochs == 0
        assert config.prompt.length == published.length == published.template.count("[soft*1]")


def test_weight_decay_spares_the_biases_of_an_lstm():
    _, params, _ = start(length=2)
    mask = decay_mask(base.get_config().optim.no_decay)(tree.flatten({"prompt": params}))
    assert {name for name, decays in mask.items() if "bias" in name and decays} == set()
    assert sum("bias" in name for name in mask) == 4 and any(mask.values())
