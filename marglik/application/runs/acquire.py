"""Run `marglik acquire`: choose the rows of a table to label next."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from kfac_backend.atomic_files import write_file
from marglik.application.runs.build import device_of
from marglik.application.runs.config import Accelerator, check_seed
from marglik.application.runs.evaluate import saved_object
from marglik.application.runs.predict import rows_of_table
from marglik.posterior_file import load_posterior
from marglik.prediction.acquisition import AcquisitionMethod, acquire


def acquire_rows(
    path: str,
    pool: str,
    number: int,
    output: str,
    method: AcquisitionMethod = "auto",
    joint: bool = True,
    model: str | nn.Module | None = None,
    overwrite: bool = False,
    accelerator: Accelerator = "auto",
    seed: int = 0,
) -> dict[str, Any]:
    """Write the rows of a table to label next, the best first.

    The network was trained on a TableFile. The output has the columns of the pool. Two columns are
    in front of them: "row", the number of the row in the pool (from 0), and "score". Returns a
    summary of the written file.

    Args:
        path: folder written by marglik train or marglik fit.
        pool: CSV or Parquet file of rows without labels, with the input columns of the training
            data.
        number: number of rows to choose.
        output: CSV file to write the rows to, outside of all folders of runs.
        method: score of a row. mutual_information is the information of the label about the
            parameters in nats, under the uncalibrated posterior. epig is its mean information about
            the label of another row. entropy and margin are computed from the predicted class
            probabilities. random is a random number. auto uses epig for regression.
        joint: whether each choice accounts for the labels of the rows chosen before, so that
            similar rows are not chosen together. It has an effect for mutual_information and epig,
            if the network is small enough for the posterior of all layers.
        model: class of the network. Pass it if it is your own class, because the folder alone must
            not choose the code that runs.
        overwrite: whether to replace an existing file.
        accelerator: device. auto selects cuda if it is available.
        seed: seed of the random numbers for sampling.

    Raises:
        FileNotFoundError: the folder or the file does not exist.
        FileExistsError: the output exists.
        ValueError: the output is the file of the rows or is in the folder of a run; the run was not
            trained on a table; a column is missing; a value does not occur in the training data; or
            the pool has fewer rows than ``number``.
    """
    check_seed(seed)
    record, _, frame, x = rows_of_table(path, pool, output, overwrite)
    device = device_of(accelerator)
    laplace = load_posterior(path, saved_object(path, model, record, "model", nn.Module), device)
    generator = torch.Generator(device).manual_seed(seed)
    chosen = acquire(
        laplace, x.to(device), number, method, joint=None if joint else False, generator=generator
    )
    rows = frame.iloc[chosen.index.tolist()].reset_index(drop=True)
    for name, column in (("score", chosen.gain), ("row", chosen.index)):
        rows.insert(0, name, column.numpy(), allow_duplicates=True)
    write_file(Path(output), rows.to_csv(index=False).encode())
    return {"rows": number, "pool": len(x), "method": chosen.method, "output": output}
