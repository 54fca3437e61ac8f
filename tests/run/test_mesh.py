"""Meshes by arithmetic: sizes, order, who reads what; and the same, asked of torch in four processes."""

from __future__ import annotations

import math

import mesh_job
import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel_core import ConfigError, Mesh, MeshDim, World, arrange
from accel_core.runtime.explain import drawn

NAMES = ("pp", "dp_replicate", "dp_shard", "ep", "cp", "tp")


def said(*dims, world):
    with pytest.raises(ConfigError) as caught:
        arrange([MeshDim(name, size) for name, size in dims], world)
    return str(caught.value)


@st.composite
def grids(draw):
    """Dimensions in any order, one of them perhaps -1, and the world they fill."""
    names = draw(st.lists(st.sampled_from(NAMES), unique=True, min_size=1))
    dims = [MeshDim(name, draw(st.sampled_from((1, 2, 3, 4)))) for name in names]
    if draw(st.booleans()):
        splits = draw(
            st.sampled_from(("samples", "model") if "cp" in names else ("samples", "tokens", "model"))
        )
        dims.append(MeshDim("strange", draw(st.integers(1, 3)), draw(st.integers(0, 9)) * 100 + 50, splits))
    if not any(dim.splits == "samples" for dim in dims):
        dims.append(MeshDim("dp_shard", 2))
    world = math.prod(dim.size for dim in dims)
    rest = draw(st.sampled_from([None, *range(len(dims))]))
    if rest is not None:
        dim = dims[rest]
        dims[rest] = MeshDim(dim.name, -1, dim.position, dim.splits)
    return draw(st.permutations(dims)), world


def meshes(dims, world):
    return [Mesh(arrange(dims, world), rank, None) for rank in range(world)]


@given(grids())
def test_sizes_fill_the_world_in_the_order_of_positions(grid):
    dims, world = grid
    arranged = arrange(dims, world)
    assert math.prod(dim.size for dim in arranged) == world
    assert [dim.position for dim in arranged] == sorted(dim.position for dim in dims)
    assert arrange(arranged, world) == arranged


@given(grids())
def test_every_rank_has_a_place_of_its_own_counted_from_the_inside(grid):
    ranks = meshes(*grid)
    names = ranks[0].names()
    assert [mesh.index(*names) for mesh in ranks] == list(range(grid[1]))
    for name in names:
        stride = math.prod(dim.size for dim in ranks[0].dims[names.index(name) + 1 :])
        assert [mesh.index(name) for mesh in ranks] == [
            rank // stride % ranks[0].size(name) for rank in range(grid[1])
        ]


@given(grids())
def test_each_reader_is_read_by_equally_many_ranks_which_differ_in_no_sample(grid):
    ranks = meshes(*grid)
    topologies = [mesh.topology() for mesh in ranks]
    readers = topologies[0].readers
    numbers = [topology.reader for topology in topologies]
    assert [numbers.count(reader) for reader in range(readers)] == [grid[1] // readers] * readers
    for mesh, topology in zip(ranks, topologies, strict=True):
        assert topology.readers == mesh.size(*mesh.names("samples"))
        assert topology.losses == topology.readers * mesh.size(*mesh.names("tokens"))


def test_ranks_that_no_dimension_speaks_of_read_other_data():
    assert arrange([MeshDim("cp", 2)], 8) == (MeshDim("dp_replicate", 4), MeshDim("cp", 2))


def test_a_dimension_within_another_is_no_factor_of_the_world():
    dims = [MeshDim("dp_shard", 8), MeshDim("ep", 4, within="dp_shard"), MeshDim("tp", 2)]
    mesh = Mesh(arrange(dims, 16), 5, None)
    assert [(dim.name, dim.size) for dim in mesh.dims] == [("dp_shard", 2), ("ep", 4), ("tp", 2)]
    assert (mesh.total("dp_shard"), mesh.total("ep")) == (8, 4)
    assert ([*mesh.group("ep")], [*mesh.group("dp_shard")], [*mesh.group("tp")]) == (
        [1, 3, 5, 7],
        [5, 13],
        [4, 5],
    )
    assert mesh.group("dp_shard", "tp") == [4, 5, 12, 13]


def test_it_is_drawn_with_the_ranks_of_each_group():
    dims = [MeshDim("dp_shard", -1), MeshDim("ep", 2, within="dp_shard"), MeshDim("tp", 2)]
    assert [*drawn(Mesh(arrange(dims, 8), 5, None))] == [
        "  mesh: dp_shard 4 × tp 2",
        "    dp_shard 2: ranks 1 5",
        "    ep 2: ranks 5 7, within dp_shard",
        "    tp 2: ranks 4 5",
    ]


def test_a_dimension_within_the_rest_divides_the_rest():
    dims = [MeshDim("dp_shard", -1), MeshDim("ep", -1, within="dp_shard"), MeshDim("tp", 2)]
    assert [dim.size for dim in arrange(dims, 8)] == [1, 4, 2]


@pytest.mark.parametrize("shard", [2, 4])
def test_sizes_whose_product_counts_the_inner_dimension_are_refused_with_the_sizes_to_write(shard):
    dims = [MeshDim("dp_shard", shard), MeshDim("ep", 8 // shard, within="dp_shard")]
    with pytest.raises(ConfigError, match=f"dp_shard: 8, ep: {8 // shard}"):
        arrange(dims, 8)


def test_two_dimensions_that_split_sequences_are_refused():
    assert said(("cp", 2), ("sp", 2), world=4) == "cp 2 and sp 2 would both split sequences\ngive one of them"


def test_a_mesh_of_nothing_is_none():
    assert arrange([], 8) == ()


def test_two_plugins_may_mean_the_same_dimension():
    assert arrange([MeshDim("cp", 2), MeshDim("cp", 2)], 2) == (MeshDim("dp_replicate", 1), MeshDim("cp", 2))


def test_what_does_not_fill_the_world_spells_every_factor():
    text = said(("dp_replicate", 2), ("tp", 2), ("dp_shard", 3), world=8)
    assert text == (
        "the mesh dp_replicate 2 × dp_shard 3 × tp 2 = 12, world 8\n"
        "make the product 8 (a size of -1 takes the rest), or start 12 processes"
    )


def test_a_rest_that_is_no_whole_number_spells_every_factor():
    text = said(("dp_shard", -1), ("tp", 3), world=8)
    assert text == (
        "the mesh dp_shard -1 × tp 3 = 3 × the rest, world 8\n"
        "make the product 8 (a size of -1 takes the rest), or start 3 processes or a multiple"
    )


def test_one_dimension_takes_the_rest():
    text = said(("dp_shard", -1), ("dp_replicate", -1), world=8)
    assert text.startswith("the mesh dp_replicate -1 × dp_shard -1 leaves the rest of world 8 to two")


def test_one_name_with_two_sizes_is_refused():
    assert "cannot be told apart" in said(("tp", 2), ("tp", 4), world=8)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("tp", 0), "size 0"),
        (("mine", 2), "only pp, dp_replicate, dp_shard, ep, cp, sp, tp may"),
        (("mine", 2, 150), "lacks `position` or `splits`"),
        (("tp", 2, 501), "reserved for"),
        (("world", 2, 150, "model"), "cannot be called 'world'"),
        (("a+b", 2, 150, "model"), "cannot be called 'a+b'"),
    ],
)
def test_a_dimension_that_means_nothing_is_refused(arguments, words):
    with pytest.raises(ConfigError) as caught:
        MeshDim(*arguments)
    assert words in str(caught.value)


# -- in processes ----------------------------------------------------------------------------------

GRID = ("odd 2 250 model", "dp_replicate 2")


@pytest.fixture
def grid(toy_plugin):
    toy_plugin("grid", source=mesh_job.CARD)
    toy_plugin("other", source=mesh_job.CARD.replace("grid", "other"))


def run(run_processes, function, *dims, world=4, **environment):
    variables = {"ACCEL__STRATEGY": "grid", "GRID": ",".join(dims), **environment}
    return run_processes(function, world=world, environment=variables, timeout=60)


def test_no_dimension_no_mesh(grid, run_processes):
    assert run(run_processes, mesh_job.shape, world=2) == [None, None]


def test_a_world_of_one_has_no_mesh_and_sizes_must_fit(grid, run_processes):
    assert run(run_processes, mesh_job.shape, "dp_shard -1", "tp 1", world=1) == [None]
    with pytest.raises(AssertionError, match="tp 2 = 2, world 1"):
        run(run_processes, mesh_job.shape, "tp 2", world=1)


def test_a_run_that_could_not_be_made_leaves_no_process_group(grid, run_processes):
    assert run(run_processes, mesh_job.refused, "tp 3", world=2) == [(False, 0)] * 2


def test_the_mesh_is_torchs_and_the_units_too(grid, run_processes):
    assert run(run_processes, mesh_job.shape, *GRID) == [(("dp_replicate", 2), ("odd", 2))] * 4


def test_collectives_run_along_a_dimension_and_several(grid, run_processes):
    found = run(run_processes, mesh_job.groups, "pp 1", "dp_replicate 2", "odd 2 250 model", "cp 2", world=8)
    for rank, each in enumerate(found):
        replica, odd, part = rank // 4, rank // 2 % 2, rank % 2
        assert each["odd"] == [replica * 4 + at * 2 + part for at in (0, 1)]
        assert each["gather"] == [at * 4 + odd * 2 + part for at in (0, 1)]
        assert each["loss"] == [at * 4 + odd * 2 + more for at in (0, 1) for more in (0, 1)]
        assert each["all"] == list(range(8))
        assert each["alone"] == [rank]


def test_ranks_that_share_their_data_are_gathered_once_or_each(grid, run_processes):
    for rank, found in enumerate(run(run_processes, mesh_job.gathered, *GRID)):
        assert found == [[rank % 2, rank % 2 + 2], [0, 1, 2, 3]] * 2


def test_an_unknown_dimension_names_those_there_are(grid, run_processes):
    with pytest.raises(
        AssertionError, match="no mesh dimension 'tp'\nname one that it has: world, control, alone, dp_rep"
    ):
        run(run_processes, mesh_job.unknown, *GRID)


def test_ranks_of_one_reader_read_the_same_and_metrics_have_each_sample_once(grid, run_processes):
    for dispatch in ("0", "1"):
        found = run(run_processes, mesh_job.metrics, *GRID, DISPATCH=dispatch)
        assert [each["seen"] for each in found] == [list(range(11))] * 4
        assert found[0]["read"] == found[1]["read"] != found[2]["read"] == found[3]["read"]


@pytest.mark.parametrize(
    "dims", [GRID, ("cp -1",), ("dp_replicate 2", "cp 2"), ("dp_shard -1",), ("odd 4 5 model",)]
)
@pytest.mark.by_default
def test_items_count_once_whoever_shares_a_loss(grid, dims, run_processes):
    weights = run(run_processes, mesh_job.items, *dims)
    assert weights == [pytest.approx(mesh_job.plain_items())] * 4


def test_a_specific_seed_is_that_of_the_reader(grid, run_processes):
    drawn = run(run_processes, mesh_job.draws, *GRID)
    assert drawn[0] == drawn[1] != drawn[2] == drawn[3]


def test_another_strategy_reads_the_same_data_or_is_refused(grid, run_processes):
    assert run(run_processes, mesh_job.beside, *GRID, OTHER="odd 2 350 model,dp_shard 2")[0] == (
        ("dp_shard", 2),
        ("odd", 2),
    )
    assert run(run_processes, mesh_job.beside, *GRID, OTHER="")[0] is None
    with pytest.raises(AssertionError, match="strategy 'other' wants rank . to be reader . of 4"):
        run(run_processes, mesh_job.beside, *GRID, OTHER="dp_shard -1")


@pytest.mark.full
def test_a_program_may_end_all_groups_before_the_run_ends(grid, run_processes):
    assert run(run_processes, mesh_job.after_the_programs_own_end, *GRID) == [4.0] * 4


def test_the_run_explains_its_mesh(grid, run_processes):
    assert "  mesh: dp_replicate 2 × odd 2" in run(run_processes, mesh_job.explained, *GRID)[0]


def test_a_world_is_all_a_mesh_needs():
    assert Mesh(arrange([MeshDim("tp", 2)], 2), World(rank=1, size=2).rank, None).topology().reader == 0
