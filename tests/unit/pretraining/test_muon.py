import pytest
import torch

from scripts.pretraining.pretrain import Muon, orthogonal


@pytest.mark.parametrize("shape", [(3, 16, 16), (2, 16, 48), (2, 48, 16)])
def test_singular_values_come_near_one_and_singular_vectors_stay(shape: tuple[int, ...]) -> None:
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    u, _, vt = torch.linalg.svd(matrices, full_matrices=False)
    seen = u.mT @ orthogonal(matrices) @ vt.mT
    values = torch.diagonal(seen, dim1=1, dim2=2)
    assert ((values > 0.3) & (values < 1.3)).all()
    assert torch.allclose(seen, torch.diag_embed(values), atol=1e-3)


def test_a_quadratic_is_descended_and_what_has_no_gradient_stays() -> None:
    target = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
    moved, still = torch.nn.Parameter(torch.zeros(8, 8)), torch.nn.Parameter(torch.ones(8, 4))
    optimizer = Muon([moved, still], lr=0.05, weight_decay=0.0)
    before = (moved - target).pow(2).sum().item()
    for _ in range(50):
        optimizer.zero_grad()
        (moved - target).pow(2).sum().backward()
        optimizer.step()
    assert (moved - target).pow(2).sum().item() < 0.2 * before
    assert torch.equal(still, torch.ones(8, 4))


def test_a_vector_is_refused() -> None:
    with pytest.raises(ValueError, match="matrices"):
        Muon([torch.nn.Parameter(torch.zeros(8))], lr=0.1)
