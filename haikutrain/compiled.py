"""Where compiled programs are kept between starts, by JAX's persistent compilation cache."""

import hashlib
import os
import pathlib
import platform
import tempfile

import jax
from absl import logging

OFF = "off"
"""What `config.compilation_cache` says to keep none."""

# The folder of the user's cache may grow to this; then the files that were read or written longest
# ago go, until half of it is left.
_MOST_BYTES = 1 << 30


def keep(choice: str | None) -> None:
    """Keeps compiled programs in a folder, so that the next start need not compile them.

    Args:
      choice: a folder; `OFF`, for none; or None for the one that JAX was told already
        (`JAX_COMPILATION_CACHE_DIR`), and without one for `user_folder()`.

    A folder that cannot be written costs a warning, and the run goes on without it.
    """
    if choice == OFF:
        jax.config.update("jax_compilation_cache_dir", None)
        return
    if choice is None and jax.config.jax_compilation_cache_dir is not None:  # type: ignore[attr-defined]
        return
    folder = user_folder() if choice is None else pathlib.Path(choice).absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
        if choice is None:
            _prune(folder)
    except OSError as error:
        logging.warning(
            "compiled programs are not kept: %s cannot be written (%s); name another folder with "
            "config.compilation_cache, or set it to %r",
            folder,
            error.strerror,
            OFF,
        )
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def user_folder() -> pathlib.Path:
    """`haikutrain/compiled/<kind of CPU>` in `$XDG_CACHE_HOME`, by default `~/.cache`.

    XLA writes machine code for this CPU and does not look at the next one before it runs it; a home
    may be shared by several.
    """
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    kind = f"{platform.machine()}-{hashlib.sha256(_cpu().encode()).hexdigest()[:12]}"
    return pathlib.Path(base).absolute() / "haikutrain" / "compiled" / kind


def _cpu() -> str:
    """What this CPU can do; where Linux does not say it, which machine this is."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    said = [line for line in lines if line.startswith(("flags", "Features", "model name"))]
    return "\n".join(sorted(set(said))) or platform.node()


def _prune(folder: pathlib.Path) -> None:
    files = [
        (max(info.st_atime, info.st_mtime), info.st_size, path) for path, info in _stats(folder)
    ]
    total = sum(size for _, size, _ in files)
    if total <= _MOST_BYTES:
        return
    for _, size, path in sorted(files):
        path.unlink(missing_ok=True)
        total -= size
        if total <= _MOST_BYTES // 2:
            return


def _stats(folder: pathlib.Path) -> list[tuple[pathlib.Path, os.stat_result]]:
    found = []
    for path in folder.iterdir():
        try:
            found.append((path, path.stat()))
        except FileNotFoundError:  # Another start was quicker.
            continue
    return found
