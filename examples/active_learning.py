# %% [markdown]
# # Which inputs to label
#
# This example chooses the inputs to label. Half of the images in the pool are blends of two digits.
# The label of a blend is one of its two digits at random. The mutual information between a label
# and the weights avoids blends. The entropy prefers them.

# %%
import numpy as np
from sklearn.datasets import load_digits

from marglik import MarglikClassifier

random = np.random.default_rng(0)
x, y = load_digits(return_X_y=True)
order = random.permutation(len(x))
test, clean, blended = order[:600], order[600:1100], order[1100:1600]
partner = random.permutation(blended)
chosen = np.where(random.random(500) < 0.5, blended, partner)
pool = np.concatenate([x[clean], (x[blended] + x[partner]) / 2])
labels = np.concatenate([y[clean], y[chosen]])
start = random.permutation(1000)[:20]
for method in ("random", "entropy", "mutual_information"):
    bought = list(start)
    for _ in range(10):
        classifier = MarglikClassifier(epochs=100, held_out=0, random_state=0)
        classifier.fit(pool[bought], labels[bought])
        bought += list(classifier.acquire(pool, 10, method, labelled=bought))
    accuracy = classifier.fit(pool[bought], labels[bought]).score(x[test], y[test])
    blends = np.mean(np.array(bought) >= 500)
    print(f"{method}: accuracy {accuracy:.3f}, {blends:.0%} of {len(bought)} labels are blends")
