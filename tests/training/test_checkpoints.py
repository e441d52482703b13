"""What of a checkpoint is read; whole runs over several processes are in test_parallel.py."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from pathmark.errors import CheckpointError
from pathmark.training.checkpoints import MOMENTS, PARAMETERS, Piece, State, restore, shards_of
from pathmark.training.masters import Masters


class Noted:
    """A stored tensor that notes which of its rows were asked for."""

    def __init__(self, tensor):
        self.tensor, self.read = tensor, 0

    def __getitem__(self, rows):
        found = self.tensor[rows]
        self.read += len(found)
        return found


@pytest.mark.parametrize("rows", [slice(0, 4), slice(3, 8), slice(6, 9), slice(5, 5), ...])
def test_only_the_rows_that_are_held_are_read(rows):
    whole = torch.randn(9, 2)
    stored = [Noted(whole[a:b]) for a, b in ((0, 4), (4, 4), (4, 6), (6, 9))]
    pieces = [Piece(first, tuple(part.tensor.shape), part) for first, part in zip((0, 4, 4, 6), stored, strict=True)]
    state = State(1, "", {PARAMETERS: {"w": pieces}})
    assert state.shapes() == {"w": (9, 2)}
    assert torch.equal(state.rows(PARAMETERS, "w", rows), whole[rows])
    assert sum(part.read for part in stored) == len(whole[rows])


def test_a_folder_that_lacks_a_process_is_refused(tmp_path):
    masters = Masters({"w": torch.nn.Parameter(torch.zeros(4, 2))}, {})
    optimizer = torch.optim.AdamW(masters.tensors.values())
    path = tmp_path / "checkpoint.pt"
    folder = shards_of(path)
    folder.mkdir()
    (folder / "run.json").write_text('{"step": 3, "fingerprint": "a", "files": ["0.safetensors", "1.safetensors"]}')
    kept = {f"{kind}/w": torch.full((2, 2), 5.0) for kind in (PARAMETERS, *MOMENTS)}
    save_file(kept, folder / "0.safetensors", metadata={"w": "0"})
    with pytest.raises(CheckpointError, match="cannot be opened"):
        restore(path, masters, optimizer, "a")
    save_file(kept, folder / "1.safetensors", metadata={"w": "2"})
    assert restore(path, masters, optimizer, "a") == 3
    assert torch.equal(masters.parameters["w"].detach(), torch.full((4, 2), 5.0))
    (folder / "1.safetensors").write_bytes((folder / "1.safetensors").read_bytes()[:80])
    with pytest.raises(CheckpointError, match="cannot be read"):
        restore(path, masters, optimizer, "a")
