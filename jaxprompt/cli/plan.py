"""Estimates memory and step time of a run, also for devices that you do not have yet."""

import json
import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from jaxprompt import signals
from jaxprompt.cli import print_text
from jaxprompt.cli.options import UNUSED, Parser, require_flags, whole
from jaxprompt.config.load import load_config
from jaxprompt.config.run import RunConfig
from jaxprompt.errors import InputError, at_least
from jaxprompt.parallel.devices import Device, parse_devices

LIMIT = 64  # devices that the search goes up to
MAX_DEVICES = 512  # devices that one process can simulate in seconds
_T = TypeVar("_T")


def main(argv: Sequence[str]) -> int:
    """Prints the plan. Exit code 0, even if nothing fits."""
    parser = Parser(__name__, __doc__, workdir=UNUSED)
    parser.add_argument("--devices", help='number and type, e.g. "8x v5e" or "4x V100-32"')
    parser.add_argument(
        "--limit",
        type=whole,
        default=LIMIT,
        help=f"maximum number of devices to try (default: {LIMIT})",
    )
    parser.add_argument(
        "--compiler",
        choices=("tpu", "cuda"),
        help="compile the plans with the compiler of the devices",
    )
    parser.add_argument(
        "--format", choices=("text", "json"), default="text", help="text (default), or json"
    )
    args, overrides = parser.read(argv)
    require_flags(args, "config")
    count, device = parse_devices(args.devices) if args.devices else (0, None)
    if args.compiler and device is None:
        raise InputError(f'--compiler={args.compiler} needs --devices, e.g. --devices="8x v5e"')
    at_least("--limit", args.limit, 1)
    config = load_config(args.config, overrides)
    largest = max(count, args.limit)
    if largest > MAX_DEVICES:
        raise InputError(
            f"{largest} devices: plan supports at most {MAX_DEVICES} devices; use fewer"
        )
    if args.compiler and device is not None:
        from jaxprompt.planning import compilers

        compilers.check_compiler(args.compiler, device)
    # An axis of the mesh without a size counts as one device.
    devices = count or max(config.mesh.data, 1) * max(config.mesh.model, 1)
    arguments = config, devices, device, args.limit, args.compiler
    if args.compiler:
        plans = in_child_process(args.compiler, find_plans, *arguments)
    else:
        plans = find_plans(*arguments)
    if args.format == "json":
        print(json.dumps(plans, indent=2))
        return 0
    from jaxprompt.planning.report import format_plans

    print_text(format_plans(plans))
    return 0


def find_plans(
    config: RunConfig, count: int, device: Device | None, limit: int, compiler: str | None
) -> dict[str, Any]:
    """Plans a run for `count` devices, and finds the fewest devices, up to `limit`, that fit.

    Returns:
      The plans as JSON values.
    """
    simulate(max(count, limit if device else 1))

    # Imported here: what they import may start JAX, and then its number of devices is fixed.
    from jaxprompt.planning.abstract_run import open_run
    from jaxprompt.planning.report import plans_to_json
    from jaxprompt.planning.search import Plan, compile_plan, fastest, plan_as_configured, smallest

    run = open_run(config, device)
    plans: dict[str, Plan | None] = {"as configured": plan_as_configured(run, device, count)}
    if device is not None:
        best = fastest(run, device, count)
        plans["fastest"] = best
        plans["smallest"] = smallest(run, device, limit, {count: best})
    if compiler:
        by_mesh = {plan.mesh: plan for plan in plans.values() if plan is not None}
        by_mesh = {mesh: compile_plan(run, plan) for mesh, plan in by_mesh.items()}
        plans = {name: plan and by_mesh[plan.mesh] for name, plan in plans.items()}
    return plans_to_json(run, plans, limit)


def in_child_process(compiler: str, function: Callable[..., _T], *arguments: Any) -> _T:
    """Calls a function in a child process, because a compiler's library may crash."""
    pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
    try:
        with signals.starting_children():
            call = pool.submit(function, *arguments)
        return call.result()
    except BrokenProcessPool as error:
        raise InputError(
            f"--compiler={compiler} crashed on one of the plans, or ran out of memory; plan "
            "without --compiler, or for fewer --devices"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def simulate(count: int) -> None:
    """Makes JAX simulate `count` CPU devices. Raises InputError if it has started with fewer."""
    import jax

    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        pass  # JAX has started in this process
    else:
        jax.config.update("jax_platforms", "cpu")
        # Offline, because a plan needs files of this machine or published shapes only. The other
        # lets JAX's CUDA plugin start without a GPU.
        os.environ |= {"HF_HUB_OFFLINE": "1", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
    if len(jax.devices()) < count:
        raise InputError(
            f"cannot simulate {count} devices, because JAX has already started with "
            f"{len(jax.devices())}; run plan in a new process, or lower --limit"
        )
