"""32 steps in a call against one, on the tiny MLP and one device.

    python benchmarks/steps_per_call.py

About 2 minutes. Both sides are the framework's loop with logging, in one process, in turn.
"""

import argparse

import cases
import pairs

from haikutrain import devices

STEPS = 32
CHUNK = 10 * STEPS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=300)
    parser.add_argument("--devices", type=int, default=1, help="simulated devices")
    options = parser.parse_args()
    devices.simulate(options.devices)
    many, one = cases.mlp(), cases.mlp()
    many.experiment.config.steps_per_call = STEPS
    for case in (many, one):
        case.experiment.config.log_every = 2 * STEPS  # A period that both can keep.
    with pairs.quiet():
        sides = []
        try:
            sides.extend(pairs.Paced(case.experiment, CHUNK) for case in (many, one))
            for side in sides:
                side()
            name = f"mlp, {options.devices} device{'s' if options.devices > 1 else ''}"
            row = pairs.compare(name, *sides, options.pairs, per=CHUNK, target=3.0)
        finally:
            for side in sides:
                side.close()
    pairs.show([row], f"K = {STEPS}", "K = 1")


if __name__ == "__main__":
    main()
