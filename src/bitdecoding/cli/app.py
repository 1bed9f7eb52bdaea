"""The commands put together, and what becomes of errors."""

import sys
import warnings
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from bitdecoding import __version__
from bitdecoding.cli.calibrate import calibrate
from bitdecoding.cli.generate import generate
from bitdecoding.cli.info import info
from bitdecoding.cli.inspect import inspect
from bitdecoding.cli.kl import kl
from bitdecoding.errors import BitDecodingError, ModelSourceError

__all__ = ["main"]

_FAILURE, _BAD_INPUT, _INTERRUPTED = 1, 2, 130
# Typer does not export it, and has its own copy of Click's in some releases
_UsageError: Any = typer.BadParameter.__base__

_app = typer.Typer(
    name="bitdecoding",
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _command, _example in (
    (generate, "bitdecoding generate smollm2-135m-instruct 'Why is the sky blue?' --max-new-tokens 64"),
    (calibrate, "bitdecoding calibrate smollm2-135m-instruct -o smollm2.safetensors --window 4096"),
    (kl, "bitdecoding kl smollm2-135m-instruct --recipe bitdecoding-nvfp4 --recipe fp8 --texts texts/ -o kl.json"),
    (inspect, "bitdecoding inspect smollm2-135m-instruct --text article.txt --plots charts/"),
    (info, "bitdecoding info --json"),
):
    _app.command(epilog=f"Example: `{_example}`")(_command)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"bitdecoding {__version__}")
        raise typer.Exit


@_app.callback()
def _bitdecoding(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """LLM decoding with a 4-bit (NVFP4 or MXFP4) KV cache.

    Exit codes: 0 done, 1 failure, 2 bad input, 130 interrupted. Text and tables go to standard output, progress and
    notes to standard error.
    """


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: without the program's name; default those of the process.

    Returns:
        The exit code. Errors that the user can do something about are one line on standard error; others are bugs
        and leave with their traceback.
    """
    with warnings.catch_warnings():
        warnings.showwarning = _show_warning
        try:
            # Ctrl-C comes back as the code 130; from earlier releases of Typer as Abort
            code = _app(None if arguments is None else list(arguments), prog_name="bitdecoding", standalone_mode=False)
        except typer.Abort:
            code = _INTERRUPTED
        except _UsageError as error:
            return _fail(_BAD_INPUT, f"{error.format_message()}{_hint(error)}")
        except BitDecodingError as error:
            return _fail(_FAILURE if isinstance(error, ModelSourceError) else _BAD_INPUT, str(error))
        except OSError as error:
            return _fail(_FAILURE, f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}")
        except (MemoryError, RuntimeError) as error:
            if not _out_of_memory(error):
                raise
            return _fail(_FAILURE, "out of memory; use fewer tokens or a smaller model")
    if code == _INTERRUPTED:
        return _fail(_INTERRUPTED, "interrupted")
    return code if isinstance(code, int) else 0


def _fail(code: int, message: str) -> int:
    print("error:", " ".join(message.split()), file=sys.stderr)
    return code


def _hint(error: Any) -> str:
    return f" (see {error.ctx.command_path} --help)" if error.ctx is not None else ""


def _out_of_memory(error: Exception) -> bool:
    """Also for what torch raises: a RuntimeError of its own on GPUs, a plain one on the CPU."""
    text = str(error).lower()
    return isinstance(error, MemoryError) or "out of memory" in text or "can't allocate memory" in text


def _show_warning(message: Warning | str, *args: Any, **kwargs: Any) -> None:
    print("warning:", message, file=sys.stderr)
