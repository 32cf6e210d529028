"""The heads of a bank: each example is judged by the numbers of its own prompt."""

import jax
import numpy as np
import pytest
from tiny import assert_close, draw_params, jit, make_batch, make_tiny

from jaxprompt.heads import label_rows, linear
from jaxprompt.models import bank
from jaxprompt.models.bank import Bank, group_heads, stack_injections
from jaxprompt.types import Injection, Stream

CLASSES, PROMPTS, ROWS = 3, 5, 8
HEADS = {
    "linear": linear.Classifier(CLASSES),
    "trained": linear.Classifier(CLASSES, "trained"),
    "mean": linear.Classifier(CLASSES, "mean"),
    "choices": linear.Classifier(1),
    "rows": label_rows.LabelRows((1,) * CLASSES, "full"),
}


@pytest.mark.default_cases("trained-picked", "choices-picked", "rows-in turn")
@pytest.mark.parametrize("most", [0, 2**22], ids=["in turn", "picked"])
@pytest.mark.parametrize("kind", HEADS)
def test_each_example_is_judged_by_its_own_numbers(kind, most, monkeypatch):
    monkeypatch.setattr(bank, "_MAX_GATHERED", most)
    backbone, weights = make_tiny()
    head, choices = HEADS[kind], 2 if kind == "choices" else 1
    batch = make_batch(rows=ROWS, classes=CLASSES, choices=choices)
    batch = batch._replace(prompt=np.arange(ROWS, dtype=np.int32) % PROMPTS)
    bound, rng = backbone.bind({"params": weights}), np.random.default_rng(0)
    hidden = backbone.apply({"params": weights}, batch, Injection(), deterministic=True)

    def given(number):
        rows = rng.normal(size=(CLASSES, 16)).astype(np.float32) if kind == "rows" else None
        return Injection(Stream(), rows=rows)

    added = [given(number) for number in range(PROMPTS)]
    args = hidden, batch, added[0], bound
    numbers = [draw_params(head, *args, seed=n, deterministic=True) for n in range(PROMPTS)]
    kinds, stacked, of = group_heads([head] * PROMPTS, numbers, [module.rows for module in added])
    assert of == [0] * PROMPTS
    every = Bank(backbone, kinds, choices)
    (actual,) = jit(every.scores)({"backbone": weights}, stack_injections(added), stacked, batch)
    alone = [
        head.apply({"params": head_params}, hidden, batch, more, bound, deterministic=True)
        for head_params, more in zip(numbers, added, strict=True)
    ]
    expected = np.stack([np.asarray(alone[n])[i] for i, n in enumerate(batch.prompt)])
    assert_close(actual, expected, 1e-6)
    assert not np.allclose(expected, alone[0], atol=1e-3)


def test_the_work_of_heads_does_not_grow_with_their_number():
    """Of small ones: two prompts and two hundred take the same, but for what picks them."""
    backbone, weights = make_tiny()
    head, batch = HEADS["trained"], make_batch(rows=ROWS, classes=CLASSES)
    batch = batch._replace(prompt=np.zeros(ROWS, np.int32))
    bound = backbone.bind({"params": weights})
    hidden = backbone.apply({"params": weights}, batch, Injection(), deterministic=True)
    params = draw_params(head, hidden, batch, Injection(), bound, deterministic=True)
    flops = []
    for count in (2, 200):
        kinds, stacked, _ = group_heads([head] * count, [params] * count, [None] * count)
        added, every = stack_injections([Injection()] * count), Bank(backbone, kinds)
        step = jax.jit(every.scores).lower({"backbone": weights}, added, stacked, batch)
        text = step.as_text()
        assert "while" not in text
        flops.append(step.compile().cost_analysis()["flops"])
    assert flops[1] == pytest.approx(flops[0], rel=0.01)
