"""What is wrong with a config whatever its data and its backbone."""

from typing import Any

from jaxprompt.build.demonstrations import check_demos
from jaxprompt.build.examples import in_form, read_task
from jaxprompt.build.method import head_of, method_of, starts_of
from jaxprompt.build.scorer import check_template, choose_template
from jaxprompt.config.schema import check_fields
from jaxprompt.data.text.target import read_answer
from jaxprompt.errors import InputError, at_least
from jaxprompt.training import optim


def check_config(c: Any) -> None:
    """Raises InputError for all that is wrong with a config whatever the data and the backbone."""
    check_fields(c.to_dict())
    check_totals(c.train)
    optim.check_warmup(c.optim.schedule, c.optim.warmup_steps, c.optim.warmup_ratio)
    if c.data.batch % c.optim.accumulate:
        raise InputError(
            f"data.batch={c.data.batch} must divide by optim.accumulate={c.optim.accumulate}"
        )
    for field in ("data", "model"):
        if c.mesh[field] != -1:
            at_least(f"mesh.{field}", c.mesh[field], 1)
    if c.cache.folder and c.cache.where != "disk":
        raise InputError(f"cache.folder={c.cache.folder!r} needs cache.where=disk")
    prompt, head = method_of(c), head_of(c)
    if "frequent" in starts_of(c) and not c.corpus.path:
        raise InputError(
            "prompt.start=frequent draws from the most frequent words of a corpus, and corpus.path "
            "is empty; give the text (PPT takes that of pre-training), or take start=task or vocab"
        )
    if c.ppt.task:  # its texts and words are those of a pattern
        return
    task = in_form(c, read_task(c.task))
    head.check_task(task)
    style = "causal" if task.causal and not task.template else "masked"  # not known yet
    text = choose_template(task, head, style, c.task.form, c.task.template)
    parsed = check_template(task, text, head, c.task.form, prompt.num_slots())
    check_demos(c, head, task, parsed)
    read_answer(c.task.answer or "{label}")
    head.objectives(c.optim.smoothing)


def check_totals(train: Any) -> None:
    """Raises InputError where a run has no length or several, or never looks at dev."""
    totals = {name: train[name] for name in ("total_steps", "total_epochs", "total_examples")}
    if sum(value > 0 for value in totals.values()) != 1:
        shown = ", ".join(f"train.{name}={value}" for name, value in totals.items())
        cure = "set the others to 0" if any(totals.values()) else "set one above 0"
        raise InputError(f"exactly one total must be above 0, not {shown}; {cure}")
    if not (train.eval_steps or train.eval_epochs):
        raise InputError("train.eval_steps=0 and train.eval_epochs=0; set one above 0")
