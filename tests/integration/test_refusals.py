"""What cannot be captured yet is refused in a sentence, before the model is loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from engines import EAGER, IN_PROCESS, Capturing, Quiet

from localizer.capture import unsupported
from localizer.capture.request import CaptureRequest
from localizer.capture.session import capture
from localizer.errors import CaptureFailed
from localizer.store import names
from localizer.store.verify import INCOMPLETE, verify
from localizer.workload import models

pytestmark = pytest.mark.engine


@pytest.fixture
def embedding_model(tmp_path: Path) -> Path:
    """The tiny model as sentence-transformers packs one that returns embeddings."""
    built = models.built("tiny")
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).symlink_to(built / name)
    (folder / "modules.json").write_text(
        '[{"idx": 0, "name": "0", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}]'
    )
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_lasttoken": true}')
    return folder


@pytest.mark.parametrize("environment", [IN_PROCESS, {}], ids=["in-process", "multiprocess"])
def test_a_pooling_model_that_only_vllm_knows(
    embedding_model: Path, tmp_path: Path, vllm_cache: dict[str, str], environment: dict[str, str]
) -> None:
    request = CaptureRequest(
        name="pooling",
        root=tmp_path / "captures",
        model=str(embedding_model),
        matrix="1",
        repeats=1,
        engine=EAGER,
        environment=vllm_cache | environment,
    )
    with pytest.raises(CaptureFailed, match=r"^The source cannot be observed: pooling models return no "):
        capture(request, Quiet())
    left = names.load(tmp_path / "captures", "pooling")
    assert verify(left.folder).state == INCOMPLETE
    assert "Loading weights took" not in (left.folder / "log.txt").read_text()


@pytest.fixture
def multimodal_model(tmp_path: Path) -> Path:
    """The configuration of a tiny model that takes images; its weights are for vLLM to make up."""
    sizes = {"intermediate_size": 64, "num_attention_heads": 2}
    language = sizes | {"model_type": "gemma", "num_hidden_layers": 2, "head_dim": 64, "vocab_size": 1024}
    vision = sizes | {"model_type": "siglip_vision_model", "num_hidden_layers": 1, "patch_size": 14}
    config = {
        "architectures": ["PaliGemmaForConditionalGeneration"],
        "model_type": "paligemma",
        "text_config": language | {"hidden_size": 128, "num_key_value_heads": 1},
        "vision_config": vision | {"hidden_size": 64, "image_size": 28},
        "projection_dim": 128,
        "torch_dtype": "bfloat16",
    }
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_multimodal_model(
    multimodal_model: Path, tmp_path: Path, capturing: Capturing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is refused where config.json did not tell, too; its language model by itself is captured."""
    monkeypatch.setattr(unsupported, "reasons", lambda *_, **__: ())
    engine = EAGER | {"load_format": "dummy"}
    with pytest.raises(CaptureFailed, match=r"\nThe source ended early: models that take images, audio or "):
        capturing("images", model=str(multimodal_model), engine=engine)
    alone = engine | {"language_model_only": True}
    text = capturing("text-of-a-multimodal-model", model=str(multimodal_model), engine=alone)
    assert (text.complete, text.reasons) == (True, [])
    assert "language_model.model.layers.1.self_attn.attn/output" in {site.name for site in text.sites}
