"""The names of the files and folders of a run."""

__all__ = [
    "ALL",
    "CHECKPOINT",
    "CONFIG",
    "EVALUATION",
    "FACTORS",
    "FOUND",
    "LOG",
    "MANIFEST",
    "MODEL",
    "POSTERIOR",
    "REPORT",
    "RESULTS",
]

MANIFEST = "manifest.json"
"""The run's command and preset, and the SHA-256 sums of its files."""
CONFIG = "config.yaml"
"""The options."""
LOG = "log.jsonl"
"""A line per epoch and update."""
RESULTS = "results.json"
"""The results of `marglik train`."""
MODEL = "model.safetensors"
"""The network's parameters and buffers."""
FACTORS = "posterior.safetensors"
"""The curvature's Kronecker factors."""
POSTERIOR = "posterior.json"
"""Hyperparameters, and how the network is built."""
EVALUATION = "evaluation.json"
"""The metrics of the predictives."""
REPORT = "report.html"
"""The page about the run."""
CHECKPOINT = "checkpoint"
"""A folder that exists while training lasts: the states that --resume continues from."""

FOUND = (RESULTS, POSTERIOR, EVALUATION)
"""Files with results; a new `train` or `fit` does not replace them without --overwrite."""
ALL = (CONFIG, LOG, *FOUND, MODEL, FACTORS, REPORT, CHECKPOINT, MANIFEST)
"""Every name."""
