"""Errors that are the user's to put right. `run.py` prints them without a traceback, unless `debug=true`."""

from collections.abc import Sequence
from pathlib import Path


class UserError(Exception):
    """Bad input: the message names the row, key or option and ends with what to do."""

    # Set from the config by the job that failed: show the traceback as well.
    debug: bool = False


class ConfigError(UserError):
    """Everything that is wrong with a command line and its config, one message each."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = list(problems)
        count = len(self.problems)
        head = "1 problem; nothing was started:" if count == 1 else f"{count} problems; nothing was started:"
        super().__init__("\n".join([head, *(f"  - {problem}" for problem in self.problems)]))


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during a job; `folder` is the run that can be resumed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        super().__init__(str(folder))
