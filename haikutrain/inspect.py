"""What a checkpoint holds, without the experiment's code.

    python -m haikutrain.inspect WORKDIR_OR_CHECKPOINT [--step=N] [--digest]

shows the checkpoints of a run and the tree of one of them, by default the newest, with shapes,
dtypes and bytes. `--digest` prints only the sha256 of the state: equal for equal states. It changes
nothing on disk and starts no accelerator, so it may look on while a run is training.
"""

import argparse
import pathlib
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import jax

from haikutrain.checkpoint import Checkpointer, digest, find_checkpoint
from haikutrain.checkpoint_folder import Folder, item_of, list_steps
from haikutrain.errors import CheckpointDamaged, CheckpointUnreadable, UsageError
from haikutrain.leaves import Leaf


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code: 0, or 2 after one line that says what is wrong."""
    parser = _Parser(
        prog="python -m haikutrain.inspect", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("path", help="a workdir, its checkpoints/, or one step's directory")
    parser.add_argument("--step", type=int, help="which checkpoint; the newest by default")
    parser.add_argument("--digest", action="store_true", help="print only the state's sha256")
    args = parser.parse_args(argv)
    # Beside a trainer: the accelerator's memory is not ours to take.
    jax.config.update("jax_platforms", "cpu")
    try:
        directory, named = find_checkpoint(args.path)
        if args.step is not None and named is not None and args.step != named:
            raise UsageError(
                f"{args.path} is step {named} and --step says {args.step}; leave one of them out"
            )
        reader = Checkpointer(directory, read_only=True)

        def show(step: int) -> int:
            if args.digest:
                print(digest(reader.read(step).state))
            else:
                _print_report(Folder(directory, step))
            return step

        chosen = named if args.step is None else args.step
        if chosen is not None:
            show(chosen)
        elif reader.newest_good(show) is None:
            raise UsageError(f"{directory} has no checkpoint any more")
    except (UsageError, CheckpointDamaged, CheckpointUnreadable) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _print_report(folder: Folder) -> None:
    import rich.console
    import rich.markup
    import rich.table

    table, meta, data = folder.leaves(), folder.meta(), folder.data()
    # Cut to the terminal only where there is one: a file gets the paths whole.
    width = None if sys.stdout.isatty() else 200
    console = rich.console.Console(width=width, highlight=False)
    print(folder.directory)
    steps = rich.table.Table("step", "on disk", "metrics")
    for step in list_steps(folder.directory):
        other = Folder(folder.directory, step)
        mark = " *" if step == folder.step else ""
        metrics = rich.markup.escape(_metrics(other))
        steps.add_row(f"{step}{mark}", _bytes(_size_on_disk(other.path)), metrics)
    console.print(steps)
    tree = rich.table.Table("leaf", "dtype and shape", "bytes", title=f"step {folder.step}")
    for field in dict.fromkeys([*meta["empty"], *(item_of(path) for path in table)]):
        inside = {path: leaf for path, leaf in table.items() if item_of(path) == field}
        total = sum(leaf.nbytes for leaf in inside.values())
        tree.add_section()
        tree.add_row(f"[bold]{field}[/bold]", _count(inside), _bytes(total))
        for path, leaf in inside.items():
            if path != field:
                tree.add_row(
                    f"  {rich.markup.escape(path)}",
                    rich.markup.escape(str(leaf)),
                    _bytes(leaf.nbytes),
                )
    console.print(tree)
    total = sum(leaf.nbytes for leaf in table.values())
    params = sum(leaf.size for path, leaf in table.items() if item_of(path) == "params")
    print(f"{params:,} parameters; {_bytes(total)} in all")
    for name, value in meta.items():
        if name not in ("step", "empty", "metrics"):
            print(f"{name}: {_shorten(value)}")
    print(f"data position: {_shorten(data)}")


def _metrics(folder: Folder) -> str:
    try:
        metrics = folder.meta()["metrics"]
    except UsageError:
        return "(deleted meanwhile)"
    except CheckpointDamaged:
        return "(damaged)"
    except CheckpointUnreadable:
        return "(cannot be read)"
    return ", ".join(f"{name} {value:.6g}" for name, value in metrics.items())


def _count(leaves: dict[str, Leaf]) -> str:
    if len(leaves) == 1 and "/" not in next(iter(leaves)):
        return str(next(iter(leaves.values()))).replace("[", r"\[")
    return f"{len(leaves)} leaves" if len(leaves) != 1 else "1 leaf"


def _size_on_disk(folder: pathlib.Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.lstat().st_size if path.is_file() else 0
        except FileNotFoundError:  # The trainer is deleting it.
            continue
    return total


def _bytes(count: int) -> str:
    size = float(count)
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.4g} {unit}"
        size /= 1000
    return f"{size:.4g} GB"


def _shorten(value: Any) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= 300 else text[:300] + " ..."


if __name__ == "__main__":
    sys.exit(main())
