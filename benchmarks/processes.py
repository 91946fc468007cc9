"""How fast a job of several processes stops, notices a death, and goes on.

    python benchmarks/processes.py [--trials=5] [--kills=20]

starts jobs of 2 processes with 2 simulated devices each, on this machine, and prints a table of
seconds: from the start of a job that has a checkpoint to its first step, from SIGTERM to one
process to the exit of all, and from the death of a process (kill -9, each in turn) to the exit of
the other. Then it kills one process or the other at `--kills` random moments, from its start on,
and compares the digest at the end with that of a job left alone. (Exit code 2 is that of a process
that waited for one that was killed before it came.)
"""

import argparse
import collections
import os
import pathlib
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time

import haiku as hk
import jax
import optax

import haikutrain

PROCESSES, DEVICES = 2, 2


def get_config():
    config = haikutrain.base_config()
    config.experiment = ":Digits"
    config.num_steps = 10**9
    config.batch_size = 64
    config.checkpoint_every = 50
    config.log_every = 50
    config.mark = ""  # A folder: each process leaves a file there at its first step.
    config.pause = 0.0  # Seconds that a step takes longer.
    return config


class Digits(haikutrain.Experiment):
    def loss(self, batch, is_training):
        x = hk.Linear(64, with_bias=False)(hk.Flatten()(batch["image"]))
        x = jax.nn.relu(hk.BatchNorm(True, True, 0.9)(x, is_training))
        logits = hk.Linear(10)(x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]), {}

    def optimizer(self):
        return optax.adam(1e-3)

    def train_data(self):
        return haikutrain.ArrayDataset(haikutrain.digits("train"), self.config.batch_size, seed=0)

    def eval_data(self):
        return {}

    def hooks(self):
        marked = []

        def mark(info):
            if not marked and self.config.mark:
                pathlib.Path(self.config.mark, str(jax.process_index())).touch()
                marked.append(True)
            time.sleep(self.config.pause)

        return [mark]


class Job:
    """The processes of a job."""

    def __init__(self, folder, *flags):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = [sys.executable, "-m", "haikutrain.main", f"--config={__file__}"]
        command += [f"--workdir={folder / 'work'}", f"--cpu_devices={DEVICES}", *flags]
        command += [f"--coordinator_address=127.0.0.1:{port}", f"--num_processes={PROCESSES}"]
        self.mark = pathlib.Path(tempfile.mkdtemp(dir=folder))
        command.append(f"--config.mark={self.mark}")
        self.began = time.monotonic()
        with (folder / "out").open("a") as out:
            self.processes = [
                subprocess.Popen([*command, f"--process_id={i}"], stdout=out, stderr=out)
                for i in range(PROCESSES)
            ]

    def wait_first_step(self):
        """Seconds from the start until every process has done a step."""
        while len(list(self.mark.iterdir())) < PROCESSES:
            if any(process.poll() is not None for process in self.processes):
                raise SystemExit("a process has ended before its first step")
            time.sleep(0.005)
        return time.monotonic() - self.began

    def signal(self, index, number):
        """Seconds from the signal to the last exit, and the exit codes."""
        began = time.monotonic()
        self.processes[index].send_signal(number)
        codes = [process.wait(120) for process in self.processes]
        return time.monotonic() - began, codes


def measure(folder, trials):
    """The rows of the table: what, and its seconds."""
    rows = collections.defaultdict(list)
    for trial in range(2 * trials + 1):
        job = Job(folder)
        seconds = job.wait_first_step()
        if trial:  # The first had to compile, and had no checkpoint.
            rows["restart to first step"].append(seconds)
        time.sleep(2)
        victim = trial % 2
        seconds, codes = job.signal(victim, signal.SIGTERM)
        assert codes == [42, 42], codes
        rows["SIGTERM to exit"].append(seconds)
        job = Job(folder)
        rows["restart to first step"].append(job.wait_first_step())
        time.sleep(0.5)
        seconds, codes = job.signal(victim, signal.SIGKILL)
        assert codes[1 - victim] in (75, 1), codes
        rows[f"death of process {victim} to the other's exit"].append(seconds)
    return rows


def kill_at_random(folder, kills):
    """Kills one process or the other; returns the exit codes of those left, with their number."""
    flags = ["--config.num_steps=600", "--config.checkpoint_every=10", "--init_timeout=15"]
    chance, codes, worst = random.Random(0), collections.Counter(), 0.0
    for _ in range(kills):
        job = Job(folder, *flags, "--config.pause=0.02")
        deadline = time.monotonic() + chance.uniform(0.0, 12.0)
        while time.monotonic() < deadline and all(p.poll() is None for p in job.processes):
            time.sleep(0.01)
        victim = chance.randrange(PROCESSES)
        seconds, ended = job.signal(victim, signal.SIGKILL)
        codes[ended[1 - victim]] += 1
        worst = max(worst, seconds)
    finish(folder, *flags)
    return codes, worst


def finish(folder, *flags):
    codes = [process.wait(600) for process in Job(folder, *flags).processes]
    assert codes == [0, 0], codes


def digest(folder):
    command = [sys.executable, "-m", "haikutrain.inspect", folder / "work", "--digest"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--trials", type=int, default=5)
    parser.add_argument("--kills", type=int, default=20)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        root = pathlib.Path(name)
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(root / "compiled")
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
        for sub in ("times", "killed", "alone"):
            (root / sub).mkdir()
        print(f"{'seconds':44} median   from     to   trials")
        for what, seconds in measure(root / "times", args.trials).items():
            low, middle, high = min(seconds), statistics.median(seconds), max(seconds)
            print(f"{what:44} {middle:6.2f} {low:6.2f} {high:6.2f} {len(seconds):8}")
        if args.kills:
            codes, worst = kill_at_random(root / "killed", args.kills)
            finish(root / "alone", "--config.num_steps=600", "--config.checkpoint_every=10")
            same = digest(root / "killed") == digest(root / "alone")
            print(f"{args.kills} kills at random moments: exit codes of the other {dict(codes)}, ")
            print(f"at most {worst:.2f} s later; digest {'equal' if same else 'DIFFERENT'}")
            sys.exit(not same)


if __name__ == "__main__":
    main()
