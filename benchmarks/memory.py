"""Peak memory of the loop before the first save, against the loop written by hand.

    python benchmarks/memory.py

About a minute. Each measurement is a process of its own, whose peak resident memory (`ru_maxrss`)
is read when it has trained for some steps. The network is an MLP with about 50 MB of parameters;
with Adam the state is three times that. Each side runs alone, so a pair is two runs.
"""

import argparse
import json
import os
import resource
import tempfile

import cases
import numpy as np
import pairs
from peers import hand

import haikutrain
from haikutrain import devices

STEPS = 20
WIDTH = 3500


def peak() -> float:
    """Of this process, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(side: str, count: int) -> None:
    """Trains, prints the peak and leaves: what comes after would be a save."""
    devices.simulate(count)
    case = cases.mlp(WIDTH)

    def leave(loss: float) -> None:
        assert np.isfinite(loss)
        print(json.dumps({"peak": peak()}), flush=True)
        os._exit(0)

    if side == "by hand":
        loop = hand.Loop(case)
        loop.run(STEPS)
        leave(float(np.asarray(loop.state[1]["batch_norm/~/mean_ema"]["average"]).mean()))
    case.experiment.config.log_every = STEPS // 2
    case.experiment.hooks = lambda: [haikutrain.every(STEPS, lambda i: leave(i.metrics["loss"]))]
    with tempfile.TemporaryDirectory() as workdir, pairs.quiet():
        haikutrain.train(case.experiment, workdir)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--devices", type=int, default=1, help="simulated devices")
    parser.add_argument("--side", choices=["haikutrain", "by hand"], help="run this one, here")
    options = parser.parse_args()
    if options.side:
        measure(options.side, options.devices)
        return
    peaks = [
        [
            pairs.in_fresh_process(__file__, "--side", side, "--devices", options.devices)["peak"]
            for side in ("haikutrain", "by hand")
        ]
        for _ in range(options.pairs)
    ]
    ours, theirs = np.median(peaks, axis=0)
    row = pairs.row(
        f"mlp {WIDTH} wide, {options.devices} device{'s' if options.devices > 1 else ''}",
        ours,
        theirs,
        "MB",
        [a / b for a, b in peaks],
        1.05,
        at_most=True,
    )
    pairs.show([row], "haikutrain", "by hand")


if __name__ == "__main__":
    main()
