"""Run folders made up from random numbers, as marglik train, fit and evaluate leave them."""

import base64
import io
import json
import math
import shutil
from pathlib import Path

import numpy as np
import yaml
from PIL import Image
from sklearn.datasets import load_digits

from marglik.storage.provenance import Provenance
from marglik.storage.run_folder import begin_run, read_record, write_record

CLASSES = [str(digit) for digit in range(10)]
NUM_DATA, NUM_TEST = 1438, 359
CALIBRATION = {
    "predictive": "Laplace, probit",
    "calibration": {"covariance_scale": 0.25, "output_temperature": 0.5},
    "nll": 0.1, "nll_uncalibrated": 0.4, "nll_scaled_map": 0.11, "nll_map": 0.2, "num_terms": 144,
}  # fmt: skip
EVIL = "</script><img src=x onerror=alert(1)>\x1b[31m"
"""A name that is markup, and colours a terminal."""
SHOWN = EVIL.replace("\x1b", "\N{REPLACEMENT CHARACTER}")
ENVIRONMENT = {
    "device": "cpu (x86_64)",
    "threads": 2,
    "python": "3.11.7",
    "versions": {"marglik": "0.1.0", "torch": "2.11.0"},
}
CONFIG = {
    "model": {"class_path": "marglik.models.LeNet", "init_args": {"num_classes": 10}},
    "data": {"class_path": "marglik.data.Digits", "init_args": {"seed": 0}},
    "prior": {"weight_decay": 5e-4, "every": 5, "burn_in": 5},
    "curvature": {"kfac_approx": "expand", "fisher": "exact"},
    "epochs": 40,
    "seed": 0,
    "output": "runs/digits",
}


def layer_names(count):
    """Weights and biases in turn."""
    kinds = ("weight", "bias")
    return [f"stage{i // 4 + 1}.block{i // 2}.conv.{kinds[i % 2]}" for i in range(count)]


def write_run(
    folder, *, layers=10, config=None, seed=0, evaluation="classification", model="LeNet"
):
    """What marglik train writes, and unless ``evaluation`` is None what marglik evaluate adds."""
    random = np.random.default_rng(seed)
    names = layer_names(layers)
    options = CONFIG | {"output": str(folder)} | (config or {})
    final = dict(zip(names, 10 ** random.uniform(-3.5, 0.5, layers), strict=True))
    records, evidence = [], -1100.0 - 40 * random.random()
    for epoch in range(1, 41):
        loss = 2.3 * math.exp(-epoch / 8) + 0.02 * random.random() + 0.03
        objective = loss + 0.3
        records.append(
            {"kind": "epoch", "epoch": epoch, "loss": loss, "objective": objective, "seconds": 0.05}
        )
        if epoch % 5 == 0:
            share = 1 - math.exp(-epoch / 12)
            value = evidence - 1400 * math.exp(-epoch / 6)
            records.append(
                {
                    "kind": "update",
                    "epoch": epoch,
                    "evidence_before": value - 800 / epoch,
                    "evidence": value,
                    "evidence_per_example": value / NUM_DATA,
                    "weight_decay": {n: 5e-4 * (w / 5e-4) ** share for n, w in final.items()},
                    "seconds": {"pass": 0.22, "eigenvalues": 0.02, "steps": 0.07},
                }
            )
    sizes = {name: int(10 ** random.uniform(1, 4)) for name in names}
    results = {
        "data": "digits",
        "model": model,
        "num_data": NUM_DATA,
        "metrics": {
            "learned, MAP": {"test/cls/NLL": 0.09, "test/cls/accuracy": 0.972, "test/cal/ECE": 0.02}
        },
        "evidence": {"first": -5270.0, "kept": records[-1]["evidence"], "epoch": 40},
        "weight_decay": {
            name: {
                "initial": 5e-4,
                "learned": final[name],
                "effective_parameters": sizes[name] * random.uniform(0.005, 0.6),
                "parameters": sizes[name],
            }
            for name in names
        },
        "config": {"run": {"epochs": 40, "seed": 0}},
        "intervals": {"learned, MAP": {"test/cls/accuracy": [0.9495, 0.9848]}},
        "suspicious_labels": suspicious(model != "MLP"),
        "differences": {"MAP": {"test/cls/NLL": [-0.02, -0.03, 0.0001]}},
        "seconds_beside": {"start": 1.0, "calibration": 0.5, "evaluation": 0.25, "baseline": 2.0},
        "seconds": 10.7,
        **ENVIRONMENT,
    }
    begin_run(folder, "train", Provenance(yaml.safe_dump(options, sort_keys=False)))
    write(folder / "results.json", results)
    write(folder / "log.jsonl", "".join(f"{json.dumps(record)}\n" for record in records))
    if evaluation is not None:
        made = {"classification": classification, "regression": regression}[evaluation]
        write(folder / "evaluation.json", made(seed))
    return folder


def write_fit(folder, **more):
    """What marglik fit writes, and more in its results."""
    begin_run(folder, "fit", Provenance(yaml.safe_dump({"seed": 0})))
    numbers = zip(layer_names(4), (20.0, 3.0, 300.0, 0.0), (150, 6, 2400, 16), strict=True)
    results = {
        "data": "digits",
        "model": "MLP",
        "num_data": NUM_DATA,
        "evidence": {"first": -2000.0, "kept": -1438.0, "epoch": None},
        "weight_decay": {
            name: {
                "initial": 5e-4,
                "learned": 1e-3,
                "effective_parameters": effective,
                "parameters": size,
            }
            for name, effective, size in numbers
        },
        "calibration": CALIBRATION,
        "note": "",
        "seconds": 3.0,
        **ENVIRONMENT,
        **more,
    }
    write(folder / "results.json", results)
    return folder


def classification(seed=0, classes=CLASSES):
    """evaluation.json of a classifier: a sure MAP, two humbler Laplace predictives."""
    random = np.random.default_rng(seed + 100)
    sharpness = {"MAP": 0.4, "Laplace, probit": 1.0, "Laplace, mc": 1.3}
    return {
        "data": "digits",
        "likelihood": "classification",
        "classes": list(classes),
        "num_test": NUM_TEST,
        "predictives": {
            name: _predictive(random, value, name, len(classes))
            for name, value in sharpness.items()
        },
        "ood": {
            "name": "noise",
            "num_examples": 1000,
            "score": "entropy",
            "note": "resized from 28x28x1 to 8x8x1",
        },
        "shift": {"kinds": ["noise", "blur", "contrast", "jpeg"], "severities": [1, 2, 3, 4, 5]},
        "uncertain": {"predictive": "Laplace, probit", "examples": _examples(random, classes)},
        **ENVIRONMENT,
    }


def _predictive(random, sharpness, name, num_classes):
    edges = np.linspace(0, 1, 16)
    confidence = 1 - 0.9 * random.beta(sharpness, 9, NUM_TEST)
    right = random.random(NUM_TEST) < confidence ** (2.5 - sharpness)
    bins = np.clip(np.digitize(confidence, edges) - 1, 0, 14)
    counts = np.bincount(bins, minlength=15).tolist()

    def means(values):
        return [float(values[bins == i].mean()) if counts[i] else None for i in range(15)]

    entropy_edges = np.linspace(0, math.log(10), 31)
    ood = random.beta(1.5 + sharpness, 3, 1000) * math.log(10)
    inside = random.beta(0.3 + 0.2 * sharpness, 9, NUM_TEST) * math.log(10)
    offset = random.random()
    metrics = {
        "test/cls/NLL": 0.12 - 0.02 * sharpness + 0.01 * offset,
        "test/cls/accuracy": float(right.mean()),
        "test/cls/Brier": 0.05,  # the same for all
        "test/cls/AURC": 0.004 * sharpness,
        "test/cal/ECE": 0.03 / sharpness,
        "ood/AUROC": 0.9 + 0.04 * sharpness,
        "ood/AUPR": 0.91,
        "ood/FPR95": 0.3 - 0.1 * sharpness,
    }
    for kind, rate in {"noise": 0.3, "blur": 0.2, "contrast": 0.1, "jpeg": 0.05}.items():
        for severity in range(1, 6):
            worse = rate * severity / sharpness * (1 + 0.3 * offset)
            metrics[f"shift/{kind}/{severity}/cls/NLL"] = metrics["test/cls/NLL"] + worse
            metrics[f"shift/{kind}/{severity}/cal/ECE"] = metrics["test/cal/ECE"] + worse / 5
    nll, grid = metrics["test/cls/NLL"], np.linspace(0, 1, 50)
    confusion = np.diag([30] * num_classes)
    if name == "Laplace, mc":  # the other two make the same errors
        confusion[0, 1] = 3
    confusion[2, 0] = 2
    against = {"test/cls/NLL": [-0.02, -0.04, 0.001], "test/cls/accuracy": [0.0028, -0.005, 0.01]}
    of_another = {"against": {"predictive": "MAP", "differences": against}}
    return {
        **({} if name == "MAP" else of_another),
        "metrics": metrics,
        "intervals": {
            "test/cls/NLL": [nll - 0.03, nll + 0.03],
            "test/cls/accuracy": [0.9432, 0.9814],
            "test/cls/AURC": [0.0012, 0.0345],
            "ood/AUROC": [0.89, 0.99],
            "ood/FPR95": [0.0567, 0.3456],
        },
        "risk_coverage": {
            "coverage": ((np.arange(50) + 1) / 50).tolist(),
            "risk": (0.05 * grid**3 / sharpness).tolist(),
        },
        "roc": {"fpr": grid.tolist(), "tpr": (grid ** (0.1 / sharpness)).tolist()},
        "classes": {
            "counts": confusion.sum(1).tolist(),
            "right": confusion.diagonal().tolist(),
            "confusion": confusion.tolist(),
        },
        "reliability": {
            "edges": edges.tolist(),
            "counts": counts,
            "confidence": means(confidence),
            "accuracy": means(right.astype(float)),
        },
        "entropy": {
            "edges": entropy_edges.tolist(),
            "test": np.histogram(inside, entropy_edges)[0].tolist(),
            "ood": np.histogram(ood, entropy_edges)[0].tolist(),
        },
        "seconds": 0.05 + sharpness,
    }


def _examples(random, classes, count=24):
    digits = load_digits()
    examples = []
    for index, entropy in enumerate(sorted(random.uniform(0.5, 1.6, count), reverse=True)):
        label = classes[int(digits.target[index])]
        wrong = classes[random.integers(len(classes))]
        aleatoric = entropy * random.uniform(0.4, 0.9)
        examples.append(
            {
                "index": index,
                "label": label,
                "predicted": wrong if index % 3 == 0 else label,
                "probability": float(random.uniform(0.25, 0.6)),
                "entropy": entropy,
                "aleatoric": aleatoric,
                "epistemic": entropy - aleatoric,
                "image": png(digits.images[index] / 16),
            }
        )
    return examples


def suspicious(images=True):
    """Two training labels that results.json lists."""
    found = [
        {"index": i, "label": CLASSES[i], "predicted": "9", "score": 4.5 - i} for i in range(2)
    ]
    if images:
        found = [e | {"image": png(load_digits().images[e["index"]] / 16)} for e in found]
    return {"judged": NUM_DATA, "number": 2, "agreement": 0.975, "examples": found}


def png(pixels):
    """A greyscale image in [0, 1] as a data URI."""
    stream = io.BytesIO()
    Image.fromarray((255 * pixels).astype(np.uint8)).save(stream, "PNG")
    return f"data:image/png;base64,{base64.b64encode(stream.getvalue()).decode()}"


def regression(seed=0):
    """evaluation.json of a regression."""
    levels = [round(0.05 * i, 2) for i in range(1, 20)]
    predictives = {
        name: {
            "metrics": {
                "test/reg/NLL": 1.1 - bend / 10,
                "test/reg/RMSE": 0.82,
                "test/cal/coverage50": 0.5**bend,
                "test/cal/coverage90": 0.9**bend,
                "test/cal/coverage95": 0.95**bend,
            },
            "reliability": {
                "levels": levels,
                "coverage": [level**bend for level in levels],
                "count": 200,
            },
            "seconds": 0.1,
        }
        for name, bend in {"MAP": 1.6, "Laplace": 1.1}.items()
    }
    return {
        "data": "waves",
        "likelihood": "regression",
        "classes": None,
        "num_test": 200,
        "predictives": predictives,
        "ood": None,
        "shift": None,
        "uncertain": None,
        **ENVIRONMENT,
    }


def write(path: Path, content):
    """Write a run's file, text or a record, as marglik would."""
    if isinstance(content, dict):
        write_record(path, content)
    else:
        path.write_text(content)


def changed(path: Path, change):
    """Apply a change in place to the content of a JSON file."""
    content = read_record(path)
    change(content)
    write(path, content)


def without(folder, name):
    """A copy of a run that has not left a file."""
    copy = folder.with_name(f"{folder.name} without {name}")
    shutil.copytree(folder, copy)
    (copy / name).unlink()
    return copy


def inject(folder):
    """A run in which every name is markup."""
    made = classification(classes=[EVIL] * 10)
    made |= {"data": EVIL, "device": EVIL, "versions": {EVIL: EVIL}}
    made["ood"] |= {"name": EVIL, "note": EVIL, "score": EVIL}
    made["uncertain"]["predictive"] = EVIL
    made["predictives"] = {EVIL: made["predictives"]["MAP"]}
    made["predictives"][EVIL]["metrics"][f"test/{EVIL}"] = 1.0
    made["predictives"][EVIL]["metrics"][f"shift/{EVIL.replace('/', '')}/1/cls/NLL"] = 1.0
    write(folder / "evaluation.json", made)

    def rename(results):
        results |= {"data": EVIL, "model": EVIL, "device": EVIL}
        results["weight_decay"] = {EVIL: next(iter(results["weight_decay"].values()))}
        results["suspicious_labels"]["examples"][0] |= {"label": EVIL, "predicted": EVIL}

    changed(folder / "results.json", rename)
    log = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    for record in log:
        if record["kind"] == "update":
            record["weight_decay"] = {EVIL: 0.1, "%{y} <b>bold</b>": 0.2}
            record["seconds"] = {EVIL: 1.0}
    write(folder / "log.jsonl", "\n".join(map(json.dumps, log)))
    write(folder / "config.yaml", yaml.safe_dump({EVIL: EVIL}))
    return folder
