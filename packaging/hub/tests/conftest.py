import kernels
import pytest
import torch

# Without a hub, LOCAL_KERNELS=REPOSITORY=FOLDER makes `kernels` load the build in a folder.
REPOSITORY = "kernels-community/selective-scan"


@pytest.fixture(scope="session")
def selective_scan():
    return kernels.get_kernel(REPOSITORY, version=1)


@pytest.fixture(params=["cpu", "cuda"])
def device(request, selective_scan) -> torch.device:
    backend = selective_scan.backends()[request.param]
    if not backend.available:
        pytest.skip(backend.reason)
    return torch.device(request.param)
