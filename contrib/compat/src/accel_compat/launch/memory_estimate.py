"""`accelerate estimate-memory`, for models that accel-big-models builds.

The columns are Accelerate's.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING, Any, Final

from accel_compat.launch.subcommands import subcommand_parser
from accel_compat.packages import load
from accel_core import AccelError

if TYPE_CHECKING:
    from torch import nn

_SHARES: Final = {"float32": 1, "float16": 2, "int8": 4, "int4": 8}
"""dtype -> how many of its values take the bytes of one in float32."""
_HEADERS: Final = ("dtype", "Largest Layer", "Total Size", "Training using Adam")


def estimate_command_parser(subparsers: Any = None) -> ArgumentParser:
    """Make the parser of `estimate-memory`."""
    about = "Model size estimator for fitting a model onto CUDA memory."
    parser = subcommand_parser(subparsers, "estimate-memory", about, estimate_command)
    parser.add_argument("model_name", help="A hub name, a folder, or module:function")
    parser.add_argument("--library_name", choices=["timm", "transformers"], help="timm is refused")
    parser.add_argument("--dtypes", nargs="+", default=[*_SHARES], choices=[*_SHARES])
    parser.add_argument("--trust_remote_code", action="store_true")
    return parser


def estimate_command(args: Namespace) -> None:
    """Print a table of memory by dtype."""
    from accel_compat.modeling.wrappers import convert_bytes

    rows = []
    for dtype, largest, total, training in gather_data(args):
        most = max(training.values())
        trained = "N/A" if most == -1 else convert_bytes(most)
        rows.append([dtype, convert_bytes(largest), convert_bytes(total), trained])
    print(create_ascii_table([*_HEADERS], rows, f"Memory Usage for loading `{args.model_name}`"))  # noqa: T201  as there


def gather_data(args: Namespace) -> list[list[Any]]:
    """Return a row per dtype: dtype, bytes of the largest layer, of all, in training."""
    from accel_compat.modeling.sizes import calculate_maximum_sizes

    model = create_empty_model(args.model_name, args.library_name, args.trust_remote_code)
    total, (largest, _) = calculate_maximum_sizes(model)
    rows = []
    for dtype in args.dtypes:
        share = _SHARES[dtype]
        rows.append([dtype, largest / share, total / share, estimate_training_usage(total, dtype)])
    return rows


def add_timm_hub_prefix(model_name: str) -> str:
    """Return the name as `timm.create_model` takes it: `hf-hub:OWNER/NAME`."""
    return model_name if ":" in model_name or "/" not in model_name else f"hf-hub:{model_name}"


def create_empty_model(
    model_name: str,
    library_name: str | None,
    trust_remote_code: bool = False,
    access_token: str | None = None,
) -> nn.Module:
    """Build a model in float32 on the meta device.

    Raises:
        ValueError: timm is asked for.
        OSError: there is no such model, or it needs code that is not trusted.
    """
    if library_name == "timm":
        raise ValueError(
            "models of timm are not known here; write a function that makes one, and name it MODULE:FUNCTION"
        )
    build = load("accel_big_models.models:empty_model", "accelerate estimate-memory")
    try:
        model: nn.Module = build(model_name, trust_remote_code=trust_remote_code)
    except AccelError as error:
        raise OSError(str(error)) from error  # as Accelerate says it
    return model.float()


def estimate_training_usage(
    bytes: int,
    mixed_precision: str,
    msamp_config: str | None = None,
) -> dict[str, int]:
    """Return bytes of weights, gradients, optimizer state and step; -1 if unknown.

    bytes: of the weights in float32.
    """
    if mixed_precision == "float32":
        return {"model": bytes, "optimizer": 2 * bytes, "gradients": bytes, "step": 4 * bytes}
    if mixed_precision in ("float16", "bfloat16") or (mixed_precision == "fp8" and msamp_config is None):
        gradients = bytes + bytes // 2
        return {"model": bytes, "optimizer": 2 * bytes, "gradients": gradients, "step": 2 * bytes}
    return dict.fromkeys(("model", "optimizer", "gradients", "step"), -1)


def create_ascii_table(headers: list[str], rows: list[list[str]], title: str) -> str:
    """Draw a table with a title."""
    widths = [max(map(len, column)) for column in zip(headers, *rows, strict=True)]
    widths[-1] += max(0, len(title) - sum(widths) - len(widths) + 1)

    def line(left: str, middle: str, right: str) -> str:
        return left + middle.join("─" * width for width in widths) + right

    def row(cells: list[str]) -> str:
        return "│" + "│".join(cell.center(width) for cell, width in zip(cells, widths, strict=True)) + "│"

    inside = sum(widths) + len(widths) - 1
    head = [line("┌", "─", "┐"), f"│{title.center(inside)}│", line("├", "┬", "┤"), row(headers)]
    return "\n".join([*head, line("├", "┼", "┤"), *map(row, rows), line("└", "┴", "┘")])
