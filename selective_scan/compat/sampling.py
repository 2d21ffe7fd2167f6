"""Samples a token, with the signatures of mamba_ssm's generation module, where a function called a
filtering changes its logits in place."""

from __future__ import annotations

import torch
from torch import Tensor

from .._discretization import at_least_single
from .._module_arguments import check_count, check_positive, refuse


def sample(
    logits: Tensor,
    top_k: int = 1,
    top_p: float = 0.0,
    min_p: float = 0.0,
    temperature: float = 1.0,
) -> Tensor:
    """Takes a token from each row: the likeliest one, or one drawn with PyTorch's generator.

    The filters are applied in the order of the arguments, each to the tokens that the previous one
    kept.

    Args:
        logits: (batch, vocab_size).
        top_k: keeps this number of likeliest tokens; 0 and -1 keep all. 1 takes the likeliest
            token, and the other arguments have no effect.
        top_p: keeps the fewest likeliest tokens whose total probability reaches this value; 0 and 1
            keep all.
        min_p: keeps the tokens with at least this fraction of the likeliest token's probability.
        temperature: divisor of the logits, applied before the filters.

    Returns:
        (batch,).

    Raises:
        ValueError: an argument is out of range.

    References:
        Holtzman et al., "The Curious Case of Neural Text Degeneration", 2019, arXiv:1904.09751;
        Nguyen et al., "Turning Up the Heat: Min-p Sampling", 2024, arXiv:2407.01082.

    Example:
        >>> import torch
        >>> from selective_scan.compat.sampling import sample
        >>> sample(torch.tensor([[0.0, 2.0, 1.0], [3.0, 1.0, 0.0]]))
        tensor([1, 0])
    """
    check_count("top_k", top_k, minimum=-1)
    if top_k == 1:
        return logits.argmax(-1)
    for name, value in {"top_p": top_p, "min_p": min_p}.items():
        if not 0 <= value <= 1:
            refuse(name, "from 0 to 1", value)
    check_positive("temperature", temperature)
    logits, tokens = logits.to(at_least_single(logits.dtype)) / temperature, None
    if top_k > 0:
        logits, tokens = logits.topk(min(top_k, logits.shape[-1]))
    modify_logits_for_top_p_filtering(logits, top_p)
    if min_p > 0:
        probability = logits.softmax(-1)
        is_rare = probability < min_p * probability.amax(-1, keepdim=True)
        logits = logits.masked_fill(is_rare, -torch.inf)
    choice = logits.softmax(-1).multinomial(1)
    return (choice if tokens is None else tokens.gather(-1, choice)).squeeze(-1)


def modify_logits_for_top_k_filtering(logits: Tensor, top_k: int) -> None:
    """Sets the logits of tokens that are less likely than a row's top_k likeliest ones to -inf."""
    logits.masked_fill_(logits < logits.topk(top_k).values[..., -1:], -torch.inf)


def modify_logits_for_top_p_filtering(logits: Tensor, top_p: float) -> None:
    """Keeps a row's fewest likeliest tokens whose total probability reaches top_p, and sets the
    other logits to -inf; 0 and 1 keep all."""
    if not 0 < top_p < 1:
        return
    logits_down, order = logits.sort(-1, descending=True)
    probability = logits_down.softmax(-1)
    # A token is removed if the likelier tokens already suffice; the first one is always kept.
    is_out = probability.cumsum(-1) - probability >= top_p
    is_out[..., 0] = False
    logits.masked_fill_(torch.empty_like(is_out).scatter_(-1, order, is_out), -torch.inf)


def modify_logits_for_min_p_filtering(logits: Tensor, min_p: float) -> None:
    """Sets logits below min_p to -inf; 0 and 1 keep all.

    As upstream, this compares min_p with the logits, while :func:`sample` compares it with
    probabilities.
    """
    if 0 < min_p < 1:
        logits.masked_fill_(logits < min_p, -torch.inf)


def modify_logit_for_repetition_penalty(
    logits: Tensor, prev_output_tokens: Tensor, repetition_penalty: float = 1.0
) -> Tensor:
    """Makes previous tokens less likely (arXiv:1909.05858).

    The positive ones of their logits are divided by the penalty, the negative ones multiplied.

    Returns:
        logits, which are changed in place.
    """
    tokens = prev_output_tokens.long()
    there = logits.gather(1, tokens)
    penalized = torch.where(there < 0, there * repetition_penalty, there / repetition_penalty)
    return logits.scatter_(1, tokens, penalized)
