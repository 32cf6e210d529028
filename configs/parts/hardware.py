"""Settings by hardware; each function changes how the backbone runs, never what it computes."""


def cpu(c):
    """float32, one compiled layer."""
    c.backbone.dtype = "float32"
    c.backbone.stack = "scan"


def accelerator(c):
    """bfloat16 backbone, float32 prompts, lengths in steps that fill the matrix units."""
    c.backbone.dtype = "bfloat16"
    c.data.multiple = 32
