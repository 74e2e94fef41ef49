"""The interface of data sources."""

from abc import ABC, abstractmethod
from typing import Any

__all__ = ["DataSource"]


class DataSource(ABC):
    """A source of data, with a test set of its own."""

    @abstractmethod
    def load(self) -> Any:
        """Return `ImageSplits` or `TensorSplits`; the same arguments always give the same data."""
