"""Taps on every module of a model that runs in eager mode: what each returns, and the residual stream.

A module's output goes by the module's own name. A module that is shared by several layers (vLLM shares one
rotary embedding) goes by the name that it has inside the module that is calling it. Which modules are called
is seen in the first forward: sites are announced when they are first reached.

Decoder layers of vLLM return `(hidden_states, residual)`, and the next norm adds the two: neither half alone
is the hidden state of the model. So what is recorded of a decoder layer is their sum, which is what that norm
will return as its residual; a layer that returns one tensor returns the stream itself.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from localizer.hooks.boundaries import Boundary, block
from localizer.hooks.recorder import Recorder
from localizer.wire.spec import AFTER_ATTENTION, RESIDUAL, ROTATED

NOT_CALLED = "no forward called it as a module"
NO_ROWS = "what it returns is not one row for each token"
INSIDE_OP = "it is called inside an op, on rows of the op's own choice"
INLINE = "the layer hands the stream to no norm between attention and MLP"


class ModuleTaps:
    """Taps on the modules of one model, the target or its draft.

    Args:
        recorder: told of new sites and of those that there are not.
        model: the model.
        found: its layers with a boundary.
        chosen: whether the modules of a decoder layer, given by the layer's name, are wanted.
        prefix: what site names begin with.
        which: the rows on which the sites are expected.
        wanted: whether a forward of this model is to be recorded now.
        batch: the number of rows of its present forward, padding included.
        rows: takes the rows of a site.
        matches: whether a site of this name is wanted.
    """

    def __init__(
        self,
        recorder: Recorder,
        model: torch.nn.Module,
        found: Sequence[Boundary],
        chosen: Callable[[str], bool],
        prefix: str,
        which: str,
        wanted: Callable[[], bool],
        batch: Callable[[], int],
        rows: Callable[[str, torch.Tensor], None],
        matches: Callable[[str], bool],
    ) -> None:
        self._recorder, self._model, self._prefix, self._which = recorder, model, prefix, which
        self._wanted, self._batch, self._rows, self._matches = wanted, batch, rows, matches
        self._boundaries = {id(boundary.layer): boundary for boundary in found}
        self._names: dict[int, list[str]] = {}
        self._modules: list[torch.nn.Module] = []
        blocks = _block_names(model, found)
        for path, module in model.named_modules(remove_duplicate=False):
            home = block(path)
            name = blocks.get(home, home) + path[len(home) :]
            if path and not _contains(path, blocks) and chosen(block(name)):
                if id(module) not in self._names:
                    self._modules.append(module)
                self._names.setdefault(id(module), []).append(name)
        self._blocks = set(blocks.values())
        whole = [id(boundary.layer) for boundary in found if boundary.whole]
        self._wholes = {name for layer in whole for name in self._names.get(layer, ())}
        self._returns_residual = {id(module) for module in self._modules if _takes(module, "residual")}
        self._rotates = {id(module) for module in self._modules if _takes(module, "query", "key")}
        self._inside = False
        self._open: list[str] = []
        self._calls: Counter[str] = Counter()
        self._called: set[str] = set()
        self._known: dict[str, bool] = {}
        self._missing: dict[str, str] = {}
        self._attended = ""

    def install(self, undo: ExitStack) -> None:
        """Put the taps on, until `undo` is closed."""
        guarded = self._recorder.guarded
        begins, ends = guarded(self._begins), guarded(self._ends)
        before, after = guarded(self._before), guarded(self._after)

        def whole(module: torch.nn.Module, args: Any) -> None:
            begins()

        def done(module: torch.nn.Module, args: Any, output: Any) -> None:
            ends()

        def enter(module: torch.nn.Module, args: Any) -> None:
            before(module)

        def leave(module: torch.nn.Module, args: Any, output: Any) -> None:
            after(module, output)

        undo.callback(self._model.register_forward_pre_hook(whole).remove)
        undo.callback(self._model.register_forward_hook(done).remove)
        for module in self._modules:
            undo.callback(module.register_forward_pre_hook(enter).remove)
            undo.callback(module.register_forward_hook(leave).remove)
        self._recorder.ending.append(self._report)

    def _report(self) -> None:
        """Name the modules that were never called, and the sites that there are not."""
        for module in self._modules:
            if type(module).forward is torch.nn.Module.forward:  # a container computes nothing
                continue
            names = self._names[id(module)]
            known = {block(name) for name in names if name in self._called or name in self._missing}
            for name in names:
                if block(name) not in known:
                    self._missing.setdefault(name, NOT_CALLED)
        wanted = {self._prefix + name: why for name, why in self._missing.items()}
        self._recorder.absent({name: why for name, why in wanted.items() if self._matches(name)})

    # -- the hooks -------------------------------------------------------------------------------------

    def _begins(self) -> None:
        self._open.clear()
        self._calls.clear()
        self._attended = ""
        self._inside = self._wanted()

    def _ends(self) -> None:
        self._inside = False

    def _before(self, module: torch.nn.Module) -> None:
        names = self._names[id(module)]
        name = names[0]
        if len(names) > 1 and self._open:
            caller = self._open[-1]
            name = next((other for other in names if other.rpartition(".")[0] == caller), name)
        self._calls[name] += 1
        self._open.append(name if self._calls[name] == 1 else f"{name}@{self._calls[name]}")

    def _after(self, module: torch.nn.Module, output: Any) -> None:
        name = self._open.pop()
        if not self._inside:
            return
        if any(outer in self._wholes for outer in self._open):
            self._missing.setdefault(name.partition("@")[0], INSIDE_OP)
            return
        self._called.add(name)
        if name in self._blocks:
            self._stream(name, output)
            return
        boundary = self._boundaries.get(id(module))
        if boundary is not None and boundary.whole:  # attention, whose output is tapped already
            self._attended = block(name)
            return
        for site, value in self._sites(name, module, output):
            self._record(site, value)

    def _sites(self, name: str, module: torch.nn.Module, output: Any) -> Iterator[tuple[str, Any]]:
        """Name what a module returned."""
        values = output if isinstance(output, (tuple, list)) else (output,)
        if id(module) in self._rotates and len(values) == 2:
            yield from ((f"{name}/{part}", value) for part, value in zip(ROTATED, values, strict=True))
        elif id(module) in self._returns_residual and len(values) == 2:
            home = block(name)
            if home and home == self._attended:
                self._attended = ""
                yield f"{home}/{AFTER_ATTENTION}", values[1]
            else:
                yield f"{name}/{RESIDUAL}", values[1]
            yield name, values[0]  # which is made of the residual
        else:
            yield name, values[0] if values else None
            yield from ((f"{name}/{index}", value) for index, value in enumerate(values[1:], 1))

    def _stream(self, name: str, output: Any) -> None:
        """Record the residual stream as a decoder layer leaves it."""
        if self._attended == name:  # no norm took it up since
            self._missing.setdefault(f"{name}/{AFTER_ATTENTION}", INLINE)
            self._attended = ""
        values = output if isinstance(output, (tuple, list)) else (output,)
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        if len(tensors) == 2 and tensors[0].shape == tensors[1].shape:
            self._record(f"{name}/{RESIDUAL}", tensors[0] + tensors[1])
        else:
            self._record(f"{name}/{RESIDUAL}", tensors[0] if len(tensors) == 1 else output)

    def _record(self, name: str, value: Any) -> None:
        if value is None:  # as for the bias that a linear layer does not return
            return
        if not isinstance(value, torch.Tensor) or value.dim() < 1 or value.shape[0] != self._batch():
            self._missing.setdefault(name, NO_ROWS)
            return
        site = self._prefix + name
        known = self._known.get(site)
        if known is None:
            known = self._known[site] = self._matches(site)
            if known:
                self._recorder.add(site, self._which)
        if known:
            self._rows(site, value)


def _block_names(model: torch.nn.Module, found: Sequence[Boundary]) -> dict[str, str]:
    """Decoder layers: path in the model -> name by layer names.

    They hold a layer with a boundary, stand beside such a one, as layers that are an MLP alone do, or hand on
    the residual stream. Path and name differ for drafts, whose layers vLLM numbers on from the target's.
    """
    names = {id(boundary.layer): boundary.name for boundary in found}
    blocks: dict[str, str] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if id(module) in names and block(path):
            blocks.setdefault(block(path), block(names[id(module)]) or block(path))
    rows = {path.rpartition(".")[0] for path in blocks}
    for path, module in model.named_modules(remove_duplicate=False):
        if path and path == block(path):
            streams = _takes(module, "residual") and any(True for _ in module.children())  # a norm has none
            if streams or path.rpartition(".")[0] in rows:
                blocks.setdefault(path, path)
    return blocks


def _contains(path: str, blocks: dict[str, str]) -> bool:
    return any(name.startswith(path + ".") for name in blocks)


def _takes(module: torch.nn.Module, *parameters: str) -> bool:
    """Whether the forward of a module, or the plain form of one that is dispatched, takes the parameters."""
    forward = getattr(module, "forward_native", module.forward)
    there = inspect.signature(forward).parameters
    return all(parameter in there for parameter in parameters)
