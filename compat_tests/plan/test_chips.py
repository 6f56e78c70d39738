"""Names of topologies, errors for unknown ones, and the table of chips."""

import pytest

from trl_jax.plan.chips import CHIPS, known_chips, topology


@pytest.mark.parametrize(
    ("name", "devices", "platform"),
    [("v5e:4x4", 16, "tpu"), ("v6e:2x4", 8, "tpu"), ("v5p:2x2x2", 8, "tpu"), ("h100:8", 8, "gpu"), ("cpu:8", 8, "cpu")],
)
def test_a_name_means_so_many_devices(name, devices, platform):
    found = topology(name)
    assert (found.devices, found.platform) == (devices, platform)
    assert (found.chip is None) == (platform == "cpu")


@pytest.mark.parametrize("name", ["v9:2x2", "v5e", "v5e:", "v5e:4x", "v5e:0x4", "V5E:2x2", "v5e:2x2:1"])
def test_a_name_that_means_nothing_gets_the_list(name):
    with pytest.raises(ValueError, match="is unknown. Known: v5e:AxB .16 GiB and 197 bfloat16 TFLOP/s per chip."):
        topology(name)


@pytest.mark.parametrize(("name", "example"), [("v5e:8", "v5e:2x2"), ("v5p:2x2", "v5p:2x2x2"), ("h100:2x4", "h100:2")])
def test_a_shape_with_another_number_of_axes_gets_an_example(name, example):
    with pytest.raises(ValueError, match=f"expected a shape such as {example}. Known:"):
        topology(name)


def test_every_chip_is_listed_with_its_figures_and_has_a_source():
    for kind, chip in CHIPS.items():
        assert f"{kind}:A" in known_chips() and f"{chip.flops / 1e12:.0f} bfloat16 TFLOP/s" in known_chips()
        assert chip.source.startswith("https://")
