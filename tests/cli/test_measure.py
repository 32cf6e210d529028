"""Evaluation folds a prompt that is computed: once a pass, and the scores stay the same."""

import pytest
from tiny_run import make_config

from jaxprompt.build import evaluation
from jaxprompt.models.folding import fold_flat
from jaxprompt.runs.train import train_prompt


@pytest.mark.long
def test_a_computed_prompt_is_folded_once_a_pass(backbone, data, tmp_path, monkeypatch):
    folds, results = [], []
    monkeypatch.setattr(evaluation, "fold_flat", lambda *args: folds.append(1) or fold_flat(*args))
    for is_computed in (True, False):
        if not is_computed:
            monkeypatch.setattr("jaxprompt.prompts.prefix.Prompt.is_computed", lambda _: False)
        c = make_config(
            backbone, data, "prefix", prompt__hidden=8, prompt__layers="2-2", train__total_steps=4,
            train__eval_steps=2, data__eval_batch=16, mesh__data=4, mesh__model=2,
        )  # fmt: skip
        result = train_prompt(c, str(tmp_path / str(is_computed))).to_json()
        results.append({name: result[name] for name in ("best_step", "dev", "test")})
        assert len(folds) == 3  # dev twice and test, of several batches each
    assert results[0] == results[1]
