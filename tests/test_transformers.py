"""transformers' models on our kernels give the loss, gradients, logits and tokens of its own
functions, on small random models."""

import copy
import importlib
from statistics import geometric_mean

import pytest
import torch
from torch import nn

from opchecks import Ops

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


@pytest.mark.parametrize("has_mask", [False, True])
def test_a_prompt_is_one_operator(has_mask, device, stacks):
    model, inputs = make("mamba", device), draw(device)
    if has_mask:
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])

    def run():
        with torch.no_grad():
            result = model(**inputs, use_cache=True)
        return {"logits": result.logits, **states(result[MAMBA_CACHE])}

    expected = run()
    with integration.enable():
        assert_near(run(), expected)
    assert len(stacks) == 1


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


@pytest.mark.parametrize(
    "kind", [KINDS[0], *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS[1:])]
)
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


# --- caches and generation ------------------------------------------------------------------------


def states(cache):
    """Returns the convolution's and the scan's state of each layer that has them."""
    layers = [layer for layer in cache.layers if hasattr(layer, "recurrent_states")]
    return {
        f"{number}.{name}": getattr(layer, name)[0]
        for number, layer in enumerate(layers)
        for name in ("conv_states", "recurrent_states")
    }


def advance(model, chunks, records_past=False):
    """Returns the logits of tokens that come in chunks, with a cache, and the cache's states."""
    cache, logits = transformers.DynamicCache(config=model.config), []
    if records_past:
        cache.activate_past_recording()
    name = (
        "cache_params"
        if "amba" in type(model).__name__[:11] and hasattr(model, "backbone")
        else "past_key_values"
    )
    with torch.no_grad():
        for number, chunk in enumerate(chunks):
            logits.append(model(chunk, use_cache=True, **{name: cache}).logits)
            if records_past and number == 0:
                cache.crop(0)  # keeps what the next token needs
    return {"logits": torch.cat(logits, 1), **states(cache)}


@pytest.mark.parametrize("sizes", [[12, 1, 1, 1, 1], [1, 1, 1]], ids=["many", "one"])
@pytest.mark.parametrize("kind", KINDS)
def test_steps_after_a_prompt(kind, sizes, device):
    model, tokens = make(kind, device), draw(device, seqlen=sum(sizes))["input_ids"]
    expected = advance(model, tokens.split(sizes, dim=1))
    with integration.enable():
        assert_near(advance(model, tokens.split(sizes, dim=1)), expected)


def test_a_cache_may_record_the_past(device):
    """Then its convolutions' states grow with every token."""
    model, tokens = make("mamba", device), draw(device, seqlen=9)["input_ids"]
    chunks = tokens.split([6, 1, 1, 1], dim=1)
    expected = advance(model, chunks, records_past=True)
    assert expected["0.conv_states"].shape[-1] > advance(model, chunks)["0.conv_states"].shape[-1]
    with integration.enable():
        assert_near(advance(model, chunks, records_past=True), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_all_scans_and_convolutions_are_ours(kind, device):
    model, tokens = make(kind, device), draw(device, seqlen=9)["input_ids"]
    mixers = [it for it in model.modules() if type(it).__name__ == integration._MIXERS[kind]]
    if kind == "mamba":  # so that its token goes by parts, too
        mixers[0].out_proj.register_forward_hook(lambda *_: None)
    with integration.enable(), Ops() as ops:
        advance(model, tokens.split([8, 1], dim=1))
    heads = getattr(mixers[0], "n_mamba_heads", 1)
    of_prompt = ["causal_conv1d_fwd", *heads * ["selective_scan_fwd"]]
    of_token = ["causal_conv1d_update", *heads * ["selective_state_update"]]
    assert ops.names == len(mixers) * of_prompt + len(mixers) * of_token


def ops_of_tokens(model, tokens, **options):
    """Returns the library's ops in two tokens after a prompt, and the second one's result."""
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        model(tokens[:, :-2], use_cache=True, **{MAMBA_CACHE: cache})
        with Ops() as ops:
            for token in tokens[:, -2:].split(1, 1):
                result = model(token, use_cache=True, **{MAMBA_CACHE: cache}, **options)
    return ops.names, result


@pytest.mark.usefixtures("step_kernel")
def test_a_token_is_one_operator(device):
    model, tokens = make("mamba", device), draw(device, seqlen=9)["input_ids"]
    with integration.enable():
        assert ops_of_tokens(model, tokens)[0] == 2 * ["s6_step"]
        first, second = (layer.mixer for layer in model.backbone.layers)
        for part in (second, first.out_proj, model.backbone.norm_f):
            with part.register_forward_pre_hook(lambda *_: None):
                assert "s6_step" not in ops_of_tokens(model, tokens)[0]
        names, result = ops_of_tokens(model, tokens, output_hidden_states=True)
        assert "s6_step" not in names
        assert len(result.hidden_states) == 3
        names, result = ops_of_tokens(model, tokens, return_dict=False)
        assert "s6_step" not in names
        assert isinstance(result, tuple)
    assert ops_of_tokens(model, tokens)[0] == []


def test_a_hook_sees_the_embeddings_of_a_token_once(device):
    """A hook on the embeddings is called once per token, also if the layers are called."""
    model, tokens = make("mamba", device), draw(device, seqlen=9)["input_ids"]
    model.backbone.layers[1].mixer.out_proj.register_forward_hook(lambda *_: None)
    seen = []
    model.backbone.embeddings.register_forward_hook(lambda *_: seen.append(1))
    with integration.enable():
        ops_of_tokens(model, tokens)
    assert len(seen) == 3  # a prompt and two tokens


def test_a_model_that_trains_hands_back_no_cache_unasked(device):
    model, tokens = make("mamba", device).backbone.train(), draw(device, seqlen=9)["input_ids"]
    with torch.no_grad(), integration.enable():
        cache = model(tokens, use_cache=True)[MAMBA_CACHE]
        for use_cache in (None, True):
            result = model(tokens[:, :1], use_cache=use_cache, **{MAMBA_CACHE: cache})
            assert (MAMBA_CACHE not in result) == (use_cache is None)


def test_tokens_go_on_from_copies_of_a_cache(device):
    """What is remembered about a cache does not apply to its copies."""
    model, tokens = make("mamba", device), draw(device, seqlen=12)["input_ids"]
    expected = advance(model, tokens.split([6, 1, 1, 1, 1, 1, 1], dim=1))["logits"]
    with integration.enable(), torch.no_grad():
        caches = [transformers.DynamicCache(config=model.config)]
        model(tokens[:, :6], use_cache=True, **{MAMBA_CACHE: caches[0]})
        for t in range(6, 12):
            caches.append(copy.deepcopy(caches[0]))
            for cache in caches[::-1]:
                token = tokens[:, t : t + 1]
                out = model(token, use_cache=True, **{MAMBA_CACHE: cache}).logits
                assert_near({"logits": out}, {"logits": expected[:, t : t + 1]})


@pytest.mark.parametrize("residual_in_fp32", [False, True])
def test_tokens_of_bfloat16(residual_in_fp32, device):
    model = make("mamba", device, torch.bfloat16, residual_in_fp32=residual_in_fp32)
    tokens = draw(device, seqlen=16)["input_ids"]
    chunks = tokens.split([12, 1, 1, 1, 1], dim=1)
    exact = advance(copy.deepcopy(model).double(), chunks)
    own = errors(advance(model, chunks), exact)
    with integration.enable():
        ours = errors(advance(model, chunks), exact)
        hidden = model.backbone(tokens[:, :3], use_cache=True)
        known = {MAMBA_CACHE: hidden[MAMBA_CACHE]}
        after = model.backbone(tokens[:, :1], use_cache=True, **known)
    assert after.last_hidden_state.dtype == hidden.last_hidden_state.dtype
    for name, error in ours.items():
        assert error <= 1e-2 + 3 * own[name], (name, error, own[name])


@pytest.mark.parametrize("is_fixed", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_continuation_of_several_tokens(kind, is_fixed, device):
    model, tokens = make(kind, device), draw(device, seqlen=20)["input_ids"]
    chunks = tokens.split([9, 7, 1, 3], dim=1)
    own, whole = advance(model, chunks), advance(model, [tokens])
    with integration.enable(fix_continuation=is_fixed):
        assert_near(advance(model, chunks), whole if is_fixed else own)
    assert errors(own, whole)["logits"] > 1e-3


@pytest.mark.parametrize(("beams", "length"), [(1, 64), (3, 8)])
@pytest.mark.parametrize("kind", KINDS)
def test_generation(kind, beams, length, device):
    model, inputs = make(kind, device), draw(device, seqlen=12, padding=5)
    options = {"max_new_tokens": length, "num_beams": beams, "do_sample": False}
    expected = model.generate(**inputs, **options)
    with integration.enable():
        assert torch.equal(model.generate(**inputs, **options), expected)
    assert expected.shape[1] == 12 + length


def test_steps_outside_of_no_grad(device):
    model, tokens = make("mamba", device), draw(device, seqlen=12)["input_ids"]
    with integration.enable(), torch.no_grad():
        expected = model(tokens, use_cache=False).logits[:, -2:]
    with integration.enable():
        cache = model(tokens[:, :-2], use_cache=True).cache_params
        logits = [
            model(t, cache_params=cache, use_cache=True).logits for t in tokens[:, -2:].split(1, 1)
        ]
    assert logits[-1].requires_grad
    assert_near({"logits": torch.cat(logits, 1).detach()}, {"logits": expected})


def test_trainer(tmp_path, device):
    pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate")
    model = make("mamba", device)
    rows = [
        {**row, "labels": row["input_ids"]}
        for row in (
            {name: value[0].cpu() for name, value in draw("cpu", 1).items()} for _ in range(20)
        )
    ]

    def losses(model):
        options = transformers.TrainingArguments(
            tmp_path, max_steps=10, logging_steps=1, per_device_train_batch_size=2, seed=1,
            learning_rate=1e-3, report_to="none", save_strategy="no", use_cpu=device == "cpu",
            disable_tqdm=True, dataloader_pin_memory=False,
        )  # fmt: skip
        trainer = transformers.Trainer(model, options, train_dataset=rows)
        trainer.train()
        return torch.tensor([entry["loss"] for entry in trainer.state.log_history[:-1]])

    expected = losses(copy.deepcopy(model))
    with integration.enable():
        actual = losses(model)
    assert actual.shape == (10,)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=0)
