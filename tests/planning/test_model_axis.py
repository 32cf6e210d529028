"""The smallest model axis, on devices as small as the models here."""

from types import SimpleNamespace

import jax
import pytest

from jaxprompt.build.placement import build_placement
from jaxprompt.cli.options import choose_mesh
from jaxprompt.config.load import load_config
from jaxprompt.errors import InputError
from jaxprompt.parallel.devices import DEVICES
from jaxprompt.planning import model_axis
from jaxprompt.planning.cost import measure_sizes, step_shapes
from jaxprompt.planning.model_axis import compiled_bytes, smallest_model_axis, usable_bytes
from jaxprompt.planning.search import RESERVE, plan_as_configured

T5 = "google/t5-v1_1-small"


@pytest.fixture(scope="module")
def run(make_run):
    return make_run(T5, data__batch=8, data__max_len=64, mesh__data=-1, mesh__model=0)


def resident(run, model, devices):
    """Counts the bytes of the arguments of a step on one device."""
    placement = build_placement(run.config.replace({"mesh.model": model}), devices)
    return measure_sizes(step_shapes(run, placement), placement).bytes


def choose(monkeypatch, run, needed, limit):
    """Chooses for `limit` bytes, if a step takes `needed` bytes with each model axis."""
    compiled = []

    def compile_on(run, placement):
        compiled.append(placement.mesh.shape["model"])
        return needed[compiled[-1]]

    monkeypatch.setattr(model_axis, "compiled_bytes", compile_on)
    return *smallest_model_axis(run, jax.devices()[:2], limit), compiled


def test_the_smallest_that_fits_is_chosen(run, monkeypatch):
    whole, half = (resident(run, model, jax.devices()[:2]) for model in (1, 2))
    assert half < 0.6 * whole
    model, message, _ = choose(monkeypatch, run, {1: 2 * whole}, 2 * whole)
    assert model == 1 and message.endswith("GiB per device")
    # A step of one device is compiled only if its arguments fit.
    model, message, compiled = choose(monkeypatch, run, {1: 3 * whole, 2: whole}, 2 * whole)
    assert (model, compiled) == (2, [1, 2])
    assert f"; with mesh.model=1 {3 * whole / 2**30:.2f}" in message
    model, message, compiled = choose(monkeypatch, run, {2: half}, (half + whole) // 2)
    assert (model, compiled) == (2, [2]) and "mesh.model=1 at least" in message
    assert choose(monkeypatch, run, {1: 0, 2: half}, 2 * whole)[0] == 2  # 0: the compiler failed


def test_a_run_that_fits_nowhere_is_refused(run, monkeypatch):
    with pytest.raises(InputError, match="fits on no mesh of 2 x cpu"):
        choose(monkeypatch, run, {}, 1000)
    indivisible = SimpleNamespace(config=run.config.replace({"mesh.data": 3}))
    with pytest.raises(InputError, match="does not divide the 2 devices"):
        choose(monkeypatch, indivisible, {}, 1000)


@pytest.mark.long
def test_the_compiled_step_decides(run):
    devices = jax.devices()[:2]
    placements = [build_placement(run.config.replace({"mesh.model": n}), devices) for n in (1, 2)]
    one, two = (compiled_bytes(run, placement) for placement in placements)
    assert two < one and smallest_model_axis(run, devices, one)[0] == 1
    assert smallest_model_axis(run, devices, one - 1)[0] == 2


def test_on_a_cpu_it_is_1_and_said_once(capsys):
    config = load_config("base", [("mesh.model", "0")])
    for seed in (0, 1):
        assert choose_mesh(config.replace({"seed": seed})) == config.replace(
            {"seed": seed, "mesh.model": 1}
        )
    line = "mesh.model=1, because CPU devices share their memory"
    assert capsys.readouterr().err.splitlines() == [line]
    assert choose_mesh(load_config("base")) == load_config("base")
    with pytest.raises(InputError, match="mesh.model=0 is only chosen by train"):
        build_placement(config)


def test_bytes_of_a_device():
    device = lambda kind, stats: SimpleNamespace(device_kind=kind, memory_stats=lambda: stats)
    assert usable_bytes(device("NVIDIA H100", {"bytes_limit": 1000})) == int(1000 * (1 - RESERVE))
    memory = DEVICES["v5e"].memory
    assert usable_bytes(device("TPU v5 lite", None)) == int(memory * (1 - RESERVE))
    with pytest.raises(InputError, match="memory of abacus is unknown; set mesh.model"):
        usable_bytes(device("abacus", {}))


def test_a_plan_chooses_it_too(run, monkeypatch):
    from jaxprompt.planning import search

    frozen = {n: resident(run, n, jax.devices()[:2]) for n in (1, 2)}
    monkeypatch.setattr(search, "step_cost", lambda run, placement, *_: SimpleNamespace(
        bytes=frozen[placement.mesh.shape["model"]]))  # fmt: skip
    monkeypatch.setattr(search, "eval_bytes", lambda *_: 0)
    small = DEVICES["v5e"]._replace(memory=int((frozen[1] - 1) / (1 - RESERVE)))
    assert plan_as_configured(run, small, 2).mesh[:2] == (1, 2)
    assert plan_as_configured(run, DEVICES["v5e"], 2).mesh[:2] == (2, 1)
    assert plan_as_configured(run, None, 2).mesh[:2] == (2, 1)
