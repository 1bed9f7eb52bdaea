"""The command line, `bitdecoding`.

Modules that import torch are imported inside functions, so that `--help` answers at once.
"""

from bitdecoding.cli.app import main

__all__ = ["main"]
