"""The one kind of error that is the user's to mend."""


class UsageError(ValueError):
    """A mistake in flags, config, data or workdir.

    The message is one readable line: what was given, the rule, the fix. `haikutrain.main` prints
    it without a traceback and exits with code 2.
    """
