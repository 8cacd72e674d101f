"""One experiment: a model on documents in one row, in variants that share its parameters.

| file | holds |
|---|---|
| `batch.py`, `tree_batch.py` | the documents of a row, or the trees |
| `row_images.py` | the images of documents: all, and those of one alone |
| `inputs.py` | the same documents as forwards: packed, padded, one at a time; how they are marked |
| `variant.py` | a model with one attention |
| `alone.py` | each document alone: the reference, and the errors of the baseline |
| `step.py` | forward, loss and backward |
| `experiment.py` | `Experiment`: all of it; a variant's first step, checked |
| `measure.py` | variants checked one by one, then timed in turns |
| `operator.py`, `operator_cases.py` | attention alone, in several ways that should agree |
| `seed_noise.py` | the verdict on trainings |
| `difference.py` | `Difference`: two tensors, in four numbers |
"""
