"""PPT's comparison of methods with few examples, on any backbone (Gu et al. 2022, table 4).

The argument is TASK,METHOD,KIND of configs/parts/ppt.py: `--config=ppt/cells:rte,ppt,masked`. Set
backbone.path. The methods ppt, hybrid_ppt and unified_ppt start from the exported prompt
prompts/nsp, prompts/nss, prompts/cls or prompts/unified.
"""

from configs.base import paper as base
from configs.parts.ppt import ALL_KINDS, METHODS, TASKS
from jaxprompt.config.load import read_argument


def get_config(cell=""):
    """Returns one run."""
    task, method, kind = read_argument(
        cell, TASK=("rte", TASKS), METHOD=("pt", METHODS), KIND=("t5", ALL_KINDS)
    )
    config = base()
    METHODS[method](config, task, kind)
    return config
