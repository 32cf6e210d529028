"""The script of a StableHLO export, on files without a program."""

import json

from jaxprompt.api.run_scorer import make_inputs
from jaxprompt.data.text.tokenizer import encode_texts, special_ids


def test_the_name_of_a_special_token_is_the_text_that_jaxprompt_reads(t5, tmp_path):
    """T5's tokenizer gives </s> in a text the id of the token."""
    t5.backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    encoding = {
        "leading_space": False, "max_tokens": 20, "text_at": 0, "row": {"ids": [0]},
        "special_ids": sorted(special_ids(t5)), "unk_id": t5.unk_token_id, "label_pos": None,
        "constants": {}, "padding": {"ids": t5.pad_token_id}, "padding_side": "right",
    }  # fmt: skip
    inputs = [{"name": "ids", "dtype": "int32"}, {"name": "mask", "dtype": "bool"}]
    card = {"encoding": encoding, "inputs": inputs}
    (tmp_path / "scorer.json").write_text(json.dumps(card))
    texts = ["the </s> cat", "a <pad> <extra_id_0>", ""]
    actual = make_inputs(tmp_path, texts)
    rows = [ids[mask].tolist() for ids, mask in zip(actual["ids"], actual["mask"], strict=True)]
    assert rows == encode_texts(t5, texts) and t5.eos_token_id not in rows[0]
