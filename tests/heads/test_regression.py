"""Numbers as answers: the loss, the correlations, and what a card keeps."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from jaxprompt.data.tasks.registry import custom_task, get_task
from jaxprompt.heads import make_head
from jaxprompt.scoring.losses import squared_error
from jaxprompt.scoring.metrics import score_numbers
from jaxprompt.types import ABSENT


def test_the_loss_is_torchs():
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    scores, labels = rng.normal(size=(6, 1)), rng.uniform(0, 5, 6)
    total, count = squared_error(jnp.array(scores), jnp.array(labels), jnp.ones(6))
    right = torch.nn.MSELoss()(torch.tensor(scores[:, 0]), torch.tensor(labels))
    assert float(total / count) == pytest.approx(float(right), rel=1e-5)
    # Filling, which has no score, changes nothing.
    more = np.vstack([scores, [[ABSENT]]]), np.append(labels, -1), np.append(np.ones(6), 0)
    assert [float(x) for x in squared_error(*map(jnp.array, more))] == [
        pytest.approx(float(total)), 6.0
    ]  # fmt: skip


def test_correlations_are_those_of_their_definitions():
    rng = np.random.default_rng(1)
    gold = rng.integers(0, 6, 40).astype(float)  # with ties
    pred = gold + rng.normal(0, 2, 40)
    found = score_numbers("spearman", gold, pred)
    assert list(found) == ["spearman", "pearson"]
    assert found["pearson"] == pytest.approx(np.corrcoef(gold, pred)[0, 1])
    ranks = lambda x: [np.mean([(x < y).sum(), (x <= y).sum() - 1]) for y in x]
    assert found["spearman"] == pytest.approx(np.corrcoef(ranks(gold), ranks(pred))[0, 1])
    assert score_numbers("pearson", gold, np.ones(40)) == {"pearson": 0.0, "spearman": 0.0}
    assert not any(map(math.isnan, score_numbers("pearson", [1.0], [2.0]).values()))


def test_an_answer_lies_within_the_limits_of_its_task():
    """As the number between 0 and 5 of STS-B; without limits it is what the layer gives."""
    found, head = np.array([[-1.5], [2.25], [7.0]], np.float32), make_head("regression")
    answers = lambda task: [own["prediction"] for own in head.answers(task, (), None, found, 1)]
    assert answers(get_task("stsb")) == [0.0, 2.25, 5.0]
    assert answers(custom_task(fields=("text",), number="n")) == [-1.5, 2.25, 7.0]


def test_it_reads_what_the_linear_head_reads():
    head, other = make_head("regression", pooler="mean"), make_head("linear", pooler="mean")
    assert head.block() == other.block() | {"name": "regression"}
