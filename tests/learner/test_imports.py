"""What a learner of one rank imports at its start."""

import subprocess
import sys

from tests.docs.pages import ROOT

SLOW = ("torch.distributed.fsdp", "torch.distributed.tensor", "torch.distributed.checkpoint", "sympy")


def test_what_only_several_ranks_or_checkpoints_need_is_not_imported() -> None:
    """Together they take 0.7 s of CPU time on the EPYC."""
    code = f"import sys, actors.training.trainer; print([name for name in {SLOW} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
