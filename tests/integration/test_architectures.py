"""Each built-in architecture generates, and its capture says what it holds and what it lacks."""

from __future__ import annotations

import pytest
from engines import Capturing

from localizer.store.verify import DAMAGED, verify
from localizer.workload.architectures import ARCHITECTURES, LAYERS

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_architecture_is_captured_or_said_to_be_incomplete(capturing: Capturing, name: str) -> None:
    capture = capturing(f"architecture-{name}", model=name, max_tokens=24)
    manifest = capture.manifest
    assert manifest is not None
    assert manifest.engine["model_class"] == ARCHITECTURES[name].config["architectures"][0]
    for output in manifest.outputs:
        assert len(set(output.tokens)) > 12  # neither constant nor a short cycle
    assert verify(capture.folder).state != DAMAGED
    assert capture.complete == (not manifest.untapped)
    if manifest.untapped:
        assert any("have no tap yet" in reason for reason in capture.reasons)
    else:
        outputs = [site for site in manifest.coverage if site.endswith("/output")]
        assert len(outputs) >= LAYERS
