import sys

from .cli import main
from .renewal import supervised

sys.exit(supervised(main))
