"""Train one classifier of scikit-learn's handwritten digits and print its accuracy as a line of JSON."""

import argparse
import json
import os
import time
from importlib.util import find_spec
from pathlib import Path

import numpy as np

BATCH = 64


def digits():
    """Return images of 64 pixels and their labels, to train with and to test with.

    They are read from the file in scikit-learn: its import takes longer than the training.
    """
    [folder] = find_spec("sklearn").submodule_search_locations
    table = np.loadtxt(Path(folder) / "datasets" / "data" / "digits.csv.gz", np.float32, delimiter=",")
    table = np.random.default_rng(0).permutation(table)
    images, labels = table[:, :-1] / 16, table[:, -1].astype(int)
    tested = len(table) // 4
    train = shifted(images[tested:].reshape(-1, 8, 8), labels[tested:])
    return (train[0].reshape(-1, 64), train[1]), (images[:tested], labels[:tested])


def shifted(images, labels):
    """Return the 8x8 images, and each shifted by one pixel up, down, left and right: five times the data."""
    moves = [(0, 0), (1, 1), (-1, 1), (1, 2), (-1, 2)]
    moved = [np.roll(images, step, axis) if step else images for step, axis in moves]
    return np.concatenate(moved), np.tile(labels, len(moves))


def train_with_torch(train, test, width, learning_rate, epochs):
    """Train a network of one hidden layer on the first granted GPU; yield its accuracy after every epoch."""
    import torch

    device = torch.device("cuda")
    torch.manual_seed(0)
    x, y = torch.tensor(train[0], device=device), torch.tensor(train[1], device=device)
    x_test, y_test = torch.tensor(test[0], device=device), torch.tensor(test[1], device=device)
    model = torch.nn.Sequential(torch.nn.Linear(64, width), torch.nn.ReLU(), torch.nn.Linear(width, 10)).to(
        device
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate)
    for _ in range(epochs):
        for batch in torch.randperm(len(x), device=device).split(BATCH):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
        with torch.no_grad():
            yield (model(x_test).argmax(1) == y_test).float().mean().item()


def train_with_numpy(train, test, width, learning_rate, epochs):
    """Train the same network on CPUs, by Adam as well; yield its accuracy after every epoch."""
    random, (x, y) = np.random.default_rng(0), train
    weights, step = first_weights(width, random), 0
    means = [(np.zeros_like(weight), np.zeros_like(weight)) for weight in weights]
    for _ in range(epochs):
        order = random.permutation(len(x))
        for start in range(0, len(x), BATCH):
            part, step = order[start : start + BATCH], step + 1
            rate = learning_rate * np.sqrt(1 - 0.999**step) / (1 - 0.9**step)
            for weight, gradient, (mean, square) in zip(
                weights, gradients(weights, x[part], y[part]), means, strict=True
            ):
                mean += 0.1 * (gradient - mean)
                square += 0.001 * (gradient * gradient - square)
                weight -= (rate * mean / (np.sqrt(square) + 1e-8)).astype(np.float32)
        yield accuracy_of(weights, *test)


def first_weights(width, random):
    """Return the weights of a network of one hidden layer before its training."""
    return [
        random.normal(0, 0.1, (64, width)).astype(np.float32),
        np.zeros(width, np.float32),
        random.normal(0, 0.1, (width, 10)).astype(np.float32),
        np.zeros(10, np.float32),
    ]


def gradients(weights, x, y):
    """Return the gradients of the cross-entropy of a network of one hidden layer."""
    first, first_bias, second, second_bias = weights
    hidden = np.maximum(x @ first + first_bias, 0)
    scores = hidden @ second + second_bias
    wrong = np.exp(scores - scores.max(axis=1, keepdims=True))
    wrong /= wrong.sum(axis=1, keepdims=True)
    wrong[np.arange(len(y)), y] -= 1
    wrong /= len(y)
    back = (wrong @ second.T) * (hidden > 0)
    return [x.T @ back, back.sum(axis=0), hidden.T @ wrong, wrong.sum(axis=0)]


def accuracy_of(weights, x, y):
    first, first_bias, second, second_bias = weights
    scores = np.maximum(x @ first + first_bias, 0) @ second + second_bias
    return float((scores.argmax(axis=1) == y).mean())


def sees_gpu():
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, required=True)
    parser.add_argument("--learning-rate", type=float, required=True)
    parser.add_argument("--epochs", type=int, default=6)
    options = parser.parse_args()
    started_at = time.time()
    devices = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    print(f"CUDA_VISIBLE_DEVICES={devices}", flush=True)

    train, test = digits()
    on_gpu = sees_gpu()
    fit = train_with_torch if on_gpu else train_with_numpy
    accuracy = 0.0
    accuracies = fit(train, test, options.width, options.learning_rate, options.epochs)
    for epoch, accuracy in enumerate(accuracies, 1):
        print(f"epoch {epoch:2d} of {options.epochs}: accuracy {accuracy:.4f}", flush=True)
    print(
        json.dumps(
            {
                "accuracy": round(accuracy, 4),
                "backend": "pytorch" if on_gpu else "numpy",
                "cuda_visible_devices": devices,
                "server": os.environ.get("GPU_SERVER", ""),
                "started_at": started_at,
                "ended_at": time.time(),
            }
        )
    )


if __name__ == "__main__":
    main()
