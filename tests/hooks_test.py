"""Hooks: when they run, what the log hands them, and what counts as training time."""

import jax.numpy as jnp
import pytest

from haikutrain import hooks, nonfinite
from haikutrain.errors import UsageError
from haikutrain.hooks import Log, StepInfo, Stopwatch, every
from haikutrain.metrics import Window, empty_window


class Clock:
    """A clock that moves only when told."""

    now = 1000.0

    def perf_counter(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(hooks, "time", clock)
    return clock


def infos(*strides, state=None):
    """The StepInfos of calls that take so many steps each."""
    step = 0
    for steps in strides:
        step += steps
        yield StepInfo(step=step, steps=steps, num_steps=sum(strides), state=state)


@pytest.mark.parametrize(
    "period, strides, expected",
    [
        (1, [1] * 4, [1, 2, 3, 4]),
        (3, [1] * 10, [3, 6, 9]),
        (10, [5] * 5, [10, 20]),
        # With K = 4 at the end of the call that holds a multiple, once however many it holds.
        (6, [4] * 6, [8, 12, 20, 24]),
        (2, [4] * 3, [4, 8, 12]),
        # After single steps up to a multiple of K.
        (4, [1, 1, 4, 4], [6, 10]),
        (7, [1] * 6, []),
    ],
)
def test_every_runs_at_the_multiples_of_its_period(period, strides, expected):
    seen = []
    hook = every(period, lambda info: seen.append(info.step))
    for info in infos(*strides):
        hook(info)
    assert seen == expected


@pytest.mark.parametrize("period", [0, -2])
def test_a_period_is_at_least_one_step(period):
    with pytest.raises(UsageError, match=rf"every\({period}, .*at least 1"):
        every(period, print)


def test_stop_keeps_its_reason():
    (info,) = infos(1)
    assert info.stop_reason is None
    info.stop("loss is low enough")
    assert info.stop_reason == "loss is low enough"


# --- the stopwatch ---------------------------------------------------------------------------


def test_a_stopwatch_leaves_pauses_out(clock):
    watch = Stopwatch()
    clock.now += 3
    with watch.paused():
        clock.now += 100
    clock.now += 4
    assert watch.restart() == 7
    clock.now += 2
    assert watch.restart() == 2


def test_nested_pauses_count_once(clock):
    watch = Stopwatch()
    clock.now += 1
    with watch.paused():
        clock.now += 10
        with watch.paused(), watch.paused():
            clock.now += 100
        clock.now += 1000
        with watch.paused():
            clock.now += 10000
    clock.now += 2
    assert watch.restart() == 3


def test_an_error_ends_the_pause(clock):
    watch = Stopwatch()

    def evaluate():
        with watch.paused():
            clock.now += 50
            raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        evaluate()
    clock.now += 5
    assert watch.restart() == 5


# --- the log ---------------------------------------------------------------------------------


class Run:
    """A loop whose metric `loss` is the number of the step, and which takes a second a step."""

    def __init__(self, clock, period, batch_size=8):
        self.clock, self.lines = clock, []
        judge = nonfinite.Judge("stop", 1, [])
        self.window = Window(["loss"], jnp.asarray(empty_window(["loss"])), judge)
        self.log = Log(self.window, period, batch_size, lambda *line: self.lines.append(line))

    def call(self, info):
        for step in range(info.step - info.steps + 1, info.step + 1):
            self.window.sums = self.window.sums.at[0].add(step)
            self.window.count += 1
            self.clock.now += 1
        self.log(info)

    def losses(self):
        return [(step, means["loss"]) for step, means in self.lines]


def test_a_window_is_delivered_one_call_after_it_closed(clock):
    run, seen = Run(clock, period=3), []
    for info in infos(*[1] * 8):
        run.call(info)
        seen.append((info.step, info.metrics_step, info.metrics.get("loss")))
    assert seen == [
        (1, None, None),
        (2, None, None),
        (3, None, None),
        (4, 3, 2.0),  # The mean of steps 1 to 3.
        (5, 3, 2.0),
        (6, 3, 2.0),
        (7, 6, 5.0),
        (8, 6, 5.0),
    ]
    assert run.losses() == [(3, 2.0), (6, 5.0)]


def test_with_several_steps_a_call_the_window_is_theirs(clock):
    run = Run(clock, period=8)
    for info in infos(*[4] * 5):
        run.call(info)
    assert run.losses() == [(8, 4.5), (16, 12.5)]
    # A run that came to a multiple of K by single steps.
    run = Run(clock, period=4)
    for info in infos(1, 1, 4, 4, 4):
        run.call(info)
    assert run.losses() == [(6, 3.5), (10, 8.5)]


def test_settle_deliver_and_close_do_it_once(clock):
    run = Run(clock, period=2)
    for info in infos(1, 1):
        run.call(info)
    assert run.lines == []
    for again in (run.log.settle, run.log.deliver, run.log.settle):
        again(info)
        assert run.losses() == [(2, 1.5)]
        assert (info.metrics_step, info.metrics["loss"]) == (2, 1.5)
    # An empty window is no line.
    run.log.close(info)
    run.log.settle(info)
    assert run.losses() == [(2, 1.5)]


def test_the_end_closes_a_window_out_of_turn(clock):
    run = Run(clock, period=100)
    for info in infos(*[1] * 5):
        run.call(info)
    run.log.close(info)
    run.log.settle(info)
    assert run.losses() == [(5, 3.0)]


def test_an_open_window_from_a_checkpoint_is_gone_on_with(clock):
    run = Run(clock, period=4)
    run.window.sums, run.window.count = run.window.sums.at[0].set(1.0 + 2.0), 2
    for step in (3, 4, 5):
        run.call(StepInfo(step=step, steps=1, num_steps=9, state=None))
    assert run.losses() == [(4, 2.5)]


def test_speeds_leave_out_the_first_call_and_pauses(clock):
    run = Run(clock, period=5, batch_size=8)
    for info in infos(*[1] * 16):
        if info.step == 1:
            clock.now += 1000  # Compiles.
        run.call(info)
        if info.step == 8:
            with run.log.stopwatch.paused():
                clock.now += 500  # Evaluates.
    speeds = [means["steps_per_second"] for _, means in run.lines]
    # The 4 steps after the first, delivered one step later; then 5 steps in 5 seconds.
    assert speeds == [4 / 5, 1.0, 1.0]
    assert [means["examples_per_second"] for _, means in run.lines] == [8 * s for s in speeds]


def test_a_window_of_the_first_call_alone_has_no_speed(clock):
    run = Run(clock, period=1)
    for info in infos(1, 1):
        run.call(info)
    assert list(run.lines[0][1]) == ["loss"]
