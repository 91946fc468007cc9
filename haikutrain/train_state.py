"""TrainState: the one value that training carries from step to step."""

import dataclasses
import typing
from typing import Any, Self

import haiku as hk
import jax
import optax


@typing.dataclass_transform(frozen_default=True, kw_only_default=True)
class _Registered:
    """Makes each subclass a frozen dataclass and a pytree: no decorator to forget."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        dataclasses.dataclass(frozen=True, kw_only=True)(cls)
        fields = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
        jax.tree_util.register_dataclass(cls, data_fields=fields, meta_fields=[])


class TrainState(_Registered):
    """All that an update reads and writes: trained, donated, digested, saved and restored whole.

    Subclass it to carry more; a subclass is a dataclass and a pytree without any decorator:

        class ByolState(haikutrain.TrainState):
            target_params: hk.Params

    `step`, `rng` and `extras` belong to the framework, which sets them after every `init` and
    `update`; an experiment leaves them out when it makes a state.
    """

    params: hk.Params
    """What the optimizer trains."""
    network_state: hk.State
    """Haiku's mutable state, such as BatchNorm's moving averages; `{}` if there is none."""
    opt_state: optax.OptState
    """The optimizer's state."""
    step: Any = None
    """int32 []: the global batches consumed so far."""
    rng: Any = None
    """The key of the training `hk.PRNGSequence`, raw (uint32) or typed."""
    extras: dict[str, Any] = dataclasses.field(default_factory=dict)
    """The framework's own: averaged weights. Empty unless used."""

    @classmethod
    def extend(cls, state: "TrainState", **fields: Any) -> Self:
        """A state of this class: the fields of `state`, and further ones.

        state = ByolState.extend(super().init(rngs, batch), target_params=target_params)
        """
        base = {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
        return cls(**base, **fields)

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)
