"""What can be read from the trace of an update: where randomness comes from, and purity."""

import dataclasses
import os
import re
from collections.abc import Callable, Sequence
from typing import Any

import haiku as hk
import jax
import numpy as np
from jax.extend import core as jex_core

from haikutrain import devices, leaves, updates

Tags = frozenset[str]

KEY, DEVICE, STEP, RNG, BATCH, STATE = "key", "device", "step", "rng", "batch", "state/"
"""What a value may depend on: the keys that an update is given, `lax.axis_index`, `state.step`,
`state.rng`, the batch; another leaf of the state is `state/` and its path."""

_DRAWS = {"random_bits", "threefry2x32", "rng_bit_generator", "rng_uniform"}


@dataclasses.dataclass(frozen=True)
class Draw:
    """A place where random numbers are drawn."""

    tags: Tags
    """What they depend on."""
    source: str
    """`file:line` of the user's code."""

    @property
    def differs_by_device(self) -> bool:
        """Whether two devices draw other numbers."""
        return bool(self.tags & {KEY, DEVICE, BATCH})

    @property
    def differs_by_step(self) -> bool:
        """Whether two steps draw other numbers."""
        known = self.tags & {KEY, STEP, RNG, BATCH}
        return bool(known) or any(tag.startswith(STATE) for tag in self.tags)


@dataclasses.dataclass(frozen=True)
class UpdateTrace:
    """An update as JAX recorded it."""

    text: str
    """The program, without addresses."""
    constants: list[bytes]
    """The arrays that it was traced with."""
    draws: list[Draw]
    """Where it draws random numbers."""
    loss_reads: frozenset[str] | None
    """The paths in the state that the metric `loss` is computed from; None without one."""

    @property
    def low_precision(self) -> bool:
        """Whether something in it is computed in 16 bits."""
        return bool(re.search(r"\bb?f16\[", self.text))


def trace_update(experiment: Any, state: Any, batch: Any) -> UpdateTrace:
    """Traces an experiment's own `update` at these shapes; runs its Python once.

    Args:
      experiment: the experiment.
      state: shapes of the TrainState.
      batch: this process's first batch, `[B, ...]`, on the host.
    """
    count = jax.local_device_count()

    def part(leaf: Any) -> jax.ShapeDtypeStruct:
        leaf = np.asarray(leaf)
        dtype = jax.dtypes.canonicalize_dtype(leaf.dtype)
        return jax.ShapeDtypeStruct((leaf.shape[0] // count, *leaf.shape[1:]), dtype)

    def function(state: Any, batch: Any, key: Any) -> Any:
        with updates.tracing(state.step, experiment.config):
            return experiment.update(state, batch, hk.PRNGSequence(key))

    batch = jax.tree.map(part, batch)
    traced = devices.Traced(function, state, batch, state.rng)
    tags = [frozenset({_tag(path)}) for path in leaves.by_path(state)]
    tags += [frozenset({BATCH})] * len(jax.tree.leaves(batch)) + [frozenset({KEY})]
    flow = _Flow()
    out = flow.through(traced.jaxpr.jaxpr, tags)
    metrics = leaves.by_path(traced.output[1])
    reads = dict(zip(metrics, out[len(out) - len(metrics) :], strict=True)).get("loss")
    return UpdateTrace(
        text=re.sub(r"0x[0-9a-f]+", "", str(traced.jaxpr)),
        constants=[_bytes(const) for const in traced.jaxpr.consts],
        draws=[Draw(tags, source) for tags, source in flow.draws.values()],
        loss_reads=reads if reads is None else frozenset(tag[len(STATE) :] for tag in reads),
    )


def held_tracers(experiment: Any) -> list[str]:
    """The attributes of an experiment in which a trace left its values."""
    return [
        name
        for name, value in vars(experiment).items()
        if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(value))
    ]


def _tag(path: str) -> str:
    return {"step": STEP, "rng": RNG}.get(path, f"{STATE}{path}")


def _bytes(const: Any) -> bytes:
    if leaves.is_key(const):
        const = jax.random.key_data(const)
    return np.asarray(const).tobytes()


class _Flow:
    """Follows what each value of a jaxpr depends on."""

    def __init__(self) -> None:
        self.draws: dict[tuple[int, str], tuple[Tags, str]] = {}
        self._source = ""

    def through(self, jaxpr: Any, arguments: Sequence[Tags]) -> list[Tags]:
        """What the results depend on, given what the arguments do."""
        known: dict[Any, Tags] = dict(zip(jaxpr.invars, arguments, strict=True))

        def read(atom: Any) -> Tags:
            return frozenset() if isinstance(atom, jex_core.Literal) else known.get(atom, Tags())

        for eqn in jaxpr.eqns:
            outside = self._source
            # The first line of the user's own from outside in: what is within a jitted function
            # was traced when that was first called, and says where that was.
            inside = eqn.primitive.name in _DRAWS or any(map(_open, _flat(eqn.params.values())))
            self._source = outside or (_source(eqn) if inside else "")
            results = self._results(eqn, [read(atom) for atom in eqn.invars])
            self._source = outside
            known.update(zip(eqn.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _results(self, eqn: Any, given: list[Tags]) -> list[Tags]:
        name, params, every = eqn.primitive.name, eqn.params, Tags().union(*given)
        inner = [_open(value) for value in _flat(params.values()) if _open(value) is not None]
        if name == "axis_index":
            every |= {DEVICE}
        elif name in _DRAWS:
            # One jitted function is one jaxpr, wherever it is called from.
            place = id(eqn), self._source
            before, _ = self.draws.get(place, (Tags(), ""))
            self.draws[place] = before | every, self._source or "the program"
        elif name == "cond":
            parts = [self.through(branch, given[1:]) for branch in inner]
            return [given[0].union(*tags) for tags in zip(*parts, strict=True)]
        elif name == "scan":
            consts = params["num_consts"]
            body = self._looped(params["num_carry"])
            return body(inner[0], given[:consts], given[consts:])
        elif name == "while":
            skip, consts = params["cond_nconsts"], params["body_nconsts"]
            carry = given[skip + consts :]
            self.through(_open(params["cond_jaxpr"]), given[:skip] + carry)
            body = _open(params["body_jaxpr"])
            return self._looped(len(carry))(body, given[skip : skip + consts], carry)
        elif len(inner) == 1 and len(inner[0].invars) == len(given):
            return self.through(inner[0], given)
        else:
            for jaxpr in inner:
                self.through(jaxpr, [every] * len(jaxpr.invars))
        return [every] * len(eqn.outvars)

    def _looped(self, carried: int) -> Callable[..., list[Tags]]:
        def run(body: Any, consts: list[Tags], rest: list[Tags]) -> list[Tags]:
            while True:
                out = self.through(body, [*consts, *rest])
                new = [old | tags for old, tags in zip(rest, out[:carried], strict=False)]
                if new == rest[:carried]:
                    return out
                rest = [*new, *rest[carried:]]

        return run


def _flat(values: Any) -> list[Any]:
    return [v for value in values for v in (value if isinstance(value, tuple | list) else [value])]


def _open(value: Any) -> Any:
    if isinstance(value, jex_core.ClosedJaxpr):
        return value.jaxpr
    return value if isinstance(value, jex_core.Jaxpr) else None


def _source(eqn: Any) -> str:
    """The line of the user's own code that an equation comes from."""
    traceback = eqn.source_info.traceback
    own = os.path.dirname(os.path.abspath(__file__)) + os.sep
    library = (f"-packages{os.sep}", os.path.dirname(os.__file__))
    for frame in traceback.frames if traceback is not None else ():
        name = frame.file_name
        if not name.startswith((own, "<")) and not any(part in name for part in library):
            return f"{os.path.basename(name)}:{frame.line_num}"
    return ""
