"""The one kind of error that a user can mend, and the one that is turned into it or into a note."""


class UserError(ValueError):
    """Bad input, said in a sentence that tells what to do.

    The command line prints it without a traceback and exits with code 2.
    """


class Damaged(Exception):
    """A file that is not as it was written, and why."""
