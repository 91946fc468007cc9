#!/bin/bash
#SBATCH --job-name=digits
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@180
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log

# What each of these lines is for stands in docs/cluster.md.

# A signal may come to this shell as well: it must outlive the step, to look at its exit code. (Not
# `trap "" TERM`, which what is started from here would inherit.)
trap : TERM

run() {
    srun --kill-on-bad-exit=0 --wait=120 \
        python -m haikutrain.main --config=experiments/digits_resnet.py --workdir="runs/$SLURM_JOB_ID"
}

run
code=$?

restarts=${SLURM_RESTART_COUNT:-0}
case $code in
    0) echo "finished" ;;
    42) again=yes ;;                                      # Stopped by a signal, all is saved.
    75 | 137) [ "$restarts" -lt 20 ] && again=yes ;;      # A process died: a node, or its memory.
esac
if [ -n "$again" ]; then
    echo "exit code $code: to be started again (so far $restarts times)"
    scontrol requeue "$SLURM_JOB_ID"
fi
exit $code
