"""The first steps of an experiment on so many simulated devices, for a check to compare.

    python -m haikutrain.check_devices OUT.json STEPS --config=FILE.py --cpu_devices=N

It is run by `--mode=check`, and writes the metrics and a checksum of the batch of each step.
"""

import json
import pathlib
import sys
from collections.abc import Sequence

from haikutrain import command_line, config_file, devices
from haikutrain.check_watch import Steps
from haikutrain.start import Task


def main(argv: Sequence[str]) -> None:
    """Runs it."""
    file, steps, *flags = argv
    options = command_line.parse(["haikutrain", *flags])
    devices.simulate(options.cpu_devices or 1)
    loaded = config_file.load(options.config, options.overrides)
    run = Steps(Task(loaded.experiment_class(loaded.config)), int(steps), int(steps))
    pathlib.Path(file).write_text(json.dumps({"metrics": run.metrics, "data": run.data}))


if __name__ == "__main__":
    main(sys.argv[1:])
