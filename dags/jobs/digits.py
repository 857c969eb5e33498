"""Train one classifier of scikit-learn's handwritten digits and print its accuracy as a line of JSON."""

import argparse
import json
import os
import time

import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

BATCH = 64


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


def train_with_sklearn(train, test, width, learning_rate, epochs):
    """Train the same network on CPUs; yield its accuracy after every epoch."""
    from sklearn.neural_network import MLPClassifier

    model = MLPClassifier((width,), learning_rate_init=learning_rate, batch_size=BATCH, random_state=0)
    for _ in range(epochs):
        model.partial_fit(*train, classes=range(10))
        yield float(model.score(*test))


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

    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32).reshape(-1, 8, 8)
    x, x_test, y, y_test = train_test_split(images, labels, test_size=0.25, random_state=0, stratify=labels)
    x, y = shifted(x, y)
    train, test = (x.reshape(len(x), 64), y), (x_test.reshape(len(x_test), 64), y_test)

    on_gpu = sees_gpu()
    fit = train_with_torch if on_gpu else train_with_sklearn
    accuracy = 0.0
    accuracies = fit(train, test, options.width, options.learning_rate, options.epochs)
    for epoch, accuracy in enumerate(accuracies, 1):
        print(f"epoch {epoch:2d} of {options.epochs}: accuracy {accuracy:.4f}", flush=True)
    print(
        json.dumps(
            {
                "accuracy": round(accuracy, 4),
                "backend": "pytorch" if on_gpu else "scikit-learn",
                "cuda_visible_devices": devices,
                "server": os.environ.get("GPU_SERVER", ""),
                "started_at": started_at,
                "ended_at": time.time(),
            }
        )
    )


if __name__ == "__main__":
    main()
