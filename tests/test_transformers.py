"""transformers' models on our kernels give the loss, gradients, logits and tokens of its own
functions, on small random models."""

import copy
import importlib
from statistics import geometric_mean

import pytest
import torch
from torch import nn

pytest.importorskip("transformers", reason="needs the package transformers")

import transformers
from transformers.models.mamba.modeling_mamba import MambaOutput

import selective_scan.integrations.transformers as integration
from selective_scan import _layer_stack

transformers.logging.set_verbosity_error()
KINDS = tuple(integration._MIXERS)
# The name of a cache in Mamba's models, as an argument and in their results.
MAMBA_CACHE = "cache" if hasattr(MambaOutput, "cache") else "cache_params"  # until 5.24
SIZES = {"hidden_size": 32, "vocab_size": 64, "pad_token_id": 0, "eos_token_id": None}
PLAIN = {**SIZES, "state_size": 8, "num_hidden_layers": 2}
HYBRID = {
    **SIZES,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 32,
    "mamba_d_state": 8,
    "mamba_dt_rank": 4,
    "num_hidden_layers": 4,
}
JAMBA = {
    "num_hidden_layers": 3,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "num_experts": 2,
    "num_experts_per_tok": 2,  # with fewer, rounding might send a token to another one
}
CONFIGS = {
    "mamba": ("Mamba", PLAIN),
    "falcon_mamba": ("FalconMamba", PLAIN),
    "jamba": ("Jamba", HYBRID | JAMBA | {"experts_implementation": "eager"}),
    "zamba": ("Zamba", HYBRID | {"attn_layer_period": 1, "attn_layer_offset": 0}),
}


def make(kind, device, dtype=torch.float32, **changes):
    """Returns a model whose weights are large enough for every part of it to matter."""
    name, options = CONFIGS[kind]
    config = getattr(transformers, f"{name}Config")(**options | changes)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.5)
            elif parameter.dim() > 1 and "A_log" not in name:
                parameter.normal_(std=0.7 * parameter.shape[-1] ** -0.5)
    return model.to(device, dtype).eval()


def draw(device, batch=2, seqlen=20, padding=0):
    """Returns tokens and, with padding, a mask of so many first steps of all rows but the first."""
    tokens = torch.randint(1, SIZES["vocab_size"], (batch, seqlen), device=device)
    if padding == 0:
        return {"input_ids": tokens}
    mask = torch.ones_like(tokens)
    mask[1:, :padding] = 0
    return {"input_ids": tokens * mask, "attention_mask": mask}


def solve(model, inputs):
    """Returns the loss, the logits of tokens that are not padding, and every gradient."""
    model.zero_grad()
    tokens, mask = inputs["input_ids"], inputs.get("attention_mask")
    is_token = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask.bool()
    result = model(**inputs, labels=tokens.where(is_token, -100), use_cache=False)
    result.loss.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return {"loss": result.loss.detach(), "logits": result.logits.detach()[is_token], **gradients}


def errors(actual, expected):
    assert actual.keys() == expected.keys()
    return {
        name: ((actual[name].double() - value.double()).norm() / value.double().norm()).item()
        for name, value in expected.items()
        if value.any()
    }


def geometric_means(draws):
    """Returns the means of the named errors, over the draws that have them."""
    names = {name for errors in draws for name in errors}
    return {
        name: geometric_mean(max(errors[name], 1e-12) for errors in draws if name in errors)
        for name in names
    }


def assert_as_exact(problems, rounding):
    """Asserts that results are as close to those of float64 as transformers' own, up to a rounding
    and a factor, in the mean over several models with inputs. If the terms of an output cancel, the
    rounding of a single draw may be tens of times as large as usual, for either of the two."""
    ours, own = [], []
    for model, inputs in problems:
        exact = solve(copy.deepcopy(model).double(), inputs)
        own.append(errors(solve(model, inputs), exact))
        with integration.enable():
            ours.append(errors(solve(model, inputs), exact))
    limits = geometric_means(own)
    for name, error in geometric_means(ours).items():
        assert error <= rounding + 3 * limits[name], (name, error, limits[name])


def assert_near(actual, expected, rounding=1e-5):
    for name, error in errors(actual, expected).items():
        assert error <= rounding, (name, error)


@pytest.fixture(autouse=True)
def nothing_left():
    yield
    assert not integration._ENABLED


# --- one pass -------------------------------------------------------------------------------------


@pytest.mark.parametrize("padding", [0, 5])
@pytest.mark.parametrize("is_training", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_loss_logits_and_gradients(kind, is_training, padding, device):
    problems = [
        (make(kind, device).train(is_training), draw(device, padding=padding)) for _ in range(3)
    ]
    assert_as_exact(problems, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16(kind, device):
    problems = [(make(kind, device, torch.bfloat16), draw(device, padding=5)) for _ in range(8)]
    assert_as_exact(problems, 0.02)


def test_a_layer_is_one_node(device):
    mixer, x = make("mamba", device).backbone.layers[0].mixer, torch.randn(2, 9, 32, device=device)
    with integration.enable():
        assert type(mixer(x).grad_fn).__name__ == "mamba_innerBackward"
        masked = mixer(x, attention_mask=torch.ones(2, 9, device=device))
        assert type(masked.grad_fn).__name__ != "mamba_innerBackward"


@pytest.fixture
def stacks(monkeypatch):
    """Returns the dtypes of all outputs that several layers made as one operator."""
    run, made = _layer_stack._run, []

    def spy(*arguments, **options):
        results = run(*arguments, **options)
        made.append(results[0].dtype)
        return results

    monkeypatch.setattr(_layer_stack, "_run", spy)
    return made


@pytest.mark.parametrize("residual_in_fp32", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, "autocast"], ids=str)
@pytest.mark.parametrize("has_mask", [False, True])
def test_several_layers_are_one_operator(has_mask, dtype, residual_in_fp32, device, stacks):
    inputs = draw(device)
    if has_mask:
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    is_half = dtype != torch.float32
    options = {"residual_in_fp32": residual_in_fp32, "num_hidden_layers": 3}
    weights = torch.float32 if dtype == "autocast" else dtype
    model = make("mamba", device, weights, **options).train()
    exact = solve(copy.deepcopy(model).double(), inputs)
    with torch.autocast(device, torch.bfloat16, enabled=dtype == "autocast"):
        own = model(**inputs).logits.dtype, model.backbone(**inputs).last_hidden_state.dtype
        with integration.enable():
            assert (model(**inputs).logits.dtype, model.backbone(**inputs)[0].dtype) == own
            assert stacks == [own[1]] * 2
            assert_near(solve(model, inputs), exact, 0.1 if is_half else 2e-5)
    assert len(stacks) == 3


@pytest.mark.parametrize("change", ["padding", "checkpointing", "states", "cache", "tuple", "hook"])
def test_other_calls_go_layer_by_layer(change, device, stacks):
    model, inputs, options = make("mamba", device).train(), draw(device), {}
    if change == "padding":
        inputs = draw(device, padding=3)
    elif change == "checkpointing":
        model.gradient_checkpointing_enable()
    elif change == "hook":
        model.backbone.layers[1].mixer.register_forward_hook(lambda *_: None)
    else:
        name = {"states": "output_hidden_states", "cache": "use_cache", "tuple": "return_dict"}
        options[name[change]] = change != "tuple"
    expected = model.backbone(**inputs, **options)[0]
    with integration.enable():
        torch.testing.assert_close(model.backbone(**inputs, **options)[0], expected)
        assert not stacks
        by_embeddings = {"inputs_embeds": model.backbone.embeddings(inputs.pop("input_ids"))}
        actual = model.backbone(**by_embeddings, **inputs, **options)[0]
    torch.testing.assert_close(actual, expected)
    assert not stacks


def test_embeddings_in_place_of_tokens(device, stacks):
    model, tokens = make("mamba", device), draw(device)["input_ids"]
    embeddings = model.backbone.embeddings(tokens)
    expected = model(inputs_embeds=embeddings, use_cache=False).logits
    with integration.enable():
        actual = model(inputs_embeds=embeddings, use_cache=False).logits
        with pytest.raises(ValueError, match="exactly one of"):
            model(tokens, inputs_embeds=embeddings, use_cache=False)
        with pytest.raises(ValueError, match="exactly one of"):
            model(use_cache=False, attention_mask=torch.ones_like(tokens))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    assert len(stacks) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_gradient_checkpointing(kind, device):
    model, inputs = make(kind, device).train(), draw(device)
    with integration.enable():
        expected = solve(model, inputs)
        model.gradient_checkpointing_enable()
        assert_near(solve(model, inputs), expected)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_model(kind, device):
    model, inputs = make(kind, device).train(), draw(device)
    with integration.enable():
        expected = solve(model, inputs)
        # The hybrids' experts and attention masks cause graph breaks themselves.
        model.compile(backend="aot_eager", fullgraph=kind in ("mamba", "falcon_mamba"))
        assert_near(solve(model, inputs), expected)


@pytest.mark.parametrize(
    "change", [{"hidden_act": "gelu"}, {"conv_kernel": 9}, {"conv_kernel": 1}], ids=str
)
def test_what_our_kernels_do_not_compute_is_left_to_transformers(change, device):
    model, inputs = make("mamba", device, **change).train(), draw(device)
    expected = solve(model, inputs)
    with integration.enable():
        assert_near(solve(model, inputs), expected)
        generated = model.generate(**inputs, max_new_tokens=4, do_sample=False)
    assert torch.equal(generated, model.generate(**inputs, max_new_tokens=4, do_sample=False))


def test_packed_sequences_are_left_to_transformers():
    """Its own convolution in PyTorch does not separate them, but one of another package does."""
    given = []
    convolve = integration._convolve(lambda *own, **others: given.append(others))
    x, weight, seq_idx = torch.randn(1, 4, 6), torch.randn(4, 3), torch.zeros(1, 6).int()
    assert convolve(x, weight, None, "silu", seq_idx=None).shape == x.shape
    assert given == []
    convolve(x, weight, None, "silu", seq_idx=seq_idx)
    assert given == [{"seq_idx": seq_idx}]


@pytest.mark.parametrize("kind", ["mamba", "falcon_mamba"])
def test_the_operator_of_a_layer_of_mamba_ssm_is_not_called(kind, monkeypatch, device):
    """It ignores the padding of a mask, and models in training call it if it is installed."""
    calls = []
    module = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    monkeypatch.setattr(module, "mamba_inner_fn", lambda *_, **options: calls.append(kind))
    model, inputs = make(kind, device).train(), draw(device, padding=5)
    with integration.enable():
        solve(model, inputs)
        assert calls == []
    solve(model, inputs)
    assert len(calls) == 2


def test_what_hooks_and_adapters_do_counts(device):
    class Doubled(nn.Linear):
        def forward(self, rows):
            return 2 * super().forward(rows)

    model, inputs = make("mamba", device).train(), draw(device)
    first, second = (layer.mixer for layer in model.backbone.layers)
    first.out_proj.__class__ = Doubled
    second.x_proj.register_forward_hook(lambda module, arguments, result: 3 * result)
    expected = solve(model, inputs)
    with integration.enable():
        assert_near(solve(model, inputs), expected)


@pytest.mark.parametrize("part", ["in_proj", "x_proj", "dt_proj"])
@pytest.mark.parametrize("kind", ["mamba", "falcon_mamba", "jamba"])
def test_adapters_of_peft(kind, part, device):
    """Adapters act as in transformers' own layers, which read dt_proj's weights directly."""
    peft = pytest.importorskip("peft", reason="needs the package peft")
    problems = [(make(kind, device).train(), draw(device)) for _ in range(3)]
    for model, _ in problems:
        peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=[part]), model)
        model.requires_grad_()  # peft leaves only the adapters trainable
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.3)
    assert_as_exact(problems, 1e-5)


def test_hooks_for_all_modules_see_what_transformers_calls(device):
    model, inputs = make("mamba", device), draw(device)

    def called():
        seen = []
        handle = nn.modules.module.register_module_forward_hook(lambda part, *_: seen.append(part))
        with handle, torch.no_grad():
            model(**inputs)
        return [part for part in seen if isinstance(part, nn.Linear)]

    expected = called()
    with integration.enable():
        assert called() == expected
    assert model.backbone.layers[0].mixer.x_proj in expected
