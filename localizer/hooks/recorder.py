"""The state of one worker's recording: which step is under way, which sites there are, what went wrong."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from localizer.hooks.guard import Guard
from localizer.hooks.later import Later
from localizer.hooks.sink import Channel
from localizer.wire.ranks import Naming
from localizer.wire.spec import DRAFT, INPUT_IDS, POSITIONS, kept_sites


class Recorder:
    """Records rows while a real step is under way, counts and drops everything else.

    A fault inside the recorder never reaches vLLM: it is noted, recording ends, the run goes on.

    Attributes:
        channel: where it sends what it records.
        batch, draft_batch: rows of the target's forward, and of the draft's, that is under way, with padding.
        ending: called when the run is over, before nothing follows any more.
        checks: called when the run is over; each returns what is wrong with the capture, or None.
        dummies, rounds: how many dummy forwards and rounds there were.
        rows_in_graph, rows_at_host, rows_not_tapped: rows of the target by what recorded their layers: taps
            inside a full CUDA graph; taps that Python reached; nothing, for their graph is not tapped.
        replays: full graphs of the "target" and of the "draft" that were replayed where no forward context
            tells of it, as by Model Runner V2.
        errors: why recording ended, and what is wrong with the capture.
        naming: how the sites are called on this worker; here and in the taps they go by their names on a
            single one.
        guarded: makes an action safe: its faults are noted and end the recording.
    """

    def __init__(self, sink: Channel) -> None:
        self.channel = sink
        self._index: dict[str, int] = {}
        self._sites: list[tuple[str, str]] = []  # those announced at first, by number
        self._announced = 0  # all of them
        self._ranges: dict[str, int] = {}  # sites that are recorded in several ranges of heads
        self._scheduled: Any = None
        self._rows = 0
        self._requests = 0
        self._logit_rows = 0
        self._draft_rows = 0
        self._draft_logit_rows = 0
        self._proposed: Any = None
        self._open = False
        self._steps = 0
        self.dummies = 0
        self.rounds = 0
        self.rows_in_graph = self.rows_at_host = self.rows_not_tapped = 0
        self._inside: bool | None = None
        self.replays: Counter[str] = Counter()
        self.batch = self.draft_batch = 0
        self.ending: list[Callable[[], None]] = []
        self.checks: list[Callable[[], str | None]] = []
        self.errors: list[str] = []
        self.naming = Naming()
        self.guarded = Guard("the observer stopped recording", self.errors)

    def register(
        self, sites: Sequence[tuple[str, str]], not_applicable: dict[str, str], untapped: dict[str, str]
    ) -> None:
        """Announce the sites in model order, each with the rows it is expected on, and what is not tapped."""
        for site, rows in sites:
            names = self.naming.names(site)
            self._index[site] = len(self._sites)
            self._ranges |= {site: len(names)} if len(names) > 1 else {}
            self._sites += [(name, rows) for name in names]
        self._announced = len(self._sites)
        self.channel.message(
            type="sites",
            sites=list(self._sites),
            not_applicable={self.naming(name): why for name, why in not_applicable.items()},
            untapped=untapped,
        )

    def add(self, site: str, rows: str) -> None:
        """Announce one more site, which is reached for the first time."""
        self._index[site] = self._announced
        self._announced += 1
        self.channel.message(type="site", name=self.naming(site), rows=rows)

    def absent(self, sites: dict[str, str]) -> None:
        """Say of sites that there are none, with the reason."""
        self.channel.message(type="absent", sites={self.naming(name): why for name, why in sites.items()})

    def knows(self, site: str) -> bool:
        """Whether a site is registered; others are not recorded."""
        return site in self._index

    def unkept(self, payload: str) -> Callable[[int], bool]:
        """Whether the rows of a site, by its number, are not kept; see `localizer.wire.spec.kept_sites`."""

        @functools.cache
        def kept() -> frozenset[int] | None:
            names = kept_sites(self._sites, payload)
            if names is None:
                return None
            return frozenset(number for number, (name, _) in enumerate(self._sites) if name in names)

        return lambda site: (found := kept()) is not None and site not in found

    @property
    def recording(self) -> bool:
        """Whether rows of a real step are wanted now."""
        return self._open and not self.guarded.broken

    @property
    def in_step(self) -> bool:
        """Whether a real step is under way, from scheduling to the end of sampling."""
        return self.in_forward or self.recording

    @property
    def step(self) -> int:
        """Number of the recorded step that is under way, or of the last one."""
        return self._steps - 1

    @property
    def requests(self) -> int:
        """How many requests the step has that is under way, or the last one."""
        return self._requests

    @property
    def in_forward(self) -> bool:
        """Whether the target forward of a real step, or its logits, are being computed."""
        return self._scheduled is not None

    def tap(self, sites: Sequence[str], draft: bool = False) -> Callable[..., None]:
        """A function that records tensors [padded rows, ...], one for each of the sites; some may be None.

        It does what `guarded` and `rows`, or `draft_rows`, do one by one, and costs less: some functions are
        called in every layer of every step. Sites must be registered before; others are not recorded.
        """
        if any(site in self._ranges for site in sites):
            return self._tap_ranges(sites, draft)
        indices = tuple(self._index.get(site) for site in sites)

        def record(*tensors: torch.Tensor | None) -> None:
            if not self.guarded.broken:
                try:
                    self.channel.rows(indices, tensors, self._draft_rows if draft else self._rows)
                except Exception as error:
                    self.guarded.stop(error)

        return record

    def _tap_ranges(self, sites: Sequence[str], draft: bool) -> Callable[..., None]:
        """`tap` where sites are recorded in several equal ranges of their heads, [rows, heads, ...]."""
        wide = [(self._index.get(site), self._ranges.get(site, 1)) for site in sites]
        indices = [None if first is None else first + i for first, several in wide for i in range(several)]

        @self.guarded
        def record(*tensors: torch.Tensor | None) -> None:
            cut: list[torch.Tensor | None] = []
            for tensor, (_, several) in zip(tensors, wide, strict=True):
                if tensor is None or several == 1:
                    cut += [tensor] * several
                elif tensor.shape[1] % several:
                    raise RuntimeError(f"a row of shape {list(tensor.shape[1:])} has no {several} ranges")
                else:
                    cut += tensor.split(tensor.shape[1] // several, dim=1)
            self.channel.rows(indices, cut, self._draft_rows if draft else self._rows)

        return record

    def stack(self, sites: Sequence[str], draft: bool = False) -> Callable[[torch.Tensor], None]:
        """A function that records a stack of tensors [sites, padded rows, ...]; all sites are registered."""
        if any(site in self._ranges for site in sites):
            split = self._tap_ranges(sites, draft)
            return lambda tensors: split(*tensors)
        indices = tuple(self._index[site] for site in sites)

        def record(tensors: torch.Tensor) -> None:
            self.channel.stack(indices, tensors, self._draft_rows if draft else self._rows)

        return record

    # -- one step --------------------------------------------------------------------------------------

    def schedule(self, scheduler_output: Any) -> None:
        """A real engine step begins; it is recorded if it has scheduled tokens."""
        self._scheduled = scheduler_output if scheduler_output.total_num_scheduled_tokens else None
        self._open, self._inside = False, None
        self._draft_rows, self._proposed = 0, None

    def forward_begins(
        self, requests: Sequence[str], input_ids: torch.Tensor, positions: torch.Tensor
    ) -> None:
        """The target model is about to run on these inputs; `requests` are internal ids in batch order."""
        scheduled = self._scheduled
        if scheduled is None or self._open:
            self.dummy()
            return
        counts = [scheduled.num_scheduled_tokens[request] for request in requests]
        drafts = scheduled.scheduled_spec_decode_tokens
        feeds = [1 + len(drafts.get(request, ())) for request in requests]
        self._rows, self._logit_rows, self.batch = sum(counts), sum(feeds), len(input_ids)
        self._requests = len(counts)
        if self._rows != scheduled.total_num_scheduled_tokens:
            raise RuntimeError("the batch does not hold the scheduled requests")
        self.channel.message(
            type="step",
            step=self._steps,
            requests=list(requests),
            counts=counts,
            logits=feeds,
            tokens=self.channel.later(input_ids[: self._rows]),
            positions=self.channel.later(positions[: self._rows]),
        )
        self._steps += 1
        self._open = True
        self.rows(INPUT_IDS, input_ids)
        self.rows(POSITIONS, positions)

    def dummy(self) -> None:
        """A forward that is not of a step is about to run."""
        self.dummies += 1
        self.channel.count(dummy=1)

    def in_graph(self, tapped: bool) -> None:
        """The step's layers were in a full graph, whose taps recorded them if it is tapped."""
        self._inside = tapped

    def rows(self, site: str, tensor: torch.Tensor) -> None:
        """Record the real rows of a tensor [padded rows, ...]."""
        self._send(site, tensor, self._rows)

    def logit_rows(self, site: str, tensor: torch.Tensor) -> None:
        """Record a tensor that has one row for each row that feeds the logits."""
        if tensor.shape[0] != self._logit_rows:
            raise RuntimeError(f"{site} has {tensor.shape[0]} rows instead of {self._logit_rows}")
        self._send(site, tensor, self._logit_rows)

    def _send(self, site: str, tensor: torch.Tensor, count: int) -> None:
        """Record the first `count` rows of a tensor, if its site is registered."""
        if site in self._index:
            self.channel.rows((self._index[site],), (tensor,), count)

    def forward_ended(self) -> None:
        """The target model and its logits are done; what follows is sampling, and drafting."""
        self._scheduled = None

    # -- the draft's steps inside it -------------------------------------------------------------------

    @property
    def drafting(self) -> bool:
        """Whether rows of a draft step are wanted now."""
        return self.recording and self._draft_rows > 0

    def draft_begins(
        self,
        requests: Sequence[str],
        counts: Sequence[int],
        extra: int,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
    ) -> None:
        """The draft model is about to run; `extra` rows a request are beyond the target's."""
        self._draft_rows, self._draft_logit_rows, self.draft_batch = sum(counts), len(counts), len(input_ids)
        self.channel.message(
            type="draft",
            requests=list(requests),
            counts=list(counts),
            extra=extra,
            tokens=self.channel.later(input_ids[: self._draft_rows]),
            positions=self.channel.later(positions[: self._draft_rows]),
        )
        self.draft_rows(DRAFT + INPUT_IDS, input_ids)
        self.draft_rows(DRAFT + POSITIONS, positions)

    def draft_rows(self, site: str, tensor: torch.Tensor) -> None:
        """Record the real rows of a tensor of the draft step [padded rows, ...]."""
        self._send(site, tensor, self._draft_rows)

    def draft_logit_rows(self, site: str, tensor: torch.Tensor) -> None:
        """Record a tensor that has one row for each request of the draft step."""
        if tensor.shape[0] != self._draft_logit_rows:
            raise RuntimeError(f"{site} has {tensor.shape[0]} rows instead of {self._draft_logit_rows}")
        self._send(site, tensor, self._draft_logit_rows)

    def proposed(self, requests: Sequence[str], tokens: torch.Tensor) -> None:
        """The draft tokens of this step, [requests, draft steps]."""
        names = list(requests)
        self._proposed = self.channel.later(tokens, lambda rows: dict(zip(names, rows, strict=True)))
        self._draft_rows = 0

    # -- its end ---------------------------------------------------------------------------------------

    def sampled(self, requests: Sequence[str], tokens: Sequence[Sequence[int]]) -> None:
        """The step's tokens are known: `tokens[i]` of `requests[i]`, none where they are discarded."""
        self._end({name: list(map(int, ids)) for name, ids in zip(requests, tokens, strict=True)})

    def sampled_later(self) -> Later | None:
        """The step is over, its tokens will arrive; None if no step is under way.

        What arrives is, for each request, its tokens, none where they are discarded.
        """
        later = Later(lambda found: {name: list(map(int, ids)) for name, ids in found.items()})
        return later if self._end(later) else None

    def _end(self, sampled: Any) -> bool:
        """End the step that is under way, if one is."""
        if not self._open:
            return False
        proposed = {} if self._proposed is None else {"proposed": self._proposed}
        self.channel.message(type="end", sampled=sampled, **proposed)
        self.channel.count(steps=1, rows=self._rows)
        self.channel.flush()
        if self._inside:
            self.rows_in_graph += self._rows
        elif self._inside is None:
            self.rows_at_host += self._rows
        else:
            self.rows_not_tapped += self._rows
        self._open = False
        return True

    def counts(self) -> dict[str, int]:
        """Rows of the target by what recorded their layers, as the manifest counts them."""
        missed = {"rows_not_tapped": self.rows_not_tapped} if self.rows_not_tapped else {}
        return {"rows_at_host": self.rows_at_host, "rows_in_graph": self.rows_in_graph, **missed}

    def round(self, names: dict[str, str]) -> None:
        """A round begins; `names` maps vLLM's internal request ids to ours."""
        if not self.rounds:
            self.channel.warm()
        self.rounds += 1
        self.channel.message(type="round", names=names)

    def close(self) -> None:
        """The run is over: nothing follows."""
        for report in self.ending:
            report()
        self.channel.close()

    def check(self) -> None:
        """Check what was recorded against itself."""
        self.errors += [complaint for check in self.checks if (complaint := check()) is not None]

    def finish(self) -> None:
        """Both, one after the other."""
        self.close()
        self.check()
