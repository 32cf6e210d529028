"""PPT's comparison of methods with few examples, on any backbone (Gu et al. 2022, table 4).

The argument is TASK,METHOD,KIND: `--config=configs/ppt/cells.py:rte,ppt,masked`; see
configs/parts/ppt.py. Give backbone.path. The methods ppt, hybrid_ppt and unified_ppt start from the
exported prompt prompts/nsp, nss, cls or unified.
"""

from configs.base import get_config as base
from configs.parts.ppt import METHODS
from configs.ppt import read_cell


def get_config(cell="rte,pt,t5"):
    """Returns one run."""
    task, method, kind = read_cell(cell)
    c = base()
    METHODS[method](c, task, kind)
    return c
