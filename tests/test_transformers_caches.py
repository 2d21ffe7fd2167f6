"""transformers' models go on from their caches on our kernels, and generate the same tokens."""

import copy

import pytest
import torch

from opchecks import Ops

pytest.importorskip("transformers", reason="needs the package transformers")

import transformers
from torch import nn

import selective_scan.integrations.transformers as integration
from selective_scan import _layer_stack
from test_transformers import (
    KINDS,
    MAMBA_CACHE,
    assert_near,
    draw,
    errors,
    make,
    nothing_left,  # noqa: F401, a fixture of every test
    solve,
)


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


def assert_alike(actual, own, model, run):
    """Asserts that our results are transformers' own, or in half precision as close as those to the
    results of float32, which `run` returns for a model. The rounding of a single draw may be
    several times as large as usual, for either of the two."""
    if model.dtype == torch.float32:
        assert_near(actual, own)
        return
    exact = run(copy.deepcopy(model).float())
    limit = 1e-2 + 5 * max(errors(own, exact).values())
    for name, error in errors(actual, exact).items():
        assert error <= limit, (name, error, limit)


@pytest.fixture
def stacks(monkeypatch) -> list[int]:
    """Returns the number of steps of each op of several layers."""
    run, ran = _layer_stack._run, []

    def spy(options, x, *others, **states):
        ran.append(x.shape[1])
        return run(options, x, *others, **states)

    monkeypatch.setattr(_layer_stack, "_run", spy)
    return ran


@pytest.mark.parametrize("has_mask", [False, True])
@pytest.mark.parametrize("kind", ["mamba", "falcon_mamba"])
def test_a_prompt_is_one_operator(kind, has_mask, device, stacks):
    model, inputs = make(kind, device), draw(device)
    if has_mask:
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])

    def run():
        with torch.no_grad():
            result = model(**inputs, use_cache=True)
        return {"logits": result.logits, **states(result[MAMBA_CACHE])}

    expected = run()
    with integration.enable():
        assert_near(run(), expected)
    assert stacks == [20]


@pytest.mark.parametrize("kind", ["mamba", "falcon_mamba"])
def test_tokens_of_many_rows_are_one_operator(kind, device, stacks):
    model, tokens = make(kind, device), draw(device, batch=70, seqlen=9)["input_ids"]
    expected = advance(model, tokens.split([6, 1, 1, 1], dim=1))
    with integration.enable():
        assert_near(advance(model, tokens.split([6, 1, 1, 1], dim=1)), expected)
    assert stacks == [6, 1, 1, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("residual_in_fp32", [False, True])
def test_falcon_mamba_without_a_cache(residual_in_fp32, dtype, device, stacks):
    """Also after a change of what was inspected: an inner norm's eps, and a hook on one."""
    model = make("falcon_mamba", device, dtype, residual_in_fp32=residual_in_fp32)
    inputs = draw(device)

    def run(model=model):
        return {"logits": model(**inputs, use_cache=False).logits}

    norm = model.backbone.layers[1].mixer.b_layernorm
    with torch.no_grad():
        for count in (1, 2):
            expected = run()
            with integration.enable():
                actual = run()
            assert_alike(actual, expected, model, run)
            assert len(stacks) == count
            for layer in model.backbone.layers:
                for name in ("dt_layernorm", "b_layernorm", "c_layernorm"):
                    getattr(layer.mixer, name).eps = 3.0
        norm.register_forward_hook(lambda module, arguments, result: 3 * result)
        hooked = run()
        assert max(errors(hooked, expected).values()) > 0.01
        with integration.enable():
            actual = run()
        assert_alike(actual, hooked, model, run)
    assert stacks == 3 * [20]  # of both layers, of both layers, of the other layer alone


def test_falcon_mamba_with_gradients_goes_layer_by_layer(device, stacks):
    model, inputs = make("falcon_mamba", device).train(), draw(device)
    with integration.enable():
        solve(model, inputs)
        with torch.no_grad():
            model(**inputs, use_cache=False)
    assert len(stacks) == 1


def change_norms(model):
    for part in model.modules():
        if type(part).__name__ == "JambaRMSNorm":
            nn.init.uniform_(part.weight, 0.5, 1.5)
    return model


@pytest.mark.parametrize("rows", [2, 70])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_jambas_mixers_are_one_operator_each(dtype, rows, device, stacks):
    model = change_norms(make("jamba", device, dtype))
    tokens, sizes = draw(device, batch=rows, seqlen=9)["input_ids"], [6, 1, 1, 1]

    def run(model=model):
        return advance(model, tokens.split(sizes, dim=1))

    expected = run()
    with integration.enable():
        actual = run()
        assert stacks == [size for size in sizes for _ in range(2)]
        stacks.clear()
    assert_alike(actual, expected, model, run)
    with integration.enable():
        mixer = model.model.layers[0].mamba
        mixer.b_layernorm.register_forward_hook(lambda module, arguments, result: 2 * result)
        hooked = run()
        assert stacks == sizes  # of the other layer
    assert_alike(hooked, run(), model, run)
    assert errors(hooked, expected)["logits"] > 1e-3


def test_jambas_mixers_with_gradients_or_masks_run_by_parts(device, stacks):
    model = change_norms(make("jamba", device))
    with integration.enable():
        solve(model, draw(device))
        with torch.no_grad():
            model(**draw(device, padding=5))
        assert not stacks
        with torch.no_grad():
            model(**draw(device), use_cache=False)
    assert len(stacks) == 2


@pytest.mark.parametrize("fix_continuation", [False, True])
def test_a_mixer_alone_goes_on(fix_continuation, device, stacks):
    """A mixer that is called while a hook on another one keeps the model from one operator."""
    model, tokens = make("mamba", device), draw(device, seqlen=12)["input_ids"]
    model.backbone.layers[1].mixer.out_proj.register_forward_hook(lambda *_: None)
    with integration.enable(fix_continuation=fix_continuation):
        actual = advance(model, tokens.split([6, 5, 1], dim=1))
        whole = advance(model, tokens.split([12], dim=1))
    assert stacks == ([6, 5, 1, 12] if fix_continuation else [6, 1, 12])
    if fix_continuation:
        assert_near(actual, whole)
    else:
        assert_near(actual, advance(model, tokens.split([6, 5, 1], dim=1)))


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
    if kind in ("mamba", "falcon_mamba"):  # so that its token goes by parts, too
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
@pytest.mark.parametrize("kind", ["mamba", "falcon_mamba"])
def test_a_token_is_one_operator(kind, device):
    model, tokens = make(kind, device), draw(device, seqlen=9)["input_ids"]
    with integration.enable():
        assert ops_of_tokens(model, tokens)[0] == 2 * ["s6_step"]
        first, second = (layer.mixer for layer in model.backbone.layers)
        parts = [second, first.out_proj, model.backbone.norm_f]
        if kind == "falcon_mamba":
            parts.append(second.c_layernorm)
        for part in parts:
            with part.register_forward_pre_hook(lambda *_: None):
                assert "s6_step" not in ops_of_tokens(model, tokens)[0]
        names, result = ops_of_tokens(model, tokens, output_hidden_states=True)
        assert "s6_step" not in names
        assert len(result.hidden_states) == 3
        names, result = ops_of_tokens(model, tokens, return_dict=False)
        assert "s6_step" not in names
        assert isinstance(result, tuple)
    assert ops_of_tokens(model, tokens)[0] == []


def test_a_token_sees_another_eps_of_inner_norms(device):
    def run():
        model, cache = make("falcon_mamba", device), None
        results = []
        with torch.no_grad():
            for t, token in enumerate(tokens.split([6, 1, 1, 1, 1, 1], 1)):
                if t == 4:  # the step has been prepared
                    for layer in model.backbone.layers:
                        for name in ("dt_layernorm", "b_layernorm", "c_layernorm"):
                            getattr(layer.mixer, name).eps = 3.0
                result = model(token, use_cache=True, **{MAMBA_CACHE: cache})
                cache = result[MAMBA_CACHE]
                results.append(result.logits)
        return {"logits": torch.cat(results, 1)}

    tokens = draw(device, seqlen=11)["input_ids"]
    torch.manual_seed(0)
    expected = run()
    torch.manual_seed(0)
    with integration.enable():
        assert_near(run(), expected)


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


@pytest.mark.slow
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
