"""Run `marglik predict` and `marglik acquire`, on new rows of a table."""

import re
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from kfac_backend.atomic_files import write_file
from kfac_backend.extras import extra
from kfac_backend.likelihoods import Likelihood
from marglik.application.data.encoding import TableEncoding
from marglik.application.data.splits import check_values
from marglik.application.explain import explained_columns, training_rows
from marglik.application.run_folder import run_folder_of
from marglik.application.runs.build import device_of
from marglik.application.runs.config import Accelerator, check_seed
from marglik.application.runs.evaluate import saved_object
from marglik.attribution.influence import InfluenceCurvature
from marglik.models import Standardised
from marglik.posterior_file import load_posterior
from marglik.prediction.acquisition import AcquisitionMethod, acquire
from marglik.prediction.links import Prediction
from marglik.prediction.predictive import PredictiveConfig, laplace_predictive
from marglik.storage.record_files import read_posterior

LEVEL = 0.9
"""Level of the intervals of numeric targets."""
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")
"""First characters of a text that a spreadsheet runs as a formula, unless the text is a number."""


def predict_rows(
    path: str,
    rows: str,
    output: str,
    model: str | nn.Module | None = None,
    predictive: PredictiveConfig = PredictiveConfig(),  # noqa: B008
    explain: int = 0,
    train: str | None = None,
    curvature: InfluenceCurvature = "exact",
    overwrite: bool = False,
    accelerator: Accelerator = "auto",
    seed: int = 0,
    progress: bool = True,
) -> dict[str, Any]:
    """Write predictions for the rows of a table, with a network trained on a TableFile.

    The rows are encoded like the training rows. Columns are found by name, in any order. Other
    columns, such as the target, are ignored. The output has a line for each row, in the same order.
    For classes it has the most probable class ("predicted") and the probability of each class
    ("p(NAME)"). For numeric targets it has "mean" and "std" of a new target, in the unit of the
    file. If the likelihood is Gaussian, "low" and "high" are the ends of the 90 % interval. A name
    of a class that a spreadsheet would run as a formula, such as "=1+1", gets a leading apostrophe.

    With explain, the columns "example_1" and "effect_1" to "example_K" and "effect_K" have the
    training examples with the largest effect on each prediction. "example_k" is the number of the
    row in the training file, from 0. "effect_k" is how much this row raised the prediction, and
    negative if it lowered it: estimated from the change without the row. For classes the prediction
    is the log-odds of the most probable class, before calibration. For a yes or no it is the
    log-odds of yes. For numbers it is the mean, in the unit of the file.

    Returns a summary of the written file.

    Args:
        path: folder written by marglik train or marglik fit.
        rows: CSV or Parquet file with the input columns of the training data.
        output: CSV file to write the predictions to, outside of all folders of runs.
        model: class of the network. Pass it again if it is your own class. For safety, marglik does
            not run code that is named only in the folder.
        predictive: Options of the predictive of a Laplace posterior.
        explain: number K of training examples that explain each prediction; 0 for none.
        train: the training file, unchanged since the training. It is required with explain. For
            safety, marglik does not read files that are named only in the folder.
        curvature: curvature for explain. exact stores the inputs and output gradients of all
            training rows, at most 4 GiB. ekfac and kfac store none and are less accurate.
        overwrite: whether to replace an existing file.
        accelerator: device. auto selects cuda if it is available.
        seed: seed of the random numbers for sampling.
        progress: whether to show progress bars on a terminal.
    """
    check_seed(seed)
    if explain < 0 or (explain > 0) != (train is not None):
        raise ValueError(
            f"explain={explain}, train={train}: explaining needs a positive number of examples and "
            "the training file. Pass both --explain 5 and --train FILE, or none of them."
        )
    record, encoding, _, x = rows_of_table(path, rows, output, overwrite)
    splits = None if train is None else training_rows(path, record, train)
    if splits is not None and explain > len(splits.train[1]):
        raise ValueError(
            f"explain={explain} is too large: the run has {len(splits.train[1])} training rows."
        )
    device = device_of(accelerator)
    laplace = load_posterior(path, saved_object(path, model, record, "model", nn.Module), device)
    generator = torch.Generator(device).manual_seed(seed)
    predictive = predictive.for_posterior(laplace)
    predict = laplace_predictive(laplace, predictive, generator)
    batches = tqdm(x.split(predictive.batch_size), unit="batch", disable=None if progress else True)
    try:
        prediction = Prediction.cat([predict(part.to(device)).to("cpu") for part in batches])
    except torch.linalg.LinAlgError:  # from a covariance that is not finite
        _refuse_largest(x, laplace.model, encoding, rows)
    if not all(bool(t.isfinite().all()) for t in (prediction.mean, prediction.total_uncertainty)):
        _refuse_largest(x, laplace.model, encoding, rows)
    scale = record["data"].get("target_scale")
    columns = _columns(prediction, laplace.likelihood, encoding, scale)
    if splits is not None:
        x = x.to(device)
        try:
            columns |= explained_columns(laplace, splits, x, explain, curvature, progress)
        except MemoryError as error:
            way_out = str(error).replace("curvature='ekfac'", "--curvature ekfac")
            raise ValueError(way_out) from error
    with extra("tables"):
        import pandas

    write_file(Path(output), pandas.DataFrame(columns).to_csv(index=False).encode())
    return {
        "rows": len(x),
        "output": output,
        "predictive": predictive.label,
        "calibrated": predictive.label in laplace.calibrations and predictive.is_calibrated,
    }


def acquire_rows(
    path: str,
    pool: str,
    number: int,
    output: str,
    method: AcquisitionMethod = "auto",
    joint: bool = True,
    train: str | None = None,
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
            parameters in nats, under the uncalibrated posterior. epig (for regression alone) is the
            information that the label of this row gives about the label of another row, averaged
            over up to 250 random rows of the pool and the training file. lcmd chooses rows that are
            far from the labelled and the chosen rows, and needs train. entropy and margin are
            computed from the predicted class probabilities. random is a random number. auto uses
            mutual_information. For regression it uses lcmd, or epig without train.
        joint: whether each choice takes into account that the earlier choices will be labelled, so
            that similar rows are not chosen together. It has an effect for mutual_information, epig
            and lcmd, if the network is small enough for the posterior of all layers.
        train: the training file, unchanged. lcmd needs it, and epig also averages over its rows.
        model: class of the network. Pass it again if it is your own class. For safety, marglik does
            not run code that is named only in the folder.
        overwrite: whether to replace an existing file.
        accelerator: device. auto selects cuda if it is available.
        seed: seed of the random numbers for sampling.
    """
    check_seed(seed)
    record, _, frame, x = rows_of_table(path, pool, output, overwrite)
    device = device_of(accelerator)
    laplace = load_posterior(path, saved_object(path, model, record, "model", nn.Module), device)
    generator = torch.Generator(device).manual_seed(seed)
    labelled = None
    if train is not None:
        splits = training_rows(path, record, train)
        known = [pair[0].to(x) for pair in (splits.train, splits.validation) if pair is not None]
        rows_of_pool, x = len(x), torch.cat([x, *known])
        labelled = range(rows_of_pool, len(x))
    chosen = acquire(
        laplace, x.to(device), number, method, labelled=labelled, joint=None if joint else False,
        generator=generator,
    )  # fmt: skip
    rows = frame.iloc[chosen.index.tolist()].reset_index(drop=True)
    for name, column in (("score", chosen.gain), ("row", chosen.index)):
        rows.insert(0, name, column.numpy(), allow_duplicates=True)
    write_file(Path(output), rows.to_csv(index=False).encode())
    return {"rows": number, "pool": len(frame), "method": chosen.method, "output": output}


def _check_output(rows: str, output: str, overwrite: bool) -> None:
    """Raise an error if a command on the rows of a table must not write this file."""
    if Path(output).resolve() == Path(rows).resolve():
        raise ValueError(
            f"{output} is the file of the rows, and the output would replace it. Pass another "
            "--output."
        )
    if (folder := run_folder_of(Path(output))) is not None:
        raise ValueError(
            f"{output} is in {folder}, the folder of a run. This command never changes files of a "
            "run. Pass an --output outside."
        )
    if Path(output).is_dir():
        raise ValueError(f"{output} is a folder. Pass a file as --output.")
    if Path(output).exists() and not overwrite:
        raise FileExistsError(f"{output} exists. Pass --overwrite, or another --output.")


def rows_of_table(
    path: str, rows: str, output: str, overwrite: bool
) -> tuple[dict[str, Any], TableEncoding, Any, Tensor]:
    """Return record and encoding of a run, and the rows of a new table, raw and encoded."""
    _check_output(rows, output, overwrite)
    record = read_posterior(path)
    data = record["data"] or {}
    if "table" not in data:
        raise ValueError(
            f"{path} was trained on {data.get('name', 'unknown data')}, which is not a TableFile. "
            "This command needs a network that was trained on a table. In Python use "
            "load_posterior."
        )
    encoding = TableEncoding(**data["table"])
    frame = encoding.read(rows)
    x = encoding.encode(frame, f"'{rows}'")
    check_values(f"'{rows}'", x)
    return record, encoding, frame, x


def _refuse_largest(x: Tensor, model: nn.Module, encoding: TableEncoding, rows: str) -> NoReturn:
    """Raise a ValueError that names the value farthest from the training data."""
    if isinstance(model, Standardised):
        x = (x.double() - model.mean.double().cpu()) / model.std.double().cpu()
    row, column = divmod(int(x.abs().argmax()), x.shape[1])
    raise ValueError(
        f"'{rows}': a prediction is not finite. The value of column {encoding.columns[column]!r} "
        f"in row {row} (counted from 0) has the largest distance from the training data: "
        f"{float(x[row, column]):.3g} standard deviations from the mean. Correct it, or remove the "
        "row."
    )


def _no_formula(text: str) -> str:
    """Quote a text that a spreadsheet would run as a formula, unless it is a number."""
    is_formula = text.startswith(FORMULA) and not NUMBER.fullmatch(text)
    return f"'{text}" if is_formula else text


def _columns(
    prediction: Prediction,
    likelihood: Likelihood,
    encoding: TableEncoding,
    scale: list[float] | None,
) -> dict[str, Any]:
    if encoding.classes is not None and likelihood.kind == "classes":
        most = prediction.mean.argmax(1).tolist()
        probabilities = zip(encoding.classes, prediction.mean.T.tolist(), strict=True)
        return {"predicted": [_no_formula(encoding.classes[k]) for k in most]} | {
            f"p({name})": p for name, p in probabilities
        }
    if likelihood.kind == "binary":
        return {"p": prediction.mean[:, 0].tolist()}
    shift, unit = scale or (0.0, 1.0)
    mean = prediction.mean[:, 0].double() * unit + shift
    std = prediction.total_uncertainty[:, 0].double().sqrt() * unit
    columns = {"mean": mean.tolist(), "std": std.tolist()}
    if type(likelihood).cdf is Likelihood.cdf:  # the cdf of a Gaussian; others override it
        half = torch.special.ndtri(torch.tensor((1 + LEVEL) / 2, dtype=torch.float64)) * std
        columns |= {"low": (mean - half).tolist(), "high": (mean + half).tolist()}
    return columns
