"""What environments say of the processes of a job, their variables set by hand."""

import os

import pytest

from haikutrain import cluster
from haikutrain.errors import UsageError
from haikutrain.wire import Address

SLURM = {
    "SLURM_JOB_ID": "4096",
    "SLURM_STEP_NODELIST": "node[17-18,20]",
    "SLURM_NTASKS": "8",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
}
TPU = {
    "TPU_WORKER_HOSTNAMES": "localhost,other",
    "TPU_WORKER_ID": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "MEGASCALE_COORDINATOR_ADDRESS": "localhost:9",
    "MEGASCALE_NUM_SLICES": "1",
    "MEGASCALE_SLICE_ID": "0",
}


@pytest.fixture
def environment(monkeypatch):
    """Sets these variables, and no others of an environment that starts several processes."""

    def run(**variables):
        for name in os.environ:
            if name.startswith(("SLURM_", "OMPI_", "TPU_", "KUBERNETES_", "JOB_", "MEGASCALE_")):
                monkeypatch.delenv(name)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return run


def test_elsewhere_a_process_is_alone(environment):
    environment()
    assert cluster.present() is None
    environment(KUBERNETES_SERVICE_HOST="10.0.0.1")  # Most pods are alone.
    assert cluster.present() is None
    # A batch script that is no step of `srun`.
    environment(**{name: SLURM[name] for name in SLURM if name != "SLURM_STEP_NODELIST"})
    assert cluster.present() is None


def test_slurm(environment):
    environment(**SLURM)
    # The first node; a port from the number of the job; the device of the task's number there.
    expected = Address("node17", 61440), 8, 5, [1]
    assert cluster.ask(cluster.present(), None, None, None, 1) == expected


def test_what_is_given_goes_first(environment):
    environment(**SLURM)
    given = Address("elsewhere", 1234)
    assert cluster.ask(cluster.present(), given, None, 2, 1) == (given, 8, 2, [1])


def test_open_mpi(environment):
    # Under SLURM, whose variables are those of mpirun's own daemons.
    uri = "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911"
    environment(**SLURM, **OPEN_MPI, OMPI_MCA_orte_hnp_uri=uri)
    address, *others = cluster.ask(cluster.present(), None, None, None, 1)
    assert address.host == "10.96.0.1"
    assert others == [4, 3, [1]]


def test_open_mpi_5_needs_the_address(environment):
    environment(**SLURM, **OPEN_MPI)
    with pytest.raises(UsageError, match="give --coordinator_address"):
        cluster.ask(cluster.present(), None, None, None, 1)
    address = Address("node17", 1234)
    assert cluster.ask(cluster.present(), address, None, None, 1) == (address, 4, 3, [1])


def test_tpu_pods(environment, monkeypatch):
    from jax._src.clusters import cloud_tpu_cluster
    from jax._src.clusters import cluster as jax_cluster

    environment(**TPU)
    assert cluster.present() is None  # No TPU is here.
    for module in (cloud_tpu_cluster, jax_cluster):
        monkeypatch.setattr(module, "running_in_cloud_tpu_vm", True)
    # One process for all devices of a host.
    expected = Address("localhost", 8482), 2, 1, None
    assert cluster.ask(cluster.present(), None, None, None, 1) == expected


def test_an_environment_that_does_not_say_is_one_line(environment):
    environment(**{**SLURM, "SLURM_PROCID": "many"})
    with pytest.raises(UsageError, match="looks like that of slurm, but does not say"):
        cluster.ask(cluster.present(), None, None, None, 1)
