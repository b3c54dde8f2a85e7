"""Digests of a shard: room grows with rows and sites, nothing is lost, and not for each site anew."""

from __future__ import annotations

import numpy as np

from localizer.store.grid import Grid

DIGEST = bytes(range(16))


def test_what_is_there_stays_when_rows_and_sites_come() -> None:
    grid = Grid(2)
    grid.reach(0, 1)
    grid.put(np.array([1]), 0, DIGEST)
    grid.reach(5, 100)
    grid.put(np.array([4]), 99, DIGEST[::-1])
    tensors = grid.tensors(5, [99, 0])
    assert tensors["digest"].shape == (5, 2, 16)
    assert tensors["digest"][1, 1].tobytes() == DIGEST
    assert tensors["digest"][4, 0].tobytes() == DIGEST[::-1]
    assert tensors["present"].tolist() == [[0], [2], [0], [0], [1]]


def test_sites_that_come_one_by_one_are_not_copied_each_time() -> None:
    grid, rooms = Grid(4), set()
    for count in range(1, 3001):
        grid.reach(0, count)
        rooms.add(grid.present.shape[1])
        assert grid.present.shape[1] >= count
    assert len(rooms) < 30
    assert grid.present.shape[1] < 3000 * 1.3
