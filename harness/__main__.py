import sys

from .renewal import supervised


def main() -> int:
    """Imports on demand: the process that only waits for a bench works without torch."""
    from . import cli

    return cli.main()


sys.exit(supervised(main))
