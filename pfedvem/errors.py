"""The one kind of error that a user can mend."""


class UserError(ValueError):
    """Bad input, said in a sentence that tells what to do.

    The command line prints it without a traceback and exits with code 2.
    """
