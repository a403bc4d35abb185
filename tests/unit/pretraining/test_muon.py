import pytest
import torch

from scripts.pretraining.pretrain import Muon, orthogonal


@pytest.mark.parametrize("shape", [(3, 16, 16), (2, 16, 48), (2, 48, 16)])
def test_singular_values_come_near_one_and_singular_vectors_stay(shape: tuple[int, ...]) -> None:
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    u, _, vt = torch.linalg.svd(matrices, full_matrices=False)
    singular_values = u.mT @ orthogonal(matrices) @ vt.mT
    values = torch.diagonal(singular_values, dim1=1, dim2=2)
    assert ((values > 0.3) & (values < 1.3)).all()
    assert torch.allclose(singular_values, torch.diag_embed(values), atol=1e-3)


def test_a_quadratic_is_descended_and_parameters_without_gradient_stay() -> None:
    target = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
    parameter, frozen = torch.nn.Parameter(torch.zeros(8, 8)), torch.nn.Parameter(torch.ones(8, 4))
    optimizer = Muon([parameter, frozen], lr=0.05, weight_decay=0.0)
    distance = (parameter - target).pow(2).sum().item()
    for _ in range(50):
        optimizer.zero_grad()
        (parameter - target).pow(2).sum().backward()
        optimizer.step()
    assert (parameter - target).pow(2).sum().item() < 0.2 * distance
    assert torch.equal(frozen, torch.ones(8, 4))


def test_a_vector_is_refused() -> None:
    with pytest.raises(ValueError, match="matrices"):
        Muon([torch.nn.Parameter(torch.zeros(8))], lr=0.1)
