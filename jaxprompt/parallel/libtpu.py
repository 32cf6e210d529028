"""Flags of libtpu, which contains the compiler of TPUs."""

import importlib.util
import os

VARIABLE = "LIBTPU_INIT_ARGS"  # read once, when JAX loads libtpu
# Collectives run while other work does. Off by default: all-reduces, and all-gathers on v5p. These
# are MaxText's flags for its all-gathers and all-reduces ("continuation fusion").
FLAGS = (
    "--xla_enable_async_all_gather=true",
    "--xla_enable_async_all_reduce=true",
    "--xla_tpu_enable_async_collective_fusion=true",
    "--xla_tpu_enable_async_collective_fusion_fuse_all_gather=true",
    "--xla_tpu_enable_async_collective_fusion_fuse_all_reduce=true",
    "--xla_tpu_enable_async_collective_fusion_multiple_steps=true",
    "--xla_tpu_overlap_compute_collective_tc=true",
)


def set_flags() -> None:
    """Puts FLAGS before the flags of the user, of which the last one counts.

    Call it before JAX looks for devices. Without libtpu, nothing is changed.
    """
    flags, user_flags = " ".join(FLAGS), os.environ.get(VARIABLE, "")
    if importlib.util.find_spec("libtpu") and flags not in user_flags:
        os.environ[VARIABLE] = f"{flags} {user_flags}".strip()
