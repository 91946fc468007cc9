"""The ways in which a run ends that are not a bug: each one readable line, each an exit code."""


class UsageError(ValueError):
    """A mistake in flags, config, data or workdir.

    The message is one readable line: what was given, the rule, the fix. `haikutrain.main` prints
    it without a traceback and exits with code 2.
    """


class CheckpointDamaged(RuntimeError):
    """What is on disk is not what was saved: a missing, truncated or altered file. Exit code 1."""


class CheckpointMissing(UsageError):
    """There is no such checkpoint, or it was deleted while it was being read."""


class CheckpointUnreadable(RuntimeError):
    """A checkpoint could not be read, which says nothing about what is in it. Exit code 1."""


class SavesFailed(RuntimeError):
    """Checkpoints or metrics cannot be written: the message says why. Exit code 1."""


class NonFinite(FloatingPointError):
    """A loss or gradient was not finite: the message says at which step. Exit code 3."""


class Stopped(RuntimeError):
    """A signal ended the run; all that was done is saved, and the next start goes on. Code 42."""


class PeerLost(RuntimeError):
    """Another process of the job died; the next start goes on. Exit code 75."""
