"""What is read from a compiled program's text: products and collectives, and how often they run."""

import jax
import jax.numpy as jnp
import pytest

from trl_jax.plan.hlo import Collective, array_bytes, cost

LOOP = """HloModule jit_step, is_scheduled=true, num_partitions=8

%cond (arg: (s32[], bf16[4,8])) -> pred[] {
  %arg = (s32[], bf16[4,8]{1,0:T(8,128)(2,1)S(1)}) parameter(0)
  %at = s32[]{:T(128)} get-tuple-element(%arg), index=0
  %most = s32[]{:T(128)} constant(28)
  ROOT %less = pred[]{:T(512)} compare(%at, %most), direction=LT
}

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%body (arg.1: (s32[], bf16[4,8])) -> (s32[], bf16[4,8]) {
  %arg.1 = (s32[], /*index=1*/bf16[4,8]{1,0:T(8,128)(2,1)S(1)}) parameter(0)
  %own = bf16[4,8]{1,0} get-tuple-element(%arg.1), index=1
  %part = bf16[4,2]{1,0} slice(%own), slice={[0:4], [0:2]}
  %whole = bf16[4,8]{1,0} all-gather(%part), channel_id=1, replica_groups=GROUPS, dimensions={1}
  %wide = f32[4,8]{1,0} convert(%whole)
  %kept = f32[4,2]{1,0} reduce-scatter(%wide), replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={1}, to_apply=%add
  %next = s32[] get-tuple-element(%arg.1), index=0
  ROOT %out = (s32[], bf16[4,8]{1,0}) tuple(%next, %whole)
}

ENTRY %main (p: bf16[4,8], n: s32[]) -> f32[] {
  %p = bf16[4,8]{1,0} parameter(0)
  %n = s32[] parameter(1)
  %init = (s32[], bf16[4,8]{1,0}) tuple(%n, %p)
  %loop = (s32[], bf16[4,8]{1,0}) while(%init), condition=%cond, body=%body
  %total = f32[] constant(0)
  ROOT %all = f32[] all-reduce(%total), replica_groups={}, to_apply=%add
}
"""


@pytest.mark.parametrize(
    "groups",
    [
        "{{0,1,2,3},{4,5,6,7}}", "[2,4]<=[8]", "[2,4]<=[4,2]T(1,0)", "mesh['a'=2,'b'=4] {'b'}",
        "mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}",
    ],
)  # fmt: skip
def test_collectives_are_counted_by_the_turns_of_their_loop_and_by_group(groups):
    gathered, reduced, scattered = cost(LOOP.replace("GROUPS", groups)).collectives
    assert gathered == Collective("all-gather", 4, "bf16", count=28, bytes=28 * 64, sent=28 * 48)
    assert scattered == Collective("reduce-scatter", 4, "f32", count=28, bytes=28 * 128, sent=28 * 96)
    assert reduced == Collective("all-reduce", 8, "f32", count=1, bytes=4, sent=7)


def test_a_started_collective_is_counted_once():
    one = "%whole = bf16[4,8]{1,0} all-gather(%part)"
    two = "%begun = (bf16[4,2]{1,0}, bf16[4,8]{1,0}) all-gather-start(%part)"
    text = LOOP.replace("GROUPS", "[2,4]<=[8]")
    begun = text.replace(one, two).replace("%wide =", "%whole = bf16[4,8]{1,0} all-gather-done(%begun)\n  %wide =")
    assert begun != text and cost(begun) == cost(text)


def test_a_collective_that_is_spread_over_fusions_is_counted_once():
    text = LOOP.replace("GROUPS", "[2,4]<=[8]")
    line = next(line for line in text.splitlines() if "all-gather(" in line)
    first = line + ', frontend_attributes={chain_id="7"}'
    both = text.replace(line, first + "\n" + first.replace("%whole", "%again"))
    assert cost(both).collectives == cost(text).collectives
    other = text.replace(line, first + "\n" + line.replace("%whole", "%again"))
    assert cost(other).collectives[0].count == 2 * 28


def test_a_loop_of_unknown_length_is_counted_once_and_said():
    text = LOOP.replace("GROUPS", "[2,4]<=[8]").replace("direction=LT", "direction=NE")
    assert cost(text).unknown == 1 and cost(text).collectives[0].count == 1


def test_the_compiler_may_say_how_often_a_loop_runs():
    text = LOOP.replace("GROUPS", "[2,4]<=[8]").replace(
        "body=%body", 'body=%body, backend_config={"known_trip_count":{"n":"5"}}'
    )
    assert cost(text).collectives[0].count == 5


def test_groups_written_in_a_new_way_are_refused():
    with pytest.raises(ValueError, match="all-gather whole: unknown notation of replica groups"):
        cost(LOOP.replace("GROUPS", "<8>"))


def test_text_that_is_no_program_is_refused():
    with pytest.raises(ValueError, match="no ENTRY: pass the result of compiled.as_text"):
        cost("HloModule nothing")


def test_products_in_scans_and_batches_are_all_counted():
    def step(w, x, y):
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)
        return jnp.einsum("bij,bkj->bik", y, y).sum() + x.sum()

    shapes = [jnp.zeros(shape) for shape in ((7, 16, 16), (32, 16), (3, 8, 5))]
    compiled = jax.jit(step).lower(*shapes).compile()
    assert cost(compiled.as_text()).flops == 7 * 2 * 32 * 16 * 16 + 3 * 2 * 8 * 8 * 5


@pytest.mark.parametrize(
    ("left", "right", "out", "how", "flops"),
    [
        # A plain matrix product.
        ("[256,1024]", "[3072,1024]", "[256,3072]", "dim_labels=bf_oi->bf", 2 * 256 * 1024 * 3072),
        # With an additional spatial axis of size 4.
        ("[4,512,256]", "[768,256,1]", "[4,512,768]", "window={size=1}, dim_labels=0bf_oi0->0bf", 8 * 512 * 256 * 768),
        # 2 heads: each output position meets one position of the weight, and no padding.
        (
            "[4,512,256,1]", "[2,64,256,1]", "[4,512,2,64]",
            "window={size=1x2 pad=0_0x1_1 rhs_reversal=0x1}, dim_labels=0bf1_1oi0->0b1f", 2 * 4 * 512 * 256 * 128,
        ),
        # Batches of 4 and 2 by dilation: of all pairs of positions, only equal ones meet.
        (
            "[4,256,2,64]", "[4,512,2,64]", "[4,2,256,512]",
            "window={size=4x2 stride=3x1 pad=0_0x0_0 lhs_dilate=4x2}, dim_labels=0b1f_0o1i->01bf", 16 * 256 * 512 * 64,
        ),
    ],
)  # fmt: skip
def test_products_that_tpus_write_as_convolutions(left, right, out, how, flops):
    text = (
        f"ENTRY %main (a: bf16{left}, b: bf16{right}) -> f32{out} {{\n  %a = bf16{left} parameter(0)\n"
        f"  %b = bf16{right} parameter(1)\n  ROOT %c = f32{out} convolution(%a, %b), {how}\n}}\n"
    )
    assert cost(text).flops == flops


def test_bytes_of_shapes():
    assert array_bytes("(bf16[4,8]{1,0:T(8,128)(2,1)}, f32[], pred[3], f8e4m3fn[2], u4[6])") == 64 + 4 + 3 + 2 + 3
