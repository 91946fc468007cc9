"""The first steps of an experiment on another number of devices, in another process, compared.

    python -m haikutrain.check_devices OUT.json STEPS --config=FILE.py --cpu_devices=N

is that process: it writes the metrics and a checksum of the batch of each step.
"""

import json
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from haikutrain import command_line, config_file, devices
from haikutrain.check_runs import Command, Request
from haikutrain.check_table import Row, broken, held
from haikutrain.check_watch import Steps
from haikutrain.start import Task

DEVICES = "other devices, the same losses"


class Elsewhere:
    """The first steps on so many simulated devices, in another process, begun at once."""

    def __init__(self, request: Request, folder: pathlib.Path, cpu_devices: int, steps: int):
        name = f"on-{cpu_devices}"
        self.cpu_devices = cpu_devices
        self._file = folder / f"{name}.json"
        flags = request.flags({}, cpu_devices)
        arguments = ["haikutrain.check_devices", str(self._file), str(steps), *flags]
        self._command = Command(folder, name, *arguments)

    def result(self) -> dict[str, Any] | str:
        """`metrics`, a dict a step, and `data`, a checksum a step; or why there are none."""
        code = self._command.wait()
        if code == 0:
            result: dict[str, Any] = json.loads(self._file.read_text())
            return result
        return f"on {self.cpu_devices} devices: code {code}, {self._command.said}"


def devices_row(
    here: Mapping[str, Any],
    there: Mapping[str, Any],
    counts: tuple[int, int],
    reasons: Sequence[str],
    tolerance: float,
) -> Row:
    """Compares the steps on two numbers of devices.

    Args:
      here: `metrics`, a dict a step, and `data`, a checksum a step.
      there: the same, on another number of devices.
      counts: the two numbers of devices.
      reasons: what in the network makes losses depend on the devices.
      tolerance: of the first step's losses, relative.
    """
    both = f"on {counts[0]} and {counts[1]} devices"
    for step, (a, b) in enumerate(zip(here["data"], there["data"], strict=False)):
        if a != b:
            return broken(
                DEVICES,
                f"batch {step} has other rows, or another order of them, {both}",
                "the order of the data depends on the number of devices: the global batch must be "
                "chosen from the seed and the step alone, and then split",
            )
    difference = compare(here["metrics"], there["metrics"], tolerance)
    if difference is None:
        return held(DEVICES, f"{len(here['data'])} steps {both}, the same examples")
    if reasons:
        why = f"{difference} {both}, and may: {'; '.join(reasons)}"
        return held(DEVICES, why)
    return broken(
        DEVICES,
        f"{difference} {both}",
        "something is computed from one device's part alone: a mean that is not averaged over the "
        "devices (haikutrain.pmean), or a statistic of a device's own batch",
    )


def compare(
    a: Sequence[Mapping[str, float]], b: Sequence[Mapping[str, float]], tolerance: float
) -> str | None:
    """The first loss that differs by more than rounding, which grows with the steps."""
    if not a or not a[0]:
        return None
    losses = [name for name in a[0] if "loss" in name and name != "loss_scale"]
    names = losses or [name for name in a[0] if name not in ("learning_rate", "grad_norm")]
    for step, (old, new) in enumerate(zip(a, b, strict=False)):
        relative = min(tolerance * 10**step, max(tolerance, 1e-2))
        for name in names:
            scale = max(abs(old[name]), abs(new[name]), 1e-3)
            if not abs(old[name] - new[name]) <= relative * scale:
                return f"{name} of step {step + 1} is {old[name]:.7g} and {new[name]:.7g}"
    return None


def main(argv: Sequence[str]) -> None:
    """The other process."""
    file, steps, *flags = argv
    options = command_line.parse(["haikutrain", *flags])
    devices.simulate(options.cpu_devices or 1)
    loaded = config_file.load(options.config, options.overrides)
    run = Steps(Task(loaded.experiment_class(loaded.config)), int(steps), int(steps))
    pathlib.Path(file).write_text(json.dumps({"metrics": run.metrics, "data": run.data}))


if __name__ == "__main__":
    main(sys.argv[1:])
