"""Plugins that do not exist, with config classes as a backend would write them; and a bad file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal

from attrs import field, frozen, make_class

from accel_core import Card, KwargsHandler, Proposal, RunConfig, option
from accel_core.plugins.discovery import Discovery, Imported, Record

if TYPE_CHECKING:
    import nowhere  # type: ignore[import-not-found]


class Compression(str, Enum):
    NO = "no"
    HALF = "half"


@frozen(kw_only=True)
class Policy:
    """A section within a section."""

    param_dtype: Literal["fp32", "bf16"] = option("fp32", help="Dtype of parameters.")
    min_size: int = option(0, minimum=0, help="Smallest module to wrap.")


@frozen(kw_only=True)
class ShardConfig(KwargsHandler):
    """Options of the toy strategy `shard`."""

    stage: int = option(2, choices=(1, 2, 3), help="What is sharded.")
    bucket_cap_mb: int = option(25, minimum=1, unit="MiB", help="Size of a bucket.")
    cpu_offload: bool = option(False, help="Keep weights on the host.")
    compression: Compression = option(Compression.NO, help="How gradients travel.")
    patience: timedelta | None = option(None, unit="s", help="How long to wait.")
    betas: tuple[float, float] = option((0.9, 0.999), help="Two numbers.")
    modules: tuple[str, ...] = option((), help="Names of modules.")
    extra: Mapping[str, Any] = option(factory=dict, help="Passed on.")
    policy: Policy = option(factory=Policy, help="How modules are wrapped.")
    level: int | None = option(None, refused=True, help="levels are stages here; use stage")
    wrap: Callable[[object], bool] | None = option(None, python_only=True, help="Which modules to wrap.")
    dtype: nowhere.dtype | None = option(None, python_only=True, help="Something no YAML holds.")

    def __attrs_post_init__(self) -> None:
        if self.stage == 1 and self.cpu_offload:
            raise ValueError("stage 1 has nothing to offload")

    def propose(self, run_config: RunConfig) -> Sequence[Proposal]:
        if self.stage == 3:
            return [Proposal("accumulation.adjust_scheduler", False, "stage 3 steps schedulers itself")]
        return []


@frozen(kw_only=True)
class RivalConfig:
    """Options of the toy extension `rival-one`, which always wants something."""

    level: int = option(help="A required option.")

    def propose(self, run_config: RunConfig) -> Sequence[Proposal]:
        return [Proposal("accumulation.adjust_scheduler", True, "rival-one needs them")]


@frozen(kw_only=True)
class Unreadable:
    """Forgets python_only."""

    dtype: nowhere.dtype | None = option(None, help="Cannot be resolved at run time.")


@frozen(kw_only=True)
class Inner:
    """A section within a section."""

    data: bytes = option(b"", help="Bytes.")


def configured_by(kind: Any) -> type:
    """A config class with one option of that type."""
    return make_class(
        "Typed", {"it": field(type=kind, default=None)}, kw_only=True, frozen=True, bases=(KwargsHandler,)
    )


def record(name: str, slot: str = "strategy", config: str | None = None, **facts):
    card = Card(name=name, slot=slot, summary="A toy.", api_version="1.0", config=config)
    known = Imported(**{"card": card, **facts})
    return Record(name=name, slot=slot, distribution=f"toy-{name}", version="0.1", known=known)


TOYS = Discovery(
    (
        record("shard", config="config_toys:ShardConfig"),
        record("plain"),
        record("rival-one", "extension", config="config_toys:RivalConfig"),
        record("unreadable", "extension", config="config_toys:Unreadable"),
        record("absent", config="no_such_module:Config"),
        record("torn", card=None, fault="broken", detail="ImportError: libtorn.so"),
        record("torchrun", "launcher"),
    )
)

TEN_MISTAKES = """\
device: [no]
gradient_accumulation_steps: "4"
strategi: shard
launch:
  nodes: 2
  nodes: 3
project: {projct_dir: out}
grad_scaler:
  init_scale: "2.0"
  enabled: "false"
shard:
  stage: 4
rng_types: {generator: 1}
1: 2
"""
