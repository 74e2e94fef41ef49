"""Find the training examples that made predictions, for `marglik predict` and the report."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from kfac_backend.atomic_files import sha256_of_tensors
from kfac_backend.eigenvalue_correction import corrected_factors
from kfac_backend.ranks import Ranks
from marglik.application.data.splits import Splits, hold_out, split_batches, take, tensors_in
from marglik.application.data.tables import TableFile
from marglik.application.evaluation import ExampleScores, example
from marglik.application.records import Explanations
from marglik.application.run_folder import read_results
from marglik.attribution.influence import InfluenceCurvature, influence
from marglik.eval_mode import eval_mode
from marglik.posterior.posterior import Posterior
from marglik.prediction.predictive import map_predictive

BATCH_SIZE = 128
PREDICTIONS, EXAMPLES = 4, 3
"""Numbers of predictions in the report, and of training examples for each."""


class FittedData:
    """Batches of the data of a posterior's fit, in a fixed order and without augmentation.

    The training examples come first. If the posterior was also fitted to the examples that a run
    held out for calibration, so that ``num_data`` is larger, these follow.
    """

    def __init__(
        self,
        splits: Splits,
        num_data: float,
        device: torch.device | str,
        ranks: Ranks = Ranks(None),  # noqa: B008
    ) -> None:
        options: Any = {"device": device, "ranks": ranks}
        self.num_train, self._ranks = len(splits.train[1]), ranks
        self._parts = [split_batches(splits, "train", BATCH_SIZE, **options)]
        if num_data > self.num_train:
            self._parts.append(split_batches(splits, "validation", BATCH_SIZE, **options))

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def __iter__(self) -> Iterator[Any]:
        return chain(*self._parts)

    def in_order(self, scores: Float[Tensor, "Q M"]) -> Float[Tensor, "Q N"]:
        """Return all ranks' columns in the order of the training examples."""
        own = [i for k, part in enumerate(self._parts) for order in part.order
               for i in (order + k * self.num_train).tolist()]  # fmt: skip
        places = torch.tensor(sum(self._ranks.gather(own), []))
        return scores[:, places.argsort()[: self.num_train]]


def effects(
    posterior: Posterior,
    queries: Iterable[Any],
    train: FittedData,
    unit: float = 1.0,
    curvature: InfluenceCurvature = "exact",
    progress: bool = False,
) -> Float[Tensor, "Q N"]:
    """Return how much each training example raises the prediction of each query.

    The prediction is the log-odds of the predicted class, before calibration; for a yes or no the
    log-odds of yes; and for a number its mean times ``unit``.

    Raises:
        NotImplementedError: a prediction has several labels or numbers; and as for `influence`.
        MemoryError: as for `influence`.
    """
    likelihood, sigma = posterior.likelihood, posterior.sigma_noise

    def prediction(f: Tensor, y: Tensor) -> Tensor:
        if likelihood.kind == "continuous":
            of_terms = unit * likelihood.moments(f, torch.zeros_like(f), sigma)[0]
        else:
            log_p = likelihood.log_probabilities(f)  # (q, C), or (q, outputs, no and yes)
            own = log_p.argmax(-1, keepdim=True)
            own = torch.ones_like(own) if likelihood.kind == "binary" else own
            others = log_p.scatter(-1, own, -torch.inf).logsumexp(-1, keepdim=True)
            of_terms = (log_p.gather(-1, own) - others).flatten(1)
        if of_terms.shape != (len(f), 1):
            raise NotImplementedError(
                f"Predictions with {of_terms[0].numel()} labels or numbers for an example are not "
                "supported. In Python use marglik.influence with a measurement of your own."
            )
        return of_terms[:, 0]

    scores = influence(
        posterior, queries, train, measurement=prediction, curvature=curvature, progress=progress
    )
    return -train.in_order(scores)


# The command


def training_rows(path: str, record: dict[str, Any], file: str) -> Splits:
    """Return the splits of a run from its training file, with the training examples of the run."""
    data = record["data"]
    source = data.get("source") or {}
    if str(source.get("class_path")).rpartition(".")[2] != "TableFile":
        raise ValueError(
            f"{path} does not say how its training file was split, so the rows cannot be found. In "
            "Python use marglik.influence."
        )
    options: dict[str, Any] = (source.get("init_args") or {}) | {"path": file}
    splits = TableFile(**options).encoded_as(data).load()
    results = read_results(Path(path))
    run = {} if results is None else results.identity["config"]["run"]
    if run.get("held_out") and splits.validation is None and _other(splits, data):
        splits = hold_out(splits, run["held_out"], run["seed"])
    if _other(splits, data):
        raise ValueError(
            f"'{file}' has other training examples than {path} (the SHA-256 sums differ). Pass the "
            "unchanged file with which the run was trained."
        )
    return splits


def _other(splits: Splits, data: dict[str, Any]) -> bool:
    return sha256_of_tensors(tensors_in(splits.train)) != data["train_sha256"]


def explained_columns(
    posterior: Posterior,
    splits: Splits,
    x: Tensor,
    number: int,
    curvature: InfluenceCurvature,
    progress: bool,
) -> dict[str, list[Any]]:
    """Return the columns example_1, effect_1, example_2, ... for rows x; see `predict_rows`."""
    train = FittedData(splits, posterior.n_data, posterior.mean.device)
    y = splits.train[1]  # targets of the right form; predictions do not depend on them
    queries = [(part, y[:1].expand(len(part), *y.shape[1:])) for part in x.split(BATCH_SIZE)]
    unit = 1.0 if splits.target_scale is None else splits.target_scale[1]
    by_example = effects(posterior, queries, train, unit, curvature, progress)
    most = by_example.abs().topk(number).indices
    rows, values = splits.indices_in_source[most], by_example.gather(1, most)
    columns: dict[str, list[Any]] = {}
    for k in range(number):
        columns[f"example_{k + 1}"] = rows[:, k].tolist()
        columns[f"effect_{k + 1}"] = values[:, k].tolist()
    return columns


# The report


def corrected_posterior(
    splits: Splits, posterior: Posterior, ranks: Ranks
) -> tuple[Posterior, FittedData]:
    """Return the posterior with corrected eigenvalues, and the data of its fit; collective."""
    model = posterior.model
    train = FittedData(splits, posterior.n_data, posterior.mean.device, ranks)
    factors = posterior.fitted_factors()
    if not factors.is_corrected:
        with eval_mode(model):
            factors = corrected_factors(factors, model, train, process_group=ranks.process_group)
    corrected = Posterior(
        model, posterior.likelihood, posterior.options,
        prior_precision=posterior.prior_precision, sigma_noise=posterior.sigma_noise,
        temperature=posterior.temperature, process_group=ranks.process_group,
    )  # fmt: skip
    corrected.restore(factors)
    return corrected, train


def explanations(
    splits: Splits, posterior: Posterior, train: FittedData, scores: ExampleScores
) -> Explanations:
    """Return the training examples behind the test predictions with the largest losses."""
    of_examples, device = [*scores.values()][-1], posterior.mean.device
    likelihood, scale = posterior.likelihood, splits.target_scale or (0.0, 1.0)
    assert of_examples.nll is not None
    index = of_examples.nll.argsort(descending=True, stable=True)[:PREDICTIONS].cpu()
    shown = replace(splits, test=take(splits.test, index))
    queries = split_batches(shown, "test", 1, device=device)
    by_example = effects(posterior, queries, train, scale[1], "ekfac")
    predict = map_predictive(posterior.model, likelihood, posterior.sigma_noise)
    means = torch.cat([predict(x).mean for x, _ in queries]).cpu()
    predictions = []
    for i, mean, of_query in zip(index.tolist(), means, by_example, strict=True):
        most = of_query.abs().topk(min(EXAMPLES, len(of_query))).indices.tolist()
        behind = [example(splits, "train", n, None, {"effect": of_query[n].item()}) for n in most]
        predicted = mean.argmax() if likelihood.kind == "classes" else mean.squeeze()
        of_test = example(splits, "test", i, predicted, {})
        predictions.append(replace(of_test, explained_by=behind))
    return Explanations(predictions)
