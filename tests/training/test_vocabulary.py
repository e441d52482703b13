"""Chunked losses against the plain ones of torch: values and gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from pathmark.training import linear_cross_entropy, linear_distillation


@pytest.mark.parametrize("chunk", [1, 7, 50, 1000])
def test_cross_entropy(chunk):
    torch.manual_seed(0)
    hidden, head = torch.randn(9, 6, requires_grad=True), torch.randn(50, 6, requires_grad=True)
    labels = torch.randint(50, (9,))
    ours = linear_cross_entropy(hidden, head, labels, scale=0.5, chunk=chunk)
    gradients = torch.autograd.grad(ours, (hidden, head))
    plain = F.cross_entropy(0.5 * hidden @ head.T, labels)
    torch.testing.assert_close(ours, plain)
    for mine, theirs in zip(gradients, torch.autograd.grad(plain, (hidden, head)), strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("chunk", [1, 7, 50, 1000])
def test_distillation(chunk):
    torch.manual_seed(0)
    hidden, teacher = torch.randn(9, 6, requires_grad=True), torch.randn(9, 6)
    head = torch.randn(50, 6)
    ours = linear_distillation(hidden, teacher, head, scale=2.0, chunk=chunk)
    (gradient,) = torch.autograd.grad(ours, hidden)
    student, original = (F.log_softmax(2.0 * x @ head.T, -1) for x in (hidden, teacher))
    plain = F.kl_div(student, original, log_target=True, reduction="batchmean")
    torch.testing.assert_close(ours, plain)
    torch.testing.assert_close(gradient, torch.autograd.grad(plain, hidden)[0])


@pytest.mark.parametrize("chunk", [1, 7, 50, 1000])
def test_distillation_into_a_head_that_changes(chunk):
    torch.manual_seed(0)
    hidden, teacher = torch.randn(9, 6, requires_grad=True), torch.randn(9, 6)
    head, frozen = torch.randn(50, 6, requires_grad=True), torch.randn(50, 6)
    ours = linear_distillation(hidden, teacher, head, teacher_head_VH=frozen, scale=2.0, chunk=chunk)
    gradients = torch.autograd.grad(ours, (hidden, head))
    student, original = F.log_softmax(2.0 * hidden @ head.T, -1), F.log_softmax(2.0 * teacher @ frozen.T, -1)
    plain = F.kl_div(student, original, log_target=True, reduction="batchmean")
    torch.testing.assert_close(ours, plain)
    for mine, theirs in zip(gradients, torch.autograd.grad(plain, (hidden, head)), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_distillation_of_the_original_is_zero():
    hidden, head = torch.randn(9, 6), torch.randn(50, 6)
    assert float(linear_distillation(hidden, hidden, head)) == pytest.approx(0.0, abs=1e-5)
