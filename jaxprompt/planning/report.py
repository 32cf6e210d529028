"""Formats plans as JSON values and as a table."""

from collections.abc import Iterable, Sequence
from typing import Any

from jaxprompt.parallel import roofline
from jaxprompt.planning.abstract_run import AbstractRun
from jaxprompt.planning.compilers import Compiled
from jaxprompt.planning.search import RESERVE, Plan, needed_flops

_FLOPS = ("", "k", "M", "G", "T", "P")
_COMPILED_PARTS = {
    "arguments": "arguments", "temporary": "temporary", "total": "peak",
    "evaluation": "in evaluation",
}  # fmt: skip


def plans_to_json(run: AbstractRun, plans: dict[str, Plan | None], limit: int) -> dict[str, Any]:
    """Returns plans as JSON values. One of them must be called "as configured"."""
    configured = plans["as configured"]
    assert configured is not None
    dtype, sizes, device = run.config.backbone.dtype, configured.cost.sizes, configured.device
    rows, length = run.batch.encoder.ids.shape
    heads = getattr(run.backbone.module.cfg, "key_heads", 0)
    return {
        "notes": list(run.notes),
        "parameters": {"total": sizes.total, "trained": sizes.trained},
        "batch": {
            "rows": rows,
            "length": length,
            "dtype": dtype,
            "evaluated": run.config.data.eval_batch,
        },
        "assumed": {
            "reserve": RESERVE,
            "limit": limit,
            "product_share": roofline.PRODUCT_SHARE,
            "attention_share": roofline.ATTENTION_SHARE,
            "bandwidth_share": roofline.BANDWIDTH_SHARE,
            "launch_seconds": roofline.LAUNCH_SECONDS,
        },
        "source": device and device.source,
        "plans": {
            name: plan and _plan_to_json(run, plan, rows * length, heads)
            for name, plan in plans.items()
        },
    }


def _plan_to_json(run: AbstractRun, plan: Plan, tokens: int, key_heads: int) -> dict[str, Any]:
    """Returns a plan as JSON values; `key_heads` is 0 if the attention heads share no keys."""
    cost, mesh, sizes = plan.cost, plan.mesh, plan.cost.sizes
    values = {
        "devices": mesh.devices,
        "device": plan.device and plan.device.name,
        "mesh": {"data": mesh.data, "model": mesh.model, "fsdp": mesh.fsdp},
        "remat": mesh.remat,
        "key_copies": mesh.model if 0 < key_heads < mesh.model else 1,
        "attention": mesh.attention,
        "bytes": {
            "frozen": sizes.frozen_bytes,
            "trained": sizes.trained_bytes,
            "optimizer": sizes.optimizer_bytes,
            "activations": cost.activations,
            "other": sizes.batch_bytes + cost.results,
            "total": cost.bytes,
            "evaluation": plan.evaluation,
        },
        "flops": cost.flops,
        "collectives": {
            kind: {"count": cost.work.counts[kind], "bytes": cost.work.sent[kind]}
            for kind in sorted(cost.work.counts)
        },
    }
    if plan.device is None:
        return values
    if plan.compiled is not None:
        values |= {"compiled": _compiled_to_json(plan.compiled, plan.evaluated)}
    dtype, kernels, needed = run.config.backbone.dtype, plan.kernels, needed_flops(run, plan)
    time = plan.time(dtype)
    return values | {
        "needed_flops": needed,
        "kernels": {
            "count": sum(kernel.times for kernel in kernels),
            "bytes": sum(kernel.times * kernel.bytes for kernel in kernels),
            "weight_copies": sum(kernel.times * kernel.copied for kernel in kernels),
        },
        "room": plan.room,
        "fits": plan.fits,
        "evaluates": plan.evaluates,
        "seconds": {**time._asdict(), "step": time.step},
        "share_of_peak": needed / (time.step * plan.device.peak(dtype)),
        "tokens_per_second": tokens / time.step,
    }


def _compiled_to_json(compiled: Compiled | str, evaluated: Compiled | str | None) -> dict[str, Any]:
    if isinstance(compiled, str):
        return {"refused": compiled}
    if isinstance(evaluated, str):
        return {"refused": evaluated}
    assert evaluated is not None  # compiled with the step
    work = compiled.work
    return {
        "bytes": {
            "arguments": compiled.arguments,
            "temporary": compiled.temporary,
            "total": compiled.bytes,
            "evaluation": evaluated.bytes,
        },
        "collectives": {
            kind: {
                "count": work.counts[kind],
                "bytes": work.sent[kind],
                "asynchronous": work.overlapped[kind],
            }
            for kind in sorted(work.counts)
        },
    }


# -- text -----------------------------------------------------------------------------------------


def format_plans(report: dict[str, Any]) -> str:
    """Returns plans as a table in text."""
    plans = _join_equal({name: plan for name, plan in report["plans"].items() if plan})
    batch, parameters = report["batch"], report["parameters"]
    share = parameters["trained"] / parameters["total"]
    lines = [
        *report["notes"],
        f"{parameters['total']:,} parameters, {parameters['trained']:,} trained ({share:.4%})",
        f"{batch['rows']} examples x {batch['length']} tokens per step, {batch['dtype']}",
        "",
    ]
    lines += _table(plans)
    if report["source"]:
        assumed = report["assumed"]
        lines += ["", *_advice(report), ""]
        lines += [
            f"room is {1 - assumed['reserve']:.0%} of the memory; times assume matrix products at "
            f"{assumed['product_share']:.0%} of the peak speed, attention kernels at "
            f"{assumed['attention_share']:.0%}, others at {assumed['bandwidth_share']:.0%} of the "
            "bandwidth",
            *_sources(report),
            f"data sheet: {report['source']}",
        ]
    return "\n".join(lines)


def _join_equal(plans: dict[str, Any]) -> dict[str, Any]:
    """Gives equal plans one column, with the names of all."""
    distinct: list[tuple[list[str], Any]] = []
    for name, plan in plans.items():
        equal = next((names for names, other in distinct if other == plan), None)
        if equal is None:
            distinct.append(([name], plan))
        else:
            equal.append(name)
    return {", ".join(names): plan for names, plan in distinct}


def _sources(report: dict[str, Any]) -> list[str]:
    """Returns notes on which compiler the values come from."""
    plans = [plan for plan in report["plans"].values() if plan]
    compiled = [plan["compiled"] for plan in plans if "compiled" in plan]
    if not compiled:
        return [
            "sent is an upper bound: GPUs and TPUs sum the gradients of an input before sending"
        ]
    refused = [plan["refused"] for plan in compiled if "refused" in plan]
    return [
        "compiled: by the compiler of the devices, which decides what fits, and whose kernels give "
        "the times; estimated: by that of the CPU, as are FLOPs",
        *dict.fromkeys(refused),
    ]


def _advice(report: dict[str, Any]) -> list[str]:
    """Returns the flags of the plans, and advice if nothing fits."""
    lines, limit = [], report["assumed"]["limit"]
    for name in ("fastest", "smallest"):
        plan = report["plans"][name]
        if plan is not None:
            flags = [f"--config.mesh.{field}={value}" for field, value in plan["mesh"].items()]
            flags.append(f"--config.backbone.remat={plan['remat']}")
            if plan["attention"]:
                flags.append(f"--config.backbone.attention={plan['attention']}")
            lines.append(f"{name}, {plan['devices']}x {plan['device']}: {' '.join(flags)}")
    if not report["plans"]["as configured"]["evaluates"]:
        size = report["batch"]["evaluated"]
        lines.append(
            f"as configured, the evaluation of {size} examples at once does not fit; lower "
            "data.eval_batch, which does not change the scores, or use more devices"
        )
    if report["plans"]["smallest"] is None:
        advice = "lower data.batch, data.eval_batch or data.max_len"
        lines.append(f"it does not fit on 1, 2, 4, ... up to {limit} such devices; {advice}")
    return list(dict.fromkeys(lines))


def _table(plans: dict[str, Any]) -> list[str]:
    columns = list(plans.values())
    has_device = bool(columns[0]["device"])
    compiled = [p["compiled"] for p in columns if "compiled" in p]
    rows: list[tuple[str, list[str]]] = []

    def row(name: str, cells: Iterable[str]) -> None:
        rows.append((name, list(cells)))

    row("", plans)
    row("devices", (f"{p['devices']}x {p['device'] or 'device'}" for p in columns))
    row("data x model", (f"{p['mesh']['data']} x {p['mesh']['model']}" for p in columns))
    row("fsdp, remat", (f"{'yes' if p['mesh']['fsdp'] else 'no'}, {p['remat']}" for p in columns))
    if any(p["key_copies"] > 1 for p in columns):
        copies = ("on every device" if p["key_copies"] > 1 else "divided" for p in columns)
        row("key heads", copies)
    if any(p["attention"] for p in columns):
        row("attention", (p["attention"] or "as configured" for p in columns))
    row("bytes per device", ("" for _ in columns))
    for part in columns[0]["bytes"]:
        name = {"total": "in all", "evaluation": "in evaluation"}.get(part, part)
        row(f"  {name}", (_format_bytes(p["bytes"][part]) for p in columns))
    if has_device:
        row("  room", (_format_bytes(p["room"]) for p in columns))
    if compiled:
        row("bytes per device, compiled", ("" for _ in columns))
        for part, name in _COMPILED_PARTS.items():
            sizes = [plan.get("bytes") for plan in compiled]
            row(f"  {name}", (_format_bytes(x[part]) if x else "refused" for x in sizes))
    if has_device:
        row("fits", ("yes" if p["fits"] else "NO" for p in columns))
    row("FLOPs per device", (_format_scaled(p["flops"], _FLOPS, 1000) for p in columns))
    if has_device and any(p["needed_flops"] < p["flops"] for p in columns):
        needed = (_format_scaled(p["needed_flops"], _FLOPS, 1000) for p in columns)
        row("  not recomputed", needed)
    none = ("" if p["collectives"] else "nothing" for p in columns)
    row("sent per device, estimated" if compiled else "sent per device", none)
    for kind in _kinds(columns):
        row(f"  {kind}", (_format_traffic(p["collectives"].get(kind)) for p in columns))
    if compiled:
        row("sent per device, compiled", ("" for _ in columns))
        for kind in _kinds(compiled):
            sent = [p["compiled"].get("collectives", {}) for p in columns]
            row(f"  {kind}", (_format_traffic(traffic.get(kind)) for traffic in sent))
    if has_device:
        row("one step", (_format_seconds(p["seconds"]["step"]) for p in columns))
        for part in roofline.StepTime._fields:
            seconds = [p["seconds"][part] for p in columns]
            if any(seconds):
                row(f"  {part}", map(_format_seconds, seconds))
        row("kernels", (f"{p['kernels']['count']:,}" for p in columns))
        row("copies of frozen weights", (_format_copies(p["kernels"]) for p in columns))
        row("share of peak", (f"{p['share_of_peak']:.0%}" for p in columns))
        row("tokens per second", (f"{p['tokens_per_second']:,.0f}" for p in columns))
    name_width = max(len(name) for name, _ in rows)
    width = 2 + max(len(cell) for _, cells in rows for cell in cells)
    return [
        (f"{name:{name_width}}" + "".join(f"{cell:>{width}}" for cell in cells)).rstrip()
        for name, cells in rows
    ]


def _kinds(plans: Sequence[dict[str, Any]]) -> list[str]:
    """Lists the kinds of collectives of plans."""
    return sorted({kind for plan in plans for kind in plan.get("collectives", ())})


def _format_traffic(traffic: dict[str, int] | None) -> str:
    if not traffic:
        return ""
    asynchronous = (
        f", {traffic['asynchronous']} asynchronous" if traffic.get("asynchronous") else ""
    )
    return f"{traffic['count']}x {_format_bytes(traffic['bytes'])}{asynchronous}"


def _format_seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def _format_copies(kernels: dict[str, int]) -> str:
    share = kernels["weight_copies"] / max(1, kernels["bytes"])
    return f"{_format_bytes(kernels['weight_copies'])}, {share:.0%}"


def _format_bytes(count: float) -> str:
    return _format_scaled(count, ("B", "KiB", "MiB", "GiB", "TiB"), 1024)


def _format_scaled(value: float, units: Sequence[str], base: int) -> str:
    power = 0
    while value >= base and power + 1 < len(units):
        value, power = value / base, power + 1
    return f"{value:.3g} {units[power]}" if value < 100 else f"{value:.0f} {units[power]}"
