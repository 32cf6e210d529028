"""What an evaluation takes, against counts by hand and the program that runs."""

import dataclasses

import jax
import pytest

from jaxprompt.parallel.devices import DEVICES
from jaxprompt.parallel.sharding import make_placement, with_placement
from jaxprompt.planning.cost import evaluation_of, make_evaluation, make_shapes, weigh
from jaxprompt.planning.report import describe, show
from jaxprompt.planning.search import RESERVE, fastest, plan_as_configured, smallest
from jaxprompt.training.evaluation import make_writing

T5 = "google/t5-v1_1-small"
WRITES = dict(
    head__name="text", task__name="custom", task__fields=("x",), task__template="{x}",
    task__target="y", data__max_len=32,
)  # fmt: skip


def on(data=1, model=1, fsdp=False):
    return make_placement(data, model, fsdp=fsdp, devices=jax.devices()[: data * model])


def own(run, placement=None):
    """Bytes beside the numbers of a run."""
    placement = placement or on()
    sizes = weigh(make_shapes(run, placement), placement)
    return evaluation_of(run, placement) - sizes.resident_bytes


def device(bytes_):
    return DEVICES["v5e"]._replace(name="small", memory=int(bytes_ / (1 - RESERVE)) + 1)


def test_scores_take_what_their_batch_takes(make_run):
    small, large = (make_run(T5, data__batch=4, data__eval_batch=n) for n in (16, 64))
    assert own(large) == pytest.approx(4 * own(small), rel=0.3)
    assert own(large, on(4)) == pytest.approx(own(small), rel=0.3)
    # No backward pass: of as many examples a step holds more.
    step = plan_as_configured(make_run(T5, data__batch=64, data__eval_batch=64), None, 1)
    assert step.evaluation < step.cost.bytes


def test_texts_take_the_layers_of_the_decoder_once_more_but_on_tpus(make_run):
    run = make_run(T5, data__batch=4, data__eval_batch=1, **WRITES)
    width, inner, mlp, layers = 512, 384, 1024, 8
    decoder = 4 * layers * (8 * width * inner + 3 * width * mlp)
    assert decoder < own(run) < 1.2 * decoder
    # TPUs read them where they lie.
    assert own(dataclasses.replace(run, copies=False)) < 0.2 * decoder
    four, eight = (
        make_run(
            T5,
            data__eval_batch=8,
            generate__num_beams=num_beams,
            generate__max_new_tokens=16,
            **WRITES,
        )
        for num_beams in (4, 8)
    )
    # Of 8 rows by 4 beams more: keys and values of 16 tokens, and two of the scores of all words.
    more = 8 * 4 * 4 * (2 * layers * inner * 16 + 2 * 32128)
    assert own(eight) - own(four) == pytest.approx(more, rel=0.1)


def test_what_is_counted_is_what_the_program_takes(make_run):
    """In float32, which XLA's CPU compiler does not widen."""
    run = make_run(
        T5, data__eval_batch=16, generate__num_beams=2, generate__max_new_tokens=16, **WRITES
    )
    found = make_evaluation(run, on())
    step = with_placement(on(), make_writing(run.config.generate, found.model, run.scorer.layout))
    memory = jax.jit(step).lower(*found[1:]).compile().memory_analysis()
    taken = memory.temp_size_in_bytes + memory.output_size_in_bytes
    batch = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(found.batch))
    # Reading the input is counted beside what it leaves, so it is on the safe side.
    assert 0.9 * taken < own(run) - batch < 1.6 * taken


def test_codes_stay_codes(make_run):
    plain, codes = (
        make_run(T5, data__eval_batch=1, backbone__quantize=kind, **WRITES)
        for kind in ("none", "int4")
    )
    assert own(codes) < 0.3 * own(plain)


def test_a_run_that_cannot_evaluate_does_not_fit(make_run):
    run = make_run(T5, data__batch=4, data__max_len=64, data__eval_batch=256)
    alone = plan_as_configured(run, device(2**40), 1)
    assert alone.fits and alone.cost.bytes < alone.evaluation
    little = device((alone.cost.bytes + alone.evaluation) / 2)
    plan = plan_as_configured(run, little, 1)
    assert plan.trains and not plan.evaluates and not plan.fits
    assert fastest(run, little, 1) is None
    assert smallest(run, little, 4, {}).mesh.devices > 1
    plans = {"as configured": plan, "fastest": None, "smallest": None}
    text = show(describe(run, plans, 1))
    assert "evaluation of 256 examples at once does not fit; lower data.eval_batch" in text
    assert "lower data.batch, data.eval_batch or data.max_len" in text
    rows = {line.split("  ")[0]: line.split()[-1] for line in text.splitlines() if line}
    assert rows["fits"] == "NO" and "in evaluation" in text
