"""Checks of a config that need neither its data nor its backbone."""

from jaxprompt.build.demonstrations import check_demos
from jaxprompt.build.examples import apply_form, read_task
from jaxprompt.build.method import get_head, get_method, prompt_starts
from jaxprompt.build.scorer import check_template, choose_template
from jaxprompt.config.run import RunConfig
from jaxprompt.data.text.target import read_answer
from jaxprompt.errors import InputError
from jaxprompt.scoring.metrics import check_package
from jaxprompt.training.trackers import check_tracker


def check_config(config: RunConfig) -> None:
    """Raises InputError for all errors of a config that need no data and no backbone."""
    prompt, head = get_method(config), get_head(config)
    train, batch = config.train, config.data.batch
    totals = {
        f"train.{name}": getattr(train, name)
        for name in ("total_steps", "total_epochs", "total_examples")
    }
    values = ", ".join(f"{name}={value}" for name, value in totals.items())
    if sum(value > 0 for value in totals.values()) != 1:
        raise InputError(
            f"exactly one total must be above 0, not {values}; set one above 0 and the others to 0"
        )
    if not (train.eval_steps or train.eval_epochs):
        raise InputError("train.eval_steps=0 and train.eval_epochs=0; set one above 0")
    if batch % config.optim.accumulate:
        raise InputError(
            f"data.batch={batch} must be divisible by optim.accumulate={config.optim.accumulate}"
        )
    if config.cache.folder and config.cache.location != "disk":
        raise InputError(f"cache.folder={config.cache.folder!r} needs cache.location=disk")
    if "frequent" in prompt_starts(config) and not config.corpus.path:
        raise InputError(
            "prompt.start=frequent samples from the most frequent words of a corpus, but "
            "corpus.path is empty; set it (PPT uses the pre-training text), or use start=task or "
            "vocab"
        )
    if config.data.packed and (config.ppt.task or config.shared.tasks):
        name = "ppt.task" if config.ppt.task else "shared.tasks"
        raise InputError(
            f"data.packed=True is only valid for the examples of one task, not with {name}; set it "
            "to False"
        )
    if config.ppt.task:  # texts and words are defined by its pattern
        return
    task = apply_form(config, read_task(config.task))
    head.check_task(task)
    style = "causal" if task.causal and not task.template else "masked"  # without the backbone
    template_text = choose_template(task, head, style, config.task.form, config.task.template)
    template = check_template(task, template_text, head, config.task.form, prompt.num_slots())
    check_demos(config, head, task, template)
    read_answer(config.task.answer or "{label}")
    head.objectives(config.optim.label_smoothing)


def check_packages(config: RunConfig) -> None:
    """Raises InputError if an optional package that a run of a config needs is missing."""
    check_tracker(config.train.tracker)
    check_metric_package(config)


def check_metric_package(config: RunConfig) -> None:
    """Raises InputError if the package that computes the task's metric is missing."""
    if not config.ppt.task:  # whose metrics need none
        task = apply_form(config, read_task(config.task))
        check_package(task.metric, task.kind)
