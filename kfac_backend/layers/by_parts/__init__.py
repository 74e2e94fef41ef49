"""Layers of several linear maps, each described by its parts: see `layer_by_parts`."""
