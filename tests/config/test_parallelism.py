"""Section `parallelism`: sizes of the dimensions that cards declare, and the plugins that they bring in."""

from __future__ import annotations

import pickle

import pytest
from attrs import frozen

from accel_core import Card, ConfigError, KwargsHandler, ParallelismConfig, option
from accel_core.config import parallelism
from accel_core.config.jsonschema import whole_schema
from accel_core.config.resolve import load
from accel_core.config.sections import Sections
from accel_core.plugins.discovery import Discovery, Imported, Record, discover
from accel_core.runtime.selection import choose


@frozen(kw_only=True)
class Stages(KwargsHandler):
    """Options of the toy strategy `stages`, which knows a dimension by a name of its own, too."""

    degree: int | None = option(None, python_only=True, dimension="pp", help="Another spelling.")
    schedule: str = option("plain", help="Any.")


def record(name: str, slot: str, dimensions: dict[str, str], **facts: object) -> Record:
    card = Card(name=name, slot=slot, summary="A toy.", api_version="1.0", dimensions=dimensions, **facts)
    return Record(name=name, slot=slot, distribution=f"toy-{name}", version="1", known=Imported(card))


STAGES = record(
    "stages",
    "strategy",
    {"pp": "Pipeline parallelism: stages.", "dp_shard": "Fully sharded data parallelism: shards."},
    config=f"{__name__}:Stages",
)
LAYERS = record("layers", "extension", {"tp": "Tensor parallelism: ranks per layer."})
PLAIN = record("plain", "strategy", {"dp_replicate": "Replicated data parallelism: copies."}, priority=1)


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    """The toys, beside core's own plugins."""
    ours = [found for found in discover(environment={}).records if found.distribution == "accel-core"]
    toys = Discovery((*ours, STAGES, LAYERS, PLAIN))
    monkeypatch.setattr(parallelism, "discover", lambda: toys)
    return toys


@pytest.fixture
def resolve(installed, tmp_path):
    """`resolve(YAML, flags=..., python=..., objects=..., VARIABLE=...)`: the resolved config."""

    def resolve(yaml="", flags=(), python=None, objects=(), **variables):
        (tmp_path / "accel.yaml").write_text(yaml or "device: cpu\n")
        return load(
            python=python or {},
            objects=objects,
            flags=flags,
            discovery=installed,
            environment=variables,
            directory=tmp_path,
        )

    return resolve


def stack(resolved, installed, processes=4):
    return str(choose(resolved, processes, installed))


def test_a_size_comes_from_file_variable_flag_or_python_the_last_of_them_wins(resolve):
    file = "parallelism: {tp: 2, pp: 2, dp_shard: -1}\n"
    found = resolve(file, flags=[("parallelism.tp", "4")], ACCEL__PARALLELISM__PP="8")
    assert found.config.parallelism == {"tp": 4, "pp": 8, "dp_shard": -1}
    assert "flag --parallelism.tp" in found.origins["parallelism.tp"]
    assert resolve(python={"parallelism": ParallelismConfig(tp=2)}).config.parallelism == {"tp": 2}
    assert resolve(objects=[ParallelismConfig(tp=2)]).config.parallelism == {"tp": 2}


@pytest.mark.parametrize(
    ("yaml", "expected"),
    [
        ("parallelism: {tpp: 2}\n", "parallelism.tpp: no plugin has the dimension 'tpp'; did you mean 'tp'?"),
        (
            "parallelism: {tp: 0}\n",
            "parallelism.tp: a size is a whole number, 1 or more, or -1 for the ranks",
        ),
        ("parallelism: {tp: two}\n", "parallelism.tp: expected integer, got 'two'"),
        ("parallelism: {tp: -1, pp: -1}\n", "tp and pp are both -1; only one may take the rest"),
        ("parallelism: 4\n", "is a section: expected keys and values, got 4"),
        ("stages: {degree: 2}\n", "stages.degree: sizes are in section parallelism; write parallelism.pp"),
    ],
)
def test_a_mistake_is_reported_with_its_place_and_what_to_write(resolve, yaml, expected):
    with pytest.raises(ConfigError) as caught:
        resolve(yaml)
    assert expected in str(caught.value)
    assert "accel.yaml:1:" in str(caught.value)


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("tensor_parallel_size", "tp"),  # Lightning, vLLM
        ("tensor_model_parallel_size", "tp"),  # Megatron-LM
        ("tp_size", "tp"),  # transformers, Accelerate
        ("pipeline_parallel_degree", "pp"),  # torchtitan
        ("data_parallel_shard_degree", "dp_shard"),
        ("data_parallel_replicate_degree", "dp_replicate"),
        ("dp_replicate_size", "dp_replicate"),
    ],
)
def test_a_size_by_the_name_of_another_library_suggests_the_dimension(resolve, key, meant):
    for yaml in (f"parallelism: {{{key}: 2}}\n", f"{key}: 2\n", f"stages: {{{key}: 2}}\n"):
        with pytest.raises(ConfigError, match=f"did you mean parallelism.{meant}\\?"):
            resolve(yaml)


def test_a_dimension_of_a_package_that_is_not_installed_names_the_package(resolve):
    with pytest.raises(ConfigError) as caught:
        resolve("parallelism: {cp: 2}\n")
    assert "no installed plugin has the dimension 'cp'" in str(caught.value)
    assert "pip install ./backends/context-parallel" in str(caught.value)


def test_a_strategy_that_has_the_dimension_takes_the_size(resolve, installed):
    assert stack(resolve("strategy: stages\nparallelism: {pp: 2}\n"), installed) == "native + stages + fp32"


def test_a_size_brings_in_the_extension_that_has_the_dimension(resolve, installed):
    found = resolve("strategy: stages\nparallelism: {tp: 2, pp: 1}\n")
    assert stack(found, installed) == "native + stages + fp32 + layers"
    (extension,) = [it for it in choose(found, 4, installed).extensions if it.name == "layers"]
    assert extension.why.startswith("parallelism.tp is 2 (accel.yaml:2:")


def test_a_size_of_one_brings_in_nothing(resolve, installed):
    assert stack(resolve("strategy: stages\nparallelism: {tp: 1}\n"), installed) == "native + stages + fp32"


def test_a_size_that_only_another_strategy_takes_is_an_error_that_names_it(resolve, installed):
    with pytest.raises(ConfigError, match="parallelism.dp_shard is 2 .*\n?.*set strategy: stages"):
        choose(resolve("strategy: plain\nparallelism: {dp_shard: 2}\n"), 4, installed)


def test_an_extension_that_is_named_without_a_size_is_an_error(resolve, installed):
    found = resolve("strategy: stages\nextensions: [layers]\n")
    with pytest.raises(ConfigError, match="parallelism.tp is not set"):
        choose(found, 2, installed)
    assert stack(found, installed, processes=1) == "native + stages + fp32 + layers"


def test_another_spelling_in_python_is_the_same_size(resolve, installed):
    config = Stages(degree=2)
    found = resolve(objects=[config])
    assert found.config.parallelism == {"pp": 2}
    assert found.config.plugins["stages"] is config
    assert resolve("parallelism: {pp: 4}\n", objects=[config]).config.parallelism == {"pp": 2}


def test_two_spellings_that_differ_are_an_error_with_both_places(resolve):
    sizes = ParallelismConfig(pp=4)
    with pytest.raises(ConfigError) as caught:
        resolve(python={"parallelism": sizes}, objects=[Stages(degree=2)])
    assert "Stages(...)" in str(caught.value)
    assert "Accelerator(parallelism_config=...)" in str(caught.value)


def test_sizes_are_read_as_attributes():
    sizes = ParallelismConfig(tp_size=2, pp=-1)
    assert (sizes.tp_size, sizes.pp_size, sizes.dp_shard_size) == (2, -1, 1)
    assert pickle.loads(pickle.dumps(sizes)) == sizes
    assert not hasattr(sizes, "strange_size")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"tpp_size": 2}, "did you mean"),
        ({"tp": 0}, "1 or more"),
        ({"tp": 2, "tp_size": 4}, "differ"),
        ({"tp": -1, "pp": -1}, "both -1"),
    ],
)
def test_sizes_that_cannot_be_are_refused_at_once(arguments, expected):
    with pytest.raises(ConfigError, match=expected):
        ParallelismConfig(**arguments)


def test_the_schema_has_each_dimension(installed):
    section = whole_schema(Sections(installed))["properties"]["parallelism"]
    assert section["properties"]["tp"]["description"] == "layers: Tensor parallelism: ranks per layer."
    assert section["additionalProperties"] is False
