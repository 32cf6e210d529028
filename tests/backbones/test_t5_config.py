"""What a config.json of a T5 says, leaves out, and may not say."""

import dataclasses

import pytest

from jaxprompt.backbones.t5 import make_config

HF = dict(
    vocab_size=60, d_model=32, d_kv=12, d_ff=48, num_layers=3, num_decoder_layers=2, num_heads=4,
    decoder_start_token_id=0, pad_token_id=0,
)  # fmt: skip


def test_what_a_config_may_leave_out():
    hf = {k: v for k, v in HF.items() if k not in ("num_decoder_layers", "pad_token_id")}
    assert make_config(hf).decoder_layers == 3
    del hf["decoder_start_token_id"]
    assert make_config(hf | dict(pad_token_id=7)).start == 7
    assert make_config(hf | dict(pad_token_id=7, decoder_start_token_id=None)).start == 7
    assert make_config(hf | dict(pad_token_id=7, decoder_start_token_id=0)).start == 0
    cfg = make_config(HF)
    theirs = pytest.importorskip("transformers").T5Config(**HF)
    assert (cfg.buckets, cfg.max_distance, cfg.eps) == (32, 128, theirs.layer_norm_epsilon)
    assert cfg.activation == "relu" and not cfg.gated and cfg.tied and cfg.scaled_output
    assert dataclasses.replace(cfg, dropout=0.1) == cfg  # T5's own rate
