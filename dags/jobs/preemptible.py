"""Train a classifier of the digits; save every epoch, stop when told, and go on from there later."""

import argparse
import json
import os
import signal
import sys
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

PREEMPTED = 75
"""Exit code for "try again later"; 0 would say that the job is done."""


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=200)
    options = parser.parse_args()
    checkpoint = Path(os.environ.get("GPU_CHECKPOINT_FILE", "checkpoint"))

    told = False

    def on_signal(number, frame):
        nonlocal told
        told = True

    signal.signal(signal.SIGTERM, on_signal)
    images, labels = load_digits(return_X_y=True)
    x, x_test, y, y_test = train_test_split(images / 16, labels, random_state=0, stratify=labels)

    epoch, weights = 0, np.zeros((x.shape[1], 10))
    if checkpoint.exists():
        with np.load(checkpoint, allow_pickle=False) as saved:
            epoch, weights = int(saved["epoch"]), saved["weights"]
    print(f"start {os.environ.get('GPU_RESTART_COUNT', '0')} from epoch {epoch}", flush=True)
    while epoch < options.epochs:
        if told:
            print(f"preempted after epoch {epoch}", flush=True)
            sys.exit(PREEMPTED)
        scores = np.exp(x @ weights)
        scores /= scores.sum(axis=1, keepdims=True)  # softmax regression, one step of gradient descent
        weights = weights - x.T @ (scores - np.eye(10)[y]) / len(x)
        epoch += 1
        draft = checkpoint.with_suffix(".new")
        with draft.open("wb") as file:
            np.savez(file, epoch=epoch, weights=weights)
        draft.replace(checkpoint)  # a job that is killed here leaves the epoch before
        print(f"epoch {epoch}", flush=True)
    print(
        json.dumps(
            {
                "epochs": epoch,
                "accuracy": round(float(np.mean((x_test @ weights).argmax(axis=1) == y_test)), 4),
            }
        ),
        flush=True,
    )


if __name__ == "__main__":
    main()
