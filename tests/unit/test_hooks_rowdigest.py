"""The kernel that hashes rows on a GPU gives what the reference gives, in Triton's interpreter on the CPU.

That the compiled kernel does so on a GPU is shown there: each worker compares the two before it uses it.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from builders import Plan, write

pytest.importorskip("torch")

from interpreted import interpreted

from localizer.hooks.rowdigest import why_not
from localizer.store.digest import XXH3
from localizer.store.reader import Capture
from localizer.store.verify import verify
from localizer.wire.rowsum import ROWSUM

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="there is no Triton to interpret the kernel with"
)

PREAMBLE = """
import json, torch
from localizer.hooks.rowdigest import RowDigests
from localizer.wire import rowsum
digests = RowDigests(torch.device("cpu"))
generator = torch.Generator().manual_seed(5)
def hashed(*tensors):
    targets = [torch.zeros((t.shape[0], 16), dtype=torch.uint8) for t in tensors]
    digests(tensors, targets)
    return [target.numpy() for target in targets]
def reference(tensor):
    whole = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
    size = whole[:1].numel() * whole.element_size() if len(whole) else 0
    return rowsum.digests(whole.flatten().view(torch.uint8).reshape(len(whole), size).numpy())
def same(*tensors):
    return all((a == reference(t)).all() for a, t in zip(hashed(*tensors), tensors, strict=True))
def numbers(shape, dtype):
    size = *shape[:-1], shape[-1] * dtype.itemsize
    raw = torch.randint(0, 256, size, dtype=torch.uint8, generator=generator)
    return raw.view(dtype)
"""


@needs_triton
def test_rows_of_any_width_dtype_and_pitch() -> None:
    code = """
found = {}
for width in (1, 2, 3, 5, 7, 8, 9, 13, 64, 4095, 4096, 4097, 12289):
    found[f"{width} bytes"] = same(numbers((3, width), torch.uint8))
for name in ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "int64", "int32", "int8"):
    dtype = getattr(torch, name)
    table = numbers((5, 4, 24), dtype)
    found[name] = same(table)
    found[name + " columns"] = same(table[:, 1], table[:, 1:3], table[..., 3:20], table[1:4, :, ::2])
    found[name + " transposed"] = same(table.transpose(1, 2), table.transpose(0, 1))
    found[name + " scalars"] = same(table[:, 0, 0], table[:1, 0, 1], table[::2, 2, 2])
found["same row again"] = same(numbers((1, 9), torch.int16).expand(4, 9))
print(json.dumps(found))
"""
    found = interpreted(PREAMBLE + code)
    assert len(found) > 30
    assert [what for what, equal in found.items() if not equal] == []


@needs_triton
def test_tensors_of_different_shapes_share_a_launch() -> None:
    code = """
launches = []
launch = digests._launch
digests._launch = lambda *args: (launches.append(args[1:]), launch(*args))
q, k, ids = numbers((6, 3, 16), torch.bfloat16), numbers((2, 16), torch.float32), numbers((6, 1), torch.int32)
none, empty = torch.zeros((0, 4)), torch.zeros((3, 0))
equal = [same(q, ids[:, 0], k, none, empty), same(q, ids[:, 0], k, none, empty)]
print(json.dumps([equal, launches, len(digests._tables)]))
"""
    equal, launches, _ = interpreted(PREAMBLE + code)
    assert equal == [True, True]
    assert launches == 2 * [[6, 2, 8], [6, 2, 4]]


@needs_triton
def test_a_stack_is_hashed_by_one_launch() -> None:
    code = """
launches = []
launch = digests._launch
digests._launch = lambda *args: (launches.append(args[1:]), launch(*args))
found = []
whole = numbers((4, 9, 3, 16), torch.bfloat16)
for stack in (whole, whole[:, :5], whole[1:3, 2:3], whole.transpose(2, 3), whole[:, :0], whole[:0]):
    target = torch.zeros((*stack.shape[:2], 16), dtype=torch.uint8)
    digests.stack(stack, target)
    found.append(all((a.numpy() == reference(b)).all() for a, b in zip(target, stack, strict=True)))
print(json.dumps([found, launches]))
"""
    found, launches = interpreted(PREAMBLE + code)
    assert found == [True] * 6
    assert launches == [[9, 4, 8], [5, 4, 8], [1, 2, 8], [9, 4, 8]]


@needs_triton
def test_single_bits_and_places_count() -> None:
    code = """
row = numbers((1, 37), torch.uint8)
bits = torch.eye(37 * 8, dtype=torch.uint8)
weights = 1 << torch.arange(8, dtype=torch.uint8)
flipped = row ^ (bits.view(-1, 37, 8) * weights).sum(-1).to(torch.uint8)
moved = torch.stack([row[0].roll(n) for n in range(37)])
several = torch.cat([flipped, moved])
found = {bytes(digest) for digest in hashed(several)[0]}
print(json.dumps([len(found), len({bytes(r) for r in several.numpy()}), same(several)]))
"""
    distinct, rows, equal = interpreted(PREAMBLE + code)
    assert equal
    assert distinct == rows == 37 * 9


@needs_triton
def test_from_the_tensors_of_a_step_to_a_capture(tmp_path: Path) -> None:
    """Recorder, device sink, kernel, ring and writer: the digests of a capture are those of the reference."""
    folder = write(tmp_path, Plan(prompts=((1, 2, 3),), matrix=(1,), manifest=False, only_tokens=True))
    opening = json.loads((folder / "open.json").read_text())
    opening["observer"]["payload"] = "first"
    (folder / "open.json").write_text(json.dumps(opening))
    code = f"""
import os
from pathlib import Path
import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_hooks_device import DoubledTransport
from localizer.hooks.device import DeviceSink
from localizer.hooks.recorder import Recorder
from localizer.hooks.sink import Sink
from localizer.capture.writer import Stream, table_of
from localizer.wire import ring as rings
class Scheduled:
    total_num_scheduled_tokens, num_scheduled_tokens = 3, {{"x": 3}}
    scheduled_spec_decode_tokens = {{}}
fd = rings.create(1 << 20)
ring = rings.Ring(fd)
sink = DeviceSink(Sink(rings.Ring(fd), os.getpid()), DoubledTransport(), hashing=digests)
recorder = Recorder(sink)
sink.hashes = recorder.unkept("first")
layers = [f"layers.{{n}}/{{kind}}" for n in (0, 1) for kind in ("query", "output")]
recorder.register([(name, "all") for name in ("model/input_ids", "model/positions", *layers)], {{}}, {{}})
tensors = [numbers((4, 6, 8), torch.bfloat16)[:, :3] for _ in layers]
recorder.round({{"x": "r00.00"}})
recorder.schedule(Scheduled)
recorder.forward_begins(["x"], torch.tensor([1, 2, 3, 0], dtype=torch.int32), torch.arange(4))
recorder.tap(layers)(*tensors)
recorder.sampled(["x"], [[7]])
recorder.finish()
stream = Stream(Path({str(folder)!r}), 0)
for frame in ring.frames(lambda: True):
    if frame.kind == rings.MESSAGE:
        stream.message(json.loads(bytes(frame.body)))
    else:
        stream.rank.frame(table_of(frame), frame.body)
summary = stream.rank.close()
print(json.dumps([recorder.errors, [reference(tensor[:3]).tobytes().hex() for tensor in tensors]]))
"""
    errors, expected = interpreted(PREAMBLE + code)
    assert errors == []
    capture = Capture(folder)
    algorithms = [site.digest for site in capture.sites]
    assert algorithms == [ROWSUM, ROWSUM, XXH3, XXH3, ROWSUM, ROWSUM]
    assert [capture.table.digest[:, column].tobytes().hex() for column in (4, 5)] == expected[2:]
    assert set(capture.payload) == {"layers.0/query", "layers.0/output"}
    assert verify(folder).state == "incomplete", "for it has no manifest; all rows that were kept are sound"


@needs_triton
def test_a_kernel_that_is_wrong_is_not_used() -> None:
    code = """
digests.check()
launch, refused = digests._launch, []
def wrong(table, rows, tensors, unit):
    launch(table, rows, tensors, unit)
    if unit == 2:
        target = table[4].item()
        import ctypes
        ctypes.memset(target, 0, 1)
digests._launch = wrong
try:
    digests.check()
except Exception as error:
    refused = [type(error).__name__, str(error)]
print(json.dumps(refused))
"""
    name, message = interpreted(PREAMBLE + code)
    assert name == "CannotTap"
    assert message.startswith(
        "cpu gives another digest of rows of 6 bytes than the reference does; leave out"
    )


def test_where_rows_cannot_be_hashed() -> None:
    assert why_not("cpu").startswith("rows are hashed on the device only where that is a CUDA GPU; leave out")
    assert ("Triton" in why_not("cuda")) == (importlib.util.find_spec("triton") is None)
