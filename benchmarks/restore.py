"""What it costs to restore a checkpoint, and how much of that is spent on verifying it.

    python benchmarks/restore.py [--pairs=N] [--millions=25,100]

States of float32 params with Adam, three arrays a parameter. In turn, in one process, with the
files in the page cache:

- `Checkpointer.restore` as it is, and the same with the checksums left unchecked: the difference is
  verification's share.
- By hand: `np.load` and `zlib.crc32` of the same arrays, one after the other.
"""

import argparse
import pathlib
import statistics
import tempfile
import time
import zlib
from collections.abc import Callable

import jax
import numpy as np
import optax

import haikutrain
from haikutrain import leaves
from haikutrain.checkpoint import Checkpointer
from haikutrain.checkpoint_folder import Folder

_LAYER = 1_000_000


def make_state(millions: int) -> haikutrain.TrainState:
    """A state of so many million params, in layers of a million, with Adam's two averages."""
    rng = np.random.default_rng(0)
    params = {
        f"layer_{i}": {"w": rng.standard_normal((1000, _LAYER // 1000), np.float32)}
        for i in range(millions)
    }
    adam = optax.ScaleByAdamState(
        count=np.int32(7),
        mu=jax.tree.map(lambda x: x * np.float32(0.1), params),
        nu=jax.tree.map(np.square, params),
    )
    return haikutrain.TrainState(
        params=params, network_state={}, opt_state=(adam,), step=np.int32(7), rng=np.zeros(2, "u4")
    )


def seconds(call: Callable[[], object]) -> float:
    """How long a call takes."""
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def unverified(restore: Callable[[], object]) -> object:
    """Restores without comparing checksums."""
    checks = Folder.checks
    Folder.checks = lambda *args: []  # type: ignore[method-assign]
    try:
        return restore()
    finally:
        Folder.checks = checks  # type: ignore[method-assign]


def save_by_hand(state: haikutrain.TrainState, folder: pathlib.Path) -> dict[pathlib.Path, int]:
    """A file for each leaf, by `np.save`; their checksums."""
    sums = {}
    for number, leaf in enumerate(jax.tree.leaves(state)):
        path = folder / f"{number}.npy"
        np.save(path, leaf)
        sums[path] = zlib.crc32(np.ascontiguousarray(leaf))
    return sums


def restore_by_hand(sums: dict[pathlib.Path, int]) -> list[np.ndarray]:
    """Reads the files, and checks them."""
    arrays = [np.load(path) for path in sums]
    for array, crc in zip(arrays, sums.values(), strict=True):
        assert zlib.crc32(np.ascontiguousarray(array)) == crc
    return arrays


def measure(millions: int, pairs: int) -> None:
    """Prints the medians for one size."""
    state = make_state(millions)
    with tempfile.TemporaryDirectory() as folder:
        checkpointer = Checkpointer(pathlib.Path(folder, "checkpoints"))
        checkpointer.save(7, state, meta={}, data=None)
        checkpointer.close()
        sums = save_by_hand(state, pathlib.Path(folder))
        target, wanted = jax.eval_shape(lambda tree: tree, state), leaves.digest(state)
        del state

        def restore() -> haikutrain.TrainState:
            return checkpointer.restore(7, target).state

        assert leaves.digest(restore()) == wanted
        times = []
        for number in range(pairs):
            sides = [restore, lambda: unverified(restore), lambda: restore_by_hand(sums)]
            order = [(number + i) % 3 for i in range(3)]
            took = {side: seconds(sides[side]) for side in order}
            times.append([took[side] for side in range(3)])
    own, bare, hand = (1000 * statistics.median(side) for side in zip(*times, strict=True))
    share = statistics.median((a - b) / a for a, b, _ in times)
    ratios = sorted(a / c for a, _, c in times)
    quartiles = f"{ratios[len(ratios) // 4]:.2f} to {ratios[3 * len(ratios) // 4]:.2f}"
    print(
        f"{millions}M params, {12 * millions} MB: restore {own:.0f} ms, unverified {bare:.0f} ms, "
        f"verification's share {share:.1%}; np.load and crc32 {hand:.0f} ms; restore / by hand "
        f"{statistics.median(ratios):.2f} (half of the pairs: {quartiles}; {pairs} pairs)"
    )


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--millions", default="25,100")
    args = parser.parse_args()
    for millions in args.millions.split(","):
        measure(int(millions), args.pairs)


if __name__ == "__main__":
    main()
