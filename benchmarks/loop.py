"""The framework's loop with everything on, against loops for the same update without it.

    python benchmarks/loop.py
    python benchmarks/loop.py --case mlp --devices 4 --against hand stacked

About an hour in all. The framework logs every 50 steps to the console, `metrics.jsonl` and
TensorBoard, judges each step's loss, shows its progress and, with one step a call, saves every 500
steps. The others are those of `benchmarks/peers`; of them `stacked` and `flax` log and save as
often. All sides run in one process, in chunks in turn; each case in a process of its own, for the
number of simulated devices. First each side takes some steps from one state, and must come to the
same state.
"""

import argparse
import dataclasses
import functools
import importlib
import importlib.util
import json
import tempfile
from collections.abc import Sequence
from typing import Any

import cases
import jax
import numpy as np
import pairs

import haikutrain
from haikutrain import devices
from haikutrain.start import Task

CASES = {
    "mlp": cases.mlp,
    "mlp, data on device": functools.partial(cases.mlp, on_device=True),
    "resnet": cases.resnet,
    "resnet18": cases.resnet18,
}
PEERS = {
    "hand": "peers.hand:Loop",
    "hand, pmean on trees": "peers.hand:TreesLoop",
    "stacked": "peers.stacked:Loop",
    "flax": "peers.flax_loop:Loop",
    "scan": "peers.scan:Loop",
}
LOG_EVERY, SAVE_EVERY = 50, 500
# Case, devices, steps a call, steps a chunk.
RUNS = [
    ("mlp", 1, 1, 500),
    ("mlp", 4, 1, 500),
    ("mlp", 1, 32, 512),
    ("mlp, data on device", 1, 32, 512),
    ("mlp, data on device", 1, 1, 500),
    ("resnet", 1, 1, 20),
    ("resnet", 4, 1, 20),
    ("resnet18", 1, 1, 2),
    ("resnet18", 4, 1, 2),
]
FEW = 15
"""Pairs where the ratio is far from 1."""


def target(case: str, count: int, peer: str) -> float:
    """How many times as fast as this peer the framework is to be."""
    if peer == "scan":
        return 0.95
    if peer in ("stacked", "flax"):
        return (4.0 if count > 1 else 1.7) if "mlp" in case else 0.99
    return 1.0 if "mlp" in case else 0.99


def make(peer: str, case: cases.Case, state: Any = None, folder: Any = None) -> Any:
    """A loop without the framework."""
    module, _, name = PEERS[peer].partition(":")
    return getattr(importlib.import_module(module), name)(case, state, folder)


def check_same_state(name: str, peers: Sequence[str], per_call: int) -> None:
    """Some steps by the framework's own loop and by each peer, from one state to one state."""
    steps = 2 * per_call if per_call > 1 else 3 if name == "resnet18" else 25
    case = CASES[name]()
    config = case.experiment.config
    config.stop_after, config.steps_per_call, config.log_every = steps, per_call, steps
    start = Task(case.experiment).programs.init()
    start = jax.tree.map(np.array, (start.params, start.network_state))
    with tempfile.TemporaryDirectory() as workdir:
        end = haikutrain.train(case.experiment, workdir)
    wanted = jax.tree.map(np.array, (end.params, end.network_state))
    opt_state = jax.tree.map(np.array, jax.jit(case.optimizer.init)(start[0]))
    for peer in peers:
        loop = make(peer, case, (*start, opt_state))
        loop.run(steps)
        assert_close = functools.partial(
            np.testing.assert_allclose, rtol=1e-3, atol=1e-3, err_msg=peer
        )
        jax.tree.map(assert_close, loop.result()[:2], wanted)


def measure(
    run: tuple[str, int, int, int], peers: Sequence[str], number: int, save_every: int
) -> list[pairs.Row]:
    name, count, per_call, chunk = run
    devices.simulate(count)
    with tempfile.TemporaryDirectory() as folder, pairs.quiet():
        check_same_state(name, peers, per_call)
        case = CASES[name]()
        config = case.experiment.config
        config.steps_per_call = per_call
        if per_call > 1:
            # `scan` saves nothing, and a tiny network's 500 steps take less time than a save.
            save_every = pairs.FAR
        # Periods that K divides.
        config.log_every = -(-LOG_EVERY // per_call) * per_call
        config.checkpoint_every = -(-save_every // per_call) * per_call
        loops = {
            peer: make(peer, case, folder=folder if save_every == SAVE_EVERY else None)
            for peer in peers
        }
        paced = pairs.Paced(case.experiment, chunk)
        title = f"{name}, {count} device{'s' if count > 1 else ''}"
        title += f", K = {per_call}" if per_call > 1 else ""

        def side(peer: str) -> pairs.Side:
            close = peer in ("hand", "scan") or ("mlp" not in name and count == 1)
            return pairs.Side(
                f"{title}: {peer}",
                lambda: loops[peer].run(chunk),
                target(name, count, peer),
                number if close else min(number, FEW),
            )

        try:
            for _ in range(3):
                paced()
                for loop in loops.values():
                    loop.run(chunk)
            return pairs.rounds(paced, [side(peer) for peer in peers], per=chunk)
        finally:
            paced.close()


def peers_of(per_call: int, against: Sequence[str] | None) -> list[str]:
    """With K steps a call only `scan` does the same, without it all others."""
    fit = [peer for peer in PEERS if (peer == "scan") == (per_call > 1)]
    if importlib.util.find_spec("flax") is None:
        fit = [peer for peer in fit if peer != "flax"]
    return [peer for peer in fit if against is None or peer in against]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=300)
    parser.add_argument("--case", choices=list(CASES), help="only this network")
    parser.add_argument("--devices", type=int, help="only this number of simulated devices")
    parser.add_argument("--steps_per_call", type=int, help="only this number of steps a call")
    parser.add_argument("--against", nargs="+", choices=list(PEERS), help="only these")
    parser.add_argument("--without_saves", action="store_true", help="no side saves")
    parser.add_argument("--json", action="store_true", help="print a JSON list, not a table")
    options = parser.parse_args()
    wanted = (options.case, options.devices, options.steps_per_call)
    runs = [
        (run, peers)
        for run in RUNS
        if all(w in (None, part) for w, part in zip(wanted, run[:3], strict=True))
        and (peers := peers_of(run[2], options.against))
    ]
    if options.json:
        rows = measure(*runs[0], options.pairs, pairs.FAR if options.without_saves else SAVE_EVERY)
        print(json.dumps([dataclasses.asdict(row) for row in rows]))
        return
    rows = []
    for (name, count, per_call, _), peers in runs:
        flags = ["--case", name, "--devices", count, "--steps_per_call", per_call]
        flags += ["--pairs", options.pairs, "--against", *peers, "--json"]
        flags += ["--without_saves"] if options.without_saves else []
        rows += [pairs.Row(**row) for row in pairs.in_fresh_process(__file__, *flags)]
    pairs.show(rows, "haikutrain", "the other")


if __name__ == "__main__":
    main()
