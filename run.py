"""Compose a run from conf/, validate it, run its task: `python run.py algorithm=grpo ref_strategy=lora`.

`python run.py --help` says what can be chosen and changed. Exit codes: 0 done, 1 failed, 2 refused, 130 interrupted.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from alignment import config, pipeline, sweep
from alignment.errors import ConfigError, Interrupted, UserError


def run(argv: Sequence[str]) -> Any:
    """Do what a command line says. Returns the task's objective (a list for a sweep), raises what went wrong."""
    if argv[:1] == ["--job"]:
        return config.run_saved(Path(argv[1]))
    if pipeline.is_asked(argv):
        return pipeline.run(argv, run)
    if sweep.is_asked(argv):
        return sweep.run(argv, run)
    command = config.parse(argv)
    if command.flags.help:
        return print(config.show_help(command))
    if command.shows:
        return config.show(command)
    return config.launch(config.rehearse(config.preflight(command)))


def main(argv: Sequence[str] | None = None) -> int:
    """Like `run`, but says in words what went wrong, and returns the exit code."""
    try:
        run(list(sys.argv[1:] if argv is None else argv))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    except UserError as error:
        if error.debug:
            raise
        print(f"error: {error}", file=sys.stderr)
        return 1
    except Interrupted as error:
        print(config.how_to_resume(error), file=sys.stderr)
        return 130
    except KeyboardInterrupt:
        print("interrupted before anything was started", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
