"""What the environment says of the processes of a job: Open MPI, SLURM, TPU pods, Kubernetes."""

import os
from typing import Any

from haikutrain.errors import UsageError
from haikutrain.wire import Address


def present() -> Any:
    """JAX's description of the environment that started this process with others, or None."""
    # Not public. JAX itself joins the processes that it finds so in a way that cannot be guarded.
    from jax._src import clusters

    kinds = {kind.name: kind for kind in clusters.ClusterEnv._cluster_types}
    names = ["ompi", "slurm", "gketpu", "gcetpu"]
    if "JOB_COMPLETION_INDEX" in os.environ:  # Most pods are not of an indexed job.
        names.append("k8s")
    return next((kinds[name] for name in names if kinds[name].is_env_present()), None)


def ask(
    kind: Any,
    address: Address | None,
    num_processes: int | None,
    process_id: int | None,
    seconds: float,
) -> tuple[Address, int, int, list[int] | None]:
    """Fills in what is None.

    Args:
      kind: what `present` returned.
      address: where process 0 listens.
      num_processes: how many there are.
      process_id: which of them this is.
      seconds: how long to wait for a name that is not known yet.

    Returns:
      The three, and which of its machine's devices this process is to use; None for all.

    Raises:
      UsageError: the environment does not say.
    """
    text = None if address is None else str(address)
    try:
        text, num_processes, process_id, local_ids = kind.auto_detect_unset_distributed_params(
            text, num_processes, process_id, None, kind.name, int(seconds)
        )
        host, _, port = text.rpartition(":")
        return Address(host.strip("[]"), int(port)), num_processes, process_id, local_ids
    except Exception as error:
        raise UsageError(
            f"the environment looks like that of {kind.name}, but does not say which processes "
            f"there are ({' '.join(str(error).split())}); give --coordinator_address, "
            "--num_processes and --process_id, or --jax_distributed=off"
        ) from error
