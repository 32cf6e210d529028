"""Runs of ALBERT, DeBERTa and ModernBERT, with tokenizers of their own classes."""

import pytest
from tiny_run import (
    jaxprompt,
    make_backbone,
    make_config,
    make_data,
    train_and_export,
)

pytestmark = pytest.mark.long

FAMILIES = ("albert", "deberta", "deberta_v2", "modernbert")


@pytest.fixture(scope="module", params=FAMILIES)
def own(request, tmp_path_factory):
    return make_backbone(tmp_path_factory.mktemp("kinds") / request.param, request.param)


def test_deep_prompts_with_label_words_learn_and_predict(own, tmp_path, capsys):
    data = make_data(tmp_path / "data")
    c = make_config(
        own, data, "prefix", prompt__layers="1-2", head__name="verbalizer", optim__lr=0.1,
        train__total_steps=60, backbone__dropout=0, task__template="{text} about [mask] .",
    )  # fmt: skip
    result, workdir, _ = train_and_export(capsys, tmp_path, c)
    assert result["dev"]["accuracy"] > 0.4, result["dev"]
    rows = data / "test.jsonl"
    code, out, err = jaxprompt(capsys, "predict", f"--workdir={workdir}", f"--input={rows}")
    assert code == 0 and len(out.splitlines()) == 24, err
