"""``python -m marglik``, for ``torchrun -m marglik`` on each rank."""

import sys

from marglik.application.cli import main

if __name__ == "__main__":
    sys.exit(main())
