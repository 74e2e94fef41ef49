"""A process of its own that runs `marglik` several times: run by a test.

``python -m tests.marglik.commands.train_elsewhere THREADS``; a line of standard input is a JSON
list of one command's arguments. The last line printed is the list of the exit statuses.
"""

import json
import sys

import torch

from marglik.cli import main

if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[1]))
    print([main(json.loads(line)) for line in sys.stdin])
