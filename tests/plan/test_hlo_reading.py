"""Collectives and kernels in the text of compiled programs."""

from __future__ import annotations

import pytest

from jaxpage.plan.hlo import (
    Collective,
    count_kernels,
    find_collectives,
    group_size,
    shape_bytes,
    total_wire_bytes,
    wire_bytes,
)

HLO = """
  %r.1 = bf16[8,64]{1,0} all-reduce(%d.1), replica_groups=[1,8]<=[8], metadata={op_name="jit(step)/layer_0/mlp/dot"}
  %r.2 = (f32[8]{0}, f32[8]{0}) all-reduce-start(%d.2), replica_groups={{0,1}}, metadata={op_name="jit(step)/layer_0/attention/cond/branch_0_fun/dot"}
  %r.3 = f32[8]{0} all-reduce-done(%r.2), metadata={op_name="jit(step)/layer_0/attention/dot"}
  %r.4 = bf16[8,64]{1,0} all-reduce(%d.4), replica_groups=[1,8]<=[8], metadata={op_name="jit(step)/layer_10/mlp/dot"}
  %s.1 = bf16[2,64]{1,0} reduce-scatter(%d.5), replica_groups=[2,4]<=[8], metadata={op_name="jit(step)/layer_1/mlp/dot"}
  %g.1 = (f32[8]{0}, f32[64]{0}) all-gather-start(%m.1), replica_groups=mesh['a'=2,'b'=4] {'a','b'}, metadata={op_name="jit(step)/sample/cond/branch_0_fun/cond/branch_0_fun/reduce"}
  %g.2 = f32[64]{0} all-gather(%m.2), replica_groups=[1,8]<=[8], metadata={op_name="jit(step)/sample/cond/branch_1_fun/top_k"}
  %e.1 = bf16[8,64]{1,0} all-reduce(%d.6), replica_groups=[1,8]<=[8], metadata={op_name="jit(step)/embedding/gather"}
  %k.1 = bf16[8]{0} custom-call(%a), custom_call_target="tpu_custom_call", metadata={op_name="step/decode/pallas_call"}
  %k.3 = bf16[8]{0} custom-call(%a), custom_call_target="mosaic_gpu_v2", metadata={op_name="step/tile/mpmd_map" id=7}
  %k.2 = bf16[8]{0} custom-call(%a), custom_call_target="TopK", metadata={op_name="jit(step)/sample/top_k"}
"""  # noqa: E501


def test_collectives_are_counted_and_measured_by_part() -> None:
    assert find_collectives(HLO) == [
        Collective("layers", "all-reduce", 3, 1024 + 64 + 1024, 2 * 1024 * 7 / 4 + 64, 2),
        Collective("layers", "reduce-scatter", 1, 1024, 768, 1),
        Collective("embedding", "all-reduce", 1, 1024, 1792),
        Collective("sampling", "all-gather", 1, 256, 224),
        Collective("on request", "all-gather", 1, 256, 224),
    ]
    assert total_wire_bytes(find_collectives(HLO)) == 2 * 1792 + 64 + 768 + 1792 + 224


BRANCHES = """
%sorted.1 (p: f32[8]) -> f32[64] {
  ROOT %g = f32[64]{0} all-gather(%p), replica_groups=[1,8]<=[8]
}

%filtered (p: f32[8]) -> f32[64] {
  ROOT %c = f32[64]{0} call(%p), to_apply=%sorted.1
}

%plain (p: f32[8]) -> f32[64] {
  ROOT %b = f32[64]{0} broadcast(%p), dimensions={0}
}

ENTRY %main (a: f32[8], b: pred[]) -> f32[64] {
  %r = f32[8]{0} all-reduce(%a), replica_groups=[1,8]<=[8], to_apply=%add
  ROOT %c = f32[64]{0} conditional(%b, %r, %r), true_computation=%filtered, false_computation=%plain
}
"""


def test_what_has_no_name_but_is_in_a_branch_is_asked_for() -> None:
    found = {(item.where, item.operation): item.num_bytes for item in find_collectives(BRANCHES)}
    assert found == {("on request", "all-gather"): 256, ("elsewhere", "all-reduce"): 32}
    indexed = BRANCHES.replace(
        "true_computation=%filtered, false_computation=%plain", "branch_computations={%plain, %filtered}"
    )
    assert find_collectives(indexed) == find_collectives(BRANCHES)


def test_kernels_are_counted() -> None:
    assert count_kernels(HLO) == {"decode": 1, "tile": 1}


@pytest.mark.parametrize(
    ("groups", "size"),
    [
        ("replica_groups=[2,4]<=[8]", 4),
        ("replica_groups=[1,2,4]<=[2,4]T(1,0)", 4),
        ("replica_groups={{0,1,2},{3,4,5}}", 3),
        ("replica_groups=mesh['axis_0'=2,'axis_1'=8] {'axis_1'}", 8),
        ("source_target_pairs={{0,1},{1,0}}", 2),
        ("channel_id=3", 1),
    ],
)
def test_groups_are_read_however_they_are_written(groups: str, size: int) -> None:
    assert group_size(f"%r = f32[8] all-reduce(%d), channel_id=1, {groups}, to_apply=%add") == size


def test_types_have_sizes() -> None:
    assert shape_bytes("(bf16[2,3]{1,0:T(8,128)(2,1)S(1)}, f8e4m3fn[4], s4[4], pred[], u32[5])") == [12, 4, 2, 1, 20]
    assert shape_bytes("token[]") == [0]


def test_a_group_of_one_sends_nothing() -> None:
    assert wire_bytes("all-reduce", 100, 1) == 0
    assert wire_bytes("all-reduce", 100, 2) == 100
    assert wire_bytes("collective-permute", 100, 2) == 100
