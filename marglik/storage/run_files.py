"""What a run's folder holds, by name."""

__all__ = [
    "ALL",
    "CHECKPOINT",
    "CONFIG",
    "EVALUATION",
    "EVIDENCE",
    "FACTORS",
    "FOUND",
    "LOG",
    "MANIFEST",
    "MODEL",
    "POSTERIOR",
    "REPORT",
    "RESULTS",
    "TENSORBOARD",
]

MANIFEST = "manifest.json"
"""What the run is of, and SHA-256 sums of its files."""
CONFIG = "config.yaml"
"""The options."""
LOG = "log.jsonl"
"""A line per epoch and update."""
RESULTS = "results.json"
"""What `marglik train` found."""
EVIDENCE = "evidence.png"
"""Evidence and weight decays over epochs."""
MODEL = "model.safetensors"
"""The network's parameters and buffers."""
FACTORS = "posterior.safetensors"
"""The curvature's Kronecker factors."""
POSTERIOR = "posterior.json"
"""Hyperparameters, and how the network is built."""
EVALUATION = "evaluation.json"
"""What the predictives are worth."""
REPORT = "report.html"
"""The page about all of it."""
CHECKPOINT = "checkpoint"
"""A folder, while training lasts: the state that --resume goes on from."""
TENSORBOARD = "tensorboard"
"""A folder of scalars, on request."""

FOUND = (RESULTS, POSTERIOR, EVALUATION)
"""What a command worked for."""
ALL = (
    CONFIG, LOG, *FOUND, EVIDENCE, MODEL, FACTORS, REPORT, CHECKPOINT, TENSORBOARD, MANIFEST,
)  # fmt: skip
"""Every name."""
