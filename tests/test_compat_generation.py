"""Generation by mamba_ssm's import paths, against the model's results for whole sequences."""

import copy
import math
import pickle
import time
from functools import partial

import pytest
import torch

from language_models import VOCAB, make_model, published_weights, reference_logits
from layers import copies_of
from opchecks import Ops
from selective_scan.compat.generation import DecodingCache, InferenceParams

pytestmark = pytest.mark.usefixtures("compat_modules")

PROMPT, LENGTH = 7, 16


def make(device="cpu", batch=3) -> tuple[torch.nn.Module, torch.Tensor]:
    """Returns a model and prompts, in float64, so that no two logits are equal up to rounding."""
    model = make_model(device, torch.float64, published_weights())
    return model, torch.randint(VOCAB, (batch, PROMPT), device=device)


def logits_of(model: torch.nn.Module, sequences: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(sequences).logits


def scored(model: torch.nn.Module, prompts: torch.Tensor, **options) -> tuple[torch.Tensor, ...]:
    """Returns the generated sequences, their scores, and the logits of whole sequences."""
    options |= {"output_scores": True, "return_dict_in_generate": True}
    out = model.generate(prompts, LENGTH, **options)
    logits = logits_of(model, out.sequences)[:, PROMPT - 1 : -1]
    return out.sequences, torch.stack(out.scores, 1), logits


@pytest.fixture(params=[False, True], ids=["", "cg"])
def cg(request) -> bool:
    """Requests CUDA graphs or not; a CPU ignores the request."""
    return request.param


# --- greedy ---------------------------------------------------------------------------------------


def test_greedy_tokens_are_the_likeliest_of_the_whole(device, cg):
    model, prompts = make(device)
    out = model.generate(prompts, LENGTH, cg=cg)
    assert out.shape == (3, LENGTH)
    assert out.dtype == prompts.dtype
    assert torch.equal(out[:, :PROMPT], prompts)
    logits = logits_of(model, out)
    assert torch.equal(out[:, PROMPT:], logits[:, PROMPT - 1 : -1].argmax(-1))
    weights = {name: weight.cpu() for name, weight in model.state_dict().items()}
    expected = reference_logits(weights, out.cpu())
    torch.testing.assert_close(logits.cpu(), expected, rtol=1e-9, atol=1e-9)
    alone = [model.generate(prompt[None], LENGTH, cg=cg) for prompt in prompts]
    assert torch.equal(torch.cat(alone), out)


@pytest.mark.parametrize("in_fp32", [False, True], ids=["", "residual_in_fp32"])
@pytest.mark.parametrize("fused", [False, True], ids=["", "fused_add_norm"])
def test_a_token_is_one_operator(fused, in_fp32):
    weights = published_weights()
    model = make_model(
        "cpu", torch.float64, weights, fused_add_norm=fused, residual_in_fp32=in_fp32
    )
    prompts = torch.randint(VOCAB, (3, PROMPT))
    with Ops() as ops:
        out = model.generate(prompts, LENGTH, output_scores=True, return_dict_in_generate=True)
    tokens = LENGTH - PROMPT - 1  # the prompt gives the first one
    assert ops.names[-tokens:] == tokens * ["s6_step"]
    assert "s6_step" not in ops.names[:-tokens]
    expected = logits_of(model, out.sequences)[:, PROMPT - 1 : -1]
    scores = torch.stack(out.scores, dim=1)
    torch.testing.assert_close(scores, expected, rtol=1e-9, atol=1e-9)


PARTS = {
    "backbone": lambda model: model.backbone,
    "embedding": lambda model: model.backbone.embedding,
    "block": lambda model: model.backbone.layers[0],
    "mixer": lambda model: model.backbone.layers[0].mixer,
    "in_proj": lambda model: model.backbone.layers[0].mixer.in_proj,
    "norm": lambda model: model.backbone.layers[0].norm,
    "norm_f": lambda model: model.backbone.norm_f,
    "lm_head": lambda model: model.lm_head,
}


@pytest.mark.parametrize("part", PARTS)
def test_a_part_with_a_hook_is_called_for_every_token(part):
    options = {"fused_add_norm": False, "residual_in_fp32": False}  # a fused norm is not called
    model = make_model("cpu", torch.float64, published_weights(), **options)
    prompts = torch.randint(VOCAB, (3, PROMPT))
    plain = model.generate(prompts, LENGTH)
    calls = []
    PARTS[part](model).register_forward_hook(lambda *_: calls.append(part))
    assert torch.equal(model.generate(prompts, LENGTH), plain)
    assert len(calls) == LENGTH - PROMPT


@pytest.mark.parametrize("change", ["MLP", "layer norm", "scale", "slow path"])
def test_what_the_operator_has_not_goes_through_the_modules(change):
    options = {"MLP": {"d_intermediate": 24}, "layer norm": {"rms_norm": False}}.get(change, {})
    model = make_model("cpu", torch.float64, **options)
    for block in model.backbone.layers:
        if change == "scale":
            block.mixer.init_layer_scale = 0.5
            block.mixer.gamma = torch.nn.Parameter(torch.rand(block.mixer.d_model))
        block.mixer.use_fast_path = change != "slow path"
    _, scores, expected = scored(model, torch.randint(VOCAB, (2, PROMPT)))
    torch.testing.assert_close(scores, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_are_the_logits_of_the_whole(device, cg, dtype):
    model = make_model(device, dtype, published_weights())
    prompts = torch.randint(VOCAB, (2, PROMPT), device=device)
    sequences, scores, expected = scored(model, prompts, cg=cg)
    rounding = 1e-4 if dtype == torch.float32 else 0.1
    assert scores.shape[1] == LENGTH - PROMPT
    assert (scores - expected).norm() <= rounding * expected.norm()
    assert torch.equal(sequences[:, PROMPT:], scores.argmax(-1))


def test_what_is_returned(device):
    from mamba_ssm.utils.generation import decode

    model, prompts = make(device)
    out = model.generate(prompts, LENGTH, return_dict_in_generate=True)
    assert out.scores is None
    assert torch.equal(out.sequences, decode(prompts, model, LENGTH).sequences)
    assert torch.equal(model.generate(prompts.int(), LENGTH), out.sequences.int())
    # At least one token is generated, as by mamba_ssm.
    assert model.generate(prompts, 3).shape == (3, PROMPT + 1)
    # The model can be trained on generated sequences, which are no inference tensors.
    model(out.sequences).logits.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_padding_of_the_vocabulary_is_cut(device, cg):
    model, prompts = make(device)
    sequences, scores, expected = scored(model, prompts, vocab_size=5, cg=cg)
    assert scores[:, 0].shape == (3, 5)
    assert torch.equal(sequences[:, PROMPT:], expected[..., :5].argmax(-1))


@pytest.mark.parametrize("taught", [PROMPT - 2, PROMPT + 4, LENGTH + 3])
def test_a_teacher_is_followed(device, cg, taught):
    model, prompts = make(device)
    teacher = torch.randint(VOCAB, (3, taught), device=device)
    sequences, scores, expected = scored(model, prompts, teacher_outputs=teacher, cg=cg)
    free = max(taught, PROMPT)
    assert sequences.shape == (3, LENGTH)
    assert torch.equal(sequences[:, PROMPT:taught], teacher[:, PROMPT:LENGTH])
    torch.testing.assert_close(scores, expected, rtol=1e-9, atol=1e-9)
    assert torch.equal(sequences[:, free:], expected[:, free - PROMPT :].argmax(-1))


def test_the_end_is_where_all_rows_end(device, cg):
    model, prompts = make(device)
    whole = model.generate(prompts, LENGTH)
    eos = whole[0, PROMPT + 2].item()
    first = PROMPT + whole[0, PROMPT:].tolist().index(eos)
    out = model.generate(prompts[:1], LENGTH, eos_token_id=eos, cg=cg)
    assert torch.equal(out, whole[:1, : first + 1])
    # With several rows, generation ends once the newest tokens of all of them are the end.
    same = prompts[:1].expand(3, -1)
    assert torch.equal(model.generate(same, LENGTH, eos_token_id=eos, cg=cg), out.expand(3, -1))
    teacher = whole.clone()
    teacher[:2, PROMPT + 1], teacher[2, PROMPT + 1] = eos, (eos + 1) % VOCAB
    teacher[:, PROMPT + 5] = eos
    out = model.generate(prompts, LENGTH, eos_token_id=eos, teacher_outputs=teacher, cg=cg)
    ends = (teacher[:, PROMPT:] == eos).all(0).tolist().index(True)
    assert torch.equal(out, teacher[:, : PROMPT + ends + 1])
    # An end token in the prompt does not count.
    prompts[:, -1] = eos
    assert model.generate(prompts, PROMPT + 1, eos_token_id=eos).shape[1] == PROMPT + 1


def test_repetition_penalty(device, cg):
    model, prompts = make(device)
    penalty = 1.7
    sequences, scores, expected = scored(model, prompts, repetition_penalty=penalty, cg=cg)
    torch.testing.assert_close(scores, expected, rtol=1e-9, atol=1e-9)
    for row, logits in zip(sequences.tolist(), expected.tolist(), strict=True):
        for end, scores in enumerate(logits, start=PROMPT):
            for token in set(row[:end]):
                scores[token] *= penalty if scores[token] < 0 else 1 / penalty
            assert row[end] == scores.index(max(scores))


@pytest.mark.parametrize("filtering", ["top_k", "top_p", "min_p"])
def test_filterings_change_the_logits(device, filtering):
    from mamba_ssm.utils import generation

    logits = torch.randn(3, 20, dtype=torch.float64, device=device)
    limit = 5 if filtering == "top_k" else 0.6
    modify = getattr(generation, f"modify_logits_for_{filtering}_filtering")
    changed = logits.clone()
    assert modify(changed, limit) is None
    for row, before in zip(changed.tolist(), logits.tolist(), strict=True):
        down = sorted(before, reverse=True)
        if filtering == "top_k":
            least = down[4]
        elif filtering == "top_p":
            shares = torch.tensor(down, dtype=torch.float64).softmax(0).cumsum(0).tolist()
            least = down[[share >= limit for share in shares].index(True)]
        else:
            least = limit
        assert row == [logit if logit >= least else -math.inf for logit in before]
    if filtering != "top_k":
        for no_limit in (0.0, 1.0):
            modify(same := logits.clone(), no_limit)
            assert torch.equal(same, logits)


@pytest.mark.parametrize("penalty", [1.0, 1.7])
def test_a_loop_of_its_own_takes_all_names_of_the_module(device, penalty):
    """A custom loop finds all names in the module, like ProtMamba's, which relies on names that
    upstream's module imports for its own use."""
    names: dict = {}
    exec("from mamba_ssm.utils.generation import *", names)
    assert names["torch"] is torch
    assert {"dataclass", "field", "namedtuple", "partial", "Optional", "TextStreamer"} < set(names)
    model, prompts = make(device)
    params = names["InferenceParams"](max_seqlen=LENGTH, max_batch_size=len(prompts))
    sequences, newest, scores = prompts, prompts, []
    with torch.inference_mode():
        while sequences.shape[1] < LENGTH:
            logits = model(newest, inference_params=params, num_last_tokens=1).logits[:, -1]
            scores.append(logits)
            params.seqlen_offset += newest.shape[1]
            penalized = logits.clone()
            changed = names["modify_logit_for_repetition_penalty"](penalized, sequences, penalty)
            assert changed is penalized
            newest = names["sample"](changed)[:, None]
            sequences = torch.cat([sequences, newest], 1)
    output = names["GreedySearchDecoderOnlyOutput"](sequences=sequences, scores=tuple(scores))
    assert torch.equal(
        output.sequences, model.generate(prompts, LENGTH, repetition_penalty=penalty)
    )
    expected = logits_of(model, output.sequences)[:, PROMPT - 1 : -1]
    torch.testing.assert_close(torch.stack(output.scores, 1), expected, rtol=1e-9, atol=1e-9)
    output.scores = None
    for name in ("SampleDecoderOnlyOutput", "GenerateDecoderOnlyOutput"):
        assert names[name](sequences=sequences).scores is None
    assert names["time"] is time


@pytest.mark.parametrize("prompt", [1, 3, PROMPT])
def test_steps_with_inference_params_give_the_whole(device, prompt):
    from mamba_ssm.utils.generation import InferenceParams

    model, tokens = make(device)
    params = InferenceParams(max_seqlen=PROMPT, max_batch_size=3)
    for _ in range(2):  # the second time from the same states
        with torch.no_grad():
            parts = [model(tokens[:, :prompt], inference_params=params).logits]
            for position in range(prompt, PROMPT):
                params.seqlen_offset = position
                token = tokens[:, position : position + 1]
                parts.append(model(token, inference_params=params, num_last_tokens=1).logits)
        expected = logits_of(model, tokens)
        torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=1e-9, atol=1e-9)
        assert params.key_value_memory_dict.keys() == {0, 1, 2}
        params.reset(PROMPT, 3)
        assert params.seqlen_offset == 0
    with pytest.raises(ValueError, match="hidden_states must be of batch 3, as the states"):
        model(tokens[:2], inference_params=params)
    given = model.allocate_inference_cache(3, PROMPT)
    assert given.keys() == {0, 1, 2}
    for states, others in zip(given.values(), params.key_value_memory_dict.values(), strict=True):
        assert [state.shape for state in states] == [state.shape for state in others]


# --- sampling -------------------------------------------------------------------------------------


def left_over(logits: list[float], top_k: int, top_p: float, min_p: float, temperature: float):
    """Returns the probability of each token after the limits are applied."""
    weights = [math.exp(value / temperature) for value in logits]
    left = sorted(range(len(weights)), key=lambda token: -weights[token])
    if top_k > 0:
        left = left[:top_k]
    if 0 < top_p < 1:
        total, summed, kept = sum(weights[token] for token in left), 0.0, []
        for token in left:
            if summed < top_p * total:
                kept.append(token)
            summed += weights[token]
        left = kept
    left = [token for token in left if weights[token] >= min_p * weights[left[0]]]
    total = sum(weights[token] for token in left)
    return [weights[token] / total if token in left else 0.0 for token in range(len(weights))]


@pytest.mark.parametrize(
    "limits",
    [
        {"top_k": 0},
        {"top_k": -1, "top_p": 0.8},
        {"top_k": 4},
        {"top_k": 100},
        {"top_k": 0, "top_p": 0.6},
        {"top_k": 0, "top_p": 1e-9},
        {"top_k": 0, "min_p": 0.3},
        {"top_k": 0, "min_p": 1.0},
        {"top_k": 6, "top_p": 0.7, "min_p": 0.2, "temperature": 1.8},
        {"top_k": 0, "temperature": 0.4},
    ],
    ids=str,
)
def test_tokens_come_as_often_as_they_should(device, limits):
    from mamba_ssm.utils.generation import sample

    logits, draws = torch.randn(12, dtype=torch.float64), 20_000
    tokens = sample(logits.to(device).expand(draws, -1), **limits).cpu()
    assert tokens.shape == (draws,)
    defaults = {"top_k": 1, "top_p": 0.0, "min_p": 0.0, "temperature": 1.0}
    expected = torch.tensor(left_over(logits.tolist(), **defaults | limits))
    frequency = tokens.bincount(minlength=12) / draws
    assert not frequency[expected == 0].any()
    # Six standard deviations, which should never occur.
    allowed = 6 * (expected * (1 - expected) / draws).sqrt() + 1e-6
    assert ((frequency - expected).abs() <= allowed).all()


def test_rows_are_limited_each_by_itself(device):
    from mamba_ssm.utils.generation import sample

    logits = torch.tensor([[0.0, 9.0, 0.0, 0.0], [5.0, 5.0, 5.0, 5.0]], device=device).log1p()
    logits = logits.repeat(200, 1)
    for limits in ({"top_p": 0.5}, {"min_p": 0.5}):
        sure, open_ = sample(logits, 0, **limits).view(200, 2).unbind(1)
        assert (sure == 1).all()
        assert len(open_.unique()) >= 2


def test_a_seed_gives_the_same_tokens(device, cg):
    model, prompts = make(device)
    generate = partial(model.generate, prompts, LENGTH, top_k=0, temperature=2.0, cg=cg)
    outs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outs.append(generate())
    assert torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[0], outs[2])


def test_half_precision_logits_are_sampled(device):
    from mamba_ssm.utils.generation import sample

    logits = torch.zeros(50, 8, dtype=torch.bfloat16, device=device)
    assert sample(logits, top_k=3, top_p=0.9).shape == (50,)
    assert sample(logits - 100 * torch.arange(8, device=device), top_k=0).unique().tolist() == [0]


# --- other effects of a call ----------------------------------------------------------------------


class Listener:
    def __init__(self):
        self.calls = []

    def put(self, value):
        self.calls.append(value)

    def end(self):
        self.calls.append("end")


def test_streamer(device, cg):
    model, prompts = make(device)
    listener = Listener()
    out = model.generate(prompts, LENGTH, streamer=listener, cg=cg).cpu()
    assert listener.calls.pop() == "end"
    assert all(value.device.type == "cpu" for value in listener.calls)
    assert [value.shape[1] for value in listener.calls] == [PROMPT] + [1] * (LENGTH - PROMPT)
    assert torch.equal(torch.cat(listener.calls, 1), out)


def test_time_is_printed(device, capsys):
    model, prompts = make(device)
    model.generate(prompts, LENGTH)
    assert capsys.readouterr().out == ""
    model.generate(prompts, LENGTH, enable_timing=True)
    assert capsys.readouterr().out.startswith("Prompt processing + decoding time: ")


def tokens(batch: int) -> torch.Tensor:
    return torch.zeros(batch, PROMPT, dtype=torch.long)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": -2}, "top_k must be an integer of at least -1, got -2"),
        ({"top_k": 0, "top_p": 1.5}, r"top_p must be from 0 to 1, got 1\.5"),
        ({"top_k": 0, "min_p": -0.5}, r"min_p must be from 0 to 1, got -0\.5"),
        ({"top_k": 0, "temperature": 0.0}, "temperature must be a positive finite number"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be a positive finite number"),
        ({"vocab_size": 0}, "vocab_size must be an integer of at least 1 or None, got 0"),
        ({"eos_token_id": [1, 2]}, r"eos_token_id must be an integer or None, got \[1, 2\]"),
        ({"input_ids": [[1, 2]]}, r"input_ids must be a Tensor, got \[\[1, 2\]\]"),
        ({"input_ids": torch.ones(2, 3)}, r"input_ids must be of dtype int32 or int64, got torch"),
        ({"teacher_outputs": torch.zeros(3, 9)}, "teacher_outputs must be of dtype int32 or int64"),
        ({"max_length": 16.5}, r"max_length must be an integer of at least 0, got 16\.5"),
        ({"teacher_outputs": tokens(2)}, r"teacher_outputs must be \(batch, length\)"),
        ({"input_ids": torch.zeros(2, 0).long()}, r"input_ids must be \(batch, seqlen\)"),
    ],
)
def test_bad_arguments(options, message):
    model, prompts = make()
    with pytest.raises(ValueError, match=f"^selective_scan: {message}"):
        model.generate(**{"input_ids": prompts, "max_length": LENGTH} | options)


def test_any_model_generates():
    """A model is called with position_ids, and needs allocate_inference_cache only for graphs."""
    from mamba_ssm.utils.generation import GenerationMixin

    class Counter(torch.nn.Module, GenerationMixin):
        def forward(self, input_ids, position_ids=None, inference_params=None, num_last_tokens=0):
            assert inference_params.seqlen_offset == 0 or num_last_tokens == 1
            position = input_ids.shape[1] - 1 if position_ids is None else position_ids
            logits = torch.zeros(*input_ids.shape, 20)
            logits[:, -1] = torch.eye(20)[position].reshape(-1, 20)
            self.logits = logits[:, -num_last_tokens:]
            return self

    out = Counter().generate(torch.zeros(1, 3, dtype=torch.long), 8)
    assert out.tolist() == [[0, 0, 0, 2, 3, 4, 5, 6]]
    with pytest.raises(NotImplementedError, match="Counter must have allocate_inference_cache"):
        Counter().allocate_inference_cache(1, 8)


def test_a_model_that_has_generated_is_copied(device, cg):
    model, prompts = make(device)
    out = model.generate(prompts, LENGTH, cg=cg)
    for twin in copies_of(model):
        assert torch.equal(twin.generate(prompts, LENGTH, cg=cg), out)


def test_graphs_are_not_copied():
    params = InferenceParams(max_seqlen=LENGTH, max_batch_size=1)
    model, _ = make()
    model._decoding_cache = DecodingCache((), params, {1: lambda: "what no process can pickle"})
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert twin._decoding_cache is None
