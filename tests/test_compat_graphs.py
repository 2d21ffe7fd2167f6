"""The CUDA graphs by which compat's models generate: when they are reused and captured again."""

import contextlib
from functools import partial

import pytest
import torch
from torch.nn.modules.module import register_module_forward_hook

from language_models import VOCAB, make_model, published_weights
from selective_scan.compat import generation
from test_compat_generation import LENGTH, PROMPT, make

pytestmark = pytest.mark.usefixtures("compat_modules")


def test_graphs_are_kept_while_they_fit(cuda_device):
    model, prompts = make(cuda_device)
    out = model.generate(prompts, LENGTH, cg=True)
    cache = model._decoding_cache
    assert torch.equal(model.generate(prompts[:, :3], LENGTH, cg=True)[:, :3], prompts[:, :3])
    assert torch.equal(model.generate(prompts, LENGTH, cg=True), out)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    assert torch.equal(model.generate(prompts, LENGTH, cg=True), model.generate(prompts, LENGTH))
    assert model._decoding_cache is cache
    assert torch.equal(
        model.generate(prompts[:2], LENGTH, cg=True), model.generate(prompts[:2], LENGTH)
    )
    assert model._decoding_cache is not cache


def test_graphs_are_made_anew_for_other_weights(cuda_device):
    model, prompts = make(cuda_device)
    model.generate(prompts, LENGTH, cg=True)
    cache = model._decoding_cache
    weight = model.backbone.layers[0].mixer.in_proj.weight
    model.backbone.layers[0].mixer.in_proj.weight = torch.nn.Parameter(3 * weight.detach())
    assert torch.equal(model.generate(prompts, LENGTH, cg=True), model.generate(prompts, LENGTH))
    assert model._decoding_cache is not cache


def test_graphs_under_autocast(cuda_device):
    model = make_model(cuda_device, torch.float32, published_weights())
    prompts = torch.randint(VOCAB, (2, PROMPT), device=cuda_device)
    teacher = torch.randint(VOCAB, (2, LENGTH), device=cuda_device)
    options = {"teacher_outputs": teacher, "output_scores": True, "return_dict_in_generate": True}
    model.generate(prompts, LENGTH, cg=True)
    for _ in range(2):
        with torch.autocast("cuda", torch.bfloat16):
            eager = model.generate(prompts, LENGTH, **options)
        with torch.autocast("cuda", torch.bfloat16):
            graph = model.generate(prompts, LENGTH, cg=True, **options)
        torch.testing.assert_close(graph.scores, eager.scores)


def test_graphs_of_several_tokens_are_not_mambas(cuda_device):
    """A layer continues from its states by single tokens, so larger graphs are refused."""
    from mamba_ssm.utils.generation import update_graph_cache

    model, _ = make(cuda_device)
    with pytest.raises(ValueError, match="hidden_states must be one step"):
        update_graph_cache(model, None, 2, PROMPT, LENGTH, decoding_seqlens=(2,))


def test_a_quantized_weight_is_known_by_its_parts():
    from torch.testing._internal.two_tensor import TwoTensor

    from selective_scan.compat._called import addresses

    numbers, scale = torch.randn(3, 3), torch.randn(3, 3)
    assert list(addresses(TwoTensor(numbers, scale))) == [numbers.data_ptr(), scale.data_ptr()]
    assert list(addresses(scale)) == [scale.data_ptr()]


@pytest.fixture
def captures(monkeypatch) -> list[tuple[int, int]]:
    """The shapes of the calls that would be captured; needs no GPU and captures no graphs."""
    calls = []

    def capture(model, params, shape, device, n_warmups):
        calls.append(shape)
        model(torch.zeros(shape, dtype=torch.long), inference_params=params)

    monkeypatch.setattr(generation, "_capture", capture)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    return calls


def switch_off(model):
    """Switches an adapter off as peft's disable_adapter does."""
    model.backbone.layers[1].mixer.in_proj._disable_adapters = True


def scale(model):
    model.backbone.layers[1].mixer.in_proj.scaling["default"] = 0.5


def hook(model):
    model.backbone.norm_f.register_forward_hook(lambda module, given, out: 2 * out)


def replace(model):
    model.backbone.layers[0].mixer.out_proj.forward = lambda hidden: hidden[..., ::2]


def coarsen(model):
    model.backbone.norm_f.eps = 0.5


@pytest.mark.parametrize("change", [switch_off, scale, hook, replace, coarsen])
def test_graphs_are_made_anew_for_what_no_tensor_tells(change, captures):
    model, _ = make()
    in_proj = model.backbone.layers[1].mixer.in_proj
    in_proj._disable_adapters, in_proj.scaling, in_proj.names = False, {"default": 1.0}, {"default"}
    update = partial(generation.update_graph_cache, model, batch_size=3, seqlen_og=4, max_seqlen=9)
    first = update(cache=None)
    model._decoding_cache = first
    model.generate(torch.zeros(3, 4, dtype=torch.long), 6)
    assert update(cache=first) is first
    assert len(captures) == 1
    change(model)
    second = update(cache=first)
    assert second is not first
    assert update(cache=second) is second
    assert len(captures) == 2


class Recorded:
    """Replaces a CUDA graph; a replay runs the call."""

    def __init__(self, model, params, shape):
        self.model, self.params = model, params
        self.tokens, self.position_ids = torch.zeros(2, *shape, dtype=torch.long)
        self.logits = torch.empty(*shape, model.lm_head.out_features, dtype=torch.float64)

    def replay(self):
        self.params.seqlen_offset = max(1, self.params.seqlen_offset)
        self.logits.copy_(
            self.model(
                self.tokens, position_ids=self.position_ids, inference_params=self.params
            ).logits
        )


def test_a_loop_of_its_own_runs_graphs(monkeypatch):
    """Loops that were copied from upstream's decode can run the graphs."""
    from mamba_ssm.utils.generation import sample, update_graph_cache

    recorded = []

    def capture(model, params, shape, device, n_warmups):
        recorded.append(it := Recorded(model, params, shape))
        return generation._Graph(it, it.tokens, it.position_ids, it.logits)

    monkeypatch.setattr(generation, "_capture", capture)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    model, prompts = make()
    batch = len(prompts)
    model._decoding_cache = update_graph_cache(model, None, batch, PROMPT, LENGTH)
    params = model._decoding_cache.inference_params
    assert params.seqlen_offset == 0
    sequences = [prompts]
    with torch.inference_mode():
        while params.seqlen_offset < LENGTH - 1:
            newest = sequences[-1]
            if params.seqlen_offset == 0:
                logits = model(newest, inference_params=params, num_last_tokens=1).logits
            else:
                position_ids = torch.full((batch, 1), params.seqlen_offset)
                logits = model._decoding_cache.run(newest, position_ids, params.seqlen_offset)
                assert torch.equal(recorded[0].position_ids, position_ids)
            params.seqlen_offset += newest.shape[1]
            sequences.append(sample(logits.squeeze(1)).unsqueeze(1))
    assert torch.equal(torch.cat(sequences, 1), model.generate(prompts, LENGTH))


def test_graphs_are_made_anew_for_longer_sequences(captures):
    """The states of a model with attention have room for a fixed number of tokens."""
    model, _ = make()
    update = partial(generation.update_graph_cache, model, batch_size=3, seqlen_og=4)
    first = update(cache=None, max_seqlen=9)
    first.inference_params.reset(7, 3)
    assert update(cache=first, max_seqlen=9) is update(cache=first, max_seqlen=8) is first
    assert update(cache=first, max_seqlen=10) is not first


def test_graphs_are_made_anew_for_a_hook_of_all_modules(captures):
    model, _ = make()
    update = partial(generation.update_graph_cache, model, batch_size=3, seqlen_og=4, max_seqlen=9)
    first = update(cache=None)
    with register_module_forward_hook(lambda module, given, out: None):
        assert update(cache=first) is not first
    assert update(cache=first) is first
