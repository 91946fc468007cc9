"""Processes of a job in touch: they say the same, stop at the same call, and notice who dies."""

import random
import socket
import threading
import time

import pytest

from haikutrain import hub, job, signals
from haikutrain.errors import PeerLost, Stopped, UsageError
from haikutrain.job import Job
from haikutrain.wire import Address


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@pytest.fixture
def begin():
    """Starts jobs of one process each in threads of this one; `begin(n)` returns all, met."""
    jobs = []

    def run(count, failures=None):
        address = Address("127.0.0.1", free_port())
        new = [Job(i, count, address, (failures or []).append) for i in range(count)]
        jobs.extend(new)
        assert len(set(each(new, lambda one: one.meet(20)))) == count
        return new

    yield run
    for one in jobs:
        one._ended = False  # Nobody waits for the others here.
        one.close()


def each(jobs, function):
    """What `function` returns or raises for each job, called in threads at the same time."""
    results = {}

    def call(one):
        try:
            results[one.index] = function(one)
        except Exception as error:
            results[one.index] = error

    threads = [
        threading.Thread(target=call, args=(one,), name=str(one.index), daemon=True) for one in jobs
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    return [results[one.index] for one in jobs]


def cut(one):
    """Ends all connections of a job's process, as its death would."""

    async def abort():
        writers = [one._writer] if one._hub is None else one._hub._members.values()
        for writer in list(writers):
            writer.transport.abort()

    one._run(abort()).result(5)


def test_all_get_the_texts_of_all_in_their_order(begin):
    jobs = begin(3)
    for number in range(50):
        got = each(jobs, lambda one, n=number: one.gather(f"turn {n}", f"{n} of {one.index}" * 99))
        assert got == [[f"{number} of {i}" * 99 for i in range(3)]] * 3


def test_a_long_text_arrives(begin):
    got = each(begin(3), lambda one: one.gather("long", str(one.index) * 3_000_000))
    assert got == [["0" * 3_000_000, "1" * 3_000_000, "2" * 3_000_000]] * 3


def test_processes_that_do_different_things_end(begin):
    jobs = begin(3)
    got = each(jobs, lambda one: one.gather("save" if one.index < 2 else "evaluation", ""))
    for error in got:
        assert isinstance(error, PeerLost)
        assert "save" in str(error)
        assert "evaluation" in str(error)


@pytest.mark.parametrize("asks", range(3))
def test_a_signal_to_one_stops_all_before_the_same_call(begin, monkeypatch, asks):
    jobs = begin(3)
    hot = threading.Event()

    def received():
        here = threading.current_thread().name == str(asks)
        return "SIGTERM" if here and hot.is_set() else None

    monkeypatch.setattr(signals, "received", received)
    pace = random.Random(asks)
    threading.Timer(0.2, hot.set).start()

    def loop(one):
        calls = 0
        while one.stop_requested() is None:
            calls += 1
            time.sleep(pace.random() * 0.004 * (one.index + 1))
        return calls, one.stop_requested()

    (calls, name), *others = each(jobs, loop)
    assert others == [(calls, name)] * 2
    assert name == "SIGTERM"
    assert calls > 10


def test_who_is_held_while_the_others_agree_makes_no_further_call(begin):
    """The call is chosen from what each has done: none may go on meanwhile."""
    jobs = begin(2)
    for _ in range(5):
        assert jobs[1].stop_requested() is None
    jobs[1]._take({"kind": "hold"})
    held = threading.Thread(target=jobs[1].stop_requested, daemon=True)
    held.start()
    held.join(0.3)
    assert held.is_alive()
    jobs[1]._take({"kind": "stop_at", "call": 6, "name": "SIGTERM"})
    held.join(5)
    assert not held.is_alive()
    assert jobs[1].stop_requested() == "SIGTERM"


@pytest.mark.parametrize("dies", range(3))
def test_who_dies_is_noticed_by_all_others(begin, dies):
    failures = []
    jobs = begin(3, failures)
    others = [one for one in jobs if one.index != dies]
    cut(jobs[dies])
    began = time.monotonic()
    for error in each(others, lambda one: one.gather("anything", "")):
        assert isinstance(error, PeerLost)
        assert f"process {dies} died" in str(error)
    for error in each(others, Job.stop_requested):
        assert isinstance(error, PeerLost)
    assert [one.failure.code for one in others] == [75, 75]
    assert time.monotonic() - began < 5


def test_who_is_silent_is_lost(begin, monkeypatch):
    monkeypatch.setattr(hub, "SILENCE", 1.0)
    monkeypatch.setattr(hub, "HEARTBEAT", 0.2)
    monkeypatch.setattr(job, "HEARTBEAT", 0.2)
    jobs = begin(2)
    time.sleep(1.5)
    assert each(jobs, lambda one: one.gather("alive", "")) == [["", ""]] * 2
    monkeypatch.setattr(job, "HEARTBEAT", 1000.0)
    assert jobs[0].wait_failure(10)
    assert jobs[0].failure.process == 1
    assert "no sign of life" in jobs[0].failure.text


@pytest.mark.parametrize("go", [Job.close, cut])
def test_after_the_end_nobody_is_missed(begin, go):
    failures = []
    jobs = begin(3, failures)
    each(jobs, lambda one: one.end())
    for index in (1, 2, 0):
        go(jobs[index])
        time.sleep(0.1)
    assert failures == []
    assert [one.failure for one in jobs] == [None] * 3


def test_a_failure_is_told_to_all_before_the_first_process_goes(begin):
    jobs = begin(3)
    assert jobs[2].fail(2, "a mistake")
    jobs[0].wait_heard(5)
    assert [(one.failure.process, one.failure.code, one.failure.text) for one in jobs] == [
        (2, 2, "a mistake")
    ] * 3


def test_a_stranger_at_the_port_disturbs_nobody(begin):
    jobs = begin(2)
    for noise in (b"GET / HTTP/1.1\r\n\r\n", b"\0\0\0\2[]", b"\0\0\0\2{}", b""):
        with socket.create_connection(("127.0.0.1", jobs[0]._address.port)) as stranger:
            stranger.sendall(noise)
    assert each(jobs, lambda one: one.gather("still there", "")) == [["", ""]] * 2


def test_a_late_process_is_not_let_in(begin):
    jobs = begin(2)
    late = Job(1, 2, jobs[0]._address, print)
    with pytest.raises(UsageError, match="two processes of the job were started"):
        late.meet(1)
    late.close()
    assert each(jobs, lambda one: one.gather("still there", "")) == [["", ""]] * 2


def test_a_signal_ends_the_wait_for_the_others(monkeypatch):
    monkeypatch.setattr(signals, "received", lambda: "SIGTERM")
    alone = Job(0, 2, Address("127.0.0.1", free_port()), print)
    with pytest.raises(Stopped, match="SIGTERM"):
        alone.meet(30)
    alone.close()


@pytest.mark.parametrize(
    "host, bind",
    [
        ("localhost", "127.0.0.1"),
        ("127.0.0.1", "127.0.0.1"),
        ("127.1.2.3", "127.1.2.3"),
        ("::1", "::1"),
        ("10.0.0.7", None),
        ("node17", None),
    ],
)
def test_a_job_on_loopback_listens_there_only(host, bind):
    assert Address(host, 1234).bind == bind


@pytest.mark.parametrize("dies", range(2))
def test_who_dies_before_all_are_there_is_lost_at_once(dies):
    address = Address("127.0.0.1", free_port())
    jobs = [Job(index, 3, address, print) for index in range(2)]  # The third never comes.
    errors = {}

    def meet(one):
        with pytest.raises(PeerLost) as caught:
            one.meet(60)
        errors[one.index] = str(caught.value)

    threads = [threading.Thread(target=meet, args=(one,), daemon=True) for one in jobs]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 10
    while jobs[1]._waiting_for != [2]:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    cut(jobs[dies])
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    assert f"process {dies} died" in errors[1 - dies]
    for one in jobs:
        one.close()
