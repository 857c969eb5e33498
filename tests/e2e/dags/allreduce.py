"""Sum of the ranks over all processes of a gang, by torch on gloo; `torchrun` starts this on every server."""

import json
import os

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.tensor([dist.get_rank() + 1])
dist.all_reduce(total)
print(
    json.dumps(
        {
            "rank": dist.get_rank(),
            "world": dist.get_world_size(),
            "sum": int(total),
            "node_rank": os.environ["GPU_NODE_RANK"],
        }
    ),
    flush=True,
)
dist.destroy_process_group()
