"""Memory and seconds of adapters' curvature at a 7B model's widths: whole factors and sketches.

One decoder layer of Llama 7B's shape (width 4,096, MLP 11,008, random weights in float32) under a
classifier, with peft's LoRA of rank 8 on queries, values and two of the MLP's projections. Each
adapter has one factor of the frozen layer's width: 8 of them, 1.4 GB as matrices; a 7B model has 32
such layers. `CurvatureOptions.sketch_rank` keeps r eigenvectors of each. The evidence of whole
factors is left out, because it needs the eigenvalues of matrices of 11,008 columns; those of a
sketch are known.

``make lora-memory`` measures each case in a process of its own, about two minutes in all, and
writes ``results/lora/memory.json`` (of the working directory). It needs 5 GiB.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import peft  # pyright: ignore[reportMissingImports]
import torch
import transformers

from experiments.options import add_results
from kfac_backend.blocks.kronecker import KroneckerFactors
from marglik import KronLaplace
from marglik.storage.provenance import environment
from marglik.storage.record_file import write_json

__all__ = ["Config", "measure", "table"]


@dataclass(frozen=True)
class Config:
    """The layer, its adapters, and the data: examples times positions are the rows of A."""

    sketch_rank: int | None = None
    width: int = 4096
    mlp: int = 11008
    rank: int = 8
    examples: int = 4
    positions: int = 32
    classes: int = 2


CASES = (Config(), Config(sketch_rank=16), Config(sketch_rank=128))


def measure(config: Config) -> dict[str, Any]:
    """Peak memory of this process before and after the pass, seconds, bytes of the factors."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = _model(config)
    tokens = torch.randint(1, 100, (config.examples, config.positions))
    batch = {
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "labels": torch.arange(config.examples) % config.classes,
    }
    with torch.no_grad():
        model(**batch)  # the memory of a forward pass does not belong to the curvature
    before = _peak()
    options = {"kfac_approx": "expand", "sketch_rank": config.sketch_rank}
    laplace = KronLaplace(model, "classification", backend_kwargs=options)
    start, processor = time.perf_counter(), time.process_time()
    laplace.fit([batch])
    found: dict[str, Any] = {
        "fit": {
            "seconds": time.perf_counter() - start,
            "processor_seconds": time.process_time() - processor,
            "peak_bytes": _peak() - before,
        }
    }
    factors = laplace.factors
    assert factors is not None
    found["factor_bytes"] = _bytes(factors)
    if config.sketch_rank is not None:
        start, processor = time.perf_counter(), time.process_time()
        evidence = float(laplace.log_marginal_likelihood())
        covariance = laplace.output_distribution(batch)[1]
        found |= {
            "evidence": evidence,
            "variance": float(covariance.diagonal(dim1=1, dim2=2).mean()),
            "evidence_and_predictive": {
                "seconds": time.perf_counter() - start,
                "processor_seconds": time.process_time() - processor,
                "peak_bytes": _peak() - before,
            },
            "sketch_errors": factors.sketch_errors(),
        }
    return {"config": asdict(config), "model_bytes": _bytes_of_model(model), **found}


def _model(config: Config) -> torch.nn.Module:
    architecture = transformers.LlamaConfig(
        vocab_size=100,
        hidden_size=config.width,
        intermediate_size=config.mlp,
        num_hidden_layers=1,
        num_attention_heads=config.width // 128 or 1,
        max_position_embeddings=config.positions,
        pad_token_id=0,
        num_labels=config.classes,  # pyright: ignore[reportCallIssue]
        use_cache=False,
    )
    adapters = peft.LoraConfig(
        task_type="SEQ_CLS",
        r=config.rank,
        init_lora_weights=False,  # with B = 0 the gradients of A would be zero
        target_modules=["q_proj", "v_proj", "up_proj", "down_proj"],
    )
    model = transformers.LlamaForSequenceClassification(architecture)
    return peft.get_peft_model(model, adapters).eval()


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _bytes(factors: KroneckerFactors) -> int:
    """Memory of all factors; a weight and its bias may share one B."""
    tensors = {id(t): t for t in factors.state_dict()["tensors"].values()}
    return sum(t.nbytes for t in tensors.values())


def _bytes_of_model(model: torch.nn.Module) -> int:
    return sum(p.nbytes for p in model.parameters())


def table(result: dict[str, Any]) -> str:
    """The cases in Markdown."""
    lines = [
        "| factors | held, MiB | peak of the pass, MiB | pass, processor s "
        "| evidence and predictive, s | largest stated error |",
        "|---|---|---|---|---|---|",
    ]
    for case in result["cases"]:
        rank = case["config"]["sketch_rank"]
        later = case.get("evidence_and_predictive")
        cells = [
            "whole" if rank is None else f"sketches, r = {rank}",
            f"{case['factor_bytes'] / 2**20:,.0f}",
            f"{case['fit']['peak_bytes'] / 2**20:,.0f}",
            f"{case['fit']['processor_seconds']:.0f}",
            f"{later['processor_seconds']:.1f}" if later else "",
            f"{max(case['sketch_errors'].values()):.2%}" if later else "0",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure all cases, each in a process of its own."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--case", type=int, help="case to measure in this process, printing JSON")
    add_results(parser)
    options = parser.parse_args(arguments)
    if options.case is not None:
        print(json.dumps(measure(CASES[options.case])))
        return 0
    cases = []
    for number in range(len(CASES)):
        command = [sys.executable, "-m", "experiments.speed.lora_memory", "--case", str(number)]
        printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        cases.append(json.loads(printed.splitlines()[-1]))
    result = {"cases": cases, **environment(torch.device("cpu"))}
    folder = options.results / "lora"
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "memory.json", result)
    print(table(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
