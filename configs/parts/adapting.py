"""Objectives of pre-training; each function fills what it takes. All weights train."""

from jaxprompt.config.open_blocks import make_block

STEPS = 10_000  # of T5's LM adaptation in PPT (Gu et al. 2022, section 4.1)


def mlm(c):
    """Masked language modelling of a BERT or RoBERTa (Devlin et al. 2019, section 3.1)."""
    _fill(c, "mlm", length=128, batch=64, lr=1e-4)


def rtd(c):
    """Replaced-token detection of an ELECTRA (Clark et al. 2020), or of a BERT's trunk."""
    _fill(c, "rtd", length=128, batch=64, lr=1e-4)


def clm(c):
    """Causal language modelling of a GPT-2."""
    _fill(c, "clm", length=512, batch=16, lr=1e-4)


def prefix_lm(c):
    """LM adaptation of a T5: prefix language modelling (Lester et al. 2021, section 3.1)."""
    _fill(c, "prefix_lm", length=512, batch=32, lr=1e-3)
    _adafactor(c, {"name": "constant"})


def span_corruption(c):
    """Span corruption of a T5 (Raffel et al. 2020, section 3.1.4)."""
    _fill(c, "span_corruption", length=512, batch=32, lr=1.0)
    _adafactor(c, {"name": "inverse_sqrt", "warmup_steps": 10_000})


def _fill(c, objective, length, batch, lr):
    c.prompt = make_block("prompt", "none")
    c.objective = {"name": objective}
    c.data.max_len, c.data.batch, c.data.eval_batch = length, batch, batch
    c.backbone.dropout = 0.0
    c.optim.lr, c.optim.weight_decay = lr, 0.01
    c.optim.schedule = {"name": "warmup_linear", "warmup_steps": STEPS // 20}
    c.train.total_epochs, c.train.total_steps = 0.0, STEPS
    c.train.eval_steps = c.train.save_steps = STEPS // 20


def _adafactor(c, schedule):
    """As T5 was trained, with rates relative to each matrix (Raffel et al. 2020, section 3.1.2)."""
    c.optim.name, c.optim.scaled, c.optim.weight_decay = "adafactor", True, 0.0
    c.optim.schedule = schedule
