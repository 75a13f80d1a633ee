# SPDX-License-Identifier: Apache-2.0
"""Stands in for Mooncake's package under the real agent, in tests."""
