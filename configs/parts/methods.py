"""Methods by name; each function sets the block `prompt`, what trains, and the learning rate.

`fields` are those of the method, `ipt` and `discriminator` those of that method and head;
docs/config.md lists them.
"""

from configs.parts import heads
from jaxprompt.config.open_blocks import make_block


def prefix(config, lr=1e-2, dropout=0.1, **fields):
    """P-tuning v2: keys and values in every layer; for T5 also `decoder` and `cross`."""
    config.prompt = make_block("prompt", "prefix", dropout=dropout, **fields)
    config.trainable = ()
    config.optim.lr = lr


def soft(config, lr=3e-2, start="vocab", **fields):
    """Soft prompts."""
    config.prompt = make_block("prompt", "soft", start=start, **fields)
    config.trainable = ()
    config.optim.lr = lr


def lester(config, length=100, start="vocab"):
    """Prompt tuning of T5 as published (Lester et al. 2021, section 3)."""
    soft(config, lr=0.3, start=start, length=length, top=5_000)  # section 3.2
    config.backbone.dropout = 0.0
    config.optim.name = "adafactor"
    config.optim.schedule = {"name": "constant"}
    config.optim.weight_decay = 1e-5  # per step, not multiplied by the learning rate
    config.optim.decay_rate = 0.8
    config.optim.clip = 0.0
    config.data.batch = 32
    config.train.total_steps = 30_000
    config.train.total_epochs = 0.0
    config.train.total_examples = 0


def p_tuning(config, length=9, lr=1e-3, **fields):
    """P-tuning on a frozen backbone; `trainable` and optim.lr_backbone can tune it too."""
    config.prompt = make_block("prompt", "p_tuning", length=length, **fields)
    config.trainable = ()
    config.optim.lr = lr


def ipt(config, lr=1e-2, **fields):
    """Instance-wise prompts from trained word embeddings (Jiang et al. 2022)."""
    config.prompt = make_block("prompt", "ipt", **fields)
    config.trainable = ()
    config.optim.lr = lr


def ipt_encoder(config, lr=1e-2, encoder="cnn", fixed=True, utilization=0.3, **ipt):
    """Instance-wise prompts that an encoder computes from fixed word embeddings."""
    METHODS["ipt"](  # section 5.6
        config, lr, encoder=encoder, fixed=fixed, utilization=utilization, **ipt
    )


def compose(config, parts="prefix(length=10)+soft(length=10)", lr=1e-2):
    """Several methods at once, all of them trained; `trainable` can select some."""
    config.prompt = make_block("prompt", "compose", parts=parts)
    config.trainable = ()
    config.optim.lr = lr


def dart(config, length=3, text="", fluency=1.0, lr=2e-5, **fields):
    """DART: embeddings of template and labels, and the whole backbone (Zhang et al. 2022)."""
    heads.label_rows(config)
    config.prompt = make_block(
        "prompt", "dart", length=length, text=text, fluency=fluency, **fields
    )
    config.trainable = (r"prompt/.*", r"head/.*", r"backbone/.*")
    config.optim.lr, config.optim.weight_decay = lr, 0.01  # appendix A: from its grids
    config.optim.no_decay = (r".*/bias\d*",)  # appendix A: non-bias parameters decay
    config.optim.clip = 1.0


def dpt_words(config, lr=2e-5, **discriminator):
    """DPT: classes in the input, scored by ELECTRA's head; all is tuned (Yao et al. 2022)."""
    heads.discriminator(config, **discriminator)
    _no_prompt(config, (r"backbone/.*", r"head/.*"), lr)  # appendix A


def dpt(config, lr=2e-5, length=0, copies=True, **discriminator):
    """DPT with trained copies of the embeddings of the class names."""
    heads.discriminator(config, copies=copies, **discriminator)
    config.prompt = make_block("prompt", "dpt", length=length)
    config.trainable = (r"prompt/.*", r"backbone/.*", r"head/.*")
    config.optim.lr = lr


def _no_prompt(config, trainable, lr):
    config.prompt = make_block("prompt", "none")
    config.trainable = trainable
    config.optim.lr = lr


def full(config, lr=5e-5):
    """Full fine-tuning: the backbone and the head."""
    _no_prompt(config, (r"backbone/.*", r"head/.*"), lr)


def head_only(config, lr=1e-2):
    """Only the linear head, on a frozen backbone."""
    _no_prompt(config, (r"head/.*",), lr)


def bias_only(config, lr=1e-3):
    """Every bias of the backbone, and the head."""
    _no_prompt(config, (r"backbone/.*/bias", r"head/.*"), lr)


def layernorm_only(config, lr=1e-3):
    """Scale and bias of every LayerNorm, and the head."""
    _no_prompt(config, (r"backbone/.*norm/.*", r"head/.*"), lr)


def zero_shot(config):
    """No training, for `evaluate`: the template and the backbone's LM head."""
    heads.verbalizer(config)
    _no_prompt(config, (), 0.0)


METHODS = {
    function.__name__: function
    for function in (
        prefix, soft, dart, p_tuning, ipt, ipt_encoder, compose, lester, dpt, dpt_words, full,
        head_only, bias_only, layernorm_only, zero_shot
    )
}  # fmt: skip
