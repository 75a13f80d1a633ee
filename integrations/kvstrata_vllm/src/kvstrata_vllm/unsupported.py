# SPDX-License-Identifier: Apache-2.0
"""What a user's flags are refused with."""


class Unsupported(ValueError):
    """vLLM was asked for something that kvstrata does not serve; it does not start."""
