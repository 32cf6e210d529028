"""Methods by name; each function replaces the method block and sets what trains.

`fields` are the method's own, as docs/config.md lists them.
"""

from configs.parts import heads
from jaxprompt.config.open_blocks import make_block


def prefix(c, lr=1e-2, dropout=0.1, **fields):
    """P-tuning v2: keys and values in every layer; T5 takes `decoder` and `cross` besides."""
    c.prompt = make_block("prompt", "prefix", dropout=dropout, **fields)
    c.trainable = ()
    c.optim.lr = lr


def soft(c, lr=3e-2, start="vocab", **fields):
    """Soft prompts."""
    c.prompt = make_block("prompt", "soft", start=start, **fields)
    c.trainable = ()
    c.optim.lr = lr


def lester(c, length=100, start="vocab"):
    """Prompt tuning of T5 as published (Lester et al. 2021, section 3)."""
    soft(c, lr=0.3, start=start, length=length, top=5_000)  # section 3.2
    c.backbone.dropout = 0.0
    c.optim.name = "adafactor"
    c.optim.schedule = {"name": "constant"}
    c.optim.weight_decay = 1e-5  # a step, whatever the rate is
    c.optim.decay_rate = 0.8
    c.optim.clip = 0.0
    c.data.batch = 32
    c.train.total_steps = 30_000
    c.train.total_epochs = 0.0
    c.train.total_examples = 0


def p_tuning(c, length=9, lr=1e-3, **fields):
    """P-tuning on a frozen backbone; `trainable` and optim.lr_backbone tune that too."""
    c.prompt = make_block("prompt", "p_tuning", length=length, **fields)
    c.trainable = ()
    c.optim.lr = lr


def ipt(c, lr=1e-2, **fields):
    """Instance-wise prompts: a trained row per word (Jiang et al. 2022)."""
    c.prompt = make_block("prompt", "ipt", **fields)
    c.trainable = ()
    c.optim.lr = lr


def ipt_encoder(c, lr=1e-2, encoder="cnn", utilization=0.3, **fields):
    """Instance-wise prompts that an encoder computes from fixed rows of words."""
    ipt(c, lr, encoder=encoder, fixed=True, utilization=utilization, **fields)  # section 5.6


def compose(c, parts="prefix(length=10)+soft(length=10)", lr=1e-2):
    """Several methods at once, all of whose numbers train; `trainable` names fewer."""
    c.prompt = make_block("prompt", "compose", parts=parts)
    c.trainable = ()
    c.optim.lr = lr


def dart(c, length=3, text="", fluency=1.0, lr=2e-5, **fields):
    """DART: template and label rows, and the whole backbone with them (Zhang et al. 2022)."""
    heads.label_rows(c)
    c.prompt = make_block("prompt", "dart", length=length, text=text, fluency=fluency, **fields)
    c.trainable = (r"prompt/.*", r"head/.*", r"backbone/.*")
    c.optim.lr, c.optim.weight_decay = lr, 0.01  # appendix A: of its grids
    c.optim.no_decay = (r".*/bias\d*",)  # appendix A: non-bias parameters decay
    c.optim.clip = 1.0


def dpt_words(c, lr=2e-5, **fields):
    """DPT: every class in the input, judged by ELECTRA's own head, all tuned (Yao et al. 2022)."""
    heads.discriminator(c, **fields)
    _no_prompt(c, (r"backbone/.*", r"head/.*"), lr)  # appendix A


def dpt(c, lr=2e-5, length=0, **fields):
    """DPT whose classes are written by trained copies of their subwords, tuned with the rest."""
    heads.discriminator(c, copies=True, **fields)
    c.prompt = make_block("prompt", "dpt", length=length)
    c.trainable = (r"prompt/.*", r"backbone/.*", r"head/.*")
    c.optim.lr = lr


def _no_prompt(c, trainable, lr):
    c.prompt = make_block("prompt", "none")
    c.trainable = trainable
    c.optim.lr = lr


def full(c, lr=5e-5):
    """Full fine-tuning: the backbone and the head."""
    _no_prompt(c, (r"backbone/.*", r"head/.*"), lr)


def head_only(c, lr=1e-2):
    """The linear head alone, on the frozen backbone."""
    _no_prompt(c, (r"head/.*",), lr)


def bias_only(c, lr=1e-3):
    """Every bias of the backbone, and the head."""
    _no_prompt(c, (r"backbone/.*/bias", r"head/.*"), lr)


def layernorm_only(c, lr=1e-3):
    """Scale and bias of every LayerNorm, and the head."""
    _no_prompt(c, (r"backbone/.*norm/.*", r"head/.*"), lr)


def zero_shot(c):
    """No training: the template and the backbone's own language-model head. For `evaluate`."""
    heads.verbalizer(c)
    _no_prompt(c, (), 0.0)


METHODS = {
    function.__name__: function
    for function in (
        prefix, soft, dart, p_tuning, ipt, ipt_encoder, compose, lester, dpt, dpt_words, full,
        head_only, bias_only, layernorm_only, zero_shot
    )
}  # fmt: skip
