"""``python -m marglik``, which ``torchrun -m marglik`` starts on each rank."""

import sys

from marglik.cli import main

if __name__ == "__main__":
    sys.exit(main())
