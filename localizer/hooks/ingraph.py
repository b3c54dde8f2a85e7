"""Taps inside full CUDA graphs, which are replayed without Python.

While a graph is captured, a tap copies what passes into a buffer that stays where it is; the copies become
part of the graph, and after a replay the buffers hold its rows. Buffers are allocated right before the first
capture, so after vLLM has measured how much memory its KV cache may have, and outside of the graphs' pool.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from localizer.hooks.layout import CannotTap

Record = Callable[..., None]
"""Takes the buffers of a tap, in the order of its sites."""

Stack = Callable[[torch.Tensor], None]
"""Takes the buffers [sites, rows, ...] of sites that are alike."""

MOST_PIECES = 64
"""So many tensors torch copies by one launch of `_foreach_copy_` (`multi_tensor_apply`, torch 2.11)."""


class Tap:
    """The tensors [padded rows, ...] that pass one place of a model; some may be None.

    `record` is as `Group.tap` says. `copied` are, for each site, the numbers of rows of the graphs that copy
    it: after others its buffer holds old rows.
    """

    def __init__(self, group: Group, sites: Sequence[str], record: Record | None) -> None:
        self._group, self.sites, self.record = group, list(sites), record
        self.shapes: list[tuple[torch.dtype, tuple[int, ...]] | None] = [None] * len(self.sites)
        self.buffers: list[torch.Tensor | None] = [None] * len(self.sites)
        self.copied: list[set[int]] = [set() for _ in self.sites]
        self.unwanted: set[int] = set()

    def see(self, *tensors: torch.Tensor | None) -> None:
        """See tensors outside of recorded steps: in a warm-up, or while a graph is captured.

        Graphs that are captured before there are buffers are thrown away: V1 measures their size so, in
        `profile_cudagraph_memory` (vLLM 0.26.0).
        """
        if self._group.capturing():
            if self._group.most_rows:
                self._copy(tensors)
        elif self._group.most_rows == 0:
            for index, tensor in enumerate(tensors):
                if tensor is not None:
                    self.shapes[index] = tensor.dtype, tuple(tensor.shape[1:])

    def _copy(self, tensors: Sequence[torch.Tensor | None]) -> None:
        targets, sources = [], []
        for index, (tensor, buffer) in enumerate(zip(tensors, self.buffers, strict=True)):
            if tensor is None or index in self.unwanted:
                continue
            rows = tensor.shape[0]
            if self._group.beyond(rows):
                return
            if buffer is None or rows > buffer.shape[0]:
                self._group.cannot(f"{self.sites[index]} has no buffer for {rows} rows")
            elif (tensor.dtype, tensor.shape[1:]) != (buffer.dtype, buffer.shape[1:]):
                self._group.cannot(f"{self.sites[index]} is not what it was before the graphs were captured")
            else:
                targets.append(buffer[:rows])
                sources.append(tensor)
                self.copied[index].add(rows)
        if targets:
            _copy_rows(targets, sources)


def _copy_rows(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy tensors [rows, ...]: few rows by one launch, many tensor by tensor.

    In a launch for several tensors one thread block takes 65,536 elements, so that eight rows of 4096 each
    would be the work of one block; as tensors of their own they are that of eight.
    """
    if sum(map(len, targets)) <= MOST_PIECES and all(source[0].is_contiguous() for source in sources):
        torch._foreach_copy_(_rows(targets), _rows(sources))
    else:
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)


def _rows(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [row for tensor in tensors for row in tensor.unbind()]


class Group:
    """The taps of one model, target or draft, whose full graphs are replayed as a whole.

    Attributes:
        capturing: whether a graph is being captured now.
        most_rows: rows of the largest captured graph; 0 before buffers are allocated.
        problems: what could not be tapped inside a graph, with the reason.

    Args:
        stacked: gives what records the buffers of sites that are alike.
        cap: graphs of more rows are not tapped; None taps all.
    """

    def __init__(
        self,
        capturing: Callable[[], bool],
        stacked: Callable[[Sequence[str]], Stack],
        cap: int | None = None,
    ) -> None:
        self.capturing, self._stacked, self._cap = capturing, stacked, cap
        self.most_rows = 0
        self.problems: list[str] = []
        self._taps: list[Tap] = []
        self._stacks: list[tuple[torch.Tensor, list[tuple[Tap, int]], Stack]] = []
        self._served: dict[int, list[tuple[torch.Tensor, Stack]]] = {}  # by rows of a graph

    def tap(self, sites: Sequence[str], record: Record | None = None) -> Tap:
        """A tap on sites, in execution order.

        With `record` its tensors have one row for each request, and are recorded so; without, one for each
        token, and are recorded with others like them.
        """
        tap = Tap(self, sites, record)
        self._taps.append(tap)
        return tap

    @property
    def warming(self) -> bool:
        """Whether there are buffers and no graph is captured now: in the forwards that warm one up."""
        return self.most_rows > 0 and not self.capturing()

    def cannot(self, problem: str) -> None:
        """Note, once, what will be missing."""
        if problem not in self.problems:
            self.problems.append(problem)

    def beyond(self, rows: int) -> bool:
        """Whether a graph of so many rows is left alone."""
        return self._cap is not None and rows > self._cap

    def size(self, rows: int, requests: int, wanted: Callable[[str], bool]) -> int:
        """Bytes of the buffers for graphs of at most so many rows and requests."""
        return sum(
            (rows if tap.record is None else requests) * math.prod(shape) * dtype.itemsize
            for tap in self._taps
            for site, seen in zip(tap.sites, tap.shapes, strict=True)
            if seen is not None and wanted(site)
            for dtype, shape in [seen]
        )

    def allocate(self, rows: int, requests: int, device: torch.device, wanted: Callable[[str], bool]) -> None:
        """Allocate the buffers of the sites that are wanted and whose tensors have been seen."""
        self.most_rows = rows
        alike: dict[tuple[torch.dtype, tuple[int, ...]], list[tuple[Tap, int]]] = {}
        for tap in self._taps:
            for index, (site, seen) in enumerate(zip(tap.sites, tap.shapes, strict=True)):
                if not wanted(site):
                    tap.unwanted.add(index)
                elif seen is not None and tap.record is None:
                    alike.setdefault(seen, []).append((tap, index))
                elif seen is not None:
                    dtype, shape = seen
                    tap.buffers[index] = torch.empty((requests, *shape), dtype=dtype, device=device)
        for (dtype, shape), members in alike.items():
            whole = torch.empty((len(members), rows, *shape), dtype=dtype, device=device)
            for buffer, (tap, index) in zip(whole, members, strict=True):
                tap.buffers[index] = buffer
            record = self._stacked([tap.sites[index] for tap, index in members])
            self._stacks.append((whole, members, record))

    def serve(self, rows: int, requests: int) -> bool:
        """A graph of so many rows has been replayed: record what it left of a batch of so many requests.

        Returns whether it is tapped.
        """
        if self.beyond(rows):
            self.cannot(
                f"a full graph of {rows} rows was replayed, only those of up to {self._cap} are tapped"
            )
            return False
        if rows not in self._served:
            self._served[rows] = self._copied(rows)
        for whole, record in self._served[rows]:
            record(whole)
        for tap in self._taps:
            if tap.record is not None and any(tap.copied):
                tap.record(*[None if buffer is None else buffer[:requests] for buffer in tap.buffers])
        return True

    def _copied(self, rows: int) -> list[tuple[torch.Tensor, Stack]]:
        """What graphs of so many rows copy, with what records it; the rest of a stack is of earlier steps."""
        found = []
        for whole, members, record in self._stacks:
            if all(rows in tap.copied[index] for tap, index in members):
                found.append((whole, record))
                continue
            for number, (tap, index) in enumerate(members):
                site = tap.sites[index]
                if rows in tap.copied[index]:
                    found.append((whole[number : number + 1], self._stacked([site])))
                else:
                    self.cannot(f"{site} is not reached in the full graph of {rows} rows")
        return found


class Graphs:
    """In-graph taps of the target and of its draft.

    Args:
        device: of the model.
        capturing: whether a graph is being captured now.
        wanted: whether a site is recorded; others get no buffer.
        report: takes a sentence for the log.
        free: how many bytes of the device are left.
        stacked: gives what records the buffers of sites that are alike, of the target or of the draft.
        most_rows: graphs of more rows are not tapped; None taps all.
        most_bytes: what the buffers may take; None for what is left.

    Attributes:
        bytes: of all buffers.
    """

    def __init__(
        self,
        device: torch.device,
        capturing: Callable[[], bool],
        wanted: Callable[[str], bool],
        report: Callable[[str], None],
        free: Callable[[], int],
        stacked: Callable[[Sequence[str], bool], Stack],
        most_rows: int | None = None,
        most_bytes: int | None = None,
    ) -> None:
        self._device, self._wanted, self._report, self._free = device, wanted, report, free
        self._most_rows, self._most_bytes = most_rows, most_bytes
        self.target = Group(capturing, lambda sites: stacked(sites, False), most_rows)
        self.draft = Group(capturing, lambda sites: stacked(sites, True), most_rows)
        self.bytes = 0

    def prepare(self, sizes: dict[str, list[int]], most_requests: int) -> None:
        """Allocate buffers before graphs are captured.

        Args:
            sizes: by "target" and "draft" the numbers of rows of the full graphs that will be captured.
            most_requests: most requests of a batch.

        Raises:
            CannotTap: they do not fit into the memory that is left, or that they may take.
        """
        plans = []
        for name, group in (("target", self.target), ("draft", self.draft)):
            rows = max((size for size in sizes.get(name, ()) if not group.beyond(size)), default=0)
            if rows and not group.most_rows:
                requests = min(rows, most_requests)
                plans.append((name, group, rows, requests, group.size(rows, requests, self._wanted)))
        total = sum(size for *_, size in plans)
        if not total:
            return
        for limit, what in ((self._free(), "left there"), (self._most_bytes, "allowed (--graph-memory)")):
            if limit is not None and total > limit:
                raise CannotTap(
                    f"taps inside full CUDA graphs need {total} bytes on the device, {limit} are {what}; "
                    "tap fewer --layers or --sites, or lower --graph-rows"
                )
        for name, group, rows, requests, size in plans:
            group.allocate(rows, requests, self._device, self._wanted)
            self._report(
                f"{size} bytes on {self._device} for taps inside the full graphs of the {name}, "
                f"of up to {rows} rows (batches {_listed(sizes[name])})"
            )
        self.bytes += total

    @property
    def problems(self) -> list[str]:
        """What is missing of full graphs, in sentences."""
        found = [*self.target.problems, *self.draft.problems]
        return [f"{len(found)} taps inside full graphs are missing, first: {found[0]}"] if found else []

    def counts(self) -> dict[str, int]:
        """Bytes of the buffers and the rows that they were made for, as the manifest counts them."""
        most = {"target": self.target.most_rows, "draft": self.draft.most_rows}
        return {
            "graph_tap_bytes": self.bytes,
            **{f"graph_tap_rows_{name}": rows for name, rows in most.items()},
        }


def _listed(sizes: Sequence[int]) -> str:
    ordered = sorted(set(sizes))
    if len(ordered) > 8:
        return f"{', '.join(map(str, ordered[:4]))}, ... {ordered[-1]}"
    return ", ".join(map(str, ordered))
