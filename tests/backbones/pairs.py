"""One set of weights in torch and here, random batches, and what torch's modules saw."""

import dataclasses
import functools
import json
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from packaging.version import Version
from tiny import jit

from jaxprompt.backbones import make_backbone
from jaxprompt.convert.folder import read_config
from jaxprompt.convert.load import load_backbone
from jaxprompt.layers.capping import logit_cap, soft_cap
from jaxprompt.types import Batch, Injection, Tokens

torch = pytest.importorskip("torch")
save_file = pytest.importorskip("safetensors.torch").save_file


if Version(transformers.__version__) < Version("5.20"):
    # It ties a weight of DeBERTa v2's masked-LM head which that of legacy=False lacks, and fails.
    mark_tied = transformers.PreTrainedModel.mark_tied_weights_as_initialized

    def mark_tied_that_are_there(model, loading_info):
        names = dict(model.named_parameters(remove_duplicate=False))
        tied = model.all_tied_weights_keys
        model.all_tied_weights_keys = {name: tied[name] for name in tied if name in names}
        mark_tied(model, loading_info)

    transformers.PreTrainedModel.mark_tied_weights_as_initialized = mark_tied_that_are_there


BF16_MAX = 0.08


class Pair(NamedTuple):
    """A torch model and the module and parameters read from the same file."""

    torch: Any
    module: Any
    params: dict
    config: dict
    folder: Any
    family: str


def randomise(model, scale=0.1):
    """Moves every number: scales of 1 and biases of 0 would hide a tensor in the wrong place."""
    with torch.no_grad():
        for parameter in model.parameters():
            size = scale if parameter.ndim == 1 else 0.1 * float(parameter.std())
            parameter.add_(size * torch.randn_like(parameter))
    return model.eval()


def shake(model):
    """Moves every number by as much: scales of 1 and biases of 0 would hide a mistake."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def pair_fixture(make):
    """Returns a fixture: a function of a kind, which calls `make(folder, kind)` once for each."""

    @pytest.fixture(scope="module")
    def pairs(tmp_path_factory):
        torch.set_num_threads(1)
        root = tmp_path_factory.mktemp("pairs")
        return functools.cache(lambda kind: make(root / kind, kind))

    return pairs


def write_checkpoint(folder, config, tensors):
    """Writes a folder as the hub has it, which today's save_pretrained does not always."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def read_ours(folder, family, **options):
    """Loads a folder. -> (module, params, report)"""
    config = read_config(folder)
    loads = {name: options[name] for name in ("dtype", "rescale") if name in options}
    params, report = load_backbone(folder, family, config, **loads)
    module = make_backbone(family, config, report.heads, dropout=0.0, **options)
    module = module.clone(cfg=dataclasses.replace(module.cfg, tied=report.tied))
    return module, params, report


def read_pair(folder, family, model_class) -> Pair:
    """Reads a folder with both."""
    module, params, _ = read_ours(folder, family)
    model = model_class.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    return Pair(model, module, params, read_config(folder), folder, family)


def make_tokens(ids, mask=None, types=None, positions=None) -> Tokens:
    """Lays ids out as one stream."""
    ids = np.asarray(ids, np.int32)
    mask = np.ones(ids.shape, bool) if mask is None else mask
    types = np.zeros_like(ids) if types is None else np.int32(types)
    if positions is None:
        positions = np.where(mask, mask.cumsum(1) - 1, 0)
    none = np.full_like(ids, -1)
    return Tokens(ids, mask, none, np.int32(positions), types, np.zeros(ids.shape, np.int8))


def draw_tokens(
    vocab, side="right", lengths=(9, 5, 1), width=9, seed=0, first=None, types=1, pad=0
) -> Tokens:
    """Draws padded rows of tokens of several types; `first` stands in front of each."""
    column, lengths = np.arange(width)[None], np.array(lengths)[:, None]
    mask = column < lengths if side == "right" else column >= width - lengths
    rng = np.random.default_rng(seed)
    ids = np.where(mask, rng.integers(2, vocab, mask.shape), pad)
    if first is not None:
        ids[:, 0] = first
    return make_tokens(ids, mask, np.where(mask, rng.integers(0, types, mask.shape), 0))


def run_torch(model, tokens, past=None, **inputs):
    """Runs torch; the past keys, of all rows, are seen and stand in front."""
    ids, mask, positions = (
        torch.tensor(x).long() for x in (tokens.ids, tokens.mask, tokens.positions)
    )
    length = 0 if past is None else past.get_seq_length()
    mask = torch.cat([torch.ones(len(mask), length, dtype=mask.dtype), mask], dim=1)
    inputs = dict(position_ids=positions, past_key_values=past, use_cache=past is not None) | inputs
    return model(
        input_ids=ids, attention_mask=mask, output_hidden_states=True,
        **{name: x for name, x in inputs.items() if x is not None},
    )  # fmt: skip


def make_batch(encoder: Tokens, decoder: Tokens | None = None) -> Batch:
    rows = np.arange(len(encoder.ids), dtype=np.int32)
    weights = np.ones(len(rows), np.float32)
    return Batch(encoder, np.zeros((len(rows), 1), np.int32), rows, weights, rows, decoder)


@functools.cache
def compiled(module, method):
    """Compiles a method of a module once for all that call it. `method(module, ...)`"""
    return jit(lambda params, *args: module.apply({"params": params}, *args, method=method))


def states_and_logits(module, batch, injection):
    hidden = module(batch, injection, deterministic=True)
    table, _ = module.lm_table()
    logits = jnp.einsum("bth,vh->btv", module.lm_features(hidden), table)
    return hidden, soft_cap(logits, logit_cap(module))


def run(pair: Pair, batch: Batch, injection=None, module=None, params=None):
    """Runs ours. -> hidden states, logits over the whole vocabulary"""
    forward = compiled(module or pair.module, states_and_logits)
    return forward(params or pair.params, batch, injection or Injection())


def layer_of(stack, i):
    return jax.tree.map(lambda leaf: leaf[i], stack)


def assert_near(actual, expected, tolerance, mask=None):
    """Compares by the greatest absolute difference."""
    actual, expected = np.asarray(actual, np.float32), np.asarray(expected, np.float32)
    assert actual.shape == expected.shape
    error = np.abs(actual - expected)
    worst = (error if mask is None else error[np.asarray(mask)]).max()
    assert worst <= tolerance, worst


def assert_near_in_16_bits(actual, expected, mask):
    """Compares bfloat16, which keeps 8 bits: states of size 1 to 4 move by hundredths."""
    assert actual.dtype == jnp.bfloat16
    assert_near(actual, expected, BF16_MAX, mask)
    assert np.abs(np.float32(actual) - np.asarray(expected))[mask].mean() <= 0.01


def primitives(jaxpr):
    """Lists every equation of a jaxpr and of those inside it."""
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else [value]:
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from primitives(inner)
