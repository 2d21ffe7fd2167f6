"""torch.library.opcheck of forward ops whose last argument is save_states."""

import torch

QUICK = ("test_schema", "test_faketensor", "test_autograd_registration")
THOROUGH = (*QUICK, "test_aot_dispatch_dynamic")  # compares results


def opcheck_forward(op, arguments, tests=THOROUGH):
    """Results are compared where no states are saved: nobody writes the padding at their end."""
    torch.library.opcheck(op, (*arguments, False), test_utils=tests)
    torch.library.opcheck(op, (*arguments, True), test_utils=QUICK)
