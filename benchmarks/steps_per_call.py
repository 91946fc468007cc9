"""32 steps in a call against one, on tiny MLPs (the README's, and a deeper one) and one device.

    python benchmarks/steps_per_call.py

About 4 minutes. Both sides are the framework's loop with logging, in one process, in turn.
"""

import argparse

import cases
import pairs

from haikutrain import devices

STEPS = 32
CHUNK = 10 * STEPS


def measure(layers: int, count: int, target: float) -> pairs.Row:
    many, one = (cases.mlp(layers=layers) for _ in range(2))
    many.experiment.config.steps_per_call = STEPS
    for case in (many, one):
        case.experiment.config.log_every = 2 * STEPS  # A period that both can keep.
    sides = []
    try:
        sides.extend(pairs.Paced(case.experiment, CHUNK) for case in (many, one))
        for side in sides:
            side()
        name = f"mlp, {layers} hidden layer{'s' if layers > 1 else ''}"
        return pairs.compare(name, *sides, count, per=CHUNK, target=target)
    finally:
        for side in sides:
            side.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=300)
    parser.add_argument("--devices", type=int, default=1, help="simulated devices")
    options = parser.parse_args()
    devices.simulate(options.devices)
    with pairs.quiet():
        # The more there is to compute, the less there is to gain.
        rows = [measure(1, options.pairs, 3.0), measure(2, options.pairs, 3.0)]
    pairs.show(rows, f"K = {STEPS}", "K = 1")


if __name__ == "__main__":
    main()
