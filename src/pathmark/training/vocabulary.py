"""Losses over a large vocabulary that hold no more than a chunk of the logits, or of a wider head, at a time.

Shape suffixes: N tokens, H hidden size, V vocabulary, C a chunk of it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div, log_softmax

CHUNK = 16_384
"""Vocabulary entries at a time."""


def _log_partition(hidden_NH: Tensor, head_VH: Tensor, chunk: int) -> Tensor:
    """log sum exp of the logits of each token, running over the vocabulary."""
    total_N = hidden_NH.new_full((len(hidden_NH),), float("-inf"))
    for start in range(0, len(head_VH), chunk):
        logits_NC = hidden_NH @ head_VH[start : start + chunk].float().T
        total_N = torch.logaddexp(total_N, logits_NC.logsumexp(-1))
    return total_N


def _as(head_VH: Tensor, grad_VH: Tensor | None, factor: Tensor) -> Tensor | None:
    """The head's gradient in the head's own type."""
    return None if grad_VH is None else (grad_VH * factor).to(head_VH.dtype)


class _CrossEntropy(torch.autograd.Function):
    """Mean next-token loss; gradients of hidden states and head, chunk by chunk."""

    @staticmethod
    def forward(ctx: Any, hidden_NH: Tensor, head_VH: Tensor, labels_N: Tensor, chunk: int) -> Tensor:
        z_N = _log_partition(hidden_NH, head_VH, chunk)
        ctx.save_for_backward(hidden_NH, head_VH, labels_N, z_N)
        ctx.chunk = chunk
        return (z_N - (hidden_NH * head_VH[labels_N].float()).sum(-1)).mean()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        hidden_NH, head_VH, labels_N, z_N = ctx.saved_tensors
        grad_hidden_NH = -head_VH[labels_N].float()
        grad_head_VH = None
        if ctx.needs_input_grad[1]:
            grad_head_VH = torch.zeros_like(head_VH, dtype=torch.float32).index_add_(0, labels_N, -hidden_NH)
        for start in range(0, len(head_VH), ctx.chunk):
            part_CH = head_VH[start : start + ctx.chunk].float()
            probs_NC = (hidden_NH @ part_CH.T - z_N[:, None]).exp_()
            grad_hidden_NH = grad_hidden_NH.addmm(probs_NC, part_CH)
            if grad_head_VH is not None:
                grad_head_VH[start : start + ctx.chunk].addmm_(probs_NC.T, hidden_NH)
        factor = grad / len(hidden_NH)
        return grad_hidden_NH * factor, _as(head_VH, grad_head_VH, factor), None, None


class _Distillation(torch.autograd.Function):
    """Mean KL(teacher || student), each with its head; gradients of the student's, as above."""

    @staticmethod
    def forward(
        ctx: Any, hidden_NH: Tensor, head_VH: Tensor, teacher_NH: Tensor, teacher_head_VH: Tensor, chunk: int
    ) -> Tensor:
        z_N = _log_partition(hidden_NH, head_VH, chunk)
        z_teacher_N = _log_partition(teacher_NH, teacher_head_VH, chunk)
        # sum_v p_v (t_v - s_v) - z_t + z_s, and sum_v p_v s_v = s . E_p[row of the head]
        mean_row_NH, mean_teacher_row_NH = torch.zeros_like(hidden_NH), torch.zeros_like(hidden_NH)
        for start in range(0, len(head_VH), chunk):
            part = slice(start, start + chunk)
            theirs_CH = teacher_head_VH[part].float()
            probs_NC = (teacher_NH @ theirs_CH.T - z_teacher_N[:, None]).exp_()
            mean_row_NH.addmm_(probs_NC, theirs_CH if teacher_head_VH is head_VH else head_VH[part].float())
            if teacher_head_VH is not head_VH:
                mean_teacher_row_NH.addmm_(probs_NC, theirs_CH)
        if teacher_head_VH is head_VH:
            mean_teacher_row_NH = mean_row_NH
        ctx.save_for_backward(hidden_NH, head_VH, teacher_NH, teacher_head_VH, z_N, z_teacher_N, mean_row_NH)
        ctx.chunk = chunk
        crossed_N = (teacher_NH * mean_teacher_row_NH - hidden_NH * mean_row_NH).sum(-1)
        return (crossed_N - z_teacher_N + z_N).mean()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:
        hidden_NH, head_VH, teacher_NH, teacher_head_VH, z_N, z_teacher_N, mean_row_NH = ctx.saved_tensors
        grad_hidden_NH = -mean_row_NH
        grad_head_VH = torch.zeros_like(head_VH, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        for start in range(0, len(head_VH), ctx.chunk):
            part = slice(start, start + ctx.chunk)
            part_CH = head_VH[part].float()
            probs_NC = (hidden_NH @ part_CH.T - z_N[:, None]).exp_()
            grad_hidden_NH.addmm_(probs_NC, part_CH)
            if grad_head_VH is not None:
                probs_NC -= (teacher_NH @ teacher_head_VH[part].float().T - z_teacher_N[:, None]).exp_()
                grad_head_VH[part].addmm_(probs_NC.T, hidden_NH)
        factor = grad / len(hidden_NH)
        return grad_hidden_NH * factor, _as(head_VH, grad_head_VH, factor), None, None, None


def linear_cross_entropy(
    hidden_NH: Tensor, head_VH: Tensor, labels_N: Tensor, *, scale: float = 1.0, chunk: int = CHUNK
) -> Tensor:
    """Mean of -log p(label), with logits = scale * hidden @ head.T."""
    if len(head_VH) <= chunk:  # one chunk would be all of them; what is kept is not computed again for the gradient
        return cross_entropy(hidden_NH.float() * scale @ head_VH.float().T, labels_N)
    return _CrossEntropy.apply(hidden_NH.float() * scale, head_VH, labels_N, chunk)  # type: ignore[no-any-return,no-untyped-call]


def linear_distillation(
    hidden_NH: Tensor,
    teacher_NH: Tensor,
    head_VH: Tensor,
    *,
    teacher_head_VH: Tensor | None = None,
    scale: float = 1.0,
    chunk: int = CHUNK,
) -> Tensor:
    """Mean of KL(teacher || student) over tokens.

    Without a head of its own the teacher shares the student's, which then gets no gradient.
    """
    head_VH = head_VH.detach() if teacher_head_VH is None else head_VH
    theirs_VH = head_VH if teacher_head_VH is None else teacher_head_VH.detach()
    if len(head_VH) <= chunk:  # as above
        student_NV, teacher_NV = (
            log_softmax(states_NH.float() * scale @ of_VH.float().T, dim=-1)
            for states_NH, of_VH in ((hidden_NH, head_VH), (teacher_NH, theirs_VH))
        )
        return kl_div(student_NV, teacher_NV, reduction="batchmean", log_target=True)
    return _Distillation.apply(  # type: ignore[no-any-return,no-untyped-call]
        hidden_NH.float() * scale, head_VH, teacher_NH.float() * scale, theirs_VH, chunk
    )
