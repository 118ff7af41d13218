"""Checks of arguments: each says the argument, its value and what is allowed."""

import pytest
import torch

from labkit.kernels.checks import check_contiguous, check_device, check_one_of, check_shape, check_tensor

CPU, META = torch.device("cpu"), torch.device("meta")
FLOATS = (torch.float32, torch.bfloat16)
x = torch.zeros(3, 2)


@pytest.mark.parametrize(
    ("check", "arguments", "message"),
    [
        (check_one_of, (3, (1, 2)), "x is 3; allowed: 1, 2"),
        (check_one_of, ("c", ("a", "b")), "x is 'c'; allowed: a, b"),
        (check_one_of, (torch.int8, FLOATS), "x is torch.int8; allowed: torch.float32, torch.bfloat16"),
        (check_shape, (x, (2, 3)), "x is (3, 2); allowed: (2, 3)"),
        (check_contiguous, (x.t(),), "x has strides (1, 2); allowed: contiguous"),
        (check_device, (x, META, "w's"), "x is on cpu; allowed: w's device, meta"),
        # the first that is wrong is named
        (check_tensor, (x.t().int(), (3, 2), FLOATS, META, "w's"), "x is (2, 3); allowed: (3, 2)"),
        (check_tensor, (x.t().half(), (2, 3), FLOATS[:1], META, "w's"), "x is torch.float16; allowed: torch.float32"),
        (check_tensor, (x.t(), (2, 3), FLOATS, META, "w's"), "x has strides (1, 2); allowed: contiguous"),
        (check_tensor, (x, (3, 2), FLOATS, META, "w's"), "x is on cpu; allowed: w's device, meta"),
    ],
)
def test_what_is_not_allowed_is_named(check, arguments, message):
    with pytest.raises(ValueError) as raised:  # noqa: PT011 (the whole message is compared)
        check("x", *arguments)
    assert str(raised.value) == message


def test_what_is_allowed_passes():
    check_one_of("x", 2, (1, 2))
    check_tensor("x", x, (3, 2), FLOATS, CPU, "x's")
