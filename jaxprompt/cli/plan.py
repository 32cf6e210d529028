"""Tells what a run would hold and how fast it would be on devices that you do not have yet."""

import json
import os
import sys
from collections.abc import Sequence

from jaxprompt.assembly.load_config import load_config
from jaxprompt.assembly.settings import settings_of
from jaxprompt.cli.options import UNREAD, Parser, need
from jaxprompt.errors import InputError
from jaxprompt.parallel.devices import parse_devices

LIMIT = 64  # devices that the search goes up to
MOST = 512  # devices that one process can simulate in seconds


def main(argv: Sequence[str]) -> int:
    """Prints the plan. Exit code 0, also where nothing fits."""
    parser = Parser(__name__, __doc__, workdir=UNREAD)
    parser.add_argument("--devices", help='as in "8x v5e" or "4x V100-32"')
    parser.add_argument("--limit", type=int, default=LIMIT,
                        help=f"devices that are tried at most (default: {LIMIT})")  # fmt: skip
    parser.add_argument(
        "--compiler",
        choices=("tpu", "cuda"),
        help="ask the devices' own compiler about the plans that are found",
    )
    parser.add_argument("--format", choices=("text", "json"), default="text")
    args, overrides = parser.read(argv)
    need(args, "config")
    count, device = parse_devices(args.devices) if args.devices else (0, None)
    if args.compiler and device is None:
        raise InputError(f'--compiler={args.compiler} needs --devices, as in --devices="8x v5e"')
    if args.limit < 1:
        raise InputError(f"--limit={args.limit} must be at least 1")
    c = load_config(args.config, overrides)
    if max(count, args.limit) > MOST:
        raise InputError(f"{max(count, args.limit)} devices: plan takes at most {MOST} devices")
    count = count or settings_of(c).devices
    simulate(max(count, args.limit if device else 1))

    # Imported here: JAX reads the number of simulated devices once.
    from jaxprompt.assembly.abstract_run import open_run
    from jaxprompt.planning import compilers
    from jaxprompt.planning.report import describe, show
    from jaxprompt.planning.search import compiled, fastest, plan_as_configured, smallest

    if args.compiler:
        compilers.check(args.compiler, device)
    run = open_run(c, device)
    plans = {"as configured": plan_as_configured(run, device, count)}
    if device is not None:
        best = fastest(run, device, count)
        plans["fastest"] = best
        plans["smallest"] = smallest(run, device, args.limit, {count: best})
    if args.compiler:
        asked = {plan.mesh: plan for plan in plans.values() if plan is not None}
        asked = {mesh: compiled(run, plan) for mesh, plan in asked.items()}
        plans = {name: plan and asked[plan.mesh] for name, plan in plans.items()}
    found = describe(run, plans, args.limit)
    print(json.dumps(found, indent=2) if args.format == "json" else show(found))
    return 0


def simulate(count: int) -> None:
    """Makes JAX see that many CPU devices. Raises InputError where it has started with fewer."""
    if "jax" not in sys.modules:
        flags = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={count}"
        # Offline, because a plan is of what is on this machine, or of published shapes.
        os.environ |= {"JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1"}
        # What its plugin asks for as JAX starts, where there is one and no GPU.
        os.environ |= {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
    import jax

    if len(jax.devices()) < count:
        raise InputError(
            f"{count} devices are to be simulated, JAX has started with {len(jax.devices())}; "
            "run plan in a process of its own, or lower --limit"
        )
