"""The division of layers between forms: optimal, monotonic, and that of the paper on the paper's machines."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from ragcache.errors import ProfileError
from ragcache.model.capture import prefill
from ragcache.model.language_model import LanguageModel
from ragcache.restore import costs as costs_module
from ragcache.restore.costs import Cost, LayerCosts, layer_costs, mean_attended, prefill_flops, prefill_seconds
from ragcache.restore.forecast import forecast
from ragcache.restore.formats import candidates, every_form, state_format
from ragcache.restore.plan import Plan, assess, plan
from ragcache.restore.profile import Profile
from ragcache.states.form import Form

MACHINE = Profile(
    read_rate=1.0,
    transfer_rate=None,
    projection_rate=1e11,
    prefill_rate=1e11,
    placement_rate=1e10,
    codec="int8",
    device="cuda",
    machine="none in particular",
    fingerprint="none",
    measured="2026-11-30T12:00:00+00:00",
)

STORED = (Form.HIDDEN, Form.PRE_ROPE_KV)


def reading_at(rate: float) -> Profile:
    return replace(MACHINE, read_rate=rate)


def machine(**changes: Any) -> Profile:
    """A machine that differs from `MACHINE`."""
    return replace(MACHINE, **changes)


def layers_of(sizes: st.SearchStrategy[int], seconds: st.SearchStrategy[float]) -> st.SearchStrategy[list[LayerCosts]]:
    """Up to 8 layers that differ, the first of which may be recomputed."""
    stored = st.builds(Cost, sizes, seconds)
    layer = st.one_of(
        st.fixed_dictionaries({Form.HIDDEN: stored, Form.PRE_ROPE_KV: stored}),
        st.fixed_dictionaries({Form.PRE_ROPE_KV: stored}),
    )
    tokens = st.builds(Cost, st.just(0), seconds)

    def with_tokens(layers: list[LayerCosts], recomputed: list[Cost]) -> list[LayerCosts]:
        leading = [{Form.TOKENS: cost} | dict(it) for cost, it in zip(recomputed, layers, strict=False)]
        return [*leading, *layers[len(leading) :]]

    return st.builds(with_tokens, st.lists(layer, min_size=1, max_size=8), st.lists(tokens, max_size=8))


real_layers = layers_of(st.integers(1, 10**7), st.floats(0, 1))
coarse_layers = layers_of(st.integers(0, 4), st.integers(0, 4).map(float))
rates = st.floats(1, 1e9)


def every_division(costs: list[LayerCosts], profile: Profile) -> list[Plan]:
    """All assignments of forms in which recomputed layers are the first ones."""
    found = []
    for forms in product(*costs):
        count = forms.count(Form.TOKENS)
        if all(form is Form.TOKENS for form in forms[:count]):
            found.append(assess(costs, forms, profile))
    return found


class TestOptimum:
    @settings(deadline=None)
    @given(real_layers, rates)
    def test_no_division_is_faster(self, costs: list[LayerCosts], rate: float) -> None:
        found = plan(costs, reading_at(rate))
        best = min(it.balanced_seconds for it in every_division(costs, reading_at(rate)))
        assert found.balanced_seconds == pytest.approx(best, rel=1e-12, abs=1e-11)

    @settings(deadline=None)
    @given(coarse_layers)
    def test_of_equals_the_one_of_fewest_bytes(self, costs: list[LayerCosts]) -> None:
        # Small whole numbers, so that many divisions take equally long.
        found = plan(costs, reading_at(1.0))
        best = min((it.balanced_seconds, it.bytes) for it in every_division(costs, reading_at(1.0)))
        assert (found.balanced_seconds, found.bytes) == best

    @settings(deadline=None)
    @given(real_layers, rates, st.floats(1, 100))
    def test_a_faster_machine_never_takes_longer(self, costs: list[LayerCosts], rate: float, factor: float) -> None:
        slow = plan(costs, reading_at(rate)).balanced_seconds
        assert plan(costs, reading_at(rate * factor)).balanced_seconds <= slow + 1e-11
        quicker = [{form: replace(it, seconds=it.seconds / factor) for form, it in layer.items()} for layer in costs]
        assert plan(quicker, reading_at(rate)).balanced_seconds <= slow + 1e-11

    @settings(deadline=None)
    @given(real_layers, rates)
    def test_a_further_choice_never_hurts(self, costs: list[LayerCosts], rate: float) -> None:
        fewer: list[LayerCosts] = [
            {form: it for form, it in layer.items() if form is not Form.TOKENS} for layer in costs
        ]
        with_tokens, without = plan(costs, reading_at(rate)), plan(fewer, reading_at(rate))
        assert with_tokens.balanced_seconds <= without.balanced_seconds + 1e-11

    @settings(deadline=None)
    @given(st.integers(1, 96), st.integers(1, 10**6), st.floats(1e-6, 1), st.sampled_from([0.5, 0.9, 1.1, 2.0]))
    def test_equal_layers_follow_the_papers_formula(
        self, count: int, size: int, compute: float, balance: float
    ) -> None:
        """HCache, section 4.1: hidden states and one complement, so that both resources are busy equally long."""
        rate = size / (compute * balance)
        layer = {
            Form.TOKENS: Cost(0, 6 * compute),
            Form.HIDDEN: Cost(size, compute),
            Form.PRE_ROPE_KV: Cost(2 * size, 0),
        }
        found = plan([layer] * count, reading_at(rate))
        hidden = hidden_layers(count, layer, rate)
        assert abs(found.forms.count(Form.HIDDEN) - hidden) < 1
        complement = Form.PRE_ROPE_KV if balance < 1 else Form.TOKENS
        assert found.forms.count(Form.HIDDEN) + found.forms.count(complement) == count

    @settings(deadline=None)
    @given(st.integers(1, 20), st.integers(1, 10), st.integers(1, 30), rates)
    def test_order_of_forms(self, count: int, compute: int, size: int, rate: float) -> None:
        """Recomputed layers first, those that need no computing last, where nothing is left to overlap with."""
        layer: LayerCosts = {
            Form.TOKENS: Cost(0, 6.0 * compute),
            Form.HIDDEN: Cost(size, compute),
            Form.PRE_ROPE_KV: Cost(2 * size, 0),
        }
        forms = plan([layer] * count, reading_at(rate)).forms
        assert list(forms) == sorted(forms, key=[Form.TOKENS, Form.HIDDEN, Form.PRE_ROPE_KV].index)

    def test_prediction_is_the_larger_time_and_the_first_read(self) -> None:
        costs: list[LayerCosts] = [
            {Form.TOKENS: Cost(0, 1.0)},
            {Form.HIDDEN: Cost(10, 2.0)},
            {Form.HIDDEN: Cost(30, 2.0)},
        ]
        found = plan(costs, reading_at(10.0))
        assert (found.read_seconds, found.compute_seconds, found.fill_seconds) == (4.0, 5.0, 1.0)
        assert (found.balanced_seconds, found.seconds) == (5.0, 6.0)

    def test_many_layers_of_two_kinds(self) -> None:
        """A model that mixes windows and full attention; compared with every number of hidden layers of each kind."""
        kinds: list[LayerCosts] = [
            {Form.HIDDEN: Cost(1000, 1.7), Form.PRE_ROPE_KV: Cost(2000, 0.1)},
            {Form.HIDDEN: Cost(250, 0.4), Form.PRE_ROPE_KV: Cost(490, 0.02)},
        ]
        profile = reading_at(800.0)
        best = math.inf
        for first, second in product(range(41), repeat=2):
            counts = [(kinds[0], first), (kinds[1], second)]
            size = sum(k[Form.HIDDEN].bytes * n + k[Form.PRE_ROPE_KV].bytes * (40 - n) for k, n in counts)
            seconds = sum(k[Form.HIDDEN].seconds * n + k[Form.PRE_ROPE_KV].seconds * (40 - n) for k, n in counts)
            best = min(best, max(size / profile.input_rate, seconds))
        assert plan(kinds * 40, profile).balanced_seconds == pytest.approx(best)

    def test_a_layer_without_any_form(self) -> None:
        with pytest.raises(ValueError, match="no form"):
            plan([{Form.HIDDEN: Cost(1, 1.0)}, {}], MACHINE)


def hidden_layers(count: int, layer: LayerCosts, rate: float) -> float:
    """HCache's closed form for layers that are alike (section 4.1); not a whole number."""
    read, compute = layer[Form.HIDDEN].bytes / rate, layer[Form.HIDDEN].seconds
    if compute >= read:
        complement = layer[Form.PRE_ROPE_KV].bytes / rate
        return count * complement / (complement + compute - read)
    complement = layer[Form.TOKENS].seconds
    return count * complement / (complement + read - compute)


@dataclass(frozen=True)
class PaperCase:
    """A model on the paper's machine, and what the paper has for it.

    Attributes:
        hidden_size, layers: of the model; all have multi-head attention.
        gpus: that share its tensors.
        hidden, other: layers that the paper's scheduler gives to hidden states, and to their complement.
        storage: times that the states are smaller than KV (the paper's Table 3).
    """

    hidden_size: int
    layers: int
    gpus: int
    hidden: int
    other: int
    storage: float

    def costs(self, tokens: int) -> list[LayerCosts]:
        """Section 3.2: states in fp16, two products for K and V, a layer's weights of 12 D^2 and causal attention.

        KV are loaded as they are used, so they need no computing.
        """
        rate = ACHIEVED * self.gpus
        size = 2 * tokens * self.hidden_size
        projection = 4 * tokens * self.hidden_size**2 / rate
        prefill = (24 * tokens * self.hidden_size**2 + 2 * tokens**2 * self.hidden_size) / rate
        layer = {
            Form.TOKENS: Cost(0, prefill),
            Form.HIDDEN: Cost(size, projection),
            Form.PRE_ROPE_KV: Cost(2 * size, 0.0),
        }
        return [layer] * self.layers

    @property
    def machine(self) -> Profile:
        return replace(MACHINE, read_rate=4 * SSD_RATE, transfer_rate=self.gpus * LINK_RATE)

    def uniform(self, form: Form, tokens: int) -> Plan:
        return assess(self.costs(tokens), [form] * self.layers, self.machine)


ACHIEVED = 0.7 * 312e12
"""FLOP/s of an A100 in 16 bit: the data sheet's peak, of which large matrix products reach about 70%."""

SSD_RATE = 6.9e9
"""Bytes per second of one PM9A3, four of which are read in turn (section 5)."""

LINK_RATE = 24.8e9
"""Bytes per second from the host into one A100-SXM4 over PCIe 4.0 x16, as `nvbandwidth` measures it
(forums.developer.nvidia.com/t/352186). Four SSDs give 27.6: they "saturate" the link, as the paper says. OPT-30B is on
four GPUs, each of which reads its share over its own link (section 5), so there the SSDs are the limit."""

LLAMA_7B = PaperCase(4096, 32, 1, hidden=31, other=1, storage=1.94)
LLAMA_13B = PaperCase(5120, 40, 1, hidden=38, other=2, storage=1.905)
OPT_30B = PaperCase(7168, 48, 4, hidden=40, other=8, storage=2.40)
PAPER = [LLAMA_7B, LLAMA_13B, OPT_30B]
CONTEXT = 4096
"""Llama-2's own context window, and the shortest of the paper's long contexts (4K to 16K, L-Eval)."""


class TestPaper:
    """HCache, section 6, on its machine: A100-40G, four PM9A3.

    The schedules of the 7B and 13B models follow from the bytes per token of Table 3. The paper's speeds are measured,
    ours follow from four numbers, none of which is fitted: the constants above say where each comes from. What decides
    is how the time to read a hidden layer compares with the time to project it: 0.330 and 0.307 us per token for 7B,
    0.413 and 0.480 for 13B, 0.519 and 0.235 for 30B on four GPUs. Without the limit of the link the plans would be
    31 + 1, 35 + 5 and 40 + 8.
    """

    @pytest.mark.parametrize("case", PAPER)
    def test_schedule(self, case: PaperCase) -> None:
        """Within one layer of the paper's; here 32 + 0, 37 + 3 (KV) and 40 + 8 (recomputed)."""
        forms = plan(case.costs(CONTEXT), case.machine).forms
        assert abs(forms.count(Form.HIDDEN) - case.hidden) <= 1
        assert abs(case.layers - forms.count(Form.HIDDEN) - case.other) <= 1
        complements = {LLAMA_13B: Form.PRE_ROPE_KV, OPT_30B: Form.TOKENS}
        if case in complements:
            assert set(forms) == {Form.HIDDEN, complements[case]}

    @pytest.mark.parametrize("case", PAPER)
    def test_storage(self, case: PaperCase) -> None:
        """Within 5% of Table 3, whose ratios the abstract gives as 1.92 to 2.40; here 2.00, 1.86 and 2.40."""
        found = plan(case.costs(CONTEXT), case.machine).bytes
        assert case.uniform(Form.PRE_ROPE_KV, CONTEXT).bytes / found == pytest.approx(case.storage, rel=0.05)

    @pytest.mark.parametrize("case", [LLAMA_7B, LLAMA_13B])
    def test_speed_against_loading_kv(self, case: PaperCase) -> None:
        """The paper: TTFT up to 1.93 times lower for contexts of 4K to 16K; here 2.00 and 1.86, at any length.

        Ours is the restoring alone, without the prefill of the question, which shortens both by nothing and so lowers
        the ratio. For restoring alone the paper has 1.33 to 2.66 over all of its machines.
        """
        found = plan(case.costs(CONTEXT), case.machine)
        speed_up = case.uniform(Form.PRE_ROPE_KV, CONTEXT).seconds / found.seconds
        assert speed_up == pytest.approx(1.93, rel=0.15)

    def test_speed_against_recomputing(self) -> None:
        """The paper: TTFT up to 5.73 times lower; here 5.9 for Llama-2-7B at 4,096 tokens.

        13B comes out at 6.8, 18% above that, and OPT-30B at 3.3 (the paper's range over models is 2.66 to 5.73); at
        16,384 tokens, where attention is a quarter of a prefill, 7B at 7.2. For restoring alone the paper has 5.04 to
        9.05 over all of its machines, which the two models of a single GPU are held to.
        """
        speed_ups = {
            (case, tokens): case.uniform(Form.TOKENS, tokens).seconds / plan(case.costs(tokens), case.machine).seconds
            for case in (LLAMA_7B, LLAMA_13B)
            for tokens in (1024, CONTEXT, 4 * CONTEXT)
        }
        assert speed_ups[LLAMA_7B, CONTEXT] == pytest.approx(5.73, rel=0.15)
        assert 5.04 <= min(speed_ups.values()) <= max(speed_ups.values()) <= 9.05


class TestCosts:
    def test_flops_are_those_that_run(self, tiny_model: Callable[[str], LanguageModel]) -> None:
        """The products that torch counts in a real prefill; norms are the rest."""
        model, tokens = tiny_model("llama"), 96
        with FlopCounterMode(display=False) as counter:
            prefill(model, list(range(tokens)))
        counted = sum(n for op, n in counter.get_flop_counts()["Global"].items() if "mm" in str(op))
        head = 2 * model.decoder.embedding.weight.numel()  # for the last token only
        linear = sum(model.layer_flops(index, tokens, 0) for index in range(len(model.decoder.layers)))
        assert linear == pytest.approx(counted - head, rel=0.01)

    def test_flops_of_all_layers_are_the_models(self, tiny_model: Callable[[str], LanguageModel]) -> None:
        model = tiny_model("qwen2")
        assert prefill_flops(model, 512) == pytest.approx(model.prefill_flops(0, 512), rel=0.01)

    @pytest.mark.parametrize(("tokens", "window"), [(10, None), (10, 10), (64, 16), (1000, 3)])
    def test_mean_attended(self, tokens: int, window: int | None) -> None:
        seen = [min(position + 1, window or tokens) for position in range(tokens)]
        # A token that sees itself counts half of itself: the triangle's area, not its steps.
        assert mean_attended(tokens, window) == pytest.approx(sum(seen) / tokens, abs=0.51)

    def test_form_by_form(self, tiny_model: Callable[[str], LanguageModel]) -> None:
        """Bytes as they are stored; time by the rates, each of which matters to the forms that it should."""
        model, tokens = tiny_model("llama-multi-head"), 1024
        every = [list(it.values()) for it in every_form(model, "raw")]

        def costs(**rates: float) -> LayerCosts:
            return layer_costs(model, every, machine(**rates), tokens, 512)[1]

        usual = costs()
        width = model.decoder.hidden_size
        assert usual[Form.TOKENS].bytes == 0
        assert usual[Form.HIDDEN].bytes == tokens * width * 4
        assert usual[Form.PRE_ROPE_KV].bytes == tokens * width * 8
        slower = {
            "projection_rate": {Form.HIDDEN},
            "prefill_rate": {Form.TOKENS},
            "placement_rate": {Form.TOKENS, Form.HIDDEN, Form.PRE_ROPE_KV},
        }
        for name, forms in slower.items():
            changed = costs(**{name: getattr(MACHINE, name) / 10})
            assert {form for form in usual if changed[form].seconds > usual[form].seconds * 1.01} == forms
        projected = usual[Form.HIDDEN].seconds - tokens * 12 * width / MACHINE.placement_rate
        assert projected == pytest.approx(tokens * 4 * width**2 / MACHINE.projection_rate)

    def test_of_a_model_with_images_its_decoder_counts(self, tiny_model: Callable[[str], LanguageModel]) -> None:
        model = tiny_model("gemma3-images")
        layer = model.module.get_decoder().layers[1]
        weights = sum(parameter.numel() for parameter in layer.parameters())
        assert model.layer_flops(1, 10, 0) == 2 * weights * 10

    def test_the_first_layer_is_only_projected(self, tiny_model: Callable[[str], LanguageModel]) -> None:
        model = tiny_model("llama")
        every = [list(it.values()) for it in every_form(model, "int8")]
        first, second, _ = layer_costs(model, every, replace(MACHINE, prefill_rate=1e6), 1024, 512)
        assert set(first) == {Form.TOKENS, Form.PRE_ROPE_KV}
        assert first[Form.TOKENS].seconds < 1e-2 < second[Form.TOKENS].seconds

    def test_windows_bound_what_is_read(
        self, tiny_model: Callable[[str], LanguageModel], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model = tiny_model("llama")
        monkeypatch.setattr(costs_module, "window", lambda layer: 100 if layer.index == 1 else None)
        every = [list(it.values()) for it in every_form(model, "raw")]
        short, long = (layer_costs(model, every, MACHINE, tokens, 512) for tokens in (80, 800))
        for form in STORED:
            assert long[2][form].bytes == 10 * short[2][form].bytes
            assert long[1][form].bytes == pytest.approx(100 / 80 * short[1][form].bytes)
            assert long[1][form].seconds == pytest.approx(100 / 80 * short[1][form].seconds)
        # To recompute a layer, the one before must still be run for all tokens.
        for index in (1, 2):
            assert long[index][Form.TOKENS].seconds > 9 * short[index][Form.TOKENS].seconds


class TestFormat:
    """What `auto` makes of a plan."""

    def test_grouped_queries_need_no_profile_on_a_cpu(self, tiny_model: Callable[[str], LanguageModel]) -> None:
        format = state_format(tiny_model("llama"), "auto", "int8")
        assert [it.form for it in format.layers] == [Form.PRE_ROPE_KV] * 3

    def test_where_there_is_a_choice_a_profile_is_needed(self, tiny_model: Callable[[str], LanguageModel]) -> None:
        model = tiny_model("llama-multi-head")
        with pytest.raises(ProfileError, match="rates of this machine"):
            state_format(model, "auto", "int8")
        hidden = state_format(model, "hidden", "int8")
        assert [it.form for it in hidden.layers] == [Form.TOKENS, Form.HIDDEN, Form.HIDDEN]

    def test_the_machine_decides(self, tiny_model: Callable[[str], LanguageModel]) -> None:
        model = tiny_model("llama-multi-head")

        def forms(device: str, **rates: float) -> list[Form]:
            rated = machine(device=device, **rates)
            return [it.form for it in state_format(model, "auto", "int8", rated).layers]

        assert forms("cpu", read_rate=1e12) == [Form.PRE_ROPE_KV] * 3
        assert forms("cpu", read_rate=1e5) == [Form.TOKENS, Form.HIDDEN, Form.HIDDEN]
        # The last layer is always stored.
        assert forms("cuda", read_rate=1e5) == [Form.TOKENS, Form.TOKENS, Form.HIDDEN]

    def test_on_a_gpu_grouped_queries_too_have_a_choice(self, tiny_model: Callable[[str], LanguageModel]) -> None:
        choices = candidates(tiny_model("llama"), "auto", "int8", "cuda")
        assert [{it.form for it in layer} for layer in choices] == [
            {Form.TOKENS, Form.PRE_ROPE_KV},
            {Form.TOKENS, Form.PRE_ROPE_KV},
            {Form.PRE_ROPE_KV},
        ]

    def test_what_was_encoded_in_context_is_not_recomputed_from_tokens(
        self, tiny_model: Callable[[str], LanguageModel]
    ) -> None:
        choices = candidates(tiny_model("llama"), "auto", "int8", "cuda", in_context=True)
        assert [{it.form for it in layer} for layer in choices] == [
            {Form.TOKENS, Form.PRE_ROPE_KV},
            {Form.PRE_ROPE_KV},
            {Form.PRE_ROPE_KV},
        ]


def test_forecast(tiny_model: Callable[[str], LanguageModel]) -> None:
    model, rated = tiny_model("llama-multi-head"), machine(read_rate=1e5)
    planned, stored = state_format(model, "auto", "int8", rated), state_format(model, "pre-rope-kv", "int4")
    found = forecast(model, rated, "int8", 512, planned, stored)
    # The first layer is only projected, the second has a layer run before it.
    assert [(it.first, it.last, it.form) for it in found.groups] == [
        (0, 0, Form.TOKENS),
        (1, 1, Form.TOKENS),
        (2, 2, Form.HIDDEN),
    ]
    uniform = forecast(model, rated, "int8", 512, state_format(model, "hidden", "int8"), None)
    assert [(it.first, it.last) for it in uniform.groups] == [(0, 0), (1, 2)]
    for each in (found, uniform):
        assert sum(it.bytes_per_token for it in each.groups) == pytest.approx(each.bytes_per_token)
    assert [it.planned for it in uniform.times] == pytest.approx([it.hidden for it in found.times])
    for it in found.times:
        assert it.planned < it.hidden < it.pre_rope_kv
        assert it.stored is not None
        assert it.stored < it.pre_rope_kv
        assert it.prefill == pytest.approx(prefill_seconds(model, rated, it.tokens) * 1e3)
    slopes = [it.prefill / it.tokens for it in found.times]
    assert slopes == sorted(slopes)
