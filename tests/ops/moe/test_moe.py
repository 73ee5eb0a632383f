from __future__ import annotations

import dataclasses

import pytest
import torch

from firetower.core.errors import ConfigError
from firetower.ops import moe
from firetower.ops.moe import cases
from firetower.ops.moe.reference import experts_reference, moe_reference, route_reference

# the interpreter computes with NumPy, which warns where a sigmoid saturates or a NaN passes
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")

SHAPE = cases.SHAPES["small"]
RULE = moe.RoutingRule(top_k=SHAPE.top_k)
SIGMOID = moe.RoutingRule(top_k=SHAPE.top_k, scoring="sigmoid", routed_scaling_factor=1.8)


def truth_of(x, weights, rule, row_ids=None):
    """fp64, for the experts that fp32 chose: a near tie may fall either way."""
    logits = moe.logits(x, weights.router)
    chosen = moe.route(logits, rule, selection_bias=weights.selection_bias)[1]
    picked = (x.double() @ weights.router.double().T).gather(-1, chosen.long())
    shares, ids = route_reference(picked, None, rule)
    order = chosen.long().gather(-1, ids.long())
    return experts_reference(x.double(), shares, order, weights, row_ids)


@pytest.mark.parametrize("shape", cases.SHAPES.values(), ids=cases.SHAPES)
@pytest.mark.parametrize("phase", ["window", "prefill"])
def test_the_block_is_the_references(shape, phase, backend, device, assert_close):
    if (backend, device, phase) == ("triton", "cpu", "prefill") and shape != SHAPE:
        pytest.skip("test_steps.py has the interpreter's wide blocks")
    x = cases.normal((3, shape.hidden), 1, device=device)
    weights, rule = cases.weights(shape, 2, device=device), moe.RoutingRule(top_k=shape.top_k)
    assert_close("moe", moe_reference(x.double(), weights, rule), moe.moe(x, weights, rule, phase=phase), 2e-6)


def test_types(backend, device, kernel_dtypes, assert_close):
    for dtype in {*kernel_dtypes, torch.bfloat16} if backend == "torch" else kernel_dtypes:
        x, weights = cases.normal((5, SHAPE.hidden), 1, dtype, device), cases.weights(SHAPE, 2, dtype, device)
        actual = moe.moe(x, weights, RULE)
        assert actual.dtype == dtype
        assert_close(str(dtype), truth_of(x, weights, RULE), actual, cases.RTOL[dtype])


def test_fp64_is_exact(assert_close):
    x, weights = cases.normal((5, SHAPE.hidden), 1, torch.float64), cases.weights(SHAPE, 2, torch.float64)
    for rule in (RULE, SIGMOID):
        assert_close(rule.scoring, moe_reference(x, weights, rule), moe.moe(x, weights, rule), 1e-13)


@pytest.mark.parametrize("num_tokens", [1, 2, 63, 64, 65, 1000])
@pytest.mark.parametrize("phase", ["window", "prefill"])
def test_lengths(num_tokens, phase, assert_close):
    x, weights = cases.normal((num_tokens, SHAPE.hidden), 3), cases.weights(SHAPE, 4)
    assert_close("moe", truth_of(x, weights, RULE), moe.moe(x, weights, RULE, phase=phase), cases.RTOL[x.dtype])


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["window", "prefill"])
def test_4097_tokens(phase, assert_close):
    x, weights = cases.normal((4097, SHAPE.hidden), 3), cases.weights(SHAPE, 4)
    assert_close("moe", truth_of(x, weights, RULE), moe.moe(x, weights, RULE, phase=phase), cases.RTOL[x.dtype])


class TestTransformers:
    """The same weights in the class that the model is published with."""

    def block(self, shared_inner: int, device: str):
        transformers = pytest.importorskip("transformers")
        config = transformers.models.qwen3_5_moe.configuration_qwen3_5_moe.Qwen3_5MoeTextConfig(
            hidden_size=32,
            num_experts=6,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            shared_expert_intermediate_size=shared_inner,
        )
        block = transformers.models.qwen3_5_moe.modeling_qwen3_5_moe.Qwen3_5MoeSparseMoeBlock(config)
        generator = cases.generator(7)
        for parameter in block.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5
        return block.to(device).eval()

    def weights_of(self, block) -> moe.MoeWeights:
        shared = block.shared_expert
        return moe.MoeWeights(
            router=block.gate.weight.data,
            gate_up_proj=block.experts.gate_up_proj.data,
            down_proj=block.experts.down_proj.data,
            shared=moe.SharedExpert(
                gate_up_proj=torch.cat([shared.gate_proj.weight.data, shared.up_proj.weight.data]),
                down_proj=shared.down_proj.weight.data,
                gate=block.shared_expert_gate.weight.data,
            ),
        )

    @pytest.mark.parametrize("shared_inner", [32, 48])
    @pytest.mark.parametrize("phase", ["window", "prefill"])
    def test_qwen3_5_moe(self, shared_inner, phase, backend, device):
        if (backend, device, phase) == ("triton", "cpu", "prefill"):
            pytest.skip("test_steps.py has the interpreter's wide blocks")
        block = self.block(shared_inner, device)
        x = cases.normal((4, 32), 8, device=device)
        with torch.no_grad():
            peer = block(x[None])[0]
        ours = moe.moe(x, self.weights_of(block), moe.RoutingRule(top_k=2), phase=phase)
        torch.testing.assert_close(ours, peer, rtol=1e-5, atol=1e-6)

    def test_glm4_moe_routing(self, backend, device):
        transformers = pytest.importorskip("transformers")
        config = transformers.Glm4MoeConfig(
            hidden_size=64, n_routed_experts=16, num_experts_per_tok=4, n_group=1, topk_group=1,
            norm_topk_prob=True, routed_scaling_factor=2.5, moe_intermediate_size=32,
        )  # fmt: skip
        gate = transformers.models.glm4_moe.modeling_glm4_moe.Glm4MoeMoE(config).gate.to(device)
        logits = cases.normal((6, 16), 3, device=device, scale=2.0)
        bias = cases.normal((16,), 4, device=device)
        gate.weight.data, gate.e_score_correction_bias = torch.eye(16, 64, device=device), bias
        answer = gate(torch.nn.functional.pad(logits, (0, 48)))
        if not isinstance(answer, tuple) or len(answer) != 3:
            pytest.skip("this transformers routes elsewhere")
        _, peer_weights, peer_ids = answer
        rule = moe.RoutingRule(top_k=4, scoring="sigmoid", routed_scaling_factor=2.5)
        weights, ids = moe.route(logits, rule, selection_bias=bias)
        peer = torch.zeros(6, 16, device=device).scatter_(1, peer_ids, peer_weights)
        ours = torch.zeros(6, 16, device=device).scatter_(1, ids.long(), weights)
        torch.testing.assert_close(ours, peer, rtol=1e-5, atol=1e-7)


class TestRowInvariance:
    """A row's bits depend on that row alone, in every dtype the op serves."""

    @pytest.mark.parametrize("shape", ["shared as wide", "shared wider"])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_alone_and_in_any_window(self, shape, dtype, device, same_bits):
        shape = cases.SHAPES[shape]
        x, weights = cases.normal((64, shape.hidden), 1, dtype, device), cases.weights(shape, 2, dtype, device)
        rule = moe.RoutingRule(top_k=shape.top_k)
        whole = moe.moe(x, weights, rule)
        for size in (*range(1, 9), 33):
            for start in (0, 7, 31):
                part = moe.moe(x[start : start + size].clone(), weights, rule)
                assert same_bits(part, whole[start : start + size]), (size, start)

    def test_kernels_alone_and_in_windows(self, backend, device, same_rows):
        x, weights = cases.normal((12, SHAPE.hidden), 1, device=device), cases.weights(SHAPE, 2, device=device)
        whole = moe.moe(x, weights, RULE)
        for start, size in ((0, 1), (3, 2), (7, 5)):
            part = moe.moe(x[start : start + size].clone(), weights, RULE)
            assert same_rows(part, whole[start : start + size]), (size, start)

    def test_where_the_neighbours_go_does_not_matter(self, backend, device, same_rows):
        """Row 4 beside rows that all crowd its experts, and beside rows that are nowhere near them."""
        x, weights = cases.normal((9, SHAPE.hidden), 1, device=device), cases.weights(SHAPE, 2, device=device)
        alone = moe.moe(x[4:5].clone(), weights, RULE)
        crowded = x[4:5].repeat(9, 1)
        assert same_rows(moe.moe(crowded, weights, RULE), alone.repeat(9, 1))
        apart = -x
        apart[4] = x[4]
        assert same_rows(moe.moe(apart, weights, RULE)[4:5], alone)

    def test_256_rows(self, same_bits):
        shape = cases.Shape(hidden=33, num_experts=4, top_k=2, inner=17, shared_inner=17)
        x, weights = cases.normal((256, 33), 1), cases.weights(shape, 2)
        rule = moe.RoutingRule(top_k=2)
        whole = moe.moe(x, weights, rule)
        alone = torch.cat([moe.moe(x[t : t + 1].clone(), weights, rule) for t in range(0, 256, 5)])
        assert same_bits(alone, whole[::5])

    def test_a_library_product_of_all_rows_would_not_do(self, same_bits):
        """The faulty form on the CPU: the math library picks its kernel by the number of rows."""
        x, weight = cases.normal((8, 512), 1), cases.normal((96, 512), 2)
        assert not same_bits(torch.cat([row[None] @ weight.T for row in x]), x @ weight.T)


class TestPads:
    def run(self, x, weights, row_ids, phase="window"):
        return moe.moe(x, weights, RULE, row_ids=row_ids, phase=phase)

    def test_their_output_is_zero_and_nothing_they_hold_matters(self, backend, device, same_bits):
        x, weights = cases.normal((6, SHAPE.hidden), 1, device=device), cases.weights(SHAPE, 2, device=device)
        row_ids = torch.tensor([-1, 0, 1, -2, 2, -1], dtype=torch.int32, device=device)
        real = row_ids >= 0
        clean = self.run(x, weights, row_ids)
        x[~real] = float("nan")
        burned = self.run(x, weights, row_ids)
        assert same_bits(clean, burned)
        assert (clean[~real] == 0).all()
        assert same_bits(clean[real], moe.moe(x[real], weights, RULE))

    def test_all_pads(self, backend, device):
        x, weights = cases.normal((3, SHAPE.hidden), 1, device=device), cases.weights(SHAPE, 2, device=device)
        row_ids = torch.full((3,), -1, device=device)
        assert (self.run(x, weights, row_ids) == 0).all()

    def test_drill_f2_pads_do_not_go_through_the_experts(self, device):
        """The faulty form lets 16 pads through: their rows are planned, and a bad pad fires."""
        x, weights = cases.normal((18, SHAPE.hidden), 1, device=device), cases.weights(SHAPE, 2, device=device)
        row_ids = torch.tensor([0, 1] + [-1] * 16, device=device)
        ids = moe.route(moe.logits(x, weights.router), RULE)[1]
        faulty = moe.plan(ids, SHAPE.num_experts, block_m=16, has_shared=True)
        assert {row[0] for row in moe.audit(faulty, ids, row_ids).pads} == set(range(2, 18))
        plan = moe.plan(ids, SHAPE.num_experts, block_m=16, has_shared=True, row_ids=row_ids)
        assert moe.audit(plan, ids, row_ids).is_clean
        assert int(plan.totals[2]) == 2 * plan.num_slots


def test_drill_f4_rows_keep_their_places(backend, device, same_rows):
    """Rows in another order give the same rows in that order; a plan that swaps two is named by its audit."""
    x, weights = cases.normal((7, SHAPE.hidden), 1, device=device), cases.weights(SHAPE, 2, device=device)
    order = torch.randperm(7, generator=cases.generator(3)).to(device)
    whole = moe.moe(x, weights, RULE)
    assert same_rows(moe.moe(x[order], weights, RULE), whole[order])
    assert not same_rows(whole[order], whole)


@pytest.mark.parametrize("accepted", [1, 3])
def test_drills_q1_and_q2_a_verify_window_leaves_nothing_behind(accepted, backend, device, same_rows):
    """The block has no state: rejected drafts in a window of 4 change neither the accepted rows nor the next window."""
    x, weights = cases.normal((6, SHAPE.hidden), 1, device=device), cases.weights(SHAPE, 2, device=device)
    with_drafts = moe.moe(x[:4], weights, RULE)[:accepted]
    following = moe.moe(x[accepted : accepted + 2].clone(), weights, RULE)
    whole = moe.moe(x, weights, RULE)
    assert same_rows(torch.cat([with_drafts, following]), whole[: accepted + 2])


def test_drill_g2_an_expert_without_rows_adds_nothing(backend, device, same_bits):
    """Weights of an expert that nobody chose may be NaN."""
    x, weights = cases.normal((3, SHAPE.hidden), 1, device=device), cases.weights(SHAPE, 2, device=device)
    clean = moe.moe(x, weights, RULE)
    ids = moe.route(moe.logits(x, weights.router), RULE)[1]
    idle = [e for e in range(SHAPE.num_experts) if e not in ids.flatten().tolist()]
    assert idle
    for proj in (weights.gate_up_proj, weights.down_proj):
        proj[idle] = float("nan")
    assert same_bits(moe.moe(x, weights, RULE), clean)


def test_a_nan_in_a_token_burns_that_token_alone(backend, device, same_bits):
    x, weights = cases.normal((5, SHAPE.hidden), 1, device=device), cases.weights(SHAPE, 2, device=device)
    clean = moe.moe(x, weights, RULE)
    x[2, 5] = float("nan")
    burned = moe.moe(x, weights, RULE)
    assert burned[2].isnan().all()
    others = [0, 1, 3, 4]
    assert same_bits(burned[others], clean[others])


def test_a_nan_in_an_experts_weights_burns_its_tokens(backend, device, same_bits):
    x, weights = cases.normal((5, SHAPE.hidden), 1, device=device), cases.weights(SHAPE, 2, device=device)
    clean = moe.moe(x, weights, RULE)
    ids = moe.route(moe.logits(x, weights.router), RULE)[1]
    expert = int(ids[0, 0])
    weights.down_proj[expert, 7, 3] = float("nan")
    burned = moe.moe(x, weights, RULE)
    hit = (ids == expert).any(-1)
    assert torch.equal(burned.isnan().any(-1), hit)
    assert burned[hit].isnan().sum(-1).tolist() == [1] * int(hit.sum())
    assert same_bits(burned[~hit], clean[~hit])


def test_ids_outside_the_experts_add_nothing(backend, device, assert_close):
    """As in expert parallelism: what another device computes."""
    x, weights = cases.normal((4, SHAPE.hidden), 1, device=device), cases.weights(SHAPE, 2, device=device)
    ids = cases.random_ids(4, SHAPE, 3, device)
    shares = torch.full((4, SHAPE.top_k), 0.3, device=device)
    gate = moe.logits(x, weights.router, weights.shared.gate)[:, -1]
    absent = ids.clone()
    absent[1, 0], absent[3, 1] = SHAPE.num_experts, -1
    actual = moe.experts(x, shares, absent, weights, shared_logits=gate)
    kept = torch.where(absent == ids, shares, 0)
    assert_close("experts", experts_reference(x.double(), kept, ids, weights), actual, 2e-6)


def test_fifty_repeats_have_the_same_bits(device, same_bits):
    x, weights = cases.normal((9, SHAPE.hidden), 1, device=device), cases.weights(SHAPE, 2, device=device)
    first = moe.moe(x, weights, RULE)
    assert all(same_bits(moe.moe(x, weights, RULE), first) for _ in range(50))


def test_outputs_can_be_given(backend, device, same_bits, filled):
    x, weights = cases.normal((3, SHAPE.hidden), 1, device=device), cases.weights(SHAPE, 2, device=device)
    outs = [filled((3, SHAPE.hidden), value, torch.float32, device) for value in (float("nan"), 1e30)]
    for out in outs:
        assert moe.moe(x, weights, RULE, out=out) is out
    assert same_bits(*outs)


def test_no_token_is_no_work(backend, device):
    weights = cases.weights(SHAPE, 2, device=device)
    for phase in ("window", "prefill"):
        assert moe.moe(torch.zeros(0, SHAPE.hidden, device=device), weights, RULE, phase=phase).shape == (0, 32)


class TestRefusals:
    @pytest.fixture
    def weights(self) -> moe.MoeWeights:
        return cases.weights(cases.SHAPES["shared as wide"], 2)

    def refused(self, message: str, x: torch.Tensor, weights: moe.MoeWeights, **options) -> None:
        with pytest.raises(ConfigError, match=message):
            moe.moe(x, weights, moe.RoutingRule(top_k=3), **options)

    def test_phases(self, weights):
        self.refused("phase='verify': must be one of window, prefill", torch.zeros(1, 48), weights, phase="verify")

    def test_three_dimensions(self, weights):
        self.refused("hidden_states: shape", torch.zeros(1, 1, 48), weights)

    def test_a_transposed_input(self, weights):
        self.refused("must be contiguous", torch.zeros(48, 48).T, weights)

    def test_another_type(self, weights):
        self.refused("router: torch.float32", torch.zeros(1, 48).half(), weights)

    def test_integers(self, weights):
        self.refused("hidden_states: dtype", torch.zeros(1, 48, dtype=torch.int32), weights)

    @pytest.mark.parametrize(
        ("name", "shape"),
        [
            ("router", (11, 47)),
            ("gate_up_proj", (11, 48, 47)),
            ("gate_up_proj", (11, 47, 48)),
            ("down_proj", (11, 48, 23)),
        ],
    )
    def test_weights_that_do_not_fit(self, weights, name, shape):
        self.refused(name, torch.zeros(1, 48), dataclasses.replace(weights, **{name: torch.zeros(shape)}))

    @pytest.mark.parametrize(
        ("name", "shape"), [("gate_up_proj", (47, 48)), ("down_proj", (48, 23)), ("gate", (1, 47))]
    )
    def test_a_shared_expert_that_does_not_fit(self, weights, name, shape):
        shared = dataclasses.replace(weights.shared, **{name: torch.zeros(shape)})
        self.refused("shared", torch.zeros(1, 48), dataclasses.replace(weights, shared=shared))

    def test_row_ids_of_another_length(self, weights):
        self.refused("row_ids", torch.zeros(2, 48), weights, row_ids=torch.zeros(3, dtype=torch.int32))

    def test_an_output_of_another_type(self, weights):
        self.refused("out: ", torch.zeros(2, 48), weights, out=torch.zeros(2, 48).half())

    def test_a_gate_without_its_logits(self, weights):
        ids = torch.zeros(1, 3, dtype=torch.int32)
        with pytest.raises(ConfigError, match="shared_logits"):
            moe.experts(torch.zeros(1, 48), torch.zeros(1, 3), ids, weights)

    def test_a_plan_made_without_the_shared_expert(self, weights):
        plan = moe.plan(torch.zeros(1, 3, dtype=torch.int32), 11, block_m=1)
        with pytest.raises(ConfigError, match=r"plan\.has_shared=False"):
            moe.gate_up(torch.zeros(1, 48), weights.gate_up_proj, plan, shared=weights.shared)
        with pytest.raises(ConfigError, match=r"plan\.has_shared=False"):
            moe.down(torch.zeros(3, 24), weights.down_proj, plan, shared=weights.shared)
