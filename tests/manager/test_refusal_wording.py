"""Requests and refusals in the users' words."""

from __future__ import annotations

import pytest

from resource_manager.core.models import Request
from resource_manager.manager.request_words import describe


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (Request("t"), "0 GPUs"),
        (Request("t", 2), "2 GPUs"),
        (Request("t", 1, gpu_milli=250), "250 milli of a GPU"),
        (Request("t", 2, gpu_types=("A100", "H100")), "2 GPUs of type A100 or H100"),
        (
            Request("t", 2, gpu_types=("A100",), vendor="amd", resources={"cpus": 4, "fpga": 1}),
            "2 GPUs of type A100 by amd, 4 CPUs, 1 fpga",
        ),
        (Request("t", 1, required_node="a"), "1 GPU, on a"),
    ],
)
def test_a_description_states_the_whole_demand(request_: Request, words: str) -> None:
    assert describe(request_) == words
