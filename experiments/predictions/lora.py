"""Uncertainty of low-rank adapters alone: a small Llama, adapted to a task with few labels.

After Yang et al. 2024, "Bayesian low-rank adaptation for large language models" (arXiv:2308.13111):
adapters of a pretrained network are trained, and a Kronecker-factored Laplace approximation of
them, with prior precisions from the evidence, predicts. No pretrained weights are at hand, so a
small Llama first learns DART's sentences word by word. Then peft's LoRA adapts it to predict a
restaurant's customer rating from a sentence about it. Crowd workers wrote the sentences from one of
six ratings, and they state it more or less clearly. "low" and "1 out of 5", or "high" and "5 out of
5", are often worded alike, so good predictions are uncertain.

The methods are the MAP, Laplace with expand and reduce, Laplace with factors of the base's width as
sketches, MC dropout of the adapters, and an ensemble of three, each plain and with a temperature or
calibrated. All temperatures and calibrations use the same held-out sentences. Sentences about the
same facts are in the same part of the data.

``make lora`` runs the missing seeds; each seed is a JSON file in ``results/lora/`` (of the working
directory). It needs transformers and peft, and DART's file as `marglik.data.DART` does.
"""

import json
import math
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import peft  # pyright: ignore[reportMissingImports]
import torch
import transformers
from scipy.optimize import minimize_scalar
from torch import Tensor, nn

from experiments.data.archives import unpacked
from experiments.data.dart import FILE, ORIGIN
from experiments.studies import mean_with_error, one_table_study
from marglik import (
    KronLaplace,
    PredictiveConfig,
    calibrate,
    laplace_predictive,
    maximize_evidence,
    predict_all,
)
from marglik.prediction.metrics import classification_metrics
from marglik.storage.provenance import environment

__all__ = ["RATINGS", "Config", "run", "table"]

RATINGS = ("low", "1 out of 5", "average", "3 out of 5", "high", "5 out of 5")
RELATION = "customer rating"
PADDING, UNKNOWN, END = 0, 1, 2
Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Config:
    """Configuration of one seed, which draws data parts, network, adapters and training order."""

    seed: int = 0
    sizes: tuple[int, ...] = (200,)
    """Numbers of labelled sentences."""
    validation: int = 100
    test: int = 500
    context: int = 48
    vocabulary: int = 2000
    width: int = 64
    depth: int = 2
    pretraining_steps: int = 800
    rank: int = 8
    epochs: int = 20
    dropout: float = 0.1
    dropout_samples: int = 10
    members: int = 3
    sketch_rank: int = 8

    @property
    def name(self) -> str:
        """The name of its file, without its ending."""
        return f"ratings_{self.seed}"


CONFIGS = [Config(seed) for seed in range(3)]


# --- the sentences ---


@dataclass(frozen=True)
class Sentences:
    """DART's sentences as word indices: those without labels, and the three labelled parts."""

    text: list[list[int]]
    train: list[tuple[list[int], int]]
    validation: list[tuple[list[int], int]]
    test: list[tuple[list[int], int]]
    vocabulary: int

    @staticmethod
    def of(config: Config) -> "Sentences":
        """Split by facts; the vocabulary is that of the sentences without labels."""
        entries = json.loads(unpacked(None, FILE, ORIGIN)[1])
        plain: list[str] = []
        groups: dict[frozenset, list[tuple[str, int]]] = {}
        for entry in entries:
            triples = frozenset(tuple(triple) for triple in entry["tripleset"])
            ratings = [value for _, relation, value in triples if relation == RELATION]
            sentences = [annotation["text"] for annotation in entry["annotations"]]
            if ratings:
                label = RATINGS.index(ratings[0])
                groups.setdefault(triples, []).extend((text, label) for text in sentences)
            else:
                plain += sentences
        shuffled = sorted(groups.values())
        random.Random(config.seed).shuffle(shuffled)
        parts: list[list[tuple[str, int]]] = []
        for size in (config.test, config.validation):
            part: list[tuple[str, int]] = []
            while len(part) < size:
                part += shuffled.pop()
            parts.append(part[:size])
        rest = [example for group in shuffled for example in group]
        plain += [text for text, _ in rest]
        counts = Counter(word for text in plain for word in _words(text))
        known = [word for word, _ in counts.most_common(config.vocabulary - 3)]
        index = {word: number for number, word in enumerate(known, 3)}

        def numbers(text: str) -> list[int]:
            words = [index.get(word, UNKNOWN) for word in _words(text)]
            return [*words[: config.context - 1], END]

        test, validation, train = (
            [(numbers(text), label) for text, label in part]
            for part in (*parts, random.Random(config.seed + 1).sample(rest, max(config.sizes)))
        )
        text = [numbers(text) for text in plain]
        return Sentences(text, train, validation, test, len(known) + 3)


def _words(text: str) -> list[str]:
    return re.findall(r"\w+|[^\w\s]", text.lower())


def batches(examples: Sequence[tuple[list[int], int]], size: int) -> list[Batch]:
    """Batches padded to their longest sentence, with the mask, as transformers' collators pad."""
    return [_batch(examples[start : start + size]) for start in range(0, len(examples), size)]


def _batch(examples: Sequence[tuple[list[int], int]]) -> Batch:
    tokens = nn.utils.rnn.pad_sequence(
        [torch.tensor(numbers) for numbers, _ in examples], True, PADDING
    )
    labels = torch.tensor([label for _, label in examples])
    return {"input_ids": tokens, "attention_mask": (tokens != PADDING).long(), "labels": labels}


# --- the networks ---


def pretrained(config: Config, sentences: Sentences) -> dict[str, Tensor]:
    """State of a small Llama that predicts the sentences' words, without its output layer."""
    model = transformers.LlamaForCausalLM(_architecture(config, sentences.vocabulary))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    steps = config.pretraining_steps
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    for _ in range(steps):
        batch = _batch([(text, 0) for text in random.sample(sentences.text, 32)])
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        optimizer.zero_grad()
        model(batch["input_ids"], batch["attention_mask"], labels=labels).loss.backward()
        optimizer.step()
        schedule.step()
    return model.model.state_dict()


def _architecture(config: Config, vocabulary: int) -> transformers.LlamaConfig:
    return transformers.LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=config.width,
        intermediate_size=2 * config.width,
        num_hidden_layers=config.depth,
        num_attention_heads=4,
        max_position_embeddings=config.context,
        pad_token_id=PADDING,
        num_labels=len(RATINGS),  # pyright: ignore[reportCallIssue]
        use_cache=False,
    )


def adapted(config: Config, base: dict[str, Tensor], vocabulary: int, train: list) -> nn.Module:
    """The classifier: LoRA on queries and values, and a head of its own, trained on labels."""
    model = transformers.LlamaForSequenceClassification(_architecture(config, vocabulary))
    model.model.load_state_dict(base)
    model = peft.get_peft_model(
        model,
        peft.LoraConfig(
            task_type="SEQ_CLS",
            r=config.rank,
            lora_alpha=2 * config.rank,
            lora_dropout=config.dropout,
            target_modules=["q_proj", "v_proj"],
        ),
    )
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    steps = config.epochs * math.ceil(len(train) / 16)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    for _ in _training(model, config.epochs, train):
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return model.eval()


def _training(model: nn.Module, epochs: int, train: list) -> Iterator[None]:
    """Yield once per batch, when the network has the gradient of the batch's mean loss."""
    model.train()
    for _ in range(epochs):
        for batch in batches(random.sample(train, len(train)), 16):
            model(**batch).loss.backward()
            yield


# --- the predictions ---


@torch.no_grad()
def probabilities(model: nn.Module, data: list[Batch]) -> Tensor:
    """Class probabilities of the network as it is, (N, C)."""
    outputs = [model(b["input_ids"], b["attention_mask"]).logits for b in data]
    return torch.cat(outputs).softmax(-1)


def dropout_probabilities(model: nn.Module, data: list[Batch], samples: int) -> Tensor:
    """Mean class probabilities over networks with dropout in the adapters."""
    model.train()
    found = torch.stack([probabilities(model, data) for _ in range(samples)]).mean(0)
    model.eval()
    return found


def tempered(p: Tensor, temperature: float) -> Tensor:
    """Probabilities ∝ p^(1/τ), which for one network is its outputs divided by τ."""
    return (p.clamp(min=1e-30).log() / temperature).softmax(-1)


def best_temperature(p: Tensor, labels: Tensor) -> float:
    """τ with the lowest NLL, with `calibrate`'s standard normal prior on log τ."""

    def loss(log: float) -> float:
        of_labels = tempered(p, math.exp(log)).gather(1, labels[:, None]).log()
        return -float(of_labels.mean()) + 0.5 * log**2 / len(labels)

    found: Any = minimize_scalar(loss, bounds=(-5, 5), method="bounded")
    return math.exp(float(found.x))


def run(config: Config) -> dict[str, Any]:
    """Evaluate every method with every number of labels."""
    torch.set_num_threads(1)
    started = time.perf_counter()
    torch.manual_seed(config.seed)
    random.seed(config.seed)
    sentences = Sentences.of(config)
    base = pretrained(config, sentences)
    pretraining = time.perf_counter() - started
    return {
        "config": asdict(config),
        "rows": {str(size): _rows(config, sentences, base, size) for size in config.sizes},
        "pretraining_seconds": pretraining,
        "seconds": time.perf_counter() - started,
        **environment(torch.device("cpu")),
    }


def _rows(
    config: Config, sentences: Sentences, base: dict[str, Tensor], size: int
) -> dict[str, dict[str, float]]:
    train = sentences.train[:size]
    held_out, test = (batches(part, 100) for part in (sentences.validation, sentences.test))
    y_held_out, y = (torch.cat([b["labels"] for b in part]) for part in (held_out, test))
    rows: dict[str, dict[str, float]] = {}

    def add(name: str, of: Callable[[list[Batch]], Tensor]) -> None:
        """Scores of a predictive, plain and with the best temperature on held-out data."""
        start = time.perf_counter()
        p = of(test)
        seconds = time.perf_counter() - start
        temperature = best_temperature(of(held_out), y_held_out)
        rows[name] = classification_metrics(p, y) | {"seconds": seconds}
        rows[f"{name}, temperature"] = classification_metrics(tempered(p, temperature), y)
        rows[f"{name}, temperature"]["temperature"] = temperature

    members = [adapted(config, base, sentences.vocabulary, train) for _ in range(config.members)]
    model = members[0]
    add("MAP", partial(probabilities, model))
    add("MC dropout", lambda data: dropout_probabilities(model, data, config.dropout_samples))
    add("ensemble", lambda data: torch.stack([probabilities(m, data) for m in members]).mean(0))
    for name, options in {
        "Laplace, expand": {"kfac_approx": "expand"},
        "Laplace, reduce": {"kfac_approx": "reduce"},
        "Laplace, expand, sketches": {"sketch_rank": config.sketch_rank},
    }.items():
        start = time.perf_counter()
        laplace = KronLaplace(model, "classification", backend_kwargs=options)
        laplace.fit(batches(train, 50))
        evidence = maximize_evidence(laplace).objective
        plain = laplace_predictive(laplace, PredictiveConfig())
        found = {"evidence": evidence, "seconds": time.perf_counter() - start}
        rows[name] = classification_metrics(predict_all(plain, test)[0].mean, y) | found
        fitted = calibrate(laplace, held_out)
        p = predict_all(fitted, test)[0].mean
        calibration = {
            "scale": fitted.calibration.covariance_scale,
            "temperature": fitted.calibration.output_temperature,
        }
        rows[f"{name}, calibrated"] = classification_metrics(p, y) | calibration
        assert laplace.factors is not None
        errors = laplace.factors.sketch_errors()
        if errors:
            rows[name]["largest_sketch_error"] = max(errors.values())
    return rows


# --- the table ---

COLUMNS = {
    "cls/NLL": "NLL",
    "cls/accuracy": "accuracy",
    "cal/ECE": "ECE",
    "cls/Brier": "Brier",
}


def table(folder: Path) -> str:
    """Means ± standard errors over seeds, in Markdown; the tempered MAP's NLL minus each."""
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("ratings_*.json"))]
    lines = [
        f"| labels | method | {' | '.join(COLUMNS.values())} | tempered MAP's NLL minus this |",
        "|---" * (len(COLUMNS) + 3) + "|",
    ]
    for size in found[0]["rows"]:
        runs = [result["rows"][size] for result in found]
        for name in runs[0]:
            cells = [mean_with_error([run[name][column] for run in runs]) for column in COLUMNS]
            gained = [run["MAP, temperature"]["cls/NLL"] - run[name]["cls/NLL"] for run in runs]
            cells.append("" if name == "MAP, temperature" else mean_with_error(gained))
            lines.append(f"| {size} | {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the missing seeds, and report."""
    return one_table_study("lora", __doc__ or "", run, CONFIGS, table, arguments)


if __name__ == "__main__":
    sys.exit(main())
