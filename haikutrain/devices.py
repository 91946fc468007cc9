"""The one door to `jax.pmap`: arrays on devices, collectives over them, compiled programs.

A replicated state has no device axis: programs take it with `in_axes=None` and return it with
`out_axes=None`. Only a batch has one, `[D, B / D, ...]`, with D the local devices.
"""

import collections
import concurrent.futures
import functools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core as jex_core
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from haikutrain.collectives import AXIS, differs
from haikutrain.errors import UsageError
from haikutrain.leaves import by_path, is_key

# XLA:CPU runs a gradient of a convolution 15 times slower inside a loop.
_SLOW_IN_CPU_LOOPS = "conv_general_dilated"


# --- which devices there are -----------------------------------------------------------------


def simulate(count: int) -> None:
    """Makes the CPU look like `count` devices. To be called before any JAX backend starts.

    Raises:
      UsageError: if `count` is not positive or a backend is already running.
    """
    if count < 1:
        raise UsageError(f"--cpu_devices={count}: the number of simulated devices must be >= 1")
    # With more devices than threads a collective waits for a thread that another one holds.
    os.environ.setdefault("PJRT_NPROC", str(max(16, 2 * count)))
    flags = os.environ.get("XLA_FLAGS", "").split()
    kept = [flag for flag in flags if "xla_force_host_platform_device_count" not in flag]
    os.environ["XLA_FLAGS"] = " ".join(kept)
    try:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError as error:
        raise UsageError(
            f"{count} CPU devices cannot be simulated any more: JAX has already started; "
            "import nothing that uses JAX arrays before"
        ) from error


def device_count() -> int:
    """The devices of all processes."""
    return jax.device_count()


def describe() -> str:
    """For people: how many devices of what kind, in how many processes."""
    kind, processes = jax.devices()[0].device_kind, jax.process_count()
    among = f" of {processes} processes" if processes > 1 else ""
    return f"{device_count()} {kind} device{'s' if device_count() > 1 else ''}{among}"


def is_main_process() -> bool:
    """Whether this process is the one that writes."""
    return jax.process_index() == 0


def local_rows(batch_size: int) -> slice:
    """The rows of a global batch that this process feeds to its devices."""
    size = batch_size // jax.process_count()
    return slice(size * jax.process_index(), size * (jax.process_index() + 1))


# --- arrays between host and devices ---------------------------------------------------------


@functools.cache
def _sharding(*spec: str | None) -> NamedSharding:
    return NamedSharding(Mesh(np.array(jax.local_devices()), (AXIS,)), PartitionSpec(*spec))


def place(tree: Any) -> Any:
    """Copies values of any kind to every local device, replicated, without weak types.

    The result never shares memory with `tree`, so that donating it can hurt nobody.
    """
    impls = jax.tree.map(lambda leaf: jax.random.key_impl(leaf) if is_key(leaf) else "", tree)
    host = jax.tree.map(
        lambda leaf: np.array(jax.random.key_data(leaf) if is_key(leaf) else leaf), tree
    )
    placed = jax.device_put(host, _sharding())
    return jax.tree.map(
        lambda leaf, impl: jax.random.wrap_key_data(leaf, impl=impl) if impl else leaf,
        placed,
        impls,
    )


def place_batch(batch: Any, *, stacked: bool = False) -> Any:
    """Splits this process's rows over its devices.

    Args:
      batch: host arrays `[B, ...]`, or `[K, B, ...]` where `stacked`.
      stacked: whether the batch axis is the second one.

    Returns:
      Arrays `[D, B / D, ...]` or `[K, D, B / D, ...]`, a device's part on that device.
    """
    axis = int(stacked)
    count = jax.local_device_count()

    sharding = _sharding(None, AXIS) if stacked else _sharding(AXIS)

    def put(leaf: Any) -> jax.Array:
        leaf = np.asarray(leaf)
        leaf = leaf.astype(jax.dtypes.canonicalize_dtype(leaf.dtype), copy=False)
        rows = leaf.shape[axis]
        parts = leaf.reshape(*leaf.shape[:axis], count, rows // count, *leaf.shape[axis + 1 :])
        # Half the host's time of `device_put` with the same sharding.
        return jax.make_array_from_callback(parts.shape, sharding, parts.__getitem__)

    return jax.tree.map(put, batch)


def rows_of(arrays: Any, numbers: jax.Array) -> Any:
    """Rows of arrays `[N, ...]`, in a program: as many as there are numbers, none beyond N."""
    # So promised, none is compared with N.
    return jax.tree.map(lambda x: x.at[numbers].get(mode="promise_in_bounds"), arrays)


_copy = jax.jit(functools.partial(jax.tree.map, jnp.copy))


def snapshot(tree: Any) -> Any:
    """A copy of a replicated tree on the first local device, which no donation can reach.

    Returns at once: the copy is made on the device, in order with the steps around it.
    """
    return _copy(jax.tree.map(lambda leaf: leaf.addressable_data(0), tree))


def fetched(results: Iterable[Any], limit: int = 16) -> Iterator[Any]:
    """Results of calls as NumPy, in order; at most `limit` calls are under way at a time."""
    pending: collections.deque[Any] = collections.deque()
    for result in results:
        pending.append(result)
        if len(pending) > limit:
            yield jax.device_get(pending.popleft())
    while pending:
        yield jax.device_get(pending.popleft())


class RunAhead:
    """Bounds how many calls the host may be ahead of the devices.

    An unbounded queue of steps holds a batch for each, and starves XLA:CPU's thread pool.
    """

    def __init__(self, limit: int = 16):
        self._limit = limit
        self._pending: collections.deque[jax.Array] = collections.deque()

    def add(self, result: jax.Array) -> None:
        """Registers one call by an undonated result of it; waits for the oldest if too many."""
        self._pending.append(result)
        if len(self._pending) > self._limit:
            self._pending.popleft().block_until_ready()


# --- replicas -------------------------------------------------------------------------------------


def drifted(tree: Any) -> list[str]:
    """The paths of the leaves of a replicated tree whose replicas are not equal."""
    if device_count() == 1:
        return []
    flags = np.asarray(_pmapped_differs()(tree, place_batch(np.zeros(jax.local_device_count()))))
    return [path for path, flag in zip(by_path(tree), flags, strict=True) if flag]


@functools.cache
def _pmapped_differs() -> Callable[..., Any]:
    # pmap wants one argument with a device axis.
    return jax.pmap(lambda tree, _: differs(tree), axis_name=AXIS, in_axes=(None, 0), out_axes=None)


# --- programs --------------------------------------------------------------------------------


def shapes(tree: Any) -> Any:
    """The tree with each array replaced by its `jax.ShapeDtypeStruct`."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


class Traced:
    """A function of one device, traced once; calling it in a program repeats what was recorded.

    Attributes:
      output: the shapes of its result.
    """

    def __init__(self, function: Callable[..., Any], *arguments: Any, inside: bool = False):
        """Traces `function` at shapes like `arguments`; `inside` a program `AXIS` is bound."""
        self.jaxpr, self.output = jax.make_jaxpr(
            function, axis_env=None if inside else [(AXIS, device_count())], return_shape=True
        )(*map(shapes, arguments))
        self._run = jex_core.jaxpr_as_fun(self.jaxpr)

    def __call__(self, *arguments: Any) -> Any:
        return jax.tree.unflatten(
            jax.tree.structure(self.output), self._run(*jax.tree.leaves(arguments))
        )


def scan(body: Callable[..., Any], carry: Any, xs: Any, length: int) -> tuple[Any, Any]:
    """`lax.scan`, unrolled where XLA:CPU is slow in loops; `body` is traced once either way."""
    one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), xs)
    traced = body if isinstance(body, Traced) else Traced(body, carry, one, inside=True)
    unroll = jax.default_backend() == "cpu" and _contains(traced.jaxpr.jaxpr, _SLOW_IN_CPU_LOOPS)
    return lax.scan(traced, carry, xs, length=length, unroll=unroll)


def _contains(jaxpr: Any, name: str) -> bool:
    return any(
        eqn.primitive.name == name or any(_contains(sub, name) for sub in _inner(eqn.params))
        for eqn in jaxpr.eqns
    )


def _inner(params: dict[str, Any]) -> list[Any]:
    values = [v for p in params.values() for v in (p if isinstance(p, tuple | list) else [p])]
    closed = [v.jaxpr for v in values if isinstance(v, jex_core.ClosedJaxpr)]
    return closed + [v for v in values if isinstance(v, jex_core.Jaxpr)]


class Program:
    """A function pmapped over all devices: traced once, when made; compiled at its first call.

    Args:
      function: what each device runs; `AXIS` is bound in it. What it returns is replicated.
      arguments: trees of arrays or shapes like those it will be called with.
      in_axes: for each argument None if it is replicated, else where its device axis is.
      donate: which arguments' memory the results may take.

    Attributes:
      output: the shapes of what it returns, without a device axis.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        arguments: Sequence[Any],
        *,
        in_axes: tuple[int | None, ...],
        donate: tuple[int, ...] = (),
    ):
        locals_ = [_drop_axis(tree, axis) for tree, axis in zip(arguments, in_axes, strict=True)]
        traced = Traced(function, *locals_)
        self.output = traced.output
        self._pmapped = jax.pmap(
            traced, axis_name=AXIS, in_axes=in_axes, out_axes=None, donate_argnums=donate
        )
        self._shapes = tuple(map(shapes, arguments))
        self._call: Callable[..., Any] | None = None
        self._begun: concurrent.futures.Future[Callable[..., Any]] | None = None

    def compile_ahead(self) -> None:
        """Begins to compile, in a thread: the first call waits for it, and raises its error."""
        if jax.process_count() > 1:
            return
        # Here, for all of it is Python: two at once would take turns.
        lowered = self._lowered()
        worker = concurrent.futures.ThreadPoolExecutor(1, "haikutrain-compile")
        self._begun = worker.submit(lowered.compile)
        worker.shutdown(wait=False)

    def _compiled(self) -> Callable[..., Any]:
        # The executable is as fast as `jit(shard_map)` called directly. With several processes
        # only the wrapper turns this process's arrays into global ones; it compiles when called.
        if jax.process_count() > 1:
            return self._pmapped
        return self.executable()

    def _lowered(self) -> Any:
        return self._pmapped.lower(*self._shapes)

    def __call__(self, *arguments: Any) -> Any:
        """Runs it: returns at once, with results that are ready later."""
        if self._call is None:
            self._call = self._begun.result() if self._begun else self._compiled()
            self._begun = None
        return self._call(*arguments)

    def executable(self) -> Any:
        """The program compiled, which knows its memory and FLOPs; compiles anew."""
        return self._lowered().compile()


def _drop_axis(tree: Any, axis: int | None) -> Any:
    """The shapes of one device's part."""
    if axis is None:
        return shapes(tree)
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape[:axis] + x.shape[axis + 1 :], x.dtype), tree
    )
