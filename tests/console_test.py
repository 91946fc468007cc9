"""The console's lines and its progress bar."""

import io
import logging
import re
import sys
import time
import types

import absl.logging
import pytest

from haikutrain import console as console_module
from haikutrain.console import Console, _number


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_console_lines_are_aligned_with_four_digits(capsys):
    console = Console(500)
    speeds = {"steps_per_second": 1234.4, "examples_per_second": 157952.0}
    console.write(50, "train", {**speeds, "accuracy": 0.9, "loss": 0.321449, "grad_norm": 12.345})
    console.write(100, "train", {**speeds, "accuracy": 1, "loss": 1.2e-5, "grad_norm": 1e7})
    console.write(100, "test", {"accuracy": float("nan")})
    console.progress(100)
    console.close()
    assert capsys.readouterr().err.splitlines() == [
        "step  50/500  train  loss 0.3214  accuracy 0.9000  grad_norm 12.35"
        "  1234 steps/s  157952 examples/s",
        "step 100/500  train  loss 1.200e-5  accuracy 1       grad_norm 1.000e7"
        "  1234 steps/s  157952 examples/s",
        "step 100/500  test   accuracy nan",
    ]


@pytest.mark.parametrize(
    "value, text",
    [
        (0.0, "0.000"), (1.0, "1.000"), (-0.5, "-0.5000"), (999.94, "999.9"), (999.96, "1000"),
        (99999.6, "100000"), (999999.4, "999999"), (1234567.0, "1.235e6"), (0.0001234, "0.0001234"),
        (0.00001234, "1.234e-5"), (float("inf"), "inf"), (12, "12"),
    ],
)  # fmt: skip
def test_numbers_are_short(value, text):
    assert _number(value) == text


def test_log_lines_stand_above_the_bar_and_the_handler_comes_back(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    handler = absl.logging.get_absl_handler().python_handler
    monkeypatch.setattr(handler, "stream", terminal)
    console = Console(500)
    console.progress(1)
    assert handler.stream is sys.stderr is not terminal  # rich's proxy
    # Alone: after a run of the command the root logger has absl's handler as well.
    monkeypatch.setattr(logging.getLogger("absl"), "propagate", False)
    logging.getLogger("absl").addHandler(absl.logging.get_absl_handler())
    absl.logging.warning("careful")
    logging.getLogger("absl").removeHandler(absl.logging.get_absl_handler())
    console.write(50, "train", {"loss": 0.5})
    console.progress(500)
    console.close()
    console.close()
    assert handler.stream is sys.stderr is terminal

    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.getvalue())
    lines = [line.strip() for line in re.split(r"[\r\n]+", plain) if line.strip()]
    assert sum("careful" in line for line in lines) == 1
    assert "step  50/500  train  loss 0.5000" in lines
    assert re.search(r"500/500 .*loss 0\.5000", lines[-1])
    assert "\x1b[?25h" in terminal.getvalue()  # The cursor is shown again.


def test_what_is_printed_to_a_file_does_not_go_to_the_bar(monkeypatch):
    printed, terminal = io.StringIO(), Terminal()
    monkeypatch.setattr(sys, "stdout", printed)
    console = Console(500, terminal)
    console.progress(1)
    print("result")
    console.close()
    assert printed.getvalue() == "result\n"
    assert "result" not in terminal.getvalue()


def test_a_log_that_goes_to_a_file_stays_there(monkeypatch):
    log = io.StringIO()
    monkeypatch.setattr(absl.logging.get_absl_handler().python_handler, "stream", log)
    console = Console(500, Terminal())
    console.progress(1)
    assert absl.logging.get_absl_handler().python_handler.stream is log
    console.close()
    assert absl.logging.get_absl_handler().python_handler.stream is log


def test_progress_draws_at_most_ten_times_a_second(monkeypatch):
    clock = types.SimpleNamespace(now=0.0)
    monkeypatch.setattr(
        console_module, "time", types.SimpleNamespace(monotonic=lambda: clock.now, time=time.time)
    )
    terminal = Terminal()
    console = Console(2000, terminal)
    for step in range(1, 1001):  # A second.
        clock.now = step * 1e-3
        console.progress(step)
    shown = re.findall(r"(\d+)/2000(?:  (\S+) steps/s  (\S+) left)?", terminal.getvalue())
    console.close()
    assert 10 <= len(shown) <= 11  # The first step, then each tenth of a second.
    assert shown[0] == ("1", "", "")
    assert all(speed == "1000" for _, speed, _ in shown[1:])
    assert shown[-1][2] == "0:00:01"


def test_a_stream_that_is_closed_is_written_to_in_silence(monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    made = Console(100)
    made.write(5, "train", {"loss": 0.5})
    made.progress(6)
    made.flush()
    made.close()
