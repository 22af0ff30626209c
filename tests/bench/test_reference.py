# SPDX-License-Identifier: Apache-2.0
"""The fp32 reference against the same recurrence written as loops over tokens, heads and single numbers, in fp64."""

from __future__ import annotations

import math

import pytest
import torch

from benchmarks.bench import gdn_layer
from tests.kernels import accuracy, gdn_reference

SHAPE = gdn_layer.Shape(layers=1, key_heads=2, value_heads=4, head=8)


def naive(inputs: gdn_reference.Inputs) -> accuracy.Results:
    """Each sequence by itself; a token looks back at the tokens of its own sequence and at the window before it."""
    outputs, windows, states, start = [], [], [], 0
    group = SHAPE.value_heads // SHAPE.key_heads
    for number, length in enumerate(inputs.lengths):
        history = [row.double() for row in inputs.conv[number].T]
        state = inputs.state[number].double().clone()
        for token in range(start, start + length):
            history.append(inputs.mixed_qkv[token].double())
            mixed = sum(history[-1 - back] * inputs.conv_weights[:, -1 - back].double() for back in range(4))
            mixed = mixed * torch.sigmoid(mixed)
            query, key, value = mixed.split([16, 16, 32])
            output = torch.empty(SHAPE.value_heads, 8, dtype=torch.float64)
            for head in range(SHAPE.value_heads):
                of_head = slice(8 * (head // group), 8 * (head // group) + 8)
                q, k, v = query[of_head], key[of_head], value[8 * head : 8 * head + 8]
                q = q / math.sqrt(float(q @ q) + gdn_reference.EPSILON) / math.sqrt(8)
                k = k / math.sqrt(float(k @ k) + gdn_reference.EPSILON)
                gate = math.log1p(math.exp(float(inputs.a[token, head]) + float(inputs.dt_bias[head])))
                state[head] *= math.exp(-math.exp(float(inputs.A_log[head])) * gate)
                gain = 1 / (1 + math.exp(-float(inputs.b[token, head])))
                state[head] += torch.outer(gain * (v - state[head] @ k), k)
                output[head] = state[head] @ q
            outputs.append(output)
        start += length
        windows.append(torch.stack(history[-3:], 1))
        states.append(state)
    return accuracy.Results(torch.stack(outputs), torch.stack(windows), torch.stack(states))


@pytest.mark.parametrize(("kind", "least"), [(None, 1e-5), (torch.float64, 1e-12)], ids=str)
@pytest.mark.parametrize("lengths", [[1], [9], [4, 4], [2, 17, 1, 5]], ids=str)
def test_reference_is_the_recurrence(lengths: list[int], kind: torch.dtype | None, least: float) -> None:
    inputs = gdn_layer.Problem(SHAPE, lengths, "cpu").inputs
    found, wanted = gdn_reference.recurrent(inputs, kind), naive(inputs)
    assert accuracy.errors(found, wanted)["conv"] == 0
    for one, other in ((found.output, wanted.output), (found.state, wanted.state)):
        assert one.dtype == (kind or torch.float32)
        assert float((one - other).norm() / other.norm()) < least


def test_what_is_no_number_or_worse_than_sglang_is_wrong() -> None:
    good = {"output": 0.004, "state": 0.0}
    assert not accuracy.why_wrong(good, None) and not accuracy.why_wrong(good, good)
    assert not accuracy.why_wrong({**good, "output": 0.009}, None)
    assert "output by 0.0110, not 0.0100" in accuracy.why_wrong({**good, "output": 0.011}, None)
    assert "output by nan" in accuracy.why_wrong({**good, "output": math.nan}, None)
    assert "output by 0.0049, not 0.0048" in accuracy.why_wrong({**good, "output": 0.0049}, good)
    assert "output by 0.0060, not 0.0050" in accuracy.why_wrong({**good, "output": 0.006}, {**good, "output": 0.008})
    assert "output by 0.0060" in accuracy.why_wrong({**good, "output": 0.006}, {})
