import sys

from .renewal import supervised


def main() -> int:
    """What it needs is imported when it is called: the process that only waits for a bench does without torch."""
    from . import cli

    return cli.main()


sys.exit(supervised(main))
