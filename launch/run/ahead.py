"""Responses in a checkpoint file: of the next RL step (`rollout.staleness`), or to be continued in it
(`rollout.partial`).

Their weights are gone, so they could not be sampled again. Owns the file, not its contents.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from actors.data import Prompt
from actors.training.checkpoint import CheckpointError
from contracts.codec import Codec, StandIn
from launch.arrays import read_arrays, write_arrays
from launch.run.collect import Round
from launch.run.partial import Carried

AHEAD_FILE = "ahead.npz"  # in a checkpoint; missing if there are none
FORMAT = 2  # of the file: the columns of contracts.codec. 1 was a JSON document beside five arrays


@dataclass(frozen=True, slots=True)
class Responses:
    """`ahead`: graded responses of the next RL step; None: they are sampled then. `carried`: to be continued."""

    ahead: list[Round] | None = None
    carried: list[Carried] = field(default_factory=list)

    def __bool__(self) -> bool:
        return self.ahead is not None or bool(self.carried)


def write_ahead(path: Path, responses: Responses) -> None:
    """Write the responses. Raises OSError."""
    write_arrays(path, {"format": np.array([FORMAT]), **_codec([]).pack([responses])})


def read_ahead(checkpoint: Path, prompts: Sequence[Prompt]) -> Responses:
    """Read what `write_ahead` wrote into a checkpoint, if anything. Raises CheckpointError."""
    path = checkpoint / AHEAD_FILE
    if not path.is_file():
        return Responses()
    try:
        columns = read_arrays(path)
        written = int(columns["format"][0]) if "format" in columns else 1
        if written == FORMAT:
            (responses,) = _codec(prompts).unpack(columns)
            return responses
    except (OSError, KeyError, ValueError, IndexError, BadZipFile) as error:
        raise CheckpointError(
            f"{path}, the responses that the next step goes on from, cannot be read with these prompts: {error!r}"
        ) from error
    raise CheckpointError(
        f"{path}, the responses that the next step goes on from, is in format {written}; this version of Paceline "
        f"reads format {FORMAT}. Go on with the version that wrote it, or from a checkpoint without such a file"
    )


def _codec(prompts: Sequence[Prompt]) -> Codec[Responses]:
    """Return the codec. The file stores prompts by their ids, since they are in the data."""
    by_id = {prompt.prompt_id: prompt for prompt in prompts}
    return Codec(Responses, {Prompt: StandIn(int, lambda prompt: prompt.prompt_id, lambda known: by_id[known])})
