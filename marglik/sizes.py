"""The check of sizes that users set: of networks, data sets and batches."""


def check_sizes(hint: str = "", **sizes: int | None) -> None:
    """Raise a ValueError unless all sizes are at least 1.

    Args:
        hint: what a user can do, a sentence that ends the error.
        sizes: name of the argument -> its value; None is a size that was left out.
    """
    for argument, value in sizes.items():
        if value is not None and value < 1:
            raise ValueError(f"{argument}={value}: must be at least 1. {hint}".rstrip())
