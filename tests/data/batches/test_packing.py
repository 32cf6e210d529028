"""Packed examples: what is in each row, and that a step is that of one example per row."""

import itertools

import jax
import numpy as np
import pytest
from tiny import FIRST, assert_close, jit, make_params, make_tiny

from jaxprompt.data.batches.batching import EvalBatches, Layout, TrainBatches, count_units
from jaxprompt.data.batches.packing import pack_rows, plan_rows
from jaxprompt.data.text.encoded import Encoded, make_row
from jaxprompt.errors import InputError
from jaxprompt.layers.reading import TargetScores
from jaxprompt.models.model import Model
from jaxprompt.prompts import make_prompt
from jaxprompt.scoring.losses import text_loss
from jaxprompt.types import Role, SharedPrefix

SLOTS, ROOM = 3, 20


def documents(slots=0, count=7, seed=0):
    """Returns texts of 4 to 9 tokens after the slots, half of whose tokens are learned."""
    rng, rows = np.random.default_rng(seed), []
    for length in rng.integers(4, 10, count):
        ids = [0] * slots + rng.integers(FIRST, 53, length).tolist()
        roles = [Role.SOFT] * slots + [Role.TEXT] * int(length)
        slot = [*range(slots), *[-1] * int(length)]
        row = make_row(ids, slot, [0] * len(ids), roles, range(len(ids)))
        at = np.arange(slots + int(length) // 2, len(ids), dtype=np.int32)
        targets = rng.integers(FIRST, 53, len(at)).astype(np.int32)
        rows.append([Encoded(**row._asdict(), label_pos=at, targets=targets, cut=1)])
    return rows


def test_rows_are_filled_by_the_best_fit():
    assert plan_rows([3, 7, 5, 2, 5], 10) == [[0, 1], [2, 4], [3]]
    assert plan_rows([4, 4, 12, 2], 10) == [[0, 1, 3], [2]]
    lengths = np.random.default_rng(0).integers(1, 50, 500)
    plan = plan_rows(lengths, 64)
    assert sorted(i for row in plan for i in row) == list(range(500))
    filled = [lengths[row].sum() for row in plan]
    assert max(filled) <= 64 and len(plan) <= 1.05 * -(-lengths.sum() // 64)
    assert plan == plan_rows(lengths.tolist(), 64)


def test_a_document_keeps_its_positions():
    rows = documents(SLOTS, count=2)
    ((packed,),) = pack_rows(rows, 64)
    (first,), (second,) = rows
    size = len(first.ids)
    assert packed.ids.tolist() == [*first.ids, *second.ids] and packed.cut == 2
    assert packed.positions.tolist() == [*range(size), *range(len(second.ids))]
    assert packed.slot.tolist() == [*first.slot, *second.slot]
    assert packed.segments.tolist() == [1] * size + [2] * len(second.ids)
    assert packed.label_pos.tolist() == [*first.label_pos, *(second.label_pos + size)]
    assert packed.targets.tolist() == [*first.targets, *second.targets]
    for several in ([rows[0] * 2], [[first._replace(decoder=make_row(*[[]] * 5))]]):
        with pytest.raises(InputError, match="data.packed=False"):
            pack_rows(several, 64)


def test_an_epoch_has_every_document_once():
    rows, layout = documents(), Layout(batch=2, max_len=ROOM, pad_id=0, packed=True)
    stream = TrainBatches(rows, [-1] * 7, layout, seed=0, epochs=1, prefetch=0)
    assert stream.steps_per_epoch == -(-count_units(rows, layout) // 2) < 4
    batches = [next(stream) for _ in range(stream.steps_per_epoch)]
    texts = [
        ids[segments == number]
        for batch in batches
        for ids, segments in zip(batch.encoder.ids, batch.encoder.segments, strict=True)
        for number in range(1, segments.max() + 1)
    ]
    assert sorted(x.tolist() for x in texts) == sorted(row.ids.tolist() for (row,) in rows)
    # A prefix that the model adds takes no room in the rows.
    front = SharedPrefix((0,) * SLOTS, tuple(range(SLOTS)), (0,) * SLOTS, (Role.SOFT,) * SLOTS)
    shared = Layout(batch=2, max_len=ROOM + SLOTS, pad_id=0, packed=True, shared_prefix=front)
    assert count_units(documents(SLOTS), shared) == count_units(rows, layout)


MISTRAL = dict(model_type="mistral", sliding_window=5)  # which a shared prefix would leave
METHODS = "none", "soft", "shared", "prefix", "unshifted"
PACKED = [*itertools.product(["gpt2", "llama", "mistral"], METHODS)]
PACKED.remove(("mistral", "shared"))


@pytest.mark.default_cases("llama-shared")
@pytest.mark.parametrize("name, method", PACKED)
def test_a_step_of_packed_rows_is_that_of_one_document_per_row(name, method):
    """Its loss to 1e-6, and the gradients of the prompt as far as float32 goes."""
    family, changes = ("llama", MISTRAL) if name == "mistral" else (name, {})
    backbone, weights = make_tiny(family, **changes)
    slots = SLOTS if method in ("soft", "shared") else 0
    fields = {} if method == "none" else {"length": SLOTS}
    fields |= {"shift": method == "prefix"} if method in ("prefix", "unshifted") else {}
    kind = {"shared": "soft", "unshifted": "prefix"}.get(method, method)
    prompt = make_prompt(kind, backbone.dims, **fields)
    front = None
    if method == "shared":
        front = SharedPrefix((0,) * SLOTS, tuple(range(SLOTS)), (0,) * SLOTS, (Role.SOFT,) * SLOTS)
    model = Model(backbone, prompt, {"main": TargetScores()}, shared_prefix=front)
    params, rows = make_params(model, weights), documents(slots)

    def loss(trainable, batch):
        return text_loss(model.forward(params | trainable, batch), None, batch.weights)

    def measure(packed):
        layout = Layout(
            batch=8, max_len=2 * ROOM, pad_id=0, shift=prompt.position_shift(), packed=packed,
            shared_prefix=front,
        )  # fmt: skip
        (batch,) = EvalBatches(rows, [-1] * len(rows), layout)
        assert (batch.encoder.segments is not None) == packed
        (total, count), grads = jit(jax.value_and_grad(loss, has_aux=True))(
            {"prompt": params["prompt"]}, batch
        )
        return len(np.unique(batch.index)), float(total), float(count), grads

    many, loss_alone, count_alone, grads_alone = measure(False)
    few, loss_packed, count_packed, grads_packed = measure(True)
    assert many > few + 2
    assert count_packed == count_alone == sum(len(row.targets) for (row,) in rows)
    assert loss_packed == pytest.approx(loss_alone, rel=1e-6)
    assert_close(grads_packed, grads_alone, rtol=1e-5)
