"""`gpu-manager` that may halt at a commit: python -m tests.faults.service HALTS_AT HALTS STOP ARGUMENTS…"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from resource_manager.cli import main
from tests.faults.commit_points import CommitPoint
from tests.faults.worker import die_with_parent

if __name__ == "__main__":
    halts_at, halts, stop, *arguments = sys.argv[1:]
    if (at := json.loads(halts_at)) is not None:
        point, number, sleep_s = at
        CommitPoint(point, number, sleep_s, Path(halts), Path(stop)).arm_redis()
    die_with_parent()
    main(arguments)
