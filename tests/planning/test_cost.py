"""What a step takes, against counts by hand and against real steps."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jaxprompt.errors import InputError
from jaxprompt.layers.attention import attend
from jaxprompt.parallel.devices import DEVICES
from jaxprompt.parallel.roofline import ATTENTION
from jaxprompt.parallel.sharding import make_placement, with_placement
from jaxprompt.planning.cost import (
    _device_kernels,
    eval_bytes,
    eval_shapes,
    measure_sizes,
    measure_step,
    step_shapes,
)
from jaxprompt.planning.report import format_plans, plans_to_json
from jaxprompt.planning.search import RESERVE, fastest, plan_as_configured, smallest
from jaxprompt.training.evaluation import generation_step, make_search
from jaxprompt.types import AttentionMask

ROOT = Path(__file__).resolve().parents[2]
ELECTRA, T5 = "google/electra-small-discriminator", "google/t5-v1_1-small"
STACKED = dict(backbone__stack="scan")  # generation copies stacked layers
WRITES = dict(
    head__name="text", task__name="custom", task__fields=("x",), task__template="{x}",
    task__target="y", data__max_len=32,
)  # fmt: skip
VERBALIZER = dict(task__name="sst2", head__name="verbalizer", head__scores="full")


def on(data=1, model=1, fsdp=False):
    return make_placement(data, model, fsdp=fsdp, devices=jax.devices()[: data * model])


def cost_of(run, placement=None, remat=""):
    placement = placement or on()
    return measure_step(run, step_shapes(run, placement, remat), placement)


@pytest.fixture(scope="module")
def t5(make_run):
    return make_run(T5, data__batch=8, data__max_len=64, **VERBALIZER)


@pytest.mark.long
def test_flops_are_four_for_every_number_and_token(t5):
    # Forward 2 and backward through the activations 2; frozen weights have no gradient. The
    # decoder is so short that its cross attention computes no keys and values.
    width, inner, mlp, layers, rows, tokens, fed = 512, 384, 1024, 8, 8, 64, 2
    encoder = layers * (4 * width * inner + 3 * width * mlp)
    cross = layers * fed * width * (3 * 6 * tokens + 2 * inner)  # of 6 heads
    decoder = layers * (6 * width * inner + 3 * width * mlp)
    table = 32128 * width
    by_hand = 4 * rows * (encoder * tokens + cross + decoder * fed + table)
    assert cost_of(t5).work.flops == pytest.approx(by_hand, rel=0.1)


@pytest.mark.parametrize("is_causal", [False, True])
def test_attention_is_estimated_as_one_kernel_forward_and_one_backward(t5, is_causal):
    rows, queries, keys, heads, size = 2, 16, 24, 6, 64  # the size of T5 small

    def loss(q, k, v):
        lengths = jnp.full(rows, keys) if is_causal else None
        mask = AttentionMask(jnp.ones((rows, keys), bool), lengths=lengths, causal=is_causal)
        return (attend(q, k, v, mask, kernel="fused") ** 2).sum()

    q, k = (jax.ShapeDtypeStruct((rows, x, heads, size), jnp.float32) for x in (queries, keys))
    text = jax.jit(jax.value_and_grad(loss, (0, 1, 2))).lower(q, k, k).compile().as_text()
    *others, attention = _device_kernels(t5, text)
    assert not any(kernel.flops for kernel in others) and attention.category == ATTENTION
    scores = rows * heads * queries * keys
    # Seven products, of which a kernel skips the scores above the diagonal.
    flops = 7 * 2 * scores * size / (1 + is_causal)
    assert attention.times == 2 and 2 * attention.flops == flops
    # Each product has two of q, k, v, the result and their gradients beside the scores.
    assert 2 * attention.bytes == pytest.approx(7 * 4 * (q.size + k.size), rel=0.05)


@pytest.mark.long
def test_recomputation_is_counted(t5):
    none, full = cost_of(t5), cost_of(t5, remat="full")
    assert full.work.flops == pytest.approx(1.5 * none.work.flops, rel=0.1)
    assert full.activations < 0.7 * none.activations


def test_what_is_there_before_is_exact(t5):
    sizes = measure_sizes(step_shapes(t5, on()), on())
    assert sizes.total - sizes.trained == 76_961_152
    assert sizes.trained == 20 * 512 and sizes.trained_bytes == 4 * 20 * 512
    assert sizes.frozen_bytes == 4 * 76_961_152
    assert 2 * sizes.trained_bytes < sizes.optimizer_bytes < 2 * sizes.trained_bytes + 200
    placement = on(2, 2)
    halves = measure_sizes(step_shapes(t5, placement), placement)
    # Norms and the tables of relative positions are on every device, the latter by heads.
    assert halves.frozen_bytes == pytest.approx(sizes.frozen_bytes / 2, rel=1e-3)
    assert halves.batch_bytes == sizes.batch_bytes / 2
    placement = on(2, 2, fsdp=True)
    quarters = measure_sizes(step_shapes(t5, placement), placement)
    assert quarters.frozen_bytes == pytest.approx(sizes.frozen_bytes / 4, rel=1e-2)
    assert quarters.read_bytes == halves.frozen_bytes


def test_a_vocabulary_that_does_not_divide_is_padded(make_run):
    run = make_run("openai-community/gpt2", data__batch=4, data__max_len=40)
    placement = on(1, 4)
    one, four = (
        measure_sizes(step_shapes(run, on()), on()),
        measure_sizes(step_shapes(run, placement), placement),
    )
    assert four.total - one.total == 3 * 768  # 50257 -> 50260 rows


@pytest.mark.long
def test_sixteen_bits_halve_weights_and_activations(make_run):
    shape = dict(data__batch=16, data__max_len=64)
    wide = cost_of(make_run(T5, **shape))
    narrow = cost_of(make_run(T5, backbone__dtype="bfloat16", **shape))
    assert narrow.sizes.frozen_bytes == wide.sizes.frozen_bytes / 2
    # The probabilities of attention are kept in float32 too.
    assert 0.5 * wide.activations < narrow.activations < 0.75 * wide.activations
    assert narrow.work.flops == wide.work.flops


@pytest.mark.long
def test_a_kernel_for_attention_keeps_no_scores(make_run):
    shape = dict(data__batch=16, data__max_len=128, backbone__dtype="bfloat16")
    plain, fused = (
        cost_of(make_run(T5, backbone__attention=kernel, **shape)) for kernel in ("auto", "fused")
    )
    scores = 8 * 16 * 6 * 128**2  # layers, rows, heads, tokens
    # One layer's are there at a time; products of theirs are computed again.
    assert plain.activations - fused.activations > 0.8 * 2 * scores
    assert plain.work.flops < fused.work.flops < 1.1 * plain.work.flops


@pytest.mark.long
def test_tensor_parallelism_sends_activations_and_fsdp_weights(make_run):
    run = make_run(
        ELECTRA, data__batch=8, data__max_len=64, backbone__dtype="bfloat16", task__name="sst2"
    )
    parallel = cost_of(run, on(1, 4)).work
    assert parallel.counts.keys() == {"all-reduce"}
    # Forward, a sum behind attention and behind the mlp; backward, one for each product.
    one = 2 * 8 * 64 * 256 * 3 // 4 * 2  # 16 bits, a ring of 4
    assert 12 * (2 + 2) * one <= parallel.sent["all-reduce"] <= 12 * (2 + 4 + 1) * one
    divided = on(4, 1, fsdp=True)
    gathered = cost_of(run, divided).work
    layers = 2 * 12 * 12 * 256**2  # bytes of what layers multiply with
    assert 1.9 * layers * 3 / 4 < gathered.sent["all-gather"] < 2.5 * layers


def test_heads_that_do_not_divide_are_refused(make_run):
    run = make_run(T5, data__batch=8, data__max_len=64)
    with pytest.raises(InputError, match="mesh.model=4 does not divide the 6"):
        step_shapes(run, on(1, 4))


@pytest.mark.long
def test_memory_is_that_of_real_steps():
    command = [sys.executable, str(ROOT / "launch/bench"), "plan", "--side=compare"]
    command.append("--case=electra-small soft")
    one = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    done = subprocess.run(command, env=os.environ | one, stdout=subprocess.PIPE, check=True)
    document = json.loads(done.stdout.splitlines()[-1])
    assert document["activations"] > 0.8 * document["planned"]
    assert document["planned"] == pytest.approx(document["measured"], rel=0.15)


# -- evaluation ------------------------------------------------------------------------------------


def eval_only_bytes(run, placement=None):
    """Returns the bytes of an evaluation besides parameters and optimizer state."""
    placement = placement or on()
    sizes = measure_sizes(step_shapes(run, placement), placement)
    return eval_bytes(run, placement) - sizes.resident_bytes


def small_device(bytes_):
    return DEVICES["v5e"]._replace(name="small", memory=int(bytes_ / (1 - RESERVE)) + 1)


@pytest.mark.long
def test_scores_take_what_their_batch_takes(make_run):
    small, large = (make_run(T5, data__batch=4, data__eval_batch=n) for n in (16, 64))
    assert eval_only_bytes(large) == pytest.approx(4 * eval_only_bytes(small), rel=0.3)
    assert eval_only_bytes(large, on(4)) == pytest.approx(eval_only_bytes(small), rel=0.3)
    # No backward pass: of as many examples a step holds more.
    step = plan_as_configured(make_run(T5, data__batch=64, data__eval_batch=64), None, 1)
    assert step.evaluation < step.cost.bytes


@pytest.mark.long
def test_texts_take_the_layers_of_the_decoder_once_more_but_on_tpus(make_run):
    run = make_run(T5, data__batch=4, data__eval_batch=1, **STACKED, **WRITES)
    width, inner, mlp, layers = 512, 384, 1024, 8
    decoder = 4 * layers * (8 * width * inner + 3 * width * mlp)
    assert decoder < eval_only_bytes(run) < 1.2 * decoder
    # TPUs read them where they lie, and other devices where they are separate arrays.
    separate = make_run(T5, data__batch=4, data__eval_batch=1, **WRITES)
    assert run.copies_layers and not separate.copies_layers
    assert eval_only_bytes(dataclasses.replace(run, copies_layers=False)) < 0.2 * decoder
    full = make_run(T5, "full", data__batch=4, data__eval_batch=1, **STACKED, **WRITES)
    assert eval_only_bytes(full) == pytest.approx(eval_only_bytes(run), rel=0.05)
    beams, more_beams = (
        make_run(
            T5,
            data__eval_batch=8,
            generate__num_beams=num_beams,
            generate__max_new_tokens=16,
            **WRITES,
        )
        for num_beams in (16, 32)
    )
    # Of 8 rows by 16 beams more: keys and values of the 15 tokens that are read, and two of the
    # scores of all words.
    more = 8 * 16 * 4 * (2 * layers * inner * 15 + 2 * 32128)
    assert eval_only_bytes(more_beams) - eval_only_bytes(beams) == pytest.approx(more, rel=0.1)


def test_what_is_counted_is_what_the_program_takes(make_run):
    """In float32, which XLA's CPU compiler does not widen."""
    fields = dict(data__eval_batch=16, generate__num_beams=2, generate__max_new_tokens=16)
    run = make_run(T5, **fields, **STACKED, **WRITES)
    actual = eval_shapes(run, on())
    step = with_placement(
        on(), generation_step(actual.model, make_search(run.config.generate, run.scorer.layout))
    )
    memory = jax.jit(step).lower(*actual[1:]).compile().memory_analysis()
    taken = memory.temp_size_in_bytes + memory.output_size_in_bytes
    batch = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(actual.batch))
    # Reading the input is counted beside what it leaves, so it is on the safe side.
    assert 0.9 * taken < eval_only_bytes(run) - batch < 1.6 * taken


def test_codes_stay_codes(make_run):
    plain, codes = (
        make_run(T5, data__eval_batch=1, backbone__quantize=kind, **STACKED, **WRITES)
        for kind in ("none", "int4")
    )
    assert eval_only_bytes(codes) < 0.3 * eval_only_bytes(plain)


@pytest.mark.long
def test_a_run_that_cannot_evaluate_does_not_fit(make_run):
    run = make_run(ELECTRA, data__batch=4, data__max_len=64, data__eval_batch=256)
    alone = plan_as_configured(run, small_device(2**40), 1)
    assert alone.fits and alone.cost.bytes < alone.evaluation
    little = small_device((alone.cost.bytes + alone.evaluation) / 2)
    plan = plan_as_configured(run, little, 1)
    assert plan.trains and not plan.evaluates and not plan.fits
    assert fastest(run, little, 1) is None
    assert smallest(run, little, 4, {1: None}).mesh.devices > 1
    plans = {"as configured": plan, "fastest": None, "smallest": None}
    text = format_plans(plans_to_json(run, plans, 1))
    assert "evaluation of 256 examples at once does not fit; lower data.eval_batch" in text
    assert "lower data.batch, data.eval_batch or data.max_len" in text
    rows = {line.split("  ")[0]: line.split()[-1] for line in text.splitlines() if line}
    assert rows["fits"] == "NO" and "in evaluation" in text
    plans = {"as configured": plan, "fastest": alone, "smallest": alone}
    lines = format_plans(plans_to_json(run, plans, 1)).splitlines()
    assert next(re.split("  +", x.strip()) for x in lines if "as configured" in x) == [
        "as configured", "fastest, smallest"
    ]  # fmt: skip
