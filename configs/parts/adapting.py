"""Objectives of pre-training; each function fills the blocks. All weights train."""

from jaxprompt.config.open_blocks import make_block

STEPS = 10_000  # of T5's LM adaptation in PPT (Gu et al. 2022, section 4.1)


def mlm(config):
    """Masked language modelling of a BERT or RoBERTa (Devlin et al. 2019, section 3.1)."""
    _fill(config, "mlm", length=128, batch=64, lr=1e-4)


def rtd(config):
    """Replaced-token detection of an ELECTRA or a BERT encoder (Clark et al. 2020)."""
    _fill(config, "rtd", length=128, batch=64, lr=1e-4)


def clm(config):
    """Causal language modelling of a GPT-2."""
    _fill(config, "clm", length=512, batch=16, lr=1e-4)


def prefix_lm(config):
    """LM adaptation of a T5: prefix language modelling (Lester et al. 2021, section 3.1)."""
    _fill(config, "prefix_lm", length=512, batch=32, lr=1e-3)
    _adafactor(config, {"name": "constant"})


def span_corruption(config):
    """Span corruption of a T5 (Raffel et al. 2020, section 3.1.4)."""
    _fill(config, "span_corruption", length=512, batch=32, lr=1.0)
    _adafactor(config, {"name": "inverse_sqrt", "warmup_steps": 10_000})


def _fill(config, objective, length, batch, lr):
    config.prompt = make_block("prompt", "none")
    config.objective = {"name": objective}
    config.data.max_len, config.data.batch, config.data.eval_batch = length, batch, batch
    config.backbone.dropout = 0.0
    config.optim.lr, config.optim.weight_decay = lr, 0.01
    config.optim.schedule = {"name": "warmup_linear", "warmup_steps": STEPS // 20}
    config.train.total_epochs, config.train.total_steps = 0.0, STEPS
    config.train.eval_steps = config.train.save_steps = STEPS // 20


def _adafactor(config, schedule):
    """Adafactor with rates relative to each matrix's scale (Raffel et al. 2020, section 3.1.2)."""
    config.optim.name, config.optim.scaled, config.optim.weight_decay = "adafactor", True, 0.0
    config.optim.schedule = schedule
