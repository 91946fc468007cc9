"""What the environment says of the processes of a job: Open MPI, SLURM, TPU pods, Kubernetes."""

import os
from typing import Any

from haikutrain.errors import UsageError
from haikutrain.wire import Address


class _OpenMpi5:
    """It no longer says where its own daemon listens, of which JAX makes an address."""

    name = "Open MPI 5"

    @staticmethod
    def is_env_present() -> bool:
        names = {"OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"}
        return names <= os.environ.keys() and "OMPI_MCA_orte_hnp_uri" not in os.environ

    @staticmethod
    def auto_detect_unset_distributed_params(*given: Any) -> tuple[Any, ...]:
        address, num_processes, process_id, *_ = given
        if address is None:
            raise ValueError("Open MPI 5 does not tell the address of process 0")
        known = (os.environ[f"OMPI_COMM_WORLD_{name}"] for name in ("SIZE", "RANK", "LOCAL_RANK"))
        size, rank, local_rank = map(int, known)
        return (
            address,
            size if num_processes is None else num_processes,
            rank if process_id is None else process_id,
            [local_rank],
        )


def present() -> Any:
    """JAX's description of the environment that started this process with others, or None."""
    # Not public. JAX itself joins the processes that it finds so in a way that cannot be guarded.
    from jax._src import clusters

    kinds: dict[str, Any] = {kind.name: kind for kind in clusters.ClusterEnv._cluster_types}
    kinds[_OpenMpi5.name] = _OpenMpi5
    # mpirun within an allocation of SLURM leaves SLURM's variables standing: it goes first.
    names = [_OpenMpi5.name, "ompi", "slurm", "gketpu", "gcetpu"]
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
