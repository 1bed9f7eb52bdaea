"""Fixtures and rules for the whole suite."""

import os
from collections.abc import Iterator

# No test reaches a model hub. Read by huggingface_hub on import, hence before any other import.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from hypothesis import settings

from bitdecoding.models import SMOLLM2, LoadedModel, load_model

# A time limit for one example only measures how busy the machine is
settings.register_profile("default", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """For modules of tiny tensors, where torch's threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def smollm2() -> LoadedModel:
    """SmolLM2-135M-Instruct in float32 on the CPU; tests that use it are marked slow."""
    return load_model(SMOLLM2, dtype=torch.float32)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    no_gpu = pytest.mark.skip(reason="needs an NVIDIA GPU")
    has_gpu = torch.cuda.is_available()
    for item in items:
        if "smollm2" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.slow)
        if "gpu" in item.keywords and not has_gpu:
            item.add_marker(no_gpu)
