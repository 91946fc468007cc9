"""kill -9 at random moments: the next start always works, and in the end nothing is lost."""

import pathlib

BENCHMARK = pathlib.Path(__file__).parents[1] / "benchmarks" / "faults.py"


def test_ten_kills_lose_nothing(command):
    done = command(BENCHMARK, "--kills=10", "--terms=0", "--steps=120", check=False, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[1].startswith("kill -9: 10 times, ")
    # Else the moments missed the training, and this showed nothing.
    assert int(lines[1].split()[4]) >= 3
    assert lines[2].strip() == "nothing lost: state and log are the untouched run's"
