"""The network's own naming and the mapping table say the same."""

from __future__ import annotations

import torch

from k3convert.mapping.k3 import K3
from k3model.census import census
from k3model.config import KimiK3Config
from k3model.network import KimiK3ForConditionalGeneration
from k3model.presets import release_config_dict, tiny_config_dict
from k3model.released_names import released_views


def test_both_name_the_tiny_networks_tensors_alike() -> None:
    with torch.device("meta"):
        network = KimiK3ForConditionalGeneration(KimiK3Config.from_dict(tiny_config_dict()))

    by_network = {name for name, _ in released_views(network)}

    by_table: set[str] = set()
    for fqn, tensor in network.state_dict().items():
        experts = range(tensor.shape[0]) if K3.is_stack(fqn) else (None,)
        by_table |= {K3.to_hf(fqn, expert) for expert in experts}
    assert by_network == by_table
    assert by_network == {spec.name for spec in census(network.config, packed=False)}


def test_the_released_network_has_exactly_the_parameters_of_the_release() -> None:
    with torch.device("meta"):
        network = KimiK3ForConditionalGeneration(KimiK3Config.from_dict(release_config_dict()))

    # 2,722,740,830,208 routed and 57,191,006,976 other values, of which 32 zeros behind the heads of 69 A_log.
    num_values = sum(tensor.numel() for tensor in network.state_dict().values())
    assert num_values == 2_722_740_830_208 + 57_191_006_976 - 69 * 32
