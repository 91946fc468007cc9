"""Ends a run again and again at random moments, and looks whether anything was lost.

    python benchmarks/faults.py --kills=100 --terms=20

Each start trains a tiny network with a checkpoint every few steps and is ended by kill -9, or by
SIGTERM, at a moment drawn from its whole life: imports, compilation, steps, saves, evaluations. The
next start must go on from the newest committed step. In the end the digest of the state and the log
must be those of a run that nobody touched, and no temporary folder may be left.
"""

import argparse
import json
import pathlib
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time

CONFIG = pathlib.Path(__file__).parents[1] / "tests" / "configs" / "tiny.py"
FLAGS = ["--config.checkpoint_every=4", "--config.eval_every=16"]
SPEEDS = ("steps_per_second", "examples_per_second")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=100, help="how many times kill -9")
    parser.add_argument("--terms", type=int, default=20, help="how many times SIGTERM")
    parser.add_argument("--steps", type=int, default=480, help="of a whole run")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    options = parser.parse_args()
    FLAGS.append(f"--config.num_steps={options.steps}")
    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(scratch)
        finish(folder / "straight")  # Compiles, if nobody has yet.
        shutil.rmtree(folder / "straight")
        begun = time.monotonic()
        finish(folder / "straight")
        life = time.monotonic() - begun
        expected = digest(folder / "straight"), log(folder / "straight")
        print(f"an untouched run takes {life:.1f} s")
        good = True
        for name, number, times in (
            ("kill -9", signal.SIGKILL, options.kills),
            ("SIGTERM", signal.SIGTERM, options.terms),
        ):
            ends = Ends(folder / name, number, life, random.Random(options.seed), expected)
            good &= ends.survive(times)
    return 0 if good else 1


class Ends:
    """Runs that are ended by one signal."""

    def __init__(self, workdir, number, life, rng, expected):
        self.workdir, self.number, self.life, self.rng = workdir, number, life, rng
        self.expected = expected
        self.problems: list[str] = []
        self.latencies: list[float] = []
        self.lost: list[int] = []
        self.in_training = 0

    def survive(self, times: int) -> bool:
        ended = 0
        while ended < times:
            ended += self._end_once()
        if times:
            finish(self.workdir)
            self._compare()
            self._print(times)
        return not self.problems

    def _end_once(self) -> bool:
        """One start, ended on its way; False if it had finished before, and is begun anew."""
        before = newest(self.workdir)
        begun = time.monotonic()
        process = launch(self.workdir)
        # A run that goes on has less to do than a new one.
        time.sleep(self.rng.uniform(0, 0.7 * self.life))
        asked = time.monotonic()
        process.send_signal(self.number)
        _, err = process.communicate(timeout=120)
        if process.returncode == 0:
            if time.monotonic() - begun < self.life / 4 and not before:
                self.problems.append("a run ended too early")
            self._compare()
            shutil.rmtree(self.workdir)
            return False
        expected = (-self.number, 42) if self.number == signal.SIGTERM else (-self.number,)
        if process.returncode not in expected:
            self.problems.append(f"exit code {process.returncode}: {err[-500:]}")
        if self.number == signal.SIGTERM and process.returncode == 42:
            self.latencies.append(time.monotonic() - asked)
        resumed = re.search(r"resuming at step (\d+)", err)
        if resumed and int(resumed[1]) != before:
            self.problems.append(f"went on from {resumed[1]}, and {before} was the newest")
        if before and not resumed and "new run" in err:
            self.problems.append(f"began anew, and {before} was there")
        self.in_training += newest(self.workdir) != before
        return True

    def _compare(self) -> None:
        found = digest(self.workdir), log(self.workdir)
        for what, ours, theirs in zip(("state", "log"), found, self.expected, strict=True):
            if ours != theirs:
                self.problems.append(f"the {what} differs from the untouched run's")
        left = [p.name for p in (self.workdir / "checkpoints").iterdir() if not p.name.isdecimal()]
        if left:
            self.problems.append(f"left behind: {left}")

    def _print(self, times: int) -> None:
        name = "kill -9" if self.number == signal.SIGKILL else "SIGTERM"
        print(f"{name}: {times} times, {self.in_training} of them after new steps were committed")
        if self.latencies:
            middle, longest = statistics.median(self.latencies), max(self.latencies)
            print(f"  from the signal to the exit: median {middle:.2f} s, longest {longest:.2f} s")
        for problem in self.problems or ["nothing lost: state and log are the untouched run's"]:
            print(f"  {problem}")


def launch(workdir: pathlib.Path) -> subprocess.Popen:
    """Starts the command in the background."""
    command = [sys.executable, "-m", "haikutrain.main", f"--config={CONFIG}"]
    return subprocess.Popen(
        [*command, f"--workdir={workdir}", *FLAGS],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(workdir: pathlib.Path) -> None:
    """Runs the command to its end."""
    process = launch(workdir)
    out, err = process.communicate(timeout=600)
    if process.returncode:
        raise SystemExit(f"exit code {process.returncode}\n{out}\n{err}")


def newest(workdir: pathlib.Path) -> int | None:
    """The newest committed step."""
    names = [path.name for path in (workdir / "checkpoints").glob("*")]
    return max((int(name) for name in names if name.isdecimal()), default=None)


def digest(workdir: pathlib.Path) -> str:
    """Of the newest checkpoint."""
    command = [sys.executable, "-m", "haikutrain.inspect", str(workdir), "--digest"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def log(workdir: pathlib.Path) -> list[dict]:
    """The lines of the log without their speeds."""
    lines = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    return [{k: v for k, v in line.items() if k not in SPEEDS} for line in lines]


if __name__ == "__main__":
    sys.exit(main())
