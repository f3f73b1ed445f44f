"""Compile kernels for accelerators that are not here, one JSON line each.

    python -m scripts.kernel_targets [--target cuda:90] [--kernel paged_adam]

The exit status is 1 where a kernel spills registers, needs too much shared memory, does without matrix instructions,
moves small elements one by one or waits in a loop of products for its operands.
A process of its own: kernels that are interpreted cannot be compiled.
"""

import argparse
import json
from dataclasses import asdict

from megascale_omni.kernels.interpreter import is_interpreted
from scripts.kernel_targets.compiled import compile_spec
from scripts.kernel_targets.specs import TARGETS, specs


def main() -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.kernel_targets", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--target", action="append", choices=TARGETS, help="default: all of them")
    parser.add_argument("--kernel", action="append", metavar="NAME", help="only kernels whose name begins so")
    args = parser.parse_args()
    if is_interpreted():
        parser.error("TRITON_INTERPRET is set: kernels cannot be compiled; unset it")
    bad = compiled = 0
    for target in args.target or TARGETS:
        for spec in specs(target):
            if args.kernel and not any(spec.tag.startswith(name) for name in args.kernel):
                continue
            result = compile_spec(spec)
            compiled += 1
            bad += bool(result.problems)
            print(json.dumps(asdict(result)), flush=True)
    if not compiled:
        parser.error(f"no kernel is named {', '.join(args.kernel)}")
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
