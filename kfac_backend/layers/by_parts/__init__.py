"""Rules of layers that consist of several linear maps, see `layer_by_parts`."""
