"""The search over meshes, on devices as small as the models here."""

import pytest

from jaxprompt.parallel.devices import DEVICES
from jaxprompt.parallel.hlo import count_work
from jaxprompt.parallel.roofline import BANDWIDTH_SHARE, OTHER, step_time
from jaxprompt.planning.compilers import Compiled
from jaxprompt.planning.search import (
    RESERVE,
    TPU_SHARE,
    _mesh_shapes,
    fastest,
    plan_as_configured,
    smallest,
)

T5 = "google/t5-v1_1-small"


def device(mib):
    return DEVICES["v5e"]._replace(name="small", memory=int(mib * 2**20 / (1 - RESERVE)))


@pytest.fixture(scope="module")
def run(make_run):
    return make_run(T5, data__batch=8, data__max_len=64, backbone__dtype="bfloat16")


@pytest.fixture(scope="module")
def alone(run):
    return plan_as_configured(run, device(1000), 1)


def test_a_mesh_divides_the_batch(make_run):
    run = make_run(T5, data__batch=12, data__eval_batch=24)
    assert list(_mesh_shapes(run, 8)) == [(4, 2), (2, 4), (1, 8)]
    run = make_run(T5, data__batch=12, data__eval_batch=24, optim__accumulate=6)
    assert list(_mesh_shapes(run, 4)) == [(2, 2), (1, 4)]


def test_room_enough_is_one_device_without_recomputation(run, alone):
    best = smallest(run, device(1000), 8, {})
    assert best.fits and best.mesh == (1, 1, False, "none", "")
    assert best.cost.bytes == alone.cost.bytes


@pytest.mark.long
def test_less_room_recomputes_before_it_takes_more_devices(run, alone):
    best = smallest(run, device(0.95 * alone.cost.bytes / 2**20), 8, {})
    assert best.mesh.devices == 1 and best.mesh.remat != "none" and best.fits
    assert best.time("bfloat16").step >= alone.time("bfloat16").step


@pytest.mark.long
def test_a_kernel_that_keeps_no_scores_comes_before_recomputation(make_run):
    """Of short texts, for which a TPU does not take it unasked."""
    run = make_run(T5, data__batch=8, data__max_len=256, backbone__dtype="bfloat16",
                   backbone__dropout=0.0)  # fmt: skip
    alone = plan_as_configured(run, device(1000), 1)
    assert alone.fits and fastest(run, device(1000), 1).mesh.attention == ""
    best = fastest(run, device(0.95 * alone.cost.bytes / 2**20), 1)
    assert best.mesh == (1, 1, False, "none", "fused") and best.fits
    old = DEVICES["v100-32"]._replace(memory=device(0.95 * alone.cost.bytes / 2**20).memory)
    assert fastest(run, old, 1).mesh.remat == "dots"


@pytest.mark.long
def test_weights_that_do_not_fit_take_more_devices(run, alone):
    frozen = alone.cost.sizes.frozen_bytes / 2**20
    best = smallest(run, device(0.8 * frozen), 8, {})
    assert best.mesh.devices == 2 and best.fits
    assert best.cost.sizes.frozen_bytes < 0.6 * alone.cost.sizes.frozen_bytes


def test_nothing_holds_it(run):
    assert smallest(run, device(1), 8, {}) is None
    assert fastest(run, device(1), 4) is None


def test_what_is_known_is_not_searched_again(run, alone):
    assert smallest(run, device(1), 1, {1: alone}) is alone


def test_time_is_that_of_the_compiled_kernels_or_else_of_estimated_ones(alone):
    """The device's program has one product, of 1 TFLOP."""
    text = "ENTRY %main () -> f32[] {\n" + "".join(
        f"  %{name} = bf16[10000,10000]{{1,0}} {kind}\n"
        for name, kind in (
            ("a", "parameter(0)"), ("b", "parameter(1)"),
            ("c", "dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}"),
        )
    ) + "}\n"  # fmt: skip
    plan = alone._replace(device=DEVICES["h100"])
    assert plan.time("bfloat16") == step_time(
        plan.cost.kernels, plan.cost.work, plan.device, "bfloat16"
    )
    plan = alone._replace(device=DEVICES["v5e"])
    estimated, moved = (
        plan.time("bfloat16"),
        sum(
            kernel.times * kernel.bytes for kernel in plan.cost.kernels if kernel.category == OTHER
        ),
    )
    # TPUs do much of it in the kernels of products.
    assert estimated.other == pytest.approx(TPU_SHARE * moved / 819e9 / BANDWIDTH_SHARE, rel=1e-3)
    plan = plan._replace(compiled=Compiled(0, 0, 0, count_work(text), text))
    assert plan.time("bfloat16").step == pytest.approx(2e12 / 197e12 / 0.72)
    assert plan.time("float32") != estimated


@pytest.mark.long
def test_network_time_is_added(run):
    two = plan_as_configured(_with_model(run, 2), DEVICES["h100"], 2).time("bfloat16")
    assert two.network > 0


def _with_model(run, size):
    from jaxprompt.planning.abstract_run import open_run

    return open_run(run.config.replace({"mesh.model": size}))
