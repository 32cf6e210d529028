"""Evaluation folds a prompt that is computed: once a pass, and the scores stay the same."""

import pytest
from tiny_run import make_config

from jaxprompt.build import evaluation
from jaxprompt.models.folding import fold_flat
from jaxprompt.runs.train import train_prompt

pytestmark = pytest.mark.long


@pytest.mark.parametrize("mesh", [{}, dict(mesh__data=4, mesh__model=2)], ids=["one", "eight"])
def test_a_computed_prompt_is_folded_once_a_pass(mesh, backbone, data, tmp_path, monkeypatch):
    fold, folds, results = fold_flat, [], []
    monkeypatch.setattr(evaluation, "fold_flat", lambda *args: folds.append(1) or fold(*args))
    for computed in (True, False):
        if not computed:
            monkeypatch.setattr("jaxprompt.prompts.prefix.Prompt.is_computed", lambda _: False)
        c = make_config(
            backbone, data, "prefix", prompt__hidden=8, prompt__layers="2-2",
            train__total_steps=4, train__eval_steps=2, data__eval_batch=16, **mesh,
        )  # fmt: skip
        result = train_prompt(c, str(tmp_path / str(computed))).to_json()
        results.append({name: result[name] for name in ("best_step", "dev", "test")})
    assert len(folds) == 3  # dev twice and test, of several batches each
    assert results[0] == results[1]


def test_a_table_is_not_folded(backbone, data, tmp_path, monkeypatch):
    monkeypatch.setattr(evaluation, "fold_flat", None)
    train_prompt(make_config(backbone, data, "prefix", train__total_steps=2), str(tmp_path / "run"))
