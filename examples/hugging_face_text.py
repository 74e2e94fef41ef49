# %% [markdown]
# # Weight decays learned inside Hugging Face's Trainer
#
# For users of Hugging Face's `Trainer`. A small BERT learns how many facts a sentence states.
# Model, data and `Trainer` are as usual. The three added lines end with `# (1)`, `# (2)` and `#
# (3)`.
#
# Needs: `pip install -e ".[all,transformers]"` in the clone. The text is the development split of
# DART (Nan et al. 2021, arXiv:2007.02871), in the folder that the environment variable
# `MARGLIK_DATA` names. Without this folder, the script makes sentences from a template. Less than a
# minute on one core.

# %%
import gzip
import json
import os
import random
import re
from collections import Counter
from pathlib import Path
from tempfile import mkdtemp

import torch
from torch.utils.data import DataLoader, default_collate
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    PrinterCallback,
    Trainer,
    TrainingArguments,
    set_seed,
)

from marglik import calibrate, compute_metrics, map_predictive, predict_all
from marglik.callbacks.transformers import MarginalLikelihood  # (1)

FILE = Path(os.environ.get("MARGLIK_DATA", ""), "dart-v1.1.1-full-dev.json.gz")
CLASSES, LENGTH, WORDS = 4, 32, 1000  # one to three facts, or more

# %% [markdown]
# ## The data
# The data are sentences as sequences of word indices. The label is the number of facts. 600
# sentences are for training, 300 for calibration and 500 for the test.


# %%
def real_sentences():
    """DART's: a sentence, and how many triples it was written for; one per entry."""
    with gzip.open(FILE, "rt", encoding="utf-8") as file:
        entries = json.load(file)
    return [(e["annotations"][0]["text"], len(e["tripleset"])) for e in entries]


def made_sentences():
    """About one to five of a person's facts, in any order, some of them in passing."""
    facts = {
        "was born in": ("Rome", "Lima", "Oslo"), "works for": ("a bank", "the city"),
        "plays": ("chess", "the piano"), "has": ("two cats", "a boat"), "likes": ("tea", "snow"),
    }  # fmt: skip
    found = []
    for _ in range(2000):
        chosen = random.sample(list(facts), random.randint(1, len(facts)))
        said = [f"{verb} {random.choice(facts[verb])}" for verb in chosen]
        text = f"{random.choice(('Ada', 'Bo', 'Cy'))} " + random.choice((" and ", ", ")).join(said)
        found.append((text, len(chosen)))
    return found


set_seed(0)
sentences = real_sentences() if FILE.is_file() else made_sentences()
random.shuffle(sentences)
split = [re.findall(r"\w+|[^\w\s]", text.lower()) for text, _ in sentences]
known = Counter(word for words in split[:600] for word in words).most_common(WORDS - 2)
number = {word: i + 2 for i, (word, _) in enumerate(known)}  # 0 is padding, 1 any other word
examples = []
for words, (_, facts) in zip(split, sentences, strict=True):
    tokens = [number.get(word, 1) for word in words][:LENGTH]
    filled = tokens + [0] * (LENGTH - len(tokens))
    examples.append({
        "input_ids": torch.tensor(filled),
        "attention_mask": torch.tensor(filled).ne(0).long(),
        "labels": torch.tensor(min(facts, CLASSES) - 1),
    })  # fmt: skip
train, held_out, test = examples[:600], examples[600:900], examples[900:1400]

# %% [markdown]
# ## The training

# %%
model = BertForSequenceClassification(
    BertConfig(
        vocab_size=WORDS, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=64, max_position_embeddings=LENGTH, num_labels=CLASSES,
    )
)  # fmt: skip
arguments = TrainingArguments(
    output_dir=mkdtemp(), num_train_epochs=12, per_device_train_batch_size=50, learning_rate=3e-3,
    use_cpu=True, report_to=[], save_strategy="no", logging_strategy="no", disable_tqdm=True,
)  # fmt: skip
trainer = Trainer(model, arguments, train_dataset=train)
prior = MarginalLikelihood.attached(trainer, "classification", every=4)  # (2)
trainer.remove_callback(PrinterCallback)  # which would print each update's decays
trainer.train()

# %% [markdown]
# ## What was learned
# There is one weight decay per parameter tensor. The output shows the smallest and the largest. The
# weight decays of the embeddings grow with each update. The reason is that a LayerNorm follows the
# embeddings. Their scale therefore has no effect on the outputs, and the evidence lowers it to
# zero.

# %%
names = [name for name, _ in model.named_parameters()]
decays = sorted(zip(prior.learner.weight_decays().tolist(), names, strict=True))
for decay, name in decays[:4] + decays[-4:]:
    print(f"{decay:.2e} {name}")
print("log evidence per example:", *(f"{e / len(train):.3f}" for e in prior.learner.evidences))

# %% [markdown]
# ## What it brings


# %%
def batches(part):
    """Mappings of 100 examples."""
    return DataLoader(part, 100, collate_fn=default_collate)


laplace = calibrate(prior.posterior, batches(held_out))  # (3)
scaled = laplace.calibration_fit.map_calibration.output_temperature
predictives = {
    "MAP": map_predictive(model),
    "temperature-scaled MAP": map_predictive(model, output_temperature=scaled),
    "calibrated Laplace": laplace,
}
found = {
    name: compute_metrics(*predict_all(predict, batches(test)), "classification")
    for name, predict in predictives.items()
}
print(laplace.calibration.in_words)
for name, metrics in found.items():
    print(
        f"{name:23} test NLL {metrics.nll:.4f}, accuracy {metrics.accuracy:.3f}, "
        f"ECE {metrics.ece:.3f}"
    )
