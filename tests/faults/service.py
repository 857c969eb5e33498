"""`gpu-manager` that may die at a commit: python -m tests.faults.service DIES_AT DEATHS STOP ARGUMENTS…"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from resource_manager.cli import main
from tests.faults.commit_points import CommitPoint
from tests.faults.worker import die_with_parent

if __name__ == "__main__":
    dies_at, deaths, stop, *arguments = sys.argv[1:]
    if (at := json.loads(dies_at)) is not None:
        CommitPoint(*at, Path(deaths), Path(stop)).arm_redis()
    die_with_parent()
    main(arguments)
