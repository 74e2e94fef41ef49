"""Handle parameters that hooks cannot capture, by following operations or per example."""
