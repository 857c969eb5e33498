"""`build_docker_cmd`: one shell command from an allocation."""

import shlex
from itertools import pairwise

from resource_manager import GPUResourceManager
from resource_manager.jobs.launchers import build_docker_cmd
from tests.agent.marks import jobs_with
from tests.builders import present


def test_build_docker_cmd_returns_one_shell_command():
    allocation = present(GPUResourceManager.from_url("memory://").allocate_resources("run 1/train", 2, 8))
    words = shlex.split(
        build_docker_cmd(allocation, "img:1", "python train.py --name 'a b'", env={"A": "b c"})
    )
    assert words[:2] == ["docker", "run"]
    assert words[words.index("--gpus") + 1] == '"device=0,1"'
    assert words[words.index("--cpus") + 1] == "8"
    assert {"A=b c", "CUDA_VISIBLE_DEVICES=0,1"} <= set(words)
    variables = dict(word.split("=", 1) for before, word in pairwise(words) if before == "--env")
    assert jobs_with(variables) == {words[words.index("--name") + 1]}, "an agent knows it, also on no GPU"
    assert words[-5:] == ["img:1", "python", "train.py", "--name", "a b"]
