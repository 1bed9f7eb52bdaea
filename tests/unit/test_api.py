"""The public names of the package."""

import subprocess
import sys

import pytest

import bitdecoding


@pytest.mark.parametrize("name", bitdecoding.__all__)
def test_every_public_name_exists_and_is_documented(name: str):
    value = getattr(bitdecoding, name)
    assert name == "__version__" or (value.__doc__ or "").strip()


def test_unknown_name():
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        bitdecoding.nothing  # noqa: B018


def test_importing_the_package_imports_neither_torch_nor_transformers():
    code = "import sys, bitdecoding; sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
