"""Train a classifier of the digits; save every epoch, stop when told, and go on from there later."""

import argparse
import json
import os
import pickle
import signal
import sys
from pathlib import Path

from sklearn.datasets import load_digits
from sklearn.linear_model import SGDClassifier
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

    epoch, model = 0, SGDClassifier(random_state=0)
    if checkpoint.exists():
        epoch, model = pickle.loads(checkpoint.read_bytes())
    print(f"start {os.environ.get('GPU_RESTART_COUNT', '0')} from epoch {epoch}", flush=True)
    while epoch < options.epochs:
        if told:
            print(f"preempted after epoch {epoch}", flush=True)
            sys.exit(PREEMPTED)
        model.partial_fit(x, y, classes=range(10))
        epoch += 1
        draft = checkpoint.with_suffix(".new")
        draft.write_bytes(pickle.dumps((epoch, model)))
        draft.replace(checkpoint)  # a job that is killed here leaves the epoch before
        print(f"epoch {epoch}", flush=True)
    print(json.dumps({"epochs": epoch, "accuracy": round(float(model.score(x_test, y_test)), 4)}), flush=True)


if __name__ == "__main__":
    main()
