"""Where a run's objects come from: what makes it repeatable, and its posterior loadable."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from marglik.run_files import CONFIG

__all__ = ["Provenance"]


@dataclass(frozen=True)
class Provenance:
    """The options of a run, and how its network and data are made."""

    options: str | None = None
    """All options as YAML."""
    model: dict[str, Any] | None = None
    """``{"class_path": ..., "init_args": {...}}``."""
    data: dict[str, Any] | None = None
    """The same for the data."""

    def write_options(self, folder: Path) -> None:
        """Write the options, if they are known."""
        from kfac_backend.files import write_file  # imports torch, which marglik --help is spared

        if self.options is not None:
            write_file(folder / CONFIG, self.options.encode())
