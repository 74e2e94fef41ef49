# %% [markdown]
# # LoRA with calibrated uncertainty
#
# For anyone who fine-tunes with adapters. Low-rank adapters (LoRA) fit a pretrained network to a
# task with few labels. The result is often overconfident. A Laplace approximation of only the
# adapters estimates the uncertainty of the network (Yang et al. 2024, arXiv:2308.13111). It takes
# one line: `KronLaplace(model)`.
#
# Nothing is downloaded. The text is the documentation of four installed libraries. The task is to
# classify a sentence by its library. Pretrained weights would need a download, so a small Llama
# first learns to write such sentences.

# %%
import ast
import importlib.util
import random
import re
import tempfile
from collections import Counter
from pathlib import Path

import peft
import torch
import transformers

import marglik

torch.manual_seed(0)
random.seed(0)
torch.set_num_threads(1)
LIBRARIES = ("torch", "scipy", "sklearn", "matplotlib")

# %% [markdown]
# ## Sentences
# The sentences are the first lines of docstrings, as word indices. Each library has at most 600
# sentences: 50 with labels to train the adapters, 50 held out for calibration, and 100 for the
# test. The others pretrain the network, without labels.


# %%
def sentences(library: str, most: int = 600) -> list[list[str]]:
    """The first lines of a library's docstrings, in words, without those that name it."""
    found = set()
    spec = importlib.util.find_spec(library)
    for path in sorted(Path(spec.submodule_search_locations[0]).rglob("*.py"))[:150]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                line = (ast.get_docstring(node) or "").split("\n")[0].lower()
                words = tuple(re.findall(r"[a-z]+|[^\sa-z]", line)[:20])
                if len(words) > 4 and not set(words) & {*LIBRARIES, "pytorch", "tensor", "tensors"}:
                    found.add(words)
    return random.sample(sorted(found), min(most, len(found)))


texts = {library: sentences(library) for library in LIBRARIES}
counts = Counter(word for text in sum(texts.values(), []) for word in text)
words = {word: number for number, (word, _) in enumerate(counts.most_common(1200), 2)}


def batch(examples: list) -> dict[str, torch.Tensor]:
    """Padded, with the mask and the labels, as transformers' collators make it."""
    rows = [torch.tensor([words.get(word, 1) for word in text]) for text, _ in examples]
    tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    labels = torch.tensor([label for _, label in examples])
    return {"input_ids": tokens, "attention_mask": (tokens > 0).long(), "labels": labels}


def batches(examples: list, size: int = 50) -> list:
    """All examples, in this order."""
    return [batch(examples[start : start + size]) for start in range(0, len(examples), size)]


parts = {"train": [], "held out": [], "test": [], "text": []}
for label, library in enumerate(LIBRARIES):
    labelled = [(text, label) for text in texts[library]]
    for part, (start, end) in zip(
        parts, [(0, 50), (50, 100), (100, 200), (200, None)], strict=True
    ):
        parts[part] += labelled[start:end]
random.shuffle(parts["train"])
print({part: len(examples) for part, examples in parts.items()})

# %% [markdown]
# ## The pretrained network
# This network replaces the weights that you would download.

# %%
config = transformers.LlamaConfig(
    vocab_size=len(words) + 2, hidden_size=48, intermediate_size=96, num_hidden_layers=2,
    num_attention_heads=4, max_position_embeddings=20, pad_token_id=0,
    num_labels=len(LIBRARIES), use_cache=False,
)  # fmt: skip
language_model = transformers.LlamaForCausalLM(config)
optimizer = torch.optim.AdamW(language_model.parameters(), lr=3e-3)
for _ in range(200):
    x = batch(random.sample(parts["text"], 32))
    labels = x["input_ids"].masked_fill(x["attention_mask"] == 0, -100)
    loss = language_model(x["input_ids"], x["attention_mask"], labels=labels).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"pretrained to {loss:.2f} nats a word")

# %% [markdown]
# ## The adapters
# We use peft as usual. We train adapters of queries and values, and a new head. All other
# parameters are frozen.


# %%
def adapted(base: dict) -> peft.PeftModel:
    """A classifier on the pretrained base, with new adapters and a new head."""
    model = transformers.LlamaForSequenceClassification(config)
    model.model.load_state_dict(base)
    lora = peft.LoraConfig(task_type="SEQ_CLS", r=4, target_modules=["q_proj", "v_proj"])
    return peft.get_peft_model(model, lora)


base = language_model.model.state_dict()
model = adapted(base)
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3)
for _ in range(10):
    for x in batches(random.sample(parts["train"], len(parts["train"])), 16):
        optimizer.zero_grad()
        model(**x).loss.backward()
        optimizer.step()
model.print_trainable_parameters()

# %% [markdown]
# ## The posterior of the adapters
# Frozen parameters have no posterior and cost nothing. The mask hides padding. Each tensor gets the
# prior precision that maximises the log marginal likelihood.

# %%
laplace = marglik.KronLaplace(model, "classification")
laplace.fit(batches(parts["train"]))
before = laplace.log_marginal_likelihood()
found = marglik.maximize_evidence(laplace)
print(f"log marginal likelihood {before:.1f} -> {found.objective:.1f} nats")

# %% [markdown]
# ## Predictions
# `calibrate` fits the scale of the posterior's covariance and the temperature of the outputs on
# held-out sentences. With a scale of zero, the predictive is temperature scaling of the MAP.

# %%
predictives = {
    "MAP": marglik.map_predictive(model),
    "Laplace": marglik.laplace_predictive(laplace),
    "Laplace, calibrated": marglik.calibrate(laplace, batches(parts["held out"])),
}
calibration = predictives["Laplace, calibrated"].calibration_fit
temperature = calibration.map_calibration.output_temperature
predictives["MAP, temperature"] = marglik.map_predictive(model, output_temperature=temperature)
print(f"{'':22}{'NLL':>8}{'accuracy':>10}{'ECE':>8}")
for name, predict in predictives.items():
    prediction, y = marglik.predict_all(predict, batches(parts["test"]))
    of = marglik.compute_metrics(prediction, y, "classification")
    print(f"{name:22}{of.nll:8.3f}{of.accuracy:10.3f}{of.ece:8.3f}")
print(f"s = {calibration.calibration.covariance_scale:.3g}, τ of the MAP = {temperature:.3g}")

# %% [markdown]
# ## Save and load
# The folder contains the adapters, the head and the factors. The base model is not saved. Pass the
# same base model when you load the folder. Another base model raises an error.

# %%
with tempfile.TemporaryDirectory() as folder:
    marglik.save_posterior(laplace, folder)
    size = sum(path.stat().st_size for path in Path(folder).iterdir())
    loaded = marglik.load_posterior(folder, adapted(base))
    x = batch(parts["test"][:5])
    same = torch.allclose(loaded.output_distribution(x)[1], laplace.output_distribution(x)[1])
    print(f"{size / 1024:.0f} KiB, the network {4 * model.num_parameters() / 1024:.0f} KiB: {same}")
    try:
        marglik.load_posterior(folder, adapted({n: t + 0.1 for n, t in base.items()}))
    except ValueError as error:
        print(error)
